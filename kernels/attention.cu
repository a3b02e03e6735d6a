// Grouped-query attention over the KV cache: q/k norm, RoPE, the cache write and softmax(q k^T) v, for decode and verify passes (1 to 16 rows) and for
// prefill chunks. The qkv linear before and the output linear after are linear.cu; head_dim is 64 or 128. Read "The order of every sum" first: it is
// what both paths must share, since a row's bits may not depend on the pass that computed it.
//
// What it computes, for row i at position P = length + i, query head h, KV head h / group:
//   q = rope(norm(q_i,h)), cache row P of K = rope(norm(k_i)), cache row P of V = v_i;  out_i,h = sum_j<=P softmax_j(scale q.k_j) v_j
//
// ---- The order of every sum ----
// A column is one (row, query head) pair of a KV head: column = row * group + head in group. Columns are the 16-row operand of mma_bf16.
//   step:  64 positions from a multiple of 64, inside a chunk. Scores: one accumulator per position, 16 dims an mma, pieces of 32 dims in ascending order.
//          m' = max(m, maximum of the step); p = exp2((s - m') * scale * log2 e), rounded to bf16; o = o * exp2(m - m') + p v, in one accumulator a dim, 16
//          positions an mma, ascending tiles; l = l * exp2(m - m') + the sum of the rounded p (so the weights add up to one as they are used): lane t of a
//          quad adds its two positions of tiles 0..7 in order, then the quad adds over xor 1, xor 2.
//   chunk: its steps in ascending order, from an empty state (m = -inf, l = 0, o = 0). Boundaries: attention_chunk_begin in params.h.
//   row:   chunks folded in ascending order into an empty state, (m, l, o) and (m', l', o') both scaled to the larger maximum; out = bf16(o * (1 / l)).
// A position that a column must not see has p = 0, an empty chunk folds to nothing: neither changes a bit, as long as V is finite there. Columns of one
// pass that end in different steps or chunks thus share them.
//
// ---- Order of 16-byte pieces (the 8-column operand comes straight from the cache, no transposition) ----
// K is stored [position][dim], V is stored transposed [dim][position], so that a lane finds eight neighbours along the summed axis in 16 bytes.
// Lane 4g+t of a warp owns, in a block of 32 along the summed axis, elements 8t..8t+7, and uses 4h..4h+3 of them in mma h (0, 1), as in linear.cu.
// Tile T (0..7) of a step has 8 positions, chosen such that a lane's scores of tiles 4b..4b+3 are those of its own eight positions in block b of V:
// column n of tile T is position 32 (T / 4) + 8 (n / 2) + 2 (T % 4) + n % 2. Scores thus become the operand of p v without leaving the lane.
#include "common.cuh"

