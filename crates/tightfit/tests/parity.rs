//! Promise 4: a step agrees with PyTorch, by the numbers in `fixtures/`.
//!
//! Tensors are compared as wholes: the norm of the difference over the norm of what is expected. Gradients are also compared
//! element by element, relative to the element and, for small ones, to the tensor's largest.

#[path = "common/fixture.rs"]
mod fixture;
#[path = "common/run.rs"]
mod run;

use fixture::{Fixture, fill_weights};
use run::{Machine, Recorder, relative_error, with_gradients_read};
use tightfit::op::Approximate;
use tightfit::{Adam, BatchShape, Builder, Forward, Optimizer, OptimizerConfig, Type, training_step};
use tightfit_cpu::simd::Isa;
use tightfit_ir::Tensor;
use tightfit_pass::{MICRO_STEP, TRAIN, UPDATE, autodiff, gradient_name};
use tightfit_testkit::interpret::Named;

/// On loss and gradients.
const GRADIENT_TOLERANCE: f64 = 1e-4;
/// On what training came to.
const TRAINING_TOLERANCE: f64 = 1e-3;

fn machines() -> impl Iterator<Item = Machine> {
    let isas = Isa::available().iter();
    isas.flat_map(|&isa| [1, 2].map(|threads| Machine::new(isa, threads)))
}

#[test]
fn tied_llama() {
    check_llama("llama_tied");
}

#[test]
fn untied_llama() {
    check_llama("llama_untied");
}

#[test]
fn packed_documents() {
    check_llama("llama_packed");
}

#[test]
fn mlp_classifier() {
    let fixture = Fixture::load("mlp");
    let size = |field| fixture.number(&format!("/config/{field}")) as u64;
    let [rows, inner, hidden, classes] = ["rows", "in_features", "hidden_size", "classes"].map(size);
    let mut b = Builder::new(0.0);
    let x = b.input("input", Type::f32([rows, inner]));
    let targets = b.input("targets", Type::i32([rows]));
    let count = b.input("token_count", Type::f32([1]));
    let x = b.linear_bias("fc1", x, hidden).unwrap();
    let x = b
        .layer_norm("norm", x, fixture.number("/config/layer_norm_eps"))
        .unwrap();
    let x = b.gelu(x, Approximate::None).unwrap();
    let x = b.linear_bias("fc2", x, hidden).unwrap();
    let x = b.gelu(x, Approximate::None).unwrap();
    let logits = b.linear_bias("fc3", x, classes).unwrap();
    let loss = b.softmax_cross_entropy(logits, targets, count).unwrap();

    let data = Named::from([
        ("input".to_owned(), fixture::input(rows * inner)),
        ("targets".to_owned(), Tensor::new([rows], fixture.numbers("/targets"))),
        ("token_count".to_owned(), Tensor::scalar(rows as f64)),
    ]);
    check_gradients(&fixture, &b.finish("loss", loss).unwrap(), &data);
}

#[test]
fn twenty_steps_of_adamw() {
    for name in ["llama_tied", "llama_untied"] {
        let fixture = Fixture::load(name);
        for machine in machines() {
            check_training(&fixture, machine, 1);
        }
        check_training(&fixture, Machine::new(Isa::detect(), 2), 2);
    }
}

fn check_llama(name: &str) {
    let fixture = Fixture::load(name);
    let (batch, seq) = fixture.batch_shape();
    // One chunk, equal chunks, and chunks of which the last is smaller.
    for loss_chunk in [batch * seq, 8, 7] {
        let shape = BatchShape { batch, seq, loss_chunk };
        let forward = fixture.llama().loss(shape).unwrap();
        check_gradients(&fixture, &forward, &fixture.batch(0, 1)[0]);
    }
}

