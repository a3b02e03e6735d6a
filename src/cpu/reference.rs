//! The f32 arm of every Step, weights read in place from the checkpoint: the oracle for the kernels, and the backend of
//! machines without a GPU.
//!
//! It follows "Where bits come from" (ARCHITECTURE.md): a linear layer sums inside fixed segments of K and then over
//! segments, attention finishes fixed chunks of positions and folds them in ascending order. A row's bits therefore
//! depend on its own token, its position and the weights, never on how many rows share the pass. The inner products are
//! in dot.rs.
use super::dot::{self, Numbers};
use crate::decode::policy::Costs;
use crate::decode::sample::{greedy, gumbel};
use crate::decode::{draft_ngram, Backend, Counters, Limits, Probe, Record, Sampling, Sequence, StepTime, MAX_DRAFTS};
use crate::model::config::Config;
use crate::model::draft::DraftModel;
use crate::model::plan::{
    self, Attention, BufferId, BufferKind, BufferName, Epilogue, Linear, Owner, Pass, Plan, Ranks, Step, Storage,
    Tokens,
};
use crate::model::plan::{Tap, FEATURE_ROWS, MAX_WIDTH};
use crate::model::role::WeightId;
use crate::model::rope::Rope;
use crate::model::weights::check_scales;
use crate::model::weights::{Slice, Weight, Weights};
use anyhow::{bail, Context, Result};
use rayon::prelude::*;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Instant;

/// Rows of one prefill call: enough that a weight row is read once for many tokens, small enough to stop on Ctrl-C.
const PREFILL_ROWS: usize = 64;

/// Rows without drafting after which the drafter's cache is brought up: far below FEATURE_ROWS, and a batch is cheaper
/// than single rows.
const CATCH_UP: usize = 16;

/// What the CPU stores: weights as the checkpoint has them (two bytes for bf16), f32 keys and values.
pub const STORAGE: Storage = Storage { weight: 2, kv: 4, plain_kv_b: false };

pub struct Reference {
    config: Config,
    context: usize,
    weights: Weights,
    drafter: Option<DraftState>,
    ngram: bool,
    /// One plan a rank; a drafter's pass has one, which rank 0 runs.
    plans: BTreeMap<Pass, Rc<Vec<Plan>>>,
    /// All ranks, run in turns step by step.
    ranks: Vec<Rank>,
    /// The rank whose steps `run` shows.
    shown: usize,
    rotary: Rotary,
    /// Of the last verify pass, [rows, vocab], from all ranks.
    logits: Vec<f32>,
    sequence: Option<Sequence>,
    /// Drafts for the next verify pass.
    drafts: Vec<u32>,
    /// A draft pass of so many drafts is queued: it runs when the next verify pass wants it, or never.
    queued_draft: Option<usize>,
    records: VecDeque<Record>,
}

/// One rank's share of the model.
pub(super) struct Rank {
    pub(super) ranks: Ranks,
    /// Norm weights and biases as f32.
    pub(super) vectors: BTreeMap<WeightId, Vec<f32>>,
    /// Activations by buffer name, [rows, dim] of the widest plan so far. Features are a ring of FEATURE_ROWS rows by
    /// position.
    pub(super) buffers: BTreeMap<BufferName, Vec<f32>>,
    pub(super) cache: Cache,
    /// Of each router of the last pass, see `Reference::margins`.
    pub(super) margins: Vec<Vec<f32>>,
}

/// The drafter's side: its cache holds rows 0 .. length, one behind nothing or several behind the target's.
pub(super) struct DraftState {
    shape: plan::Drafter,
    /// Draft id to target id; None: the same ids.
    map: Option<Vec<u32>>,
    pub(super) cache: Cache,
    pub(super) rotary: Rotary,
    length: usize,
}

pub(super) struct Rotary {
    inverse_frequencies: Vec<f32>,
    factor: f32,
}

impl Rotary {
    fn new(rope: &Rope, head_dim: usize) -> Rotary {
        Rotary { inverse_frequencies: rope.inverse_frequencies(head_dim), factor: rope.attention_factor() }
    }

    /// Rotates pairs (i, i + dim/2) of one head by position * inverse frequency.
    pub(super) fn turn(&self, head: &mut [f32], position: usize) {
        let half = head.len() / 2;
        for (i, f) in self.inverse_frequencies.iter().enumerate() {
            let (sin, cos) = (position as f32 * f).sin_cos();
            let (sin, cos) = (sin * self.factor, cos * self.factor);
            let (a, b) = (head[i], head[i + half]);
            head[i] = a * cos - b * sin;
            head[i + half] = b * cos + a * sin;
        }
    }
}

/// Keys and values, [layer][kv head][position][head_dim] each; no values with latent attention.
pub(super) struct Cache {
    pub(super) keys: Vec<f32>,
    values: Vec<f32>,
    n_kv_heads: usize,
    capacity: usize,
    head_dim: usize,
}

