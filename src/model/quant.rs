//! Quantised checkpoints: quantization_config of config.json, strictly, and how a matrix of numbers and scales is laid
//! out. Which matrices are quantised is decided here, from the config alone, so that a plan knows it without a
//! checkpoint; weights.rs then refuses tensors that are stored in another way. The arithmetic of a stored number is in
//! cpu/dot.rs and the kernels.
use super::checkpoint::{Dtype, Tensor};
use super::keys::Keys;
use super::role::{Part, Role};
use anyhow::{bail, ensure, Context, Result};
use half::{bf16, f16};
use serde_json::Value;
use std::fmt;

/// How the numbers of a matrix [rows, cols] are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// bf16, f16 or f32.
    #[default]
    Plain,
    /// e4m3, and a scale for each block.
    Fp8(Block),
    /// -8 to 7 as 0 to 15, eight in a 32-bit word, column 8j in its lowest bits; a scale for each block of one row.
    Int4(Block),
}

/// What `--fp8-dense` makes of plain matrices: the smallest blocks that kernels have.
pub const FP8_DENSE: Format = Format::Fp8(Block { rows: 8, cols: Some(32) });

/// The numbers that share a scale; blocks at the ends may be smaller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    pub rows: usize,
    /// None: all columns of the row.
    pub cols: Option<usize>,
}

impl Block {
    /// Rows and columns of the scales of a matrix.
    pub fn scales(&self, rows: usize, cols: usize) -> [usize; 2] {
        [rows.div_ceil(self.rows), self.cols.map_or(1, |block| cols.div_ceil(block))]
    }
}

impl Format {
    pub fn block(&self) -> Option<Block> {
        match self {
            Format::Plain => None,
            Format::Fp8(block) | Format::Int4(block) => Some(*block),
        }
    }

    /// Bytes of a matrix of `rows` x `cols`, scales included: two bytes each beside INT4, four beside FP8. `plain` is
    /// the size of an unquantised number.
    pub fn bytes(&self, rows: usize, cols: usize, plain: usize) -> u64 {
        let scales = |block: &Block| block.scales(rows, cols).iter().product::<usize>();
        let bytes = match self {
            Format::Plain => rows * cols * plain,
            Format::Fp8(block) => rows * cols + 4 * scales(block),
            Format::Int4(block) => rows * cols.div_ceil(8) * 4 + 2 * scales(block),
        };
        bytes as u64
    }
}

/// The value of each e4m3 code: sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, NaN where all bits
/// are set.
pub const E4M3: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3) as u32 & 15, code as u32 & 7);
        let size = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa as f32 / 512.0,
            _ => f32::from_bits((exponent + 120) << 23 | mantissa << 20),
        };
        values[code] = if code < 128 { size } else { -size };
        code += 1;
    }
    values
};

/// For errors and -v: `int4 in blocks of 1 x 32`.
impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let name = match self {
            Format::Plain => return f.write_str("plain"),
            Format::Fp8(_) => "fp8 e4m3",
            Format::Int4(_) => "int4",
        };
        match self.block().expect("not plain") {
            Block { rows, cols: Some(cols) } => write!(f, "{name} in blocks of {rows} x {cols}"),
            Block { cols: None, .. } => write!(f, "{name} with a scale a row"),
        }
    }
}

/// quantization_config, read.
#[derive(Clone, Debug, PartialEq)]
pub struct Quant {
    pub format: Format,
    /// The scales of the matrix `x.weight` are `x.` and this.
    pub scale_name: &'static str,
    /// Parts that are stored plain.
    plain: Vec<Part>,
}

/// A module of each part, by the names of every family, for the patterns of `ignore`.
const MODULES: [(Part, &[&str]); 5] = [
    (Part::Attention, &["model.layers.1.self_attn.o_proj"]),
    (Part::Dense, &["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj"]),
    (
        Part::Experts,
        &[
            "model.layers.1.mlp.experts.0.gate_proj",
            "model.layers.1.mlp.experts.0.up_proj",
            "model.layers.1.mlp.experts.0.down_proj",
        ],
    ),
    (
        Part::Shared,
        &[
            "model.layers.1.mlp.shared_experts.gate_proj",
            "model.layers.1.mlp.shared_experts.up_proj",
            "model.layers.1.mlp.shared_experts.down_proj",
        ],
    ),
    (Part::Head, &["lm_head"]),
];

impl Quant {
    pub fn parse(value: Value) -> Result<Quant> {
        let Value::Object(map) = value else {
            bail!("config.json: quantization_config: expected an object, found {value}")
        };
        let mut keys = Keys { map, path: "config.json: quantization_config.".into() };
        let method = keys.take("quant_method");
        let quant = match method.as_ref().and_then(Value::as_str) {
            Some("fp8") => parse_fp8(&mut keys)?,
            Some("compressed-tensors") => parse_compressed(&mut keys)?,
            _ => {
                let found = method.unwrap_or_default();
                bail!("config.json: quantization_config.quant_method: expected \"fp8\" or \"compressed-tensors\", found {found}: use the unquantised release")
            }
        };
        keys.refuse_unread(|_, _| false)?;
        Ok(quant)
    }

