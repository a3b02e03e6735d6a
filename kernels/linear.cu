// Linear layers of a decode or verify pass: out[m][n] = epilogue(inv[m] * sum over k of w[n][k] * x[m][k]) for 1 to 16
// rows m.
//
// All time is weight streaming and waiting for the kernel before, so the kernel is built around loads in flight and a
// short way from the dependency wait to the last store. Weights are the 16-row operand of the mma, rows of the pass its
// 8 columns: 1 to 8 rows cost the same bytes. A block takes tiles of 16 rows, blockIdx.x, + gridDim.x, ...; each of its
// warps has one segment of K. A lane keeps kAhead units of weights in flight in registers, from before the dependency
// wait on, and of x, which L1 has, those of kXAhead units; it asks for the next tile's before the block adds up the
// present one. A warp leaves its segment's sum in shared memory; then one thread per output adds the segments (split-K)
// in ascending order. Segments belong to the weight (params.h), so all widths give the same bits, and linear_prefill
// too. RMSNorm costs the K loop nothing: x comes as bf16(x * norm) with the squares of its tiles (params.h); one warp a
// row makes inv from them while others stream.
//
// Shared memory: partial [2][8 segments][kMTiles][32 lanes] float4. A lane's float4 lies at slot t * 8 + (g + 2t) % 8,
// so that both its store and the adding warps' reads (warp q of four a tile-column: t = q, one float a lane) are free
// of bank conflicts. With two buffers a tile needs one barrier.
//
// What was measured and dropped: docs/decisions/kernels.md#linear-layers.
#include <type_traits>
#include "format.cuh"
#include "linear_row.cuh"

