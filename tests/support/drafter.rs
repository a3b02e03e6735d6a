//! `D0`: a random EAGLE-3 drafter for T0 (hidden 64, three tapped layers, 128 of 512 ids), in every variant that tests
//! need. Each test binary uses a part of this module.
#![allow(dead_code)]
use crate::support::{write_json, write_safetensors, TensorData};
use half::bf16;
use serde_json::{json, Map, Value};
use std::path::Path;
use volley::model::checkpoint::{Checkpoint, Read};
use volley::model::config::Config;
use volley::model::draft::DraftModel;
use volley::model::table::Table;
use volley::model::weights::Weights;

pub struct D0 {
    pub config: Map<String, Value>,
    pub tensors: Vec<TensorData>,
}

/// The target ids that D0 knows: every fourth.
pub fn draft_ids() -> Vec<i64> {
    (0..128).map(|i| 4 * i + 1).collect()
}

impl D0 {
    pub fn new() -> D0 {
        let config = json!({
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5, "vocab_size": 512, "draft_vocab_size": 128,
            "max_position_embeddings": 256, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": true},
        });
        let Value::Object(config) = config else { unreachable!() };
        let mut d0 = D0 { config, tensors: Vec::new() };
        for (name, shape) in [
            ("fc.weight", &[64, 192][..]),
            ("lm_head.weight", &[128, 64]),
            ("midlayer.hidden_norm.weight", &[64]),
            ("midlayer.input_layernorm.weight", &[64]),
            ("midlayer.mlp.down_proj.weight", &[64, 128]),
            ("midlayer.mlp.gate_proj.weight", &[128, 64]),
            ("midlayer.mlp.up_proj.weight", &[128, 64]),
            ("midlayer.post_attention_layernorm.weight", &[64]),
            ("midlayer.self_attn.k_proj.weight", &[32, 128]),
            ("midlayer.self_attn.o_proj.weight", &[64, 64]),
            ("midlayer.self_attn.q_proj.weight", &[64, 128]),
            ("midlayer.self_attn.v_proj.weight", &[32, 128]),
            ("norm.weight", &[64]),
        ] {
            d0.random(name, shape);
        }
        let ids = draft_ids();
        d0.d2t(&ids.iter().zip(0..).map(|(id, i)| id - i).collect::<Vec<i64>>());
        d0.t2d(&ids);
        d0
    }

    pub fn set(&mut self, key: &str, value: impl Into<Value>) -> &mut D0 {
        self.config.insert(key.into(), value.into());
        self
    }

    pub fn remove(&mut self, tensor: &str) -> &mut D0 {
        let before = self.tensors.len();
        self.tensors.retain(|t| t.name != tensor);
        assert!(self.tensors.len() < before, "D0 has no {tensor}");
        self
    }

