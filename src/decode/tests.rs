//! The engine and the sequence at their edges, on a backend that checks what it is told and whose next token is a
//! function of the history.
use super::*;
use crate::decode::policy::Costs;
use anyhow::{bail, Result};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

const VOCAB: usize = 50;
const CONTEXT: usize = 40;

/// The token that follows a history: any function will do, as long as every token of the history counts.
fn next(history: &[u32]) -> u32 {
    history.iter().fold(17u32, |h, &id| h.wrapping_mul(31).wrapping_add(id)) % VOCAB as u32
}

fn continuation(prompt: &[u32], n: usize) -> Vec<u32> {
    let mut all = prompt.to_vec();
    (0..n).for_each(|_| all.push(next(&all)));
    all.split_off(prompt.len())
}

/// Rows in the cache, in order; the engine must have put exactly the history there.
#[derive(Default)]
struct Fake {
    rows: Rc<RefCell<Vec<u32>>>,
    queue_depth: usize,
    sequence: Option<Sequence>,
    records: VecDeque<Record>,
}

impl Backend for Fake {
    fn context(&self) -> usize {
        CONTEXT
    }
    fn vocab(&self) -> usize {
        VOCAB
    }
    fn prefill_rows(&self) -> usize {
        4
    }
    fn queue_depth(&self) -> usize {
        self.queue_depth
    }
    fn begin(&mut self, prompt: &[u32], keep: usize, sampling: &Sampling, limits: &Limits) -> Result<()> {
        assert_eq!(&self.rows.borrow()[..keep], &prompt[..keep], "kept rows are another prompt's");
        self.rows.borrow_mut().truncate(keep);
        self.sequence = Some(Sequence::new(prompt, keep, VOCAB, sampling.clone(), limits.clone()));
        Ok(())
    }
    fn prefill(&mut self, tokens: &[u32]) -> Result<()> {
        self.rows.borrow_mut().extend_from_slice(tokens);
        self.sequence.as_mut().unwrap().length += tokens.len();
        Ok(())
    }
    fn verify(&mut self, width: usize) -> Result<()> {
        assert_eq!(width, 1);
        let sequence = self.sequence.as_mut().unwrap();
        if sequence.end.is_none() {
            self.rows.borrow_mut().push(sequence.root());
            assert_eq!(*self.rows.borrow(), sequence.history, "the cache is not the history");
        }
        let mut logits = vec![0.0; VOCAB];
        logits[next(&sequence.history) as usize] = 1.0;
        self.records.push_back(sequence.accept(&mut logits, &[]));
        Ok(())
    }
    fn draft(&mut self, _: usize) -> Result<()> {
        bail!("no drafter")
    }
    fn set_drafts(&mut self, _: &[u32]) -> Result<()> {
        bail!("no drafter")
    }
    fn record(&mut self) -> Result<Record> {
        Ok(self.records.pop_front().unwrap())
    }
    fn truncate(&mut self, n: usize) -> Result<()> {
        let sequence = self.sequence.as_mut().unwrap();
        sequence.truncate(n);
        self.rows.borrow_mut().truncate(sequence.length);
        Ok(())
    }
    fn counters(&self) -> Counters {
        Counters::default()
    }
}

impl Probe for Fake {
    fn measure(&mut self) -> Result<Costs> {
        bail!("no drafter")
    }

    fn time_verify(&mut self, _width: usize, _depth: usize, _n: usize) -> Result<Vec<f64>> {
        unimplemented!("not timed")
    }

    fn profile(&mut self, _depth: usize) -> Result<Vec<crate::decode::StepTime>> {
        unimplemented!("not timed")
    }
}

fn engine(queue_depth: usize) -> Engine {
    Engine::new(Box::new(Fake { queue_depth, ..Fake::default() }), Drafting::default()).unwrap()
}

fn ask(engine: &mut Engine, prompt: &[u32], max_tokens: Option<usize>, end_ids: &[u32]) -> Answer {
    let request = Request { prompt, sampling: &Sampling::default(), end_ids, max_tokens };
    engine.generate(&request, &mut |_| Flow::Go).unwrap()
}

fn prompt(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 7 + 3) % VOCAB as u32).collect()
}

