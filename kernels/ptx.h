// The only place with inline PTX: each instruction is a named function, with a twin for the CPU shim (shim/cuda_cpu.h)
// below it. Also here: what nvcc and the shim spell differently (KERNEL, DYN_SMEM, bf16). Included first by every .cu
// file; reductions and layouts are in common.cuh.
//
// Programmatic dependent launch, the rules for every kernel: (1) issue the first weight loads, (2)
// pdl_launch_dependents, (3) pdl_wait, (4) touch activations, KV, State. Before pdl_wait only weights and constants may
// be read and nothing may be written. Every thread of every block calls pdl_wait, also in blocks without work: a
// successor takes "my predecessor is done" to mean "all before it are done". Activations are never read through
// load_weights (ld.global.nc), __ldg, or a const __restrict__ pointer: the compiler may move such loads above the wait.
#pragma once
#ifdef CPU_SHIM
  #include "shim/cuda_cpu.h"
#else
  #include <cuda_bf16.h>
  #include <cuda_fp16.h>
  #include <stdint.h>
  #define DYN_SMEM(type, name)                                             \
    extern __shared__ __align__(16) unsigned char dynamic_shared_memory[]; \
    type* name = reinterpret_cast<type*>(dynamic_shared_memory)
  #define SHARED(type, name, ...) __shared__ __align__(16) type name __VA_ARGS__
#endif
// Shared memory: SHARED(float, partial, [8][32]); and, sized at launch, DYN_SMEM(uint4, ring).

typedef __nv_bfloat16 bf16;

// A kernel that Rust may ask for by name: KERNEL(linear_m8, LinearParams, 512) { linear<..>(p); }
// Arguments after the params type are those of __launch_bounds__. Templates behind it live in an anonymous namespace.
#ifdef CPU_SHIM
  #define CPU_FIRST(a, ...) a
  #define KERNEL(name, Params, ...)                                                                    \
    extern "C" void name(const Params p);                                                              \
    static cpu::Register register_##name(#name, CPU_FIRST(__VA_ARGS__, 0), sizeof(Params),             \
                                         [](const void* a) { name(*static_cast<const Params*>(a)); }); \
    extern "C" void name(const Params p)
  // A collective: its params hold a CommRanks `comm`, and its ranks' launches run together.
  #define COLLECTIVE(name, Params, ...)                                                                                \
    extern "C" void name(const Params p);                                                                              \
    static cpu::Register register_##name(                                                                              \
        #name, CPU_FIRST(__VA_ARGS__, 0), sizeof(Params), [](const void* a) { name(*static_cast<const Params*>(a)); }, \
        [](const void* a) {                                                                                            \
          const auto& c = static_cast<const Params*>(a)->comm;                                                         \
          return cpu::Group{c.window[0], c.poison, c.ranks};                                                           \
        });                                                                                                            \
    extern "C" void name(const Params p)
#else
  #define COLLECTIVE KERNEL
  #define KERNEL(name, Params, ...) \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const __grid_constant__ Params p)
#endif

// ---- programmatic dependent launch ----
__device__ __forceinline__ void pdl_launch_dependents() {
#ifndef CPU_SHIM
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void pdl_wait() {
#ifndef CPU_SHIM
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// threadIdx.x, read anew: for code after a long loop, so that what follows from it is not held in registers through the
// loop.
__device__ __forceinline__ int thread_index_anew() {
#ifdef CPU_SHIM
  return threadIdx.x;
#else
  int r;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(r));
  return r;
#endif
}

// Asks the compiler for v in a register here, so that work does not slip behind a wait or a barrier, onto the way that
// others wait for (ptxas may still move some of it). A pointer comes out without its address space: only for those that
// the loads of this file take.
__device__ __forceinline__ void have_now(int& v) {
#ifndef CPU_SHIM
  asm volatile("" : "+r"(v));
#endif
}
template <class T>
__device__ __forceinline__ void have_now(T*& v) {
#ifndef CPU_SHIM
  asm volatile("" : "+l"(v));
#endif
}

// ---- shared memory by address: one register, computed once (on sm_90 the compiler otherwise rebuilds it at each use)
// ----
#ifdef CPU_SHIM
typedef char* SharedAddress;  // counts bytes
#else
typedef int SharedAddress;
#endif
__device__ __forceinline__ SharedAddress shared_address(void* p) {
#ifdef CPU_SHIM
  return static_cast<char*>(p);
#else
  return (int)__cvta_generic_to_shared(p);
#endif
}
__device__ __forceinline__ void store_shared(SharedAddress at, const float (&v)[4]) {
#ifdef CPU_SHIM
  std::memcpy(at, v, 16);
#else
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3])
               : "memory");
#endif
}
__device__ __forceinline__ float load_shared(SharedAddress at) {
#ifdef CPU_SHIM
  float r;
  std::memcpy(&r, at, 4);
  return r;
#else
  float r;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(at) : "memory");
  return r;
#endif
}