namespace {

constexpr int kStep = kAttentionStep;
constexpr int kTiles = kStep / 8;
// Up to this many chunks one block does all of a KV head and no partials are written: a step more costs a block about as much as a quarter of the write,
// the counter and the combine.
constexpr int kDirectChunks = 4;
static_assert(kDirectChunks * kStep <= kAttentionNarrowEnd, "the direct path takes every chunk to be one step");

// ---- the state of a softmax, for the two columns g and g+8 of a lane ----
struct Factors { float keep, add; };
// The maximum of a state and an addition, and what l and o of both are to be multiplied with.
__device__ __forceinline__ float fold_maximum(float m, float new_m, float scale_log2, Factors& f) {
  const float top = fmaxf(m, new_m);
  f.keep = m == top ? 1.f : exp2f(__fmul_rn(m - top, scale_log2));          // also for -inf against -inf
  f.add = new_m == top ? 1.f : exp2f(__fmul_rn(new_m - top, scale_log2));
  return top;
}
__device__ __forceinline__ float fold(float old, float addition, const Factors& f) { return __fmaf_rn(addition, f.add, __fmul_rn(old, f.keep)); }

__device__ __forceinline__ float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffffu, v, 2));
}
__device__ __forceinline__ float quad_sum(float v) {
  v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

// Position, within its step, of column n of tile T.
__device__ __forceinline__ int tile_position(int tile, int n) { return 32 * (tile >> 2) + 8 * (n >> 1) + 2 * (tile & 3) + (n & 1); }

// The probabilities of one tile for columns g (x) and g+8 (y), each two positions as a bf16 pair.
__device__ __forceinline__ uint2 tile_probabilities(const float (&s)[4], float m_low, float m_high, float scale_log2) {
  const float low = m_low == -INFINITY ? 0.f : -__fmul_rn(m_low, scale_log2), high = m_high == -INFINITY ? 0.f : -__fmul_rn(m_high, scale_log2);
  return make_uint2(bf16_pair(exp2f(__fmaf_rn(s[0], scale_log2, low)), exp2f(__fmaf_rn(s[1], scale_log2, low))),
                    bf16_pair(exp2f(__fmaf_rn(s[2], scale_log2, high)), exp2f(__fmaf_rn(s[3], scale_log2, high))));
}
__device__ __forceinline__ float pair_sum(uint32_t pair) { return __fadd_rn(bf16_low(pair), bf16_high(pair)); }

#ifdef PLANT_OFF_BY_ONE      // negative control of the tests
__device__ __forceinline__ bool visible(int position, int last) { return position < last; }
#else
__device__ __forceinline__ bool visible(int position, int last) { return position <= last; }
#endif

// ---- one head of one row, spread over a warp: lane l has dims P l .. P l + P - 1 and the same of the upper half, P = head_dim / 64 ----
struct RawHead { uint32_t lower, upper; };      // bf16 pairs (head_dim 128) or single values in the low half (64)
template <int HD> __device__ __forceinline__ RawHead load_head(const bf16* head, int lane) {
  if constexpr (HD == 128) return {reinterpret_cast<const uint32_t*>(head)[lane], reinterpret_cast<const uint32_t*>(head)[32 + lane]};
  return {reinterpret_cast<const uint16_t*>(head)[lane], reinterpret_cast<const uint16_t*>(head)[32 + lane]};
}
template <int HD> __device__ __forceinline__ void store_head(bf16* head, int lane, const RawHead& v) {
  if constexpr (HD == 128) { reinterpret_cast<uint32_t*>(head)[lane] = v.lower; reinterpret_cast<uint32_t*>(head)[32 + lane] = v.upper; }
  else { reinterpret_cast<uint16_t*>(head)[lane] = v.lower; reinterpret_cast<uint16_t*>(head)[32 + lane] = v.upper; }
}
// Calls visit(dim, bits) for each of the lane's elements.
template <int HD, class F> __device__ __forceinline__ void each_dim(const RawHead& v, int lane, F visit) {
  constexpr int P = HD / 64;
#pragma unroll
  for (int j = 0; j < P; j++) {
    visit(P * lane + j, (uint16_t)(v.lower >> 16 * j));
    visit(HD / 2 + P * lane + j, (uint16_t)(v.upper >> 16 * j));
  }
}

// sin and cos of x >= 0, off by at most 2e-7 up to 2^20: x - k pi/2 is exact in f32 (both are multiples of 2^-23 below 1), pi/2's own error is added back.
// (sinf has a slow path with a stack frame, which every thread would pay for in registers.)
__device__ __forceinline__ void sine_cosine(float x, float& sine, float& cosine) {
  const float k = rintf(x * 0.636619772f);
  const float r = __fmaf_rn(k, 4.37113883e-8f, __fmaf_rn(-k, 1.57079637f, x)), r2 = __fmul_rn(r, r);
  const float s = __fmaf_rn(__fmul_rn(r, r2), __fmaf_rn(r2, __fmaf_rn(r2, __fmaf_rn(r2, 2.7557319e-6f, -1.98412698e-4f), 8.33333333e-3f), -0.166666667f), r);
  const float c = __fmaf_rn(__fmul_rn(r2, r2), __fmaf_rn(r2, __fmaf_rn(r2, __fmaf_rn(r2, -2.7557319e-7f, 2.48015873e-5f), -1.38888889e-3f), 4.16666667e-2f),
                            __fmaf_rn(r2, -0.5f, 1.f));
  const int quadrant = (int)k & 3;
  const float a = quadrant & 1 ? c : s, b = quadrant & 1 ? s : c;
  sine = quadrant & 2 ? -a : a;
  cosine = (quadrant + 1) & 2 ? -b : b;
}

// What rope needs that does not change: loaded before pdl_wait.
template <int HD> struct RopeConstants { float frequency[HD / 64], norm[HD / 32]; };
template <int HD> __device__ __forceinline__ RopeConstants<HD> rope_constants(const AttentionParams& p, const bf16* norm, int lane) {
  constexpr int P = HD / 64;
  RopeConstants<HD> c;
#pragma unroll
  for (int j = 0; j < P; j++) {
    c.frequency[j] = p.inv_freq[P * lane + j];
    c.norm[j] = norm ? __bfloat162float(norm[P * lane + j]) : 1.f;
    c.norm[P + j] = norm ? __bfloat162float(norm[HD / 2 + P * lane + j]) : 1.f;
  }
  return c;
}
// RMSNorm (if the model has one) and RoPE of one head at `position`: dims i and i + head_dim / 2 turn together. f32, rounded to bf16 once.
template <int HD> __device__ __forceinline__ RawHead norm_and_rope(const RawHead& raw, const RopeConstants<HD>& c, bool norm, const AttentionParams& p, int position) {
  constexpr int P = HD / 64;
  float x[2 * P];
  x[0] = bf16_low(raw.lower); x[P] = bf16_low(raw.upper);
  if constexpr (P == 2) { x[1] = bf16_high(raw.lower); x[3] = bf16_high(raw.upper); }
  if (norm) {
    float squares = 0.f;
#pragma unroll
    for (int j = 0; j < 2 * P; j++) squares = __fmaf_rn(x[j], x[j], squares);
    const float inv = rsqrtf(__fmaf_rn(warp_sum(squares), 1.f / HD, p.norm_eps));
#pragma unroll
    for (int j = 0; j < 2 * P; j++) x[j] = __fmul_rn(__fmul_rn(x[j], inv), c.norm[j]);
  }
  float y[2 * P];
#pragma unroll
  for (int j = 0; j < P; j++) {
    float sine, cosine;
    sine_cosine(__fmul_rn((float)position, c.frequency[j]), sine, cosine);
    sine = __fmul_rn(sine, p.rope_factor); cosine = __fmul_rn(cosine, p.rope_factor);
    y[j] = __fmaf_rn(x[j], cosine, -__fmul_rn(x[P + j], sine));
    y[P + j] = __fmaf_rn(x[P + j], cosine, __fmul_rn(x[j], sine));
  }
  if constexpr (P == 2) return {bf16_pair(y[0], y[1]), bf16_pair(y[2], y[3])};
  return {bf16_pair(y[0], 0.f), bf16_pair(y[1], 0.f)};
}

template <int HD> __device__ __forceinline__ bf16* qkv_row(const AttentionParams& p, int row) { return p.qkv + (size_t)row * (p.n_heads + 2 * p.n_kv_heads) * HD; }

// Where a lane finds its pieces of the step at `position`: of tile T of K, dims 32i.. being i * kNextDims further, the next step's kStep * HD / 8; and of
// V's dims 8n.., positions 32b.. being b * kNextPositions further, dims 8 (n + 1).. `capacity`, the next step's kStep / 8. All in units of 16 bytes.
constexpr int kNextDims = 4, kNextPositions = 4;
template <int HD> __device__ __forceinline__ const uint4* k_pieces(const AttentionParams& p, int kv_head, int position, int tile, int lane) {
  return reinterpret_cast<const uint4*>(p.k_cache + ((size_t)kv_head * p.capacity + position + tile_position(tile, lane >> 2)) * HD + 8 * (lane & 3));
}
template <int HD> __device__ __forceinline__ const uint4* v_pieces(const AttentionParams& p, int kv_head, int position, int n, int lane) {
  return reinterpret_cast<const uint4*>(p.v_cache + ((size_t)kv_head * HD + 8 * n + (lane >> 2)) * p.capacity + position + 8 * (lane & 3));
}

// ---- decode and verify ----
// Grid: (chunks of the captured context, KV heads, ceil(max_rows * group / (16 TILES))). A block of 8 warps does one chunk for 16 TILES columns; blocks
// without a live chunk leave at once. Low block indices take the newest chunks: they are the widest and hold the rows to be written.
// A step: warp w scores tile w (8 positions, all dims: head_dim / 32 pieces a lane), the warps exchange maxima and probabilities through shared memory,
// then warp w sums over them for head_dim / 64 tiles of 8 dims. Every byte of the step is thus under way before the first is used, and the next step's K
// and V are requested as soon as this step's registers are free. Rows of this pass are patched into the loaded pieces from shared memory, since the
// block that writes them to the cache would wait long to read them back.
// Shared memory: q in operand order, new rows of K and V (16 each), maxima, sums, probabilities: 44 KB at most.
constexpr int kDecodeWarps = kTiles;
constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kMaxRows = kAttentionMaxRows;

// Folds the partials of columns [0, n_columns) of this block's column group, over all live chunks, and writes them out.
// A warp takes one column and 64 dims at a time; eight chunks are loaded before the first is folded.
template <int HD> __device__ void combine(const AttentionParams& p, const float* partials, size_t chunk_stride, int padded_columns, int kv_head, int first_column, int n_columns,
                                          int n_chunks, int warp, int n_warps, int lane) {
  constexpr int kAhead = 8;
  const int group = p.n_heads / p.n_kv_heads;
  const float scale_log2 = p.scale * 1.44269504f;
  for (int unit = warp; unit < n_columns * (HD / 64); unit += n_warps) {
    const int column = first_column + unit / (HD / 64), dim = unit % (HD / 64) * 64 + 2 * lane;
    const float* o_at = partials + (size_t)column * HD + dim;
    const float* ml_at = partials + (size_t)padded_columns * HD + 2 * column;
    float m = -INFINITY, l = 0.f, o0 = 0.f, o1 = 0.f;
    for (int c = 0; c < n_chunks; c += kAhead) {
      float2 o[kAhead], ml[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; a++) {
        const size_t at = (size_t)min(c + a, n_chunks - 1) * chunk_stride;
        o[a] = *reinterpret_cast<const float2*>(o_at + at);
        ml[a] = *reinterpret_cast<const float2*>(ml_at + at);
      }
#pragma unroll
      for (int a = 0; a < kAhead; a++)
        if (c + a < n_chunks) {
          Factors f;
          m = fold_maximum(m, ml[a].x, scale_log2, f);
          l = fold(l, ml[a].y, f);
          o0 = fold(o0, o[a].x, f); o1 = fold(o1, o[a].y, f);
        }
    }
    const float inv = __fdiv_rn(1.f, l);
    bf16* to = p.out + ((size_t)(column / group) * p.n_heads + kv_head * group + column % group) * HD + dim;
    *reinterpret_cast<uint32_t*>(to) = bf16_pair(__fmul_rn(o0, inv), __fmul_rn(o1, inv));
  }
}

template <int HD, int TILES> __device__ void attention_decode(const AttentionParams& p) {
  constexpr int KI = HD / 32, NT = HD / 64;      // K pieces of a tile; 8-dim tiles of V a warp
  constexpr int kColumns = 16 * TILES;
  SHARED(uint4, q_operand, [TILES][KI][2][32]);          // [column tile][32 dims][half h][lane]: what mma_bf16 takes
  SHARED(bf16, new_k, [kMaxRows][HD]);
  SHARED(bf16, new_v, [kMaxRows][HD]);
  SHARED(float, tile_max, [TILES][16][kTiles]);          // [column tile][column][tile of 8 positions]
  SHARED(float, state_max, [2][kColumns]);               // m before and after the step under way
  SHARED(float, state_sum, [kColumns]);                  // l at the end
  SHARED(Factors, factors, [kColumns]);
  SHARED(float2, tile_sum, [TILES][kTiles][32]);         // per lane, columns g and g+8
  SHARED(uint2, probability, [TILES][kTiles][32]);
  SHARED(int, last_position, [kColumns]);                // of a column; -1 where there is none
  SHARED(unsigned, flag, [1]);

  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int kv_head = blockIdx.y, group = p.n_heads / p.n_kv_heads, first_column = blockIdx.z * kColumns;
  const RopeConstants<HD> q_constants = rope_constants<HD>(p, p.q_norm, lane), k_constants = rope_constants<HD>(p, p.k_norm, lane);
  auto q_of = [&](int c) { const int column = first_column + c; return qkv_row<HD>(p, column / group) + (kv_head * group + column % group) * HD; };
  const bf16* first_q = q_of(warp);
  pdl_launch_dependents();
  pdl_wait();

  // A raw head needs no length, so the first is requested together with it.
  RawHead raw_q = {0, 0};
  if (first_column + warp < p.max_rows * group) raw_q = load_head<HD>(first_q, lane);
  const int length = *p.length, rows = min(*p.rows, p.max_rows);
  const int n_columns = min(rows * group - first_column, kColumns), end = length + rows;
  if (n_columns <= 0) return;
  const int n_chunks = attention_chunk_of(end - 1) + 1;
  const bool direct = n_chunks <= kDirectChunks;
  const int chunk = direct ? 0 : n_chunks - 1 - (int)blockIdx.x;
  if (chunk < 0 || (direct && blockIdx.x > 0)) return;
  const int begin = attention_chunk_begin(chunk), stop = direct ? end : min(attention_chunk_begin(chunk + 1), end);
  const int first_new = max(length, begin), n_new = stop - first_new;      // rows of this pass in this chunk, if positive

  const uint4* k_at = k_pieces<HD>(p, kv_head, begin, warp, lane);
  const uint4* v_at = v_pieces<HD>(p, kv_head, begin, NT * warp, lane);
  uint4 k[KI], v[NT][2];
  auto load_k = [&] {
#pragma unroll
    for (int i = 0; i < KI; i++) k[i] = load_activations(k_at + i * kNextDims);
    k_at += kStep * HD / 8;
  };
  auto load_v = [&] {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int b = 0; b < 2; b++) v[n][b] = load_activations(v_at + (size_t)n * p.capacity + b * kNextPositions);
    v_at += kStep / 8;
  };
  load_k();
  load_v();

  const int n_tiles = (n_columns + 15) / 16;
#pragma unroll 1
  for (int c = warp; c < kColumns; c += kDecodeWarps) {
    const int row = (first_column + c) / group;
    if (c < n_columns) {
      const RawHead q = norm_and_rope<HD>(raw_q, q_constants, p.q_norm != nullptr, p, length + row);
      if (c + kDecodeWarps < n_columns) raw_q = load_head<HD>(q_of(c + kDecodeWarps), lane);
      each_dim<HD>(q, lane, [&](int dim, uint16_t bits) {
        uint4& operand = q_operand[c >> 4][dim >> 5][dim >> 2 & 1][(c & 7) * 4 + (dim >> 3 & 3)];
        reinterpret_cast<uint16_t*>(&operand)[(dim & 2) * 2 + (c >> 3 & 1) * 2 + (dim & 1)] = bits;
      });
    }
    if (lane == 0) {
      last_position[c] = c < n_columns ? length + row : -1;
      state_max[0][c] = -INFINITY;
    }
  }
  for (int r = warp; r < n_new; r += kDecodeWarps) {
    const int position = first_new + r;
    const bf16* row = qkv_row<HD>(p, position - length) + (p.n_heads + kv_head) * HD;
    const RawHead new_v_head = load_head<HD>(row + p.n_kv_heads * HD, lane);
    const RawHead new_k_head = norm_and_rope<HD>(load_head<HD>(row, lane), k_constants, p.k_norm != nullptr, p, position);
    store_head<HD>(new_k[r], lane, new_k_head);
    store_head<HD>(new_v[r], lane, new_v_head);
    if (blockIdx.z == 0) {
      store_head<HD>(p.k_cache + ((size_t)kv_head * p.capacity + position) * HD, lane, new_k_head);
      each_dim<HD>(new_v_head, lane, [&](int dim, uint16_t bits) {
        reinterpret_cast<uint16_t*>(p.v_cache)[((size_t)kv_head * HD + dim) * p.capacity + position] = bits;
      });
    }
  }
  __syncthreads();

  const float scale_log2 = p.scale * 1.44269504f;
  // The state of a wide chunk, or, where chunks are steps, of all chunks up to here (of several only in the direct path).
  const bool wide = begin >= kAttentionNarrowEnd;
  float l = 0.f, o[TILES][NT][4];      // l: of column g + 8 (w % 2) of column tile w / 2, in warp w
#pragma unroll
  for (int c = 0; c < TILES; c++)
#pragma unroll
    for (int n = 0; n < NT; n++) o[c][n][0] = o[c][n][1] = o[c][n][2] = o[c][n][3] = 0.f;

  int now = 0;      // which state_max is that before the step
  for (int position = begin; position < stop; position += kStep, now ^= 1) {
    const bool tail = position + kStep > first_new;
    if (tail) {       // rows of this pass are not in the cache yet
      const int k_row = position + tile_position(warp, g) - first_new;
      if (k_row >= 0 && k_row < n_new) {
#pragma unroll
        for (int i = 0; i < KI; i++) k[i] = *reinterpret_cast<const uint4*>(&new_k[k_row][32 * i + 8 * t]);
      }
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int b = 0; b < 2; b++) {
          uint32_t word[4] = {v[n][b].x, v[n][b].y, v[n][b].z, v[n][b].w};
#pragma unroll
          for (int e = 0; e < 8; e++) {
            const int row = position + 32 * b + 8 * t + e - first_new;
            if (row >= 0 && row < n_new) {
              const uint32_t bits = __bfloat16_as_ushort(new_v[row][8 * (NT * warp + n) + g]);
              word[e >> 1] = e & 1 ? (word[e >> 1] & 0xffffu) | bits << 16 : (word[e >> 1] & 0xffff0000u) | bits;
            }
          }
          v[n][b] = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }

    float s[TILES][4];
#pragma unroll
    for (int c = 0; c < TILES; c++) {
      if (c >= n_tiles) break;
      s[c][0] = s[c][1] = s[c][2] = s[c][3] = 0.f;
#pragma unroll
      for (int i = 0; i < KI; i++) {
        mma_bf16(s[c], q_operand[c][i][0][lane], k[i].x, k[i].y);
        mma_bf16(s[c], q_operand[c][i][1][lane], k[i].z, k[i].w);
      }
    }
    if (position + kStep < stop) load_k();
#pragma unroll
    for (int c = 0; c < TILES; c++) {
      if (c >= n_tiles) break;
      if (tail) {
        const int at = position + tile_position(warp, 2 * t), low = last_position[16 * c + g], high = last_position[16 * c + g + 8];
        s[c][0] = visible(at, low) ? s[c][0] : -INFINITY; s[c][1] = visible(at + 1, low) ? s[c][1] : -INFINITY;
        s[c][2] = visible(at, high) ? s[c][2] : -INFINITY; s[c][3] = visible(at + 1, high) ? s[c][3] : -INFINITY;
      }
      const float low = quad_max(fmaxf(s[c][0], s[c][1])), high = quad_max(fmaxf(s[c][2], s[c][3]));
      if (t == 0) { tile_max[c][g][warp] = low; tile_max[c][g + 8][warp] = high; }
    }
    __syncthreads();

#pragma unroll
    for (int c = 0; c < TILES; c++) {
      if (c >= n_tiles) break;
      float reference[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int column = 16 * c + 8 * half + g;
        const float4* at = reinterpret_cast<const float4*>(tile_max[c][g + 8 * half]);
        const float4 a = at[0], b = at[1];
        const float step_max = fmaxf(fmaxf(fmaxf(a.x, a.y), fmaxf(a.z, a.w)), fmaxf(fmaxf(b.x, b.y), fmaxf(b.z, b.w)));
        const float before = state_max[now][column];
        reference[half] = wide ? fmaxf(before, step_max) : step_max;
        if (warp == 2 * c + half && t == 0) {
          Factors f;
          state_max[now ^ 1][column] = fold_maximum(before, step_max, scale_log2, f);
          if (wide) f.add = 1.f;
          factors[column] = f;
        }
      }
      const uint2 pair = tile_probabilities(s[c], reference[0], reference[1], scale_log2);
      probability[c][warp][lane] = pair;
      tile_sum[c][warp][lane] = make_float2(pair_sum(pair.x), pair_sum(pair.y));
    }
#ifndef PLANT_MISSING_BARRIER      // negative control of the tests
    __syncthreads();
#endif

#pragma unroll
    for (int c = 0; c < TILES; c++) {
      if (c >= n_tiles) break;
      const Factors f_low = factors[16 * c + g], f_high = factors[16 * c + g + 8];
      if (warp >> 1 == c) {
        const float* at = reinterpret_cast<const float*>(&tile_sum[c][0][lane]) + (warp & 1);
        float sum = 0.f;
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++) sum = __fadd_rn(sum, at[tile * 64]);
        l = fold(l, quad_sum(sum), warp & 1 ? f_high : f_low);
      }
      float sum[NT][4];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) sum[n][e] = wide ? __fmul_rn(o[c][n][e], e < 2 ? f_low.keep : f_high.keep) : 0.f;
#pragma unroll
      for (int b = 0; b < 2; b++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint2 first = probability[c][4 * b + 2 * h][lane], second = probability[c][4 * b + 2 * h + 1][lane];
#pragma unroll
          for (int n = 0; n < NT; n++) mma_bf16(sum[n], make_uint4(first.x, first.y, second.x, second.y), h ? v[n][b].z : v[n][b].x, h ? v[n][b].w : v[n][b].y);
        }
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) o[c][n][e] = wide ? sum[n][e] : fold(o[c][n][e], sum[n][e], e < 2 ? f_low : f_high);
    }
    if (position + kStep < stop) load_v();
  }

  if (t == 0 && warp < 2 * TILES) state_sum[16 * (warp >> 1) + 8 * (warp & 1) + g] = l;
  __syncthreads();
  const int padded_columns = gridDim.z * kColumns;
  const size_t chunk_stride = (size_t)padded_columns * (HD + 2);
  float* partials = p.partials + (size_t)kv_head * gridDim.x * chunk_stride;      // [chunk]{[column][head_dim] o, [column]{m, l}}
