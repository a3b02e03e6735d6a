//! Grouped-query attention (kernels/attention.cu).
use super::super::catalog::KernelId;
use super::super::params::AttentionParams;
use super::Lowering;
use crate::model::plan::{Attention, MAX_WIDTH};
use anyhow::{Context, Result};

impl Lowering<'_> {
    pub(super) fn attention(&mut self, a: &Attention) -> Result<()> {
        let (plan, arena) = (self.plan, self.arena);
        let kernel = |name: String| {
            KernelId::of(&name).with_context(|| {
                format!(
                    "head_dim {}: the GPU backend has attention kernels for 64 and 128; use --device cpu",
                    a.head_dim
                )
            })
        };
        let rows = self.rows_of(a.out);
        let layer_bytes = 2 * a.n_kv_heads * arena.capacity * a.head_dim;
        let cache = self.cache(a.owner)?;
        let params = AttentionParams {
            qkv: self.buffer(a.qkv),
            out: self.buffer(a.out),
            k_cache: cache.keys.at(a.layer * layer_bytes),
            v_cache: cache.values.at(a.layer * layer_bytes),
            q_norm: a.q_norm.map_or(0, |id| arena.weights.vectors[&id]),
            k_norm: a.k_norm.map_or(0, |id| arena.weights.vectors[&id]),
            inv_freq: cache.inverse_frequencies.at(0),
            partials: arena.attention_partials.at(0),
            counters: arena.attention_counters.at(0),
            length: self.length(a.tokens)?,
            rows: self.n_rows(rows)?,
            n_heads: a.n_heads as i32,
            n_kv_heads: a.n_kv_heads as i32,
            capacity: arena.capacity as i32,
            max_rows: rows as i32,
            scale: 1.0 / (a.head_dim as f32).sqrt(),
            rope_factor: cache.rope_factor,
            norm_eps: plan.norm_eps,
            pad: 0,
        };
        let group = a.n_heads / a.n_kv_heads;
        if rows > MAX_WIDTH {
            let grid = [rows.div_ceil(32), a.n_heads + 2 * a.n_kv_heads, 1];
            self.push(kernel(format!("attention_rope_{}", a.head_dim))?, grid, &params);
            let grid = [(rows * group).div_ceil(64), a.n_kv_heads, 1];
            self.push(kernel(format!("attention_prefill_{}", a.head_dim))?, grid, &params);
            return Ok(());
        }
        let columns = columns(rows * group, a.n_kv_heads, self.chunks);
        let grid = [self.chunks, a.n_kv_heads, (rows * group).div_ceil(columns)];
        self.push(kernel(format!("attention_decode_{}_{columns}", a.head_dim))?, grid, &params);
        Ok(())
    }
}

/// Columns (rows of the pass times heads of a group) that one attention block takes, in a grid of `chunks` blocks a KV
/// head. Narrow blocks are faster as long as there is room for all of them; in long contexts those that read the same
/// keys and values would wait for each other.
fn columns(columns: usize, n_kv_heads: usize, chunks: usize) -> usize {
    const ROOM: usize = 1536;
    if columns <= 16 || chunks * n_kv_heads * columns.div_ceil(16) <= ROOM {
        16
    } else {
        32
    }
}
