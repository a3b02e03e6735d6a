// One struct per kernel, passed by value (const __grid_constant__). The Rust twins are #[repr(C)] and assert the same
// sizes. Pointers are device pointers; bf16 is __nv_bfloat16. Rows are tokens. Strides count elements.
#pragma once

// What changes between replays of a graph, one per stream, in device memory. Written by the last block of sample.cu and
// by the kernels of draft.cu, by the host before a prefill, a new request or a truncation; other kernels read `length`,
// `rows`, `root`, `drafts`.
struct alignas(16) State {
  int length;    // L: rows in the target's KV cache; row i of the next pass is at position length + i
  int rows;      // rows of the next pass: 1 + n_drafts, or the tokens of a prefill chunk. A pass captured w wide uses
                 // min(rows, w) of them
  int root;      // last chosen token, row 0 of the next verify pass
  int done;      // 1: passes change nothing and record 0 tokens
  int reason;    // why the sequence is done: STOP_*
  int accepted;  // drafts kept by the last pass
  int emitted;   // tokens chosen by the last pass; sampled[0..emitted) are they
  int n_drafts;  // drafts for the next pass
  int n_output;  // tokens of the answer so far
  int history_length;  // tokens of prompt and answer so far, root included
  int draft_length;    // Ld: rows in the drafter's KV cache
  int ngram_match;     // length of the last n-gram match, 0 for none
  unsigned pass;       // passes so far; a record's words carry it
  int pad[3];
  int drafts[16];  // d1.. are rows 1.. of the next verify pass
  int sampled[16];
};
static_assert(sizeof(State) == 192, "State");

// STOP_NO_CHOICE: a row without a token to choose: all are banned, or no logit is finite.
enum { STOP_NONE = 0, STOP_EOS = 1, STOP_LENGTH = 2, STOP_CONTEXT = 3, STOP_NO_CHOICE = 4 };

// What stays for a whole request; device memory, written by the host between requests.
struct alignas(16) SamplingParams {
  unsigned long long seed;
  unsigned long long top_p;  // round(p * 2^32); 2^32 or more: off
  float temperature;         // 0: the largest logit
  float min_z;               // ln(min_p); -inf: off
  int top_k;                 // 0: off
  float repetition_penalty;  // 1: off
  float presence_penalty;    // 0: off
  float frequency_penalty;   // 0: off
  int has_bias;              // SampleParams::bias counts
  int min_tokens;            // ids of eos are banned before this many tokens
  int max_tokens;            // at least 1
  int context;               // tokens of prompt and answer at most
  int n_eos, pad;
  int eos[16];
};
static_assert(sizeof(SamplingParams) == 128, "SamplingParams");

// A pass's record: RECORD_WORDS words of (pass << 32 | value) at ring[pass % RECORDS], in pinned host memory.
enum { RECORDS = 64, RECORD_WORDS = 32 };
enum {
  RECORD_COUNT = 0,     // tokens chosen
  RECORD_ACCEPTED = 1,  // drafts kept
  RECORD_REASON = 2,    // STOP_*
  RECORD_DRAFTS = 3,    // drafts that were verified
  RECORD_MATCH = 4,     // n-gram match length; written by ngram_draft alone, so absent without it
  RECORD_TOKENS = 8     // the tokens, up to 16
};

