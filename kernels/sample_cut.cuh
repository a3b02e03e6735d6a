// Where top-k, top-p and min-p cut a row of logits, exactly: what the kernels of sample.cu call.
//
// A rank is |z|'s bits << 20 | id: ranks ascend in (z descending, id ascending), all are different, and what a filter
// keeps is "all ranks up to a cut". Ids and their mass are added up in 1024 bins of ranks (64 to an octave of |z|),
// which tell the bins that hold a cut (find_cut); the few ids in those are listed, and the cut is selected among them
// (settle): each against all where there is a thread for each, else digit by digit. A flat row has all its ids in one
// bin: slower, but right. On several ranks the list lies on all of them, and a digit takes a kernel (narrow).
#pragma once
#include "sample.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// Options up to min_tokens. They are constants of the graph: read before pdl_wait.
__device__ __forceinline__ SamplingParams load_options(const SampleParams& p) { return load_front<3>(p.options); }
__device__ __forceinline__ bool adjusts(const SamplingParams& o) {
  return o.repetition_penalty != 1 || o.presence_penalty != 0 || o.frequency_penalty != 0 || o.has_bias ||
         o.min_tokens > 0;
}
__device__ __forceinline__ bool has_top_k(const SampleParams& p, const SamplingParams& o) {
  return o.top_k > 0 && o.top_k < p.n_tokens;
}
__device__ __forceinline__ bool has_top_p(const SamplingParams& o) { return o.top_p < 1ull << 32; }
__device__ __forceinline__ bool filters(const SampleParams& p, const SamplingParams& o) {
  return o.temperature != 0 && (has_top_k(p, o) || has_top_p(o));
}

// ---- ranks ----
constexpr int kIdBits = 20, kBinShift = 17, kBinBase = 121 << 6;  // a bin is |z|'s exponent and 6 bits; bin 0 starts at
                                                                  // 0, bin 1 at 2^-6, the last is open
__device__ __forceinline__ u64 rank_of(float z, unsigned id) { return (u64)__float_as_uint(fabsf(z)) << kIdBits | id; }
__device__ __forceinline__ float z_of(u64 rank) { return -__uint_as_float((unsigned)(rank >> kIdBits)); }
__device__ __forceinline__ int bin_of(float z) {
  return min(max((int)(__float_as_uint(fabsf(z)) >> kBinShift) - kBinBase, 0), SAMPLE_BINS - 1);
}
__device__ __forceinline__ u64 bin_start(int bin) {
  return bin == 0 ? 0 : bin == SAMPLE_BINS ? ~0ull : (u64)(bin + kBinBase) << (kBinShift + kIdBits);
}
// The mass that top-p must reach, of a kept mass: at least 1, so that at least one id stays. The product is exact.
__device__ __forceinline__ u64 top_p_target(u64 kept_mass, u64 top_p) {
  const unsigned __int128 product = (unsigned __int128)kept_mass * top_p;
  const u64 target = (u64)(product >> 32) + ((unsigned)product != 0);
  return target ? target : 1;
}

