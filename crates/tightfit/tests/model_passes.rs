//! The model passes on the CPU backend: `chunk_loss` and `tile_mlp` change rounding and no more, and save what they say.

#[path = "common/run.rs"]
mod run;

use std::collections::BTreeMap;

use run::{Machine, Recorder, relative_error, with_gradients_read};
use tightfit::{Builder, Forward, Step, Type, ValueId};
use tightfit_cpu::simd::Isa;
use tightfit_ir::Routine;
use tightfit_pass::{EVALUATE, LossChunk, TRAIN, autodiff, chunk_loss, no_grad, tile_mlp};
use tightfit_testkit::data::{BatchSpec, batch};
use tightfit_testkit::interpret::{Named, initial};

const TOLERANCE: f64 = 1e-5;
const SPEC: BatchSpec = BatchSpec {
    rows: 100,
    vocab_size: 300,
    context: 100,
    ignore_index: -100,
};
const HIDDEN: u64 = 48;
/// Deep enough for products of several blocks, between which a residual is rounded.
const INTERMEDIATE: u64 = 900;

fn mlp(b: &mut Builder, x: ValueId, residual: Option<ValueId>) -> ValueId {
    let gate = b.linear("gate", x, INTERMEDIATE).unwrap();
    let up = b.linear("up", x, INTERMEDIATE).unwrap();
    let hidden = b.swiglu(gate, up).unwrap();
    b.linear_with("down", hidden, HIDDEN, true, residual).unwrap()
}

fn model() -> Forward {
    let mut b = Builder::new(0.2);
    let [tokens, targets] = ["tokens", "targets"].map(|name| b.input(name, Type::i32([SPEC.rows])));
    let count = b.input("token_count", Type::f32([1]));
    let [mut x, table] = b.embedding("embed", tokens, SPEC.vocab_size, HIDDEN).unwrap();
    for layer in ["0", "1"] {
        x = b.scope(layer, |b| {
            let normed = b.rms_norm("norm", x, 1e-5).unwrap();
            mlp(b, normed, Some(x))
        });
    }
    let x = b.rms_norm("norm", x, 1e-5).unwrap();
    let loss = b.linear_cross_entropy(x, table, targets, count, SPEC.rows).unwrap();
    b.finish("loss", loss).unwrap()
}

/// What one run of a step's routine gives the session to read.
fn results(step: Step, routine: &str, data: &Named, machine: Machine) -> BTreeMap<String, Vec<f32>> {
    let (_, program) = step.programs().next().unwrap();
    let weights = initial(&program.graph, 1);
    let mut session = machine.session(step);
    for (name, tensor) in &weights {
        let weight = session.persistent_mut(name).unwrap();
        weight.iter_mut().zip(&tensor.data).for_each(|(to, x)| *to = *x as f32);
    }
    let mut recorder = Recorder::new(&session, |_, _| data.clone());
    session.run(routine, &mut recorder).unwrap();
    recorder.runs.remove(0).results
}

/// The loss and every gradient agree with those of the model as it was.
fn check(rewritten: impl Fn(Forward) -> Forward) {
    let data = batch(SPEC, 1, 7).remove(0);
    for isa in Isa::available() {
        let machine = Machine::new(*isa, 2);
        let train = |forward| {
            let step = with_gradients_read(autodiff(forward).unwrap());
            results(step, TRAIN, &data, machine)
        };
        let (expected, found) = (train(model()), train(rewritten(model())));
        assert!(expected.keys().eq(found.keys()));
        for (name, expected) in &expected {
            let error = relative_error(&found[name], expected);
            assert!(error <= TOLERANCE, "{isa:?}: {name} is off by {error:e}");
        }
    }
}

#[test]
fn tiles_agree() {
    for rows in [1, 7, 50, 99] {
        check(|forward| tile_mlp(forward, rows).unwrap());
    }
}

#[test]
fn chunks_agree() {
    for chunk in [LossChunk::Rows(1), LossChunk::Rows(33), LossChunk::Auto] {
        check(|forward| chunk_loss(forward, chunk).unwrap());
    }
}

#[test]
fn rows_have_the_same_bits_in_tiles_where_no_residual_is_added() {
    let forward = || {
        let mut b = Builder::new(0.2);
        let tokens = b.input("tokens", Type::i32([SPEC.rows]));
        let [x, _] = b.embedding("embed", tokens, SPEC.vocab_size, HIDDEN).unwrap();
        let y = mlp(&mut b, x, None);
        b.finish("y", y).unwrap()
    };
    let data = batch(SPEC, 1, 7).remove(0);
    for isa in Isa::available() {
        let evaluate = |forward: Forward| {
            let step = Step {
                routines: vec![Routine::of(EVALUATE, no_grad(forward).unwrap().graph)],
            };
            results(step, EVALUATE, &data, Machine::new(*isa, 2))
        };
        let expected = evaluate(forward());
        for rows in [1, 7, 50, 99] {
            // As numbers: 0.0 is −0.0.
            assert!(
                evaluate(tile_mlp(forward(), rows).unwrap()) == expected,
                "{isa:?}, tiles of {rows}"
            );
        }
    }
}

#[test]
fn tiles_save_the_inside_of_an_mlp_in_evaluation() {
    let peak = |forward: Forward| {
        let step = Step {
            routines: vec![Routine::of(EVALUATE, no_grad(forward).unwrap().graph)],
        };
        Machine::new(Isa::detect(), 2).plan(step).peak()
    };
    let whole = peak(model());
    let tiled = peak(tile_mlp(model(), 10).unwrap());
    // Gate and up of all but 10 rows, less the copies of a tile's ends and what else is alive meanwhile.
    let saved = 2 * 4 * (SPEC.rows - 10) * INTERMEDIATE;
    let ends = 4 * SPEC.rows * HIDDEN;
    assert!(whole - tiled >= saved - 2 * ends, "{whole} became {tiled}");
}
