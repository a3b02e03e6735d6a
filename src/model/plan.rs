//! The plan: what one pass computes, as a list of steps, built from the config alone.
//!
//! The CUDA backend launches this list (and capture turns it into a graph), the CPU reference runs it in f32, bench
//! walks it for the bytes each step moves, doctor compares the two step by step. Nothing here touches weights or a GPU.
//! Read `Step` first; the arms that execute it are in cpu/reference.rs and gpu/kernels.rs.
//!
//! What surprises: norms are not steps. A linear layer multiplies its input by the norm weight on the way in and its
//! sums by the row's 1/rms on the way out, so that no step waits for another just to normalise.
use super::config::{Config, Latent, Routing, Scoring};
use super::quant::Format;
use super::weights::{vocab_rows, Role, WeightId};
use anyhow::{bail, Result};
use std::fmt;

/// Widest verify pass. Caches hold `context + 2 * MAX_WIDTH` rows, so that a pass may write past the end of the
/// context.
pub const MAX_WIDTH: usize = 16;

/// The epsilon of the norms inside latent attention, whatever rms_norm_eps says: as in DeepSeek's and transformers'
/// code.
pub const LATENT_NORM_EPS: f32 = 1e-6;

/// Rows of the ring of tapped features, indexed by position: one prefill chunk.
pub const FEATURE_ROWS: usize = 1024;

/// Rows of the prefill graphs; the count in use is data on the device.
pub const PREFILL_ROWS: [usize; 4] = [16, 64, 256, 1024];

/// What a plan computes. The number is the width the pass is captured for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Up to `rows` prompt tokens into the cache. No logits: the last prompt token goes through `Verify { width: 1 }`.
    Prefill { rows: usize },
    /// The root token and `width - 1` drafts: logits for every row, sampled, accepted while the sample equals the
    /// draft.
    Verify { width: usize },
    /// The drafter over up to `rows` prompt tokens with the target's features.
    DraftPrefill { rows: usize },
    /// Draft-extend over `width` rows with true features, then `drafts - 1` one-row steps.
    Draft { width: usize, drafts: usize },
}

/// One rank of a tensor-parallel group. `Ranks::ONE` is a single GPU, or the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ranks {
    pub rank: usize,
    pub count: usize,
    /// Every rank has all of attention, weights and cache: a layer has one sum over ranks instead of two. For machines
    /// whose sums take long (gpu/links.rs).
    pub whole_attention: bool,
    /// The layer of an EAGLE-3 drafter is divided as the target's are, where `Drafter::divides`: two sums a draft.
    /// Otherwise, and the rest of it, it is whole on every rank.
    pub split_drafter: bool,
}

impl Ranks {
    pub const ONE: Ranks = Ranks::new(0, 1);

    /// Everything is divided.
    pub const fn new(rank: usize, count: usize) -> Ranks {
        Ranks { rank, count, whole_attention: false, split_drafter: false }
    }

    /// As they divide a weight.
    pub fn of(self, role: Role) -> Ranks {
        let is_whole = match role.is_drafters() {
            true => !(self.split_drafter && role.is_drafters_layer()),
            false => self.whole_attention && role.is_attention(),
        };
        if is_whole {
            Ranks::ONE
        } else {
            self
        }
    }
}

/// Index into `Plan::buffers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub usize);

/// An activation buffer, [rows, dim]. f32 on the CPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    pub name: &'static str,
    pub rows: usize,
    pub dim: usize,
    pub kind: BufferKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferKind {
    /// bf16 on the GPU.
    Activation,
    /// The residual stream, f32 everywhere: read through norms and added to, never the plain input of a linear layer.
    Stream,
    /// f32 everywhere: what sampling reads.
    Logits,
    /// f32 everywhere: the experts of each row, in ascending order, then the weight of each.
    Routes,
    /// Tapped features: written by the target's passes, read by the drafter's; a ring of FEATURE_ROWS rows by position.
    Feature,
}

/// What one layer of a KV cache holds for a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub n_layers: usize,
    pub n_kv_heads: usize,
    /// Numbers of a key.
    pub head_dim: usize,
    /// Numbers of a value; 0 with latent attention, where a value is the first part of the key.
    pub value_dim: usize,
}

