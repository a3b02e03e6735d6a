// Linear layers of a decode or verify pass: out[m][n] = epilogue(sum over k of w[n][k] * x[m][k]) for 1 to 16 rows m, RMSNorm fused in front of it.
//
// All time is weight streaming, so the kernel is built around loads in flight. Weights are the 16-row operand of the mma, rows of the pass its 8 columns: 1
// to 8 rows cost the same bytes. A block takes groups of kTiles 16-row tiles, blockIdx.x, + gridDim.x, ...; its warps split K, each a run of whole
// segments. A lane keeps kAhead 32-k blocks of weights in flight (kRing: in shared memory through cp.async, else in registers), from before the dependency wait on,
// and asks for the next group's before the block adds up the present one. A warp leaves each segment's sum in shared memory; then one thread per output adds the
// segments in ascending order. Segments belong to the weight (params.h), so all variants and widths give the same bits, and linear_prefill too.
// RMSNorm needs no barrier: x * norm is rounded to bf16 as operand, and the row's factor multiplies the sum; squares are summed on the way.
//
// Shared memory: partial [kBuffers][32 segments][kTiles * kColumns][32 lanes] float4 (16 or 32 KB), squares, and the ring. With two buffers a group needs one
// barrier, with one two.
#include "linear_row.cuh"

