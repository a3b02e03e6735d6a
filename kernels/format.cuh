// How a 16-row tile of weights is stored, and what one lane does with its part of a block of 32 k: used by linear.cu
// and experts.cu, written by repack.cu. Lane 4g+t owns k = 8t..8t+7 of rows g and g + 8 in every format, so that
// activations are the same operands for all. Why these: docs/decisions/kernels.md#weight-formats.
//
//   Bf16   [tile][k_blocks][2][32 lanes] uint4: 1,024 bytes a block
//   Fp8    [tile][k_blocks / 2, rounded up][2][32 lanes] uint4: 1,024 bytes for two blocks; four words of rows g, g,
//          g + 8, g + 8, four e4m3 each (below), and beside them scales [tile][units][2][2] f32: of a block rows 0-7
//          and 8-15, or none
//   Int4   [tile][k_blocks / 2, rounded up]{[32 lanes] uint4, [8 g] uint2}: 576 bytes for two blocks; a word a row and
//          block (g and g + 8 of the first block, then of the second), then bf16 scales in the same order
//
// A unit is what is loaded at once: kK numbers of K, kWords operands of x, kScales scales beside it.
// Numbers become bf16 without rounding; a block's sum is multiplied by its scale in f32 before it is added. In a word
// of Int4 number e of a row's eight stands at nibble (e >> 1) + 4 (e & 1), as number + 8: then a shift and a mask leave
// a pair.
#pragma once
#include "common.cuh"

namespace {

struct Bf16 {
  static constexpr int kUnitBytes = 1024, kLaneBytes = 16, kK = 32, kWords = 1, kScales = 0, kAcross = 1;
  struct Held {
    uint4 w[2];
  };
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

// A word of four e4m3 in an order that costs few instructions to undo: in the lower half codes 0 and 2, in the upper
// one 1 and 3. The first of each has its sign, exponent and mantissa where bf16 has them (bits 15, 10-7 and 6-4); of
// the second, bits 14-12 and 3 are the exponent, 11 the sign, 2-0 the mantissa.
__host__ __device__ __forceinline__ uint32_t fp8_word(const unsigned char* codes) {
  uint32_t word = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t c = codes[i], s = c >> 7, e = c >> 3 & 15, m = c & 7;
    word |= (i < 2 ? s << 15 | e << 7 | m << 4 : e >> 1 << 12 | s << 11 | (e & 1) << 3 | m) << 16 * (i & 1);
  }
  return word;
}
// Codes 0 and 1, and 2 and 3, as bf16: in place their exponent is 120 too small, for subnormal ones as well.
__device__ __forceinline__ void fp8_pairs(uint32_t word, uint32_t& first, uint32_t& second) {
  const uint32_t rest = word & 0x780f780fu;
  first = bf16x2_mul(word & 0x87f087f0u, 0x7b807b80u);
  second = bf16x2_mul((rest >> 4 & 0x070f070fu) | (rest << 4 & 0xf8f0f8f0u), 0x7b807b80u);
}
// kBlocks of a unit: two for linears, which have the registers, one for experts. The layout is the same.
template <bool kScaled, int kBlocks>
struct Fp8Of {
  static constexpr int kUnitBytes = 512 * kBlocks, kLaneBytes = 16, kK = 32 * kBlocks, kWords = kBlocks,
                       kScales = kScaled ? 2 * kBlocks : 0, kAcross = 2 / kBlocks;
  struct Held {
    uint4 w[kBlocks];
    uint2 scales[kBlocks];
  };
  static __device__ __forceinline__ void load(Held& held, const char* at, const float* scales, int) {
#pragma unroll
    for (int b = 0; b < kBlocks; b++) held.w[b] = load_weights(reinterpret_cast<const uint4*>(at) + b * 32);
    if (!kScaled) return;
    if (kBlocks == 1) {
      held.scales[0] = load_weights(reinterpret_cast<const uint2*>(scales));
    } else {
      const uint4 both = load_weights(reinterpret_cast<const uint4*>(scales));
      held.scales[0] = make_uint2(both.x, both.y);
      held.scales[kBlocks - 1] = make_uint2(both.z, both.w);
    }
  }
  static __device__ __forceinline__ void multiply(float (&acc)[4], const Held& held, int word, const uint4& in) {
    const uint4& w = held.w[word];
    uint4 a, b;
    fp8_pairs(w.x, a.x, a.z);
    fp8_pairs(w.z, a.y, a.w);
    fp8_pairs(w.y, b.x, b.z);
    fp8_pairs(w.w, b.y, b.w);
    if (kScaled) {
      float sum[4] = {0, 0, 0, 0};
      mma_bf16(sum, a, in.x, in.y);
      mma_bf16(sum, b, in.z, in.w);
      scaled_add(acc, __uint_as_float(held.scales[word].x), __uint_as_float(held.scales[word].y), sum);
    } else {
      mma_bf16(acc, a, in.x, in.y);
      mma_bf16(acc, b, in.z, in.w);
    }
  }
};
typedef Fp8Of<true, 2> Fp8;
typedef Fp8Of<false, 2> Fp8Rows;  // one scale a row, applied to its whole sum
typedef Fp8Of<true, 1> Fp8Block;
typedef Fp8Of<false, 1> Fp8RowsBlock;

struct Int4 {
  static constexpr int kUnitBytes = 576, kLaneBytes = 16, kK = 64, kWords = 2, kScales = 0, kAcross = 1;
  struct Held {
    uint4 w;
    uint2 scales;
  };
  static __device__ __forceinline__ void load(Held& held, const char* at, const float*, int lane) {
    held.w = load_weights(reinterpret_cast<const uint4*>(at));
    held.scales = load_weights(reinterpret_cast<const uint2*>(at + 512 - lane * 16 + (lane >> 2) * 8));
  }
  // 0x43 in the upper byte: 128 + the nibble.
  static __device__ __forceinline__ uint32_t pair(uint32_t word, int i) {
    return bf16x2_sub(and_or(word >> 4 * i, 0x000f000fu, 0x43004300u), 0x43084308u);
  }
  static __device__ __forceinline__ void block(float (&acc)[4], uint32_t low, uint32_t high, uint32_t scales,
                                               const uint4& in) {
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

// Units of a tile, a multiple of kAcross.
template <class F>
__host__ __device__ __forceinline__ int units_of(int k) {
  return (k + F::kK * F::kAcross - 1) / (F::kK * F::kAcross) * F::kAcross;
}

}  // namespace
