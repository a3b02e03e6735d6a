// Times the attention kernels on a GPU, without the engine: chains of decode passes in one graph with programmatic
// edges, every node with its own cache, and prefill of 4,096 tokens in chunks of 1,024; and first checks on that GPU
// what the tests check under the shim: equal bits over paths and widths. Build and run: nvcc -O3 -std=c++17
// -arch=sm_90a -Ikernels kernels/bench/attention_bench.cu -o attention_bench && ./attention_bench
// [check|decode|prefill]...
#include "bench.cuh"
#include <cmath>
#include <cstring>
#include <string>
#include "../attention_decode.cu"
#include "../attention_prefill.cu"

namespace {
struct Shape {
  const char* name;
  int n_heads, n_kv_heads, head_dim, layers;
};
const Shape kShapes[] = {{"llama-3.1-8b", 32, 8, 128, 32}, {"smollm2-135m", 9, 3, 64, 30}};
struct Kernel {
  int head_dim, columns;
  const void* f;
};
#define D(hd, columns) {hd, columns, (const void*)attention_decode_##hd##_##columns}
const Kernel kDecode[] = {D(64, 16), D(64, 32), D(128, 16), D(128, 32)};
constexpr int kCapacity = 20480, kRows = 1024;

int* live;  // length, rows

// Buffers of all layers of a shape; qkv and out are shared, as in the engine.
struct Layers {
  Shape s;
  bf16 *qkv, *out, *k, *v;
  float *inv_freq, *partials;
  unsigned* counters;
  size_t cache;  // elements of K (or V) of a layer
};

__global__ void fill(bf16* p, size_t n, unsigned seed, float scale) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    unsigned h = (unsigned)(i ^ i >> 32) * 2654435761u + seed;
    h ^= h >> 15;
    h *= 2246822519u;
    h ^= h >> 13;
    h *= 3266489917u;
    h ^= h >> 16;
    p[i] = __float2bfloat16(((h >> 8) / 8388608.f - 1.f) * scale);
  }
}
Layers make(const Shape& s) {
  Layers l;
  l.s = s;
  l.cache = (size_t)s.n_kv_heads * kCapacity * s.head_dim;
  const size_t qkv = (size_t)kRows * (s.n_heads + 2 * s.n_kv_heads) * s.head_dim,
               out = (size_t)kRows * s.n_heads * s.head_dim;
  CHECK(cudaMalloc(&l.qkv, qkv * 2));
  CHECK(cudaMalloc(&l.out, out * 2));
  CHECK(cudaMalloc(&l.k, l.cache * s.layers * 2));
  CHECK(cudaMalloc(&l.v, l.cache * s.layers * 2));
  CHECK(cudaMalloc(&l.inv_freq, s.head_dim * 2));
  CHECK(cudaMalloc(&l.partials, (size_t)s.n_kv_heads * 96 * 128 * (s.head_dim + 2) * 4));
  CHECK(cudaMalloc(&l.counters, 4096));
  CHECK(cudaMemset(l.counters, 0, 4096));
  std::vector<float> f;
  for (int i = 0; i < s.head_dim / 2; i++) f.push_back((float)std::pow(10000.0, -2.0 * i / s.head_dim));
  CHECK(cudaMemcpy(l.inv_freq, f.data(), f.size() * 4, cudaMemcpyHostToDevice));
  fill<<<1024, 256, 0, stream>>>(l.qkv, qkv, 1, 2.f);
  fill<<<1024, 256, 0, stream>>>(l.k, l.cache * s.layers, 2, 0.7f);
  fill<<<1024, 256, 0, stream>>>(l.v, l.cache * s.layers, 3, 1.f);
  CHECK(cudaStreamSynchronize(stream));
  return l;
}
void release(Layers& l) {
  for (void* p :
       {(void*)l.qkv, (void*)l.out, (void*)l.k, (void*)l.v, (void*)l.inv_freq, (void*)l.partials, (void*)l.counters})
    CHECK(cudaFree(p));
}

