// Chooses the next tokens: for each row of a pass, logits -> penalties, bias -> temperature -> top-k, top-p, min-p ->
// noise -> one id; then accepts drafts while they equal the choice, tests the ends, and moves State on. The rules in
// f32 are those of src/decode/sample.rs, to the bit; numbers (noise, mass, keys) are in sample.cuh, the structs in
// params.h.
//
// A row's choice depends on its logits, its position and the tokens before it, never on width or grid: maxima and
// integer sums have no order.
//   l = logit with penalties, bias, ban; z = (l - max l) / T; g = noise of (seed, position, id)
//   choice = argmax of z + g over the kept ids
// Filters keep all ids up to a cut, which sample_cut.cuh finds: sample_count adds up ids and mass in 1024 bins;
// sample_choose finds the bins that hold a cut and lists the few ids in them; sample_settle selects the cut.
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
// (blocks a row, rows), each thread 4 quads of logits. At most 13 KB of shared memory. What was measured:
// docs/decisions/kernels.md#choosing-tokens, and over ranks docs/decisions/ranks.md#choosing-tokens.
#include "sample_cut.cuh"

namespace {

constexpr int kQuads = 4;  // of logits, a thread
static_assert(SAMPLE_SLICE <= kThreads * kQuads * 4 && SAMPLE_SLICE % 32 == 0, "a block's share of a row");
static_assert(SAMPLE_SLICE < 4096, "sums of 20-bit parts of the mass must stay below 2^32");

constexpr unsigned kInPrompt = 0x80000000u;

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
      if (!(kept >> e & 1) || !(v < 1.01f * exp2f((z[e] - bound) * kLog2E))) continue;
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
