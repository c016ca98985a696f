//! The loss's scale as it adapts, and the count of updates that it leaves.
//!
//! Gradients of a loss times a scale are multiples that 16 bits can hold (Micikevicius et al. 2018, arXiv:1710.03740). The scale adapts as
//! that of PyTorch's `GradScaler` does. Counts are `f32`, exact up to 2²⁴.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::Type;

/// `norm, scale, good_steps, skipped → scale, good_steps, skipped`, all `f32[1]`, each in place.
///
/// Where the gradients' norm is not finite, the update was skipped: the scale is multiplied by `backoff`, `good_steps` becomes 0 and
/// `skipped` one more. Else `good_steps` becomes one more, and at `growth_interval` the scale is multiplied by `growth`, if that is finite,
/// and `good_steps` becomes 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UpdateLossScale {
    /// What the scale is multiplied by after updates that went well.
    pub growth: f64,
    /// What it is multiplied by after one that was skipped.
    pub backoff: f64,
    /// How many in a row must go well.
    pub growth_interval: u64,
}

impl Rule for UpdateLossScale {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("update_loss_scale", inputs, 4)?;
        for (index, what) in ["norm", "scale", "good_steps", "skipped"].into_iter().enumerate() {
            check.exactly(index, what, &Type::f32([1]))?;
        }
        check.positive("growth_interval", self.growth_interval)?;
        Ok(vec![Type::f32([1]); 3])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(2, inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        (0..3).map(|output| Alias::in_place(output, output + 1)).collect()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [norm, scale, good_steps, skipped] = [0, 1, 2, 3].map(|index| inputs[index].data[0]);
        let grown = scale * self.growth;
        let (scale, good_steps, skipped) = if !norm.is_finite() {
            (scale * self.backoff, 0.0, skipped + 1.0)
        } else if good_steps + 1.0 < self.growth_interval as f64 {
            (scale, good_steps + 1.0, skipped)
        } else if grown <= f64::from(f32::MAX) {
            (grown, 0.0, skipped)
        } else {
            (scale, 0.0, skipped)
        };
        [scale, good_steps, skipped].map(Tensor::scalar).into()
    }
}

/// `step, skipped → step`, all `f32[1]`: the number of this update among those that were applied, from the number of the step, both
/// counted from 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AppliedStep {}

impl Rule for AppliedStep {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("applied_step", inputs, 2)?;
        for (index, what) in ["step", "skipped"].into_iter().enumerate() {
            check.exactly(index, what, &Type::f32([1]))?;
        }
        Ok(vec![Type::f32([1])])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(1, inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        vec![Tensor::scalar(inputs[0].data[0] - inputs[1].data[0])]
    }
}
