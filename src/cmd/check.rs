//! What doctor and the tests on a GPU check of a model: its steps against the f32 reference, and widths, chunks, graphs
//! and drafts against each other to the bit.
//!
//! Each check takes a machine whose cache it may overwrite and token ids that look like text to the hardware
//! (bench::token_ids); it returns a line that says what held, or an error that says what did not. Nothing here prints.
use crate::cpu::Reference;
use crate::decode::{Backend, Limits, Sampling, Sequence, MAX_DRAFTS};
use crate::gpu::machine::{Machine, WIDTHS};
use crate::model::plan::{Owner, Pass, Step, MAX_WIDTH, PREFILL_ROWS};
use anyhow::{bail, ensure, Context, Result};
use std::collections::{HashSet, VecDeque};

/// Largest error of a number that a step computes from the same inputs as the reference, relative to the number plus
/// the root mean square of its row. Rounding to bf16 gives 0.002 for the output, and as much for each normalised input,
/// rotated key and attention weight, added up like random signs: 0.005 is one deviation. The worst seen on an H200 is
/// 0.03 for the tiny models and 0.10 for SmolLM2.
pub const STEP_BOUND: f32 = 0.1;

/// Scores of experts that lie closer than this may change places: a logit is off by what bf16 inputs cost, 0.01 or so.
pub const ROUTE_MARGIN: f32 = 0.02;

/// Where KV chunks and the grid over them change (attention_blocks of kernels/params.h, attention_chunks), and behind
/// these.
const KV_EDGES: [usize; 7] = [64, 256, 1024, 2048, 2304, 16384, 17408];

/// Rows that `steps` takes.
pub const STEP_ROWS: usize = 200;

/// Every step of passes of all kinds against the reference. A step of the reference starts from what the GPU made of
/// the steps before, so that the first one beyond the bound is the one that is wrong.
pub fn steps(machine: &mut Machine, reference: &mut Reference, ids: &[u32]) -> Result<String> {
    let prefill = [(16, 11), (64, 61), (256, 100)].map(|(rows, n)| (Pass::Prefill { rows }, n));
    let verify = [1, 3, 8, 16].map(|width| (Pass::Verify { width }, width));
    ensure!(ids.len() >= STEP_ROWS, "{} ids: this check takes {STEP_ROWS}", ids.len());
    let (mut position, mut n_steps) = (0, 0);
    let mut worst = (0.0, String::new());
    let mut failure = None;
    let mut n_rerouted = 0;
    for (pass, n) in prefill.into_iter().chain(verify) {
        let tokens = &ids[position..position + n];
        let mut found: VecDeque<(String, Vec<f32>)> = VecDeque::new();
        machine.run(pass, tokens, position, &mut |step, out, _| found.push_back((step.name(), out.to_vec())))?;
        // Rows whose experts are others than the reference's: router of the pass, row.
        let (mut n_routers, mut rerouted): (usize, Vec<(usize, usize, String)>) = (0, Vec::new());
        let mut compare = |step: &Step, expected: &mut [f32], dim: usize| {
            let (name, out) = found.pop_front().unwrap_or_default();
            if failure.is_some() {
                return;
            }
            if name != step.name() || out.len() != expected.len() {
                let (a, b) = (out.len(), expected.len());
                failure = Some(format!(
                    "{pass:?}: the reference ran {} with {b} numbers, the GPU {name:?} with {a}",
                    step.name()
                ));
                return;
            }
            if let Step::Router(router) = step {
                let k = router.routing.top_k;
                for (row, (found, expected)) in out.chunks_exact(dim).zip(expected.chunks_exact_mut(dim)).enumerate() {
                    if found[..k] != expected[..k] {
                        rerouted.push((n_routers, row, name.clone()));
                        expected.copy_from_slice(found);
                    }
                }
                n_routers += 1;
            }
            let (error, at) = largest_error(&out, expected, dim);
            if error > STEP_BOUND {
                failure = Some(format!(
                    "{pass:?} at position {position}, {name}, row {} of {n}, column {}: expected {}, found {}, an error of {error:.3}; at most {STEP_BOUND} is allowed",
                    at / dim, at % dim, expected[at], out[at]
                ));
                return;
            }
            if error > worst.0 {
                worst = (error, format!("{name} of {pass:?}"));
            }
            n_steps += 1;
            expected.copy_from_slice(&out);
        };
        reference.run(pass, tokens, position, &mut compare)?;
        if let Some(failure) = failure {
            bail!(failure);
        }
        n_rerouted += rerouted.len();
        let clear = rerouted.into_iter().find(|(router, row, _)| reference.margins()[*router][*row] > ROUTE_MARGIN);
        if let Some((router, row, name)) = clear {
            let margin = reference.margins()[router][row];
            bail!("{pass:?} at position {position}, {name}, row {row}: other experts than the reference's, which lead by {margin}; at most {ROUTE_MARGIN} is allowed");
        }
        position += n;
    }
    let routes = if n_rerouted > 0 {
        format!("; {n_rerouted} rows with nearly equal experts went to others")
    } else {
        String::new()
    };
    Ok(format!("{n_steps} steps of 7 passes, errors up to {:.4} ({}), at most {STEP_BOUND}{routes}", worst.0, worst.1))
}

