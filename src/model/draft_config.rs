//! The config.json of an EAGLE-3 head, in the dialects found in the wild (SafeAILab, SpecForge, speculators, ModelOpt):
//! read strictly, compared with no target yet.
use super::config::{parse_latent, Latent};
use super::keys::{is_descriptive, is_neutral, Keys};
use super::rope::{parse_rope, Rope};
use anyhow::{bail, ensure, Context, Result};
use serde_json::Value;
use std::path::Path;

/// Names of `architectures` that mean an EAGLE-3 head; SafeAILab's own files carry the target's plain name.
const ARCHITECTURES: [&str; 8] = [
    "LlamaForCausalLM",
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "Eagle3Model",
    // With latent attention.
    "Eagle3DeepseekV2ForCausalLM",
];

/// Who wrote the config: it decides how layer ids are counted and what an absent flag means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    Speculators,
    /// SafeAILab, SpecForge, ModelOpt.
    Plain,
}

/// config.json, read; nothing compared with the target yet.
pub(super) struct DraftConfig {
    pub(super) dialect: Dialect,
    pub(super) hidden: usize,
    pub(super) target_hidden: Option<usize>,
    pub(super) n_heads: usize,
    pub(super) n_kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) ffn_dim: usize,
    pub(super) vocab: usize,
    pub(super) draft_vocab: usize,
    pub(super) norm_eps: f32,
    pub(super) rope: Rope,
    pub(super) latent: Option<Latent>,
    pub(super) qkv_bias: bool,
    pub(super) qk_norm: bool,
    pub(super) tied: bool,
    pub(super) norm_before_residual: bool,
    pub(super) norm_before_fc: bool,
    pub(super) fc_norm: bool,
    pub(super) norm_output: bool,
    /// Layer ids as written, with the key they stand under.
    pub(super) layer_ids: Option<(&'static str, Vec<usize>)>,
    pub(super) n_features: Option<usize>,
}

pub(super) const LAYER_IDS: &str = "eagle_aux_hidden_state_layer_ids";

impl DraftConfig {
    pub(super) fn open(dir: &Path) -> Result<DraftConfig> {
        let path = dir.join("config.json");
        let json = std::fs::read_to_string(&path)
            .with_context(|| format!("{}: expected a drafter's config.json", path.display()))?;
        DraftConfig::parse(&json)
    }

