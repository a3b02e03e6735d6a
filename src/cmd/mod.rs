//! What a person or a script calls: one file per command, and what they share: options, loading, streams. answer.rs
//! makes one answer.
//!
//! stdout carries the answer or JSON lines, nothing else; everything else goes through `tell` to stderr.
pub mod answer;
pub mod bench;
pub mod chat;
pub mod check;
pub mod doctor;
pub mod run;
pub mod signal;
mod stats;

use crate::cpu;
use crate::decode::{Backend, Drafting, Engine, Sampling};
use crate::error;
pub use crate::gpu::machine::Slice;
pub use crate::gpu::params::COMM_MAX_RANKS;
pub use crate::gpu::ranks::algorithm::Algorithm;
use crate::gpu::ranks::link::LinkOptions;
use crate::gpu::ranks::settle::{Collectives, Measure};
use crate::gpu::ranks::{cache, nccl, Conductor, LastResort, Setup, Start};
use crate::gpu::{self, machine, weights::Source};
use crate::model::checkpoint::{Checkpoint, Dtype, Read};
use crate::model::claim::claim;
use crate::model::config::Config;
use crate::model::divide::Asked;
use crate::model::draft::DraftModel;
use crate::model::draft_vocab;
pub use crate::model::plan::Ranks;
use crate::model::plan::{self, Pass, Plan, Storage};
use crate::model::table::Table;
use crate::model::weights::Weights;
pub use crate::text::shielded;
use crate::text::Tokenizer;
use anyhow::{bail, ensure, Context, Result};
use std::fmt;
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The commit this was built from, if the build knew it.
pub const COMMIT: &str = match option_env!("VOLLEY_COMMIT") {
    Some(commit) => commit,
    None => "unknown commit",
};

const DEFAULT_MODEL: &str = "models/smollm2-135m-instruct";

/// Name, version, commit, the kernels inside, and which NCCL.
pub fn version() -> String {
    let (kernels, nccl) = (gpu::fatbins::built_with(), nccl::Library::built_with());
    format!("volley {} ({COMMIT})\nkernels: {kernels}\nNCCL: {nccl}", env!("CARGO_PKG_VERSION"))
}

/// Without `--context`, KV caches on the CPU stay below this.
const DEFAULT_KV_BYTES: u64 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Auto,
    Cpu,
    Cuda,
}

/// Which model runs where; every command has these.
#[derive(Clone, Debug)]
pub struct ModelOptions {
    pub dir: Option<PathBuf>,
    pub device: Device,
    pub context: Option<usize>,
    pub no_mmap: bool,
    pub weights: Option<PathBuf>,
    /// None: the drafter beside the model, if there is one.
    pub draft: Option<Draft>,
    /// Drafts a cycle; None lets the policy choose.
    pub draft_tokens: Option<usize>,
    /// The tokens that a drafter with the whole vocabulary is left with, by frequency.
    pub draft_vocab: Option<PathBuf>,
    /// Which GPUs; empty: as many as there are ranks for.
    pub gpus: Vec<usize>,
    /// Tensor-parallel ranks; None: one for each place on the GPUs.
    pub tp: Option<usize>,
    pub ranks_per_gpu: usize,
    /// None: what is fastest at start.
    pub collective: Option<Algorithm>,
    /// Whether every rank has all of attention; None: where that is faster.
    pub whole_attention: Option<bool>,
    /// The NCCL library; None: where the system finds it.
    pub nccl: Option<PathBuf>,
    /// An error instead of a slower way where GPUs do not reach each other's memory.
    pub require_p2p: bool,
    /// An error instead of a warning when a graph is not captured.
    pub require_graphs: bool,
    /// Weights from a hash, config.json alone: for bench.
    pub random: bool,
    /// Plain matrices that every token reads as FP8.
    pub fp8_dense: bool,
    /// One rank of several, alone: for bench.
    pub slice: Option<Slice>,
    /// 0 quiet, 1 what was loaded, 2 the plan as well.
    pub verbose: u8,
}

/// Where drafts come from; the default is nowhere.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draft {
    /// An EAGLE-3 drafter.
    pub dir: Option<PathBuf>,
    /// The model's own layer for multi-token prediction.
    pub mtp: bool,
    /// Repetitions in prompt and answer.
    pub ngram: bool,
}

