// Grouped-query attention over the KV cache: what attention_decode.cu (decode and verify passes, 1 to 16 rows) and
// attention_prefill.cu (prefill chunks) share: q/k norm, RoPE, and how softmax(q k^T) v is summed. The qkv linear
// before and the output linear after are linear.cu; head_dim is 64 or 128. Read "The order of every sum" first: a row's
// bits may not depend on the pass that computed it.
//
// What it computes, for row i at position P = length + i, query head h, KV head h / group:
//   q = rope(norm(q_i,h)), cache row P of K = rope(norm(k_i)), cache row P of V = v_i
//   out_i,h = sum_j<=P softmax_j(scale q.k_j) v_j
//
// ---- The order of every sum ----
// A column is one (row, query head) pair of a KV head: column = row * group + head in group. 16 columns are a query
// tile, the 16-row operand of mma_bf16.
//   step:  64 positions from a multiple of 64, from an empty state. Scores: one accumulator per position, 16 dims an
//   mma,
//          pieces of 32 dims in ascending order. m = their maximum; p = exp2((s - m) * scale * log2 e), rounded to
//          bf16; o = p v, in one accumulator a dim, 16 positions an mma, ascending tiles; l: as one more dim of v whose
//          elements are 1, so that the weights add up to one as they are used.
//   merge: (m, l, o) and (m', l', o') are both scaled to the larger maximum and added (softmax.cuh).
//   chunk: its steps merged in ascending order into an empty state (m = -inf, l = 0, o = 0). Boundaries:
//          attention_chunk_begin in params.h.
//   row:   its chunks merged in ascending order into an empty state; out = bf16(o * (1 / l)).
// A position that a column must not see has p = 0, an empty chunk merges to nothing: neither changes a bit, as long as
// V is finite there. Columns of one pass that end in different steps or chunks thus share them.
//
// ---- Order of 16-byte pieces (the 8-column operand comes straight from the cache, no transposition) ----
// K is stored [position][dim], V is stored transposed [dim][position], so that a lane finds eight neighbours along the
// summed axis in 16 bytes. Lane 4g+t of a warp owns, in a block of 32 along the summed axis, elements 8t..8t+7, and
// uses 4h..4h+3 of them in mma h (0, 1), as in linear.cu. Tile T (0..7) of a step has 8 positions, chosen such that a
// lane's scores of tiles 4b..4b+3 are those of its own eight positions in block b of V: column n of tile T is position
// 32 (T / 4) + 8 (n / 2) + 2 (T % 4) + n % 2. Scores thus become the operand of p v without leaving the lane.
#pragma once
#include "softmax.cuh"

namespace {

constexpr int kStep = kAttentionStep;
constexpr int kTiles = kStep / 8;
constexpr uint32_t kOnes = 0x3f803f80u;  // two bf16

__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}
// Position, within its step, of column n of tile T.
__device__ __forceinline__ int tile_position(int tile, int n) {
  return 32 * (tile >> 2) + 8 * (n >> 1) + 2 * (tile & 3) + (n & 1);
}

// The probabilities of one tile for columns g (x) and g+8 (y), each two positions as a bf16 pair.
__device__ __forceinline__ uint2 tile_probabilities(const float (&s)[4], float m_low, float m_high, float scale_log2) {
  const float low = m_low == -INFINITY ? 0.f : -__fmul_rn(m_low, scale_log2),
              high = m_high == -INFINITY ? 0.f : -__fmul_rn(m_high, scale_log2);
  return make_uint2(
      bf16_pair(exp2_fast(__fmaf_rn(s[0], scale_log2, low)), exp2_fast(__fmaf_rn(s[1], scale_log2, low))),
      bf16_pair(exp2_fast(__fmaf_rn(s[2], scale_log2, high)), exp2_fast(__fmaf_rn(s[3], scale_log2, high))));
}

#ifdef PLANT_OFF_BY_ONE  // negative control of the tests
__device__ __forceinline__ bool visible(int position, int last) { return position < last; }
#else
__device__ __forceinline__ bool visible(int position, int last) { return position <= last; }
#endif

