//! Choosing a token from logits: penalties, bias, temperature, top-k, top-p, min-p, and noise that depends only on
//! (seed, position, token id).
//!
//! This is the reference arm of the sampling inside `Step::Accept`; kernels/sample.cu computes the same. Because the noise is keyed by
//! position, a token does not depend on how many rows were sampled together: that is what makes speculation invisible in the text.
use anyhow::{bail, Result};

/// What a user may ask of sampling. `Sampling::default()` is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token; 1 samples the model's own distribution.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set whose probability reaches p; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens at least this fraction as likely as the best; 0 keeps all.
    pub min_p: f32,
    pub seed: u64,
    /// Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted once from tokens in the output.
    pub presence_penalty: f32,
    /// Subtracted for every occurrence in the output.
    pub frequency_penalty: f32,
    /// Added to the logits of these ids; negative infinity bans a token.
    pub logit_bias: Vec<(u32, f32)>,
    /// End tokens are banned until the output has this many tokens.
    pub min_tokens: usize,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            min_tokens: 0,
        }
    }
}

/// Most entries of a logit bias list; the device keeps them in a table of this size.
pub const MAX_LOGIT_BIAS: usize = 1024;

impl Sampling {
    /// Refuses values outside their range, with the range in the message.
    pub fn check(&self, vocab: usize) -> Result<()> {
        let range = |name: &str, value: f32, low: f32, high: f32| {
            if value.is_finite() && (low..=high).contains(&value) {
                return Ok(());
            }
            let high = if high == f32::MAX { "any finite number".to_string() } else { high.to_string() };
            bail!("{name} {value}: expected a number from {low} to {high}")
        };
        range("temperature", self.temperature, 0.0, f32::MAX)?;
        range("top-p", self.top_p, 0.0, 1.0)?;
        range("min-p", self.min_p, 0.0, 1.0)?;
        range("presence-penalty", self.presence_penalty, -100.0, 100.0)?;
        range("frequency-penalty", self.frequency_penalty, -100.0, 100.0)?;
        if !(self.repetition_penalty.is_finite() && self.repetition_penalty > 0.0) {
            bail!("repetition-penalty {}: expected a number above 0 (1 is off)", self.repetition_penalty);
        }
        if self.logit_bias.len() > MAX_LOGIT_BIAS {
            bail!("logit-bias has {} entries: at most {MAX_LOGIT_BIAS} are supported", self.logit_bias.len());
        }
        for &(id, x) in &self.logit_bias {
            if id as usize >= vocab {
                bail!("logit-bias for token {id}: the vocabulary has ids 0 to {}", vocab - 1);
            }
            if x.is_nan() || x == f32::INFINITY {
                bail!("logit-bias {id}={x}: expected a finite number or -inf");
            }
        }
        Ok(())
    }
}

/// What penalties look at: which ids the prompt holds and how often the output holds each.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    pub in_prompt: Vec<bool>, // [vocab]
    pub in_output: Vec<u32>,  // [vocab]
}

/// One choice. `position` is the absolute position of the token being chosen, `output_len` the number of output tokens before it.
pub struct Choice<'a> {
    pub sampling: &'a Sampling,
    pub counts: &'a Counts,
    pub end_ids: &'a [u32],
    pub position: usize,
    pub output_len: usize,
}

