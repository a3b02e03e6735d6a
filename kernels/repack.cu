// Weights into the re-tiled layout at load: `repack` from rows of a checkpoint tensor, `fill_random` from a hash (for --random). Run once, outside graphs.
#include "common.cuh"

namespace {
__device__ __forceinline__ bf16 source_element(const RepackParams& p, size_t at) {
  if (p.source_type == kSourceBf16) return static_cast<const bf16*>(p.source)[at];
  return __float2bfloat16(p.source_type == kSourceF16 ? __half2float(static_cast<const __half*>(p.source)[at]) : static_cast<const float*>(p.source)[at]);
}

// Grid: (ceil(k_blocks * 16 / 256), rows) blocks of 256 threads; a thread moves one pair of elements of one row.
__device__ __forceinline__ void repack_body(const RepackParams& p) {
  const int k = (blockIdx.x * blockDim.x + threadIdx.x) * 2, row = blockIdx.y;
  if (k >= p.k_blocks * 32) return;
  const int at = p.row_offset + row;
  const int n = p.order == kRowsPlain ? at : (at >> 3) * 16 + (at & 7) + (p.order == kRowsUp ? 8 : 0);
  uint32_t pair = 0;
  if (row < p.n_source_rows) {
    const size_t from = (size_t)row * p.source_stride + k;
    if (k < p.k) pair = __bfloat16_as_ushort(source_element(p, from));
    if (k + 1 < p.k) pair |= (uint32_t)__bfloat16_as_ushort(source_element(p, from + 1)) << 16;
  }
  reinterpret_cast<uint32_t*>(p.weights)[retiled_index(n, k, p.k_blocks) / 2] = pair;
}

// A bijective mix of 64 bits (splitmix64's finaliser); its upper 24 bits are the number.
__device__ __forceinline__ float uniform(unsigned long long seed, unsigned long long index) {
  unsigned long long z = (seed + index + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  return (float)(unsigned)(z >> 40) * 1.1920928955078125e-7f - 1.0f;   // 2^-23: [-1, 1)
}

// Grid: any number of blocks of 256 threads. Writes padding (n up to 16, k up to 32) as zeros when re-tiled.
__device__ __forceinline__ void fill_random_body(const FillParams& p) {
  const int k_blocks = k_blocks_of(p.k), width = p.retiled ? k_blocks * 32 : p.k, height = p.retiled ? (p.n + 15) / 16 * 16 : p.n;
  const size_t total = (size_t)width * height;
  for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < total; i += (size_t)gridDim.x * blockDim.x) {
    const int n = i / width, k = i % width;
    const bool inside = n < p.n && k < p.k;
    const float v = !inside ? 0.0f : p.constant ? p.scale : __fmul_rn(p.scale, uniform(p.seed, (size_t)n * p.k + k));
    static_cast<bf16*>(p.to)[p.retiled ? retiled_index(n, k, k_blocks) : i] = __float2bfloat16(v);
  }
}
}  // namespace

KERNEL(repack, RepackParams, 256) { repack_body(p); }
KERNEL(fill_random, FillParams, 256) { fill_random_body(p); }
