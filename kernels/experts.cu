// Feed-forward layers of experts for 1 to 16 rows of a pass: route chooses, experts_up and experts_down stream the weights of every expert that some row wants, once.
//
// Width does not show in the bits: an expert's product with a row is a column of the mma, summed over K in 32-k segments in order (K of an expert is small, and what
// is large is cut as linear.cu cuts it); a row adds its experts in ascending order and the shared one last, whatever other rows want.
//
//   route         scores, groups, top-k, weights; and the list of work (params.h, ExpertWork)
//   experts_up    silu(gate) * up. As linear.cu: a block takes a 16-row tile of one expert, its warps split K
//   experts_down  a block owns 16 outputs of all rows; its warps take the experts in turn; sums meet in shared memory
#include <type_traits>
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
  SHARED(unsigned, wanting, [kMaxExperts]);
  SHARED(unsigned char, slot_of, [kExpertRows][kMaxExperts]);
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
    // The k best, one by one; a lane keeps the keys of experts lane, lane + 32, ..
    u64 keys[kMaxExperts / 32];
#pragma unroll
    for (int i = 0; i < kMaxExperts / 32; i++) {
      const int e = lane + i * 32;
      keys[i] = e < E && (p.n_groups == 1 || kept >> e / group & 1) ? preference(biased(e), e) : 0;
    }
    unsigned mine = 0;
    for (int i = 0; i < p.top_k; i++) {
      u64 best_key = 0;
#pragma unroll
      for (int j = 0; j < kMaxExperts / 32; j++) best_key = larger(best_key, keys[j]);
      best_key = warp_max(best_key);
#pragma unroll
      for (int j = 0; j < kMaxExperts / 32; j++) if (keys[j] == best_key) keys[j] = 0;
      if (lane == i) mine = id_of(best_key);
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
  // Who wants expert `threadIdx.x`: a bit for each row, and where it stands among that row's.
  wanting[threadIdx.x] = 0;
  __syncthreads();
  if (row < rows && lane < p.top_k) {
    atomicOr(&wanting[chosen[row][lane]], 1u << row);
    slot_of[row][chosen[row][lane]] = (unsigned char)lane;
  }
  __syncthreads();
  const unsigned by = wanting[threadIdx.x];
  const unsigned wanted = __ballot_sync(0xffffffffu, by != 0);
  if (lane == 0) first_of_warp[warp] = __popc(wanted);
  __syncthreads();
  int at = __popc(wanted & ((1u << lane) - 1)), n = 0;
  for (int w = 0; w < kRouteThreads / 32; w++) {
    if (w < warp) at += first_of_warp[w];
    n += first_of_warp[w];
  }
  if (by) {
    ExpertItem& item = p.work->item[at];
    item.expert = threadIdx.x;
    item.n = __popc(by);
    int j = 0;
    for (unsigned rest = by; rest; rest &= rest - 1, j++) {
      const int r = __ffs(rest) - 1;
      item.row[j] = (unsigned char)r;
      item.slot[j] = slot_of[r][threadIdx.x];
    }
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
// Weights come through a ring of a warp's own in shared memory, filled by cp.async: many bytes in flight, few registers.
template <int kColumns> constexpr int kRingBytes = kColumns == 1 ? 3072 : 1536;
template <class F, int kColumns> constexpr int kRingBlocks = kRingBytes<kColumns> / F::kBlockBytes > 8 ? 8 : kRingBytes<kColumns> / F::kBlockBytes;
template <class F, int kColumns> __device__ __forceinline__ void copy_block(char* ring, const char* weights, int block, int n_blocks, int lane) {
  if (block < n_blocks) {
    const char* from = weights + (size_t)block * F::kBlockBytes;
    char* to = ring + block % kRingBlocks<F, kColumns> * F::kBlockBytes;
#pragma unroll
    for (int i = 0; i < F::kBlockBytes; i += 512)
      if (i + lane * 16 < F::kBlockBytes) copy_async(to + i + lane * 16, from + i + lane * 16);
  }
  copy_async_commit();
}
// For 16 rows of weights and the item's rows as columns: acc[c] of columns 8c .. 8c + 7. `weights` is the first block, x[c] the lane's first element, n_x[c] how many of
// its blocks have one. Blocks are added segment by segment: `flush` gets the sum of each.
template <class F, int kColumns, class Flush>
__device__ __forceinline__ void sum_blocks(char* ring, const char* weights, const float* scales, const bf16* (&x)[kColumns], const int (&n_x)[kColumns], int n_blocks, int segment_blocks, int lane, Flush flush) {
  constexpr int kBlocks = kRingBlocks<F, kColumns>;
#pragma unroll
  for (int block = 0; block < kBlocks; block++) copy_block<F, kColumns>(ring, weights, block, n_blocks, lane);
  uint4 next[kColumns];
  auto fetch_x = [&](int block) {
#pragma unroll
    for (int c = 0; c < kColumns; c++) next[c] = block < n_x[c] ? load_activations(reinterpret_cast<const uint4*>(x[c] + block * 32)) : make_uint4(0, 0, 0, 0);
  };
  fetch_x(0);
  float acc[kColumns][4] = {};
  int left = segment_blocks;
#pragma unroll 2
  for (int block = 0; block < n_blocks; block++) {
    typename F::Held held;
    if constexpr (std::is_same<F, Fp8>::value) F::load_scales(held, scales + block * 2);
    copy_async_wait<kBlocks - 1>();
    __syncwarp();
    F::read(held, ring + block % kBlocks * F::kBlockBytes, lane);
    uint4 in[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; c++) in[c] = next[c];
    fetch_x(block + 1);
    __syncwarp();
    copy_block<F, kColumns>(ring, weights, block + kBlocks, n_blocks, lane);
#pragma unroll
    for (int c = 0; c < kColumns; c++) F::multiply(acc[c], held, in[c]);
    if (--left == 0 || block + 1 == n_blocks) {
      flush(acc);
#pragma unroll
      for (int c = 0; c < kColumns; c++) acc[c][0] = acc[c][1] = acc[c][2] = acc[c][3] = 0;
      left = segment_blocks;
    }
  }
}

// ---- experts_up ----
template <int kColumns> struct UpShared {
  float4 partial[32][kColumns][32];   // by segment, and lane as linear.cu lays them
  float inverse[kExpertRows];
};
template <class F, int kColumns>
__device__ __forceinline__ void up_tile(char* ring, const ExpertParams& p, const ExpertMatrix& m, const ExpertItem& item, int tile, UpShared<kColumns>& shared) {
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
  const char* weights = reinterpret_cast<const char*>(m.weights) + expert * m.bytes + block * F::kBlockBytes;
  int segment = warp * segments_a_warp;
  sum_blocks<F, kColumns>(ring, weights, m.tile_scales + (size_t)expert * m.scales + block * 2, x, n_x, n_mine, segment_blocks, lane, [&](float (&acc)[kColumns][4]) {
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
  SHARED(char, rings, [kExpertWarps][kRingBytes<kColumns>]);
  pdl_launch_dependents();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  char* ring = rings[warp];
  pdl_wait();
  if (p.work->n_items == 0) return;   // rows behind those in use
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
    if (routed) up_tile<Routed, kColumns>(ring, p, p.routed, item, group % tiles, shared);
    else up_tile<Common, kColumns>(ring, p, p.shared, item, group - n_routed * tiles, shared);
  }
}

// ---- experts_down ----
constexpr int kSlots = kMaxChosen + 1;
template <class F, int kColumns>
__device__ __forceinline__ void down_item(char* ring, const ExpertParams& p, const ExpertMatrix& m, const ExpertItem& item, int tile, float (*sums)[16]) {
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
  const char* weights = reinterpret_cast<const char*>(m.weights) + expert * m.bytes + block * F::kBlockBytes;
  float total[kColumns][4] = {};
  sum_blocks<F, kColumns>(ring, weights, m.tile_scales + (size_t)expert * m.scales + block * 2, x, n_x, k_blocks, segment_blocks_of(k_blocks), lane, [&](float (&acc)[kColumns][4]) {
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
  SHARED(char, rings, [kExpertWarps][kRingBytes<kColumns>]);
  pdl_launch_dependents();
  const int warp = threadIdx.x >> 5;
  pdl_wait();
  const int n_items = p.work->n_items, n_routed = p.work->n_routed, rows = p.rows;
  if (n_items == 0) return;   // rows behind those in use
  for (int tile = blockIdx.x; tile < p.n / 16; tile += gridDim.x) {
    for (int i = warp; i < n_items; i += kExpertWarps) {
      const ExpertItem& item = p.work->item[i];
      if (i < n_routed) down_item<Routed, kColumns>(rings[warp], p, p.routed, item, tile, sums);
      else down_item<Common, kColumns>(rings[warp], p, p.shared, item, tile, sums);
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
  KERNEL(experts_down_m16_##routed##_##shared, ExpertParams, kExpertThreads, 2) { experts_down<Routed, Shared, 2>(p); }
EXPERTS(bf16, bf16, Bf16, Bf16)
EXPERTS(fp8, fp8, Fp8, Fp8)
EXPERTS(int4, bf16, Int4, Bf16)
EXPERTS(int4, fp8, Int4, Fp8)
