//! The collectives of a pass: sums over ranks and exchanges of words, through the windows of a `Link`
//! (kernels/comm.cuh says how).
//!
//! What one launches is data (`sum`, `words`), and may be captured. Which way of adding is fastest: tune.rs; which one
//! is taken: settle.rs.
use super::algorithm::{Algorithm, Variant};
use super::link::Link;
use crate::gpu::device::{Kernel, Launch, Params};
use crate::gpu::params::*;
use anyhow::{bail, ensure, Context, Result};

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

/// A launch of one of the kernels between ranks, as data.
pub struct Collective<'a, P> {
    pub kernel: &'a Kernel,
    pub launch: Launch,
    pub params: P,
}

/// What an all-reduce runs as.
pub struct Sum<'a> {
    /// Comes first.
    pub brought: Option<Brought>,
    pub collective: Collective<'a, AllReduceParams>,
}

/// NCCL brings all ranks' partials to this one, [ranks][n] bf16, or their sum, [n] bf16.
#[derive(Clone, Copy, Debug)]
pub struct Brought {
    pub adds: bool,
    pub from: u64,
    pub to: u64,
    pub n: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exchange {
    Max,
    Sum,
}

/// Most blocks of a rank that shares its GPU: all ranks' spinning blocks must be resident, and leave room.
const SHARED_BLOCKS: usize = 4;
const THREADS: usize = 256;

impl Link {
    /// What to use from now on, by largest number of rows, ascending; the last for all that is larger. The same on all
    /// ranks.
    pub fn choose(&mut self, variants: Vec<(usize, Variant)>) {
        self.variants = variants;
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
            return (rows * dim / 8).div_ceil(THREADS).min(self.gpu().info().n_sms);
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
    pub fn all_reduce_norm(&self, step: &str, a: &AllReduce) -> Result<()> {
        self.all_reduce_with(self.variant(a.rows, a.dim), step, a)
    }

    /// As `all_reduce_norm`, in this way.
    pub fn all_reduce_with(&self, variant: Variant, step: &str, a: &AllReduce) -> Result<()> {
        let sum = self.sum(variant, step, a)?;
        if let Some(brought) = &sum.brought {
            self.bring(brought)?;
        }
        self.launch(&sum.collective)
    }

    /// What an all-reduce launches.
    pub fn sum(&self, variant: Variant, step: &str, a: &AllReduce) -> Result<Sum<'_>> {
        ensure!(a.dim % 16 == 0, "an all-reduce of rows of {}: expected a multiple of 16", a.dim);
        self.fits(variant, a.dim)?;
        let mut params = AllReduceParams {
            comm: self.comm_of(step),
            partial: a.partial,
            x: a.x,
            bias: a.bias,
            tap: a.tap,
            next_norm: a.next_norm,
            normed: a.normed,
            squares: a.squares,
            n_rows: a.n_rows,
            rows: a.rows as i32,
            dim: a.dim as i32,
            tap_stride: a.tap_stride as i32,
            wait_ns: 0,
        };
        let kernel = match variant.algorithm {
            Algorithm::Push => &self.kernels.push,
            Algorithm::Pull => &self.kernels.pull,
            Algorithm::TwoShot => &self.kernels.two_shot,
            Algorithm::Nccl | Algorithm::NcclAllReduce => {
                let brought = self.brought(variant.algorithm == Algorithm::NcclAllReduce, a)?;
                params.partial = brought.to;
                params.comm.ranks = if brought.adds { 1 } else { params.comm.ranks };
                let collective = self.collective(&self.kernels.local, variant.blocks, THREADS, params);
                return Ok(Sum { brought: Some(brought), collective });
            }
        };
        // No more threads than a chunk of the widest block has vectors.
        let vectors = 2 * (a.dim / 16).div_ceil(variant.blocks) * a.rows;
        let threads = vectors.next_multiple_of(32).min(THREADS);
        Ok(Sum { brought: None, collective: self.collective(kernel, variant.blocks, threads, params) })
    }

    fn brought(&self, adds: bool, a: &AllReduce) -> Result<Brought> {
        let nccl = self.nccl.as_ref().context("NCCL was not loaded")?;
        let n = a.rows * a.dim;
        ensure!(
            if adds { n } else { n * self.ranks() } * 2 <= nccl.gathered.bytes(),
            "{} x {} is more than NCCL was prepared for",
            a.rows,
            a.dim
        );
        Ok(Brought { adds, from: a.partial, to: nccl.gathered.at(0), n })
    }

    /// Has NCCL do it, on the stream of this rank.
    pub fn bring(&self, brought: &Brought) -> Result<()> {
        let nccl = self.nccl.as_ref().context("NCCL was not loaded")?;
        match *brought {
            Brought { adds: true, from, to, n } => nccl.comm.all_reduce(from, to, n),
            Brought { adds: false, from, to, n } => nccl.comm.all_gather(from, to, n),
        }
    }

    /// words[i] becomes the maximum or the sum over all ranks' words[i], u64, for i < n.
    pub fn exchange(&self, step: &str, words: u64, n: usize, op: Exchange) -> Result<()> {
        self.exchange_if((0, 0), step, words, n, op)
    }

    /// The same, but nothing at all where the flags are 0: (address, number) of i32 in device memory, alike on all
    /// ranks.
    pub fn exchange_if(&self, flags: (u64, usize), step: &str, words: u64, n: usize, op: Exchange) -> Result<()> {
        self.launch(&self.words(flags, step, words, n, op)?)
    }

    /// What an exchange launches.
    pub fn words(
        &self,
        flags: (u64, usize),
        step: &str,
        words: u64,
        n: usize,
        op: Exchange,
    ) -> Result<Collective<'_, ExchangeParams>> {
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
        let (blocks, threads) = (n.div_ceil(512).min(most), n.next_multiple_of(32).min(THREADS));
        Ok(self.collective(&self.kernels.exchange, blocks, threads, params))
    }

    fn collective<'a, P>(&self, kernel: &'a Kernel, blocks: usize, threads: usize, params: P) -> Collective<'a, P> {
        let launch = Launch { grid: (blocks as u32, 1, 1), block: threads as u32, shared: 0, early: !self.shared };
        Collective { kernel, launch, params }
    }

    fn launch<P: Params>(&self, c: &Collective<P>) -> Result<()> {
        self.gpu().launch(c.kernel, c.launch, &c.params)
    }
}
