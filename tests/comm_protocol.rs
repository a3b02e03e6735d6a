//! The protocol of the collectives between ranks as a state machine under shuttle: ranks of two threads each, windows
//! with buffers, epochs that wrap, sentinels, flags, chunks, as kernels/comm_protocol.h describes and kernels/comm.cuh
//! does it, one channel of it. Every schedule must end with every rank's sums right.
//!
//! Shuttle chooses who runs next. Its atomics are sequentially consistent, and a GPU's stores to another are not: so
//! memory is a map here, a store is under way until it arrives, late and in any order, and only a fence, a release or
//! the end of a kernel says otherwise. Loads are never late. Each planted fault is a macro of comm.cuh, which
//! kernels/shim/test_comm.cpp must catch (scripts/test_kernels.sh); here the model must. Arithmetic is left to that
//! test.
use shuttle::scheduler::RandomScheduler;
use shuttle::{thread, Config, FailurePersistence, MaxSteps, Runner};
use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use Kind::{Exchange, Pull, Push, TwoShot};

/// Threads of a rank's block.
const LANES: usize = 2;

/// A wait that is longer, in turns of all threads together, is an error. The longest of a rank that is merely slow
/// takes a tenth of it.
const PATIENCE: u64 = 40_000;

/// What comm_protocol.h says.
#[derive(Clone, Copy)]
struct Protocol {
    buffers: u64,
    after_wrap: u32,
    looks: u64,
    poison_timeout: u64,
    poison_host: u64,
    flags: u64,
    pushed: u64,
    gathered: u64,
    words: u64,
    ready: u64,
    line_bytes: u64,
    slot_bytes: u64,
    buffer_bytes: u64,
}

/// NAME = literal, at the start of a line.
fn constant(name: &str) -> u64 {
    let lines = include_str!("../kernels/comm_protocol.h").lines();
    let value = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix(" = ")).next();
    let digits = value.unwrap_or_else(|| panic!("comm_protocol.h has no {name}")).split(',').next();
    digits.and_then(|digits| digits.parse().ok()).unwrap_or_else(|| panic!("{name} is not a number"))
}

impl Protocol {
    fn read() -> Protocol {
        Protocol {
            buffers: constant("COMM_BUFFERS"),
            after_wrap: constant("COMM_AFTER_WRAP") as u32,
            looks: constant("COMM_LOOKS"),
            poison_timeout: constant("COMM_POISON_TIMEOUT"),
            poison_host: constant("COMM_POISON_HOST"),
            flags: constant("COMM_FLAGS"),
            pushed: constant("COMM_PUSHED"),
            gathered: constant("COMM_GATHERED"),
            words: constant("COMM_WORDS"),
            ready: constant("COMM_READY"),
            line_bytes: constant("COMM_LINE_BYTES"),
            slot_bytes: constant("COMM_SLOT_BYTES"),
            buffer_bytes: constant("COMM_BUFFER_BYTES"),
        }
    }

    fn next_epoch(&self, epoch: u32) -> u32 {
        epoch.checked_add(1).unwrap_or(self.after_wrap)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Push,
    Pull,
    TwoShot,
    Exchange,
}

/// One collective: rows of each of its chunks, and vectors a row.
#[derive(Clone, Debug)]
struct Collective {
    kind: Kind,
    rows: Vec<usize>,
    columns: usize,
}

/// What is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// PLANT_COMM_END_BARRIER: threads of a rank go into the next chunk while others are still in the last.
    EndBarrier,
    /// PLANT_COMM_CLEAR: what was read stays in its slot.
    Clear,
    /// PLANT_COMM_FENCE: a zero may arrive behind what the sender writes there next.
    Fence,
    /// PLANT_COMM_FLAG_BARRIER: the flag does not wait for the other threads' data.
    FlagBarrier,
    /// PLANT_COMM_RELEASE: the flag may arrive before the data.
    Release,
}

#[derive(Clone)]
struct Case {
    ranks: usize,
    script: Vec<Collective>,
    protocol: Protocol,
    last_epoch: u32,
    slow: Option<usize>,
    /// A rank, and the operation at which it ends without a word.
    dies: Option<(usize, u64)>,
    fault: Option<Fault>,
}

