// Feed-forward layers of experts in decode and verify passes of 1 to 16 rows: route chooses, experts_up makes silu(gate) * up of every expert in use, experts_down adds
// up the rows. Router logits come from linear.cu.
//
//   act[row][slot] = silu(inv * W_gate x) * (inv * W_up x), slot = which of the row's experts, in ascending order, the shared expert behind them
//   out[row] = residual[row] + sum over the row's experts, ascending, of weight * W_down act, + W_down act of the shared one
//
// As in linear.cu, weights are the 16-row operand of the mma and the rows of the pass its 8 columns: an expert meets all rows at once, whichever of them use it, and is
// read once. Work is a list on the device: tiles of 16 weight rows of each distinct expert; blocks take items blockIdx.x, + gridDim.x, .. Everything that is added up is
// added in an order that belongs to the weight or the row alone, so other rows of the pass do not show: K in segments (experts_up) or from one end to the other
// (experts_down), experts in ascending order.
//
// ---- Quantised weights ----
// K goes in units of 128 = 4 blocks of 32. In a block lane 4g+t owns k = 8t .. 8t+7 of tile rows g and g+8, as in common.cuh. Codes become bf16 exactly; a block's
// sums, in f32, are multiplied by the scales of rows g and g+8 as they are added. Layouts (padding is zeros), repack_quantised writes them:
//   bf16  [tile][ceil(k / 32)][2][32 lanes] uint4, no scales
//   fp8   [tile][unit][4 blocks][32 lanes] uint4: row g, then row g+8, eight codes each in the order 0 2 1 3 4 6 5 7; scales f32 [tile][unit][4 blocks][2 row halves]
//   int4  [tile][unit][2][32 lanes] uint4: blocks 2i (row g, row g+8), 2i + 1, a word each: k pair j at bits 4j and 16 + 4j; scales bf16 [tile][unit][8 g][4 blocks][2]
#include "linear_row.cuh"

namespace {

constexpr int kWarps = 8, kThreads = kWarps * 32;
constexpr int kUnit = 128;               // k

// ---- one unit of a tile, a lane's share ----
template <int kFormat> struct Unit;
template <> struct Unit<kFormatBf16> { uint4 w[8]; };
template <> struct Unit<kFormatFp8> { uint4 w[4], s[2]; };
template <> struct Unit<kFormatInt4> { uint4 w[2], s; };

// Units of weights that a lane has in flight beside the one in use: more cost registers than there are.
template <int kFormat, int kColumns> constexpr int kUnitsAhead = kFormat == kFormatInt4 && kColumns == 1 ? 2 : 1;

struct Tile { const uint4* w; const uint4* s; int k_blocks, n_units; };   // at this tile's first unit
template <int kFormat> __device__ __forceinline__ Tile tile_at(const ExpertMatrix& m, int expert, int tile) {
  const int k_blocks = k_blocks_of(m.k), n_units = (k_blocks + 3) / 4;
  const size_t at = (size_t)expert * m.n_tiles + tile;
  if constexpr (kFormat == kFormatBf16) return {m.weights + at * k_blocks * 64, nullptr, k_blocks, n_units};
  if constexpr (kFormat == kFormatFp8) return {m.weights + at * n_units * 128, m.scales + at * n_units * 2, k_blocks, n_units};
  return {m.weights + at * n_units * 64, m.scales + at * n_units * 8, k_blocks, n_units};
}
template <int kFormat> __device__ __forceinline__ void load_unit(Unit<kFormat>& u, const Tile& tile, int unit, int lane) {
  if constexpr (kFormat == kFormatBf16) {
#pragma unroll
    for (int i = 0; i < 8; i++)
      u.w[i] = unit * 4 + i / 2 < tile.k_blocks ? load_weights(tile.w + (size_t)unit * 256 + i * 32 + lane) : make_uint4(0, 0, 0, 0);
  } else if constexpr (kFormat == kFormatFp8) {
#pragma unroll
    for (int i = 0; i < 4; i++) u.w[i] = load_weights(tile.w + (size_t)unit * 128 + i * 32 + lane);
#pragma unroll
    for (int i = 0; i < 2; i++) u.s[i] = load_weights(tile.s + unit * 2 + i);
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++) u.w[i] = load_weights(tile.w + (size_t)unit * 64 + i * 32 + lane);
    u.s = load_weights(tile.s + unit * 8 + (lane >> 2));
  }
}

