//! The operands of a product: floating-point numbers, or a quantised matrix.

use crate::floats::{Float, Floats};
use crate::simd::Simd;
use tightfit_quant::Block;

/// A matrix of floating-point numbers to read, stored in rows of contiguous numbers: as they are, or as its columns.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// The first number of the first stored row.
    pub data: Floats,
    /// Numbers from one stored row to the next.
    pub stride: usize,
    /// Whether stored rows are the matrix's columns.
    pub transposed: bool,
}

impl View {
    /// Rows of contiguous `f32`, `stride` apart.
    pub fn row_major(ptr: *const f32, stride: usize) -> View {
        View::rows_of(Floats::of(ptr), stride)
    }

    /// Rows of contiguous numbers, `stride` apart.
    pub fn rows_of(data: Floats, stride: usize) -> View {
        View {
            data,
            stride,
            transposed: false,
        }
    }

    /// The same matrix with rows and columns exchanged.
    pub fn transposed(self) -> View {
        View {
            transposed: !self.transposed,
            ..self
        }
    }
}

/// A matrix in a quantised format, whole.
#[derive(Clone, Copy, Debug)]
pub struct BlockView {
    /// How it is stored.
    pub block: Block,
    /// Its [`Block::bytes`] bytes.
    pub bytes: *const u8,
    /// Stored rows.
    pub rows: usize,
    /// Numbers in each of them.
    pub cols: usize,
    /// Whether stored rows are the matrix's columns.
    pub transposed: bool,
}

/// The right operand of a product.
#[derive(Clone, Copy, Debug)]
pub enum Matrix {
    /// Numbers as they are.
    Floats(View),
    /// Numbers that are decoded while they are packed.
    Block(BlockView),
}

impl From<View> for Matrix {
    fn from(view: View) -> Self {
        Self::Floats(view)
    }
}

impl Matrix {
    /// The same matrix with rows and columns exchanged.
    pub fn transposed(self) -> Self {
        match self {
            Self::Floats(view) => Self::Floats(view.transposed()),
            Self::Block(view) => Self::Block(BlockView {
                transposed: !view.transposed,
                ..view
            }),
        }
    }

    /// Whether stored rows are the matrix's columns.
    #[inline(always)]
    pub(super) fn is_transposed(&self) -> bool {
        match self {
            Self::Floats(view) => view.transposed,
            Self::Block(view) => view.transposed,
        }
    }

    /// Whether it is decoded.
    #[inline(always)]
    pub(super) fn is_block(&self) -> bool {
        matches!(self, Self::Block(_))
    }

    /// The numbers themselves, where they are words of `terms` terms of the sum with all of each stored row's `inner` terms in
    /// whole words: a pointer to the first and the words from one stored row to the next.
    #[inline(always)]
    pub(super) fn words(&self, terms: usize, inner: usize) -> Option<(*const f32, usize)> {
        let Self::Floats(view) = self else { return None };
        let data = view.data.address().cast_const().cast::<f32>();
        match (view.data.stored(), terms) {
            (Float::F32, 1) => Some((data, view.stride)),
            (Float::Bf16, 2) if view.stride.is_multiple_of(2) && inner.is_multiple_of(2) && data.is_aligned() => {
                Some((data, view.stride / 2))
            }
            _ => None,
        }
    }

    /// Numbers `start..start + len` of a stored row in `f32`, with zeros behind them to the end of a vector. Of a quantised matrix
    /// whole blocks.
    ///
    /// # Safety
    /// They are readable, and `len` floats, rounded up to whole vectors, writable at `out`.
    #[inline(always)]
    pub(super) unsafe fn read<S: Simd>(&self, s: S, row: usize, start: usize, len: usize, out: *mut f32) {
        // SAFETY: the caller's contract.
        unsafe {
            match self {
                Self::Floats(view) => {
                    let row = view.data.add(row * view.stride + start);
                    for j in (0..len).step_by(S::LANES) {
                        s.store(out.add(j), row.add(j).load(s, len - j));
                    }
                }
                Self::Block(view) => {
                    let &BlockView { block, rows, cols, .. } = view;
                    let bytes = block.bytes(rows as u64, cols as u64) as usize;
                    let bytes = std::slice::from_raw_parts(view.bytes, bytes);
                    // What a slice is made of must hold numbers.
                    out.write_bytes(0, len.next_multiple_of(S::LANES));
                    let out = std::slice::from_raw_parts_mut(out, len);
                    block.decode(bytes, rows, cols, row * cols + start, out);
                }
            }
        }
    }
}

/// What blocks of a product must be multiples of, so that no block of a quantised matrix is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Granularity {
    /// Terms of the sum.
    pub k: usize,
    /// Columns of the result.
    pub n: usize,
}

impl Granularity {
    /// For a matrix of that format.
    pub(super) fn of(block: Block, transposed: bool) -> Self {
        // At most 256.
        let along = block.row_multiple() as usize;
        match transposed {
            true => Self { k: along, n: 1 },
            false => Self { k: 1, n: along },
        }
    }
}
