// Collectives between the ranks of a model: the sum of all ranks' partial rows + residual + what the next norm needs,
// in one kernel; and maxima and sums of 64-bit words. Read comm_protocol.h first: windows, channels, chunks, epochs and
// the rule that makes two buffers enough.
//
// Three ways to the same bits (f32 sums in order of ranks from +0, + bias, rounded once to bf16, no negative zero,
// added to x in f32):
//   all_reduce_push      everybody stores its partial into everybody's window; everybody adds. One crossing, (n - 1) S
//                        bytes in and out
//   all_reduce_pull      everybody holds its partial ready in its own window, sets a flag in the others' and loads
//                        theirs. For machines whose stores collapse
//   all_reduce_two_shot  the columns of a channel are split among the ranks: partials go to the owner, who adds and
//                        stores the rounded sum into everybody's window. Two crossings, 2 (n - 1) / n S bytes
// Which is taken, and why: docs/decisions/ranks.md#sums.
//
// all_reduce_local adds partials that are here already (NCCL brought them); all_reduce_timed first waits as long as a
// sum would travel, for a rank measured alone.
//
// Work: block b takes a run of 16-column tiles of all rows, in chunks of as many rows as fit into a slot; a thread
// moves 8 columns (16 bytes) at a time, consecutive lanes consecutive bytes, so that stores fill PCIe packets. No block
// waits for another block of its rank.
//
// Partials and sums are sent as they are. A slot is zero while nothing is there, and each 16-bit element is looked at,
// since 16 bytes may arrive in two parts; so +0 is sent as -0, which adds the same to a sum that started as +0. Who has
// read an element zeroes it; the fence at the end of a chunk (between kernels: their boundary) puts that before what
// the sender may write there next.
#pragma once
#include "linear_row.cuh"
#include "comm_protocol.h"