impl KvLayout {
    /// Numbers stored for one position of one layer, keys and values together.
    pub fn row_dim(&self) -> usize {
        self.n_kv_heads * (self.head_dim + self.value_dim)
    }
}

/// Which model's cache a step works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    Target,
    Drafter,
}

/// Which tokens an embedding step looks up, and where its rows stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tokens {
    /// Row i is token i of the pass: a prompt chunk, or the root and its drafts. Position: length + i.
    Pass,
    /// Row i is the token after row i of the last verify pass (what was sampled there), or after prompt row i.
    Next,
    /// One row: draft number `n`, counted from 1.
    Draft(usize),
}

/// One input of a linear layer: `dim` numbers a row, optionally RMS-normalised with weight `norm` on the way in.
#[derive(Clone, Debug, PartialEq)]
pub struct Input {
    pub x: BufferId,
    pub dim: usize,
    pub norm: Option<WeightId>,
}

/// What happens to the sums of a linear layer.
#[derive(Clone, Debug, PartialEq)]
pub enum Epilogue {
    /// out = sum
    Store { out: BufferId },
    /// out = silu(first half) * second half; the weight holds gate and up, `n` counts both.
    SiluMul { out: BufferId },
    /// x += sum, rounded once; with a tap the new x is also stored in the feature buffer.
    Residual { x: BufferId, tap: Option<Tap> },
    /// This rank's share of a sum, for the `AllReduce` that follows.
    Partial { out: BufferId },
    /// f32 logits of this rank's part of the vocabulary.
    Logits { out: BufferId },
}

/// Where a residual stream is kept for the drafter: columns `column .. column + hidden` of each feature row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tap {
    pub out: BufferId,
    pub column: usize,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    pub weight: WeightId,
    pub format: Format,
    pub bias: Option<WeightId>,
    /// Concatenated along K, in this order.
    pub inputs: Vec<Input>,
    /// Output rows of this rank's weight (gate and up together for `SiluMul`).
    pub n: usize,
    pub epilogue: Epilogue,
}

impl Linear {
    pub fn k(&self) -> usize {
        self.inputs.iter().map(|i| i.dim).sum()
    }
}

/// Grouped-query attention with everything around the cache: per-head q/k norm if there are weights, rope, the new
/// rows' K and V written at position length + row, softmax over positions <= length + row.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    pub owner: Owner,
    pub layer: usize,
    /// Where row 0 stands: at the cache's length, or `Tokens::Draft(n)`, n rows behind the last true row.
    pub tokens: Tokens,
    pub qkv: BufferId, // [rows, (n_heads + 2 * n_kv_heads) * head_dim], heads of this rank
    pub out: BufferId, // [rows, n_heads * head_dim]
    pub q_norm: Option<WeightId>,
    pub k_norm: Option<WeightId>,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
}

/// Latent attention in its absorbed form: a query is taken into the space of the latent, so that the cache row of a
/// position (latent and rotated key) is the key of all heads, and its latent is their value. Three steps share this
/// description.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentAttention {
    pub owner: Owner,
    /// Of the cache.
    pub layer: usize,
    /// As in `Attention`.
    pub tokens: Tokens,
    pub latents: BufferId,  // [rows, q_rank + kv_rank + rope_dim]: made by Role::QkvA
    pub q: BufferId,        // [rows, n_heads * (nope_dim + rope_dim)], heads of this rank
    pub absorbed: BufferId, // [rows, n_heads * (kv_rank + rope_dim)]
    pub attended: BufferId, // [rows, n_heads * kv_rank]
    pub out: BufferId,      // [rows, n_heads * v_dim]
    pub kv_norm: WeightId,
    /// [n_heads * (nope_dim + v_dim), kv_rank]; of each head, rows that make its key, then rows that make its value.
    pub kv_b: WeightId,
    pub format: Format,
    pub n_heads: usize,
    pub dims: Latent,
    /// Of scores, before softmax.
    pub scale: f32,
}

/// Which experts a row uses, and with which weights; f32 logits.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    pub input: Input,
    pub weight: WeightId, // [n_experts, dim]
    /// Added to scores when experts are chosen.
    pub bias: Option<WeightId>,
    pub routes: BufferId, // [rows, 2 * top_k]
    pub routing: Routing,
}

