// Times one rank of eight of Kimi-K2.5 without the engine: all kernels of its layers in one graph, collectives left
// out, weights of a dozen layers in turn; then the same with one kind of kernel left out, whose price that is. Choices
// follow random numbers. nvcc -O3 -std=c++17 -arch=sm_90a -Ikernels kernels/bench/rank_bench.cu -o rank_bench &&
// ./rank_bench [depth [rows]]; with rows: two layers of that many, launched one by one, for ncu
#include "bench.cuh"
#include <string>
#include "../linear.cu"
#include "../mla.cu"
#include "../experts.cu"
#include "../router.cu"
#include "../probe.cu"
#include "../repack.cu"

namespace {
constexpr int kHidden = 7168, kHeads = 8, kQ = 1536, kKv = 512, kRope = 64, kNope = 128, kV = 128,
              kLatents = kQ + kKv + kRope, kExperts = 384, kTop = 8, kDim = 256, kLayers = 61, kVocab = 20480,
              kDistinct = 12;
char* take(size_t bytes) {
  char* p;
  CHECK(cudaMalloc(&p, bytes));
  CHECK(cudaMemset(p, 0, bytes));
  return p;
}
unsigned seed = 1;
char* dense(int n, int k, float scale) {  // re-tiled bf16
  char* p = take((size_t)(n + 15) / 16 * k_blocks_of(k) * 1024);
  FillParams f{p, seed++ * 0x9e3779b97f4a7c15ull, n, k, 1, 0, scale, 0};
  launch((const void*)fill_random, dim3(n_sms * 8), 256, &f, false);
  return p;
}
unsigned char* codes(int count, int n, int k) {  // `count` matrices
  const unsigned long long blocks = (unsigned long long)count * (n + 15) / 16 * units_of<Int4>(k);
  unsigned char* p = (unsigned char*)take(blocks * Int4::kUnitBytes);
  FillCodesParams f{p, nullptr, seed++ * 0x9e3779b97f4a7c15ull, blocks, 1, 0.004f};
  launch((const void*)fill_codes, dim3(n_sms * 8), 256, &f, false);
  return p;
}
struct Layer {
  char *qkv_a, *q_b, *w_uk, *w_uv, *o, *router, *shared_up, *shared_down;
  unsigned char *up, *down;
  bf16* cache;
};
}  // namespace

