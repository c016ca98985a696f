//! A buffer of zeros: where sums over micro-batches begin.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::Type;

/// A tensor of zeros.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Zero {
    /// Its type.
    pub ty: Type,
}

impl Rule for Zero {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        Check::arity("zero", inputs, 0)?;
        Ok(vec![self.ty.clone()])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(0, inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    /// It depends on nothing, so there is nothing to give.
    fn gradient(&self, _g: &mut Gradient<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn reference(&self, _inputs: &[Tensor]) -> Vec<Tensor> {
        vec![Tensor::zeros_of(&self.ty)]
    }
}
