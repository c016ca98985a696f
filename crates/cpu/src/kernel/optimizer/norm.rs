//! The norm of a gradient, and of all gradients together, for clipping.

use super::super::Context;
use super::super::vector::dot;
use crate::multiversion;
use crate::simd::Simd;

/// `norm = √(Σ x²)`.
pub struct Norm {
    /// Number of elements.
    pub len: usize,
    /// Operand.
    pub x: *const f32,
    /// Result, one float.
    pub norm: *mut f32,
    /// [`norm_workspace`] bytes.
    pub workspace: *mut u8,
}

shared!(Norm);

/// `norm = √(Σ norms²)`, over the scale of the loss if there is one.
pub struct GlobalNorm<'a> {
    /// How many norms there are.
    pub count: usize,
    /// Each norm, one float.
    pub norms: &'a dyn Fn(usize) -> *const f32,
    /// What the loss was multiplied by, one float.
    pub scale: Option<*const f32>,
    /// Result, one float.
    pub norm: *mut f32,
}

/// Floats whose squares are summed into one partial.
const BLOCK: usize = 64 * 1024;

/// Bytes of workspace for that many elements: one f64 partial per block.
pub fn norm_workspace(len: usize) -> u64 {
    (len.div_ceil(BLOCK) * size_of::<f64>()) as u64
}

/// Sums squares per block, then the blocks in order, in f64.
///
/// # Safety
/// See the [module](super::super).
pub unsafe fn norm(cx: &Context, args: &Norm) {
    let blocks = args.len.div_ceil(BLOCK);
    cx.for_each(blocks, |isa, block, _| {
        let start = block * BLOCK;
        // SAFETY: the caller's contract; each block lies within `len` and has a partial of its own.
        unsafe {
            let sum = sum_squares(isa, args.x.add(start), BLOCK.min(args.len - start));
            *args.workspace.cast::<f64>().add(block) = sum;
        }
    });
    // SAFETY: the partials that the tiles have written.
    let partials = (0..blocks).map(|block| unsafe { *args.workspace.cast::<f64>().add(block) });
    let sum: f64 = partials.sum();
    // SAFETY: the caller's contract.
    unsafe { *args.norm = sum.sqrt() as f32 };
}

/// Sums in order, in f64, where no norm's square overflows.
///
/// # Safety
/// See the [module](super::super).
pub unsafe fn global_norm(args: &GlobalNorm) {
    // SAFETY: the caller's contract.
    let norms = (0..args.count).map(|index| f64::from(unsafe { *(args.norms)(index) }));
    let sum: f64 = norms.map(|norm| norm * norm).sum();
    // SAFETY: the caller's contract.
    unsafe {
        let scale = args.scale.map_or(1.0, |scale| f64::from(*scale));
        *args.norm = (sum.sqrt() / scale) as f32;
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
