//! Cases of RMSNorm, LayerNorm and their gradients.

use tightfit_ir::op::{Accumulate, LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward};

use super::{Cases, Operand, forward};

const EPS: f64 = 1e-5;

/// Usual activations, and rows so small that `eps` decides.
const SPREADS: [(&str, f64); 2] = [("unit values", 1.0), ("tiny values", 1e-3)];

/// `x`, and norm weights around 1.
fn x_and_weight(cases: &mut Cases, std: f64) -> Vec<Operand> {
    let (rows, cols) = (cases.dims.rows, cases.dims.cols);
    vec![cases.activation([rows, cols], std), cases.weight([cols], 1.0)]
}

pub(super) fn rms_norm(cases: &mut Cases) {
    for (name, std) in SPREADS {
        let operands = x_and_weight(cases, std);
        cases.add(name, RmsNorm { eps: EPS }, operands);
    }
}

pub(super) fn rms_norm_backward(cases: &mut Cases) {
    for (name, std) in SPREADS {
        let mut operands = x_and_weight(cases, std);
        let rstd = forward(RmsNorm { eps: EPS }, &operands).swap_remove(1);
        operands.extend([rstd, cases.activation([cases.dims.rows, cases.dims.cols], 1.0)]);
        for (input, weight) in [(true, true), (true, false), (false, true)] {
            let op = RmsNormBackward {
                input,
                weight,
                accumulate: Accumulate::NONE,
            };
            cases.add(name, op, operands.clone());
        }
    }
}

pub(super) fn layer_norm(cases: &mut Cases) {
    for (name, std) in SPREADS {
        let mut operands = x_and_weight(cases, std);
        operands.push(cases.weight([cases.dims.cols], 1.0));
        cases.add(name, LayerNorm { eps: EPS }, operands);
    }
}

pub(super) fn layer_norm_backward(cases: &mut Cases) {
    for (name, std) in SPREADS {
        let mut operands = x_and_weight(cases, std);
        operands.push(cases.weight([cases.dims.cols], 1.0));
        let statistics = forward(LayerNorm { eps: EPS }, &operands).split_off(1);
        operands.truncate(2);
        operands.extend(statistics);
        operands.push(cases.activation([cases.dims.rows, cases.dims.cols], 1.0));
        for asked in 1..8 {
            let op = LayerNormBackward {
                input: asked & 1 != 0,
                weight: asked & 2 != 0,
                bias: asked & 4 != 0,
                accumulate: Accumulate::NONE,
            };
            cases.add(name, op, operands.clone());
        }
    }
}
