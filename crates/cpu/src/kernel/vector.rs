//! Loops over rows in vectors.

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

/// The first `min(len, LANES)` floats of `p`, zero in the other lanes.
///
/// # Safety
/// Those floats are readable.
#[inline(always)]
pub unsafe fn load<S: Simd>(s: S, p: *const f32, len: usize) -> S::V {
    // SAFETY: the caller vouches for the floats that are read.
    unsafe {
        if len >= S::LANES {
            s.load(p)
        } else {
            s.load_first(p, len)
        }
    }
}

/// Writes the first `min(len, LANES)` lanes.
///
/// # Safety
/// Those floats are writable.
#[inline(always)]
pub unsafe fn store<S: Simd>(s: S, p: *mut f32, v: S::V, len: usize) {
    // SAFETY: the caller vouches for the floats that are written.
    unsafe {
        if len >= S::LANES {
            s.store(p, v)
        } else {
            s.store_first(p, v, len)
        }
    }
}

/// Like [`load`], from an optional array; zeros where there is none.
///
/// # Safety
/// The floats `i..i + min(len, LANES)` are readable.
#[inline(always)]
pub unsafe fn load_optional<S: Simd>(s: S, p: Option<*const f32>, i: usize, len: usize) -> S::V {
    match p {
        // SAFETY: the caller vouches for the floats that are read.
        Some(p) => unsafe { load(s, p.add(i), len) },
        None => s.splat(0.0),
    }
}

/// `Σ a[i] · b[i]` in four independent vectors, to hide the latency of the additions.
///
/// # Safety
/// `a` and `b` are readable for `n` floats.
#[inline(always)]
pub unsafe fn dot<S: Simd>(s: S, a: *const f32, b: *const f32, n: usize) -> f32 {
    let zero = s.splat(0.0);
    let (mut s0, mut s1, mut s2, mut s3) = (zero, zero, zero, zero);
    let mut i = 0;
    // SAFETY: every access is below `n`.
    unsafe {
        while i + 4 * S::LANES <= n {
            let (j, k, l) = (i + S::LANES, i + 2 * S::LANES, i + 3 * S::LANES);
            s0 = s.fma(s.load(a.add(i)), s.load(b.add(i)), s0);
            s1 = s.fma(s.load(a.add(j)), s.load(b.add(j)), s1);
            s2 = s.fma(s.load(a.add(k)), s.load(b.add(k)), s2);
            s3 = s.fma(s.load(a.add(l)), s.load(b.add(l)), s3);
            i += 4 * S::LANES;
        }
        let (a, b) = (a.add(i), b.add(i));
        each_vector!(S, n - i, i, len => {
            s0 = s.fma(load(s, a.add(i), len), load(s, b.add(i), len), s0);
        });
    }
    s.reduce_add(s.add(s.add(s0, s1), s.add(s2, s3)))
}
