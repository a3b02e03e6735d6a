//! The f32 reference against transformers' own f32 runs, and against itself: how many rows share a pass must not show
//! in any bit.
//!
//! Golden data: tests/data/tiny (scripts/make_tiny.py; random weights, logits and hidden states of every position) and
//! tests/data/golden (scripts/make_golden.py; SmolLM2, greedy continuations and top-5 logits). Each feature has a
//! negative control: dropping it must show.
#[path = "support/smollm2.rs"]
mod smollm2;

use smollm2::{data, smollm2};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use volley::cpu::Reference;
use volley::decode::{Drafting, Engine, Flow, Request, Sampling};
use volley::model::checkpoint::{Checkpoint, Read};
use volley::model::claim::claim;
use volley::model::config::{Config, Routing};
use volley::model::plan::{Owner, Pass, Step, MAX_WIDTH};
use volley::model::role::Role;
use volley::model::rope::RopeScaling;
use volley::model::table::Table;

/// Largest error of a logit or hidden state of the tiny models; their logits have a standard deviation of about 3.
const TINY_TOLERANCE: f32 = 1e-4;
/// The same for SmolLM2's top-5 logits, which lie between 10 and 30. transformers differs from itself by up to 1.2e-4
/// there.
const SMOLLM2_TOLERANCE: f32 = 5e-4;

const TINY: [&str; 5] = ["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"];
/// Checkpoints with quantised weights; their logits have a standard deviation of about 0.4.
const QUANTISED: [&str; 2] = ["kimi_k25_int4", "dsv3_fp8"];

#[test]
fn tiny_models_compute_what_transformers_computes() {
    for arch in TINY {
        for dialect in ["config.json", "config_v5.json"] {
            let tiny = Tiny::open(arch);
            let config = tiny.config(dialect);
            let n_layers = config.n_layers;
            let (hidden, eps) = (config.hidden, config.norm_eps);
            let seen = observe(&mut tiny.reference(config), &tiny.all_ids());
            let n = tiny.input_ids.len();

            close(
                &format!("{arch} {dialect} prompt logits"),
                &seen.logits[..n * tiny.vocab],
                &tiny.floats("prompt_logits"),
                TINY_TOLERANCE,
            );
            let greedy = &seen.logits[(n - 1) * tiny.vocab..];
            close(&format!("{arch} {dialect} greedy logits"), greedy, &tiny.floats("greedy_logits"), TINY_TOLERANCE);

            // [layers + 1, prompt, hidden]: the embedding, then after each layer; the last one is after the final norm.
            let golden = tiny.floats("hidden_states");
            for (i, golden) in golden.chunks_exact(n * hidden).enumerate() {
                let mut ours = seen.hidden[i][..n * hidden].to_vec();
                if i == n_layers {
                    ours.chunks_exact_mut(hidden).for_each(|row| rms_norm(row, &tiny.final_norm, eps));
                }
                close(&format!("{arch} {dialect} hidden state {i}"), &ours, golden, TINY_TOLERANCE);
            }
        }
    }
}

/// Golden values are those of transformers on weights dequantised in f32. Norm weights, biases and scales all show: see
/// tests/quant.rs.
#[test]
fn quantised_models_compute_what_transformers_computes() {
    for name in QUANTISED {
        let dir = data("tiny").join(name);
        let tensors = std::fs::read(dir.join("golden.safetensors")).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&tensors).unwrap();
        let ints = |name: &str| -> Option<Vec<u32>> {
            let tensor = tensors.tensor(name).ok()?;
            Some(tensor.data().chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect())
        };
        let logits = tensors.tensor("logits").unwrap();
        let logits: Vec<f32> =
            logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let ids = ints("ids").unwrap();
        let mut reference = open(&dir, Config::open(&dir).unwrap(), 256);
        close(&format!("{name} logits"), &observe(&mut reference, &ids).logits, &logits, TINY_TOLERANCE);
        if let Some(all) = ints("gen") {
            let mut engine = Engine::new(Box::new(reference), Drafting::default()).unwrap();
            assert_eq!(greedy(&mut engine, &ids, all.len() - ids.len()), all[ids.len()..], "{name}");
        }
    }
}

