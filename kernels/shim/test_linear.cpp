// linear.cu, linear_prefill.cu, norm.cu, embed.cu, repack.cu against scalar references, and against each other to the
// bit: every variant, every width, and prefill must give a row the same bits. Sizes are odd on purpose: K of 18, 3, 48
// and 41 blocks, some no multiple of 32, N with tails.
#include "../embed.cu"
#include "../linear.cu"
#include "../linear_prefill.cu"
#include "../norm.cu"
#include "../repack.cu"
#include "../probe.cu"
#include "test.h"

// How far ahead no kernel in use loads: bits may not depend on it.
LINEAR(linear_m8_ahead_4, Bf16, 1, 4, 2, 1)
LINEAR(linear_m16_ahead_2, Bf16, 2, 2, 1, 1)

namespace {
struct Variant {
  const char* name;
  int columns;
};
const Variant kVariants[] = {{"linear_m8", 1}, {"linear_m16", 2}, {"linear_m8_ahead_4", 1}, {"linear_m16_ahead_2", 2}};
const Variant kTwo[] = {{"linear_two", 2}};
struct PrefillVariant {
  const char* name;
  int n_tile, m_tile, threads, shared_bytes;
};
const PrefillVariant kPrefill[] = {
    {"linear_prefill_128x128", 128, 128, 256, kPrefillRing},
    {"linear_prefill_64x64", 64, 64, 128, kPrefillRing},
};

unsigned short segment_units(int k) { return segment_units_of(k_blocks_of(k)); }
unsigned short n_segments(int k) { return (k_blocks_of(k) + segment_units(k) - 1) / segment_units(k); }
float value(float x) { return x; }
// As linear_row.cuh documents it.
template <class X>
float tile_squares(const X* x) {
  float s[8];
  for (int i = 0; i < 8; i++) s[i] = value(x[i]) * value(x[i]) + value(x[i + 8]) * value(x[i + 8]);
  for (int n = 4; n; n /= 2)
    for (int i = 0; i < n; i++) s[i] = s[2 * i] + s[2 * i + 1];
  return s[0];
}

// Row-major bf16 [n][k] to re-tiled, by the repack kernel.
std::vector<uint4> retiled(const std::vector<bf16>& w, int n, int k) {
  const int k_blocks = k_blocks_of(k), n_padded = (n + 15) / 16 * 16;
  auto to = poisoned<uint4>((size_t)n_padded * k_blocks * 4);
  RepackParams p{w.data(), to.data(), k, kSourceBf16, kRowsPlain, n, n_padded, 0, k, k_blocks, 0, nullptr};
  run("repack", dim3((k_blocks * 16 + 255) / 256, n_padded), 256, p);
  return to;
}

// A linear with everything random; `case_` picks what is on.
struct Problem {
  int n, k[2], n_parts, epilogue, rows;
  bool norm, bias, tap, feeds;      // feeds: writes normed and squares of its output
  int outputs, n_weights, n_tiles;  // outputs of a row; rows of the weight; tiles
  std::vector<bf16> w[2], x[2], g[2], normed[2], bias_, next_norm;
  std::vector<float> squares[2], residual;
  bool streams;  // the output is a residual stream in f32
  std::vector<uint4> tiles[2];
  std::vector<double> expected;  // [rows][outputs]
  float eps = 1e-5f;

