//! Stochastic gradient descent with momentum.

use serde::{Deserialize, Serialize};

use super::super::{Alias, Cost, Gradient, Op, OpError, Rule};
use super::{Rounding, Update, infer_update, update_aliases, update_cost};
use crate::tensor::Tensor;
use crate::types::Type;

/// `weight, gradient (, buffer), lr, step (, factor) → weight (, buffer)`: the buffer becomes `momentum·buffer + gradient`, and the weight
/// moves by the learning rate against it; with a momentum of 0 there is no buffer. As `torch.optim.SGD` without dampening, but that decay is
/// decoupled. Polyak 1964, doi:10.1016/0041-5553(64)90137-5.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sgd {
    /// Decay of the buffer; 0 for none.
    pub momentum: f64,
    /// Per step, times the learning rate.
    pub weight_decay: f64,
    /// Whether `factor` is the last operand.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub factor: bool,
    /// Of the weight.
    #[serde(default, skip_serializing_if = "Rounding::is_nearest")]
    pub rounding: Rounding,
}

impl Rule for Sgd {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        infer_update("sgd", inputs, self.factor, self.rounding, |weight| {
            let buffer = (self.momentum != 0.0).then(|| ("buffer", Type::f32(weight.shape.clone())));
            buffer.into_iter().collect()
        })
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        update_cost(6, 0, inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        update_aliases(usize::from(self.momentum != 0.0))
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
            let mut direction = update.gradient.clone();
            if let Some(buffer) = update.states.first_mut() {
                for (b, g) in buffer.data.iter_mut().zip(&update.gradient.data) {
                    *b = self.momentum * *b + g;
                }
                direction = buffer.clone();
            }
            for (w, d) in update.weight.data.iter_mut().zip(&direction.data) {
                *w -= update.lr * d;
            }
        })
    }
}
