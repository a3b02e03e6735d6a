//! Rows that are looked up, normalised on their own, or copied (kernels/embed.cu, norm.cu, copy.cu).
use super::super::arena::element_bytes;
use super::super::catalog::KernelId;
use super::super::op::Part;
use super::super::params::{CopyParams, DraftRows, EmbedParams, NormParams, State};
use super::Lowering;
use crate::model::plan::{BufferId, BufferKind, Pass, Tokens, FEATURE_ROWS};
use crate::model::role::WeightId;
use anyhow::{bail, Result};
use bytemuck::Zeroable;
use std::mem::offset_of;

/// Rows of a block of the norm kernels.
pub(super) const NORM_ROWS: usize = 8;

impl Lowering<'_> {
    pub(super) fn embed(
        &mut self,
        step: usize,
        table: WeightId,
        tokens: Tokens,
        out: BufferId,
        dim: usize,
    ) -> Result<()> {
        let (next_norm, normed, squares) = self.prepared(step, out);
        let (arena, rows) = (self.arena, self.rows_of(out));
        // Tokens come from the history, from the root and its drafts, or are one draft.
        let (tokens, start, offset) = match (tokens, self.plan.pass) {
            (Tokens::Pass, Pass::Prefill { .. }) => (arena.history.at(0), self.state(offset_of!(State, length)), 0),
            (Tokens::Pass, _) => (0, 0, 0),
            (Tokens::Next, _) => (arena.history.at(0), self.draft(offset_of!(DraftRows, start))?, 1),
            (Tokens::Draft(n), _) => (self.state(offset_of!(State, drafts) + 4 * (n - 1)), 0, 0),
        };
        let params = EmbedParams {
            table: arena.weights.matrices[&table].parts[0].at,
            x: self.buffer(out),
            next_norm,
            normed,
            squares,
            tokens,
            start,
            state: self.state(0),
            n_rows: self.n_rows(rows)?,
            rows: rows as i32,
            hidden: dim as i32,
            x_stride: dim as i32,
            offset,
        };
        self.push(KernelId::Embed, [rows, 1, 1], &params);
        Ok(())
    }

    pub(super) fn norm_step(
        &mut self,
        x: BufferId,
        column: usize,
        weight: WeightId,
        out: BufferId,
        dim: usize,
    ) -> Result<()> {
        let (plan, rows) = (self.plan, self.rows_of(out));
        let at = |id: BufferId| self.buffer(id) + (column * element_bytes(plan.buffer(id).kind)) as u64;
        let params = NormParams {
            x: at(x),
            norm: self.arena.weights.vectors[&weight],
            normed: at(out),
            n_rows: self.n_rows(rows)?,
            rows: rows as i32,
            k: dim as i32,
            x_stride: plan.buffer(x).dim as i32,
            normed_stride: plan.buffer(out).dim as i32,
            eps: plan.norm_eps,
            ..NormParams::zeroed()
        };
        let kernel = match [x, out].map(|id| self.is_stream(id)) {
            [true, true] => KernelId::NormStep,
            [false, false] => KernelId::NormStepBf16,
            [false, true] => KernelId::NormStepBf16Stream,
            [true, false] => bail!("no kernel takes a stream to bf16"),
        };
        self.push(kernel, [rows.div_ceil(NORM_ROWS), 1, 1], &params);
        Ok(())
    }

    pub(super) fn select(&mut self, x: BufferId, out: BufferId, dim: usize) -> Result<()> {
        let params = CopyParams {
            from: self.buffer(x),
            to: self.buffer(out),
            from_start: self.draft(offset_of!(DraftRows, last))?,
            rows: 1,
            dim: 2 * dim as i32, // in bf16
            from_mask: -1,
            to_mask: -1,
            ..CopyParams::zeroed()
        };
        self.push(KernelId::CopyRows, [1, 1, 1], &params);
        Ok(())
    }

    /// The rows that a target's pass has tapped go into the ring, at their positions.
    pub(super) fn store_features(&mut self) -> Result<()> {
        let Some((ring, rows, params)) = self.features()? else { return Ok(()) };
        self.part = Part::FeaturesStore;
        let to_start = self.state(offset_of!(State, length));
        let (from_mask, to_mask) = (-1, FEATURE_ROWS as i32 - 1);
        let params = CopyParams { from: rows, from_mask, to: ring, to_mask, to_start, ..params };
        self.push(KernelId::CopyRows, [self.rows(), 1, 1], &params);
        Ok(())
    }

    /// A drafter's pass takes the rows that it begins with from the ring.
    pub(super) fn load_features(&mut self) -> Result<()> {
        let Some((ring, rows, params)) = self.features()? else { return Ok(()) };
        self.part = Part::FeaturesLoad;
        let from_start = self.draft(offset_of!(DraftRows, start))?;
        let (from_mask, to_mask) = (FEATURE_ROWS as i32 - 1, -1);
        let params = CopyParams { from: ring, from_mask, from_start, to: rows, to_mask, ..params };
        self.push(KernelId::CopyRows, [self.rows(), 1, 1], &params);
        Ok(())
    }

    /// The ring of features, the pass's feature buffer, and what is the same both ways; None without a drafter.
    fn features(&self) -> Result<Option<(u64, u64, CopyParams)>> {
        let buffer = self.plan.buffers.iter().find(|b| b.kind == BufferKind::Feature);
        let (Some(drafter), Some(buffer)) = (&self.arena.drafter, buffer) else { return Ok(None) };
        let params = CopyParams {
            n_rows: self.n_rows(self.rows())?,
            rows: self.rows() as i32,
            dim: buffer.dim as i32,
            ..CopyParams::zeroed()
        };
        Ok(Some((drafter.ring.at(0), self.arena.buffers[&buffer.name].at(0), params)))
    }
}
