//! Cases of linear layers, their gradients, and the embedding.

use tightfit_ir::op::{
    Accumulate, BiasBackward, Embedding, EmbeddingBackward, Linear, LinearBackwardInput, LinearBackwardWeight,
};

use super::{Cases, Quantised, integer};
use tightfit_ir::DType;
use tightfit_quant::Block;

/// Quantised weights that are multiplied with activations of that dtype.
pub(super) fn formats(dtype: DType) -> &'static [Block] {
    match dtype {
        DType::F32 => &[Block::Int8, Block::Int4, Block::Q8_0, Block::Q4K],
        DType::Bf16 => &[Block::Nf4, Block::Q4K],
        _ => &[Block::Nf4],
    }
}

pub(super) fn linear(cases: &mut Cases) {
    let (rows, cols, inner) = (cases.dims.rows, cases.dims.cols, cases.dims.inner);
    let accumulate = Accumulate::NONE;
    for bias in [false, true] {
        // Twice, as weights are of dtypes by chance.
        for _ in 0..2 {
            let mut operands = vec![cases.activation([rows, inner], 1.0), cases.weight([cols, inner], 1.0)];
            if bias {
                operands.push(cases.weight([cols], 1.0));
            }
            cases.add("product", Linear { bias, accumulate }, operands);
        }
    }
    for &block in formats(cases.dtype) {
        let inner = inner.next_multiple_of(block.row_multiple());
        let (weight, bytes) = cases.quantised(block, [cols, inner], 1.0);
        let operands = vec![cases.activation([rows, inner], 1.0), weight];
        let op = Linear {
            bias: false,
            accumulate,
        };
        cases.add_quantised("quantised", op, operands, Quantised { operand: 1, bytes });
    }
}

pub(super) fn linear_backward_input(cases: &mut Cases) {
    let (rows, cols, inner) = (cases.dims.rows, cases.dims.cols, cases.dims.inner);
    for _ in 0..3 {
        let operands = vec![cases.activation([rows, inner], 1.0), cases.weight([inner, cols], 1.0)];
        cases.add("product", LinearBackwardInput::default(), operands);
    }
    for &block in formats(cases.dtype) {
        let cols = cols.next_multiple_of(block.row_multiple());
        let (weight, bytes) = cases.quantised(block, [inner, cols], 1.0);
        let operands = vec![cases.activation([rows, inner], 1.0), weight];
        let quantised = Quantised { operand: 1, bytes };
        cases.add_quantised("quantised", LinearBackwardInput::default(), operands, quantised);
    }
}

pub(super) fn linear_backward_weight(cases: &mut Cases) {
    let (rows, cols, inner) = (cases.dims.rows, cases.dims.cols, cases.dims.inner);
    let operands = vec![
        cases.activation([rows, inner], 1.0),
        cases.activation([rows, cols], 1.0),
    ];
    cases.add("product", LinearBackwardWeight::default(), operands);
}

pub(super) fn bias_backward(cases: &mut Cases) {
    let dy = cases.activation([cases.dims.rows, cases.dims.cols], 1.0);
    cases.add("column sums", BiasBackward::default(), vec![dy]);
}

pub(super) fn embedding(cases: &mut Cases) {
    let (rows, vocab_size, hidden) = (cases.dims.rows, cases.dims.inner, cases.dims.cols);
    let op = Embedding { dtype: cases.dtype };
    let operands = vec![cases.ids(rows, vocab_size), cases.weight([vocab_size, hidden], 1.0)];
    cases.add("random ids", op.clone(), operands);
    let last = integer(vec![(vocab_size - 1) as f64; rows as usize]);
    let operands = vec![last, cases.weight([vocab_size, hidden], 1.0)];
    cases.add("the last id in every row", op, operands);
}

pub(super) fn embedding_backward(cases: &mut Cases) {
    let (rows, vocab_size, hidden) = (cases.dims.rows, cases.dims.inner, cases.dims.cols);
    let op = EmbeddingBackward {
        vocab_size,
        accumulate: Accumulate::NONE,
    };
    let operands = vec![cases.ids(rows, vocab_size), cases.activation([rows, hidden], 1.0)];
    cases.add("random ids", op.clone(), operands);
    let last = integer(vec![(vocab_size - 1) as f64; rows as usize]);
    let operands = vec![last, cases.activation([rows, hidden], 1.0)];
    cases.add("the last id in every row", op, operands);
}
