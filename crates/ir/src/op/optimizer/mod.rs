//! Updates of weights: one file per optimizer, and what they share.
//!
//! Every update is `weight, gradient: f32, states…, lr: f32[1], step: f32[1] (, factor: f32[1]) → weight, states…`, each in place.
//! The weight may be of any floating-point dtype; arithmetic and states are `f32`. `step` counts applied updates, from 1. The gradient
//! is first multiplied by `factor` (see [`GradientFactor`](super::GradientFactor)); where that is NaN, the weight and the states stay as
//! they were. `weight_decay` is decoupled: per step and unit of learning rate, as AdamW's (Loshchilov and Hutter 2019,
//! arXiv:1711.05101).

mod adafactor;
mod adamw;
mod adamw_8bit;
mod apollo;
mod gradient_norm;
mod lion;
mod sgd;

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, Cost, OpError};
use crate::tensor::Tensor;
use crate::types::{DType, Type};

pub use adafactor::Adafactor;
pub use adamw::AdamW;
pub use adamw_8bit::{AdamW8bit, STATE_BLOCK};
pub use apollo::{Apollo, is_negative};
pub use gradient_norm::{GlobalNorm, GradientFactor, Norm};
pub use lion::Lion;
pub use sgd::Sgd;

/// How an updated weight becomes a number of its dtype.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rounding {
    /// To the nearest, ties to even.
    #[default]
    Nearest,
    /// To one of the two neighbours, the nearer the likelier, so that the mean over steps is what was to be stored: updates smaller than
    /// half the distance between neighbours are not lost. Gupta et al. 2015, arXiv:1502.02551. The bits are
    /// [`Stream`](crate::random::Stream)'s of this key, the step and the element's index; the naive references do not round.
    Stochastic {
        /// A stream for each weight.
        key: u64,
    },
}

impl Rounding {
    /// For [`skip_serializing_if`](https://serde.rs/field-attrs.html).
    fn is_nearest(&self) -> bool {
        *self == Self::Nearest
    }
}

/// What every update checks. `states` gives the types of the states from the weight's.
fn infer_update(
    op: &'static str,
    inputs: &[Type],
    factor: bool,
    rounding: Rounding,
    states: impl Fn(&Type) -> Vec<(&'static str, Type)>,
) -> Result<Vec<Type>, OpError> {
    let states = inputs.first().map(states).unwrap_or_default();
    let check = Check::arity(op, inputs, 4 + states.len() + usize::from(factor))?;
    let weight = check.float(0, "weight", inputs[0].shape.dims().len())?;
    if weight.dtype == DType::F32 && !rounding.is_nearest() {
        return check.invalid(format!("weight is {weight}, which leaves nothing to round at random"));
    }
    check.exactly(1, "gradient", &Type::f32(weight.shape.clone()))?;
    for (index, (what, ty)) in (2..).zip(&states) {
        check.exactly(index, what, ty)?;
    }
    for (index, what) in (2 + states.len()..inputs.len()).zip(["lr", "step", "factor"]) {
        check.exactly(index, what, &Type::f32([1]))?;
    }
    let states = states.into_iter().map(|(_, ty)| ty);
    Ok(std::iter::once(weight.clone()).chain(states).collect())
}

/// Every update's results lie over their operands.
fn update_aliases(states: usize) -> Vec<Alias> {
    let states = (1..=states).map(|output| Alias::in_place(output, output + 1));
    std::iter::once(Alias::in_place(0, 0)).chain(states).collect()
}

/// That many flops for each element, everything touched once, and `gradient` more readings of the gradient.
fn update_cost(flops: u64, gradient: u64, inputs: &[&Type], outputs: &[&Type]) -> Cost {
    let mut cost = Cost::touching(inputs[0].shape.elements().saturating_mul(flops), inputs, outputs);
    cost.bytes = cost.bytes.saturating_add(inputs[1].bytes().saturating_mul(gradient));
    cost
}

/// An update's operands as its reference works on them.
struct Update {
    weight: Tensor,
    /// Multiplied by the factor.
    gradient: Tensor,
    states: Vec<Tensor>,
    lr: f64,
    step: f64,
}

impl Update {
    /// Runs an update's reference on its operands, and gives its results; where the factor is NaN, these are the operands.
    fn run(inputs: &[Tensor], factor: bool, update: impl FnOnce(&mut Self)) -> Vec<Tensor> {
        let states = inputs.len() - 4 - usize::from(factor);
        let scalars = &inputs[2 + states..];
        let mut this = Self {
            weight: inputs[0].clone(),
            gradient: inputs[1].clone(),
            states: inputs[2..2 + states].to_vec(),
            lr: scalars[0].data[0],
            step: scalars[1].data[0],
        };
        let factor = scalars.get(2).map_or(1.0, |factor| factor.data[0]);
        if !factor.is_nan() {
            this.gradient.data.iter_mut().for_each(|g| *g *= factor);
            update(&mut this);
        }
        std::iter::once(this.weight).chain(this.states).collect()
    }

    /// Decoupled decay.
    fn decay(&mut self, weight_decay: f64) {
        let keep = 1.0 - self.lr * weight_decay;
        self.weight.data.iter_mut().for_each(|w| *w *= keep);
    }
}
