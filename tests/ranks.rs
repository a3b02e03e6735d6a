//! Several ranks: the f32 reference as 2, 3, 4 and 8 ranks against itself as one, and what each rank holds and reads;
//! then ranks of the GPU backend against the reference and each other, with the kernels compiled by g++
//! (scripts/shim.sh) and collectives that run together.
#[path = "support/drafter.rs"]
mod drafter;
#[path = "support/experts.rs"]
mod experts;
#[path = "support/quantised.rs"]
mod quantised;
#[path = "support/ranks.rs"]
mod ranks;
#[path = "support/shim.rs"]
mod shim;
mod support;
#[path = "support/watching.rs"]
mod watching;

use drafter::{latent_draft_model, tiny_llama_drafter};
use experts::write_tiny8;
use quantised::Scheme;
use ranks::{compute_alike, ids, open, tiny3, tiny8};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};
use support::{Head, T0};
use volley::cmd::check;
use volley::cpu::Reference;
use volley::decode::{Backend, Drafting, Engine, Event, Flow, Limits, Request, Sampling};
use volley::error;
use volley::gpu::ranks::algorithm::{Algorithm, Fault, FaultKind};
use volley::gpu::ranks::link::LinkOptions;
use volley::gpu::ranks::settle::{Collectives, Measure};
use volley::gpu::ranks::{Conductor, LastResort, Setup};
use volley::gpu::weights::{Layout, Source};
use volley::model::checkpoint::{Checkpoint, Read, Tensor};
use volley::model::claim::claim;
use volley::model::config::Config;
use volley::model::draft::DraftModel;
use volley::model::plan::{Pass, Ranks, Step};
use volley::model::table::Table;
use volley::model::weights::{vocab_rows, Slice};
use watching::{last_graphs, refusing, watched};

fn reference(dir: &Path, count: usize) -> Reference {
    reference_of(dir, Ranks::new(count - 1, count))
}

fn reference_of(dir: &Path, ranks: Ranks) -> Reference {
    let (config, weights) = open(dir);
    Reference::of_ranks(config, weights, 200, None, false, ranks).unwrap()
}

/// As the last of `count` ranks that all have the whole attention.
fn whole_attention(count: usize) -> Ranks {
    Ranks { whole_attention: true, ..Ranks::new(count - 1, count) }
}

