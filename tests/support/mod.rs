//! Model directories made on the spot: `T0`, a random Llama-style model with tokenizer and chat template, in every
//! variant that tests need. A tensor's values depend on its name and the seed only, so that sharding, tying or adding
//! tensors leaves the others as they are. Each test binary uses a part of this module.
#![allow(dead_code)]

use half::{bf16, f16};
use serde_json::{json, Map, Value};
use std::fs;
use std::path::Path;

/// Hidden 64, 4 layers, 4 heads, 2 KV heads, head size 16, FFN 128, vocabulary 512, context 256, bf16, untied, one
/// file. Every builder method replaces one of these; `write` makes the directory.
#[derive(Clone)]
pub struct T0 {
    arch: &'static str,
    config: Map<String, Value>,
    generation: Map<String, Value>,
    v5: bool,
    head: Option<Head>,
    dtype: &'static str,
    shards: usize,
    padding: usize,
    seed: u64,
    template: Option<String>,
    adds_bos: bool,
}

/// The checkpoint's lm_head.weight.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Head {
    Absent,
    /// The bytes of the embedding.
    Equal,
    Own,
}

/// What a safetensors file holds.
#[derive(Clone)]
pub struct TensorData {
    pub name: String,
    pub dtype: &'static str,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// Ids of T0's control tokens; those below 256 are bytes, those below 504 merges.
pub const ENDOFTEXT: u32 = 504;
pub const IM_START: u32 = 505;
pub const IM_END: u32 = 506;
pub const BOS: u32 = 509;

/// ChatML without a first token of its own.
pub const CHATML: &str =
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}\
                          {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

impl T0 {
    pub fn new() -> T0 {
        let config = json!({
            "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "rope_theta": 10000.0, "tie_word_embeddings": false, "bos_token_id": BOS, "eos_token_id": IM_END, "torch_dtype": "bfloat16",
        });
        let Value::Object(config) = config else { unreachable!() };
        T0 {
            arch: "llama",
            config,
            generation: Map::new(),
            v5: false,
            head: None,
            dtype: "BF16",
            shards: 1,
            padding: 0,
            seed: 0,
            template: Some(CHATML.into()),
            adds_bos: false,
        }
    }

    /// llama, mistral, qwen2 or qwen3, with the tensors that each has.
    pub fn arch(mut self, arch: &'static str) -> T0 {
        self.arch = arch;
        self
    }

    /// A key of config.json.
    pub fn set(mut self, key: &str, value: impl Into<Value>) -> T0 {
        self.config.insert(key.into(), value.into());
        self
    }

    pub fn remove(mut self, key: &str) -> T0 {
        self.config.shift_remove(key);
        self
    }

    /// tie_word_embeddings; the head tensor is then left out unless `head` says otherwise.
    pub fn tied(self, tied: bool) -> T0 {
        self.set("tie_word_embeddings", tied)
    }

    pub fn head(mut self, head: Head) -> T0 {
        self.head = Some(head);
        self
    }

    /// attention_bias and mlp_bias: biases on every linear.
    pub fn biases(self) -> T0 {
        self.set("attention_bias", true).set("mlp_bias", true)
    }

    /// rope_scaling, for example {"rope_type": "linear", "factor": 2.0}.
    pub fn rope(self, scaling: Value) -> T0 {
        self.set("rope_scaling", scaling)
    }

    /// The id or ids of config.json.
    pub fn eos(self, ids: Value) -> T0 {
        self.set("eos_token_id", ids)
    }

    /// A key of generation_config.json, which is written only if it has any.
    pub fn generation(mut self, key: &str, value: impl Into<Value>) -> T0 {
        self.generation.insert(key.into(), value.into());
        self
    }

    /// config.json as transformers 5 saves it.
    pub fn v5(mut self) -> T0 {
        self.v5 = true;
        self
    }

    /// BF16, F16 or F32.
    pub fn dtype(mut self, dtype: &'static str) -> T0 {
        self.dtype = dtype;
        self
    }

    /// Several files with an index; 1 is one file without.
    pub fn shards(mut self, shards: usize) -> T0 {
        self.shards = shards;
        self
    }

    /// Adds a tensor of so many bytes to each layer, of a kind that loaders know and do not use.
    pub fn padding(mut self, bytes_per_layer: usize) -> T0 {
        self.padding = bytes_per_layer;
        self
    }

    pub fn seed(mut self, seed: u64) -> T0 {
        self.seed = seed;
        self
    }

    /// The Jinja chat template; none at all with None.
    pub fn template(mut self, template: Option<&str>) -> T0 {
        self.template = template.map(str::to_owned);
        self
    }

    /// Whether the tokenizer puts <|bos|> before every text.
    pub fn adds_bos(mut self, adds_bos: bool) -> T0 {
        self.adds_bos = adds_bos;
        self
    }

    /// Writes config.json, generation_config.json if any, weights, tokenizer.json and tokenizer_config.json into `dir`,
    /// made if need be.
    pub fn write(&self, dir: &Path) {
        fs::create_dir_all(dir).unwrap();
        let tensors = self.tensors();
        if self.shards == 1 {
            write_safetensors(&dir.join("model.safetensors"), &tensors);
        } else {
            let mut weight_map = Map::new();
            for (i, part) in tensors.chunks(tensors.len().div_ceil(self.shards)).enumerate() {
                let file = shard_name(i + 1, self.shards);
                write_safetensors(&dir.join(&file), part);
                weight_map.extend(part.iter().map(|tensor| (tensor.name.clone(), file.clone().into())));
            }
            let total: usize = tensors.iter().map(|tensor| tensor.bytes.len()).sum();
            write_json(
                &dir.join("model.safetensors.index.json"),
                &json!({"metadata": {"total_size": total}, "weight_map": weight_map}),
            );
        }
        write_json(&dir.join("config.json"), &self.config_json());
        if !self.generation.is_empty() {
            write_json(&dir.join("generation_config.json"), &Value::Object(self.generation.clone()));
        }
        write_json(&dir.join("tokenizer.json"), &self.tokenizer_json());
        let mut tokenizer_config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
            "add_bos_token": self.adds_bos, "clean_up_tokenization_spaces": false, "model_max_length": self.config["max_position_embeddings"],
        });
        if let Some(template) = &self.template {
            tokenizer_config["chat_template"] = template.clone().into();
        }
        write_json(&dir.join("tokenizer_config.json"), &tokenizer_config);
    }

    pub fn config_json(&self) -> Value {
        let mut config = self.config.clone();
        let architecture = match self.arch {
            "llama" => "LlamaForCausalLM",
            "mistral" => "MistralForCausalLM",
            "qwen2" => "Qwen2ForCausalLM",
            "qwen3" => "Qwen3ForCausalLM",
            other => panic!("T0 knows no {other}"),
        };
        config.insert("architectures".into(), json!([architecture]));
        config.insert("model_type".into(), self.arch.into());
        if self.arch == "mistral" {
            config.entry("sliding_window").or_insert(Value::Null);
        }
        match self.v5 {
            true => to_v5(Value::Object(config)),
            false => Value::Object(config),
        }
    }

    /// Sorted by name, as transformers writes them.
    pub fn tensors(&self) -> Vec<TensorData> {
        let size = |key: &str| self.config[key].as_u64().unwrap() as usize;
        let flag = |key: &str| self.config.get(key) == Some(&Value::Bool(true));
        let (hidden, ffn, vocab, head_dim) =
            (size("hidden_size"), size("intermediate_size"), size("vocab_size"), size("head_dim"));
        let (q, kv) = (size("num_attention_heads") * head_dim, size("num_key_value_heads") * head_dim);
        let tied = flag("tie_word_embeddings");

        let mut tensors = vec![
            self.random("model.embed_tokens.weight", &[vocab, hidden]),
            self.random("model.norm.weight", &[hidden]),
        ];
        match self.head.unwrap_or(if tied { Head::Absent } else { Head::Own }) {
            Head::Absent => {}
            Head::Equal => tensors.push(TensorData { name: "lm_head.weight".into(), ..tensors[0].clone() }),
            Head::Own => tensors.push(self.random("lm_head.weight", &[vocab, hidden])),
        }
        let qkv_bias = flag("attention_bias") || self.arch == "qwen2";
        for layer in 0..size("num_hidden_layers") {
            let mut add =
                |name: &str, shape: &[usize]| tensors.push(self.random(&format!("model.layers.{layer}.{name}"), shape));
            let mut linear = |name: &str, rows: usize, cols: usize, bias: bool| {
                add(&format!("{name}.weight"), &[rows, cols]);
                if bias {
                    add(&format!("{name}.bias"), &[rows]);
                }
            };
            linear("self_attn.q_proj", q, hidden, qkv_bias);
            linear("self_attn.k_proj", kv, hidden, qkv_bias);
            linear("self_attn.v_proj", kv, hidden, qkv_bias);
            linear("self_attn.o_proj", hidden, q, flag("attention_bias"));
            linear("mlp.gate_proj", ffn, hidden, flag("mlp_bias"));
            linear("mlp.up_proj", ffn, hidden, flag("mlp_bias"));
            linear("mlp.down_proj", hidden, ffn, flag("mlp_bias"));
            add("input_layernorm.weight", &[hidden]);
            add("post_attention_layernorm.weight", &[hidden]);
            if self.arch == "qwen3" {
                add("self_attn.q_norm.weight", &[head_dim]);
                add("self_attn.k_norm.weight", &[head_dim]);
            }
            if self.padding > 0 {
                let name = format!("model.layers.{layer}.self_attn.rotary_emb.inv_freq");
                tensors.push(TensorData {
                    name,
                    dtype: "U8",
                    shape: vec![self.padding],
                    bytes: vec![layer as u8; self.padding],
                });
            }
        }
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        tensors
    }

    /// Norms near 1, biases of 0.1, embeddings of 0.25, weights that keep a row's size: logits spread by about 2 to 4.
    fn random(&self, name: &str, shape: &[usize]) -> TensorData {
        let (mean, deviation) = match name {
            _ if name.ends_with("norm.weight") => (1.0, 0.1),
            _ if name.ends_with(".bias") => (0.0, 0.1),
            "model.embed_tokens.weight" | "lm_head.weight" => (0.0, 0.25),
            _ => (0.0, 1.0 / (shape[1] as f32).sqrt()),
        };
        let mut random = Random::new(
            name.bytes().fold(self.seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)),
        );
        let mut bytes = Vec::new();
        for _ in 0..shape.iter().product() {
            let value = mean + deviation * random.normal();
            match self.dtype {
                "BF16" => bytes.extend_from_slice(&bf16::from_f32(value).to_le_bytes()),
                "F16" => bytes.extend_from_slice(&f16::from_f32(value).to_le_bytes()),
                "F32" => bytes.extend_from_slice(&value.to_le_bytes()),
                other => panic!("T0 knows no {other}"),
            }
        }
        TensorData { name: name.into(), dtype: self.dtype, shape: shape.to_vec(), bytes }
    }

    /// Byte-level BPE of 512 tokens: 256 bytes, 248 merges, 8 control tokens.
    fn tokenizer_json(&self) -> Value {
        let mut tokens: Vec<String> = (0..=255).map(byte_token).collect();
        let merges = merges();
        tokens.extend(merges.iter().map(|(a, b)| format!("{a}{b}")));
        let vocab: Map<String, Value> =
            tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect();
        assert_eq!(vocab.len(), ENDOFTEXT as usize, "tokens are different from each other");
        let control =
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|bos|>", "<|tool|>", "<|extra|>"];
        let added: Vec<Value> = control
            .iter()
            .zip(ENDOFTEXT..)
            .map(|(content, id)| {
                json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true})
            })
            .collect();
        let bos = json!({"SpecialToken": {"id": "<|bos|>", "type_id": 0}});
        let text = |name: &str, type_id: u32| json!({"Sequence": {"id": name, "type_id": type_id}});
        let post_processor = json!({
            "type": "TemplateProcessing", "single": [bos, text("A", 0)], "pair": [bos, text("A", 0), text("B", 1)],
            "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [BOS], "tokens": ["<|bos|>"]}},
        });
        let byte_level =
            json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null, "pre_tokenizer": byte_level,
            "post_processor": if self.adds_bos { post_processor } else { Value::Null }, "decoder": byte_level,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
                "fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": vocab, "merges": merges,
            },
        })
    }
}

