//! Checks that the type rules share.

use super::OpError;
use crate::types::{DType, Type};

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

    /// Operand `index` as `f32` of that rank.
    pub fn float(&self, index: usize, what: &str, rank: usize) -> Result<&'a Type, OpError> {
        self.operand(index, what, DType::F32, rank)
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

    fn operand(&self, index: usize, what: &str, dtype: DType, rank: usize) -> Result<&'a Type, OpError> {
        let ty = &self.inputs[index];
        if ty.dtype != dtype || ty.shape.dims().len() != rank {
            return self.invalid(format!("{what} is {ty}, expected {} of rank {rank}", dtype.name()));
        }
        Ok(ty)
    }
}
