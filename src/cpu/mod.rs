//! The f32 arm of every Step: the oracle, and the backend of machines without a GPU.
