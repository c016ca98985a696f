//! Updates inside of the backward on a model of one block: what the pass makes, as text, and what it refuses.

use insta::assert_snapshot;
use tightfit_ir::op::Approximate;
use tightfit_ir::{Forward, Phase, Step, Type};
use tightfit_model::Builder;
use tightfit_pass::{
    Adam, BACKWARD_PROGRAMS, Optimizer, OptimizerConfig, PassError, TRAIN, accumulate, autodiff, optimizer,
    update_in_backward,
};

/// A layer between a table's two uses.
fn tied() -> Forward {
    let mut b = Builder::new(0.02);
    let [tokens, targets] = ["tokens", "targets"].map(|name| b.input(name, Type::i32([6])));
    let count = b.input("token_count", Type::f32([1]));
    let [x, table] = b.embedding("embed", tokens, 9, 4).unwrap();
    let x = b.linear("layer", x, 4).unwrap();
    let x = b.gelu(x, Approximate::None).unwrap();
    let loss = b.linear_cross_entropy(x, table, targets, count, 6).unwrap();
    b.finish("loss", loss).unwrap()
}

fn config(clip_norm: Option<f64>) -> OptimizerConfig {
    OptimizerConfig {
        optimizer: Optimizer::AdamW(Adam {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
        }),
        weight_decay: 0.1,
        clip_norm,
        loss_scale: None,
        seed: 1,
    }
}

fn plain(clip_norm: Option<f64>) -> Step {
    optimizer(autodiff(tied()).unwrap(), &config(clip_norm)).unwrap()
}

#[test]
fn the_plain_step() {
    assert_snapshot!(plain(None), @r#"
    routine train
    program micro_step x1
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x4] weight persistent normal(0.02) trainable
    %5 = input "layer.weight" f32[4x4] weight persistent normal(0.02) trainable
    %4: f32[6x4] activation = embedding(%0, %3) @"embed" forward
    %6: f32[6x4] activation = linear(%4, %5) @"layer" forward
    %7: f32[6x4] activation = gelu{"approximate":"none"}(%6) @"" forward
    %8: f32[1] activation, %9: f32[6x4] activation, %10: f32[9x4] gradient = linear_cross_entropy{"chunk":6,"ignore_index":-100,"input_gradient":true,"weight_gradient":true}(%7, %3, %1, %2) @"" forward
    %11: f32[6x4] activation = gelu_backward{"approximate":"none"}(%6, %9) @"" backward
    %12: f32[6x4] activation = linear_backward_input(%11, %5) @"layer" backward
    %13: f32[4x4] gradient = linear_backward_weight(%4, %11) @"layer" backward
    %14: f32[9x4] gradient = embedding_backward{"vocab_size":9,"accumulate":1}(%0, %12, %10) @"embed" backward
    output "loss" = %8 read
    output "embed.weight.grad" = %14 carry
    output "layer.weight.grad" = %13 carry
    program update x1
    %0 = input "lr" f32[1] input fed
    %1 = input "step" f32[1] input fed
    %2 = input "embed.weight.grad" f32[9x4] gradient carried
    %3 = input "layer.weight.grad" f32[4x4] gradient carried
    %4 = input "embed.weight" f32[9x4] weight persistent normal(0.02) trainable
    %5 = input "embed.weight.exp_avg" f32[9x4] optimizer_state persistent zeros
    %6 = input "embed.weight.exp_avg_sq" f32[9x4] optimizer_state persistent zeros
    %10 = input "layer.weight" f32[4x4] weight persistent normal(0.02) trainable
    %11 = input "layer.weight.exp_avg" f32[4x4] optimizer_state persistent zeros
    %12 = input "layer.weight.exp_avg_sq" f32[4x4] optimizer_state persistent zeros
    %7: f32[9x4] weight, %8: f32[9x4] optimizer_state, %9: f32[9x4] optimizer_state = adamw{"beta1":0.9,"beta2":0.95,"eps":1e-8,"weight_decay":0.1}(%4, %2, %5, %6, %0, %1) @"embed.weight" update
    %13: f32[4x4] weight, %14: f32[4x4] optimizer_state, %15: f32[4x4] optimizer_state = adamw{"beta1":0.9,"beta2":0.95,"eps":1e-8,"weight_decay":0.1}(%10, %3, %11, %12, %0, %1) @"layer.weight" update
    output "embed.weight" = %7 update %4
    output "embed.weight.exp_avg" = %8 update %5
    output "embed.weight.exp_avg_sq" = %9 update %6
    output "layer.weight" = %13 update %10
    output "layer.weight.exp_avg" = %14 update %11
    output "layer.weight.exp_avg_sq" = %15 update %12
    "#);
}

