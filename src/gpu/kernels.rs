//! The kernel table: which kernel a Step becomes, with which params and grid. The GPU twin of cpu/reference.rs.
//!
//! One Step is one launch in a verify pass: who writes a row that will be normalised also writes it times the norm
//! weight and its sums of squares (`norms` finds out for whom), so that a linear layer waits for nothing but its input.
//! A prefill pass normalises in a kernel of its own and rotates queries before attention; its bits are the same.
use super::device::{Gpu, Kernel, Launch, Memory, Params};
use super::params::*;
use super::ranks::collective::{AllReduce, Exchange};
use super::ranks::link::Link;
use crate::decode::draft_ngram::{MAX_NGRAM, MIN_NGRAM};
use crate::decode::MAX_DRAFTS;
use crate::model::config::{Latent, Scoring};
use crate::model::plan::{
    Attention, BufferId, BufferKind, Epilogue, Input, KvLayout, LatentAttention, Linear, Mixture, Owner, Pass, Plan,
    Router, Step, Tap, Tokens, FEATURE_ROWS, MAX_WIDTH,
};
use crate::model::quant::{Block, Format};
use crate::model::role::{Role, WeightId};
use crate::model::rope::Rope;
use crate::state_offset;
use anyhow::{bail, ensure, Context, Result};
use bytemuck::Zeroable;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

/// Every kernel, resolved at start.
pub struct Kernels {
    embed: Kernel,
    all_reduce_timed: Kernel,
    /// Of a stream, and of bf16 features.
    pub norm_rows: [Kernel; 2],
    /// From a stream, from bf16 features, and from these into a stream.
    norm_step: [Kernel; 3],
    linear: Vec<LinearVariant>,
    /// For up to 256 rows, and for more.
    linear_prefill: [PrefillVariant; 2],
    /// Two inputs: up to 16 rows, and more.
    linear_two: LinearVariant,
    linear_prefill_two: PrefillVariant,
    attention_decode: Vec<(usize, usize, Kernel)>, // head_dim, columns of a block
    attention_rope: Vec<(usize, Kernel)>,
    attention_prefill: Vec<(usize, Kernel)>,
    /// For up to 8 rows, and for more.
    router: [Kernel; 2],
    experts: Vec<ExpertKernels>,
    latent_query: Kernel,
    latents: Vec<LatentKernels>,
    sample_adjust: Kernel,
    sample_count: Kernel,
    sample_choose: Kernel,
    sample_narrow: Kernel,
    sample_settle: Kernel,
    sample_accept: Kernel,
    prefill_advance: Kernel,
    copy_rows: Kernel,
    draft_begin: Kernel,
    draft_choose: Kernel,
    ngram_draft: Kernel,
    pub repack: Kernel,
    pub repack_fp8: Kernel,
    pub repack_int4: Kernel,
    pub quantise_fp8: Kernel,
    pub fill_random: Kernel,
    pub fill_codes: Kernel,
    pub read_ceiling: Kernel,
}

/// A skinny linear kernel for 8 * columns rows of the pass and weights of one kind.
struct LinearVariant {
    tiles: Tiles,
    columns: usize,
    kernel: Kernel,
}

/// Threads of a block of `LinearVariant`.
const LINEAR_THREADS: u32 = 32 * SEGMENTS as u32;

/// experts_up and experts_down for up to 8 rows and up to 16, by how routed experts and the shared one are stored.
struct ExpertKernels {
    tiles: [Tiles; 2],
    up: [Kernel; 2],
    down: [Kernel; 2],
}

/// The kernels of latent attention whose code depends on the numbers of a latent and of a rotated key.
struct LatentKernels {
    dims: [usize; 2],
    attend: Kernel,
    value: Kernel,
}

/// head_dim of the attention kernels.
const ATTENTION_DIMS: [usize; 2] = [64, 128];
/// kv_rank and rope_dim of those of latent attention, and their names. The largest is every published model's; the
/// others are tests'.
const LATENT_DIMS: [([usize; 2], &str, &str); 4] = [
    ([512, 64], "latent_attend_512_64", "latent_value_512"),
    ([128, 16], "latent_attend_128_16", "latent_value_128"),
    ([64, 32], "latent_attend_64_32", "latent_value_64"),
    ([32, 8], "latent_attend_32_8", "latent_value_32"),
];
/// How experts and the shared one are stored for the kernels of experts.
const EXPERT_TILES: [[Tiles; 2]; 5] = [
    [Tiles::Bf16, Tiles::Bf16],
    [Tiles::Fp8, Tiles::Fp8],
    [Tiles::Fp8Rows, Tiles::Fp8Rows],
    [Tiles::Int4, Tiles::Bf16],
    [Tiles::Int4, Tiles::Fp8],
];

/// Whether there are kernels for a step; an error that says what is missing.
pub fn check(step: &Step) -> Result<()> {
    match step {
        Step::Attention(a) if !ATTENTION_DIMS.contains(&a.head_dim) => {
            bail!("head_dim {}: the GPU backend has attention kernels for 64 and 128; use --device cpu", a.head_dim)
        }
        Step::LatentQuery(a) => {
            let d = a.dims;
            if !LATENT_DIMS.iter().any(|known| known.0 == [d.kv_rank, d.rope_dim]) {
                bail!(
                    "kv_lora_rank {} and qk_rope_head_dim {}: the GPU backend has kernels of latent attention for 512 and 64; use --device cpu",
                    d.kv_rank,
                    d.rope_dim
                );
            }
            for (name, dim, of) in
                [("q_lora_rank", d.q_rank, 16), ("qk_nope_head_dim", d.nope_dim, 8), ("v_head_dim", d.v_dim, 16)]
            {
                ensure!(dim % of == 0, "{name} {dim}: the GPU backend needs a multiple of {of}; use --device cpu");
            }
            Ok(())
        }
        Step::Linear(l) => {
            if let Epilogue::SiluMul { .. } = l.epilogue {
                ensure!(l.bias.is_none(), "mlp_bias: the GPU backend has no bias for gate and up; use --device cpu");
                ensure!(
                    l.n % 16 == 0,
                    "feed-forward layers of {} on a rank: the GPU backend needs a multiple of 8",
                    l.n / 2
                );
            }
            let tiles = Tiles::of(l.format)?;
            ensure!(
                tiles == Tiles::Bf16 || l.inputs.len() == 1,
                "{} of two inputs: the GPU backend needs plain weights",
                l.format
            );
            normed(&l.inputs)
        }
        Step::Router(r) => {
            let (n, k) = (r.routing.n_experts, r.routing.top_k);
            ensure!(
                n <= MAX_EXPERTS && k <= MAX_CHOSEN && r.routing.n_groups <= 32,
                "{k} of {n} experts in {} groups: the GPU backend has room for {MAX_CHOSEN} of {MAX_EXPERTS} in 32; use --device cpu",
                r.routing.n_groups
            );
            normed(std::slice::from_ref(&r.input))
        }
        Step::ExpertsUp(m) => {
            let common = m.shared.as_ref().map(|s| s.format);
            let stored = [Tiles::of(m.format)?, common.map_or(Ok(Tiles::Bf16), Tiles::of)?];
            let known = |tiles: &[Tiles; 2]| tiles[0] == stored[0] && (common.is_none() || tiles[1] == stored[1]);
            if !EXPERT_TILES.iter().any(known) {
                let common = common.map_or(String::new(), |format| format!(" beside a shared one as {format}"));
                bail!(
                    "experts as {}{common}: the GPU backend has no kernels for this pair; use --device cpu",
                    m.format
                );
            }
            for (what, dim) in [("experts", m.expert_dim), ("shared experts", m.shared_dim())] {
                ensure!(dim % 8 == 0, "{what} of {dim} on a rank: the GPU backend needs a multiple of 8");
            }
            ensure!(
                m.n % 16 == 0,
                "experts into rows of {}: the GPU backend needs a multiple of 16; use --device cpu",
                m.n
            );
            Ok(())
        }
        _ => Ok(()),
    }
}

