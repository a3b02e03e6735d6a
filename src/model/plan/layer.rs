//! A decoder layer as steps: the target's, an EAGLE-3 drafter's and the model's own for drafting, each from a
//! description of it.
use super::ranks::{Ranks, Shard};
use super::step::*;
use crate::model::config::{Config, Latent, Routing, Scoring};
use crate::model::quant::Format;
use crate::model::role::{Owner, Role, WeightId};

/// One rank's part of a decoder layer: sizes, flags, how its matrices are stored.
pub(super) struct Layer<'a> {
    pub owner: Owner,
    /// Of its weights.
    pub index: Option<usize>,
    /// Of the cache.
    pub cache_layer: usize,
    pub hidden: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub qk_norm: bool,
    /// Latent attention and the scale of its scores; None is grouped-query attention.
    pub latent: Option<(Latent, f32)>,
    pub feed_forward: FeedForward,
    /// Ranks divide it, so that what it ends in is a part of a sum: attention, and the feed-forward layer.
    pub divided: [bool; 2],
    pub format: &'a dyn Fn(Role) -> Format,
}

pub(super) enum FeedForward {
    Dense { dim: usize, bias: bool },
    Experts(ExpertDims),
}

#[derive(Clone, Copy)]
pub(super) struct ExpertDims {
    pub routing: Routing,
    pub expert_dim: usize,
    /// 0 without a shared expert.
    pub shared_dim: usize,
}

/// Where a layer stands in a pass.
pub(super) struct Place {
    pub stage: Stage,
    pub tokens: Tokens,
    /// The residual stream.
    pub x: BufferId,
    /// Where it is kept when it leaves the layer.
    pub tap: Option<Tap>,
}

impl<'a> Layer<'a> {
    /// Layer `index` of a model.
    pub fn of(
        config: &Config,
        ranks: Ranks,
        shard: Shard,
        index: usize,
        format: &'a dyn Fn(Role) -> Format,
    ) -> Layer<'a> {
        let feed_forward = match config.experts.as_ref().filter(|_| config.has_experts(index)) {
            None => FeedForward::Dense { dim: shard.ffn_dim, bias: config.mlp_bias },
            Some(experts) => FeedForward::Experts(ExpertDims {
                routing: experts.routing,
                expert_dim: shard.expert_dim,
                shared_dim: shard.shared_dim,
            }),
        };
        Layer {
            owner: Owner::Target,
            index: Some(index),
            cache_layer: index,
            hidden: config.hidden,
            n_heads: shard.n_heads,
            n_kv_heads: shard.n_kv_heads,
            head_dim: config.head_dim,
            qkv_bias: config.qkv_bias,
            o_bias: config.o_bias,
            qk_norm: config.qk_norm,
            latent: config.latent.map(|latent| (latent, config.latent_scale())),
            feed_forward,
            divided: [shard.n_heads < config.n_heads, ranks.count > 1],
            format,
        }
    }

    pub fn id(&self, role: Role) -> WeightId {
        WeightId { owner: self.owner, layer: self.index, role }
    }

    /// The cache of `n_layers` such layers.
    pub fn kv(&self, n_layers: usize) -> KvLayout {
        match self.latent {
            None => {
                KvLayout { n_layers, n_kv_heads: self.n_kv_heads, head_dim: self.head_dim, value_dim: self.head_dim }
            }
            Some((latent, _)) => KvLayout { n_layers, n_kv_heads: 1, head_dim: latent.row_dim(), value_dim: 0 },
        }
    }
}

/// A plan in the making.
pub(super) struct Builder {
    /// Of all buffers but those of `Stage::Single`.
    pub rows: usize,
    pub buffers: Vec<Buffer>,
    pub steps: Vec<Step>,
}

impl Builder {
    pub fn new(rows: usize) -> Builder {
        Builder { rows, buffers: Vec::new(), steps: Vec::new() }
    }

    /// The buffer of this name, made on first use.
    pub fn buffer(&mut self, stage: Stage, slot: Slot, dim: usize, kind: BufferKind) -> BufferId {
        let name = BufferName { stage, slot };
        if let Some(i) = self.buffers.iter().position(|b| b.name == name) {
            return BufferId(i);
        }
        let rows = if stage == Stage::Single { 1 } else { self.rows };
        self.buffers.push(Buffer { name, rows, dim, kind });
        BufferId(self.buffers.len() - 1)
    }

