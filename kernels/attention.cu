// Grouped-query attention over the KV cache: q/k norm, RoPE, the cache write and softmax(q k^T) v, for decode and
// verify passes (1 to 16 rows) and for prefill chunks. The qkv linear before and the output linear after are linear.cu;
// head_dim is 64 or 128. Read "The order of every sum" first: it is what both paths must share, since a row's bits may
// not depend on the pass that computed it.
//
// What it computes, for row i at position P = length + i, query head h, KV head h / group:
//   q = rope(norm(q_i,h)), cache row P of K = rope(norm(k_i)), cache row P of V = v_i;  out_i,h = sum_j<=P
//   softmax_j(scale q.k_j) v_j
//
// ---- The order of every sum ----
// A column is one (row, query head) pair of a KV head: column = row * group + head in group. Columns are the 16-row
// operand of mma_bf16.
//   step:  64 positions from a multiple of 64, from an empty state. Scores: one accumulator per position, 16 dims an
//   mma, pieces of 32 dims in ascending
//          order. m = their maximum; p = exp2((s - m) * scale * log2 e), rounded to bf16; o = p v, in one accumulator a
//          dim, 16 positions an mma, ascending tiles; l: as one more dim of v whose elements are 1, so that the weights
//          add up to one as they are used.
//   fold:  (m, l, o) and (m', l', o') are both scaled to the larger maximum and added.
//   chunk: its steps folded in ascending order into an empty state (m = -inf, l = 0, o = 0). Boundaries:
//   attention_chunk_begin in params.h. row:   its chunks folded in ascending order into an empty state; out = bf16(o *
//   (1 / l)).
// A position that a column must not see has p = 0, an empty chunk folds to nothing: neither changes a bit, as long as V
// is finite there. Columns of one pass that end in different steps or chunks thus share them.
//
// ---- Order of 16-byte pieces (the 8-column operand comes straight from the cache, no transposition) ----
// K is stored [position][dim], V is stored transposed [dim][position], so that a lane finds eight neighbours along the
// summed axis in 16 bytes. Lane 4g+t of a warp owns, in a block of 32 along the summed axis, elements 8t..8t+7, and
// uses 4h..4h+3 of them in mma h (0, 1), as in linear.cu. Tile T (0..7) of a step has 8 positions, chosen such that a
// lane's scores of tiles 4b..4b+3 are those of its own eight positions in block b of V: column n of tile T is position
// 32 (T / 4) + 8 (n / 2) + 2 (T % 4) + n % 2. Scores thus become the operand of p v without leaving the lane.
#include "common.cuh"

