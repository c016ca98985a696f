//! Token embedding and its gradient.

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Accumulate, Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::{DType, Type};

/// `ids: i32[T], weight: [V, H] → [T, H]`: one row of the table per token. Ids lie in `0..V`. The table is of any float dtype or
/// quantised.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embedding {
    /// The result's.
    #[serde(default = "f32", skip_serializing_if = "is_f32")]
    pub dtype: DType,
}

impl Default for Embedding {
    /// Rows in `f32`.
    fn default() -> Self {
        Self { dtype: f32() }
    }
}

fn f32() -> DType {
    DType::F32
}

fn is_f32(dtype: &DType) -> bool {
    *dtype == DType::F32
}

impl Rule for Embedding {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("embedding", inputs, 2)?;
        let rows = inputs[0].dim(0);
        check.ids(0, "ids", rows)?;
        let weight = check.table(1, "weight")?;
        check.float_dtype(self.dtype)?;
        Ok(vec![Type::new(self.dtype, [rows, weight.dim(1)])])
    }

    /// Of the table, the rows that are looked up.
    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        let looked_up = Type::new(inputs[1].dtype, outputs[0].shape.clone());
        Cost::touching(0, &[inputs[0], &looked_up], outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        if g.wants(1) {
            let backward = EmbeddingBackward {
                vocab_size: g.dim(1, 0),
                accumulate: Accumulate::NONE,
            };
            let dw = g.emit(backward, &[g.input(0), dy])?[0];
            g.give(1, dw);
        }
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [ids, weight] = inputs else { unreachable!() };
        let mut y = Tensor::zeros([ids.data.len() as u64, weight.cols() as u64]);
        for (t, &id) in ids.data.iter().enumerate() {
            y.row_mut(t).copy_from_slice(weight.row(id as usize));
        }
        vec![y]
    }
}

/// `ids: i32[T], dy: [T, H] → dweight: f32[V, H]`: rows of `dy`, of any float dtype, summed by token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EmbeddingBackward {
    /// `V`.
    pub vocab_size: u64,
    /// Result 0 may accumulate: a tied embedding's gradient is one buffer.
    #[serde(default, skip_serializing_if = "Accumulate::is_none")]
    pub accumulate: Accumulate,
}

impl Rule for EmbeddingBackward {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("embedding_backward", inputs, 2 + self.accumulate.count())?;
        let dy = check.float(1, "dy", 2)?;
        check.ids(0, "ids", dy.dim(0))?;
        let dw = Type::f32([self.vocab_size, dy.dim(1)]);
        if let Some(addend) = self.accumulate.operand(2, 0) {
            check.exactly(addend, "the addend", &dw)?;
        }
        Ok(vec![dw])
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        let touched = if self.accumulate.is_none() {
            outputs[0].bytes()
        } else {
            // A row of the result for each row of `dy`, read and written.
            Type::f32(inputs[1].shape.clone()).bytes().saturating_mul(2)
        };
        Cost {
            flops: inputs[1].shape.elements(),
            bytes: inputs[0]
                .bytes()
                .saturating_add(inputs[1].bytes())
                .saturating_add(touched),
        }
    }

    fn aliases(&self) -> Vec<Alias> {
        self.accumulate.aliases(2).collect()
    }

    fn accumulating(&self, output: usize) -> Option<(Op, usize)> {
        let (accumulate, addend) = self.accumulate.with(2, output);
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
        let (ids, dy) = (&inputs[0], &inputs[1]);
        let mut dw = Tensor::zeros([self.vocab_size, dy.cols() as u64]);
        for (t, &id) in ids.data.iter().enumerate() {
            for (w, d) in dw.row_mut(id as usize).iter_mut().zip(dy.row(t)) {
                *w += d;
            }
        }
        self.accumulate.add_to(2, inputs, vec![dw])
    }
}