namespace {
typedef unsigned long long u64;
#ifdef TEST_CHUNK_BYTES
constexpr int kChunkBytes = TEST_CHUNK_BYTES;  // many small chunks
#else
constexpr int kChunkBytes = COMM_SLOT_BYTES;  // of a slot that a chunk uses at most
#endif

// ---- zeros ----
// Bit 15 of each half that is +0.
__device__ __forceinline__ uint32_t zero_halves(uint32_t w) {
  return ~(((w & 0x7fff7fffu) + 0x7fff7fffu) | w) & 0x80008000u;
}
__device__ __forceinline__ bool incomplete(const uint4& v) {
  return (zero_halves(v.x) | zero_halves(v.y) | zero_halves(v.z) | zero_halves(v.w)) != 0;
}
__device__ __forceinline__ uint4 zeros_negative(const uint4& v) {
  return make_uint4(v.x | zero_halves(v.x), v.y | zero_halves(v.y), v.z | zero_halves(v.z), v.w | zero_halves(v.w));
}
__device__ __forceinline__ uint32_t zeros_positive(uint32_t w) { return w ^ zero_halves(w ^ 0x80008000u); }
__device__ __forceinline__ uint4 zeros_positive(const uint4& v) {
  return make_uint4(zeros_positive(v.x), zeros_positive(v.y), zeros_positive(v.z), zeros_positive(v.w));
}

// ---- the window ----
__device__ __forceinline__ unsigned next_epoch(unsigned epoch) {
  return epoch == 0xffffffffu ? COMM_AFTER_WRAP : epoch + 1;
}
__device__ __forceinline__ unsigned char* channel_of(const CommRanks& c, int rank) {
  return c.window[rank] + COMM_LINE_BYTES + (size_t)blockIdx.x * COMM_CHANNEL_BYTES;
}
__device__ __forceinline__ unsigned char* buffer_of(const CommRanks& c, int rank, unsigned epoch) {
  return channel_of(c, rank) + COMM_LINE_BYTES + (size_t)(epoch % COMM_BUFFERS) * COMM_BUFFER_BYTES;
}
// Slot of rank `from` in the window of rank `at`.
__device__ __forceinline__ uint4* slot_of(const CommRanks& c, int at, unsigned epoch, unsigned area, int from) {
  return reinterpret_cast<uint4*>(buffer_of(c, at, epoch) + area + (size_t)from * COMM_SLOT_BYTES);
}
__device__ __forceinline__ unsigned* flag_of(const CommRanks& c, int at, unsigned epoch, int from) {
  return reinterpret_cast<unsigned*>(buffer_of(c, at, epoch) + COMM_FLAGS + from * COMM_LINE_BYTES);
}
// The others in an order of this rank's own, k from 1: no port gets everybody's first.
__device__ __forceinline__ int peer_of(const CommRanks& c, int k) {
  return c.rank + k < c.ranks ? c.rank + k : c.rank + k - c.ranks;
}
__device__ __forceinline__ unsigned last_epoch(const CommRanks& c) {
  return load_system(reinterpret_cast<const unsigned*>(channel_of(c, c.rank)));
}
// The last thing of a collective.
__device__ __forceinline__ void leave(const CommRanks& c, unsigned epoch) {
  __syncthreads();
  if (threadIdx.x == 0) *reinterpret_cast<unsigned*>(channel_of(c, c.rank)) = epoch;
}
// Between two chunks: all threads are done with the old one, and what they zeroed is zero before the peers can write
// there again, which is after they have seen something of the new one.
__device__ __forceinline__ void end_chunk() {
#ifndef PLANT_COMM_END_BARRIER
  __syncthreads();
#endif
#ifndef PLANT_COMM_FENCE
  fence_system();
#endif
}

// ---- waiting ----
// Everything after a wait that failed goes on with whatever is there; nothing waits any more.
struct Patience {
  u64 since = 0;
  unsigned looks = 0;
  bool lost = false;
};
__device__ __forceinline__ bool waits_on(const CommRanks& c, Patience& patience, int peer, int phase, unsigned epoch) {
  poll_pause();
  if (++patience.looks % COMM_LOOKS) return true;
  const u64 now = global_timer();
  if (patience.since == 0) patience.since = now;
  if (load_system(c.poison) == 0) {
    if (now - patience.since < c.patience_us * 1000ull) return true;
    unsigned* reported = reinterpret_cast<unsigned*>(c.window[c.rank]);
    if (atomicExch(reported, 1u) == 0) {
      *c.record = CommRecord{c.rank, peer, phase, c.step, epoch, blockIdx.x, {0, 0}};
      store_release_system(c.poison, COMM_POISON_TIMEOUT);
    }
  }
  patience.lost = true;
  return false;
}
__device__ __forceinline__ void wait_for_word(const CommRanks& c, Patience& patience, const unsigned* word,
                                              unsigned value, int peer, int phase, unsigned epoch) {
  patience.since = 0;
  while (!patience.lost && load_acquire_system(word) != value) waits_on(c, patience, peer, phase, epoch);
}

// ---- planted by tests and doctor (comm_faulty.cu): what rank `rank` sends to its fault_peer ----
// False: it is not sent.
template <bool kFaulty>
__device__ __forceinline__ bool sends(const CommRanks& c, int peer, uint4& v) {
  if (!kFaulty || peer != c.fault_peer) return true;
  if (c.fault == kFaultZero) v = make_uint4(0x80008000u, 0x80008000u, 0x80008000u, 0x80008000u);
  if (c.fault == kFaultFlip) v.y ^= 0x00400000u;
  return c.fault != kFaultDrop;
}
template <bool kFaulty>
__device__ __forceinline__ void stall(const CommRanks& c) {
  if (!kFaulty || c.fault != kFaultStall) return;
  const u64 start = global_timer();
  while (load_system(c.poison) == 0 && global_timer() - start < 2 * c.patience_us * 1000ull) poll_pause();
}

// ---- a vector of 8 columns ----
struct Sum {
  float v[8];
};
__device__ __forceinline__ void add(Sum& sum, const uint4& a) {
  const uint32_t w[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    sum.v[2 * i] = __fadd_rn(sum.v[2 * i], bf16_low(w[i]));
    sum.v[2 * i + 1] = __fadd_rn(sum.v[2 * i + 1], bf16_high(w[i]));
  }
}
__device__ __forceinline__ uint4* vector_at(bf16* p, size_t stride, int row, int column) {
  return reinterpret_cast<uint4*>(p + row * stride + column);
}
__device__ __forceinline__ const uint4* vector_at(const bf16* p, size_t stride, int row, int column) {
  return reinterpret_cast<const uint4*>(p + row * stride + column);
}
// What is added to x, rounded once: the sum of a vector over all ranks, with the bias.
__device__ __forceinline__ uint4 rounded_sum(const AllReduceParams& p, Sum& sum, int column) {
  if (p.bias) add(sum, load_constants(vector_at(p.bias, 0, 0, column)));
  return zeros_positive(make_uint4(bf16_pair(sum.v[0], sum.v[1]), bf16_pair(sum.v[2], sum.v[3]),
                                   bf16_pair(sum.v[4], sum.v[5]), bf16_pair(sum.v[6], sum.v[7])));
}
// Adds the rounded sum of a vector to x and writes what follows from it. All lanes of a warp take part, two neighbours
// a tile; those without a vector say so.
__device__ __forceinline__ void finish(const AllReduceParams& p, bool has, int row, int column, const uint4& sum) {
  float x[8] = {};
  if (has) {
    float y[8];
    unpack(sum, y);
    uint4* at = reinterpret_cast<uint4*>(p.x + (size_t)row * p.dim + column);
    const uint4 a = load_activations(at), b = load_activations(at + 1);
    const uint32_t old[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = __fadd_rn(__uint_as_float(old[i]), y[i]);
    at[0] = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
    at[1] = make_uint4(__float_as_uint(x[4]), __float_as_uint(x[5]), __float_as_uint(x[6]), __float_as_uint(x[7]));
    if (p.tap)
      *vector_at(p.tap, p.tap_stride, row, column) =
          make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]));
  }
  if (!p.next_norm) return;
  if (has) {
    float g[8];
    unpack(load_constants(vector_at(p.next_norm, 0, 0, column)), g);
#pragma unroll
    for (int i = 0; i < 8; i++) g[i] = __fmul_rn(x[i], g[i]);
    *vector_at(p.normed, p.dim, row, column) =
        make_uint4(bf16_pair(g[0], g[1]), bf16_pair(g[2], g[3]), bf16_pair(g[4], g[5]), bf16_pair(g[6], g[7]));
  }
  // tile_square_sum of both neighbours' vectors.
  float s[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float low = square(x[2 * i]), high = square(x[2 * i + 1]);
    s[i] = __fadd_rn(__fadd_rn(low, __shfl_xor_sync(0xffffffffu, low, 1)),
                     __fadd_rn(high, __shfl_xor_sync(0xffffffffu, high, 1)));
  }
  if (has && column % 16 == 0)
    p.squares[(size_t)row * (p.dim / 16) + column / 16] = __fadd_rn(__fadd_rn(s[0], s[1]), __fadd_rn(s[2], s[3]));
}
__device__ __forceinline__ int rows_in_use(const AllReduceParams& p) {
  return p.n_rows ? min(*p.n_rows, p.rows) : p.rows;
}

