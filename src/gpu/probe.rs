//! What the machine allows: the rate at which memory can be read, against which everything else is measured, and the
//! price of a launch.
use super::catalog::KernelId;
use super::device::{Gpu, Launch};
use super::kernels::Kernels;
use super::params::{FillParams, NormParams, ReadParams};
use anyhow::Result;
use bytemuck::Zeroable;

/// Best bytes per second of streaming reads of a buffer far larger than any cache: 16 GiB, or half of what is free.
pub fn read_ceiling(gpu: &Gpu) -> Result<f64> {
    let kernels = Kernels::load(gpu)?;
    let bytes = (16usize << 30).min(gpu.memory()?.0 / 2) / (1 << 20) * (1 << 20);
    let (buffer, sink) = (gpu.allocate(bytes)?, gpu.allocate(16)?);
    // Zeros read faster than data (seen on an H200).
    let k = 4096;
    let params = FillParams {
        to: buffer.at(0),
        seed: 1,
        n: (bytes / 2 / k) as i32,
        k: k as i32,
        retiled: 0,
        constant: 0,
        scale: 1.0,
        pad: 0,
    };
    let launch = Launch { grid: (8 * gpu.info().n_sms as u32, 1, 1), block: 256, shared: 0, early: false };
    gpu.launch(kernels.get(KernelId::FillRandom), launch, &params)?;
    let params = ReadParams { from: buffer.at(0), n: bytes as u64 / 16, sink: sink.at(0) };
    let mut best = 0.0f64;
    for blocks_an_sm in [2, 4, 2, 4, 2, 4] {
        let launch =
            Launch { grid: (blocks_an_sm * gpu.info().n_sms as u32, 1, 1), block: 512, shared: 0, early: false };
        let ms = gpu.time(|| gpu.launch(kernels.get(KernelId::ReadCeiling), launch, &params))?;
        best = best.max(bytes as f64 / (ms as f64 / 1e3));
    }
    Ok(best)
}

/// Best bytes per second of copies from page-locked memory to the GPU.
pub fn copy_rate(gpu: &Gpu) -> Result<f64> {
    const BYTES: usize = 64 << 20;
    let (from, to) = (gpu.pinned::<u8>(BYTES)?, gpu.allocate(BYTES)?);
    let mut best = 0.0f64;
    for _ in 0..5 {
        let ms = gpu.time(|| gpu.upload(from.slice(), to.at(0)))?;
        best = best.max(BYTES as f64 / (ms as f64 / 1e3));
    }
    Ok(best)
}

/// What a kernel adds to a chain in a graph, in microseconds.
pub struct NodeCost {
    /// Behind a full edge: it starts when the kernel before has ended.
    pub full_us: f64,
    /// Where its blocks may start while the kernel before drains.
    pub early_us: f64,
}

/// From graphs of a thousand kernels with nothing to do (norm_rows of no rows).
pub fn node_cost(gpu: &Gpu) -> Result<NodeCost> {
    const NODES: usize = 1000;
    let kernels = Kernels::load(gpu)?;
    let cost = |early: bool| -> Result<f64> {
        let launch = Launch { grid: (1, 1, 1), block: 256, shared: 0, early };
        let graph = gpu.capture(|| {
            (0..NODES).try_for_each(|_| gpu.launch(kernels.get(KernelId::NormRows), launch, &NormParams::zeroed()))
        })?;
        let mut best = f32::INFINITY;
        for _ in 0..6 {
            best = best.min(gpu.time(|| gpu.replay(&graph))?);
        }
        Ok(best as f64 * 1e3 / NODES as f64)
    };
    Ok(NodeCost { full_us: cost(false)?, early_us: cost(true)? })
}
