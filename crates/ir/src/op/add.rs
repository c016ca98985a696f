//! Element-wise addition: residual connections, and gradients that meet.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::Type;

/// `a + b`, both of one type.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Add {}

impl Rule for Add {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("add", inputs, 2)?;
        let a = check.floats(0, "the first operand")?;
        check.exactly(1, "the second operand", a)?;
        Ok(vec![a.clone()])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(outputs[0].shape.elements(), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        vec![Alias::in_place(0, 0), Alias::in_place(0, 1)]
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        g.give(0, dy);
        g.give(1, dy);
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        vec![inputs[0].plus(&inputs[1])]
    }
}