/// The experts of each row and the shared one, as two steps: up to the activations, and down into the residual stream.
/// A row adds its experts in ascending order, the shared one last, so that its bits do not depend on which other rows
/// use them.
#[derive(Clone, Debug, PartialEq)]
pub struct Mixture {
    pub input: Input,
    pub routes: BufferId, // [rows, 2 * top_k]
    pub act: BufferId,    // [rows, top_k * expert_dim + shared_dim]
    pub n_experts: usize,
    pub top_k: usize,
    pub gate_up: WeightId, // of each expert [2 * expert_dim, dim]
    pub down: WeightId,    // of each expert [n, expert_dim]
    pub format: Format,
    /// Columns of this rank.
    pub expert_dim: usize,
    pub shared: Option<SharedExpert>,
    pub n: usize,
    /// Of the way down: `Residual` or `Partial`.
    pub epilogue: Epilogue,
    /// A one-row step of a draft pass.
    pub one_row: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct SharedExpert {
    pub gate_up: WeightId,
    pub down: WeightId,
    pub format: Format,
    /// Columns of this rank.
    pub dim: usize,
}

impl Mixture {
    /// Bytes of one side's weights that a pass of `rows` reads, if its rows choose experts evenly: `n` x `k` each.
    fn bytes(&self, rows: usize, n: usize, k: usize, shared: [usize; 2], storage: Storage) -> u64 {
        let e = self.n_experts as f64;
        let distinct = e * (1.0 - (1.0 - self.top_k as f64 / e).powi(rows as i32));
        let experts = distinct * self.format.bytes(n, k, storage.weight) as f64;
        experts.round() as u64
            + self.shared.as_ref().map_or(0, |s| s.format.bytes(shared[0], shared[1], storage.weight))
    }

    /// Columns of the shared expert, 0 without one.
    pub fn shared_dim(&self) -> usize {
        self.shared.as_ref().map_or(0, |shared| shared.dim)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// out = rows of the embedding table.
    Embed {
        table: WeightId,
        tokens: Tokens,
        out: BufferId,
        dim: usize,
    },
    Linear(Linear),
    Attention(Attention),
    /// The new rows of the cache, normalised and rotated; absorbed = each head's query in the space of the latent, then
    /// rotated.
    LatentQuery(LatentAttention),
    /// attended = softmax(scale * absorbed x cache rows) x latents
    LatentAttend(LatentAttention),
    /// out = each head's value of what it attended to
    LatentValue(LatentAttention),
    Router(Router),
    /// act = silu(gate) * up of each expert of a row
    ExpertsUp(Mixture),
    /// The epilogue's end of: sum of weight * down(act) over the experts of a row
    ExpertsDown(Mixture),
    /// x += sum of `partial` over ranks in rank order (+ bias), f32, rounded once; optionally tapped. All ranks then
    /// hold the same x.
    AllReduce {
        partial: BufferId,
        x: BufferId,
        dim: usize,
        bias: Option<WeightId>,
        tap: Option<Tap>,
    },
    /// Columns `column .. column + dim` of out = RMSNorm(the same columns of x) * weight. Only drafters need it on its
    /// own (`fc_norm`, `norm_before_residual`, `norm_output`).
    Norm {
        x: BufferId,
        column: usize,
        weight: WeightId,
        out: BufferId,
        dim: usize,
    },
    /// Every row sampled, drafts accepted while they equal the sample, end conditions tested, length and history
    /// advanced. Column i of `logits` is token `first_id + i`; all ranks together have `vocab` tokens and choose the
    /// same.
    Accept {
        logits: BufferId,
        vocab: usize,
        first_id: usize,
    },
    /// out (one row) = the row of x that belongs to the last accepted token.
    Select {
        x: BufferId,
        out: BufferId,
        dim: usize,
    },
    /// Draft number `draft`, counted from 1: the best of one row of the drafter's logits, as a target id.
    DraftToken {
        logits: BufferId,
        vocab: usize,
        draft: usize,
    },
}

/// One pass of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    pub pass: Pass,
    pub ranks: Ranks,
    pub buffers: Vec<Buffer>,
    pub kv: KvLayout,
    pub steps: Vec<Step>,
    pub norm_eps: f32,
}

/// How many bytes a number takes where the plan runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Storage {
    pub weight: usize,
    pub kv: usize,
    /// Whether the matrices that make keys and values of latents are plain numbers whatever their format.
    pub plain_kv_b: bool,
}