namespace {

constexpr int kStep = kAttentionStep;
constexpr int kTiles = kStep / 8;
constexpr uint32_t kOnes = 0x3f803f80u;  // two bf16
constexpr int kFineColumns = 2048;

// ---- the state of a softmax, for the two columns g and g+8 of a lane ----
struct Factors {
  float keep, add;
};
// The maximum of a state and an addition, and what l and o of both are to be multiplied with.
__device__ __forceinline__ float fold_maximum(float m, float new_m, float scale_log2, Factors& f) {
  const float top = fmaxf(m, new_m);
  f.keep = m == top ? 1.f : exp2_fast(__fmul_rn(m - top, scale_log2));  // also for -inf against -inf
  f.add = new_m == top ? 1.f : exp2_fast(__fmul_rn(new_m - top, scale_log2));
  return top;
}
__device__ __forceinline__ float fold(float old, float addition, const Factors& f) {
  return __fmaf_rn(addition, f.add, __fmul_rn(old, f.keep));
}

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
template <int HD>
__device__ __forceinline__ RawHead load_head(const bf16* head, int lane) {
  if constexpr (HD == 128)
    return {reinterpret_cast<const uint32_t*>(head)[lane], reinterpret_cast<const uint32_t*>(head)[32 + lane]};
  return {reinterpret_cast<const uint16_t*>(head)[lane], reinterpret_cast<const uint16_t*>(head)[32 + lane]};
}
template <int HD>
__device__ __forceinline__ void store_head(bf16* head, int lane, const RawHead& v) {
  if constexpr (HD == 128) {
    reinterpret_cast<uint32_t*>(head)[lane] = v.lower;
    reinterpret_cast<uint32_t*>(head)[32 + lane] = v.upper;
  } else {
    reinterpret_cast<uint16_t*>(head)[lane] = v.lower;
    reinterpret_cast<uint16_t*>(head)[32 + lane] = v.upper;
  }
}
// Calls visit(dim, bits) for each of the lane's elements.
template <int HD, class F>
__device__ __forceinline__ void each_dim(const RawHead& v, int lane, F visit) {
  constexpr int P = HD / 64;
#pragma unroll
  for (int j = 0; j < P; j++) {
    visit(P * lane + j, (uint16_t)(v.lower >> 16 * j));
    visit(HD / 2 + P * lane + j, (uint16_t)(v.upper >> 16 * j));
  }
}

// What does not change and is loaded before pdl_wait: of a lane's dims, the frequencies and the norm weights (1 without
// a norm).
template <int HD>
struct RopeFrequencies {
  float at[HD / 64];
};
template <int HD>
struct HeadNorm {
  float weight[HD / 32];
};
template <int HD>
__device__ __forceinline__ RopeFrequencies<HD> rope_frequencies(const AttentionParams& p, int lane) {
  RopeFrequencies<HD> f;
#pragma unroll
  for (int j = 0; j < HD / 64; j++) f.at[j] = p.inv_freq[HD / 64 * lane + j];
  return f;
}
template <int HD>
__device__ __forceinline__ HeadNorm<HD> head_norm(const bf16* norm, int lane) {
  constexpr int P = HD / 64;
  HeadNorm<HD> n;
#pragma unroll
  for (int j = 0; j < P; j++) {
    n.weight[j] = norm ? __bfloat162float(norm[P * lane + j]) : 1.f;
    n.weight[P + j] = norm ? __bfloat162float(norm[HD / 2 + P * lane + j]) : 1.f;
  }
  return n;
}
// Sine and cosine of a lane's angles at a position.
template <int HD>
struct Turn {
  float sine[HD / 64], cosine[HD / 64];
};
template <int HD>
__device__ __forceinline__ Turn<HD> turn_of(const RopeFrequencies<HD>& frequencies, float rope_factor, int position) {
  Turn<HD> turn;
#pragma unroll
  for (int j = 0; j < HD / 64; j++) {
    sine_cosine(__fmul_rn((float)position, frequencies.at[j]), turn.sine[j], turn.cosine[j]);
    turn.sine[j] = __fmul_rn(turn.sine[j], rope_factor);
    turn.cosine[j] = __fmul_rn(turn.cosine[j], rope_factor);
  }
  return turn;
}
// RMSNorm (if the model has one) and RoPE of one head: dims i and i + head_dim / 2 turn together. f32, rounded to bf16
// once.
template <int HD>
__device__ __forceinline__ RawHead norm_and_rope(const RawHead& raw, const HeadNorm<HD>& weights, bool norm,
                                                 float norm_eps, const Turn<HD>& turn) {
  constexpr int P = HD / 64;
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
    const float inv = rsqrtf(__fmaf_rn(warp_sum(squares), 1.f / HD, norm_eps));
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
// A turned head as column `column` of a column tile of q, in the order in which mma_bf16 takes it: tile is [32
// dims][half h][lane].
template <int HD>
__device__ __forceinline__ void store_operand(uint4 (*tile)[2][32], int column, int lane, const RawHead& head) {
  constexpr int P = HD / 64;
#pragma unroll
  for (int upper = 0; upper < 2; upper++) {
    const int dim = upper * (HD / 2) + P * lane;
    uint32_t* word = reinterpret_cast<uint32_t*>(&tile[dim >> 5][dim >> 2 & 1][(column & 7) * 4 + (dim >> 3 & 3)]) +
                     (dim & 2) + (column >> 3);
    const uint32_t bits = upper ? head.upper : head.lower;
    if constexpr (P == 2) *word = bits;
    else reinterpret_cast<uint16_t*>(word)[dim & 1] = (uint16_t)bits;
  }
}

template <int HD>
__device__ __forceinline__ bf16* qkv_row(const AttentionParams& p, int row) {
  return p.qkv + (size_t)row * (p.n_heads + 2 * p.n_kv_heads) * HD;
}

// Where a lane finds its pieces of the step at `position`: of tile T of K, dims 32i.. being i * kNextDims further, the
// next step's kStep * HD / 8; and of V's dims 8n.., positions 32b.. being b * kNextPositions further, dims 8 (n + 1)..
// `capacity`, the next step's kStep / 8. All in units of 16 bytes.
constexpr int kNextDims = 4, kNextPositions = 4;
template <int HD>
__device__ __forceinline__ const uint4* k_pieces(const AttentionParams& p, int kv_head, int position, int tile,
                                                 int lane) {
  return reinterpret_cast<const uint4*>(
      p.k_cache + ((size_t)kv_head * p.capacity + position + tile_position(tile, lane >> 2)) * HD + 8 * (lane & 3));
}
template <int HD>
__device__ __forceinline__ const uint4* v_pieces(const AttentionParams& p, int kv_head, int position, int n, int lane) {
  return reinterpret_cast<const uint4*>(p.v_cache + ((size_t)kv_head * HD + 8 * n + (lane >> 2)) * p.capacity +
                                        position + 8 * (lane & 3));
}

// ---- decode and verify ----
// Grid: (blocks of a KV head: attention_blocks of the captured context, KV heads, ceil(max_rows * group / (16 TILES))).
// A block of 8 warps does one unit of the cache for 16 TILES columns: a chunk, or in short contexts one step of it, so
// that more SMs share the work. Nothing in the order of sums depends on that. Blocks without a live unit leave at once.
// With one unit in all, its block writes the output; else the last block to arrive folds all. Batch: S steps at a time.
// Warp w scores tile w of each (8 positions, all dims: head_dim / 32 pieces a lane), the warps exchange maxima and
// probabilities through shared memory, then warp w sums over them for head_dim / 64 tiles of 8 dims. Every byte of a
// batch is thus under way before the first is used, and the next batch is requested as soon as registers are free.
// Before the dependency wait the unit is requested into L2: where it begins is a guess from the length of that moment,
// which costs at most time. Rows of this pass are patched into the loaded pieces from shared memory, since the block
// that writes them to the cache would wait long to read them back. Shared memory: q in operand order, new rows of K and
// V, maxima, probabilities, factors: 44 KB at most.
constexpr int kDecodeWarps = kTiles;
constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kMaxRows = kAttentionMaxRows;
constexpr int kNewPositions = kMaxRows + 8;  // new rows of V lie at positions from a multiple of 8
constexpr int kPrefetchSteps = 4;

// Which positions a block works on.
struct Unit {
  int n_units, steps_apart, begin, stop;
};  // n_units of all blocks of a KV head; units of a chunk
// Of a pass that ends before position `end`; block 0 has the newest positions: they are the widest chunks and the rows
// to be written.
template <int HD, int TILES>
__device__ __forceinline__ Unit unit_of(int end, int block, int max_rows) {
  const int n_chunks = attention_chunk_of(end - 1) + 1;
  const bool fine = HD * 16 * TILES <= kFineColumns && n_chunks > 1 &&
                    end <= (max_rows == 1 ? kAttentionFineEnd : kAttentionFineEndOfMore);
  Unit u;
  u.n_units = fine ? (end + kStep - 1) / kStep : n_chunks;
  u.steps_apart = fine ? attention_chunk_begin(1) / kStep : 1;
  const int unit = u.n_units - 1 - block;
  u.begin = fine ? unit * kStep : attention_chunk_begin(unit);
  u.stop = min(fine ? u.begin + kStep : attention_chunk_begin(unit + 1), end);
  return u;
}

// Folds the partials of columns [first_column, first_column + n_columns) over all units and writes them out. A warp
// takes one column at a time: first a lane has a unit and finds its factors, then a lane has head_dim / 32 dims and
// sums over the units. stage: of the warp, [unit]{factors in the chunk, factors of the chunk in the row; where the
// chunk is not complete, the latter mean nothing}; stage_l: [unit].
template <int HD>
__device__ __forceinline__ void combine(const AttentionParams& p, const float* partials, size_t unit_stride,
                                        int padded_columns, int kv_head, int first_column, int n_columns, int n_units,
                                        int per_chunk, float4* stage, float* stage_l, int warp, int lane) {
  constexpr int V = HD / 32, kAhead = 16;
  const int group = p.n_heads / p.n_kv_heads;
  const float scale_log2 = p.scale * 1.44269504f;
  for (int column = first_column + warp; column < first_column + n_columns; column += kDecodeWarps) {
    const float* o_at = partials + (size_t)column * HD + V * lane;
    const float* ml_at = partials + (size_t)padded_columns * HD + 2 * column;
    float row_m = -INFINITY, row_l = 0.f, chunk_l = 0.f, row[V] = {}, chunk[V] = {};
    for (int base = 0; base < n_units; base += 32) {
      const int n = min(n_units - base, 32);
      float x[kAhead][V];
      auto load = [&](int from) {
#pragma unroll
        for (int a = 0; a < kAhead; a++) {
          const float* at = o_at + (size_t)(base + from + a) * unit_stride;
          if constexpr (V == 4) {
            const float4 v = from + a < n ? *reinterpret_cast<const float4*>(at) : make_float4(0.f, 0.f, 0.f, 0.f);
            x[a][0] = v.x;
            x[a][1] = v.y;
            x[a][2] = v.z;
            x[a][3] = v.w;
          } else {
            const float2 v = from + a < n ? *reinterpret_cast<const float2*>(at) : make_float2(0.f, 0.f);
            x[a][0] = v.x;
            x[a][1] = v.y;
          }
        }
      };
      load(0);
      const float2 ml = lane < n ? *reinterpret_cast<const float2*>(ml_at + (size_t)(base + lane) * unit_stride)
                                 : make_float2(-INFINITY, 0.f);
      // Maxima are exact in any order: before the unit in its chunk, of the chunk, up to and with the chunk, before the
      // chunk.
      float in_chunk = -INFINITY, chunk_m = ml.x;
      if (per_chunk > 1) {
#pragma unroll
        for (int d = 1; d < 4; d++) {
          const float v = __shfl_up_sync(0xffffffffu, ml.x, d);
          if ((lane & 3) >= d) in_chunk = fmaxf(in_chunk, v);
        }
        chunk_m = quad_max(ml.x);
      }
      float with_chunk = chunk_m;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const float v = __shfl_up_sync(0xffffffffu, with_chunk, d);
        if (lane >= d) with_chunk = fmaxf(with_chunk, v);
      }
      const int before = (per_chunk > 1 ? lane & ~3 : lane) - 1;
      const float before_chunk = __shfl_sync(0xffffffffu, with_chunk, max(before, 0));
      Factors step, whole;
      fold_maximum(in_chunk, ml.x, scale_log2, step);
      fold_maximum(before < 0 ? row_m : fmaxf(row_m, before_chunk), chunk_m, scale_log2, whole);
      row_m = fmaxf(row_m, __shfl_sync(0xffffffffu, with_chunk, 31));
      __syncwarp();
      stage[lane] = make_float4(step.keep, step.add, whole.keep, whole.add);
      stage_l[lane] = ml.y;
      __syncwarp();
      for (int from = 0; from < n; from += kAhead) {
        if (from) load(from);
#pragma unroll
        for (int a = 0; a < kAhead; a++) {
          if (a % 4 == 0 && from + a >= n) break;
          const float4 f = stage[from + a];
          const float l = stage_l[from + a];
          const bool first = a % 4 == 0 || per_chunk == 1, last = a % 4 == 3 || per_chunk == 1;
          if (first) {
            chunk_l = l;
#pragma unroll
            for (int e = 0; e < V; e++) chunk[e] = x[a][e];
          } else {
            chunk_l = fold(chunk_l, l, {f.x, f.y});
#pragma unroll
            for (int e = 0; e < V; e++) chunk[e] = fold(chunk[e], x[a][e], {f.x, f.y});
          }
          if (last) {
            row_l = fold(row_l, chunk_l, {f.z, f.w});
#pragma unroll
            for (int e = 0; e < V; e++) row[e] = fold(row[e], chunk[e], {f.z, f.w});
          }
        }
      }
    }
    const float inv = __fdiv_rn(1.f, row_l);
    uint32_t* to = reinterpret_cast<uint32_t*>(
        p.out + ((size_t)(column / group) * p.n_heads + kv_head * group + column % group) * HD + V * lane);
    const uint32_t low = bf16_pair(__fmul_rn(row[0], inv), __fmul_rn(row[1], inv));
    if constexpr (V == 4)
      *reinterpret_cast<uint2*>(to) = make_uint2(low, bf16_pair(__fmul_rn(row[2], inv), __fmul_rn(row[3], inv)));
    else *to = low;
  }
}

template <int HD, int TILES>
__device__ void attention_decode(const AttentionParams& p) {
  constexpr int KI = HD / 32, NT = HD / 64;  // K pieces of a tile; 8-dim tiles of V a warp
  constexpr int S = 256 / HD;                // steps of a batch: 64 registers a lane for K and V
  constexpr int kColumns = 16 * TILES, kWarpColumns = kColumns / kDecodeWarps;
  static_assert(2 * TILES <= kDecodeWarps, "a warp keeps the maxima of half a column tile");
  SHARED(uint4, q_operand, [TILES][KI][2][32]);  // [column tile][32 dims][half h][lane]: what mma_bf16 takes
  SHARED(bf16, new_k, [kMaxRows][HD]);
  SHARED(bf16, new_v, [HD][kNewPositions]);
  SHARED(float, tile_max, [S][TILES][16][kTiles]);         // [step][column tile][column][tile of 8 positions]
  SHARED(uint4, probability, [S][TILES][kTiles / 2][32]);  // [step][column tile][two tiles][lane]: what mma_bf16 takes
  SHARED(Factors, factors, [S][kColumns]);
  SHARED(int, last_position, [kColumns]);  // of a column; -1 where there is none
  SHARED(float4, stage, [kDecodeWarps][32]);
  SHARED(float, stage_l, [kDecodeWarps][32]);
  SHARED(unsigned, flag, [1]);

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  // Live blocks are those with the lowest indices, of all KV heads.
  const int index = blockIdx.x + gridDim.x * blockIdx.y, kv_head = index % p.n_kv_heads, block = index / p.n_kv_heads;
  const int group = p.n_heads / p.n_kv_heads, first_column = blockIdx.z * kColumns,
            max_columns = min(p.max_rows * group - first_column, kColumns);
  const RopeFrequencies<HD> frequencies = rope_frequencies<HD>(p, lane);
  const HeadNorm<HD> q_norm = head_norm<HD>(p.q_norm, lane), k_norm = head_norm<HD>(p.k_norm, lane);
  pdl_launch_dependents();

  const int guess = min(load_current(p.length) + 1, p.capacity);
  const Unit likely = unit_of<HD, TILES>(guess, block, p.max_rows);
  if (block < likely.n_units && blockIdx.z == 0) {
    const char* k_unit = reinterpret_cast<const char*>(p.k_cache + ((size_t)kv_head * p.capacity + likely.begin) * HD);
    const char* v_unit = reinterpret_cast<const char*>(p.v_cache + (size_t)kv_head * HD * p.capacity + likely.begin);
    for (int step = 0; step < kPrefetchSteps && likely.begin + step * kStep < likely.stop; step++)
#pragma unroll
      for (int i = threadIdx.x; i < 4 * HD; i += kDecodeThreads) {  // 32 bytes each
        prefetch_l2(k_unit + (size_t)step * kStep * HD * 2 + 32 * i);
        prefetch_l2(v_unit + ((size_t)(i >> 2) * p.capacity + step * kStep) * 2 + 32 * (i & 3));
      }
  }
  // A warp turns neighbouring columns, which often share a row, and the K of one row, from the last warp on.
  const int warp_columns = (max_columns + kDecodeWarps - 1) / kDecodeWarps, warp_column = warp * warp_columns;
  const int warp_row = (first_column + warp_column) / group, warp_head = first_column + warp_column - warp_row * group;
  const bf16* q_at = qkv_row<HD>(p, warp_row) + (kv_head * group + warp_head) * HD;
  const int new_row = warp - max(kDecodeWarps - p.max_rows, 0);
  const bf16* new_at = qkv_row<HD>(p, max(new_row, 0)) + (p.n_heads + kv_head) * HD;
  const size_t row_stride = (size_t)(p.n_heads + 2 * p.n_kv_heads) * HD;
  pdl_wait();

  // Raw heads need no length.
  const int length = load_current(p.length), rows = min(load_current(p.rows), p.max_rows);
  RawHead raw_q[kWarpColumns], raw_k = {0, 0}, raw_v = {0, 0};
  {
    int head = warp_head;
    const bf16* at = q_at;
#pragma unroll
    for (int i = 0; i < kWarpColumns; i++) {
      raw_q[i] = {0, 0};
      if (i < warp_columns && warp_column + i < max_columns) raw_q[i] = load_head<HD>(at, lane);
      at += HD;
      if (++head == group) {
        head = 0;
        at += row_stride - group * HD;
      }
    }
  }
  if (new_row >= 0) {
    raw_k = load_head<HD>(new_at, lane);
    raw_v = load_head<HD>(new_at + p.n_kv_heads * HD, lane);
  }

  const int n_columns = min(rows * group - first_column, kColumns), end = length + rows;
  if (n_columns <= 0) return;
  const Unit unit = unit_of<HD, TILES>(end, block, p.max_rows);
  if (block >= unit.n_units) return;
  const int begin = unit.begin, stop = unit.stop, first_new = max(length, begin),
            n_new = stop - first_new;  // rows of this pass in this unit, if positive

  uint4 k[S][KI], v[S][NT][2];
  auto load_k = [&](int position) {
    const uint4* at = k_pieces<HD>(p, kv_head, position, warp, lane);
#pragma unroll
    for (int j = 0; j < S; j++)
      if (position + j * kStep < stop)
#pragma unroll
        for (int i = 0; i < KI; i++) k[j][i] = load_activations(at + j * (kStep * HD / 8) + i * kNextDims);
  };
  auto load_v = [&](int position) {
    const uint4* at = v_pieces<HD>(p, kv_head, position, NT * warp, lane);
#pragma unroll
    for (int j = 0; j < S; j++)
      if (position + j * kStep < stop)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int b = 0; b < 2; b++)
            v[j][n][b] = load_activations(at + (size_t)n * p.capacity + j * (kStep / 8) + b * kNextPositions);
  };
  load_k(begin);
  load_v(begin);

