//! What a rank has of the others: windows into their memory, and the collectives that run through them
//! (kernels/comm.cuh says how).
//!
//! A `Link` is made by the thread of its rank, all ranks at the same time: they meet in a `Rendezvous`, which is all
//! that knows whether ranks are threads of one process or something else. Launches may be captured. A kernel that waits
//! in vain poisons its rank; `check` says what it waited for. links.rs finds out what pairs of GPUs can do and which
//! algorithm is fastest.
use super::device::{Gpu, Kernel, Launch, Memory, Params, Pinned};
use super::nccl;
use super::params::*;
use crate::error::{internal, machine};
use crate::model::plan::Ranks;
use anyhow::{bail, ensure, Context, Result};
use bytemuck::Zeroable;
use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// Where ranks meet before they can talk through memory, and where the failure of one becomes known to all.
pub trait Rendezvous: Send + Sync {
    fn ranks(&self) -> usize;
    /// Gives `mine` to all and takes everybody's, by rank; also a barrier. All ranks call it equally often. Fails when
    /// a rank does not come or has failed.
    fn all_gather(&self, rank: usize, mine: &[u8]) -> Result<Vec<Vec<u8>>>;
    /// Takes what ends the waiting of a rank's kernels, for the day a rank fails.
    fn attend(&self, poison: Poison);
    /// Nobody waits any more, now or later, neither here nor in a kernel.
    fn fail(&self, why: &str);
}

/// Ranks that are threads of one process.
pub struct Threads {
    ranks: usize,
    meeting: Mutex<Meeting>,
    changed: Condvar,
}

#[derive(Default)]
struct Meeting {
    round: usize,
    given: Vec<Option<Vec<u8>>>,
    /// Of the last full round. The next one is full only when everybody has taken from this.
    taken: Vec<Vec<u8>>,
    patience: Duration,
    failed: Option<String>,
    poisons: Vec<Poison>,
}

impl Meeting {
    fn fail(&mut self, why: &str) {
        self.failed.get_or_insert_with(|| why.to_string());
        self.poisons.iter().for_each(Poison::poison);
    }
}

impl Threads {
    /// `patience`: how long the first to come waits for the last.
    pub fn new(ranks: usize, patience: Duration) -> Arc<Threads> {
        let meeting = Meeting { given: vec![None; ranks], patience, ..Meeting::default() };
        Arc::new(Threads { ranks, meeting: Mutex::new(meeting), changed: Condvar::new() })
    }

    /// Another patience from the next meeting on.
    pub fn set_patience(&self, patience: Duration) {
        self.lock().patience = patience;
    }

    fn lock(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().unwrap_or_else(|e| e.into_inner()) // nothing below panics half-way
    }
}

impl Rendezvous for Threads {
    fn ranks(&self) -> usize {
        self.ranks
    }

    fn all_gather(&self, rank: usize, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut meeting = self.lock();
        let round = meeting.round;
        if let Some(why) = &meeting.failed {
            return Err(stopped(rank, why));
        }
        meeting.given[rank] = Some(mine.to_vec());
        if meeting.given.iter().all(Option::is_some) {
            meeting.taken = meeting.given.iter_mut().filter_map(Option::take).collect();
            meeting.round += 1;
            self.changed.notify_all();
        }
        let patience = meeting.patience;
        let end = Instant::now() + patience;
        while meeting.round == round && meeting.failed.is_none() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let missing: Vec<String> =
                    (0..self.ranks).filter(|&r| meeting.given[r].is_none()).map(|r| r.to_string()).collect();
                meeting.fail(&format!("rank {} did not come within {} s", missing.join(", "), patience.as_secs_f32()));
                self.changed.notify_all();
                break;
            }
            meeting = self.changed.wait_timeout(meeting, left).unwrap_or_else(|e| e.into_inner()).0;
        }
        match &meeting.failed {
            Some(why) if meeting.round == round => Err(stopped(rank, why)),
            _ => Ok(meeting.taken.clone()),
        }
    }

    fn attend(&self, poison: Poison) {
        let mut meeting = self.lock();
        if meeting.failed.is_some() {
            poison.poison();
        }
        meeting.poisons.push(poison);
    }

    fn fail(&self, why: &str) {
        self.lock().fail(why);
        self.changed.notify_all();
    }
}

fn stopped(rank: usize, why: &str) -> anyhow::Error {
    machine(why).context(Stopped(rank))
}

