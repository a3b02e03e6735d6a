//! What a pass launches: each Step as ops, in order, from the plan and the addresses of an arena alone. No GPU is
//! asked, so tests lower passes of any model and number of ranks.
//!
//! A Step that no kernel takes is an error that says what is missing. One Step is one launch in most verify passes: who
//! writes a row that will be normalised also writes it times the norm weight and its sums of squares (norms.rs finds
//! out for whom), so that a linear layer waits for nothing but its input. A prefill pass normalises in a kernel of its
//! own and rotates queries before attention, and what has no kernel for many rows goes in slabs of `MAX_WIDTH`; its
//! bits are the same.
mod attention;
mod comm;
mod draft;
mod experts;
mod latent;
mod linear;
mod rows;
mod sample;

pub use draft::{CATCH_UP, CATCH_UP_ROWS};

use super::arena::{linear_blocks, Arena, Cache};
use super::catalog::KernelId;
use super::matrix::Span;
use super::norms::{norms, Norms};
use super::op::{Edge, Op, Part, Work};
use super::params::{DraftRows, State};
use super::ranks::collective::Wire;
use crate::model::plan::{BufferId, BufferKind, Owner, Pass, Plan, Step, Tokens, MAX_WIDTH};
use anyhow::{Context, Result};
use bytemuck::NoUninit;
use std::mem::offset_of;

/// What a request asks of the sampling kernels. Each gives the same token as those below where it applies, in fewer
/// kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Choice {
    /// Temperature 0 and nothing that changes logits: the head's own maxima decide.
    Greedy,
    /// On one rank everything else; on several, what needs no cut of top-k or top-p.
    Sampled,
    /// Several ranks only: the exchanges that find a cut.
    Filtered,
}

/// What is the same for all passes of a machine.
pub struct Setting<'a> {
    pub n_sms: usize,
    pub sums: Sums<'a>,
    /// n-gram search at the end of a verify pass.
    pub ngram: bool,
}

/// How sums over ranks come about.
pub enum Sums<'a> {
    /// The plan has none, or those of a rank measured alone, which are on their way for so many microseconds.
    Alone(f64),
    Ranks(&'a Wire),
}

/// The ops of a pass whose positions lie in the first `chunks` KV chunks.
///
/// Errors: a step has no kernel; the arena lacks what the plan needs; a sum does not fit the way it is to travel.
pub fn lower(plan: &Plan, arena: &Arena, setting: &Setting, chunks: usize, choice: Choice) -> Result<Vec<Op>> {
    let (ops, part) = (Vec::new(), Part::DraftBegin);
    let mut lowering =
        Lowering { plan, arena, setting, chunks, choice, norms: norms(plan), ops, part, behind_shared: false };
    if let Pass::Draft { .. } | Pass::DraftPrefill { .. } = plan.pass {
        lowering.draft_begin()?;
        lowering.load_features()?;
    }
    for (i, step) in plan.steps.iter().enumerate() {
        if let Step::Accept { .. } = step {
            lowering.store_features()?; // before the length moves on
        }
        lowering.part = Part::Step(i);
        lowering.step(i, step)?;
    }
    match plan.pass {
        Pass::Prefill { .. } => {
            lowering.store_features()?;
            lowering.advance();
        }
        Pass::Verify { .. } if setting.ngram => lowering.ngram(),
        _ => {}
    }
    Ok(lowering.ops)
}

struct Lowering<'a> {
    plan: &'a Plan,
    arena: &'a Arena,
    setting: &'a Setting<'a>,
    chunks: usize,
    choice: Choice,
    norms: Norms,
    ops: Vec<Op>,
    /// Where the next op belongs.
    part: Part,
    /// The last op was a collective of ranks that share a GPU.
    behind_shared: bool,
}

