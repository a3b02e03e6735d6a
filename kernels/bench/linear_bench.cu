// Times the real linear kernels on a GPU, without the engine: chains of all linear layers of a model in one graph with
// programmatic edges, single shapes, prefill; and first checks that all variants, widths and prefill give the same bits
// there, and the right numbers. Build and run: nvcc -O3 -std=c++17 -arch=sm_90a -Ikernels kernels/bench/linear_bench.cu
// -o linear_bench && ./linear_bench [check|shapes|chains|prefill]...
#include "bench.cuh"
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include "../embed.cu"
#include "../linear.cu"
#include "../linear_prefill.cu"
#include "../norm.cu"
#include "../probe.cu"
#include "../repack.cu"

// Candidates beside the kernels in use, for tuning on another chip.
LINEAR(m8_a4x4, Bf16, 1, 4, 4, 1)
LINEAR(m8_a5x5, Bf16, 1, 5, 5, 1)
LINEAR(m8_a8x4, Bf16, 1, 8, 4, 1)
LINEAR(m16_a4x2, Bf16, 2, 4, 2, 1)
LINEAR(m16_a3x3, Bf16, 2, 3, 3, 1)
LINEAR(fp8_a3x3, Fp8, 1, 3, 3, 1)
LINEAR(fp8_a4x1, Fp8, 1, 4, 1, 1)
LINEAR(fp8_a4x2, Fp8, 1, 4, 2, 1)
LINEAR(fp8_a5x1, Fp8, 1, 5, 1, 1)
LINEAR(fp8_a6x2, Fp8, 1, 6, 2, 1)
LINEAR(m16_fp8_a3x1, Fp8, 2, 3, 1, 1)
LINEAR(m16_fp8_a2x1, Fp8, 2, 2, 1, 1)
LINEAR(int4_a4x2, Int4, 1, 4, 2, 1)
LINEAR(int4_a3x3, Int4, 1, 3, 3, 1)
LINEAR(int4_a6x2, Int4, 1, 6, 2, 1)
LINEAR(int4_a8x2, Int4, 1, 8, 2, 1)
LINEAR(m16_int4_a2x2, Int4, 2, 2, 2, 1)
LINEAR(m16_int4_a3x1, Int4, 2, 3, 1, 1)

