//! The CUDA backend: everything allocated and captured at start, then one graph replay per pass. Of several ranks each
//! is a Machine, with a Link to the others; all get the same calls in the same order (ranks/conductor.rs), hold the
//! same State, and choose the same tokens.
//!
//! The sequence lives in device memory (params.rs, State); the host queues passes and reads their records from a ring
//! in pinned memory. What a pass launches is made by lower/ and put on the stream by launch.rs; weights come from
//! weights.rs. What checks and tests ask of a machine stands in inspect.rs, what is measured in timing.rs.
use super::arena::Arena;
use super::device::{Gpu, Graph, Memory, Pinned};
use super::kernels::Kernels;
use super::launch::Launcher;
use super::lower::{lower, Choice, Setting, Sums, CATCH_UP, CATCH_UP_ROWS};
use super::op::Op;
use super::params::*;
use super::ranks::link::Link;
use crate::decode::{Backend, Counters, End, Limits, Record, Sampling, MAX_DRAFTS};
use crate::error::{internal, machine};
use crate::model::config::Config;
use crate::model::draft::DraftModel;
use crate::model::plan::{Pass, Plan, Ranks};
use crate::model::plan::{Storage, MAX_WIDTH, PREFILL_ROWS};
use anyhow::{bail, Context, Result};
use bytemuck::Zeroable;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// What the GPU stores: bf16 weights, bf16 keys and values.
pub const STORAGE: Storage = Storage { weight: 2, kv: 2, plain_kv_b: true };

/// Widths of the verify graphs: plain decode, every number of drafts, and the widest.
pub const WIDTHS: [usize; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 16];

/// A pass that gives no record for this long has hung.
const PATIENCE: Duration = Duration::from_secs(6);

#[derive(Clone)]
pub struct Options {
    pub context: usize,
    pub drafter: Option<DraftModel>,
    /// n-gram drafting.
    pub ngram: bool,
    /// Stop instead of running eagerly when a capture fails.
    pub require_graphs: bool,
}

/// One rank of several, measured by itself on one GPU: it loads that rank's share and computes with it, and its sums
/// lack the others' shares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slice {
    pub ranks: Ranks,
    /// Microseconds that a sum over ranks is on its way; None: there is nothing to wait for, and no step for it.
    pub comm_us: Option<f64>,
}

/// What there is a graph of: a pass, its context bucket in KV chunks, and the kind of choice.
pub type GraphKey = (Pass, usize, Choice);

pub struct Machine {
    // Graphs go before the memory that their kernels point at.
    pub(super) graphs: BTreeMap<GraphKey, Option<Graph>>,
    pub(super) plans: BTreeMap<Pass, Plan>,
    pub(super) config: Config,
    pub(super) context: usize,
    pub(super) kernels: Kernels,
    pub(super) arena: Arena,
    /// All that `arena` and the ring of records lie in.
    pub(super) _memory: Vec<Memory>,
    pub(super) ring: Pinned<u64>,
    pub(super) staging: Pinned<u8>,
    pub(super) row_counts: Pinned<i32>,
    pub(super) ranks: Ranks,
    pub(super) link: Option<Link>,
    pub(super) slice: Option<Slice>,
    pub(super) gpu: Gpu,
    /// Context buckets in KV chunks, ascending; the last covers the capacity.
    pub(super) buckets: Vec<usize>,
    /// Some attention is latent: chunks are those of kernels/mla.cu.
    pub(super) latent: bool,
    /// Passes queued since start; the record of pass n carries n.
    pub(super) passes: u32,
    /// Numbers and widths of verify passes whose record was not read.
    pub(super) queued: VecDeque<(u32, usize)>,
    /// Rows in the cache when all that was read is counted.
    pub(super) length: usize,
    /// What this request needs of sampling.
    pub(super) choice: Choice,
    pub(super) ngram: bool,
    /// Most rows that the drafter's cache may lack when all that was queued has run.
    pub(super) lag: usize,
    pub(super) counters: Counters,
    pub timings: StartTimings,
}

/// Milliseconds of the start, for `-v`.
#[derive(Clone, Copy, Debug, Default)]
pub struct StartTimings {
    pub weights_ms: f64,
    pub capture_ms: f64,
    pub n_graphs: usize,
    pub weight_bytes: usize,
    /// Read from the checkpoint for them.
    pub read_bytes: usize,
    pub kv_bytes: usize,
    pub other_bytes: usize,
}

impl Machine {
    /// Leaves everything to the end of the process, which is near: after the failure of one of several ranks a call
    /// that frees memory may wait, in the driver, for a kernel of any GPU that reaches it.
    pub(super) fn abandon(self) {
        std::mem::forget(self);
    }