#[test]
fn updates_stand_where_gradients_are_complete() {
    assert_snapshot!(update_in_backward(plain(None)).unwrap(), @r#"
    routine train
    program micro_step x1
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x4] weight persistent normal(0.02) trainable
    %5 = input "layer.weight" f32[4x4] weight persistent normal(0.02) trainable
    %15 = input "embed.weight.exp_avg" f32[9x4] optimizer_state persistent zeros
    %16 = input "embed.weight.exp_avg_sq" f32[9x4] optimizer_state persistent zeros
    %17 = input "lr" f32[1] input fed
    %18 = input "step" f32[1] input fed
    %22 = input "layer.weight.exp_avg" f32[4x4] optimizer_state persistent zeros
    %23 = input "layer.weight.exp_avg_sq" f32[4x4] optimizer_state persistent zeros
    %4: f32[6x4] activation = embedding(%0, %3) @"embed" forward
    %6: f32[6x4] activation = linear(%4, %5) @"layer" forward
    %7: f32[6x4] activation = gelu{"approximate":"none"}(%6) @"" forward
    %8: f32[1] activation, %9: f32[6x4] activation, %10: f32[9x4] gradient = linear_cross_entropy{"chunk":6,"ignore_index":-100,"input_gradient":true,"weight_gradient":true}(%7, %3, %1, %2) @"" forward
    %11: f32[6x4] activation = gelu_backward{"approximate":"none"}(%6, %9) @"" backward
    %12: f32[6x4] activation = linear_backward_input(%11, %5) @"layer" backward
    %13: f32[4x4] gradient = linear_backward_weight(%4, %11) @"layer" backward
    %24: f32[4x4] weight, %25: f32[4x4] optimizer_state, %26: f32[4x4] optimizer_state = adamw{"beta1":0.9,"beta2":0.95,"eps":1e-8,"weight_decay":0.1}(%5, %13, %22, %23, %17, %18) @"layer.weight" update
    %14: f32[9x4] gradient = embedding_backward{"vocab_size":9,"accumulate":1}(%0, %12, %10) @"embed" backward
    %19: f32[9x4] weight, %20: f32[9x4] optimizer_state, %21: f32[9x4] optimizer_state = adamw{"beta1":0.9,"beta2":0.95,"eps":1e-8,"weight_decay":0.1}(%3, %14, %15, %16, %17, %18) @"embed.weight" update
    output "loss" = %8 read
    output "embed.weight" = %19 update %3
    output "embed.weight.exp_avg" = %20 update %15
    output "embed.weight.exp_avg_sq" = %21 update %16
    output "layer.weight" = %24 update %5
    output "layer.weight.exp_avg" = %25 update %22
    output "layer.weight.exp_avg_sq" = %26 update %23
    "#);
}

