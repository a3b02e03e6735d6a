// Feed-forward layers of experts for 1 to 16 rows of a pass: route chooses, experts_up and experts_down stream the weights of every expert that some row wants, once.
//
// Width does not show in the bits: an expert's product with a row is a column of the mma, summed over K in 32-k segments in order (K of an expert is small, and what
// is large is cut as linear.cu cuts it); a row adds its experts in ascending order and the shared one last, whatever other rows want.
//
//   route         scores, groups, top-k, weights; and the list of work (params.h, ExpertWork)
//   experts_up    silu(gate) * up. As linear.cu: a block takes a 16-row tile of one expert, its warps split K
//   experts_down  a block owns 16 outputs of all rows; its warps take the experts in turn; sums meet in shared memory
#include "format.cuh"
#include "linear_row.cuh"
#include "sample.cuh"

namespace {

constexpr int kRouteThreads = 512, kExpertThreads = 256, kExpertWarps = kExpertThreads / 32;

// ---- route ----
__device__ __forceinline__ void route_body(const RouteParams& p) {
  pdl_launch_dependents();
  SHARED(float, score, [kExpertRows][kMaxExperts]);
  SHARED(unsigned short, chosen, [kExpertRows][kMaxChosen]);
  SHARED(unsigned, first_of_warp, [kRouteThreads / 32]);
  pdl_wait();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int rows = max(0, min(p.n_rows ? *p.n_rows - p.first_row : p.rows, p.rows)), E = p.n_experts;
  const int group = E / p.n_groups;
  const int row = warp;
  if (row < rows) {
    const float* logits = p.logits + (size_t)row * E;
    float best = -INFINITY, sum = 0;
    if (p.softmax) {
      for (int e = lane; e < E; e += 32) best = fmaxf(best, logits[e]);
      best = warp_max(best);
      for (int e = lane; e < E; e += 32) sum = __fadd_rn(sum, __expf(__fsub_rn(logits[e], best)));
      sum = warp_sum(sum);
    }
    for (int e = lane; e < E; e += 32)
      score[row][e] = p.softmax ? __fdiv_rn(__expf(__fsub_rn(logits[e], best)), sum) : __fdiv_rn(1.0f, __fadd_rn(1.0f, __expf(-logits[e])));
    __syncwarp();
    const auto biased = [&](int e) { return p.bias ? __fadd_rn(score[row][e], p.bias[e]) : score[row][e]; };
    unsigned kept = ~0u;   // bit per group
    if (p.n_groups > 1) {
      float first = -INFINITY, second = -INFINITY;   // of group `lane`
      if (lane < p.n_groups)
        for (int e = lane * group; e < (lane + 1) * group; e++) {
          const float c = biased(e);
          second = fmaxf(second, fminf(first, c));
          first = fmaxf(first, c);
        }
      const float mine = lane < p.n_groups ? __fadd_rn(first, second) : -INFINITY;
      int better = 0;
      for (int other = 0; other < p.n_groups; other++) {
        const float theirs = __shfl_sync(0xffffffffu, mine, other);
        better += theirs > mine || (theirs == mine && other < lane);
      }
      kept = __ballot_sync(0xffffffffu, lane < p.n_groups && better < p.top_groups);
    }
    // The k best: each turn the best of those behind the last one in the order of preference.
    u64 last = ~0ull;
    unsigned mine = 0;
    for (int i = 0; i < p.top_k; i++) {
      u64 key = 0;
      for (int e = lane; e < E; e += 32)
        if (p.n_groups == 1 || kept >> e / group & 1) {
          const u64 k = preference(biased(e), e);
          if (k < last) key = larger(key, k);
        }
      last = warp_max(key);
      if (lane == i) mine = id_of(last);
    }
    int place = 0;
    for (int i = 0; i < p.top_k; i++) place += __shfl_sync(0xffffffffu, mine, i) < mine;
    if (lane < p.top_k) chosen[row][place] = (unsigned short)mine;
    __syncwarp();
    float total = 1;
    if (p.normalised) {
      total = 0;
      for (int i = 0; i < p.top_k; i++) total = __fadd_rn(total, score[row][chosen[row][i]]);
      total = __fadd_rn(total, 1e-20f);
    }
    if (lane < p.top_k) p.work->weight[row][lane] = __fmul_rn(__fdiv_rn(score[row][chosen[row][lane]], total), p.scale);
  }
  __syncthreads();
  // Who wants expert `threadIdx.x`.
  const int e = threadIdx.x;
  const auto for_each_row = [&](auto f) {
    if (e >= E) return;
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < p.top_k; i++)
        if (chosen[r][i] == e) f(r, i);
  };
  int n_rows = 0;
  for_each_row([&](int, int) { n_rows++; });
  const unsigned wanted = __ballot_sync(0xffffffffu, n_rows > 0);
  if (lane == 0) first_of_warp[warp] = __popc(wanted);
  __syncthreads();
  int at = __popc(wanted & ((1u << lane) - 1)), n = 0;
  for (int w = 0; w < kRouteThreads / 32; w++) {
    if (w < warp) at += first_of_warp[w];
    n += first_of_warp[w];
  }
  if (n_rows > 0) {
    ExpertItem& item = p.work->item[at];
    item.expert = e;
    item.n = n_rows;
    int j = 0;
    for_each_row([&](int r, int i) { item.row[j] = (unsigned char)r; item.slot[j++] = (unsigned char)i; });
  }
  if (threadIdx.x == 0) {
    p.work->n_routed = n;
    p.work->n_items = n + (p.shared && rows > 0);
    if (p.shared) {
      ExpertItem& shared = p.work->item[n];
      shared.expert = -1;
      shared.n = rows;
      for (int r = 0; r < rows; r++) { shared.row[r] = (unsigned char)r; shared.slot[r] = (unsigned char)p.top_k; }
    }
  }
}