/// How answers are made; `run` and `chat` have these.
#[derive(Clone, Debug)]
pub struct AnswerOptions {
    /// `sampling.seed` counts only if `seed` is given.
    pub sampling: Sampling,
    pub seed: Option<u64>,
    pub max_tokens: Option<usize>,
    pub stops: Vec<String>,
    pub ignore_eos: bool,
    pub system: Option<String>,
    pub no_think: bool,
    pub show_tokens: bool,
}

/// A loaded model and the engine that runs it. Knows no text.
pub struct Model {
    pub name: String,
    pub config: Config,
    pub engine: Engine,
    /// The drafter and the layers that it reads.
    pub drafter: Option<String>,
    /// What one token costs: the width-1 verify pass, and bytes of its numbers.
    pub decode: Plan,
    pub storage: Storage,
    pub dtype: String,
    pub device: &'static str,
    pub verbose: u8,
}

/// What `run` and `chat` work with.
pub struct Session {
    pub model: Model,
    pub tokenizer: Tokenizer,
    /// Ids that end an answer, and which files say so.
    pub end_ids: Vec<(u32, String)>,
}

impl Session {
    pub fn load(options: &ModelOptions) -> Result<Session> {
        let dir = model_dir(options)?;
        let tokenizer = Tokenizer::open(&dir)?;
        let model = Model::load_from(&dir, options, Some(tokenizer.vocab_size()))?;
        let mut end_ids: Vec<(u32, String)> =
            model.config.eos.iter().map(|&(id, source)| (id, source.to_string())).collect();
        if let Some(eos) = tokenizer.eos_text_id() {
            match end_ids.iter_mut().find(|(id, _)| *id == eos) {
                Some((_, source)) => source.push_str(" and tokenizer_config.json"),
                None => end_ids.push((eos, "tokenizer_config.json".into())),
            }
        }
        for &end in tokenizer.end_ids() {
            if end_ids.iter().all(|(id, _)| *id != end) {
                end_ids.push((end, "the tokenizer's kind".into()));
            }
        }
        if let Some((id, source)) = end_ids.iter().find(|(id, _)| *id as usize >= model.config.vocab) {
            bail!("end token {id} of {source}: the model has ids 0 to {}", model.config.vocab - 1);
        }
        if options.verbose > 0 {
            let shown: Vec<String> = end_ids.iter().map(|(id, source)| format!("{id} ({source})")).collect();
            tell(format_args!("end tokens: {}", if shown.is_empty() { "none".into() } else { shown.join(", ") }));
        }
        Ok(Session { model, tokenizer, end_ids })
    }
}

impl Model {
    pub fn load(options: &ModelOptions) -> Result<Model> {
        Model::load_from(&model_dir(options)?, options, None)
    }

