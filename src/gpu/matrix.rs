//! How a weight lies in GPU memory: matrices re-tiled for mma.sync (kernels/format.cuh), and the addresses of their
//! parts.
use super::params::ExpertMatrix;
use crate::model::config::Latent;
use crate::model::quant::{Block, Format};
use anyhow::{bail, Result};

/// How a 16-row tile of weights is stored (kernels/format.cuh).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tiles {
    Bf16,
    /// e4m3 with a scale for each 8 rows of a block of 32 columns.
    Fp8,
    /// e4m3 with a scale for each row.
    Fp8Rows,
    /// Four bits with a scale for each row of a block.
    Int4,
}

impl Tiles {
    pub fn of(format: Format) -> Result<Tiles> {
        match format {
            Format::Plain => Ok(Tiles::Bf16),
            Format::Fp8(Block { rows: 1, cols: None }) => Ok(Tiles::Fp8Rows),
            Format::Fp8(Block { rows, cols: Some(cols) }) if rows % 8 == 0 && cols % 32 == 0 => Ok(Tiles::Fp8),
            Format::Int4(Block { rows: 1, cols: Some(cols) }) if cols % 32 == 0 => Ok(Tiles::Int4),
            other => bail!(
                "{other}: the GPU backend has kernels for fp8 e4m3 in blocks of multiples of 8 x 32 or with a scale a row, and for int4 in groups \
                 of multiples of 32; use --device cpu"
            ),
        }
    }

    /// As the names of kernels have it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Tiles::Bf16 => "bf16",
            Tiles::Fp8 => "fp8",
            Tiles::Fp8Rows => "fp8_rows",
            Tiles::Int4 => "int4",
        }
    }

    /// Columns of a unit (kernels/format.cuh), and its bytes in a tile, scales in it included.
    pub(super) fn unit(self) -> (usize, usize) {
        match self {
            Tiles::Bf16 => (32, 1024),
            Tiles::Fp8 | Tiles::Fp8Rows => (64, 1024),
            Tiles::Int4 => (64, 576),
        }
    }
}

/// A re-tiled matrix: for each part of K [n_tiles][units] of 16 rows (kernels/format.cuh), then the scales that are not
/// in them. With experts: the blocks of all of them, then their scales.
#[derive(Clone, Debug)]
pub struct Matrix {
    pub parts: Vec<Part>,
    pub n_tiles: usize,
    /// Rows, gate and up together.
    pub(super) n: usize,
    pub(super) gate_up: bool,
    pub(super) tiles: Tiles,
    /// 1 for matrices that are no experts'.
    pub(super) n_experts: usize,
}

/// The columns of one input.
#[derive(Clone, Debug)]
pub struct Part {
    /// Device address.
    pub at: u64,
    /// That of the scales beside the blocks: f32, [n_tiles][units][2][2], or [n_tiles * 16] with a scale a row.
    pub(super) scales_at: u64,
    pub(super) column: usize,
    pub(super) k: usize,
}

impl Matrix {
    /// `dims` are the columns of each input.
    pub(super) fn new(n: usize, dims: &[usize], gate_up: bool, tiles: Tiles, n_experts: usize) -> Matrix {
        let n_tiles = if gate_up { (n / 2).div_ceil(8) } else { n.div_ceil(16) };
        let mut column = 0;
        let parts = dims
            .iter()
            .map(|&k| {
                column += k;
                Part { at: 0, scales_at: 0, column: column - k, k }
            })
            .collect();
        Matrix { parts, n_tiles, n, gate_up, tiles, n_experts }
    }

    pub(super) fn plain(n: usize, dims: &[usize]) -> Matrix {
        Matrix::new(n, dims, false, Tiles::Bf16, 1)
    }

    /// A tile of 16 rows.
    pub(super) fn tile_bytes(&self, part: &Part) -> usize {
        let (columns, bytes) = self.tiles.unit();
        part.k.div_ceil(columns) * bytes
    }

    /// Blocks of one expert.
    pub(super) fn part_bytes(&self, part: &Part) -> usize {
        self.n_tiles * self.tile_bytes(part)
    }

    /// Scales of one expert beside them, 4 bytes each.
    pub(super) fn part_scales(&self, part: &Part) -> usize {
        match self.tiles {
            Tiles::Bf16 | Tiles::Int4 => 0,
            Tiles::Fp8 => self.n_tiles * part.k.div_ceil(64) * 4,
            Tiles::Fp8Rows => self.n_tiles * 16,
        }
    }

    /// Gives every part its place behind `start`.
    pub(super) fn place(&mut self, start: u64) {
        let mut at = start;
        for i in 0..self.parts.len() {
            let (bytes, scales) =
                (self.n_experts * self.part_bytes(&self.parts[i]), self.n_experts * self.part_scales(&self.parts[i]));
            (self.parts[i].at, self.parts[i].scales_at) = (at, at + bytes as u64);
            at += (bytes + 4 * scales).next_multiple_of(256) as u64;
        }
    }

    pub(super) fn bytes(&self) -> usize {
        let part = |p: &Part| (self.n_experts * (self.part_bytes(p) + 4 * self.part_scales(p))).next_multiple_of(256);
        self.parts.iter().map(part).sum()
    }

    /// All of it, in the order in which the kernels of linear layers read it: the blocks of each part, and the scales
    /// beside them.
    pub(super) fn spans(&self) -> Vec<Span> {
        let experts = self.n_experts;
        let mut spans = Vec::new();
        for part in &self.parts {
            spans.push(Span { at: part.at, bytes: self.part_bytes(part) as u64, experts });
            if self.part_scales(part) > 0 {
                spans.push(Span { at: part.scales_at, bytes: 4 * self.part_scales(part) as u64, experts });
            }
        }
        spans
    }

    /// For the kernels of experts; `dim` as in params.h.
    pub(super) fn of_experts(&self, dim: usize) -> ExpertMatrix {
        let part = &self.parts[0];
        ExpertMatrix {
            weights: part.at,
            scales: part.scales_at,
            bytes: self.part_bytes(part) as u64,
            n_scales: self.part_scales(part) as i32,
            dim: dim as i32,
        }
    }
}

/// Weights that a launch reads from front to back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub at: u64,
    pub bytes: u64,
    /// How many spans of this length lie one behind the other: 1, or one for each expert, of which the launch reads
    /// those that the router has chosen.
    pub experts: usize,
}

/// W_UK, transposed, and W_UV of the heads of a rank: kv_b as kernels/mla.cu reads it, bf16 whatever the checkpoint
/// has.
#[derive(Clone, Debug)]
pub struct Absorbed {
    pub keys: Matrix,   // [n_heads * kv_rank, nope_dim]
    pub values: Matrix, // [n_heads * v_dim, kv_rank]
    pub(super) n_heads: usize,
    pub(super) dims: Latent,
}
