//! Multiplication by a constant: LoRA's scaling.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::Type;

/// `x: T[M, N] → by·x`. Its gradient is the operation itself.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scale {
    /// The factor; kernels round it to `f32`.
    pub by: f64,
}

impl Rule for Scale {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("scale", inputs, 1)?;
        let x = check.float(0, "x", 2)?;
        if !(self.by as f32).is_finite() {
            return check.invalid(format!("the factor is {}, expected a finite number", self.by));
        }
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(outputs[0].shape.elements(), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        vec![Alias::in_place(0, 0)]
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        let dx = g.emit(self.clone(), &[dy])?[0];
        g.give(0, dx);
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let mut y = inputs[0].clone();
        y.data.iter_mut().for_each(|x| *x *= self.by);
        vec![y]
    }
}