/// Of an error whose cause is another rank's.
#[derive(Debug)]
struct Stopped(usize);

impl std::fmt::Display for Stopped {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "rank {} stopped", self.0)
    }
}

/// Whether a rank has this error because another rank failed.
pub fn follows(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Stopped>().is_some()
}

/// How partial sums travel. All but the last give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    Push,
    Pull,
    TwoShot,
    /// Ring all-gather by NCCL, then the same sum here.
    Nccl,
    /// NCCL adds, in an order that may depend on the number of rows: for comparison.
    NcclAllReduce,
}

impl Algorithm {
    pub const NAMES: [(&'static str, Algorithm); 5] = [
        ("push", Algorithm::Push),
        ("pull", Algorithm::Pull),
        ("two-shot", Algorithm::TwoShot),
        ("nccl", Algorithm::Nccl),
        ("nccl-allreduce", Algorithm::NcclAllReduce),
    ];

    pub fn name(self) -> &'static str {
        Algorithm::NAMES.iter().find(|n| n.1 == self).map_or("?", |n| n.0)
    }

    pub fn needs_nccl(self) -> bool {
        matches!(self, Algorithm::Nccl | Algorithm::NcclAllReduce)
    }
}

/// An algorithm with the blocks it is launched with: equal on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Choice {
    pub algorithm: Algorithm,
    pub blocks: usize,
}

/// Addresses and sizes of one all-reduce; what they mean is in kernels/params.h, AllReduceParams. 0: absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllReduce {
    pub partial: u64,
    pub x: u64,
    pub bias: u64,
    pub tap: u64,
    pub tap_stride: usize,
    pub next_norm: u64,
    pub normed: u64,
    pub squares: u64,
    pub n_rows: u64,
    pub rows: usize,
    pub dim: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    Max,
    Sum,
}

/// What a test or doctor lets go wrong: rank `rank`'s words to `peer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: FaultKind,
    pub rank: usize,
    pub peer: usize,
    /// In this algorithm; None: in all of them, exchanges of words and the probe.
    pub only: Option<Algorithm>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum FaultKind {
    Drop = 1,
    Zero = 2,
    Flip = 3,
    /// The rank's kernels start twice the patience late.
    Stall = 4,
}

#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// A kernel that waits longer than this for one thing gives up.
    pub patience: Duration,
    pub fault: Option<Fault>,
    /// For tests: what the epochs stand at (comm_protocol.h), 0 in production.
    pub last_epoch: u32,
}

impl Default for Options {
    fn default() -> Options {
        Options { patience: Duration::from_secs(2), fault: None, last_epoch: 0 }
    }
}

/// One rank, as all know it.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct Place {
    /// Of its window, in its own GPU's memory.
    address: u64,
    pub ordinal: usize,
    pub bus_id: String,
    pub uuid: String,
}

pub struct Link {
    pub rank: usize,
    pub places: Vec<Place>,
    rendezvous: Arc<dyn Rendezvous>,
    kernels: Kernels,
    comm: CommRanks,
    /// Ranks share a GPU: kernels start when the one before has ended, on few blocks, so that the others' kernels find
    /// room.
    pub shared: bool,
    /// As in model::plan::Ranks.
    pub whole_attention: bool,
    pub split_drafter: bool,
    options: Options,
    /// (largest number of rows, choice), ascending. The last counts for all that is larger.
    choices: RefCell<Vec<(usize, Choice)>>,
    nccl: Option<Nccl>,
    steps: RefCell<Vec<String>>,
    ending: Arc<Mutex<Option<Ending>>>,
    record: Pinned<CommRecord>,
    window: ManuallyDrop<Memory>,
    gpu: Gpu,
}

struct Nccl {
    comm: nccl::Comm,
    /// [ranks][rows][dim] bf16
    gathered: Memory,
}

struct Kernels {
    push: Kernel,
    pull: Kernel,
    two_shot: Kernel,
    exchange: Kernel,
    local: Kernel,
}

/// What ends all waiting of a rank's kernels, for other threads.
#[derive(Clone)]
pub struct Poison(Arc<Mutex<Option<Ending>>>);

/// Its rank takes it out of the Option when it ends.
struct Ending {
    word: Pinned<u32>,
    nccl: Option<nccl::Aborter>,
}
// Sound: page-locked memory may be written from any thread; it is dropped by its rank.
unsafe impl Send for Ending {}

