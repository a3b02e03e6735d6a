//! What the weights of a model are for. A role is one row of the table below, which says all that depends on it alone.
use anyhow::{Context, Result};
use std::fmt;

/// Whose weight, cache or step it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Owner {
    Target,
    Drafter,
}

/// A weight of a model or of its drafter; weights of the whole model, and an EAGLE-3 drafter's, have no layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WeightId {
    pub owner: Owner,
    pub layer: Option<usize>,
    pub role: Role,
}

/// Matrices that a quantised checkpoint keeps plain or quantises together, with the vectors that belong to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Plain in every checkpoint: embeddings, norms between layers, routers, what joins a drafter's inputs.
    Other,
    Attention,
    /// The feed-forward layer where there are no experts.
    Dense,
    Experts,
    Shared,
    Head,
}

/// What several ranks have of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Share {
    /// Each a part, as `split` in weights.toml says.
    Divided,
    /// Each all of it.
    Alike,
}

/// How a weight is made where all are random: so that activations keep their size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Random {
    Ones,
    Zeros,
    /// Sums of variance 1.
    Matrix,
    /// Rows of variance 1.
    Embedding,
    /// All layers together add variance 1 to the residual stream.
    Residual,
}

struct Row {
    role: Role,
    /// As in weights.toml.
    name: &'static str,
    part: Part,
    share: Share,
    random: Random,
    /// Random weights are numbered in this order, and their bits hang on it: in a layer, or of the whole model; and
    /// those of an EAGLE-3 drafter.
    order: [u8; 2],
}

macro_rules! roles {
    ($($(#[$doc:meta])* $role:ident $name:literal $part:ident $share:ident $random:ident $order:literal $drafters:literal;)*) => {
        /// What a weight is for; in a drafter it is the same as in its target.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Role {
            $($(#[$doc])* $role,)*
        }

        const ROWS: &[Row] = &[$(Row {
            role: Role::$role,
            name: $name,
            part: Part::$part,
            share: Share::$share,
            random: Random::$random,
            order: [$order, $drafters],
        },)*];
    };
}

#[rustfmt::skip]
roles! {
    Embed         "embed"           Other     Alike   Embedding  0  1;
    FinalNorm     "final_norm"      Other     Alike   Ones       1  20;
    Head          "head"            Head      Divided Matrix     2  21;
    AttnNorm      "attn_norm"       Other     Alike   Ones       3  0;
    Qkv           "qkv"             Attention Divided Matrix     4  7;
    QkvBias       "qkv_bias"        Attention Divided Zeros      5  8;
    QNorm         "q_norm"          Attention Alike   Ones       6  14;
    KNorm         "k_norm"          Attention Alike   Ones       7  15;
    O             "o"               Attention Divided Residual   8  16;
    OBias         "o_bias"          Attention Alike   Zeros      9  0;
    FfnNorm       "ffn_norm"        Other     Alike   Ones       10 17;
    GateUp        "gate_up"         Dense     Divided Matrix     11 18;
    GateUpBias    "gate_up_bias"    Dense     Divided Zeros      12 0;
    Down          "down"            Dense     Divided Residual   13 19;
    DownBias      "down_bias"       Dense     Alike   Zeros      14 0;
    /// Latent attention's: down to the latents of queries and keys.
    QkvA          "qkv_a"           Attention Alike   Matrix     15 9;
    QANorm        "q_a_norm"        Attention Alike   Ones       16 10;
    KvANorm       "kv_a_norm"       Attention Alike   Ones       17 11;
    /// Up to queries.
    QB            "q_b"             Attention Divided Matrix     18 12;
    /// Up to keys and values.
    KvB           "kv_b"            Attention Divided Matrix     19 13;
    Router        "router"          Other     Alike   Matrix     20 0;
    RouterBias    "router_bias"     Other     Alike   Zeros      21 0;
    ExpertGateUp  "expert_gate_up"  Experts   Divided Matrix     22 0;
    ExpertDown    "expert_down"     Experts   Divided Residual   23 0;
    SharedGateUp  "shared_gate_up"  Shared    Divided Matrix     24 0;
    SharedDown    "shared_down"     Shared    Divided Residual   25 0;
    /// What a layer for multi-token prediction has beside a decoder layer.
    MtpEmbedNorm  "mtp_embed_norm"  Other     Alike   Ones       26 0;
    MtpHiddenNorm "mtp_hidden_norm" Other     Alike   Ones       27 0;
    MtpProj       "mtp_proj"        Other     Alike   Matrix     28 0;
    MtpNorm       "mtp_norm"        Other     Alike   Ones       29 0;
    /// What an EAGLE-3 drafter has beside a decoder layer: over all auxiliary hidden states.
    FcInputNorm   "fc_input_norm"   Other     Alike   Ones       0  2;
    /// One per auxiliary hidden state; `layer` counts them.
    FcNorm        "fc_norm"         Other     Alike   Ones       0  3;
    Fc            "fc"              Other     Alike   Matrix     0  4;
    EmbedNorm     "embed_norm"      Other     Alike   Ones       0  5;
    FeatureNorm   "feature_norm"    Other     Alike   Ones       0  6;
}

impl Role {
    fn row(self) -> &'static Row {
        ROWS.iter().find(|row| row.role == self).expect("every role is a row")
    }

    /// By its name in weights.toml; an error lists those that there are.
    pub fn named(name: &str) -> Result<Role> {
        let row = ROWS.iter().find(|row| row.name == name).with_context(|| {
            let known: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
            format!("expected a role of {}, found {name:?}", known.join(" "))
        })?;
        Ok(row.role)
    }

    pub fn part(self) -> Part {
        self.row().part
    }

    /// Whether ranks divide it, if they divide what it is a part of.
    pub fn is_divided(self) -> bool {
        self.row().share == Share::Divided
    }

    pub fn random(self) -> Random {
        self.row().random
    }
}

impl WeightId {
    pub fn of_target(role: Role, layer: Option<usize>) -> WeightId {
        WeightId { owner: Owner::Target, layer, role }
    }

    pub fn of_drafter(role: Role, layer: Option<usize>) -> WeightId {
        WeightId { owner: Owner::Drafter, layer, role }
    }

    /// Random weights are numbered in the order of this key.
    pub fn random_order(&self) -> (Option<usize>, Owner, u8) {
        let [order, drafters] = self.role.row().order;
        match (self.owner, self.layer) {
            (Owner::Drafter, None) => (None, Owner::Drafter, drafters),
            (_, layer) => (layer, Owner::Target, order),
        }
    }
}

/// `layers.3.qkv`, of a drafter `draft.qkv`.
impl fmt::Display for WeightId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.owner.prefix())?;
        if let Some(layer) = self.layer {
            write!(f, "layers.{layer}.")?;
        }
        write!(f, "{}", self.role)
    }
}

impl Owner {
    /// What names of its weights and steps begin with.
    pub fn prefix(self) -> &'static str {
        match self {
            Owner::Target => "",
            Owner::Drafter => "draft.",
        }
    }
}

/// As in weights.toml.
impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.row().name)
    }
}