// ---- codes to bf16 pairs ----
// Two e4m3 codes, in bits 0..7 and 16..23: as bf16 their exponent is 120 too low, which a multiplication puts right, also for codes below the smallest normal one.
__device__ __forceinline__ uint32_t from_e4m3(uint32_t codes) { return times_two_to_120((codes & 0x00800080u) << 8 | (codes & 0x007f007fu) << 4); }
// Two four-bit codes, in bits 0..3 and 16..19: 0x4300 is 128 in bf16, whose last bit is 1; code - 8 = (128 + code) - 136.
__device__ __forceinline__ uint32_t from_int4(uint32_t codes) { return less_136((codes & 0x000f000fu) | 0x43004300u); }

// Both operands of block b.
template <int kFormat> __device__ __forceinline__ void operands(const Unit<kFormat>& u, int b, uint4 (&a)[2]) {
  if constexpr (kFormat == kFormatBf16) { a[0] = u.w[2 * b]; a[1] = u.w[2 * b + 1]; }
  else if constexpr (kFormat == kFormatFp8) {
    const uint4 w = u.w[b];
    a[0] = make_uint4(from_e4m3(w.x), from_e4m3(w.z), from_e4m3(w.x >> 8), from_e4m3(w.z >> 8));
    a[1] = make_uint4(from_e4m3(w.y), from_e4m3(w.w), from_e4m3(w.y >> 8), from_e4m3(w.w >> 8));
  } else {
    const uint4 two = u.w[b >> 1];
    const uint32_t low = b & 1 ? two.z : two.x, high = b & 1 ? two.w : two.y;
    a[0] = make_uint4(from_int4(low), from_int4(high), from_int4(low >> 4), from_int4(high >> 4));
    a[1] = make_uint4(from_int4(low >> 8), from_int4(high >> 8), from_int4(low >> 12), from_int4(high >> 12));
  }
}
// The scales of rows g and g+8.
template <int kFormat> __device__ __forceinline__ float2 scales(const Unit<kFormat>& u, int b) {
  if constexpr (kFormat == kFormatFp8) {
    const uint4 s = u.s[b >> 1];
    return make_float2(__uint_as_float(b & 1 ? s.z : s.x), __uint_as_float(b & 1 ? s.w : s.y));
  } else {
    const uint32_t s = b == 0 ? u.s.x : b == 1 ? u.s.y : b == 2 ? u.s.z : u.s.w;
    return make_float2(bf16_low(s), bf16_high(s));
  }
}

// acc += the unit's products with the rows' columns; from + x[c] is this lane's 8 k of row 8c + g at the unit's first block, n_x[c] the blocks of it that exist.
template <int kFormat, int kColumns>
__device__ __forceinline__ void add_unit(float (&acc)[kColumns][4], const Unit<kFormat>& u, const bf16* from, const int (&x)[kColumns], const int (&n_x)[kColumns]) {
#pragma unroll
  for (int b = 0; b < 4; b++) {
    uint4 a[2];
    operands<kFormat>(u, b, a);
#pragma unroll
    for (int c = 0; c < kColumns; c++) {
      const uint4 in = b < n_x[c] ? load_activations(reinterpret_cast<const uint4*>(from + x[c] + b * 32)) : make_uint4(0, 0, 0, 0);
      if constexpr (kFormat == kFormatBf16) {
        mma_bf16(acc[c], a[0], in.x, in.y);
        mma_bf16(acc[c], a[1], in.z, in.w);
      } else {
        float sum[4] = {0, 0, 0, 0};
        mma_bf16(sum, a[0], in.x, in.y);
        mma_bf16(sum, a[1], in.z, in.w);
        const float2 s = scales<kFormat>(u, b);
        acc[c][0] = __fmaf_rn(sum[0], s.x, acc[c][0]); acc[c][1] = __fmaf_rn(sum[1], s.x, acc[c][1]);
        acc[c][2] = __fmaf_rn(sum[2], s.y, acc[c][2]); acc[c][3] = __fmaf_rn(sum[3], s.y, acc[c][3]);
      }
    }
  }
}

