//! Several ranks as one backend: a thread and a Machine each, which get the same calls in the same order and so queue
//! the same passes.
//!
//! Rank 0 runs on the caller's thread and its records are the answer; the others' must be the same. A call returns when
//! rank 0 has done it; the others follow on their own, held together by the collectives in the passes. The first
//! failure of any rank ends all of them: it is what the next call returns. After it nothing is freed, since the driver
//! may wait in such a call for kernels that wait themselves, and the process ends soon; when the caller does not come
//! for the error, `LastResort` ends it. Between ranks: link.rs; what connects them: pairs.rs and tune.rs.
use super::link::Link;
use super::rendezvous::{self, Rendezvous, Threads};
use super::settle::{settle, Collectives, Found};
use crate::decode::policy::Costs;
use crate::decode::{Backend, Counters, Limits, Probe, Record, Sampling, StepTime};
use crate::error::{self, internal, machine};
use crate::gpu::cuda;
use crate::gpu::device::Gpu;
use crate::gpu::machine::{Machine, Options, STORAGE};
use crate::gpu::weights::Source;
use crate::model::config::Config;
use crate::model::divide::{divide, Asked, Division, Measured, MemorySpeed, Model};
use crate::model::weights::Weights;
use anyhow::{Context, Error, Result};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

/// A thread that has just done something is likely to get the next call soon: it looks for so long before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// How long ranks wait for each other while they start: one may read its weights from a slower disk, or compile
/// kernels.
const LATE: Duration = Duration::from_secs(600);

/// Ranks whose streams are idle end in milliseconds; one that does not is left to the end of the process. So is one
/// that does not notice the failure of another.
const END: Duration = Duration::from_secs(5);
const END_FAILED: Duration = Duration::from_secs(1);

/// What all ranks are made of.
pub struct Setup {
    /// GPU of each rank.
    pub gpus: Vec<usize>,
    /// Opens the GPU of a rank but the first, on the rank's own thread.
    pub open: Box<dyn Fn(usize) -> Result<Gpu> + Send + Sync>,
    pub collectives: Collectives,
    /// What is divided, where that is not left to measurement.
    pub asked: Asked,
    pub config: Config,
    /// None: random ones.
    pub weights: Option<Weights>,
    pub options: Options,
    pub last_resort: LastResort,
}

/// What a start finds out, on all ranks alike.
#[derive(Clone, Debug)]
pub struct Start {
    pub found: Found,
    pub division: Division,
}

/// For an error that nobody comes for: the caller may hang in a call of the driver, and then nobody else can end the
/// process.
pub struct LastResort {
    /// Between the failure and the end.
    pub after: Duration,
    pub end: fn(&Error) -> !,
}

