//! config.json and generation_config.json -> `Config`, strictly: whatever changes the arithmetic is either read or refused by name.
//! Both dialects are read: the hub's (rope_theta, rope_scaling, torch_dtype) and that of transformers 5 (rope_parameters, dtype).
//! A new family is a row of `FAMILIES`, its fields here, and a section of weights.toml.
use anyhow::{bail, ensure, Context, Result};
use serde_json::{Map, Value};
use std::fmt;
use std::path::Path;

/// The shape of a model and the constants of its arithmetic.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The section of weights.toml: llama, mistral, qwen2, qwen3.
    pub arch: String,
    pub hidden: usize,
    pub n_layers: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub ffn_dim: usize,
    pub vocab: usize,
    /// max_position_embeddings, in tokens.
    pub context: usize,
    pub norm_eps: f32,
    pub rope: Rope,
    pub qkv_bias: bool,
    pub o_bias: bool,
    /// On gate, up and down.
    pub mlp_bias: bool,
    /// RMSNorm over each head of q and k, after the projection and before rope.
    pub qk_norm: bool,
    /// tie_word_embeddings: the head is the embedding table.
    pub tied: bool,
    pub bos: Option<u32>,
    /// End tokens, each once, with the file or files that named it.
    pub eos: Vec<(u32, &'static str)>,
}

/// Rotary position embedding, rotate-half form: element i pairs with element i + head_dim / 2.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub theta: f64,
    pub scaling: RopeScaling,
}

/// How the frequencies theta^(-2i/dim) are changed for contexts longer than those trained on.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    Default,
    Linear {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_context: usize,
    },
    /// YaRN, arXiv 2309.00071; absent options are computed as in transformers' modeling_rope_utils.
    Yarn {
        factor: f64,
        original_context: usize,
        beta_fast: f64,
        beta_slow: f64,
        attention_factor: Option<f64>,
        mscale: Option<f64>,
        mscale_all_dim: Option<f64>,
        truncate: bool,
    },
}

impl Config {
    /// Reads config.json and, if there is one, generation_config.json.
    pub fn open(dir: &Path) -> Result<Config> {
        let path = dir.join("config.json");
        let config = std::fs::read_to_string(&path).with_context(|| format!("{}: expected a model's config.json", path.display()))?;
        let generation_path = dir.join("generation_config.json");
        // A dangling link is an error, an absent file is not.
        let generation = match generation_path.symlink_metadata() {
            Ok(_) => {
                Some(std::fs::read_to_string(&generation_path).with_context(|| format!("{}: cannot be read", generation_path.display()))?)
            }
            Err(_) => None,
        };
        Config::parse(&config, generation.as_deref()).with_context(|| dir.display().to_string())
    }

    pub fn parse(config_json: &str, generation_json: Option<&str>) -> Result<Config> {
        let mut keys = Keys::parse(config_json, CONFIG)?;
        let config = parse_config(&mut keys)?;
        keys.refuse_unread(|key, value| is_descriptive(key) || is_neutral(key, value))?;
        match generation_json {
            Some(json) => parse_generation(config, Keys::parse(json, GENERATION)?),
            None => Ok(config),
        }
    }
}

