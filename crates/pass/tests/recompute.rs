//! Recompute on a small block: what it makes, as text, that it computes the same bits, and what it refuses.

use insta::assert_snapshot;
use proptest::prelude::*;
use proptest::sample::Index;
use tightfit_ir::{Graph, NodeId, Op, Phase, Step, Type, ValueId};
use tightfit_model::Builder;
use tightfit_pass::{MICRO_STEP, PassError, accumulate, autodiff, recompute};
use tightfit_testkit::data;
use tightfit_testkit::interpret::Interpreter;

/// A gated MLP on the residual stream, with a norm of the gate's heads seen through a view.
fn step() -> Step {
    let mut b = Builder::new(0.02);
    let [tokens, targets] = ["tokens", "targets"].map(|name| b.input(name, Type::i32([6])));
    let count = b.input("token_count", Type::f32([1]));
    let [x, table] = b.embedding("embed", tokens, 9, 4).unwrap();
    let x = b.scope("mlp", |b| {
        let normed = b.rms_norm("norm", x, 1e-5).unwrap();
        let gate = b.linear("gate", normed, 8).unwrap();
        let heads = b.reshape(gate, [12, 4]).unwrap();
        let heads = b.rms_norm("gate_norm", heads, 1e-5).unwrap();
        let gate = b.reshape(heads, [6, 8]).unwrap();
        let up = b.linear("up", normed, 8).unwrap();
        let hidden = b.swiglu(gate, up).unwrap();
        b.linear_onto("down", hidden, x).unwrap()
    });
    let loss = b.linear_cross_entropy(x, table, targets, count, 6).unwrap();
    autodiff(b.finish("loss", loss).unwrap()).unwrap()
}

fn graph(step: &Step) -> &Graph {
    &step.routines[0].programs[0].graph
}

/// The nodes of those scopes and operations.
fn nodes(step: &Step, names: &[&str]) -> Vec<NodeId> {
    let nodes = graph(step).nodes.iter().enumerate();
    nodes
        .filter(|(_, node)| node.phase == Phase::Forward)
        .filter(|(_, node)| names.contains(&&*format!("{}/{}", node.scope, node.op.name())))
        .map(|(index, _)| NodeId(index as u32))
        .collect()
}

#[test]
fn nothing_chosen_changes_nothing_but_numbers() {
    let before = step();
    let after = recompute(before.clone(), MICRO_STEP, &[], &[]).unwrap();
    assert_eq!(graph(&after).nodes.len(), graph(&before).nodes.len());
    let after = recompute(after.clone(), MICRO_STEP, &[], &[])
        .map(|again| (again == after, again))
        .unwrap();
    assert!(after.0, "not a fixed point:\n{}", after.1);
}

