//! One launch as data: what lower/ makes of a Step, and what launch.rs puts on a stream.
use super::catalog::KernelId;
use super::matrix::Span;
use crate::model::plan::Plan;

/// A launch of a kernel, or a call of NCCL, in the order in which a pass makes them.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    pub part: Part,
    pub work: Work,
    pub edge: Edge,
    /// The matrices that it reads, in the order in which it does. An embedding is looked up, not read: its rows are not
    /// here.
    pub weights: Vec<Span>,
    /// Steps whose output is complete when this op has run. Usually the step it belongs to, of which it is the last;
    /// `Router` and `LatentAttend` leave sums that the step behind them adds up.
    pub completes: Vec<usize>,
}

impl Op {
    /// A line of a listing: part of `plan`, kernel, grid, threads, edge, and the weights that it reads.
    pub fn shown(&self, plan: &Plan) -> String {
        let what = match &self.work {
            Work::Kernel { kernel, grid: [x, y, z], threads, .. } => {
                format!("{:32} {x} x {y} x {z} of {threads}, {:?}", kernel.name(), self.edge)
            }
            Work::Nccl(call) => format!("NCCL {} of {}", if call.adds { "all-reduce" } else { "all-gather" }, call.n),
        };
        let of_all: u64 = self.weights.iter().filter(|span| span.experts == 1).map(|span| span.bytes).sum();
        let experts = self.weights.iter().filter(|span| span.experts > 1);
        let of_one: u64 = experts.clone().map(|span| span.bytes).sum();
        let weights = match (of_all, experts.map(|span| span.experts).max()) {
            (0, None) => String::new(),
            (n, None) => format!(", reads {n} B"),
            (n, Some(experts)) => format!(", reads {n} B and {of_one} B of each chosen expert of {experts}"),
        };
        format!("{:26} {what}{weights}", self.part.name(plan))
    }
}

/// What of a pass an op belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Number in `Plan::steps`.
    Step(usize),
    /// A drafter's pass finds its rows.
    DraftBegin,
    /// A drafter's pass takes its features from the ring.
    FeaturesLoad,
    /// A target's pass puts what it tapped into the ring.
    FeaturesStore,
    /// The end of a prefill chunk.
    Advance,
    /// n-gram search behind a verify pass.
    Ngram,
}

impl Part {
    pub fn name(self, plan: &Plan) -> String {
        match self {
            Part::Step(i) => plan.steps[i].name(),
            other => other.kind(plan),
        }
    }

    /// The name without a layer, as `Step::kind`.
    pub fn kind(self, plan: &Plan) -> String {
        match self {
            Part::Step(i) => plan.steps[i].kind(),
            Part::DraftBegin => "draft_begin".into(),
            Part::FeaturesLoad => "features_load".into(),
            Part::FeaturesStore => "features_store".into(),
            Part::Advance => "advance".into(),
            Part::Ngram => "ngram".into(),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    Kernel {
        kernel: KernelId,
        grid: [u32; 3],
        /// Of a block: those of the kernel, fewer in collectives with little to do.
        threads: u32,
        /// The params struct of the kernel.
        params: Vec<u8>,
    },
    Nccl(NcclCall),
}

/// What NCCL is to do with `n` bf16 of every rank at `from`: their sum to `to`, or all of them one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclCall {
    pub adds: bool,
    pub from: u64,
    pub to: u64,
    pub n: usize,
}

/// When the blocks of a launch may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// While the launch before drains; the kernel waits for its inputs itself.
    Early,
    /// When the launch before has ended: collectives of ranks that share a GPU, and what follows them. Blocks that wait
    /// early would hold places that another rank's collective needs.
    Full,
}