    /// `tokens` is how many the tokenizer has, if there is one.
    fn load_from(dir: &Path, options: &ModelOptions, tokens: Option<usize>) -> Result<Model> {
        let start = Instant::now();
        let verbose = options.verbose > 0;
        cpu::compute_on_this_thread();
        // Files that are absent or cut are found before a GPU is opened, a GPU that cannot run them before a weight is
        // read.
        let config = Config { fp8_dense: options.fp8_dense, ..Config::open(dir)? };
        let checkpoint = if options.random { None } else { Some(Checkpoint::open(dir, read(options))?) };
        let gpus = rank_gpus(options)?;
        let ranks = Ranks { whole_attention: options.whole_attention == Some(true), ..Ranks::new(0, gpus.len()) };
        if options.slice.is_some() && (ranks.count > 1 || options.device != Device::Cuda) {
            bail!("--slice: expected --device cuda and one rank, whose share is measured alone");
        }
        let gpu = match options.device {
            Device::Cpu if ranks.count > 1 => {
                bail!("--device cpu: {} ranks are asked for, the CPU backend is one", ranks.count)
            }
            Device::Cpu => Err("it was asked for".to_string()),
            Device::Auto if ranks.count == 1 => gpu::open(gpus[0]).map_err(|e| format!("{e:#}")),
            Device::Auto | Device::Cuda => Ok(gpu::open(gpus[0])?),
        };
        if options.fp8_dense && gpu.is_err() {
            bail!("--fp8-dense: the CPU backend computes with weights as they are stored; use --device cuda");
        }
        let table = options.weights.as_deref().map_or_else(Table::builtin, Table::open)?;
        let weights = checkpoint.as_ref().map(|checkpoint| claim(&table, &config, checkpoint)).transpose()?;
        let stored = checkpoint.as_ref().map_or("random weights".to_string(), Checkpoint::to_string);
        let draft = options.draft.clone().unwrap_or_else(|| default_draft(dir, !options.random));
        let stored_target = weights.as_ref().zip(checkpoint.as_ref());
        let drafter = open_drafter(options, &draft, &table, &config, stored_target, tokens)?;
        let dtype = match &weights {
            Some(w) => {
                w.iter().find(|(_, w)| w.cols > 1).map(|(_, w)| w.dtype()).context("the model has no weights")?
            }
            None => Dtype::Bf16,
        };

        let mut decode =
            plan::target(&config, Pass::Verify { width: 1 }, options.slice.map_or(ranks, |slice| slice.ranks), &[])?;
        if let Some(slice) = options.slice {
            decode = decode.alone(slice.comm_us.is_some());
        }
        let (storage, most_kv) = match &gpu {
            Ok(gpu) => (machine::STORAGE, gpu.memory()?.1 as u64 / 8 / options.ranks_per_gpu as u64),
            Err(_) => (Storage { weight: dtype.bytes(), ..cpu::STORAGE }, DEFAULT_KV_BYTES),
        };
        let row_bytes = (decode.kv.n_layers * decode.kv.row_dim() * storage.kv) as u64;
        let available = if gpu.is_ok() { None } else { available_memory() };
        let context = context(options.context, config.context, row_bytes, most_kv, available)?;
        if verbose {
            match &gpu {
                Ok(gpu) => tell(format_args!(
                    "device: {}, SM {}.{}, kernels: {}",
                    gpu.info().name,
                    gpu.info().sm / 10,
                    gpu.info().sm % 10,
                    gpu::fatbins::BUILT_WITH
                )),
                Err(why) => tell(format_args!("device: cpu, since {why}")),
            }
            if ranks.count > 1 {
                let places: Vec<String> =
                    gpus.iter().enumerate().map(|(rank, gpu)| format!("{rank} on GPU {gpu}")).collect();
                tell(format_args!("ranks: {}", places.join(", ")));
            }
            tell(format_args!("model: {} ({}), {stored}", dir.display(), config.arch));
            tell(format_args!("rope: {}", config.rope));
            weights
                .iter()
                .filter_map(|w| w.quantised())
                .for_each(|quantised| tell(format_args!("weights: {quantised}")));
            if options.fp8_dense {
                let format = crate::model::quant::FP8_DENSE;
                tell(format_args!("weights: plain matrices of attention, dense layers, shared experts and the head become {format}: answers are not those of the stored numbers"));
            }
            weights.iter().flat_map(|w| &w.notes).for_each(|note| tell(format_args!("weights: {note}")));
            let capped = if options.context.is_none() && context < config.context { " (-c raises it)" } else { "" };
            let kv = shown_bytes(context as u64 * row_bytes);
            tell(format_args!("context: {context} of the model's {} tokens{capped}, KV cache {kv}", config.context));
            tell(format_args!("plan: {} steps, {} a token", decode.steps.len(), shown_bytes(decode.bytes(0, storage))));
        }
        let shown_drafter = drafter.as_ref().map(DraftModel::to_string);
        if let (Some(drafter), Some(shown), true) = (&drafter, &shown_drafter, verbose) {
            tell(format_args!("{shown}"));
            drafter.weights.notes.iter().for_each(|note| tell(format_args!("drafter: {note}")));
        }
        if options.verbose > 1 {
            tell(format_args!("{decode}"));
        }
        let drafting =
            Drafting { eagle: drafter.is_some(), ngram: draft.ngram, fixed: options.draft_tokens, script: None };
        let device = if gpu.is_ok() { "cuda" } else { "cpu" };
        let backend: Box<dyn Backend> = match gpu {
            Ok(gpu) => {
                let source = weights.as_ref().map_or(Source::Random(0), Source::Checkpoint);
                let machine_options = machine::Options {
                    context,
                    drafter,
                    ngram: draft.ngram,
                    require_graphs: options.require_graphs,
                    fail_capture: |_| false,
                };
                let mut bar = Progress::new();
                let mut progress = |done, total| bar.show(done, total);
                let (made, timings): (Box<dyn Backend>, _) = if ranks.count > 1 {
                    let conductor = Conductor::new(
                        setup(options, gpus, config.clone(), weights.clone(), machine_options),
                        gpu,
                        &mut progress,
                    )?;
                    let timings = conductor.first().timings;
                    let Start { found, division } = conductor.start();
                    found.bad_pairs().for_each(|pair| tell(format_args!("warning: {pair}")));
                    found.failed.iter().for_each(|failed| tell(format_args!("warning: {failed}")));
                    if verbose {
                        let known = if found.cached { " (measured before)" } else { "" };
                        found.tuned.iter().for_each(|tuned| tell(format_args!("sums of {tuned}{known}")));
                        division.attention.iter().for_each(|attention| tell(format_args!("attention: {attention}")));
                        if division.ranks.split_drafter {
                            tell(format_args!("drafter: its layer is divided among the ranks"));
                        }
                    }
                    decode = plan::target(&config, Pass::Verify { width: 1 }, division.ranks, &[])?;
                    (Box::new(conductor), timings)
                } else {
                    let machine = match options.slice {
                        Some(slice) => {
                            machine::Machine::slice(gpu, slice, config.clone(), source, machine_options, &mut progress)?
                        }
                        None => machine::Machine::new(gpu, config.clone(), source, machine_options, &mut progress)?,
                    };
                    let timings = machine.timings;
                    (Box::new(machine), timings)
                };
                if verbose {
                    let t = timings;
                    tell(format_args!(
                        "GPU memory: weights {}, KV cache {}, work {}; weights in {:.0} ms ({} read), {} graphs in {:.0} ms",
                        shown_bytes(t.weight_bytes as u64),
                        shown_bytes(t.kv_bytes as u64),
                        shown_bytes(t.other_bytes as u64),
                        t.weights_ms,
                        shown_bytes(t.read_bytes as u64),
                        t.n_graphs,
                        t.capture_ms
                    ));
                }
                made
            }
            Err(_) => {
                let Some(weights) = weights else {
                    bail!("--random: random weights are made on a GPU; use --device cuda")
                };
                fetch(&weights)?;
                drafter.iter().try_for_each(|drafter| fetch(&drafter.weights))?;
                Box::new(cpu::Reference::new(config.clone(), weights, context, drafter, draft.ngram)?)
            }
        };
        let mut name =
            dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned());
        if let Some(slice) = options.slice {
            name += &format!(", rank {} of {} alone", slice.ranks.rank, slice.ranks.count);
            name += &slice.comm_us.map_or(String::new(), |us| format!(" with sums of {us} us"));
        }
        let engine = Engine::new(backend, drafting)?;
        if verbose {
            tell(format_args!("loaded in {:.2} s", start.elapsed().as_secs_f64()));
        }
        Ok(Model {
            name,
            config,
            engine,
            drafter: shown_drafter,
            decode,
            storage,
            dtype: dtype.to_string(),
            device,
            verbose: options.verbose,
        })
    }

    /// Statistics are for people: at a terminal, or when asked for.
    pub fn shows_stats(&self) -> bool {
        self.verbose > 0 || io::stderr().is_terminal()
    }
}

