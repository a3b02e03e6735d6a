//! The kernel table: which kernel a Step becomes, with which params and grid. The GPU twin of cpu/reference.rs.
//!
//! One Step is one launch in a verify pass. A prefill pass normalises in a kernel of its own and rotates queries before attention, so a
//! Step may be two launches there; its bits are the same.
use super::device::{Gpu, Kernel, Launch, Memory, Params};
use super::params::*;
use super::weights::Matrix;
use crate::model::config::Rope;
use crate::model::plan::{Attention, BufferId, Epilogue, Linear, Pass, Plan, Step, MAX_WIDTH};
use crate::model::weights::WeightId;
use crate::state_offset;
use anyhow::{bail, ensure, Context, Result};
use std::collections::BTreeMap;

/// Every kernel, resolved at start.
pub struct Kernels {
    embed: Kernel,
    norm_rows: Kernel,
    linear: Vec<LinearVariant>,
    linear_prefill: Kernel,
    attention_decode: Vec<(usize, usize, Kernel)>, // head_dim, columns of a block
    attention_rope: Vec<(usize, Kernel)>,
    attention_prefill: Vec<(usize, Kernel)>,
    sample_adjust: Kernel,
    sample_cut: Kernel,
    sample_choose: Kernel,
    prefill_advance: Kernel,
    pub repack: Kernel,
    pub fill_random: Kernel,
    pub read_ceiling: Kernel,
}

/// A skinny linear kernel: 8 * columns rows of the pass, `tiles` 16-row tiles of weights a block.
struct LinearVariant {
    columns: usize,
    tiles: usize,
    threads: u32,
    plain: Kernel,
    norm: Kernel,
}

/// Tile of linear_prefill: weight rows, tokens, threads.
const PREFILL_TILE: (usize, usize, u32) = (64, 64, 128);
/// prefill_shared_bytes of that tile.
const PREFILL_SHARED: u32 = (4 * (64 / 16 * 64 + 64 * 4) * 16) as u32;

impl Kernels {
    pub fn load(gpu: &Gpu) -> Result<Kernels> {
        let k = |name| gpu.kernel(name, 0);
        let variant = |columns, tiles, threads, plain, norm| -> Result<LinearVariant> {
            Ok(LinearVariant { columns, tiles, threads, plain: k(plain)?, norm: k(norm)? })
        };
        Ok(Kernels {
            embed: k("embed")?,
            norm_rows: k("norm_rows")?,
            linear: vec![
                variant(1, 1, 512, "linear_m8_t1_w16", "linear_m8_t1_w16_norm")?,
                variant(1, 2, 512, "linear_m8_t2_w16", "linear_m8_t2_w16_norm")?,
                variant(2, 1, 512, "linear_m16_t1_w16", "linear_m16_t1_w16_norm")?,
            ],
            linear_prefill: gpu.kernel("linear_prefill_64x64", PREFILL_SHARED)?,
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
            sample_cut: k("sample_cut")?,
            sample_choose: k("sample_choose")?,
            prefill_advance: k("prefill_advance")?,
            repack: k("repack")?,
            fill_random: k("fill_random")?,
            read_ceiling: k("read_ceiling")?,
        })
    }
}

/// Where everything that a launch points at lives.
pub struct Arena {
    pub matrices: BTreeMap<WeightId, Matrix>,
    /// Norm weights and biases, bf16.
    pub vectors: BTreeMap<WeightId, u64>,
    /// By buffer name.
    pub buffers: BTreeMap<&'static str, Memory>,
    /// norm_rows: normalised rows [PREFILL_ROWS, widest dim] bf16 and 1/rms [PREFILL_ROWS] f32.
    pub normed: Memory,
    pub inverse_rms: Memory,
    /// Keys [layer][kv head][capacity][head_dim], values [layer][kv head][head_dim][capacity], bf16.
    pub keys: Memory,
    pub values: Memory,
    pub capacity: usize,
    pub inverse_frequencies: Memory,
    pub rope_factor: f32,
    pub attention_partials: Memory,
    pub attention_counters: Memory,
    pub state: Memory,
    pub options: Memory,
    pub sample_scratch: Memory,
    pub sample_list: Memory,
    pub counts: Memory,
    pub bias: Memory,
    pub history: Memory,
    pub ring: u64,
}