// ---- sample.cu ----
enum { SAMPLE_SLICE = 4032, SAMPLE_ROWS = 16, SAMPLE_BINS = 1024, SAMPLE_DIGITS = 256 };
enum { SAMPLE_ROUNDS = 14 };  // digits of both cuts: ranks have 51 bits, a digit 8
// What top-k and top-p leave of a row's ranks (sample_cut.cuh explains ranks): below `sure` is kept, inside the two
// ranges is settled by sample_settle.
struct alignas(16) SampleCut {
  unsigned long long sure, k_first, k_last, p_first, p_last;
  unsigned long long k_rank, k_mass_before, p_mass_before;
  unsigned long long kept_mass;  // mass of all that top-k keeps, when k's range is empty
  unsigned long long pad;
};
// Ids and their mass in each bin of a row's ranks, and in each digit of a part of it.
struct alignas(16) SampleBins {
  unsigned long long mass[SAMPLE_BINS];
  unsigned count[SAMPLE_BINS];
};
struct alignas(16) SampleDigits {
  unsigned long long mass[SAMPLE_DIGITS];
  unsigned count[SAMPLE_DIGITS];
};
// Several ranks: how far the search for a row's cuts has come; the same on all of them.
struct alignas(16) SampleSearch {
  unsigned long long first, last, target;  // the ranks that may hold the cut, and the count or mass to reach among them
  unsigned long long last_kept, kept_mass;
  int phase, pad;
};
// All zero before the first pass; every pass leaves it so (except `in_use`, `open`, `cut`, `digits` and `search`, which
// it overwrites).
struct alignas(16) SampleScratch {
  unsigned long long best[SAMPLE_ROWS];    // key of the largest logit, where options change logits
  unsigned long long chosen[SAMPLE_ROWS];  // key of the largest logit with noise
  unsigned n_listed[SAMPLE_ROWS];
  int in_use[SAMPLE_ROWS];  // several ranks: rows of this pass, and rows whose cuts are still looked for; what is
                            // exchanged for others is not worth a wait
  int open[SAMPLE_ROWS];
  SampleCut cut[SAMPLE_ROWS];
  SampleBins bins[SAMPLE_ROWS];
  SampleDigits digits[SAMPLE_ROWS];
  SampleSearch search[SAMPLE_ROWS];
};
static_assert(sizeof(SampleScratch) == 16 * (8 + 8 + 4 + 4 + 4) + 16 * 80 + 16 * 1024 * 12 + 16 * 256 * 12 + 16 * 48,
              "SampleScratch");

// For the sample_* kernels, 256 threads each. Grids, b being any number of blocks >= ceil(vocab / SAMPLE_SLICE):
// sample_adjust, sample_count, sample_choose (b, width); sample_narrow, sample_settle (1, width); sample_accept (1).
struct SampleParams {
  float* logits;  // [width][stride]; overwritten where an option changes them
  State* state;
  const SamplingParams* options;  // does not change while a graph runs
  SampleScratch* scratch;
  unsigned long long* list;  // [width][vocab]; for sample_choose and sample_settle, null in a graph without filters
  unsigned* counts;          // [vocab]; bits 0..30: times in the answer, bit 31: in the prompt
  const float* bias;         // [vocab], added; may be null while has_bias is 0
  int* history;              // [at least context]; prompt and answer
  unsigned long long* ring;  // [RECORDS][RECORD_WORDS], pinned host memory
  const float* max_value;    // [width][n_max]: LinearParams::max_value and max_id of the head, n_max its gridDim.x
  const int* max_id;
  int vocab;  // columns of logits: the tokens from first_id on. counts, bias and history are of all tokens
  int stride, n_max;
  int width;     // rows the pass was captured for, at most 16
  int first_id;  // a multiple of 4
  int n_tokens;  // of all ranks, at most 2^20
  int ranks;
  int round;  // of sample_narrow, from 0; SAMPLE_ROUNDS for sample_settle
};
static_assert(sizeof(SampleParams) == 120, "SampleParams");

// For prefill_advance: one warp, at the end of a prefill chunk that chooses no token.
struct AdvanceParams {
  State* state;
  unsigned long long* ring;
};
static_assert(sizeof(AdvanceParams) == 16, "AdvanceParams");

// ---- linear.cu ----
enum Epilogue : int {
  kEpilogueStore = 0,     // out[row][n] = y (+ bias[n]); into stream, unrounded, when that is set
  kEpilogueResidual = 1,  // stream[row][n] += y (+ bias[n]), f32; rounded into tap, an aux hidden state, when set
  kEpilogueSilu = 2,      // out[row][j] = silu(gate) * up; tile i: gate rows 8i..8i+7, then up rows 8i..8i+7; n: of j
  kEpilogueLogits = 3,    // logits[row][n] = y (+ bias[n]), f32; also the block's maximum per row
};

