//! Weights into GPU memory: read into page-locked buffers while the one before is copied, and re-tiled on the GPU into
//! the order in which mma.sync wants them (kernels/format.cuh). The plan says which matrices there are and how their
//! columns are divided, `Weight::part_of_rank` which rows and columns are this rank's: no others are read.
use super::arena;
use super::catalog::KernelId;
use super::device::{Event, Gpu, Launch, Memory, Pinned};
use super::kernels::Kernels;
use super::matrix::{Absorbed, Matrix, Tiles};
use super::params::{FillCodesParams, FillParams, RepackCodesParams, RepackParams, ROWS_GATE, ROWS_PLAIN, ROWS_UP};
use crate::model::checkpoint::{Dtype, Tensor};
use crate::model::plan::{Epilogue, Plan, Ranks, Step};
use crate::model::quant::{Block, Format, E4M3};
use crate::model::role::{Owner, Random, Role, WeightId};
use crate::model::weights::{Slice, Weight, Weights};
use anyhow::{bail, ensure, Result};
use half::{bf16, f16};
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::mem;

/// The matrices and vectors of the plans, and where they will be: known before any memory is taken.
pub struct Layout {
    matrices: BTreeMap<WeightId, Matrix>,
    absorbed: BTreeMap<WeightId, Absorbed>,
    vectors: BTreeMap<WeightId, Vector>,
    aliases: Vec<Alias>,
}

/// Norm weights and biases, bf16 except for biases of routers.
#[derive(Clone, Copy, PartialEq)]
struct Vector {
    n: usize,
    /// Numbers that kernels may read: zeros behind the weight, where a norm is about a part of the rows that it is
    /// applied to.
    room: usize,
    float: bool,
}

impl Vector {
    fn of(n: usize) -> Vector {
        Vector { n, room: n, float: false }
    }

    fn bytes(&self) -> usize {
        (self.room * if self.float { 4 } else { 2 }).next_multiple_of(256)
    }
}

/// A weight that is rows of another: a tied head, a drafter that shares its target's embedding. It needs no memory of
/// its own.
pub struct Alias {
    pub id: WeightId,
    pub of: WeightId,
    /// A multiple of 16: the first row of a tile.
    pub first_row: usize,
}

impl Layout {
    /// `vocab` is the rows of embedding tables. Fails where there are no kernels for a format.
    pub fn of(plans: &[&Plan], vocab: usize, aliases: Vec<Alias>) -> Result<Layout> {
        let mut layout =
            Layout { matrices: BTreeMap::new(), absorbed: BTreeMap::new(), vectors: BTreeMap::new(), aliases };
        for plan in plans {
            for step in &plan.steps {
                layout.add(plan, step, vocab)?;
            }
        }
        // Rows of another weight are stored as it is.
        for alias in &layout.aliases {
            let tiles = layout.matrices[&alias.of].tiles;
            layout.matrices.entry(alias.id).and_modify(|matrix| matrix.tiles = tiles);
        }
        Ok(layout)
    }

    fn add(&mut self, plan: &Plan, step: &Step, vocab: usize) -> Result<()> {
        let matrix = |n, k, gate_up, format, n_experts| {
            Ok::<_, anyhow::Error>(Matrix::new(n, &[k], gate_up, Tiles::of(format)?, n_experts))
        };
        match step {
            Step::Linear(l) => {
                let dims: Vec<usize> = l.inputs.iter().map(|i| i.dim).collect();
                let gate_up = matches!(l.epilogue, Epilogue::SiluMul { .. });
                self.matrices.insert(l.weight, Matrix::new(l.n, &dims, gate_up, Tiles::of(l.format)?, 1));
                for input in &l.inputs {
                    let Some(norm) = input.norm else { continue };
                    let room = plan.buffer(input.x).dim;
                    let vector = self.vectors.entry(norm).or_insert(Vector::of(input.dim));
                    vector.room = vector.room.max(room);
                }
                if let Some(id) = l.bias {
                    self.vectors.insert(id, Vector::of(l.n));
                }
            }
            Step::Attention(a) => {
                self.vectors.extend([a.q_norm, a.k_norm].into_iter().flatten().map(|id| (id, Vector::of(a.head_dim))));
            }
            Step::Norm { weight, dim, .. } => {
                self.vectors.entry(*weight).or_insert(Vector::of(*dim));
            }
            Step::Embed { table, dim, .. } => {
                self.matrices.insert(*table, Matrix::plain(vocab, &[*dim]));
            }
            Step::LatentQuery(a) => {
                let d = a.dims;
                let (keys, values) = (
                    Matrix::plain(a.n_heads * d.kv_rank, &[d.nope_dim]),
                    Matrix::plain(a.n_heads * d.v_dim, &[d.kv_rank]),
                );
                self.absorbed.insert(a.kv_b, Absorbed { keys, values, n_heads: a.n_heads, dims: d });
                self.vectors.insert(a.kv_norm, Vector::of(d.kv_rank));
            }
            Step::Router(r) => {
                self.matrices.insert(r.weight, Matrix::plain(r.routing.n_experts, &[r.input.dim]));
                r.input.norm.map(|norm| self.vectors.entry(norm).or_insert(Vector::of(r.input.dim)));
                self.vectors.extend(r.bias.map(|id| (id, Vector { float: true, ..Vector::of(r.routing.n_experts) })));
            }
            Step::ExpertsUp(m) => {
                self.matrices.insert(m.gate_up, matrix(2 * m.expert_dim, m.input.dim, true, m.format, m.n_experts)?);
                if let Some(shared) = &m.shared {
                    self.matrices.insert(shared.gate_up, matrix(2 * shared.dim, m.input.dim, true, shared.format, 1)?);
                }
            }
            Step::ExpertsDown(m) => {
                self.matrices.insert(m.down, matrix(m.n, m.expert_dim, false, m.format, m.n_experts)?);
                if let Some(shared) = &m.shared {
                    self.matrices.insert(shared.down, matrix(m.n, shared.dim, false, shared.format, 1)?);
                }
            }
            Step::AllReduce { bias, dim, .. } => self.vectors.extend(bias.map(|id| (id, Vector::of(*dim)))),
            Step::LatentAttend(_)
            | Step::LatentValue(_)
            | Step::Select { .. }
            | Step::Accept { .. }
            | Step::DraftToken { .. } => {}
        }
        Ok(())
    }

