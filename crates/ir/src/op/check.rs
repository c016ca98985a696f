//! Checks that the type rules share.

use super::OpError;
use crate::types::{DType, Shape, Type};

/// The checks of one operation, which errors name.
pub(super) struct Check<'a> {
    op: &'static str,
    inputs: &'a [Type],
}

impl<'a> Check<'a> {
    /// Operands of `op`, which must be `expected` many.
    pub fn arity(op: &'static str, inputs: &'a [Type], expected: usize) -> Result<Self, OpError> {
        if inputs.len() != expected {
            return Err(OpError::Arity {
                op,
                expected,
                found: inputs.len(),
            });
        }
        Ok(Self { op, inputs })
    }

    /// An error with that message.
    pub fn invalid<T>(&self, message: String) -> Result<T, OpError> {
        Err(OpError::Invalid { op: self.op, message })
    }

    /// Operand `index` as `f32`, `bf16` or `f16` of any shape.
    pub fn floats(&self, index: usize, what: &str) -> Result<&'a Type, OpError> {
        let ty = &self.inputs[index];
        if !ty.dtype.is_float() {
            return self.invalid(format!("{what} is {ty}, expected floating-point numbers"));
        }
        Ok(ty)
    }

    /// Operand `index` as `f32`, `bf16` or `f16` of that rank.
    pub fn float(&self, index: usize, what: &str, rank: usize) -> Result<&'a Type, OpError> {
        let ty = &self.inputs[index];
        if !ty.dtype.is_float() || ty.shape.dims().len() != rank {
            return self.invalid(format!(
                "{what} is {ty}, expected floating-point numbers of rank {rank}"
            ));
        }
        Ok(ty)
    }

    /// Operand `index` as a matrix that is only read: floating-point numbers or a quantised format.
    pub fn table(&self, index: usize, what: &str) -> Result<&'a Type, OpError> {
        let ty = &self.inputs[index];
        match ty.dtype {
            DType::Block(block) if ty.shape.dims().len() == 2 => {
                let multiple = block.row_multiple();
                if !ty.cols().is_multiple_of(multiple) {
                    return self.invalid(format!("{what} is {ty}, whose columns are no multiple of {multiple}"));
                }
                Ok(ty)
            }
            _ => self.float(index, what, 2),
        }
    }

    /// Operand `index` as floating-point numbers of exactly that shape.
    pub fn shaped(&self, index: usize, what: &str, shape: impl Into<Shape>) -> Result<&'a Type, OpError> {
        let (ty, shape) = (&self.inputs[index], shape.into());
        if !ty.dtype.is_float() || ty.shape != shape {
            return self.invalid(format!("{what} is {ty}, expected floating-point numbers of {shape}"));
        }
        Ok(ty)
    }

    /// Operand `index` as `i32[rows]`.
    pub fn ids(&self, index: usize, what: &str, rows: u64) -> Result<&'a Type, OpError> {
        let ty = self.operand(index, what, DType::I32, 1)?;
        self.same(&format!("{what}'s rows"), ty.dim(0), "rows", rows)?;
        Ok(ty)
    }

    /// Operand `index` as exactly `ty`.
    pub fn exactly(&self, index: usize, what: &str, ty: &Type) -> Result<(), OpError> {
        if &self.inputs[index] != ty {
            return self.invalid(format!("{what} is {}, expected {ty}", self.inputs[index]));
        }
        Ok(())
    }

    /// The dtype of a result, which must be a float.
    pub fn float_dtype(&self, dtype: DType) -> Result<(), OpError> {
        if !dtype.is_float() {
            return self.invalid(format!("makes {}, expected f32, bf16 or f16", dtype.name()));
        }
        Ok(())
    }

    /// Two sizes that must agree.
    pub fn same(&self, what: &str, found: u64, as_what: &str, expected: u64) -> Result<(), OpError> {
        if found != expected {
            return self.invalid(format!("{what} is {found}, {as_what} is {expected}"));
        }
        Ok(())
    }

    /// A size that must not be zero.
    pub fn positive(&self, what: &str, size: u64) -> Result<(), OpError> {
        if size == 0 {
            return self.invalid(format!("{what} must be at least 1"));
        }
        Ok(())
    }

    /// Attention's heads: none is empty, `kv_heads` divides `heads`, and `q` has the columns of `heads`.
    pub fn heads(&self, q: &Type, heads: u64, kv_heads: u64, head_dim: u64) -> Result<(), OpError> {
        self.positive("heads", heads)?;
        self.positive("kv_heads", kv_heads)?;
        self.positive("head_dim", head_dim)?;
        if !heads.is_multiple_of(kv_heads) {
            return self.invalid(format!("heads is {heads}, which kv_heads {kv_heads} does not divide"));
        }
        self.same(
            "q's columns",
            q.dim(1),
            "heads·head_dim",
            heads.saturating_mul(head_dim),
        )
    }

    /// A number that kernels compute with in `f32`, and that must be positive and finite there.
    pub fn positive_f32(&self, what: &str, number: f64) -> Result<(), OpError> {
        let number = number as f32;
        if !(number.is_finite() && number > 0.0) {
            return self.invalid(format!("{what} is {number}, expected a positive number"));
        }
        Ok(())
    }

    fn operand(&self, index: usize, what: &str, dtype: DType, rank: usize) -> Result<&'a Type, OpError> {
        let ty = &self.inputs[index];
        if ty.dtype != dtype || ty.shape.dims().len() != rank {
            return self.invalid(format!("{what} is {ty}, expected {} of rank {rank}", dtype.name()));
        }
        Ok(ty)
    }
}