/// Far from the start of a text, where kinds of rope differ: tests/data/rope/make_logits.py has an independent program,
/// itself checked against transformers.
#[test]
fn o06_logits_far_from_the_start_follow_the_kind_of_rope() {
    let golden: serde_json::Value =
        serde_json::from_slice(&std::fs::read(data("rope").join("logits.json")).unwrap()).unwrap();
    let ids: Vec<u32> = serde_json::from_value(golden["input_ids"].clone()).unwrap();
    let tiny = Tiny::open("llama");
    let mut last = Vec::new();
    for case in golden["cases"].as_array().unwrap() {
        for spelling in ["rope_type", "type"] {
            let mut config: serde_json::Value =
                serde_json::from_slice(&std::fs::read(tiny.dir.join("config.json")).unwrap()).unwrap();
            config["rope_scaling"] = case["scaling"].clone();
            if let Some(scaling) = config["rope_scaling"].as_object_mut() {
                let kind = scaling.remove("rope_type").unwrap();
                scaling.insert(spelling.into(), kind);
            }
            let seen = observe(&mut tiny.reference(Config::parse(&config.to_string(), None).unwrap()), &ids);
            for row in case["rows"].as_array().unwrap() {
                let position = row["position"].as_u64().unwrap() as usize;
                let logits = &seen.logits[position * tiny.vocab..][..tiny.vocab];
                let best: Vec<usize> = serde_json::from_value(row["ids"].clone()).unwrap();
                let expected: Vec<f32> = serde_json::from_value(row["logits"].clone()).unwrap();
                let ours: Vec<f32> = best.iter().map(|&id| logits[id]).collect();
                close(&format!("{} at {position}", case["kind"]), &ours, &expected, TINY_TOLERANCE);
                assert!(logits.iter().all(|l| *l <= ours[0]), "{} at {position}: another best id", case["kind"]);
            }
            last.push(seen.logits);
        }
    }
    assert!(last.len() == 8 && last[0] == last[1] && last[0] != last[2] && last[2] != last[4] && last[4] != last[6]);
}

#[test]
fn tiny_models_continue_as_transformers_does() {
    for arch in TINY {
        let tiny = Tiny::open(arch);
        let mut engine =
            Engine::new(Box::new(tiny.reference(tiny.config("config.json"))), Drafting::default()).unwrap();
        assert_eq!(greedy(&mut engine, &tiny.input_ids, tiny.greedy_ids.len()), tiny.greedy_ids, "{arch}");
    }
}

/// Without a feature the logits must move, and by as much as they move in transformers where make_tiny.py measured that
/// ("sensitivity").
#[test]
fn a_dropped_feature_shows() {
    type Drop = fn(&mut Config);
    fn routing(c: &mut Config) -> &mut Routing {
        &mut c.experts.as_mut().unwrap().routing
    }
    let cases: [(&str, &str, Drop); 15] = [
        ("llama", "no_rope_scaling", |c| c.rope.scaling = RopeScaling::Default),
        ("llama", "rope_theta_500000", |c| c.rope.theta = 5e5),
        ("qwen2", "no_qkv_bias", |c| c.qkv_bias = false),
        ("qwen2", "rope_theta_10000", |c| c.rope.theta = 1e4),
        ("qwen3", "no_qk_norm", |c| c.qk_norm = false),
        ("qwen3", "rope_theta_10000", |c| c.rope.theta = 1e4),
        ("qwen3_moe", "no_norm_topk_prob", |c| routing(c).normalised = false),
        ("qwen3_moe", "top_1", |c| routing(c).top_k = 1),
        ("deepseek_v3", "no_rope_scaling", |c| c.rope.scaling = RopeScaling::Default),
        ("deepseek_v3", "no_mscale_in_softmax", |c| match &mut c.rope.scaling {
            RopeScaling::Yarn { mscale_all_dim, attention_factor, .. } => {
                (*mscale_all_dim, *attention_factor) = (None, Some(1.0))
            }
            _ => unreachable!(),
        }),
        ("deepseek_v3", "rope_halves_not_pairs", |c| c.latent.as_mut().unwrap().interleaved = false),
        ("deepseek_v3", "no_groups", |c| (routing(c).n_groups, routing(c).top_groups) = (1, 1)),
        ("deepseek_v3", "no_norm_topk_prob", |c| routing(c).normalised = false),
        ("deepseek_v3", "routed_scaling_1", |c| routing(c).scale = 1.0),
        ("deepseek_v3", "no_shared_expert", |c| c.experts.as_mut().unwrap().shared_dim = 0),
    ];
    for (arch, feature, drop) in cases {
        let tiny = Tiny::open(arch);
        let mut config = tiny.config("config.json");
        drop(&mut config);
        let seen = observe(&mut tiny.reference(config), &tiny.input_ids);
        let (moved, _) = worst(&seen.logits, &tiny.floats("prompt_logits"));
        match tiny.sensitivity.get(feature) {
            Some(expected) => assert!(
                (moved - expected).abs() < 1.5e-3,
                "{arch} {feature}: logits move by {moved}, expected {expected}"
            ),
            None => assert!(moved > 0.5, "{arch} {feature}: logits move by {moved} only"),
        }
    }
}

