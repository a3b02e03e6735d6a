// Latent attention (MLA) of decode and verify passes of 1 to 16 rows, absorbed: all heads of a rank share one key a
// position, [latent | rotated key], whose latent is the value too. Three kernels behind the linears that make latents
// and q:
//   latent_query    cache row of each new position = [norm(latent) | rope(key)],
//                   absorbed = [W_UK^T q_nope | rope(q_rope)] of each head
//   latent_attend   over a chunk of the cache: s = absorbed . cache row, o = softmax(s) latents, not combined yet
//   latent_value    chunks combined, out = W_UV o of each head
// What was measured and dropped: docs/decisions/kernels.md#latent-attention.
//
// ---- The order of every sum ----
// A column is one (row, head): row * n_heads + head. 16 columns are a query tile, the 16-row operand of mma_bf16.
//   step:  32 positions from a multiple of 32, from an empty state. A score is two sums, of the first and the second
//   half
//          of the key's 32-dim pieces, pieces ascending, the second added to the first. m = their maximum;
//          p = exp2((s - m) * scale * log2 e), rounded to bf16; o = p v, 16 positions an mma, ascending; l = sum of the
//          p.
//   merge: (m, l, o) and (m', l', o') are both scaled to the larger maximum and added (softmax.cuh).
//   chunk: its steps merged in ascending order into an empty state (m = -inf, l = 0, o = 0). Boundaries:
//          latent_chunk_begin in params.h.
//   row:   its chunks scaled to their largest maximum and added in ascending order (l: lane c % 32 adds chunk c, then
//          warp_sum); attended = bf16(o * (1 / l)).
// A position that a column must not see has p = 0, a chunk without any merges to nothing: other rows of a pass do not
// show.
#include <type_traits>
#include "softmax.cuh"