    /// The layer whose first matrix reads the residual stream.
    pub fn layer(&mut self, layer: &Layer, place: Place) {
        let inputs = vec![Input { x: place.x, dim: layer.hidden, norm: Some(layer.id(Role::AttnNorm)) }];
        let qkv = self.qkv(layer, place.stage, inputs);
        self.layer_of(layer, qkv, place);
    }

    /// A layer's first matrix; what attention reads of it: queries, keys and values, or their latents.
    pub fn qkv(&mut self, layer: &Layer, stage: Stage, inputs: Vec<Input>) -> BufferId {
        let (role, slot, n) = match layer.latent {
            None => (Role::Qkv, Slot::Qkv, (layer.n_heads + 2 * layer.n_kv_heads) * layer.head_dim),
            Some((latent, _)) => (Role::QkvA, Slot::Latents, latent.q_rank + latent.row_dim()),
        };
        let out = self.buffer(stage, slot, n, BufferKind::Activation);
        let bias = layer.qkv_bias.then_some(Role::QkvBias);
        self.linear(layer, role, bias, inputs, n, Epilogue::Store { out });
        out
    }

    /// From queries, keys and values on: attention and the feed-forward layer, each added to `place.x`.
    pub fn layer_of(&mut self, layer: &Layer, qkv: BufferId, place: Place) {
        let Place { stage, x, tap, .. } = place;
        let [attention_divided, feed_forward_divided] = layer.divided;
        let attended = match layer.latent {
            None => self.attention(layer, qkv, &place),
            Some((dims, scale)) => self.latent_attention(layer, dims, scale, qkv, &place),
        };
        let inputs = vec![Input { x: attended, dim: self.buffers[attended.0].dim, norm: None }];
        let bias = layer.o_bias.then_some(Role::OBias);
        let partial = self.partial(layer, stage, attention_divided);
        self.residual(layer, Role::O, bias, inputs, (x, None), partial);

        let partial = self.partial(layer, stage, feed_forward_divided);
        let input = Input { x, dim: layer.hidden, norm: Some(layer.id(Role::FfnNorm)) };
        match layer.feed_forward {
            FeedForward::Dense { dim, bias } => {
                let act = self.buffer(stage, Slot::Act, dim, BufferKind::Activation);
                let bias = |role| bias.then_some(role);
                let epilogue = Epilogue::SiluMul { out: act };
                self.linear(layer, Role::GateUp, bias(Role::GateUpBias), vec![input], 2 * dim, epilogue);
                let inputs = vec![Input { x: act, dim, norm: None }];
                self.residual(layer, Role::Down, bias(Role::DownBias), inputs, (x, tap), partial);
            }
            FeedForward::Experts(dims) => self.experts(layer, dims, input, &place, partial),
        }
    }

    fn attention(&mut self, layer: &Layer, qkv: BufferId, place: &Place) -> BufferId {
        let dim = layer.n_heads * layer.head_dim;
        let out = self.buffer(place.stage, Slot::Attended, dim, BufferKind::Activation);
        self.steps.push(Step::Attention(Attention {
            owner: layer.owner,
            layer: layer.cache_layer,
            tokens: place.tokens,
            qkv,
            out,
            q_norm: layer.qk_norm.then(|| layer.id(Role::QNorm)),
            k_norm: layer.qk_norm.then(|| layer.id(Role::KNorm)),
            n_heads: layer.n_heads,
            n_kv_heads: layer.n_kv_heads,
            head_dim: layer.head_dim,
        }));
        out
    }

