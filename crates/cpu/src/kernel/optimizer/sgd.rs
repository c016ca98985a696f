//! Stochastic gradient descent, with momentum if asked for.

use super::super::vector::{load, store};
use super::super::{Context, TILE};
use super::{Scalars, Update};
use crate::multiversion;
use crate::simd::Simd;

/// One step for one parameter tensor.
pub struct Sgd {
    /// What every update takes.
    pub update: Update,
    /// Momentum, updated in place, and its decay.
    pub momentum: Option<(*mut f32, f64)>,
}

shared!(Sgd);

/// `b ← μ b + g`, then `w ← w (1 − lr·λ) − lr · b`; without momentum `b` is `g`.
///
/// # Safety
/// See the [module](super::super).
pub unsafe fn sgd(cx: &Context, args: &Sgd) {
    // SAFETY: the caller's contract.
    let Some(scalars) = (unsafe { args.update.scalars() }) else {
        return;
    };
    cx.for_each(args.update.len.div_ceil(TILE), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { sgd_tile(isa, args, &scalars, tile) }
    });
}

multiversion! {
    unsafe fn sgd_tile(args: &Sgd, scalars: &Scalars, tile: usize) = sgd_body;
}

#[inline(always)]
unsafe fn sgd_body<S: Simd>(s: S, args: &Sgd, scalars: &Scalars, tile: usize) {
    let start = tile * TILE;
    let keep = s.splat(scalars.keep);
    let minus_lr = s.splat(-scalars.lr as f32);
    // SAFETY: the tile lies within `len`; each vector is read before it is written.
    unsafe {
        let part = args.update.part(scalars, start);
        each_vector!(S, TILE.min(args.update.len - start), i, len => {
            let mut direction = part.gradient(s, i, len);
            if let Some((buffer, momentum)) = args.momentum {
                let buffer = buffer.add(start + i);
                direction = s.fma(s.splat(momentum as f32), load(s, buffer, len), direction);
                store(s, buffer, direction, len);
            }
            let w1 = s.fma(minus_lr, direction, s.mul(part.weight(s, i, len), keep));
            part.set_weight(s, i, w1, len);
        });
    }
}