    fn parse(json: &str) -> Result<DraftConfig> {
        let mut keys = Keys::parse(json, "config.json")?;
        let dialect = match keys.take("speculators_model_type") {
            None => Dialect::Plain,
            Some(kind) if kind == "eagle3" => Dialect::Speculators,
            Some(kind) => bail!("config.json: speculators_model_type: expected \"eagle3\", found {kind}"),
        };
        // The layer's own fields are nested in that dialect. Outer keys win, except that the outer model_type is that
        // of the file.
        if let Some(Value::Object(layer)) = keys.take("transformer_layer_config") {
            keys.take("model_type");
            for (key, value) in layer {
                keys.map.entry(key).or_insert(value);
            }
        }
        let mut eagle = match keys.take("eagle_config") {
            Some(Value::Object(map)) => Keys { map, path: "config.json: eagle_config.".into() },
            Some(other) => bail!("config.json: eagle_config: expected an object, found {other}"),
            None => Keys { map: Default::default(), path: String::new() },
        };
        let style = parse_style(&mut keys)?;
        if let Some(activation) = keys.take("hidden_act").filter(|act| *act != "silu") {
            bail!("config.json: hidden_act: expected \"silu\", found {activation}");
        }
        if let Some(n) = keys.optional_count("num_hidden_layers", 1 << 12)?.filter(|n| *n != 1) {
            bail!("config.json: num_hidden_layers: expected 1, found {n}: trainers do not agree on the norms of later drafter layers");
        }
        refuse_sliding(&mut keys)?;
        // The flags that change arithmetic; some files nest them.
        let mut flag = |key: &str| -> Result<Option<bool>> {
            match (keys.flag(key)?, eagle.flag(key)?) {
                (Some(a), Some(b)) if a != b => {
                    bail!("config.json: {key}: expected one value, found {a} and, in eagle_config, {b}")
                }
                (outer, inner) => Ok(outer.or(inner)),
            }
        };
        let norm_before_residual = flag("norm_before_residual")?.unwrap_or(dialect == Dialect::Speculators);
        let norm_before_fc = flag("norm_before_fc")?.unwrap_or(false);
        let fc_norm = flag("fc_norm")?.unwrap_or(false) | flag("use_aux_norm")?.unwrap_or(false);
        let norm_output = flag("norm_output")?.unwrap_or(false);
        if flag("use_aux_hidden_state")? == Some(false) {
            bail!("config.json: use_aux_hidden_state: expected true, found false: a head on the target's last hidden state alone is not supported");
        }
        if norm_before_fc && fc_norm {
            bail!("config.json: fc_norm: expected one norm before fc, found norm_before_fc = true as well");
        }
        let outer = keys.take(LAYER_IDS).map(|ids| (LAYER_IDS, ids));
        let inner = eagle.take(LAYER_IDS).map(|ids| ("eagle_config.eagle_aux_hidden_state_layer_ids", ids));
        let layer_ids = match outer.or(inner) {
            Some((key, value)) => {
                let ids: Option<Vec<usize>> =
                    value.as_array().and_then(|ids| ids.iter().map(|id| Some(id.as_u64()? as usize)).collect());
                let ids =
                    ids.with_context(|| format!("config.json: {key}: expected a list of layers, found {value}"))?;
                // ModelOpt writes an empty list for the default.
                (!ids.is_empty()).then_some((key, ids))
            }
            None => None,
        };
        let neutral =
            [("use_input_layernorm_in_first_layer", true), ("use_last_layernorm", true), ("use_mtp_layernorm", false)];
        for (key, only) in neutral {
            if let Some(value) = eagle.flag(key)?.filter(|value| *value != only) {
                bail!("config.json: eagle_config.{key}: expected {only}, found {value}: not supported");
            }
        }
        if let Some(n) = eagle.optional_count("parallel_draft_step", 64)?.filter(|n| *n != 1) {
            bail!("config.json: eagle_config.parallel_draft_step: expected 1, found {n}: not supported");
        }
        eagle.take("next_layer_regular"); // about layers after the first
        eagle.refuse_unread(|_, _| false)?;

        let hidden = keys.count("hidden_size", 1 << 20)?;
        let n_heads = keys.count("num_attention_heads", 1 << 16)?;
        let n_kv_heads = keys.optional_count("num_key_value_heads", 1 << 16)?.unwrap_or(n_heads);
        ensure!(
            n_heads % n_kv_heads == 0,
            "config.json: num_attention_heads: expected a multiple of num_key_value_heads = {n_kv_heads}, found {n_heads}"
        );
        let latent = if style == Style::Latent { Some(parse_latent(&mut keys, n_heads, n_kv_heads)?) } else { None };
        if latent.is_some() {
            refuse_experts(&mut keys)?;
        }
        let head_dim = match (latent, keys.optional_count("head_dim", 1 << 14)?) {
            (Some(latent), _) => latent.nope_dim + latent.rope_dim,
            (None, head_dim) => head_dim.unwrap_or(hidden / n_heads),
        };
        ensure!(
            head_dim > 0 && head_dim % 2 == 0,
            "config.json: head_dim: expected an even number for rope, found {head_dim}"
        );
        let vocab = keys.count("vocab_size", 1 << 26)?;
        let draft_vocab = keys.optional_count("draft_vocab_size", 1 << 26)?.unwrap_or(vocab);
        ensure!(
            draft_vocab <= vocab,
            "config.json: draft_vocab_size: expected at most vocab_size = {vocab}, found {draft_vocab}"
        );
        // SafeAILab's heads were trained at this length and say no other.
        let context = keys.optional_count("max_position_embeddings", 1 << 30)?.unwrap_or(2048);
        let config = DraftConfig {
            dialect,
            hidden,
            target_hidden: keys.optional_count("target_hidden_size", 1 << 20)?,
            n_heads,
            n_kv_heads,
            head_dim,
            ffn_dim: keys.count("intermediate_size", 1 << 22)?,
            vocab,
            draft_vocab,
            norm_eps: keys.positive("rms_norm_eps", 1.0)? as f32,
            rope: parse_rope(&mut keys, context)?,
            qkv_bias: keys.flag("attention_bias")?.unwrap_or(false),
            latent,
            qk_norm: style == Style::Qwen3,
            tied: keys.flag("tie_word_embeddings")?.unwrap_or(false),
            norm_before_residual,
            norm_before_fc,
            fc_norm,
            norm_output,
            layer_ids,
            n_features: keys.optional_count("num_aux_hidden_states", 64)?,
        };
        keys.refuse_unread(|key, value| is_descriptive(key) || is_neutral(key, value) || is_of_trainers(key))?;
        Ok(config)
    }
}