// RMSNorm in front of a linear is split so that nothing waits for it: who makes a row also writes normed = bf16(x *
// norm weight) and squares, the sum of x^2 of each 16 columns; the linear takes normed as input and multiplies its sums
// by inv = 1 / sqrt(mean(x^2) + eps), made from squares (linear_row.cuh).

constexpr int kSegments = 8;  // of K (split-K), at most: warps of linear_m*
// One input of a linear and its weights; y = inv * sum over k of w[n][k] * x[row][k].
struct LinearPart {
  const uint4* weights;          // re-tiled (format.cuh)
  const float* scales;           // of block-scaled FP8: format.cuh
  const bf16* x;                 // [rows][x_stride]; with a norm: normed
  const float* squares;          // [rows][ceil(x_stride / 16)], or null: no norm, inv = 1. Read by linear_m* only
  const float* inv;              // [rows] from norm_rows, or null. Read by linear_prefill only
  int k;                         // multiple of 8; weights hold zeros up to k_blocks * 32
  int x_stride;                  // multiple of 8
  unsigned short segment_units;  // units (format.cuh) of a segment: ceil(units / kSegments), units = ceil(k / 32), of
                                 // other formats than bf16 ceil(k / 64)
  unsigned short n_segments;     // ceil(units / segment_units)
  float eps;
};
struct LinearParams {
  LinearPart part[2];
  bf16* out;              // [rows][out_stride]
  const bf16* bias;       // [n] or null
  float* stream;          // [rows][out_stride] residual stream: Residual, or Store that starts one; else null
  bf16* tap;              // [rows][tap_stride] or null: an aux hidden state, a copy of the stream (Residual only)
  const bf16* next_norm;  // [n] RMSNorm weight of the next linear, or null. linear_m* only, Store and Residual
  bf16* normed;           // [rows][out_stride]: bf16(output * next_norm)
  float* squares;         // [rows][ceil(n / 16)]
  float* logits;          // [rows][out_stride]
  float* max_value;       // [rows][gridDim.x] or null
  int* max_id;            // [rows][gridDim.x]: lowest n with that value
  const int* n_rows;  // rows in use, on the device (State.rows), or null: `rows`. linear_m*: read for first_row only
  const float* row_scales;  // [n_tiles * 16] in the order of tiles: linear_*_fp8_rows
  int n_parts;              // 1 or 2
  int n;                    // outputs; rows of weights beyond it are padding
  int n_tiles;              // 16-row tiles of weights
  int rows;                 // rows of the pass (the captured width, the size of the prefill chunk)
  int epilogue;             // Epilogue
  int out_stride, tap_stride;
  int first_row;  // linear_m*: row 0 is this row of the pass; a launch behind the rows in use leaves at once. 0:
                  // nothing is looked at
};
static_assert(sizeof(LinearPart) == 56, "twin in Rust");
static_assert(sizeof(LinearParams) == 240, "twin in Rust");

// ---- norm.cu ----
struct NormParams {
  const void* x;      // [rows][x_stride] f32 (a residual stream), or bf16 (the kernels named _bf16*)
  const bf16* norm;   // [k] RMSNorm weight
  void* normed;       // [rows][normed_stride]. norm_rows: bf16(x * norm); norm_step: x * inv * norm in x's type
                      // (norm_step_bf16_stream: f32)
  float* inv;         // [rows]: 1 / sqrt(mean(x^2) + eps); this and squares of norm_rows only
  float* squares;     // [rows][k / 16] or null: for a linear_m* after it (the head on the last row)
  const int* n_rows;  // as in LinearParams
  int rows;
  int k;  // multiple of 16
  int x_stride, normed_stride;
  float eps;
  int pad;
};
static_assert(sizeof(NormParams) == 72, "twin in Rust");

