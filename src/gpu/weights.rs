//! Weights into GPU memory: read into page-locked buffers while the one before is copied, and re-tiled on the GPU into the order in which
//! mma.sync wants them (kernels/common.cuh). The plan says which matrices there are and how their columns are divided, `Weight::part_of_rank`
//! which rows and columns are this rank's: no others are read.
use super::device::{Event, Gpu, Launch, Memory, Pinned};
use super::kernels::{Kernels, Matrix};
use super::params::{FillParams, RepackParams, ROWS_GATE, ROWS_PLAIN, ROWS_UP};
use crate::model::checkpoint::{Dtype, Tensor};
use crate::model::plan::{Epilogue, Plan, Ranks, Step};
use crate::model::weights::{Role, Slice, Weight, WeightId, Weights};
use anyhow::{bail, Result};
use half::{bf16, f16};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// The matrices and vectors of the plans, and where they will be: known before any memory is taken.
pub struct Layout {
    matrices: BTreeMap<WeightId, Matrix>,
    vectors: BTreeMap<WeightId, usize>, // numbers
    aliases: Vec<Alias>,
}

/// A weight that is rows of another: a tied head, a drafter that shares its target's embedding. It needs no memory of its own.
pub struct Alias {
    pub id: WeightId,
    pub of: WeightId,
    /// A multiple of 16: the first row of a tile.
    pub first_row: usize,
}

impl Layout {
    /// `vocab` is the rows of embedding tables.
    pub fn of(plans: &[&Plan], vocab: usize, aliases: Vec<Alias>) -> Layout {
        let mut layout = Layout { matrices: BTreeMap::new(), vectors: BTreeMap::new(), aliases };
        for step in plans.iter().flat_map(|p| &p.steps) {
            match step {
                Step::Linear(l) => {
                    let dims: Vec<usize> = l.inputs.iter().map(|i| i.dim).collect();
                    let gate_up = matches!(l.epilogue, Epilogue::SiluMul { .. });
                    layout.matrices.insert(l.weight, Matrix::new(l.n, &dims, gate_up));
                    layout.vectors.extend(l.inputs.iter().filter_map(|i| Some((i.norm?, i.dim))));
                    layout.vectors.extend(l.bias.map(|id| (id, l.n)));
                }
                Step::Attention(a) => {
                    layout.vectors.extend([a.q_norm, a.k_norm].into_iter().flatten().map(|id| (id, a.head_dim)));
                }
                Step::Norm { weight, dim, .. } => {
                    layout.vectors.insert(*weight, *dim);
                }
                Step::Embed { table, dim, .. } => {
                    layout.matrices.insert(*table, Matrix::new(vocab, &[*dim], false));
                }
                // Refused when the machine is made.
                Step::LatentQuery(_)
                | Step::LatentAttend(_)
                | Step::LatentValue(_)
                | Step::Router(_)
                | Step::ExpertsUp(_)
                | Step::ExpertsDown(_) => {}
                Step::AllReduce { bias, dim, .. } => layout.vectors.extend(bias.map(|id| (id, *dim))),
                Step::Select { .. } | Step::Accept { .. } | Step::DraftToken { .. } => {}
            }
        }
        layout
    }

    /// The matrices that take memory.
    fn owned(&self) -> impl Iterator<Item = (&WeightId, &Matrix)> {
        self.matrices.iter().filter(|(id, _)| !self.aliases.iter().any(|alias| alias.id == **id))
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        let matrices: usize = self.owned().map(|(_, matrix)| matrix.bytes()).sum();
        matrices + self.vectors.values().map(|n| vector_bytes(*n)).sum::<usize>()
    }
}

fn vector_bytes(n: usize) -> usize {
    (2 * n).next_multiple_of(256)
}

/// What the kernels read.
pub struct Placed {
    pub memory: Memory,
    pub matrices: BTreeMap<WeightId, Matrix>,
    pub vectors: BTreeMap<WeightId, u64>,
}

/// Where numbers come from.
pub enum Source<'a> {
    Checkpoint(&'a Weights),
    /// Made on the GPU from a hash of this seed, scaled so that activations keep their size; norms are 1.
    Random(u64),
}

