//! Several GPUs, or several ranks on one, as one backend.
//!
//! conductor.rs runs a Machine for each rank. link.rs is all that a Machine knows of the others, collective.rs what
//! runs through it (algorithm.rs names the ways), rendezvous.rs how ranks meet, nccl.rs NVIDIA's library. What connects
//! GPUs is measured by pairs.rs and tune.rs, remembered by cache.rs, and taken by settle.rs.
pub mod algorithm;
pub mod cache;
pub mod collective;
pub mod conductor;
pub mod link;
pub mod nccl;
pub mod pairs;
pub mod rendezvous;
pub mod settle;
pub mod tune;

pub use conductor::{Conductor, LastResort, Setup, Start};
