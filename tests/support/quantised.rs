//! Quantised checkpoints and their plain copies: the same numbers, stored as codes and scales and as f32. Written from
//! the formats' descriptions, independent of the loader under test. Each test binary uses a part of this module.
#![allow(dead_code)]
use crate::support::{split_safetensors, write_json, write_safetensors, TensorData, T0};
use half::bf16;
use serde_json::{json, Value};
use std::fs;
use std::path::Path;

/// How T0's linear layers are stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scheme {
    /// DeepSeek's: e4m3, f32 scales of blocks.
    Fp8Block(usize, usize),
    /// compressed-tensors: e4m3, a bf16 scale for each row.
    Fp8Channel,
    /// compressed-tensors: the same blocks under the other name.
    Fp8CompressedBlock(usize, usize),
    /// compressed-tensors: four bits, a bf16 scale for so many columns.
    Int4(usize),
}

impl Scheme {
    pub fn config(self) -> Value {
        let compressed = |format: &str, mut weights: Value| {
            weights["symmetric"] = json!(true);
            weights["dynamic"] = json!(false);
            json!({
                "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed", "ignore": ["lm_head"],
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": null}},
            })
        };
        match self {
            Scheme::Fp8Block(rows, cols) => {
                json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [rows, cols]})
            }
            Scheme::Fp8Channel => {
                compressed("float-quantized", json!({"num_bits": 8, "type": "float", "strategy": "channel"}))
            }
            Scheme::Fp8CompressedBlock(rows, cols) => compressed(
                "float-quantized",
                json!({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [rows, cols]}),
            ),
            Scheme::Int4(cols) => compressed(
                "pack-quantized",
                json!({"num_bits": 4, "type": "int", "strategy": "group", "group_size": cols}),
            ),
        }
    }

    fn block(self, cols: usize) -> (usize, usize) {
        match self {
            Scheme::Fp8Block(rows, cols) | Scheme::Fp8CompressedBlock(rows, cols) => (rows, cols),
            Scheme::Fp8Channel => (1, cols),
            Scheme::Int4(cols) => (1, cols),
        }
    }
}

/// The finite values of e4m3, by code.
fn e4m3(code: u8) -> f32 {
    let (e, m) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let size = if e == 0 { m / 8.0 * 2f32.powi(-6) } else { (1.0 + m / 8.0) * 2f32.powi(e - 7) };
    if code < 128 {
        size
    } else {
        -size
    }
}

fn nearest_e4m3(x: f32) -> u8 {
    // Codes of positive values ascend with the value.
    let above = (0..126u8).collect::<Vec<u8>>().partition_point(|&code| e4m3(code) < x.abs()) as u8;
    let below = above.saturating_sub(1);
    let nearest = if x.abs() - e4m3(below) < e4m3(above) - x.abs() { below } else { above };
    if x < 0.0 {
        nearest | 128
    } else {
        nearest
    }
}

/// A matrix as codes and scales, and the numbers that they stand for.
pub fn quantise(tensor: &TensorData, scheme: Scheme) -> (Vec<TensorData>, TensorData) {
    let [rows, cols] = tensor.shape[..] else { panic!("a matrix") };
    let x: Vec<f32> = tensor.bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
    let (block_rows, block_cols) = scheme.block(cols);
    let (scale_rows, scale_cols) = (rows.div_ceil(block_rows), cols.div_ceil(block_cols));
    let mut largest = vec![0f32; scale_rows * scale_cols];
    let block = |i: usize| i / cols / block_rows * scale_cols + i % cols / block_cols;
    x.iter().enumerate().for_each(|(i, x)| largest[block(i)] = largest[block(i)].max(x.abs()));
    let most = if let Scheme::Int4(_) = scheme { 7.0 } else { 448.0 };
    let two_bytes = !matches!(scheme, Scheme::Fp8Block(..));
    let round = |scale: f32| if two_bytes { bf16::from_f32(scale).to_f32() } else { scale };
    let scales: Vec<f32> = largest.iter().map(|largest| round(largest / most)).collect();
    let stored_scales = scales.iter().flat_map(|s| {
        if two_bytes {
            bf16::from_f32(*s).to_le_bytes().to_vec()
        } else {
            s.to_le_bytes().to_vec()
        }
    });
    let base = tensor.name.strip_suffix(".weight").unwrap();
    let part = |name: &str, dtype, shape: &[usize], bytes| TensorData {
        name: format!("{base}.{name}"),
        dtype,
        shape: shape.to_vec(),
        bytes,
    };
    let scale_name = if let Scheme::Fp8Block(..) = scheme { "weight_scale_inv" } else { "weight_scale" };
    let mut parts = vec![part(
        scale_name,
        if two_bytes { "BF16" } else { "F32" },
        &[scale_rows, scale_cols],
        stored_scales.collect(),
    )];
    let mut numbers = vec![0f32; x.len()];
    if let Scheme::Int4(_) = scheme {
        let words = cols.div_ceil(8);
        let mut packed = vec![0u32; rows * words];
        for (i, x) in x.iter().enumerate() {
            let q = (x / scales[block(i)]).round().clamp(-8.0, 7.0);
            numbers[i] = q * scales[block(i)];
            packed[i / cols * words + i % cols / 8] |= ((q + 8.0) as u32) << (4 * (i % cols % 8));
        }
        parts.push(part(
            "weight_packed",
            "I32",
            &[rows, words],
            packed.iter().flat_map(|word| word.to_le_bytes()).collect(),
        ));
        parts.push(part(
            "weight_shape",
            "I64",
            &[2],
            [rows as i64, cols as i64].iter().flat_map(|n| n.to_le_bytes()).collect(),
        ));
    } else {
        let codes: Vec<u8> = x.iter().enumerate().map(|(i, x)| nearest_e4m3(x / scales[block(i)])).collect();
        codes.iter().enumerate().for_each(|(i, code)| numbers[i] = e4m3(*code) * scales[block(i)]);
        parts.push(part("weight", "F8_E4M3", &[rows, cols], codes));
    }
    let plain = part("weight", "F32", &[rows, cols], numbers.iter().flat_map(|n| n.to_le_bytes()).collect());
    (parts, plain)
}

