//! Cases of the operations that work element by element, and of those that only move bytes.

use tightfit_ir::Type;
use tightfit_ir::op::{Add, Approximate, Cast, Gelu, GeluBackward, Reshape, Scale, SwiGlu, SwiGluBackward, Zero};

use super::{ACTIVATIONS, Cases};

/// Usual activations, and values at which exponentials leave `f32`.
const SPREADS: [(&str, f64); 2] = [("unit values", 1.0), ("large values", 60.0)];

pub(super) fn add(cases: &mut Cases) {
    let shape = [cases.dims.rows, cases.dims.cols];
    let operands = vec![cases.activation(shape, 1.0), cases.activation(shape, 1.0)];
    cases.add("matrices", Add {}, operands);
    let shape = [cases.dims.rows, cases.dims.inner, 3];
    let operands = vec![cases.activation(shape, 1.0), cases.activation(shape, 1.0)];
    cases.add("rank 3", Add {}, operands);
}

pub(super) fn cast(cases: &mut Cases) {
    for dtype in ACTIVATIONS {
        for (name, std) in SPREADS {
            let x = cases.activation([cases.dims.rows, cases.dims.cols], std);
            cases.add(name, Cast { dtype }, vec![x]);
        }
    }
}

pub(super) fn gelu(cases: &mut Cases) {
    for approximate in [Approximate::None, Approximate::Tanh] {
        for (name, std) in SPREADS {
            let x = cases.activation([cases.dims.rows, cases.dims.cols], std);
            cases.add(name, Gelu { approximate }, vec![x]);
        }
    }
}

pub(super) fn gelu_backward(cases: &mut Cases) {
    let shape = [cases.dims.rows, cases.dims.cols];
    for approximate in [Approximate::None, Approximate::Tanh] {
        for (name, std) in SPREADS {
            let operands = vec![cases.activation(shape, std), cases.activation(shape, 1.0)];
            cases.add(name, GeluBackward { approximate }, operands);
        }
    }
}

pub(super) fn scale(cases: &mut Cases) {
    for by in [2.0, 1.0 / 3.0] {
        let x = cases.activation([cases.dims.rows, cases.dims.cols], 1.0);
        cases.add("factors", Scale { by }, vec![x]);
    }
}

pub(super) fn swiglu(cases: &mut Cases) {
    let shape = [cases.dims.rows, cases.dims.cols];
    for (name, std) in SPREADS {
        let operands = vec![cases.activation(shape, std), cases.activation(shape, 1.0)];
        cases.add(name, SwiGlu {}, operands);
    }
}

pub(super) fn swiglu_backward(cases: &mut Cases) {
    let shape = [cases.dims.rows, cases.dims.cols];
    for (name, std) in SPREADS {
        let operands = vec![
            cases.activation(shape, std),
            cases.activation(shape, 1.0),
            cases.activation(shape, 1.0),
        ];
        cases.add(name, SwiGluBackward {}, operands);
    }
}

pub(super) fn reshape(cases: &mut Cases) {
    let (rows, cols) = (cases.dims.rows, cases.dims.cols);
    for shape in [vec![cols, rows], vec![rows * cols], vec![1, rows, 1, cols]] {
        let x = cases.activation([rows, cols], 1.0);
        let shape = tightfit_ir::Shape::from(shape);
        cases.add("view", Reshape { shape }, vec![x]);
    }
}

pub(super) fn zero(cases: &mut Cases) {
    let ty = Type::new(cases.dtype, [cases.dims.rows, cases.dims.cols]);
    cases.add("zeros", Zero { ty }, Vec::new());
}
