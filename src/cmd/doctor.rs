//! `volley doctor`: is this machine fit, and does this model compute what it should? One line a check on stdout, exit
//! code 0 or 1. With several ranks every check runs on all of them at once, each against its part of the reference.
//!
//! First facts of driver and GPU, then every kernel on small random models whose sizes do not divide evenly (`Shape`),
//! then, if there is one, the user's model. The checks are in check.rs.
use super::gpus::{rank_gpus, setup};
use super::load::{default_draft, open_drafter, read, table};
use super::options::{Device, ModelOptions};
use super::{bench::token_ids, check, terminal::shown_bytes};
use crate::cpu::Reference;
use crate::decode::sample::philox;
use crate::error;
use crate::gpu::device::Gpu;
use crate::gpu::machine::{Machine, Options};
use crate::gpu::ranks::pairs::Health;
use crate::gpu::ranks::settle::Measure;
use crate::gpu::ranks::{Conductor, Start};
use crate::gpu::weights::Source;
use crate::gpu::{self, cuda, fatbins, probe};
use crate::model::checkpoint::Checkpoint;
use crate::model::claim::claim;
use crate::model::config::Config;
use crate::model::plan::Ranks;
use crate::model::table::Table;
use crate::model::weights::Weights;
use anyhow::{bail, Context, Result};
use half::bf16;
use serde_json::{json, Map, Value};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Tokens of the context that checks use: across the second edge of KV chunk sizes.
const CONTEXT: usize = 2400;

/// Tokens of an answer with and without drafts.
const SPECULATED: usize = 60;

pub fn doctor(options: &ModelOptions) -> Result<u8> {
    if options.device == Device::Cpu {
        bail!("--device cpu: doctor checks a GPU; leave the flag out");
    }
    let gpus = rank_gpus(options)?;
    let gpu = gpu::open(gpus[0])?;
    let mut report = Report { n_checks: 0, n_failed: 0 };
    facts(&gpu)?;
    let shapes = if gpus.len() > 1 { &[SHAPE_OF_RANKS] } else { &SHAPES[..] };
    for shape in shapes {
        let dir = Scratch::new(shape.name)?;
        shape.write(&dir.0)?;
        let defaults = ModelOptions { context: None, weights: None, no_mmap: false, draft: None, ..options.clone() };
        report.model(shape.name, &gpu, &gpus, &dir.0, &defaults)?;
    }
    let named = options
        .model
        .clone()
        .or_else(|| std::env::var_os("VOLLEY_MODEL").filter(|dir| !dir.is_empty()).map(PathBuf::from));
    if let Some(dir) = &named {
        report.model(&dir.display().to_string(), &gpu, &gpus, dir, options)?;
    }
    let Report { n_checks, n_failed } = report;
    match n_failed {
        0 => say(format_args!(
            "all {n_checks} checks hold{}",
            if named.is_none() { "; -m DIR checks a model too" } else { "" }
        ))?,
        _ => say(format_args!("{n_failed} of {n_checks} checks failed"))?,
    }
    Ok(if n_failed == 0 { error::FINE } else { error::INTERNAL })
}

fn facts(gpu: &Gpu) -> Result<()> {
    let info = gpu.info();
    let version = |v: i32| format!("{}.{}", v / 1000, v % 1000 / 10);
    say(format_args!("driver      CUDA {}, {} is needed", version(info.driver), version(cuda::NEEDED_DRIVER)))?;
    say(format_args!(
        "GPU         {}, compute capability {}.{}, {} SMs at up to {} MHz, memory at up to {} MHz",
        info.name,
        info.sm / 10,
        info.sm % 10,
        info.n_sms,
        info.clock_mhz,
        info.memory_clock_mhz
    ))?;
    let code = if fatbins::ARCHS.contains(&info.sm) { "machine code" } else { "portable code, compiled by the driver" };
    say(format_args!("kernels     {}; this GPU runs {code}", fatbins::built_with()))?;
    let (free, total) = gpu.memory()?;
    say(format_args!("memory      {} of {} free", shown_bytes(free as u64), shown_bytes(total as u64)))?;
    let rate = probe::read_ceiling(gpu)?;
    say(format_args!("read rate   {}/s", shown_bytes(rate as u64)))?;
    say(format_args!("copy rate   {}/s from page-locked memory", shown_bytes(probe::copy_rate(gpu)? as u64)))?;
    let cost = probe::node_cost(gpu)?;
    say(format_args!("graph node  {:.2} us, {:.2} us where it may start early", cost.full_us, cost.early_us))
}

