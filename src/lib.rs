//! Volley: a decode engine for one person and one stream. ARCHITECTURE.md is the map.
pub mod cli;
pub mod cmd;
mod completions;
pub mod cpu;
pub mod decode;
pub mod error;
pub mod gpu;
pub mod model;
pub mod text;