  const int n_tiles = (n_columns + 15) / 16;
  int turned_row = -1;
  Turn<HD> turn;
  auto turn_to = [&](int row) {
    if (row != turned_row) turn = turn_of<HD>(frequencies, p.rope_factor, length + row);
    turned_row = row;
  };
  {
    int head = warp_head, row = warp_row;
#pragma unroll
    for (int i = 0; i < kWarpColumns; i++) {
      const int c = warp_column + i;
      if (i < warp_columns && c < n_columns) {
        turn_to(row);
        store_operand<HD>(q_operand[c >> 4], c & 15, lane,
                          norm_and_rope<HD>(raw_q[i], q_norm, p.q_norm != nullptr, p.norm_eps, turn));
      }
      if (++head == group) {
        head = 0;
        row++;
      }
    }
  }
  if (threadIdx.x < kColumns)
    last_position[threadIdx.x] = (int)threadIdx.x < n_columns ? length + (first_column + (int)threadIdx.x) / group : -1;
  const int new_base = first_new & ~7;
  for (int r = new_row; r >= 0 && r < rows; r += kDecodeWarps) {
    if (r != new_row) {
      raw_k = load_head<HD>(new_at + (r - new_row) * row_stride, lane);
      raw_v = load_head<HD>(new_at + (r - new_row) * row_stride + p.n_kv_heads * HD, lane);
    }
    const int position = length + r;
    if (position < first_new || position >= stop) continue;
    turn_to(r);
    const RawHead done = norm_and_rope<HD>(raw_k, k_norm, p.k_norm != nullptr, p.norm_eps, turn);
    store_head<HD>(new_k[position - first_new], lane, done);
    each_dim<HD>(raw_v, lane,
                 [&](int dim, uint16_t bits) { new_v[dim][position - new_base] = __ushort_as_bfloat16(bits); });
    if (blockIdx.z == 0) {
      store_head<HD>(p.k_cache + ((size_t)kv_head * p.capacity + position) * HD, lane, done);
      each_dim<HD>(raw_v, lane, [&](int dim, uint16_t bits) {
        reinterpret_cast<uint16_t*>(p.v_cache)[((size_t)kv_head * HD + dim) * p.capacity + position] = bits;
      });
    }
  }
  __syncthreads();

