//! The vocabulary of plans: passes, buffers, steps, and what each step reads, writes and moves.
use super::ranks::Ranks;
use crate::model::config::{Latent, Routing};
use crate::model::quant::Format;
use crate::model::role::{Owner, Role, WeightId};
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

/// Index into `Plan::buffers`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub usize);

/// An activation buffer, [rows, dim]. f32 on the CPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    pub name: BufferName,
    pub rows: usize,
    pub dim: usize,
    pub kind: BufferKind,
}

/// What tells buffers apart: plans that name the same one share its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BufferName {
    pub stage: Stage,
    pub slot: Slot,
}

/// Whose rows they are. Rows of a buffer are fixed in a plan, so that a drafter has two sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    Target,
    /// A drafter's over many rows: draft-extend, or a prompt.
    Extend,
    /// The one-row steps of a draft pass.
    Single,
}

/// What a buffer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Slot {
    /// The residual stream.
    X,
    Qkv,
    Latents,
    Q,
    Absorbed,
    LatentAttended,
    Attended,
    Act,
    Routes,
    ExpertAct,
    /// A rank's share of a sum.
    Partial,
    Logits,
    /// The target's auxiliary hidden states.
    Features,
    NormedFeatures,
    /// What a drafter's layer joins with an embedding.
    Feature,
    Embedding,
    Selected,
    Normed,
}

impl BufferName {
    pub const LOGITS: BufferName = BufferName { stage: Stage::Target, slot: Slot::Logits };
    pub const FEATURES: BufferName = BufferName { stage: Stage::Target, slot: Slot::Features };
}

/// `qkv`, `draft_qkv`, `step_qkv`.
impl fmt::Display for BufferName {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self.stage {
            Stage::Target => "",
            Stage::Extend => "draft_",
            Stage::Single => "step_",
        })?;
        f.write_str(match self.slot {
            Slot::X => "x",
            Slot::Qkv => "qkv",
            Slot::Latents => "latents",
            Slot::Q => "q",
            Slot::Absorbed => "absorbed",
            Slot::LatentAttended => "latent_attended",
            Slot::Attended => "attended",
            Slot::Act => "act",
            Slot::Routes => "routes",
            Slot::ExpertAct => "expert_act",
            Slot::Partial => "partial",
            Slot::Logits => "logits",
            Slot::Features => "features",
            Slot::NormedFeatures => "normed_features",
            Slot::Feature => "feature",
            Slot::Embedding => "embedding",
            Slot::Selected => "selected",
            Slot::Normed => "normed",
        })
    }
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

impl Epilogue {
    /// The buffer that is written or added to.
    pub fn out(&self) -> BufferId {
        match *self {
            Epilogue::Store { out }
            | Epilogue::SiluMul { out }
            | Epilogue::Partial { out }
            | Epilogue::Logits { out } => out,
            Epilogue::Residual { x, .. } => x,
        }
    }
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
    /// The rows that the step multiplies by weights, in the order of the weight's columns: those that a norm may be
    /// applied to on the way in.
    pub fn inputs(&self) -> &[Input] {
        match self {
            Step::Linear(linear) => &linear.inputs,
            Step::Router(Router { input, .. }) | Step::ExpertsUp(Mixture { input, .. }) => std::slice::from_ref(input),
            Step::Embed { .. }
            | Step::Attention(_)
            | Step::LatentQuery(_)
            | Step::LatentAttend(_)
            | Step::LatentValue(_)
            | Step::ExpertsDown(_)
            | Step::AllReduce { .. }
            | Step::Norm { .. }
            | Step::Accept { .. }
            | Step::Select { .. }
            | Step::DraftToken { .. } => &[],
        }
    }

    /// The buffer that the step writes or adds to; None where it chooses tokens.
    pub fn output(&self) -> Option<BufferId> {
        match self {
            Step::Embed { out, .. } | Step::Norm { out, .. } | Step::Select { out, .. } => Some(*out),
            Step::Linear(Linear { epilogue, .. }) | Step::ExpertsDown(Mixture { epilogue, .. }) => Some(epilogue.out()),
            Step::Attention(a) => Some(a.out),
            Step::LatentQuery(a) => Some(a.absorbed),
            Step::LatentAttend(a) => Some(a.attended),
            Step::LatentValue(a) => Some(a.out),
            Step::Router(router) => Some(router.routes),
            Step::ExpertsUp(mixture) => Some(mixture.act),
            Step::AllReduce { x, .. } => Some(*x),
            Step::Accept { .. } | Step::DraftToken { .. } => None,
        }
    }

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
        let (owner, _, what) = self.label();
        format!("{}{what}", owner.prefix())
    }

    /// `layers.3.qkv`, of a drafter `draft.qkv`.
    pub fn name(&self) -> String {
        let (owner, layer, what) = self.label();
        let layer = layer.map_or(String::new(), |layer| format!("layers.{layer}."));
        format!("{}{layer}{what}", owner.prefix())
    }

    /// Whose step it is, in which layer, and what it does.
    fn label(&self) -> (Owner, Option<usize>, String) {
        let of = |weight: &WeightId| (weight.owner, weight.layer, weight.role.to_string());
        match self {
            Step::Embed { table, .. } => of(table),
            Step::Linear(l) => of(&l.weight),
            Step::Attention(a) => (a.owner, Some(a.layer), "attention".into()),
            Step::LatentQuery(a) => (a.owner, Some(a.layer), "latent_query".into()),
            Step::LatentAttend(a) => (a.owner, Some(a.layer), "latent_attend".into()),
            Step::LatentValue(a) => (a.owner, Some(a.layer), "latent_value".into()),
            Step::Router(r) => of(&r.weight),
            Step::ExpertsUp(m) => (m.gate_up.owner, m.gate_up.layer, "experts_up".into()),
            Step::ExpertsDown(m) => (m.gate_up.owner, m.gate_up.layer, "experts_down".into()),
            Step::AllReduce { .. } => (Owner::Target, None, "all_reduce".into()),
            Step::Norm { weight, .. } => of(weight),
            Step::Accept { .. } => (Owner::Target, None, "accept".into()),
            Step::Select { .. } => (Owner::Drafter, None, "select".into()),
            Step::DraftToken { draft, .. } => (Owner::Drafter, None, format!("token.{draft}")),
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
            Role::QANorm | Role::KvANorm => LATENT_NORM_EPS,
            _ => self.norm_eps,
        }
    }
}
