// The router of a layer of experts, 1 to 16 rows: sums of w x of parts of K, which experts_up adds (experts_route.cuh).
// K is cut over blocks, since there are few experts to hand out. What was measured: docs/decisions/kernels.md#experts.
#include "experts.cuh"

namespace {

// K is cut into 64 runs; block y has runs 16 y ..  16 y + 15, one a warp, and adds them in order.
template <int kMTiles>
__device__ __forceinline__ void router(const RouterParams& p) {
  constexpr int kAhead = kMTiles == 1 ? 4 : 2;
  SHARED(float4, partial, [kExpertWarps][kMTiles][32]);
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
  float acc[kMTiles][4] = {};
  for (int b = 0; b < n; b += kAhead) {
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
      if (b + u >= n) break;
#pragma unroll
      for (int c = 0; c < kMTiles; c++) {
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
  for (int c = 0; c < kMTiles; c++) store_shared(shared_address(&partial[warp][c][sum_slot(g, t)]), acc[c]);
  __syncthreads();
  if (threadIdx.x >= kMTiles * 128) return;
  const Adder a(threadIdx.x);
  const int e = blockIdx.x * 16 + a.n;
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kExpertWarps; w++)
    sum = __fadd_rn(sum, reinterpret_cast<const float*>(partial[w][threadIdx.x >> 7])[a.at]);
  if (a.column < p.rows && e < p.n_experts) p.sums[((size_t)blockIdx.y * p.rows + a.column) * p.n_experts + e] = sum;
}

}  // namespace

KERNEL(router_m8, RouterParams, kExpertThreads, 2) { router<1>(p); }
KERNEL(router_m16, RouterParams, kExpertThreads, 2) { router<2>(p); }