    /// The matrices that take memory.
    fn owned(&self) -> impl Iterator<Item = (&WeightId, &Matrix)> {
        self.matrices.iter().filter(|(id, _)| !self.aliases.iter().any(|alias| alias.id == **id))
    }

    /// Where everything is in memory that begins at `start`.
    pub fn addresses(&self, start: u64) -> arena::Weights {
        let mut at = start;
        let mut place = |bytes: usize| {
            at += bytes as u64;
            at - bytes as u64
        };
        let (mut matrices, mut absorbed) = (self.matrices.clone(), self.absorbed.clone());
        for (id, matrix) in self.owned() {
            matrices.entry(*id).and_modify(|placed| placed.place(place(matrix.bytes())));
        }
        for pair in absorbed.values_mut() {
            for matrix in [&mut pair.keys, &mut pair.values] {
                matrix.place(place(matrix.bytes()));
            }
        }
        for alias in &self.aliases {
            let of = &matrices[&alias.of];
            let at = of.parts[0].at + (alias.first_row / 16 * of.tile_bytes(&of.parts[0])) as u64;
            matrices.get_mut(&alias.id).expect("an alias of a matrix is one").parts[0].at = at;
        }
        let vectors = self.vectors.iter().map(|(&id, vector)| (id, place(vector.bytes()))).collect();
        arena::Weights { matrices, absorbed, vectors }
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        let matrices: usize = self.owned().map(|(_, matrix)| matrix.bytes()).sum();
        let absorbed: usize = self.absorbed.values().map(|pair| pair.keys.bytes() + pair.values.bytes()).sum();
        matrices + absorbed + self.vectors.values().map(Vector::bytes).sum::<usize>()
    }
}

/// What the kernels read.
pub struct Placed {
    pub memory: Memory,
    pub weights: arena::Weights,
    /// Of matrices and their scales.
    pub read_bytes: usize,
}

/// Where numbers come from.
pub enum Source<'a> {
    Checkpoint(&'a Weights),
    /// Made on the GPU from a hash of this seed, scaled so that activations keep their size; norms are 1.
    Random(u64),
}

