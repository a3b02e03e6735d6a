//! config.json and generation_config.json -> `Config`, strictly: whatever changes the arithmetic is either read or
//! refused by name. Both dialects are read: the hub's (rope_theta, rope_scaling, torch_dtype) and that of transformers
//! 5 (rope_parameters, dtype). What the family alone says is in family.rs.
use super::family::{parse_family, Bias, Family, Layers};
use super::keys::{is_descriptive, is_neutral, Keys};
use super::quant::{Format, Quant, FP8_DENSE};
use super::role::{Part, Role};
use super::rope::{parse_rope, Rope};
use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;
use std::path::Path;

/// The shape of a model and the constants of its arithmetic.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The section of weights.toml: the `arch` of a row of FAMILIES.
    pub arch: String,
    pub hidden: usize,
    pub n_layers: usize,
    pub n_heads: usize,
    /// 1 with latent attention: all heads share one latent.
    pub n_kv_heads: usize,
    /// Of queries and keys; with latent attention `nope_dim + rope_dim` of a query before it is absorbed.
    pub head_dim: usize,
    /// Of layers without experts.
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
    /// Multi-head latent attention; None is grouped-query attention.
    pub latent: Option<Latent>,
    pub experts: Option<Experts>,
    /// How matrices are stored; None: as bf16, f16 or f32.
    pub quant: Option<Quant>,
    /// Plain matrices that every token reads become FP8 when they are loaded (`format`): asked for by the user, not by
    /// a config.
    pub fp8_dense: bool,
    /// num_nextn_predict_layers: layers behind the last one, made for drafting.
    pub n_mtp_layers: usize,
    /// tie_word_embeddings: the head is the embedding table.
    pub tied: bool,
    pub bos: Option<u32>,
    /// End tokens, each once, with the file or files that named it.
    pub eos: Vec<(u32, &'static str)>,
}

/// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values are made of one latent a token, which
/// is what the cache holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Latent {
    /// q_lora_rank
    pub q_rank: usize,
    /// kv_lora_rank: numbers of the latent.
    pub kv_rank: usize,
    /// qk_nope_head_dim: numbers of a head's query and key that are not rotated.
    pub nope_dim: usize,
    /// qk_rope_head_dim: those that are; the rotated key is one for all heads.
    pub rope_dim: usize,
    /// v_head_dim
    pub v_dim: usize,
    /// rope_interleave: in the checkpoint, element 2i is rotated with element 2i + 1.
    pub interleaved: bool,
}

impl Latent {
    /// Numbers that the cache holds for a position of a layer: the normalised latent, then the rotated key.
    pub fn row_dim(&self) -> usize {
        self.kv_rank + self.rope_dim
    }
}

/// A feed-forward layer of many, of which each token uses a few.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    pub routing: Routing,
    /// moe_intermediate_size
    pub expert_dim: usize,
    /// Width of the expert that every token uses beside; 0 without one.
    pub shared_dim: usize,
    /// Layers that have none; those behind the last (`n_mtp_layers`) always have.
    pub dense_layers: Vec<usize>,
}

/// How the experts of a token are chosen and weighed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    pub n_experts: usize,
    /// num_experts_per_tok
    pub top_k: usize,
    pub scoring: Scoring,
    /// The experts are in so many groups (n_group), of which the best `top_groups` are kept.
    pub n_groups: usize,
    pub top_groups: usize,
    /// norm_topk_prob: the chosen weights are divided by their sum.
    pub normalised: bool,
    /// routed_scaling_factor
    pub scale: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each; chosen by score plus e_score_correction_bias, weighed by score alone.
    Sigmoid,
}

impl Config {
    /// Reads config.json and, if there is one, generation_config.json.
    pub fn open(dir: &Path) -> Result<Config> {
        let path = dir.join("config.json");
        let config = std::fs::read_to_string(&path)
            .with_context(|| format!("{}: expected a model's config.json", path.display()))?;
        let generation_path = dir.join("generation_config.json");
        // A dangling link is an error, an absent file is not.
        let generation = match generation_path.symlink_metadata() {
            Ok(_) => Some(
                std::fs::read_to_string(&generation_path)
                    .with_context(|| format!("{}: cannot be read", generation_path.display()))?,
            ),
            Err(_) => None,
        };
        Config::parse(&config, generation.as_deref()).with_context(|| dir.display().to_string())
    }