impl Rope {
    /// Angle per position, radians, of each of the dim / 2 pairs; computed in f64, rounded once.
    pub fn inverse_frequencies(&self, dim: usize) -> Vec<f32> {
        let base = |i: usize| self.theta.powf(-2.0 * i as f64 / dim as f64);
        let frequencies = (0..dim / 2).map(|i| match self.scaling {
            RopeScaling::Default => base(i),
            RopeScaling::Linear { factor } => base(i) / factor,
            RopeScaling::Llama3 { factor, low_freq_factor: low, high_freq_factor: high, original_context } => {
                // Turns within the original context, as the config's factors count them: many stay, few are stretched.
                let turns = original_context as f64 * base(i) / std::f64::consts::TAU;
                let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                base(i) * (keep + (1.0 - keep) / factor)
            }
            RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
                // The pair, as a real number, that makes `turns` turns within the original context.
                let pair =
                    |turns: f64| dim as f64 * (original_context as f64 / (turns * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln());
                let (low, high) = (pair(beta_fast), pair(beta_slow));
                let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(dim as f64 - 1.0));
                let width = if low == high { 0.001 } else { high - low };
                let stretch = ((i as f64 - low) / width).clamp(0.0, 1.0);
                base(i) * (1.0 - stretch + stretch / factor)
            }
        });
        frequencies.map(|f| f as f32).collect()
    }

    /// What cos and sin are multiplied by; 1 except for yarn.
    pub fn attention_factor(&self) -> f32 {
        let RopeScaling::Yarn { factor, attention_factor, mscale, mscale_all_dim, .. } = self.scaling else {
            return 1.0;
        };
        let magnitude = |mscale: f64| 0.1 * mscale * factor.ln() + 1.0;
        let factor = match (attention_factor, mscale, mscale_all_dim) {
            (Some(given), _, _) => given,
            (None, Some(mscale), Some(all)) => magnitude(mscale) / magnitude(all),
            _ => magnitude(1.0),
        };
        factor as f32
    }
}

/// For `-v`: the kind and its factor.
impl fmt::Display for Rope {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.scaling {
            RopeScaling::Default => write!(f, "default"),
            RopeScaling::Linear { factor } => write!(f, "linear, factor {factor}"),
            RopeScaling::Llama3 { factor, original_context, .. } => {
                write!(f, "llama3, factor {factor}, original context {original_context}")
            }
            RopeScaling::Yarn { factor, original_context, .. } => {
                write!(f, "yarn, factor {factor}, original context {original_context}, attention factor {}", self.attention_factor())
            }
        }?;
        write!(f, ", theta {}", self.theta)
    }
}

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const BOTH: &str = "config.json and generation_config.json";

struct Family {
    architecture: &'static str,
    /// model_type, and the section of weights.toml.
    arch: &'static str,
    bias: Bias,
    /// Whether mlp_bias is a key of its config class.
    mlp_bias: bool,
    qk_norm: bool,
    /// Whether a sliding_window counts without use_sliding_window.
    always_slides: bool,
    /// The sliding window of a file without that key, the default of the config class.
    default_window: Option<usize>,
}

/// Which attention projections have one.
enum Bias {
    /// attention_bias says so, for q, k, v and o alike.
    Configured,
    /// q, k and v always, o never; there is no key for it.
    Qkv,
    Never,
}

#[rustfmt::skip]
const FAMILIES: [Family; 4] = [
    Family {
        architecture: "LlamaForCausalLM", arch: "llama", bias: Bias::Configured, mlp_bias: true, qk_norm: false,
        always_slides: true, default_window: None,
    },
    Family {
        architecture: "MistralForCausalLM", arch: "mistral", bias: Bias::Never, mlp_bias: false, qk_norm: false,
        always_slides: true, default_window: Some(4096),
    },
    Family {
        architecture: "Qwen2ForCausalLM", arch: "qwen2", bias: Bias::Qkv, mlp_bias: false, qk_norm: false,
        always_slides: false, default_window: None,
    },
    Family {
        architecture: "Qwen3ForCausalLM", arch: "qwen3", bias: Bias::Configured, mlp_bias: false, qk_norm: true,
        always_slides: false, default_window: None,
    },
];