// The run of tiles of this block.
struct Run {
  int first, tiles;
};
__device__ __forceinline__ Run run_of(const AllReduceParams& p) {
  const int tiles = p.dim / 16, first = tiles * (int)blockIdx.x / (int)gridDim.x;
  return {first, tiles * ((int)blockIdx.x + 1) / (int)gridDim.x - first};
}

// Waits until every other rank's element i of its slot is whole, adds all ranks' in order and zeroes the slots.
__device__ __forceinline__ Sum collect(const CommRanks& c, Patience& patience, const uint4& own, uint4* slots, int i,
                                       int phase, unsigned epoch) {
  constexpr int kSlot = COMM_SLOT_BYTES / 16;
  uint4 v[COMM_MAX_RANKS];
  patience.since = 0;
  int missing;
  do {
    missing = -1;
#pragma unroll
    for (int s = 0; s < (int)COMM_MAX_RANKS; s++)
      if (s < c.ranks && s != c.rank) v[s] = load_system(slots + s * kSlot + i);
#pragma unroll
    for (int s = 0; s < (int)COMM_MAX_RANKS; s++)
      if (s < c.ranks && s != c.rank && incomplete(v[s])) missing = s;
  } while (missing >= 0 && !patience.lost && waits_on(c, patience, missing, phase, epoch));
  Sum sum = {};
#pragma unroll
  for (int s = 0; s < (int)COMM_MAX_RANKS; s++) {
    if (s == c.rank) add(sum, own);
    else if (s < c.ranks) {
      add(sum, v[s]);
#ifndef PLANT_COMM_CLEAR
      store_system(slots + s * kSlot + i, make_uint4(0, 0, 0, 0));
#endif
    }
  }
  return sum;
}