// ---- embed.cu: embed ----
struct EmbedParams {
  const uint4* table;     // re-tiled [vocab / 16][hidden / 32][2][32]
  float* x;               // [rows][x_stride]
  const bf16* next_norm;  // [hidden] or null, normed [rows][x_stride], squares [rows][hidden / 16]: as in LinearParams
  bf16* normed;
  float* squares;
  const int* tokens;  // row i is tokens[*start + offset + i] (start null: tokens[offset + i]); tokens null: row 0 is
                      // state->root, row i is state->drafts[i - 1]
  const int* start;
  const State* state;
  const int* n_rows;  // as in LinearParams
  int rows;
  int hidden;  // multiple of 16
  int x_stride, offset;
};
static_assert(sizeof(EmbedParams) == 88, "twin in Rust");

// ---- repack.cu ----
enum SourceType : int { kSourceBf16 = 0, kSourceF16 = 1, kSourceF32 = 2 };
enum RowOrder : int {
  kRowsPlain = 0,  // source row i is weight row row_offset + i
  kRowsGate = 1,   // source row i is row i % 8 of tile (row_offset + i) / 8
  kRowsUp = 2,     // the same, rows 8..15 of the tile
};
// repack: rows of a checkpoint tensor into re-tiled weights. Rows from n_source_rows to `rows` are written as zeros
// (padding). quantise_fp8: the same as e4m3 with a scale for each 8 rows and 32 columns, the largest number of which
// becomes 448. rows and row_offset are multiples of 8.
struct RepackParams {
  const void* source;  // [n_source_rows][source_stride]
  uint4* weights;      // [..][k_blocks][2][32]; of e4m3 [..][k_blocks][32]
  long long source_stride;
  int source_type;  // SourceType
  int order;        // RowOrder
  int n_source_rows, rows, row_offset;
  int k;  // columns; zeros are written up to k_blocks * 32
  int k_blocks;
  int pad;
  float* tile_scales;  // quantise_fp8: [..][k_blocks][2]
};
static_assert(sizeof(RepackParams) == 64, "twin in Rust");
// fill_random: element (n, k) = scale * uniform(seed, n * k_dim + k) in [-1, 1), or `scale` itself when constant is
// set; bf16.
struct FillParams {
  void* to;  // re-tiled [n_tiles][k_blocks][2][32] uint4 when retiled, else row-major [n][k] bf16
  unsigned long long seed;
  int n, k, retiled, constant;
  float scale;
  int pad;
};
static_assert(sizeof(FillParams) == 40, "twin in Rust");

// repack_fp8, repack_int4: rows of codes and their scales into the layouts of format.cuh. Columns and rows of a block
// of 32 x 16 that are not there get code 0 (of Int4: 8) and scale 0.
struct RepackCodesParams {
  const unsigned char* source;  // codes of n_source_rows rows: e4m3 [source_stride], or packed words of 8 columns
  const void* scales;           // of the whole tensor, [..][scale_stride]: f32, or bf16 when scale_bf16 is set
  unsigned char* weights;
  float* tile_scales;       // FP8: [..][units][2][2], or null: scales are applied by row
  long long source_stride;  // bytes
  int scale_stride, scale_bf16;
  int block_rows, block_cols;  // rows and columns of the tensor that share a scale
  int first_row;               // of the tensor: source row 0
  int order;                   // RowOrder
  int n_source_rows, rows, row_offset, k, k_blocks, pad;
};
static_assert(sizeof(RepackCodesParams) == 88, "twin in Rust");
// fill_codes: codes from a hash, for random weights: e4m3 up to 1.875 in magnitude, or -7 to 7; tile scales and those
// of Int4 are `scale`.
struct FillCodesParams {
  unsigned char* weights;
  float* tile_scales;  // FP8, or null
  unsigned long long seed;
  unsigned long long n_blocks;  // units of 16 rows and 64 columns
  int four_bits;
  float scale;
};
static_assert(sizeof(FillCodesParams) == 40, "twin in Rust");

// ---- probe.cu: read_ceiling ----
struct ReadParams {
  const uint4* from;
  unsigned long long n;  // 16-byte words
  unsigned* sink;        // one word; written only if the sum is a value that it practically never is
};
static_assert(sizeof(ReadParams) == 24, "twin in Rust");

