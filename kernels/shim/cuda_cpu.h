// Runs the CUDA kernels of this folder on the CPU, for tests: each CUDA thread is a fiber, one block runs at a time,
// fibers switch only at barriers and warp operations. Whatever CUDA leaves open is made hostile: threads and blocks run
// in an order shuffled by CPU_SHIM_SEED, shared memory starts as NaN in every block, cp.async lands only at its wait.
// Collectives (run_together) differ: the blocks of all ranks are resident at once, and what they store for other GPUs
// arrives late, in any order, in pieces of 8 bytes, unless a fence or the end of the kernel says otherwise. Not
// modelled: shared memory of blocks that run together, ordering of ordinary stores, speed. Warp operations must be
// reached by all lanes of the warp that have not returned. Kernels reach this file through ptx.h only; launch.h is the
// way to start them.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef __x86_64__
  #include <ucontext.h>
#endif
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
  #include <sanitizer/asan_interface.h>
  #include <sanitizer/common_interface_defs.h>
#endif
#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __constant__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __shared__ static  // one block at a time: a static is the block's shared memory (SHARED also poisons it)
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __constant__ static
#define __grid_constant__
#define DYN_SMEM(type, name) type* name = reinterpret_cast<type*>(cpu::dynamic_shared())
#define SHARED(type, name, ...)                \
  typedef type name##_type __VA_ARGS__;        \
  static cpu::Shared<name##_type> name##_here; \
  name##_type& name = name##_here.value

#ifdef __x86_64__
// Saves the callee-saved registers, stores the stack pointer in *from, continues at `to`. (ucontext makes two system
// calls.)
extern "C" void cpu_switch(void** from, void* to);
asm(".text\n.weak cpu_switch\n.type cpu_switch,@function\ncpu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\nmovq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n.size cpu_switch,.-cpu_switch\n");
#endif

namespace cpu {
#ifdef __x86_64__
struct Context {
  void* sp;
};
inline void context_switch(Context& a, Context& b) { cpu_switch(&a.sp, b.sp); }
inline void context_make(Context& c, char* stack, size_t n, void (*f)(), Context&) {
  void** p = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack + n) & ~uintptr_t(15));
  *--p = nullptr;
  *--p = reinterpret_cast<void*>(f);  // at entry rsp is 16 n + 8, as after a call
  for (int i = 0; i < 6; i++) *--p = nullptr;
  c.sp = p;
}
#else
using Context = ucontext_t;
inline void context_switch(Context& a, Context& b) { swapcontext(&a, &b); }
inline void context_make(Context& c, char* stack, size_t n, void (*f)(), Context& back) {
  getcontext(&c);
  c.uc_stack.ss_sp = stack;
  c.uc_stack.ss_size = n;
  c.uc_link = &back;
  makecontext(&c, f, 0);
}
#endif

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStack = 256 << 10;
#else
constexpr size_t kStack = 64 << 10;
#endif

enum class Status { Ready, Polling, AtBlock, AtWarp, Done };  // Polling: ready, but waiting for another block
struct Copy {
  char* to;
  char data[16];
};  // a cp.async under way
struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack;
  uint3 tid;
  int lane, warp;
  Status status;
  bool parity;
  int held;
  std::vector<Copy> open;                 // not yet committed
  std::vector<std::vector<Copy>> groups;  // committed, oldest first
};
struct Warp {
  uint64_t slot[2][32][8];
};  // two buffers: a warp operation then needs one barrier, not two
struct Flight {
  char* to;
  uint64_t value;
  int bytes, fiber;
  uint64_t barrier, due;
};  // a store for other GPUs under way; barrier: how many the block had passed; due: the turn
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline std::unique_ptr<char[]> dynamic;
inline size_t dynamic_bytes;
inline Fiber* cur;
inline Context scheduler;
inline uint3 block_idx;
inline dim3 block_dim, grid_dim;
inline int block_vote[2], block_vote_parity;  // __syncthreads_or and _count
inline uint64_t barriers, turns;              // that the block has passed, and had
inline std::vector<Flight> in_flight;         // stores of this block, oldest first
inline bool together;                         // blocks of several grids are resident
// For tests: stores that arrive as late as they may, at a fence, at the end of the kernel, or when the thread itself
// looks.
inline std::function<bool(const void* to, uint64_t value)> lingers;
inline const std::function<void()>* body;
inline const char* kernel_name = "?";
inline uint64_t rng = 1, n_launches = 0;
inline uint32_t random() {
  rng ^= rng << 13;
  rng ^= rng >> 7;
  rng ^= rng << 17;
  return rng >> 32;
}
inline void* dynamic_shared() { return dynamic.get(); }
[[noreturn]] inline void fail(const char* m) {
  std::fprintf(stderr, "cuda_cpu: %s (%s, block %u,%u,%u)\n", m, kernel_name, block_idx.x, block_idx.y, block_idx.z);
  std::abort();
}

