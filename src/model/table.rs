//! weights.toml, read: per architecture, which tensors of a checkpoint make which weight, as rules over the sizes and
//! conditions of a model (`Facts`). The format of the table is described at the top of weights.toml.
use super::checkpoint::{Checkpoint, Tensor};
use super::quant::Format;
use super::role::{Owner, Role};
use super::weights::{Fuse, Split};
use anyhow::{bail, ensure, Context, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// weights.toml, read.
pub struct Table {
    sections: BTreeMap<String, Section>,
}

/// What the terms and the conditions of the table stand for in one model.
pub struct Facts {
    /// The section of the table.
    pub arch: String,
    /// Whose weights they are.
    pub owner: Owner,
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
pub(super) struct Section {
    pub(super) model: BTreeMap<Role, Rule>,
    pub(super) layer: BTreeMap<Role, Rule>,
    /// Beside those of `layer`, for the layers of multi-token prediction.
    pub(super) mtp: BTreeMap<Role, Rule>,
    pub(super) ignore: Vec<String>,
    /// Prefixes of tensor names and what they are read as, in the order in which they are tried, each once.
    pub(super) rename: Vec<(String, String)>,
}

#[derive(Clone)]
pub(super) struct Rule {
    pub(super) from: Vec<String>,
    pub(super) rows: Vec<Size>,
    pub(super) cols: Option<Size>,
    pub(super) fuse: Fuse,
    pub(super) split: Split,
    pub(super) unit: Size,
    pub(super) rope: Vec<Size>,
    pub(super) when: Option<String>,
}

/// A sum of products.
#[derive(Clone)]
pub(super) struct Size {
    text: String,
    sum: Vec<Vec<Factor>>,
}

#[derive(Clone, Copy)]
enum Factor {
    Number(usize),
    Term(&'static str),
}

impl Facts {
    fn size(&self, term: &str) -> Result<usize> {
        let size = self.sizes.iter().find(|(name, _)| *name == term);
        size.map(|(_, size)| *size).with_context(|| format!("{term}: expected a size of a {}, found none", self.kind))
    }

    /// Whether a condition holds for a layer; no condition always does.
    pub(super) fn holds(&self, when: Option<&str>, layer: Option<usize>) -> Result<bool> {
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

    pub(super) fn section(&self, arch: &str) -> Result<&Section> {
        self.sections.get(arch).with_context(|| {
            let known: Vec<&str> = self.sections.keys().map(String::as_str).collect();
            format!("{arch}: expected one of the table of weights, {}, found none", known.join(", "))
        })
    }
}

impl Section {
    pub(super) fn named(&self, checkpoint: &Checkpoint) -> Result<BTreeMap<String, Tensor>> {
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
    pub(super) fn ignored(&self, mtp_layers: Range<usize>) -> Vec<String> {
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
    let role = Role::named(name)?;
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
    Ok((role, rule))
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

    pub(super) fn of(&self, facts: &Facts) -> Result<usize> {
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