  Problem(int n_, int k0, int k1, int epilogue_, int rows_, bool norm_, bool bias_on, uint32_t seed)
      : n(n_),
        k{k0, k1},
        n_parts(k1 ? 2 : 1),
        epilogue(epilogue_),
        rows(rows_),
        norm(norm_),
        bias(bias_on),
        tap(seed & 1) {
    const bool gated = epilogue == kEpilogueSilu;
    outputs = n;
    n_weights = gated ? 2 * n : n;
    n_tiles = gated ? (n + 7) / 8 : (n + 15) / 16;
    for (int i = 0; i < n_parts; i++) {
      w[i] = rounded(numbers((size_t)n_weights * k[i], seed * 7 + i, 0.1f));
      x[i] = rounded(numbers((size_t)rows * k[i], seed * 11 + i, 2.0f));
      g[i] = rounded(numbers(k[i], seed * 13 + i));
      if (norm)
        for (int m = 0; m < rows; m++) {
          for (int c = 0; c < k[i]; c++)
            normed[i].push_back(__float2bfloat16(value(x[i][(size_t)m * k[i] + c]) * value(g[i][c])));
          for (int c = 0; c < k[i]; c += 16) squares[i].push_back(tile_squares(&x[i][(size_t)m * k[i] + c]));
        }
      if (gated) {  // gate rows first, then up rows, as two checkpoint tensors
        const int k_blocks = k_blocks_of(k[i]), padded = n_tiles * 8;
        tiles[i] = poisoned<uint4>((size_t)n_tiles * k_blocks * 64);
        for (int up = 0; up < 2; up++) {
          RepackParams p{w[i].data() + (size_t)up * n * k[i],
                         tiles[i].data(),
                         k[i],
                         kSourceBf16,
                         up ? kRowsUp : kRowsGate,
                         n,
                         padded,
                         0,
                         k[i],
                         k_blocks,
                         0,
                         nullptr};
          run("repack", dim3((k_blocks * 16 + 255) / 256, padded), 256, p);
        }
      } else tiles[i] = retiled(w[i], n, k[i]);
    }
    bias_ = rounded(numbers(n, seed * 17));
    next_norm = rounded(numbers(n, seed * 23));
    feeds = n % 16 == 0 && (epilogue == kEpilogueStore || epilogue == kEpilogueResidual);
    streams = epilogue == kEpilogueResidual || (epilogue == kEpilogueStore && seed % 2 == 0);
    residual = numbers((size_t)rows * n, seed * 19, 3.0f);
    expected.resize((size_t)rows * outputs);
    auto dot = [&](int m, int row) {
      double y = 0;
      for (int i = 0; i < n_parts; i++) {
        double s = 0, ss = 0;
        for (int c = 0; c < k[i]; c++) {
          const float xv = value(x[i][(size_t)m * k[i] + c]),
                      operand = norm ? value(__float2bfloat16(xv * value(g[i][c]))) : xv;
          s += (double)value(w[i][(size_t)row * k[i] + c]) * operand;
          ss += (double)xv * xv;
        }
        y += norm ? s / std::sqrt(ss / k[i] + eps) : s;
      }
      return y;
    };
    for (int m = 0; m < rows; m++)
      for (int j = 0; j < outputs; j++) {
        double y = dot(m, j);
        if (gated) {
          const double up = dot(m, n + j);
          y = y / (1 + std::exp(-y)) * up;
        } else if (bias) y += value(bias_[j]);
        if (epilogue == kEpilogueResidual) y += residual[(size_t)m * n + j];
        expected[(size_t)m * outputs + j] = y;
      }
  }
  LinearParams params() const {
    LinearParams p{};
    for (int i = 0; i < n_parts; i++)
      p.part[i] = {tiles[i].data(),
                   nullptr,
                   norm ? normed[i].data() : x[i].data(),
                   norm ? squares[i].data() : nullptr,
                   nullptr,
                   k[i],
                   k[i],
                   segment_units(k[i]),
                   n_segments(k[i]),
                   eps};
    p.n_parts = n_parts;
    p.n = n;
    p.n_tiles = n_tiles;
    p.epilogue = epilogue;
    p.out_stride = outputs;
    p.tap_stride = outputs + 3;
    p.bias = bias && epilogue != kEpilogueSilu ? bias_.data() : nullptr;
    return p;
  }
};

// What a launch wrote, as f32 [rows][outputs], with its maxima.
struct Result {
  std::vector<float> y;
  std::vector<bf16> tap, normed;
  std::vector<float> squares;
  std::vector<float> max_value;
  std::vector<int> max_id;
  bool outside;
};

Result launch_rows(const Problem& q, const char* name, dim3 grid, unsigned threads, unsigned shared_bytes,
                   LinearParams p, int rows, int first_row, int valid) {
  Result r;
  const size_t count = (size_t)rows * q.outputs, guard = 64;
  auto out = poisoned<bf16>(count + guard);
  auto logits = poisoned<float>(count + guard);
  r.tap = poisoned<bf16>((size_t)rows * p.tap_stride);
  r.max_value = poisoned<float>((size_t)rows * grid.x);
  r.max_id = poisoned<int>((size_t)rows * grid.x);
  p.rows = rows;
  for (int i = 0; i < q.n_parts; i++) {
    p.part[i].x += (size_t)first_row * p.part[i].x_stride;
    if (p.part[i].squares) p.part[i].squares += (size_t)first_row * (p.part[i].k / 16);
  }
  const bool adds = q.epilogue == kEpilogueResidual;
  auto stream = poisoned<float>(count + guard);
  if (adds) {
    stream.assign(q.residual.begin() + (size_t)first_row * q.n, q.residual.begin() + (size_t)(first_row + rows) * q.n);
    stream.resize(count + guard, 7);
  }
  p.out = out.data();
  p.logits = logits.data();
  if (q.streams) {
    p.stream = stream.data();
    p.out = nullptr;
  }
  if (q.tap && adds) p.tap = r.tap.data();
  const bool is_prefill = std::strstr(name, "prefill");
  r.normed = poisoned<bf16>(count);
  r.squares = poisoned<float>((size_t)rows * (q.n / 16));
  if (q.feeds && !is_prefill) {
    p.next_norm = q.next_norm.data();
    p.normed = r.normed.data();
    p.squares = r.squares.data();
  }
  if (q.epilogue == kEpilogueLogits && !is_prefill) {
    p.max_value = r.max_value.data();
    p.max_id = r.max_id.data();
  }
  run(name, grid, threads, p, shared_bytes);
  auto found = [&](size_t i) {
    return q.epilogue == kEpilogueLogits ? logits[i] : q.streams ? stream[i] : value(out[i]);
  };
  for (size_t i = 0; i < (size_t)valid * q.outputs; i++) r.y.push_back(found(i));
  r.outside = false;  // written beyond the rows in use?
  for (size_t i = (size_t)valid * q.outputs; i < count + guard; i++)
    r.outside |= adds ? found(i) != (i < count ? q.residual[(size_t)first_row * q.n + i] : 7.0f) : found(i) == found(i);
  return r;
}
Result decode(const Problem& q, const Variant& v, int rows, int first_row, int blocks) {
  return launch_rows(q, v.name, dim3(std::min(blocks, q.n_tiles)), kSegments * 32, 0, q.params(), rows, first_row,
                     rows);
}
// The whole problem as one prefill chunk of `chunk` rows, of which q.rows are in use.
Result prefill(const Problem& q, const PrefillVariant& v, int chunk, Problem& scratch) {
  LinearParams p = q.params();
  static std::vector<bf16> normed[2];
  static std::vector<float> inv[2];
  static int count;
  count = q.rows;
  scratch = q;
  for (int i = 0; i < q.n_parts; i++) {
    scratch.x[i].resize((size_t)chunk * q.k[i], __ushort_as_bfloat16(0xffff));
    p.part[i].x = scratch.x[i].data();
    if (!q.norm) continue;
    normed[i] = poisoned<bf16>((size_t)chunk * q.k[i]);
    inv[i] = poisoned<float>(chunk);
    auto squares = poisoned<float>((size_t)chunk * (q.k[i] / 16));
    NormParams n{scratch.x[i].data(),
                 q.g[i].data(),
                 normed[i].data(),
                 inv[i].data(),
                 squares.data(),
                 &count,
                 chunk,
                 q.k[i],
                 q.k[i],
                 q.k[i],
                 q.eps,
                 0};
    run("norm_rows_bf16", dim3((chunk + 7) / 8), 256, n);
    check(same_bits(normed[i].data(), q.normed[i].data(), q.normed[i].size()) &&
              same_bits(squares.data(), q.squares[i].data(), q.squares[i].size()),
          "norm_rows_bf16: normed and squares (k %d)", q.k[i]);
    p.part[i].x = normed[i].data();
    p.part[i].inv = inv[i].data();
    p.part[i].squares = nullptr;
  }
  scratch.residual.resize((size_t)chunk * q.n, 7);
  p.n_rows = &count;
  char name[64];
  std::snprintf(name, sizeof name, "%s%s", v.name, q.n_parts > 1 ? "_two" : "");
  return launch_rows(scratch, name, dim3((chunk + v.m_tile - 1) / v.m_tile, (q.n_tiles * 16 + v.n_tile - 1) / v.n_tile),
                     v.threads, v.shared_bytes, p, chunk, 0, q.rows);
}

bool close(const Problem& q, const std::vector<float>& y, int first_row, const char* what) {
  double worst = 0, xy = 0, xx = 0, yy = 0;
  size_t at = 0;
  bool finite = true;
  const double bound =
      q.epilogue == kEpilogueLogits || q.streams ? 2e-5 : 4.5e-3;  // f32 sums; bf16 rounding of the output is 2^-8
  for (size_t i = 0; i < y.size(); i++) {
    const double e = q.expected[(size_t)first_row * q.outputs + i], d = std::fabs(y[i] - e) / (0.5 + std::fabs(e));
    if (!(d <= 1e30)) {
      finite = false;
      at = i;
      break;
    }
    if (d > worst) {
      worst = d;
      at = i;
    }
    xy += e * y[i];
    xx += e * e;
    yy += (double)y[i] * y[i];
  }
  return check(finite && worst < bound && xy / std::sqrt(xx * yy) > 0.99999,
               "%s: n %d k %d+%d epilogue %d norm %d rows %zu: off by %.2e at row %zu output %zu (%g, expected %g)",
               what, q.n, q.k[0], q.k[1], q.epilogue, q.norm, y.size() / q.outputs, worst, at / q.outputs,
               at % q.outputs, y[at], q.expected[(size_t)first_row * q.outputs + at]);
}

void check_problem(const Problem& q, const std::vector<int>& widths, bool all_variants) {
  // One row at a time through one variant is what all else must equal.
  std::vector<float> rows_alone;
  for (int m = 0; m < q.rows; m++) {
    const Result r = decode(q, q.n_parts > 1 ? kTwo[0] : kVariants[m % 4], 1, m, 3 + m);
    rows_alone.insert(rows_alone.end(), r.y.begin(), r.y.end());
  }
  close(q, rows_alone, 0, "one row");
  bool differ = true;
  for (int m = 1; m < q.rows; m++) differ &= !same_bits(&rows_alone[0], &rows_alone[(size_t)m * q.outputs], q.outputs);
  check(differ, "rows are pairwise different");
  for (size_t v = 0; v < (q.n_parts > 1 ? std::size(kTwo) : std::size(kVariants)); v++) {
    const Variant& variant = q.n_parts > 1 ? kTwo[v] : kVariants[v];
    for (int width : widths) {
      if (width > variant.columns * 8 || width > q.rows || (!all_variants && q.n_parts == 1 && (v + width) % 3))
        continue;
      const int first = q.rows - width, blocks = width % 2 ? 1000 : 2 + width % 5;  // one group a block, and persistent
      const Result r = decode(q, variant, width, first, blocks);
      check(same_bits(r.y.data(), &rows_alone[(size_t)first * q.outputs], r.y.size()) && !r.outside,
            "%s width %d: bits of one row at a time (n %d k %d+%d epilogue %d norm %d)", variant.name, width, q.n,
            q.k[0], q.k[1], q.epilogue, q.norm);
      if (q.epilogue == kEpilogueResidual && q.tap) {
        bool same = true;
        for (int m = 0; m < width; m++)
          for (int j = 0; j < q.n; j++)
            same &= value(r.tap[(size_t)m * (q.outputs + 3) + j]) ==
                    value(__float2bfloat16(r.y[(size_t)m * q.outputs + j]));
        check(same, "%s width %d: the tap is the output, rounded", variant.name, width);
      }
      if (q.feeds) {
        bool same = true;
        for (int m = 0; m < width; m++) {
          const float* row = &r.y[(size_t)m * q.n];
          for (int j = 0; j < q.n; j++)
            same &= value(r.normed[(size_t)m * q.n + j]) == value(__float2bfloat16(row[j] * value(q.next_norm[j])));
          for (int j = 0; j < q.n; j += 16) same &= r.squares[m * (q.n / 16) + j / 16] == tile_squares(&row[j]);
        }
        check(same, "%s width %d: normed and squares of the output (n %d)", variant.name, width, q.n);
      }
      if (q.epilogue == kEpilogueLogits) {
        const int n_blocks = std::min(blocks, q.n_tiles);
        for (int m = 0; m < width; m++) {
          float best = -INFINITY;
          int id = 0x7fffffff, expected = 0;
          for (int b = 0; b < n_blocks; b++) {
            const float x = r.max_value[m * n_blocks + b];
            const int i = r.max_id[m * n_blocks + b];
            if (x > best || (x == best && i < id)) {
              best = x;
              id = i;
            }
          }
          for (int j = 1; j < q.n; j++)
            if (r.y[(size_t)m * q.n + j] > r.y[(size_t)m * q.n + expected]) expected = j;
          check(id == expected && best == r.y[(size_t)m * q.n + expected],
                "%s width %d row %d: maximum is id %d, expected %d", variant.name, width, m, id, expected);
        }
      }
    }
  }
  Problem scratch = q;
  for (const PrefillVariant& v : kPrefill) {
    if (q.n_parts == 2 && std::strcmp(v.name, "linear_prefill_64x64")) continue;
    const Result r = prefill(q, v, q.rows + 5, scratch);
    check(same_bits(r.y.data(), rows_alone.data(), rows_alone.size()) && !r.outside,
          "%s: bits of decode (n %d k %d+%d epilogue %d norm %d)", v.name, q.n, q.k[0], q.k[1], q.epilogue, q.norm);
  }
}

void check_repack() {
  const int n = 21, k = 40, k_blocks = 2;
  const auto f = numbers((size_t)n * k, 5);
  const auto b = rounded(f);
  std::vector<__half> h;
  for (float v : f) h.push_back(__float2half(v));
  const void* source[] = {b.data(), h.data(), f.data()};
  for (int type = 0; type < 3; type++)
    for (int offset : {0, 16, 19}) {
      const int tiles = (n + offset + 15) / 16;
      auto to = poisoned<uint4>((size_t)tiles * k_blocks * 64);
      RepackParams p{source[type],        to.data(), k, type,     kRowsPlain, n,
                     tiles * 16 - offset, offset,    k, k_blocks, 0,          nullptr};
      run("repack", dim3(1, p.rows), 256, p);
      bool ok = true;
      const bf16* e = reinterpret_cast<const bf16*>(to.data());
      for (int i = offset; i < tiles * 16; i++)
        for (int c = 0; c < 64; c++) {
          const float want = i - offset < n && c < k
                                 ? type == kSourceF16 ? value(__float2bfloat16(__half2float(h[(i - offset) * k + c])))
                                                      : value(b[(i - offset) * k + c])
                                 : 0;
          ok &= value(e[retiled_index(i, c, k_blocks)]) == want;
        }
      check(ok, "repack source type %d, row offset %d", type, offset);
    }
  // Each index is hit once: the layout is a permutation.
  std::vector<int> hits(48 * 96);
  for (int i = 0; i < 48; i++)
    for (int c = 0; c < 96; c++) hits[retiled_index(i, c, 3)]++;
  check(std::all_of(hits.begin(), hits.end(), [](int x) { return x == 1; }), "the re-tiled layout is a permutation");
  // The same numbers, re-tiled or not; the right spread; padding is zero.
  auto plain = poisoned<bf16>((size_t)n * k);
  auto tiled = poisoned<bf16>(32 * 64);
  FillParams fp{plain.data(), 42, n, k, 0, 0, 0.5f, 0};
  run("fill_random", dim3(2), 256, fp);
  fp.to = tiled.data();
  fp.retiled = 1;
  run("fill_random", dim3(3), 256, fp);
  bool same = true;
  double sum = 0, square = 0;
  for (int i = 0; i < 32; i++)
    for (int c = 0; c < 64; c++)
      same &= value(tiled[retiled_index(i, c, 2)]) == (i < n && c < k ? value(plain[i * k + c]) : 0.0f);
  for (bf16 v : plain) {
    sum += value(v);
    square += value(v) * value(v);
  }
  check(same, "fill_random: re-tiled equals row-major, padding is zero");
  check(std::fabs(sum / (n * k)) < 0.03 && std::fabs(square / (n * k) * 12 - 1) < 0.1,
        "fill_random: mean %g and variance %g of uniform(-0.5, 0.5)", sum / (n * k), square / (n * k));
  unsigned sink = 0;
  ReadParams rp{reinterpret_cast<const uint4*>(tiled.data()), 32 * 64 / 8, &sink};
  run("read_ceiling", dim3(2), 64, rp);
  check(sink == 0, "read_ceiling reads and writes nothing");
}

void check_embed() {
  const int vocab = 100, hidden = 80, rows = 9;
  const auto table = rounded(numbers((size_t)vocab * hidden, 9));
  const auto tiles = retiled(table, vocab, hidden);
  const int tokens[rows + 3] = {0, 99, 17, 16, 15, 1, 64, 99, 8, 50, 3, 98}, start = 1;
  State state{};
  state.root = 99;
  state.rows = 7;
  for (int i = 0; i < 16; i++) state.drafts[i] = (i * 37 + 5) % vocab;
  const char* const sources[] = {"the state", "a list", "a list from start + offset on"};
  for (int source = 0; source < 3; source++) {
    auto x = poisoned<float>((size_t)rows * 96);
    auto normed = poisoned<bf16>((size_t)rows * 96);
    auto squares = poisoned<float>(rows * 5);
    const auto norm = rounded(numbers(hidden, 3));
    const int offset = source == 2 ? 2 : 0, first = source == 2 ? start + offset : 0;
    EmbedParams p{tiles.data(),
                  x.data(),
                  norm.data(),
                  normed.data(),
                  squares.data(),
                  source ? tokens : nullptr,
                  source == 2 ? &start : nullptr,
                  &state,
                  &state.rows,
                  rows,
                  hidden,
                  96,
                  offset};
    run("embed", dim3(rows), 128, p);
    bool ok = true;
    for (int m = 0; m < state.rows; m++) {
      for (int c = 0; c < hidden; c++)
        ok &= value(normed[m * 96 + c]) == value(__float2bfloat16(x[m * 96 + c] * value(norm[c])));
      for (int c = 0; c < hidden; c += 16) ok &= squares[m * 5 + c / 16] == tile_squares(&x[m * 96 + c]);
    }
    for (int m = 0; m < rows; m++)
      for (int c = 0; c < 96; c++) {
        const int token = source ? tokens[first + m] : m == 0 ? state.root : state.drafts[m - 1];
        const float v = x[m * 96 + c];
        ok &= m < state.rows && c < hidden ? v == value(table[(size_t)token * hidden + c]) : v != v;
      }
    check(ok, "embed, tokens from %s", sources[source]);
  }
}
}  // namespace

