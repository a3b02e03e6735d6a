//! The GPU backend. cuda.rs is the only file with driver calls; device.rs is what the rest sees of a GPU.
pub mod comm;
pub mod cuda;
pub mod device;
pub mod fatbins;
pub mod kernels;
pub mod machine;
pub mod nccl;
pub mod params;
pub mod probe;
pub mod shim;
pub mod weights;

use anyhow::Result;
use std::rc::Rc;

/// GPU `ordinal` through the CUDA driver.
pub fn open(ordinal: usize) -> Result<device::Gpu> {
    Ok(device::Gpu::new(Rc::new(cuda::Cuda::open(ordinal)?)))
}
