// Linear layers of a prefill chunk of up to 1024 rows: the same out[m][n] = epilogue(sum over k of w[n][k] * x[m][k])
// as linear.cu, to the same bits. Weights come straight in their re-tiled order as the 16-row operand, tokens are the
// columns; each segment of K is summed from zero by the mma and then added, as decode does, which costs a second set of
// accumulators. A norm is applied by norm_rows before (x * norm, and inv per row for the end).
//
// Grid: (token tiles, weight tiles): blocks that share weights run together, so that weights are read from memory once.
// Block: kWarpsN x kWarpsM warps, each kTiles 16-row tiles x kMTiles 8-token columns. Shared memory: a ring of steps
// of 64 k, filled by cp.async: [stages][weights [tile][2 blocks][2][32], tokens [2 blocks][kM][4]] uint4; every read of
// fragments is 512 contiguous bytes a warp. Fragments are read one 16-k half ahead of their mma, across the step's one
// barrier too. A prefill needs no early residency (its kernels are long), so it is exempt from the 48 KB rule: the ring
// takes the 96 KB that sm_120 has.
//
// H200, all linears of Llama 3.1 8B: 512 rows 25 ms (285 TFLOP/s; mma.sync alone reaches 490), 64 rows 7.5 ms. What did
// not help there: 6 stages for the large tile, 8 warps or 32 weight rows for the small one, copies spread over the step
// between the mma (docs/decisions/kernels.md#prefill).
#include <type_traits>
#include "linear_row.cuh"

namespace {
constexpr int kStep = 2;  // 32-k blocks of a step
// Bytes of the ring, which are the dynamic shared memory of a launch; the host raises the limit of the function once.
constexpr int kPrefillRing = 96 << 10;

// Stores outputs n .. n + kCount of a row, as store_output does: in whole words (`words`; extra is then the residual
// stream), or one by one.
template <int kCount>
__device__ __forceinline__ void store_row(const LinearParams& p, int row, int n, float (&v)[16], bool words,
                                          const uint4 (&extra)[4]) {
  const size_t at = (size_t)row * p.out_stride + n;
  const bool silu = p.epilogue == kEpilogueSilu, residual = p.epilogue == kEpilogueResidual;
  if (p.bias && !silu) {
#pragma unroll
    for (int i = 0; i < kCount; i++)
      if (n + i < p.n) v[i] = __fadd_rn(v[i], __bfloat162float(p.bias[n + i]));
  }
  if (!words) {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      if (n + i >= p.n) break;
      if (silu) p.out[at + i] = __float2bfloat16(v[i]);
      else store_output(p, row, n + i, v[i], residual ? p.stream[at + i] : 0.0f);
    }
    return;
  }
  bf16* rounded = p.stream ? p.tap ? p.tap + (size_t)row * p.tap_stride + n : nullptr : p.out + at;
#pragma unroll
  for (int i = 0; i < kCount; i += 8) {
    if (p.stream) {
#pragma unroll
      for (int j = 0; j < 8; j += 4) {
        const uint4 x = extra[(i + j) / 4];
        float* y = v + i + j;
        if (residual) {
          y[0] = __fadd_rn(__uint_as_float(x.x), y[0]);
          y[1] = __fadd_rn(__uint_as_float(x.y), y[1]);
          y[2] = __fadd_rn(__uint_as_float(x.z), y[2]);
          y[3] = __fadd_rn(__uint_as_float(x.w), y[3]);
        }
        *reinterpret_cast<float4*>(p.stream + at + i + j) = make_float4(y[0], y[1], y[2], y[3]);
      }
    }
    if (rounded)
      *reinterpret_cast<uint4*>(rounded + i) = make_uint4(bf16_pair(v[i], v[i + 1]), bf16_pair(v[i + 2], v[i + 3]),
                                                          bf16_pair(v[i + 4], v[i + 5]), bf16_pair(v[i + 6], v[i + 7]));
  }
}

