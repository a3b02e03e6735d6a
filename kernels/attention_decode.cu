// Attention of decode and verify passes (1 to 16 rows): norm, RoPE, cache write and attention in one kernel. The order
// of sums and of bytes is that of attention.cuh; what was measured and dropped: docs/decisions/kernels.md#attention.
//
// Grid: (blocks of a KV head: attention_blocks of the captured context, KV heads,
//        ceil(max_rows * group / (16 kQueryTiles))).
// A block of 8 warps does one split of the cache (split-KV) for 16 kQueryTiles columns: a chunk, or in short contexts
// one step of it, so that more SMs share the work. Nothing in the order of sums depends on that. Blocks without a live
// split leave at once. With one split in all, its block writes the output; else the last block to arrive combines all.
//
// Batch: S steps at a time. Warp w scores tile w of each (8 positions, all dims: head_dim / 32 pieces a lane), the
// warps exchange maxima and probabilities through shared memory, then warp w sums over them for head_dim / 64 tiles of
// 8 dims. Every byte of a batch is thus under way before the first is used, and the next batch is requested as soon as
// registers are free. Before the dependency wait the split is requested into L2: where it begins is a guess from the
// length of that moment, which costs at most time. Rows of this pass are patched into the loaded pieces from shared
// memory, since the block that writes them to the cache would wait long to read them back.
//
// Shared memory: q in operand order, new rows of K and V, maxima, probabilities, factors: 44 KB at most.
#include "attention.cuh"

namespace {

constexpr int kDecodeWarps = kTiles;
constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kMaxRows = kAttentionMaxRows;
constexpr int kNewPositions = kMaxRows + 8;  // new rows of V lie at positions from a multiple of 8
constexpr int kPrefetchSteps = 4;
constexpr int kFineColumns = 2048;  // head_dim times columns of a block up to which a split may be a step

// The positions [begin, stop) that a block works on; n_splits of all blocks of a KV head, of which a chunk has
// per_chunk.
struct Split {
  int n_splits, per_chunk, begin, stop;
};
// Of a pass that ends before position `end`; block 0 has the newest positions: they are the widest chunks and the rows
// to be written.
template <int kHeadDim, int kQueryTiles>
__device__ __forceinline__ Split split_of(int end, int block, int max_rows) {
  const int n_chunks = attention_chunk_of(end - 1) + 1;
  const bool fine = kHeadDim * 16 * kQueryTiles <= kFineColumns && n_chunks > 1 &&
                    end <= (max_rows == 1 ? kAttentionFineEnd : kAttentionFineEndOfMore);
  Split split;
  split.n_splits = fine ? (end + kStep - 1) / kStep : n_chunks;
  split.per_chunk = fine ? attention_chunk_begin(1) / kStep : 1;
  const int index = split.n_splits - 1 - block;
  split.begin = fine ? index * kStep : attention_chunk_begin(index);
  split.stop = min(fine ? split.begin + kStep : attention_chunk_begin(index + 1), end);
  return split;
}

// Combines the partials of columns [first_column, first_column + n_columns) over all splits and writes them out. A warp
// takes one column at a time: first a lane has a split and finds its factors, then a lane has head_dim / 32 dims and
// sums over the splits. stage: of the warp, [split]{factors in the chunk, factors of the chunk in the row; where the
// chunk is not complete, the latter mean nothing}; stage_l: [split].
template <int kHeadDim>
__device__ __forceinline__ void combine(const AttentionParams& p, const float* partials, size_t split_stride,
                                        int padded_columns, int kv_head, int first_column, int n_columns, int n_splits,
                                        int per_chunk, float4* stage, float* stage_l, int warp, int lane) {
  constexpr int V = kHeadDim / 32, kAhead = 16;
  const int group = p.n_heads / p.n_kv_heads;
  const float scale_log2 = p.scale * kLog2E;
  for (int column = first_column + warp; column < first_column + n_columns; column += kDecodeWarps) {
    const float* o_at = partials + (size_t)column * kHeadDim + V * lane;
    const float* ml_at = partials + (size_t)padded_columns * kHeadDim + 2 * column;
    float row_m = -INFINITY, row_l = 0.f, chunk_l = 0.f, row[V] = {}, chunk[V] = {};
    for (int base = 0; base < n_splits; base += 32) {
      const int n = min(n_splits - base, 32);
      float x[kAhead][V];
      auto load = [&](int from) {
#pragma unroll
        for (int a = 0; a < kAhead; a++) {
          const float* at = o_at + (size_t)(base + from + a) * split_stride;
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
      const float2 ml = lane < n ? *reinterpret_cast<const float2*>(ml_at + (size_t)(base + lane) * split_stride)
                                 : make_float2(-INFINITY, 0.f);
      // Maxima are exact in any order: before the split in its chunk, of the chunk, up to and with the chunk, before
      // the chunk.
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
      merge_maximum(in_chunk, ml.x, scale_log2, step);
      merge_maximum(before < 0 ? row_m : fmaxf(row_m, before_chunk), chunk_m, scale_log2, whole);
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
            chunk_l = merge(chunk_l, l, {f.x, f.y});
#pragma unroll
            for (int e = 0; e < V; e++) chunk[e] = merge(chunk[e], x[a][e], {f.x, f.y});
          }
          if (last) {
            row_l = merge(row_l, chunk_l, {f.z, f.w});
#pragma unroll
            for (int e = 0; e < V; e++) row[e] = merge(row[e], chunk[e], {f.z, f.w});
          }
        }
      }
    }
    const float inv = __fdiv_rn(1.f, row_l);
    uint32_t* to = reinterpret_cast<uint32_t*>(
        p.out + ((size_t)(column / group) * p.n_heads + kv_head * group + column % group) * kHeadDim + V * lane);
    const uint32_t low = bf16_pair(__fmul_rn(row[0], inv), __fmul_rn(row[1], inv));
    if constexpr (V == 4)
      *reinterpret_cast<uint2*>(to) = make_uint2(low, bf16_pair(__fmul_rn(row[2], inv), __fmul_rn(row[3], inv)));
    else *to = low;
  }
}