// norm_rows of a stream, and norms that are steps: against f64, rows and columns beyond those in use untouched.
template <class X, class Y>
void check_norms(const char* rows_kernel, const char* step_kernel) {
  const int rows = 21, in_use = 19, k = 560, stride = 600;
  std::vector<X> x = poisoned<X>((size_t)rows * stride);
  const auto f = numbers(x.size(), 21, 2.0f);
  for (int m = 0; m < rows; m++)
    for (int c = 0; c < k; c++) x[(size_t)m * stride + c] = X(f[(size_t)m * stride + c]);
  const auto norm = rounded(numbers(k, 22));
  auto normed = poisoned<bf16>((size_t)rows * stride);
  auto step = poisoned<Y>((size_t)rows * stride);
  auto inv = poisoned<float>(rows), squares = poisoned<float>(rows * (k / 16));
  NormParams p{x.data(), norm.data(), normed.data(), inv.data(), squares.data(), &in_use,
               rows,     k,           stride,        stride,     1e-5f,          0};
  run(rows_kernel, dim3((rows + 7) / 8), 256, p);
  p.normed = step.data();
  p.inv = nullptr;
  p.squares = nullptr;
  run(step_kernel, dim3((rows + 7) / 8), 256, p);
  bool ok = true;
  for (int m = 0; m < rows; m++) {
    double ss = 0;
    for (int c = 0; c < k; c++) ss += (double)value(x[(size_t)m * stride + c]) * value(x[(size_t)m * stride + c]);
    const double expected = 1 / std::sqrt(ss / k + 1e-5);
    if (m < in_use) ok &= std::fabs(inv[m] / expected - 1) < 1e-6;
    for (int c = 0; c < k; c += 16)
      ok &= m < in_use ? squares[m * (k / 16) + c / 16] == tile_squares(&x[(size_t)m * stride + c])
                       : squares[m * (k / 16) + c / 16] != squares[m * (k / 16) + c / 16];
    for (int c = 0; c < stride; c++) {
      const size_t at = (size_t)m * stride + c;
      if (m >= in_use || c >= k) {
        ok &= value(step[at]) != value(step[at]) && value(normed[at]) != value(normed[at]);
        continue;
      }
      const double y = value(x[at]) * expected * value(norm[c]), bound = sizeof(Y) == 4 ? 1e-6 : 4e-3;
      ok &= value(normed[at]) == value(__float2bfloat16(value(x[at]) * value(norm[c])));
      ok &= std::fabs(value(step[at]) - y) <= bound * (std::fabs(y) + 1e-3);
    }
  }
  check(ok, "%s and %s", rows_kernel, step_kernel);
}

