//! What connects the ranks' GPUs, and which way of adding sums is right and fastest on it: measured at start and
//! remembered.
//!
//! `settle` is what every rank calls, all at the same time, before its Machine is made. `probe` measures pairs of GPUs
//! with stores and loads of their SMs, since copy engines do not show what is wrong with those; `tune` checks the sums
//! of every algorithm, then times it. All ranks see the same numbers and so choose alike. The kernels are those of
//! kernels/comm.cuh; what runs between ranks otherwise is in comm.rs.
use super::comm::{self, Algorithm, AllReduce, Choice, Exchange, FaultKind, Link, Place};
use super::device::{Gpu, Kernel, Launch, Memory, Pinned};
use super::machine::{STORAGE, WIDTHS};
use super::nccl;
use super::params::*;
use crate::decode::MAX_DRAFTS;
use crate::error::machine;
use crate::model::config::Config;
use crate::model::plan::{self, Drafter, Pass, Ranks, PREFILL_ROWS};
use anyhow::{Context, Result};
use half::bf16;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How ranks add up what each has.
#[derive(Clone, Debug, Default)]
pub struct Collectives {
    /// None: what is fastest.
    pub algorithm: Option<Algorithm>,
    /// Whether every rank has all of attention; None: where `tune` finds sums to take longer than reading it.
    pub whole_attention: Option<bool>,
    /// Whether ranks divide the layer of a drafter that can be divided; None: where that is faster. The text is the
    /// same.
    pub split_drafter: Option<bool>,
    /// The NCCL library; None: where the system finds it.
    pub nccl: Option<PathBuf>,
    /// An error instead of a slower way where GPUs do not reach each other's memory.
    pub require_p2p: bool,
    pub measure: Measure,
    pub link: comm::Options,
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
    /// What attention costs divided and whole; None where sums were not timed.
    pub attention: Option<AttentionCost>,
}

impl Found {
    /// Microseconds of a sum of one row in a graph; None where sums were not timed.
    fn sum_us(&self) -> Option<f64> {
        let tuned = self.tuned.first()?;
        tuned.times.iter().find(|(choice, _)| *choice == tuned.choice).map(|(_, us)| *us)
    }

    pub fn bad_pairs(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter().filter(|pair| !pair.state().is_good())
    }
}

/// What rank `from` can do with the memory of rank `to`, while all ranks do the same with one peer each.
#[derive(Clone, Debug)]
pub struct Pair {
    pub from: usize,
    pub to: usize,
    /// Both GPUs by number and PCI address.
    pub gpus: [String; 2],
    pub same_gpu: bool,
    /// Bytes per second.
    pub store_rate: f64,
    pub load_rate: f64,
    /// Of a word, one way; None: no answer came.
    pub latency_us: Option<f64>,
    /// 16-byte words that did not arrive as they were sent, of `PATTERN_BYTES / 16`.
    pub wrong_stores: u64,
    pub wrong_loads: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    SameGpu,
    Healthy,
    /// Through host memory, by the driver, an IOMMU or ACS.
    Staged,
    /// Posted writes fall far below reads.
    Collapsed,
    /// Wrong data, or no answer.
    Off,
}

impl State {
    pub fn is_good(self) -> bool {
        matches!(self, State::SameGpu | State::Healthy)
    }
}

// Limits between what was measured on machines with RTX PRO 6000s that were well and on those that were not
// (github.com/local-inference-lab/rtx6kpro, hardware/ and optimization/pcie-oneshot-allreduce.md).

/// One way of a word between healthy GPUs takes 0.6 to 1.5 us on PCIe, and a fence and a poll up to 1 us; 14 us with
/// peer access off.
const STAGED_LATENCY_US: f64 = 5.0;
/// A GPU gets 20 GB/s while all are busy, 6.5 GB/s on the worst healthy board known; 3 GB/s where the driver stages SM
/// accesses through host memory.
const STAGED_RATE: f64 = 5e9;
/// Boards whose posted writes collapse were seen at 2.7 to 7 GB/s (collapse-report.md), with reads at 20 (all busy) to
/// 53 GB/s (one alone).
const COLLAPSE_RATIO: f64 = 2.5;
/// Faster stores are no collapse, whatever loads reach: NVLink loads 190 GB/s and stores 58 GB/s in 16-byte words (two
/// H200).
const COLLAPSE_RATE: f64 = 20e9;

