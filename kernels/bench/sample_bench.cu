// Times the sampling kernels on a GPU: chains of them in one CUDA graph with programmatic dependent launch, for several
// options, widths and vocabularies. Prints the microseconds that one pass's sampling adds to a graph (chains of a
// one-block stand-in for the head are subtracted), and first checks that tokens do not depend on width, blocks or
// graph. Build and run: nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a -Ikernels
// kernels/bench/sample_bench.cu -o sample_bench && ./sample_bench
#include "../sample.cu"
#include "../draft.cu"
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>
#define CK(x)                                                                            \
  do {                                                                                   \
    cudaError_t error_ = (x);                                                            \
    if (error_) {                                                                        \
      std::printf("error: %s, line %d: %s\n", #x, __LINE__, cudaGetErrorString(error_)); \
      std::exit(1);                                                                      \
    }                                                                                    \
  } while (0)

struct Rows {
  State* state;
  int rows;
};
// Stands in for the pass before: makes all rows count again, with drafts that never match, and forgets the tokens so
// far.
KERNEL(set_rows, Rows, 32) {
  pdl_launch_dependents();
  pdl_wait();
  State& s = *p.state;
  if (threadIdx.x < 16) s.drafts[threadIdx.x] = -1;
  if (threadIdx.x == 0) {
    s.rows = p.rows;
    s.n_drafts = p.rows - 1;
    s.length = 1000;
    s.history_length = 1001;
    s.n_output = 1;
    s.done = 0;
  }
}

struct Hash {
  u64* sum;
  int n;
};
// Sums (order does not matter) over noise and mass, to be compared with the same sums on a CPU.
__device__ __forceinline__ u64 number_hash(int i) {
  const unsigned h = (unsigned)(((u64)i * 6364136223846793005ull + 1442695040888963407ull) >> 29),
                 bits = i < 1000   ? i
                        : i < 2000 ? ~(unsigned)(i - 1000)
                                   : h;
  return (2ull * i + 1) *
         (__float_as_uint(noise(bits)) + probability_mass(__fmul_rn(-(float)(h >> 8), 30.0f / 16777216.0f)));
}
KERNEL(hash_numbers, Hash, 256) {
  u64 sum = 0;
  for (int i = blockIdx.x * 256 + threadIdx.x; i < p.n; i += gridDim.x * 256) sum += number_hash(i);
  atomicAdd(p.sum, sum);
}

template <class P>
static void launch(void (*kernel)(const P), dim3 grid, unsigned block, cudaStream_t s, P p) {
  cudaLaunchConfig_t c = {};
  c.gridDim = grid;
  c.blockDim = dim3(block);
  c.stream = s;
  cudaLaunchAttribute a[1];
  a[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  a[0].val.programmaticStreamSerializationAllowed = 1;
  c.attrs = a;
  c.numAttrs = 1;
  void* args[] = {&p};
  CK(cudaLaunchKernelExC(&c, (const void*)kernel, args));
}
template <class T>
static T* device(const std::vector<T>& v) {
  T* p;
  CK(cudaMalloc(&p, v.size() * sizeof(T)));
  CK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}
template <class F>
static float time_graph(cudaStream_t s, int chains, F add) {
  cudaGraph_t g;
  cudaGraphExec_t exec;
  CK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < chains; i++) add();
  CK(cudaStreamEndCapture(s, &g));
  CK(cudaGraphInstantiate(&exec, g, 0));
  cudaEvent_t a, b;
  CK(cudaEventCreate(&a));
  CK(cudaEventCreate(&b));
  std::vector<float> us;
  for (int i = 0; i < 12; i++) {
    CK(cudaEventRecord(a, s));
    CK(cudaGraphLaunch(exec, s));
    CK(cudaEventRecord(b, s));
    CK(cudaEventSynchronize(b));
    float ms;
    CK(cudaEventElapsedTime(&ms, a, b));
    if (i >= 2) us.push_back(ms * 1000 / chains);
  }
  std::sort(us.begin(), us.end());
  CK(cudaGraphExecDestroy(exec));
  CK(cudaGraphDestroy(g));
  return us[us.size() / 2];
}

enum { ADJUST = 1, COUNT = 2, CHOOSE = 4, SETTLE = 8, ACCEPT = 16, ALL = 31 };
struct Options {
  const char* name;
  float temperature;
  int top_k;
  double top_p, min_p;
  bool penalties;
  int kernels;
};
static const Options kOptions[] = {
    {"greedy, its own graph", 0, 0, 1, 0, false, ACCEPT},
    {"greedy, all kernels", 0, 0, 1, 0, false, ALL},
    {"greedy, penalties and bias", 0, 0, 1, 0, true, ADJUST | ACCEPT},
    {"T 0.8", 0.8f, 0, 1, 0, false, CHOOSE | ACCEPT},
    {"T 0.8, all kernels", 0.8f, 0, 1, 0, false, ALL},
    {"T 0.8, min-p 0.05", 0.8f, 0, 1, 0.05, false, CHOOSE | ACCEPT},
    {"T 0.8, top-k 50", 0.8f, 50, 1, 0, false, ALL & ~ADJUST},
    {"T 0.8, top-p 0.9", 0.8f, 0, 0.9, 0, false, ALL & ~ADJUST},
    {"T 0.8, top-k 50, top-p 0.9, min-p", 0.8f, 50, 0.9, 0.01, false, ALL & ~ADJUST},
    {"the same, penalties and bias", 0.8f, 50, 0.9, 0.01, true, ALL},
    {"T 0.1, top-k 50", 0.1f, 50, 1, 0, false, ALL & ~ADJUST},
    {"T 1e9 (flat), top-p 0.9", 1e9f, 0, 0.9, 0, false, ALL & ~ADJUST},
    // Where the time goes: a part of a chain by itself (State does not move without sample_accept).
    {"  sample_count alone", 0.8f, 50, 0.9, 0.01, false, COUNT},
    {"  sample_choose alone", 0.8f, 0, 1, 0, false, CHOOSE}};

int main() {
  cudaStream_t s;
  CK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  {
    u64 *sum = device(std::vector<u64>(1)), got;
    launch(hash_numbers, dim3(264), 256, s, Hash{sum, 2000000});
    CK(cudaStreamSynchronize(s));
    CK(cudaMemcpy(&got, sum, 8, cudaMemcpyDeviceToHost));
    std::printf("noise and mass: %s the bits of the CPU\n", got == 14086682687857076373ull ? "equal" : "DIFFER from");
  }
  for (int vocab : {128256, 151936, 49152}) {
    std::vector<float> l((size_t)16 * vocab);
    srand(1);
    for (auto& x : l) {
      const double u = (rand() + 1.0) / (RAND_MAX + 2.0), v = rand() / (RAND_MAX + 1.0);
      x = (float)(2.5 * std::sqrt(-2 * std::log(u)) * std::cos(6.2831853 * v));
    }
    for (int r = 0; r < 16; r++)
      for (int i = 0; i < 20; i++)
        l[(size_t)r * vocab + rand() % vocab] = 9.f + 0.4f * i;  // a few likely tokens, as in a trained model
    SampleParams p{};
    p.logits = device(l);
    p.state = device(std::vector<State>(1, State{}));
    SamplingParams o{};
    SamplingParams* options = device(std::vector<SamplingParams>(1, o));
    p.options = options;
    CK(cudaMalloc(&p.scratch, sizeof(SampleScratch)));
    CK(cudaMemset(p.scratch, 0, sizeof(SampleScratch)));
    CK(cudaMalloc(&p.list, (size_t)16 * vocab * 8));
    std::vector<unsigned> counts(vocab);
    for (int i = 0; i < 500; i++) counts[rand() % vocab] = 0x80000001u;
    p.counts = device(counts);
    p.bias = device(std::vector<float>(vocab));
    p.history = device(std::vector<int>(4096, 1));
    CK(cudaHostAlloc(&p.ring, RECORDS * RECORD_WORDS * 8, cudaHostAllocDefault));
    u64* device_ring;
    CK(cudaMalloc(&device_ring, RECORDS * RECORD_WORDS * 8));
    p.vocab = p.stride = p.n_tokens = vocab;
    p.ranks = 1;
    p.n_max = 264;  // two blocks an SM, as the head has
    std::vector<float> max_value((size_t)16 * p.n_max, -INFINITY);
    std::vector<int> max_id((size_t)16 * p.n_max, 0x7fffffff);
    for (int r = 0; r < 16; r++)
      for (int i = 0; i < vocab; i++) {
        const size_t at = (size_t)r * p.n_max + i / 16 % p.n_max;
        if (l[(size_t)r * vocab + i] > max_value[at]) {
          max_value[at] = l[(size_t)r * vocab + i];
          max_id[at] = i;
        }
      }
    float* maxima = device(max_value);
    int* max_ids = device(max_id);
    p.max_value = maxima;
    p.max_id = max_ids;
    const auto set = [&](const Options& c) {
      o.seed = 42;
      o.top_p = (unsigned long long)std::nearbyint(c.top_p * 4294967296.0);
      o.temperature = c.temperature;
      o.min_z = c.min_p > 0 ? std::log((float)c.min_p) : -INFINITY;
      o.top_k = c.top_k;
      o.repetition_penalty = c.penalties ? 1.0001f : 1;
      o.presence_penalty = c.penalties ? 1e-6f : 0;
      o.frequency_penalty = 0;
      o.has_bias = c.penalties;
      o.max_tokens = 1 << 20;
      o.context = 1 << 20;
      CK(cudaMemcpy(options, &o, sizeof o, cudaMemcpyHostToDevice));
    };
    const auto chain = [&](SampleParams q, int width, int blocks, int kernels) {
      q.width = width;
      launch(set_rows, dim3(1), 32, s, Rows{q.state, width});
      if (kernels & ADJUST) launch(sample_adjust, dim3(blocks, width), 256, s, q);
      if (kernels & COUNT) launch(sample_count, dim3(blocks, width), 256, s, q);
      if (kernels & CHOOSE) launch(sample_choose, dim3(blocks, width), 256, s, q);
      if (kernels & SETTLE) launch(sample_settle, dim3(1, width), 256, s, q);
      if (kernels & ACCEPT) launch(sample_accept, dim3(1), 256, s, q);
    };
    const auto tokens = [&](int width, int blocks, int kernels,
                            int row) {  // row by row of several passes: drafts never match, so a pass gives row 0
      SampleParams q = p;
      q.logits += (size_t)row * vocab;
      q.max_value += (size_t)row * p.n_max;
      q.max_id += (size_t)row * p.n_max;
      chain(q, width, blocks, kernels);
      CK(cudaStreamSynchronize(s));
      State st;
      CK(cudaMemcpy(&st, p.state, sizeof st, cudaMemcpyDeviceToHost));
      return st.root;
    };
    const int least = (vocab + SAMPLE_SLICE - 1) / SAMPLE_SLICE;
    int bad = 0, n = 0;
    for (const auto& c : kOptions) {
      if (c.penalties || !(c.kernels & ACCEPT)) continue;
      set(c);
      for (int r = 0; r < 8; r++, n++) {
        const int t = tokens(1, least, ALL, r);
        bad += t != tokens(8, least, c.kernels, r) || t != tokens(1, least * 3, c.kernels, r) || t < 0 || t >= vocab;
      }
    }
    std::printf("vocab %d: %d of %d tokens depend on width, blocks or graph\n", vocab, bad, n);
    for (int width : {1, 8, 16})
      for (int blocks : {least, std::max(least, 132 / width), std::max(least, 264 / width)}) {
        if (width > 1 && blocks != std::max(least, 264 / width)) continue;
        std::printf("  width %2d, %3d blocks a row\n", width, blocks);
        for (const auto& c : kOptions) {
          set(c);
          const auto only_rows = [&] { launch(set_rows, dim3(1), 32, s, Rows{p.state, width}); };
          time_graph(s, 40, only_rows);  // the clock is up from here on
          const float base = time_graph(s, 40, only_rows),
                      us = time_graph(s, 40, [&] { chain(p, width, blocks, c.kernels); });
          SampleParams q = p;
          q.ring = device_ring;
          const float without_host = time_graph(s, 40, [&] { chain(q, width, blocks, c.kernels); });
          std::printf("    %-36s %7.2f us, ring in device memory %7.2f us\n", c.name, us - base, without_host - base);
          if (c.kernels == COUNT) CK(cudaMemset(p.scratch, 0, sizeof(SampleScratch)));
          if (c.kernels == CHOOSE) CK(cudaMemset(p.scratch, 0, sizeof(SampleScratch)));
        }
      }
    for (void* q : {(void*)p.logits, (void*)p.state, (void*)options, (void*)p.scratch, (void*)p.list, (void*)p.counts,
                    (void*)p.bias, (void*)p.history, (void*)maxima, (void*)max_ids, (void*)device_ring})
      CK(cudaFree(q));
    CK(cudaFreeHost(p.ring));
  }
  // Drafting: the choice over a drafter's 32,000 logits, and the n-gram search in 32,768 tokens that never repeat.
  {
    SamplingParams o{};
    o.seed = 1;
    o.max_tokens = 1 << 20;
    o.context = 1 << 20;
    State st{};
    st.history_length = 32768;
    st.emitted = 1;
    st.rows = 1;
    std::vector<int> history(32800), ids(32000);
    for (size_t i = 0; i < history.size(); i++) history[i] = (int)i;
    for (size_t i = 0; i < ids.size(); i++) ids[i] = (int)(4 * i);
    std::vector<float> l(32000);
    for (auto& x : l) {
      const double u = (rand() + 1.0) / (RAND_MAX + 2.0), v = rand() / (RAND_MAX + 1.0);
      x = (float)(2.5 * std::sqrt(-2 * std::log(u)) * std::cos(6.2831853 * v));
    }
    std::vector<float> max_value(250, 12.f);
    std::vector<int> max_id(250, 5);
    DraftParams d{};
    d.logits = device(l);
    d.state = device(std::vector<State>(1, st));
    d.scratch = device(std::vector<DraftScratch>(1, DraftScratch{}));
    d.target_ids = device(ids);
    d.max_value = device(max_value);
    d.max_id = device(max_id);
    d.n_max = 250;
    d.vocab = 32000;
    d.n_drafts = 3;
    d.options = device(std::vector<SamplingParams>(1, o));
    std::printf("draft_choose, 32000 ids, greedy: %.2f us\n",
                time_graph(s, 60, [&] { launch(draft_choose, dim3(125), 256, s, d); }));
    o.temperature = 0.8f;
    d.options = device(std::vector<SamplingParams>(1, o));
    for (int blocks : {32, 63, 125})
      std::printf("draft_choose, 32000 ids, T 0.8, %d blocks: %.2f us\n", blocks,
                  time_graph(s, 60, [&] { launch(draft_choose, dim3(blocks), 256, s, d); }));
    NgramParams g{};
    g.state = d.state;
    g.options = d.options;
    g.scratch = d.scratch;
    g.history = device(history);
    g.min_n = 2;
    g.max_n = 8;
    g.n_drafts = 7;
    CK(cudaHostAlloc(&g.ring, RECORDS * RECORD_WORDS * 8, cudaHostAllocDefault));
    for (int blocks : {32, 64, 128})
      std::printf("ngram_draft, 32768 tokens, %d blocks: %.2f us\n", blocks,
                  time_graph(s, 60, [&] { launch(ngram_draft, dim3(blocks), 256, s, g); }));
  }
  return 0;
}