// ---- a warp's sum over blocks of K ----
// For 16 rows of weights and the item's rows as columns: acc[c] of columns 8c .. 8c + 7. `weights` is the lane's first byte of the first block, `x[c]` its first
// element, n_x[c] how many of its blocks have one. Blocks are added segment by segment: `flush` gets the sum of each.
template <class F, int kColumns, int kAhead, class Flush>
__device__ __forceinline__ void sum_blocks(const char* weights, const float* scales, const bf16* (&x)[kColumns], const int (&n_x)[kColumns], int n_blocks, int segment_blocks, int lane, Flush flush) {
  typename F::Held held[kAhead];
  uint4 in[kAhead][kColumns];
  auto fetch = [&](int u, int ahead, int block) {   // block `block`, which is u + ahead behind the pointers
    if (block >= n_blocks) return;
    F::load(held[u], weights + (u + ahead) * F::kBlockBytes, scales + (u + ahead) * 2, lane);
#pragma unroll
    for (int c = 0; c < kColumns; c++)
      in[u][c] = block < n_x[c] ? load_activations(reinterpret_cast<const uint4*>(x[c] + (u + ahead) * 32)) : make_uint4(0, 0, 0, 0);
  };
#pragma unroll
  for (int u = 0; u < kAhead; u++) fetch(u, 0, u);
  float acc[kColumns][4] = {};
  int left = segment_blocks;
#pragma unroll 1
  for (int b0 = 0; b0 < n_blocks; b0 += kAhead) {
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
      if (b0 + u >= n_blocks) break;
#pragma unroll
      for (int c = 0; c < kColumns; c++) F::multiply(acc[c], held[u], in[u][c]);
      fetch(u, kAhead, b0 + u + kAhead);
      if (--left == 0 || b0 + u + 1 == n_blocks) {
        flush(acc);
#pragma unroll
        for (int c = 0; c < kColumns; c++) acc[c][0] = acc[c][1] = acc[c][2] = acc[c][3] = 0;
        left = segment_blocks;
      }
    }
    weights += kAhead * F::kBlockBytes;
    scales += kAhead * 2;
#pragma unroll
    for (int c = 0; c < kColumns; c++) x[c] += kAhead * 32;
  }
}

