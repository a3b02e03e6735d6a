// moe.cu against scalar references in f64, and against itself to the bit: a row's result must not depend on the other rows of the pass, on the kernel's width or on the grid.
#include "../moe.cu"
#include "../repack.cu"
#include "test.h"

namespace {
const bool kQuick = std::getenv("SHIM_QUICK");

float e4m3(int code) {
  const int e = code >> 3 & 15, m = code & 7;
  const float size = e ? std::ldexp(1 + m / 8.f, e - 7) : std::ldexp(m / 8.f, -6);
  return code & 128 ? -size : size;
}

// A matrix of each expert: codes and scales as a checkpoint has them, the numbers they stand for, and the tiles.
struct Matrix {
  int format, n, k, n_experts, n_tiles, block_rows, block_cols;
  std::vector<float> numbers;            // [expert][n][k], gate rows then up rows if gated
  std::vector<uint4> weights, scales;
  ExpertMatrix params() const { return {weights.data(), scales.data(), n_tiles, k}; }

  // gated: n counts gate and up.
  Matrix(int format_, int n_experts_, int n_, int k_, bool gated, uint32_t seed, int block_rows_ = 1, int block_cols_ = 32)
      : format(format_), n(n_), k(k_), n_experts(n_experts_), block_rows(block_rows_), block_cols(block_cols_) {
    n_tiles = gated ? (n / 2 + 7) / 8 : (n + 15) / 16;
    const int k_blocks = k_blocks_of(k), n_units = (k_blocks + 3) / 4, halves = gated ? 2 : 1, rows = n / halves;
    const size_t words = (size_t)n_tiles * (format == kFormatBf16 ? k_blocks * 64 : format == kFormatFp8 ? n_units * 128 : n_units * 64);
    const size_t scale_words = (size_t)n_tiles * (format == kFormatFp8 ? n_units * 2 : n_units * 8);
    weights = poisoned<uint4>(words * n_experts); scales = poisoned<uint4>(format == kFormatBf16 ? 0 : scale_words * n_experts);
    for (int part = 0; part < n_experts * halves; part++) {
      const int expert = part / halves, order = !gated ? kRowsPlain : part % 2 ? kRowsUp : kRowsGate;
      const auto random = ::numbers((size_t)rows * k, seed * 31 + part);
      if (format == kFormatBf16) {
        auto w = rounded(::numbers((size_t)rows * k, seed * 31 + part, 0.2f));
        for (bf16 x : w) numbers.push_back(value(x));
        RepackParams p{w.data(), weights.data() + words * expert, k, kSourceBf16, order, rows, n_tiles * (gated ? 8 : 16), 0, k, k_blocks, 0};
        run("repack", dim3((k_blocks * 16 + 255) / 256, p.rows), 256, p);
        continue;
      }
      const int stride = format == kFormatInt4 ? (k + 7) / 8 * 4 : k, scale_cols = (k + block_cols - 1) / block_cols, scale_rows = (rows + block_rows - 1) / block_rows;
      std::vector<unsigned char> codes((size_t)rows * stride);
      auto s = ::numbers((size_t)scale_rows * scale_cols, seed * 37 + part, 0.02f);
      for (auto& x : s) x = std::fabs(x) + 0.005f;
      const auto s16 = rounded(s);
      for (int r = 0; r < rows; r++) for (int c = 0; c < k; c++) {
        const size_t at = (size_t)(r / block_rows) * scale_cols + c / block_cols;
        if (format == kFormatInt4) {
          const int q = int(random[(size_t)r * k + c] * 8 + 8) & 15;
          codes[(size_t)r * stride + c / 2] |= q << (c % 2 * 4);
          numbers.push_back((q - 8) * value(s16[at]));
        } else {
          int q = int(random[(size_t)r * k + c] * 128 + 128) & 255;
          if ((q & 127) > 100) q -= 27;   // up to 40; subnormal ones too
          codes[(size_t)r * stride + c] = q;
          numbers.push_back(e4m3(q) * s[at]);
        }
      }
      RepackQuantisedParams p{codes.data(), format == kFormatInt4 ? (const void*)s16.data() : s.data(), weights.data() + words * expert, scales.data() + scale_words * expert,
                              stride, format, order, rows, k, format == kFormatInt4 ? kSourceBf16 : kSourceF32, scale_cols, block_rows, block_cols};
      run("repack_quantised", dim3(n_units, n_tiles), 128, p);
    }
  }
  double dot(int expert, int row, const float* x) const {
    double sum = 0;
    for (int c = 0; c < k; c++) sum += (double)numbers[((size_t)expert * n + row) * k + c] * x[c];
    return sum;
  }
};

struct Choice { std::vector<int> experts; std::vector<float> weights; };

// The routes of rows that chose by themselves, as route would write them.
Routes routes_of(const std::vector<Choice>& rows) {
  Routes r;
  std::memset((void*)&r, 0xff, sizeof r);
  std::vector<int> used;
  for (auto& row : rows) used.insert(used.end(), row.experts.begin(), row.experts.end());
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  r.n_distinct = used.size();
  for (size_t j = 0; j < used.size(); j++) r.expert[j] = used[j];
  for (int j = 0; j < ROUTE_DISTINCT; j++) for (int m = 0; m < ROUTE_ROWS; m++) { r.slot[j][m] = -1; r.weight[j][m] = 0; }
  for (size_t m = 0; m < rows.size(); m++) for (size_t s = 0; s < rows[m].experts.size(); s++) {
    const int j = std::lower_bound(used.begin(), used.end(), rows[m].experts[s]) - used.begin();
    r.slot[j][m] = s; r.weight[j][m] = rows[m].weights[s];
  }
  return r;
}

void experts(const char* name, int format, int shared_format, int n_experts, int top_k, int hidden, int expert_dim, int shared_dim, uint32_t seed, int block_rows = 1, int block_cols = 32) {
  const Matrix up(format, n_experts, 2 * expert_dim, hidden, true, seed, block_rows, block_cols), down(format, n_experts, hidden, expert_dim, false, seed + 1, block_rows, block_cols);
  const Matrix shared_up(shared_format, 1, 2 * std::max(shared_dim, 8), hidden, true, seed + 2, block_rows, block_cols);
  const Matrix shared_down(shared_format, 1, hidden, std::max(shared_dim, 8), false, seed + 3, block_rows, block_cols);
  const int act_dim = top_k * expert_dim + shared_dim, n_rows = 16;
  const auto x = rounded(numbers((size_t)n_rows * hidden, seed * 5, 1.5f)), residual = rounded(numbers((size_t)n_rows * hidden, seed * 7, 2.0f)), norm = rounded(numbers(hidden, seed * 11));
  auto squares = numbers((size_t)n_rows * (hidden / 16), seed * 13);
  for (auto& s : squares) s = std::fabs(s) * 10 + 1;
  std::vector<Choice> choices(n_rows);
  const auto weights = numbers((size_t)n_rows * top_k, seed * 17);
  uint32_t state = seed * 2654435761u | 1;
  for (int m = 0; m < n_rows; m++) {
    while ((int)choices[m].experts.size() < top_k) {
      state = state * 1664525u + 1013904223u;
      const int e = (state >> 8) % n_experts;
      if (std::find(choices[m].experts.begin(), choices[m].experts.end(), e) == choices[m].experts.end()) choices[m].experts.push_back(e);
    }
    std::sort(choices[m].experts.begin(), choices[m].experts.end());
    for (int s = 0; s < top_k; s++) choices[m].weights.push_back(std::fabs(weights[m * top_k + s]) + 0.1f);
  }
  // What the kernels leave of rows first .. first + rows.
  struct Result { std::vector<bf16> act, out, tap, normed; std::vector<float> squares; bool outside; };
  auto launch = [&](int first, int rows, int grid, bool wide) {
    const std::vector<Choice> mine(choices.begin() + first, choices.begin() + first + rows);
    const Routes routes = routes_of(mine);
    Result r; const size_t guard = 64;
    r.act = poisoned<bf16>((size_t)rows * act_dim + guard); r.out = poisoned<bf16>((size_t)rows * hidden + guard);
    r.tap = poisoned<bf16>((size_t)rows * (hidden + 3)); r.normed = poisoned<bf16>((size_t)rows * hidden); r.squares = poisoned<float>((size_t)rows * (hidden / 16));
    char kernel[64];
    ExpertsUpParams u{};
    u.routed = up.params(); u.shared = shared_dim ? shared_up.params() : ExpertMatrix{};
    u.x = x.data() + (size_t)first * hidden; u.squares = squares.data() + (size_t)first * (hidden / 16); u.routes = &routes; u.act = r.act.data();
    u.rows = rows; u.x_stride = hidden; u.act_stride = act_dim; u.top_k = top_k; u.expert_dim = expert_dim; u.shared_dim = shared_dim; u.eps = 1e-5f;
    std::snprintf(kernel, sizeof kernel, "experts_up_%s_m%d", name, wide ? 16 : 8);
    run(kernel, grid, kThreads, u);
    ExpertsDownParams d{};
    d.routed = down.params(); d.shared = shared_dim ? shared_down.params() : ExpertMatrix{};
    d.act = r.act.data(); d.routes = &routes; d.out = r.out.data(); d.residual = residual.data() + (size_t)first * hidden; d.tap = r.tap.data();
    d.next_norm = norm.data(); d.normed = r.normed.data(); d.square_sums = r.squares.data();
    d.rows = rows; d.act_stride = act_dim; d.top_k = top_k; d.n = hidden; d.out_stride = hidden; d.tap_stride = hidden + 3;
    std::snprintf(kernel, sizeof kernel, "experts_down_%s_m%d", name, wide ? 16 : 8);
    run(kernel, grid, kThreads, d);
    r.outside = false;
    for (size_t i = 0; i < guard; i++) r.outside |= value(r.act[(size_t)rows * act_dim + i]) == value(r.act[(size_t)rows * act_dim + i]) || value(r.out[(size_t)rows * hidden + i]) == value(r.out[(size_t)rows * hidden + i]);
    return r;
  };
  const Result all = launch(0, n_rows, 7, true);
  check(!all.outside, "%s: nothing is written behind the rows", name);
  double worst_act = 0, worst_out = 0;
  for (int m = 0; m < n_rows; m++) {
    double mean = 0;
    for (int i = 0; i < hidden / 16; i++) mean += squares[(size_t)m * (hidden / 16) + i];
    const double inv = 1 / std::sqrt(mean / hidden + 1e-5f);
    std::vector<float> row(hidden), act(act_dim);
    for (int c = 0; c < hidden; c++) row[c] = value(x[(size_t)m * hidden + c]);
    for (int j = 0; j < act_dim; j++) {
      const bool is_shared = j >= top_k * expert_dim;
      const Matrix& w = is_shared ? shared_up : up;
      const int e = is_shared ? 0 : choices[m].experts[j / expert_dim], i = is_shared ? j - top_k * expert_dim : j % expert_dim, half = w.n / 2;
      const double gate = inv * w.dot(e, i, row.data()), y = gate / (1 + std::exp(-gate)) * inv * w.dot(e, half + i, row.data());
      act[j] = value(all.act[(size_t)m * act_dim + j]);
      worst_act = std::max(worst_act, std::isnan(act[j]) ? 1e9 : std::fabs(act[j] - y) / (0.05 + std::fabs(y)));
    }
    for (int n = 0; n < hidden; n++) {
      double y = value(residual[(size_t)m * hidden + n]);
      for (int s = 0; s < top_k; s++) y += choices[m].weights[s] * down.dot(choices[m].experts[s], n, act.data() + s * expert_dim);
      if (shared_dim) y += shared_down.dot(0, n, act.data() + top_k * expert_dim);
      const float ours = value(all.out[(size_t)m * hidden + n]);
      worst_out = std::max(worst_out, std::isnan(ours) ? 1e9 : std::fabs(ours - y) / (0.05 + std::fabs(y)));
    }
  }
  check(worst_act < 0.005, "%s, %d x %d: act is off by %g", name, hidden, expert_dim, worst_act);
  check(worst_out < 0.005, "%s, %d x %d: out is off by %g", name, hidden, expert_dim, worst_out);
  for (int m = 0; m < n_rows; m++) {
    const bf16* out = all.out.data() + (size_t)m * hidden;
    bool taps = same_bits(out, all.tap.data() + (size_t)m * (hidden + 3), hidden), norms = true, sums = true;
    for (int n = 0; n < hidden; n++) norms &= value(all.normed[(size_t)m * hidden + n]) == value(__float2bfloat16(value(out[n]) * value(norm[n])));
    for (int i = 0; i < hidden / 16; i++) {
      const uint4* tile = reinterpret_cast<const uint4*>(out + i * 16);
      sums &= tile_square_sum(tile[0], tile[1]) == all.squares[(size_t)m * (hidden / 16) + i];
    }
    check(taps && norms && sums, "%s: row %d: tap, normed and squares", name, m);
  }
  // Rows alone, in other company, at other widths and grids.
  struct Part { int first, rows, grid; bool wide; };
  std::vector<Part> parts = {{0, 8, 3, false}, {8, 8, 40, false}, {3, 5, 1, true}, {11, 2, 200, false}};
  for (int m = 0; m < n_rows; m += kQuick ? 5 : 1) parts.push_back({m, 1, 1 + m, m % 2 == 1});
  for (auto& q : parts) {
    const Result r = launch(q.first, q.rows, q.grid, q.wide);
    check(!r.outside && same_bits(r.act.data(), all.act.data() + (size_t)q.first * act_dim, (size_t)q.rows * act_dim), "%s: act of rows %d to %d by themselves", name, q.first, q.first + q.rows - 1);
    check(same_bits(r.out.data(), all.out.data() + (size_t)q.first * hidden, (size_t)q.rows * hidden), "%s: out of rows %d to %d by themselves", name, q.first, q.first + q.rows - 1);
  }
  check(!same_bits(all.out.data(), all.out.data() + hidden, hidden), "%s: rows differ", name);
}

void routing(int n_experts, int top_k, int n_groups, int top_groups, bool softmax, bool normalised, uint32_t seed) {
  const int rows = 13, stride = n_experts + 5;
  auto logits = numbers((size_t)rows * stride, seed, 3.0f);
  const auto bias = numbers(n_experts, seed + 1, 0.3f);
  // Ties, at the edge of the choice too.
  for (int e = 1; e < n_experts; e += 3) logits[e] = logits[e - 1];
  Routes routes;
  std::memset((void*)&routes, 0xff, sizeof routes);
  RouteParams p{logits.data(), softmax ? nullptr : bias.data(), &routes, rows, stride, n_experts, top_k, softmax, n_groups, top_groups, normalised, 2.5f, 0};
  run("route", 1, kRouteThreads, p);
  bool ids = true, weights = true, ascending = true, empty = true;
  std::vector<Choice> choices(rows);
  for (int m = 0; m < rows; m++) {
    const float* l = logits.data() + (size_t)m * stride;
    std::vector<float> score(n_experts), rank(n_experts);
    float top = *std::max_element(l, l + n_experts);
    double total = 0;
    for (int e = 0; e < n_experts; e++) total += std::exp(l[e] - top);
    for (int e = 0; e < n_experts; e++) {
      score[e] = softmax ? std::exp(l[e] - top) / total : 1 / (1 + std::exp(-l[e]));
      rank[e] = score[e] + (softmax ? 0 : bias[e]);
    }
    auto best = [](const std::vector<float>& v, int n) {
      std::vector<int> order(v.size());
      for (size_t i = 0; i < v.size(); i++) order[i] = i;
      std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return v[a] > v[b]; });
      order.resize(n);
      return order;
    };
    if (n_groups > 1) {
      const int size = n_experts / n_groups;
      std::vector<float> judged;
      for (int i = 0; i < n_groups; i++) {
        std::vector<float> g(rank.begin() + i * size, rank.begin() + (i + 1) * size);
        const auto two = best(g, 2);
        judged.push_back(g[two[0]] + g[two[1]]);
      }
      const auto kept = best(judged, top_groups);
      for (int e = 0; e < n_experts; e++) if (std::find(kept.begin(), kept.end(), e / size) == kept.end()) rank[e] = -INFINITY;
    }
    auto chosen = best(rank, top_k);
    std::sort(chosen.begin(), chosen.end());
    double sum = 1e-20;
    for (int e : chosen) sum += score[e];
    for (int e : chosen) { choices[m].experts.push_back(e); choices[m].weights.push_back(score[e] / (normalised ? sum : 1) * 2.5f); }
  }
  const Routes expected = routes_of(choices);
  ids &= routes.n_distinct == expected.n_distinct;
  for (int j = 0; j < expected.n_distinct && ids; j++) {
    ids &= routes.expert[j] == expected.expert[j];
    ascending &= j == 0 || routes.expert[j] > routes.expert[j - 1];
    for (int m = 0; m < ROUTE_ROWS; m++) {
      ids &= routes.slot[j][m] == expected.slot[j][m];
      weights &= std::fabs(routes.weight[j][m] - expected.weight[j][m]) <= 2e-6f * (1 + expected.weight[j][m]);
      empty &= m < rows || (routes.slot[j][m] == -1 && routes.weight[j][m] == 0);
    }
  }
  check(ids && ascending && empty, "route %d of %d, %d of %d groups: experts", top_k, n_experts, top_groups, n_groups);
  check(weights, "route %d of %d, %d of %d groups: weights", top_k, n_experts, top_groups, n_groups);
  // A row by itself chooses the same, with the same bits.
  for (int m = 0; m < rows; m += 4) {
    Routes alone;
    RouteParams q = p;
    q.logits = logits.data() + (size_t)m * stride; q.rows = 1; q.routes = &alone;
    run("route", 1, kRouteThreads, q);
    bool same = alone.n_distinct == top_k;
    for (int j = 0; j < alone.n_distinct && same; j++)
      for (int i = 0; i < routes.n_distinct; i++) if (routes.expert[i] == alone.expert[j]) same &= routes.slot[i][m] == alone.slot[j][0] && routes.weight[i][m] == alone.weight[j][0];
    check(same, "route %d of %d: row %d by itself", top_k, n_experts, m);
  }
}
}  // namespace

int main() {
  routing(384, 8, 1, 1, false, true, 3);
  routing(256, 8, 8, 4, false, true, 4);
  routing(16, 4, 4, 2, false, true, 5);
  routing(128, 8, 1, 1, true, true, 6);
  routing(8, 2, 1, 1, true, false, 7);
  routing(500, 7, 1, 1, false, false, 8);
  // K of 1.5, 3.25 and 35 units; experts of one unit and a bit.
  experts("int4_bf16", kFormatInt4, kFormatBf16, 12, 4, 416, 160, 64, 21);
  experts("int4_bf16", kFormatInt4, kFormatBf16, 40, 8, 192, 40, 40, 22);
  experts("fp8_fp8", kFormatFp8, kFormatFp8, 10, 3, 416, 144, 144, 23, 128, 128);
  experts("fp8_fp8", kFormatFp8, kFormatFp8, 10, 3, 192, 64, 32, 24, 32, 32);
  experts("bf16_bf16", kFormatBf16, kFormatBf16, 8, 2, 208, 72, 0, 25);
  if (!kQuick) experts("int4_bf16", kFormatInt4, kFormatBf16, 3, 2, 4480, 32, 16, 26);
  return finish("moe");
}
