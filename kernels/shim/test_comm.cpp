// comm.cu: ranks as streams of launches that run together, with stores that arrive late, in pieces and in any order
// (cuda_cpu.h). Collectives of mixed kinds and sizes follow each other, from an epoch just before it wraps; every rank
// must have the host's sums to the bit.
#define TEST_CHUNK_BYTES 1024
#include "../comm.cu"
#include "../comm_faulty.cu"
#include "test.h"

static const bool quick = std::getenv("SHIM_QUICK");
static uint32_t seed_of_test = 1;
static int below(int n) {
  seed_of_test = seed_of_test * 1664525u + 1013904223u;
  return int((seed_of_test >> 8) % n);
}

// The windows and words of a group of ranks.
struct World {
  int n;
  unsigned patience_us;
  std::vector<unsigned char*> window;
  std::vector<unsigned> poison;
  std::vector<CommRecord> record;
  int fault[8] = {}, fault_peer[8] = {};
  World(int n, unsigned patience_us = 5'000'000) : n(n), patience_us(patience_us), poison(n, 0), record(n) {
    for (int r = 0; r < n; r++) {
      window.push_back((unsigned char*)std::aligned_alloc(4096, (COMM_WINDOW_BYTES + 4095) / 4096 * 4096));
      std::memset(window[r], 0, COMM_WINDOW_BYTES);
      for (unsigned c = 0; c < COMM_CHANNELS; c++) {
        const unsigned epoch = 0xfffffffbu - c % 3;
        std::memcpy(channel(r, c), &epoch, 4);
      }  // soon wraps
    }
  }
  World(const World&) = delete;
  ~World() {
    for (auto w : window) std::free(w);
  }
  unsigned char* channel(int r, unsigned c) { return window[r] + COMM_LINE_BYTES + (size_t)c * COMM_CHANNEL_BYTES; }
  CommRanks ranks(int r, int step) {
    CommRanks c = {};
    for (int i = 0; i < n; i++) c.window[i] = window[i];
    c.poison = &poison[r];
    c.record = &record[r];
    c.rank = r;
    c.ranks = n;
    c.patience_us = patience_us;
    c.step = step;
    c.fault = fault[r];
    c.fault_peer = fault_peer[r];
    return c;
  }
  // All slots for partials are zero when nothing is under way.
  bool slots_are_zero() {
    for (int r = 0; r < n; r++)
      for (unsigned c = 0; c < COMM_CHANNELS; c++)
        for (unsigned b = 0; b < COMM_BUFFERS; b++) {
          const unsigned char* at = channel(r, c) + COMM_LINE_BYTES + b * COMM_BUFFER_BYTES + COMM_PUSHED;
          if (at[0] || std::memcmp(at, at + 1, COMM_WORDS - COMM_PUSHED - 1)) return false;
        }
    return true;
  }
};

