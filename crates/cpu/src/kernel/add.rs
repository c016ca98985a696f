//! Residual addition, and filling with zeros.

use super::vector::{load, store};
use super::{Context, TILE};
use crate::floats::Floats;
use crate::multiversion;
use crate::simd::Simd;

/// `c = a + b`.
pub struct Add {
    /// Number of elements.
    pub len: usize,
    /// First operand, `len` numbers.
    pub a: Floats,
    /// Second operand, `len` numbers.
    pub b: Floats,
    /// Sum, `len` numbers; in place over `a` or `b`.
    pub c: Floats,
}

shared!(Add);

/// Elementwise sum.
///
/// # Safety
/// See the [module](super).
pub unsafe fn add(cx: &Context, args: &Add) {
    cx.for_each(args.len.div_ceil(TILE), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { add_tile(isa, args, tile) }
    });
}

multiversion! {
    unsafe fn add_tile(args: &Add, tile: usize) = add_body;
}

#[inline(always)]
unsafe fn add_body<S: Simd>(s: S, args: &Add, tile: usize) {
    let start = tile * TILE;
    // SAFETY: the tile lies within `len`.
    unsafe {
        let (a, b, c) = (args.a.add(start), args.b.add(start), args.c.add(start));
        each_vector!(S, TILE.min(args.len - start), i, len => {
            store(s, c.add(i), s.add(load(s, a.add(i), len), load(s, b.add(i), len)), len);
        });
    }
}

/// Fills `bytes` bytes at `p` with zeros.
///
/// # Safety
/// `p` is writable for `bytes` bytes; see the [module](super).
pub unsafe fn zero(cx: &Context, p: *mut u8, bytes: usize) {
    const STRIPE: usize = 256 * 1024;
    struct Target(*mut u8, usize);
    shared!(Target);
    let target = &Target(p, bytes);
    let fill = |target: &Target, start: usize| {
        // SAFETY: the stripe lies within `bytes`.
        unsafe { target.0.add(start).write_bytes(0, STRIPE.min(target.1 - start)) }
    };
    cx.for_each(bytes.div_ceil(STRIPE), |_, tile, _| fill(target, tile * STRIPE));
}