/// The attention of a head.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Style {
    Llama,
    /// With norms on q and k.
    Qwen3,
    /// DeepSeek's.
    Latent,
}

/// Refuses what is no EAGLE-3 head.
fn parse_style(keys: &mut Keys) -> Result<Style> {
    let architectures = keys.take("architectures");
    let model_type = keys.take("model_type");
    let name =
        architectures.as_ref().and_then(|names| names.as_array()?.first()?.as_str()).unwrap_or("LlamaForCausalLM");
    if !ARCHITECTURES.contains(&name) {
        bail!("config.json: architectures: expected a drafter of {}, found {name:?}", ARCHITECTURES.join(", "));
    }
    let latent = keys.map.get("kv_lora_rank").is_some_and(|rank| !rank.is_null());
    match (model_type.as_ref().and_then(Value::as_str), latent) {
        (None | Some("kimi_k2" | "deepseek_v3" | "eagle3" | "speculator_model"), true) => Ok(Style::Latent),
        (None | Some("llama" | "eagle3" | "speculator_model"), false) if name != "Qwen3ForCausalLM" => Ok(Style::Llama),
        (None | Some("qwen3" | "eagle3" | "speculator_model"), false) if name == "Qwen3ForCausalLM" => Ok(Style::Qwen3),
        (Some("qwen3"), false) => Ok(Style::Qwen3),
        (found, _) => {
            let expected =
                if latent { "\"kimi_k2\" or \"deepseek_v3\" as attention is latent" } else { "\"llama\" or \"qwen3\"" };
            bail!("config.json: model_type: expected {expected}, found {:?}", found.unwrap_or_default())
        }
    }
}

/// The one layer of a drafter with latent attention has no experts, whatever else its config takes over from the
/// target's.
fn refuse_experts(keys: &mut Keys) -> Result<()> {
    let n_dense = keys.take("first_k_dense_replace").and_then(|n| n.as_u64());
    let n_experts = keys.take("n_routed_experts").filter(|n| *n != 0);
    if let (Some(n), None | Some(0)) = (&n_experts, n_dense) {
        bail!("config.json: n_routed_experts: expected none, or first_k_dense_replace = 1, found {n}: not supported");
    }
    // About experts that the layer does not have.
    const KEYS: [&str; 11] = [
        "n_shared_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "moe_layer_freq",
        "n_group",
        "topk_group",
        "topk_method",
        "scoring_func",
        "norm_topk_prob",
        "routed_scaling_factor",
        "num_nextn_predict_layers",
    ];
    KEYS.iter().for_each(|key| drop(keys.take(key)));
    Ok(())
}

/// Attention over a window is not implemented; Qwen configs carry a window that they do not use.
fn refuse_sliding(keys: &mut Keys) -> Result<()> {
    let window = keys.take("sliding_window");
    keys.take("max_window_layers");
    if let (Some(window), Some(true) | None) = (window, keys.flag("use_sliding_window")?) {
        bail!("config.json: sliding_window: expected full attention, found {window}");
    }
    match keys.take("layer_types") {
        Some(Value::Array(types)) if types.iter().all(|kind| kind == "full_attention") => Ok(()),
        Some(other) => bail!("config.json: layer_types: expected only \"full_attention\", found {other}"),
        None => Ok(()),
    }
}

/// Keys that trainers write beside those of transformers; none touches the arithmetic of drafting. End tokens are the
/// target's business.
fn is_of_trainers(key: &str) -> bool {
    const KEYS: [&str; 8] = [
        "speculators_config",
        "speculators_version",
        "has_no_defaults_at_init",
        "embed_requires_grad",
        "draft_model_type",
        "auto_map",
        "bos_token_id",
        "eos_token_id",
    ];
    KEYS.contains(&key)
}
