//! Latent attention in its absorbed form (kernels/mla.cu), in slabs of `MAX_WIDTH` rows.
use super::super::arena::linear_blocks;
use super::super::catalog::KernelId;
use super::super::op::Part;
use super::super::params::{LatentParams, VALUE_ROWS};
use super::{slabs, Lowering};
use crate::model::plan::{BufferId, LatentAttention, MAX_WIDTH};
use anyhow::{ensure, Context, Result};

impl Lowering<'_> {
    pub(super) fn latent_query(&mut self, a: &LatentAttention) -> Result<()> {
        check(a)?;
        let d = a.dims;
        for (first, n) in slabs(self.rows_of(a.out)) {
            let params = self.latent_params(a, first, n)?;
            let tasks = a.n_heads * d.kv_rank / 16 + n * (a.n_heads + 1);
            let blocks = tasks.div_ceil(8).min(linear_blocks(self.setting.n_sms));
            let keys = self.arena.weights.absorbed[&a.kv_b].keys.spans();
            self.push_reading(KernelId::LatentQuery, [blocks, 1, 1], &params, keys);
        }
        Ok(())
    }

    /// A prefill pass attends slab by slab among the ops of `latent_value`: slabs share the memory of partials, and
    /// what one leaves is added up before the next attends.
    pub(super) fn latent_attend(&mut self, a: &LatentAttention) -> Result<()> {
        let rows = self.rows_of(a.out);
        if rows > MAX_WIDTH {
            return Ok(());
        }
        self.attend_slab(a, 0, rows)
    }

    fn attend_slab(&mut self, a: &LatentAttention, first: usize, n: usize) -> Result<()> {
        let kernel = attend(a).context("no kernels for these latents")?;
        let params = self.latent_params(a, first, n)?;
        self.push(kernel, [self.chunks, (n * a.n_heads).div_ceil(16), 1], &params);
        Ok(())
    }

    /// What heads attended to in step number `attend` becomes their values.
    pub(super) fn latent_value(&mut self, step: usize, attend: usize, a: &LatentAttention) -> Result<()> {
        let rows = self.rows_of(a.out);
        let kernel = KernelId::of(&format!("latent_value_{}", a.dims.kv_rank));
        let kernel = kernel.context("no kernels for these latents")?;
        for (first, n) in slabs(rows) {
            if rows > MAX_WIDTH {
                self.part = Part::Step(attend);
                self.attend_slab(a, first, n)?;
                self.part = Part::Step(step);
            }
            let params = self.latent_params(a, first, n)?;
            let values = self.arena.weights.absorbed[&a.kv_b].values.spans();
            self.push_reading(kernel, [a.n_heads, n.div_ceil(VALUE_ROWS), 1], &params, values);
        }
        Ok(())
    }

    /// Of the `n` rows from `first` on.
    fn latent_params(&self, a: &LatentAttention, first: usize, n: usize) -> Result<LatentParams> {
        let (plan, arena, d) = (self.plan, self.arena, a.dims);
        let cache = self.cache(a.owner)?;
        let absorbed = &arena.weights.absorbed[&a.kv_b];
        let at = |id: BufferId| self.buffer(id) + (2 * first * plan.buffer(id).dim) as u64;
        Ok(LatentParams {
            latents: at(a.latents),
            q: at(a.q),
            absorbed: at(a.absorbed),
            attended: at(a.attended),
            out: at(a.out),
            cache: cache.keys.at(2 * a.layer * arena.capacity * d.row_dim()),
            w_uk: absorbed.keys.parts[0].at,
            w_uv: absorbed.values.parts[0].at,
            kv_norm: arena.weights.vectors[&a.kv_norm],
            inv_freq: cache.inverse_frequencies.at(0),
            partials: arena.attention_partials.at(0),
            length: self.length(a.tokens)?,
            rows: self.n_rows(self.rows_of(a.out))?,
            q_rank: d.q_rank as i32,
            latents_stride: plan.buffer(a.latents).dim as i32,
            n_heads: a.n_heads as i32,
            kv_rank: d.kv_rank as i32,
            nope_dim: d.nope_dim as i32,
            rope_dim: d.rope_dim as i32,
            v_dim: d.v_dim as i32,
            max_rows: n as i32,
            scale: a.scale,
            rope_factor: cache.rope_factor,
            norm_eps: plan.eps(a.kv_norm),
            first_row: first as i32,
        })
    }
}

fn attend(a: &LatentAttention) -> Option<KernelId> {
    KernelId::of(&format!("latent_attend_{}_{}", a.dims.kv_rank, a.dims.rope_dim))
}

/// What the kernels do not take. The largest latents are every published model's; the others are tests'.
fn check(a: &LatentAttention) -> Result<()> {
    let d = a.dims;
    attend(a).with_context(|| {
        format!(
            "kv_lora_rank {} and qk_rope_head_dim {}: the GPU backend has kernels of latent attention for 512 and 64; \
             use --device cpu",
            d.kv_rank, d.rope_dim
        )
    })?;
    for (name, dim, of) in
        [("q_lora_rank", d.q_rank, 16), ("qk_nope_head_dim", d.nope_dim, 8), ("v_head_dim", d.v_dim, 16)]
    {
        ensure!(dim % of == 0, "{name} {dim}: the GPU backend needs a multiple of {of}; use --device cpu");
    }
    Ok(())
}