// One all-reduce: inputs and results of every rank, and what the host makes of them.
struct AllReduce {
  std::string kernel;
  int n, rows, used, dim, blocks;
  bool bias, tap, norm;
  int n_rows;
  std::vector<std::vector<bf16>> partial, tapped, normed;
  std::vector<std::vector<float>> x, squares;
  std::vector<float> x0;
  std::vector<bf16> bias_values, norm_values;
  AllReduce(const char* kernel, int n, int rows, int used, int dim, int blocks)
      : kernel(kernel), n(n), rows(rows), used(used), dim(dim), blocks(blocks) {
    const uint32_t seed = below(1 << 20);
    bias = below(2);
    tap = below(2);
    norm = below(4) > 0;
    n_rows = used;
    x0 = numbers(rows * dim, seed);
    bias_values = rounded(numbers(dim, seed + 1));
    norm_values = rounded(numbers(dim, seed + 2));
    for (int i = 0; i < rows * dim; i += 5) x0[i] = i % 2 ? 0.0f : -0.0f;
    for (int r = 0; r < n; r++) {
      auto v = numbers(rows * dim, seed + 3 + r);
      for (int i = 0; i < rows * dim; i++) {
        if (i % 3 == r % 3) v[i] = 0.0f;
        if (i % 5 == 0) v[i] = r % 2 ? 0.0f : -0.0f;
        if (i % 35 == 7) v[i] = INFINITY;
      }
      partial.push_back(rounded(v));
    }
    x.assign(n, x0);
    tapped.assign(n, poisoned<bf16>(rows * (dim + 16)));
    normed.assign(n, poisoned<bf16>(rows * dim));
    squares.assign(n, poisoned<float>(rows * dim / 16));
  }
  AllReduceParams params(int r, const CommRanks& comm) {
    AllReduceParams p = {};
    p.comm = comm;
    p.partial = partial[r].data();
    p.x = x[r].data();
    p.bias = bias ? bias_values.data() : nullptr;
    p.tap = tap ? tapped[r].data() : nullptr;
    p.next_norm = norm ? norm_values.data() : nullptr;
    p.normed = normed[r].data();
    p.squares = squares[r].data();
    p.n_rows = &n_rows;
    p.rows = rows;
    p.dim = dim;
    p.tap_stride = dim + 16;
    return p;
  }
  // The first difference, as text; empty: none. `ranks`: how many ranks ran.
  std::string wrong(int ranks) {
    for (int r = 0; r < ranks; r++)
      for (int m = 0; m < rows; m++) {
        std::vector<float> square(dim);
        for (int c = 0; c < dim; c++) {
          const size_t i = (size_t)m * dim + c;
          float sum = 0;
          for (int s = 0; s < n; s++) sum += value(partial[s][i]);
          if (bias) sum += value(bias_values[c]);
          const float y = m < used ? x0[i] + (value(__float2bfloat16(sum)) + 0.0f) : x0[i];
          const bf16 want = __float2bfloat16(y);
          square[c] = y * y;
          auto differs = [&](const char* what, float got, float expected) {
            char text[200];
            std::snprintf(text, sizeof text, "%s of rank %d, row %d, column %d: %g, expected %g", what, r, m, c, got,
                          expected);
            return std::string(text);
          };
          if (!same_bits(&y, &x[r][i], 1)) return differs("x", x[r][i], y);
          if (m >= used) continue;
          if (tap && !same_bits(&want, &tapped[r][m * (dim + 16) + c], 1))
            return differs("tap", value(tapped[r][m * (dim + 16) + c]), value(want));
          const bf16 scaled = __float2bfloat16(y * value(norm_values[c]));
          if (norm && !same_bits(&scaled, &normed[r][i], 1))
            return differs("normed", value(normed[r][i]), value(scaled));
          if (norm && c % 16 == 15) {
            float s[4];
            const float* q = &square[c - 15];
            for (int k = 0; k < 4; k++) s[k] = (q[2 * k] + q[2 * k + 8]) + (q[2 * k + 1] + q[2 * k + 9]);
            const float total = (s[0] + s[1]) + (s[2] + s[3]), got = squares[r][m * (dim / 16) + c / 16];
            if (!same_bits(&total, &got, 1)) return differs("squares", got, total);
          }
        }
      }
    return "";
  }
};

struct Exchange {
  int n, words, op, blocks;
  std::vector<std::vector<u64>> value, start;
  Exchange(int n, int words, int op, int blocks) : n(n), words(words), op(op), blocks(blocks) {
    for (int r = 0; r < n; r++) {
      std::vector<u64> v(words);
      for (auto& w : v) w = below(4) ? (u64)below(1 << 24) << 40 | below(1 << 24) : 0;
      value.push_back(v);
    }
    start = value;
  }
  std::string wrong() {
    for (int r = 0; r < n; r++)
      for (int i = 0; i < words; i++) {
        u64 want = 0;
        for (int s = 0; s < n; s++) want = op == kExchangeSum ? want + start[s][i] : std::max(want, start[s][i]);
        if (value[r][i] != want) return "word " + std::to_string(i) + " of rank " + std::to_string(r);
      }
    return "";
  }
};

struct Launches {
  std::vector<std::vector<cpu::Grid>> of_rank;
  explicit Launches(int n) : of_rank(n) {}
  template <class P>
  void add(int rank, const std::string& name, int blocks, unsigned threads, const P& params) {
    const auto found = cpu::kernels().find(name);
    if (found == cpu::kernels().end() || found->second.params_bytes != sizeof(P)) {
      std::fprintf(stderr, "no kernel %s with such params\n", name.c_str());
      std::exit(2);
    }
    const cpu::Kernel& k = found->second;
    of_rank[rank].push_back({found->first.c_str(), dim3(blocks), threads, [&k, params] { k.call(&params); }});
  }
};

