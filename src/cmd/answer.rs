//! One answer: a prompt's ids in, text as it becomes visible out, and at the end what happened. `run` and `chat` are
//! two ways to show it.
//!
//! Decoding gives tokens; here they become text, stop strings are found, and Ctrl-C is noticed between passes.
use super::load::Session;
use super::options::AnswerOptions;
use super::terminal::tell;
use super::{signal, stats};
use crate::decode::{Answer, Event, Finish, Flow, Request, Sampling, Statistics};
use crate::text::{ChatOptions, Message, TextStream};
use anyhow::Result;
use serde_json::{json, Map, Value};
use std::io;
use std::time::{Duration, Instant};

pub struct Ask<'a> {
    pub prompt: &'a [u32],
    pub sampling: &'a Sampling,
    pub stops: &'a [String],
    pub max_tokens: Option<usize>,
    pub ignore_eos: bool,
}

/// What became visible: with a token, or at the end without one, when text was held back for a stop string that did not
/// come.
pub struct Piece<'a> {
    pub token: Option<u32>,
    /// Whole characters, possibly none.
    pub text: &'a str,
    /// Since the token before; since the start for the first one.
    pub time: Duration,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Ended {
    Eos(u32),
    Length,
    Context,
    Stop(String),
    Interrupt,
}

pub struct Reply {
    /// All that was shown.
    pub text: String,
    pub ended: Ended,
    pub prompt_tokens: usize,
    /// Tokens include the end token, and those of a stop string.
    pub answer: Answer,
    /// What drafts were worth in this answer; None without drafting.
    pub statistics: Option<Statistics>,
}

/// Makes an answer; `show` sees it piece by piece. Ctrl-C ends it early.
pub fn answer(session: &mut Session, ask: &Ask, show: &mut dyn FnMut(Piece) -> io::Result<()>) -> Result<Reply> {
    let _answering = signal::Answering::begin();
    let end_ids: Vec<u32> =
        if ask.ignore_eos { Vec::new() } else { session.end_ids.iter().map(|(id, _)| *id).collect() };
    let mut stream = TextStream::new(&session.tokenizer, ask.stops, false)?;
    let mut text = String::new();
    let mut stop = None;
    let mut failed = Ok(());
    let mut last = Instant::now();
    let request = Request { prompt: ask.prompt, sampling: ask.sampling, end_ids: &end_ids, max_tokens: ask.max_tokens };
    session.model.engine.reset_statistics();
    let result = session.model.engine.generate(&request, &mut |event| {
        let tokens = match event {
            Event::Tokens(tokens) => tokens,
            Event::Prefilled { .. } if signal::interrupted() => return Flow::Stop { keep: 0 },
            Event::Prefilled { .. } => return Flow::Go,
        };
        let time = last.elapsed() / tokens.len().max(1) as u32;
        last = Instant::now();
        for (i, &token) in tokens.iter().enumerate() {
            // An end token is never text, even where the tokenizer does not call it special.
            let pushed = if end_ids.contains(&token) { Default::default() } else { stream.push(&[token]) };
            text += &pushed.text;
            failed = show(Piece { token: Some(token), text: &pushed.text, time });
            if pushed.stop.is_some() || failed.is_err() {
                stop = pushed.stop;
                return Flow::Stop { keep: i + 1 };
            }
        }
        match signal::interrupted() {
            true => Flow::Stop { keep: tokens.len() },
            false => Flow::Go,
        }
    });
    failed?;
    let answer = result?;
    let rest = stream.finish();
    if !rest.is_empty() {
        text += &rest;
        show(Piece { token: None, text: &rest, time: last.elapsed() })?;
    }
    let ended = match (answer.finish, stop) {
        (Finish::Eos(id), _) => Ended::Eos(id),
        (Finish::Length, _) => Ended::Length,
        (Finish::Context, _) => Ended::Context,
        (Finish::Stopped, Some(hit)) => Ended::Stop(ask.stops[hit.stop].clone()),
        (Finish::Stopped, None) => Ended::Interrupt,
    };
    if let (Some(warning), Some(drafter)) = (session.model.engine.take_warning(), &session.model.drafter) {
        tell(format_args!("warning: {warning}; {drafter}"));
    }
    let statistics = session.model.engine.statistics().cloned();
    Ok(Reply { text, ended, prompt_tokens: ask.prompt.len(), answer, statistics })
}

