// format.cuh through linear.cu, and experts.cu, against sums in f64: every format, every width, the same bits at every
// width; routes against their definition.
#include "../experts.cu"
#include "../router.cu"
#include "../linear.cu"
#include "../repack.cu"
#include "quantised.h"

namespace {

bool near(const std::vector<float>& y, const std::vector<double>& expected, double bound, const char* what, int width) {
  double worst = 0;
  size_t at = 0;
  for (size_t i = 0; i < y.size(); i++) {
    const double d = std::fabs(y[i] - expected[i]) / (0.05 + std::fabs(expected[i]));
    if (!(d <= worst)) {
      worst = d;
      at = i;
    }
  }
  return check(worst < bound, "%s, %d rows: off by %.2e (%g, expected %g)", what, width, worst, y[at], expected[at]);
}

// ---- linear layers of every format ----
void check_linear(Matrix::Format format, const char* name, int n, int k, bool gated) {
  const Matrix m = quantised(format, n, k, 5 + n, gated);
  const int rows = 16, outputs = gated ? n / 2 : n, units = units_of<Int4>(k), segment_units = segment_units_of(units);
  const auto x = rounded(numbers((size_t)rows * k, 3));
  std::vector<double> expected;
  for (int r = 0; r < rows; r++)
    for (int j = 0; j < outputs; j++) {
      const auto dot = [&](int row) {
        double s = 0;
        for (int c = 0; c < k; c++) s += m.numbers[(size_t)row * k + c] * value(x[(size_t)r * k + c]);
        return s;
      };
      double y = dot(j);
      if (gated) y = y / (1 + std::exp(-y)) * dot(outputs + j);
      expected.push_back(y);
    }
  std::vector<float> alone;
  for (int width : {1, 3, 8, 16}) {
    for (int first = 0; first + width <= rows; first += width) {
      auto out = poisoned<bf16>((size_t)width * outputs);
      auto logits = poisoned<float>((size_t)width * outputs);
      LinearParams p{};
      p.part[0] = {reinterpret_cast<const uint4*>(m.tiles.data()),
                   m.tile_scales.data(),
                   x.data() + (size_t)first * k,
                   nullptr,
                   nullptr,
                   k,
                   k,
                   (unsigned short)segment_units,
                   (unsigned short)((units + segment_units - 1) / segment_units),
                   0};
      p.out = out.data();
      p.logits = logits.data();
      p.row_scales = m.row_scales.data();
      p.n_parts = 1;
      p.n = outputs;
      p.n_tiles = gated ? (outputs + 7) / 8 : (n + 15) / 16;
      p.rows = width;
      p.epilogue = gated ? kEpilogueSilu : kEpilogueLogits;
      p.out_stride = outputs;
      char kernel[64];
      std::snprintf(kernel, sizeof kernel, "linear_m%d_%s", width > 8 ? 16 : 8, name);
      run(kernel, dim3(width % 2 ? p.n_tiles : 2), 256, p);
      std::vector<float> y;
      for (size_t i = 0; i < out.size(); i++) y.push_back(gated ? value(out[i]) : logits[i]);
      if (width == 1) {
        alone.insert(alone.end(), y.begin(), y.end());
        continue;
      }
      check(same_bits(y.data(), &alone[(size_t)first * outputs], y.size()), "%s width %d: bits of one row at a time",
            kernel, width);
    }
    if (width == 1) near(alone, expected, gated ? 5e-3 : 1e-4, name, 1);
  }
}

// Plain rows as FP8: the nearest code of each number over its block's scale, gate and up in their places, zeros behind
// the last row and column.
void check_quantise(int order) {
  const int n = 20, k = 40, k_blocks = 2, padded = order == kRowsPlain ? 32 : 24, tiles = order == kRowsPlain ? 2 : 3;
  auto w = rounded(numbers((size_t)n * k, 91, 2.0f));
  for (int c = 0; c < 32; c++)
    for (int r = 8; r < 16; r++) w[r * k + c] = __float2bfloat16(0.0f);  // a block of zeros
  auto codes = poisoned<unsigned char>((size_t)tiles * k_blocks * 512);
  auto scales = poisoned<float>((size_t)tiles * k_blocks * 2);
  RepackParams p{
      w.data(),     reinterpret_cast<uint4*>(codes.data()), k, kSourceBf16, order, n, padded, 0, k, k_blocks, 0,
      scales.data()};
  run("quantise_fp8", dim3(1, padded / 8), 256, p);
  bool ok = true;
  for (int r = 0; r < padded; r++) {
    const int at = order == kRowsPlain ? r : r / 8 * 16 + r % 8 + (order == kRowsUp ? 8 : 0), high = at >> 3 & 1;
    for (int c = 0; c < 64; c++) {
      const size_t block = (size_t)(at / 16) * k_blocks + c / 32;
      uint32_t word;
      std::memcpy(&word, &codes[block * 512 + ((at & 7) * 4 + (c & 31) / 8) * 16 + high * 8 + (c & 4)], 4);
      const uint32_t bits = word >> 16 * (c & 1) & 0xffff;  // codes 0 and 1 where bf16 has them, 2 and 3 between
      const unsigned code = (c & 3) < 2
                                ? bits >> 15 << 7 | (bits >> 4 & 127)
                                : (bits >> 11 & 1) << 7 | (bits >> 12 & 7) << 4 | (bits >> 3 & 1) << 3 | (bits & 7);
      const float scale = scales[block * 2 + high];
      const double x = r < n && c < k ? value(w[r * k + c]) : 0;
      double most = 0, nearest = 1e30;
      for (int i = r / 8 * 8; i < r / 8 * 8 + 8; i++)
        for (int j = c / 32 * 32; j < c / 32 * 32 + 32; j++)
          if (i < n && j < k) most = std::max(most, std::fabs((double)value(w[i * k + j])));
      for (unsigned other = 0; other < 127; other++)
        nearest = std::min(nearest, std::fabs(e4m3(other) * scale - std::fabs(x)));
      ok &= std::fabs(scale - most / 448) <= 1e-6 * most &&
            std::fabs(e4m3(code) * scale - x) <= nearest * (1 + 1e-4) + 1e-12 && (x == 0) <= (code == 0 || code == 128);
    }
  }
  check(ok, "quantise_fp8, order %d", order);
}

// ---- routes ----
struct Route {
  std::vector<int> id;
  std::vector<double> weight;
};
Route route_of(const float* logits, const float* bias, int E, int k, int groups, int top_groups, bool softmax,
               bool normalised, double scale) {
  std::vector<double> s(E), c(E);
  double sum = 0, best = -1e30;
  for (int e = 0; e < E; e++) best = std::max(best, (double)logits[e]);
  for (int e = 0; e < E; e++) {
    s[e] = softmax ? std::exp(logits[e] - best) : 1 / (1 + std::exp(-(double)logits[e]));
    sum += s[e];
  }
  for (int e = 0; e < E; e++) {
    if (softmax) s[e] /= sum;
    c[e] = s[e] + (bias ? bias[e] : 0);
  }
  if (groups > 1) {
    const int size = E / groups;
    std::vector<std::pair<double, int>> of;
    for (int g = 0; g < groups; g++) {
      std::vector<double> v(c.begin() + g * size, c.begin() + (g + 1) * size);
      std::sort(v.rbegin(), v.rend());
      of.push_back({-(v[0] + v[1]), g});
    }
    std::sort(of.begin(), of.end());
    for (int i = top_groups; i < groups; i++)
      for (int e = 0; e < size; e++) c[of[i].second * size + e] = -1e30;
  }
  std::vector<int> order;
  for (int e = 0; e < E; e++) order.push_back(e);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return c[a] > c[b]; });
  Route r;
  r.id.assign(order.begin(), order.begin() + k);
  std::sort(r.id.begin(), r.id.end());
  double total = normalised ? 1e-20 : 1;
  if (normalised)
    for (int e : r.id) total += s[e];
  for (int e : r.id) r.weight.push_back(s[e] / total * scale);
  return r;
}

