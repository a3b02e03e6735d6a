//! Every kernel that kernels/*.cu names, resolved at start.
use super::catalog::KernelId;
use super::device::{Gpu, Kernel};
use anyhow::Result;

/// By `KernelId`.
pub struct Kernels(Vec<Kernel>);

impl Kernels {
    pub fn load(gpu: &Gpu) -> Result<Kernels> {
        KernelId::ALL.iter().map(|id| gpu.kernel(id.name(), id.shared())).collect::<Result<_>>().map(Kernels)
    }

    pub fn get(&self, id: KernelId) -> &Kernel {
        &self.0[id as usize]
    }
}
