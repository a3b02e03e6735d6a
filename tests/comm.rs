//! Collectives through the Rust side, without a GPU: ranks are threads, kernels run under the shim (scripts/shim.sh), all ranks' blocks at once. With
//! VOLLEY_GPUS=N on real ones, ranks spread over N GPUs.
//! What the kernels compute is tested by kernels/shim/test_comm.cpp; here it is the meeting of ranks, launches, capture, how failures end, and what the start
//! finds out about links (links.rs).
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
use volley::gpu::links::{self, Collectives, Failed, Found, Measure, Pair, State, Tuned, TUNED_ROWS};
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

fn open(rank: usize) -> anyhow::Result<Gpu> {
    match std::env::var("VOLLEY_GPUS") {
        Ok(gpus) => volley::gpu::open(rank % gpus.parse::<usize>()?),
        Err(_) => Ok(Gpu::new(Rc::new(Shim::open(library())?))),
    }
}

/// Runs `body` as every rank, each in a thread with a GPU of its own; results by rank. When one fails, the others are told and poisoned.
fn ranks<T: Send>(n: usize, options: Options, body: impl Fn(&mut Link, &Gpu) -> anyhow::Result<T> + Sync) -> Vec<anyhow::Result<T>> {
    let meeting = Threads::new(n, Duration::from_secs(60));
    let poisons = Mutex::new(Vec::new());
    thread::scope(|scope| {
        let threads: Vec<_> = (0..n)
            .map(|rank| {
                let (meeting, poisons, body) = (meeting.clone(), &poisons, &body);
                scope.spawn(move || {
                    let gpu = open(rank)?;
                    let mut link = Link::new(&gpu, rank, meeting.clone(), options)?;
                    poisons.lock().unwrap().push(link.poison());
                    link.barrier()?; // whoever fails finds them all
                    let done = body(&mut link, &gpu);
                    if let Err(e) = &done {
                        meeting.fail(&format!("{e:#}"));
                        // Every rank is to be poisoned, and one of them may still be on its way from the meeting, or fail there.
                        let start = Instant::now();
                        while poisons.lock().unwrap().len() < n && start.elapsed() < Duration::from_secs(1) {
                            thread::yield_now();
                        }
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
                let differ: Vec<_> =
                    (0..x.len()).filter(|&at| x[at].to_bits() != want[at].to_bits()).map(|at| (at, x[at], want[at])).collect();
                let first = &differ[..differ.len().min(4)];
                assert!(differ.is_empty(), "{n} ranks, {rows} x {dim}, rank {rank}, result {i}: {} differ, {first:?}", differ.len());
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

/// What all ranks found, which must be the same.
fn alike<T: std::fmt::Debug>(results: Vec<anyhow::Result<T>>) -> T {
    let mut all: Vec<T> = results.into_iter().map(|r| r.unwrap()).collect();
    let lines: Vec<String> = all.iter().map(|found| format!("{found:?}")).collect();
    assert!(lines.iter().all(|line| *line == lines[0]), "{lines:?}");
    all.swap_remove(0)
}

fn planted(kind: FaultKind, only: Option<Algorithm>) -> Options {
    Options { patience: Duration::from_millis(50), fault: Some(Fault { kind, rank: 1, peer: 2, only }), ..Options::default() }
}

#[test]
fn the_probe_names_the_pair() {
    for n in [2, 3] {
        let pairs = alike(ranks(n, Options::default(), |link, gpu| {
            let pairs = links::probe(link)?;
            // It leaves empty windows behind.
            let x = all_reduce(link, gpu, &[Choice { algorithm: Algorithm::Push, blocks: 2 }], 3, 64)?;
            assert_eq!(x[0], expected(n, 3, 64));
            Ok(pairs)
        }));
        assert_eq!(pairs.len(), n * (n - 1));
        assert!(pairs.iter().all(|p| p.state() == State::SameGpu && p.store_rate > 0.0 && p.load_rate > 0.0), "{pairs:?}");
    }
    let there = (1, 2);
    for (kind, off, words) in [
        (FaultKind::Drop, &[there, (2, 1)][..], &["stores wrong", "loads wrong", "no answer to a ping"][..]),
        (FaultKind::Zero, &[there], &["131072 of 131072 stores wrong", "131072 of 131072 loads wrong", "one way"]),
        (FaultKind::Flip, &[there], &["131072 of 131072 stores wrong", "131072 of 131072 loads wrong", "one way"]),
        (FaultKind::Stall, &[there, (2, 1)], &["stores ", "GB/s", "no answer to a ping"]),
    ] {
        let pairs = alike(ranks(3, planted(kind, None), |link, _| links::probe(link)));
        let found: Vec<&Pair> = pairs.iter().filter(|p| p.state() == State::Off).collect();
        assert_eq!(found.iter().map(|p| (p.from, p.to)).collect::<Vec<_>>(), off, "{kind:?}: {pairs:?}");
        let line = found[0].to_string();
        let named = ["rank 1 (GPU 0, shim) to rank 2 (GPU 0, shim): off: ", "IOMMU"];
        assert!(words.iter().chain(&named).all(|word| line.contains(word)), "{kind:?}: {line}");
    }
}

#[test]
fn the_tuner_does_not_choose_what_is_wrong() {
    let (rows, dim) = ([1, 4], 96);
    let tune = |n: usize, options: Options| {
        alike(ranks(n, options, |link, gpu| {
            let found = links::tune(link, &rows, dim)?;
            // Nothing is left of what failed.
            let x = all_reduce(link, gpu, &[Choice { algorithm: Algorithm::Pull, blocks: 2 }], 2, dim)?;
            assert_eq!(x[0], expected(n, 2, dim));
            Ok(found)
        }))
    };
    let algorithms = |tuned: &Tuned| tuned.times.iter().map(|(choice, _)| choice.algorithm).collect::<Vec<_>>();
    use Algorithm::{Pull, Push, TwoShot};
    for n in [2, 3] {
        let (tuned, failed) = tune(n, Options::default());
        assert_eq!(tuned.iter().map(|t| t.rows).collect::<Vec<_>>(), rows);
        for t in &tuned {
            let fastest = t.times.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
            assert!(algorithms(t) == [Push, Pull, TwoShot] && t.choice == fastest.0 && fastest.1 > 0.0, "{t}");
        }
        assert!(failed.is_empty(), "{failed:?}");
    }
    for (kind, wrong, words) in [
        (FaultKind::Flip, Push, "rank 2 (GPU 0): 12 of 96 sums are wrong, first row 0 column 3: expected "),
        // Rank 2 waits for rank 1, and rank 0 for what rank 2 would make of it: either may give up first.
        (FaultKind::Drop, TwoShot, "(GPU 0): no data from rank "),
    ] {
        let (tuned, failed): (Vec<Tuned>, Vec<Failed>) = tune(3, planted(kind, Some(wrong)));
        assert!(failed.len() == 1 && failed[0].algorithm == wrong && failed[0].why.contains(words), "{failed:?}");
        assert!(tuned.len() == 2 && tuned.iter().all(|t| t.choice.algorithm != wrong && !algorithms(t).contains(&wrong)), "{tuned:?}");
    }
}

#[test]
fn choices_are_remembered() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("volley/collectives.json");
    let settle = |n: usize, hidden: usize, collectives: Collectives| -> Found {
        alike(ranks(n, Options::default(), |link, _| {
            let found = links::settle(link, &collectives, hidden)?;
            found.tuned.iter().for_each(|t| assert_eq!(link.choice(t.rows, hidden), t.choice));
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
        ranks(3, planted(FaultKind::Zero, only), move |link, _| links::settle(link, &collectives, 16))
    };
    for (require_p2p, words) in [(true, "--require-p2p: "), (false, "words between ranks: rank 2: wrong ones arrived; ")] {
        for result in settle(None, require_p2p) {
            gave_up(result.map(drop), &[words, "rank 1 (GPU 0, shim) to rank 2 (GPU 0, shim): off", "stores wrong"]);
        }
    }
    let found = alike(settle(Some(Algorithm::Push), true));
    assert!(found.failed.len() == 1 && found.failed[0].algorithm == Algorithm::Push, "{found:?}");
    assert!(found.tuned.iter().map(|t| t.rows).eq(TUNED_ROWS), "{found:?}");
}
