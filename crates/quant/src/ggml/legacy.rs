//! The quantisations of 32 elements: `block_q4_0` to `block_q8_0` of `ggml-common.h`.
//!
//! Each block has a binary16 scale `d`; those ending in `_1` a binary16 minimum `m` after it. Nibbles come 16 low ones first, then the 16
//! high ones of the same bytes. The fifth bits of Q5 are one little-endian `u32`, bit `i` for element `i`.

use super::half_at;

/// `d (q - 8)`
pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * (f32::from(nibble(&block[2..], i)) - 8.0);
    }
}

/// `d q + m`
pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * f32::from(nibble(&block[4..], i)) + m;
    }
}

/// `d (q - 16)`
pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * (f32::from(nibble(&block[6..], i) | fifth_bit(high, i)) - 16.0);
    }
}

/// `d q + m`
pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    for (i, out) in out.iter_mut().enumerate() {
        *out = d * f32::from(nibble(&block[8..], i) | fifth_bit(high, i)) + m;
    }
}

/// `d q`
pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = d * f32::from(q as i8);
    }
}

fn nibble(bytes: &[u8], i: usize) -> u8 {
    bytes[i % 16] >> (i / 16 * 4) & 15
}

fn fifth_bit(high: u32, i: usize) -> u8 {
    ((high >> i & 1) << 4) as u8
}