namespace {

template <int kTiles, int kColumns, int kWarps, int kAhead, bool kNorm, bool kRing>
__device__ __forceinline__ void linear(const LinearParams& p) {
  constexpr int kOutputs = kTiles * kColumns * 128;   // of a group, one thread each
  constexpr int kBuffers = kTiles * kColumns == 1 && !kRing ? 2 : 1;
  static_assert(kOutputs <= kWarps * 32, "one output a thread");
  SHARED(float4, partial, [kBuffers][32][kTiles * kColumns][32]);
  SHARED(float, squares, [kBuffers][kNorm ? 32 : 1][kColumns * 8]);
  SHARED(float, inverse, [2][kNorm ? kOutputs : 1]);   // each thread's own: kept here to save registers
  SHARED(float, best, [kOutputs]);
  SHARED(int, best_id, [kOutputs]);
  SHARED(uint4, ring, [kRing ? kAhead : 1][kTiles * 2][kRing ? kWarps * 32 : 1]);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int n_groups = (p.n_tiles + kTiles - 1) / kTiles;

  // This warp's share of a part: blocks first .. first + n_mine of K, whole segments.
  int first = 0, n_mine = 0, first_segment = 0;
  const uint4* weights[kTiles];
  auto enter = [&](int group, int i) {
    const LinearPart& part = p.part[i];
    const int k_blocks = k_blocks_of(part.k), n_segments = (k_blocks + part.segment_blocks - 1) / part.segment_blocks;
    const int segments_a_warp = (n_segments + kWarps - 1) / kWarps;
    first_segment = warp * segments_a_warp;
    first = first_segment * part.segment_blocks;
    n_mine = min(segments_a_warp * part.segment_blocks, k_blocks - first);
#pragma unroll
    for (int r = 0; r < kTiles; r++) weights[r] = part.weights + ((size_t)min(group * kTiles + r, p.n_tiles - 1) * k_blocks + first) * 64 + lane;
  };
  uint4 held[kRing ? 1 : kAhead][kTiles][2];
  auto fetch = [&](int slot, int block) {   // starts the loads of my block `block`, if there is one
    if (block < n_mine) {
#pragma unroll
      for (int r = 0; r < kTiles; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint4* from = weights[r] + (size_t)block * 64 + h * 32;
          if constexpr (kRing) copy_async(&ring[slot][r * 2 + h][threadIdx.x], from);
          else held[slot][r][h] = load_weights(from);
        }
    }
    if constexpr (kRing) copy_async_commit();   // also when empty: the wait below counts groups
  };

  if ((int)blockIdx.x < n_groups) {
    enter(blockIdx.x, 0);
#pragma unroll
    for (int u = 0; u < kAhead; u++) fetch(u, u);
  }
  pdl_launch_dependents();
  pdl_wait();

  // The output of this thread: element `e` of the mma result of tile-column threadIdx.x / 128.
  const bool adds = threadIdx.x < kOutputs;
  const int e = threadIdx.x & 3, out_lane = (threadIdx.x & 127) >> 2, tile_column = threadIdx.x >> 7;
  const int out_m = (tile_column % kColumns) * 8 + 2 * (out_lane & 3) + (e & 1), out_row = (out_lane >> 2) + 8 * (e >> 1);
  const bool wanted = adds && out_m < p.rows;
  int buffer = 0;
  if (adds) { best[threadIdx.x] = -INFINITY; best_id[threadIdx.x] = 0x7fffffff; }

  for (int group = blockIdx.x; group < n_groups; group += gridDim.x) {
    const bool first_group = group == (int)blockIdx.x;
    float y = 0;
    for (int i = 0; i < p.n_parts; i++) {
      const LinearPart& part = p.part[i];
      const int row = p.last_row ? *p.n_rows - 1 : g;
      const bf16* x = part.x + (size_t)row * part.x_stride + first * 32 + 8 * t;
      const bf16* norm = part.norm + first * 32 + 8 * t;
      const int k_left = part.k - first * 32 - 8 * t;   // of mine, from my 8 k on
      float acc[kTiles][kColumns][4], square[kColumns];
      auto clear = [&] {
#pragma unroll
        for (int c = 0; c < kColumns; c++) {
          square[c] = 0;
#pragma unroll
          for (int r = 0; r < kTiles; r++) acc[r][c][0] = acc[r][c][1] = acc[r][c][2] = acc[r][c][3] = 0;
        }
      };
      clear();
      int segment = first_segment, left = part.segment_blocks;
      for (int b0 = 0; b0 < n_mine; b0 += kAhead) {
#pragma unroll
        for (int u = 0; u < kAhead; u++) {
          const int b = b0 + u;
          if (b >= n_mine) break;
          uint4 in[kColumns];
#pragma unroll
          for (int c = 0; c < kColumns; c++)
            in[c] = c * 8 + g < p.rows && b * 32 < k_left ? load_activations(reinterpret_cast<const uint4*>(x + (size_t)c * 8 * part.x_stride + b * 32)) : make_uint4(0, 0, 0, 0);
          if constexpr (kNorm) {
            const uint4 scale = b * 32 < k_left ? load_constants(reinterpret_cast<const uint4*>(norm + b * 32)) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int c = 0; c < kColumns; c++) {
              if (first_group) square[c] = add_squares(square[c], in[c]);
              in[c] = times_norm(in[c], scale);
            }
          }
          if constexpr (kRing) {
            copy_async_wait<kAhead - 1>();   // own bytes only: no barrier
#pragma unroll
            for (int r = 0; r < kTiles; r++) { held[0][r][0] = ring[u][r * 2][threadIdx.x]; held[0][r][1] = ring[u][r * 2 + 1][threadIdx.x]; }
          }
          auto& a = held[kRing ? 0 : u];
#pragma unroll
          for (int r = 0; r < kTiles; r++)
#pragma unroll
            for (int c = 0; c < kColumns; c++) {
              mma_bf16(acc[r][c], a[r][0], in[c].x, in[c].y);
              mma_bf16(acc[r][c], a[r][1], in[c].z, in[c].w);
            }
          fetch(u, b + kAhead);
#ifdef PLANT_OFF_BY_ONE
          const bool ends = --left <= 1 || b + 1 == n_mine;
#else
          const bool ends = --left == 0 || b + 1 == n_mine;
#endif
          if (ends) {
#pragma unroll
            for (int r = 0; r < kTiles; r++)
#pragma unroll
              for (int c = 0; c < kColumns; c++) partial[buffer][segment][r * kColumns + c][lane] = make_float4(acc[r][c][0], acc[r][c][1], acc[r][c][2], acc[r][c][3]);
            if (kNorm && first_group) {
#pragma unroll
              for (int c = 0; c < kColumns; c++) {
                const float s = quad_sum(square[c]);
                if (t == 0) squares[buffer][segment][c * 8 + g] = s;
              }
            }
            clear();
            segment++;
            left = part.segment_blocks;
          }
        }
      }
      // The next loads start before this sum is added up.
      const int n_segments = (k_blocks_of(part.k) + part.segment_blocks - 1) / part.segment_blocks;
      const bool last_part = i + 1 == p.n_parts;
      const int next_group = last_part ? group + gridDim.x : group;
      if (next_group < n_groups) {
        enter(next_group, last_part ? 0 : i + 1);
#pragma unroll
        for (int u = 0; u < kAhead; u++) fetch(u, u);
      }
      const int n = (group * kTiles + tile_column / kColumns) * 16 + out_row;
      float extra = 0, bias = 0;
      if (last_part && wanted && n < p.n) {
        if (p.epilogue == kEpilogueResidual) extra = __bfloat162float(p.residual[(size_t)out_m * p.out_stride + n]);
        if (p.bias) bias = __bfloat162float(p.bias[n]);
      }
#ifndef PLANT_MISSING_BARRIER
      __syncthreads();
#endif
      if (adds) {
        if (wanted) {
          if (kNorm && first_group) {
            float total = 0;
            for (int s = 0; s < n_segments; s++) total = __fadd_rn(total, squares[buffer][s][out_m]);
            inverse[i][threadIdx.x] = inverse_rms(total, part.k, part.eps);
          }
          const float* sums = reinterpret_cast<const float*>(&partial[buffer][0][0][0]) + threadIdx.x;
          float sum = sums[0];
          for (int s = 1; s < n_segments; s++) sum = __fadd_rn(sum, sums[s * kOutputs]);
          if (kNorm) sum = __fmul_rn(inverse[i][threadIdx.x], sum);
          y = i == 0 ? sum : __fadd_rn(y, sum);
        }
        if (last_part) {
          if (p.epilogue == kEpilogueSilu) {
            const float up = __shfl_xor_sync(0xffffffffu, y, 2);
            const int j = (group * kTiles + tile_column / kColumns) * 8 + out_row;
            if (wanted && e < 2 && j < p.n) p.out[(size_t)out_m * p.out_stride + j] = __float2bfloat16(__fmul_rn(silu(y), up));
          } else if (wanted && n < p.n && group * kTiles + tile_column / kColumns < p.n_tiles) {
            if (p.bias) y = __fadd_rn(y, bias);
            store_output(p, out_m, n, y, extra);
            if (p.max_value && y > best[threadIdx.x]) { best[threadIdx.x] = y; best_id[threadIdx.x] = n; }   // n ascends: ties keep the lowest
          }
        }
      }
      if constexpr (kBuffers == 1) __syncthreads();
      else buffer ^= 1;
    }
  }

