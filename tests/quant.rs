//! Quantised checkpoints: each step computes with exactly the numbers that codes and scales stand for; what is missing,
//! renamed, of another size or not a scale at all is refused; so is a config that says something else (cases O02 and
//! O04).
#[path = "support/quantised.rs"]
mod quantised;
mod support;

use quantised::{dequantise, read_tensors, write_quantised, Scheme};
use serde_json::{json, Value};
use std::fs;
use std::path::{Path, PathBuf};
use support::{shard_name, write_json, write_safetensors, TensorData, T0};
use tempfile::{tempdir, TempDir};
use volley::cpu::Reference;
use volley::model::checkpoint::{Checkpoint, Read};
use volley::model::claim::claim;
use volley::model::config::Config;
use volley::model::plan::Pass;
use volley::model::role::{Role, WeightId};
use volley::model::table::Table;
use volley::model::weights::{Slice, Weights};

fn tiny(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny").join(name)
}

fn open(dir: &Path) -> anyhow::Result<(Config, Weights)> {
    let config = Config::open(dir)?;
    let checkpoint = Checkpoint::open(dir, Read::Mmap)?;
    let weights = claim(&Table::builtin()?, &config, &checkpoint)?;
    Ok((config, weights))
}

fn reference(dir: &Path) -> anyhow::Result<Reference> {
    let (config, weights) = open(dir)?;
    weights.load(&mut |_, _| ())?;
    Reference::new(config, weights, 64, None, false)
}

/// Every step's output over some tokens, by its name.
fn steps(dir: &Path) -> Vec<(String, Vec<f32>)> {
    let mut steps = Vec::new();
    let tokens: Vec<u32> = (0..8).map(|i| 7 + 29 * i).collect();
    let mut reference = reference(dir).unwrap();
    reference
        .run(Pass::Verify { width: 8 }, &tokens, 0, &mut |step, out, _| steps.push((step.name(), out.to_vec())))
        .unwrap();
    steps
}

/// Each layer's every step must agree to the bit, since a product of a code and a scale is rounded once, as f32.
#[track_caller]
fn same_numbers(quantised: &Path, plain: &Path) {
    let (a, b) = (steps(quantised), steps(plain));
    assert_eq!(a.len(), b.len());
    for ((name, a), (_, b)) in a.iter().zip(&b) {
        assert!(a.iter().all(|x| x.is_finite()) && a.iter().any(|x| *x != 0.0), "{name}");
        let at = a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(at.map(|i| (i, a[i], b[i])), None, "{name}: (element, quantised, plain)");
    }
}

const SCHEMES: [Scheme; 7] = [
    Scheme::Fp8Block(128, 128), // one ragged block, wider than most of the matrices
    Scheme::Fp8Block(32, 32),
    Scheme::Fp8Block(48, 40), // ragged at both ends
    Scheme::Fp8Channel,
    Scheme::Fp8CompressedBlock(16, 64),
    Scheme::Int4(32),
    Scheme::Int4(48), // a last group of 16 or 32
];

#[test]
fn o04_codes_and_scales_are_the_numbers_of_a_plain_copy() {
    for scheme in SCHEMES {
        let (dir, plain) = (tempdir().unwrap(), tempdir().unwrap());
        write_quantised(&T0::new(), scheme, dir.path(), plain.path());
        same_numbers(dir.path(), plain.path());
        // Negative control: the unquantised T0 is another model.
        let t0 = tempdir().unwrap();
        T0::new().write(t0.path());
        assert_ne!(steps(t0.path()).last(), steps(dir.path()).last(), "{scheme:?}");
    }
}

