// Feed-forward layers of experts for 1 to 16 rows of a pass, three kernels that stream the weights of every expert that
// some row wants, once:
//
//   router         sums of the router's weights; K is cut over blocks, since there are few experts to hand out
//   experts_up     every block chooses the experts of all rows for itself (a kernel of its own for that is a
//   microsecond of launch and one of waiting), while the shared
//                  expert's weights are under way; then silu(gate) * up. A block takes 16-row tiles, its warps split K
//                  as in linear.cu
//   experts_down   a block owns outputs of all rows; its warps take the experts in turn; sums meet in shared memory
//
// Width does not show in the bits: an expert's product with a row is a column of the mma, summed in an order that the
// weight alone decides; a row adds its experts in ascending order and the shared one last, whatever other rows want.
#include <type_traits>
#include "format.cuh"
#include "linear_row.cuh"

namespace {

constexpr int kExpertThreads = 512, kExpertWarps = kExpertThreads / 32;

// Where a lane's float4 lies among 32 of a tile's sums, so that lanes store and adders (below) read without bank
// conflicts: as in linear.cu.
__device__ __forceinline__ int sum_slot(int g, int t) { return t * 8 + ((g + 2 * t) & 7); }
// The sum that a thread of four warps adds up: row `n` of the tile, and column of the mma.
struct Adder {
  int column, n, at;  // at: in floats, within a tile's 32 float4
  __device__ __forceinline__ Adder(int thread) {
    const int quarter = thread >> 5 & 3, g = (thread & 31) >> 2;
    column = (thread >> 7) * 8 + 2 * quarter + (thread & 1);
    n = g + 8 * (thread >> 1 & 1);
    at = (quarter * 8 + ((g + 2 * quarter) & 7)) * 4 + (thread & 3);
  }
};
__device__ __forceinline__ int rows_in_use(const int* n_rows, int first_row, int rows) {
  return n_rows ? max(0, min(*n_rows - first_row, rows)) : rows;
}

// ---- router ----
// K is cut into 64 runs; block y has runs 16 y ..  16 y + 15, one a warp, and adds them in order.
template <int kColumns>
__device__ __forceinline__ void router(const RouterParams& p) {
  constexpr int kAhead = kColumns == 1 ? 4 : 2;
  SHARED(float4, partial, [kExpertWarps][kColumns][32]);
  pdl_launch_dependents();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int k_blocks = k_blocks_of(p.k),
            run = (k_blocks + kRouterSplits * kExpertWarps - 1) / (kRouterSplits * kExpertWarps);
  const int first = min((int)(blockIdx.y * kExpertWarps + warp) * run, k_blocks), n = min(run, k_blocks - first);
  const char* weights = reinterpret_cast<const char*>(p.weights) +
                        ((size_t)blockIdx.x * k_blocks + first) * Bf16::kUnitBytes + lane * Bf16::kLaneBytes;
  Bf16::Held held[kAhead];
#pragma unroll
  for (int u = 0; u < kAhead; u++)
    if (u < n) Bf16::load(held[u], weights + u * Bf16::kUnitBytes, nullptr, lane);
  pdl_wait();
  if (rows_in_use(p.n_rows, p.first_row, p.rows) == 0) return;
  float acc[kColumns][4] = {};
  for (int b = 0; b < n; b += kAhead) {
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
      if (b + u >= n) break;
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
        const int row = c * 8 + g, k = (first + b + u) * 32 + 8 * t;
        const uint4 in = row < p.rows && k < p.k
                             ? load_activations(reinterpret_cast<const uint4*>(p.x + (size_t)row * p.x_stride + k))
                             : make_uint4(0, 0, 0, 0);
        Bf16::multiply(acc[c], held[u], 0, in);
      }
      if (b + u + kAhead < n) Bf16::load(held[u], weights + (b + u + kAhead) * Bf16::kUnitBytes, nullptr, lane);
    }
  }
#pragma unroll
  for (int c = 0; c < kColumns; c++) store_shared(shared_address(&partial[warp][c][sum_slot(g, t)]), acc[c]);
  __syncthreads();
  if (threadIdx.x >= kColumns * 128) return;
  const Adder a(threadIdx.x);
  const int e = blockIdx.x * 16 + a.n;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kExpertWarps; w++)
    sum = __fadd_rn(sum, reinterpret_cast<const float*>(partial[w][threadIdx.x >> 7])[a.at]);
  if (a.column < p.rows && e < p.n_experts) p.sums[((size_t)blockIdx.y * p.rows + a.column) * p.n_experts + e] = sum;
}

