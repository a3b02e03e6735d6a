//! What this program was built from.
use crate::gpu::fatbins;
use crate::gpu::ranks::nccl;

/// The commit, if the build knew it.
pub const COMMIT: &str = match option_env!("VOLLEY_COMMIT") {
    Some(commit) => commit,
    None => "unknown commit",
};

/// Name, version, commit, the kernels inside, and which NCCL.
pub fn version() -> String {
    let (kernels, nccl) = (fatbins::built_with(), nccl::Library::built_with());
    format!("volley {} ({COMMIT})\nkernels: {kernels}\nNCCL: {nccl}", env!("CARGO_PKG_VERSION"))
}