impl Storage {
    fn kv_b(&self, a: &LatentAttention, rows: usize) -> u64 {
        let format = if self.plain_kv_b { Format::Plain } else { a.format };
        format.bytes(rows, a.dims.kv_rank, self.weight)
    }
}

impl Step {
    /// Bytes that must be read from memory for one execution: weights once, and the KV rows of `position` earlier
    /// tokens once.
    pub fn bytes(&self, rows: usize, position: usize, storage: Storage) -> u64 {
        match self {
            Step::Embed { dim, tokens, .. } => {
                let rows = if let Tokens::Draft(_) = tokens { 1 } else { rows };
                (rows * dim * storage.weight) as u64
            }
            Step::Linear(l) => l.format.bytes(l.n, l.k(), storage.weight),
            Step::Attention(a) => (position * 2 * a.n_kv_heads * a.head_dim * storage.kv) as u64,
            Step::LatentQuery(a) => storage.kv_b(a, a.n_heads * a.dims.nope_dim),
            Step::LatentAttend(a) => (position * a.dims.row_dim() * storage.kv) as u64,
            Step::LatentValue(a) => storage.kv_b(a, a.n_heads * a.dims.v_dim),
            Step::Router(r) => Format::Plain.bytes(r.routing.n_experts, r.input.dim, storage.weight),
            Step::ExpertsUp(m) => {
                let rows = if m.one_row { 1 } else { rows };
                m.bytes(rows, 2 * m.expert_dim, m.input.dim, [2 * m.shared_dim(), m.input.dim], storage)
            }
            Step::ExpertsDown(m) => {
                let rows = if m.one_row { 1 } else { rows };
                m.bytes(rows, m.n, m.expert_dim, [m.n, m.shared_dim()], storage)
            }
            Step::AllReduce { .. }
            | Step::Norm { .. }
            | Step::Select { .. }
            | Step::Accept { .. }
            | Step::DraftToken { .. } => 0,
        }
    }

    /// The name without its layer: steps of one kind do the same work on other weights.
    pub fn kind(&self) -> String {
        match self {
            Step::Linear(l) => l.weight.role.to_string(),
            Step::Attention(_) => "attention".into(),
            Step::LatentQuery(_) => "latent_query".into(),
            Step::LatentAttend(_) => "latent_attend".into(),
            Step::LatentValue(_) => "latent_value".into(),
            Step::Router(r) => r.weight.role.to_string(),
            Step::ExpertsUp(_) => "experts_up".into(),
            Step::ExpertsDown(_) => "experts_down".into(),
            other => other.name(),
        }
    }

    pub fn name(&self) -> String {
        match self {
            Step::Embed { .. } => "embed".into(),
            Step::Linear(l) => l.weight.to_string(),
            Step::Attention(a) => format!("layers.{}.attention", a.layer),
            Step::LatentQuery(a) | Step::LatentAttend(a) | Step::LatentValue(a) => {
                format!("layers.{}.{}", a.layer, self.kind())
            }
            Step::Router(r) => r.weight.to_string(),
            Step::ExpertsUp(m) | Step::ExpertsDown(m) => {
                format!("layers.{}.{}", m.gate_up.layer.unwrap_or(0), self.kind())
            }
            Step::AllReduce { .. } => "all_reduce".into(),
            Step::Norm { weight, .. } => weight.to_string(),
            Step::Select { .. } => "select".into(),
            Step::Accept { .. } => "accept".into(),
            Step::DraftToken { draft, .. } => format!("draft_token.{draft}"),
        }
    }
}

impl Plan {
    /// Bytes read by one execution with `position` rows already in the cache.
    pub fn bytes(&self, position: usize, storage: Storage) -> u64 {
        self.steps.iter().map(|s| s.bytes(self.rows(), position, storage)).sum()
    }