int main(int argc, char** argv) {
  const int depth = argc > 1 ? std::atoi(argv[1]) : 1024;
  open_stream();
  std::vector<Layer> layers;
  const int capacity = 4096;
  for (int i = 0; i < kDistinct; i++) {
    Layer l{dense(kLatents, kHidden, 0.02f),        dense(kHeads * 192, kQ, 0.04f),
            dense(kHeads * kKv, kNope, 0.1f),       dense(kHeads * kV, kKv, 0.05f),
            dense(kHidden, kHeads * kV, 0.05f),     dense(kExperts, kHidden, 0.02f),
            dense(2 * kDim, kHidden, 0.02f),        dense(kHidden, kDim, 0.1f),
            codes(kExperts, 2 * kDim, kHidden),     codes(kExperts, kHidden, kDim),
            (bf16*)take((size_t)capacity * 576 * 2)};
    FillParams f{l.cache, seed++, 1, capacity * 576, 0, 0, 1.0f, 0};
    launch((const void*)fill_random, dim3(n_sms), 256, &f, false);
    layers.push_back(l);
  }
  char* head = dense(kVocab, kHidden, 0.02f);
  bf16 *normed = (bf16*)take(16 * kHidden * 2), *latents = (bf16*)take(16 * kLatents * 2),
       *q = (bf16*)take(16 * 1536 * 2), *absorbed = (bf16*)take(16 * kHeads * 576 * 2),
       *attended = (bf16*)take(16 * kHeads * kKv * 2), *out = (bf16*)take(16 * kHeads * kV * 2),
       *partial = (bf16*)take(16 * kHidden * 2), *act = (bf16*)take(16 * 9 * kDim * 2), *norm = (bf16*)take(16384);
  float *squares = (float*)take(16 * 448 * 4), *sums = (float*)take(kRouterSplits * 16 * kExperts * 4),
        *partials = (float*)take((size_t)200 * 16 * kHeads * 514 * 4), *freq = (float*)take(256),
        *bias = (float*)take(kExperts * 4), *logits = (float*)take(16 * kVocab * 4);
  ExpertWork* work = (ExpertWork*)take(sizeof(ExpertWork));
  int* ints = (int*)take(64);  // length, rows
  FillParams f{normed, 77, 16, kHidden, 0, 0, 1.7f, 0};
  launch((const void*)fill_random, dim3(n_sms), 256, &f, false);
  f = {norm, 78, 1, 8192, 0, 1, 1.0f, 0};
  launch((const void*)fill_random, dim3(n_sms), 256, &f, false);
  std::vector<float> one(16 * 448, 16.0f);
  CHECK(cudaMemcpyAsync(squares, one.data(), one.size() * 4, cudaMemcpyHostToDevice, stream));
  CHECK(cudaStreamSynchronize(stream));
  {
    ReadParams p{(const uint4*)layers[0].up, (size_t)792 << 20 >> 4, (unsigned*)ints + 8};
    float best = 1e9;
    for (int per_sm : {2, 4})
      best = std::min(
          best, time_graph([&] { launch((const void*)read_ceiling, dim3(n_sms * per_sm), 512, &p, false); }, 9, 2));
    std::printf("read %.0f GB/s\n", (792 << 20) / best / 1e6);
  }
  const int grid2 = 2 * n_sms, only = argc > 2 ? std::atoi(argv[2]) : 0;
  for (int rows : {1, 2, 4, 8, 16}) {
    if (only && rows != only) continue;
    const int state[2] = {depth, rows};
    CHECK(cudaMemcpy(ints, state, 8, cudaMemcpyHostToDevice));
    const bool wide = rows > 8;
    auto pass = [&](const std::string& skip) {
      const auto linear = [&](const char* name, const char* w, int n, int k, const bf16* x, int x_stride,
                              bool normalised, void* to, bool f32) {
        if (skip == name) return;
        LinearParams p{};
        const int k_blocks = k_blocks_of(k), segment = segment_units_of(k_blocks);
        p.part[0] = {(const uint4*)w,
                     nullptr,
                     x,
                     normalised ? squares : nullptr,
                     nullptr,
                     k,
                     x_stride,
                     (unsigned short)segment,
                     (unsigned short)((k_blocks + segment - 1) / segment),
                     1e-5f};
        p.n_parts = 1;
        p.n = n;
        p.n_tiles = (n + 15) / 16;
        p.rows = rows;
        p.epilogue = f32 ? kEpilogueLogits : kEpilogueStore;
        p.out = (bf16*)to;
        p.logits = (float*)to;
        p.out_stride = n;
        launch(wide ? (const void*)linear_m16 : (const void*)linear_m8, dim3(std::min(p.n_tiles, grid2)), 256, &p);
      };
      for (int i = 0; i < (only ? 2 : kLayers); i++) {
        const Layer& l = layers[i % kDistinct];
        linear("qkv_a", l.qkv_a, kLatents, kHidden, normed, kHidden, true, latents, false);
        linear("q_b", l.q_b, kHeads * 192, kQ, latents, kLatents, false, q, false);
        LatentParams a{};
        a.latents = latents;
        a.q = q;
        a.absorbed = absorbed;
        a.attended = attended;
        a.out = out;
        a.cache = l.cache;
        a.w_uk = (const uint4*)l.w_uk;
        a.w_uv = (const uint4*)l.w_uv;
        a.kv_norm = norm;
        a.inv_freq = freq;
        a.partials = partials;
        a.length = ints;
        a.rows = ints + 1;
        a.q_rank = kQ;
        a.latents_stride = kLatents;
        a.n_heads = kHeads;
        a.kv_rank = kKv;
        a.nope_dim = kNope;
        a.rope_dim = kRope;
        a.v_dim = kV;
        a.max_rows = rows;
        a.scale = 0.1f;
        a.rope_factor = 1;
        a.norm_eps = 1e-6f;
        const int tasks = kHeads * 32 + rows * 9;
        if (skip != "latent_query") launch((const void*)latent_query, dim3((tasks + 7) / 8), 256, &a);
        if (skip != "latent_attend")
          launch((const void*)latent_attend_512_64, dim3(latent_chunk_of(capacity - 1) + 1, (rows * kHeads + 15) / 16),
                 256, &a);
        if (skip != "latent_value")
          launch((const void*)latent_value_512, dim3(kHeads, (rows + kValueRows - 1) / kValueRows), 256, &a);
        linear("o", l.o, kHidden, kHeads * kV, out, kHeads * kV, false, partial, false);
        RouterParams r{(const uint4*)l.router, normed, sums, nullptr, kHidden, kHidden, kExperts, rows, 0, 0};
        if (skip != "router")
          launch(wide ? (const void*)router_m16 : (const void*)router_m8, dim3(kExperts / 16, kRouterSplits), 512, &r);
        ExpertParams e{};
        e.routed = {l.up, nullptr, (size_t)32 * 112 * 576, 0, kDim};
        e.shared = {(unsigned char*)l.shared_up, nullptr, 0, 0, kDim};
        e.route = {sums, bias, work, ints + 1, 0, kExperts, kTop, 1, 1, 0, 1, 2.827f};
        e.x = normed;
        e.squares = squares;
        e.act = act;
        e.k = kHidden;
        e.x_stride = kHidden;
        e.act_stride = 9 * kDim;
        e.rows = rows;
        e.eps = 1e-5f;
        ExpertMatrix down{l.down, nullptr, (size_t)448 * 4 * 576, 0, kDim};
        if (skip != "up")
          launch(wide ? (const void*)experts_up_m16_int4_bf16 : (const void*)experts_up_m8_int4_bf16, dim3(grid2), 512,
                 &e);
        e.routed = down;
        e.shared = {(unsigned char*)l.shared_down, nullptr, 0, 0, kDim};
        e.x = act;
        e.x_stride = 9 * kDim;
        e.n = kHidden;
        e.partial = partial;
        if (skip != "down")
          launch(wide ? (const void*)experts_down_m16_int4_bf16 : (const void*)experts_down_m8_int4_bf16,
                 dim3(wide ? kHidden / 16 : kHidden / 32), 512, &e);
      }
      linear("head", head, kVocab, kHidden, normed, kHidden, true, logits, true);
    };
    if (only) {
      pass("");
      CHECK(cudaStreamSynchronize(stream));
      continue;
    }
    {
      const float ms = time_graph([&] { pass(""); }, 9, 2);
      std::printf("T=%-2d: %.3f ms", rows, ms);
      for (const char* skip :
           {"qkv_a", "q_b", "latent_query", "latent_attend", "latent_value", "o", "router", "up", "down", "head"})
        std::printf(" | %s %.1f", skip,
                    (ms - time_graph([&] { pass(skip); }, 5, 2)) * 1e3 / (std::string(skip) == "head" ? 1 : kLayers));
      ExpertWork w;
      CHECK(cudaMemcpy(&w, work, sizeof w, cudaMemcpyDeviceToHost));
      std::printf(" us; %d experts\n", w.n);
      std::fflush(stdout);
    }
  }
  return 0;
}