impl Cache {
    fn new(kv: plan::KvLayout, capacity: usize) -> Cache {
        let rows = kv.n_layers * kv.n_kv_heads * capacity;
        Cache {
            keys: vec![0.0; rows * kv.head_dim],
            values: vec![0.0; rows * kv.value_dim],
            n_kv_heads: kv.n_kv_heads,
            capacity,
            head_dim: kv.head_dim,
        }
    }

    /// Start of one head's rows.
    pub(super) fn at(&self, layer: usize, head: usize) -> usize {
        (layer * self.n_kv_heads + head) * self.capacity * self.head_dim
    }
}

/// The rows of one execution: `tokens[i]` stands at `position + i`.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    tokens: &'a [u32],
    position: usize,
}

impl Rows<'_> {
    /// Rows a step works on when its output buffer has `most`: the one-row steps of a draft pass have one.
    pub(super) fn count(&self, most: usize) -> usize {
        self.tokens.len().min(most)
    }

    /// Position of row 0 of a step.
    pub(super) fn start(&self, tokens: Tokens) -> usize {
        match tokens {
            Tokens::Pass | Tokens::Next => self.position,
            Tokens::Draft(n) => self.position + self.tokens.len() - 1 + n,
        }
    }
}

impl Reference {
    /// `context` is the most tokens of prompt and output.
    pub fn new(
        config: Config,
        weights: Weights,
        context: usize,
        drafter: Option<DraftModel>,
        ngram: bool,
    ) -> Result<Reference> {
        Reference::of_ranks(config, weights, context, drafter, ngram, Ranks::ONE)
    }

    /// The same arithmetic as `ranks.count` ranks do it, each with its part of the weights; `run` and `kv` show rank
    /// `ranks.rank`.
    pub fn of_ranks(
        config: Config,
        mut weights: Weights,
        context: usize,
        drafter: Option<DraftModel>,
        ngram: bool,
        ranks: Ranks,
    ) -> Result<Reference> {
        let capacity = context + 2 * MAX_WIDTH;
        let drafter = match drafter {
            None => None,
            Some(d) => {
                let kv = plan::drafter(&d.shape, Pass::DraftPrefill { rows: PREFILL_ROWS }, Ranks::ONE)?.kv;
                weights.add(d.weights);
                let rotary = Rotary::new(&d.rope, d.shape.rope_dim());
                Some(DraftState { shape: d.shape, map: d.map, cache: Cache::new(kv, capacity), rotary, length: 0 })
            }
        };
        let rank = |rank| -> Result<Rank> {
            let ranks = Ranks { rank, ..ranks };
            let kv = plan::target(&config, Pass::Verify { width: 1 }, ranks, &[])?.kv;
            let vectors = weights.iter().filter(|(_, w)| w.cols == 1).map(|(id, w)| Ok((id, floats(w, ranks.of(id))?)));
            let (buffers, margins) = (BTreeMap::new(), Vec::new());
            Ok(Rank {
                ranks,
                vectors: vectors.collect::<Result<_>>()?,
                buffers,
                cache: Cache::new(kv, capacity),
                margins,
            })
        };
        let all = (0..ranks.count).map(rank).collect::<Result<Vec<Rank>>>()?;
        check_scales(&weights)?;
        let rotary = Rotary::new(&config.rope, config.rope_dim());
        let mut reference = Reference {
            config,
            context,
            weights,
            drafter,
            ngram,
            plans: BTreeMap::new(),
            ranks: all,
            shown: ranks.rank,
            rotary,
            logits: Vec::new(),
            sequence: None,
            drafts: Vec::new(),
            queued_draft: None,
            records: VecDeque::new(),
        };
        reference.plans(Pass::Prefill { rows: PREFILL_ROWS })?;
        Ok(reference)
    }

    /// The plans of a pass by rank, and the buffers that they need.
    fn plans(&mut self, pass: Pass) -> Result<Rc<Vec<Plan>>> {
        if let Some(plans) = self.plans.get(&pass) {
            return Ok(plans.clone());
        }
        let taps = self.drafter.as_ref().map_or(Vec::new(), |d| d.shape.taps());
        let plans = match (pass, &self.drafter) {
            (Pass::Prefill { .. } | Pass::Verify { .. }, _) => self
                .ranks
                .iter()
                .map(|rank| plan::target(&self.config, pass, rank.ranks, &taps))
                .collect::<Result<Vec<Plan>>>()?,
            (Pass::DraftPrefill { .. } | Pass::Draft { .. }, Some(d)) => {
                vec![plan::drafter(&d.shape, pass, Ranks::ONE)?]
            }
            (Pass::DraftPrefill { .. } | Pass::Draft { .. }, None) => bail!("no drafter is loaded"),
        };
        for (rank, plan) in self.ranks.iter_mut().zip(&plans) {
            for b in &plan.buffers {
                let rows = if b.kind == BufferKind::Feature { FEATURE_ROWS } else { b.rows };
                let buffer = rank.buffers.entry(b.name).or_default();
                if buffer.len() < rows * b.dim {
                    buffer.resize(rows * b.dim, 0.0);
                }
            }
        }
        let plans = Rc::new(plans);
        self.plans.insert(pass, plans.clone());
        Ok(plans)
    }

