//! What passes launch, as text, without a GPU: every op with its kernel, grid, edge, weights and params. Addresses are
//! shown by what lies there. `UPDATE=1 cargo test --test lower` rewrites tests/data/ops; read the difference before it
//! is committed.
//!
//! A file has one model's passes. Params are shown by the byte where they lie in their struct (kernels/params.h): in
//! full where such a struct first comes, of linear layers for each kind, then only what differs from the time before;
//! zeros are left out, and the number of an op's own layer.
#[path = "support/drafter.rs"]
mod drafter;
#[path = "support/experts.rs"]
mod experts;
#[path = "support/quantised.rs"]
mod quantised;
mod support;

use drafter::{latent_draft_model, tiny_llama_drafter};
use experts::write_tiny8;
use quantised::Scheme;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use volley::gpu::arena::{Arena, Region, Sizes};
use volley::gpu::lower::{lower, Choice, Setting, Sums};
use volley::gpu::op::{Op, Part, Work};
use volley::gpu::params::CommRanks;
use volley::gpu::ranks::collective::Wire;
use volley::gpu::weights::Layout;
use volley::model::checkpoint::{Checkpoint, Read};
use volley::model::claim::claim;
use volley::model::config::Config;
use volley::model::draft::DraftModel;
use volley::model::plan::{self, Pass, Plan, Ranks, Shard, Step, Storage};
use volley::model::quant::Format;
use volley::model::table::Table;
use volley::model::weights::Weights;

/// An H200's.
const N_SMS: usize = 132;
/// Two slabs of what has no kernel for many rows.
const PREFILL: Pass = Pass::Prefill { rows: 32 };

fn verify(width: usize) -> Pass {
    Pass::Verify { width }
}

/// What a params struct holds, by byte.
type Words = BTreeMap<usize, String>;

/// One rank of a model on made-up addresses.
struct Rank {
    plans: BTreeMap<Pass, Plan>,
    arena: Arena,
    chunks: usize,
    wire: Option<Wire>,
    /// What begins at an address, in ascending order.
    names: Vec<(u64, String)>,
    end: u64,
    /// By kind of linear layer and params struct: what was shown last.
    shown: RefCell<BTreeMap<(String, &'static str), Words>>,
}

impl Rank {
    /// `shared`: all ranks are on one GPU.
    fn new(config: &Config, drafter: Option<&DraftModel>, ranks: Ranks, shared: bool, context: usize) -> Rank {
        let mut plans = BTreeMap::new();
        let taps = drafter.map_or(Vec::new(), |d| d.shape.taps());
        for pass in [1, 4, 8, 16].map(verify).into_iter().chain([PREFILL, Pass::Prefill { rows: 1024 }]) {
            plans.insert(pass, plan::target(config, pass, ranks, &taps).unwrap());
        }
        let draft = Pass::Draft { width: 6, drafts: 2 };
        let of_drafter = [Pass::DraftPrefill { rows: 16 }, Pass::DraftPrefill { rows: 32 }, draft];
        for (d, pass) in drafter.into_iter().flat_map(|d| of_drafter.map(|pass| (d, pass))) {
            plans.insert(pass, plan::drafter(&d.shape, pass, Ranks::ONE).unwrap());
        }
        let largest: Vec<&Plan> = [verify(16), draft].iter().filter_map(|pass| plans.get(pass)).collect();
        let layout = Layout::of(&largest, config.vocab, Vec::new()).unwrap();
        let shard = Shard::of(config, ranks).unwrap();
        let sizes = Sizes::of(config, drafter, &plans, shard, context, N_SMS).unwrap();
        let start = 0x7a5f_0000 << 32; // no two numbers of 32 bits look like an address
        let weights = layout.addresses(start);
        let mut names: Vec<(u64, String)> = Vec::new();
        for (id, matrix) in &weights.matrices {
            for (i, part) in matrix.parts.iter().enumerate() {
                names.push((part.at, if i == 0 { id.to_string() } else { format!("{id}/{i}") }));
            }
        }
        for (id, pair) in &weights.absorbed {
            names.push((pair.keys.parts[0].at, format!("{id}/keys")));
            names.push((pair.values.parts[0].at, format!("{id}/values")));
        }
        names.extend(weights.vectors.iter().map(|(id, at)| (*at, id.to_string())));
        let mut free = start + layout.bytes() as u64;
        let mut take = |name: &str, bytes: usize| {
            let region = Region { start: free, bytes };
            names.push((free, name.to_string()));
            free += bytes.next_multiple_of(256).max(256) as u64;
            region
        };
        let records = take("records", 1 << 20).start;
        let mut comm = CommRanks { rank: ranks.rank as i32, ranks: ranks.count as i32, ..bytemuck::Zeroable::zeroed() };
        for (rank, window) in comm.window[..ranks.count].iter_mut().enumerate() {
            *window = take(&format!("window_{rank}"), 1 << 24).start;
        }
        comm.patience_us = 2_000_000;
        let arena = sizes.place(weights, records, &mut |name, bytes| Ok(take(name, bytes))).unwrap();
        names.sort();
        let end = free;
        let wire = (ranks.count > 1).then(|| Wire {
            comm,
            shared,
            n_sms: N_SMS,
            fault: None,
            variants: Vec::new(),
            gathered: None,
            steps: RefCell::default(),
        });
        Rank { plans, arena, chunks: sizes.chunks, wire, names, end, shown: RefCell::default() }
    }

