//! Where sums go: straight to C, or to C by way of the workspace.

use super::Gemm;
use super::kernel::{Micro, VECTORS};
use crate::floats::Floats;
use crate::simd::Simd;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Where a panel of sums goes and what is added to it. A null pointer adds nothing.
#[derive(Clone, Copy)]
pub(super) struct Output {
    c: *mut f32,
    c_stride: usize,
    add: *const f32,
    add_stride: usize,
    bias: Option<Floats>,
    /// Columns, at most `nr`.
    cols: usize,
}

impl Output {
    /// The panel of an `f32` C whose upper left corner is element (i, j). The `first` block of the sum brings D
    /// and bias in, the others accumulate.
    ///
    /// # Safety
    /// That element exists.
    #[inline(always)]
    pub(super) unsafe fn of(gemm: &Gemm, first: bool, i: usize, j: usize, cols: usize) -> Output {
        // SAFETY: the element exists in C, so it does in D and bias.
        unsafe {
            let c = gemm.c.add(i * gemm.c_stride + j).address().cast::<f32>();
            let (add, add_stride, bias) = match (first, gemm.add) {
                (false, _) => (c.cast_const(), gemm.c_stride, None),
                (true, Some((d, stride))) => {
                    let d = d.add(i * stride + j).address();
                    (d.cast::<f32>().cast_const(), stride, gemm.bias)
                }
                // A stride of zero keeps the null pointer null further down.
                (true, None) => (std::ptr::null(), 0, gemm.bias),
            };
            Output {
                c,
                c_stride: gemm.c_stride,
                add,
                add_stride,
                bias: bias.map(|bias| bias.add(j)),
                cols,
            }
        }
    }

    /// A panel of sums in the workspace, which the `first` block writes and the others add to.
    #[inline(always)]
    pub(super) fn sums(sums: *mut f32, stride: usize, first: bool, cols: usize) -> Output {
        let (add, add_stride) = match first {
            true => (std::ptr::null(), 0),
            false => (sums.cast_const(), stride),
        };
        Output {
            c: sums,
            c_stride: stride,
            add,
            add_stride,
            bias: None,
            cols,
        }
    }

    /// Moves down by `rows`.
    #[inline(always)]
    pub(super) fn down(self, rows: usize) -> Output {
        let add = self.add.wrapping_add(rows * self.add_stride);
        Output {
            c: self.c.wrapping_add(rows * self.c_stride),
            add,
            ..self
        }
    }

    /// The bias of the panel's columns, or zeros.
    ///
    /// # Safety
    /// `cols` numbers of bias are readable.
    #[inline(always)]
    pub(super) unsafe fn bias_row<S: Micro>(&self, s: S) -> [S::V; VECTORS] {
        let mut row = [s.splat(0.0); VECTORS];
        if let Some(bias) = self.bias {
            // SAFETY: only numbers below `cols` are touched.
            unsafe {
                row[0] = bias.load(s, self.cols);
                if self.cols > S::LANES {
                    row[1] = bias.add(S::LANES).load(s, self.right_cols::<S>());
                }
            }
        }
        row
    }

    /// Columns in the right one of the two vectors.
    #[inline(always)]
    fn right_cols<S: Simd>(&self) -> usize {
        self.cols.saturating_sub(S::LANES)
    }

    /// Adds D to `M` rows of sums and stores them.
    ///
    /// The loops that touch `sums` are short enough to be unrolled, without which the sums would
    /// live in memory while they are computed.
    ///
    /// # Safety
    /// `cols` floats of `M` rows of D are readable, of C writable.
    #[inline(always)]
    pub(super) unsafe fn write<S: Micro, const M: usize>(&self, s: S, sums: &[[S::V; VECTORS]; M]) {
        let whole = self.cols == S::SIZES.nr;
        // SAFETY: whole rows when there are as many columns, the first `cols` floats otherwise.
        unsafe {
            if whole && self.add.is_null() {
                for (i, sums) in sums.iter().enumerate() {
                    let c = self.c.add(i * self.c_stride);
                    s.store(c, sums[0]);
                    s.store(c.add(S::LANES), sums[1]);
                }
            } else if whole {
                for (i, sums) in sums.iter().enumerate() {
                    let c = self.c.add(i * self.c_stride);
                    let add = self.add.add(i * self.add_stride);
                    s.store(c, s.add(sums[0], s.load(add)));
                    s.store(c.add(S::LANES), s.add(sums[1], s.load(add.add(S::LANES))));
                }
            } else {
                let mut rows = MaybeUninit::<[[S::V; VECTORS]; M]>::uninit();
                let rows = rows.as_mut_ptr().cast::<f32>();
                for (i, sums) in sums.iter().enumerate() {
                    s.store(rows.add(i * S::SIZES.nr), sums[0]);
                    s.store(rows.add(i * S::SIZES.nr + S::LANES), sums[1]);
                }
                for i in 0..M {
                    for (at, left) in [(0, self.cols), (S::LANES, self.right_cols::<S>())] {
                        let mut sum = s.load(rows.add(i * S::SIZES.nr + at));
                        if !self.add.is_null() {
                            let add = self.add.wrapping_add(i * self.add_stride + at);
                            sum = s.add(sum, s.load_first(add, left));
                        }
                        let c = self.c.wrapping_add(i * self.c_stride + at);
                        s.store_first(c, sum, left);
                    }
                }
            }
        }
    }
}

/// Rounds a tile of complete sums to C, with D and bias added.
///
/// # Safety
/// The rows and columns are inside of C, and as many sums are readable, `stride` apart.
#[inline(always)]
pub(super) unsafe fn round<S: Simd>(
    s: S,
    gemm: &Gemm,
    (rows, columns): (Range<usize>, Range<usize>),
    sums: *const f32,
    stride: usize,
) {
    for (row, i) in rows.enumerate() {
        for j in columns.clone().step_by(S::LANES) {
            let left = columns.end - j;
            // SAFETY: the caller's contract.
            unsafe {
                let mut sum = match gemm.k {
                    0 => s.splat(0.0),
                    _ => Floats::of(sums.add(row * stride + j - columns.start)).load(s, left),
                };
                if let Some(bias) = gemm.bias {
                    sum = s.add(sum, bias.add(j).load(s, left));
                }
                if let Some((d, d_stride)) = gemm.add {
                    sum = s.add(sum, d.add(i * d_stride + j).load(s, left));
                }
                gemm.c.add(i * gemm.c_stride + j).store(s, sum, left);
            }
        }
    }
}
