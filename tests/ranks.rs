//! Several ranks: the f32 reference as 2, 3, 4 and 8 ranks against itself as one, and what each rank holds and reads; then ranks of the GPU backend
//! against the reference and each other, with the kernels compiled by g++ (scripts/shim.sh) and collectives that run together.
mod support;

use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::sync::OnceLock;
use support::T0;
use volley::cmd::check;
use volley::cpu::Reference;
use volley::decode::{Drafting, Engine, Event, Flow, Request, Sampling};
use volley::gpu::device::Gpu;
use volley::gpu::machine::Options;
use volley::gpu::ranks::{Conductor, Setup};
use volley::gpu::shim::Shim;
use volley::model::checkpoint::{Checkpoint, Read};
use volley::model::config::Config;
use volley::model::plan::{Pass, Ranks, Step};
use volley::model::weights::{claim, vocab_rows, Table, Weights};

/// Widths that divide by 8 and fewer KV heads than ranks; a vocabulary that does not divide.
fn tiny8() -> T0 {
    let t0 = T0::new().set("num_attention_heads", 16).set("num_key_value_heads", 2).set("head_dim", 64).set("num_hidden_layers", 2);
    t0.set("hidden_size", 128).set("intermediate_size", 256).set("vocab_size", 500).eos(json!(1)).set("bos_token_id", 0)
}

/// The same with heads that divide by 3, and biases, of which those behind a sum over ranks count once.
fn tiny3() -> T0 {
    tiny8().set("num_attention_heads", 6).set("num_key_value_heads", 3).set("intermediate_size", 192).biases()
}

fn open(dir: &Path) -> (Config, Weights) {
    let config = Config::open(dir).unwrap();
    let weights = claim(&Table::builtin().unwrap(), &config, &Checkpoint::open(dir, Read::Mmap).unwrap()).unwrap();
    weights.load(&mut |_, _| {}).unwrap();
    (config, weights)
}

fn reference(dir: &Path, count: usize) -> Reference {
    let (config, weights) = open(dir);
    Reference::of_ranks(config, weights, 200, None, false, Ranks { rank: count - 1, count }).unwrap()
}

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + 11) % 500).collect()
}

/// Residual streams after each layer and logits of a prompt and a pass of four rows.
fn observe(reference: &mut Reference) -> (Vec<f32>, Vec<f32>) {
    let ids = ids(74);
    let mut hidden = Vec::new();
    let mut keep = |step: &Step, out: &mut [f32], _: usize| match step {
        Step::AllReduce { .. } => hidden.extend_from_slice(out),
        Step::Linear(l) if matches!(l.epilogue, volley::model::plan::Epilogue::Residual { .. }) => hidden.extend_from_slice(out),
        _ => {}
    };
    reference.run(Pass::Prefill { rows: 64 }, &ids[..64], 0, &mut keep).unwrap();
    reference.run(Pass::Prefill { rows: 64 }, &ids[64..70], 64, &mut keep).unwrap();
    reference.run(Pass::Verify { width: 4 }, &ids[70..], 70, &mut keep).unwrap();
    let logits = reference.logits(4).to_vec();
    (hidden, logits)
}

fn answer(reference: Reference, sampling: &Sampling) -> Vec<u32> {
    let mut engine = Engine::new(Box::new(reference), Drafting::default()).unwrap();
    let request = Request { prompt: &ids(20), sampling, end_ids: &[], max_tokens: Some(24) };
    engine.generate(&request, &mut |_: Event| Flow::Go).unwrap().tokens
}

#[test]
fn ranks_compute_what_one_computes() {
    for (t0, counts) in [(tiny8(), &[2, 4, 8][..]), (tiny3(), &[3]), (tiny8().arch("qwen3").tied(true), &[4])] {
        let dir = tempfile::tempdir().unwrap();
        t0.write(dir.path());
        let one = observe(&mut reference(dir.path(), 1));
        let sampled = Sampling { temperature: 0.8, top_p: 0.9, seed: 3, ..Sampling::default() };
        let answers = [Sampling::default(), sampled].map(|sampling| (answer(reference(dir.path(), 1), &sampling), sampling));
        for &count in counts {
            let many = observe(&mut reference(dir.path(), count));
            for (what, one, many) in [("hidden states", &one.0, &many.0), ("logits", &one.1, &many.1)] {
                assert_eq!(one.len(), many.len(), "{what} of {count} ranks");
                let spread = one.iter().fold(0f32, |m, x| m.max(x.abs()));
                let worst = one.iter().zip(many).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(spread > 1.0 && worst < 1e-5 * spread, "{what} of {count} ranks: off by {worst}, up to {spread}");
            }
            for (expected, sampling) in &answers {
                assert_eq!(answer(reference(dir.path(), count), sampling), *expected, "{count} ranks, {sampling:?}");
            }
        }
    }
}

