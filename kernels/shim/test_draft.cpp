// Tests draft.cu: draft_choose against the same rule in f64 and against the target's own choice from equal logits,
// ngram_draft against a plain search.
#include "../draft.cu"
#include "../sample.cu"
#include "test.h"

static uint64_t state_of_chance = 7;
static uint32_t chance() {
  state_of_chance = state_of_chance * 6364136223846793005ull + 1442695040888963407ull;
  return state_of_chance >> 33;
}
static SamplingParams plain_options(float temperature) {
  SamplingParams o{};
  o.seed = 0xfeedface12345ull;
  o.top_p = 1ull << 32;
  o.temperature = temperature;
  o.min_z = -INFINITY;
  o.repetition_penalty = 1;
  o.max_tokens = 1000;
  o.context = 1000;
  return o;
}
// What a head leaves beside its logits: the maxima of its blocks.
struct Maxima {
  std::vector<float> value;
  std::vector<int> id;
  int n;
  Maxima(const std::vector<float>& l, int rows, int vocab, int stride) : n(1 + chance() % 7) {
    value.assign((size_t)rows * n, -INFINITY);
    id.assign((size_t)rows * n, 0x7fffffff);
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < vocab; i++) {
        const float x = l[(size_t)r * stride + i];
        const size_t at = r * n + i / 16 % n;
        if (x > value[at]) {
          value[at] = x;
          id[at] = i;
        }
      }
  }
  template <class P>
  void give(P& p, int row = 0) const {
    p.max_value = value.data() + row * n;
    p.max_id = id.data() + row * n;
    p.n_max = n;
  }
};
static bool clean(const DraftScratch& s) { return s.best == 0 && s.arrivals == 0; }

static void test_choose() {
  for (float temperature : {0.0f, 0.8f, 1.7f})
    for (int vocab : {1, 128, 500, 3000})
      for (int blocks : {1, 3})
        for (int mapped = 0; mapped < 2; mapped++) {
          SamplingParams o = plain_options(temperature);
          State s{};
          s.history_length = 57;
          s.length = 56;
          s.n_output = 3;
          s.rows = 1;
          DraftScratch scratch{};
          auto l = numbers((size_t)3 * vocab, chance(), 4);  // of three drafts
          for (auto& x : l) x = std::round(x * 8) / 8;       // ties
          if (vocab > 1) l[chance() % vocab] = NAN;          // a broken drafter must not break the pass
          std::vector<int> ids(vocab);
          for (int i = 0; i < vocab; i++) ids[i] = mapped ? 3 * i + 1 : i;
          DraftParams p{};
          p.state = &s;
          p.options = &o;
          p.scratch = &scratch;
          p.target_ids = mapped ? ids.data() : nullptr;
          p.vocab = vocab;
          p.n_drafts = 3;
          const Maxima maxima(l, 3, vocab, vocab);
          bool ok = true;
          for (p.index = 0; p.index < 3; p.index++) {
            const float* row = l.data() + (size_t)p.index * vocab;
            p.logits = row;
            maxima.give(p, p.index);
            run("draft_choose", dim3(blocks), 256, p);
            int want = 0;
            double top = -1e30;
            for (int i = 0; i < vocab; i++) {
              if (row[i] != row[i]) continue;
              const double u = (noise_bits_of(o.seed, 57 + p.index, ids[i]) + 0.5) / 4294967296.0;
              const double score = temperature == 0 ? row[i] : row[i] / temperature - std::log(-std::log1p(-u));
              if (score > top) {
                top = score;
                want = ids[i];
              }
            }
            ok &= s.drafts[p.index] == want && clean(scratch) && s.n_drafts == (p.index == 2 ? 3 : 0) &&
                  s.rows == (p.index == 2 ? 4 : 1);
          }
          check(ok, "draft_choose: T %.1f, %d ids, %d blocks, mapped %d", temperature, vocab, blocks, mapped);
        }
}