#[test]
fn ends() {
    for depth in [1, 2, 3] {
        let p = prompt(10);
        let all = continuation(&p, 30);
        let check = |max_tokens, end_ids: &[u32], n: usize, finish: Finish| {
            let answer = ask(&mut engine(depth), &p, max_tokens, end_ids);
            assert_eq!((answer.tokens.as_slice(), answer.finish), (&all[..n], finish), "queue depth {depth}");
        };
        check(None, &[], 30, Finish::Context);
        check(Some(30), &[], 30, Finish::Length); // both at once: the budget is named
        check(Some(31), &[], 30, Finish::Context);
        check(Some(1), &[], 1, Finish::Length);
        check(Some(0), &[], 0, Finish::Length);
        let at = all.iter().position(|id| *id == all[8]).unwrap();
        check(None, &[all[8]], at + 1, Finish::Eos(all[8]));
        check(Some(at + 1), &[all[8]], at + 1, Finish::Eos(all[8])); // an end token beats the budget
    }
}

#[test]
fn o16_prompts_around_the_context() {
    for (n, tokens) in [(CONTEXT - 1, 1), (CONTEXT, 0)] {
        let answer = ask(&mut engine(1), &prompt(n), None, &[]);
        assert_eq!((answer.tokens.len(), answer.finish), (tokens, Finish::Context));
    }
    let p = prompt(CONTEXT + 1);
    let request = Request { prompt: &p, sampling: &Sampling::default(), end_ids: &[], max_tokens: None };
    let error = engine(1).generate(&request, &mut |_| Flow::Go).err().unwrap().to_string();
    assert!(error.contains("41 tokens") && error.contains("holds 40"), "{error}");
}

#[test]
fn bad_prompts_are_errors() {
    let error = |p: &[u32]| {
        let request = Request { prompt: p, sampling: &Sampling::default(), end_ids: &[], max_tokens: None };
        engine(1).generate(&request, &mut |_| Flow::Go).err().unwrap().to_string()
    };
    assert!(error(&[]).contains("empty"));
    assert!(error(&[1, 50]).contains("ids 0 to 49"));
}

/// Whatever came before, the answer is that of a fresh engine and only rows that are new are computed.
#[test]
fn prefixes_are_reused() {
    for depth in [1, 2] {
        let mut engine = engine(depth);
        let p = prompt(9);
        let first = ask(&mut engine, &p, Some(6), &[]);
        assert_eq!((first.reused, first.prefilled), (0, 8));
        let turn = |extra: &[u32]| [&p, &first.tokens[..], extra].concat();
        // 14 rows are in the cache (the last token's is not); the last common one is computed again.
        let second = ask(&mut engine, &turn(&[1, 2, 3]), Some(5), &[]);
        assert_eq!((second.reused, second.prefilled), (13, 4));
        assert_eq!(second.tokens, continuation(&turn(&[1, 2, 3]), 5));
        // Back to an earlier state, to the same prompt, to another one, to a prefix, to nothing.
        for other in [turn(&[4]), turn(&[4]), prompt(20), p[..3].to_vec(), p[..1].to_vec(), vec![9]] {
            assert_eq!(ask(&mut engine, &other, Some(4), &[]).tokens, continuation(&other, 4));
        }
        engine.clear();
        assert_eq!(ask(&mut engine, &p, Some(6), &[]).reused, 0);
    }
}

/// A caller that stops keeps what it says, and the next call finds the cache of exactly that.
#[test]
fn o11_stops_by_the_caller() {
    for depth in [1, 2, 3] {
        for stop_at in 1..8 {
            let mut engine = engine(depth);
            let p = prompt(6);
            let request = Request { prompt: &p, sampling: &Sampling::default(), end_ids: &[], max_tokens: Some(20) };
            let mut seen = 0;
            let answer = engine
                .generate(&request, &mut |event| match event {
                    Event::Tokens(tokens) => {
                        seen += tokens.len();
                        if seen >= stop_at {
                            Flow::Stop { keep: tokens.len() }
                        } else {
                            Flow::Go
                        }
                    }
                    Event::Prefilled { .. } => Flow::Go,
                })
                .unwrap();
            assert_eq!((answer.finish, answer.tokens.as_slice()), (Finish::Stopped, &continuation(&p, stop_at)[..]));
            let turn = [&p, &answer.tokens[..], &[5]].concat();
            let after = ask(&mut engine, &turn, Some(3), &[]);
            assert_eq!(after.tokens, continuation(&turn, 3));
            assert_eq!(after.reused, p.len() + stop_at - 2);
        }
    }
    // During prefill: chunks of 4 rows, stopped after the first.
    let mut engine = engine(1);
    let p = prompt(12);
    let request = Request { prompt: &p, sampling: &Sampling::default(), end_ids: &[], max_tokens: None };
    let answer = engine.generate(&request, &mut |_| Flow::Stop { keep: 0 }).unwrap();
    assert_eq!((answer.finish, answer.tokens.len(), answer.prefilled), (Finish::Stopped, 0, 4));
    assert_eq!(ask(&mut engine, &p, Some(3), &[]).tokens, continuation(&p, 3));
}