#[test]
fn before() {
    assert_snapshot!(step(), @r#"
    routine train
    program micro_step x1
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x4] weight persistent normal(0.02) trainable
    %5 = input "mlp.norm.weight" f32[4] weight persistent ones trainable
    %8 = input "mlp.gate.weight" f32[8x4] weight persistent normal(0.02) trainable
    %11 = input "mlp.gate_norm.weight" f32[4] weight persistent ones trainable
    %15 = input "mlp.up.weight" f32[8x4] weight persistent normal(0.02) trainable
    %18 = input "mlp.down.weight" f32[4x8] weight persistent normal(0.02) trainable
    %4: f32[6x4] activation = embedding(%0, %3) @"embed" forward
    %6: f32[6x4] activation, %7: f32[6] activation = rms_norm{"eps":0.00001}(%4, %5) @"mlp.norm" forward
    %9: f32[6x8] activation = linear(%6, %8) @"mlp.gate" forward
    %10: f32[12x4] activation = reshape{"shape":[12,4]}(%9) @"mlp" forward
    %12: f32[12x4] activation, %13: f32[12] activation = rms_norm{"eps":0.00001}(%10, %11) @"mlp.gate_norm" forward
    %14: f32[6x8] activation = reshape{"shape":[6,8]}(%12) @"mlp" forward
    %16: f32[6x8] activation = linear(%6, %15) @"mlp.up" forward
    %17: f32[6x8] activation = swiglu(%14, %16) @"mlp" forward
    %19: f32[6x4] activation = linear{"accumulate":1}(%17, %18, %4) @"mlp.down" forward
    %20: f32[1] activation, %21: f32[6x4] activation, %22: f32[9x4] gradient = linear_cross_entropy{"chunk":6,"ignore_index":-100,"input_gradient":true,"weight_gradient":true}(%19, %3, %1, %2) @"" forward
    %23: f32[6x8] activation = linear_backward_input(%21, %18) @"mlp.down" backward
    %24: f32[4x8] gradient = linear_backward_weight(%17, %21) @"mlp.down" backward
    %25: f32[6x8] activation, %26: f32[6x8] activation = swiglu_backward(%14, %16, %23) @"mlp" backward
    %27: f32[6x4] activation = linear_backward_input(%26, %15) @"mlp.up" backward
    %28: f32[8x4] gradient = linear_backward_weight(%6, %26) @"mlp.up" backward
    %29: f32[12x4] activation = reshape{"shape":[12,4]}(%25) @"mlp" backward
    %30: f32[12x4] activation, %31: f32[4] gradient = rms_norm_backward{"input":true,"weight":true}(%10, %11, %13, %29) @"mlp.gate_norm" backward
    %32: f32[6x8] activation = reshape{"shape":[6,8]}(%30) @"mlp" backward
    %33: f32[6x4] activation = linear_backward_input{"accumulate":1}(%32, %8, %27) @"mlp.gate" backward
    %34: f32[8x4] gradient = linear_backward_weight(%6, %32) @"mlp.gate" backward
    %35: f32[6x4] activation, %36: f32[4] gradient = rms_norm_backward{"input":true,"weight":true,"accumulate":1}(%4, %5, %7, %33, %21) @"mlp.norm" backward
    %37: f32[9x4] gradient = embedding_backward{"vocab_size":9,"accumulate":1}(%0, %35, %22) @"embed" backward
    output "loss" = %20 read
    output "embed.weight.grad" = %37 carry
    output "mlp.norm.weight.grad" = %36 carry
    output "mlp.gate.weight.grad" = %34 carry
    output "mlp.gate_norm.weight.grad" = %31 carry
    output "mlp.up.weight.grad" = %28 carry
    output "mlp.down.weight.grad" = %24 carry
    "#);
}