// ---- attention_decode.cu, attention_prefill.cu ----
enum {
  kAttentionStep = 64,          // positions whose scores share one maximum before they are merged
  kAttentionWideBegin = 16384,  // chunks are 256 wide below, 1024 from here
  kAttentionFineEnd = 2048,  // decode passes of one row that end by here may give each block a step instead of a chunk;
  kAttentionFineEndOfMore = 1024,  // of several rows, whose partial results are more to combine
  kAttentionMaxRows = 16           // of a decode or verify pass
};
// The chunks of the KV cache: the chunk of a position, and the first position of a chunk. Absolute, so that bits depend
// on the position alone.
__host__ __device__ inline int attention_chunk_of(int position) {
  return position < kAttentionWideBegin ? position / 256 : 64 + (position - kAttentionWideBegin) / 1024;
}
__host__ __device__ inline int attention_chunk_begin(int chunk) {
  return chunk < 64 ? chunk * 256 : kAttentionWideBegin + (chunk - 64) * 1024;
}
// Blocks a KV head that decode passes need which end at position n or before: it grows with n.
__host__ __device__ inline int attention_blocks(int n) {
  const int steps = (n < kAttentionFineEnd ? n + kAttentionStep - 1 : kAttentionFineEnd) / kAttentionStep,
            chunks = attention_chunk_of(n - 1) + 1;
  return steps > chunks ? steps : chunks;
}
// All attention kernels of a layer. Row i is at position *length + i, for i < min(*rows, max_rows); length + rows may
// not exceed capacity. Every element of v_cache that has no position yet must be finite (zero it once).
struct AttentionParams {
  bf16* qkv;  // [max_rows][(n_heads + 2 n_kv_heads) * head_dim] raw q | k | v; attention_rope turns q in place, decode
              // only reads
  bf16* out;  // [max_rows][n_heads * head_dim]
  bf16* k_cache;          // [n_kv_heads][capacity][head_dim]
  bf16* v_cache;          // [n_kv_heads][head_dim][capacity]
  const bf16* q_norm;     // [head_dim], or null: no norm
  const bf16* k_norm;     // [head_dim], or null
  const float* inv_freq;  // [head_dim / 2]
  float* partials;        // decode: [n_kv_heads][gridDim.x][gridDim.z * columns of a block][head_dim + 2]; need not be
                          // initialised
  unsigned* counters;     // decode: [n_kv_heads][gridDim.z], zero before the first launch, left zero
  const int* length;      // rows in the cache before this pass
  const int* rows;
  int n_heads, n_kv_heads;  // of this rank
  int capacity;             // a multiple of 1024
  int max_rows;             // captured width: at most 16 for decode
  float scale;              // usually head_dim^-0.5
  float rope_factor;        // of cos and sin; 1 but for yarn
  float norm_eps;
  int pad;
};
static_assert(sizeof(AttentionParams) == 120, "AttentionParams");

// ---- draft.cu ----
// All zero before the first launch; every launch leaves it so.
struct DraftScratch {
  unsigned long long best;
  unsigned arrivals, pad;
};
static_assert(sizeof(DraftScratch) == 16, "DraftScratch");

// For draft_choose: grid (any number of blocks, best ceil(vocab / 256)), 256 threads. One draft from the drafter's
// logits.
struct DraftParams {
  const float* logits;  // [vocab]
  State* state;
  const SamplingParams* options;
  DraftScratch* scratch;
  const int* target_ids;   // [vocab], the target's id of each draft id, ascending; null: the same ids
  const float* max_value;  // [n_max]: LinearParams::max_value and max_id of the drafter's head
  const int* max_id;
  int vocab;
  int index;     // which draft this is: 0, 1, ..
  int n_drafts;  // how many this graph makes; after the last State.n_drafts and rows are set
  int n_max;
};
static_assert(sizeof(DraftParams) == 72, "DraftParams");

