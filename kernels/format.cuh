// How a 16-row tile of weights is stored, and what one lane does with its part of a block of 32 k: used by linear.cu and experts.cu, written by repack.cu.
// Lane 4g+t owns k = 8t..8t+7 of rows g and g + 8 in every format, so that activations are the same operands for all.
//
//   Bf16   [tile][k_blocks][2][32 lanes] uint4                             1,024 bytes a block
//   Fp8    [tile][k_blocks][32 lanes] uint4: e4m3, row g, then row g + 8     512, and beside them scales [tile][k_blocks][2] f32 of rows 0-7 and 8-15, or none
//   Int4   [tile][k_blocks / 2, rounded up]{[32 lanes] uint4, [8 g] uint2} 576 for two blocks: a word a row and block (g and g + 8 of the first block, then of the second),
//          then bf16 scales in the same order
//
// A unit is what is loaded at once: kK numbers of K, kWords operands of x.
// Numbers become bf16 without rounding; a block's sum is multiplied by its scale in f32 before it is added. In a word of Int4 number e of a row's eight stands at
// nibble (e >> 1) + 4 (e & 1), as number + 8: then a shift and a mask leave a pair.
#pragma once
#include "common.cuh"

namespace {

struct Bf16 {
  static constexpr int kUnitBytes = 1024, kLaneBytes = 16, kK = 32, kWords = 1;
  struct Held { uint4 w[2]; };
  // `at` is the lane's first byte of a unit of the tile.
  static __device__ __forceinline__ void load(Held& held, const char* at, const float*, int) {
    held.w[0] = load_weights(reinterpret_cast<const uint4*>(at));
    held.w[1] = load_weights(reinterpret_cast<const uint4*>(at) + 32);
  }
  // acc += the unit's weights for operand `word` of x times it.
  static __device__ __forceinline__ void multiply(float (&acc)[4], const Held& held, int, const uint4& in) {
    mma_bf16(acc, held.w[0], in.x, in.y);
    mma_bf16(acc, held.w[1], in.z, in.w);
  }
};

// acc += scales of rows g and g + 8 times sum.
__device__ __forceinline__ void scaled_add(float (&acc)[4], float low, float high, const float (&sum)[4]) {
  acc[0] = __fmaf_rn(low, sum[0], acc[0]);
  acc[1] = __fmaf_rn(low, sum[1], acc[1]);
  acc[2] = __fmaf_rn(high, sum[2], acc[2]);
  acc[3] = __fmaf_rn(high, sum[3], acc[3]);
}

// The two e4m3 of a word that `selector` moves to the upper bytes of each half, as bf16: moved into place their exponent is 120 too small, for subnormal ones as well.
__device__ __forceinline__ uint32_t fp8_pair(uint32_t word, uint32_t selector) {
  const uint32_t x = permute_bytes(word, 0, selector);
  return bf16x2_mul((x & 0x7f007f00u) >> 4 | (x & 0x80008000u), 0x7b807b80u);
}
template <bool kScaled> struct Fp8Of {
  static constexpr int kUnitBytes = 512, kLaneBytes = 16, kK = 32, kWords = 1;
  struct Held { uint4 w; uint2 scales; };
  static __device__ __forceinline__ void load(Held& held, const char* at, const float* scales, int) {
    held.w = load_weights(reinterpret_cast<const uint4*>(at));
    if (kScaled) held.scales = load_weights(reinterpret_cast<const uint2*>(scales));
  }
  static __device__ __forceinline__ void multiply(float (&acc)[4], const Held& held, int, const uint4& in) {
    constexpr uint32_t kLow = 0x1404, kHigh = 0x3424;
    const uint4 a = make_uint4(fp8_pair(held.w.x, kLow), fp8_pair(held.w.z, kLow), fp8_pair(held.w.x, kHigh), fp8_pair(held.w.z, kHigh));
    const uint4 b = make_uint4(fp8_pair(held.w.y, kLow), fp8_pair(held.w.w, kLow), fp8_pair(held.w.y, kHigh), fp8_pair(held.w.w, kHigh));
    if (kScaled) {
      float sum[4] = {0, 0, 0, 0};
      mma_bf16(sum, a, in.x, in.y);
      mma_bf16(sum, b, in.z, in.w);
      scaled_add(acc, __uint_as_float(held.scales.x), __uint_as_float(held.scales.y), sum);
    } else {
      mma_bf16(acc, a, in.x, in.y);
      mma_bf16(acc, b, in.z, in.w);
    }
  }
};
typedef Fp8Of<true> Fp8;
typedef Fp8Of<false> Fp8Rows;   // one scale a row, applied to its whole sum

struct Int4 {
  static constexpr int kUnitBytes = 576, kLaneBytes = 16, kK = 64, kWords = 2;
  struct Held { uint4 w; uint2 scales; };
  static __device__ __forceinline__ void load(Held& held, const char* at, const float*, int lane) {
    held.w = load_weights(reinterpret_cast<const uint4*>(at));
    held.scales = load_weights(reinterpret_cast<const uint2*>(at + 512 - lane * 16 + (lane >> 2) * 8));
  }
  // 0x43 in the upper byte: 128 + the nibble.
  static __device__ __forceinline__ uint32_t pair(uint32_t word, int i) { return bf16x2_sub(and_or(word >> 4 * i, 0x000f000fu, 0x43004300u), 0x43084308u); }
  static __device__ __forceinline__ void block(float (&acc)[4], uint32_t low, uint32_t high, uint32_t scales, const uint4& in) {
    float sum[4] = {0, 0, 0, 0};
    mma_bf16(sum, make_uint4(pair(low, 0), pair(high, 0), pair(low, 1), pair(high, 1)), in.x, in.y);
    mma_bf16(sum, make_uint4(pair(low, 2), pair(high, 2), pair(low, 3), pair(high, 3)), in.z, in.w);
    scaled_add(acc, bf16_low(scales), bf16_high(scales), sum);
  }
  static __device__ __forceinline__ void multiply(float (&acc)[4], const Held& held, int word, const uint4& in) {
    if (word == 0) block(acc, held.w.x, held.w.y, held.scales.x, in);
    else block(acc, held.w.z, held.w.w, held.scales.y, in);
  }
};

template <class F> __host__ __device__ __forceinline__ int units_of(int k) { return (k + F::kK - 1) / F::kK; }

}  // namespace
