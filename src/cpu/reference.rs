//! The f32 arm of every Step, weights read in place from the checkpoint: the oracle for the kernels, and the backend of machines
//! without a GPU.
//!
//! It follows "Where bits come from" (ARCHITECTURE.md): a linear layer sums inside fixed segments of K and then over segments, attention
//! finishes fixed chunks of positions and folds them in ascending order. A row's bits therefore depend on its own token, its position and
//! the weights, never on how many rows share the pass. The inner products are in dot.rs.
use super::dot::{self, Numbers};
use crate::decode::{Backend, Counters, Limits, Record, Sampling, Sequence};
use crate::model::config::Config;
use crate::model::plan::{self, Attention, BufferId, Epilogue, Input, Linear, Pass, Plan, Ranks, Step, Storage, MAX_WIDTH};
use crate::model::weights::{Weight, WeightId, Weights};
use anyhow::{bail, Context, Result};
use rayon::prelude::*;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

/// Rows of one prefill call: enough that a weight row is read once for many tokens, small enough to stop on Ctrl-C.
const PREFILL_ROWS: usize = 64;

/// What the CPU stores: weights as the checkpoint has them (two bytes for bf16), f32 keys and values.
pub const STORAGE: Storage = Storage { weight: 2, kv: 4 };

pub struct Reference {
    config: Config,
    context: usize,
    weights: Weights,
    /// Norm weights and biases as f32.
    vectors: BTreeMap<WeightId, Vec<f32>>,
    plans: BTreeMap<Pass, Rc<Plan>>,
    taps: Vec<usize>,
    /// Activations by buffer name, [rows, dim] of the widest plan so far.
    buffers: BTreeMap<&'static str, Vec<f32>>,
    cache: Cache,
    inverse_frequencies: Vec<f32>,
    sequence: Option<Sequence>,
    records: VecDeque<Record>,
}

/// Keys and values, [layer][kv head][position][head_dim] each.
struct Cache {
    keys: Vec<f32>,
    values: Vec<f32>,
    n_kv_heads: usize,
    capacity: usize,
    head_dim: usize,
}

impl Cache {
    /// Start of one head's rows.
    fn at(&self, layer: usize, head: usize) -> usize {
        (layer * self.n_kv_heads + head) * self.capacity * self.head_dim
    }
}

impl Reference {
    /// `context` is the most tokens of prompt and output; `taps` are the layer entries whose hidden state is kept for a drafter.
    pub fn new(config: Config, weights: Weights, context: usize, taps: &[usize]) -> Result<Reference> {
        let plan = plan::target(&config, Pass::Prefill { rows: PREFILL_ROWS }, Ranks::ONE, taps)?;
        let capacity = context + 2 * MAX_WIDTH;
        let numbers = plan.kv.n_layers * plan.kv.n_kv_heads * capacity * plan.kv.head_dim;
        let cache = Cache {
            keys: vec![0.0; numbers],
            values: vec![0.0; numbers],
            n_kv_heads: plan.kv.n_kv_heads,
            capacity,
            head_dim: plan.kv.head_dim,
        };
        let vectors = weights
            .iter()
            .filter(|(_, w)| w.cols == 1)
            .map(|(&id, w)| Ok((id, floats(w)?)))
            .collect::<Result<BTreeMap<_, _>>>()?;
        let inverse_frequencies = config.rope.inverse_frequencies(config.head_dim);
        let mut reference = Reference {
            config,
            context,
            weights,
            vectors,
            plans: BTreeMap::new(),
            taps: taps.to_vec(),
            buffers: BTreeMap::new(),
            cache,
            inverse_frequencies,
            sequence: None,
            records: VecDeque::new(),
        };
        reference.add_plan(plan);
        Ok(reference)
    }

    fn add_plan(&mut self, plan: Plan) -> Rc<Plan> {
        for b in &plan.buffers {
            let buffer = self.buffers.entry(b.name).or_default();
            if buffer.len() < b.rows * b.dim {
                buffer.resize(b.rows * b.dim, 0.0);
            }
        }
        let plan = Rc::new(plan);
        self.plans.insert(plan.pass, plan.clone());
        plan
    }

    fn plan(&mut self, pass: Pass) -> Result<Rc<Plan>> {
        match self.plans.get(&pass) {
            Some(plan) => Ok(plan.clone()),
            None => {
                let plan = plan::target(&self.config, pass, Ranks::ONE, &self.taps)?;
                Ok(self.add_plan(plan))
            }
        }
    }