    pub fn parse(config_json: &str, generation_json: Option<&str>) -> Result<Config> {
        let mut keys = Keys::parse(config_json, CONFIG)?;
        take_text_config(&mut keys)?;
        let config = parse_config(&mut keys)?;
        keys.refuse_unread(|key, value| is_descriptive(key) || is_neutral(key, value))?;
        match generation_json {
            Some(json) => parse_generation(config, Keys::parse(json, GENERATION)?),
            None => Ok(config),
        }
    }

    /// Numbers of a query and key that are rotated.
    pub fn rope_dim(&self) -> usize {
        self.latent.map_or(self.head_dim, |latent| latent.rope_dim)
    }

    /// What scores of latent attention are multiplied by: YaRN makes the softmax sharper, as in DeepSeek's own code.
    pub fn latent_scale(&self) -> f32 {
        self.rope.latent_scale(self.head_dim)
    }

    pub fn has_experts(&self, layer: usize) -> bool {
        self.experts.as_ref().is_some_and(|experts| !experts.dense_layers.contains(&layer))
    }

    /// How a matrix of this role is stored where the model runs.
    pub fn format(&self, role: Role) -> Format {
        let stored = |role| self.quant.as_ref().map_or(Format::Plain, |quant| quant.format(role));
        let dense = match role.part() {
            // What kv_b becomes is plain whatever it was.
            Part::Attention => role != Role::KvB,
            Part::Dense => true,
            Part::Head => !self.tied,
            // Beside experts that are plain it is one of them.
            Part::Shared => stored(Role::ExpertGateUp) != Format::Plain,
            Part::Experts | Part::Other => false,
        };
        match stored(role) {
            Format::Plain if dense && self.fp8_dense => FP8_DENSE,
            format => format,
        }
    }
}

const CONFIG: &str = "config.json";
const GENERATION: &str = "generation_config.json";
const BOTH: &str = "config.json and generation_config.json";

/// A model of text and images keeps the text model's keys in text_config. Takes them out; what is left is about images,
/// or says the same.
fn take_text_config(keys: &mut Keys) -> Result<()> {
    if keys.map.get("model_type").is_none_or(|model_type| model_type != "kimi_k25") {
        return Ok(());
    }
    let Some(Value::Object(mut text)) = keys.take("text_config") else {
        bail!("config.json: text_config: expected the text model's settings in a kimi_k25 model, found none");
    };
    let inner = text.shift_remove("model_type");
    ensure!(
        inner.as_ref().is_none_or(|kind| kind == "kimi_k2" || kind == "deepseek_v3"),
        "config.json: text_config.model_type: expected \"kimi_k2\", found {}",
        inner.unwrap_or_default()
    );
    text.shift_remove("architectures");
    // The outer tie_word_embeddings is none of the model's: transformers' class has it true by default although there
    // is a head.
    keys.take("tie_word_embeddings");
    for key in IMAGE_KEYS {
        keys.take(key);
    }
    for (key, value) in text {
        match keys.map.get(&key).filter(|outer| !outer.is_null()) {
            Some(outer) if *outer != value && !value.is_null() && !is_descriptive(&key) => {
                bail!("config.json: {key}: expected one value, found {outer} and, in text_config, {value}")
            }
            Some(_) => {}
            None => {
                keys.map.insert(key, value);
            }
        }
    }
    Ok(())
}

/// What a model of images and text says about images.
const IMAGE_KEYS: [&str; 6] = [
    "vision_config",
    "media_placeholder_token_id",
    "image_token_id",
    "ignore_index",
    "use_unified_vision_chunk",
    "video_placeholder",
];

