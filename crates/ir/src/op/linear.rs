//! Linear layers: `y = x·Wᵀ (+ bias) (+ addend)` and the three products of its gradient.
//!
//! Activations are of one float dtype `T`, weights of any or of a quantised format, gradients of weights `f32`.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Accumulate, Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::{DType, Type};

/// `x: T[T, K], weight: [N, K] (, bias: [N]) (, addend: T[T, N]) → T[T, N]`.
///
/// With an addend it is a linear layer and the residual connection after it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Linear {
    /// Whether there is a bias.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub bias: bool,
    /// Result 0 may accumulate.
    #[serde(default, skip_serializing_if = "Accumulate::is_none")]
    pub accumulate: Accumulate,
}

impl Linear {
    fn own_operands(&self) -> usize {
        2 + usize::from(self.bias)
    }
}

impl Rule for Linear {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let own = self.own_operands();
        let check = Check::arity("linear", inputs, own + self.accumulate.count())?;
        let x = check.float(0, "x", 2)?;
        let weight = check.table(1, "weight")?;
        check.same("weight's columns", weight.dim(1), "x's columns", x.dim(1))?;
        let y = Type::new(x.dtype, [x.dim(0), weight.dim(0)]);
        if self.bias {
            check.shaped(2, "bias", [weight.dim(0)])?;
        }
        if let Some(addend) = self.accumulate.operand(own, 0) {
            check.exactly(addend, "the addend", &y)?;
        }
        Ok(vec![y])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        product_cost(outputs[0].shape.elements(), inputs[0].dim(1), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        self.accumulate.aliases(self.own_operands()).collect()
    }

    fn accumulating(&self, output: usize) -> Option<(Op, usize)> {
        let (accumulate, addend) = self.accumulate.with(self.own_operands(), output);
        let op = Self {
            accumulate,
            ..self.clone()
        };
        Some((op.into(), addend))
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        if g.wants(0) {
            let dx = g.emit(LinearBackwardInput::default(), &[dy, g.input(1)])?[0];
            g.give(0, dx);
        }
        if g.wants(1) {
            if let DType::Block(block) = g.dtype(1) {
                return Err(OpError::Invalid {
                    op: "linear",
                    message: format!("has no gradient of its weight, which is quantised ({block})"),
                });
            }
            let dw = g.emit(LinearBackwardWeight::default(), &[g.input(0), dy])?[0];
            g.give(1, dw);
        }
        if self.bias && g.wants(2) {
            let db = g.emit(BiasBackward::default(), &[dy])?[0];
            g.give(2, db);
        }
        if let Some(addend) = self.accumulate.operand(self.own_operands(), 0) {
            g.give(addend, dy);
        }
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let (x, weight) = (&inputs[0], &inputs[1]);
        let mut y = Tensor::zeros([x.rows() as u64, weight.rows() as u64]);
        for t in 0..x.rows() {
            for n in 0..weight.rows() {
                let bias = if self.bias { inputs[2].data[n] } else { 0.0 };
                y.row_mut(t)[n] = bias + dot(x.row(t), weight.row(n));
            }
        }
        self.accumulate.add_to(self.own_operands(), inputs, vec![y])
    }
}

/// `dy: T[T, N], weight: [N, K] (, addend: T[T, K]) → dx: T[T, K]`, `dy·W`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinearBackwardInput {
    /// Result 0 may accumulate.
    #[serde(default, skip_serializing_if = "Accumulate::is_none")]
    pub accumulate: Accumulate,
}

impl Rule for LinearBackwardInput {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("linear_backward_input", inputs, 2 + self.accumulate.count())?;
        let dy = check.float(0, "dy", 2)?;
        let weight = check.table(1, "weight")?;
        check.same("weight's rows", weight.dim(0), "dy's columns", dy.dim(1))?;
        let dx = Type::new(dy.dtype, [dy.dim(0), weight.dim(1)]);
        if let Some(addend) = self.accumulate.operand(2, 0) {
            check.exactly(addend, "the addend", &dx)?;
        }
        Ok(vec![dx])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        product_cost(outputs[0].shape.elements(), inputs[0].dim(1), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        self.accumulate.aliases(2).collect()
    }