template <int kTiles, int kMTiles, int kWarpsN, int kWarpsM, int kParts>
__device__ __forceinline__ void linear_prefill(const LinearParams& p) {
  constexpr int kThreads = kWarpsN * kWarpsM * 32, kNTiles = kTiles * kWarpsN, kM = kMTiles * kWarpsM * 8;
  constexpr int kWeightWords = kNTiles * kStep * 64, kTokenWords = kM * kStep * 4,
                kStageWords = kWeightWords + kTokenWords, kStages = kPrefillRing / (kStageWords * 16);
  constexpr int kTileStride = kThreads / (kStep * 64),
                kRowStride = kThreads / (kStep * 4);  // between two copies of a thread
  static_assert(kThreads % (kStep * 64) == 0 && kWeightWords % kThreads == 0 && kTokenWords % kThreads == 0,
                "copies divide evenly");
  static_assert(kPrefillRing % (kStageWords * 16) == 0 && kStages >= 3, "the ring is whole steps");
  // ---- Shared memory and who does what ----
  DYN_SMEM(uint4, ring);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int warp_n = warp % kWarpsN * kTiles, warp_m = warp / kWarpsN * kMTiles;  // in tiles, in columns of 8
  const int first_tile = blockIdx.y * kNTiles, first_token = blockIdx.x * kM;
  auto steps_of = [&](int i) { return (k_blocks_of(p.part[i].k) + kStep - 1) / kStep; };
  const int n_steps0 = steps_of(0), n_steps = n_steps0 + (kParts > 1 ? steps_of(1) : 0);

  // ---- Copies of a step ----
  // A step that K does not fill, rows and tiles that are not there are zeros: they change no bits,
  // since a sum of segments is never -0.
  const int my_tile = first_tile + threadIdx.x / (kStep * 64), my_row = first_token + threadIdx.x / (kStep * 4);
  const int my_block = threadIdx.x / 64 % kStep, my_k = threadIdx.x % (kStep * 4) * 8;
  int n_rows = 0;
  auto fetch_weights = [&](int step, uint4* to) {
    const int i = kParts > 1 && step >= n_steps0, first_block = (step - (i ? n_steps0 : 0)) * kStep,
              k_blocks = k_blocks_of(p.part[i].k);
    const uint4* from =
        p.part[i].weights + ((size_t)my_tile * k_blocks + first_block) * 64 + threadIdx.x % (kStep * 64);
    const bool in_k = first_block + my_block < k_blocks;
#pragma unroll
    for (int w = 0; w < kWeightWords / kThreads; w++)
      copy_async(to + threadIdx.x + w * kThreads, from + (size_t)(w * kTileStride) * k_blocks * 64,
                 in_k && my_tile + w * kTileStride < p.n_tiles);
  };
  auto fetch_tokens = [&](int step, uint4* to) {
    const int i = kParts > 1 && step >= n_steps0, k = (step - (i ? n_steps0 : 0)) * kStep * 32 + my_k,
              stride = p.part[i].x_stride;
    const bf16* from = p.part[i].x + (size_t)my_row * stride + k;
    // Rows swap places pairwise in odd blocks: then the 128 bytes of a row that 8 threads copy lie in all banks.
    uint4* at = to + kWeightWords + my_k / 32 * kM * 4 +
                ((threadIdx.x / (kStep * 4) * 4 + (threadIdx.x & 3)) ^ (my_k / 32 % 2 * 4));
    const bool in_k = k < p.part[i].k;
#pragma unroll
    for (int w = 0; w < kTokenWords / kThreads; w++)
      copy_async(at + w * kRowStride * 4, from + (size_t)(w * kRowStride) * stride,
                 in_k && my_row + w * kRowStride < n_rows);
  };
  static_assert(kRowStride % 2 == 0, "the swap is the same for all copies of a thread");

  // ---- The ring fills: weights before the wait, tokens behind it ----
  for (int s = 0; s < kStages - 1; s++)
    if (s < n_steps) fetch_weights(s, ring + s * kStageWords);
  pdl_launch_dependents();
  pdl_wait();
  n_rows = p.n_rows ? min(*p.n_rows, p.rows) : p.rows;
  if (first_token >= n_rows) return;
  for (int s = 0; s < kStages - 1; s++) {
    if (s < n_steps) fetch_tokens(s, ring + s * kStageWords);
    copy_async_commit();
  }

  // ---- Accumulators: acc of the segment under way, sum of those before, y of the first part ----
  float acc[kTiles][kMTiles][4], sum[kTiles][kMTiles][4], y[kParts > 1 ? kTiles : 1][kMTiles][4];
  auto for_each = [&](auto f) {
#pragma unroll
    for (int r = 0; r < kTiles; r++)
#pragma unroll
      for (int c = 0; c < kMTiles; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) f(r, c, e);
  };
  for_each([&](int r, int c, int e) { acc[r][c][e] = sum[r][c][e] = 0; });
  // Token of element e of column c, and the row's factor.
  auto token = [&](int c, int e) { return first_token + (warp_m + c) * 8 + 2 * t + (e & 1); };
  auto inverse = [&](int i, int c, int e) {
    return p.part[i].inv && token(c, e) < n_rows ? p.part[i].inv[token(c, e)] : 1.0f;
  };

  // ---- Fragments ----
  // Of half q of the step at `stage`. Weights are double-buffered; tokens (both halves of a block in one
  // read) are replaced as soon as the mma took them.
  uint4 weights[2][kTiles], tokens[kMTiles];
  auto read_weights = [&](const uint4* stage, int q) {
#pragma unroll
    for (int r = 0; r < kTiles; r++) weights[q & 1][r] = stage[(warp_n + r) * kStep * 64 + q * 32 + lane];
  };
  auto read_tokens = [&](const uint4* stage, int block, int c) {
    tokens[c] = stage[kWeightWords + block * kM * 4 + (warp_m + c) * 32 + (lane ^ (block % 2 * 4))];
  };
  auto multiply = [&](int q, const uint4* next_stage,
                      auto starts) {  // starts: a segment, so that what acc holds goes into sum first
#pragma unroll
    for (int c = 0; c < kMTiles; c++) {
#pragma unroll
      for (int r = 0; r < kTiles; r++) {
        if (starts.value) {
#pragma unroll
          for (int e = 0; e < 4; e++) {
            sum[r][c][e] = __fadd_rn(sum[r][c][e], acc[r][c][e]);
            acc[r][c][e] = 0;
          }
        }
        mma_bf16(acc[r][c], weights[q & 1][r], q & 1 ? tokens[c].z : tokens[c].x, q & 1 ? tokens[c].w : tokens[c].y);
      }
      if (q & 1) read_tokens(next_stage, (q / 2 + 1) % kStep, c);
    }
  };

  // ---- Steps ----
  copy_async_wait<kStages - 2>();
  __syncthreads();
  read_weights(ring, 0);
#pragma unroll
  for (int c = 0; c < kMTiles; c++) read_tokens(ring, 0, c);
  int slot = 0, left = 0;  // blocks left of the segment
  for (int step = 0; step < n_steps; step++) {
    const uint4* stage = ring + slot * kStageWords;
    uint4* free_slot = ring + (slot == 0 ? kStages - 1 : slot - 1) *
                                  kStageWords;  // of the step before: the last barrier was behind its last read
    slot = slot + 1 == kStages ? 0 : slot + 1;
#pragma unroll
    for (int q = 0; q < kStep * 2; q++) {
      if (q + 1 < kStep * 2) {
        read_weights(stage, q + 1);
      } else {
        copy_async_wait<kStages - 2>();
#ifndef PLANT_MISSING_BARRIER
        __syncthreads();  // all copies of the next step are in, all reads of this one are done
#endif
        read_weights(ring + slot * kStageWords, 0);
      }
      if (q == 0) {
        if (step + kStages - 1 < n_steps) fetch_weights(step + kStages - 1, free_slot);
      } else if (q == 1) {
        if (step + kStages - 1 < n_steps) fetch_tokens(step + kStages - 1, free_slot);
        copy_async_commit();
      }
      if (q % 2 == 0 && left == 0) {
        multiply(q, stage, std::true_type());
        left = p.part[kParts > 1 && step >= n_steps0].segment_units;
      } else {
        multiply(q, q + 1 < kStep * 2 ? stage : ring + slot * kStageWords, std::false_type());
      }
      if (q % 2) left--;
    }
    if constexpr (kParts > 1)
      if (step + 1 == n_steps0) {
        for_each([&](int r, int c, int e) {
          y[r][c][e] = __fmul_rn(inverse(0, c, e), __fadd_rn(sum[r][c][e], acc[r][c][e]));
          sum[r][c][e] = acc[r][c][e] = 0;
        });
        left = 0;
      }
  }

  // ---- Output ----
  // The sums change places through shared memory (the ring is done with), so that a thread gets a tile's outputs of one
  // row: [kM][kNTiles][16] floats, padded so that neither side has bank conflicts.
  constexpr int kTilePitch = 20, kRowPitch = kNTiles * kTilePitch + 4, kItems = kM * kNTiles / kThreads,
                kItemRows = kThreads / kNTiles;
  static_assert(kM * kNTiles % kThreads == 0 && kM * kRowPitch * 4 <= kPrefillRing, "the sums fit where the ring was");
  float* sums = reinterpret_cast<float*>(ring);
  __syncthreads();
  for_each([&](int r, int c, int e) {
    float v = __fmul_rn(inverse(kParts - 1, c, e), __fadd_rn(sum[r][c][e], acc[r][c][e]));
    if constexpr (kParts > 1) v = __fadd_rn(y[r][c][e], v);
    sums[((warp_m + c) * 8 + 2 * t + (e & 1)) * kRowPitch + (warp_n + r) * kTilePitch + g + 8 * (e >> 1)] = v;
  });
  const int item_tile = threadIdx.x % kNTiles, item_row = threadIdx.x / kNTiles, tile = first_tile + item_tile;
  const bool silu_end = p.epilogue == kEpilogueSilu, residual = p.epilogue == kEpilogueResidual;
  const int n = tile * (silu_end ? 8 : 16), n_end = n + (silu_end ? 8 : 16);
  const bool words =
      p.epilogue != kEpilogueLogits && p.out_stride % 8 == 0 && (!p.tap || p.tap_stride % 8 == 0) && n_end <= p.n;
  uint4 extra[kItems][4];
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    const int m = first_token + item_row + i * kItemRows;
    if (!words || !residual || m >= n_rows) continue;
    const uint4* from = reinterpret_cast<const uint4*>(p.stream + (size_t)m * p.out_stride + n);
#pragma unroll
    for (int j = 0; j < 4; j++) extra[i][j] = load_activations(from + j);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    const int row = item_row + i * kItemRows, m = first_token + row;
    if (m >= n_rows || tile >= p.n_tiles) break;
    float v[16];
#pragma unroll
    for (int q = 0; q < 4; q++)
      *reinterpret_cast<float4*>(&v[q * 4]) =
          *reinterpret_cast<const float4*>(&sums[row * kRowPitch + item_tile * kTilePitch + q * 4]);
    if (silu_end) {
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = __fmul_rn(silu(v[j]), v[8 + j]);
      store_row<8>(p, m, n, v, words, extra[i]);
    } else {
      store_row<16>(p, m, n, v, words, extra[i]);
    }
  }
}
}  // namespace

// linear_prefill_<weight rows>x<tokens of a block>. 128x128 for more than 256 rows. 64x64 for less, and for two parts.
KERNEL(linear_prefill_128x128, LinearParams, 256, 1) { linear_prefill<4, 4, 2, 4, 1>(p); }
KERNEL(linear_prefill_64x64, LinearParams, 128, 2) { linear_prefill<2, 4, 2, 2, 1>(p); }
KERNEL(linear_prefill_64x64_two, LinearParams, 128, 2) { linear_prefill<2, 4, 2, 2, 2>(p); }
