//! The GPU backend without a GPU: the same host code, plans, params and kernels, with the kernels compiled by g++
//! (scripts/shim.sh). What is compared: logits with the f32 reference, widths, chunks and graphs with each other to the
//! bit, and whole answers.
#[path = "support/drafter.rs"]
mod drafter;
#[path = "support/experts.rs"]
mod experts;
#[path = "support/quantised.rs"]
mod quantised;
#[path = "support/shim.rs"]
mod shim;
mod support;
#[path = "support/watching.rs"]
mod watching;

use drafter::{latent_draft_model, tiny_llama_drafter, whole_llama_drafter};
use experts::write_tiny8;
use quantised::{write_quantised, Scheme};
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use support::T0;
use volley::cmd::bench::token_ids;
use volley::cmd::{check, doctor};
use volley::cpu::Reference;
use volley::decode::{
    Backend, Counters, Drafting, Engine, Event, Finish, Flow, Limits, Probe, Request, Sampling, Sequence, MAX_DRAFTS,
};
use volley::gpu::device::Gpu;
use volley::gpu::machine::{Machine, Options, Slice};
use volley::gpu::shim::Shim;
use volley::gpu::weights::{Layout, Source};
use volley::model::checkpoint::{Checkpoint, Read};
use volley::model::claim::claim;
use volley::model::config::Config;
use volley::model::draft::DraftModel;
use volley::model::plan::{self, Owner, Pass, Ranks, Step};
use volley::model::table::Table;
use volley::model::weights::Weights;
use watching::{last_graphs, refusing, watched};

fn model(name: &str) -> (Config, Weights) {
    open(&Path::new("tests/data/tiny").join(name))
}

fn open(dir: &Path) -> (Config, Weights) {
    let config = Config::open(dir).unwrap();
    let checkpoint = Checkpoint::open(dir, Read::Mmap).unwrap();
    let weights = claim(&Table::builtin().unwrap(), &config, &checkpoint).unwrap();
    weights.load(&mut |_, _| {}).unwrap();
    (config, weights)
}

/// Without the graphs of some passes.
fn machine_without(name: &str, refuse: fn(Pass) -> bool) -> Machine {
    let (config, weights) = model(name);
    let gpu = refusing(&shim::gpu(), refuse);
    let options = Options { context: 200, drafter: None, ngram: false, require_graphs: false };
    Machine::new(gpu, config, Source::Checkpoint(&weights), options, &mut |_, _| {}).unwrap()
}

fn machine(name: &str) -> Machine {
    machine_without(name, |_| false)
}

fn reference(name: &str) -> Reference {
    let (config, weights) = model(name);
    Reference::new(config, weights, 200, None, false).unwrap()
}

/// A prompt of distinct ids.
fn prompt(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + 11) % 512).collect()
}

fn unlimited() -> Limits {
    Limits { end_ids: vec![], max_tokens: 1000, context: 200 }
}

/// Cache rows of `tokens` but the last, in chunks, then one verify pass of the last token and `drafts`; its logits, [1
/// + drafts, vocab].
fn logits(m: &mut Machine, tokens: &[u32], chunk: usize, drafts: &[u32]) -> Vec<f32> {
    m.begin(tokens, 0, &Sampling::default(), &unlimited()).unwrap();
    for chunk in tokens[..tokens.len() - 1].chunks(chunk) {
        m.prefill(chunk).unwrap();
    }
    m.set_drafts(drafts).unwrap();
    m.verify(1 + drafts.len()).unwrap();
    m.record().unwrap();
    m.logits(1 + drafts.len()).unwrap()
}

