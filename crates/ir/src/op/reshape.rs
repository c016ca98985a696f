//! A view of the same bytes under another shape.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, AliasKind, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::{DType, Shape, Type};

/// The operand, seen with another shape of as many elements. Costs nothing: the result is the operand's memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reshape {
    /// The new shape.
    pub shape: Shape,
}

impl Rule for Reshape {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("reshape", inputs, 1)?;
        if matches!(inputs[0].dtype, DType::Block(_)) {
            return check.invalid(format!(
                "the operand is {}, whose bytes follow from its shape",
                inputs[0]
            ));
        }
        check.same(
            "the new shape's elements",
            self.shape.elements(),
            "the operand's",
            inputs[0].shape.elements(),
        )?;
        Ok(vec![Type::new(inputs[0].dtype, self.shape.clone())])
    }

    fn cost(&self, _inputs: &[&Type], _outputs: &[&Type]) -> Cost {
        Cost::default()
    }

    fn aliases(&self) -> Vec<Alias> {
        vec![Alias {
            output: 0,
            input: 0,
            kind: AliasKind::View,
        }]
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        let shape = g.shape(0);
        let dx = g.emit(Reshape { shape }, &[dy])?[0];
        g.give(0, dx);
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        vec![Tensor::new(self.shape.clone(), inputs[0].data.clone())]
    }
}
