//! The f32 arm of every Step: the oracle, and the backend of machines without a GPU.
mod dot;
mod reference;

pub use reference::{chunk_end, Reference, STORAGE};