fn check_gradients(fixture: &Fixture, forward: &Forward, data: &Named) {
    let step = with_gradients_read(autodiff(forward.clone()).unwrap());
    let expected = fixture.tensors("/gradients");
    for machine in machines() {
        let mut session = machine.session(step.clone());
        fill_weights(&mut session);
        let mut recorder = Recorder::new(&session, |_, _| data.clone());
        session.run(TRAIN, &mut recorder).unwrap();
        let results = &recorder.runs[0].results;
        let (loss, expected_loss) = (f64::from(results["loss"][0]), fixture.number("/loss"));
        let error = (loss - expected_loss).abs() / expected_loss;
        assert!(
            error <= GRADIENT_TOLERANCE,
            "{machine:?}: loss {loss}, expected {expected_loss}"
        );
        assert_eq!(results.len(), 1 + expected.len(), "one gradient for each weight");
        for (name, expected) in &expected {
            let gradient = &results[&gradient_name(name)];
            let error = relative_error(gradient, expected);
            assert!(error <= GRADIENT_TOLERANCE, "{machine:?}: {name} is off by {error:e}");
            let largest = expected.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
            for (i, (x, y)) in gradient.iter().zip(expected).enumerate() {
                let most = 1e-4 * y.abs() + 1e-5 * largest;
                assert!((x - y).abs() <= most, "{machine:?}: {name}[{i}] is {x}, expected {y}");
            }
        }
    }
}

fn check_training(fixture: &Fixture, machine: Machine, micro_batches: u32) {
    let at = |field: &str| format!("/training/{field}");
    let optimizer = |field: &str| fixture.number(&at(&format!("optimizer/{field}")));
    let config = OptimizerConfig {
        optimizer: Optimizer::AdamW(Adam {
            beta1: optimizer("betas/0"),
            beta2: optimizer("betas/1"),
            eps: optimizer("eps"),
        }),
        weight_decay: optimizer("weight_decay"),
        clip_norm: Some(optimizer("clip_norm")),
        loss_scale: None,
        seed: 1,
    };
    let (batch, seq) = fixture.batch_shape();
    let shape = BatchShape {
        batch: batch / u64::from(micro_batches),
        seq,
        loss_chunk: 7,
    };
    let forward = fixture.llama().loss(shape).unwrap();
    let mut session = machine.session(training_step(forward, &config, micro_batches, None).unwrap());
    fill_weights(&mut session);
    let initial = run::persistent(&mut session);

    let (losses, norms) = (fixture.numbers(&at("losses")), fixture.numbers(&at("grad_norms")));
    for (index, (expected_loss, expected_norm)) in losses.into_iter().zip(norms).enumerate() {
        let batch = fixture.batch(index % 4, micro_batches as usize);
        let mut recorder = Recorder::new(&session, |program, repeat| match program {
            MICRO_STEP => batch[repeat as usize].clone(),
            _ => Named::from([
                ("lr".to_owned(), Tensor::scalar(optimizer("lr"))),
                ("step".to_owned(), Tensor::scalar((index + 1) as f64)),
            ]),
        });
        session.run(TRAIN, &mut recorder).unwrap();
        let result = |program: &str, name: &str| -> f64 {
            let runs = recorder.runs.iter().filter(|run| run.program == program);
            runs.map(|run| f64::from(run.results[name][0])).sum()
        };
        for (what, x, expected) in [
            ("loss", result(MICRO_STEP, "loss"), expected_loss),
            ("gradient norm", result(UPDATE, "grad_norm"), expected_norm),
        ] {
            let close = (x - expected).abs() <= TRAINING_TOLERANCE * expected;
            assert!(close, "{machine:?}, step {index}: {what} is {x}, expected {expected}");
        }
    }
    let trained = run::persistent(&mut session);
    let change = |to: &[f32], from: &[f32]| -> Vec<f32> { to.iter().zip(from).map(|(to, from)| to - from).collect() };
    for (name, expected) in fixture.tensors(&at("final_parameters")) {
        let from = &initial[&name];
        let error = relative_error(&change(&trained[&name], from), &change(&expected, from));
        assert!(
            error <= TRAINING_TOLERANCE,
            "{machine:?}: the change of {name} is off by {error:e}"
        );
    }
}
