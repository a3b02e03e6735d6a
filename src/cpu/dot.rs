//! Inner products of stored weights (bf16, f16, f32, and quantised ones as the f32 numbers that they stand for) with
//! f32 activations, in the order that "Where bits come from" fixes.
//!
//! K is cut into segments (`segment_len`); 16 lanes sum inside a segment, segments are added in order, lanes last. The
//! result is the same for one token and for many, and for every instruction set: AVX2 only makes it faster (no fused
//! multiply-add).
use crate::model::checkpoint::{Dtype, Tensor};
use crate::model::quant::{Block, Format, E4M3};
use crate::model::weights::Weight;
use anyhow::{bail, Result};
use half::f16;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

const LANES: usize = 16;

/// Numbers of one segment of K: about 32 segments, each a multiple of 32.
pub fn segment_len(k: usize) -> usize {
    32 * k.div_ceil(32).div_ceil(32)
}

/// A stored tensor seen as a flat list of numbers.
pub enum Numbers<'a> {
    Bf16(&'a [u16]),
    F16(&'a [u16]),
    F32(&'a [f32]),
    Quantised(Quantised<'a>),
}

/// A matrix of codes and scales (model/quant.rs).
pub struct Quantised<'a> {
    codes: &'a [u8],
    four_bits: bool,
    scales: Box<Numbers<'a>>,
    block: Block,
    cols: usize,
}

impl Quantised<'_> {
    /// Numbers of one row from a column on.
    fn copy(&self, first: usize, out: &mut [f32]) {
        let (row, first) = (first / self.cols, first % self.cols);
        let width = self.block.cols.unwrap_or(self.cols);
        let scales_a_row = self.cols.div_ceil(width);
        let mut scales = vec![0.0; scales_a_row];
        self.scales.copy(row / self.block.rows * scales_a_row, &mut scales);
        // A row of four-bit codes ends with its last word.
        let stride = if self.four_bits { self.cols.div_ceil(8) * 4 } else { self.cols };
        let codes = &self.codes[row * stride..][..stride];
        for (out, col) in out.iter_mut().zip(first..) {
            let number = match self.four_bits {
                true => f32::from(codes[col / 2] >> (4 * (col % 2)) & 15) - 8.0,
                false => E4M3[codes[col] as usize],
            };
            *out = number * scales[col / width];
        }
    }
}

impl<'a> Numbers<'a> {
    /// A part of a weight in its format.
    pub fn of_part(weight: &'a Weight, part: usize) -> Result<Numbers<'a>> {
        let tensor = &weight.parts[part];
        let (block, four_bits) = match weight.format {
            Format::Plain => return Numbers::of(tensor),
            Format::Fp8(block) => (block, false),
            Format::Int4(block) => (block, true),
        };
        let scales = Box::new(Numbers::of(&weight.scales[part])?);
        Ok(Numbers::Quantised(Quantised { codes: tensor.bytes(), four_bits, scales, block, cols: weight.cols }))
    }

    pub fn of(tensor: &'a Tensor) -> Result<Numbers<'a>> {
        let bytes = tensor.bytes();
        let aligned = |e| anyhow::anyhow!("{} in {}: data is not aligned to its type ({e})", tensor.name, tensor.file);
        Ok(match tensor.dtype {
            Dtype::Bf16 => Numbers::Bf16(bytemuck::try_cast_slice(bytes).map_err(aligned)?),
            Dtype::F16 => Numbers::F16(bytemuck::try_cast_slice(bytes).map_err(aligned)?),
            Dtype::F32 => Numbers::F32(bytemuck::try_cast_slice(bytes).map_err(aligned)?),
            other => bail!("{} in {}: {other:?} weights do not run on the CPU", tensor.name, tensor.file),
        })
    }

    /// out = numbers [first .. first + out.len()], of one row if they are quantised
    pub fn copy(&self, first: usize, out: &mut [f32]) {
        let n = out.len();
        match self {
            Numbers::Bf16(w) => out.iter_mut().zip(&w[first..first + n]).for_each(|(o, &w)| *o = bf16_to_f32(w)),
            Numbers::F16(w) => {
                out.iter_mut().zip(&w[first..first + n]).for_each(|(o, &w)| *o = f16::from_bits(w).to_f32())
            }
            Numbers::F32(w) => out.copy_from_slice(&w[first..first + n]),
            Numbers::Quantised(w) => w.copy(first, out),
        }
    }

    /// Inner products of numbers [first .. first + dim] with every row of `x` [rows, dim]; `each` gets (row, product).
    pub fn dots(&self, first: usize, dim: usize, x: &[f32], each: impl FnMut(usize, f32)) {
        match self {
            Numbers::Bf16(w) => dots(&w[first..first + dim], x, each),
            Numbers::F16(w) => {
                // Rare in checkpoints: converted once per row, so that one loop serves.
                let w: Vec<f32> = w[first..first + dim].iter().map(|&w| f16::from_bits(w).to_f32()).collect();
                dots(&w, x, each)
            }
            Numbers::F32(w) => dots(&w[first..first + dim], x, each),
            Numbers::Quantised(w) => {
                let mut row = vec![0.0; dim];
                w.copy(first, &mut row);
                dots(&row, x, each)
            }
        }
    }
}

fn bf16_to_f32(w: u16) -> f32 {
    f32::from_bits((w as u32) << 16)
}

/// A number as stored: f32, or bf16 as u16.
trait Stored: Copy {
    fn number(self) -> f32;
    /// Eight numbers from `at`, which must be readable.
    #[cfg(target_arch = "x86_64")]
    unsafe fn eight(at: *const Self) -> __m256;
}

impl Stored for u16 {
    fn number(self) -> f32 {
        bf16_to_f32(self)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn eight(at: *const u16) -> __m256 {
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast())), 16))
    }
}

