//! The plan: what one pass computes, as a list of steps, built from the config alone.
//!
//! The CUDA backend launches this list (and capture turns it into a graph), the CPU reference runs it in f32, bench
//! walks it for the bytes each step moves, doctor compares the two step by step. Nothing here touches weights or a GPU.
//! Read `Step` (step.rs) first; the arms that execute it are in cpu/ and gpu/.
//!
//! What surprises: norms are not steps. A linear layer multiplies its input by the norm weight on the way in and its
//! sums by the row's 1/rms on the way out, so that no step waits for another just to normalise.
mod drafter;
mod layer;
mod ranks;
mod show;
mod step;
mod target;

pub use super::role::Owner;
pub use drafter::{drafter, Drafter, Eagle3, Mtp};
pub use ranks::{Ranks, Shard};
pub use step::*;
pub use target::{target, Taps};
