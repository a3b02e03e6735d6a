//! weights.toml and the claim: which tensors of a checkpoint are which weights, how they are joined, how ranks divide
//! them. Everything is checked against the config before a byte is read. The format of the table is described at the
//! top of weights.toml.
use super::checkpoint::{self, Checkpoint, Dtype, Tensor};
use super::config::Config;
use super::quant::{Block, Format};
use anyhow::{bail, ensure, Context, Result};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// What a weight is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    Embed,
    FinalNorm,
    Head,
    AttnNorm,
    Qkv,
    QkvBias,
    QNorm,
    KNorm,
    O,
    OBias,
    FfnNorm,
    GateUp,
    GateUpBias,
    Down,
    DownBias,
    // Latent attention's: down to the latents of queries and keys, their norms, up to queries, and up to keys and
    // values.
    QkvA,
    QANorm,
    KvANorm,
    QB,
    KvB,
    // A feed-forward layer of experts.
    Router,
    RouterBias,
    ExpertGateUp,
    ExpertDown,
    SharedGateUp,
    SharedDown,
    // What a layer for multi-token prediction has beside a decoder layer.
    MtpEmbedNorm,
    MtpHiddenNorm,
    MtpProj,
    MtpNorm,
    // An EAGLE-3 drafter's.
    DraftEmbed,
    FcInputNorm,
    /// One per tapped feature; `layer` counts them.
    FcNorm,
    Fc,
    EmbedNorm,
    FeatureNorm,
    DraftQkv,
    DraftQkvBias,
    DraftQkvA,
    DraftQANorm,
    DraftKvANorm,
    DraftQB,
    DraftKvB,
    DraftQNorm,
    DraftKNorm,
    DraftO,
    DraftFfnNorm,
    DraftGateUp,
    DraftDown,
    DraftNorm,
    DraftHead,
}

/// A weight of a model; weights of the whole model have no layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WeightId {
    pub layer: Option<usize>,
    pub role: Role,
}

impl WeightId {
    pub fn new(role: Role, layer: Option<usize>) -> WeightId {
        WeightId { layer, role }
    }
}

/// The tensors of one weight, checked: parts[i] is [rows[i], cols], or [rows[i]] for vectors, stored as `format` says,
/// all of one dtype.
#[derive(Clone)]
pub struct Weight {
    /// With experts, the parts of expert 0, then those of expert 1, ...
    pub parts: Vec<Tensor>,
    /// The scales of each part; none where the format is plain.
    pub scales: Vec<Tensor>,
    pub format: Format,
    pub rows: Vec<usize>,
    /// 1 for vectors.
    pub cols: usize,
    /// 1 for weights that are no experts'.
    pub n_experts: usize,
    /// Of each part, rows at the end of each unit that the checkpoint has in rotated pairs (2i, 2i + 1). Here they come
    /// evens first, so that i is rotated with i + half: see `rope_order`.
    pub rope: Vec<usize>,
    pub fuse: Fuse,
    pub split: Split,
    /// Rows or columns that stay together when ranks divide the weight: head_dim for heads, else 1.
    pub unit: usize,
}

/// How the parts are joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fuse {
    /// One part after the other.
    #[default]
    Rows,
    /// Row 0 of every part, row 1 of every part, ...
    Interleave,
}

/// How ranks divide a weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Rows in units of heads; parts with fewer heads than ranks (keys, values) are replicated, so that a rank has the
    /// head its queries use.
    Heads,
    Rows,
    Columns,
    /// Rows that are tokens: `vocab_rows`.
    Vocab,
    #[default]
    Replicated,
}

/// What a rank reads of one part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

/// The tokens of one rank: an equal number for all but the last, and a multiple of 16, the rows of a tile of weights.
/// None: a rank would have none.
pub fn vocab_rows(vocab: usize, rank: usize, ranks: usize) -> Option<Range<usize>> {
    let share = if ranks > 1 { vocab.div_ceil(ranks).next_multiple_of(16) } else { vocab };
    (rank < ranks && (ranks - 1) * share < vocab).then(|| rank * share..vocab.min((rank + 1) * share))
}

/// All weights of a model. A tied head is there under its own id, with the tensor of the embedding.
#[derive(Clone, Default)]
pub struct Weights {
    map: BTreeMap<WeightId, Weight>,
    /// Worth a line to the user, not an error.
    pub notes: Vec<String>,
}

/// weights.toml, read.
pub struct Table {
    sections: BTreeMap<String, Section>,
}