// Where a lane's float4 of a tile-column goes in shared memory, and where the thread that adds it up finds its number: as in linear.cu, free of bank conflicts.
__device__ __forceinline__ int slot_of(int g, int t) { return t * 8 + ((g + 2 * t) & 7); }
// The output of a thread: tile row n, row m of the pass. Threads come in 4 warps a column group.
struct Output { int n, m; };
__device__ __forceinline__ Output output_of(int thread) {
  const int l = thread & 31, w = thread >> 5;
  return {(l >> 2) + 8 * ((l & 3) >> 1), (w >> 2) * 8 + 2 * (w & 3) + (l & 1)};
}
__device__ __forceinline__ float partial_of(const float4* tile_column, int thread) {
  const int l = thread & 31, quarter = (thread >> 5) & 3;
  return reinterpret_cast<const float*>(tile_column + slot_of(l >> 2, quarter))[l & 3];
}

// ---- experts_up ----
// One item: tile `tile` of an expert, whose output for row m goes to act[m][slot * dim + tile * 8 ..], slot >= 0. All warps; K is split between them in whole segments.
template <int kFormat, int kColumns>
__device__ __forceinline__ void up_tile(const ExpertsUpParams& p, const ExpertMatrix& matrix, int expert, int tile, int dim, const signed char* slots, int shared_slot,
                                        float4 (*partial)[kColumns][32], const float* inverse) {
  constexpr int kAhead = kUnitsAhead<kFormat, kColumns>;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const Tile weights = tile_at<kFormat>(matrix, expert, tile);
  const int segment_units = (weights.n_units + 31) / 32, n_segments = (weights.n_units + segment_units - 1) / segment_units;
  const int segments_a_warp = (n_segments + kWarps - 1) / kWarps, first = warp * segments_a_warp * segment_units;
  const int n_mine = min(segments_a_warp * segment_units, weights.n_units - first);
  int x[kColumns];
#pragma unroll
  for (int c = 0; c < kColumns; c++) x[c] = min(c * 8 + g, p.rows - 1) * p.x_stride + first * kUnit + 8 * t;
  Unit<kFormat> held[kAhead];
#pragma unroll
  for (int u = 0; u < kAhead; u++) if (u < n_mine) load_unit<kFormat>(held[u], weights, first + u, lane);
  float acc[kColumns][4] = {};
  int left = segment_units, segment = warp * segments_a_warp;
#pragma unroll 1
  for (int u0 = 0; u0 < n_mine; u0 += kAhead) {
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
      if (u0 + u >= n_mine) break;
      const int unit = first + u0 + u;
      int n_x[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; c++) n_x[c] = c * 8 + g < p.rows ? (matrix.k - unit * kUnit - 8 * t + 31) >> 5 : 0;
      add_unit<kFormat, kColumns>(acc, held[u], p.x, x, n_x);
#pragma unroll
      for (int c = 0; c < kColumns; c++) x[c] += kUnit;
      if (u0 + u + kAhead < n_mine) load_unit<kFormat>(held[u], weights, unit + kAhead, lane);
#ifdef PLANT_SEGMENTS_OF_A_WARP
      if (--left == 0 && u0 + u + 1 != n_mine) continue;
#endif
      if (--left == 0 || u0 + u + 1 == n_mine) {
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
          partial[segment][c][slot_of(g, t)] = make_float4(acc[c][0], acc[c][1], acc[c][2], acc[c][3]);
          acc[c][0] = acc[c][1] = acc[c][2] = acc[c][3] = 0;
        }
        segment++;
        left = segment_units;
      }
    }
  }
  __syncthreads();
  const int thread = threadIdx.x;
  if (thread < kColumns * 128) {
    const Output o = output_of(thread);
    const int slot = o.m >= p.rows ? -1 : slots ? slots[o.m] : shared_slot;
    float y = 0;
    for (int s = 0; s < n_segments; s++) y = __fadd_rn(y, partial_of(partial[s][thread >> 7], thread));
    if (o.m < p.rows) y = __fmul_rn(inverse[o.m], y);
    const float up = __shfl_xor_sync(0xffffffffu, y, 2);   // tile rows 8.. are up's
    const int j = tile * 8 + (o.n & 7);
    if (slot >= 0 && o.n < 8 && j < dim) p.act[(size_t)o.m * p.act_stride + slot * p.expert_dim + j] = __float2bfloat16(__fmul_rn(silu(y), up));
  }
  __syncthreads();
}

