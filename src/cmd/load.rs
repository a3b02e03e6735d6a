//! From options to a model that answers: its files, the device, the backend, the engine, and what is said about them.
use super::gpus::{rank_gpus, setup};
use super::options::{Device, Draft, ModelOptions};
use super::terminal::{shown_bytes, tell, Progress};
use crate::cpu;
use crate::decode::{Backend, Drafting, Engine};
use crate::error;
use crate::gpu::device::Gpu;
use crate::gpu::machine::{self, Machine, Slice};
use crate::gpu::ranks::{Conductor, Start};
use crate::gpu::{self, weights::Source};
use crate::model::checkpoint::{Checkpoint, Dtype, Read};
use crate::model::claim::claim;
use crate::model::config::Config;
use crate::model::divide::{self, Asked};
use crate::model::draft::DraftModel;
use crate::model::draft_vocab;
use crate::model::plan::{self, Pass, Plan, Storage};
use crate::model::quant::FP8_DENSE;
use crate::model::table::Table;
use crate::model::weights::Weights;
use crate::text::Tokenizer;
use anyhow::{bail, ensure, Context, Result};
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::Instant;

const DEFAULT_MODEL: &str = "models/smollm2-135m-instruct";

/// Without `--context`, KV caches on the CPU stay below this.
const DEFAULT_KV_BYTES: u64 = 1 << 30;

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

/// What bench may load instead of a whole model as it is stored.
#[derive(Clone, Copy, Debug, Default)]
pub struct Substitute {
    /// Weights from a hash, config.json alone.
    pub random: bool,
    /// One rank of several, alone.
    pub slice: Option<Slice>,
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
        let model = Model::load_from(&dir, options, Substitute::default(), Some(tokenizer.vocab_size()))?;
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
    pub fn load(options: &ModelOptions, substitute: Substitute) -> Result<Model> {
        Model::load_from(&model_dir(options)?, options, substitute, None)
    }

    /// `tokens` is how many the tokenizer has, if there is one.
    fn load_from(dir: &Path, options: &ModelOptions, substitute: Substitute, tokens: Option<usize>) -> Result<Model> {
        let start = Instant::now();
        cpu::compute_on_this_thread();
        // Files that are absent or cut are found before a GPU is opened, a GPU that cannot run them before a weight is
        // read.
        let config = Config { fp8_dense: options.fp8_dense, ..Config::open(dir)? };
        let checkpoint = if substitute.random { None } else { Some(Checkpoint::open(dir, read(options))?) };
        let gpus = rank_gpus(options)?;
        let gpu = open_gpu(options, substitute, &gpus)?;
        let files = Files::claim(dir, options, &config, checkpoint.as_ref(), tokens)?;

        let slice = substitute.slice;
        // What is divided is known once sums over ranks were timed: until then, what needs no timing.
        let asked = Asked { whole_attention: options.attention, ..Asked::default() };
        let ranks = slice.map_or_else(|| divide::unmeasured(0, gpus.len(), asked), |slice| slice.ranks);
        let mut decode = plan::target(&config, Pass::Verify { width: 1 }, ranks, &[])?;
        if let Some(slice) = slice {
            decode = decode.alone(slice.comm_us.is_some());
        }
        let (storage, most_kv) = match &gpu {
            Ok(gpu) => (machine::STORAGE, gpu.memory()?.1 as u64 / 8 / options.ranks_per_gpu as u64),
            Err(_) => (Storage { weight: files.dtype.bytes(), ..cpu::STORAGE }, DEFAULT_KV_BYTES),
        };
        let row_bytes = (decode.kv.n_layers * decode.kv.row_dim() * storage.kv) as u64;
        let available = if gpu.is_ok() { None } else { available_memory() };
        let context = context(options.context, config.context, row_bytes, most_kv, available)?;
        if options.verbose > 0 {
            match &gpu {
                Ok(gpu) => tell_gpus(gpu, &gpus),
                Err(why) => tell(format_args!("device: cpu, since {why}")),
            }
            files.tell(dir, &config);
            let capped = if options.context.is_none() && context < config.context { " (-c raises it)" } else { "" };
            let kv = shown_bytes(context as u64 * row_bytes);
            tell(format_args!("context: {context} of the model's {} tokens{capped}, KV cache {kv}", config.context));
            tell(format_args!("plan: {} steps, {} a token", decode.steps.len(), shown_bytes(decode.bytes(0, storage))));
            files.tell_drafter();
        }
        if options.verbose > 1 {
            tell(format_args!("{decode}"));
        }
        let drafting =
            Drafting { eagle: files.drafter.is_some(), ngram: files.ngram, fixed: options.draft_tokens, script: None };
        let (drafter, dtype) = (files.drafter.as_ref().map(DraftModel::to_string), files.dtype.to_string());
        let device = if gpu.is_ok() { "cuda" } else { "cpu" };
        let backend = match gpu {
            Ok(gpu) if gpus.len() > 1 => {
                let conductor = conduct(options, gpu, gpus, &config, files, context)?;
                decode = plan::target(&config, Pass::Verify { width: 1 }, conductor.start().division.ranks, &[])?;
                Box::new(conductor) as Box<dyn Backend>
            }
            Ok(gpu) => Box::new(machine(options, gpu, slice, &config, files, context)?),
            Err(_) => Box::new(reference(&config, files, context)?),
        };
        let mut name =
            dir.file_name().map_or_else(|| dir.display().to_string(), |name| name.to_string_lossy().into_owned());
        if let Some(slice) = slice {
            name += &format!(", rank {} of {} alone", slice.ranks.rank, slice.ranks.count);
            name += &slice.comm_us.map_or(String::new(), |us| format!(" with sums of {us} us"));
        }
        let engine = Engine::new(backend, drafting)?;
        if options.verbose > 0 {
            tell(format_args!("loaded in {:.2} s", start.elapsed().as_secs_f64()));
        }
        Ok(Model { name, config, engine, drafter, decode, storage, dtype, device, verbose: options.verbose })
    }

