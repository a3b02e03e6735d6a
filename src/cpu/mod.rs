//! The f32 arm of every Step: the oracle, and the backend of machines without a GPU.
mod dot;
mod experts;
mod latent;
mod reference;

pub use reference::{chunk_end, Reference, STORAGE};

/// Makes the calling thread one of those that compute, once per process: a parallel loop then starts at once instead of
/// waiting for another thread to wake. For a program whose main thread decodes; parallel work may afterwards be started
/// from this thread only.
pub fn compute_on_this_thread() {
    // An error only says that the threads exist already.
    let _ = rayon::ThreadPoolBuilder::new().use_current_thread().build_global();
}
