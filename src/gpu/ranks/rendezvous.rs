//! Where ranks meet before they can talk through memory, and how the failure of one ends the waiting of all.
//!
//! Only this file knows that ranks are threads of one process. What they say to each other through memory: link.rs.
use super::nccl;
use crate::error::machine;
use crate::gpu::device::Pinned;
use crate::gpu::params::COMM_POISON_HOST;
use anyhow::Result;
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

pub(super) fn stopped(rank: usize, why: &str) -> anyhow::Error {
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

/// What ends all waiting of a rank's kernels, for other threads.
#[derive(Clone)]
pub struct Poison(pub(super) Arc<Mutex<Option<Ending>>>);

/// Its rank takes it out of the Option when it ends.
pub(super) struct Ending {
    pub word: Pinned<u32>,
    pub nccl: Option<nccl::Aborter>,
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
