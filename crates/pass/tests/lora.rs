//! LoRA: the graph before and after, gradients of adapters alone, and what the pass refuses.

use insta::assert_snapshot;
use proptest::prelude::*;
use tightfit_ir::op::Approximate;
use tightfit_ir::{Binding, Forward, Role, Tensor, Type};
use tightfit_model::Builder;
use tightfit_pass::{
    Adam, FIRST_TOKEN, LoraConfig, Optimizer, OptimizerConfig, Pattern, Targets, autodiff, gradient_name,
    linear_layers, lora, optimizer, tile_mlp,
};
use tightfit_testkit::data::batch;
use tightfit_testkit::gradcheck::check_model;
use tightfit_testkit::interpret::{Named, initial, run};
use tightfit_testkit::random;

fn config(dropout: f64, targets: &[&str]) -> LoraConfig {
    let patterns = targets.iter().map(|&target| Pattern(target.to_owned())).collect();
    LoraConfig {
        rank: 2,
        alpha: 3.0,
        rslora: false,
        dropout,
        seed: 5,
        targets: if targets.is_empty() {
            Targets::AllLinear
        } else {
            Targets::Patterns(patterns)
        },
    }
}

/// An MLP with a bias and a residual, between a tied table's two uses.
fn block() -> Forward {
    let mut b = Builder::new(0.02);
    let [tokens, targets] = ["tokens", "targets"].map(|name| b.input(name, Type::i32([6])));
    let count = b.input("token_count", Type::f32([1]));
    let [x, table] = b.embedding("embed", tokens, 9, 4).unwrap();
    let x = b.scope("mlp", |b| {
        let hidden = b.linear_bias("up", x, 8).unwrap();
        let hidden = b.gelu(hidden, Approximate::Tanh).unwrap();
        b.linear_onto("down", hidden, x).unwrap()
    });
    let loss = b.linear_cross_entropy(x, table, targets, count, 6).unwrap();
    b.finish("loss", loss).unwrap()
}

#[test]
fn a_block_before_and_after() {
    assert_snapshot!(block().graph, @r#"
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x4] weight persistent normal(0.02) trainable
    %5 = input "mlp.up.weight" f32[8x4] weight persistent normal(0.02) trainable
    %6 = input "mlp.up.bias" f32[8] weight persistent zeros trainable
    %9 = input "mlp.down.weight" f32[4x8] weight persistent normal(0.02) trainable
    %4: f32[6x4] activation = embedding(%0, %3) @"embed" forward
    %7: f32[6x8] activation = linear{"bias":true}(%4, %5, %6) @"mlp.up" forward
    %8: f32[6x8] activation = gelu{"approximate":"tanh"}(%7) @"mlp" forward
    %10: f32[6x4] activation = linear{"accumulate":1}(%8, %9, %4) @"mlp.down" forward
    %11: f32[1] activation = linear_cross_entropy{"chunk":6,"ignore_index":-100}(%10, %3, %1, %2) @"" forward
    output "loss" = %11 read
    "#);
    assert_snapshot!(lora(block(), &config(0.25, &[])).unwrap().graph, @r#"
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x4] weight persistent normal(0.02)
    %5 = input "mlp.up.weight" f32[8x4] weight persistent normal(0.02)
    %6 = input "mlp.up.bias" f32[8] weight persistent zeros
    %9 = input "mlp.down.weight" f32[4x8] weight persistent normal(0.02)
    %12 = input "first_token" i32[2] input fed
    %13 = input "mlp.up.lora_A.weight" f32[2x4] adapter persistent uniform(0.5) trainable
    %14 = input "mlp.up.lora_B.weight" f32[8x2] adapter persistent zeros trainable
    %19 = input "mlp.down.lora_A.weight" f32[2x8] adapter persistent uniform(0.35355339059327373) trainable
    %20 = input "mlp.down.lora_B.weight" f32[4x2] adapter persistent zeros trainable
    %4: f32[6x4] activation = embedding(%0, %3) @"embed" forward
    %15: f32[6x4] activation = dropout{"p":0.25,"key":6818852580722531486}(%4, %12) @"mlp.up" forward
    %16: f32[6x2] activation = linear(%15, %13) @"mlp.up" forward
    %17: f32[6x2] activation = scale{"by":1.5}(%16) @"mlp.up" forward
    %7: f32[6x8] activation = linear{"bias":true}(%4, %5, %6) @"mlp.up" forward
    %18: f32[6x8] activation = linear{"accumulate":1}(%17, %14, %7) @"mlp.up" forward
    %8: f32[6x8] activation = gelu{"approximate":"tanh"}(%18) @"mlp" forward
    %21: f32[6x8] activation = dropout{"p":0.25,"key":14121418358404750396}(%8, %12) @"mlp.down" forward
    %22: f32[6x2] activation = linear(%21, %19) @"mlp.down" forward
    %23: f32[6x2] activation = scale{"by":1.5}(%22) @"mlp.down" forward
    %10: f32[6x4] activation = linear{"accumulate":1}(%8, %9, %4) @"mlp.down" forward
    %24: f32[6x4] activation = linear{"accumulate":1}(%23, %20, %10) @"mlp.down" forward
    %11: f32[1] activation = linear_cross_entropy{"chunk":6,"ignore_index":-100}(%24, %3, %1, %2) @"" forward
    output "loss" = %11 read
    "#);
}

