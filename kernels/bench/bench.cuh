// What the benches of this folder share: a stream, launches with programmatic edges, the time of a graph.
#pragma once
#include <cuda_runtime.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(x)                                                                      \
  do {                                                                                \
    cudaError_t e_ = (x);                                                             \
    if (e_) {                                                                         \
      std::printf("error: %s: %s (line %d)\n", #x, cudaGetErrorString(e_), __LINE__); \
      std::exit(1);                                                                   \
    }                                                                                 \
  } while (0)

namespace {
cudaStream_t stream;  // of all launches
int n_sms;

void open_stream() {
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK(cudaDeviceGetAttribute(&n_sms, cudaDevAttrMultiProcessorCount, 0));
}

// params: the kernel's one argument. pdl: it may start while the kernel before ends. shared: dynamic, in bytes.
void launch(const void* kernel, dim3 grid, int threads, const void* params, bool pdl = true, int shared = 0) {
  cudaLaunchConfig_t c = {};
  c.gridDim = grid;
  c.blockDim = threads;
  c.dynamicSmemBytes = shared;
  c.stream = stream;
  cudaLaunchAttribute a;
  a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  a.val.programmaticStreamSerializationAllowed = 1;
  c.attrs = &a;
  c.numAttrs = pdl;
  void* args[] = {const_cast<void*>(params)};
  CHECK(cudaLaunchKernelExC(&c, kernel, args));
}

// Median ms of `n` replays of what `record` launches, after `warm` that do not count.
template <class F>
float time_graph(F record, int n = 15, int warm = 3) {
  cudaGraph_t g;
  cudaGraphExec_t e;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  record();
  CHECK(cudaStreamEndCapture(stream, &g));
  CHECK(cudaGraphInstantiate(&e, g, 0));
  cudaEvent_t a, b;
  cudaEventCreate(&a);
  cudaEventCreate(&b);
  for (int i = 0; i < warm; i++) cudaGraphLaunch(e, stream);
  std::vector<float> t;
  for (int i = 0; i < n; i++) {
    cudaEventRecord(a, stream);
    cudaGraphLaunch(e, stream);
    cudaEventRecord(b, stream);
    CHECK(cudaEventSynchronize(b));
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    t.push_back(ms);
  }
  cudaGraphExecDestroy(e);
  cudaGraphDestroy(g);
  cudaEventDestroy(a);
  cudaEventDestroy(b);
  std::sort(t.begin(), t.end());
  return t[n / 2];
}
}  // namespace
