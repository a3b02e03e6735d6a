// Tests sample.cu against a scalar reference written from the rules (sort, cut, Gumbel noise in f64; one token after
// the other, as decoding without drafts would go), and sample.cuh's numbers against f64 and published Philox vectors.
// What every pass must leave behind is checked in `pass`.
#include "../sample.cu"
#include "test.h"
#include <limits>
#include <set>

static const float kInf = std::numeric_limits<float>::infinity();
static uint64_t state_of_chance = 1;
static uint32_t chance() {
  state_of_chance = state_of_chance * 6364136223846793005ull + 1442695040888963407ull;
  return state_of_chance >> 33;
}

static SamplingParams plain_options() {
  SamplingParams o{};
  o.seed = 0x1234567890abcdefull;
  o.top_p = 1ull << 32;
  o.temperature = 1;
  o.min_z = -kInf;
  o.repetition_penalty = 1;
  o.max_tokens = 1 << 20;
  o.context = 1 << 20;
  return o;
}
static uint64_t fixed_p(double p) { return (uint64_t)std::nearbyint(p * 4294967296.0); }

// ---- the reference ----
static void ref_philox(const uint32_t in[4], uint64_t key, uint32_t out[4]) {
  uint32_t c[4], k[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
  std::memcpy(c, in, 16);
  for (int r = 0; r < 10; r++) {
    const uint64_t a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
    const uint32_t n[4] = {(uint32_t)(b >> 32) ^ c[1] ^ k[0], (uint32_t)b, (uint32_t)(a >> 32) ^ c[3] ^ k[1],
                           (uint32_t)a};
    std::memcpy(c, n, 16);
    k[0] += 0x9E3779B9u;
    k[1] += 0xBB67AE85u;
  }
  std::memcpy(out, c, 16);
}
static double ref_noise(uint32_t bits) { return -std::log(-std::log1p(-(bits + 0.5) / 4294967296.0)); }
static double ref_noise(uint64_t seed, int position, int id) {
  const uint32_t in[4] = {(uint32_t)id / 4, (uint32_t)position, 0, 0x766f6c6c};
  uint32_t out[4];
  ref_philox(in, seed, out);
  return ref_noise(out[id % 4]);
}
// Chooses from logits, given how often each id was said and whether the prompt has it; -1 when there is nothing to
// choose. NaN is never chosen.
static int ref_choose(std::vector<float> l, const SamplingParams& o, const std::vector<uint32_t>& counts,
                      const std::vector<float>& bias, int n_output, int position) {
  const int vocab = (int)l.size();
  const bool adjusted = o.repetition_penalty != 1 || o.presence_penalty != 0 || o.frequency_penalty != 0 ||
                        o.has_bias || o.min_tokens > 0;
  bool bad = false;
  for (int id = 0; id < vocab; id++) {
    const uint32_t said = counts[id] & 0x7fffffff;
    if (counts[id]) l[id] = l[id] > 0 ? l[id] / o.repetition_penalty : l[id] * o.repetition_penalty;
    if (said) {
      l[id] -= o.presence_penalty;
      const float f = (float)said * o.frequency_penalty;
      l[id] -= f;
    }
    if (o.has_bias) l[id] += bias[id];
    if (n_output < o.min_tokens)
      for (int e = 0; e < o.n_eos; e++)
        if (o.eos[e] == id) l[id] = -kInf;
    bad |= adjusted ? !(l[id] < kInf) : l[id] == kInf;
    if (l[id] != l[id]) l[id] = -kInf;
  }
  if (bad) return -1;
  const int best = (int)(std::max_element(l.begin(), l.end()) - l.begin());  // the first of equals
  if (l[best] == -kInf) return -1;
  if (o.temperature == 0) return best;
  std::vector<float> z(vocab);
  std::vector<int> order(vocab);
  for (int id = 0; id < vocab; id++) {
    const float d = l[id] - l[best];
    z[id] = d / o.temperature;
    order[id] = id;
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return z[a] > z[b]; });
  size_t keep = vocab;
  if (o.top_k > 0) keep = std::min<size_t>(keep, o.top_k);
  if (o.top_p < 1ull << 32) {
    unsigned __int128 all = 0, sum = 0;
    const auto mass = [&](size_t i) {
      return (unsigned __int128)std::llrint(std::exp((double)z[order[i]]) * 1099511627776.0);
    };
    for (size_t i = 0; i < keep; i++) all += mass(i);
    size_t n = 0;
    do sum += mass(n++);
    while (n < keep && sum << 32 < all * o.top_p);
    keep = n;
  }
  int chosen = -1;
  double top = 0;
  for (size_t i = 0; i < keep; i++) {
    const int id = order[i];
    if (i > 0 && z[id] < o.min_z) continue;
    const double s = z[id] + ref_noise(o.seed, position, id);
    if (chosen < 0 || s > top || (s == top && id < chosen)) {
      chosen = id;
      top = s;
    }
  }
  return chosen;
}

