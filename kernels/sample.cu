// Chooses the next tokens: for each row of a pass, logits -> penalties, bias -> temperature -> top-k, top-p, min-p -> noise -> one id; then accepts
// drafts while they equal the choice, tests the ends, and moves State on. The rules in f32 are those of src/decode/sample.rs, to the bit; numbers
// (noise, mass, keys) are in sample.cuh, the structs in params.h.
//
// A row's choice depends on its logits, its position and the tokens before it, never on width or grid: maxima and integer sums have no order.
//   l = logit with penalties, bias, ban     z = (l - max l) / T     g = noise of (seed, position, id)     choice = argmax of z + g over the kept ids
// Filters. A rank is |z|'s bits << 20 | id: ranks ascend in (z descending, id ascending), all are different, and what top-k, top-p or min-p keeps is "all
// ranks up to a cut". Cuts are found exactly: sample_cut counts ids and mass in 1024 bins of ranks (64 to an octave of |z|) and finds the bins that hold
// a cut; sample_choose lists the few ids in those bins, and the last block of a row selects the cut among them digit by digit. A flat row has all its
// ids in one bin: slower, but right.
//
//   sample_adjust   penalties, bias, bans; the largest logit. At temperature 0 that is the choice, and its last block accepts.
//   sample_cut      only with top-k or top-p; otherwise returns at once
//   sample_choose   only at a temperature; noise and choice; its last block accepts
// A graph for temperature 0 needs sample_adjust alone, one without top-k and top-p needs no sample_cut; the full chain does for all options.
// Split: grid (blocks a row, rows), 256 threads, each 4 quads of logits, loaded before anything else is looked at. Shared memory at most 13 KB.
#include "sample.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kQuads = 4;
static_assert(SAMPLE_SLICE <= kThreads * kQuads * 4 && SAMPLE_SLICE % 32 == 0, "a block's share of a row");
static_assert(SAMPLE_SLICE < 4096, "sums of 20-bit parts of the mass must stay below 2^32");

constexpr unsigned kInPrompt = 0x80000000u;

// What a kernel needs of State and options, requested together with its logits: one trip to memory before the first decision.
struct Control {
  State s;                                                      // up to history_length
  SamplingParams o;                                             // up to min_tokens
  __device__ explicit Control(const SampleParams& p) : s(load_front<3>(p.state)), o(load_front<3>(p.options)) {}
  __device__ int n_rows(const SampleParams& p) const { return p.prefill ? 1 : max(1, min(s.rows, (int)gridDim.y)); }
  // Position of the token that row `row` chooses.
  __device__ int position(const SampleParams& p, int row) const { return s.length + (p.prefill ? s.rows : row + 1); }
  __device__ bool top_k(const SampleParams& p) const { return o.top_k > 0 && o.top_k < p.vocab; }
  __device__ bool top_p() const { return o.top_p < 1ull << 32; }
};

// ---- a block's share of a row ----
struct Share {
  int first, end;                                               // quads
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
struct Logits { float l[kQuads][4]; };
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
      x.l[i][0] = __uint_as_float(v.x); x.l[i][1] = __uint_as_float(v.y); x.l[i][2] = __uint_as_float(v.z); x.l[i][3] = __uint_as_float(v.w);
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) x.l[i][e] = q < share.end && q * 4 + e < p.vocab ? row[q * 4 + e] : -INFINITY;
    }
  }
  return x;
}

// ---- ranks ----
constexpr int kIdBits = 20, kBinShift = 17, kBinBase = 121 << 6;  // a bin is |z|'s exponent and 6 bits; bin 0 starts at 0, bin 1 at 2^-6, the last is open
__device__ __forceinline__ u64 rank_of(float z, unsigned id) { return (u64)__float_as_uint(fabsf(z)) << kIdBits | id; }
__device__ __forceinline__ float z_of(u64 rank) { return -__uint_as_float((unsigned)(rank >> kIdBits)); }
__device__ __forceinline__ int bin_of(float z) { return min(max((int)(__float_as_uint(fabsf(z)) >> kBinShift) - kBinBase, 0), SAMPLE_BINS - 1); }
__device__ __forceinline__ u64 bin_start(int bin) { return bin == 0 ? 0 : bin == SAMPLE_BINS ? ~0ull : (u64)(bin + kBinBase) << (kBinShift + kIdBits); }
// The mass that top-p must reach, of a kept mass: at least 1, so that at least one id stays. The product is exact.
__device__ __forceinline__ u64 top_p_target(u64 kept_mass, u64 top_p) {
  const unsigned __int128 product = (unsigned __int128)kept_mass * top_p;
  const u64 target = (u64)(product >> 32) + ((unsigned)product != 0);
  return target ? target : 1;
}

