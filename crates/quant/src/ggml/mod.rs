//! The formats of `ggml`: blocks of 32 or 256 elements, each with its scales beside its codes.
//!
//! Exact: each element is the `f32` that the block's formula gives with every operation rounded to `f32`, the same bits as the reference
//! (`dequantize` of `gguf-py`).

mod k_quants;
mod legacy;

use crate::Block;

/// Whole blocks of one of `ggml`'s formats: `bytes` holds those of just the elements of `out`. The formats of our own are not here.
pub(crate) fn decode(block: Block, bytes: &[u8], out: &mut [f32]) {
    match block {
        Block::Int8 | Block::Int4 | Block::Nf4 => unreachable!("not a format of ggml"),
        Block::Q4_0 => blocks(bytes, out, legacy::q4_0),
        Block::Q4_1 => blocks(bytes, out, legacy::q4_1),
        Block::Q5_0 => blocks(bytes, out, legacy::q5_0),
        Block::Q5_1 => blocks(bytes, out, legacy::q5_1),
        Block::Q8_0 => blocks(bytes, out, legacy::q8_0),
        Block::Q2K => blocks(bytes, out, k_quants::q2_k),
        Block::Q3K => blocks(bytes, out, k_quants::q3_k),
        Block::Q4K => blocks(bytes, out, k_quants::q4_k),
        Block::Q5K => blocks(bytes, out, k_quants::q5_k),
        Block::Q6K => blocks(bytes, out, k_quants::q6_k),
    }
}

/// Applies `decode` to each block of `BYTES` bytes and `ELEMENTS` elements.
fn blocks<const BYTES: usize, const ELEMENTS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    for (block, out) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        decode(block, out);
    }
}

/// The little-endian binary16 at `at`.
fn half_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}
