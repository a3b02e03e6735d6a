//! What is one rank's of a model that several ranks divide.
use crate::model::config::Config;
use crate::model::role::{Owner, Part, WeightId};
use crate::model::weights::vocab_rows;
use anyhow::{bail, Result};

/// One rank of a tensor-parallel group. `Ranks::ONE` is a single GPU, or the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ranks {
    pub rank: usize,
    pub count: usize,
    /// Every rank has all of attention, weights and cache: a layer has one sum over ranks instead of two. For machines
    /// whose sums take long (divide.rs).
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
    pub fn of(self, id: WeightId) -> Ranks {
        let is_divided = match (id.owner, id.role.part()) {
            (Owner::Target, Part::Attention) if self.whole_attention => false,
            (Owner::Target, _) => id.role.is_divided(),
            (Owner::Drafter, Part::Attention | Part::Dense) => self.split_drafter && id.role.is_divided(),
            (Owner::Drafter, _) => false,
        };
        if is_divided {
            self
        } else {
            Ranks::ONE
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