#[test]
fn latent_attention_and_experts_use_their_scales() {
    for name in ["dsv3_fp8", "kimi_k25_int4"] {
        let (_, weights) = open(&tiny(name)).unwrap();
        // dsv3_fp8: 2 layers of 5 attention matrices, 3 of the dense layer, 3 of each of 8 experts and of the shared
        // one.
        let expected = match name {
            "dsv3_fp8" => "40 quantised matrices with 40 tensors of scales, fp8 e4m3 in blocks of 128 x 128",
            _ => "96 quantised matrices with 96 tensors of scales, int4 in blocks of 1 x 32",
        };
        assert_eq!(weights.quantised().unwrap(), expected);

        let plain = tempdir().unwrap();
        write_safetensors(
            &plain.path().join("model.safetensors"),
            &dequantise(&read_tensors(&tiny(name).join("model.safetensors"))),
        );
        let mut config = config_json(name);
        remove_quantization(&mut config);
        write_json(&plain.path().join("config.json"), &config);
        assert!(open(plain.path()).unwrap().1.quantised().is_none());
        same_numbers(&tiny(name), plain.path());
    }
}

fn config_json(name: &str) -> Value {
    serde_json::from_slice(&fs::read(tiny(name).join("config.json")).unwrap()).unwrap()
}

fn remove_quantization(config: &mut Value) {
    config.as_object_mut().unwrap().remove("quantization_config");
    if let Some(text) = config.get_mut("text_config") {
        text.as_object_mut().unwrap().remove("quantization_config");
    }
}

/// A tiny checkpoint with other tensors.
fn changed(name: &str, change: impl FnOnce(&mut Vec<TensorData>)) -> TempDir {
    let dir = tempdir().unwrap();
    fs::copy(tiny(name).join("config.json"), dir.path().join("config.json")).unwrap();
    let mut tensors = read_tensors(&tiny(name).join("model.safetensors"));
    change(&mut tensors);
    write_safetensors(&dir.path().join("model.safetensors"), &tensors);
    dir
}

#[track_caller]
fn refused(dir: &Path, words: &[&str]) {
    let error = match reference(dir) {
        Ok(_) => panic!("expected an error with {words:?}, found a model that loads"),
        Err(error) => format!("{error:#}"),
    };
    for word in words {
        assert!(error.contains(word), "expected {word:?} in: {error}");
    }
    assert!(!error.contains('\n'), "expected one line: {error}");
}

fn find<'a>(tensors: &'a mut [TensorData], name: &str) -> &'a mut TensorData {
    tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
}

/// A matrix of each kind: attention, with a ragged block; an expert of either format.
const MATRICES: [(&str, &str, &str); 4] = [
    ("dsv3_fp8", "model.layers.1.self_attn.kv_a_proj_with_mqa", "weight_scale_inv"),
    ("dsv3_fp8", "model.layers.1.mlp.experts.5.down_proj", "weight_scale_inv"),
    ("dsv3_fp8", "model.layers.1.mlp.shared_experts.up_proj", "weight_scale_inv"),
    ("kimi_k25_int4", "language_model.model.layers.2.mlp.experts.11.gate_proj", "weight_scale"),
];

#[test]
fn o04_a_wrong_scale_is_refused_by_name() {
    for (model, module, scale) in MATRICES {
        let name = format!("{module}.{scale}");
        let shown = name.strip_prefix("language_model.").unwrap_or(&name).to_string();
        let dir = changed(model, |_| {});
        reference(dir.path()).unwrap();

        let dir = changed(model, |tensors| tensors.retain(|tensor| tensor.name != name));
        refused(dir.path(), &[&shown, "no such tensor"]);
        // Renamed, the other spelling included: neither is guessed.
        for other in ["weight_scale", "weight_scale_inv", "scale"] {
            let dir = changed(model, |tensors| find(tensors, &name).name = format!("{module}.{other}"));
            if other == scale {
                reference(dir.path()).unwrap();
            } else {
                refused(
                    dir.path(),
                    &[&shown, "no such tensor", &format!("{module}.{other}"), "expected no such tensor"],
                );
            }
        }
        // Both spellings.
        let dir = changed(model, |tensors| {
            let copy = TensorData { name: format!("{module}.weight_scale_2"), ..find(tensors, &name).clone() };
            tensors.push(copy);
        });
        refused(dir.path(), &["weight_scale_2", "expected no such tensor"]);
        // One row of scales too few.
        let dir = changed(model, |tensors| {
            let tensor = find(tensors, &name);
            let row = tensor.bytes.len() / tensor.shape[0];
            tensor.shape[0] += 1;
            tensor.bytes.extend(vec![0; row]);
        });
        refused(dir.path(), &[&shown, "expected ["]);
        // No scale at all.
        for value in [0.0, f32::INFINITY, f32::NAN, -1.0] {
            let dir = changed(model, |tensors| {
                let tensor = find(tensors, &name);
                let n = if tensor.dtype == "BF16" { 2 } else { 4 };
                let end = tensor.bytes.len();
                tensor.bytes[end - n..].copy_from_slice(&value.to_le_bytes()[4 - n..]);
            });
            refused(dir.path(), &[&name, "expected scales above zero"]);
        }
    }
}