impl Setup {
    fn make(
        &self,
        rank: usize,
        gpu: Option<Gpu>,
        failure: &Failure,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<(Machine, Start)> {
        let gpu = gpu.map_or_else(|| (self.open)(rank), Ok)?;
        if self.gpus.iter().any(|gpu| *gpu != self.gpus[0]) {
            stay_near(&gpu.info().bus_id);
        }
        let mut link = Link::new(&gpu, rank, failure.rendezvous.clone(), self.collectives.link)?;
        // the link waits for the others when it goes
        let (found, division) = self.settle(&mut link).inspect_err(|e| link.fail(&format!("{e:#}")))?;
        let source = self.weights.as_ref().map_or(Source::Random(0), Source::Checkpoint);
        let (config, options) = (self.config.clone(), self.options.clone());
        let machine = Machine::of_rank(gpu, Some((link, division.ranks)), config, source, options, progress)?;
        Ok((machine, Start { found, division }))
    }

    /// What connects the ranks, and how the model is divided on it.
    fn settle(&self, link: &mut Link) -> Result<(Found, Division)> {
        let found = settle(link, &self.collectives, self.config.hidden)?;
        let measured = match found.sum_us().filter(|_| !link.wire().shared) {
            Some(sum_us) => {
                let (rate, free_bytes) = (link.gpu().info().memory_rate(), link.gpu().memory()?.0);
                Some(Measured { sum_us, memories: link.gathered(&MemorySpeed { rate, free_bytes })? })
            }
            None => None,
        };
        let model = Model {
            config: &self.config,
            drafter: self.options.drafter.as_ref().map(|drafter| &drafter.shape),
            context: self.options.context,
            storage: STORAGE,
        };
        let division = divide(&model, link.rank, link.ranks(), self.asked, measured.as_ref())?;
        Ok((found, division))
    }

    /// For errors: `rank 1 (GPU 0)`.
    fn name(&self, rank: usize) -> String {
        format!("rank {rank} (GPU {})", self.gpus[rank])
    }
}

type Job = Box<dyn FnOnce(&mut Machine) -> Result<()> + Send>;

pub struct Conductor {
    first: Option<(Machine, Start)>,
    others: Vec<Rank>,
    failure: Arc<Failure>,
}

/// The thread of a rank; it ends when the sender goes.
struct Rank {
    jobs: Sender<(&'static str, Job)>,
    thread: JoinHandle<()>,
}

/// The first failure of any rank.
struct Failure {
    setup: Arc<Setup>,
    rendezvous: Arc<Threads>,
    happened: AtomicBool,
    error: Mutex<Option<Error>>,
    /// The caller has come for the error, or is leaving.
    seen: AtomicBool,
}

/// How long the error that others follow from may come after theirs.
const CAUSE: Duration = Duration::from_secs(1);

impl Failure {
    /// The first one counts, unless it only follows from another. All ranks stop waiting for each other.
    fn report(self: &Arc<Failure>, rank: usize, place: String, error: Error) {
        let name = self.setup.name(rank);
        let mut slot = self.error.lock().expect("nobody panics with it");
        let first = !self.happened.swap(true, SeqCst);
        if first || (slot.as_ref().is_some_and(rendezvous::follows) && !rendezvous::follows(&error)) {
            // A driver's error is the machine's; otherwise the error knows.
            let error = if cuda::is_driver_error(&error) { machine(format!("{error:#}")) } else { error };
            *slot = Some(error.context(format!("{name}, {place}")));
        }
        drop(slot);
        if first {
            self.rendezvous.fail(&name);
            let failure = self.clone();
            // Without a thread for it there is no last resort.
            let _ = Builder::new().name("last resort".into()).spawn(move || failure.watch());
        }
    }