pub fn shard_name(shard: usize, shards: usize) -> String {
    format!("model-{shard:05}-of-{shards:05}.safetensors")
}

/// The hub's dialect of config.json -> that of transformers 5.
pub fn to_v5(hub: Value) -> Value {
    let Value::Object(mut config) = hub else { panic!("config.json is an object") };
    let mut rope = match config.shift_remove("rope_scaling") {
        Some(Value::Object(scaling)) => scaling,
        _ => Map::new(),
    };
    let kind = rope.shift_remove("type").or(rope.shift_remove("rope_type")).unwrap_or("default".into());
    rope.insert("rope_type".into(), kind);
    if let Some(theta) = config.shift_remove("rope_theta") {
        rope.insert("rope_theta".into(), theta);
    }
    config.insert("rope_parameters".into(), rope.into());
    if let Some(dtype) = config.shift_remove("torch_dtype") {
        config.insert("dtype".into(), dtype);
    }
    config.insert("transformers_version".into(), "5.24.0".into());
    config.entry("pad_token_id").or_insert(Value::Null);
    Value::Object(config)
}

/// The file format from its description, independent of the reader under test.
pub fn write_safetensors(path: &Path, tensors: &[TensorData]) {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut at = 0;
    for tensor in tensors {
        let end = at + tensor.bytes.len();
        header.insert(
            tensor.name.clone(),
            json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}),
        );
        at = end;
    }
    let data: Vec<u8> = tensors.iter().flat_map(|tensor| &tensor.bytes).copied().collect();
    let mut header = serde_json::to_vec(&header).unwrap();
    header.resize(header.len().next_multiple_of(8), b' ');
    fs::write(path, join_safetensors(&header, &data)).unwrap();
}