#[test]
fn smollm2_continues_as_transformers_does() {
    let Some(dir) = smollm2() else { return };
    let mut engine = Engine::new(Box::new(open(&dir, Config::open(&dir).unwrap(), 1024)), Drafting::default()).unwrap();
    let goldens = SmolGolden::all(&dir);
    assert_eq!(goldens.len(), 8);
    for golden in goldens {
        let tokens = greedy(&mut engine, &golden.prompt_ids, golden.greedy_ids.len());
        let same = tokens.iter().zip(&golden.greedy_ids).take_while(|(a, b)| a == b).count();
        assert_eq!(same, 64, "{}: the first {same} of 64 greedy tokens agree", golden.name);
    }
}

#[test]
fn smollm2_has_the_top_logits_of_transformers() {
    let Some(dir) = smollm2() else { return };
    let config = Config::open(&dir).unwrap();
    let vocab = config.vocab;
    let mut reference = open(&dir, config, 1024);
    for golden in SmolGolden::all(&dir) {
        // The first prompt positions, and the last prompt token with the first greedy ones, as two verify passes.
        let prompt = &golden.prompt_ids;
        let rows = golden.prompt_top5.len();
        reference.run(Pass::Verify { width: rows }, &prompt[..rows], 0, &mut |_, _, _| {}).unwrap();
        let first = reference.logits(rows).to_vec();
        let last = prompt.len() - 1;
        if last > rows {
            reference.run(Pass::Prefill { rows: last - rows }, &prompt[rows..last], rows, &mut |_, _, _| {}).unwrap();
        }
        let steps = golden.greedy_top5.len();
        let tokens = [&prompt[last..], &golden.greedy_ids[..steps - 1]].concat();
        reference.run(Pass::Verify { width: steps }, &tokens, last, &mut |_, _, _| {}).unwrap();
        let all = first
            .chunks_exact(vocab)
            .zip(&golden.prompt_top5)
            .chain(reference.logits(steps).chunks_exact(vocab).zip(&golden.greedy_top5));
        for (i, (logits, top)) in all.enumerate() {
            let ours: Vec<f32> = top.ids.iter().map(|&id| logits[id as usize]).collect();
            close(&format!("{} top 5 of row {i}", golden.name), &ours, &top.logits, SMOLLM2_TOLERANCE);
            let others = logits.iter().enumerate().filter(|(id, _)| !top.ids.contains(&(*id as u32))).map(|(_, &l)| l);
            let best = others.fold(f32::NEG_INFINITY, f32::max);
            assert!(
                best < top.logits[4] + SMOLLM2_TOLERANCE,
                "{} row {i}: a sixth token has logit {best}",
                golden.name
            );
        }
    }
}