/// The GPU of each rank, neighbours in the PCI tree next to each other.
fn rank_gpus(options: &ModelOptions) -> Result<Vec<usize>> {
    let per_gpu = options.ranks_per_gpu;
    let gpus = gpus_for(&options.gpus, options.tp, per_gpu)?;
    if per_gpu > 1 {
        gpu::make_room_for_ranks();
    }
    let gpus = if gpus.len() > 1 { gpu::in_tree_order(gpus)? } else { gpus };
    Ok(gpus.into_iter().flat_map(|gpu| vec![gpu; per_gpu]).collect())
}

/// The GPUs that were asked for, or the first ones that `tp` ranks need.
fn gpus_for(asked: &[usize], tp: Option<usize>, per_gpu: usize) -> Result<Vec<usize>> {
    let gpus: Vec<usize> = match asked.is_empty() {
        true => (0..tp.unwrap_or(per_gpu).div_ceil(per_gpu)).collect(),
        false => asked.to_vec(),
    };
    if let Some(i) = (1..gpus.len()).find(|&i| gpus[..i].contains(&gpus[i])) {
        bail!("--gpus: GPU {} is there twice; --ranks-per-gpu puts several ranks on one", gpus[i]);
    }
    let count = gpus.len() * per_gpu;
    if let Some(tp) = tp.filter(|tp| *tp != count) {
        bail!(
            "--tp {tp}: expected {count}, which is {per_gpu} on each of {} GPUs; --gpus and --ranks-per-gpu set both",
            gpus.len()
        );
    }
    if count > COMM_MAX_RANKS {
        bail!("{count} ranks: at most {COMM_MAX_RANKS} are supported");
    }
    Ok(gpus)
}