/// Counts checks and prints their verdicts.
struct Report {
    n_checks: usize,
    n_failed: usize,
}

impl Report {
    /// All checks of the model in `dir`.
    fn model(&mut self, name: &str, gpu: &Gpu, gpus: &[usize], dir: &Path, options: &ModelOptions) -> Result<()> {
        let start = Instant::now();
        let (mut model, drafter) = open(gpu, gpus, dir, options)?;
        let (t, config) = (model.first().timings, model.first().config());
        let (context, vocab) = (options.context.unwrap_or(CONTEXT).min(config.context), config.vocab);
        say(format_args!(
            "model       {name}: {} of weights in {:.0} ms, {} graphs in {:.0} ms, ready after {:.2} s",
            shown_bytes(t.weight_bytes as u64),
            t.weights_ms,
            t.n_graphs,
            t.capture_ms,
            start.elapsed().as_secs_f64()
        ))?;
        if let Running::Many(conductor) = &model {
            self.verdict("links", || links(conductor.start()))?;
        }
        if context < check::STEP_ROWS {
            bail!("context {context}: doctor's checks take {} tokens at least", check::STEP_ROWS);
        }
        let ids = Arc::new(token_ids(context, vocab));
        type Check = Box<dyn Fn(&mut Machine, &[u32]) -> Result<String> + Send + Sync>;
        let (dir, options) = (dir.to_path_buf(), options.clone());
        let steps = move |m: &mut Machine, ids: &[u32]| {
            check::steps(m, &mut reference(&dir, &options, context, m.ranks())?, ids)
        };
        let mut checks: Vec<(&str, Check)> = vec![
            ("kernels", Box::new(steps)),
            ("graphs", Box::new(|m, ids| check::graphs(m, &ids[..ids.len().min(1100)]))),
            ("widths", Box::new(check::widths)),
            ("chunks", Box::new(|m, ids| check::chunks(m, &ids[..ids.len().min(700)]))),
            ("sampling", Box::new(check::sampling)),
            ("drafts", Box::new(check::drafts)),
        ];
        if drafter {
            checks.push(("drafter", Box::new(|m, ids| check::extends(m, ids, SPECULATED))));
        }
        checks.push(("speculation", Box::new(move |m, ids| check::speculation(m, ids, SPECULATED, drafter))));
        for (name, check) in checks {
            let (ids, failed) = (ids.clone(), self.n_failed);
            self.verdict(name, || model.check(move |machine| check(machine, &ids)))?;
            if self.n_failed > failed && gpus.len() > 1 {
                break; // all ranks have ended
            }
        }
        Ok(())
    }

    /// A check that fails is counted; a machine that fails ends everything.
    fn verdict(&mut self, name: &str, check: impl FnOnce() -> Result<String>) -> Result<()> {
        self.n_checks += 1;
        match check() {
            Ok(held) => say(format_args!("ok    {name:11} {held}")),
            Err(e) if error::exit_code(&e) == error::MACHINE => Err(e.context(format!("check of {name}"))),
            Err(e) => {
                self.n_failed += 1;
                say(format_args!("FAIL  {name:11} {e:#}"))
            }
        }
    }
}

/// Prints what the start measured between ranks. Slow pairs are shown with their cure; pairs and algorithms that are
/// wrong fail.
fn links(Start { found, division }: &Start) -> Result<String> {
    found.pairs.iter().try_for_each(|pair| say(format_args!("pair        {pair}")))?;
    found.tuned.iter().try_for_each(|tuned| say(format_args!("sums        {tuned}")))?;
    division.attention.iter().try_for_each(|attention| say(format_args!("attention   {attention}")))?;
    found.failed.iter().try_for_each(|failed| say(format_args!("sums        {failed}")))?;
    let (n_off, n_bad) = (found.pairs.iter().filter(|p| p.health() == Health::Off).count(), found.bad_pairs().count());
    if n_off + found.failed.len() > 0 {
        bail!("{n_off} of {} pairs are off, {} algorithms cannot be used", found.pairs.len(), found.failed.len());
    }
    Ok(format!("{} pairs, of which {n_bad} are slower than they should be", found.pairs.len()))
}

