//! Feed-forward layers of experts: who computes a row, and the sum of what they say. Every expert's weights meet all of
//! its rows at once; a row adds its experts in ascending order and the shared one last, whichever other rows there are.
use super::dot::Numbers;
use super::reference::{products, Rank, Rows, Scaled};
use crate::model::config::{Routing, Scoring};
use crate::model::plan::{BufferId, Epilogue, Mixture, Plan, Router};
use crate::model::weights::{Slice, Weight, Weights};
use anyhow::Result;

impl Rank {
    /// routes = the experts of each row, ascending, then their weights.
    pub(super) fn route(&mut self, weights: &Weights, plan: &Plan, router: &Router, at: Rows) -> Result<()> {
        let rows = at.count(plan.buffer(router.routes).rows);
        let input = self.scaled_input(plan, router.input.x, 0, router.input.dim, router.input.norm, at, rows);
        let n = router.routing.n_experts;
        let mut logits = vec![0.0; n * rows]; // [expert][row]
        let weight = weights.get(router.weight);
        let all = Slice { rows: 0..n, cols: 0..weight.cols };
        products(&Numbers::of_part(weight, 0)?, weight.cols, &all, &[input], rows, &mut logits);
        let bias = router.bias.map(|id| self.vectors[&id].clone());
        let top_k = router.routing.top_k;
        let out = self.buffer_mut(plan, router.routes);
        let mut margins = Vec::new();
        for r in 0..rows {
            let logits: Vec<f32> = (0..n).map(|e| logits[e * rows + r]).collect();
            let (chosen, margin) = choose(&logits, bias.as_deref(), &router.routing);
            margins.push(margin);
            for (i, (expert, weight)) in chosen.into_iter().enumerate() {
                out[r * 2 * top_k + i] = expert as f32;
                out[r * 2 * top_k + top_k + i] = weight;
            }
        }
        self.margins.push(margins);
        Ok(())
    }

    /// act = silu(gate) * up of each expert of a row, in the order of its routes, then of the shared one.
    pub(super) fn experts_up(&mut self, weights: &Weights, plan: &Plan, m: &Mixture, at: Rows) -> Result<()> {
        let rows = at.count(plan.buffer(m.act).rows);
        let input = self.scaled_input(plan, m.input.x, 0, m.input.dim, m.input.norm, at, rows);
        let mut act = vec![0.0; rows * plan.buffer(m.act).dim];
        let width = plan.buffer(m.act).dim;
        let weight = weights.get(m.gate_up);
        let slices = self.slices(weight)?;
        for (expert, slots) in self.slots(plan, m, rows) {
            let chosen: Vec<usize> = slots.iter().map(|(r, _)| *r).collect();
            let out = gated(weight, &slices, expert, &input, &chosen)?;
            for ((r, slot), out) in slots.iter().zip(out.chunks_exact(m.expert_dim)) {
                act[r * width + slot * m.expert_dim..][..m.expert_dim].copy_from_slice(out);
            }
        }
        if let Some(shared) = &m.shared {
            let all: Vec<usize> = (0..rows).collect();
            let weight = weights.get(shared.gate_up);
            let out = gated(weight, &self.slices(weight)?, 0, &input, &all)?;
            for (r, out) in out.chunks_exact(shared.dim).enumerate() {
                act[r * width + m.top_k * m.expert_dim..][..shared.dim].copy_from_slice(out);
            }
        }
        self.buffer_mut(plan, m.act)[..act.len()].copy_from_slice(&act);
        Ok(())
    }

    /// The sum over experts of weight * down(act) into the residual stream, or this rank's share of it.
    pub(super) fn experts_down(&mut self, weights: &Weights, plan: &Plan, m: &Mixture, at: Rows) -> Result<BufferId> {
        let rows = at.count(plan.buffer(m.act).rows);
        let width = plan.buffer(m.act).dim;
        let act = &self.buffer(plan, m.act);
        let routes = &self.buffer(plan, m.routes);
        let mut total = vec![0.0; rows * m.n];
        let weight = weights.get(m.down);
        let slices = self.slices(weight)?;
        for (expert, slots) in self.slots(plan, m, rows) {
            let x = slots
                .iter()
                .flat_map(|(r, slot)| &act[r * width + slot * m.expert_dim..][..m.expert_dim])
                .copied()
                .collect();
            let input = Scaled { x, inv: vec![1.0; slots.len()], dim: m.expert_dim };
            let mut sums = vec![0.0; m.n * slots.len()];
            products(
                &Numbers::of_part(weight, expert)?,
                weight.cols,
                &slices[expert],
                &[input],
                slots.len(),
                &mut sums,
            );
            for (i, (r, slot)) in slots.iter().enumerate() {
                let share = routes[r * 2 * m.top_k + m.top_k + slot];
                let total = &mut total[r * m.n..][..m.n];
                total
                    .iter_mut()
                    .zip(sums.chunks_exact(slots.len()))
                    .for_each(|(total, sums)| *total += share * sums[i]);
            }
        }
        if let Some(shared) = &m.shared {
            let x = (0..rows).flat_map(|r| &act[r * width + m.top_k * m.expert_dim..][..shared.dim]).copied().collect();
            let input = Scaled { x, inv: vec![1.0; rows], dim: shared.dim };
            let mut sums = vec![0.0; m.n * rows];
            let weight = weights.get(shared.down);
            products(&Numbers::of_part(weight, 0)?, weight.cols, &self.slices(weight)?[0], &[input], rows, &mut sums);
            for (n, sums) in sums.chunks_exact(rows).enumerate() {
                sums.iter().enumerate().for_each(|(r, sum)| total[r * m.n + n] += sum);
            }
        }
        match m.epilogue {
            Epilogue::Residual { x, tap } => {
                self.buffer_mut(plan, x).iter_mut().zip(&total).for_each(|(x, y)| *x += y);
                self.tap(plan, x, tap, at);
                Ok(x)
            }
            Epilogue::Partial { out } => {
                self.buffer_mut(plan, out)[..total.len()].copy_from_slice(&total);
                Ok(out)
            }
            Epilogue::Store { .. } | Epilogue::SiluMul { .. } | Epilogue::Logits { .. } => {
                unreachable!("experts end in the residual stream")
            }
        }
    }

