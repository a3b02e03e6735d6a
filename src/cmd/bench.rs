//! `volley bench`: time to the first token and time per token at prompt lengths and depths, and the share of the memory's read rate.
//!
//! Fixed token ids, greedy, no end tokens, no tokenizer. The read rate is measured in the same run: all threads add up a buffer too
//! large for any cache. A row's bytes per token are what the plan says must be read.
use super::{shown_bytes, stats, tell, Model, ModelOptions, COMMIT};
use crate::decode::{sample::philox, Answer, Event, Flow, Request, Sampling};
use crate::error;
use anyhow::{bail, Result};
use rayon::prelude::*;
use serde_json::json;
use std::io::{self, Write};
use std::time::Instant;

pub struct Options {
    /// Prompt lengths and depths (tokens in the cache before the prompt); every pair is a row.
    pub prompts: Vec<usize>,
    pub depths: Vec<usize>,
    /// Tokens generated in each run.
    pub generate: usize,
    pub repeat: usize,
    pub json: bool,
}

pub fn bench(model: &ModelOptions, options: &Options) -> Result<u8> {
    if options.prompts.contains(&0) {
        bail!("prompt-tokens 0: expected at least 1, the first token comes from a prompt");
    }
    let longest = |list: &[usize]| list.iter().copied().max().unwrap_or(0);
    let needed = longest(&options.prompts).checked_add(longest(&options.depths)).and_then(|n| n.checked_add(options.generate));
    let Some(needed) = needed else { bail!("prompt-tokens, depth and generate: the sum is too large") };
    let model_options = ModelOptions { context: model.context.or(Some(needed)), ..model.clone() };
    let mut model = Model::load(&model_options)?;
    if needed > model.engine.context() {
        bail!("depth, prompt and answer have {needed} tokens, the context holds {}: lower them or raise --context", model.engine.context());
    }

    let read_rate = read_rate();
    let mut out = io::stdout();
    if !options.json {
        writeln!(
            out,
            "{} {}, {} with {} threads, reads {}/s, commit {COMMIT}",
            model.name,
            model.dtype,
            model.device,
            rayon::current_num_threads(),
            shown_bytes(read_rate as u64)
        )?;
        writeln!(out, " depth  prompt  first token  prompt tok/s  per token p50       p90       p99    tok/s         read  of rate  tokens hash")?;
    }
    for &depth in &options.depths {
        for &prompt in &options.prompts {
            tell(format_args!("depth {depth}, prompt {prompt}: {} runs after one to warm up", options.repeat));
            let row = Row::measure(&mut model, depth, prompt, options)?;
            let line = if options.json { row.json(&model, options, read_rate).to_string() } else { row.text(read_rate) };
            writeln!(out, "{line}")?;
        }
    }
    Ok(error::FINE)
}

/// What the runs of one depth and prompt length gave.
struct Row {
    depth: usize,
    prompt: usize,
    first_token_ms: Vec<f64>,
    /// One list a run: every token but the first, in ms.
    token_ms: Vec<Vec<f64>>,
    /// Read by an average pass of these runs.
    bytes_per_token: f64,
    hash: u64,
}

impl Row {
    fn measure(model: &mut Model, depth: usize, prompt: usize, options: &Options) -> Result<Row> {
        let ids = token_ids(depth + prompt, model.config.vocab);
        let mut row = Row { depth, prompt, first_token_ms: Vec::new(), token_ms: Vec::new(), bytes_per_token: 0.0, hash: 0 };
        for run in 0..=options.repeat {
            model.engine.clear();
            if depth > 0 {
                generate(model, &ids[..depth], 1)?;
            }
            let answer = generate(model, &ids, options.generate)?;
            let hash = hash(&answer.tokens);
            if run == 0 {
                row.hash = hash;
                row.bytes_per_token = stats::pass_bytes(model, ids.len(), &answer);
                continue;
            }
            if hash != row.hash {
                return Err(error::internal(format!("depth {depth}, prompt {prompt}: run {run} gave other tokens than the run before")));
            }
            row.first_token_ms.push(stats::ms(answer.first_token_time));
            row.token_ms.push(stats::token_ms(&answer));
        }
        Ok(row)
    }

    /// Median over all tokens of all runs, and two percentiles; ms.
    fn percentiles(&self) -> [f64; 3] {
        let all = self.token_ms.concat();
        [50.0, 90.0, 99.0].map(|p| stats::percentile(&all, p))
    }

