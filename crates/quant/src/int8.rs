//! 8 bits, and a scale for each row: `f32[rows]`, then `i8[rows, cols]`.
//!
//! Symmetric, per output channel: a row's scale is its largest magnitude over 127, codes are -127 to 127, and an element is
//! `code * scale`.

use crate::{round, within};

/// The largest code.
const LIMIT: f32 = 127.0;

/// One row: its scale and its codes.
pub(crate) fn encode_row(row: &[f32], scale: &mut [u8; 4], codes: &mut [u8]) {
    let largest = row.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
    let step = largest / LIMIT;
    *scale = step.to_le_bytes();
    if step == 0.0 {
        codes.fill(0);
        return;
    }
    for (code, x) in codes.iter_mut().zip(row) {
        *code = round(within(x / step, -LIMIT, LIMIT)) as i32 as u8;
    }
}

/// Elements `start..start + out.len()` of the flattened matrix.
#[inline(always)]
pub(crate) fn decode(bytes: &[u8], rows: usize, cols: usize, start: usize, out: &mut [f32]) {
    let (scales, codes) = bytes.split_at(rows * size_of::<f32>());
    let scales = scales.as_chunks::<4>().0;
    let (mut at, mut out) = (start, out);
    while !out.is_empty() {
        let (row, skipped) = (at / cols, at % cols);
        let scale = f32::from_le_bytes(scales[row]);
        let count = out.len().min(cols - skipped);
        let (part, rest) = out.split_at_mut(count);
        for (x, &code) in part.iter_mut().zip(&codes[at..at + count]) {
            *x = f32::from(code as i8) * scale;
        }
        (at, out) = (at + count, rest);
    }
}