/// A prompt in one chunk and in chunks of 1, 7 and 64 leaves the same keys, values and logits, to the bit.
#[test]
fn chunks_of_a_prompt_do_not_show() {
    for (name, mut reference, ids, shape) in models(200) {
        let n = ids.len() - 1;
        let mut whole = None;
        for chunk in [n, 1, 7, 64] {
            prefill(&mut reference, &ids[..n], chunk);
            reference.run(Pass::Verify { width: 1 }, &ids[n..], n, &mut |_, _, _| {}).unwrap();
            let bits = State::of(&reference, shape, n + 1, 1);
            sane(&format!("{name} keys and values"), &bits.kv, shape.head_dim);
            match &whole {
                None => whole = Some(bits),
                Some(whole) => assert_eq!(whole.differs(&bits), None, "{name}: chunks of {chunk} against one chunk"),
            }
        }
        // Negative control: another token early in the prompt must show in all three.
        let mut other = ids.clone();
        other[3] = other[4] + 1;
        prefill(&mut reference, &other[..n], 64);
        reference.run(Pass::Verify { width: 1 }, &other[n..], n, &mut |_, _, _| {}).unwrap();
        assert!(
            whole.unwrap().differs(&State::of(&reference, shape, n + 1, 1)).is_some(),
            "{name}: another prompt left the same bits"
        );
    }
}

/// Rows of one verify pass equal the same tokens one at a time, to the bit, for every width and across the edges of KV
/// chunks.
#[test]
fn the_width_of_a_verify_pass_does_not_show() {
    for (name, mut reference, ids, shape) in models(64 + 2 * MAX_WIDTH) {
        let first = 64 - MAX_WIDTH / 2;
        prefill(&mut reference, &ids[..first], 64);
        let mut one_by_one = Vec::new();
        for position in first..first + MAX_WIDTH {
            reference.run(Pass::Verify { width: 1 }, &ids[position..=position], position, &mut |_, _, _| {}).unwrap();
            one_by_one.extend_from_slice(reference.logits(1));
        }
        sane(&format!("{name} logits"), &one_by_one, shape.vocab);
        let kv = State::of(&reference, shape, first + MAX_WIDTH, 1).kv;
        for width in 2..=MAX_WIDTH {
            reference.run(Pass::Verify { width }, &ids[first..first + width], first, &mut |_, _, _| {}).unwrap();
            assert_eq!(
                first_difference(reference.logits(width), &one_by_one[..width * shape.vocab]),
                None,
                "{name}: logits at width {width}"
            );
        }
        assert_eq!(
            first_difference(&State::of(&reference, shape, first + MAX_WIDTH, 1).kv, &kv),
            None,
            "{name}: keys and values"
        );
        assert!(first_difference(&one_by_one[..shape.vocab], &one_by_one[shape.vocab..2 * shape.vocab]).is_some());
    }
}

/// A tiny checkpoint and what transformers computes with it.
struct Tiny {
    dir: PathBuf,
    vocab: usize,
    input_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    sensitivity: BTreeMap<String, f32>,
    tensors: Vec<u8>,
    final_norm: Vec<f32>, // [hidden]
}