#[test]
fn tokens_are_shared_in_whole_tiles() {
    for (vocab, ranks) in [(500, 8), (500, 3), (151_936, 8), (128_256, 3), (49_152, 3), (17, 1), (33, 2)] {
        let mut end = 0;
        for rank in 0..ranks {
            let rows = vocab_rows(vocab, rank, ranks).unwrap();
            assert!(rows.start == end && !rows.is_empty() && rows.start % 16 == 0, "{vocab} over {ranks}: {rows:?}");
            end = rows.end;
        }
        assert_eq!(end, vocab);
    }
    // Shares of 32 leave nothing for the last of three.
    assert_eq!(vocab_rows(64, 0, 3), None);
}

/// Built once per test run.
fn library() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let out = Command::new("scripts/shim.sh").output().expect("scripts/shim.sh runs");
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        PathBuf::from(String::from_utf8(out.stdout).expect("a path").lines().last().expect("a path"))
    })
}

fn shim() -> Gpu {
    Gpu::new(Rc::new(Shim::open(library()).unwrap()))
}

fn conductor(dir: &Path, count: usize) -> Conductor {
    let (config, weights) = open(dir);
    let options = Options { context: 200, drafter: None, ngram: true, require_graphs: true, fail_capture: |_| false };
    let setup = Setup {
        gpus: vec![0; count],
        open: Box::new(|_| Ok(shim())),
        collectives: Default::default(),
        config,
        weights: Some(weights),
        options,
    };
    Conductor::new(setup, shim(), &mut |_, _| {}).unwrap()
}

/// Every rank's steps against the reference's of the same rank, and the residual streams of all ranks against each other.
fn compute_alike(name: &str, dir: &Path, count: usize) -> Conductor {
    let mut conductor = conductor(dir, count);
    let here = dir.to_path_buf();
    let held = conductor
        .each("check", move |machine| {
            let (config, weights) = open(&here);
            let mut reference = Reference::of_ranks(config, weights, 200, None, false, machine.ranks())?;
            check::steps(machine, &mut reference, &ids(check::STEP_ROWS))
        })
        .unwrap_or_else(|e| panic!("{name} on {count} ranks: {e:#}"));
    println!("{name} on {count} ranks: {}", held[0]);
    let streams = conductor.each("check", |machine| {
        let mut bits = Vec::new();
        for (pass, at, n) in [(Pass::Prefill { rows: 16 }, 0, 9), (Pass::Verify { width: 4 }, 9, 4)] {
            machine.run(pass, &ids(13)[at..at + n], at, &mut |step, out, _| {
                if let Step::AllReduce { .. } = step {
                    bits.extend(out.iter().map(|x| x.to_bits()));
                }
            })?;
        }
        Ok(bits)
    });
    let streams = streams.unwrap();
    assert!(streams[0].len() == 2 * 2 * 13 * 128 && streams.iter().all(|bits| *bits == streams[0]), "{name} on {count} ranks");
    conductor
}

#[test]
fn two_ranks_hold_every_check() {
    let dir = tempfile::tempdir().unwrap();
    tiny8().write(dir.path());
    let mut conductor = compute_alike("tiny8", dir.path(), 2);
    let hold = |held: anyhow::Result<Vec<String>>| println!("{}", held.unwrap_or_else(|e| panic!("{e:#}"))[0]);
    hold(conductor.each("check", |m| check::widths(m, &ids(72))));
    hold(conductor.each("check", |m| check::chunks(m, &ids(20))));
    hold(conductor.each("check", |m| check::sampling(m, &ids(40))));
    hold(conductor.each("check", |m| check::speculation(m, &ids(40), 12, false)));
    let mut engine = Engine::new(Box::new(conductor), Drafting { ngram: true, ..Drafting::default() }).unwrap();
    for sampling in [Sampling::default(), Sampling { temperature: 0.8, top_k: 40, top_p: 0.9, seed: 3, ..Sampling::default() }] {
        let request = Request { prompt: &ids(20), sampling: &sampling, end_ids: &[], max_tokens: Some(12) };
        let mut answers = [false, true].map(|paused| {
            engine.clear();
            engine.pause_drafting(paused);
            engine.generate(&request, &mut |_: Event| Flow::Go).unwrap().tokens
        });
        let (drafted, plain) = answers.split_at_mut(1);
        assert_eq!((drafted[0].len(), &drafted[0]), (12, &plain[0]), "{sampling:?}");
    }
    assert_eq!(engine.counters().eager, 0);
}

#[test]
fn three_and_eight_ranks_compute_alike() {
    for (name, t0, count) in [("tiny3", tiny3(), 3), ("tiny8", tiny8().tied(true), 8)] {
        let dir = tempfile::tempdir().unwrap();
        t0.write(dir.path());
        let start = std::time::Instant::now();
        compute_alike(name, dir.path(), count);
        println!("{count} ranks: {:?}", start.elapsed());
    }
}
