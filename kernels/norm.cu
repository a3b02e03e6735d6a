// norm_rows, for prefill: normed = bf16(x * weight) and inv = 1 / sqrt(mean(x^2) + eps) per row; linear_prefill
// multiplies its sums by inv. In decode the producers of a row write normed and squares themselves (linear.cu,
// embed.cu), to the same bits. norm_step, where a norm is a step of its own: normed = x * inv * weight. x is a residual
// stream in f32, or bf16 features of the target. Grid of both: ceil(rows / 8) blocks of 256 threads, one warp a row; a
// lane takes tiles of 16 columns. Why a norm is mostly no step: docs/decisions/kernels.md#norms.
#include "linear_row.cuh"

namespace {
// The row of this warp, or -1.
__device__ __forceinline__ int row_of(const NormParams& p) {
  const int row = blockIdx.x * 8 + (threadIdx.x >> 5);
  return row < (p.n_rows ? min(*p.n_rows, p.rows) : p.rows) ? row : -1;
}
template <class X>
__device__ __forceinline__ void norm_rows_body(const NormParams& p) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = row_of(p), lane = threadIdx.x & 31;
  if (row < 0) return;
  const X* x = static_cast<const X*>(p.x) + (size_t)row * p.x_stride;
  bf16* normed = static_cast<bf16*>(p.normed) + (size_t)row * p.normed_stride;
  float sum = 0;
  for (int tile = lane; tile < p.k / 16; tile += 32) {
    const Tile t = load_tile(x + tile * 16);
    store_tile(normed + tile * 16, times_norm(t, p.norm + tile * 16));
    const float s = tile_square_sum(t);
    if (p.squares) p.squares[(size_t)row * (p.k / 16) + tile] = s;
    sum = __fadd_rn(sum, s);
  }
  sum = warp_sum(sum);
  if (lane == 0) p.inv[row] = inverse_rms(sum, p.k, p.eps);
}
template <class X, class Y>
__device__ __forceinline__ void norm_step_body(const NormParams& p) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = row_of(p), lane = threadIdx.x & 31;
  if (row < 0) return;
  const X* x = static_cast<const X*>(p.x) + (size_t)row * p.x_stride;
  Y* normed = static_cast<Y*>(p.normed) + (size_t)row * p.normed_stride;
  float sum = 0;
  for (int tile = lane; tile < p.k / 16; tile += 32) sum = __fadd_rn(sum, tile_square_sum(load_tile(x + tile * 16)));
  const float inv = inverse_rms(warp_sum(sum), p.k, p.eps);
  for (int tile = lane; tile < p.k / 16; tile += 32) {
    Tile t = load_tile(x + tile * 16);
#pragma unroll
    for (float& v : t.v) v = __fmul_rn(v, inv);
    store_tile(normed + tile * 16, times_norm(t, p.norm + tile * 16));
  }
}
}  // namespace

KERNEL(norm_rows, NormParams, 256) { norm_rows_body<float>(p); }
KERNEL(norm_rows_bf16, NormParams, 256) { norm_rows_body<bf16>(p); }
KERNEL(norm_step, NormParams, 256) { norm_step_body<float, float>(p); }
KERNEL(norm_step_bf16, NormParams, 256) { norm_step_body<bf16, bf16>(p); }
KERNEL(norm_step_bf16_stream, NormParams, 256) { norm_step_body<bf16, float>(p); }