    /// Waits for the other ranks. A rank that allocates, as captures do, may have to wait for kernels of its GPU, and a
    /// collective waits for all ranks: where one allocates, nothing runs.
    pub(super) fn meet(&self) -> Result<()> {
        self.check_link()?;
        self.link.iter().try_for_each(Link::barrier)
    }

    /// A collective that waited in vain went on with what was there: nothing after it counts.
    pub(super) fn check_link(&self) -> Result<()> {
        self.link.iter().try_for_each(Link::check)
    }

    /// Waits for all that was queued.
    pub(super) fn settle(&self) -> Result<()> {
        self.gpu.synchronize()?;
        self.check_link()
    }

    /// What a pass launches at an empty cache, for `-vv`: a line an op.
    pub fn listing(&self, pass: Pass) -> Result<String> {
        let plan = self.plan(pass);
        let ops = self.ops(pass, self.chunks(pass, plan.rows()), Choice::Greedy)?;
        let lines: Vec<String> = ops.iter().map(|op| format!("  {}", op.shown(plan))).collect();
        Ok(format!("{pass:?}, {} launches\n{}", ops.len(), lines.join("\n")))
    }

    /// What a pass launches whose positions lie in the first `chunks` KV chunks.
    pub(super) fn ops(&self, pass: Pass, chunks: usize, choice: Choice) -> Result<Vec<Op>> {
        let setting = setting(self.gpu.info().n_sms, self.link.as_ref(), self.slice, self.ngram);
        lower(self.plan(pass), &self.arena, &setting, chunks, choice)
    }

    pub(super) fn launcher(&self) -> Launcher<'_> {
        Launcher { gpu: &self.gpu, kernels: &self.kernels, link: self.link.as_ref() }
    }

    /// A pass launch by launch.
    pub(super) fn run_eagerly(&mut self, pass: Pass, chunks: usize, choice: Choice) -> Result<()> {
        self.launcher().run(self.plan(pass), &self.ops(pass, chunks, choice)?)?;
        self.passes = self.passes.wrapping_add(has_record(pass) as u32);
        Ok(())
    }

    /// The context bucket of a pass that ends at position `end`; only decode attention has one.
    pub(super) fn chunks(&self, pass: Pass, end: usize) -> usize {
        let last = *self.buckets.last().expect("never empty");
        match self.plan(pass).rows() <= MAX_WIDTH {
            true => *self.buckets.iter().find(|&&b| b >= attention_chunks(end, self.latent)).unwrap_or(&last),
            false => last,
        }
    }

    /// Queues a pass that ends at position `end`.
    pub(super) fn queue(&mut self, pass: Pass, end: usize) -> Result<()> {
        let chunks = self.chunks(pass, end);
        let choice = if let Pass::Verify { .. } = pass { self.choice } else { Choice::Greedy };
        match &self.graphs[&(pass, chunks, choice)] {
            Some(graph) => {
                self.gpu.replay(graph)?;
                self.passes = self.passes.wrapping_add(has_record(pass) as u32);
            }
            None => {
                self.run_eagerly(pass, chunks, choice)?;
                self.counters.eager += 1;
            }
        }
        Ok(())
    }

    /// Most rows in the cache when all that was queued has run.
    pub(super) fn bound(&self) -> usize {
        self.length + self.queued.iter().map(|&(_, width)| width).sum::<usize>()
    }

    /// Brings the drafter's cache to one row behind the target's.
    fn catch_up(&mut self) -> Result<()> {
        self.queue(CATCH_UP, self.bound())?;
        self.lag = 1;
        Ok(())
    }

    /// Writes the whole device state; `pass` continues the host's count. The stream must be idle.
    pub(super) fn set_state(&mut self, state: &State) -> Result<()> {
        let state = State { pass: self.passes, ..*state };
        self.stage(&[state], self.arena.state.at(0))
    }

    /// Copies through pinned memory and waits.
    pub(super) fn stage<T: bytemuck::NoUninit>(&mut self, data: &[T], to: u64) -> Result<()> {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        self.staging.slice_mut()[..bytes.len()].copy_from_slice(bytes);
        self.gpu.upload(&self.staging.slice_mut()[..bytes.len()], to)?;
        self.settle()
    }

    /// Waits for word `word` of the record of pass `pass`.
    fn word(&self, pass: u32, word: usize) -> Result<u32> {
        let at = (pass as usize % RECORDS) * RECORD_WORDS + word;
        let start = Instant::now();
        loop {
            let value = self.ring.read(at);
            if (value >> 32) as u32 == pass {
                return Ok(value as u32);
            }
            let waited = start.elapsed();
            self.check_link()?;
            if waited > PATIENCE {
                self.gpu.is_idle()?; // an error says what stopped it
                return Err(machine(format!(
                    "{} gave no result of pass {pass} in {} s",
                    self.gpu.info().name,
                    PATIENCE.as_secs()
                )));
            }
            // A pass takes tens of microseconds at least: after a short spin the core is given back.
            if waited > Duration::from_micros(50) {
                std::thread::sleep(Duration::from_micros(10));
            } else {
                std::hint::spin_loop();
            }
        }
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn ranks(&self) -> Ranks {
        self.ranks
    }

    pub fn link(&self) -> Option<&Link> {
        self.link.as_ref()
    }

    /// Passes with a record so far: says in errors how far a rank has come.
    pub fn passes(&self) -> u32 {
        self.passes
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub fn plan(&self, pass: Pass) -> &Plan {
        &self.plans[&pass]
    }
}

/// The kinds of choice that verify passes have graphs for, the one with most kernels last.
pub(super) fn choices(link: Option<&Link>) -> &'static [Choice] {
    match link {
        None => &[Choice::Greedy, Choice::Sampled],
        Some(_) => &[Choice::Greedy, Choice::Sampled, Choice::Filtered],
    }
}

