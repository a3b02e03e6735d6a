// Tests attention.cu: against an f64 softmax from the same bf16 inputs, and to the bit against itself over widths,
// block widths, prefill chunks and chunk edges of the cache. Buffers that a kernel fills start as NaN; the cache beyond
// the live rows holds junk (large finite V, NaN K), since only V need be finite.
#include "../attention_decode.cu"
#include "../attention_prefill.cu"
#include "test.h"

static const bool quick = std::getenv("SHIM_QUICK");

// A layer and a stream of tokens: the raw q | k | v of every position, from which both paths and the reference start.
struct Layer {
  int hd, n_heads, n_kv, capacity, n_tokens;
  bool norm;
  float rope_factor, theta;
  int group, stride;
  std::vector<bf16> raw;  // [n_tokens][stride]
  std::vector<bf16> q_norm, k_norm;
  std::vector<float> inv_freq;
  Layer(int hd_, int n_heads_, int n_kv_, int n_tokens_, bool norm_ = false, float factor = 1, float theta_ = 10000)
      : hd(hd_),
        n_heads(n_heads_),
        n_kv(n_kv_),
        capacity((n_tokens_ + 1023) / 1024 * 1024),
        n_tokens(n_tokens_),
        norm(norm_),
        rope_factor(factor),
        theta(theta_),
        group(n_heads_ / n_kv_),
        stride((n_heads_ + 2 * n_kv_) * hd_) {
    const uint32_t seed = hd * 31 + n_heads * 7 + n_kv + n_tokens * 1009;
    raw = rounded(numbers((size_t)n_tokens * stride, seed, 2.5f));
    q_norm = rounded(numbers(hd, seed + 1));
    k_norm = rounded(numbers(hd, seed + 2));
    for (bf16& g : q_norm) g = __float2bfloat16(1.5f + value(g));
    for (bf16& g : k_norm) g = __float2bfloat16(1.5f + value(g));
    for (int i = 0; i < hd / 2; i++) inv_freq.push_back((float)std::pow((double)theta, -2.0 * i / hd));
  }
};

// Normed and turned head, f64, rounded to bf16 at the end as q and K are.
static std::vector<double> ref_turn(const Layer& L, const bf16* head, const std::vector<bf16>& g, int position) {
  std::vector<double> x(L.hd), y(L.hd);
  double squares = 0;
  for (int i = 0; i < L.hd; i++) {
    x[i] = value(head[i]);
    squares += x[i] * x[i];
  }
  if (L.norm)
    for (int i = 0; i < L.hd; i++) x[i] *= value(g[i]) / std::sqrt(squares / L.hd + 1e-6);
  for (int i = 0; i < L.hd / 2; i++) {
    const double a = (double)((float)position * L.inv_freq[i]), c = std::cos(a) * L.rope_factor,
                 s = std::sin(a) * L.rope_factor;
    y[i] = x[i] * c - x[i + L.hd / 2] * s;
    y[i + L.hd / 2] = x[i + L.hd / 2] * c + x[i] * s;
  }
  return y;
}
static double bf16_of(double x) { return value(__float2bfloat16((float)x)); }

