//! The claim: every tensor of a checkpoint belongs to a weight that the config promises, of the right shape and type, or
//! loading stops with a list of what does not fit. Nothing but a tied head is read.
use super::checkpoint::{Checkpoint, Dtype, Tensor};
use super::config::Config;
use super::quant::Format;
use super::role::{Owner, Role, WeightId};
use super::table::{Facts, Rule, Section, Size, Table};
use super::weights::{Split, Weight, Weights};
use anyhow::{bail, ensure, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

impl Facts {
    pub fn of(config: &Config) -> Facts {
        let kind = format!("{} model of {} layers", config.arch, config.n_layers);
        Facts::of_layers(config, Owner::Target, kind, 0..config.n_layers)
    }

    fn of_layers(config: &Config, owner: Owner, kind: String, layers: Range<usize>) -> Facts {
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
            owner,
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
    let facts = Facts::of_layers(
        config,
        Owner::Drafter,
        format!("layer {} for multi-token prediction", config.n_layers),
        layers.clone(),
    );
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
                    map.insert(WeightId { owner: self.facts.owner, layer, role: *role }, weight);
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
        let embed = map.get(&WeightId::of_target(Role::Embed, None))?;
        let table = embed.parts[0].clone();
        let head = Weight { split: rule.split, fuse: rule.fuse, ..embed.clone() };
        map.insert(WeightId::of_target(Role::Head, None), head);
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
