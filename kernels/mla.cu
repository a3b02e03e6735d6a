// Latent attention (MLA) of decode and verify passes of 1 to 16 rows, absorbed: all heads of a rank share one key a position, [latent | rotated key], whose latent is the
// value too. Three kernels behind the linears that make latents and q:
//   latent_query   cache row of each new position = [norm(latent) | rope(key)], absorbed = [W_UK^T q_nope | rope(q_rope)] of each head
//   latent_attend  over a chunk of the cache: s = absorbed . cache row, o = softmax(s) latents, unfolded
//   latent_value   chunks folded, out = W_UV o of each head
//
// ---- The order of every sum ----
// A column is one (row, head): row * n_heads + head. Columns are the 16-row operand of mma_bf16.
//   step:  32 positions from a multiple of 32, from an empty state. A score is two sums, of the first and the second half of the key's 32-dim pieces, pieces ascending,
//          the second added to the first. m = their maximum; p = exp2((s - m) * scale * log2 e), rounded to bf16; o = p v, 16 positions an mma, ascending; l = sum of the p.
//   fold:  (m, l, o) and (m', l', o') are both scaled to the larger maximum and added.
//   chunk: its steps folded in ascending order into an empty state (m = -inf, l = 0, o = 0). Boundaries: latent_chunk_begin in params.h.
//   row:   its chunks folded in ascending order into an empty state; attended = bf16(o * (1 / l)).
// A position that a column must not see has p = 0, a chunk without any folds to nothing: other rows of a pass do not show.
#include "common.cuh"

namespace {

constexpr int kStep = 32, kThreads = 256, kWarps = 8, kColumns = 16;

// Rotates pairs (i, i + half) of `n` numbers of a row; a warp, lane i and i + 32, .. take pairs.
__device__ __forceinline__ void rotate(const bf16* from, bf16* to, int n, const float* inv_freq, float factor, int position, int lane) {
  const int half = n / 2;
  for (int i = lane; i < half; i += 32) {
    float sine, cosine;
    sine_cosine(__fmul_rn((float)position, inv_freq[i]), sine, cosine);
    sine = __fmul_rn(sine, factor); cosine = __fmul_rn(cosine, factor);
    const float a = __bfloat162float(*(from + i)), b = __bfloat162float(*(from + half + i));
    to[i] = __float2bfloat16(__fmaf_rn(a, cosine, -__fmul_rn(b, sine)));
    to[half + i] = __float2bfloat16(__fmaf_rn(b, cosine, __fmul_rn(a, sine)));
  }
}

__device__ __forceinline__ int rows_of(const LatentParams& p) { return min(*p.rows - p.first_row, p.max_rows); }

// ---- latent_query ----
// Tasks of one warp, blockIdx.x * 8 + warp, + 8 gridDim.x: 16 dims of a head's absorbed query in all rows; the rotated part of a (row, head); the cache row of a row.
__device__ __forceinline__ void latent_query_body(const LatentParams& p) {
  pdl_launch_dependents();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int n_tiles = p.kv_rank / 16, k_blocks = k_blocks_of(p.nope_dim), q_dim = p.nope_dim + p.rope_dim, row_dim = p.kv_rank + p.rope_dim;
  const int n_absorb = p.n_heads * n_tiles;
  for (int task = blockIdx.x * kWarps + warp; task < n_absorb; task += gridDim.x * kWarps)
    for (int i = lane; i < k_blocks * 32; i += 32) prefetch_l2(p.w_uk + (size_t)task * k_blocks * 64 + i * 2);
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
        for (int b = 0; b < k_blocks; b++) {
          const uint4 in = load_activations(reinterpret_cast<const uint4*>(x + min(b * 32, last)));   // what has no column of its own meets zeros
          mma_bf16(acc, load_constants(weights + b * 64), in.x, in.y);
          mma_bf16(acc, load_constants(weights + b * 64 + 32), in.z, in.w);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int m = m0 + 2 * t + (i & 1);
          if (m < rows) p.absorbed[((size_t)m * p.n_heads + head) * row_dim + tile * 16 + g + 8 * (i >> 1)] = __float2bfloat16(acc[i]);
        }
      }
    } else if (task < n_absorb + rows * p.n_heads) {
      const int column = task - n_absorb;
      rotate(p.q + (size_t)column * q_dim + p.nope_dim, p.absorbed + (size_t)column * row_dim + p.kv_rank, p.rope_dim, p.inv_freq, p.rope_factor, length + column / p.n_heads, lane);
    } else {
      const int m = task - n_absorb - rows * p.n_heads;
      const bf16* latent = p.latents + (size_t)m * p.latents_stride + p.q_rank;
      bf16* row = p.cache + (size_t)(length + m) * row_dim;
      float squares = 0;
      for (int i = lane; i < p.kv_rank; i += 32) { const float x = __bfloat162float(*(latent + i)); squares = __fmaf_rn(x, x, squares); }
      const float inv = rsqrtf(__fadd_rn(__fdiv_rn(warp_sum(squares), (float)p.kv_rank), p.norm_eps));
      for (int i = lane; i < p.kv_rank; i += 32) row[i] = __float2bfloat16(__fmul_rn(__fmul_rn(__bfloat162float(*(latent + i)), inv), __bfloat162float(p.kv_norm[i])));
      rotate(latent + p.kv_rank, row + p.kv_rank, p.rope_dim, p.inv_freq, p.rope_factor, length + m, lane);
    }
  }
}

