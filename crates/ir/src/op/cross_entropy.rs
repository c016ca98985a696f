//! Plain softmax cross-entropy over whole logits, for models with few classes.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::Type;

/// `logits: [T, V], targets: i32[T], token_count: f32[1] → loss: f32[1], lse: f32[T]`; logits of any float dtype.
///
/// The loss is the sum over rows whose target is not `ignore_index`, divided by `token_count`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SoftmaxCrossEntropy {
    /// Rows with this target count nothing; usually −100.
    pub ignore_index: i32,
}

impl Rule for SoftmaxCrossEntropy {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("softmax_cross_entropy", inputs, 3)?;
        let logits = check.float(0, "logits", 2)?;
        check.ids(1, "targets", logits.dim(0))?;
        check.exactly(2, "token_count", &Type::f32([1]))?;
        Ok(vec![Type::f32([1]), Type::f32([logits.dim(0)])])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements().saturating_mul(10), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.root(0)?;
        let backward = SoftmaxCrossEntropyBackward {
            ignore_index: self.ignore_index,
            scaled: false,
        };
        let operands = [g.input(0), g.output(1), g.input(1), g.input(2)];
        let dlogits = g.emit(backward, &operands)?[0];
        g.give(0, dlogits);
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [logits, targets, token_count] = inputs else {
            unreachable!()
        };
        let mut loss = 0.0;
        let mut lse = Tensor::zeros([logits.rows() as u64]);
        for t in 0..logits.rows() {
            lse.data[t] = log_sum_exp(logits.row(t));
            if targets.data[t] != f64::from(self.ignore_index) {
                loss += row_loss(logits.row(t), targets.data[t] as usize);
            }
        }
        vec![Tensor::scalar(loss / token_count.data[0]), lse]
    }
}

/// `logits, lse, targets, token_count (, scale: f32[1]) → dlogits`, of the logits' type: `scale·(softmax − one-hot)/token_count`, 0 in
/// ignored rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SoftmaxCrossEntropyBackward {
    /// As in the forward.
    pub ignore_index: i32,
    /// Whether the gradient is multiplied by `scale`, the last operand.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scaled: bool,
}

impl Rule for SoftmaxCrossEntropyBackward {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("softmax_cross_entropy_backward", inputs, 4 + usize::from(self.scaled))?;
        let logits = check.float(0, "logits", 2)?;
        check.exactly(1, "lse", &Type::f32([logits.dim(0)]))?;
        check.ids(2, "targets", logits.dim(0))?;
        check.exactly(3, "token_count", &Type::f32([1]))?;
        if self.scaled {
            check.exactly(4, "scale", &Type::f32([1]))?;
        }
        Ok(vec![logits.clone()])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements().saturating_mul(10), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        vec![Alias::in_place(0, 0)]
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [logits, lse, targets, token_count] = &inputs[..4] else {
            unreachable!()
        };
        let scale = if self.scaled { inputs[4].data[0] } else { 1.0 };
        let mut dlogits = Tensor::zeros(logits.shape.clone());
        for t in (0..logits.rows()).filter(|&t| targets.data[t] != f64::from(self.ignore_index)) {
            for (v, (d, x)) in dlogits.row_mut(t).iter_mut().zip(logits.row(t)).enumerate() {
                let log_probability = x - lse.data[t];
                let probability_less_hot = match v == targets.data[t] as usize {
                    true => log_probability.exp_m1(),
                    false => log_probability.exp(),
                };
                *d = scale * probability_less_hot / token_count.data[0];
            }
        }
        vec![dlogits]
    }
}

/// `ln Σ exp(x) − x[target]`, exact also where that is tiny beside `x[target]`: of a target that is nearly certain.
fn row_loss(row: &[f64], target: usize) -> f64 {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let others = row.iter().enumerate().filter(|(v, _)| *v != target);
    let sum: f64 = others.map(|(_, x)| (x - max).exp()).sum();
    max - row[target] + (sum + (row[target] - max).exp_m1()).ln_1p()
}

/// `ln Σ exp(x)`.
pub(super) fn log_sum_exp(row: &[f64]) -> f64 {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + row.iter().map(|x| (x - max).exp()).sum::<f64>().ln()
}
