//! SwiGLU (Shazeer 2020, arXiv:2002.05202): `silu(gate)·up`, and its gradient.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::Type;

/// `gate: [T, I], up: [T, I] → [T, I]`, all of one float dtype.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwiGlu {}

impl Rule for SwiGlu {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("swiglu", inputs, 2)?;
        let gate = check.float(0, "gate", 2)?;
        check.exactly(1, "up", gate)?;
        Ok(vec![gate.clone()])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements().saturating_mul(12), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        vec![Alias::in_place(0, 0), Alias::in_place(0, 1)]
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        let made = g.emit(SwiGluBackward {}, &[g.input(0), g.input(1), dy])?;
        g.give(0, made[0]);
        g.give(1, made[1]);
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let mut y = inputs[0].clone();
        for (gate, up) in y.data.iter_mut().zip(&inputs[1].data) {
            *gate *= sigmoid(*gate) * up;
        }
        vec![y]
    }
}

/// `gate, up, dy → dgate, dup`, all of one type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SwiGluBackward {}

impl Rule for SwiGluBackward {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("swiglu_backward", inputs, 3)?;
        let gate = check.float(0, "gate", 2)?;
        check.exactly(1, "up", gate)?;
        check.exactly(2, "dy", gate)?;
        Ok(vec![gate.clone(), gate.clone()])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements().saturating_mul(20), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        (0..2)
            .flat_map(|output| [2, 0, 1].map(|input| Alias::in_place(output, input)))
            .collect()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [gate, up, dy] = inputs else { unreachable!() };
        let (mut dgate, mut dup) = (gate.clone(), up.clone());
        for i in 0..gate.data.len() {
            let (x, s) = (gate.data[i], sigmoid(gate.data[i]));
            dgate.data[i] = dy.data[i] * up.data[i] * s * (1.0 + x * (1.0 - s));
            dup.data[i] = dy.data[i] * x * s;
        }
        vec![dgate, dup]
    }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}