#if defined(__SANITIZE_ADDRESS__)
inline const void* main_stack;
inline size_t main_stack_bytes;
inline void to_scheduler(bool last) {
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(last ? nullptr : &fake, main_stack, main_stack_bytes);
  context_switch(cur->context, scheduler);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}
inline void to_fiber(Fiber& f) {
  void* fake = nullptr;
  cur = &f;
  __sanitizer_start_switch_fiber(&fake, f.stack.get(), kStack);
  context_switch(scheduler, f.context);
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
}
inline void entered() { __sanitizer_finish_switch_fiber(nullptr, &main_stack, &main_stack_bytes); }
inline void reuse(char* stack) { ASAN_UNPOISON_MEMORY_REGION(stack + kStack - 4096, 4096); }
#else
inline void to_scheduler(bool) { context_switch(cur->context, scheduler); }
inline void to_fiber(Fiber& f) {
  cur = &f;
  context_switch(scheduler, f.context);
}
inline void entered() {}
inline void reuse(char*) {}
#endif
inline void yield(Status s) {
  cur->status = s;
  to_scheduler(false);
}
inline void entry() {
  entered();
  (*body)();
  cur->status = Status::Done;
  to_scheduler(true);
}

__attribute__((no_sanitize("address", "undefined"))) inline void poison(volatile char* from, volatile char* to) {
  for (; from < to; from++) *from = char(0xff);
}

// Shared memory of a kernel: known to the launcher, which turns it into NaN before each block.
inline std::vector<std::pair<char*, size_t>> shared_ranges;
template <class T>
struct Shared {
  alignas(16) T value;
  Shared() {
    char* p = reinterpret_cast<char*>(&value);
    shared_ranges.push_back({p, sizeof(T)});
    poison(p, p + sizeof(T));
  }
};

