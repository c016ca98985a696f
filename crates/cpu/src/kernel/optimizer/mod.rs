//! Updates of weights: one file per optimizer.
//!
//! All work in place, multiply the gradient by a factor where there is one, and leave the weight and the states as they are where that
//! factor is NaN. Weights of 16 bits are rounded as [`Rounding`] says, states are `f32` or codes.

mod adafactor;
mod adamw;
mod adamw_8bit;
mod apollo;
mod codes;
mod lion;
mod norm;
mod scalars;
mod sgd;

pub use adafactor::{Adafactor, SecondMoment, adafactor, adafactor_workspace};
pub use adamw::{Adam, AdamW, adamw};
pub use adamw_8bit::{AdamW8bit, Codes, adamw_8bit};
pub use apollo::{Apollo, apollo, apollo_workspace};
pub use lion::{Lion, lion};
pub use norm::{GlobalNorm, Norm, global_norm, norm, norm_workspace};
pub use scalars::{GradientFactor, UpdateLossScale, gradient_factor, update_loss_scale};
pub use sgd::{Sgd, sgd};

use tightfit_ir::op::Rounding;
use tightfit_ir::random::Stream;

use super::vector::load;
use crate::floats::{Float, Floats};
use crate::simd::Simd;

/// What every update takes.
pub struct Update {
    /// Number of elements.
    pub len: usize,
    /// Weights, updated in place.
    pub weight: Floats,
    /// How they are rounded.
    pub rounding: Rounding,
    /// Gradients.
    pub gradient: *const f32,
    /// Learning rate, one float.
    pub lr: *const f32,
    /// Number of this update, counted from 1, one float.
    pub step: *const f32,
    /// What gradients are multiplied by, one float; NaN: nothing is updated.
    pub factor: Option<*const f32>,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// An update's scalars.
#[derive(Clone, Copy)]
struct Scalars {
    factor: f32,
    lr: f64,
    step: f64,
    /// `1 − lr·λ`, by which weights decay.
    keep: f32,
}

impl Update {
    /// The scalars; `None` if this update is to be skipped.
    ///
    /// # Safety
    /// The scalars are readable.
    unsafe fn scalars(&self) -> Option<Scalars> {
        // SAFETY: the caller's contract.
        let (lr, step, factor) = unsafe { (*self.lr, *self.step, self.factor.map_or(1.0, |factor| *factor)) };
        let (lr, step) = (f64::from(lr), f64::from(step));
        (!factor.is_nan()).then_some(Scalars {
            factor,
            lr,
            step,
            keep: (1.0 - lr * self.weight_decay) as f32,
        })
    }

    /// Weights and gradients from element `start` on.
    ///
    /// # Safety
    /// There are that many elements.
    #[inline(always)]
    unsafe fn part(&self, scalars: &Scalars, start: usize) -> Part {
        let key = match self.rounding {
            Rounding::Nearest => None,
            Rounding::Stochastic { key } => Some(key),
        };
        Part {
            // SAFETY: the caller's contract.
            weight: unsafe { self.weight.add(start) },
            // SAFETY: the caller's contract.
            gradient: unsafe { self.gradient.add(start) },
            factor: scalars.factor,
            stream: key.map(|key| Stream::new(key, scalars.step as u64, start as u64 >> 32)),
            first: start as u32,
        }
    }
}

/// Weights and gradients of a tile.
#[derive(Clone, Copy)]
struct Part {
    weight: Floats,
    gradient: *const f32,
    factor: f32,
    stream: Option<Stream>,
    /// The lower half of the first element's index.
    first: u32,
}

impl Part {
    /// `min(len, LANES)` gradients from element `i` of the part on, times the factor.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn gradient<S: Simd>(&self, s: S, i: usize, len: usize) -> S::V {
        // SAFETY: the caller's contract.
        s.mul(unsafe { load(s, self.gradient.add(i), len) }, s.splat(self.factor))
    }

    /// `min(len, LANES)` weights from element `i` of the part on.
    ///
    /// # Safety
    /// They are readable.
    #[inline(always)]
    unsafe fn weight<S: Simd>(&self, s: S, i: usize, len: usize) -> S::V {
        // SAFETY: the caller's contract.
        unsafe { self.weight.add(i).load(s, len) }
    }