namespace {

// F: the format of the weights. kMTiles: tiles of 8 rows of the pass, the mma's columns.
template <class F, int kMTiles, int kAhead, int kXAhead, int kParts>
__device__ __forceinline__ void linear(const LinearParams& p) {
  constexpr int kWarps = kSegments;
  constexpr int kAdders = kMTiles * 4;  // warps that add up outputs, one output a thread
  constexpr int kSegmentBytes = kMTiles * 512, kBufferBytes = kSegments * kSegmentBytes;
  constexpr int kRowsAWarp = (kMTiles * 8 + kWarps - 1) / kWarps;  // rows whose inv a warp makes: warp, + kWarps
  static_assert(kAdders <= kWarps, "one output a thread");
  static_assert(kAhead % kXAhead == 0, "a unit's place among those of x is known to the compiler");
  // ---- Shared memory ----
  SHARED(float4, partial, [2][kSegments][kMTiles][32]);
  SHARED(float, inverse, [kParts][kMTiles * 8]);
  SHARED(float, best, [kAdders * 32]);
  SHARED(int, best_id, [kAdders * 32]);
  // ---- Who does what: this warp's segment of a part, units first .. first + n_mine of K ----
  pdl_launch_dependents();  // first: a successor takes a microsecond to start, and all blocks of this kernel are
                            // resident or done by then
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, g = lane >> 2,
            t = lane & 3;  // the shuffle tells the compiler: uniform
  const int n_tiles = p.n_tiles;
  int first = 0, n_mine = 0;
  const char* weights = nullptr;
  const float* scales = nullptr;
  const bf16* x[kMTiles];
  int n_x[kMTiles];  // of my units' 32-k words, those in which this lane's 8 k of this row exist
  SharedAddress slot = shared_address(&partial[0][warp][0][t * 8 + ((g + 2 * t) & 7)]);
  auto enter_part = [&](int i) {
    const LinearPart& part = p.part[i];
    first = warp * part.segment_units;
    n_mine = min((int)part.segment_units, units_of<F>(part.k) - first);
#pragma unroll
    for (int c = 0; c < kMTiles; c++) {
      const int row = c * 8 + g;
      n_x[c] = row < p.rows ? min(n_mine * F::kWords, (part.k - first * F::kK - 8 * t + 31) >> 5) : 0;
      x[c] = part.x + (size_t)(row < p.rows ? row : 0) * part.x_stride + first * F::kK + 8 * t;
    }
  };
  auto enter_tile = [&](int tile, int i) {
    const LinearPart& part = p.part[i];
    const size_t unit = (size_t)tile * units_of<F>(part.k) + first;
    weights = reinterpret_cast<const char*>(part.weights) + unit * F::kUnitBytes + lane * F::kLaneBytes;
    scales = part.scales + unit * F::kScales;
  };
  // ---- Loads under way: weights kAhead units ahead, x kXAhead ----
  typename F::Held held[kAhead];
  uint4 in[kXAhead][kMTiles][F::kWords] = {};
  // Start the loads of unit u from where the pointers stand, of which `left` are mine from there on. What is not there
  // of x keeps what it had, and meets weights of 0.
  auto fetch = [&](int slot, int u, int left) {
    if (u < left) F::load(held[slot], weights + u * F::kUnitBytes, scales + u * F::kScales, lane);
  };
  auto fetch_x = [&](int slot, int u) {
#pragma unroll
    for (int c = 0; c < kMTiles; c++)
#pragma unroll
      for (int w = 0; w < F::kWords; w++)
        if (u * F::kWords + w < n_x[c])
          in[slot][c][w] = load_activations(reinterpret_cast<const uint4*>(x[c] + u * F::kK + w * 32));
  };
  // ---- Outputs: one a thread of the first kAdders warps ----
  // The output of an adding thread: row `row` of the pass, row n of the weights, or column j of a gated output.
  struct Output {
    bool wanted;
    int row, n, j;
  };
  auto output_of = [&](int thread, int tile) {
    const int l = thread & 31, w = thread >> 5, m = w / 4 * 8 + 2 * (w & 3) + (l & 1);
    return Output{w < kAdders && m < p.rows && tile < n_tiles, m, tile * 16 + (l >> 2) + 8 * ((l & 3) >> 1),
                  tile * 8 + (l >> 2)};
  };
  // What an output needs besides the sums is loaded early, constants before the dependency wait; raw, since a
  // conversion here would wait for it.
  unsigned short next_norm = 0, bias = 0;
  float row_scale = 1;
  auto fetch_constants = [&](int tile) {
    const Output o = output_of(threadIdx.x, tile);
    if (!o.wanted) return;
    if (std::is_same<F, Fp8Rows>::value)
      row_scale = __uint_as_float(load_weights(reinterpret_cast<const uint32_t*>(p.row_scales + o.n)));
    if (o.n >= p.n) return;
    if (p.next_norm) next_norm = load_constant_bits(p.next_norm + o.n);
    if (p.bias) bias = load_constant_bits(p.bias + o.n);
  };

  // ---- Before the wait: the first tile's weights and constants ----
  enter_part(0);
  const float* residual_at = p.stream;
  bool reads_residual = false;
  if ((int)blockIdx.x < n_tiles) {
    enter_tile(blockIdx.x, 0);
#pragma unroll
    for (int u = 0; u < kAhead; u++) fetch(u, u, n_mine);
    fetch_constants(blockIdx.x);
  }
  if (p.max_value && warp < kAdders) {
    best[threadIdx.x] = -INFINITY;
    best_id[threadIdx.x] = 0x7fffffff;
  }
  auto enter_residual = [&](int tile) {
    const Output o = output_of(threadIdx.x, tile);
    reads_residual = p.epilogue == kEpilogueResidual && o.wanted && o.n < p.n;
    if (reads_residual) residual_at = p.stream + (size_t)o.row * p.out_stride + o.n;
  };
  enter_residual(blockIdx.x);
#pragma unroll
  for (int c = 0; c < kMTiles; c++) {
    have_now(x[c]);
    have_now(n_x[c]);
  }
  have_now(slot);
  have_now(residual_at);
  pdl_wait();
  const int end_tile = kParts == 1 && p.first_row && *p.n_rows <= p.first_row ? 0 : n_tiles;

  int buffer_offset = 0;

  // ---- Tiles, and the parts of each ----
  for (int tile = blockIdx.x; tile < end_tile; tile += gridDim.x) {
    const bool first_tile = tile == (int)blockIdx.x;
    float y = 0;
    float residual = 0;
#pragma unroll 1
    for (int i = 0; i < kParts; i++) {
      const LinearPart& part = p.part[i];
      const bool last_part = i + 1 == kParts;
#pragma unroll
      for (int u = 0; u < kXAhead; u++) fetch_x(u, u);
      if (last_part && reads_residual) residual = load_activation(residual_at);
      // ---- First tile: sums of squares, a warp a row ----
      float square_sum[kRowsAWarp] = {};
      if (first_tile && part.squares) {
        const int tiles = part.k / 16;
#pragma unroll
        for (int j = 0; j < kRowsAWarp; j++) {
          const int m = warp + j * kWarps;
          if (m >= p.rows) continue;
          const float* squares = part.squares + (size_t)m * ((part.x_stride + 15) / 16) + lane;
#pragma unroll 1
          for (int tile = 0; tile < tiles; tile += 256) {  // 8 loads at once: they come from L2
            float v[8];
#pragma unroll
            for (int u = 0; u < 8; u++) v[u] = tile + u * 32 + lane < tiles ? squares[tile + u * 32] : 0.0f;
#pragma unroll
            for (int u = 0; u < 8; u++) square_sum[j] = __fadd_rn(square_sum[j], v[u]);
          }
        }
      }
      // ---- My segment ----
      float acc[kMTiles][4] = {};
#ifdef PLANT_OFF_BY_ONE
      const int n_units = n_mine - (warp == 0 && n_mine > 1);
#else
      const int n_units = n_mine;
#endif
#pragma unroll 1
      for (int b0 = 0; b0 < n_units; b0 += kAhead) {
#pragma unroll
        for (int u = 0; u < kAhead; u++) {
          if (b0 + u >= n_units) break;
#pragma unroll
          for (int c = 0; c < kMTiles; c++)
#pragma unroll
            for (int w = 0; w < F::kWords; w++) F::multiply(acc[c], held[u], w, in[u % kXAhead][c][w]);
          fetch(u, u + kAhead, n_mine - b0);
          fetch_x(u % kXAhead, u + kXAhead);
        }
        weights += kAhead * F::kUnitBytes;
        scales += kAhead * F::kScales;
#pragma unroll
        for (int c = 0; c < kMTiles; c++) {
          x[c] += kAhead * F::kK;
          n_x[c] -= kAhead * F::kWords;
        }
      }
      if (n_mine > 0) {
#pragma unroll
        for (int c = 0; c < kMTiles; c++) store_shared(slot + buffer_offset + c * 512, acc[c]);
      }
      if (first_tile && part.squares) {
#pragma unroll
        for (int j = 0; j < kRowsAWarp; j++)
          if (warp + j * kWarps < p.rows) {
            const float total = warp_sum(square_sum[j]);
            if (lane == 0) inverse[i][warp + j * kWarps] = inverse_rms(total, part.k, part.eps);
          }
      }
      if (kParts == 1) {  // back to my first unit
        const int done = (max(n_units, 0) + kAhead - 1) / kAhead * kAhead;
#pragma unroll
        for (int c = 0; c < kMTiles; c++) {
          x[c] -= done * F::kK;
          n_x[c] += done * F::kWords;
        }
      }
      // ---- The next loads start before this sum is added up ----
      const int next_tile = last_part ? tile + gridDim.x : tile;
      if (next_tile < n_tiles) {
        if (kParts > 1) enter_part(last_part ? 0 : i + 1);
        enter_tile(next_tile, last_part ? 0 : i + 1);
#pragma unroll
        for (int u = 0; u < kAhead; u++) fetch(u, u, n_mine);
      }
      // ---- Segments added in order, and the epilogue ----
      const int thread = thread_index_anew();
      const Output o = output_of(thread, tile);
      const int quarter = (thread >> 5) & 3, out_g = (thread & 31) >> 2;
      SharedAddress sums = shared_address(&partial[0][0][0][0]) + buffer_offset + (thread >> 7) % kMTiles * 512 +
                           (quarter * 8 + ((out_g + 2 * quarter) & 7)) * 16 + (thread & 3) * 4;
      SharedAddress inverse_at = shared_address(&inverse[i][0]) + o.row * 4;
      have_now(sums);
      have_now(inverse_at);
#ifndef PLANT_MISSING_BARRIER
      __syncthreads();
#endif
      if (warp < kAdders) {
        if (o.wanted) {
          const float inv = part.squares ? load_shared(inverse_at) : 1.0f;
          float v[kSegments], sum = 0;
#pragma unroll
          for (int s = 0; s < kSegments; s++) v[s] = load_shared(sums + s * kSegmentBytes);
#pragma unroll
          for (int s = 0; s < kSegments; s++)
            if (s < part.n_segments) sum = __fadd_rn(sum, v[s]);
          if (std::is_same<F, Fp8Rows>::value) sum = __fmul_rn(row_scale, sum);
          sum = __fmul_rn(inv, sum);
          y = i == 0 ? sum : __fadd_rn(y, sum);
        }
        if (last_part) {
          if (p.epilogue == kEpilogueSilu) {
            const float up = __shfl_xor_sync(0xffffffffu, y, 2);
            if (o.wanted && (thread & 2) == 0 && o.j < p.n)
              p.out[(size_t)o.row * p.out_stride + o.j] = __float2bfloat16(__fmul_rn(silu(y), up));
          } else {
            const bool stores = o.wanted && o.n < p.n;
            float v = 0;
            if (stores) {
              if (p.bias) y = __fadd_rn(y, bf16_low(bias));
              v = store_output(p, o.row, o.n, y, residual);
              if (p.next_norm)
                p.normed[(size_t)o.row * p.out_stride + o.n] = __float2bfloat16(__fmul_rn(v, bf16_low(next_norm)));
              if (p.max_value && y > best[thread]) {
                best[thread] = y;
                best_id[thread] = o.n;
              }  // n ascends: ties keep the lowest
            }
            if (p.next_norm) {
              v = square(v);
#pragma unroll
              for (int bit = 2; bit <= 16; bit *= 2) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, bit));
              if (stores && (thread & 31) < 2) p.squares[(size_t)o.row * ((p.n + 15) / 16) + o.n / 16] = v;
            }
          }
        }
      }
      if (last_part && next_tile < n_tiles) {
        fetch_constants(next_tile);
        enter_residual(next_tile);
      }
      buffer_offset ^= kBufferBytes;
    }
  }

  // ---- The block's maxima ----
  if (p.max_value && p.epilogue == kEpilogueLogits) {
    __syncthreads();
    const int m = threadIdx.x;
    if (m < p.rows) {
      float top = -INFINITY;
      int top_id = 0x7fffffff;
      for (int j = 0; j < 16; j++) {  // row j of a tile
        const int at = ((m >> 3) * 4 + ((m & 7) >> 1)) * 32 + (j & 7) * 4 + (j >> 3) * 2 + (m & 1);
        if (best[at] > top || (best[at] == top && best_id[at] < top_id)) {
          top = best[at];
          top_id = best_id[at];
        }
      }
      p.max_value[(size_t)m * gridDim.x + blockIdx.x] = top;
      p.max_id[(size_t)m * gridDim.x + blockIdx.x] = top_id;
    }
  }
}
}  // namespace

// linear_m<most rows>[_<format>]; linear_two takes two parts and up to 16 rows. Launched with min(n_tiles, 2 blocks per
// SM) blocks of 8 warps; 16 warps, 4 warps, three blocks a SM and two tiles at once are slower.
#define LINEAR(name, format, m_tiles, ahead, x_ahead, parts) \
  KERNEL(name, LinearParams, kSegments * 32, 2) { linear<format, m_tiles, ahead, x_ahead, parts>(p); }
LINEAR(linear_m8, Bf16, 1, 6, 6, 1)
LINEAR(linear_m16, Bf16, 2, 4, 4, 1)
LINEAR(linear_two, Bf16, 2, 3, 3, 2)
LINEAR(linear_m8_fp8, Fp8, 1, 4, 4, 1)
LINEAR(linear_m16_fp8, Fp8, 2, 2, 2, 1)
LINEAR(linear_m8_fp8_rows, Fp8Rows, 1, 4, 4, 1)
LINEAR(linear_m16_fp8_rows, Fp8Rows, 2, 2, 2, 1)
LINEAR(linear_m8_int4, Int4, 1, 4, 4, 1)
LINEAR(linear_m16_int4, Int4, 2, 4, 2, 1)
