// RMSNorm for prefill: normed = bf16(x * weight) and inv = 1 / sqrt(mean(x^2) + eps) per row; linear_prefill multiplies its sums by inv. In decode the producers of
// a row write normed and squares themselves (linear.cu, embed.cu), to the same bits.
#include "linear_row.cuh"

namespace {
// Grid: ceil(rows / 8) blocks of 256 threads, one warp a row; a lane takes tiles of 16 columns.
__device__ __forceinline__ void norm_rows_body(const NormParams& p) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (row >= (p.n_rows ? min(*p.n_rows, p.rows) : p.rows)) return;
  const uint4* x = reinterpret_cast<const uint4*>(p.x + (size_t)row * p.x_stride);
  const uint4* norm = reinterpret_cast<const uint4*>(p.norm);
  uint4* normed = reinterpret_cast<uint4*>(p.normed + (size_t)row * p.normed_stride);
  float sum = 0;
  for (int tile = lane; tile < p.k / 16; tile += 32) {
    const uint4 a = load_activations(x + tile * 2), b = load_activations(x + tile * 2 + 1);
    normed[tile * 2] = times_norm(a, load_constants(norm + tile * 2));
    normed[tile * 2 + 1] = times_norm(b, load_constants(norm + tile * 2 + 1));
    const float s = tile_square_sum(a, b);
    if (p.squares) p.squares[(size_t)row * (p.k / 16) + tile] = s;
    sum = __fadd_rn(sum, s);
  }
  sum = warp_sum(sum);
  if (lane == 0) p.inv[row] = inverse_rms(sum, p.k, p.eps);
}
}  // namespace

KERNEL(norm_rows, NormParams, 256) { norm_rows_body(p); }