// ---- route ----
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
  SHARED(unsigned, first_of_warp, [kExpertWarps]);
  constexpr int kMine = kMaxExperts / 32;  // of a lane: experts lane, lane + 32, ..
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, row = warp, E = p.n_experts, group = E / p.n_groups;
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
  if (row < rows) {
    float* mine = score + row * E;
    const float inv = inverse[row];
    float best = -INFINITY, sum = 0;
    if (p.softmax) {
      for (int e = lane; e < E; e += 32) best = fmaxf(best, __fmul_rn(mine[e], inv));
      best = warp_max(best);
    }
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
    // The k best, one by one, of equals the lowest.
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
    // Ascending: experts of a lower j first, then of a lower lane.
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
  // Thread: an expert.
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

// A tile's scale of row n, where each row has one.
template <class F>
__device__ __forceinline__ float row_scale(const ExpertMatrix& m, int expert, int tile, int n) {
  return std::is_same<F, Fp8RowsBlock>::value ? __uint_as_float(load_weights(reinterpret_cast<const uint32_t*>(
                                                    m.scales + (size_t)expert * m.n_scales + tile * 16 + n)))
                                              : 1.0f;
}
template <class F>
__device__ __forceinline__ float scaled(float scale, float sum) {
  return std::is_same<F, Fp8RowsBlock>::value ? __fmul_rn(scale, sum) : sum;
}

// ---- a warp's run of K: some units of a tile, one behind the other ----
template <class F>
struct Run {
  int first, n;
  __device__ __forceinline__ Run(int k, int worker, int workers) {
    const int units = units_of<F>(k), each = (units + workers - 1) / workers;
    first = min(worker * each, units);
    n = max(0, min(each, units - first));
  }
};
// What a warp has under way of a stream of runs: the first units of the run that comes next.
template <class F, int kColumns>
struct Stream {
  // With more columns there are registers for less: a unit at a time, x when it is needed, each run for itself.
  static constexpr bool kFlows = kColumns == 1;
  static constexpr int kAhead = kFlows ? 2 : 1;
  typename F::Held held[kAhead];
  // A run: the lane's part of its first unit, and its scales.
  struct At {
    const char* weights;
    const float* scales;
  };
  __device__ __forceinline__ static At run(const ExpertMatrix& m, int expert, int tile, int k, int first, int lane) {
    const size_t unit = (size_t)tile * units_of<F>(k) + first;
    return {reinterpret_cast<const char*>(m.weights) + expert * m.bytes + unit * F::kUnitBytes + lane * F::kLaneBytes,
            F::kScales ? m.scales + (size_t)expert * m.n_scales + unit * F::kScales : nullptr};
  }
  __device__ __forceinline__ void load(int slot, const At& at, int unit, int lane) {
    F::load(held[slot], at.weights + unit * F::kUnitBytes, at.scales + unit * F::kScales, lane);
  }
  __device__ __forceinline__ void start(const At& at, int n, int lane) {
#pragma unroll
    for (int u = 0; u < kAhead; u++)
      if (u < n) load(u, at, u, lane);
  }
  __device__ __forceinline__ void begin(const At& at, int n, int lane) {
    if (kFlows) start(at, n, lane);
  }
  // acc[c] += 16 rows of weights times columns 8c .. 8c + 7 of x, over the n units of run `at`, which `begin` or the
  // run before has begun; begins run `next` of as many units, if there is one. x[c]: what the lane multiplies of its
  // column; left[c]: how many numbers of x there are from there on, 0 for a column that is not wanted. Behind the end
  // of x weights are 0.
  __device__ __forceinline__ void sum(float (&acc)[kColumns][4], At at, const At& next, const bf16* (&x)[kColumns],
                                      int (&left)[kColumns], int n, int lane) {
    uint4 in[kColumns][kFlows ? F::kWords : 1] = {};
    const auto fetch_x = [&](int u, int w) {
#pragma unroll
      for (int c = 0; c < kColumns; c++)
        if (left[c] > u * F::kK + w * 32)
          in[c][kFlows ? w : 0] = load_activations(reinterpret_cast<const uint4*>(x[c] + u * F::kK + w * 32));
    };
    if (!kFlows) start(at, n, lane);
    if (kFlows)
#pragma unroll
      for (int w = 0; w < F::kWords; w++) fetch_x(0, w);
#pragma unroll 1
    for (; n > 0; n -= kAhead) {
#pragma unroll
      for (int u = 0; u < kAhead; u++) {
        if (u >= n) break;
#pragma unroll
        for (int w = 0; w < F::kWords; w++) {
          if (!kFlows) fetch_x(u, w);
#pragma unroll
          for (int c = 0; c < kColumns; c++) F::multiply(acc[c], held[u], w, in[c][kFlows ? w : 0]);
          if (kFlows) fetch_x(u + 1, w);
          else
            __syncwarp();  // keeps the next word's loads from being moved up: they would cost more registers than there
                           // are
        }
        if (u + kAhead < n) load(u, at, u + kAhead, lane);
        else if (kFlows && next.weights) load(u, next, u, lane);
      }
      at.weights += kAhead * F::kUnitBytes;
      at.scales += kAhead * F::kScales;
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
        x[c] += kAhead * F::kK;
        left[c] -= kAhead * F::kK;
      }
    }
  }
};

