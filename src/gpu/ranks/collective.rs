//! Collectives as data: the kernel, blocks and params of a sum over ranks or an exchange of words (kernels/comm.cuh),
//! from what a rank knows of the others. No GPU is asked. A `Link` makes the wire and runs what it describes.
//!
//! Which way of adding is fastest: tune.rs; which one is taken: settle.rs.
use super::algorithm::{Algorithm, Fault, Variant};
use crate::gpu::catalog::KernelId;
use crate::gpu::op::NcclCall;
use crate::gpu::params::{
    AllReduceParams, CommRanks, ExchangeParams, COMM_CHANNELS, COMM_SLOT_BYTES, EXCHANGE_MAX, EXCHANGE_SUM,
};
use anyhow::{bail, ensure, Context, Result};
use std::cell::RefCell;

/// Addresses and sizes of one all-reduce; what they mean is in kernels/params.h, AllReduceParams. 0: absent.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllReduce {
    pub partial: u64,
    pub x: u64,
    pub bias: u64,
    pub tap: u64,
    pub tap_stride: usize,
    pub next_norm: u64,
    pub normed: u64,
    pub squares: u64,
    pub n_rows: u64,
    pub rows: usize,
    pub dim: usize,
}

impl AllReduce {
    pub fn params(&self, comm: CommRanks) -> AllReduceParams {
        AllReduceParams {
            comm,
            partial: self.partial,
            x: self.x,
            bias: self.bias,
            tap: self.tap,
            next_norm: self.next_norm,
            normed: self.normed,
            squares: self.squares,
            n_rows: self.n_rows,
            rows: self.rows as i32,
            dim: self.dim as i32,
            tap_stride: self.tap_stride as i32,
            wait_ns: 0,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    Max,
    Sum,
}

/// A collective as it will be launched.
#[derive(Clone, Debug, PartialEq)]
pub struct Collective {
    /// What NCCL does before the kernel.
    pub nccl: Option<NcclCall>,
    pub kernel: KernelId,
    pub blocks: usize,
    /// Of a block.
    pub threads: usize,
    /// The params struct of the kernel.
    pub params: Vec<u8>,
    /// `Wire::shared`
    pub shared: bool,
}

/// What a rank knows of the others: all that decides how a collective runs.
pub struct Wire {
    pub comm: CommRanks,
    /// Ranks share a GPU: kernels start when the one before has ended, on few blocks, so that the others' kernels find
    /// room.
    pub shared: bool,
    pub n_sms: usize,
    /// What this rank lets go wrong.
    pub fault: Option<Fault>,
    /// (largest number of rows, variant), ascending. The last counts for all that is larger.
    pub variants: Vec<(usize, Variant)>,
    /// Where NCCL puts what it gathers, [ranks][rows][dim] bf16, and the bytes of that.
    pub gathered: Option<(u64, usize)>,
    /// Names of what was launched, by `CommRanks::step`.
    pub steps: RefCell<Vec<String>>,
}

/// Most blocks of a rank that shares its GPU: all ranks' spinning blocks must be resident, and leave room.
const SHARED_BLOCKS: usize = 4;

impl Wire {
    pub fn ranks(&self) -> usize {
        self.comm.ranks as usize
    }

    /// What an all-reduce of [rows, dim] would run as.
    pub fn variant(&self, rows: usize, dim: usize) -> Variant {
        match self.variants.iter().find(|(most, _)| rows <= *most).or(self.variants.last()) {
            Some((_, variant)) => *variant,
            // Not measured: two-shot where its second crossing costs less than the bytes it saves, by public
            // measurements on PCIe.
            None => {
                let small = self.ranks() == 2 || rows * dim * 2 * self.ranks() <= 160 << 10;
                let algorithm = if small || dim / 16 < self.ranks() { Algorithm::Push } else { Algorithm::TwoShot };
                Variant { algorithm, blocks: self.blocks(algorithm, rows, dim) }
            }
        }
    }

    /// Blocks that suit an algorithm and a size: about 4 KB of a rank's sums each, where not measured.
    pub fn blocks(&self, algorithm: Algorithm, rows: usize, dim: usize) -> usize {
        if algorithm.needs_nccl() {
            return (rows * dim / 8).div_ceil(KernelId::AllReduceLocal.threads() as usize).min(self.n_sms);
        }
        let (fewest, most) = self.block_limits(algorithm, dim);
        let wanted = if self.shared { SHARED_BLOCKS } else { (rows * dim * 2).div_ceil(4096).max(4) };
        wanted.clamp(fewest, most.max(fewest))
    }

    /// Fewest blocks with which a row's share of a block fits into a slot; most with which every block (two-shot: every
    /// rank in it) has a tile of 16 columns.
    pub fn block_limits(&self, algorithm: Algorithm, dim: usize) -> (usize, usize) {
        let ranks = if algorithm == Algorithm::TwoShot { self.ranks() } else { 1 };
        let most = if self.shared { SHARED_BLOCKS } else { COMM_CHANNELS };
        ((dim / 16).div_ceil(COMM_SLOT_BYTES / 32 * ranks), (dim / 16 / ranks).min(most))
    }

    pub(super) fn fits(&self, variant: Variant, dim: usize) -> Result<()> {
        let (fewest, most) = self.block_limits(variant.algorithm, dim);
        if variant.algorithm == Algorithm::TwoShot && dim / 16 < self.ranks() {
            bail!(
                "rows of {dim} on {} ranks: two-shot needs at least 16 columns a rank; use --collective push",
                self.ranks()
            );
        }
        ensure!(
            variant.algorithm.needs_nccl() || (fewest.max(1)..=most).contains(&variant.blocks),
            "{} of rows of {dim} with {} blocks: expected {} to {most}",
            variant.algorithm.name(),
            variant.blocks,
            fewest.max(1)
        );
        Ok(())
    }

    /// x += bf16(sum of all ranks' partials + bias), and what the next norm needs of it. `step` names it in errors.
    pub fn all_reduce(&self, step: &str, a: &AllReduce) -> Result<Collective> {
        self.all_reduce_with(self.variant(a.rows, a.dim), step, a)
    }

    /// As `all_reduce`, with this variant.
    pub fn all_reduce_with(&self, variant: Variant, step: &str, a: &AllReduce) -> Result<Collective> {
        ensure!(a.dim % 16 == 0, "an all-reduce of rows of {}: expected a multiple of 16", a.dim);
        self.fits(variant, a.dim)?;
        let params = a.params(self.comm_of(step));
        let kernel = match variant.algorithm {
            Algorithm::Push => {
                self.kernel(KernelId::AllReducePush, KernelId::AllReducePushFaulty, Some(variant.algorithm))
            }
            Algorithm::Pull => {
                self.kernel(KernelId::AllReducePull, KernelId::AllReducePullFaulty, Some(variant.algorithm))
            }
            Algorithm::TwoShot => {
                self.kernel(KernelId::AllReduceTwoShot, KernelId::AllReduceTwoShotFaulty, Some(variant.algorithm))
            }
            Algorithm::Nccl | Algorithm::NcclAllReduce => return self.all_reduce_by_nccl(variant, a, params),
        };
        // No more threads than a chunk of the widest block has vectors.
        let vectors = 2 * (a.dim / 16).div_ceil(variant.blocks) * a.rows;
        Ok(self.collective(kernel, variant.blocks, vectors, &params))
    }

    /// NCCL moves the sums, a kernel of this rank adds them.
    fn all_reduce_by_nccl(&self, variant: Variant, a: &AllReduce, mut params: AllReduceParams) -> Result<Collective> {
        let (to, bytes) = self.gathered.context("NCCL was not loaded")?;
        let (n, adds) = (a.rows * a.dim, variant.algorithm == Algorithm::NcclAllReduce);
        ensure!(
            if adds { n } else { n * self.ranks() } * 2 <= bytes,
            "{} x {} is more than NCCL was prepared for",
            a.rows,
            a.dim
        );
        params.partial = to;
        params.comm.ranks = if adds { 1 } else { params.comm.ranks };
        let kernel = KernelId::AllReduceLocal;
        let local = self.collective(kernel, variant.blocks, kernel.threads() as usize, &params);
        Ok(Collective { nccl: Some(NcclCall { adds, from: a.partial, to, n }), ..local })
    }

    /// words[i] becomes the maximum or the sum over all ranks' words[i], u64, for i < n; nothing at all where the flags
    /// are 0: (address, number) of i32 in device memory, alike on all ranks; (0, 0): always.
    pub fn exchange(&self, flags: (u64, usize), step: &str, words: u64, n: usize, op: Exchange) -> Result<Collective> {
        ensure!(n > 0, "an exchange of no words");
        let op = if op == Exchange::Sum { EXCHANGE_SUM } else { EXCHANGE_MAX };
        let most = if self.shared { SHARED_BLOCKS } else { COMM_CHANNELS };
        let params = ExchangeParams {
            comm: self.comm_of(step),
            words,
            wanted: flags.0,
            n: n as i32,
            op,
            n_wanted: flags.1 as i32,
            pad: 0,
        };
        let kernel = self.kernel(KernelId::ExchangeWords, KernelId::ExchangeWordsFaulty, None);
        Ok(self.collective(kernel, n.div_ceil(512).min(most), n, &params))
    }

    /// With at least `n` threads a block, if the kernel has as many.
    fn collective<P: bytemuck::NoUninit>(&self, kernel: KernelId, blocks: usize, n: usize, params: &P) -> Collective {
        let threads = n.next_multiple_of(32).min(kernel.threads() as usize);
        let params = bytemuck::bytes_of(params).to_vec();
        Collective { nccl: None, kernel, blocks, threads, params, shared: self.shared }
    }

    fn kernel(&self, kernel: KernelId, faulty: KernelId, algorithm: Option<Algorithm>) -> KernelId {
        let is_faulty = self.fault.is_some_and(|fault| fault.only.is_none() || fault.only == algorithm);
        if is_faulty {
            faulty
        } else {
            kernel
        }
    }

    /// What kernels know of the ranks, with the number of what is launched.
    pub fn comm_of(&self, step: &str) -> CommRanks {
        let mut steps = self.steps.borrow_mut();
        let at = steps.iter().position(|s| s == step).unwrap_or(steps.len());
        if at == steps.len() {
            steps.push(step.to_string());
        }
        CommRanks { step: at as i32, ..self.comm }
    }
}
