// Makes drafts for the next verify pass: draft_choose takes one from a drafter's logits, ngram_draft copies what followed the longest earlier match of the
// history's end. Both write State.drafts, n_drafts and rows; a wrong draft costs time, never a token. Noise, keys and block sums are in sample.cuh.
#include "sample.cuh"

namespace {

constexpr int kDraftThreads = 256;

// The sequence can take `room` more tokens and a pass gives one more than it has drafts, so more drafts than room - 1 are of no use.
__device__ __forceinline__ void set_drafts(State& s, const SamplingParams& o, int n) {
  s.n_drafts = max(0, min(n, room_left(s, o) - 1));
  s.rows = 1 + s.n_drafts;
}

}  // namespace

// argmax of l / T + g over the draft ids, g being the noise with which the target will choose that same position; at temperature 0 of l. Ties: lower id.
// (The target's top-k, top-p and penalties are not applied.) Work: a grid-stride loop over ids; the last block takes the best.
KERNEL(draft_choose, DraftParams, kDraftThreads) {
  pdl_launch_dependents();
  pdl_wait();
  __shared__ u64 warp_best[kDraftThreads / 32];
  __shared__ unsigned flag;
  State& s = *p.state;
  const SamplingParams& o = *p.options;
  if (s.done) return;
  const int row = p.row >= 0 ? p.row : max(s.emitted, 1) - 1, position = s.history_length + p.index;
  const float* logits = p.logits + (size_t)row * p.stride;
  u64 best = 0;
  for (int i = blockIdx.x * kDraftThreads + threadIdx.x; i < p.vocab; i += gridDim.x * kDraftThreads) {
    const unsigned id = p.target_ids ? p.target_ids[i] : i;
    float l = logits[i];
    if (o.temperature != 0) l = __fadd_rn(__fdiv_rn(l, o.temperature), noise(noise_bits_of(o.seed, position, id)));
    if (l == l) best = larger(best, preference(l, id));
  }
  best = block_max(best, warp_best);
  if (threadIdx.x == 0) atomicMax(&p.scratch->best, best);
  if (!last_to_arrive(&p.scratch->arrivals, gridDim.x, &flag) || threadIdx.x != 0) return;
  best = p.scratch->best;
  p.scratch->best = 0;
  s.drafts[p.index] = best ? (int)id_of(best) : 0;              // only NaN: any draft will do
  if (p.index == p.n_drafts - 1) set_drafts(s, o, p.n_drafts);
}

// For each place in the history, how many tokens up to it equal the history's last ones, max_n at most; the longest wins, of equals the most recent. What
// followed it is copied, and where the copy reaches the history's end it goes on with the drafts themselves: a loop is drafted as a loop.
KERNEL(ngram_draft, NgramParams, kDraftThreads) {
  pdl_launch_dependents();
  pdl_wait();
  __shared__ u64 warp_best[kDraftThreads / 32];
  __shared__ unsigned flag;
  __shared__ int end_tokens[32];                                // the history's last, newest first
  State& s = *p.state;
  if (s.done) return;
  const int n = s.history_length, max_n = min(min(p.max_n, 32), n - 1);
#ifdef PLANT_OFF_BY_ONE
  const int n_places = n - 2;
#else
  const int n_places = n - 1;                                   // the end itself is none
#endif
  if ((int)threadIdx.x < max_n) end_tokens[threadIdx.x] = p.history[n - 1 - threadIdx.x];
#ifndef PLANT_MISSING_BARRIER
  __syncthreads();
#endif
  u64 best = 0;                                                 // length << 32 | place
  for (int at = blockIdx.x * kDraftThreads + threadIdx.x; at < n_places; at += gridDim.x * kDraftThreads) {
    int length = 0;
    while (length < max_n && length <= at && p.history[at - length] == end_tokens[length]) length++;
    if (length >= p.min_n) best = larger(best, (u64)length << 32 | (unsigned)at);
  }
  best = block_max(best, warp_best);
  if (threadIdx.x == 0 && best) atomicMax(&p.scratch->best, best);
  if (!last_to_arrive(&p.scratch->arrivals, gridDim.x, &flag) || threadIdx.x != 0) return;
  best = p.scratch->best;
  p.scratch->best = 0;
  s.ngram_match = (int)(best >> 32);
  set_drafts(s, *p.options, best ? min(p.n_drafts, 16) : 0);
  const int from = (int)(unsigned)best + 1;
  for (int i = 0; i < s.n_drafts; i++) s.drafts[i] = from + i < n ? p.history[from + i] : s.drafts[from + i - n];
  write_record(p.ring, s.pass, RECORD_MATCH, (unsigned)s.ngram_match);
}