impl Pair {
    pub fn state(&self) -> State {
        let is_off = self.wrong_stores > 0 || self.wrong_loads > 0 || self.latency_us.is_none();
        match self.latency_us {
            _ if is_off => State::Off,
            _ if self.same_gpu => State::SameGpu,
            _ if self.load_rate >= STAGED_RATE
                && self.store_rate < COLLAPSE_RATE
                && self.store_rate * COLLAPSE_RATIO < self.load_rate =>
            {
                State::Collapsed
            }
            Some(us) if us > STAGED_LATENCY_US => State::Staged,
            _ if self.load_rate.min(self.store_rate) < STAGED_RATE => State::Staged,
            _ => State::Healthy,
        }
    }

    fn cure(&self) -> &'static str {
        match self.state() {
            State::SameGpu | State::Healthy => "",
            State::Off => {
                "; turn the IOMMU off (iommu=off, or iommu=pt) and clear ACS on root ports and switches; a GPU that still fails is broken"
            }
            State::Staged => {
                "; turn the IOMMU off, clear ACS on root ports and switches, and let the driver use peer access: \
                 options nvidia NVreg_RegistryDwords=\"ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1\""
            }
            State::Collapsed => "; a newer BIOS or driver may cure it, --collective pull avoids it",
        }
    }
}

/// `rank 0 (GPU 0, 0000:17:00.0) to rank 1 (...): healthy: stores 50.1 GB/s, ...` and the cure, if one is needed.
impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let state = match self.state() {
            State::SameGpu => "same GPU",
            State::Healthy => "healthy",
            State::Staged => "staged through host memory",
            State::Collapsed => "stores collapse",
            State::Off => "off",
        };
        write!(f, "rank {} ({}) to rank {} ({}): {state}: ", self.from, self.gpus[0], self.to, self.gpus[1])?;
        let words = PATTERN_BYTES / 16;
        for (what, rate, wrong) in
            [("stores", self.store_rate, self.wrong_stores), ("loads", self.load_rate, self.wrong_loads)]
        {
            match wrong {
                0 => write!(f, "{what} {:.1} GB/s, ", rate / 1e9)?,
                _ => write!(f, "{wrong} of {words} {what} wrong, ")?,
            }
        }
        match self.latency_us {
            Some(us) => write!(f, "one way {us:.1} us")?,
            None => write!(f, "no answer to a ping")?,
        }
        f.write_str(self.cure())
    }
}

/// Sums of up to so many rows; the last counts for all larger ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuned {
    pub rows: usize,
    pub choice: Choice,
    /// Microseconds of a call in a graph, each algorithm with the number of blocks that suits it best.
    pub times: Vec<(Choice, f64)>,
}

impl fmt::Display for Tuned {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let times: Vec<String> = self
            .times
            .iter()
            .map(|(c, us)| format!("{} {us:.1} us ({} blocks)", c.algorithm.name(), c.blocks))
            .collect();
        write!(f, "{} rows: {}: {}", self.rows, self.choice.algorithm.name(), times.join(", "))
    }
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

/// A short conversation.
const DEPTH: usize = 2048;
/// Sums over ranks that are well take 4 us (NVLink, measured) to 20 us (eight GPUs on PCIe, published); a machine is
/// only given up, and the text another one, beyond.
const SLOW_SUM_US: f64 = 40.0;
/// The time of a sum is measured, that of reading comes from the memory's clock, and prompts take longer: whole
/// attention must promise more.
const PROMISE: f64 = 1.5;

impl AttentionCost {
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

/// Whether every rank should have all of the attention of a model, with room for `context` tokens. All ranks at the
/// same time, behind `settle`, which found `found`.
pub fn attention(link: &Link, config: &Config, context: usize, found: &Found) -> Result<Option<AttentionCost>> {
    let Some(sum_us) = found.sum_us().filter(|_| !link.shared) else { return Ok(None) };
    let (ranks, rate) = (link.as_ranks(), link.gpu().info().memory_rate());
    // Where heads cannot be divided there is nothing to choose.
    let plan =
        |whole_attention| plan::target(config, Pass::Verify { width: 1 }, Ranks { whole_attention, ..ranks }, &[]);
    let (Ok(divided), Ok(whole)) = (plan(false), plan(true)) else { return Ok(None) };
    // What a pass reads of a full cache is what lies in memory, the embedding and work apart.
    let needed = whole.bytes(context, STORAGE) as f64 * 1.2;
    let own = AttentionCost {
        sum_us,
        read_us: (whole.bytes(DEPTH, STORAGE) - divided.bytes(DEPTH, STORAGE)) as f64
            / config.n_layers as f64
            / rate.max(1.0)
            * 1e6,
        fits: rate > 0.0 && needed < link.gpu().memory()?.0 as f64,
    };
    let all: Vec<(f64, bool)> = gathered(link, &(own.read_us, own.fits))?;
    let read_us = all.iter().fold(0f64, |most, (us, _)| most.max(*us));
    Ok(Some(AttentionCost { read_us, fits: all.iter().all(|(_, fits)| *fits), ..own }))
}

/// Whether a draft is made sooner when ranks divide the drafter's layer, two sums over ranks included. All ranks at the
/// same time, as `attention`.
pub fn splitting_pays(link: &Link, drafter: &Drafter, found: &Found) -> Result<bool> {
    let Some(sum_us) = found.sum_us().filter(|_| !link.shared) else { return Ok(false) };
    // Of one draft more.
    let bytes = |ranks: Ranks| -> Result<f64> {
        let [two, one] =
            [2, 1].map(|drafts| plan::drafter(drafter, Pass::Draft { width: MAX_DRAFTS + 1, drafts }, ranks));
        Ok((two?.bytes(DEPTH, STORAGE) - one?.bytes(DEPTH, STORAGE)) as f64)
    };
    let saved = bytes(Ranks::ONE)? - bytes(Ranks { split_drafter: true, ..Ranks::new(link.rank, link.ranks()) })?;
    let saved_us = saved / link.gpu().info().memory_rate() * 1e6; // infinite where nobody knows the rate
    let pays = gathered(link, &(saved_us.is_finite() && saved_us > PROMISE * 2.0 * sum_us))?;
    Ok(pays.into_iter().all(|pays| pays))
}

/// An algorithm that is not used.
#[derive(Clone, Debug)]
pub struct Failed {
    pub algorithm: Algorithm,
    pub why: String,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} is not used: {}", self.algorithm.name(), self.why)
    }
}