fn parse_config(keys: &mut Keys) -> Result<Config> {
    // First, because its absence from weights.toml would otherwise show as a heap of tensor errors.
    if keys.take("quantization_config").is_some() {
        bail!("config.json: quantization_config: expected bf16, f16 or f32 weights, found a quantised model; use the unquantised release");
    }
    let family = parse_family(keys)?;
    for key in ["hidden_act", "hidden_activation"] {
        if let Some(activation) = keys.take(key) {
            ensure!(activation == "silu" || activation == "swish", "config.json: {key}: expected \"silu\", found {activation}");
        }
    }

    let hidden = keys.count("hidden_size", 1 << 20)?;
    let n_layers = keys.count("num_hidden_layers", 1 << 12)?;
    let n_heads = keys.count("num_attention_heads", 1 << 16)?;
    // Configs older than grouped attention have no such key.
    let n_kv_heads = keys.optional_count("num_key_value_heads", 1 << 16)?.unwrap_or(n_heads);
    ensure!(
        n_heads % n_kv_heads == 0,
        "config.json: num_attention_heads: expected a multiple of num_key_value_heads = {n_kv_heads}, found {n_heads}"
    );
    let head_dim = match keys.optional_count("head_dim", 1 << 14)? {
        Some(head_dim) => head_dim,
        None => {
            ensure!(
                hidden % n_heads == 0,
                "config.json: hidden_size: expected a multiple of num_attention_heads = {n_heads} as there is no head_dim, found {hidden}"
            );
            hidden / n_heads
        }
    };
    ensure!(head_dim % 2 == 0, "config.json: head_dim: expected an even number for rope, found {head_dim}");
    let context = keys.count("max_position_embeddings", 1 << 30)?;

    let attention_bias = match family.bias {
        Bias::Configured => keys.flag("attention_bias")?.unwrap_or(false),
        // qwen2's code has no such key, so that a value says nothing; weights.rs checks that the tensors are there.
        Bias::Qkv => {
            keys.take("attention_bias");
            false
        }
        Bias::Never => false,
    };
    refuse_sliding(keys, &family, n_layers, context)?;

    let vocab = keys.count("vocab_size", 1 << 26)?;
    let token = |key: &str, id: u64| -> Result<u32> {
        ensure!(id < vocab as u64, "config.json: {key}: expected an id below vocab_size = {vocab}, found {id}");
        Ok(id as u32)
    };
    let bos = match keys.ids("bos_token_id")?.as_slice() {
        [] => None,
        [id] => Some(token("bos_token_id", *id)?),
        many => bail!("config.json: bos_token_id: expected one id, found {many:?}"),
    };
    let mut eos = Vec::new();
    for id in keys.ids("eos_token_id")? {
        add_eos(&mut eos, token("eos_token_id", id)?, CONFIG);
    }

    Ok(Config {
        arch: family.arch.into(),
        hidden,
        n_layers,
        n_heads,
        n_kv_heads,
        head_dim,
        ffn_dim: keys.count("intermediate_size", 1 << 22)?,
        vocab,
        context,
        norm_eps: keys.positive("rms_norm_eps", 1.0)? as f32,
        rope: parse_rope(keys, context)?,
        qkv_bias: attention_bias || matches!(family.bias, Bias::Qkv),
        o_bias: attention_bias,
        mlp_bias: family.mlp_bias && keys.flag("mlp_bias")?.unwrap_or(false),
        qk_norm: family.qk_norm,
        // The default of all four families' config classes.
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
        bos,
        eos,
    })
}

fn parse_family(keys: &mut Keys) -> Result<Family> {
    let model_type = keys.take("model_type");
    let architectures = keys.take("architectures");
    let name = match &architectures {
        Some(Value::Array(names)) if names.len() == 1 => names[0].as_str(),
        Some(other) => bail!("config.json: architectures: expected one name, found {other}"),
        None => None,
    };
    let known = || FAMILIES.iter().map(|family| family.architecture).collect::<Vec<_>>().join(", ");
    let family = match (name, &model_type) {
        (Some(name), _) => FAMILIES.into_iter().find(|family| family.architecture == name),
        (None, Some(model_type)) => FAMILIES.into_iter().find(|family| model_type == family.arch),
        (None, None) => bail!("config.json: expected architectures or model_type, found neither"),
    };
    let Some(family) = family else {
        let found = architectures.or(model_type).unwrap_or_default();
        bail!("config.json: expected an architecture of {}, found {found}", known());
    };
    match model_type {
        Some(model_type) if model_type != family.arch => {
            bail!("config.json: model_type: expected \"{}\" for {}, found {model_type}", family.arch, family.architecture)
        }
        _ => Ok(family),
    }
}