/// T0 with every linear layer quantised into `dir`, and with the same numbers plain into `plain`.
pub fn write_quantised(t0: &T0, scheme: Scheme, dir: &Path, plain: &Path) {
    for dir in [dir, plain] {
        t0.write(dir);
        fs::remove_file(dir.join("model.safetensors")).unwrap();
    }
    let (mut stored, mut numbers) = (Vec::new(), Vec::new());
    for tensor in t0.tensors() {
        if tensor.name.ends_with("_proj.weight") {
            let (parts, plain) = quantise(&tensor, scheme);
            stored.extend(parts);
            numbers.push(plain);
        } else {
            stored.push(tensor.clone());
            numbers.push(tensor);
        }
    }
    write_safetensors(&dir.join("model.safetensors"), &stored);
    write_safetensors(&plain.join("model.safetensors"), &numbers);
    let mut config = t0.config_json();
    config["quantization_config"] = scheme.config();
    write_json(&dir.join("config.json"), &config);
}

/// The tensors of a file.
pub fn read_tensors(path: &Path) -> Vec<TensorData> {
    let (header, data) = split_safetensors(path);
    let entries = header.as_object().unwrap().iter().filter(|(name, _)| *name != "__metadata__");
    let numbers = |value: &Value| -> Vec<usize> {
        value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
    };
    let dtype = |name: &str| ["BF16", "F32", "F8_E4M3", "I32", "I64"].into_iter().find(|dtype| *dtype == name).unwrap();
    let mut tensors: Vec<TensorData> = entries
        .map(|(name, entry)| {
            let at = numbers(&entry["data_offsets"]);
            let dtype = dtype(entry["dtype"].as_str().unwrap());
            TensorData {
                name: name.clone(),
                dtype,
                shape: numbers(&entry["shape"]),
                bytes: data[at[0]..at[1]].to_vec(),
            }
        })
        .collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    tensors
}

/// The plain copy of tensors with codes and scales in blocks of 128 x 128, or four bits in groups of 32; all numbers
/// f32.
pub fn dequantise(tensors: &[TensorData]) -> Vec<TensorData> {
    let find = |name: String| tensors.iter().find(|t| t.name == name);
    let floats = |t: &TensorData| -> Vec<f32> {
        match t.dtype {
            "BF16" => t.bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
            _ => t.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        }
    };
    let mut plain = Vec::new();
    for t in tensors {
        let (name, shape, numbers): (String, Vec<usize>, Vec<f32>) = match (t.dtype, t.name.strip_suffix("_packed")) {
            ("F8_E4M3", _) => {
                let scales = floats(find(format!("{}_scale_inv", t.name)).unwrap());
                let (cols, scale_cols) = (t.shape[1], t.shape[1].div_ceil(128));
                let number =
                    |(i, code): (usize, &u8)| e4m3(*code) * scales[i / cols / 128 * scale_cols + i % cols / 128];
                (t.name.clone(), t.shape.clone(), t.bytes.iter().enumerate().map(number).collect())
            }
            (_, Some(name)) => {
                let scales = floats(find(format!("{name}_scale")).unwrap());
                let cols = t.shape[1] * 8;
                // Little endian: the low four bits of a byte are the even column.
                let number = |i: usize| (f32::from(t.bytes[i / 2] >> (i % 2 * 4) & 15) - 8.0) * scales[i / 32];
                (name.into(), vec![t.shape[0], cols], (0..t.shape[0] * cols).map(number).collect())
            }
            _ if t.name.ends_with("_scale") || t.name.ends_with("_scale_inv") || t.name.ends_with("_shape") => continue,
            _ => (t.name.clone(), t.shape.clone(), floats(t)),
        };
        plain.push(TensorData {
            name,
            dtype: "F32",
            shape,
            bytes: numbers.iter().flat_map(|n| n.to_le_bytes()).collect(),
        });
    }
    plain
}