#pragma unroll
  for (int c = 0; c < TILES; c++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = 16 * c + 8 * half + g;
      if (column >= n_columns) continue;
      const int all_column = first_column + column;
      const float inv = __fdiv_rn(1.f, state_sum[column]);
      bf16* out = p.out + ((size_t)(all_column / group) * p.n_heads + kv_head * group + all_column % group) * HD;
      float* partial = partials + chunk * chunk_stride;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const int dim = 8 * (NT * warp + n) + 2 * t;
        const float o0 = o[c][n][2 * half], o1 = o[c][n][2 * half + 1];
        if (direct) *reinterpret_cast<uint32_t*>(out + dim) = bf16_pair(__fmul_rn(o0, inv), __fmul_rn(o1, inv));
        else *reinterpret_cast<float2*>(partial + (size_t)all_column * HD + dim) = make_float2(o0, o1);
      }
      if (!direct && warp == 0 && t == 0) *reinterpret_cast<float2*>(partial + (size_t)padded_columns * HD + 2 * all_column) = make_float2(state_max[now][column], state_sum[column]);
    }
  if (direct) return;
  if (last_to_arrive(p.counters + kv_head * gridDim.z + blockIdx.z, n_chunks, &flag[0]))
    combine<HD>(p, partials, chunk_stride, padded_columns, kv_head, first_column, n_columns, n_chunks, warp, kDecodeWarps, lane);
}

