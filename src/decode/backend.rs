//! What a machine must do to decode, and to be measured. decode knows no backend; backends implement these.
use super::policy::Costs;
use super::sample::Sampling;
use super::sequence::{Limits, Record};
use anyhow::Result;

/// Something that holds a model and its caches and can run passes: cpu::Reference, gpu::Machine, and
/// gpu::ranks::Conductor, which is a Machine for each rank.
pub trait Backend: Probe {
    /// Most tokens of prompt and output together.
    fn context(&self) -> usize;
    fn vocab(&self) -> usize;
    /// Most tokens of one `prefill` call.
    fn prefill_rows(&self) -> usize;
    /// How many passes may be queued before the first record is read.
    fn queue_depth(&self) -> usize;
    /// Starts a sequence whose first `keep` rows are in the cache already.
    fn begin(&mut self, prompt: &[u32], keep: usize, sampling: &Sampling, limits: &Limits) -> Result<()>;
    /// Appends the rows of the next `tokens.len()` prompt tokens to the cache.
    fn prefill(&mut self, tokens: &[u32]) -> Result<()>;
    /// Queues a verify pass of this width: the root and the first `width - 1` drafts.
    fn verify(&mut self, width: usize) -> Result<()>;
    /// Queues the drafter behind the passes before: `drafts` drafts for the next verify pass. Needs a drafter.
    fn draft(&mut self, drafts: usize) -> Result<()>;
    /// Sets the drafts of the next verify pass by hand.
    fn set_drafts(&mut self, drafts: &[u32]) -> Result<()>;
    /// What the oldest unread verify pass did; waits for it.
    fn record(&mut self) -> Result<Record>;
    /// Cuts history and caches back to the first `n` tokens of the history.
    fn truncate(&mut self, n: usize) -> Result<()>;
    fn counters(&self) -> Counters;
}

/// What a backend says of itself when it is measured. The contents of its cache are lost.
pub trait Probe {
    /// Times of every verify and draft pass, measured on distinct random tokens.
    fn measure(&mut self) -> Result<Costs>;
    /// Milliseconds of `n` verify passes of this width over distinct random tokens with `depth` rows in the cache.
    fn time_verify(&mut self, width: usize, depth: usize, n: usize) -> Result<Vec<f64>>;
    /// How many experts a layer reads in such a pass, on average; None where there are none, or nobody counts.
    fn experts_used(&mut self, _width: usize, _depth: usize) -> Result<Option<f64>> {
        Ok(None)
    }
    /// Where the time of plain decoding goes with `depth` rows in the cache: steps of one kind together.
    fn profile(&mut self, depth: usize) -> Result<Vec<StepTime>>;
}

/// Steps of one kind in a pass of one row.
#[derive(Clone, Debug, serde::Serialize)]
pub struct StepTime {
    pub kind: String,
    pub count: usize,
    pub ms: f64,
    /// Read by all of them, as the plan counts.
    pub bytes: u64,
}

/// What ran since the backend was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Counters {
    pub verify_replays: u64,
    pub draft_replays: u64,
    pub prefill_replays: u64,
    /// Passes launched step by step after start: 0 unless a capture failed. The CPU counts none.
    pub eager: u64,
}
