//! A plan as text, for `-vv` and the listings of tests/data/plans.
use super::step::*;
use crate::model::quant::Format;
use std::fmt;

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
