//! AdamW (Loshchilov and Hutter, 2019), in the arithmetic of `torch.optim.AdamW`'s reference loop.

use super::super::vector::{load, store};
use super::super::{Context, TILE};
use super::{Scalars, Update};
use crate::multiversion;
use crate::simd::Simd;

/// Adam's constants.
#[derive(Clone, Copy, Debug)]
pub struct Adam {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
}

/// One step for one parameter tensor.
pub struct AdamW {
    /// What every update takes.
    pub update: Update,
    /// First moments, updated in place.
    pub m: *mut f32,
    /// Second moments, updated in place.
    pub v: *mut f32,
    /// Constants.
    pub adam: Adam,
}

shared!(AdamW);

/// Adam's numbers of a step, computed once.
#[derive(Clone, Copy)]
pub(super) struct AdamStep {
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    bias_correction2_sqrt: f32,
    eps: f32,
    /// `1 − β₁ᵗ`.
    pub bias_correction1: f64,
}

impl AdamStep {
    pub fn new(adam: &Adam, step: f64) -> Self {
        Self {
            one_minus_beta1: (1.0 - adam.beta1) as f32,
            beta2: adam.beta2 as f32,
            one_minus_beta2: (1.0 - adam.beta2) as f32,
            bias_correction2_sqrt: (1.0 - adam.beta2.powf(step)).sqrt() as f32,
            eps: adam.eps as f32,
            bias_correction1: 1.0 - adam.beta1.powf(step),
        }
    }

    /// The moments after a gradient.
    #[inline(always)]
    pub fn moments<S: Simd>(&self, s: S, g: S::V, m: S::V, v: S::V) -> (S::V, S::V) {
        let m1 = s.fma(s.splat(self.one_minus_beta1), s.sub(g, m), m);
        let v1 = s.fma(
            s.mul(s.splat(self.one_minus_beta2), g),
            g,
            s.mul(v, s.splat(self.beta2)),
        );
        (m1, v1)
    }

    /// `√v / √(1 − β₂ᵗ) + ε`.
    #[inline(always)]
    pub fn denominator<S: Simd>(&self, s: S, v: S::V) -> S::V {
        s.add(s.div(s.sqrt(v), s.splat(self.bias_correction2_sqrt)), s.splat(self.eps))
    }
}

/// `w ← w (1 − lr·λ) − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)` after updating `m` and `v`.
///
/// # Safety
/// See the [module](super::super).
pub unsafe fn adamw(cx: &Context, args: &AdamW) {
    // SAFETY: the caller's contract.
    let Some(scalars) = (unsafe { args.update.scalars() }) else {
        return;
    };
    let step = AdamStep::new(&args.adam, scalars.step);
    cx.for_each(args.update.len.div_ceil(TILE), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { adamw_tile(isa, args, &scalars, &step, tile) }
    });
}

multiversion! {
    unsafe fn adamw_tile(args: &AdamW, scalars: &Scalars, step: &AdamStep, tile: usize) = adamw_body;
}

#[inline(always)]
unsafe fn adamw_body<S: Simd>(s: S, args: &AdamW, scalars: &Scalars, step: &AdamStep, tile: usize) {
    let start = tile * TILE;
    let step = *step;
    let keep = s.splat(scalars.keep);
    let minus_step_size = s.splat(-((scalars.lr / step.bias_correction1) as f32));
    // SAFETY: the tile lies within `len`; each vector is read before it is written.
    unsafe {
        let part = args.update.part(scalars, start);
        let (m, v) = (args.m.add(start), args.v.add(start));
        each_vector!(S, TILE.min(args.update.len - start), i, len => {
            let g = part.gradient(s, i, len);
            let (m1, v1) = step.moments(s, g, load(s, m.add(i), len), load(s, v.add(i), len));
            let w0 = s.mul(part.weight(s, i, len), keep);
            let w1 = s.add(w0, s.div(s.mul(minus_step_size, m1), step.denominator(s, v1)));
            store(s, m.add(i), m1, len);
            store(s, v.add(i), v1, len);
            part.set_weight(s, i, w1, len);
        });
    }
}