// ---- prefill, first kernel: norm and RoPE of q in place, K and V into the cache ----
// Grid: (ceil(max_rows / 32), n_heads + 2 n_kv_heads), 8 warps; a block does 32 rows of one head. V is turned in shared memory, so that a warp writes 32
// neighbouring positions of one dim.
constexpr int kRopeRows = 32, kRopeWarps = 8;
template <int HD> __device__ void attention_rope(const AttentionParams& p) {
  SHARED(uint16_t, turned, [HD][kRopeRows + 2]);           // + 2: neighbouring dims start in other banks
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.y, kv_head = head - p.n_heads;      // of K while below n_kv_heads, then of V
  const bool is_q = kv_head < 0, is_v = kv_head >= p.n_kv_heads;
  const bf16* norm = is_q ? p.q_norm : p.k_norm;
  const RopeConstants<HD> constants = rope_constants<HD>(p, norm, lane);
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
      const RawHead done = norm_and_rope<HD>(raw, constants, norm != nullptr, p, position);
      store_head<HD>(is_q ? at : p.k_cache + ((size_t)kv_head * p.capacity + position) * HD, lane, done);
    }
  }
  if (!is_v) return;
  __syncthreads();
  uint16_t* v_head = reinterpret_cast<uint16_t*>(p.v_cache) + (size_t)(kv_head - p.n_kv_heads) * HD * p.capacity + length + first;
  if (lane < rows)
    for (int dim = warp; dim < HD; dim += kRopeWarps) v_head[(size_t)dim * p.capacity + lane] = turned[dim][lane];
}