/// Residual streams after each layer and logits of a prompt and a pass of four rows.
fn observe(reference: &mut Reference) -> (Vec<f32>, Vec<f32>) {
    let ids = ids(74);
    let mut hidden = Vec::new();
    let mut keep = |step: &Step, out: &mut [f32], _: usize| match step {
        Step::AllReduce { .. } => hidden.extend_from_slice(out),
        Step::Linear(l) if matches!(l.epilogue, volley::model::plan::Epilogue::Residual { .. }) => {
            hidden.extend_from_slice(out)
        }
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
    for (t0, counts) in [(tiny8(), &[2, 4, 8][..]), (tiny3().biases(), &[3]), (tiny8().arch("qwen3").tied(true), &[4])]
    {
        let dir = tempfile::tempdir().unwrap();
        t0.write(dir.path());
        let one = observe(&mut reference(dir.path(), 1));
        let sampled = Sampling { temperature: 0.8, top_p: 0.9, seed: 3, ..Sampling::default() };
        let answers =
            [Sampling::default(), sampled].map(|sampling| (answer(reference(dir.path(), 1), &sampling), sampling));
        for ranks in counts.iter().flat_map(|&count| [Ranks::new(count - 1, count), whole_attention(count)]) {
            let (count, many) = (ranks.count, observe(&mut reference_of(dir.path(), ranks)));
            for (what, one, many) in [("hidden states", &one.0, &many.0), ("logits", &one.1, &many.1)] {
                assert_eq!(one.len(), many.len(), "{what} of {count} ranks");
                let spread = one.iter().fold(0f32, |m, x| m.max(x.abs()));
                let worst = one.iter().zip(many).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(
                    spread > 1.0 && worst < 1e-5 * spread,
                    "{what} of {count} ranks: off by {worst}, up to {spread}"
                );
            }
            for (expected, sampling) in &answers {
                assert_eq!(answer(reference_of(dir.path(), ranks), sampling), *expected, "{ranks:?}, {sampling:?}");
            }
        }
    }
}

/// Tied and untied heads, four ways, on two ranks: the spare head of a tied model is not used, an untied one is, and an
/// absent one is an error.
#[test]
fn o03_heads_of_two_ranks() {
    let text = |t0: T0, count: usize| {
        let dir = tempfile::tempdir().unwrap();
        t0.write(dir.path());
        answer(reference(dir.path(), count), &Sampling::default())
    };
    let four = |count: usize| {
        let equal = [
            T0::new().tied(true),
            T0::new().tied(true).head(Head::Equal),
            T0::new().tied(true).head(Head::Own),
            T0::new().head(Head::Equal),
        ];
        let texts: Vec<Vec<u32>> = equal.into_iter().map(|t0| text(t0, count)).collect();
        assert!(texts.iter().all(|other| *other == texts[0]), "{count} ranks: {texts:?}");
        let untied = text(T0::new(), count);
        assert_ne!(untied, texts[0]);
        [texts[0].clone(), untied]
    };
    assert_eq!(four(1), four(2));
    let dir = tempfile::tempdir().unwrap();
    T0::new().head(Head::Absent).write(dir.path());
    let (config, checkpoint) = (Config::open(dir.path()).unwrap(), Checkpoint::open(dir.path(), Read::Mmap).unwrap());
    let error = format!("{:#}", claim(&Table::builtin().unwrap(), &config, &checkpoint).err().unwrap());
    assert!(error.contains("lm_head.weight") && error.contains("tie_word_embeddings"), "{error}");
}

/// How `tiny8` of experts is stored.
const SCHEMES: [Option<Scheme>; 4] =
    [None, Some(Scheme::Fp8Block(32, 32)), Some(Scheme::Fp8Channel), Some(Scheme::Int4(32))];

/// Heads, experts and the shared expert are divided, the latents are not; drafting by the model's own layer changes no
/// text on any number of ranks.
#[test]
fn ranks_of_models_with_experts_compute_what_one_computes() {
    let tiny = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny").join(name);
    let made: Vec<tempfile::TempDir> = SCHEMES
        .into_iter()
        .map(|scheme| {
            let dir = tempfile::tempdir().unwrap();
            write_tiny8(dir.path(), scheme);
            dir
        })
        .collect();
    let eights: Vec<(PathBuf, &[usize])> = made.iter().map(|dir| (dir.path().to_path_buf(), &[2, 4, 8][..])).collect();
    for (dir, counts) in eights.into_iter().chain([
        (tiny("deepseek_v3"), &[2, 4][..]),
        (tiny("qwen3_moe"), &[2, 4]),
        (tiny("kimi_k25_int4"), &[2]),
    ]) {
        let vocab = Config::open(&dir).unwrap().vocab as u32;
        let tokens: Vec<u32> = ids(20).into_iter().map(|id| id % vocab).collect();
        let logits = |ranks: Ranks| {
            let mut reference = reference_of(&dir, ranks);
            reference.run(Pass::Prefill { rows: 64 }, &tokens[..13], 0, &mut |_, _, _| {}).unwrap();
            reference.run(Pass::Verify { width: 7 }, &tokens[13..], 13, &mut |_, _, _| {}).unwrap();
            reference.logits(7).to_vec()
        };
        let text = |count: usize, drafts: Option<usize>| {
            let (config, weights) = open(&dir);
            let checkpoint = Checkpoint::open(&dir, Read::Mmap).unwrap();
            let drafter =
                drafts.map(|_| DraftModel::mtp(&Table::builtin().unwrap(), &config, &weights, &checkpoint).unwrap());
            drafter.iter().for_each(|drafter| drafter.weights.load(&mut |_, _| {}).unwrap());
            let drafting = Drafting { eagle: drafter.is_some(), fixed: drafts, ..Drafting::default() };
            let reference = Reference::of_ranks(config, weights, 200, drafter, false, Ranks::new(0, count)).unwrap();
            let mut engine = Engine::new(Box::new(reference), drafting).unwrap();
            let sampling = Sampling { temperature: 2.0, seed: 5, ..Sampling::default() };
            let request = Request { prompt: &tokens, sampling: &sampling, end_ids: &[], max_tokens: Some(24) };
            engine.generate(&request, &mut |_: Event| Flow::Go).unwrap().tokens
        };
        let (one, expected) = (logits(Ranks::ONE), text(1, None));
        let spread = one.iter().fold(0f32, |m, x| m.max(x.abs()));
        let drafts = (Config::open(&dir).unwrap().n_mtp_layers > 0).then_some(3);
        for &count in counts {
            for ranks in [Ranks::new(count - 1, count), whole_attention(count)] {
                let worst = one.iter().zip(logits(ranks)).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(
                    spread > 0.5 && worst < 1e-5 * spread,
                    "{} on {ranks:?}: off by {worst}, up to {spread}",
                    dir.display()
                );
            }
            assert_eq!(text(count, None), expected, "{} on {count} ranks", dir.display());
            assert_eq!(text(count, drafts), expected, "{} on {count} ranks, {drafts:?} drafts", dir.display());
        }
    }
    let (config, weights) = open(&tiny("dsv3_fp8"));
    let error = Reference::of_ranks(config, weights, 200, None, false, Ranks::new(0, 2))
        .and_then(|mut reference| reference.run(Pass::Verify { width: 1 }, &[7], 0, &mut |_, _, _| {}));
    assert!(format!("{:#}", error.unwrap_err()).contains("cuts no block (fp8 e4m3 in blocks of 128 x 128)"));
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

/// Tests with kernels run one after the other: the shim runs one at a time anyway, and some look at the clock.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    shim::library();
    ALONE.lock().unwrap_or_else(|e| e.into_inner())
}

fn setup(dir: &Path, count: usize) -> Setup {
    ranks::setup(|_| Ok(shim::gpu()), 1, dir, count, None, 200)
}

fn conductor(dir: &Path, count: usize) -> Conductor {
    Conductor::new(setup(dir, count), shim::gpu(), &mut |_, _| {}).unwrap()
}

#[test]
fn two_ranks_hold_every_check() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    tiny8().write(dir.path());
    let seen = Setup { open: Box::new(|_| Ok(watched(&shim::gpu()))), ..setup(dir.path(), 2) };
    let mut conductor = Conductor::new(seen, watched(&shim::gpu()), &mut |_, _| {}).unwrap();
    // What a graph launches is the list that was lowered for it, as long as that; tuning has captured before.
    let graphs = conductor.each("check", |machine| {
        let listed: Vec<usize> = machine.lists()?.iter().map(|(_, ops)| ops.len()).collect();
        Ok((last_graphs(listed.len()), listed))
    });
    graphs.unwrap().into_iter().for_each(|(captured, listed)| assert_eq!(captured, listed));
    compute_alike("tiny8", &mut conductor, dir.path());
    let hold = |held: anyhow::Result<Vec<String>>| println!("{}", held.unwrap_or_else(|e| panic!("{e:#}"))[0]);
    hold(conductor.each("check", |m| check::widths(m, &ids(72))));
    hold(conductor.each("check", |m| check::chunks(m, &ids(20))));
    hold(conductor.each("check", |m| check::sampling(m, &ids(40))));
    hold(conductor.each("check", |m| check::speculation(m, &ids(40), 12, false)));
    let mut engine = Engine::new(Box::new(conductor), Drafting { ngram: true, ..Drafting::default() }).unwrap();
    for sampling in
        [Sampling::default(), Sampling { temperature: 0.8, top_k: 40, top_p: 0.9, seed: 3, ..Sampling::default() }]
    {
        let request = Request { prompt: &ids(20), sampling: &sampling, end_ids: &[], max_tokens: Some(12) };
        let mut answers = [false, true].map(|paused| {
            engine.clear();
            engine.pause_drafting(paused);
            engine.generate(&request, &mut |_: Event| Flow::Go).unwrap().tokens
        });
        let (drafted, plain) = answers.split_at_mut(1);
        assert_eq!((drafted[0].len(), &drafted[0]), (12, &plain[0]), "{sampling:?}");
        // Case O24: Ctrl-C ends an answer, with a pass under way, and the next one is whole.
        engine.clear();
        let stop = &mut |event: Event| if let Event::Tokens(_) = event { Flow::Stop { keep: 1 } } else { Flow::Go };
        let stopped = engine.generate(&request, stop).unwrap().tokens;
        engine.clear();
        let again = engine.generate(&request, &mut |_: Event| Flow::Go).unwrap().tokens;
        assert!(stopped == plain[0][..1] && again == plain[0], "{sampling:?}: {stopped:?}, {again:?}");
    }
    assert_eq!(engine.counters().eager, 0);
}