  const float scale_log2 = p.scale * 1.44269504f;
  // The state of the unit. m: of column g + 8 (w % 2) of column tile w / 2, in warp w.
  float m = -INFINITY, l[TILES][2], o[TILES][NT][4];
#pragma unroll
  for (int c = 0; c < TILES; c++) {
    l[c][0] = l[c][1] = 0.f;
#pragma unroll
    for (int n = 0; n < NT; n++) o[c][n][0] = o[c][n][1] = o[c][n][2] = o[c][n][3] = 0.f;
  }

#pragma unroll 1
  for (int position = begin; position < stop; position += S * kStep) {
#pragma unroll
    for (int j = 0; j < S; j++) {
      const int at = position + j * kStep;
      if (at >= stop || at + kStep <= first_new) continue;  // rows of this pass are not in the cache yet
      const int k_row = at + tile_position(warp, g) - first_new;
      if (k_row >= 0 && k_row < n_new) {
#pragma unroll
        for (int i = 0; i < KI; i++) k[j][i] = *reinterpret_cast<const uint4*>(&new_k[k_row][32 * i + 8 * t]);
      }
#pragma unroll
      for (int b = 0; b < 2; b++) {
        const int slot = at + 32 * b + 8 * t - new_base, low = first_new - new_base - slot,
                  high = low + n_new;  // elements low .. high - 1 of 8 are new
        if (low >= 8 || high <= 0) continue;
        uint32_t mask[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
          mask[e] =
              (2 * e >= low && 2 * e < high ? 0xffffu : 0u) | (2 * e + 1 >= low && 2 * e + 1 < high ? 0xffff0000u : 0u);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          const uint4 x = *reinterpret_cast<const uint4*>(&new_v[8 * (NT * warp + n) + g][slot]);
          uint4& y = v[j][n][b];
          y = make_uint4((y.x & ~mask[0]) | (x.x & mask[0]), (y.y & ~mask[1]) | (x.y & mask[1]),
                         (y.z & ~mask[2]) | (x.z & mask[2]), (y.w & ~mask[3]) | (x.w & mask[3]));
        }
      }
    }

    float s[S][TILES][4];
#pragma unroll
    for (int j = 0; j < S; j++)
#pragma unroll
      for (int c = 0; c < TILES; c++) s[j][c][0] = s[j][c][1] = s[j][c][2] = s[j][c][3] = 0.f;
#pragma unroll
    for (int i = 0; i < KI; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < TILES; c++) {
          if (c >= n_tiles) break;
          const uint4 q = q_operand[c][i][h][lane];
#pragma unroll
          for (int j = 0; j < S; j++)
            if (position + j * kStep < stop) mma_bf16(s[j][c], q, h ? k[j][i].z : k[j][i].x, h ? k[j][i].w : k[j][i].y);
        }
    if (position + S * kStep < stop) load_k(position + S * kStep);
#pragma unroll
    for (int j = 0; j < S; j++) {
      const int at = position + j * kStep;
      if (at >= stop) break;
#pragma unroll
      for (int c = 0; c < TILES; c++) {
        if (c >= n_tiles) break;
        float (&x)[4] = s[j][c];
        if (at + kStep > first_new) {
          const int first = at + tile_position(warp, 2 * t), low = last_position[16 * c + g],
                    high = last_position[16 * c + g + 8];
          x[0] = visible(first, low) ? x[0] : -INFINITY;
          x[1] = visible(first + 1, low) ? x[1] : -INFINITY;
          x[2] = visible(first, high) ? x[2] : -INFINITY;
          x[3] = visible(first + 1, high) ? x[3] : -INFINITY;
        }
        const float low = quad_max(fmaxf(x[0], x[1])), high = quad_max(fmaxf(x[2], x[3]));
        if (t == 0) {
          tile_max[j][c][g][warp] = low;
          tile_max[j][c][g + 8][warp] = high;
        }
      }
    }
    __syncthreads();

#pragma unroll
    for (int c = 0; c < TILES; c++) {
      if (c >= n_tiles) break;
      float before = m, mine = -INFINITY;  // for the factors of step t
#pragma unroll
      for (int j = 0; j < S; j++) {
        if (position + j * kStep >= stop) break;
        float top[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float4* at = reinterpret_cast<const float4*>(tile_max[j][c][g + 8 * half]);
          const float4 a = at[0], b = at[1];
          top[half] = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
        }
        const uint2 pair = tile_probabilities(s[j][c], top[0], top[1], scale_log2);
        reinterpret_cast<uint2*>(&probability[j][c][warp >> 1][lane])[warp & 1] = pair;
        if (warp >> 1 == c) {
          const float x = warp & 1 ? top[1] : top[0];
          if (j < t) before = fmaxf(before, x);
          if (j == t) mine = x;
          m = fmaxf(m, x);
        }
      }
      if (warp >> 1 == c && t < S) {
        Factors f;
        fold_maximum(before, mine, scale_log2, f);
        factors[t][16 * c + 8 * (warp & 1) + g] = f;
      }
    }
#ifndef PLANT_MISSING_BARRIER  // negative control of the tests
    __syncthreads();
#endif

#pragma unroll
    for (int c = 0; c < TILES; c++) {
      if (c >= n_tiles) break;
#pragma unroll
      for (int j = 0; j < S; j++) {
        if (position + j * kStep >= stop) break;
        float sum[NT][4], weights[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int n = 0; n < NT; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.f;
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const uint4 x = probability[j][c][2 * b + h][lane];
#pragma unroll
            for (int n = 0; n < NT; n++)
              mma_bf16(sum[n], x, h ? v[j][n][b].z : v[j][n][b].x, h ? v[j][n][b].w : v[j][n][b].y);
            mma_bf16(weights, x, kOnes, kOnes);
          }
        const Factors low = factors[j][16 * c + g], high = factors[j][16 * c + g + 8];
        l[c][0] = fold(l[c][0], weights[0], low);
        l[c][1] = fold(l[c][1], weights[2], high);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) o[c][n][e] = fold(o[c][n][e], sum[n][e], e < 2 ? low : high);
      }
    }
    if (position + S * kStep < stop) load_v(position + S * kStep);
  }

  const bool direct = unit.n_units == 1;
  const int padded_columns = gridDim.z * kColumns;
  const size_t unit_stride = (size_t)padded_columns * (HD + 2);
  float* partials =
      p.partials + (size_t)kv_head * gridDim.x * unit_stride;  // [unit]{[column][head_dim] o, [column]{m, l}}
  float* partial = partials + (unit.n_units - 1 - block) * unit_stride;
