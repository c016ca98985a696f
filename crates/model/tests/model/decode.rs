//! Generation with a cache computes what the whole text at once does. Everything in `f64`, by the naive references.

use tightfit_ir::{Graph, Role, Tensor};
use tightfit_model::{BatchShape, DecodeShape, DecoderConfig};
use tightfit_testkit::interpret::{Named, run};

use crate::{CASES, config};

const TOKENS: usize = 11;

/// Weights of no pattern, the same for every graph of a model.
fn weights(graph: &Graph) -> Named {
    let weights = graph.inputs().filter(|(_, value, _)| value.role == Role::Weight);
    let fill = |(_, value, _): (_, &tightfit_ir::Value, _)| {
        let seed = value
            .name
            .bytes()
            .fold(7_u64, |hash, byte| hash.wrapping_mul(31) + u64::from(byte));
        let element = |i: u64| ((i * 2654435761 + seed) % 1000) as f64 / 1000.0 - 0.5;
        let data = (0..value.ty.shape.elements()).map(element).collect();
        (value.name.to_string(), Tensor::new(value.ty.shape.clone(), data))
    };
    weights.map(fill).collect()
}

fn ids(ids: impl IntoIterator<Item = usize>) -> Tensor {
    let data: Vec<f64> = ids.into_iter().map(|id| id as f64).collect();
    Tensor::new([data.len() as u64], data)
}

fn token(position: usize) -> usize {
    position * position % 29
}

/// The logits of every row of one text.
fn at_once(config: &DecoderConfig) -> Tensor {
    let shape = BatchShape {
        batch: 1,
        seq: TOKENS as u64,
        loss_chunk: 1,
    };
    let graph = config.logits(shape).unwrap().graph;
    let mut inputs = weights(&graph);
    inputs.insert("tokens".to_owned(), ids((0..TOKENS).map(token)));
    inputs.insert("positions".to_owned(), ids(0..TOKENS));
    inputs.insert("doc_start".to_owned(), ids([0; TOKENS]));
    run(&graph, &inputs).output("logits").clone()
}

/// The logits of the last row of each step of `rows` tokens; the last step is short and filled up.
fn step_by_step(config: &DecoderConfig, rows: usize) -> Vec<(usize, Vec<f64>)> {
    let shape = DecodeShape {
        rows: rows as u64,
        capacity: 2 * TOKENS as u64,
    };
    let graph = config.decode(shape).unwrap().graph;
    let mut inputs = weights(&graph);
    let caches = graph.inputs().filter(|(_, value, _)| value.role == Role::KvCache);
    inputs.extend(caches.map(|(_, value, _)| (value.name.to_string(), Tensor::zeros(value.ty.shape.clone()))));
    let mut logits = Vec::new();
    for start in (0..TOKENS).step_by(rows) {
        let last = (start + rows).min(TOKENS) - 1;
        inputs.insert(
            "tokens".to_owned(),
            ids((start..start + rows).map(|t| if t < TOKENS { token(t) } else { 0 })),
        );
        inputs.insert("positions".to_owned(), ids(start..start + rows));
        inputs.insert("start".to_owned(), ids([start]));
        inputs.insert("last".to_owned(), ids([last - start]));
        let outputs = run(&graph, &inputs).outputs();
        logits.push((last, outputs["logits"].data.clone()));
        inputs.extend(outputs);
    }
    logits
}

#[test]
fn steps_of_any_size_give_the_logits_of_the_whole() {
    for case in CASES {
        let config = config(case);
        let whole = at_once(&config);
        for rows in [1, 3, 4, TOKENS] {
            for (row, logits) in step_by_step(&config, rows) {
                for (x, expected) in logits.iter().zip(whole.row(row)) {
                    assert!(
                        (x - expected).abs() <= 1e-9,
                        "{case}, {rows} rows a step, row {row}: {x}, {expected}"
                    );
                }
            }
        }
    }
}

#[test]
fn caches_are_persistent_and_updated_in_place() {
    let shape = DecodeShape { rows: 2, capacity: 8 };
    let graph = config("qwen3").decode(shape).unwrap().graph;
    graph.verify().unwrap();
    let caches: Vec<_> = graph
        .inputs()
        .filter(|(_, value, _)| value.role == Role::KvCache)
        .collect();
    let names: Vec<&str> = caches.iter().map(|(_, value, _)| &*value.name).collect();
    let expected = [0, 1].map(|layer| ["k", "v"].map(|x| format!("model.layers.{layer}.self_attn.{x}_cache")));
    assert_eq!(names, expected.concat());
    for (id, value, _) in caches {
        assert_eq!(value.ty.to_string(), "f32[8x16]");
        let output = graph.output_named(&value.name).unwrap();
        assert_eq!(output.kind, tightfit_ir::OutputKind::Update(id));
    }
}

#[test]
fn shapes_that_no_step_can_have_are_refused() {
    let refused = |rows, capacity| {
        let step = config("qwen3").decode(DecodeShape { rows, capacity });
        step.unwrap_err().to_string()
    };
    assert!(refused(0, 8).starts_with("rows is 0"));
    assert!(refused(9, 8).starts_with("rows is 9"));
    assert!(refused(1, 0).starts_with("capacity is 0"));
    assert!(refused(1, 1 << 31).starts_with("capacity is "));
}
