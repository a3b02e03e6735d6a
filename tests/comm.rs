//! Collectives through the Rust side, without a GPU: ranks are threads, kernels run under the shim (scripts/shim.sh),
//! all ranks' blocks at once. With VOLLEY_GPUS=N on real ones, ranks spread over N GPUs. What the kernels compute is
//! tested by kernels/shim/test_comm.cpp; here it is the meeting of ranks, launches, capture, how failures end, and what
//! the start finds out about links (pairs.rs, tune.rs, settle.rs).
#[path = "support/shim.rs"]
mod shim;

use half::bf16;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use volley::error::{exit_code, machine, MACHINE};
use volley::gpu::device::Gpu;
use volley::gpu::params::{COMM_CHANNELS, COMM_CHANNEL_BYTES, COMM_LINE_BYTES};
use volley::gpu::ranks::algorithm::{Algorithm, Fault, FaultKind, Variant};
use volley::gpu::ranks::collective::{AllReduce, Exchange};
use volley::gpu::ranks::link::{Link, LinkOptions};
use volley::gpu::ranks::nccl;
use volley::gpu::ranks::pairs::{self, Health, Pair};
use volley::gpu::ranks::rendezvous::{Rendezvous, Threads};
use volley::gpu::ranks::settle::{self, Collectives, Found, Measure};
use volley::gpu::ranks::tune::{self, Failed, Tuned, TUNED_ROWS};

/// Real GPUs, if any.
fn gpus() -> Option<usize> {
    Some(std::env::var("VOLLEY_GPUS").ok()?.parse().expect("VOLLEY_GPUS is a number"))
}

fn open(rank: usize) -> anyhow::Result<Gpu> {
    gpus().map_or_else(|| Ok(shim::gpu()), |gpus| volley::gpu::open(rank % gpus))
}

