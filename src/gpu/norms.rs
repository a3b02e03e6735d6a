//! Who makes the normalised rows that the linear layers of a plan read.
use crate::model::plan::{BufferId, Epilogue, Input, Linear, Mixture, Plan, Step};
use crate::model::role::WeightId;
use std::collections::{BTreeMap, BTreeSet};

pub struct Norms {
    /// By step: the norm weight that its output will be multiplied with.
    pub next: Vec<Option<WeightId>>,
    /// Inputs (step, input) whose rows nobody prepared: a kernel of its own does.
    pub apart: BTreeSet<(usize, usize)>,
}

impl Norms {
    /// Step `i` reads `input` as its number `j`.
    fn read(&mut self, i: usize, j: usize, input: &Input, writer: &BTreeMap<BufferId, usize>) {
        let Some(norm) = input.norm else { return };
        match writer.get(&input.x) {
            Some(&w) if self.next[w].is_none_or(|n| n == norm) => self.next[w] = Some(norm),
            _ => {
                self.apart.insert((i, j));
            }
        }
    }
}

/// The last writer of a buffer prepares it for the first norm that reads it. A buffer that is read through two
/// different norms, or written by something that cannot prepare, is normalised apart.
pub fn norms(plan: &Plan) -> Norms {
    let mut norms = Norms { next: vec![None; plan.steps.len()], apart: BTreeSet::new() };
    let mut writer: BTreeMap<BufferId, usize> = BTreeMap::new();
    for (i, step) in plan.steps.iter().enumerate() {
        for (j, input) in step.inputs().iter().enumerate() {
            norms.read(i, j, input, &writer);
        }
        let Some(out) = step.output() else { continue };
        if prepares(step) {
            writer.insert(out, i);
        } else {
            writer.remove(&out);
        }
    }
    norms
}

/// Whether a step can also write its output times a norm weight.
fn prepares(step: &Step) -> bool {
    match step {
        Step::Embed { .. } | Step::AllReduce { .. } => true,
        Step::Linear(Linear { epilogue, .. }) => {
            matches!(epilogue, Epilogue::Store { .. } | Epilogue::Residual { .. })
        }
        Step::ExpertsDown(Mixture { epilogue, .. }) => matches!(epilogue, Epilogue::Residual { .. }),
        _ => false,
    }
}