impl Choice<'_> {
    /// `logits` is [vocab]; it is used up.
    pub fn choose(&self, logits: &mut [f32]) -> u32 {
        self.adjust(logits);
        let (best, max) = greedy(logits);
        if self.sampling.temperature == 0.0 {
            return best;
        }
        // Every z is at most 0, so that no temperature overflows.
        for l in logits.iter_mut() {
            *l = (*l - max) / self.sampling.temperature;
        }
        let z = logits;
        let cut = self.cut(z);
        let mut chosen = (f32::NEG_INFINITY, best);
        for (id, &z) in z.iter().enumerate() {
            if !cut.keeps(z, id as u32) {
                continue;
            }
            let score = z + gumbel(self.sampling.seed, self.position as u64, id as u32);
            if score > chosen.0 {
                chosen = (score, id as u32);
            }
        }
        chosen.1
    }

    /// Penalties, bias and banned end tokens, in place.
    fn adjust(&self, logits: &mut [f32]) {
        let s = self.sampling;
        if s.repetition_penalty != 1.0 || s.presence_penalty != 0.0 || s.frequency_penalty != 0.0 {
            for (id, l) in logits.iter_mut().enumerate() {
                let in_output = self.counts.in_output[id];
                if in_output == 0 && !self.counts.in_prompt[id] {
                    continue;
                }
                *l = if *l > 0.0 { *l / s.repetition_penalty } else { *l * s.repetition_penalty };
                if in_output > 0 {
                    *l = *l - s.presence_penalty - in_output as f32 * s.frequency_penalty;
                }
            }
        }
        for &(id, x) in &s.logit_bias {
            logits[id as usize] += x;
        }
        if self.output_len < s.min_tokens {
            for &id in self.end_ids {
                if let Some(l) = logits.get_mut(id as usize) {
                    *l = f32::NEG_INFINITY;
                }
            }
        }
    }

    /// The filters as one threshold in the order (z descending, id ascending). The best token is always kept.
    fn cut(&self, z: &[f32]) -> Cut {
        let s = self.sampling;
        let mut cut = Cut { z: f32::NEG_INFINITY, id: u32::MAX };
        let limit_k = s.top_k > 0 && s.top_k < z.len();
        if limit_k || s.top_p < 1.0 {
            let mut order: Vec<u32> = (0..z.len() as u32).collect();
            order.sort_unstable_by(|&a, &b| z[b as usize].total_cmp(&z[a as usize]).then(a.cmp(&b)));
            if limit_k {
                order.truncate(s.top_k);
            }
            if s.top_p < 1.0 {
                let total: u64 = order.iter().map(|&id| mass(z[id as usize])).sum();
                // Fixed point on both sides: the cut does not depend on the order of a sum.
                let wanted = (total as f64 * s.top_p as f64).ceil() as u64;
                let mut sum = 0u64;
                let kept = order.iter().position(|&id| {
                    sum += mass(z[id as usize]);
                    sum >= wanted
                });
                order.truncate(kept.map_or(order.len(), |k| k + 1));
            }
            let last = *order.last().expect("at least the best token is kept");
            cut = Cut { z: z[last as usize], id: last };
        }
        if s.min_p > 0.0 {
            let least = s.min_p.ln();
            if least > cut.z {
                cut = Cut { z: least, id: u32::MAX };
            }
        }
        cut
    }
}

/// Tokens at or before (z, id) in the order (z descending, id ascending) are kept; banned ones never are.
struct Cut {
    z: f32,
    id: u32,
}

impl Cut {
    fn keeps(&self, z: f32, id: u32) -> bool {
        z > f32::NEG_INFINITY && (z > self.z || (z == self.z && id <= self.id))
    }
}

/// exp(z) for z <= 0 as a fixed-point number with 40 bits behind the point.
fn mass(z: f32) -> u64 {
    (z.exp() * (1u64 << 40) as f32).round_ties_even() as u64
}

/// The best logit and its lowest id; NaN never wins.
pub fn greedy(logits: &[f32]) -> (u32, f32) {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &l) in logits.iter().enumerate() {
        if l > best.1 {
            best = (id as u32, l);
        }
    }
    best
}

/// Gumbel noise of one token: -ln(e) with e exponential, from 32 random bits that depend on (seed, position, id) only.
pub fn gumbel(seed: u64, position: u64, id: u32) -> f32 {
    let counter = [id / 4, position as u32, (position >> 32) as u32, 0x766f_6c6c];
    let bits = philox(counter, [seed as u32, (seed >> 32) as u32])[(id % 4) as usize];
    // v = (bits + 1/2) / 2^32; e = -ln(1 - v), with 1 - v formed exactly so that no tail is lost to rounding.
    let rest = ((1u64 << 32) - bits as u64) as f32 - 0.5;
    let e = -(rest * (1.0 / 4294967296.0)).ln();
    -e.max(f32::MIN_POSITIVE).ln()
}

/// Philox4x32-10 (Salmon et al. 2011): a counter-based generator.
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = counter[0] as u64 * 0xD251_1F53;
        let b = counter[2] as u64 * 0xCD9E_8D57;
        counter = [(b >> 32) as u32 ^ counter[1] ^ key[0], b as u32, (a >> 32) as u32 ^ counter[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}
