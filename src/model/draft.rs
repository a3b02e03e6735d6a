//! An EAGLE-3 drafter: its shape, its weights, and the map from its vocabulary to the target's.
use super::config::Rope;
use super::plan::Drafter;
use super::weights::Weights;

pub struct DraftModel {
    pub shape: Drafter,
    pub rope: Rope,
    pub weights: Weights,
    /// Draft id to target id, ascending; None where both vocabularies are the same.
    pub map: Option<Vec<u32>>,
}
