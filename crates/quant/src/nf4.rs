//! 4-bit normal floats with doubly quantised scales (QLoRA: Dettmers et al. 2023, arXiv:2305.14314), bit by bit those of bitsandbytes
//! 0.50 on a CPU.
//!
//! ```text
//! f32[nested]   largest |scale - offset| of 256 groups
//! f32           offset: the mean of all scales
//! u8[groups]    (scale - offset) / nested, in the signed 8-bit dynamic map
//! u8[]          codes
//! ```
//!
//! A group's scale is its largest magnitude. An element is `value[code] * scale`, the sixteen values being quantiles of a normal
//! distribution, zero among them.

use crate::dynamic;
use crate::groups::{self, GROUP, Pairs};
use crate::mean::mean;

/// First-level scales that share a second-level one.
const NESTED: usize = 256;

/// The values of the codes: Appendix E of the paper.
pub(crate) const VALUES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The code of zero.
const ZERO: u8 = 7;

static PAIRS: Pairs = groups::pairs(&VALUES);

/// Boundaries between codes: half-way.
const BOUNDARIES: [f32; 15] = {
    let mut boundaries = [0.0; 15];
    let mut i = 0;
    while i < 15 {
        boundaries[i] = (VALUES[i] + VALUES[i + 1]) / 2.0;
        i += 1;
    }
    boundaries
};

/// Scales below this are taken for it, so that there is a reciprocal.
const SMALLEST: f32 = 1e-38;

/// One group of at most 64 elements; returns its scale.
pub(crate) fn encode_group(values: &[f32], packed: &mut [u8]) -> f32 {
    let largest = values.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    let mut codes = [0; GROUP];
    let codes = &mut codes[..values.len()];
    // A last group that is short is divided by its scale, the others are multiplied by its reciprocal; the roundings differ.
    let scale = if values.len() == GROUP {
        let inverse = 1.0 / largest.max(SMALLEST);
        for (code, x) in codes.iter_mut().zip(values) {
            *code = nearest(x * inverse);
        }
        largest
    } else {
        let scale = largest.max(SMALLEST);
        for (code, x) in codes.iter_mut().zip(values) {
            *code = nearest(x / scale);
        }
        scale
    };
    groups::pack(codes, ZERO, packed);
    scale
}

/// The code whose value is nearest, the lower of two that are equally near.
#[inline(always)]
fn nearest(x: f32) -> u8 {
    // A sum of comparisons has no branches.
    BOUNDARIES.iter().map(|&boundary| u8::from(x > boundary)).sum()
}

/// The second level: fills everything but the codes from the scales of all groups.
pub(crate) fn encode_scales(scales: &[f32], out: &mut [u8]) {
    if scales.is_empty() {
        out.fill(0);
        return;
    }
    let offset = mean(scales);
    let (nested, rest) = out.split_at_mut(scales.len().div_ceil(NESTED) * size_of::<f32>());
    let (stored, codes) = rest.split_at_mut(size_of::<f32>());
    stored.copy_from_slice(&offset.to_le_bytes());
    for ((scales, nested), codes) in scales
        .chunks(NESTED)
        .zip(nested.as_chunks_mut::<4>().0)
        .zip(codes.chunks_mut(NESTED))
    {
        let largest = scales
            .iter()
            .fold(0.0_f32, |largest, scale| largest.max((scale - offset).abs()));
        *nested = largest.to_le_bytes();
        if largest == 0.0 {
            // Any code would do: all stand for zero here.
            codes.fill(0);
            continue;
        }
        let inverse = 1.0 / largest;
        for (code, scale) in codes.iter_mut().zip(scales) {
            *code = dynamic::nearest(dynamic::signed(), snapped((scale - offset) * inverse));
        }
    }
}

/// The nearest of 65 536 evenly spaced numbers from -1 to 1: bitsandbytes looks codes up by them. Matters to the smallest codes only.
fn snapped(x: f32) -> f32 {
    const LAST: f32 = u16::MAX as f32;
    let bin = ((x.clamp(-1.0, 1.0) + 1.0) * 0.5 * LAST + 0.5) as u16;
    -1.0 + 2.0 * f32::from(bin) / LAST
}

/// Elements `start..start + out.len()` of the flattened matrix.
#[inline(always)]
pub(crate) fn decode(bytes: &[u8], elements: usize, start: usize, out: &mut [f32]) {
    let scales = Scales::of(bytes, elements);
    groups::decode(
        scales.codes,
        start,
        out,
        &PAIRS,
        |group| scales.get(group),
        |value, scale| value * scale,
    );
}

/// The parts of a matrix.
struct Scales<'a> {
    nested: &'a [[u8; 4]],
    offset: f32,
    scales: &'a [u8],
    codes: &'a [u8],
}

impl<'a> Scales<'a> {
    #[inline(always)]
    fn of(bytes: &'a [u8], elements: usize) -> Self {
        let groups = elements.div_ceil(GROUP);
        let (nested, rest) = bytes.split_at(groups.div_ceil(NESTED) * size_of::<f32>());
        let (offset, rest) = rest.split_at(size_of::<f32>());
        let (scales, codes) = rest.split_at(groups);
        Self {
            nested: nested.as_chunks().0,
            offset: f32::from_le_bytes([offset[0], offset[1], offset[2], offset[3]]),
            scales,
            codes,
        }
    }

    #[inline(always)]
    fn get(&self, group: usize) -> f32 {
        let nested = f32::from_le_bytes(self.nested[group / NESTED]);
        dynamic::signed()[usize::from(self.scales[group])] * nested + self.offset
    }
}