/// Finds out what connects the ranks, as far as `collectives` asks for it, and sets what `link` uses for rows of
/// `hidden`. All ranks at the same time.
pub fn settle(link: &mut Link, collectives: &Collectives, hidden: usize) -> Result<Found> {
    let mut found = Found::default();
    let Collectives { algorithm, measure, .. } = collectives;
    if let (None, Measure::Cached(path)) = (algorithm, measure) {
        let key = Key::of(link, collectives, hidden);
        let tuned = agreed(link, &recall(link, path, &key).unwrap_or_default())?;
        let needs_nccl = tuned.iter().any(|t| t.choice.algorithm.needs_nccl());
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
        found.pairs = probe(link)?;
    }
    let bad: Vec<String> = found.bad_pairs().map(Pair::to_string).collect();
    if collectives.require_p2p && !bad.is_empty() {
        return Err(machine(format!("--require-p2p: {}", bad.join("; "))));
    }
    if must_tune {
        // Several ranks a GPU are an experiment of NCCL's, in which it may hang.
        if !link.shared {
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
        check_words(link)?.map_err(|why| machine(format!("words between ranks: {why}; {}", culprits())))?;
        let (tuned, failed) = tune(link, &TUNED_ROWS, hidden)?;
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
            let _ = remember(path, Key::of(link, collectives, hidden), &found.tuned);
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
                    .map(|rows| (rows, Choice { algorithm, blocks: link.blocks(algorithm, rows, hidden) }))
                    .collect(),
            );
        }
        None => {
            link.choose(found.tuned.iter().map(|t| (t.rows, t.choice)).collect());
            if !found.tuned.iter().any(|t| t.choice.algorithm.needs_nccl()) {
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

/// Rank 0's.
fn agreed<T: Serialize + for<'a> Deserialize<'a>>(link: &Link, mine: &T) -> Result<T> {
    let given = link.all_gather(&serde_json::to_vec(mine)?)?;
    Ok(serde_json::from_slice(&given[0])?)
}

/// Everybody's, by rank.
fn gathered<T: Serialize + for<'a> Deserialize<'a>>(link: &Link, mine: &T) -> Result<Vec<T>> {
    link.all_gather(&serde_json::to_vec(mine)?)?.iter().map(|bytes| Ok(serde_json::from_slice(bytes)?)).collect()
}

// ---- pairs ----

/// Stored and loaded at once, in a window, behind channel 0 which pings use. Far more than is under way at any time.
const PATTERN_BYTES: usize = 2 << 20;
const PATTERN_AT: usize = COMM_LINE_BYTES + COMM_CHANNEL_BYTES;
const _: () = assert!(PATTERN_AT + PATTERN_BYTES <= COMM_WINDOW_BYTES);
/// Patterns in a row, so that ranks that start a little late do not change the rate.
const REPEATS: u64 = 4;
const PING_ROUNDS: usize = 100;
/// A ping that got no answer by then gets none: ranks meet before it, and it takes microseconds.
const PING_PATIENCE: Duration = Duration::from_millis(200);

/// What one rank measured, by peer.
#[derive(Default, Serialize, Deserialize)]
struct Row {
    store_rate: Vec<f64>,
    load_rate: Vec<f64>,
    /// Of what the peer stored here.
    wrong_stores: Vec<u64>,
    wrong_loads: Vec<u64>,
    latency_us: Vec<Option<f64>>,
}

struct Prober<'a> {
    link: &'a Link,
    gpu: &'a Gpu,
    /// Each as it is and with planted faults.
    store: [Kernel; 2],
    load: [Kernel; 2],
    ping: [Kernel; 2],
    result: Pinned<u64>,
    /// Pings must not poison the rank.
    poison: Pinned<u32>,
    record: Pinned<CommRecord>,
}

/// Every ordered pair of ranks. All ranks at the same time, between collectives; windows are empty again at the end.
pub fn probe(link: &Link) -> Result<Vec<Pair>> {
    let (gpu, rank, ranks) = (link.gpu(), link.rank, link.ranks());
    let kernels = |name, faulty| Ok::<_, anyhow::Error>([gpu.kernel(name, 0)?, gpu.kernel(faulty, 0)?]);
    let prober = Prober {
        link,
        gpu,
        store: kernels("peer_store", "peer_store_faulty")?,
        load: kernels("peer_load", "peer_load_faulty")?,
        ping: kernels("peer_ping", "peer_ping_faulty")?,
        result: gpu.pinned(1)?,
        poison: gpu.pinned(1)?,
        record: gpu.pinned(1)?,
    };
    let mut row = Row {
        store_rate: vec![0.0; ranks],
        load_rate: vec![0.0; ranks],
        wrong_stores: vec![0; ranks],
        wrong_loads: vec![0; ranks],
        latency_us: vec![None; ranks],
    };
    // Each round everybody has one peer: all links are busy, and boards that fail under load show it.
    for distance in 1..ranks {
        let (to, from) = ((rank + distance) % ranks, (rank + ranks - distance) % ranks);
        link.barrier()?;
        row.store_rate[to] = prober.rate(|| prober.launch_store(to, seed(rank, to)))?;
        link.barrier()?;
        row.wrong_stores[from] = prober.wrong(|| prober.launch_load(rank, seed(from, rank)))?;
        prober.launch_store(rank, seed(rank, rank))?;
        gpu.synchronize()?;
        link.barrier()?;
        prober.result.write(0, 0);
        row.load_rate[to] = prober.rate(|| prober.launch_load(to, seed(to, to)))?;
        row.wrong_loads[to] = prober.result.read(0).div_ceil(REPEATS);
        link.barrier()?;
    }
    // One pair at a time.
    for first in 0..ranks {
        for second in first + 1..ranks {
            gpu.fill(link.window(rank, FLAGS_AT), 0, COMM_MAX_RANKS * COMM_LINE_BYTES)?;
            gpu.synchronize()?;
            link.barrier()?;
            match rank {
                _ if rank == first => row.latency_us[second] = prober.ping_peer(second)?,
                _ if rank == second => row.latency_us[first] = prober.ping_peer(first)?,
                _ => {}
            }
            link.barrier()?;
        }
    }
    link.reset()?;
    let rows: Vec<Row> = gathered(link, &row)?;
    let name = |place: &Place| format!("GPU {}, {}", place.ordinal, place.bus_id);
    let pair = |from: usize, to: usize| Pair {
        from,
        to,
        gpus: [name(&link.places[from]), name(&link.places[to])],
        same_gpu: link.places[from].bus_id == link.places[to].bus_id,
        store_rate: rows[from].store_rate[to],
        load_rate: rows[from].load_rate[to],
        wrong_stores: rows[to].wrong_stores[from],
        wrong_loads: rows[from].wrong_loads[to],
        latency_us: rows[to].latency_us[from].and(rows[from].latency_us[to]),
    };
    Ok((0..ranks)
        .flat_map(|from| (0..ranks).filter(move |to| *to != from).map(move |to| (from, to)))
        .map(|(a, b)| pair(a, b))
        .collect())
}

/// Of the flags of channel 0's first buffer.
const FLAGS_AT: usize = 2 * COMM_LINE_BYTES + COMM_FLAGS;

/// Of a pattern: no two that meet in a window are alike.
fn seed(from: usize, to: usize) -> u32 {
    (1 + from * COMM_MAX_RANKS + to) as u32
}

impl Prober<'_> {
    /// Whether a fault is planted in what goes to `peer`, and the parameters for it.
    fn params(&self, peer: usize, seed: u32) -> (usize, PeerParams) {
        let fault = self.link.fault_to(peer);
        let mut comm = self.link.comm_of("probe");
        let pair = [peer.min(self.link.rank), peer.max(self.link.rank)];
        comm.window = [0; COMM_MAX_RANKS];
        for (at, rank) in comm.window.iter_mut().zip(pair) {
            *at = self.link.window(rank, 0);
        }
        comm.rank = (self.link.rank > peer) as i32;
        (comm.ranks, comm.fault, comm.fault_peer) = (2, fault.map_or(0, |kind: FaultKind| kind as i32), 1 - comm.rank);
        (comm.poison, comm.record) = (self.poison.device(), self.record.device());
        comm.patience_us = comm.patience_us.min(PING_PATIENCE.as_micros() as u32);
        let at = self.link.window(peer, PATTERN_AT);
        let n = PATTERN_BYTES as u64 / 16;
        (
            fault.is_some() as usize,
            PeerParams { comm, at, n, result: self.result.device(), seed, rounds: PING_ROUNDS as i32 },
        )
    }

    fn launch(&self, kernels: &[Kernel; 2], grid: u32, block: u32, (fault, params): (usize, PeerParams)) -> Result<()> {
        self.gpu.launch(&kernels[fault], Launch { grid: (grid, 1, 1), block, shared: 0, early: false }, &params)
    }

    /// Into the window of `peer`, or its own.
    fn launch_store(&self, peer: usize, seed: u32) -> Result<()> {
        self.launch(&self.store, 2 * self.gpu.info().n_sms as u32, 256, self.params(peer, seed))
    }

    fn launch_load(&self, peer: usize, seed: u32) -> Result<()> {
        self.launch(&self.load, 2 * self.gpu.info().n_sms as u32, 256, self.params(peer, seed))
    }

    /// Bytes per second of patterns one after another.
    fn rate(&self, launch: impl Fn() -> Result<()>) -> Result<f64> {
        let ms = self.gpu.time(|| (0..REPEATS).try_for_each(|_| launch()))? as f64;
        Ok(PATTERN_BYTES as f64 * REPEATS as f64 / (ms.max(1e-6) / 1e3))
    }

    fn wrong(&self, load: impl Fn() -> Result<()>) -> Result<u64> {
        self.result.write(0, 0);
        load()?;
        self.gpu.synchronize()?;
        Ok(self.result.read(0))
    }

    /// Microseconds of one way, with the peer's launch at the same time.
    fn ping_peer(&self, peer: usize) -> Result<Option<f64>> {
        self.poison.write(0, 0);
        self.launch(&self.ping, 1, 32, self.params(peer, 0))?;
        self.gpu.synchronize()?;
        let ns = self.result.read(0);
        Ok((ns != u64::MAX).then(|| ns as f64 / 1e3 / (2 * (PING_ROUNDS - 1)) as f64))
    }
}

// ---- sums ----

/// Rows of plain decode, of drafts, and of prompts, where the largest counts for all.
pub const TUNED_ROWS: [usize; 6] = [1, 2, 4, 8, 16, PREFILL_ROWS[PREFILL_ROWS.len() - 1]];
/// Calls in a graph: as many as take about so long, so that its launch does not count.
const GRAPH_US: f64 = 1000.0;
const MOST_CALLS: f64 = 20.0;
const REPLAYS: usize = 5;
const STEP: &str = "the check of sums";

/// Whether exchanged words are right; the inner error says what is not.
fn check_words(link: &Link) -> Result<Result<(), String>> {
    const N: usize = 300;
    let gpu = link.gpu();
    let of = |rank: usize| (0..N as u64).map(move |i| ((i + 1) * (rank as u64 + 3)) << (i % 40));
    let words = gpu.store(&of(link.rank).collect::<Vec<u64>>())?;
    let all: Vec<Vec<u64>> = (0..link.ranks()).map(|rank| of(rank).collect()).collect();
    // Twice each: there are two buffers.
    for op in [Exchange::Sum, Exchange::Sum, Exchange::Max, Exchange::Max] {
        gpu.upload(&all[link.rank], words.at(0))?;
        gpu.synchronize()?;
        link.barrier()?;
        link.exchange("the check of words", words.at(0), N, op)?;
        gpu.synchronize()?;
        let found: Vec<u64> = gpu.download(words.at(0), N)?;
        let right = (0..N).all(|i| {
            let words = all.iter().map(|words| words[i]);
            found[i] == if op == Exchange::Sum { words.sum::<u64>() } else { words.max().unwrap_or(0) }
        });
        let verdict = match link.check() {
            Err(e) => Some(format!("{e:#}")),
            Ok(()) if !right => Some(format!("rank {}: wrong ones arrived", link.rank)),
            Ok(()) => None,
        };
        if let Some(why) = gathered(link, &verdict)?.into_iter().flatten().next() {
            return Ok(Err(why));
        }
    }
    Ok(Ok(()))
}

/// What the sums are made of and go to; all rows of any number that is tuned.
struct Bench<'a> {
    link: &'a Link,
    dim: usize,
    /// [rows][dim], all ranks' the same.
    x0: Vec<f32>,
    expected: Vec<f32>,
    partial: Memory,   // [rows][dim] bf16
    x: Memory,         // [rows][dim] f32
    next_norm: Memory, // [dim] bf16
    normed: Memory,    // [rows][dim] bf16
    squares: Memory,   // [rows][dim / 16] f32
}