#[test]
fn codes_must_be_those_that_the_config_promises() {
    let (model, module, _) = MATRICES[0];
    let dir = changed(model, |tensors| {
        let tensor = find(tensors, &format!("{module}.weight"));
        tensor.dtype = "BF16";
        tensor.bytes = vec![0; 2 * tensor.bytes.len()];
    });
    refused(dir.path(), &[module, "f8_e4m3", "bf16"]);
    let packed = "language_model.model.layers.1.mlp.experts.0.down_proj.weight_packed";
    let dir = changed("kimi_k25_int4", |tensors| find(tensors, packed).name = packed.replace("_packed", ""));
    refused(dir.path(), &["model.layers.1.mlp.experts.0.down_proj.weight_packed", "no such tensor"]);
    let dir = changed("kimi_k25_int4", |tensors| {
        let tensor = find(tensors, packed);
        tensor.shape = vec![tensor.shape[0] / 2, tensor.shape[1] * 2];
    });
    refused(dir.path(), &["weight_packed", "expected [64, 8] i32"]);
    // A quantised checkpoint whose config does not say so, and the other way round.
    for name in ["dsv3_fp8", "kimi_k25_int4"] {
        let dir = changed(name, |_| {});
        let mut config = config_json(name);
        remove_quantization(&mut config);
        write_json(&dir.path().join("config.json"), &config);
        refused(dir.path(), &["expected [", "bf16, f16 or f32", "and"]);
    }
    let dir = changed("dsv3_mtp", |_| {});
    let mut config = config_json("dsv3_mtp");
    config["quantization_config"] = Scheme::Fp8Block(128, 128).config();
    write_json(&dir.path().join("config.json"), &config);
    refused(dir.path(), &["f8_e4m3", "found [64, 64] f32"]);
}

#[test]
fn o02_a_missing_shard_of_a_quantised_model() {
    let (dir, plain) = (tempdir().unwrap(), tempdir().unwrap());
    write_quantised(&T0::new(), Scheme::Fp8Block(32, 32), dir.path(), plain.path());
    let tensors = read_tensors(&dir.path().join("model.safetensors"));
    fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    let mut map = serde_json::Map::new();
    for (i, part) in tensors.chunks(tensors.len().div_ceil(3)).enumerate() {
        let file = shard_name(i + 1, 3);
        write_safetensors(&dir.path().join(&file), part);
        map.extend(part.iter().map(|tensor| (tensor.name.clone(), file.clone().into())));
    }
    write_json(&dir.path().join("model.safetensors.index.json"), &json!({"weight_map": map}));
    same_numbers(dir.path(), plain.path());
    fs::remove_file(dir.path().join(shard_name(3, 3))).unwrap();
    refused(dir.path(), &[&shard_name(3, 3), "absent", "1 cannot be found"]);
}

