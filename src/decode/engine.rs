//! The host side of decoding: what is reused of the cache, prefill in chunks, passes queued and their records read,
//! ends.
//!
//! The engine knows tokens only; text, stop strings and terminals are the caller's, who sees each block of tokens and
//! may stop. What a pass computes is the backend's: the f32 reference or CUDA graphs.
use super::backend::{Backend, Counters, StepTime};
use super::policy::Costs;
use super::sample::Sampling;
use super::sequence::{End, Limits};
use super::speculate::{Behind, Cycle, Drafting, Source, Speculation, Statistics};
use anyhow::{bail, Result};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

pub struct Request<'a> {
    pub prompt: &'a [u32],
    pub sampling: &'a Sampling,
    pub end_ids: &'a [u32],
    /// None: until the context is full.
    pub max_tokens: Option<usize>,
}

/// What the caller is told while an answer is made.
pub enum Event<'a> {
    Prefilled { done: usize, total: usize },
    Tokens(&'a [u32]),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Go,
    /// Keep the first `keep` tokens of this block, forget the rest, and end.
    Stop {
        keep: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    Eos(u32),
    Length,
    Context,
    /// The caller said so: a stop string or an interrupt.
    Stopped,
}

/// One pass as the host saw it: tokens it gave and the time since the previous record.
#[derive(Clone, Copy, Debug)]
pub struct PassTime {
    pub tokens: usize,
    pub time: Duration,
}

pub struct Answer {
    pub tokens: Vec<u32>,
    pub finish: Finish,
    /// Prompt rows taken from the cache, and computed.
    pub reused: usize,
    pub prefilled: usize,
    /// From the call to the end of prefill, and to the first token.
    pub prefill_time: Duration,
    pub first_token_time: Duration,
    /// Every verify pass in order. The first includes the wait for prefill's tail.
    pub passes: Vec<PassTime>,
}

pub struct Engine {
    backend: Box<dyn Backend>,
    /// Tokens whose rows the cache holds, in order.
    cached: Vec<u32>,
    speculation: Option<Speculation>,
    paused: bool,
}

impl Engine {
    /// With drafting on, the passes are timed first (Probe::measure).
    pub fn new(mut backend: Box<dyn Backend>, drafting: Drafting) -> Result<Engine> {
        let speculation = if drafting.on() { Some(Speculation::new(drafting, backend.measure()?)) } else { None };
        Ok(Engine { backend, cached: Vec::new(), speculation, paused: false })
    }

    pub fn context(&self) -> usize {
        self.backend.context()
    }

    pub fn counters(&self) -> Counters {
        self.backend.counters()
    }

    /// See `Probe::time_verify`.
    pub fn time_verify(&mut self, width: usize, depth: usize, n: usize) -> Result<Vec<f64>> {
        self.clear();
        self.backend.time_verify(width, depth, n)
    }

    /// See `Probe::experts_used`.
    pub fn experts_used(&mut self, width: usize, depth: usize) -> Result<Option<f64>> {
        self.clear();
        self.backend.experts_used(width, depth)
    }

    /// See `Probe::profile`.
    pub fn profile(&mut self, depth: usize) -> Result<Vec<StepTime>> {
        self.clear();
        self.backend.profile(depth)
    }

    /// None without drafting.
    pub fn statistics(&self) -> Option<&Statistics> {
        self.speculation.as_ref().map(|s| &s.statistics)
    }

    pub fn reset_statistics(&mut self) {
        if let Some(s) = &mut self.speculation {
            s.statistics = Statistics::default();
        }
    }

    /// Times of the passes as the policy knows them now. None without drafting.
    pub fn costs(&self) -> Option<&Costs> {
        self.speculation.as_ref().map(|s| &s.costs)
    }

    /// Plain decoding until it is resumed: for comparisons.
    pub fn pause_drafting(&mut self, paused: bool) {
        self.paused = paused;
    }

    /// Given once: the drafter is hardly ever right, and what may be the cause.
    pub fn take_warning(&mut self) -> Option<String> {
        self.speculation.as_mut().and_then(Speculation::warning)
    }

    /// Forgets the cache.
    pub fn clear(&mut self) {
        self.cached.clear();
    }

    /// Answers one prompt. Rows of a common prefix with the previous call are reused.
    pub fn generate(&mut self, request: &Request, on_event: &mut dyn FnMut(Event) -> Flow) -> Result<Answer> {
        let start = Instant::now();
        let context = self.backend.context();
        let prompt = request.prompt;
        if prompt.is_empty() {
            bail!("the prompt is empty: it has no tokens");
        }
        if prompt.len() > context {
            bail!("the prompt has {} tokens, the context holds {context}: shorten it or raise --context", prompt.len());
        }
        let vocab = self.backend.vocab();
        if let Some(&id) = prompt.iter().find(|&&id| id as usize >= vocab) {
            bail!("token {id} in the prompt: the model has ids 0 to {}", vocab - 1);
        }
        request.sampling.check(vocab)?;

        // The row of the last common token is computed again: a drafter's row there depends on the token after it.
        let common = self.cached.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let keep = common.saturating_sub(1).min(prompt.len() - 1);
        let max_tokens = request.max_tokens.unwrap_or(usize::MAX);
        let limits = Limits { end_ids: request.end_ids.to_vec(), max_tokens, context };
        self.cached.truncate(keep);
        self.backend.begin(prompt, keep, request.sampling, &limits)?;
        let mut answer = Answer {
            tokens: Vec::new(),
            finish: Finish::Length,
            reused: keep,
            prefilled: 0,
            prefill_time: Duration::ZERO,
            first_token_time: Duration::ZERO,
            passes: Vec::new(),
        };
        if max_tokens == 0 {
            return Ok(answer);
        }
        if prompt.len() == context {
            answer.finish = Finish::Context;
            return Ok(answer);
        }

        // All rows but the last token's, which goes through the first verify pass.
        let total = prompt.len() - 1 - keep;
        for chunk in prompt[keep..prompt.len() - 1].chunks(self.backend.prefill_rows()) {
            self.backend.prefill(chunk)?;
            self.cached.extend_from_slice(chunk);
            answer.prefilled += chunk.len();
            if let Flow::Stop { .. } = on_event(Event::Prefilled { done: answer.prefilled, total }) {
                answer.finish = Finish::Stopped;
                return Ok(answer);
            }
        }
        answer.prefill_time = start.elapsed();
        self.decode(prompt, max_tokens, start, &mut answer, on_event)?;
        self.backend.truncate(prompt.len() + answer.tokens.len())?;
        // The last token's row is not in the cache; neither is the prompt's last when nothing came after it.
        self.cached.push(prompt[prompt.len() - 1]);
        self.cached.extend_from_slice(&answer.tokens);
        self.cached.pop();
        Ok(answer)
    }

    /// Cycles until an end. The host is one pass ahead: it queues what follows a verify pass before it reads that
    /// pass's record.
    fn decode(
        &mut self,
        prompt: &[u32],
        max_tokens: usize,
        start: Instant,
        answer: &mut Answer,
        on_event: &mut dyn FnMut(Event) -> Flow,
    ) -> Result<()> {
        let mut speculation = if self.paused { None } else { self.speculation.as_mut() };
        let mut last = Instant::now();
        // Verify passes whose records are unread, and the drafts that were made for the one behind them.
        let mut queued = VecDeque::new();
        let mut made = 0;
        let end_of_room = max_tokens.min(self.backend.context() - prompt.len());
        self.backend.verify(1)?;
        queued.push_back(Cycle::PLAIN);
        answer.finish = loop {
            // A pass with k drafts gives up to k + 1 tokens: no more drafts than tokens that may still come, less one.
            let room = |done: usize| (end_of_room - done).saturating_sub(1);
            if made == 0 {
                let room = room(answer.tokens.len()).saturating_sub(queued.len());
                let behind = speculation.as_ref().map_or(Behind::Plain, |s| s.behind(room));
                match behind {
                    Behind::Drafts(drafts) => {
                        self.backend.draft(drafts)?;
                        made = drafts;
                    }
                    Behind::Plain => {
                        while queued.len() < self.backend.queue_depth() {
                            self.backend.verify(1)?;
                            queued.push_back(Cycle::PLAIN);
                        }
                    }
                    Behind::Nothing => {}
                }
            }
            let record = self.backend.record()?;
            let cycle = queued.pop_front().expect("a pass was queued above");
            let now = Instant::now();
            if answer.passes.is_empty() {
                answer.first_token_time = now - start;
            }
            let time = now - last;
            last = now;
            if let Some(speculation) = &mut speculation {
                speculation.observe(&cycle, &record, (!answer.passes.is_empty()).then_some(time));
            }
            answer.passes.push(PassTime { tokens: record.tokens.len(), time });
            let before = answer.tokens.len();
            answer.tokens.extend_from_slice(&record.tokens);
            if let Flow::Stop { keep } = on_event(Event::Tokens(&record.tokens)) {
                answer.tokens.truncate(before + keep);
                break Finish::Stopped;
            }
            match record.end {
                None => {}
                Some(End::Eos(id)) => break Finish::Eos(id),
                Some(End::Length) => break Finish::Length,
                Some(End::Context) => break Finish::Context,
            }
            if !queued.is_empty() {
                continue;
            }
            let mut next = Cycle::PLAIN;
            if let Some(speculation) = &mut speculation {
                let room = room(answer.tokens.len());
                if made > 0 {
                    next = Cycle { source: Source::Eagle, drafts: made.min(room), drafted: made };
                } else {
                    let scripted;
                    (next, scripted) = speculation.next(&record, room, &[prompt, &answer.tokens]);
                    if let Some(drafts) = scripted {
                        self.backend.set_drafts(&drafts)?;
                    }
                }
                speculation.statistics.host_ms += last.elapsed().as_secs_f64() * 1e3;
            }
            self.backend.verify(1 + next.drafts)?;
            queued.push_back(next);
            made = 0;
        };
        // Passes queued beyond the end did nothing (the sequence was over) or are undone by the caller's truncate.
        for _ in queued {
            self.backend.record()?;
        }
        Ok(())
    }
}