impl Tiny {
    fn open(arch: &str) -> Tiny {
        #[derive(serde::Deserialize)]
        struct Golden {
            input_ids: Vec<u32>,
            greedy_ids: Vec<u32>,
            sensitivity: BTreeMap<String, f32>,
        }
        let dir = data("tiny").join(arch);
        let golden: Golden = serde_json::from_slice(&std::fs::read(dir.join("golden.json")).unwrap()).unwrap();
        let checkpoint = Checkpoint::open(&dir, Read::Mmap).unwrap();
        let norm = checkpoint.get("model.norm.weight").unwrap().bytes();
        let final_norm = norm.chunks_exact(2).map(|b| half::bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
        Tiny {
            vocab: 512,
            input_ids: golden.input_ids,
            greedy_ids: golden.greedy_ids,
            sensitivity: golden.sensitivity,
            tensors: std::fs::read(dir.join("golden.safetensors")).unwrap(),
            final_norm,
            dir,
        }
    }

    fn config(&self, dialect: &str) -> Config {
        Config::parse(&std::fs::read_to_string(self.dir.join(dialect)).unwrap(), None).unwrap()
    }

    fn reference(&self, config: Config) -> Reference {
        open(&self.dir, config, 256)
    }

    /// Prompt and greedy tokens but the last, which nothing follows.
    fn all_ids(&self) -> Vec<u32> {
        [&self.input_ids[..], &self.greedy_ids[..self.greedy_ids.len() - 1]].concat()
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let tensors = safetensors::SafeTensors::deserialize(&self.tensors).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

#[derive(serde::Deserialize)]
struct SmolGolden {
    name: String,
    manifest_files: BTreeMap<String, String>,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    prompt_top5: Vec<Top>, // first 16 prompt positions
    greedy_top5: Vec<Top>, // first 16 greedy steps
}

#[derive(serde::Deserialize)]
struct Top {
    ids: Vec<u32>,
    logits: Vec<f32>,
}

impl SmolGolden {
    /// Every golden file; they must have been made from the very weights in `dir`.
    fn all(dir: &Path) -> Vec<SmolGolden> {
        let manifest: serde_json::Value =
            serde_json::from_slice(&std::fs::read(dir.join("MANIFEST.json")).unwrap()).unwrap();
        let files = std::fs::read_dir(data("golden")).unwrap().map(|e| e.unwrap().path());
        let goldens: Vec<SmolGolden> =
            files.map(|f| serde_json::from_slice(&std::fs::read(f).unwrap()).unwrap()).collect();
        for golden in &goldens {
            let (want, got) = (&golden.manifest_files["model.safetensors"], &manifest["files"]["model.safetensors"]);
            assert_eq!(
                want, got,
                "{}: made from other weights; scripts/fetch_smollm2.py --force makes the right ones",
                golden.name
            );
        }
        goldens
    }
}

/// The checkpoint in `dir` with a config that may differ from its own: claimed by its own (but for the order of rope's
/// rows, which is no matter of names and shapes), computed by the given one.
fn open(dir: &Path, config: Config, context: usize) -> Reference {
    let checkpoint = Checkpoint::open(dir, Read::Mmap).unwrap();
    let own = Config { latent: config.latent, ..Config::open(dir).unwrap() };
    let weights = claim(&Table::builtin().unwrap(), &own, &checkpoint).unwrap();
    Reference::new(config, weights, context, None, false).unwrap()
}

/// What the reference shows of the passes over `ids`, which start at an empty cache.
struct Seen {
    logits: Vec<f32>,      // [ids, vocab]
    hidden: Vec<Vec<f32>>, // [layers + 1][ids, hidden]: the embedding, then after each layer
}

fn observe(reference: &mut Reference, ids: &[u32]) -> Seen {
    let mut seen = Seen { logits: Vec::new(), hidden: Vec::new() };
    for (block, tokens) in ids.chunks(8).enumerate() {
        let mut show = |step: &Step, out: &mut [f32], _dim: usize| {
            let layer = match step {
                Step::Embed { .. } => 0,
                Step::Linear(l) if l.weight.role == Role::Down => l.weight.layer.unwrap() + 1,
                Step::ExpertsDown(m) => m.down.layer.unwrap() + 1,
                Step::Linear(l) if l.weight.role == Role::Head => return seen.logits.extend_from_slice(out),
                _ => return,
            };
            seen.hidden.resize(seen.hidden.len().max(layer + 1), Vec::new());
            seen.hidden[layer].extend_from_slice(out);
        };
        reference.run(Pass::Verify { width: 8 }, tokens, block * 8, &mut show).unwrap();
    }
    seen
}

fn greedy(engine: &mut Engine, prompt: &[u32], n: usize) -> Vec<u32> {
    engine.clear();
    let request = Request { prompt, sampling: &Sampling::default(), end_ids: &[], max_tokens: Some(n) };
    engine.generate(&request, &mut |_| Flow::Go).unwrap().tokens
}

fn rms_norm(row: &mut [f32], weight: &[f32], eps: f32) {
    let mean = row.iter().map(|&x| x as f64 * x as f64).sum::<f64>() / row.len() as f64;
    let inv = 1.0 / (mean + eps as f64).sqrt();
    row.iter_mut().zip(weight).for_each(|(x, w)| *x = (*x as f64 * inv) as f32 * w);
}

/// The largest absolute difference and where it is; a NaN differs infinitely.
fn worst(ours: &[f32], golden: &[f32]) -> (f32, usize) {
    assert_eq!(ours.len(), golden.len());
    let differences =
        ours.iter().zip(golden).map(|(a, b)| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() });
    differences.enumerate().fold((0.0, 0), |worst, (i, d)| if d > worst.0 { (d, i) } else { worst })
}

fn close(what: &str, ours: &[f32], golden: &[f32], tolerance: f32) {
    let (difference, i) = worst(ours, golden);
    assert!(difference <= tolerance, "{what}: element {i} is {}, golden {}, off by {difference}", ours[i], golden[i]);
    println!("{what}: off by at most {difference:.1e}");
}

/// Sizes that the bit tests walk.
#[derive(Clone, Copy)]
struct Shape {
    n_layers: usize,
    n_kv_heads: usize,
    head_dim: usize,
    vocab: usize,
}

/// Models for the bit tests with `n` token ids: the tiny ones and, if it is there, SmolLM2 with at most 100.
fn models(n: usize) -> Vec<(String, Reference, Vec<u32>, Shape)> {
    let shape = |c: &Config| {
        let head_dim = c.latent.map_or(c.head_dim, |latent| latent.row_dim());
        Shape { n_layers: c.n_layers, n_kv_heads: c.n_kv_heads, head_dim, vocab: c.vocab }
    };
    // An odd step through the vocabulary: no id comes twice, so that no two rows are equal by right.
    let ids = |n: usize, vocab: usize| (0..n).map(|i| ((i * 181 + 7) % vocab) as u32).collect();
    let mut models = Vec::new();
    for arch in TINY {
        let tiny = Tiny::open(arch);
        let config = tiny.config("config.json");
        models.push((arch.to_string(), tiny.reference(config.clone()), ids(n, config.vocab), shape(&config)));
    }
    for name in QUANTISED {
        let dir = data("tiny").join(name);
        let config = Config::open(&dir).unwrap();
        models.push((name.into(), open(&dir, config.clone(), 256), ids(n, config.vocab), shape(&config)));
    }
    if let Some(dir) = smollm2() {
        let config = Config::open(&dir).unwrap();
        models.push(("smollm2".into(), open(&dir, config.clone(), 256), ids(n.min(100), config.vocab), shape(&config)));
    }
    models
}

fn prefill(reference: &mut Reference, ids: &[u32], chunk: usize) {
    for (i, tokens) in ids.chunks(chunk).enumerate() {
        reference.run(Pass::Prefill { rows: chunk }, tokens, i * chunk, &mut |_, _, _| {}).unwrap();
    }
}

/// All that a pass leaves behind.
struct State {
    kv: Vec<f32>,     // keys, then values, of each layer and head: [length, head_dim]
    logits: Vec<f32>, // [rows, vocab]
}

impl State {
    fn of(reference: &Reference, shape: Shape, length: usize, rows: usize) -> State {
        let mut kv = Vec::new();
        for layer in 0..shape.n_layers {
            for head in 0..shape.n_kv_heads {
                let (keys, values) = reference.kv(Owner::Target, layer, head, length);
                kv.extend_from_slice(keys);
                kv.extend_from_slice(values);
            }
        }
        State { kv, logits: reference.logits(rows).to_vec() }
    }

    fn differs(&self, other: &State) -> Option<String> {
        let kv = first_difference(&self.kv, &other.kv).map(|at| format!("keys and values: {at}"));
        kv.or_else(|| first_difference(&self.logits, &other.logits).map(|at| format!("logits: {at}")))
    }
}

fn first_difference(a: &[f32], b: &[f32]) -> Option<String> {
    assert_eq!(a.len(), b.len());
    let i = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits())?;
    Some(format!("element {i}: {} and {}", a[i], b[i]))
}

/// Equal bits mean something only if the numbers are finite, rows differ from each other, and each row has a spread.
fn sane(what: &str, numbers: &[f32], dim: usize) {
    assert!(numbers.iter().all(|x| x.is_finite()), "{what}: not finite");
    let rows: Vec<&[f32]> = numbers.chunks_exact(dim).collect();
    let distinct: std::collections::BTreeSet<Vec<u32>> =
        rows.iter().map(|r| r.iter().map(|x| x.to_bits()).collect()).collect();
    assert_eq!(distinct.len(), rows.len(), "{what}: rows that should differ are equal");
    for row in rows {
        let (low, high) = row.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &x| (l.min(x), h.max(x)));
        assert!(high - low > 1e-3, "{what}: a row with all numbers between {low} and {high}");
    }
}