    fn ops(&self, pass: Pass, choice: Choice, ngram: bool) -> Vec<Op> {
        let sums = self.wire.as_ref().map_or(Sums::Alone(0.0), Sums::Ranks);
        lower(&self.plans[&pass], &self.arena, &Setting { n_sms: N_SMS, sums, ngram }, self.chunks, choice).unwrap()
    }

    fn listing(&self, pass: Pass, choice: Choice, ngram: bool) -> String {
        let (plan, ops) = (&self.plans[&pass], self.ops(pass, choice, ngram));
        let ranks = plan.ranks;
        let mut text =
            format!("{pass:?}, {choice:?}, rank {} of {}: {} launches\n", ranks.rank, ranks.count, ops.len());
        for op in &ops {
            writeln!(text, "  {}", op.shown(plan)).unwrap();
            let Work::Kernel { kernel, params, .. } = &op.work else { continue };
            // Weights of the op's own layer without its number: layers are alike.
            let name = op.part.name(plan);
            let layer = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')).map(|(layer, _)| layer);
            let own = layer.map_or(String::new(), |layer| format!("layers.{layer}."));
            let mut words = self.words(params);
            words.values_mut().for_each(|word| *word = word.replace(&own, if own.is_empty() { "" } else { "." }));
            // The steps of one kind of linear layer are alike; what has params of its own is so whatever its part.
            let kind = if kernel.params() == "LinearParams" { op.part.kind(plan) } else { String::new() };
            let key = (kind, kernel.params());
            let before = self.shown.borrow_mut().insert(key, words.clone());
            let mut changed: Vec<String> = Vec::new();
            for (at, value) in &words {
                if before.as_ref().and_then(|before| before.get(at)) != Some(value) {
                    changed.push(format!("@{at} {value}"));
                }
            }
            for at in before.iter().flat_map(|before| before.keys()).filter(|at| !words.contains_key(*at)) {
                changed.push(format!("@{at} 0"));
            }
            let mut line = String::new();
            for field in changed {
                if line.len() + field.len() > 108 {
                    writeln!(text, "     {line}").unwrap();
                    line.clear();
                }
                write!(line, " {field}").unwrap();
            }
            if !line.is_empty() {
                writeln!(text, "     {line}").unwrap();
            }
        }
        text
    }

    /// The words of a params struct that are not zero, by their first byte: an address, or one or two numbers of 32
    /// bits, in hex where they are large, as floats are.
    fn words(&self, params: &[u8]) -> Words {
        let half = |bytes: &[u8]| i32::from_le_bytes(bytes.try_into().unwrap());
        let mut words = BTreeMap::new();
        for (i, word) in params.chunks_exact(8).enumerate() {
            if let Some(name) = self.name(u64::from_le_bytes(word.try_into().unwrap())) {
                words.insert(8 * i, name);
                continue;
            }
            for (at, n) in [(8 * i, half(&word[..4])), (8 * i + 4, half(&word[4..]))].into_iter().filter(|w| w.1 != 0) {
                words.insert(at, if n.unsigned_abs() < 1 << 24 { n.to_string() } else { format!("{n:#x}") });
            }
        }
        words
    }