/// Logits of the machine near those of the f32 reference, for a prompt over a chunk edge of the KV cache.
fn near_the_reference(name: &str, m: &mut Machine) {
    let tokens: Vec<u32> = prompt(70).into_iter().map(|id| id % m.vocab() as u32).collect();
    let ours = logits(m, &tokens, 1024, &[]);
    let mut r = reference(name);
    r.begin(&tokens, 0, &Sampling::default(), &unlimited()).unwrap();
    r.prefill(&tokens[..63]).unwrap();
    r.prefill(&tokens[63..69]).unwrap();
    r.verify(1).unwrap();
    r.record().unwrap();
    let theirs = r.logits(1);
    let spread = theirs.iter().fold(0f32, |m, x| m.max(x.abs()));
    let worst = ours.iter().zip(theirs).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(ours.iter().all(|x| x.is_finite()) && spread > 1.0, "{name}: {spread}");
    assert!(worst < 0.5, "{name}: off by {worst}, logits up to {spread}");
}

/// A row's bits: the same in a pass of four rows and alone, after chunks of 1, 8 and all rows.
fn rows_do_not_depend_on_width_or_chunk(name: &str, m: &mut Machine) {
    let tokens: Vec<u32> = prompt(20).into_iter().map(|id| id % m.vocab() as u32).collect();
    let drafts: Vec<u32> = (0..3).map(|i| 200 + i).collect();
    let wide = logits(m, &tokens, 1024, &drafts); // the prefill kernels, then a pass of four rows
    let wide_kv = m.kv_rows(Owner::Target, 23).unwrap();
    let vocab = wide.len() / 4;
    for (i, chunk) in [(0, 1), (1, 1024), (3, 8)] {
        let mut all = tokens.clone();
        all.extend_from_slice(&drafts[..i]);
        let one = logits(m, &all, chunk, &[]); // chunks of 1 and 8 rows are the decode kernels
        assert!(
            one[..vocab].iter().zip(&wide[i * vocab..]).all(|(a, b)| a.to_bits() == b.to_bits()),
            "{name}: row {i}, chunk {chunk}"
        );
    }
    // The last pass wrote the same rows as the wide one.
    assert!(m.kv_rows(Owner::Target, 23).unwrap() == wide_kv, "{name}: KV bits");
    let rows: Vec<_> = wide.chunks_exact(vocab).collect();
    assert!((1..4).all(|i| rows[i] != rows[0]), "{name}: rows differ from each other");
}

/// The device's choice from its own logits is that of the reference sampler.
fn sampling_follows_the_reference(m: &mut Machine) {
    let warm = Sampling { temperature: 1.0, seed: 7, ..Sampling::default() };
    let cases = [
        Sampling::default(),
        warm.clone(),
        Sampling { top_k: 5, min_p: 0.02, ..warm.clone() },
        Sampling { top_p: 0.5, ..warm.clone() },
        Sampling { repetition_penalty: 1.3, presence_penalty: 0.5, frequency_penalty: 0.2, ..Sampling::default() },
        Sampling { logit_bias: vec![(300, 4.0)], min_tokens: 3, ..warm },
    ];
    let tokens = prompt(12);
    let plain = logits(m, &tokens, 1024, &[]);
    for sampling in &cases {
        m.begin(&tokens, 0, sampling, &unlimited()).unwrap();
        m.prefill(&tokens[..11]).unwrap();
        m.verify(1).unwrap();
        let chosen = m.record().unwrap().tokens;
        let mut sequence = Sequence::new(&tokens, 11, 512, sampling.clone(), unlimited());
        assert_eq!(chosen, sequence.accept(&mut plain.clone(), &[]).tokens, "{sampling:?}");
    }
}

fn answer(m: Machine, sampling: &Sampling, end_ids: &[u32], max_tokens: usize) -> (Vec<u32>, Finish, Counters) {
    let mut engine = Engine::new(Box::new(m), Drafting::default()).unwrap();
    let request = Request { prompt: &prompt(10), sampling, end_ids, max_tokens: Some(max_tokens) };
    let a = engine.generate(&request, &mut |_: Event| Flow::Go).unwrap();
    (a.tokens, a.finish, engine.counters())
}

