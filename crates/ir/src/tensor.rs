//! A plain tensor in `f64` for the naive references.

use crate::types::{Shape, Type};

/// A contiguous tensor; integers are stored as `f64` too.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Dimensions.
    pub shape: Shape,
    /// Elements, row-major.
    pub data: Vec<f64>,
}

impl Tensor {
    /// A tensor of zeros.
    pub fn zeros(shape: impl Into<Shape>) -> Self {
        let shape = shape.into();
        let elements = shape.elements() as usize;
        Self {
            shape,
            data: vec![0.0; elements],
        }
    }

    /// Zeros of a type's shape.
    pub fn zeros_of(ty: &Type) -> Self {
        Self::zeros(ty.shape.clone())
    }

    /// A tensor of one element.
    pub fn scalar(value: f64) -> Self {
        Self {
            shape: [1].into(),
            data: vec![value],
        }
    }

    /// A tensor from its elements. The shape must have as many.
    pub fn new(shape: impl Into<Shape>, data: Vec<f64>) -> Self {
        let shape = shape.into();
        assert_eq!(shape.elements() as usize, data.len(), "shape {shape}");
        Self { shape, data }
    }

    /// All dimensions but the last, multiplied.
    pub fn rows(&self) -> usize {
        self.data.len() / self.cols().max(1)
    }

    /// The last dimension.
    pub fn cols(&self) -> usize {
        self.shape.0.last().map_or(1, |&d| d as usize)
    }

    /// One row.
    pub fn row(&self, row: usize) -> &[f64] {
        let cols = self.cols();
        &self.data[row * cols..(row + 1) * cols]
    }

    /// One row, to write.
    pub fn row_mut(&mut self, row: usize) -> &mut [f64] {
        let cols = self.cols();
        &mut self.data[row * cols..(row + 1) * cols]
    }

    /// Element-wise sum.
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            shape: self.shape.clone(),
            data: self.data.iter().zip(&other.data).map(|(a, b)| a + b).collect(),
        }
    }
}
