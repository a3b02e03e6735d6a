//! The families of models: by which names of config.json each is known, and what its config class takes for granted. A
//! new family is a row of `FAMILIES`, and a section of weights.toml.
use super::keys::Keys;
use anyhow::{bail, Result};
use serde_json::Value;

#[derive(Clone, Copy)]
pub(super) struct Family {
    pub(super) architecture: &'static str,
    /// model_type, and the section of weights.toml.
    pub(super) arch: &'static str,
    pub(super) bias: Bias,
    /// Whether mlp_bias is a key of its config class.
    pub(super) mlp_bias: bool,
    pub(super) qk_norm: bool,
    /// Whether a sliding_window counts without use_sliding_window.
    pub(super) always_slides: bool,
    /// The sliding window of a file without that key, the default of the config class.
    pub(super) default_window: Option<usize>,
    pub(super) layers: Layers,
}

/// Which attention projections have one.
#[derive(Clone, Copy)]
pub(super) enum Bias {
    /// attention_bias says so, for q, k, v and o alike.
    Configured,
    /// q, k and v always, o never; there is no key for it.
    Qkv,
    Never,
}

/// The kind of attention and feed-forward layer, and whose keys describe them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Layers {
    /// Grouped-query attention, no experts.
    Plain,
    /// Grouped-query attention, experts by Qwen3-MoE's keys.
    QwenExperts,
    /// Latent attention and experts by DeepSeek-V3's keys.
    DeepSeek,
}

const LLAMA: Family = Family {
    architecture: "LlamaForCausalLM",
    arch: "llama",
    bias: Bias::Configured,
    mlp_bias: true,
    qk_norm: false,
    always_slides: true,
    default_window: None,
    layers: Layers::Plain,
};

const QWEN3: Family = Family {
    architecture: "Qwen3ForCausalLM",
    arch: "qwen3",
    mlp_bias: false,
    qk_norm: true,
    always_slides: false,
    ..LLAMA
};

const DEEPSEEK: Family = Family {
    architecture: "DeepseekV3ForCausalLM",
    arch: "deepseek_v3",
    bias: Bias::Never,
    mlp_bias: false,
    layers: Layers::DeepSeek,
    ..LLAMA
};

const FAMILIES: &[Family] = &[
    LLAMA,
    Family {
        architecture: "MistralForCausalLM",
        arch: "mistral",
        bias: Bias::Never,
        mlp_bias: false,
        default_window: Some(4096),
        ..LLAMA
    },
    Family {
        architecture: "Qwen2ForCausalLM",
        arch: "qwen2",
        bias: Bias::Qkv,
        mlp_bias: false,
        always_slides: false,
        ..LLAMA
    },
    QWEN3,
    Family { architecture: "Qwen3MoeForCausalLM", arch: "qwen3_moe", layers: Layers::QwenExperts, ..QWEN3 },
    DEEPSEEK,
    Family { arch: "kimi_k2", ..DEEPSEEK },
    Family { architecture: "KimiK25ForConditionalGeneration", arch: "kimi_k25", ..DEEPSEEK },
    // transformers' own spelling of the class
    Family { architecture: "Kimi_K25ForConditionalGeneration", arch: "kimi_k25", ..DEEPSEEK },
];

pub(super) fn parse_family(keys: &mut Keys) -> Result<Family> {
    let model_type = keys.take("model_type");
    let architectures = keys.take("architectures");
    let name = match &architectures {
        Some(Value::Array(names)) if names.len() == 1 => names[0].as_str(),
        Some(other) => bail!("config.json: architectures: expected one name, found {other}"),
        None => None,
    };
    let known = || {
        let mut names: Vec<&str> = FAMILIES.iter().map(|family| family.architecture).collect();
        names.dedup();
        names.join(", ")
    };
    let families = FAMILIES.iter().copied().filter(|family| match (name, &model_type) {
        (Some(name), _) => family.architecture == name,
        (None, Some(model_type)) => model_type == family.arch,
        (None, None) => false,
    });
    let families: Vec<Family> = families.collect();
    if families.is_empty() {
        let Some(found) = architectures.or(model_type) else {
            bail!("config.json: expected architectures or model_type, found neither")
        };
        bail!("config.json: expected an architecture of {}, found {found}", known());
    }
    // Kimi-K2 calls itself by DeepSeek's architecture.
    let found =
        families.iter().position(|family| model_type.as_ref().is_none_or(|model_type| model_type == family.arch));
    match found {
        Some(i) => Ok(families[i]),
        None => {
            let arch: Vec<String> = families.iter().map(|family| format!("{:?}", family.arch)).collect();
            let (arch, architecture, found) =
                (arch.join(" or "), families[0].architecture, model_type.unwrap_or_default());
            bail!("config.json: model_type: expected {arch} for {architecture}, found {found}")
        }
    }
}
