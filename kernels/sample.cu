// Chooses the next tokens: for each row of a pass, logits -> penalties, bias -> temperature -> top-k, top-p, min-p ->
// noise -> one id; then accepts drafts while they equal the choice, tests the ends, and moves State on. The rules in
// f32 are those of src/decode/sample.rs, to the bit; numbers (noise, mass, keys) are in sample.cuh, the structs in
// params.h.
//
// A row's choice depends on its logits, its position and the tokens before it, never on width or grid: maxima and
// integer sums have no order.
//   l = logit with penalties, bias, ban     z = (l - max l) / T     g = noise of (seed, position, id)     choice =
//   argmax of z + g over the kept ids
// Filters. A rank is |z|'s bits << 20 | id: ranks ascend in (z descending, id ascending), all are different, and what
// top-k, top-p or min-p keeps is "all ranks up to a cut". Cuts are found exactly: sample_count adds up ids and mass in
// 1024 bins of ranks (64 to an octave of |z|); sample_choose finds the bins that hold a cut and lists the few ids in
// them; sample_settle selects the cut among those, each against all where there is a thread for each, else digit by
// digit. A flat row has all its ids in one bin: slower, but right.
//
//   sample_adjust   penalties, bias, bans, and the largest logit after them (without them the head's own maxima serve)
//   sample_count    top-k, top-p: the bins
//   sample_choose   a temperature: noise, and the choice among the ids that are kept for sure
//   sample_settle   top-k, top-p: the ids near the cuts
//   sample_accept   always: acceptance, ends, State, the record
// Several ranks, each with the logits of a part of the tokens: what a kernel found of a row is exchanged before the
// next one reads it, so that all ranks choose the same. `best` and `chosen` (maxima), bins and digits (sums) go over
// the link, logits never, and no digits once all cuts are found. sample_adjust then always runs, and sample_narrow,
// once a digit, finds the cuts among listed ids that lie on all ranks. With x for an exchange:
//   adjust x best, count x bins, choose, SAMPLE_ROUNDS times narrow x digits, settle x chosen, accept
// A kernel whose options are off returns at once, so that the chain of all five is right for every request; a graph
// made for a kind of request leaves out what it does not need (greedy: sample_accept alone). Kernels follow one another
// instead of counting arrivals: on an H200 an edge costs less than a fence and an atomic's way back. Split: grid
// (blocks a row, rows), each thread 4 quads of logits. At most 13 KB of shared memory.
#include "sample.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kQuads = 4;
static_assert(SAMPLE_SLICE <= kThreads * kQuads * 4 && SAMPLE_SLICE % 32 == 0, "a block's share of a row");
static_assert(SAMPLE_SLICE < 4096, "sums of 20-bit parts of the mass must stay below 2^32");

constexpr unsigned kInPrompt = 0x80000000u;

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
// State up to history_length.
__device__ __forceinline__ State load_state(const SampleParams& p) { return load_front<3>(p.state); }
__device__ __forceinline__ bool row_in_use(const SampleParams& p, const State& s, int row) {
  return !s.done && row < max(1, min(s.rows, p.width));
}

// The row's largest logit, in all threads. -inf or +inf: there is nothing to choose, and sample_accept ends the
// sequence.
__device__ __forceinline__ float row_max(const SampleParams& p, const SamplingParams& o, int row, u64* warp_word) {
  if (adjusts(o) || p.ranks > 1) return value_of(p.scratch->best[row]);
  return value_of(block_max(head_max(p.max_value, p.max_id, p.n_max, row, threadIdx.x, kThreads), warp_word));
}

// ---- a block's share of a row ----
struct Share {
  int first, end;  // quads
  __device__ explicit Share(const SampleParams& p) {
    const int n = (p.vocab + 3) / 4, per_block = (n + gridDim.x - 1) / gridDim.x;
    first = min((int)blockIdx.x * per_block, n);
    end = min(first + per_block, n);
#ifdef PLANT_OFF_BY_ONE
    end = max(first, end - 1);
#endif
  }
  __device__ int quad(int i) const { return first + i * kThreads + (int)threadIdx.x; }
};
struct Logits {
  float l[kQuads][4];
};
// What lies past the vocabulary reads as -inf.
__device__ __forceinline__ Logits load_share(const SampleParams& p, const Share& share) {
  const float* row = p.logits + (size_t)blockIdx.y * p.stride;
  const bool whole = ((p.stride | p.vocab) & 3) == 0;
  Logits x;
#pragma unroll
  for (int i = 0; i < kQuads; i++) {
    const int q = share.quad(i);
    if (q < share.end && whole) {
      const uint4 v = load_activations(reinterpret_cast<const uint4*>(row) + q);
      x.l[i][0] = __uint_as_float(v.x);
      x.l[i][1] = __uint_as_float(v.y);
      x.l[i][2] = __uint_as_float(v.z);
      x.l[i][3] = __uint_as_float(v.w);
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) x.l[i][e] = q < share.end && q * 4 + e < p.vocab ? row[q * 4 + e] : -INFINITY;
    }
  }
  return x;
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