#[test]
fn a_cheap_result_is_made_again_from_what_is_kept() {
    let step = step();
    let swiglu = nodes(&step, &["mlp/swiglu"]);
    assert_snapshot!(recompute(step, MICRO_STEP, &swiglu, &[]).unwrap(), @r#"
    routine train
    program micro_step x1
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x4] weight persistent normal(0.02) trainable
    %4 = input "mlp.norm.weight" f32[4] weight persistent ones trainable
    %5 = input "mlp.gate.weight" f32[8x4] weight persistent normal(0.02) trainable
    %6 = input "mlp.gate_norm.weight" f32[4] weight persistent ones trainable
    %7 = input "mlp.up.weight" f32[8x4] weight persistent normal(0.02) trainable
    %8 = input "mlp.down.weight" f32[4x8] weight persistent normal(0.02) trainable
    %9: f32[6x4] activation = embedding(%0, %3) @"embed" forward
    %10: f32[6x4] activation, %11: f32[6] activation = rms_norm{"eps":0.00001}(%9, %4) @"mlp.norm" forward
    %12: f32[6x8] activation = linear(%10, %5) @"mlp.gate" forward
    %13: f32[12x4] activation = reshape{"shape":[12,4]}(%12) @"mlp" forward
    %14: f32[12x4] activation, %15: f32[12] activation = rms_norm{"eps":0.00001}(%13, %6) @"mlp.gate_norm" forward
    %16: f32[6x8] activation = reshape{"shape":[6,8]}(%14) @"mlp" forward
    %17: f32[6x8] activation = linear(%10, %7) @"mlp.up" forward
    %18: f32[6x8] activation = swiglu(%16, %17) @"mlp" forward
    %19: f32[6x4] activation = linear{"accumulate":1}(%18, %8, %9) @"mlp.down" forward
    %20: f32[1] activation, %21: f32[6x4] activation, %22: f32[9x4] gradient = linear_cross_entropy{"chunk":6,"ignore_index":-100,"input_gradient":true,"weight_gradient":true}(%19, %3, %1, %2) @"" forward
    %23: f32[6x8] activation = linear_backward_input(%21, %8) @"mlp.down" backward
    %24: f32[6x8] activation = swiglu(%16, %17) @"mlp" recompute
    %25: f32[4x8] gradient = linear_backward_weight(%24, %21) @"mlp.down" backward
    %26: f32[6x8] activation, %27: f32[6x8] activation = swiglu_backward(%16, %17, %23) @"mlp" backward
    %28: f32[6x4] activation = linear_backward_input(%27, %7) @"mlp.up" backward
    %29: f32[8x4] gradient = linear_backward_weight(%10, %27) @"mlp.up" backward
    %30: f32[12x4] activation = reshape{"shape":[12,4]}(%26) @"mlp" backward
    %31: f32[12x4] activation, %32: f32[4] gradient = rms_norm_backward{"input":true,"weight":true}(%13, %6, %15, %30) @"mlp.gate_norm" backward
    %33: f32[6x8] activation = reshape{"shape":[6,8]}(%31) @"mlp" backward
    %34: f32[6x4] activation = linear_backward_input{"accumulate":1}(%33, %5, %28) @"mlp.gate" backward
    %35: f32[8x4] gradient = linear_backward_weight(%10, %33) @"mlp.gate" backward
    %36: f32[6x4] activation, %37: f32[4] gradient = rms_norm_backward{"input":true,"weight":true,"accumulate":1}(%9, %4, %11, %34, %21) @"mlp.norm" backward
    %38: f32[9x4] gradient = embedding_backward{"vocab_size":9,"accumulate":1}(%0, %36, %22) @"embed" backward
    output "loss" = %20 read
    output "embed.weight.grad" = %38 carry
    output "mlp.norm.weight.grad" = %37 carry
    output "mlp.gate.weight.grad" = %35 carry
    output "mlp.gate_norm.weight.grad" = %32 carry
    output "mlp.up.weight.grad" = %29 carry
    output "mlp.down.weight.grad" = %25 carry
    "#);
}

