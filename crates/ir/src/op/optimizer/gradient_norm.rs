//! What updates multiply gradients by: each gradient's norm, the global norm of these, and the factor that follows.

use serde::{Deserialize, Serialize};

use super::super::check::Check;
use super::super::{Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::{DType, Type};

/// `x: f32[…] → norm: f32[1]`: the Euclidean norm of all elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Norm {}

impl Rule for Norm {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("norm", inputs, 1)?;
        if inputs[0].dtype != DType::F32 {
            return check.invalid(format!("x is {}, expected f32", inputs[0]));
        }
        Ok(vec![Type::f32([1])])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements().saturating_mul(2), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        vec![Tensor::scalar(euclidean(inputs[0].data.iter().copied()))]
    }
}

/// `norms: f32[1]… (, scale: f32[1]) → norm: f32[1]`: the Euclidean norm of all tensors together, from the [`Norm`] of each.
///
/// Gradients are reduced one by one, so that none must wait for the others. With `scaled`, the last operand is what the loss was
/// multiplied by, and the norm is that of the gradients without it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct GlobalNorm {
    /// Whether gradients are those of a loss times `scale`, the last operand.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scaled: bool,
}

impl Rule for GlobalNorm {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let least = 1 + usize::from(self.scaled);
        let check = Check::arity("global_norm", inputs, inputs.len().max(least))?;
        for index in 0..inputs.len() {
            check.exactly(index, &format!("operand {index}"), &Type::f32([1]))?;
        }
        Ok(vec![Type::f32([1])])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(2 * inputs.len() as u64, inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let (norms, scale) = match inputs.split_last() {
            Some((scale, norms)) if self.scaled => (norms, scale.data[0]),
            _ => (inputs, 1.0),
        };
        vec![Tensor::scalar(euclidean(norms.iter().map(|norm| norm.data[0])) / scale)]
    }
}

fn euclidean(elements: impl Iterator<Item = f64>) -> f64 {
    elements.map(|x| x * x).sum::<f64>().sqrt()
}

/// `norm: f32[1] (, scale: f32[1]) → factor: f32[1]`: what every update multiplies its gradient by.
///
/// With `max_norm` that is `min(1, max_norm/(norm + 1e-6))`, as PyTorch's `clip_grad_norm_` has it, else 1; divided by the scale
/// of the loss, where there is one. Where the norm is not finite it is NaN, which means: skip this update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GradientFactor {
    /// Clip to this global norm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_norm: Option<f64>,
    /// Whether gradients are those of a loss times `scale`, the last operand.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scaled: bool,
}

impl Rule for GradientFactor {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("gradient_factor", inputs, 1 + usize::from(self.scaled))?;
        for (index, what) in ["norm", "scale"].into_iter().enumerate().take(inputs.len()) {
            check.exactly(index, what, &Type::f32([1]))?;
        }
        Ok(vec![Type::f32([1])])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(4, inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let norm = inputs[0].data[0];
        let scale = if self.scaled { inputs[1].data[0] } else { 1.0 };
        let clip = self
            .max_norm
            .map_or(1.0, |max_norm| (max_norm / (norm + 1e-6)).min(1.0));
        let factor = if norm.is_finite() { clip / scale } else { f64::NAN };
        vec![Tensor::scalar(factor)]
    }
}