// ---- select among listed ids ----
struct Digits {
  u64 weight[SAMPLE_DIGITS];
  unsigned count[SAMPLE_DIGITS];
  u64 first, last, target;
  u64 warp[kWarps];
};
static_assert(SAMPLE_DIGITS == kThreads, "a digit a thread");
// The digits of ranks in [first, last] are theirs above this bit.
__device__ __forceinline__ int digit_shift(u64 first, u64 last) {
  const u64 range = last - first;
  const int n_bits = range >> 32 ? 64 - __clz((int)(range >> 32)) : 32 - __clz((int)range);
  return max(0, n_bits - 8);
}
// Adds list members in [first, last] to the digits' counts and weights; a member weighs 1, or its mass. A thread adds
// up runs of equal digits first: a flat row would otherwise queue at one word.
template <bool by_mass>
__device__ __forceinline__ void tally(const u64* list, unsigned n, u64 first, u64 last, int shift, Digits& d) {
  unsigned run = 0, run_count = 0;
  u64 run_weight = 0;
  for (unsigned i = threadIdx.x; i < n; i += 4 * kThreads) {
    u64 ranks[4];  // four loads under way
#pragma unroll
    for (unsigned j = 0; j < 4; j++)
      ranks[j] = i + j * kThreads < n ? list[i + j * kThreads] : ~0ull;  // ~0 is beyond every `last`
#pragma unroll
    for (unsigned j = 0; j < 4; j++) {
      const u64 rank = ranks[j];
      if (rank < first || rank > last) continue;
      const unsigned digit = (unsigned)((rank - first) >> shift);
      if (digit != run && run_count) {
        atomicAdd(&d.weight[run], run_weight);
        atomicAdd(&d.count[run], run_count);
        run_weight = run_count = 0;
      }
      run = digit;
      run_count++;
      run_weight += by_mass ? probability_mass(z_of(rank)) : 1;
    }
  }
  if (run_count) {
    atomicAdd(&d.weight[run], run_weight);
    atomicAdd(&d.count[run], run_count);
  }
}
// The smallest rank c such that list members in [first, c] weigh at least `target` together; a member weighs 1, or its
// mass. Any c up to the next member's rank will do, so that the search ends when one member is left.
template <bool by_mass>
__device__ __forceinline__ u64 select(const u64* list, unsigned n, u64 first, u64 last, u64 target, Digits& d) {
  const unsigned tid = threadIdx.x;
  for (;;) {
    const int shift = digit_shift(first, last);
    __syncthreads();
    d.weight[tid] = 0;
    d.count[tid] = 0;
    d.first = d.last = last;  // what a target beyond the members' weight would get
    __syncthreads();
    tally<by_mass>(list, n, first, last, shift, d);
    __syncthreads();
    u64 total;
    const u64 mine = d.weight[tid], before = block_scan(mine, d.warp, &total);
    if (before < target && target <= before + mine) {  // one thread
      d.first = first + ((u64)tid << shift);
      d.last = smaller(last, d.first + ((1ull << shift) - 1));
      d.target = target - before;
      if (d.count[tid] == 1) d.first = d.last;
    }
    __syncthreads();
    first = d.first;
    last = d.last;
    target = d.target;
    if (first == last) return last;
  }
}

// The same for a list that has a thread for each member: every one compares its member with all.
struct Members {
  u64 rank[kThreads], mass[kThreads], cut;
};
__device__ __forceinline__ u64 settle_few(const SamplingParams& o, const u64* list, unsigned n, const SampleCut& cut,
                                          Members& m) {
  const unsigned tid = threadIdx.x;
  const bool by_count = cut.k_first <= cut.k_last, by_mass = cut.p_first <= cut.p_last;
  const u64 mine = tid < n ? list[tid] : ~0ull, my_mass = by_mass && tid < n ? probability_mass(z_of(mine)) : 0;
  u64 last_kept = rank_of(o.min_z, (1u << kIdBits) - 1), kept_mass = cut.kept_mass;
  m.rank[tid] = mine;
  m.mass[tid] = my_mass;
  if (tid == 0) m.cut = by_count ? cut.k_last : cut.p_last;  // what a target beyond the members' weight gets
  __syncthreads();
  if (by_count) {
    u64 count = 0;
    for (unsigned j = 0; j < n; j++) count += m.rank[j] >= cut.k_first && m.rank[j] <= mine;
    if (mine >= cut.k_first && mine <= cut.k_last && count == (u64)cut.k_rank)
      m.cut = mine;  // one thread: ranks are different
    __syncthreads();
    const u64 k_cut = m.cut;
    last_kept = smaller(last_kept, k_cut);
    if (!by_mass) return last_kept;
    kept_mass = cut.k_mass_before;
    for (unsigned j = 0; j < n; j++) kept_mass += m.rank[j] >= cut.k_first && m.rank[j] <= k_cut ? m.mass[j] : 0;
    __syncthreads();
    if (tid == 0) m.cut = cut.p_last;
    __syncthreads();
  }
  if (by_mass) {
    const u64 target = top_p_target(kept_mass, o.top_p) - cut.p_mass_before;
    u64 mass = 0;
    for (unsigned j = 0; j < n; j++) mass += m.rank[j] >= cut.p_first && m.rank[j] <= mine ? m.mass[j] : 0;
    if (mine >= cut.p_first && mine <= cut.p_last && mass - my_mass < target && target <= mass) m.cut = mine;
    __syncthreads();
    last_kept = smaller(last_kept, m.cut);
  }
  return last_kept;
}

