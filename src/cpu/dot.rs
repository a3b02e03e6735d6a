//! Inner products of stored weights (bf16, f16, f32) with f32 activations, in the order that "Where bits come from" fixes.
//!
//! K is cut into segments (`segment_len`); 16 lanes sum inside a segment, segments are added in order, lanes last. The result is the same
//! for one token and for many, and for every instruction set: AVX2 only makes it faster (no fused multiply-add).
use crate::model::checkpoint::{Dtype, Tensor};
use anyhow::{bail, Result};
use half::f16;

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
}

impl<'a> Numbers<'a> {
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

    /// out = numbers [first .. first + out.len()]
    pub fn copy(&self, first: usize, out: &mut [f32]) {
        let n = out.len();
        match self {
            Numbers::Bf16(w) => out.iter_mut().zip(&w[first..first + n]).for_each(|(o, &w)| *o = bf16_to_f32(w)),
            Numbers::F16(w) => out.iter_mut().zip(&w[first..first + n]).for_each(|(o, &w)| *o = f16::from_bits(w).to_f32()),
            Numbers::F32(w) => out.copy_from_slice(&w[first..first + n]),
        }
    }

    /// Inner products of numbers [first .. first + dim] with every row of `x` [rows, dim]; `each` gets (row, product).
    pub fn dots(&self, first: usize, dim: usize, x: &[f32], each: impl FnMut(usize, f32)) {
        match self {
            Numbers::Bf16(w) => dots(&w[first..first + dim], bf16_to_f32, x, each),
            Numbers::F16(w) => {
                // Rare in checkpoints: converted once per row, so that one loop serves.
                let w: Vec<f32> = w[first..first + dim].iter().map(|&w| f16::from_bits(w).to_f32()).collect();
                dots(&w, |w| w, x, each)
            }
            Numbers::F32(w) => dots(&w[first..first + dim], |w| w, x, each),
        }
    }
}

fn bf16_to_f32(w: u16) -> f32 {
    f32::from_bits((w as u32) << 16)
}

fn dots<W: Copy>(w: &[W], number: impl Fn(W) -> f32 + Copy, x: &[f32], mut each: impl FnMut(usize, f32)) {
    let dim = w.len();
    let rows = x.len() / dim;
    let row = |r: usize| &x[r * dim..(r + 1) * dim];
    let mut r = 0;
    while r + 4 <= rows {
        let sums = tile(w, number, [row(r), row(r + 1), row(r + 2), row(r + 3)]);
        sums.into_iter().enumerate().for_each(|(i, s)| each(r + i, s));
        r += 4;
    }
    while r < rows {
        each(r, tile(w, number, [row(r)])[0]);
        r += 1;
    }
}

/// One weight row against T tokens.
fn tile<W: Copy, const T: usize>(w: &[W], number: impl Fn(W) -> f32 + Copy, x: [&[f32]; T]) -> [f32; T] {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // Sound: the instruction set was asked for in the line above.
        return unsafe { tile_avx2(w, number, x) };
    }
    tile_body(w, number, x)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn tile_avx2<W: Copy, const T: usize>(w: &[W], number: impl Fn(W) -> f32 + Copy, x: [&[f32]; T]) -> [f32; T] {
    tile_body(w, number, x)
}

#[inline(always)]
fn tile_body<W: Copy, const T: usize>(w: &[W], number: impl Fn(W) -> f32 + Copy, x: [&[f32]; T]) -> [f32; T] {
    let mut total = [[0.0f32; LANES]; T];
    let segment = segment_len(w.len());
    let mut start = 0;
    while start < w.len() {
        let end = (start + segment).min(w.len());
        let mut sum = [[0.0f32; LANES]; T];
        let mut i = start;
        while i + LANES <= end {
            let w: &[W; LANES] = w[i..i + LANES].try_into().expect("LANES long");
            let w: [f32; LANES] = std::array::from_fn(|l| number(w[l]));
            for t in 0..T {
                let x: &[f32; LANES] = x[t][i..i + LANES].try_into().expect("LANES long");
                for l in 0..LANES {
                    sum[t][l] += w[l] * x[l];
                }
            }
            i += LANES;
        }
        for (l, i) in (i..end).enumerate() {
            for t in 0..T {
                sum[t][l] += number(w[i]) * x[t][i];
            }
        }
        for t in 0..T {
            for l in 0..LANES {
                total[t][l] += sum[t][l];
            }
        }
        start = end;
    }
    total.map(|t| lanes(t))
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
    tile(a, |w| w, [b])[0]
}

pub fn sum_of_squares(x: &[f32]) -> f32 {
    dot(x, x)
}