#pragma unroll
  for (int c = 0; c < TILES; c++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = first_column + 16 * c + 8 * half + g;
      if (column - first_column >= n_columns) continue;
      const int row = column / group;
      const float inv = __fdiv_rn(1.f, l[c][half]);
      bf16* out = p.out + ((size_t)row * (p.n_heads - group) + kv_head * group + column) * HD;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const int dim = 8 * (NT * warp + n) + 2 * t;
        const float o0 = o[c][n][2 * half], o1 = o[c][n][2 * half + 1];
        if (direct) *reinterpret_cast<uint32_t*>(out + dim) = bf16_pair(__fmul_rn(o0, inv), __fmul_rn(o1, inv));
        else *reinterpret_cast<float2*>(partial + (size_t)column * HD + dim) = make_float2(o0, o1);
      }
      if (!direct && warp == 2 * c + half && t == 0)
        *reinterpret_cast<float2*>(partial + (size_t)padded_columns * HD + 2 * column) = make_float2(m, l[c][half]);
    }
  if (direct) return;
  if (last_to_arrive(p.counters + kv_head * gridDim.z + blockIdx.z, unit.n_units, &flag[0]))
    combine<HD>(p, partials, unit_stride, padded_columns, kv_head, first_column, n_columns, unit.n_units,
                unit.steps_apart, stage[warp], stage_l[warp], warp, lane);
}

