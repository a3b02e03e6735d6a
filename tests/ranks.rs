//! Several ranks: the f32 reference as 2, 3, 4 and 8 ranks against itself as one, and what each rank holds and reads.
mod support;

use serde_json::json;
use std::path::Path;
use support::T0;
use volley::cpu::Reference;
use volley::decode::{Drafting, Engine, Event, Flow, Request, Sampling};
use volley::model::checkpoint::{Checkpoint, Read};
use volley::model::config::Config;
use volley::model::plan::{Pass, Ranks, Step};
use volley::model::weights::{claim, vocab_rows, Table, Weights};

/// Widths that divide by 8 and fewer KV heads than ranks; a vocabulary that does not divide.
fn tiny8() -> T0 {
    let t0 = T0::new().set("num_attention_heads", 16).set("num_key_value_heads", 2).set("head_dim", 64).set("num_hidden_layers", 2);
    t0.set("hidden_size", 128).set("intermediate_size", 256).set("vocab_size", 500).eos(json!(1)).set("bos_token_id", 0)
}

/// The same with heads that divide by 3, and biases, of which those behind a sum over ranks count once.
fn tiny3() -> T0 {
    tiny8().set("num_attention_heads", 6).set("num_key_value_heads", 3).set("intermediate_size", 192).biases()
}

fn open(dir: &Path) -> (Config, Weights) {
    let config = Config::open(dir).unwrap();
    let weights = claim(&Table::builtin().unwrap(), &config, &Checkpoint::open(dir, Read::Mmap).unwrap()).unwrap();
    weights.load(&mut |_, _| {}).unwrap();
    (config, weights)
}

fn reference(dir: &Path, count: usize) -> Reference {
    let (config, weights) = open(dir);
    Reference::of_ranks(config, weights, 200, None, false, Ranks { rank: count - 1, count }).unwrap()
}

fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + 11) % 500).collect()
}

/// Residual streams after each layer and logits of a prompt and a pass of four rows.
fn observe(reference: &mut Reference) -> (Vec<f32>, Vec<f32>) {
    let ids = ids(74);
    let mut hidden = Vec::new();
    let mut keep = |step: &Step, out: &mut [f32], _: usize| match step {
        Step::AllReduce { .. } => hidden.extend_from_slice(out),
        Step::Linear(l) if matches!(l.epilogue, volley::model::plan::Epilogue::Residual { .. }) => hidden.extend_from_slice(out),
        _ => {}
    };
    reference.run(Pass::Prefill { rows: 64 }, &ids[..64], 0, &mut keep).unwrap();
    reference.run(Pass::Prefill { rows: 64 }, &ids[64..70], 64, &mut keep).unwrap();
    reference.run(Pass::Verify { width: 4 }, &ids[70..], 70, &mut keep).unwrap();
    let logits = reference.logits(4).to_vec();
    (hidden, logits)
}

fn answer(reference: Reference, sampling: &Sampling) -> Vec<u32> {
    let mut engine = Engine::new(Box::new(reference), Drafting::default()).unwrap();
    let request = Request { prompt: &ids(20), sampling, end_ids: &[], max_tokens: Some(24) };
    engine.generate(&request, &mut |_: Event| Flow::Go).unwrap().tokens
}

#[test]
fn ranks_compute_what_one_computes() {
    for (t0, counts) in [(tiny8(), &[2, 4, 8][..]), (tiny3(), &[3]), (tiny8().arch("qwen3").tied(true), &[4])] {
        let dir = tempfile::tempdir().unwrap();
        t0.write(dir.path());
        let one = observe(&mut reference(dir.path(), 1));
        let sampled = Sampling { temperature: 0.8, top_p: 0.9, seed: 3, ..Sampling::default() };
        let answers = [Sampling::default(), sampled].map(|sampling| (answer(reference(dir.path(), 1), &sampling), sampling));
        for &count in counts {
            let many = observe(&mut reference(dir.path(), count));
            for (what, one, many) in [("hidden states", &one.0, &many.0), ("logits", &one.1, &many.1)] {
                assert_eq!(one.len(), many.len(), "{what} of {count} ranks");
                let spread = one.iter().fold(0f32, |m, x| m.max(x.abs()));
                let worst = one.iter().zip(many).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
                assert!(spread > 1.0 && worst < 1e-5 * spread, "{what} of {count} ranks: off by {worst}, up to {spread}");
            }
            for (expected, sampling) in &answers {
                assert_eq!(answer(reference(dir.path(), count), sampling), *expected, "{count} ranks, {sampling:?}");
            }
        }
    }
}

#[test]
fn tokens_are_shared_in_whole_tiles() {
    for (vocab, ranks) in [(500, 8), (500, 3), (151_936, 8), (128_256, 3), (49_152, 3), (17, 1), (33, 2)] {
        let mut end = 0;
        for rank in 0..ranks {
            let rows = vocab_rows(vocab, rank, ranks).unwrap();
            assert!(rows.start == end && !rows.is_empty() && rows.start % 16 == 0, "{vocab} over {ranks}: {rows:?}");
            end = rows.end;
        }
        assert_eq!(end, vocab);
    }
    // Shares of 32 leave nothing for the last of three.
    assert_eq!(vocab_rows(64, 0, 3), None);
}