// Params: AllReduceParams, or what derives from it and has a `finish` of its own (bench/comm_bench.cu).
template <bool kFaulty, class Params>
__device__ __forceinline__ void push(const Params& p) {
  pdl_launch_dependents();  // a successor only loads its weights while this kernel waits
  pdl_wait();
  const CommRanks& c = p.comm;
  const Run run = run_of(p);
  const int n_rows = rows_in_use(p), vectors = run.tiles * 2, chunk_rows = kChunkBytes / (vectors * 16);
  unsigned epoch = last_epoch(c);
  Patience patience;
  stall<kFaulty>(c);
  for (int row0 = 0; row0 < n_rows; row0 += chunk_rows) {
    if (row0) end_chunk();
    epoch = next_epoch(epoch);
    const int n = min(chunk_rows, n_rows - row0) * vectors;
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      const uint4 v = zeros_negative(
          load_activations(vector_at(p.partial, p.dim, row0 + i / vectors, run.first * 16 + i % vectors * 8)));
      for (int k = 1; k < c.ranks; k++) {
        const int peer = peer_of(c, k);
        uint4 sent = v;
        if (sends<kFaulty>(c, peer, sent)) store_system(slot_of(c, peer, epoch, COMM_PUSHED, c.rank) + i, sent);
      }
    }
    uint4* slots = slot_of(c, c.rank, epoch, COMM_PUSHED, 0);
    for (int base = threadIdx.x & ~31; base < n; base += blockDim.x) {
      const int i = base + (threadIdx.x & 31), row = row0 + i / vectors, column = run.first * 16 + i % vectors * 8;
      uint4 total = make_uint4(0, 0, 0, 0);
      if (i < n) {
        Sum sum = collect(c, patience, load_activations(vector_at(p.partial, p.dim, row, column)), slots, i,
                          COMM_PHASE_PUSH, epoch);
        total = rounded_sum(p, sum, column);
      }
      finish(p, i < n, row, column, total);
    }
  }
  leave(c, epoch);
}