impl Layout {
    /// Takes the memory and fills it; weights that `drafter` has come from there. `progress` gets (bytes done, bytes in all).
    pub fn place(
        mut self,
        gpu: &Gpu,
        kernels: &Kernels,
        source: &Source,
        drafter: Option<&Weights>,
        ranks: Ranks,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Placed> {
        let memory = gpu.allocate(self.bytes())?;
        let mut offset = 0;
        let owned: Vec<WeightId> = self.owned().map(|(id, _)| *id).collect();
        let mut matrices = std::mem::take(&mut self.matrices);
        for id in &owned {
            let matrix = matrices.get_mut(id).expect("owned matrices are matrices");
            let bytes: Vec<usize> = matrix.parts.iter().map(|p| matrix.part_bytes(p)).collect();
            for (part, bytes) in matrix.parts.iter_mut().zip(bytes) {
                part.at = memory.at(offset);
                offset += bytes;
            }
        }
        for alias in &self.aliases {
            let of = matrices[&alias.of].parts[0].clone();
            let part = &mut matrices.get_mut(&alias.id).expect("an alias of a matrix is one").parts[0];
            part.at = of.at + (alias.first_row / 16 * Matrix::tile_bytes(of.k)) as u64;
        }
        let mut vectors = BTreeMap::new();
        for (&id, &n) in &self.vectors {
            vectors.insert(id, memory.at(offset));
            offset += vector_bytes(n);
        }
        match source {
            Source::Checkpoint(weights) => {
                // A drafter's roles are its own: each id is in one of the two.
                let get = |id: WeightId| drafter.and_then(|d| d.find(id)).unwrap_or_else(|| weights.get(id));
                let mut upload = Upload::new(gpu, kernels, owned.iter().map(|id| matrices[id].bytes()).sum())?;
                for &id in &owned {
                    upload.matrix(get(id), ranks.of(id.role), &matrices[&id], progress)?;
                }
                upload.finish()?;
                for (id, &n) in &self.vectors {
                    let numbers = vector(get(*id), ranks.of(id.role), n)?;
                    gpu.upload(&numbers, vectors[id])?;
                    gpu.synchronize()?;
                }
            }
            Source::Random(seed) => {
                for (i, id) in owned.iter().enumerate() {
                    let matrix = &matrices[id];
                    // Every rank has the same embedding, and other parts of what is divided.
                    let rank = if id.role == Role::Embed { 0 } else { ranks.of(id.role).rank as u64 };
                    // A sum of k products of uniform numbers in [-s, s] with unit inputs has variance k s^2 / 3.
                    let k: usize = matrix.parts.iter().map(|p| p.k).sum();
                    let scale = (3.0 / k as f32).sqrt();
                    for part in &matrix.parts {
                        let n = (matrix.n_tiles * 16) as i32;
                        fill(gpu, kernels, part.at, seed.wrapping_add(i as u64 | rank << 20) << 40, n, part.k, true, false, scale)?;
                    }
                }
                for (id, &n) in &self.vectors {
                    let bias = matches!(id.role, Role::QkvBias | Role::OBias | Role::GateUpBias | Role::DownBias);
                    fill(gpu, kernels, vectors[id], 0, 1, n, false, true, if bias { 0.0 } else { 1.0 })?;
                }
                gpu.synchronize()?;
            }
        }
        Ok(Placed { memory, matrices, vectors })
    }
}

#[allow(clippy::too_many_arguments)]
fn fill(gpu: &Gpu, kernels: &Kernels, to: u64, seed: u64, n: i32, k: usize, retiled: bool, constant: bool, scale: f32) -> Result<()> {
    let params = FillParams { to, seed, n, k: k as i32, retiled: retiled as i32, constant: constant as i32, scale, pad: 0 };
    let grid = (8 * gpu.info().n_sms as u32, 1, 1);
    gpu.launch(&kernels.fill_random, Launch { grid, block: 256, shared: 0, early: false }, &params)
}

/// A rank's part of a vector weight as bf16, its parts joined.
fn vector(weight: &Weight, ranks: Ranks, n: usize) -> Result<Vec<bf16>> {
    let mut numbers = Vec::with_capacity(n);
    for (part, slice) in weight.parts.iter().zip(weight.part_of_rank(ranks.rank, ranks.count)?) {
        let mut bytes = vec![0; slice.rows.len() * part.dtype.bytes()];
        part.read_at(slice.rows.start * part.dtype.bytes(), &mut bytes)?;
        match part.dtype {
            Dtype::Bf16 => numbers.extend(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]))),
            Dtype::F16 => numbers.extend(bytes.chunks_exact(2).map(|b| bf16::from_f32(f16::from_le_bytes([b[0], b[1]]).to_f32()))),
            Dtype::F32 => numbers.extend(bytes.chunks_exact(4).map(|b| bf16::from_f32(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))),
            other => bail!("{} in {}: expected bf16, f16 or f32, found {other}", part.name, part.file),
        }
    }
    Ok(numbers)
}

/// Bytes of one staging buffer; there are two.
const STAGING_BYTES: usize = 64 << 20;
/// Bytes that one thread reads at a time.
const READ_BYTES: usize = 4 << 20;

/// Rows of one repack launch: a grid has at most 65,535 blocks in y.
const MAX_GRID_ROWS: usize = 32768;

