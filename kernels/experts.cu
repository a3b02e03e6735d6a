// Feed-forward layers of experts for 1 to 16 rows of a pass, three kernels that stream the weights of every expert that
// some row wants, once:
//
//   router         (router.cu) sums of the router's weights
//   experts_up     every block chooses the experts of all rows for itself (a kernel of its own for that is a
//   microsecond
//                  of launch and one of waiting), while the shared expert's weights are under way; then silu(gate) *
//                  up. A block takes 16-row tiles, its warps split K as in linear.cu
//   experts_down   a block owns outputs of all rows; its warps take the experts in turn; sums meet in shared memory
//
// Width does not show in the bits: an expert's product with a row is a column of the mma, summed in an order that the
// weight alone decides; a row adds its experts in ascending order and the shared one last, whatever other rows want.
// What was measured and dropped: docs/decisions/kernels.md#experts.
#include "experts_route.cuh"

namespace {

// ---- experts_up ----
// A tile: of an expert (of the shared one: 0), for the rows `by`.
struct Up {
  int expert, tile;
  unsigned by;
};
template <class F, int kMTiles>
__device__ __forceinline__ typename WeightStream<F, kMTiles>::At up_run(const ExpertParams& p, const ExpertMatrix& m,
                                                                        const Up& of) {
  const int thread = thread_index_anew();
  return WeightStream<F, kMTiles>::run(m, of.expert, of.tile, p.k, Run<F>(p.k, thread >> 5, kExpertWarps).first,
                                       thread & 31);
}
template <class F, int kMTiles, bool kShared>
__device__ __forceinline__ void up_tile(WeightStream<F, kMTiles>& stream, const ExpertParams& p, const ExpertMatrix& m,
                                        const Up& of, const typename WeightStream<F, kMTiles>::At& next,
                                        const Chosen<kMTiles * 8>& chosen, float4 (*partial)[kMTiles][32],
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
    const bf16* x[kMTiles];
    int left[kMTiles];
#pragma unroll
    for (int c = 0; c < kMTiles; c++) {
      const bool wanted = c * 8 + g < n;
      x[c] = p.x + (size_t)(wanted ? row_of(c * 8 + g) : 0) * p.x_stride + run.first * F::kK + 8 * t;
      left[c] = wanted ? p.k - run.first * F::kK - 8 * t : 0;
    }
    float acc[kMTiles][4] = {};
    stream.sum(acc, WeightStream<F, kMTiles>::run(m, of.expert, tile, p.k, run.first, lane), next, x, left, run.n,
               lane);
#pragma unroll
    for (int c = 0; c < kMTiles; c++) store_shared(shared_address(&partial[warp][c][sum_slot(g, t)]), acc[c]);
  }
  const float scale = row_scale<F>(m, of.expert, tile, Adder(thread_index_anew() % (kMTiles * 128)).n);
#ifndef PLANT_MISSING_BARRIER
  __syncthreads();
#endif
  const int thread = thread_index_anew();
  if (thread < kMTiles * 128) {
    const Adder a(thread);
    const SharedAddress sums = shared_address(&partial[0][thread >> 7][0]) + a.at * 4;
    float v[kExpertWarps], y = 0;
#pragma unroll
    for (int w = 0; w < kExpertWarps; w++) v[w] = load_shared(sums + w * kMTiles * 512);
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

template <class Routed, class Shared, int kMTiles>
__device__ __forceinline__ void experts_up(const ExpertParams& p) {
  constexpr int kRows = kMTiles * 8,
                kCost = (2 * Shared::kUnitBytes * Routed::kK / (Routed::kUnitBytes * Shared::kK) + 1) /
                        2;  // of a shared expert's tile, in tiles of the routed ones
  // ---- Shared memory ----
  SHARED(float4, partial, [2][kExpertWarps][kMTiles][32]);  // in turn, so that a tile needs one barrier; before that
                                                            // the routes' scores
  SHARED(Chosen<kRows>, chosen, );
  SHARED(float, inverse, [kRows]);
  static_assert(sizeof(float4) * 2 * kExpertWarps * kMTiles * 32 == sizeof(float) * kRows * kMaxExperts, "scores fit");
  pdl_launch_dependents();
  // ---- Who does what ----
  const int shared_tiles = (p.shared.dim + 7) / 8, tiles = (p.routed.dim + 7) / 8, block = blockIdx.x,
            blocks = gridDim.x;
  // A block with a tile of the shared expert does that first, and skips as many rounds of the others as it costs; where
  // there are more such tiles than blocks, none skips.
  int buffer = 0;
  const int others = blocks - shared_tiles;
  if (block < shared_tiles) {
    WeightStream<Shared, kMTiles> stream;
    stream.begin(up_run<Shared, kMTiles>(p, p.shared, {0, block, 0}),
                 Run<Shared>(p.k, threadIdx.x >> 5, kExpertWarps).n, threadIdx.x & 31);
    pdl_wait();
    const int rows = rows_in_use(p.route.n_rows, p.route.first_row, p.rows);
    if (rows == 0) return;
    touch_x(p, rows, p.k);
    inverse_of_rows(p, rows, inverse);  // up_tile has a barrier before it reads them
    for (int tile = block; tile < shared_tiles; tile += blocks, buffer ^= 1) {
      const typename WeightStream<Shared, kMTiles>::At none{};
      up_tile<Shared, kMTiles, true>(stream, p, p.shared, {0, tile, (1u << rows) - 1},
                                     WeightStream<Shared, kMTiles>::kFlows && tile + blocks < shared_tiles
                                         ? up_run<Shared, kMTiles>(p, p.shared, {0, tile + blocks, 0})
                                         : none,
                                     chosen, partial[buffer], inverse);
    }
    __syncthreads();
    // Its first tile of the others, if even rows that share nothing have so many.
    if (others > 0 && kCost * others + block >= rows * p.route.top_k * tiles) return;
  }
  // ---- The choice; then the routed experts' tiles ----
  const int rows = route<kRows>(p, reinterpret_cast<float*>(partial), inverse, chosen, block == blocks - 1);
  if (rows == 0) return;
  const int n_tiles = chosen.n * tiles;
  // What this block does in a round; expert -1: nothing, and no more. In the first kCost rounds only the blocks without
  // a tile of the shared expert, the `others`, share out tiles.
  const auto up_of = [&](int round) {
    int i;
    if (others <= 0) i = round * blocks + block;
    else if (round >= kCost) i = kCost * others + (round - kCost) * blocks + block;
    else i = round * others + block - shared_tiles;
    if (i >= n_tiles) return Up{-1, 0, 0};
    const int expert = chosen.expert[i / tiles];
    return Up{expert, i % tiles, chosen.wanting[expert]};
  };
  int round = others > 0 && block < shared_tiles ? kCost : 0;
  Up now = up_of(round);
  if (now.expert < 0) return;
  WeightStream<Routed, kMTiles> stream;
  stream.begin(up_run<Routed, kMTiles>(p, p.routed, now), Run<Routed>(p.k, threadIdx.x >> 5, kExpertWarps).n,
               threadIdx.x & 31);
  while (now.expert >= 0) {
    const Up after = up_of(++round);
    const typename WeightStream<Routed, kMTiles>::At none{};
    up_tile<Routed, kMTiles, false>(
        stream, p, p.routed, now,
        WeightStream<Routed, kMTiles>::kFlows && after.expert >= 0 ? up_run<Routed, kMTiles>(p, p.routed, after) : none,
        chosen, partial[buffer], inverse);
    buffer ^= 1;
    now = after;
  }
}

// ---- experts_down ----
// A block has kTiles tiles of 16 outputs, each worked on by so many of its warps.
constexpr int kRuns = 8;  // of the shared expert's K, added in order
template <class Routed, class Shared, int kMTiles>
__device__ __forceinline__ void experts_down(const ExpertParams& p) {
  constexpr int kTiles = kMTiles == 1 ? 2 : 1, kRows = kMTiles * 8, kWorkers = kExpertWarps / kTiles;
  // ---- Shared memory ----
  SHARED(float, sums, [kTiles][kRows * kMaxChosen][16]);  // [row * top_k + slot][output]
  SHARED(float4, shared_sums, [kTiles][kRuns][kMTiles][32]);
  // ---- Who does what ----
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
  // ---- Before the wait: the shared expert's part, which is known, into L2 ----
  pdl_launch_dependents();
  if (p.shared.dim > 0) {
    const Place at(threadIdx.x);
    const Run<Shared> run(p.shared.dim, at.worker, kRuns);
    if (at.lane == 0 && at.worker < kRuns && at.tile < n_tiles && run.n > 0)
      prefetch_l2(WeightStream<Shared, kMTiles>::run(p.shared, 0, at.tile, p.shared.dim, run.first, 0).weights,
                  run.n * Shared::kUnitBytes);
  }
  pdl_wait();
  const ExpertWork& work = *p.route.work;
  const int rows = rows_in_use(p.route.n_rows, p.route.first_row, p.rows), top_k = p.route.top_k;
  if (rows == 0) return;
  // ---- The routed experts, an item a worker ----
  {
    const Place at(thread_index_anew());
    const int n_items = at.tile < n_tiles ? work.n : 0;
    // The next item's description is under way while this one is worked on.
    struct Item {
      int expert, n, row[kMTiles], slot[kMTiles];
    };
    const auto describe = [&](int i) {
      const ExpertItem& item = work.item[i];
      Item r{item.expert, item.n, {}, {}};
#pragma unroll
      for (int c = 0; c < kMTiles; c++) {
        r.row[c] = item.row[c * 8 + at.g];
        r.slot[c] = item.slot[c * 8 + at.g];
      }
      return r;
    };
    WeightStream<Routed, kMTiles> stream;
    const int units = units_of<Routed>(p.routed.dim);
    const auto run_of = [&](const Item& item) {
      return WeightStream<Routed, kMTiles>::run(p.routed, item.expert, at.tile, p.routed.dim, 0, at.lane);
    };
    Item next = describe(at.worker);
    if (at.worker < n_items) stream.begin(run_of(next), units, at.lane);
#pragma unroll 1
    for (int i = at.worker; i < n_items; i += kWorkers) {
      constexpr bool kFlows = WeightStream<Routed, kMTiles>::kFlows;
      const Item item = kFlows ? next : describe(i);
      const bool more = kFlows && i + kWorkers < n_items;
      if (more) next = describe(i + kWorkers);
      const bf16* x[kMTiles];
      int left[kMTiles];
#pragma unroll
      for (int c = 0; c < kMTiles; c++) {
        const bool wanted = c * 8 + at.g < item.n;
        x[c] = p.x + (wanted ? (size_t)item.row[c] * p.x_stride + item.slot[c] * p.routed.dim : 0) + 8 * at.t;
        left[c] = wanted ? p.routed.dim - 8 * at.t : 0;
        for (int line = at.t * 64; line < left[c]; line += 256) touch(x[c] - 8 * at.t + line);
      }
      float acc[kMTiles][4] = {};
      const typename WeightStream<Routed, kMTiles>::At none{};
      const float low = row_scale<Routed>(p.routed, item.expert, at.tile, at.g),
                  high = row_scale<Routed>(p.routed, item.expert, at.tile, at.g + 8);
      stream.sum(acc, run_of(item), more ? run_of(next) : none, x, left, units, at.lane);
#pragma unroll
      for (int c = 0; c < kMTiles; c++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int column = c * 8 + 2 * at.t + (e & 1);
          if (column < item.n)
            sums[at.own][work.item[i].row[column] * top_k + work.item[i].slot[column]][at.g + 8 * (e >> 1)] =
                scaled<Routed>(e >> 1 ? high : low, acc[c][e]);
        }
    }
  }
  // ---- The shared expert, a run of K a worker ----
  if (p.shared.dim > 0) {
    const Place at(thread_index_anew());
    const Run<Shared> run(p.shared.dim, at.worker, kRuns);
    if (at.worker < kRuns && at.tile < n_tiles) {
      const bf16* x[kMTiles];
      int left[kMTiles];
#pragma unroll
      for (int c = 0; c < kMTiles; c++) {
        const bool wanted = c * 8 + at.g < rows;
        x[c] = p.x + (size_t)(wanted ? c * 8 + at.g : 0) * p.x_stride + top_k * p.routed.dim + run.first * Shared::kK +
               8 * at.t;
        left[c] = wanted ? p.shared.dim - run.first * Shared::kK - 8 * at.t : 0;
      }
      float acc[kMTiles][4] = {};
      WeightStream<Shared, kMTiles> stream;
      const typename WeightStream<Shared, kMTiles>::At here = WeightStream<Shared, kMTiles>::run(
                                                           p.shared, 0, at.tile, p.shared.dim, run.first, at.lane),
                                                       none{};
      stream.begin(here, run.n, at.lane);
      stream.sum(acc, here, none, x, left, run.n, at.lane);
#pragma unroll
      for (int c = 0; c < kMTiles; c++)
        store_shared(shared_address(&shared_sums[at.own][at.worker][c][sum_slot(at.g, at.t)]), acc[c]);
    }
  }
#ifndef PLANT_MISSING_BARRIER
  __syncthreads();
#endif
  // ---- Sums in order, and the output ----
  // Thread: tile, column (a row of the pass), output of the tile.
  const int thread = thread_index_anew(), own = thread / (kMTiles * 128), tile = blockIdx.x * kTiles + own;
  if (own >= kTiles || tile >= n_tiles) return;
  const Adder a(thread % (kMTiles * 128));
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
        sum = __fadd_rn(sum, reinterpret_cast<const float*>(shared_sums[own][r][thread % (kMTiles * 128) >> 7])[a.at]);
      y = __fadd_rn(y, scaled<Shared>(row_scale<Shared>(p.shared, 0, tile, a.n), sum));
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
