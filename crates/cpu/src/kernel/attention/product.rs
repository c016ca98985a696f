//! Small matrix products on blocks that lie in cache, and block transposition.

use crate::simd::Simd;

/// Rows of a register tile: with two vectors per row, 12 of AVX2's 16 registers accumulate.
const MR: usize = 6;

/// A strided matrix that is read element by element.
#[derive(Clone, Copy)]
pub struct Left {
    /// First element.
    pub p: *const f32,
    /// Distance between rows.
    pub row: usize,
    /// Distance between columns.
    pub col: usize,
}

/// Whether a product replaces its target or is added to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Into {
    /// `C = A · B`
    Replace,
    /// `C += A · B`
    Add,
}

/// Columns that a product computes at once.
pub const fn panel<S: Simd>() -> usize {
    2 * S::LANES
}

/// `C[m, n] = A[m, k] · B[k, n]`, or `+=`; `n` is a multiple of [`panel`], rows of `B` and `C` are
/// `ldb` and `ldc` apart.
///
/// # Safety
/// The matrices are valid for their shapes and `C` overlaps neither operand.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
pub unsafe fn product<S: Simd>(
    s: S,
    into: Into,
    (m, n, k): (usize, usize, usize),
    a: Left,
    b: *const f32,
    ldb: usize,
    c: *mut f32,
    ldc: usize,
) {
    debug_assert!(n.is_multiple_of(panel::<S>()));
    for j in (0..n).step_by(panel::<S>()) {
        let mut i = 0;
        // SAFETY: tiles of rows `i..` and columns `j..`, within the shapes.
        unsafe {
            let b = b.add(j);
            while i < m {
                let a = Left {
                    p: a.p.add(i * a.row),
                    ..a
                };
                let c = c.add(i * ldc + j);
                match m - i {
                    1 => tile::<S, 1>(s, into, k, a, b, ldb, c, ldc),
                    2 => tile::<S, 2>(s, into, k, a, b, ldb, c, ldc),
                    3 => tile::<S, 3>(s, into, k, a, b, ldb, c, ldc),
                    4 => tile::<S, 4>(s, into, k, a, b, ldb, c, ldc),
                    5 => tile::<S, 5>(s, into, k, a, b, ldb, c, ldc),
                    _ => tile::<S, MR>(s, into, k, a, b, ldb, c, ldc),
                }
                i += MR;
            }
        }
    }
}

/// One register tile: `R` rows of two vectors.
///
/// # Safety
/// As for [`product`].
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn tile<S: Simd, const R: usize>(
    s: S,
    into: Into,
    k: usize,
    a: Left,
    b: *const f32,
    ldb: usize,
    c: *mut f32,
    ldc: usize,
) {
    let mut acc = [[s.splat(0.0); 2]; R];
    // SAFETY: within the shapes that the caller vouches for.
    unsafe {
        for p in 0..k {
            let b0 = s.load(b.add(p * ldb));
            let b1 = s.load(b.add(p * ldb + S::LANES));
            let a_col = a.p.add(p * a.col);
            for (r, acc) in acc.iter_mut().enumerate() {
                let x = s.splat(*a_col.add(r * a.row));
                acc[0] = s.fma(x, b0, acc[0]);
                acc[1] = s.fma(x, b1, acc[1]);
            }
        }
        for (r, acc) in acc.into_iter().enumerate() {
            let (c0, c1) = (c.add(r * ldc), c.add(r * ldc + S::LANES));
            match into {
                Into::Replace => {
                    s.store(c0, acc[0]);
                    s.store(c1, acc[1]);
                }
                Into::Add => {
                    s.store(c0, s.add(s.load(c0), acc[0]));
                    s.store(c1, s.add(s.load(c1), acc[1]));
                }
            }
        }
    }
}

/// `dst[j, i] = src[i, j]` for `i < rows`, `j < cols`.
///
/// # Safety
/// Both are valid for the shape with their strides, without overlap.
#[inline(always)]
pub unsafe fn transpose<S: Simd>(
    s: S,
    (rows, cols): (usize, usize),
    src: *const f32,
    src_stride: usize,
    dst: *mut f32,
    dst_stride: usize,
) {
    let (whole_rows, whole_cols) = (rows / 8 * 8, cols / 8 * 8);
    // SAFETY: within the shapes that the caller vouches for.
    unsafe {
        for i in (0..whole_rows).step_by(8) {
            for j in (0..whole_cols).step_by(8) {
                let (src, dst) = (src.add(i * src_stride + j), dst.add(j * dst_stride + i));
                s.transpose8(src, src_stride, dst, dst_stride);
            }
        }
        for i in 0..rows {
            let first = if i < whole_rows { whole_cols } else { 0 };
            for j in first..cols {
                *dst.add(j * dst_stride + i) = *src.add(i * src_stride + j);
            }
        }
    }
}