    /// How a matrix of this role is stored.
    pub fn format(&self, role: Role) -> Format {
        match role.part() {
            Part::Other => Format::Plain,
            part if self.plain.contains(&part) => Format::Plain,
            _ => self.format,
        }
    }
}

/// DeepSeek's: e4m3 with a scale for each block, called weight_scale_inv although it is what numbers are multiplied by.
fn parse_fp8(keys: &mut Keys) -> Result<Quant> {
    only(keys, "fmt", "e4m3", true)?;
    // How activations would be rounded: here they are not.
    only(keys, "activation_scheme", "dynamic", true)?;
    only(keys, "scale_fmt", "ue8m0", true)?;
    let size = keys.take("weight_block_size");
    let sizes: Option<[usize; 2]> = size.clone().and_then(|size| serde_json::from_value(size).ok());
    let Some([rows, cols]) = sizes.filter(|[rows, cols]| (1..=1 << 16).contains(rows) && (1..=1 << 16).contains(cols))
    else {
        let found = size.unwrap_or_default();
        bail!("{}weight_block_size: expected rows and columns of a block such as [128, 128], found {found}", keys.path);
    };
    let mut plain = vec![Part::Head];
    for key in ["modules_to_not_convert", "ignored_layers"] {
        plain.extend(ignored(keys, key)?);
    }
    Ok(Quant { format: Format::Fp8(Block { rows, cols: Some(cols) }), scale_name: "weight_scale_inv", plain })
}

fn parse_compressed(keys: &mut Keys) -> Result<Quant> {
    only(keys, "quantization_status", "compressed", true)?;
    for key in ["version", "global_compression_ratio"] {
        keys.take(key);
    }
    for key in ["kv_cache_scheme", "sparsity_config", "transform_config"] {
        if let Some(value) = keys.take(key).filter(|value| !value.as_object().is_some_and(|map| map.is_empty())) {
            bail!("{}{key}: expected null, found {value}: not supported", keys.path);
        }
    }
    let format = keys.take("format");
    let groups = keys.take("config_groups");
    let group = match groups {
        Some(Value::Object(groups)) if groups.len() == 1 => groups.into_iter().next().expect("there is one").1,
        other => bail!("{}config_groups: expected one group, found {}", keys.path, other.unwrap_or_default()),
    };
    let mut group = object(&keys.path, "config_groups.", group)?;
    if let Some(targets) = group.take("targets").filter(|targets| *targets != serde_json::json!(["Linear"])) {
        bail!("{}targets: expected [\"Linear\"], found {targets}: not supported", group.path);
    }
    // Rounding of activations is not done here: the products are the more exact for it. Scales stored for it would be
    // tensors that nobody claims.
    group.take("input_activations");
    group.take("format");
    if let Some(value) = group.take("output_activations") {
        bail!("{}output_activations: expected null, found {value}: not supported", group.path);
    }
    let weights = group
        .take("weights")
        .with_context(|| format!("{}weights: expected how weights are quantised, found none", group.path))?;
    let mut weights = object(&group.path, "weights.", weights)?;
    let format = match format.as_ref().and_then(Value::as_str) {
        Some("pack-quantized") => {
            parse_weights(&mut weights, 4, "int")?;
            only(&mut weights, "strategy", "group", false)?;
            let cols = weights.count("group_size", 1 << 16)?;
            ensure!(cols % 8 == 0, "{}group_size: expected a multiple of 8, found {cols}", weights.path);
            Format::Int4(Block { rows: 1, cols: Some(cols) })
        }
        Some("float-quantized") => {
            parse_weights(&mut weights, 8, "float")?;
            let strategy = weights.take("strategy").unwrap_or_default();
            weights.take("group_size");
            match strategy.as_str() {
                Some("channel") => Format::Fp8(Block { rows: 1, cols: None }),
                Some("block") => {
                    let sizes = weights.take("block_structure").unwrap_or_default();
                    let [rows, cols]: [usize; 2] = serde_json::from_value(sizes.clone())
                        .ok()
                        .filter(|sizes: &[usize; 2]| sizes.iter().all(|size| (1..=1 << 16).contains(size)))
                        .with_context(|| {
                            format!("{}block_structure: expected rows and columns, found {sizes}", weights.path)
                        })?;
                    Format::Fp8(Block { rows, cols: Some(cols) })
                }
                _ => bail!(
                    "{}strategy: expected \"channel\" or \"block\", found {strategy}: not supported",
                    weights.path
                ),
            }
        }
        _ => {
            let found = format.unwrap_or_default();
            bail!(
                "{}format: expected \"pack-quantized\" or \"float-quantized\", found {found}: not supported",
                keys.path
            )
        }
    };
    weights.refuse_unread(|_, _| false)?;
    group.refuse_unread(|_, _| false)?;
    Ok(Quant { format, scale_name: "weight_scale", plain: ignored(keys, "ignore")? })
}