constexpr int kRecordWords = 4;  // of every pass: RECORD_COUNT to RECORD_DRAFTS
// A pass that chooses nothing: its record says so. One thread.
__device__ __forceinline__ void record_idle_pass(State* s, u64* ring) {
  s->pass++;
  const unsigned words[] = {0, 0, (unsigned)s->reason, 0};
  for (int i = 0; i < kRecordWords; i++) write_record(ring, s->pass, i, words[i]);
}

}  // namespace

KERNEL(sample_adjust, SampleParams, kThreads) {
  pdl_launch_dependents();
  const SamplingParams o = load_options(p);
  pdl_wait();
  __shared__ u64 warp_word[kWarps];
  if (!adjusts(o)) {
    if (p.ranks == 1 || blockIdx.x != 0) return;
    const State s = load_state(p);
    const bool used = row_in_use(p, s, blockIdx.y);
    if (threadIdx.x == 0) p.scratch->in_use[blockIdx.y] = used;
    if (!used) return;
    const u64 best =
        block_max(head_max(p.max_value, p.max_id, p.n_max, blockIdx.y, threadIdx.x, kThreads, p.first_id), warp_word);
    if (threadIdx.x == 0) p.scratch->best[blockIdx.y] = best;
    return;
  }
  __shared__ int n_drafts, n_eos, draft[SAMPLE_ROWS], eos[16];  // those in this block's share, rarely any
  const int tid = threadIdx.x, row = blockIdx.y;
  const Share share(p);
  const Logits x = load_share(p, share);
  const State s = load_state(p);
  const bool used = row_in_use(p, s, row);
  if (p.ranks > 1 && blockIdx.x == 0 && tid == 0) p.scratch->in_use[row] = used;
  if (!used) return;
  const bool penalised = o.repetition_penalty != 1 || o.presence_penalty != 0 || o.frequency_penalty != 0;
  const bool too_early = s.n_output + row < o.min_tokens;
  if (tid == 0) n_drafts = n_eos = 0;  // the row's own drafts count as said
  __syncthreads();
  const auto mine = [&](int id) { return id >= p.first_id + share.first * 4 && id < p.first_id + share.end * 4; };
  if (tid < row && mine(p.state->drafts[tid])) draft[atomicAdd(&n_drafts, 1)] = p.state->drafts[tid];
  if (too_early && tid < p.options->n_eos && mine(p.options->eos[tid])) eos[atomicAdd(&n_eos, 1)] = p.options->eos[tid];
  __syncthreads();
  u64 best = 0;
#pragma unroll
  for (int i = 0; i < kQuads; i++) {
    const int q = share.quad(i);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int column = q * 4 + e, id = p.first_id + column;
      if (q >= share.end || column >= p.vocab) continue;
      float l = x.l[i][e];
      if (penalised) {
        const unsigned c = p.counts[id];
        unsigned said = c & ~kInPrompt;
        for (int d = 0; d < n_drafts; d++) said += draft[d] == id;
        if (said || c & kInPrompt) l = l > 0 ? __fdiv_rn(l, o.repetition_penalty) : __fmul_rn(l, o.repetition_penalty);
        if (said) l = __fsub_rn(__fsub_rn(l, o.presence_penalty), __fmul_rn((float)said, o.frequency_penalty));
      }
      if (o.has_bias) l = __fadd_rn(l, p.bias[id]);
      for (int d = 0; d < n_eos; d++)
        if (eos[d] == id) l = -INFINITY;
      p.logits[(size_t)row * p.stride + column] = l;
      best = larger(best, preference(l < INFINITY ? l : INFINITY, id));  // NaN shows as +inf
    }
  }
  best = block_max(best, warp_word);
  if (tid == 0) atomicMax(&p.scratch->best[row], best);
}