/// Attention over a window shorter than the context is not implemented.
fn refuse_sliding(keys: &mut Keys, family: &Family, n_layers: usize, context: usize) -> Result<()> {
    let window = match keys.map.contains_key("sliding_window") {
        true => keys.optional_count("sliding_window", 1 << 30)?,
        false => family.default_window,
    };
    let used = keys.flag("use_sliding_window")?.unwrap_or(family.always_slides);
    // Layers below max_window_layers keep full attention.
    let first = keys.optional_number("max_window_layers")?.unwrap_or(0.0);
    if let Some(window) = window.filter(|window| used && *window < context && first < n_layers as f64) {
        bail!("config.json: sliding_window: expected full attention (null, or at least the context of {context}), found {window}");
    }
    match keys.take("layer_types") {
        None => Ok(()),
        Some(Value::Array(types)) => {
            ensure!(types.len() == n_layers, "config.json: layer_types: expected {n_layers} entries, found {}", types.len());
            match types.iter().find(|layer_type| *layer_type != "full_attention") {
                Some(other) => bail!("config.json: layer_types: expected only \"full_attention\", found {other}"),
                None => Ok(()),
            }
        }
        Some(other) => bail!("config.json: layer_types: expected a list, found {other}"),
    }
}

/// rope_theta beside rope_scaling, or both in rope_parameters; if a file has both spellings, they must agree.
pub(super) fn parse_rope(keys: &mut Keys, context: usize) -> Result<Rope> {
    let mut theta = keys.optional_positive("rope_theta", MAX_THETA)?;
    let mut scaling: Option<(&str, RopeScaling)> = None;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(value) = keys.take(key) else {
            continue;
        };
        let Value::Object(map) = value else { bail!("config.json: {key}: expected an object or null, found {value}") };
        let mut inner = Keys { map, path: format!("config.json: {key}.") };
        if let Some(inner_theta) = inner.optional_positive("rope_theta", MAX_THETA)? {
            if let Some(outer) = theta.filter(|outer| *outer != inner_theta) {
                bail!("config.json: rope_theta: expected one value, found {outer} and, in {key}, {inner_theta}");
            }
            theta = Some(inner_theta);
        }
        let parsed = parse_scaling(&mut inner, context)?;
        inner.refuse_unread(is_neutral)?;
        if let Some((other, earlier)) = scaling.filter(|(_, earlier)| *earlier != parsed) {
            bail!("config.json: {key}: expected to agree with {other}, {earlier:?}, found {parsed:?}");
        }
        scaling = Some((key, parsed));
    }
    // The default of all four families' config classes.
    let theta = theta.unwrap_or(10_000.0);
    ensure!(theta > 1.0, "config.json: rope_theta: expected a number above 1, found {theta}");
    Ok(Rope { theta, scaling: scaling.map_or(RopeScaling::Default, |(_, scaling)| scaling) })
}

const MAX_THETA: f64 = 1e15;

