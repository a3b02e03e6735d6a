//! Where drafts come from, which source the next cycle uses, and what became of them.
//!
//! The text never depends on anything here: every row is sampled with the ordinary sampler and a draft is kept only
//! where it equals the sample (chain verification by sample matching, see EAGLE-3, arXiv 2503.01840, for the drafter).
use super::policy::{Costs, Policy, MAX_DRAFTS};
use super::sequence::Record;
use std::time::Duration;

/// Drafts for the token after a history of prompt and output, for tests: always right, always wrong, wrong at one
/// place.
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

/// Counts since the engine was made or they were reset.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Statistics {
    /// Verify passes read, and the tokens that they gave.
    pub cycles: u64,
    pub tokens: u64,
    /// Cycles with drafts of the drafter and of n-gram search; the others were plain (or scripted).
    pub eagle_cycles: u64,
    pub ngram_cycles: u64,
    /// Cycles by tokens they gave, less one.
    pub histogram: [u64; MAX_DRAFTS + 1],
    /// How often draft i was verified behind i accepted ones, and accepted.
    pub tried: [u64; MAX_DRAFTS],
    pub accepted: [u64; MAX_DRAFTS],
    /// Time of the cycles, divided between draft and verify passes as their measured costs are; and the host's part of
    /// it, from a record to the next pass queued.
    pub draft_ms: f64,
    pub verify_ms: f64,
    pub host_ms: f64,
}

impl Statistics {
    /// Tokens per cycle (1 + accepted drafts).
    pub fn accept_length(&self) -> f64 {
        self.tokens as f64 / self.cycles.max(1) as f64
    }

    /// By position: how often a draft behind accepted ones was accepted. Positions never tried are left out.
    pub fn acceptance(&self) -> Vec<f64> {
        let tried = self.tried.iter().zip(&self.accepted).take_while(|(tried, _)| **tried > 0);
        tried.map(|(tried, accepted)| *accepted as f64 / *tried as f64).collect()
    }

    fn observe(&mut self, cycle: &Cycle, record: &Record) {
        self.cycles += 1;
        self.tokens += record.tokens.len() as u64;
        self.eagle_cycles += (cycle.source == Source::Eagle) as u64;
        self.ngram_cycles += (cycle.source == Source::Ngram) as u64;
        self.histogram[record.tokens.len().saturating_sub(1).min(MAX_DRAFTS)] += 1;
        // Row i tests draft i; rows behind the last token were not looked at.
        for i in 0..record.drafted.min(record.tokens.len()) {
            self.tried[i] += 1;
            self.accepted[i] += (i < record.accepted) as u64;
        }
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

/// A verify pass and what made its drafts, from the host's side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cycle {
    pub source: Source,
    /// Drafts that it verifies.
    pub drafts: usize,
    /// Drafts of the draft pass before it; 0 when there was none.
    pub drafted: usize,
}

impl Cycle {
    pub const PLAIN: Cycle = Cycle { source: Source::Plain, drafts: 0, drafted: 0 };
}

/// What may be queued behind a verify pass before its record is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Behind {
    Drafts(usize),
    /// Plain passes: nothing in the record could change the next one.
    Plain,
    /// The record decides.
    Nothing,
}

/// Drafted cycles, accept length, and cycles in all after which a drafter that never hits is reported.
const WARN_DRAFTED: u64 = 12;
const WARN_LENGTH: f64 = 1.05;
const WARN_CYCLES: u64 = 64;

/// The choice of source and number, cycle by cycle.
pub(super) struct Speculation {
    pub drafting: Drafting,
    pub statistics: Statistics,
    pub costs: Costs,
    eagle: Policy,
    ngram: Policy,
    script: Policy,
    /// The last record had an n-gram match.
    matched: bool,
    /// Cycles in all, those with drafts of the drafter, and their accepted drafts: what the warning is about.
    seen: [u64; 3],
    warned: bool,
}

impl Speculation {
    pub fn new(drafting: Drafting, costs: Costs) -> Speculation {
        let fixed = drafting.fixed;
        Speculation {
            drafting,
            statistics: Statistics::default(),
            costs,
            eagle: Policy::new(fixed, false),
            ngram: Policy::new(fixed, true),
            script: Policy::new(fixed, true),
            matched: false,
            seen: [0; 3],
            warned: false,
        }
    }

