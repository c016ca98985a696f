//! APOLLO: AdamW's state for a random projection of each matrix's gradient, and the gradient itself scaled channel by channel as that
//! says. Vectors, and matrices that have no more than `rank` rows or columns, are AdamW's. Costs a product with `rank` columns for
//! each matrix, and two more readings of the gradient. Zhu et al. 2024, arXiv:2412.05270.

use tightfit_ir::{Type, op, random};

use super::{Adam, Trained, Update};

/// Largest growth of an update's norm from step to step, of the paper.
const GROWTH: f64 = 1.01;

/// APOLLO's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Apollo {
    /// Of the projection's state, and of what is not projected.
    pub adam: Adam,
    /// Random directions.
    pub rank: u64,
    /// Steps after which these are drawn anew.
    pub refresh: u64,
}

impl Apollo {
    pub(super) fn update(&self, weight: &Trained<'_>) -> Update {
        let &[rows, cols] = weight.ty.shape.dims() else {
            return self.adam.update(weight);
        };
        if rows.min(cols) <= self.rank {
            return self.adam.update(weight);
        }
        let op = op::Apollo {
            rank: self.rank,
            refresh: self.refresh,
            key: random::seeded(weight.seed, &format!("{}.projection", weight.name)),
            growth: GROWTH,
            beta1: self.adam.beta1,
            beta2: self.adam.beta2,
            eps: self.adam.eps,
            weight_decay: weight.weight_decay,
            factor: weight.factor,
            rounding: weight.rounding,
        };
        let moment = Type::f32([rows.max(cols), self.rank]);
        Update {
            op: op.into(),
            states: vec![
                ("exp_avg", moment.clone()),
                ("exp_avg_sq", moment),
                ("update_norm", Type::f32([1])),
            ],
        }
    }
}