    /// Runs every step of a pass but `Accept` over `tokens` at positions `position ..`, and shows each step's output to `observe`:
    /// the step, its output [rows, dim] and dim.
    pub fn run(&mut self, pass: Pass, tokens: &[u32], position: usize, observe: &mut dyn FnMut(&Step, &[f32], usize)) -> Result<()> {
        let plan = self.plan(pass)?;
        if tokens.len() > plan.rows() || position + tokens.len() > self.cache.capacity {
            bail!("{} rows at position {position}: the plan has {} rows, the cache {}", tokens.len(), plan.rows(), self.cache.capacity);
        }
        let rows = tokens.len();
        for step in &plan.steps {
            let out = match step {
                Step::Embed { table, out, dim } => {
                    self.embed(&plan, *table, tokens, *out, *dim)?;
                    *out
                }
                Step::Linear(linear) => self.linear(&plan, linear, rows)?,
                Step::Attention(attention) => {
                    self.attention(&plan, attention, rows, position);
                    attention.out
                }
                Step::Norm { x, weight, out, dim } => {
                    self.norm(&plan, *x, *weight, *out, *dim, rows);
                    *out
                }
                Step::AllReduce { .. } | Step::DraftToken { .. } => {
                    bail!("step {} does not run on the CPU backend, which is one rank", step.name())
                }
                Step::Accept { .. } => continue,
            };
            let buffer = plan.buffer(out);
            observe(step, &self.buffers[buffer.name][..rows * buffer.dim], buffer.dim);
        }
        Ok(())
    }

    /// Logits of the last verify pass, [rows, vocab].
    pub fn logits(&self, rows: usize) -> &[f32] {
        &self.buffers["logits"][..rows * self.config.vocab]
    }

    /// Keys then values of one layer and KV head for positions `0 .. length`, [length, head_dim] each.
    pub fn kv(&self, layer: usize, head: usize, length: usize) -> (&[f32], &[f32]) {
        let at = self.cache.at(layer, head);
        let n = length * self.cache.head_dim;
        (&self.cache.keys[at..at + n], &self.cache.values[at..at + n])
    }

    fn embed(&mut self, plan: &Plan, table: WeightId, tokens: &[u32], out: BufferId, dim: usize) -> Result<()> {
        let weight = self.weights.get(table);
        let numbers = Numbers::of(&weight.parts[0])?;
        let out = self.buffers.get_mut(plan.buffer(out).name).expect("planned");
        for (row, &token) in out.chunks_exact_mut(dim).zip(tokens) {
            numbers.copy(token as usize * dim, row);
        }
        Ok(())
    }

    fn norm(&mut self, plan: &Plan, x: BufferId, weight: WeightId, out: BufferId, dim: usize, rows: usize) {
        let normed = self.scaled_input(plan, &Input { x, dim, column: 0, norm: Some(weight) }, rows);
        let out = self.buffers.get_mut(plan.buffer(out).name).expect("planned");
        for r in 0..rows {
            for i in 0..dim {
                out[r * dim + i] = normed.x[r * dim + i] * normed.inv[r];
            }
        }
    }

    /// x * norm weight, and 1/rms of each row (1 without a norm).
    fn scaled_input(&self, plan: &Plan, input: &Input, rows: usize) -> Scaled {
        let buffer = plan.buffer(input.x);
        let all = &self.buffers[buffer.name];
        let weight = input.norm.map(|id| &self.vectors[&id]);
        let mut x = Vec::with_capacity(rows * input.dim);
        let mut inv = vec![1.0; rows];
        for r in 0..rows {
            let row = &all[r * buffer.dim + input.column..][..input.dim];
            match weight {
                None => x.extend_from_slice(row),
                Some(weight) => {
                    inv[r] = 1.0 / (dot::sum_of_squares(row) / input.dim as f32 + plan.norm_eps).sqrt();
                    x.extend(row.iter().zip(weight).map(|(x, w)| x * w));
                }
            }
        }
        Scaled { x, inv, dim: input.dim }
    }