// Logits as experts_up gets them: divided by what 1/rms will be, in kRouterSplits parts.
std::vector<float> split(const std::vector<float>& logits, float inverse, uint32_t seed) {
  std::vector<float> sums;
  const auto noise = numbers(logits.size() * 3, seed);
  for (int s = 0; s < kRouterSplits; s++)
    for (size_t i = 0; i < logits.size(); i++)
      sums.push_back(s < 3 ? noise[s * logits.size() + i]
                           : logits[i] / inverse - noise[i] - noise[logits.size() + i] - noise[2 * logits.size() + i]);
  return sums;
}

void check_route(int E, int k, int groups, int top_groups, bool softmax, bool normalised, bool shared, int rows,
                 int in_use, int first_row, uint32_t seed) {
  auto logits = numbers((size_t)rows * E, seed, 3.0f);
  if (rows > 2) std::copy(logits.begin(), logits.begin() + E, logits.begin() + E);  // two rows that want the same
  const auto bias = numbers(E, seed + 1, 0.2f);
  const auto sums = split(logits, 2.0f, seed + 2);
  std::vector<float> squares((size_t)rows, 16 * 0.25f);  // of rows whose 1/rms is 2
  std::vector<ExpertWork> work(1);
  std::memset((void*)work.data(), 0xff, sizeof(ExpertWork));
  const int n_rows = first_row + in_use;
  ExpertParams p{};  // without outputs: choices alone
  p.route = {sums.data(), softmax ? nullptr : bias.data(),
             work.data(), &n_rows,
             first_row,   E,
             k,           groups,
             top_groups,  softmax,
             normalised,  2.5f};
  const bf16 x{};
  p.x = &x;
  p.squares = squares.data();
  p.k = 16;
  p.rows = rows;
  p.shared.dim = shared;
  p.act_stride = 1;
  bf16 act[16];
  std::vector<unsigned char> tile(1024);
  std::vector<bf16> xs(16 * 32);
  p.x = xs.data();
  p.x_stride = 16;
  p.act = act;
  p.shared.weights = tile.data();
  p.routed.weights = tile.data();
  run(rows > 8 ? "experts_up_m16_bf16_bf16" : "experts_up_m8_bf16_bf16", dim3(2), 512, p);
  bool ok = true;
  std::map<int, std::vector<std::pair<int, int>>> wanted;
  for (int r = 0; r < in_use; r++) {
    const Route expected =
        route_of(&logits[(size_t)r * E], p.route.bias, E, k, groups, top_groups, softmax, normalised, 2.5);
    for (int i = 0; i < k; i++) {
      wanted[expected.id[i]].push_back({r, i});
      ok &= std::fabs(work[0].weight[r][i] / expected.weight[i] - 1) < 1e-5;
    }
  }
  ok &= work[0].n == (in_use ? (int)wanted.size() : work[0].n);
  int i = 0;
  for (const auto& [e, rows_of] : wanted) {
    const ExpertItem& item = work[0].item[i++];
    ok &= item.expert == e && item.n == (int)rows_of.size();
    for (size_t j = 0; ok && j < rows_of.size(); j++)
      ok &= item.row[j] == rows_of[j].first && item.slot[j] == rows_of[j].second;
  }
  check(ok, "route: %d of %d experts, %d of %d groups, softmax %d, %d of %d rows", k, E, top_groups, groups, softmax,
        in_use, rows);
}