/// The largest error as STEP_BOUND means it, and where; infinite where a number is not finite. `dim` numbers a row.
fn largest_error(found: &[f32], expected: &[f32], dim: usize) -> (f32, usize) {
    let mut worst = (0.0, 0);
    for (row, (found, expected)) in found.chunks_exact(dim).zip(expected.chunks_exact(dim)).enumerate() {
        let rms = (expected.iter().map(|x| (x * x) as f64).sum::<f64>() / dim as f64).sqrt() as f32;
        for (i, (a, b)) in found.iter().zip(expected).enumerate() {
            let error = if a == b { 0.0 } else { (a - b).abs() / (rms + b.abs()) };
            let error = if error.is_nan() { f32::INFINITY } else { error };
            if error > worst.0 {
                worst = (error, row * dim + i);
            }
        }
    }
    worst
}

/// Every row of passes of all widths equals the same row alone, at positions across the edges of KV chunks and so of
/// context buckets.
pub fn widths(machine: &mut Machine, ids: &[u32]) -> Result<String> {
    let vocab = machine.vocab();
    machine.poison()?;
    let edges: Vec<usize> = KV_EDGES.into_iter().filter(|edge| edge + MAX_WIDTH / 2 <= ids.len()).collect();
    ensure!(!edges.is_empty(), "{} ids: this check takes {} at least", ids.len(), KV_EDGES[0] + MAX_WIDTH / 2);
    let mut filled = 0;
    for &edge in &edges {
        let first = edge - MAX_WIDTH / 2;
        fill(machine, &ids[..first], filled, usize::MAX)?;
        filled = first + MAX_WIDTH;
        let mut alone = Vec::new();
        for position in first..filled {
            machine.force(Pass::Verify { width: 1 }, &ids[position..=position], position, false)?;
            alone.extend(machine.logits(1)?);
        }
        sane(&alone, vocab).with_context(|| format!("width 1 from position {first}"))?;
        let kv = machine.kv_rows(Owner::Target, filled)?;
        for &width in &WIDTHS[1..] {
            let start = edge - width / 2;
            machine.force(Pass::Verify { width }, &ids[start..start + width], start, false)?;
            let at = (start - first) * vocab;
            let place = || format!("width {width} from position {start} against width 1");
            same(&machine.logits(width)?, &alone[at..at + width * vocab], vocab).with_context(place)?;
            // The whole cache is large: it is compared at every width once, then where all rows were written again.
            if edge == edges[0] || width == MAX_WIDTH {
                ensure!(machine.kv_rows(Owner::Target, filled)? == kv, "{}: the keys and values differ", place());
            }
        }
    }
    Ok(format!("widths 2 to 8 and {MAX_WIDTH} equal width 1 to the bit across positions {edges:?}"))
}

/// A prompt in chunks of 512, 1 and 8, and as long as they may be, leaves the same keys and values.
pub fn chunks(machine: &mut Machine, ids: &[u32]) -> Result<String> {
    let mut first: Option<Vec<u16>> = None;
    for size in [512, 1, 8, usize::MAX] {
        machine.poison()?;
        fill(machine, ids, 0, size)?;
        let rows = machine.kv_rows(Owner::Target, ids.len())?;
        let Some(first) = &first else {
            let kv = machine.plan(Pass::Verify { width: 1 }).kv;
            let dim = kv.head_dim;
            // Keys come first; every layer and head has its own row of a position.
            let keys: Vec<f32> = rows[..kv.n_layers * kv.n_kv_heads * dim * ids.len()]
                .iter()
                .map(|&bits| half::bf16::from_bits(bits).to_f32())
                .collect();
            sane(&keys, dim).context("keys after chunks of 512")?;
            first = Some(rows);
            continue;
        };
        ensure!(rows == *first, "chunks of {size} leave other keys and values than chunks of 512");
    }
    Ok(format!(
        "{} tokens in chunks of 512, 1, 8 and {} leave equal keys and values",
        ids.len(),
        machine.prefill_rows().min(ids.len())
    ))
}