template <int kFormat, int kShared, int kColumns> __device__ __forceinline__ void experts_up(const ExpertsUpParams& p) {
  SHARED(float4, partial, [32][kColumns][32]);
  SHARED(float, inverse, [kColumns * 8]);
  pdl_launch_dependents();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int n_shared = p.shared.n_tiles;
  // Which experts are in use is known after the wait; the shared one always is.
  if ((int)blockIdx.x < n_shared) {
    const Tile tile = tile_at<kShared>(p.shared, 0, blockIdx.x);
    const int bytes = kShared == kFormatBf16 ? tile.k_blocks * 1024 : tile.n_units * (kShared == kFormatFp8 ? 2048 : 1024);
    for (int at = threadIdx.x * 32; at < bytes; at += kThreads * 32) prefetch_l2(reinterpret_cast<const char*>(tile.w) + at);
  }
  pdl_wait();
  for (int m = warp; m < p.rows; m += kWarps) {
    const int tiles = p.routed.k / 16;
    const float* squares = p.squares + (size_t)m * tiles;
    float sum = 0;
    for (int tile = lane; tile < tiles; tile += 32) sum = __fadd_rn(sum, squares[tile]);
    sum = warp_sum(sum);
    if (lane == 0) inverse[m] = inverse_rms(sum, p.routed.k, p.eps);
  }
  __syncthreads();
  const int n_items = n_shared + p.routes->n_distinct * p.routed.n_tiles;
  for (int item = blockIdx.x; item < n_items; item += gridDim.x) {
    if (item < n_shared) {
      up_tile<kShared, kColumns>(p, p.shared, 0, item, p.shared_dim, nullptr, p.top_k, partial, inverse);
    } else {
      const int j = (item - n_shared) / p.routed.n_tiles;
      up_tile<kFormat, kColumns>(p, p.routed, p.routes->expert[j], (item - n_shared) % p.routed.n_tiles, p.expert_dim, p.routes->slot[j], -1, partial, inverse);
    }
  }
}

// ---- experts_down ----
// acc = one tile of an expert times the act of the rows that use it; one warp, K from one end to the other.
template <int kFormat, int kColumns>
__device__ __forceinline__ void down_tile(const ExpertsDownParams& p, const ExpertMatrix& matrix, int expert, int tile, const signed char* slots, int shared_slot,
                                          float (&acc)[kColumns][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const Tile weights = tile_at<kFormat>(matrix, expert, tile);
  int x[kColumns], k_left[kColumns];   // of this lane, 0 where the row does not use the expert
#pragma unroll
  for (int c = 0; c < kColumns; c++) {
    const int m = c * 8 + g, slot = m >= p.rows ? -1 : slots ? slots[m] : shared_slot;
    k_left[c] = slot >= 0 ? matrix.k - 8 * t + 31 : 0;
    x[c] = min(m, p.rows - 1) * p.act_stride + max(slot, 0) * p.routed.k + 8 * t;
  }
  constexpr int kAhead = kUnitsAhead<kFormat, kColumns>;
  Unit<kFormat> held[kAhead];
#pragma unroll
  for (int u = 0; u < kAhead; u++) if (u < weights.n_units) load_unit<kFormat>(held[u], weights, u, lane);
#pragma unroll 1
  for (int unit0 = 0; unit0 < weights.n_units; unit0 += kAhead) {
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
      const int unit = unit0 + u;
      if (unit >= weights.n_units) break;
      int n_x[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; c++) n_x[c] = k_left[c] >> 5;
      add_unit<kFormat, kColumns>(acc, held[u], p.act, x, n_x);
#pragma unroll
      for (int c = 0; c < kColumns; c++) { x[c] += kUnit; k_left[c] -= kUnit; }
      if (unit + kAhead < weights.n_units) load_unit<kFormat>(held[u], weights, unit + kAhead, lane);
    }
  }
}