// Where the rows of a draft pass stand; device memory, written by draft_begin at the start of each.
struct DraftRows {
  int start;          // State.draft_length before the pass: row 0 of the extend
  int rows;           // rows of the extend: up to the target's length, or one less
  int last;           // rows - 1, the row that the first draft comes from
  int one;            // 1: rows of the steps behind it
  int positions[16];  // positions[n]: where the row of draft n (from 1) stands
};
static_assert(sizeof(DraftRows) == 80, "DraftRows");

// For draft_begin: one warp. Moves State.draft_length to the end of the pass that begins.
struct DraftBeginParams {
  State* state;
  DraftRows* draft;
  int max_rows;  // of the pass
  int behind;    // rows to leave for a later pass: 0, or 1 so that an extend has a last row
};
static_assert(sizeof(DraftBeginParams) == 24, "DraftBeginParams");

// For ngram_draft: grid (any number of blocks), 256 threads.
struct NgramParams {
  State* state;
  const SamplingParams* options;
  DraftScratch* scratch;
  const int* history;        // [State.history_length]
  unsigned long long* ring;  // the record of the last pass gets the match length
  int min_n;                 // shortest suffix that counts, at least 1
  int max_n;                 // longest that is looked for
  int n_drafts;              // most drafts, at most 16
  int pad;
};
static_assert(sizeof(NgramParams) == 56, "NgramParams");

// ---- copy.cu: copy_rows ----
struct CopyParams {
  const bf16* from;  // [from_mask + 1 rows at least][dim]; row i is (i + *from_start) & from_mask (start null: 0)
  bf16* to;          // likewise
  const int* from_start;
  const int* to_start;
  const int* n_rows;  // as in LinearParams
  int rows;
  int dim;                 // multiple of 8
  int from_mask, to_mask;  // powers of two less 1, or -1
};
static_assert(sizeof(CopyParams) == 56, "twin in Rust");

// ---- comm.cu ----
// What a collective knows of its ranks. What a window is: comm_protocol.h.
struct CommRecord {
  int rank, peer, phase, step;
  unsigned epoch, channel;
  int pad[2];
};  // who waited for whom, in which phase (COMM_PHASE_*) of which step
static_assert(sizeof(CommRecord) == 32, "twin in Rust");
enum CommFault : int { kFaultNone = 0, kFaultDrop = 1, kFaultZero = 2, kFaultFlip = 3, kFaultStall = 4 };
struct CommRanks {
  unsigned char* window[8];  // [rank], as this GPU reaches them
  unsigned* poison;          // pinned host memory: 0, or COMM_POISON_*
  CommRecord* record;        // pinned host memory, valid with COMM_POISON_TIMEOUT
  int rank;
  int ranks;
  unsigned patience_us;  // waiting longer for one thing is an error
  int step;              // the host's name for this launch
  int fault;  // CommFault of what this rank sends to fault_peer (of what it loads from it, pull); *_faulty kernels only
  int fault_peer;
};
static_assert(sizeof(CommRanks) == 104, "twin in Rust");
// all_reduce_*: x += bf16(sum of all ranks' partials, in order of ranks, + bias), and what the next norm needs of it.
struct AllReduceParams {
  CommRanks comm;
  const bf16* partial;    // [rows][dim] of this rank; all_reduce_local, all_reduce_timed: [comm.ranks][rows][dim]
  float* x;               // [rows][dim] residual stream
  const bf16* bias;       // [dim] or null
  bf16* tap;              // [rows][tap_stride] or null: x, rounded
  const bf16* next_norm;  // [dim] or null, normed [rows][dim], squares [rows][dim / 16]: as in LinearParams
  bf16* normed;
  float* squares;
  const int* n_rows;  // rows in use, on the device, the same on all ranks, or null: `rows`
  int rows;
  int dim;  // multiple of 16, at least 16 columns a block (all_reduce_two_shot: a block and rank)
  int tap_stride;
  int wait_ns;  // all_reduce_timed: how long the sum is on its way
};
static_assert(sizeof(AllReduceParams) == 184, "twin in Rust");
// exchange: words[i] becomes the maximum or the sum over all ranks' words[i].
enum ExchangeOp : int { kExchangeMax = 0, kExchangeSum = 1 };
struct ExchangeParams {
  CommRanks comm;
  unsigned long long* words;  // [n]
  const int* wanted;          // [n_wanted], the same on all ranks: if all are 0 nothing is exchanged. Null: always
  int n;
  int op;  // ExchangeOp
  int n_wanted;
  int pad;
};
static_assert(sizeof(ExchangeParams) == 136, "twin in Rust");
// peer_store, peer_load: word i of a pattern is {i, seed, i ^ seed, ~i}. peer_ping: a word goes to and fro between two
// ranks.
struct PeerParams {
  CommRanks comm;  // a pair of ranks, 0 and 1; peer_store, peer_load: only for faults
  uint4* at;       // [n], in any window
  unsigned long long n;
  unsigned long long* result;  // pinned: words that were wrong (added to), or nanoseconds of all rounds
  unsigned seed;
  int rounds;
};
static_assert(sizeof(PeerParams) == 136, "twin in Rust");