AttentionParams params_of(const Layers& l, int layer, int max_rows) {
  AttentionParams p{};
  p.qkv = l.qkv;
  p.out = l.out;
  p.k_cache = l.k + l.cache * layer;
  p.v_cache = l.v + l.cache * layer;
  p.inv_freq = l.inv_freq;
  p.partials = l.partials;
  p.counters = l.counters;
  p.length = live;
  p.rows = live + 1;
  p.n_heads = l.s.n_heads;
  p.n_kv_heads = l.s.n_kv_heads;
  p.capacity = kCapacity;
  p.max_rows = max_rows;
  p.scale = 1 / std::sqrt((float)l.s.head_dim);
  p.rope_factor = 1;
  p.norm_eps = 1e-6f;
  return p;
}
// columns 0: as few as hold max_rows, or 32.
void decode(const Layers& l, int layer, int max_rows, int blocks, int columns = 0) {
  const int group = l.s.n_heads / l.s.n_kv_heads, need = max_rows * group;
  if (!columns) columns = need <= 16 ? 16 : 32;
  const AttentionParams p = params_of(l, layer, max_rows);
  for (const Kernel& k : kDecode)
    if (k.head_dim == l.s.head_dim && k.columns == columns)
      launch(k.f, dim3(blocks, l.s.n_kv_heads, (need + columns - 1) / columns), kDecodeThreads, &p);
}
void prefill(const Layers& l, int layer, int max_rows) {
  const bool wide = l.s.head_dim == 128;
  const int group = l.s.n_heads / l.s.n_kv_heads;
  const AttentionParams p = params_of(l, layer, max_rows);
  launch(wide ? (const void*)attention_rope_128 : (const void*)attention_rope_64,
         dim3((max_rows + kRopeRows - 1) / kRopeRows, l.s.n_heads + 2 * l.s.n_kv_heads), 32 * kRopeWarps, &p);
  launch(wide ? (const void*)attention_prefill_128 : (const void*)attention_prefill_64,
         dim3((max_rows * group + kPrefillColumns - 1) / kPrefillColumns, l.s.n_kv_heads), kPrefillThreads, &p);
}
void set_live(int length, int rows) {
  const int now[2] = {length, rows};
  CHECK(cudaMemcpy(live, now, 8, cudaMemcpyHostToDevice));
}

// mma_bf16 must leave c alone where all products are zero, however large the other factors: masked positions meet
// whatever V holds there.
__global__ void zero_products(unsigned* differences) {
  unsigned h = threadIdx.x * 2654435761u + blockIdx.x * 40503u + 1, n = 0;
  for (int i = 0; i < 1000; i++) {
    float c[4], before[4];
    unsigned b[2];
    for (int e = 0; e < 4; e++) {
      h = h * 1664525u + 1013904223u;
      before[e] = c[e] = __uint_as_float((h & 0x807fffffu) | (97 + (h >> 9) % 60) << 23);
    }
    for (int e = 0; e < 2; e++) {
      h = h * 1664525u + 1013904223u;
      b[e] = (h & 0x807f807fu) | (i & 1 ? 0x7f007f00u : 0x3f003f00u);
    }
    mma_bf16(c, make_uint4(0, 0, 0, 0), b[0], b[1]);
    for (int e = 0; e < 4; e++) n += __float_as_uint(c[e]) != __float_as_uint(before[e]);
  }
  if (n) atomicAdd(differences, n);
}
void check() {
  unsigned *d, n = 0;
  CHECK(cudaMalloc(&d, 4));
  CHECK(cudaMemset(d, 0, 4));
  zero_products<<<64, 256, 0, stream>>>(d);
  CHECK(cudaStreamSynchronize(stream));
  CHECK(cudaMemcpy(&n, d, 4, cudaMemcpyDeviceToHost));
  CHECK(cudaFree(d));
  std::printf("%s mma with zero products leaves c alone: %u of 65536000 differ\n", n ? "FAILED" : "ok    ", n);
  for (const Shape& s : kShapes) {
    Layers l = make(s);
    const size_t row = (size_t)s.n_heads * s.head_dim, raw_row = (size_t)(s.n_heads + 2 * s.n_kv_heads) * s.head_dim;
    std::vector<bf16> raw(16 * raw_row), want(16 * row), got(16 * row);
    CHECK(cudaMemcpy(raw.data(), l.qkv, raw.size() * 2, cudaMemcpyDeviceToHost));
    for (int length : {0, 55, 250, 1000, 2040, 2300, 4090, 16380, 17404}) {
      int differ = 0, not_finite = 0;
      size_t elements = 0;
      auto run = [&](int first, int rows, int columns) {  // rows first .. of the 16, by prefill when columns < 0
        set_live(length + first, rows);
        CHECK(cudaMemcpy(l.qkv, raw.data() + first * raw_row, rows * raw_row * 2, cudaMemcpyHostToDevice));
        CHECK(cudaMemset(l.out, 0xff, rows * row * 2));
        if (columns < 0) prefill(l, 0, 16);
        else decode(l, 0, columns ? 16 : rows, attention_blocks(length + 16) + 2, columns);
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaMemcpy(got.data() + first * row, l.out, rows * row * 2, cudaMemcpyDeviceToHost));
      };
      run(0, 16, -1);
      want = got;
      for (const bf16& x : want) not_finite += !std::isfinite(__bfloat162float(x));
      auto compare = [&] {
        for (size_t i = 0; i < want.size(); i++) differ += std::memcmp(&want[i], &got[i], 2) != 0;
        elements += want.size();
      };
      for (int columns : {16, 32}) {
        run(0, 16, columns);
        compare();
      }
      for (int w : {1, 2, 4, 8}) {
        for (int first = 0; first < 16; first += w) run(first, w, 0);
        compare();
      }
      std::printf("%s %s length %d: decode of 1, 2, 4, 8, 16 rows and prefill: %d of %zu differ, %d not finite\n",
                  differ || not_finite ? "FAILED" : "ok    ", s.name, length, differ, elements, not_finite);
    }
    release(l);
  }
}