    /// Rows the pass is captured for.
    pub fn rows(&self) -> usize {
        match self.pass {
            Pass::Prefill { rows } | Pass::DraftPrefill { rows } => rows,
            Pass::Verify { width } | Pass::Draft { width, .. } => width,
        }
    }

    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0]
    }

    /// The work of this rank by itself, as a group of one: for measurements, since its sums lack the others' shares.
    /// With `sums` the steps that add up over ranks stay; without, what would be added goes into the residual stream at
    /// once.
    pub fn alone(mut self, sums: bool) -> Plan {
        self.ranks = Ranks::ONE;
        if sums {
            return self;
        }
        let mut steps: Vec<Step> = Vec::new();
        for step in self.steps {
            let Step::AllReduce { x, bias, tap, .. } = step else {
                steps.push(step);
                continue;
            };
            match steps.last_mut() {
                Some(Step::Linear(linear)) => (linear.epilogue, linear.bias) = (Epilogue::Residual { x, tap }, bias),
                Some(Step::ExpertsDown(mixture)) => mixture.epilogue = Epilogue::Residual { x, tap },
                _ => unreachable!("a sum is of what the step before it made"),
            }
        }
        Plan { steps, ..self }
    }

    /// What is added to the mean square before the root.
    pub fn eps(&self, norm: WeightId) -> f32 {
        match norm.role {
            Role::QANorm | Role::KvANorm | Role::DraftQANorm | Role::DraftKvANorm => LATENT_NORM_EPS,
            _ => self.norm_eps,
        }
    }
}

/// Heads, feed-forward columns and vocabulary of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    pub n_heads: usize,
    pub n_kv_heads: usize,
    /// 0 in a model whose layers all have experts.
    pub ffn_dim: usize,
    /// Of each expert, and of the shared one; 0 without.
    pub expert_dim: usize,
    pub shared_dim: usize,
    /// Tokens `first_id .. first_id + vocab`: whole tiles of 16, so that the last rank may have fewer.
    pub vocab: usize,
    pub first_id: usize,
}

impl Shard {
    /// KV heads are replicated when there are more ranks than KV heads.
    pub fn of(config: &Config, ranks: Ranks) -> Result<Shard> {
        let n = ranks.count;
        let even = |what: &str, size: usize| -> Result<usize> {
            if size % n != 0 {
                let works: Vec<String> = (1..=8).filter(|r| size % r == 0).map(|r| r.to_string()).collect();
                bail!("{what} of {size} cannot be split over {n} ranks: use {} ranks", works.join(", "));
            }
            Ok(size / n)
        };
        let (n_heads, n_kv_heads) = (config.n_heads, config.n_kv_heads);
        let (n_heads, n_kv_heads) = match ranks.whole_attention {
            true => (n_heads, n_kv_heads),
            false if n > n_kv_heads && n % n_kv_heads != 0 => {
                bail!("{n_kv_heads} KV heads cannot be shared evenly by {n} ranks")
            }
            false if n > n_kv_heads => (even("num_attention_heads", n_heads)?, 1),
            false => (even("num_attention_heads", n_heads)?, even("num_key_value_heads", n_kv_heads)?),
        };
        let Some(tokens) = vocab_rows(config.vocab, ranks.rank, n) else {
            bail!("vocab_size of {} cannot be split over {n} ranks: each takes a multiple of 16 tokens", config.vocab);
        };
        let dense = (0..config.n_layers).any(|layer| !config.has_experts(layer));
        let (expert_dim, shared_dim) = config.experts.as_ref().map_or((0, 0), |e| (e.expert_dim, e.shared_dim));
        Ok(Shard {
            n_heads,
            n_kv_heads,
            ffn_dim: if dense { even("intermediate_size", config.ffn_dim)? } else { 0 },
            expert_dim: even("moe_intermediate_size", expert_dim)?,
            shared_dim: even("moe_intermediate_size of shared experts", shared_dim)?,
            vocab: tokens.len(),
            first_id: tokens.start,
        })
    }
}

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

