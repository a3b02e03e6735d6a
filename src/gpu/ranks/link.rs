//! What a rank has of the others: windows into their memory, what ends its waiting, and NCCL where it is used.
//!
//! A `Link` is made by the thread of its rank, all ranks at the same time: they meet in a `Rendezvous`. What runs
//! through it is described in collective.rs. A kernel that waits in vain poisons its rank; `check` says what it waited
//! for.
use super::algorithm::{Algorithm, Fault, FaultKind, Variant};
use super::collective::{AllReduce, Collective, Exchange, Wire};
use super::nccl;
use super::rendezvous::{stopped, Ending, Poison, Rendezvous};
use crate::error::{internal, machine};
use crate::gpu::device::{Gpu, Launch, Memory, Pinned};
use crate::gpu::kernels::Kernels;
use crate::gpu::op::NcclCall;
use crate::gpu::params::*;
use anyhow::{ensure, Context, Result};
use bytemuck::Zeroable;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

#[derive(Clone, Copy, Debug)]
pub struct LinkOptions {
    /// A kernel that waits longer than this for one thing gives up.
    pub patience: Duration,
    pub fault: Option<Fault>,
}

impl Default for LinkOptions {
    fn default() -> LinkOptions {
        LinkOptions { patience: Duration::from_secs(2), fault: None }
    }
}

/// One rank, as all know it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Peer {
    /// Of its window, in its own GPU's memory.
    address: u64,
    pub ordinal: usize,
    pub bus_id: String,
    pub uuid: String,
}

pub struct Link {
    pub rank: usize,
    pub peers: Vec<Peer>,
    rendezvous: Arc<dyn Rendezvous>,
    wire: Wire,
    kernels: Kernels,
    options: LinkOptions,
    nccl: Option<Nccl>,
    ending: Arc<Mutex<Option<Ending>>>,
    record: Pinned<CommRecord>,
    window: ManuallyDrop<Memory>,
    gpu: Gpu,
}

struct Nccl {
    comm: nccl::Comm,
    /// `Wire::gathered`
    _gathered: Memory,
}

impl Link {
    /// All ranks of `rendezvous` at the same time.
    pub fn new(gpu: &Gpu, rank: usize, rendezvous: Arc<dyn Rendezvous>, options: LinkOptions) -> Result<Link> {
        let ranks = rendezvous.ranks();
        ensure!((2..=COMM_MAX_RANKS).contains(&ranks), "{ranks} ranks: expected 2 to {COMM_MAX_RANKS}");
        let window = gpu.allocate(COMM_WINDOW_BYTES)?;
        let info = gpu.info();
        let own =
            Peer { address: window.at(0), ordinal: info.ordinal, bus_id: info.bus_id.clone(), uuid: info.uuid.clone() };
        let given = rendezvous.all_gather(rank, &serde_json::to_vec(&own)?)?;
        let peers = given
            .iter()
            .map(|bytes| Ok(serde_json::from_slice(bytes)?))
            .collect::<Result<Vec<Peer>>>()
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
        for (at, peer) in comm.window.iter_mut().zip(&peers) {
            gpu.reach(peer.ordinal).with_context(|| format!("rank {rank}"))?;
            *at = peer.address;
        }
        let faulty = options.fault.filter(|f| f.rank == rank);
        if let Some(fault) = faulty {
            (comm.fault, comm.fault_peer) = (fault.kind as i32, fault.peer as i32);
        }
        let wire = Wire {
            comm,
            shared: (1..ranks).any(|r| peers[..r].iter().any(|p| p.bus_id == peers[r].bus_id)),
            n_sms: info.n_sms,
            fault: faulty,
            variants: Vec::new(),
            gathered: None,
            steps: RefCell::default(),
        };
        let link = Link {
            rank,
            rendezvous,
            wire,
            kernels: Kernels::load(gpu)?,
            peers,
            options,
            nccl: None,
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
        self.peers.len()
    }

    /// Ranks on this rank's GPU.
    pub fn sharing(&self) -> usize {
        self.peers.iter().filter(|peer| peer.bus_id == self.peers[self.rank].bus_id).count()
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

    /// Everybody's values, by rank.
    pub(super) fn gathered<T: Serialize + for<'a> Deserialize<'a>>(&self, mine: &T) -> Result<Vec<T>> {
        let given = self.all_gather(&serde_json::to_vec(mine)?)?;
        given.iter().map(|bytes| Ok(serde_json::from_slice(bytes)?)).collect()
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
                let steps = self.wire.steps.borrow();
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
                    self.peers[self.rank].ordinal,
                    r.peer,
                    self.peers.get(r.peer as usize).map_or(0, |p| p.ordinal),
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
        self.wire.gathered = Some((gathered.at(0), gathered.bytes()));
        self.nccl = Some(Nccl { comm, _gathered: gathered });
        Ok(())
    }

    /// Gives up NCCL and its memory, on all ranks at the same time.
    pub(super) fn detach_nccl(&mut self) {
        if let Some(ending) = &mut *self.ending() {
            ending.nccl = None;
        }
        self.wire.gathered = None;
        self.nccl = None;
    }

    pub fn has_nccl(&self) -> bool {
        self.nccl.is_some()
    }

    /// What all collectives of this rank are made from.
    pub fn wire(&self) -> &Wire {
        &self.wire
    }

    /// What to use from now on, by largest number of rows, ascending; the last for all that is larger. The same on all
    /// ranks.
    pub fn choose(&mut self, variants: Vec<(usize, Variant)>) {
        self.wire.variants = variants;
    }

    /// As `Wire::all_reduce_with`, at once.
    pub fn all_reduce_with(&self, variant: Variant, step: &str, a: &AllReduce) -> Result<()> {
        self.run(&self.wire.all_reduce_with(variant, step, a)?)
    }

    /// As `Wire::exchange`, at once and whatever the flags.
    pub fn exchange(&self, step: &str, words: u64, n: usize, op: Exchange) -> Result<()> {
        self.run(&self.wire.exchange((0, 0), step, words, n, op)?)
    }

    fn run(&self, c: &Collective) -> Result<()> {
        c.nccl.iter().try_for_each(|call| self.call_nccl(call))?;
        let (grid, block) = ((c.blocks as u32, 1, 1), c.threads as u32);
        let launch = Launch { grid, block, shared: c.kernel.shared(), early: !c.shared };
        self.gpu.launch_bytes(self.kernels.get(c.kernel), launch, &c.params)
    }

    /// On the stream of this rank.
    pub fn call_nccl(&self, call: &NcclCall) -> Result<()> {
        let comm = &self.nccl.as_ref().context("NCCL was not loaded")?.comm;
        match *call {
            NcclCall { adds: true, from, to, n } => comm.all_reduce(from, to, n),
            NcclCall { adds: false, from, to, n } => comm.all_gather(from, to, n),
        }
    }

    /// What is planted in this rank's probe of `peer`.
    pub(super) fn fault_to(&self, peer: usize) -> Option<FaultKind> {
        self.options.fault.filter(|f| (f.rank, f.peer, f.only) == (self.rank, peer, None)).map(|f| f.kind)
    }

    pub(super) fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Address of `offset` in the window of `rank`.
    pub fn window(&self, rank: usize, offset: usize) -> u64 {
        assert!(offset < COMM_WINDOW_BYTES);
        self.wire.comm.window[rank] + offset as u64
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