// The device side of a layer.
struct Device {
  const Layer& L;
  std::vector<bf16> k, v;
  explicit Device(const Layer& l)
      : L(l),
        k((size_t)l.n_kv * l.capacity * l.hd, __ushort_as_bfloat16(0xffff)),
        v(k.size(), __float2bfloat16(1e30f)) {
    for (size_t i = 0; i < v.size(); i += 3) v[i] = __float2bfloat16(-3e38f);
  }
  // Cache rows [0, length) as earlier passes could have left them. With `cancel` the upper half nearly cancels the
  // lower (equal keys, v of other sign), so that rounding in f32 reaches the bits of the bf16 output and a sum in
  // another order shows.
  void fill(int length, bool cancel = false) {
    const std::vector<bf16> x = rounded(numbers((size_t)2 * L.n_kv * length * L.hd, length + L.hd, cancel ? 0.7f : 2));
    size_t at = 0;
    for (int h = 0; h < L.n_kv; h++)
      for (int position = 0; position < length; position++)
        for (int e = 0; e < L.hd; e++, at += 2) {
          const bool mirrored = cancel && position >= length - length / 2;
          const size_t from = mirrored ? at - (size_t)2 * (length - length / 2) * L.hd : at;
          k[((size_t)h * L.capacity + position) * L.hd + e] = x[from];
          v[((size_t)h * L.hd + e) * L.capacity + position] =
              mirrored ? __float2bfloat16(-value(x[from + 1])) : x[from + 1];
        }
  }
  AttentionParams params(bf16* qkv, bf16* out, const int* length, const int* rows, int max_rows) {
    AttentionParams p{};
    p.qkv = qkv;
    p.out = out;
    p.k_cache = k.data();
    p.v_cache = v.data();
    p.q_norm = L.norm ? L.q_norm.data() : nullptr;
    p.k_norm = L.norm ? L.k_norm.data() : nullptr;
    p.inv_freq = L.inv_freq.data();
    p.length = length;
    p.rows = rows;
    p.n_heads = L.n_heads;
    p.n_kv_heads = L.n_kv;
    p.capacity = L.capacity;
    p.max_rows = max_rows;
    p.scale = 1 / std::sqrt((float)L.hd);
    p.rope_factor = L.rope_factor;
    p.norm_eps = 1e-6f;
    return p;
  }
  std::vector<bf16> input(int length, int rows, int max_rows) const {
    std::vector<bf16> x = poisoned<bf16>((size_t)max_rows * L.stride);
    std::copy_n(L.raw.begin() + (size_t)length * L.stride, (size_t)rows * L.stride, x.begin());
    return x;
  }
  // Rows length .. length + rows - 1 in one pass. block_columns 16 or 32; more columns go to z.
  std::vector<bf16> decode(int length, int rows, int block_columns, int max_rows = 0, int more_blocks = 0) {
    if (!max_rows) max_rows = rows;
    std::vector<bf16> x = input(length, rows, max_rows), out = poisoned<bf16>((size_t)max_rows * L.n_heads * L.hd),
                      before = x;
    const int z = (max_rows * L.group + block_columns - 1) / block_columns,
              blocks = attention_blocks(length + rows) + more_blocks;
    std::vector<float> partials = poisoned<float>((size_t)L.n_kv * blocks * z * block_columns * (L.hd + 2));
    std::vector<unsigned> counters(L.n_kv * z, 0);
    AttentionParams p = params(x.data(), out.data(), &length, &rows, max_rows);
    p.partials = partials.data();
    p.counters = counters.data();
    const std::string name = "attention_decode_" + std::to_string(L.hd) + "_" + std::to_string(block_columns);
    run(name.c_str(), dim3(blocks, L.n_kv, z), kDecodeThreads, p);
    for (unsigned c : counters) check(c == 0, "%s leaves its counters at zero", name.c_str());
    check(same_bits(x.data(), before.data(), x.size()), "%s leaves qkv alone", name.c_str());
    const size_t used = (size_t)rows * L.n_heads * L.hd;
    bool untouched = true;
    for (size_t i = used; i < out.size(); i++) untouched &= __bfloat16_as_ushort(out[i]) == 0xffff;
    check(untouched, "%s writes the rows in use only", name.c_str());
    out.resize(used);
    return out;
  }
  std::vector<bf16> prefill(int length, int rows, int max_rows = 0) {
    if (!max_rows) max_rows = rows;
    std::vector<bf16> x = input(length, rows, max_rows), out = poisoned<bf16>((size_t)max_rows * L.n_heads * L.hd);
    const AttentionParams p = params(x.data(), out.data(), &length, &rows, max_rows);
    const std::string hd = std::to_string(L.hd);
    run(("attention_rope_" + hd).c_str(), dim3((max_rows + kRopeRows - 1) / kRopeRows, L.n_heads + 2 * L.n_kv),
        32 * kRopeWarps, p);
    run(("attention_prefill_" + hd).c_str(), dim3((max_rows * L.group + kPrefillColumns - 1) / kPrefillColumns, L.n_kv),
        kPrefillThreads, p);
    out.resize((size_t)rows * L.n_heads * L.hd);
    return out;
  }
};
static int smallest_block(const Layer& L, int rows) { return rows * L.group <= 16 ? 16 : 32; }

