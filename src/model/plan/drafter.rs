//! The passes of a drafter: an EAGLE-3 head, or the model's own layer for multi-token prediction.
use super::layer::{Builder, Place, DRAFT_BUFFERS, STEP_BUFFERS};
use super::ranks::{Ranks, Shard};
use super::step::*;
use super::target::{kv_layout, Taps};
use crate::model::config::{Config, Latent};
use crate::model::quant::Format;
use crate::model::role::{Role, WeightId};
use anyhow::{bail, Result};

/// The shape of an EAGLE-3 drafter and the flags that change its arithmetic (eagle3 checkpoint formats; all numbers of
/// its own config).
#[derive(Clone, Debug, PartialEq)]
pub struct Drafter {
    pub hidden: usize,
    pub target_hidden: usize,
    /// Layer entries of the target whose hidden state is read, ascending.
    pub taps: Taps,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub ffn_dim: usize,
    pub vocab: usize,
    pub norm_eps: f32,
    pub qkv_bias: bool,
    pub qk_norm: bool,
    /// The residual starts from the normalised feature.
    pub norm_before_residual: bool,
    /// One RMSNorm over all tapped features before fc.
    pub norm_before_fc: bool,
    /// One RMSNorm per tapped feature before fc (EAGLE-3.1).
    pub fc_norm: bool,
    /// The feature handed to the next draft step is the normalised one.
    pub norm_output: bool,
    /// Latent attention and the scale of its scores; None is grouped-query attention.
    pub latent: Option<(Latent, f32)>,
    /// No EAGLE-3 drafter but the layer for multi-token prediction of this model, the target: what is about EAGLE-3
    /// above does not count.
    pub mtp: Option<Box<Config>>,
}

impl Drafter {
    /// Whether `n` ranks can share its layer: grouped attention only, as a latent is read by all heads.
    pub fn divides(&self, n: usize) -> bool {
        let heads = self.n_heads % n == 0 && (self.n_kv_heads % n == 0 || n % self.n_kv_heads == 0);
        heads && self.ffn_dim % (8 * n) == 0 && self.latent.is_none() && self.mtp.is_none()
    }

    /// Numbers of a query and key that are rotated.
    pub fn rope_dim(&self) -> usize {
        match (&self.mtp, self.latent) {
            (Some(config), _) => config.rope_dim(),
            (None, Some((latent, _))) => latent.rope_dim,
            (None, None) => self.head_dim,
        }
    }
}

/// The drafter's plan for `DraftPrefill` and `Draft`.
///
/// Row i pairs the token after target row i with target row i's features. `Draft` first runs `width` such rows
/// (draft-extend: rows behind the last accepted one are padding), picks the last true row, and continues from it one
/// row at a time with its own hidden state. Several ranks divide its layer; all have all of the head and choose the
/// same drafts.
pub fn drafter(d: &Drafter, pass: Pass, ranks: Ranks) -> Result<Plan> {
    let (rows, drafts) = match pass {
        Pass::DraftPrefill { rows } => (rows, 0),
        Pass::Draft { width, drafts } if (1..=MAX_WIDTH).contains(&width) && (1..MAX_WIDTH).contains(&drafts) => {
            (width, drafts)
        }
        other => bail!("{other:?} is not a pass of a drafter"),
    };
    if ranks.count > 1 && !(ranks.split_drafter && d.divides(ranks.count)) {
        bail!("this drafter is whole on every rank: its plan has one rank, not {}", ranks.count);
    }
    if let Some(config) = &d.mtp {
        return mtp(config, d.vocab, pass, rows, drafts);
    }
    let id = |role| WeightId::new(role, None);
    let mut p = Builder::new(rows);
    let features = p.buffer("features", d.taps.len() * d.target_hidden, BufferKind::Feature);
    let f = p.buffer("draft_feature", d.hidden, BufferKind::Stream);
    let (n_taps, dim) = (d.taps.len(), d.target_hidden);
    let mut input = Input { x: features, dim: n_taps * dim, norm: d.norm_before_fc.then(|| id(Role::FcInputNorm)) };
    if d.fc_norm {
        input.x = p.buffer("draft_normed_features", n_taps * dim, BufferKind::Activation);
        p.steps.extend((0..n_taps).map(|i| {
            let weight = WeightId::new(Role::FcNorm, Some(i));
            Step::Norm { x: features, column: i * dim, weight, out: input.x, dim }
        }));
    }
    let epilogue = Epilogue::Store { out: f };
    p.steps.push(Step::Linear(Linear {
        weight: id(Role::Fc),
        format: Format::Plain,
        bias: None,
        inputs: vec![input],
        n: d.hidden,
        epilogue,
    }));
    let x = p.drafter_layer(d, ranks, Tokens::Next, f);
    if drafts > 0 {
        p.rows = 1;
        let logits = p.buffer("draft_logits", d.vocab, BufferKind::Logits);
        let mut feedback = p.buffer("draft_selected", d.hidden, BufferKind::Stream);
        p.steps.push(Step::Select { x, out: feedback, dim: d.hidden });
        for draft in 1..=drafts {
            if draft > 1 {
                feedback = p.drafter_layer(d, ranks, Tokens::Draft(draft - 1), feedback);
            }
            let norm = id(Role::DraftNorm);
            let inputs = vec![Input { x: feedback, dim: d.hidden, norm: Some(norm) }];
            let epilogue = Epilogue::Logits { out: logits };
            p.steps.push(Step::Linear(Linear {
                weight: id(Role::DraftHead),
                format: Format::Plain,
                bias: None,
                inputs,
                n: d.vocab,
                epilogue,
            }));
            if d.norm_output && draft < drafts {
                let normed = p.buffer("draft_normed", d.hidden, BufferKind::Stream);
                p.steps.push(Step::Norm { x: feedback, column: 0, weight: norm, out: normed, dim: d.hidden });
                feedback = normed;
            }
            p.steps.push(Step::DraftToken { logits, vocab: d.vocab, draft });
        }
    }
    let kv = match d.latent {
        None => KvLayout {
            n_layers: 1,
            n_kv_heads: d.n_kv_heads.div_ceil(ranks.count),
            head_dim: d.head_dim,
            value_dim: d.head_dim,
        },
        Some((latent, _)) => KvLayout { n_layers: 1, n_kv_heads: 1, head_dim: latent.row_dim(), value_dim: 0 },
    };
    Ok(Plan { pass, ranks, buffers: p.buffers, kv, steps: p.steps, norm_eps: d.norm_eps })
}