    /// Statistics are for people: at a terminal, or when asked for.
    pub fn shows_stats(&self) -> bool {
        self.verbose > 0 || io::stderr().is_terminal()
    }
}

/// What the files of a model and its drafter hold.
struct Files {
    /// None: random ones.
    weights: Option<Weights>,
    drafter: Option<DraftModel>,
    ngram: bool,
    /// Of the first matrix.
    dtype: Dtype,
    /// Where weights come from, for people.
    stored: String,
}

impl Files {
    /// `checkpoint` is None where weights are random.
    fn claim(
        dir: &Path,
        options: &ModelOptions,
        config: &Config,
        checkpoint: Option<&Checkpoint>,
        tokens: Option<usize>,
    ) -> Result<Files> {
        let table = table(options)?;
        let weights = checkpoint.map(|checkpoint| claim(&table, config, checkpoint)).transpose()?;
        let draft = options.draft.clone().unwrap_or_else(|| default_draft(dir, checkpoint.is_some()));
        let stored = weights.as_ref().zip(checkpoint);
        let drafter = open_drafter(options, &draft, &table, config, stored, tokens)?;
        let dtype = match &weights {
            Some(w) => {
                w.iter().find(|(_, w)| w.cols > 1).map(|(_, w)| w.dtype()).context("the model has no weights")?
            }
            None => Dtype::Bf16,
        };
        let stored = checkpoint.map_or("random weights".to_string(), Checkpoint::to_string);
        Ok(Files { weights, drafter, ngram: draft.ngram, dtype, stored })
    }

    fn source(&self) -> Source<'_> {
        self.weights.as_ref().map_or(Source::Random(0), Source::Checkpoint)
    }

    fn tell(&self, dir: &Path, config: &Config) {
        tell(format_args!("model: {} ({}), {}", dir.display(), config.arch, self.stored));
        tell(format_args!("rope: {}", config.rope));
        let quantised = self.weights.iter().filter_map(|w| w.quantised());
        quantised.for_each(|quantised| tell(format_args!("weights: {quantised}")));
        if config.fp8_dense {
            tell(format_args!(
                "weights: plain matrices of attention, dense layers, shared experts and the head become {FP8_DENSE}: answers are not those of the stored numbers"
            ));
        }
        self.weights.iter().flat_map(|w| &w.notes).for_each(|note| tell(format_args!("weights: {note}")));
    }

    fn tell_drafter(&self) {
        if let Some(drafter) = &self.drafter {
            tell(format_args!("{drafter}"));
            drafter.weights.notes.iter().for_each(|note| tell(format_args!("drafter: {note}")));
        }
    }
}

/// The first rank's GPU, or why the CPU computes.
fn open_gpu(options: &ModelOptions, substitute: Substitute, gpus: &[usize]) -> Result<Result<Gpu, String>> {
    let count = gpus.len();
    if substitute.slice.is_some() && (count > 1 || options.device != Device::Cuda) {
        bail!("--slice: expected --device cuda and one rank, whose share is measured alone");
    }
    let gpu = match options.device {
        Device::Cpu if count > 1 => {
            bail!("--device cpu: {count} ranks are asked for, the CPU backend is one")
        }
        Device::Cpu => Err("it was asked for".to_string()),
        Device::Auto if count == 1 => gpu::open(gpus[0]).map_err(|e| format!("{e:#}")),
        Device::Auto | Device::Cuda => Ok(gpu::open(gpus[0])?),
    };
    if options.fp8_dense && gpu.is_err() {
        bail!("--fp8-dense: the CPU backend computes with weights as they are stored; use --device cuda");
    }
    Ok(gpu)
}

