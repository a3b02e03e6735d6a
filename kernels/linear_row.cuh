// The arithmetic of one row of a linear that decode (linear.cu), prefill (linear_prefill.cu), norm.cu and embed.cu must
// share to the bit: RMSNorm and the epilogue. Explicitly rounded operations, so that no compiler fuses them differently
// in different kernels.
//
// The sum of squares of a row is one fixed tree: 16 columns of a tile, column c with c + 8 first, then neighbours (16
// lanes by xor in linear.cu, tile_square_sum elsewhere); then lane l of a warp adds tiles l, l + 32, .. in order; then
// warp_sum.
#pragma once
#include "common.cuh"

namespace {

// ---- RMSNorm ----
__device__ __forceinline__ float square(float x) { return __fmul_rn(x, x); }
// 16 consecutive columns of a row.
struct Tile {
  float v[16];
};
__device__ __forceinline__ void unpack(const uint4& w, float* v) {
  v[0] = bf16_low(w.x);
  v[1] = bf16_high(w.x);
  v[2] = bf16_low(w.y);
  v[3] = bf16_high(w.y);
  v[4] = bf16_low(w.z);
  v[5] = bf16_high(w.z);
  v[6] = bf16_low(w.w);
  v[7] = bf16_high(w.w);
}
__device__ __forceinline__ Tile tile_of(const uint4& a, const uint4& b) {
  Tile tile;
  unpack(a, tile.v);
  unpack(b, tile.v + 8);
  return tile;
}
// Activations: after pdl_wait.
__device__ __forceinline__ Tile load_tile(const bf16* x) {
  const uint4* from = reinterpret_cast<const uint4*>(x);
  return tile_of(load_activations(from), load_activations(from + 1));
}
__device__ __forceinline__ Tile load_tile(const float* x) {
  Tile tile;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint4 q = load_activations(reinterpret_cast<const uint4*>(x) + i);
    tile.v[i * 4] = __uint_as_float(q.x);
    tile.v[i * 4 + 1] = __uint_as_float(q.y);
    tile.v[i * 4 + 2] = __uint_as_float(q.z);
    tile.v[i * 4 + 3] = __uint_as_float(q.w);
  }
  return tile;
}
__device__ __forceinline__ void store_tile(bf16* to, const Tile& tile) {
#pragma unroll
  for (int i = 0; i < 16; i += 8)
    *reinterpret_cast<uint4*>(to + i) =
        make_uint4(bf16_pair(tile.v[i], tile.v[i + 1]), bf16_pair(tile.v[i + 2], tile.v[i + 3]),
                   bf16_pair(tile.v[i + 4], tile.v[i + 5]), bf16_pair(tile.v[i + 6], tile.v[i + 7]));
}
__device__ __forceinline__ void store_tile(float* to, const Tile& tile) {
#pragma unroll
  for (int i = 0; i < 16; i += 4)
    *reinterpret_cast<float4*>(to + i) = make_float4(tile.v[i], tile.v[i + 1], tile.v[i + 2], tile.v[i + 3]);
}
// Times the norm weight of these columns (a constant).
__device__ __forceinline__ Tile times_norm(const Tile& x, const bf16* norm) {
  Tile w = tile_of(load_constants(reinterpret_cast<const uint4*>(norm)),
                   load_constants(reinterpret_cast<const uint4*>(norm) + 1));
#pragma unroll
  for (int i = 0; i < 16; i++) w.v[i] = __fmul_rn(x.v[i], w.v[i]);
  return w;
}
__device__ __forceinline__ float tile_square_sum(const Tile& x) {
  float s[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    s[i] = __fadd_rn(__fadd_rn(square(x.v[2 * i]), square(x.v[2 * i + 8])),
                     __fadd_rn(square(x.v[2 * i + 1]), square(x.v[2 * i + 9])));
  return __fadd_rn(__fadd_rn(s[0], s[1]), __fadd_rn(s[2], s[3]));
}
__device__ __forceinline__ float inverse_rms(float square_sum, int k, float eps) {
  return rsqrtf(__fadd_rn(__fmul_rn(square_sum, __fdiv_rn(1.0f, (float)k)), eps));
}

// ---- epilogue ----
__device__ __forceinline__ float silu(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, __expf(-x))); }

// Stores y for output n of a row (all epilogues but Silu). `extra` is the stream's number, already loaded. Returns what
// the row now holds.
__device__ __forceinline__ float store_output(const LinearParams& p, int row, int n, float y, float extra) {
  const size_t at = (size_t)row * p.out_stride + n;
  if (p.epilogue == kEpilogueLogits) {
    p.logits[at] = y;
    return y;
  }
  if (p.stream) {
    if (p.epilogue == kEpilogueResidual) y = __fadd_rn(extra, y);
    p.stream[at] = y;
    if (p.tap) p.tap[(size_t)row * p.tap_stride + n] = __float2bfloat16(y);
    return y;
  }
  const bf16 v = __float2bfloat16(y);
  p.out[at] = v;
  return __bfloat162float(v);
}

}  // namespace