fn kv_layout(config: &Config, shard: Shard, n_layers: usize) -> KvLayout {
    match config.latent {
        None => {
            KvLayout { n_layers, n_kv_heads: shard.n_kv_heads, head_dim: config.head_dim, value_dim: config.head_dim }
        }
        Some(latent) => KvLayout { n_layers, n_kv_heads: 1, head_dim: latent.row_dim(), value_dim: 0 },
    }
}

/// Names of a decoder layer's buffers, in the order of `LayerBuffers`.
type BufferNames = [&'static str; 9];
const TARGET_BUFFERS: BufferNames =
    ["qkv", "latents", "q", "absorbed", "latent_attended", "attended", "act", "routes", "expert_act"];

#[rustfmt::skip]
const DRAFT_BUFFERS: BufferNames = [
    "draft_qkv", "draft_latents", "draft_q", "draft_absorbed", "draft_latent_attended", "draft_attended", "draft_act", "draft_routes",
    "draft_expert_act",
];
#[rustfmt::skip]
const STEP_BUFFERS: BufferNames = [
    "step_qkv", "step_latents", "step_q", "step_absorbed", "step_latent_attended", "step_attended", "step_act", "step_routes",
    "step_expert_act",
];

/// What a decoder layer works in; those of the other kinds of layers are absent.
struct LayerBuffers {
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
struct Place {
    owner: Owner,
    cache_layer: usize,
    tokens: Tokens,
    x: BufferId,
    tap: Option<Tap>,
    partial: Option<BufferId>,
}

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

struct Builder {
    rows: usize,
    buffers: Vec<Buffer>,
    steps: Vec<Step>,
}

impl Builder {
    fn new(rows: usize) -> Builder {
        Builder { rows, buffers: Vec::new(), steps: Vec::new() }
    }

    /// The buffer of this name, made on first use.
    fn buffer(&mut self, name: &'static str, dim: usize, kind: BufferKind) -> BufferId {
        if let Some(i) = self.buffers.iter().position(|b| b.name == name) {
            return BufferId(i);
        }
        self.buffers.push(Buffer { name, rows: self.rows, dim, kind });
        BufferId(self.buffers.len() - 1)
    }

    fn layer_buffers(&mut self, config: &Config, shard: Shard, names: BufferNames) -> LayerBuffers {
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
    fn decoder_layer(&mut self, config: &Config, shard: Shard, layer: usize, buffers: &LayerBuffers, place: Place) {
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
    fn drafter_layer(&mut self, d: &Drafter, ranks: Ranks, tokens: Tokens, feature: BufferId) -> BufferId {
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
    fn drafter_latent(&mut self, d: &Drafter, tokens: Tokens, [latents, out]: [BufferId; 2], dims: Latent, scale: f32) {
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
    fn residual(&mut self, mut linear: Linear, partial: Option<BufferId>) {
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

/// The listing of `-vv`: one line a step, with shapes and the bytes it reads at an empty cache on a GPU, in bf16.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let storage = Storage { weight: 2, kv: 2, plain_kv_b: true };
        writeln!(f, "{:?}, rank {} of {}", self.pass, self.ranks.rank, self.ranks.count)?;
        for b in &self.buffers {
            writeln!(f, "  buffer {} [{}, {}] {:?}", b.name, b.rows, b.dim, b.kind)?;
        }
        let name = |id: BufferId| self.buffer(id).name;
        for step in &self.steps {
            let what = match step {
                Step::Embed { out, .. } => format!("-> {}", name(*out)),
                Step::Linear(l) => {
                    let inputs: Vec<String> = l
                        .inputs
                        .iter()
                        .map(|i| match i.norm {
                            Some(w) => format!("norm({}, {w})", name(i.x)),
                            None => name(i.x).to_string(),
                        })
                        .collect();
                    let bias = if l.bias.is_some() { " + bias" } else { "" };
                    let end = match &l.epilogue {
                        Epilogue::Store { out } => format!("-> {}", name(*out)),
                        Epilogue::SiluMul { out } => format!("silu*up -> {}", name(*out)),
                        Epilogue::Residual { x, tap } => format!("+-> {}{}", name(*x), shown_tap(tap)),
                        Epilogue::Partial { out } => format!("-> {}", name(*out)),
                        Epilogue::Logits { out } => format!("-> {} f32", name(*out)),
                    };
                    let format = if l.format == Format::Plain { String::new() } else { format!(" {}", l.format) };
                    format!("[{}, {}]{format} x {}{bias} {end}", l.n, l.k(), inputs.join(" | "))
                }
                Step::Attention(a) => format!(
                    "{} heads, {} kv heads of {}{}: {} -> {}",
                    a.n_heads,
                    a.n_kv_heads,
                    a.head_dim,
                    if a.q_norm.is_some() { ", q/k norm" } else { "" },
                    name(a.qkv),
                    name(a.out)
                ),
                Step::LatentQuery(a) => {
                    let k = a.dims.nope_dim;
                    format!(
                        "{} heads [{k}, {}] x {}: {} -> {}",
                        a.n_heads,
                        a.dims.kv_rank,
                        name(a.latents),
                        name(a.q),
                        name(a.absorbed)
                    )
                }
                Step::LatentAttend(a) => format!(
                    "{} heads, one latent of {} + {}: {} -> {}",
                    a.n_heads,
                    a.dims.kv_rank,
                    a.dims.rope_dim,
                    name(a.absorbed),
                    name(a.attended)
                ),
                Step::LatentValue(a) => {
                    format!(
                        "{} heads [{}, {}] x {} -> {}",
                        a.n_heads,
                        a.dims.v_dim,
                        a.dims.kv_rank,
                        name(a.attended),
                        name(a.out)
                    )
                }
                Step::Router(r) => {
                    let norm = r.input.norm.map_or(String::new(), |norm| format!(", {norm}"));
                    format!(
                        "{} of {} experts x norm({}{norm}) -> {}",
                        r.routing.top_k,
                        r.routing.n_experts,
                        name(r.input.x),
                        name(r.routes)
                    )
                }
                Step::ExpertsUp(m) => {
                    let shared = if m.shared.is_some() {
                        format!(" and a shared [{}, {}]", 2 * m.shared_dim(), m.input.dim)
                    } else {
                        String::new()
                    };
                    let sizes = format!(
                        "{} of {} x [{}, {}] {}",
                        m.top_k,
                        m.n_experts,
                        2 * m.expert_dim,
                        m.input.dim,
                        m.format
                    );
                    format!("{sizes}{shared} x norm({}): silu*up -> {}", name(m.input.x), name(m.act))
                }
                Step::ExpertsDown(m) => {
                    let shared = if m.shared.is_some() {
                        format!(" and a shared [{}, {}]", m.n, m.shared_dim())
                    } else {
                        String::new()
                    };
                    let end = match &m.epilogue {
                        Epilogue::Residual { x, tap } => format!("+-> {}{}", name(*x), shown_tap(tap)),
                        Epilogue::Partial { out }
                        | Epilogue::Store { out }
                        | Epilogue::SiluMul { out }
                        | Epilogue::Logits { out } => {
                            format!("-> {}", name(*out))
                        }
                    };
                    format!(
                        "{} of {} x [{}, {}] {}{shared} x {} {end}",
                        m.top_k,
                        m.n_experts,
                        m.n,
                        m.expert_dim,
                        m.format,
                        name(m.act)
                    )
                }
                Step::AllReduce { partial, x, bias, tap, .. } => {
                    let bias = if bias.is_some() { " + bias" } else { "" };
                    format!("{}{bias} +-> {}{}", name(*partial), name(*x), shown_tap(tap))
                }
                Step::Norm { x, out, .. } | Step::Select { x, out, .. } => format!("{} -> {}", name(*x), name(*out)),
                Step::Accept { logits, vocab, .. } | Step::DraftToken { logits, vocab, .. } => {
                    format!("{} of {vocab}", name(*logits))
                }
            };
            writeln!(f, "  {:24} {what}  {} B", step.name(), step.bytes(self.rows(), 0, storage))?;
        }
        write!(f, "  {} steps, {} bytes at an empty cache", self.steps.len(), self.bytes(0, storage))
    }
}

fn shown_tap(tap: &Option<Tap>) -> String {
    tap.map_or(String::new(), |t| format!(", tapped at column {}", t.column))
}
