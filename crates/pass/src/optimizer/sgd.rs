//! Stochastic gradient descent with momentum: one number of state for each trained weight, none without momentum.

use tightfit_ir::{Type, op};

use super::{Trained, Update};

/// SGD's constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    /// Decay of the momentum; 0 for none.
    pub momentum: f64,
}

impl Sgd {
    pub(super) fn update(&self, weight: &Trained<'_>) -> Update {
        let op = op::Sgd {
            momentum: self.momentum,
            weight_decay: weight.weight_decay,
            factor: weight.factor,
            rounding: weight.rounding,
        };
        let buffer = (self.momentum != 0.0).then(|| ("momentum_buffer", Type::f32(weight.ty.shape.clone())));
        Update {
            op: op.into(),
            states: buffer.into_iter().collect(),
        }
    }
}
