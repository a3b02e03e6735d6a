// Moves rows between a pass's buffer and the ring of aux hidden states (indexed by position), or takes one row of a
// buffer. A drafter needs it: the rows that the target's pass produced are not the rows of the drafter's pass. Grid:
// one block of 128 threads per row; 16 bytes a thread at a time.
#include "common.cuh"

namespace {
__device__ __forceinline__ void copy_rows_body(const CopyParams& p) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.x;
  if (row >= (p.n_rows ? min(*p.n_rows, p.rows) : p.rows)) return;
  const int from = (row + (p.from_start ? *p.from_start : 0)) & p.from_mask,
            to = (row + (p.to_start ? *p.to_start : 0)) & p.to_mask;
  const uint4* source = reinterpret_cast<const uint4*>(p.from + (size_t)from * p.dim);
  uint4* target = reinterpret_cast<uint4*>(p.to + (size_t)to * p.dim);
  for (int i = threadIdx.x; i < p.dim / 8; i += blockDim.x) target[i] = load_activations(source + i);
}
}  // namespace

KERNEL(copy_rows, CopyParams, 128) { copy_rows_body(p); }