// ---- prefill, first kernel: norm and RoPE of q in place, K and V into the cache ----
// Grid: (ceil(max_rows / 32), n_heads + 2 n_kv_heads), 8 warps; a block does 32 rows of one head. V is turned in shared
// memory, so that a warp writes 32 neighbouring positions of one dim.
constexpr int kRopeRows = 32, kRopeWarps = 8;
template <int HD>
__device__ void attention_rope(const AttentionParams& p) {
  SHARED(uint16_t, turned, [HD][kRopeRows + 2]);  // + 2: neighbouring dims start in other banks
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.y,
            kv_head = head - p.n_heads;  // of K while below n_kv_heads, then of V
  const bool is_q = kv_head < 0, is_v = kv_head >= p.n_kv_heads;
  const bf16* norm = is_q ? p.q_norm : p.k_norm;
  const RopeFrequencies<HD> frequencies = rope_frequencies<HD>(p, lane);
  const HeadNorm<HD> weights = head_norm<HD>(norm, lane);
  pdl_launch_dependents();
  pdl_wait();
  const int length = *p.length, first = blockIdx.x * kRopeRows, rows = min(min(*p.rows, p.max_rows) - first, kRopeRows);
  if (rows <= 0) return;
#pragma unroll
  for (int i = 0; i < kRopeRows / kRopeWarps; i++) {
    const int r = warp + i * kRopeWarps;
    if (r >= rows) continue;
    bf16* at = qkv_row<HD>(p, first + r) + (size_t)head * HD;
    const RawHead raw = load_head<HD>(at, lane);
    if (is_v) {
      each_dim<HD>(raw, lane, [&](int dim, uint16_t bits) { turned[dim][r] = bits; });
    } else {
      const int position = length + first + r;
      const RawHead done = norm_and_rope<HD>(raw, weights, norm != nullptr, p.norm_eps,
                                             turn_of<HD>(frequencies, p.rope_factor, position));
      store_head<HD>(is_q ? at : p.k_cache + ((size_t)kv_head * p.capacity + position) * HD, lane, done);
    }
  }
  if (!is_v) return;
  __syncthreads();
  uint16_t* v_head =
      reinterpret_cast<uint16_t*>(p.v_cache) + (size_t)(kv_head - p.n_kv_heads) * HD * p.capacity + length + first;
  if (lane < rows)
    for (int dim = warp; dim < HD; dim += kRopeWarps) v_head[(size_t)dim * p.capacity + lane] = turned[dim][lane];
}

