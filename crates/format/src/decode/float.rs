//! Floats, little-endian.

use half::{f16, slice::HalfFloatSliceExt};

pub(super) fn f32(bytes: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*bytes);
}

pub(super) fn bf16(bytes: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
}

/// In runs of this many, so that the choice of instructions that `half` makes at run time is made once for all of them.
const RUN: usize = 64;

pub(super) fn f16(bytes: &[u8], out: &mut [f32]) {
    let mut run = [f16::ZERO; RUN];
    for (bytes, out) in bytes.as_chunks().0.chunks(RUN).zip(out.chunks_mut(RUN)) {
        let run = &mut run[..out.len()];
        for (half, bytes) in run.iter_mut().zip(bytes) {
            *half = f16::from_le_bytes(*bytes);
        }
        run.convert_to_f32_slice(out);
    }
}