  if (p.max_value && p.epilogue == kEpilogueLogits) {
    __syncthreads();
    if ((int)threadIdx.x < p.rows) {
      const int m = threadIdx.x, column = m >> 3, t_of_m = (m & 7) >> 1, e_of_m = m & 1;
      float top = -INFINITY;
      int top_id = 0x7fffffff;
      for (int q = 0; q < kTiles * 16; q++) {   // tile q / 16, its row q % 16
        const int at = ((q >> 4) * kColumns + column) * 128 + ((q & 7) * 4 + t_of_m) * 4 + ((q >> 3) & 1) * 2 + e_of_m;
        if (best[at] > top || (best[at] == top && best_id[at] < top_id)) { top = best[at]; top_id = best_id[at]; }
      }
      p.max_value[(size_t)m * gridDim.x + blockIdx.x] = top;
      p.max_id[(size_t)m * gridDim.x + blockIdx.x] = top_id;
    }
  }
}
}  // namespace

// linear_m<most rows>_t<tiles a group>_w<warps>[_a<blocks ahead> | _ring<blocks ahead>], each also with a fused norm.
#define LINEAR(name, tiles, columns, warps, ahead, ring)                                                                             \
  KERNEL(name, LinearParams, warps * 32, 2) { linear<tiles, columns, warps, ahead, false, ring>(p); }                               \
  KERNEL(name##_norm, LinearParams, warps * 32, 2) { linear<tiles, columns, warps, ahead, true, ring>(p); }
LINEAR(linear_m8_t1_w8, 1, 1, 8, 4, false)
LINEAR(linear_m8_t2_w8, 2, 1, 8, 3, false)
LINEAR(linear_m8_t1_w16, 1, 1, 16, 2, false)
LINEAR(linear_m8_t2_w16, 2, 1, 16, 1, false)
LINEAR(linear_m8_t1_w8_ring, 1, 1, 8, 3, true)
LINEAR(linear_m16_t1_w8, 1, 2, 8, 2, false)
LINEAR(linear_m16_t1_w16, 1, 2, 16, 1, false)