#[test]
fn three_and_eight_ranks_compute_alike() {
    let _alone = alone();
    for (name, t0, count) in [("tiny3", tiny3(), 3), ("tiny8", tiny8().tied(true), 8)] {
        let dir = tempfile::tempdir().unwrap();
        t0.write(dir.path());
        compute_alike(name, &mut conductor(dir.path(), count), dir.path());
    }
}

/// Heads, experts and the shared one are divided, latents and routes are everybody's; the model's own layer drafts on
/// every rank.
#[test]
fn two_ranks_of_models_with_experts() {
    let _alone = alone();
    for scheme in [None, Some(Scheme::Fp8Block(32, 32)), Some(Scheme::Int4(32))] {
        let dir = tempfile::tempdir().unwrap();
        write_tiny8(dir.path(), scheme);
        let (config, weights) = open(dir.path());
        let mut setup = setup(dir.path(), 2);
        if scheme.is_none() {
            setup.options.drafter = Some(latent_draft_model(dir.path(), &config, &weights, true));
        }
        let mut conductor = Conductor::new(setup, shim::gpu(), &mut |_, _| {}).unwrap();
        compute_alike(&format!("tiny8 of experts, {scheme:?}"), &mut conductor, dir.path());
        let hold =
            |held: anyhow::Result<Vec<String>>| println!("{}", held.unwrap_or_else(|e| panic!("{scheme:?}: {e:#}"))[0]);
        if scheme.is_none() {
            hold(conductor.each("check", |m| check::speculation(m, &ids(40), 5, true)));
        } else {
            hold(conductor.each("check", |m| check::chunks(m, &ids(20))));
        }
    }
}

