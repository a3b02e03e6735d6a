//! The kernel table: which kernel a Step becomes, with which params and grid. The GPU twin of cpu/reference.rs.
//!
//! One Step is one launch in a verify pass: who writes a row that will be normalised also writes it times the norm weight and its sums of
//! squares (`norms` finds out for whom), so that a linear layer waits for nothing but its input. A prefill pass normalises in a kernel of
//! its own and rotates queries before attention; its bits are the same.
use super::comm::{AllReduce, Exchange, Link};
use super::device::{Gpu, Kernel, Launch, Memory, Params};
use super::params::*;
use crate::decode::draft_ngram::{MAX_NGRAM, MIN_NGRAM};
use crate::decode::MAX_DRAFTS;
use crate::model::config::Rope;
use crate::model::plan::{
    Attention, BufferId, BufferKind, Epilogue, Linear, Owner, Pass, Plan, Step, Tap, Tokens, FEATURE_ROWS, MAX_WIDTH,
};
use crate::model::weights::{Role, WeightId};
use crate::state_offset;
use anyhow::{bail, ensure, Context, Result};
use bytemuck::Zeroable;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

/// Every kernel, resolved at start.
pub struct Kernels {
    embed: Kernel,
    /// Of a stream, and of bf16 features.
    pub norm_rows: [Kernel; 2],
    norm_step: [Kernel; 2],
    linear: Vec<LinearVariant>,
    /// For up to 256 rows, and for more.
    linear_prefill: [PrefillVariant; 2],
    /// Two inputs: up to 16 rows, and more.
    linear_two: LinearVariant,
    linear_prefill_two: PrefillVariant,
    attention_decode: Vec<(usize, usize, Kernel)>, // head_dim, columns of a block
    attention_rope: Vec<(usize, Kernel)>,
    attention_prefill: Vec<(usize, Kernel)>,
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
    pub fill_random: Kernel,
    pub read_ceiling: Kernel,
}

/// A skinny linear kernel for 8 * columns rows of the pass.
struct LinearVariant {
    columns: usize,
    threads: u32,
    kernel: Kernel,
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
        let variant = |columns, threads, name| -> Result<LinearVariant> { Ok(LinearVariant { columns, threads, kernel: k(name)? }) };
        let prefill = |n, m, threads, name| -> Result<PrefillVariant> {
            Ok(PrefillVariant { n, m, threads, kernel: gpu.kernel(name, PREFILL_SHARED)? })
        };
        Ok(Kernels {
            embed: k("embed")?,
            norm_rows: [k("norm_rows")?, k("norm_rows_bf16")?],
            norm_step: [k("norm_step")?, k("norm_step_bf16")?],
            linear: vec![variant(1, 512, "linear_m8_t1_w16_a2")?, variant(2, 512, "linear_m16_t1_w16_a1")?],
            linear_prefill: [prefill(64, 64, 128, "linear_prefill_64x64")?, prefill(128, 128, 256, "linear_prefill_128x128")?],
            linear_two: variant(2, 512, "linear_two")?,
            linear_prefill_two: prefill(64, 64, 128, "linear_prefill_64x64_two")?,
            copy_rows: k("copy_rows")?,
            draft_begin: k("draft_begin")?,
            draft_choose: k("draft_choose")?,
            ngram_draft: k("ngram_draft")?,
            attention_decode: vec![
                (64, 16, k("attention_decode_64_16")?),
                (64, 32, k("attention_decode_64_32")?),
                (64, 64, k("attention_decode_64_64")?),
                (128, 16, k("attention_decode_128_16")?),
                (128, 32, k("attention_decode_128_32")?),
                (128, 64, k("attention_decode_128_64")?),
            ],
            attention_rope: vec![(64, k("attention_rope_64")?), (128, k("attention_rope_128")?)],
            attention_prefill: vec![(64, k("attention_prefill_64")?), (128, k("attention_prefill_128")?)],
            sample_adjust: k("sample_adjust")?,
            sample_count: k("sample_count")?,
            sample_choose: k("sample_choose")?,
            sample_narrow: k("sample_narrow")?,
            sample_settle: k("sample_settle")?,
            sample_accept: k("sample_accept")?,
            prefill_advance: k("prefill_advance")?,
            repack: k("repack")?,
            fill_random: k("fill_random")?,
            read_ceiling: k("read_ceiling")?,
        })
    }
}