    /// Replaces a tensor by a random one of another shape, or adds it.
    pub fn random(&mut self, name: &str, shape: &[usize]) -> &mut D0 {
        // Marsaglia's xorshift; the seed is the name.
        let mut state = name
            .bytes()
            .fold(0x9e37_79b9_7f4a_7c15u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
            | 1;
        let mut uniform = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        let (mean, width) = if shape.len() == 1 { (1.0, 0.4) } else { (0.0, 3.0 / (shape[1] as f32).sqrt()) };
        let n: usize = shape.iter().product();
        let bytes = (0..n).flat_map(|_| bf16::from_f32(mean + width * uniform()).to_le_bytes()).collect();
        self.put(name, "BF16", shape, bytes)
    }

    pub fn d2t(&mut self, offsets: &[i64]) -> &mut D0 {
        self.put("d2t", "I64", &[offsets.len()], offsets.iter().flat_map(|o| o.to_le_bytes()).collect())
    }

    pub fn t2d(&mut self, ids: &[i64]) -> &mut D0 {
        let mut known = vec![0u8; 512];
        ids.iter().for_each(|&id| known[id as usize] = 1);
        self.put("t2d", "BOOL", &[512], known)
    }

    fn put(&mut self, name: &str, dtype: &'static str, shape: &[usize], bytes: Vec<u8>) -> &mut D0 {
        self.tensors.retain(|t| t.name != name);
        self.tensors.push(TensorData { name: name.into(), dtype, shape: shape.to_vec(), bytes });
        self
    }

    pub fn write(&self, dir: &Path) {
        std::fs::create_dir_all(dir).unwrap();
        write_json(&dir.join("config.json"), &Value::Object(self.config.clone()));
        write_safetensors(&dir.join("model.safetensors"), &self.tensors);
    }
}

/// A random drafter for the tiny llama, with heads of a size that the kernels have; with the flags that add norms, or
/// without.
pub fn tiny_llama_drafter(config: &Config, weights: &Weights, norms: bool) -> DraftModel {
    tiny_llama_draft_model(&mut D0::new(), config, weights, norms)
}

/// The same with a head of the whole vocabulary, which `DraftModel::truncate` may shorten.
pub fn whole_llama_drafter(config: &Config, weights: &Weights) -> DraftModel {
    let mut d = D0::new();
    d.set("draft_vocab_size", config.vocab).remove("d2t").remove("t2d");
    let model = tiny_llama_draft_model(&mut d, config, weights, false);
    assert_eq!(model.map, None);
    model
}

fn tiny_llama_draft_model(d: &mut D0, config: &Config, weights: &Weights, norms: bool) -> DraftModel {
    let dir = tempfile::tempdir().unwrap();
    let head = d.config["draft_vocab_size"].as_u64().unwrap() as usize;
    for (name, shape) in [
        ("fc.weight", &[128, 384][..]),
        ("lm_head.weight", &[head, 128]),
        ("midlayer.hidden_norm.weight", &[128]),
        ("midlayer.input_layernorm.weight", &[128]),
        ("midlayer.mlp.down_proj.weight", &[128, 256]),
        ("midlayer.mlp.gate_proj.weight", &[256, 128]),
        ("midlayer.mlp.up_proj.weight", &[256, 128]),
        ("midlayer.post_attention_layernorm.weight", &[128]),
        ("midlayer.self_attn.k_proj.weight", &[128, 256]),
        ("midlayer.self_attn.o_proj.weight", &[128, 256]),
        ("midlayer.self_attn.q_proj.weight", &[256, 256]),
        ("midlayer.self_attn.v_proj.weight", &[128, 256]),
        ("norm.weight", &[128]),
    ] {
        d.random(name, shape);
    }
    for (key, n) in [("hidden_size", 128), ("intermediate_size", 256), ("head_dim", 64)] {
        d.set(key, n);
    }
    if norms {
        for flag in ["norm_before_residual", "fc_norm", "norm_output"] {
            d.set(flag, true);
        }
        for i in 0..3 {
            d.random(&format!("fc_norm.{i}.weight"), &[128]);
        }
    }
    d.write(dir.path());
    let model = DraftModel::open(dir.path(), config, weights, None, Read::Mmap).unwrap();
    model.weights.load(&mut |_, _| {}).unwrap();
    model
}

/// A random drafter with latent attention for a small target, of numbers that the kernels have.
pub fn latent_drafter(target: &Config) -> D0 {
    let (h, v) = (target.hidden, target.vocab);
    let mut d = D0::new();
    d.tensors.clear();
    for (key, n) in [
        ("hidden_size", h),
        ("vocab_size", v),
        ("draft_vocab_size", v),
        ("num_key_value_heads", 4),
        ("q_lora_rank", 32),
    ] {
        d.set(key, n);
    }
    for (key, n) in [("kv_lora_rank", 32), ("qk_nope_head_dim", 16), ("qk_rope_head_dim", 8), ("v_head_dim", 16)] {
        d.set(key, n);
    }
    d.set("architectures", json!(["Eagle3DeepseekV2ForCausalLM"])).set("model_type", "kimi_k2");
    let last = target.n_layers;
    d.set("eagle_config", json!({"eagle_aux_hidden_state_layer_ids": if last > 2 { vec![2, 3] } else { vec![2] }}));
    let n_taps = if last > 2 { 2 } else { 1 };
    for (name, shape) in [
        ("fc.weight", &[h, n_taps * h][..]),
        ("midlayer.hidden_norm.weight", &[h]),
        ("midlayer.input_layernorm.weight", &[h]),
        ("midlayer.mlp.down_proj.weight", &[h, 128]),
        ("midlayer.mlp.gate_proj.weight", &[128, h]),
        ("midlayer.mlp.up_proj.weight", &[128, h]),
        ("midlayer.post_attention_layernorm.weight", &[h]),
        ("midlayer.self_attn.q_a_proj.weight", &[32, 2 * h]),
        ("midlayer.self_attn.q_a_layernorm.weight", &[32]),
        ("midlayer.self_attn.q_b_proj.weight", &[96, 32]),
        ("midlayer.self_attn.kv_a_proj_with_mqa.weight", &[40, 2 * h]),
        ("midlayer.self_attn.kv_a_layernorm.weight", &[32]),
        ("midlayer.self_attn.kv_b_proj.weight", &[128, 32]),
        ("midlayer.self_attn.o_proj.weight", &[h, 64]),
        ("norm.weight", &[h]),
    ] {
        d.random(name, shape);
    }
    d
}

/// The model's own layer for multi-token prediction, or a random drafter with latent attention.
pub fn latent_draft_model(dir: &Path, config: &Config, weights: &Weights, mtp: bool) -> DraftModel {
    let model = if mtp {
        DraftModel::mtp(&Table::builtin().unwrap(), config, weights, &Checkpoint::open(dir, Read::Mmap).unwrap())
            .unwrap()
    } else {
        let draft = tempfile::tempdir().unwrap();
        latent_drafter(config).write(draft.path());
        DraftModel::open(draft.path(), config, weights, None, Read::Mmap).unwrap()
    };
    model.weights.load(&mut |_, _| {}).unwrap();
    model
}