// ---- prefill, second kernel ----
// Grid: (ceil(max_rows * group / 64), KV heads), 4 warps; a block does 64 columns, a warp 16 of them, over all positions up to its last row's.
// K and V of a step lie in shared memory in the order in which lanes read them; K of the next step is copied during softmax and p v, V during the
// scores (48 KB with q at head_dim 128, so that two blocks share an SM, each covering the other's barriers). Low block indices take the last rows: they work longest.
// State: `part` is the chunk under way, `total` the chunks before it.
constexpr int kPrefillWarps = 4;
constexpr int kPrefillThreads = 32 * kPrefillWarps, kPrefillColumns = 16 * kPrefillWarps;

template <int HD> __device__ void attention_prefill(const AttentionParams& p) {
  constexpr int KI = HD / 32, NT = HD / 8;
  SHARED(uint4, k_step, [kTiles][KI][32]);
  SHARED(uint4, v_step, [NT][2][32]);
  SHARED(uint4, q_operand, [kPrefillWarps][KI][2][32]);      // a lane reads what it wrote: this spares 32 registers at head_dim 128
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int kv_head = blockIdx.y, group = p.n_heads / p.n_kv_heads;
  pdl_launch_dependents();
  pdl_wait();
  const int length = *p.length, n_columns = min(*p.rows, p.max_rows) * group;
  const int first_column = (gridDim.x - 1 - blockIdx.x) * kPrefillColumns;
  if (first_column >= n_columns) return;
  const int end = length + min(first_column + kPrefillColumns - 1, n_columns - 1) / group + 1;

  // Warp w copies tiles w and w + 4 of K (two blocks of 32 positions apart) and a quarter of V's dims.
  const uint4* k_at = k_pieces<HD>(p, kv_head, 0, warp, lane);
  const uint4* v_at = v_pieces<HD>(p, kv_head, 0, NT / kPrefillWarps * warp, lane);
  auto copy_k = [&] {
#pragma unroll
    for (int b = 0; b < 2; b++)
#pragma unroll
      for (int i = 0; i < KI; i++) copy_async(&k_step[4 * b + warp][i][lane], k_at + b * 32 * HD / 8 + i * kNextDims);
    copy_async_commit();
    k_at += kStep * HD / 8;
  };
  auto copy_v = [&] {
#pragma unroll
    for (int n = 0; n < NT / kPrefillWarps; n++)
#pragma unroll
      for (int b = 0; b < 2; b++) copy_async(&v_step[NT / kPrefillWarps * warp + n][b][lane], v_at + (size_t)n * p.capacity + b * kNextPositions);
    copy_async_commit();
    v_at += kStep / 8;
  };
  copy_k();
  copy_v();

  // Columns g and g+8 of the warp; those past the last one see zeros and are not written.
  int row[2];
  uint4 q[2][KI];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int column = first_column + 16 * warp + g + 8 * half;
    row[half] = column / group;
    const bf16* at = qkv_row<HD>(p, row[half]) + (kv_head * group + column - row[half] * group) * HD + 8 * t;
#pragma unroll
    for (int i = 0; i < KI; i++) q[half][i] = column < n_columns ? load_activations(reinterpret_cast<const uint4*>(at + 32 * i)) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < KI; i++) {
    q_operand[warp][i][0][lane] = make_uint4(q[0][i].x, q[1][i].x, q[0][i].y, q[1][i].y);
    q_operand[warp][i][1][lane] = make_uint4(q[0][i].z, q[1][i].z, q[0][i].w, q[1][i].w);
  }
  const int all_visible = length + (first_column + 16 * warp) / group;      // every column of the warp sees the positions up to here

  const float scale_log2 = p.scale * 1.44269504f;
  float part_m[2], part_l[2], part[NT][4];
  float total_m[2] = {-INFINITY, -INFINITY}, total_l[2] = {0.f, 0.f}, total[NT][4] = {};
  for (int position = 0; position < end;) {
#ifdef PLANT_FOLD_ORDER      // negative control of the tests: one chunk
    const int stop = end;
#else
    const int stop = min(attention_chunk_begin(attention_chunk_of(position) + 1), end);
#endif
#pragma unroll
    for (int half = 0; half < 2; half++) { part_m[half] = -INFINITY; part_l[half] = 0.f; }
#pragma unroll
    for (int n = 0; n < NT; n++) part[n][0] = part[n][1] = part[n][2] = part[n][3] = 0.f;
    Factors f_low, f_high;
#pragma unroll 1
    for (; position < stop; position += kStep) {
      copy_async_wait<1>();
      __syncthreads();
      float s[kTiles][4];
#pragma unroll
      for (int tile = 0; tile < kTiles; tile++) s[tile][0] = s[tile][1] = s[tile][2] = s[tile][3] = 0.f;
#pragma unroll
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
          for (int e = 0; e < 4; e++) s[tile][e] = visible(tile_position(tile, e & 1), length + row[e >> 1] - position - 8 * t) ? s[tile][e] : -INFINITY;
      float m_low = -INFINITY, m_high = -INFINITY;
#pragma unroll
      for (int tile = 0; tile < kTiles; tile++) { m_low = fmaxf(m_low, fmaxf(s[tile][0], s[tile][1])); m_high = fmaxf(m_high, fmaxf(s[tile][2], s[tile][3])); }
      m_low = quad_max(m_low); m_high = quad_max(m_high);
      part_m[0] = fold_maximum(part_m[0], m_low, scale_log2, f_low);
      part_m[1] = fold_maximum(part_m[1], m_high, scale_log2, f_high);
      uint2 probability[kTiles];
      float low = 0.f, high = 0.f;
#pragma unroll
      for (int tile = 0; tile < kTiles; tile++) {
        probability[tile] = tile_probabilities(s[tile], part_m[0], part_m[1], scale_log2);
        low = __fadd_rn(low, pair_sum(probability[tile].x)); high = __fadd_rn(high, pair_sum(probability[tile].y));
      }
      part_l[0] = fold(part_l[0], quad_sum(low), {f_low.keep, 1.f});
      part_l[1] = fold(part_l[1], quad_sum(high), {f_high.keep, 1.f});
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) part[n][e] = __fmul_rn(part[n][e], e < 2 ? f_low.keep : f_high.keep);

      copy_async_wait<1>();
      __syncthreads();
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int b = 0; b < 2; b++) {
          const uint4 v = v_step[n][b][lane];
          const uint2* x = &probability[4 * b];
          mma_bf16(part[n], make_uint4(x[0].x, x[0].y, x[1].x, x[1].y), v.x, v.y);
          mma_bf16(part[n], make_uint4(x[2].x, x[2].y, x[3].x, x[3].y), v.z, v.w);
        }
      __syncthreads();
      if (position + kStep < end) copy_v();
      else copy_async_commit();
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
    bf16* out = p.out + ((size_t)row[half] * (p.n_heads - group) + kv_head * group + column) * HD + 2 * t;