    fn accumulating(&self, output: usize) -> Option<(Op, usize)> {
        let (accumulate, addend) = self.accumulate.with(2, output);
        Some((Self { accumulate }.into(), addend))
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let (dy, weight) = (&inputs[0], &inputs[1]);
        let mut dx = Tensor::zeros([dy.rows() as u64, weight.cols() as u64]);
        for t in 0..dy.rows() {
            for (n, &d) in dy.row(t).iter().enumerate() {
                axpy(d, weight.row(n), dx.row_mut(t));
            }
        }
        self.accumulate.add_to(2, inputs, vec![dx])
    }
}

/// `x: T[T, K], dy: T[T, N] (, addend: f32[N, K]) → dweight: f32[N, K]`, `dyᵀ·x`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LinearBackwardWeight {
    /// Result 0 may accumulate.
    #[serde(default, skip_serializing_if = "Accumulate::is_none")]
    pub accumulate: Accumulate,
}

impl Rule for LinearBackwardWeight {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("linear_backward_weight", inputs, 2 + self.accumulate.count())?;
        let x = check.float(0, "x", 2)?;
        let dy = check.float(1, "dy", 2)?;
        check.same("dy's rows", dy.dim(0), "x's rows", x.dim(0))?;
        let dw = Type::f32([dy.dim(1), x.dim(1)]);
        if let Some(addend) = self.accumulate.operand(2, 0) {
            check.exactly(addend, "the addend", &dw)?;
        }
        Ok(vec![dw])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        product_cost(outputs[0].shape.elements(), inputs[0].dim(0), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        self.accumulate.aliases(2).collect()
    }

    fn accumulating(&self, output: usize) -> Option<(Op, usize)> {
        let (accumulate, addend) = self.accumulate.with(2, output);
        Some((Self { accumulate }.into(), addend))
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let (x, dy) = (&inputs[0], &inputs[1]);
        let mut dw = Tensor::zeros([dy.cols() as u64, x.cols() as u64]);
        for t in 0..x.rows() {
            for (n, &d) in dy.row(t).iter().enumerate() {
                axpy(d, x.row(t), dw.row_mut(n));
            }
        }
        self.accumulate.add_to(2, inputs, vec![dw])
    }
}

/// `dy: T[T, N] (, addend: f32[N]) → dbias: f32[N]`: column sums.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BiasBackward {
    /// Result 0 may accumulate.
    #[serde(default, skip_serializing_if = "Accumulate::is_none")]
    pub accumulate: Accumulate,
}

impl Rule for BiasBackward {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("bias_backward", inputs, 1 + self.accumulate.count())?;
        let db = Type::f32([check.float(0, "dy", 2)?.dim(1)]);
        if let Some(addend) = self.accumulate.operand(1, 0) {
            check.exactly(addend, "the addend", &db)?;
        }
        Ok(vec![db])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements(), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        self.accumulate.aliases(1).collect()
    }

    fn accumulating(&self, output: usize) -> Option<(Op, usize)> {
        let (accumulate, addend) = self.accumulate.with(1, output);
        Some((Self { accumulate }.into(), addend))
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let dy = &inputs[0];
        let mut db = Tensor::zeros([dy.cols() as u64]);
        for t in 0..dy.rows() {
            axpy(1.0, dy.row(t), &mut db.data);
        }
        self.accumulate.add_to(1, inputs, vec![db])
    }
}

fn product_cost(results: u64, inner: u64, inputs: &[&Type], outputs: &[&Type]) -> Cost {
    Cost::touching(2_u64.saturating_mul(results).saturating_mul(inner), inputs, outputs)
}

/// `Σ a·b`.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `y += scale·x`.
pub(super) fn axpy(scale: f64, x: &[f64], y: &mut [f64]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += scale * x;
    }
}