    fn linear(&mut self, plan: &Plan, linear: &Linear, rows: usize) -> Result<BufferId> {
        let weight = self.weights.get(linear.weight);
        let inputs: Vec<Scaled> = linear.inputs.iter().map(|i| self.scaled_input(plan, i, rows)).collect();
        // [n, rows]: one weight row meets every token while it is in the cache.
        let mut sums = vec![0.0f32; linear.n * rows];
        let mut first = 0;
        for (part, &n) in weight.parts.iter().zip(&weight.rows) {
            let numbers = Numbers::of(part)?;
            products(&numbers, &inputs, rows, &mut sums[first * rows..(first + n) * rows]);
            first += n;
        }
        if let Some(id) = linear.bias {
            for (row, b) in sums.chunks_exact_mut(rows).zip(&self.vectors[&id]) {
                row.iter_mut().for_each(|y| *y += b);
            }
        }
        let mut out = |id: BufferId| {
            let b = plan.buffer(id);
            (self.buffers.get_mut(b.name).expect("planned"), b.dim)
        };
        Ok(match &linear.epilogue {
            Epilogue::Store { out: id } | Epilogue::Logits { out: id } => {
                let (out, dim) = out(*id);
                for n in 0..linear.n {
                    for r in 0..rows {
                        out[r * dim + n] = sums[n * rows + r];
                    }
                }
                *id
            }
            Epilogue::SiluMul { out: id } => {
                let (out, dim) = out(*id);
                let half = linear.n / 2;
                for n in 0..half {
                    for r in 0..rows {
                        let gate = sums[n * rows + r];
                        out[r * dim + n] = gate / (1.0 + (-gate).exp()) * sums[(half + n) * rows + r];
                    }
                }
                *id
            }
            Epilogue::Residual { x, tap } => {
                let (out, dim) = out(*x);
                for n in 0..linear.n {
                    for r in 0..rows {
                        out[r * dim + n] += sums[n * rows + r];
                    }
                }
                if let Some(tap) = tap {
                    let x = self.buffers[plan.buffer(*x).name][..rows * dim].to_vec();
                    let features = plan.buffer(tap.out);
                    let kept = self.buffers.get_mut(features.name).expect("planned");
                    for r in 0..rows {
                        kept[r * features.dim + tap.column..][..dim].copy_from_slice(&x[r * dim..][..dim]);
                    }
                }
                *x
            }
            Epilogue::Partial { .. } => bail!("{} is split over ranks; the CPU backend is one rank", linear.weight),
        })
    }

    fn attention(&mut self, plan: &Plan, a: &Attention, rows: usize, position: usize) {
        let dim = a.head_dim;
        let width = (a.n_heads + 2 * a.n_kv_heads) * dim;
        let mut qkv = self.buffers[plan.buffer(a.qkv).name][..rows * width].to_vec();
        let factor = self.config.rope.attention_factor();
        for (r, row) in qkv.chunks_exact_mut(width).enumerate() {
            let (q, kv) = row.split_at_mut(a.n_heads * dim);
            let (k, v) = kv.split_at_mut(a.n_kv_heads * dim);
            for (heads, norm) in [(q, a.q_norm), (&mut *k, a.k_norm)] {
                for head in heads.chunks_exact_mut(dim) {
                    if let Some(id) = norm {
                        let inv = 1.0 / (dot::sum_of_squares(head) / dim as f32 + plan.norm_eps).sqrt();
                        head.iter_mut().zip(&self.vectors[&id]).for_each(|(x, w)| *x *= inv * w);
                    }
                    rope(head, position + r, &self.inverse_frequencies, factor);
                }
            }
            for head in 0..a.n_kv_heads {
                let at = self.cache.at(a.layer, head) + (position + r) * dim;
                self.cache.keys[at..at + dim].copy_from_slice(&k[head * dim..][..dim]);
                self.cache.values[at..at + dim].copy_from_slice(&v[head * dim..][..dim]);
            }
        }
        let (cache, group) = (&self.cache, a.n_heads / a.n_kv_heads);
        let out = self.buffers.get_mut(plan.buffer(a.out).name).expect("planned");
        out[..rows * a.n_heads * dim].par_chunks_exact_mut(dim).enumerate().for_each(|(i, out)| {
            let (r, head) = (i / a.n_heads, i % a.n_heads);
            let q = &qkv[r * width + head * dim..][..dim];
            let at = cache.at(a.layer, head / group);
            let n = (position + r + 1) * dim;
            attend(q, &cache.keys[at..at + n], &cache.values[at..at + n], out);
        });
    }

    fn sequence(&mut self) -> Result<&mut Sequence> {
        self.sequence.as_mut().context("no sequence was begun")
    }
}

/// An input of a linear layer with its norm weight multiplied in.
struct Scaled {
    x: Vec<f32>,   // [rows, dim]
    inv: Vec<f32>, // [rows]
    dim: usize,
}

/// sums [n, rows] = weight [n, k] x inputs, in parallel over weight rows.
fn products(weight: &Numbers, inputs: &[Scaled], rows: usize, sums: &mut [f32]) {
    const BLOCK: usize = 32; // weight rows of one task
    let k: usize = inputs.iter().map(|i| i.dim).sum();
    sums.par_chunks_mut(BLOCK * rows).enumerate().for_each(|(block, sums)| {
        for (j, sums) in sums.chunks_exact_mut(rows).enumerate() {
            let mut column = (block * BLOCK + j) * k;
            for input in inputs {
                weight.dots(column, input.dim, &input.x, |r, sum| sums[r] += sum * input.inv[r]);
                column += input.dim;
            }
        }
    });
}

