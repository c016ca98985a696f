//! APOLLO: Adam's step sizes, learnt in a random subspace, for plain gradients.

use serde::{Deserialize, Serialize};

use super::super::check::Check;
use super::super::{Alias, Cost, Gradient, Op, OpError, Rule};
use super::{Rounding, Update, infer_update, update_aliases, update_cost};
use crate::random::Stream;
use crate::tensor::Tensor;
use crate::types::Type;

/// `weight, gradient, m: f32[L, rank], v: f32[L, rank], norm: f32[1], lr, step (, factor) → weight, m, v, norm` of a matrix, where `L`
/// is the larger of its sizes and channels are along it.
///
/// The gradient's smaller dimension is projected onto `rank` random directions, Adam (`m`, `v`) gives the projection's update, and each
/// channel of the gradient is multiplied by how much longer its row of that update is than its row of the projection. Where the norm of the
/// result is more than `growth` times that of the step before (`norm`; 0 for none yet), it is cut to that. Zhu et al. 2024,
/// arXiv:2412.05270.
///
/// The projection is no state: its entries are `±1/√rank` with signs of a [`Stream`], drawn anew every `refresh` steps. Signs keep lengths
/// as well as the paper's Gaussians do (Achlioptas 2003, doi:10.1016/S0022-0000(03)00025-4) and are the same on every machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Apollo {
    /// Random directions.
    pub rank: u64,
    /// Steps after which the directions are drawn anew.
    pub refresh: u64,
    /// The stream that signs are drawn from.
    pub key: u64,
    /// Largest growth of the update's norm from step to step; 1.01 in the paper.
    pub growth: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Per step, times the learning rate.
    pub weight_decay: f64,
    /// Whether `factor` is the last operand.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub factor: bool,
    /// Of the weight.
    #[serde(default, skip_serializing_if = "Rounding::is_nearest")]
    pub rounding: Rounding,
}

impl Apollo {
    /// Added to the length that a channel's is divided by, and to the norm of the step before.
    pub const TINY: f64 = 1e-8;

    /// The stream whose bits are the signs of the projection at a step, counted from 1.
    pub fn signs(&self, step: f64) -> Stream {
        Stream::new(self.key, (step as u64).saturating_sub(1) / self.refresh.max(1), 0)
    }
}

/// Whether element `index` of a projection is negative.
#[inline(always)]
pub fn is_negative(signs: Stream, index: u32) -> bool {
    signs.bits(index / 32) >> (index % 32) & 1 == 1
}

impl Rule for Apollo {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let results = infer_update("apollo", inputs, self.factor, self.rounding, |weight| {
            let moment = Type::f32([weight.dim(0).max(weight.dim(1)), self.rank]);
            vec![("m", moment.clone()), ("v", moment), ("norm", Type::f32([1]))]
        })?;
        let check = Check::arity("apollo", inputs, inputs.len())?;
        let weight = check.float(0, "weight", 2)?;
        check.positive("rank", self.rank)?;
        check.positive("refresh", self.refresh)?;
        let smaller = weight.dim(0).min(weight.dim(1));
        if smaller.saturating_mul(self.rank) > u64::from(u32::MAX) {
            return check.invalid(format!(
                "a projection of {smaller} onto {} has too many elements",
                self.rank
            ));
        }
        Ok(results)
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        // The projection, the norm and the update.
        update_cost(self.rank.saturating_mul(2).saturating_add(6), 2, inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        update_aliases(3)
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        Update::run(inputs, self.factor, |update| {
            let (rows, cols, rank) = (update.weight.rows(), update.weight.cols(), self.rank as usize);
            let (channels, smaller) = (rows.max(cols), rows.min(cols));
            // Element `i` of a channel, and the channel of an element.
            let at = |channel: usize, i: usize| match rows >= cols {
                true => channel * cols + i,
                false => i * cols + channel,
            };
            let (signs, size) = (self.signs(update.step), 1.0 / (self.rank as f64).sqrt());
            let projection = |k: usize, i: usize| match is_negative(signs, (k * smaller + i) as u32) {
                true => -size,
                false => size,
            };
            let [m, v, norm] = &mut update.states[..] else {
                unreachable!()
            };
            let (bias1, bias2) = (1.0 - self.beta1.powf(update.step), 1.0 - self.beta2.powf(update.step));
            let g = &mut update.gradient.data;
            for channel in 0..channels {
                let (mut projected, mut adapted) = (0.0, 0.0);
                for k in 0..rank {
                    let r: f64 = (0..smaller).map(|i| g[at(channel, i)] * projection(k, i)).sum();
                    let (m, v) = (&mut m.data[channel * rank + k], &mut v.data[channel * rank + k]);
                    *m += (r - *m) * (1.0 - self.beta1);
                    *v = *v * self.beta2 + r * r * (1.0 - self.beta2);
                    projected += r * r;
                    adapted += (*m / bias1 / ((*v / bias2).sqrt() + self.eps)).powi(2);
                }
                let scale = adapted.sqrt() / (projected.sqrt() + Self::TINY);
                (0..smaller).for_each(|i| g[at(channel, i)] *= scale);
            }
            let length = g.iter().map(|g| g * g).sum::<f64>().sqrt();
            let grown = match norm.data[0] {
                0.0 => 1.0,
                before => (length / (before + Self::TINY) / self.growth).max(1.0),
            };
            norm.data[0] = length / grown;
            update.decay(self.weight_decay);
            for (w, g) in update.weight.data.iter_mut().zip(&update.gradient.data) {
                *w -= update.lr * g / grown;
            }
        })
    }
}