// A norm over the first 48 of 88 columns that another linear wrote, with zeros behind its weight; then as slabs of a
// longer pass: the same bits, and nothing behind the rows in use.
void check_part_of_a_row() {
  const int rows = 5, k = 64, wide = 88, part = 48, n = 32, tiles = 6;
  const auto x = rounded(numbers((size_t)rows * k, 31)), w = rounded(numbers((size_t)wide * k, 32, 0.3f)),
             v = rounded(numbers((size_t)n * part, 33, 0.3f));
  auto norm = rounded(numbers(wide, 34));
  for (int c = part; c < wide; c++) norm[c] = __float2bfloat16(0.0f);
  const auto w_tiles = retiled(w, wide, k), v_tiles = retiled(v, n, part);
  auto y = poisoned<bf16>((size_t)rows * wide), normed = y;
  auto squares = poisoned<float>(rows * tiles);
  LinearParams p{};
  p.part[0] = {w_tiles.data(), nullptr, x.data(), nullptr, nullptr, k, k, segment_units(k), n_segments(k), 0};
  p.out = y.data();
  p.next_norm = norm.data();
  p.normed = normed.data();
  p.squares = squares.data();
  p.n_parts = 1;
  p.n = wide;
  p.n_tiles = tiles;
  p.rows = rows;
  p.out_stride = wide;
  run("linear_m8", dim3(3), 256, p);
  LinearParams q{};
  q.part[0] = {v_tiles.data(), nullptr, normed.data(),       squares.data(),   nullptr,
               part,           wide,    segment_units(part), n_segments(part), 1e-6f};
  auto logits = poisoned<float>(rows * n);
  q.logits = logits.data();
  q.n_parts = 1;
  q.n = n;
  q.n_tiles = n / 16;
  q.rows = rows;
  q.epilogue = kEpilogueLogits;
  q.out_stride = n;
  run("linear_m8", dim3(2), 256, q);
  double worst = 0;
  for (int m = 0; m < rows; m++)
    for (int j = 0; j < n; j++) {
      double sum = 0, ss = 0;
      for (int c = 0; c < part; c++) {
        const float at = value(y[(size_t)m * wide + c]);
        ss += (double)at * at;
        sum += (double)value(v[j * part + c]) * value(__float2bfloat16(at * value(norm[c])));
      }
      worst = std::max(worst, std::fabs(logits[m * n + j] - sum / std::sqrt(ss / part + 1e-6)));
    }
  check(worst < 1e-5, "a norm over a part of a row: off by %g", worst);
  const int in_use = 4;
  auto slab = poisoned<float>(rows * n);
  for (int first : {1, 4}) {
    LinearParams s = q;
    s.part[0].x += (size_t)first * wide;
    s.part[0].squares += first * tiles;
    s.logits = slab.data() + first * n;
    s.n_rows = &in_use;
    s.first_row = first;
    s.rows = first == 1 ? 3 : 1;
    run("linear_m8", dim3(2), 256, s);
  }
  bool left = true;
  for (int j = 0; j < n; j++) left &= std::isnan(slab[j]) && std::isnan(slab[4 * n + j]);
  check(left && same_bits(&slab[n], &logits[n], 3 * n),
        "slabs: bits of the whole pass, and none behind the rows in use");
}

