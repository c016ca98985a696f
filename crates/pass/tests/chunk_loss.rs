//! `chunk_loss`: what it makes, what it chooses by itself, what it refuses, and that results stay.

#[path = "common/numbers.rs"]
mod numbers;

use insta::assert_snapshot;
use proptest::prelude::*;
use tightfit_ir::{Forward, Graph, Op, OutputKind, Type, ValueId};
use tightfit_model::Builder;
use tightfit_pass::{LossChunk, chunk_loss};
use tightfit_testkit::random::model;

/// A head of its own and a loss over `rows` tokens: `[rows, hidden]` to `[rows, vocab]`.
fn with_head(
    [rows, hidden, vocab]: [u64; 3],
    head: impl FnOnce(&mut Builder, ValueId, u64) -> ValueId,
) -> (Builder, ValueId, ValueId) {
    let mut b = Builder::new(0.02);
    let x = b.input("x", Type::f32([rows, hidden]));
    let targets = b.input("targets", Type::i32([rows]));
    let count = b.input("token_count", Type::f32([1]));
    let logits = head(&mut b, x, vocab);
    let loss = b.scope("loss", |b| b.softmax_cross_entropy(logits, targets, count).unwrap());
    (b, logits, loss)
}

fn plain(sizes: [u64; 3]) -> Forward {
    let (b, _, loss) = with_head(sizes, |b, x, vocab| b.linear("lm_head", x, vocab).unwrap());
    b.finish("loss", loss).unwrap()
}

#[test]
fn a_loss_of_whole_logits_takes_in_its_head() {
    let forward = plain([6, 4, 9]);
    assert_snapshot!(forward.graph, @r#"
    %0 = input "x" f32[6x4] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "lm_head.weight" f32[9x4] weight persistent normal(0.02) trainable
    %4: f32[6x9] activation = linear(%0, %3) @"lm_head" forward
    %5: f32[1] activation, %6: f32[6] activation = softmax_cross_entropy{"ignore_index":-100}(%4, %1, %2) @"loss" forward
    output "loss" = %5 read
    "#);
    let chunked = chunk_loss(forward, LossChunk::Rows(4)).unwrap();
    assert_snapshot!(chunked.graph, @r#"
    %0 = input "x" f32[6x4] input fed
    %1 = input "targets" i32[6] input fed
    %2 = input "token_count" f32[1] input fed
    %3 = input "lm_head.weight" f32[9x4] weight persistent normal(0.02) trainable
    %4: f32[1] activation = linear_cross_entropy{"chunk":4,"ignore_index":-100}(%0, %3, %1, %2) @"lm_head" forward
    output "loss" = %4 read
    "#);
}

fn chosen(forward: Forward, chunk: LossChunk) -> u64 {
    let graph = chunk_loss(forward, chunk).unwrap().graph;
    let chunks = graph.nodes.iter().filter_map(|node| match &node.op {
        Op::LinearCrossEntropy(op) => Some(op.chunk),
        _ => None,
    });
    let chunks: Vec<u64> = chunks.collect();
    assert_eq!(chunks.len(), 1);
    chunks[0]
}

#[test]
fn a_chunk_is_never_longer_than_the_rows_and_can_be_chosen_again() {
    let once = chunk_loss(plain([6, 4, 9]), LossChunk::Rows(2)).unwrap();
    assert_eq!(chosen(once.clone(), LossChunk::Rows(2)), 2);
    assert_eq!(chosen(once.clone(), LossChunk::Rows(5)), 5);
    assert_eq!(chosen(once, LossChunk::Rows(u64::MAX)), 6);
}

#[test]
fn the_automatic_chunk_follows_from_the_shapes() {
    for (sizes, chunk) in [
        // A large vocabulary: the fewest rows that are efficient, evened out.
        ([2048, 576, 49_152], 512),
        ([2049, 576, 49_152], 410),
        ([600, 576, 49_152], 300),
        ([100, 576, 49_152], 100),
        // Many rows: logits of the size of the hidden rows.
        ([32_768, 4096, 32_000], 4096),
        // Few classes: there is nothing to save.
        ([2048, 576, 2], 2048),
    ] {
        assert_eq!(chosen(plain(sizes), LossChunk::Auto), chunk, "{sizes:?}");
    }
}

fn refusal(forward: Forward, chunk: LossChunk) -> String {
    chunk_loss(forward, chunk).unwrap_err().to_string()
}

#[test]
fn what_it_refuses() {
    assert_snapshot!(refusal(plain([6, 4, 9]), LossChunk::Rows(0)), @"chunk_loss: a chunk has at least 1 row");
    const NO_LOSS: &str =
        "chunk_loss: the model has no loss of logits that a linear layer without bias makes for it alone";

    let mut b = Builder::new(0.02);
    let x = b.input("x", Type::f32([6, 4]));
    let logits = b.linear("lm_head", x, 9).unwrap();
    assert_eq!(refusal(b.finish("logits", logits).unwrap(), LossChunk::Auto), NO_LOSS);

    let (b, _, loss) = with_head([6, 4, 9], |b, x, vocab| b.linear_bias("head", x, vocab).unwrap());
    assert_eq!(refusal(b.finish("loss", loss).unwrap(), LossChunk::Auto), NO_LOSS);

    let mut read = plain([6, 4, 9]);
    let logits = read.graph.nodes[0].outputs[0];
    read.graph.output("logits", logits, OutputKind::Read);
    assert_eq!(refusal(read, LossChunk::Auto), NO_LOSS);

    let mut read = plain([6, 4, 9]);
    let lse = read.graph.nodes[1].outputs[1];
    read.graph.output("lse", lse, OutputKind::Read);
    assert_eq!(refusal(read, LossChunk::Auto), NO_LOSS);
}

/// Whether the logits of the loss have a bias.
fn has_biased_head(graph: &Graph) -> bool {
    let losses = graph
        .nodes
        .iter()
        .filter(|node| matches!(node.op, Op::SoftmaxCrossEntropy(_)));
    let mut heads = losses.filter_map(|loss| graph.producer(loss.inputs[0]));
    heads.any(|head| matches!(&graph.node(head).op, Op::Linear(op) if op.bias))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn any_chunk_of_a_random_model_gives_the_same_loss_and_gradients(model in model(), chunk in 0..30_u64, seed: u64) {
        let chunk = if chunk == 0 { LossChunk::Auto } else { LossChunk::Rows(chunk) };
        match chunk_loss(model.forward.clone(), chunk) {
            Ok(chunked) => prop_assert_eq!(numbers::difference(&model, &chunked, seed), None, "{}", model.forward.graph),
            Err(error) => prop_assert!(has_biased_head(&model.forward.graph), "{}", error),
        }
    }
}