// ---- one head of one row, spread over a warp: lane l has dims P l .. P l + P - 1 and the same of the upper half, P =
// head_dim / 64 ----
struct RawHead {
  uint32_t lower, upper;
};  // bf16 pairs (head_dim 128) or single values in the low half (64)
template <int kHeadDim>
__device__ __forceinline__ RawHead load_head(const bf16* head, int lane) {
  if constexpr (kHeadDim == 128)
    return {reinterpret_cast<const uint32_t*>(head)[lane], reinterpret_cast<const uint32_t*>(head)[32 + lane]};
  return {reinterpret_cast<const uint16_t*>(head)[lane], reinterpret_cast<const uint16_t*>(head)[32 + lane]};
}
template <int kHeadDim>
__device__ __forceinline__ void store_head(bf16* head, int lane, const RawHead& v) {
  if constexpr (kHeadDim == 128) {
    reinterpret_cast<uint32_t*>(head)[lane] = v.lower;
    reinterpret_cast<uint32_t*>(head)[32 + lane] = v.upper;
  } else {
    reinterpret_cast<uint16_t*>(head)[lane] = v.lower;
    reinterpret_cast<uint16_t*>(head)[32 + lane] = v.upper;
  }
}
// Calls visit(dim, bits) for each of the lane's elements.
template <int kHeadDim, class F>
__device__ __forceinline__ void each_dim(const RawHead& v, int lane, F visit) {
  constexpr int P = kHeadDim / 64;
#pragma unroll
  for (int j = 0; j < P; j++) {
    visit(P * lane + j, (uint16_t)(v.lower >> 16 * j));
    visit(kHeadDim / 2 + P * lane + j, (uint16_t)(v.upper >> 16 * j));
  }
}

// What does not change and is loaded before pdl_wait: of a lane's dims, the frequencies and the norm weights (1 without
// a norm).
template <int kHeadDim>
struct RopeFrequencies {
  float at[kHeadDim / 64];
};
template <int kHeadDim>
struct HeadNorm {
  float weight[kHeadDim / 32];
};
template <int kHeadDim>
__device__ __forceinline__ RopeFrequencies<kHeadDim> rope_frequencies(const AttentionParams& p, int lane) {
  RopeFrequencies<kHeadDim> f;
#pragma unroll
  for (int j = 0; j < kHeadDim / 64; j++) f.at[j] = p.inv_freq[kHeadDim / 64 * lane + j];
  return f;
}
template <int kHeadDim>
__device__ __forceinline__ HeadNorm<kHeadDim> head_norm(const bf16* norm, int lane) {
  constexpr int P = kHeadDim / 64;
  HeadNorm<kHeadDim> n;
#pragma unroll
  for (int j = 0; j < P; j++) {
    n.weight[j] = norm ? __bfloat162float(norm[P * lane + j]) : 1.f;
    n.weight[P + j] = norm ? __bfloat162float(norm[kHeadDim / 2 + P * lane + j]) : 1.f;
  }
  return n;
}
// Sine and cosine of a lane's angles at a position.
template <int kHeadDim>
struct Turn {
  float sine[kHeadDim / 64], cosine[kHeadDim / 64];
};
template <int kHeadDim>
__device__ __forceinline__ Turn<kHeadDim> turn_of(const RopeFrequencies<kHeadDim>& frequencies, float rope_factor,
                                                  int position) {
  Turn<kHeadDim> turn;
#pragma unroll
  for (int j = 0; j < kHeadDim / 64; j++) {
    sine_cosine(__fmul_rn((float)position, frequencies.at[j]), turn.sine[j], turn.cosine[j]);
    turn.sine[j] = __fmul_rn(turn.sine[j], rope_factor);
    turn.cosine[j] = __fmul_rn(turn.cosine[j], rope_factor);
  }
  return turn;
}
// RMSNorm (if the model has one) and RoPE of one head: dims i and i + head_dim / 2 turn together. f32, rounded to bf16
// once.
template <int kHeadDim>
__device__ __forceinline__ RawHead norm_and_rope(const RawHead& raw, const HeadNorm<kHeadDim>& weights, bool norm,
                                                 float norm_eps, const Turn<kHeadDim>& turn) {
  constexpr int P = kHeadDim / 64;
  float x[2 * P];
  x[0] = bf16_low(raw.lower);
  x[P] = bf16_low(raw.upper);
  if constexpr (P == 2) {
    x[1] = bf16_high(raw.lower);
    x[3] = bf16_high(raw.upper);
  }
  if (norm) {
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < 2 * P; j++) squares = __fmaf_rn(x[j], x[j], squares);
    const float inv = rsqrtf(__fmaf_rn(warp_sum(squares), 1.f / kHeadDim, norm_eps));
#pragma unroll
    for (int j = 0; j < 2 * P; j++) x[j] = __fmul_rn(__fmul_rn(x[j], inv), weights.weight[j]);
  }
  float y[2 * P];
