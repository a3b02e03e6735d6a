//! What ranks divide and what each of them has whole: decided here and nowhere else, from what was asked for and what
//! was measured.
use super::config::Config;
use super::plan::{self, Drafter, Pass, Ranks, Storage};
use anyhow::Result;
use std::fmt;

/// What a user or a test wants; None: what is faster.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asked {
    /// Whether every rank has all of attention.
    pub whole_attention: Option<bool>,
    /// Whether ranks divide the layer of a drafter that can be divided. The text is the same.
    pub split_drafter: Option<bool>,
}

/// What the machine can do.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Microseconds of a sum of one row over all ranks.
    pub sum_us: f64,
    /// Of each rank's GPU.
    pub memories: Vec<MemorySpeed>,
}

#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub struct MemorySpeed {
    /// Bytes per second by the memory's clock; 0 where nobody knows.
    pub rate: f64,
    pub free_bytes: usize,
}

/// What is divided.
pub struct Model<'a> {
    pub config: &'a Config,
    pub drafter: Option<&'a Drafter>,
    /// Tokens that the KV cache has room for.
    pub context: usize,
    pub storage: Storage,
}

#[derive(Clone, Copy, Debug)]
pub struct Division {
    pub ranks: Ranks,
    /// What attention costs divided and whole; None where nothing was measured, or heads cannot be divided.
    pub attention: Option<AttentionCost>,
}

/// Tokens in the cache that costs are compared at: a short conversation.
const DEPTH: usize = 2048;
/// Sums over ranks that are well take 4 us (NVLink, measured) to 20 us (eight GPUs on PCIe, published); a machine is
/// only given up, and the text another one, beyond.
const SLOW_SUM_US: f64 = 40.0;
/// The time of a sum is measured, that of reading comes from the memory's clock, and prompts take longer: another
/// division must promise more.
const PROMISE: f64 = 1.5;

/// How `count` ranks divide the model, seen by rank `rank`: the same on all of them.
pub fn divide(model: &Model, rank: usize, count: usize, asked: Asked, measured: Option<&Measured>) -> Result<Division> {
    let attention = measured.and_then(|measured| AttentionCost::of(model, measured));
    let whole_attention = asked.whole_attention.unwrap_or(attention.is_some_and(|cost| cost.is_whole()));
    let split_drafter = match (model.drafter.filter(|drafter| drafter.divides(count)), asked.split_drafter) {
        (None, _) => false,
        (Some(_), Some(asked)) => asked,
        (Some(drafter), None) => match measured {
            Some(measured) => splitting_pays(drafter, model.storage, measured)?,
            None => false,
        },
    };
    Ok(Division { ranks: Ranks { whole_attention, split_drafter, ..Ranks::new(rank, count) }, attention })
}

/// As long as nothing is measured.
pub fn unmeasured(rank: usize, count: usize, asked: Asked) -> Ranks {
    Ranks { whole_attention: asked.whole_attention == Some(true), ..Ranks::new(rank, count) }
}