/// What the terms and the conditions of the table stand for in one model.
pub struct Facts {
    /// The section of the table.
    pub arch: String,
    /// For errors: `llama model of 30 layers`.
    pub kind: String,
    /// Layers to which the rules of `layer` apply.
    pub layers: Range<usize>,
    /// Those of them that have experts.
    pub expert_layers: Vec<usize>,
    pub n_experts: usize,
    /// How matrices of a role are stored.
    pub format: Box<dyn Fn(Role) -> Format>,
    /// What a quantised matrix's scales are called in place of `weight`.
    pub scale_name: &'static str,
    pub sizes: Vec<(&'static str, usize)>,
    pub flags: Vec<(&'static str, bool)>,
}

impl Facts {
    pub fn of(config: &Config) -> Facts {
        let kind = format!("{} model of {} layers", config.arch, config.n_layers);
        Facts::of_layers(config, kind, 0..config.n_layers)
    }

    fn of_layers(config: &Config, kind: String, layers: Range<usize>) -> Facts {
        let mut sizes = vec![
            ("hidden", config.hidden),
            ("n_heads", config.n_heads),
            ("n_kv_heads", config.n_kv_heads),
            ("head_dim", config.head_dim),
            ("ffn_dim", config.ffn_dim),
            ("vocab", config.vocab),
        ];
        if let Some(latent) = &config.latent {
            sizes.extend([
                ("q_lora_rank", latent.q_rank),
                ("kv_lora_rank", latent.kv_rank),
                ("qk_nope_head_dim", latent.nope_dim),
                ("qk_rope_head_dim", latent.rope_dim),
                ("interleaved_dim", if latent.interleaved { latent.rope_dim } else { 0 }),
                ("v_head_dim", latent.v_dim),
            ]);
        }
        if let Some(experts) = &config.experts {
            sizes.extend([
                ("n_experts", experts.routing.n_experts),
                ("expert_dim", experts.expert_dim),
                ("shared_dim", experts.shared_dim),
            ]);
        }
        let quant = config.quant.clone();
        Facts {
            arch: config.arch.clone(),
            kind,
            expert_layers: layers.clone().filter(|layer| config.has_experts(*layer)).collect(),
            layers,
            n_experts: config.experts.as_ref().map_or(0, |experts| experts.routing.n_experts),
            format: Box::new(move |role| quant.as_ref().map_or(Format::Plain, |quant| quant.format(role))),
            scale_name: config.quant.as_ref().map_or("", |quant| quant.scale_name),
            sizes,
            flags: vec![
                ("qkv_bias", config.qkv_bias),
                ("o_bias", config.o_bias),
                ("mlp_bias", config.mlp_bias),
                ("untied", !config.tied),
                ("shared_expert", config.experts.as_ref().is_some_and(|experts| experts.shared_dim > 0)),
            ],
        }
    }

    fn size(&self, term: &str) -> Result<usize> {
        let size = self.sizes.iter().find(|(name, _)| *name == term);
        size.map(|(_, size)| *size).with_context(|| format!("{term}: expected a size of a {}, found none", self.kind))
    }

    /// Whether a condition holds for a layer; no condition always does.
    fn holds(&self, when: Option<&str>, layer: Option<usize>) -> Result<bool> {
        let Some(when) = when else { return Ok(true) };
        let has_experts = layer.is_some_and(|layer| self.expert_layers.contains(&layer));
        let flag = self.flags.iter().find(|(name, _)| *name == when);
        match when {
            "dense" => Ok(!has_experts),
            "experts" => Ok(has_experts),
            "shared_expert" => Ok(has_experts && flag.is_some_and(|(_, flag)| *flag)),
            _ => flag
                .map(|(_, flag)| *flag)
                .with_context(|| format!("{when}: expected a condition of a {}, found none", self.kind)),
        }
    }
}

/// Matches every tensor of the checkpoint with a row of the table. A tensor that nothing claims, a claimed one that is
/// absent, a wrong shape or dtype: an error that lists up to five of them. Reads no tensor, but for a tied model that
/// brings a head of its own: then both are compared.
pub fn claim(table: &Table, config: &Config, checkpoint: &Checkpoint) -> Result<Weights> {
    claim_as(table, &Facts::of(config), config.tied, config.n_layers..config.n_layers + config.n_mtp_layers, checkpoint)
}

/// The same for a drafter, whose sizes and conditions are its own; nothing is tied.
pub fn claim_drafter(table: &Table, facts: &Facts, checkpoint: &Checkpoint) -> Result<Weights> {
    claim_as(table, facts, false, 0..0, checkpoint)
}

/// The layers behind the last one of `config`, which are made for drafting; the rest of the checkpoint is not looked
/// at.
pub fn claim_mtp(table: &Table, config: &Config, checkpoint: &Checkpoint) -> Result<Weights> {
    let section = table.section(&config.arch)?;
    ensure!(!section.mtp.is_empty(), "{}: expected a family with layers for multi-token prediction", config.arch);
    let layers = config.n_layers..config.n_layers + config.n_mtp_layers;
    let facts =
        Facts::of_layers(config, format!("layer {} for multi-token prediction", config.n_layers), layers.clone());
    let mut tensors = section.named(checkpoint)?;
    tensors.retain(|name, _| layers.clone().any(|layer| name.starts_with(&format!("model.layers.{layer}."))));
    let mut claim = Claim::new(&facts, checkpoint, tensors);
    let mut map = BTreeMap::new();
    for layer in layers {
        claim.rules(section.layer.iter().chain(&section.mtp), Some(layer), &mut map)?;
    }
    // Drafters are on every rank.
    map.values_mut().for_each(|weight| weight.split = Split::Replicated);
    claim.leftovers(&section.ignored(config.n_layers..config.n_layers));
    claim.finish()?;
    Ok(Weights { map, notes: Vec::new() })
}

fn claim_as(
    table: &Table,
    facts: &Facts,
    tied: bool,
    mtp_layers: Range<usize>,
    checkpoint: &Checkpoint,
) -> Result<Weights> {
    let section = table.section(&facts.arch)?;
    let mut claim = Claim::new(facts, checkpoint, section.named(checkpoint)?);
    let mut map = BTreeMap::new();
    claim.rules(section.model.iter(), None, &mut map)?;
    for layer in facts.layers.clone() {
        claim.rules(section.layer.iter(), Some(layer), &mut map)?;
    }
    let spare = if tied { claim.tie_head(section, &mut map) } else { None };
    claim.leftovers(&section.ignored(mtp_layers));
    claim.finish()?;

    let mut notes = Vec::new();
    if let Some((head, embed)) = spare {
        if !head.equals(&embed)? {
            notes.push(format!(
                "{} in {} differs from {} and is not used: config.json says tie_word_embeddings = true",
                head.name, head.file, embed.name
            ));
        }
    }
    Ok(Weights { map, notes })
}

impl Weights {
    /// Panics when the model has no such weight: the plan asks for what the config promises, and `claim` has checked
    /// that.
    pub fn get(&self, id: WeightId) -> &Weight {
        self.find(id).unwrap_or_else(|| panic!("the plan asks for {id}, which the table of weights does not have"))
    }

    pub fn find(&self, id: WeightId) -> Option<&Weight> {
        self.map.get(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = (WeightId, &Weight)> {
        self.map.iter().map(|(id, weight)| (*id, weight))
    }

    /// Adds a weight that the checkpoint does not have: a drafter's share of its target.
    pub fn insert(&mut self, id: WeightId, weight: Weight) {
        self.map.insert(id, weight);
    }

    /// Joins the weights of a drafter to those of its target.
    pub fn add(&mut self, other: Weights) {
        self.map.extend(other.map);
        self.notes.extend(other.notes);
    }

    /// Makes the bytes of all parts ready; see `checkpoint::load`.
    pub fn load(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
        checkpoint::load(self.map.values().flat_map(|weight| weight.parts.iter().chain(&weight.scales)), progress)
    }

    /// For -v: the quantised matrices, how many scale tensors they have, and how they are stored. None where all are
    /// plain.
    pub fn quantised(&self) -> Option<String> {
        let quantised = || self.map.values().filter(|weight| weight.format != Format::Plain);
        let (matrices, scales) =
            quantised().fold((0, 0), |(m, s), weight| (m + weight.parts.len(), s + weight.scales.len()));
        let format = quantised().next()?.format;
        Some(format!("{matrices} quantised matrices with {scales} tensors of scales, {format}"))
    }
}

impl Weight {
    pub fn dtype(&self) -> Dtype {
        self.parts[0].dtype
    }

    /// Rows of all parts.
    pub fn n_rows(&self) -> usize {
        self.rows.iter().sum()
    }

    /// The slice of each part that `rank` of `ranks` holds. An uneven split is an error that lists the numbers of
    /// ranks, up to 8, that work.
    pub fn part_of_rank(&self, rank: usize, ranks: usize) -> Result<Vec<Slice>> {
        ensure!(rank < ranks, "{}: expected a rank below {ranks}, found {rank}", self.parts[0].name);
        self.slices(rank, ranks).with_context(|| {
            let works = |n: &usize| (0..*n).all(|rank| self.slices(rank, *n).is_some());
            let work: Vec<String> = (1..=8).filter(works).map(|n| n.to_string()).collect();
            let whole = if self.format == Format::Plain {
                String::new()
            } else {
                format!(" and cuts no block ({})", self.format)
            };
            format!(
                "{}: expected a number of ranks that divides {}{whole}, {}, found {ranks}",
                self.parts[0].name,
                self.parts[0],
                work.join(" or ")
            )
        })
    }

    /// The scales of a slice of a part, as rows and columns of its scale tensor. The slice must cut no block, as those
    /// of ranks do not.
    pub fn scale_slice(&self, slice: &Slice) -> Slice {
        let block = self.format.block().expect("a quantised weight");
        let range = |of: &Range<usize>, size: usize| of.start / size..of.end.div_ceil(size);
        Slice { rows: range(&slice.rows, block.rows), cols: block.cols.map_or(0..1, |cols| range(&slice.cols, cols)) }
    }

    /// Where row `row` of a part stands in the checkpoint: rotated pairs are taken apart there, evens first.
    pub fn rope_order(&self, part: usize, row: usize) -> usize {
        let rope = self.rope[part];
        // A part that is not divided by heads is one unit.
        let unit = if self.unit > 1 { self.unit } else { self.rows[part] };
        let (start, i) = (row - row % unit, (row % unit).wrapping_sub(unit - rope));
        if i >= rope {
            return row;
        }
        start + unit - rope + if i < rope / 2 { 2 * i } else { 2 * (i - rope / 2) + 1 }
    }

    fn slices(&self, rank: usize, ranks: usize) -> Option<Vec<Slice>> {
        let even = |len: usize| {
            let share = self.unit * exact(exact(len, self.unit)?, ranks)?;
            Some(rank * share..(rank + 1) * share)
        };
        // The heads of a smaller part: rank r's queries use head r * heads / ranks.
        let replicated = |len: usize| {
            let heads = exact(len, self.unit)?;
            let head = rank / exact(ranks, heads)?;
            Some(head * self.unit..(head + 1) * self.unit)
        };
        let most = self.rows.iter().max()?;
        let whole = |range: &Range<usize>, block: usize, len: usize| {
            range.start % block == 0 && (range.end % block == 0 || range.end == len)
        };
        let slice = |rows: &usize| {
            let (all_rows, all_cols) = (0..*rows, 0..self.cols);
            let slice = match self.split {
                Split::Replicated => Slice { rows: all_rows, cols: all_cols },
                Split::Rows => Slice { rows: even(*rows)?, cols: all_cols },
                Split::Vocab => Slice { rows: vocab_rows(*rows, rank, ranks)?, cols: all_cols },
                Split::Columns => Slice { rows: all_rows, cols: even(self.cols)? },
                Split::Heads if rows < most => {
                    Slice { rows: even(*rows).or_else(|| replicated(*rows))?, cols: all_cols }
                }
                Split::Heads => Slice { rows: even(*rows)?, cols: all_cols },
            };
            let cuts_none = |block: Block| {
                whole(&slice.rows, block.rows, *rows)
                    && block.cols.is_none_or(|cols| whole(&slice.cols, cols, self.cols))
            };
            self.format.block().is_none_or(cuts_none).then_some(slice)
        };
        self.rows.iter().map(slice).collect()
    }
}

fn exact(n: usize, by: usize) -> Option<usize> {
    (by > 0 && n % by == 0).then(|| n / by)
}

impl fmt::Display for WeightId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self.layer {
            Some(layer) => write!(f, "layers.{layer}.{}", self.role),
            None => write!(f, "{}", self.role),
        }
    }
}

impl Role {
    /// Of the target's attention layers, the norm before them apart.
    pub fn is_attention(self) -> bool {
        use Role::*;
        matches!(self, Qkv | QkvBias | QNorm | KNorm | O | OBias | QkvA | QANorm | KvANorm | QB | KvB)
    }

    pub fn is_drafters(self) -> bool {
        self >= Role::DraftEmbed
    }

    /// Of what ranks can divide of an EAGLE-3 drafter.
    pub fn is_drafters_layer(self) -> bool {
        use Role::*;
        matches!(self, DraftQkv | DraftQkvBias | DraftO | DraftGateUp | DraftDown)
    }
}

/// As in weights.toml.
impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let (_, name) = ROLES.iter().find(|(role, _)| role == self).expect("ROLES lists every role");
        f.write_str(name)
    }
}

