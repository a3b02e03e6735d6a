//! One sequence while it is being decoded: what is in the cache, what was sampled, when it ends.
//!
//! `Sequence::accept` is the reference arm of `Step::Accept`; on the GPU the same state lives in device memory and
//! kernels/sample.cu advances it. All lengths are in tokens.
use super::sample::{Counts, Sampler, Sampling};

/// What a request asks of the decoder.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Ids that end the answer; empty with `--ignore-eos`.
    pub end_ids: Vec<u32>,
    pub max_tokens: usize,
    /// Prompt and output together.
    pub context: usize,
}

/// Why an answer ended on the device. Stop strings and interrupts are the host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Eos(u32),
    Length,
    Context,
}

/// What one verify pass did.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Tokens of this pass in order; an end token is included.
    pub tokens: Vec<u32>,
    /// Drafts that equalled their sample, up to the end if there was one.
    pub accepted: usize,
    pub drafted: usize,
    /// Drafts that n-gram search has ready for the next pass; 0 without a match or without n-gram drafting.
    pub ngram: usize,
    pub end: Option<End>,
}

#[derive(Clone, Debug)]
pub struct Sequence {
    /// Prompt and output. The last token is the root: known, but its row is not in the cache yet.
    pub history: Vec<u32>,
    pub prompt_len: usize,
    /// Rows in the cache.
    pub length: usize,
    pub sampling: Sampling,
    pub limits: Limits,
    pub counts: Counts,
    pub end: Option<End>,
}

impl Sequence {
    pub fn new(prompt: &[u32], length: usize, vocab: usize, sampling: Sampling, limits: Limits) -> Sequence {
        let mut counts = Counts { in_prompt: vec![false; vocab], in_output: vec![0; vocab] };
        for &id in prompt {
            counts.in_prompt[id as usize] = true;
        }
        let end = if prompt.len() >= limits.context {
            Some(End::Context)
        } else if limits.max_tokens == 0 {
            Some(End::Length)
        } else {
            None
        };
        Sequence { history: prompt.to_vec(), prompt_len: prompt.len(), length, sampling, limits, counts, end }
    }

    pub fn root(&self) -> u32 {
        *self.history.last().expect("a prompt has at least one token")
    }

    pub fn output(&self) -> &[u32] {
        &self.history[self.prompt_len..]
    }

    /// Samples row i of `logits` ([drafts.len() + 1, vocab]) with the ordinary sampler, accepts while the sample equals
    /// draft i, and appends the samples up to the first end. Rows after the first wrong draft are not looked at: their
    /// logits mean nothing.
    pub fn accept(&mut self, logits: &mut [f32], drafts: &[u32]) -> Record {
        let vocab = self.counts.in_output.len();
        let mut record = Record { tokens: Vec::new(), accepted: 0, drafted: drafts.len(), ngram: 0, end: self.end };
        if self.end.is_some() {
            return record;
        }
        for (i, row) in logits.chunks_exact_mut(vocab).take(drafts.len() + 1).enumerate() {
            // Earlier tokens of this block are in `counts` already: they were accepted, so they equal the drafts.
            let token = Sampler {
                sampling: &self.sampling,
                counts: &self.counts,
                end_ids: &self.limits.end_ids,
                position: self.history.len(),
                output_len: self.history.len() - self.prompt_len,
            }
            .choose(row);
            record.tokens.push(token);
            self.history.push(token);
            self.counts.in_output[token as usize] += 1;
            self.length += 1;
            self.end = self.end_after(token);
            let matches = drafts.get(i) == Some(&token);
            record.accepted += matches as usize;
            if self.end.is_some() || !matches {
                break;
            }
        }
        record.end = self.end;
        record
    }

    fn end_after(&self, token: u32) -> Option<End> {
        if self.limits.end_ids.contains(&token) {
            Some(End::Eos(token))
        } else if self.history.len() - self.prompt_len >= self.limits.max_tokens {
            Some(End::Length)
        } else if self.history.len() >= self.limits.context {
            Some(End::Context)
        } else {
            None
        }
    }

    /// Forgets every token after the first `n` of the history, as if they had never been sampled.
    pub fn truncate(&mut self, n: usize) {
        assert!(
            n >= self.prompt_len && n <= self.history.len(),
            "cannot truncate {} tokens to {n}",
            self.history.len()
        );
        for &id in &self.history[n..] {
            self.counts.in_output[id as usize] -= 1;
        }
        self.history.truncate(n);
        self.length = self.length.min(n.saturating_sub(1));
        self.end = None;
    }
}
