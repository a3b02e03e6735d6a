//! The passes of a drafter: an EAGLE-3 head (arXiv 2503.01840), or the model's own layer for multi-token prediction.
use super::layer::{Builder, FeedForward, Layer, Place};
use super::ranks::{Ranks, Shard};
use super::step::*;
use super::target::Taps;
use crate::model::config::{Config, Latent};
use crate::model::quant::Format;
use crate::model::role::{Owner, Role, WeightId};
use anyhow::{bail, Result};

#[derive(Clone, Debug, PartialEq)]
pub enum Drafter {
    Eagle3(Eagle3),
    Mtp(Mtp),
}

/// The shape of an EAGLE-3 drafter and the flags that change its arithmetic (eagle3 checkpoint formats; all numbers of
/// its own config).
#[derive(Clone, Debug, PartialEq)]
pub struct Eagle3 {
    pub hidden: usize,
    pub target_hidden: usize,
    /// Layer entries of the target whose hidden state is read, ascending.
    pub taps: Taps,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub ffn_dim: usize,
    /// Ids that are drafted.
    pub vocab: usize,
    pub norm_eps: f32,
    pub qkv_bias: bool,
    pub qk_norm: bool,
    /// The residual stream starts from the normalised feature.
    pub norm_before_residual: bool,
    /// One RMSNorm over all auxiliary hidden states before fc.
    pub norm_before_fc: bool,
    /// One RMSNorm per auxiliary hidden state before fc (EAGLE-3.1).
    pub fc_norm: bool,
    /// The feature handed to the next draft step is the normalised one.
    pub norm_output: bool,
    /// Latent attention and the scale of its scores; None is grouped-query attention.
    pub latent: Option<(Latent, f32)>,
}

/// The target's own layer behind its last one, made for multi-token prediction (DeepSeek-V3, arXiv 2412.19437).
#[derive(Clone, Debug, PartialEq)]
pub struct Mtp {
    /// The target's.
    pub config: Box<Config>,
    /// Ids that are drafted.
    pub vocab: usize,
}

impl Drafter {
    /// Layer entries of the target whose hidden state is read, ascending.
    pub fn taps(&self) -> Taps {
        match self {
            Drafter::Eagle3(eagle) => eagle.taps.clone(),
            Drafter::Mtp(mtp) => vec![mtp.config.n_layers],
        }
    }

    /// Numbers of these hidden states together.
    pub fn features_dim(&self) -> usize {
        match self {
            Drafter::Eagle3(eagle) => eagle.taps.len() * eagle.target_hidden,
            Drafter::Mtp(mtp) => mtp.config.hidden,
        }
    }

    pub fn hidden(&self) -> usize {
        match self {
            Drafter::Eagle3(eagle) => eagle.hidden,
            Drafter::Mtp(mtp) => mtp.config.hidden,
        }
    }

    /// Ids that are drafted.
    pub fn vocab(&self) -> usize {
        match self {
            Drafter::Eagle3(Eagle3 { vocab, .. }) | Drafter::Mtp(Mtp { vocab, .. }) => *vocab,
        }
    }

    pub fn set_vocab(&mut self, n: usize) {
        match self {
            Drafter::Eagle3(Eagle3 { vocab, .. }) | Drafter::Mtp(Mtp { vocab, .. }) => *vocab = n,
        }
    }

    pub fn latent(&self) -> Option<Latent> {
        match self {
            Drafter::Eagle3(eagle) => eagle.latent.map(|(latent, _)| latent),
            Drafter::Mtp(mtp) => mtp.config.latent,
        }
    }

    /// Whether `n` ranks can share its layer: an EAGLE-3 drafter's with grouped attention, as a latent is read by all
    /// heads.
    pub fn divides(&self, n: usize) -> bool {
        let Drafter::Eagle3(d) = self else { return false };
        let heads = d.n_heads % n == 0 && (d.n_kv_heads % n == 0 || n % d.n_kv_heads == 0);
        heads && d.ffn_dim % (8 * n) == 0 && d.latent.is_none()
    }

