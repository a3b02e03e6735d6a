//! `volley bench`: time to the first token and time per token at prompt lengths and depths, and the share of the memory's read rate.
//!
//! Fixed token ids, greedy, no end tokens, no tokenizer. The read rate is measured in the same run: on the CPU all threads add up a buffer
//! too large for any cache, a GPU streams one. A row's bytes per token are what the plan says must be read.
use super::{shown_bytes, stats, tell, Model, ModelOptions, COMMIT};
use crate::decode::{sample::philox, Answer, Event, Flow, Request, Sampling};
use crate::error;
use crate::gpu;
use crate::model::plan::MAX_WIDTH;
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
    /// Widths of verify passes to time at each depth.
    pub widths: Vec<usize>,
    /// Where the time of a token goes at each depth.
    pub profile: bool,
    pub json: bool,
}

pub fn bench(model: &ModelOptions, options: &Options) -> Result<u8> {
    if options.prompts.contains(&0) {
        bail!("prompt-tokens 0: expected at least 1, the first token comes from a prompt");
    }
    if let Some(width) = options.widths.iter().find(|w| !(1..=MAX_WIDTH).contains(*w) || (**w > 8 && **w < MAX_WIDTH)) {
        bail!("widths {width}: expected numbers from 1 to 8, or {MAX_WIDTH}");
    }
    let longest = |list: &[usize]| list.iter().copied().max().unwrap_or(0);
    let needed = longest(&options.prompts).checked_add(longest(&options.depths)).and_then(|n| n.checked_add(options.generate));
    let Some(needed) = needed else { bail!("prompt-tokens, depth and generate: the sum is too large") };
    let model_options = ModelOptions { context: model.context.or(Some(needed)), ..model.clone() };
    let mut model = Model::load(&model_options)?;
    if needed > model.engine.context() {
        bail!("depth, prompt and answer have {needed} tokens, the context holds {}: lower them or raise --context", model.engine.context());
    }

    let (read_rate, device) = if model.device == "cuda" {
        let gpu = gpu::open(model_options.gpu)?;
        (gpu::probe::read_ceiling(&gpu)?, gpu.info().name.clone())
    } else {
        (read_rate(), format!("cpu with {} threads", rayon::current_num_threads()))
    };
    let mut out = io::stdout();
    if !options.json {
        writeln!(
            out,
            "{} {}, {device}, reads {}/s, commit {COMMIT}",
            model.name,
            model.dtype,
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
        if !options.widths.is_empty() {
            widths(&mut model, depth, options, &mut out)?;
        }
        if options.profile {
            profile(&mut model, depth, options, read_rate, &mut out)?;
        }
    }
    if model.verbose > 0 {
        tell(format_args!("{}", serde_json::to_string(&model.engine.counters())?));
    }
    Ok(error::FINE)
}

/// Cost of a verify pass by its width, each against width 1.
fn widths(model: &mut Model, depth: usize, options: &Options, out: &mut impl Write) -> Result<()> {
    let mut one = None;
    for width in std::iter::once(1).chain(options.widths.iter().copied().filter(|&w| w != 1)) {
        let samples = model.engine.time_verify(width, depth, 10 * options.repeat)?;
        let p50 = stats::percentile(&samples, 50.0);
        let one = *one.get_or_insert(p50);
        if options.json {
            let row = json!({ "model": model.name, "device": model.device, "depth": depth, "width": width, "verify_ms": p50, "against_width_1": p50 / one, "samples": samples });
            writeln!(out, "{row}")?;
        } else {
            writeln!(out, "{depth:6}  verify of {width:2} rows  {p50:10.4} ms  {:6.3} x one row", p50 / one)?;
        }
    }
    Ok(())
}

/// Steps of one kind together: time, bytes, and the share of the read rate.
fn profile(model: &mut Model, depth: usize, options: &Options, read_rate: f64, out: &mut impl Write) -> Result<()> {
    for step in model.engine.profile(depth)? {
        let rate = step.bytes as f64 / (step.ms / 1e3).max(1e-9);
        if options.json {
            let row = json!({ "model": model.name, "device": model.device, "depth": depth, "step": step, "share_of_read_rate": rate / read_rate });
            writeln!(out, "{row}")?;
        } else {
            let each = 1e3 * step.ms / step.count as f64;
            let (bytes, share) = (shown_bytes(step.bytes), 100.0 * rate / read_rate);
            writeln!(out, "{depth:6}  {:22} {:4} x {each:8.2} us = {:8.4} ms  {bytes:>9}  {share:5.0} %", step.kind, step.count, step.ms)?;
        }
    }
    Ok(())
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