impl Arena {
    pub fn rotary(rope: &Rope, head_dim: usize, gpu: &Gpu) -> Result<(Memory, f32)> {
        Ok((gpu.store(&rope.inverse_frequencies(head_dim))?, rope.attention_factor()))
    }

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

/// A pass being launched: on the stream, or into a capture.
pub struct Launcher<'a> {
    pub gpu: &'a Gpu,
    pub kernels: &'a Kernels,
    pub arena: &'a Arena,
    pub plan: &'a Plan,
    /// KV chunks that the pass covers: its positions are below the end of the last.
    pub chunks: usize,
}

impl Launcher<'_> {
    pub fn run(&self) -> Result<()> {
        self.plan.steps.iter().try_for_each(|step| self.step(step).with_context(|| format!("step {}", step.name())))?;
        if let Pass::Prefill { .. } = self.plan.pass {
            let params = AdvanceParams { state: self.arena.state(0), ring: self.arena.ring };
            self.launch(&self.kernels.prefill_advance, (1, 1, 1), 32, 0, &params)?;
        }
        Ok(())
    }

    /// Launches one step; the listing order is that of `Step`.
    pub fn step(&self, step: &Step) -> Result<()> {
        match step {
            Step::Embed { table, out, dim, .. } => self.embed(*table, *out, *dim),
            Step::Linear(linear) => self.linear(linear),
            Step::Attention(attention) => self.attention(attention),
            Step::Accept { logits, vocab } => self.accept(*logits, *vocab),
            Step::AllReduce { .. } | Step::Norm { .. } | Step::Select { .. } | Step::DraftToken { .. } => {
                bail!("no kernel for it yet")
            }
        }
    }

    fn rows(&self) -> usize {
        self.plan.rows()
    }

    fn launch<P: Params>(&self, kernel: &Kernel, grid: (usize, usize, usize), block: u32, shared: u32, params: &P) -> Result<()> {
        let grid = (grid.0 as u32, grid.1 as u32, grid.2 as u32);
        self.gpu.launch(kernel, Launch { grid, block, shared, early: true }, params)
    }

    fn embed(&self, table: WeightId, out: BufferId, dim: usize) -> Result<()> {
        let prefill = matches!(self.plan.pass, Pass::Prefill { .. });
        let params = EmbedParams {
            table: self.arena.matrices[&table].parts[0].at,
            x: self.arena.buffer(self.plan, out),
            tokens: if prefill { self.arena.history.at(0) } else { 0 },
            start: self.arena.state(state_offset!(length)),
            state: self.arena.state(0),
            n_rows: self.arena.state(state_offset!(rows)),
            rows: self.rows() as i32,
            hidden: dim as i32,
            x_stride: dim as i32,
            offset: 0,
        };
        self.launch(&self.kernels.embed, (self.rows(), 1, 1), 128, 0, &params)
    }

    fn linear(&self, linear: &Linear) -> Result<()> {
        let (plan, arena) = (self.plan, self.arena);
        let rows = self.rows();
        let prefill = rows > MAX_WIDTH;
        let matrix = &arena.matrices[&linear.weight];
        ensure!(linear.inputs.len() <= 2 && linear.inputs.len() == matrix.parts.len(), "{} inputs", linear.inputs.len());
        let mut part = [LinearPart { weights: 0, x: 0, norm: 0, inv: 0, k: 0, x_stride: 0, segment_blocks: 0, eps: 0.0 }; 2];
        for (i, input) in linear.inputs.iter().enumerate() {
            let x = arena.buffer(plan, input.x) + 2 * input.column as u64;
            let x_stride = plan.buffer(input.x).dim as i32;
            part[i] = LinearPart {
                weights: matrix.parts[i].at,
                x,
                norm: input.norm.map_or(0, |id| arena.vectors[&id]),
                inv: 0,
                k: input.dim as i32,
                x_stride,
                segment_blocks: input.dim.div_ceil(32).div_ceil(32) as i32,
                eps: plan.norm_eps,
            };
            if prefill && input.norm.is_some() {
                ensure!(linear.inputs.len() == 1, "two inputs with norms in a prefill pass");
                let params = NormParams {
                    x,
                    norm: part[i].norm,
                    out: arena.normed.at(0),
                    inv: arena.inverse_rms.at(0),
                    n_rows: arena.state(state_offset!(rows)),
                    rows: rows as i32,
                    k: input.dim as i32,
                    x_stride,
                    out_stride: input.dim as i32,
                    segment_blocks: part[i].segment_blocks,
                    eps: plan.norm_eps,
                };
                self.launch(&self.kernels.norm_rows, (rows.div_ceil(2), 1, 1), 256, 0, &params)?;
                part[i].x = params.out;
                part[i].inv = params.inv;
                part[i].x_stride = params.out_stride;
            }
        }
        let mut params = LinearParams {
            part,
            out: 0,
            bias: linear.bias.map_or(0, |id| arena.vectors[&id]),
            residual: 0,
            tap: 0,
            logits: 0,
            max_value: 0,
            max_id: 0,
            n_rows: arena.state(state_offset!(rows)),
            n_parts: linear.inputs.len() as i32,
            n: linear.n as i32,
            n_tiles: matrix.n_tiles as i32,
            rows: rows as i32,
            epilogue: EPILOGUE_STORE,
            out_stride: 0,
            tap_stride: 0,
            last_row: 0,
        };
        let out = match &linear.epilogue {
            Epilogue::Store { out } | Epilogue::Partial { out } => *out,
            Epilogue::SiluMul { out } => {
                params.epilogue = EPILOGUE_SILU;
                params.n = (linear.n / 2) as i32;
                *out
            }
            Epilogue::Residual { x, tap } => {
                params.epilogue = EPILOGUE_RESIDUAL;
                params.residual = arena.buffer(plan, *x);
                if let Some(tap) = tap {
                    params.tap = arena.buffer(plan, tap.out) + 2 * tap.column as u64;
                    params.tap_stride = plan.buffer(tap.out).dim as i32;
                }
                *x
            }
            Epilogue::Logits { out } => {
                params.epilogue = EPILOGUE_LOGITS;
                params.logits = arena.buffer(plan, *out);
                *out
            }
        };
        params.out = arena.buffer(plan, out);
        params.out_stride = plan.buffer(out).dim as i32;
        if prefill {
            let (n, m, threads) = PREFILL_TILE;
            let grid = (rows.div_ceil(m), matrix.n_tiles.div_ceil(n / 16), 1);
            return self.launch(&self.kernels.linear_prefill, grid, threads, PREFILL_SHARED, &params);
        }
        // Two tiles a block where there are enough of them to fill the GPU.
        let columns = rows.div_ceil(8);
        let tiles = if columns == 1 && matrix.n_tiles >= 8 * self.gpu.info().n_sms { 2 } else { 1 };
        let variant = self.kernels.linear.iter().find(|v| v.columns == columns && v.tiles == tiles).context("no variant")?;
        let groups = matrix.n_tiles.div_ceil(tiles);
        let kernel = if linear.inputs.iter().any(|i| i.norm.is_some()) { &variant.norm } else { &variant.plain };
        self.launch(kernel, (groups.min(2 * self.gpu.info().n_sms), 1, 1), variant.threads, 0, &params)
    }

    fn attention(&self, a: &Attention) -> Result<()> {
        let (plan, arena) = (self.plan, self.arena);
        let rows = self.rows();
        let layer_bytes = 2 * a.n_kv_heads * arena.capacity * a.head_dim;
        let params = AttentionParams {
            qkv: arena.buffer(plan, a.qkv),
            out: arena.buffer(plan, a.out),
            k_cache: arena.keys.at(a.layer * layer_bytes),
            v_cache: arena.values.at(a.layer * layer_bytes),
            q_norm: a.q_norm.map_or(0, |id| arena.vectors[&id]),
            k_norm: a.k_norm.map_or(0, |id| arena.vectors[&id]),
            inv_freq: arena.inverse_frequencies.at(0),
            partials: arena.attention_partials.at(0),
            counters: arena.attention_counters.at(0),
            length: arena.state(state_offset!(length)),
            rows: arena.state(state_offset!(rows)),
            n_heads: a.n_heads as i32,
            n_kv_heads: a.n_kv_heads as i32,
            capacity: arena.capacity as i32,
            max_rows: rows as i32,
            scale: 1.0 / (a.head_dim as f32).sqrt(),
            rope_factor: arena.rope_factor,
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

    fn accept(&self, logits: BufferId, vocab: usize) -> Result<()> {
        let arena = self.arena;
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
            vocab: vocab as i32,
            stride: self.plan.buffer(logits).dim as i32,
            prefill: 0,
            pad: 0,
        };
        let grid = (vocab.div_ceil(SAMPLE_SLICE), self.rows(), 1);
        for kernel in [&self.kernels.sample_adjust, &self.kernels.sample_cut, &self.kernels.sample_choose] {
            self.launch(kernel, grid, 256, 0, &params)?;
        }
        Ok(())
    }
}