// The cache rows [from, to) against f64 (norm, RoPE, transposition) and nothing else changed behind them.
static void check_cache(const Device& d, int from, int to, const char* what) {
  const Layer& L = d.L;
  double worst = 0;
  bool v_same = true, behind = true;
  for (int h = 0; h < L.n_kv; h++) {
    for (int position = from; position < to; position++) {
      const bf16* raw = &L.raw[(size_t)position * L.stride + (L.n_heads + h) * L.hd];
      const std::vector<double> turned = ref_turn(L, raw, L.k_norm, position);
      for (int i = 0; i < L.hd; i++) {
        const double got = value(d.k[((size_t)h * L.capacity + position) * L.hd + i]),
                     off = std::fabs(got - turned[i]) / (0.1 + std::fabs(turned[i]));
        worst = off <= worst ? worst : off;  // NaN counts as worst
        v_same &= same_bits(&raw[L.n_kv * L.hd + i], &d.v[((size_t)h * L.hd + i) * L.capacity + position], 1);
      }
    }
    if (to < L.capacity)
      for (int i = 0; i < L.hd; i++)
        behind &= __bfloat16_as_ushort(d.k[((size_t)h * L.capacity + to) * L.hd + i]) == 0xffff &&
                  std::fabs(value(d.v[((size_t)h * L.hd + i) * L.capacity + to])) > 1e29f;
  }
  check(worst < 0.005, "%s: K within bf16 rounding of f64 (off by %.2g)", what, worst);
  check(v_same, "%s: V in the cache is v", what);
  check(behind, "%s: nothing is written behind the pass", what);
}

// Rows of `out` (first row at position `length`) against the f64 softmax over the cache.
static void check_output(const Device& d, const std::vector<bf16>& out, int length, int rows, const char* what,
                         bool cosine = true) {
  const Layer& L = d.L;
  double worst = 0, dot = 0, aa = 0, bb = 0;
  int worst_row = 0, worst_head = 0;
  for (int i = 0; i < rows; i++)
    for (int h = 0; h < L.n_heads; h++) {
      const int position = length + i, kv = h / L.group;
      std::vector<double> q = ref_turn(L, &L.raw[(size_t)position * L.stride + h * L.hd], L.q_norm, position),
                          s(position + 1), o(L.hd, 0.0);
      for (double& x : q) x = bf16_of(x);
      double top = -1e300, sum = 0;
      for (int j = 0; j <= position; j++) {
        const bf16* k = &d.k[((size_t)kv * L.capacity + j) * L.hd];
        double x = 0;
        for (int e = 0; e < L.hd; e++) x += q[e] * value(k[e]);
        s[j] = x / std::sqrt((double)L.hd);
        top = std::max(top, s[j]);
      }
      for (double& x : s) sum += x = std::exp(x - top);
      for (int e = 0; e < L.hd; e++) {
        const bf16* v = &d.v[((size_t)kv * L.hd + e) * L.capacity];
        for (int j = 0; j <= position; j++) o[e] += s[j] / sum * value(v[j]);
        const double got = value(out[((size_t)i * L.n_heads + h) * L.hd + e]),
                     off = std::fabs(got - o[e]) / (1 + std::fabs(o[e]));
        if (!(off <= worst)) {
          worst = off;
          worst_row = i;
          worst_head = h;
        }
        dot += got * o[e];
        aa += got * got;
        bb += o[e] * o[e];
      }
    }
  check(worst < 0.012, "%s: within 0.012 of f64 (off by %.2g in row %d head %d)", what, worst, worst_row, worst_head);
  if (cosine) check(dot / std::sqrt(aa * bb) > 0.99998, "%s: cosine %.7f", what, dot / std::sqrt(aa * bb));
}