/// Every pass as its graph and launch by launch: the same logits, keys and values.
pub fn graphs(machine: &mut Machine, ids: &[u32]) -> Result<String> {
    let vocab = machine.vocab();
    let passes =
        WIDTHS.map(|width| Pass::Verify { width }).into_iter().chain(PREFILL_ROWS.map(|rows| Pass::Prefill { rows }));
    let mut n_passes = 0;
    let eager_before = machine.counters().eager;
    for pass in passes {
        let (position, rows) = match pass {
            Pass::Prefill { rows } => (0, rows.min(ids.len())),
            _ => (70.min(ids.len() - MAX_WIDTH), machine.plan(pass).rows()),
        };
        let mut as_graph = None;
        for eager in [false, true] {
            machine.poison()?;
            fill(machine, &ids[..position], 0, usize::MAX)?;
            machine.force(pass, &ids[position..position + rows], position, eager)?;
            let logits = if let Pass::Verify { .. } = pass { machine.logits(rows)? } else { Vec::new() };
            let seen = (logits, machine.kv_rows(Owner::Target, position + rows)?);
            sane(&seen.0, vocab).with_context(|| format!("{pass:?}"))?;
            match &as_graph {
                None => as_graph = Some(seen),
                Some((logits, kv)) => {
                    same(&seen.0, logits, vocab)
                        .with_context(|| format!("{pass:?} launch by launch against its graph"))?;
                    ensure!(seen.1 == *kv, "{pass:?} launch by launch leaves other keys and values than its graph");
                }
            }
        }
        n_passes += 1;
    }
    ensure!(
        machine.counters().eager == eager_before,
        "{} passes have no graph",
        machine.counters().eager - eager_before
    );
    Ok(format!("{n_passes} passes give the same bits as graphs and launch by launch"))
}

/// The sampling kernels against the reference sampler on the same logits, for each kind of option.
pub fn sampling(machine: &mut Machine, ids: &[u32]) -> Result<String> {
    const TOKENS: usize = 6;
    let base = Sampling { temperature: 1.0, seed: 7, ..Sampling::default() };
    let cases = [
        Sampling::default(),
        base.clone(),
        Sampling { top_k: 5, temperature: 0.7, ..base.clone() },
        Sampling { top_p: 0.9, min_p: 0.02, ..base.clone() },
        Sampling { repetition_penalty: 1.3, presence_penalty: 0.5, frequency_penalty: 0.2, ..Sampling::default() },
        Sampling { logit_bias: vec![(ids[0], 4.0)], min_tokens: 3, ..base },
    ];
    let prompt = &ids[..20];
    for sampling in &cases {
        let tokens = plain(machine, prompt, sampling, TOKENS)?;
        let mut sequence = Sequence::new(prompt, prompt.len() - 1, machine.vocab(), sampling.clone(), unlimited());
        for (i, &token) in tokens.iter().enumerate() {
            machine.force(Pass::Verify { width: 1 }, &[sequence.root()], prompt.len() - 1 + i, false)?;
            let expected = sequence.accept(&mut machine.logits(1)?, &[]).tokens;
            ensure!(expected == [token], "{sampling:?}: token {i} is {token}, the reference sampler says {expected:?}");
        }
    }
    Ok(format!("{} kinds of options, {TOKENS} tokens each: the reference sampler chooses the same", cases.len()))
}

