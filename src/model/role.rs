//! What the weights of a model are for, and what they are called.
use std::fmt;

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

pub(super) const ROLES: [(Role, &str); 51] = [
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