int main() {
  const bool quick = std::getenv("SHIM_QUICK");
  check_repack();
  check_embed();
  check_norms<float, float>("norm_rows", "norm_step");
  check_norms<bf16, bf16>("norm_rows_bf16", "norm_step_bf16");
  check_norms<bf16, float>("norm_rows_bf16", "norm_step_bf16_stream");
  check_part_of_a_row();
  //                 n     k0   k1  epilogue           rows norm bias seed
  check_problem(Problem(96, 576, 0, kEpilogueStore, 9, true, true, 1), {1, 2, 3, 5, 8, 9}, true);
  check_problem(Problem(100, 96, 0, kEpilogueResidual, 9, false, true, 3), {1, 4, 7, 8, 9}, !quick);
  check_problem(Problem(44, 576, 0, kEpilogueSilu, 8, true, false, 4), {2, 8}, !quick);
  check_problem(Problem(72, 144, 272, kEpilogueStore, 9, true, false, 6), {3, 8, 9}, true);
  if (quick) return finish("linear");
  check_problem(Problem(1000, 96, 0, kEpilogueLogits, 16, true, false, 5), {1, 2, 8, 11, 16}, false);
  check_problem(Problem(64, 1536, 0, kEpilogueResidual, 8, false, false, 8), {4, 8}, false);
  check_problem(Problem(40, 1288, 0, kEpilogueLogits, 5, false, true, 9), {1, 5}, false);
  check_problem(Problem(136, 64, 1536, kEpilogueResidual, 16, false, false, 11), {6, 8, 13, 16}, false);
  check_problem(Problem(150, 192, 0, kEpilogueStore, 140, false, false, 12), {8}, false);  // more than one token tile
  return finish("linear");
}
