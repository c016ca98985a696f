//! AdamW with `f32` state: two numbers for each trained weight. Loshchilov and Hutter 2019, arXiv:1711.05101.

use tightfit_ir::{Type, op};

use super::{Trained, Update};

/// Adam's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
}

impl Adam {
    pub(super) fn op(&self, weight: &Trained<'_>) -> op::AdamW {
        op::AdamW {
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: weight.weight_decay,
            factor: weight.factor,
            rounding: weight.rounding,
        }
    }

    pub(super) fn update(&self, weight: &Trained<'_>) -> Update {
        let state = Type::f32(weight.ty.shape.clone());
        Update {
            op: self.op(weight).into(),
            states: vec![("exp_avg", state.clone()), ("exp_avg_sq", state)],
        }
    }
}
