//! What the update needs: each gradient's norm, the global norm of these, and AdamW.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, Cost, Gradient, Op, OpError, Rule};
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

/// `norms: f32[1]… → norm: f32[1]`: the Euclidean norm of all tensors together, from the [`Norm`] of each.
///
/// Gradients are reduced one by one, so that none must wait for the others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GlobalNorm {}

impl Rule for GlobalNorm {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("global_norm", inputs, inputs.len().max(1))?;
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
        vec![Tensor::scalar(euclidean(inputs.iter().map(|norm| norm.data[0])))]
    }
}

fn euclidean(elements: impl Iterator<Item = f64>) -> f64 {
    elements.map(|x| x * x).sum::<f64>().sqrt()
}

/// `weight, gradient, m, v, lr: f32[1], step: f32[1] (, norm: f32[1]) → weight, m, v`, each in place.
///
/// Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101); `step` counts from 1. With `max_norm` the
/// gradient is first multiplied by `min(1, max_norm/(norm + 1e-6))`, as PyTorch's `clip_grad_norm_` does.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdamW {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Per step, times the learning rate.
    pub weight_decay: f64,
    /// Clip to this global norm, the last operand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_norm: Option<f64>,
}

impl Rule for AdamW {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("adamw", inputs, 6 + usize::from(self.max_norm.is_some()))?;
        let weight = &inputs[0];
        if weight.dtype != DType::F32 {
            return check.invalid(format!("weight is {weight}, expected f32"));
        }
        for (index, what) in [(1, "gradient"), (2, "m"), (3, "v")] {
            check.exactly(index, what, weight)?;
        }
        for (index, what) in [(4, "lr"), (5, "step"), (6, "norm")] {
            if index < inputs.len() {
                check.exactly(index, what, &Type::f32([1]))?;
            }
        }
        Ok(vec![weight.clone(); 3])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements().saturating_mul(16), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        vec![Alias::in_place(0, 0), Alias::in_place(1, 2), Alias::in_place(2, 3)]
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [weight, gradient, m, v, lr, step] = &inputs[..6] else {
            unreachable!()
        };
        let (lr, step) = (lr.data[0], step.data[0]);
        let clip = match self.max_norm {
            Some(max_norm) => (max_norm / (inputs[6].data[0] + 1e-6)).min(1.0),
            None => 1.0,
        };
        let (mut weight, mut m, mut v) = (weight.clone(), m.clone(), v.clone());
        let (bias1, bias2) = (1.0 - self.beta1.powf(step), 1.0 - self.beta2.powf(step));
        for i in 0..weight.data.len() {
            let g = gradient.data[i] * clip;
            m.data[i] += (g - m.data[i]) * (1.0 - self.beta1);
            v.data[i] = v.data[i] * self.beta2 + g * g * (1.0 - self.beta2);
            let denominator = (v.data[i] / bias2).sqrt() + self.eps;
            weight.data[i] -= lr * self.weight_decay * weight.data[i];
            weight.data[i] -= lr / bias1 * m.data[i] / denominator;
        }
        vec![weight, m, v]
    }
}