/// What every scheme of compressed-tensors says of weights.
fn parse_weights(weights: &mut Keys, bits: usize, kind: &str) -> Result<()> {
    let found = weights.count("num_bits", 64)?;
    ensure!(found == bits, "{}num_bits: expected {bits}, found {found}: not supported", weights.path);
    only(weights, "type", kind, false)?;
    for (key, only) in [("symmetric", true), ("dynamic", false)] {
        if let Some(value) = weights.flag(key)?.filter(|value| *value != only) {
            bail!("{}{key}: expected {only}, found {value}: not supported", weights.path);
        }
    }
    if let Some(value) = weights.take("actorder") {
        bail!("{}actorder: expected null, found {value}: not supported", weights.path);
    }
    // How the numbers were found, and types that the tensors themselves have.
    for key in ["observer", "observer_kwargs", "scale_dtype", "zp_dtype"] {
        weights.take(key);
    }
    Ok(())
}

/// A key that is understood at one value only.
fn only(keys: &mut Keys, key: &str, value: &str, optional: bool) -> Result<()> {
    match keys.take(key) {
        None if optional => Ok(()),
        Some(found) if found == value => Ok(()),
        found => bail!("{}{key}: expected \"{value}\", found {}: not supported", keys.path, found.unwrap_or_default()),
    }
}

fn object(path: &str, key: &str, value: Value) -> Result<Keys> {
    match value {
        Value::Object(map) => Ok(Keys { map, path: format!("{path}{key}") }),
        other => bail!("{path}{key}: expected an object, found {other}"),
    }
}

/// The parts that a list of modules keeps plain: names, ends of names, or `re:` and a pattern for the start of a name.
fn ignored(keys: &mut Keys, key: &str) -> Result<Vec<Part>> {
    let names: Vec<String> = match keys.take(key) {
        None => return Ok(Vec::new()),
        Some(value) => serde_json::from_value(value.clone())
            .with_context(|| format!("{}{key}: expected a list of names, found {value}", keys.path))?,
    };
    let mut patterns = Vec::new();
    for name in &names {
        let pattern = match name.strip_prefix("re:") {
            Some(pattern) => format!("^(?:{pattern})"),
            None => format!("(^|[.]){}($|[.])", regex::escape(name)),
        };
        let pattern = regex::Regex::new(&pattern);
        patterns.push(pattern.map_err(|_| {
            anyhow::anyhow!("{}{key}: expected a name or re: and a pattern, found {name:?}", keys.path)
        })?);
    }
    let mut plain = Vec::new();
    for (part, modules) in MODULES {
        // Names may carry the prefix of a model of text and images.
        let kept = |module: &&&str| {
            let long = format!("language_model.{module}");
            patterns.iter().any(|pattern| pattern.is_match(module) || pattern.is_match(&long))
        };
        match modules.iter().filter(kept).count() {
            0 => {}
            n if n == modules.len() => plain.push(part),
            _ => bail!("{}{key}: expected all or none of {}, found a part of them", keys.path, modules.join(", ")),
        }
    }
    Ok(plain)
}

/// A tensor in memory as f32.
pub fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    let bytes = tensor.bytes();
    Ok(match tensor.dtype {
        Dtype::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_le_bytes([b[0], b[1]]).to_f32()).collect(),
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
        other => bail!("{} in {}: expected bf16, f16 or f32, found {other}", tensor.name, tensor.file),
    })
}

#[cfg(test)]
mod tests {
    use super::E4M3;

    /// Against the definition, and values that other programs print.
    #[test]
    fn e4m3_codes() {
        for (code, value) in E4M3.iter().enumerate() {
            let (sign, e, m) = (if code < 128 { 1.0 } else { -1.0 }, (code >> 3 & 15) as i32, (code & 7) as f64);
            let expected = if e == 0 { m / 8.0 * 2f64.powi(-6) } else { (1.0 + m / 8.0) * 2f64.powi(e - 7) };
            match code & 127 {
                127 => assert!(value.is_nan()),
                _ => assert_eq!(f64::from(*value), sign * expected, "code {code:#x}"),
            }
        }
        assert_eq!(
            [E4M3[0x7e], E4M3[0x01], E4M3[0x38], E4M3[0xb8], E4M3[0x08]],
            [448.0, 0.001953125, 1.0, -1.0, 0.015625]
        );
    }
}
