//! The same numbers in another floating-point format.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::{DType, Type};

/// `x → x` as `dtype`, any shape: exact towards `f32`, to the nearest (ties to even) from there. The reference, which computes with
/// exact numbers, leaves them as they are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cast {
    /// The result's: `f32`, `bf16` or `f16`.
    pub dtype: DType,
}

impl Rule for Cast {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("cast", inputs, 1)?;
        let x = check.floats(0, "x")?;
        check.float_dtype(self.dtype)?;
        Ok(vec![Type::new(self.dtype, x.shape.clone())])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(0, inputs, outputs)
    }

    /// None: a result of another size cannot lie over its operand.
    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    /// `dy`, which [`Gradient::finish`] casts to what `x`'s gradient is stored as.
    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        g.give(0, dy);
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        vec![inputs[0].clone()]
    }
}
