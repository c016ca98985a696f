//! Every pass on a model of one block: what it makes, as text, and what it refuses.

use insta::assert_snapshot;
use tightfit_ir::op::{Add, Approximate};
use tightfit_ir::{Binding, Forward, Graph, OutputKind, Phase, Role, Step, Type};
use tightfit_model::Builder;
use tightfit_pass::{Adam, Optimizer, OptimizerConfig, PassError, accumulate, autodiff, dead_code, no_grad, optimizer};

const ADAMW: OptimizerConfig = OptimizerConfig {
    optimizer: Optimizer::AdamW(Adam {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
    }),
    weight_decay: 0.1,
    clip_norm: Some(1.0),
    loss_scale: None,
    seed: 1,
};

/// A pre-norm MLP block on the residual stream, between a tied table's two uses.
fn block() -> Forward {
    let mut b = Builder::new(0.02);
    let [tokens, targets] = ["tokens", "targets"].map(|name| b.input(name, Type::i32([6])));
    let count = b.input("token_count", Type::f32([1]));
    let [x, table] = b.embedding("embed", tokens, 9, 4).unwrap();
    let x = b.scope("mlp", |b| {
        let normed = b.rms_norm("norm", x, 1e-5).unwrap();
        let hidden = b.linear_bias("up", normed, 8).unwrap();
        let hidden = b.gelu(hidden, Approximate::Tanh).unwrap();
        b.linear_onto("down", hidden, x).unwrap()
    });
    let loss = b.linear_cross_entropy(x, table, targets, count, 6).unwrap();
    b.finish("loss", loss).unwrap()
}

/// A linear classifier whose first layer is frozen.
fn probe() -> Forward {
    let mut b = Builder::new(0.02);
    let x = b.input("x", Type::f32([6, 4]));
    let targets = b.input("targets", Type::i32([6]));
    let count = b.input("token_count", Type::f32([1]));
    let hidden = b.frozen(|b| b.linear("backbone", x, 8)).unwrap();
    let logits = b.linear_bias("head", hidden, 3).unwrap();
    let loss = b.softmax_cross_entropy(logits, targets, count).unwrap();
    b.finish("loss", loss).unwrap()
}

/// Everything a snapshot shows must be well-formed.
fn verified(step: Step) -> Step {
    step.verify().unwrap();
    step
}

#[test]
fn a_block() {
    assert_snapshot!(block().graph, @r#"
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x4] weight persistent normal(0.02) trainable
    %5 = input "mlp.norm.weight" f32[4] weight persistent ones trainable
    %8 = input "mlp.up.weight" f32[8x4] weight persistent normal(0.02) trainable
    %9 = input "mlp.up.bias" f32[8] weight persistent zeros trainable
    %12 = input "mlp.down.weight" f32[4x8] weight persistent normal(0.02) trainable
    %4: f32[6x4] activation = embedding(%0, %3) @"embed" forward
    %6: f32[6x4] activation, %7: f32[6] activation = rms_norm{"eps":0.00001}(%4, %5) @"mlp.norm" forward
    %10: f32[6x8] activation = linear{"bias":true}(%6, %8, %9) @"mlp.up" forward
    %11: f32[6x8] activation = gelu{"approximate":"tanh"}(%10) @"mlp" forward
    %13: f32[6x4] activation = linear{"accumulate":1}(%11, %12, %4) @"mlp.down" forward
    %14: f32[1] activation = linear_cross_entropy{"chunk":6,"ignore_index":-100}(%13, %3, %1, %2) @"" forward
    output "loss" = %14 read
    "#);
}

