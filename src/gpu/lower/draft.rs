//! What drafting needs beside the steps of its model (kernels/draft.cu).
use super::super::catalog::KernelId;
use super::super::op::Part;
use super::super::params::{DraftBeginParams, DraftParams, NgramParams};
use super::Lowering;
use crate::decode::draft_ngram::{MAX_NGRAM, MIN_NGRAM};
use crate::decode::MAX_DRAFTS;
use crate::model::plan::{BufferId, Pass, PREFILL_ROWS};
use crate::model::role::{Role, WeightId};
use anyhow::{bail, Result};

/// The pass that brings the drafter's cache up while decoding goes on without drafts. Not used for prompts: it leaves a
/// row for the extend, and one behind a prompt chunk does not.
pub const CATCH_UP: Pass = Pass::DraftPrefill { rows: CATCH_UP_ROWS };
pub const CATCH_UP_ROWS: usize = PREFILL_ROWS[0];

impl Lowering<'_> {
    pub(super) fn draft_begin(&mut self) -> Result<()> {
        self.part = Part::DraftBegin;
        let behind = (self.plan.pass == CATCH_UP) as i32;
        let params =
            DraftBeginParams { state: self.state(0), draft: self.draft(0)?, max_rows: self.rows() as i32, behind };
        self.push(KernelId::DraftBegin, [1, 1, 1], &params);
        Ok(())
    }

    pub(super) fn draft_token(&mut self, logits: BufferId, vocab: usize, draft: usize) -> Result<()> {
        let arena = self.arena;
        let Pass::Draft { drafts, .. } = self.plan.pass else { bail!("a draft outside a draft pass") };
        let head = &arena.weights.matrices[&WeightId::of_drafter(Role::Head, None)];
        let params = DraftParams {
            logits: self.buffer(logits),
            state: self.state(0),
            options: arena.options.at(0),
            scratch: arena.draft_scratch.at(0),
            target_ids: arena.drafter()?.target_ids.map_or(0, |ids| ids.at(0)),
            max_value: arena.max_value.at(0),
            max_id: arena.max_id.at(0),
            vocab: vocab as i32,
            index: draft as i32 - 1,
            n_drafts: drafts as i32,
            n_max: self.blocks(head.n_tiles) as i32,
        };
        self.push(KernelId::DraftChoose, [vocab.div_ceil(256), 1, 1], &params);
        Ok(())
    }

    pub(super) fn ngram(&mut self) {
        self.part = Part::Ngram;
        let arena = self.arena;
        let params = NgramParams {
            state: self.state(0),
            options: arena.options.at(0),
            scratch: arena.draft_scratch.at(0),
            history: arena.history.at(0),
            ring: arena.ring,
            min_n: MIN_NGRAM as i32,
            max_n: MAX_NGRAM as i32,
            n_drafts: MAX_DRAFTS as i32,
            pad: 0,
        };
        self.push(KernelId::NgramDraft, [32, 1, 1], &params);
    }
}
