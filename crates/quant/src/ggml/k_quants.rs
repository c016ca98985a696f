//! The K-quants, super-blocks of 256 elements: `block_q2_K` to `block_q6_K` of `ggml-common.h`.
//!
//! A super-block has a binary16 scale `d` (and one for minima, `dmin`), and small integer scales of its own for each 16 or 32 elements.
//! An element is `d sc q`, or `d sc q - dmin m`, products from the left.

use super::half_at;

/// `scales[16] qs[64] d dmin`; scales hold 4 bits of scale and 4 of minimum per 16 elements.
pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, qs) = (&block[..16], &block[16..80]);
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[group] & 15);
        let min = dmin * f32::from(scales[group] >> 4);
        for (i, out) in out.iter_mut().enumerate() {
            *out = scale * f32::from(two_bits(qs, group * 16 + i)) - min;
        }
    }
}

/// `hmask[32] qs[64] scales[12] d`; elements are `2 bits - 4`, or `2 bits` where their bit of the mask is set.
pub(super) fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let (mask, qs, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let d = half_at(block, 108);
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        // Six bits: four in the nibbles of the first eight bytes, two in the last four.
        let low = scales[group % 8] >> (group / 8 * 4) & 15;
        let high = scales[8 + group % 4] >> (group / 4 * 2) & 3;
        let scale = d * (f32::from(low | high << 4) - 32.0);
        for (i, out) in out.iter_mut().enumerate() {
            let i = group * 16 + i;
            let third = mask[i % 32] >> (i / 32) & 1;
            *out = scale * (f32::from(two_bits(qs, i) | third << 2) - 4.0);
        }
    }
}

/// `d dmin scales[12] qs[128]`
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let qs = &block[16..];
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(&block[4..16], group);
        let (scale, min) = (d * scale, dmin * min);
        for (i, out) in out.iter_mut().enumerate() {
            *out = scale * f32::from(nibble_of_32(qs, group, i)) - min;
        }
    }
}

/// `d dmin scales[12] qh[32] qs[128]`; bit `g` of `qh[i]` is the fifth of element `i` of group `g`.
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (high, qs) = (&block[16..48], &block[48..]);
    for (group, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, min) = scale_and_min(&block[4..16], group);
        let (scale, min) = (d * scale, dmin * min);
        for (i, out) in out.iter_mut().enumerate() {
            let fifth = high[i] >> group & 1;
            *out = scale * f32::from(nibble_of_32(qs, group, i) | fifth << 4) - min;
        }
    }
}

/// `ql[128] qh[64] scales[16] d`; elements are `6 bits - 32`, scales signed bytes.
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for (group, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[group] as i8);
        for (i, out) in out.iter_mut().enumerate() {
            let i = group * 16 + i;
            // Each half of the super-block: 64 low nibbles, then the 64 high ones of the same bytes.
            let nibble = low[i / 128 * 64 + i % 64] >> (i / 64 % 2 * 4) & 15;
            *out = scale * (f32::from(nibble | two_bits(high, i) << 4) - 32.0);
        }
    }
}

/// Element `i` of 256 in two bits each: for each half, 32 bytes give four runs of 32 elements, lowest bits first.
fn two_bits(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3
}

/// Element `i` of a group of 32 in four bits each: two groups share 32 bytes, the even one in the low nibbles.
fn nibble_of_32(bytes: &[u8], group: usize, i: usize) -> u8 {
    bytes[group / 2 * 32 + i] >> (group % 2 * 4) & 15
}

/// The six-bit scale and minimum of a group, of eight in twelve bytes: those of the first four groups in the low six bits of bytes 0 to
/// 3 and 4 to 7; of the others, the upper two bits are on top of those, the lower four in the nibbles of bytes 8 to 11.
fn scale_and_min(packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, min) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        let low = packed[group + 4];
        (
            low & 15 | packed[group - 4] >> 6 << 4,
            low >> 4 | packed[group] >> 6 << 4,
        )
    };
    (f32::from(scale), f32::from(min))
}