fn normed(inputs: &[Input]) -> Result<()> {
    let odd = inputs.iter().find(|input| input.norm.is_some() && input.dim % 16 != 0);
    match odd {
        Some(input) => {
            bail!("rows of {}: the GPU backend needs normalised rows of a multiple of 16; use --device cpu", input.dim)
        }
        None => Ok(()),
    }
}

/// A prefill linear kernel: weight rows and tokens of a block's tile, threads.
struct PrefillVariant {
    n: usize,
    m: usize,
    threads: u32,
    kernel: Kernel,
}

/// Rows of a block of the norm kernels.
const NORM_ROWS: usize = 8;

/// prefill_shared_bytes of both tiles: as many stages as fit into 96 KB.
const PREFILL_SHARED: u32 = 96 << 10;

impl Kernels {
    pub fn load(gpu: &Gpu) -> Result<Kernels> {
        let k = |name| gpu.kernel(name, 0);
        let variant =
            |tiles, columns, name| -> Result<LinearVariant> { Ok(LinearVariant { tiles, columns, kernel: k(name)? }) };
        let experts = |tiles, up: [&'static str; 2], down: [&'static str; 2]| -> Result<ExpertKernels> {
            Ok(ExpertKernels { tiles, up: [k(up[0])?, k(up[1])?], down: [k(down[0])?, k(down[1])?] })
        };
        let latent = |&(dims, attend, value)| -> Result<LatentKernels> {
            Ok(LatentKernels { dims, attend: k(attend)?, value: k(value)? })
        };
        let prefill = |n, m, threads, name| -> Result<PrefillVariant> {
            Ok(PrefillVariant { n, m, threads, kernel: gpu.kernel(name, PREFILL_SHARED)? })
        };
        Ok(Kernels {
            embed: k("embed")?,
            all_reduce_timed: k("all_reduce_timed")?,
            norm_rows: [k("norm_rows")?, k("norm_rows_bf16")?],
            norm_step: [k("norm_step")?, k("norm_step_bf16")?, k("norm_step_bf16_stream")?],
            linear: vec![
                variant(Tiles::Bf16, 1, "linear_m8")?,
                variant(Tiles::Bf16, 2, "linear_m16")?,
                variant(Tiles::Fp8, 1, "linear_m8_fp8")?,
                variant(Tiles::Fp8, 2, "linear_m16_fp8")?,
                variant(Tiles::Fp8Rows, 1, "linear_m8_fp8_rows")?,
                variant(Tiles::Fp8Rows, 2, "linear_m16_fp8_rows")?,
                variant(Tiles::Int4, 1, "linear_m8_int4")?,
                variant(Tiles::Int4, 2, "linear_m16_int4")?,
            ],
            linear_prefill: [
                prefill(64, 64, 128, "linear_prefill_64x64")?,
                prefill(128, 128, 256, "linear_prefill_128x128")?,
            ],
            linear_two: variant(Tiles::Bf16, 2, "linear_two")?,
            linear_prefill_two: prefill(64, 64, 128, "linear_prefill_64x64_two")?,
            copy_rows: k("copy_rows")?,
            draft_begin: k("draft_begin")?,
            draft_choose: k("draft_choose")?,
            ngram_draft: k("ngram_draft")?,
            attention_decode: vec![
                (64, 16, k("attention_decode_64_16")?),
                (64, 32, k("attention_decode_64_32")?),
                (128, 16, k("attention_decode_128_16")?),
                (128, 32, k("attention_decode_128_32")?),
            ],
            attention_rope: vec![(64, k("attention_rope_64")?), (128, k("attention_rope_128")?)],
            attention_prefill: vec![(64, k("attention_prefill_64")?), (128, k("attention_prefill_128")?)],
            router: [k("router_m8")?, k("router_m16")?],
            experts: vec![
                experts(
                    EXPERT_TILES[0],
                    ["experts_up_m8_bf16_bf16", "experts_up_m16_bf16_bf16"],
                    ["experts_down_m8_bf16_bf16", "experts_down_m16_bf16_bf16"],
                )?,
                experts(
                    EXPERT_TILES[1],
                    ["experts_up_m8_fp8_fp8", "experts_up_m16_fp8_fp8"],
                    ["experts_down_m8_fp8_fp8", "experts_down_m16_fp8_fp8"],
                )?,
                experts(
                    EXPERT_TILES[2],
                    ["experts_up_m8_fp8_rows_fp8_rows", "experts_up_m16_fp8_rows_fp8_rows"],
                    ["experts_down_m8_fp8_rows_fp8_rows", "experts_down_m16_fp8_rows_fp8_rows"],
                )?,
                experts(
                    EXPERT_TILES[3],
                    ["experts_up_m8_int4_bf16", "experts_up_m16_int4_bf16"],
                    ["experts_down_m8_int4_bf16", "experts_down_m16_int4_bf16"],
                )?,
                experts(
                    EXPERT_TILES[4],
                    ["experts_up_m8_int4_fp8", "experts_up_m16_int4_fp8"],
                    ["experts_down_m8_int4_fp8", "experts_down_m16_int4_fp8"],
                )?,
            ],
            latent_query: k("latent_query")?,
            latents: LATENT_DIMS.iter().map(latent).collect::<Result<_>>()?,
            sample_adjust: k("sample_adjust")?,
            sample_count: k("sample_count")?,
            sample_choose: k("sample_choose")?,
            sample_narrow: k("sample_narrow")?,
            sample_settle: k("sample_settle")?,
            sample_accept: k("sample_accept")?,
            prefill_advance: k("prefill_advance")?,
            repack: k("repack")?,
            repack_fp8: k("repack_fp8")?,
            repack_int4: k("repack_int4")?,
            quantise_fp8: k("quantise_fp8")?,
            fill_random: k("fill_random")?,
            fill_codes: k("fill_codes")?,
            read_ceiling: k("read_ceiling")?,
        })
    }
}

/// How a 16-row tile of weights is stored (kernels/format.cuh).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tiles {
    Bf16,
    /// e4m3 with a scale for each 8 rows of a block of 32 columns.
    Fp8,
    /// e4m3 with a scale for each row.
    Fp8Rows,
    /// Four bits with a scale for each row of a block.
    Int4,
}

impl Tiles {
    pub fn of(format: Format) -> Result<Tiles> {
        match format {
            Format::Plain => Ok(Tiles::Bf16),
            Format::Fp8(Block { rows: 1, cols: None }) => Ok(Tiles::Fp8Rows),
            Format::Fp8(Block { rows, cols: Some(cols) }) if rows % 8 == 0 && cols % 32 == 0 => Ok(Tiles::Fp8),
            Format::Int4(Block { rows: 1, cols: Some(cols) }) if cols % 32 == 0 => Ok(Tiles::Int4),
            other => bail!(
                "{other}: the GPU backend has kernels for fp8 e4m3 in blocks of multiples of 8 x 32 or with a scale a row, and for int4 in groups \
                 of multiples of 32; use --device cpu"
            ),
        }
    }

    /// Columns of a unit (kernels/format.cuh), and its bytes in a tile, scales in it included.
    pub(super) fn unit(self) -> (usize, usize) {
        match self {
            Tiles::Bf16 => (32, 1024),
            Tiles::Fp8 | Tiles::Fp8Rows => (64, 1024),
            Tiles::Int4 => (64, 576),
        }
    }
}

/// A re-tiled matrix: for each part of K [n_tiles][units] of 16 rows (kernels/format.cuh), then the scales that are not
/// in them. With experts: the blocks of all of them, then their scales.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub parts: Vec<Part>,
    pub n_tiles: usize,
    /// Rows, gate and up together.
    pub(super) n: usize,
    pub(super) gate_up: bool,
    pub(super) tiles: Tiles,
    /// 1 for matrices that are no experts'.
    pub(super) n_experts: usize,
}

