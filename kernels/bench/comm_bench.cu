// Times the collectives of comm.cu on a GPU: all-reduce + residual + what the next norm needs as one kernel, against
// three (all-reduce that stores the sum as bf16, residual add, norm_rows), for push, pull and two-shot; 2, 4 and 8
// ranks as streams of one GPU, then, where there are two GPUs, a rank on each. Sums are compared with the host's before
// they are timed. Prints microseconds per call, and the nodes of a graph that a layer saves. A rank that waits in vain
// for 2 s ends the run. Build and run: nvcc -O3 -std=c++17 -arch=sm_90a -Ikernels kernels/bench/comm_bench.cu -o
// comm_bench && ./comm_bench
#include "../comm.cu"
#include "../norm.cu"
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#define CHECK(x)                                                                      \
  do {                                                                                \
    cudaError_t e_ = (x);                                                             \
    if (e_) {                                                                         \
      std::printf("error: %s: %s (line %d)\n", #x, cudaGetErrorString(e_), __LINE__); \
      std::_Exit(1);                                                                  \
    }                                                                                 \
  } while (0)

// The same collectives with nothing behind the sum, which goes to tap [rows][dim].
struct SumParams : AllReduceParams {};
__device__ __forceinline__ void finish(const SumParams& p, bool has, int row, int column, const uint4& sum) {
  if (has) *vector_at(p.tap, p.dim, row, column) = sum;
}
KERNEL(sum_push, SumParams, 256) { push<false>(p); }
KERNEL(sum_pull, SumParams, 256) { pull<false>(p); }
KERNEL(sum_two_shot, SumParams, 256, 2) { two_shot<false>(p); }

struct ResidualParams {
  float* x;
  const bf16* sum;
  int n;
};  // [n], n a multiple of 4
KERNEL(residual_add, ResidualParams, 256) {
  pdl_launch_dependents();
  pdl_wait();
  const int i = (blockIdx.x * 256 + threadIdx.x) * 4;
  if (i >= p.n) return;
  float4 x = *reinterpret_cast<float4*>(p.x + i);
  const uint2 y = *reinterpret_cast<const uint2*>(p.sum + i);
  x.x = __fadd_rn(x.x, bf16_low(y.x));
  x.y = __fadd_rn(x.y, bf16_high(y.x));
  x.z = __fadd_rn(x.z, bf16_low(y.y));
  x.w = __fadd_rn(x.w, bf16_high(y.y));
  *reinterpret_cast<float4*>(p.x + i) = x;
}

namespace {
constexpr int kCalls = 40, kReplays = 21, kMostRows = 16, kMostDim = 7168;
struct Algorithm {
  const char* name;
  const void *fused, *sum;
  bool splits;
};
const Algorithm kAlgorithms[] = {{"push", (const void*)all_reduce_push, (const void*)sum_push, false},
                                 {"pull", (const void*)all_reduce_pull, (const void*)sum_pull, false},
                                 {"two-shot", (const void*)all_reduce_two_shot, (const void*)sum_two_shot, true}};

struct Barrier {
  int n;
  std::atomic<int> arrived{0}, round{0};
  void wait() {
    const int now = round;
    if (++arrived == n) {
      arrived = 0;
      round++;
    } else
      while (round == now) {}
  }
};

struct Rank {
  int device;
  cudaStream_t stream;
  unsigned char* window;
  unsigned* poison;
  CommRecord* record;
  bf16 *partial, *sum, *normed, *weight;
  float *x, *squares, *inverse;
};

// What every rank starts from: partial [rank][row][dim], x [row][dim], weight [dim], for kMostDim columns; smaller rows
// are packed anew.
float number(unsigned seed) {
  seed = seed * 2654435761u + 12345u;
  seed ^= seed >> 15;
  seed *= 2246822519u;
  seed ^= seed >> 13;
  return (seed >> 8) / 8388608.0f - 1.0f;
}
bf16 partial_of(int rank, int i) { return __float2bfloat16(number(rank * 1000003u + i)); }
float x_of(int i) { return number(0x40000000u + i); }
bf16 weight_of(int i) { return __float2bfloat16(1.0f + 0.5f * number(0x50000000u + i)); }

struct World {
  std::vector<Rank> ranks;
  bool shared;  // ranks share a GPU: few blocks each, and no early launch, as in src/gpu/ranks/collective.rs
  Barrier barrier;

  World(int n, bool shared) : ranks(n), shared(shared), barrier{n} {
    for (int r = 0; r < n; r++) {
      Rank& k = ranks[r];
      k.device = shared ? 0 : r;
      CHECK(cudaSetDevice(k.device));
      if (!shared) {
        int reaches = 0;
        CHECK(cudaDeviceCanAccessPeer(&reaches, r, 1 - r));
        if (!reaches) {
          std::printf("error: GPU %d does not reach the memory of GPU %d\n", r, 1 - r);
          std::_Exit(1);
        }
        CHECK(cudaDeviceEnablePeerAccess(1 - r, 0));
      }
      CHECK(cudaStreamCreateWithFlags(&k.stream, cudaStreamNonBlocking));
      CHECK(cudaMalloc(&k.window, COMM_WINDOW_BYTES));
      CHECK(cudaMemset(k.window, 0, COMM_WINDOW_BYTES));
      CHECK(cudaHostAlloc(&k.poison, sizeof *k.poison, cudaHostAllocPortable));
      CHECK(cudaHostAlloc(&k.record, sizeof *k.record, cudaHostAllocPortable));
      *k.poison = 0;
      const size_t numbers = kMostRows * kMostDim;
      CHECK(cudaMalloc(&k.partial, numbers * 2));
      CHECK(cudaMalloc(&k.sum, numbers * 2));
      CHECK(cudaMalloc(&k.normed, numbers * 2));
      CHECK(cudaMalloc(&k.weight, kMostDim * 2));
      CHECK(cudaMalloc(&k.x, numbers * 4));
      CHECK(cudaMalloc(&k.squares, numbers / 16 * 4));
      CHECK(cudaMalloc(&k.inverse, kMostRows * 4));
      std::vector<bf16> partial(numbers), weight(kMostDim);
      for (size_t i = 0; i < numbers; i++) partial[i] = partial_of(r, (int)i);
      for (int i = 0; i < kMostDim; i++) weight[i] = weight_of(i);
      CHECK(cudaMemcpy(k.partial, partial.data(), numbers * 2, cudaMemcpyHostToDevice));
      CHECK(cudaMemcpy(k.weight, weight.data(), kMostDim * 2, cudaMemcpyHostToDevice));
      CHECK(cudaDeviceSynchronize());
    }
  }
  ~World() {
    for (Rank& k : ranks) {
      CHECK(cudaSetDevice(k.device));
      CHECK(cudaDeviceSynchronize());
      for (void* p : {(void*)k.window, (void*)k.partial, (void*)k.sum, (void*)k.normed, (void*)k.weight, (void*)k.x,
                      (void*)k.squares, (void*)k.inverse})
        CHECK(cudaFree(p));
      CHECK(cudaFreeHost(k.poison));
      CHECK(cudaFreeHost(k.record));
      CHECK(cudaStreamDestroy(k.stream));
    }
  }

  void launch(int r, const void* f, int blocks, int threads, void* params) {
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(blocks);
    c.blockDim = dim3(threads);
    c.stream = ranks[r].stream;
    cudaLaunchAttribute a;
    a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a.val.programmaticStreamSerializationAllowed = 1;
    c.attrs = &a;
    c.numAttrs = shared ? 0 : 1;
    void* args[] = {params};
    CHECK(cudaLaunchKernelExC(&c, f, args));
  }
  // One all-reduce of rank r and what follows from it, as one kernel or as three.
  void call(int r, const Algorithm& a, bool fused, int rows, int dim) {
    const Rank& k = ranks[r];
    const int n = (int)ranks.size(), tiles = dim / 16, most = shared ? 4 : COMM_CHANNELS;
    const int blocks = std::min(std::min(tiles / (a.splits ? n : 1), most), std::max(4, rows * dim * 2 / 4096));
    const int threads = std::min(256, (2 * ((tiles + blocks - 1) / blocks) * rows + 31) / 32 * 32);
    SumParams p = {};
    for (int i = 0; i < n; i++) p.comm.window[i] = ranks[i].window;
    p.comm.poison = k.poison;
    p.comm.record = k.record;
    p.comm.rank = r;
    p.comm.ranks = n;
    p.comm.patience_us = 2'000'000;
    p.partial = k.partial;
    p.x = k.x;
    p.rows = rows;
    p.dim = dim;
    if (fused) {
      p.next_norm = k.weight;
      p.normed = k.normed;
      p.squares = k.squares;
      return launch(r, a.fused, blocks, threads, static_cast<AllReduceParams*>(&p));
    }
    p.tap = k.sum;
    p.tap_stride = dim;
    launch(r, a.sum, blocks, threads, &p);
    ResidualParams add = {k.x, k.sum, rows * dim};
    launch(r, (const void*)residual_add, (rows * dim + 1023) / 1024, 256, &add);
    NormParams norm = {};
    norm.x = k.x;
    norm.norm = k.weight;
    norm.normed = k.normed;
    norm.inv = k.inverse;
    norm.squares = k.squares;
    norm.rows = rows;
    norm.k = norm.x_stride = norm.normed_stride = dim;
    norm.eps = 1e-5f;
    launch(r, (const void*)norm_rows, (rows + 7) / 8, 256, &norm);
  }
  // `body` on a thread of every rank at the same time; then no rank may have waited in vain.
  template <class F>
  void each(F body) {
    std::vector<std::thread> threads;
    for (int r = 0; r < (int)ranks.size(); r++)
      threads.emplace_back([&, r] {
        CHECK(cudaSetDevice(ranks[r].device));
        body(r);
      });
    for (auto& t : threads) t.join();
    for (size_t r = 0; r < ranks.size(); r++)
      if (*(volatile unsigned*)ranks[r].poison) {
        std::printf("error: rank %zu waited in vain for rank %d, phase %d, epoch %u\n", r, ranks[r].record->peer,
                    ranks[r].record->phase, ranks[r].record->epoch);
        std::_Exit(1);
      }
  }
  // x, normed and squares of one call on every rank against the host's.
  void check(const Algorithm& a, bool fused, int rows, int dim) {
    const size_t numbers = (size_t)rows * dim;
    std::vector<float> x0(numbers), want(numbers);
    std::vector<bf16> want_normed(numbers);
    for (size_t i = 0; i < numbers; i++) {
      float sum = 0;
      for (size_t r = 0; r < ranks.size(); r++) sum += __bfloat162float(partial_of((int)r, (int)i));
      x0[i] = x_of((int)i);
      want[i] = x0[i] + __bfloat162float(__float2bfloat16(sum));
      want_normed[i] = __float2bfloat16(want[i] * __bfloat162float(weight_of((int)(i % dim))));
    }
    each([&](int r) {
      const Rank& k = ranks[r];
      CHECK(cudaMemcpyAsync(k.x, x0.data(), numbers * 4, cudaMemcpyHostToDevice, k.stream));
      CHECK(cudaMemsetAsync(k.normed, 0xff, numbers * 2, k.stream));
      CHECK(cudaMemsetAsync(k.squares, 0xff, numbers / 16 * 4, k.stream));
      CHECK(cudaStreamSynchronize(k.stream));
      barrier.wait();
      call(r, a, fused, rows, dim);
      CHECK(cudaStreamSynchronize(k.stream));
      barrier.wait();  // copies may wait for all that runs on the GPU
      std::vector<float> x(numbers), squares(numbers / 16);
      std::vector<bf16> normed(numbers);
      CHECK(cudaMemcpy(x.data(), k.x, numbers * 4, cudaMemcpyDeviceToHost));
      CHECK(cudaMemcpy(normed.data(), k.normed, numbers * 2, cudaMemcpyDeviceToHost));
      CHECK(cudaMemcpy(squares.data(), k.squares, numbers / 4, cudaMemcpyDeviceToHost));
      for (size_t i = 0; i < numbers; i++)
        if (std::memcmp(&x[i], &want[i], 4) || std::memcmp(&normed[i], &want_normed[i], 2)) {
          std::printf("error: %s, %s, rank %d, row %zu, column %zu: x %g, normed %g; expected %g, %g\n", a.name,
                      fused ? "one kernel" : "three kernels", r, i / dim, i % dim, x[i], __bfloat162float(normed[i]),
                      want[i], __bfloat162float(want_normed[i]));
          std::_Exit(1);
        }
      for (size_t t = 0; t < squares.size(); t++) {
        float s[4];
        for (int q = 0; q < 4; q++) {
          const float* v = &want[t * 16 + 2 * q];
          const float even = v[0] * v[0] + v[8] * v[8], odd = v[1] * v[1] + v[9] * v[9];
          s[q] = even + odd;
        }
        const float total = (s[0] + s[1]) + (s[2] + s[3]);
        if (std::memcmp(&squares[t], &total, 4)) {
          std::printf("error: %s, %s, rank %d, tile %zu: squares %g, expected %g\n", a.name,
                      fused ? "one kernel" : "three kernels", r, t, squares[t], total);
          std::_Exit(1);
        }
      }
    });
  }
  // Microseconds a call: a graph of kCalls on every rank, launched together. The rank that starts last waits for nobody
  // to start: its time counts.
  float time(const Algorithm& a, bool fused, int rows, int dim, size_t* nodes) {
    std::vector<std::vector<float>> us(ranks.size(), std::vector<float>(kReplays));
    each([&](int r) {
      const cudaStream_t s = ranks[r].stream;
      cudaGraph_t graph;
      cudaGraphExec_t exec;
      cudaEvent_t begin, end;
      CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
      for (int i = 0; i < kCalls; i++) call(r, a, fused, rows, dim);
      CHECK(cudaStreamEndCapture(s, &graph));
      CHECK(cudaGraphInstantiate(&exec, graph, 0));
      CHECK(cudaGraphUpload(exec, s));
      CHECK(cudaEventCreate(&begin));
      CHECK(cudaEventCreate(&end));
      CHECK(cudaStreamSynchronize(s));
      if (r == 0) CHECK(cudaGraphGetNodes(graph, nullptr, nodes));
      for (float& t : us[r]) {
        barrier.wait();
        CHECK(cudaEventRecord(begin, s));
        CHECK(cudaGraphLaunch(exec, s));
        CHECK(cudaEventRecord(end, s));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&t, begin, end));
        t *= 1000.0f / kCalls;
      }
      barrier.wait();  // what is freed may wait for all that runs on the GPU
      CHECK(cudaGraphExecDestroy(exec));
      CHECK(cudaGraphDestroy(graph));
      CHECK(cudaEventDestroy(begin));
      CHECK(cudaEventDestroy(end));
    });
    std::vector<float> last(kReplays);
    for (int i = 0; i < kReplays; i++) {
      last[i] = us[0][i];
      for (auto& of_rank : us) last[i] = std::min(last[i], of_rank[i]);
    }
    std::sort(last.begin() + 3, last.end());  // the first ones bring the clock up
    return last[3 + (kReplays - 3) / 2];
  }
};