// ---- loads and stores ----
// 16 bytes of weights or constants, used once: not kept in L1. Legal before pdl_wait.
__device__ __forceinline__ uint4 load_weights(const uint4* p) {
#ifdef CPU_SHIM
  return *p;
#else
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p));
  return r;
#endif
}
// 8 and 4 bytes of the same kind.
__device__ __forceinline__ uint2 load_weights(const uint2* p) {
#ifdef CPU_SHIM
  return *p;
#else
  uint2 r;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(p));
  return r;
#endif
}
__device__ __forceinline__ uint32_t load_weights(const uint32_t* p) {
#ifdef CPU_SHIM
  return *p;
#else
  uint32_t r;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(r) : "l"(p));
  return r;
#endif
}
// 16 bytes of constants that other warps or later tiles want too (norm weights): kept in L1. Legal before pdl_wait.
__device__ __forceinline__ uint4 load_constants(const uint4* p) {
#ifdef CPU_SHIM
  return *p;
#else
  uint4 r;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
#endif
}
// 16 bytes of activations, coherent with what earlier kernels wrote; may be kept in L1. Only after pdl_wait.
__device__ __forceinline__ uint4 load_activations(const uint4* p) {
#ifdef CPU_SHIM
  return *p;
#else
  uint4 r;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p)
               : "memory");
  return r;
#endif
}
// One number, so that nothing waits for it before it is used: a constant as raw bits (legal before pdl_wait), an
// activation (only after it).
__device__ __forceinline__ unsigned short load_constant_bits(const bf16* p) {
#ifdef CPU_SHIM
  return __bfloat16_as_ushort(*p);
#else
  unsigned short r;
  asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(r) : "l"(p));
  return r;
#endif
}
__device__ __forceinline__ float load_activation(const float* p) {
#ifdef CPU_SHIM
  return *p;
#else
  float r;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(r) : "l"(p) : "memory");
  return r;
#endif
}
// Asks L2 for the 32 bytes at p. L2 is where all SMs meet, so this is legal before pdl_wait even for what earlier
// kernels may still write.
__device__ __forceinline__ void prefetch_l2(const void* p) {
#ifdef CPU_SHIM
  (void)p;
#else
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}
// Asks L2 for `bytes` from p on, both multiples of 16: one instruction, whatever the size.
__device__ __forceinline__ void prefetch_l2(const void* p, unsigned bytes) {
#ifdef CPU_SHIM
  (void)p, (void)bytes;
#else
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}
// Brings the line at p into L1, for loads that follow: a load whose result nobody waits for. Activations: only after
// pdl_wait.
__device__ __forceinline__ void touch(const void* p) {
#ifdef CPU_SHIM
  (void)p;
#else
  unsigned r;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
#endif
}
// A word as L2 has it now, which leaves no copy in L1 for later loads to find: before pdl_wait it is a guess.
__device__ __forceinline__ int load_current(const int* p) {
#ifdef CPU_SHIM
  return *p;
#else
  int r;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
#endif
}
// atomicInc that releases what this thread, and before the last block barrier its block, wrote, and acquires what
// earlier arrivals released.
__device__ __forceinline__ unsigned atomic_increment(unsigned* p, unsigned limit) {
#ifdef CPU_SHIM
  return atomicInc(p, limit);
#else
  unsigned r;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(r) : "l"(p), "r"(limit) : "memory");
  return r;
#endif
}
// A word in pinned host memory, or one that another block polls: everything this thread wrote before is visible to who
// sees the word.
__device__ __forceinline__ void store_release_system(unsigned* p, unsigned v) {
#ifdef CPU_SHIM
  cpu::fence_system();
  cpu::store_system(p, v, 4);
#else
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
#endif
}

// ---- between GPUs ----
// Stores that other GPUs see, and loads of what they store or hold, past L1. Across PCIe 8 bytes arrive whole, 16 may
// arrive in two parts; what arrives when is for flags, fences and values to say.
__device__ __forceinline__ void store_system(uint4* p, const uint4& v) {
#ifdef CPU_SHIM
  cpu::store_system(p, v.x | (uint64_t)v.y << 32, 8);
  cpu::store_system(reinterpret_cast<char*>(p) + 8, v.z | (uint64_t)v.w << 32, 8);
#else
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
#endif
}
__device__ __forceinline__ void store_system(unsigned* p, unsigned v) {
#ifdef CPU_SHIM
  cpu::store_system(p, v, 4);
#else
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
#endif
}
__device__ __forceinline__ uint4 load_system(const uint4* p) {
#ifdef CPU_SHIM
  cpu::before_load(p, 16);
  return *p;
#else
  uint4 r;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p)
               : "memory");
  return r;
#endif
}
__device__ __forceinline__ unsigned load_system(const unsigned* p) {
#ifdef CPU_SHIM
  return *(const volatile unsigned*)p;
#else
  unsigned r;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
#endif
}
// What was stored before the word's release is visible to whoever sees it: this thread, and after a block barrier all
// of its block.
__device__ __forceinline__ unsigned load_acquire_system(const unsigned* p) {
#ifdef CPU_SHIM
  return *(const volatile unsigned*)p;
#else
  unsigned r;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(r) : "l"(p) : "memory");
  return r;
