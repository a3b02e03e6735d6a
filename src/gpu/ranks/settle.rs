//! Which way of adding sums ranks use: the one that was asked for, else the fastest right one, measured at start and
//! remembered.
//!
//! `settle` is what every rank calls, all at the same time, before its Machine is made. It has pairs of GPUs probed
//! (pairs.rs) and sums checked and timed (tune.rs); all ranks see the same numbers and so choose alike.
use super::algorithm::{Algorithm, Variant};
use super::cache::{self, Key};
use super::link::{Link, LinkOptions};
use super::nccl;
use super::pairs::{self, Pair};
use super::tune::{self, Failed, Tuned, TUNED_ROWS};
use crate::error::machine;
use crate::gpu::machine::WIDTHS;
use crate::model::plan::PREFILL_ROWS;
use anyhow::Result;
use std::path::PathBuf;
use std::sync::Arc;

/// How ranks add up what each has.
#[derive(Clone, Debug, Default)]
pub struct Collectives {
    /// None: what is fastest.
    pub algorithm: Option<Algorithm>,
    /// The NCCL library; None: where the system finds it.
    pub nccl: Option<PathBuf>,
    /// An error instead of a slower way where GPUs do not reach each other's memory.
    pub require_p2p: bool,
    pub measure: Measure,
    pub link: LinkOptions,
}

/// When ranks find out what connects them.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Measure {
    /// For tests: Link's own guess is good enough.
    #[default]
    Never,
    /// Unless this file knows it.
    Cached(PathBuf),
    Anew,
}

/// What `settle` found out, on all ranks alike.
#[derive(Clone, Debug, Default)]
pub struct Found {
    /// Every ordered pair of ranks; empty where it was not probed.
    pub pairs: Vec<Pair>,
    /// By rows, ascending; empty where the algorithm was forced.
    pub tuned: Vec<Tuned>,
    pub failed: Vec<Failed>,
    pub cached: bool,
}

impl Found {
    /// Microseconds of a sum of one row in a graph; None where sums were not timed.
    pub(super) fn sum_us(&self) -> Option<f64> {
        let tuned = self.tuned.first()?;
        tuned.times.iter().find(|(variant, _)| *variant == tuned.variant).map(|(_, us)| *us)
    }

    pub fn bad_pairs(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| !pair.health().is_good())
    }
}

/// Finds out what connects the ranks, as far as `collectives` asks for it, and sets what `link` uses for rows of
/// `hidden`. All ranks at the same time.
pub fn settle(link: &mut Link, collectives: &Collectives, hidden: usize) -> Result<Found> {
    let mut found = Found::default();
    let Collectives { algorithm, measure, .. } = collectives;
    if let (None, Measure::Cached(path)) = (algorithm, measure) {
        let key = Key::of(link, collectives.nccl.as_deref(), hidden);
        let tuned = link.gathered(&cache::recall(link, path, &key).unwrap_or_default())?.swap_remove(0);
        let needs_nccl = tuned.iter().any(|t| t.variant.algorithm.needs_nccl());
        let is_ready = match needs_nccl {
            false => true,
            true => match open_nccl(link, collectives)? {
                Ok(library) => link.attach_nccl(&library, Algorithm::Nccl, &sizes(), hidden).is_ok(),
                Err(_) => false,
            },
        };
        if is_ready && !tuned.is_empty() {
            (found.tuned, found.cached) = (tuned, true);
        }
    }
    let must_tune = algorithm.is_none() && *measure != Measure::Never && !found.cached;
    if must_tune || *measure == Measure::Anew || (collectives.require_p2p && *measure != Measure::Never) {
        found.pairs = pairs::probe(link)?;
    }
    let bad: Vec<String> = found.bad_pairs().map(Pair::to_string).collect();
    if collectives.require_p2p && !bad.is_empty() {
        return Err(machine(format!("--require-p2p: {}", bad.join("; "))));
    }
    if must_tune {
        // Several ranks a GPU are an experiment of NCCL's, in which it may hang.
        if !link.wire().shared {
            match open_nccl(link, collectives)? {
                Ok(library) => {
                    let attached = link.attach_nccl(&library, Algorithm::Nccl, &sizes(), hidden);
                    found
                        .failed
                        .extend(attached.err().map(|e| Failed { algorithm: Algorithm::Nccl, why: format!("{e:#}") }));
                }
                Err(e) if collectives.nccl.is_some() => return Err(e),
                Err(_) => {} // it is not here
            }
        }
        let culprits = || if bad.is_empty() { "GPUs corrupt each other's data".to_string() } else { bad.join("; ") };
        tune::check_words(link)?.map_err(|why| machine(format!("words between ranks: {why}; {}", culprits())))?;
        let (tuned, failed) = tune::tune(link, &TUNED_ROWS, hidden)?;
        found.failed.extend(failed);
        found.tuned = tuned;
        if found.tuned.is_empty() {
            let failed: Vec<String> = found.failed.iter().map(Failed::to_string).collect();
            return Err(machine(format!("no sums over ranks are right: {}; {}", failed.join("; "), culprits())));
        }
        // A machine that should be cured is told so at every start.
        let is_well = bad.is_empty() && found.failed.iter().all(|f| f.algorithm.needs_nccl());
        if let (Measure::Cached(path), 0, true) = (measure, link.rank, is_well) {
            // Where it cannot be written the next start measures again.
            let _ = cache::remember(path, Key::of(link, collectives.nccl.as_deref(), hidden), &found.tuned);
        }
    }
    match *algorithm {
        Some(algorithm) => {
            if algorithm.needs_nccl() {
                link.attach_nccl(&open_nccl(link, collectives)??, algorithm, &sizes(), hidden)?;
            }
            link.choose(
                sizes()
                    .into_iter()
                    .map(|rows| (rows, Variant { algorithm, blocks: link.wire().blocks(algorithm, rows, hidden) }))
                    .collect(),
            );
        }
        None => {
            link.choose(found.tuned.iter().map(|t| (t.rows, t.variant)).collect());
            if !found.tuned.iter().any(|t| t.variant.algorithm.needs_nccl()) {
                link.detach_nccl();
            }
        }
    }
    Ok(found)
}

/// NCCL's library, by all ranks or by none; the inner error says why not.
fn open_nccl(link: &Link, collectives: &Collectives) -> Result<Result<Arc<nccl::Library>>> {
    let library = nccl::Library::open(collectives.nccl.as_deref());
    let found = link.all_gather(&[library.is_ok() as u8])?;
    let missing = found.iter().position(|ok| ok[0] == 0);
    Ok(library.and_then(|library| {
        missing.map_or(Ok(library), |rank| Err(machine(format!("rank {rank} does not find NCCL"))))
    }))
}

/// Numbers of rows that passes have.
fn sizes() -> Vec<usize> {
    WIDTHS.into_iter().chain(PREFILL_ROWS).collect()
}