// ---- a sequence on the "device" and its double ----
struct Sequence {
  int vocab, stride, blocks, extra_blocks, ranks = 1;
  SamplingParams o = plain_options();
  State s{};
  std::vector<uint32_t> counts;
  std::vector<float> bias;
  std::vector<int> history;
  std::vector<unsigned long long> list, ring;
  std::vector<SampleScratch> scratch{1};
  Sequence(int vocab_, int extra_blocks_ = 0, int stride_ = 0)
      : vocab(vocab_),
        stride(stride_ ? stride_ : vocab_),
        blocks((vocab_ + SAMPLE_SLICE - 1) / SAMPLE_SLICE + extra_blocks_),
        extra_blocks(extra_blocks_),
        counts(vocab_),
        bias(vocab_),
        history(256),
        list(poisoned<unsigned long long>((size_t)16 * vocab_)),
        ring(RECORDS * RECORD_WORDS) {
    std::memset((void*)scratch.data(), 0, sizeof(SampleScratch));
    std::memset((void*)scratch[0].cut, 0xff, sizeof scratch[0].cut);
    s.length = 20;
    s.history_length = 21;
    s.n_output = 1;
    s.rows = 1;
    for (int i = 0; i < 21; i++) {
      history[i] = chance() % vocab;
      counts[history[i]] |= 0x80000000u;
    }
    s.root = history[20];
    counts[s.root] = 1;
  }
  // The head's maxima, then the chain of all kernels, or of those that the options need.
  void launch(std::vector<float>& logits, int width, bool minimal = false) {
    const int n_max = 1 + chance() % 9;
    std::vector<float> max_value((size_t)width * n_max, -kInf);
    std::vector<int> max_id((size_t)width * n_max, 0x7fffffff);
    for (int r = 0; r < width; r++)
      for (int id = 0; id < vocab; id++) {
        const size_t at = r * n_max + id / 16 % n_max;
        if (logits[(size_t)r * stride + id] > max_value[at]) {
          max_value[at] = logits[(size_t)r * stride + id];
          max_id[at] = id;
        }
      }
    SampleParams p{};
    p.logits = logits.data();
    p.state = &s;
    p.options = &o;
    p.scratch = scratch.data();
    p.list = list.data();
    p.counts = counts.data();
    p.bias = o.has_bias ? bias.data() : nullptr;
    p.history = history.data();
    p.ring = ring.data();
    p.vocab = vocab;
    p.stride = stride;
    p.width = width;
    p.max_value = max_value.data();
    p.max_id = max_id.data();
    p.n_max = n_max;
    p.n_tokens = vocab;
    p.ranks = 1;
    const bool adjusted = o.repetition_penalty != 1 || o.presence_penalty != 0 || o.frequency_penalty != 0 ||
                          o.has_bias || o.min_tokens > 0;
    const bool filtered = o.top_k > 0 || o.top_p < 1ull << 32, all = !minimal;
    if (all || adjusted) run("sample_adjust", dim3(blocks, width), 256, p);
    if (all || filtered) run("sample_count", dim3(blocks, width), 256, p);
    if (all || o.temperature != 0) run("sample_choose", dim3(blocks, width), 256, p);
    if (all || filtered) run("sample_settle", dim3(1, width), 256, p);
    run("sample_accept", dim3(1), 256, p);
  }
  // The same on several ranks, one after the other kernel by kernel, what they exchange added up here. All must end
  // alike; the first one's state stays.
  void launch_ranks(const std::vector<float>& logits, int width) {
    struct Rank {
      int n, blocks;
      State s;
      std::vector<SampleScratch> scratch;
      std::vector<float> logits, max_value;
      std::vector<int> max_id, history;
      std::vector<uint32_t> counts;
      std::vector<unsigned long long> list, ring;
      SampleParams p;
    };
    const int share = ((vocab + ranks - 1) / ranks + 15) / 16 * 16;
    std::vector<Rank> all(ranks);
    for (int r = 0; r < ranks; r++) {
      Rank& k = all[r];
      const int first = r * share, n_max = 1 + chance() % 3;
      k.n = std::min(share, vocab - first);
      k.blocks = (k.n + SAMPLE_SLICE - 1) / SAMPLE_SLICE + extra_blocks;
      k.s = s;
      k.scratch = scratch;
      k.history = history;
      k.counts = counts;
      k.ring = ring;
      k.list = poisoned<unsigned long long>((size_t)width * k.n);
      k.logits = poisoned<float>((size_t)width * share);
      k.max_value.assign((size_t)width * n_max, -kInf);
      k.max_id.assign((size_t)width * n_max, 0x7fffffff);
      for (int row = 0; row < width; row++)
        for (int i = 0; i < k.n; i++) {
          const float l = k.logits[(size_t)row * share + i] = logits[(size_t)row * stride + first + i];
          const size_t at = row * n_max + i / 16 % n_max;
          if (l > k.max_value[at]) {
            k.max_value[at] = l;
            k.max_id[at] = i;
          }
        }
      k.p = SampleParams{k.logits.data(),
                         &k.s,
                         &o,
                         k.scratch.data(),
                         k.list.data(),
                         k.counts.data(),
                         bias.data(),
                         k.history.data(),
                         k.ring.data(),
                         k.max_value.data(),
                         k.max_id.data(),
                         k.n,
                         share,
                         n_max,
                         width,
                         first,
                         vocab,
                         ranks,
                         0};
    }
    const auto each = [&](const char* kernel, bool wide, int round = 0) {
      for (Rank& k : all) {
        k.p.round = round;
        run(kernel, dim3(wide ? k.blocks : 1, width), 256, k.p);
      }
    };
    const auto exchange = [&](const int (&flags)[SAMPLE_ROWS], size_t at, size_t n,
                              bool sum) {  // n words from a byte of the scratch, if a row wants it
      if (std::none_of(flags, flags + width, [](int flag) { return flag != 0; })) return;
      const auto words = [&](Rank& k) {
        return reinterpret_cast<unsigned long long*>(reinterpret_cast<char*>(k.scratch.data()) + at);
      };
      for (size_t i = 0; i < n; i++) {
        unsigned long long all_of_them = 0;
        for (Rank& k : all) all_of_them = sum ? all_of_them + words(k)[i] : std::max(all_of_them, words(k)[i]);
        for (Rank& k : all) words(k)[i] = all_of_them;
      }
    };
    each("sample_adjust", true);
    const SampleScratch& first = all[0].scratch[0];
    exchange(first.in_use, offsetof(SampleScratch, best), width, false);
    each("sample_count", true);
    exchange(first.in_use, offsetof(SampleScratch, bins), width * sizeof(SampleBins) / 8, true);
    each("sample_choose", true);
    for (int round = 0; round < SAMPLE_ROUNDS; round++) {
      each("sample_narrow", false, round);
      exchange(first.open, offsetof(SampleScratch, digits), width * sizeof(SampleDigits) / 8, true);
    }
    each("sample_settle", false, SAMPLE_ROUNDS);
    exchange(first.in_use, offsetof(SampleScratch, chosen), width, false);
    for (Rank& k : all) run("sample_accept", dim3(1), 256, k.p);
    for (Rank& k : all) {
      std::memset((void*)k.scratch[0].cut, 0, sizeof k.scratch[0].cut);
      std::memset((void*)k.scratch[0].digits, 0, sizeof k.scratch[0].digits + sizeof k.scratch[0].search);
      std::memset((void*)k.scratch[0].in_use, 0, sizeof k.scratch[0].in_use + sizeof k.scratch[0].open);
      const bool alike = same_bits(&k.s, &all[0].s, 1) && k.history == all[0].history && k.counts == all[0].counts &&
                         k.ring == all[0].ring && same_bits(k.scratch.data(), all[0].scratch.data(), 1);
      check(alike, "rank %d of %d ends as rank 0: token %d, %d", (int)(&k - all.data()), ranks, k.s.sampled[0],
            all[0].s.sampled[0]);
    }
    s = all[0].s;
    scratch = all[0].scratch;
    history = all[0].history;
    counts = all[0].counts;
    ring = all[0].ring;
  }
  unsigned record(int word) const {
    const uint64_t w = ring[s.pass % RECORDS * RECORD_WORDS + word];
    return w >> 32 == s.pass ? (unsigned)w : 0xdeadbeef;
  }
};
static std::vector<float> random_logits(int rows, int vocab, int stride, int kind) {
  std::vector<float> l((size_t)rows * stride, NAN);  // what lies between vocab and stride must not be read
  for (int r = 0; r < rows; r++)
    for (int i = 0; i < vocab; i++) {
      const double u = (chance() + 1.0) / 2147483649.0, w = chance() / 2147483648.0,
                   normal = std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * w);
      float x = (float)(3 * normal);
      if (kind == 1) x = std::round(x * 2) / 2;   // many ties
      if (kind == 2) x = 1.25f;                   // flat
      if (kind == 3) x = (float)(normal * 0.01);  // nearly flat
      if (kind == 4) x = (float)(normal * 40);    // peaked
      l[(size_t)r * stride + i] = x;
    }
  return l;
}
// One verify pass with the given drafts; the double decodes one by one. True when all agree.
static bool pass(Sequence& q, const std::vector<float>& logits, int width, std::vector<int> drafts, const char* what,
                 bool minimal = false) {
  const State before = q.s;
  const auto counts0 = q.counts;
  q.s.rows = 1 + (int)drafts.size();
  q.s.n_drafts = (int)drafts.size();
  std::copy(drafts.begin(), drafts.end(), q.s.drafts);
  std::vector<float> device(logits);
  if (q.ranks == 1) q.launch(device, width, minimal);
  else q.launch_ranks(logits, width);
  auto counts = counts0;
  std::vector<int> want;
  int reason = STOP_NONE, accepted = 0;
  for (int i = 0;; i++) {
    const std::vector<float> row(logits.begin() + (size_t)i * q.stride,
                                 logits.begin() + (size_t)i * q.stride + q.vocab);
    const int t = ref_choose(row, q.o, counts, q.bias, before.n_output + i, before.length + i + 1);
    if (t < 0) {
      reason = STOP_NO_CHOICE;
      break;
    }
    want.push_back(t);
    counts[t]++;
    const bool hit = i < (int)drafts.size() && i + 1 < width && drafts[i] == t;
    accepted += hit;
    bool eos = false;
    for (int e = 0; e < q.o.n_eos; e++) eos |= q.o.eos[e] == t;
    if (eos) reason = STOP_EOS;
    else if (before.n_output + i + 1 >= q.o.max_tokens) reason = STOP_LENGTH;
    else if (before.history_length + i + 1 >= q.o.context) reason = STOP_CONTEXT;
    if (reason || !hit) break;
  }
  const int n = (int)want.size();
  bool ok = q.s.emitted == n && q.s.reason == reason && q.s.done == (reason != 0) && q.s.accepted == accepted &&
            q.s.length == before.length + n;
  ok &= q.s.n_output == before.n_output + n && q.s.history_length == before.history_length + n && q.s.rows == 1 &&
        q.s.n_drafts == 0 && q.s.pass == before.pass + 1;
  ok &= q.s.draft_length == before.draft_length && q.s.root == (n ? want.back() : before.root);
  ok &= q.counts == counts;
  for (int i = 0; i < n; i++)
    ok &= q.s.sampled[i] == want[i] && q.history[before.history_length + i] == want[i] &&
          (int)q.record(RECORD_TOKENS + i) == want[i];
  ok &= (int)q.record(RECORD_COUNT) == n && (int)q.record(RECORD_ACCEPTED) == accepted &&
        (int)q.record(RECORD_REASON) == reason;
  ok &= q.record(RECORD_DRAFTS) == std::min((unsigned)drafts.size(), (unsigned)width - 1);
  SampleScratch clean = q.scratch[0];
  std::memset((void*)clean.cut, 0, sizeof clean.cut);
  const char* bytes = reinterpret_cast<const char*>(&clean);
  ok &= std::all_of(bytes, bytes + sizeof clean, [](char c) { return c == 0; });
  return check(
      ok,
      "%s: vocab %d, width %d, %zu drafts: %d tokens (%d expected), first %d (%d), reason %d (%d), accepted %d (%d)",
      what, q.vocab, width, drafts.size(), q.s.emitted, n, n ? q.s.sampled[0] : -1, n ? want[0] : -1, q.s.reason,
      reason, q.s.accepted, accepted);
}
// Tokens that a run without drafts would take from these rows.
static std::vector<int> right_drafts(const Sequence& q, const std::vector<float>& logits, int n) {
  std::vector<int> d;
  auto counts = q.counts;
  for (int i = 0; i < n; i++) {
    const std::vector<float> row(logits.begin() + (size_t)i * q.stride,
                                 logits.begin() + (size_t)i * q.stride + q.vocab);
    const int t = ref_choose(row, q.o, counts, q.bias, q.s.n_output + i, q.s.length + i + 1);
    d.push_back(std::max(t, 0));
    counts[d.back()]++;
  }
  return d;
}