impl Layout {
    /// Takes the memory and fills it; weights that `drafter` has come from there. `progress` gets (bytes done, bytes in
    /// all).
    pub fn place(
        &self,
        gpu: &Gpu,
        kernels: &Kernels,
        source: &Source,
        drafter: Option<&Weights>,
        ranks: Ranks,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Placed> {
        let memory = gpu.allocate(self.bytes())?;
        let owned: Vec<WeightId> = self.owned().map(|(id, _)| *id).collect();
        let placed = self.addresses(memory.at(0));
        let arena::Weights { matrices, absorbed, vectors } = &placed;
        let mut read_bytes = 0;
        match source {
            Source::Checkpoint(weights) => {
                // A drafter's roles and layers are its own: each id is in one of the two.
                let get = |id: WeightId| drafter.and_then(|d| d.find(id)).unwrap_or_else(|| weights.get(id));
                let total = owned.iter().map(|id| matrices[id].bytes()).sum();
                let mut upload = Upload::new(gpu, kernels, total, progress)?;
                for &id in &owned {
                    upload.matrix(get(id), ranks.of(id), &matrices[&id])?;
                }
                for (&id, pair) in absorbed {
                    upload.absorbed(get(id), ranks.of(id), pair)?;
                }
                read_bytes = upload.finish()?;
                for (id, vector) in &self.vectors {
                    let numbers = floats_of(get(*id), ranks.of(*id), vector.n)?;
                    if vector.float {
                        gpu.upload(&numbers, vectors[id])?;
                    } else {
                        gpu.upload(&numbers.into_iter().map(bf16::from_f32).collect::<Vec<bf16>>(), vectors[id])?;
                    }
                    gpu.synchronize()?;
                }
            }
            Source::Random(seed) => {
                let fill = Fill { gpu, kernels };
                let mut owned = owned;
                owned.sort_by_key(WeightId::random_order);
                // Of the model's layers: an EAGLE-3 drafter's is none of them.
                let n_sums = 2 * owned.iter().filter(|id| id.role == Role::O && id.layer.is_some()).count().max(1);
                for (i, id) in owned.iter().enumerate() {
                    // Ranks have the same of what all have all of, and other parts of what is divided.
                    let rank = ranks.of(*id).rank as u64;
                    // Embeddings of variance 1, and as much from all layers together: rows stay different from each
                    // other, and so do their experts.
                    let gain = match id.role.random() {
                        Random::Embedding if id.owner == Owner::Target => (matrices[id].parts[0].k as f32).sqrt(),
                        Random::Residual if id.layer.is_some() => 1.0 / (n_sums as f32).sqrt(),
                        _ => 1.0,
                    };
                    fill.matrix(&matrices[id], seed.wrapping_add(i as u64 | rank << 20) << 40, gain)?;
                }
                let mut pairs: Vec<(&WeightId, &Absorbed)> = absorbed.iter().collect();
                pairs.sort_by_key(|(id, _)| id.random_order());
                for (i, (id, pair)) in pairs.into_iter().enumerate() {
                    let seed = seed.wrapping_add((owned.len() + 2 * i) as u64 | (ranks.of(*id).rank as u64) << 20);
                    fill.matrix(&pair.keys, seed << 40, 1.0)?;
                    fill.matrix(&pair.values, (seed + 1) << 40, 1.0)?;
                }
                for (id, vector) in &self.vectors {
                    if id.role.random() != Random::Zeros {
                        fill.plain(vectors[id], 0, 1, vector.n, false, true, 1.0)?;
                    }
                }
                gpu.synchronize()?;
            }
        }
        Ok(Placed { memory, weights: placed, read_bytes })
    }
}

/// Random numbers, made where they are needed.
struct Fill<'a> {
    gpu: &'a Gpu,
    kernels: &'a Kernels,
}

impl Fill<'_> {
    /// A sum of k products with unit inputs has variance `gain`^2: numbers uniform in [-s, s] have variance s^2 / 3,
    /// random codes of e4m3 up to 1.875 have 0.35, and -7 to 7 with 0 twice 17.5.
    fn matrix(&self, matrix: &Matrix, seed: u64, gain: f32) -> Result<()> {
        let k: usize = matrix.parts.iter().map(|p| p.k).sum();
        let scale = |variance: f32| gain / (k as f32 * variance).sqrt();
        for part in &matrix.parts {
            let rows = matrix.n_experts * matrix.n_tiles * 16;
            if matrix.tiles == Tiles::Bf16 {
                self.plain(part.at, seed, rows, part.k, true, false, scale(1.0 / 3.0))?;
                continue;
            }
            let scale = scale(if matrix.tiles == Tiles::Int4 { 17.5 } else { 0.35 });
            let params = FillCodesParams {
                weights: part.at,
                tile_scales: if matrix.tiles == Tiles::Fp8 { part.scales_at } else { 0 },
                seed,
                n_blocks: (rows / 16 * part.k.div_ceil(matrix.tiles.unit().0)) as u64,
                four_bits: (matrix.tiles == Tiles::Int4) as i32,
                scale,
            };
            let grid = (8 * self.gpu.info().n_sms as u32, 1, 1);
            self.gpu.launch(
                self.kernels.get(KernelId::FillCodes),
                Launch { grid, block: 256, shared: 0, early: false },
                &params,
            )?;
            if matrix.tiles == Tiles::Fp8Rows {
                self.gpu.upload(&vec![scale; rows], part.scales_at)?;
                self.gpu.synchronize()?;
            }
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn plain(&self, to: u64, seed: u64, n: usize, k: usize, retiled: bool, constant: bool, scale: f32) -> Result<()> {
        let (n, k) = (n as i32, k as i32);
        let params = FillParams { to, seed, n, k, retiled: retiled as i32, constant: constant as i32, scale, pad: 0 };
        let grid = (8 * self.gpu.info().n_sms as u32, 1, 1);
        self.gpu.launch(
            self.kernels.get(KernelId::FillRandom),
            Launch { grid, block: 256, shared: 0, early: false },
            &params,
        )
    }
}

/// A rank's part of a vector weight as f32, its parts joined.
fn floats_of(weight: &Weight, ranks: Ranks, n: usize) -> Result<Vec<f32>> {
    let mut numbers = Vec::with_capacity(n);
    for (part, slice) in weight.parts.iter().zip(weight.part_of_rank(ranks.rank, ranks.count)?) {
        let mut bytes = vec![0; slice.rows.len() * part.dtype.bytes()];
        part.read_at(slice.rows.start * part.dtype.bytes(), &mut bytes)?;
        floats(part, &bytes, &mut numbers)?;
    }
    Ok(numbers)
}

/// Appends numbers of a tensor that were read as `bytes`.
fn floats(tensor: &Tensor, bytes: &[u8], to: &mut Vec<f32>) -> Result<()> {
    match tensor.dtype {
        Dtype::Bf16 => to.extend(bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())),
        Dtype::F16 => to.extend(bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32())),
        Dtype::F32 => to.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        other => bail!("{} in {}: expected bf16, f16 or f32, found {other}", tensor.name, tensor.file),
    }
    Ok(())
}