/// A graph of sums alone does not tell small differences: on two H200s pull was 4 % faster than push at 8 rows there,
/// and made a pass of 8 rows of an 8B 5 % slower.
pub const NEARLY: f64 = 1.1;

/// The fastest algorithm whose sums are right, or an earlier one of push, pull, two-shot and NCCL that is nearly as
/// fast, for each number of rows of `dim`, ascending, and those that are not right, which are not used for any. All
/// ranks at the same time. Nothing is tuned when nothing is right.
pub fn tune(link: &Link, rows: &[usize], dim: usize) -> Result<(Vec<Tuned>, Vec<Failed>)> {
    let bench = Bench::new(link, *rows.last().context("no rows")?, dim)?;
    let mut algorithms = vec![Algorithm::Push, Algorithm::Pull, Algorithm::TwoShot];
    algorithms.extend(link.has_nccl().then_some(Algorithm::Nccl));
    let (mut tuned, mut failed) = (Vec::new(), Vec::<Failed>::new());
    for &rows in rows {
        let mut times: Vec<(Choice, f64)> = Vec::new();
        for &algorithm in &algorithms {
            let mut best: Option<(Choice, f64)> = None;
            for choice in candidates(link, algorithm, rows, dim) {
                match bench.measure(choice, rows)? {
                    Ok(us) if best.is_none_or(|(_, least)| us < least) => best = Some((choice, us)),
                    Ok(_) => {}
                    Err(why) => {
                        link.recover()?;
                        failed.push(Failed { algorithm, why });
                        break;
                    }
                }
            }
            times.extend(best);
        }
        let is_right = |algorithm: Algorithm| failed.iter().all(|f| f.algorithm != algorithm);
        algorithms.retain(|a| is_right(*a));
        times.retain(|(choice, _)| is_right(choice.algorithm));
        tuned.push((rows, times));
    }
    // What failed later is used nowhere.
    for (_, times) in &mut tuned {
        times.retain(|(choice, _)| algorithms.contains(&choice.algorithm));
    }
    let tuned =
        tuned.into_iter().filter_map(|(rows, times)| Some(Tuned { rows, choice: fastest(&times)?, times })).collect();
    link.barrier()?;
    Ok((tuned, failed))
}

