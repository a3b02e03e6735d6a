// Attention of a prefill chunk, in two kernels: attention_rope, then attention_prefill. The order of sums and of bytes
// is that of attention.cuh; what was measured: docs/decisions/kernels.md#attention.
#include "attention.cuh"

namespace {

// ---- attention_rope: norm and RoPE of q in place, K and V into the cache ----
// Grid: (ceil(max_rows / 32), n_heads + 2 n_kv_heads), 8 warps; a block does 32 rows of one head. V is turned in shared
// memory, so that a warp writes 32 neighbouring positions of one dim.
constexpr int kRopeRows = 32, kRopeWarps = 8;
template <int kHeadDim>
__device__ void attention_rope(const AttentionParams& p) {
  SHARED(uint16_t, turned, [kHeadDim][kRopeRows + 2]);  // + 2: neighbouring dims start in other banks
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, head = blockIdx.y,
            kv_head = head - p.n_heads;  // of K while below n_kv_heads, then of V
  const bool is_q = kv_head < 0, is_v = kv_head >= p.n_kv_heads;
  const bf16* norm = is_q ? p.q_norm : p.k_norm;
  const RopeFrequencies<kHeadDim> frequencies = rope_frequencies<kHeadDim>(p, lane);
  const HeadNorm<kHeadDim> weights = head_norm<kHeadDim>(norm, lane);
  pdl_launch_dependents();
  pdl_wait();
  const int length = *p.length, first = blockIdx.x * kRopeRows, rows = min(min(*p.rows, p.max_rows) - first, kRopeRows);
  if (rows <= 0) return;
#pragma unroll
  for (int i = 0; i < kRopeRows / kRopeWarps; i++) {
    const int r = warp + i * kRopeWarps;
    if (r >= rows) continue;
    bf16* at = qkv_row<kHeadDim>(p, first + r) + (size_t)head * kHeadDim;
    const RawHead raw = load_head<kHeadDim>(at, lane);
    if (is_v) {
      each_dim<kHeadDim>(raw, lane, [&](int dim, uint16_t bits) { turned[dim][r] = bits; });
    } else {
      const int position = length + first + r;
      const RawHead done = norm_and_rope<kHeadDim>(raw, weights, norm != nullptr, p.norm_eps,
                                                   turn_of<kHeadDim>(frequencies, p.rope_factor, position));
      store_head<kHeadDim>(is_q ? at : p.k_cache + ((size_t)kv_head * p.capacity + position) * kHeadDim, lane, done);
    }
  }
  if (!is_v) return;
  __syncthreads();
  uint16_t* v_head = reinterpret_cast<uint16_t*>(p.v_cache) + (size_t)(kv_head - p.n_kv_heads) * kHeadDim * p.capacity +
                     length + first;
  if (lane < rows)
    for (int dim = warp; dim < kHeadDim; dim += kRopeWarps) v_head[(size_t)dim * p.capacity + lane] = turned[dim][lane];
}

// ---- attention_prefill: softmax(q k^T) v ----
// Grid: (ceil(max_rows * group / 64), KV heads), 4 warps; a block does 64 columns, a warp 16 of them, over all
// positions up to its last row's. K and V of a step lie in shared memory in the order in which lanes read them; K of
// the next step is copied during softmax and p v, V during the scores (48 KB with q at head_dim 128, so that two blocks
// share an SM, each covering the other's barriers). Low block indices take the last rows: they work longest. State:
// `part` is the chunk under way, `total` the chunks before it.
constexpr int kPrefillWarps = 4;
constexpr int kPrefillThreads = 32 * kPrefillWarps, kPrefillColumns = 16 * kPrefillWarps;

template <int kHeadDim>
__device__ void attention_prefill(const AttentionParams& p) {
  constexpr int KI = kHeadDim / 32, NT = kHeadDim / 8;
  constexpr int kTogether = 4, kCopied = NT / 2 / kPrefillWarps;  // 8-dim tiles of V: sums under way together; of a
                                                                  // half, copied by a warp
  // ---- Shared memory ----
  SHARED(uint4, k_step, [kTiles][KI][32]);
  SHARED(uint4, v_step, [NT][2][32]);
  SHARED(uint4, q_operand, [kPrefillWarps][KI][2][32]);  // a lane reads what it wrote: this spares 32 registers at
                                                         // head_dim 128
  // ---- Who does what ----
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int kv_head = blockIdx.y, group = p.n_heads / p.n_kv_heads;
  pdl_launch_dependents();
  pdl_wait();
  const int length = *p.length, n_columns = min(*p.rows, p.max_rows) * group;
  const int first_column = (gridDim.x - 1 - blockIdx.x) * kPrefillColumns;
  if (first_column >= n_columns) return;
  const int end = length + min(first_column + kPrefillColumns - 1, n_columns - 1) / group + 1;

  // ---- Copies of K and V; the first step's begin ----
  // Warp w copies tiles w and w + 4 of K (two blocks of 32 positions apart) and a quarter of each half of V's dims.
  const uint4* k_at = k_pieces<kHeadDim>(p, kv_head, 0, warp, lane);
  const uint4* v_at = v_pieces<kHeadDim>(p, kv_head, 0, kCopied * warp, lane);
  auto copy_k = [&] {
#pragma unroll
    for (int b = 0; b < 2; b++)
#pragma unroll
      for (int i = 0; i < KI; i++)
        copy_async(&k_step[4 * b + warp][i][lane], k_at + b * 32 * kHeadDim / 8 + i * kNextDims);
    copy_async_commit();
    k_at += kStep * kHeadDim / 8;
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

  // ---- q, in operand order ----
  // Columns g and g+8 of the warp; those past the last one see zeros and are not written.
  int last[2];  // position that a column sees last
  uint4 q[2][KI];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int column = first_column + 16 * warp + g + 8 * half;
    const int row = column / group;
    last[half] = length + row;
    const bf16* at = qkv_row<kHeadDim>(p, row) + (kv_head * group + column - row * group) * kHeadDim + 8 * t;
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

  // ---- Chunks, and their steps: `part` is the chunk under way, `total` the chunks before it ----
  const float scale_log2 = p.scale * kLog2E;
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
      // ---- Step: scores ----
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

      // ---- Step: the mask of what a column sees, maxima, probabilities ----
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
      part_m[0] = merge_maximum(part_m[0], m_low, scale_log2, f_low);
      part_m[1] = merge_maximum(part_m[1], m_high, scale_log2, f_high);
      uint4 probability[kTiles / 2];
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += 2) {
        const uint2 first = tile_probabilities(s[tile], m_low, m_high, scale_log2),
                    second = tile_probabilities(s[tile + 1], m_low, m_high, scale_log2);
        uint4& x = probability[tile / 2];
        x = make_uint4(first.x, first.y, second.x, second.y);
      }

      // ---- Step: p v, merged into the chunk ----
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
              part[first + n][e] = merge(part[first + n][e], sum[n][e], e < 2 ? f_low : f_high);
        }
        __syncthreads();
        if (position + kStep < end) copy_v(half);
        else copy_async_commit();
      }
      part_l[0] = merge(part_l[0], weights[0], f_low);
      part_l[1] = merge(part_l[1], weights[2], f_high);
    }
    // ---- The chunk, merged into the row ----
    total_m[0] = merge_maximum(total_m[0], part_m[0], scale_log2, f_low);
    total_m[1] = merge_maximum(total_m[1], part_m[1], scale_log2, f_high);
    total_l[0] = merge(total_l[0], part_l[0], f_low);
    total_l[1] = merge(total_l[1], part_l[1], f_high);
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[n][e] = merge(total[n][e], part[n][e], e < 2 ? f_low : f_high);
  }

  // ---- Output ----
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int column = first_column + 16 * warp + g + 8 * half;
    if (column >= n_columns) continue;
    const float inv = __fdiv_rn(1.f, total_l[half]);
    bf16* out = p.out + ((size_t)(column / group) * (p.n_heads - group) + kv_head * group + column) * kHeadDim + 2 * t;
#pragma unroll
    for (int n = 0; n < NT; n++)
      *reinterpret_cast<uint32_t*>(out + 8 * n) =
          bf16_pair(__fmul_rn(total[n][2 * half], inv), __fmul_rn(total[n][2 * half + 1], inv));
  }
}

}  // namespace

KERNEL(attention_rope_64, AttentionParams, 32 * kRopeWarps) { attention_rope<64>(p); }
KERNEL(attention_rope_128, AttentionParams, 32 * kRopeWarps) { attention_rope<128>(p); }
KERNEL(attention_prefill_64, AttentionParams, kPrefillThreads, 2) { attention_prefill<64>(p); }
KERNEL(attention_prefill_128, AttentionParams, kPrefillThreads, 2) { attention_prefill<128>(p); }