/// Drafts that are right, and wrong at each place, change nothing about a sampled answer.
pub fn drafts(machine: &mut Machine, ids: &[u32]) -> Result<String> {
    const TOKENS: usize = 40;
    let sampling = Sampling { temperature: 0.8, top_p: 0.95, seed: 3, ..Sampling::default() };
    let (prompt, vocab) = (&ids[..20], machine.vocab() as u32);
    let expected = plain(machine, prompt, &sampling, TOKENS + MAX_DRAFTS)?;
    for wrong in 0..=MAX_DRAFTS {
        machine.begin(prompt, 0, &sampling, &unlimited())?;
        machine.prefill(&prompt[..prompt.len() - 1])?;
        let mut tokens: Vec<u32> = Vec::new();
        while tokens.len() < TOKENS {
            let mut drafts = expected[tokens.len()..][..MAX_DRAFTS].to_vec();
            if let Some(draft) = drafts.get_mut(wrong) {
                *draft = (*draft + 1) % vocab;
            }
            machine.set_drafts(&drafts)?;
            machine.verify(1 + MAX_DRAFTS)?;
            let record = machine.record()?;
            ensure!(
                record.accepted == wrong,
                "draft {wrong} is the first wrong one, {} were accepted",
                record.accepted
            );
            tokens.extend(record.tokens);
        }
        let same = tokens.iter().zip(&expected).take_while(|(a, b)| a == b).count();
        ensure!(
            same >= TOKENS,
            "draft {wrong} wrong: token {same} is {:?}, without drafts {:?}",
            tokens.get(same),
            expected.get(same)
        );
    }
    Ok(format!("{TOKENS} sampled tokens with drafts wrong at each place: the same as without drafts"))
}

/// Drafts of the drafter, if there is one, and of n-gram search change nothing about greedy and sampled answers of `n`
/// tokens. The machine was made with n-gram drafting.
pub fn speculation(machine: &mut Machine, ids: &[u32], n: usize, drafter: bool) -> Result<String> {
    let prompt = &ids[..20];
    let (mut accepted, mut passes) = (0, 0);
    for temperature in [0.0, 0.8] {
        let sampling = Sampling { temperature, seed: 3, ..Sampling::default() };
        let expected = plain(machine, prompt, &sampling, n)?;
        // None: n-gram search.
        for drafts in
            [None, Some(1), Some(3), Some(MAX_DRAFTS)].into_iter().filter(|drafts| drafter || drafts.is_none())
        {
            machine.begin(prompt, 0, &sampling, &unlimited())?;
            machine.prefill(&prompt[..prompt.len() - 1])?;
            let (mut tokens, mut width) = (Vec::new(), 1);
            while tokens.len() < n {
                machine.verify(width)?;
                if let Some(drafts) = drafts {
                    machine.draft(drafts)?;
                }
                let record = machine.record()?;
                width = 1 + drafts.unwrap_or(record.ngram.min(MAX_DRAFTS));
                (accepted, passes) = (accepted + record.accepted, passes + 1);
                tokens.extend(record.tokens);
            }
            let source = drafts.map_or("n-gram drafts".to_string(), |n| format!("{n} drafts of the drafter"));
            let same = tokens.iter().zip(&expected).take_while(|(a, b)| a == b).count();
            let (found, wanted) = (tokens.get(same), expected.get(same));
            ensure!(
                same >= n,
                "{source}, temperature {temperature}: token {same} is {found:?}, without drafts {wanted:?}"
            );
        }
    }
    let sources = if drafter { "the drafter and n-gram search" } else { "n-gram search" };
    Ok(format!(
        "{n} tokens, greedy and sampled, with drafts of {sources}: the same as without; {accepted} drafts accepted in {passes} passes"
    ))
}

/// What draft-extend leaves in the drafter's cache behind `n` tokens or more, in cycles of every number of drafts,
/// equals what the drafter makes of that text as a prompt.
pub fn extends(machine: &mut Machine, ids: &[u32], n: usize) -> Result<String> {
    let prompt = &ids[..20];
    let sampling = Sampling { temperature: 0.8, seed: 3, ..Sampling::default() };
    machine.poison()?;
    machine.begin(prompt, 0, &sampling, &unlimited())?;
    machine.prefill(&prompt[..prompt.len() - 1])?;
    let (mut all, mut made, mut drafts) = (prompt.to_vec(), 0, 1);
    while all.len() < prompt.len() + n {
        machine.verify(1 + made)?;
        machine.draft(drafts)?;
        (made, drafts) = (drafts, drafts % MAX_DRAFTS + 1);
        all.extend(machine.record()?.tokens);
    }
    // The row of the last token but one is the last that has its next token.
    let rows = all.len() - 1;
    let extended = machine.kv_rows(Owner::Drafter, rows)?;
    let kv = machine.plan(Pass::Draft { width: MAX_DRAFTS + 1, drafts: 1 }).kv;
    let dim = kv.head_dim;
    let keys: Vec<f32> = extended[..kv.n_layers * kv.n_kv_heads * dim * rows]
        .iter()
        .map(|&bits| half::bf16::from_bits(bits).to_f32())
        .collect();
    sane(&keys, dim).context("keys of the drafter")?;
    machine.poison()?;
    machine.begin(&all, 0, &sampling, &unlimited())?;
    all[..rows].chunks(machine.prefill_rows()).try_for_each(|chunk| machine.prefill(chunk))?;
    ensure!(
        machine.kv_rows(Owner::Drafter, rows)? == extended,
        "the drafter's cache after {rows} rows differs from that of the same text as a prompt"
    );
    Ok(format!("the drafter's cache of {rows} rows equals that of the same text as a prompt, to the bit"))
}