struct Option {
  const char* name;
  void (*set)(Sequence&);
};
static const Option kOptions[] = {
    {"plain", [](Sequence&) {}},
    {"temperature 0",
     [](Sequence& q) {
       q.o.temperature = 0;
       q.o.top_k = 3;
       q.o.top_p = fixed_p(0.1);
     }},
    {"temperature 0.7", [](Sequence& q) { q.o.temperature = 0.7f; }},
    {"temperature 1e-9",
     [](Sequence& q) {
       q.o.temperature = 1e-9f;
       q.o.top_p = fixed_p(0.9);
     }},
    {"temperature 1e9",
     [](Sequence& q) {
       q.o.temperature = 1e9f;
       q.o.top_p = fixed_p(0.5);
     }},
    {"temperature 0.1, top-k 50",
     [](Sequence& q) {
       q.o.temperature = 0.1f;
       q.o.top_k = 50;
     }},
    {"top-k 1", [](Sequence& q) { q.o.top_k = 1; }},
    {"top-k 40", [](Sequence& q) { q.o.top_k = 40; }},
    {"top-k vocab - 1", [](Sequence& q) { q.o.top_k = q.vocab - 1; }},
    {"top-k vocab + 7", [](Sequence& q) { q.o.top_k = q.vocab + 7; }},
    {"top-p 0", [](Sequence& q) { q.o.top_p = 0; }},
    {"top-p 0.5", [](Sequence& q) { q.o.top_p = fixed_p(0.5); }},
    {"top-p 0.95", [](Sequence& q) { q.o.top_p = fixed_p(0.95); }},
    {"top-p 1 - 2^-32", [](Sequence& q) { q.o.top_p = (1ull << 32) - 1; }},
    {"min-p 1", [](Sequence& q) { q.o.min_z = -0.0f; }},
    {"min-p 0.05", [](Sequence& q) { q.o.min_z = std::log(0.05f); }},
    {"top-k 20, top-p 0.8",
     [](Sequence& q) {
       q.o.top_k = 20;
       q.o.top_p = fixed_p(0.8);
     }},
    {"top-k 300, top-p 0.999, min-p 0.001",
     [](Sequence& q) {
       q.o.top_k = 300;
       q.o.top_p = fixed_p(0.999);
       q.o.min_z = std::log(0.001f);
       q.o.temperature = 1.5f;
     }},
    {"repetition 1.3", [](Sequence& q) { q.o.repetition_penalty = 1.3f; }},
    {"presence 0.7, temperature 0",
     [](Sequence& q) {
       q.o.presence_penalty = 0.7f;
       q.o.temperature = 0;
     }},
    {"frequency 0.4, presence -0.1",
     [](Sequence& q) {
       q.o.frequency_penalty = 0.4f;
       q.o.presence_penalty = -0.1f;
     }},
    {"bias",
     [](Sequence& q) {
       q.o.has_bias = 1;
       for (int i = 0; i < 1024; i++) q.bias[chance() % q.vocab] = i % 3 ? (float)(i % 9) - 4 : -kInf;
       q.o.top_k = 25;
     }},
    {"all but one id banned",
     [](Sequence& q) {
       q.o.has_bias = 1;
       for (auto& b : q.bias) b = -kInf;
       q.bias[q.vocab - 1] = 0;
       q.o.top_p = fixed_p(0.7);
       q.o.top_k = 9;
     }},
    {"min tokens",
     [](Sequence& q) {
       q.o.min_tokens = 4;
       q.o.n_eos = 16;
       for (auto& e : q.o.eos) e = chance() % q.vocab;
       q.o.temperature = 0.2f;
     }},
    {"everything",
     [](Sequence& q) {
       q.o.temperature = 0.9f;
       q.o.top_k = 100;
       q.o.top_p = fixed_p(0.97);
       q.o.min_z = std::log(0.002f);
       q.o.repetition_penalty = 1.1f;
       q.o.presence_penalty = 0.2f;
       q.o.frequency_penalty = 0.3f;
       q.o.has_bias = 1;
       q.bias[5] = 2;
       q.bias[q.vocab / 2] = -kInf;
       q.o.min_tokens = 3;
       q.o.n_eos = 2;
       q.o.eos[0] = 7;
       q.o.eos[1] = 5;
     }},
};