    /// What follows the passes that are queued, as far as it can be known before their records. `room` is the most
    /// drafts that make sense.
    pub fn behind(&self, room: usize) -> Behind {
        if self.drafting.script.is_some() {
            return Behind::Nothing;
        }
        let ngram = self.ngram.choose(&self.costs, room);
        let ngram_pays = self.drafting.ngram && ngram.drafts > 0;
        if self.drafting.eagle {
            let eagle = self.eagle.choose(&self.costs, room);
            // A match now makes one behind the next pass likely.
            let ngram_first = ngram_pays && self.matched && (ngram.rate > eagle.rate || ngram.probe);
            if eagle.drafts > 0 && !ngram_first {
                return Behind::Drafts(eagle.drafts);
            }
        }
        // Without a match plain passes are queued ahead, so that text that repeats nothing costs nothing; the first
        // match waits for one of them.
        match ngram_pays && self.matched {
            true => Behind::Nothing,
            false => Behind::Plain,
        }
    }

    /// The next verify pass when no draft pass is queued: the drafts to verify, scripted ones by value. `history` is
    /// prompt and output.
    pub fn next(&mut self, record: &Record, room: usize, history: &[&[u32]]) -> (Cycle, Option<Vec<u32>>) {
        if let Some(script) = &mut self.drafting.script {
            let most = self.script.choose(&self.costs, room).drafts;
            let mut drafts = script(&history.concat());
            drafts.truncate(most);
            let source = if drafts.is_empty() { Source::Plain } else { Source::Script };
            return (Cycle { source, drafts: drafts.len(), drafted: 0 }, Some(drafts));
        }
        let most = if self.drafting.ngram { self.ngram.choose(&self.costs, room).drafts } else { 0 };
        match most.min(record.ngram) {
            0 => (Cycle::PLAIN, None),
            drafts => (Cycle { source: Source::Ngram, drafts, drafted: 0 }, None),
        }
    }

    /// What a pass did. `time` is from record to record: the draft pass before it, if any, and the pass. None for the
    /// first pass of an answer, which also waited for the prompt.
    pub fn observe(&mut self, cycle: &Cycle, record: &Record, time: Option<Duration>) {
        self.matched = record.ngram > 0;
        self.statistics.observe(cycle, record);
        let ms = time.map(|t| t.as_secs_f64() * 1e3);
        if let Some(ms) = ms {
            let (draft, verify) = (self.costs.drafting(cycle.drafted), self.costs.verify[cycle.drafts]);
            self.statistics.draft_ms += ms * draft / (draft + verify);
            self.statistics.verify_ms += ms * verify / (draft + verify);
        }
        self.seen[0] += 1;
        if cycle.source == Source::Eagle {
            self.seen[1] += 1;
            self.seen[2] += record.accepted as u64;
        }
        // An end inside a block says nothing about the drafts behind it.
        if record.end.is_some() {
            return;
        }
        for (source, policy) in
            [(Source::Eagle, &mut self.eagle), (Source::Ngram, &mut self.ngram), (Source::Script, &mut self.script)]
        {
            match cycle.source == source {
                true => policy.observe(record.drafted, record.accepted),
                false => policy.rest(record.tokens.len()),
            }
        }
        if let Some(ms) = ms {
            self.costs.observe(cycle.drafted, cycle.drafts, ms);
        }
    }

    /// Once, when the drafter's drafts have hardly ever been right: a setting is wrong, not the luck.
    pub fn warning(&mut self) -> Option<String> {
        let [cycles, drafted, accepted] = self.seen;
        let length = 1.0 + accepted as f64 / drafted.max(1) as f64;
        if self.warned || cycles < WARN_CYCLES || drafted < WARN_DRAFTED || length >= WARN_LENGTH {
            return None;
        }
        self.warned = true;
        Some(format!(
            "the drafter's tokens are hardly ever accepted (accept length {length:.2} in {drafted} cycles): likely it was trained for another model or \
             fine-tune, reads other layers than those it was trained on, or was trained with another chat template; the text is right all the same"
        ))
    }
}