/// The first that takes little longer than the fastest.
fn fastest(times: &[(Choice, f64)]) -> Option<Choice> {
    let least = times.iter().map(|t| t.1).min_by(f64::total_cmp)?;
    times.iter().find(|t| t.1 <= NEARLY * least).map(|t| t.0)
}

/// Numbers of blocks around the usual one.
fn candidates(link: &Link, algorithm: Algorithm, rows: usize, dim: usize) -> Vec<Choice> {
    let usual = link.blocks(algorithm, rows, dim);
    let blocks = if algorithm.needs_nccl() { vec![usual] } else { vec![usual / 2, usual, usual * 2] };
    let choices = blocks.into_iter().map(|blocks| Choice { algorithm, blocks });
    choices.filter(|choice| link.fits(*choice, dim).is_ok()).collect()
}

/// Numbers in [-1, 1), the same everywhere.
fn numbers(seed: u32, n: usize) -> impl Iterator<Item = f32> {
    let mut s = seed.wrapping_mul(0x9e3779b9) | 1;
    (0..n).map(move |_| {
        s ^= s << 13;
        s ^= s >> 17;
        s ^= s << 5;
        (s >> 8) as f32 / 8388608.0 - 1.0
    })
}

impl Bench<'_> {
    fn new(link: &Link, rows: usize, dim: usize) -> Result<Bench<'_>> {
        let (gpu, n) = (link.gpu(), rows * dim);
        let partial_of = |rank: usize| numbers(rank as u32 + 1, n).map(bf16::from_f32);
        let mut sums = vec![0f32; n];
        for rank in 0..link.ranks() {
            sums.iter_mut().zip(partial_of(rank)).for_each(|(sum, partial)| *sum += partial.to_f32());
        }
        let x0: Vec<f32> = numbers(100, n).collect();
        let expected = x0.iter().zip(&sums).map(|(x, sum)| x + bf16::from_f32(*sum).to_f32()).collect();
        Ok(Bench {
            link,
            dim,
            partial: gpu.store(&partial_of(link.rank).collect::<Vec<bf16>>())?,
            x: gpu.allocate(n * 4)?,
            next_norm: gpu.store(&vec![bf16::ONE; dim])?,
            normed: gpu.allocate(n * 2)?,
            squares: gpu.allocate(n / 4)?,
            x0,
            expected,
        })
    }

    /// Microseconds of a call in a graph, of the slowest rank, once the sums are right in graphs; the inner error says
    /// which are not. Alike on all ranks.
    fn measure(&self, choice: Choice, rows: usize) -> Result<Result<f64, String>> {
        let (link, gpu, n) = (self.link, self.link.gpu(), rows * self.dim);
        let sums = AllReduce {
            partial: self.partial.at(0),
            x: self.x.at(0),
            next_norm: self.next_norm.at(0),
            normed: self.normed.at(0),
            squares: self.squares.at(0),
            rows,
            dim: self.dim,
            ..AllReduce::default()
        };
        // Captures allocate: nothing may run meanwhile.
        let capture = |calls: usize| {
            link.barrier()?;
            let graph = gpu.capture(|| (0..calls).try_for_each(|_| link.all_reduce_with(choice, STEP, &sums)))?;
            gpu.synchronize()?;
            link.barrier()?;
            Ok::<_, anyhow::Error>(graph)
        };
        let once = capture(1)?;
        let mut once_us = 0.0;
        // Twice: there are two buffers.
        for _ in 0..2 {
            gpu.upload(&self.x0[..n], self.x.at(0))?;
            gpu.synchronize()?;
            link.barrier()?;
            let ms = gpu.time(|| gpu.replay(&once))?;
            once_us = match self.slowest(self.verdict(n)?, ms as f64 * 1e3)? {
                Ok(us) => us,
                Err(why) => return Ok(Err(why)),
            };
        }
        let calls = (GRAPH_US / once_us).clamp(1.0, MOST_CALLS).floor();
        let many = capture(calls as usize)?;
        let mut times = [0.0; REPLAYS];
        for ms in &mut times {
            link.barrier()?;
            gpu.replay(&once)?; // ranks start together
            *ms = gpu.time(|| gpu.replay(&many))? as f64;
        }
        times.sort_by(f64::total_cmp);
        let verdict = self.waited().unwrap_or(Verdict::Right);
        self.slowest(verdict, times[REPLAYS / 2] * 1e3 / calls)
    }

    /// What this rank waited for in vain.
    fn waited(&self) -> Option<Verdict> {
        let error = self.link.check().err()?;
        Some(Verdict::GaveUp(self.link.gave_up_in(), format!("{error:#}")))
    }

    /// Of x after one call.
    fn verdict(&self, n: usize) -> Result<Verdict> {
        if let Some(gave_up) = self.waited() {
            return Ok(gave_up);
        }
        let found: Vec<f32> = self.link.gpu().download(self.x.at(0), n)?;
        let is_wrong = |i: &usize| found[*i].to_bits() != self.expected[*i].to_bits();
        let Some(i) = (0..n).find(is_wrong) else { return Ok(Verdict::Right) };
        let (row, column, n_wrong) = (i / self.dim, i % self.dim, (0..n).filter(is_wrong).count());
        let (rank, gpu) = (self.link.rank, self.link.places[self.link.rank].ordinal);
        Ok(Verdict::Wrong(format!(
            "rank {rank} (GPU {gpu}): {n_wrong} of {n} sums are wrong, first row {row} column {column}: expected {}, found {}",
            self.expected[i], found[i]
        )))
    }

    /// The most microseconds of any rank, or what is wrong.
    fn slowest(&self, verdict: Verdict, us: f64) -> Result<Result<f64, String>> {
        let all = gathered(self.link, &(verdict, us))?;
        let slowest = all.iter().fold(0f64, |most, (_, us)| most.max(*us));
        Ok(match all.into_iter().map(|(verdict, _)| verdict).min() {
            Some(Verdict::GaveUp(_, why) | Verdict::Wrong(why)) => Err(why),
            _ => Ok(slowest),
        })
    }
}