template <bool kFaulty, class Params>
__device__ __forceinline__ void pull(const Params& p) {
  pdl_launch_dependents();
  pdl_wait();
  const CommRanks& c = p.comm;
  const Run run = run_of(p);
  const int n_rows = rows_in_use(p), vectors = run.tiles * 2, chunk_rows = kChunkBytes / (vectors * 16);
  unsigned epoch = last_epoch(c);
  Patience patience;
  stall<kFaulty>(c);
  for (int row0 = 0; row0 < n_rows; row0 += chunk_rows) {
    epoch = next_epoch(epoch);
    const int n = min(chunk_rows, n_rows - row0) * vectors, peer = threadIdx.x;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
      store_system(slot_of(c, c.rank, epoch, COMM_READY, 0) + i,
                   load_activations(vector_at(p.partial, p.dim, row0 + i / vectors, run.first * 16 + i % vectors * 8)));
#ifndef PLANT_COMM_FLAG_BARRIER
    __syncthreads();  // ends the chunk before too: what this rank's threads loaded for it, they have
#endif
    if (peer < c.ranks && peer != c.rank) {
      unsigned* flag = flag_of(c, peer, epoch, c.rank);
      if (!kFaulty || c.fault != kFaultDrop || peer != c.fault_peer) {
#ifdef PLANT_COMM_RELEASE
        store_system(flag, epoch);
#else
        store_release_system(flag, epoch);
#endif
      }
      wait_for_word(c, patience, flag_of(c, c.rank, epoch, peer), epoch, peer, COMM_PHASE_FLAG, epoch);
    }
    patience.lost = __syncthreads_or(patience.lost);
    for (int base = threadIdx.x & ~31; base < n; base += blockDim.x) {
      const int i = base + (threadIdx.x & 31), row = row0 + i / vectors, column = run.first * 16 + i % vectors * 8;
      uint4 total = make_uint4(0, 0, 0, 0);
      if (i < n) {
        uint4 v[COMM_MAX_RANKS];
#pragma unroll
        for (int s = 0; s < (int)COMM_MAX_RANKS; s++)
          if (s < c.ranks) v[s] = load_system(slot_of(c, s, epoch, COMM_READY, 0) + i);
        Sum sum = {};
#pragma unroll
        for (int s = 0; s < (int)COMM_MAX_RANKS; s++) {
          if (s >= c.ranks) continue;
          if (kFaulty && s != c.rank) sends<kFaulty>(c, s, v[s]);
          add(sum, v[s]);
        }
        total = rounded_sum(p, sum, column);
      }
      finish(p, i < n, row, column, total);
    }
  }
  leave(c, epoch);
}

// Vectors of a chunk in order of owners: rank q owns tiles [tiles * q / n, tiles * (q + 1) / n) of the run, at least
// one, and its vectors are a run [row][its columns], which is also how they lie in a slot.
struct Owned {
  int owner, i, row, column;
};
__device__ __forceinline__ Owned owned(int at, int rows, const Run& run, int ranks) {
  const int owner = ((at / (2 * rows) + 1) * ranks - 1) / run.tiles, first = run.tiles * owner / ranks,
            vectors = 2 * (run.tiles * (owner + 1) / ranks - first);
  const int i = at - 2 * rows * first;
  return {owner, i, i / vectors, (run.first + first) * 16 + i % vectors * 8};
}

