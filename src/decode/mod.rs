//! The cycle: prefill, draft, verify, accept, stop. Backends implement `Backend`; commands drive `Engine`.
pub mod draft_ngram;
mod engine;
pub mod policy;
pub mod sample;
mod sequence;
mod speculate;

pub use engine::{Answer, Backend, Counters, Engine, Event, Finish, Flow, PassTime, Request, StepTime};
pub use sample::Sampling;
pub use sequence::{End, Limits, Record, Sequence};
pub use speculate::{Drafting, Script, Statistics};

/// Most drafts of a cycle: one verify pass of 8 rows.
pub const MAX_DRAFTS: usize = 7;

#[cfg(test)]
mod tests;
