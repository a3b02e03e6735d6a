//! Collectives through the Rust side, without a GPU: ranks are threads, kernels run under the shim (scripts/shim.sh), all ranks' blocks at once.
//! What the kernels compute is tested by kernels/shim/test_comm.cpp; here it is the meeting of ranks, launches, capture, and how failures end.
use half::bf16;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};
use volley::error::{exit_code, machine, MACHINE};
use volley::gpu::comm::{Algorithm, AllReduce, Choice, Exchange, Fault, FaultKind, Link, Options, Rendezvous, Threads};
use volley::gpu::device::Gpu;
use volley::gpu::shim::Shim;

/// Built once per test run.
fn library() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let out = Command::new("scripts/shim.sh").output().expect("scripts/shim.sh runs");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        PathBuf::from(String::from_utf8(out.stdout).expect("a path").lines().last().expect("a path"))
    })
}

/// Runs `body` as every rank, each in a thread with a GPU of its own; results by rank. When one fails, the others are told and poisoned.
fn ranks<T: Send>(n: usize, options: Options, body: impl Fn(&Link, &Gpu) -> anyhow::Result<T> + Sync) -> Vec<anyhow::Result<T>> {
    let meeting = Threads::new(n, Duration::from_secs(20));
    let poisons = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let threads: Vec<_> = (0..n)
            .map(|rank| {
                let (meeting, poisons, body) = (meeting.clone(), &poisons, &body);
                scope.spawn(move || {
                    let gpu = Gpu::new(Rc::new(Shim::open(library())?));
                    let link = Link::new(&gpu, rank, meeting.clone(), options)?;
                    poisons.lock().unwrap().push(link.poison());
                    let done = body(&link, &gpu);
                    if let Err(e) = &done {
                        meeting.fail(&format!("{e:#}"));
                        poisons.lock().unwrap().iter().for_each(|p| p.poison());
                    }
                    done
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

const STEP: &str = "layer 3: all-reduce";

/// The new x of every choice in turn, each eagerly and as a graph that is replayed twice; all from the same x.
fn all_reduce(link: &Link, gpu: &Gpu, choices: &[Choice], rows: usize, dim: usize) -> anyhow::Result<Vec<Vec<f32>>> {
    let partial = gpu.store(&numbers(rows * dim, 10 + link.rank as u32))?;
    let x0: Vec<f32> = numbers(rows * dim, 9).into_iter().map(|x| x.to_f32() * 1.37).collect();
    let x = gpu.store(&x0)?;
    let mut results = Vec::new();
    for &choice in choices {
        let a = AllReduce { partial: partial.at(0), x: x.at(0), rows, dim, ..AllReduce::default() };
        let run = || link.all_reduce_with(choice, STEP, &a);
        gpu.upload(&x0, x.at(0))?;
        run()?;
        results.push(gpu.download(x.at(0), rows * dim)?);
        let graph = gpu.capture(run)?;
        for _ in 0..2 {
            gpu.upload(&x0, x.at(0))?;
            gpu.replay(&graph)?;
            link.check()?;
            results.push(gpu.download(x.at(0), rows * dim)?);
        }
    }
    Ok(results)
}

fn expected(n: usize, rows: usize, dim: usize) -> Vec<f32> {
    let partials: Vec<_> = (0..n).map(|r| numbers(rows * dim, 10 + r as u32)).collect();
    let x = numbers(rows * dim, 9);
    let sum = |i: usize| partials.iter().fold(0.0f32, |sum, p| sum + p[i].to_f32());
    (0..rows * dim).map(|i| x[i].to_f32() * 1.37 + bf16::from_f32(sum(i)).to_f32()).collect()
}

#[test]
fn all_algorithms_give_the_hosts_sums() {
    let near_wrap = Options { last_epoch: u32::MAX - 3, ..Options::default() };
    for (n, rows, dim) in [(2, 3, 64), (3, 1, 576), (4, 16, 128), (8, 2, 256)] {
        let results = ranks(n, near_wrap, |link, gpu| {
            let mut choices = Vec::new();
            for algorithm in [Algorithm::Push, Algorithm::Pull, Algorithm::TwoShot] {
                choices.extend([1, link.blocks(algorithm, rows, dim)].map(|blocks| Choice { algorithm, blocks }));
            }
            all_reduce(link, gpu, &choices, rows, dim)
        });
        let want = expected(n, rows, dim);
        for (rank, result) in results.into_iter().enumerate() {
            for (i, x) in result.unwrap().iter().enumerate() {
                let bits = |v: &[f32]| v.iter().map(|b| b.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(x), bits(&want), "{n} ranks, {rows} x {dim}, rank {rank}, result {i}");
            }
        }
    }
}

#[test]
fn words_are_exchanged() {
    for n in [2, 5, 8] {
        let results = ranks(n, Options::default(), |link, gpu| {
            let mine: Vec<u64> = (0..2000).map(|i| (link.rank as u64 * 7919 + i) << (i % 40)).collect();
            let words = gpu.store(&mine)?;
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

/// An error of the machine whose line names what is missing.
fn gave_up(result: anyhow::Result<()>, parts: &[&str]) {
    let error = result.expect_err("it must fail");
    let line = format!("{error:#}");
    assert_eq!(exit_code(&error), MACHINE, "{line}");
    assert!(parts.iter().all(|part| line.contains(part)) && !line.contains('\n'), "{line}");
}

#[test]
fn dropped_words_are_missed_by_name() {
    let fault = Fault { kind: FaultKind::Drop, rank: 1, peer: 2 };
    let options = Options { patience: Duration::from_millis(50), fault: Some(fault), ..Options::default() };
    for algorithm in [Algorithm::Push, Algorithm::Pull, Algorithm::TwoShot] {
        let mut results = ranks(3, options, |link, gpu| {
            let done = all_reduce(link, gpu, &[Choice { algorithm, blocks: 1 }], 2, 96).map(drop);
            link.check().and(done)
        });
        gave_up(results.swap_remove(2), &["rank 2 (GPU 0): no data from rank 1", STEP, "for 0.05 s"]);
    }
}

#[test]
fn a_rank_that_fails_ends_the_others() {
    library();
    let start = Instant::now();
    let results = ranks(3, Options { patience: Duration::from_secs(1000), ..Options::default() }, |link, gpu| {
        if link.rank == 1 {
            return Err(machine("rank 1 (GPU 0): out of memory"));
        }
        let done = all_reduce(link, gpu, &[Choice { algorithm: Algorithm::Push, blocks: 1 }], 1, 64).map(drop);
        link.check().and(done)
    });
    assert!(start.elapsed() < Duration::from_secs(10));
    for (rank, result) in results.into_iter().enumerate() {
        gave_up(result, &[if rank == 1 { "out of memory" } else { "stopped because another rank failed" }]);
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
    ranks(2, Options::default(), |link, gpu| {
        let refused = |algorithm, blocks, dim, text: &str| {
            let error = all_reduce(link, gpu, &[Choice { algorithm, blocks }], 1, dim).expect_err("it must be refused");
            assert!(format!("{error:#}").contains(text), "{error:#}");
        };
        refused(Algorithm::Push, 5, 64, "expected 1 to 4");
        refused(Algorithm::Push, 1, 16384, "expected 2 to 4");
        refused(Algorithm::TwoShot, 1, 16, "at least 16 columns a rank");
        refused(Algorithm::Pull, 1, 24, "a multiple of 16");
        refused(Algorithm::Nccl, 1, 64, "NCCL was not loaded");
        Ok(())
    })
    .into_iter()
    .for_each(|r| r.unwrap());
}