/// Bytes of one staging buffer; there are two.
const STAGING_BYTES: usize = 64 << 20;
/// Bytes that one thread reads at a time, where they lie together or in rows of a part.
const READ_BYTES: usize = 4 << 20;

/// Rows of one repack launch: a grid has at most 65,535 blocks in y.
const MAX_GRID_ROWS: usize = 32768;

/// Bytes of a checkpoint on their way. Of the two batches one is planned, the other one is asked for already, so that
/// the disk is busy while a batch is read from the system's cache, by all threads at once; it is copied to the GPU
/// while the next one is read.
struct Upload<'a> {
    gpu: &'a Gpu,
    kernels: &'a Kernels,
    buffers: Vec<(Pinned<u8>, Memory, Event)>,
    /// The buffer that is planned; the other one is that of `asked`.
    next: usize,
    planned: Batch<'a>,
    asked: Batch<'a>,
    /// Bytes that were planned.
    done: usize,
    total: usize,
    progress: &'a mut dyn FnMut(usize, usize),
}

/// What is to be read into a staging buffer, in the order of places there, and the launches that re-tile it.
#[derive(Default)]
struct Batch<'a> {
    used: usize,
    reads: Vec<Read<'a>>,
    repacks: Vec<Repack>,
    /// `Upload::done` at its end.
    done: usize,
}

/// Runs of `row_bytes` bytes, `stride` bytes apart in the file, one behind the other to byte `to` of the staging
/// buffer.
struct Read<'a> {
    tensor: &'a Tensor,
    from: usize,
    stride: usize,
    row_bytes: usize,
    rows: usize,
    to: usize,
    scales: Scales,
}

/// What is done with numbers that are scales.
#[derive(Clone, Copy, PartialEq)]
enum Scales {
    /// They are none.
    No,
    Float,
    /// Kept as bf16 by the kernels, or turned into it.
    Bf16,
}

enum Repack {
    Plain(RepackParams),
    Fp8(RepackCodesParams),
    Int4(RepackCodesParams),
    Quantise(RepackParams),
}

impl Batch<'_> {
    fn ask(&self) {
        self.reads
            .par_iter()
            .for_each(|read| read.tensor.advise_rows(read.from, read.stride, read.row_bytes, read.rows));
    }

    fn read(&self, to: &mut [u8]) -> Result<()> {
        let (mut rest, mut at, mut tasks) = (to, 0, Vec::new());
        for read in &self.reads {
            let (_, tail) = mem::take(&mut rest).split_at_mut(read.to - at);
            let (bytes, tail) = tail.split_at_mut(read.rows * read.row_bytes);
            (rest, at) = (tail, read.to + bytes.len());
            tasks.push((read, bytes));
        }
        tasks.into_par_iter().try_for_each(|(read, bytes)| read.run(bytes))
    }
}

impl Read<'_> {
    fn run(&self, out: &mut [u8]) -> Result<()> {
        if self.stride == self.row_bytes || self.rows == 1 {
            self.tensor.read_at(self.from, out)?;
        } else {
            self.tensor.read_rows(self.from, self.stride, self.row_bytes, out)?;
        }
        if self.scales == Scales::No {
            return Ok(());
        }
        let mut scales = Vec::new();
        floats(self.tensor, out, &mut scales)?;
        let Tensor { name, file, .. } = self.tensor;
        // As quant::check_scales, of those that were read.
        if let Some(bad) = scales.iter().find(|s| !(s.is_finite() && **s > 0.0)) {
            bail!("{name} in {file}: expected scales above zero, found {bad}");
        }
        if self.scales == Scales::Bf16 {
            if let Some(bad) = scales.iter().find(|s| bf16::from_f32(**s).to_f32() != **s) {
                bail!("{name} in {file}: expected scales that bf16 holds, as the GPU backend stores them, found {bad}; use --device cpu");
            }
        }
        if self.tensor.dtype == Dtype::F16 && self.scales == Scales::Bf16 {
            out.chunks_exact_mut(2)
                .zip(scales)
                .for_each(|(out, scale)| out.copy_from_slice(&bf16::from_f32(scale).to_le_bytes()));
        }
        Ok(())
    }
}

