//! One decoder layer as steps.
use super::drafter::Drafter;
use super::ranks::{Ranks, Shard};
use super::step::*;
use crate::model::config::{Config, Latent, Scoring};
use crate::model::quant::Format;
use crate::model::role::{Role, WeightId};

/// Names of a decoder layer's buffers, in the order of `LayerBuffers`.
pub(super) type BufferNames = [&'static str; 9];

pub(super) const TARGET_BUFFERS: BufferNames =
    ["qkv", "latents", "q", "absorbed", "latent_attended", "attended", "act", "routes", "expert_act"];

#[rustfmt::skip]
pub(super) const DRAFT_BUFFERS: BufferNames = [
    "draft_qkv", "draft_latents", "draft_q", "draft_absorbed", "draft_latent_attended", "draft_attended", "draft_act", "draft_routes",
    "draft_expert_act",
];

#[rustfmt::skip]
pub(super) const STEP_BUFFERS: BufferNames = [
    "step_qkv", "step_latents", "step_q", "step_absorbed", "step_latent_attended", "step_attended", "step_act", "step_routes",
    "step_expert_act",
];

/// What a decoder layer works in; those of the other kinds of layers are absent.
pub(super) struct LayerBuffers {
    qkv: Option<BufferId>,
    latents: Option<BufferId>,
    q: Option<BufferId>,
    absorbed: Option<BufferId>,
    latent_attended: Option<BufferId>,
    attended: BufferId,
    act: Option<BufferId>,
    routes: Option<BufferId>,
    expert_act: Option<BufferId>,
}

/// Where a decoder layer stands.
pub(super) struct Place {
    pub(super) owner: Owner,
    pub(super) cache_layer: usize,
    pub(super) tokens: Tokens,
    pub(super) x: BufferId,
    pub(super) tap: Option<Tap>,
    pub(super) partial: Option<BufferId>,
}

pub(super) struct Builder {
    pub(super) rows: usize,
    pub(super) buffers: Vec<Buffer>,
    pub(super) steps: Vec<Step>,
}

impl Builder {
    pub(super) fn new(rows: usize) -> Builder {
        Builder { rows, buffers: Vec::new(), steps: Vec::new() }
    }

    /// The buffer of this name, made on first use.
    pub(super) fn buffer(&mut self, name: &'static str, dim: usize, kind: BufferKind) -> BufferId {
        if let Some(i) = self.buffers.iter().position(|b| b.name == name) {
            return BufferId(i);
        }
        self.buffers.push(Buffer { name, rows: self.rows, dim, kind });
        BufferId(self.buffers.len() - 1)
    }

    pub(super) fn layer_buffers(&mut self, config: &Config, shard: Shard, names: BufferNames) -> LayerBuffers {
        let mut activation = |name, dim| self.buffer(name, dim, BufferKind::Activation);
        let [qkv, latents, q, absorbed, latent_attended, attended, act, routes, expert_act] = names;
        let n_heads = shard.n_heads;
        let grouped = config.latent.is_none();
        let mut buffers = LayerBuffers {
            qkv: grouped.then(|| activation(qkv, (n_heads + 2 * shard.n_kv_heads) * config.head_dim)),
            latents: config.latent.map(|l| activation(latents, l.q_rank + l.row_dim())),
            q: config.latent.map(|_| activation(q, n_heads * config.head_dim)),
            absorbed: config.latent.map(|l| activation(absorbed, n_heads * l.row_dim())),
            latent_attended: config.latent.map(|l| activation(latent_attended, n_heads * l.kv_rank)),
            attended: activation(attended, n_heads * config.latent.map_or(config.head_dim, |l| l.v_dim)),
            act: (shard.ffn_dim > 0).then(|| activation(act, shard.ffn_dim)),
            routes: None,
            expert_act: config
                .experts
                .as_ref()
                .map(|e| activation(expert_act, e.routing.top_k * shard.expert_dim + shard.shared_dim)),
        };
        buffers.routes = config.experts.as_ref().map(|e| self.buffer(routes, 2 * e.routing.top_k, BufferKind::Routes));
        buffers
    }

    /// One decoder layer of a model: attention and a feed-forward layer, each added to `place.x`.
    pub(super) fn decoder_layer(
        &mut self,
        config: &Config,
        shard: Shard,
        layer: usize,
        buffers: &LayerBuffers,
        place: Place,
    ) {
        let id = |role| WeightId::new(role, Some(layer));
        let Place { owner, cache_layer, tokens, x, tap, partial } = place;
        let normed = |x, norm, dim| vec![Input { x, dim, norm: Some(id(norm)) }];
        let linear = |role, bias: Option<Role>, inputs, n, epilogue| {
            let format = config.format(role);
            Linear { weight: id(role), format, bias: bias.map(id), inputs, n, epilogue }
        };
        let attended_dim = self.buffers[buffers.attended.0].dim;
        if let Some(latent) = config.latent {
            let [latents, q, absorbed, attended] =
                [buffers.latents, buffers.q, buffers.absorbed, buffers.latent_attended]
                    .map(|b| b.expect("a latent has these"));
            let n = latent.q_rank + latent.row_dim();
            let epilogue = Epilogue::Store { out: latents };
            self.steps.push(Step::Linear(linear(
                Role::QkvA,
                None,
                normed(x, Role::AttnNorm, config.hidden),
                n,
                epilogue,
            )));
            let inputs = normed(latents, Role::QANorm, latent.q_rank);
            self.steps.push(Step::Linear(linear(
                Role::QB,
                None,
                inputs,
                shard.n_heads * config.head_dim,
                Epilogue::Store { out: q },
            )));
            let attention = LatentAttention {
                owner,
                layer: cache_layer,
                tokens,
                latents,
                q,
                absorbed,
                attended,
                out: buffers.attended,
                kv_norm: id(Role::KvANorm),
                kv_b: id(Role::KvB),
                format: config.format(Role::KvB),
                n_heads: shard.n_heads,
                dims: latent,
                scale: config.latent_scale(),
            };
            self.steps.push(Step::LatentQuery(attention.clone()));
            self.steps.push(Step::LatentAttend(attention.clone()));
            self.steps.push(Step::LatentValue(attention));
        } else {
            let qkv = buffers.qkv.expect("grouped attention has it");
            let n = (shard.n_heads + 2 * shard.n_kv_heads) * config.head_dim;
            let bias = config.qkv_bias.then_some(Role::QkvBias);
            let epilogue = Epilogue::Store { out: qkv };
            self.steps.push(Step::Linear(linear(
                Role::Qkv,
                bias,
                normed(x, Role::AttnNorm, config.hidden),
                n,
                epilogue,
            )));
            self.steps.push(Step::Attention(Attention {
                owner,
                layer: cache_layer,
                tokens,
                qkv,
                out: buffers.attended,
                q_norm: config.qk_norm.then(|| id(Role::QNorm)),
                k_norm: config.qk_norm.then(|| id(Role::KNorm)),
                n_heads: shard.n_heads,
                n_kv_heads: shard.n_kv_heads,
                head_dim: config.head_dim,
            }));
        }
        let bias = config.o_bias.then_some(Role::OBias);
        let inputs = vec![Input { x: buffers.attended, dim: attended_dim, norm: None }];
        let of_some_heads = partial.filter(|_| shard.n_heads < config.n_heads);
        self.residual(linear(Role::O, bias, inputs, config.hidden, Epilogue::Residual { x, tap: None }), of_some_heads);

        let experts = config.experts.as_ref().filter(|_| config.has_experts(layer));
        let Some(experts) = experts else {
            let act = buffers.act.expect("a dense layer has it");
            let bias = |role| config.mlp_bias.then_some(role);
            let inputs = normed(x, Role::FfnNorm, config.hidden);
            let epilogue = Epilogue::SiluMul { out: act };
            self.steps.push(Step::Linear(linear(
                Role::GateUp,
                bias(Role::GateUpBias),
                inputs,
                2 * shard.ffn_dim,
                epilogue,
            )));
            let inputs = vec![Input { x: act, dim: shard.ffn_dim, norm: None }];
            let down = linear(Role::Down, bias(Role::DownBias), inputs, config.hidden, Epilogue::Residual { x, tap });
            return self.residual(down, partial);
        };
        let [routes, act] = [buffers.routes, buffers.expert_act].map(|b| b.expect("experts have these"));
        let input = Input { x, dim: config.hidden, norm: Some(id(Role::FfnNorm)) };
        let routing = experts.routing;
        self.steps.push(Step::Router(Router {
            input: input.clone(),
            weight: id(Role::Router),
            bias: (routing.scoring == Scoring::Sigmoid).then(|| id(Role::RouterBias)),
            routes,
            routing,
        }));
        let mixture = Mixture {
            input,
            routes,
            act,
            n_experts: routing.n_experts,
            top_k: routing.top_k,
            gate_up: id(Role::ExpertGateUp),
            down: id(Role::ExpertDown),
            format: config.format(Role::ExpertGateUp),
            expert_dim: shard.expert_dim,
            shared: (shard.shared_dim > 0).then(|| SharedExpert {
                gate_up: id(Role::SharedGateUp),
                down: id(Role::SharedDown),
                format: config.format(Role::SharedGateUp),
                dim: shard.shared_dim,
            }),
            n: config.hidden,
            epilogue: partial.map_or(Epilogue::Residual { x, tap }, |out| Epilogue::Partial { out }),
            one_row: matches!(tokens, Tokens::Draft(_)),
        };
        self.steps.push(Step::ExpertsUp(mixture.clone()));
        self.steps.push(Step::ExpertsDown(mixture));
        if let Some(partial) = partial {
            self.steps.push(Step::AllReduce { partial, x, dim: config.hidden, bias: None, tap });
        }
    }

    /// The drafter's one layer over the pairs (embedding of `tokens`, `feature`); the buffer that holds its output,
    /// before any norm.
    pub(super) fn drafter_layer(&mut self, d: &Drafter, ranks: Ranks, tokens: Tokens, feature: BufferId) -> BufferId {
        // The one-row steps have buffers of their own: rows of a buffer are fixed in a plan.
        let one = matches!(tokens, Tokens::Draft(_));
        let name = |many: &'static str, single: &'static str| if one { single } else { many };
        let id = |role| WeightId::new(role, None);
        let (n_heads, n_kv_heads, ffn_dim) =
            (d.n_heads / ranks.count, d.n_kv_heads.div_ceil(ranks.count), d.ffn_dim / ranks.count);
        let (qkv_name, qkv_dim, attended_dim) = match d.latent {
            None => (name("draft_qkv", "step_qkv"), (n_heads + 2 * n_kv_heads) * d.head_dim, n_heads * d.head_dim),
            Some((latent, _)) => {
                (name("draft_latents", "step_latents"), latent.q_rank + latent.row_dim(), d.n_heads * latent.v_dim)
            }
        };
        let e = self.buffer(name("draft_embedding", "step_embedding"), d.hidden, BufferKind::Stream);
        let qkv = self.buffer(qkv_name, qkv_dim, BufferKind::Activation);
        let attended = self.buffer(name("draft_attended", "step_attended"), attended_dim, BufferKind::Activation);
        let act = self.buffer(name("draft_act", "step_act"), ffn_dim, BufferKind::Activation);
        let partial = (ranks.count > 1)
            .then(|| self.buffer(name("draft_partial", "step_partial"), d.hidden, BufferKind::Activation));
        self.steps.push(Step::Embed { table: id(Role::DraftEmbed), tokens, out: e, dim: d.hidden });
        self.steps.push(Step::Linear(Linear {
            weight: id(if d.latent.is_some() { Role::DraftQkvA } else { Role::DraftQkv }),
            format: Format::Plain,
            bias: d.qkv_bias.then(|| id(Role::DraftQkvBias)),
            inputs: vec![
                Input { x: e, dim: d.hidden, norm: Some(id(Role::EmbedNorm)) },
                Input { x: feature, dim: d.hidden, norm: Some(id(Role::FeatureNorm)) },
            ],
            n: qkv_dim,
            epilogue: Epilogue::Store { out: qkv },
        }));
        let x = if d.norm_before_residual {
            let x = self.buffer(name("draft_x", "step_x"), d.hidden, BufferKind::Stream);
            self.steps.push(Step::Norm { x: feature, column: 0, weight: id(Role::FeatureNorm), out: x, dim: d.hidden });
            x
        } else {
            feature
        };
        if let Some((latent, scale)) = d.latent {
            self.drafter_latent(d, tokens, [qkv, attended], latent, scale);
        } else {
            self.steps.push(Step::Attention(Attention {
                owner: Owner::Drafter,
                layer: 0,
                tokens,
                qkv,
                out: attended,
                q_norm: d.qk_norm.then(|| id(Role::DraftQNorm)),
                k_norm: d.qk_norm.then(|| id(Role::DraftKNorm)),
                n_heads,
                n_kv_heads,
                head_dim: d.head_dim,
            }));
        }
        let linear = |weight, x: BufferId, dim, norm, n, epilogue| {
            let inputs = vec![Input { x, dim, norm }];
            Linear { weight: id(weight), format: Format::Plain, bias: None, inputs, n, epilogue }
        };
        let residual = || Epilogue::Residual { x, tap: None };
        self.residual(linear(Role::DraftO, attended, attended_dim, None, d.hidden, residual()), partial);
        let ffn_norm = Some(id(Role::DraftFfnNorm));
        self.steps.push(Step::Linear(linear(
            Role::DraftGateUp,
            x,
            d.hidden,
            ffn_norm,
            2 * ffn_dim,
            Epilogue::SiluMul { out: act },
        )));
        self.residual(linear(Role::DraftDown, act, ffn_dim, None, d.hidden, residual()), partial);
        x
    }

    /// From the latents of an EAGLE-3 drafter to what its heads attended to.
    pub(super) fn drafter_latent(
        &mut self,
        d: &Drafter,
        tokens: Tokens,
        [latents, out]: [BufferId; 2],
        dims: Latent,
        scale: f32,
    ) {
        let id = |role| WeightId::new(role, None);
        let one = matches!(tokens, Tokens::Draft(_));
        let mut buffer = |many, single, dim| self.buffer(if one { single } else { many }, dim, BufferKind::Activation);
        let q = buffer("draft_q", "step_q", d.n_heads * d.head_dim);
        let absorbed = buffer("draft_absorbed", "step_absorbed", d.n_heads * dims.row_dim());
        let attended = buffer("draft_latent_attended", "step_latent_attended", d.n_heads * dims.kv_rank);
        self.steps.push(Step::Linear(Linear {
            weight: id(Role::DraftQB),
            format: Format::Plain,
            bias: None,
            inputs: vec![Input { x: latents, dim: dims.q_rank, norm: Some(id(Role::DraftQANorm)) }],
            n: d.n_heads * d.head_dim,
            epilogue: Epilogue::Store { out: q },
        }));
        let attention = LatentAttention {
            owner: Owner::Drafter,
            layer: 0,
            tokens,
            latents,
            q,
            absorbed,
            attended,
            out,
            kv_norm: id(Role::DraftKvANorm),
            kv_b: id(Role::DraftKvB),
            format: Format::Plain,
            n_heads: d.n_heads,
            dims,
            scale,
        };
        self.steps.push(Step::LatentQuery(attention.clone()));
        self.steps.push(Step::LatentAttend(attention.clone()));
        self.steps.push(Step::LatentValue(attention));
    }

    /// A linear layer that ends in the residual stream: directly on one rank, through a sum over ranks on several.
    pub(super) fn residual(&mut self, mut linear: Linear, partial: Option<BufferId>) {
        let Epilogue::Residual { x, tap } = linear.epilogue.clone() else { unreachable!("called with Residual only") };
        let n = linear.n;
        if let Some(partial) = partial {
            // A bias is added once, after the sum.
            let bias = linear.bias.take();
            linear.epilogue = Epilogue::Partial { out: partial };
            self.steps.push(Step::Linear(linear));
            self.steps.push(Step::AllReduce { partial, x, dim: n, bias, tap });
        } else {
            self.steps.push(Step::Linear(linear));
        }
    }
}