/// The ids of a conversation that waits for the assistant.
pub fn chat_ids(session: &Session, messages: &[Message], no_think: bool) -> Result<Vec<u32>> {
    let mut variables = Map::new();
    if no_think {
        // Qwen's name of the switch, and Kimi's and DeepSeek's.
        variables.insert("enable_thinking".into(), false.into());
        variables.insert("thinking".into(), false.into());
    }
    session.tokenizer.encode_chat(messages, &ChatOptions { add_generation_prompt: true, variables })
}

/// The sampling of one answer, and its seed if it needs one: what was asked for, else a drawn one.
pub fn seeded(mut sampling: Sampling, seed: Option<u64>) -> (Sampling, Option<u64>) {
    if sampling.temperature == 0.0 {
        return (sampling, None);
    }
    sampling.seed = seed.unwrap_or_else(draw_seed);
    let seed = Some(sampling.seed);
    (sampling, seed)
}

/// A seed short enough to type again.
pub fn draw_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    // The hasher's keys are the system's random numbers.
    std::hash::RandomState::new().build_hasher().finish() >> 32
}

/// `seeded` for a person: a drawn seed is printed, so that the answer can be had again.
pub fn sampling(options: &AnswerOptions) -> (Sampling, Option<u64>) {
    let (sampling, seed) = seeded(options.sampling(), options.seed);
    if let (Some(seed), None) = (seed, options.seed) {
        tell(format_args!("seed: {seed}"));
    }
    (sampling, seed)
}

impl AnswerOptions {
    pub fn ask<'a>(&'a self, prompt: &'a [u32], sampling: &'a Sampling) -> Ask<'a> {
        Ask { prompt, sampling, stops: &self.stop, max_tokens: self.max_tokens, ignore_eos: self.ignore_eos }
    }
}

impl Reply {
    /// The last object of the JSON forms. `seed` is null where nothing was drawn at random.
    pub fn summary(&self, seed: Option<u64>) -> Value {
        let answer = &self.answer;
        let samples = stats::token_ms(answer);
        let us = |ms: f64| (ms * 1e3).round() as u64;
        let mut summary = Map::new();
        let mut put = |name: &str, value: Value| summary.insert(name.into(), value);
        match &self.ended {
            Ended::Eos(id) => {
                put("done", json!("eos"));
                put("eos_id", json!(id));
            }
            Ended::Stop(stop) => {
                put("done", json!("stop"));
                put("stop", json!(stop));
            }
            Ended::Length => drop(put("done", json!("length"))),
            Ended::Context => drop(put("done", json!("context"))),
            Ended::Interrupt => drop(put("done", json!("interrupt"))),
        }
        put("text", json!(self.text));
        put("tokens", json!(answer.tokens.len()));
        put("prompt_tokens", json!(self.prompt_tokens));
        put("reused_tokens", json!(answer.reused));
        put("prefilled_tokens", json!(answer.prefilled));
        put("seed", json!(seed));
        put("first_token_us", json!(us(stats::ms(answer.first_token_time))));
        let [p50, p90, p99] = [50.0, 90.0, 99.0].map(|p| us(stats::percentile(&samples, p)));
        put("per_token_us", json!({ "p50": p50, "p90": p90, "p99": p99 }));
        put("tokens_per_s", json!(stats::rate(&samples)));
        if let Some(s) = &self.statistics {
            put("accept_length", json!(s.accept_length()));
            put("speculation", json!(s));
        }
        Value::Object(summary)
    }
}
