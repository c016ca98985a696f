//! Cases of the losses: ignored rows, confident rows, chunks that do not divide the rows.

use tightfit_ir::Tensor;
use tightfit_ir::op::{Accumulate, LinearCrossEntropy, SoftmaxCrossEntropy, SoftmaxCrossEntropyBackward};

use super::{Cases, Operand, Quantised, exact, float, forward, integer, matrix};
use tightfit_ir::DType;

const IGNORE: i32 = -100;

/// Logits of a fresh model, and of one that is sure.
const SPREADS: [(&str, f64); 2] = [("unit logits", 1.0), ("large logits", 40.0)];

/// Targets of which some are ignored, and a token count that is not theirs: there are more micro-batches.
fn targets(cases: &mut Cases, classes: u64) -> [Operand; 2] {
    let rows = cases.dims.rows;
    let drawn = (0..rows).map(|_| match cases.rng.below(4) {
        0 => f64::from(IGNORE),
        _ => cases.rng.below(classes) as f64,
    });
    let targets = integer(drawn.collect());
    [targets, float(Tensor::scalar((rows + 5) as f64))]
}

/// Logits of which the target's is so much larger that it is certain up to `exp(-gap)`; no row is ignored, which leaves the loss as
/// tiny as the rest of its exponentials.
fn certain(cases: &mut Cases, gap: f64) -> [Operand; 3] {
    let (rows, classes) = (cases.dims.rows, cases.dims.cols);
    let (logits_ty, mut logits) = cases.activation([rows, classes], 1.0);
    let (ty, targets) = cases.ids(rows, classes);
    for (t, &target) in targets.data.iter().enumerate() {
        let row = logits.row_mut(t);
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row[target as usize] = largest + gap;
    }
    [
        exact(logits_ty, logits),
        (ty, targets),
        float(Tensor::scalar(rows as f64)),
    ]
}

/// What a loss is multiplied by before its gradient is taken.
fn scale() -> Operand {
    float(Tensor::scalar(1024.0))
}

/// No row has a target: the loss is 0 and so is every gradient.
fn all_ignored(cases: &Cases) -> [Operand; 2] {
    let targets = vec![f64::from(IGNORE); cases.dims.rows as usize];
    [integer(targets), float(Tensor::scalar(1.0))]
}

pub(super) fn softmax_cross_entropy(cases: &mut Cases) {
    let op = SoftmaxCrossEntropy { ignore_index: IGNORE };
    let shape = [cases.dims.rows, cases.dims.cols];
    for (name, std) in SPREADS {
        let [targets, count] = targets(cases, cases.dims.cols);
        let operands = vec![cases.activation(shape, std), targets, count];
        cases.add(name, op.clone(), operands);
    }
    for gap in [12.0, 16.0] {
        let operands = certain(cases, gap);
        cases.add("the target is nearly certain", op.clone(), operands.into());
    }
    let [targets, count] = all_ignored(cases);
    let operands = vec![cases.activation(shape, 1.0), targets, count];
    cases.add("all rows ignored", op, operands);
}

pub(super) fn softmax_cross_entropy_backward(cases: &mut Cases) {
    let shape = [cases.dims.rows, cases.dims.cols];
    let some = SPREADS.map(|(name, std)| (name, std, targets(cases, cases.dims.cols)));
    let none = [("all rows ignored", 1.0, all_ignored(cases))];
    for (name, std, [targets, count]) in some.into_iter().chain(none) {
        let logits = cases.activation(shape, std);
        let operands = [logits.clone(), targets.clone(), count.clone()];
        let lse = forward(SoftmaxCrossEntropy { ignore_index: IGNORE }, &operands).swap_remove(1);
        for scaled in [false, true] {
            let op = SoftmaxCrossEntropyBackward {
                ignore_index: IGNORE,
                scaled,
            };
            let mut operands = vec![logits.clone(), lse.clone(), targets.clone(), count.clone()];
            operands.extend(scaled.then(scale));
            cases.add(name, op, operands);
        }
    }
}

pub(super) fn linear_cross_entropy(cases: &mut Cases) {
    let (rows, vocab_size, hidden) = (cases.dims.rows, cases.dims.cols, cases.dims.inner);
    let std = 1.0 / (hidden as f64).sqrt();
    let some = targets(cases, vocab_size);
    let none = all_ignored(cases);
    for (input_gradient, weight_gradient) in [(false, false), (true, false), (false, true), (true, true)] {
        let chunks = [(1, "rows one by one"), (rows.div_ceil(2) + 1, "a short last chunk")];
        for (chunk, name) in chunks.into_iter().chain([(rows + 7, "one chunk")]) {
            let op = LinearCrossEntropy {
                chunk,
                ignore_index: IGNORE,
                input_gradient,
                weight_gradient,
                scaled: false,
                accumulate: Accumulate::NONE,
            };
            let x = cases.activation([rows, hidden], 3.0);
            let operands = [x, head(cases, [vocab_size, hidden], std)];
            cases.add(name, op.clone(), operands.iter().chain(&some).cloned().collect());
            if name == "one chunk" {
                let scaled = LinearCrossEntropy {
                    scaled: true,
                    ..op.clone()
                };
                let scaled_operands = operands.iter().chain(&some).cloned().chain([scale()]);
                cases.add("a scaled loss", scaled, scaled_operands.collect());
                cases.add("all rows ignored", op, operands.iter().chain(&none).cloned().collect());
            }
        }
    }
    for &block in matrix::formats(cases.dtype) {
        // Its gradients would be those of rounded logits where the product rounds a quantised head to bfloat16.
        if cases.dtype == DType::Bf16 {
            continue;
        }
        let hidden = hidden.next_multiple_of(block.row_multiple());
        let (w, bytes) = cases.quantised(block, [vocab_size, hidden], 1.0 / (hidden as f64).sqrt());
        let op = LinearCrossEntropy {
            input_gradient: true,
            ..LinearCrossEntropy::new(rows.div_ceil(2) + 1, IGNORE)
        };
        let operands = [cases.activation([rows, hidden], 3.0), w];
        let operands = operands.iter().chain(&some).cloned().collect();
        cases.add_quantised("a quantised head", op, operands, Quantised { operand: 1, bytes });
    }
}

/// A head: a weight of any float dtype, but of bfloat16 beside such hidden states. Where those are multiplied in bfloat16 any other is
/// rounded for the logits and not for the gradient, which no reference of one weight tells apart.
fn head(cases: &mut Cases, shape: [u64; 2], std: f64) -> Operand {
    match cases.dtype {
        DType::Bf16 => cases.activation(shape, std),
        _ => cases.weight(shape, std),
    }
}