// ---- experts ----
void check_experts(Matrix::Format routed, Matrix::Format common, const char* name, int E, int top_k, int hidden,
                   int dim, int shared_dim, uint32_t seed) {
  const int rows = 16, act_stride = top_k * dim + shared_dim;
  std::vector<Matrix> up, down;
  for (int e = 0; e < E; e++) {
    up.push_back(quantised(routed, 2 * dim, hidden, seed + e, true, 8, 32));
    down.push_back(quantised(routed, hidden, dim, seed + 100 + e, false, 8, 32));
  }
  const Matrix shared_up = quantised(common, 2 * shared_dim, hidden, seed + 50, true, 8, 32),
               shared_down = quantised(common, hidden, shared_dim, seed + 51, false, 8, 32);
  const auto join = [](const std::vector<Matrix>& all, std::vector<unsigned char>& tiles, std::vector<float>& scales) {
    for (const Matrix& m : all) {
      tiles.insert(tiles.end(), m.tiles.begin(), m.tiles.end());
      scales.insert(scales.end(), m.scales().begin(), m.scales().end());
    }
    return ExpertMatrix{tiles.data(), scales.data(), all[0].tiles.size(), (int)all[0].scales().size(), 0};
  };
  std::vector<unsigned char> up_tiles, down_tiles;
  std::vector<float> up_scales, down_scales;
  ExpertMatrix up_matrix = join(up, up_tiles, up_scales), down_matrix = join(down, down_tiles, down_scales);
  up_matrix.dim = down_matrix.dim = dim;
  const auto stream = numbers((size_t)rows * hidden, seed + 60, 2.0f);
  const auto norm = rounded(numbers(hidden, seed + 61)), next_norm = rounded(numbers(hidden, seed + 62));
  std::vector<bf16> normed;
  std::vector<float> squares;
  std::vector<double> inverse;
  for (int r = 0; r < rows; r++) {
    double ss = 0;
    for (int c = 0; c < hidden; c++) {
      const float v = stream[(size_t)r * hidden + c];
      normed.push_back(__float2bfloat16(v * value(norm[c])));
      ss += (double)v * v;
    }
    for (int c = 0; c < hidden; c += 16) {
      double s = 0;
      for (int i = 0; i < 16; i++) s += (double)stream[(size_t)r * hidden + c + i] * stream[(size_t)r * hidden + c + i];
      squares.push_back((float)s);
    }
    inverse.push_back(1 / std::sqrt(ss / hidden + 1e-5));
  }
  const Matrix router = quantised(Matrix::kBf16, E, hidden, seed + 63);
  std::vector<float> logits;
  for (int r = 0; r < rows; r++)
    for (int e = 0; e < E; e++) {
      double s = 0;
      for (int c = 0; c < hidden; c++)
        s += router.numbers[(size_t)e * hidden + c] * value(normed[(size_t)r * hidden + c]);
      logits.push_back((float)(s * inverse[r]));
    }
  std::vector<float> alone, alone_partial;
  for (int width : {1, 5, 8, 16})
    for (int first = 0; first + width <= rows; first += width) {
      std::vector<ExpertWork> work(1);
      auto sums = poisoned<float>((size_t)kRouterSplits * width * E);
      RouterParams rp{reinterpret_cast<const uint4*>(router.tiles.data()),
                      normed.data() + (size_t)first * hidden,
                      sums.data(),
                      nullptr,
                      hidden,
                      hidden,
                      E,
                      width,
                      0,
                      0};
      run(width > 8 ? "router_m16" : "router_m8", dim3((E + 15) / 16, kRouterSplits), 512, rp);
      auto act = poisoned<bf16>((size_t)width * act_stride);
      ExpertParams p{};
      p.routed = up_matrix;
      p.shared = {shared_up.tiles.data(), shared_up.scales().data(), 0, 0, shared_dim};
      p.route = {sums.data(), nullptr, work.data(), nullptr, 0, E, top_k, 1, 1, 1, 1, 1.5f};
      p.x = normed.data() + (size_t)first * hidden;
      p.squares = squares.data() + (size_t)first * (hidden / 16);
      p.act = act.data();
      p.k = hidden;
      p.x_stride = hidden;
      p.act_stride = act_stride;
      p.rows = width;
      p.eps = 1e-5f;
      char kernel[64];
      std::snprintf(kernel, sizeof kernel, "experts_up_m%d_%s", width > 8 ? 16 : 8, name);
      run(kernel, dim3(width % 2 ? 3 : 7), 512, p);
      p.routed = down_matrix;
      p.shared = {shared_down.tiles.data(), shared_down.scales().data(), 0, 0, shared_dim};
      p.x = act.data();
      p.x_stride = act_stride;
      p.n = hidden;
      std::vector<float> y(stream.begin() + (size_t)first * hidden, stream.begin() + (size_t)(first + width) * hidden);
      auto tap = poisoned<bf16>((size_t)width * hidden), out_normed = tap, partial = tap;
      auto out_squares = poisoned<float>((size_t)width * hidden / 16);
      p.stream = y.data();
      p.tap = tap.data();
      p.tap_stride = hidden;
      p.next_norm = next_norm.data();
      p.normed = out_normed.data();
      p.squares_out = out_squares.data();
      std::snprintf(kernel, sizeof kernel, "experts_down_m%d_%s", width > 8 ? 16 : 8, name);
      const dim3 grid(width > 8 ? hidden / 16 : (hidden + 31) / 32);
      run(kernel, grid, 512, p);
      p.stream = nullptr;
      p.tap = nullptr;
      p.next_norm = nullptr;
      p.partial = partial.data();
      run(kernel, grid, 512, p);
      bool ok = true;
      for (size_t i = 0; i < y.size(); i++) {
        ok &= value(tap[i]) == value(__float2bfloat16(y[i])) &&
              value(out_normed[i]) == value(__float2bfloat16(y[i] * value(next_norm[i % hidden])));
        ok &= std::fabs(value(partial[i]) - (y[i] - stream[(size_t)first * hidden + i])) <=
              0.005 * (0.05 + std::fabs(value(partial[i])));
      }
      for (int r = 0; r < width; r++)
        for (int c = 0; c < hidden; c += 16) {
          float s[16];
          for (int i = 0; i < 16; i++) s[i] = y[(size_t)r * hidden + c + i] * y[(size_t)r * hidden + c + i];
          for (int i = 0; i < 8; i++) s[i] = s[i] + s[i + 8];
          for (int n = 4; n; n /= 2)
            for (int i = 0; i < n; i++) s[i] = s[2 * i] + s[2 * i + 1];
          ok &= out_squares[(size_t)r * (hidden / 16) + c / 16] == s[0];
        }
      check(ok, "%s, %d rows: tap, normed, squares and partial", kernel, width);
      if (width == 1) {
        alone.insert(alone.end(), y.begin(), y.end());
        const Route route = route_of(&logits[(size_t)first * E], nullptr, E, top_k, 1, 1, true, true, 1.5);
        std::vector<double> expected(hidden);
        const auto add = [&](const Matrix& u, const Matrix& d, double weight) {
          std::vector<double> a(d.k);
          for (int j = 0; j < d.k; j++) {
            double g = 0, v = 0;
            for (int c = 0; c < hidden; c++) {
              const double xv = value(normed[(size_t)first * hidden + c]);
              g += u.numbers[(size_t)j * hidden + c] * xv;
              v += u.numbers[(size_t)(d.k + j) * hidden + c] * xv;
            }
            g *= inverse[first];
            v *= inverse[first];
            a[j] = value(__float2bfloat16((float)(g / (1 + std::exp(-g)) * v)));
          }
          for (int n = 0; n < hidden; n++) {
            double s = 0;
            for (int j = 0; j < d.k; j++) s += d.numbers[(size_t)n * d.k + j] * a[j];
            expected[n] += weight * s;
          }
        };
        for (int i = 0; i < top_k; i++) add(up[route.id[i]], down[route.id[i]], route.weight[i]);
        if (shared_dim) add(shared_up, shared_down, 1);
        for (int n = 0; n < hidden; n++) expected[n] += stream[(size_t)first * hidden + n];
        near(y, expected, 2e-3, name, 1);
      } else
        check(same_bits(y.data(), &alone[(size_t)first * hidden], y.size()), "%s width %d: bits of one row at a time",
              kernel, width);
    }
}

}  // namespace

