//! Random models are what they should be, and the interpreter runs whole steps of them: carried sums, kept state, repeats.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use tightfit_ir::{Binding, Source, Step, Tensor};
use tightfit_pass::{
    Adam, MICRO_STEP, Optimizer, OptimizerConfig, TRAIN, UPDATE, accumulate, autodiff, dead_code, gradient_name,
    optimizer,
};
use tightfit_testkit::data::batch;
use tightfit_testkit::interpret::{Interpreter, Named, initial, run};
use tightfit_testkit::random::{RandomModel, model};

const MICRO_BATCHES: u32 = 3;
const CONFIG: OptimizerConfig = OptimizerConfig {
    optimizer: Optimizer::AdamW(Adam {
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
    }),
    weight_decay: 0.0,
    clip_norm: Some(1.0),
    loss_scale: None,
    seed: 1,
};

fn training(model: &RandomModel) -> Option<Step> {
    let step = autodiff(model.forward.clone()).ok()?;
    Some(optimizer(accumulate(step, MICRO_BATCHES).unwrap(), &CONFIG).unwrap())
}

fn scalars(lr: f64, step: f64) -> Named {
    [("lr", lr), ("step", step)]
        .map(|(name, x)| (name.to_owned(), Tensor::scalar(x)))
        .into()
}

fn near(a: &Tensor, b: &Tensor) -> bool {
    let scale = a.data.iter().fold(1e-6, |max: f64, x| max.max(x.abs()));
    a.data.iter().zip(&b.data).all(|(a, b)| (a - b).abs() <= 1e-12 * scale)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_step_sums_its_micro_batches_and_updates_what_trains(model in model(), seed: u64) {
        let Some(step) = training(&model) else { return Ok(()) };
        let micro_batches = batch(model.batch, MICRO_BATCHES as usize, seed);
        let before = Interpreter::new(&step, seed);
        let mut after = before.clone();
        let runs = after.run(step.routine(TRAIN).unwrap(), |program, repeat| match program.name.as_str() {
            MICRO_STEP => micro_batches[repeat as usize].clone(),
            UPDATE => scalars(0.1, 1.0),
            _ => Named::new(),
        });
        let last = runs.iter().rfind(|run| run.program == MICRO_STEP).unwrap();
        prop_assert_eq!(last.repeat, MICRO_BATCHES - 1);

        let single = autodiff(model.forward.clone()).unwrap();
        let graph = &single.routine(TRAIN).unwrap().programs[0].graph;
        let apart: Vec<Named> = micro_batches
            .iter()
            .map(|fed| {
                let mut inputs = initial(graph, seed);
                inputs.extend(fed.clone());
                run(graph, &inputs).outputs()
            })
            .collect();
        for (name, weight) in &before.persistent {
            let Some(sum) = last.outputs.get(&gradient_name(name)) else {
                if !name.contains(".exp_avg") {
                    prop_assert_eq!(weight, &after.persistent[name], "{} is frozen", name);
                }
                continue;
            };
            let gradients = apart.iter().map(|outputs| outputs[&gradient_name(name)].clone());
            let expected = gradients.reduce(|a, b| a.plus(&b)).unwrap();
            prop_assert!(near(sum, &expected), "{}: the sum is {:?}, expected {:?}", name, sum, expected);
            let moved = weight.data.iter().zip(&after.persistent[name].data).zip(&sum.data);
            for ((old, new), slope) in moved.filter(|(_, slope)| slope.abs() > 1e-3) {
                prop_assert!((old - new) * slope > 0.0, "{}: {} moved to {} along {}", name, old, new, slope);
            }
        }
    }

    #[test]
    fn data_is_consistent(model in model(), seed: u64) {
        let spec = model.batch;
        let micro_batches = batch(spec, 2, seed);
        let mut counted = 0;
        for fed in &micro_batches {
            let column = |name: &str| fed[name].data.clone();
            let (positions, doc_start) = (column("positions"), column("doc_start"));
            for row in 0..spec.rows as usize {
                prop_assert_eq!(doc_start[row] + positions[row], row as f64);
                prop_assert!(positions[row] < spec.context as f64);
                prop_assert!(positions[row] == 0.0 || doc_start[row] == doc_start[row - 1]);
                prop_assert!(column("tokens")[row] < spec.vocab_size as f64);
                prop_assert!(column("targets")[row] < spec.vocab_size as f64);
            }
            counted += column("targets").iter().filter(|&&t| t >= 0.0).count();
        }
        prop_assert!(counted > 0);
        for fed in &micro_batches {
            prop_assert_eq!(fed["token_count"].data[0], counted as f64);
        }
    }
}

#[test]
fn random_models_have_every_forward_operation_and_every_difficulty() {
    let mut runner = TestRunner::deterministic();
    let mut seen: BTreeMap<&str, u32> = BTreeMap::new();
    for _ in 0..200 {
        let forward = model().new_tree(&mut runner).unwrap().current().forward;
        let graph = &forward.graph;
        let mut found: BTreeSet<&str> = graph.nodes.iter().map(|node| node.op.name()).collect();
        let mut readers = vec![0; graph.values.len()];
        let operands = graph.nodes.iter().flat_map(|node| &node.inputs);
        operands.for_each(|id| readers[id.index()] += 1);
        for (value, readers) in graph.values.iter().zip(readers) {
            match value.source {
                Source::Input(Binding::Persistent { trainable: false, .. }) => found.insert("frozen weight"),
                Source::Input(Binding::Persistent { .. }) if readers > 1 => found.insert("tied weight"),
                Source::Node { output: 0, .. } if readers > 1 => found.insert("fan-out"),
                _ => false,
            };
        }
        if dead_code(graph).nodes.len() < graph.nodes.len() {
            found.insert("unused branch");
        }
        if autodiff(forward.clone()).is_ok() {
            found.insert("something to train");
        }
        found.into_iter().for_each(|what| *seen.entry(what).or_default() += 1);
    }
    let forward = "add attention cast softmax_cross_entropy embedding gelu layer_norm linear linear_cross_entropy reshape \
        rms_norm rope rope_table slice_rows pad_rows swiglu";
    let difficulties = ["frozen weight", "tied weight", "fan-out", "unused branch"];
    for what in forward.split_whitespace().chain(difficulties) {
        assert!(seen.get(what).is_some_and(|&count| count >= 20), "{what}: {seen:?}");
    }
    assert!(seen["something to train"] >= 150, "{seen:?}");
}
