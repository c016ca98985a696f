//! Lion (Chen et al., 2023).

use super::super::vector::{load, store};
use super::super::{Context, TILE};
use super::{Scalars, Update};
use crate::multiversion;
use crate::simd::Simd;

/// One step for one parameter tensor.
pub struct Lion {
    /// What every update takes.
    pub update: Update,
    /// Momentum, updated in place.
    pub m: *mut f32,
    /// What the sign keeps of the momentum.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
}

shared!(Lion);

/// `w ← w (1 − lr·λ) − lr · sign(β₁ m + (1 − β₁) g)`, then `m ← β₂ m + (1 − β₂) g`.
///
/// # Safety
/// See the [module](super::super).
pub unsafe fn lion(cx: &Context, args: &Lion) {
    // SAFETY: the caller's contract.
    let Some(scalars) = (unsafe { args.update.scalars() }) else {
        return;
    };
    cx.for_each(args.update.len.div_ceil(TILE), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { lion_tile(isa, args, &scalars, tile) }
    });
}

multiversion! {
    unsafe fn lion_tile(args: &Lion, scalars: &Scalars, tile: usize) = lion_body;
}

#[inline(always)]
unsafe fn lion_body<S: Simd>(s: S, args: &Lion, scalars: &Scalars, tile: usize) {
    let start = tile * TILE;
    let keep = s.splat(scalars.keep);
    let minus_lr = s.splat(-scalars.lr as f32);
    let one_minus_beta1 = s.splat((1.0 - args.beta1) as f32);
    let one_minus_beta2 = s.splat((1.0 - args.beta2) as f32);
    // SAFETY: the tile lies within `len`; each vector is read before it is written.
    unsafe {
        let part = args.update.part(scalars, start);
        let m = args.m.add(start);
        each_vector!(S, TILE.min(args.update.len - start), i, len => {
            let g = part.gradient(s, i, len);
            let m0 = load(s, m.add(i), len);
            let change = s.sub(g, m0);
            let direction = sign(s, s.fma(one_minus_beta1, change, m0));
            let w1 = s.fma(minus_lr, direction, s.mul(part.weight(s, i, len), keep));
            store(s, m.add(i), s.fma(one_minus_beta2, change, m0), len);
            part.set_weight(s, i, w1, len);
        });
    }
}

/// −1, 0 or 1; NaN where `x` is not finite, so that a gradient that went wrong is seen.
#[inline(always)]
fn sign<S: Simd>(s: S, x: S::V) -> S::V {
    // Twice, as it takes the smallest numbers past one.
    let huge = s.splat(1e30);
    let large = s.mul(s.mul(x, huge), huge);
    let clamped = s.max(s.min(large, s.splat(1.0)), s.splat(-1.0));
    s.add(clamped, s.sub(x, x))
}