#endif
}
// Every GPU sees what this thread wrote or saw before, and after a block barrier what its block did, before what it
// writes from here on.
__device__ __forceinline__ void fence_system() {
#ifdef CPU_SHIM
  cpu::fence_system();
#else
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
}
// Between two looks at a word that another GPU will write.
__device__ __forceinline__ void poll_pause() {
#ifdef CPU_SHIM
  cpu::yield(cpu::Status::Polling);
#endif
}
// Nanoseconds, in steps of up to a microsecond.
__device__ __forceinline__ unsigned long long global_timer() {
#ifdef CPU_SHIM
  return std::chrono::steady_clock::now().time_since_epoch().count();
#else
  unsigned long long r;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(r));
  return r;
#endif
}

// ---- cp.async: 16 bytes from global to shared, past the registers ----
// `valid` false writes zeros and does not read `from`.
__device__ __forceinline__ void copy_async(void* shared_to, const void* from, bool valid = true) {
#ifdef CPU_SHIM
  cpu::copy_async(shared_to, from, 16, valid ? 16 : 0);
#else
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((unsigned)__cvta_generic_to_shared(shared_to)),
               "l"(from), "r"(valid ? 16 : 0)
               : "memory");
#endif
}
__device__ __forceinline__ void copy_async_commit() {
#ifdef CPU_SHIM
  cpu::commit_copies();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Waits until at most `left` of this thread's newest groups are under way. Other threads see the bytes after a barrier.
template <int left>
__device__ __forceinline__ void copy_async_wait() {
#ifdef CPU_SHIM
  cpu::wait_copies(left);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
#endif
}

// ---- arithmetic ----
// 2^x, off by 2 in the last place at most; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef CPU_SHIM
  return exp2f(x);
#else
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
#endif
}

// Two bf16 at once, each result rounded once; subnormal numbers count.
#ifdef CPU_SHIM
__device__ __forceinline__ uint32_t bf16x2_each(uint32_t a, uint32_t b, float (*f)(float, float)) {
  const auto at = [](uint32_t w, int i) { return __uint_as_float(i ? w & 0xffff0000u : w << 16); };
  return (uint32_t)__bfloat16_as_ushort(__float2bfloat16(f(at(a, 0), at(b, 0)))) |
         (uint32_t)__bfloat16_as_ushort(__float2bfloat16(f(at(a, 1), at(b, 1)))) << 16;
}
#endif
__device__ __forceinline__ uint32_t bf16x2_mul(uint32_t a, uint32_t b) {
#ifdef CPU_SHIM
  return bf16x2_each(a, b, [](float x, float y) { return x * y; });
#else
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#endif
}
__device__ __forceinline__ uint32_t bf16x2_sub(uint32_t a, uint32_t b) {
#ifdef CPU_SHIM
  return bf16x2_each(a, b, [](float x, float y) { return x - y; });
#else
  uint32_t r;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
#endif
}
// (a & mask) | bits in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
#ifdef CPU_SHIM
  return (a & mask) | bits;
#else
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
  return r;
#endif
}
// The largest and the smallest of a warp's numbers.
__device__ __forceinline__ unsigned warp_largest(unsigned v) {
#ifdef CPU_SHIM
  for (int o = 16; o > 0; o >>= 1) {
    const unsigned w = __shfl_xor_sync(0xffffffffu, v, o);
    v = w > v ? w : v;
  }
  return v;
#else
  return __reduce_max_sync(0xffffffffu, v);
#endif
}
__device__ __forceinline__ unsigned warp_smallest(unsigned v) {
#ifdef CPU_SHIM
  return ~warp_largest(~v);
#else
  return __reduce_min_sync(0xffffffffu, v);
#endif
}

// ---- tensor cores ----
// c[16x8] += a[16x16] b[16x8]. Lane 4g+t: a = rows g, g+8 at k 2t, 2t+1 (x, y) and 2t+8, 2t+9 (z, w); b = column g at
// the same k (b0, b1); c[0..1] = row g, columns 2t, 2t+1; c[2..3] = row g+8. A column's bits depend on that column of b
// alone.
__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint4& a, unsigned b0, unsigned b1) {
#ifdef CPU_SHIM
  const uint32_t r[4] = {a.x, a.y, a.z, a.w};
  cpu::mma_m16n8k16_bf16(c, r, b0, b1);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
#endif
}
// Four 8x8 matrices of 16-bit elements from shared memory; lane l gives the address (16-byte aligned) of row l % 8 of
// matrix l / 8.
template <bool transposed>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const void* shared_row) {
#ifdef CPU_SHIM
  cpu::ldmatrix_x4(r, shared_row, transposed);
#else
  const unsigned at = (unsigned)__cvta_generic_to_shared(shared_row);
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
#endif
}
