// Embedding: x[i] = row tokens[i] of the table, gathered from the re-tiled layout, so that a tied head needs one copy of the table.
// Grid: one block of 128 threads per row; a thread moves 8 elements of K at a time, as four pairs that lie 4 bytes each in two 16-byte words.
#include "common.cuh"

namespace {
__device__ __forceinline__ void embed_body(const EmbedParams& p) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.x;
  if (row >= (p.n_rows ? min(*p.n_rows, p.rows) : p.rows)) return;
  const int token = p.tokens ? p.tokens[row] : row == 0 ? p.state->root : p.state->drafts[row - 1];
  const unsigned* table = reinterpret_cast<const unsigned*>(p.table);   // pairs of elements
  const int k_blocks = k_blocks_of(p.hidden);
  for (int k = threadIdx.x * 8; k < p.hidden; k += blockDim.x * 8) {
    uint4 v;
    v.x = table[retiled_index(token, k, k_blocks) / 2];
    v.y = table[retiled_index(token, k + 2, k_blocks) / 2];
    v.z = table[retiled_index(token, k + 4, k_blocks) / 2];
    v.w = table[retiled_index(token, k + 6, k_blocks) / 2];
    *reinterpret_cast<uint4*>(p.x + (size_t)row * p.x_stride + k) = v;
  }
}
}  // namespace

KERNEL(embed, EmbedParams, 128) { embed_body(p); }
