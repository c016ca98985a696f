//! The micro-kernel: a tile of C in registers, one row of B and one column of A at a time.

use super::Gemm;
use super::blocking::{self, Sizes};
use crate::simd::{Portable, Simd};
use std::mem::MaybeUninit;

/// Vectors in a row of the register tile.
const VECTORS: usize = 2;

/// An instruction set that the product is tuned for.
pub(super) trait Micro: Simd {
    const SIZES: Sizes;
}

#[cfg(target_arch = "x86_64")]
impl Micro for crate::simd::Avx512 {
    const SIZES: Sizes = blocking::AVX512;
}

#[cfg(target_arch = "x86_64")]
impl Micro for crate::simd::Avx2 {
    const SIZES: Sizes = blocking::AVX2;
}

impl Micro for Portable {
    const SIZES: Sizes = blocking::PORTABLE;
}

/// Where a panel of C goes and what is added to it. A null pointer adds nothing.
#[derive(Clone, Copy)]
pub(super) struct Output {
    c: *mut f32,
    c_stride: usize,
    add: *const f32,
    add_stride: usize,
    bias: *const f32,
    /// Columns, at most `nr`.
    cols: usize,
}

impl Output {
    /// The panel whose upper left corner is element (i, j). The `first` block of the sum brings D
    /// and bias in, the others accumulate.
    ///
    /// # Safety
    /// That element exists.
    #[inline(always)]
    pub(super) unsafe fn of(gemm: &Gemm, first: bool, i: usize, j: usize, cols: usize) -> Output {
        // SAFETY: the element exists in C, so it does in D and bias.
        unsafe {
            let c = gemm.c.add(i * gemm.c_stride + j);
            let (add, add_stride, bias) = match (first, gemm.add) {
                (false, _) => (c.cast_const(), gemm.c_stride, None),
                (true, Some((d, stride))) => (d.add(i * stride + j), stride, gemm.bias),
                // A stride of zero keeps the null pointer null further down.
                (true, None) => (std::ptr::null(), 0, gemm.bias),
            };
            let bias = bias.map_or(std::ptr::null(), |bias| bias.add(j));
            Output {
                c,
                c_stride: gemm.c_stride,
                add,
                add_stride,
                bias,
                cols,
            }
        }
    }

    /// Moves down by `rows`.
    #[inline(always)]
    fn down(self, rows: usize) -> Output {
        let add = self.add.wrapping_add(rows * self.add_stride);
        Output {
            c: self.c.wrapping_add(rows * self.c_stride),
            add,
            ..self
        }
    }

    /// The bias of the panel's columns.
    ///
    /// # Safety
    /// `cols` floats of bias are readable.
    #[inline(always)]
    unsafe fn bias_row<S: Micro>(&self, s: S) -> [S::V; VECTORS] {
        let right = self.bias.wrapping_add(S::LANES);
        // SAFETY: only floats below `cols` are touched.
        unsafe {
            [
                s.load_first(self.bias, self.cols),
                s.load_first(right, self.right_cols::<S>()),
            ]
        }
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
    unsafe fn write<S: Micro, const M: usize>(&self, s: S, sums: &[[S::V; VECTORS]; M]) {
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

/// Computes a panel of C, `rows` high and `out.cols` wide.
///
/// # Safety
/// `rows` rows of `kc` floats are readable at `a`, `a_stride` apart, `kc * nr` floats at `b`, and
/// the output can be read and written as [`Gemm`] says.
#[inline(always)]
pub(super) unsafe fn panel<S: Micro>(
    s: S,
    rows: usize,
    kc: usize,
    a: *const f32,
    a_stride: usize,
    b: *const f32,
    out: Output,
) {
    let mut i = 0;
    while i < rows {
        // SAFETY: `step` rows are left.
        unsafe {
            let (a, out) = (a.add(i * a_stride), out.down(i));
            let left = rows - i;
            i += match left {
                _ if S::SIZES.mr == 12 && left >= 12 => tile::<S, 12>(s, kc, a, a_stride, b, out),
                _ if S::SIZES.mr >= 6 && left >= 6 => tile::<S, 6>(s, kc, a, a_stride, b, out),
                _ if S::SIZES.mr >= 6 && left >= 3 => tile::<S, 3>(s, kc, a, a_stride, b, out),
                2.. => tile::<S, 2>(s, kc, a, a_stride, b, out),
                _ => tile::<S, 1>(s, kc, a, a_stride, b, out),
            };
        }
    }
}

/// Computes `M` rows of a panel and returns `M`.
///
/// # Safety
/// As for [`panel`] with `M` rows.
#[inline(always)]
unsafe fn tile<S: Micro, const M: usize>(
    s: S,
    kc: usize,
    a: *const f32,
    a_stride: usize,
    b: *const f32,
    out: Output,
) -> usize {
    // SAFETY: `cols` floats of bias are readable.
    let start = unsafe {
        if out.bias.is_null() {
            [s.splat(0.0); VECTORS]
        } else {
            out.bias_row(s)
        }
    };
    let mut acc = [start; M];
    let unrolled = kc - kc % S::SIZES.unroll;
    for p in (0..unrolled).step_by(S::SIZES.unroll) {
        for u in 0..S::SIZES.unroll {
            // SAFETY: row `p + u` of the panel of B and that column of `M` rows of A exist.
            unsafe { step(s, a.add(p + u), a_stride, b.add((p + u) * S::SIZES.nr), &mut acc) };
        }
    }
    for p in unrolled..kc {
        // SAFETY: as above.
        unsafe { step(s, a.add(p), a_stride, b.add(p * S::SIZES.nr), &mut acc) };
    }
    // SAFETY: the caller's contract.
    unsafe { out.write(s, &acc) };
    M
}

/// Adds one column of A times one row of B.
///
/// # Safety
/// `M` floats, `a_stride` apart, are readable at `a`, and `nr` at `b`.
#[inline(always)]
unsafe fn step<S: Micro, const M: usize>(
    s: S,
    a: *const f32,
    a_stride: usize,
    b: *const f32,
    acc: &mut [[S::V; VECTORS]; M],
) {
    // SAFETY: the caller's contract.
    unsafe {
        let b = [s.load(b), s.load(b.add(S::LANES))];
        for (i, acc) in acc.iter_mut().enumerate() {
            let a = s.splat(*a.add(i * a_stride));
            for v in 0..VECTORS {
                acc[v] = s.fma(a, b[v], acc[v]);
            }
        }
    }
}
