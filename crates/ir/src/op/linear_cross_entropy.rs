//! The language-model head and its loss in one operation over chunks of rows, so that logits never exist whole.
//!
//! The gradients are made in the forward, chunk by chunk, while the chunk's logits are there (Liger Kernel, Hsu et al. 2024,
//! arXiv:2410.10989): so it must be the loss that is differentiated, and the token count must be known.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::cross_entropy::{SoftmaxCrossEntropy, SoftmaxCrossEntropyBackward};
use super::linear::{Linear, LinearBackwardInput, LinearBackwardWeight};
use super::{Accumulate, Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::{DType, Type};

/// `x: T[T, H], weight: [V, H], targets: i32[T], token_count: f32[1] (, scale: f32[1]) (, addends) → loss: f32[1] (, dx) (, dweight)`.
///
/// The loss is that of [`SoftmaxCrossEntropy`] on `x·Wᵀ` in `f32`; the gradients are those of `scale` times the loss. `dx` has the type
/// of `x`; `dweight` is `f32`, and there is none of a quantised weight.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinearCrossEntropy {
    /// Rows whose logits exist at one time. Changes rounding only.
    pub chunk: u64,
    /// Rows with this target count nothing; usually −100.
    pub ignore_index: i32,
    /// Whether `dx` is made.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub input_gradient: bool,
    /// Whether `dweight` is made.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub weight_gradient: bool,
    /// Whether the gradients are multiplied by `scale`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scaled: bool,
    /// The last result, `dweight`, may accumulate.
    #[serde(default, skip_serializing_if = "Accumulate::is_none")]
    pub accumulate: Accumulate,
}

impl LinearCrossEntropy {
    /// The loss alone.
    pub fn new(chunk: u64, ignore_index: i32) -> Self {
        Self {
            chunk,
            ignore_index,
            input_gradient: false,
            weight_gradient: false,
            scaled: false,
            accumulate: Accumulate::NONE,
        }
    }

    /// Operands of its own, before addends.
    pub fn own(&self) -> usize {
        4 + usize::from(self.scaled)
    }

    /// Which result `dweight` is.
    pub fn weight_result(&self) -> Option<usize> {
        self.weight_gradient.then_some(1 + usize::from(self.input_gradient))
    }
}

impl Rule for LinearCrossEntropy {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("linear_cross_entropy", inputs, self.own() + self.accumulate.count())?;
        let x = check.float(0, "x", 2)?;
        let weight = check.table(1, "weight")?;
        check.same("weight's columns", weight.dim(1), "x's columns", x.dim(1))?;
        check.ids(2, "targets", x.dim(0))?;
        check.exactly(3, "token_count", &Type::f32([1]))?;
        if self.scaled {
            check.exactly(4, "scale", &Type::f32([1]))?;
        }
        check.positive("chunk", self.chunk)?;
        let mut results = vec![Type::f32([1])];
        results.extend(self.input_gradient.then(|| x.clone()));
        let dweight = Type::new(DType::F32, weight.shape.clone());
        if let (true, DType::Block(block)) = (self.weight_gradient, weight.dtype) {
            return check.invalid(format!("there is no gradient of a quantised weight ({block})"));
        }
        results.extend(self.weight_gradient.then(|| dweight.clone()));
        for output in 0..8 {
            let Some(addend) = self.accumulate.operand(self.own(), output) else {
                continue;
            };
            if Some(output) != self.weight_result() {
                return check.invalid(format!("result {output} cannot accumulate"));
            }
            check.exactly(addend, "the addend", &dweight)?;
        }
        Ok(results)
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        let logits = inputs[0].dim(0).saturating_mul(inputs[1].dim(0));
        let products = 1 + u64::from(self.input_gradient) + u64::from(self.weight_gradient);
        let flops = logits.saturating_mul(inputs[0].dim(1).saturating_mul(2 * products).saturating_add(10));
        let mut cost = Cost::touching(flops, inputs, outputs);
        // Each chunk's logits are written, read twice by the softmax, and read by every product.
        cost.bytes = cost.bytes.saturating_add(logits.saturating_mul(4 * (2 + products)));
        cost
    }

    fn aliases(&self) -> Vec<Alias> {
        self.accumulate.aliases(self.own()).collect()
    }

    fn accumulating(&self, output: usize) -> Option<(Op, usize)> {
        (Some(output) == self.weight_result()).then(|| {
            let (accumulate, addend) = self.accumulate.with(self.own(), output);
            let op = Self {
                accumulate,
                ..self.clone()
            };
            (op.into(), addend)
        })
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        if self.input_gradient || self.weight_gradient {
            return g.none();
        }
        g.root(0)?;
        let made = g.extend(LinearCrossEntropy {
            input_gradient: g.wants(0),
            weight_gradient: g.wants(1),
            ..self.clone()
        })?;
        let mut made = made.into_iter();
        for operand in [0, 1].into_iter().filter(|&i| g.wants(i)).collect::<Vec<_>>() {
            if let Some(gradient) = made.next() {
                g.give(operand, gradient);
            }
        }
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [x, weight, targets, token_count] = &inputs[..4] else {
            unreachable!()
        };
        let head = Linear {
            bias: false,
            accumulate: Accumulate::NONE,
        };
        let ignore_index = self.ignore_index;
        let logits = head.reference(&[x.clone(), weight.clone()]).remove(0);
        let forward = SoftmaxCrossEntropy { ignore_index };
        let mut made = forward.reference(&[logits.clone(), targets.clone(), token_count.clone()]);
        let lse = made.remove(1);
        let backward = SoftmaxCrossEntropyBackward {
            ignore_index,
            scaled: self.scaled,
        };
        let mut operands = vec![logits, lse, targets.clone(), token_count.clone()];
        operands.extend(self.scaled.then(|| inputs[4].clone()));
        let dlogits = backward.reference(&operands).remove(0);
        if self.input_gradient {
            made.extend(LinearBackwardInput::default().reference(&[dlogits.clone(), weight.clone()]));
        }
        if self.weight_gradient {
            made.extend(LinearBackwardWeight::default().reference(&[x.clone(), dlogits]));
        }
        self.accumulate.add_to(self.own(), inputs, made)
    }
}