/// What all ranks are made of. Before their threads start: NCCL is set by the environment.
fn setup(
    options: &ModelOptions,
    gpus: Vec<usize>,
    config: Config,
    weights: Option<Weights>,
    machine: machine::Options,
) -> Setup {
    if options.collective.is_none_or(Algorithm::needs_nccl) {
        let settings = nccl::configure(options.ranks_per_gpu > 1);
        if options.collective.is_some() || options.verbose > 0 {
            let shown: Vec<String> = settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
            tell(format_args!("NCCL: {}", shown.join(" ")));
        }
    }
    if options.collective == Some(Algorithm::NcclAllReduce) {
        tell(format_args!(
            "warning: --collective nccl-allreduce: the text may depend on how many drafts are verified together"
        ));
    }
    let collectives = Collectives {
        algorithm: options.collective,
        nccl: options.nccl.clone(),
        require_p2p: options.require_p2p,
        measure: cache::path().map_or(Measure::Anew, Measure::Cached),
        link: LinkOptions::default(),
    };
    let places = gpus.clone();
    let last_resort = LastResort {
        after: Duration::from_secs(4),
        end: |error| {
            tell(format_args!("error: {error:#}"));
            signal::leave(error::exit_code(error))
        },
    };
    Setup {
        gpus,
        open: Box::new(move |rank| gpu::open(places[rank])),
        collectives,
        asked: Asked { whole_attention: options.whole_attention, split_drafter: None },
        config,
        weights,
        options: machine,
        last_resort,
    }
}

fn model_dir(options: &ModelOptions) -> Result<PathBuf> {
    if let Some(dir) = &options.dir {
        return Ok(dir.clone());
    }
    if let Some(dir) = std::env::var_os("VOLLEY_MODEL").filter(|dir| !dir.is_empty()) {
        return Ok(dir.into());
    }
    let dir = PathBuf::from(DEFAULT_MODEL);
    if !dir.is_dir() {
        bail!(
            "{DEFAULT_MODEL}: the default model is not there; python3 scripts/fetch_smollm2.py --out {DEFAULT_MODEL} fetches it, -m DIR or \
             $VOLLEY_MODEL names another"
        );
    }
    Ok(dir)
}

fn read(options: &ModelOptions) -> Read {
    if options.no_mmap {
        Read::Plain
    } else {
        Read::Auto
    }
}

/// The drafter that `draft` names, if it names one; `stored` is None where weights are random.
fn open_drafter(
    options: &ModelOptions,
    draft: &Draft,
    table: &Table,
    config: &Config,
    stored: Option<(&Weights, &Checkpoint)>,
    tokens: Option<usize>,
) -> Result<Option<DraftModel>> {
    let drafter = match (&draft.dir, stored) {
        (Some(dir), Some((weights, _))) => DraftModel::open(dir, config, weights, tokens, read(options))?,
        (Some(dir), None) => DraftModel::random(dir, config)?,
        (None, Some((weights, checkpoint))) if draft.mtp => DraftModel::mtp(table, config, weights, checkpoint)?,
        (None, None) if draft.mtp => DraftModel::random_mtp(config)?,
        (None, _) => {
            ensure!(
                options.draft_vocab.is_none(),
                "--draft-vocab: expected a drafter, found none; give --draft DIR or mtp"
            );
            return Ok(None);
        }
    };
    Ok(Some(match &options.draft_vocab {
        Some(path) => drafter.truncate(draft_vocab::read(path, config.vocab)?)?,
        None => drafter,
    }))
}