// ---- the state of a softmax ----
struct Factors { float keep, add; };
__device__ __forceinline__ float fold_maximum(float m, float new_m, float scale_log2, Factors& f) {
  const float top = fmaxf(m, new_m);
  f.keep = m == top ? 1.f : exp2_fast(__fmul_rn(m - top, scale_log2));          // also for -inf against -inf
  f.add = new_m == top ? 1.f : exp2_fast(__fmul_rn(new_m - top, scale_log2));
  return top;
}
__device__ __forceinline__ float fold(float old, float addition, const Factors& f) { return __fmaf_rn(addition, f.add, __fmul_rn(old, f.keep)); }

// ---- latent_attend ----
// Grid: (latent_chunk_of the captured context + 1, ceil(max_rows * n_heads / 16)), 8 warps: one chunk for 16 columns. A step's 32 rows of the cache come by cp.async.
// Scores: warp w does positions 8 (w % 4) .. and half w / 4 of the pieces. Softmax: warp w has columns 2w and 2w + 1, a lane a position. o: warp w has KV / 8 dims.
// Shared memory: rows of the cache, 16 bytes apart from a multiple of 128 (ldmatrix without bank conflicts), scores, p, factors: 43 KB at most.
template <int KV, int ROPE> __device__ __forceinline__ void latent_attend(const LatentParams& p) {
  constexpr int D = KV + ROPE, kPieces = (D + 31) / 32, kFirstHalf = (kPieces + 1) / 2, NT = KV < 64 ? 1 : KV / 64, kRowWords = kPieces * 4 + 1;
  SHARED(uint4, stage, [kStep][kRowWords]);
  SHARED(float, score, [2][kColumns][kStep + 1]);
  SHARED(uint32_t, probability, [kColumns][kStep / 2 + 4]);
  SHARED(float, column_m, [kColumns]);
  SHARED(float, column_l, [kColumns]);
  SHARED(float2, factors, [kColumns]);
  pdl_launch_dependents();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  pdl_wait();
  const int rows = rows_of(p), length = *p.length + p.first_row, end = length + rows;
  const int begin = latent_chunk_begin(blockIdx.x), stop = min(latent_chunk_begin(blockIdx.x + 1), end), first_column = blockIdx.y * kColumns, n_columns = rows * p.n_heads;
  if (begin >= end || first_column >= n_columns) return;
  const float scale_log2 = __fmul_rn(p.scale, 1.44269504f);
  auto copy_step = [&](int position) {
#pragma unroll 9
    for (int i = threadIdx.x; i < kStep * (D / 8); i += kThreads) {
      const int r = i / (D / 8), word = i % (D / 8);
      copy_async(&stage[r][word], reinterpret_cast<const uint4*>(p.cache + (size_t)(position + r) * D) + word, position + r < end);
    }
    copy_async_commit();
  };
  if (D % 32 && threadIdx.x < kStep * (kPieces * 4 - D / 8)) stage[threadIdx.x % kStep][D / 8 + threadIdx.x / kStep] = make_uint4(0, 0, 0, 0);   // the rest of the last piece
  copy_step(begin);
  const int q_low = min(first_column + g, n_columns - 1) * D + 8 * t, q_high = min(first_column + g + 8, n_columns - 1) * D + 8 * t;   // of absorbed
  float o[NT][4] = {};
  if (threadIdx.x < kColumns) { column_m[threadIdx.x] = -INFINITY; column_l[threadIdx.x] = 0; }

#pragma unroll 1
  for (int position = begin; position < stop; position += kStep) {
    copy_async_wait<0>();
    __syncthreads();
    {
      const int tile = warp & 3, half = warp >> 2, piece_end = half ? kPieces : kFirstHalf;
      float s[4] = {0, 0, 0, 0};
#pragma unroll 1
      for (int i = half * kFirstHalf; i < piece_end; i++) {
        uint4 low = make_uint4(0, 0, 0, 0), high = low;
        if (D % 32 == 0 || i * 32 + 8 * t < D) {
          low = load_activations(reinterpret_cast<const uint4*>(p.absorbed + q_low + i * 32));
          high = load_activations(reinterpret_cast<const uint4*>(p.absorbed + q_high + i * 32));
        }
        const uint4 k = stage[tile * 8 + g][i * 4 + t];
        mma_bf16(s, make_uint4(low.x, high.x, low.y, high.y), k.x, k.y);
        mma_bf16(s, make_uint4(low.z, high.z, low.w, high.w), k.z, k.w);
      }
#pragma unroll
      for (int e = 0; e < 4; e++) score[half][g + 8 * (e >> 1)][tile * 8 + 2 * t + (e & 1)] = s[e];
    }
    __syncthreads();
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
        column_m[c] = fold_maximum(column_m[c], m, scale_log2, f);
        column_l[c] = fold(column_l[c], l, f);
        factors[c] = make_float2(f.keep, f.add);
      }
    }
    __syncthreads();
    uint4 a[2];