/// A Machine for each rank.
fn conduct(
    options: &ModelOptions,
    gpu: Gpu,
    gpus: Vec<usize>,
    config: &Config,
    files: Files,
    context: usize,
) -> Result<Conductor> {
    let made_of = machine_options(options, context, files.drafter, files.ngram);
    let mut bar = Progress::begin();
    let setup = setup(options, gpus, config.clone(), files.weights, made_of);
    let conductor = Conductor::new(setup, gpu, &mut |done, total| bar.show(done, total))?;
    let Start { found, division } = conductor.start();
    found.bad_pairs().for_each(|pair| tell(format_args!("warning: {pair}")));
    found.failed.iter().for_each(|failed| tell(format_args!("warning: {failed}")));
    if options.verbose > 0 {
        let known = if found.cached { " (measured before)" } else { "" };
        found.tuned.iter().for_each(|tuned| tell(format_args!("sums of {tuned}{known}")));
        division.attention.iter().for_each(|attention| tell(format_args!("attention: {attention}")));
        if division.ranks.split_drafter {
            tell(format_args!("drafter: its layer is divided among the ranks"));
        }
        tell_memory(conductor.first());
    }
    tell_launches(options, conductor.first())?;
    Ok(conductor)
}

/// One Machine, of the whole model or of a slice.
fn machine(
    options: &ModelOptions,
    gpu: Gpu,
    slice: Option<Slice>,
    config: &Config,
    mut files: Files,
    context: usize,
) -> Result<Machine> {
    let made_of = machine_options(options, context, files.drafter.take(), files.ngram);
    let mut bar = Progress::begin();
    let mut progress = |done, total| bar.show(done, total);
    let machine = match slice {
        Some(slice) => Machine::slice(gpu, slice, config.clone(), files.source(), made_of, &mut progress)?,
        None => Machine::new(gpu, config.clone(), files.source(), made_of, &mut progress)?,
    };
    if options.verbose > 0 {
        tell_memory(&machine);
    }
    tell_launches(options, &machine)?;
    Ok(machine)
}

fn machine_options(
    options: &ModelOptions,
    context: usize,
    drafter: Option<DraftModel>,
    ngram: bool,
) -> machine::Options {
    machine::Options { context, drafter, ngram, require_graphs: options.require_graphs }
}

/// The CPU's backend, with its weights in memory.
fn reference(config: &Config, files: Files, context: usize) -> Result<cpu::Reference> {
    let Some(weights) = files.weights else { bail!("--random: random weights are made on a GPU; use --device cuda") };
    fetch(&weights)?;
    files.drafter.iter().try_for_each(|drafter| fetch(&drafter.weights))?;
    cpu::Reference::new(config.clone(), weights, context, files.drafter, files.ngram)
}

fn tell_gpus(gpu: &Gpu, gpus: &[usize]) {
    let (info, built_with) = (gpu.info(), gpu::fatbins::BUILT_WITH);
    tell(format_args!("device: {}, SM {}.{}, kernels: {built_with}", info.name, info.sm / 10, info.sm % 10));
    if gpus.len() > 1 {
        let places: Vec<String> = gpus.iter().enumerate().map(|(rank, gpu)| format!("{rank} on GPU {gpu}")).collect();
        tell(format_args!("ranks: {}", places.join(", ")));
    }
}

fn tell_memory(machine: &Machine) {
    let t = machine.timings;
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

/// With `-vv`: what plain decoding launches for a token.
fn tell_launches(options: &ModelOptions, machine: &Machine) -> Result<()> {
    if options.verbose > 1 {
        tell(format_args!("{}", machine.listing(Pass::Verify { width: 1 })?));
    }
    Ok(())
}

fn model_dir(options: &ModelOptions) -> Result<PathBuf> {
    if let Some(dir) = &options.model {
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

pub fn read(options: &ModelOptions) -> Read {
    if options.no_mmap {
        Read::Plain
    } else {
        Read::Auto
    }
}

pub fn table(options: &ModelOptions) -> Result<Table> {
    options.weights.as_deref().map_or_else(Table::builtin, Table::open)
}

/// The drafter that `draft` names, if it names one; `stored` is None where weights are random.
pub fn open_drafter(
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
pub fn default_draft(dir: &Path, drafts: bool) -> Draft {
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
    let mut progress = Progress::begin();
    weights.load(&mut |done, total| progress.show(done, total))
}

#[cfg(test)]
mod tests {
    use super::*;

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