/// A model's own layer for multi-token prediction (DeepSeek-V3, arXiv 2412.19437), as a drafter. Row i joins the token
/// after target row i with the target's last hidden state there, normalised as for its head. The layer's output,
/// normalised, is what the next draft starts from. `vocab` ids are drafted.
fn mtp(config: &Config, vocab: usize, pass: Pass, rows: usize, drafts: usize) -> Result<Plan> {
    let layer = config.n_layers;
    let id = |role| WeightId::new(role, Some(layer));
    let of_target = |role| WeightId::new(role, None);
    let (shard, dim) = (Shard::of(config, Ranks::ONE)?, config.hidden);
    let mut p = Builder::new(rows);
    let features = p.buffer("features", dim, BufferKind::Feature);
    // One pair of (embedding of `tokens`, hidden state) a row through the layer; the one-row steps have buffers of
    // their own.
    let through_layer = |p: &mut Builder, tokens: Tokens, hidden: BufferId| {
        let one = matches!(tokens, Tokens::Draft(_));
        let name = |many, single| if one { single } else { many };
        let e = p.buffer(name("draft_embedding", "step_embedding"), dim, BufferKind::Stream);
        let x = p.buffer(name("draft_x", "step_x"), dim, BufferKind::Stream);
        let buffers = p.layer_buffers(config, shard, if one { STEP_BUFFERS } else { DRAFT_BUFFERS });
        p.steps.push(Step::Embed { table: of_target(Role::DraftEmbed), tokens, out: e, dim });
        p.steps.push(Step::Linear(Linear {
            weight: id(Role::MtpProj),
            format: config.format(Role::MtpProj),
            bias: None,
            inputs: vec![
                Input { x: e, dim, norm: Some(id(Role::MtpEmbedNorm)) },
                Input { x: hidden, dim, norm: Some(id(Role::MtpHiddenNorm)) },
            ],
            n: dim,
            epilogue: Epilogue::Store { out: x },
        }));
        p.decoder_layer(
            config,
            shard,
            layer,
            &buffers,
            Place { owner: Owner::Drafter, cache_layer: 0, tokens, x, tap: None, partial: None },
        );
        x
    };
    let hidden = p.buffer("draft_feature", dim, BufferKind::Stream);
    p.steps.push(Step::Norm { x: features, column: 0, weight: of_target(Role::FinalNorm), out: hidden, dim });
    let mut x = through_layer(&mut p, Tokens::Next, hidden);
    if drafts > 0 {
        p.rows = 1;
        let logits = p.buffer("draft_logits", vocab, BufferKind::Logits);
        let selected = p.buffer("draft_selected", dim, BufferKind::Stream);
        p.steps.push(Step::Select { x, out: selected, dim });
        x = selected;
        for draft in 1..=drafts {
            let norm = id(Role::MtpNorm);
            p.steps.push(Step::Linear(Linear {
                weight: of_target(Role::DraftHead),
                format: config.format(Role::Head),
                bias: None,
                inputs: vec![Input { x, dim, norm: Some(norm) }],
                n: vocab,
                epilogue: Epilogue::Logits { out: logits },
            }));
            p.steps.push(Step::DraftToken { logits, vocab, draft });
            if draft < drafts {
                let normed = p.buffer("draft_normed", dim, BufferKind::Stream);
                p.steps.push(Step::Norm { x, column: 0, weight: norm, out: normed, dim });
                x = through_layer(&mut p, Tokens::Draft(draft), normed);
            }
        }
    }
    let kv = kv_layout(config, shard, 1);
    Ok(Plan { pass, ranks: Ranks::ONE, buffers: p.buffers, kv, steps: p.steps, norm_eps: config.norm_eps })
}
