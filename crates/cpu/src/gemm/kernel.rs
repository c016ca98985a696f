//! The micro-kernel: a tile of C in registers, one row of B and one column of A at a time.

use super::blocking::{self, Sizes};
use super::output::Output;
use super::terms::Terms;
use crate::simd::{Portable, Simd};

/// Vectors in a row of the register tile.
pub(super) const VECTORS: usize = 2;

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

/// Computes a panel of C, `rows` high and `out.cols` wide.
///
/// # Safety
/// `rows` rows of `kc` words are readable at `a`, `a_stride` apart, `kc * nr` words at `b`, and
/// the output can be read and written as [`Gemm`](super::Gemm) says.
#[inline(always)]
pub(super) unsafe fn panel<S: Micro, T: Terms<S>>(
    s: S,
    t: T,
    rows: usize,
    kc: usize,
    (a, a_stride): (*const f32, usize),
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
                _ if S::SIZES.mr == 12 && left >= 12 => tile::<S, T, 12>(s, t, kc, a, a_stride, b, out),
                _ if S::SIZES.mr >= 6 && left >= 6 => tile::<S, T, 6>(s, t, kc, a, a_stride, b, out),
                _ if S::SIZES.mr >= 6 && left >= 3 => tile::<S, T, 3>(s, t, kc, a, a_stride, b, out),
                2.. => tile::<S, T, 2>(s, t, kc, a, a_stride, b, out),
                _ => tile::<S, T, 1>(s, t, kc, a, a_stride, b, out),
            };
        }
    }
}

/// Computes `M` rows of a panel and returns `M`.
///
/// # Safety
/// As for [`panel`] with `M` rows.
#[inline(always)]
unsafe fn tile<S: Micro, T: Terms<S>, const M: usize>(
    s: S,
    t: T,
    kc: usize,
    a: *const f32,
    a_stride: usize,
    b: *const f32,
    out: Output,
) -> usize {
    // SAFETY: the caller's contract.
    let start = unsafe { out.bias_row(s) };
    let mut acc = [start; M];
    let unrolled = kc - kc % S::SIZES.unroll;
    for p in (0..unrolled).step_by(S::SIZES.unroll) {
        for u in 0..S::SIZES.unroll {
            // SAFETY: row `p + u` of the panel of B and that column of `M` rows of A exist.
            unsafe { step(s, t, a.add(p + u), a_stride, b.add((p + u) * S::SIZES.nr), &mut acc) };
        }
    }
    for p in unrolled..kc {
        // SAFETY: as above.
        unsafe { step(s, t, a.add(p), a_stride, b.add(p * S::SIZES.nr), &mut acc) };
    }
    // SAFETY: the caller's contract.
    unsafe { out.write(s, &acc) };
    M
}

/// Adds one column of words of A times one row of B.
///
/// # Safety
/// `M` words, `a_stride` apart, are readable at `a`, and `nr` at `b`.
#[inline(always)]
unsafe fn step<S: Micro, T: Terms<S>, const M: usize>(
    s: S,
    t: T,
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
                acc[v] = t.multiply_add(s, a, b[v], acc[v]);
            }
        }
    }
}
