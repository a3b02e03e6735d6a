//! Choosing a token from logits: penalties, bias, temperature, top-k, top-p, min-p, and noise that depends only on
//! (seed, position, token id).
//!
//! This is the reference arm of the sampling inside `Step::Accept`; kernels/sample.cu computes the same. Because the
//! noise is keyed by position, a token does not depend on how many rows were sampled together: that is what makes
//! speculation invisible in the text.
use anyhow::{bail, Result};
use std::collections::BTreeSet;

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
        let banned: BTreeSet<u32> =
            self.logit_bias.iter().filter(|(_, x)| *x == f32::NEG_INFINITY).map(|(id, _)| *id).collect();
        if banned.len() >= vocab {
            bail!("logit-bias bans all {vocab} tokens: expected one that is left");
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

/// One choice. `position` is the absolute position of the token being chosen, `output_len` the number of output tokens
/// before it.
pub struct Sampler<'a> {
    pub sampling: &'a Sampling,
    pub counts: &'a Counts,
    pub end_ids: &'a [u32],
    pub position: usize,
    pub output_len: usize,
}

impl Sampler<'_> {
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
                let wanted = top_p_target(total, s.top_p);
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

/// exp(z) * 2^40 for z <= 0, rounded to nearest even: a fixed-point number, so that sums do not depend on their order.
/// Bit for bit what kernels/sample.cuh computes.
fn mass(z: f32) -> u64 {
    if z.is_nan() || z <= -29.0 {
        return 0; // below 2^-41 everything rounds to 0
    }
    let n = (z * std::f32::consts::LOG2_E).round_ties_even();
    let r = n * 2.121_944_4e-4 + (n * -0.693_359_4 + z);
    let mut e = r * (1.0 / 5040.0) + 1.0 / 720.0;
    for c in [1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        e = r * e + c;
    }
    (e * f32::from_bits(((n as i32 + 40 + 127) as u32) << 23)).round_ties_even() as u64
}

/// The mass that top-p must reach: the least t >= 1 with t * 2^32 >= kept * round(p * 2^32). Exact.
fn top_p_target(kept: u64, top_p: f32) -> u64 {
    let p = (top_p as f64 * 4_294_967_296.0).round_ties_even() as u128;
    (((kept as u128 * p) + 0xffff_ffff) >> 32).max(1) as u64
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
    noise(philox(counter, [seed as u32, (seed >> 32) as u32])[(id % 4) as usize])
}

/// -ln(-ln(1 - v)), v = (bits + 1/2) / 2^32: from v itself where v is small, from 1 - v where that is small, so that no
/// tail is lost to rounding. Bit for bit what kernels/sample.cuh computes: only single f32 operations.
fn noise(bits: u32) -> f32 {
    let to_unit = 1.0 / 4_294_967_296.0f32;
    let e = if bits < 1_257_966_797 {
        -ln_1_plus(-((bits as f32 + 0.5) * to_unit))
    } else {
        -ln((!bits as f32 + 0.5) * to_unit)
    };
    -ln(e)
}

/// ln(1 + f) for f in [-0.2929, 0.4143]: 2 artanh(f / (2 + f)).
fn ln_1_plus(f: f32) -> f32 {
    let s = f / (2.0 + f);
    let w = s * s;
    let t = (((w * (1.0 / 9.0) + 1.0 / 7.0) * w + 1.0 / 5.0) * w + 1.0 / 3.0) * w + 1.0;
    (s + s) * t
}