static char text[200];
static const char* label(const Layer& L, const char* path, int length, int rows) {
  std::snprintf(text, sizeof text, "%s hd %d heads %d/%d%s length %d rows %d", path, L.hd, L.n_heads, L.n_kv,
                L.norm ? " norm" : "", length, rows);
  return text;
}
// Equal bits, on rows that are finite and pairwise different (so that equality means something).
static void check_same(const Layer& L, const bf16* a, const bf16* b, int rows, const char* what) {
  const size_t n = (size_t)L.n_heads * L.hd;
  bool sane = true, same = true;
  for (int i = 0; i < rows; i++) {
    for (size_t e = 0; e < n; e++) sane &= std::isfinite(value(a[i * n + e]));
    if (i) sane &= !same_bits(a + i * n, a + (i - 1) * n, n);
    if (same && !same_bits(a + i * n, b + i * n, n)) {
      same = false;
      check(false, "%s: row %d differs", what, i);
    }
  }
  check(sane, "%s: rows finite and different", what);
  check(same, "%s: equal bits", what);
}

static void test_sine() {
  double worst = 0;
  uint32_t s = 1;
  for (int i = 0; i < 400000; i++) {
    s = s * 1664525u + 1013904223u;
    const float x = i < 1000 ? i * 0.785398163f : (float)(s >> 4) / 268435456.f * (i % 2 ? 8.f : 1048576.f);
    float a, b;
    sine_cosine(x, a, b);
    const double off = std::max(std::fabs(a - std::sin((double)x)), std::fabs(b - std::cos((double)x)));
    worst = off <= worst ? worst : off;
  }
  check(worst < 3e-7, "sine and cosine up to 2^20: off by %.2g", worst);
}

static void test_chunks() {
  bool ok = attention_chunk_of(0) == 0;
  for (int position = 1, begin = 0; position < 70000; position++) {
    const int width = position < 16384 ? 256 : 1024;
    if (position % width == 0) begin = position;
    const int c = attention_chunk_of(position);
    ok &= attention_chunk_begin(c) == begin && c == attention_chunk_of(position - 1) + (begin == position);
  }
  check(ok, "the chunk list");
}

// Decode passes at many lengths and widths against f64.
static void test_decode_reference() {
  struct {
    int hd, heads, kv;
    bool norm;
    float factor;
    int length, rows;
  } cases[] = {{64, 9, 3, false, 1, 0, 1},       {64, 9, 3, false, 1, 1, 1},     {64, 3, 1, false, 1, 63, 1},
               {64, 3, 1, true, 1, 64, 2},       {64, 7, 1, false, 1, 65, 3},    {128, 4, 1, false, 1, 0, 1},
               {128, 4, 1, false, 1, 0, 16},     {128, 8, 2, true, 1, 62, 5},    {128, 7, 1, false, 1.2f, 127, 8},
               {128, 7, 1, true, 1, 250, 16},    {128, 1, 1, false, 1, 255, 1},  {128, 2, 2, false, 1, 256, 1},
               {64, 16, 1, true, 1.1f, 300, 16}, {128, 4, 1, false, 1, 700, 8},  {64, 3, 1, false, 1, 2046, 5},
               {64, 5, 1, true, 1, 2300, 8},     {128, 4, 1, false, 1, 2047, 1}, {64, 1, 1, false, 1, 2303, 2}};
  for (const auto& c : cases) {
    const Layer L(c.hd, c.heads, c.kv, c.length + c.rows, c.norm, c.factor);
    Device d(L);
    if (c.length > 130) {
      d.fill(c.length);
    } else if (c.length) {
      check_output(d, d.prefill(0, c.length), 0, c.length, label(L, "prefill", 0, c.length));
      check_cache(d, 0, c.length, label(L, "prefill", 0, c.length));
    }
    const std::vector<bf16> out = d.decode(c.length, c.rows, smallest_block(L, c.rows), std::min(16, c.rows + 1), 3);
    check_cache(d, c.length, c.length + c.rows, label(L, "decode", c.length, c.rows));
    check_output(d, out, c.length, c.rows, label(L, "decode", c.length, c.rows));
  }
}