#[test]
fn clipping_takes_the_norm_in_a_backward_of_its_own() {
    assert_snapshot!(update_in_backward(plain(Some(1.0))).unwrap(), @r#"
    routine train
    program norm_step x1
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x4] weight persistent normal(0.02) trainable
    %5 = input "layer.weight" f32[4x4] weight persistent normal(0.02) trainable
    %4: f32[6x4] activation = embedding(%0, %3) @"embed" forward
    %6: f32[6x4] activation = linear(%4, %5) @"layer" forward
    %7: f32[6x4] activation = gelu{"approximate":"none"}(%6) @"" forward
    %8: f32[1] activation, %9: f32[6x4] activation, %10: f32[9x4] gradient = linear_cross_entropy{"chunk":6,"ignore_index":-100,"input_gradient":true,"weight_gradient":true}(%7, %3, %1, %2) @"" forward
    %11: f32[6x4] activation = gelu_backward{"approximate":"none"}(%6, %9) @"" backward
    %12: f32[6x4] activation = linear_backward_input(%11, %5) @"layer" backward
    %13: f32[4x4] gradient = linear_backward_weight(%4, %11) @"layer" backward
    %16: f32[1] activation = norm(%13) @"layer.weight" update
    %14: f32[9x4] gradient = embedding_backward{"vocab_size":9,"accumulate":1}(%0, %12, %10) @"embed" backward
    %15: f32[1] activation = norm(%14) @"embed.weight" update
    %17: f32[1] activation = global_norm(%15, %16) @"grad_norm" update
    output "grad_norm" = %17 read
    output "global_norm" = %17 carry
    program micro_step x1
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x4] weight persistent normal(0.02) trainable
    %5 = input "layer.weight" f32[4x4] weight persistent normal(0.02) trainable
    %15 = input "global_norm" f32[1] activation carried
    %17 = input "embed.weight.exp_avg" f32[9x4] optimizer_state persistent zeros
    %18 = input "embed.weight.exp_avg_sq" f32[9x4] optimizer_state persistent zeros
    %19 = input "lr" f32[1] input fed
    %20 = input "step" f32[1] input fed
    %24 = input "layer.weight.exp_avg" f32[4x4] optimizer_state persistent zeros
    %25 = input "layer.weight.exp_avg_sq" f32[4x4] optimizer_state persistent zeros
    %4: f32[6x4] activation = embedding(%0, %3) @"embed" forward
    %16: f32[1] activation = gradient_factor{"max_norm":1.0}(%15) @"grad_norm" update
    %6: f32[6x4] activation = linear(%4, %5) @"layer" forward
    %7: f32[6x4] activation = gelu{"approximate":"none"}(%6) @"" forward
    %8: f32[1] activation, %9: f32[6x4] activation, %10: f32[9x4] gradient = linear_cross_entropy{"chunk":6,"ignore_index":-100,"input_gradient":true,"weight_gradient":true}(%7, %3, %1, %2) @"" forward
    %11: f32[6x4] activation = gelu_backward{"approximate":"none"}(%6, %9) @"" backward
    %12: f32[6x4] activation = linear_backward_input(%11, %5) @"layer" backward
    %13: f32[4x4] gradient = linear_backward_weight(%4, %11) @"layer" backward
    %26: f32[4x4] weight, %27: f32[4x4] optimizer_state, %28: f32[4x4] optimizer_state = adamw{"beta1":0.9,"beta2":0.95,"eps":1e-8,"weight_decay":0.1,"factor":true}(%5, %13, %24, %25, %19, %20, %16) @"layer.weight" update
    %14: f32[9x4] gradient = embedding_backward{"vocab_size":9,"accumulate":1}(%0, %12, %10) @"embed" backward
    %21: f32[9x4] weight, %22: f32[9x4] optimizer_state, %23: f32[9x4] optimizer_state = adamw{"beta1":0.9,"beta2":0.95,"eps":1e-8,"weight_decay":0.1,"factor":true}(%3, %14, %17, %18, %19, %20, %16) @"embed.weight" update
    output "loss" = %8 read
    output "embed.weight" = %21 update %3
    output "embed.weight.exp_avg" = %22 update %17
    output "embed.weight.exp_avg_sq" = %23 update %18
    output "layer.weight" = %26 update %5
    output "layer.weight.exp_avg" = %27 update %24
    output "layer.weight.exp_avg_sq" = %28 update %25
    "#);
}

#[test]
fn both_backwards_have_the_same_forward() {
    let step = update_in_backward(plain(Some(1.0))).unwrap();
    let train = step.routine(TRAIN).unwrap();
    let forwards = BACKWARD_PROGRAMS.map(|name| {
        let program = train.programs.iter().find(|program| program.name == name).unwrap();
        let nodes = program.graph.nodes.iter();
        let forward = nodes.filter(|node| node.phase == Phase::Forward);
        forward
            .map(|node| (node.op.clone(), node.scope.clone()))
            .collect::<Vec<_>>()
    });
    assert!(!forwards[0].is_empty());
    assert_eq!(forwards[0], forwards[1]);
}

fn refusal(step: Step) -> String {
    let error = update_in_backward(step).unwrap_err();
    assert!(matches!(error, PassError::Illegal { .. }));
    error.to_string()
}

#[test]
fn it_is_refused_where_there_is_no_complete_gradient_or_no_update() {
    let accumulating = accumulate(autodiff(tied()).unwrap(), 2).unwrap();
    let accumulating = optimizer(accumulating, &config(None)).unwrap();
    assert_snapshot!(refusal(accumulating), @"update_in_backward: gradients that are summed over micro-batches are complete only after the last of them: run the batch as one micro-batch, or update after the backward");
    assert_snapshot!(refusal(Step::default()), @"update_in_backward: there is nothing to train");
    assert_snapshot!(refusal(autodiff(tied()).unwrap()), @"update_in_backward: there is no update to move: let an optimizer add it first, and move it once");
    assert_snapshot!(refusal(update_in_backward(plain(None)).unwrap()), @"update_in_backward: there is no update to move: let an optimizer add it first, and move it once");
}
