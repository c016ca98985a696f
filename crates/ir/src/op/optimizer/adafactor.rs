//! Adafactor: a second moment from the sums of its rows and columns.

use serde::{Deserialize, Serialize};

use super::super::{Alias, Cost, Gradient, Op, OpError, Rule};
use super::{Rounding, Update, infer_update, update_aliases, update_cost};
use crate::tensor::Tensor;
use crate::types::Type;

/// `weight, gradient, row: f32[rows], col: f32[cols], lr, step (, factor) → weight, row, col` for matrices,
/// `weight, gradient, v, lr, step (, factor) → weight, v` where not `factored`.
///
/// The second moment of a matrix is the outer product of the means of its rows and of its columns, over the mean of all; it decays with
/// `1 − step^−decay`. There is no first moment. The update `gradient/√v` is divided by `max(1, rms(update)/clip)`, and the weight moves by
/// the learning rate against it: that is fed from outside, so steps are relative neither to the weight's size nor to their count
/// (`scale_parameter` and `relative_step` off, as `transformers` calls it). Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 and 5.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Adafactor {
    /// Whether the weight is a matrix with sums of rows and columns for a state.
    pub factored: bool,
    /// The second moment's decay at a step is `1 − step^−decay`; 0.8 in the paper.
    pub decay: f64,
    /// Added to the square of a gradient; 1e-30 in the paper.
    pub eps: f64,
    /// Largest root mean square of an update; 1 in the paper.
    pub clip: f64,
    /// Per step, times the learning rate.
    pub weight_decay: f64,
    /// Whether `factor` is the last operand.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub factor: bool,
    /// Of the weight.
    #[serde(default, skip_serializing_if = "Rounding::is_nearest")]
    pub rounding: Rounding,
}

impl Rule for Adafactor {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        infer_update("adafactor", inputs, self.factor, self.rounding, |weight| {
            match self.factored {
                true => vec![("row", Type::f32([weight.rows()])), ("col", Type::f32([weight.cols()]))],
                false => vec![("v", Type::f32(weight.shape.clone()))],
            }
        })
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        // The sums, the update's size, and the update.
        update_cost(12, 2, inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        update_aliases(1 + usize::from(self.factored))
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        Update::run(inputs, self.factor, |update| {
            let beta2 = 1.0 - update.step.powf(-self.decay);
            let g = &update.gradient;
            let squares: Vec<f64> = g.data.iter().map(|g| g * g + self.eps).collect();
            let into = |state: &mut f64, mean: f64| *state = beta2 * *state + (1.0 - beta2) * mean;
            let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
            let v: Vec<f64> = match &mut update.states[..] {
                [row, col] => {
                    let cols = col.data.len();
                    for (state, squares) in row.data.iter_mut().zip(squares.chunks(cols)) {
                        into(state, mean(squares));
                    }
                    for (j, state) in col.data.iter_mut().enumerate() {
                        let column: Vec<f64> = squares.iter().skip(j).step_by(cols).copied().collect();
                        into(state, mean(&column));
                    }
                    let all = mean(&row.data);
                    let rows = row.data.iter();
                    rows.flat_map(|row| col.data.iter().map(move |col| row * col / all))
                        .collect()
                }
                states => {
                    let v = &mut states[0].data;
                    v.iter_mut()
                        .zip(&squares)
                        .for_each(|(state, &square)| into(state, square));
                    v.clone()
                }
            };
            let mut direction: Vec<f64> = g.data.iter().zip(&v).map(|(g, v)| g / v.sqrt()).collect();
            let rms = (direction.iter().map(|u| u * u).sum::<f64>() / direction.len() as f64).sqrt();
            let shrink = (rms / self.clip).max(1.0);
            direction.iter_mut().for_each(|u| *u /= shrink);
            update.decay(self.weight_decay);
            for (w, u) in update.weight.data.iter_mut().zip(&direction) {
                *w -= update.lr * u;
            }
        })
    }
}