#[test]
fn autodiff_appends_the_backward() {
    assert_snapshot!(verified(autodiff(block()).unwrap()), @r#"
    routine train
    program micro_step x1
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x4] weight persistent normal(0.02) trainable
    %5 = input "mlp.norm.weight" f32[4] weight persistent ones trainable
    %8 = input "mlp.up.weight" f32[8x4] weight persistent normal(0.02) trainable
    %9 = input "mlp.up.bias" f32[8] weight persistent zeros trainable
    %12 = input "mlp.down.weight" f32[4x8] weight persistent normal(0.02) trainable
    %4: f32[6x4] activation = embedding(%0, %3) @"embed" forward
    %6: f32[6x4] activation, %7: f32[6] activation = rms_norm{"eps":0.00001}(%4, %5) @"mlp.norm" forward
    %10: f32[6x8] activation = linear{"bias":true}(%6, %8, %9) @"mlp.up" forward
    %11: f32[6x8] activation = gelu{"approximate":"tanh"}(%10) @"mlp" forward
    %13: f32[6x4] activation = linear{"accumulate":1}(%11, %12, %4) @"mlp.down" forward
    %14: f32[1] activation, %15: f32[6x4] activation, %16: f32[9x4] gradient = linear_cross_entropy{"chunk":6,"ignore_index":-100,"input_gradient":true,"weight_gradient":true}(%13, %3, %1, %2) @"" forward
    %17: f32[6x8] activation = linear_backward_input(%15, %12) @"mlp.down" backward
    %18: f32[4x8] gradient = linear_backward_weight(%11, %15) @"mlp.down" backward
    %19: f32[6x8] activation = gelu_backward{"approximate":"tanh"}(%10, %17) @"mlp" backward
    %20: f32[6x4] activation = linear_backward_input(%19, %8) @"mlp.up" backward
    %21: f32[8x4] gradient = linear_backward_weight(%6, %19) @"mlp.up" backward
    %22: f32[8] gradient = bias_backward(%19) @"mlp.up" backward
    %23: f32[6x4] activation, %24: f32[4] gradient = rms_norm_backward{"input":true,"weight":true,"accumulate":1}(%4, %5, %7, %20, %15) @"mlp.norm" backward
    %25: f32[9x4] gradient = embedding_backward{"vocab_size":9,"accumulate":1}(%0, %23, %16) @"embed" backward
    output "loss" = %14 read
    output "embed.weight.grad" = %25 carry
    output "mlp.norm.weight.grad" = %24 carry
    output "mlp.up.weight.grad" = %21 carry
    output "mlp.up.bias.grad" = %22 carry
    output "mlp.down.weight.grad" = %18 carry
    "#);
}

