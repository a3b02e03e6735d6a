//! The cycle: prefill, draft, verify, accept, stop. Backends implement `Backend`; commands drive `Engine`.
mod engine;
pub mod sample;
mod sequence;

pub use engine::{Answer, Backend, Counters, Engine, Event, Finish, Flow, PassTime, Request};
pub use sample::Sampling;
pub use sequence::{End, Limits, Record, Sequence};
