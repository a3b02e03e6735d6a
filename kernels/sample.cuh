// What sampling and drafting share: keyed noise, the fixed-point probability mass, and 64-bit keys whose order is the
// order of preference. Everything here is integer arithmetic or single f32 operations, each rounded on its own (no
// fused multiply-add, no library logarithm), so that the GPU, the shim and the Rust twin (src/decode/sample.rs) agree
// to the bit. Used by sample.cu and draft.cu; read sample.cu next.
#pragma once
#include "common.cuh"

namespace {

typedef unsigned long long u64;

__device__ __forceinline__ u64 larger(u64 a, u64 b) { return a > b ? a : b; }
__device__ __forceinline__ u64 smaller(u64 a, u64 b) { return a < b ? a : b; }
__device__ __forceinline__ float mul_add(float a, float b, float c) { return __fadd_rn(__fmul_rn(a, b), c); }

// ---- noise: g(seed, position, id) = -ln(-ln(1 - v)), v = (bits + 0.5) / 2^32 ----
// Philox4x32-10 (Salmon et al., 2011); word id % 4 of counter id / 4 belongs to token `id`.
__device__ __forceinline__ uint4 philox(unsigned c0, unsigned c1, unsigned c2, unsigned c3, u64 seed) {
  unsigned k0 = (unsigned)seed, k1 = (unsigned)(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u64 a = (u64)0xD2511F53u * c0, b = (u64)0xCD9E8D57u * c2;
    c0 = (unsigned)(b >> 32) ^ c1 ^ k0;
    c2 = (unsigned)(a >> 32) ^ c3 ^ k1;
    c1 = (unsigned)b;
    c3 = (unsigned)a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return make_uint4(c0, c1, c2, c3);
}
__device__ __forceinline__ uint4 noise_bits(u64 seed, int position, unsigned quad) {
  return philox(quad, (unsigned)position, 0u, 0x766f6c6cu, seed);
}
__device__ __forceinline__ unsigned noise_bits_of(u64 seed, int position, unsigned id) {
  const uint4 w = noise_bits(seed, position, id >> 2);
  return id & 2 ? (id & 1 ? w.w : w.z) : (id & 1 ? w.y : w.x);
}
// ln(1 + f) for f in [-0.2929, 0.4143]: 2 artanh(f / (2 + f)); the first term left out is below 3e-9 of the result.
__device__ __forceinline__ float ln_1_plus(float f) {
  const float s = __fdiv_rn(f, __fadd_rn(2.0f, f)), w = __fmul_rn(s, s);
  float t = mul_add(w, 1.0f / 9, 1.0f / 7);
  t = mul_add(w, t, 1.0f / 5);
  t = mul_add(w, t, 1.0f / 3);
  t = mul_add(w, t, 1.0f);
  return __fmul_rn(__fadd_rn(s, s), t);
}
// ln(x), x positive and normal: x = 2^k m with m in [sqrt(1/2), sqrt(2)).
__device__ __forceinline__ float ln(float x) {
  const int bits = __float_as_int(x), k = (bits - 0x3f3504f3) >> 23;
  return mul_add((float)k, 0.693147181f, ln_1_plus(__fadd_rn(__int_as_float(bits - k * (1 << 23)), -1.0f)));
}
// In [-3.14, 22.88]. Near v = 0 the logarithm is taken of 1 - v with v itself at hand, near v = 1 with 1 - v at hand:
// relative error 1e-6 at both ends.
__device__ __forceinline__ float noise(unsigned bits) {
  const float to_unit = 1.0f / 4294967296.0f;
  const float e = bits < 1257966797u
                      ? -ln_1_plus(-__fmul_rn(__fadd_rn((float)bits, 0.5f), to_unit))  // v < 1 - sqrt(1/2)
                      : -ln(__fmul_rn(__fadd_rn((float)~bits, 0.5f), to_unit));
  return -ln(e);
}

// ---- probability as an integer: exp(z) * 2^40, z <= 0, rounded to nearest even; sums of these do not depend on their
// order ----
__device__ __forceinline__ u64 probability_mass(float z) {
  if (!(z > -29.0f)) return 0;  // below 2^-41 everything rounds to 0
  const float n = rintf(__fmul_rn(z, kLog2E));
  const float r =
      mul_add(n, 2.12194440e-4f, mul_add(n, -0.693359375f, z));  // ln 2 in two parts; the first product is exact
  float e = mul_add(r, 1.0f / 5040, 1.0f / 720);
  e = mul_add(r, e, 1.0f / 120);
  e = mul_add(r, e, 1.0f / 24);
  e = mul_add(r, e, 1.0f / 6);
  e = mul_add(r, e, 0.5f);
  e = mul_add(r, e, 1.0f);
  e = mul_add(r, e, 1.0f);
  return __float2ull_rn(__fmul_rn(e, __int_as_float(((int)n + 40 + 127) << 23)));
}

// ---- keys: a larger key is preferred; among equal values the lower id. 0 is less than every key of a number. NaN has
// no place here. ----
__device__ __forceinline__ u64 preference(float value, unsigned id) {
  const unsigned u = __float_as_uint(__fadd_rn(value, 0.0f));  // -0 becomes +0
  return (u64)(u & 0x80000000u ? ~u : u | 0x80000000u) << 32 | ~id;
}
__device__ __forceinline__ unsigned id_of(u64 key) { return ~(unsigned)key; }
__device__ __forceinline__ float value_of(u64 key) {
  const unsigned u = (unsigned)(key >> 32);
  return __uint_as_float(u & 0x80000000u ? u & 0x7fffffffu : ~u);
}

// ---- the largest of a row's logits, from the maxima that the head's blocks left; NaN never wins, so that a row of NaN
// gives -inf ---- Key over i = first, first + step, ..; the head's row 0 is token first_id.
__device__ __forceinline__ u64 head_max(const float* max_value, const int* max_id, int n_max, int row, int first,
                                        int step, int first_id = 0) {
  u64 best = 0;
  for (int i = first; i < n_max; i += step) {
    const size_t at = (size_t)row * n_max + i;
    best = larger(best, preference(max_value[at], (unsigned)max_id[at] + first_id));
  }
  return best;
}
__device__ __forceinline__ u64 warp_max(u64 v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v = larger(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}

// ---- block-wide, for any whole number of warps; `shared` has a word for each warp; all threads get the result ----
__device__ __forceinline__ u64 block_max(u64 v, u64* shared) {
  v = warp_max(v);
  __syncthreads();  // `shared` may still be read from an earlier call
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = v;
  __syncthreads();
  for (int w = 0; w < (int)(blockDim.x >> 5); w++) v = larger(v, shared[w]);
  return v;
}
// Sum of the values of all threads before this one; *total is the sum of all.
__device__ __forceinline__ u64 block_scan(u64 v, u64* shared, u64* total) {
  u64 sum = v;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const u64 before = __shfl_up_sync(0xffffffffu, sum, o);
    if ((int)(threadIdx.x & 31) >= o) sum += before;
  }
  __syncthreads();
  if ((threadIdx.x & 31) == 31) shared[threadIdx.x >> 5] = sum;
  __syncthreads();
  u64 before = 0, all = 0;
  for (int w = 0; w < (int)(blockDim.x >> 5); w++) {
    if (w < (int)(threadIdx.x >> 5)) before += shared[w];
    all += shared[w];
  }
  *total = all;
  return before + sum - v;
}

// The first 16 n_quads bytes of a struct in device memory, asked for at once instead of field by field as they are
// needed; the rest is zero.
template <int n_quads, class T>
__device__ __forceinline__ T load_front(const T* p) {
  static_assert(n_quads * 16 <= sizeof(T) && sizeof(T) % 16 == 0, "whole quads");
  uint4 q[sizeof(T) / 16] = {};
#pragma unroll
  for (int i = 0; i < n_quads; i++) q[i] = load_activations(reinterpret_cast<const uint4*>(p) + i);
  T t;
  memcpy(&t, q, sizeof(T));
  return t;
}

// How many tokens the sequence may still take.
__device__ __forceinline__ int room_left(const State& s, const SamplingParams& o) {
  return min(o.max_tokens - s.n_output, o.context - s.history_length);
}
// One word of a pass's record in pinned host memory. Each word carries its pass number, so that the host needs no fence
// to know that it is new.
__device__ __forceinline__ void write_record(u64* ring, unsigned pass, int word, unsigned value) {
  *(volatile u64*)(ring + (pass % RECORDS) * RECORD_WORDS + word) = (u64)pass << 32 | value;
}

}  // namespace
