//! How many drafts pay: measured times of verify and draft passes, acceptance by position, and the number that
//! maximises tokens per second, zero included.
//!
//! Nothing here changes the text: the policy picks widths, and a token does not depend on the width of its pass.

/// Most drafts of a cycle: one verify pass of 8 rows.
pub const MAX_DRAFTS: usize = 7;

/// Weight of one new observation of a time.
const NEW_TIME: f64 = 0.1;
/// Of an acceptance: small enough that bad luck does not stop drafts that pay a little, and 64 wrong cycles stop any.
const NEW_HIT: f64 = 0.05;
/// Of an acceptance seen by a probe, which is rare.
const NEW_PROBE: f64 = 0.2;
/// How fast the position behind the last one tried drifts towards that one: the price of finding out that it has become
/// right.
const DRIFT: f64 = 0.03;
/// After this many tokens without drafts of a source, it is tried again: the price of noticing that its drafts have
/// become right.
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
    /// A cycle that drafted `drafted` (0: no draft pass) and verified `verified` drafts took `ms`. Half of the
    /// correction goes to the passes that ran; the other half to all, since a deeper context or a slower clock is
    /// theirs too and some are never run.
    pub fn observe(&mut self, drafted: usize, verified: usize, ms: f64) {
        // A pause of the process is not a property of the pass.
        let ratio = (ms / (self.verify[verified] + self.drafting(drafted))).clamp(0.5, 2.0);
        let correction = 1.0 + NEW_TIME / 2.0 * (ratio - 1.0);
        self.verify.iter_mut().chain(&mut self.draft).for_each(|cost| *cost *= correction);
        self.verify[verified] *= correction;
        if drafted > 0 {
            self.draft[drafted - 1] *= correction;
        }
    }

    /// The draft pass of `k` drafts; none costs nothing.
    pub fn drafting(&self, k: usize) -> f64 {
        match k {
            0 => 0.0,
            k => self.draft[k - 1],
        }
    }

    /// Accept length at which a cycle of k drafts by the drafter is as fast as plain decoding.
    pub fn break_even(&self, k: usize) -> f64 {
        (self.verify[k] + self.drafting(k)) / self.verify[0]
    }
}

/// Decides for one source of drafts.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Chance that draft i + 1 is accepted when draft i was.
    acceptance: [f64; MAX_DRAFTS],
    fixed: Option<usize>,
    /// n-gram and scripted drafts need no draft pass.
    free: bool,
    /// Tokens since this source was last used.
    idle: usize,
}

/// What a policy would do next, and what that promises.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bid {
    pub drafts: usize,
    /// Tokens per millisecond that it promises.
    pub rate: f64,
    /// It is time to look at this source again, whatever it promises.
    pub probe: bool,
}

impl Policy {
    /// `fixed`: always this many drafts (`--draft-tokens N`). `free`: drafts cost no pass.
    pub fn new(fixed: Option<usize>, free: bool) -> Policy {
        // Hopeful at first: the first cycles draft, and are corrected by what they see.
        Policy { acceptance: [0.7; MAX_DRAFTS], fixed, free, idle: 0 }
    }

    /// Drafts of the next cycle; `room` is the most that make sense (tokens left before an end, less one).
    pub fn choose(&self, costs: &Costs, room: usize) -> Bid {
        let most = MAX_DRAFTS.min(room);
        let mut rates = [1.0 / costs.verify[0]; MAX_DRAFTS + 1];
        let (mut chain, mut expected) = (1.0, 1.0);
        for (k, rate) in rates.iter_mut().enumerate().skip(1).take(most) {
            chain *= self.acceptance[k - 1];
            expected += chain;
            *rate = expected / (costs.verify[k] + if self.free { 0.0 } else { costs.drafting(k) });
        }
        if let Some(k) = self.fixed {
            return Bid { drafts: k.min(most), rate: rates[k.min(most)], probe: false };
        }
        let best = (1..=most).fold(0, |best, k| {
            let bar = if best == 0 { rates[0] * MARGIN } else { rates[best] };
            if rates[k] > bar {
                k
            } else {
                best
            }
        });
        let probe = self.idle >= PROBE_TOKENS;
        let drafts = if best == 0 && probe { most.min(1) } else { best };
        Bid { drafts, rate: rates[drafts], probe }
    }

    /// What a cycle with `drafted` drafts of this source did.
    pub fn observe(&mut self, drafted: usize, accepted: usize) {
        let probe = self.idle >= PROBE_TOKENS;
        let weight = if probe { NEW_PROBE } else { NEW_HIT };
        // A probe that hits is followed by another at once.
        if !probe || accepted < drafted {
            self.idle = 0;
        }
        for i in 0..drafted.min(accepted + 1) {
            let hit = if i < accepted { 1.0 } else { 0.0 };
            self.acceptance[i] += weight * (hit - self.acceptance[i]);
        }
        // The position behind the last one tried is not seen: that it does as well is the best guess, slowly, so that
        // it is tried again.
        if drafted > 0 && drafted < MAX_DRAFTS && accepted == drafted {
            self.acceptance[drafted] += DRIFT * (self.acceptance[drafted - 1] - self.acceptance[drafted]);
        }
    }

