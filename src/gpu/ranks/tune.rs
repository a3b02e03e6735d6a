//! How long sums over ranks take: every way of adding is checked against the host, then timed in graphs.
//!
//! All ranks see the same numbers. What is taken of them: settle.rs for sums, model/divide.rs for what is divided.
use super::algorithm::{Algorithm, Variant};
use super::collective::{AllReduce, Exchange};
use super::link::Link;
use crate::gpu::device::Memory;
use crate::model::plan::PREFILL_ROWS;
use anyhow::{Context, Result};
use half::bf16;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Sums of up to so many rows; the last counts for all larger ones.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuned {
    pub rows: usize,
    pub variant: Variant,
    /// Microseconds of a call in a graph, each algorithm with the number of blocks that suits it best.
    pub times: Vec<(Variant, f64)>,
}

impl fmt::Display for Tuned {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let times: Vec<String> = self
            .times
            .iter()
            .map(|(c, us)| format!("{} {us:.1} us ({} blocks)", c.algorithm.name(), c.blocks))
            .collect();
        write!(f, "{} rows: {}: {}", self.rows, self.variant.algorithm.name(), times.join(", "))
    }
}

/// An algorithm that is not used.
#[derive(Clone, Debug)]
pub struct Failed {
    pub algorithm: Algorithm,
    pub why: String,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{} is not used: {}", self.algorithm.name(), self.why)
    }
}

/// Rows of plain decode, of drafts, and of prompts, where the largest counts for all.
pub const TUNED_ROWS: [usize; 6] = [1, 2, 4, 8, 16, PREFILL_ROWS[PREFILL_ROWS.len() - 1]];
/// Calls in a graph: as many as take about so long, so that its launch does not count.
const GRAPH_US: f64 = 1000.0;
const MOST_CALLS: f64 = 20.0;
const REPLAYS: usize = 5;
const STEP: &str = "the check of sums";

/// Whether exchanged words are right; the inner error says what is not.
pub fn check_words(link: &Link) -> Result<Result<(), String>> {
    const N: usize = 300;
    let gpu = link.gpu();
    let of = |rank: usize| (0..N as u64).map(move |i| ((i + 1) * (rank as u64 + 3)) << (i % 40));
    let words = gpu.store(&of(link.rank).collect::<Vec<u64>>())?;
    let all: Vec<Vec<u64>> = (0..link.ranks()).map(|rank| of(rank).collect()).collect();
    // Twice each: there are two buffers.
    for op in [Exchange::Sum, Exchange::Sum, Exchange::Max, Exchange::Max] {
        gpu.upload(&all[link.rank], words.at(0))?;
        gpu.synchronize()?;
        link.barrier()?;
        link.exchange("the check of words", words.at(0), N, op)?;
        gpu.synchronize()?;
        let found: Vec<u64> = gpu.download(words.at(0), N)?;
        let right = (0..N).all(|i| {
            let words = all.iter().map(|words| words[i]);
            found[i] == if op == Exchange::Sum { words.sum::<u64>() } else { words.max().unwrap_or(0) }
        });
        let verdict = match link.check() {
            Err(e) => Some(format!("{e:#}")),
            Ok(()) if !right => Some(format!("rank {}: wrong ones arrived", link.rank)),
            Ok(()) => None,
        };
        if let Some(why) = link.gathered(&verdict)?.into_iter().flatten().next() {
            return Ok(Err(why));
        }
    }
    Ok(Ok(()))
}

/// What the sums are made of and go to; all rows of any number that is tuned.
struct Bench<'a> {
    link: &'a Link,
    dim: usize,
    /// [rows][dim], all ranks' the same.
    x0: Vec<f32>,
    expected: Vec<f32>,
    partial: Memory,   // [rows][dim] bf16
    x: Memory,         // [rows][dim] f32
    next_norm: Memory, // [dim] bf16
    normed: Memory,    // [rows][dim] bf16
    squares: Memory,   // [rows][dim / 16] f32
}

/// A graph of sums alone does not tell small differences: on two H200s pull was 4 % faster than push at 8 rows there,
/// and made a pass of 8 rows of an 8B 5 % slower.
pub const NEARLY: f64 = 1.1;