// The cut that a row's listed ids leave, min-p included. One block.
union SettleScratch {
  Digits digits;
  Members members;
};
__device__ __forceinline__ u64 settle(const SampleParams& p, const SamplingParams& o, const u64* list, unsigned n,
                                      const SampleCut& cut, SettleScratch& scratch) {
  if (n <= kThreads) return settle_few(o, list, n, cut, scratch.members);
  Digits& digits = scratch.digits;
  u64 last_kept = rank_of(o.min_z, (1u << kIdBits) - 1), kept_mass = cut.kept_mass;
  if (cut.k_first <= cut.k_last) {
    const u64 k_cut = select<false>(list, n, cut.k_first, cut.k_last, cut.k_rank, digits);
    last_kept = smaller(last_kept, k_cut);
    if (cut.p_first <= cut.p_last) {
      u64 mass = 0;
      for (unsigned i = threadIdx.x; i < n; i += kThreads)
        if (list[i] >= cut.k_first && list[i] <= k_cut) mass += probability_mass(z_of(list[i]));
      u64 total;
      block_scan(mass, digits.warp, &total);
      kept_mass = cut.k_mass_before + total;
    }
  }
  if (cut.p_first <= cut.p_last)
    last_kept = smaller(last_kept, select<true>(list, n, cut.p_first, cut.p_last,
                                                top_p_target(kept_mass, o.top_p) - cut.p_mass_before, digits));
  return last_kept;
}

// ---- several ranks: the listed ids of a row lie on all of them ----
// `select` for both cuts in turn, a digit a kernel: each rank tallies its own ids (sample_narrow), the exchange adds
// the digits up, and the next kernel goes on in the digit that holds the target. Everything but the tally is the same
// on all ranks.
enum { kTopK, kTopP, kSettled };  // SampleSearch::phase
constexpr u64 kLastRank = (1ull << (31 + kIdBits)) - 1;
struct Narrowing {
  SampleSearch search;
  u64 warp[kWarps];
};

__device__ __forceinline__ void enter_phase(SampleSearch& s, int phase, const SamplingParams& o, const SampleCut& cut) {
  if (phase == kTopK && cut.k_first > cut.k_last) {
    s.kept_mass = cut.kept_mass;
    phase = kTopP;
  }
  if (phase == kTopP && cut.p_first > cut.p_last) phase = kSettled;
  s.phase = phase;
  if (phase == kTopK) {
    s.first = cut.k_first;
    s.last = smaller(cut.k_last, kLastRank);
    s.target = cut.k_rank;
    s.kept_mass = cut.k_mass_before;
  }
  if (phase == kTopP) {
    s.first = cut.p_first;
    s.last = smaller(cut.p_last, kLastRank);
    s.target = top_p_target(s.kept_mass, o.top_p) - cut.p_mass_before;
  }
}

// One more digit of a row's search, into n.search. One block.
__device__ __forceinline__ void narrow(const SampleParams& p, const SamplingParams& o, int row, Narrowing& n) {
  const int tid = threadIdx.x;
  const SampleCut& cut = p.scratch->cut[row];
  SampleSearch& s = n.search;
  if (p.round == 0) {
    if (tid == 0) {
      s.last_kept = rank_of(o.min_z, (1u << kIdBits) - 1);
      enter_phase(s, kTopK, o, cut);
    }
    __syncthreads();
    return;
  }
  if (tid == 0) s = p.scratch->search[row];
  __syncthreads();
  const SampleSearch old = s;
  if (old.phase == kSettled) return;
  const bool by_mass = old.phase == kTopP;
  const u64 count = p.scratch->digits[row].count[tid], mass = p.scratch->digits[row].mass[tid],
            mine = by_mass ? mass : count;
  u64 total, total_mass;
  const u64 before = block_scan(mine, n.warp, &total),
            mass_before = block_scan(mass, n.warp, &total_mass);  // barriers: all have `old`
  const auto close = [&](u64 last, u64 kept) {
    s.last_kept = smaller(old.last_kept, last);
    s.kept_mass = old.kept_mass + kept;
    enter_phase(s, by_mass ? kSettled : kTopP, o, cut);
  };
  if (before < old.target && old.target <= before + mine) {  // one thread
    const int shift = digit_shift(old.first, old.last);
    s.first = old.first + ((u64)tid << shift);
    s.last = smaller(old.last, s.first + ((1ull << shift) - 1));
    s.target = old.target - before;
    s.kept_mass = old.kept_mass + mass_before;
    if (count == 1 || s.first == s.last) close(s.last, mass_before + mass);
  }
  if (tid == 0 && total < old.target) close(old.last, total_mass);
  __syncthreads();
}