impl Case {
    /// Starts two chunks before the epoch wraps.
    fn new(ranks: usize, script: Vec<Collective>) -> Case {
        Case {
            ranks,
            script,
            protocol: Protocol::read(),
            last_epoch: u32::MAX - 2,
            slow: None,
            dies: None,
            fault: None,
        }
    }
}

// ---- what is sent, and what it should add up to ----

/// A zero that is sent; it adds nothing. All other numbers are below it.
const NEGATIVE_ZERO: u64 = 1 << 63;

/// (collective, chunk, vector, half of the vector): a vector of 16 bytes arrives in two halves.
type Place = (usize, usize, usize, usize);

fn partial(place: Place, rank: usize) -> u64 {
    let (collective, chunk, vector, half) = place;
    let seed =
        [collective, chunk, vector, half, rank].iter().fold(7u64, |h, &x| h.wrapping_mul(0x100_0000_01b3) ^ x as u64);
    let number = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) & !NEGATIVE_ZERO;
    if number % 5 == 0 {
        0
    } else {
        number
    }
}

fn sent(number: u64) -> u64 {
    if number == 0 {
        NEGATIVE_ZERO
    } else {
        number
    }
}

/// A sum that depends on the order, as one in f32 does. A negative zero counts as a zero.
fn add(sum: u64, number: u64) -> u64 {
    sum.wrapping_mul(31).wrapping_add(number) & !NEGATIVE_ZERO
}

fn expected(kind: Kind, place: Place, ranks: usize) -> u64 {
    let all = (0..ranks).map(|rank| partial(place, rank));
    match kind {
        Exchange => all.fold(0, u64::wrapping_add),
        _ => all.fold(0, add),
    }
}

// ---- memory ----

/// (rank that owns the window, byte in the channel's buffers)
type Address = (usize, u64);

struct Flight {
    rank: usize,
    lane: usize,
    /// Barriers that the block had passed.
    barrier: u64,
    at: Address,
    value: u64,
    /// The turn at which it arrives, if nothing makes it earlier.
    due: u64,
}

struct State {
    memory: BTreeMap<Address, u64>,
    /// Oldest first.
    in_flight: Vec<Flight>,
    turns: u64,
    random: u64,
    ranks: Vec<Rank>,
    /// Threads that run.
    running: usize,
    /// A rank that ran ahead of the one rule.
    ahead: Option<String>,
}

#[derive(Clone, Default)]
struct Rank {
    last_epoch: u32,
    poison: u64,
    operations: u64,
    barriers: u64,
    arrived: usize,
    lost: bool,
    /// Chunks that each thread has ended.
    ended: [usize; LANES],
    results: BTreeMap<Place, u64>,
}

impl State {
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random >> 20
    }

    /// Those stores arrive that `wanted` picks. Of a rank's stores to one place the older comes first, unless a fence
    /// asks for the newer alone.
    fn deliver(&mut self, fence: bool, wanted: impl Fn(&Flight) -> bool) {
        let mut held = HashSet::new();
        let memory = &mut self.memory;
        self.in_flight.retain(|flight| {
            let arrives = wanted(flight) && (fence || !held.contains(&(flight.rank, flight.at)));
            if arrives {
                memory.insert(flight.at, flight.value);
            } else {
                held.insert((flight.rank, flight.at));
            }
            !arrives
        });
    }

    /// What a thread's fence covers: its own stores, and its block's before the last barrier.
    fn fence(&mut self, rank: usize, lane: usize) {
        let barriers = self.ranks[rank].barriers;
        self.deliver(true, |flight| flight.rank == rank && (flight.lane == lane || flight.barrier < barriers));
    }
}

// ---- a thread of a rank ----

struct World {
    case: Case,
    /// Held between two turns only, and so never waited for.
    state: Mutex<State>,
}

struct Died;
type Alive<T = ()> = Result<T, Died>;

struct Lane {
    world: Arc<World>,
    rank: usize,
    lane: usize,
    looks: u64,
    since: u64,
    lost: bool,
    /// Chunks begun.
    begun: usize,
}