impl Stored for f32 {
    fn number(self) -> f32 {
        self
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn eight(at: *const f32) -> __m256 {
        _mm256_loadu_ps(at)
    }
}

fn dots<W: Stored>(w: &[W], x: &[f32], mut each: impl FnMut(usize, f32)) {
    let dim = w.len();
    let rows = x.len() / dim;
    let row = |r: usize| &x[r * dim..(r + 1) * dim];
    let mut r = 0;
    while r + 4 <= rows {
        let sums = tile(w, [row(r), row(r + 1), row(r + 2), row(r + 3)]);
        sums.into_iter().enumerate().for_each(|(i, s)| each(r + i, s));
        r += 4;
    }
    while r < rows {
        each(r, tile(w, [row(r)])[0]);
        r += 1;
    }
}

/// One weight row against T tokens, all of the same length.
fn tile<W: Stored, const T: usize>(w: &[W], x: [&[f32]; T]) -> [f32; T] {
    assert!(x.iter().all(|x| x.len() == w.len()));
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // Sound: the instruction set was asked for, and the lengths were checked, in the lines above.
        return unsafe { tile_avx2(w, x) };
    }
    tile_portable(w, x)
}

fn tile_portable<W: Stored, const T: usize>(w: &[W], x: [&[f32]; T]) -> [f32; T] {
    x.map(|x| {
        let mut total = [0.0f32; LANES];
        for (w, x) in w.chunks(segment_len(w.len())).zip(x.chunks(segment_len(w.len()))) {
            let mut sum = [0.0f32; LANES];
            for (w, x) in w.chunks(LANES).zip(x.chunks(LANES)) {
                sum.iter_mut().zip(w.iter().zip(x)).for_each(|(sum, (w, x))| *sum += w.number() * x);
            }
            total.iter_mut().zip(sum).for_each(|(total, sum)| *total += sum);
        }
        lanes(total)
    })
}