namespace {
enum Format { kBf16, kFp8, kInt4 };
struct Variant {
  const char* name;
  const void* f;
  int columns;
  Format format;
};
#define V(name, columns, ...) {#name, (const void*)name, columns, Format(__VA_ARGS__)}
const Variant kVariants[] = {
    V(linear_m8, 1),
    V(m8_a4x4, 1),
    V(m8_a5x5, 1),
    V(m8_a8x4, 1),
    V(linear_m16, 2),
    V(m16_a4x2, 2),
    V(m16_a3x3, 2),
    V(linear_m8_fp8, 1, kFp8),
    V(fp8_a3x3, 1, kFp8),
    V(fp8_a4x1, 1, kFp8),
    V(fp8_a4x2, 1, kFp8),
    V(fp8_a5x1, 1, kFp8),
    V(fp8_a6x2, 1, kFp8),
    V(linear_m16_fp8, 2, kFp8),
    V(m16_fp8_a3x1, 2, kFp8),
    V(m16_fp8_a2x1, 2, kFp8),
    V(linear_m8_int4, 1, kInt4),
    V(int4_a4x2, 1, kInt4),
    V(int4_a3x3, 1, kInt4),
    V(int4_a6x2, 1, kInt4),
    V(int4_a8x2, 1, kInt4),
    V(linear_m16_int4, 2, kInt4),
    V(m16_int4_a2x2, 2, kInt4),
    V(m16_int4_a3x1, 2, kInt4),
};
struct Prefill {
  const char* name;
  const void* f;
  int n, m, threads, shared;
};
const Prefill kPrefill[] = {{"prefill 128x128", (const void*)linear_prefill_128x128, 128, 128, 256, kPrefillRing},
                            {"prefill 64x64", (const void*)linear_prefill_64x64, 64, 64, 128, kPrefillRing}};
struct Choice {
  const Variant* v;
  int per_sm;
};  // blocks per SM at most; 0: one tile a block
struct Shape {
  const char* name;
  int n, k, epilogue;
  bool norm;
};  // n: outputs (of silu: ffn)
struct Model {
  const char* name;
  int layers;
  std::vector<Shape> layer;
  Shape head;
};

char* weights;
size_t weights_bytes;
bf16 *buffer[3], *norm_weight;
float *logits, *max_value, *inverse, *squares;
int* max_id;     // buffer: two activations, and normed; logits: the residual stream, too
double ceiling;  // GB/s

size_t bytes_of(const Shape& s, Format format = kBf16) {  // scales of FP8 not counted
  const int rows = s.epilogue == kEpilogueSilu ? 2 * s.n : s.n;
  return (size_t)(rows + 15) / 16 *
         (format == kInt4  ? units_of<Int4>(s.k) * Int4::kUnitBytes
          : format == kFp8 ? units_of<Fp8>(s.k) * Fp8::kUnitBytes
                           : k_blocks_of(s.k) * 1024);
}

LinearParams params_of(const Shape& s, size_t offset, const bf16* x, bf16* out, int rows, Format format = kBf16) {
  LinearParams p{};
  p.part[0] = {
      (const uint4*)(weights + offset), nullptr, x, s.norm ? squares : nullptr, nullptr, s.k, s.k, 0, 0, 1e-5f};
  const int units = format == kBf16 ? k_blocks_of(s.k) : units_of<Int4>(s.k), each = segment_units_of(units);
  p.part[0].segment_units = each;
  p.part[0].n_segments = (units + each - 1) / each;
  if (format == kFp8) p.part[0].scales = (const float*)weights;  // any numbers
  p.n_parts = 1;
  p.n = s.n;
  p.n_tiles = s.epilogue == kEpilogueSilu ? (s.n + 7) / 8 : (s.n + 15) / 16;
  p.rows = rows;
  p.epilogue = s.epilogue;
  p.out_stride = s.n;
  p.out = out;
  p.stream = s.epilogue == kEpilogueResidual ? logits : nullptr;
  p.logits = logits;
  if (s.epilogue == kEpilogueLogits) {
    p.max_value = max_value;
    p.max_id = max_id;
  }
  return p;
}
void linear_launch(const Choice& c, const Shape& s, size_t offset, const bf16* x, bf16* out, int rows, int layer) {
  LinearParams p = params_of(s, offset, x, out, rows, c.v->format);
  if (s.epilogue == kEpilogueResidual) {
    p.next_norm = norm_weight + layer % 64 * 8192;
    p.normed = buffer[2];
    p.squares = squares;
  }
  launch(c.v->f, dim3(c.per_sm ? std::min(p.n_tiles, c.per_sm * n_sms) : p.n_tiles), kSegments * 32, &p, true);
}
void prefill_launch(const Prefill& v, LinearParams& p, int rows) {
  launch(v.f, dim3((rows + v.m - 1) / v.m, (p.n_tiles * 16 + v.n - 1) / v.n), v.threads, &p, true, v.shared);
}
void fill(void* to, int n, int k, bool retiled, float scale, unsigned seed, bool constant = false) {
  FillParams p{to, seed, n, k, retiled, constant, scale, 0};
  launch((const void*)fill_random, dim3(n_sms * 8), 256, &p, false);
}

void measure_ceiling() {
  ReadParams p{(const uint4*)weights, weights_bytes / 16, (unsigned*)max_id};
  float best = 1e9;
  for (int per_sm : {2, 4})
    best =
        std::min(best, time_graph([&] { launch((const void*)read_ceiling, dim3(n_sms * per_sm), 512, &p, false); }, 7));
  ceiling = weights_bytes / best / 1e6;
  std::printf("read ceiling %.0f GB/s over %.1f GB, %d SMs\n", ceiling, weights_bytes / 1e9, n_sms);
}

// ---- correctness on the real tensor cores ----
__global__ void reference(LinearParams p, const bf16* raw, float* y,
                          int row) {  // one output a thread, f32, one part, re-tiled weights
  const int n = blockIdx.x * blockDim.x + threadIdx.x;
  if (n >= p.n_tiles * 16) return;
  const bf16 *w = (const bf16*)p.part[0].weights, *x = p.part[0].x + (size_t)row * p.part[0].x_stride;
  float s = 0, ss = 0;
  for (int k = 0; k < p.part[0].k; k++) {
    const float v = __bfloat162float(x[k]);
    s += __bfloat162float(w[retiled_index(n, k, k_blocks_of(p.part[0].k))]) * v;
    const float u = __bfloat162float(raw[(size_t)row * p.part[0].k + k]);
    ss += u * u;
  }
  y[n] = p.part[0].squares ? s * rsqrtf(ss / p.part[0].k + p.part[0].eps) : s;
}
bool check_all() {
  bool ok = true;
  const Shape shapes[] = {{"qkv", 6144, 4096, kEpilogueStore, true},    {"o", 4096, 4096, kEpilogueResidual, false},
                          {"gate_up", 3072, 2048, kEpilogueSilu, true}, {"down", 2048, 8192, kEpilogueResidual, false},
                          {"head", 49152, 576, kEpilogueLogits, true},  {"small", 576, 1536, kEpilogueStore, false},
                          {"odd", 1000, 96, kEpilogueStore, true}};
  for (const Shape& s : shapes) {
    const int n_weights = s.epilogue == kEpilogueSilu ? 2 * s.n : s.n, rows = 64;
    fill(weights, n_weights, s.k, true, 0.05f, 1);
    fill(buffer[0], rows, s.k, false, 2.0f, 2);
    const size_t count = (size_t)rows * s.n,
                 element = s.epilogue == kEpilogueLogits || s.epilogue == kEpilogueResidual ? 4 : 2;
    std::vector<char> expected(count * element), got(count * element);
    auto reset = [&] {
      fill(buffer[1], rows, s.n, false, 1.0f, 3);
      CHECK(cudaMemsetAsync(logits, 0x41, count * 4, stream));
    };
    auto fetch = [&](std::vector<char>& to) {
      CHECK(cudaMemcpyAsync(to.data(), element == 4 ? (void*)logits : (void*)buffer[1], count * element,
                            cudaMemcpyDeviceToHost, stream));
      CHECK(cudaStreamSynchronize(stream));
    };
    const bf16* x = s.norm ? buffer[2] : buffer[0];
    NormParams norm{buffer[0], norm_weight, buffer[2], inverse, squares, nullptr, rows, s.k, s.k, s.k, 1e-5f, 0};
    launch((const void*)norm_rows_bf16, dim3((rows + 7) / 8), 256, &norm, false);
    auto shifted = [&](LinearParams p, int row) {
      p.part[0].x += (size_t)row * s.k;
      if (s.norm) p.part[0].squares += (size_t)row * (s.k / 16);
      p.out += (size_t)row * s.n;
      if (p.stream) p.stream += (size_t)row * s.n;
      p.logits += (size_t)row * s.n;
      p.max_value = nullptr;
      return p;
    };
    reset();
    for (int m = 0; m < rows; m++) {
      LinearParams p = shifted(params_of(s, 0, x, buffer[1], 1), m);
      launch((const void*)linear_m8, dim3(std::min(p.n_tiles, n_sms)), 256, &p, true);
    }
    fetch(expected);
    auto compare = [&](const char* what) {
      fetch(got);
      size_t differ = 0;
      for (size_t i = 0; i < got.size(); i += element) differ += std::memcmp(&got[i], &expected[i], element) != 0;
      if (differ) {
        std::printf("FAILED %s on %s: %zu of %zu outputs differ\n", what, s.name, differ, count);
        ok = false;
      }
    };
    for (const Variant& v : kVariants)
      for (int width : {1, 3, 8, 16}) {
        if (width > v.columns * 8 || v.format != kBf16) continue;
        reset();
        for (int m = 0; m + width <= rows || m < rows; m += width) {
          LinearParams p = shifted(params_of(s, 0, x, buffer[1], std::min(width, rows - m)), m);
          launch(v.f, dim3(width & 1 ? p.n_tiles : std::min(p.n_tiles, 2 * n_sms)), kSegments * 32, &p, true);
        }
        char what[80];
        std::snprintf(what, sizeof what, "%s width %d", v.name, width);
        compare(what);
      }
    LinearParams p = params_of(s, 0, x, buffer[1], rows);
    p.max_value = nullptr;
    if (s.norm) p.part[0].inv = inverse;
    for (const Prefill& v : kPrefill) {
      reset();
      prefill_launch(v, p, rows);
      compare(v.name);
    }
    // Against a plain sum: plain store only, other epilogues have their CPU tests.
    if (s.epilogue == kEpilogueStore || s.epilogue == kEpilogueLogits) {
      LinearParams r = params_of(s, 0, x, buffer[1], 1);
      reference<<<(r.n_tiles * 16 + 255) / 256, 256, 0, stream>>>(r, buffer[0], inverse + 4096, 5);
      std::vector<float> y(s.n);
      CHECK(cudaMemcpyAsync(y.data(), inverse + 4096, s.n * 4, cudaMemcpyDeviceToHost, stream));
      CHECK(cudaStreamSynchronize(stream));
      double worst = 0;
      for (int n = 0; n < s.n; n++) {
        const size_t at = (size_t)5 * s.n + n;
        float v;
        if (element == 4) v = ((float*)expected.data())[at];
        else {
          uint32_t u = ((uint16_t*)expected.data())[at] << 16;
          std::memcpy(&v, &u, 4);
        }
        const double d = std::fabs(v - y[n]) / (0.5 + std::fabs(y[n]));
        worst = d > worst || d != d ? d : worst;
      }
      if (!(worst < (element == 4 ? 1e-4 : 5e-3))) {
        std::printf("FAILED %s: off by %.2e\n", s.name, worst);
        ok = false;
      }
    }
  }
  std::printf("%s: all variants, widths 1 3 8 16 and prefill give the same bits on 7 shapes\n", ok ? "ok" : "FAILED");
  return ok;
}

// ---- timing ----
std::vector<Choice> choices(int rows) {
  std::vector<Choice> r;
  for (const Variant& v : kVariants)
    if (v.format == kBf16 && v.columns * 8 >= rows && (rows > 8 || v.columns == 1))
      for (int per_sm : {0, 1, 2, 3, 4}) r.push_back({&v, per_sm});
  return r;
}
// A chain of one shape over fresh weights; microseconds a launch.
float time_shape(const Shape& s, const Choice& c, int rows) {
  const size_t bytes = bytes_of(s),
               many = std::max<size_t>(
                   4, std::min<size_t>(weights_bytes / bytes, std::max<size_t>(24, (2ull << 30) / bytes)));
  return time_graph(
             [&] {
               for (size_t i = 0; i < many; i++)
                 linear_launch(c, s, i * bytes, buffer[i & 1], buffer[1 - (i & 1)], rows, i);
             },
             7) *
         1e3f / many;
}
std::map<std::string, Choice> best_of;  // by shape and rows
std::string key(const Shape& s, int rows) {
  return std::to_string(s.n) + "x" + std::to_string(s.k) + "x" + std::to_string(s.epilogue) + "m" +
         std::to_string(rows);
}

void time_shapes(const Model& model) {
  std::vector<Shape> all = model.layer;
  all.push_back(model.head);
  for (const Shape& s : all)
    for (int rows : {1, 8, 16}) {
      std::vector<std::pair<float, Choice>> t;
      for (const Choice& c : choices(rows)) t.push_back({time_shape(s, c, rows), c});
      std::sort(t.begin(), t.end(), [](auto& a, auto& b) { return a.first < b.first; });
      best_of[key(s, rows)] = t[0].second;
      std::printf("%-13s %-8s %6dx%-5d M%-2d", model.name, s.name, s.n, s.k, rows);
      std::map<const Variant*, int> shown;
      for (auto& [us, c] : t)
        if (!shown[c.v]++)
          std::printf(" | %s/%d %.2f us %.0f%%", c.v->name, c.per_sm, us, 100 * bytes_of(s) / us / 1e3 / ceiling);
      std::printf("\n");
      std::fflush(stdout);
    }
}
void time_chain(const Model& m, int rows, const Choice* fixed) {
  size_t total = 0;
  int n = 0;
  const float ms = time_graph([&] {
    struct Link {
      const Shape* s;
      int from, to, norm;
      size_t offset;
    };
    std::vector<Link> all;
    size_t offset = 0;
    total = 0;
    auto add = [&](const Shape& s, int from, int to, int norm) {
      const size_t bytes = bytes_of(s, fixed ? fixed->v->format : kBf16);
      if (offset + bytes > weights_bytes) offset = 0;
      all.push_back({&s, from, to, norm, offset});
      offset += bytes;
      total += bytes;
    };
    for (int l = 0; l < m.layers; l++) {
      add(m.layer[0], 2, 1, 0);
      add(m.layer[1], 1, 0, 2 * l);
      add(m.layer[2], 2, 1, 0);
      add(m.layer[3], 1, 0, 2 * l + 1);
    }
    add(m.head, 2, 1, 0);
    n = (int)all.size();
    for (int i = 0; i < n; i++) {
      const Link& a = all[i];
      linear_launch(fixed ? *fixed : best_of.at(key(*a.s, rows)), *a.s, a.offset, buffer[a.from], buffer[a.to], rows,
                    a.norm);
    }
  });
  std::printf("chain %-13s M%-2d %-22s/%d: %d linears %.3f GB %.4f ms %.0f GB/s %.1f%% of the ceiling\n", m.name, rows,
              fixed ? fixed->v->name : "best per shape", fixed ? fixed->per_sm : 0, n, total / 1e9, ms,
              total / ms / 1e6, 100 * total / ms / 1e6 / ceiling);
  std::fflush(stdout);
}
void time_prefill(const Model& m, int rows) {
  for (const Prefill& tile : kPrefill) {
    double flops = 0;
    float each[4];
    auto record = [&](int only) {
      size_t offset = 0;
      flops = 0;
      auto add = [&](const Shape& s, const bf16* x, bf16* out) {
        LinearParams p = params_of(s, offset, x, out, rows);
        if (s.norm) {
          NormParams q{x, norm_weight, buffer[2], inverse, nullptr, nullptr, rows, s.k, s.k, s.k, 1e-5f, 0};
          launch((const void*)norm_rows_bf16, dim3((rows + 7) / 8), 256, &q, true);
          p.part[0].x = buffer[2];
          p.part[0].inv = inverse;
        }
        prefill_launch(tile, p, rows);
        offset += bytes_of(s);
        flops += (double)bytes_of(s) * rows;
        if (offset > weights_bytes / 2) offset = 0;
      };
      for (int l = 0; l < (only < 0 ? m.layers : 4); l++)
        for (int i = 0; i < 4; i++)
          if (only < 0 || only == i) add(m.layer[i], buffer[i & 1], buffer[1 - (i & 1)]);
    };
    for (int i = 0; i < 4; i++) {
      const float ms = time_graph([&] { record(i); }, 5);
      each[i] = flops / ms / 1e9;
    }
    const float ms = time_graph([&] { record(-1); }, 5);
    std::printf("prefill %-13s %4d rows, %-18s: %.2f ms, %.0f TFLOP/s (qkv %.0f, o %.0f, gate_up %.0f, down %.0f)\n",
                m.name, rows, tile.name + 8, ms, flops / ms / 1e9, each[0], each[1], each[2], each[3]);
    std::fflush(stdout);
  }
}
}  // namespace