const ROLES: [(Role, &str); 51] = [
    (Role::Embed, "embed"),
    (Role::FinalNorm, "final_norm"),
    (Role::Head, "head"),
    (Role::AttnNorm, "attn_norm"),
    (Role::Qkv, "qkv"),
    (Role::QkvBias, "qkv_bias"),
    (Role::QNorm, "q_norm"),
    (Role::KNorm, "k_norm"),
    (Role::O, "o"),
    (Role::OBias, "o_bias"),
    (Role::FfnNorm, "ffn_norm"),
    (Role::GateUp, "gate_up"),
    (Role::GateUpBias, "gate_up_bias"),
    (Role::Down, "down"),
    (Role::DownBias, "down_bias"),
    (Role::QkvA, "qkv_a"),
    (Role::QANorm, "q_a_norm"),
    (Role::KvANorm, "kv_a_norm"),
    (Role::QB, "q_b"),
    (Role::KvB, "kv_b"),
    (Role::Router, "router"),
    (Role::RouterBias, "router_bias"),
    (Role::ExpertGateUp, "expert_gate_up"),
    (Role::ExpertDown, "expert_down"),
    (Role::SharedGateUp, "shared_gate_up"),
    (Role::SharedDown, "shared_down"),
    (Role::MtpEmbedNorm, "mtp_embed_norm"),
    (Role::MtpHiddenNorm, "mtp_hidden_norm"),
    (Role::MtpProj, "mtp_proj"),
    (Role::MtpNorm, "mtp_norm"),
    (Role::DraftEmbed, "draft_embed"),
    (Role::FcInputNorm, "fc_input_norm"),
    (Role::FcNorm, "fc_norm"),
    (Role::Fc, "fc"),
    (Role::EmbedNorm, "embed_norm"),
    (Role::FeatureNorm, "feature_norm"),
    (Role::DraftQkv, "draft_qkv"),
    (Role::DraftQkvBias, "draft_qkv_bias"),
    (Role::DraftQkvA, "draft_qkv_a"),
    (Role::DraftQANorm, "draft_q_a_norm"),
    (Role::DraftKvANorm, "draft_kv_a_norm"),
    (Role::DraftQB, "draft_q_b"),
    (Role::DraftKvB, "draft_kv_b"),
    (Role::DraftQNorm, "draft_q_norm"),
    (Role::DraftKNorm, "draft_k_norm"),
    (Role::DraftO, "draft_o"),
    (Role::DraftFfnNorm, "draft_ffn_norm"),
    (Role::DraftGateUp, "draft_gate_up"),
    (Role::DraftDown, "draft_down"),
    (Role::DraftNorm, "draft_norm"),
    (Role::DraftHead, "draft_head"),
];