    /// Runs every step of a pass but `Accept` over `tokens` at positions `position ..` (drafter passes: the tokens
    /// after those of the features), and shows each step's output to `observe`, which may change it: the step, its
    /// output [rows, dim] and dim.
    pub fn run(
        &mut self,
        pass: Pass,
        tokens: &[u32],
        position: usize,
        observe: &mut dyn FnMut(&Step, &mut [f32], usize),
    ) -> Result<()> {
        let plans = self.plans(pass)?;
        let capacity = self.ranks[0].cache.capacity;
        if tokens.is_empty() || tokens.len() > plans[0].rows() || position + tokens.len() > capacity {
            bail!(
                "{} rows at position {position}: the plan has {} rows, the cache {capacity}",
                tokens.len(),
                plans[0].rows()
            );
        }
        let rows = Rows { tokens, position };
        let shown = self.shown.min(plans.len() - 1);
        self.ranks.iter_mut().for_each(|rank| rank.margins.clear());
        for (i, step) in plans[shown].steps.iter().enumerate() {
            let mut out = None;
            match step {
                Step::AllReduce { .. } => out = Some(self.all_reduce(&plans, i, rows)),
                Step::Accept { .. } => self.gather_logits(&plans, i, tokens.len()),
                _ => {
                    for (rank, plan) in plans.iter().enumerate() {
                        let written = self.step(rank, plan, &plan.steps[i], rows)?;
                        out = if rank == shown { Some(written) } else { out };
                    }
                }
            }
            let Some(out) = out else { continue };
            let buffer = plans[shown].buffer(out);
            if buffer.kind == BufferKind::Feature {
                continue;
            }
            let n = rows.count(buffer.rows) * buffer.dim;
            let numbers = self.ranks[shown].buffers.get_mut(&buffer.name).expect("buffers of a plan exist");
            observe(step, &mut numbers[..n], buffer.dim);
            // What all ranks hold alike stays so when `observe` changes it.
            if plans.len() > 1 && matches!(buffer.kind, BufferKind::Stream | BufferKind::Routes) {
                let numbers = numbers[..n].to_vec();
                self.ranks.iter_mut().for_each(|rank| {
                    rank.buffers.get_mut(&buffer.name).expect("ranks have the same buffers")[..n]
                        .copy_from_slice(&numbers)
                });
            }
        }
        Ok(())
    }

    /// A step of one rank; the buffer that it wrote.
    fn step(&mut self, rank: usize, plan: &Plan, step: &Step, rows: Rows) -> Result<BufferId> {
        let Reference { ranks, weights, drafter, rotary, .. } = self;
        let rank = &mut ranks[rank];
        Ok(match step {
            Step::Embed { table, tokens, out, dim } => {
                let draft;
                let tokens = match tokens {
                    Tokens::Pass | Tokens::Next => rows.tokens,
                    Tokens::Draft(n) => {
                        draft = [self.drafts[n - 1]];
                        &draft
                    }
                };
                rank.embed(weights, plan, *table, tokens, *out, *dim)?;
                *out
            }
            Step::Linear(linear) => rank.linear(weights, plan, linear, rows)?,
            Step::Attention(attention) => {
                rank.attention(drafter.as_mut(), rotary, plan, attention, rows);
                attention.out
            }
            Step::LatentQuery(a) => {
                rank.latent_query(weights, drafter.as_mut(), rotary, plan, a, rows)?;
                a.absorbed
            }
            Step::LatentAttend(a) => {
                rank.latent_attend(drafter.as_mut(), plan, a, rows);
                a.attended
            }
            Step::LatentValue(a) => {
                rank.latent_value(weights, plan, a, rows)?;
                a.out
            }
            Step::Router(router) => {
                rank.route(weights, plan, router, rows)?;
                router.routes
            }
            Step::ExpertsUp(mixture) => {
                rank.experts_up(weights, plan, mixture, rows)?;
                mixture.act
            }
            Step::ExpertsDown(mixture) => rank.experts_down(weights, plan, mixture, rows)?,
            Step::Norm { x, column, weight, out, dim } => {
                rank.norm(plan, *x, *column, *weight, *out, *dim, rows);
                *out
            }
            Step::Select { x, out, dim } => {
                let last = (rows.tokens.len() - 1) * dim;
                let row = rank.buffer(plan, *x)[last..last + dim].to_vec();
                rank.buffer_mut(plan, *out)[..*dim].copy_from_slice(&row);
                *out
            }
            Step::DraftToken { logits, vocab, draft } => {
                let token = self.draft_token(&self.ranks[0].buffer(plan, *logits)[..*vocab], *draft)?;
                self.drafts.push(token);
                *logits
            }
            Step::AllReduce { .. } | Step::Accept { .. } => unreachable!("run does what takes all ranks together"),
        })
    }

