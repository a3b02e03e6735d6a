// Linear layers of a decode or verify pass: out[m][n] = epilogue(inv[m] * sum over k of w[n][k] * x[m][k]) for 1 to 16 rows m.
//
// All time is weight streaming and waiting for the kernel before, so the kernel is built around loads in flight and a short way from the dependency wait to the last store.
// Weights are the 16-row operand of the mma, rows of the pass its 8 columns: 1 to 8 rows cost the same bytes. A block takes groups of kTiles 16-row tiles,
// blockIdx.x, + gridDim.x, ...; its warps split K, each a run of whole segments. A lane keeps kAhead 32-k blocks of weights in flight in registers, from before the
// dependency wait on, and asks for the next group's before the block adds up the present one. A warp leaves each segment's sum in shared memory; then one thread per
// output adds the segments in ascending order. Segments belong to the weight (params.h), so all variants and widths give the same bits, and linear_prefill too.
// RMSNorm costs the K loop nothing: x comes as bf16(x * norm) with the squares of its tiles (params.h); one warp a row makes inv from them while others stream.
//
// Shared memory: partial [kBuffers][32 segments][kTiles * kColumns][32 lanes] float4 (32 KB). A lane's float4 lies at slot t * 8 + (g + 2t) % 8, so that both its
// store and the adding warps' reads (warp q of four a tile-column: t = q, one float a lane) are free of bank conflicts. With two buffers a group needs one barrier.
#include "linear_row.cuh"