/// ln(x), x positive and normal.
fn ln(x: f32) -> f32 {
    let bits = x.to_bits() as i32;
    let k = (bits - 0x3f35_04f3) >> 23;
    k as f32 * std::f32::consts::LN_2 + ln_1_plus(f32::from_bits((bits - k * (1 << 23)) as u32) - 1.0)
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The sampler from the definitions, in f64: which ids are kept (in order of preference), and the score of each.
    fn reference(logits: &[f32], s: &Sampling, position: usize) -> Vec<(u32, f64)> {
        let l: Vec<f64> = logits.iter().map(|&l| l as f64).collect();
        let mut order: Vec<u32> = (0..l.len() as u32).collect();
        order.sort_by(|&a, &b| l[b as usize].total_cmp(&l[a as usize]).then(a.cmp(&b)));
        if s.temperature == 0.0 {
            return vec![(order[0], 0.0)];
        }
        let max = l[order[0] as usize];
        let z = |id: u32| (l[id as usize] - max) / s.temperature as f64;
        if s.top_k > 0 {
            order.truncate(s.top_k);
        }
        if s.top_p < 1.0 {
            let total: f64 = order.iter().map(|&id| z(id).exp()).sum();
            let mut sum = 0.0;
            let n = order.iter().position(|&id| {
                sum += z(id).exp() / total;
                sum >= s.top_p as f64
            });
            order.truncate(n.map_or(order.len(), |n| n + 1));
        }
        order.retain(|&id| z(id) >= (s.min_p as f64).ln());
        order.into_iter().map(|id| (id, z(id) + gumbel(s.seed, position as u64, id) as f64)).collect()
    }

    fn counts(vocab: usize) -> Counts {
        Counts { in_prompt: vec![false; vocab], in_output: vec![0; vocab] }
    }

    fn choose(logits: &[f32], sampling: &Sampling, position: usize) -> u32 {
        let counts = counts(logits.len());
        Sampler { sampling, counts: &counts, end_ids: &[], position, output_len: 0 }.choose(&mut logits.to_vec())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        /// Logits on a coarse grid, so that there are ties and no near ties; probabilities that no sum of a few masses
        /// hits by accident.
        #[test]
        fn o12_choice_equals_the_slow_one(
            steps in prop::collection::vec(-40i32..40, 1..60),
            temperature in prop::sample::select(vec![0.0f32, f32::MIN_POSITIVE, 1e-9, 0.3, 1.0, 1.7, 1e9, f32::MAX]),
            top_k in prop::sample::select(vec![0usize, 1, 2, 7, 59, 1000]),
            top_p in prop::sample::select(vec![0.0f32, 0.1003, 0.5007, 0.9001, 1.0]),
            min_p in prop::sample::select(vec![0.0f32, 0.0501, 0.3001, 1.0]),
            seed in 0u64..1000, position in 0usize..100_000,
        ) {
            let logits: Vec<f32> = steps.iter().map(|&s| s as f32 / 4.0).collect();
            let sampling = Sampling { temperature, top_k, top_p, min_p, seed, ..Sampling::default() };
            sampling.check(logits.len()).unwrap();
            let kept = reference(&logits, &sampling, position);
            prop_assert!(!kept.is_empty());
            let chosen = choose(&logits, &sampling, position);
            let best = kept.iter().map(|k| k.1).fold(f64::NEG_INFINITY, f64::max);
            let score = kept.iter().find(|k| k.0 == chosen).map(|k| k.1);
            // Scores that differ by rounding only are a draw.
            prop_assert!(score.is_some_and(|s| best - s < 1e-4), "chose {} with {:?}, best of {:?}", chosen, score, kept);
        }
    }

    #[test]
    fn o12_ties_go_to_the_lowest_id() {
        let tied = [1.0, 3.0, 3.0, 3.0];
        assert_eq!(choose(&tied, &Sampling::default(), 0), 1);
        for (top_k, top_p, min_p) in [(1, 1.0, 0.0), (0, 0.0, 0.0)] {
            let sampling = Sampling { temperature: 5.0, top_k, top_p, min_p, ..Sampling::default() };
            assert!((0..50).all(|position| choose(&tied, &sampling, position) == 1));
        }
        // Nothing less than the best is kept by min-p 1, and all that equals it is.
        let sampling = Sampling { temperature: 5.0, min_p: 1.0, ..Sampling::default() };
        let mut seen: Vec<u32> = (0..200).map(|position| choose(&tied, &sampling, position)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, [1, 2, 3]);
    }

    /// Frequencies over many positions against softmax(logits / T); the wrong temperature must fail the same test.
    #[test]
    fn samples_have_the_distribution() {
        let logits = [2.0f32, 1.0, 0.0, -1.0, 2.0, -3.0];
        let worst = |temperature: f32, expected: f32| {
            let n = 40_000;
            let sampling = Sampling { temperature, seed: 7, ..Sampling::default() };
            let mut seen = [0.0f64; 6];
            (0..n).for_each(|position| seen[choose(&logits, &sampling, position) as usize] += 1.0);
            let e: Vec<f64> = logits.iter().map(|&l| (l as f64 / expected as f64).exp()).collect();
            let total: f64 = e.iter().sum();
            let sigmas = seen.iter().zip(&e).map(|(seen, e)| {
                let p = e / total;
                (seen - n as f64 * p).abs() / (n as f64 * p * (1.0 - p)).sqrt()
            });
            sigmas.fold(0.0, f64::max)
        };
        assert!(worst(1.0, 1.0) < 4.0 && worst(2.0, 2.0) < 4.0, "{} {}", worst(1.0, 1.0), worst(2.0, 2.0));
        assert!(worst(1.0, 1.1) > 6.0);
    }

    #[test]
    fn noise_is_right_at_both_ends() {
        for bits in
            [0, 1, 5, 127, 128, 1 << 20, (1 << 30) - 1, 1 << 30, 1 << 31, u32::MAX - 200, u32::MAX - 1, u32::MAX]
        {
            let v = (bits as f64 + 0.5) / 4294967296.0;
            let want = -(-(-v).ln_1p()).ln();
            assert!(
                (noise(bits) as f64 - want).abs() < 1e-5 * want.abs().max(1.0),
                "{bits}: {} for {want}",
                noise(bits)
            );
        }
    }

    /// The known answers of Random123's kat_vectors.
    #[test]
    fn philox_known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
    }

    #[test]
    fn penalties_bias_and_minimum_length() {
        let check = |sampling: Sampling, output_len: usize, want: [f32; 5]| {
            // Token 0 is in the prompt, token 1 twice in the output, token 2 in both; 4 is the end token.
            let counts = Counts { in_prompt: vec![true, false, true, false, false], in_output: vec![0, 2, 1, 0, 0] };
            let mut logits = [2.0, 2.0, -2.0, 2.0, 2.0];
            Sampler { sampling: &sampling, counts: &counts, end_ids: &[4], position: 9, output_len }
                .adjust(&mut logits);
            assert_eq!(logits, want, "{sampling:?}");
        };
        let s = Sampling::default;
        check(s(), 0, [2.0, 2.0, -2.0, 2.0, 2.0]);
        check(Sampling { repetition_penalty: 2.0, ..s() }, 0, [1.0, 1.0, -4.0, 2.0, 2.0]);
        check(Sampling { presence_penalty: 0.5, ..s() }, 0, [2.0, 1.5, -2.5, 2.0, 2.0]);
        check(Sampling { frequency_penalty: 0.5, ..s() }, 0, [2.0, 1.0, -2.5, 2.0, 2.0]);
        check(
            Sampling { logit_bias: vec![(3, -1.5), (0, f32::NEG_INFINITY)], ..s() },
            0,
            [f32::NEG_INFINITY, 2.0, -2.0, 0.5, 2.0],
        );
        check(Sampling { min_tokens: 3, ..s() }, 2, [2.0, 2.0, -2.0, 2.0, f32::NEG_INFINITY]);
        check(Sampling { min_tokens: 3, ..s() }, 3, [2.0, 2.0, -2.0, 2.0, 2.0]);
    }

    #[test]
    fn o12_bad_values_are_refused_with_the_range() {
        let s = Sampling::default;
        let refused = |sampling: Sampling, words: &str| {
            let error = sampling.check(512).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        for temperature in [-0.1, f32::NAN, f32::INFINITY] {
            refused(Sampling { temperature, ..s() }, "expected a number from 0 to any finite number");
        }
        for p in [-0.1, 1.1, f32::NAN] {
            refused(Sampling { top_p: p, ..s() }, "top-p");
            refused(Sampling { min_p: p, ..s() }, "from 0 to 1");
        }
        refused(Sampling { repetition_penalty: 0.0, ..s() }, "above 0");
        refused(Sampling { logit_bias: vec![(512, 1.0)], ..s() }, "ids 0 to 511");
        refused(Sampling { logit_bias: vec![(5, f32::INFINITY)], ..s() }, "-inf");
        let ban =
            |n: u32| Sampling { logit_bias: (0..n).chain([0]).map(|id| (id, f32::NEG_INFINITY)).collect(), ..s() };
        refused(ban(512), "bans all 512 tokens");
        ban(511).check(512).unwrap();
        let counts = counts(4);
        for temperature in [0.0, 1.0] {
            let sampling =
                Sampling { temperature, logit_bias: [0, 1, 3].map(|id| (id, f32::NEG_INFINITY)).to_vec(), ..s() };
            let choice = Sampler { sampling: &sampling, counts: &counts, end_ids: &[], position: 3, output_len: 0 };
            assert_eq!(choice.choose(&mut [9.0, 1.0, -50.0, 2.0]), 2, "the one that is left");
        }
        for ok in [0.0, f32::MIN_POSITIVE, 1e-9, 1.0, f32::MAX] {
            Sampling { temperature: ok, top_k: usize::MAX, ..s() }.check(512).unwrap();
        }
    }
}
