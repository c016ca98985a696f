//! Passes that change what numbers are stored as: the graph after them, and what they refuse.

use insta::assert_snapshot;
use tightfit_ir::{Block, DType, Forward, Type};
use tightfit_model::Builder;
use tightfit_pass::{LoraConfig, Storage, Targets, autocast, autodiff, lora, quantize};

/// A block with a norm, and a table that is the head as well.
fn block() -> Forward {
    let mut b = Builder::new(0.02);
    let [tokens, targets] = ["tokens", "targets"].map(|name| b.input(name, Type::i32([6])));
    let count = b.input("token_count", Type::f32([1]));
    let [x, table] = b.embedding("embed", tokens, 9, 64).unwrap();
    let x = b.scope("mlp", |b| {
        let normed = b.rms_norm("norm", x, 1e-5).unwrap();
        let hidden = b.linear("up", normed, 128).unwrap();
        b.linear_onto("down", hidden, x).unwrap()
    });
    let loss = b.linear_cross_entropy(x, table, targets, count, 6).unwrap();
    b.finish("loss", loss).unwrap()
}

/// The same with adapters beside one frozen layer.
fn adapted() -> Forward {
    let config = LoraConfig {
        rank: 2,
        alpha: 4.0,
        rslora: false,
        dropout: 0.0,
        seed: 1,
        targets: Targets::AllLinear,
    };
    lora(block(), &config).unwrap()
}

/// Weights that no file has.
fn stored(base: Option<Block>) -> Storage<'static> {
    Storage {
        trained: DType::F32,
        base,
        tables: false,
        floats: None,
        file: &|_| None,
    }
}

#[test]
fn activations_in_16_bits() {
    let forward = autocast(block(), DType::Bf16).unwrap();
    assert_snapshot!(forward.graph, @r#"
    %0 = input "tokens" i32[6] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "embed.weight" f32[9x64] weight persistent normal(0.02) trainable
    %4 = input "mlp.norm.weight" f32[64] weight persistent ones trainable
    %5 = input "mlp.up.weight" f32[128x64] weight persistent normal(0.02) trainable
    %6 = input "mlp.down.weight" f32[64x128] weight persistent normal(0.02) trainable
    %7: bf16[6x64] activation = embedding{"dtype":"bf16"}(%0, %3) @"embed" forward
    %8: bf16[6x64] activation, %9: f32[6] activation = rms_norm{"eps":0.00001}(%7, %4) @"mlp.norm" forward
    %10: bf16[6x128] activation = linear(%8, %5) @"mlp.up" forward
    %11: bf16[6x64] activation = linear{"accumulate":1}(%10, %6, %7) @"mlp.down" forward
    %12: f32[1] activation = linear_cross_entropy{"chunk":6,"ignore_index":-100}(%11, %3, %1, %2) @"" forward
    output "loss" = %12 read
    "#);
}

#[test]
fn gradients_of_activations_in_16_bits() {
    let step = autodiff(autocast(block(), DType::Bf16).unwrap()).unwrap();
    step.verify().unwrap();
    let graph = &step.routines[0].programs[0].graph;
    let made = graph.nodes.iter().flat_map(|node| {
        let outputs = node.outputs.iter().map(move |&id| (node, graph.value(id)));
        outputs.map(|(node, value)| format!("{} {}: {}\n", node.phase.name(), node.op.name(), value.ty))
    });
    assert_snapshot!(made.collect::<String>(), @r#"
    forward embedding: bf16[6x64]
    forward rms_norm: bf16[6x64]
    forward rms_norm: f32[6]
    forward linear: bf16[6x128]
    forward linear: bf16[6x64]
    forward linear_cross_entropy: f32[1]
    forward linear_cross_entropy: bf16[6x64]
    forward linear_cross_entropy: f32[9x64]
    backward linear_backward_input: bf16[6x128]
    backward linear_backward_weight: f32[64x128]
    backward linear_backward_input: bf16[6x64]
    backward linear_backward_weight: f32[128x64]
    backward rms_norm_backward: bf16[6x64]
    backward rms_norm_backward: f32[64]
    backward embedding_backward: f32[9x64]
    "#);
}

#[test]
fn f32_changes_nothing() {
    let plain = block().graph.to_string();
    assert_eq!(autocast(block(), DType::F32).unwrap().graph.to_string(), plain);
    assert_eq!(quantize(block(), &stored(None)).unwrap().graph.to_string(), plain);
}

/// The weights of a model, with what they are stored as.
fn weights(forward: &Forward) -> String {
    let weights = forward
        .graph
        .inputs()
        .filter(|(_, value, _)| value.name.contains("weight"));
    weights
        .map(|(_, value, _)| format!("{} {}\n", value.name, value.ty))
        .collect()
}

#[test]
fn frozen_matrices_are_quantised_and_adapters_are_not() {
    let forward = quantize(adapted(), &stored(Some(Block::Nf4))).unwrap();
    assert_snapshot!(weights(&forward), @r#"
    embed.weight f32[9x64]
    mlp.norm.weight f32[64]
    mlp.up.weight nf4[128x64]
    mlp.down.weight nf4[64x128]
    mlp.up.lora_A.weight f32[2x64]
    mlp.up.lora_B.weight f32[128x2]
    mlp.down.lora_A.weight f32[2x128]
    mlp.down.lora_B.weight f32[64x2]
    "#);
}

#[test]
fn tables_are_quantised_when_asked_for_and_the_rest_rounded() {
    let storage = Storage {
        trained: DType::Bf16,
        tables: true,
        floats: Some(DType::Bf16),
        ..stored(Some(Block::Int8))
    };
    assert_snapshot!(weights(&quantize(adapted(), &storage).unwrap()), @r#"
    embed.weight int8[9x64]
    mlp.norm.weight bf16[64]
    mlp.up.weight int8[128x64]
    mlp.down.weight int8[64x128]
    mlp.up.lora_A.weight bf16[2x64]
    mlp.up.lora_B.weight bf16[128x2]
    mlp.down.lora_A.weight bf16[2x128]
    mlp.down.lora_B.weight bf16[64x2]
    "#);
}

#[test]
fn a_file_decides_what_is_left_open() {
    let file = |name: &str| match name {
        "mlp.up.weight" => Some(DType::Block(Block::Q4_1)),
        "mlp.norm.weight" => Some(DType::F16),
        _ => None,
    };
    let storage = Storage {
        file: &file,
        ..stored(None)
    };
    assert_snapshot!(weights(&quantize(adapted(), &storage).unwrap()), @r#"
    embed.weight f32[9x64]
    mlp.norm.weight f16[64]
    mlp.up.weight q4_1[128x64]
    mlp.down.weight f32[64x128]
    mlp.up.lora_A.weight f32[2x64]
    mlp.up.lora_B.weight f32[128x2]
    mlp.down.lora_A.weight f32[2x128]
    mlp.down.lora_B.weight f32[64x2]
    "#);
}

#[test]
fn weights_that_are_trained_are_not_quantised() {
    let storage = Storage {
        trained: DType::Block(Block::Int8),
        ..stored(None)
    };
    let refused = quantize(block(), &storage).unwrap_err().to_string();
    assert!(
        refused.contains("`embed.weight` is trained") && refused.contains("--method lora"),
        "{refused}"
    );
}