/// What one rank says. The least of all ranks' counts: sums are wrong on others after one rank gave up, and who waits
/// for finished sums waits for a rank that waits itself.
#[derive(PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Verdict {
    /// In which phase of the collective, and the whole line.
    GaveUp(i32, String),
    Wrong(String),
    Right,
}

// ---- the file ----

/// What a choice depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Key {
    /// UUIDs, by rank.
    gpus: Vec<String>,
    ranks_per_gpu: usize,
    driver: String,
    volley: String,
    nccl: Option<PathBuf>,
    hidden: usize,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    key: Key,
    tuned: Vec<Tuned>,
}

impl Key {
    fn of(link: &Link, collectives: &Collectives, hidden: usize) -> Key {
        // The driver's own version, where the system tells it; the CUDA version that it supports changes less often.
        let driver = fs::read_to_string("/sys/module/nvidia/version").unwrap_or_default();
        Key {
            gpus: link.places.iter().map(|place| place.uuid.clone()).collect(),
            ranks_per_gpu: link.sharing(),
            driver: format!("{} {}", link.gpu().info().driver, driver.trim()),
            volley: env!("CARGO_PKG_VERSION").into(),
            nccl: collectives.nccl.clone(),
            hidden,
        }
    }
}

/// $XDG_CACHE_HOME/volley/collectives.json, below ~/.cache without the variable; None where there is no home either.
pub fn cache_path() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
    Some(cache.join("volley").join("collectives.json"))
}

