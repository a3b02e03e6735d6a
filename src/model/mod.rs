//! What a model is: config.json, the plan of steps, weights.toml, the mapped checkpoint.
pub mod checkpoint;
pub mod config;
pub mod draft;
pub mod draft_vocab;
pub mod plan;
pub mod quant;
pub mod weights;