impl Lane {
    fn case(&self) -> &Case {
        &self.world.case
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.world.state.lock().expect("nobody panics with it")
    }

    /// Before every operation on shared state: others run, for long where this thread falls behind, and stores arrive.
    fn turn(&self) -> Alive<MutexGuard<'_, State>> {
        let random = self.lock().random();
        let pause = match (self.case().slow == Some(self.rank), random % 64) {
            (true, _) => 6,
            (_, 0) => random / 64 % 64,
            _ => 0,
        };
        for _ in 0..=pause {
            thread::yield_now();
        }
        let mut state = self.lock();
        state.turns += 1;
        state.ranks[self.rank].operations += 1;
        if self.case().dies.is_some_and(|(rank, at)| rank == self.rank && state.ranks[rank].operations >= at) {
            return Err(Died);
        }
        let now = state.turns;
        state.deliver(false, |flight| flight.due <= now);
        Ok(state)
    }

    fn store(&self, at: Address, value: u64) -> Alive {
        let mut state = self.turn()?;
        let late = if state.random() % 32 == 0 { 600 } else { 4 };
        let due = state.turns + state.random() % late;
        let flight =
            Flight { rank: self.rank, lane: self.lane, barrier: state.ranks[self.rank].barriers, at, value, due };
        state.in_flight.push(flight);
        Ok(())
    }

    fn fence(&self) -> Alive {
        self.turn()?.fence(self.rank, self.lane);
        Ok(())
    }

    /// A thread sees its own stores, and those of its block before the last barrier, wherever they are.
    fn load(&self, at: Address) -> Alive<u64> {
        let state = self.turn()?;
        let barriers = state.ranks[self.rank].barriers;
        let own = |f: &&Flight| f.at == at && f.rank == self.rank && (f.lane == self.lane || f.barrier < barriers);
        let forwarded = state.in_flight.iter().rfind(own).map(|flight| flight.value);
        Ok(forwarded.unwrap_or_else(|| state.memory.get(&at).copied().unwrap_or(0)))
    }

    fn store_vector(&self, at: Address, vector: [u64; 2]) -> Alive {
        self.store(at, vector[0])?;
        self.store((at.0, at.1 + 8), vector[1])
    }

    fn load_vector(&self, at: Address) -> Alive<[u64; 2]> {
        Ok([self.load(at)?, self.load((at.0, at.1 + 8))?])
    }

    fn barrier(&self) -> Alive {
        let mut state = self.turn()?;
        let block = &mut state.ranks[self.rank];
        let passed = block.barriers;
        block.arrived += 1;
        if block.arrived == LANES {
            (block.arrived, block.barriers) = (0, passed + 1);
        }
        drop(state);
        while self.turn()?.ranks[self.rank].barriers == passed {}
        Ok(())
    }

    /// Vector `i` of rank `from`'s slot in the window of rank `at`.
    fn slot(&self, at: usize, epoch: u32, area: u64, from: usize, i: usize) -> Address {
        let p = &self.case().protocol;
        (at, u64::from(epoch) % p.buffers * p.buffer_bytes + area + from as u64 * p.slot_bytes + 16 * i as u64)
    }

    fn flag(&self, at: usize, epoch: u32, from: usize) -> Address {
        let p = &self.case().protocol;
        (at, u64::from(epoch) % p.buffers * p.buffer_bytes + p.flags + from as u64 * p.line_bytes)
    }

    /// The others, from the next one round.
    fn peers(&self) -> impl Iterator<Item = usize> {
        let (rank, ranks) = (self.rank, self.case().ranks);
        (1..ranks).map(move |k| (rank + k) % ranks)
    }

    /// False: nothing comes any more.
    fn waits(&mut self) -> Alive<bool> {
        self.looks += 1;
        if self.looks % self.case().protocol.looks != 0 {
            return Ok(true);
        }
        let now = self.turn()?.turns;
        if self.since == 0 {
            self.since = now;
        }
        let mut state = self.lock();
        let poison = &mut state.ranks[self.rank].poison;
        if *poison == 0 {
            if now - self.since < PATIENCE {
                return Ok(true);
            }
            *poison = self.case().protocol.poison_timeout;
        }
        drop(state);
        self.lost = true;
        Ok(false)
    }

    /// The epoch of the next chunk. The one rule: whoever starts a chunk knows that every thread of every rank has
    /// ended the chunk before the last.
    fn start_chunk(&mut self, epoch: u32) -> Alive<u32> {
        let mut state = self.turn()?;
        if self.case().fault.is_none() && state.ranks.iter().all(|rank| rank.poison == 0) {
            let slowest = state.ranks.iter().flat_map(|rank| rank.ended).min().unwrap_or(0);
            if slowest + 1 < self.begun {
                state.ahead = Some(format!(
                    "rank {} starts chunk {} when a thread has ended only {slowest}",
                    self.rank, self.begun
                ));
            }
        }
        drop(state);
        self.begun += 1;
        Ok(self.case().protocol.next_epoch(epoch))
    }

    fn ended(&self) -> Alive {
        self.turn()?.ranks[self.rank].ended[self.lane] = self.begun;
        Ok(())
    }

    fn end_chunk(&self) -> Alive {
        if self.case().fault != Some(Fault::EndBarrier) {
            self.barrier()?;
        }
        if self.case().fault != Some(Fault::Fence) {
            self.fence()?;
        }
        Ok(())
    }

    /// The last thing of a kernel, and the boundary to the next: all that was stored has arrived.
    fn leave(&self, epoch: u32) -> Alive {
        self.barrier()?;
        self.fence()?;
        if self.lane == 0 {
            self.turn()?.ranks[self.rank].last_epoch = epoch;
        }
        self.barrier()
    }

    fn finish(&self, place: Place, sum: u64) -> Alive {
        self.turn()?.ranks[self.rank].results.insert(place, sum);
        Ok(())
    }

    fn finish_vector(&self, (collective, chunk, vector): (usize, usize, usize), sum: [u64; 2]) -> Alive {
        self.finish((collective, chunk, vector, 0), sum[0])?;
        self.finish((collective, chunk, vector, 1), sum[1])
    }

    fn own(&self, (collective, chunk, vector): (usize, usize, usize)) -> [u64; 2] {
        [0, 1].map(|half| partial((collective, chunk, vector, half), self.rank))
    }

    /// Waits for a vector that is whole.
    fn receive(&mut self, at: Address) -> Alive<[u64; 2]> {
        self.since = 0;
        loop {
            let vector = self.load_vector(at)?;
            if !vector.contains(&0) || self.lost || !self.waits()? {
                return Ok(vector);
            }
        }
    }

    /// The sum over all ranks of vector `i` of the slots for partials, which are emptied.
    fn collect(&mut self, own: [u64; 2], epoch: u32, i: usize) -> Alive<[u64; 2]> {
        let mut all = vec![own; self.case().ranks];
        for peer in self.peers() {
            all[peer] = self.receive(self.slot(self.rank, epoch, self.case().protocol.pushed, peer, i))?;
        }
        for peer in self.peers().filter(|_| self.case().fault != Some(Fault::Clear)) {
            self.store_vector(self.slot(self.rank, epoch, self.case().protocol.pushed, peer, i), [0, 0])?;
        }
        Ok([0, 1].map(|half| all.iter().fold(0, |sum, vector| add(sum, vector[half]))))
    }

    fn push(&mut self, k: usize, c: &Collective) -> Alive {
        let mut epoch = self.turn()?.ranks[self.rank].last_epoch;
        for (chunk, rows) in c.rows.iter().enumerate() {
            if chunk > 0 {
                self.end_chunk()?;
            }
            epoch = self.start_chunk(epoch)?;
            let vectors = || (self.lane..rows * c.columns).step_by(LANES);
            for i in vectors() {
                for peer in self.peers() {
                    let at = self.slot(peer, epoch, self.case().protocol.pushed, self.rank, i);
                    self.store_vector(at, self.own((k, chunk, i)).map(sent))?;
                }
            }
            for i in vectors().collect::<Vec<_>>() {
                let sum = self.collect(self.own((k, chunk, i)), epoch, i)?;
                self.finish_vector((k, chunk, i), sum)?;
            }
            self.ended()?;
        }
        self.leave(epoch)
    }

    fn pull(&mut self, k: usize, c: &Collective) -> Alive {
        let (mut epoch, ready) = (self.turn()?.ranks[self.rank].last_epoch, self.case().protocol.ready);
        for (chunk, rows) in c.rows.iter().enumerate() {
            epoch = self.start_chunk(epoch)?;
            let vectors: Vec<usize> = (self.lane..rows * c.columns).step_by(LANES).collect();
            for &i in &vectors {
                self.store_vector(self.slot(self.rank, epoch, ready, 0, i), self.own((k, chunk, i)))?;
            }
            if self.case().fault != Some(Fault::FlagBarrier) {
                self.barrier()?;
            }
            // A thread a peer in the kernel; here each takes some.
            let peers: Vec<usize> = self.peers().filter(|peer| peer % LANES == self.lane).collect();
            for &peer in &peers {
                if self.case().fault != Some(Fault::Release) {
                    self.fence()?;
                }
                self.store(self.flag(peer, epoch, self.rank), u64::from(epoch))?;
            }
            for &peer in &peers {
                self.since = 0;
                while !self.lost && self.load(self.flag(self.rank, epoch, peer))? != u64::from(epoch) {
                    self.waits()?;
                }
            }
            self.turn()?.ranks[self.rank].lost |= self.lost;
            self.barrier()?;
            let lost = self.turn()?.ranks[self.rank].lost;
            self.lost = lost;
            for &i in &vectors {
                let mut sum = [0, 0];
                for rank in 0..self.case().ranks {
                    let vector = self.load_vector(self.slot(rank, epoch, ready, 0, i))?;
                    sum = [add(sum[0], vector[0]), add(sum[1], vector[1])];
                }
                self.finish_vector((k, chunk, i), sum)?;
            }
            self.ended()?;
        }
        self.leave(epoch)
    }

    fn two_shot(&mut self, k: usize, c: &Collective) -> Alive {
        let Protocol { pushed, gathered, .. } = self.case().protocol;
        let ranks = self.case().ranks;
        // Its vectors of a chunk, in the order in which they lie in a slot.
        let of_owner = |owner: usize, rows: usize| {
            let columns = c.columns * owner / ranks..c.columns * (owner + 1) / ranks;
            let vectors = (0..rows).flat_map(move |row| columns.clone().map(move |column| row * c.columns + column));
            vectors.enumerate().map(move |(at, i)| (owner, at, i))
        };
        let mut epoch = self.turn()?.ranks[self.rank].last_epoch;
        for (chunk, rows) in c.rows.iter().enumerate() {
            if chunk > 0 {
                self.end_chunk()?;
            }
            epoch = self.start_chunk(epoch)?;
            let mine: Vec<_> = of_owner(self.rank, *rows).skip(self.lane).step_by(LANES).collect();
            let others: Vec<_> =
                self.peers().flat_map(|owner| of_owner(owner, *rows)).skip(self.lane).step_by(LANES).collect();
            for &(owner, at, i) in &others {
                self.store_vector(self.slot(owner, epoch, pushed, self.rank, at), self.own((k, chunk, i)).map(sent))?;
            }
            for &(_, at, i) in &mine {
                let sum = self.collect(self.own((k, chunk, i)), epoch, at)?;
                for peer in self.peers() {
                    self.store_vector(self.slot(peer, epoch, gathered, self.rank, at), sum.map(sent))?;
                }
                self.finish_vector((k, chunk, i), sum)?;
            }
            for &(owner, at, i) in &others {
                let from = self.slot(self.rank, epoch, gathered, owner, at);
                let sum = self.receive(from)?.map(|number| number & !NEGATIVE_ZERO);
                self.store_vector(from, [0, 0])?;
                self.finish_vector((k, chunk, i), sum)?;
            }
            self.ended()?;
        }
        self.leave(epoch)
    }

    fn exchange(&mut self, k: usize, c: &Collective) -> Alive {
        let mut epoch = self.turn()?.ranks[self.rank].last_epoch;
        for (chunk, rows) in c.rows.iter().enumerate() {
            if chunk > 0 {
                self.end_chunk()?;
            }
            epoch = self.start_chunk(epoch)?;
            let words: Vec<usize> = (self.lane..rows * c.columns).step_by(LANES).collect();
            for &i in &words {
                let word = partial((k, chunk, i, 0), self.rank);
                for peer in self.peers() {
                    let packet = [word & 0xffff_ffff, word >> 32].map(|half| half | u64::from(epoch) << 32);
                    self.store_vector(self.slot(peer, epoch, self.case().protocol.words, self.rank, i), packet)?;
                }
            }
            for &i in &words {
                let mut sum = partial((k, chunk, i, 0), self.rank);
                for peer in self.peers() {
                    let at = self.slot(self.rank, epoch, self.case().protocol.words, peer, i);
                    self.since = 0;
                    let mut packet = self.load_vector(at)?;
                    while packet.iter().any(|half| half >> 32 != u64::from(epoch)) && !self.lost && self.waits()? {
                        packet = self.load_vector(at)?;
                    }
                    sum = sum.wrapping_add(packet[0] & 0xffff_ffff | packet[1] << 32);
                }
                self.finish((k, chunk, i, 0), sum)?;
            }
            self.ended()?;
        }
        self.leave(epoch)
    }

    fn run(mut self) {
        let world = self.world.clone();
        let all = world.case.script.iter().enumerate().try_for_each(|(k, collective)| {
            (self.looks, self.lost) = (0, false); // a kernel begins
            match collective.kind {
                Push => self.push(k, collective),
                Pull => self.pull(k, collective),
                TwoShot => self.two_shot(k, collective),
                Exchange => self.exchange(k, collective),
            }
        });
        drop(all); // a dead rank says nothing
        self.lock().running -= 1;
    }
}