inline void start_block(int n) {
  if ((int)fibers.size() < n) fibers.resize(n);
  warps.resize((n + 31) / 32);
  for (int i = 0; i < n; i++) {
    Fiber& f = fibers[i];
    if (!f.stack) f.stack.reset(new char[kStack]);
    reuse(f.stack.get());
    f.lane = i & 31;
    f.warp = i >> 5;
    f.status = Status::Ready;
    f.parity = false;
    f.held = 0;
    f.open.clear();
    f.groups.clear();
    f.tid = {i % block_dim.x, i / block_dim.x % block_dim.y, i / (block_dim.x * block_dim.y)};
    context_make(f.context, f.stack.get(), kStack, entry, scheduler);
  }
  block_vote[0] = block_vote[1] = 0;
  block_vote_parity = 0;
  barriers = turns = 0;
}
// Every thread that can runs up to its next barrier or poll. True when all n are done.
inline bool turn(int n) {
  static std::vector<int> order;
  if ((int)order.size() != n) {
    order.resize(n);
    for (int i = 0; i < n; i++) order[i] = i;
  }
  for (int i = n - 1; i > 0; i--) std::swap(order[i], order[random() % (i + 1)]);
  bool ran = false;
  int done = 0, at_block = 0;
  turns++;
  for (int i : order) {
    Fiber& f = fibers[i];
    if (f.status != Status::Ready && f.status != Status::Polling) continue;
    ran = true;
    if (f.held > 0) {
      f.held--;
      continue;
    }
    to_fiber(f);
    if (together && random() % 64 == 0) f.held = random() % 64;  // falls behind the others
  }
  for (int w = 0; w < (n + 31) / 32; w++) {  // a warp goes on once none of its lanes is still on its way
    const int first = w * 32, end = std::min(n, first + 32);
    int waiting = 0, elsewhere = 0, polling = 0;
    for (int i = first; i < end; i++) {
      const Status s = fibers[i].status;
      if (s == Status::AtWarp) waiting++;
      else if (s == Status::Polling || (together && s == Status::Ready)) polling++;
      else if (s != Status::Done) elsewhere++;
    }
    if (waiting && elsewhere) fail("warp operation not reached by every lane");
    if (waiting && !polling) {
      ran = true;
      for (int i = first; i < end; i++)
        if (fibers[i].status == Status::AtWarp) fibers[i].status = Status::Ready;
    }
  }
  for (int i = 0; i < n; i++) {
    done += fibers[i].status == Status::Done;
    at_block += fibers[i].status == Status::AtBlock;
  }
  if (done == n) return true;
  if (at_block + done == n) {
    barriers++;
    for (int i = 0; i < n; i++)
      if (fibers[i].status == Status::AtBlock) fibers[i].status = Status::Ready;
  } else if (!ran) fail("deadlock: threads wait at different barriers");
  return false;
}
inline void reseed() {
  const char* seed = std::getenv("CPU_SHIM_SEED");
  rng = ((seed ? std::strtoull(seed, nullptr, 10) : 0) + 1) * 0x9e3779b97f4a7c15ull + ++n_launches;
  for (int i = 0; i < 4; i++) random();
}
inline void launch(dim3 grid, dim3 block, size_t smem, const std::function<void()>& f) {
  reseed();
  if (smem != dynamic_bytes || !dynamic) {
    dynamic.reset(new char[smem ? smem : 1]);
    dynamic_bytes = smem;
  }  // exact size: ASan sees the end
  grid_dim = grid;
  block_dim = block;
  body = &f;
  const size_t n_blocks = size_t(grid.x) * grid.y * grid.z;
  std::vector<uint32_t> order(n_blocks);
  for (size_t i = 0; i < n_blocks; i++) order[i] = i;
  for (size_t i = n_blocks; i-- > 1;) std::swap(order[i], order[random() % (i + 1)]);
  for (uint32_t b : order) {
    block_idx = {b % grid.x, b / grid.x % grid.y, b / (grid.x * grid.y)};
    poison(dynamic.get(), dynamic.get() + dynamic_bytes);  // NaN: reading what was never written shows
    for (auto& r : shared_ranges) poison(r.first, r.first + r.second);
    const int n = block.x * block.y * block.z;
    start_block(n);
    while (!turn(n)) {}
  }
}

