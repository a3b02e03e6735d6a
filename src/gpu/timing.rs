//! What passes of a Machine take: the trait `Probe`, and what tests ask beside it. The cache's contents are lost.
use super::device::Graph;
use super::lower::Choice;
use super::machine::{Machine, STORAGE};
use super::op::{Op, Part};
use super::params::{ExpertWork, State};
use crate::decode::policy::Costs;
use crate::decode::{Backend, Limits, Probe, Sampling, StepTime, MAX_DRAFTS};
use crate::model::plan::{Pass, Step};
use anyhow::{Context, Result};
use bytemuck::Zeroable;

const STATE_BYTES: usize = std::mem::size_of::<State>();

impl Machine {
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

    /// Median microseconds that a verify pass of `width` rows and a draft pass queued behind it take, as two graphs and
    /// as one graph of both: the difference is what the GPU idles between two graphs more than between two kernels.
    pub fn time_cycle(&mut self, width: usize, drafts: usize, n: usize) -> Result<[f64; 2]> {
        self.begin_timing(width, 0)?;
        let passes = [Pass::Verify { width }, Pass::Draft { width: MAX_DRAFTS + 1, drafts }];
        let chunks = self.chunks(passes[0], width);
        let [verify, draft] = passes.map(|pass| self.ops(pass, chunks, Choice::Greedy));
        let ops = [verify?, draft?];
        let both = self.gpu.capture(|| {
            passes.iter().zip(&ops).try_for_each(|(&pass, ops)| self.launcher().run(self.plan(pass), ops))
        })?;
        let apart: Option<Vec<&Graph>> =
            passes.iter().map(|&pass| self.graphs[&(pass, chunks, Choice::Greedy)].as_ref()).collect();
        let apart = apart.context("the graph was not captured")?;
        let median = |mut times: Vec<f64>| {
            times.sort_by(f64::total_cmp);
            1e3 * times[times.len() / 2]
        };
        Ok([median(self.time_replays(&apart, n)?), median(self.time_replays(&[&both], n)?)])
    }
}

impl Probe for Machine {
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
        let plan = self.plan(pass);
        let mut used = Vec::new();
        for op in &self.ops(pass, self.chunks(pass, depth + width), Choice::Greedy)? {
            self.launcher().launch(plan, op)?;
            if op.completes.iter().any(|&i| matches!(plan.steps[i], Step::ExpertsUp(_))) {
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
        let plan = self.plan(pass);
        let ops = self.ops(pass, self.chunks(pass, depth + 1), Choice::Greedy)?;
        let median = |skip: Option<&str>| -> Result<f64> {
            let kept: Vec<&Op> = ops.iter().filter(|op| skip.is_none_or(|kind| op.part.kind(plan) != kind)).collect();
            self.meet()?;
            let graph = self.gpu.capture(|| self.launcher().run(plan, kept))?;
            self.meet()?;
            let mut times = self.time_replays(&[&graph], RUNS)?;
            self.meet()?; // before the graph goes
            times.sort_by(f64::total_cmp);
            Ok(times[RUNS / 2])
        };
        // The price of a step in a chain whose launches overlap is what leaving it out saves.
        let whole = median(None)?;
        let mut kinds: Vec<StepTime> = Vec::new();
        let mut parts: Vec<Part> = Vec::new();
        for op in &ops {
            // A step that is several launches counts once; so does one whose launches stand among another's.
            if parts.contains(&op.part) {
                continue;
            }
            parts.push(op.part);
            let kind = op.part.kind(plan);
            let bytes = if let Part::Step(i) = op.part { plan.steps[i].bytes(1, depth, STORAGE) } else { 0 };
            match kinds.iter_mut().find(|k| k.kind == kind) {
                Some(k) => (k.count, k.bytes) = (k.count + 1, k.bytes + bytes),
                None => kinds.push(StepTime { ms: whole - median(Some(&kind))?, kind, count: 1, bytes }),
            }
        }
        let seen: f64 = kinds.iter().map(|k| k.ms).sum();
        kinds.push(StepTime { kind: "overlap and launch".into(), count: 1, ms: whole - seen, bytes: 0 });
        Ok(kinds)
    }
}