// Collectives of all kinds in a random order, each rank at its own pace.
static void mixed(int n, int length) {
  World world(n);
  Launches launches(n);
  std::vector<std::unique_ptr<AllReduce>> reduces;
  std::vector<std::unique_ptr<Exchange>> exchanges;
  std::string story;
  for (int i = 0; i < length; i++) {
    const unsigned threads = 32 << below(3);
    if (below(4) == 0) {
      const int words = below(2) ? 1 + below(16) : 60 + below(80), blocks = 1 + below(2);
      exchanges.push_back(std::make_unique<Exchange>(n, words, below(2), blocks));
      Exchange& e = *exchanges.back();
      for (int r = 0; r < n; r++)
        launches.add(r, "exchange_words", blocks, threads,
                     ExchangeParams{world.ranks(r, i), e.value[r].data(), nullptr, words, e.op});
      story += " exchange " + std::to_string(words) + "/" + std::to_string(blocks);
    } else {
      const char* kernel[] = {"all_reduce_push", "all_reduce_pull", "all_reduce_two_shot"};
      const int kind = below(3), blocks = 1 + below(3),
                tiles = blocks * (kind == 2 ? n : 1) + below(kind == 2 ? 9 : 17);
      // Rows enough for several chunks, the last of which is small: then some threads are far behind those that have
      // nothing to do in it.
      const int a_chunk = kChunkBytes / (32 * ((tiles + blocks - 1) / blocks)) * (kind == 2 ? n : 1);
      const int rows = below(3) ? a_chunk * (1 + below(2)) + 1 : 1 + below(4),
                used = below(8) ? rows - below(std::min(rows, 2)) : 0;
      reduces.push_back(std::make_unique<AllReduce>(kernel[kind], n, rows, used, tiles * 16, blocks));
      for (int r = 0; r < n; r++)
        launches.add(r, kernel[kind], blocks, threads, reduces.back()->params(r, world.ranks(r, i)));
      story += std::string(" ") + kernel[kind] + " " + std::to_string(used) + "x" + std::to_string(tiles * 16) + "/" +
               std::to_string(blocks);
    }
  }
  cpu::run_together(launches.of_rank);
  for (int r = 0; r < n; r++)
    check(world.poison[r] == 0, "%d ranks,%s: rank %d waited for rank %d, phase %d of step %d, epoch %x", n,
          story.c_str(), r, world.record[r].peer, world.record[r].phase, world.record[r].step, world.record[r].epoch);
  for (auto& a : reduces) {
    const std::string w = a->wrong(n);
    check(w.empty(), "%d ranks,%s: %s: %s", n, story.c_str(), a->kernel.c_str(), w.c_str());
  }
  for (auto& e : exchanges) {
    const std::string w = e->wrong();
    check(w.empty(), "%d ranks,%s: exchange: %s", n, story.c_str(), w.c_str());
  }
  check(world.slots_are_zero(), "%d ranks,%s: a slot is not empty", n, story.c_str());
  for (int r = 1; r < n; r++)
    for (unsigned c = 0; c < COMM_CHANNELS; c++)
      check(same_bits(world.channel(0, c), world.channel(r, c), 4), "epochs of channel %u differ", c);
}

// Long runs of chunks inside one kernel, where only barrier and fence keep them apart.
static void many_chunks() {
  for (const char* kernel : {"all_reduce_push", "all_reduce_two_shot", "all_reduce_pull"})
    for (int n : {2, 3})
      for (int warps : {1, 2}) {
        World world(n);
        const int rows = quick ? 6 : 60;
        AllReduce a(kernel, n, rows * 2, rows, 16 * 16 * warps * (std::strcmp(kernel, "all_reduce_two_shot") ? 1 : n),
                    1);
        Launches launches(n);
        for (int r = 0; r < n; r++) launches.add(r, kernel, 1, 32 * warps, a.params(r, world.ranks(r, 0)));
        cpu::run_together(launches.of_rank);
        const std::string w = a.wrong(n);
        check(w.empty() && world.slots_are_zero(), "many chunks, %d ranks, %s: %s", n, kernel, w.c_str());
      }
}