impl Poison {
    /// Another rank failed. Does nothing when the rank is gone already; a rank that poisoned itself stays what it is.
    pub fn poison(&self) {
        if let Some(ending) = &*self.0.lock().unwrap_or_else(|e| e.into_inner()) {
            if ending.word.read(0) == 0 {
                ending.word.write(0, COMM_POISON_HOST as u32);
            }
            ending.nccl.iter().for_each(nccl::Aborter::abort);
        }
    }
}

/// Most blocks of a rank that shares its GPU: all ranks' spinning blocks must be resident, and leave room.
const SHARED_BLOCKS: usize = 4;
const THREADS: usize = 256;

impl Link {
    /// All ranks of `rendezvous` at the same time.
    pub fn new(gpu: &Gpu, rank: usize, rendezvous: Arc<dyn Rendezvous>, options: Options) -> Result<Link> {
        let ranks = rendezvous.ranks();
        ensure!((2..=COMM_MAX_RANKS).contains(&ranks), "{ranks} ranks: expected 2 to {COMM_MAX_RANKS}");
        let window = gpu.allocate(COMM_WINDOW_BYTES)?;
        let info = gpu.info();
        let place = Place {
            address: window.at(0),
            ordinal: info.ordinal,
            bus_id: info.bus_id.clone(),
            uuid: info.uuid.clone(),
        };
        let given = rendezvous.all_gather(rank, &serde_json::to_vec(&place)?)?;
        let places = given
            .iter()
            .map(|bytes| Ok(serde_json::from_slice(bytes)?))
            .collect::<Result<Vec<Place>>>()
            .context("places of ranks")?;
        let (ending, record) = (Ending { word: gpu.pinned(1)?, nccl: None }, gpu.pinned(1)?);
        let mut comm = CommRanks {
            poison: ending.word.device(),
            record: record.device(),
            rank: rank as i32,
            ranks: ranks as i32,
            patience_us: options.patience.as_micros() as u32,
            ..CommRanks::zeroed()
        };
        for (at, place) in comm.window.iter_mut().zip(&places) {
            gpu.reach(place.ordinal).with_context(|| format!("rank {rank}"))?;
            *at = place.address;
        }
        let faulty = options.fault.filter(|f| f.rank == rank);
        if let Some(fault) = faulty {
            (comm.fault, comm.fault_peer) = (fault.kind as i32, fault.peer as i32);
        }
        let kernel = |name, faulty_name, algorithm: Option<Algorithm>| {
            let is_faulty = faulty.is_some_and(|fault| fault.only.is_none() || fault.only == algorithm);
            gpu.kernel(if is_faulty { faulty_name } else { name }, 0)
        };
        let link = Link {
            rank,
            rendezvous,
            kernels: Kernels {
                push: kernel("all_reduce_push", "all_reduce_push_faulty", Some(Algorithm::Push))?,
                pull: kernel("all_reduce_pull", "all_reduce_pull_faulty", Some(Algorithm::Pull))?,
                two_shot: kernel("all_reduce_two_shot", "all_reduce_two_shot_faulty", Some(Algorithm::TwoShot))?,
                exchange: kernel("exchange_words", "exchange_words_faulty", None)?,
                local: gpu.kernel("all_reduce_local", 0)?,
            },
            comm,
            shared: (1..ranks).any(|r| places[..r].iter().any(|p| p.bus_id == places[r].bus_id)),
            places,
            whole_attention: false,
            split_drafter: false,
            options,
            choices: RefCell::default(),
            nccl: None,
            steps: RefCell::default(),
            ending: Arc::new(Mutex::new(Some(ending))),
            record,
            window: ManuallyDrop::new(window),
            gpu: gpu.clone(),
        };
        link.rendezvous.attend(Poison(link.ending.clone()));
        link.reset()?;
        Ok(link)
    }

    /// Empties the window, after all ranks have ended what they do with it and before any goes on.
    pub fn reset(&self) -> Result<()> {
        self.gpu.synchronize()?;
        self.barrier()?;
        self.gpu.fill(self.window.at(0), 0, COMM_WINDOW_BYTES)?;
        for channel in 0..COMM_CHANNELS {
            let at = self.window.at(COMM_LINE_BYTES + channel * COMM_CHANNEL_BYTES);
            self.gpu.upload(&[self.options.last_epoch], at)?;
        }
        self.gpu.synchronize()?;
        self.barrier()
    }

