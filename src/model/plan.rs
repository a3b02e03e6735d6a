//! The plan: what one pass computes, as a list of steps, built from the config alone.
//!
//! The CUDA backend launches this list (and capture turns it into a graph), the CPU reference runs it in f32, bench walks it for the
//! bytes each step moves, doctor compares the two step by step. Nothing here touches weights or a GPU. Read `Step` first; the arms
//! that execute it are in cpu/reference.rs and gpu/kernels.rs.
//!
//! What surprises: norms are not steps. A linear layer multiplies its input by the norm weight on the way in and its sums by the row's
//! 1/rms on the way out, so that no step waits for another just to normalise.
use super::config::Config;
use super::weights::{vocab_rows, Role, WeightId};
use anyhow::{bail, Result};
use std::fmt;

/// Widest verify pass. Caches hold `context + 2 * MAX_WIDTH` rows, so that a pass may write past the end of the context.
pub const MAX_WIDTH: usize = 16;

/// Rows of the ring of tapped features, indexed by position: one prefill chunk.
pub const FEATURE_ROWS: usize = 1024;

/// Rows of the prefill graphs; the count in use is data on the device.
pub const PREFILL_ROWS: [usize; 4] = [16, 64, 256, 1024];

/// What a plan computes. The number is the width the pass is captured for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pass {
    /// Up to `rows` prompt tokens into the cache. No logits: the last prompt token goes through `Verify { width: 1 }`.
    Prefill { rows: usize },
    /// The root token and `width - 1` drafts: logits for every row, sampled, accepted while the sample equals the draft.
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
}

impl Ranks {
    pub const ONE: Ranks = Ranks { rank: 0, count: 1 };
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
    /// Tapped features: written by the target's passes, read by the drafter's; a ring of FEATURE_ROWS rows by position.
    Feature,
}

/// What one layer of a KV cache holds for a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    pub n_layers: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
}

impl KvLayout {
    /// Numbers stored for one position of one layer, keys and values together.
    pub fn row_dim(&self) -> usize {
        2 * self.n_kv_heads * self.head_dim
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

/// Grouped-query attention with everything around the cache: per-head q/k norm if there are weights, rope, the new rows' K and V written
/// at position length + row, softmax over positions <= length + row.
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
    /// x += sum of `partial` over ranks in rank order (+ bias), f32, rounded once; optionally tapped. All ranks then hold the same x.
    AllReduce {
        partial: BufferId,
        x: BufferId,
        dim: usize,
        bias: Option<WeightId>,
        tap: Option<Tap>,
    },
    /// Columns `column .. column + dim` of out = RMSNorm(the same columns of x) * weight. Only drafters need it on its own
    /// (`fc_norm`, `norm_before_residual`, `norm_output`).
    Norm {
        x: BufferId,
        column: usize,
        weight: WeightId,
        out: BufferId,
        dim: usize,
    },
    /// Every row sampled, drafts accepted while they equal the sample, end conditions tested, length and history advanced.
    /// Column i of `logits` is token `first_id + i`; all ranks together have `vocab` tokens and choose the same.
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
}

impl Step {
    /// Bytes that must be read from memory for one execution: weights once, and the KV rows of `position` earlier tokens once.
    pub fn bytes(&self, rows: usize, position: usize, storage: Storage) -> u64 {
        match self {
            Step::Embed { dim, tokens, .. } => {
                let rows = if let Tokens::Draft(_) = tokens { 1 } else { rows };
                (rows * dim * storage.weight) as u64
            }
            Step::Linear(l) => l.n as u64 * l.k() as u64 * storage.weight as u64,
            Step::Attention(a) => (position * 2 * a.n_kv_heads * a.head_dim * storage.kv) as u64,
            Step::AllReduce { .. } | Step::Norm { .. } | Step::Select { .. } | Step::Accept { .. } | Step::DraftToken { .. } => 0,
        }
    }

    /// The name without its layer: steps of one kind do the same work on other weights.
    pub fn kind(&self) -> String {
        match self {
            Step::Linear(l) => l.weight.role.to_string(),
            Step::Attention(_) => "attention".into(),
            other => other.name(),
        }
    }