#[test]
fn the_backward_of_a_targeted_layer() {
    let step = autodiff(lora(block(), &config(0.0, &["down"])).unwrap()).unwrap();
    assert_snapshot!(step, @r#"
    routine train
    program micro_step x1
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x4] weight persistent normal(0.02)
    %5 = input "mlp.up.weight" f32[8x4] weight persistent normal(0.02)
    %6 = input "mlp.up.bias" f32[8] weight persistent zeros
    %9 = input "mlp.down.weight" f32[4x8] weight persistent normal(0.02)
    %12 = input "mlp.down.lora_A.weight" f32[2x8] adapter persistent uniform(0.35355339059327373) trainable
    %13 = input "mlp.down.lora_B.weight" f32[4x2] adapter persistent zeros trainable
    %4: f32[6x4] activation = embedding(%0, %3) @"embed" forward
    %7: f32[6x8] activation = linear{"bias":true}(%4, %5, %6) @"mlp.up" forward
    %8: f32[6x8] activation = gelu{"approximate":"tanh"}(%7) @"mlp" forward
    %14: f32[6x2] activation = linear(%8, %12) @"mlp.down" forward
    %15: f32[6x2] activation = scale{"by":1.5}(%14) @"mlp.down" forward
    %10: f32[6x4] activation = linear{"accumulate":1}(%8, %9, %4) @"mlp.down" forward
    %16: f32[6x4] activation = linear{"accumulate":1}(%15, %13, %10) @"mlp.down" forward
    %11: f32[1] activation, %17: f32[6x4] activation = linear_cross_entropy{"chunk":6,"ignore_index":-100,"input_gradient":true}(%16, %3, %1, %2) @"" forward
    %18: f32[6x2] activation = linear_backward_input(%17, %13) @"mlp.down" backward
    %19: f32[4x2] gradient = linear_backward_weight(%15, %17) @"mlp.down" backward
    %20: f32[6x2] activation = scale{"by":1.5}(%18) @"mlp.down" backward
    %21: f32[2x8] gradient = linear_backward_weight(%8, %20) @"mlp.down" backward
    output "loss" = %11 read
    output "mlp.down.lora_A.weight.grad" = %21 carry
    output "mlp.down.lora_B.weight.grad" = %19 carry
    "#);
}

#[test]
fn only_adapters_have_gradients_and_state() {
    let step = autodiff(lora(block(), &config(0.0, &[])).unwrap()).unwrap();
    let adamw = OptimizerConfig {
        optimizer: Optimizer::AdamW(Adam {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
        }),
        weight_decay: 0.0,
        clip_norm: None,
        loss_scale: None,
        seed: 1,
    };
    let step = optimizer(step, &adamw).unwrap();
    let update = &step.routines[0].programs[1].graph;
    let state: Vec<String> = update
        .inputs()
        .filter(|(_, value, _)| value.role == Role::OptimizerState)
        .map(|(_, value, _)| value.name.to_string())
        .collect();
    let adapters = ["mlp.up.lora_A", "mlp.up.lora_B", "mlp.down.lora_A", "mlp.down.lora_B"];
    let expected = adapters.map(|name| ["exp_avg", "exp_avg_sq"].map(|moment| format!("{name}.weight.{moment}")));
    assert_eq!(state, expected.concat());
}

#[test]
fn heads_have_no_adapters() {
    let mut b = Builder::new(0.02);
    let x = b.input("x", Type::f32([6, 4]));
    let hidden = b.linear("body", x, 8).unwrap();
    let logits = b.linear("head", hidden, 3).unwrap();
    let forward = b.finish("logits", logits).unwrap();
    assert_eq!(linear_layers(&forward), ["body"]);
    assert_snapshot!(
        lora(forward, &config(0.0, &["head"])).unwrap_err(),
        @"lora: no linear layer is called `head`: there are body"
    );
}

