//! `verify` accepts what is right and names what is wrong, for each kind of mistake.

use proptest::prelude::*;
use tightfit_ir::op::{Add, Linear};
use tightfit_ir::{
    Binding, DType, Graph, NodeId, Output, OutputKind, Phase, Role, Shape, Source, Step, Type, ValueId, VerifyError,
};
use tightfit_pass::{Adam, Optimizer, OptimizerConfig, accumulate, autodiff, optimizer};
use tightfit_testkit::random::model;

/// A micro-step and an update of one weight, carried by a gradient.
const STEP: &str = "\
routine train
program zero_gradients x1
%0: f32[4x4] gradient = zero{\"ty\":{\"dtype\":\"f32\",\"shape\":[4,4]}}() @\"w\" backward
output \"w.grad\" = %0 carry
program micro_step x2
%0 = input \"x\" f32[4x4] input fed
%1 = input \"w\" f32[4x4] weight persistent zeros trainable
%2 = input \"w.grad\" f32[4x4] gradient carried
%3: f32[4x4] activation = add(%0, %1) @\"a\" forward
%4: f32[4x4] gradient = linear_backward_weight{\"accumulate\":1}(%0, %3, %2) @\"w\" backward
output \"w.grad\" = %4 update %2
output \"a\" = %3 read
program update x1
%0 = input \"w\" f32[4x4] weight persistent zeros trainable
%1 = input \"w.grad\" f32[4x4] gradient carried
%2: f32[4x4] weight = add(%0, %1) @\"w\" update
output \"w\" = %2 update %0
";

/// The step with one piece of its text replaced.
fn with(from: &str, to: &str) -> Result<(), VerifyError> {
    assert!(STEP.contains(from), "{from}");
    Step::parse(&STEP.replacen(from, to, 1)).unwrap().verify()
}

/// The micro-step's graph.
fn graph() -> Graph {
    let mut step = Step::parse(STEP).unwrap();
    step.routines.remove(0).programs.remove(1).graph
}

#[track_caller]
fn refused(result: Result<(), VerifyError>, words: &[&str]) {
    let message = result.expect_err("it verifies").to_string();
    for word in words {
        assert!(message.contains(word), "{message:?} does not say {word:?}");
    }
}

#[test]
fn the_unspoilt_step_verifies() {
    Step::parse(STEP).unwrap().verify().unwrap();
}

#[test]
fn uses_before_definitions() {
    refused(
        with("add(%0, %1) @\"a\"", "add(%0, %4) @\"a\""),
        &["micro_step", "node 0", "value 4 before"],
    );
    let mut swapped = graph();
    swapped.nodes.swap(0, 1);
    refused(swapped.verify(), &["node 0", "value 3 before it is made"]);
    let mut missing = graph();
    missing.nodes[0].inputs[0] = ValueId(99);
    refused(missing.verify(), &["node 0", "value 99"]);
}

#[test]
fn types_that_do_not_follow_from_the_operation() {
    refused(
        with("%3: f32[4x4]", "%3: f32[4x3]"),
        &["node 0 (a add)", "f32[4x3]", "f32[4x4]"],
    );
    refused(with("%3: f32[4x4]", "%3: i32[4x4]"), &["node 0 (a add)", "i32[4x4]"]);
    refused(
        with("\"x\" f32[4x4]", "\"x\" f32[4x5]"),
        &["node 0 (train/micro_step: a)", "add", "f32[4x5]"],
    );
}

#[test]
fn values_that_are_not_their_nodes_results() {
    let mut twice = graph();
    twice.nodes[1].outputs[0] = ValueId(3);
    refused(twice.verify(), &["node 1", "value 3"]);
    let mut missing = graph();
    missing.nodes[0].outputs.clear();
    refused(missing.verify(), &["node 0", "0 results", "gives 1"]);
    let mut nowhere = graph();
    nowhere.nodes[1].outputs[0] = ValueId(99);
    refused(nowhere.verify(), &["value 99, which does not exist"]);
    let mut orphan = graph();
    let mut value = orphan.values[3].clone();
    value.source = Source::Node {
        node: NodeId(7),
        output: 0,
    };
    orphan.push_value(value);
    refused(orphan.verify(), &["value 5", "no node makes it"]);
}

#[test]
fn names_that_are_not_unique() {
    refused(
        with("input \"x\"", "input \"w\""),
        &["micro_step", "input \"w\"", "unique names"],
    );
    refused(with("input \"x\"", "input \"\""), &["unique names"]);
    refused(
        with("output \"a\"", "output \"w.grad\""),
        &["output \"w.grad\"", "unique names"],
    );
    refused(with("output \"a\"", "output \"\""), &["unique names"]);
}

#[test]
fn updates_that_are_not_made_in_place() {
    refused(
        with("= %4 update %2", "= %3 update %2"),
        &["output \"w.grad\"", "not made in place of \"w.grad\""],
    );
    refused(
        with("= %4 update %2", "= %4 update %1"),
        &["not made in place of \"w\""],
    );
    refused(
        with("= %4 update %2", "= %4 update %0"),
        &["only persistent or carried"],
    );
    refused(
        with("= %4 update %2", "= %4 update %3"),
        &["only persistent or carried"],
    );
    refused(with("= %3 read", "= %4 update %2"), &["output \"a\"", "updated twice"]);
    let mut nowhere = graph();
    nowhere.outputs[0].kind = OutputKind::Update(ValueId(99));
    refused(nowhere.verify(), &["value 99 does not exist"]);
    let mut nothing = graph();
    nothing.outputs[1].value = ValueId(99);
    refused(nothing.verify(), &["output \"a\"", "value 99 does not exist"]);
}

#[test]
fn carried_values_that_nobody_left() {
    refused(
        with("= %0 carry", "= %0 read"),
        &["train/micro_step", "\"w.grad\"", "no earlier program"],
    );
    refused(
        with("output \"w.grad\" = %0", "output \"v.grad\" = %0"),
        &["\"w.grad\"", "no earlier program"],
    );
    let smaller = STEP
        .replace(
            "zero{\"ty\":{\"dtype\":\"f32\",\"shape\":[4,4]}}",
            "zero{\"ty\":{\"dtype\":\"f32\",\"shape\":[2,4]}}",
        )
        .replace("%0: f32[4x4] gradient", "%0: f32[2x4] gradient");
    refused(
        Step::parse(&smaller).unwrap().verify(),
        &["f32[4x4] here", "f32[2x4] where it is made"],
    );
    // Another routine's values do not count.
    let apart = STEP.replace("program micro_step", "routine other\nprogram micro_step");
    refused(
        Step::parse(&apart).unwrap().verify(),
        &["other/micro_step", "no earlier program"],
    );
}

#[test]
fn programs_that_disagree_or_never_run() {
    refused(
        with("micro_step x2", "micro_step x0"),
        &["train/micro_step", "at least once"],
    );
    // The update's weight; the micro-step's stays as it is.
    let update = |from: &str, to: &str| {
        let (micro_step, update) = STEP.split_at(STEP.rfind("program update").unwrap());
        Step::parse(&format!("{micro_step}{}", update.replace(from, to)))
            .unwrap()
            .verify()
    };
    refused(
        update("persistent zeros", "persistent ones"),
        &["train/update", "input \"w\"", "another program"],
    );
    // An evaluation reads weights without training them.
    assert_eq!(update(" trainable", ""), Ok(()));
}

#[test]
fn paths_in_place_are_found_through_either_operand_and_through_views() {
    let text = "\
%0 = input \"x\" f32[2x2] input fed
%1 = input \"w\" f32[2x2] weight persistent zeros
%2: f32[2x2] activation = add(%0, %1) @\"\" update
%3: f32[4] activation = reshape{\"shape\":[4]}(%2) @\"\" update
%4: f32[2x2] activation = reshape{\"shape\":[2,2]}(%3) @\"\" update
%5: f32[2x2] activation = linear(%4, %0) @\"\" update
output \"w\" = %4 update %1
";
    let graph = Graph::parse(text).unwrap();
    graph.verify().unwrap();
    let path = graph.in_place_path(ValueId(4), ValueId(1)).unwrap();
    assert_eq!(path, [4, 3, 2, 1].map(ValueId));
    assert_eq!(
        graph.in_place_path(ValueId(5), ValueId(1)),
        None,
        "a product is not made in place"
    );
    assert_eq!(graph.view_of(ValueId(3)), Some(ValueId(2)));
    assert_eq!(graph.view_of(ValueId(2)), None);
}

#[test]
fn descriptions_are_for_people() {
    let graph = graph();
    assert_eq!(graph.describe(ValueId(1)).to_string(), "w");
    assert_eq!(graph.describe(ValueId(3)).to_string(), "a/add");
    let norm = "%0 = input \"x\" f32[1x1] input fed\n%1 = input \"w\" f32[1] input fed\n\
        %2: f32[1x1] activation, %3: f32[1] activation = rms_norm{\"eps\":0.0}(%0, %1) @\"n\" forward\n";
    assert_eq!(
        Graph::parse(norm).unwrap().describe(ValueId(3)).to_string(),
        "n/rms_norm#1"
    );
}

#[test]
fn pushing_checks_operands_and_leaves_the_graph_as_it_was_when_they_do_not_fit() {
    let mut graph = graph();
    let before = graph.clone();
    let vector = Type::f32([3]);
    let pushed = graph.push(
        Add {}.into(),
        &[ValueId(0)],
        &"s".into(),
        Phase::Forward,
        Role::Activation,
    );
    assert!(pushed.is_err());
    assert_eq!(graph, before);
    let x = graph.input("y", vector, Role::Input, Binding::Fed);
    let linear = Linear {
        bias: false,
        accumulate: Default::default(),
    };
    assert!(
        graph
            .push(linear.into(), &[x, x], &"s".into(), Phase::Forward, Role::Activation)
            .is_err()
    );
}

/// One structural mistake somewhere in a graph.
#[derive(Clone, Debug)]
enum Mistake {
    ForwardReference,
    DoubledOutput,
    ReorderedDefinition,
    ChangedDtype,
    GrownShape,
    RenamedInput,
    LostOperand,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn random_steps_verify(model in model(), micro_batches in 1..3_u32) {
        prop_assert_eq!(model.forward.graph.verify(), Ok(()));
        let config = OptimizerConfig {
            optimizer: Optimizer::AdamW(Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8 }),
            weight_decay: 0.1,
            clip_norm: None,
            loss_scale: None,
            seed: 1,
        };
        if let Ok(step) = autodiff(model.forward) {
            let step = optimizer(accumulate(step, micro_batches).unwrap(), &config).unwrap();
            prop_assert_eq!(step.verify(), Ok(()));
        }
    }

    #[test]
    fn random_mistakes_are_found(
        model in model(),
        at: prop::sample::Index,
        mistake in prop::sample::select(&[
            Mistake::ForwardReference,
            Mistake::DoubledOutput,
            Mistake::ReorderedDefinition,
            Mistake::ChangedDtype,
            Mistake::GrownShape,
            Mistake::RenamedInput,
            Mistake::LostOperand,
        ][..]),
    ) {
        let mut graph = model.forward.graph;
        let node = at.index(graph.nodes.len());
        let made = graph.nodes[node].outputs[0];
        match mistake {
            Mistake::ForwardReference => graph.nodes[node].inputs[0] = made,
            Mistake::DoubledOutput => {
                let output: Output = graph.outputs[0].clone();
                graph.outputs.push(output);
            }
            Mistake::ReorderedDefinition => {
                let last = graph.nodes.len() - 1;
                prop_assume!(last > 0);
                graph.nodes.swap(at.index(last), last);
            }
            // No operation makes it.
            Mistake::ChangedDtype => graph.values[made.index()].ty.dtype = DType::U8,
            Mistake::GrownShape => {
                let Shape(dims) = &mut graph.values[made.index()].ty.shape;
                dims[0] += 1;
            }
            Mistake::RenamedInput => {
                let names: Vec<_> = graph.inputs().map(|(id, value, _)| (id, value.name.clone())).collect();
                let (a, b) = (at.index(names.len() - 1), names.len() - 1);
                graph.values[names[a].0.index()].name = names[b].1.clone();
            }
            Mistake::LostOperand => {
                graph.nodes[node].inputs.pop();
            }
        }
        prop_assert!(graph.verify().is_err(), "{:?} at node {}", mistake, node);
    }
}
