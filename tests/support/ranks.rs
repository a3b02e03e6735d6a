//! Models made on the spot for several ranks, and what holds for ranks of any number on any driver. Each test binary
//! uses a part of this module.
#![allow(dead_code)]
use crate::support::T0;
use serde_json::json;
use std::path::Path;
use std::time::Duration;
use volley::cmd::check;
use volley::cpu::Reference;
use volley::gpu::device::Gpu;
use volley::gpu::machine::Options;
use volley::gpu::ranks::settle::Collectives;
use volley::gpu::ranks::{Conductor, LastResort, Setup};
use volley::model::checkpoint::{Checkpoint, Read};
use volley::model::claim::claim;
use volley::model::config::Config;
use volley::model::divide::Asked;
use volley::model::draft::DraftModel;
use volley::model::plan::{Pass, Step};
use volley::model::table::Table;
use volley::model::weights::Weights;

/// Widths that divide by 8 and fewer KV heads than ranks; a vocabulary that does not divide.
pub fn tiny8() -> T0 {
    let t0 = T0::new()
        .set("num_attention_heads", 16)
        .set("num_key_value_heads", 2)
        .set("head_dim", 64)
        .set("num_hidden_layers", 2);
    t0.set("hidden_size", 128).set("intermediate_size", 256).set("vocab_size", 500).eos(json!(1)).set("bos_token_id", 0)
}

/// The same with heads that divide by 3, and biases in attention, of which the one behind a sum over ranks counts once.
pub fn tiny3() -> T0 {
    tiny8()
        .set("num_attention_heads", 6)
        .set("num_key_value_heads", 3)
        .set("intermediate_size", 192)
        .set("attention_bias", true)
}

/// Distinct ids below 500.
pub fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + 11) % 500).collect()
}

pub fn open(dir: &Path) -> (Config, Weights) {
    let config = Config::open(dir).unwrap();
    let weights = claim(&Table::builtin().unwrap(), &config, &Checkpoint::open(dir, Read::Mmap).unwrap()).unwrap();
    weights.load(&mut |_, _| {}).unwrap();
    (config, weights)
}

/// Ranks on GPUs 0 to `gpus` - 1, in turns; rank r's is opened by `gpu(r % gpus)`.
pub fn setup(
    gpu: fn(usize) -> anyhow::Result<Gpu>,
    gpus: usize,
    dir: &Path,
    count: usize,
    drafter: Option<DraftModel>,
    context: usize,
) -> Setup {
    let (config, weights) = open(dir);
    let options = Options { context, drafter, ngram: true, require_graphs: true };
    let open = Box::new(move |rank| gpu(rank % gpus));
    Setup {
        gpus: (0..count).map(|rank| rank % gpus).collect(),
        open,
        collectives: Collectives::default(),
        asked: Asked::default(),
        config,
        weights: Some(weights),
        options,
        last_resort: LastResort {
            after: Duration::from_secs(30), // kernels on the CPU are slow
            end: |error| {
                eprintln!("nobody came for the error: {error:#}");
                std::process::abort()
            },
        },
    }
}

/// Every rank's steps against the reference's of the same rank, and the residual streams of all ranks against each
/// other, whose bits are returned.
pub fn compute_alike(name: &str, conductor: &mut Conductor, dir: &Path) -> Vec<u32> {
    let here = dir.to_path_buf();
    let held = conductor.each("check", move |machine| {
        let (config, weights) = open(&here);
        let mut reference = Reference::of_ranks(config, weights, check::STEP_ROWS, None, false, machine.ranks())?;
        // What is wrong with one rank spoils the sums of all: every rank says what it found.
        Ok(check::steps(machine, &mut reference, &ids(check::STEP_ROWS)).map_err(|e| format!("{e:#}")))
    });
    let count = conductor.first().ranks().count;
    let held = held.unwrap_or_else(|e| panic!("{name} on {count} ranks: {e:#}"));
    assert!(held.iter().all(Result::is_ok), "{name} on {count} ranks: {held:#?}");
    println!("{name} on {count} ranks: {}", held[0].as_ref().unwrap());
    let streams = conductor.each("check", |machine| {
        let mut bits = Vec::new();
        for (pass, at, n) in [(Pass::Prefill { rows: 16 }, 0, 9), (Pass::Verify { width: 4 }, 9, 4)] {
            machine.run(pass, &ids(13)[at..at + n], at, &mut |step, out, _| {
                if let Step::AllReduce { .. } = step {
                    bits.extend(out.iter().map(|x| x.to_bits()));
                }
            })?;
        }
        Ok(bits)
    });
    let mut streams = streams.unwrap();
    let machine = conductor.first();
    let sums = machine
        .plan(Pass::Verify { width: 4 })
        .steps
        .iter()
        .filter(|step| matches!(step, Step::AllReduce { .. }))
        .count();
    let expected = machine.config().n_layers * if machine.ranks().whole_attention { 1 } else { 2 };
    assert!(
        sums == expected && streams[0].len() == sums * 13 * machine.config().hidden,
        "{name} on {count} ranks: {sums} sums"
    );
    assert!(streams.iter().all(|bits| *bits == streams[0]), "{name} on {count} ranks: the streams differ");
    streams.swap_remove(0)
}