/// The fastest algorithm whose sums are right, or an earlier one of push, pull, two-shot and NCCL that is nearly as
/// fast, for each number of rows of `dim`, ascending, and those that are not right, which are not used for any. All
/// ranks at the same time. Nothing is tuned when nothing is right.
pub fn tune(link: &Link, rows: &[usize], dim: usize) -> Result<(Vec<Tuned>, Vec<Failed>)> {
    let bench = Bench::new(link, *rows.last().context("no rows")?, dim)?;
    let mut algorithms = vec![Algorithm::Push, Algorithm::Pull, Algorithm::TwoShot];
    algorithms.extend(link.has_nccl().then_some(Algorithm::Nccl));
    let (mut tuned, mut failed) = (Vec::new(), Vec::<Failed>::new());
    for &rows in rows {
        let mut times: Vec<(Variant, f64)> = Vec::new();
        for &algorithm in &algorithms {
            let mut best: Option<(Variant, f64)> = None;
            for variant in candidates(link, algorithm, rows, dim) {
                match bench.measure(variant, rows)? {
                    Ok(us) if best.is_none_or(|(_, least)| us < least) => best = Some((variant, us)),
                    Ok(_) => {}
                    Err(why) => {
                        link.recover()?;
                        failed.push(Failed { algorithm, why });
                        break;
                    }
                }
            }
            times.extend(best);
        }
        let is_right = |algorithm: Algorithm| failed.iter().all(|f| f.algorithm != algorithm);
        algorithms.retain(|a| is_right(*a));
        times.retain(|(variant, _)| is_right(variant.algorithm));
        tuned.push((rows, times));
    }
    // What failed later is used nowhere.
    for (_, times) in &mut tuned {
        times.retain(|(variant, _)| algorithms.contains(&variant.algorithm));
    }
    let tuned =
        tuned.into_iter().filter_map(|(rows, times)| Some(Tuned { rows, variant: fastest(&times)?, times })).collect();
    link.barrier()?;
    Ok((tuned, failed))
}

/// The first that takes little longer than the fastest.
fn fastest(times: &[(Variant, f64)]) -> Option<Variant> {
    let least = times.iter().map(|t| t.1).min_by(f64::total_cmp)?;
    times.iter().find(|t| t.1 <= NEARLY * least).map(|t| t.0)
}

/// Numbers of blocks around the usual one.
fn candidates(link: &Link, algorithm: Algorithm, rows: usize, dim: usize) -> Vec<Variant> {
    let usual = link.wire().blocks(algorithm, rows, dim);
    let blocks = if algorithm.needs_nccl() { vec![usual] } else { vec![usual / 2, usual, usual * 2] };
    let variants = blocks.into_iter().map(|blocks| Variant { algorithm, blocks });
    variants.filter(|variant| link.wire().fits(*variant, dim).is_ok()).collect()
}

/// Numbers in [-1, 1), the same everywhere.
fn numbers(seed: u32, n: usize) -> impl Iterator<Item = f32> {
    let mut s = seed.wrapping_mul(0x9e3779b9) | 1;
    (0..n).map(move |_| {
        s ^= s << 13;
        s ^= s >> 17;
        s ^= s << 5;
        (s >> 8) as f32 / 8388608.0 - 1.0
    })
}

