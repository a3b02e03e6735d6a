//! A drafter on disk: an EAGLE-3 head, or the target's own layer for multi-token prediction. Of an EAGLE-3 head: its
//! weights, the target layers that it reads, and the map from its vocabulary to the target's (its config.json is read
//! in draft_config.rs). Everything is checked against the target before it is used. What a drafter computes is
//! `plan::drafter`; how drafts are used is decode/.
use super::checkpoint::{Checkpoint, Dtype, Read, Tensor};
use super::claim::{claim_drafter, claim_mtp};
use super::config::{Config, Latent};
use super::draft_config::{Dialect, DraftConfig, LAYER_IDS};
use super::plan::{Drafter, Eagle3, Mtp};
use super::quant::Format;
use super::role::{Owner, Role, WeightId};
use super::rope::Rope;
use super::table::{Facts, Table};
use super::weights::{Split, Weight, Weights};
use anyhow::{anyhow, bail, ensure, Context, Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

#[derive(Clone)]
pub struct DraftModel {
    /// As the user named it, for messages.
    pub name: String,
    pub shape: Drafter,
    pub rope: Rope,
    /// Its own, and those it shares with the target (embedding, head) under the drafter's roles. `notes` has what the
    /// user should know.
    pub weights: Weights,
    /// Draft id to target id, ascending; None where both vocabularies are the same.
    pub map: Option<Vec<u32>>,
    /// Where the tapped layers come from: a key of config.json and its value, or a guess.
    pub taps_from: String,
}

impl DraftModel {
    /// Opens a drafter for a target. `tokens` is how many ids the target's tokenizer has, if it has one. Reads no
    /// weights but the maps between the vocabularies. Every mismatch is one line: drafter, target, key.
    pub fn open(
        dir: &Path,
        target: &Config,
        target_weights: &Weights,
        tokens: Option<usize>,
        read: Read,
    ) -> Result<DraftModel> {
        let name = dir.display().to_string();
        let open = || -> Result<DraftModel> {
            let config = DraftConfig::open(dir)?;
            let checkpoint = Checkpoint::open(dir, read)?;
            if let Some(tokens) = tokens {
                compare_tokenizer(dir, tokens)?;
            }
            build(name.clone(), config, &checkpoint, target, target_weights)
        };
        open().with_context(|| format!("drafter {name}"))
    }

    /// The target's layer for multi-token prediction; embedding and head are the target's.
    pub fn mtp(
        table: &Table,
        target: &Config,
        target_weights: &Weights,
        checkpoint: &Checkpoint,
    ) -> Result<DraftModel> {
        one_mtp_layer(target)?;
        let mut weights = claim_mtp(table, target, checkpoint).context("--draft mtp")?;
        for role in [Role::Embed, Role::Head] {
            let shared = replicated(target_weights, WeightId::of_target(role, None));
            weights.insert(WeightId::of_drafter(role, None), shared);
        }
        Ok(DraftModel::of_mtp(target, weights))
    }

    /// The same of a model whose weights are random: a machine makes them.
    pub fn random_mtp(target: &Config) -> Result<DraftModel> {
        one_mtp_layer(target)?;
        Ok(DraftModel::of_mtp(target, Weights::default()))
    }

    fn of_mtp(target: &Config, weights: Weights) -> DraftModel {
        let shape = Drafter::Mtp(Mtp { config: Box::new(target.clone()), vocab: target.vocab });
        let name = format!("layer {}", target.n_layers);
        DraftModel { name, shape, rope: target.rope.clone(), weights, map: None, taps_from: "the model's own".into() }
    }

    /// The shape in a config.json alone, for a machine that makes random weights: it shares the target's embedding and,
    /// where its vocabulary is smaller, knows ids spread evenly.
    pub fn random(dir: &Path, target: &Config) -> Result<DraftModel> {
        let name = dir.display().to_string();
        let made = || -> Result<DraftModel> {
            let config = DraftConfig::open(dir)?;
            let (shape, taps_from) = shape(&config, target)?;
            let spread = |i: usize| (i * config.vocab / config.draft_vocab) as u32;
            let map = (config.draft_vocab < config.vocab).then(|| (0..config.draft_vocab).map(spread).collect());
            Ok(DraftModel {
                name: name.clone(),
                shape: Drafter::Eagle3(shape),
                rope: config.rope,
                weights: Weights::default(),
                map,
                taps_from,
            })
        };
        made().with_context(|| format!("drafter {name}"))
    }

    /// Keeps these target ids, ascending, of a drafter that knows all: its head has fewer rows, a draft costs less, and
    /// the others are never drafted.
    pub fn truncate(mut self, ids: Vec<u32>) -> Result<DraftModel> {
        if let Some(map) = &self.map {
            bail!("--draft-vocab: expected a drafter with the whole vocabulary, found one of {} ids; leave the option out", map.len());
        }
        let id = WeightId::of_drafter(Role::Head, None);
        // Random weights are made in the size that the shape says.
        if let Some(head) = self.weights.find(id) {
            ensure!(
                head.format == Format::Plain,
                "--draft-vocab: expected a plain head, found {} as {}",
                head.parts[0].name,
                head.format
            );
            let (parts, rows) = (vec![head.parts[0].select(&ids)?], vec![ids.len()]);
            let head = Weight { parts, rows, ..head.clone() };
            self.weights.insert(id, head);
        }
        self.shape.set_vocab(ids.len());
        self.map = Some(ids);
        Ok(self)
    }
}

fn one_mtp_layer(target: &Config) -> Result<()> {
    let n = target.n_mtp_layers;
    ensure!(
        n > 0,
        "--draft mtp: config.json: num_nextn_predict_layers: expected a layer for multi-token prediction, found none"
    );
    ensure!(n == 1, "--draft mtp: config.json: num_nextn_predict_layers: expected 1, found {n}: not supported");
    Ok(())
}

/// For `-v` and warnings: what it is and which layers it reads.
impl fmt::Display for DraftModel {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let ids = self.map.as_ref().map_or(self.shape.vocab(), Vec::len);
        let Drafter::Eagle3(s) = &self.shape else {
            return write!(f, "multi-token prediction by {}, {ids} draft ids", self.name);
        };
        write!(
            f,
            "EAGLE-3 drafter {}: hidden {}, {} draft ids, rope {}; reads the hidden states that enter layers {:?} ({})",
            self.name, s.hidden, ids, self.rope, s.taps, self.taps_from
        )
    }
}