/// Runs `body` as every rank, each in a thread with a GPU of its own; results by rank. When one fails, the others are
/// told.
fn ranks<T: Send>(
    n: usize,
    options: LinkOptions,
    body: impl Fn(&mut Link, &Gpu) -> anyhow::Result<T> + Sync,
) -> Vec<anyhow::Result<T>> {
    volley::gpu::make_room_for_ranks();
    let meeting = Threads::new(n, Duration::from_secs(60));
    thread::scope(|scope| {
        let threads: Vec<_> = (0..n)
            .map(|rank| {
                let (meeting, body) = (meeting.clone(), &body);
                scope.spawn(move || {
                    let gpu = open(rank)?;
                    let mut link = Link::new(&gpu, rank, meeting.clone(), options)?;
                    body(&mut link, &gpu).inspect_err(|e| meeting.fail(&format!("{e:#}")))
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().expect("no rank panics")).collect()
    })
}

fn numbers(n: usize, seed: u32) -> Vec<bf16> {
    let mut s = seed.wrapping_mul(2654435761) | 1;
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 17;
        s ^= s << 5;
        bf16::from_f32((s >> 8) as f32 / 8388608.0 - 1.0)
    };
    (0..n).map(|_| next()).collect()
}

/// What the epochs of all channels stand at (kernels/comm_protocol.h), so that they wrap soon. All ranks at the same
/// time.
fn set_epochs(link: &Link, gpu: &Gpu, last: u32) -> anyhow::Result<()> {
    link.barrier()?;
    for channel in 0..COMM_CHANNELS {
        gpu.upload(&[last], link.window(link.rank, COMM_LINE_BYTES + channel * COMM_CHANNEL_BYTES))?;
    }
    gpu.synchronize()?;
    link.barrier()
}

const STEP: &str = "layer 3: all-reduce";

/// The new x of every choice in turn, each eagerly and as a graph that is replayed twice; all from the same x.
fn all_reduce(link: &Link, gpu: &Gpu, choices: &[Variant], rows: usize, dim: usize) -> anyhow::Result<Vec<Vec<f32>>> {
    let partial = gpu.store(&numbers(rows * dim, 10 + link.rank as u32))?;
    let x0 = stream(rows * dim);
    let x = gpu.store(&x0)?;
    let mut results = Vec::new();
    for &choice in choices {
        let a = AllReduce { partial: partial.at(0), x: x.at(0), rows, dim, ..AllReduce::default() };
        let run = || link.all_reduce_with(choice, STEP, &a);
        gpu.upload(&x0, x.at(0))?;
        link.barrier()?; // memory and graphs of another rank must not be made while a kernel waits on the same GPU
        run()?;
        results.push(gpu.download(x.at(0), rows * dim)?);
        let graph = gpu.capture(run)?;
        for _ in 0..2 {
            gpu.upload(&x0, x.at(0))?;
            link.barrier()?;
            gpu.replay(&graph)?;
            link.check()?;
            results.push(gpu.download(x.at(0), rows * dim)?);
        }
    }
    Ok(results)
}

/// What the sums are added to.
fn stream(n: usize) -> Vec<f32> {
    numbers(n, 9).iter().map(|x| x.to_f32() * 1.001).collect()
}

fn expected(n: usize, rows: usize, dim: usize) -> Vec<f32> {
    let partials: Vec<_> = (0..n).map(|r| numbers(rows * dim, 10 + r as u32)).collect();
    let x = stream(rows * dim);
    let sum = |i: usize| bf16::from_f32(partials.iter().fold(0.0f32, |sum, p| sum + p[i].to_f32())).to_f32();
    (0..rows * dim).map(|i| x[i] + sum(i)).collect()
}

#[test]
fn all_algorithms_give_the_hosts_sums() {
    for (n, rows, dim) in [(2, 3, 64), (3, 1, 576), (4, 16, 128), (8, 2, 256)] {
        let results = ranks(n, LinkOptions::default(), |link, gpu| {
            set_epochs(link, gpu, u32::MAX - 3)?;
            let mut choices = Vec::new();
            for algorithm in [Algorithm::Push, Algorithm::Pull, Algorithm::TwoShot] {
                choices
                    .extend([1, link.wire().blocks(algorithm, rows, dim)].map(|blocks| Variant { algorithm, blocks }));
            }
            all_reduce(link, gpu, &choices, rows, dim)
        });
        let want = expected(n, rows, dim);
        for (rank, result) in results.into_iter().enumerate() {
            for (i, x) in result.unwrap().iter().enumerate() {
                let differ: Vec<_> = (0..x.len())
                    .filter(|&at| x[at].to_bits() != want[at].to_bits())
                    .map(|at| (at, x[at], want[at]))
                    .collect();
                let first = &differ[..differ.len().min(4)];
                assert!(
                    differ.is_empty(),
                    "{n} ranks, {rows} x {dim}, rank {rank}, result {i}: {} differ, {first:?}",
                    differ.len()
                );
            }
        }
    }
}

/// Of the soak: rows and columns of a sum, most sums in a graph, length of the tapes that partials are cut from.
const SOAK_ROWS: usize = 16;
const SOAK_DIM: usize = 256;
const SOAK_SUMS: usize = 4;
const SOAK_TAPE: usize = 1 << 18;

/// Graphs of sums of every kind, on other data each time, with ranks that fall behind each other, across the wrap of
/// the epochs: x stays to the bit what the host makes of all partials, added in f32 in order of ranks and rounded once.
/// VOLLEY_SOAK=N replays instead of a few.
#[test]
fn sums_soak() {
    let asked = std::env::var("VOLLEY_SOAK").ok().map(|n| n.parse::<usize>().expect("VOLLEY_SOAK is a number"));
    for n in [2, 3, 8] {
        let replays = asked.unwrap_or(80 / n);
        let start = Instant::now();
        // Partials of every rank, zeros of both signs among them, and their rounded sums. A rounded sum is never -0.
        let tapes: Vec<Vec<bf16>> = (0..n)
            .map(|rank| {
                let mut tape = numbers(SOAK_TAPE, 77 + rank as u32);
                tape.iter_mut()
                    .skip(rank)
                    .step_by(7)
                    .for_each(|x| *x = if x.to_f32() < 0.0 { bf16::NEG_ZERO } else { bf16::ZERO });
                tape
            })
            .collect();
        let sum =
            |i: usize| bf16::from_f32(tapes.iter().fold(0.0f32, |sum, tape| sum + tape[i].to_f32())).to_f32() + 0.0;
        let sums: Vec<f32> = (0..SOAK_TAPE).map(sum).collect();
        let results = ranks(n, LinkOptions::default(), |link, gpu| {
            set_epochs(link, gpu, u32::MAX - 50)?;
            soak(link, gpu, &tapes[link.rank], &sums, replays)
        });
        let counts: Vec<usize> =
            results.into_iter().map(|r| r.unwrap_or_else(|e| panic!("{n} ranks: {e:#}"))).collect();
        assert!(counts[0] >= replays && counts.iter().all(|count| *count == counts[0]), "{counts:?}");
        println!(
            "{n} ranks: {} replays of sums in {:.1} s, all right to the bit",
            counts[0],
            start.elapsed().as_secs_f64()
        );
        // One bit of what one rank sends another is enough.
        if n == 3 {
            let mut results = ranks(n, planted(FaultKind::Flip, Some(Algorithm::Push)), |link, gpu| {
                soak(link, gpu, &tapes[link.rank], &sums, 40)
            });
            let error = results.swap_remove(2).expect_err("it must be noticed");
            assert!(format!("{error:#}").contains(" instead of "), "{error:#}");
        }
    }
}

/// How many replays one rank made: `replays` or a few more.
fn soak(link: &Link, gpu: &Gpu, tape: &[bf16], sums: &[f32], replays: usize) -> anyhow::Result<usize> {
    const N: usize = SOAK_ROWS * SOAK_DIM;
    let (mut shared, mut own) = (1, 1000 + link.rank as u64);
    let partials = gpu.allocate(2 * SOAK_SUMS * N)?;
    let used = gpu.allocate(4 * SOAK_SUMS)?;
    let x = gpu.allocate(4 * N)?;
    let mut expected = stream(N);
    gpu.upload(&expected, x.at(0))?;
    gpu.synchronize()?;
    // Graphs: for each sum its rows. Every algorithm alone with few and with many rows, then mixtures.
    let algorithms = [Algorithm::Push, Algorithm::Pull, Algorithm::TwoShot];
    let mut graphs = Vec::new();
    link.barrier()?;
    for i in 0..24 {
        let mut calls = Vec::new();
        for at in 0..if i < 6 { 1 } else { 1 + below(&mut shared, SOAK_SUMS) } {
            let algorithm = if i < 6 { algorithms[i / 2] } else { algorithms[below(&mut shared, 3)] };
            let rows = if i < 6 { [1, SOAK_ROWS][i % 2] } else { 1 + below(&mut shared, SOAK_ROWS) };
            let (fewest, most) = link.wire().block_limits(algorithm, SOAK_DIM);
            let blocks = fewest.max(1) + below(&mut shared, most - fewest.max(1) + 1);
            let sum = AllReduce {
                partial: partials.at(2 * at * N),
                x: x.at(0),
                n_rows: used.at(4 * at),
                rows,
                dim: SOAK_DIM,
                ..AllReduce::default()
            };
            calls.push((Variant { algorithm, blocks }, sum));
        }
        let graph =
            gpu.capture(|| calls.iter().try_for_each(|(choice, sum)| link.all_reduce_with(*choice, STEP, sum)))?;
        graphs.push((graph, calls.iter().map(|(_, sum)| sum.rows).collect::<Vec<usize>>()));
    }
    gpu.synchronize()?;
    link.barrier()?;
    let mut done = 0;
    while done < replays {
        // Rows in use are less than the graph's now and then.
        let offset = below(&mut shared, SOAK_TAPE - SOAK_SUMS * N);
        let in_use: Vec<i32> = (0..SOAK_SUMS)
            .map(|_| if below(&mut shared, 4) > 0 { 99 } else { 1 + below(&mut shared, SOAK_ROWS) as i32 })
            .collect();
        gpu.upload(&tape[offset..offset + SOAK_SUMS * N], partials.at(0))?;
        gpu.upload(&in_use, used.at(0))?;
        gpu.synchronize()?;
        for _ in 0..1 + below(&mut shared, 3) {
            match below(&mut own, 500) {
                0 => thread::sleep(Duration::from_millis(5)),
                1..60 => thread::sleep(Duration::from_micros(below(&mut own, 200) as u64)),
                _ => {}
            }
            let (graph, rows) = &graphs[below(&mut shared, graphs.len())];
            gpu.replay(graph)?;
            done += 1;
            for (at, rows) in rows.iter().enumerate() {
                let n = SOAK_DIM * (*rows).min(in_use[at] as usize);
                expected[..n].iter_mut().zip(&sums[offset + at * N..]).for_each(|(x, sum)| *x += sum);
            }
        }
        let found: Vec<f32> = gpu.download(x.at(0), N)?;
        link.check()?;
        if let Some(i) = (0..N).find(|&i| found[i].to_bits() != expected[i].to_bits()) {
            let (row, column) = (i / SOAK_DIM, i % SOAK_DIM);
            anyhow::bail!(
                "rank {}, after {done} replays, row {row}, column {column}: {} instead of {}",
                link.rank,
                found[i],
                expected[i]
            );
        }
    }
    link.barrier()?; // before anything goes
    Ok(done)
}

/// Numbers below `n`, the same for the same state.
fn below(state: &mut u64, n: usize) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize % n
}

#[test]
fn words_are_exchanged() {
    for n in [2, 5, 8] {
        let results = ranks(n, LinkOptions::default(), |link, gpu| {
            let mine: Vec<u64> = (0..2000).map(|i| (link.rank as u64 * 7919 + i) << (i % 40)).collect();
            let words = gpu.store(&mine)?;
            link.barrier()?;
            link.exchange("sampling", words.at(0), 2000, Exchange::Sum)?;
            let sums: Vec<u64> = gpu.download(words.at(0), 2000)?;
            gpu.upload(&mine, words.at(0))?;
            link.exchange("sampling", words.at(0), 16, Exchange::Max)?;
            Ok((mine, sums, gpu.download::<u64>(words.at(0), 16)?))
        });
        let results: Vec<_> = results.into_iter().map(|r| r.unwrap()).collect();
        for (_, sums, most) in &results {
            for (i, &sum) in sums.iter().enumerate() {
                assert_eq!(sum, results.iter().map(|r| r.0[i]).sum::<u64>(), "{n} ranks, word {i}");
            }
            for (i, &max) in most.iter().enumerate() {
                assert_eq!(max, results.iter().map(|r| r.0[i]).max().unwrap(), "{n} ranks, word {i}");
            }
        }
    }
}

/// Rank `rank` as a line about a pair names it.
fn name(link: &Link, rank: usize) -> String {
    let peer = &link.peers[rank];
    format!("rank {rank} (GPU {}, {})", peer.ordinal, peer.bus_id)
}

/// The ordinal of rank `rank`'s GPU.
fn gpu_of(rank: usize) -> usize {
    rank % gpus().unwrap_or(1)
}

/// An error of the machine whose line names what is missing.
fn gave_up(result: anyhow::Result<()>, parts: &[&str]) {
    let error = result.expect_err("it must fail");
    let line = format!("{error:#}");
    assert_eq!(exit_code(&error), MACHINE, "{line}");
    assert!(parts.iter().all(|part| line.contains(part)) && !line.contains('\n'), "{line}");
}

#[test]
fn dropped_words_are_missed_by_name() {
    let fault = Fault { kind: FaultKind::Drop, rank: 1, peer: 2, only: None };
    let options = LinkOptions { patience: PATIENCE, fault: Some(fault) };
    for algorithm in [Algorithm::Push, Algorithm::Pull, Algorithm::TwoShot] {
        let mut results = ranks(3, options, |link, gpu| {
            let done = all_reduce(link, gpu, &[Variant { algorithm, blocks: 1 }], 2, 96).map(drop);
            link.check().and(done)
        });
        let line = format!("rank 2 (GPU {}): no data from rank 1 (GPU {}) in {STEP} (", gpu_of(2), gpu_of(1));
        gave_up(results.swap_remove(2), &[&line, &format!("for {} s", PATIENCE.as_secs_f32())]);
    }
}

#[test]
fn a_rank_that_fails_ends_the_others() {
    shim::library();
    let start = Instant::now();
    let results =
        ranks(3, LinkOptions { patience: Duration::from_secs(1000), ..LinkOptions::default() }, |link, gpu| {
            if link.rank == 1 {
                return Err(machine("rank 1 (GPU 0): out of memory"));
            }
            let done = all_reduce(link, gpu, &[Variant { algorithm: Algorithm::Push, blocks: 1 }], 1, 64).map(drop);
            link.check().and(done)
        });
    assert!(start.elapsed() < Duration::from_secs(10));
    for (rank, result) in results.into_iter().enumerate() {
        // The others learn of it in a kernel, or where they meet.
        let line = format!("{:#}", result.as_ref().expect_err("it must fail"));
        assert!(line.contains("out of memory") || (rank != 1 && line.contains("another rank failed")), "{line}");
        gave_up(result, &[]);
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let meeting: Arc<Threads> = Threads::new(3, Duration::from_millis(100));
    let start = Instant::now();
    let answers: Vec<String> = thread::scope(|scope| {
        let threads: Vec<_> = [0, 2]
            .map(|r| {
                scope.spawn({
                    let m = meeting.clone();
                    move || format!("{:#}", m.all_gather(r, &[]).unwrap_err())
                })
            })
            .into();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(start.elapsed() < Duration::from_secs(5));
    assert!(answers.iter().all(|a| a.contains("rank 1 did not come")), "{answers:?}");
    meeting.all_gather(1, &[]).expect_err("the group has failed");
}

#[test]
fn what_does_not_fit_is_refused() {
    ranks(2, LinkOptions::default(), |link, gpu| {
        let refused = |algorithm, blocks, dim, text: &str| {
            let error =
                all_reduce(link, gpu, &[Variant { algorithm, blocks }], 1, dim).expect_err("it must be refused");
            assert!(format!("{error:#}").contains(text), "{error:#}");
        };
        refused(Algorithm::Push, 5, 64, "expected 1 to 4");
        let most = link.wire().block_limits(Algorithm::Push, 16384).1; // 4 where ranks share a GPU, 32 where each has its own
        refused(Algorithm::Push, 1, 16384, &format!("expected 2 to {most}"));
        refused(Algorithm::TwoShot, 1, 16, "at least 16 columns a rank");
        refused(Algorithm::Pull, 1, 24, "a multiple of 16");
        refused(Algorithm::Nccl, 1, 64, "NCCL was not loaded");
        Ok(())
    })
    .into_iter()
    .for_each(|r| r.unwrap());
}

/// What all ranks found, which must be the same.
fn alike<T: std::fmt::Debug>(results: Vec<anyhow::Result<T>>) -> T {
    let mut all: Vec<T> = results.into_iter().map(|r| r.unwrap()).collect();
    let lines: Vec<String> = all.iter().map(|found| format!("{found:?}")).collect();
    assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
    all.swap_remove(0)
}

/// Of tests that wait in vain. Ranks that share a GPU come to a collective tens of milliseconds after each other at
/// first.
const PATIENCE: Duration = Duration::from_millis(150);

fn planted(kind: FaultKind, only: Option<Algorithm>) -> LinkOptions {
    LinkOptions { patience: PATIENCE, fault: Some(Fault { kind, rank: 1, peer: 2, only }) }
}

#[test]
fn the_probe_names_the_pair() {
    for n in [2, 3] {
        let pairs = alike(ranks(n, LinkOptions::default(), |link, gpu| {
            let pairs = pairs::probe(link)?;
            // It leaves empty windows behind.
            let x = all_reduce(link, gpu, &[Variant { algorithm: Algorithm::Push, blocks: 2 }], 3, 64)?;
            assert_eq!(x[0], expected(n, 3, 64));
            Ok(pairs)
        }));
        assert_eq!(pairs.len(), n * (n - 1));
        assert!(pairs.iter().all(|p| p.health().is_good() && p.store_rate > 0.0 && p.load_rate > 0.0), "{pairs:?}");
        assert!(gpus() > Some(1) || pairs.iter().all(|p| p.health() == Health::SameGpu), "{pairs:?}");
    }
    let there = (1, 2);
    for (kind, off, words) in [
        (FaultKind::Drop, &[there, (2, 1)][..], &["stores wrong", "loads wrong", "no answer to a ping"][..]),
        (FaultKind::Zero, &[there], &["131072 of 131072 stores wrong", "131072 of 131072 loads wrong", "one way"]),
        (FaultKind::Flip, &[there], &["131072 of 131072 stores wrong", "131072 of 131072 loads wrong", "one way"]),
        (FaultKind::Stall, &[there, (2, 1)], &["stores ", "GB/s", "no answer to a ping"]),
    ] {
        let (pairs, names) = alike(ranks(3, planted(kind, None), |link, _| {
            let names = format!("{} to {}: off: ", name(link, 1), name(link, 2));
            Ok((pairs::probe(link)?, names))
        }));
        let found: Vec<&Pair> = pairs.iter().filter(|p| p.health() == Health::Off).collect();
        assert_eq!(found.iter().map(|p| (p.from, p.to)).collect::<Vec<_>>(), off, "{kind:?}: {pairs:?}");
        let line = found[0].to_string();
        assert!(words.iter().chain(&[&names[..], "IOMMU"]).all(|word| line.contains(word)), "{kind:?}: {line}");
    }
}

#[test]
fn the_tuner_does_not_choose_what_is_wrong() {
    let (rows, dim) = ([1, 4], 96);
    let tune = |n: usize, options: LinkOptions| {
        alike(ranks(n, options, |link, gpu| {
            let found = tune::tune(link, &rows, dim)?;
            // Nothing is left of what failed.
            let x = all_reduce(link, gpu, &[Variant { algorithm: Algorithm::Pull, blocks: 2 }], 2, dim)?;
            assert_eq!(x[0], expected(n, 2, dim));
            Ok(found)
        }))
    };
    let algorithms = |tuned: &Tuned| tuned.times.iter().map(|(choice, _)| choice.algorithm).collect::<Vec<_>>();
    use Algorithm::{Pull, Push, TwoShot};
    for n in [2, 3] {
        let (tuned, failed) = tune(n, LinkOptions::default());
        assert_eq!(tuned.iter().map(|t| t.rows).collect::<Vec<_>>(), rows);
        for t in &tuned {
            let least = t.times.iter().map(|t| t.1).min_by(f64::total_cmp).unwrap();
            let first = t.times.iter().find(|t| t.1 <= tune::NEARLY * least).unwrap();
            assert!(algorithms(t) == [Push, Pull, TwoShot] && t.variant == first.0 && least > 0.0, "{t}");
        }
        assert!(failed.is_empty(), "{failed:?}");
    }
    for (kind, wrong, words) in [
        (FaultKind::Flip, Push, ": 12 of 96 sums are wrong, first row 0 column 3: expected "),
        // The others wait too, for what rank 2 would make of it.
        (
            FaultKind::Drop,
            TwoShot,
            &format!(": no data from rank 1 (GPU {}) in the check of sums (sums to add) for ", gpu_of(1)),
        ),
    ] {
        let (tuned, failed): (Vec<Tuned>, Vec<Failed>) = tune(3, planted(kind, Some(wrong)));
        let line = format!("rank 2 (GPU {}){words}", gpu_of(2));
        assert!(failed.len() == 1 && failed[0].algorithm == wrong && failed[0].why.starts_with(&line), "{failed:?}");
        assert!(
            tuned.len() == 2 && tuned.iter().all(|t| t.variant.algorithm != wrong && !algorithms(t).contains(&wrong)),
            "{tuned:?}"
        );
    }
}

#[test]
fn choices_are_remembered() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volley/collectives.json");
    let settle = |n: usize, hidden: usize, collectives: Collectives| -> Found {
        alike(ranks(n, LinkOptions::default(), |link, _| {
            let found = settle::settle(link, &collectives, hidden)?;
            found.tuned.iter().for_each(|t| assert_eq!(link.wire().variant(t.rows, hidden), t.variant));
            Ok(found)
        }))
    };
    let cached = || Collectives { measure: Measure::Cached(path.clone()), ..Collectives::default() };
    let first = settle(2, 16, cached());
    assert!(!first.cached && first.pairs.len() == 2 && first.tuned.iter().map(|t| t.rows).eq(TUNED_ROWS), "{first:?}");
    let again = settle(2, 16, cached());
    assert!(again.cached && again.pairs.is_empty() && again.tuned == first.tuned, "{again:?}");
    // Another size or number of ranks is another entry, which leaves the first as it is.
    assert!(!settle(2, 32, cached()).cached && !settle(3, 16, cached()).cached);
    assert_eq!(settle(2, 16, cached()).tuned, first.tuned);
    let probed = settle(2, 16, Collectives { require_p2p: true, ..cached() });
    assert!(probed.cached && probed.pairs.len() == 2, "{probed:?}");
    // Doctor does not look; nobody looks where the algorithm is forced.
    assert!(!settle(2, 16, Collectives { measure: Measure::Anew, ..cached() }).cached);
    let forced = settle(2, 16, Collectives { algorithm: Some(Algorithm::Pull), ..cached() });
    assert!(forced.tuned.is_empty() && forced.pairs.is_empty(), "{forced:?}");
    let whole = std::fs::read_to_string(&path).unwrap();
    // The last one has a choice that no launch would take.
    for damaged in [&whole[..whole.len() / 2], &whole.replace("\"blocks\": ", "\"blocks\": 10000")] {
        std::fs::write(&path, damaged).unwrap();
        assert!(!settle(2, 16, cached()).cached, "{damaged}");
        assert!(settle(2, 16, cached()).cached, "it was not written again");
    }
}

#[test]
fn a_pair_that_is_off_ends_the_start_or_its_algorithm() {
    let settle = |only, require_p2p| {
        let collectives = Collectives { measure: Measure::Anew, require_p2p, ..Collectives::default() };
        let names = alike(ranks(3, LinkOptions::default(), |link, _| {
            Ok(format!("{} to {}: off", name(link, 1), name(link, 2)))
        }));
        (names, ranks(3, planted(FaultKind::Zero, only), move |link, _| settle::settle(link, &collectives, 16)))
    };
    for (require_p2p, words) in
        [(true, "--require-p2p: "), (false, "words between ranks: rank 2: wrong ones arrived; ")]
    {
        let (names, results) = settle(None, require_p2p);
        for result in results {
            gave_up(result.map(drop), &[words, &names, "stores wrong"]);
        }
    }
    let found = alike(settle(Some(Algorithm::Push), true).1);
    assert!(found.failed.len() == 1 && found.failed[0].algorithm == Algorithm::Push, "{found:?}");
    assert!(found.tuned.iter().map(|t| t.rows).eq(TUNED_ROWS), "{found:?}");
}

/// NCCL's graphs, in a process for each library and each way of adding, since NCCL reads its settings once and may hang
/// or crash: what it is forced to works, or is refused in one line, in seconds. $VOLLEY_NCCL: a library, for one rank;
/// $VOLLEY_NCCL_SHARED: one of 2.30 or later, for two ranks on one GPU.
#[test]
fn nccl_works_in_graphs_or_refuses() {
    let mut refused = Vec::new();
    for (variable, n) in [("VOLLEY_NCCL", 1), ("VOLLEY_NCCL_SHARED", 2)] {
        let Some(library) = std::env::var_os(variable) else {
            let _ = writeln!(std::io::stderr(), "skipped: ${variable} names no NCCL library for {n} ranks on a GPU");
            continue;
        };
        for (forced, algorithm) in [
            ("Ring", Algorithm::Nccl),
            ("Ring", Algorithm::NcclAllReduce),
            ("Tree", Algorithm::Nccl),
            ("Tree", Algorithm::NcclAllReduce),
        ] {
            let start = Instant::now();
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["--ignored", "--exact", "nccl_in_this_process", "--nocapture"]).stdin(Stdio::null());
            child.envs(nccl::defaults(n > 1)).env("NCCL_ALGO", forced);
            child
                .env("VOLLEY_NCCL", &library)
                .env("VOLLEY_NCCL_RANKS", n.to_string())
                .env("VOLLEY_NCCL_SUMS", algorithm.name());
            let mut child = child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            while child.try_wait().unwrap().is_none() && start.elapsed() < Duration::from_secs(40) {
                thread::sleep(Duration::from_millis(10));
            }
            let _ = child.kill();
            let out = child.wait_with_output().unwrap();
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let what = format!("{n} ranks, {forced}, {}", algorithm.name());
            let both = format!(
                "{what}: {} after {:?}\n{}{}",
                out.status,
                start.elapsed(),
                text(&out.stdout),
                text(&out.stderr)
            );
            match out.status.code() {
                Some(0) => print!(
                    "{}",
                    text(&out.stdout)
                        .lines()
                        .filter(|l| l.starts_with("NCCL"))
                        .map(|l| format!("{what}: {l}\n"))
                        .collect::<String>()
                ),
                Some(3) if text(&out.stderr).lines().filter(|l| l.starts_with("error: ")).count() == 1 => {
                    print!("{what}: {}", text(&out.stderr));
                    refused.push(what);
                }
                _ => panic!("{both}"),
            }
        }
    }
    // A ring is what the engine asks for itself. A tree gathers nothing, so that NCCL refuses it.
    assert!(refused.iter().all(|what| what.contains("Tree")), "{refused:?}");
}

#[test]
#[ignore = "nccl_works_in_graphs_or_refuses runs it, in processes of its own"]
fn nccl_in_this_process() {
    let variable = |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("${name} is not set"));
    let (rows, dim, n) = (3, 512, variable("VOLLEY_NCCL_RANKS").parse::<usize>().unwrap());
    let algorithm = Algorithm::NAMES.iter().find(|named| named.0 == variable("VOLLEY_NCCL_SUMS")).unwrap().1;
    let path = variable("VOLLEY_NCCL");
    let library = || nccl::Library::open(Some(Path::new(&path)));
    let sums = algorithm == Algorithm::NcclAllReduce;
    let results: Vec<anyhow::Result<Vec<Vec<f32>>>> = match n {
        1 => vec![volley::gpu::open(0).and_then(|gpu| nccl_alone(&gpu, library()?, sums, rows * dim))],
        _ => ranks(n, LinkOptions::default(), |link, gpu| {
            link.attach_nccl(&library()?, algorithm, &[1, rows, 16], dim)?;
            all_reduce(link, gpu, &[Variant { algorithm, blocks: link.wire().blocks(algorithm, rows, dim) }], rows, dim)
        }),
    };
    if let Some(error) = results.iter().find_map(|r| r.as_ref().err()) {
        eprintln!("error: {error:#}");
        std::process::exit(exit_code(error).into());
    }
    let want =
        if n == 1 { numbers(rows * dim, 10).iter().map(|x| x.to_f32()).collect() } else { expected(n, rows, dim) };
    for result in results.into_iter().flat_map(|r| r.unwrap()) {
        for (i, (found, want)) in result.iter().zip(&want).enumerate() {
            // NCCL rounds sums where it likes.
            let allowed = if sums { want.abs().max(1.0) / 64.0 } else { 0.0 };
            assert!((found - want).abs() <= allowed, "{i}: {found}, expected {want}");
        }
    }
    println!("NCCL {}: right, launched and in graphs", library().unwrap().version_text());
}

/// What a collective of one rank makes of its numbers, launched, then in 50 replays of a graph of 50.
fn nccl_alone(gpu: &Gpu, library: Arc<nccl::Library>, sums: bool, n: usize) -> anyhow::Result<Vec<Vec<f32>>> {
    let (from, to) = (gpu.store(&numbers(n, 10))?, gpu.allocate(2 * n)?);
    let warm_up = nccl::WarmUp { sums, sizes: vec![n], from: from.at(0), to: to.at(0) };
    let comm = nccl::Comm::connect(&library, gpu.raw().expect("a real GPU"), 1, 0, library.unique_id()?, warm_up)?;
    let call =
        || if sums { comm.all_reduce(from.at(0), to.at(0), n) } else { comm.all_gather(from.at(0), to.at(0), n) };
    let result =
        || Ok::<_, anyhow::Error>(gpu.download::<bf16>(to.at(0), n)?.iter().map(|x| x.to_f32()).collect::<Vec<f32>>());
    gpu.fill(to.at(0), 0, 2 * n)?;
    call()?;
    let mut results = vec![result()?];
    let graph = gpu.capture(|| (0..50).try_for_each(|_| call()))?;
    gpu.fill(to.at(0), 0, 2 * n)?;
    (0..50).try_for_each(|_| gpu.replay(&graph))?;
    results.push(result()?);
    comm.check()?;
    drop(graph);
    drop(comm);
    Ok(results)
}