// ---- router.cu, experts.cu ----
constexpr int kMaxExperts = 512, kMaxChosen = 16, kExpertRows = 16;
// One expert that some rows of a pass want. Items ascend by expert.
struct ExpertItem {
  int expert;
  int n;                            // rows
  unsigned char row[kExpertRows];   // ascending
  unsigned char slot[kExpertRows];  // where the expert stands among that row's, in ascending order
};
// What the rows of a pass want; device memory, written by experts_up.
struct ExpertWork {
  int n, pad[3];
  float weight[kExpertRows][kMaxChosen];  // by slot
  ExpertItem item[kExpertRows * kMaxChosen];
};
static_assert(sizeof(ExpertItem) == 40 && sizeof(ExpertWork) == 1040 + 40 * kExpertRows * kMaxChosen, "twins in Rust");

// router: grid (ceil(n_experts / 16), kRouterSplits), 512 threads. Sums of w x of parts of K, which experts_up adds.
constexpr int kRouterSplits = 4;
struct RouterParams {
  const uint4* weights;  // re-tiled bf16
  const bf16* x;         // normed [rows][x_stride]
  float* sums;           // [kRouterSplits][rows][n_experts]
  const int* n_rows;     // rows in use, or null: `rows`
  int k, x_stride, n_experts, rows;
  int first_row;  // the row of the pass that row 0 of this launch is
  int pad;
};
static_assert(sizeof(RouterParams) == 56, "twin in Rust");

// How experts are chosen: by every block of experts_up for itself; the last one leaves the result in `work`.
struct RouteParams {
  const float* sums;  // RouterParams::sums; times 1/rms of a row they are logits
  const float* bias;  // [n_experts] added to scores for the choice alone, or null
  ExpertWork* work;
  const int* n_rows;  // rows in use, or null: `rows`
  int first_row;      // the row of the pass that row 0 of this launch is
  int n_experts, top_k, n_groups, top_groups;
  int softmax;     // scores: 1 softmax of the logits, 0 their sigmoid
  int normalised;  // weights of a row are divided by their sum (+ 1e-20)
  float scale;     // of all weights
};
static_assert(sizeof(RouteParams) == 64, "twin in Rust");