const ARCH: &str = "eagle3";

/// One line of the form that every mismatch has.
fn mismatch(key: &str, drafter: impl fmt::Display, target: impl fmt::Display) -> Error {
    anyhow!("drafter {drafter}, target {target}, key {key}")
}

/// The shape that the plan needs, compared with the target, and where the tapped layers come from.
fn shape(c: &DraftConfig, target: &Config) -> Result<(Eagle3, String)> {
    let target_hidden = c.target_hidden.unwrap_or(c.hidden);
    if target_hidden != target.hidden {
        let key = if c.target_hidden.is_some() { "target_hidden_size" } else { "hidden_size" };
        return Err(mismatch(key, target_hidden, target.hidden)).context("it was trained for another model");
    }
    if c.vocab != target.vocab {
        return Err(mismatch("vocab_size", c.vocab, target.vocab)).context("it was trained for another tokenizer");
    }
    let (taps, taps_from) = taps(c, target)?;
    let shape = Eagle3 {
        hidden: c.hidden,
        target_hidden,
        n_heads: c.n_heads,
        n_kv_heads: c.n_kv_heads,
        head_dim: c.head_dim,
        ffn_dim: c.ffn_dim,
        vocab: c.draft_vocab,
        norm_eps: c.norm_eps,
        qkv_bias: c.qkv_bias,
        qk_norm: c.qk_norm,
        norm_before_residual: c.norm_before_residual,
        norm_before_fc: c.norm_before_fc,
        fc_norm: c.fc_norm,
        norm_output: c.norm_output,
        latent: c.latent.map(|latent| (latent, c.rope.latent_scale(c.head_dim))),
        taps,
    };
    Ok((shape, taps_from))
}

fn build(
    name: String,
    c: DraftConfig,
    checkpoint: &Checkpoint,
    target: &Config,
    target_weights: &Weights,
) -> Result<DraftModel> {
    let table = Table::builtin()?;
    let tensors = table.named(ARCH, checkpoint)?;
    refuse_eagle1(&tensors)?;
    let (shape, taps_from) = shape(&c, target)?;
    if let Some(fc) = tensors.get("fc.weight") {
        let features = shape.taps.len() * target.hidden;
        if fc.shape.len() == 2 && fc.shape[1] != features {
            let wanted = format!("{features} ({} layers of {})", shape.taps.len(), target.hidden);
            return Err(mismatch("fc.weight", format!("{} columns", fc.shape[1]), wanted));
        }
    }
    let has = |name: &str| tensors.contains_key(name);
    let (own_embed, own_head) = (has("embed_tokens.weight"), has("lm_head.weight"));
    if !own_embed && c.hidden != target.hidden {
        return Err(mismatch(
            "embed_tokens.weight",
            format!("none, and hidden {}", c.hidden),
            format!("hidden {}", target.hidden),
        ));
    }
    if !own_head && (c.draft_vocab != c.vocab || c.hidden != target.hidden) {
        let drafter = format!("none for {} ids of {}", c.draft_vocab, c.hidden);
        return Err(mismatch("lm_head.weight", drafter, format!("{} ids of {}", target.vocab, target.hidden)));
    }
    let mut notes = Vec::new();
    let map = vocabulary_map(&c, &tensors, &mut notes)?;
    let mut weights = claim_drafter(&table, &facts(&shape, c.vocab, own_embed, own_head), checkpoint)?;
    let embed = WeightId::of_drafter(Role::Embed, None);
    if !own_embed {
        weights.insert(embed, replicated(target_weights, WeightId::of_target(Role::Embed, None)));
    }
    if !own_head {
        let head = match c.tied {
            true => replicated(&weights, embed),
            false => replicated(target_weights, WeightId::of_target(Role::Head, None)),
        };
        weights.insert(WeightId::of_drafter(Role::Head, None), head);
    }
    weights.notes.extend(notes);
    Ok(DraftModel { name, shape: Drafter::Eagle3(shape), rope: c.rope, weights, map, taps_from })
}