// ---- experts_up ----
// A tile: of an expert (of the shared one: 0), for the rows `by`.
struct Up {
  int expert, tile;
  unsigned by;
};
template <class F, int kColumns>
__device__ __forceinline__ typename Stream<F, kColumns>::At up_run(const ExpertParams& p, const ExpertMatrix& m,
                                                                   const Up& of) {
  const int thread = thread_index_anew();
  return Stream<F, kColumns>::run(m, of.expert, of.tile, p.k, Run<F>(p.k, thread >> 5, kExpertWarps).first,
                                  thread & 31);
}
template <class F, int kColumns, bool kShared>
__device__ __forceinline__ void up_tile(Stream<F, kColumns>& stream, const ExpertParams& p, const ExpertMatrix& m,
                                        const Up& of, const typename Stream<F, kColumns>::At& next,
                                        const Chosen<kColumns * 8>& chosen, float4 (*partial)[kColumns][32],
                                        const float* inverse) {
  const unsigned by = of.by;
  const int n = __popc(by), tile = of.tile;
  // Column j is the j-th row that wants the expert.
  const auto row_of = [&](int j) {
    unsigned rest = by;
#pragma unroll 1
    for (int i = 0; i < j; i++) rest &= rest - 1;
    return __ffs(rest) - 1;
  };
  {
    const int thread = thread_index_anew(), warp = thread >> 5, lane = thread & 31, g = lane >> 2, t = lane & 3;
    const Run<F> run(p.k, warp, kExpertWarps);
    const bf16* x[kColumns];
    int left[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      const bool wanted = c * 8 + g < n;
      x[c] = p.x + (size_t)(wanted ? row_of(c * 8 + g) : 0) * p.x_stride + run.first * F::kK + 8 * t;
      left[c] = wanted ? p.k - run.first * F::kK - 8 * t : 0;
    }
    float acc[kColumns][4] = {};
    stream.sum(acc, Stream<F, kColumns>::run(m, of.expert, tile, p.k, run.first, lane), next, x, left, run.n, lane);
#pragma unroll
    for (int c = 0; c < kColumns; c++) store_shared(shared_address(&partial[warp][c][sum_slot(g, t)]), acc[c]);
  }
  const float scale = row_scale<F>(m, of.expert, tile, Adder(thread_index_anew() % (kColumns * 128)).n);
#ifndef PLANT_MISSING_BARRIER
  __syncthreads();
#endif
  const int thread = thread_index_anew();
  if (thread < kColumns * 128) {
    const Adder a(thread);
    const SharedAddress sums = shared_address(&partial[0][thread >> 7][0]) + a.at * 4;
    float v[kExpertWarps], y = 0;
#pragma unroll
    for (int w = 0; w < kExpertWarps; w++) v[w] = load_shared(sums + w * kColumns * 512);
#pragma unroll
    for (int w = 0; w < kExpertWarps; w++) y = __fadd_rn(y, v[w]);
    const bool wanted = a.column < n;
    const int row = wanted ? row_of(a.column) : 0, j = tile * 8 + (a.n & 7);
    y = __fmul_rn(inverse[row], scaled<F>(scale, y));
    const float up = __shfl_xor_sync(0xffffffffu, y, 2);
    const int slot = kShared ? p.route.top_k : chosen.slot_of[row][of.expert];
    if (wanted && a.n < 8 && j < m.dim)
      p.act[(size_t)row * p.act_stride + slot * p.routed.dim + j] = __float2bfloat16(__fmul_rn(silu(y), up));
  }
}

