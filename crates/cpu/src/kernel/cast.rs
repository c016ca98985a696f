//! Numbers in another floating-point format.

use super::vector::convert;
use super::{Context, TILE};
use crate::floats::Floats;
use crate::multiversion;
use crate::simd::Simd;

/// `y = x`, rounded to how `y` is stored.
pub struct Cast {
    /// Number of elements.
    pub len: usize,
    /// Input, `len` numbers.
    pub x: Floats,
    /// Output, `len` numbers.
    pub y: Floats,
}

shared!(Cast);

/// Converts each element.
///
/// # Safety
/// See the [module](super).
pub unsafe fn cast(cx: &Context, args: &Cast) {
    cx.for_each(args.len.div_ceil(TILE), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { cast_tile(isa, args, tile) }
    });
}

multiversion! {
    unsafe fn cast_tile(args: &Cast, tile: usize) = cast_body;
}

#[inline(always)]
unsafe fn cast_body<S: Simd>(s: S, args: &Cast, tile: usize) {
    let start = tile * TILE;
    // SAFETY: the tile lies within `len`.
    unsafe { convert(s, args.x.add(start), args.y.add(start), TILE.min(args.len - start)) };
}