#pragma unroll
    for (int n = 0; n < NT; n++)
      *reinterpret_cast<uint32_t*>(out + 8 * n) = bf16_pair(__fmul_rn(total[n][2 * half], inv), __fmul_rn(total[n][2 * half + 1], inv));
  }
}

}  // namespace

// The number after head_dim is the columns of a block: take the smallest that holds max_rows * group, or 64 and several blocks along z.
KERNEL(attention_decode_64_16, AttentionParams, kDecodeThreads, 2) { attention_decode<64, 1>(p); }
KERNEL(attention_decode_64_32, AttentionParams, kDecodeThreads, 2) { attention_decode<64, 2>(p); }
KERNEL(attention_decode_64_64, AttentionParams, kDecodeThreads, 2) { attention_decode<64, 4>(p); }
KERNEL(attention_decode_128_16, AttentionParams, kDecodeThreads, 2) { attention_decode<128, 1>(p); }
KERNEL(attention_decode_128_32, AttentionParams, kDecodeThreads, 2) { attention_decode<128, 2>(p); }
KERNEL(attention_decode_128_64, AttentionParams, kDecodeThreads, 2) { attention_decode<128, 4>(p); }
KERNEL(attention_rope_64, AttentionParams, 32 * kRopeWarps) { attention_rope<64>(p); }
KERNEL(attention_rope_128, AttentionParams, 32 * kRopeWarps) { attention_rope<128>(p); }
KERNEL(attention_prefill_64, AttentionParams, kPrefillThreads, 2) { attention_prefill<64>(p); }
KERNEL(attention_prefill_128, AttentionParams, kPrefillThreads, 2) { attention_prefill<128>(p); }