    /// x += the partial sums of all ranks in their order, on every rank; the buffer of x.
    fn all_reduce(&mut self, plans: &[Plan], i: usize, at: Rows) -> BufferId {
        let Step::AllReduce { partial, x, dim, bias, tap } = plans[0].steps[i] else {
            unreachable!("called for AllReduce only")
        };
        let rows = at.count(plans[0].buffer(x).rows);
        let mut sums = vec![0.0; rows * dim];
        for (rank, plan) in self.ranks.iter().zip(plans) {
            let partial = rank.buffer(plan, partial);
            sums.iter_mut().zip(partial).for_each(|(sum, y)| *sum += y);
        }
        if let Some(bias) = bias {
            let bias = &self.ranks[0].vectors[&bias];
            sums.chunks_exact_mut(dim).for_each(|row| row.iter_mut().zip(bias).for_each(|(sum, b)| *sum += b));
        }
        for (rank, plan) in self.ranks.iter_mut().zip(plans) {
            rank.buffer_mut(plan, x).iter_mut().zip(&sums).for_each(|(x, sum)| *x += sum);
            rank.tap(plan, x, tap, at);
        }
        x
    }

    /// `logits` from the columns of all ranks.
    fn gather_logits(&mut self, plans: &[Plan], i: usize, rows: usize) {
        let vocab = self.config.vocab;
        self.logits.resize(rows * vocab, 0.0);
        for (rank, plan) in self.ranks.iter().zip(plans) {
            let Step::Accept { logits, first_id, .. } = plan.steps[i] else { unreachable!("called for Accept only") };
            let n = plan.buffer(logits).dim;
            for (all, part) in
                self.logits.chunks_exact_mut(vocab).zip(rank.buffers[&BufferName::LOGITS].chunks_exact(n))
            {
                all[first_id..first_id + n].copy_from_slice(part);
            }
        }
    }

    /// Logits of the last verify pass, [rows, vocab].
    pub fn logits(&self, rows: usize) -> &[f32] {
        &self.logits[..rows * self.config.vocab]
    }

    /// Keys then values of one layer and KV head for positions `0 .. length`, [length, head_dim] each; heads of the
    /// rank that is shown. With latent attention the rows of the cache, and no values.
    pub fn kv(&self, owner: Owner, layer: usize, head: usize, length: usize) -> (&[f32], &[f32]) {
        let cache = match owner {
            Owner::Target => &self.ranks[self.shown].cache,
            Owner::Drafter => &self.drafter.as_ref().expect("a drafter is loaded").cache,
        };
        let at = cache.at(layer, head);
        let n = length * cache.head_dim;
        (&cache.keys[at..at + n], if cache.values.is_empty() { &[] } else { &cache.values[at..at + n] })
    }

    /// Rows in a model's cache: those of the target's sequence, or those that the drafter has made of them so far.
    pub fn length(&self, owner: Owner) -> usize {
        match owner {
            Owner::Target => self.sequence.as_ref().map_or(0, |s| s.length),
            Owner::Drafter => self.drafter.as_ref().map_or(0, |d| d.length),
        }
    }

    /// Drafts that the next verify pass will see.
    pub fn drafts(&self) -> &[u32] {
        &self.drafts
    }

    /// For each router of the last pass and each of its rows, by how much scores would have to change for another
    /// choice of experts.
    pub fn margins(&self) -> &[Vec<f32>] {
        &self.ranks[self.shown].margins
    }

    /// Claims that the drafter has `length` rows, whatever its cache holds there: tests show with it what rows left
    /// from drafting cost.
    pub fn assume_drafted(&mut self, length: usize) {
        if let Some(d) = &mut self.drafter {
            d.length = length;
        }
    }

    /// The ring of tapped features, [FEATURE_ROWS, taps * hidden] by position: tests show with it what wrong ones cost.
    pub fn features_mut(&mut self) -> &mut [f32] {
        self.ranks[0].buffers.get_mut(&BufferName::FEATURES).expect("a drafter is loaded")
    }

    /// The best token of one row of the drafter's logits, with the noise of its position: where the drafter agrees with
    /// the target, both then choose the same token at any temperature.
    fn draft_token(&self, logits: &[f32], draft: usize) -> Result<u32> {
        let sequence = self.sequence.as_ref().context("no sequence was begun")?;
        let sampling = &sequence.sampling;
        let map = self.drafter.as_ref().and_then(|d| d.map.as_ref());
        let target_id = |id: usize| map.map_or(id as u32, |map| map[id]);
        let (best, max) = greedy(logits);
        if sampling.temperature == 0.0 {
            return Ok(target_id(best as usize));
        }
        let position = (sequence.history.len() + draft - 1) as u64;
        let mut chosen = (f32::NEG_INFINITY, target_id(best as usize));
        for (id, &l) in logits.iter().enumerate() {
            let id = target_id(id);
            let score = (l - max) / sampling.temperature + gumbel(sampling.seed, position, id);
            if score > chosen.0 {
                chosen = (score, id);
            }
        }
        Ok(chosen.1)
    }

