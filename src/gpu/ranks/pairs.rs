//! What pairs of GPUs can do with each other's memory: measured with stores and loads of their SMs, since copy engines
//! do not show what is wrong with those.
use super::algorithm::FaultKind;
use super::link::{Link, Peer};
use crate::gpu::device::{Gpu, Kernel, Launch, Pinned};
use crate::gpu::params::*;
use anyhow::Result;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::time::Duration;

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
pub enum Health {
    SameGpu,
    Healthy,
    /// Through host memory, by the driver, an IOMMU or ACS.
    Staged,
    /// Posted writes fall far below reads.
    Collapsed,
    /// Wrong data, or no answer.
    Off,
}

impl Health {
    pub fn is_good(self) -> bool {
        matches!(self, Health::SameGpu | Health::Healthy)
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
    pub fn health(&self) -> Health {
        let is_off = self.wrong_stores > 0 || self.wrong_loads > 0 || self.latency_us.is_none();
        match self.latency_us {
            _ if is_off => Health::Off,
            _ if self.same_gpu => Health::SameGpu,
            _ if self.load_rate >= STAGED_RATE
                && self.store_rate < COLLAPSE_RATE
                && self.store_rate * COLLAPSE_RATIO < self.load_rate =>
            {
                Health::Collapsed
            }
            Some(us) if us > STAGED_LATENCY_US => Health::Staged,
            _ if self.load_rate.min(self.store_rate) < STAGED_RATE => Health::Staged,
            _ => Health::Healthy,
        }
    }

    fn cure(&self) -> &'static str {
        match self.health() {
            Health::SameGpu | Health::Healthy => "",
            Health::Off => {
                "; turn the IOMMU off (iommu=off, or iommu=pt) and clear ACS on root ports and switches; a GPU that still fails is broken"
            }
            Health::Staged => {
                "; turn the IOMMU off, clear ACS on root ports and switches, and let the driver use peer access: \
                 options nvidia NVreg_RegistryDwords=\"ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2;GrdmaPciTopoCheckOverride=1;EnableResizableBar=1\""
            }
            Health::Collapsed => "; a newer BIOS or driver may cure it, --collective pull avoids it",
        }
    }
}

/// `rank 0 (GPU 0, 0000:17:00.0) to rank 1 (...): healthy: stores 50.1 GB/s, ...` and the cure, if one is needed.
impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let state = match self.health() {
            Health::SameGpu => "same GPU",
            Health::Healthy => "healthy",
            Health::Staged => "staged through host memory",
            Health::Collapsed => "stores collapse",
            Health::Off => "off",
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
struct Measured {
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
    let mut row = Measured {
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
    let rows: Vec<Measured> = link.gathered(&row)?;
    let name = |peer: &Peer| format!("GPU {}, {}", peer.ordinal, peer.bus_id);
    let pair = |from: usize, to: usize| Pair {
        from,
        to,
        gpus: [name(&link.peers[from]), name(&link.peers[to])],
        same_gpu: link.peers[from].bus_id == link.peers[to].bus_id,
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
        let mut comm = self.link.wire().comm_of("probe");
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

#[cfg(test)]
mod tests {
    use super::*;

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
            (pair(53.0, 50.0, Some(0.7)), Health::Healthy, "healthy"),
            (pair(6.5, 6.5, Some(1.5)), Health::Healthy, "one way 1.5 us"),
            (pair(2.7, 53.0, Some(1.1)), Health::Collapsed, "--collective pull"),
            (pair(7.0, 20.0, Some(9.0)), Health::Collapsed, "stores 7.0 GB/s"),
            (pair(3.3, 3.3, Some(1.5)), Health::Staged, "ForceP2P"),
            (pair(20.0, 20.0, Some(14.0)), Health::Staged, "IOMMU"),
            (pair(20.0, 20.0, None), Health::Off, "no answer to a ping"),
            (Pair { wrong_loads: 1, ..pair(20.0, 20.0, Some(1.0)) }, Health::Off, "1 of 131072 loads wrong"),
            (Pair { same_gpu: true, ..pair(0.1, 20.0, Some(50.0)) }, Health::SameGpu, "same GPU"),
            (
                Pair { same_gpu: true, wrong_stores: 7, ..pair(9.0, 9.0, Some(1.0)) },
                Health::Off,
                "7 of 131072 stores wrong",
            ),
        ] {
            let line = measured.to_string();
            assert_eq!(measured.health(), state, "{line}");
            assert!(
                line.contains(cure)
                    && line.starts_with("rank 0 (GPU 0, a) to rank 1 (GPU 1, b): ")
                    && !line.contains('\n'),
                "{line}"
            );
        }
    }
}