namespace {

constexpr int kStep = 32, kThreads = 256, kWarps = 8, kColumns = 16, kBatch = 4;

// Rotates pairs (i, i + half) of `n` numbers of a row; a warp, lane i and i + 32, .. take pairs.
__device__ __forceinline__ void rotate(const bf16* from, bf16* to, int n, const float* inv_freq, float factor,
                                       int position, int lane) {
  const int half = n / 2;
  for (int i = lane; i < half; i += 32) {
    float sine, cosine;
    sine_cosine(__fmul_rn((float)position, inv_freq[i]), sine, cosine);
    sine = __fmul_rn(sine, factor);
    cosine = __fmul_rn(cosine, factor);
    const float a = __bfloat162float(*(from + i)), b = __bfloat162float(*(from + half + i));
    to[i] = __float2bfloat16(__fmaf_rn(a, cosine, -__fmul_rn(b, sine)));
    to[half + i] = __float2bfloat16(__fmaf_rn(b, cosine, __fmul_rn(a, sine)));
  }
}

__device__ __forceinline__ int rows_of(const LatentParams& p) { return min(*p.rows - p.first_row, p.max_rows); }

// ---- latent_query ----
// Tasks of one warp, blockIdx.x * 8 + warp, + 8 gridDim.x: 16 dims of a head's absorbed query in all rows; the rotated
// part of a (row, head); the cache row of a row.
__device__ __forceinline__ void latent_query_body(const LatentParams& p) {
  pdl_launch_dependents();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int n_tiles = p.kv_rank / 16, k_blocks = k_blocks_of(p.nope_dim), q_dim = p.nope_dim + p.rope_dim,
            row_dim = p.kv_rank + p.rope_dim;
  const int n_absorb = p.n_heads * n_tiles;
  for (int task = blockIdx.x * kWarps + warp; task < n_absorb; task += gridDim.x * kWarps)
    if (lane == 0) prefetch_l2(p.w_uk + (size_t)task * k_blocks * 64, k_blocks * 1024);
  pdl_wait();
  const int rows = rows_of(p), length = *p.length + p.first_row;
  if (rows <= 0) return;
  const int n_tasks = n_absorb + rows * p.n_heads + rows;
  for (int task = blockIdx.x * kWarps + warp; task < n_tasks; task += gridDim.x * kWarps) {
    if (task < n_absorb) {
      const int head = task / n_tiles, tile = task % n_tiles;
      const uint4* weights = p.w_uk + (size_t)task * k_blocks * 64 + lane;
      for (int m0 = 0; m0 < rows; m0 += 8) {
        const bf16* x = p.q + ((size_t)min(m0 + g, rows - 1) * p.n_heads + head) * q_dim + 8 * t;
        const int last = p.nope_dim - 8 - 8 * t;
        float acc[4] = {0, 0, 0, 0};
        for (int b0 = 0; b0 < k_blocks; b0 += kBatch) {  // all loads of a batch before its first use
          uint4 in[kBatch], w[kBatch][2];
#pragma unroll
          for (int b = 0; b < kBatch; b++) {
            if (b0 + b >= k_blocks) continue;
            in[b] = load_activations(reinterpret_cast<const uint4*>(
                x + min((b0 + b) * 32, last)));  // what has no column of its own meets zeros
            w[b][0] = load_constants(weights + (b0 + b) * 64);
            w[b][1] = load_constants(weights + (b0 + b) * 64 + 32);
          }
#pragma unroll
          for (int b = 0; b < kBatch; b++) {
            if (b0 + b >= k_blocks) continue;
            mma_bf16(acc, w[b][0], in[b].x, in[b].y);
            mma_bf16(acc, w[b][1], in[b].z, in[b].w);
          }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int m = m0 + 2 * t + (i & 1);
          if (m < rows)
            p.absorbed[((size_t)m * p.n_heads + head) * row_dim + tile * 16 + g + 8 * (i >> 1)] =
                __float2bfloat16(acc[i]);
        }
      }
    } else if (task < n_absorb + rows * p.n_heads) {
      const int column = task - n_absorb;
      rotate(p.q + (size_t)column * q_dim + p.nope_dim, p.absorbed + (size_t)column * row_dim + p.kv_rank, p.rope_dim,
             p.inv_freq, p.rope_factor, length + column / p.n_heads, lane);
    } else {
      const int m = task - n_absorb - rows * p.n_heads;
      const bf16* latent = p.latents + (size_t)m * p.latents_stride + p.q_rank;
      bf16* row = p.cache + (size_t)(length + m) * row_dim;
      rotate(latent + p.kv_rank, row + p.kv_rank, p.rope_dim, p.inv_freq, p.rope_factor, length + m, lane);
      // A lane has 8 dims of every 256; all loads before the first use.
      constexpr int kMost = 4;  // kv_rank up to 1,024
      uint4 x[kMost], norm[kMost];
#pragma unroll
      for (int i = 0; i < kMost; i++) {
        const int dim = i * 256 + lane * 8;
        x[i] =
            dim < p.kv_rank ? load_activations(reinterpret_cast<const uint4*>(latent + dim)) : make_uint4(0, 0, 0, 0);
        norm[i] =
            dim < p.kv_rank ? load_constants(reinterpret_cast<const uint4*>(p.kv_norm + dim)) : make_uint4(0, 0, 0, 0);
      }
      float squares = 0;
      const auto each = [](const uint4& w, float (&v)[8]) {
        v[0] = bf16_low(w.x);
        v[1] = bf16_high(w.x);
        v[2] = bf16_low(w.y);
        v[3] = bf16_high(w.y);
        v[4] = bf16_low(w.z);
        v[5] = bf16_high(w.z);
        v[6] = bf16_low(w.w);
        v[7] = bf16_high(w.w);
      };
#pragma unroll
      for (int i = 0; i < kMost; i++) {
        float v[8];
        each(x[i], v);
#pragma unroll
        for (int e = 0; e < 8; e++) squares = __fmaf_rn(v[e], v[e], squares);
      }
      const float inv = rsqrtf(__fadd_rn(__fdiv_rn(warp_sum(squares), (float)p.kv_rank), p.norm_eps));
#pragma unroll
      for (int i = 0; i < kMost; i++) {
        const int dim = i * 256 + lane * 8;
        if (dim >= p.kv_rank) continue;
        float v[8], n[8];
        each(x[i], v);
        each(norm[i], n);
#pragma unroll
        for (int e = 0; e < 8; e++) v[e] = __fmul_rn(__fmul_rn(v[e], inv), n[e]);
        *reinterpret_cast<uint4*>(row + dim) =
            make_uint4(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
      }
    }
  }
}

// ---- latent_attend ----
// Grid: (latent_chunk_of the captured context + 1, ceil(max_rows * n_heads / 16)), 8 warps: one chunk for 16 columns. A
// step's 32 rows of the cache come by cp.async. Scores: warp w does positions 8 (w % 4) .. and half w / 4 of the
// pieces. Softmax: warp w has columns 2w and 2w + 1, a lane a position. o: warp w has KV / 8 dims. Shared memory: rows
// of the cache, 16 bytes apart from a multiple of 128 (ldmatrix without bank conflicts), scores, p, factors: 43 KB at
// most.
template <int KV, int ROPE>
__device__ __forceinline__ void latent_attend(const LatentParams& p) {
  constexpr int D = KV + ROPE, kPieces = (D + 31) / 32, kFirstHalf = (kPieces + 1) / 2, NT = KV < 64 ? 1 : KV / 64,
                kRowWords = kPieces * 4 + 1;
  // ---- Shared memory ----
  SHARED(uint4, stage, [kStep][kRowWords]);
  SHARED(float, score, [2][kColumns][kStep + 1]);
  SHARED(uint32_t, probability, [kColumns][kStep / 2 + 4]);
  SHARED(float, column_m, [kColumns]);
  SHARED(float, column_l, [kColumns]);
  SHARED(float2, factors, [kColumns]);
  // ---- Who does what ----
  pdl_launch_dependents();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  pdl_wait();
  const int rows = rows_of(p), length = *p.length + p.first_row, end = length + rows;
  const int begin = latent_chunk_begin(blockIdx.x), stop = min(latent_chunk_begin(blockIdx.x + 1), end),
            first_column = blockIdx.y * kColumns, n_columns = rows * p.n_heads;
  if (begin >= end || first_column >= n_columns) return;
  const float scale_log2 = __fmul_rn(p.scale, kLog2E);
  // ---- The first step is requested; what softmax begins with ----
  auto copy_step = [&](int position) {
    // A row's words by eight threads, eight apart.
    const int r = threadIdx.x >> 3;
    const uint4* from = reinterpret_cast<const uint4*>(p.cache + (size_t)(position + r) * D) + (threadIdx.x & 7);
#pragma unroll
    for (int word = 0; word < (D / 8 + 7) / 8; word++)
      if (word * 8 + ((int)threadIdx.x & 7) < D / 8)
        copy_async(&stage[r][word * 8 + (threadIdx.x & 7)], from + word * 8, position + r < end);
    copy_async_commit();
  };
  if (D % 32 && threadIdx.x < kStep * (kPieces * 4 - D / 8))
    stage[threadIdx.x % kStep][D / 8 + threadIdx.x / kStep] = make_uint4(0, 0, 0, 0);  // the rest of the last piece
  copy_step(begin);
  for (int i = threadIdx.x; i < kColumns * (D / 64); i += kThreads)  // the queries, into L1
    touch(p.absorbed + (size_t)min(first_column + i / (D / 64), n_columns - 1) * D + i % (D / 64) * 64);
  const int q_low = min(first_column + g, n_columns - 1) * D + 8 * t,
            q_high = min(first_column + g + 8, n_columns - 1) * D + 8 * t;  // of absorbed
  float o[NT][4] = {};
  if (threadIdx.x < kColumns) {
    column_m[threadIdx.x] = -INFINITY;
    column_l[threadIdx.x] = 0;
  }

#pragma unroll 1
  for (int position = begin; position < stop; position += kStep) {
    // ---- Step: scores ----
    {
      const int tile = warp & 3, half = warp >> 2, piece_end = half ? kPieces : kFirstHalf;
      float s[4] = {0, 0, 0, 0};
      bool here = false;  // the step's rows of the cache
      const auto pieces = [&](auto upper,
                              auto at_once) {  // with or without columns 8 to 15, so many pieces' queries at once
        constexpr int kAtOnce = decltype(at_once)::value;
#pragma unroll 1
        for (int i0 = half * kFirstHalf; i0 < piece_end; i0 += kAtOnce) {
          uint4 low[kAtOnce], high[kAtOnce];
#pragma unroll
          for (int u = 0; u < kAtOnce; u++) {
            low[u] = high[u] = make_uint4(0, 0, 0, 0);
            if (i0 + u >= piece_end || (D % 32 && (i0 + u) * 32 + 8 * t >= D)) continue;
            low[u] = load_activations(reinterpret_cast<const uint4*>(p.absorbed + q_low + (i0 + u) * 32));
            if (decltype(upper)::value)
              high[u] = load_activations(reinterpret_cast<const uint4*>(p.absorbed + q_high + (i0 + u) * 32));
          }
          if (!here) {
            copy_async_wait<0>();
            __syncthreads();
            here = true;
          }
#pragma unroll
          for (int u = 0; u < kAtOnce; u++) {
            if (i0 + u >= piece_end) continue;
            const uint4 k = stage[tile * 8 + g][(i0 + u) * 4 + t];
            mma_bf16(s, make_uint4(low[u].x, high[u].x, low[u].y, high[u].y), k.x, k.y);
            mma_bf16(s, make_uint4(low[u].z, high[u].z, low[u].w, high[u].w), k.z, k.w);
          }
        }
      };
      if (n_columns - first_column > 8)
        pieces(std::true_type{}, std::integral_constant < int, kFirstHalf<2 ? kFirstHalf : 2>{});
      else pieces(std::false_type{}, std::integral_constant < int, kFirstHalf<3 ? kFirstHalf : 3>{});
#pragma unroll
      for (int e = 0; e < 4; e++) score[half][g + 8 * (e >> 1)][tile * 8 + 2 * t + (e & 1)] = s[e];
    }
    __syncthreads();
    // ---- Step: the mask, probabilities, the factors of the merge ----
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int c = 2 * warp + i, column = first_column + c, last = length + min(column, n_columns - 1) / p.n_heads;
#ifdef PLANT_OFF_BY_ONE
      const bool visible = position + lane < last;
#else
      const bool visible = position + lane <= last;
#endif
      const float s = visible ? __fadd_rn(score[0][c][lane], score[1][c][lane]) : -INFINITY;
      const float m = warp_max(s);
      const bf16 x = __float2bfloat16(visible ? exp2_fast(__fmul_rn(s - m, scale_log2)) : 0.f);
      reinterpret_cast<bf16*>(probability[c])[lane] = x;
      const float l = warp_sum(__bfloat162float(x));
      if (lane == 0) {
        Factors f;
        column_m[c] = merge_maximum(column_m[c], m, scale_log2, f);
        column_l[c] = merge(column_l[c], l, f);
        factors[c] = make_float2(f.keep, f.add);
      }
    }
    __syncthreads();
    // ---- Step: p v of the warp's dims, merged ----
    uint4 a[2];
#pragma unroll
    for (int b = 0; b < 2; b++)
      a[b] = make_uint4(probability[g][8 * b + t], probability[g + 8][8 * b + t], probability[g][8 * b + t + 4],
                        probability[g + 8][8 * b + t + 4]);
    const Factors low{factors[g].x, factors[g].y}, high{factors[g + 8].x, factors[g + 8].y};
#pragma unroll
    for (int n = 0; n < NT; n++) {
      if (KV < 64 && warp * 8 >= KV) break;
      uint32_t v[4];
      load_matrices<true>(v, &stage[lane][warp * NT + n]);  // lane l: row l % 8 of positions 8 (l / 8) ..
      float sum[4] = {0, 0, 0, 0};
      mma_bf16(sum, a[0], v[0], v[1]);
      mma_bf16(sum, a[1], v[2], v[3]);
#pragma unroll
      for (int e = 0; e < 4; e++) o[n][e] = merge(o[n][e], sum[e], e < 2 ? low : high);
      if (n % 4 == 3)
        __syncwarp();  // keeps the later loads from being moved up: they would cost more registers than there are
    }
    __syncthreads();
    if (position + kStep < stop) copy_step(position + kStep);
  }

  // ---- Output ----
  // partials: [chunk][column]{KV o}, then [chunk][column]{m, l}; a column of the pass has the same place at every
  // width.
  const size_t columns = (size_t)p.max_rows * p.n_heads, chunk = blockIdx.x;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int column = first_column + g + 8 * half;
    if (column >= n_columns) continue;
    float* to = p.partials + (chunk * columns + column) * (KV + 2);
#pragma unroll
    for (int n = 0; n < NT; n++)
      if (KV >= 64 || warp * 8 < KV)
        *reinterpret_cast<float2*>(to + (warp * NT + n) * 8 + 2 * t) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
    if (warp == half && t == 0)
      *reinterpret_cast<float2*>(to + KV) = make_float2(column_m[g + 8 * half], column_l[g + 8 * half]);
  }
}