int main() {
  const bool quick = std::getenv("SHIM_QUICK");
  check_linear(Matrix::kFp8, "fp8", 80, 1120, false);
  check_linear(Matrix::kInt4, "int4", 80, 1120, false);
  check_linear(Matrix::kFp8Rows, "fp8_rows", 80, 200, false);
  for (int order : {kRowsPlain, kRowsGate, kRowsUp}) check_quantise(order);
  check_route(64, 6, 8, 3, false, true, true, 16, 13, 0, 1);
  check_route(128, 8, 1, 1, true, true, false, 9, 9, 16, 2);
  check_route(40, 5, 4, 2, false, false, true, 3, 0, 0, 3);
  check_experts(Matrix::kInt4, Matrix::kBf16, "int4_bf16", 6, 3, 96, 40, 24, 10);
  if (quick) return finish("experts");
  check_linear(Matrix::kFp8, "fp8", 96, 264, true);
  check_linear(Matrix::kInt4, "int4", 96, 264, true);
  check_linear(Matrix::kFp8Rows, "fp8_rows", 96, 264, true);
  check_route(384, 8, 1, 1, false, true, true, 16, 16, 0, 4);
  check_experts(Matrix::kFp8, Matrix::kFp8, "fp8_fp8", 5, 2, 1056, 64, 32, 11);
  check_experts(Matrix::kBf16, Matrix::kBf16, "bf16_bf16", 7, 4, 64, 72, 0, 12);
  check_experts(Matrix::kInt4, Matrix::kFp8, "int4_fp8", 4, 2, 64, 40, 32, 13);
  check_experts(Matrix::kFp8Rows, Matrix::kFp8Rows, "fp8_rows_fp8_rows", 5, 2, 96, 40, 24, 14);
  return finish("experts");
}
