// Weights into the re-tiled layout at load: `repack*` from rows of a checkpoint tensor, `quantise_fp8` from plain rows
// to FP8 (for --fp8-dense), `fill_*` from a hash (for --random). Run once, outside graphs.
#include "format.cuh"

namespace {
template <class Params>
__device__ __forceinline__ bf16 source_element(const Params& p, size_t at) {
  if (p.source_type == kSourceBf16) return static_cast<const bf16*>(p.source)[at];
  return __float2bfloat16(p.source_type == kSourceF16 ? __half2float(static_cast<const __half*>(p.source)[at])
                                                      : static_cast<const float*>(p.source)[at]);
}

// Where a source row goes: its row among the weight's, in tiles.
__device__ __forceinline__ int row_in_tiles(int order, int at) {
  return order == kRowsPlain ? at : (at >> 3) * 16 + (at & 7) + (order == kRowsUp ? 8 : 0);
}

// Grid: (ceil(k_blocks * 16 / 256), rows) blocks of 256 threads; a thread moves one pair of elements of one row.
__device__ __forceinline__ void repack_body(const RepackParams& p) {
  const int k = (blockIdx.x * blockDim.x + threadIdx.x) * 2, row = blockIdx.y;
  if (k >= p.k_blocks * 32) return;
  const int at = p.row_offset + row;
  const int n = row_in_tiles(p.order, at);
  uint32_t pair = 0;
  if (row < p.n_source_rows) {
    const size_t from = (size_t)row * p.source_stride + k;
    if (k < p.k) pair = __bfloat16_as_ushort(source_element(p, from));
    if (k + 1 < p.k) pair |= (uint32_t)__bfloat16_as_ushort(source_element(p, from + 1)) << 16;
  }
  reinterpret_cast<uint32_t*>(p.weights)[retiled_index(n, k, p.k_blocks) / 2] = pair;
}

__device__ __forceinline__ float scale_of(const RepackCodesParams& p, int row, int k) {
  const size_t at = (size_t)((p.first_row + row) / p.block_rows) * p.scale_stride + k / p.block_cols;
  return p.scale_bf16 ? __bfloat162float(static_cast<const bf16*>(p.scales)[at])
                      : static_cast<const float*>(p.scales)[at];
}
// Grid: (ceil(k_blocks * 4 / 256), rows) blocks of 256 threads, k_blocks rounded up to an even number; a thread moves 8
// columns of one row.
__device__ __forceinline__ void repack_fp8_body(const RepackCodesParams& p) {
  const int part = blockIdx.x * blockDim.x + threadIdx.x, k = part * 8, row = blockIdx.y;
  const int k_blocks = (p.k_blocks + 1) / 2 * 2;
  if (part >= k_blocks * 4) return;
  const int n = row_in_tiles(p.order, p.row_offset + row), lane = (n & 7) * 4 + (part & 3), high = (n >> 3) & 1;
  const size_t block = (size_t)(n >> 4) * k_blocks + (part >> 2);
  const bool inside = row < p.n_source_rows;
  unsigned char codes[8];
  for (int e = 0; e < 8; e++) codes[e] = inside && k + e < p.k ? p.source[(size_t)row * p.source_stride + k + e] : 0;
  *reinterpret_cast<uint2*>(p.weights + block * 512 + lane * 16 + high * 8) =
      make_uint2(fp8_word(codes), fp8_word(codes + 4));
  if (p.tile_scales && (n & 7) == 0 && (part & 3) == 0)
    p.tile_scales[block * 2 + high] = inside && k < p.k ? scale_of(p, row, k) : 0.0f;
}
__device__ __forceinline__ void repack_int4_body(const RepackCodesParams& p) {
  const int part = blockIdx.x * blockDim.x + threadIdx.x, k = part * 8, row = blockIdx.y;
  if (part >= (p.k_blocks + 1) / 2 * 8) return;
  const int n = row_in_tiles(p.order, p.row_offset + row), g = n & 7, high = (n >> 3) & 1;
  unsigned char* unit = p.weights + ((size_t)(n >> 4) * ((p.k_blocks + 1) / 2) + (part >> 3)) * 576;
  const int second = part >> 2 & 1;
  const bool inside = row < p.n_source_rows;
  uint32_t from = 0x88888888u, to = 0;
  if (inside && k < p.k) memcpy(&from, p.source + (size_t)row * p.source_stride + part * 4, 4);
  for (int e = 0; e < 8; e++) to |= (k + e < p.k ? from >> 4 * e & 15 : 8u) << 4 * ((e >> 1) + 4 * (e & 1));
  memcpy(unit + (g * 4 + (part & 3)) * 16 + second * 8 + high * 4, &to, 4);
  if ((part & 3) == 0)
    reinterpret_cast<bf16*>(unit + 512)[g * 4 + second * 2 + high] =
        __float2bfloat16(inside && k < p.k ? scale_of(p, row, k) : 0.0f);
}

// To the nearest e4m3, ties to even; |x| is at most 448.
__device__ __forceinline__ unsigned e4m3_of(float x) {
  const unsigned sign = __float_as_uint(x) >> 31 << 7;
  const float size = fabsf(x);
  if (size < 0.015625f) return sign | (unsigned)rintf(size * 512.0f);  // subnormal, or the smallest normal number
  unsigned bits = __float_as_uint(size);
  bits += 0x7ffffu + (bits >> 20 & 1);
  return sign | ((bits >> 20) - (120u << 3));
}
// Grid: (ceil(k_blocks / 8), rows / 8) blocks of 256 threads, k_blocks rounded up to an even number; a warp takes 8
// rows of a block, a lane 8 columns of one.
__device__ __forceinline__ void quantise_fp8_body(const RepackParams& p) {
  const int block_k = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, row = blockIdx.y * 8 + (lane >> 2),
            k = block_k * 32 + (lane & 3) * 8;
  const int k_blocks = (p.k_blocks + 1) / 2 * 2;
  if (block_k >= k_blocks) return;
  float v[8], most = 0;
  for (int e = 0; e < 8; e++) {
    v[e] = row < p.n_source_rows && k + e < p.k
               ? __bfloat162float(source_element(p, (size_t)row * p.source_stride + k + e))
               : 0.0f;
    most = fmaxf(most, fabsf(v[e]));
  }
  most = warp_max(most);
  const int n = row_in_tiles(p.order, p.row_offset + row), high = (n >> 3) & 1;
  const size_t block = (size_t)(n >> 4) * k_blocks + block_k;
  const float scale = __fdiv_rn(most, 448.0f);
  unsigned char codes[8];
  for (int e = 0; e < 8; e++)
    codes[e] = scale > 0 ? (unsigned char)e4m3_of(fminf(fmaxf(__fdiv_rn(v[e], scale), -448.0f), 448.0f)) : 0;
  *reinterpret_cast<uint2*>(reinterpret_cast<unsigned char*>(p.weights) + block * 512 + lane * 16 + high * 8) =
      make_uint2(fp8_word(codes), fp8_word(codes + 4));
  if (lane == 0) p.tile_scales[block * 2 + high] = scale;
}

// A bijective mix of 64 bits (splitmix64's finaliser); its upper 24 bits are the number.
__device__ __forceinline__ unsigned long long mixed(unsigned long long seed, unsigned long long index) {
  unsigned long long z = (seed + index + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}
__device__ __forceinline__ float uniform(unsigned long long seed, unsigned long long index) {
  return (float)(unsigned)(mixed(seed, index) >> 40) * 1.1920928955078125e-7f - 1.0f;  // 2^-23: [-1, 1)
}

// Grid: any number of blocks of 256 threads. Writes padding (n up to 16, k up to 32) as zeros when re-tiled.
__device__ __forceinline__ void fill_random_body(const FillParams& p) {
  const int k_blocks = k_blocks_of(p.k), width = p.retiled ? k_blocks * 32 : p.k,
            height = p.retiled ? (p.n + 15) / 16 * 16 : p.n;
  const size_t total = (size_t)width * height;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (size_t)gridDim.x * blockDim.x) {
    const int n = i / width, k = i % width;
    const bool inside = n < p.n && k < p.k;
    const float v = !inside ? 0.0f : p.constant ? p.scale : __fmul_rn(p.scale, uniform(p.seed, (size_t)n * p.k + k));
    static_cast<bf16*>(p.to)[p.retiled ? retiled_index(n, k, k_blocks) : i] = __float2bfloat16(v);
  }
}
// Grid: any number of blocks of 256 threads; a thread fills a unit of 16 rows.
__device__ __forceinline__ void fill_codes_body(const FillCodesParams& p) {
  for (unsigned long long block = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; block < p.n_blocks;
       block += (unsigned long long)gridDim.x * blockDim.x) {
    uint32_t* words =
        reinterpret_cast<uint32_t*>(p.weights + block * (p.four_bits ? Int4::kUnitBytes : Fp8::kUnitBytes));
    for (int i = 0; i < (p.four_bits ? 128 : 256); i++) {
      const uint32_t bits = mixed(p.seed, block * 256 + i) >> 32;
      // FP8 without the highest bit of an exponent. Of four bits 0 (-8) becomes 8 (0), so that their mean is 0: else
      // all rows of a pass drift the same way, and to the same experts.
      const uint32_t zeros = ~(bits | bits >> 1 | bits >> 2 | bits >> 3) & 0x11111111u;
      words[i] = p.four_bits ? bits | zeros << 3 : bits & 0xbbffbbffu;
    }
    const uint32_t scale = __bfloat16_as_ushort(__float2bfloat16(p.scale));
    if (p.four_bits)
      for (int i = 0; i < 16; i++) words[128 + i] = scale << 16 | scale;
    if (p.tile_scales)
      for (int i = 0; i < 4; i++) p.tile_scales[block * 4 + i] = p.scale;
  }
}
}  // namespace

KERNEL(repack, RepackParams, 256) { repack_body(p); }
KERNEL(repack_fp8, RepackCodesParams, 256) { repack_fp8_body(p); }
KERNEL(repack_int4, RepackCodesParams, 256) { repack_int4_body(p); }
KERNEL(quantise_fp8, RepackParams, 256) { quantise_fp8_body(p); }
KERNEL(fill_random, FillParams, 256) { fill_random_body(p); }
KERNEL(fill_codes, FillCodesParams, 256) { fill_codes_body(p); }
