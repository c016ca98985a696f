//! A range of a matrix's rows, taken out and put back: what work on some rows at a time needs. Each is the other's gradient.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Accumulate, Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::Type;

/// `x: [T, N] → [rows, N]`, of one float dtype: the rows from `start` on. A copy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SliceRows {
    /// The first row taken.
    pub start: u64,
    /// How many are taken; at least 1.
    pub rows: u64,
}

impl Rule for SliceRows {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("slice_rows", inputs, 1)?;
        let x = check.float(0, "x", 2)?;
        check_range(&check, self.start, self.rows, x.dim(0))?;
        Ok(vec![Type::new(x.dtype, [self.rows, x.dim(1)])])
    }

    fn cost(&self, _inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost {
            flops: 0,
            bytes: outputs[0].bytes().saturating_mul(2),
        }
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        let pad = PadRows {
            start: self.start,
            total: g.dim(0, 0),
            accumulate: Accumulate::NONE,
        };
        let dx = g.emit(pad, &[dy])?[0];
        g.give(0, dx);
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let x = &inputs[0];
        let mut y = Tensor::zeros([self.rows, x.cols() as u64]);
        for t in 0..y.rows() {
            y.row_mut(t).copy_from_slice(x.row(self.start as usize + t));
        }
        vec![y]
    }
}

/// `x: [R, N] (, addend: [total, N]) → [total, N]`, all of one float dtype: row `start + t` is row `t` of `x`, plus that row of the
/// addend if there is one. All other rows are the addend's, or zero.
///
/// In place over the addend only the `R` rows are touched; elsewhere the addend is copied first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PadRows {
    /// The row of the result that the first row of `x` goes to.
    pub start: u64,
    /// Rows of the result.
    pub total: u64,
    /// Result 0 may accumulate.
    #[serde(default, skip_serializing_if = "Accumulate::is_none")]
    pub accumulate: Accumulate,
}

impl Rule for PadRows {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("pad_rows", inputs, 1 + self.accumulate.count())?;
        let x = check.float(0, "x", 2)?;
        check_range(&check, self.start, x.dim(0), self.total)?;
        let y = Type::new(x.dtype, [self.total, x.dim(1)]);
        if let Some(addend) = self.accumulate.operand(1, 0) {
            check.exactly(addend, "the addend", &y)?;
        }
        Ok(vec![y])
    }

    /// In place, where it accumulates: its rows are read twice and written.
    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        if self.accumulate.is_none() {
            return Cost::touching(0, inputs, outputs);
        }
        Cost {
            flops: inputs[0].shape.elements(),
            bytes: inputs[0].bytes().saturating_mul(3),
        }
    }

    fn aliases(&self) -> Vec<Alias> {
        self.accumulate.aliases(1).collect()
    }

    fn accumulating(&self, output: usize) -> Option<(Op, usize)> {
        let (accumulate, addend) = self.accumulate.with(1, output);
        let op = Self {
            accumulate,
            ..self.clone()
        };
        Some((op.into(), addend))
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        if g.wants(0) {
            let slice = SliceRows {
                start: self.start,
                rows: g.dim(0, 0),
            };
            let dx = g.emit(slice, &[dy])?[0];
            g.give(0, dx);
        }
        if let Some(addend) = self.accumulate.operand(1, 0) {
            g.give(addend, dy);
        }
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let x = &inputs[0];
        let mut y = match self.accumulate.operand(1, 0) {
            Some(addend) => inputs[addend].clone(),
            None => Tensor::zeros([self.total, x.cols() as u64]),
        };
        for t in 0..x.rows() {
            for (y, x) in y.row_mut(self.start as usize + t).iter_mut().zip(x.row(t)) {
                *y += x;
            }
        }
        vec![y]
    }
}

/// Rows `start..start + rows` must be some of `total`.
fn check_range(check: &Check<'_>, start: u64, rows: u64, total: u64) -> Result<(), OpError> {
    check.positive("rows", rows)?;
    if start.checked_add(rows).is_none_or(|end| end > total) {
        return check.invalid(format!("{rows} rows from row {start} on do not lie in {total}"));
    }
    Ok(())
}
