//! Lion: one number of state for each trained weight, and steps of one size, so that it wants a learning rate three to ten times lower
//! than AdamW's. Chen et al. 2023, arXiv:2302.06675.

use tightfit_ir::{Type, op};

use super::{Trained, Update};

/// Lion's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lion {
    /// What the update keeps of the momentum.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
}

impl Lion {
    pub(super) fn update(&self, weight: &Trained<'_>) -> Update {
        let op = op::Lion {
            beta1: self.beta1,
            beta2: self.beta2,
            weight_decay: weight.weight_decay,
            factor: weight.factor,
            rounding: weight.rounding,
        };
        Update {
            op: op.into(),
            states: vec![("exp_avg", Type::f32(weight.ty.shape.clone()))],
        }
    }
}
