//! 4 bits, a scale and a minimum for every 64 elements: `(f16, f16)[groups]`, then the codes.
//!
//! Asymmetric: codes are 0 to 15, and an element is `code * scale + min`. Scale and minimum are not just those of the extremes: with
//! one outlier in a group it costs less to miss it a little than to widen the steps of the other 63. Encoding tries ranges that are cut
//! at either end and keeps the one of least squared error.

use half::f16;

use crate::{
    groups::{self, GROUP, Pairs},
    round, within,
};

/// Bytes of a group's scale and minimum.
pub(crate) const SCALE_BYTES: usize = 4;

/// The largest code.
const LIMIT: f32 = 15.0;

/// The part of a group's range that is cut off at either end is a multiple of this, from none.
const CUT: f32 = 0.03;

/// How many multiples are tried at either end.
const CUTS: usize = 4;

static PAIRS: Pairs = groups::pairs(&[
    0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0,
]);

/// One group of at most 64 elements.
pub(crate) fn encode_group(values: &[f32], scale: &mut [u8; SCALE_BYTES], packed: &mut [u8]) {
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut best = Affine::between(low, high);
    let mut least = best.squared_error(values);
    for cuts in 1..CUTS * CUTS {
        let cut = |n: usize| n as f32 * CUT * (high - low);
        let affine = Affine::between(low + cut(cuts % CUTS), high - cut(cuts / CUTS));
        let error = affine.squared_error(values);
        if error < least {
            (best, least) = (affine, error);
        }
    }
    let mut codes = [0; GROUP];
    let codes = &mut codes[..values.len()];
    for (code, &x) in codes.iter_mut().zip(values) {
        *code = best.code(x) as u8;
    }
    groups::pack(codes, 0, packed);
    let ([a, b], [c, d]) = (best.scale.to_le_bytes(), best.min.to_le_bytes());
    *scale = [a, b, c, d];
}

/// Elements `start..start + out.len()` of the flattened matrix.
#[inline(always)]
pub(crate) fn decode(bytes: &[u8], elements: usize, start: usize, out: &mut [f32]) {
    let (scales, codes) = bytes.split_at(elements.div_ceil(GROUP) * SCALE_BYTES);
    let scales = scales.as_chunks::<SCALE_BYTES>().0;
    let scale = |group: usize| {
        let [a, b, c, d] = scales[group];
        (f16::from_le_bytes([a, b]).to_f32(), f16::from_le_bytes([c, d]).to_f32())
    };
    groups::decode(codes, start, out, &PAIRS, scale, |code, (scale, min)| {
        code * scale + min
    });
}

/// A group's scale and minimum, as they are stored.
#[derive(Clone, Copy)]
struct Affine {
    scale: f16,
    min: f16,
    /// As `f32`, and the scale's reciprocal.
    inverse: f32,
    scale_f32: f32,
    min_f32: f32,
}

impl Affine {
    /// The one whose codes 0 and 15 are the nearest to `low` and `high` that binary16 allows.
    fn between(low: f32, high: f32) -> Self {
        let min = finite(low);
        let scale = finite((high - min.to_f32()) / LIMIT);
        let scale_f32 = scale.to_f32();
        let inverse = if scale_f32 > 0.0 { 1.0 / scale_f32 } else { 0.0 };
        Self {
            scale,
            min,
            inverse,
            scale_f32,
            min_f32: min.to_f32(),
        }
    }

    /// The nearest code; an integer.
    #[inline(always)]
    fn code(&self, x: f32) -> f32 {
        round(within((x - self.min_f32) * self.inverse, 0.0, LIMIT))
    }

    fn squared_error(&self, values: &[f32]) -> f32 {
        // In eight sums, which the compiler keeps in vectors.
        let mut sums = [0.0; 8];
        let (chunks, rest) = values.as_chunks::<8>();
        for chunk in chunks {
            for (sum, &x) in sums.iter_mut().zip(chunk) {
                let error = self.error(x);
                *sum += error * error;
            }
        }
        rest.iter()
            .fold(sums.iter().sum::<f32>(), |sum, &x| sum + self.error(x).powi(2))
    }

    #[inline(always)]
    fn error(&self, x: f32) -> f32 {
        self.code(x) * self.scale_f32 + self.min_f32 - x
    }
}

/// The nearest finite binary16.
fn finite(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}