/// `tile_portable` with its 16 lanes in two registers. By hand, because the compiler does not keep T sets of lanes in
/// registers by itself.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn tile_avx2<W: Stored, const T: usize>(w: &[W], x: [&[f32]; T]) -> [f32; T] {
    let mut total = [[_mm256_setzero_ps(); 2]; T];
    let segment = segment_len(w.len());
    let mut start = 0;
    while start < w.len() {
        let end = (start + segment).min(w.len());
        let mut sum = [[_mm256_setzero_ps(); 2]; T];
        let mut i = start;
        while i + LANES <= end {
            let w = [W::eight(w.as_ptr().add(i)), W::eight(w.as_ptr().add(i + 8))];
            for t in 0..T {
                for h in 0..2 {
                    sum[t][h] =
                        _mm256_add_ps(sum[t][h], _mm256_mul_ps(w[h], _mm256_loadu_ps(x[t].as_ptr().add(i + 8 * h))));
                }
            }
            i += LANES;
        }
        if i < end {
            for t in 0..T {
                let mut tail = stored(sum[t]);
                for (sum, i) in tail.iter_mut().zip(i..end) {
                    *sum += w[i].number() * x[t][i];
                }
                sum[t] = [_mm256_loadu_ps(tail.as_ptr()), _mm256_loadu_ps(tail.as_ptr().add(8))];
            }
        }
        for t in 0..T {
            for h in 0..2 {
                total[t][h] = _mm256_add_ps(total[t][h], sum[t][h]);
            }
        }
        start = end;
    }
    total.map(|t| lanes(stored(t)))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn stored(sum: [__m256; 2]) -> [f32; LANES] {
    let mut lanes = [0.0; LANES];
    _mm256_storeu_ps(lanes.as_mut_ptr(), sum[0]);
    _mm256_storeu_ps(lanes.as_mut_ptr().add(8), sum[1]);
    lanes
}

/// The lanes of one sum added as a fixed tree.
#[inline(always)]
fn lanes(mut t: [f32; LANES]) -> f32 {
    let mut n = LANES / 2;
    while n > 0 {
        for l in 0..n {
            t[l] += t[l + n];
        }
        n /= 2;
    }
    t[0]
}

pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    tile(a, [b])[0]
}

pub fn sum_of_squares(x: &[f32]) -> f32 {
    dot(x, x)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every instruction set, every number of tokens at once: the same bits, and near the sum in f64.
    #[test]
    fn one_order_of_sums() {
        for dim in [1, 7, 16, 31, 32, 33, 64, 96, 576, 1000, 1536, 4096, 4100] {
            let x: Vec<f32> = (0..4 * dim).map(|i| ((i * 7919 % 1013) as f32 - 506.0) / 300.0).collect();
            let w: Vec<f32> = (0..dim).map(|i| ((i * 104729 % 997) as f32 - 498.0) / 256.0).collect();
            let bf16: Vec<u16> = w.iter().map(|&w| half::bf16::from_f32(w).to_bits()).collect();
            let rows: [&[f32]; 4] = std::array::from_fn(|r| &x[r * dim..(r + 1) * dim]);
            fn check<W: Stored>(w: &[W], rows: [&[f32]; 4]) {
                let four = tile(w, rows).map(f32::to_bits);
                assert_eq!(four, tile_portable(w, rows).map(f32::to_bits), "{} numbers", w.len());
                assert_eq!(four, rows.map(|row| tile(w, [row])[0].to_bits()), "{} numbers", w.len());
                for (row, sum) in rows.iter().zip(four) {
                    let products = || w.iter().zip(*row).map(|(w, &x)| w.number() as f64 * x as f64);
                    let (exact, size) = (products().sum::<f64>(), products().map(f64::abs).sum::<f64>());
                    assert!((f32::from_bits(sum) as f64 - exact).abs() <= 1e-6 * size, "{} numbers", w.len());
                }
            }
            check(&w, rows);
            check(&bf16, rows);
        }
    }
}
