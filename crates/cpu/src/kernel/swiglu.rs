//! The gated activation of LLaMA's MLP: silu(gate) · up (Shazeer, "GLU variants improve
//! transformer", 2020).

use super::math::sigmoid;
use super::vector::{load, store};
use super::{Context, TILE};
use crate::floats::Floats;
use crate::multiversion;
use crate::simd::Simd;

/// `act = silu(gate) · up`, elementwise.
pub struct Swiglu {
    /// Number of elements, `T · intermediate`.
    pub len: usize,
    /// Gate, `len` numbers.
    pub gate: Floats,
    /// Up projection, `len` numbers.
    pub up: Floats,
    /// Output, `len` numbers; in place over `gate` or `up`.
    pub act: Floats,
}

/// Gradient of [`Swiglu`].
pub struct SwigluBackward {
    /// Number of elements.
    pub len: usize,
    /// Gate, `len` numbers.
    pub gate: Floats,
    /// Up projection, `len` numbers.
    pub up: Floats,
    /// Gradient of the output, `len` numbers.
    pub dact: Floats,
    /// Gradient of the gate, `len` numbers; in place over any input.
    pub dgate: Floats,
    /// Gradient of the up projection, `len` numbers; in place over any input that `dgate` is not in
    /// place over.
    pub dup: Floats,
}

shared!(Swiglu, SwigluBackward);

/// `act = silu(gate) · up`.
///
/// # Safety
/// See the [module](super).
pub unsafe fn swiglu(cx: &Context, args: &Swiglu) {
    cx.for_each(args.len.div_ceil(TILE), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { swiglu_tile(isa, args, tile) }
    });
}

/// With s = sigmoid(gate): `dup = dact · gate · s`, `dgate = dact · up · s · (1 + gate · (1 − s))`.
///
/// # Safety
/// See the [module](super).
pub unsafe fn swiglu_backward(cx: &Context, args: &SwigluBackward) {
    cx.for_each(args.len.div_ceil(TILE), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { swiglu_backward_tile(isa, args, tile) }
    });
}

multiversion! {
    unsafe fn swiglu_tile(args: &Swiglu, tile: usize) = swiglu_body;
}

multiversion! {
    unsafe fn swiglu_backward_tile(args: &SwigluBackward, tile: usize) = swiglu_backward_body;
}

#[inline(always)]
unsafe fn swiglu_body<S: Simd>(s: S, args: &Swiglu, tile: usize) {
    let start = tile * TILE;
    // SAFETY: the tile lies within `len`.
    unsafe {
        let (gate, up, act) = (args.gate.add(start), args.up.add(start), args.act.add(start));
        each_vector!(S, TILE.min(args.len - start), i, len => {
            let g = load(s, gate.add(i), len);
            let silu = s.mul(g, sigmoid(s, g));
            store(s, act.add(i), s.mul(silu, load(s, up.add(i), len)), len);
        });
    }
}

#[inline(always)]
unsafe fn swiglu_backward_body<S: Simd>(s: S, args: &SwigluBackward, tile: usize) {
    let start = tile * TILE;
    let one = s.splat(1.0);
    // SAFETY: the tile lies within `len`; each vector is read before it is written.
    unsafe {
        let (gate, up, dact) = (args.gate.add(start), args.up.add(start), args.dact.add(start));
        let (dgate, dup) = (args.dgate.add(start), args.dup.add(start));
        each_vector!(S, TILE.min(args.len - start), i, len => {
            let g = load(s, gate.add(i), len);
            let u = load(s, up.add(i), len);
            let d = load(s, dact.add(i), len);
            let sig = sigmoid(s, g);
            let slope = s.mul(sig, s.fma(g, s.sub(one, sig), one));
            store(s, dup.add(i), s.mul(d, s.mul(g, sig)), len);
            store(s, dgate.add(i), s.mul(s.mul(d, u), slope), len);
        });
    }
}
