//! The GPU backend. cuda.rs is the only file with driver calls; device.rs is what the rest sees of a GPU.
pub mod arena;
pub mod catalog;
pub mod cuda;
pub mod device;
pub mod fatbins;
mod inspect;
pub mod kernels;
pub mod launch;
pub mod lower;
pub mod machine;
pub mod matrix;
mod norms;
pub mod op;
pub mod params;
pub mod probe;
pub mod ranks;
pub mod shim;
mod start;
mod timing;
pub mod weights;

use anyhow::Result;
use std::path::Path;
use std::rc::Rc;

/// GPU `ordinal` through the CUDA driver.
pub fn open(ordinal: usize) -> Result<device::Gpu> {
    Ok(device::Gpu::new(Rc::new(cuda::Cuda::open(ordinal)?)))
}

/// Lets the streams of several ranks on one GPU run side by side: 8 queues are the default, and streams that share one
/// wait for each other. Before the first GPU is opened.
pub fn make_room_for_ranks() {
    const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(QUEUES).is_none() {
        std::env::set_var(QUEUES, "32");
    }
}

/// GPUs in the order of the PCI tree: those below one switch or root port next to each other.
pub fn in_tree_order(gpus: Vec<usize>) -> Result<Vec<usize>> {
    let mut placed = Vec::new();
    for gpu in gpus {
        let id = cuda::pci_bus_id(gpu)?;
        // The link of a device leads through all bridges above it.
        let place = std::fs::canonicalize(Path::new("/sys/bus/pci/devices").join(&id));
        placed.push((place.unwrap_or_else(|_| id.into()), gpu));
    }
    placed.sort();
    Ok(placed.into_iter().map(|(_, gpu)| gpu).collect())
}