template <int kFormat, int kShared, int kColumns> __device__ __forceinline__ void experts_down(const ExpertsDownParams& p) {
  SHARED(float4, partial, [kWarps][kColumns][32]);
  pdl_launch_dependents();
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
  const bool has_shared = p.shared.n_tiles > 0;
  if (has_shared && (int)blockIdx.x < p.shared.n_tiles && warp == 0) {
    const Tile tile = tile_at<kShared>(p.shared, 0, blockIdx.x);
    const int bytes = kShared == kFormatBf16 ? tile.k_blocks * 1024 : tile.n_units * (kShared == kFormatFp8 ? 2048 : 1024);
    for (int at = lane * 32; at < bytes; at += 1024) prefetch_l2(reinterpret_cast<const char*>(tile.w) + at);
  }
  pdl_wait();
  const Routes& routes = *p.routes;
  const int n_distinct = routes.n_distinct, n = n_distinct + has_shared;
  // Of a thread that adds up: what it needs is made anew each time, so that the long loops keep none of it.
  auto is_wanted = [&](int thread, int tile) { const Output o = output_of(thread); return thread < kColumns * 128 && o.m < p.rows && tile * 16 + o.n < p.n; };
  for (int tile = blockIdx.x; tile < p.routed.n_tiles; tile += gridDim.x) {
    float y = 0;
    for (int first = 0; first < n; first += kWarps) {
      const int j = first + warp;
      if (j < n) {
        float acc[kColumns][4] = {};
        if (j < n_distinct) down_tile<kFormat, kColumns>(p, p.routed, routes.expert[j], tile, routes.slot[j], -1, acc);
        else down_tile<kShared, kColumns>(p, p.shared, 0, tile, nullptr, p.top_k, acc);
#pragma unroll
        for (int c = 0; c < kColumns; c++) partial[warp][c][slot_of(lane >> 2, lane & 3)] = make_float4(acc[c][0], acc[c][1], acc[c][2], acc[c][3]);
      }
      __syncthreads();
      const int thread = thread_index_anew();
      const Output o = output_of(thread);
      if (is_wanted(thread, tile))
#pragma unroll 1
        for (int w = 0; w < kWarps && first + w < n; w++) {
          const int e = first + w;
          const float sum = partial_of(partial[w][thread >> 7], thread);
#ifdef PLANT_WEIGHT_OF_ANOTHER_ROW
          if (e < n_distinct) { if (routes.slot[e][o.m] >= 0) y = __fmaf_rn(routes.weight[e][0], sum, y); }
#else
          if (e < n_distinct) { if (routes.slot[e][o.m] >= 0) y = __fmaf_rn(routes.weight[e][o.m], sum, y); }
#endif
          else y = __fadd_rn(y, sum);
        }
      __syncthreads();
    }
    float v = 0;
    const int thread = thread_index_anew();
    const Output o = output_of(thread);
    const bool stores = is_wanted(thread, tile);
    const int column = tile * 16 + o.n;
    const size_t at = (size_t)o.m * p.out_stride + column;
    if (stores) {
      if (p.residual) y = __fadd_rn(bf16_low(load_activation_bits(p.residual + at)), y);
      const bf16 rounded = __float2bfloat16(y);
      p.out[at] = rounded;
      if (p.tap) p.tap[(size_t)o.m * p.tap_stride + column] = rounded;
      v = __bfloat162float(rounded);
      if (p.next_norm) p.normed[at] = __float2bfloat16(__fmul_rn(v, __bfloat162float(p.next_norm[column])));
    }
    if (p.next_norm && thread < kColumns * 128) {
      v = square(v);
#pragma unroll
      for (int bit = 2; bit <= 16; bit *= 2) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, bit));
      if (stores && (thread & 31) < 2) p.square_sums[(size_t)o.m * (p.n / 16) + tile] = v;
    }
  }
}

