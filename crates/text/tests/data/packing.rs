//! What holds for any samples: every token is learned once, in its own context, and nothing of one document reaches another.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tightfit_text::data::{Long, Options};

use crate::toy::{Batch, Bytes, Done, Numbers, all_rows, options, run_on};

const VOCAB_SIZE: usize = 1 << 20;
const EOS: u32 = 0;

/// A line: tokens of a prompt, if it has one, and tokens to learn.
#[derive(Clone, Debug)]
struct Line {
    prompt: Option<usize>,
    learned: usize,
}

fn line() -> impl Strategy<Value = Line> {
    let length = prop_oneof![8 => 2usize..20, 1 => 20usize..90];
    (prop::option::of(0usize..30), length).prop_map(|(prompt, learned)| Line { prompt, learned })
}

/// A sample's tokens, each token of the file different, and how many of them are not learned.
struct Sample {
    tokens: Vec<u32>,
    uncounted: usize,
}

fn samples(lines: &[Line], eos: Option<u32>) -> (String, Vec<Sample>) {
    let mut next = 1..;
    let mut take = |count: usize| -> Vec<u32> { next.by_ref().take(count).collect() };
    let text = |tokens: &[u32]| tokens.iter().map(|token| format!("{token} ")).collect::<String>();
    let mut file = String::new();
    let mut samples = Vec::new();
    for line in lines {
        let (prompt, learned) = (take(line.prompt.unwrap_or(0)), take(line.learned));
        file += &match line.prompt {
            None => format!("{{\"text\": \"{}\"}}\n", text(&learned)),
            Some(_) => format!(
                "{{\"prompt\": \"{}\", \"completion\": \"{}\"}}\n",
                text(&prompt),
                text(&learned)
            ),
        };
        samples.push(Sample {
            uncounted: prompt.len().max(1),
            tokens: [prompt, learned, eos.into_iter().collect()].concat(),
        });
    }
    (file, samples)
}

/// Checks rows against the samples they were made of.
fn check(rows: &[Batch], samples: &[Sample], options: &Options) {
    let dropped = |sample: &Sample| options.long == Long::Drop && sample.tokens.len() > options.seq + 1;
    // By the token before it, which is unique: the target, and where in its sample it is.
    let mut expected = BTreeMap::new();
    let mut follows = BTreeMap::new();
    for sample in samples {
        for (i, pair) in sample.tokens.windows(2).enumerate() {
            follows.insert(pair[0], pair[1]);
            if i + 1 >= sample.uncounted && !dropped(sample) {
                expected.insert(pair[0], (pair[1], i + 1));
            }
        }
    }
    for row in rows {
        assert_eq!(row.tokens.len(), options.seq);
        for t in 0..options.seq {
            let (token, start) = (row.tokens[t] as u32, row.doc_start[t]);
            assert_eq!(row.positions[t], t as i32 - start);
            assert!(start >= 0 && start <= t as i32);
            assert_eq!(row.doc_start[start as usize], start, "a document starts where it says");
            if start < t as i32 {
                assert_eq!(row.doc_start[t - 1], start);
                assert_eq!(
                    follows.get(&(row.tokens[t - 1] as u32)),
                    Some(&token),
                    "documents are whole"
                );
            }
            if row.targets[t] >= 0 {
                let (target, before) = expected.remove(&token).expect("learned once, if at all");
                assert_eq!(row.targets[t] as u32, target);
                let stride = options.stride.unwrap_or(options.seq);
                let context = row.positions[t] as usize + 1;
                assert!(context >= before.min(options.seq - stride + 1), "{context} of {before}");
            }
        }
    }
    assert_eq!(expected, BTreeMap::new(), "never learned");
}

fn all(done: Done) -> Vec<Batch> {
    [all_rows(done.train), all_rows(done.eval)]
        .into_iter()
        .flatten()
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn every_token_is_learned_once(
        lines in prop::collection::vec(line(), 1..120),
        seq in 1usize..40,
        stride in prop::option::of(1usize..40),
        drop: bool,
        eos: bool,
        eval in prop_oneof![Just(0.0), Just(0.3)],
        seed: u64,
    ) {
        let eos = eos.then_some(EOS);
        let (file, samples) = samples(&lines, eos);
        let options = Options {
            vocab_size: VOCAB_SIZE,
            long: if drop { Long::Drop } else { Long::Split },
            stride: stride.map(|stride| stride.min(seq)),
            eval_fraction: eval,
            end_documents: true,
            seed,
            ..options(seq)
        };
        let result = run_on(&Numbers { eos }, &options, "a.jsonl", &file);
        if samples.iter().all(|sample| drop && sample.tokens.len() > seq + 1) {
            prop_assert!(result.is_err_and(|error| error.to_string().contains("split long samples")));
            return Ok(());
        }
        let done = result.unwrap();
        let again = run_on(&Numbers { eos }, &options, "a.jsonl", &file).unwrap();
        prop_assert_eq!(&done.prepared, &again.prepared);
        let counts = done.prepared.counts.clone();
        prop_assert_eq!(counts.samples, lines.len() as u64);
        prop_assert_eq!(counts.tokens, samples.iter().map(|sample| sample.tokens.len() as u64).sum::<u64>());
        prop_assert!(done.prepared.train_rows > 0);
        let rows = done.prepared.train_rows + done.prepared.eval_rows;
        prop_assert_eq!(done.prepared.eval_rows > 0, eval > 0.0 && rows > 1);
        let rows = all(done);
        prop_assert_eq!(rows.len() as u64, again.prepared.train_rows + again.prepared.eval_rows);
        let targets = rows.iter().flat_map(|row| &row.targets).filter(|&&target| target >= 0).count();
        prop_assert_eq!(counts.targets, targets as u64);
        check(&rows, &samples, &options);
    }
}