/// What is the same for all passes of a rank.
pub(super) fn setting<'a>(n_sms: usize, link: Option<&'a Link>, slice: Option<Slice>, ngram: bool) -> Setting<'a> {
    let alone = Sums::Alone(slice.and_then(|slice| slice.comm_us).unwrap_or(0.0));
    Setting { n_sms, sums: link.map_or(alone, |link| Sums::Ranks(link.wire())), ngram }
}

/// Passes that move the sequence on write a record; a drafter's do not.
fn has_record(pass: Pass) -> bool {
    matches!(pass, Pass::Prefill { .. } | Pass::Verify { .. })
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Nothing may be running when memory goes; an error was reported where it happened. Other ranks reach the
        // link's memory only.
        let _ = self.gpu.synchronize();
    }
}

impl Backend for Machine {
    fn context(&self) -> usize {
        self.context
    }

    fn vocab(&self) -> usize {
        self.config.vocab
    }

    fn prefill_rows(&self) -> usize {
        PREFILL_ROWS[PREFILL_ROWS.len() - 1]
    }

    fn queue_depth(&self) -> usize {
        2
    }

    fn begin(&mut self, prompt: &[u32], keep: usize, sampling: &Sampling, limits: &Limits) -> Result<()> {
        self.settle()?;
        // Rows that the drafter lacks are made from features that the next prefill overwrites.
        while self.arena.drafter.is_some() {
            let state = self.gpu.download::<State>(self.arena.state.at(0), 1)?[0];
            if state.draft_length as usize >= keep.min(state.length as usize) {
                break;
            }
            self.queue(Pass::DraftPrefill { rows: PREFILL_ROWS[1] }, state.length as usize)?;
        }
        let mut counts = vec![0u32; self.config.vocab];
        prompt.iter().for_each(|&id| counts[id as usize] = IN_PROMPT);
        self.stage(&counts, self.arena.counts.at(0))?;
        let history: Vec<i32> = prompt.iter().map(|&id| id as i32).collect();
        self.stage(&history, self.arena.history.at(0))?;
        if !sampling.logit_bias.is_empty() {
            let mut bias = vec![0f32; self.config.vocab];
            sampling.logit_bias.iter().for_each(|&(id, x)| bias[id as usize] += x);
            self.stage(&bias, self.arena.bias.at(0))?;
        }
        let mut options = SamplingParams {
            seed: sampling.seed,
            top_p: (sampling.top_p as f64 * 4294967296.0).round() as u64,
            temperature: sampling.temperature,
            min_z: sampling.min_p.ln(),
            top_k: sampling.top_k.min(self.config.vocab) as i32,
            repetition_penalty: sampling.repetition_penalty,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            has_bias: !sampling.logit_bias.is_empty() as i32,
            min_tokens: sampling.min_tokens.min(i32::MAX as usize) as i32,
            max_tokens: limits.max_tokens.clamp(1, i32::MAX as usize) as i32,
            context: limits.context as i32,
            n_eos: limits.end_ids.len() as i32,
            ..SamplingParams::zeroed()
        };
        let room = options.eos.len();
        if limits.end_ids.len() > room {
            bail!("{} end tokens: at most {room} are supported", limits.end_ids.len());
        }
        limits.end_ids.iter().zip(&mut options.eos).for_each(|(&id, slot)| *slot = id as i32);
        self.stage(&[options], self.arena.options.at(0))?;
        let state = State {
            length: keep as i32,
            rows: 1,
            root: *prompt.last().context("the prompt is empty")? as i32,
            history_length: prompt.len() as i32,
            draft_length: keep as i32,
            ..State::zeroed()
        };
        self.set_state(&state)?;
        self.lag = 0;
        self.length = keep;
        let adjusts = sampling.repetition_penalty != 1.0
            || sampling.presence_penalty != 0.0
            || sampling.frequency_penalty != 0.0
            || sampling.min_tokens > 0
            || !sampling.logit_bias.is_empty();
        let filters = sampling.temperature != 0.0
            && (options.top_k > 0 && (options.top_k as usize) < self.config.vocab || sampling.top_p < 1.0);
        self.choice = match choices(self.link.as_ref()) {
            _ if sampling.temperature == 0.0 && !adjusts => Choice::Greedy,
            [.., Choice::Filtered] if filters => Choice::Filtered,
            _ => Choice::Sampled,
        };
        self.queued.clear();
        Ok(())
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<()> {
        let rows = *PREFILL_ROWS.iter().find(|&&rows| rows >= tokens.len()).context("a prefill chunk is too long")?;
        // The row count travels through one of a few pinned words: not before the pass that used it last has run.
        let slot = self.passes as usize % 4;
        if self.passes >= 4 {
            self.word(self.passes - 3, RECORD_COUNT)?;
        }
        self.row_counts.slice_mut()[slot] = tokens.len() as i32;
        self.gpu
            .upload(&self.row_counts.slice_mut()[slot..slot + 1], self.arena.state.at(crate::state_offset!(rows)))?;
        self.length += tokens.len();
        self.queue(Pass::Prefill { rows }, self.length)?;
        self.counters.prefill_replays += 1;
        if self.arena.drafter.is_some() {
            let rows = rows.max(PREFILL_ROWS[1]); // the narrowest one is CATCH_UP
            self.queue(Pass::DraftPrefill { rows }, self.length)?;
        }
        Ok(())
    }

    fn verify(&mut self, width: usize) -> Result<()> {
        if self.arena.drafter.is_some() && self.lag + width > CATCH_UP_ROWS {
            self.catch_up()?;
        }
        let end = self.bound() + width;
        self.queue(Pass::Verify { width }, end)?;
        self.lag += width;
        self.queued.push_back((self.passes, width));
        self.counters.verify_replays += 1;
        Ok(())
    }

    fn record(&mut self) -> Result<Record> {
        let (pass, _) = self.queued.pop_front().context("no pass was queued")?;
        let word = |i| self.word(pass, i);
        let n = word(RECORD_COUNT)? as usize;
        let tokens = (0..n).map(|i| word(RECORD_TOKENS + i)).collect::<Result<Vec<u32>>>()?;
        let end = match word(RECORD_REASON)? {
            0 => None,
            STOP_EOS => Some(End::Eos(*tokens.last().unwrap_or(&0))),
            STOP_LENGTH => Some(End::Length),
            STOP_CONTEXT => Some(End::Context),
            STOP_NO_CHOICE => {
                bail!("no token can be chosen: logit-bias and min-tokens ban all of them, or the logits are not finite")
            }
            other => return Err(internal(format!("unknown end {other} in a record"))),
        };
        let (accepted, drafted) = (word(RECORD_ACCEPTED)? as usize, word(RECORD_DRAFTS)? as usize);
        // The device takes a match as far as there is room; so does the engine.
        let ngram = if self.ngram && end.is_none() && self.word(pass, RECORD_MATCH)? > 0 { MAX_DRAFTS } else { 0 };
        self.length += n;
        self.check_link()?;
        Ok(Record { accepted, drafted, ngram, tokens, end })
    }

    fn draft(&mut self, drafts: usize) -> Result<()> {
        if self.arena.drafter.is_none() {
            bail!("no drafter is loaded");
        }
        if self.lag > MAX_DRAFTS + 1 {
            self.catch_up()?;
        }
        self.queue(Pass::Draft { width: MAX_DRAFTS + 1, drafts }, self.bound() + drafts)?;
        self.counters.draft_replays += 1;
        self.lag = 0;
        Ok(())
    }

    fn set_drafts(&mut self, drafts: &[u32]) -> Result<()> {
        self.settle()?;
        let mut state = self.gpu.download::<State>(self.arena.state.at(0), 1)?[0];
        state.n_drafts = drafts.len() as i32;
        state.rows = 1 + drafts.len() as i32;
        drafts.iter().zip(&mut state.drafts).for_each(|(&d, slot)| *slot = d as i32);
        self.set_state(&state)
    }

    fn truncate(&mut self, _n: usize) -> Result<()> {
        // The next `begin` writes the whole state; rows behind it are overwritten before they are read.
        self.settle()
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}
