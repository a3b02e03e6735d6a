// What the kernels of feed-forward layers of experts share: which thread adds which output up (router.cu, experts.cu),
// and how a warp streams the weights of one expert after the other. Read experts.cu first.
#pragma once
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
template <class F, int kMTiles>
struct WeightStream {
  // With more M tiles (8 rows of the pass each) there are registers for less: a unit at a time, x when it is needed,
  // each run for itself.
  static constexpr bool kFlows = kMTiles == 1;
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
  __device__ __forceinline__ void sum(float (&acc)[kMTiles][4], At at, const At& next, const bf16* (&x)[kMTiles],
                                      int (&left)[kMTiles], int n, int lane) {
    uint4 in[kMTiles][kFlows ? F::kWords : 1] = {};
    const auto fetch_x = [&](int u, int w) {
#pragma unroll
      for (int c = 0; c < kMTiles; c++)
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
          for (int c = 0; c < kMTiles; c++) F::multiply(acc[c], held[u], w, in[c][kFlows ? w : 0]);
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
      for (int c = 0; c < kMTiles; c++) {
        x[c] += kAhead * F::kK;
        left[c] -= kAhead * F::kK;
      }
    }
  }
};

}  // namespace
