//! Where drafts come from, which source the next cycle uses, and what became of them.
//!
//! The text never depends on anything here: every row is sampled with the ordinary sampler and a draft is kept only where it equals the
//! sample (chain verification by sample matching, see EAGLE-3, arXiv 2503.01840, for the drafter).
use super::policy::{Costs, Policy};
use super::sequence::Record;
use super::MAX_DRAFTS;
use std::time::Duration;

/// Drafts for the token after a history of prompt and output, for tests: always right, always wrong, wrong at one place.
pub type Script = Box<dyn FnMut(&[u32]) -> Vec<u32>>;

/// What a user chose: `--draft` and `--draft-tokens`.
#[derive(Default)]
pub struct Drafting {
    pub eagle: bool,
    pub ngram: bool,
    /// Stands in for both.
    pub script: Option<Script>,
    /// Drafts per cycle; None lets the policy choose.
    pub fixed: Option<usize>,
}

impl Drafting {
    pub fn on(&self) -> bool {
        self.eagle || self.ngram || self.script.is_some()
    }
}

/// Which source made the drafts of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Plain,
    Eagle,
    Ngram,
    Script,
}

/// Counts since the engine was made or `Statistics::default`.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Statistics {
    pub cycles: u64,
    pub tokens: u64,
    /// Cycles by tokens they gave, less one.
    pub histogram: [u64; MAX_DRAFTS + 1],
    /// How often draft i was verified behind i accepted ones, and accepted.
    pub tried: [u64; MAX_DRAFTS],
    pub accepted: [u64; MAX_DRAFTS],
    /// Time of cycles with and without drafts, and of the host between records.
    pub cycle_ms: f64,
    pub host_ms: f64,
}

impl Statistics {
    /// Tokens per cycle (1 + accepted drafts).
    pub fn accept_length(&self) -> f64 {
        self.tokens as f64 / self.cycles.max(1) as f64
    }

    fn observe(&mut self, record: &Record) {
        self.cycles += 1;
        self.tokens += record.tokens.len() as u64;
        self.histogram[record.tokens.len().saturating_sub(1).min(MAX_DRAFTS)] += 1;
        for i in 0..record.drafted.min(record.accepted + 1) {
            self.tried[i] += 1;
            self.accepted[i] += (i < record.accepted) as u64;
        }
    }
}

/// The choice of source and number, cycle by cycle.
pub(super) struct Speculation {
    pub drafting: Drafting,
    pub statistics: Statistics,
    eagle: Policy,
    ngram: Policy,
    /// The last record had an n-gram match.
    matched: bool,
}

impl Speculation {
    pub fn new(drafting: Drafting, costs: Costs) -> Speculation {
        let free = Costs { draft: [0.0; MAX_DRAFTS], ..costs.clone() };
        Speculation {
            eagle: Policy::new(costs, drafting.fixed),
            ngram: Policy::new(free, drafting.fixed),
            drafting,
            statistics: Statistics::default(),
            matched: false,
        }
    }

    /// Drafts that the drafter should make behind the pass that was just queued; 0: none (n-gram is expected to do better, or nothing pays).
    pub fn drafts_to_queue(&self, room: usize) -> usize {
        if !self.drafting.eagle || self.drafting.script.is_some() {
            return 0;
        }
        let (k, rate) = self.eagle.best(room);
        if self.drafting.ngram && self.matched && self.ngram.best(room).1 > rate {
            return 0;
        }
        k
    }

    /// How many of `found` n-gram drafts to verify.
    pub fn ngram_drafts(&self, found: usize, room: usize) -> usize {
        self.ngram.best(room).0.min(found)
    }

    /// What a pass with drafts of `source` did; `queued` drafts were made in the same cycle, which took `time`.
    pub fn observe(&mut self, source: Source, record: &Record, queued: usize, time: Duration) {
        let ms = time.as_secs_f64() * 1e3;
        self.matched = record.ngram > 0;
        self.statistics.observe(record);
        self.statistics.cycle_ms += ms;
        // An end inside a block says nothing about the drafts behind it.
        let whole = record.end.is_none();
        match source {
            Source::Plain => {
                self.eagle.observe(0, 0);
                self.ngram.observe(0, 0);
            }
            Source::Eagle if whole => self.eagle.observe(record.drafted, record.accepted),
            Source::Ngram if whole => self.ngram.observe(record.drafted, record.accepted),
            _ => {}
        }
        self.eagle.costs.observe(record.drafted, queued, ms);
        self.ngram.costs.verify = self.eagle.costs.verify;
    }

    pub fn costs(&self) -> &Costs {
        &self.eagle.costs
    }
}
