//! How partial sums travel between ranks, and what a test lets go wrong on the way. What runs: collective.rs and
//! kernels/comm.cuh.
use serde::{Deserialize, Serialize};

/// How partial sums travel. All but the last give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Variant {
    pub algorithm: Algorithm,
    pub blocks: usize,
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