impl Lowering<'_> {
    /// Step number `i`; the order is that of `Step`.
    fn step(&mut self, i: usize, step: &Step) -> Result<()> {
        let mut completes = vec![i];
        match step {
            Step::Embed { table, tokens, out, dim } => self.embed(i, *table, *tokens, *out, *dim)?,
            Step::Linear(linear) => self.linear(i, linear)?,
            Step::Attention(attention) => self.attention(attention)?,
            Step::LatentQuery(a) => self.latent_query(a)?,
            Step::LatentAttend(a) => {
                self.latent_attend(a)?;
                return Ok(()); // LatentValue adds up what chunks attended to
            }
            Step::LatentValue(a) => {
                let attend = self.before(i, |step| matches!(step, Step::LatentAttend(_)))?;
                self.latent_value(i, attend, a)?;
                completes.insert(0, attend);
            }
            Step::Router(router) => {
                self.router(i, router)?;
                return Ok(()); // ExpertsUp makes choices of its sums
            }
            Step::ExpertsUp(mixture) => {
                let router = self.before(i, |step| matches!(step, Step::Router(_)))?;
                self.experts_up(i, router, mixture)?;
                completes.insert(0, router);
            }
            Step::ExpertsDown(mixture) => self.experts_down(i, mixture)?,
            Step::AllReduce { partial, x, dim, bias, tap } => self.all_reduce(i, *partial, *x, *dim, *bias, *tap)?,
            Step::Norm { x, column, weight, out, dim } => self.norm_step(*x, *column, *weight, *out, *dim)?,
            Step::Accept { logits, vocab, first_id } => self.accept(*logits, *vocab, *first_id)?,
            Step::Select { x, out, dim } => self.select(*x, *out, *dim)?,
            Step::DraftToken { logits, vocab, draft } => self.draft_token(*logits, *vocab, *draft)?,
        }
        self.ops.last_mut().context("a step without a launch")?.completes = completes;
        Ok(())
    }

    /// The nearest step before number `i` that is one of these.
    fn before(&self, i: usize, is: impl Fn(&Step) -> bool) -> Result<usize> {
        let found = self.plan.steps[..i].iter().rposition(is);
        found.with_context(|| format!("{} without the step that it continues", self.plan.steps[i].name()))
    }

    fn push<P: NoUninit>(&mut self, kernel: KernelId, grid: [usize; 3], params: &P) {
        self.push_reading(kernel, grid, params, Vec::new());
    }

    /// A launch that reads these weights.
    fn push_reading<P: NoUninit>(&mut self, kernel: KernelId, grid: [usize; 3], params: &P, weights: Vec<Span>) {
        let edge = if self.behind_shared { Edge::Full } else { Edge::Early };
        self.behind_shared = false;
        let (grid, params) = (grid.map(|n| n as u32), bytemuck::bytes_of(params).to_vec());
        let work = Work::Kernel { kernel, grid, threads: kernel.threads(), params };
        self.ops.push(Op { part: self.part, work, edge, weights, completes: Vec::new() });
    }

    fn rows(&self) -> usize {
        self.plan.rows()
    }

    /// Passes of many rows have kernels of their own.
    fn prefills(&self) -> bool {
        self.rows() > MAX_WIDTH
    }

    fn rows_of(&self, id: BufferId) -> usize {
        self.plan.buffer(id).rows
    }

    fn buffer(&self, id: BufferId) -> u64 {
        self.arena.buffer(self.plan, id)
    }

    fn is_stream(&self, id: BufferId) -> bool {
        self.plan.buffer(id).kind == BufferKind::Stream
    }

    /// Address of byte `offset` of `State`.
    fn state(&self, offset: usize) -> u64 {
        self.arena.state.at(offset)
    }

    /// Address inside `DraftRows`.
    fn draft(&self, offset: usize) -> Result<u64> {
        Ok(self.arena.drafter()?.rows.at(offset))
    }

    /// Where the device keeps how many of `rows` captured rows are in use. The one-row steps of a draft pass have one.
    fn n_rows(&self, rows: usize) -> Result<u64> {
        match self.plan.pass {
            Pass::Prefill { .. } | Pass::Verify { .. } => Ok(self.state(offset_of!(State, rows))),
            Pass::Draft { .. } | Pass::DraftPrefill { .. } if rows == self.rows() => {
                self.draft(offset_of!(DraftRows, rows))
            }
            Pass::Draft { .. } | Pass::DraftPrefill { .. } => self.draft(offset_of!(DraftRows, one)),
        }
    }

    /// Where the device keeps the position of row 0.
    fn length(&self, tokens: Tokens) -> Result<u64> {
        match tokens {
            Tokens::Pass => Ok(self.state(offset_of!(State, length))),
            Tokens::Next => self.draft(offset_of!(DraftRows, start)),
            Tokens::Draft(n) => self.draft(offset_of!(DraftRows, positions) + 4 * n),
        }
    }

    fn cache(&self, owner: Owner) -> Result<Cache> {
        match owner {
            Owner::Target => Ok(self.arena.cache),
            Owner::Drafter => Ok(self.arena.drafter()?.cache),
        }
    }

    /// For a step that writes `out`: next norm weight, normed and squares, or zeros.
    fn prepared(&self, step: usize, out: BufferId) -> (u64, u64, u64) {
        match self.norms.next[step] {
            Some(norm) if !self.prefills() => {
                let normed = self.arena.normed(self.plan, out);
                (self.arena.weights.vectors[&norm], normed.rows.at(0), normed.squares.at(0))
            }
            _ => (0, 0, 0),
        }
    }

    /// Blocks of a skinny linear kernel over `n_tiles` tiles: fewer than stay on the GPU where there is less to do.
    fn blocks(&self, n_tiles: usize) -> usize {
        n_tiles.min(linear_blocks(self.setting.n_sms))
    }
}

/// The runs of rows that kernels for up to `MAX_WIDTH` rows take: first row and number. Those behind the rows in use
/// find nothing to do.
fn slabs(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).step_by(MAX_WIDTH).map(move |first| (first, MAX_WIDTH.min(rows - first)))
}

/// Moves an address on by so many numbers; what is absent stays so.
fn skip(at: &mut u64, numbers: usize, bytes: usize) {
    if *at != 0 {
        *at += (numbers * bytes) as u64;
    }
}