/// A re-tiled matrix: [n_tiles][ceil(k / 32)][2][32] 16-byte words for each part of K.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub parts: Vec<Part>,
    pub n_tiles: usize,
    /// Rows, gate and up together.
    pub(super) n: usize,
    pub(super) gate_up: bool,
}

/// The columns of one input.
#[derive(Clone, Debug)]
pub struct Part {
    /// Device address.
    pub at: u64,
    pub(super) column: usize,
    pub(super) k: usize,
}

impl Matrix {
    /// `dims` are the columns of each input.
    pub(super) fn new(n: usize, dims: &[usize], gate_up: bool) -> Matrix {
        let n_tiles = if gate_up { (n / 2).div_ceil(8) } else { n.div_ceil(16) };
        let mut column = 0;
        let parts = dims
            .iter()
            .map(|&k| {
                column += k;
                Part { at: 0, column: column - k, k }
            })
            .collect();
        Matrix { parts, n_tiles, n, gate_up }
    }

    pub(super) fn part_bytes(&self, part: &Part) -> usize {
        self.n_tiles * Matrix::tile_bytes(part.k)
    }

    /// A tile of 16 rows.
    pub(super) fn tile_bytes(k: usize) -> usize {
        k.div_ceil(32) * 1024
    }

    pub(super) fn bytes(&self) -> usize {
        self.parts.iter().map(|p| self.part_bytes(p)).sum()
    }
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
    /// Norm weights and biases, bf16.
    pub vectors: BTreeMap<WeightId, u64>,
    /// By buffer name.
    pub buffers: BTreeMap<&'static str, Memory>,
    /// Beside the buffers that are normalised: rows times norm weight, bf16, and sums of squares of each 16 columns, f32.
    pub normed: BTreeMap<&'static str, Memory>,
    pub squares: BTreeMap<&'static str, Memory>,
    /// norm_rows of prefill, beside the same buffers: 1/rms [PREFILL_ROWS] f32.
    pub inverse_rms: BTreeMap<&'static str, Memory>,
    pub cache: Cache,
    pub capacity: usize,
    pub drafter: Option<DraftArena>,
    pub draft_scratch: Memory,
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

/// Keys [layer][kv head][capacity][head_dim], values [layer][kv head][head_dim][capacity], bf16, and the rotation of their positions.
pub struct Cache {
    pub keys: Memory,
    pub values: Memory,
    pub inverse_frequencies: Memory,
    pub rope_factor: f32,
}

impl Cache {
    pub fn new(gpu: &Gpu, bytes: usize, rope: &Rope, head_dim: usize) -> Result<Cache> {
        Ok(Cache {
            keys: gpu.allocate(bytes)?,
            values: gpu.allocate(bytes)?,
            inverse_frequencies: gpu.store(&rope.inverse_frequencies(head_dim))?,
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

/// Columns (rows of the pass times heads of a group) that one attention block takes, for a pass of `rows`.
fn attention_columns(rows: usize, group: usize) -> usize {
    match rows * group {
        0..=16 => 16,
        17..=32 => 32,
        _ => 64,
    }
}

/// Floats of the attention partials that a pass of `rows` over `chunks` chunks writes.
pub fn attention_partial_floats(rows: usize, n_heads: usize, n_kv_heads: usize, head_dim: usize, chunks: usize) -> usize {
    let columns = attention_columns(rows, n_heads / n_kv_heads);
    n_kv_heads * chunks * (rows * n_heads / n_kv_heads).div_ceil(columns) * columns * (head_dim + 2)
}

/// Who makes the normalised rows that the linear layers of a plan read.
pub struct Norms {
    /// By step: the norm weight that its output will be multiplied with.
    next: Vec<Option<WeightId>>,
    /// Inputs (step, input) whose rows nobody prepared: a kernel of its own does.
    apart: BTreeSet<(usize, usize)>,
}

/// The last writer of a buffer prepares it for the first norm that reads it. A buffer that is read through two different norms, or written
/// by something that cannot prepare, is normalised apart.
pub fn norms(plan: &Plan) -> Norms {
    let mut norms = Norms { next: vec![None; plan.steps.len()], apart: BTreeSet::new() };
    let mut writer: BTreeMap<BufferId, usize> = BTreeMap::new();
    for (i, step) in plan.steps.iter().enumerate() {
        match step {
            Step::Embed { out, .. } | Step::AllReduce { x: out, .. } => {
                writer.insert(*out, i);
            }
            Step::Linear(l) => {
                for (j, input) in l.inputs.iter().enumerate() {
                    let Some(norm) = input.norm else { continue };
                    match writer.get(&input.x) {
                        Some(&w) if norms.next[w].is_none_or(|n| n == norm) => norms.next[w] = Some(norm),
                        _ => {
                            norms.apart.insert((i, j));
                        }
                    }
                }
                match l.epilogue {
                    Epilogue::Store { out } | Epilogue::Residual { x: out, .. } => {
                        writer.insert(out, i);
                    }
                    Epilogue::SiluMul { .. } | Epilogue::Partial { .. } | Epilogue::Logits { .. } => {}
                }
            }
            Step::Norm { out, .. } | Step::Select { out, .. } => {
                writer.remove(out);
            }
            Step::Attention(_) | Step::Accept { .. } | Step::DraftToken { .. } => {}
            // Refused when the machine is made.
            Step::LatentQuery(_)
            | Step::LatentAttend(_)
            | Step::LatentValue(_)
            | Step::Router(_)
            | Step::ExpertsUp(_)
            | Step::ExpertsDown(_) => {}
        }
    }
    norms
}

/// What a request asks of the sampling kernels. Each gives the same token as those below where it applies, in fewer kernels.
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

/// A pass being launched: on the stream, or into a capture.
pub struct Launcher<'a> {
    pub gpu: &'a Gpu,
    pub kernels: &'a Kernels,
    pub arena: &'a Arena,
    pub plan: &'a Plan,
    pub norms: &'a Norms,
    /// To the other ranks, if there are any.
    pub link: Option<&'a Link>,
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

    /// Between the pass's feature buffer and the ring: a target pass stores its rows at their positions, a drafter's pass takes its own.
    fn features(&self, store: bool) -> Result<()> {
        let (Some(drafter), Some(buffer)) = (&self.arena.drafter, self.plan.buffers.iter().find(|b| b.kind == BufferKind::Feature)) else {
            return Ok(());
        };
        let (ring, rows) = (drafter.ring.at(0), self.arena.buffers[buffer.name].at(0));
        let mask = FEATURE_ROWS as i32 - 1;
        let mut params =
            CopyParams { n_rows: self.n_rows(self.rows())?, rows: self.rows() as i32, dim: buffer.dim as i32, ..CopyParams::zeroed() };
        if store {
            (params.from, params.from_mask) = (rows, -1);
            (params.to, params.to_mask, params.to_start) = (ring, mask, self.arena.state(state_offset!(length)));
        } else {
            (params.from, params.from_mask, params.from_start) = (ring, mask, self.draft(std::mem::offset_of!(DraftRows, start))?);
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
            Pass::Draft { .. } | Pass::DraftPrefill { .. } if rows == self.rows() => self.draft(std::mem::offset_of!(DraftRows, rows)),
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
            Step::LatentQuery(_)
            | Step::LatentAttend(_)
            | Step::LatentValue(_)
            | Step::Router(_)
            | Step::ExpertsUp(_)
            | Step::ExpertsDown(_) => {
                bail!("no kernel for it yet")
            }
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
        let kernel = &self.kernels.norm_step[(plan.buffer(x).kind != BufferKind::Stream) as usize];
        self.launch(kernel, (rows.div_ceil(NORM_ROWS), 1, 1), 256, 0, &params)
    }

    fn rows(&self) -> usize {
        self.plan.rows()
    }

    fn launch<P: Params>(&self, kernel: &Kernel, grid: (usize, usize, usize), block: u32, shared: u32, params: &P) -> Result<()> {
        let grid = (grid.0 as u32, grid.1 as u32, grid.2 as u32);
        self.gpu.launch(kernel, Launch { grid, block, shared, early: !self.full_edge.take() }, params)
    }

    fn link(&self) -> Result<&Link> {
        self.link.context("a plan of several ranks without a link between them")
    }

    /// `words` a row from byte `at` of the sampling scratch become the maximum or the sum of all ranks' words, if a row's flag at `flags` is set.
    fn exchange(&self, step: &str, flags: usize, at: usize, words: usize, op: Exchange) -> Result<()> {
        let (link, scratch) = (self.link()?, &self.arena.sample_scratch);
        link.exchange_if((scratch.at(flags), self.rows()), step, scratch.at(at), self.rows() * words, op)?;
        self.full_edge.set(link.shared);
        Ok(())
    }

    fn all_reduce(&self, step: usize, partial: BufferId, x: BufferId, dim: usize, bias: Option<WeightId>, tap: Option<Tap>) -> Result<()> {
        let (plan, arena, link) = (self.plan, self.arena, self.link()?);
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
            Some(norm) if !self.prefills() => (self.arena.vectors[&norm], self.arena.normed[name].at(0), self.arena.squares[name].at(0)),
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
        let (Epilogue::Store { out }
        | Epilogue::SiluMul { out }
        | Epilogue::Residual { x: out, .. }
        | Epilogue::Partial { out }
        | Epilogue::Logits { out }) = linear.epilogue;
        let rows = self.rows_of(out);
        let n_rows = self.n_rows(rows)?;
        let matrix = &arena.matrices[&linear.weight];
        ensure!(linear.inputs.len() <= 2 && linear.inputs.len() == matrix.parts.len(), "{} inputs", linear.inputs.len());
        let mut part = [LinearPart::zeroed(); 2];
        for (i, input) in linear.inputs.iter().enumerate() {
            let k_blocks = input.dim.div_ceil(32);
            let segment_blocks = k_blocks.div_ceil(32);
            let buffer = plan.buffer(input.x);
            part[i] = LinearPart {
                weights: matrix.parts[i].at,
                scales: 0,
                x: arena.buffer(plan, input.x),
                squares: 0,
                inv: 0,
                k: input.dim as i32,
                x_stride: buffer.dim as i32,
                segment_blocks: segment_blocks as u16,
                n_segments: k_blocks.div_ceil(segment_blocks) as u16,
                eps: plan.norm_eps,
            };
            let Some(norm) = input.norm else {
                ensure!(buffer.kind != BufferKind::Stream, "{} is read without a norm", buffer.name);
                continue;
            };
            let (normed, squares) = (arena.normed[buffer.name].at(0), arena.squares[buffer.name].at(0));
            if self.prefills() || self.norms.apart.contains(&(step, i)) {
                let params = NormParams {
                    x: part[i].x,
                    norm: arena.vectors[&norm],
                    normed,
                    inv: arena.inverse_rms[buffer.name].at(0),
                    squares,
                    n_rows,
                    rows: rows as i32,
                    k: input.dim as i32,
                    x_stride: part[i].x_stride,
                    normed_stride: input.dim as i32,
                    eps: plan.norm_eps,
                    pad: 0,
                };
                let kernel = &self.kernels.norm_rows[(buffer.kind != BufferKind::Stream) as usize];
                self.launch(kernel, (rows.div_ceil(NORM_ROWS), 1, 1), 256, 0, &params)?;
                part[i].inv = params.inv;
            }
            part[i].x = normed;
            part[i].x_stride = input.dim as i32;
            part[i].squares = squares;
        }
        let mut params = LinearParams {
            part,
            bias: linear.bias.map_or(0, |id| arena.vectors[&id]),
            n_rows,
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
        let two = linear.inputs.len() == 2;
        if rows > MAX_WIDTH {
            let variant = if two { &self.kernels.linear_prefill_two } else { &self.kernels.linear_prefill[(rows > 256) as usize] };
            let grid = (rows.div_ceil(variant.m), matrix.n_tiles.div_ceil(variant.n / 16), 1);
            return self.launch(&variant.kernel, grid, variant.threads, PREFILL_SHARED, &params);
        }
        let skinny = self.kernels.linear.iter().find(|v| v.columns == rows.div_ceil(8)).context("no variant")?;
        let variant = if two { &self.kernels.linear_two } else { skinny };
        self.launch(&variant.kernel, (self.blocks(matrix.n_tiles), 1, 1), variant.threads, 0, &params)
    }

    /// Blocks of a skinny linear kernel over `n_tiles` tiles.
    fn blocks(&self, n_tiles: usize) -> usize {
        linear_blocks(n_tiles, self.gpu.info().n_sms)
    }

    fn attention(&self, a: &Attention) -> Result<()> {
        let (plan, arena) = (self.plan, self.arena);
        let rows = self.rows_of(a.out);
        let layer_bytes = 2 * a.n_kv_heads * arena.capacity * a.head_dim;
        let cache = match a.owner {
            Owner::Target => &arena.cache,
            Owner::Drafter => &arena.drafter.as_ref().context("no drafter is loaded")?.cache,
        };
        let length = match a.tokens {
            Tokens::Pass => arena.state(state_offset!(length)),
            Tokens::Next => self.draft(std::mem::offset_of!(DraftRows, start))?,
            Tokens::Draft(n) => self.draft(std::mem::offset_of!(DraftRows, positions) + 4 * n)?,
        };
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
            length,
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
        let columns = attention_columns(rows, group);
        let kernel = self.kernels.attention_decode.iter().find(|k| k.0 == a.head_dim && k.1 == columns).with_context(missing)?;
        self.launch(&kernel.2, (self.chunks, a.n_kv_heads, (rows * group).div_ceil(columns)), 256, 0, &params)
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
        let (row, wide) =
            ((1, self.rows(), 1), (columns.div_ceil(SAMPLE_SLICE).max(2 * self.gpu.info().n_sms / self.rows()), self.rows(), 1));
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
            self.exchange("the bins of top-k and top-p", SAMPLE_IN_USE_AT, SAMPLE_BINS_AT, SAMPLE_BIN_WORDS, Exchange::Sum)?;
        }
        self.launch(&k.sample_choose, wide, 256, 0, params)?;
        if self.choice == Choice::Filtered {
            for round in 0..SAMPLE_ROUNDS {
                self.launch(&k.sample_narrow, row, 256, 0, &SampleParams { round: round as i32, ..*params })?;
                self.exchange("the cuts of top-k and top-p", SAMPLE_OPEN_AT, SAMPLE_DIGITS_AT, SAMPLE_DIGIT_WORDS, Exchange::Sum)?;
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
            stride: self.plan.buffer(logits).dim as i32,
            row: 0,
            index: draft as i32 - 1,
            n_drafts: drafts as i32,
            n_max: self.blocks(head.n_tiles) as i32,
        };
        self.launch(&self.kernels.draft_choose, (vocab.div_ceil(256), 1, 1), 256, 0, &params)
    }
}