/// Drafts right up to some place: tokens of the block up to the first end, in every combination of ends.
#[test]
fn o11_ends_inside_a_block() {
    let p = prompt(5);
    let samples = continuation(&p, 6);
    let block = |right: usize, limits: Limits| {
        let mut sequence = Sequence::new(&p, 4, VOCAB, Sampling::default(), limits);
        let mut drafts = samples[..5].to_vec();
        if let Some(wrong) = drafts.get_mut(right) {
            *wrong = (*wrong + 1) % VOCAB as u32;
        }
        // Row i is what the model says after i drafts; after a wrong one it says nothing that counts.
        let mut logits = vec![0.0; 6 * VOCAB];
        for i in 0..6 {
            let id = if i <= right { samples[i] } else { 0 };
            logits[i * VOCAB + id as usize] = 1.0;
        }
        let record = sequence.accept(&mut logits, &drafts);
        assert_eq!(sequence.history, [&p, &record.tokens[..]].concat());
        assert_eq!(sequence.length, 4 + record.tokens.len());
        (record.tokens.len(), record.accepted, record.end)
    };
    let limits = |end_ids: &[u32], max_tokens, context| Limits { end_ids: end_ids.to_vec(), max_tokens, context };
    let free = || limits(&[], 100, 100);
    for right in 0..=5 {
        assert_eq!(block(right, free()), (right + 1, right, None));
        for at in 0..=5 {
            let (end, first) = (samples[at], samples.iter().position(|id| *id == samples[at]).unwrap());
            let n = (right + 1).min(first + 1);
            let ended = first <= right;
            let accepted = n.min(right);
            assert_eq!(block(right, limits(&[end], 100, 100)), (n, accepted, ended.then_some(End::Eos(end))));
            let (n, reached) = ((right + 1).min(at + 1), at <= right);
            assert_eq!(block(right, limits(&[], at + 1, 100)), (n, n.min(right), reached.then_some(End::Length)));
            assert_eq!(
                block(right, limits(&[], 100, p.len() + at + 1)),
                (n, n.min(right), reached.then_some(End::Context))
            );
        }
    }
    let mut ended = Sequence::new(&p, 4, VOCAB, Sampling::default(), limits(&[], 0, 100));
    assert_eq!(ended.accept(&mut [0.0; VOCAB], &[]).end, Some(End::Length));
    assert_eq!(ended.history, p);
}

/// Truncated, a sequence is as if the tokens had never been: counts, end and what is sampled next.
#[test]
fn truncating_forgets() {
    let p = prompt(5);
    let limits = Limits { end_ids: Vec::new(), max_tokens: 4, context: 100 };
    let sampling = Sampling { frequency_penalty: 1.0, ..Sampling::default() };
    let mut sequence = Sequence::new(&p, 4, VOCAB, sampling, limits);
    let logits = || (0..VOCAB).map(|id| if id < 4 { 2.0 - 0.3 * id as f32 } else { 0.0 }).collect::<Vec<f32>>();
    let step = |sequence: &mut Sequence| sequence.accept(&mut logits(), &[]).tokens[0];
    let four: Vec<u32> = (0..4).map(|_| step(&mut sequence)).collect();
    assert_eq!(sequence.end, Some(End::Length));
    sequence.truncate(6);
    assert_eq!((sequence.length, sequence.end, sequence.output()), (5, None, &four[..1]));
    assert_eq!(sequence.counts.in_output.iter().sum::<u32>(), 1);
    assert_eq!((0..3).map(|_| step(&mut sequence)).collect::<Vec<_>>(), four[1..]);
}
