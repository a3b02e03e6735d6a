//! The params structs of the kernels: twins of those in kernels/params.h, where shapes and meanings stand. Pointers are
//! device addresses.
//!
//! Sizes are asserted here and there; the tests under the CPU shim run every kernel through these structs.
use super::device::Params;
use bytemuck::{Pod, Zeroable};

macro_rules! params {
    ($($(#[$doc:meta])* $name:ident: $bytes:literal { $($field:ident: $type:ty),* $(,)? })*) => { $(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Pod, Zeroable)]
        pub struct $name { $(pub $field: $type),* }
        const _: () = assert!(std::mem::size_of::<$name>() == $bytes);
        // Sound: repr(C), and Pod has shown that there is no padding.
        unsafe impl Params for $name {}
    )* };
}

params! {
    /// What changes between replays; device memory.
    State: 192 {
        length: i32, rows: i32, root: i32, done: i32, reason: i32, accepted: i32, emitted: i32, n_drafts: i32,
        n_output: i32, history_length: i32, draft_length: i32, ngram_match: i32, pass: u32, pad: [i32; 3],
        drafts: [i32; 16], sampled: [i32; 16],
    }
    /// What stays for a request; device memory.
    SamplingParams: 128 {
        seed: u64, top_p: u64, temperature: f32, min_z: f32, top_k: i32, repetition_penalty: f32, presence_penalty: f32,
        frequency_penalty: f32, has_bias: i32, min_tokens: i32, max_tokens: i32, context: i32, n_eos: i32, pad: i32, eos: [i32; 16],
    }
    SampleParams: 120 {
        logits: u64, state: u64, options: u64, scratch: u64, list: u64, counts: u64, bias: u64, history: u64, ring: u64, max_value: u64,
        max_id: u64, vocab: i32, stride: i32, n_max: i32, width: i32, first_id: i32, n_tokens: i32, ranks: i32, round: i32,
    }
    AdvanceParams: 16 { state: u64, ring: u64 }
    /// Where the rows of a draft pass stand; device memory.
    DraftRows: 80 { start: i32, rows: i32, last: i32, one: i32, positions: [i32; 16] }
    DraftBeginParams: 24 { state: u64, draft: u64, max_rows: i32, behind: i32 }
    DraftParams: 72 {
        logits: u64, state: u64, options: u64, scratch: u64, target_ids: u64, max_value: u64, max_id: u64, vocab: i32, index: i32,
        n_drafts: i32, n_max: i32,
    }
    NgramParams: 56 { state: u64, options: u64, scratch: u64, history: u64, ring: u64, min_n: i32, max_n: i32, n_drafts: i32, pad: i32 }
    CopyParams: 56 {
        from: u64, to: u64, from_start: u64, to_start: u64, n_rows: u64, rows: i32, dim: i32, from_mask: i32, to_mask: i32,
    }
    LinearPart: 56 { weights: u64, scales: u64, x: u64, squares: u64, inv: u64, k: i32, x_stride: i32, segment_units: u16, n_segments: u16, eps: f32 }
    LinearParams: 240 {
        part: [LinearPart; 2], out: u64, bias: u64, stream: u64, tap: u64, next_norm: u64, normed: u64, squares: u64, logits: u64,
        max_value: u64, max_id: u64, n_rows: u64, row_scales: u64, n_parts: i32, n: i32, n_tiles: i32, rows: i32, epilogue: i32, out_stride: i32,
        tap_stride: i32, first_row: i32,
    }
    NormParams: 72 {
        x: u64, norm: u64, normed: u64, inv: u64, squares: u64, n_rows: u64, rows: i32, k: i32, x_stride: i32, normed_stride: i32, eps: f32,
        pad: i32,
    }
    EmbedParams: 88 {
        table: u64, x: u64, next_norm: u64, normed: u64, squares: u64, tokens: u64, start: u64, state: u64, n_rows: u64, rows: i32,
        hidden: i32, x_stride: i32, offset: i32,
    }
    RepackParams: 64 {
        source: u64, weights: u64, source_stride: i64, source_type: i32, order: i32, n_source_rows: i32, rows: i32, row_offset: i32, k: i32,
        k_blocks: i32, pad: i32, tile_scales: u64,
    }
    RepackCodesParams: 88 {
        source: u64, scales: u64, weights: u64, tile_scales: u64, source_stride: i64, scale_stride: i32, scale_bf16: i32, block_rows: i32,
        block_cols: i32, first_row: i32, order: i32, n_source_rows: i32, rows: i32, row_offset: i32, k: i32, k_blocks: i32, pad: i32,
    }
    FillCodesParams: 40 { weights: u64, tile_scales: u64, seed: u64, n_blocks: u64, four_bits: i32, scale: f32 }
    FillParams: 40 { to: u64, seed: u64, n: i32, k: i32, retiled: i32, constant: i32, scale: f32, pad: i32 }
    ReadParams: 24 { from: u64, n: u64, sink: u64 }
    AttentionParams: 120 {
        qkv: u64, out: u64, k_cache: u64, v_cache: u64, q_norm: u64, k_norm: u64, inv_freq: u64, partials: u64, counters: u64, length: u64,
        rows: u64, n_heads: i32, n_kv_heads: i32, capacity: i32, max_rows: i32, scale: f32, rope_factor: f32, norm_eps: f32, pad: i32,
    }
    RouterParams: 56 {
        weights: u64, x: u64, sums: u64, n_rows: u64, k: i32, x_stride: i32, n_experts: i32, rows: i32, first_row: i32, pad: i32,
    }
    RouteParams: 64 {
        sums: u64, bias: u64, work: u64, n_rows: u64, first_row: i32, n_experts: i32, top_k: i32, n_groups: i32, top_groups: i32,
        softmax: i32, normalised: i32, scale: f32,
    }
    ExpertMatrix: 32 { weights: u64, scales: u64, bytes: u64, n_scales: i32, dim: i32 }
    ExpertParams: 232 {
        routed: ExpertMatrix, shared: ExpertMatrix, route: RouteParams, x: u64, squares: u64, act: u64, stream: u64, partial: u64, tap: u64,
        next_norm: u64, normed: u64, squares_out: u64, k: i32, x_stride: i32, act_stride: i32, tap_stride: i32, n: i32, rows: i32, eps: f32,
        pad: i32,
    }
    /// The rows of a pass that want one expert; device memory.
    ExpertItem: 40 { expert: i32, n: i32, row: [u8; 16], slot: [u8; 16] }
    /// ExpertWork up to its items, of which EXPERT_ITEMS follow; device memory.
    ExpertWork: 1040 { n: i32, pad: [i32; 3], weight: [[f32; 16]; 16] }
    LatentParams: 152 {
        latents: u64, q: u64, absorbed: u64, attended: u64, out: u64, cache: u64, w_uk: u64, w_uv: u64, kv_norm: u64, inv_freq: u64,
        partials: u64, length: u64, rows: u64, q_rank: i32, latents_stride: i32, n_heads: i32, kv_rank: i32, nope_dim: i32, rope_dim: i32,
        v_dim: i32, max_rows: i32, scale: f32, rope_factor: f32, norm_eps: f32, first_row: i32,
    }
    /// What a rank waited for when it gave up; pinned host memory.
    CommRecord: 32 { rank: i32, peer: i32, phase: i32, step: i32, epoch: u32, channel: u32, pad: [i32; 2] }
    CommRanks: 104 {
        window: [u64; 8], poison: u64, record: u64, rank: i32, ranks: i32, patience_us: u32, step: i32, fault: i32, fault_peer: i32,
    }
    AllReduceParams: 184 {
        comm: CommRanks, partial: u64, x: u64, bias: u64, tap: u64, next_norm: u64, normed: u64, squares: u64, n_rows: u64, rows: i32,
        dim: i32, tap_stride: i32, wait_ns: i32,
    }
    ExchangeParams: 136 { comm: CommRanks, words: u64, wanted: u64, n: i32, op: i32, n_wanted: i32, pad: i32 }
    PeerParams: 136 { comm: CommRanks, at: u64, n: u64, result: u64, seed: u32, rounds: i32 }
}

/// The number behind `NAME =` in kernels/comm_protocol.h.
const fn protocol(name: &str) -> usize {
    let (text, name) = (include_str!("../../kernels/comm_protocol.h").as_bytes(), name.as_bytes());
    let mut start = 0; // of a line
    loop {
        let mut i = 0;
        while i < name.len() && text[start + i] == name[i] {
            i += 1;
        }
        if i == name.len() && text[start + i] == b' ' {
            let (mut at, mut value) = (start + i + 3, 0); // behind " = "
            while text[at] >= b'0' && text[at] <= b'9' {
                value = 10 * value + (text[at] - b'0') as usize;
                at += 1;
            }
            return value;
        }
        while text[start] != b'\n' {
            start += 1; // past the end of the text: no such name, and no program
        }
        start += 1;
    }
}

macro_rules! protocol_constants {
    ($($name:ident)*) => { $(pub const $name: usize = protocol(stringify!($name));)* };
}

protocol_constants! {
    COMM_MAX_RANKS COMM_CHANNELS COMM_BUFFERS COMM_SLOT_BYTES COMM_LINE_BYTES COMM_AFTER_WRAP COMM_FLAGS COMM_CHANNEL_BYTES COMM_WINDOW_BYTES
    COMM_POISON_TIMEOUT COMM_POISON_HOST COMM_PHASE_PUSH COMM_PHASE_REDUCE COMM_PHASE_GATHER COMM_PHASE_FLAG COMM_PHASE_WORDS
    COMM_PHASE_PING
}

pub const EXCHANGE_MAX: i32 = 0;
pub const EXCHANGE_SUM: i32 = 1;

pub const EPILOGUE_STORE: i32 = 0;
pub const EPILOGUE_RESIDUAL: i32 = 1;
pub const EPILOGUE_SILU: i32 = 2;
pub const EPILOGUE_LOGITS: i32 = 3;

pub const ROWS_PLAIN: i32 = 0;
pub const ROWS_GATE: i32 = 1;
pub const ROWS_UP: i32 = 2;

pub const STOP_EOS: u32 = 1;
pub const STOP_LENGTH: u32 = 2;
pub const STOP_CONTEXT: u32 = 3;
/// No finite logit, or all banned.
pub const STOP_NO_CHOICE: u32 = 4;

/// The ring of records: RECORD_WORDS words of (pass << 32 | value) at RECORD_WORDS * (pass % RECORDS).
pub const RECORDS: usize = 64;
pub const RECORD_WORDS: usize = 32;
pub const RECORD_COUNT: usize = 0;
pub const RECORD_ACCEPTED: usize = 1;
pub const RECORD_REASON: usize = 2;
pub const RECORD_DRAFTS: usize = 3;
/// Length of the n-gram match; only with ngram_draft in the pass.
pub const RECORD_MATCH: usize = 4;
pub const RECORD_TOKENS: usize = 8;

/// Logits of a row that one block of the sampling kernels handles.
pub const SAMPLE_SLICE: usize = 4032;
/// sizeof(SampleScratch)
pub const SAMPLE_SCRATCH_BYTES: usize = SAMPLE_DIGITS_AT + 16 * SAMPLE_DIGIT_WORDS * 8 + 16 * 48;
/// Where ranks exchange what they found, in bytes from its start: one word a row, so many words a row.
pub const SAMPLE_BEST_AT: usize = 0;
pub const SAMPLE_CHOSEN_AT: usize = 16 * 8;
/// Flags of rows: what is exchanged for rows without is not worth a wait.
pub const SAMPLE_IN_USE_AT: usize = 16 * (8 + 8 + 4);
pub const SAMPLE_OPEN_AT: usize = SAMPLE_IN_USE_AT + 16 * 4;
pub const SAMPLE_BINS_AT: usize = SAMPLE_OPEN_AT + 16 * 4 + 16 * 80;
pub const SAMPLE_BIN_WORDS: usize = 1024 * 12 / 8;
pub const SAMPLE_DIGITS_AT: usize = SAMPLE_BINS_AT + 16 * SAMPLE_BIN_WORDS * 8;
pub const SAMPLE_DIGIT_WORDS: usize = 256 * 12 / 8;
/// sample_narrow of a pass with filters on several ranks.
pub const SAMPLE_ROUNDS: usize = 14;
/// Bit of a token's count that says it is in the prompt.
pub const IN_PROMPT: u32 = 1 << 31;

/// Blocks a KV head that attention is launched with for positions 0 .. n: never fewer than attention_blocks of
/// kernels/params.h asks for. With latent attention as many as latent_chunk_of says that it has chunks, which is never
/// less.
pub fn attention_chunks(n: usize, latent: bool) -> usize {
    match (n.saturating_sub(1), latent) {
        (last @ 0..2048, false) => last / 64 + 1,
        (last @ 2048..16384, false) => 32 + (last - 2048) / 256 + 1,
        (last, false) => 88 + (last - 16384) / 1024 + 1,
        (last @ 0..2048, true) => last / 32 + 1,
        (last @ 2048..4096, true) => 32 + last / 64 + 1,
        (last @ 4096..8192, true) => 64 + last / 128 + 1,
        (last @ 8192..16384, true) => 96 + last / 256 + 1,
        (last, true) => 144 + last / 1024 + 1,
    }
}

/// kLatentChunks
pub const LATENT_CHUNKS: usize = 512;
/// kValueRows
pub const VALUE_ROWS: usize = 2;
/// kSegments
pub const SEGMENTS: usize = 8;
/// kRouterSplits
pub const ROUTER_SPLITS: usize = 4;

/// Experts of a model, and of a row, that the kernels of experts have room for.
pub const MAX_EXPERTS: usize = 512;
pub const MAX_CHOSEN: usize = 16;
/// Items of an ExpertWork.
pub const EXPERT_ITEMS: usize = 16 * MAX_CHOSEN;
/// sizeof(ExpertWork)
pub const EXPERT_WORK_BYTES: usize =
    std::mem::size_of::<ExpertWork>() + EXPERT_ITEMS * std::mem::size_of::<ExpertItem>();

/// sizeof(DraftScratch)
pub const DRAFT_SCRATCH_BYTES: usize = 16;

/// Offset of a field of `State` in bytes, for kernels that read one of its words.
#[macro_export]
macro_rules! state_offset {
    ($field:ident) => {
        std::mem::offset_of!($crate::gpu::params::State, $field)
    };
}

#[cfg(test)]
mod tests {
    use super::attention_chunks;

    #[test]
    fn attention_has_the_blocks_that_its_kernel_asks_for() {
        // attention_blocks of kernels/params.h.
        let needed = |n: usize| {
            let (steps, last) = (n.min(2048).div_ceil(64), n - 1);
            steps.max(if last < 16384 { last / 256 } else { 64 + (last - 16384) / 1024 } + 1)
        };
        for n in 1..200_000 {
            assert!(attention_chunks(n, false) >= needed(n), "{n} positions");
            assert!(attention_chunks(n, true) >= attention_chunks(n, false), "{n} positions");
            for latent in [false, true] {
                assert!(attention_chunks(n, latent) <= attention_chunks(n + 1, latent), "{n} positions");
            }
        }
    }
}