    pub fn name(&self) -> String {
        match self {
            Step::Embed { .. } => "embed".into(),
            Step::Linear(l) => l.weight.to_string(),
            Step::Attention(a) => format!("layers.{}.attention", a.layer),
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
}

/// Heads, feed-forward columns and vocabulary of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub ffn_dim: usize,
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
        if n > config.n_kv_heads && n % config.n_kv_heads != 0 {
            bail!("{} KV heads cannot be shared evenly by {n} ranks", config.n_kv_heads);
        }
        let Some(tokens) = vocab_rows(config.vocab, ranks.rank, n) else {
            bail!("vocab_size of {} cannot be split over {n} ranks: each takes a multiple of 16 tokens", config.vocab);
        };
        Ok(Shard {
            n_heads: even("num_attention_heads", config.n_heads)?,
            n_kv_heads: if n > config.n_kv_heads { 1 } else { even("num_key_value_heads", config.n_kv_heads)? },
            ffn_dim: even("intermediate_size", config.ffn_dim)?,
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
    let qkv = p.buffer("qkv", (shard.n_heads + 2 * shard.n_kv_heads) * config.head_dim, BufferKind::Activation);
    let attended = p.buffer("attended", shard.n_heads * config.head_dim, BufferKind::Activation);
    let act = p.buffer("act", shard.ffn_dim, BufferKind::Activation);
    let partial = (ranks.count > 1).then(|| p.buffer("partial", config.hidden, BufferKind::Activation));
    let features = (!taps.is_empty()).then(|| p.buffer("features", taps.len() * config.hidden, BufferKind::Feature));
    let tap_at = |entry: usize| {
        let i = taps.iter().position(|&e| e == entry)?;
        Some(Tap { out: features?, column: i * config.hidden })
    };

    p.steps.push(Step::Embed { table: WeightId::new(Role::Embed, None), tokens: Tokens::Pass, out: x, dim: config.hidden });
    for layer in 0..config.n_layers {
        let id = |role| WeightId::new(role, Some(layer));
        p.steps.push(Step::Linear(Linear {
            weight: id(Role::Qkv),
            bias: config.qkv_bias.then(|| id(Role::QkvBias)),
            inputs: vec![Input { x, dim: config.hidden, norm: Some(id(Role::AttnNorm)) }],
            n: (shard.n_heads + 2 * shard.n_kv_heads) * config.head_dim,
            epilogue: Epilogue::Store { out: qkv },
        }));
        p.steps.push(Step::Attention(Attention {
            owner: Owner::Target,
            layer,
            tokens: Tokens::Pass,
            qkv,
            out: attended,
            q_norm: config.qk_norm.then(|| id(Role::QNorm)),
            k_norm: config.qk_norm.then(|| id(Role::KNorm)),
            n_heads: shard.n_heads,
            n_kv_heads: shard.n_kv_heads,
            head_dim: config.head_dim,
        }));
        p.residual(
            Linear {
                weight: id(Role::O),
                bias: config.o_bias.then(|| id(Role::OBias)),
                inputs: vec![Input { x: attended, dim: shard.n_heads * config.head_dim, norm: None }],
                n: config.hidden,
                epilogue: Epilogue::Residual { x, tap: None },
            },
            partial,
        );
        p.steps.push(Step::Linear(Linear {
            weight: id(Role::GateUp),
            bias: config.mlp_bias.then(|| id(Role::GateUpBias)),
            inputs: vec![Input { x, dim: config.hidden, norm: Some(id(Role::FfnNorm)) }],
            n: 2 * shard.ffn_dim,
            epilogue: Epilogue::SiluMul { out: act },
        }));
        p.residual(
            Linear {
                weight: id(Role::Down),
                bias: config.mlp_bias.then(|| id(Role::DownBias)),
                inputs: vec![Input { x: act, dim: shard.ffn_dim, norm: None }],
                n: config.hidden,
                epilogue: Epilogue::Residual { x, tap: tap_at(layer + 1) },
            },
            partial,
        );
    }
    if let Pass::Verify { .. } = pass {
        let logits = p.buffer("logits", shard.vocab, BufferKind::Logits);
        p.steps.push(Step::Linear(Linear {
            weight: WeightId::new(Role::Head, None),
            bias: None,
            inputs: vec![Input { x, dim: config.hidden, norm: Some(WeightId::new(Role::FinalNorm, None)) }],
            n: shard.vocab,
            epilogue: Epilogue::Logits { out: logits },
        }));
        p.steps.push(Step::Accept { logits, vocab: config.vocab, first_id: shard.first_id });
    }
    let kv = KvLayout { n_layers: config.n_layers, n_kv_heads: shard.n_kv_heads, head_dim: config.head_dim };
    Ok(Plan { pass, ranks, buffers: p.buffers, kv, steps: p.steps, norm_eps: config.norm_eps })
}

/// The shape of an EAGLE-3 drafter and the flags that change its arithmetic (eagle3 checkpoint formats; all numbers of its own config).
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
}

/// The drafter's plan for `DraftPrefill` and `Draft`.
///
/// Row i pairs the token after target row i with target row i's features. `Draft` first runs `width` such rows (draft-extend: rows behind
/// the last accepted one are padding), picks the last true row, and continues from it one row at a time with its own hidden state.
pub fn drafter(d: &Drafter, pass: Pass, ranks: Ranks) -> Result<Plan> {
    let (rows, drafts) = match pass {
        Pass::DraftPrefill { rows } => (rows, 0),
        Pass::Draft { width, drafts } if (1..=MAX_WIDTH).contains(&width) && (1..MAX_WIDTH).contains(&drafts) => (width, drafts),
        other => bail!("{other:?} is not a pass of a drafter"),
    };
    if ranks.count > 1 {
        bail!("a drafter is replicated: its plan has one rank, not {}", ranks.count);
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
    p.steps.push(Step::Linear(Linear { weight: id(Role::Fc), bias: None, inputs: vec![input], n: d.hidden, epilogue }));
    let x = p.drafter_layer(d, Tokens::Next, f);
    if drafts > 0 {
        p.rows = 1;
        let logits = p.buffer("draft_logits", d.vocab, BufferKind::Logits);
        let mut feedback = p.buffer("draft_selected", d.hidden, BufferKind::Stream);
        p.steps.push(Step::Select { x, out: feedback, dim: d.hidden });
        for draft in 1..=drafts {
            if draft > 1 {
                feedback = p.drafter_layer(d, Tokens::Draft(draft - 1), feedback);
            }
            let norm = id(Role::DraftNorm);
            let inputs = vec![Input { x: feedback, dim: d.hidden, norm: Some(norm) }];
            let epilogue = Epilogue::Logits { out: logits };
            p.steps.push(Step::Linear(Linear { weight: id(Role::DraftHead), bias: None, inputs, n: d.vocab, epilogue }));
            if d.norm_output && draft < drafts {
                let normed = p.buffer("draft_normed", d.hidden, BufferKind::Stream);
                p.steps.push(Step::Norm { x: feedback, column: 0, weight: norm, out: normed, dim: d.hidden });
                feedback = normed;
            }
            p.steps.push(Step::DraftToken { logits, vocab: d.vocab, draft });
        }
    }
    let kv = KvLayout { n_layers: 1, n_kv_heads: d.n_kv_heads, head_dim: d.head_dim };
    Ok(Plan { pass, ranks, buffers: p.buffers, kv, steps: p.steps, norm_eps: d.norm_eps })
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

    /// The drafter's one layer over the pairs (embedding of `tokens`, `feature`); the buffer that holds its output, before any norm.
    fn drafter_layer(&mut self, d: &Drafter, tokens: Tokens, feature: BufferId) -> BufferId {
        // The one-row steps have buffers of their own: rows of a buffer are fixed in a plan.
        let one = matches!(tokens, Tokens::Draft(_));
        let name = |many: &'static str, single: &'static str| if one { single } else { many };
        let id = |role| WeightId::new(role, None);
        let qkv_dim = (d.n_heads + 2 * d.n_kv_heads) * d.head_dim;
        let e = self.buffer(name("draft_embedding", "step_embedding"), d.hidden, BufferKind::Stream);
        let qkv = self.buffer(name("draft_qkv", "step_qkv"), qkv_dim, BufferKind::Activation);
        let attended = self.buffer(name("draft_attended", "step_attended"), d.n_heads * d.head_dim, BufferKind::Activation);
        let act = self.buffer(name("draft_act", "step_act"), d.ffn_dim, BufferKind::Activation);
        self.steps.push(Step::Embed { table: id(Role::DraftEmbed), tokens, out: e, dim: d.hidden });
        self.steps.push(Step::Linear(Linear {
            weight: id(Role::DraftQkv),
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
        self.steps.push(Step::Attention(Attention {
            owner: Owner::Drafter,
            layer: 0,
            tokens,
            qkv,
            out: attended,
            q_norm: d.qk_norm.then(|| id(Role::DraftQNorm)),
            k_norm: d.qk_norm.then(|| id(Role::DraftKNorm)),
            n_heads: d.n_heads,
            n_kv_heads: d.n_kv_heads,
            head_dim: d.head_dim,
        }));
        let linear = |weight, x: BufferId, dim, norm, n, epilogue| {
            let inputs = vec![Input { x, dim, norm }];
            Step::Linear(Linear { weight: id(weight), bias: None, inputs, n, epilogue })
        };
        let residual = || Epilogue::Residual { x, tap: None };
        self.steps.push(linear(Role::DraftO, attended, d.n_heads * d.head_dim, None, d.hidden, residual()));
        let ffn_norm = Some(id(Role::DraftFfnNorm));
        self.steps.push(linear(Role::DraftGateUp, x, d.hidden, ffn_norm, 2 * d.ffn_dim, Epilogue::SiluMul { out: act }));
        self.steps.push(linear(Role::DraftDown, act, d.ffn_dim, None, d.hidden, residual()));
        x
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

/// The listing of `-vv`: one line a step, with shapes and the bytes it reads at an empty cache in bf16.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let storage = Storage { weight: 2, kv: 2 };
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
                    format!("[{}, {}] x {}{bias} {end}", l.n, l.k(), inputs.join(" | "))
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
                Step::AllReduce { partial, x, bias, tap, .. } => {
                    let bias = if bias.is_some() { " + bias" } else { "" };
                    format!("{}{bias} +-> {}{}", name(*partial), name(*x), shown_tap(tap))
                }
                Step::Norm { x, out, .. } | Step::Select { x, out, .. } => format!("{} -> {}", name(*x), name(*out)),
                Step::Accept { logits, vocab, .. } | Step::DraftToken { logits, vocab, .. } => format!("{} of {vocab}", name(*logits)),
            };
            writeln!(f, "  {:24} {what}  {} B", step.name(), step.bytes(self.rows(), 0, storage))?;
        }
        write!(f, "  {} steps, {} bytes at an empty cache", self.steps.len(), self.bytes(0, storage))
    }
}

fn shown_tap(tap: &Option<Tap>) -> String {
    tap.map_or(String::new(), |t| format!(", tapped at column {}", t.column))
}