KERNEL(sample_count, SampleParams, kThreads) {
  pdl_launch_dependents();
  const SamplingParams o = load_options(p);
  __shared__ unsigned count[SAMPLE_BINS], low[SAMPLE_BINS],
      high[SAMPLE_BINS];  // mass in two parts of 20 bits and a bit more
  __shared__ u64 warp_word[kWarps];
  const int tid = threadIdx.x, row = blockIdx.y;
  for (int b = tid; b < SAMPLE_BINS; b += kThreads) count[b] = low[b] = high[b] = 0;
  pdl_wait();
  if (!filters(p, o)) return;
  const bool top_k = has_top_k(p, o), top_p = has_top_p(o);
  const Share share(p);
  const Logits x = load_share(p, share);
  const State s = load_state(p);
  if (!row_in_use(p, s, row)) return;
  const float best = row_max(p, o, row, warp_word);
  if (!(fabsf(best) < INFINITY)) return;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kQuads; i++) {
    const int q = share.quad(i);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      if (q >= share.end || q * 4 + e >= p.vocab) continue;
      const float z = __fdiv_rn(__fsub_rn(x.l[i][e], best), o.temperature);
      const int bin = bin_of(z);
      if (top_k) atomicAdd(&count[bin], 1u);
      if (top_p) {
        const u64 mass = probability_mass(z);
        if ((unsigned)mass & 0xfffff) atomicAdd(&low[bin], (unsigned)mass & 0xfffff);
        if (mass >> 20) atomicAdd(&high[bin], (unsigned)(mass >> 20));
      }
    }
  }
#ifndef PLANT_MISSING_BARRIER
  __syncthreads();
#endif
  for (int b = tid; b < SAMPLE_BINS; b += kThreads) {
    if (count[b]) atomicAdd(&p.scratch->bins[row].count[b], count[b]);
    if (low[b] | high[b]) atomicAdd(&p.scratch->bins[row].mass[b], ((u64)high[b] << 20) + low[b]);
  }
}

KERNEL(sample_choose, SampleParams, kThreads, 3) {
  pdl_launch_dependents();
  const SamplingParams o = load_options(p);
  pdl_wait();
  if (o.temperature == 0) return;
  __shared__ CutSearch search;
  __shared__ SampleCut cut;
  __shared__ u64 list_at;
  const int tid = threadIdx.x, row = blockIdx.y;
  const Share share(p);
  const Logits x = load_share(p, share);
  const State s = load_state(p);
  if (!row_in_use(p, s, row)) return;
  const float max_logit = row_max(p, o, row, search.warp);
  if (!(fabsf(max_logit) < INFINITY)) return;
  u64 sure = ~0ull, k_first = 1, k_last = 0, p_first = 1, p_last = 0;
  if (filters(p, o)) {
    find_cut(p, o, row, cut, search);
    sure = cut.sure;
    k_first = cut.k_first;
    k_last = cut.k_last;
    p_first = cut.p_first;
    p_last = cut.p_last;
    if (blockIdx.x == 0 && tid == 0) p.scratch->cut[row] = cut;
  }
  const u64 min_p_cut = rank_of(o.min_z, (1u << kIdBits) - 1);
  const int position = s.length + row + 1;

  // Somebody scores `bound`: the id with the largest logit is kept, has z = 0, and noise is never below -3.14. An id
  // can beat a score only if e < exp(z - score), where e = -ln(1 - v) > v: most ids are ruled out by their v, without
  // the two logarithms. The test is loose by 1 %, far more than exp2f and the roundings are off. NaN fails it.
  float bound = -3.14f;
  u64 best = 0;
  unsigned listed = 0;  // bit per element of this thread
#pragma unroll
  for (int i = 0; i < kQuads; i++) {
    const int q = share.quad(i);
    if (q >= share.end) continue;
    unsigned kept = 0;
    float z[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int column = q * 4 + e;
      z[e] = __fdiv_rn(__fsub_rn(x.l[i][e], max_logit), o.temperature);
      const u64 rank = rank_of(z[e], p.first_id + column);
      if (column >= p.vocab) continue;
      if (rank < sure) kept |= (unsigned)(rank <= min_p_cut) << e;
      else if ((rank >= k_first && rank <= k_last) || (rank >= p_first && rank <= p_last)) listed |= 1u << (i * 4 + e);
    }
    if (!kept) continue;
    const uint4 w = noise_bits(o.seed, position, p.first_id / 4 + q);
    const unsigned bits[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float v = (float)bits[e] * (1.0f / 4294967296.0f);
      if (!(kept >> e & 1) || !(v < 1.01f * exp2f((z[e] - bound) * 1.44269504f))) continue;
      const float score = __fadd_rn(z[e], noise(bits[e]));
      bound = fmaxf(bound, score);
      best = larger(best, preference(score, p.first_id + q * 4 + e));
    }
  }
  best = block_max(best, search.warp);
  if (tid == 0 && best) atomicMax(&p.scratch->chosen[row], best);

  if (__syncthreads_or(listed != 0)) {  // one piece of the row's list for the block; its order does not matter
    u64 total;
    unsigned at = (unsigned)block_scan(__popc(listed), search.warp, &total);
    if (tid == 0) list_at = atomicAdd(&p.scratch->n_listed[row], (unsigned)total);
    __syncthreads();
    u64* to = p.list + (size_t)row * p.vocab + list_at;
#pragma unroll
    for (int i = 0; i < kQuads * 4; i++)
      if (listed >> i & 1)
        to[at++] = rank_of(__fdiv_rn(__fsub_rn(x.l[i / 4][i % 4], max_logit), o.temperature),
                           p.first_id + share.quad(i / 4) * 4 + i % 4);
  }
}