    /// After kernels of any rank gave up in a test of theirs: all ranks call it, and nobody has given up any more.
    pub(super) fn recover(&self) -> Result<()> {
        self.gpu.synchronize()?;
        self.barrier()?;
        if let Some(ending) = &*self.ending() {
            if ending.word.read(0) == COMM_POISON_TIMEOUT as u32 {
                ending.word.write(0, 0);
            }
        }
        self.reset()
    }

    pub fn ranks(&self) -> usize {
        self.places.len()
    }

    /// How the model is divided.
    pub fn as_ranks(&self) -> Ranks {
        let Link { rank, whole_attention, split_drafter, .. } = *self;
        Ranks { rank, count: self.ranks(), whole_attention, split_drafter }
    }

    /// Ranks on this rank's GPU.
    pub fn sharing(&self) -> usize {
        self.places.iter().filter(|place| place.bus_id == self.places[self.rank].bus_id).count()
    }

    pub fn barrier(&self) -> Result<()> {
        self.rendezvous.all_gather(self.rank, &[]).map(drop)
    }

    /// Nobody waits for this rank any more, and it for nobody.
    pub fn fail(&self, why: &str) {
        self.rendezvous.fail(&format!("rank {}: {why}", self.rank));
    }

    /// Everybody's bytes, by rank.
    pub fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.rendezvous.all_gather(self.rank, mine)
    }

    fn ending(&self) -> MutexGuard<'_, Option<Ending>> {
        self.ending.lock().unwrap_or_else(|e| e.into_inner()) // nothing panics half-way with it
    }

    /// Of a rank whose kernels gave up: the phase of a collective in which they did (COMM_PHASE_*). In one collective
    /// lower ones come first.
    pub(super) fn gave_up_in(&self) -> i32 {
        self.record.read(0).phase
    }

    /// An error once a kernel of this rank gave up, or the host poisoned it.
    pub fn check(&self) -> Result<()> {
        let state = self.ending().as_ref().map_or(0, |ending| ending.word.read(0)) as usize;
        match state {
            0 => Ok(()),
            COMM_POISON_TIMEOUT => {
                let r = self.record.read(0);
                let steps = self.steps.borrow();
                let phase = match r.phase as usize {
                    COMM_PHASE_PUSH => "pushed sums",
                    COMM_PHASE_REDUCE => "sums to add",
                    COMM_PHASE_GATHER => "added sums",
                    COMM_PHASE_FLAG => "sums held ready",
                    COMM_PHASE_WORDS => "words",
                    COMM_PHASE_PING => "a ping",
                    other => return Err(internal(format!("unknown phase {other} in a rank's record"))),
                };
                Err(machine(format!(
                    "rank {} (GPU {}): no data from rank {} (GPU {}) in {} ({phase}) for {} s: rank {} stopped, or its GPU does not reach this one; volley doctor tests the pair",
                    self.rank,
                    self.places[self.rank].ordinal,
                    r.peer,
                    self.places.get(r.peer as usize).map_or(0, |p| p.ordinal),
                    steps.get(r.step as usize).map_or("?", |s| s),
                    self.options.patience.as_secs_f32(),
                    r.peer,
                )))
            }
            _ => Err(stopped(self.rank, "another rank failed")),
        }
    }

    /// Takes one of NCCL's algorithms on, for messages of the given rows of `dim`; runs each size once, since NCCL
    /// connects when it first meets one. It fails on all ranks or on none.
    pub fn attach_nccl(
        &mut self,
        library: &Arc<nccl::Library>,
        algorithm: Algorithm,
        rows: &[usize],
        dim: usize,
    ) -> Result<()> {
        let raw = self.gpu.raw().context("NCCL needs a GPU")?;
        let id = if self.rank == 0 { library.unique_id() } else { Ok([0; 128]) };
        let given = self.all_gather(id.as_ref().map_or(&[][..], |id| &id[..]))?.swap_remove(0);
        id?;
        let id = given.as_slice().try_into().map_err(|_| machine("NCCL: rank 0 has no id to connect with"))?;
        let most = rows.iter().max().context("no rows")?;
        let (gathered, sent) = (self.gpu.allocate(self.ranks() * most * dim * 2)?, self.gpu.allocate(most * dim * 2)?);
        self.gpu.synchronize()?;
        let sizes = rows.iter().map(|rows| rows * dim).collect();
        let warm_up =
            nccl::WarmUp { sums: algorithm == Algorithm::NcclAllReduce, sizes, from: sent.at(0), to: gathered.at(0) };
        let comm = nccl::Comm::connect(library, raw, self.ranks(), self.rank, id, warm_up);
        let connected = self.all_gather(&[comm.is_ok() as u8])?;
        let comm = comm?;
        if let Some(other) = connected.iter().position(|ok| ok[0] == 0) {
            comm.abort();
            return Err(machine(format!("NCCL did not connect rank {other}")));
        }
        if let Some(ending) = &mut *self.ending() {
            ending.nccl = Some(comm.aborter());
        }
        self.nccl = Some(Nccl { comm, gathered });
        Ok(())
    }

    /// Gives up NCCL and its memory, on all ranks at the same time.
    pub(super) fn detach_nccl(&mut self) {
        if let Some(ending) = &mut *self.ending() {
            ending.nccl = None;
        }
        self.nccl = None;
    }

    pub fn has_nccl(&self) -> bool {
        self.nccl.is_some()
    }

    /// What to use from now on, by largest number of rows, ascending; the last for all that is larger. The same on all
    /// ranks.
    pub fn choose(&self, choices: Vec<(usize, Choice)>) {
        *self.choices.borrow_mut() = choices;
    }

    /// What an all-reduce of [rows, dim] would run as.
    pub fn choice(&self, rows: usize, dim: usize) -> Choice {
        let choices = self.choices.borrow();
        match choices.iter().find(|(most, _)| rows <= *most).or(choices.last()) {
            Some((_, choice)) => *choice,
            // Not measured: two-shot where its second crossing costs less than the bytes it saves, by public
            // measurements on PCIe.
            None => {
                let small = self.ranks() == 2 || rows * dim * 2 * self.ranks() <= 160 << 10;
                let algorithm = if small || dim / 16 < self.ranks() { Algorithm::Push } else { Algorithm::TwoShot };
                Choice { algorithm, blocks: self.blocks(algorithm, rows, dim) }
            }
        }
    }

    /// Blocks that suit an algorithm and a size: about 4 KB of a rank's sums each, where not measured.
    pub fn blocks(&self, algorithm: Algorithm, rows: usize, dim: usize) -> usize {
        if algorithm.needs_nccl() {
            return (rows * dim / 8).div_ceil(THREADS).min(self.gpu.info().n_sms);
        }
        let (fewest, most) = self.block_limits(algorithm, dim);
        let wanted = if self.shared { SHARED_BLOCKS } else { (rows * dim * 2).div_ceil(4096).max(4) };
        wanted.clamp(fewest, most.max(fewest))
    }

    /// Fewest blocks with which a row's share of a block fits into a slot; most with which every block (two-shot: every
    /// rank in it) has a tile of 16 columns.
    pub fn block_limits(&self, algorithm: Algorithm, dim: usize) -> (usize, usize) {
        let ranks = if algorithm == Algorithm::TwoShot { self.ranks() } else { 1 };
        let most = if self.shared { SHARED_BLOCKS } else { COMM_CHANNELS };
        ((dim / 16).div_ceil(COMM_SLOT_BYTES / 32 * ranks), (dim / 16 / ranks).min(most))
    }

    pub(super) fn fits(&self, choice: Choice, dim: usize) -> Result<()> {
        let (fewest, most) = self.block_limits(choice.algorithm, dim);
        if choice.algorithm == Algorithm::TwoShot && dim / 16 < self.ranks() {
            bail!(
                "rows of {dim} on {} ranks: two-shot needs at least 16 columns a rank; use --collective push",
                self.ranks()
            );
        }
        ensure!(
            choice.algorithm.needs_nccl() || (fewest.max(1)..=most).contains(&choice.blocks),
            "{} of rows of {dim} with {} blocks: expected {} to {most}",
            choice.algorithm.name(),
            choice.blocks,
            fewest.max(1)
        );
        Ok(())
    }

    /// x += bf16(sum of all ranks' partials + bias), and what the next norm needs of it. `step` names it in errors.
    pub fn all_reduce_norm(&self, step: &str, a: &AllReduce) -> Result<()> {
        self.all_reduce_with(self.choice(a.rows, a.dim), step, a)
    }

    /// As `all_reduce_norm`, with this choice.
    pub fn all_reduce_with(&self, choice: Choice, step: &str, a: &AllReduce) -> Result<()> {
        ensure!(a.dim % 16 == 0, "an all-reduce of rows of {}: expected a multiple of 16", a.dim);
        self.fits(choice, a.dim)?;
        let mut params = AllReduceParams {
            comm: self.comm_of(step),
            partial: a.partial,
            x: a.x,
            bias: a.bias,
            tap: a.tap,
            next_norm: a.next_norm,
            normed: a.normed,
            squares: a.squares,
            n_rows: a.n_rows,
            rows: a.rows as i32,
            dim: a.dim as i32,
            tap_stride: a.tap_stride as i32,
            wait_ns: 0,
        };
        let kernel = match choice.algorithm {
            Algorithm::Push => &self.kernels.push,
            Algorithm::Pull => &self.kernels.pull,
            Algorithm::TwoShot => &self.kernels.two_shot,
            Algorithm::Nccl | Algorithm::NcclAllReduce => {
                let nccl = self.nccl.as_ref().context("NCCL was not loaded")?;
                let (n, gathered) = (a.rows * a.dim, nccl.gathered.at(0));
                let sums = choice.algorithm == Algorithm::NcclAllReduce;
                ensure!(
                    if sums { n } else { n * self.ranks() } * 2 <= nccl.gathered.bytes(),
                    "{} x {} is more than NCCL was prepared for",
                    a.rows,
                    a.dim
                );
                if sums {
                    nccl.comm.all_reduce(a.partial, gathered, n)?;
                } else {
                    nccl.comm.all_gather(a.partial, gathered, n)?;
                }
                params.partial = gathered;
                params.comm.ranks = if sums { 1 } else { params.comm.ranks };
                return self.launch(&self.kernels.local, choice.blocks, THREADS, &params);
            }
        };
        // No more threads than a chunk of the widest block has vectors.
        let vectors = 2 * (a.dim / 16).div_ceil(choice.blocks) * a.rows;
        self.launch(kernel, choice.blocks, vectors.next_multiple_of(32).min(THREADS), &params)
    }

    /// words[i] becomes the maximum or the sum over all ranks' words[i], u64, for i < n.
    pub fn exchange(&self, step: &str, words: u64, n: usize, op: Exchange) -> Result<()> {
        self.exchange_if((0, 0), step, words, n, op)
    }

    /// The same, but nothing at all where the flags are 0: (address, number) of i32 in device memory, alike on all
    /// ranks.
    pub fn exchange_if(&self, flags: (u64, usize), step: &str, words: u64, n: usize, op: Exchange) -> Result<()> {
        ensure!(n > 0, "an exchange of no words");
        let op = if op == Exchange::Sum { EXCHANGE_SUM } else { EXCHANGE_MAX };
        let most = if self.shared { SHARED_BLOCKS } else { COMM_CHANNELS };
        let params = ExchangeParams {
            comm: self.comm_of(step),
            words,
            wanted: flags.0,
            n: n as i32,
            op,
            n_wanted: flags.1 as i32,
            pad: 0,
        };
        self.launch(&self.kernels.exchange, n.div_ceil(512).min(most), n.next_multiple_of(32).min(THREADS), &params)
    }

    fn launch<P: Params>(&self, kernel: &Kernel, blocks: usize, threads: usize, params: &P) -> Result<()> {
        let launch = Launch { grid: (blocks as u32, 1, 1), block: threads as u32, shared: 0, early: !self.shared };
        self.gpu.launch(kernel, launch, params)
    }

    pub(super) fn comm_of(&self, step: &str) -> CommRanks {
        let mut steps = self.steps.borrow_mut();
        let at = steps.iter().position(|s| s == step).unwrap_or(steps.len());
        if at == steps.len() {
            steps.push(step.to_string());
        }
        CommRanks { step: at as i32, ..self.comm }
    }

    /// What is planted in this rank's probe of `peer`.
    pub(super) fn fault_to(&self, peer: usize) -> Option<FaultKind> {
        self.options.fault.filter(|f| (f.rank, f.peer, f.only) == (self.rank, peer, None)).map(|f| f.kind)
    }

    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Address of `offset` in the window of `rank`.
    pub(super) fn window(&self, rank: usize, offset: usize) -> u64 {
        assert!(offset < COMM_WINDOW_BYTES);
        self.comm.window[rank] + offset as u64
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        // Another rank may still load from this window: it is freed when all have ended. When one has failed nobody
        // knows, and the process ends: it stays. A rank that fails tells the rendezvous first, or the others would wait
        // here. Errors were reported where they happened.
        let ended = self.gpu.synchronize().and_then(|()| self.barrier()).is_ok();
        *self.ending() = None;
        if ended {
            // Sound: it is not used again.
            unsafe { ManuallyDrop::drop(&mut self.window) };
        }
    }
}