/// Softmax attention of one query over `keys` and `values` ([positions, dim]), chunk by chunk.
fn attend(q: &[f32], keys: &[f32], values: &[f32], out: &mut [f32]) {
    let dim = q.len();
    let scale = 1.0 / (dim as f32).sqrt();
    let positions = keys.len() / dim;
    let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
    let mut chunk_out = vec![0.0; dim];
    let mut start = 0;
    out.fill(0.0);
    while start < positions {
        let end = chunk_end(start).min(positions);
        let scores: Vec<f32> = (start..end).map(|p| scale * dot::dot(q, &keys[p * dim..][..dim])).collect();
        let chunk_max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut chunk_sum = 0.0;
        chunk_out.fill(0.0);
        for (p, score) in (start..end).zip(scores) {
            let weight = (score - chunk_max).exp();
            chunk_sum += weight;
            chunk_out.iter_mut().zip(&values[p * dim..]).for_each(|(o, v)| *o += weight * v);
        }
        let new_max = chunk_max.max(max);
        let (old, new) = ((max - new_max).exp(), (chunk_max - new_max).exp());
        sum = sum * old + chunk_sum * new;
        out.iter_mut().zip(&chunk_out).for_each(|(o, c)| *o = *o * old + c * new);
        max = new_max;
        start = end;
    }
    out.iter_mut().for_each(|o| *o /= sum);
}

/// Where the KV chunk that starts at `start` ends: 64 wide up to 2,048, 256 up to 16,384, 1,024 beyond.
pub fn chunk_end(start: usize) -> usize {
    start
        + match start {
            0..2048 => 64,
            2048..16384 => 256,
            _ => 1024,
        }
}

/// Rotates pairs (i, i + dim/2) of one head by position * inverse frequency.
fn rope(head: &mut [f32], position: usize, inverse_frequencies: &[f32], factor: f32) {
    let half = head.len() / 2;
    for (i, f) in inverse_frequencies.iter().enumerate() {
        let (sin, cos) = (position as f32 * f).sin_cos();
        let (sin, cos) = (sin * factor, cos * factor);
        let (a, b) = (head[i], head[i + half]);
        head[i] = a * cos - b * sin;
        head[i + half] = b * cos + a * sin;
    }
}

/// A vector weight as f32, its parts joined.
fn floats(weight: &Weight) -> Result<Vec<f32>> {
    let mut all = Vec::new();
    for (part, &rows) in weight.parts.iter().zip(&weight.rows) {
        let mut numbers = vec![0.0; rows];
        Numbers::of(part)?.copy(0, &mut numbers);
        all.extend(numbers);
    }
    Ok(all)
}

impl Backend for Reference {
    fn context(&self) -> usize {
        self.context
    }

    fn vocab(&self) -> usize {
        self.config.vocab
    }

    fn prefill_rows(&self) -> usize {
        PREFILL_ROWS
    }

    fn queue_depth(&self) -> usize {
        1 // a pass runs when it is queued: a second one would only be work done too early
    }

    fn begin(&mut self, prompt: &[u32], keep: usize, sampling: &Sampling, limits: &Limits) -> Result<()> {
        self.records.clear();
        self.sequence = Some(Sequence::new(prompt, keep, self.config.vocab, sampling.clone(), limits.clone()));
        Ok(())
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<()> {
        let position = self.sequence()?.length;
        self.run(Pass::Prefill { rows: PREFILL_ROWS }, tokens, position, &mut |_, _, _| {})?;
        self.sequence()?.length += tokens.len();
        Ok(())
    }

    fn verify(&mut self, width: usize) -> Result<()> {
        let sequence = self.sequence()?;
        if sequence.end.is_some() {
            let record = sequence.accept(&mut [], &[]);
            self.records.push_back(record);
            return Ok(());
        }
        let (tokens, position) = ([sequence.root()], sequence.length);
        self.run(Pass::Verify { width }, &tokens, position, &mut |_, _, _| {})?;
        let n = self.config.vocab * tokens.len();
        let logits = &mut self.buffers.get_mut("logits").expect("planned")[..n];
        let record = self.sequence.as_mut().expect("checked above").accept(logits, &[]);
        self.records.push_back(record);
        Ok(())
    }

    fn record(&mut self) -> Result<Record> {
        self.records.pop_front().context("no pass was queued")
    }

    fn truncate(&mut self, n: usize) -> Result<()> {
        self.sequence()?.truncate(n);
        Ok(())
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }
}