// Slots that are zeroed as late as they may be: only the fence at the end of a chunk puts the zeros before what the
// sender writes there next. Returns in how many of `cases` sums or slots are wrong. Pull and exchange zero nothing; the
// fence of an exchange orders loads, which are never late here.
static int late_zeros(int& cases) {
  struct Case {
    const char* kernel;
    size_t area;
  };
  int wrong = cases = 0;
#ifdef PLANT_COMM_FENCE
  const unsigned patience_us = 5'000;  // what is lost never comes
#else
  const unsigned patience_us = 5'000'000;
#endif
  for (const Case& c : {Case{"all_reduce_push", COMM_PUSHED},
                        {"all_reduce_two_shot", COMM_PUSHED},
                        {"all_reduce_two_shot", COMM_GATHERED}})
    for (int n : {2, 3})
      for (int warps : {1, 2}) {
        World world(n, patience_us);
        cpu::lingers = [&](const void* to, uint64_t value) {
          for (int r = 0; r < n; r++) {
            const size_t at = (const unsigned char*)to - world.window[r];
            if (value || at < 2 * COMM_LINE_BYTES || at >= COMM_WINDOW_BYTES) continue;
            const size_t offset = ((at - COMM_LINE_BYTES) % COMM_CHANNEL_BYTES - COMM_LINE_BYTES) % COMM_BUFFER_BYTES;
            return c.area <= offset && offset < c.area + COMM_MAX_RANKS * COMM_SLOT_BYTES;
          }
          return false;
        };
        const int rows = quick ? 8 : 20;
        AllReduce a(c.kernel, n, rows, rows, 16 * 16 * warps * (std::strcmp(c.kernel, "all_reduce_two_shot") ? 1 : n),
                    1);
        Launches launches(n);
        for (int r = 0; r < n; r++) launches.add(r, c.kernel, 1, 32 * warps, a.params(r, world.ranks(r, 0)));
        cpu::run_together(launches.of_rank);
        cpu::lingers = nullptr;
        const std::string first = a.wrong(n);
        cases++;
        if (first.empty() && world.slots_are_zero()) continue;
        wrong++;
        std::printf("late zeros, %d ranks of %d warps, %s, area %zu: %s\n", n, warps, c.kernel, c.area,
                    first.empty() ? "a slot is not empty" : first.c_str());
      }
  return wrong;
}

// Kernels whose last chunk leaves a warp without work, or gives it another's: only the barrier keeps the others from
// running past it, round to its buffer.
static void short_last_chunks() {
  for (int kind = 0; kind < 3; kind++) {
    World world(3);
    Launches launches(3);
    std::vector<std::unique_ptr<AllReduce>> reduces;
    std::vector<std::unique_ptr<Exchange>> exchanges;
    for (int i = 0; i < (quick ? 4 : 80); i++) {
      if (kind == 2) exchanges.push_back(std::make_unique<Exchange>(3, 96, kExchangeSum, 1));
      else
        reduces.push_back(std::make_unique<AllReduce>(kind ? "all_reduce_two_shot" : "all_reduce_push", 3, kind ? 5 : 3,
                                                      kind ? 5 : 3, 16 * (kind ? 48 : 16), 1));
      for (int r = 0; r < 3; r++) {
        if (kind == 2)
          launches.add(r, "exchange_words", 1, 64,
                       ExchangeParams{world.ranks(r, i), exchanges[i]->value[r].data(), nullptr, 96, kExchangeSum});
        else launches.add(r, reduces[i]->kernel, 1, 64, reduces[i]->params(r, world.ranks(r, i)));
      }
    }
    cpu::run_together(launches.of_rank);
    for (auto& a : reduces) {
      const std::string w = a->wrong(3);
      check(w.empty(), "short last chunks, %s: %s", a->kernel.c_str(), w.c_str());
    }
    for (auto& e : exchanges) {
      const std::string w = e->wrong();
      check(w.empty(), "short last chunks, exchange: %s", w.c_str());
    }
  }
}

// What NCCL brought, added here.
static void after_gather() {
  for (int n : {1, 2, 8}) {
    AllReduce a("all_reduce_local", n, 5, 4, 16 * 37, 3);
    std::vector<bf16> all;
    for (auto& p : a.partial) all.insert(all.end(), p.begin(), p.end());
    AllReduceParams p = a.params(0, CommRanks{});
    p.comm.ranks = n;
    p.partial = all.data();
    run("all_reduce_local", dim3(3), 64, p);
    const std::string w = a.wrong(1);
    check(w.empty(), "local, %d ranks: %s", n, w.c_str());
  }
}