// ---- grids that run together, as ranks of a collective do ----
// A store for other GPUs. It arrives when the scheduler says so (deliver), after the thread's earlier stores to the
// same place.
inline void store_system(void* to, uint64_t value, int bytes) {
  if (!together) {
    std::memcpy(to, &value, bytes);
    return;
  }
  const uint64_t due = lingers && lingers(to, value) ? ~0ull : turns + (random() % 8 ? random() % 3 : random() % 64);
  in_flight.push_back({(char*)to, value, bytes, int(cur - fibers.data()), barriers, due});
}
// Lets those stores of the present block arrive that `wanted` picks. Of two to the same place the older comes first,
// unless a fence asks for the newer alone.
template <class F>
void deliver(bool fence, F wanted) {
  std::unordered_set<char*> held;
  size_t kept = 0;
  for (Flight& f : in_flight) {
    if (wanted(f) && (fence || !held.count(f.to))) std::memcpy(f.to, &f.value, f.bytes);
    else {
      if (!fence) held.insert(f.to);
      in_flight[kept++] = f;
    }
  }
  in_flight.resize(kept);
}
// Covers what this thread stored, and what its block stored before the last barrier.
inline void fence_system() {
  const int me = int(cur - fibers.data());
  if (together) deliver(true, [&](const Flight& f) { return f.fiber == me || f.barrier < barriers; });
}
inline void before_load(const void* from, int bytes) {  // a thread sees its own stores
  const int me = int(cur - fibers.data());
  const char* p = (const char*)from;
  if (!in_flight.empty())
    deliver(true, [&](const Flight& f) { return f.fiber == me && f.to >= p && f.to < p + bytes; });
}
struct Grid {
  const char* name;
  dim3 grid;
  unsigned block;
  std::function<void()> body;
};
struct Resident {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<Flight> in_flight;
  uint3 block_idx;
  uint64_t barriers, turns;
  int vote[2], vote_parity;
  bool done;
  void swap() {
    std::swap(fibers, cpu::fibers);
    std::swap(warps, cpu::warps);
    std::swap(in_flight, cpu::in_flight);
    std::swap(block_idx, cpu::block_idx);
    std::swap(barriers, cpu::barriers);
    std::swap(turns, cpu::turns);
    std::swap(vote, block_vote);
    std::swap(vote_parity, block_vote_parity);
  }
};
// One list of launches a rank, in order. All blocks of a launch are resident together with those of the other ranks; a
// rank's next launch starts when its last has ended and all its stores have arrived. Ranks are held up at random.
inline void run_together(const std::vector<std::vector<Grid>>& streams) {
  struct Stream {
    size_t next = 0, left = 0;
    int held = 0;
    std::vector<std::unique_ptr<Resident>> blocks;
  };
  static std::vector<std::unique_ptr<Resident>> pool;  // keeps the stacks
  reseed();
  together = true;
  std::vector<Stream> all(streams.size());
  size_t unfinished = 0;
  for (auto& s : streams) unfinished += !s.empty();
  while (unfinished) {
    const size_t which = random() % streams.size();
    Stream& s = all[which];
    if (s.next == streams[which].size() || s.held-- > 0) continue;
    s.held = random() % 64 ? 0 : random() % 256;
    const Grid& g = streams[which][s.next];
    const unsigned n_blocks = g.grid.x * g.grid.y * g.grid.z;
    grid_dim = g.grid;
    block_dim = dim3(g.block);
    body = &g.body;
    kernel_name = g.name;
    if (s.blocks.empty()) {
      for (unsigned b = 0; b < n_blocks; b++) {
        if (pool.empty()) pool.push_back(std::make_unique<Resident>());
        Resident& r = *pool.back();
        r.block_idx = {b % g.grid.x, b / g.grid.x % g.grid.y, b / (g.grid.x * g.grid.y)};
        r.done = false;
        r.swap();
        start_block(g.block);
        r.swap();
        s.blocks.push_back(std::move(pool.back()));
        pool.pop_back();
      }
      s.left = n_blocks;
    }
    Resident& r = *s.blocks[random() % n_blocks];
    r.swap();
    if (r.done) turns++;  // what it stored is still on its way
    else if (turn(g.block)) {
      r.done = true;
      s.left--;
    }
    if (!in_flight.empty()) deliver(false, [&](const Flight& f) { return f.due <= turns; });
    r.swap();
    if (s.left == 0) {
      for (auto& b : s.blocks) {
        b->swap();
        deliver(true, [](const Flight&) { return true; });
        b->swap();
        pool.push_back(std::move(b));
      }
      s.blocks.clear();
      if (++s.next == streams[which].size()) unfinished--;
    }
  }
  together = false;
}
template <class T>
T exchange(T v, int from) {  // every lane gives v and takes lane `from`'s
  static_assert(sizeof(T) <= 64, "too large");
  Fiber* f = cur;
  auto& s = warps[f->warp].slot[f->parity];
  f->parity = !f->parity;
  std::memcpy(s[f->lane], &v, sizeof(T));
  yield(Status::AtWarp);
  T r;
  std::memcpy(&r, s[from & 31], sizeof(T));
  return r;
}
// Calls visit(lane, value) for all live lanes of the warp, in lane order.
template <class T, class F>
void gather(T v, F visit) {
  Fiber* f = cur;
  auto& s = warps[f->warp].slot[f->parity];
  f->parity = !f->parity;
  std::memcpy(s[f->lane], &v, sizeof(T));
  yield(Status::AtWarp);
  const int n = std::min<int>(32, block_dim.x * block_dim.y * block_dim.z - f->warp * 32);
  for (int l = 0; l < n; l++) {
    T r;
    std::memcpy(&r, s[l], sizeof(T));
    visit(l, r);
  }
}
inline int block_sum(int v) {
  int& vote = block_vote[block_vote_parity];  // all threads of one barrier see the same parity; the first through flips
                                              // it below
  vote += v;
  const int parity = block_vote_parity;
  yield(Status::AtBlock);
  const int r = block_vote[parity];
  if (block_vote_parity == parity) {
    block_vote_parity ^= 1;
    block_vote[block_vote_parity] = 0;
  }
  return r;
}

