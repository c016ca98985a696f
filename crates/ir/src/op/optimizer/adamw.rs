//! AdamW with `f32` states.

use serde::{Deserialize, Serialize};

use super::super::{Alias, Cost, Gradient, Op, OpError, Rule};
use super::{Rounding, Update, infer_update, update_aliases, update_cost};
use crate::tensor::Tensor;
use crate::types::Type;

/// `weight, gradient, m, v, lr, step (, factor) → weight, m, v`: Adam with decoupled weight decay (Loshchilov and Hutter 2019,
/// arXiv:1711.05101).
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
    /// Whether `factor` is the last operand.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub factor: bool,
    /// Of the weight.
    #[serde(default, skip_serializing_if = "Rounding::is_nearest")]
    pub rounding: Rounding,
}

impl AdamW {
    /// The moments after a gradient, and by what a weight changes for a learning rate of 1.
    pub(super) fn moments(&self, g: f64, (m, v): (f64, f64), step: f64) -> (f64, f64, f64) {
        let m = m + (g - m) * (1.0 - self.beta1);
        let v = v * self.beta2 + g * g * (1.0 - self.beta2);
        let (bias1, bias2) = (1.0 - self.beta1.powf(step), 1.0 - self.beta2.powf(step));
        (m, v, -m / bias1 / ((v / bias2).sqrt() + self.eps))
    }
}

impl Rule for AdamW {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        infer_update("adamw", inputs, self.factor, self.rounding, |weight| {
            ["m", "v"].map(|what| (what, Type::f32(weight.shape.clone()))).into()
        })
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        update_cost(16, 0, inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        update_aliases(2)
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        Update::run(inputs, self.factor, |update| {
            update.decay(self.weight_decay);
            let [m, v] = &mut update.states[..] else { unreachable!() };
            for (i, &g) in update.gradient.data.iter().enumerate() {
                let (m1, v1, change) = self.moments(g, (m.data[i], v.data[i]), update.step);
                (m.data[i], v.data[i]) = (m1, v1);
                update.weight.data[i] += update.lr * change;
            }
        })
    }
}