/// About the share that was asked for is held out, other samples for another seed, and never a piece of one that is not.
#[test]
fn a_share_is_held_out_by_sample() {
    let lines = vec![
        Line {
            prompt: None,
            learned: 25,
        };
        4000
    ];
    let (file, samples) = samples(&lines, None);
    let mut held_out = Vec::new();
    for seed in [1, 2] {
        let options = Options {
            vocab_size: VOCAB_SIZE,
            eval_fraction: 0.1,
            end_documents: true,
            seed,
            ..options(10)
        };
        let done = run_on(&Numbers { eos: None }, &options, "a.jsonl", &file).unwrap();
        let tokens: std::collections::BTreeSet<_> =
            all_rows(done.eval).iter().flat_map(|row| row.tokens.clone()).collect();
        // A sample's pieces are on one side.
        let whole = samples.iter().filter(|sample| {
            let inside = sample.tokens[..24]
                .iter()
                .filter(|&&token| tokens.contains(&(token as i32)))
                .count();
            assert!(inside == 0 || inside == 24, "{inside}");
            inside > 0
        });
        let count = whole.count();
        // Five standard deviations of a binomial count.
        assert!(
            (count as f64 - 400.0).abs() < 5.0 * (4000.0f64 * 0.1 * 0.9).sqrt(),
            "{count}"
        );
        held_out.push((tokens, done.prepared.fingerprint));
    }
    assert_ne!(held_out[0], held_out[1]);
}

/// Of one long text, pieces are held out.
#[test]
fn pieces_of_a_text_file_are_held_out() {
    let options = Options {
        eval_fraction: 0.2,
        end_documents: true,
        ..options(10)
    };
    let done = run_on(&Bytes { chat: false }, &options, "a.txt", "0123456789".repeat(1000)).unwrap();
    let (train, eval) = (done.prepared.train_rows, done.prepared.eval_rows);
    assert_eq!(train + eval, 1001);
    assert!((130..270).contains(&eval), "{eval}");
}

/// Two rows are enough for both sides; with one, training goes first.
#[test]
fn small_files_have_rows_on_both_sides() {
    for seed in 0..20 {
        let options = Options {
            eval_fraction: if seed < 10 { 0.01 } else { 0.99 },
            end_documents: true,
            seed,
            ..options(4)
        };
        for (text, rows) in [("abcdef", (1, 1)), ("ab", (1, 0))] {
            let done = run_on(&Bytes { chat: false }, &options, "a.txt", text).unwrap();
            assert_eq!((done.prepared.train_rows, done.prepared.eval_rows), rows);
            assert_eq!((done.train.rows(), done.eval.rows()), rows);
            all(done);
        }
    }
}

/// Packing wastes little: here under 2 % of all entries, where one sample per row would waste nine tenths.
#[test]
fn rows_are_nearly_full() {
    // Lengths between 4 and 500, short ones more often, from a fixed sequence.
    let mut state = 1u32;
    let lines: Vec<_> = (0..5000)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let unit = f64::from(state >> 8) / f64::from(1 << 24);
            Line {
                prompt: None,
                learned: (4.0 * 125f64.powf(unit)) as usize,
            }
        })
        .collect();
    let (file, samples) = samples(&lines, None);
    let options = Options {
        vocab_size: VOCAB_SIZE,
        ..options(1024)
    };
    let done = run_on(&Numbers { eos: None }, &options, "a.jsonl", file).unwrap();
    let entries = done.prepared.train_rows * 1025;
    let share = done.prepared.counts.padding as f64 / entries as f64;
    println!("{:.2} % padding in {} rows", 100.0 * share, done.prepared.train_rows);
    assert!(share < 0.02, "{share}");
    check(&all(done), &samples, &options);
}