    /// Bytes per second at the median.
    fn read(&self) -> f64 {
        let p50 = self.percentiles()[0];
        if p50 > 0.0 {
            self.bytes_per_token / (p50 / 1e3)
        } else {
            0.0
        }
    }

    fn text(&self, read_rate: f64) -> String {
        let first = stats::percentile(&self.first_token_ms, 50.0);
        let [p50, p90, p99] = self.percentiles();
        format!(
            "{:6}  {:6}  {first:8.1} ms  {:12.1}  {p50:10.2} ms  {p90:8.2}  {p99:8.2}  {:7.1}  {:>9}/s  {:5.0} %  {:08x}",
            self.depth,
            self.prompt,
            self.prompt as f64 / (first / 1e3),
            stats::rate(&self.token_ms.concat()),
            shown_bytes(self.read() as u64),
            100.0 * self.read() / read_rate,
            self.hash >> 32
        )
    }

    fn json(&self, model: &Model, options: &Options, read_rate: f64) -> serde_json::Value {
        let first = stats::percentile(&self.first_token_ms, 50.0);
        let [p50, p90, p99] = self.percentiles();
        json!({
            "model": model.name, "dtype": model.dtype, "device": model.device, "threads": rayon::current_num_threads(), "commit": COMMIT,
            "version": env!("CARGO_PKG_VERSION"), "optimised": !cfg!(debug_assertions),
            "depth": self.depth, "prompt_tokens": self.prompt, "generate": options.generate, "repeat": options.repeat,
            "first_token_ms": first, "prompt_tokens_per_s": self.prompt as f64 / (first / 1e3),
            "token_ms": { "p50": p50, "p90": p90, "p99": p99 }, "tokens_per_s": stats::rate(&self.token_ms.concat()),
            "bytes_per_token": self.bytes_per_token, "read_gb_s": self.read() / 1e9,
            "read_rate_gb_s": read_rate / 1e9, "share_of_read_rate": self.read() / read_rate,
            "tokens_hash": format!("{:016x}", self.hash),
            "samples": { "first_token_ms": self.first_token_ms, "token_ms": self.token_ms },
        })
    }
}

fn generate(model: &mut Model, prompt: &[u32], max_tokens: usize) -> Result<Answer> {
    let request = Request { prompt, sampling: &Sampling::default(), end_ids: &[], max_tokens: Some(max_tokens) };
    model.engine.generate(&request, &mut |_: Event| Flow::Go)
}

/// Ids that look like text to the hardware: spread over the vocabulary, the same on every machine.
fn token_ids(n: usize, vocab: usize) -> Vec<u32> {
    (0..n as u32).map(|i| philox([i, 0, 0, 0], [0, 0])[0] % vocab as u32).collect()
}

/// FNV-1a of the ids.
fn hash(tokens: &[u32]) -> u64 {
    tokens.iter().flat_map(|id| id.to_le_bytes()).fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x100_0000_01b3))
}

/// Bytes per second at which all threads together read memory: the best of five sums over 1 GiB.
fn read_rate() -> f64 {
    const WORDS: usize = (1 << 30) / 8;
    // Written by the threads that read it, and not zero: untouched zero pages are all one page.
    let buffer: Vec<u64> = (0..WORDS as u64).into_par_iter().collect();
    let chunk = WORDS.div_ceil(rayon::current_num_threads() * 8);
    let mut best = 0.0f64;
    for _ in 0..5 {
        let start = Instant::now();
        let sum = buffer.par_chunks(chunk).map(|chunk| chunk.iter().fold(0u64, |sum, &x| sum.wrapping_add(x))).reduce(|| 0, u64::wrapping_add);
        std::hint::black_box(sum);
        best = best.max((WORDS * 8) as f64 / start.elapsed().as_secs_f64());
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes() {
        // FNV-1a of four zero bytes, by hand: the offset basis times the prime, four times.
        let zeros = (0..4).fold(0xcbf2_9ce4_8422_2325u64, |h, _| h.wrapping_mul(0x100_0000_01b3));
        assert_eq!(hash(&[0]), zeros);
        assert_ne!(hash(&[1, 2]), hash(&[2, 1]));
        let ids = token_ids(1000, 512);
        assert!(ids.iter().all(|&id| id < 512) && ids[..500] == token_ids(500, 512) && ids[0] != ids[1]);
    }
}
