//! Elementary functions on vectors.

use crate::simd::Simd;

/// eˣ, within two units in the last place for −87.3 ≤ x ≤ 88.3; smaller x (−∞ too) gives exactly 0,
/// larger x gives e^88.3, NaN stays NaN.
///
/// Cephes' `expf`: x = n·ln 2 + r with |r| ≤ ln 2 / 2, a polynomial for e^r, and 2ⁿ by its
/// exponent.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::V) -> S::V {
    const LOWEST: f32 = -87.33;
    const HIGHEST: f32 = 88.3;
    // ln 2 in two parts, the first short enough for n · LN2_HIGH to be exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // `min` and `max` return their second operand where one is NaN.
    let clamped = s.max(s.splat(LOWEST), s.min(s.splat(HIGHEST), x));
    let n = s.round(s.mul(clamped, s.splat(std::f32::consts::LOG2_E)));
    let r = s.fma(n, s.splat(-LN2_HIGH), clamped);
    let r = s.fma(n, s.splat(-LN2_LOW), r);
    let mut p = s.splat(1.987_569_1e-4);
    p = s.fma(p, r, s.splat(1.398_199_9e-3));
    p = s.fma(p, r, s.splat(8.333_452e-3));
    p = s.fma(p, r, s.splat(4.166_579_6e-2));
    p = s.fma(p, r, s.splat(1.666_666_5e-1));
    p = s.fma(p, r, s.splat(0.5));
    p = s.fma(s.mul(r, r), p, s.add(r, s.splat(1.0)));
    let y = s.mul(p, s.pow2(n));
    // Zero where x ≤ LOWEST, and above any result elsewhere.
    let limit = s.max(s.splat(0.0), s.mul(s.sub(x, s.splat(LOWEST)), s.splat(1e38)));
    s.min(limit, y)
}

/// The logistic function 1 / (1 + e⁻ˣ).
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::V) -> S::V {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// The error function, absolute error below 5e-7: the rational approximation of Eigen and XLA on
/// |x| ≤ 4, where it reaches ±1 in f32.
#[inline(always)]
pub fn erf<S: Simd>(s: S, x: S::V) -> S::V {
    let x = s.max(s.splat(-4.0), s.min(s.splat(4.0), x));
    let z = s.mul(x, x);
    let mut p = s.splat(-2.726_142_4e-10);
    p = s.fma(p, z, s.splat(2.770_681_6e-8));
    p = s.fma(p, z, s.splat(-2.101_024e-6));
    p = s.fma(p, z, s.splat(-5.692_506_4e-5));
    p = s.fma(p, z, s.splat(-7.349_906_3e-4));
    p = s.fma(p, z, s.splat(-2.9546e-3));
    p = s.fma(p, z, s.splat(-1.609_603_3e-2));
    let mut q = s.splat(-1.456_607_2e-5);
    q = s.fma(q, z, s.splat(-2.133_740_6e-4));
    q = s.fma(q, z, s.splat(-1.682_827e-3));
    q = s.fma(q, z, s.splat(-7.373_329e-3));
    q = s.fma(q, z, s.splat(-1.426_474e-2));
    s.div(s.mul(x, p), q)
}