impl Bench<'_> {
    fn new(link: &Link, rows: usize, dim: usize) -> Result<Bench<'_>> {
        let (gpu, n) = (link.gpu(), rows * dim);
        let partial_of = |rank: usize| numbers(rank as u32 + 1, n).map(bf16::from_f32);
        let mut sums = vec![0f32; n];
        for rank in 0..link.ranks() {
            sums.iter_mut().zip(partial_of(rank)).for_each(|(sum, partial)| *sum += partial.to_f32());
        }
        let x0: Vec<f32> = numbers(100, n).collect();
        let expected = x0.iter().zip(&sums).map(|(x, sum)| x + bf16::from_f32(*sum).to_f32()).collect();
        Ok(Bench {
            link,
            dim,
            partial: gpu.store(&partial_of(link.rank).collect::<Vec<bf16>>())?,
            x: gpu.allocate(n * 4)?,
            next_norm: gpu.store(&vec![bf16::ONE; dim])?,
            normed: gpu.allocate(n * 2)?,
            squares: gpu.allocate(n / 4)?,
            x0,
            expected,
        })
    }

    /// Microseconds of a call in a graph, of the slowest rank, once the sums are right in graphs; the inner error says
    /// which are not. Alike on all ranks.
    fn measure(&self, variant: Variant, rows: usize) -> Result<Result<f64, String>> {
        let (link, gpu, n) = (self.link, self.link.gpu(), rows * self.dim);
        let sums = AllReduce {
            partial: self.partial.at(0),
            x: self.x.at(0),
            next_norm: self.next_norm.at(0),
            normed: self.normed.at(0),
            squares: self.squares.at(0),
            rows,
            dim: self.dim,
            ..AllReduce::default()
        };
        // Captures allocate: nothing may run meanwhile.
        let capture = |calls: usize| {
            link.barrier()?;
            let graph = gpu.capture(|| (0..calls).try_for_each(|_| link.all_reduce_with(variant, STEP, &sums)))?;
            gpu.synchronize()?;
            link.barrier()?;
            Ok::<_, anyhow::Error>(graph)
        };
        let once = capture(1)?;
        let mut once_us = 0.0;
        // Twice: there are two buffers.
        for _ in 0..2 {
            gpu.upload(&self.x0[..n], self.x.at(0))?;
            gpu.synchronize()?;
            link.barrier()?;
            let ms = gpu.time(|| gpu.replay(&once))?;
            once_us = match self.slowest(self.verdict(n)?, ms as f64 * 1e3)? {
                Ok(us) => us,
                Err(why) => return Ok(Err(why)),
            };
        }
        let calls = (GRAPH_US / once_us).clamp(1.0, MOST_CALLS).floor();
        let many = capture(calls as usize)?;
        let mut times = [0.0; REPLAYS];
        for ms in &mut times {
            link.barrier()?;
            gpu.replay(&once)?; // ranks start together
            *ms = gpu.time(|| gpu.replay(&many))? as f64;
        }
        times.sort_by(f64::total_cmp);
        let verdict = self.waited().unwrap_or(Verdict::Right);
        self.slowest(verdict, times[REPLAYS / 2] * 1e3 / calls)
    }

    /// What this rank waited for in vain.
    fn waited(&self) -> Option<Verdict> {
        let error = self.link.check().err()?;
        Some(Verdict::GaveUp(self.link.gave_up_in(), format!("{error:#}")))
    }

    /// Of x after one call.
    fn verdict(&self, n: usize) -> Result<Verdict> {
        if let Some(gave_up) = self.waited() {
            return Ok(gave_up);
        }
        let found: Vec<f32> = self.link.gpu().download(self.x.at(0), n)?;
        let is_wrong = |i: &usize| found[*i].to_bits() != self.expected[*i].to_bits();
        let Some(i) = (0..n).find(is_wrong) else { return Ok(Verdict::Right) };
        let (row, column, n_wrong) = (i / self.dim, i % self.dim, (0..n).filter(is_wrong).count());
        let (rank, gpu) = (self.link.rank, self.link.peers[self.link.rank].ordinal);
        Ok(Verdict::Wrong(format!(
            "rank {rank} (GPU {gpu}): {n_wrong} of {n} sums are wrong, first row {row} column {column}: expected {}, found {}",
            self.expected[i], found[i]
        )))
    }

    /// The most microseconds of any rank, or what is wrong.
    fn slowest(&self, verdict: Verdict, us: f64) -> Result<Result<f64, String>> {
        let all = self.link.gathered(&(verdict, us))?;
        let slowest = all.iter().fold(0f64, |most, (_, us)| most.max(*us));
        Ok(match all.into_iter().map(|(verdict, _)| verdict).min() {
            Some(Verdict::GaveUp(_, why) | Verdict::Wrong(why)) => Err(why),
            _ => Ok(slowest),
        })
    }
}

/// What one rank says. The least of all ranks' counts: sums are wrong on others after one rank gave up, and who waits
/// for finished sums waits for a rank that waits itself.
#[derive(PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Verdict {
    /// In which phase of the collective, and the whole line.
    GaveUp(i32, String),
    Wrong(String),
    Right,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small differences between graphs of sums do not decide; large ones do.
    #[test]
    fn the_fastest_way_is_clearly_faster() {
        let time = |algorithm, us| (Variant { algorithm, blocks: 4 }, us);
        let chosen = |times: &[(Variant, f64)]| fastest(times).map(|variant| variant.algorithm);
        let measured = [time(Algorithm::Push, 5.1), time(Algorithm::Pull, 4.9), time(Algorithm::Nccl, 7.3)];
        assert_eq!(chosen(&measured), Some(Algorithm::Push));
        assert_eq!(chosen(&measured[1..]), Some(Algorithm::Pull));
        assert_eq!(chosen(&[time(Algorithm::Push, 149.0), time(Algorithm::Nccl, 122.0)]), Some(Algorithm::Nccl));
        assert_eq!(chosen(&[]), None);
    }
}