    /// Brings the drafter's cache to `length` rows, from the features of the rows it lacks.
    fn catch_up(&mut self, length: usize) -> Result<()> {
        while let (Some(d), Some(sequence)) = (&self.drafter, &self.sequence) {
            let from = d.length;
            let n = length.saturating_sub(from).min(PREFILL_ROWS);
            if n == 0 {
                break;
            }
            let tokens = sequence.history[from + 1..from + 1 + n].to_vec();
            self.run(Pass::DraftPrefill { rows: PREFILL_ROWS }, &tokens, from, &mut |_, _, _| {})?;
            self.drafter.as_mut().expect("checked above").length = from + n;
        }
        Ok(())
    }

    /// Draft-extend over the rows that the drafter lacks, then the steps.
    fn run_queued_draft(&mut self) -> Result<()> {
        let (Some(drafts), Some(sequence), Some(d)) = (self.queued_draft.take(), &self.sequence, &self.drafter) else {
            return Ok(());
        };
        if sequence.end.is_some() {
            return Ok(());
        }
        let length = sequence.length;
        if length - d.length > MAX_DRAFTS + 1 {
            self.catch_up(length - 1)?;
        }
        let from = self.drafter.as_ref().expect("checked above").length;
        let tokens = self.sequence()?.history[from + 1..length + 1].to_vec();
        self.drafts.clear();
        self.run(Pass::Draft { width: MAX_DRAFTS + 1, drafts }, &tokens, from, &mut |_, _, _| {})?;
        self.drafter.as_mut().expect("checked above").length = length;
        Ok(())
    }

    /// A sequence that passes can be timed in, and distinct tokens for them.
    fn begin_timing(&mut self) -> Result<Vec<u32>> {
        let tokens: Vec<u32> = (0..MAX_WIDTH as u32).map(|i| (i + 1) * 7919 % self.config.vocab as u32).collect();
        let limits = Limits { end_ids: Vec::new(), max_tokens: 1, context: self.context };
        self.begin(&tokens[..1], 0, &Sampling::default(), &limits)?;
        Ok(tokens)
    }

    fn time(&mut self, pass: Pass, tokens: &[u32], position: usize, n: usize) -> Result<Vec<f64>> {
        let tokens = &tokens[..tokens.len().min(self.plans(pass)?[0].rows())];
        let mut once = || -> Result<f64> {
            self.drafts.clear();
            let start = Instant::now();
            self.run(pass, tokens, position, &mut |_, _, _| {})?;
            Ok(start.elapsed().as_secs_f64() * 1e3)
        };
        once()?;
        (0..n).map(|_| once()).collect()
    }

    fn sequence(&mut self) -> Result<&mut Sequence> {
        self.sequence.as_mut().context("no sequence was begun")
    }
}

impl Rank {
    pub(super) fn buffer_mut(&mut self, plan: &Plan, id: BufferId) -> &mut [f32] {
        self.buffers.get_mut(&plan.buffer(id).name).expect("buffers of a plan exist")
    }

    pub(super) fn buffer(&self, plan: &Plan, id: BufferId) -> &[f32] {
        &self.buffers[&plan.buffer(id).name]
    }

