//! Linear layers (kernels/linear.cu, linear_prefill.cu) and the norm in front of them (norm.cu).
use super::super::catalog::KernelId;
use super::super::matrix::{Matrix, Tiles};
use super::super::params::{
    LinearParams, LinearPart, NormParams, EPILOGUE_LOGITS, EPILOGUE_RESIDUAL, EPILOGUE_SILU, EPILOGUE_STORE, SEGMENTS,
};
use super::rows::NORM_ROWS;
use super::{skip, slabs, Lowering};
use crate::model::plan::{Epilogue, Input, Linear, Tap, MAX_WIDTH};
use anyhow::{bail, ensure, Context, Result};
use bytemuck::Zeroable;

impl Lowering<'_> {
    pub(super) fn linear(&mut self, step: usize, linear: &Linear) -> Result<()> {
        let arena = self.arena;
        let matrix = &arena.weights.matrices[&linear.weight];
        check(linear, matrix)?;
        let out = linear.epilogue.out();
        let rows = self.rows_of(out);
        let mut part = [LinearPart::zeroed(); 2];
        for (i, input) in linear.inputs.iter().enumerate() {
            let weights =
                LinearPart { weights: matrix.parts[i].at, scales: matrix.parts[i].scales_at, ..LinearPart::zeroed() };
            part[i] = self.input(step, i, input, rows, matrix.tiles, weights)?;
        }
        let mut params = LinearParams {
            part,
            bias: linear.bias.map_or(0, |id| arena.weights.vectors[&id]),
            n_rows: self.n_rows(rows)?,
            row_scales: if matrix.tiles == Tiles::Fp8Rows { matrix.parts[0].scales_at } else { 0 },
            n_parts: linear.inputs.len() as i32,
            n: linear.n as i32,
            n_tiles: matrix.n_tiles as i32,
            rows: rows as i32,
            epilogue: EPILOGUE_STORE,
            ..LinearParams::zeroed()
        };
        match &linear.epilogue {
            Epilogue::Store { .. } | Epilogue::Partial { .. } => {}
            Epilogue::SiluMul { .. } => {
                params.epilogue = EPILOGUE_SILU;
                params.n = (linear.n / 2) as i32;
            }
            Epilogue::Residual { tap, .. } => {
                params.epilogue = EPILOGUE_RESIDUAL;
                (params.tap, params.tap_stride) = self.tap(*tap);
            }
            Epilogue::Logits { .. } => {
                params.epilogue = EPILOGUE_LOGITS;
                params.logits = self.buffer(out);
                params.max_value = arena.max_value.at(0);
                params.max_id = arena.max_id.at(0);
            }
        }
        if self.is_stream(out) {
            params.stream = self.buffer(out);
        } else {
            params.out = self.buffer(out);
        }
        params.out_stride = self.plan.buffer(out).dim as i32;
        (params.next_norm, params.normed, params.squares) = self.prepared(step, out);
        self.linear_rows(matrix, params)
    }

    /// Where a residual stream is kept for a drafter, and the numbers of a row there; zeros where it is not.
    pub(super) fn tap(&self, tap: Option<Tap>) -> (u64, i32) {
        let at = |tap: Tap| (self.buffer(tap.out) + 2 * tap.column as u64, self.plan.buffer(tap.out).dim as i32);
        tap.map_or((0, 0), at)
    }

    /// The kernels of a linear layer, for any number of rows.
    fn linear_rows(&mut self, matrix: &Matrix, params: LinearParams) -> Result<()> {
        let (rows, two) = (params.rows as usize, params.n_parts == 2);
        if rows > MAX_WIDTH && matrix.tiles == Tiles::Bf16 {
            // Weight rows and tokens of a block's tile.
            let (kernel, n, m) = match (two, rows > 256) {
                (true, _) => (KernelId::LinearPrefill64x64Two, 64, 64),
                (false, false) => (KernelId::LinearPrefill64x64, 64, 64),
                (false, true) => (KernelId::LinearPrefill128x128, 128, 128),
            };
            let grid = [rows.div_ceil(m), matrix.n_tiles.div_ceil(n / 16), 1];
            self.push_reading(kernel, grid, &params, matrix.spans());
            return Ok(());
        }
        for (first, n) in slabs(rows) {
            let kernel = if two { KernelId::LinearTwo } else { skinny(matrix.tiles, n)? };
            let mut slab = LinearParams { rows: n as i32, first_row: first as i32, ..params };
            for part in &mut slab.part {
                skip(&mut part.x, first * part.x_stride as usize, 2);
                skip(&mut part.squares, first * (part.x_stride as usize).div_ceil(16), 4);
            }
            skip(&mut slab.out, first * slab.out_stride as usize, 2);
            skip(&mut slab.stream, first * slab.out_stride as usize, 4);
            skip(&mut slab.logits, first * slab.out_stride as usize, 4);
            skip(&mut slab.tap, first * slab.tap_stride as usize, 2);
            self.push_reading(kernel, [self.blocks(matrix.n_tiles), 1, 1], &slab, matrix.spans());
        }
        Ok(())
    }

    /// What a linear layer of `rows` reads, input number `i` of a step: with a norm, the rows that their writer or a
    /// kernel of its own has prepared.
    pub(super) fn input(
        &mut self,
        step: usize,
        i: usize,
        input: &Input,
        rows: usize,
        tiles: Tiles,
        weights: LinearPart,
    ) -> Result<LinearPart> {
        let (plan, arena) = (self.plan, self.arena);
        let units = input.dim.div_ceil(tiles.unit().0);
        let segment_units = units.div_ceil(SEGMENTS);
        let buffer = plan.buffer(input.x);
        let mut part = LinearPart {
            x: self.buffer(input.x),
            k: input.dim as i32,
            x_stride: buffer.dim as i32,
            segment_units: segment_units as u16,
            n_segments: units.div_ceil(segment_units) as u16,
            ..weights
        };
        let Some(norm) = input.norm else {
            ensure!(!self.is_stream(input.x), "{} is read without a norm", buffer.name);
            return Ok(part);
        };
        ensure!(
            input.dim % 16 == 0,
            "rows of {}: the GPU backend needs normalised rows of a multiple of 16; use --device cpu",
            input.dim
        );
        part.eps = plan.eps(norm);
        let normed = arena.normed(plan, input.x);
        let (rows_at, squares, inv) = (normed.rows.at(0), normed.squares.at(0), normed.inverse_rms.at(0));
        if self.prefills() || self.norms.apart.contains(&(step, i)) {
            let params = NormParams {
                x: part.x,
                norm: arena.weights.vectors[&norm],
                normed: rows_at,
                inv,
                squares,
                n_rows: self.n_rows(rows)?,
                rows: rows as i32,
                k: part.k,
                x_stride: part.x_stride,
                normed_stride: part.k,
                eps: part.eps,
                pad: 0,
            };
            let kernel = if self.is_stream(input.x) { KernelId::NormRows } else { KernelId::NormRowsBf16 };
            self.push(kernel, [rows.div_ceil(NORM_ROWS), 1, 1], &params);
            (part.inv, part.x_stride) = (inv, part.k);
        }
        (part.x, part.squares) = (rows_at, squares);
        Ok(part)
    }
}

/// The kernel for up to 8 rows or up to 16.
fn skinny(tiles: Tiles, rows: usize) -> Result<KernelId> {
    let format = if tiles == Tiles::Bf16 { String::new() } else { format!("_{}", tiles.name()) };
    let name = format!("linear_m{}{format}", rows.next_multiple_of(8));
    KernelId::of(&name).with_context(|| format!("no kernel {name}"))
}

/// What the kernels of linear layers do not take.
fn check(linear: &Linear, matrix: &Matrix) -> Result<()> {
    if let Epilogue::SiluMul { .. } = linear.epilogue {
        ensure!(linear.bias.is_none(), "mlp_bias: the GPU backend has no bias for gate and up; use --device cpu");
        ensure!(
            linear.n % 16 == 0,
            "feed-forward layers of {} on a rank: the GPU backend needs a multiple of 8",
            linear.n / 2
        );
    }
    if matrix.tiles != Tiles::Bf16 && linear.inputs.len() > 1 {
        bail!("{} of two inputs: the GPU backend needs plain weights", linear.format);
    }
    ensure!(linear.inputs.len() <= 2 && linear.inputs.len() == matrix.parts.len(), "{} inputs", linear.inputs.len());
    Ok(())
}