#[test]
fn clones_reach_through_views_to_what_is_kept() {
    let step = step();
    // The norm's statistics are read too: with the gate's own result gone, nothing of it is left to start from but the norm.
    let chosen = nodes(&step, &["mlp.gate/linear", "mlp.gate_norm/rms_norm", "mlp/swiglu"]);
    assert_snapshot!(recompute(step, MICRO_STEP, &chosen, &[]).unwrap(), @r#"
    routine train
    program micro_step x1
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x4] weight persistent normal(0.02) trainable
    %4 = input "mlp.norm.weight" f32[4] weight persistent ones trainable
    %5 = input "mlp.gate.weight" f32[8x4] weight persistent normal(0.02) trainable
    %6 = input "mlp.gate_norm.weight" f32[4] weight persistent ones trainable
    %7 = input "mlp.up.weight" f32[8x4] weight persistent normal(0.02) trainable
    %8 = input "mlp.down.weight" f32[4x8] weight persistent normal(0.02) trainable
    %9: f32[6x4] activation = embedding(%0, %3) @"embed" forward
    %10: f32[6x4] activation, %11: f32[6] activation = rms_norm{"eps":0.00001}(%9, %4) @"mlp.norm" forward
    %12: f32[6x8] activation = linear(%10, %5) @"mlp.gate" forward
    %13: f32[12x4] activation = reshape{"shape":[12,4]}(%12) @"mlp" forward
    %14: f32[12x4] activation, %15: f32[12] activation = rms_norm{"eps":0.00001}(%13, %6) @"mlp.gate_norm" forward
    %16: f32[6x8] activation = reshape{"shape":[6,8]}(%14) @"mlp" forward
    %17: f32[6x8] activation = linear(%10, %7) @"mlp.up" forward
    %18: f32[6x8] activation = swiglu(%16, %17) @"mlp" forward
    %19: f32[6x4] activation = linear{"accumulate":1}(%18, %8, %9) @"mlp.down" forward
    %20: f32[1] activation, %21: f32[6x4] activation, %22: f32[9x4] gradient = linear_cross_entropy{"chunk":6,"ignore_index":-100,"input_gradient":true,"weight_gradient":true}(%19, %3, %1, %2) @"" forward
    %23: f32[6x8] activation = linear_backward_input(%21, %8) @"mlp.down" backward
    %24: f32[6x8] activation = linear(%10, %5) @"mlp.gate" recompute
    %25: f32[12x4] activation = reshape{"shape":[12,4]}(%24) @"mlp" recompute
    %26: f32[12x4] activation, %27: f32[12] activation = rms_norm{"eps":0.00001}(%25, %6) @"mlp.gate_norm" recompute
    %28: f32[6x8] activation = reshape{"shape":[6,8]}(%26) @"mlp" recompute
    %29: f32[6x8] activation = swiglu(%28, %17) @"mlp" recompute
    %30: f32[4x8] gradient = linear_backward_weight(%29, %21) @"mlp.down" backward
    %31: f32[6x8] activation, %32: f32[6x8] activation = swiglu_backward(%28, %17, %23) @"mlp" backward
    %33: f32[6x4] activation = linear_backward_input(%32, %7) @"mlp.up" backward
    %34: f32[8x4] gradient = linear_backward_weight(%10, %32) @"mlp.up" backward
    %35: f32[12x4] activation = reshape{"shape":[12,4]}(%31) @"mlp" backward
    %36: f32[12x4] activation, %37: f32[4] gradient = rms_norm_backward{"input":true,"weight":true}(%25, %6, %27, %35) @"mlp.gate_norm" backward
    %38: f32[6x8] activation = reshape{"shape":[6,8]}(%36) @"mlp" backward
    %39: f32[6x4] activation = linear_backward_input{"accumulate":1}(%38, %5, %33) @"mlp.gate" backward
    %40: f32[8x4] gradient = linear_backward_weight(%10, %38) @"mlp.gate" backward
    %41: f32[6x4] activation, %42: f32[4] gradient = rms_norm_backward{"input":true,"weight":true,"accumulate":1}(%9, %4, %11, %39, %21) @"mlp.norm" backward
    %43: f32[9x4] gradient = embedding_backward{"vocab_size":9,"accumulate":1}(%0, %41, %22) @"embed" backward
    output "loss" = %20 read
    output "embed.weight.grad" = %43 carry
    output "mlp.norm.weight.grad" = %42 carry
    output "mlp.gate.weight.grad" = %40 carry
    output "mlp.gate_norm.weight.grad" = %37 carry
    output "mlp.up.weight.grad" = %34 carry
    output "mlp.down.weight.grad" = %30 carry
    "#);
}

#[test]
fn what_is_listed_as_kept_ends_the_way_back() {
    let step = step();
    let chosen = nodes(&step, &["embed/embedding", "mlp.norm/rms_norm"]);
    let embedded = graph(&step).node(chosen[0]).outputs[0];
    let clones = |kept: &[ValueId]| -> Vec<String> {
        let step = recompute(step.clone(), MICRO_STEP, &chosen, kept).unwrap();
        let nodes = graph(&step).nodes.iter();
        nodes
            .filter(|node| node.phase == Phase::Recompute)
            .map(|node| format!("{}/{}", node.scope, node.op.name()))
            .collect()
    };
    assert_eq!(clones(&[]), ["embed/embedding", "mlp.norm/rms_norm"]);
    assert_eq!(clones(&[embedded]), ["mlp.norm/rms_norm"]);
}

