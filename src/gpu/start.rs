//! How a Machine comes to be: its plans, whether there are kernels for all they ask, memory, weights, and every graph.
use super::arena::{Region, Sizes};
use super::device::Gpu;
use super::kernels::Kernels;
use super::lower::{lower, Choice, Setting, Sums};
use super::machine::{choices, setting, Machine, Options, Slice, StartTimings, WIDTHS};
use super::params::*;
use super::ranks::link::Link;
use super::weights::{Alias, Layout, Source};
use crate::decode::{Counters, MAX_DRAFTS};
use crate::error::machine;
use crate::model::config::Config;
use crate::model::draft::DraftModel;
use crate::model::plan::{self, Pass, Plan, Ranks, Shard, MAX_WIDTH, PREFILL_ROWS};
use crate::model::role::{Role, WeightId};
use crate::model::weights::Weight;
use anyhow::{Context, Result};
use bytemuck::Zeroable;
use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

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
        let require_graphs = options.require_graphs;
        let mut machine = Machine::build(gpu, &mut None, Some(slice), config, source, options, progress)?;
        machine.capture(require_graphs).context("capture")?;
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
        let mut machine = Machine::build(gpu, &mut link, None, config, source, options, progress)
            .inspect_err(|e| fail(link.as_ref().map(|(link, _)| link), e))?;
        let captured =
            machine.capture(require_graphs).inspect_err(|e| fail(machine.link.as_ref(), e)).context("capture");
        match captured {
            Ok(()) => Ok(machine),
            Err(e) if machine.link.is_none() => Err(e),
            Err(e) => {
                machine.abandon();
                Err(e)
            }
        }
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
        let (drafter, other) = (options.drafter.take(), link.as_ref().map(|(link, _)| link));
        let plans = plans(&config, drafter.as_ref(), ranks, slice)?;
        let last = |pass: fn(&Pass) -> bool| plans.iter().rev().find(|(p, _)| pass(p)).map(|(_, plan)| plan);
        let largest =
            [last(|pass| matches!(pass, Pass::Verify { .. })), last(|pass| matches!(pass, Pass::Draft { .. }))];
        let largest: Vec<&Plan> = largest.into_iter().flatten().collect();
        let aliases = aliases(&config, &source, drafter.as_ref(), ranks)?;
        let layout = Layout::of(&largest, config.vocab, aliases).with_context(|| config.arch.clone())?;
        let shard = Shard::of(&config, ranks)?;
        let sizes = Sizes::of(&config, drafter.as_ref(), &plans, shard, options.context, gpu.info().n_sms)?;
        let setting = setting(gpu.info().n_sms, other, slice, options.ngram);
        find_kernels(&config, drafter.as_ref(), &plans, &sizes, &layout, &setting)?;
        let timings = StartTimings {
            weight_bytes: layout.bytes(),
            kv_bytes: sizes.target_kv_bytes(),
            other_bytes: sizes.work_bytes(),
            ..Default::default()
        };
        make_room(&gpu, other, timings, sizes.kv_bytes(), options.context)?;

        let kernels = Kernels::load(&gpu)?;
        let start = Instant::now();
        let placed = layout.place(&gpu, &kernels, &source, drafter.as_ref().map(|d| &d.weights), ranks, progress)?;
        let weights_ms = start.elapsed().as_secs_f64() * 1e3;
        let timings = StartTimings { weights_ms, read_bytes: placed.read_bytes, ..timings };
        let ring = gpu.pinned(RECORDS * RECORD_WORDS)?;
        let mut memory = vec![placed.memory];
        let arena = sizes.place(placed.weights, ring.device(), &mut |_, bytes| {
            let taken = gpu.allocate(bytes)?;
            let region = Region { start: taken.at(0), bytes: taken.bytes() };
            memory.push(taken);
            Ok(region)
        })?;
        let frequencies = config.rope.inverse_frequencies(config.rope_dim());
        gpu.upload(&frequencies, arena.cache.inverse_frequencies.at(0))?;
        if let (Some(d), Some(placed)) = (&drafter, &arena.drafter) {
            let frequencies = d.rope.inverse_frequencies(d.shape.rope_dim());
            gpu.upload(&frequencies, placed.cache.inverse_frequencies.at(0))?;
            if let (Some(map), Some(ids)) = (&d.map, placed.target_ids) {
                gpu.upload(map, ids.at(0))?;
            }
            gpu.synchronize()?; // before what was copied goes
        }
        gpu.synchronize()?;
        let (capacity, latent) = (sizes.capacity, sizes.latent);
        let mut buckets: Vec<usize> =
            [2048, 16384].into_iter().filter(|&n| n < capacity).map(|n| attention_chunks(n, latent)).collect();
        buckets.push(sizes.chunks);
        Ok(Machine {
            graphs: BTreeMap::new(),
            plans,
            context: options.context,
            kernels,
            arena,
            _memory: memory,
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

    /// Every graph, after one eager run of every pass: first launches load code and must not fall into a capture.
    fn capture(&mut self, require_graphs: bool) -> Result<()> {
        let start = Instant::now();
        let choices = choices(self.link.as_ref());
        self.meet()?;
        self.set_state(&State { done: 1, rows: 1, ..State::zeroed() })?;
        let last = *self.buckets.last().expect("never empty");
        let passes: Vec<Pass> = self.plans.keys().copied().collect();
        for &pass in &passes {
            self.run_eagerly(pass, last, *choices.last().expect("never empty"))?;
            self.settle()?;
        }
        self.meet()?;
        for pass in passes {
            // Only decode attention has a grid that depends on the context.
            let decode = self.plan(pass).rows() <= MAX_WIDTH;
            let choices = if let Pass::Verify { .. } = pass { choices } else { &[Choice::Greedy] };
            let buckets = if decode { self.buckets.clone() } else { vec![last] };
            let mut warned = false;
            for (chunks, &choice) in buckets.into_iter().flat_map(|b| choices.iter().map(move |c| (b, c))) {
                let ops = self.ops(pass, chunks, choice)?;
                let graph = match self.gpu.capture(|| self.launcher().run(self.plan(pass), &ops)) {
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
}

/// The plans of all passes that there are graphs for.
fn plans(
    config: &Config,
    drafter: Option<&DraftModel>,
    ranks: Ranks,
    slice: Option<Slice>,
) -> Result<BTreeMap<Pass, Plan>> {
    let taps = drafter.map_or(Vec::new(), |d| d.shape.taps());
    let verify = WIDTHS.map(|width| Pass::Verify { width });
    let prefill = PREFILL_ROWS.map(|rows| Pass::Prefill { rows });
    let mut plans = BTreeMap::new();
    for pass in verify.into_iter().chain(prefill) {
        let plan = plan::target(config, pass, ranks, &taps)?;
        let plan = match slice {
            Some(slice) => plan.alone(slice.comm_us.is_some()),
            None => plan,
        };
        plans.insert(pass, plan);
    }
    if let Some(d) = drafter {
        let ranks = if ranks.split_drafter { ranks } else { Ranks::ONE };
        let prefill = PREFILL_ROWS.map(|rows| Pass::DraftPrefill { rows });
        let draft = (1..=MAX_DRAFTS).map(|drafts| Pass::Draft { width: MAX_DRAFTS + 1, drafts });
        for pass in prefill.into_iter().chain(draft) {
            plans.insert(pass, plan::drafter(&d.shape, pass, ranks)?);
        }
    }
    Ok(plans)
}

/// Whether there are kernels for all steps of all passes; an error that says for what there are none. Before any memory
/// is taken, so the addresses are made up.
fn find_kernels(
    config: &Config,
    drafter: Option<&DraftModel>,
    plans: &BTreeMap<Pass, Plan>,
    sizes: &Sizes,
    layout: &Layout,
    setting: &Setting,
) -> Result<()> {
    let mut free = 1 << 40;
    let arena = sizes.place(layout.addresses(free), free, &mut |_, bytes| {
        free += bytes as u64;
        Ok(Region { start: free - bytes as u64, bytes })
    })?;
    for plan in plans.values() {
        let of = || match (plan.pass, drafter) {
            (Pass::Draft { .. } | Pass::DraftPrefill { .. }, Some(d)) => format!("drafter {}", d.name),
            _ => config.arch.clone(),
        };
        let choice = if let Sums::Ranks(_) = setting.sums { Choice::Filtered } else { Choice::Sampled };
        lower(plan, &arena, setting, sizes.chunks, choice).with_context(of)?;
    }
    Ok(())
}

/// Whether what is needed is free. Ranks that share a GPU look before any of them takes memory.
fn make_room(gpu: &Gpu, link: Option<&Link>, needs: StartTimings, kv_bytes: usize, context: usize) -> Result<()> {
    let (weights, work) = (needs.weight_bytes, needs.other_bytes);
    let needed = link.map_or(1, Link::sharing) * (weights + kv_bytes + work + (128 << 20));
    let (free, total) = gpu.memory()?;
    link.iter().try_for_each(|link| link.barrier())?;
    if needed > free {
        let gb = |n: usize| n as f64 / 1e9;
        return Err(machine(format!(
            "{}: {:.1} GB are needed (weights {:.1}, cache for {context} tokens {:.1}, work {:.1}), {:.1} of {:.1} GB are free: use a smaller --context, or another GPU",
            gpu.info().name, gb(needed), gb(weights), gb(needs.kv_bytes), gb(work), gb(free), gb(total)
        )));
    }
    Ok(())
}

/// Weights that are another weight's tensor, or rows of it: they need no memory of their own.
fn aliases(config: &Config, source: &Source, drafter: Option<&DraftModel>, ranks: Ranks) -> Result<Vec<Alias>> {
    let id = |role| WeightId::of_target(role, None);
    let of_drafter = |role| WeightId::of_drafter(role, None);
    let mut aliases = Vec::new();
    if config.tied {
        aliases.push(Alias { id: id(Role::Head), of: id(Role::Embed), first_row: Shard::of(config, ranks)?.first_id });
    }
    if let (Some(drafter), Source::Random(_)) = (drafter, source) {
        let same = drafter.shape.hidden() == config.hidden;
        aliases.extend(same.then(|| Alias { id: of_drafter(Role::Embed), of: id(Role::Embed), first_row: 0 }));
    }
    if let (Some(drafter), Source::Checkpoint(target)) = (drafter, source) {
        let same_tensor =
            |a: Option<&Weight>, b: Option<&Weight>| a.zip(b).is_some_and(|(a, b)| a.parts[0].is(&b.parts[0]));
        // The drafter's head is whole on every rank; of several ranks, none has the target's whole head.
        let whole: &[Role] = if ranks.count == 1 && !config.tied { &[Role::Embed, Role::Head] } else { &[Role::Embed] };
        for role in [Role::Embed, Role::Head] {
            let same = whole.iter().find(|&&r| same_tensor(target.find(id(r)), drafter.weights.find(of_drafter(role))));
            aliases.extend(same.map(|&r| Alias { id: of_drafter(role), of: id(r), first_row: 0 }));
        }
    }
    Ok(aliases)
}