impl<'a> Upload<'a> {
    fn new(
        gpu: &'a Gpu,
        kernels: &'a Kernels,
        total: usize,
        progress: &'a mut dyn FnMut(usize, usize),
    ) -> Result<Upload<'a>> {
        let bytes = STAGING_BYTES.min(total.next_multiple_of(1 << 20));
        let mut buffers = Vec::new();
        for _ in 0..2 {
            let event = gpu.event()?;
            gpu.record(&event)?;
            buffers.push((gpu.pinned(bytes)?, gpu.allocate(bytes)?, event));
        }
        let (planned, asked) = (Batch::default(), Batch::default());
        Ok(Upload { gpu, kernels, buffers, next: 0, planned, asked, done: 0, total, progress })
    }

    fn matrix(&mut self, weight: &'a Weight, ranks: Ranks, matrix: &Matrix) -> Result<()> {
        let slices = weight.part_of_rank(ranks.rank, ranks.count)?;
        let each = weight.parts.len() / weight.n_experts;
        for expert in 0..weight.n_experts {
            let mut first = 0;
            for part in 0..each {
                let i = expert * each + part;
                let n = slices[i].rows.len();
                let order = match (matrix.gate_up, part) {
                    (false, _) => ROWS_PLAIN,
                    (true, 0) => ROWS_GATE,
                    (true, _) => ROWS_UP,
                };
                if matrix.gate_up {
                    first = 0;
                }
                // The rows that complete the last tile are zeros, written with the last rows.
                let end = match (matrix.gate_up, part + 1 == each) {
                    (true, _) => matrix.n_tiles * 8,
                    (false, true) => matrix.n_tiles * 16,
                    (false, false) => first + n,
                };
                self.rows(weight, i, &slices[i], matrix, Place { expert, order, first, end })?;
                first += n;
            }
            debug_assert!(matrix.gate_up || first == matrix.n);
        }
        if matrix.tiles == Tiles::Fp8Rows {
            self.row_scales(weight, &slices, matrix)?;
        }
        Ok(())
    }

    /// This rank's rows of part `i` of a weight, to where `place` says.
    fn rows(&mut self, weight: &'a Weight, i: usize, slice: &Slice, matrix: &Matrix, place: Place) -> Result<()> {
        let tensor = &weight.parts[i];
        // Plain numbers that become FP8 here.
        let quantise = matrix.tiles == Tiles::Fp8 && weight.format == Format::Plain;
        let (source_type, bits) = match (if quantise { Tiles::Bf16 } else { matrix.tiles }, tensor.dtype) {
            (Tiles::Bf16, Dtype::Bf16) => (0, 16),
            (Tiles::Bf16, Dtype::F16) => (1, 16),
            (Tiles::Bf16, Dtype::F32) => (2, 32),
            (Tiles::Fp8 | Tiles::Fp8Rows, Dtype::F8E4M3) => (0, 8),
            (Tiles::Int4, Dtype::I32) => (0, 4),
            (_, other) => {
                bail!("{} in {}: expected numbers for {:?}, found {other}", tensor.name, tensor.file, matrix.tiles)
            }
        };
        // A row of four-bit codes is whole words.
        let bytes_of = |columns: usize| if bits == 4 { columns.div_ceil(8) * 4 } else { columns * bits / 8 };
        let (n, stride, row_bytes) = (slice.rows.len(), bytes_of(weight.cols), bytes_of(slice.cols.len()));
        let column = slice.cols.start * bits / 8;
        let block = match matrix.tiles {
            Tiles::Fp8 | Tiles::Int4 => weight.format.block(), // none of plain numbers
            Tiles::Bf16 | Tiles::Fp8Rows => None,
        };
        let of = |row: usize| weight.rope_order(i, row);
        if matrix.tiles == Tiles::Fp8 {
            ensure!(
                place.first % 8 == 0,
                "{}: a part begins at row {}: expected a multiple of 8",
                tensor.name,
                place.first
            );
        }
        if let (Tiles::Fp8, Some(block)) = (matrix.tiles, block) {
            let crosses = |row: &usize| of(*row) / block.rows != *row / block.rows;
            if let Some(row) = slice.rows.clone().find(crosses) {
                bail!(
                    "{}: rows {row} and {} are rotated together and have scales of two blocks: use --device cpu",
                    tensor.name,
                    of(row)
                );
            }
        }
        let capacity = self.buffers[0].0.slice().len();
        let scales = block.map(|block| ScaleRows::of(weight, i, slice, block));
        // Of a row, its share of scales, and what alignment and a block that is cut cost.
        let each = row_bytes + scales.as_ref().map_or(0, |s| s.row_bytes.div_ceil(s.block.rows));
        let spare = 64 + scales.as_ref().map_or(0, |s| 2 * s.row_bytes);
        ensure!(
            each + spare <= capacity,
            "{} in {}: a row of {row_bytes} bytes is longer than the staging buffer",
            tensor.name,
            tensor.file
        );
        let mut row = 0;
        while row < n {
            // 8 rows share the scales that are made here.
            let least = if quantise { 8 } else { 1 };
            if self.planned.used + spare + least * each > capacity {
                self.flush()?;
            }
            let take =
                (((capacity - self.planned.used - spare) / each).min(MAX_GRID_ROWS) / least * least).min(n - row);
            ensure!(take > 0, "{} in {}: 8 rows are longer than the staging buffer", tensor.name, tensor.file);
            let rows = slice.rows.start + row..slice.rows.start + row + take;
            let mut scales_at = 0;
            if let Some(s) = &scales {
                scales_at = self.place_of(0);
                match s.block.rows {
                    1 => self.read(s.tensor, rows.clone().map(of), s.stride, s.column, s.row_bytes, s.kind),
                    size => self.read(
                        s.tensor,
                        rows.start / size..rows.end.div_ceil(size),
                        s.stride,
                        s.column,
                        s.row_bytes,
                        s.kind,
                    ),
                }
            }
            let source = self.place_of(0);
            self.read(tensor, rows.clone().map(of), stride, column, row_bytes, Scales::No);
            let launched = if row + take == n { place.end - place.first - row } else { take };
            for part in &matrix.parts {
                let k_blocks = part.k.div_ceil(32) as i32;
                let weights = part.at + (place.expert * matrix.part_bytes(part)) as u64;
                let tile_scales = match matrix.tiles {
                    Tiles::Fp8 => part.scales_at + (4 * place.expert * matrix.part_scales(part)) as u64,
                    _ => 0,
                };
                if matrix.tiles == Tiles::Bf16 || quantise {
                    let params = RepackParams {
                        source: source + (part.column * bits / 8) as u64,
                        weights,
                        source_stride: slice.cols.len() as i64,
                        source_type,
                        order: place.order,
                        n_source_rows: take as i32,
                        rows: launched as i32,
                        row_offset: (place.first + row) as i32,
                        k: part.k as i32,
                        k_blocks,
                        pad: 0,
                        tile_scales,
                    };
                    self.planned.repacks.push(if quantise { Repack::Quantise(params) } else { Repack::Plain(params) });
                    continue;
                }
                let params = RepackCodesParams {
                    source,
                    scales: scales_at,
                    weights,
                    tile_scales,
                    source_stride: row_bytes as i64,
                    scale_stride: scales.as_ref().map_or(0, |s| (s.row_bytes / s.tensor.dtype.bytes()) as i32),
                    scale_bf16: scales.as_ref().is_some_and(|s| s.tensor.dtype != Dtype::F32) as i32,
                    block_rows: block.map_or(1, |b| b.rows as i32),
                    block_cols: block.and_then(|b| b.cols).unwrap_or(weight.cols) as i32,
                    first_row: block.map_or(0, |b| rows.start % b.rows) as i32,
                    order: place.order,
                    n_source_rows: take as i32,
                    rows: launched as i32,
                    row_offset: (place.first + row) as i32,
                    k: part.k as i32,
                    k_blocks,
                    pad: 0,
                };
                self.planned.repacks.push(if matrix.tiles == Tiles::Int4 {
                    Repack::Int4(params)
                } else {
                    Repack::Fp8(params)
                });
            }
            row += take;
        }
        Ok(())
    }

    /// Device address of byte `used + offset` of the buffer being filled.
    fn place_of(&mut self, offset: usize) -> u64 {
        self.planned.used = self.planned.used.next_multiple_of(16);
        self.buffers[self.next].1.at(self.planned.used + offset)
    }

    /// Rows in this order, `row_bytes` bytes of each from byte `column` on, behind what is in the buffer.
    fn read(
        &mut self,
        tensor: &'a Tensor,
        rows: impl Iterator<Item = usize>,
        stride: usize,
        column: usize,
        row_bytes: usize,
        scales: Scales,
    ) {
        let most = (READ_BYTES / row_bytes).max(1);
        let mut run: Option<Read> = None;
        for row in rows {
            match &mut run {
                Some(run) if run.from + run.rows * stride == row * stride + column && run.rows < most => run.rows += 1,
                _ => {
                    self.planned.reads.extend(run.take());
                    run = Some(Read {
                        tensor,
                        from: row * stride + column,
                        stride,
                        row_bytes,
                        rows: 1,
                        to: self.planned.used,
                        scales,
                    });
                }
            }
            self.planned.used += row_bytes;
            self.done += row_bytes;
        }
        self.planned.reads.extend(run);
    }

    /// Asks for what is planned; reads, copies and re-tiles what was asked for before.
    fn flush(&mut self) -> Result<()> {
        let batch = mem::replace(&mut self.asked, mem::take(&mut self.planned));
        self.asked.done = self.done;
        self.next = 1 - self.next;
        let (pinned, staging, free) = &mut self.buffers[self.next];
        free.wait()?;
        let to = &mut pinned.slice_mut()[..batch.used];
        rayon::join(|| self.asked.ask(), || batch.read(to)).1?;
        if batch.used == 0 {
            return Ok(());
        }
        self.gpu.upload(&pinned.slice()[..batch.used], staging.at(0))?;
        for repack in &batch.repacks {
            repack.launch(self.gpu, self.kernels)?;
        }
        self.gpu.record(free)?;
        (self.progress)(batch.done.min(self.total), self.total);
        Ok(())
    }

    /// Both batches.
    fn flush_all(&mut self) -> Result<()> {
        self.flush()?;
        self.flush()
    }

    /// Scales of rows, in the order of the tiles.
    fn row_scales(&mut self, weight: &Weight, slices: &[Slice], matrix: &Matrix) -> Result<()> {
        let part = &matrix.parts[0];
        let each = weight.parts.len() / weight.n_experts;
        let mut scales = vec![0.0f32; matrix.n_experts * matrix.part_scales(part)];
        let mut first = 0;
        for (i, slice) in slices.iter().enumerate() {
            let tensor = &weight.scales[i];
            let all = scales_of(tensor, slice.rows.start, slice.rows.len())?;
            if i % each == 0 || matrix.gate_up {
                first = 0;
            }
            for (r, row) in slice.rows.clone().enumerate() {
                let at = match (matrix.gate_up, i % each) {
                    (false, _) => first + r,
                    (true, side) => r / 8 * 16 + r % 8 + 8 * side,
                };
                scales[i / each * matrix.part_scales(part) + at] = all[weight.rope_order(i, row) - slice.rows.start];
            }
            first += slice.rows.len();
        }
        self.gpu.upload(&scales, part.scales_at)?;
        self.gpu.synchronize()
    }

    /// Both halves of kv_b: of each head rows that make its key, transposed, and rows that make its value.
    fn absorbed(&mut self, weight: &'a Weight, ranks: Ranks, pair: &Absorbed) -> Result<()> {
        let slice = weight.part_of_rank(ranks.rank, ranks.count)?.swap_remove(0);
        let d = pair.dims;
        let numbers = numbers_of(weight, &slice)?;
        let head = (d.nope_dim + d.v_dim) * d.kv_rank;
        ensure!(
            numbers.len() == pair.n_heads * head,
            "{}: {} numbers for {} heads",
            weight.parts[0].name,
            numbers.len(),
            pair.n_heads
        );
        let mut keys = vec![bf16::ZERO; pair.n_heads * d.kv_rank * d.nope_dim];
        keys.par_chunks_exact_mut(d.kv_rank * d.nope_dim).zip(numbers.par_chunks_exact(head)).for_each(
            |(keys, head)| {
                for (c, row) in keys.chunks_exact_mut(d.nope_dim).enumerate() {
                    row.iter_mut().enumerate().for_each(|(n, key)| *key = bf16::from_f32(head[n * d.kv_rank + c]));
                }
            },
        );
        let values = numbers.par_chunks_exact(head).flat_map(|head| head[d.nope_dim * d.kv_rank..].par_iter());
        let values: Vec<bf16> = values.map(|x| bf16::from_f32(*x)).collect();
        self.done += weight.format.bytes(slice.rows.len(), weight.cols, weight.parts[0].dtype.bytes()) as usize;
        self.host_rows(&keys, &pair.keys)?;
        self.host_rows(&values, &pair.values)
    }

    /// A plain matrix of one part whose rows are here already.
    fn host_rows(&mut self, numbers: &[bf16], matrix: &Matrix) -> Result<()> {
        let k = matrix.parts[0].k;
        self.flush_all()?;
        let rows = (self.buffers[0].0.slice().len() / (2 * k)).min(MAX_GRID_ROWS);
        for (i, chunk) in numbers.chunks(rows * k).enumerate() {
            let (pinned, staging, free) = &mut self.buffers[self.next];
            let n = (chunk.len() / k) as i32;
            free.wait()?;
            let bytes = &mut pinned.slice_mut()[..2 * chunk.len()];
            bytes.copy_from_slice(bytemuck::cast_slice(chunk));
            self.gpu.upload(bytes, staging.at(0))?;
            let repack = Repack::Plain(RepackParams {
                source: staging.at(0),
                weights: matrix.parts[0].at,
                source_stride: k as i64,
                source_type: 0,
                order: ROWS_PLAIN,
                n_source_rows: n,
                rows: n,
                row_offset: (i * rows) as i32,
                k: k as i32,
                k_blocks: k.div_ceil(32) as i32,
                pad: 0,
                tile_scales: 0,
            });
            repack.launch(self.gpu, self.kernels)?;
            self.gpu.record(free)?;
            self.next = 1 - self.next;
        }
        Ok(())
    }

    /// Waits; bytes that were read.
    fn finish(mut self) -> Result<usize> {
        self.flush_all()?;
        self.gpu.synchronize()?;
        Ok(self.done)
    }
}

