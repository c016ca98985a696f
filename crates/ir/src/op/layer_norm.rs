//! LayerNorm (Ba, Kiros and Hinton 2016, arXiv:1607.06450) and its gradient.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Accumulate, Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::Type;

/// `x: [T, H], weight: [H], bias: [H] → y: [T, H], mean: f32[T], rstd: f32[T]`; `y` of `x`'s dtype, weight and bias of any float
/// dtype.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f64,
}

impl Rule for LayerNorm {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("layer_norm", inputs, 3)?;
        let x = check.float(0, "x", 2)?;
        check.shaped(1, "weight", [x.dim(1)])?;
        check.shaped(2, "bias", [x.dim(1)])?;
        let rows = Type::f32([x.dim(0)]);
        Ok(vec![x.clone(), rows.clone(), rows])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements().saturating_mul(8), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        let backward = LayerNormBackward {
            input: g.wants(0),
            weight: g.wants(1),
            bias: g.wants(2),
            accumulate: Accumulate::NONE,
        };
        let operands = [g.input(0), g.input(1), g.output(1), g.output(2), dy];
        let mut made = g.emit(backward, &operands)?.into_iter();
        for operand in (0..3).filter(|&i| g.wants(i)).collect::<Vec<_>>() {
            if let Some(gradient) = made.next() {
                g.give(operand, gradient);
            }
        }
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [x, weight, bias] = inputs else { unreachable!() };
        let mut y = Tensor::zeros(x.shape.clone());
        let mut mean = Tensor::zeros([x.rows() as u64]);
        let mut rstd = mean.clone();
        for t in 0..x.rows() {
            let n = x.cols() as f64;
            let mu = x.row(t).iter().sum::<f64>() / n;
            let variance = x.row(t).iter().map(|x| (x - mu).powi(2)).sum::<f64>() / n;
            let r = 1.0 / (variance + self.eps).sqrt();
            (mean.data[t], rstd.data[t]) = (mu, r);
            for i in 0..x.cols() {
                y.row_mut(t)[i] = (x.row(t)[i] - mu) * r * weight.data[i] + bias.data[i];
            }
        }
        vec![y, mean, rstd]
    }
}

/// `x, weight, mean, rstd, dy (, addends) → (dx) (, dweight: f32[H]) (, dbias: f32[H])`, those asked for.
///
/// With `x̂ = (x − mean)·rstd` and `g = dy·weight`: `dx = rstd·(g − mean(g) − x̂·mean(g·x̂))`, `dweight = Σ dy·x̂`, `dbias = Σ dy`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerNormBackward {
    /// Whether `dx` is made.
    pub input: bool,
    /// Whether `dweight` is made.
    pub weight: bool,
    /// Whether `dbias` is made.
    pub bias: bool,
    /// Any result may accumulate.
    #[serde(default, skip_serializing_if = "Accumulate::is_none")]
    pub accumulate: Accumulate,
}

impl Rule for LayerNormBackward {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("layer_norm_backward", inputs, 5 + self.accumulate.count())?;
        let x = check.float(0, "x", 2)?;
        let rows = Type::f32([x.dim(0)]);
        check.shaped(1, "weight", [x.dim(1)])?;
        let weight = Type::f32([x.dim(1)]);
        check.exactly(2, "mean", &rows)?;
        check.exactly(3, "rstd", &rows)?;
        check.exactly(4, "dy", x)?;
        if !(self.input || self.weight || self.bias) {
            return check.invalid("makes no gradient at all".to_owned());
        }
        let mut results = Vec::new();
        results.extend(self.input.then(|| x.clone()));
        results.extend(self.weight.then(|| weight.clone()));
        results.extend(self.bias.then_some(weight));
        for (output, ty) in results.iter().enumerate() {
            if let Some(addend) = self.accumulate.operand(5, output) {
                check.exactly(addend, "the addend", ty)?;
            }
        }
        Ok(results)
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements().saturating_mul(14), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        let mut aliases: Vec<_> = self.accumulate.aliases(5).collect();
        if self.input {
            aliases.push(Alias::in_place(0, 4));
        }
        aliases
    }

    fn accumulating(&self, output: usize) -> Option<(Op, usize)> {
        let (accumulate, addend) = self.accumulate.with(5, output);
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
        let [x, weight, mean, rstd, dy] = &inputs[..5] else {
            unreachable!()
        };
        let mut dx = Tensor::zeros(x.shape.clone());
        let mut dw = Tensor::zeros(weight.shape.clone());
        let mut db = dw.clone();
        for t in 0..x.rows() {
            let (mu, r, n) = (mean.data[t], rstd.data[t], x.cols() as f64);
            let x_hat: Vec<f64> = x.row(t).iter().map(|x| (x - mu) * r).collect();
            let g: Vec<f64> = dy.row(t).iter().zip(&weight.data).map(|(d, w)| d * w).collect();
            let mean_g = g.iter().sum::<f64>() / n;
            let mean_gx = super::linear::dot(&g, &x_hat) / n;
            for i in 0..x.cols() {
                dx.row_mut(t)[i] = r * (g[i] - mean_g - x_hat[i] * mean_gx);
                dw.data[i] += dy.row(t)[i] * x_hat[i];
                db.data[i] += dy.row(t)[i];
            }
        }
        let mut results = Vec::new();
        results.extend(self.input.then_some(dx));
        results.extend(self.weight.then_some(dw));
        results.extend(self.bias.then_some(db));
        self.accumulate.add_to(5, inputs, results)
    }
}
