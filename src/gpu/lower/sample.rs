//! From logits to tokens, and the end of a prefill chunk (kernels/sample.cu).
use super::super::catalog::KernelId;
use super::super::op::Part;
use super::super::params::{
    AdvanceParams, SampleParams, SAMPLE_BEST_AT, SAMPLE_BINS_AT, SAMPLE_BIN_WORDS, SAMPLE_CHOSEN_AT, SAMPLE_DIGITS_AT,
    SAMPLE_DIGIT_WORDS, SAMPLE_IN_USE_AT, SAMPLE_OPEN_AT, SAMPLE_ROUNDS, SAMPLE_SLICE,
};
use super::super::ranks::collective::Exchange;
use super::{Choice, Lowering};
use crate::model::plan::BufferId;
use crate::model::role::{Role, WeightId};
use anyhow::Result;

impl Lowering<'_> {
    pub(super) fn accept(&mut self, logits: BufferId, vocab: usize, first_id: usize) -> Result<()> {
        let (arena, columns) = (self.arena, self.plan.buffer(logits).dim);
        let head = &arena.weights.matrices[&WeightId::of_target(Role::Head, None)];
        let params = SampleParams {
            logits: self.buffer(logits),
            state: self.state(0),
            options: arena.options.at(0),
            scratch: arena.sample_scratch.at(0),
            list: arena.sample_list.at(0),
            counts: arena.counts.at(0),
            bias: arena.bias.at(0),
            history: arena.history.at(0),
            ring: arena.ring,
            max_value: arena.max_value.at(0),
            max_id: arena.max_id.at(0),
            vocab: columns as i32,
            stride: columns as i32,
            n_max: self.blocks(head.n_tiles) as i32,
            width: self.rows() as i32,
            first_id: first_id as i32,
            n_tokens: vocab as i32,
            ranks: self.plan.ranks.count as i32,
            round: SAMPLE_ROUNDS as i32,
        };
        let row = [1, self.rows(), 1];
        let wide = [columns.div_ceil(SAMPLE_SLICE).max(2 * self.setting.n_sms / self.rows()), self.rows(), 1];
        if self.plan.ranks.count > 1 {
            self.choose_with_ranks(&params, wide)?;
        } else if self.choice != Choice::Greedy {
            for kernel in [KernelId::SampleAdjust, KernelId::SampleCount, KernelId::SampleChoose] {
                self.push(kernel, wide, &params);
            }
            self.push(KernelId::SampleSettle, row, &params);
        }
        self.push(KernelId::SampleAccept, [1, 1, 1], &params);
        Ok(())
    }

    /// The chain of kernels/sample.cu for several ranks, up to the choice that all of them have.
    fn choose_with_ranks(&mut self, params: &SampleParams, wide: [usize; 3]) -> Result<()> {
        let row = [1, self.rows(), 1];
        // Without options that change logits the head's maxima are all there is to look at.
        let adjust = if self.choice == Choice::Greedy { row } else { wide };
        self.push(KernelId::SampleAdjust, adjust, params);
        self.exchange_rows("the largest logit", SAMPLE_IN_USE_AT, SAMPLE_BEST_AT, 1, Exchange::Max)?;
        if self.choice == Choice::Greedy {
            return Ok(());
        }
        if self.choice == Choice::Filtered {
            self.push(KernelId::SampleCount, wide, params);
            let bins = (SAMPLE_BINS_AT, SAMPLE_BIN_WORDS);
            self.exchange_rows("the bins of top-k and top-p", SAMPLE_IN_USE_AT, bins.0, bins.1, Exchange::Sum)?;
        }
        self.push(KernelId::SampleChoose, wide, params);
        if self.choice == Choice::Filtered {
            for round in 0..SAMPLE_ROUNDS {
                self.push(KernelId::SampleNarrow, row, &SampleParams { round: round as i32, ..*params });
                let digits = (SAMPLE_DIGITS_AT, SAMPLE_DIGIT_WORDS);
                self.exchange_rows("the cuts of top-k and top-p", SAMPLE_OPEN_AT, digits.0, digits.1, Exchange::Sum)?;
            }
            self.push(KernelId::SampleSettle, row, params);
        }
        self.exchange_rows("the choice", SAMPLE_IN_USE_AT, SAMPLE_CHOSEN_AT, 1, Exchange::Max)
    }

    /// `words` a row from byte `at` of the sampling scratch become the maximum or the sum of all ranks' words, if a
    /// row's flag at `flags` is set.
    fn exchange_rows(&mut self, what: &str, flags: usize, at: usize, words: usize, op: Exchange) -> Result<()> {
        let (scratch, rows) = (self.arena.sample_scratch, self.rows());
        let exchange = self.wire()?.exchange((scratch.at(flags), rows), what, scratch.at(at), rows * words, op)?;
        self.collective(exchange);
        Ok(())
    }

    pub(super) fn advance(&mut self) {
        self.part = Part::Advance;
        let params = AdvanceParams { state: self.state(0), ring: self.arena.ring };
        self.push(KernelId::PrefillAdvance, [1, 1, 1], &params);
    }
}
