// The arithmetic of one row of a linear that decode (linear.cu), prefill (linear_prefill.cu) and norm.cu must share to the bit: the fused RMSNorm and the
// epilogue. Explicitly rounded operations, so that no compiler fuses them differently in different kernels.
#pragma once
#include "common.cuh"

namespace {

// ---- RMSNorm ----
// sum + x0^2 + .. + x7^2, in order. The sum over a row: each lane t of a quad adds its 8 k of each 32-k block of a segment, quad_sum, then segments in order.
__device__ __forceinline__ float add_squares(float sum, const uint4& x) {
  const uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum = __fmaf_rn(bf16_low(w[i]), bf16_low(w[i]), sum);
    sum = __fmaf_rn(bf16_high(w[i]), bf16_high(w[i]), sum);
  }
  return sum;
}
__device__ __forceinline__ float quad_sum(float v) {
  v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 2));
}
__device__ __forceinline__ float inverse_rms(float square_sum, int k, float eps) { return rsqrtf(__fadd_rn(__fdiv_rn(square_sum, (float)k), eps)); }
// bf16(x * norm), element by element.
__device__ __forceinline__ uint4 times_norm(const uint4& x, const uint4& g) {
  return make_uint4(bf16_pair(__fmul_rn(bf16_low(x.x), bf16_low(g.x)), __fmul_rn(bf16_high(x.x), bf16_high(g.x))),
                    bf16_pair(__fmul_rn(bf16_low(x.y), bf16_low(g.y)), __fmul_rn(bf16_high(x.y), bf16_high(g.y))),
                    bf16_pair(__fmul_rn(bf16_low(x.z), bf16_low(g.z)), __fmul_rn(bf16_high(x.z), bf16_high(g.z))),
                    bf16_pair(__fmul_rn(bf16_low(x.w), bf16_low(g.w)), __fmul_rn(bf16_high(x.w), bf16_high(g.w))));
}

// ---- epilogue ----
__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, __expf(-x))); }

// Stores y for output n of a row (all epilogues but Silu). `extra` is the residual, already loaded.
__device__ __forceinline__ void store_output(const LinearParams& p, int row, int n, float y, float extra) {
  const size_t at = (size_t)row * p.out_stride + n;
  if (p.epilogue == kEpilogueLogits) {
    p.logits[at] = y;
    return;
  }
  if (p.epilogue == kEpilogueResidual) y = __fadd_rn(extra, y);
  const bf16 v = __float2bfloat16(y);
  p.out[at] = v;
  if (p.epilogue == kEpilogueResidual && p.tap) p.tap[(size_t)row * p.tap_stride + n] = v;
}

}  // namespace
