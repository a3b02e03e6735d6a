//! What a model is: config.json, the plan of steps, weights.toml, the mapped checkpoint.
pub mod checkpoint;
pub mod claim;
pub mod config;
pub mod divide;
pub mod draft;
mod draft_config;
pub mod draft_vocab;
mod family;
mod keys;
pub mod plan;
pub mod quant;
pub mod role;
pub mod rope;
pub mod table;
pub mod weights;
