//! The norm of all gradients together, for clipping.

use super::Context;
use super::vector::dot;
use crate::multiversion;
use crate::simd::{Isa, Simd};

/// `norm = √(Σ over buffers Σ g²)`.
pub struct GlobalNorm<'a> {
    /// How many buffers there are.
    pub buffers: usize,
    /// Each buffer: address and number of floats.
    pub buffer: &'a (dyn Fn(usize) -> (*const f32, usize) + 'a),
    /// Result, one float.
    pub norm: *mut f32,
    /// [`global_norm_workspace`] bytes.
    pub workspace: *mut u8,
}

shared!(GlobalNorm<'_>);

/// Floats whose squares are summed into one partial.
const BLOCK: usize = 64 * 1024;

/// Bytes of workspace for buffers of these lengths: one f64 partial per block.
pub fn global_norm_workspace(lengths: impl IntoIterator<Item = usize>) -> u64 {
    let blocks: usize = lengths.into_iter().map(|len| len.div_ceil(BLOCK)).sum();
    (blocks * size_of::<f64>()) as u64
}

/// Sums squares per block, then the blocks in order, in f64.
///
/// # Safety
/// See the [module](super).
pub unsafe fn global_norm(cx: &Context, args: &GlobalNorm) {
    let blocks = (0..args.buffers).map(|i| (args.buffer)(i).1.div_ceil(BLOCK)).sum();
    cx.for_each(blocks, |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { partial(isa, args, tile) }
    });
    // SAFETY: the partials that the tiles have written.
    let sum: f64 = (0..blocks)
        .map(|i| unsafe { *args.workspace.cast::<f64>().add(i) })
        .sum();
    // SAFETY: the caller's contract.
    unsafe { *args.norm = sum.sqrt() as f32 };
}

/// Sums block `tile`, counted over all buffers.
///
/// # Safety
/// The partial belongs to the caller.
unsafe fn partial(isa: Isa, args: &GlobalNorm, tile: usize) {
    let mut block = tile;
    for (p, len) in (0..args.buffers).map(args.buffer) {
        if block < len.div_ceil(BLOCK) {
            let start = block * BLOCK;
            // SAFETY: the block lies within its buffer, the partial within the workspace.
            unsafe {
                let sum = sum_squares(isa, p.add(start), BLOCK.min(len - start));
                *args.workspace.cast::<f64>().add(tile) = sum;
            }
            return;
        }
        block -= len.div_ceil(BLOCK);
    }
}

multiversion! {
    unsafe fn sum_squares(p: *const f32, n: usize) -> f64 = sum_squares_body;
}

#[inline(always)]
unsafe fn sum_squares_body<S: Simd>(s: S, p: *const f32, n: usize) -> f64 {
    // Short enough for f32 lanes to lose nothing that matters.
    const RUN: usize = 2048;
    let mut sum = 0.0;
    for start in (0..n).step_by(RUN) {
        // SAFETY: the run lies within the `n` floats.
        unsafe {
            let p = p.add(start);
            sum += f64::from(dot(s, p, p, RUN.min(n - start)));
        }
    }
    sum
}