fn parse_scaling(keys: &mut Keys, context: usize) -> Result<RopeScaling> {
    let kinds = (keys.take("rope_type"), keys.take("type"));
    let kind = match kinds {
        (Some(a), Some(b)) if a != b => bail!("{}rope_type: expected to agree with type, found {a} and {b}", keys.path),
        (Some(kind), _) | (_, Some(kind)) => kind,
        (None, None) => "default".into(),
    };
    let factor = |keys: &mut Keys| -> Result<f64> {
        let factor = keys.positive("factor", 1e6)?;
        ensure!(factor >= 1.0, "{}factor: expected at least 1, found {factor}", keys.path);
        Ok(factor)
    };
    let original = "original_max_position_embeddings";
    match kind.as_str() {
        Some("default") => Ok(RopeScaling::Default),
        Some("linear") => Ok(RopeScaling::Linear { factor: factor(keys)? }),
        Some("llama3") => {
            let low = keys.positive("low_freq_factor", 1e6)?;
            let high = keys.positive("high_freq_factor", 1e6)?;
            ensure!(low < high, "{}low_freq_factor: expected below high_freq_factor = {high}, found {low}", keys.path);
            Ok(RopeScaling::Llama3 {
                factor: factor(keys)?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context: keys.count(original, 1 << 30)?,
            })
        }
        Some("yarn") => {
            // transformers takes zero for absent here.
            let option = |keys: &mut Keys, key| Ok::<_, anyhow::Error>(keys.optional_number(key)?.filter(|value| *value != 0.0));
            let positive = |keys: &mut Keys, key, default| Ok::<_, anyhow::Error>(keys.optional_positive(key, 1e6)?.unwrap_or(default));
            let beta_fast = positive(keys, "beta_fast", 32.0)?;
            let beta_slow = positive(keys, "beta_slow", 1.0)?;
            ensure!(beta_slow <= beta_fast, "{}beta_slow: expected at most beta_fast = {beta_fast}, found {beta_slow}", keys.path);
            Ok(RopeScaling::Yarn {
                factor: factor(keys)?,
                original_context: keys.optional_count(original, 1 << 30)?.unwrap_or(context),
                beta_fast,
                beta_slow,
                attention_factor: keys.optional_positive("attention_factor", 1e6)?,
                mscale: option(keys, "mscale")?,
                mscale_all_dim: option(keys, "mscale_all_dim")?,
                truncate: keys.flag("truncate")?.unwrap_or(true),
            })
        }
        _ => bail!("{}rope_type: expected default, linear, llama3 or yarn, found {kind}", keys.path),
    }
}

/// Only the token ids: the sampling defaults of a model are the user's business.
fn parse_generation(mut config: Config, mut keys: Keys) -> Result<Config> {
    let token = |key: &str, id: u64| -> Result<u32> {
        ensure!(id < config.vocab as u64, "{GENERATION}: {key}: expected an id below vocab_size = {}, found {id}", config.vocab);
        Ok(id as u32)
    };
    for id in keys.ids("eos_token_id")? {
        add_eos(&mut config.eos, token("eos_token_id", id)?, GENERATION);
    }
    if let (None, [id]) = (config.bos, keys.ids("bos_token_id")?.as_slice()) {
        config.bos = Some(token("bos_token_id", *id)?);
    }
    Ok(config)
}