void bench(int n, bool shared) {
  World world(n, shared);
  std::printf("%d ranks on %s, us per call: one kernel / all-reduce + residual + norm\n", n,
              shared ? "one GPU" : "a GPU each");
  for (int dim : {4096, 7168})
    for (const Algorithm& a : kAlgorithms) {
      std::printf("  %-8s x %d ", a.name, dim);
      size_t one = 0, three = 0;
      for (int rows : {1, 2, 4, 8, 16}) {
        for (bool fused : {true, false}) world.check(a, fused, rows, dim);
        const float us = world.time(a, true, rows, dim, &one), us_three = world.time(a, false, rows, dim, &three);
        std::printf(" %3d rows %6.2f / %6.2f", rows, us, us_three);
      }
      std::printf("; nodes saved per layer (2 all-reduces): %zu\n", 2 * (three - one) / kCalls);
    }
}
}  // namespace

int main() {
  setvbuf(stdout, nullptr, _IONBF, 0);  // an error ends the process at once
  // Streams with queues of their own, and kernels loaded before any of them spins.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  int gpus = 0;
  CHECK(cudaGetDeviceCount(&gpus));
  cudaDeviceProp info;
  CHECK(cudaGetDeviceProperties(&info, 0));
  std::printf("%d x %s\n", gpus, info.name);
  for (int n : {2, 4, 8}) bench(n, true);
  if (gpus > 1) bench(2, false);
  return 0;
}
