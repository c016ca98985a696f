//! Cases of the update: AdamW, a gradient's norm and the global norm.

use tightfit_ir::Tensor;
use tightfit_ir::op::{AdamW, GlobalNorm, Norm};

use super::{Cases, float};

pub(super) fn adamw(cases: &mut Cases) {
    let shape = [cases.dims.rows, cases.dims.cols];
    // Clipping that bites, clipping that does not, and none.
    for max_norm in [Some(0.5), Some(1e6), None] {
        for (name, step) in [("first step", 1.0), ("later step", 1234.0)] {
            let (weight, gradient) = (cases.normal(shape, 1.0), cases.normal(shape, 0.1));
            let (m, mut v) = if step == 1.0 {
                (float(Tensor::zeros(shape)), float(Tensor::zeros(shape)))
            } else {
                (cases.normal(shape, 0.1), cases.normal(shape, 0.01))
            };
            v.1.data.iter_mut().for_each(|x| *x = x.abs());
            let mut operands = vec![weight, gradient, m, v];
            operands.extend([1e-3, step].map(|x| float(Tensor::scalar(x))));
            operands.extend(max_norm.map(|_| float(Tensor::scalar(7.25))));
            let op = AdamW {
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.1,
                max_norm,
            };
            cases.add(name, op, operands);
        }
    }
}

pub(super) fn norm(cases: &mut Cases) {
    let (rows, cols, inner) = (cases.dims.rows, cases.dims.cols, cases.dims.inner);
    for operand in [
        cases.normal([rows, cols], 1.0),
        cases.normal([inner], 2.0),
        cases.normal([1], 1.0),
    ] {
        cases.add("a gradient", Norm {}, vec![operand]);
    }
}

pub(super) fn global_norm(cases: &mut Cases) {
    let norm = |x| float(Tensor::scalar(x));
    cases.add("one gradient", GlobalNorm {}, vec![norm(0.75)]);
    // Their squares are no finite numbers of `f32`.
    let far = vec![norm(3e-30), norm(2e25), norm(0.0), norm(1.5e25)];
    cases.add("several gradients", GlobalNorm {}, far);
}