#[test]
fn a_split_that_cuts_a_block_is_refused() {
    let (_, fp8) = open(&tiny("dsv3_fp8")).unwrap();
    let of = |role| fp8.get(WeightId::of_target(role, Some(if role == Role::GateUp { 0 } else { 1 })));
    // 384 rows are three blocks of 128; 128 columns are one.
    let gate_up = of(Role::GateUp).part_of_rank(1, 3).unwrap();
    assert_eq!(gate_up[1], Slice { rows: 128..256, cols: 0..256 });
    assert_eq!(of(Role::GateUp).scale_slice(&gate_up[1]), Slice { rows: 1..2, cols: 0..2 });
    for (role, ranks, works) in
        [(Role::GateUp, 2, "1 or 3"), (Role::O, 2, "1"), (Role::ExpertGateUp, 4, "1"), (Role::ExpertDown, 2, "1")]
    {
        for rank in 0..ranks {
            let error = format!("{:#}", of(role).part_of_rank(rank, ranks).unwrap_err());
            assert!(error.contains("cuts no block (fp8 e4m3 in blocks of 128 x 128)"), "{error}");
            assert!(error.contains(&format!(", {works}, found {ranks}")), "{error}");
        }
    }
    // The ragged block of kv_a stays whole, since every rank has all of it.
    let qkv_a = of(Role::QkvA).part_of_rank(3, 4).unwrap();
    assert_eq!(qkv_a, [Slice { rows: 0..192, cols: 0..256 }, Slice { rows: 0..144, cols: 0..256 }]);
    assert_eq!(of(Role::QkvA).scale_slice(&qkv_a[1]), Slice { rows: 0..2, cols: 0..2 });

    let (_, int4) = open(&tiny("kimi_k25_int4")).unwrap();
    let of = |role| int4.get(WeightId::of_target(role, Some(1)));
    // Every row has scales of its own; 64 columns are two groups.
    assert_eq!(of(Role::ExpertGateUp).part_of_rank(7, 8).unwrap()[31], Slice { rows: 56..64, cols: 0..64 });
    let down = of(Role::ExpertDown).part_of_rank(1, 2).unwrap();
    assert_eq!(
        (&down[0], of(Role::ExpertDown).scale_slice(&down[0])),
        (&Slice { rows: 0..64, cols: 32..64 }, Slice { rows: 0..64, cols: 1..2 })
    );
    let error = format!("{:#}", of(Role::ExpertDown).part_of_rank(0, 4).unwrap_err());
    assert!(error.contains("cuts no block (int4 in blocks of 1 x 32), 1 or 2, found 4"), "{error}");
    // Heads are divided, the latent is not.
    assert_eq!(of(Role::QB).part_of_rank(1, 2).unwrap(), [Slice { rows: 48..96, cols: 0..48 }]);
    assert_eq!(of(Role::KvB).part_of_rank(1, 2).unwrap(), [Slice { rows: 64..128, cols: 0..32 }]);
    assert_eq!(of(Role::O).part_of_rank(1, 4).unwrap(), [Slice { rows: 0..64, cols: 16..32 }]);
    assert_eq!(of(Role::Router).part_of_rank(1, 4).unwrap(), [Slice { rows: 0..16, cols: 0..64 }]);

    // A scale a row is cut by no split.
    let (dir, plain) = (tempdir().unwrap(), tempdir().unwrap());
    write_quantised(&T0::new(), Scheme::Fp8Channel, dir.path(), plain.path());
    let (_, channel) = open(dir.path()).unwrap();
    let down = channel.get(WeightId::of_target(Role::Down, Some(0)));
    assert_eq!(down.scale_slice(&down.part_of_rank(1, 4).unwrap()[0]), Slice { rows: 0..64, cols: 0..1 });
}

#[test]
fn rotated_pairs_are_taken_apart() {
    let (_, weights) = open(&tiny("deepseek_v3")).unwrap();
    // Heads of 64 + 32 rows.
    let q_b = weights.get(WeightId::of_target(Role::QB, Some(0)));
    let order: Vec<usize> = (96..192).map(|row| q_b.rope_order(0, row)).collect();
    let evens_first = (0..16).map(|i| 96 + 64 + 2 * i).chain((0..16).map(|i| 96 + 64 + 2 * i + 1));
    assert_eq!(order, (96..160).chain(evens_first).collect::<Vec<_>>());
    // The key of 32 behind the latent of 64; queries' latents are not rotated.
    let qkv_a = weights.get(WeightId::of_target(Role::QkvA, Some(0)));
    assert_eq!((0..64).map(|row| qkv_a.rope_order(0, row)).collect::<Vec<_>>(), (0..64).collect::<Vec<_>>());
    assert_eq!([63, 64, 65, 79, 80, 95].map(|row| qkv_a.rope_order(1, row)), [63, 64, 66, 94, 65, 95]);
}

