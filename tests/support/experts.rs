//! `tiny8`: random models with latent attention and experts whose sizes divide by 8 ranks, stored plain or quantised.
use crate::drafter::D0;
use crate::quantised::{quantise, Scheme};
use crate::support::{write_json, write_safetensors};
use serde_json::json;
use std::path::Path;

/// 16 heads, experts of 256; the first of three layers is dense, and a layer for multi-token prediction is behind the
/// last.
pub fn write_tiny8(dir: &Path, scheme: Option<Scheme>) {
    let (hidden, heads, ffn, expert, vocab, n_experts) = (128, 16, 512, 256, 512, 16);
    let (q_rank, kv_rank, nope, rope, v) = (64, 64, 64, 32, 32);
    let mut config = json!({
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": hidden, "num_hidden_layers": 3, "num_attention_heads": heads,
        "num_key_value_heads": heads, "intermediate_size": ffn, "moe_intermediate_size": expert, "q_lora_rank": q_rank, "kv_lora_rank": kv_rank,
        "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": v, "n_routed_experts": n_experts, "n_shared_experts": 1, "num_experts_per_tok": 4,
        "n_group": 4, "topk_group": 2, "norm_topk_prob": true, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "vocab_size": vocab,
        "num_nextn_predict_layers": 1, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "bos_token_id": 0, "eos_token_id": 1,
        "rope_theta": 10000.0, "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
        },
    });
    let mut d = D0::new();
    d.tensors.clear();
    d.random("model.embed_tokens.weight", &[vocab, hidden])
        .random("lm_head.weight", &[vocab, hidden])
        .random("model.norm.weight", &[hidden]);
    for layer in 0..4 {
        let mut add = |name: &str, shape: &[usize]| {
            d.random(&format!("model.layers.{layer}.{name}.weight"), shape);
        };
        add("input_layernorm", &[hidden]);
        add("post_attention_layernorm", &[hidden]);
        add("self_attn.q_a_proj", &[q_rank, hidden]);
        add("self_attn.q_a_layernorm", &[q_rank]);
        add("self_attn.q_b_proj", &[heads * (nope + rope), q_rank]);
        add("self_attn.kv_a_proj_with_mqa", &[kv_rank + rope, hidden]);
        add("self_attn.kv_a_layernorm", &[kv_rank]);
        add("self_attn.kv_b_proj", &[heads * (nope + v), kv_rank]);
        add("self_attn.o_proj", &[hidden, heads * v]);
        let mut mlp = |name: &str, dim: usize| {
            add(&format!("{name}.gate_proj"), &[dim, hidden]);
            add(&format!("{name}.up_proj"), &[dim, hidden]);
            add(&format!("{name}.down_proj"), &[hidden, dim]);
        };
        if layer == 0 {
            mlp("mlp", ffn);
            continue;
        }
        mlp("mlp.shared_experts", expert);
        (0..n_experts).for_each(|e| mlp(&format!("mlp.experts.{e}"), expert));
        add("mlp.gate", &[n_experts, hidden]);
        if layer == 3 {
            add("enorm", &[hidden]);
            add("hnorm", &[hidden]);
            add("eh_proj", &[hidden, 2 * hidden]);
            add("shared_head.norm", &[hidden]);
        }
        d.random(&format!("model.layers.{layer}.mlp.gate.e_score_correction_bias"), &[n_experts]);
    }
    let Some(scheme) = scheme else {
        write_json(&dir.join("config.json"), &config);
        return write_safetensors(&dir.join("model.safetensors"), &d.tensors);
    };
    config["quantization_config"] = scheme.config();
    // As Kimi-K2: its experts alone.
    let experts_only = matches!(scheme, Scheme::Int4(_));
    if experts_only {
        config["quantization_config"]["ignore"] =
            json!(["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"]);
    }
    let mut tensors = Vec::new();
    for tensor in &d.tensors {
        let quantised = tensor.name.contains("_proj")
            && !tensor.name.contains("eh_proj")
            && (!experts_only || tensor.name.contains(".experts."));
        match quantised {
            true => tensors.extend(quantise(tensor, scheme).0),
            false => tensors.push(tensor.clone()),
        }
    }
    write_json(&dir.join("config.json"), &config);
    write_safetensors(&dir.join("model.safetensors"), &tensors);
}