#[test]
fn what_names_no_layer_is_refused() {
    assert_snapshot!(lora(block(), &config(0.0, &["up", "q_proj"])).unwrap_err(), @"lora: no linear layer is called `q_proj`: there are down, up");
    let layers = Targets::Layers(["mlp.gate".to_owned()].into());
    let unknown = LoraConfig {
        targets: layers,
        ..config(0.0, &[])
    };
    assert_snapshot!(lora(block(), &unknown).unwrap_err(), @"lora: no linear layer is called `mlp.gate`: there are down, up");
    let no_rank = LoraConfig {
        rank: 0,
        ..config(0.0, &[])
    };
    assert_snapshot!(lora(block(), &no_rank).unwrap_err(), @"lora: the rank is at least 1");
}

/// With `B` at zero the model is the one that it was; with dropout, tiles of an MLP draw what the whole would have drawn.
#[test]
fn tiles_of_rows_drop_what_the_whole_drops() {
    let adapted = lora(block(), &config(0.5, &[])).unwrap();
    let tiled = tile_mlp(adapted.clone(), 4).unwrap();
    assert_ne!(adapted.graph.nodes.len(), tiled.graph.nodes.len());
    let mut feed = feed(&adapted, 1);
    for (name, tensor) in [
        ("tokens", (0..6).map(f64::from).collect()),
        ("targets", (0..6).rev().map(f64::from).collect()),
        ("token_count", vec![6.0]),
    ] {
        let shape = [Vec::len(&tensor) as u64];
        feed.insert(name.to_owned(), Tensor::new(shape, tensor));
    }
    let results = |forward: &Forward| {
        let step = autodiff(forward.clone()).unwrap();
        run(&step.routines[0].programs[0].graph, &feed).outputs()
    };
    let (whole, tiles) = (results(&adapted), results(&tiled));
    assert!(whole.keys().eq(tiles.keys()));
    for (name, whole) in &whole {
        let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-12;
        assert!(whole.data.iter().zip(&tiles[name].data).all(near), "{name}");
    }
}

/// Weights, adapters that are not zero, and a first token.
fn feed(forward: &Forward, seed: u64) -> Named {
    let mut feed = initial(&forward.graph, seed);
    for (name, tensor) in &mut feed {
        if name.ends_with("lora_B.weight") {
            let elements = tensor.data.iter_mut().enumerate();
            elements.for_each(|(i, x)| *x = ((i * 7 + 3) % 11) as f64 / 11.0 - 0.5);
        }
    }
    feed.insert(FIRST_TOKEN.to_owned(), Tensor::new([2], vec![100.0, 0.0]));
    feed
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Every gradient of an adapter is the slope of the loss, and nothing else has one; without an update the loss is the model's.
    #[test]
    fn adapters_of_random_models_learn(model in random::model(), seed: u64, dropout in prop::sample::select(vec![0.0, 0.3])) {
        prop_assume!(!linear_layers(&model.forward).is_empty());
        let adapted = lora(model.forward.clone(), &config(dropout, &[])).unwrap();
        for (_, value, binding) in adapted.graph.inputs() {
            if let Binding::Persistent { trainable, .. } = binding {
                prop_assert_eq!(trainable, value.role == Role::Adapter, "{}", value.name);
            }
        }
        let mut data = batch(model.batch, 1, seed).remove(0);
        data.extend(initial(&model.forward.graph, seed));
        let loss = run(&model.forward.graph, &data).output("loss").clone();
        data.extend(initial(&adapted.graph, seed));
        data.insert(FIRST_TOKEN.to_owned(), Tensor::new([2], vec![0.0, 1.0]));
        let start = run(&adapted.graph, &data).output("loss").clone();
        prop_assert_eq!(loss, start);
        data.extend(feed(&adapted, seed));
        if autodiff(adapted.clone()).is_ok() {
            check_model(&adapted, &data, seed).map_err(TestCaseError::fail)?;
        }
    }
}

#[test]
fn gradients_have_the_names_of_adapters() {
    let step = autodiff(lora(block(), &config(0.0, &["mlp.*"])).unwrap()).unwrap();
    let graph = &step.routines[0].programs[0].graph;
    assert!(graph.output_named(&gradient_name("mlp.down.lora_B.weight")).is_some());
}