// ---- end of a pass: accept, test the ends, move State on, write the record; one block ----
__device__ __forceinline__ void accept(const SampleParams& p, const u64* keys, int n_rows) {
  __shared__ State s;
  __shared__ SamplingParams o;
  __shared__ int token[SAMPLE_ROWS], end_of_text[SAMPLE_ROWS], banned[SAMPLE_ROWS], n_emitted;
  const int tid = threadIdx.x;
  constexpr int kStateWords = sizeof(State) / 4, kOptionWords = sizeof(SamplingParams) / 4;
  static_assert(SAMPLE_ROWS + kStateWords + kOptionWords <= kThreads, "one load a thread");
  if (tid < n_rows) {
    token[tid] = (int)id_of(keys[tid]);
    banned[tid] = value_of(p.scratch->best[tid]) == -INFINITY;
    end_of_text[tid] = 0;
  } else if (const int i = tid - SAMPLE_ROWS; i >= 0 && i < kStateWords) {
    reinterpret_cast<int*>(&s)[i] = reinterpret_cast<const int*>(p.state)[i];
  } else if (const int j = tid - SAMPLE_ROWS - kStateWords; j >= 0 && j < kOptionWords) {
    reinterpret_cast<int*>(&o)[j] = reinterpret_cast<const int*>(p.options)[j];
  }
#ifndef PLANT_MISSING_BARRIER
  __syncthreads();
#endif
  const int first = s.history_length;                           // read by all before thread 0 moves it
  if (tid < n_rows * 16 && tid % 16 < o.n_eos && o.eos[tid % 16] == token[tid / 16]) end_of_text[tid / 16] = 1;
  __syncthreads();
  if (tid == 0) {
    const int n_drafts = n_rows - 1;
    const unsigned not_finite = p.scratch->not_finite;
    int matching = 0, n = 0, reason = STOP_NONE;
    while (matching < n_drafts && token[matching] == s.drafts[matching]) matching++;
    while (n <= matching && reason == STOP_NONE) {              // the earliest end wins
      if (not_finite >> n & 1) { reason = STOP_NOT_FINITE; break; }
      if (banned[n]) { reason = STOP_ALL_BANNED; break; }
      const bool ends = end_of_text[n++];
      if (ends) reason = STOP_EOS;
      else if (s.n_output + n >= o.max_tokens) reason = STOP_LENGTH;
      else if (s.history_length + n >= o.context) reason = STOP_CONTEXT;
    }
    s.length += p.prefill ? s.rows : n;
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
  const unsigned words[] = {(unsigned)s.emitted, (unsigned)s.accepted, (unsigned)s.reason, (unsigned)s.length, (unsigned)first, (unsigned)(n_rows - 1)};
  if (tid == 0)
    for (int i = 0; i < 6; i++) write_record(p.ring, s.pass, i, words[i]);
  if (tid < SAMPLE_ROWS) p.scratch->best[tid] = p.scratch->chosen[tid] = 0;
  if (tid == 0) p.scratch->not_finite = 0;
}

// A pass that chooses nothing: its record says so. One thread.
__device__ void record_idle_pass(State* s, u64* ring) {
  s->pass++;
  const unsigned words[] = {0, 0, (unsigned)s->reason, (unsigned)s->length, (unsigned)s->history_length, 0};
  for (int i = 0; i < 6; i++) write_record(ring, s->pass, i, words[i]);
}

// ---- select among listed ids ----
struct Digits { u64 weight[256]; unsigned count[256]; u64 first, last, target; u64 warp[kWarps]; };
// The smallest rank c such that list members in [first, c] weigh at least `target` together; a member weighs 1, or its mass. Any c up to the next member's
// rank will do, so that the search ends when one member is left. A thread adds up runs of equal digits first: a flat row would otherwise queue at one word.
template <bool by_mass> __device__ __forceinline__ u64 select(const u64* list, unsigned n, u64 first, u64 last, u64 target, Digits& d) {
  const unsigned tid = threadIdx.x;
  for (;;) {
    int shift = 0;
    while ((last - first) >> shift > 255) shift++;
    __syncthreads();
    d.weight[tid] = 0;
    d.count[tid] = 0;
    d.first = d.last = last;                                    // what a target beyond the members' weight would get
    __syncthreads();
    unsigned run = 0, run_count = 0;
    u64 run_weight = 0;
    for (unsigned i = tid; i < n; i += kThreads) {
      const u64 rank = list[i];
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
    if (run_count) {
      atomicAdd(&d.weight[run], run_weight);
      atomicAdd(&d.count[run], run_count);
    }
    __syncthreads();
    u64 total;
    const u64 mine = d.weight[tid], before = block_scan(mine, d.warp, &total);
    if (before < target && target <= before + mine) {           // one thread
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

// Settles a row's cut among its listed ids and returns the best key among those that stay. One block.
__device__ __forceinline__ u64 choose_listed(const SampleParams& p, const u64* list, unsigned n, u64 min_p_cut, int position) {
  __shared__ Digits digits;
  const SamplingParams& o = *p.options;
  const SampleCut cut = p.scratch->cut[blockIdx.y];
  u64 last_kept = min_p_cut, kept_mass = cut.kept_mass;
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
    last_kept = smaller(last_kept, select<true>(list, n, cut.p_first, cut.p_last, top_p_target(kept_mass, o.top_p) - cut.p_mass_before, digits));
  u64 best = 0;
  for (unsigned i = threadIdx.x; i < n; i += kThreads) {
    const u64 rank = list[i];
    if (rank > last_kept) continue;
    const unsigned id = (unsigned)rank & ((1u << kIdBits) - 1);
    best = larger(best, preference(__fadd_rn(z_of(rank), noise(noise_bits_of(o.seed, position, id))), id));
  }
  return block_max(best, digits.warp);
}

}  // namespace

KERNEL(sample_adjust, SampleParams, kThreads) {
  pdl_launch_dependents();
  pdl_wait();
  __shared__ u64 warp_best[kWarps];
  __shared__ unsigned flag;
  __shared__ int n_drafts, n_eos, draft[SAMPLE_ROWS], eos[16];   // those in this block's share, rarely any
  const int tid = threadIdx.x, row = blockIdx.y;
  const Share share(p);
  const Logits x = load_share(p, share);
  const Control control(p);
  const SamplingParams& o = control.o;
  if (control.s.done) {
    if (blockIdx.x == 0 && row == 0 && tid == 0) record_idle_pass(p.state, p.ring);
    return;
  }
  const int n_rows = control.n_rows(p);
  if (row >= n_rows) return;
  const bool penalised = o.repetition_penalty != 1 || o.presence_penalty != 0 || o.frequency_penalty != 0;
  const bool too_early = control.s.n_output + row < o.min_tokens;
  const bool adjusted = penalised || o.has_bias || too_early;
  if (adjusted) {                                               // the row's own drafts count as said; a share without them takes no notice
    if (tid == 0) n_drafts = n_eos = 0;
    __syncthreads();
    const auto mine = [&](int id) { return id >= share.first * 4 && id < share.end * 4; };
    if (tid < row && mine(p.state->drafts[tid])) draft[atomicAdd(&n_drafts, 1)] = p.state->drafts[tid];
    if (too_early && tid < p.options->n_eos && mine(p.options->eos[tid])) eos[atomicAdd(&n_eos, 1)] = p.options->eos[tid];
    __syncthreads();
  }
  u64 best = 0;
  bool not_finite = false;
#pragma unroll
  for (int i = 0; i < kQuads; i++) {
    const int q = share.quad(i);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int id = q * 4 + e;
      if (q >= share.end || id >= p.vocab) continue;
      float l = x.l[i][e];
      if (adjusted) {
        if (penalised) {
          const unsigned c = p.counts[id];
          unsigned said = c & ~kInPrompt;
          for (int d = 0; d < n_drafts; d++) said += draft[d] == id;
          if (said || c & kInPrompt) l = l > 0 ? __fdiv_rn(l, o.repetition_penalty) : __fmul_rn(l, o.repetition_penalty);
          if (said) l = __fsub_rn(__fsub_rn(l, o.presence_penalty), __fmul_rn((float)said, o.frequency_penalty));
        }
        if (o.has_bias) l = __fadd_rn(l, p.bias[id]);
        for (int d = 0; too_early && d < n_eos; d++)
          if (eos[d] == id) l = -INFINITY;
      }
      const bool bad = !(l < INFINITY);                         // NaN or +inf; the kernels after this one see none
      if (bad) l = -INFINITY;
      not_finite |= bad;
      if (adjusted || bad) p.logits[(size_t)row * p.stride + id] = l;
      best = larger(best, preference(l, id));
    }
  }
  if (not_finite) atomicOr(&p.scratch->not_finite, 1u << row);
  best = block_max(best, warp_best);
  if (tid == 0) atomicMax(&p.scratch->best[row], best);
  if (o.temperature != 0) return;
  if (last_to_arrive(&p.scratch->arrivals, gridDim.x * n_rows, &flag)) accept(p, p.scratch->best, n_rows);
}

KERNEL(sample_cut, SampleParams, kThreads) {
  pdl_launch_dependents();
  pdl_wait();
  __shared__ unsigned count[SAMPLE_BINS], low[SAMPLE_BINS], high[SAMPLE_BINS];   // mass in two parts of 20 bits and a bit more
  __shared__ u64 warp_sum[kWarps];
  __shared__ unsigned flag;
  __shared__ int k_bin, p_bin_first, p_bin_last;
  __shared__ u64 k_rank, k_mass_before, k_mass_through, p_mass_before;
  const int tid = threadIdx.x, row = blockIdx.y;
  const Share share(p);
  const Logits x = load_share(p, share);
  const Control control(p);
  const SamplingParams& o = control.o;
  const float best = value_of(p.scratch->best[row]);
  const bool top_k = control.top_k(p), top_p = control.top_p();
  if (o.temperature == 0 || !(top_k || top_p) || control.s.done || row >= control.n_rows(p)) return;
  if (best == -INFINITY) return;                                // all banned; accept ends the sequence
  for (int b = tid; b < SAMPLE_BINS; b += kThreads) count[b] = low[b] = high[b] = 0;
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
  __syncthreads();
  for (int b = tid; b < SAMPLE_BINS; b += kThreads) {
    if (count[b]) atomicAdd(&p.scratch->count[row][b], count[b]);
    if (low[b] | high[b]) atomicAdd(&p.scratch->mass[row][b], ((u64)high[b] << 20) + low[b]);
  }
  if (!last_to_arrive(&p.scratch->row_arrivals[row], gridDim.x, &flag)) return;

  // The row is counted: find the bins that hold the cuts. A thread has 4 neighbouring bins.
  constexpr int kBins = SAMPLE_BINS / kThreads;
  u64 n[kBins], m[kBins], n_sum = 0, m_sum = 0, total;
#pragma unroll
  for (int b = 0; b < kBins; b++) {
    unsigned& counted = p.scratch->count[row][tid * kBins + b];
    u64& mass = p.scratch->mass[row][tid * kBins + b];
    n_sum += n[b] = counted;
    m_sum += m[b] = mass;
    counted = 0;
    mass = 0;
  }
  const u64 n_before = block_scan(n_sum, warp_sum, &total), m_before = block_scan(m_sum, warp_sum, &total);
  if (top_k) {
    u64 n_at = n_before, m_at = m_before;
#pragma unroll
    for (int b = 0; b < kBins; b++) {
      if (n_at < (u64)o.top_k && (u64)o.top_k <= n_at + n[b]) {
        const bool whole = n_at + n[b] == (u64)o.top_k;         // the cut is the bin's end: nothing to settle
        k_bin = tid * kBins + b;
        k_rank = whole ? 0 : o.top_k - n_at;
        k_mass_before = whole ? m_at + m[b] : m_at;
        k_mass_through = m_at + m[b];
      }
      n_at += n[b];
      m_at += m[b];
    }
    __syncthreads();
  }
  const u64 mass_low = top_k ? k_mass_before : total, mass_high = top_k ? k_mass_through : total;   // bounds of what top-k keeps
  if (top_p) {
    const u64 target_low = top_p_target(mass_low, o.top_p), target_high = top_p_target(mass_high, o.top_p);
    u64 m_at = m_before;
#pragma unroll
    for (int b = 0; b < kBins; b++) {
      if (m_at < target_low && target_low <= m_at + m[b]) {
        p_bin_first = tid * kBins + b;
        p_mass_before = m_at;
      }
      if (m_at < target_high && target_high <= m_at + m[b]) p_bin_last = tid * kBins + b;
      m_at += m[b];
    }
    __syncthreads();
  }
  if (tid == 0) {
    SampleCut& cut = p.scratch->cut[row];
    const bool k_open = top_k && k_rank != 0;
    cut.sure = !top_k ? ~0ull : bin_start(k_open ? k_bin : k_bin + 1);
    cut.k_first = k_open ? bin_start(k_bin) : 1;
    cut.k_last = k_open ? bin_start(k_bin + 1) - 1 : 0;
    cut.k_rank = k_open ? k_rank : 0;
    cut.k_mass_before = top_k ? k_mass_before : 0;
    if (top_p) cut.sure = smaller(cut.sure, bin_start(p_bin_first));
    cut.p_first = top_p ? bin_start(p_bin_first) : 1;
    cut.p_last = top_p ? bin_start(p_bin_last + 1) - 1 : 0;
    cut.p_mass_before = top_p ? p_mass_before : 0;
    cut.kept_mass = mass_low;
  }
}

KERNEL(sample_choose, SampleParams, kThreads, 3) {
  pdl_launch_dependents();
  pdl_wait();
  __shared__ u64 warp_word[kWarps], list_at;
  __shared__ unsigned flag;
  const int tid = threadIdx.x, row = blockIdx.y;
  const Share share(p);
  const Logits x = load_share(p, share);
  const Control control(p);
  const SamplingParams& o = control.o;
  SampleCut cut = load_front<3>(&p.scratch->cut[row]);
  const u64 best_logit = p.scratch->best[row];
  const int n_rows = control.n_rows(p);
  if (o.temperature == 0 || control.s.done || row >= n_rows) return;
  if (!control.top_k(p) && !control.top_p()) {                  // sample_cut had nothing to do
    cut.sure = ~0ull;
    cut.k_first = cut.p_first = 1;
    cut.k_last = cut.p_last = 0;
  }
  const float max_logit = value_of(best_logit);
  const bool all_banned = max_logit == -INFINITY;               // nothing to choose; accept ends the sequence
  const u64 min_p_cut = rank_of(o.min_z, (1u << kIdBits) - 1);
  const int position = control.position(p, row);

  // The id with the largest logit is always kept, with z = 0. Another can win only if e < exp(z - its score), where e = -ln(1 - v) > v: most ids are
  // ruled out by their v, without the two logarithms. The bound is loose by 1 %, far more than exp2f and the roundings are off.
  float bound = noise(noise_bits_of(o.seed, position, id_of(best_logit)));
  u64 best = 0;
  unsigned listed = 0;                                          // bit per element of this thread
#pragma unroll
  for (int i = 0; i < kQuads; i++) {
    const int q = share.quad(i);
    if (q >= share.end || all_banned) continue;
    unsigned kept = 0;
    float z[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int id = q * 4 + e;
      z[e] = __fdiv_rn(__fsub_rn(x.l[i][e], max_logit), o.temperature);
      const u64 rank = rank_of(z[e], id);
      if (id >= p.vocab) continue;
      if (rank < cut.sure) kept |= (unsigned)(rank <= min_p_cut) << e;
      else if ((rank >= cut.k_first && rank <= cut.k_last) || (rank >= cut.p_first && rank <= cut.p_last)) listed |= 1u << (i * 4 + e);
    }
    if (!kept) continue;
    const uint4 w = noise_bits(o.seed, position, q);
    const unsigned bits[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      if (!(kept >> e & 1)) continue;
      const float v = (float)bits[e] * (1.0f / 4294967296.0f);
      if (v >= 1.01f * exp2f((z[e] - bound) * 1.44269504f)) continue;
      const float score = __fadd_rn(z[e], noise(bits[e]));
      bound = fmaxf(bound, score);
      best = larger(best, preference(score, q * 4 + e));
    }
  }
  best = block_max(best, warp_word);
  if (tid == 0 && best) atomicMax(&p.scratch->chosen[row], best);

  if (__syncthreads_or(listed != 0)) {                          // one piece of the row's list for the block; its order does not matter
    u64 total;
    unsigned at = (unsigned)block_scan(__popc(listed), warp_word, &total);
    if (tid == 0) list_at = atomicAdd(&p.scratch->n_listed[row], (unsigned)total);
    __syncthreads();
    u64* to = p.list + (size_t)row * p.vocab + list_at;
#pragma unroll
    for (int i = 0; i < kQuads * 4; i++)
      if (listed >> i & 1) to[at++] = rank_of(__fdiv_rn(__fsub_rn(x.l[i / 4][i % 4], max_logit), o.temperature), share.quad(i / 4) * 4 + i % 4);
  }
  if (!last_to_arrive(&p.scratch->row_arrivals[row], gridDim.x, &flag)) return;
  const unsigned n_listed = p.scratch->n_listed[row];
  if (n_listed) {
    best = choose_listed(p, p.list + (size_t)row * p.vocab, n_listed, min_p_cut, position);
    if (tid == 0) {
      if (best) atomicMax(&p.scratch->chosen[row], best);
      p.scratch->n_listed[row] = 0;
    }
  }
  if (last_to_arrive(&p.scratch->arrivals, n_rows, &flag)) accept(p, p.scratch->chosen, n_rows);
}

// A chunk of a prompt went through that is not the last: its rows are in the cache, nothing is chosen.
KERNEL(prefill_advance, AdvanceParams, 32) {
  pdl_launch_dependents();
  pdl_wait();
  if (threadIdx.x != 0) return;
  if (!p.state->done) p.state->length += p.state->rows;
  record_idle_pass(p.state, p.ring);
}