KERNEL(sample_narrow, SampleParams, kThreads, 2) {
  pdl_launch_dependents();
  const SamplingParams o = load_options(p);
  pdl_wait();
  if (!filters(p, o)) return;
  __shared__ Narrowing narrowing;
  __shared__ Digits digits;
  const int tid = threadIdx.x, row = blockIdx.y;
  const State s = load_state(p);
  if (!row_in_use(p, s, row)) {
    if (tid == 0) p.scratch->open[row] = 0;
    return;
  }
  digits.weight[tid] = 0;
  digits.count[tid] = 0;
  narrow(p, o, row, narrowing);
  const SampleSearch& search = narrowing.search;
  if (search.phase != kSettled) {
    const u64 first = search.first, last = search.last;
    tally<true>(p.list + (size_t)row * p.vocab, p.scratch->n_listed[row], first, last, digit_shift(first, last),
                digits);
  }
  __syncthreads();
  p.scratch->digits[row].mass[tid] = digits.weight[tid];
  p.scratch->digits[row].count[tid] = digits.count[tid];
  if (tid == 0) {
    p.scratch->search[row] = search;
    p.scratch->open[row] = search.phase != kSettled;
  }
}

KERNEL(sample_settle, SampleParams, kThreads, 2) {
  pdl_launch_dependents();
  const SamplingParams o = load_options(p);
  pdl_wait();
  if (!filters(p, o)) return;
  __shared__ SettleScratch shared;
  __shared__ Narrowing narrowing;
  __shared__ u64 warp_word[kWarps];
  const int tid = threadIdx.x, row = blockIdx.y;
  const unsigned n = p.scratch->n_listed[row];
  const SampleCut cut = p.scratch->cut[row];
  const State s = load_state(p);
  if (!row_in_use(p, s, row)) return;
  for (int b = tid; b < SAMPLE_BINS; b += kThreads) {
    p.scratch->bins[row].count[b] = 0;
    p.scratch->bins[row].mass[b] = 0;
  }
  if (n == 0) return;
  const u64* list = p.list + (size_t)row * p.vocab;
  u64 last_kept;
  if (p.ranks > 1) {
    narrow(p, o, row, narrowing);
    last_kept = narrowing.search.last_kept;
  } else {
    last_kept = settle(p, o, list, n, cut, shared);
  }
  u64 best = 0;
  for (unsigned i = tid; i < n; i += kThreads) {
    const u64 rank = list[i];
    if (rank > last_kept) continue;
    const unsigned id = (unsigned)rank & ((1u << kIdBits) - 1);
    const float score = __fadd_rn(z_of(rank), noise(noise_bits_of(o.seed, s.length + row + 1, id)));
    if (score == score) best = larger(best, preference(score, id));  // a NaN among the logits is no choice
  }
  best = block_max(best, warp_word);
  if (tid == 0) {
    if (best) atomicMax(&p.scratch->chosen[row], best);
    p.scratch->n_listed[row] = 0;
  }
}

