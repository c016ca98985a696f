//! Adafactor: a number of state for each row and each column of a matrix, and for each element of a vector; no first moment. The learning
//! rate is the schedule's, so steps are relative neither to the weight's size nor to their count. Costs two more readings of
//! the gradient. Shazeer and Stern 2018, arXiv:1804.04235.

use tightfit_ir::{Type, op};

use super::{Trained, Update};

/// Adafactor's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adafactor {
    /// The second moment's decay at a step is `1 − step^−decay`.
    pub decay: f64,
    /// Added to the square of a gradient.
    pub eps: f64,
    /// Largest root mean square of an update.
    pub clip: f64,
}

impl Default for Adafactor {
    /// The paper's.
    fn default() -> Self {
        Self {
            decay: 0.8,
            eps: 1e-30,
            clip: 1.0,
        }
    }
}

impl Adafactor {
    pub(super) fn update(&self, weight: &Trained<'_>) -> Update {
        let factored = weight.ty.shape.dims().len() > 1;
        let op = op::Adafactor {
            factored,
            decay: self.decay,
            eps: self.eps,
            clip: self.clip,
            weight_decay: weight.weight_decay,
            factor: weight.factor,
            rounding: weight.rounding,
        };
        let states = match factored {
            true => vec![
                ("exp_avg_sq_row", Type::f32([weight.ty.rows()])),
                ("exp_avg_sq_col", Type::f32([weight.ty.cols()])),
            ],
            false => vec![("exp_avg_sq", Type::f32(weight.ty.shape.clone()))],
        };
        Update { op: op.into(), states }
    }
}
