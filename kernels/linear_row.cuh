// The arithmetic of one row of a linear that decode (linear.cu), prefill (linear_prefill.cu), norm.cu and embed.cu must share to the bit: RMSNorm and the
// epilogue. Explicitly rounded operations, so that no compiler fuses them differently in different kernels.
//
// The sum of squares of a row is one fixed tree: 16 columns of a tile, column c with c + 8 first, then neighbours (16 lanes by xor in linear.cu, tile_square_sum
// elsewhere); then lane l of a warp adds tiles l, l + 32, .. in order; then warp_sum.
#pragma once
#include "common.cuh"

namespace {

// ---- RMSNorm ----
__device__ __forceinline__ float square(float x) { return __fmul_rn(x, x); }
// Sum of the squares of 16 consecutive columns; a = columns 0..7, b = 8..15.
__device__ __forceinline__ float tile_square_sum(const uint4& a, const uint4& b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float s[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    s[i] = __fadd_rn(__fadd_rn(square(bf16_low(x[i])), square(bf16_low(y[i]))), __fadd_rn(square(bf16_high(x[i])), square(bf16_high(y[i]))));
  return __fadd_rn(__fadd_rn(s[0], s[1]), __fadd_rn(s[2], s[3]));
}
__device__ __forceinline__ float inverse_rms(float square_sum, int k, float eps) { return rsqrtf(__fadd_rn(__fmul_rn(square_sum, __fdiv_rn(1.0f, (float)k)), eps)); }
// bf16(x * norm), element by element.
__device__ __forceinline__ uint4 times_norm(const uint4& x, const uint4& g) {
  return make_uint4(bf16_pair(__fmul_rn(bf16_low(x.x), bf16_low(g.x)), __fmul_rn(bf16_high(x.x), bf16_high(g.x))),
                    bf16_pair(__fmul_rn(bf16_low(x.y), bf16_low(g.y)), __fmul_rn(bf16_high(x.y), bf16_high(g.y))),
                    bf16_pair(__fmul_rn(bf16_low(x.z), bf16_low(g.z)), __fmul_rn(bf16_high(x.z), bf16_high(g.z))),
                    bf16_pair(__fmul_rn(bf16_low(x.w), bf16_low(g.w)), __fmul_rn(bf16_high(x.w), bf16_high(g.w))));
}

// ---- epilogue ----
__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, __expf(-x))); }

// Stores y for output n of a row (all epilogues but Silu) at `out` (p.out + row * out_stride + n). `extra` is the residual, already loaded. Returns what the row
// now holds.
__device__ __forceinline__ float store_output(const LinearParams& p, int row, int n, bf16* out, float y, float extra) {
  if (p.epilogue == kEpilogueLogits) {
    p.logits[(size_t)row * p.out_stride + n] = y;
    return y;
  }
  if (p.epilogue == kEpilogueResidual) y = __fadd_rn(extra, y);
  const bf16 v = __float2bfloat16(y);
  *out = v;
  if (p.epilogue == kEpilogueResidual && p.tap) p.tap[(size_t)row * p.tap_stride + n] = v;
  return __bfloat162float(v);
}
// The same with the address made here.
__device__ __forceinline__ float store_output(const LinearParams& p, int row, int n, float y, float extra) {
  return store_output(p, row, n, p.out + (size_t)row * p.out_stride + n, y, extra);
}

}  // namespace
