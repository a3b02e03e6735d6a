//! Plans as text, without weights or a GPU: what a pass computes on one rank and on several. `UPDATE=1 cargo test
//! --test plan` rewrites the listings in tests/data/plans; read the difference before it is committed.
use std::fs;
use std::path::Path;
use volley::model::config::Config;
use volley::model::plan::{self, Drafter, Eagle3, Pass, Plan, Ranks, Step, Storage};

const BF16: Storage = Storage { weight: 2, kv: 2, plain_kv_b: true };

fn config(shape: &str) -> Config {
    Config::open(&Path::new("tests/shapes").join(shape)).unwrap()
}

fn check(name: &str, plan: &Plan) {
    let path = Path::new("tests/data/plans").join(format!("{name}.txt"));
    let text = format!("{plan}\n");
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let expected = fs::read_to_string(&path).unwrap();
    assert!(text == expected, "{name} is another plan than {}:\n{text}", path.display());
}

fn eagle() -> Eagle3 {
    Eagle3 {
        hidden: 576,
        target_hidden: 576,
        taps: vec![2, 15, 27],
        n_heads: 9,
        n_kv_heads: 3,
        head_dim: 64,
        ffn_dim: 1536,
        vocab: 16384,
        norm_eps: 1e-5,
        qkv_bias: false,
        qk_norm: false,
        norm_before_residual: false,
        norm_before_fc: false,
        fc_norm: false,
        norm_output: false,
        latent: None,
    }
}

const EIGHTH: Ranks = Ranks::new(0, 8);

/// The first layers of a long plan: up to the third layer with experts, and what follows the last.
fn head(mut plan: Plan) -> Plan {
    let downs: Vec<usize> = (0..plan.steps.len()).filter(|&i| matches!(plan.steps[i], Step::ExpertsDown(_))).collect();
    plan.steps.drain(downs[1] + 1..downs[downs.len() - 1] + 1);
    plan
}

#[test]
fn listings() {
    let llama = config("llama-3.2-1b");
    check("llama-3.2-1b_verify_1", &plan::target(&llama, Pass::Verify { width: 1 }, Ranks::ONE, &[]).unwrap());
    let tapped = plan::target(&llama, Pass::Verify { width: 4 }, Ranks::new(3, 8), &[2, 8, 13]).unwrap();
    check("llama-3.2-1b_verify_4_rank_3_of_8_tapped", &tapped);
    check(
        "qwen3-8b_prefill_64",
        &plan::target(&config("qwen3-8b"), Pass::Prefill { rows: 64 }, Ranks::ONE, &[]).unwrap(),
    );
    check(
        "kimi-k2.5_verify_4_rank_0_of_8",
        &head(plan::target(&config("kimi-k2.5"), Pass::Verify { width: 4 }, EIGHTH, &[]).unwrap()),
    );
    check(
        "deepseek-v3_verify_1",
        &head(plan::target(&config("deepseek-v3"), Pass::Verify { width: 1 }, Ranks::ONE, &[]).unwrap()),
    );
    check(
        "qwen3-30b-a3b_verify_1",
        &head(plan::target(&config("qwen3-30b-a3b"), Pass::Verify { width: 1 }, Ranks::ONE, &[]).unwrap()),
    );
    check(
        "drafter_3",
        &plan::drafter(&Drafter::Eagle3(eagle()), Pass::Draft { width: 8, drafts: 3 }, Ranks::ONE).unwrap(),
    );
    let flags = Eagle3 { fc_norm: true, norm_before_residual: true, norm_output: true, qk_norm: true, ..eagle() };
    let flags = Drafter::Eagle3(flags);
    check("drafter_flags_2", &plan::drafter(&flags, Pass::Draft { width: 8, drafts: 2 }, Ranks::ONE).unwrap());
}

#[test]
fn bytes_are_those_of_the_published_shapes() {
    // reference: all layer weights, final norm and head once, one embedding row (bf16); norms are not counted as steps.
    for (shape, gb) in [
        ("llama-3.2-1b", 2.4716),
        ("llama-3.1-8b", 15.0099),
        ("qwen3-8b", 15.1368),
        ("qwen3-32b", 63.968),
        ("smollm2-135m", 0.2690),
    ] {
        let plan = plan::target(&config(shape), Pass::Verify { width: 1 }, Ranks::ONE, &[]).unwrap();
        let found = plan.bytes(0, BF16) as f64 / 1e9;
        assert!((found / gb - 1.0).abs() < 1e-3, "{shape}: {found} GB, expected {gb}");
        // Every rank's share is an even part, but for what all ranks hold: the embedding row and a padded vocabulary.
        let eighth = plan::target(&config(shape), Pass::Verify { width: 1 }, Ranks::new(0, 8), &[]);
        if let Ok(eighth) = eighth {
            let share = eighth.bytes(0, BF16) as f64 / plan.bytes(0, BF16) as f64;
            assert!((0.125..0.13).contains(&share), "{shape}: rank 0 of 8 reads {share} of all");
        }
    }
}

