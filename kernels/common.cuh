// What several kernels share: bf16 in registers, warp sums, the re-tiled weight layout, the segments of K, and the
// last-arriver counter. The layout and the segments are part of the meaning of a weight: see "Where bits come from" in
// ARCHITECTURE.md.
#pragma once
#include "ptx.h"
#include "params.h"

namespace {

// ---- bf16 pairs: the low half is the element with the lower index ----
__device__ __forceinline__ float bf16_low(uint32_t w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float bf16_high(uint32_t w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
  return (uint32_t)__bfloat16_as_ushort(v.x) | (uint32_t)__bfloat16_as_ushort(v.y) << 16;
}

constexpr float kLog2E = 1.44269504f;

// ---- sums over a warp, the same in all lanes, in one fixed order ----
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, o));
  return v;
}

// ---- rotation ----
// sin and cos of x >= 0, off by at most 2e-7 up to 2^20: x - k pi/2 is exact in f32 (both are multiples of 2^-23 below
// 1), pi/2's own error is added back. (sinf has a slow path with a stack frame, which every thread would pay for in
// registers.)
__device__ __forceinline__ void sine_cosine(float x, float& sine, float& cosine) {
  const float k = rintf(x * 0.636619772f);
  const float r = __fmaf_rn(k, 4.37113883e-8f, __fmaf_rn(-k, 1.57079637f, x)), r2 = __fmul_rn(r, r);
  const float s = __fmaf_rn(
      __fmul_rn(r, r2),
      __fmaf_rn(r2, __fmaf_rn(r2, __fmaf_rn(r2, 2.7557319e-6f, -1.98412698e-4f), 8.33333333e-3f), -0.166666667f), r);
  const float c = __fmaf_rn(
      __fmul_rn(r2, r2),
      __fmaf_rn(r2, __fmaf_rn(r2, __fmaf_rn(r2, -2.7557319e-7f, 2.48015873e-5f), -1.38888889e-3f), 4.16666667e-2f),
      __fmaf_rn(r2, -0.5f, 1.f));
  const int quadrant = (int)k & 3;
  const float a = quadrant & 1 ? c : s, b = quadrant & 1 ? s : c;
  sine = quadrant & 2 ? -a : a;
  cosine = (quadrant + 1) & 2 ? -b : b;
}

// ---- the last block to arrive does the rest ----
// True in all threads of the block that arrives last of n_blocks; the counter is then back at 0 for the next launch.
// What the other blocks wrote before is visible to it. `flag` is a word of shared memory. Contains two block barriers.
__device__ __forceinline__ bool last_to_arrive(unsigned* counter, unsigned n_blocks, unsigned* flag) {
  __syncthreads();
  if (threadIdx.x == 0) *flag = atomic_increment(counter, n_blocks - 1) == n_blocks - 1;
  __syncthreads();
  return *flag;
}

// ---- re-tiled weights: [n / 16][k / 32][2][32 lanes] uint4, the order in which mma_bf16 takes them as its 16-row
// operand ---- In a block of 32 k lane 4g+t owns k = 8t..8t+7 of rows g and g+8; half h holds its elements 4h..4h+3, so
// that 16 contiguous bytes of a row of activations are both column operands of that block. Index of element (n, k) in
// 16-bit units; k_blocks = ceil(K / 32).
__device__ __forceinline__ size_t retiled_index(int n, int k, int k_blocks) {
  const int lane = (n & 7) * 4 + ((k & 31) >> 3), half = (k & 7) >> 2, e = k & 3;
  return ((((size_t)(n >> 4) * k_blocks + (k >> 5)) * 2 + half) * 32 + lane) * 8 + (e >> 1) * 4 + ((n >> 3) & 1) * 2 +
         (e & 1);
}

// ---- segments of K: at most kSegments, each summed in mma order from zero, then added in ascending order ----
__host__ __device__ __forceinline__ int k_blocks_of(int k) { return (k + 31) / 32; }
__host__ __device__ __forceinline__ int segment_units_of(int units) { return (units + kSegments - 1) / kSegments; }

}  // namespace
