//! Routers and experts (kernels/experts.cu), in slabs of `MAX_WIDTH` rows.
use super::super::catalog::KernelId;
use super::super::matrix::{Span, Tiles};
use super::super::params::{
    ExpertMatrix, ExpertParams, LinearPart, RouteParams, RouterParams, EXPERT_WORK_BYTES, MAX_CHOSEN, MAX_EXPERTS,
    ROUTER_SPLITS,
};
use super::{skip, slabs, Lowering};
use crate::model::config::Scoring;
use crate::model::plan::{Epilogue, Mixture, Router, Step, MAX_WIDTH};
use crate::model::role::WeightId;
use anyhow::{bail, ensure, Context, Result};
use bytemuck::Zeroable;

impl Lowering<'_> {
    /// Sums of the router's weights; experts_up makes choices of them.
    pub(super) fn router(&mut self, step: usize, router: &Router) -> Result<()> {
        let (n_experts, k) = (router.routing.n_experts, router.routing.top_k);
        ensure!(
            n_experts <= MAX_EXPERTS && k <= MAX_CHOSEN && router.routing.n_groups <= 32,
            "{k} of {n_experts} experts in {} groups: the GPU backend has room for {MAX_CHOSEN} of {MAX_EXPERTS} in \
             32; use --device cpu",
            router.routing.n_groups
        );
        let rows = self.rows_of(router.routes);
        let matrix = &self.arena.weights.matrices[&router.weight];
        let input = self.input(step, 0, &router.input, rows, Tiles::Bf16, LinearPart::zeroed())?;
        for (first, n) in slabs(rows) {
            let params = RouterParams {
                weights: matrix.parts[0].at,
                x: input.x + (2 * first * input.x_stride as usize) as u64,
                sums: self.router_sums(first, n_experts),
                n_rows: self.n_rows(rows)?,
                k: input.k,
                x_stride: input.x_stride,
                n_experts: n_experts as i32,
                rows: n as i32,
                first_row: first as i32,
                pad: 0,
            };
            let kernel = if n > 8 { KernelId::RouterM16 } else { KernelId::RouterM8 };
            self.push_reading(kernel, [n_experts.div_ceil(16), ROUTER_SPLITS, 1], &params, matrix.spans());
        }
        Ok(())
    }

    fn router_sums(&self, first: usize, n_experts: usize) -> u64 {
        self.arena.router_sums.at(4 * first * ROUTER_SPLITS * n_experts)
    }

    /// What experts_up chooses for the slab whose first row is `first`.
    fn expert_work(&self, first: usize) -> u64 {
        self.arena.expert_work.at(first / MAX_WIDTH * EXPERT_WORK_BYTES)
    }

    /// The choices of step number `router`, and what the experts make of their rows.
    pub(super) fn experts_up(&mut self, step: usize, router: usize, m: &Mixture) -> Result<()> {
        let (plan, arena) = (self.plan, self.arena);
        let side = self.side(m, true)?;
        let Step::Router(router) = &plan.steps[router] else { bail!("experts without a router") };
        let rows = self.rows_of(m.act);
        let input = self.input(step, 0, &m.input, rows, Tiles::Bf16, LinearPart::zeroed())?;
        let routing = &router.routing;
        let route = RouteParams {
            bias: router.bias.map_or(0, |id| arena.weights.vectors[&id]),
            n_experts: routing.n_experts as i32,
            n_groups: routing.n_groups as i32,
            top_groups: routing.top_groups as i32,
            softmax: (routing.scoring == Scoring::Softmax) as i32,
            normalised: routing.normalised as i32,
            scale: routing.scale,
            ..side.params.route
        };
        let act_stride = plan.buffer(m.act).dim;
        for (first, n) in slabs(rows) {
            let groups = (n * m.top_k).min(m.n_experts) * m.expert_dim.div_ceil(8) + m.shared_dim().div_ceil(8);
            let params = ExpertParams {
                route: RouteParams {
                    sums: self.router_sums(first, m.n_experts),
                    work: self.expert_work(first),
                    first_row: first as i32,
                    ..route
                },
                x: input.x + (2 * first * input.x_stride as usize) as u64,
                squares: input.squares + (4 * first * (input.k as usize / 16)) as u64,
                act: self.buffer(m.act) + (2 * first * act_stride) as u64,
                k: input.k,
                x_stride: input.x_stride,
                act_stride: act_stride as i32,
                rows: n as i32,
                eps: input.eps,
                ..side.params
            };
            let grid = [self.blocks(groups), 1, 1];
            self.push_reading(side.kernels[(n > 8) as usize], grid, &params, side.weights.clone());
        }
        Ok(())
    }

    pub(super) fn experts_down(&mut self, step: usize, m: &Mixture) -> Result<()> {
        let plan = self.plan;
        let side = self.side(m, false)?;
        let mut params = side.params;
        params.x = self.buffer(m.act);
        params.x_stride = plan.buffer(m.act).dim as i32;
        match m.epilogue {
            Epilogue::Residual { x, tap } => {
                params.stream = self.buffer(x);
                (params.tap, params.tap_stride) = self.tap(tap);
                (params.next_norm, params.normed, params.squares_out) = self.prepared(step, x);
            }
            Epilogue::Partial { out } => params.partial = self.buffer(out),
            Epilogue::Store { .. } | Epilogue::SiluMul { .. } | Epilogue::Logits { .. } => {
                bail!("experts end in the residual stream")
            }
        }
        for (first, n) in slabs(self.rows_of(m.act)) {
            let route = RouteParams { work: self.expert_work(first), first_row: first as i32, ..params.route };
            let mut slab = ExpertParams { route, rows: n as i32, ..params };
            skip(&mut slab.x, first * params.x_stride as usize, 2);
            skip(&mut slab.stream, first * m.n, 4);
            skip(&mut slab.partial, first * m.n, 2);
            skip(&mut slab.tap, first * params.tap_stride as usize, 2);
            let wide = n > 8;
            let blocks = if wide { m.n / 16 } else { m.n.div_ceil(32) };
            self.push_reading(side.kernels[wide as usize], [blocks, 1, 1], &slab, side.weights.clone());
        }
        Ok(())
    }

    /// The kernels of the way up or down, what they read, and the params that are the same for all rows.
    fn side(&self, m: &Mixture, up: bool) -> Result<Side> {
        let matrices = &self.arena.weights.matrices;
        let side = |of: WeightId, dim: usize| matrices[&of].of_experts(dim);
        let routed = if up { m.gate_up } else { m.down };
        let shared = m.shared.as_ref().map(|s| (if up { s.gate_up } else { s.down }, s.dim));
        let kernels = kernels(m, up, matrices[&routed].tiles, shared.map(|(id, _)| matrices[&id].tiles))?;
        // The shared expert's come first: they are asked for before it is known which of the others are chosen.
        let mut weights = shared.map_or(Vec::new(), |(id, _)| matrices[&id].spans());
        weights.extend(matrices[&routed].spans());
        let params = ExpertParams {
            routed: side(routed, m.expert_dim),
            shared: shared.map_or(ExpertMatrix::zeroed(), |(id, dim)| side(id, dim)),
            route: RouteParams {
                n_rows: self.n_rows(self.rows_of(m.act))?,
                top_k: m.top_k as i32,
                ..RouteParams::zeroed()
            },
            n: m.n as i32,
            ..ExpertParams::zeroed()
        };
        Ok(Side { kernels, weights, params })
    }
}

