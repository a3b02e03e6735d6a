//! What checks and tests ask of a Machine: passes at any position, step by step, and what they leave. Nothing of it
//! runs while text is made.
use super::arena::{Cache, Region};
use super::lower::{Choice, CATCH_UP};
use super::machine::{GraphKey, Machine};
use super::op::{Op, Part};
use super::params::*;
use crate::decode::{Backend, Limits, Sampling, MAX_DRAFTS};
use crate::model::plan::{BufferKind, BufferName, Owner, Pass, Shard, Step, MAX_WIDTH};
use anyhow::{bail, Context, Result};
use bytemuck::Zeroable;
use half::bf16;
use std::mem::{offset_of, size_of};

impl Machine {
    /// A pass over `tokens` at positions `position ..`, whatever was sampled before, as its graph or launch
    /// by launch; waits for it. Rows of the positions before are in the cache already.
    pub fn force(&mut self, pass: Pass, tokens: &[u32], position: usize, eager: bool) -> Result<()> {
        self.place(pass, tokens, position)?;
        let end = position + tokens.len();
        if eager {
            self.run_eagerly(pass, self.chunks(pass, end), Choice::Greedy)?;
        } else {
            self.queue(pass, end)?;
        }
        self.settle()
    }

    /// What every graph launches, in the order in which they were captured.
    pub fn lists(&self) -> Result<Vec<(GraphKey, Vec<Op>)>> {
        let list = |&(pass, chunks, choice): &GraphKey| Ok(((pass, chunks, choice), self.ops(pass, chunks, choice)?));
        self.graphs.keys().map(list).collect()
    }

    /// Every step of a pass but `Accept`, one launch at a time, and its output shown to `observe` once it is complete,
    /// as cpu::Reference::run does: the step, its output [rows, dim] and dim.
    pub fn run(
        &mut self,
        pass: Pass,
        tokens: &[u32],
        position: usize,
        observe: &mut dyn FnMut(&Step, &[f32], usize),
    ) -> Result<()> {
        self.place(pass, tokens, position)?;
        let plan = self.plan(pass);
        let ops = self.ops(pass, self.chunks(pass, position + tokens.len()), Choice::Greedy)?;
        for op in &ops {
            let Part::Step(step) = op.part else { continue };
            if plan.steps[step].output().is_none() {
                continue;
            }
            self.launcher().launch(plan, op)?;
            for step in op.completes.iter().map(|&i| &plan.steps[i]) {
                let buffer = plan.buffer(step.output().context("a step of a cache has an output")?);
                let n = tokens.len() * buffer.dim;
                let at = || self.arena.buffers[&buffer.name].at(0);
                let numbers = match buffer.kind {
                    BufferKind::Routes => self.routes(tokens.len(), buffer.dim / 2)?,
                    BufferKind::Logits | BufferKind::Stream => self.gpu.download(at(), n)?,
                    BufferKind::Activation | BufferKind::Feature => {
                        let bits = self.gpu.download::<u16>(at(), n)?;
                        bits.into_iter().map(|bits| bf16::from_bits(bits).to_f32()).collect()
                    }
                };
                observe(step, &numbers, buffer.dim);
            }
        }
        self.check_link()
    }

    /// What was chosen last, as `Step::Router` describes it: [rows, 2 * top_k].
    fn routes(&self, rows: usize, top_k: usize) -> Result<Vec<f32>> {
        let mut routes = vec![0.0; rows * 2 * top_k];
        for (slab, routes) in routes.chunks_mut(MAX_WIDTH * 2 * top_k).enumerate() {
            let at = self.arena.expert_work.at(slab * EXPERT_WORK_BYTES);
            let work = self.gpu.download::<ExpertWork>(at, 1)?[0];
            let items = self.gpu.download::<ExpertItem>(at + size_of::<ExpertWork>() as u64, work.n as usize)?;
            for item in items {
                for i in 0..item.n as usize {
                    routes[item.row[i] as usize * 2 * top_k + item.slot[i] as usize] = item.expert as f32;
                }
            }
            for (row, weights) in routes.chunks_exact_mut(2 * top_k).zip(work.weight) {
                row[top_k..].copy_from_slice(&weights[..top_k]);
            }
        }
        Ok(routes)
    }