    fn embed(
        &mut self,
        weights: &Weights,
        plan: &Plan,
        table: WeightId,
        tokens: &[u32],
        out: BufferId,
        dim: usize,
    ) -> Result<()> {
        let numbers = Numbers::of(&weights.get(table).parts[0])?;
        for (row, &token) in self.buffer_mut(plan, out).chunks_exact_mut(dim).zip(tokens) {
            numbers.copy(token as usize * dim, row);
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn norm(
        &mut self,
        plan: &Plan,
        x: BufferId,
        column: usize,
        weight: WeightId,
        out: BufferId,
        dim: usize,
        rows: Rows,
    ) {
        let n = rows.count(plan.buffer(out).rows);
        let normed = self.scaled_input(plan, x, column, dim, Some(weight), rows, n);
        let stride = plan.buffer(out).dim;
        let out = self.buffer_mut(plan, out);
        for r in 0..n {
            for i in 0..dim {
                out[r * stride + column + i] = normed.x[r * dim + i] * normed.inv[r];
            }
        }
    }

    /// Columns of x times norm weight, and 1/rms of each row of them (1 without a norm).
    #[allow(clippy::too_many_arguments)]
    pub(super) fn scaled_input(
        &self,
        plan: &Plan,
        x: BufferId,
        column: usize,
        dim: usize,
        norm: Option<WeightId>,
        rows: Rows,
        n: usize,
    ) -> Scaled {
        let buffer = plan.buffer(x);
        let all = &self.buffers[&buffer.name];
        let weight = norm.map(|id| &self.vectors[&id]);
        let mut x = Vec::with_capacity(n * dim);
        let mut inv = vec![1.0; n];
        for (r, inv) in inv.iter_mut().enumerate() {
            let at = if buffer.kind == BufferKind::Feature { (rows.position + r) % FEATURE_ROWS } else { r };
            let row = &all[at * buffer.dim + column..][..dim];
            match weight {
                None => x.extend_from_slice(row),
                Some(weight) => {
                    *inv =
                        1.0 / (dot::sum_of_squares(row) / dim as f32 + plan.eps(norm.expect("a weight of one"))).sqrt();
                    x.extend(row.iter().zip(weight).map(|(x, w)| x * w));
                }
            }
        }
        Scaled { x, inv, dim }
    }

    fn linear(&mut self, weights: &Weights, plan: &Plan, linear: &Linear, at: Rows) -> Result<BufferId> {
        let weight = weights.get(linear.weight);
        let out = linear.epilogue.out();
        let rows = at.count(plan.buffer(out).rows);
        let inputs: Vec<Scaled> =
            linear.inputs.iter().map(|i| self.scaled_input(plan, i.x, 0, i.dim, i.norm, at, rows)).collect();
        // [n, rows]: one weight row meets every token while it is in the cache.
        let mut sums = vec![0.0f32; linear.n * rows];
        let mut first = 0;
        let ranks = self.ranks.of(linear.weight);
        for (part, slice) in weight.part_of_rank(ranks.rank, ranks.count)?.iter().enumerate() {
            let n = slice.rows.len();
            let sums = &mut sums[first * rows..(first + n) * rows];
            products(&Numbers::of_part(weight, part)?, weight.cols, slice, &inputs, rows, sums);
            if weight.rope[part] > 0 {
                // A rank's rows are whole units, so that their order is that of the first ones.
                let stored = sums.to_vec();
                for (row, sums) in sums.chunks_exact_mut(rows).enumerate() {
                    sums.copy_from_slice(&stored[weight.rope_order(part, row) * rows..][..rows]);
                }
            }
            first += n;
        }
        if let Some(id) = linear.bias {
            for (row, b) in sums.chunks_exact_mut(rows).zip(&self.vectors[&id]) {
                row.iter_mut().for_each(|y| *y += b);
            }
        }
        let dim = plan.buffer(out).dim;
        let n = linear.n;
        let target = self.buffer_mut(plan, out);
        match &linear.epilogue {
            Epilogue::Store { .. } | Epilogue::Partial { .. } | Epilogue::Logits { .. } => {
                for (i, sums) in sums.chunks_exact(rows).enumerate() {
                    sums.iter().enumerate().for_each(|(r, y)| target[r * dim + i] = *y);
                }
            }
            Epilogue::SiluMul { .. } => {
                let (gates, ups) = sums.split_at(n / 2 * rows);
                for (i, (gates, ups)) in gates.chunks_exact(rows).zip(ups.chunks_exact(rows)).enumerate() {
                    for (r, (gate, up)) in gates.iter().zip(ups).enumerate() {
                        target[r * dim + i] = gate / (1.0 + (-gate).exp()) * up;
                    }
                }
            }
            Epilogue::Residual { tap, .. } => {
                for (i, sums) in sums.chunks_exact(rows).enumerate() {
                    sums.iter().enumerate().for_each(|(r, y)| target[r * dim + i] += y);
                }
                self.tap(plan, out, *tap, at);
            }
        }
        Ok(out)
    }

    /// Keeps x for the drafter, where a tap says so.
    pub(super) fn tap(&mut self, plan: &Plan, x: BufferId, tap: Option<Tap>, at: Rows) {
        let Some(tap) = tap else { return };
        let (dim, features) = (plan.buffer(x).dim, plan.buffer(tap.out).dim);
        let x = self.buffer(plan, x)[..at.tokens.len() * dim].to_vec();
        let ring = self.buffer_mut(plan, tap.out);
        for (r, x) in x.chunks_exact(dim).enumerate() {
            let row = (at.position + r) % FEATURE_ROWS;
            ring[row * features + tap.column..][..dim].copy_from_slice(x);
        }
    }

    fn attention(&mut self, drafter: Option<&mut DraftState>, rotary: &Rotary, plan: &Plan, a: &Attention, at: Rows) {
        let dim = a.head_dim;
        let width = (a.n_heads + 2 * a.n_kv_heads) * dim;
        let rows = at.count(plan.buffer(a.out).rows);
        let position = at.start(a.tokens);
        let mut qkv = self.buffer(plan, a.qkv)[..rows * width].to_vec();
        let (cache, rotary) = match (a.owner, drafter) {
            (Owner::Target, _) => (&mut self.cache, rotary),
            (Owner::Drafter, Some(d)) => (&mut d.cache, &d.rotary),
            (Owner::Drafter, None) => unreachable!("plans of a drafter need one"),
        };
        for (r, row) in qkv.chunks_exact_mut(width).enumerate() {
            let (q, kv) = row.split_at_mut(a.n_heads * dim);
            let (k, v) = kv.split_at_mut(a.n_kv_heads * dim);
            for (heads, norm) in [(q, a.q_norm), (&mut *k, a.k_norm)] {
                for head in heads.chunks_exact_mut(dim) {
                    if let Some(id) = norm {
                        let inv = 1.0 / (dot::sum_of_squares(head) / dim as f32 + plan.norm_eps).sqrt();
                        head.iter_mut().zip(&self.vectors[&id]).for_each(|(x, w)| *x *= inv * w);
                    }
                    rotary.turn(head, position + r);
                }
            }
            for head in 0..a.n_kv_heads {
                let at = cache.at(a.layer, head) + (position + r) * dim;
                cache.keys[at..at + dim].copy_from_slice(&k[head * dim..][..dim]);
                cache.values[at..at + dim].copy_from_slice(&v[head * dim..][..dim]);
            }
        }
        let (cache, group) = (&*cache, a.n_heads / a.n_kv_heads);
        let out = self.buffers.get_mut(&plan.buffer(a.out).name).expect("buffers of a plan exist");
        // Short contexts are done before another thread has woken.
        let heads_a_task = (1 << 17) / ((position + rows) * dim * 2) + 1;
        out[..rows * a.n_heads * dim].par_chunks_exact_mut(dim).enumerate().with_min_len(heads_a_task).for_each(
            |(i, out)| {
                let (r, head) = (i / a.n_heads, i % a.n_heads);
                let q = &qkv[r * width + head * dim..][..dim];
                let at = cache.at(a.layer, head / group);
                let n = (position + r + 1) * dim;
                attend(q, 1.0 / (dim as f32).sqrt(), &cache.keys[at..at + n], &cache.values[at..at + n], dim, out);
            },
        );
    }
}

/// An input of a linear layer with its norm weight multiplied in.
pub(super) struct Scaled {
    pub(super) x: Vec<f32>,   // [rows, dim]
    pub(super) inv: Vec<f32>, // [rows]
    pub(super) dim: usize,
}

/// sums [n, rows] = the slice [n, k] of a weight of `cols` columns x inputs, in parallel over weight rows.
pub(super) fn products(weight: &Numbers, cols: usize, slice: &Slice, inputs: &[Scaled], rows: usize, sums: &mut [f32]) {
    const BLOCK: usize = 32; // weight rows of one task
    sums.par_chunks_mut(BLOCK * rows).enumerate().for_each(|(block, sums)| {
        for (j, sums) in sums.chunks_exact_mut(rows).enumerate() {
            let mut column = (slice.rows.start + block * BLOCK + j) * cols + slice.cols.start;
            for input in inputs {
                weight.dots(column, input.dim, &input.x, |r, sum| sums[r] += sum * input.inv[r]);
                column += input.dim;
            }
        }
    });
}

/// Softmax attention of one query over `keys` [positions, dim] and the values, the first numbers of rows of `stride`,
/// chunk by chunk.
pub(super) fn attend(q: &[f32], scale: f32, keys: &[f32], values: &[f32], stride: usize, out: &mut [f32]) {
    let dim = q.len();
    let positions = keys.len() / dim;
    let (mut max, mut sum) = (f32::NEG_INFINITY, 0.0);
    let mut chunk_out = vec![0.0; out.len()];
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
            chunk_out.iter_mut().zip(&values[p * stride..]).for_each(|(o, v)| *o += weight * v);
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

/// A rank's part of a vector weight as f32, its parts joined.
fn floats(weight: &Weight, ranks: Ranks) -> Result<Vec<f32>> {
    let mut all = Vec::new();
    for (part, slice) in weight.parts.iter().zip(weight.part_of_rank(ranks.rank, ranks.count)?) {
        let mut numbers = vec![0.0; slice.rows.len()];
        Numbers::of(part)?.copy(slice.rows.start, &mut numbers);
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
        // Rows that the drafter lacks are made from features that the next prefill overwrites.
        self.catch_up(keep)?;
        if let Some(d) = &mut self.drafter {
            d.length = keep;
        }
        self.records.clear();
        self.drafts.clear();
        self.queued_draft = None;
        self.sequence = Some(Sequence::new(prompt, keep, self.config.vocab, sampling.clone(), limits.clone()));
        Ok(())
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<()> {
        let position = self.sequence()?.length;
        self.run(Pass::Prefill { rows: PREFILL_ROWS }, tokens, position, &mut |_, _, _| {})?;
        self.sequence()?.length += tokens.len();
        self.catch_up(position + tokens.len())
    }

    fn verify(&mut self, width: usize) -> Result<()> {
        self.run_queued_draft()?;
        let mut drafts = std::mem::take(&mut self.drafts);
        drafts.truncate(width - 1);
        let sequence = self.sequence()?;
        let mut record = sequence.accept(&mut [], &[]);
        if sequence.end.is_none() {
            let mut tokens = vec![sequence.root()];
            tokens.extend_from_slice(&drafts);
            let position = sequence.length;
            if self.drafter.as_ref().is_some_and(|d| position - d.length >= CATCH_UP) {
                self.catch_up(position)?;
            }
            self.run(Pass::Verify { width }, &tokens, position, &mut |_, _, _| {})?;
            let n = self.config.vocab * tokens.len();
            let sequence = self.sequence.as_mut().expect("begun above");
            record = sequence.accept(&mut self.logits[..n], &drafts);
            if self.ngram {
                self.drafts = draft_ngram::search(&sequence.history, MAX_DRAFTS).drafts;
                record.ngram = self.drafts.len();
            }
        }
        self.records.push_back(record);
        Ok(())
    }

    fn draft(&mut self, drafts: usize) -> Result<()> {
        if self.drafter.is_none() {
            bail!("no drafter is loaded");
        }
        self.queued_draft = Some(drafts);
        Ok(())
    }

    fn set_drafts(&mut self, drafts: &[u32]) -> Result<()> {
        self.drafts = drafts.to_vec();
        Ok(())
    }

    fn record(&mut self) -> Result<Record> {
        self.records.pop_front().context("no pass was queued")
    }

    fn truncate(&mut self, n: usize) -> Result<()> {
        let sequence = self.sequence()?;
        sequence.truncate(n);
        let length = sequence.length;
        if let Some(d) = &mut self.drafter {
            d.length = d.length.min(length);
        }
        self.drafts.clear();
        self.queued_draft = None;
        Ok(())
    }

    fn counters(&self) -> Counters {
        Counters::default()
    }
}

impl Probe for Reference {
    fn measure(&mut self) -> Result<Costs> {
        let best = |times: Vec<f64>| times.into_iter().fold(f64::INFINITY, f64::min);
        let mut costs = Costs { verify: [0.0; MAX_DRAFTS + 1], draft: [0.0; MAX_DRAFTS] };
        // A few passes, and lines between them: here a pass takes as long as all of a GPU's.
        for (low, high) in [(1, 2), (2, 4), (4, MAX_DRAFTS + 1)] {
            if low == 1 {
                costs.verify[0] = best(self.time_verify(1, 0, 2)?);
            }
            let (from, to) = (costs.verify[low - 1], best(self.time_verify(high, 0, 2)?));
            (low + 1..=high)
                .for_each(|w| costs.verify[w - 1] = from + (to - from) * (w - low) as f64 / (high - low) as f64);
        }
        if self.drafter.is_some() {
            // Two rows of draft-extend are what a cycle usually has.
            let tokens = self.begin_timing()?;
            let mut draft =
                |drafts| self.time(Pass::Draft { width: MAX_DRAFTS + 1, drafts }, &tokens[..2], 0, 2).map(best);
            let (one, most) = (draft(1)?, draft(MAX_DRAFTS)?);
            costs.draft = std::array::from_fn(|i| one + (most - one) * i as f64 / (MAX_DRAFTS - 1) as f64);
        }
        Ok(costs)
    }

    fn time_verify(&mut self, width: usize, depth: usize, n: usize) -> Result<Vec<f64>> {
        let tokens = self.begin_timing()?;
        self.time(Pass::Verify { width }, &tokens[..width], depth, n)
    }

    fn profile(&mut self, depth: usize) -> Result<Vec<StepTime>> {
        let tokens = self.begin_timing()?;
        let mut kinds: Vec<StepTime> = Vec::new();
        const RUNS: usize = 5;
        for _ in 0..RUNS {
            let mut last = Instant::now();
            self.run(Pass::Verify { width: 1 }, &tokens[..1], depth, &mut |step, _, _| {
                let now = Instant::now();
                let (kind, ms, bytes) = (step.kind(), (now - last).as_secs_f64() * 1e3, step.bytes(1, depth, STORAGE));
                match kinds.iter_mut().find(|k| k.kind == kind) {
                    Some(k) => (k.count, k.ms, k.bytes) = (k.count + 1, k.ms + ms, k.bytes + bytes),
                    None => kinds.push(StepTime { kind, count: 1, ms, bytes }),
                }
                last = now;
            })?;
        }
        for k in &mut kinds {
            (k.count, k.ms, k.bytes) = (k.count / RUNS, k.ms / RUNS as f64, k.bytes / RUNS as u64);
        }
        Ok(kinds)
    }
}