/// As Failure in src/gpu/ranks/conductor.rs: when one rank gives up, the host ends the waiting of the others.
fn host(world: &World) {
    let lock = || world.state.lock().expect("nobody panics with it");
    let gave_up = |rank: &Rank| rank.poison != 0;
    while lock().running > 0 && !lock().ranks.iter().any(gave_up) {
        thread::yield_now();
    }
    let mut state = lock();
    if state.ranks.iter().any(gave_up) {
        state
            .ranks
            .iter_mut()
            .filter(|rank| rank.poison == 0)
            .for_each(|rank| rank.poison = world.case.protocol.poison_host);
    }
}

// ---- schedules ----

/// How a schedule ended.
struct Ending {
    /// What is not as it should be.
    wrong: Option<String>,
    /// The words of the ranks.
    poison: Vec<u64>,
    turns: u64,
}

/// `n` schedules of a case, the same for the same seed.
fn explore(case: &Case, seed: u64, n: usize) -> Vec<Ending> {
    let endings = Arc::new(Mutex::new(Vec::new()));
    let (all, case, count) = (endings.clone(), case.clone(), AtomicU64::new(0));
    let mut config = Config::new();
    config.failure_persistence = FailurePersistence::None;
    config.max_steps = MaxSteps::FailAfter(20_000_000);
    Runner::new(RandomScheduler::new_from_seed(seed, n), config).run(move || {
        let rank = Rank { last_epoch: case.last_epoch, ..Rank::default() };
        let state = State {
            memory: BTreeMap::new(),
            in_flight: Vec::new(),
            turns: 0,
            random: (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(count.fetch_add(1, Relaxed) * 2 + 1),
            ranks: vec![rank; case.ranks],
            running: case.ranks * LANES,
            ahead: None,
        };
        let world = Arc::new(World { case: case.clone(), state: Mutex::new(state) });
        let mut threads = Vec::new();
        for rank in 0..case.ranks {
            for lane in 0..LANES {
                let lane = Lane { world: world.clone(), rank, lane, looks: 0, since: 0, lost: false, begun: 0 };
                threads.push(thread::spawn(move || lane.run()));
            }
        }
        if case.dies.is_some() {
            let world = world.clone();
            threads.push(thread::spawn(move || host(&world)));
        }
        threads.into_iter().for_each(|thread| thread.join().expect("nobody panics"));
        let mut state = world.state.lock().expect("nobody panics with it");
        state.deliver(true, |_| true);
        let poison = state.ranks.iter().map(|rank| rank.poison).collect();
        all.lock().expect("nobody panics with it").push(Ending {
            wrong: wrong(&case, &state),
            poison,
            turns: state.turns,
        });
    });
    let mut endings = endings.lock().expect("nobody panics with it");
    std::mem::take(&mut endings)
}

/// What is not as all ranks should leave it; of a case where one dies, what a rank that was not told to give up has
/// wrong.
fn wrong(case: &Case, state: &State) -> Option<String> {
    let dead = case.dies.map(|(rank, _)| rank);
    for (r, rank) in state.ranks.iter().enumerate() {
        if Some(r) == dead || (dead.is_some() && rank.poison != 0) {
            continue;
        }
        if rank.poison != 0 {
            return Some(format!("rank {r} waited in vain"));
        }
        let mut epoch = case.last_epoch;
        for (k, c) in case.script.iter().enumerate() {
            for (chunk, rows) in c.rows.iter().enumerate() {
                epoch = case.protocol.next_epoch(epoch);
                let halves = if c.kind == Exchange { 1 } else { 2 };
                for place in (0..rows * c.columns).flat_map(|i| (0..halves).map(move |half| (k, chunk, i, half))) {
                    let (found, expected) = (rank.results.get(&place), expected(c.kind, place, case.ranks));
                    if found != Some(&expected) {
                        return Some(format!(
                            "rank {r}, {:?}, {place:?}: expected {expected:x}, found {found:x?}",
                            c.kind
                        ));
                    }
                }
            }
        }
        if rank.last_epoch != epoch {
            return Some(format!("rank {r} ends at epoch {}, expected {epoch}", rank.last_epoch));
        }
    }
    let p = &case.protocol;
    let is_slot = |at: u64| (p.pushed..p.words).contains(&(at % p.buffer_bytes));
    match state.memory.iter().find(|(at, value)| is_slot(at.1) && **value != 0) {
        Some((at, _)) if dead.is_none() => Some(format!("a slot at {at:?} is not empty")),
        _ => state.ahead.clone(),
    }
}

/// Collectives of all kinds and one to three chunks, the last of which is short.
fn mixed(seed: u64, ranks: usize) -> Vec<Collective> {
    let mut random = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut below = move |n: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((random >> 33) % n) as usize
    };
    let mut collective = |_| {
        let kind = [Push, Pull, TwoShot, Exchange][below(4)];
        let mut rows = vec![2; below(3)];
        rows.push(1 + below(2));
        Collective { kind, rows, columns: if kind == TwoShot { ranks + below(2) } else { 1 + below(2) } }
    };
    (0..4).map(&mut collective).collect()
}

