//! GELU (Hendrycks and Gimpel, 2016), exact and in its tanh approximation.

use super::math::{erf, exp};
use super::vector::{load, store};
use super::{Context, TILE};
use crate::floats::Floats;
use crate::multiversion;
use crate::simd::Simd;

/// Which GELU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GeluKind {
    /// x · Φ(x), with the error function (`gelu`).
    Erf,
    /// x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))) (`gelu_pytorch_tanh`, `gelu_new`).
    Tanh,
}

/// `y = gelu(x)`, elementwise.
pub struct Gelu {
    /// Number of elements.
    pub len: usize,
    /// Which GELU.
    pub kind: GeluKind,
    /// Input, `len` numbers.
    pub x: Floats,
    /// Output, `len` numbers; in place over `x`.
    pub y: Floats,
}

/// Gradient of [`Gelu`].
pub struct GeluBackward {
    /// Number of elements.
    pub len: usize,
    /// Which GELU.
    pub kind: GeluKind,
    /// Input of the forward op, `len` numbers.
    pub x: Floats,
    /// Gradient of the output, `len` numbers.
    pub dy: Floats,
    /// Gradient of the input, `len` numbers; in place over `x` or `dy`.
    pub dx: Floats,
}

shared!(Gelu, GeluBackward);

/// `y = gelu(x)`.
///
/// # Safety
/// See the [module](super).
pub unsafe fn gelu(cx: &Context, args: &Gelu) {
    cx.for_each(args.len.div_ceil(TILE), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { gelu_tile(isa, args, tile) }
    });
}

/// `dx = dy · gelu′(x)`.
///
/// # Safety
/// See the [module](super).
pub unsafe fn gelu_backward(cx: &Context, args: &GeluBackward) {
    cx.for_each(args.len.div_ceil(TILE), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { gelu_backward_tile(isa, args, tile) }
    });
}

multiversion! {
    unsafe fn gelu_tile(args: &Gelu, tile: usize) = gelu_body;
}

multiversion! {
    unsafe fn gelu_backward_tile(args: &GeluBackward, tile: usize) = gelu_backward_body;
}

#[inline(always)]
unsafe fn gelu_body<S: Simd>(s: S, args: &Gelu, tile: usize) {
    let start = tile * TILE;
    // SAFETY: the tile lies within `len`.
    unsafe {
        let (x, y) = (args.x.add(start), args.y.add(start));
        each_vector!(S, TILE.min(args.len - start), i, len => {
            let v = load(s, x.add(i), len);
            let (cdf, _) = cdf_and_slope(s, args.kind, v);
            store(s, y.add(i), s.mul(v, cdf), len);
        });
    }
}

#[inline(always)]
unsafe fn gelu_backward_body<S: Simd>(s: S, args: &GeluBackward, tile: usize) {
    let start = tile * TILE;
    // SAFETY: the tile lies within `len`; each vector is read before it is written.
    unsafe {
        let (x, dy, dx) = (args.x.add(start), args.dy.add(start), args.dx.add(start));
        each_vector!(S, TILE.min(args.len - start), i, len => {
            let v = load(s, x.add(i), len);
            let (cdf, slope) = cdf_and_slope(s, args.kind, v);
            let derivative = s.fma(v, slope, cdf);
            store(s, dx.add(i), s.mul(load(s, dy.add(i), len), derivative), len);
        });
    }
}

/// √(8/π), twice the factor inside the tanh.
const TANH_SCALE: f32 = 1.595_769_2;
const TANH_CUBIC: f32 = 0.044_715;
/// 1 / √(2π)
const DENSITY_SCALE: f32 = 0.398_942_3;

/// The factor that GELU multiplies x by, Φ(x) or its approximation (1 + tanh u) / 2 = sigmoid(2u),
/// and the derivative of that factor.
#[inline(always)]
fn cdf_and_slope<S: Simd>(s: S, kind: GeluKind, x: S::V) -> (S::V, S::V) {
    let (half, one) = (s.splat(0.5), s.splat(1.0));
    let square = s.mul(x, x);
    match kind {
        GeluKind::Erf => {
            let cdf = s.fma(half, erf(s, s.mul(x, s.splat(std::f32::consts::FRAC_1_SQRT_2))), half);
            let density = exp(s, s.mul(square, s.splat(-0.5)));
            (cdf, s.mul(density, s.splat(DENSITY_SCALE)))
        }
        GeluKind::Tanh => {
            let cubic = s.splat(TANH_CUBIC);
            let scaled = s.mul(x, s.splat(-TANH_SCALE));
            let e = exp(s, s.mul(scaled, s.fma(square, cubic, one)));
            let cdf = s.div(one, s.add(one, e));
            // Not cdf · (1 − cdf), which cancels where cdf is near 1.
            let slope = s.mul(s.mul(e, cdf), cdf);
            let inner = s.fma(square, s.splat(3.0 * TANH_CUBIC), one);
            (cdf, s.mul(s.mul(slope, s.splat(TANH_SCALE)), inner))
        }
    }
}