    /// What lies at an address; None of what is none.
    fn name(&self, at: u64) -> Option<String> {
        let i = self.names.partition_point(|(start, _)| *start <= at);
        let (start, name) = self.names[..i].last()?;
        (at < self.end).then(|| if *start == at { name.clone() } else { format!("{name}+{}", at - start) })
    }
}

fn check(name: &str, listings: &[String]) {
    if std::env::var_os("UPDATE").is_some() {
        fs::create_dir_all(path(name).parent().unwrap()).unwrap();
        fs::write(path(name), listings.join("\n")).unwrap();
    }
    if let Some(difference) = difference(name, listings) {
        panic!("{difference}");
    }
}

fn path(name: &str) -> PathBuf {
    Path::new("tests/data/ops").join(format!("{name}.txt"))
}

/// Where the listings are not what the file says; None where they are.
fn difference(name: &str, listings: &[String]) -> Option<String> {
    let text = listings.join("\n");
    let expected = fs::read_to_string(path(name)).unwrap_or_default();
    let (found, expected): (Vec<&str>, Vec<&str>) = (text.split('\n').collect(), expected.split('\n').collect());
    let line = |lines: &[&str], i: usize| lines.get(i).map_or("the end".to_string(), |line| format!("{line:?}"));
    let n = found.len().max(expected.len());
    let at = (0..n).find(|&i| found.get(i) != expected.get(i))?;
    Some(format!(
        "{name} launches something else than {} says, from line {} on:\n  expected {}\n  found    {}\nif that is \
         meant, UPDATE=1 cargo test --test lower rewrites the file",
        path(name).display(),
        at + 1,
        line(&expected, at),
        line(&found, at),
    ))
}

/// A published shape with two layers: of those with experts one is dense, if the model has any such.
fn shape(name: &str) -> Config {
    let mut config = Config::open(&Path::new("tests/shapes").join(name)).unwrap();
    config.n_layers = 2;
    if let Some(experts) = &mut config.experts {
        experts.dense_layers.retain(|layer| *layer < 1);
    }
    config
}

fn open(dir: &Path) -> (Config, Weights) {
    let config = Config::open(dir).unwrap();
    let weights = claim(&Table::builtin().unwrap(), &config, &Checkpoint::open(dir, Read::Mmap).unwrap()).unwrap();
    (config, weights)
}

/// Every width, a prompt, and every kind of choice that one rank has; then a rank of several.
fn check_target(name: &str, config: &Config, several: Ranks) {
    let one = Rank::new(config, None, Ranks::ONE, false, 1000);
    let mut listings: Vec<String> = [1, 4, 8, 16].map(|width| one.listing(verify(width), Choice::Greedy, false)).into();
    listings.push(one.listing(verify(1), Choice::Sampled, true));
    listings.push(one.listing(PREFILL, Choice::Greedy, false));
    let rank = Rank::new(config, None, several, false, 1000);
    listings.extend([1, 4, 8, 16].map(|width| rank.listing(verify(width), Choice::Greedy, false)));
    listings.push(rank.listing(verify(4), Choice::Sampled, false));
    listings.push(rank.listing(verify(4), Choice::Filtered, true));
    listings.push(rank.listing(PREFILL, Choice::Greedy, false));
    check(name, &listings);
}

const LAST_OF_8: Ranks = Ranks::new(7, 8);

#[test]
fn dense_models() {
    check_target("llama", &shape("llama-3.2-1b"), LAST_OF_8);
    let wide = Rank::new(&shape("llama-3.2-1b"), None, Ranks::ONE, false, 1000);
    check("wide_prefill", &[wide.listing(Pass::Prefill { rows: 1024 }, Choice::Greedy, false)]);
    check_target("qwen3", &shape("qwen3-8b"), LAST_OF_8);
    check_target("qwen2", &open(Path::new("tests/data/tiny/qwen2")).0, Ranks::new(1, 2));
}

/// bf16, FP8 in blocks, INT4 beside bf16, and FP8 with a scale a row.
#[test]
fn models_with_experts() {
    check_target("qwen3_moe", &shape("qwen3-30b-a3b"), LAST_OF_8);
    check_target("deepseek_v3", &shape("deepseek-v3"), LAST_OF_8);
    check_target("kimi", &shape("kimi-k2.5"), LAST_OF_8);
    let dir = tempfile::tempdir().unwrap();
    write_tiny8(dir.path(), Some(Scheme::Fp8Channel));
    check_target("fp8_rows", &Config { n_layers: 2, ..open(dir.path()).0 }, LAST_OF_8);
}

/// Of an EAGLE-3 drafter with every norm that flags add, one with latent attention, and a model's own layer: drafts,
/// what brings its cache up, what follows a prompt, and the target's passes, which leave features.
#[test]
fn drafters() {
    for (name, of, mtp) in
        [("eagle3", "llama", None), ("latent_eagle3", "kimi_k25_int4", Some(false)), ("mtp", "dsv3_mtp", Some(true))]
    {
        let dir = Path::new("tests/data/tiny").join(of);
        let (config, weights) = open(&dir);
        let drafter = match mtp {
            None => tiny_llama_drafter(&config, &weights, true),
            Some(mtp) => latent_draft_model(&dir, &config, &weights, mtp),
        };
        let rank = Rank::new(&config, Some(&drafter), Ranks::ONE, false, 200);
        let listing = |pass| rank.listing(pass, Choice::Greedy, true);
        let prefill = [16, 32].map(|rows| Pass::DraftPrefill { rows });
        let [catch_up, prompt] = prefill.map(listing);
        check(name, &[listing(Pass::Draft { width: 6, drafts: 2 }), catch_up, prompt, listing(verify(4))]);
    }
}

/// Ranks that share a GPU: collectives, and what follows them, start when all before has ended.
#[test]
fn ranks_that_share_a_gpu() {
    let rank = Rank::new(&shape("llama-3.2-1b"), None, Ranks::new(0, 2), true, 1000);
    check("shared_gpu", &[rank.listing(verify(4), Choice::Filtered, false)]);
}

/// Contexts in which attention takes wider blocks.
#[test]
fn a_long_context() {
    let rank = Rank::new(&shape("llama-3.1-8b"), None, Ranks::ONE, false, 100_000);
    check("long_context", &[1, 16].map(|width| rank.listing(verify(width), Choice::Greedy, false)));
}

/// The control of all above: a launch with one block more is another line, and a file with another line is an error
/// that says where.
#[test]
fn a_changed_grid_is_noticed() {
    if std::env::var_os("UPDATE").is_some() {
        return; // the file is being written
    }
    let rank = Rank::new(&shape("llama-3.1-8b"), None, Ranks::ONE, false, 100_000);
    let listings = [1, 16].map(|width| rank.listing(verify(width), Choice::Greedy, false));
    let op = &rank.ops(verify(1), Choice::Greedy, false)[1];
    let mut other = op.clone();
    let Work::Kernel { grid, .. } = &mut other.work else { panic!("{op:?}") };
    grid[0] += 1;
    let plan = &rank.plans[&verify(1)];
    let changed = [listings[0].replacen(&op.shown(plan), &other.shown(plan), 1), listings[1].clone()];
    assert_eq!(difference("long_context", &listings), None);
    let found = difference("long_context", &changed).expect("a changed grid is a difference");
    assert!(found.contains("from line ") && found.contains(&other.shown(plan)), "{found}");
}

/// The weights of a pass's ops are what its steps say that they read: of experts, as many as they expect to be chosen.
#[test]
fn ops_read_the_bytes_of_their_steps() {
    let storage = Storage { weight: 2, kv: 2, plain_kv_b: true };
    let dirs = [Scheme::Fp8Block(32, 32), Scheme::Fp8Channel, Scheme::Int4(32)].map(|scheme| {
        let dir = tempfile::tempdir().unwrap();
        write_tiny8(dir.path(), Some(scheme));
        (dir, scheme)
    });
    let mut configs: Vec<(String, Config)> = ["llama-3.1-8b", "qwen3-30b-a3b", "deepseek-v3", "kimi-k2.5"]
        .map(|name| (name.to_string(), shape(name)))
        .into();
    configs.extend(dirs.iter().map(|(dir, scheme)| (format!("{scheme:?}"), open(dir.path()).0)));
    for (name, config) in &configs {
        let rank = Rank::new(config, None, Ranks::ONE, false, 1000);
        for width in [1, 4, 16] {
            let plan = &rank.plans[&verify(width)];
            let mut read = vec![0.0; plan.steps.len()];
            for op in rank.ops(verify(width), Choice::Greedy, false) {
                let Part::Step(i) = op.part else { continue };
                for span in &op.weights {
                    let chosen = match &plan.steps[i] {
                        Step::ExpertsUp(m) | Step::ExpertsDown(m) if span.experts > 1 => {
                            assert_eq!(span.experts, m.n_experts);
                            let e = m.n_experts as f64;
                            e * (1.0 - (1.0 - m.top_k as f64 / e).powi(width as i32))
                        }
                        _ => 1.0,
                    };
                    read[i] += chosen * span.bytes as f64;
                }
            }
            for (step, read) in plan.steps.iter().zip(read) {
                let expected = if let Step::Embed { .. } = step { 0.0 } else { step.bytes(width, 0, storage) as f64 };
                // Scales of FP8 blocks are kept for each 8 rows and 32 columns, those of Int4 for each 32 columns.
                let room = match format_of(step) {
                    Some(Format::Fp8(_)) => 1.02,
                    Some(Format::Int4(_)) => 1.001,
                    _ => 1.0 + 1e-6,
                };
                let held = read >= expected * (1.0 - 1e-6) && read <= expected * room + 1.0;
                assert!(held, "{name}, {width} rows, {}: {read} bytes, expected {expected}", step.name());
            }
        }
    }
}

/// How most of a step's weights are stored.
fn format_of(step: &Step) -> Option<Format> {
    match step {
        Step::Linear(linear) => Some(linear.format),
        Step::ExpertsUp(m) | Step::ExpertsDown(m) => Some(m.format),
        _ => None,
    }
}