void time_decode() {
  for (const Shape& s : kShapes) {
    Layers l = make(s);
    for (int rows : {1, 4, 8, 16})
      for (int depth : {0, 70, 140, 200, 260, 512, 1024, 2047, 4096, 8192, 16384}) {
        set_live(depth, rows);
        const int blocks = attention_blocks(depth + rows), group = s.n_heads / s.n_kv_heads;
        const double bytes = (double)depth * s.n_kv_heads * s.head_dim * 4;
        std::printf("decode %-13s M%-2d depth %5d, us a layer by columns of a block (68 blocks a head in the grid):",
                    s.name, rows, depth);
        for (int columns : {16, 32}) {
          if (columns > 16 && columns >= 2 * rows * group) continue;
          auto us = [&](int n) {
            return time_graph(
                       [&] {
                         for (int i = 0; i < s.layers; i++) decode(l, i, rows, n, columns);
                       },
                       15) *
                   1e3f / s.layers;
          };
          const float best = us(blocks);
          std::printf("  %d: %.2f (%.2f), %.0f GB/s of KV", columns, best, us(68), bytes / best * 1e-3);
        }
        std::printf("\n");
        std::fflush(stdout);
      }
    release(l);
  }
}
void time_prefill() {
  for (const Shape& s : kShapes) {
    Layers l = make(s);
    double all_ms = 0;
    for (int start : {0, 1024, 2048, 3072}) {
      set_live(start, kRows);
      const float ms = time_graph(
          [&] {
            for (int i = 0; i < s.layers; i++) prefill(l, i, kRows);
          },
          5);
      const double flop = 4.0 * s.n_heads * s.head_dim * kRows * (start + kRows / 2.0) * s.layers;
      all_ms += ms;
      std::printf("prefill %-13s %d rows at %4d: %7.3f ms for %d layers, %.0f TFLOP/s\n", s.name, kRows, start, ms,
                  s.layers, flop / ms * 1e-9);
    }
    std::printf("prefill %-13s 4096 tokens: %.2f ms of attention\n", s.name, all_ms);
    for (int rows : {16, 64, 256, 512}) {
      set_live(0, rows);
      std::printf("prefill %-13s %d rows at 0: %.3f ms\n", s.name, rows,
                  time_graph(
                      [&] {
                        for (int i = 0; i < s.layers; i++) prefill(l, i, rows);
                      },
                      5));
    }
    release(l);
  }
}
}  // namespace

int main(int argc, char** argv) {
  open_stream();
  CHECK(cudaMalloc(&live, 8));
  auto wanted = [&](const char* what) {
    for (int i = 1; i < argc; i++)
      if (!std::strcmp(argv[i], what)) return true;
    return argc == 1;
  };
  if (wanted("check")) check();
  if (wanted("decode")) time_decode();
  if (wanted("prefill")) time_prefill();
}