/// Attention whole on every rank: one sum a layer, and heads need not divide.
#[test]
fn ranks_with_all_of_attention_hold_every_check() {
    let _alone = alone();
    for (t0, count) in [
        (tiny8(), 2),
        (tiny8().set("num_attention_heads", 3).set("num_key_value_heads", 1).set("attention_bias", true), 4),
    ] {
        let dir = tempfile::tempdir().unwrap();
        t0.write(dir.path());
        let mut whole = setup(dir.path(), count);
        whole.asked.whole_attention = Some(true);
        let mut conductor = Conductor::new(whole, shim::gpu(), &mut |_, _| {}).unwrap();
        assert!(conductor.first().ranks().whole_attention);
        compute_alike("whole attention", &mut conductor, dir.path());
        let hold = |held: anyhow::Result<Vec<String>>| println!("{}", held.unwrap_or_else(|e| panic!("{e:#}"))[0]);
        hold(conductor.each("check", |m| check::widths(m, &ids(72))));
        hold(conductor.each("check", |m| check::chunks(m, &ids(20))));
        hold(conductor.each("check", |m| check::speculation(m, &ids(40), 6, false)));
    }
}

/// The drafter reads features that all ranks have alike. Whether it is whole on every rank or its layer is divided, it
/// finds the same logits, and changes no text.
#[test]
fn drafts_change_the_passes_and_not_the_text() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    tiny8().set("vocab_size", 512).set("num_hidden_layers", 3).write(dir.path());
    let (config, weights) = open(dir.path());
    let drafter = tiny_llama_drafter(&config, &weights, false);
    assert!(drafter.shape.divides(2));
    let logits = [false, true].map(|split| {
        let mut setup = setup(dir.path(), 2);
        setup.options.drafter = Some(drafter.clone());
        setup.asked.split_drafter = Some(split);
        let mut conductor = Conductor::new(setup, shim::gpu(), &mut |_, _| {}).unwrap();
        assert_eq!(conductor.first().ranks().split_drafter, split);
        println!("{}", conductor.each("check", |m| check::speculation(m, &ids(40), 5, true)).unwrap()[0]);
        let drafted = conductor.each("check", |machine| {
            let limits = Limits { end_ids: vec![], max_tokens: 100, context: 200 };
            machine.begin(&ids(20), 0, &Sampling::default(), &limits)?;
            machine.prefill(&ids(19))?;
            machine.verify(1)?;
            machine.record()?;
            let mut all = Vec::new();
            machine.run_draft(3, &mut |draft, logits| {
                all.extend_from_slice(logits);
                7 * draft as u32
            })?;
            Ok(all)
        });
        let mut drafted = drafted.unwrap();
        assert!(drafted[0] == drafted[1], "ranks draft differently");
        drafted.swap_remove(0)
    });
    let spread = logits[0].iter().fold(0f32, |most, x| most.max(x.abs()));
    let worst = logits[0].iter().zip(&logits[1]).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(
        logits[0].len() == logits[1].len() && spread > 0.1 && worst < 0.02 * spread,
        "off by {worst}, up to {spread}"
    );
}