template <bool kFaulty, class Params>
__device__ __forceinline__ void two_shot(const Params& p) {
  pdl_launch_dependents();
  pdl_wait();
  const CommRanks& c = p.comm;
  const Run run = run_of(p);
  const int n_rows = rows_in_use(p), chunk_rows = kChunkBytes / (32 * ((run.tiles + c.ranks - 1) / c.ranks));
  const int first = run.tiles * c.rank / c.ranks,
            mine = run.tiles * (c.rank + 1) / c.ranks - first;  // tiles that this rank owns
  unsigned epoch = last_epoch(c);
  Patience patience;
  stall<kFaulty>(c);
  for (int row0 = 0; row0 < n_rows; row0 += chunk_rows) {
    if (row0) end_chunk();
    epoch = next_epoch(epoch);
    const int rows = min(chunk_rows, n_rows - row0), n = rows * run.tiles * 2, n_mine = rows * mine * 2,
              after_mine = 2 * rows * first + n_mine;
    for (int i = threadIdx.x; i < n - n_mine; i += blockDim.x) {  // from behind its own vectors round to them
      const Owned o = owned((after_mine + i) % n, rows, run, c.ranks);
      uint4 sent = zeros_negative(load_activations(vector_at(p.partial, p.dim, row0 + o.row, o.column)));
      if (sends<kFaulty>(c, o.owner, sent)) store_system(slot_of(c, o.owner, epoch, COMM_PUSHED, c.rank) + o.i, sent);
    }
    uint4* slots = slot_of(c, c.rank, epoch, COMM_PUSHED, 0);
    for (int base = threadIdx.x & ~31; base < n_mine; base += blockDim.x) {
      const int i = base + (threadIdx.x & 31);
      const Owned o = owned(2 * rows * first + min(i, n_mine - 1), rows, run, c.ranks);
      uint4 total = make_uint4(0, 0, 0, 0);
      if (i < n_mine) {
        Sum sum = collect(c, patience, load_activations(vector_at(p.partial, p.dim, row0 + o.row, o.column)), slots, i,
                          COMM_PHASE_REDUCE, epoch);
        total = rounded_sum(p, sum, o.column);
        for (int k = 1; k < c.ranks; k++) {
          const int peer = peer_of(c, k);
          uint4 sent = zeros_negative(total);
          if (sends<kFaulty>(c, peer, sent)) store_system(slot_of(c, peer, epoch, COMM_GATHERED, c.rank) + i, sent);
        }
      }
      finish(p, i < n_mine, row0 + o.row, o.column, total);
    }
    for (int base = threadIdx.x & ~31; base < n - n_mine; base += blockDim.x) {
      const int i = base + (threadIdx.x & 31);
      const bool has = i < n - n_mine;
      const Owned o = owned((after_mine + min(i, n - n_mine - 1)) % n, rows, run, c.ranks);
      uint4 total = make_uint4(0, 0, 0, 0);
      if (has) {
        uint4* at = slot_of(c, c.rank, epoch, COMM_GATHERED, o.owner) + o.i;
        patience.since = 0;
        do total = load_system(at);
        while (incomplete(total) && !patience.lost && waits_on(c, patience, o.owner, COMM_PHASE_GATHER, epoch));
        total = zeros_positive(total);
        store_system(at, make_uint4(0, 0, 0, 0));
      }
      finish(p, has, row0 + o.row, o.column, total);
    }
  }
  leave(c, epoch);
}

// Any grid; comm holds only the number of partials.
__device__ __forceinline__ void local(const AllReduceParams& p) {
  pdl_launch_dependents();
  pdl_wait();
  const int vectors = p.dim / 8, n = rows_in_use(p) * vectors;
  for (int base = blockIdx.x * blockDim.x + (threadIdx.x & ~31); base < n; base += gridDim.x * blockDim.x) {
    const int i = base + (threadIdx.x & 31), row = i / vectors, column = i % vectors * 8;
    uint4 total = make_uint4(0, 0, 0, 0);
    if (i < n) {
      Sum sum = {};
      for (int s = 0; s < p.comm.ranks; s++)
        add(sum, load_activations(vector_at(p.partial, p.dim, s * p.rows + row, column)));
      total = rounded_sum(p, sum, column);
    }
    finish(p, i < n, row, column, total);
  }
}

__device__ __forceinline__ void timed(const AllReduceParams& p) {
  pdl_launch_dependents();
  pdl_wait();
  const u64 start = global_timer();
  while (global_timer() - start < (u64)p.wait_ns) poll_pause();
  local(p);
}