fn holds(case: &Case, seed: u64, n: usize) {
    for ending in explore(case, seed, n) {
        assert!(
            ending.wrong.is_none(),
            "seed {seed}, {} ranks, {:?}: {}",
            case.ranks,
            case.script,
            ending.wrong.unwrap_or_default()
        );
    }
}

fn is_noticed(what: &str, case: &Case, seed: u64, n: usize) {
    let failed: Vec<String> = explore(case, seed, n).into_iter().filter_map(|ending| ending.wrong).collect();
    assert!(!failed.is_empty(), "{what}: {n} schedules of {} ranks, {:?}, and all is well", case.ranks, case.script);
    println!("{what}, {} ranks: {} of {n} schedules fail, as in: {}", case.ranks, failed.len(), failed[0]);
}

#[test]
fn every_schedule_gives_every_rank_the_sums() {
    for ranks in [2, 3] {
        for seed in 0..40 {
            let mut case = Case::new(ranks, mixed(seed, ranks));
            case.last_epoch = u32::MAX - seed as u32 % 7;
            holds(&case, seed, 12);
        }
    }
}

#[test]
fn a_slow_rank_is_waited_for() {
    for ranks in [2, 3] {
        for seed in 100..112 {
            holds(&Case { slow: Some(seed as usize % ranks), ..Case::new(ranks, mixed(seed, ranks)) }, seed, 6);
        }
    }
}