KERNEL(sample_accept, SampleParams, kThreads) {
  pdl_launch_dependents();
  __shared__ State s;
  __shared__ SamplingParams o;
  __shared__ u64 key[SAMPLE_ROWS];
  __shared__ int token[SAMPLE_ROWS], end_of_text[SAMPLE_ROWS], n_emitted;
  constexpr int kStateWords = sizeof(State) / 4, kOptionWords = sizeof(SamplingParams) / 4;
  const int tid = threadIdx.x;
  if (tid < kOptionWords) reinterpret_cast<int*>(&o)[tid] = reinterpret_cast<const int*>(p.options)[tid];
  if (tid < SAMPLE_ROWS) end_of_text[tid] = 0;
  __syncthreads();
  pdl_wait();
  if (tid < kStateWords) reinterpret_cast<int*>(&s)[tid] = reinterpret_cast<const int*>(p.state)[tid];
  const bool greedy = o.temperature == 0, from_head = greedy && !adjusts(o) && p.ranks == 1;
  if (from_head) {
    for (int row = tid >> 5; row < p.width; row += kWarps) {
      const u64 best = warp_max(head_max(p.max_value, p.max_id, p.n_max, row, tid & 31, 32));
      if ((tid & 31) == 0) key[row] = best;
    }
  } else if (tid < p.width) {
    key[tid] = greedy ? p.scratch->best[tid] : p.scratch->chosen[tid];
    p.scratch->best[tid] = p.scratch->chosen[tid] = 0;
  }
  __syncthreads();
  if (s.done) {
    if (tid == 0) record_idle_pass(p.state, p.ring);
    return;
  }
  const int n_rows = max(1, min(s.rows, p.width)), first = s.history_length;
  if (tid < n_rows * 16 && tid % 16 < o.n_eos && o.eos[tid % 16] == (int)id_of(key[tid / 16]))
    end_of_text[tid / 16] = 1;
  if (tid < n_rows) token[tid] = (int)id_of(key[tid]);
  __syncthreads();
  if (tid == 0) {
    const int n_drafts = n_rows - 1;
    int matching = 0, n = 0, reason = STOP_NONE;
    while (matching < n_drafts && token[matching] == s.drafts[matching]) matching++;
    while (n <= matching && reason == STOP_NONE) {  // the earliest end wins
      if (key[n] == 0 || !(fabsf(value_of(key[n])) < INFINITY)) {
        reason = STOP_NO_CHOICE;
        break;
      }
      const bool ends = end_of_text[n++];
      if (ends) reason = STOP_EOS;
      else if (s.n_output + n >= o.max_tokens) reason = STOP_LENGTH;
      else if (s.history_length + n >= o.context) reason = STOP_CONTEXT;
    }
    s.length += n;
    s.rows = 1;
    if (n > 0) s.root = token[n - 1];
    s.done = reason != STOP_NONE;
    s.reason = reason;
    s.accepted = min(matching, n);
    s.emitted = n;
    s.n_drafts = 0;
    s.n_output += n;
    s.history_length += n;
    s.ngram_match = 0;
    s.pass++;
    for (int i = 0; i < n; i++) s.sampled[i] = token[i];
    n_emitted = n;
  }
  __syncthreads();
  if (tid < kStateWords) reinterpret_cast<int*>(p.state)[tid] = reinterpret_cast<const int*>(&s)[tid];
  if (tid < n_emitted) {
    p.history[first + tid] = token[tid];
    atomicAdd(&p.counts[token[tid]], 1u);
    write_record(p.ring, s.pass, RECORD_TOKENS + tid, (unsigned)token[tid]);
  }
  if (tid >= 32 && tid < 32 + kRecordWords) {  // another warp writes the other words
    const unsigned words[] = {(unsigned)s.emitted, (unsigned)s.accepted, (unsigned)s.reason, (unsigned)(n_rows - 1)};
    unsigned word = words[0];
#pragma unroll
    for (int i = 1; i < kRecordWords; i++) word = tid - 32 == i ? words[i] : word;
    write_record(p.ring, s.pass, tid - 32, word);
  }
}

// A chunk of a prompt went through that is not the last: its rows are in the cache, nothing is chosen.
KERNEL(prefill_advance, AdvanceParams, 32) {
  pdl_launch_dependents();
  pdl_wait();
  if (threadIdx.x != 0) return;
  if (!p.state->done) p.state->length += p.state->rows;
  record_idle_pass(p.state, p.ring);
}
