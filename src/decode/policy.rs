//! How many drafts pay: measured times of verify and draft passes, acceptance by position, and the number that maximises tokens per
//! second, zero included.
//!
//! Nothing here changes the text: the policy picks widths, and a token does not depend on the width of its pass.
use super::MAX_DRAFTS;

/// Weight of one new observation of a time or an acceptance.
const NEW: f64 = 0.1;
/// After this many tokens without drafts, one draft is tried: the price of noticing that drafts have become right.
const PROBE_TOKENS: usize = 32;
/// Drafting must promise this much before it is worth leaving plain decoding, so that noise does not flip the choice.
const MARGIN: f64 = 1.02;

/// Milliseconds of each pass: index w - 1 is verify of width w, index k - 1 is a draft pass of k drafts.
#[derive(Clone, Debug, PartialEq)]
pub struct Costs {
    pub verify: [f64; MAX_DRAFTS + 1],
    pub draft: [f64; MAX_DRAFTS],
}

impl Costs {
    /// A cycle that verified `verified` drafts and drafted `drafted` took `ms`: both times are corrected in proportion, so that a deeper
    /// context or a slower clock is noticed.
    pub fn observe(&mut self, verified: usize, drafted: usize, ms: f64) {
        let expected = self.verify[verified] + if drafted > 0 { self.draft[drafted - 1] } else { 0.0 };
        // A pause of the process is not a property of the pass.
        let ratio = (ms / expected).clamp(0.5, 2.0);
        self.verify[verified] *= 1.0 + NEW * (ratio - 1.0);
        if drafted > 0 {
            self.draft[drafted - 1] *= 1.0 + NEW * (ratio - 1.0);
        }
    }

    /// Accept length at which a cycle of k drafts is as fast as plain decoding.
    pub fn break_even(&self, k: usize) -> f64 {
        self.cycle(k) / self.verify[0]
    }

    fn cycle(&self, k: usize) -> f64 {
        self.verify[k] + if k > 0 { self.draft[k - 1] } else { 0.0 }
    }
}

/// Decides for one source of drafts.
#[derive(Clone, Debug)]
pub struct Policy {
    pub costs: Costs,
    /// Chance that draft i + 1 is accepted when draft i was.
    acceptance: [f64; MAX_DRAFTS],
    fixed: Option<usize>,
    plain_tokens: usize,
}

impl Policy {
    /// `fixed`: always this many drafts (`--draft-tokens N`).
    pub fn new(costs: Costs, fixed: Option<usize>) -> Policy {
        // Hopeful at first: the first cycles draft, and are corrected by what they see.
        Policy { costs, acceptance: [0.7; MAX_DRAFTS], fixed, plain_tokens: 0 }
    }

    /// Drafts of the next cycle; `room` is the most that make sense (tokens left before an end, less one).
    pub fn drafts(&self, room: usize) -> usize {
        self.best(room).0
    }

    /// The same, with the tokens per millisecond that it promises.
    pub fn best(&self, room: usize) -> (usize, f64) {
        let most = MAX_DRAFTS.min(room);
        let mut rates = [1.0 / self.costs.cycle(0); MAX_DRAFTS + 1];
        let (mut chain, mut expected) = (1.0, 1.0);
        for k in 1..=most {
            chain *= self.acceptance[k - 1];
            expected += chain;
            rates[k] = expected / self.costs.cycle(k);
        }
        let k = match self.fixed {
            Some(k) => k.min(most),
            None => {
                let best = (1..=most).fold(0, |best, k| {
                    let bar = if best == 0 { rates[0] * MARGIN } else { rates[best] };
                    if rates[k] > bar { k } else { best }
                });
                if best == 0 && self.plain_tokens >= PROBE_TOKENS { 1.min(most) } else { best }
            }
        };
        (k, rates[k])
    }

    /// What a cycle of `drafted` drafts did.
    pub fn observe(&mut self, drafted: usize, accepted: usize) {
        if drafted == 0 {
            self.plain_tokens += 1;
            return;
        }
        self.plain_tokens = 0;
        // A probe is rare, so what it sees weighs more.
        let weight = if drafted == 1 { 2.0 * NEW } else { NEW };
        for i in 0..drafted.min(accepted + 1) {
            let hit = if i < accepted { 1.0 } else { 0.0 };
            self.acceptance[i] += weight * (hit - self.acceptance[i]);
        }
        // Positions behind the last one tried are not seen: what holds for the last seen one is the best guess, slowly.
        if accepted == drafted {
            for i in drafted..MAX_DRAFTS {
                let guess = self.acceptance[drafted - 1];
                self.acceptance[i] += NEW * (guess - self.acceptance[i]);
            }
        }
    }

    pub fn acceptance(&self) -> &[f64] {
        &self.acceptance
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn costs() -> Costs {
        // Verify rises by 1 % a row, a draft pass costs 6 % and 4 % for each further draft.
        Costs { verify: std::array::from_fn(|i| 1.0 + 0.01 * i as f64), draft: std::array::from_fn(|i| 0.06 + 0.04 * i as f64) }
    }

    /// Time and tokens of `rounds` cycles in which the first `right` drafts are right.
    fn run(policy: &mut Policy, rounds: usize, right: usize) -> (f64, usize) {
        let (mut time, mut tokens) = (0.0, 0);
        for _ in 0..rounds {
            let k = policy.drafts(usize::MAX);
            let accepted = right.min(k);
            time += policy.costs.cycle(k);
            tokens += accepted + 1;
            policy.observe(k, accepted);
        }
        (time, tokens)
    }

    #[test]
    fn wrong_drafts_stop_within_64_rounds_and_cost_little() {
        let mut policy = Policy::new(costs(), None);
        run(&mut policy, 64, 0);
        let (time, tokens) = run(&mut policy, 1000, 0);
        assert!(time / tokens as f64 <= 1.01, "{}", time / tokens as f64);
    }

    #[test]
    fn recovers_when_drafts_turn_right() {
        let mut policy = Policy::new(costs(), None);
        run(&mut policy, 500, 0);
        run(&mut policy, 500, MAX_DRAFTS);
        let (time, tokens) = run(&mut policy, 100, MAX_DRAFTS);
        assert!(tokens as f64 / time > 4.0, "{}", tokens as f64 / time);
    }

    #[test]
    fn right_number_for_a_short_chain() {
        let mut policy = Policy::new(costs(), None);
        run(&mut policy, 500, 2);
        let k = policy.drafts(usize::MAX);
        assert!((2..=3).contains(&k), "{k}");
    }

    #[test]
    fn room_and_fixed_are_respected() {
        let policy = Policy::new(costs(), Some(5));
        assert_eq!(policy.drafts(10), 5);
        assert_eq!(policy.drafts(3), 3);
        assert_eq!(policy.drafts(0), 0);
    }
}