// A rank that never comes, or whose words do not: the others end, and say who is missing.
static void missing() {
  const char* kernels[] = {"all_reduce_push", "all_reduce_pull", "all_reduce_two_shot", "exchange_words"};
  const int phases[] = {COMM_PHASE_PUSH, COMM_PHASE_FLAG, COMM_PHASE_REDUCE, COMM_PHASE_WORDS};
  for (int kind = 0; kind < 4; kind++)
    for (bool dead : {true, false}) {
      World world(3, 20'000);
      world.fault[1] = kFaultDrop;
      world.fault_peer[1] = 2;
      Launches launches(3);
      AllReduce a(kernels[kind], 3, 2, 2, 96, 1);
      Exchange e(3, 5, kExchangeMax, 1);
      for (int twice = 0; twice < 2; twice++)  // a poisoned rank does not wait in what follows either
        for (int r = 0; r < 3; r++) {
          if (dead && r == 1) continue;
          const std::string name = std::string(kernels[kind]) + (dead ? "" : "_faulty");
          if (kind == 3)
            launches.add(r, name, 1, 32,
                         ExchangeParams{world.ranks(r, 40 + twice), e.value[r].data(), nullptr, 5, e.op});
          else launches.add(r, name, 1, 32, a.params(r, world.ranks(r, 40 + twice)));
        }
      cpu::run_together(launches.of_rank);
      const CommRecord& got = world.record[2];
      check(world.poison[2] == COMM_POISON_TIMEOUT && got.rank == 2 && got.peer == 1 && got.step == 40 &&
                (got.phase == phases[kind] || (kind == 2 && got.phase == COMM_PHASE_GATHER)),
            "%s, %s: poison %u, rank %d waits for %d in phase %d of step %d", kernels[kind],
            dead ? "a dead rank" : "dropped words", world.poison[2], got.rank, got.peer, got.phase, got.step);
    }
  // Poisoned by the host: nobody waits long, however long the patience.
  World world(2);
  world.poison[0] = COMM_POISON_HOST;
  AllReduce a("all_reduce_push", 2, 1, 1, 64, 1);
  Launches launches(2);
  launches.add(0, a.kernel, 1, 32, a.params(0, world.ranks(0, 0)));
  cpu::run_together(launches.of_rank);
  check(world.poison[0] == COMM_POISON_HOST, "the host's poison is overwritten");
}

// Faults that arrive are seen in the sums of the rank that they were sent to.
static void garbled() {
  for (const char* kernel : {"all_reduce_push", "all_reduce_pull", "all_reduce_two_shot"})
    for (int fault : {kFaultZero, kFaultFlip}) {
      World world(3);
      const bool pulls = !std::strcmp(kernel, "all_reduce_pull");
      world.fault[pulls ? 2 : 0] = fault;
      world.fault_peer[pulls ? 2 : 0] = pulls ? 0 : 2;
      AllReduce a(kernel, 3, 2, 2, 96, 1);
      Launches launches(3);
      for (int r = 0; r < 3; r++)
        launches.add(r, std::string(kernel) + "_faulty", 1, 32, a.params(r, world.ranks(r, 0)));
      cpu::run_together(launches.of_rank);
      check(!a.wrong(3).empty() && (a.wrong(2).empty() || !std::strcmp(kernel, "all_reduce_two_shot")),
            "%s, fault %d: %s", kernel, fault, a.wrong(3).c_str());
    }
}

static void peers() {
  World world(2, 2'000'000);
  uint4* at = reinterpret_cast<uint4*>(world.channel(1, 3) + COMM_LINE_BYTES + COMM_PUSHED);
  u64 wrong = 0, ns[2] = {};
  PeerParams p = {};
  p.at = at;
  p.n = 1000;
  p.seed = 77;
  p.result = &wrong;
  run("peer_store", dim3(3), 64, p);
  run("peer_load", dim3(3), 64, p);
  check(wrong == 0, "%llu words of a pattern are wrong", wrong);
  at[700].w ^= 4;
  run("peer_load", dim3(3), 64, p);
  check(wrong == 1, "%llu words are wrong, expected 1", wrong);
  Launches launches(2);
  for (int r = 0; r < 2; r++) {
    p.comm = world.ranks(r, 0);
    p.result = &ns[r];
    p.rounds = 50;
    launches.add(r, "peer_ping", 1, 32, p);
  }
  cpu::run_together(launches.of_rank);
  check(ns[0] > 0 && ns[0] != ~0ull && ns[1] != ~0ull, "ping took %llu and %llu ns", ns[0], ns[1]);
}

int main() {
  int cases, wrong = late_zeros(cases);
#ifdef PLANT_COMM_FENCE
  std::printf("the missing fence is noticed in %d of %d cases\n", wrong, cases);
  return wrong == cases;  // to be caught it must be noticed in all of them
#endif
  check(wrong == 0, "late zeros: %d of %d cases are wrong", wrong, cases);
  after_gather();
  missing();
  garbled();
  peers();
  short_last_chunks();
  for (int round = 0; round < (quick ? 1 : 4); round++) many_chunks();
  for (int round = 0; round < (quick ? 1 : 5); round++)
    for (int n : {2, 3, 4, 8}) {
      seed_of_test = round * 100 + n;
      mixed(n, n == 8 ? 6 : 12);
    }
  return finish("comm");
}
