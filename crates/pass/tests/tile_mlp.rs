//! `tile_mlp`: what it makes, before and after autodiff, what it leaves and refuses, and that results stay.

#[path = "common/numbers.rs"]
mod numbers;

use insta::assert_snapshot;
use proptest::prelude::*;
use tightfit_ir::op::Approximate;
use tightfit_ir::{Forward, Graph, Op, OutputKind, Type, ValueId};
use tightfit_model::Builder;
use tightfit_pass::{PassError, autodiff, tile_mlp};
use tightfit_testkit::random::model;

/// A gated MLP of 6 rows after a norm, with or without the residual stream around it; the names say nothing.
fn gated(residual: bool) -> Forward {
    let mut b = Builder::new(0.02);
    let x = b.input("x", Type::f32([6, 4]));
    let normed = b.rms_norm("a", x, 1e-5).unwrap();
    let gate = b.linear("b", normed, 8).unwrap();
    let up = b.linear("c", normed, 8).unwrap();
    let hidden = b.swiglu(gate, up).unwrap();
    let y = b.linear_with("d", hidden, 4, true, residual.then_some(x)).unwrap();
    b.finish("y", y).unwrap()
}

#[test]
fn every_tile_is_put_onto_the_one_before_and_the_first_onto_the_residual_stream() {
    assert_snapshot!(gated(true).graph, @r#"
    %0 = input "x" f32[6x4] input fed
    %1 = input "a.weight" f32[4] weight persistent ones trainable
    %4 = input "b.weight" f32[8x4] weight persistent normal(0.02) trainable
    %6 = input "c.weight" f32[8x4] weight persistent normal(0.02) trainable
    %9 = input "d.weight" f32[4x8] weight persistent normal(0.02) trainable
    %10 = input "d.bias" f32[4] weight persistent zeros trainable
    %2: f32[6x4] activation, %3: f32[6] activation = rms_norm{"eps":0.00001}(%0, %1) @"a" forward
    %5: f32[6x8] activation = linear(%2, %4) @"b" forward
    %7: f32[6x8] activation = linear(%2, %6) @"c" forward
    %8: f32[6x8] activation = swiglu(%5, %7) @"" forward
    %11: f32[6x4] activation = linear{"bias":true,"accumulate":1}(%8, %9, %10, %0) @"d" forward
    output "y" = %11 read
    "#);
    assert_snapshot!(tile_mlp(gated(true), 4).unwrap().graph, @r#"
    %0 = input "x" f32[6x4] input fed
    %1 = input "a.weight" f32[4] weight persistent ones trainable
    %2 = input "b.weight" f32[8x4] weight persistent normal(0.02) trainable
    %3 = input "c.weight" f32[8x4] weight persistent normal(0.02) trainable
    %4 = input "d.weight" f32[4x8] weight persistent normal(0.02) trainable
    %5 = input "d.bias" f32[4] weight persistent zeros trainable
    %6: f32[6x4] activation, %7: f32[6] activation = rms_norm{"eps":0.00001}(%0, %1) @"a" forward
    %8: f32[4x4] activation = slice_rows{"start":0,"rows":4}(%6) @"b" forward
    %9: f32[4x8] activation = linear(%8, %2) @"b" forward
    %10: f32[4x8] activation = linear(%8, %3) @"c" forward
    %11: f32[4x8] activation = swiglu(%9, %10) @"" forward
    %12: f32[4x4] activation = linear{"bias":true}(%11, %4, %5) @"d" forward
    %13: f32[6x4] activation = pad_rows{"start":0,"total":6,"accumulate":1}(%12, %0) @"d" forward
    %14: f32[2x4] activation = slice_rows{"start":4,"rows":2}(%6) @"b" forward
    %15: f32[2x8] activation = linear(%14, %2) @"b" forward
    %16: f32[2x8] activation = linear(%14, %3) @"c" forward
    %17: f32[2x8] activation = swiglu(%15, %16) @"" forward
    %18: f32[2x4] activation = linear{"bias":true}(%17, %4, %5) @"d" forward
    %19: f32[6x4] activation = pad_rows{"start":4,"total":6,"accumulate":1}(%18, %13) @"d" forward
    output "y" = %19 read
    "#);
}

#[test]
fn without_a_residual_stream_the_first_tile_starts_from_zeros() {
    assert_snapshot!(tile_mlp(gated(false), 3).unwrap().graph, @r#"
    %0 = input "x" f32[6x4] input fed
    %1 = input "a.weight" f32[4] weight persistent ones trainable
    %2 = input "b.weight" f32[8x4] weight persistent normal(0.02) trainable
    %3 = input "c.weight" f32[8x4] weight persistent normal(0.02) trainable
    %4 = input "d.weight" f32[4x8] weight persistent normal(0.02) trainable
    %5 = input "d.bias" f32[4] weight persistent zeros trainable
    %6: f32[6x4] activation, %7: f32[6] activation = rms_norm{"eps":0.00001}(%0, %1) @"a" forward
    %8: f32[3x4] activation = slice_rows{"start":0,"rows":3}(%6) @"b" forward
    %9: f32[3x8] activation = linear(%8, %2) @"b" forward
    %10: f32[3x8] activation = linear(%8, %3) @"c" forward
    %11: f32[3x8] activation = swiglu(%9, %10) @"" forward
    %12: f32[3x4] activation = linear{"bias":true}(%11, %4, %5) @"d" forward
    %13: f32[6x4] activation = pad_rows{"start":0,"total":6}(%12) @"d" forward
    %14: f32[3x4] activation = slice_rows{"start":3,"rows":3}(%6) @"b" forward
    %15: f32[3x8] activation = linear(%14, %2) @"b" forward
    %16: f32[3x8] activation = linear(%14, %3) @"c" forward
    %17: f32[3x8] activation = swiglu(%15, %16) @"" forward
    %18: f32[3x4] activation = linear{"bias":true}(%17, %4, %5) @"d" forward
    %19: f32[6x4] activation = pad_rows{"start":3,"total":6,"accumulate":1}(%18, %13) @"d" forward
    output "y" = %19 read
    "#);
}

/// Two layers around GELU, an `add` as the residual connection, and a loss.
fn added(rows: u64) -> Forward {
    let mut b = Builder::new(0.02);
    let x = b.input("x", Type::f32([rows, 4]));
    let targets = b.input("targets", Type::i32([rows]));
    let count = b.input("token_count", Type::f32([1]));
    let x = b.linear("in", x, 4).unwrap();
    let hidden = b.linear_bias("up", x, 8).unwrap();
    let hidden = b.gelu(hidden, Approximate::Tanh).unwrap();
    let y = b.linear("down", hidden, 4).unwrap();
    let y = b.add(x, y).unwrap();
    let y = b.rms_norm("norm", y, 1e-5).unwrap();
    let head = b.matrix("head", 9, 4);
    let loss = b.linear_cross_entropy(y, head, targets, count, rows).unwrap();
    b.finish("loss", loss).unwrap()
}

#[test]
fn the_backward_goes_tile_by_tile_and_sums_in_place() {
    let step = autodiff(tile_mlp(added(6), 4).unwrap()).unwrap();
    assert_snapshot!(step.routines[0].programs[0].graph, @r#"
    %0 = input "x" f32[6x4] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "in.weight" f32[4x4] weight persistent normal(0.02) trainable
    %4 = input "up.weight" f32[8x4] weight persistent normal(0.02) trainable
    %5 = input "up.bias" f32[8] weight persistent zeros trainable
    %6 = input "down.weight" f32[4x8] weight persistent normal(0.02) trainable
    %7 = input "norm.weight" f32[4] weight persistent ones trainable
    %8 = input "head" f32[9x4] weight persistent normal(0.02) trainable
    %9: f32[4x4] activation = slice_rows{"start":0,"rows":4}(%0) @"in" forward
    %10: f32[4x4] activation = linear(%9, %3) @"in" forward
    %11: f32[4x8] activation = linear{"bias":true}(%10, %4, %5) @"up" forward
    %12: f32[4x8] activation = gelu{"approximate":"tanh"}(%11) @"" forward
    %13: f32[4x4] activation = linear(%12, %6) @"down" forward
    %14: f32[4x4] activation = add(%10, %13) @"" forward
    %15: f32[6x4] activation = pad_rows{"start":0,"total":6}(%14) @"" forward
    %16: f32[2x4] activation = slice_rows{"start":4,"rows":2}(%0) @"in" forward
    %17: f32[2x4] activation = linear(%16, %3) @"in" forward
    %18: f32[2x8] activation = linear{"bias":true}(%17, %4, %5) @"up" forward
    %19: f32[2x8] activation = gelu{"approximate":"tanh"}(%18) @"" forward
    %20: f32[2x4] activation = linear(%19, %6) @"down" forward
    %21: f32[2x4] activation = add(%17, %20) @"" forward
    %22: f32[6x4] activation = pad_rows{"start":4,"total":6,"accumulate":1}(%21, %15) @"" forward
    %23: f32[6x4] activation, %24: f32[6] activation = rms_norm{"eps":0.00001}(%22, %7) @"norm" forward
    %25: f32[1] activation, %26: f32[6x4] activation, %27: f32[9x4] gradient = linear_cross_entropy{"chunk":6,"ignore_index":-100,"input_gradient":true,"weight_gradient":true}(%23, %8, %1, %2) @"" forward
    %28: f32[6x4] activation, %29: f32[4] gradient = rms_norm_backward{"input":true,"weight":true}(%22, %7, %24, %26) @"norm" backward
    %30: f32[2x4] activation = slice_rows{"start":4,"rows":2}(%28) @"" backward
    %31: f32[2x8] activation = linear_backward_input(%30, %6) @"down" backward
    %32: f32[4x8] gradient = linear_backward_weight(%19, %30) @"down" backward
    %33: f32[2x8] activation = gelu_backward{"approximate":"tanh"}(%18, %31) @"" backward
    %34: f32[2x4] activation = linear_backward_input{"accumulate":1}(%33, %4, %30) @"up" backward
    %35: f32[8x4] gradient = linear_backward_weight(%17, %33) @"up" backward
    %36: f32[8] gradient = bias_backward(%33) @"up" backward
    %37: f32[4x4] gradient = linear_backward_weight(%16, %34) @"in" backward
    %38: f32[4x4] activation = slice_rows{"start":0,"rows":4}(%28) @"" backward
    %39: f32[4x8] activation = linear_backward_input(%38, %6) @"down" backward
    %40: f32[4x8] gradient = linear_backward_weight{"accumulate":1}(%12, %38, %32) @"down" backward
    %41: f32[4x8] activation = gelu_backward{"approximate":"tanh"}(%11, %39) @"" backward
    %42: f32[4x4] activation = linear_backward_input{"accumulate":1}(%41, %4, %38) @"up" backward
    %43: f32[8x4] gradient = linear_backward_weight{"accumulate":1}(%10, %41, %35) @"up" backward
    %44: f32[8] gradient = bias_backward{"accumulate":1}(%41, %36) @"up" backward
    %45: f32[4x4] gradient = linear_backward_weight{"accumulate":1}(%9, %42, %37) @"in" backward
    output "loss" = %25 read
    output "in.weight.grad" = %45 carry
    output "up.weight.grad" = %43 carry
    output "up.bias.grad" = %44 carry
    output "down.weight.grad" = %40 carry
    output "norm.weight.grad" = %29 carry
    output "head.grad" = %27 carry
    "#);
}

/// The largest number of rows of the values of that many columns.
fn rows_of(graph: &Graph, cols: u64) -> u64 {
    let made = graph.nodes.iter().flat_map(|node| &node.outputs);
    let types = made.map(|&id| graph.ty(id)).filter(|ty| ty.cols() == cols);
    types.map(Type::rows).max().unwrap()
}

#[test]
fn no_inner_value_is_longer_than_a_tile() {
    for rows in [1, 4, 5] {
        assert_eq!(rows_of(&tile_mlp(gated(true), rows).unwrap().graph, 8), rows);
        assert_eq!(rows_of(&tile_mlp(added(6), rows).unwrap().graph, 8), rows);
    }
}

#[test]
fn an_mlp_of_no_more_rows_than_a_tile_stays() {
    for rows in [6, 7, u64::MAX] {
        let same = tile_mlp(gated(true), rows).unwrap();
        assert_eq!(rows_of(&same.graph, 8), 6);
        assert!(
            same.graph
                .nodes
                .iter()
                .all(|node| !matches!(node.op, Op::SliceRows(_) | Op::PadRows(_)))
        );
    }
}

fn refusal(result: Result<Forward, PassError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn what_it_refuses() {
    assert_snapshot!(refusal(tile_mlp(gated(true), 0)), @"tile_mlp: a tile has at least 1 row");
    assert_snapshot!(refusal(tile_mlp(added(257), 1)), @"tile_mlp: tiles of 1 rows cut 257 rows into 257 parts, of which there may be 256: use at least 2");
    assert!(tile_mlp(added(256), 1).is_ok());
    const NO_MLP: &str = "tile_mlp: the model has no MLP: no activation between linear layers that nothing else reads";

    let one_layer = |after: &dyn Fn(&mut Builder, ValueId) -> ValueId| {
        let mut b = Builder::new(0.02);
        let x = b.input("x", Type::f32([6, 4]));
        let y = b.linear("layer", x, 8).unwrap();
        let y = after(&mut b, y);
        b.finish("y", y).unwrap()
    };
    let gelu = |b: &mut Builder, x| b.gelu(x, Approximate::None).unwrap();
    assert_eq!(refusal(tile_mlp(one_layer(&|_, y| y), 2)), NO_MLP);
    assert_eq!(refusal(tile_mlp(one_layer(&gelu), 2)), NO_MLP);
    // What lies between activation and layer goes across rows.
    let across = |b: &mut Builder, x| {
        let y = gelu(b, x);
        let y = b.reshape(y, [8, 6]).unwrap();
        b.linear("next", y, 6).unwrap()
    };
    assert_eq!(refusal(tile_mlp(one_layer(&across), 2)), NO_MLP);

    // The activation's value is also a result.
    let mut read = gated(true);
    let hidden = read
        .graph
        .nodes
        .iter()
        .find(|node| matches!(node.op, Op::SwiGlu(_)))
        .unwrap()
        .outputs[0];
    read.graph.output("hidden", hidden, OutputKind::Read);
    assert_eq!(refusal(tile_mlp(read, 2)), NO_MLP);
}

#[test]
fn a_value_that_is_also_a_weight_stays_whole() {
    let mut b = Builder::new(0.02);
    let x = b.input("x", Type::f32([4, 4]));
    let square = b.linear("a", x, 4).unwrap();
    let hidden = b.linear("b", x, 4).unwrap();
    let hidden = b.gelu(hidden, Approximate::None).unwrap();
    let y = b.product(hidden, square).unwrap();
    let forward = tile_mlp(b.finish("y", y).unwrap(), 2).unwrap();
    let whole = forward.graph.nodes.iter().filter(|node| &*node.scope == "a").count();
    let tiles = forward
        .graph
        .nodes
        .iter()
        .filter(|node| &*node.scope == "b" && matches!(node.op, Op::Linear(_)));
    assert_eq!((whole, tiles.count()), (1, 2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn tiles_of_a_random_model_give_the_same_loss_and_gradients(model in model(), rows in 1..24_u64, seed: u64) {
        match tile_mlp(model.forward.clone(), rows) {
            Ok(tiled) => prop_assert_eq!(numbers::difference(&model, &tiled, seed), None, "{}", model.forward.graph),
            Err(error) => prop_assert!(error.to_string().contains("no MLP"), "{}", error),
        }
    }
}
