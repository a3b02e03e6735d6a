// Makes drafts for the next verify pass: draft_choose takes one from a drafter's logits, ngram_draft copies what
// followed the longest earlier match of the history's end. Both write State.drafts, n_drafts and rows; a wrong draft
// costs time, never a token. Noise, keys and block sums are in sample.cuh.
#include "sample.cuh"

namespace {

constexpr int kDraftThreads = 256;

// The sequence can take `room` more tokens and a pass gives one more than it has drafts, so more drafts than room - 1
// are of no use.
__device__ __forceinline__ void set_drafts(State& s, const SamplingParams& o, int n) {
  s.n_drafts = max(0, min(n, room_left(s, o) - 1));
  s.rows = 1 + s.n_drafts;
}

}  // namespace

// argmax over the draft ids of z + g, z = (l - max l) / T, g being the noise with which the target will choose that
// same position; at temperature 0 of l, which the head's maxima tell: block 0 alone. Ties: lower id. (The target's
// top-k, top-p and penalties are not applied.) An id a thread in turns; the last block takes the best. sample_choose
// explains `bound`.
KERNEL(draft_choose, DraftParams, kDraftThreads) {
  pdl_launch_dependents();
  const SamplingParams o = load_front<3>(p.options);
  pdl_wait();
  __shared__ u64 warp_best[kDraftThreads / 32];
  __shared__ unsigned flag;
  State& s = *p.state;
  if (s.done || (o.temperature == 0 && blockIdx.x != 0)) return;
  const int position = s.history_length + p.index;
  u64 best = block_max(head_max(p.max_value, p.max_id, p.n_max, 0, threadIdx.x, kDraftThreads), warp_best);
  const float max_logit = value_of(best);
  if (o.temperature != 0) {
    float bound = -3.14f;
    best = 0;
    for (int i = blockIdx.x * kDraftThreads + threadIdx.x; i < p.vocab; i += gridDim.x * kDraftThreads) {
      const unsigned id = p.target_ids ? p.target_ids[i] : i;
      const float z = __fdiv_rn(__fsub_rn(p.logits[i], max_logit), o.temperature);
      const unsigned bits = noise_bits_of(o.seed, position, id);
      if (!((float)bits * (1.0f / 4294967296.0f) < 1.01f * exp2f((z - bound) * kLog2E))) continue;
      const float score = __fadd_rn(z, noise(bits));
      bound = fmaxf(bound, score);
      if (score == score) best = larger(best, preference(score, i));
    }
    best = block_max(best, warp_best);
    if (threadIdx.x == 0) atomicMax(&p.scratch->best, best);
    if (!last_to_arrive(&p.scratch->arrivals, gridDim.x, &flag)) return;
    best = p.scratch->best;
  }
  if (threadIdx.x != 0) return;
  p.scratch->best = 0;
  const unsigned i = best ? id_of(best) : 0;  // no finite logit: any draft will do
  const int draft = i < (unsigned)p.vocab ? (int)i : 0;
  s.drafts[p.index] = p.target_ids ? p.target_ids[draft] : draft;
  if (p.index == p.n_drafts - 1) set_drafts(s, *p.options, p.n_drafts);
}

// For each place in the history, how many tokens up to it equal the history's last ones, max_n at most; the longest
// wins, of equals the most recent. What followed it is copied, and where the copy reaches the history's end it goes on
// with the drafts themselves: a loop is drafted as a loop.
KERNEL(ngram_draft, NgramParams, kDraftThreads) {
  pdl_launch_dependents();
  pdl_wait();
  __shared__ u64 warp_best[kDraftThreads / 32];
  __shared__ unsigned flag;
  __shared__ int end_tokens[32];  // the history's last, newest first
  State& s = *p.state;
  if (s.done) return;
  const int n = s.history_length, max_n = min(min(p.max_n, 32), n - 1);
#ifdef PLANT_OFF_BY_ONE
  const int n_places = n - 2;
#else
  const int n_places = n - 1;  // the end itself is none
#endif
  if ((int)threadIdx.x < max_n) end_tokens[threadIdx.x] = p.history[n - 1 - threadIdx.x];
#ifndef PLANT_MISSING_BARRIER
  __syncthreads();
#endif
  u64 best = 0;  // length << 32 | place
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

// Rows for the drafter's pass: from where its cache ends to where the target's does.
KERNEL(draft_begin, DraftBeginParams, 32) {
  pdl_launch_dependents();
  pdl_wait();
  const int start = p.state->draft_length, rows = max(0, min(p.state->length - p.behind - start, p.max_rows));
  __syncwarp();
  const int n = threadIdx.x;
  if (n < 16) p.draft->positions[n] = start + rows - 1 + n;
  if (n != 0) return;
  p.draft->start = start;
  p.draft->rows = rows;
  p.draft->last = max(rows - 1, 0);  // a finished sequence has no new row: any will do
  p.draft->one = 1;
  p.state->draft_length = start + rows;
}