/// What `rows`, `cols`, `unit` and `rope` may name: sizes of a model, and of a drafter besides.
#[rustfmt::skip]
const TERMS: [&str; 19] = [
    "hidden", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
    "interleaved_dim", "v_head_dim", "n_experts", "expert_dim", "shared_dim", "features", "target_hidden", "draft_vocab", "attended",
];

/// What `when` may name; "dense", "experts" and "shared_expert" are about a layer.
#[rustfmt::skip]
const CONDITIONS: [&str; 14] = [
    "qkv_bias", "o_bias", "mlp_bias", "untied", "dense", "experts", "shared_expert", "qk_norm", "norm_before_fc", "fc_norm", "own_embed", "own_head",
    "grouped", "latent",
];

#[derive(Default)]
struct Section {
    model: BTreeMap<Role, Rule>,
    layer: BTreeMap<Role, Rule>,
    /// Beside those of `layer`, for the layers of multi-token prediction.
    mtp: BTreeMap<Role, Rule>,
    ignore: Vec<String>,
    /// Prefixes of tensor names and what they are read as, in the order in which they are tried, each once.
    rename: Vec<(String, String)>,
}

#[derive(Clone)]
struct Rule {
    from: Vec<String>,
    rows: Vec<Size>,
    cols: Option<Size>,
    fuse: Fuse,
    split: Split,
    unit: Size,
    rope: Vec<Size>,
    when: Option<String>,
}