fn parse_config(keys: &mut Keys) -> Result<Config> {
    let quant = keys.take("quantization_config").map(Quant::parse).transpose()?;
    let family = parse_family(keys)?;
    for key in ["hidden_act", "hidden_activation"] {
        if let Some(activation) = keys.take(key) {
            ensure!(
                activation == "silu" || activation == "swish",
                "config.json: {key}: expected \"silu\", found {activation}"
            );
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
    let latent = if family.layers == Layers::DeepSeek { Some(parse_latent(keys, n_heads, n_kv_heads)?) } else { None };
    let head_dim = match (latent, keys.optional_count("head_dim", 1 << 14)?) {
        // Configs saved by transformers 5 say qk_rope_head_dim under this key.
        (Some(latent), _) => latent.nope_dim + latent.rope_dim,
        (None, Some(head_dim)) => head_dim,
        (None, None) => {
            ensure!(
                hidden % n_heads == 0,
                "config.json: hidden_size: expected a multiple of num_attention_heads = {n_heads} as there is no head_dim, found {hidden}"
            );
            hidden / n_heads
        }
    };
    ensure!(head_dim % 2 == 0, "config.json: head_dim: expected an even number for rope, found {head_dim}");
    let experts = match family.layers {
        Layers::Plain => None,
        Layers::QwenExperts => Some(parse_qwen_experts(keys, n_layers)?),
        Layers::DeepSeek => Some(parse_deepseek_experts(keys, n_layers)?),
    };
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
        n_kv_heads: if latent.is_some() { 1 } else { n_kv_heads },
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
        latent,
        experts,
        quant,
        fp8_dense: false,
        n_mtp_layers: if latent.is_some() {
            keys.optional_whole("num_nextn_predict_layers", 16)?.unwrap_or(0)
        } else {
            0
        },
        // The default of all families' config classes.
        tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
        bos,
        eos,
    })
}

pub(super) fn parse_latent(keys: &mut Keys, n_heads: usize, n_kv_heads: usize) -> Result<Latent> {
    ensure!(
        n_kv_heads == n_heads,
        "config.json: num_key_value_heads: expected num_attention_heads = {n_heads} as attention is latent, found {n_kv_heads}"
    );
    let most = 1 << 16;
    let q_rank = keys.optional_count("q_lora_rank", most)?;
    let q_rank = q_rank.context(
        "config.json: q_lora_rank: expected a number, found none: queries without a latent are not supported",
    )?;
    let latent = Latent {
        q_rank,
        kv_rank: keys.count("kv_lora_rank", most)?,
        nope_dim: keys.count("qk_nope_head_dim", most)?,
        rope_dim: keys.count("qk_rope_head_dim", most)?,
        v_dim: keys.count("v_head_dim", most)?,
        interleaved: keys.flag("rope_interleave")?.unwrap_or(true),
    };
    ensure!(
        latent.rope_dim % 2 == 0,
        "config.json: qk_rope_head_dim: expected an even number, found {}",
        latent.rope_dim
    );
    if let Some(dim) =
        keys.optional_count("qk_head_dim", 2 * most)?.filter(|dim| *dim != latent.nope_dim + latent.rope_dim)
    {
        bail!("config.json: qk_head_dim: expected qk_nope_head_dim + qk_rope_head_dim, found {dim}");
    }
    keys.take("auto_map"); // the authors' own code for what is implemented here
    Ok(latent)
}