// ---- cp.async: bytes are taken at issue, the destination turns to NaN, and the bytes arrive at the wait for their
// group ----
inline void copy_async(void* to, const void* from, int bytes, int valid) {
  Copy c{(char*)to, {}};
  if (bytes != 16) fail("cp.async of a size other than 16");
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(valid ? from : nullptr)) & 15)
    fail("cp.async not aligned to 16 bytes");
  if (valid) std::memcpy(c.data, from, valid);
  std::memset(to, 0xff, 16);
  cur->open.push_back(c);
}
inline void commit_copies() {
  cur->groups.push_back(std::move(cur->open));
  cur->open.clear();
}
inline void wait_copies(int left) {
  while ((int)cur->groups.size() > left) {
    for (Copy& c : cur->groups.front()) std::memcpy(c.to, c.data, 16);
    cur->groups.erase(cur->groups.begin());
  }
}

inline float bf16_half(uint32_t w, int hi) {
  uint32_t u = hi ? w & 0xffff0000u : w << 16;
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
// mma.sync m16n8k16 row.col f32.bf16.bf16.f32, with the fragment layout of the PTX manual; products are summed in
// ascending k
inline void mma_m16n8k16_bf16(float d[4], const uint32_t a[4], uint32_t b0, uint32_t b1) {
  Fiber* f = cur;
  auto& s = warps[f->warp].slot[f->parity];
  f->parity = !f->parity;
  uint32_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  std::memcpy(s[f->lane], mine, sizeof mine);
  yield(Status::AtWarp);
  const int g = f->lane >> 2, t = f->lane & 3;
  uint32_t fa[4][4], fb[2][4][2];
  for (int q = 0; q < 4; q++) {
    std::memcpy(fa[q], s[g * 4 + q], 16);
    for (int c = 0; c < 2; c++) std::memcpy(fb[c][q], reinterpret_cast<char*>(s[(2 * t + c) * 4 + q]) + 16, 8);
  }
  for (int i = 0; i < 4; i++) {
    float x = d[i];
    for (int high = 0; high < 2; high++)
      for (int q = 0; q < 4; q++)
        for (int e = 0; e < 2; e++) x += bf16_half(fa[q][(i >> 1) + 2 * high], e) * bf16_half(fb[i & 1][q][high], e);
    d[i] = x;
  }
}
// ldmatrix .x4 (.trans): lane l gives the address of row l % 8 of matrix l / 8 and takes one register of each matrix
inline void ldmatrix_x4(uint32_t r[4], const void* row, bool trans) {
  const char* rows[32];
  gather(row, [&](int l, const void* p) { rows[l] = (const char*)p; });
  const int g = cur->lane >> 2, t = cur->lane & 3;
  for (int m = 0; m < 4; m++) {
    uint16_t e[2];
    for (int i = 0; i < 2; i++)
      std::memcpy(&e[i], trans ? rows[m * 8 + 2 * t + i] + 2 * g : rows[m * 8 + g] + 2 * (2 * t + i), 2);
    r[m] = e[0] | uint32_t(e[1]) << 16;
  }
}

// ---- the table of kernels, filled by KERNEL in ptx.h ----
struct Group {
  const void* id;
  const unsigned* poison;
  int ranks;
};  // the ranks that a launch of a collective belongs to
struct Kernel {
  unsigned max_threads;
  size_t params_bytes;
  void (*call)(const void* params);
  Group (*group)(const void* params);
};  // group: null, but for a collective
inline std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> table;
  return table;
}
struct Register {
  Register(const char* name, unsigned max_threads, size_t bytes, void (*call)(const void*),
           Group (*group)(const void*) = nullptr) {
    kernels()[name] = {max_threads, bytes, call, group};
  }
};
}  // namespace cpu