    /// A cycle without drafts of this source gave `tokens`.
    pub fn rest(&mut self, tokens: usize) {
        self.idle += tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the H200 is expected to show: verify rises by 1 % a row, a draft pass costs 6 % and 4 % for each further
    /// draft.
    fn gpu() -> Costs {
        Costs {
            verify: std::array::from_fn(|i| 1.0 + 0.01 * i as f64),
            draft: std::array::from_fn(|i| 0.06 + 0.04 * i as f64),
        }
    }

    /// Two CPU cores: rows are far from free.
    fn cpu() -> Costs {
        Costs {
            verify: std::array::from_fn(|i| 1.0 + 0.25 * i as f64),
            draft: std::array::from_fn(|i| 0.2 + 0.1 * i as f64),
        }
    }

    /// Time and tokens of `rounds` cycles in which the first `right` drafts are right.
    fn run(policy: &mut Policy, costs: &Costs, rounds: usize, right: usize) -> (f64, usize) {
        let (mut time, mut tokens) = (0.0, 0);
        for _ in 0..rounds {
            let k = policy.choose(costs, usize::MAX).drafts;
            let accepted = right.min(k);
            time += costs.verify[k] + if policy.free { 0.0 } else { costs.drafting(k) };
            tokens += accepted + 1;
            match k {
                0 => policy.rest(1),
                k => policy.observe(k, accepted),
            }
        }
        (time, tokens)
    }

    #[test]
    fn wrong_drafts_stop_within_64_rounds_and_cost_little() {
        // On the CPU a probe costs half a step, so every 33rd token may cost 1.5 % more.
        for (costs, limit) in [(gpu(), 1.01), (cpu(), 1.02)] {
            let mut policy = Policy::new(None, false);
            run(&mut policy, &costs, 64, 0);
            assert_eq!(policy.choose(&costs, usize::MAX).drafts, 0);
            let (time, tokens) = run(&mut policy, &costs, 1000, 0);
            assert!(time / tokens as f64 <= limit, "{}", time / tokens as f64);
        }
    }

    #[test]
    fn wrong_free_drafts_cost_under_one_percent() {
        let mut policy = Policy::new(None, true);
        run(&mut policy, &gpu(), 64, 0);
        let (time, tokens) = run(&mut policy, &gpu(), 1000, 0);
        assert!(time / tokens as f64 <= 1.002, "{}", time / tokens as f64);
    }

    #[test]
    fn recovers_when_drafts_turn_right() {
        for (costs, least) in [(gpu(), 4.0), (cpu(), 1.9)] {
            let mut policy = Policy::new(None, false);
            run(&mut policy, &costs, 500, 0);
            run(&mut policy, &costs, 300, MAX_DRAFTS);
            let (time, tokens) = run(&mut policy, &costs, 100, MAX_DRAFTS);
            assert!(tokens as f64 / time > least, "{}", tokens as f64 / time);
        }
    }

    #[test]
    fn near_the_best_number_for_a_short_chain() {
        let mut policy = Policy::new(None, false);
        run(&mut policy, &gpu(), 100, 2);
        let (time, tokens) = run(&mut policy, &gpu(), 1000, 2);
        let best = 3.0 / (gpu().verify[2] + gpu().draft[1]);
        assert!(tokens as f64 / time > 0.95 * best, "{} of {best}", tokens as f64 / time);
    }

    #[test]
    fn room_and_fixed_are_respected() {
        let policy = Policy::new(Some(5), false);
        for (room, drafts) in [(10, 5), (3, 3), (0, 0)] {
            assert_eq!(policy.choose(&gpu(), room).drafts, drafts);
        }
    }

    #[test]
    fn costs_follow_what_cycles_take() {
        // Start times that were measured in a slow moment: a pass that runs finds its time, the others keep about their
        // proportion.
        let mut costs = gpu();
        costs.verify.iter_mut().chain(&mut costs.draft).for_each(|cost| *cost *= 2.0);
        for _ in 0..200 {
            let truth = gpu().verify[3] + gpu().draft[2];
            costs.observe(3, 3, truth);
        }
        assert!((costs.verify[3] / gpu().verify[3] - 1.0).abs() < 0.02, "{costs:?}");
        assert!((1.0..1.5).contains(&costs.verify[0]), "{costs:?}");
        assert!(gpu().break_even(3) > 1.0 && gpu().break_even(3) < 1.25);
    }
}
