// How a pass chooses its experts: every block of experts_up does it for itself (route), from the sums that router.cu
// left; the last block leaves the result for experts_down. Read experts.cu first;
// what was measured and dropped: docs/decisions/kernels.md#experts.
#pragma once
#include "experts.cuh"

namespace {

template <int kRows>
struct Chosen {
  float bias[kMaxExperts];                    // and other numbers of the choice
  unsigned short of_row[kRows][kMaxChosen];   // a row's experts, ascending
  unsigned short wanting[kMaxExperts];        // by expert: a bit for each row that wants it
  unsigned char slot_of[kRows][kMaxExperts];  // where an expert stands among its row's
  unsigned short expert[kRows * kMaxChosen];  // those that somebody wants, ascending
  int n;
};
// Whose order is that of the numbers; greater than 0 for every number but -NaN.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned u = __float_as_uint(__fadd_rn(x, 0.0f));
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
// Into L1: what this warp's runs multiply of each row of x, k numbers each.
__device__ __forceinline__ void touch_x(const ExpertParams& p, int rows, int k) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, lines = (k / kExpertWarps + 63) / 64;
  for (int i = lane; i < rows * lines; i += 32)
    touch(p.x + (size_t)(i / lines) * p.x_stride + min(warp * (k / kExpertWarps) + i % lines * 64, k - 1) / 2 * 2);
}
// 1/rms of each row, a warp a row.
__device__ __forceinline__ void inverse_of_rows(const ExpertParams& p, int rows, float* inverse) {
  constexpr int kTiles = 16;  // of a lane, so many at once
  const int row = threadIdx.x >> 5, lane = threadIdx.x & 31, tiles = p.k / 16;
  if (row >= rows) return;
  const float* squares = p.squares + (size_t)row * tiles;
  float sum = 0;
  for (int first = lane; first < tiles; first += 32 * kTiles) {
    float v[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; i++) v[i] = first + i * 32 < tiles ? load_activation(squares + first + i * 32) : 0.0f;
#pragma unroll
    for (int i = 0; i < kTiles; i++) sum = __fadd_rn(sum, v[i]);
  }
  sum = warp_sum(sum);
  if (lane == 0) inverse[row] = inverse_rms(sum, p.k, p.eps);
}
// For all rows in use: their experts, as a block sees them, and 1/rms of each. `score` is shared memory,
// [kRows][n_experts], free again afterwards. Waits for the kernel before, after it has asked for the constants; ends
// with a barrier; returns the rows in use. A call, not inlined: its registers are not those of the streams around it.
template <int kRows>
__device__ __noinline__ int route(const ExpertParams& ep, float* score, float* inverse, Chosen<kRows>& chosen,
                                  bool leaves_work) {
  const RouteParams& p = ep.route;
  // ---- Shared memory and who does what ----
  SHARED(unsigned, first_of_warp, [kExpertWarps]);
  constexpr int kMine = kMaxExperts / 32;  // of a lane: experts lane, lane + 32, ..
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = warp, E = p.n_experts, group = E / p.n_groups;
  // ---- Constants, the wait, and the router's sums ----
  chosen.bias[threadIdx.x] = p.bias && (int)threadIdx.x < E ? p.bias[threadIdx.x] : 0.0f;
  chosen.wanting[threadIdx.x] = 0;
  pdl_wait();
  const int rows = rows_in_use(p.n_rows, p.first_row, ep.rows);
  touch_x(ep, rows, ep.k);
  inverse_of_rows(ep, rows, inverse);
  static_assert(kRouterSplits == 4, "the sum below");
  for (int i = threadIdx.x; i < rows * E; i += kExpertThreads) {
    float part[kRouterSplits];
#pragma unroll
    for (int s = 0; s < kRouterSplits; s++) part[s] = load_activation(p.sums + (size_t)s * ep.rows * E + i);
    score[i] = __fadd_rn(__fadd_rn(__fadd_rn(part[0], part[1]), part[2]), part[3]);
  }
  __syncthreads();
  // ---- Rows: a warp each ----
  if (row < rows) {
    float* mine = score + row * E;
    const float inv = inverse[row];
    float best = -INFINITY, sum = 0;
    if (p.softmax) {
      for (int e = lane; e < E; e += 32) best = fmaxf(best, __fmul_rn(mine[e], inv));
      best = warp_max(best);
    }
    // ---- Row: scores ----
    unsigned key[kMine];  // of what decides: the score, biased. A row's softmax has one divisor, which changes no order
#pragma unroll
    for (int i0 = 0; i0 < kMine; i0 += 4) {
      float logit[4], bias[4];  // all loads of a batch before its first use
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int e = min(lane + (i0 + i) * 32, E - 1);
        logit[i] = mine[e];
        bias[i] = chosen.bias[e];
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int e = lane + (i0 + i) * 32;
        key[i0 + i] = 0;
        if (e >= E) continue;
        const float l = __fmul_rn(logit[i], inv),
                    s = p.softmax ? __expf(__fsub_rn(l, best)) : __fdividef(1.0f, __fadd_rn(1.0f, __expf(-l)));
        sum = __fadd_rn(sum, s);
        mine[e] = s;
        key[i0 + i] = ordered(__fadd_rn(s, bias[i]));
      }
    }
    if (p.softmax) sum = warp_sum(sum);
    __syncwarp();
    // ---- Row: the best groups alone stay ----
    if (p.n_groups > 1) {
      float first = -INFINITY, second = -INFINITY;  // of group `lane`
      if (lane < p.n_groups)
        for (int e = lane * group; e < (lane + 1) * group; e++) {
          const float c = __fadd_rn(mine[e], chosen.bias[e]);
          second = fmaxf(second, fminf(first, c));
          first = fmaxf(first, c);
        }
      const float both = lane < p.n_groups ? __fadd_rn(first, second) : -INFINITY;
      int better = 0;
      for (int other = 0; other < p.n_groups; other++) {
        const float theirs = __shfl_sync(0xffffffffu, both, other);
        better += theirs > both || (theirs == both && other < lane);
      }
      const unsigned kept = __ballot_sync(0xffffffffu, lane < p.n_groups && better < p.top_groups);  // bit per group
#pragma unroll
      for (int i = 0; i < kMine; i++)
        if (lane + i * 32 < E && !(kept >> (lane + i * 32) / group & 1)) key[i] = 0;
    }
    // ---- Row: the k best, one by one, of equals the lowest ----
    unsigned taken = 0;  // bit j: expert lane + 32 j
#pragma unroll 1
    for (int i = 0; i < p.top_k; i++) {
      unsigned largest[4] = {0, 0, 0, 0};  // four chains, so that little waits for what is just before it
#pragma unroll
      for (int j = 0; j < kMine; j++) largest[j & 3] = max(largest[j & 3], key[j]);
      largest[0] = max(max(largest[0], largest[1]), max(largest[2], largest[3]));
      const unsigned top = warp_largest(largest[0]);
      unsigned first = ~0u;
      if (largest[0] == top)
#pragma unroll
        for (int j = kMine - 1; j >= 0; j--)
          if (key[j] == top) first = lane + j * 32;
      // Mostly one lane has it; where several do, the lowest expert wins.
      const unsigned having = __ballot_sync(0xffffffffu, first != ~0u);
      if ((having & (having - 1)) != 0) first = warp_smallest(first) == first ? first : ~0u;
      if (first != ~0u)
#pragma unroll
        for (int j = 0; j < kMine; j++)
          if (first == (unsigned)(lane + j * 32)) {
            key[j] = 0;
            taken |= 1u << j;
          }
    }
    // ---- Row: its experts ascending (those of a lower j first, then of a lower lane), and their weights ----
    int before = 0;
#pragma unroll
    for (int j = 0; j < kMine; j++) {
      const unsigned of_all = __ballot_sync(0xffffffffu, taken >> j & 1);
      if (taken >> j & 1)
        chosen.of_row[row][before + __popc(of_all & ((1u << lane) - 1))] = (unsigned short)(lane + 32 * j);
      before += __popc(of_all);
    }
    __syncwarp();
    // Lane: a slot.
    const int expert = lane < p.top_k ? chosen.of_row[row][lane] : 0;
    const float s = lane < p.top_k ? mine[expert] : 0.0f, total = warp_sum(s);
    if (lane < p.top_k) {
      chosen.slot_of[row][expert] = (unsigned char)lane;
      atomicOr(reinterpret_cast<unsigned*>(chosen.wanting) + expert / 2, 1u << (row + expert % 2 * 16));
      const float divisor = p.normalised ? __fadd_rn(total, p.softmax ? 0.0f : 1e-20f) : p.softmax ? sum : 1.0f;
      if (leaves_work) p.work->weight[row][lane] = __fmul_rn(__fdiv_rn(s, divisor), p.scale);
    }
  }
  __syncthreads();
  // ---- Experts that somebody wants: a thread each ----
  const unsigned by = chosen.wanting[threadIdx.x], wanted = __ballot_sync(0xffffffffu, by != 0);
  if (lane == 0) first_of_warp[warp] = __popc(wanted);
  __syncthreads();
  int at = __popc(wanted & ((1u << lane) - 1)), n = 0;
#pragma unroll
  for (int w = 0; w < kExpertWarps; w++) {
    if (w < warp) at += first_of_warp[w];
    n += first_of_warp[w];
  }
  if (by) chosen.expert[at] = (unsigned short)threadIdx.x;
  if (threadIdx.x == 0) chosen.n = n;
  if (leaves_work) {
    if (by) {
      ExpertItem& item = p.work->item[at];
      item.expert = threadIdx.x;
      item.n = __popc(by);
      int j = 0;
      for (unsigned rest = by; rest; rest &= rest - 1, j++) {
        const int r = __ffs(rest) - 1;
        item.row[j] = (unsigned char)r;
        item.slot[j] = chosen.slot_of[r][threadIdx.x];
      }
    }
    if (threadIdx.x == 0) p.work->n = n;
  }
  __syncthreads();
  return rows;
}

}  // namespace