#[test]
fn llama() {
    let mut m = machine("llama");
    near_the_reference("llama", &mut m);
    rows_do_not_depend_on_width_or_chunk("llama", &mut m);
    sampling_follows_the_reference(&mut m);
    let sampling = Sampling { temperature: 0.8, top_k: 40, top_p: 0.9, seed: 3, ..Sampling::default() };
    let (tokens, finish, counters) = answer(m, &sampling, &[], 6);
    assert_eq!((tokens.len(), finish, counters.eager), (6, Finish::Length, 0));
    assert!(counters.verify_replays >= 6);

    // O20: a capture that fails costs graphs, not tokens. An end token ends there.
    let (eager, finish, counters) =
        answer(machine_without("llama", |pass| pass == Pass::Verify { width: 1 }), &sampling, &[tokens[4]], 6);
    let n = 1 + tokens.iter().position(|t| *t == tokens[4]).unwrap();
    assert_eq!((&eager[..], finish), (&tokens[..n], Finish::Eos(tokens[4])));
    assert!(counters.eager >= n as u64, "{counters:?}");
}

#[test]
fn qwen2() {
    near_the_reference("qwen2", &mut machine("qwen2"));
}

#[test]
fn qwen3() {
    let mut m = machine("qwen3");
    near_the_reference("qwen3", &mut m);
    rows_do_not_depend_on_width_or_chunk("qwen3", &mut m);
}

/// Experts and latent attention.
#[test]
fn models_with_experts() {
    models(&["qwen3_moe", "deepseek_v3", "dsv3_mtp"]);
}

fn models(names: &[&str]) {
    for &name in names {
        let mut m = machine(name);
        let ids = token_ids(check::STEP_ROWS, m.vocab());
        println!(
            "{name}: {}",
            check::steps(&mut m, &mut reference(name), &ids).unwrap_or_else(|e| panic!("{name}: {e:#}"))
        );
        near_the_reference(name, &mut m);
        rows_do_not_depend_on_width_or_chunk(name, &mut m);
    }
}

/// The same in FP8 and INT4.
#[test]
fn models_with_quantised_experts() {
    models(&["dsv3_fp8", "kimi_k25_int4"]);
    // FP8 with a scale a row: routed experts, shared ones and attention.
    let dir = tempfile::tempdir().unwrap();
    write_tiny8(dir.path(), Some(Scheme::Fp8Channel));
    let (config, weights) = open(dir.path());
    let mut m = machine_of(dir.path(), false);
    let mut r = Reference::new(config, weights, 200, None, false).unwrap();
    let ids = token_ids(check::STEP_ROWS, m.vocab());
    println!("fp8 rows: {}", check::steps(&mut m, &mut r, &ids).unwrap_or_else(|e| panic!("fp8 rows: {e:#}")));
}

/// One rank of a model, alone: it has that rank's share of the weights and computes with it, whether a sum over ranks
/// costs nothing or time.
#[test]
fn a_slice_computes_alone() {
    let name = "kimi_k25_int4";
    let (config, weights) = model(name);
    let tokens: Vec<u32> = prompt(20).into_iter().map(|id| id % config.vocab as u32).collect();
    let run = |source: Source, comm_us| {
        let gpu = shim::gpu();
        let options = Options { context: 200, drafter: None, ngram: false, require_graphs: true };
        let slice = Slice { ranks: Ranks::new(1, 2), comm_us };
        let mut m = Machine::slice(gpu, slice, config.clone(), source, options, &mut |_, _| {}).unwrap();
        let took = m.time_verify(4, 100, 3).unwrap();
        assert!(
            took.iter().all(|ms| *ms >= comm_us.unwrap_or(0.0) * 2e-3 * config.n_layers as f64),
            "{name}: {took:?}"
        );
        let used = m.experts_used(4, 100).unwrap().unwrap();
        (logits(&mut m, &tokens, 1024, &[]), m.timings.weight_bytes, used)
    };
    let [(at_once, bytes, _), (added, _, _)] =
        [None, Some(30.0)].map(|comm_us| run(Source::Checkpoint(&weights), comm_us));
    // A sum on its way is rounded to bf16.
    let spread = at_once.iter().fold(0f32, |m, x| m.max(x.abs()));
    let worst = at_once.iter().zip(&added).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(
        at_once.len() == config.vocab / 2 && worst > 0.0 && worst < 0.05 * spread,
        "{name}: off by {worst}, logits up to {spread}"
    );
    // Random weights: as many bytes, numbers of the right size, and experts as if each row chose evenly (10.9 of 16).
    let (logits, random_bytes, used) = run(Source::Random(0), None);
    let size = (logits.iter().map(|x| x * x).sum::<f32>() / logits.len() as f32).sqrt();
    assert!(random_bytes == bytes && size > 0.3 && size < 3.0 && (9.0..13.0).contains(&used), "{size}, {used} experts");
    let whole = machine(name).timings.weight_bytes;
    assert!(bytes < whole && 2 * bytes > whole, "{name}: {bytes} of {whole} bytes");
}