/// `n` tokens without drafts.
fn plain(machine: &mut Machine, prompt: &[u32], sampling: &Sampling, n: usize) -> Result<Vec<u32>> {
    machine.begin(prompt, 0, sampling, &unlimited())?;
    machine.prefill(&prompt[..prompt.len() - 1])?;
    let mut tokens = Vec::new();
    for _ in 0..n {
        machine.verify(1)?;
        tokens.extend(machine.record()?.tokens);
    }
    ensure!(tokens.len() == n, "{n} passes gave {} tokens", tokens.len());
    Ok(tokens)
}

fn unlimited() -> Limits {
    Limits { end_ids: Vec::new(), max_tokens: usize::MAX, context: usize::MAX >> 33 }
}

/// Rows of `ids[filled..]` into the cache, which holds those before, in chunks of at most `size`; waits for them.
fn fill(machine: &mut Machine, ids: &[u32], filled: usize, size: usize) -> Result<()> {
    if filled == ids.len() {
        return Ok(());
    }
    machine.begin(ids, filled, &Sampling::default(), &unlimited())?;
    ids[filled..].chunks(size.min(machine.prefill_rows())).try_for_each(|chunk| machine.prefill(chunk))?;
    machine.gpu().synchronize()
}

/// Rows of `dim` numbers must be finite, different from each other, and not nearly constant: NaN equals nothing, and
/// zeros equal anything.
fn sane(rows: &[f32], dim: usize) -> Result<()> {
    let mut seen = HashSet::new();
    for (i, row) in rows.chunks_exact(dim).enumerate() {
        if let Some(x) = row.iter().find(|x| !x.is_finite()) {
            bail!("row {i} holds {x}");
        }
        let mean = row.iter().sum::<f32>() / dim as f32;
        let deviation = (row.iter().map(|x| (x - mean) * (x - mean)).sum::<f32>() / dim as f32).sqrt();
        ensure!(deviation > 1e-3, "row {i} is nearly constant: mean {mean}, deviation {deviation}");
        ensure!(seen.insert(row.iter().map(|x| x.to_bits()).collect::<Vec<u32>>()), "row {i} equals a row before it");
    }
    Ok(())
}

/// Equal to the bit; rows of `dim` numbers.
fn same(found: &[f32], expected: &[f32], dim: usize) -> Result<()> {
    ensure!(found.len() == expected.len(), "expected {} numbers, found {}", expected.len(), found.len());
    match found.iter().zip(expected).position(|(a, b)| a.to_bits() != b.to_bits()) {
        None => Ok(()),
        Some(at) => bail!("row {}, column {}: expected {}, found {}", at / dim, at % dim, expected[at], found[at]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_to_the_row() {
        let expected = [3.0, 4.0, 0.0, 0.0]; // root mean square 2.5
        assert_eq!(largest_error(&expected, &expected, 4), (0.0, 0));
        assert_eq!(largest_error(&[3.0, 4.0, 0.5, 0.0], &expected, 4), (0.2, 2));
        assert_eq!(largest_error(&[3.0, 5.0, 0.1, 0.0], &expected, 4), (1.0 / 6.5, 1));
        assert_eq!(largest_error(&[3.0, f32::NAN, 9.0, 0.0], &expected, 4), (f32::INFINITY, 1));
    }

    #[test]
    fn insane_rows_are_refused() {
        sane(&[1.0, 2.0, 3.0, 1.0], 2).unwrap();
        let check =
            |rows: &[f32], what: &str| assert!(sane(rows, 2).unwrap_err().to_string().contains(what), "{rows:?}");
        check(&[1.0, 2.0, f32::NAN, 1.0], "row 1 holds NaN");
        check(&[0.0, 0.0], "nearly constant");
        check(&[1.0, 2.0, 1.0, 2.0], "row 1 equals");
        assert!(same(&[1.0, 0.0], &[1.0, -0.0], 1).unwrap_err().to_string().contains("row 1, column 0"));
    }
}
