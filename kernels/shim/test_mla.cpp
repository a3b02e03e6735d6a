// mla.cu against textbook latent attention in f64 (keys and values of each head made from the latents), and against
// itself to the bit: a row's result must not depend on how many rows share the pass.
#include "../mla.cu"
#include "../repack.cu"
#include "test.h"

namespace {
const bool kQuick = std::getenv("SHIM_QUICK");

struct Shape {
  const char* attend;
  const char* value;
  int kv, rope, nope, v, heads;
};

std::vector<uint4> tiles(const std::vector<bf16>& w, int heads, int n, int k) {  // [heads][n][k]
  const int k_blocks = k_blocks_of(k);
  auto to = poisoned<uint4>((size_t)heads * n / 16 * k_blocks * 64);
  for (int h = 0; h < heads; h++) {
    RepackParams p{w.data() + (size_t)h * n * k,
                   to.data() + (size_t)h * n / 16 * k_blocks * 64,
                   k,
                   kSourceBf16,
                   kRowsPlain,
                   n,
                   n,
                   0,
                   k,
                   k_blocks,
                   0,
                   nullptr};
    run("repack", dim3((k_blocks * 16 + 255) / 256, n), 256, p);
  }
  return to;
}

void attention(const Shape& s, int length, int rows, uint32_t seed) {
  const int q_rank = 24, stride = q_rank + s.kv + s.rope, q_dim = s.nope + s.rope, row_dim = s.kv + s.rope,
            total = length + rows, capacity = (total + 63) / 64 * 64;
  const float scale = 0.2f, eps = 1e-6f, factor = 1.25f;
  // Every position's latents and queries; the cache of the first `length` is made by passes of their own.
  const auto latents = rounded(numbers((size_t)total * stride, seed, 1.5f)),
             q = rounded(numbers((size_t)total * s.heads * q_dim, seed + 1, 1.5f)),
             norm = rounded(numbers(s.kv, seed + 2));
  const auto uk = rounded(numbers((size_t)s.heads * s.nope * s.kv, seed + 3, 0.15f)),
             uv = rounded(numbers((size_t)s.heads * s.v * s.kv, seed + 4, 0.15f));  // [head][nope][kv], [head][v][kv]
  std::vector<bf16> transposed(uk.size());
  for (int h = 0; h < s.heads; h++)
    for (int n = 0; n < s.nope; n++)
      for (int c = 0; c < s.kv; c++)
        transposed[((size_t)h * s.kv + c) * s.nope + n] = uk[((size_t)h * s.nope + n) * s.kv + c];
  const auto w_uk = tiles(transposed, s.heads, s.kv, s.nope), w_uv = tiles(uv, s.heads, s.v, s.kv);
  std::vector<float> freq(s.rope / 2);
  for (int i = 0; i < s.rope / 2; i++) freq[i] = std::pow(10000.f, -2.f * i / s.rope);
  auto cache = poisoned<bf16>((size_t)capacity * row_dim);  // positions without a row yet are NaN
  const int chunks = latent_chunk_of(capacity - 1) + 1;

  struct Result {
    std::vector<bf16> attended, out;
  };
  // A pass over rows at first .. first + n, captured for `width` rows; with `before`, as a slab behind so many rows of
  // a longer pass.
  auto pass = [&](int first, int n, int width, int before = 0) {
    const int start = first - before, in_use = n + before;
    Result r{poisoned<bf16>((size_t)width * s.heads * s.kv), poisoned<bf16>((size_t)width * s.heads * s.v)};
    auto absorbed = poisoned<bf16>((size_t)width * s.heads * row_dim);
    auto partials = poisoned<float>((size_t)chunks * width * s.heads * (s.kv + 2));
    LatentParams p{latents.data() + (size_t)first * stride,
                   q.data() + (size_t)first * s.heads * q_dim,
                   absorbed.data(),
                   r.attended.data(),
                   r.out.data(),
                   cache.data(),
                   w_uk.data(),
                   w_uv.data(),
                   norm.data(),
                   freq.data(),
                   partials.data(),
                   &start,
                   &in_use,
                   q_rank,
                   stride,
                   s.heads,
                   s.kv,
                   s.nope,
                   s.rope,
                   s.v,
                   width,
                   scale,
                   factor,
                   eps,
                   before};
    run("latent_query", 1 + first % 5, kThreads, p);
    run(s.attend, dim3(chunks, (width * s.heads + kColumns - 1) / kColumns), kThreads, p);
    run(s.value, dim3(s.heads, (width + kValueRows - 1) / kValueRows), kThreads, p);
    return r;
  };
  for (int at = 0; at < length; at += 16) {  // the cache alone
    int n = std::min(16, length - at);
    LatentParams p{};
    std::vector<bf16> absorbed((size_t)n * s.heads * row_dim);
    p.latents = latents.data() + (size_t)at * stride;
    p.q = q.data() + (size_t)at * s.heads * q_dim;
    p.absorbed = absorbed.data();
    p.cache = cache.data();
    p.w_uk = w_uk.data();
    p.kv_norm = norm.data();
    p.inv_freq = freq.data();
    p.length = &at;
    p.rows = &n;
    p.q_rank = q_rank;
    p.latents_stride = stride;
    p.n_heads = s.heads;
    p.kv_rank = s.kv;
    p.nope_dim = s.nope;
    p.rope_dim = s.rope;
    p.v_dim = s.v;
    p.max_rows = 16;
    p.rope_factor = factor;
    p.norm_eps = eps;
    run("latent_query", 3, kThreads, p);
  }
  const Result all = pass(length, rows, 16);

  // Textbook: k = [W_UK c | rope], v = W_UV c.
  auto turned = [&](const bf16* x, int position) {
    std::vector<double> y(s.rope);
    for (int i = 0; i < s.rope / 2; i++) {
      const double angle = (double)(float)(position * freq[i]), a = value(x[i]), b = value(x[s.rope / 2 + i]);
      y[i] = factor * (a * std::cos(angle) - b * std::sin(angle));
      y[s.rope / 2 + i] = factor * (b * std::cos(angle) + a * std::sin(angle));
    }
    return y;
  };
  std::vector<std::vector<double>> c(total), k_rope(total);
  for (int i = 0; i < total; i++) {
    const bf16* x = latents.data() + (size_t)i * stride + q_rank;
    double squares = 0;
    for (int j = 0; j < s.kv; j++) squares += (double)value(x[j]) * value(x[j]);
    for (int j = 0; j < s.kv; j++) c[i].push_back(value(x[j]) / std::sqrt(squares / s.kv + eps) * value(norm[j]));
    k_rope[i] = turned(x + s.kv, i);
  }
  double worst = 0, size = 0;
  for (int m = 0; m < rows; m++)
    for (int h = 0; h < s.heads; h++) {
      const int position = length + m;
      const bf16* x = q.data() + ((size_t)position * s.heads + h) * q_dim;
      const auto q_rope = turned(x + s.nope, position);
      std::vector<double> absorbed(s.kv), scores(position + 1), attended(s.kv);
      for (int n = 0; n < s.nope; n++)
        for (int j = 0; j < s.kv; j++)
          absorbed[j] += (double)value(x[n]) * value(uk[((size_t)h * s.nope + n) * s.kv + j]);
      double top = -1e300, sum = 0;
      for (int i = 0; i <= position; i++) {
        double d = 0;
        for (int j = 0; j < s.kv; j++) d += absorbed[j] * c[i][j];
        for (int j = 0; j < s.rope; j++) d += q_rope[j] * k_rope[i][j];
        scores[i] = d * scale;
        top = std::max(top, scores[i]);
      }
      for (int i = 0; i <= position; i++) {
        scores[i] = std::exp(scores[i] - top);
        sum += scores[i];
      }
      for (int i = 0; i <= position; i++)
        for (int j = 0; j < s.kv; j++) attended[j] += scores[i] / sum * c[i][j];
      for (int v = 0; v < s.v; v++) {
        double y = 0;
        for (int j = 0; j < s.kv; j++) y += value(uv[((size_t)h * s.v + v) * s.kv + j]) * attended[j];
        const float ours = value(all.out[((size_t)m * s.heads + h) * s.v + v]);
        worst = std::max(worst, std::isnan(ours) ? 1e9 : std::fabs(ours - y));
        size = std::max(size, std::fabs(y));
      }
    }
  check(worst < 0.02 * size, "%s, %d heads, %d rows at %d: off by %g of %g", s.attend, s.heads, rows, length, worst,
        size);
  bool untouched = true;
  for (size_t i = (size_t)rows * s.heads * s.v; i < all.out.size(); i++) untouched &= std::isnan(value(all.out[i]));
  check(untouched, "%s: nothing is written behind the rows", s.attend);
  const size_t per_row = (size_t)s.heads * s.v;
  for (int m = 0; m < rows; m += kQuick ? 3 : 1) {
    const Result r = pass(length + m, 1, 1);
    check(same_bits(r.out.data(), all.out.data() + m * per_row, per_row) &&
              same_bits(r.attended.data(), all.attended.data() + (size_t)m * s.heads * s.kv, (size_t)s.heads * s.kv),
          "%s, %d heads: row %d at %d by itself", s.attend, s.heads, m, length);
  }
  if (rows > 3) {
    const Result r = pass(length + 1, rows - 2, 9, std::min(length, 16));
    check(same_bits(r.out.data(), all.out.data() + per_row, (rows - 2) * per_row), "%s: %d rows at %d in a pass of 9",
          s.attend, rows - 2, length + 1);
  }
  if (rows > 1) check(!same_bits(all.out.data(), all.out.data() + per_row, per_row), "%s: rows differ", s.attend);
  bool left = true;
  for (const bf16 y : pass(length, 0, 4, std::min(length, 16)).out) left &= std::isnan(value(y));
  check(left, "%s: a slab behind the rows in use leaves", s.attend);
}
}  // namespace

int main() {
  const Shape tiny{"latent_attend_64_32", "latent_value_64", 64, 32, 64, 32, 4},
      odd{"latent_attend_64_32", "latent_value_64", 64, 32, 32, 48, 3};
  const Shape middle{"latent_attend_128_16", "latent_value_128", 128, 16, 32, 32, 4},
      small{"latent_attend_32_8", "latent_value_32", 32, 8, 16, 16, 4};
  const Shape kimi{"latent_attend_512_64", "latent_value_512", 512, 64, 128, 128, 2};
  // Over the edges of steps, chunks and the first wide chunk.
  attention(tiny, 0, 5, 1);
  attention(tiny, 59, 11, 2);
  attention(odd, 127, 8, 3);
  if (!kQuick) attention(odd, 2040, 11, 4);
  attention(middle, 62, 5, 6);
  attention(small, 30, 11, 7);
  attention(kimi, 61, 6, 5);
  return finish("mla");
}