fn parse_deepseek_experts(keys: &mut Keys, n_layers: usize) -> Result<Experts> {
    for (key, only) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_router_dtype", "float32")] {
        if let Some(value) = keys.take(key).filter(|value| *value != only) {
            bail!("config.json: {key}: expected \"{only}\", found {value}: not supported");
        }
    }
    if let Some(n) = keys.optional_count("moe_layer_freq", n_layers)?.filter(|n| *n != 1) {
        bail!("config.json: moe_layer_freq: expected 1, found {n}: not supported");
    }
    let expert_dim = keys.count("moe_intermediate_size", 1 << 22)?;
    let routing = Routing {
        n_experts: keys.count("n_routed_experts", MOST_EXPERTS)?,
        top_k: keys.count("num_experts_per_tok", MOST_EXPERTS)?,
        scoring: Scoring::Sigmoid,
        n_groups: keys.optional_count("n_group", MOST_EXPERTS)?.unwrap_or(1),
        top_groups: keys.optional_count("topk_group", MOST_EXPERTS)?.unwrap_or(1),
        normalised: keys.flag("norm_topk_prob")?.unwrap_or(true),
        scale: keys.optional_positive("routed_scaling_factor", 1e6)?.unwrap_or(1.0) as f32,
    };
    let Routing { n_experts, n_groups, top_groups, .. } = routing;
    ensure!(
        n_experts % n_groups == 0,
        "config.json: n_group: expected a divisor of n_routed_experts = {n_experts}, found {n_groups}"
    );
    ensure!(
        top_groups <= n_groups,
        "config.json: topk_group: expected at most n_group = {n_groups}, found {top_groups}"
    );
    // A group is judged by its best two.
    ensure!(
        n_groups == 1 || n_experts / n_groups >= 2,
        "config.json: n_group: expected groups of two or more experts, found {n_groups}"
    );
    check_top_k(&routing, n_experts / n_groups * top_groups)?;
    let n_shared = keys.optional_whole("n_shared_experts", 64)?.unwrap_or(0);
    let n_dense = keys.optional_whole("first_k_dense_replace", n_layers)?.unwrap_or(0);
    Ok(Experts { routing, expert_dim, shared_dim: n_shared * expert_dim, dense_layers: (0..n_dense).collect() })
}

fn parse_qwen_experts(keys: &mut Keys, n_layers: usize) -> Result<Experts> {
    let expert_dim = keys.count("moe_intermediate_size", 1 << 22)?;
    // transformers 5 writes the second name.
    let n_experts = match (
        keys.optional_count("num_experts", MOST_EXPERTS)?,
        keys.optional_count("num_local_experts", MOST_EXPERTS)?,
    ) {
        (Some(a), Some(b)) if a != b => {
            bail!("config.json: num_experts: expected to agree with num_local_experts, found {a} and {b}")
        }
        (Some(n), _) | (_, Some(n)) => n,
        (None, None) => bail!("config.json: num_experts: expected a number from 1 to {MOST_EXPERTS}, found none"),
    };
    let routing = Routing {
        n_experts,
        top_k: keys.count("num_experts_per_tok", MOST_EXPERTS)?,
        scoring: Scoring::Softmax,
        n_groups: 1,
        top_groups: 1,
        normalised: keys.flag("norm_topk_prob")?.unwrap_or(false),
        scale: 1.0,
    };
    check_top_k(&routing, n_experts)?;
    let step = keys.optional_count("decoder_sparse_step", 1 << 12)?.unwrap_or(1);
    let dense: Vec<usize> = match keys.take("mlp_only_layers") {
        None => Vec::new(),
        Some(value) => serde_json::from_value(value.clone())
            .with_context(|| format!("config.json: mlp_only_layers: expected a list of layers, found {value}"))?,
    };
    let dense_layers = (0..n_layers).filter(|layer| dense.contains(layer) || (layer + 1) % step != 0).collect();
    Ok(Experts { routing, expert_dim, shared_dim: 0, dense_layers })
}

const MOST_EXPERTS: usize = 1 << 14;

fn check_top_k(routing: &Routing, available: usize) -> Result<()> {
    let top_k = routing.top_k;
    ensure!(
        top_k <= available,
        "config.json: num_experts_per_tok: expected at most the {available} that can be chosen, found {top_k}"
    );
    Ok(())
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
            ensure!(
                types.len() == n_layers,
                "config.json: layer_types: expected {n_layers} entries, found {}",
                types.len()
            );
            match types.iter().find(|layer_type| *layer_type != "full_attention") {
                Some(other) => bail!("config.json: layer_types: expected only \"full_attention\", found {other}"),
                None => Ok(()),
            }
        }
        Some(other) => bail!("config.json: layer_types: expected a list, found {other}"),
    }
}

/// Only the token ids: the sampling defaults of a model are the user's business.
fn parse_generation(mut config: Config, mut keys: Keys) -> Result<Config> {
    let token = |key: &str, id: u64| -> Result<u32> {
        ensure!(
            id < config.vocab as u64,
            "{GENERATION}: {key}: expected an id below vocab_size = {}, found {id}",
            config.vocab
        );
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