/// Where rows of a part go: expert, order of rows in tiles, rows `first ..` of the expert's matrix; zeros from behind
/// the last up to `end`.
#[derive(Clone, Copy)]
struct Place {
    expert: usize,
    order: i32,
    first: usize,
    end: usize,
}

/// The scales of a rank's part of a matrix: those of its columns, in bytes of a row of scales.
struct ScaleRows<'a> {
    tensor: &'a Tensor,
    block: Block,
    stride: usize,
    column: usize,
    row_bytes: usize,
    kind: Scales,
}

impl<'a> ScaleRows<'a> {
    fn of(weight: &'a Weight, i: usize, slice: &Slice, block: Block) -> ScaleRows<'a> {
        let tensor = &weight.scales[i];
        let (columns, bytes) = (weight.scale_slice(slice).cols, tensor.dtype.bytes());
        let kind = if block.rows == 1 || tensor.dtype == Dtype::F16 { Scales::Bf16 } else { Scales::Float };
        let stride = block.scales(weight.rows[i], weight.cols)[1] * bytes;
        ScaleRows { tensor, block, stride, column: columns.start * bytes, row_bytes: columns.len() * bytes, kind }
    }
}

impl Repack {
    fn launch(&self, gpu: &Gpu, kernels: &Kernels) -> Result<()> {
        let grid = |threads: i32, rows: i32| Launch {
            grid: ((threads as u32).div_ceil(256), rows as u32, 1),
            block: 256,
            shared: 0,
            early: false,
        };
        match self {
            Repack::Plain(p) => gpu.launch(kernels.get(KernelId::Repack), grid(p.k_blocks * 16, p.rows), p),
            Repack::Fp8(p) => gpu.launch(kernels.get(KernelId::RepackFp8), grid((p.k_blocks + 1) / 2 * 8, p.rows), p),
            Repack::Int4(p) => gpu.launch(kernels.get(KernelId::RepackInt4), grid((p.k_blocks + 1) / 2 * 8, p.rows), p),
            Repack::Quantise(p) => {
                gpu.launch(kernels.get(KernelId::QuantiseFp8), grid((p.k_blocks + 1) / 2 * 64, p.rows / 8), p)
            }
        }
    }
}

/// Scales `first .. first + n` of a tensor.
fn scales_of(tensor: &Tensor, first: usize, n: usize) -> Result<Vec<f32>> {
    let size = tensor.dtype.bytes();
    let (mut bytes, mut scales) = (vec![0; n * size], Vec::new());
    let row_bytes = bytes.len();
    let read = Read { tensor, from: first * size, stride: row_bytes, row_bytes, rows: 1, to: 0, scales: Scales::Float };
    read.run(&mut bytes)?;
    floats(tensor, &bytes, &mut scales)?;
    Ok(scales)
}

/// Whole rows of the first part of a weight as the numbers that they stand for.
fn numbers_of(weight: &Weight, slice: &Slice) -> Result<Vec<f32>> {
    let tensor = &weight.parts[0];
    let four_bits = tensor.dtype == Dtype::I32;
    let row_bytes = if four_bits { weight.cols.div_ceil(8) * 4 } else { weight.cols * tensor.dtype.bytes() };
    let scales = match weight.format.block() {
        None => None,
        Some(block) => {
            let (rows, columns) = (weight.scale_slice(slice).rows, block.scales(1, weight.cols)[1]);
            Some((
                block,
                rows.start,
                columns,
                scales_of(&weight.scales[0], rows.start * columns, rows.len() * columns)?,
            ))
        }
    };
    let mut bytes = vec![0; slice.rows.len() * row_bytes];
    tensor.read_at(slice.rows.start * row_bytes, &mut bytes)?;
    let row_numbers = |(row, bytes): (usize, &[u8])| -> Result<Vec<f32>> {
        let Some((block, first, columns, scales)) = &scales else {
            let mut numbers = Vec::with_capacity(weight.cols);
            floats(tensor, bytes, &mut numbers)?;
            return Ok(numbers);
        };
        let scales = &scales[(row / block.rows - first) * columns..][..*columns];
        let code = |col: usize| match four_bits {
            true => f32::from(bytes[col / 2] >> (4 * (col % 2)) & 15) - 8.0,
            false => E4M3[bytes[col] as usize],
        };
        Ok((0..weight.cols).map(|col| code(col) * scales[block.cols.map_or(0, |size| col / size)]).collect())
    };
    let rows: Vec<Vec<f32>> = slice
        .rows
        .clone()
        .into_par_iter()
        .zip(bytes.par_chunks_exact(row_bytes))
        .map(row_numbers)
        .collect::<Result<_>>()?;
    Ok(rows.concat())
}