// ---- configs

fn parse(config: &Value) -> Result<Config, String> {
    Config::parse(&config.to_string(), None).map_err(|error| format!("{error:#}"))
}

/// Sets `path` (keys joined with dots) of a shape's config and expects an error with the last key, the value and every
/// word.
#[track_caller]
fn refuse(shape: &str, path: &str, value: Value, words: &[&str]) {
    let mut config = shape_json(shape);
    let key = path.rsplit('.').next().unwrap();
    let mut at = &mut config;
    for part in path.split('.') {
        at = &mut at[part];
    }
    *at = value;
    match parse(&config) {
        Ok(_) => panic!("{shape}: {path}: expected an error with {words:?}, found a model"),
        Err(error) => {
            [key].iter().chain(words).for_each(|word| assert!(error.contains(word), "expected {word:?} in: {error}"))
        }
    }
}

fn shape_json(shape: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/shapes").join(shape).join("config.json");
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn what_changes_the_arithmetic_of_experts_and_latents_is_read_or_refused() {
    for (shape, scale) in [("deepseek-v3", 0.1352338f32), ("kimi-k2.5", 0.1446796)] {
        let config = parse(&shape_json(shape)).unwrap();
        assert!((config.latent_scale() / scale - 1.0).abs() < 1e-5, "{shape}: {}", config.latent_scale());
        assert_eq!(
            (config.n_kv_heads, config.head_dim, config.rope_dim(), config.rope.attention_factor()),
            (1, 192, 64, 1.0)
        );
    }
    assert_eq!(parse(&shape_json("deepseek-v3")).unwrap().n_mtp_layers, 1);
    let kimi = parse(&shape_json("kimi-k2.5")).unwrap();
    assert_eq!(
        (kimi.arch.as_str(), kimi.norm_eps, kimi.bos, kimi.eos.len(), kimi.tied),
        ("kimi_k25", 1e-5, Some(163584), 1, false)
    );
    assert!(kimi.has_experts(1) && !kimi.has_experts(0));

    let deepseek = |key: &str, value: Value, words: &[&str]| refuse("deepseek-v3", key, value, words);
    deepseek("scoring_func", json!("softmax"), &["sigmoid"]);
    deepseek("topk_method", json!("group_limited_greedy"), &["noaux_tc"]);
    deepseek("moe_layer_freq", json!(2), &["expected 1"]);
    deepseek("q_lora_rank", json!(null), &["expected a number"]);
    deepseek("num_key_value_heads", json!(8), &["128", "latent"]);
    deepseek("n_group", json!(7), &["256"]);
    deepseek("topk_group", json!(9), &["at most n_group = 8"]);
    deepseek("num_experts_per_tok", json!(129), &["128"]);
    deepseek("attention_bias", json!(true), &[]);
    deepseek("qk_head_dim", json!(128), &["qk_nope_head_dim"]);
    deepseek("norm_topk_prob", json!("yes"), &["true or false"]);
    deepseek("index_topk", json!(2048), &["not implemented"]);
    deepseek("quantization_config.weight_block_size", json!(null), &["[128, 128]"]);
    deepseek("quantization_config.weight_block_size", json!([0, 128]), &["[0,128]"]);
    deepseek("quantization_config.fmt", json!("e5m2"), &["e4m3"]);
    deepseek("quantization_config.activation_scheme", json!("static"), &["dynamic"]);
    deepseek("quantization_config.quant_method", json!("mxfp4"), &["mxfp4", "unquantised"]);
    deepseek("quantization_config.novel", json!(1), &["not implemented"]);
    let weights = "text_config.quantization_config.config_groups.group_0.weights";
    let kimi = |key: &str, value: Value, words: &[&str]| refuse("kimi-k2.5", key, value, words);
    kimi(&format!("{weights}.num_bits"), json!(8), &["expected 4"]);
    kimi(&format!("{weights}.symmetric"), json!(false), &["expected true"]);
    kimi(&format!("{weights}.strategy"), json!("channel"), &["group"]);
    kimi(&format!("{weights}.actorder"), json!("group"), &["null"]);
    kimi(&format!("{weights}.group_size"), json!(20), &["multiple of 8"]);
    kimi(&format!("{weights}.type"), json!("float"), &["int"]);
    kimi(&format!("{weights}.zero_points"), json!(1), &["not implemented"]);
    kimi("text_config.quantization_config.format", json!("nvfp4-pack-quantized"), &["pack-quantized"]);
    kimi("text_config.quantization_config.kv_cache_scheme", json!({"num_bits": 8}), &["null"]);
    kimi("text_config.quantization_config.ignore", json!(["re:.*mlp.experts.*gate_proj"]), &["all or none"]);
    kimi("text_config.quantization_config.ignore", json!(["re:("]), &["pattern"]);
    kimi("text_config.model_type", json!("llama"), &["kimi_k2"]);
    kimi("text_config", json!(null), &["text model"]);
    kimi("rms_norm_eps", json!(1e-6), &["0.00001"]);
    kimi("novel", json!(1), &["not implemented"]);
    let qwen = |key: &str, value: Value, words: &[&str]| refuse("qwen3-30b-a3b", key, value, words);
    qwen("num_experts", json!(null), &["expected a number"]);
    qwen("num_local_experts", json!(64), &["128", "64"]);
    qwen("num_experts_per_tok", json!(200), &["128"]);
    qwen("mlp_only_layers", json!("none"), &["list of layers"]);

    // quantization_config at the top, as other exports have it; modules under either name.
    let mut top = shape_json("kimi-k2.5");
    let quantization = top["text_config"].as_object_mut().unwrap().remove("quantization_config").unwrap();
    top["quantization_config"] = quantization;
    assert_eq!(parse(&top).unwrap(), parse(&shape_json("kimi-k2.5")).unwrap());
    // The class's default in transformers, which is none of the text model's.
    top["tie_word_embeddings"] = json!(true);
    assert!(!parse(&top).unwrap().tied);
    // Layers without experts.
    let mut qwen = shape_json("qwen3-30b-a3b");
    qwen["decoder_sparse_step"] = json!(2);
    qwen["mlp_only_layers"] = json!([3]);
    let qwen = parse(&qwen).unwrap();
    assert_eq!([0, 1, 2, 3, 4, 5].map(|layer| qwen.has_experts(layer)), [false, true, false, false, false, true]);
}

#[test]
fn tensors_of_images_and_of_other_names() {
    let with = |change: fn(&str) -> String| {
        changed("kimi_k25_int4", |tensors| {
            for tensor in tensors.iter_mut() {
                tensor.name = change(&tensor.name);
            }
            for name in ["vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight"] {
                tensors.push(TensorData { name: name.into(), dtype: "BF16", shape: vec![2, 2], bytes: vec![0; 8] });
            }
        })
    };
    let own = with(|name| name.into());
    let short = with(|name| name.replace("language_model.model.", "language_model."));
    same_numbers(own.path(), &tiny("kimi_k25_int4"));
    same_numbers(short.path(), &tiny("kimi_k25_int4"));
    let other = changed("kimi_k25_int4", |tensors| {
        tensors.push(TensorData {
            name: "audio_tower.weight".into(),
            dtype: "BF16",
            shape: vec![2],
            bytes: vec![0; 4],
        });
    });
    refused(other.path(), &["audio_tower.weight", "expected no such tensor"]);
    // Layers behind the last are those of multi-token prediction, if the config has any.
    open(&tiny("dsv3_mtp")).unwrap();
    let none = changed("dsv3_mtp", |_| {});
    let mut config = config_json("dsv3_mtp");
    config["num_nextn_predict_layers"] = json!(0);
    write_json(&none.path().join("config.json"), &config);
    refused(none.path(), &["model.layers.3.", "expected no such tensor"]);
}