template <class Routed, class Common, int kColumns>
__device__ __forceinline__ void experts_up(const ExpertParams& p) {
  constexpr int kRows = kColumns * 8,
                kCost = (2 * Common::kUnitBytes * Routed::kK / (Routed::kUnitBytes * Common::kK) + 1) /
                        2;                                   // of a shared expert's tile, in tiles of the routed ones
  SHARED(float4, partial, [2][kExpertWarps][kColumns][32]);  // in turn, so that a tile needs one barrier; before that
                                                             // the routes' scores
  SHARED(Chosen<kRows>, chosen, );
  SHARED(float, inverse, [kRows]);
  static_assert(sizeof(float4) * 2 * kExpertWarps * kColumns * 32 == sizeof(float) * kRows * kMaxExperts, "scores fit");
  pdl_launch_dependents();
  const int shared_tiles = (p.shared.dim + 7) / 8, tiles = (p.routed.dim + 7) / 8, block = blockIdx.x,
            blocks = gridDim.x;
  // A block with a tile of the shared expert does that first, and skips as many rounds of the others as it costs; where
  // there are more such tiles than blocks, none skips.
  int buffer = 0;
  const int others = blocks - shared_tiles;
  if (block < shared_tiles) {
    Stream<Common, kColumns> stream;
    stream.begin(up_run<Common, kColumns>(p, p.shared, {0, block, 0}),
                 Run<Common>(p.k, threadIdx.x >> 5, kExpertWarps).n, threadIdx.x & 31);
    pdl_wait();
    const int rows = rows_in_use(p.route.n_rows, p.route.first_row, p.rows);
    if (rows == 0) return;
    touch_x(p, rows, p.k);
    inverse_of_rows(p, rows, inverse);  // up_tile has a barrier before it reads them
    for (int tile = block; tile < shared_tiles; tile += blocks, buffer ^= 1) {
      const typename Stream<Common, kColumns>::At none{};
      up_tile<Common, kColumns, true>(stream, p, p.shared, {0, tile, (1u << rows) - 1},
                                      Stream<Common, kColumns>::kFlows && tile + blocks < shared_tiles
                                          ? up_run<Common, kColumns>(p, p.shared, {0, tile + blocks, 0})
                                          : none,
                                      chosen, partial[buffer], inverse);
    }
    __syncthreads();
    // Its first tile of the others, if even rows that share nothing have so many.
    if (others > 0 && kCost * others + block >= rows * p.route.top_k * tiles) return;
  }
  const int rows = route<kRows>(p, reinterpret_cast<float*>(partial), inverse, chosen, block == blocks - 1);
  if (rows == 0) return;
  const int n_tiles = chosen.n * tiles;
  const auto up_of = [&](int round) {  // what this block does in a round; expert -1: nothing, and no more
    const int i = others <= 0      ? round * blocks + block
                  : round >= kCost ? kCost * others + (round - kCost) * blocks + block
                                   : round * others + block - shared_tiles;
    if (i >= n_tiles) return Up{-1, 0, 0};
    const int expert = chosen.expert[i / tiles];
    return Up{expert, i % tiles, chosen.wanting[expert]};
  };
  int round = others > 0 && block < shared_tiles ? kCost : 0;
  Up now = up_of(round);
  if (now.expert < 0) return;
  Stream<Routed, kColumns> stream;
  stream.begin(up_run<Routed, kColumns>(p, p.routed, now), Run<Routed>(p.k, threadIdx.x >> 5, kExpertWarps).n,
               threadIdx.x & 31);
  while (now.expert >= 0) {
    const Up after = up_of(++round);
    const typename Stream<Routed, kColumns>::At none{};
    up_tile<Routed, kColumns, false>(
        stream, p, p.routed, now,
        Stream<Routed, kColumns>::kFlows && after.expert >= 0 ? up_run<Routed, kColumns>(p, p.routed, after) : none,
        chosen, partial[buffer], inverse);
    buffer ^= 1;
    now = after;
  }
}

