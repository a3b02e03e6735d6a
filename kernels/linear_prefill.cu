// Linear layers of a prefill chunk of up to 1024 rows: the same out[m][n] = epilogue(sum over k of w[n][k] * x[m][k]) as linear.cu, to the same bits. Weights
// come straight in their re-tiled order as the 16-row operand, tokens are the columns; each segment of K is summed from zero by the mma and then added, as decode
// does, which costs a second set of accumulators and one add per output and segment. A norm is applied by norm_rows before (x * norm, and inv per row for the end).
//
// Grid: (token tiles, weight tiles): blocks that share weights run together, so that weights are read from memory once. Block: kWarpsN x kWarpsM warps, each
// kTiles 16-row tiles x kColumns 8-token columns. Shared memory: a ring of kStages steps of one 32-k block, filled by cp.async: [kStages][weights kN/16 x 64,
// tokens kM x 4] uint4; every read of a fragment is 512 contiguous bytes a warp. The 128 x 128 tile takes 64 KB: a prefill needs no early residency
// (its kernels are long), so it is exempt from the 48 KB rule.
#include "linear_row.cuh"

namespace {
constexpr int kStages = 4;

// Shared memory of a launch: the host passes it, and for more than 48 KB raises the limit of the function once.
__host__ __device__ constexpr int prefill_shared_bytes(int n_tile, int m_tile) { return kStages * (n_tile / 16 * 64 + m_tile * 4) * 16; }

template <int kTiles, int kColumns, int kWarpsN, int kWarpsM, int kParts>
__device__ __forceinline__ void linear_prefill(const LinearParams& p) {
  constexpr int kThreads = kWarpsN * kWarpsM * 32, kNTiles = kTiles * kWarpsN, kM = kColumns * kWarpsM * 8;
  constexpr int kWeightWords = kNTiles * 64, kTokenWords = kM * 4, kStageWords = kWeightWords + kTokenWords;
  static_assert(prefill_shared_bytes(kNTiles * 16, kM) == kStages * kStageWords * 16, "the host's number");
  DYN_SMEM(uint4, ring);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int warp_n = warp % kWarpsN * kTiles, warp_m = warp / kWarpsN * kColumns;   // in tiles, in columns of 8
  const int first_tile = blockIdx.y * kNTiles, first_token = blockIdx.x * kM;
  const int k_blocks0 = k_blocks_of(p.part[0].k), n_steps = k_blocks0 + (kParts > 1 ? k_blocks_of(p.part[1].k) : 0);

  auto fetch_weights = [&](int step) {
    const int i = kParts > 1 && step >= k_blocks0, block = step - (i ? k_blocks0 : 0), k_blocks = k_blocks_of(p.part[i].k);
#pragma unroll
    for (int w = threadIdx.x; w < kWeightWords; w += kThreads) {
      const int tile = first_tile + w / 64;
      copy_async(&ring[step % kStages * kStageWords + w], p.part[i].weights + ((size_t)min(tile, p.n_tiles - 1) * k_blocks + block) * 64 + w % 64, tile < p.n_tiles);
    }
  };
  int n_rows = 0;
  auto fetch_tokens = [&](int step) {
    const int i = kParts > 1 && step >= k_blocks0, block = step - (i ? k_blocks0 : 0);
#pragma unroll
    for (int w = threadIdx.x; w < kTokenWords; w += kThreads) {
      const int m = first_token + w / 4, k = block * 32 + w % 4 * 8;
      const bool valid = m < n_rows && k < p.part[i].k;
      copy_async(&ring[step % kStages * kStageWords + kWeightWords + w], p.part[i].x + (valid ? (size_t)m * p.part[i].x_stride + k : 0), valid);
    }
  };

  for (int s = 0; s < kStages - 1; s++) if (s < n_steps) fetch_weights(s);
  pdl_launch_dependents();
  pdl_wait();
  n_rows = p.n_rows ? min(*p.n_rows, p.rows) : p.rows;
  if (first_token >= n_rows) return;
  for (int s = 0; s < kStages - 1; s++) {
    if (s < n_steps) fetch_tokens(s);
    copy_async_commit();
  }

  float acc[kTiles][kColumns][4], sum[kTiles][kColumns][4], y[kParts > 1 ? kTiles : 1][kColumns][4];
  auto for_each = [&](auto f) {
#pragma unroll
    for (int r = 0; r < kTiles; r++)
#pragma unroll
      for (int c = 0; c < kColumns; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) f(r, c, e);
  };
  for_each([&](int r, int c, int e) { acc[r][c][e] = sum[r][c][e] = 0; });
  // Token of element e of column c, and the row's factor.
  auto token = [&](int c, int e) { return first_token + (warp_m + c) * 8 + 2 * t + (e & 1); };
  auto inverse = [&](int i, int c, int e) { return p.part[i].inv && token(c, e) < n_rows ? p.part[i].inv[token(c, e)] : 1.0f; };

  int left = p.part[0].segment_blocks;
  for (int step = 0; step < n_steps; step++) {
    copy_async_wait<kStages - 2>();
#ifndef PLANT_MISSING_BARRIER
    __syncthreads();   // all copies of this step are in; the slot of the step before is free
#endif
    if (step + kStages - 1 < n_steps) {
      fetch_weights(step + kStages - 1);
      fetch_tokens(step + kStages - 1);
    }
    copy_async_commit();
    const uint4* weights = ring + step % kStages * kStageWords + warp_n * 64 + lane;
    const uint4* tokens = ring + step % kStages * kStageWords + kWeightWords + (warp_m * 8 + g) * 4 + t;
    uint4 in[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; c++) in[c] = tokens[c * 32];
#pragma unroll
    for (int r = 0; r < kTiles; r++) {
      const uint4 a0 = weights[r * 64], a1 = weights[r * 64 + 32];
#pragma unroll
      for (int c = 0; c < kColumns; c++) mma_bf16(acc[r][c], a0, in[c].x, in[c].y);
#pragma unroll
      for (int c = 0; c < kColumns; c++) mma_bf16(acc[r][c], a1, in[c].z, in[c].w);
    }
    const bool part_ends = step + 1 == n_steps || (kParts > 1 && step + 1 == k_blocks0);
    if (--left == 0 || part_ends) {
      for_each([&](int r, int c, int e) { sum[r][c][e] = __fadd_rn(sum[r][c][e], acc[r][c][e]); acc[r][c][e] = 0; });
      left = p.part[0].segment_blocks;
      if constexpr (kParts > 1) {
        if (step + 1 >= k_blocks0) left = p.part[1].segment_blocks;
        if (part_ends && step + 1 != n_steps) for_each([&](int r, int c, int e) { y[r][c][e] = __fmul_rn(inverse(0, c, e), sum[r][c][e]); sum[r][c][e] = 0; });
      }
    }
  }

  if constexpr (kParts > 1)
    for_each([&](int r, int c, int e) { sum[r][c][e] = __fadd_rn(y[r][c][e], __fmul_rn(inverse(1, c, e), sum[r][c][e])); });
  else
    for_each([&](int r, int c, int e) { sum[r][c][e] = __fmul_rn(inverse(0, c, e), sum[r][c][e]); });
#pragma unroll
  for (int r = 0; r < kTiles; r++) {
    const int tile = first_tile + warp_n + r;
    if (tile >= p.n_tiles) continue;
#pragma unroll
    for (int c = 0; c < kColumns; c++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int m = token(c, e);
        if (m >= n_rows) continue;
        if (p.epilogue == kEpilogueSilu) {
          const int j = tile * 8 + g;
          if (e < 2 && j < p.n) p.out[(size_t)m * p.out_stride + j] = __float2bfloat16(__fmul_rn(silu(sum[r][c][e]), sum[r][c][e ^ 2]));
          continue;
        }
        const int n = tile * 16 + g + 8 * (e >> 1);
        if (n >= p.n) continue;
        float v = sum[r][c][e];
        if (p.bias) v = __fadd_rn(v, __bfloat162float(p.bias[n]));
        store_output(p, m, n, v, p.epilogue == kEpilogueResidual ? __bfloat162float(p.residual[(size_t)m * p.out_stride + n]) : 0.0f);
      }
  }
}
}  // namespace

// linear_prefill_<weight rows>x<tokens of a block>; the small one also takes two parts. Shared memory: prefill_shared_bytes.
KERNEL(linear_prefill_128x128, LinearParams, 256, 1) { linear_prefill<4, 4, 2, 4, 1>(p); }
KERNEL(linear_prefill_64x64, LinearParams, 128, 2) { linear_prefill<2, 4, 2, 2, 1>(p); }
KERNEL(linear_prefill_64x64_two, LinearParams, 128, 2) { linear_prefill<2, 4, 2, 2, 2>(p); }