// One expert's matrices, re-tiled (format.cuh); expert e is e * bytes and, of FP8, e * n_scales away from the first.
struct ExpertMatrix {
  const unsigned char* weights;
  const float* scales;  // beside the blocks: fp8 as in format.cuh, fp8_rows [n_tiles * 16] in the order of tiles
  unsigned long long bytes;
  int n_scales;
  int dim;  // up: columns of its act; down: its K
};
// experts_up_*: chooses (route), then act[row][slot * routed.dim ..] = silu(gate) * up of each item, gate and up
// interleaved as in kEpilogueSilu; the shared expert behind the last slot. experts_down_*: y[row][n] = sum over slots,
// ascending, of weight * down(act), then the shared expert's; into the stream (and tap, and normed and squares for the
// next linear), or, as bf16, into partial. Both 512 threads; up: any grid, best 2 blocks per SM; down: ceil(n / 32)
// blocks up to 8 rows, n / 16 above.
struct ExpertParams {
  ExpertMatrix routed, shared;  // shared.dim 0: there is none
  RouteParams route;            // down: of it work, n_rows, first_row and top_k only
  const bf16* x;                // up: normed [rows][x_stride]; down: act
  const float* squares;         // up: [rows][k / 16] of the stream
  bf16* act;                    // up: [rows][act_stride]
  float* stream;                // down: [rows][n]
  bf16* partial;                // down: [rows][n]; then stream is null
  bf16* tap;                    // as in LinearParams, with next_norm, normed, squares_out
  const bf16* next_norm;
  bf16* normed;
  float* squares_out;
  int k;  // up: columns of x
  int x_stride, act_stride, tap_stride;
  int n;     // down: outputs, a multiple of 16
  int rows;  // of the launch
  float eps;
  int pad;
};
static_assert(sizeof(ExpertMatrix) == 32, "twin in Rust");
static_assert(sizeof(ExpertParams) == 232, "twin in Rust");

// ---- mla.cu ----
// The chunks of a latent cache: 32 positions wide up to 2,048, 64 to 4,096, 128 to 8,192, 256 to 16,384, 1,024 beyond.
// Absolute, so that bits depend on the position alone.
__host__ __device__ inline int latent_chunk_of(int position) {
  return position < 2048    ? position / 32
         : position < 4096  ? 32 + position / 64
         : position < 8192  ? 64 + position / 128
         : position < 16384 ? 96 + position / 256
                            : 144 + position / 1024;
}
__host__ __device__ inline int latent_chunk_begin(int chunk) {
  return chunk < 64    ? chunk * 32
         : chunk < 96  ? (chunk - 32) * 64
         : chunk < 128 ? (chunk - 64) * 128
         : chunk < 160 ? (chunk - 96) * 256
                       : (chunk - 144) * 1024;
}
constexpr int kValueRows = 2;       // rows of a block of latent_value
constexpr int kLatentChunks = 512;  // most that latent_value combines: contexts of up to 376,832
// All kernels of a layer's latent attention. Row i is row first_row + i of the pass and at position *length + first_row
// + i, for i < min(*rows - first_row, max_rows). Heads are those of this rank. kv_rank and v_dim are multiples of 16,
// the other dims of 8.
struct LatentParams {
  const bf16* latents;  // [max_rows][latents_stride]: q_rank of queries, then kv_rank and rope_dim of keys and values,
                        // raw
  const bf16* q;        // [max_rows][n_heads][nope_dim + rope_dim] raw
  bf16* absorbed;       // [max_rows][n_heads][kv_rank + rope_dim]
  bf16* attended;       // [max_rows][n_heads][kv_rank]
  bf16* out;            // [max_rows][n_heads][v_dim]
  bf16* cache;          // [capacity][kv_rank + rope_dim]
  const uint4* w_uk;  // [n_heads] re-tiled [kv_rank / 16][ceil(nope_dim / 32)][2][32]: the transposed rows of kv_b that
                      // make keys
  const uint4* w_uv;  // [n_heads] re-tiled [v_dim / 16][kv_rank / 32][2][32]
  const bf16* kv_norm;    // [kv_rank]
  const float* inv_freq;  // [rope_dim / 2]
  float* partials;        // [chunks of the captured context][max_rows * n_heads][kv_rank + 2]
  const int* length;      // rows in the cache before this pass
  const int* rows;
  int q_rank, latents_stride, n_heads, kv_rank, nope_dim, rope_dim, v_dim;
  int max_rows;  // at most 16
  float scale;
  float rope_factor;  // of cos and sin
  float norm_eps;
  int first_row;
};
static_assert(sizeof(LatentParams) == 152, "twin in Rust");
