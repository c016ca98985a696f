//! Lion: the sign of an interpolated momentum.

use serde::{Deserialize, Serialize};

use super::super::{Alias, Cost, Gradient, Op, OpError, Rule};
use super::{Rounding, Update, infer_update, update_aliases, update_cost};
use crate::tensor::Tensor;
use crate::types::Type;

/// `weight, gradient, m, lr, step (, factor) → weight, m`: the weight moves by the learning rate against the sign of
/// `beta1·m + (1 − beta1)·gradient`, and then `m` becomes `beta2·m + (1 − beta2)·gradient`. Chen et al. 2023, arXiv:2302.06675.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lion {
    /// What the sign keeps of the momentum.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Per step, times the learning rate.
    pub weight_decay: f64,
    /// Whether `factor` is the last operand.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub factor: bool,
    /// Of the weight.
    #[serde(default, skip_serializing_if = "Rounding::is_nearest")]
    pub rounding: Rounding,
}

impl Rule for Lion {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        infer_update("lion", inputs, self.factor, self.rounding, |weight| {
            vec![("m", Type::f32(weight.shape.clone()))]
        })
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        update_cost(9, 0, inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        update_aliases(1)
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
            let m = &mut update.states[0].data;
            for (i, &g) in update.gradient.data.iter().enumerate() {
                let direction = m[i] + (1.0 - self.beta1) * (g - m[i]);
                // `f64::signum` has no zero.
                if direction != 0.0 {
                    update.weight.data[i] -= update.lr * direction.signum();
                }
                m[i] += (1.0 - self.beta2) * (g - m[i]);
            }
        })
    }
}