// ---- experts_up ----
template <int kColumns> struct UpShared {
  float4 partial[32][kColumns][32];   // by segment, and lane as linear.cu lays them
  float inverse[kExpertRows];
};
template <class F, int kColumns, int kAhead>
__device__ __forceinline__ void up_tile(const ExpertParams& p, const ExpertMatrix& m, const ExpertItem& item, int tile, UpShared<kColumns>& shared) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int k_blocks = k_blocks_of(p.k), segment_blocks = segment_blocks_of(k_blocks), n_segments = (k_blocks + segment_blocks - 1) / segment_blocks;
  const int segments_a_warp = (n_segments + kExpertWarps - 1) / kExpertWarps, first = warp * segments_a_warp * segment_blocks;
  const int n_mine = min(segments_a_warp * segment_blocks, k_blocks - first);
  const bf16* x[kColumns];
  int n_x[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; c++) {
    const bool wanted = c * 8 + g < item.n;
    x[c] = p.x + (size_t)(wanted ? item.row[c * 8 + g] : 0) * p.x_stride + first * 32 + 8 * t;
    n_x[c] = wanted ? (p.k - first * 32 - 8 * t + 31) >> 5 : 0;
  }
  const int expert = max(item.expert, 0);
  const size_t block = (size_t)tile * k_blocks + first;
  const char* weights = reinterpret_cast<const char*>(m.weights) + expert * m.bytes + block * F::kBlockBytes + lane * F::kLaneBytes;
  int segment = warp * segments_a_warp;
  sum_blocks<F, kColumns, kAhead>(weights, m.tile_scales + (size_t)expert * m.scales + block * 2, x, n_x, n_mine, segment_blocks, lane, [&](float (&acc)[kColumns][4]) {
#pragma unroll
    for (int c = 0; c < kColumns; c++) store_shared(shared_address(&shared.partial[segment][c][t * 8 + ((g + 2 * t) & 7)]), acc[c]);
    segment++;
  });
  __syncthreads();
  if (warp < kColumns * 4) {
    // Output of this thread, as in linear.cu: column of the item m, weight row g' + 8 * (gate 0, up 1).
    const int quarter = warp & 3, c = warp >> 2, out_g = lane >> 2, column = c * 8 + 2 * quarter + (lane & 1);
    const SharedAddress sums = shared_address(&shared.partial[0][c][quarter * 8 + ((out_g + 2 * quarter) & 7)]) + (lane & 3) * 4;
    float y = 0;
    for (int s = 0; s < n_segments; s++) y = __fadd_rn(y, load_shared(sums + s * kColumns * 512));
    const bool wanted = column < item.n;
    const int row = wanted ? item.row[column] : 0, j = tile * 8 + out_g;
    y = __fmul_rn(shared.inverse[row], y);
    const float up = __shfl_xor_sync(0xffffffffu, y, 2);
    if (wanted && (lane & 2) == 0 && j < m.dim) p.act[(size_t)row * p.act_stride + item.slot[column] * p.routed.dim + j] = __float2bfloat16(__fmul_rn(silu(y), up));
  }
  __syncthreads();
}

template <class Routed, class Common, int kColumns>
__device__ __forceinline__ void experts_up(const ExpertParams& p) {
  SHARED(UpShared<kColumns>, shared, );
  SHARED(ExpertItem, item, );
  pdl_launch_dependents();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  pdl_wait();
  for (int row = warp; row < p.rows; row += kExpertWarps) {   // 1/rms of each row
    const float* squares = p.squares + (size_t)row * (p.k / 16);
    float sum = 0;
    for (int tile = lane; tile < p.k / 16; tile += 32) sum = __fadd_rn(sum, load_activation(squares + tile));
    sum = warp_sum(sum);
    if (lane == 0) shared.inverse[row] = inverse_rms(sum, p.k, p.eps);
  }
  const int n_items = p.work->n_items, n_routed = p.work->n_routed;
  const int tiles = (p.routed.dim + 7) / 8, shared_tiles = (p.shared.dim + 7) / 8;
  const int n_groups = n_routed * tiles + (n_items > n_routed ? shared_tiles : 0);
  for (int group = blockIdx.x; group < n_groups; group += gridDim.x) {
    const bool routed = group < n_routed * tiles;
    const int i = routed ? group / tiles : n_routed;
    if (threadIdx.x < sizeof(ExpertItem) / 4) reinterpret_cast<int*>(&item)[threadIdx.x] = reinterpret_cast<const int*>(&p.work->item[i])[threadIdx.x];
    __syncthreads();
    if (routed) up_tile<Routed, kColumns, Routed::kAhead / kColumns>(p, p.routed, item, group % tiles, shared);
    else up_tile<Common, kColumns, Common::kAhead / kColumns>(p, p.shared, item, group - n_routed * tiles, shared);
  }
}