// ---- route ----
// One block of 16 warps, one a row. Scores lie in shared memory; the best are found one by one, ties going to the lowest expert.
constexpr int kRouteThreads = 512;
__device__ __forceinline__ void warp_best(float& v, int& at) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    const float other = __shfl_xor_sync(0xffffffffu, v, o);
    const int other_at = __shfl_xor_sync(0xffffffffu, at, o);
    if (other > v || (other == v && other_at < at)) { v = other; at = other_at; }
  }
}
__device__ __forceinline__ void route_body(const RouteParams& p) {
  SHARED(float, rank, [ROUTE_ROWS][ROUTE_EXPERTS]);   // what experts are chosen by
  SHARED(int, chosen, [ROUTE_ROWS][ROUTE_TOP_K]);
  SHARED(float, weight, [ROUTE_ROWS][ROUTE_TOP_K]);
  SHARED(unsigned, used, [ROUTE_EXPERTS / 32]);
  pdl_launch_dependents();
  pdl_wait();
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, n = p.n_experts;
  if (threadIdx.x < ROUTE_EXPERTS / 32) used[threadIdx.x] = 0;
  Routes& routes = *p.routes;
  for (int i = threadIdx.x; i < ROUTE_DISTINCT * ROUTE_ROWS; i += kRouteThreads) { (&routes.slot[0][0])[i] = -1; (&routes.weight[0][0])[i] = 0; }
  __syncthreads();
  if (warp < p.rows) {
    const float* logits = p.logits + (size_t)warp * p.stride;
    float top = -INFINITY, total = 0;
    if (p.softmax) {
      for (int e = lane; e < n; e += 32) top = fmaxf(top, logits[e]);
      top = warp_max(top);
      for (int e = lane; e < n; e += 32) total = __fadd_rn(total, __expf(logits[e] - top));
      total = warp_sum(total);
    }
    auto score = [&](int e) { return p.softmax ? __fdiv_rn(__expf(logits[e] - top), total) : __fdiv_rn(1.0f, __fadd_rn(1.0f, __expf(-logits[e]))); };
    for (int e = lane; e < n; e += 32) rank[warp][e] = p.bias ? __fadd_rn(score(e), p.bias[e]) : score(e);
    __syncwarp();
    if (p.n_groups > 1) {
      // Lane i judges group i by its best two; the best groups stay.
      const int size = n / p.n_groups;
      float best = -INFINITY, second = -INFINITY;
      if (lane < p.n_groups)
        for (int e = lane * size; e < (lane + 1) * size; e++) {
          const float v = rank[warp][e];
          if (v > best) { second = best; best = v; }
          else if (v > second) second = v;
        }
      float judged = lane < p.n_groups ? __fadd_rn(best, second) : -INFINITY;
      unsigned kept = 0;
      for (int i = 0; i < p.top_groups; i++) {
        float v = judged;
        int at = lane;
        warp_best(v, at);
        kept |= 1u << at;
        if (lane == at) judged = -INFINITY;
      }
#ifndef PLANT_NO_GROUPS
      for (int e = lane; e < n; e += 32) if (!(kept >> (e / size) & 1)) rank[warp][e] = -INFINITY;
#endif
      __syncwarp();
    }
    float sum = 0, mine = 0;      // lane i keeps the i-th choice
    int my_expert = 0x7fffffff;
    for (int i = 0; i < p.top_k; i++) {
      float v = -INFINITY;
      int at = 0x7fffffff;
      for (int e = lane; e < n; e += 32) if (rank[warp][e] > v) { v = rank[warp][e]; at = e; }
      warp_best(v, at);
      if (lane == i) { my_expert = at; mine = score(at); }
      if (lane == at % 32) rank[warp][at] = -INFINITY;
      __syncwarp();
    }
    int before = 0;               // of the choices, those of lower experts
    for (int i = 0; i < p.top_k; i++) before += __shfl_sync(0xffffffffu, my_expert, i) < my_expert;
    if (lane < p.top_k) { chosen[warp][before] = my_expert; weight[warp][before] = mine; }
    __syncwarp();
    for (int i = 0; i < p.top_k; i++) sum = __fadd_rn(sum, weight[warp][i]);
    const float factor = p.normalised ? __fdiv_rn(p.scale, __fadd_rn(sum, 1e-20f)) : p.scale;
    __syncwarp();
    if (lane < p.top_k) {
      weight[warp][lane] = __fmul_rn(weight[warp][lane], factor);
      atomicOr(&used[chosen[warp][lane] >> 5], 1u << (chosen[warp][lane] & 31));
    }
  }
  __syncthreads();
  auto index_of = [&](int e) {
    int index = __popc(used[e >> 5] & ((1u << (e & 31)) - 1));
    for (int i = 0; i < e >> 5; i++) index += __popc(used[i]);
    return index;
  };
  if (warp < p.rows && lane < p.top_k) {
    const int j = index_of(chosen[warp][lane]);
    routes.expert[j] = chosen[warp][lane];
    routes.slot[j][warp] = (signed char)lane;
    routes.weight[j][warp] = weight[warp][lane];
  }
  if (threadIdx.x == 0) {
    int count = 0;
    for (int i = 0; i < ROUTE_EXPERTS / 32; i++) count += __popc(used[i]);
    routes.n_distinct = count;
  }
}

