//! Every family agrees with transformers, by the numbers in `fixtures/family_*.json`: logits, loss and every gradient; and
//! generation, token by token with a cache, gives the logits of the whole text.
//!
//! Tolerances are those of `parity.rs`.

#[path = "common/fixture.rs"]
mod fixture;
#[path = "common/run.rs"]
mod run;

use std::path::Path;

use fixture::{Fixture, fill_weights};
use run::{Machine, Recorder, relative_error, with_gradients_read};
use tightfit::{BatchShape, DecodeShape, DecoderConfig, Forward, Step};
use tightfit_cpu::simd::Isa;
use tightfit_ir::{Routine, Tensor};
use tightfit_pass::{TRAIN, autodiff, gradient_name, no_grad};
use tightfit_testkit::interpret::Named;

/// On loss, logits and gradients: the norm of the difference over the norm of what is expected.
const TOLERANCE: f64 = 1e-4;

const LOGITS: &str = "logits";

#[test]
fn llama_of_smollm2() {
    check("smollm2");
}

#[test]
fn llama_with_llama3_rope() {
    check("llama3");
}

#[test]
fn llama_with_linear_rope_and_biases() {
    check("llama_linear");
}

#[test]
fn mistral() {
    check("mistral");
}

#[test]
fn qwen2() {
    check("qwen2");
}

#[test]
fn qwen3() {
    check("qwen3");
}

fn machines() -> impl Iterator<Item = Machine> {
    let isas = Isa::available().iter();
    isas.flat_map(|&isa| [1, 2].map(|threads| Machine::new(isa, threads)))
}

/// A fixture, and what of it only these tests read.
struct Case {
    fixture: Fixture,
    config: DecoderConfig,
    logits: Vec<f32>,
}

impl Case {
    fn load(case: &str) -> Self {
        let name = format!("family_{case}");
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../fixtures/{name}.json"));
        let json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let digits = json["logits"]["f32_hex"].as_str().unwrap().as_bytes().chunks(8);
        let bits = digits.map(|digits| u32::from_str_radix(str::from_utf8(digits).unwrap(), 16).unwrap());
        Self {
            fixture: Fixture::load(&name),
            config: DecoderConfig::from_hf(&json["config"].to_string()).unwrap(),
            logits: bits.map(f32::from_bits).collect(),
        }
    }
}

fn check(case: &str) {
    let case = Case::load(case);
    let (batch, seq) = case.fixture.batch_shape();
    let shape = BatchShape {
        batch,
        seq,
        loss_chunk: 7,
    };
    for machine in machines() {
        check_gradients(&case.fixture, case.config.loss(shape).unwrap(), machine);
        check_logits(&case, case.config.logits(shape).unwrap(), machine);
        for rows in [1, 5] {
            check_generation(&case, rows, machine);
        }
    }
}

fn check_gradients(fixture: &Fixture, forward: Forward, machine: Machine) {
    let mut session = machine.session(with_gradients_read(autodiff(forward).unwrap()));
    fill_weights(&mut session);
    let data = fixture.batch(0, 1).remove(0);
    let mut recorder = Recorder::new(&session, |_, _| data.clone());
    session.run(TRAIN, &mut recorder).unwrap();
    let results = &recorder.runs[0].results;

    let (loss, expected) = (f64::from(results["loss"][0]), fixture.number("/loss"));
    let close = (loss - expected).abs() <= TOLERANCE * expected;
    assert!(close, "{machine:?}: loss {loss}, expected {expected}");
    let gradients = fixture.tensors("/gradients");
    assert_eq!(results.len(), 1 + gradients.len(), "one gradient for each weight");
    for (name, expected) in &gradients {
        let error = relative_error(&results[&gradient_name(name)], expected);
        assert!(error <= TOLERANCE, "{machine:?}: {name} is off by {error:e}");
    }
}

fn check_logits(case: &Case, forward: Forward, machine: Machine) {
    let mut session = machine.session(alone(forward));
    fill_weights(&mut session);
    let data = case.fixture.batch(0, 1).remove(0);
    let mut recorder = Recorder::new(&session, |_, _| data.clone());
    session.run(LOGITS, &mut recorder).unwrap();
    let error = relative_error(&recorder.runs[0].results[LOGITS], &case.logits);
    assert!(error <= TOLERANCE, "{machine:?}: logits are off by {error:e}");
}

/// The first sequence, `rows` tokens a step; the last step is filled up.
fn check_generation(case: &Case, rows: usize, machine: Machine) {
    let seq = case.fixture.batch_shape().1 as usize;
    let shape = DecodeShape {
        rows: rows as u64,
        capacity: seq as u64 + 4,
    };
    let mut session = machine.session(alone(case.config.decode(shape).unwrap()));
    // Caches too: what was there before is never read.
    fill_weights(&mut session);
    let tokens = &case.fixture.batch(0, 1)[0]["tokens"].data;
    let vocab = case.config.vocab_size as usize;
    for start in (0..seq).step_by(rows) {
        let last = (start + rows).min(seq) - 1;
        let column =
            |element: &dyn Fn(usize) -> f64| Tensor::new([rows as u64], (start..start + rows).map(element).collect());
        let data = Named::from([
            ("tokens".to_owned(), column(&|t| if t < seq { tokens[t] } else { 0.0 })),
            ("positions".to_owned(), column(&|t| t as f64)),
            ("start".to_owned(), Tensor::scalar(start as f64)),
            ("last".to_owned(), Tensor::scalar((last - start) as f64)),
        ]);
        let mut recorder = Recorder::new(&session, |_, _| data.clone());
        session.run(LOGITS, &mut recorder).unwrap();
        let error = relative_error(
            &recorder.runs[0].results[LOGITS],
            &case.logits[last * vocab..(last + 1) * vocab],
        );
        assert!(error <= TOLERANCE, "{machine:?}: row {last} is off by {error:e}");
    }
}

/// A job that does nothing but this.
fn alone(forward: Forward) -> Step {
    Step {
        routines: vec![Routine::of(LOGITS, no_grad(forward).unwrap().graph)],
    }
}
