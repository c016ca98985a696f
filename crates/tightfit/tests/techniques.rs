//! All techniques, each by itself and in all pairs, by the flags of the command: a job trains and equals the plain run, or is refused
//! with the reason and what to do instead.
//!
//! Exact techniques leave every bit. What sums are cut otherwise (micro-batches, and rows of the loss, of an MLP and of an
//! evaluation) changes rounding: within 1e-5 of the plain run, and no bit more than by itself, whatever exact technique is beside it.
//! What changes the numbers themselves (precision, adapters, quantised bases, other optimizers) is held to itself: beside it, exact
//! techniques leave every bit as well, and rounding is that of its numbers.

#[path = "common/flags.rs"]
mod flags;
#[path = "common/run.rs"]
mod run;

use std::collections::BTreeMap;

use flags::{Left, job, settings, train};
use tightfit::Plan;
use tightfit_ir::Role;
use tightfit_pass::SMALLEST;

/// The second one starts from moments that are not zero, and from weights that are not the first.
const STEPS: u64 = 2;

/// A model whose matrices, and what it saves for its backward, are large enough to be offloaded, with odd sizes where there may be:
/// 6 × 66 tokens. `adam_eps` keeps updates smooth: at 1e-8 the first ones are the sign of a gradient, however small.
const BASE: &str = "--hidden-size 136 --intermediate-size 141 --heads 4 --kv-heads 2 --layers 2 --batch 6 --seq 66 --threads 2 \
                    --eval-batches 2 --recompute none --lr 0.01";

/// Jobs that pairs are tried on: whether freed memory is poisoned, which shows reads of it, and hides transfers that nothing waits for;
/// and whether pairs with what changes numbers are among them. This clipping bites on each step.
const JOBS: [(&str, bool, bool); 4] = [
    ("--tie-word-embeddings true --clip-norm 0.25", false, false),
    ("--tie-word-embeddings true --clip-norm none", true, true),
    ("--tie-word-embeddings false --clip-norm 0.25", true, true),
    ("--tie-word-embeddings false --clip-norm none", false, false),
];

/// What losses of 16-bit numbers may differ by where sums are cut otherwise, and losses of other numbers from those of the plain run.
const NUMBERS_TOLERANCE: f64 = 0.02;

/// What a technique may change.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Changes {
    Nothing,
    /// Rounding, in training and evaluation.
    Rounding,
    /// Rounding in evaluation alone.
    Evaluation,
    /// What is computed.
    Numbers,
}
use Changes::{Evaluation, Nothing, Numbers, Rounding};

/// One technique: its flag.
struct Technique {
    flag: &'static str,
    value: &'static str,
    changes: Changes,
}

const fn technique(flag: &'static str, value: &'static str, changes: Changes) -> Technique {
    Technique { flag, value, changes }
}

const TECHNIQUES: [Technique; 21] = [
    technique("--recompute", "block", Nothing),
    technique("--recompute", "40%", Nothing),
    technique(OFFLOAD, "activations", Nothing),
    technique(OFFLOAD, "optimizer", Nothing),
    technique(OFFLOAD, "weights", Nothing),
    technique(UPDATE_IN_BACKWARD, "true", Nothing),
    technique(MICRO_BATCH, "2", Rounding),
    technique("--loss-chunk", "53", Rounding),
    technique("--mlp-tile", "70", Rounding),
    technique("--eval-batch", "5", Evaluation),
    technique("--precision", "bf16-mixed", Numbers),
    technique("--precision", "f16-mixed", Numbers),
    technique("--precision", "bf16", Numbers),
    technique("--optimizer", "adamw-8bit", Numbers),
    technique("--optimizer", "adafactor", Numbers),
    technique("--optimizer", "lion", Numbers),
    technique("--optimizer", "apollo --apollo-rank 16", Numbers),
    technique("--optimizer", "sgd", Numbers),
    technique(METHOD, "lora --rank 48", Numbers),
    technique(METHOD, "qlora --rank 48", Numbers),
    technique(BASE_FORMAT, "int8", Numbers),
];

const OFFLOAD: &str = "--offload";
const UPDATE_IN_BACKWARD: &str = "--update-in-backward";
const MICRO_BATCH: &str = "--micro-batch";
/// Adapters that are large enough for an 8-bit state.
const METHOD: &str = "--method";
const BASE_FORMAT: &str = "--base";

/// Two values of one flag: those of `--offload` go together, others replace each other.
fn exclusive(a: &Technique, b: &Technique) -> bool {
    a.flag == b.flag && a.flag != OFFLOAD
}

/// The flags of some techniques together.
fn flags<'a>(techniques: impl IntoIterator<Item = &'a Technique>) -> String {
    let mut values: BTreeMap<&str, String> = BTreeMap::new();
    for technique in techniques {
        let value = values.entry(technique.flag).or_default();
        let comma = if value.is_empty() { "" } else { "," };
        *value = format!("{value}{comma}{}", technique.value);
    }
    values.iter().map(|(flag, value)| format!(" {flag} {value}")).collect()
}

/// The role of what an offloading technique moves.
fn offloaded_role(technique: &Technique) -> Option<Role> {
    match technique.value {
        _ if technique.flag != OFFLOAD => None,
        "activations" => Some(Role::Activation),
        "optimizer" => Some(Role::OptimizerState),
        _ => Some(Role::Weight),
    }
}