/// One rank dies at any of its operations: of the others each has all its sums or is poisoned, the first by its own
/// patience, and all end soon.
#[test]
fn a_dead_rank_ends_the_others() {
    let (mut by_patience, mut by_host) = (0, 0);
    for seed in 200..216 {
        let ranks = 2 + seed as usize % 2;
        let dead = seed as usize % ranks;
        let case = Case { dies: Some((dead, 1 + (seed - 200) * 11)), ..Case::new(ranks, mixed(seed, ranks)) };
        for ending in explore(&case, seed, 2) {
            assert!(ending.wrong.is_none(), "seed {seed}: {}", ending.wrong.unwrap_or_default());
            let count =
                |word: u64| ending.poison.iter().enumerate().filter(|(rank, p)| *rank != dead && **p == word).count();
            let [timeout, host] = [case.protocol.poison_timeout, case.protocol.poison_host].map(count);
            assert!(timeout >= 1 || host == 0, "seed {seed}: poisoned by the host, but nobody had given up");
            // Then each thread looks so often once more in each collective.
            let bound = PATIENCE + (2 + case.script.len() as u64) * case.protocol.looks * (ranks * LANES) as u64 * 4;
            assert!(ending.turns < bound, "seed {seed}: {} turns, expected fewer than {bound}", ending.turns);
            (by_patience, by_host) = (by_patience + timeout, by_host + host);
        }
    }
    println!("{by_patience} ranks gave up by themselves, {by_host} because another had");
    assert!(by_patience >= 24 && by_host > 0, "{by_patience} by patience, {by_host} by the host");
}

