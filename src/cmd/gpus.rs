//! Which GPU each rank has, and what several ranks are made of.
use super::options::ModelOptions;
use super::{signal, terminal::tell};
use crate::error;
use crate::gpu::params::COMM_MAX_RANKS;
use crate::gpu::ranks::algorithm::Algorithm;
use crate::gpu::ranks::link::LinkOptions;
use crate::gpu::ranks::settle::{Collectives, Measure};
use crate::gpu::ranks::{cache, nccl, LastResort, Setup};
use crate::gpu::{self, machine};
use crate::model::config::Config;
use crate::model::divide::Asked;
use crate::model::weights::Weights;
use anyhow::{bail, Result};
use std::time::Duration;

/// The GPU of each rank, neighbours in the PCI tree next to each other.
pub fn rank_gpus(options: &ModelOptions) -> Result<Vec<usize>> {
    let per_gpu = options.ranks_per_gpu;
    let gpus = gpus_for(&options.gpus, options.tp, per_gpu)?;
    if per_gpu > 1 {
        gpu::make_room_for_ranks();
    }
    let gpus = if gpus.len() > 1 { gpu::in_tree_order(gpus)? } else { gpus };
    Ok(gpus.into_iter().flat_map(|gpu| vec![gpu; per_gpu]).collect())
}

/// The GPUs that were asked for, or the first ones that `tp` ranks need.
fn gpus_for(asked: &[usize], tp: Option<usize>, per_gpu: usize) -> Result<Vec<usize>> {
    let gpus: Vec<usize> = match asked.is_empty() {
        true => (0..tp.unwrap_or(per_gpu).div_ceil(per_gpu)).collect(),
        false => asked.to_vec(),
    };
    if let Some(i) = (1..gpus.len()).find(|&i| gpus[..i].contains(&gpus[i])) {
        bail!("--gpus: GPU {} is there twice; --ranks-per-gpu puts several ranks on one", gpus[i]);
    }
    let count = gpus.len() * per_gpu;
    if let Some(tp) = tp.filter(|tp| *tp != count) {
        bail!(
            "--tp {tp}: expected {count}, which is {per_gpu} on each of {} GPUs; --gpus and --ranks-per-gpu set both",
            gpus.len()
        );
    }
    if count > COMM_MAX_RANKS {
        bail!("{count} ranks: at most {COMM_MAX_RANKS} are supported");
    }
    Ok(gpus)
}

/// What all ranks are made of. Before their threads start: NCCL is set by the environment.
pub fn setup(
    options: &ModelOptions,
    gpus: Vec<usize>,
    config: Config,
    weights: Option<Weights>,
    machine: machine::Options,
) -> Setup {
    if options.collective.is_none_or(Algorithm::needs_nccl) {
        let settings = nccl::configure(options.ranks_per_gpu > 1);
        if options.collective.is_some() || options.verbose > 0 {
            let shown: Vec<String> = settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
            tell(format_args!("NCCL: {}", shown.join(" ")));
        }
    }
    if options.collective == Some(Algorithm::NcclAllReduce) {
        tell(format_args!(
            "warning: --collective nccl-allreduce: the text may depend on how many drafts are verified together"
        ));
    }
    let collectives = Collectives {
        algorithm: options.collective,
        nccl: options.nccl.clone(),
        require_p2p: options.require_p2p,
        measure: cache::path().map_or(Measure::Anew, Measure::Cached),
        link: LinkOptions::default(),
    };
    let places = gpus.clone();
    let last_resort = LastResort {
        after: Duration::from_secs(4),
        end: |error| {
            tell(format_args!("error: {error:#}"));
            signal::leave(error::exit_code(error))
        },
    };
    Setup {
        gpus,
        open: Box::new(move |rank| gpu::open(places[rank])),
        collectives,
        asked: Asked { whole_attention: options.attention, split_drafter: None },
        config,
        weights,
        options: machine,
        last_resort,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_of_ranks() {
        assert_eq!(gpus_for(&[], None, 1).unwrap(), [0]);
        assert_eq!(gpus_for(&[], Some(4), 1).unwrap(), [0, 1, 2, 3]);
        assert_eq!(gpus_for(&[], Some(4), 4).unwrap(), [0]);
        assert_eq!(gpus_for(&[], None, 8).unwrap(), [0]);
        assert_eq!(gpus_for(&[3, 1], None, 2).unwrap(), [3, 1]);
        let refused = |gpus: &[usize], tp, per_gpu, word: &str| {
            let error = gpus_for(gpus, tp, per_gpu).unwrap_err();
            assert!(error.to_string().contains(word) && error::exit_code(&error) == error::BAD_INPUT, "{error}");
        };
        refused(&[0], Some(2), 1, "--tp 2: expected 1, which is 1 on each of 1 GPUs");
        refused(&[], Some(3), 2, "--tp 3: expected 4");
        refused(&[1, 0, 1], None, 1, "GPU 1 is there twice");
        refused(&[], Some(9), 1, "at most 8");
        refused(&[], Some(9), 9, "at most 8");
    }
}