// Finds the bins that hold a row's cuts, from its counts and masses. Each thread has 4 neighbouring bins. One block;
// `cut` is shared memory.
struct CutSearch {
  u64 warp[kWarps], k_mass_through;
  int k_bin, p_bin_first, p_bin_last;
};
__device__ __forceinline__ void find_cut(const SampleParams& p, const SamplingParams& o, int row, SampleCut& cut,
                                         CutSearch& search) {
  constexpr int kBins = SAMPLE_BINS / kThreads;
  static_assert(kBins == 4, "one quad of counts, two of masses");
  const int tid = threadIdx.x;
  const bool top_k = has_top_k(p, o), top_p = has_top_p(o);
  const uint4 counts = load_activations(reinterpret_cast<const uint4*>(p.scratch->bins[row].count) + tid);
  const uint4* masses = reinterpret_cast<const uint4*>(p.scratch->bins[row].mass) + 2 * tid;
  const uint4 low = load_activations(masses), high = load_activations(masses + 1);
  const u64 n[kBins] = {counts.x, counts.y, counts.z, counts.w};
  const u64 m[kBins] = {(u64)low.y << 32 | low.x, (u64)low.w << 32 | low.z, (u64)high.y << 32 | high.x,
                        (u64)high.w << 32 | high.z};
  u64 total = 0, m_before = 0;
  if (top_p) m_before = block_scan(m[0] + m[1] + m[2] + m[3], search.warp, &total);
  if (top_k) {
    u64 n_total, n_at = block_scan(n[0] + n[1] + n[2] + n[3], search.warp, &n_total), m_at = m_before;
#pragma unroll
    for (int b = 0; b < kBins; b++) {
      if (n_at < (u64)o.top_k && (u64)o.top_k <= n_at + n[b]) {  // one thread
        const bool whole = n_at + n[b] == (u64)o.top_k;          // the cut is the bin's end: nothing to settle
        search.k_bin = tid * kBins + b;
        search.k_mass_through = m_at + m[b];
        cut.k_rank = whole ? 0 : o.top_k - n_at;
        cut.k_mass_before = whole ? m_at + m[b] : m_at;
      }
      n_at += n[b];
      m_at += m[b];
    }
    __syncthreads();
  }
  const u64 mass_low = top_k ? cut.k_mass_before : total,
            mass_high = top_k ? search.k_mass_through : total;  // bounds of what top-k keeps
  if (top_p) {
    const u64 target_low = top_p_target(mass_low, o.top_p), target_high = top_p_target(mass_high, o.top_p);
    u64 m_at = m_before;
#pragma unroll
    for (int b = 0; b < kBins; b++) {
      if (m_at < target_low && target_low <= m_at + m[b]) {
        search.p_bin_first = tid * kBins + b;
        cut.p_mass_before = m_at;
      }
      if (m_at < target_high && target_high <= m_at + m[b]) search.p_bin_last = tid * kBins + b;
      m_at += m[b];
    }
    __syncthreads();
  }
  if (tid == 0) {
    const bool k_open = top_k && cut.k_rank != 0;
    const u64 k_sure = !top_k ? ~0ull : bin_start(k_open ? search.k_bin : search.k_bin + 1);
    cut.sure = top_p ? smaller(k_sure, bin_start(search.p_bin_first)) : k_sure;
    cut.k_first = k_open ? bin_start(search.k_bin) : 1;
    cut.k_last = k_open ? bin_start(search.k_bin + 1) - 1 : 0;
    cut.p_first = top_p ? bin_start(search.p_bin_first) : 1;
    cut.p_last = top_p ? bin_start(search.p_bin_last + 1) - 1 : 0;
    cut.kept_mass = mass_low;
  }
  __syncthreads();
}

}  // namespace