fn say(line: std::fmt::Arguments) -> Result<()> {
    let mut out = io::stdout();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// A model on its rank or ranks.
enum Running {
    One(Machine),
    Many(Conductor),
}

impl Running {
    /// On every rank at once; what rank 0 says.
    fn check(&mut self, check: impl Fn(&mut Machine) -> Result<String> + Send + Sync + 'static) -> Result<String> {
        match self {
            Running::One(machine) => check(machine),
            Running::Many(conductor) => Ok(conductor.each("check", check)?.swap_remove(0)),
        }
    }

    fn first(&self) -> &Machine {
        match self {
            Running::One(machine) => machine,
            Running::Many(conductor) => conductor.first(),
        }
    }
}

/// The reference of one rank of the model in `dir`.
fn reference(dir: &Path, options: &ModelOptions, context: usize, ranks: Ranks) -> Result<Reference> {
    let (config, _, _, weights) = model(dir, options)?;
    weights.load(&mut |_, _| {})?;
    Reference::of_ranks(config, weights, context, None, false, ranks)
}

fn model(dir: &Path, options: &ModelOptions) -> Result<(Config, Table, Checkpoint, Weights)> {
    let config = Config::open(dir)?;
    let table = table(options)?;
    let checkpoint = Checkpoint::open(dir, read(options))?;
    let weights = claim(&table, &config, &checkpoint)?;
    Ok((config, table, checkpoint, weights))
}

/// The model in `dir` with room for the tokens that checks use, and whether it has a drafter there.
fn open(gpu: &Gpu, gpus: &[usize], dir: &Path, options: &ModelOptions) -> Result<(Running, bool)> {
    let (config, table, checkpoint, weights) = model(dir, options)?;
    let draft = options.draft.clone().unwrap_or_else(|| default_draft(dir, true));
    let drafter = open_drafter(options, &draft, &table, &config, Some((&weights, &checkpoint)), None)?;
    let has_drafter = drafter.is_some();
    let context = options.context.unwrap_or(CONTEXT).min(config.context);
    let machine_options = Options { context, drafter, ngram: true, require_graphs: options.require_graphs };
    let running = if gpus.len() > 1 {
        let mut setup = setup(options, gpus.to_vec(), config, Some(weights), machine_options);
        setup.collectives.measure = Measure::Anew;
        Running::Many(Conductor::new(setup, gpu.clone(), &mut |_, _| {})?)
    } else {
        Running::One(Machine::new(gpu.clone(), config, Source::Checkpoint(&weights), machine_options, &mut |_, _| {})?)
    };
    Ok((running, has_drafter))
}

/// A small random model. Sizes leave parts of tiles and segments over.
pub struct Shape {
    pub name: &'static str,
    model_type: &'static str,
    architecture: &'static str,
    hidden: usize,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    ffn_dim: usize,
    vocab: usize,
    tied: bool,
}

const N_LAYERS: usize = 2;

/// Together they use every kernel.
#[rustfmt::skip]
pub const SHAPES: [Shape; 3] = [
    Shape { name: "random-llama", model_type: "llama", architecture: "LlamaForCausalLM", hidden: 208, n_heads: 9, n_kv_heads: 3, head_dim: 64, ffn_dim: 328, vocab: 777, tied: true },
    Shape { name: "random-qwen3", model_type: "qwen3", architecture: "Qwen3ForCausalLM", hidden: 1056, n_heads: 4, n_kv_heads: 1, head_dim: 128, ffn_dim: 1096, vocab: 5003, tied: false },
    Shape { name: "random-qwen2", model_type: "qwen2", architecture: "Qwen2ForCausalLM", hidden: 336, n_heads: 2, n_kv_heads: 2, head_dim: 128, ffn_dim: 200, vocab: 1000, tied: false },
];

/// Heads, feed-forward columns and tokens for 2, 3, 4, 6 and 8 ranks.
#[rustfmt::skip]
const SHAPE_OF_RANKS: Shape =
    Shape { name: "random-ranks", model_type: "llama", architecture: "LlamaForCausalLM", hidden: 208, n_heads: 24, n_kv_heads: 1, head_dim: 64, ffn_dim: 768, vocab: 777, tied: true };

impl Shape {
    /// Writes config.json and model.safetensors.
    pub fn write(&self, dir: &Path) -> Result<()> {
        let config = json!({
            "architectures": [self.architecture], "model_type": self.model_type, "hidden_size": self.hidden, "num_hidden_layers": N_LAYERS,
            "num_attention_heads": self.n_heads, "num_key_value_heads": self.n_kv_heads, "head_dim": self.head_dim,
            "intermediate_size": self.ffn_dim, "vocab_size": self.vocab, "tie_word_embeddings": self.tied, "hidden_act": "silu",
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
            "bos_token_id": 0, "eos_token_id": 1, "attention_bias": false, "mlp_bias": false, "use_sliding_window": false,
        });
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (i, (name, shape)) in self.tensors().into_iter().enumerate() {
            let start = data.len();
            let (mean, spread) = match name.rsplit('.').nth(1) {
                Some(part) if part.ends_with("norm") => (1.0, 0.3),
                _ if shape.len() == 1 => (0.0, 0.3),
                Some("embed_tokens") => (0.0, 1.0),
                _ => (0.0, (3.0 / shape[1] as f32).sqrt()), // keeps the size of a row
            };
            for k in 0..shape.iter().product::<usize>() {
                let uniform = philox([k as u32, i as u32, 0, 0], [0, 0])[0] as f32 / u32::MAX as f32 * 2.0 - 1.0;
                data.extend_from_slice(&bf16::from_f32(mean + spread * uniform).to_le_bytes());
            }
            let entry: Value = json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, data.len()] });
            header.insert(name, entry);
        }
        let header = serde_json::to_vec(&header)?;
        let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
        for (name, bytes) in [("config.json", serde_json::to_vec(&config)?), ("model.safetensors", file)] {
            let path = dir.join(name);
            fs::write(&path, bytes).with_context(|| path.display().to_string())?;
        }
        Ok(())
    }

    /// Checkpoint names and shapes.
    fn tensors(&self) -> Vec<(String, Vec<usize>)> {
        let (q, kv) = (self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim);
        let mut tensors = vec![
            ("model.embed_tokens.weight".to_string(), vec![self.vocab, self.hidden]),
            ("model.norm.weight".to_string(), vec![self.hidden]),
        ];
        if !self.tied {
            tensors.push(("lm_head.weight".to_string(), vec![self.vocab, self.hidden]));
        }
        for layer in 0..N_LAYERS {
            let mut add =
                |name: &str, shape: &[usize]| tensors.push((format!("model.layers.{layer}.{name}"), shape.to_vec()));
            for (name, rows) in [("q", q), ("k", kv), ("v", kv)] {
                add(&format!("self_attn.{name}_proj.weight"), &[rows, self.hidden]);
                if self.model_type == "qwen2" {
                    add(&format!("self_attn.{name}_proj.bias"), &[rows]);
                }
            }
            if self.model_type == "qwen3" {
                add("self_attn.q_norm.weight", &[self.head_dim]);
                add("self_attn.k_norm.weight", &[self.head_dim]);
            }
            add("self_attn.o_proj.weight", &[self.hidden, q]);
            add("mlp.gate_proj.weight", &[self.ffn_dim, self.hidden]);
            add("mlp.up_proj.weight", &[self.ffn_dim, self.hidden]);
            add("mlp.down_proj.weight", &[self.hidden, self.ffn_dim]);
            add("input_layernorm.weight", &[self.hidden]);
            add("post_attention_layernorm.weight", &[self.hidden]);
        }
        tensors
    }
}

/// A folder that goes with its owner.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Result<Scratch> {
        let dir = std::env::temp_dir().join(format!("volley-doctor-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).with_context(|| dir.display().to_string())?;
        Ok(Scratch(dir))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed from the folder of temporary files goes with them.
        let _ = fs::remove_dir_all(&self.0);
    }
}
