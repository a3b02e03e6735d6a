//! The cycle: prefill, draft, verify, accept, stop. Backends implement `Backend`; commands drive `Engine`.
mod backend;
pub mod draft_ngram;
mod engine;
pub mod policy;
pub mod sample;
mod sequence;
mod speculate;

pub use backend::{Backend, Counters, Probe, StepTime};
pub use engine::{Answer, Engine, Event, Finish, Flow, PassTime, Request};
pub use policy::MAX_DRAFTS;
pub use sample::Sampling;
pub use sequence::{End, Limits, Record, Sequence};
pub use speculate::{Drafting, Script, Statistics};

#[cfg(test)]
mod tests;
