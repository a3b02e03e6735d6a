//! The CUDA backend: everything allocated and captured at start, then one graph replay per pass. Of several ranks each
//! is a Machine, with a Link to the others; all get the same calls in the same order (ranks/conductor.rs), hold the same State,
//! and choose the same tokens.
//!
//! The sequence lives in device memory (params.rs, State); the host queues passes and reads their records from a ring
//! in pinned memory. What a pass launches is kernels.rs; weights come from weights.rs.
use super::device::{Gpu, Graph, Pinned};
use super::kernels::{
    attention_scratch, check, element_bytes, linear_blocks, norms, Arena, Cache, Choice, DraftArena, Kernels, Launcher,
    Norms,
};
use super::params::*;
use super::ranks::link::Link;
use super::weights::{Alias, Layout, Source};
use crate::decode::policy::Costs;
use crate::decode::{Backend, Counters, End, Limits, Record, Sampling, StepTime, MAX_DRAFTS};
use crate::error::{internal, machine};
use crate::model::config::Config;
use crate::model::draft::DraftModel;
use crate::model::plan::{self, BufferKind, Owner, Pass, Plan, Ranks, Shard, Step};
use crate::model::plan::{Storage, FEATURE_ROWS, MAX_WIDTH, PREFILL_ROWS};
use crate::model::role::{Role, WeightId};
use crate::model::weights::Weight;
use anyhow::{bail, Context, Result};
use bytemuck::Zeroable;
use half::bf16;
use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// What the GPU stores: bf16 weights, bf16 keys and values.
pub const STORAGE: Storage = Storage { weight: 2, kv: 2, plain_kv_b: true };

/// Widths of the verify graphs: plain decode, every number of drafts, and the widest.
pub const WIDTHS: [usize; 9] = [1, 2, 3, 4, 5, 6, 7, 8, 16];

/// The pass that brings the drafter's cache up while decoding goes on without drafts. Not used for prompts.
const CATCH_UP: Pass = Pass::DraftPrefill { rows: CATCH_UP_ROWS };
const CATCH_UP_ROWS: usize = PREFILL_ROWS[0];

const STATE_BYTES: usize = std::mem::size_of::<State>();

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
    /// For tests: captures of these passes fail.
    pub fail_capture: fn(Pass) -> bool,
}

/// One rank of several, measured by itself on one GPU: it loads that rank's share and computes with it, and its sums
/// lack the others' shares.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slice {
    pub ranks: Ranks,
    /// Microseconds that a sum over ranks is on its way; None: there is nothing to wait for, and no step for it.
    pub comm_us: Option<f64>,
}

