// RMSNorm for prefill: out = bf16(x * weight) and inv = 1 / sqrt(mean(x^2) + eps) per row; linear_prefill multiplies its sums by inv. Decode does the
// same inside linear.cu; both sum the squares in one fixed tree (row_square_sum below), so that a row's bits do not depend on the path.
#include "linear_row.cuh"

namespace {
constexpr int kRowsPerBlock = 2;   // 128 threads a row: four lanes for each of up to 32 segments

// Grid: ceil(rows / 2) blocks of 256 threads; quad q of a row owns segment q of K.
__device__ __forceinline__ void norm_rows_body(const NormParams& p) {
  SHARED(float, squares, [kRowsPerBlock][32]);
  const int in_row = threadIdx.x & 127, quad = in_row >> 2, t = in_row & 3, slot = threadIdx.x >> 7;
  const int row = blockIdx.x * kRowsPerBlock + slot;
  const int k_blocks = k_blocks_of(p.k), first = quad * p.segment_blocks, end = min(first + p.segment_blocks, k_blocks);
  pdl_launch_dependents();
  pdl_wait();
  const bool on = row < (p.n_rows ? min(*p.n_rows, p.rows) : p.rows);
  float sum = 0;
  if (on)
    for (int b = first; b < end; b++) {
      const int k = b * 32 + 8 * t;
      if (k >= p.k) continue;
      const uint4 x = load_activations(reinterpret_cast<const uint4*>(p.x + (size_t)row * p.x_stride + k));
      const uint4 g = load_constants(reinterpret_cast<const uint4*>(p.norm + k));
      sum = add_squares(sum, x);
      *reinterpret_cast<uint4*>(p.out + (size_t)row * p.out_stride + k) = times_norm(x, g);
    }
  sum = quad_sum(sum);
  if (t == 0) squares[slot][quad] = sum;
  __syncthreads();
  if (in_row == 0 && on) {
    float total = 0;
    for (int s = 0; s * p.segment_blocks < k_blocks; s++) total = __fadd_rn(total, squares[slot][s]);
    p.inv[row] = inverse_rms(total, p.k, p.eps);
  }
}
}  // namespace

KERNEL(norm_rows, NormParams, 256) { norm_rows_body(p); }
