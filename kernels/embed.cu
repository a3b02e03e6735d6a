// Embedding: x[i] = row tokens[i] of the table, gathered from the re-tiled layout, so that a tied head needs one copy
// of the table; and what the first norm needs. Grid: one block of 128 threads per row; a thread moves 16 elements of K
// at a time, as pairs that lie 4 bytes each in 16-byte words.
#include "linear_row.cuh"

namespace {
__device__ __forceinline__ void embed_body(const EmbedParams& p) {
  pdl_launch_dependents();
  pdl_wait();
  const int row = blockIdx.x;
  if (row >= (p.n_rows ? min(*p.n_rows, p.rows) : p.rows)) return;
  const int token = p.tokens   ? p.tokens[(p.start ? *p.start : 0) + p.offset + row]
                    : row == 0 ? p.state->root
                               : p.state->drafts[row - 1];
  const unsigned* table = reinterpret_cast<const unsigned*>(p.table);  // pairs of elements
  const int k_blocks = k_blocks_of(p.hidden);
  auto gather = [&](int k) {
    return make_uint4(table[retiled_index(token, k, k_blocks) / 2], table[retiled_index(token, k + 2, k_blocks) / 2],
                      table[retiled_index(token, k + 4, k_blocks) / 2],
                      table[retiled_index(token, k + 6, k_blocks) / 2]);
  };
  for (int tile = threadIdx.x; tile < p.hidden / 16; tile += blockDim.x) {
    const Tile x = tile_of(gather(tile * 16), gather(tile * 16 + 8));
    const size_t at = (size_t)row * p.x_stride + tile * 16;
    store_tile(p.x + at, x);
    if (!p.next_norm) continue;
    store_tile(p.normed + at, times_norm(x, p.next_norm + tile * 16));
    p.squares[(size_t)row * (p.hidden / 16) + tile] = tile_square_sum(x);
  }
}
}  // namespace

KERNEL(embed, EmbedParams, 128) { embed_body(p); }