    /// The drafter behind the passes before, one launch at a time: `observe` sees the number of each draft,
    /// from 1, and its logits, and says which target id takes the draft's place.
    pub fn run_draft(&mut self, drafts: usize, observe: &mut dyn FnMut(usize, &[f32]) -> u32) -> Result<()> {
        let pass = Pass::Draft { width: MAX_DRAFTS + 1, drafts };
        let plan = self.plan(pass);
        for op in &self.ops(pass, self.chunks(pass, self.bound() + drafts), Choice::Greedy)? {
            self.launcher().launch(plan, op)?;
            for step in op.completes.iter().map(|&i| &plan.steps[i]) {
                let Step::DraftToken { logits, vocab, draft } = step else { continue };
                let id = observe(*draft, &self.gpu.download(self.arena.buffer(plan, *logits), *vocab)?) as i32;
                self.gpu.upload(&[id], self.arena.state.at(offset_of!(State, drafts) + 4 * (draft - 1)))?;
                self.gpu.synchronize()?;
            }
        }
        self.lag = 0;
        Ok(())
    }

    /// What a pass should write becomes NaN in activations and logits, and 12.06 in the cache and in tapped
    /// features, where rows that are masked out are multiplied by zero.
    pub fn poison(&mut self) -> Result<()> {
        let fill = |region: &Region, byte| self.gpu.fill(region.at(0), byte, region.bytes);
        for (&name, buffer) in &self.arena.buffers {
            fill(buffer, if name == BufferName::FEATURES { 0x41 } else { 0xff })?;
        }
        fill(&self.arena.cache.keys, 0x41)?;
        fill(&self.arena.cache.values, 0x41)?;
        self.settle()
    }

    /// A greedy sequence without limits whose next pass has these rows.
    fn place(&mut self, pass: Pass, tokens: &[u32], position: usize) -> Result<()> {
        let plan = self.plans.get(&pass).with_context(|| format!("{pass:?} is not a pass of this machine"))?;
        if tokens.is_empty() || tokens.len() > plan.rows() || position + tokens.len() > self.context + MAX_WIDTH {
            bail!(
                "{} rows at position {position}: the plan has {} rows, the context {}",
                tokens.len(),
                plan.rows(),
                self.context
            );
        }
        let limits = Limits { end_ids: Vec::new(), max_tokens: usize::MAX, context: usize::MAX >> 33 };
        self.begin(&tokens[..1], 0, &Sampling::default(), &limits)?;
        let ids: Vec<i32> = tokens.iter().map(|&id| id as i32).collect();
        let mut state = State {
            length: position as i32,
            rows: ids.len() as i32,
            root: ids[0],
            history_length: position as i32 + 1,
            ..State::zeroed()
        };
        if let Pass::Prefill { .. } = pass {
            self.stage(&ids, self.arena.history.at(4 * position))?;
        } else {
            state.n_drafts = ids.len() as i32 - 1;
            state.drafts[..ids.len() - 1].copy_from_slice(&ids[1..]);
        }
        self.set_state(&state)
    }

    /// Logits of the first `rows` rows of the last verify pass, [rows, vocab], from all ranks; waits for
    /// it.
    pub fn logits(&self, rows: usize) -> Result<Vec<f32>> {
        let columns = Shard::of(&self.config, self.ranks)?.vocab;
        let own: Vec<f32> = self.gpu.download(self.arena.buffers[&BufferName::LOGITS].at(0), rows * columns)?;
        let Some(link) = &self.link else { return Ok(own) };
        let ranks = link.all_gather(bytemuck::cast_slice(&own))?;
        let mut all = Vec::with_capacity(rows * self.config.vocab);
        for row in 0..rows {
            for rank in &ranks {
                let row_bytes = rank.len() / rows;
                all.extend(
                    rank[row * row_bytes..][..row_bytes]
                        .chunks_exact(4)
                        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
                );
            }
        }
        Ok(all)
    }

    /// Keys and values of positions `0 .. n` as stored, bf16 bits: keys [layer][kv head][n][head_dim], then values
    /// [layer][kv head][head_dim][n], which a latent cache has not. Waits for the stream.
    pub fn kv_rows(&self, owner: Owner, n: usize) -> Result<Vec<u16>> {
        let (cache, pass) = match owner {
            Owner::Target => (&self.arena.cache, Pass::Verify { width: 1 }),
            Owner::Drafter => (&self.arena.drafter()?.cache, CATCH_UP),
        };
        let (capacity, kv) = (self.arena.capacity, self.plan(pass).kv);
        let [keys, values] = Cache::bytes(&kv, capacity).map(|bytes| bytes / 2);
        let (keys, values): (Vec<u16>, Vec<u16>) =
            (self.gpu.download(cache.keys.at(0), keys)?, self.gpu.download(cache.values.at(0), values)?);
        let mut rows: Vec<u16> =
            keys.chunks_exact(capacity * kv.head_dim).flat_map(|head| &head[..n * kv.head_dim]).copied().collect();
        rows.extend(values.chunks_exact(capacity).flat_map(|row| &row[..n]));
        Ok(rows)
    }
}