/// The columns of one input.
#[derive(Clone, Debug)]
pub struct Part {
    /// Device address.
    pub at: u64,
    /// That of the scales beside the blocks: f32, [n_tiles][units][2][2], or [n_tiles * 16] with a scale a row.
    pub(super) scales_at: u64,
    pub(super) column: usize,
    pub(super) k: usize,
}

impl Matrix {
    /// `dims` are the columns of each input.
    pub(super) fn new(n: usize, dims: &[usize], gate_up: bool, tiles: Tiles, n_experts: usize) -> Matrix {
        let n_tiles = if gate_up { (n / 2).div_ceil(8) } else { n.div_ceil(16) };
        let mut column = 0;
        let parts = dims
            .iter()
            .map(|&k| {
                column += k;
                Part { at: 0, scales_at: 0, column: column - k, k }
            })
            .collect();
        Matrix { parts, n_tiles, n, gate_up, tiles, n_experts }
    }

    pub(super) fn plain(n: usize, dims: &[usize]) -> Matrix {
        Matrix::new(n, dims, false, Tiles::Bf16, 1)
    }

    /// A tile of 16 rows.
    pub(super) fn tile_bytes(&self, part: &Part) -> usize {
        let (columns, bytes) = self.tiles.unit();
        part.k.div_ceil(columns) * bytes
    }

    /// Blocks of one expert.
    pub(super) fn part_bytes(&self, part: &Part) -> usize {
        self.n_tiles * self.tile_bytes(part)
    }

    /// Scales of one expert beside them, 4 bytes each.
    pub(super) fn part_scales(&self, part: &Part) -> usize {
        match self.tiles {
            Tiles::Bf16 | Tiles::Int4 => 0,
            Tiles::Fp8 => self.n_tiles * part.k.div_ceil(64) * 4,
            Tiles::Fp8Rows => self.n_tiles * 16,
        }
    }

    /// Gives every part its place behind `start`.
    pub(super) fn place(&mut self, start: u64) {
        let mut at = start;
        for i in 0..self.parts.len() {
            let (bytes, scales) =
                (self.n_experts * self.part_bytes(&self.parts[i]), self.n_experts * self.part_scales(&self.parts[i]));
            (self.parts[i].at, self.parts[i].scales_at) = (at, at + bytes as u64);
            at += (bytes + 4 * scales).next_multiple_of(256) as u64;
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let part = |p: &Part| (self.n_experts * (self.part_bytes(p) + 4 * self.part_scales(p))).next_multiple_of(256);
        self.parts.iter().map(part).sum()
    }

    /// For the kernels of experts; `dim` as in params.h.
    fn of_experts(&self, dim: usize) -> ExpertMatrix {
        let part = &self.parts[0];
        ExpertMatrix {
            weights: part.at,
            scales: part.scales_at,
            bytes: self.part_bytes(part) as u64,
            n_scales: self.part_scales(part) as i32,
            dim: dim as i32,
        }
    }
}

/// W_UK, transposed, and W_UV of the heads of a rank: kv_b as kernels/mla.cu reads it, bf16 whatever the checkpoint
/// has.
#[derive(Clone, Debug)]
pub struct Absorbed {
    pub(super) keys: Matrix,   // [n_heads * kv_rank, nope_dim]
    pub(super) values: Matrix, // [n_heads * v_dim, kv_rank]
    pub(super) n_heads: usize,
    pub(super) dims: Latent,
}

/// Bytes of one number of a buffer.
pub fn element_bytes(kind: BufferKind) -> usize {
    match kind {
        BufferKind::Logits | BufferKind::Stream | BufferKind::Routes => 4,
        BufferKind::Activation | BufferKind::Feature => 2,
    }
}

/// Where everything that a launch points at lives.
pub struct Arena {
    pub matrices: BTreeMap<WeightId, Matrix>,
    pub absorbed: BTreeMap<WeightId, Absorbed>,
    /// Norm weights and biases, bf16; biases of routers, f32.
    pub vectors: BTreeMap<WeightId, u64>,
    /// By buffer name.
    pub buffers: BTreeMap<&'static str, Memory>,
    /// Beside the buffers that are normalised: rows times norm weight, bf16, and sums of squares of each 16 columns,
    /// f32.
    pub normed: BTreeMap<&'static str, Memory>,
    pub squares: BTreeMap<&'static str, Memory>,
    /// norm_rows of prefill, beside the same buffers: 1/rms [PREFILL_ROWS] f32.
    pub inverse_rms: BTreeMap<&'static str, Memory>,
    pub cache: Cache,
    pub capacity: usize,
    pub drafter: Option<DraftArena>,
    pub draft_scratch: Memory,
    /// Of each 16 rows of a pass: sums of the router, [ROUTER_SPLITS, 16, n_experts] f32, and what experts_up makes of
    /// them.
    pub router_sums: Memory,
    pub expert_work: Memory,
    pub attention_partials: Memory,
    pub attention_counters: Memory,
    pub state: Memory,
    pub options: Memory,
    pub sample_scratch: Memory,
    pub sample_list: Memory,
    /// The head's maximum of each of its blocks, [MAX_WIDTH, head_blocks] f32 and their ids.
    pub max_value: Memory,
    pub max_id: Memory,
    pub counts: Memory,
    pub bias: Memory,
    pub history: Memory,
    pub ring: u64,
}

/// Keys [layer][kv head][capacity][head_dim], values [layer][kv head][head_dim][capacity], bf16, and the rotation of
/// their positions. A latent cache has keys only: [layer][capacity][kv_rank + rope_dim].
pub struct Cache {
    pub keys: Memory,
    pub values: Memory,
    pub inverse_frequencies: Memory,
    pub rope_factor: f32,
}

impl Cache {
    /// Bytes of keys and of values.
    pub fn bytes(kv: &KvLayout, capacity: usize) -> [usize; 2] {
        [kv.head_dim, kv.value_dim].map(|dim| 2 * kv.n_layers * kv.n_kv_heads * dim * capacity)
    }

    /// `rope_dim` numbers of a key are rotated.
    pub fn new(gpu: &Gpu, kv: &KvLayout, capacity: usize, rope: &Rope, rope_dim: usize) -> Result<Cache> {
        let [keys, values] = Cache::bytes(kv, capacity);
        Ok(Cache {
            keys: gpu.allocate(keys)?,
            values: gpu.allocate(values)?,
            inverse_frequencies: gpu.store(&rope.inverse_frequencies(rope_dim))?,
            rope_factor: rope.attention_factor(),
        })
    }
}

/// What a drafter has of its own.
pub struct DraftArena {
    pub cache: Cache,
    /// Tapped features, [FEATURE_ROWS, dim] bf16 by position.
    pub ring: Memory,
    pub rows: Memory,
    /// Draft id to target id, i32; None: the same ids.
    pub target_ids: Option<Memory>,
}

impl Arena {
    fn state(&self, offset: usize) -> u64 {
        self.state.at(offset)
    }

