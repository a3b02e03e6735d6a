//! Percentiles and rates, and the line of statistics after an answer.
use super::load::Model;
use super::terminal::shown_bytes;
use crate::decode::{Answer, Statistics};
use std::time::Duration;

/// Percentile `p` (0 to 100) of the samples, nearest rank; 0 without samples.
pub fn percentile(samples: &[f64], p: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (p / 100.0 * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// CPU time that this thread has used, in microseconds.
pub fn thread_cpu_us() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // Sound: the call fills the struct; this clock exists since Linux 2.6.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Milliseconds per token of an answer, one sample a token. The first pass is left out: it waits for the prompt.
pub fn token_ms(answer: &Answer) -> Vec<f64> {
    let passes = answer.passes.iter().skip(1);
    passes.flat_map(|pass| std::iter::repeat_n(ms(pass.time) / pass.tokens.max(1) as f64, pass.tokens)).collect()
}

/// Tokens per second of milliseconds per token; 0 without samples.
pub fn rate(token_ms: &[f64]) -> f64 {
    let sum: f64 = token_ms.iter().sum();
    if sum > 0.0 {
        1e3 * token_ms.len() as f64 / sum
    } else {
        0.0
    }
}

/// Bytes that the passes after the first read, on average per pass, at an answer to `prompt` tokens.
pub fn pass_bytes(model: &Model, prompt: usize, answer: &Answer) -> f64 {
    model.decode.bytes(prompt + answer.tokens.len() / 2, model.storage) as f64
}

/// `38 tokens, 312.4 tok/s (p50 3.18 ms, p99 3.40 ms), 4.10 TB/s; prompt 512 tokens in 41 ms`; with drafting the accept
/// length instead of the bytes, which are those of plain decoding.
pub fn line(model: &Model, prompt: usize, answer: &Answer, statistics: Option<&Statistics>) -> String {
    let mut line = format!("{} tokens", answer.tokens.len());
    let samples = token_ms(answer);
    if !samples.is_empty() {
        let seconds: f64 = answer.passes.iter().skip(1).map(|pass| pass.time.as_secs_f64()).sum();
        let read = pass_bytes(model, prompt, answer) * (answer.passes.len() - 1) as f64 / seconds;
        let (p50, p99) = (percentile(&samples, 50.0), percentile(&samples, 99.0));
        line += &format!(", {:.1} tok/s (p50 {p50:.2} ms, p99 {p99:.2} ms), ", rate(&samples));
        line += &match statistics {
            Some(s) => format!("accept length {:.2}", s.accept_length()),
            None => format!("{}/s", shown_bytes(read as u64)),
        };
    }
    line += &format!("; prompt {prompt} tokens");
    if answer.reused > 0 {
        line += &format!(", {} of them from the cache,", answer.reused);
    }
    line += &format!(" in {:.0} ms", ms(answer.first_token_time));
    line
}

/// What drafts were worth: by position, by tokens a cycle, and where the time went.
pub fn speculation(s: &Statistics) -> String {
    let shares: Vec<String> = s.acceptance().iter().map(|a| format!("{a:.2}")).collect();
    let cycles = s.cycles.max(1) as f64;
    format!(
        "drafts: accept length {:.2} in {} cycles ({} by the drafter, {} by n-gram); accepted by position {}; cycles by tokens {:?}; ms a cycle: \
         draft {:.2}, verify {:.2}, host {:.3}",
        s.accept_length(),
        s.cycles,
        s.eagle_cycles,
        s.ngram_cycles,
        if shares.is_empty() { "none tried".into() } else { shares.join(" ") },
        s.histogram,
        s.draft_ms / cycles,
        s.verify_ms / cycles,
        s.host_ms / cycles
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles() {
        let samples: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!([0.0, 50.0, 90.0, 99.0, 100.0].map(|p| percentile(&samples, p)), [1.0, 50.0, 90.0, 99.0, 100.0]);
        assert_eq!(percentile(&[3.0], 99.0), 3.0);
        assert_eq!(percentile(&[], 50.0), 0.0);
        assert_eq!((rate(&[10.0, 30.0]), rate(&[])), (50.0, 0.0));
    }
}