    /// Writes `min(len, LANES)` weights from element `i` of the part on, rounded as the update says.
    ///
    /// # Safety
    /// They are writable.
    #[inline(always)]
    unsafe fn set_weight<S: Simd>(&self, s: S, i: usize, v: S::V, len: usize) {
        // SAFETY: the caller's contract; no vector has more lanes than the array.
        unsafe {
            let to = self.weight.add(i);
            let Some(stream) = self.stream else {
                return to.store(s, v, len);
            };
            let mut x = [0.0; 16];
            s.store(x.as_mut_ptr(), v);
            let first = self.first.wrapping_add(i as u32);
            let half = to.stored() == Float::F16;
            for (lane, x) in x.iter_mut().enumerate().take(S::LANES) {
                let random = stream.bits(first.wrapping_add(lane as u32));
                *x = if half {
                    round_to_f16(*x, random)
                } else {
                    round_to_bf16(*x, random)
                };
            }
            to.store(s, s.load(x.as_ptr()), len);
        }
    }
}

/// A bfloat16 beside `x`: away from zero with the probability of how far it is on the way there, in 2¹⁶ steps.
#[inline(always)]
fn round_to_bf16(x: f32, random: u32) -> f32 {
    let rounded = f32::from_bits(x.to_bits().wrapping_add(random & 0xFFFF) & 0xFFFF_0000);
    // What is added could carry a NaN over.
    if x.is_nan() { x } else { rounded }
}

/// A binary16 beside `x`: away from zero with the probability of how far it is on the way there, in 2¹³ steps.
#[inline(always)]
fn round_to_f16(x: f32, random: u32) -> f32 {
    // Below it all steps of binary16 are the same, as those of `f32` are above it when it is added.
    const SMALLEST_NORMAL: f32 = 1.0 / 16384.0;
    let shift = if x.abs() < SMALLEST_NORMAL {
        SMALLEST_NORMAL
    } else {
        0.0
    };
    let shifted = (x.abs() + shift).to_bits();
    let rounded = f32::from_bits(shifted.wrapping_add(random & 0x1FFF) & !0x1FFF) - shift;
    if x.is_nan() { x } else { rounded.copysign(x) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds a number with every random word there is, and checks that only its neighbours come out, with the number as the mean.
    fn check(round: fn(f32, u32) -> f32, bits: u32, x: f32, [below, above]: [f32; 2]) {
        let words = 1_u32 << bits;
        let mut sum = 0.0;
        for random in 0..words {
            let rounded = round(x, random);
            assert!(rounded == below || rounded == above, "{x:e} became {rounded:e}");
            sum += f64::from(rounded);
        }
        let step = f64::from(above) - f64::from(below);
        let off = (sum / f64::from(words) - f64::from(x)).abs() / step;
        assert!(
            off <= 1.0 / f64::from(words),
            "{x:e}: the mean is off by {off:e} of a step"
        );
    }

    #[test]
    fn stochastic_rounding_has_no_bias_in_bfloat16() {
        for x in [1.0_f32, 1.001, -1.003, 0.3, -7e-39, 3e38, 1e-20] {
            let down = f32::from_bits(x.to_bits() & 0xFFFF_0000);
            let up = f32::from_bits((x.to_bits() & 0xFFFF_0000) + 0x1_0000);
            check(round_to_bf16, 16, x, [down, up]);
        }
        assert!(round_to_bf16(f32::NAN, 0xFFFF).is_nan());
        assert!(round_to_bf16(f32::from_bits(0x7FFF_FFFF), 0xFFFF).is_nan());
        assert_eq!(round_to_bf16(f32::NEG_INFINITY, 0xFFFF), f32::NEG_INFINITY);
    }

    #[test]
    fn stochastic_rounding_has_no_bias_in_binary16() {
        for x in [1.0, 1.0003, -1.0007, 0.3, 6.1e-5, -6.0e-5, 3.1e-6, 2e-8, -1e-9, 60001.0] {
            // The number's neighbours, found without the function under test.
            let near = half::f16::from_f32(x);
            let away = half::f16::from_bits(near.to_bits() + 1);
            let [below, above] = match near.to_f32().abs() > x.abs() {
                true => [half::f16::from_bits(near.to_bits() - 1), near],
                false => [near, away],
            };
            check(round_to_f16, 13, x, [below.to_f32(), above.to_f32()]);
        }
        assert!(round_to_f16(f32::NAN, 0x1FFF).is_nan());
        assert_eq!(round_to_f16(f32::NEG_INFINITY, 0x1FFF), f32::NEG_INFINITY);
    }
}