    fn buffer(&self, plan: &Plan, id: BufferId) -> u64 {
        self.buffers[plan.buffer(id).name].at(0)
    }
}

/// Columns (rows of the pass times heads of a group) that one attention block takes, in a grid of `chunks` blocks a KV
/// head. Narrow blocks are faster as long as there is room for all of them; in long contexts those that read the same
/// keys and values would wait for each other.
fn attention_columns(columns: usize, n_kv_heads: usize, chunks: usize) -> usize {
    const ROOM: usize = 1536;
    if columns <= 16 || chunks * n_kv_heads * columns.div_ceil(16) <= ROOM {
        16
    } else {
        32
    }
}

/// Floats of the partials, and counters, that a step of attention in a pass of `rows` over `chunks` chunks has.
pub fn attention_scratch(step: &Step, rows: usize, chunks: usize) -> [usize; 2] {
    match step {
        Step::Attention(a) => {
            let columns = (rows * a.n_heads / a.n_kv_heads).next_multiple_of(32);
            [a.n_kv_heads * chunks * columns * (a.head_dim + 2), a.n_kv_heads * MAX_WIDTH * a.n_heads]
        }
        Step::LatentAttend(a) => [chunks * rows * a.n_heads * (a.dims.kv_rank + 2), 0],
        _ => [0, 0],
    }
}

/// Who makes the normalised rows that the linear layers of a plan read.
pub struct Norms {
    /// By step: the norm weight that its output will be multiplied with.
    next: Vec<Option<WeightId>>,
    /// Inputs (step, input) whose rows nobody prepared: a kernel of its own does.
    apart: BTreeSet<(usize, usize)>,
}

impl Norms {
    /// Step `i` reads `input` as its number `j`.
    fn read(&mut self, i: usize, j: usize, input: &Input, writer: &BTreeMap<BufferId, usize>) {
        let Some(norm) = input.norm else { return };
        match writer.get(&input.x) {
            Some(&w) if self.next[w].is_none_or(|n| n == norm) => self.next[w] = Some(norm),
            _ => {
                self.apart.insert((i, j));
            }
        }
    }
}

/// The last writer of a buffer prepares it for the first norm that reads it. A buffer that is read through two
/// different norms, or written by something that cannot prepare, is normalised apart.
pub fn norms(plan: &Plan) -> Norms {
    let mut norms = Norms { next: vec![None; plan.steps.len()], apart: BTreeSet::new() };
    let mut writer: BTreeMap<BufferId, usize> = BTreeMap::new();
    for (i, step) in plan.steps.iter().enumerate() {
        for (j, input) in step.inputs().iter().enumerate() {
            norms.read(i, j, input, &writer);
        }
        let Some(out) = step.output() else { continue };
        if prepares(step) {
            writer.insert(out, i);
        } else {
            writer.remove(&out);
        }
    }
    norms
}

/// Whether a step can also write its output times a norm weight.
fn prepares(step: &Step) -> bool {
    match step {
        Step::Embed { .. } | Step::AllReduce { .. } => true,
        Step::Linear(Linear { epilogue, .. }) => {
            matches!(epilogue, Epilogue::Store { .. } | Epilogue::Residual { .. })
        }
        Step::ExpertsDown(Mixture { epilogue, .. }) => matches!(epilogue, Epilogue::Residual { .. }),
        _ => false,
    }
}

/// What a request asks of the sampling kernels. Each gives the same token as those below where it applies, in fewer
/// kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Choice {
    /// Temperature 0 and nothing that changes logits: the head's own maxima decide.
    Greedy,
    /// On one rank everything else; on several, what needs no cut of top-k or top-p.
    Sampled,
    /// Several ranks only: the exchanges that find a cut.
    Filtered,
}

/// Blocks of a skinny linear kernel: as many as stay on the GPU at once, fewer where there is less to do.
pub fn linear_blocks(groups: usize, n_sms: usize) -> usize {
    groups.min(2 * n_sms)
}

/// The runs of rows that kernels for up to `MAX_WIDTH` rows take: first row and number. Those behind the rows in use
/// find nothing to do.
fn slabs(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(MAX_WIDTH).map(move |first| (first, MAX_WIDTH.min(rows - first)))
}

/// Moves an address on by so many numbers; what is absent stays so.
fn skip(at: &mut u64, numbers: usize, bytes: usize) {
    if *at != 0 {
        *at += (numbers * bytes) as u64;
    }
}

/// A pass being launched: on the stream, or into a capture.
pub struct Launcher<'a> {
    pub gpu: &'a Gpu,
    pub kernels: &'a Kernels,
    pub arena: &'a Arena,
    pub plan: &'a Plan,
    pub norms: &'a Norms,
    /// To the other ranks, if there are any.
    pub link: Option<&'a Link>,
    /// Of a rank measured alone: how long a sum over ranks is on its way.
    pub comm_us: f64,
    /// The launch before was a collective whose successor must not start early.
    pub full_edge: Cell<bool>,
    /// KV chunks that the pass covers: its positions are below the end of the last.
    pub chunks: usize,
    pub choice: Choice,
    /// n-gram search at the end of a verify pass.
    pub ngram: bool,
    /// Drafter rows that a DraftPrefill leaves for the next extend.
    pub behind: usize,
}