int main(int argc, char** argv) {
  auto wants = [&](const char* what) {
    if (argc == 1) return true;
    for (int i = 1; i < argc; i++)
      if (!std::strcmp(argv[i], what)) return true;
    return false;
  };
  open_stream();
  size_t free_bytes, all_bytes;
  CHECK(cudaMemGetInfo(&free_bytes, &all_bytes));
  weights_bytes = std::min<size_t>(17ull << 30, free_bytes / 4 * 3) / 4096 * 4096;
  CHECK(cudaMalloc(&weights, weights_bytes));
  for (auto& b : buffer) { CHECK(cudaMalloc(&b, 64 << 20)); }
  CHECK(cudaMalloc(&norm_weight, 1 << 20));
  CHECK(cudaMalloc(&logits, 64 << 20));
  CHECK(cudaMalloc(&max_value, 8 << 20));
  CHECK(cudaMalloc(&max_id, 8 << 20));
  CHECK(cudaMalloc(&inverse, 8 << 20));
  CHECK(cudaMalloc(&squares, 8 << 20));
  CHECK(cudaMemset(squares, 0, 8 << 20));
  for (const Prefill& v : kPrefill)
    CHECK(cudaFuncSetAttribute(v.f, cudaFuncAttributeMaxDynamicSharedMemorySize, v.shared));
  if (const char* percent = std::getenv("CARVEOUT"))  // share of L1 given to shared memory, the same for all kernels
    for (const Variant& v : kVariants)
      CHECK(cudaFuncSetAttribute(v.f, cudaFuncAttributePreferredSharedMemoryCarveout, std::atoi(percent)));
  fill(norm_weight, 1, 1 << 19, false, 1.0f, 7);
  bool ok = true;
  if (wants("check")) ok = check_all();
  fill(weights, (int)(weights_bytes / 2 / 8192), 8192, false, 0.02f, 11);
  for (auto& b : buffer) fill(b, 1024, 16384, false, 1.0f, 13);
  fill(norm_weight, 1, 1 << 19, false, 1.0f, 0, true);
  CHECK(cudaStreamSynchronize(stream));
  measure_ceiling();
  const Model models[] = {
      {"llama-3.1-8b",
       32,
       {{"qkv", 6144, 4096, kEpilogueStore, true},
        {"o", 4096, 4096, kEpilogueResidual, false},
        {"gate_up", 14336, 4096, kEpilogueSilu, true},
        {"down", 4096, 14336, kEpilogueResidual, false}},
       {"head", 128256, 4096, kEpilogueLogits, true}},
      {"llama-3.2-1b",
       16,
       {{"qkv", 3072, 2048, kEpilogueStore, true},
        {"o", 2048, 2048, kEpilogueResidual, false},
        {"gate_up", 8192, 2048, kEpilogueSilu, true},
        {"down", 2048, 8192, kEpilogueResidual, false}},
       {"head", 128256, 2048, kEpilogueLogits, true}},
      {"smollm2-135m",
       30,
       {{"qkv", 960, 576, kEpilogueStore, true},
        {"o", 576, 576, kEpilogueResidual, false},
        {"gate_up", 1536, 576, kEpilogueSilu, true},
        {"down", 576, 1536, kEpilogueResidual, false}},
       {"head", 49152, 576, kEpilogueLogits, true}},
  };
  for (const Model& m : models) {
    if (wants("shapes")) {
      time_shapes(m);
      for (int rows : {1, 8, 16}) time_chain(m, rows, nullptr);
    }
    if (wants("chains"))
      for (int rows : {1, 8, 16})
        for (const Variant& v : kVariants)
          for (int per_sm : {0, 1, 2})
            if (v.columns * 8 >= rows && (rows > 8 || v.columns == 1)) {
              const Choice c{&v, per_sm};
              time_chain(m, rows, &c);
            }
  }
  if (wants("prefill"))
    for (int rows : {16, 64, 256, 512, 1024}) {
      time_prefill(models[0], rows);
      if (rows == 512) time_prefill(models[1], rows);
    }
  CHECK(cudaStreamSynchronize(stream));
  CHECK(cudaDeviceSynchronize());
  return !ok;
}