/// Whether a plan is on the lower tier with what the technique puts there, if it does.
fn offloads_what_it_says(technique: &Technique, plan: &Plan) -> bool {
    let Some(role) = offloaded_role(technique) else {
        return true;
    };
    let tensors = plan.summary().lower_tier_by_role;
    tensors.iter().any(|&(other, bytes)| other == role && bytes > 0)
}

/// Whether a plan has nothing that the technique would move: tensors may be too small where numbers are.
fn has_nothing_to_move(technique: &Technique, plan: &Plan) -> bool {
    let role = offloaded_role(technique).filter(|&role| role != Role::Activation);
    role.is_some_and(|role| {
        let mut tensors = plan.liveness().persistent.iter();
        !tensors.any(|tensor| tensor.role == role && tensor.ty.bytes() >= SMALLEST)
    })
}

/// What the refusal of these techniques together says, if they are refused.
fn refusal(techniques: &[&Technique]) -> Option<&'static [&'static str]> {
    let has = |flag| techniques.iter().any(|technique| technique.flag == flag);
    match () {
        () if has(UPDATE_IN_BACKWARD) && has(MICRO_BATCH) => Some(&[
            UPDATE_IN_BACKWARD,
            "--micro-batch 2",
            "say --micro-batch 6",
            "leave --update-in-backward out",
        ]),
        () if has(BASE_FORMAT) && !has(METHOD) => Some(&["--base is int8", "--method full", "say --method lora"]),
        () => None,
    }
}

/// One job with its runs by their flags, each made once.
struct Runs {
    job: &'static str,
    poison: bool,
    done: BTreeMap<String, (Plan, Left)>,
}

impl Runs {
    fn line(&self, flags: &str) -> String {
        // Small gradients are not blown up by what divides by them.
        let eps = match ["adafactor", "lion", "sgd"].iter().any(|other| flags.contains(other)) {
            true => "",
            false => " --adam-eps 1e-3",
        };
        format!("{BASE} {}{eps}{flags}", self.job)
    }

    fn run(&mut self, flags: &str) -> (Plan, Left) {
        let line = self.line(flags);
        let run = || {
            let job = job(&line);
            (job.plan.clone(), train(job, STEPS, self.poison))
        };
        self.done.entry(flags.to_owned()).or_insert_with(run).clone()
    }

    /// Trains with the techniques and compares, or expects the refusal.
    fn check(&mut self, techniques: &[&Technique]) {
        let together = flags(techniques.iter().copied());
        let line = self.line(&together);
        if let Some(words) = refusal(techniques) {
            let refused = settings(&line).unwrap_err().to_string();
            for words in words {
                assert!(refused.contains(words), "{line}: {refused}");
            }
            return;
        }
        let (plan, found) = self.run(&together);
        for (index, technique) in techniques.iter().enumerate() {
            let others = techniques.iter().enumerate().filter(|(other, _)| *other != index);
            let others: Vec<&Technique> = others.map(|(_, technique)| *technique).collect();
            if refusal(&others).is_some() {
                continue;
            }
            let (without, _) = self.run(&flags(others));
            let of = format!("{line}: {} {}", technique.flag, technique.value);
            if has_nothing_to_move(technique, &without) {
                continue;
            }
            assert!(plan.step() != without.step(), "{of} changes nothing");
            assert!(offloads_what_it_says(technique, &plan), "{of}");
        }
        let kind = |changes: &'static [Changes]| {
            let of_kind = techniques
                .iter()
                .filter(|technique| changes.contains(&technique.changes));
            flags(of_kind.copied())
        };
        let (_, rounded) = self.run(&kind(&[Rounding, Numbers]));
        assert!(found.trained_alike(&rounded), "{line}: other bits");
        let (_, rounded) = self.run(&kind(&[Rounding, Evaluation, Numbers]));
        assert!(found.alike(&rounded), "{line}: other bits in evaluation");
        if techniques.iter().any(|technique| technique.changes == Numbers) {
            let (error, of) = found.relative_error_of_losses(&self.run(&kind(&[Numbers])).1);
            assert!(error <= NUMBERS_TOLERANCE, "{line}: {of} is off by {error:e}");
            // Another optimizer goes another way from the same place.
            let (first, plain) = (found.losses[0], self.run("").1.losses[0]);
            let error = (first / plain - 1.0).abs();
            assert!(
                error <= NUMBERS_TOLERANCE,
                "{line}: the first loss is {first}, {plain} in the plain run"
            );
        } else {
            let (error, of) = found.relative_error(&self.run("").1);
            assert!(error <= 1e-5, "{line}: {of} is off by {error:e}");
        }
    }
}

#[test]
fn every_pair_of_techniques_trains_as_the_plain_run_or_is_refused() {
    for (job, poison, numbers) in JOBS {
        let mut runs = Runs {
            job,
            poison,
            done: BTreeMap::new(),
        };
        let tried = |technique: &&Technique| numbers || technique.changes != Numbers;
        for (index, technique) in TECHNIQUES.iter().enumerate().filter(|(_, technique)| tried(technique)) {
            runs.check(&[technique]);
            for other in TECHNIQUES[..index].iter().filter(|other| !exclusive(technique, other)) {
                runs.check(&[other, technique]);
            }
        }
    }
}
