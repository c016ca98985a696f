//! Cases of linear layers, their gradients, and the embedding.

use tightfit_ir::op::{
    Accumulate, BiasBackward, Embedding, EmbeddingBackward, Linear, LinearBackwardInput, LinearBackwardWeight,
};

use super::{Cases, integer};

pub(super) fn linear(cases: &mut Cases) {
    let (rows, cols, inner) = (cases.dims.rows, cases.dims.cols, cases.dims.inner);
    for bias in [false, true] {
        let mut operands = vec![cases.normal([rows, inner], 1.0), cases.normal([cols, inner], 1.0)];
        if bias {
            operands.push(cases.normal([cols], 1.0));
        }
        let accumulate = Accumulate::NONE;
        cases.add("product", Linear { bias, accumulate }, operands);
    }
}

pub(super) fn linear_backward_input(cases: &mut Cases) {
    let (rows, cols, inner) = (cases.dims.rows, cases.dims.cols, cases.dims.inner);
    let operands = vec![cases.normal([rows, inner], 1.0), cases.normal([inner, cols], 1.0)];
    cases.add("product", LinearBackwardInput::default(), operands);
}

pub(super) fn linear_backward_weight(cases: &mut Cases) {
    let (rows, cols, inner) = (cases.dims.rows, cases.dims.cols, cases.dims.inner);
    let operands = vec![cases.normal([rows, inner], 1.0), cases.normal([rows, cols], 1.0)];
    cases.add("product", LinearBackwardWeight::default(), operands);
}

pub(super) fn bias_backward(cases: &mut Cases) {
    let dy = cases.normal([cases.dims.rows, cases.dims.cols], 1.0);
    cases.add("column sums", BiasBackward::default(), vec![dy]);
}

pub(super) fn embedding(cases: &mut Cases) {
    let (rows, vocab_size, hidden) = (cases.dims.rows, cases.dims.inner, cases.dims.cols);
    let operands = vec![cases.ids(rows, vocab_size), cases.normal([vocab_size, hidden], 1.0)];
    cases.add("random ids", Embedding {}, operands);
    let last = integer(vec![(vocab_size - 1) as f64; rows as usize]);
    let operands = vec![last, cases.normal([vocab_size, hidden], 1.0)];
    cases.add("the last id in every row", Embedding {}, operands);
}

pub(super) fn embedding_backward(cases: &mut Cases) {
    let (rows, vocab_size, hidden) = (cases.dims.rows, cases.dims.inner, cases.dims.cols);
    let op = EmbeddingBackward {
        vocab_size,
        accumulate: Accumulate::NONE,
    };
    let operands = vec![cases.ids(rows, vocab_size), cases.normal([rows, hidden], 1.0)];
    cases.add("random ids", op.clone(), operands);
    let last = integer(vec![(vocab_size - 1) as f64; rows as usize]);
    let operands = vec![last, cases.normal([rows, hidden], 1.0)];
    cases.add("the last id in every row", op, operands);
}