#pragma unroll
    for (int b = 0; b < 2; b++) a[b] = make_uint4(probability[g][8 * b + t], probability[g + 8][8 * b + t], probability[g][8 * b + t + 4], probability[g + 8][8 * b + t + 4]);
    const Factors low{factors[g].x, factors[g].y}, high{factors[g + 8].x, factors[g + 8].y};
#pragma unroll
    for (int n = 0; n < NT; n++) {
      if (KV < 64 && warp * 8 >= KV) break;
      uint32_t v[4];
      load_matrices<true>(v, &stage[lane][warp * NT + n]);   // lane l: row l % 8 of positions 8 (l / 8) ..
      float sum[4] = {0, 0, 0, 0};
      mma_bf16(sum, a[0], v[0], v[1]);
      mma_bf16(sum, a[1], v[2], v[3]);
#pragma unroll
      for (int e = 0; e < 4; e++) o[n][e] = fold(o[n][e], sum[e], e < 2 ? low : high);
      if (n % 4 == 3) __syncwarp();   // keeps the later loads from being moved up: they would cost more registers than there are
    }
    __syncthreads();
    if (position + kStep < stop) copy_step(position + kStep);
  }

  // partials: [chunk][column]{KV o}, then [chunk][column]{m, l}; a column of the pass has the same place at every width.
  const size_t columns = (size_t)p.max_rows * p.n_heads, chunk = blockIdx.x;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int column = first_column + g + 8 * half;
    if (column >= n_columns) continue;
    float* to = p.partials + (chunk * columns + column) * (KV + 2);
#pragma unroll
    for (int n = 0; n < NT; n++)
      if (KV >= 64 || warp * 8 < KV) *reinterpret_cast<float2*>(to + (warp * NT + n) * 8 + 2 * t) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
    if (warp == half && t == 0) *reinterpret_cast<float2*>(to + KV) = make_float2(column_m[g + 8 * half], column_l[g + 8 * half]);
  }
}

// ---- latent_value ----
// Grid: (n_heads, ceil(max_rows / 8)), 8 warps: one head of 8 rows. A warp folds a row's chunks, a lane taking every 32nd dim; then warps take 16-row tiles of W_UV.
template <int KV> __device__ __forceinline__ void latent_value(const LatentParams& p) {
  SHARED(bf16, attended, [8][KV + 8]);
  pdl_launch_dependents();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int head = blockIdx.x, n_tiles = p.v_dim / 16, k_blocks = KV / 32, first = blockIdx.y * 8;
  const uint4* weights = p.w_uv + (size_t)head * n_tiles * k_blocks * 64;
  for (int i = threadIdx.x; i < n_tiles * k_blocks * 32; i += kThreads) prefetch_l2(weights + i * 2);
  pdl_wait();
  const int rows = rows_of(p), length = *p.length + p.first_row, n_chunks = latent_chunk_of(length + rows - 1) + 1;
  if (first >= rows) return;
  const float scale_log2 = __fmul_rn(p.scale, 1.44269504f);
  const int m = first + warp;
  if (m < rows) {
    const size_t columns = (size_t)p.max_rows * p.n_heads, column = (size_t)m * p.n_heads + head;
    float top = -INFINITY, l = 0, o[KV / 32] = {};
    for (int chunk = 0; chunk < n_chunks; chunk++) {
      const float* from = p.partials + (chunk * columns + column) * (KV + 2);
      Factors f;
      const float new_m = from[KV];
      top = fold_maximum(top, new_m, scale_log2, f);
      l = fold(l, from[KV + 1], f);
#pragma unroll
      for (int i = 0; i < KV / 32; i++) o[i] = fold(o[i], from[i * 32 + lane], f);
    }
    const float inv = __fdiv_rn(1.f, l);
#pragma unroll
    for (int i = 0; i < KV / 32; i++) {
      const bf16 y = __float2bfloat16(__fmul_rn(o[i], inv));
      attended[warp][i * 32 + lane] = y;
      p.attended[column * KV + i * 32 + lane] = y;
    }
  } else {
    for (int i = lane; i < KV; i += 32) attended[warp][i] = __float2bfloat16(0.f);
  }
  __syncthreads();
  for (int tile = warp; tile < n_tiles; tile += kWarps) {
    float acc[4] = {0, 0, 0, 0};
#pragma unroll 4
    for (int b = 0; b < k_blocks; b++) {
      const uint4 in = *reinterpret_cast<const uint4*>(&attended[g][b * 32 + 8 * t]);
      const uint4* w = weights + ((size_t)tile * k_blocks + b) * 64 + lane;
      mma_bf16(acc, load_constants(w), in.x, in.y);
      mma_bf16(acc, load_constants(w + 32), in.z, in.w);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = first + 2 * t + (i & 1);
      if (row < rows) p.out[((size_t)row * p.n_heads + head) * p.v_dim + tile * 16 + g + 8 * (i >> 1)] = __float2bfloat16(acc[i]);
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