impl Launcher<'_> {
    pub fn run(&self) -> Result<()> {
        self.run_without(None)
    }

    /// What comes before the steps: a drafter's pass finds its rows.
    pub fn begin(&self) -> Result<()> {
        if let Pass::Draft { .. } | Pass::DraftPrefill { .. } = self.plan.pass {
            let (state, draft) = (self.arena.state(0), self.draft(0)?);
            let params = DraftBeginParams { state, draft, max_rows: self.rows() as i32, behind: self.behind as i32 };
            self.launch(&self.kernels.draft_begin, (1, 1, 1), 32, 0, &params)?;
            self.features(false)?;
        }
        Ok(())
    }

    /// All steps but those of one kind: what their absence saves is their price.
    pub fn run_without(&self, kind: Option<&str>) -> Result<()> {
        let (arena, k) = (self.arena, self.kernels);
        self.begin()?;
        for (i, step) in self.plan.steps.iter().enumerate() {
            if kind.is_some_and(|k| step.kind() == k) {
                continue;
            }
            if let Step::Accept { .. } = step {
                self.features(true)?; // before the length moves on
            }
            self.step(i).with_context(|| format!("step {}", step.name()))?;
        }
        match self.plan.pass {
            Pass::Prefill { .. } => {
                self.features(true)?;
                let params = AdvanceParams { state: arena.state(0), ring: arena.ring };
                self.launch(&k.prefill_advance, (1, 1, 1), 32, 0, &params)
            }
            Pass::Verify { .. } if self.ngram => {
                let params = NgramParams {
                    state: arena.state(0),
                    options: arena.options.at(0),
                    scratch: arena.draft_scratch.at(0),
                    history: arena.history.at(0),
                    ring: arena.ring,
                    min_n: MIN_NGRAM as i32,
                    max_n: MAX_NGRAM as i32,
                    n_drafts: MAX_DRAFTS as i32,
                    pad: 0,
                };
                self.launch(&k.ngram_draft, (32, 1, 1), 256, 0, &params)
            }
            _ => Ok(()),
        }
    }

    /// Between the pass's feature buffer and the ring: a target pass stores its rows at their positions, a drafter's
    /// pass takes its own.
    fn features(&self, store: bool) -> Result<()> {
        let (Some(drafter), Some(buffer)) =
            (&self.arena.drafter, self.plan.buffers.iter().find(|b| b.kind == BufferKind::Feature))
        else {
            return Ok(());
        };
        let (ring, rows) = (drafter.ring.at(0), self.arena.buffers[buffer.name].at(0));
        let mask = FEATURE_ROWS as i32 - 1;
        let mut params = CopyParams {
            n_rows: self.n_rows(self.rows())?,
            rows: self.rows() as i32,
            dim: buffer.dim as i32,
            ..CopyParams::zeroed()
        };
        if store {
            (params.from, params.from_mask) = (rows, -1);
            (params.to, params.to_mask, params.to_start) = (ring, mask, self.arena.state(state_offset!(length)));
        } else {
            (params.from, params.from_mask, params.from_start) =
                (ring, mask, self.draft(std::mem::offset_of!(DraftRows, start))?);
            (params.to, params.to_mask) = (rows, -1);
        }
        self.launch(&self.kernels.copy_rows, (self.rows(), 1, 1), 128, 0, &params)
    }

    /// Address inside DraftRows.
    fn draft(&self, offset: usize) -> Result<u64> {
        Ok(self.arena.drafter.as_ref().context("no drafter is loaded")?.rows.at(offset))
    }

    /// Where the device keeps how many of `rows` captured rows are in use. The one-row steps of a draft pass have one.
    fn n_rows(&self, rows: usize) -> Result<u64> {
        match self.plan.pass {
            Pass::Prefill { .. } | Pass::Verify { .. } => Ok(self.arena.state(state_offset!(rows))),
            Pass::Draft { .. } | Pass::DraftPrefill { .. } if rows == self.rows() => {
                self.draft(std::mem::offset_of!(DraftRows, rows))
            }
            Pass::Draft { .. } | Pass::DraftPrefill { .. } => self.draft(std::mem::offset_of!(DraftRows, one)),
        }
    }

    /// Launches step number `i`; the order is that of `Step`.
    pub fn step(&self, i: usize) -> Result<()> {
        match &self.plan.steps[i] {
            Step::Embed { table, tokens, out, dim } => self.embed(i, *table, *tokens, *out, *dim),
            Step::Linear(linear) => self.linear(i, linear),
            Step::Attention(attention) => self.attention(attention),
            Step::Accept { logits, vocab, first_id } => self.accept(*logits, *vocab, *first_id),
            Step::Select { x, out, dim } => {
                let params = CopyParams {
                    from: self.arena.buffer(self.plan, *x),
                    to: self.arena.buffer(self.plan, *out),
                    from_start: self.draft(std::mem::offset_of!(DraftRows, last))?,
                    rows: 1,
                    dim: 2 * *dim as i32, // in bf16
                    from_mask: -1,
                    to_mask: -1,
                    ..CopyParams::zeroed()
                };
                self.launch(&self.kernels.copy_rows, (1, 1, 1), 128, 0, &params)
            }
            Step::DraftToken { logits, vocab, draft } => self.draft_token(*logits, *vocab, *draft),
            Step::AllReduce { partial, x, dim, bias, tap } => self.all_reduce(i, *partial, *x, *dim, *bias, *tap),
            Step::Norm { x, column, weight, out, dim } => self.norm(*x, *column, *weight, *out, *dim),
            Step::LatentQuery(a) | Step::LatentAttend(a) | Step::LatentValue(a) => self.latent(&self.plan.steps[i], a),
            Step::Router(router) => self.router(i, router),
            Step::ExpertsUp(mixture) => self.experts_up(i, mixture),
            Step::ExpertsDown(mixture) => self.experts_down(i, mixture),
        }
    }

    fn norm(&self, x: BufferId, column: usize, weight: WeightId, out: BufferId, dim: usize) -> Result<()> {
        let (plan, arena, rows) = (self.plan, self.arena, self.rows_of(out));
        let params = NormParams {
            x: arena.buffer(plan, x) + (column * element_bytes(plan.buffer(x).kind)) as u64,
            norm: arena.vectors[&weight],
            normed: arena.buffer(plan, out) + (column * element_bytes(plan.buffer(out).kind)) as u64,
            n_rows: self.n_rows(rows)?,
            rows: rows as i32,
            k: dim as i32,
            x_stride: plan.buffer(x).dim as i32,
            normed_stride: plan.buffer(out).dim as i32,
            eps: plan.norm_eps,
            ..NormParams::zeroed()
        };
        let kernel = match [x, out].map(|id| plan.buffer(id).kind == BufferKind::Stream) {
            [true, true] => &self.kernels.norm_step[0],
            [false, false] => &self.kernels.norm_step[1],
            [false, true] => &self.kernels.norm_step[2],
            [true, false] => bail!("no kernel takes a stream to bf16"),
        };
        self.launch(kernel, (rows.div_ceil(NORM_ROWS), 1, 1), 256, 0, &params)
    }

    fn rows(&self) -> usize {
        self.plan.rows()
    }

    fn launch<P: Params>(
        &self,
        kernel: &Kernel,
        grid: (usize, usize, usize),
        block: u32,
        shared: u32,
        params: &P,
    ) -> Result<()> {
        let grid = (grid.0 as u32, grid.1 as u32, grid.2 as u32);
        self.gpu.launch(kernel, Launch { grid, block, shared, early: !self.full_edge.take() }, params)
    }

    fn link(&self) -> Result<&Link> {
        self.link.context("a plan of several ranks without a link between them")
    }

    /// `words` a row from byte `at` of the sampling scratch become the maximum or the sum of all ranks' words, if a
    /// row's flag at `flags` is set.
    fn exchange(&self, step: &str, flags: usize, at: usize, words: usize, op: Exchange) -> Result<()> {
        let (link, scratch) = (self.link()?, &self.arena.sample_scratch);
        link.exchange_if((scratch.at(flags), self.rows()), step, scratch.at(at), self.rows() * words, op)?;
        self.full_edge.set(link.shared);
        Ok(())
    }

    fn all_reduce(
        &self,
        step: usize,
        partial: BufferId,
        x: BufferId,
        dim: usize,
        bias: Option<WeightId>,
        tap: Option<Tap>,
    ) -> Result<()> {
        let (plan, arena) = (self.plan, self.arena);
        let rows = self.rows_of(x);
        let (next_norm, normed, squares) = self.prepared(step, x);
        let mut sum = AllReduce {
            partial: arena.buffer(plan, partial),
            x: arena.buffer(plan, x),
            bias: bias.map_or(0, |id| arena.vectors[&id]),
            next_norm,
            normed,
            squares,
            n_rows: self.n_rows(rows)?,
            rows,
            dim,
            ..AllReduce::default()
        };
        if let Some(tap) = tap {
            sum.tap = arena.buffer(plan, tap.out) + 2 * tap.column as u64;
            sum.tap_stride = plan.buffer(tap.out).dim;
        }
        let Some(link) = self.link else {
            let params = AllReduceParams {
                comm: CommRanks { ranks: 1, ..CommRanks::zeroed() },
                partial: sum.partial,
                x: sum.x,
                bias: sum.bias,
                tap: sum.tap,
                next_norm,
                normed,
                squares,
                n_rows: sum.n_rows,
                rows: rows as i32,
                dim: dim as i32,
                tap_stride: sum.tap_stride as i32,
                wait_ns: (1e3 * self.comm_us) as i32,
            };
            let blocks = (rows * dim / 8).div_ceil(256).min(self.gpu.info().n_sms);
            return self.launch(&self.kernels.all_reduce_timed, (blocks, 1, 1), 256, 0, &params);
        };
        // In errors it is the layer whose sum is waited for.
        link.all_reduce_norm(&plan.steps[step - 1].name(), &sum)?;
        self.full_edge.set(link.shared);
        Ok(())
    }

    /// Passes of many rows have kernels of their own.
    fn prefills(&self) -> bool {
        self.rows() > MAX_WIDTH
    }

    fn rows_of(&self, id: BufferId) -> usize {
        self.plan.buffer(id).rows
    }

    /// For a step that writes `out`: next norm weight, normed and squares, or zeros.
    fn prepared(&self, step: usize, out: BufferId) -> (u64, u64, u64) {
        let name = self.plan.buffer(out).name;
        match self.norms.next[step] {
            Some(norm) if !self.prefills() => {
                (self.arena.vectors[&norm], self.arena.normed[name].at(0), self.arena.squares[name].at(0))
            }
            _ => (0, 0, 0),
        }
    }

    fn embed(&self, step: usize, table: WeightId, tokens: Tokens, out: BufferId, dim: usize) -> Result<()> {
        let (next_norm, normed, squares) = self.prepared(step, out);
        let (arena, rows) = (self.arena, self.rows_of(out));
        // Tokens come from the history, from the root and its drafts, or are one draft.
        let (tokens, start, offset) = match (tokens, self.plan.pass) {
            (Tokens::Pass, Pass::Prefill { .. }) => (arena.history.at(0), arena.state(state_offset!(length)), 0),
            (Tokens::Pass, _) => (0, 0, 0),
            (Tokens::Next, _) => (arena.history.at(0), self.draft(std::mem::offset_of!(DraftRows, start))?, 1),
            (Tokens::Draft(n), _) => (arena.state(state_offset!(drafts) + 4 * (n - 1)), 0, 0),
        };
        let params = EmbedParams {
            table: arena.matrices[&table].parts[0].at,
            x: arena.buffer(self.plan, out),
            next_norm,
            normed,
            squares,
            tokens,
            start,
            state: arena.state(0),
            n_rows: self.n_rows(rows)?,
            rows: rows as i32,
            hidden: dim as i32,
            x_stride: dim as i32,
            offset,
        };
        self.launch(&self.kernels.embed, (rows, 1, 1), 128, 0, &params)
    }

    fn linear(&self, step: usize, linear: &Linear) -> Result<()> {
        let (plan, arena) = (self.plan, self.arena);
        let out = linear.epilogue.out();
        let rows = self.rows_of(out);
        let n_rows = self.n_rows(rows)?;
        let matrix = &arena.matrices[&linear.weight];
        ensure!(
            linear.inputs.len() <= 2 && linear.inputs.len() == matrix.parts.len(),
            "{} inputs",
            linear.inputs.len()
        );
        let mut part = [LinearPart::zeroed(); 2];
        for (i, input) in linear.inputs.iter().enumerate() {
            let weights =
                LinearPart { weights: matrix.parts[i].at, scales: matrix.parts[i].scales_at, ..LinearPart::zeroed() };
            part[i] = self.input(step, i, input, rows, matrix.tiles, weights)?;
        }
        let mut params = LinearParams {
            part,
            bias: linear.bias.map_or(0, |id| arena.vectors[&id]),
            n_rows,
            row_scales: if matrix.tiles == Tiles::Fp8Rows { matrix.parts[0].scales_at } else { 0 },
            n_parts: linear.inputs.len() as i32,
            n: linear.n as i32,
            n_tiles: matrix.n_tiles as i32,
            rows: rows as i32,
            epilogue: EPILOGUE_STORE,
            ..LinearParams::zeroed()
        };
        match &linear.epilogue {
            Epilogue::Store { .. } | Epilogue::Partial { .. } => {}
            Epilogue::SiluMul { .. } => {
                params.epilogue = EPILOGUE_SILU;
                params.n = (linear.n / 2) as i32;
            }
            Epilogue::Residual { tap, .. } => {
                params.epilogue = EPILOGUE_RESIDUAL;
                if let Some(tap) = tap {
                    params.tap = arena.buffer(plan, tap.out) + 2 * tap.column as u64;
                    params.tap_stride = plan.buffer(tap.out).dim as i32;
                }
            }
            Epilogue::Logits { .. } => {
                params.epilogue = EPILOGUE_LOGITS;
                params.logits = arena.buffer(plan, out);
                params.max_value = arena.max_value.at(0);
                params.max_id = arena.max_id.at(0);
            }
        }
        if plan.buffer(out).kind == BufferKind::Stream {
            params.stream = arena.buffer(plan, out);
        } else {
            params.out = arena.buffer(plan, out);
        }
        params.out_stride = plan.buffer(out).dim as i32;
        (params.next_norm, params.normed, params.squares) = self.prepared(step, out);
        self.linear_rows(matrix, params)
    }

    /// The kernels of a linear layer, for any number of rows: what has none for many goes in slabs of `MAX_WIDTH`.
    fn linear_rows(&self, matrix: &Matrix, params: LinearParams) -> Result<()> {
        let (rows, two) = (params.rows as usize, params.n_parts == 2);
        if rows > MAX_WIDTH && matrix.tiles == Tiles::Bf16 {
            let variant = if two {
                &self.kernels.linear_prefill_two
            } else {
                &self.kernels.linear_prefill[(rows > 256) as usize]
            };
            let grid = (rows.div_ceil(variant.m), matrix.n_tiles.div_ceil(variant.n / 16), 1);
            return self.launch(&variant.kernel, grid, variant.threads, PREFILL_SHARED, &params);
        }
        for (first, n) in slabs(rows) {
            let is_variant = |v: &&LinearVariant| v.tiles == matrix.tiles && v.columns == n.div_ceil(8);
            let skinny = self.kernels.linear.iter().find(is_variant).context("no variant")?;
            let variant = if two { &self.kernels.linear_two } else { skinny };
            let mut slab = LinearParams { rows: n as i32, first_row: first as i32, ..params };
            for part in &mut slab.part {
                skip(&mut part.x, first * part.x_stride as usize, 2);
                skip(&mut part.squares, first * (part.x_stride as usize).div_ceil(16), 4);
            }
            skip(&mut slab.out, first * slab.out_stride as usize, 2);
            skip(&mut slab.stream, first * slab.out_stride as usize, 4);
            skip(&mut slab.logits, first * slab.out_stride as usize, 4);
            skip(&mut slab.tap, first * slab.tap_stride as usize, 2);
            self.launch(&variant.kernel, (self.blocks(matrix.n_tiles), 1, 1), LINEAR_THREADS, 0, &slab)?;
        }
        Ok(())
    }

    /// What a linear layer of `rows` reads, input number `i` of a step: with a norm, the rows that their writer or a
    /// kernel of its own has prepared.
    fn input(
        &self,
        step: usize,
        i: usize,
        input: &Input,
        rows: usize,
        tiles: Tiles,
        weights: LinearPart,
    ) -> Result<LinearPart> {
        let (unit_columns, _) = tiles.unit();
        let (plan, arena) = (self.plan, self.arena);
        let units = input.dim.div_ceil(unit_columns);
        let segment_units = units.div_ceil(SEGMENTS);
        let buffer = plan.buffer(input.x);
        let mut part = LinearPart {
            x: arena.buffer(plan, input.x),
            k: input.dim as i32,
            x_stride: buffer.dim as i32,
            segment_units: segment_units as u16,
            n_segments: units.div_ceil(segment_units) as u16,
            ..weights
        };
        let Some(norm) = input.norm else {
            ensure!(buffer.kind != BufferKind::Stream, "{} is read without a norm", buffer.name);
            return Ok(part);
        };
        part.eps = plan.eps(norm);
        let (normed, squares) = (arena.normed[buffer.name].at(0), arena.squares[buffer.name].at(0));
        if self.prefills() || self.norms.apart.contains(&(step, i)) {
            let params = NormParams {
                x: part.x,
                norm: arena.vectors[&norm],
                normed,
                inv: arena.inverse_rms[buffer.name].at(0),
                squares,
                n_rows: self.n_rows(rows)?,
                rows: rows as i32,
                k: part.k,
                x_stride: part.x_stride,
                normed_stride: part.k,
                eps: part.eps,
                pad: 0,
            };
            let kernel = &self.kernels.norm_rows[(buffer.kind != BufferKind::Stream) as usize];
            self.launch(kernel, (rows.div_ceil(NORM_ROWS), 1, 1), 256, 0, &params)?;
            (part.inv, part.x_stride) = (params.inv, part.k);
        }
        (part.x, part.squares) = (normed, squares);
        Ok(part)
    }

    /// Blocks of a skinny linear kernel over `n_tiles` tiles.
    fn blocks(&self, n_tiles: usize) -> usize {
        linear_blocks(n_tiles, self.gpu.info().n_sms)
    }

    fn attention(&self, a: &Attention) -> Result<()> {
        let (plan, arena) = (self.plan, self.arena);
        let rows = self.rows_of(a.out);
        let layer_bytes = 2 * a.n_kv_heads * arena.capacity * a.head_dim;
        let cache = self.cache(a.owner)?;
        let params = AttentionParams {
            qkv: arena.buffer(plan, a.qkv),
            out: arena.buffer(plan, a.out),
            k_cache: cache.keys.at(a.layer * layer_bytes),
            v_cache: cache.values.at(a.layer * layer_bytes),
            q_norm: a.q_norm.map_or(0, |id| arena.vectors[&id]),
            k_norm: a.k_norm.map_or(0, |id| arena.vectors[&id]),
            inv_freq: cache.inverse_frequencies.at(0),
            partials: arena.attention_partials.at(0),
            counters: arena.attention_counters.at(0),
            length: self.length(a.tokens)?,
            rows: self.n_rows(rows)?,
            n_heads: a.n_heads as i32,
            n_kv_heads: a.n_kv_heads as i32,
            capacity: arena.capacity as i32,
            max_rows: rows as i32,
            scale: 1.0 / (a.head_dim as f32).sqrt(),
            rope_factor: cache.rope_factor,
            norm_eps: plan.norm_eps,
            pad: 0,
        };
        let group = a.n_heads / a.n_kv_heads;
        let missing = || format!("no attention kernel for head_dim {}: expected 64 or 128", a.head_dim);
        if rows > MAX_WIDTH {
            let rope = self.kernels.attention_rope.iter().find(|k| k.0 == a.head_dim).with_context(missing)?;
            self.launch(&rope.1, (rows.div_ceil(32), a.n_heads + 2 * a.n_kv_heads, 1), 256, 0, &params)?;
            let attend = self.kernels.attention_prefill.iter().find(|k| k.0 == a.head_dim).with_context(missing)?;
            return self.launch(&attend.1, ((rows * group).div_ceil(64), a.n_kv_heads, 1), 128, 0, &params);
        }
        let columns = attention_columns(rows * group, a.n_kv_heads, self.chunks);
        let kernel =
            self.kernels.attention_decode.iter().find(|k| k.0 == a.head_dim && k.1 == columns).with_context(missing)?;
        self.launch(&kernel.2, (self.chunks, a.n_kv_heads, (rows * group).div_ceil(columns)), 256, 0, &params)
    }

    /// Where the device keeps the position of row 0.
    fn length(&self, tokens: Tokens) -> Result<u64> {
        match tokens {
            Tokens::Pass => Ok(self.arena.state(state_offset!(length))),
            Tokens::Next => self.draft(std::mem::offset_of!(DraftRows, start)),
            Tokens::Draft(n) => self.draft(std::mem::offset_of!(DraftRows, positions) + 4 * n),
        }
    }

    fn cache(&self, owner: Owner) -> Result<&Cache> {
        match owner {
            Owner::Target => Ok(&self.arena.cache),
            Owner::Drafter => Ok(&self.arena.drafter.as_ref().context("no drafter is loaded")?.cache),
        }
    }

    /// One of the three steps of latent attention. Slabs share the memory of partials: what one leaves is folded before
    /// the next attends.
    fn latent(&self, step: &Step, a: &LatentAttention) -> Result<()> {
        let (plan, arena, d) = (self.plan, self.arena, a.dims);
        let rows = self.rows_of(a.out);
        let cache = self.cache(a.owner)?;
        let absorbed = &arena.absorbed[&a.kv_b];
        let at = |id: BufferId, first: usize| arena.buffer(plan, id) + (2 * first * plan.buffer(id).dim) as u64;
        let kernels = self
            .kernels
            .latents
            .iter()
            .find(|k| k.dims == [d.kv_rank, d.rope_dim])
            .context("no kernels for these latents")?;
        for (first, n) in slabs(rows) {
            let params = LatentParams {
                latents: at(a.latents, first),
                q: at(a.q, first),
                absorbed: at(a.absorbed, first),
                attended: at(a.attended, first),
                out: at(a.out, first),
                cache: cache.keys.at(2 * a.layer * arena.capacity * d.row_dim()),
                w_uk: absorbed.keys.parts[0].at,
                w_uv: absorbed.values.parts[0].at,
                kv_norm: arena.vectors[&a.kv_norm],
                inv_freq: cache.inverse_frequencies.at(0),
                partials: arena.attention_partials.at(0),
                length: self.length(a.tokens)?,
                rows: self.n_rows(rows)?,
                q_rank: d.q_rank as i32,
                latents_stride: plan.buffer(a.latents).dim as i32,
                n_heads: a.n_heads as i32,
                kv_rank: d.kv_rank as i32,
                nope_dim: d.nope_dim as i32,
                rope_dim: d.rope_dim as i32,
                v_dim: d.v_dim as i32,
                max_rows: n as i32,
                scale: a.scale,
                rope_factor: cache.rope_factor,
                norm_eps: plan.eps(a.kv_norm),
                first_row: first as i32,
            };
            let attend =
                || self.launch(&kernels.attend, (self.chunks, (n * a.n_heads).div_ceil(16), 1), 256, 0, &params);
            match step {
                Step::LatentQuery(_) => {
                    let tasks = a.n_heads * d.kv_rank / 16 + n * (a.n_heads + 1);
                    let blocks = tasks.div_ceil(8).min(2 * self.gpu.info().n_sms);
                    self.launch(&self.kernels.latent_query, (blocks, 1, 1), 256, 0, &params)?;
                }
                Step::LatentAttend(_) if rows > MAX_WIDTH => {}
                Step::LatentAttend(_) => attend()?,
                _ => {
                    if rows > MAX_WIDTH {
                        attend()?;
                    }
                    self.launch(&kernels.value, (a.n_heads, n.div_ceil(VALUE_ROWS), 1), 256, 0, &params)?;
                }
            }
        }
        Ok(())
    }

    /// Sums of the router's weights, slab by slab; experts_up makes choices of them.
    fn router(&self, step: usize, router: &Router) -> Result<()> {
        let rows = self.rows_of(router.routes);
        let n_experts = router.routing.n_experts;
        let input = self.input(step, 0, &router.input, rows, Tiles::Bf16, LinearPart::zeroed())?;
        for (first, n) in slabs(rows) {
            let params = RouterParams {
                weights: self.arena.matrices[&router.weight].parts[0].at,
                x: input.x + (2 * first * input.x_stride as usize) as u64,
                sums: self.router_sums(first, n_experts),
                n_rows: self.n_rows(rows)?,
                k: input.k,
                x_stride: input.x_stride,
                n_experts: n_experts as i32,
                rows: n as i32,
                first_row: first as i32,
                pad: 0,
            };
            self.launch(
                &self.kernels.router[(n > 8) as usize],
                (n_experts.div_ceil(16), ROUTER_SPLITS, 1),
                512,
                0,
                &params,
            )?;
        }
        Ok(())
    }

    fn router_sums(&self, first: usize, n_experts: usize) -> u64 {
        self.arena.router_sums.at(4 * first * ROUTER_SPLITS * n_experts)
    }

    /// What experts_up chooses for the slab whose first row is `first`.
    fn expert_work(&self, first: usize) -> u64 {
        self.arena.expert_work.at(first / MAX_WIDTH * EXPERT_WORK_BYTES)
    }

    /// What both sides of a mixture have in common, with the matrices of the one that `up` names.
    fn experts(&self, m: &Mixture, up: bool) -> Result<(&ExpertKernels, ExpertParams)> {
        let matrices = &self.arena.matrices;
        let side = |of: WeightId, dim: usize| matrices[&of].of_experts(dim);
        let routed = if up { m.gate_up } else { m.down };
        let shared = m.shared.as_ref().map(|s| (if up { s.gate_up } else { s.down }, s.dim));
        let tiles = [Some(matrices[&routed].tiles), shared.map(|(id, _)| matrices[&id].tiles)];
        let fits =
            |k: &&ExpertKernels| k.tiles.iter().zip(tiles).all(|(k, tiles)| tiles.is_none_or(|tiles| tiles == *k));
        let params = ExpertParams {
            routed: side(routed, m.expert_dim),
            shared: shared.map_or(ExpertMatrix::zeroed(), |(id, dim)| side(id, dim)),
            route: RouteParams {
                n_rows: self.n_rows(self.rows_of(m.act))?,
                top_k: m.top_k as i32,
                ..RouteParams::zeroed()
            },
            n: m.n as i32,
            ..ExpertParams::zeroed()
        };
        Ok((self.kernels.experts.iter().find(fits).context("no kernels for experts stored like this")?, params))
    }

    fn experts_up(&self, step: usize, m: &Mixture) -> Result<()> {
        let (plan, arena) = (self.plan, self.arena);
        let rows = self.rows_of(m.act);
        let input = self.input(step, 0, &m.input, rows, Tiles::Bf16, LinearPart::zeroed())?;
        let (kernels, mut params) = self.experts(m, true)?;
        (params.k, params.x_stride, params.eps) = (input.k, input.x_stride, input.eps);
        params.act_stride = plan.buffer(m.act).dim as i32;
        let router = plan.steps[..step].iter().rev().find_map(|step| match step {
            Step::Router(router) => Some(router),
            _ => None,
        });
        let router = router.context("experts without a router")?;
        let routing = &router.routing;
        params.route.bias = router.bias.map_or(0, |id| arena.vectors[&id]);
        params.route.n_experts = routing.n_experts as i32;
        params.route.n_groups = routing.n_groups as i32;
        params.route.top_groups = routing.top_groups as i32;
        params.route.softmax = (routing.scoring == Scoring::Softmax) as i32;
        params.route.normalised = routing.normalised as i32;
        params.route.scale = routing.scale;
        for (first, n) in slabs(rows) {
            let groups = (n * m.top_k).min(m.n_experts) * m.expert_dim.div_ceil(8) + m.shared_dim().div_ceil(8);
            params.route.sums = self.router_sums(first, m.n_experts);
            params.route.work = self.expert_work(first);
            params.route.first_row = first as i32;
            params.x = input.x + (2 * first * input.x_stride as usize) as u64;
            params.squares = input.squares + (4 * first * (input.k as usize / 16)) as u64;
            params.act = arena.buffer(plan, m.act) + (2 * first * plan.buffer(m.act).dim) as u64;
            params.rows = n as i32;
            self.launch(&kernels.up[(n > 8) as usize], (self.blocks(groups), 1, 1), 512, 0, &params)?;
        }
        Ok(())
    }

    fn experts_down(&self, step: usize, m: &Mixture) -> Result<()> {
        let (plan, arena) = (self.plan, self.arena);
        let rows = self.rows_of(m.act);
        let (kernels, mut params) = self.experts(m, false)?;
        params.x = arena.buffer(plan, m.act);
        params.x_stride = plan.buffer(m.act).dim as i32;
        match m.epilogue {
            Epilogue::Residual { x, tap } => {
                params.stream = arena.buffer(plan, x);
                if let Some(tap) = tap {
                    params.tap = arena.buffer(plan, tap.out) + 2 * tap.column as u64;
                    params.tap_stride = plan.buffer(tap.out).dim as i32;
                }
                (params.next_norm, params.normed, params.squares_out) = self.prepared(step, x);
            }
            Epilogue::Partial { out } => params.partial = arena.buffer(plan, out),
            Epilogue::Store { .. } | Epilogue::SiluMul { .. } | Epilogue::Logits { .. } => {
                bail!("experts end in the residual stream")
            }
        }
        for (first, n) in slabs(rows) {
            let route = RouteParams { work: self.expert_work(first), first_row: first as i32, ..params.route };
            let mut slab = ExpertParams { route, rows: n as i32, ..params };
            skip(&mut slab.x, first * params.x_stride as usize, 2);
            skip(&mut slab.stream, first * m.n, 4);
            skip(&mut slab.partial, first * m.n, 2);
            skip(&mut slab.tap, first * params.tap_stride as usize, 2);
            let wide = n > 8;
            let blocks = if wide { m.n / 16 } else { m.n.div_ceil(32) };
            self.launch(&kernels.down[wide as usize], (blocks, 1, 1), 512, 0, &slab)?;
        }
        Ok(())
    }

    fn accept(&self, logits: BufferId, vocab: usize, first_id: usize) -> Result<()> {
        let (arena, columns) = (self.arena, self.plan.buffer(logits).dim);
        let head = &arena.matrices[&WeightId::new(Role::Head, None)];
        let params = SampleParams {
            logits: arena.buffer(self.plan, logits),
            state: arena.state(0),
            options: arena.options.at(0),
            scratch: arena.sample_scratch.at(0),
            list: arena.sample_list.at(0),
            counts: arena.counts.at(0),
            bias: arena.bias.at(0),
            history: arena.history.at(0),
            ring: arena.ring,
            max_value: arena.max_value.at(0),
            max_id: arena.max_id.at(0),
            vocab: columns as i32,
            stride: columns as i32,
            n_max: self.blocks(head.n_tiles) as i32,
            width: self.rows() as i32,
            first_id: first_id as i32,
            n_tokens: vocab as i32,
            ranks: self.plan.ranks.count as i32,
            round: SAMPLE_ROUNDS as i32,
        };
        let k = self.kernels;
        let (row, wide) = (
            (1, self.rows(), 1),
            (columns.div_ceil(SAMPLE_SLICE).max(2 * self.gpu.info().n_sms / self.rows()), self.rows(), 1),
        );
        if self.plan.ranks.count > 1 {
            self.choose_with_ranks(&params, wide)?;
        } else if self.choice != Choice::Greedy {
            for kernel in [&k.sample_adjust, &k.sample_count, &k.sample_choose] {
                self.launch(kernel, wide, 256, 0, &params)?;
            }
            self.launch(&k.sample_settle, row, 256, 0, &params)?;
        }
        self.launch(&k.sample_accept, (1, 1, 1), 256, 0, &params)
    }

    /// The chain of kernels/sample.cu for several ranks, up to the choice that all of them have.
    fn choose_with_ranks(&self, params: &SampleParams, wide: (usize, usize, usize)) -> Result<()> {
        let (k, row) = (self.kernels, (1, self.rows(), 1));
        // Without options that change logits the head's maxima are all there is to look at.
        let adjust = if self.choice == Choice::Greedy { row } else { wide };
        self.launch(&k.sample_adjust, adjust, 256, 0, params)?;
        self.exchange("the largest logit", SAMPLE_IN_USE_AT, SAMPLE_BEST_AT, 1, Exchange::Max)?;
        if self.choice == Choice::Greedy {
            return Ok(());
        }
        if self.choice == Choice::Filtered {
            self.launch(&k.sample_count, wide, 256, 0, params)?;
            self.exchange(
                "the bins of top-k and top-p",
                SAMPLE_IN_USE_AT,
                SAMPLE_BINS_AT,
                SAMPLE_BIN_WORDS,
                Exchange::Sum,
            )?;
        }
        self.launch(&k.sample_choose, wide, 256, 0, params)?;
        if self.choice == Choice::Filtered {
            for round in 0..SAMPLE_ROUNDS {
                self.launch(&k.sample_narrow, row, 256, 0, &SampleParams { round: round as i32, ..*params })?;
                self.exchange(
                    "the cuts of top-k and top-p",
                    SAMPLE_OPEN_AT,
                    SAMPLE_DIGITS_AT,
                    SAMPLE_DIGIT_WORDS,
                    Exchange::Sum,
                )?;
            }
            self.launch(&k.sample_settle, row, 256, 0, params)?;
        }
        self.exchange("the choice", SAMPLE_IN_USE_AT, SAMPLE_CHOSEN_AT, 1, Exchange::Max)
    }

    fn draft_token(&self, logits: BufferId, vocab: usize, draft: usize) -> Result<()> {
        let arena = self.arena;
        let drafter = arena.drafter.as_ref().context("no drafter is loaded")?;
        let Pass::Draft { drafts, .. } = self.plan.pass else { bail!("a draft outside a draft pass") };
        let head = &arena.matrices[&WeightId::new(Role::DraftHead, None)];
        let params = DraftParams {
            logits: arena.buffer(self.plan, logits),
            state: arena.state(0),
            options: arena.options.at(0),
            scratch: arena.draft_scratch.at(0),
            target_ids: drafter.target_ids.as_ref().map_or(0, |m| m.at(0)),
            max_value: arena.max_value.at(0),
            max_id: arena.max_id.at(0),
            vocab: vocab as i32,
            index: draft as i32 - 1,
            n_drafts: drafts as i32,
            n_max: self.blocks(head.n_tiles) as i32,
        };
        self.launch(&self.kernels.draft_choose, (vocab.div_ceil(256), 1, 1), 256, 0, &params)
    }
}