struct Side {
    /// For up to 8 rows, and for more.
    kernels: [KernelId; 2],
    weights: Vec<Span>,
    params: ExpertParams,
}

/// The kernels for experts and a shared one that are stored like this, for up to 8 rows and up to 16.
fn kernels(m: &Mixture, up: bool, routed: Tiles, shared: Option<Tiles>) -> Result<[KernelId; 2]> {
    // Without a shared expert any kernel for the routed ones will do.
    let pairs = [Some(shared.unwrap_or(routed)), shared.is_none().then_some(Tiles::Bf16)];
    let of = |rows: usize| {
        let way = if up { "up" } else { "down" };
        let name = |shared: Tiles| format!("experts_{way}_m{rows}_{}_{}", routed.name(), shared.name());
        pairs.into_iter().flatten().find_map(|shared| KernelId::of(&name(shared)))
    };
    let found = of(8).zip(of(16)).with_context(|| {
        let common = m.shared.as_ref().map_or(String::new(), |s| format!(" beside a shared one as {}", s.format));
        format!("experts as {}{common}: the GPU backend has no kernels for this pair; use --device cpu", m.format)
    })?;
    for (what, dim) in [("experts", m.expert_dim), ("shared experts", m.shared_dim())] {
        ensure!(dim % 8 == 0, "{what} of {dim} on a rank: the GPU backend needs a multiple of 8");
    }
    ensure!(m.n % 16 == 0, "experts into rows of {}: the GPU backend needs a multiple of 16; use --device cpu", m.n);
    Ok(found.into())
}