#define threadIdx (cpu::cur->tid)
#define blockIdx (cpu::block_idx)
#define blockDim (cpu::block_dim)
#define gridDim (cpu::grid_dim)
inline void __syncthreads() { cpu::yield(cpu::Status::AtBlock); }
inline int __syncthreads_count(int v) { return cpu::block_sum(v != 0); }
inline int __syncthreads_or(int v) { return cpu::block_sum(v != 0) != 0; }
inline void __syncwarp(unsigned = ~0u) { cpu::yield(cpu::Status::AtWarp); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
template <class T>
T __shfl_xor_sync(unsigned, T v, int m, int = 32) {
  return cpu::exchange(v, cpu::cur->lane ^ m);
}
template <class T>
T __shfl_down_sync(unsigned, T v, unsigned d, int = 32) {
  int l = cpu::cur->lane;
  return cpu::exchange(v, l + (int)d < 32 ? l + (int)d : l);
}
template <class T>
T __shfl_up_sync(unsigned, T v, unsigned d, int = 32) {
  int l = cpu::cur->lane;
  return cpu::exchange(v, l >= (int)d ? l - (int)d : l);
}
template <class T>
T __shfl_sync(unsigned, T v, int l, int = 32) {
  return cpu::exchange(v, l);
}
inline unsigned __ballot_sync(unsigned, int p) {
  unsigned r = 0;
  cpu::gather(p, [&](int l, int q) { r |= unsigned(q != 0) << l; });
  return r;
}
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
inline int __all_sync(unsigned, int p) {
  int r = 1;
  cpu::gather(p, [&](int, int q) { r &= q != 0; });
  return r;
}
template <class T>
unsigned __match_any_sync(unsigned, T v) {
  unsigned r = 0;
  cpu::gather(v, [&](int l, T w) { r |= unsigned(w == v) << l; });
  return r;
}
inline unsigned __reduce_add_sync(unsigned, unsigned v) {
  unsigned r = 0;
  cpu::gather(v, [&](int, unsigned w) { r += w; });
  return r;
}
inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  unsigned r = 0;
  cpu::gather(v, [&](int, unsigned w) { r = std::max(r, w); });
  return r;
}
inline unsigned __reduce_min_sync(unsigned, unsigned v) {
  unsigned r = ~0u;
  cpu::gather(v, [&](int, unsigned w) { r = std::min(r, w); });
  return r;
}
template <class T>
struct CpuSame {
  using type = T;
};
#define CPU_ATOMIC(name, expr)                \
  template <class T>                          \
  T name(T* p, typename CpuSame<T>::type v) { \
    T o = *p;                                 \
    *p = expr;                                \
    return o;                                 \
  }
CPU_ATOMIC(atomicAdd, T(o + v))
CPU_ATOMIC(atomicSub, T(o - v))
CPU_ATOMIC(atomicInc, T(o >= v ? 0 : o + 1))
CPU_ATOMIC(atomicMax, std::max(o, v))
CPU_ATOMIC(atomicMin, std::min(o, v))
CPU_ATOMIC(atomicOr, T(o | v))
CPU_ATOMIC(atomicAnd, T(o& v))
CPU_ATOMIC(atomicExch, v)
#undef CPU_ATOMIC
template <class T>
T atomicCAS(T* p, typename CpuSame<T>::type expected, typename CpuSame<T>::type v) {
  T o = *p;
  if (o == expected) *p = v;
  return o;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fmul_rn(float a, float b) { return a * b; }  // the shim is built with -ffp-contract=off
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __uint_as_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline float __int_as_float(int u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline int __float_as_int(float x) {
  int u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float __uint2float_rn(uint32_t x) { return float(x); }
inline unsigned long long __float2ull_rn(float x) { return (unsigned long long)std::nearbyint(double(x)); }
inline unsigned long long __double2ull_rn(double x) { return (unsigned long long)std::nearbyint(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((uint64_t(a) * b) >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