/// Another's weight, whole on every rank.
fn replicated(weights: &Weights, id: WeightId) -> Weight {
    Weight { split: Split::Replicated, ..weights.get(id).clone() }
}

fn facts(d: &Eagle3, vocab: usize, own_embed: bool, own_head: bool) -> Facts {
    let latent = d.latent.map(|(latent, _)| latent);
    let of_latent = |size: fn(&Latent) -> usize| latent.as_ref().map_or(0, size);
    Facts {
        arch: ARCH.into(),
        owner: Owner::Drafter,
        kind: "EAGLE-3 drafter with the flags of its config.json".into(),
        layers: 0..d.taps.len(),
        expert_layers: Vec::new(),
        n_experts: 0,
        format: Box::new(|_| Format::Plain),
        scale_name: "",
        sizes: vec![
            ("hidden", d.hidden),
            ("n_heads", d.n_heads),
            ("n_kv_heads", d.n_kv_heads),
            ("head_dim", d.head_dim),
            ("ffn_dim", d.ffn_dim),
            ("vocab", vocab),
            ("features", d.taps.len() * d.target_hidden),
            ("target_hidden", d.target_hidden),
            ("draft_vocab", d.vocab),
            ("attended", d.n_heads * latent.map_or(d.head_dim, |latent| latent.v_dim)),
            ("q_lora_rank", of_latent(|l| l.q_rank)),
            ("kv_lora_rank", of_latent(|l| l.kv_rank)),
            ("qk_nope_head_dim", of_latent(|l| l.nope_dim)),
            ("qk_rope_head_dim", of_latent(|l| l.rope_dim)),
            ("interleaved_dim", of_latent(|l| if l.interleaved { l.rope_dim } else { 0 })),
            ("v_head_dim", of_latent(|l| l.v_dim)),
        ],
        flags: vec![
            ("qkv_bias", d.qkv_bias),
            ("qk_norm", d.qk_norm),
            ("norm_before_fc", d.norm_before_fc),
            ("fc_norm", d.fc_norm),
            ("own_embed", own_embed),
            ("own_head", own_head),
            ("grouped", latent.is_none()),
            ("latent", latent.is_some()),
        ],
    }
}

/// EAGLE-1 and -2 heads have one feature beside the embedding and no norms of their own.
fn refuse_eagle1(tensors: &BTreeMap<String, Tensor>) -> Result<()> {
    let has = |name: &str| tensors.contains_key(name);
    if has("fc.weight") && !has("midlayer.hidden_norm.weight") && has("midlayer.post_attention_layernorm.weight") {
        bail!(
            "drafter EAGLE-1 (fc {:?}, no hidden_norm), target EAGLE-3, key midlayer.hidden_norm.weight: use an EAGLE-3 head",
            tensors["fc.weight"].shape
        );
    }
    Ok(())
}

/// Layer entries from the ids in the config. Trainers count differently: SpecForge and ModelOpt write layers whose
/// output is read, speculators the layers whose input it is. The usual first id, 1 or 2, tells them apart whatever tool
/// has rewritten the file.
fn taps(c: &DraftConfig, target: &Config) -> Result<(Vec<usize>, String)> {
    let n = target.n_layers;
    let Some((key, ids)) = &c.layer_ids else {
        let count = c.n_features.unwrap_or(3);
        let usual = [2, n / 2, n.saturating_sub(3)];
        let taps: Vec<usize> = match usual.is_sorted_by(|a, b| a < b) && count == 3 {
            true => usual.to_vec(),
            false => (1..=count).map(|i| i * (n + 1) / (count + 1)).collect(),
        };
        return Ok((taps, format!("a guess: config.json has no {LAYER_IDS}")));
    };
    let outputs = match ids[0] {
        1 => true,
        2 => false,
        _ => c.dialect == Dialect::Plain,
    };
    let taps: Vec<usize> = ids.iter().map(|id| id.saturating_add(outputs as usize)).collect();
    if let Some(tap) = taps.iter().find(|tap| !(1..=n).contains(*tap)) {
        return Err(mismatch(key, format!("{ids:?}, entry of layer {tap}"), format!("{n} layers")));
    }
    if !taps.is_sorted_by(|a, b| a < b) {
        bail!("config.json: {key}: expected ascending layers, found {ids:?}");
    }
    if let Some(count) = c.n_features.filter(|count| *count != ids.len()) {
        bail!("config.json: num_aux_hidden_states: expected {}, the length of {key}, found {count}", ids.len());
    }
    Ok((taps, format!("{key} {ids:?}, read as layer {}", if outputs { "outputs" } else { "inputs" })))
}

