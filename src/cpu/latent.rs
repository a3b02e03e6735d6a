//! Latent attention in its absorbed form. With c the normalised latent of a position and k its rotated key, a head's
//! key is [W_UK c | k] and its value W_UV c; so its score is (W_UK^T q) c + q_rope k, and what it attends to is W_UV
//! (sum of weights times c): the cache holds [c | k] and nothing of any head.
use super::dot::{self, Numbers};
use super::reference::{attend, Cache, DraftState, Rank, Rotary, Rows};
use crate::model::plan::{LatentAttention, Owner, Plan};
use crate::model::role::WeightId;
use crate::model::weights::{Weight, Weights};
use anyhow::Result;
use rayon::prelude::*;

impl Rank {
    fn latent_cache<'a>(&'a mut self, owner: Owner, drafter: Option<&'a mut DraftState>) -> &'a mut Cache {
        match (owner, drafter) {
            (Owner::Target, _) => &mut self.cache,
            (Owner::Drafter, Some(d)) => &mut d.cache,
            (Owner::Drafter, None) => unreachable!("plans of a drafter need one"),
        }
    }

    /// First row of kv_b of this rank's heads.
    fn first_row(&self, id: WeightId, kv_b: &Weight) -> Result<usize> {
        let ranks = self.ranks.of(id);
        Ok(kv_b.part_of_rank(ranks.rank, ranks.count)?[0].rows.start)
    }

    /// New rows of the cache, and absorbed = [W_UK^T q_nope | rotated q_rope] of each head.
    pub(super) fn latent_query(
        &mut self,
        weights: &Weights,
        drafter: Option<&mut DraftState>,
        rotary: &Rotary,
        plan: &Plan,
        a: &LatentAttention,
        at: Rows,
    ) -> Result<()> {
        let d = a.dims;
        let rows = at.count(plan.buffer(a.absorbed).rows);
        let position = at.start(a.tokens);
        let width = d.q_rank + d.row_dim();
        let latents = self.buffer(plan, a.latents)[..rows * width].to_vec();
        let norm = self.vectors[&a.kv_norm].clone();
        let eps = plan.eps(a.kv_norm);
        let (cache, rotary) = match (a.owner, drafter) {
            (Owner::Target, _) => (&mut self.cache, rotary),
            (Owner::Drafter, Some(d)) => (&mut d.cache, &d.rotary),
            (Owner::Drafter, None) => unreachable!("plans of a drafter need one"),
        };
        for (r, latents) in latents.chunks_exact(width).enumerate() {
            let start = cache.at(a.layer, 0) + (position + r) * d.row_dim();
            let row = &mut cache.keys[start..start + d.row_dim()];
            row.copy_from_slice(&latents[d.q_rank..]);
            let (latent, key) = row.split_at_mut(d.kv_rank);
            let inv = 1.0 / (dot::sum_of_squares(latent) / d.kv_rank as f32 + eps).sqrt();
            latent.iter_mut().zip(&norm).for_each(|(x, w)| *x *= inv * w);
            rotary.turn(key, position + r);
        }

        let q_dim = d.nope_dim + d.rope_dim;
        let q = self.buffer(plan, a.q)[..rows * a.n_heads * q_dim].to_vec();
        // [head][row][kv_rank + rope_dim]: a head's matrix meets every row while it is in the cache.
        let mut absorbed = vec![0.0; a.n_heads * rows * d.row_dim()];
        let kv_b = weights.get(a.kv_b);
        let (first, kv_b) = (self.first_row(a.kv_b, kv_b)?, Numbers::of_part(kv_b, 0)?);
        absorbed.par_chunks_exact_mut(rows * d.row_dim()).enumerate().for_each(|(head, absorbed)| {
            let mut matrix_row = vec![0.0; d.kv_rank];
            for n in 0..d.nope_dim {
                kv_b.copy((first + head * (d.nope_dim + d.v_dim) + n) * d.kv_rank, &mut matrix_row);
                for (r, absorbed) in absorbed.chunks_exact_mut(d.row_dim()).enumerate() {
                    let x = q[(r * a.n_heads + head) * q_dim + n];
                    absorbed.iter_mut().zip(&matrix_row).for_each(|(sum, w)| *sum += x * w);
                }
            }
            for (r, absorbed) in absorbed.chunks_exact_mut(d.row_dim()).enumerate() {
                let rope = &mut absorbed[d.kv_rank..];
                rope.copy_from_slice(&q[(r * a.n_heads + head) * q_dim + d.nope_dim..][..d.rope_dim]);
                rotary.turn(rope, position + r);
            }
        });
        let out = self.buffer_mut(plan, a.absorbed);
        for (i, absorbed) in absorbed.chunks_exact(d.row_dim()).enumerate() {
            let (head, r) = (i / rows, i % rows);
            out[(r * a.n_heads + head) * d.row_dim()..][..d.row_dim()].copy_from_slice(absorbed);
        }
        Ok(())
    }

    /// attended = softmax(scale * absorbed x cache rows) x latents
    pub(super) fn latent_attend(
        &mut self,
        drafter: Option<&mut DraftState>,
        plan: &Plan,
        a: &LatentAttention,
        at: Rows,
    ) {
        let d = a.dims;
        let rows = at.count(plan.buffer(a.attended).rows);
        let position = at.start(a.tokens);
        let absorbed = self.buffer(plan, a.absorbed)[..rows * a.n_heads * d.row_dim()].to_vec();
        let mut attended = vec![0.0; rows * a.n_heads * d.kv_rank];
        let cache = &*self.latent_cache(a.owner, drafter);
        let start = cache.at(a.layer, 0);
        attended.par_chunks_exact_mut(d.kv_rank).zip(absorbed.par_chunks_exact(d.row_dim())).enumerate().for_each(
            |(i, (out, q))| {
                let keys = &cache.keys[start..start + (position + i / a.n_heads + 1) * d.row_dim()];
                attend(q, a.scale, keys, keys, d.row_dim(), out);
            },
        );
        self.buffer_mut(plan, a.attended)[..attended.len()].copy_from_slice(&attended);
    }

    /// out = W_UV x attended, head by head.
    pub(super) fn latent_value(&mut self, weights: &Weights, plan: &Plan, a: &LatentAttention, at: Rows) -> Result<()> {
        let d = a.dims;
        let rows = at.count(plan.buffer(a.out).rows);
        let attended = &self.buffer(plan, a.attended);
        let kv_b = weights.get(a.kv_b);
        let (first, kv_b) = (self.first_row(a.kv_b, kv_b)?, Numbers::of_part(kv_b, 0)?);
        let mut values = vec![0.0; a.n_heads * d.v_dim * rows]; // [head][v][row]
        values.par_chunks_exact_mut(d.v_dim * rows).enumerate().for_each(|(head, values)| {
            let of_head = (0..rows).flat_map(|r| &attended[(r * a.n_heads + head) * d.kv_rank..][..d.kv_rank]);
            let of_head: Vec<f32> = of_head.copied().collect();
            for (v, values) in values.chunks_exact_mut(rows).enumerate() {
                let row = first + head * (d.nope_dim + d.v_dim) + d.nope_dim + v;
                kv_b.dots(row * d.kv_rank, d.kv_rank, &of_head, |r, sum| values[r] = sum);
            }
        });
        let out = self.buffer_mut(plan, a.out);
        for (i, values) in values.chunks_exact(rows).enumerate() {
            values.iter().enumerate().for_each(|(r, value)| out[r * a.n_heads * d.v_dim + i] = *value);
        }
        Ok(())
    }
}