/// The drafter that lies beside the model, by its name.
fn default_draft(dir: &Path, drafts: bool) -> Draft {
    let beside = dir.file_name().map(|name| dir.with_file_name(format!("{}-eagle3", name.to_string_lossy())));
    Draft { dir: beside.filter(|dir| drafts && dir.is_dir()), mtp: false, ngram: false }
}

/// Tokens of the context: what was asked for, else the model's as far as `most_kv` bytes go; `row_bytes` is one token
/// in the KV cache, which must fit into `available` bytes.
fn context(asked: Option<usize>, model: usize, row_bytes: u64, most_kv: u64, available: Option<u64>) -> Result<usize> {
    let context = match asked {
        Some(n) if (1..=model).contains(&n) => n,
        Some(n) => bail!("context {n}: expected a number from 1 to {model}, which is what the model was made for"),
        None => model.min((most_kv / row_bytes.max(1)).max(1) as usize),
    };
    let needed = context as u64 * row_bytes;
    match available {
        Some(available) if needed > available => Err(error::machine(format!(
            "a context of {context} tokens needs {} of memory for its KV cache, {} are available: lower --context",
            shown_bytes(needed),
            shown_bytes(available)
        ))),
        _ => Ok(context),
    }
}

/// Bytes that can be allocated without swapping, where the system says so.
fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// Brings the weights into memory; a bar on a terminal if that takes over a second.
fn fetch(weights: &Weights) -> Result<()> {
    let mut progress = Progress::new();
    weights.load(&mut |done, total| progress.show(done, total))
}

/// A bar on stderr for loads that take over a second, where stderr is a terminal.
struct Progress {
    start: Instant,
    bar: Option<indicatif::ProgressBar>,
}

impl Progress {
    fn new() -> Progress {
        Progress { start: Instant::now(), bar: None }
    }

    fn show(&mut self, done: usize, total: usize) {
        if self.bar.is_none() && self.start.elapsed() > Duration::from_secs(1) && io::stderr().is_terminal() {
            let style = "loading {bar:30} {bytes} of {total_bytes}, {binary_bytes_per_sec}";
            let style = indicatif::ProgressStyle::with_template(style).expect("a fixed template");
            self.bar = Some(indicatif::ProgressBar::new(total as u64).with_style(style));
        }
        if let Some(bar) = &self.bar {
            bar.set_position(done as u64);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A line on stderr. A closed stderr is no reason to stop.
pub fn tell(line: fmt::Arguments) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// A seed short enough to type again.
fn draw_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The hasher's keys are the system's random numbers.
    std::hash::RandomState::new().build_hasher().finish() >> 32
}

/// The lines of a stream that is no terminal: UTF-8 without BOM, line ends removed, the last line with or without one.
pub struct Lines<R> {
    from: R,
    offset: usize, // bytes read before the next line
}

impl<R: BufRead> Lines<R> {
    pub fn new(from: R) -> Lines<R> {
        Lines { from, offset: 0 }
    }

    /// The next line; None at the end. The inner error is a line that is not UTF-8; reading may go on after it.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Result<String>>> {
        let mut bytes = Vec::new();
        let n = self.from.read_until(b'\n', &mut bytes).context("stdin cannot be read")?;
        if n == 0 {
            return Ok(None);
        }
        let start = self.offset;
        self.offset += n;
        Ok(Some(text(bytes, start).map(|line| {
            let line = line.strip_suffix('\n').unwrap_or(&line);
            line.strip_suffix('\r').unwrap_or(line).to_string()
        })))
    }
}

/// Bytes of stdin from `start` on as text; a BOM at the very start is not part of it.
fn text(mut bytes: Vec<u8>, start: usize) -> Result<String> {
    const BOM: &[u8] = "\u{feff}".as_bytes();
    let mut skipped = 0;
    if start == 0 && bytes.starts_with(BOM) {
        bytes.drain(..BOM.len());
        skipped = BOM.len();
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = start + skipped + error.utf8_error().valid_up_to();
        anyhow::anyhow!(
            "stdin: expected UTF-8, found byte 0x{:02x} at offset {at}",
            error.as_bytes()[at - start - skipped]
        )
    })
}