/// A way of adding sums that a link corrupts is not used, and the text is the same.
#[test]
fn a_wrong_algorithm_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    tiny8().set("hidden_size", 32).write(dir.path());
    let sampling = Sampling::default();
    let request = Request { prompt: &ids(20), sampling: &sampling, end_ids: &[], max_tokens: Some(4) };
    let answers =
        [None, Some(Fault { kind: FaultKind::Flip, rank: 1, peer: 0, only: Some(Algorithm::Push) })].map(|fault| {
            let mut setup = setup(dir.path(), 2);
            if fault.is_some() {
                let link = LinkOptions { fault, ..Default::default() };
                setup.collectives = Collectives { measure: Measure::Anew, link, ..Default::default() };
            }
            let conductor = Conductor::new(setup, shim::gpu(), &mut |_, _| {}).unwrap();
            let failed: Vec<Algorithm> = conductor.start().found.failed.iter().map(|f| f.algorithm).collect();
            assert_eq!(failed, if fault.is_some() { vec![Algorithm::Push] } else { vec![] });
            Engine::new(Box::new(conductor), Drafting::default())
                .unwrap()
                .generate(&request, &mut |_: Event| Flow::Go)
                .unwrap()
                .tokens
        });
    assert_eq!(answers[0], answers[1]);
}

/// Each rank reads its part and no more, numbers and scales; both together the whole file, and what they share once
/// again.
#[test]
fn ranks_read_their_parts() {
    let _alone = alone();
    let plain = tempfile::tempdir().unwrap();
    tiny8().write(plain.path());
    let experts = SCHEMES.map(|scheme| {
        let dir = tempfile::tempdir().unwrap();
        write_tiny8(dir.path(), scheme);
        dir
    });
    let gpu = shim::gpu();
    let kernels = volley::gpu::kernels::Kernels::load(&gpu).unwrap();
    for dir in [&plain].into_iter().chain(&experts) {
        let config = Config::open(dir.path()).unwrap();
        let checkpoint = Checkpoint::open(dir.path(), Read::Mmap).unwrap();
        let weights = claim(&Table::builtin().unwrap(), &config, &checkpoint).unwrap();
        let mut expected = 0;
        for rank in 0..2 {
            let ranks = Ranks::new(rank, 2);
            let plan = volley::model::plan::target(&config, Pass::Verify { width: 1 }, ranks, &[]).unwrap();
            let layout = Layout::of(&[&plan], config.vocab, Vec::new()).unwrap();
            layout.place(&gpu, &kernels, &Source::Checkpoint(&weights), None, ranks, &mut |_, _| {}).unwrap();
            for (_, weight) in weights.iter() {
                let slices = weight.part_of_rank(rank, 2).unwrap();
                let bytes = |(part, slice): (&Tensor, &Slice)| {
                    weight.format.bytes(slice.rows.len(), slice.cols.len(), part.dtype.bytes())
                };
                expected += weight.parts.iter().zip(&slices).map(bytes).sum::<u64>() as usize;
                // Scales of rows are bf16 in this dialect, of which `bytes` knows four each.
                if weight.format.block().is_some_and(|block| block.cols.is_none()) {
                    expected -= 2 * slices.iter().map(|slice| slice.rows.len()).sum::<usize>();
                }
            }
        }
        let read: usize = checkpoint.reads().iter().map(|call| call.bytes).sum();
        assert_eq!(read, expected, "{}", dir.path().display());
        if dir.path() == plain.path() {
            let whole: usize = checkpoint.tensors().map(|tensor| tensor.n_bytes()).sum();
            let (embedding, norms) = (500 * 128 * 2, 5 * 128 * 2);
            assert_eq!(read, whole + embedding + norms);
        }
    }
}