/// A sum of products.
#[derive(Clone)]
struct Size {
    text: String,
    sum: Vec<Vec<Factor>>,
}

#[derive(Clone, Copy)]
enum Factor {
    Number(usize),
    Term(&'static str),
}

impl Table {
    /// The table in the binary.
    pub fn builtin() -> Result<Table> {
        Table::parse(include_str!("../../weights.toml")).context("weights.toml in the binary")
    }

    /// The table of `--weights FILE`.
    pub fn open(path: &Path) -> Result<Table> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("{}: expected a table of weights", path.display()))?;
        Table::parse(&text).with_context(|| path.display().to_string())
    }

    pub fn parse(text: &str) -> Result<Table> {
        // toml's own errors show the line over several lines; ours are one line.
        let files: BTreeMap<String, SectionFile> =
            toml::from_str(text).map_err(|error| anyhow::anyhow!("{}", error.to_string().trim().replace('\n', " ")))?;
        let mut sections = BTreeMap::new();
        for (arch, file) in &files {
            let base = match &file.like {
                None => None,
                Some(like) => match files.get(like) {
                    Some(base) if base.like.is_none() => Some(base),
                    _ => bail!("{arch}: like: expected a section that stands for itself, found {like:?}"),
                },
            };
            let mut section = Section::default();
            for source in base.into_iter().chain([file]) {
                section.ignore.extend_from_slice(&source.ignore);
                section.rename.extend_from_slice(&source.rename);
                let tables = [
                    (&mut section.model, &source.model, false),
                    (&mut section.layer, &source.layer, true),
                    (&mut section.mtp, &source.mtp, true),
                ];
                for (rules, files, per_layer) in tables {
                    for (name, file) in files {
                        let (role, rule) =
                            parse_rule(name, file, per_layer).with_context(|| format!("{arch}.{name}"))?;
                        rules.insert(role, rule);
                    }
                }
            }
            sections.insert(arch.clone(), section);
        }
        Ok(Table { sections })
    }

    /// The checkpoint's tensors by the names that the section of `arch` gives them.
    pub fn named(&self, arch: &str, checkpoint: &Checkpoint) -> Result<BTreeMap<String, Tensor>> {
        self.section(arch)?.named(checkpoint)
    }

    fn section(&self, arch: &str) -> Result<&Section> {
        self.sections.get(arch).with_context(|| {
            let known: Vec<&str> = self.sections.keys().map(String::as_str).collect();
            format!("{arch}: expected one of the table of weights, {}, found none", known.join(", "))
        })
    }
}

