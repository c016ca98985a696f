//! Codes of four bits in groups of 64 elements, counted through the flattened matrix.
//!
//! Two codes share a byte: the even element in the high nibble, the odd one in the low nibble. A low
//! nibble without an element is filled.

/// Elements of a group.
pub(crate) const GROUP: usize = 64;

/// Bytes of the codes of a whole group.
const BYTES: usize = GROUP / 2;

/// What each byte of two codes stands for: one look-up for two elements.
pub(crate) type Pairs = [[f32; 2]; 256];

/// The values of all bytes, of those of the codes.
pub(crate) const fn pairs(values: &[f32; 16]) -> Pairs {
    let mut pairs = [[0.0; 2]; 256];
    let mut byte = 0;
    while byte < 256 {
        pairs[byte] = [values[byte >> 4], values[byte & 15]];
        byte += 1;
    }
    pairs
}

/// Decodes elements `start..start + out.len()`: `apply(value, scale)` with the value of the code and the `scale` of the group.
#[inline(always)]
pub(crate) fn decode<S: Copy>(
    codes: &[u8],
    start: usize,
    out: &mut [f32],
    pairs: &Pairs,
    scale: impl Fn(usize) -> S,
    apply: impl Fn(f32, S) -> f32,
) {
    let whole = |codes: &[u8; BYTES], out: &mut [f32; GROUP], group: usize| {
        let scale = scale(group);
        for (out, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
            let [first, second] = pairs[usize::from(byte)];
            *out = [apply(first, scale), apply(second, scale)];
        }
    };
    let (mut at, mut out) = (start, out);
    while !out.is_empty() {
        let (group, skipped) = (at / GROUP, at % GROUP);
        let codes = &codes[group * BYTES..];
        let count = out.len().min(GROUP - skipped);
        let (part, rest) = out.split_at_mut(count);
        match (<&mut [f32; GROUP]>::try_from(&mut *part), codes.first_chunk()) {
            (Ok(part), Some(codes)) => whole(codes, part, group),
            // A part of a group, or a last one that is short: decoded whole beside the result.
            _ => {
                let (mut padded, mut values) = ([0; BYTES], [0.0; GROUP]);
                let present = codes.len().min(BYTES);
                padded[..present].copy_from_slice(&codes[..present]);
                whole(&padded, &mut values, group);
                part.copy_from_slice(&values[skipped..skipped + count]);
            }
        }
        (at, out) = (at + count, rest);
    }
}

/// Packs the codes of one group, of which the last may be short, into its bytes; `zero` fills a nibble that no element has.
pub(crate) fn pack(codes: &[u8], zero: u8, out: &mut [u8]) {
    for (out, pair) in out.iter_mut().zip(codes.chunks(2)) {
        *out = pair[0] << 4 | pair.get(1).copied().unwrap_or(zero);
    }
}