// ---- prefill, second kernel ----
// Grid: (ceil(max_rows * group / 64), KV heads), 4 warps; a block does 64 columns, a warp 16 of them, over all
// positions up to its last row's. K and V of a step lie in shared memory in the order in which lanes read them; K of
// the next step is copied during softmax and p v, V during the scores (48 KB with q at head_dim 128, so that two blocks
// share an SM, each covering the other's barriers). Low block indices take the last rows: they work longest. State:
// `part` is the chunk under way, `total` the chunks before it.
constexpr int kPrefillWarps = 4;
constexpr int kPrefillThreads = 32 * kPrefillWarps, kPrefillColumns = 16 * kPrefillWarps;

template <int HD>
__device__ void attention_prefill(const AttentionParams& p) {
  constexpr int KI = HD / 32, NT = HD / 8;
  constexpr int kTogether = 4, kCopied = NT / 2 / kPrefillWarps;  // 8-dim tiles of V: sums under way together; of a
                                                                  // half, copied by a warp
  SHARED(uint4, k_step, [kTiles][KI][32]);
  SHARED(uint4, v_step, [NT][2][32]);
  SHARED(uint4, q_operand, [kPrefillWarps][KI][2][32]);  // a lane reads what it wrote: this spares 32 registers at
                                                         // head_dim 128
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int kv_head = blockIdx.y, group = p.n_heads / p.n_kv_heads;
  pdl_launch_dependents();
  pdl_wait();
  const int length = *p.length, n_columns = min(*p.rows, p.max_rows) * group;
  const int first_column = (gridDim.x - 1 - blockIdx.x) * kPrefillColumns;
  if (first_column >= n_columns) return;
  const int end = length + min(first_column + kPrefillColumns - 1, n_columns - 1) / group + 1;

  // Warp w copies tiles w and w + 4 of K (two blocks of 32 positions apart) and a quarter of each half of V's dims.
  const uint4* k_at = k_pieces<HD>(p, kv_head, 0, warp, lane);
  const uint4* v_at = v_pieces<HD>(p, kv_head, 0, kCopied * warp, lane);
  auto copy_k = [&] {
#pragma unroll
    for (int b = 0; b < 2; b++)
#pragma unroll
      for (int i = 0; i < KI; i++) copy_async(&k_step[4 * b + warp][i][lane], k_at + b * 32 * HD / 8 + i * kNextDims);
    copy_async_commit();
    k_at += kStep * HD / 8;
  };
  auto copy_v = [&](int half) {
#pragma unroll
    for (int n = 0; n < kCopied; n++)
#pragma unroll
      for (int b = 0; b < 2; b++)
        copy_async(&v_step[NT / 2 * half + kCopied * warp + n][b][lane],
                   v_at + (size_t)(NT / 2 * half + n) * p.capacity + b * kNextPositions);
    copy_async_commit();
    if (half) v_at += kStep / 8;
  };
  copy_k();
  copy_v(0);
  copy_v(1);

  // Columns g and g+8 of the warp; those past the last one see zeros and are not written.
  int last[2];  // position that a column sees last
  uint4 q[2][KI];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int column = first_column + 16 * warp + g + 8 * half;
    const int row = column / group;
    last[half] = length + row;
    const bf16* at = qkv_row<HD>(p, row) + (kv_head * group + column - row * group) * HD + 8 * t;
#pragma unroll
    for (int i = 0; i < KI; i++)
      q[half][i] =
          column < n_columns ? load_activations(reinterpret_cast<const uint4*>(at + 32 * i)) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < KI; i++) {
    q_operand[warp][i][0][lane] = make_uint4(q[0][i].x, q[1][i].x, q[0][i].y, q[1][i].y);
    q_operand[warp][i][1][lane] = make_uint4(q[0][i].z, q[1][i].z, q[0][i].w, q[1][i].w);
  }
  const int all_visible =
      length + (first_column + 16 * warp) / group;  // every column of the warp sees the positions up to here

  const float scale_log2 = p.scale * 1.44269504f;
  float part_m[2], part_l[2], part[NT][4];
  float total_m[2] = {-INFINITY, -INFINITY}, total_l[2] = {0.f, 0.f}, total[NT][4] = {};
  for (int position = 0; position < end;) {
#ifdef PLANT_FOLD_ORDER  // negative control of the tests: one chunk
    const int stop = end;
#else
    const int stop = min(attention_chunk_begin(attention_chunk_of(position) + 1), end);
#endif
#pragma unroll
    for (int half = 0; half < 2; half++) {
      part_m[half] = -INFINITY;
      part_l[half] = 0.f;
    }
#pragma unroll
    for (int n = 0; n < NT; n++) part[n][0] = part[n][1] = part[n][2] = part[n][3] = 0.f;
    Factors f_low, f_high;
#pragma unroll 1
    for (; position < stop; position += kStep) {
      copy_async_wait<2>();  // K; then V
      __syncthreads();
      float s[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; tile++) s[tile][0] = s[tile][1] = s[tile][2] = s[tile][3] = 0.f;
#pragma unroll 2
      for (int i = 0; i < KI; i++) {
        const uint4 q0 = q_operand[warp][i][0][lane], q1 = q_operand[warp][i][1][lane];
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++) {
          const uint4 k = k_step[tile][i][lane];
          mma_bf16(s[tile], q0, k.x, k.y);
          mma_bf16(s[tile], q1, k.z, k.w);
        }
      }
      __syncthreads();
      if (position + kStep < end) copy_k();
      else copy_async_commit();

      if (position + kStep - 1 > all_visible)
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
          for (int e = 0; e < 4; e++)
            s[tile][e] = visible(tile_position(tile, e & 1), last[e >> 1] - position - 8 * t) ? s[tile][e] : -INFINITY;
      float m_low = -INFINITY, m_high = -INFINITY;
#pragma unroll
      for (int tile = 0; tile < kTiles; tile++) {
        m_low = fmaxf(m_low, fmaxf(s[tile][0], s[tile][1]));
        m_high = fmaxf(m_high, fmaxf(s[tile][2], s[tile][3]));
      }
      m_low = quad_max(m_low);
      m_high = quad_max(m_high);
      part_m[0] = fold_maximum(part_m[0], m_low, scale_log2, f_low);
      part_m[1] = fold_maximum(part_m[1], m_high, scale_log2, f_high);
      uint4 probability[kTiles / 2];
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += 2) {
        const uint2 first = tile_probabilities(s[tile], m_low, m_high, scale_log2),
                    second = tile_probabilities(s[tile + 1], m_low, m_high, scale_log2);
        uint4& x = probability[tile / 2];
        x = make_uint4(first.x, first.y, second.x, second.y);
      }

      copy_async_wait<1>();
      __syncthreads();
      float weights[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int i = 0; i < kTiles / 2; i++) mma_bf16(weights, probability[i], kOnes, kOnes);
      // In halves: each is copied anew once it is read, and no more sums are under way than there are registers for.
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int first = NT / 2 * half; first < NT / 2 * (half + 1); first += kTogether) {
          float sum[kTogether][4];
#pragma unroll
          for (int n = 0; n < kTogether; n++) sum[n][0] = sum[n][1] = sum[n][2] = sum[n][3] = 0.f;
#pragma unroll
          for (int b = 0; b < 2; b++) {
            uint4 v[kTogether];
#pragma unroll
            for (int n = 0; n < kTogether; n++) v[n] = v_step[first + n][b][lane];
#pragma unroll
            for (int n = 0; n < kTogether; n++) mma_bf16(sum[n], probability[2 * b], v[n].x, v[n].y);
#pragma unroll
            for (int n = 0; n < kTogether; n++) mma_bf16(sum[n], probability[2 * b + 1], v[n].z, v[n].w);
          }
#pragma unroll
          for (int n = 0; n < kTogether; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
              part[first + n][e] = fold(part[first + n][e], sum[n][e], e < 2 ? f_low : f_high);
        }
        __syncthreads();
        if (position + kStep < end) copy_v(half);
        else copy_async_commit();
      }
      part_l[0] = fold(part_l[0], weights[0], f_low);
      part_l[1] = fold(part_l[1], weights[2], f_high);
    }
    total_m[0] = fold_maximum(total_m[0], part_m[0], scale_log2, f_low);
    total_m[1] = fold_maximum(total_m[1], part_m[1], scale_log2, f_high);
    total_l[0] = fold(total_l[0], part_l[0], f_low);
    total_l[1] = fold(total_l[1], part_l[1], f_high);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[n][e] = fold(total[n][e], part[n][e], e < 2 ? f_low : f_high);
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int column = first_column + 16 * warp + g + 8 * half;
    if (column >= n_columns) continue;
    const float inv = __fdiv_rn(1.f, total_l[half]);
    bf16* out = p.out + ((size_t)(column / group) * (p.n_heads - group) + kv_head * group + column) * HD + 2 * t;