/// Length, header and data, whatever they are.
pub fn join_safetensors(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header, data].concat()
}

/// A file's header and data.
pub fn split_safetensors(path: &Path) -> (Value, Vec<u8>) {
    let file = fs::read(path).unwrap();
    let header_len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&file[8..8 + header_len]).unwrap(), file[8 + header_len..].to_vec())
}

pub fn write_json(path: &Path, value: &Value) {
    fs::write(path, serde_json::to_string_pretty(value).unwrap()).unwrap();
}

/// GPT-2's printable stand-in for a byte.
fn byte_token(byte: u8) -> String {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let code = match printable(byte) {
        true => u32::from(byte),
        false => 256 + (0..byte).filter(|b| !printable(*b)).count() as u32,
    };
    char::from_u32(code).unwrap().into()
}

/// Letters after a space, frequent pairs, a few longer pieces.
fn merges() -> Vec<(String, String)> {
    let mut merges: Vec<(String, String)> = Vec::new();
    let mut pairs = |first: &str, second: &str| {
        let pair = |a: char, b: char| (a.to_string(), b.to_string());
        merges.extend(first.chars().flat_map(|a| second.chars().map(move |b| pair(a, b))));
    };
    pairs("Ġ", "abcdefghijklmnopqrstuvwxyz");
    pairs("etaoinshrdlu", "etaoinshrdlu");
    pairs("cmfwygpbvk", "aeioulr");
    pairs("cg", "h");
    pairs("Ġ", "Ġ");
    merges
        .extend([("th", "e"), ("in", "g"), ("an", "d"), ("Ġt", "he"), ("Ġa", "nd")].map(|(a, b)| (a.into(), b.into())));
    merges
}

/// SplitMix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    pub fn pick_mut<'a, T>(&mut self, items: &'a mut [T]) -> &'a mut T {
        &mut items[self.below(items.len())]
    }

    /// Mean 0, deviation 1: the sum of four uniform numbers, less two, times the root of three.
    fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 3f32.sqrt()
    }
}