#[test]
fn what_cannot_be_recomputed_is_refused() {
    let step = step();
    let refusal = |nodes: &[NodeId]| -> PassError { recompute(step.clone(), MICRO_STEP, nodes, &[]).unwrap_err() };
    let nodes = &graph(&step).nodes;
    let loss = nodes
        .iter()
        .position(|n| matches!(n.op, Op::LinearCrossEntropy(_)))
        .unwrap();
    assert_snapshot!(refusal(&[NodeId(loss as u32)]), @"recompute: node 9 is a loss that makes its gradients in the forward: keep its results");
    assert_snapshot!(refusal(&[NodeId(loss as u32 + 1)]), @"recompute: node 10 is no part of the forward");
    assert_snapshot!(refusal(&[NodeId(99)]), @"recompute: node 99 does not exist");
    assert_snapshot!(recompute(Step::default(), MICRO_STEP, &[], &[]).unwrap_err(), @"recompute: there is no program micro_step to train");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever is chosen of whatever model: nodes are in a legal order, each is cloned at most once, just before something that
    /// needs it, and all results are the same bits.
    #[test]
    fn any_choice_is_legal(
        model in tightfit_testkit::random::model(),
        chosen in prop::collection::vec(any::<Index>(), 0..12),
        micro_batches in 1_u32..3,
        seed in any::<u64>(),
    ) {
        let Ok(step) = autodiff(model.forward) else {
            // Nothing to train reaches the loss.
            return Ok(());
        };
        let step = accumulate(step, micro_batches).unwrap();
        let program = |step: &Step| step.routines[0].programs.last().unwrap().graph.clone();
        let before = program(&step);
        let possible: Vec<NodeId> = (0..before.nodes.len())
            .filter(|&i| before.nodes[i].phase == Phase::Forward && !matches!(before.nodes[i].op, Op::LinearCrossEntropy(_)))
            .map(|i| NodeId(i as u32))
            .collect();
        prop_assume!(!possible.is_empty());
        let chosen: Vec<NodeId> = chosen.iter().map(|index| *index.get(&possible)).collect();
        let recomputed = recompute(step.clone(), MICRO_STEP, &chosen, &[]).unwrap();
        let batch = data::batch(model.batch, micro_batches as usize, seed);
        let run = |step: &Step| {
            Interpreter::new(step, seed).run(&step.routines[0], |_, repeat| batch[repeat as usize].clone())
        };
        prop_assert_eq!(run(&step), run(&recomputed));
        let after = program(&recomputed);
        for (old, new) in before.nodes.iter().zip(&after.nodes).take_while(|(old, _)| old.phase == Phase::Forward) {
            prop_assert_eq!((&old.op, &old.scope, new.phase), (&new.op, &new.scope, Phase::Forward));
        }
        let clones = after.nodes.iter().filter(|node| node.phase == Phase::Recompute).count();
        prop_assert_eq!(after.nodes.len(), before.nodes.len() + clones);
        let of = |graph: &Graph, phase: Phase| graph.nodes.iter().filter(|node| node.phase == phase).count();
        prop_assert!(clones <= of(&before, Phase::Forward));
        for node in &after.nodes {
            if node.phase == Phase::Recompute {
                let read = after.nodes.iter().any(|reader| {
                    reader.phase != Phase::Forward && reader.inputs.iter().any(|v| node.outputs.contains(v))
                });
                prop_assert!(read, "a clone of {} {} that nothing reads", node.scope, node.op.name());
            }
        }
    }
}