template <bool kFaulty>
__device__ __forceinline__ void exchange(const ExchangeParams& p) {
  constexpr int kChunk = kChunkBytes / 16, kSlot = COMM_SLOT_BYTES / 16;
  pdl_launch_dependents();
  pdl_wait();
  if (p.wanted) {
    int wanted = 0;
    for (int i = 0; i < p.n_wanted; i++) wanted |= p.wanted[i];
    if (!wanted) return;
  }
  const CommRanks& c = p.comm;
  const int begin = (int)((long long)p.n * blockIdx.x / gridDim.x),
            end = (int)((long long)p.n * (blockIdx.x + 1) / gridDim.x);
  unsigned epoch = last_epoch(c);
  Patience patience;
  stall<kFaulty>(c);
  for (int word0 = begin; word0 < end; word0 += kChunk) {
    if (word0 > begin) end_chunk();
    epoch = next_epoch(epoch);
    const int n = min(kChunk, end - word0);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      const u64 word = p.words[word0 + i];
      for (int k = 1; k < c.ranks; k++) {
        const int peer = peer_of(c, k);
        uint4 sent = make_uint4((unsigned)word, 0, (unsigned)(word >> 32), 0);
        const bool goes = sends<kFaulty>(c, peer, sent);
        sent.y = sent.w = epoch;
        if (goes) store_system(slot_of(c, peer, epoch, COMM_WORDS, c.rank) + i, sent);
      }
    }
    const uint4* slots = slot_of(c, c.rank, epoch, COMM_WORDS, 0);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
      u64 result = p.words[word0 + i];
      for (int k = 1; k < c.ranks; k++) {
        const int peer = peer_of(c, k);
        uint4 v;
        patience.since = 0;
        do v = load_system(slots + peer * kSlot + i);
        while ((v.y != epoch || v.w != epoch) && !patience.lost &&
               waits_on(c, patience, peer, COMM_PHASE_WORDS, epoch));
        const u64 word = v.x | (u64)v.z << 32;
        result = p.op == kExchangeSum ? result + word : result < word ? word : result;
      }
      p.words[word0 + i] = result;
    }
  }
  leave(c, epoch);
}

// ---- what a pair of GPUs can do (src/gpu/ranks/pairs.rs) ----
__device__ __forceinline__ uint4 pattern(unsigned i, unsigned seed) { return make_uint4(i, seed, i ^ seed, ~i); }
template <bool kFaulty>
__device__ __forceinline__ void store_pattern(const PeerParams& p) {
  pdl_wait();
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.n; i += (u64)gridDim.x * blockDim.x) {
    uint4 v = pattern((unsigned)i, p.seed);
    if (sends<kFaulty>(p.comm, 1 - p.comm.rank, v)) store_system(p.at + i, v);
  }
}
template <bool kFaulty>
__device__ __forceinline__ void load_pattern(const PeerParams& p) {
  pdl_wait();
  unsigned wrong = 0;
  const u64 stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.n; i += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; u++)
      v[u] = i + u * stride < p.n ? load_system(p.at + i + u * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int u = 0; u < 4; u++) {
      const uint4 want = pattern((unsigned)(i + u * stride), p.seed);
      const bool came = sends<kFaulty>(p.comm, 1 - p.comm.rank, v[u]);
      wrong += i + u * stride < p.n &&
               (!came || v[u].x != want.x || v[u].y != want.y || v[u].z != want.z || v[u].w != want.w);
    }
  }
  if (wrong) atomicAdd(p.result, (u64)wrong);
}
// One thread a rank. Uses the flags of the first buffer of channel 0, which must be 0.
template <bool kFaulty>
__device__ __forceinline__ void ping(const PeerParams& p) {
  pdl_wait();
  if (threadIdx.x) return;
  const CommRanks& c = p.comm;
  const int peer = 1 - c.rank;
  unsigned* theirs = flag_of(c, peer, 0, c.rank);
  const unsigned* own = flag_of(c, c.rank, 0, peer);
  Patience patience;
  u64 start = 0;
  const bool sends = !kFaulty || c.fault != kFaultDrop;
  stall<kFaulty>(c);
  for (unsigned i = 1; i <= (unsigned)p.rounds; i++) {
    if (c.rank == 0 && sends) store_release_system(theirs, i);
    wait_for_word(c, patience, own, i, peer, COMM_PHASE_PING, i);
    if (c.rank == 1 && sends) store_release_system(theirs, i);
    if (i == 1) start = global_timer();  // the first round waits for the other kernel to start
  }
  *p.result = patience.lost ? ~0ull : global_timer() - start;
}
}  // namespace