#[test]
fn frozen_weights_get_no_gradient() {
    assert_snapshot!(verified(autodiff(probe()).unwrap()), @r#"
    routine train
    program micro_step x1
    %0 = input "x" f32[6x4] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "backbone.weight" f32[8x4] weight persistent normal(0.02)
    %5 = input "head.weight" f32[3x8] weight persistent normal(0.02) trainable
    %6 = input "head.bias" f32[3] weight persistent zeros trainable
    %4: f32[6x8] activation = linear(%0, %3) @"backbone" forward
    %7: f32[6x3] activation = linear{"bias":true}(%4, %5, %6) @"head" forward
    %8: f32[1] activation, %9: f32[6] activation = softmax_cross_entropy{"ignore_index":-100}(%7, %1, %2) @"" forward
    %10: f32[6x3] activation = softmax_cross_entropy_backward{"ignore_index":-100}(%7, %9, %1, %2) @"" backward
    %11: f32[3x8] gradient = linear_backward_weight(%4, %10) @"head" backward
    %12: f32[3] gradient = bias_backward(%10) @"head" backward
    output "loss" = %8 read
    output "head.weight.grad" = %11 carry
    output "head.bias.grad" = %12 carry
    "#);
}

#[test]
fn accumulate_starts_every_gradient_from_its_sum() {
    assert_snapshot!(verified(accumulate(autodiff(probe()).unwrap(), 4).unwrap()), @r#"
    routine train
    program zero_gradients x1
    %0: f32[3x8] gradient = zero{"ty":{"dtype":"f32","shape":[3,8]}}() @"head.weight.grad" backward
    %1: f32[3] gradient = zero{"ty":{"dtype":"f32","shape":[3]}}() @"head.bias.grad" backward
    output "head.weight.grad" = %0 carry
    output "head.bias.grad" = %1 carry
    program micro_step x4
    %0 = input "x" f32[6x4] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "backbone.weight" f32[8x4] weight persistent normal(0.02)
    %5 = input "head.weight" f32[3x8] weight persistent normal(0.02) trainable
    %6 = input "head.bias" f32[3] weight persistent zeros trainable
    %13 = input "head.weight.grad" f32[3x8] gradient carried
    %14 = input "head.bias.grad" f32[3] gradient carried
    %4: f32[6x8] activation = linear(%0, %3) @"backbone" forward
    %7: f32[6x3] activation = linear{"bias":true}(%4, %5, %6) @"head" forward
    %8: f32[1] activation, %9: f32[6] activation = softmax_cross_entropy{"ignore_index":-100}(%7, %1, %2) @"" forward
    %10: f32[6x3] activation = softmax_cross_entropy_backward{"ignore_index":-100}(%7, %9, %1, %2) @"" backward
    %11: f32[3x8] gradient = linear_backward_weight{"accumulate":1}(%4, %10, %13) @"head" backward
    %12: f32[3] gradient = bias_backward{"accumulate":1}(%10, %14) @"head" backward
    output "loss" = %8 read
    output "head.weight.grad" = %11 update %13
    output "head.bias.grad" = %12 update %14
    "#);
}

#[test]
fn accumulate_over_one_micro_batch_changes_nothing() {
    let step = autodiff(block()).unwrap();
    assert_eq!(accumulate(step.clone(), 1).unwrap(), step);
}

#[test]
fn adamw_updates_what_has_a_gradient_and_clips() {
    let step = verified(optimizer(autodiff(probe()).unwrap(), &ADAMW).unwrap());
    assert_snapshot!(step.routines[0].programs[1].graph, @r#"
    %0 = input "lr" f32[1] input fed
    %1 = input "step" f32[1] input fed
    %2 = input "head.weight.grad" f32[3x8] gradient carried
    %3 = input "head.bias.grad" f32[3] gradient carried
    %8 = input "head.weight" f32[3x8] weight persistent normal(0.02) trainable
    %9 = input "head.weight.exp_avg" f32[3x8] optimizer_state persistent zeros
    %10 = input "head.weight.exp_avg_sq" f32[3x8] optimizer_state persistent zeros
    %14 = input "head.bias" f32[3] weight persistent zeros trainable
    %15 = input "head.bias.exp_avg" f32[3] optimizer_state persistent zeros
    %16 = input "head.bias.exp_avg_sq" f32[3] optimizer_state persistent zeros
    %4: f32[1] activation = norm(%2) @"head.weight" update
    %5: f32[1] activation = norm(%3) @"head.bias" update
    %6: f32[1] activation = global_norm(%4, %5) @"grad_norm" update
    %7: f32[1] activation = gradient_factor{"max_norm":1.0}(%6) @"grad_norm" update
    %11: f32[3x8] weight, %12: f32[3x8] optimizer_state, %13: f32[3x8] optimizer_state = adamw{"beta1":0.9,"beta2":0.95,"eps":1e-8,"weight_decay":0.1,"factor":true}(%8, %2, %9, %10, %0, %1, %7) @"head.weight" update
    %17: f32[3] weight, %18: f32[3] optimizer_state, %19: f32[3] optimizer_state = adamw{"beta1":0.9,"beta2":0.95,"eps":1e-8,"weight_decay":0.0,"factor":true}(%14, %3, %15, %16, %0, %1, %7) @"head.bias" update
    output "grad_norm" = %6 read
    output "head.weight" = %11 update %8
    output "head.weight.exp_avg" = %12 update %9
    output "head.weight.exp_avg_sq" = %13 update %10
    output "head.bias" = %17 update %14
    output "head.bias.exp_avg" = %18 update %15
    output "head.bias.exp_avg_sq" = %19 update %16
    "#);
}

#[test]
fn adamw_without_clipping_needs_no_norm() {
    let config = OptimizerConfig {
        clip_norm: None,
        ..ADAMW
    };
    let step = verified(optimizer(autodiff(probe()).unwrap(), &config).unwrap());
    assert_snapshot!(step.routines[0].programs[1].graph, @r#"
    %0 = input "lr" f32[1] input fed
    %1 = input "step" f32[1] input fed
    %2 = input "head.weight.grad" f32[3x8] gradient carried
    %3 = input "head.bias.grad" f32[3] gradient carried
    %4 = input "head.weight" f32[3x8] weight persistent normal(0.02) trainable
    %5 = input "head.weight.exp_avg" f32[3x8] optimizer_state persistent zeros
    %6 = input "head.weight.exp_avg_sq" f32[3x8] optimizer_state persistent zeros
    %10 = input "head.bias" f32[3] weight persistent zeros trainable
    %11 = input "head.bias.exp_avg" f32[3] optimizer_state persistent zeros
    %12 = input "head.bias.exp_avg_sq" f32[3] optimizer_state persistent zeros
    %7: f32[3x8] weight, %8: f32[3x8] optimizer_state, %9: f32[3x8] optimizer_state = adamw{"beta1":0.9,"beta2":0.95,"eps":1e-8,"weight_decay":0.1}(%4, %2, %5, %6, %0, %1) @"head.weight" update
    %13: f32[3] weight, %14: f32[3] optimizer_state, %15: f32[3] optimizer_state = adamw{"beta1":0.9,"beta2":0.95,"eps":1e-8,"weight_decay":0.0}(%10, %3, %11, %12, %0, %1) @"head.bias" update
    output "head.weight" = %7 update %4
    output "head.weight.exp_avg" = %8 update %5
    output "head.weight.exp_avg_sq" = %9 update %6
    output "head.bias" = %13 update %10
    output "head.bias.exp_avg" = %14 update %11
    output "head.bias.exp_avg_sq" = %15 update %12
    "#);
}

#[test]
fn no_grad_keeps_the_forward_with_nothing_to_train() {
    assert_snapshot!(no_grad(block()).unwrap().graph, @r#"
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x4] weight persistent normal(0.02)
    %5 = input "mlp.norm.weight" f32[4] weight persistent ones
    %8 = input "mlp.up.weight" f32[8x4] weight persistent normal(0.02)
    %9 = input "mlp.up.bias" f32[8] weight persistent zeros
    %12 = input "mlp.down.weight" f32[4x8] weight persistent normal(0.02)
    %4: f32[6x4] activation = embedding(%0, %3) @"embed" forward
    %6: f32[6x4] activation, %7: f32[6] activation = rms_norm{"eps":0.00001}(%4, %5) @"mlp.norm" forward
    %10: f32[6x8] activation = linear{"bias":true}(%6, %8, %9) @"mlp.up" forward
    %11: f32[6x8] activation = gelu{"approximate":"tanh"}(%10) @"mlp" forward
    %13: f32[6x4] activation = linear{"accumulate":1}(%11, %12, %4) @"mlp.down" forward
    %14: f32[1] activation = linear_cross_entropy{"chunk":6,"ignore_index":-100}(%13, %3, %1, %2) @"" forward
    output "loss" = %14 read
    "#);
}

#[test]
fn dead_code_goes_with_its_inputs() {
    let mut b = Builder::new(0.02);
    let x = b.input("x", Type::f32([6, 4]));
    let unread = b.input("unread", Type::f32([6, 4]));
    let kept = b.linear("kept", x, 2).unwrap();
    let dead = b.linear("dead", unread, 2).unwrap();
    b.gelu(dead, Approximate::None).unwrap();
    let graph = b.finish("logits", kept).unwrap().graph;
    assert_snapshot!(graph, @r#"
    %0 = input "x" f32[6x4] input fed
    %1 = input "unread" f32[6x4] input fed
    %2 = input "kept.weight" f32[2x4] weight persistent normal(0.02) trainable
    %4 = input "dead.weight" f32[2x4] weight persistent normal(0.02) trainable
    %3: f32[6x2] activation = linear(%0, %2) @"kept" forward
    %5: f32[6x2] activation = linear(%1, %4) @"dead" forward
    %6: f32[6x2] activation = gelu{"approximate":"none"}(%5) @"" forward
    output "logits" = %3 read
    "#);
    assert_snapshot!(dead_code(&graph), @r#"
    %0 = input "x" f32[6x4] input fed
    %1 = input "kept.weight" f32[2x4] weight persistent normal(0.02) trainable
    %2: f32[6x2] activation = linear(%0, %1) @"kept" forward
    output "logits" = %2 read
    "#);
}

fn refusal<T: std::fmt::Debug>(result: Result<T, PassError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn autodiff_refuses_a_model_without_a_scalar_loss() {
    let mut b = Builder::new(0.02);
    let x = b.input("x", Type::f32([6, 4]));
    let y = b.linear("layer", x, 2).unwrap();
    assert_snapshot!(refusal(autodiff(b.finish("logits", y).unwrap())), @"autodiff: the model has no result named `loss`");
    let mut graph = Graph::new();
    let loss = graph.input("x", Type::f32([2]), Role::Input, Binding::Fed);
    graph.output("loss", loss, OutputKind::Read);
    assert_snapshot!(refusal(autodiff(Forward { graph })), @"autodiff: `loss` is f32[2], expected one f32");
}

#[test]
fn autodiff_refuses_a_model_without_anything_to_train() {
    assert_snapshot!(refusal(autodiff(no_grad(block()).unwrap())), @"autodiff: no trainable weight reaches the loss: nothing to train");
}

#[test]
fn a_result_beside_the_loss_gets_no_gradient() {
    let mut graph = block().graph;
    let loss = graph.output_named("loss").unwrap().value;
    let twice = graph.push(
        Add {}.into(),
        &[loss, loss],
        &"twice".into(),
        Phase::Forward,
        Role::Activation,
    );
    graph.output("twice", twice.unwrap()[0], OutputKind::Read);
    let step = verified(autodiff(Forward { graph }).unwrap());
    let nodes = &step.routines[0].programs[0].graph.nodes;
    let phases: Vec<Phase> = nodes
        .iter()
        .filter(|node| &*node.scope == "twice")
        .map(|node| node.phase)
        .collect();
    assert_eq!(phases, [Phase::Forward]);
}

#[test]
fn step_passes_refuse_a_step_that_does_not_train() {
    let step = Step::default();
    assert_snapshot!(refusal(accumulate(step.clone(), 2)), @"accumulate: there is nothing to train");
    assert_snapshot!(refusal(optimizer(step, &ADAMW)), @"optimizer: there is nothing to train");
    let step = accumulate(autodiff(block()).unwrap(), 2).unwrap();
    assert_snapshot!(refusal(accumulate(step, 2)), @"accumulate: the step already runs several micro-batches");
}