// ---- latent_value ----
// Grid: (n_heads, ceil(max_rows / kValueRows)), 8 warps: one head of a few rows. Warp w finds the factors of row w's
// chunks, a lane one chunk; all threads add the chunks, each some dims; then warps take 16-row tiles of W_UV.
template <int KV>
__device__ __forceinline__ void latent_value(const LatentParams& p) {
  constexpr int kRows = kValueRows, kBlocks = KV / 32, kHeld = kBlocks < 4 ? kBlocks : 4;
  static_assert(KV / 2 <= kThreads, "a thread has two dims");
  SHARED(bf16, attended, [kRows][KV + 8]);
  SHARED(float, factor, [kRows][kLatentChunks]);
  SHARED(float, sums, [kRows][kLatentChunks]);
  SHARED(float, inverse, [kRows]);
  pdl_launch_dependents();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int head = blockIdx.x, n_tiles = p.v_dim / 16, first = blockIdx.y * kRows;
  // Of this warp's first tile the first blocks are held, the rest is asked for.
  const uint4* weights = p.w_uv + ((size_t)head * n_tiles + min(warp, n_tiles - 1)) * kBlocks * 64 + lane;
  uint4 held[kHeld][2];
#pragma unroll
  for (int b = 0; b < kHeld; b++) {
    held[b][0] = load_weights(weights + b * 64);
    held[b][1] = load_weights(weights + b * 64 + 32);
  }
  if (lane == 0)
    for (int tile = warp; tile < n_tiles; tile += kWarps)
      prefetch_l2(p.w_uv + ((size_t)head * n_tiles + tile) * kBlocks * 64, kBlocks * 1024);
  pdl_wait();
  const int rows = rows_of(p), length = *p.length + p.first_row, n_chunks = latent_chunk_of(length + rows - 1) + 1;
  if (first >= rows) return;
  const size_t columns = (size_t)p.max_rows * p.n_heads;
  const auto partial = [&](int chunk, int m) {
    return p.partials + (chunk * columns + (size_t)(first + m) * p.n_heads + head) * (KV + 2);
  };
  const int mine = min(rows - first, kRows);
  constexpr int kAtOnce = 12;  // chunks; the first of them are under way while the factors are made
  float2 early[kAtOnce];
#pragma unroll
  for (int c = 0; c < kAtOnce; c++)
    if (c < n_chunks && (int)threadIdx.x < KV / 2)
      early[c] = *reinterpret_cast<const float2*>(partial(c, 0) + 2 * threadIdx.x);
  if (warp < mine) {
    const float scale_log2 = __fmul_rn(p.scale, kLog2E);
    float top = -INFINITY, l = 0;
    for (int chunk = lane; chunk < n_chunks; chunk += 32) {
      const float2 ml = *reinterpret_cast<const float2*>(partial(chunk, warp) + KV);
      factor[warp][chunk] = ml.x;
      sums[warp][chunk] = ml.y;
      top = fmaxf(top, ml.x);
    }
    top = warp_max(top);
    for (int chunk = lane; chunk < n_chunks; chunk += 32) {
      const float f = exp2_fast(__fmul_rn(factor[warp][chunk] - top, scale_log2));
      factor[warp][chunk] = f;
      l = __fmaf_rn(sums[warp][chunk], f, l);
    }
    l = warp_sum(l);
    if (lane == 0) inverse[warp] = __fdiv_rn(1.f, l);
  }
  __syncthreads();
  if ((int)threadIdx.x < KV / 2)
    for (int m = 0; m < mine; m++) {
      float2 o{0, 0};
      for (int chunk0 = 0; chunk0 < n_chunks; chunk0 += kAtOnce) {
        float2 v[kAtOnce];
        if (chunk0 == 0 && m == 0) {
#pragma unroll
          for (int c = 0; c < kAtOnce; c++) v[c] = early[c];
        } else {
#pragma unroll
          for (int c = 0; c < kAtOnce; c++)
            if (chunk0 + c < n_chunks)
              v[c] = *reinterpret_cast<const float2*>(partial(chunk0 + c, m) + 2 * threadIdx.x);
        }
#pragma unroll
        for (int c = 0; c < kAtOnce; c++)
          if (chunk0 + c < n_chunks) {
            const float f = factor[m][chunk0 + c];
            o.x = __fmaf_rn(v[c].x, f, o.x);
            o.y = __fmaf_rn(v[c].y, f, o.y);
          }
      }
      const uint32_t y = bf16_pair(__fmul_rn(o.x, inverse[m]), __fmul_rn(o.y, inverse[m]));
      *reinterpret_cast<uint32_t*>(&attended[m][2 * threadIdx.x]) = y;
      *reinterpret_cast<uint32_t*>(p.attended + ((size_t)(first + m) * p.n_heads + head) * KV + 2 * threadIdx.x) = y;
    }
  __syncthreads();
  for (int tile = warp; tile < n_tiles; tile += kWarps) {
    float acc[4] = {0, 0, 0, 0};
    weights = p.w_uv + ((size_t)head * n_tiles + tile) * kBlocks * 64 + lane;
#pragma unroll
    for (int half = 0; half < kBlocks; half += kHeld) {
      if (half > 0 || tile > warp)
#pragma unroll
        for (int b = 0; b < kHeld; b++) {
          held[b][0] = load_weights(weights + (half + b) * 64);
          held[b][1] = load_weights(weights + (half + b) * 64 + 32);
        }
#pragma unroll
      for (int b = 0; b < kHeld; b++) {
        const uint4 in =
            g < mine ? *reinterpret_cast<const uint4*>(&attended[g][(half + b) * 32 + 8 * t]) : make_uint4(0, 0, 0, 0);
        mma_bf16(acc, held[b][0], in.x, in.y);
        mma_bf16(acc, held[b][1], in.z, in.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = first + 2 * t + (i & 1);
      if (row < first + mine)
        p.out[((size_t)row * p.n_heads + head) * p.v_dim + tile * 16 + g + 8 * (i >> 1)] = __float2bfloat16(acc[i]);
    }
  }
}
}  // namespace

// latent_<kernel>_<numbers of a latent>_<of a rotated key>
KERNEL(latent_query, LatentParams, kThreads) { latent_query_body(p); }
KERNEL(latent_attend_512_64, LatentParams, kThreads, 2) { latent_attend<512, 64>(p); }
KERNEL(latent_attend_128_16, LatentParams, kThreads, 2) { latent_attend<128, 16>(p); }
KERNEL(latent_attend_64_32, LatentParams, kThreads, 2) { latent_attend<64, 32>(p); }
KERNEL(latent_attend_32_8, LatentParams, kThreads, 2) { latent_attend<32, 8>(p); }
KERNEL(latent_value_512, LatentParams, kThreads, 2) { latent_value<512>(p); }
KERNEL(latent_value_128, LatentParams, kThreads, 2) { latent_value<128>(p); }
KERNEL(latent_value_64, LatentParams, kThreads, 2) { latent_value<64>(p); }
KERNEL(latent_value_32, LatentParams, kThreads, 2) { latent_value<32>(p); }