/// Case O22: whatever happens to one rank, all end soon with one line that names it.
#[test]
fn o22_one_rank_fails() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    tiny8().write(dir.path());
    // Loading takes most of the time here: tests/gpu.rs holds it to 10 s.
    let check = |e: anyhow::Error, words: &[&str], start: Instant| {
        let line = format!("{e:#}");
        assert!(start.elapsed().as_secs() < 60, "{line} after {:?}", start.elapsed());
        assert_eq!(error::exit_code(&e), error::MACHINE, "{line}");
        assert!(words.iter().all(|word| line.contains(word)) && !line.contains('\n'), "{line}");
    };
    // During load, before and in the first pass.
    let start = Instant::now();
    let broken = Setup { open: Box::new(|_| Err(error::machine("it fell off the bus"))), ..setup(dir.path(), 2) };
    check(
        Conductor::new(broken, shim::gpu(), &mut |_, _| {}).err().unwrap(),
        &["rank 1 (GPU 0), load", "fell off the bus"],
        start,
    );
    let start = Instant::now();
    let link = LinkOptions {
        fault: Some(Fault { kind: FaultKind::Drop, rank: 1, peer: 0, only: None }),
        ..Default::default()
    };
    let silent = Setup { collectives: Collectives { link, ..Default::default() }, ..setup(dir.path(), 2) };
    let error = Conductor::new(silent, shim::gpu(), &mut |_, _| {}).err().unwrap();
    check(error, &["rank 0 (GPU 0), load", "no data from rank 1", "layers.0.o"], start);
    let start = Instant::now();
    let mut refused = setup(dir.path(), 2);
    let gpu = || refusing(&shim::gpu(), |pass| pass == Pass::Verify { width: 3 });
    refused.open = Box::new(move |_| Ok(gpu()));
    check(
        Conductor::new(refused, gpu(), &mut |_, _| {}).err().unwrap(),
        &["(GPU 0), load", "capture", "Verify { width: 3 }"],
        start,
    );

    // In the middle of an answer: its thread ends, and the others wait in vain.
    let mut both = conductor(dir.path(), 2);
    both.begin(&ids(20), 0, &Sampling::default(), &Limits { end_ids: vec![], max_tokens: 100, context: 200 }).unwrap();
    both.prefill(&ids(19)).unwrap();
    let start = Instant::now();
    let error = both.each("step 10", |machine| match machine.ranks().rank {
        1 => Err(error::machine("killed")),
        _ => machine.verify(1).and_then(|()| machine.record()),
    });
    check(error.err().unwrap(), &["rank 1 (GPU 0), step 10, pass", "killed"], start);
    let start = Instant::now();
    check(both.verify(1).and_then(|()| both.record()).err().unwrap(), &["failed"], start);
    drop(both);
    assert!(start.elapsed().as_secs() < 2, "the end took {:?}", start.elapsed());
}

/// When a rank has failed and the caller hangs in a call, as it may in the driver's, the last resort has the line.
#[test]
fn a_caller_that_hangs_is_not_waited_for() {
    static SAID: Mutex<Option<String>> = Mutex::new(None);
    let said = || SAID.lock().unwrap().clone();
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    tiny8().write(dir.path());
    let end = |error: &anyhow::Error| -> ! {
        *SAID.lock().unwrap() = Some(format!("{} {error:#}", error::exit_code(error)));
        loop {
            thread::park();
        }
    };
    let hasty = Setup { last_resort: LastResort { after: Duration::from_millis(100), end }, ..setup(dir.path(), 2) };
    let mut both = Conductor::new(hasty, shim::gpu(), &mut |_, _| {}).unwrap();
    assert_eq!(said(), None);
    let start = Instant::now();
    let late = both.each("step 3", move |machine| {
        if machine.ranks().rank == 1 {
            return Err(error::machine("killed"));
        }
        while said().is_none() && start.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    });
    assert!(late.is_err());
    assert!(
        said().is_some_and(|line| line.starts_with("3 rank 1 (GPU 0), step 3, pass ") && line.ends_with(": killed")),
        "{:?}",
        said()
    );
}
