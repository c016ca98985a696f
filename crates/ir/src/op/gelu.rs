//! GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415), exact and by tanh, and its gradient.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::Type;

/// Which formula, named as PyTorch's `approximate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Approximate {
    /// `x·Φ(x)` with the error function.
    None,
    /// `x/2·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`.
    Tanh,
}

/// `x → gelu(x)`, element by element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gelu {
    /// Which formula.
    pub approximate: Approximate,
}

impl Rule for Gelu {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("gelu", inputs, 1)?;
        Ok(vec![check.floats(0, "x")?.clone()])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements().saturating_mul(20), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        vec![Alias::in_place(0, 0)]
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        let backward = GeluBackward {
            approximate: self.approximate,
        };
        let dx = g.emit(backward, &[g.input(0), dy])?[0];
        g.give(0, dx);
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let mut y = inputs[0].clone();
        for x in &mut y.data {
            *x *= gate(self.approximate, *x);
        }
        vec![y]
    }
}

/// `x, dy → dx`, element by element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GeluBackward {
    /// Which formula.
    pub approximate: Approximate,
}

impl Rule for GeluBackward {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("gelu_backward", inputs, 2)?;
        let x = check.floats(0, "x")?;
        check.exactly(1, "dy", x)?;
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements().saturating_mul(30), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        vec![Alias::in_place(0, 1), Alias::in_place(0, 0)]
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let (x, dy) = (&inputs[0], &inputs[1]);
        let mut dx = dy.clone();
        for (dx, &x) in dx.data.iter_mut().zip(&x.data) {
            *dx *= gate(self.approximate, x) + x * gate_slope(self.approximate, x);
        }
        vec![dx]
    }
}

const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;

/// `gelu(x) / x`.
fn gate(approximate: Approximate, x: f64) -> f64 {
    match approximate {
        Approximate::None => 0.5 * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
        Approximate::Tanh => 0.5 * (1.0 + (SQRT_2_OVER_PI * (x + 0.044715 * x.powi(3))).tanh()),
    }
}

/// The derivative of [`gate`].
fn gate_slope(approximate: Approximate, x: f64) -> f64 {
    match approximate {
        Approximate::None => 0.5 * SQRT_2_OVER_PI * (-0.5 * x * x).exp(),
        Approximate::Tanh => {
            let tanh = (SQRT_2_OVER_PI * (x + 0.044715 * x.powi(3))).tanh();
            0.5 * (1.0 - tanh * tanh) * SQRT_2_OVER_PI * (1.0 + 3.0 * 0.044715 * x * x)
        }
    }
}

/// The error function to double precision: its Taylor series below 3, the continued fraction of `erfc` above
/// (Abramowitz and Stegun, 7.1.6 and 7.1.14).
fn erf(x: f64) -> f64 {
    let a = x.abs();
    let value = if a < 3.0 {
        let (mut term, mut sum, mut n) = (a, a, 0.0);
        while term > 1e-17 * sum {
            n += 1.0;
            term *= 2.0 * a * a / (2.0 * n + 1.0);
            sum += term;
        }
        sum * (-a * a).exp() * std::f64::consts::FRAC_2_SQRT_PI
    } else {
        let fraction = (1..60).rev().fold(a, |f, k| a + 0.5 * f64::from(k) / f);
        1.0 - (-a * a).exp() / (fraction * std::f64::consts::PI.sqrt())
    };
    value.copysign(x)
}

#[cfg(test)]
mod tests {
    use super::erf;

    #[test]
    fn erf_matches_published_values() {
        // Abramowitz and Stegun, table 7.1; the last two from Wolfram's tables.
        for (x, expected) in [
            (0.0, 0.0),
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (2.0, 0.995_322_265_018_952_7),
            (-2.5, -0.999_593_047_982_555),
            (3.5, 0.999_999_256_901_627_7),
        ] {
            assert!((erf(x) - expected).abs() < 1e-14, "erf({x}) = {}", erf(x));
        }
    }
}
