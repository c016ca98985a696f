//! Rotary position embedding (Su et al. 2021, arXiv:2104.09864), in the half-split layout of Hugging Face's LLaMA.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::rope_scaling::RopeScaling;
use super::{Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::Type;

/// `positions: i32[T] → table: f32[T, head_dim]`: the cosines of each row's angles, then their sines.
///
/// Angle `i` of position `p` is `p` times [`inverse_frequency(i)`](Self::inverse_frequency), rounded to `f32` as Hugging Face
/// does: what a model was trained with, and at long contexts far from the exact angle. Made once per run, used by every layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeTable {
    /// Elements of a head; even.
    pub head_dim: u64,
    /// `rope_theta`.
    pub theta: f64,
    /// `rope_scaling`: how the frequencies are stretched for contexts longer than a model was first trained on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scaling: Option<RopeScaling>,
}

impl RopeTable {
    /// The angle between a position and the next, of pair `i < head_dim/2`: `1/theta^(2i/head_dim)`, scaled.
    ///
    /// Every step is rounded to `f32` as Hugging Face rounds it, which at long contexts decides over the angle. The power is the
    /// correctly rounded one; PyTorch's may be off by its last bit.
    pub fn inverse_frequency(&self, i: u64) -> f32 {
        let exponent = (2 * i) as f32 / self.head_dim as f32;
        let power = f64::from(self.theta as f32).powf(f64::from(exponent)) as f32;
        let frequency = 1.0 / power;
        self.scaling.map_or(frequency, |scaling| scaling.apply(frequency))
    }

    /// The inverse frequencies of all pairs, in order.
    pub fn inverse_frequencies(&self) -> impl Iterator<Item = f32> + '_ {
        (0..self.head_dim / 2).map(|i| self.inverse_frequency(i))
    }
}

impl Rule for RopeTable {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("rope_table", inputs, 1)?;
        let rows = inputs[0].dim(0);
        check.ids(0, "positions", rows)?;
        even_head_dim(&check, self.head_dim)?;
        check.positive_f32("theta", self.theta)?;
        self.scaling.map_or(Ok(()), |scaling| scaling.check(&check))?;
        Ok(vec![Type::f32([rows, self.head_dim])])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(outputs[0].shape.elements().saturating_mul(20), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    /// Positions are integers: there is nothing to give.
    fn gradient(&self, _g: &mut Gradient<'_>) -> Result<(), OpError> {
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let positions = &inputs[0].data;
        let half = self.head_dim as usize / 2;
        let mut table = Tensor::zeros([positions.len() as u64, self.head_dim]);
        for (t, position) in positions.iter().enumerate() {
            for (i, frequency) in self.inverse_frequencies().enumerate() {
                let angle = f64::from(*position as f32 * frequency);
                table.row_mut(t)[i] = angle.cos();
                table.row_mut(t)[half + i] = angle.sin();
            }
        }
        vec![table]
    }
}

/// Halves of a head rotate against each other.
fn even_head_dim(check: &Check<'_>, head_dim: u64) -> Result<(), OpError> {
    check.positive("head_dim", head_dim)?;
    if !head_dim.is_multiple_of(2) {
        return check.invalid(format!("head_dim is {head_dim}, expected an even number"));
    }
    Ok(())
}

/// `x: [T, heads·head_dim], table: f32[T, head_dim] → [T, heads·head_dim]`: each head's halves `(a, b)` become
/// `(a·cos − b·sin, b·cos + a·sin)`. `x` is of any float dtype, the result of the same.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Rotate backwards: the gradient of the rotation.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub inverse: bool,
}

impl Rule for Rope {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("rope", inputs, 2)?;
        let x = check.float(0, "x", 2)?;
        let table = check.float(1, "table", 2)?;
        check.exactly(1, "table", &Type::f32([x.dim(0), table.dim(1)]))?;
        even_head_dim(&check, table.dim(1))?;
        if !x.dim(1).is_multiple_of(table.dim(1)) {
            return check.invalid(format!(
                "x has {} columns, which head_dim {} does not divide",
                x.dim(1),
                table.dim(1)
            ));
        }
        Ok(vec![x.clone()])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(inputs[0].shape.elements().saturating_mul(3), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        vec![Alias::in_place(0, 0)]
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        let backward = Rope { inverse: !self.inverse };
        let dx = g.emit(backward, &[dy, g.input(1)])?[0];
        g.give(0, dx);
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let (x, table) = (&inputs[0], &inputs[1]);
        let half = table.cols() / 2;
        let sign = if self.inverse { -1.0 } else { 1.0 };
        let mut y = x.clone();
        for t in 0..x.rows() {
            let (cos, sin) = table.row(t).split_at(half);
            for head in y.row_mut(t).chunks_mut(2 * half) {
                for i in 0..half {
                    let (a, b, s) = (head[i], head[half + i], sign * sin[i]);
                    head[i] = a * cos[i] - b * s;
                    head[half + i] = b * cos[i] + a * s;
                }
            }
        }
        vec![y]
    }
}