impl Section {
    fn named(&self, checkpoint: &Checkpoint) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
        for tensor in checkpoint.tensors() {
            let mut name = tensor.name.clone();
            for (prefix, meaning) in &self.rename {
                if let Some(rest) = name.strip_prefix(prefix.as_str()) {
                    name = format!("{meaning}{rest}");
                }
            }
            if let Some(earlier) = tensors.insert(name, tensor.clone()) {
                let dir = checkpoint.dir().display();
                bail!("{dir}: {}: expected one spelling of a tensor, found {} as well", earlier.name, tensor.name);
            }
        }
        Ok(tensors)
    }

    /// Patterns of tensors that are known and not needed; `{mtp}` is each of `mtp_layers`.
    fn ignored(&self, mtp_layers: Range<usize>) -> Vec<String> {
        let mtp = |pattern: &String| -> Vec<String> {
            match pattern.contains("{mtp}") {
                true => mtp_layers.clone().map(|layer| pattern.replace("{mtp}", &layer.to_string())).collect(),
                false => vec![pattern.clone()],
            }
        };
        self.ignore.iter().flat_map(mtp).collect()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SectionFile {
    like: Option<String>,
    #[serde(default)]
    ignore: Vec<String>,
    #[serde(default)]
    rename: Vec<(String, String)>,
    #[serde(default)]
    model: BTreeMap<String, RuleFile>,
    #[serde(default)]
    layer: BTreeMap<String, RuleFile>,
    #[serde(default)]
    mtp: BTreeMap<String, RuleFile>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RuleFile {
    from: Vec<String>,
    rows: Vec<String>,
    cols: Option<String>,
    #[serde(default)]
    fuse: Fuse,
    #[serde(default)]
    split: Split,
    unit: Option<String>,
    rope: Option<Vec<String>>,
    when: Option<String>,
}

fn parse_rule(name: &str, file: &RuleFile, per_layer: bool) -> Result<(Role, Rule)> {
    let Some((role, _)) = ROLES.iter().find(|(_, known)| *known == name) else {
        let known: Vec<&str> = ROLES.iter().map(|(_, name)| *name).collect();
        bail!("expected a role of {}, found {name:?}", known.join(" "));
    };
    ensure!(!file.from.is_empty(), "from: expected at least one tensor, found none");
    ensure!(
        file.rows.len() == file.from.len(),
        "rows: expected {}, one for each of from, found {}",
        file.from.len(),
        file.rows.len()
    );
    // A second {} is the expert.
    let experts = per_layer && file.from.iter().all(|from| from.matches("{}").count() == 2);
    for from in &file.from {
        let expected = usize::from(per_layer) + usize::from(experts);
        ensure!(from.matches("{}").count() == expected, "from: expected {expected} {{}} for the layer, found {from:?}");
    }
    if let Some(rope) = file.rope.as_ref().filter(|rope| rope.len() != file.from.len()) {
        bail!("rope: expected {}, one for each of from, found {}", file.from.len(), rope.len());
    }
    ensure!(file.cols.is_some() || file.split != Split::Columns, "split: expected columns to split, found a vector");
    if let Some(when) = file.when.as_deref().filter(|when| !CONDITIONS.contains(when)) {
        bail!("when: expected one of {}, found {when:?}", CONDITIONS.join(" "));
    }
    let rule = Rule {
        from: file.from.clone(),
        rows: file.rows.iter().map(|text| Size::parse(text)).collect::<Result<_>>()?,
        cols: file.cols.as_deref().map(Size::parse).transpose()?,
        fuse: file.fuse,
        split: file.split,
        unit: Size::parse(file.unit.as_deref().unwrap_or("1"))?,
        rope: match &file.rope {
            None => vec![Size::parse("0")?; file.from.len()],
            Some(rope) => rope.iter().map(|text| Size::parse(text)).collect::<Result<_>>()?,
        },
        when: file.when.clone(),
    };
    Ok((*role, rule))
}

impl Size {
    fn parse(text: &str) -> Result<Size> {
        let factor = |word: &str| -> Result<Factor> {
            let word = word.trim();
            match (word.parse(), TERMS.iter().find(|name| **name == word)) {
                (Ok(number), _) => Ok(Factor::Number(number)),
                (_, Some(term)) => Ok(Factor::Term(term)),
                _ => bail!("expected sums and products of numbers and {}, found {text:?}", TERMS.join(" ")),
            }
        };
        let product = |product: &str| product.split('*').map(factor).collect::<Result<Vec<_>>>();
        Ok(Size { text: text.into(), sum: text.split('+').map(product).collect::<Result<_>>()? })
    }

    fn of(&self, facts: &Facts) -> Result<usize> {
        let mut sum = Some(0usize);
        for product in &self.sum {
            let mut value = Some(1usize);
            for factor in product {
                let factor = match factor {
                    Factor::Number(number) => *number,
                    Factor::Term(term) => facts.size(term)?,
                };
                value = value.and_then(|value| value.checked_mul(factor));
            }
            sum = sum.zip(value).and_then(|(sum, value)| sum.checked_add(value));
        }
        sum.with_context(|| format!("{}: expected a size within the address space, found more", self.text))
    }
}

/// The state of a claim: what has been taken, and what is wrong.
struct Claim<'a> {
    facts: &'a Facts,
    dir: String,
    /// By the names that the section gives them.
    tensors: BTreeMap<String, Tensor>,
    claimed: BTreeSet<String>,
    /// The first `SHOWN`.
    problems: Vec<String>,
    n_problems: usize,
}

/// Problems that an error lists; the rest is a number.
const SHOWN: usize = 5;

/// The types that a tensor may have.
#[derive(Clone, Copy)]
enum Kind {
    Floats,
    One(Dtype),
}

impl Kind {
    fn has(self, dtype: Dtype) -> bool {
        match self {
            Kind::Floats => matches!(dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32),
            Kind::One(only) => only == dtype,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Kind::Floats => f.write_str("bf16, f16 or f32"),
            Kind::One(dtype) => write!(f, "{dtype}"),
        }
    }
}

impl<'a> Claim<'a> {
    fn new(facts: &'a Facts, checkpoint: &Checkpoint, tensors: BTreeMap<String, Tensor>) -> Claim<'a> {
        let dir = checkpoint.dir().display().to_string();
        Claim { facts, dir, tensors, claimed: BTreeSet::new(), problems: Vec::new(), n_problems: 0 }
    }

    /// Every weight of the rules whose condition holds.
    fn rules<'r>(
        &mut self,
        rules: impl Iterator<Item = (&'r Role, &'r Rule)>,
        layer: Option<usize>,
        map: &mut BTreeMap<WeightId, Weight>,
    ) -> Result<()> {
        for (role, rule) in rules {
            if self.facts.holds(rule.when.as_deref(), layer)? {
                if let Some(weight) = self.weight(*role, rule, layer)? {
                    map.insert(WeightId { role: *role, layer }, weight);
                }
            }
        }
        Ok(())
    }

    /// The weight, or nothing and problems noted.
    fn weight(&mut self, role: Role, rule: &Rule, layer: Option<usize>) -> Result<Option<Weight>> {
        let sizes = |sizes: &[Size]| sizes.iter().map(|size| size.of(self.facts)).collect::<Result<Vec<usize>>>();
        let cols = rule.cols.as_ref().map(|cols| cols.of(self.facts)).transpose()?;
        let (rows, rope, unit) = (sizes(&rule.rows)?, sizes(&rule.rope)?, rule.unit.of(self.facts)?);
        let format = if cols.is_some() { (self.facts.format)(role) } else { Format::Plain };
        let per_expert = rule.from[0].matches("{}").count() == 2;
        let n_experts = if per_expert { self.facts.n_experts } else { 1 };
        let mut weight = Weight {
            parts: Vec::new(),
            scales: Vec::new(),
            format,
            rows: rows.repeat(n_experts),
            cols: cols.unwrap_or(1),
            n_experts,
            rope: rope.repeat(n_experts),
            fuse: rule.fuse,
            split: rule.split,
            unit,
        };
        for expert in 0..n_experts {
            for (from, rows) in rule.from.iter().zip(&rows) {
                let name = tensor_name(from, layer, expert);
                match format {
                    Format::Plain => {
                        let shape: Vec<usize> = [*rows].into_iter().chain(cols).collect();
                        let like = weight.parts.first().cloned();
                        weight.parts.extend(self.tensor(name, &shape, Kind::Floats, like, rule));
                    }
                    Format::Fp8(block) => {
                        let scale = self.scale_name(&name);
                        weight.parts.extend(self.tensor(
                            name,
                            &[*rows, weight.cols],
                            Kind::One(Dtype::F8E4M3),
                            None,
                            rule,
                        ));
                        let like = weight.scales.first().cloned();
                        weight.scales.extend(self.tensor(
                            scale,
                            &block.scales(*rows, weight.cols),
                            Kind::Floats,
                            like,
                            rule,
                        ));
                    }
                    Format::Int4(block) => {
                        let module = name.strip_suffix("weight").unwrap_or(&name).to_string();
                        // The shape is known.
                        self.claimed.insert(format!("{module}weight_shape"));
                        let words = [*rows, weight.cols.div_ceil(8)];
                        weight.parts.extend(self.tensor(
                            format!("{module}weight_packed"),
                            &words,
                            Kind::One(Dtype::I32),
                            None,
                            rule,
                        ));
                        let like = weight.scales.first().cloned();
                        let scales = block.scales(*rows, weight.cols);
                        weight.scales.extend(self.tensor(self.scale_name(&name), &scales, Kind::Floats, like, rule));
                    }
                }
            }
        }
        let complete = weight.parts.len() == weight.rows.len()
            && (format == Format::Plain || weight.scales.len() == weight.rows.len());
        Ok(complete.then_some(weight))
    }

    fn scale_name(&self, name: &str) -> String {
        format!("{}{}", name.strip_suffix("weight").unwrap_or(name), self.facts.scale_name)
    }

    /// Claims a tensor, which must be there with this shape and type, that of `like` if it is given; a problem is noted
    /// otherwise.
    fn tensor(
        &mut self,
        name: String,
        shape: &[usize],
        kind: Kind,
        like: Option<Tensor>,
        rule: &Rule,
    ) -> Option<Tensor> {
        let found = self.tensors.get(&name).cloned();
        let taken = match found {
            None => {
                self.absent(&name, shape, kind, rule);
                None
            }
            Some(found) if found.shape != shape || !kind.has(found.dtype) => {
                self.problem(|| format!("{name}: expected {shape:?} {kind}, found {found} in {}", found.file));
                None
            }
            Some(found) => match like.filter(|first| first.dtype != found.dtype) {
                Some(first) => {
                    self.problem(|| {
                        format!("{name}: expected {} as {}, found {found} in {}", first.dtype, first.name, found.file)
                    });
                    None
                }
                None => Some(found),
            },
        };
        self.claimed.insert(name);
        taken
    }

    fn absent(&mut self, name: &str, shape: &[usize], kind: Kind, rule: &Rule) {
        let dir = self.dir.clone();
        let cure = if rule.when.as_deref() == Some("untied") {
            "; config.json says tie_word_embeddings = false, so the head must be there: set the key to true if the embedding is the head"
        } else {
            ""
        };
        self.problem(|| format!("{name}: expected {shape:?} {kind}, found no such tensor in {dir}{cure}"));
    }

    /// Gives a tied model its head: the embedding's tensor, divided as the head is. Returns a head of the checkpoint's
    /// own with the embedding.
    fn tie_head(&mut self, section: &Section, map: &mut BTreeMap<WeightId, Weight>) -> Option<(Tensor, Tensor)> {
        let rule = section.model.get(&Role::Head)?;
        let embed = map.get(&WeightId { role: Role::Embed, layer: None })?;
        let table = embed.parts[0].clone();
        let head = Weight { split: rule.split, fuse: rule.fuse, ..embed.clone() };
        map.insert(WeightId { role: Role::Head, layer: None }, head);
        let spare = self.tensors.get(&rule.from[0])?.clone();
        self.claimed.insert(rule.from[0].clone());
        Some((spare, table))
    }

    fn leftovers(&mut self, ignored: &[String]) {
        let spare =
            |name: &String| !self.claimed.contains(name) && !ignored.iter().any(|pattern| matches(pattern, name));
        let spare: Vec<Tensor> =
            self.tensors.iter().filter(|(name, _)| spare(name)).map(|(_, tensor)| tensor.clone()).collect();
        for tensor in spare {
            let kind = &self.facts.kind;
            let text =
                format!("{}: expected no such tensor in a {kind}, found {tensor} in {}", tensor.name, tensor.file);
            self.problem(|| text);
        }
    }

    fn problem(&mut self, text: impl FnOnce() -> String) {
        self.n_problems += 1;
        if self.problems.len() < SHOWN {
            self.problems.push(text());
        }
    }

    fn finish(self) -> Result<()> {
        match self.n_problems {
            0 => Ok(()),
            n if n > SHOWN => bail!("{}; and {} more", self.problems.join("; "), n - SHOWN),
            _ => bail!("{}", self.problems.join("; ")),
        }
    }
}

fn tensor_name(pattern: &str, layer: Option<usize>, expert: usize) -> String {
    match layer {
        Some(layer) => pattern.replacen("{}", &layer.to_string(), 1).replacen("{}", &expert.to_string(), 1),
        None => pattern.into(),
    }
}

/// `{}` stands for a number, `*` at the end for anything.
fn matches(pattern: &str, name: &str) -> bool {
    if let Some(start) = pattern.strip_suffix('*') {
        return name.starts_with(start);
    }
    match pattern.split_once("{}") {
        None => pattern == name,
        Some((before, after)) => name
            .strip_prefix(before)
            .and_then(|rest| rest.strip_suffix(after))
            .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())),
    }
}
