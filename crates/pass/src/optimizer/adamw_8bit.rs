//! AdamW with states of 8 bits: two bytes for each trained weight, and two floats for each 256 of them. Tensors of fewer than
//! [`SMALLEST_8BIT`] elements keep `f32` state, as they are few bytes in all and the most sensitive ones. Dettmers et al. 2021,
//! arXiv:2110.02861.

use tightfit_ir::op::{AdamW8bit, STATE_BLOCK};
use tightfit_ir::{DType, Type};

use super::{Adam, Trained, Update};

/// Elements below which a tensor's state is `f32`.
pub const SMALLEST_8BIT: u64 = 4096;

pub(super) fn update(adam: &Adam, weight: &Trained<'_>) -> Update {
    let elements = weight.ty.shape.elements();
    if elements < SMALLEST_8BIT {
        return adam.update(weight);
    }
    let codes = Type::new(DType::U8, weight.ty.shape.clone());
    let absmax = Type::f32([elements.div_ceil(STATE_BLOCK)]);
    Update {
        op: AdamW8bit(adam.op(weight)).into(),
        states: vec![
            ("exp_avg", codes.clone()),
            ("exp_avg.absmax", absmax.clone()),
            ("exp_avg_sq", codes),
            ("exp_avg_sq.absmax", absmax),
        ],
    }
}