// ---- experts_down ----
constexpr int kSlots = kMaxChosen + 1;
template <class F, int kColumns, int kAhead>
__device__ __forceinline__ void down_item(const ExpertParams& p, const ExpertMatrix& m, const ExpertItem& item, int tile, float (*sums)[16]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int k_blocks = k_blocks_of(m.dim), expert = max(item.expert, 0);
  const bf16* x[kColumns];
  int n_x[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; c++) {
    const bool wanted = c * 8 + g < item.n;
    x[c] = p.x + (wanted ? (size_t)item.row[c * 8 + g] * p.x_stride + item.slot[c * 8 + g] * p.routed.dim : 0) + 8 * t;
    n_x[c] = wanted ? (m.dim - 8 * t + 31) >> 5 : 0;
  }
  const size_t block = (size_t)tile * k_blocks;
  const char* weights = reinterpret_cast<const char*>(m.weights) + expert * m.bytes + block * F::kBlockBytes + lane * F::kLaneBytes;
  float total[kColumns][4] = {};
  sum_blocks<F, kColumns, kAhead>(weights, m.tile_scales + (size_t)expert * m.scales + block * 2, x, n_x, k_blocks, segment_blocks_of(k_blocks), lane, [&](float (&acc)[kColumns][4]) {
#pragma unroll
    for (int c = 0; c < kColumns; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) total[c][i] = __fadd_rn(total[c][i], acc[c][i]);
  });
#pragma unroll
  for (int c = 0; c < kColumns; c++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int column = c * 8 + 2 * t + (i & 1);
      if (column < item.n) sums[item.row[column] * (p.top_k + 1) + item.slot[column]][g + 8 * (i >> 1)] = total[c][i];
    }
}

template <class Routed, class Common, int kColumns>
__device__ __forceinline__ void experts_down(const ExpertParams& p) {
  SHARED(float, sums, [kColumns * 8 * kSlots][16]);
  pdl_launch_dependents();
  const int warp = threadIdx.x >> 5;
  pdl_wait();
  const int n_items = p.work->n_items, n_routed = p.work->n_routed;
  const int rows = n_items == 0 ? 0 : p.rows;
  for (int tile = blockIdx.x; tile < p.n / 16; tile += gridDim.x) {
    for (int i = warp; i < n_items; i += kExpertWarps) {
      const ExpertItem& item = p.work->item[i];
      if (i < n_routed) down_item<Routed, kColumns, Routed::kAhead / kColumns>(p, p.routed, item, tile, sums);
      else down_item<Common, kColumns, Common::kAhead / kColumns>(p, p.shared, item, tile, sums);
    }
    __syncthreads();
    // Thread: row, and output n of the tile.
    const int row = threadIdx.x >> 4, n = threadIdx.x & 15;
    float square_sum = 0;
    if (row < rows) {
      const size_t at = (size_t)row * p.n + tile * 16 + n;
      float y = 0;
      for (int slot = 0; slot < p.top_k; slot++) y = __fadd_rn(y, __fmul_rn(p.work->weight[row][slot], sums[row * (p.top_k + 1) + slot][n]));
      if (n_items > n_routed) y = __fadd_rn(y, sums[row * (p.top_k + 1) + p.top_k][n]);
      if (p.partial) {
        p.partial[at] = __float2bfloat16(y);
      } else {
        y = __fadd_rn(p.stream[at], y);
        p.stream[at] = y;
        if (p.tap) p.tap[(size_t)row * p.tap_stride + tile * 16 + n] = __float2bfloat16(y);
        if (p.next_norm) p.normed[at] = __float2bfloat16(__fmul_rn(y, __bfloat162float(p.next_norm[tile * 16 + n])));
        square_sum = square(y);
      }
    }
    if (p.next_norm && !p.partial) {   // the tree of linear_row.cuh
      square_sum = __fadd_rn(square_sum, __shfl_xor_sync(0xffffffffu, square_sum, 8));
#pragma unroll
      for (int bit = 1; bit <= 4; bit *= 2) square_sum = __fadd_rn(square_sum, __shfl_xor_sync(0xffffffffu, square_sum, bit));
      if (row < rows && n == 0) p.squares_out[(size_t)row * (p.n / 16) + tile] = square_sum;
    }
    __syncthreads();
  }
}

}  // namespace

KERNEL(route, RouteParams, kRouteThreads, 1) { route_body(p); }
// experts_<up|down>_m<most rows>_<format of the routed experts>_<of the shared one>.
#define EXPERTS(routed, shared, Routed, Shared)                                                                                   \
  KERNEL(experts_up_m8_##routed##_##shared, ExpertParams, kExpertThreads, 3) { experts_up<Routed, Shared, 1>(p); }                 \
  KERNEL(experts_up_m16_##routed##_##shared, ExpertParams, kExpertThreads, 3) { experts_up<Routed, Shared, 2>(p); }                \
  KERNEL(experts_down_m8_##routed##_##shared, ExpertParams, kExpertThreads, 3) { experts_down<Routed, Shared, 1>(p); }             \
  KERNEL(experts_down_m16_##routed##_##shared, ExpertParams, kExpertThreads, 3) { experts_down<Routed, Shared, 2>(p); }
EXPERTS(bf16, bf16, Bf16, Bf16)
EXPERTS(fp8, fp8, Fp8, Fp8)
EXPERTS(int4, bf16, Int4, Bf16)