    /// Numbers of a query and key that are rotated.
    pub fn rope_dim(&self) -> usize {
        match self {
            Drafter::Eagle3(eagle) => eagle.latent.map_or(eagle.head_dim, |(latent, _)| latent.rope_dim),
            Drafter::Mtp(mtp) => mtp.config.rope_dim(),
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
    let mut p = Builder::new(rows);
    let (kv, norm_eps) = match d {
        Drafter::Eagle3(eagle) => (eagle.steps(&mut p, ranks, drafts), eagle.norm_eps),
        Drafter::Mtp(mtp) => (mtp.steps(&mut p, drafts)?, mtp.config.norm_eps),
    };
    Ok(Plan { pass, ranks, buffers: p.buffers, kv, steps: p.steps, norm_eps })
}

fn id(role: Role) -> WeightId {
    WeightId::of_drafter(role, None)
}

/// Many rows with features, or one with the hidden state that the draft before has left.
fn stage(tokens: Tokens) -> Stage {
    match tokens {
        Tokens::Pass | Tokens::Next => Stage::Extend,
        Tokens::Draft(_) => Stage::Single,
    }
}

impl Eagle3 {
    fn steps(&self, p: &mut Builder, ranks: Ranks, drafts: usize) -> KvLayout {
        let hidden = self.hidden;
        let layer = self.layer(ranks);
        let feature = self.join_features(p);
        let x = self.through_layer(p, &layer, Tokens::Next, feature);
        if drafts == 0 {
            return layer.kv(1);
        }
        let logits = p.buffer(Stage::Single, Slot::Logits, self.vocab, BufferKind::Logits);
        let mut feedback = p.buffer(Stage::Single, Slot::Selected, hidden, BufferKind::Stream);
        p.steps.push(Step::Select { x, out: feedback, dim: hidden });
        for draft in 1..=drafts {
            if draft > 1 {
                feedback = self.through_layer(p, &layer, Tokens::Draft(draft - 1), feedback);
            }
            let norm = id(Role::FinalNorm);
            p.head(Format::Plain, Input { x: feedback, dim: hidden, norm: Some(norm) }, self.vocab, logits);
            if self.norm_output && draft < drafts {
                let normed = p.buffer(Stage::Single, Slot::Normed, hidden, BufferKind::Stream);
                p.steps.push(Step::Norm { x: feedback, column: 0, weight: norm, out: normed, dim: hidden });
                feedback = normed;
            }
            p.steps.push(Step::DraftToken { logits, vocab: self.vocab, draft });
        }
        layer.kv(1)
    }

    fn layer(&self, ranks: Ranks) -> Layer<'static> {
        Layer {
            owner: Owner::Drafter,
            index: None,
            cache_layer: 0,
            hidden: self.hidden,
            n_heads: self.n_heads / ranks.count,
            n_kv_heads: self.n_kv_heads.div_ceil(ranks.count),
            head_dim: self.head_dim,
            qkv_bias: self.qkv_bias,
            o_bias: false,
            qk_norm: self.qk_norm,
            latent: self.latent,
            feed_forward: FeedForward::Dense { dim: self.ffn_dim / ranks.count, bias: false },
            divided: [ranks.count > 1; 2],
            format: &|_| Format::Plain,
        }
    }

    /// fc, over the auxiliary hidden states of the target.
    fn join_features(&self, p: &mut Builder) -> BufferId {
        let (n, dim) = (self.taps.len(), self.target_hidden);
        let features = p.buffer(Stage::Target, Slot::Features, n * dim, BufferKind::Feature);
        let norm = self.norm_before_fc.then(|| id(Role::FcInputNorm));
        let mut input = Input { x: features, dim: n * dim, norm };
        if self.fc_norm {
            input.x = p.buffer(Stage::Extend, Slot::NormedFeatures, n * dim, BufferKind::Activation);
            p.steps.extend((0..n).map(|i| {
                let weight = WeightId::of_drafter(Role::FcNorm, Some(i));
                Step::Norm { x: features, column: i * dim, weight, out: input.x, dim }
            }));
        }
        let out = p.buffer(Stage::Extend, Slot::Feature, self.hidden, BufferKind::Stream);
        p.steps.push(Step::Linear(Linear {
            weight: id(Role::Fc),
            format: Format::Plain,
            bias: None,
            inputs: vec![input],
            n: self.hidden,
            epilogue: Epilogue::Store { out },
        }));
        out
    }

    /// The layer over the pairs (embedding of `tokens`, `feature`); the buffer that holds its output, before any norm.
    fn through_layer(&self, p: &mut Builder, layer: &Layer, tokens: Tokens, feature: BufferId) -> BufferId {
        let (stage, dim) = (stage(tokens), self.hidden);
        let e = p.buffer(stage, Slot::Embedding, dim, BufferKind::Stream);
        p.steps.push(Step::Embed { table: id(Role::Embed), tokens, out: e, dim });
        let inputs = vec![
            Input { x: e, dim, norm: Some(id(Role::EmbedNorm)) },
            Input { x: feature, dim, norm: Some(id(Role::FeatureNorm)) },
        ];
        let qkv = p.qkv(layer, stage, inputs);
        let mut x = feature;
        if self.norm_before_residual {
            x = p.buffer(stage, Slot::X, dim, BufferKind::Stream);
            p.steps.push(Step::Norm { x: feature, column: 0, weight: id(Role::FeatureNorm), out: x, dim });
        }
        p.layer_of(layer, qkv, Place { stage, tokens, x, tap: None });
        x
    }
}

impl Mtp {
    /// Row i joins the token after target row i with the target's last hidden state there, normalised as for its head.
    /// The layer's output, normalised, is what the next draft starts from.
    fn steps(&self, p: &mut Builder, drafts: usize) -> Result<KvLayout> {
        let (config, dim) = (&*self.config, self.config.hidden);
        let format = |role| config.format(role);
        let shard = Shard::of(config, Ranks::ONE)?;
        let own = Layer::of(config, Ranks::ONE, shard, config.n_layers, &format);
        let layer = Layer { owner: Owner::Drafter, cache_layer: 0, ..own };
        let features = p.buffer(Stage::Target, Slot::Features, dim, BufferKind::Feature);
        let hidden = p.buffer(Stage::Extend, Slot::Feature, dim, BufferKind::Stream);
        let weight = WeightId::of_target(Role::FinalNorm, None);
        p.steps.push(Step::Norm { x: features, column: 0, weight, out: hidden, dim });
        let mut x = through_mtp_layer(p, &layer, Tokens::Next, hidden);
        if drafts == 0 {
            return Ok(layer.kv(1));
        }
        let logits = p.buffer(Stage::Single, Slot::Logits, self.vocab, BufferKind::Logits);
        let selected = p.buffer(Stage::Single, Slot::Selected, dim, BufferKind::Stream);
        p.steps.push(Step::Select { x, out: selected, dim });
        x = selected;
        for draft in 1..=drafts {
            let norm = layer.id(Role::MtpNorm);
            p.head(config.format(Role::Head), Input { x, dim, norm: Some(norm) }, self.vocab, logits);
            p.steps.push(Step::DraftToken { logits, vocab: self.vocab, draft });
            if draft < drafts {
                let normed = p.buffer(Stage::Single, Slot::Normed, dim, BufferKind::Stream);
                p.steps.push(Step::Norm { x, column: 0, weight: norm, out: normed, dim });
                x = through_mtp_layer(p, &layer, Tokens::Draft(draft), normed);
            }
        }
        Ok(layer.kv(1))
    }
}

/// The pairs (embedding of `tokens`, `hidden`) through the layer for multi-token prediction.
fn through_mtp_layer(p: &mut Builder, layer: &Layer, tokens: Tokens, hidden: BufferId) -> BufferId {
    let (stage, dim) = (stage(tokens), layer.hidden);
    let e = p.buffer(stage, Slot::Embedding, dim, BufferKind::Stream);
    let x = p.buffer(stage, Slot::X, dim, BufferKind::Stream);
    p.steps.push(Step::Embed { table: id(Role::Embed), tokens, out: e, dim });
    p.steps.push(Step::Linear(Linear {
        weight: layer.id(Role::MtpProj),
        format: (layer.format)(Role::MtpProj),
        bias: None,
        inputs: vec![
            Input { x: e, dim, norm: Some(layer.id(Role::MtpEmbedNorm)) },
            Input { x: hidden, dim, norm: Some(layer.id(Role::MtpHiddenNorm)) },
        ],
        n: dim,
        epilogue: Epilogue::Store { out: x },
    }));
    p.layer(layer, Place { stage, tokens, x, tap: None });
    x
}

impl Builder {
    /// A drafter's head over one row.
    fn head(&mut self, format: Format, input: Input, vocab: usize, logits: BufferId) {
        self.steps.push(Step::Linear(Linear {
            weight: id(Role::Head),
            format,
            bias: None,
            inputs: vec![input],
            n: vocab,
            epilogue: Epilogue::Logits { out: logits },
        }));
    }
}