// ---- repack_quantised ----
// Rows of codes and scales of a checkpoint into the layouts above. Grid: (n_units, tiles of 16 rows) blocks of 128 threads: thread (i, lane) of a unit writes uint4 i.
// `order` as in repack: kRowsGate and kRowsUp fill one half of each tile and leave the other.
__device__ __forceinline__ void repack_quantised_body(const RepackQuantisedParams& p) {
  const int unit = blockIdx.x, tile = blockIdx.y, lane = threadIdx.x & 31, i = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const size_t at = (size_t)tile * gridDim.x + unit;
  // The source row of tile row g (half 0) or g + 8 (half 1); -1 where another launch writes it; n_rows or more is padding.
  auto source_row = [&](int half) {
    if (p.order == kRowsPlain) return tile * 16 + half * 8 + g;
    return half == (p.order == kRowsUp) ? tile * 8 + g : -1;
  };
  auto code = [&](int row, int k) -> uint32_t {
    if (row >= p.n_rows || k >= p.k) return p.format == kFormatInt4 ? 8 : 0;
    const unsigned char* codes = static_cast<const unsigned char*>(p.codes) + (size_t)row * p.code_stride;
    return p.format == kFormatInt4 ? codes[k >> 1] >> (k & 1) * 4 & 15 : codes[k];
  };
  auto scale = [&](int row, int k) {
    if (row >= p.n_rows || k >= p.k) return 0.0f;
    const size_t at = (size_t)(row / p.block_rows) * p.scale_stride + k / p.block_cols;
    return p.scale_type == kSourceF32 ? static_cast<const float*>(p.scales)[at] : p.scale_type == kSourceBf16 ? __bfloat162float(static_cast<const bf16*>(p.scales)[at]) : __half2float(static_cast<const __half*>(p.scales)[at]);
  };
  for (int half = 0; half < 2; half++) {
    const int row = source_row(half);
    if (row < 0) continue;
    if (p.format == kFormatFp8) {
      const int k = unit * kUnit + i * 32 + 8 * t;
      uint32_t* to = reinterpret_cast<uint32_t*>(p.weights + at * 128 + i * 32 + lane) + 2 * half;
      for (int w = 0; w < 2; w++) to[w] = code(row, k + 4 * w) | code(row, k + 4 * w + 2) << 8 | code(row, k + 4 * w + 1) << 16 | code(row, k + 4 * w + 3) << 24;
      // A scale for eight rows: the first of them stands for all, since no block cuts them.
      if (lane == 0) reinterpret_cast<float*>(p.tile_scales)[at * 8 + i * 2 + half] = scale(row, unit * kUnit + i * 32);
    } else if (i < 2) {
      for (int b = 0; b < 2; b++) {
        const int k = unit * kUnit + (2 * i + b) * 32 + 8 * t;
        uint32_t word = 0;
        for (int j = 0; j < 4; j++) word |= code(row, k + 2 * j) << 4 * j | code(row, k + 2 * j + 1) << (16 + 4 * j);
        reinterpret_cast<uint32_t*>(p.weights + at * 64 + i * 32 + lane)[2 * b + half] = word;
      }
    } else if (i == 2) {
      reinterpret_cast<bf16*>(p.tile_scales)[at * 64 + g * 8 + t * 2 + half] = __float2bfloat16(scale(row, unit * kUnit + t * 32));   // lane t: block t
    }
  }
}
}  // namespace

// experts_<routed>_<shared>_m<most rows>: launched with min(items, a few blocks an SM); gridDim of experts_down at least that of its tiles or strided.
#define EXPERTS(name, routed, shared)                                                                              \
  KERNEL(experts_up_##name##_m8, ExpertsUpParams, kThreads, 2) { experts_up<routed, shared, 1>(p); }              \
  KERNEL(experts_up_##name##_m16, ExpertsUpParams, kThreads, 2) { experts_up<routed, shared, 2>(p); }             \
  KERNEL(experts_down_##name##_m8, ExpertsDownParams, kThreads, 2) { experts_down<routed, shared, 1>(p); }        \
  KERNEL(experts_down_##name##_m16, ExpertsDownParams, kThreads, 1) { experts_down<routed, shared, 2>(p); }
EXPERTS(int4_bf16, kFormatInt4, kFormatBf16)
EXPERTS(fp8_fp8, kFormatFp8, kFormatFp8)
EXPERTS(bf16_bf16, kFormatBf16, kFormatBf16)
KERNEL(route, RouteParams, kRouteThreads) { route_body(p); }
KERNEL(repack_quantised, RepackQuantisedParams, 128) { repack_quantised_body(p); }
