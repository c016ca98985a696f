//! Loops over rows in vectors.

use crate::floats::{Float, Floats};
use crate::simd::Simd;

/// Runs a block for each vector of `0..n`: first whole vectors, then what remains.
///
/// `each_vector!(S, n, i, len => { … })`: `i` is the first element, `len` how many there are. In
/// the first expansion of the block `len` is the constant `S::LANES`, so [`load`] and [`store`]
/// become plain vector moves.
macro_rules! each_vector {
    ($simd:ident, $n:expr, $i:ident, $len:ident => $body:block) => {{
        let n: usize = $n;
        let mut $i = 0;
        while $i + $simd::LANES <= n {
            let $len = $simd::LANES;
            $body
            $i += $simd::LANES;
        }
        if $i < n {
            let $len = n - $i;
            $body
        }
    }};
}

/// Lets threads share the argument structs named.
macro_rules! shared {
    ($($args:ty),+) => {$(
        // SAFETY: arguments are only read; what their pointers lead to is split between tiles
        // without overlap, and the caller of a kernel vouches for it.
        unsafe impl Sync for $args {}
    )+};
}

/// The first `min(len, LANES)` numbers of `p`, zero in the other lanes.
///
/// Of a pointer to `f32` this is a plain load; otherwise it asks how the numbers are stored, see [`Floats`].
///
/// # Safety
/// Those numbers are readable.
#[inline(always)]
pub unsafe fn load<S: Simd>(s: S, p: impl Into<Floats>, len: usize) -> S::V {
    // SAFETY: the caller vouches for the numbers that are read.
    unsafe { p.into().load(s, len) }
}

/// Writes the first `min(len, LANES)` lanes, rounded to how the numbers at `p` are stored.
///
/// # Safety
/// Those numbers are writable.
#[inline(always)]
pub unsafe fn store<S: Simd>(s: S, p: impl Into<Floats>, v: S::V, len: usize) {
    // SAFETY: the caller vouches for the numbers that are written.
    unsafe { p.into().store(s, v, len) }
}

/// Like [`load`], from an optional array; zeros where there is none.
///
/// # Safety
/// The numbers `i..i + min(len, LANES)` are readable.
#[inline(always)]
pub unsafe fn load_optional<S: Simd>(s: S, p: Option<impl Into<Floats>>, i: usize, len: usize) -> S::V {
    match p {
        // SAFETY: the caller vouches for the numbers that are read.
        Some(p) => unsafe { p.into().add(i).load(s, len) },
        None => s.splat(0.0),
    }
}

/// `Σ a[i] · b[i]` in four independent vectors, to hide the latency of the additions.
///
/// # Safety
/// `a` and `b` are readable for `n` numbers.
#[inline(always)]
pub unsafe fn dot<S: Simd>(s: S, a: impl Into<Floats>, b: impl Into<Floats>, n: usize) -> f32 {
    let (a, b) = (a.into(), b.into());
    let zero = s.splat(0.0);
    let (mut s0, mut s1, mut s2, mut s3) = (zero, zero, zero, zero);
    let lanes = S::LANES;
    let mut i = 0;
    // SAFETY: every access is below `n`.
    unsafe {
        while i + 4 * lanes <= n {
            let (j, k, l) = (i + lanes, i + 2 * lanes, i + 3 * lanes);
            s0 = s.fma(a.add(i).load(s, lanes), b.add(i).load(s, lanes), s0);
            s1 = s.fma(a.add(j).load(s, lanes), b.add(j).load(s, lanes), s1);
            s2 = s.fma(a.add(k).load(s, lanes), b.add(k).load(s, lanes), s2);
            s3 = s.fma(a.add(l).load(s, lanes), b.add(l).load(s, lanes), s3);
            i += 4 * lanes;
        }
        let (a, b) = (a.add(i), b.add(i));
        each_vector!(S, n - i, i, len => {
            s0 = s.fma(a.add(i).load(s, len), b.add(i).load(s, len), s0);
        });
    }
    s.reduce_add(s.add(s.add(s0, s1), s.add(s2, s3)))
}

/// Copies `n` numbers, converted to how they are stored at `to`.
///
/// # Safety
/// They are readable at `from` and writable at `to`, without overlap.
#[inline(always)]
pub unsafe fn convert<S: Simd>(s: S, from: impl Into<Floats>, to: impl Into<Floats>, n: usize) {
    let (from, to) = (from.into(), to.into());
    // There is so little to a step that a loop for each way is worth its code.
    let stored_as = |stored| Floats::new(from.address(), stored);
    // SAFETY: the caller's contract.
    unsafe {
        match from.stored() {
            Float::F32 => convert_each(s, stored_as(Float::F32), to, n),
            Float::Bf16 => convert_each(s, stored_as(Float::Bf16), to, n),
            Float::F16 => convert_each(s, stored_as(Float::F16), to, n),
        }
    }
}

/// # Safety
/// As for [`convert`].
#[inline(always)]
unsafe fn convert_each<S: Simd>(s: S, from: Floats, to: Floats, n: usize) {
    // SAFETY: every access is below `n`.
    unsafe {
        each_vector!(S, n, i, len => {
            to.add(i).store(s, from.add(i).load(s, len), len);
        });
    }
}

/// [`convert`] for a block of rows, whose strides count numbers.
///
/// # Safety
/// Both are valid for the shape with their strides, without overlap.
#[inline(always)]
pub unsafe fn copy_rows<S: Simd>(
    s: S,
    (rows, cols): (usize, usize),
    from: Floats,
    from_stride: usize,
    to: Floats,
    to_stride: usize,
) {
    for row in 0..rows {
        // SAFETY: the caller vouches for each row.
        unsafe { convert(s, from.add(row * from_stride), to.add(row * to_stride), cols) };
    }
}

/// A block of rows as `f32` with its stride: where it is if it is stored so, otherwise a dense copy at `copy`.
///
/// # Safety
/// The block is readable; `copy` is writable for it where it is not stored as `f32`.
#[inline(always)]
pub unsafe fn as_f32<S: Simd>(
    s: S,
    (rows, cols): (usize, usize),
    block: Floats,
    stride: usize,
    copy: *mut f32,
) -> (*const f32, usize) {
    match block.stored() {
        Float::F32 => (block.address().cast_const().cast(), stride),
        Float::Bf16 | Float::F16 => {
            // SAFETY: the caller's contract.
            unsafe { copy_rows(s, (rows, cols), block, stride, copy.into(), cols) };
            (copy.cast_const(), cols)
        }
    }
}