fn machine_of(dir: &Path, fp8_dense: bool) -> Machine {
    let (config, weights) = open(dir);
    let options = Options { context: 200, drafter: None, ngram: false, require_graphs: false };
    let config = Config { fp8_dense, ..config };
    Machine::new(shim::gpu(), config, Source::Checkpoint(&weights), options, &mut |_, _| {}).unwrap()
}

/// Two machines compute the same but for a fiftieth of the size of their logits.
fn nearly_the_same(what: &str, a: &mut Machine, b: &mut Machine) {
    let tokens = prompt(30);
    let (expected, found) = (logits(a, &tokens, 1024, &[]), logits(b, &tokens, 1024, &[]));
    let size = |x: &mut dyn Iterator<Item = f32>| x.map(|x| x * x).sum::<f32>().sqrt();
    let error = size(&mut expected.iter().zip(&found).map(|(a, b)| a - b)) / size(&mut expected.iter().copied());
    println!("{what}: logits off by {error:.4} of their size");
    assert!(error < 0.02, "{what}: off by {error} of their size");
}

fn t0_of_gpus() -> T0 {
    T0::new().set("hidden_size", 128).set("intermediate_size", 200).set("head_dim", 64).tied(true)
}

/// Linear layers of every stored format, in passes of one row and of 16: the numbers of their plain copy, the same bits
/// at every width and chunk.
#[test]
fn quantised_linears() {
    for scheme in [Scheme::Int4(32), Scheme::Fp8Channel, Scheme::Fp8Block(8, 32)] {
        let (stored, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write_quantised(&t0_of_gpus(), scheme, stored.path(), plain.path());
        let name = format!("{scheme:?}");
        let mut m = machine_of(stored.path(), false);
        nearly_the_same(&name, &mut machine_of(plain.path(), false), &mut m);
        rows_do_not_depend_on_width_or_chunk(&name, &mut m);
    }
}

/// Plain matrices as FP8: of numbers that come from FP8 in the same blocks, the same logits as from their codes, less
/// what the rounding of a scale costs; the same bits at every width and chunk; fewer bytes, shared experts beside INT4
/// included.
#[test]
fn fp8_dense() {
    let (stored, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_quantised(&t0_of_gpus(), Scheme::Fp8Block(8, 32), stored.path(), plain.path());
    nearly_the_same("fp8 of plain", &mut machine_of(stored.path(), false), &mut machine_of(plain.path(), true));

    let kimi = Path::new("tests/data/tiny/kimi_k25_int4");
    let mut m = machine_of(kimi, true);
    rows_do_not_depend_on_width_or_chunk("kimi_k25_int4", &mut m);
    assert!(m.timings.weight_bytes < machine_of(kimi, false).timings.weight_bytes);
}

/// Bytes of one rank of eight in GPU memory, of models that only such machines hold: experts, and up to 8 GB for all
/// else.
#[test]
fn shares_of_large_models() {
    for (name, experts_gb) in [("kimi-k2.5", 71.34), ("deepseek-v3", 83.01), ("qwen3-30b-a3b", 7.25)] {
        let config = Config::open(&Path::new("tests/shapes").join(name)).unwrap();
        let plan = plan::target(&config, Pass::Verify { width: 1 }, Ranks::new(0, 8), &[]).unwrap();
        let gb = Layout::of(&[&plan], config.vocab, Vec::new()).unwrap().bytes() as f64 / 1e9;
        println!("{name}: {gb:.2} GB");
        assert!(gb > experts_gb && gb < experts_gb + 8.0, "{name}: {gb} GB");
    }
}

#[test]
fn o20_require_graphs_refuses() {
    let (config, weights) = model("llama");
    let gpu = refusing(&shim::gpu(), |pass| pass == Pass::Prefill { rows: 64 });
    let options = Options { context: 200, drafter: None, ngram: false, require_graphs: true };
    let error = Machine::new(gpu, config, Source::Checkpoint(&weights), options, &mut |_, _| {}).err().unwrap();
    assert!(format!("{error:#}").contains("Prefill { rows: 64 }"), "{error:#}");
}

/// One warning for each graph says which and why, on stderr: in a process of its own, so that it can be read.
#[test]
fn o20_one_warning_names_the_graph() {
    const INNER: &str = "VOLLEY_TEST_WITHOUT_GRAPHS";
    if std::env::var_os(INNER).is_some() {
        machine_without("llama", |pass| matches!(pass, Pass::Verify { width: 3 } | Pass::Prefill { rows: 64 }));
        return;
    }
    let mut inner = Command::new(std::env::current_exe().unwrap());
    let inner =
        inner.args(["--exact", "o20_one_warning_names_the_graph", "--nocapture"]).env(INNER, "1").output().unwrap();
    let text = String::from_utf8(inner.stderr).unwrap();
    let mut warnings: Vec<&str> = text.lines().filter(|line| line.contains("warning")).collect();
    warnings.sort();
    let expected = ["Prefill { rows: 64 }", "Verify { width: 3 }"].map(|graph| {
        format!("warning: the graph of {graph} was not captured (refused by the test); it runs launch by launch, with the same tokens")
    });
    assert_eq!((inner.status.success(), warnings), (true, expected.iter().map(String::as_str).collect()), "{text}");
}

/// What a profiler would count: a graph for a verify pass, one for a whole chain of drafts, and no launch beside them.
#[test]
fn o20_a_cycle_is_two_graphs() {
    let (config, weights) = model("llama");
    let driver = Rc::new(Shim::open(shim::library()).unwrap());
    let drafter = Some(tiny_llama_drafter(&config, &weights, true));
    let options = Options { context: 200, drafter, ngram: true, require_graphs: true };
    let mut m =
        Machine::new(Gpu::new(driver.clone()), config, Source::Checkpoint(&weights), options, &mut |_, _| {}).unwrap();
    let tokens = prompt(10);
    m.begin(&tokens, 0, &Sampling::default(), &unlimited()).unwrap();
    m.prefill(&tokens[..9]).unwrap();
    let mut width = 1;
    for drafts in [5, 1, 3, 5, 2] {
        let (launches, graphs) = driver.asked();
        m.verify(width).unwrap();
        assert_eq!(driver.asked(), (launches, graphs + 1), "verify of {width}");
        m.draft(drafts).unwrap();
        assert_eq!(driver.asked(), (launches, graphs + 2), "{drafts} drafts");
        m.record().unwrap();
        assert_eq!(driver.asked(), (launches, graphs + 2));
        width = 1 + drafts;
    }
}

/// What a graph launches is the list that was lowered for it, as long as that: of every pass, choice and context
/// bucket.
#[test]
fn graphs_are_their_lists() {
    let with_drafter = |name: &str, mtp| {
        let (config, weights) = model(name);
        let drafter = match mtp {
            None => tiny_llama_drafter(&config, &weights, true),
            Some(mtp) => latent_draft_model(&Path::new("tests/data/tiny").join(name), &config, &weights, mtp),
        };
        let options = Options { context: 3000, drafter: Some(drafter), ngram: true, require_graphs: true };
        let gpu = watched(&shim::gpu());
        Machine::new(gpu, config, Source::Checkpoint(&weights), options, &mut |_, _| {}).unwrap()
    };
    for (name, mtp) in [("llama", None), ("dsv3_mtp", Some(true)), ("kimi_k25_int4", Some(false))] {
        let lists = with_drafter(name, mtp).lists().unwrap();
        let listed: Vec<usize> = lists.iter().map(|(_, ops)| ops.len()).collect();
        assert!(lists.len() > 50, "{name}: {} graphs", lists.len());
        assert_eq!(last_graphs(lists.len()), listed, "{name}: {:?}", lists.iter().map(|l| l.0).collect::<Vec<_>>());
    }
}

/// What `volley doctor` checks, on one of the models that it makes: biases, heads of 128, sizes that do not divide
/// evenly. A reference that computes something else must fail, at the first step where that shows.
#[test]
fn checks_of_doctor_hold_and_can_fail() {
    let dir = tempfile::tempdir().unwrap();
    doctor::SHAPES[2].write(dir.path()).unwrap();
    let (config, weights) = open(dir.path());
    let ids = token_ids(check::STEP_ROWS, config.vocab);
    let gpu = shim::gpu();
    let options = Options { context: 200, drafter: None, ngram: false, require_graphs: true };
    let mut m = Machine::new(gpu, config.clone(), Source::Checkpoint(&weights), options, &mut |_, _| {}).unwrap();
    let hold = |held: anyhow::Result<String>| println!("{}", held.unwrap_or_else(|e| panic!("{e:#}")));
    hold(check::widths(&mut m, &ids[..72]));
    hold(check::chunks(&mut m, &ids[..20]));

    type Spoil = fn(&mut Config);
    let cases: [(Spoil, Option<&str>); 3] = [
        (|_| {}, None),
        (|c| c.rope.theta = 5e5, Some("layers.0.attention")),
        (|c| c.qkv_bias = false, Some("layers.0.qkv")),
    ];
    for (spoil, wrong) in cases {
        let mut other = config.clone();
        spoil(&mut other);
        let mut r = Reference::new(other, open(dir.path()).1, 200, None, false).unwrap();
        match (check::steps(&mut m, &mut r, &ids), wrong) {
            (held, None) => hold(held),
            (held, Some(step)) => assert!(held.unwrap_err().to_string().contains(&format!(", {step}, row")), "{step}"),
        }
    }
}

/// `n` tokens after a prompt, in passes of 1 + `drafts` rows: drafts of the drafter, or whatever n-gram search finds.
/// Also the widest pass.
fn cycles(m: &mut Machine, sampling: &Sampling, drafts: usize, ngram: bool, n: usize) -> (Vec<u32>, usize) {
    let tokens = prompt(10);
    m.begin(&tokens, 0, sampling, &unlimited()).unwrap();
    m.prefill(&tokens[..9]).unwrap();
    let (mut all, mut widest, mut width) = (Vec::new(), 1, 1);
    while all.len() < n {
        m.verify(width).unwrap();
        if drafts > 0 {
            m.draft(drafts).unwrap();
        }
        let record = m.record().unwrap();
        width = 1 + if ngram { record.ngram.min(3) } else { drafts };
        widest = widest.max(width);
        all.extend(record.tokens);
    }
    all.truncate(n);
    (all, widest)
}

/// The drafter's logits at every step of a chain, each draft given: near those of the reference, whatever norms it has;
/// and draft-extend leaves what a prompt of the same text leaves.
#[test]
fn drafters_compute_what_the_reference_computes() {
    for (case, name) in ["llama", "llama", "dsv3_mtp", "kimi_k25_int4", "llama"].into_iter().enumerate() {
        let (config, weights) = model(name);
        let drafter = || Some(draft_model(case, name, &config, &weights));
        let gpu = shim::gpu();
        let options = Options { context: 200, drafter: drafter(), ngram: true, require_graphs: false };
        let mut m = Machine::new(gpu, config.clone(), Source::Checkpoint(&weights), options, &mut |_, _| {}).unwrap();
        let (drafter, again) = (drafter(), model(name));
        let mut r = Reference::new(again.0, again.1, 200, drafter, false).unwrap();
        let tokens: Vec<u32> = prompt(20).into_iter().map(|id| id % config.vocab as u32).collect();
        for backend in [&mut m as &mut dyn Backend, &mut r] {
            backend.begin(&tokens, 0, &Sampling::default(), &unlimited()).unwrap();
            backend.prefill(&tokens[..19]).unwrap();
            backend.verify(1).unwrap();
        }
        let root = r.record().unwrap().tokens;
        assert_eq!(m.record().unwrap().tokens, root);
        let mut expected: Vec<Vec<f32>> = Vec::new();
        r.run(Pass::Draft { width: MAX_DRAFTS + 1, drafts: 3 }, &root, 19, &mut |step, out, _| {
            if let Step::DraftToken { .. } = step {
                expected.push(out.to_vec());
            }
        })
        .unwrap();
        let drafts = r.drafts().to_vec();
        let mut n = 0;
        m.run_draft(3, &mut |draft, logits| {
            n += 1;
            let expected = &expected[draft - 1];
            let spread = expected.iter().fold(0f32, |m, x| m.max(x.abs()));
            let worst = logits.iter().zip(expected).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(
                spread > 0.5 && worst < 0.02 * spread,
                "{name}, drafter {case}, draft {draft}: off by {worst}, logits up to {spread}"
            );
            drafts[draft - 1]
        })
        .unwrap();
        assert_eq!(n, 3);
        if case == 4 {
            continue; // another head leaves the same cache
        }
        println!(
            "{}",
            check::extends(&mut m, &token_ids(20, config.vocab), 8)
                .unwrap_or_else(|e| panic!("{name}, drafter {case}: {e:#}"))
        );
    }
}

/// Without norms that flags add, and with them; the model's own layer; latent attention; a head of the whole
/// vocabulary, truncated.
fn draft_model(case: usize, name: &str, config: &Config, weights: &Weights) -> DraftModel {
    match case {
        0 | 1 => tiny_llama_drafter(config, weights, case == 1),
        4 => whole_llama_drafter(config, weights)
            .truncate((0..config.vocab as u32).filter(|id| id % 3 == 1).collect())
            .unwrap(),
        _ => latent_draft_model(&Path::new("tests/data/tiny").join(name), config, weights, case == 2),
    }
}

/// Targets with experts and latent attention, plain and quantised, with both kinds of drafters for them.
#[test]
fn drafts_of_models_with_experts_do_not_change_the_text() {
    for (name, mtp) in [("dsv3_mtp", true), ("dsv3_fp8", false)] {
        let (config, weights) = model(name);
        let drafter = Some(latent_draft_model(&Path::new("tests/data/tiny").join(name), &config, &weights, mtp));
        let gpu = shim::gpu();
        let ids = token_ids(40, config.vocab);
        let options = Options { context: 200, drafter, ngram: true, require_graphs: true };
        let mut m = Machine::new(gpu, config, Source::Checkpoint(&weights), options, &mut |_, _| {}).unwrap();
        println!("{name}: {}", check::speculation(&mut m, &ids, 8, true).unwrap_or_else(|e| panic!("{name}: {e:#}")));
    }
}

#[test]
fn drafts_change_the_passes_and_not_the_text() {
    let (config, weights) = model("llama");
    let gpu = shim::gpu();
    let drafter = Some(tiny_llama_drafter(&config, &weights, true));
    let options = Options { context: 200, drafter, ngram: true, require_graphs: false };
    let mut m = Machine::new(gpu, config, Source::Checkpoint(&weights), options, &mut |_, _| {}).unwrap();
    for sampling in [Sampling::default(), Sampling { temperature: 0.8, seed: 5, ..Sampling::default() }] {
        let (plain, _) = cycles(&mut m, &sampling, 0, false, 12);
        let (drafted, _) = cycles(&mut m, &sampling, 3, false, 12);
        assert_eq!(plain, drafted, "{sampling:?}");
        // A bias that leaves one choice makes a loop, which n-gram search must find.
        let looping = Sampling { logit_bias: vec![(7, 1000.0)], ..sampling };
        let (plain, _) = cycles(&mut m, &looping, 0, false, 12);
        let (matched, widest) = cycles(&mut m, &looping, 0, true, 12);
        assert_eq!((plain, widest), (matched, 4), "{looping:?}");
    }
}
