// One struct per kernel, passed by value (const __grid_constant__). The Rust twins are #[repr(C)] and assert the same sizes. Pointers are device
// pointers; bf16 is __nv_bfloat16. Rows are tokens. Strides count elements.
#pragma once

// What changes between replays of a graph, one per stream, in device memory. Written by sample.cu (and by the host before a prefill); others read.
struct State {
  int length;          // rows in the target's KV cache; the pass's row i is at position length + i
  int rows;            // rows of the next pass in use, at most the captured width
  int root;            // last chosen token, row 0 of the next verify pass
  int done;
  int accepted;
  int n_drafts;
  int draft_length;
  int history_length;
  unsigned long long seed;
  int drafts[16];
  int sampled[17];
  int pad;
};