fn add_eos(eos: &mut Vec<(u32, &'static str)>, id: u32, source: &'static str) {
    match eos.iter_mut().find(|(known, _)| *known == id) {
        Some((_, known)) if *known != source => *known = BOTH,
        Some(_) => {}
        None => eos.push((id, source)),
    }
}

/// A JSON object whose keys are taken out as they are read, so that the rest are those that nobody read.
pub(super) struct Keys {
    pub map: Map<String, Value>,
    /// What errors put before the key.
    pub path: String,
}

impl Keys {
    pub fn parse(json: &str, file: &str) -> Result<Keys> {
        match serde_json::from_str(json).with_context(|| format!("{file}: expected JSON"))? {
            Value::Object(map) => Ok(Keys { map, path: format!("{file}: ") }),
            _ => bail!("{file}: expected a JSON object, found another kind of value"),
        }
    }

    /// Null is absent, as in transformers.
    pub fn take(&mut self, key: &str) -> Option<Value> {
        self.map.shift_remove(key).filter(|value| !value.is_null())
    }

    pub fn flag(&mut self, key: &str) -> Result<Option<bool>> {
        match self.take(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => bail!("{}{key}: expected true or false, found {other}", self.path),
        }
    }

    /// A whole number from 1 to `max`.
    pub fn count(&mut self, key: &str, max: usize) -> Result<usize> {
        self.optional_count(key, max)?.with_context(|| format!("{}{key}: expected a number from 1 to {max}, found none", self.path))
    }

    pub fn optional_count(&mut self, key: &str, max: usize) -> Result<Option<usize>> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        match value.as_u64() {
            Some(n) if (1..=max as u64).contains(&n) => Ok(Some(n as usize)),
            _ => bail!("{}{key}: expected a number from 1 to {max}, found {value}", self.path),
        }
    }

    fn optional_number(&mut self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        match value.as_f64().filter(|number| number.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => bail!("{}{key}: expected a number, found {value}", self.path),
        }
    }

    /// A number above 0 and up to `max`.
    pub fn positive(&mut self, key: &str, max: f64) -> Result<f64> {
        self.optional_positive(key, max)?
            .with_context(|| format!("{}{key}: expected a number above 0 and up to {max}, found none", self.path))
    }

    fn optional_positive(&mut self, key: &str, max: f64) -> Result<Option<f64>> {
        match self.optional_number(key)? {
            Some(number) if !(number > 0.0 && number <= max) => {
                bail!("{}{key}: expected a number above 0 and up to {max}, found {number}", self.path)
            }
            number => Ok(number),
        }
    }

    /// A token id or a list of them; absent is an empty list.
    fn ids(&mut self, key: &str) -> Result<Vec<u64>> {
        let values = match self.take(key) {
            None => vec![],
            Some(Value::Array(values)) => values,
            Some(value) => vec![value],
        };
        let id = |value: &Value| {
            value.as_u64().with_context(|| format!("{}{key}: expected a token id or a list of them, found {value}", self.path))
        };
        values.iter().map(id).collect()
    }

    /// What is left was not read. Null says nothing in transformers; anything else might change the arithmetic.
    pub fn refuse_unread(self, is_harmless: impl Fn(&str, &Value) -> bool) -> Result<()> {
        let Some((key, value)) = self.map.iter().find(|(key, value)| !value.is_null() && !is_harmless(key, value)) else {
            return Ok(());
        };
        let shown: String = value.to_string().chars().take(60).collect();
        bail!(
            "{}{key}: found {shown}, a setting that is not implemented here and may change the arithmetic; remove the key if it only describes",
            self.path
        )
    }
}

/// Keys that say nothing about the forward pass of these families: training, text, provenance, and the generation and task defaults
/// that transformers 4 wrote into every config.
pub(super) fn is_descriptive(key: &str) -> bool {
    const PREFIXES: [&str; 3] = ["_", "transformers", "unsloth_"];
    PREFIXES.iter().any(|prefix| key.starts_with(prefix)) || DESCRIPTIVE.contains(&key)
}

#[rustfmt::skip]
const DESCRIPTIVE: &[&str] = &[
    // training and numerics; the dtype is that of each tensor, and pretraining_tp only ordered the sums of a linear
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "dropout", "initializer_range", "dtype",
    "torch_dtype", "use_cache", "pretraining_tp", "gradient_checkpointing",
    // text and provenance
    "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "tokenizer_class", "prefix", "name_or_path", "license",
    "is_llama_config", "model_max_length", "max_sequence_length", "finetuning_task", "task_specific_params", "problem_type", "id2label",
    "label2id", "num_labels", "torchscript", "return_dict", "output_attentions", "output_hidden_states", "use_bfloat16", "tf_legacy_loss",
    "chunk_size_feed_forward", "decoder_start_token_id", "is_decoder",
    // generation defaults
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
];

/// Keys that are understood at one value only: the one that changes nothing.
pub(super) fn is_neutral(key: &str, value: &Value) -> bool {
    match key {
        "attention_bias" | "mlp_bias" | "bias" | "use_qk_norm" | "rope_interleaved" | "use_mrope" => *value == false,
        "is_encoder_decoder" | "add_cross_attention" | "tie_encoder_decoder" => *value == false,
        "partial_rotary_factor" => value.as_f64() == Some(1.0),
        "pruned_heads" => value.as_object().is_some_and(Map::is_empty),
        _ => false,
    }
}