#pragma unroll
  for (int j = 0; j < P; j++) {
    y[j] = __fmaf_rn(x[j], turn.cosine[j], -__fmul_rn(x[P + j], turn.sine[j]));
    y[P + j] = __fmaf_rn(x[P + j], turn.cosine[j], __fmul_rn(x[j], turn.sine[j]));
  }
  if constexpr (P == 2) return {bf16_pair(y[0], y[1]), bf16_pair(y[2], y[3])};
  return {bf16_pair(y[0], 0.f), bf16_pair(y[1], 0.f)};
}
// A turned head as column `column` of a query tile of q, in the order in which mma_bf16 takes it: tile is [32
// dims][half h][lane].
template <int kHeadDim>
__device__ __forceinline__ void store_operand(uint4 (*tile)[2][32], int column, int lane, const RawHead& head) {
  constexpr int P = kHeadDim / 64;
#pragma unroll
  for (int upper = 0; upper < 2; upper++) {
    const int dim = upper * (kHeadDim / 2) + P * lane;
    uint32_t* word = reinterpret_cast<uint32_t*>(&tile[dim >> 5][dim >> 2 & 1][(column & 7) * 4 + (dim >> 3 & 3)]) +
                     (dim & 2) + (column >> 3);
    const uint32_t bits = upper ? head.upper : head.lower;
    if constexpr (P == 2) *word = bits;
    else reinterpret_cast<uint16_t*>(word)[dim & 1] = (uint16_t)bits;
  }
}

template <int kHeadDim>
__device__ __forceinline__ bf16* qkv_row(const AttentionParams& p, int row) {
  return p.qkv + (size_t)row * (p.n_heads + 2 * p.n_kv_heads) * kHeadDim;
}

// Where a lane finds its pieces of the step at `position`: of tile T of K, dims 32i.. being i * kNextDims further, the
// next step's kStep * kHeadDim / 8; and of V's dims 8n.., positions 32b.. being b * kNextPositions further, dims 8 (n +
// 1).. `capacity`, the next step's kStep / 8. All in units of 16 bytes.
constexpr int kNextDims = 4, kNextPositions = 4;
template <int kHeadDim>
__device__ __forceinline__ const uint4* k_pieces(const AttentionParams& p, int kv_head, int position, int tile,
                                                 int lane) {
  return reinterpret_cast<const uint4*>(
      p.k_cache + ((size_t)kv_head * p.capacity + position + tile_position(tile, lane >> 2)) * kHeadDim +
      8 * (lane & 3));
}
template <int kHeadDim>
__device__ __forceinline__ const uint4* v_pieces(const AttentionParams& p, int kv_head, int position, int n, int lane) {
  return reinterpret_cast<const uint4*>(p.v_cache + ((size_t)kv_head * kHeadDim + 8 * n + (lane >> 2)) * p.capacity +
                                        position + 8 * (lane & 3));
}

}  // namespace