/// `269.1 MB`
fn shown_bytes(bytes: u64) -> String {
    let bytes = bytes as f64;
    match bytes {
        1e12.. => format!("{:.2} TB", bytes / 1e12),
        1e9.. => format!("{:.2} GB", bytes / 1e9),
        1e6.. => format!("{:.1} MB", bytes / 1e6),
        _ => format!("{:.1} kB", bytes / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let all = |bytes: &[u8]| {
            let mut lines = Lines::new(bytes);
            let mut all = Vec::new();
            while let Some(line) = lines.next().unwrap() {
                all.push(line.map_err(|e| e.to_string()));
            }
            all
        };
        let ok = |s: &str| Ok(s.to_string());
        assert_eq!(all(b""), []);
        assert_eq!(all(b"hi"), [ok("hi")]);
        assert_eq!(
            all("\u{feff}a\r\n\nb\u{feff}\r\nc\rd\n".as_bytes()),
            [ok("a"), ok(""), ok("b\u{feff}"), ok("c\rd")]
        );
        assert_eq!(all(b"a\0b\n"), [ok("a\0b")]);
        let bad = |byte: &str, at: usize| Err(format!("stdin: expected UTF-8, found byte 0x{byte} at offset {at}"));
        assert_eq!(all(b"ab\n\xffc\nd\n"), [ok("ab"), bad("ff", 3), ok("d")]);
        assert_eq!(all(b"\xef\xbb\xbfa\xc3"), [bad("c3", 4)]);
    }

    #[test]
    fn gpus_of_ranks() {
        assert_eq!(gpus_for(&[], None, 1).unwrap(), [0]);
        assert_eq!(gpus_for(&[], Some(4), 1).unwrap(), [0, 1, 2, 3]);
        assert_eq!(gpus_for(&[], Some(4), 4).unwrap(), [0]);
        assert_eq!(gpus_for(&[], None, 8).unwrap(), [0]);
        assert_eq!(gpus_for(&[3, 1], None, 2).unwrap(), [3, 1]);
        let refused = |gpus: &[usize], tp, per_gpu, word: &str| {
            let error = gpus_for(gpus, tp, per_gpu).unwrap_err();
            assert!(error.to_string().contains(word) && error::exit_code(&error) == error::BAD_INPUT, "{error}");
        };
        refused(&[0], Some(2), 1, "--tp 2: expected 1, which is 1 on each of 1 GPUs");
        refused(&[], Some(3), 2, "--tp 3: expected 4");
        refused(&[1, 0, 1], None, 1, "GPU 1 is there twice");
        refused(&[], Some(9), 1, "at most 8");
        refused(&[], Some(9), 9, "at most 8");
    }

    #[test]
    fn contexts() {
        assert_eq!(context(None, 8192, 46_080, DEFAULT_KV_BYTES, None).unwrap(), 8192);
        assert_eq!(context(None, 131_072, 262_144, DEFAULT_KV_BYTES, None).unwrap(), 4096);
        assert_eq!(context(Some(100), 8192, 46_080, DEFAULT_KV_BYTES, None).unwrap(), 100);
        for bad in [0, 8193] {
            assert!(context(Some(bad), 8192, 46_080, DEFAULT_KV_BYTES, None)
                .unwrap_err()
                .to_string()
                .contains("from 1 to 8192"));
        }
        let error = context(Some(1 << 40), 1 << 40, 1 << 20, DEFAULT_KV_BYTES, Some(1 << 34)).unwrap_err();
        assert_eq!(crate::error::exit_code(&error), crate::error::MACHINE, "{error}");
    }
}