// ---- experts_down ----
// A block has kTiles tiles of 16 outputs, each worked on by so many of its warps.
constexpr int kRuns = 8;  // of the shared expert's K, added in order
template <class Routed, class Common, int kColumns>
__device__ __forceinline__ void experts_down(const ExpertParams& p) {
  constexpr int kTiles = kColumns == 1 ? 2 : 1, kRows = kColumns * 8, kWorkers = kExpertWarps / kTiles;
  SHARED(float, sums, [kTiles][kRows * kMaxChosen][16]);  // [row * top_k + slot][output]
  SHARED(float4, common, [kTiles][kRuns][kColumns][32]);
  struct Place {  // of a warp and a lane
    int lane, g, t, own, worker, tile;
    __device__ __forceinline__ Place(int thread)
        : lane(thread & 31),
          g(lane >> 2),
          t(lane & 3),
          own((thread >> 5) / kWorkers),
          worker((thread >> 5) % kWorkers),
          tile(blockIdx.x * kTiles + own) {}
  };
  const int n_tiles = p.n / 16;
  pdl_launch_dependents();
  if (p.shared.dim > 0) {  // the shared expert's part is known
    const Place at(threadIdx.x);
    const Run<Common> run(p.shared.dim, at.worker, kRuns);
    if (at.lane == 0 && at.worker < kRuns && at.tile < n_tiles && run.n > 0)
      prefetch_l2(Stream<Common, kColumns>::run(p.shared, 0, at.tile, p.shared.dim, run.first, 0).weights,
                  run.n * Common::kUnitBytes);
  }
  pdl_wait();
  const ExpertWork& work = *p.route.work;
  const int rows = rows_in_use(p.route.n_rows, p.route.first_row, p.rows), top_k = p.route.top_k;
  if (rows == 0) return;
  {
    const Place at(thread_index_anew());
    const int n_items = at.tile < n_tiles ? work.n : 0;
    // The next item's description is under way while this one is worked on.
    struct Item {
      int expert, n, row[kColumns], slot[kColumns];
    };
    const auto describe = [&](int i) {
      const ExpertItem& item = work.item[i];
      Item r{item.expert, item.n, {}, {}};
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
        r.row[c] = item.row[c * 8 + at.g];
        r.slot[c] = item.slot[c * 8 + at.g];
      }
      return r;
    };
    Stream<Routed, kColumns> stream;
    const int units = units_of<Routed>(p.routed.dim);
    const auto run_of = [&](const Item& item) {
      return Stream<Routed, kColumns>::run(p.routed, item.expert, at.tile, p.routed.dim, 0, at.lane);
    };
    Item next = describe(at.worker);
    if (at.worker < n_items) stream.begin(run_of(next), units, at.lane);
#pragma unroll 1
    for (int i = at.worker; i < n_items; i += kWorkers) {
      constexpr bool kFlows = Stream<Routed, kColumns>::kFlows;
      const Item item = kFlows ? next : describe(i);
      const bool more = kFlows && i + kWorkers < n_items;
      if (more) next = describe(i + kWorkers);
      const bf16* x[kColumns];
      int left[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
        const bool wanted = c * 8 + at.g < item.n;
        x[c] = p.x + (wanted ? (size_t)item.row[c] * p.x_stride + item.slot[c] * p.routed.dim : 0) + 8 * at.t;
        left[c] = wanted ? p.routed.dim - 8 * at.t : 0;
        for (int line = at.t * 64; line < left[c]; line += 256) touch(x[c] - 8 * at.t + line);
      }
      float acc[kColumns][4] = {};
      const typename Stream<Routed, kColumns>::At none{};
      const float low = row_scale<Routed>(p.routed, item.expert, at.tile, at.g),
                  high = row_scale<Routed>(p.routed, item.expert, at.tile, at.g + 8);
      stream.sum(acc, run_of(item), more ? run_of(next) : none, x, left, units, at.lane);
#pragma unroll
      for (int c = 0; c < kColumns; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int column = c * 8 + 2 * at.t + (e & 1);
          if (column < item.n)
            sums[at.own][work.item[i].row[column] * top_k + work.item[i].slot[column]][at.g + 8 * (e >> 1)] =
                scaled<Routed>(e >> 1 ? high : low, acc[c][e]);
        }
    }
  }
  if (p.shared.dim > 0) {
    const Place at(thread_index_anew());
    const Run<Common> run(p.shared.dim, at.worker, kRuns);
    if (at.worker < kRuns && at.tile < n_tiles) {
      const bf16* x[kColumns];
      int left[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; c++) {
        const bool wanted = c * 8 + at.g < rows;
        x[c] = p.x + (size_t)(wanted ? c * 8 + at.g : 0) * p.x_stride + top_k * p.routed.dim + run.first * Common::kK +
               8 * at.t;
        left[c] = wanted ? p.shared.dim - run.first * Common::kK - 8 * at.t : 0;
      }
      float acc[kColumns][4] = {};
      Stream<Common, kColumns> stream;
      const typename Stream<Common, kColumns>::At here = Stream<Common, kColumns>::run(
                                                      p.shared, 0, at.tile, p.shared.dim, run.first, at.lane),
                                                  none{};
      stream.begin(here, run.n, at.lane);
      stream.sum(acc, here, none, x, left, run.n, at.lane);
#pragma unroll
      for (int c = 0; c < kColumns; c++)
        store_shared(shared_address(&common[at.own][at.worker][c][sum_slot(at.g, at.t)]), acc[c]);
    }
  }