namespace {

template <int kTiles, int kColumns, int kWarps, int kAhead, int kParts>
__device__ __forceinline__ void linear(const LinearParams& p) {
  constexpr int kAdders = kTiles * kColumns * 4;      // warps that add up outputs, one output a thread
  constexpr int kBuffers = kTiles * kColumns == 1 ? 2 : 1;
  constexpr int kRowsAWarp = (kColumns * 8 + kWarps - 1) / kWarps;   // rows whose inv a warp makes: warp, + kWarps
  constexpr int kBatch = 8;                           // segments read at once: 16 cost registers that the loads in flight need
  static_assert(kAdders <= kWarps, "one output a thread");
  SHARED(float4, partial, [kBuffers][32][kTiles * kColumns][32]);
  SHARED(float, inverse, [kParts][kColumns * 8]);
  SHARED(float, best, [kAdders * 32]);
  SHARED(int, best_id, [kAdders * 32]);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;   // the shuffle tells the compiler: uniform
  const int n_groups = (p.n_tiles + kTiles - 1) / kTiles;

  // This warp's share of a part: blocks first .. first + n_mine of K, whole segments.
  int first = 0, n_mine = 0, first_segment = 0;
  const uint4* weights[kTiles];
  auto enter = [&](int group, int i) {
    const LinearPart& part = p.part[i];
    const int k_blocks = k_blocks_of(part.k), segments_a_warp = (part.n_segments + kWarps - 1) / kWarps;
    first_segment = warp * segments_a_warp;
    first = first_segment * part.segment_blocks;
    n_mine = min(segments_a_warp * part.segment_blocks, k_blocks - first);
#pragma unroll
    for (int r = 0; r < kTiles; r++) weights[r] = part.weights + ((size_t)min(group * kTiles + r, p.n_tiles - 1) * k_blocks + first) * 64 + lane;
  };
  uint4 held[kAhead][kTiles][2];
  auto fetch = [&](int slot, int block) {   // starts the loads of my block `block`, if there is one
    if (block < n_mine) {
#pragma unroll
      for (int r = 0; r < kTiles; r++)
#pragma unroll
        for (int h = 0; h < 2; h++) held[slot][r][h] = load_weights(weights[r] + (size_t)block * 64 + h * 32);
    }
  };
  // The output of an adding thread: row `row` of the pass, row n of the weights, or column j of a gated output.
  struct Output { bool wanted; int row, n, j; };
  auto output_of = [&](int thread, int group) {
    const int l = thread & 31, w = thread >> 5, m = w / 4 % kColumns * 8 + 2 * (w & 3) + (l & 1), tile = group * kTiles + w / (4 * kColumns);
    return Output{w < kAdders && m < p.rows && tile < p.n_tiles, m, tile * 16 + (l >> 2) + 8 * ((l & 3) >> 1), tile * 8 + (l >> 2)};
  };
  // What an output needs besides the sums is loaded early: constants before the dependency wait.
  float next_norm = 0;
  auto fetch_constants = [&](int group) {
    const Output o = output_of(threadIdx.x, group);
    if (p.next_norm && o.wanted && o.n < p.n) next_norm = __bfloat162float(p.next_norm[o.n]);
    if (p.bias && o.wanted && o.n < p.n) prefetch_l2(p.bias + o.n);
  };

  if ((int)blockIdx.x < n_groups) {
    enter(blockIdx.x, 0);
#pragma unroll
    for (int u = 0; u < kAhead; u++) fetch(u, u);
    fetch_constants(blockIdx.x);
  }
  pdl_launch_dependents();
  pdl_wait();

  const int row_shift = p.last_row ? *p.n_rows - 1 : 0;
  int buffer = 0;
  if (p.max_value && warp < kAdders) { best[threadIdx.x] = -INFINITY; best_id[threadIdx.x] = 0x7fffffff; }

  for (int group = blockIdx.x; group < n_groups; group += gridDim.x) {
    const bool first_group = group == (int)blockIdx.x;
    float y = 0, extra = 0;
#pragma unroll 1
    for (int i = 0; i < kParts; i++) {
      const LinearPart& part = p.part[i];
      const bf16* x = part.x + (size_t)(row_shift + g) * part.x_stride + first * 32 + 8 * t;
      int n_x[kColumns];   // of my blocks, those in which this lane's 8 k of this row exist
      uint4 next[kColumns];                             // x of the next block: one ahead of the mma
      auto fetch_x = [&](int b) {
#pragma unroll
        for (int c = 0; c < kColumns; c++)
          next[c] = b < n_x[c] ? load_activations(reinterpret_cast<const uint4*>(x + (size_t)c * 8 * part.x_stride + b * 32)) : make_uint4(0, 0, 0, 0);
      };
#pragma unroll
      for (int c = 0; c < kColumns; c++) n_x[c] = c * 8 + g < p.rows ? min(n_mine, (part.k - first * 32 - 8 * t + 31) >> 5) : 0;
      fetch_x(0);
      if (i + 1 == kParts && p.epilogue == kEpilogueResidual) {
        const Output o = output_of(threadIdx.x, group);
        if (o.wanted && o.n < p.n) extra = __bfloat162float(p.residual[(size_t)o.row * p.out_stride + o.n]);
      }
      float square_sum[kRowsAWarp] = {};
      if (first_group && part.squares) {
#pragma unroll
        for (int j = 0; j < kRowsAWarp; j++) {
          const int m = warp + j * kWarps, tiles = part.k / 16;
          if (m < p.rows)
#pragma unroll 2
            for (int tile = lane; tile < tiles; tile += 32) square_sum[j] = __fadd_rn(square_sum[j], part.squares[(size_t)(row_shift + m) * tiles + tile]);
        }
      }
      float acc[kTiles][kColumns][4];
      auto clear = [&] {
#pragma unroll
        for (int r = 0; r < kTiles; r++)
#pragma unroll
          for (int c = 0; c < kColumns; c++) acc[r][c][0] = acc[r][c][1] = acc[r][c][2] = acc[r][c][3] = 0;
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
          for (int c = 0; c < kColumns; c++) in[c] = next[c];
          fetch_x(b + 1);
#pragma unroll
          for (int r = 0; r < kTiles; r++)
#pragma unroll
            for (int c = 0; c < kColumns; c++) {
              mma_bf16(acc[r][c], held[u][r][0], in[c].x, in[c].y);
              mma_bf16(acc[r][c], held[u][r][1], in[c].z, in[c].w);
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
              for (int c = 0; c < kColumns; c++)
                partial[buffer][segment][r * kColumns + c][t * 8 + ((g + 2 * t) & 7)] = make_float4(acc[r][c][0], acc[r][c][1], acc[r][c][2], acc[r][c][3]);
            clear();
            segment++;
            left = part.segment_blocks;
          }
        }
      }
      if (first_group && part.squares) {
#pragma unroll
        for (int j = 0; j < kRowsAWarp; j++)
          if (warp + j * kWarps < p.rows) {
            const float total = warp_sum(square_sum[j]);
            if (lane == 0) inverse[i][warp + j * kWarps] = inverse_rms(total, part.k, part.eps);
          }
      }
      // The next loads start before this sum is added up.
      const bool last_part = i + 1 == kParts;
      const int next_group = last_part ? group + gridDim.x : group;
      const float this_norm = next_norm;
      if (next_group < n_groups) {
        enter(next_group, last_part ? 0 : i + 1);
#pragma unroll
        for (int u = 0; u < kAhead; u++) fetch(u, u);
        if (last_part) fetch_constants(next_group);
      }
#ifndef PLANT_MISSING_BARRIER
      __syncthreads();
#endif
      if (warp < kAdders) {
        const int thread = thread_index_anew();
        const Output o = output_of(thread, group);
        if (o.wanted) {
          const int out_g = (thread & 31) >> 2, quarter = (thread >> 5) & 3;
          const float* sums = reinterpret_cast<const float*>(&partial[buffer][0][thread >> 7][0]) + (quarter * 8 + ((out_g + 2 * quarter) & 7)) * 4 + (thread & 3);
          float sum = 0;
          for (int s0 = 0; s0 < part.n_segments; s0 += kBatch) {
            float v[kBatch];
#pragma unroll
            for (int s = 0; s < kBatch; s++) v[s] = sums[(s0 + s) * kTiles * kColumns * 128];
#pragma unroll
            for (int s = 0; s < kBatch; s++)
              if (s0 + s < part.n_segments) sum = __fadd_rn(sum, v[s]);
          }
          if (part.squares) sum = __fmul_rn(inverse[i][o.row], sum);
          y = i == 0 ? sum : __fadd_rn(y, sum);
        }
        if (last_part) {
          if (p.epilogue == kEpilogueSilu) {
            const float up = __shfl_xor_sync(0xffffffffu, y, 2);
            if (o.wanted && (thread & 2) == 0 && o.j < p.n) p.out[(size_t)o.row * p.out_stride + o.j] = __float2bfloat16(__fmul_rn(silu(y), up));
          } else {
            const bool stores = o.wanted && o.n < p.n;
            float v = 0;
            if (stores) {
              if (p.bias) y = __fadd_rn(y, __bfloat162float(p.bias[o.n]));
              v = store_output(p, o.row, o.n, y, extra);
              if (p.next_norm) p.normed[(size_t)o.row * p.out_stride + o.n] = __float2bfloat16(__fmul_rn(v, this_norm));
              if (p.max_value && y > best[thread]) { best[thread] = y; best_id[thread] = o.n; }   // n ascends: ties keep the lowest
            }
            if (p.next_norm) {
              v = square(v);
#pragma unroll
              for (int bit = 2; bit <= 16; bit *= 2) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, bit));
              if (stores && (thread & 31) < 2) p.squares[(size_t)o.row * (p.n / 16) + o.n / 16] = v;
            }
          }
        }
      }
      if constexpr (kBuffers == 1) __syncthreads();
      else buffer ^= 1;
    }
  }

  if (p.max_value && p.epilogue == kEpilogueLogits) {
    __syncthreads();
    const int m = threadIdx.x;
    if (m < p.rows) {
      float top = -INFINITY;
      int top_id = 0x7fffffff;
      for (int j = 0; j < kTiles * 16; j++) {   // tile j / 16, its row j % 16
        const int at = (((j >> 4) * kColumns + (m >> 3)) * 4 + ((m & 7) >> 1)) * 32 + (j & 7) * 4 + ((j >> 3) & 1) * 2 + (m & 1);
        if (best[at] > top || (best[at] == top && best_id[at] < top_id)) { top = best[at]; top_id = best_id[at]; }
      }
      p.max_value[(size_t)m * gridDim.x + blockIdx.x] = top;
      p.max_id[(size_t)m * gridDim.x + blockIdx.x] = top_id;
    }
  }
}
}  // namespace

// linear_m<most rows>_t<tiles a group>_w<warps>_a<blocks ahead>; linear_two takes two parts. 24 warps of 40 registers spill on sm_90a.
#define LINEAR(name, tiles, columns, warps, ahead, parts) KERNEL(name, LinearParams, warps * 32, 2) { linear<tiles, columns, warps, ahead, parts>(p); }
LINEAR(linear_m8_t1_w8_a4, 1, 1, 8, 4, 1)
LINEAR(linear_m8_t2_w8_a2, 2, 1, 8, 2, 1)
LINEAR(linear_m8_t2_w8_a3, 2, 1, 8, 3, 1)
LINEAR(linear_m8_t1_w16_a1, 1, 1, 16, 1, 1)
LINEAR(linear_m8_t1_w16_a2, 1, 1, 16, 2, 1)
LINEAR(linear_m8_t1_w16_a3, 1, 1, 16, 3, 1)
LINEAR(linear_m8_t2_w16_a1, 2, 1, 16, 1, 1)
LINEAR(linear_m16_t1_w8_a2, 1, 2, 8, 2, 1)
LINEAR(linear_m16_t1_w16_a1, 1, 2, 16, 1, 1)
LINEAR(linear_two, 1, 2, 16, 1, 2)