// Decode at every width, at block widths 16, 32 and 64, one row after the other, and prefill in several chunks: the
// same bits, in outputs and cache.
static void test_equal_bits(int hd, int heads, int kv, bool norm, int length, int rows, bool all) {
  const Layer L(hd, heads, kv, length + rows, norm);
  Device start(L);
  start.fill(length, true);
  Device base = start;
  const std::vector<bf16> want = base.prefill(length, rows, rows + 5);
  check_output(base, want, length, std::min(rows, 4), label(L, "prefill", length, rows), length == 0);
  const size_t n = (size_t)heads * hd;
  auto compare = [&](const std::vector<bf16>& out, int first, int w, const char* path) {
    check_same(L, out.data(), want.data() + first * n, w, label(L, path, length + first, w));
  };
  auto compare_cache = [&](const Device& d, const char* path) {
    check(same_bits(d.k.data(), base.k.data(), d.k.size()) && same_bits(d.v.data(), base.v.data(), d.v.size()),
          "%s: cache has equal bits", label(L, path, length, rows));
  };
  for (int w : {1, 2, 3, 4, 5, 6, 7, 8, 16}) {
    if (w > rows || (!all && w != 1 && w != 3 && w != 8)) continue;
    Device d = start;
    int first = 0;
    for (; first + w <= std::min(rows, 16); first += w)
      compare(d.decode(length + first, w, smallest_block(L, w)), first, w, "decode");
    if (first == rows) compare_cache(d, "decode");
  }
  const int w = std::min({rows, 16});
  for (int columns : {16, 32}) {
    Device d = start;
    compare(d.decode(length, w, columns, 16, 2), 0, w,
            columns == 16 ? "decode in blocks of 16" : "decode in blocks of 32");
  }
  for (int chunk : {1, 8, 33}) {
    if (chunk >= rows || (!all && chunk != 8)) continue;
    Device d = start;
    for (int first = 0; first < rows; first += chunk)
      compare(d.prefill(length + first, std::min(chunk, rows - first), chunk), first, std::min(chunk, rows - first),
              "prefill in chunks");
    compare_cache(d, "prefill in chunks");
  }
}

int main() {
  test_sine();
  test_chunks();
  test_decode_reference();
  test_equal_bits(64, 3, 1, false, 0, 16, true);
  test_equal_bits(128, 7, 1, true, 0, 70, false);
  test_equal_bits(64, 6, 2, true, 55, 16, true);       // an edge inside the rows
  test_equal_bits(128, 4, 1, false, 250, 16, !quick);  // the step from one block to several
  test_equal_bits(64, 3, 1, false, 60, quick ? 130 : 512, false);
  if (!quick) {
    test_equal_bits(64, 3, 1, false, 2040, 16, true);   // 64 to 256 wide
    test_equal_bits(128, 1, 1, true, 2300, 40, false);  // between two 256-wide chunks
    test_equal_bits(64, 1, 1, false, 16380, 9, false);  // 256 to 1024
    test_equal_bits(64, 2, 1, false, 17404, 8, false);  // between two 1024-wide chunks
  }
  return finish("attention");
}