static void test_numbers() {
  const uint32_t in[3][4] = {{0, 0, 0, 0}, {~0u, ~0u, ~0u, ~0u}, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}};
  const uint64_t key[3] = {0, ~0ull, 0x299f31d0a4093822ull};
  const uint32_t want[3][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                               {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
                               {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
  for (int i = 0; i < 3; i++) {
    const uint4 r = philox(in[i][0], in[i][1], in[i][2], in[i][3], key[i]);
    check(r.x == want[i][0] && r.y == want[i][1] && r.z == want[i][2] && r.w == want[i][3], "Philox vector %d", i);
  }
  double worst = 0, lowest = 0, highest = 0;
  std::vector<uint32_t> bits = {0,        1,   2,       3,         1257966796u, 1257966797u,
                                1u << 31, ~0u, ~0u - 1, ~0u - 255, ~0u - 256,   ~0u - 257};
  for (int i = 0; i < 200000; i++) bits.push_back(chance() << 1 ^ chance());
  for (int s = 0; s < 32; s++) {
    bits.push_back(1u << s);
    bits.push_back(~(1u << s));
    bits.push_back((1u << s) - 1);
  }
  for (uint32_t b : bits) {
    const double g = noise(b), w = ref_noise(b);
    worst = std::max(worst, std::fabs(g - w) / std::max(1.0, std::fabs(w)));
    lowest = std::min(lowest, g);
    highest = std::max(highest, g);
  }
  check(worst < 1e-6, "noise against f64: worst error %.2e", worst);
  check(lowest > -3.2 && highest < 22.9, "noise range %.3f to %.3f", lowest, highest);
  worst = 0;
  for (int i = 0; i < 200000; i++) {
    const float z = -std::ldexp((float)(chance() % 65536) / 65536, (int)(chance() % 12) - 6);
    const double want = std::exp((double)z) * 1099511627776.0, got = (double)probability_mass(z);
    worst = std::max(worst, (std::fabs(got - want) - 0.5) / want);
  }
  check(worst < 2.5e-7 && probability_mass(0) == 1ull << 40 && probability_mass(-kInf) == 0 &&
            probability_mass(-1e30f) == 0,
        "mass against f64: worst error %.2e", worst);
  const float ordered[] = {-kInf, -3e38f, -1, -1e-40f, 0, 1e-40f, 1, 3e38f};
  for (int i = 0; i + 1 < 8; i++)
    check(preference(ordered[i], 0) < preference(ordered[i + 1], 1000) &&
              value_of(preference(ordered[i], 3)) == ordered[i],
          "keys order numbers");
  check(preference(-0.0f, 2) == preference(0.0f, 2) && preference(1, 2) > preference(1, 3) &&
            id_of(preference(1, 77)) == 77 && preference(-kInf, 1 << 20) > 0,
        "keys: zeros, ties, ids");
}

static void test_options(bool quick) {
  for (int vocab : {512, 1000, 997, 4033, 12288})
    for (const Option& option : kOptions)
      for (int kind = 0; kind < 5; kind++) {
        if (vocab > 1000 && (kind + (&option - kOptions)) % (vocab > 5000 ? 4 : 2) != 0) continue;
        if (quick && (kind + (&option - kOptions)) % 5 != 0) continue;
        Sequence q(vocab, vocab == 1000 ? 2 : 0, vocab == 512 ? 516 : 0);
        option.set(q);
        q.o.seed = chance();
        const int counts_of_ranks[] = {1, 1, 2, 3, 8};
        q.ranks = counts_of_ranks[chance() % 5];
        const int width = 1 + chance() % 5;
        const auto logits = random_logits(width, vocab, q.stride, kind);
        auto drafts = right_drafts(q, logits, width - 1);
        if (chance() % 3 == 0 && width > 1) drafts[chance() % (width - 1)] ^= 1;
        pass(q, logits, width, drafts, option.name);
      }
  for (const Option& option : kOptions) {  // 16 rows, all drafts right, several passes on one scratch
    Sequence q(1000);
    q.ranks = 1 + (&option - kOptions) % 4;
    option.set(q);
    for (int turn = 0; turn < (quick ? 1 : 2) && !q.s.done; turn++) {
      const auto logits = random_logits(16, 1000, 1000, turn);
      pass(q, logits, 16, right_drafts(q, logits, 15), option.name);
    }
  }
  if (quick) return;
  Sequence q(49152, 5);
  q.o.top_p = fixed_p(0.9);
  const auto logits = random_logits(2, 49152, 49152, 0);
  pass(q, logits, 2, right_drafts(q, logits, 1), "SmolLM2's vocabulary");
  q.o.top_p = fixed_p(0.5);
  pass(q, random_logits(1, 49152, 49152, 2), 1, {}, "SmolLM2's vocabulary, flat");
  q.ranks = 3;
  for (int top_k : {0, 20000}) {
    q.o.top_k = top_k;
    pass(q, random_logits(1, 49152, 49152, 2), 1, {}, "SmolLM2's vocabulary on three ranks, flat");
  }
}

// Which ids are kept at all: a dozen ids of about equal weight, so that each one kept or dropped by mistake soon wins
// or fails to. The others weigh nothing.
static void test_exact_cuts(bool quick) {
  for (int turn = 0; turn < (quick ? 12 : 120); turn++) {
    Sequence q(512);
    q.ranks = 1 + turn % 3 * turn % 8;
    q.o.seed = turn;
    const float step[] = {0, 0.001f, 0.05f, 0.3f}, start[] = {0, 1}, p[] = {0.5f, 0.25f, 0.75f, 0.3f, 0.9f};
    std::vector<float> logits((size_t)16 * 512, -60);
    int ids[12];
    for (int i = 0; i < 12; i++) {
      ids[i] = chance() % 512;
      for (int r = 0; r < 16; r++)
        logits[r * 512 + ids[i]] = 3 - (i ? start[turn & 1] : 0) - step[turn / 2 % 4] * (i / 2);
    }
    const int filters = 1 + turn / 8 % 7;
    if (filters & 1) q.o.top_p = fixed_p(p[chance() % 5]);
    if (filters & 2) q.o.top_k = 2 + chance() % 12;
    if (filters & 4) q.o.min_z = -(start[turn & 1] + step[turn / 2 % 4] * (chance() % 6));
    pass(q, logits, 16, right_drafts(q, logits, 15), "exact cuts");
    check(q.s.emitted == 16, "16 rows chosen");
  }
  for (int i = 0; i < 2000; i++) {  // the smallest mass with mass / kept >= p, and never 0
    const uint64_t kept = ((uint64_t)chance() << 27 ^ chance()) >> chance() % 20,
                   share = i ? ((uint64_t)chance() << 1) >> chance() % 33 : 0;
    const unsigned __int128 product = (unsigned __int128)kept * share;
    const uint64_t t = top_p_target(kept, share);
    check(t >= 1 && (unsigned __int128)t << 32 >= product && (t == 1 || (unsigned __int128)(t - 1) << 32 < product),
          "top_p_target");
  }
}

// A row's choice does not depend on width, on the number of blocks, on the graph used.
static void test_width() {
  for (int which : {0, 1, 11, 16, 24}) {
    const auto logits = random_logits(16, 1000, 1000, 0);
    state_of_chance = 99;
    Sequence wide(1000);
    kOptions[which].set(wide);
    wide.o.n_eos = 0;
    const auto drafts = right_drafts(wide, logits, 15);
    pass(wide, logits, 16, drafts, kOptions[which].name);
    state_of_chance = 99;
    Sequence narrow(1000, 3);
    kOptions[which].set(narrow);
    narrow.o.n_eos = 0;
    for (int i = 0; i < 16; i++) {
      const std::vector<float> row(logits.begin() + i * 1000, logits.begin() + (i + 1) * 1000);
      pass(narrow, row, 1, {}, kOptions[which].name, true);
    }
    check(wide.s.emitted == 16 && wide.history == narrow.history && wide.counts == narrow.counts,
          "%s: 16 rows at once equal 16 passes of one row", kOptions[which].name);
    int different = 0;
    for (int i = 1; i < 16; i++) different += wide.s.sampled[i] != wide.s.sampled[0];
    check(different > 8, "%s: rows differ", kOptions[which].name);
  }
  Sequence q(512);  // more drafts than the graph is wide: the rest waits for nobody
  const auto logits = random_logits(8, 512, 512, 0);
  pass(q, logits, 3, right_drafts(q, logits, 7), "7 drafts in a pass of 3 rows");
}

// Ends: every combination of the draft that goes wrong, the end token's place, the budget and the context, at
// temperature 0 and 0.8.
static void test_ends(bool quick) {
  for (int temperature = 0; temperature < 2; temperature++)
    for (int wrong = -1; wrong < 6; wrong++)
      for (int eos_at = -1; eos_at < 7; eos_at++)
        for (int budget : {1, 3, 5, 6, 7, 100})
          for (int context : {22, 25, 27, 28, 200}) {
            if (chance() % (quick ? 60 : 6) != 0) continue;
            Sequence q(512);
            q.o.temperature = 0.8f * temperature;
            const auto logits = random_logits(7, 512, 512, 4 * (1 - temperature));
            auto drafts = right_drafts(q, logits, 7);
            q.o.n_eos = eos_at >= 0 ? 3 : 0;
            if (eos_at >= 0) {
              q.o.eos[0] = -1;
              q.o.eos[1] = drafts[eos_at];
              q.o.eos[2] = 1 << 20;
            }
            drafts.pop_back();
            if (wrong >= 0) drafts[wrong] = (drafts[wrong] + 1) % 512;
            q.o.max_tokens = budget + q.s.n_output - 1 + (budget == 1);
            q.o.context = context;
            q.o.min_tokens = chance() % 2 ? chance() % 9 : 0;
            pass(q, logits, 7, drafts, "ends");
          }
}

static void test_other_passes() {
  for (float temperature : {0.0f, 1.0f}) {
    Sequence q(512);
    q.o.temperature = temperature;
    q.o.top_k = 30;
    q.s.done = 1;
    q.s.reason = STOP_EOS;
    q.s.n_drafts = 2;
    q.s.rows = 3;
    const State before = q.s;
    const auto history = q.history;
    const auto counts = q.counts;
    auto logits = random_logits(3, 512, 512, 0);
    const auto untouched = logits;
    q.launch(logits, 3);
    State after = q.s;
    after.pass--;
    check(std::memcmp(&after, &before, sizeof after) == 0 && q.history == history && q.counts == counts &&
              logits == untouched,
          "a done sequence stays as it is");
    check(q.record(RECORD_COUNT) == 0 && q.record(RECORD_REASON) == STOP_EOS, "a done sequence's record");

    Sequence f(512);
    AdvanceParams a{&f.s, f.ring.data()};
    f.s.rows = 9;
    run("prefill_advance", dim3(1), 32, a);
    check(f.s.length == 29 && f.s.history_length == 21 && f.record(RECORD_COUNT) == 0, "prefill_advance");
    f.s.done = 1;
    run("prefill_advance", dim3(1), 32, a);
    check(f.s.length == 29 && f.record(RECORD_COUNT) == 0, "prefill_advance of a done sequence");

    for (float bad : {NAN, kInf, -kInf})  // a row without a choice ends the sequence, but only if it is reached
      for (int reached = 0; reached < 2; reached++)
        for (int adjusted = 0; adjusted < 2; adjusted++)
          for (int filtered = 0; filtered < 2; filtered++) {
            Sequence n(1000);
            n.o.temperature = temperature;
            if (filtered) n.o.top_p = fixed_p(0.9);
            if (adjusted) n.o.presence_penalty = 0.5f;
            auto rows = random_logits(3, 1000, 1000, 0);
            auto drafts = right_drafts(n, rows, 2);
            if (!reached) drafts[1] ^= 1;
            std::fill(rows.begin() + (bad == kInf ? 2999 : 2000), rows.end(), bad);
            pass(n, rows, 3, drafts, "a row without a choice", !filtered);
            check(n.s.reason == (reached ? STOP_NO_CHOICE : STOP_NONE), "reason %d of a row without a choice",
                  n.s.reason);
            if (adjusted) continue;
            Sequence some(1000);  // a few NaN are passed over
            some.o.temperature = temperature;
            if (filtered) some.o.top_k = 998;
            rows = random_logits(1, 1000, 1000, 2);
            for (int i = 0; i < 5; i++) rows[chance() % 1000] = NAN;
            pass(some, rows, 1, {}, "a few NaN");
          }
  }
}

// Frequencies over positions and seeds follow the distribution, and different keys give different noise.
static void test_frequencies() {
  const double p[8] = {0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005};
  const int draws = 200000;
  for (int by_seed = 0; by_seed < 2; by_seed++) {
    double chi = 0;
    int n[8] = {};
    for (int d = 0; d < draws; d++) {
      u64 best = 0;
      for (unsigned id = 0; id < 8; id++)
        best = larger(
            best, preference(
                      (float)std::log(p[id] / p[0]) + noise(noise_bits_of(by_seed ? d : 5, by_seed ? 77 : d, id)), id));
      n[id_of(best)]++;
    }
    for (int i = 0; i < 8; i++) chi += (n[i] - p[i] * draws) * (n[i] - p[i] * draws) / (p[i] * draws);
    check(chi < 24.3, "frequencies over %s: chi-square %.1f, 7 degrees of freedom (24.3 is 1 in 1000)",
          by_seed ? "seeds" : "positions", chi);
  }
  std::set<int> tokens;  // the whole chain: seeds matter
  for (int seed = 0; seed < 12; seed++) {
    state_of_chance = 5;
    Sequence q(512);
    q.o.seed = (uint64_t)seed << 32 | 7;
    const auto logits = random_logits(1, 512, 512, 3);
    pass(q, logits, 1, {}, "seeds");
    tokens.insert(q.s.root);
  }
  check(tokens.size() >= 10, "12 seeds give %zu different tokens", tokens.size());
}

int main() {
  const bool quick = std::getenv("SHIM_QUICK") != nullptr;
  test_numbers();
  test_options(quick);
  test_exact_cuts(quick);
  test_width();
  test_ends(quick);
  test_other_passes();
  if (!quick) test_frequencies();
  return finish("sample");
}