/// Draft id -> target id, from d2t: target = id + d2t[id].
fn vocabulary_map(
    c: &DraftConfig,
    tensors: &BTreeMap<String, Tensor>,
    notes: &mut Vec<String>,
) -> Result<Option<Vec<u32>>> {
    if c.draft_vocab == c.vocab {
        return Ok(None);
    }
    let (n, vocab) = (c.draft_vocab, c.vocab);
    let Some(d2t) = tensors.get("d2t") else {
        return Err(mismatch("d2t", format!("none for {n} draft ids"), format!("{vocab} ids")));
    };
    ensure!(d2t.shape == [n], "d2t: expected [{n}] for draft_vocab_size, found {d2t} in {}", d2t.file);
    let offsets = integers(d2t)?;
    let ids: Vec<i64> = offsets.iter().zip(0..).map(|(offset, i)| offset.saturating_add(i)).collect();
    if let Some(id) = ids.iter().find(|id| !(0..vocab as i64).contains(*id)) {
        let last = offsets.last().copied().unwrap_or(0) as usize;
        let absolute = offsets.is_sorted_by(|a, b| a < b) && (vocab - vocab / 16..vocab).contains(&last);
        let cure = if absolute { "; d2t looks like ids, expected offsets (target id - draft id)" } else { "" };
        return Err(mismatch("d2t", format!("id {id}"), format!("{vocab} ids{cure}")));
    }
    ensure!(
        ids.is_sorted_by(|a, b| a < b),
        "d2t: expected ascending target ids (draft id + d2t), found another order in {}",
        d2t.file
    );
    if offsets.iter().all(|offset| *offset == 0) {
        notes.push(format!("d2t is all zero: the drafter knows ids 0 to {} only", n - 1));
    }
    if let Some(t2d) = tensors.get("t2d") {
        let matches = matches!(t2d.dtype, Dtype::Bool | Dtype::U8) && t2d.shape == [vocab];
        ensure!(matches, "t2d: expected [{vocab}] bool, found {t2d} in {}", t2d.file);
        let mut known = vec![0u8; vocab];
        t2d.read_at(0, &mut known)?;
        let count = known.iter().filter(|known| **known != 0).count();
        if count != n {
            return Err(mismatch("t2d", format!("{count} ids"), format!("{n} of draft_vocab_size")));
        }
        if let Some(id) = ids.iter().find(|id| known[**id as usize] == 0) {
            bail!("t2d: expected the ids of d2t, found id {id} in d2t only, in {}", t2d.file);
        }
    }
    Ok(Some(ids.into_iter().map(|id| id as u32).collect()))
}

/// A small integer tensor.
fn integers(tensor: &Tensor) -> Result<Vec<i64>> {
    let mut bytes = vec![0; tensor.n_bytes()];
    tensor.read_at(0, &mut bytes)?;
    match tensor.dtype {
        Dtype::I64 => Ok(bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().expect("8 bytes"))).collect()),
        Dtype::I32 => {
            Ok(bytes.chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().expect("4 bytes")).into()).collect())
        }
        other => bail!("{}: expected i64 or i32, found {other} in {}", tensor.name, tensor.file),
    }
}

/// A drafter that brings a tokenizer must bring the target's: the same number of ids, those of added tokens included.
fn compare_tokenizer(dir: &Path, tokens: usize) -> Result<()> {
    let path = dir.join("tokenizer.json");
    if !path.exists() {
        return Ok(());
    }
    let text = std::fs::read_to_string(&path).with_context(|| format!("{}: cannot be read", path.display()))?;
    let json: Value = serde_json::from_str(&text).with_context(|| format!("{}: expected JSON", path.display()))?;
    let vocab = json["model"]["vocab"].as_object();
    let mut own = vocab.map_or(0, |vocab| vocab.len());
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let content = token["content"].as_str().unwrap_or_default();
        own += !vocab.is_some_and(|vocab| vocab.contains_key(content)) as usize;
    }
    if own != tokens {
        return Err(mismatch("tokenizer.json", format!("{own} tokens"), tokens))
            .context("it was trained for another tokenizer");
    }
    Ok(())
}
