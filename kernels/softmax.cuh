// The running softmax of attention (attention_*.cu, mla.cu): a state (m, l, o) of what was attended to so far, m the
// largest score, l and o the sums of weights and of weighted values, all scaled by exp2(-m * scale * log2 e).
#pragma once
#include "common.cuh"

namespace {

// Of l and o, when two states merge.
struct Factors {
  float keep, add;
};
// What l and o of a state, and of an addition, are multiplied with when they merge; returns the maximum of both.
__device__ __forceinline__ float merge_maximum(float m, float new_m, float scale_log2, Factors& f) {
  const float top = fmaxf(m, new_m);
  f.keep = m == top ? 1.f : exp2_fast(__fmul_rn(m - top, scale_log2));  // also for -inf against -inf
  f.add = new_m == top ? 1.f : exp2_fast(__fmul_rn(new_m - top, scale_log2));
  return top;
}
__device__ __forceinline__ float merge(float old, float addition, const Factors& f) {
  return __fmaf_rn(addition, f.add, __fmul_rn(old, f.keep));
}

}  // namespace