/// A file that is damaged knows nothing.
fn entries(path: &Path) -> Vec<Entry> {
    fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
}

fn recall(link: &Link, path: &Path, key: &Key) -> Option<Vec<Tuned>> {
    let tuned = entries(path).into_iter().find(|entry| entry.key == *key)?.tuned;
    let fits = |t: &Tuned| t.choice.blocks > 0 && link.fits(t.choice, key.hidden).is_ok();
    (tuned.iter().map(|t| t.rows).eq(TUNED_ROWS) && tuned.iter().all(fits)).then_some(tuned)
}

fn remember(path: &Path, key: Key, tuned: &[Tuned]) -> Result<()> {
    let mut all = entries(path);
    all.retain(|entry| entry.key != key);
    all.push(Entry { key, tuned: tuned.to_vec() });
    fs::create_dir_all(path.parent().context("a file has a folder")?)?;
    // Another start may read it at any time.
    let new = path.with_extension(format!("{}.tmp", std::process::id()));
    fs::write(&new, serde_json::to_vec_pretty(&all)?)?;
    Ok(fs::rename(&new, path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small differences between graphs of sums do not decide; large ones do.
    #[test]
    fn the_fastest_way_is_clearly_faster() {
        let time = |algorithm, us| (Choice { algorithm, blocks: 4 }, us);
        let chosen = |times: &[(Choice, f64)]| fastest(times).map(|choice| choice.algorithm);
        let measured = [time(Algorithm::Push, 5.1), time(Algorithm::Pull, 4.9), time(Algorithm::Nccl, 7.3)];
        assert_eq!(chosen(&measured), Some(Algorithm::Push));
        assert_eq!(chosen(&measured[1..]), Some(Algorithm::Pull));
        assert_eq!(chosen(&[time(Algorithm::Push, 149.0), time(Algorithm::Nccl, 122.0)]), Some(Algorithm::Nccl));
        assert_eq!(chosen(&[]), None);
    }

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

    /// Measurements that were published, and what each machine had.
    #[test]
    fn pairs_are_what_they_were_found_to_be() {
        let pair = |store: f64, load: f64, latency_us: Option<f64>| Pair {
            from: 0,
            to: 1,
            gpus: ["GPU 0, a".into(), "GPU 1, b".into()],
            same_gpu: false,
            store_rate: store * 1e9,
            load_rate: load * 1e9,
            latency_us,
            wrong_stores: 0,
            wrong_loads: 0,
        };
        for (measured, state, cure) in [
            (pair(53.0, 50.0, Some(0.7)), State::Healthy, "healthy"),
            (pair(6.5, 6.5, Some(1.5)), State::Healthy, "one way 1.5 us"),
            (pair(2.7, 53.0, Some(1.1)), State::Collapsed, "--collective pull"),
            (pair(7.0, 20.0, Some(9.0)), State::Collapsed, "stores 7.0 GB/s"),
            (pair(3.3, 3.3, Some(1.5)), State::Staged, "ForceP2P"),
            (pair(20.0, 20.0, Some(14.0)), State::Staged, "IOMMU"),
            (pair(20.0, 20.0, None), State::Off, "no answer to a ping"),
            (Pair { wrong_loads: 1, ..pair(20.0, 20.0, Some(1.0)) }, State::Off, "1 of 131072 loads wrong"),
            (Pair { same_gpu: true, ..pair(0.1, 20.0, Some(50.0)) }, State::SameGpu, "same GPU"),
            (
                Pair { same_gpu: true, wrong_stores: 7, ..pair(9.0, 9.0, Some(1.0)) },
                State::Off,
                "7 of 131072 stores wrong",
            ),
        ] {
            let line = measured.to_string();
            assert_eq!(measured.state(), state, "{line}");
            assert!(
                line.contains(cure)
                    && line.starts_with("rank 0 (GPU 0, a) to rank 1 (GPU 1, b): ")
                    && !line.contains('\n'),
                "{line}"
            );
        }
    }
}
