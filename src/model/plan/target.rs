//! The passes of the model itself.
use super::layer::{Builder, Layer, Place};
use super::ranks::{Ranks, Shard};
use super::step::*;
use crate::model::config::Config;
use crate::model::role::{Role, WeightId};
use anyhow::{bail, Result};

/// Layer entries whose residual stream a drafter reads: `taps[i] = e` means "the hidden state that enters layer e".
pub type Taps = Vec<usize>;

/// The target model's plan for `Prefill` and `Verify`.
pub fn target(config: &Config, pass: Pass, ranks: Ranks, taps: &[usize]) -> Result<Plan> {
    let rows = match pass {
        Pass::Prefill { rows } => rows,
        Pass::Verify { width } if (1..=MAX_WIDTH).contains(&width) => width,
        other => bail!("{other:?} is not a pass of the target model"),
    };
    if let Some(e) = taps.iter().find(|&&e| e == 0 || e > config.n_layers) {
        bail!("tapped layer entry {e}: the model has entries 1 to {}", config.n_layers);
    }
    let shard = Shard::of(config, ranks)?;
    let format = |role| config.format(role);
    let mut p = Builder::new(rows);
    let x = p.buffer(Stage::Target, Slot::X, config.hidden, BufferKind::Stream);
    let features_dim = taps.len() * config.hidden;
    let features =
        (features_dim > 0).then(|| p.buffer(Stage::Target, Slot::Features, features_dim, BufferKind::Feature));
    let tap_at = |entry: usize| {
        let i = taps.iter().position(|&e| e == entry)?;
        Some(Tap { out: features?, column: i * config.hidden })
    };

    p.steps.push(Step::Embed {
        table: WeightId::of_target(Role::Embed, None),
        tokens: Tokens::Pass,
        out: x,
        dim: config.hidden,
    });
    for i in 0..config.n_layers {
        let layer = Layer::of(config, ranks, shard, i, &format);
        p.layer(&layer, Place { stage: Stage::Target, tokens: Tokens::Pass, x, tap: tap_at(i + 1) });
    }
    if let Pass::Verify { .. } = pass {
        let logits = p.buffer(Stage::Target, Slot::Logits, shard.vocab, BufferKind::Logits);
        p.steps.push(Step::Linear(Linear {
            weight: WeightId::of_target(Role::Head, None),
            format: config.format(Role::Head),
            bias: None,
            inputs: vec![Input { x, dim: config.hidden, norm: Some(WeightId::of_target(Role::FinalNorm, None)) }],
            n: shard.vocab,
            epilogue: Epilogue::Logits { out: logits },
        }));
        p.steps.push(Step::Accept { logits, vocab: config.vocab, first_id: shard.first_id });
    }
    let kv = Layer::of(config, ranks, shard, 0, &format).kv(config.n_layers);
    Ok(Plan { pass, ranks, buffers: p.buffers, kv, steps: p.steps, norm_eps: config.norm_eps })
}
