//! RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) and its gradient.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Accumulate, Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::Type;

/// `x: [T, H], weight: [H] → y: [T, H], rstd: f32[T]`: `y = x·rstd·weight`, `rstd = 1/√(mean(x²) + eps)`. `y` has `x`'s dtype, the
/// weight any float dtype.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNorm {
    /// `rms_norm_eps`.
    pub eps: f64,
}

impl Rule for RmsNorm {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("rms_norm", inputs, 2)?;
        let x = check.float(0, "x", 2)?;
        check.shaped(1, "weight", [x.dim(1)])?;
        Ok(vec![x.clone(), Type::f32([x.dim(0)])])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements().saturating_mul(4), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        let backward = RmsNormBackward {
            input: g.wants(0),
            weight: g.wants(1),
            accumulate: Accumulate::NONE,
        };
        let operands = [g.input(0), g.input(1), g.output(1), dy];
        let mut made = g.emit(backward, &operands)?.into_iter();
        for operand in [0, 1].into_iter().filter(|&i| g.wants(i)).collect::<Vec<_>>() {
            if let Some(gradient) = made.next() {
                g.give(operand, gradient);
            }
        }
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let (x, weight) = (&inputs[0], &inputs[1]);
        let mut y = Tensor::zeros(x.shape.clone());
        let mut rstd = Tensor::zeros([x.rows() as u64]);
        for t in 0..x.rows() {
            let mean = x.row(t).iter().map(|x| x * x).sum::<f64>() / x.cols() as f64;
            let r = 1.0 / (mean + self.eps).sqrt();
            rstd.data[t] = r;
            for ((y, x), w) in y.row_mut(t).iter_mut().zip(x.row(t)).zip(&weight.data) {
                *y = x * r * w;
            }
        }
        vec![y, rstd]
    }
}

/// `x, weight, rstd, dy (, addends) → (dx: [T, H]) (, dweight: f32[H])`, those asked for.
///
/// With `x̂ = x·rstd` and `g = dy·weight`: `dx = rstd·(g − x̂·mean(g·x̂))`, `dweight = Σ dy·x̂`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RmsNormBackward {
    /// Whether `dx` is made.
    pub input: bool,
    /// Whether `dweight` is made.
    pub weight: bool,
    /// Either result may accumulate: the residual stream's gradient meets here.
    #[serde(default, skip_serializing_if = "Accumulate::is_none")]
    pub accumulate: Accumulate,
}

impl Rule for RmsNormBackward {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("rms_norm_backward", inputs, 4 + self.accumulate.count())?;
        let x = check.float(0, "x", 2)?;
        check.shaped(1, "weight", [x.dim(1)])?;
        let weight = Type::f32([x.dim(1)]);
        check.exactly(2, "rstd", &Type::f32([x.dim(0)]))?;
        check.exactly(3, "dy", x)?;
        if !(self.input || self.weight) {
            return check.invalid("makes no gradient at all".to_owned());
        }
        let mut results = Vec::new();
        results.extend(self.input.then(|| x.clone()));
        results.extend(self.weight.then_some(weight));
        for (output, ty) in results.iter().enumerate() {
            if let Some(addend) = self.accumulate.operand(4, output) {
                check.exactly(addend, "the addend", ty)?;
            }
        }
        Ok(results)
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements().saturating_mul(10), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        let mut aliases: Vec<_> = self.accumulate.aliases(4).collect();
        if self.input {
            aliases.push(Alias::in_place(0, 3));
        }
        aliases
    }

    fn accumulating(&self, output: usize) -> Option<(Op, usize)> {
        let (accumulate, addend) = self.accumulate.with(4, output);
        let op = Self {
            accumulate,
            ..self.clone()
        };
        Some((op.into(), addend))
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [x, weight, rstd, dy] = &inputs[..4] else {
            unreachable!()
        };
        let mut dx = Tensor::zeros(x.shape.clone());
        let mut dw = Tensor::zeros(weight.shape.clone());
        for t in 0..x.rows() {
            let r = rstd.data[t];
            let x_hat: Vec<f64> = x.row(t).iter().map(|x| x * r).collect();
            let g: Vec<f64> = dy.row(t).iter().zip(&weight.data).map(|(d, w)| d * w).collect();
            let mean = super::linear::dot(&g, &x_hat) / x.cols() as f64;
            for i in 0..x.cols() {
                dx.row_mut(t)[i] = r * (g[i] - x_hat[i] * mean);
                dw.data[i] += dy.row(t)[i] * x_hat[i];
            }
        }
        let mut results = Vec::new();
        results.extend(self.input.then_some(dx));
        results.extend(self.weight.then_some(dw));
        self.accumulate.add_to(4, inputs, results)
    }
}