#[test]
fn each_planted_fault_is_noticed() {
    // A short last chunk leaves a thread without work, or gives it another's. A late zero needs chunks that follow each
    // other in one kernel.
    let (short, third, long): (&[usize], &[usize], &[usize]) = (&[2, 1], &[2, 2, 1], &[1, 1, 1, 1, 1]);
    let cases = [
        (Fault::EndBarrier, Push, short, &[2, 3][..]),
        // Of two ranks no thread sends where another of its rank did: each could go on by itself.
        (Fault::EndBarrier, TwoShot, third, &[3]),
        (Fault::EndBarrier, Exchange, short, &[2, 3]),
        (Fault::Clear, Push, short, &[2, 3]),
        (Fault::Clear, TwoShot, short, &[2, 3]),
        (Fault::Fence, Push, long, &[2, 3]),
        (Fault::Fence, TwoShot, long, &[2, 3]),
        (Fault::FlagBarrier, Pull, short, &[2, 3]),
        (Fault::Release, Pull, short, &[2, 3]),
    ];
    for (i, (fault, kind, rows, counts)) in cases.into_iter().enumerate() {
        for &ranks in counts {
            let collective = Collective { kind, rows: rows.to_vec(), columns: if kind == TwoShot { ranks } else { 1 } };
            let sound = Case::new(ranks, vec![collective; 4]);
            holds(&sound, i as u64, 24);
            is_noticed(&format!("{fault:?}, {kind:?}"), &Case { fault: Some(fault), ..sound }, i as u64, 24);
        }
    }
}

/// Why there are two buffers, why they alternate across the wrap, and why 0 is no epoch.
#[test]
fn other_constants_are_noticed() {
    let p = Protocol::read();
    let once = |kind| vec![Collective { kind, rows: vec![1; 4], columns: 2 }];
    for kind in [Push, Pull, Exchange] {
        let case = Case { protocol: Protocol { buffers: 1, ..p }, ..Case::new(2, once(kind)) };
        is_noticed(&format!("one buffer, {kind:?}"), &case, 1, 20);
    }
    is_noticed(
        "1 after the wrap",
        &Case { protocol: Protocol { after_wrap: 1, ..p }, ..Case::new(2, once(Push)) },
        2,
        60,
    );
    let at_wrap = Case { last_epoch: u32::MAX, ..Case::new(2, once(Exchange)) };
    holds(&at_wrap, 3, 20);
    is_noticed("0 after the wrap", &Case { protocol: Protocol { after_wrap: 0, ..p }, ..at_wrap }, 3, 20);
}
