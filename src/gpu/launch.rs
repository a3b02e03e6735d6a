//! Puts ops on the stream of a GPU, or into a capture: graphs, eager passes, profiles and checks all walk lists that
//! lower/ has made.
use super::device::{Gpu, Launch};
use super::kernels::Kernels;
use super::op::{Edge, Op, Work};
use super::ranks::link::Link;
use crate::model::plan::Plan;
use anyhow::{Context, Result};

pub struct Launcher<'a> {
    pub gpu: &'a Gpu,
    pub kernels: &'a Kernels,
    /// To the other ranks, if there are any.
    pub link: Option<&'a Link>,
}

impl Launcher<'_> {
    /// All ops of a pass, or some; `plan` names them in errors.
    pub fn run<'o>(&self, plan: &Plan, ops: impl IntoIterator<Item = &'o Op>) -> Result<()> {
        ops.into_iter().try_for_each(|op| self.launch(plan, op))
    }

    pub fn launch(&self, plan: &Plan, op: &Op) -> Result<()> {
        let done = match &op.work {
            Work::Kernel { kernel, grid: [x, y, z], threads, params } => {
                let early = op.edge == Edge::Early;
                let launch = Launch { grid: (*x, *y, *z), block: *threads, shared: kernel.shared(), early };
                self.gpu.launch_bytes(self.kernels.get(*kernel), launch, params)
            }
            Work::Nccl(call) => self.link.context("NCCL without a link to other ranks")?.call_nccl(call),
        };
        done.with_context(|| format!("step {}", op.part.name(plan)))
    }
}
