//! Multiplication by a constant.

use super::{Context, TILE};
use crate::floats::Floats;
use crate::multiversion;
use crate::simd::Simd;

/// `y = by · x`.
pub struct Scale {
    /// Number of elements.
    pub len: usize,
    /// The factor.
    pub by: f32,
    /// Input, `len` numbers.
    pub x: Floats,
    /// Output, `len` numbers; in place over `x`.
    pub y: Floats,
}

shared!(Scale);

/// Elementwise product with a constant.
///
/// # Safety
/// See the [module](super).
pub unsafe fn scale(cx: &Context, args: &Scale) {
    cx.for_each(args.len.div_ceil(TILE), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { scale_tile(isa, args, tile) }
    });
}

multiversion! {
    unsafe fn scale_tile(args: &Scale, tile: usize) = scale_body;
}

#[inline(always)]
unsafe fn scale_body<S: Simd>(s: S, args: &Scale, tile: usize) {
    let start = tile * TILE;
    // SAFETY: the tile lies within `len`; each vector is read before it is written.
    unsafe {
        let (x, y, by) = (args.x.add(start), args.y.add(start), s.splat(args.by));
        each_vector!(S, TILE.min(args.len - start), i, len => {
            y.add(i).store(s, s.mul(x.add(i).load(s, len), by), len);
        });
    }
}