    fn watch(&self) {
        let start = Instant::now();
        while !self.seen.load(SeqCst) {
            if start.elapsed() > self.setup.last_resort.after {
                let error = self.error.lock().expect("nobody panics with it").take();
                let Some(error) = error else { return }; // the caller takes it right now
                (self.setup.last_resort.end)(&error);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn take(&self) -> Error {
        self.seen.store(true, SeqCst);
        let start = Instant::now();
        loop {
            let mut slot = self.error.lock().expect("nobody panics with it");
            match &*slot {
                Some(error) if rendezvous::follows(error) && start.elapsed() < CAUSE => {}
                None if !self.happened.load(SeqCst) && start.elapsed() < CAUSE => {} // its thread is about to report it
                _ => {
                    return slot.take().unwrap_or_else(|| machine("a rank has failed before; the others ended with it"))
                }
            }
            drop(slot);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Whether a rank that got this error cannot go on: a user's error is every rank's, and rank 0 returns it.
fn is_fatal(error: &Error) -> bool {
    error::exit_code(error) != error::BAD_INPUT || cuda::is_driver_error(error)
}

/// Reports a rank whose thread panics.
struct Alive<'a> {
    failure: &'a Arc<Failure>,
    rank: usize,
}

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.failure.report(self.rank, "its thread".into(), internal("panicked"));
        }
    }
}

/// The thread of one rank but the first.
fn serve(rank: usize, setup: &Setup, failure: &Arc<Failure>, jobs: Receiver<(&'static str, Job)>) {
    let _alive = Alive { failure, rank };
    let mut machine = match setup.make(rank, None, failure, &mut |_, _| {}) {
        Ok((machine, _)) => ManuallyDrop::new(machine),
        Err(e) => return failure.report(rank, "load".into(), e),
    };
    while let Some((phase, job)) = next(&jobs) {
        if let Err(e) = job(&mut machine) {
            return failure.report(rank, format!("{phase}, pass {}", machine.passes()), e);
        }
    }
    if !failure.happened.load(SeqCst) {
        drop(ManuallyDrop::into_inner(machine));
    }
}

fn next<T>(jobs: &Receiver<T>) -> Option<T> {
    let start = Instant::now();
    while start.elapsed() < SPIN {
        match jobs.try_recv() {
            Ok(job) => return Some(job),
            Err(mpsc::TryRecvError::Disconnected) => return None,
            Err(mpsc::TryRecvError::Empty) => std::hint::spin_loop(),
        }
    }
    jobs.recv().ok()
}

impl Conductor {
    /// Makes all ranks at the same time. `gpu` and `progress` are rank 0's.
    pub fn new(setup: Setup, gpu: Gpu, progress: &mut dyn FnMut(usize, usize)) -> Result<Conductor> {
        let setup = Arc::new(setup);
        let failure = Arc::new(Failure {
            setup: setup.clone(),
            rendezvous: Threads::new(setup.gpus.len(), LATE),
            happened: AtomicBool::new(false),
            error: Mutex::default(),
            seen: AtomicBool::new(false),
        });
        let mut conductor = Conductor { first: None, others: Vec::new(), failure: failure.clone() };
        for rank in 1..setup.gpus.len() {
            let (jobs, receiver) = mpsc::channel();
            let (setup, failure) = (setup.clone(), failure.clone());
            let thread =
                Builder::new().name(format!("rank {rank}")).spawn(move || serve(rank, &setup, &failure, receiver));
            conductor.others.push(Rank { jobs, thread: thread.context("the thread of a rank")? });
        }
        match setup.make(0, Some(gpu), &failure, progress) {
            Ok(first) => conductor.first = Some(first),
            Err(e) => failure.report(0, "load".into(), e),
        }
        match failure.happened.load(SeqCst) {
            true => Err(failure.take()),
            false => Ok(conductor),
        }
    }

    pub fn first(&self) -> &Machine {
        &self.first.as_ref().expect("made at start").0
    }

    /// What the start found out.
    pub fn start(&self) -> &Start {
        &self.first.as_ref().expect("made at start").1
    }

    /// For checks: the same call on every rank, at the same time; what each returned, by rank. Any error ends all
    /// ranks.
    pub fn each<T: Send + 'static>(
        &mut self,
        phase: &'static str,
        call: impl Fn(&mut Machine) -> Result<T> + Send + Sync + 'static,
    ) -> Result<Vec<T>> {
        let call = Arc::new(call);
        let mut results = Vec::new();
        for rank in &self.others {
            let (call, (sender, result)) = (call.clone(), mpsc::channel());
            let job = move |machine: &mut Machine| {
                // Nobody listens when rank 0 has failed.
                let _ = sender.send(call(machine)?);
                Ok(())
            };
            let _ = rank.jobs.send((phase, Box::new(job))); // a rank that has ended has reported why
            results.push(result);
        }
        let first = self.on_first(phase, |_| true, |machine| call(machine))?;
        let mut all = vec![first];
        for result in results {
            match result.recv() {
                Ok(value) => all.push(value),
                Err(_) => return Err(self.failure.take()),
            }
        }
        Ok(all)
    }

    /// The same call on every rank; rank 0's result. The others are not waited for.
    fn all<T>(
        &mut self,
        phase: &'static str,
        call: impl Fn(&mut Machine) -> Result<T> + Send + Sync + 'static,
    ) -> Result<T> {
        let call = Arc::new(call);
        for rank in &self.others {
            let call = call.clone();
            let job = move |machine: &mut Machine| match call(machine) {
                Err(e) if is_fatal(&e) => Err(e),
                _ => Ok(()),
            };
            // A rank that has ended has reported why.
            let _ = rank.jobs.send((phase, Box::new(job)));
        }
        self.on_first(phase, is_fatal, |machine| call(machine))
    }

    fn on_first<T>(
        &mut self,
        phase: &'static str,
        is_fatal: fn(&Error) -> bool,
        call: impl FnOnce(&mut Machine) -> Result<T>,
    ) -> Result<T> {
        let machine = &mut self.first.as_mut().expect("made at start").0;
        let result = call(machine);
        match result {
            Err(e) if is_fatal(&e) => self.failure.report(0, format!("{phase}, pass {}", machine.passes()), e),
            result if !self.failure.happened.load(SeqCst) => return result,
            _ => {}
        }
        Err(self.failure.take())
    }
}

impl Drop for Conductor {
    fn drop(&mut self) {
        // All ranks end together: each waits for the others before its memory goes.
        let threads: Vec<JoinHandle<()>> = self.others.drain(..).map(|rank| rank.thread).collect();
        self.failure.rendezvous.set_patience(END);
        self.failure.seen.store(true, SeqCst);
        let end = match (self.failure.happened.load(SeqCst), self.first.take()) {
            (true, first) => {
                first.into_iter().for_each(|(machine, _)| machine.abandon());
                END_FAILED
            }
            (false, first) => {
                drop(first);
                END
            }
        };
        let start = Instant::now();
        for thread in threads {
            while !thread.is_finished() && start.elapsed() < end {
                std::thread::sleep(Duration::from_millis(1));
            }
            if thread.is_finished() {
                let _ = thread.join(); // a panic has been reported
            }
        }
    }
}

impl Backend for Conductor {
    fn context(&self) -> usize {
        self.first().context()
    }

    fn vocab(&self) -> usize {
        self.first().vocab()
    }

    fn prefill_rows(&self) -> usize {
        self.first().prefill_rows()
    }

    fn queue_depth(&self) -> usize {
        self.first().queue_depth()
    }

    fn begin(&mut self, prompt: &[u32], keep: usize, sampling: &Sampling, limits: &Limits) -> Result<()> {
        let (prompt, sampling, limits) = (prompt.to_vec(), sampling.clone(), limits.clone());
        self.all("begin", move |machine| machine.begin(&prompt, keep, &sampling, &limits))
    }

    fn prefill(&mut self, tokens: &[u32]) -> Result<()> {
        let tokens = tokens.to_vec();
        self.all("prefill", move |machine| machine.prefill(&tokens))
    }

    fn verify(&mut self, width: usize) -> Result<()> {
        self.all("verify", move |machine| machine.verify(width))
    }

    fn draft(&mut self, drafts: usize) -> Result<()> {
        self.all("draft", move |machine| machine.draft(drafts))
    }

    fn set_drafts(&mut self, drafts: &[u32]) -> Result<()> {
        let drafts = drafts.to_vec();
        self.all("draft", move |machine| machine.set_drafts(&drafts))
    }

    fn record(&mut self) -> Result<Record> {
        let record = self.on_first("verify", is_fatal, |machine| machine.record());
        let expected = record.as_ref().ok().cloned();
        for rank in &self.others {
            let expected = expected.clone();
            let job = move |machine: &mut Machine| match (machine.record(), expected) {
                (Ok(own), Some(expected)) if own != expected => Err(corrupted(&own, &expected)),
                (Err(e), _) if is_fatal(&e) => Err(e),
                _ => Ok(()),
            };
            let _ = rank.jobs.send(("verify", Box::new(job)));
        }
        record
    }

    fn truncate(&mut self, n: usize) -> Result<()> {
        self.all("truncate", move |machine| machine.truncate(n))
    }

    fn counters(&self) -> Counters {
        self.first().counters()
    }
}

impl Probe for Conductor {
    fn measure(&mut self) -> Result<Costs> {
        self.all("measure", |machine| machine.measure())
    }

    fn time_verify(&mut self, width: usize, depth: usize, n: usize) -> Result<Vec<f64>> {
        self.all("time", move |machine| machine.time_verify(width, depth, n))
    }

    fn experts_used(&mut self, width: usize, depth: usize) -> Result<Option<f64>> {
        self.all("time", move |machine| machine.experts_used(width, depth))
    }

    fn profile(&mut self, depth: usize) -> Result<Vec<StepTime>> {
        self.all("profile", move |machine| machine.profile(depth))
    }
}

fn corrupted(own: &Record, expected: &Record) -> Error {
    machine(format!(
        "chose tokens {:?} where rank 0 chose {:?}: data is corrupted between GPUs; volley doctor names the pair, --collective avoids it",
        own.tokens, expected.tokens
    ))
}

/// Keeps the calling thread on the processors next to a GPU, where the system knows which they are.
fn stay_near(bus_id: &str) {
    let Ok(list) = std::fs::read_to_string(format!("/sys/bus/pci/devices/{bus_id}/local_cpulist")) else { return };
    // Sound: an all-zero set is an empty one, and the macros stay within it.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for cpu in cpus(&list).into_iter().filter(|cpu| *cpu < libc::CPU_SETSIZE as usize) {
            libc::CPU_SET(cpu, &mut set);
        }
        if libc::CPU_COUNT(&set) > 0 {
            // Refused inside a container that has none of them: any processor will do.
            libc::sched_setaffinity(0, std::mem::size_of::<libc::cpu_set_t>(), &set);
        }
    }
}

/// `0-3,8` -> 0 1 2 3 8
fn cpus(list: &str) -> Vec<usize> {
    let number = |word: &str| word.trim().parse::<usize>().ok();
    list.split(',')
        .filter_map(|range| match range.split_once('-') {
            Some((first, last)) => Some(number(first)?..=number(last)?),
            None => number(range).map(|n| n..=n),
        })
        .flatten()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::cpus;

    #[test]
    fn lists_of_processors() {
        assert_eq!(cpus("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(cpus("5\n"), [5]);
        assert!(cpus("\n").is_empty());
    }
}