#pragma unroll
    for (int n = 0; n < NT; n++)
      *reinterpret_cast<uint32_t*>(out + 8 * n) =
          bf16_pair(__fmul_rn(total[n][2 * half], inv), __fmul_rn(total[n][2 * half + 1], inv));
  }
}

}  // namespace

// The number after head_dim is the columns of a block; more lie along z.
KERNEL(attention_decode_64_16, AttentionParams, kDecodeThreads, 2) { attention_decode<64, 1>(p); }
KERNEL(attention_decode_64_32, AttentionParams, kDecodeThreads, 2) { attention_decode<64, 2>(p); }
KERNEL(attention_decode_128_16, AttentionParams, kDecodeThreads, 2) { attention_decode<128, 1>(p); }
KERNEL(attention_decode_128_32, AttentionParams, kDecodeThreads, 2) { attention_decode<128, 2>(p); }
KERNEL(attention_rope_64, AttentionParams, 32 * kRopeWarps) { attention_rope<64>(p); }
KERNEL(attention_rope_128, AttentionParams, 32 * kRopeWarps) { attention_rope<128>(p); }
KERNEL(attention_prefill_64, AttentionParams, kPrefillThreads, 2) { attention_prefill<64>(p); }
KERNEL(attention_prefill_128, AttentionParams, kPrefillThreads, 2) { attention_prefill<128>(p); }