/// Whether a draft is made sooner on every rank when ranks divide the drafter's layer, two sums over ranks included.
fn splitting_pays(drafter: &Drafter, storage: Storage, measured: &Measured) -> Result<bool> {
    // Of one draft more.
    let bytes = |ranks: Ranks| -> Result<f64> {
        let [two, one] = [2, 1].map(|drafts| plan::drafter(drafter, Pass::Draft { width: 1, drafts }, ranks));
        Ok((two?.bytes(DEPTH, storage) - one?.bytes(DEPTH, storage)) as f64)
    };
    let whole = bytes(Ranks::ONE)?;
    for (rank, memory) in measured.memories.iter().enumerate() {
        let saved = whole - bytes(Ranks { split_drafter: true, ..Ranks::new(rank, measured.memories.len()) })?;
        if memory.rate == 0.0 || saved / memory.rate * 1e6 <= PROMISE * 2.0 * measured.sum_us {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Of a layer, at one row and `DEPTH` rows in the cache.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionCost {
    /// Of the sum over ranks behind divided attention.
    pub sum_us: f64,
    /// Of reading what the other ranks would have of its weights and cache.
    pub read_us: f64,
    pub fits: bool,
}

impl AttentionCost {
    /// None where heads cannot be divided: there is nothing to choose.
    fn of(model: &Model, measured: &Measured) -> Option<AttentionCost> {
        let count = measured.memories.len();
        let mut cost = AttentionCost { sum_us: measured.sum_us, read_us: 0.0, fits: true };
        for (rank, memory) in measured.memories.iter().enumerate() {
            let plan = |whole_attention| {
                let ranks = Ranks { whole_attention, ..Ranks::new(rank, count) };
                plan::target(model.config, Pass::Verify { width: 1 }, ranks, &[]).ok()
            };
            let (divided, whole) = (plan(false)?, plan(true)?);
            let more = whole.bytes(DEPTH, model.storage) - divided.bytes(DEPTH, model.storage);
            let layer_us = more as f64 / model.config.n_layers as f64 / memory.rate.max(1.0) * 1e6;
            cost.read_us = cost.read_us.max(layer_us);
            // What a pass reads of a full cache is what lies in memory, the embedding and work apart.
            let needed = whole.bytes(model.context, model.storage) as f64 * 1.2;
            cost.fits &= memory.rate > 0.0 && needed < memory.free_bytes as f64;
        }
        Some(cost)
    }

    pub fn is_whole(&self) -> bool {
        self.fits && self.sum_us > SLOW_SUM_US.max(PROMISE * self.read_us)
    }
}

impl fmt::Display for AttentionCost {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let how = match self.is_whole() {
            true => "whole on every rank",
            false if self.fits => "divided",
            false => "divided: all of it does not fit",
        };
        write!(
            f,
            "{how}: a layer's sum takes {:.1} us, reading the other ranks' part {:.1} us",
            self.sum_us, self.read_us
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// A sum over ranks goes where it costs clearly more than what goes with it.
    #[test]
    fn attention_is_whole_where_sums_are_slow() {
        let cost = |sum_us, read_us, fits| AttentionCost { sum_us, read_us, fits };
        for (cost, text) in [
            (
                cost(200.0, 54.0, true),
                "whole on every rank: a layer's sum takes 200.0 us, reading the other ranks' part 54.0 us",
            ),
            (cost(4.2, 1.3, true), "divided: a layer's"),
            (cost(45.0, 54.0, true), "divided: a layer's"),
            (cost(45.0, 15.0, true), "whole"),
            (cost(200.0, 54.0, false), "divided: all of it does not fit: a layer's"),
        ] {
            assert!(cost.to_string().starts_with(text) && cost.is_whole() == text.starts_with("whole"), "{cost}");
        }
    }

    /// The 8B over eight ranks at 1.79 TB/s: the rest of a layer's attention takes 41 us to read, that of its cache 4.
    #[test]
    fn what_is_measured_decides_unless_it_is_asked_for() {
        let config = Config::open(Path::new("tests/shapes/llama-3.1-8b")).unwrap();
        let storage = Storage { weight: 2, kv: 2, plain_kv_b: true };
        let model = Model { config: &config, drafter: None, context: 8192, storage };
        let measured = |sum_us: f64, free_bytes: usize| {
            let mut memories = vec![MemorySpeed { rate: 1.79e12, free_bytes: 90 << 30 }; 8];
            memories[5].free_bytes = free_bytes;
            Measured { sum_us, memories }
        };
        let is_whole = |asked, measured: Option<&Measured>| {
            let asked = Asked { whole_attention: asked, split_drafter: None };
            let division = divide(&model, 3, 8, asked, measured).unwrap();
            assert_eq!((division.ranks.rank, division.ranks.count, division.ranks.split_drafter), (3, 8, false));
            assert_eq!(division.attention.is_some(), measured.is_some());
            division.ranks.whole_attention
        };
        let slow = measured(200.0, 90 << 30);
        let read_us = divide(&model, 0, 8, Asked::default(), Some(&slow)).unwrap().attention.unwrap().read_us;
        assert!((45.0..45.5).contains(&read_us), "{read_us}");
        assert!(is_whole(None, Some(&slow)) && !is_whole(Some(false), Some(&slow)));
        assert!(
            !is_whole(None, Some(&measured(45.0, 90 << 30))) && is_whole(Some(true), None) && !is_whole(None, None)
        );
        // It must fit on every rank.
        assert!(!is_whole(None, Some(&measured(200.0, 1 << 30))));
    }
}