pub struct Machine {
    // Graphs go before the memory that their kernels point at.
    graphs: BTreeMap<(Pass, usize, Choice), Option<Graph>>,
    plans: BTreeMap<Pass, (Plan, Norms)>,
    config: Config,
    context: usize,
    kernels: Kernels,
    arena: Arena,
    _weights: super::device::Memory,
    ring: Pinned<u64>,
    staging: Pinned<u8>,
    row_counts: Pinned<i32>,
    ranks: Ranks,
    link: Option<Link>,
    slice: Option<Slice>,
    gpu: Gpu,
    /// Context buckets in KV chunks, ascending; the last covers the capacity.
    buckets: Vec<usize>,
    /// Some attention is latent: chunks are those of kernels/mla.cu.
    latent: bool,
    /// Passes queued since start; the record of pass n carries n.
    passes: u32,
    /// Numbers and widths of verify passes whose record was not read.
    queued: VecDeque<(u32, usize)>,
    /// Rows in the cache when all that was read is counted.
    length: usize,
    /// What this request needs of sampling.
    choice: Choice,
    ngram: bool,
    /// Most rows that the drafter's cache may lack when all that was queued has run.
    lag: usize,
    counters: Counters,
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
    /// One rank.
    pub fn new(
        gpu: Gpu,
        config: Config,
        source: Source,
        options: Options,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Machine> {
        Machine::of_rank(gpu, None, config, source, options, progress)
    }

    /// One rank alone, for measurements.
    pub fn slice(
        gpu: Gpu,
        slice: Slice,
        config: Config,
        source: Source,
        options: Options,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Machine> {
        let (require_graphs, fail_capture) = (options.require_graphs, options.fail_capture);
        let mut machine = Machine::build(gpu, &mut None, Some(slice), config, source, options, progress)?;
        machine.capture(require_graphs, fail_capture).context("capture")?;
        Ok(machine)
    }

    /// One of several ranks: as many threads build theirs at the same time.
    pub fn of_rank(
        gpu: Gpu,
        mut link: Option<(Link, Ranks)>,
        config: Config,
        source: Source,
        options: Options,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Machine> {
        // The others learn of a failure before anything of this rank goes, which waits for them otherwise.
        let fail = |link: Option<&Link>, e: &anyhow::Error| link.iter().for_each(|link| link.fail(&format!("{e:#}")));
        let require_graphs = options.require_graphs;
        let fail_capture = options.fail_capture;
        let mut machine = Machine::build(gpu, &mut link, None, config, source, options, progress)
            .inspect_err(|e| fail(link.as_ref().map(|(link, _)| link), e))?;
        let captured = machine
            .capture(require_graphs, fail_capture)
            .inspect_err(|e| fail(machine.link.as_ref(), e))
            .context("capture");
        match captured {
            Ok(()) => Ok(machine),
            Err(e) if machine.link.is_none() => Err(e),
            Err(e) => {
                machine.abandon();
                Err(e)
            }
        }
    }

    /// Leaves everything to the end of the process, which is near: after the failure of one of several ranks a call
    /// that frees memory may wait, in the driver, for a kernel of any GPU that reaches it.
    pub(super) fn abandon(self) {
        std::mem::forget(self);
    }

    /// Everything but the graphs. The link stays where it is until nothing can fail.
    fn build(
        gpu: Gpu,
        link: &mut Option<(Link, Ranks)>,
        slice: Option<Slice>,
        config: Config,
        source: Source,
        mut options: Options,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Machine> {
        let ranks = slice.map(|slice| slice.ranks).or(link.as_ref().map(|(_, ranks)| *ranks)).unwrap_or(Ranks::ONE);
        let drafter = options.drafter.take();
        let taps = drafter.as_ref().map_or(&[][..], |d| &d.shape.taps);
        let passes = WIDTHS
            .map(|width| Pass::Verify { width })
            .into_iter()
            .chain(PREFILL_ROWS.map(|rows| Pass::Prefill { rows }));
        let mut plans = BTreeMap::new();
        for pass in passes {
            let plan = plan::target(&config, pass, ranks, taps)?;
            let plan = match slice {
                Some(slice) => plan.alone(slice.comm_us.is_some()),
                None => plan,
            };
            plans.insert(pass, plan);
        }
        if let Some(d) = &drafter {
            let prefill = PREFILL_ROWS.map(|rows| Pass::DraftPrefill { rows });
            let draft = (1..=MAX_DRAFTS).map(|drafts| Pass::Draft { width: MAX_DRAFTS + 1, drafts });
            for pass in prefill.into_iter().chain(draft) {
                plans
                    .insert(pass, plan::drafter(&d.shape, pass, if ranks.split_drafter { ranks } else { Ranks::ONE })?);
            }
        }
        for plan in plans.values() {
            let of = match (plan.pass, &drafter) {
                (Pass::Draft { .. } | Pass::DraftPrefill { .. }, Some(d)) => format!("drafter {}", d.name),
                _ => config.arch.clone(),
            };
            plan.steps.iter().try_for_each(check).context(of)?;
        }
        let plans: BTreeMap<Pass, (Plan, Norms)> = plans
            .into_iter()
            .map(|(pass, plan)| (pass, (norms(&plan), plan)))
            .map(|(pass, (n, p))| (pass, (p, n)))
            .collect();
        let shard = Shard::of(&config, ranks)?;
        let capacity = (options.context + 2 * MAX_WIDTH).next_multiple_of(1024);
        let kv = plans[&Pass::Verify { width: 1 }].0.kv;
        let kv_bytes: usize = Cache::bytes(&kv, capacity).iter().sum();
        let verify = &plans[&Pass::Verify { width: MAX_WIDTH }].0;
        let draft_plan = plans.get(&Pass::Draft { width: MAX_DRAFTS + 1, drafts: MAX_DRAFTS }).map(|(plan, _)| plan);
        let draft_kv = draft_plan.map(|plan| plan.kv);
        let draft_kv_bytes: usize = draft_kv.iter().flat_map(|kv| Cache::bytes(kv, capacity)).sum();
        let laid_out: Vec<&Plan> = std::iter::once(verify).chain(draft_plan).collect();
        let layout = Layout::of(&laid_out, config.vocab, aliases(&config, &source, drafter.as_ref(), ranks)?)?;

        let rows = PREFILL_ROWS[PREFILL_ROWS.len() - 1];
        let mut buffer_bytes: BTreeMap<&'static str, usize> = BTreeMap::new();
        // Routes are made and read in kernels of their own form.
        for buffer in plans.values().flat_map(|p| &p.0.buffers).filter(|buffer| buffer.kind != BufferKind::Routes) {
            let bytes = buffer_bytes.entry(buffer.name).or_default();
            *bytes = (*bytes).max(buffer.rows * buffer.dim * element_bytes(buffer.kind));
        }
        // Buffers that some step reads through a norm.
        let mut normed_dims: BTreeMap<&'static str, usize> = BTreeMap::new();
        let mut n_experts = 0;
        for (plan, _) in plans.values() {
            for step in &plan.steps {
                if let Step::Router(router) = step {
                    n_experts = n_experts.max(router.routing.n_experts);
                }
                let normed = step.inputs().iter().filter(|i| i.norm.is_some());
                normed_dims.extend(normed.map(|i| (plan.buffer(i.x).name, plan.buffer(i.x).dim)));
            }
        }
        let normed_bytes: usize = normed_dims.values().map(|dim| rows * (2 * dim + dim / 4)).sum();
        let latent = config.latent.is_some() || drafter.as_ref().is_some_and(|d| d.shape.latent.is_some());
        let chunks = attention_chunks(capacity, latent);
        if latent && chunks > LATENT_CHUNKS {
            bail!(
                "a context of {}: latent attention on the GPU goes up to 376,800 tokens; use a smaller --context",
                options.context
            );
        }
        let scratch = laid_out
            .iter()
            .flat_map(|plan| &plan.steps)
            .flat_map(|step| WIDTHS.map(|w| attention_scratch(step, w, chunks)));
        let [partials, counters] =
            scratch.fold([0, 0], |most, found| [most[0].max(4 * found[0]), most[1].max(4 * found[1])]);
        let (router_bytes, work_bytes) = match n_experts {
            0 => (0, 0),
            n => (rows * n * 4 * ROUTER_SPLITS, rows / MAX_WIDTH * EXPERT_WORK_BYTES),
        };
        let other = buffer_bytes.values().sum::<usize>()
            + normed_bytes
            + rows * 4
            + partials
            + router_bytes
            + work_bytes
            + SAMPLE_SCRATCH_BYTES
            + config.vocab * (MAX_WIDTH * 8 + 8)
            + 4 * capacity;
        // Ranks that share a GPU look before any of them takes memory.
        let sharing = link.as_ref().map_or(1, |(link, _)| link.sharing());
        let needed = sharing * (layout.bytes() + kv_bytes + draft_kv_bytes + other + (128 << 20));
        let (free, total) = gpu.memory()?;
        link.iter().try_for_each(|(link, _)| link.barrier())?;
        if needed > free {
            let gb = |n: usize| n as f64 / 1e9;
            return Err(machine(format!(
                "{}: {:.1} GB are needed (weights {:.1}, cache for {} tokens {:.1}, work {:.1}), {:.1} of {:.1} GB are free: use a smaller --context, or another GPU",
                gpu.info().name, gb(needed), gb(layout.bytes()), options.context, gb(kv_bytes), gb(other), gb(free), gb(total)
            )));
        }
        let mut timings =
            StartTimings { weight_bytes: layout.bytes(), kv_bytes, other_bytes: other, ..Default::default() };

        let kernels = Kernels::load(&gpu)?;
        let start = Instant::now();
        let placed = layout.place(&gpu, &kernels, &source, drafter.as_ref().map(|d| &d.weights), ranks, progress)?;
        timings.weights_ms = start.elapsed().as_secs_f64() * 1e3;
        timings.read_bytes = placed.read_bytes;
        let mut buffers = BTreeMap::new();
        for (name, bytes) in buffer_bytes {
            buffers.insert(name, gpu.allocate(bytes)?);
        }
        let (mut normed, mut squares, mut inverse_rms) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for (name, dim) in normed_dims {
            inverse_rms.insert(name, gpu.allocate(rows * 4)?);
            normed.insert(name, gpu.allocate(rows * dim * 2)?);
            squares.insert(name, gpu.allocate(rows * dim.div_ceil(16) * 4)?);
        }
        let drafter = match &drafter {
            None => None,
            Some(d) => {
                let ids = |map: &Vec<u32>| gpu.store(&map.iter().map(|&id| id as i32).collect::<Vec<i32>>());
                Some(DraftArena {
                    cache: Cache::new(
                        &gpu,
                        &draft_kv.expect("a drafter has a plan"),
                        capacity,
                        &d.rope,
                        d.shape.rope_dim(),
                    )?,
                    ring: gpu.allocate(2 * FEATURE_ROWS * d.shape.taps.len() * d.shape.target_hidden)?,
                    rows: gpu.allocate(std::mem::size_of::<DraftRows>())?,
                    target_ids: d.map.as_ref().map(ids).transpose()?,
                })
            }
        };
        let ring = gpu.pinned(RECORDS * RECORD_WORDS)?;
        let arena = Arena {
            matrices: placed.matrices,
            absorbed: placed.absorbed,
            vectors: placed.vectors,
            buffers,
            normed,
            squares,
            inverse_rms,
            cache: Cache::new(&gpu, &kv, capacity, &config.rope, config.rope_dim())?,
            capacity,
            drafter,
            draft_scratch: gpu.allocate(DRAFT_SCRATCH_BYTES)?,
            router_sums: gpu.allocate(router_bytes)?,
            expert_work: gpu.allocate(work_bytes)?,
            attention_partials: gpu.allocate(partials)?,
            attention_counters: gpu.allocate(counters)?,
            state: gpu.allocate(std::mem::size_of::<State>())?,
            options: gpu.allocate(std::mem::size_of::<SamplingParams>())?,
            sample_scratch: gpu.allocate(SAMPLE_SCRATCH_BYTES)?,
            sample_list: gpu.allocate(MAX_WIDTH * shard.vocab * 8)?,
            max_value: gpu.allocate(4 * MAX_WIDTH * linear_blocks(usize::MAX, gpu.info().n_sms))?,
            max_id: gpu.allocate(4 * MAX_WIDTH * linear_blocks(usize::MAX, gpu.info().n_sms))?,
            counts: gpu.allocate(4 * config.vocab)?,
            bias: gpu.allocate(4 * config.vocab)?,
            history: gpu.allocate(4 * capacity)?,
            ring: ring.device(),
        };
        let mut buckets: Vec<usize> =
            [2048, 16384].into_iter().filter(|&n| n < capacity).map(|n| attention_chunks(n, latent)).collect();
        buckets.push(chunks);
        Ok(Machine {
            graphs: BTreeMap::new(),
            plans,
            context: options.context,
            kernels,
            arena,
            _weights: placed.memory,
            ring,
            staging: gpu.pinned((4 * capacity).max(4 * config.vocab).max(1024))?,
            row_counts: gpu.pinned(4)?,
            ranks,
            gpu,
            config,
            buckets,
            latent,
            passes: 0,
            queued: VecDeque::new(),
            length: 0,
            choice: Choice::Greedy,
            ngram: options.ngram,
            lag: 0,
            counters: Counters::default(),
            timings,
            link: link.take().map(|(link, _)| link),
            slice,
        })
    }

    /// The kinds of choice that verify passes have graphs for.
    fn choices(&self) -> &'static [Choice] {
        match self.link {
            None => &[Choice::Greedy, Choice::Sampled],
            Some(_) => &[Choice::Greedy, Choice::Sampled, Choice::Filtered],
        }
    }

    /// Waits for the other ranks. A rank that allocates, as captures do, may have to wait for kernels of its GPU, and a
    /// collective waits for all ranks: where one allocates, nothing runs.
    fn meet(&self) -> Result<()> {
        self.check_link()?;
        self.link.iter().try_for_each(Link::barrier)
    }

    /// A collective that waited in vain went on with what was there: nothing after it counts.
    fn check_link(&self) -> Result<()> {
        self.link.iter().try_for_each(Link::check)
    }

    /// Waits for all that was queued.
    fn settle(&self) -> Result<()> {
        self.gpu.synchronize()?;
        self.check_link()
    }

    /// Every graph, after one eager run of every pass: first launches load code and must not fall into a capture.
    fn capture(&mut self, require_graphs: bool, fail_capture: fn(Pass) -> bool) -> Result<()> {
        let start = Instant::now();
        let choices = self.choices();
        self.meet()?;
        self.set_state(&State { done: 1, rows: 1, ..State::zeroed() })?;
        let last = *self.buckets.last().expect("never empty");
        let passes: Vec<Pass> = self.plans.keys().copied().collect();
        for &pass in &passes {
            self.launcher(pass, last, *choices.last().expect("never empty")).run()?;
            self.passes += has_record(pass) as u32;
            self.settle()?;
        }
        self.meet()?;
        for pass in passes {
            // Only decode attention has a grid that depends on the context.
            let decode = self.plans[&pass].0.rows() <= MAX_WIDTH;
            let choices = if let Pass::Verify { .. } = pass { choices } else { &[Choice::Greedy] };
            let buckets = if decode { self.buckets.clone() } else { vec![last] };
            let mut warned = false;
            for (chunks, &choice) in buckets.into_iter().flat_map(|b| choices.iter().map(move |c| (b, c))) {
                let launcher = self.launcher(pass, chunks, choice);
                let captured = if fail_capture(pass) {
                    Err(anyhow::anyhow!("refused by the test"))
                } else {
                    self.gpu.capture(|| launcher.run())
                };
                let graph = match captured {
                    Ok(graph) => Some(graph),
                    Err(e) if require_graphs => {
                        return Err(machine(format!("the graph of {pass:?} was not captured: {e:#}")))
                    }
                    Err(e) => {
                        if !std::mem::replace(&mut warned, true) {
                            eprintln!(
                                "warning: the graph of {pass:?} was not captured ({e:#}); it runs launch by launch, with the same tokens"
                            );
                        }
                        None
                    }
                };
                self.graphs.insert((pass, chunks, choice), graph);
            }
        }
        self.meet()?;
        self.timings.capture_ms = start.elapsed().as_secs_f64() * 1e3;
        self.timings.n_graphs = self.graphs.len();
        Ok(())
    }

    fn launcher(&self, pass: Pass, chunks: usize, choice: Choice) -> Launcher<'_> {
        let (plan, norms) = &self.plans[&pass];
        // A pass that catches up in the middle of decoding leaves a row for the extend; one behind a prompt chunk does
        // not.
        let behind = (pass == CATCH_UP) as usize;
        Launcher {
            gpu: &self.gpu,
            kernels: &self.kernels,
            arena: &self.arena,
            plan,
            norms,
            link: self.link.as_ref(),
            comm_us: self.slice.and_then(|slice| slice.comm_us).unwrap_or(0.0),
            full_edge: Cell::new(false),
            chunks,
            choice,
            ngram: self.ngram,
            behind,
        }
    }

    /// The context bucket of a pass that ends at position `end`; only decode attention has one.
    fn chunks(&self, pass: Pass, end: usize) -> usize {
        let last = *self.buckets.last().expect("never empty");
        match self.plans[&pass].0.rows() <= MAX_WIDTH {
            true => *self.buckets.iter().find(|&&b| b >= attention_chunks(end, self.latent)).unwrap_or(&last),
            false => last,
        }
    }

    /// A sequence of distinct random tokens with `depth` rows in the cache and a pass of `width` rows ahead, for
    /// timing.
    fn begin_timing(&mut self, width: usize, depth: usize) -> Result<()> {
        let limits = Limits { end_ids: Vec::new(), max_tokens: usize::MAX, context: usize::MAX >> 33 };
        self.begin(&[1], 0, &Sampling::default(), &limits)?;
        let id = |i: usize| ((i + 1) * 7919 % self.config.vocab) as i32;
        let mut state =
            State { length: depth as i32, rows: width as i32, root: id(0), history_length: 1, ..State::zeroed() };
        state.n_drafts = width as i32 - 1;
        (1..width).for_each(|i| state.drafts[i - 1] = id(i));
        self.set_state(&state)?;
        // Every timed replay starts from this state again.
        self.staging.slice_mut()[..STATE_BYTES]
            .copy_from_slice(bytemuck::bytes_of(&State { pass: self.passes, ..state }));
        Ok(())
    }

    /// Milliseconds of each of `n` replays of these graphs, one behind the other, from the state that `begin_timing`
    /// staged, after two to warm up.
    fn time_replays(&self, graphs: &[&Graph], n: usize) -> Result<Vec<f64>> {
        let mut events = Vec::new();
        for _ in 0..n + 2 {
            let (start, end) = (self.gpu.event()?, self.gpu.event()?);
            self.gpu.upload(&self.staging.slice()[..STATE_BYTES], self.arena.state.at(0))?;
            self.gpu.record(&start)?;
            graphs.iter().try_for_each(|graph| self.gpu.replay(graph))?;
            self.gpu.record(&end)?;
            events.push((start, end));
        }
        self.settle()?;
        events[2..].iter().map(|(start, end)| Ok(start.ms_until(end)? as f64)).collect()
    }

    /// Queues a pass that ends at position `end`.
    fn queue(&mut self, pass: Pass, end: usize) -> Result<()> {
        let chunks = self.chunks(pass, end);
        let choice = if let Pass::Verify { .. } = pass { self.choice } else { Choice::Greedy };
        match &self.graphs[&(pass, chunks, choice)] {
            Some(graph) => self.gpu.replay(graph)?,
            None => {
                self.launcher(pass, chunks, choice).run()?;
                self.counters.eager += 1;
            }
        }
        self.passes = self.passes.wrapping_add(has_record(pass) as u32);
        Ok(())
    }

    /// Most rows in the cache when all that was queued has run.
    fn bound(&self) -> usize {
        self.length + self.queued.iter().map(|&(_, width)| width).sum::<usize>()
    }

    /// Brings the drafter's cache to one row behind the target's.
    fn catch_up(&mut self) -> Result<()> {
        self.queue(CATCH_UP, self.bound())?;
        self.lag = 1;
        Ok(())
    }

    /// Writes the whole device state; `pass` continues the host's count. The stream must be idle.
    fn set_state(&mut self, state: &State) -> Result<()> {
        let state = State { pass: self.passes, ..*state };
        self.stage(&[state], self.arena.state.at(0))
    }

    /// Copies through pinned memory and waits.
    fn stage<T: bytemuck::NoUninit>(&mut self, data: &[T], to: u64) -> Result<()> {
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

    /// For checks: a pass over `tokens` at positions `position ..`, whatever was sampled before, as its graph or launch
    /// by launch; waits for it. Rows of the positions before are in the cache already.
    pub fn force(&mut self, pass: Pass, tokens: &[u32], position: usize, eager: bool) -> Result<()> {
        self.place(pass, tokens, position)?;
        let end = position + tokens.len();
        if eager {
            self.launcher(pass, self.chunks(pass, end), Choice::Greedy).run()?;
            self.passes = self.passes.wrapping_add(has_record(pass) as u32);
        } else {
            self.queue(pass, end)?;
        }
        self.settle()
    }

    /// For checks: every step of a pass but `Accept`, one launch at a time, and its output shown to `observe`, as
    /// cpu::Reference::run does: the step, its output [rows, dim] and dim.
    pub fn run(
        &mut self,
        pass: Pass,
        tokens: &[u32],
        position: usize,
        observe: &mut dyn FnMut(&Step, &[f32], usize),
    ) -> Result<()> {
        self.place(pass, tokens, position)?;
        let launcher = self.launcher(pass, self.chunks(pass, position + tokens.len()), Choice::Greedy);
        for (i, step) in launcher.plan.steps.iter().enumerate() {
            let Some(out) = step.output() else { continue };
            launcher.step(i).with_context(|| format!("step {}", step.name()))?;
            if let Step::LatentAttend(_) = step {
                launcher.step(i + 1)?; // folds what was attended to
            }
            if let Step::Router(_) = step {
                launcher.step(i + 1)?; // chooses
            }
            let buffer = launcher.plan.buffer(out);
            let n = tokens.len() * buffer.dim;
            let at = self.arena.buffers.get(buffer.name).map_or(0, |memory| memory.at(0));
            let numbers = match buffer.kind {
                BufferKind::Routes => self.routes(tokens.len(), buffer.dim / 2)?,
                BufferKind::Logits | BufferKind::Stream => self.gpu.download(at, n)?,
                BufferKind::Activation | BufferKind::Feature => {
                    self.gpu.download::<u16>(at, n)?.into_iter().map(|bits| bf16::from_bits(bits).to_f32()).collect()
                }
            };
            observe(step, &numbers, buffer.dim);
        }
        self.check_link()
    }

    /// What was chosen last, as `Step::Router` describes it: [rows, 2 * top_k].
    fn routes(&self, rows: usize, top_k: usize) -> Result<Vec<f32>> {
        let mut routes = vec![0.0; rows * 2 * top_k];
        for (slab, routes) in routes.chunks_mut(MAX_WIDTH * 2 * top_k).enumerate() {
            let at = self.arena.expert_work.at(slab * EXPERT_WORK_BYTES);
            let work = self.gpu.download::<ExpertWork>(at, 1)?[0];
            let items =
                self.gpu.download::<ExpertItem>(at + std::mem::size_of::<ExpertWork>() as u64, work.n as usize)?;
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

    /// For checks: the drafter behind the passes before, one launch at a time: `observe` sees the number of each draft,
    /// from 1, and its logits, and says which target id takes the draft's place.
    pub fn run_draft(&mut self, drafts: usize, observe: &mut dyn FnMut(usize, &[f32]) -> u32) -> Result<()> {
        let pass = Pass::Draft { width: MAX_DRAFTS + 1, drafts };
        let launcher = self.launcher(pass, self.chunks(pass, self.bound() + drafts), Choice::Greedy);
        launcher.begin()?;
        for (i, step) in launcher.plan.steps.iter().enumerate() {
            launcher.step(i).with_context(|| format!("step {}", step.name()))?;
            if let Step::DraftToken { logits, vocab, draft } = step {
                let logits = self.gpu.download(self.arena.buffers[launcher.plan.buffer(*logits).name].at(0), *vocab)?;
                let id = observe(*draft, &logits) as i32;
                self.gpu.upload(&[id], self.arena.state.at(crate::state_offset!(drafts) + 4 * (draft - 1)))?;
                self.gpu.synchronize()?;
            }
        }
        self.lag = 0;
        Ok(())
    }

    /// For checks: median microseconds that a verify pass of `width` rows and a draft pass queued behind it take, as
    /// two graphs and as one graph of both: the difference is what the GPU idles between two graphs more than between
    /// two kernels.
    pub fn time_cycle(&mut self, width: usize, drafts: usize, n: usize) -> Result<[f64; 2]> {
        self.begin_timing(width, 0)?;
        let passes = [Pass::Verify { width }, Pass::Draft { width: MAX_DRAFTS + 1, drafts }];
        let chunks = self.chunks(passes[0], width);
        let both = self
            .gpu
            .capture(|| passes.iter().try_for_each(|&pass| self.launcher(pass, chunks, Choice::Greedy).run()))?;
        let apart: Option<Vec<&Graph>> =
            passes.iter().map(|&pass| self.graphs[&(pass, chunks, Choice::Greedy)].as_ref()).collect();
        let apart = apart.context("the graph was not captured")?;
        let median = |mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            1e3 * times[times.len() / 2]
        };
        Ok([median(self.time_replays(&apart, n)?), median(self.time_replays(&[&both], n)?)])
    }

    /// For checks: what a pass should write becomes NaN in activations and logits, and 12.06 in the cache and in tapped
    /// features, where rows that are masked out are multiplied by zero.
    pub fn poison(&mut self) -> Result<()> {
        for (&name, memory) in &self.arena.buffers {
            self.gpu.fill(memory.at(0), if name == "features" { 0x41 } else { 0xff }, memory.bytes())?;
        }
        for memory in [&self.arena.cache.keys, &self.arena.cache.values] {
            self.gpu.fill(memory.at(0), 0x41, memory.bytes())?;
        }
        self.settle()
    }

    /// A greedy sequence without limits whose next pass has these rows.
    fn place(&mut self, pass: Pass, tokens: &[u32], position: usize) -> Result<()> {
        let plan = &self.plans.get(&pass).with_context(|| format!("{pass:?} is not a pass of this machine"))?.0;
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

    /// For checks: logits of the first `rows` rows of the last verify pass, [rows, vocab], from all ranks; waits for
    /// it.
    pub fn logits(&self, rows: usize) -> Result<Vec<f32>> {
        let columns = Shard::of(&self.config, self.ranks)?.vocab;
        let own: Vec<f32> = self.gpu.download(self.arena.buffers["logits"].at(0), rows * columns)?;
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
            Owner::Drafter => (&self.arena.drafter.as_ref().context("no drafter is loaded")?.cache, CATCH_UP),
        };
        let (capacity, kv) = (self.arena.capacity, self.plans[&pass].0.kv);
        let [keys, values] = Cache::bytes(&kv, capacity).map(|bytes| bytes / 2);
        let (keys, values): (Vec<u16>, Vec<u16>) =
            (self.gpu.download(cache.keys.at(0), keys)?, self.gpu.download(cache.values.at(0), values)?);
        let mut rows: Vec<u16> =
            keys.chunks_exact(capacity * kv.head_dim).flat_map(|head| &head[..n * kv.head_dim]).copied().collect();
        rows.extend(values.chunks_exact(capacity).flat_map(|row| &row[..n]));
        Ok(rows)
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
        &self.plans[&pass].0
    }
}

/// Passes that move the sequence on write a record; a drafter's do not.
fn has_record(pass: Pass) -> bool {
    matches!(pass, Pass::Prefill { .. } | Pass::Verify { .. })
}

/// Weights that are another weight's tensor, or rows of it: they need no memory of their own.
fn aliases(config: &Config, source: &Source, drafter: Option<&DraftModel>, ranks: Ranks) -> Result<Vec<Alias>> {
    let id = |role| WeightId::new(role, None);
    let mut aliases = Vec::new();
    if config.tied {
        aliases.push(Alias { id: id(Role::Head), of: id(Role::Embed), first_row: Shard::of(config, ranks)?.first_id });
    }
    if let (Some(drafter), Source::Random(_)) = (drafter, source) {
        let same = drafter.shape.hidden == config.hidden;
        aliases.extend(same.then(|| Alias { id: id(Role::DraftEmbed), of: id(Role::Embed), first_row: 0 }));
    }
    if let (Some(drafter), Source::Checkpoint(target)) = (drafter, source) {
        let same_tensor =
            |a: Option<&Weight>, b: Option<&Weight>| a.zip(b).is_some_and(|(a, b)| a.parts[0].is(&b.parts[0]));
        // The drafter's head is whole on every rank; of several ranks, none has the target's whole head.
        let whole: &[Role] = if ranks.count == 1 && !config.tied { &[Role::Embed, Role::Head] } else { &[Role::Embed] };
        for role in [Role::DraftEmbed, Role::DraftHead] {
            let same = whole.iter().find(|&&r| same_tensor(target.find(id(r)), drafter.weights.find(id(role))));
            aliases.extend(same.map(|&r| Alias { id: id(role), of: id(r), first_row: 0 }));
        }
    }
    Ok(aliases)
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
        self.choice = match self.choices() {
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

    fn measure(&mut self) -> Result<Costs> {
        let mut costs = Costs { verify: [0.0; MAX_DRAFTS + 1], draft: [0.0; MAX_DRAFTS] };
        for width in 1..=MAX_DRAFTS + 1 {
            let mut times = self.time_verify(width, 0, 9)?;
            times.sort_by(f64::total_cmp);
            costs.verify[width - 1] = times[4];
        }
        if self.arena.drafter.is_some() {
            for drafts in 1..=MAX_DRAFTS {
                self.begin_timing(1, MAX_DRAFTS + 1)?;
                let pass = Pass::Draft { width: MAX_DRAFTS + 1, drafts };
                let graph = self.graphs[&(pass, self.chunks(pass, 2 * MAX_DRAFTS), Choice::Greedy)]
                    .as_ref()
                    .context("the graph was not captured")?;
                let mut times = self.time_replays(&[graph], 9)?;
                times.sort_by(f64::total_cmp);
                costs.draft[drafts - 1] = times[4];
            }
        }
        Ok(costs)
    }

    fn time_verify(&mut self, width: usize, depth: usize, n: usize) -> Result<Vec<f64>> {
        self.begin_timing(width, depth)?;
        let pass = Pass::Verify { width };
        let chunks = self.chunks(pass, depth + width);
        let graph = self.graphs[&(pass, chunks, Choice::Greedy)].as_ref().context("the graph was not captured")?;
        self.time_replays(&[graph], n)
    }

    fn experts_used(&mut self, width: usize, depth: usize) -> Result<Option<f64>> {
        self.begin_timing(width, depth)?;
        let pass = Pass::Verify { width };
        let launcher = self.launcher(pass, self.chunks(pass, depth + width), Choice::Greedy);
        let mut used = Vec::new();
        for (i, step) in launcher.plan.steps.iter().enumerate() {
            launcher.step(i).with_context(|| format!("step {}", step.name()))?;
            if let Step::ExpertsUp(_) = step {
                used.push(self.gpu.download::<ExpertWork>(self.arena.expert_work.at(0), 1)?[0].n as f64);
            }
        }
        self.passes = self.passes.wrapping_add(1); // Accept has written a record
        self.settle()?;
        Ok((!used.is_empty()).then(|| used.iter().sum::<f64>() / used.len() as f64))
    }

    fn profile(&mut self, depth: usize) -> Result<Vec<StepTime>> {
        const RUNS: usize = 30;
        self.begin_timing(1, depth)?;
        let pass = Pass::Verify { width: 1 };
        let launcher = self.launcher(pass, self.chunks(pass, depth + 1), Choice::Greedy);
        let median = |skip: Option<&str>| -> Result<f64> {
            self.meet()?;
            let graph = self.gpu.capture(|| launcher.run_without(skip))?;
            self.meet()?;
            let mut times = self.time_replays(&[&graph], RUNS)?;
            self.meet()?; // before the graph goes
            times.sort_by(f64::total_cmp);
            Ok(times[RUNS / 2])
        };
        // The price of a step in a chain whose launches overlap is what leaving it out saves.
        let whole = median(None)?;
        let mut kinds: Vec<StepTime> = Vec::new();
        for step in &launcher.plan.steps {
            let bytes = step.bytes(1, depth, STORAGE);
            match kinds.iter_mut().find(|k| k.kind == step.kind()) {
                Some(k) => (k.count, k.bytes) = (k.count + 1, k.bytes + bytes),
                None => {
                    kinds.push(StepTime { kind: step.kind(), count: 1, ms: whole - median(Some(&step.kind()))?, bytes })
                }
            }
        }
        let seen: f64 = kinds.iter().map(|k| k.ms).sum();
        kinds.push(StepTime { kind: "overlap and launch".into(), count: 1, ms: whole - seen, bytes: 0 });
        Ok(kinds)
    }

    fn truncate(&mut self, _n: usize) -> Result<()> {
        // The next `begin` writes the whole state; rows behind it are overwritten before they are read.
        self.settle()
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}