/// The table E.4 of the sizing notes that came with the shapes: GB of one pass over all GPUs, and on one of eight.
#[test]
fn bytes_of_experts_are_those_of_uniform_routing() {
    let cases = [
        ("kimi-k2.5", 1, 32.98, 6.03),
        ("kimi-k2.5", 2, 44.63, 7.48),
        ("kimi-k2.5", 4, 67.19, 10.30),
        ("kimi-k2.5", 8, 109.57, 15.60),
        ("deepseek-v3", 1, 37.7, 5.70),
        ("deepseek-v3", 4, 95.2, 12.90),
        ("deepseek-v3", 8, 163.9, 21.49),
    ];
    for (shape, width, all, eighth) in cases {
        for (ranks, expected) in [(Ranks::ONE, all), (EIGHTH, eighth)] {
            // The notes count kv_b as the checkpoint has it, FP8 in DeepSeek-V3; a GPU holds and reads it as bf16.
            let plan = plan::target(&config(shape), Pass::Verify { width }, ranks, &[]).unwrap();
            let as_stored = plan.bytes(0, Storage { plain_kv_b: false, ..BF16 });
            let grown = if shape == "deepseek-v3" { 61 * 512 * 32768 / ranks.count as u64 } else { 0 };
            assert_eq!(plan.bytes(0, BF16) - as_stored, grown - grown / (128 * 128) * 4, "{shape}");
            let found = as_stored as f64 / 1e9;
            assert!(
                (found / expected - 1.0).abs() < 2e-3,
                "{shape} at width {width} on one of {}: {found} GB, expected {expected}",
                ranks.count
            );
        }
    }
    // 3.3 billion active parameters, of which the embedding table is one row (Qwen3-30B-A3B's model card).
    let qwen = plan::target(&config("qwen3-30b-a3b"), Pass::Verify { width: 1 }, Ranks::ONE, &[])
        .unwrap()
        .bytes(0, BF16) as f64
        / 2e9;
    assert!((qwen + 151_936.0 * 2048.0 / 1e9 - 3.34).abs() < 0.02, "{qwen} billion numbers without the embedding");
    // One latent of 512 + 64 numbers a layer, on every rank.
    let kimi = plan::target(&config("kimi-k2.5"), Pass::Verify { width: 1 }, EIGHTH, &[]).unwrap();
    assert_eq!((kimi.kv.row_dim(), kimi.kv.n_layers * kimi.kv.row_dim() * 2), (576, 70_272));
    assert_eq!(kimi.bytes(1000, BF16) - kimi.bytes(0, BF16), 70_272_000);
}

#[test]
fn uneven_splits_name_the_sizes_that_work() {
    let error = plan::target(&config("smollm2-135m"), Pass::Verify { width: 1 }, Ranks::new(0, 2), &[]).unwrap_err();
    assert!(
        error.to_string().contains("num_attention_heads of 9 cannot be split over 2 ranks: use 1, 3 ranks"),
        "{error}"
    );
}

/// Two sums a draft, and a third of its layer for each of three ranks; its head is whole.
#[test]
fn ranks_divide_the_layer_of_a_drafter() {
    let (d, ranks) = (eagle(), Ranks { split_drafter: true, ..Ranks::new(1, 3) });
    let plan = |ranks: Ranks, drafts: usize| {
        plan::drafter(&Drafter::Eagle3(d.clone()), Pass::Draft { width: 8, drafts }, ranks).unwrap()
    };
    let sums = |plan: &Plan| plan.steps.iter().filter(|s| matches!(s, Step::AllReduce { .. })).count();
    assert_eq!((sums(&plan(Ranks::ONE, 3)), sums(&plan(ranks, 3))), (0, 6));
    assert_eq!(3 * plan(ranks, 1).kv.n_kv_heads, d.n_kv_heads);
    let a_draft = |ranks: Ranks| plan(ranks, 2).bytes(0, BF16) - plan(ranks, 1).bytes(0, BF16);
    let layer = 2 * d.hidden * (d.n_heads + 2 * d.n_kv_heads) * d.head_dim
        + d.n_heads * d.head_dim * d.hidden
        + 3 * d.hidden * d.ffn_dim;
    assert_eq!(a_draft(Ranks::ONE) - a_draft(ranks), 2 * layer as u64 * 2 / 3); // two bytes a number
    let error =
        plan::drafter(&Drafter::Eagle3(d.clone()), Pass::Draft { width: 8, drafts: 1 }, Ranks::new(0, 3)).unwrap_err();
    assert!(error.to_string().contains("whole on every rank"), "{error}");
}

#[test]
fn a_sum_over_ranks_follows_every_partial() {
    let plan = plan::target(&config("llama-3.1-8b"), Pass::Verify { width: 1 }, Ranks::new(0, 8), &[]).unwrap();
    let sums = plan.steps.iter().filter(|s| matches!(s, Step::AllReduce { .. })).count();
    assert_eq!(sums, 2 * 32);
    // With all of attention on every rank half of them go, and the other ranks' queries, keys, values, outputs and
    // heads of the cache come.
    let ranks = Ranks { whole_attention: true, ..Ranks::new(0, 8) };
    let whole = plan::target(&config("llama-3.1-8b"), Pass::Verify { width: 1 }, ranks, &[]).unwrap();
    let sums = whole.steps.iter().filter(|s| matches!(s, Step::AllReduce { .. })).count();
    assert_eq!((sums, whole.kv.n_kv_heads), (32, 8));
    assert_eq!(whole.bytes(0, BF16) - plan.bytes(0, BF16), 32 * 2 * (2 * 4096 * 4096 + 2 * 1024 * 4096) * 7 / 8);
    assert_eq!(whole.bytes(1000, BF16) - whole.bytes(0, BF16), 8 * (plan.bytes(1000, BF16) - plan.bytes(0, BF16)));
}
