//! Rotary position embedding: the keys of config.json about it, and the frequencies that they stand for.
use super::keys::{is_neutral, Keys};
use anyhow::{bail, ensure, Result};
use serde_json::Value;
use std::fmt;

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

/// YaRN's growth of attention with the stretch of the context.
fn magnitude(factor: f64, mscale: f64) -> f64 {
    0.1 * mscale * factor.ln() + 1.0
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
                let pair = |turns: f64| {
                    dim as f64 * (original_context as f64 / (turns * std::f64::consts::TAU)).ln()
                        / (2.0 * self.theta.ln())
                };
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

    /// What scores of latent attention with queries of `head_dim` numbers are multiplied by.
    pub fn latent_scale(&self, head_dim: usize) -> f32 {
        let sharper = match self.scaling {
            RopeScaling::Yarn { factor, mscale_all_dim: Some(mscale), .. } => magnitude(factor, mscale).powi(2),
            _ => 1.0,
        };
        (sharper / (head_dim as f64).sqrt()) as f32
    }

    /// What cos and sin are multiplied by; 1 except for yarn.
    pub fn attention_factor(&self) -> f32 {
        let RopeScaling::Yarn { factor, attention_factor, mscale, mscale_all_dim, .. } = self.scaling else {
            return 1.0;
        };
        let factor = match (attention_factor, mscale, mscale_all_dim) {
            (Some(given), _, _) => given,
            (None, Some(mscale), Some(all)) => magnitude(factor, mscale) / magnitude(factor, all),
            _ => magnitude(factor, 1.0),
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
                write!(
                    f,
                    "yarn, factor {factor}, original context {original_context}, attention factor {}",
                    self.attention_factor()
                )
            }
        }?;
        write!(f, ", theta {}", self.theta)
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
    // The default of all families' config classes.
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
            let option =
                |keys: &mut Keys, key| Ok::<_, anyhow::Error>(keys.optional_number(key)?.filter(|value| *value != 0.0));
            let positive = |keys: &mut Keys, key, default| {
                Ok::<_, anyhow::Error>(keys.optional_positive(key, 1e6)?.unwrap_or(default))
            };
            let beta_fast = positive(keys, "beta_fast", 32.0)?;
            let beta_slow = positive(keys, "beta_slow", 1.0)?;
            ensure!(
                beta_slow <= beta_fast,
                "{}beta_slow: expected at most beta_fast = {beta_fast}, found {beta_slow}",
                keys.path
            );
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