    fn latent_attention(
        &mut self,
        layer: &Layer,
        dims: Latent,
        scale: f32,
        latents: BufferId,
        place: &Place,
    ) -> BufferId {
        let n_heads = layer.n_heads;
        let mut buffer = |slot, dim| self.buffer(place.stage, slot, n_heads * dim, BufferKind::Activation);
        let q = buffer(Slot::Q, layer.head_dim);
        let absorbed = buffer(Slot::Absorbed, dims.row_dim());
        let attended = buffer(Slot::LatentAttended, dims.kv_rank);
        let out = buffer(Slot::Attended, dims.v_dim);
        let inputs = vec![Input { x: latents, dim: dims.q_rank, norm: Some(layer.id(Role::QANorm)) }];
        self.linear(layer, Role::QB, None, inputs, n_heads * layer.head_dim, Epilogue::Store { out: q });
        let attention = LatentAttention {
            owner: layer.owner,
            layer: layer.cache_layer,
            tokens: place.tokens,
            latents,
            q,
            absorbed,
            attended,
            out,
            kv_norm: layer.id(Role::KvANorm),
            kv_b: layer.id(Role::KvB),
            format: (layer.format)(Role::KvB),
            n_heads,
            dims,
            scale,
        };
        self.steps.push(Step::LatentQuery(attention.clone()));
        self.steps.push(Step::LatentAttend(attention.clone()));
        self.steps.push(Step::LatentValue(attention));
        out
    }

    fn experts(&mut self, layer: &Layer, dims: ExpertDims, input: Input, place: &Place, partial: Option<BufferId>) {
        let ExpertDims { routing, expert_dim, shared_dim } = dims;
        let Place { stage, x, tap, .. } = *place;
        let routes = self.buffer(stage, Slot::Routes, 2 * routing.top_k, BufferKind::Routes);
        let act_dim = routing.top_k * expert_dim + shared_dim;
        let act = self.buffer(stage, Slot::ExpertAct, act_dim, BufferKind::Activation);
        self.steps.push(Step::Router(Router {
            input: input.clone(),
            weight: layer.id(Role::Router),
            bias: (routing.scoring == Scoring::Sigmoid).then(|| layer.id(Role::RouterBias)),
            routes,
            routing,
        }));
        let mixture = Mixture {
            input,
            routes,
            act,
            n_experts: routing.n_experts,
            top_k: routing.top_k,
            gate_up: layer.id(Role::ExpertGateUp),
            down: layer.id(Role::ExpertDown),
            format: (layer.format)(Role::ExpertGateUp),
            expert_dim,
            shared: (shared_dim > 0).then(|| SharedExpert {
                gate_up: layer.id(Role::SharedGateUp),
                down: layer.id(Role::SharedDown),
                format: (layer.format)(Role::SharedGateUp),
                dim: shared_dim,
            }),
            n: layer.hidden,
            epilogue: partial.map_or(Epilogue::Residual { x, tap }, |out| Epilogue::Partial { out }),
            one_row: stage == Stage::Single,
        };
        self.steps.push(Step::ExpertsUp(mixture.clone()));
        self.steps.push(Step::ExpertsDown(mixture));
        if let Some(partial) = partial {
            self.steps.push(Step::AllReduce { partial, x, dim: layer.hidden, bias: None, tap });
        }
    }

    /// Where this rank's share of a sum goes, if ranks divide what makes it.
    fn partial(&mut self, layer: &Layer, stage: Stage, divided: bool) -> Option<BufferId> {
        divided.then(|| self.buffer(stage, Slot::Partial, layer.hidden, BufferKind::Activation))
    }

    /// A linear layer that ends in the residual stream: directly, or through a sum over ranks.
    fn residual(
        &mut self,
        layer: &Layer,
        role: Role,
        bias: Option<Role>,
        inputs: Vec<Input>,
        (x, tap): (BufferId, Option<Tap>),
        partial: Option<BufferId>,
    ) {
        let n = layer.hidden;
        let Some(partial) = partial else {
            return self.linear(layer, role, bias, inputs, n, Epilogue::Residual { x, tap });
        };
        self.linear(layer, role, None, inputs, n, Epilogue::Partial { out: partial });
        // A bias is added once, after the sum.
        let bias = bias.map(|role| layer.id(role));
        self.steps.push(Step::AllReduce { partial, x, dim: n, bias, tap });
    }

    fn linear(
        &mut self,
        layer: &Layer,
        role: Role,
        bias: Option<Role>,
        inputs: Vec<Input>,
        n: usize,
        epilogue: Epilogue,
    ) {
        self.steps.push(Step::Linear(Linear {
            weight: layer.id(role),
            format: (layer.format)(role),
            bias: bias.map(|role| layer.id(role)),
            inputs,
            n,
            epilogue,
        }));
    }
}