struct Upload<'a> {
    gpu: &'a Gpu,
    kernels: &'a Kernels,
    buffers: Vec<(Pinned<u8>, Memory, Event)>,
    next: usize,
    done: usize,
    total: usize,
}

impl<'a> Upload<'a> {
    fn new(gpu: &'a Gpu, kernels: &'a Kernels, total: usize) -> Result<Upload<'a>> {
        let bytes = STAGING_BYTES.min(total.next_multiple_of(1 << 20));
        let mut buffers = Vec::new();
        for _ in 0..2 {
            let event = gpu.event()?;
            gpu.record(&event)?;
            buffers.push((gpu.pinned(bytes)?, gpu.allocate(bytes)?, event));
        }
        Ok(Upload { gpu, kernels, buffers, next: 0, done: 0, total })
    }

    fn matrix(&mut self, weight: &Weight, ranks: Ranks, matrix: &Matrix, progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
        let mut first = 0;
        for (i, (tensor, slice)) in weight.parts.iter().zip(weight.part_of_rank(ranks.rank, ranks.count)?).enumerate() {
            let n = slice.rows.len();
            let order = match (matrix.gate_up, i) {
                (false, _) => ROWS_PLAIN,
                (true, 0) => ROWS_GATE,
                (true, _) => ROWS_UP,
            };
            if matrix.gate_up {
                first = 0;
            }
            // The rows that complete the last tile are zeros, written with the last rows.
            let end = match (matrix.gate_up, i + 1 == weight.parts.len()) {
                (true, _) => matrix.n_tiles * 8,
                (false, true) => matrix.n_tiles * 16,
                (false, false) => first + n,
            };
            self.done += n * slice.cols.len() * tensor.dtype.bytes();
            self.rows(tensor, weight.cols, slice, matrix, order, first, end)?;
            first += n;
            progress(self.done.min(self.total), self.total);
        }
        debug_assert!(matrix.gate_up || first == matrix.n);
        Ok(())
    }

    /// A slice of a tensor of `cols` columns as weight rows `first ..`; zeros from behind the last up to `end`.
    #[allow(clippy::too_many_arguments)]
    fn rows(&mut self, tensor: &Tensor, cols: usize, slice: Slice, matrix: &Matrix, order: i32, first: usize, end: usize) -> Result<()> {
        let source_type = match tensor.dtype {
            Dtype::Bf16 => 0,
            Dtype::F16 => 1,
            Dtype::F32 => 2,
            other => bail!("{} in {}: expected bf16, f16 or f32, found {other}", tensor.name, tensor.file),
        };
        let (n, stride, row_bytes) = (slice.rows.len(), cols * tensor.dtype.bytes(), slice.cols.len() * tensor.dtype.bytes());
        let start = slice.rows.start * stride + slice.cols.start * tensor.dtype.bytes();
        // Bytes that lie together in the file are read together.
        let (piece_bytes, pieces_a_row) = if row_bytes == stride { (READ_BYTES, false) } else { (row_bytes, true) };
        let mut row = 0;
        while row < n {
            let (pinned, staging, free) = &mut self.buffers[self.next];
            let room = pinned.slice_mut().len() / row_bytes;
            if room == 0 {
                bail!("{} in {}: a row of {row_bytes} bytes is longer than the staging buffer", tensor.name, tensor.file);
            }
            let take = room.min(n - row).min(MAX_GRID_ROWS);
            free.wait()?;
            let bytes = &mut pinned.slice_mut()[..take * row_bytes];
            let from = |i: usize| start + if pieces_a_row { (row + i) * stride } else { row * stride + i * READ_BYTES };
            let least = (READ_BYTES / piece_bytes).max(1);
            let pieces = bytes.par_chunks_mut(piece_bytes).enumerate().with_min_len(least);
            pieces.try_for_each(|(i, piece)| tensor.read_at(from(i), piece))?;
            self.gpu.upload(bytes, staging.at(0))?;
            let rows = if row + take == n { end - first - row } else { take };
            for part in &matrix.parts {
                let params = RepackParams {
                    source: staging.at(part.column * tensor.dtype.bytes()),
                    weights: part.at,
                    source_stride: slice.cols.len() as i64,
                    source_type,
                    order,
                    n_source_rows: take as i32,
                    rows: rows as i32,
                    row_offset: (first + row) as i32,
                    k: part.k as i32,
                    k_blocks: part.k.div_ceil(32) as i32,
                    pad: 0,
                };
                let grid = ((params.k_blocks as u32 * 16).div_ceil(256), rows as u32, 1);
                self.gpu.launch(&self.kernels.repack, Launch { grid, block: 256, shared: 0, early: false }, &params)?;
            }
            self.gpu.record(free)?;
            self.next = 1 - self.next;
            row += take;
        }
        Ok(())
    }

    fn finish(self) -> Result<()> {
        self.gpu.synchronize()
    }
}
