//! Sums over ranks (kernels/comm.cuh). How one travels is the wire's to say.
use super::super::catalog::KernelId;
use super::super::op::{Edge, Op, Work};
use super::super::params::{AllReduceParams, CommRanks};
use super::super::ranks::collective::{AllReduce, Collective, Wire};
use super::{Lowering, Sums};
use crate::model::plan::{BufferId, Tap};
use crate::model::role::WeightId;
use anyhow::{bail, Result};
use bytemuck::Zeroable;

impl Lowering<'_> {
    pub(super) fn wire(&self) -> Result<&Wire> {
        match self.setting.sums {
            Sums::Ranks(wire) => Ok(wire),
            Sums::Alone(_) => bail!("a plan of several ranks without a link between them"),
        }
    }

    pub(super) fn all_reduce(
        &mut self,
        step: usize,
        partial: BufferId,
        x: BufferId,
        dim: usize,
        bias: Option<WeightId>,
        tap: Option<Tap>,
    ) -> Result<()> {
        let rows = self.rows_of(x);
        let (next_norm, normed, squares) = self.prepared(step, x);
        let (tap, tap_stride) = self.tap(tap);
        let sum = AllReduce {
            partial: self.buffer(partial),
            x: self.buffer(x),
            bias: bias.map_or(0, |id| self.arena.weights.vectors[&id]),
            tap,
            tap_stride: tap_stride as usize,
            next_norm,
            normed,
            squares,
            n_rows: self.n_rows(rows)?,
            rows,
            dim,
        };
        match self.setting.sums {
            Sums::Alone(us) => {
                let comm = CommRanks { ranks: 1, ..CommRanks::zeroed() };
                let params = AllReduceParams { wait_ns: (1e3 * us) as i32, ..sum.params(comm) };
                let blocks = (rows * dim / 8).div_ceil(256).min(self.setting.n_sms);
                self.push(KernelId::AllReduceTimed, [blocks, 1, 1], &params);
            }
            Sums::Ranks(wire) => {
                // In errors it is the layer whose sum is waited for.
                let collective = wire.all_reduce(&self.plan.steps[step - 1].name(), &sum)?;
                self.collective(collective);
            }
        }
        Ok(())
    }

    pub(super) fn collective(&mut self, collective: Collective) {
        let Collective { nccl, kernel, blocks, threads, params, shared } = collective;
        let edge = if shared { Edge::Full } else { Edge::Early };
        let op = |work| Op { part: self.part, work, edge, weights: Vec::new(), completes: Vec::new() };
        self.ops.extend(nccl.map(|call| op(Work::Nccl(call))));
        let work = Work::Kernel { kernel, grid: [blocks as u32, 1, 1], threads: threads as u32, params };
        self.ops.push(op(work));
        self.behind_shared = shared;
    }
}
