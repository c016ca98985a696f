//! AdamW (Loshchilov and Hutter, 2019), in the arithmetic of `torch.optim.AdamW`'s reference loop.

use super::vector::{load, store};
use super::{Context, TILE};
use crate::multiversion;
use crate::simd::Simd;

/// One step for one parameter tensor.
pub struct AdamW {
    /// Number of elements.
    pub len: usize,
    /// Parameters, updated in place.
    pub w: *mut f32,
    /// Gradients.
    pub g: *const f32,
    /// First moments, updated in place.
    pub m: *mut f32,
    /// Second moments, updated in place.
    pub v: *mut f32,
    /// Learning rate, one float.
    pub lr: *const f32,
    /// Number of this step, counted from 1, one float.
    pub step: *const f32,
    /// Global gradient norm, one float, and the largest norm allowed: gradients are scaled by
    /// `min(1, max_norm / (norm + 1e-6))`, as `torch.nn.utils.clip_grad_norm_` does.
    pub clip: Option<(*const f32, f32)>,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

shared!(AdamW);

/// The step's scalars, computed once.
struct Scalars {
    clip: f32,
    decay: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    bias_correction2_sqrt: f32,
    eps: f32,
    step_size: f32,
}

/// `w ← w (1 − lr·λ) − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)` after updating `m` and `v`.
///
/// # Safety
/// See the [module](super).
pub unsafe fn adamw(cx: &Context, args: &AdamW) {
    // SAFETY: the caller's contract.
    let (lr, step, norm) = unsafe { (*args.lr, *args.step, args.clip.map(|(norm, max)| (*norm, max))) };
    let (lr, step) = (f64::from(lr), f64::from(step));
    let scalars = &Scalars {
        clip: norm.map_or(1.0, |(norm, max)| {
            let scale = max / (norm + 1e-6);
            // Not `f32::min`, which would hide a NaN norm.
            if scale > 1.0 { 1.0 } else { scale }
        }),
        decay: (1.0 - lr * args.weight_decay) as f32,
        one_minus_beta1: (1.0 - args.beta1) as f32,
        beta2: args.beta2 as f32,
        one_minus_beta2: (1.0 - args.beta2) as f32,
        bias_correction2_sqrt: (1.0 - args.beta2.powf(step)).sqrt() as f32,
        eps: args.eps as f32,
        step_size: (lr / (1.0 - args.beta1.powf(step))) as f32,
    };
    cx.for_each(args.len.div_ceil(TILE), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { adamw_tile(isa, args, scalars, tile) }
    });
}

multiversion! {
    unsafe fn adamw_tile(args: &AdamW, scalars: &Scalars, tile: usize) = adamw_body;
}

#[inline(always)]
unsafe fn adamw_body<S: Simd>(s: S, args: &AdamW, scalars: &Scalars, tile: usize) {
    let start = tile * TILE;
    let clip = s.splat(scalars.clip);
    let decay = s.splat(scalars.decay);
    let one_minus_beta1 = s.splat(scalars.one_minus_beta1);
    let beta2 = s.splat(scalars.beta2);
    let one_minus_beta2 = s.splat(scalars.one_minus_beta2);
    let bias_correction2_sqrt = s.splat(scalars.bias_correction2_sqrt);
    let eps = s.splat(scalars.eps);
    let minus_step_size = s.splat(-scalars.step_size);
    // SAFETY: the tile lies within `len`; each vector is read before it is written.
    unsafe {
        let (w, g) = (args.w.add(start), args.g.add(start));
        let (m, v) = (args.m.add(start), args.v.add(start));
        each_vector!(S, TILE.min(args.len - start), i, len => {
            let g1 = s.mul(load(s, g.add(i), len), clip);
            let m0 = load(s, m.add(i), len);
            let m1 = s.fma(one_minus_beta1, s.sub(g1, m0), m0);
            let v1 = s.fma(s.mul(one_minus_beta2, g1), g1, s.mul(load(s, v.add(i), len), beta2));
            let denominator = s.add(s.div(s.sqrt(v1), bias_correction2_sqrt), eps);
            let w0 = s.mul(load(s, w.add(i), len), decay);
            let w1 = s.add(w0, s.div(s.mul(minus_step_size, m1), denominator));
            store(s, m.add(i), m1, len);
            store(s, v.add(i), v1, len);
            store(s, w.add(i), w1, len);
        });
    }
}
