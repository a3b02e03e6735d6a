//! The passes of the model itself.
use super::layer::{Builder, Place, TARGET_BUFFERS};
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
    let mut p = Builder::new(rows);
    let x = p.buffer("x", config.hidden, BufferKind::Stream);
    let buffers = p.layer_buffers(config, shard, TARGET_BUFFERS);
    let partial = (ranks.count > 1).then(|| p.buffer("partial", config.hidden, BufferKind::Activation));
    let features = (!taps.is_empty()).then(|| p.buffer("features", taps.len() * config.hidden, BufferKind::Feature));
    let tap_at = |entry: usize| {
        let i = taps.iter().position(|&e| e == entry)?;
        Some(Tap { out: features?, column: i * config.hidden })
    };

    p.steps.push(Step::Embed {
        table: WeightId::new(Role::Embed, None),
        tokens: Tokens::Pass,
        out: x,
        dim: config.hidden,
    });
    for layer in 0..config.n_layers {
        let place = Place {
            owner: Owner::Target,
            cache_layer: layer,
            tokens: Tokens::Pass,
            x,
            tap: tap_at(layer + 1),
            partial,
        };
        p.decoder_layer(config, shard, layer, &buffers, place);
    }
    if let Pass::Verify { .. } = pass {
        let logits = p.buffer("logits", shard.vocab, BufferKind::Logits);
        p.steps.push(Step::Linear(Linear {
            weight: WeightId::new(Role::Head, None),
            format: config.format(Role::Head),
            bias: None,
            inputs: vec![Input { x, dim: config.hidden, norm: Some(WeightId::new(Role::FinalNorm, None)) }],
            n: shard.vocab,
            epilogue: Epilogue::Logits { out: logits },
        }));
        p.steps.push(Step::Accept { logits, vocab: config.vocab, first_id: shard.first_id });
    }
    let kv = kv_layout(config, shard, config.n_layers);
    Ok(Plan { pass, ranks, buffers: p.buffers, kv, steps: p.steps, norm_eps: config.norm_eps })
}

pub(super) fn kv_layout(config: &Config, shard: Shard, n_layers: usize) -> KvLayout {
    match config.latent {
        None => {
            KvLayout { n_layers, n_kv_heads: shard.n_kv_heads, head_dim: config.head_dim, value_dim: config.head_dim }
        }
        Some(latent) => KvLayout { n_layers, n_kv_heads: 1, head_dim: latent.row_dim(), value_dim: 0 },
    }
}