// A drafter whose logits are the target's makes drafts that are all accepted, at any temperature: both use the same
// noise.
static void test_same_noise() {
  const int vocab = 600, width = 6;
  for (float temperature : {0.0f, 1.0f}) {
    SamplingParams o = plain_options(temperature);
    State s{};
    s.length = 10;
    s.history_length = 11;
    s.n_output = 1;
    s.rows = 1;
    s.emitted = 1;
    auto l = numbers((size_t)width * vocab, 3, 3);
    DraftScratch scratch{};
    DraftParams d{};
    d.state = &s;
    d.options = &o;
    d.scratch = &scratch;
    d.vocab = vocab;
    d.n_drafts = width - 1;
    const Maxima maxima(l, width, vocab, vocab);
    for (d.index = 0; d.index < width - 1; d.index++) {
      d.logits = l.data() + (size_t)d.index * vocab;
      maxima.give(d, d.index);
      run("draft_choose", dim3(2), 256, d);
    }
    check(s.rows == width, "drafts fill the next pass");
    std::vector<SampleScratch> sample(1);
    std::memset((void*)sample.data(), 0, sizeof(SampleScratch));
    std::vector<unsigned> counts(vocab);
    std::vector<int> history(64);
    std::vector<unsigned long long> ring(RECORDS * RECORD_WORDS);
    SampleParams p{};
    p.logits = l.data();
    p.state = &s;
    p.options = &o;
    p.scratch = sample.data();
    p.counts = counts.data();
    p.history = history.data();
    p.ring = ring.data();
    p.vocab = p.stride = p.n_tokens = vocab;
    p.ranks = 1;
    p.width = width;
    maxima.give(p);
    run("sample_choose", dim3(1, width), 256, p);
    run("sample_accept", dim3(1), 256, p);
    check(s.accepted == width - 1 && s.emitted == width, "T %.0f: %d of %d drafts from equal logits accepted",
          temperature, s.accepted, width - 1);
  }
}

static void test_ngram() {
  for (int turn = 0; turn < 300; turn++) {
    SamplingParams o = plain_options(0);
    State s{};
    const int n = 1 + chance() % (turn % 3 ? 60 : 700), alphabet = 1 + chance() % (turn % 2 ? 3 : 40);
    std::vector<int> history(n);
    for (auto& t : history) t = chance() % alphabet;
    s.history_length = n;
    s.pass = 5 + turn;
    s.rows = 9;
    s.n_drafts = 8;
    s.n_output = 4;
    o.max_tokens = turn % 5 == 0 ? 4 + chance() % 6 : 1000;
    DraftScratch scratch{};
    std::vector<unsigned long long> ring(RECORDS * RECORD_WORDS);
    NgramParams p{};
    p.state = &s;
    p.options = &o;
    p.scratch = &scratch;
    p.history = history.data();
    p.ring = ring.data();
    p.min_n = 1 + chance() % 3;
    p.max_n = p.min_n + chance() % 6;
    p.n_drafts = 1 + chance() % 16;
    run("ngram_draft", dim3(1 + chance() % 3), 256, p);
    int best = 0, place = -1;
    for (int at = 0; at + 1 < n; at++) {
      int length = 0;
      while (length < p.max_n && at - length >= 0 && history[at - length] == history[n - 1 - length]) length++;
      if (length >= p.min_n && length >= best) {
        best = length;
        place = at;
      }
    }
    std::vector<int> text(history), want;
    for (int i = 0; place >= 0 && i < std::min(p.n_drafts, o.max_tokens - s.n_output - 1); i++) {
      want.push_back(text[place + 1 + i]);
      text.push_back(want.back());
    }
    const bool ok = s.ngram_match == best && s.n_drafts == (int)want.size() && s.rows == 1 + (int)want.size() &&
                    std::equal(want.begin(), want.end(), s.drafts) && clean(scratch) &&
                    ring[s.pass % RECORDS * RECORD_WORDS + RECORD_MATCH] == ((unsigned long long)s.pass << 32 | best);
    check(ok, "ngram_draft: history of %d, alphabet %d, n %d to %d: match %d (%d), %d drafts (%zu)", n, alphabet,
          p.min_n, p.max_n, s.ngram_match, best, s.n_drafts, want.size());
  }
}

// A done sequence gets no drafts.
static void test_done() {
  SamplingParams o = plain_options(0);
  State s{};
  s.done = 1;
  s.history_length = 9;
  s.emitted = 1;
  const State before = s;
  DraftScratch scratch{};
  std::vector<int> history(9, 1);
  std::vector<float> l(64);
  std::vector<unsigned long long> ring(RECORDS * RECORD_WORDS);
  NgramParams g{&s, &o, &scratch, history.data(), ring.data(), 1, 3, 4, 0};
  run("ngram_draft", dim3(1), 256, g);
  DraftParams d{};
  d.logits = l.data();
  d.state = &s;
  d.options = &o;
  d.scratch = &scratch;
  d.vocab = 64;
  d.n_drafts = 1;
  const Maxima maxima(l, 1, 64, 64);
  maxima.give(d);
  run("draft_choose", dim3(1), 256, d);
  check(std::memcmp(&s, &before, sizeof s) == 0 && clean(scratch), "a done sequence gets no drafts");
}

int main() {
  test_choose();
  test_same_noise();
  test_ngram();
  test_done();
  return finish("draft");
}