template <int kHeadDim, int kQueryTiles>
__device__ void attention_decode(const AttentionParams& p) {
  constexpr int KI = kHeadDim / 32, NT = kHeadDim / 64;  // K pieces of a tile; 8-dim tiles of V a warp
  constexpr int S = 256 / kHeadDim;                      // steps of a batch: 64 registers a lane for K and V
  constexpr int kColumns = 16 * kQueryTiles, kWarpColumns = kColumns / kDecodeWarps;
  static_assert(2 * kQueryTiles <= kDecodeWarps, "a warp keeps the maxima of half a query tile");
  // ---- Shared memory ----
  SHARED(uint4, q_operand, [kQueryTiles][KI][2][32]);  // [query tile][32 dims][half h][lane]: what mma_bf16 takes
  SHARED(bf16, new_k, [kMaxRows][kHeadDim]);
  SHARED(bf16, new_v, [kHeadDim][kNewPositions]);
  SHARED(float, tile_max, [S][kQueryTiles][16][kTiles]);         // [step][query tile][column][tile of 8 positions]
  SHARED(uint4, probability, [S][kQueryTiles][kTiles / 2][32]);  // [step][query tile][two tiles][lane]: as q_operand
  SHARED(Factors, factors, [S][kColumns]);
  SHARED(int, last_position, [kColumns]);  // of a column; -1 where there is none
  SHARED(float4, stage, [kDecodeWarps][32]);
  SHARED(float, stage_l, [kDecodeWarps][32]);
  SHARED(unsigned, flag, [1]);

  // ---- Who does what ----
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  // Live blocks are those with the lowest indices, of all KV heads.
  const int index = blockIdx.x + gridDim.x * blockIdx.y, kv_head = index % p.n_kv_heads, block = index / p.n_kv_heads;
  const int group = p.n_heads / p.n_kv_heads, first_column = blockIdx.z * kColumns,
            max_columns = min(p.max_rows * group - first_column, kColumns);
  const RopeFrequencies<kHeadDim> frequencies = rope_frequencies<kHeadDim>(p, lane);
  const HeadNorm<kHeadDim> q_norm = head_norm<kHeadDim>(p.q_norm, lane), k_norm = head_norm<kHeadDim>(p.k_norm, lane);
  pdl_launch_dependents();

  // ---- Before the wait: the likely split into L2 ----
  const int guess = min(load_current(p.length) + 1, p.capacity);
  const Split likely = split_of<kHeadDim, kQueryTiles>(guess, block, p.max_rows);
  if (block < likely.n_splits && blockIdx.z == 0) {
    const char* k_split =
        reinterpret_cast<const char*>(p.k_cache + ((size_t)kv_head * p.capacity + likely.begin) * kHeadDim);
    const char* v_split =
        reinterpret_cast<const char*>(p.v_cache + (size_t)kv_head * kHeadDim * p.capacity + likely.begin);
    for (int step = 0; step < kPrefetchSteps && likely.begin + step * kStep < likely.stop; step++)
#pragma unroll
      for (int i = threadIdx.x; i < 4 * kHeadDim; i += kDecodeThreads) {  // 32 bytes each
        prefetch_l2(k_split + (size_t)step * kStep * kHeadDim * 2 + 32 * i);
        prefetch_l2(v_split + ((size_t)(i >> 2) * p.capacity + step * kStep) * 2 + 32 * (i & 3));
      }
  }
  // A warp turns neighbouring columns, which often share a row, and the K of one row, from the last warp on.
  const int warp_columns = (max_columns + kDecodeWarps - 1) / kDecodeWarps, warp_column = warp * warp_columns;
  const int warp_row = (first_column + warp_column) / group, warp_head = first_column + warp_column - warp_row * group;
  const bf16* q_at = qkv_row<kHeadDim>(p, warp_row) + (kv_head * group + warp_head) * kHeadDim;
  const int new_row = warp - max(kDecodeWarps - p.max_rows, 0);
  const bf16* new_at = qkv_row<kHeadDim>(p, max(new_row, 0)) + (p.n_heads + kv_head) * kHeadDim;
  const size_t row_stride = (size_t)(p.n_heads + 2 * p.n_kv_heads) * kHeadDim;
  pdl_wait();

  // ---- Raw heads, which need no length; then the split ----
  const int length = load_current(p.length), rows = min(load_current(p.rows), p.max_rows);
  RawHead raw_q[kWarpColumns], raw_k = {0, 0}, raw_v = {0, 0};
  {
    int head = warp_head;
    const bf16* at = q_at;
#pragma unroll
    for (int i = 0; i < kWarpColumns; i++) {
      raw_q[i] = {0, 0};
      if (i < warp_columns && warp_column + i < max_columns) raw_q[i] = load_head<kHeadDim>(at, lane);
      at += kHeadDim;
      if (++head == group) {
        head = 0;
        at += row_stride - group * kHeadDim;
      }
    }
  }
  if (new_row >= 0) {
    raw_k = load_head<kHeadDim>(new_at, lane);
    raw_v = load_head<kHeadDim>(new_at + p.n_kv_heads * kHeadDim, lane);
  }

  const int n_columns = min(rows * group - first_column, kColumns), end = length + rows;
  if (n_columns <= 0) return;
  const Split split = split_of<kHeadDim, kQueryTiles>(end, block, p.max_rows);
  if (block >= split.n_splits) return;
  const int begin = split.begin, stop = split.stop, first_new = max(length, begin),
            n_new = stop - first_new;  // rows of this pass in this split, if positive

  // ---- The first batch of K and V is requested ----
  uint4 k[S][KI], v[S][NT][2];
  auto load_k = [&](int position) {
    const uint4* at = k_pieces<kHeadDim>(p, kv_head, position, warp, lane);
#pragma unroll
    for (int j = 0; j < S; j++)
      if (position + j * kStep < stop)
#pragma unroll
        for (int i = 0; i < KI; i++) k[j][i] = load_activations(at + j * (kStep * kHeadDim / 8) + i * kNextDims);
  };
  auto load_v = [&](int position) {
    const uint4* at = v_pieces<kHeadDim>(p, kv_head, position, NT * warp, lane);
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

  // ---- q: norm and RoPE, into operand order ----
  const int n_tiles = (n_columns + 15) / 16;
  int turned_row = -1;
  Turn<kHeadDim> turn;
  auto turn_to = [&](int row) {
    if (row != turned_row) turn = turn_of<kHeadDim>(frequencies, p.rope_factor, length + row);
    turned_row = row;
  };
  {
    int head = warp_head, row = warp_row;
#pragma unroll
    for (int i = 0; i < kWarpColumns; i++) {
      const int c = warp_column + i;
      if (i < warp_columns && c < n_columns) {
        turn_to(row);
        store_operand<kHeadDim>(q_operand[c >> 4], c & 15, lane,
                                norm_and_rope<kHeadDim>(raw_q[i], q_norm, p.q_norm != nullptr, p.norm_eps, turn));
      }
      if (++head == group) {
        head = 0;
        row++;
      }
    }
  }
  if (threadIdx.x < kColumns)
    last_position[threadIdx.x] = (int)threadIdx.x < n_columns ? length + (first_column + (int)threadIdx.x) / group : -1;
  // ---- New rows of K and V: into shared memory, and by one block into the cache ----
  const int new_base = first_new & ~7;
  for (int r = new_row; r >= 0 && r < rows; r += kDecodeWarps) {
    if (r != new_row) {
      raw_k = load_head<kHeadDim>(new_at + (r - new_row) * row_stride, lane);
      raw_v = load_head<kHeadDim>(new_at + (r - new_row) * row_stride + p.n_kv_heads * kHeadDim, lane);
    }
    const int position = length + r;
    if (position < first_new || position >= stop) continue;
    turn_to(r);
    const RawHead done = norm_and_rope<kHeadDim>(raw_k, k_norm, p.k_norm != nullptr, p.norm_eps, turn);
    store_head<kHeadDim>(new_k[position - first_new], lane, done);
    each_dim<kHeadDim>(raw_v, lane,
                       [&](int dim, uint16_t bits) { new_v[dim][position - new_base] = __ushort_as_bfloat16(bits); });
    if (blockIdx.z == 0) {
      store_head<kHeadDim>(p.k_cache + ((size_t)kv_head * p.capacity + position) * kHeadDim, lane, done);
      each_dim<kHeadDim>(raw_v, lane, [&](int dim, uint16_t bits) {
        reinterpret_cast<uint16_t*>(p.v_cache)[((size_t)kv_head * kHeadDim + dim) * p.capacity + position] = bits;
      });
    }
  }
  __syncthreads();

  // ---- Batches ----
  const float scale_log2 = p.scale * kLog2E;
  // The state of the split. m: of column g + 8 (w % 2) of query tile w / 2, in warp w.
  float m = -INFINITY, l[kQueryTiles][2], o[kQueryTiles][NT][4];
#pragma unroll
  for (int c = 0; c < kQueryTiles; c++) {
    l[c][0] = l[c][1] = 0.f;
#pragma unroll
    for (int n = 0; n < NT; n++) o[c][n][0] = o[c][n][1] = o[c][n][2] = o[c][n][3] = 0.f;
  }

#pragma unroll 1
  for (int position = begin; position < stop; position += S * kStep) {
    // ---- Batch: rows of this pass over what the cache had ----
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

    // ---- Batch: scores of the warp's tile ----
    float s[S][kQueryTiles][4];
#pragma unroll
    for (int j = 0; j < S; j++)
#pragma unroll
      for (int c = 0; c < kQueryTiles; c++) s[j][c][0] = s[j][c][1] = s[j][c][2] = s[j][c][3] = 0.f;
#pragma unroll
    for (int i = 0; i < KI; i++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < kQueryTiles; c++) {
          if (c >= n_tiles) break;
          const uint4 q = q_operand[c][i][h][lane];
#pragma unroll
          for (int j = 0; j < S; j++)
            if (position + j * kStep < stop) mma_bf16(s[j][c], q, h ? k[j][i].z : k[j][i].x, h ? k[j][i].w : k[j][i].y);
        }
    if (position + S * kStep < stop) load_k(position + S * kStep);
    // ---- Batch: the mask of what a column sees, and the tile's maxima ----
#pragma unroll
    for (int j = 0; j < S; j++) {
      const int at = position + j * kStep;
      if (at >= stop) break;
#pragma unroll
      for (int c = 0; c < kQueryTiles; c++) {
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

    // ---- Batch: probabilities, and the factors of the merge ----
#pragma unroll
    for (int c = 0; c < kQueryTiles; c++) {
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
        merge_maximum(before, mine, scale_log2, f);
        factors[t][16 * c + 8 * (warp & 1) + g] = f;
      }
    }
#ifndef PLANT_MISSING_BARRIER  // negative control of the tests
    __syncthreads();
#endif

    // ---- Batch: p v of the warp's dims, merged ----
#pragma unroll
    for (int c = 0; c < kQueryTiles; c++) {
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
        l[c][0] = merge(l[c][0], weights[0], low);
        l[c][1] = merge(l[c][1], weights[2], high);
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
          for (int e = 0; e < 4; e++) o[c][n][e] = merge(o[c][n][e], sum[n][e], e < 2 ? low : high);
      }
    }
    if (position + S * kStep < stop) load_v(position + S * kStep);
  }

  // ---- Output: of the only split the row, else partials, which the last block combines ----
  const bool direct = split.n_splits == 1;
  const int padded_columns = gridDim.z * kColumns;
  const size_t split_stride = (size_t)padded_columns * (kHeadDim + 2);
  float* partials =
      p.partials + (size_t)kv_head * gridDim.x * split_stride;  // [split]{[column][head_dim] o, [column]{m, l}}
  float* partial = partials + (split.n_splits - 1 - block) * split_stride;
#pragma unroll
  for (int c = 0; c < kQueryTiles; c++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int column = first_column + 16 * c + 8 * half + g;
      if (column - first_column >= n_columns) continue;
      const int row = column / group;
      const float inv = __fdiv_rn(1.f, l[c][half]);
      bf16* out = p.out + ((size_t)row * (p.n_heads - group) + kv_head * group + column) * kHeadDim;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        const int dim = 8 * (NT * warp + n) + 2 * t;
        const float o0 = o[c][n][2 * half], o1 = o[c][n][2 * half + 1];
        if (direct) *reinterpret_cast<uint32_t*>(out + dim) = bf16_pair(__fmul_rn(o0, inv), __fmul_rn(o1, inv));
        else *reinterpret_cast<float2*>(partial + (size_t)column * kHeadDim + dim) = make_float2(o0, o1);
      }
      if (!direct && warp == 2 * c + half && t == 0)
        *reinterpret_cast<float2*>(partial + (size_t)padded_columns * kHeadDim + 2 * column) =
            make_float2(m, l[c][half]);
    }
  if (direct) return;
  if (last_to_arrive(p.counters + kv_head * gridDim.z + blockIdx.z, split.n_splits, &flag[0]))
    combine<kHeadDim>(p, partials, split_stride, padded_columns, kv_head, first_column, n_columns, split.n_splits,
                      split.per_chunk, stage[warp], stage_l[warp], warp, lane);
}

}  // namespace

// The number after head_dim is the columns of a block; more lie along z.
KERNEL(attention_decode_64_16, AttentionParams, kDecodeThreads, 2) { attention_decode<64, 1>(p); }
KERNEL(attention_decode_64_32, AttentionParams, kDecodeThreads, 2) { attention_decode<64, 2>(p); }
KERNEL(attention_decode_128_16, AttentionParams, kDecodeThreads, 2) { attention_decode<128, 1>(p); }
KERNEL(attention_decode_128_32, AttentionParams, kDecodeThreads, 2) { attention_decode<128, 2>(p); }