    /// What this rank has of each part.
    fn slices(&self, weight: &Weight) -> Result<Vec<Slice>> {
        weight.part_of_rank(self.ranks.rank, self.ranks.count)
    }

    /// The experts in use, ascending; of each the rows that use it, and where it stands among theirs.
    fn slots(&self, plan: &Plan, m: &Mixture, rows: usize) -> Vec<(usize, Vec<(usize, usize)>)> {
        let routes = &self.buffer(plan, m.routes);
        let mut slots = vec![Vec::new(); m.n_experts];
        for r in 0..rows {
            for (slot, expert) in routes[r * 2 * m.top_k..][..m.top_k].iter().enumerate() {
                slots[*expert as usize].push((r, slot));
            }
        }
        slots.into_iter().enumerate().filter(|(_, slots)| !slots.is_empty()).collect()
    }
}

/// silu(gate) * up of some rows, [rows, dim]: of one expert, whose gate and up are the parts 2 * expert and 2 * expert
/// + 1.
fn gated(weight: &Weight, slices: &[Slice], expert: usize, input: &Scaled, rows: &[usize]) -> Result<Vec<f32>> {
    let n = rows.len();
    let of = |r: &usize| &input.x[r * input.dim..][..input.dim];
    let (x, inv) = (rows.iter().flat_map(of).copied().collect(), rows.iter().map(|&r| input.inv[r]).collect());
    let input = [Scaled { x, inv, dim: input.dim }];
    let dim = slices[2 * expert].rows.len();
    let mut sums = [vec![0.0; dim * n], vec![0.0; dim * n]];
    for (i, sums) in sums.iter_mut().enumerate() {
        products(&Numbers::of_part(weight, 2 * expert + i)?, weight.cols, &slices[2 * expert + i], &input, n, sums);
    }
    let mut out = vec![0.0; n * dim];
    for (i, (gate, up)) in sums[0].iter().zip(&sums[1]).enumerate() {
        out[i % n * dim + i / n] = gate / (1.0 + (-gate).exp()) * up;
    }
    Ok(out)
}

/// The experts of one row and their weights, by ascending expert, and by how much the last of them or of their groups
/// is better than the first that was left out. Ties go to the lower one.
fn choose(logits: &[f32], bias: Option<&[f32]>, routing: &Routing) -> (Vec<(usize, f32)>, f32) {
    let scores: Vec<f32> = match routing.scoring {
        Scoring::Sigmoid => logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
        Scoring::Softmax => {
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let powers: Vec<f32> = logits.iter().map(|l| (l - max).exp()).collect();
            let sum: f32 = powers.iter().sum();
            powers.iter().map(|p| p / sum).collect()
        }
    };
    let mut rank: Vec<f32> = scores.iter().enumerate().map(|(e, s)| s + bias.map_or(0.0, |bias| bias[e])).collect();
    let mut margin = f32::INFINITY;
    if routing.n_groups > 1 {
        let group = rank.len() / routing.n_groups;
        let best_two = |group: &[f32]| best(group, 2).into_iter().map(|i| group[i]).sum();
        let groups: Vec<f32> = rank.chunks_exact(group).map(best_two).collect();
        let kept = best(&groups, routing.top_groups);
        margin = lead(&groups, routing.top_groups);
        for (e, rank) in rank.iter_mut().enumerate() {
            if !kept.contains(&(e / group)) {
                *rank = f32::NEG_INFINITY;
            }
        }
    }
    margin = margin.min(lead(&rank, routing.top_k));
    let mut chosen = best(&rank, routing.top_k);
    chosen.sort_unstable();
    let sum = match routing.normalised {
        true => chosen.iter().map(|&e| scores[e]).sum::<f32>() + 1e-20,
        false => 1.0,
    };
    (chosen.into_iter().map(|e| (e, scores[e] / sum * routing.scale)).collect(), margin)
}

/// By how much the last of the `n` largest numbers is larger than the next.
fn lead(numbers: &[f32], n: usize) -> f32 {
    match best(numbers, n + 1)[..] {
        [.., last, next] if n < numbers.len() => numbers[last] - numbers[next],
        _ => f32::INFINITY,
    }
}

/// Indices of the `n` largest numbers, the largest first.
fn best(numbers: &[f32], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..numbers.len()).collect();
    order.sort_by(|&a, &b| numbers[b].total_cmp(&numbers[a])); // stable: ties stay in order
    order.truncate(n);
    order
}