#ifndef PLANT_MISSING_BARRIER
  __syncthreads();
#endif
  // Thread: tile, column (a row of the pass), output of the tile.
  const int thread = thread_index_anew(), own = thread / (kColumns * 128), tile = blockIdx.x * kTiles + own;
  if (own >= kTiles || tile >= n_tiles) return;
  const Adder a(thread % (kColumns * 128));
  const int row = a.column;
  const bool wanted = row < rows;
  float square_sum = 0;
  if (wanted) {
    const size_t at = (size_t)row * p.n + tile * 16 + a.n;
    const float before = p.partial ? 0 : p.stream[at];
    float y = 0;
#pragma unroll 4
    for (int slot = 0; slot < top_k; slot++)
      y = __fadd_rn(y, __fmul_rn(work.weight[row][slot], sums[own][row * top_k + slot][a.n]));
    if (p.shared.dim > 0) {
      float sum = 0;
#pragma unroll
      for (int r = 0; r < kRuns; r++)
        sum = __fadd_rn(sum, reinterpret_cast<const float*>(common[own][r][thread % (kColumns * 128) >> 7])[a.at]);
      y = __fadd_rn(y, scaled<Common>(row_scale<Common>(p.shared, 0, tile, a.n), sum));
    }
    if (p.partial) {
      p.partial[at] = __float2bfloat16(y);
    } else {
      y = __fadd_rn(before, y);
      p.stream[at] = y;
      if (p.tap) p.tap[(size_t)row * p.tap_stride + tile * 16 + a.n] = __float2bfloat16(y);
      if (p.next_norm) p.normed[at] = __float2bfloat16(__fmul_rn(y, __bfloat162float(p.next_norm[tile * 16 + a.n])));
      square_sum = square(y);
    }
  }
  if (p.next_norm && !p.partial) {  // the tree of linear_row.cuh: outputs n and n + 8 first, then neighbours
#pragma unroll
    for (int bit = 2; bit <= 16; bit *= 2)
      square_sum = __fadd_rn(square_sum, __shfl_xor_sync(0xffffffffu, square_sum, bit));
    if (wanted && (thread & 31) < 2) p.squares_out[(size_t)row * n_tiles + tile] = square_sum;
  }
}

}  // namespace

KERNEL(router_m8, RouterParams, kExpertThreads, 2) { router<1>(p); }
KERNEL(router_m16, RouterParams, kExpertThreads, 2) { router<2>(p); }
// experts_<up|down>_m<most rows>_<format of the routed experts>_<of the shared one>.
#define EXPERTS(routed, shared, Routed, Shared)                                                                        \
  KERNEL(experts_up_m8_##routed##_##shared, ExpertParams, kExpertThreads, 2) { experts_up<Routed, Shared, 1>(p); }     \
  KERNEL(experts_up_m16_##routed##_##shared, ExpertParams, kExpertThreads, 2) { experts_up<Routed, Shared, 2>(p); }    \
  KERNEL(experts_down_m8_##routed##_##shared, ExpertParams, kExpertThreads, 2) { experts_down<Routed, Shared, 1>(p); } \
  KERNEL(experts_down_m16_##routed##_##shared, ExpertParams, kExpertThreads, 2) { experts_down<Routed, Shared, 2>(p); }
EXPERTS(bf16, bf16, Bf16, Bf16)
EXPERTS(fp8, fp8, Fp8Block, Fp8Block)
EXPERTS(fp8_rows, fp8_rows, Fp8RowsBlock, Fp8RowsBlock)
EXPERTS(int4, bf16, Int4, Bf16)
EXPERTS(int4, fp8, Int4, Fp8Block)
