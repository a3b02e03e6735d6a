// What the kernel tests share: seeded numbers, bf16 buffers that start as NaN, launch by name, one line per check, an
// exit code. Each test_X.cpp includes the .cu files it needs and is run by scripts/test_kernels.sh, plain and
// sanitised, with several seeds, and once per planted fault.
#pragma once
#include "launch.h"
#include <cstdarg>
#include <type_traits>

// A kernel launch that must succeed.
template <class P>
void run(const char* name, dim3 grid, unsigned block, const P& params, unsigned shared_bytes = 0) {
  const int rc = shim_launch(name, {grid.x, grid.y, grid.z}, block, shared_bytes, &params, sizeof(P));
  if (rc) {
    std::fprintf(stderr, "launch of %s refused: %s\n", name,
                 rc == 1   ? "no such kernel"
                 : rc == 2 ? "another params struct"
                           : "too many threads");
    std::exit(2);
  }
}

// n numbers in [-scale, scale), the same for the same seed.
inline std::vector<float> numbers(size_t n, uint32_t seed, float scale = 1) {
  std::vector<float> v(n);
  uint32_t s = seed * 2654435761u | 1;
  for (auto& x : v) {
    s ^= s << 13;
    s ^= s >> 17;
    s ^= s << 5;
    x = ((s >> 8) / 8388608.f - 1.f) * scale;
  }
  return v;
}
inline std::vector<bf16> rounded(const std::vector<float>& v) {
  std::vector<bf16> r;
  r.reserve(v.size());
  for (float x : v) r.push_back(__float2bfloat16(x));
  return r;
}
inline float value(bf16 x) { return __bfloat162float(x); }
// A buffer that is NaN (all bits set) until written.
template <class T>
std::vector<T> poisoned(size_t n) {
  std::vector<T> v(n);
  if (n) std::memset((void*)v.data(), 0xff, n * sizeof(T));
  return v;
}
template <class T>
bool same_bits(const T* a, const T* b, size_t n) {
  return std::memcmp((const void*)a, (const void*)b, n * sizeof(T)) == 0;
}

inline int n_failed, n_passed;
// One check: prints a line when it fails (all lines with VERBOSE set).
__attribute__((format(printf, 2, 3))) inline bool check(bool ok, const char* what, ...) {
  static const bool verbose = std::getenv("VERBOSE");
  ok ? n_passed++ : n_failed++;
  if ((!ok && n_failed <= 20) || verbose) {
    va_list a;
    va_start(a, what);
    std::printf("%s ", ok ? "ok    " : "FAILED");
    std::vprintf(what, a);
    std::printf("\n");
    va_end(a);
  }
  return ok;
}
// Last line of main: return finish("linear");
inline int finish(const char* name) {
  std::printf("%s: %d checks passed, %d failed\n", name, n_passed, n_failed);
  return n_failed != 0;
}
