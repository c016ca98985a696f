//! Copies of blocks of A and B in the order in which the micro-kernel reads them, converted to its words.
//!
//! Whatever is stored otherwise goes through a few lines on the stack: rows are read into them in `f32`, become words, and are laid
//! out from there. So each number is converted once and no more than a few KiB of it exist twice. What is stored as words is laid out
//! from where it is.

use super::kernel::Micro;
use super::matrix::Matrix;
use super::terms::Terms;
use crate::floats::Floats;
use crate::simd::Simd;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Columns that one call packs at most: the longest block of a quantised format.
pub(super) const WIDTH: usize = 256;

/// Lines that are transposed together.
const LINES: usize = 8;

/// Numbers on their way, on the stack.
struct Lines(MaybeUninit<[[f32; WIDTH]; LINES]>);

impl Lines {
    #[inline(always)]
    fn new() -> Self {
        Self(MaybeUninit::uninit())
    }

    /// The start of line `index`, below [`LINES`].
    #[inline(always)]
    fn line(&mut self, index: usize) -> *mut f32 {
        self.0.as_mut_ptr().cast::<f32>().wrapping_add(index * WIDTH)
    }
}

/// Packs columns `columns` of B, at most [`WIDTH`], and `terms` of the sum: panels of `nr` columns, one after the other, with zeros on
/// the right of the last one; in each a row of `nr` words for every word of the sum.
///
/// # Safety
/// They are inside of B, whose sums have `inner` terms; the panels are writable at `dst` and do not overlap B; blocks of a quantised
/// matrix are whole.
#[inline(always)]
pub(super) unsafe fn panels<S: Micro, T: Terms<S>>(
    s: S,
    b: &Matrix,
    inner: usize,
    terms: Range<usize>,
    columns: Range<usize>,
    dst: *mut f32,
) {
    let nr = S::SIZES.nr;
    let words = terms.len().div_ceil(T::IN_WORD);
    let stored = b.words(T::IN_WORD, inner);
    let mut lines = Lines::new();
    // SAFETY: rows, columns and words below are inside of B, the lines and the panels.
    unsafe {
        if !b.is_transposed() {
            // One term is one number here, so B has whole words only where a word is one.
            let stored = stored.filter(|_| T::IN_WORD == 1);
            for word in 0..words {
                let line = match stored {
                    Some((data, stride)) => data.add((terms.start + word) * stride + columns.start),
                    None => {
                        let first = terms.start + word * T::IN_WORD;
                        across::<S, T>(s, b, first..terms.end, columns.clone(), &mut lines, 0);
                        lines.line(0).cast_const()
                    }
                };
                for column in (0..columns.len()).step_by(nr) {
                    let to = dst.add(column * words + word * nr);
                    for lane in (0..nr).step_by(S::LANES) {
                        let at = column + lane;
                        let left = columns.len().saturating_sub(at);
                        s.store(to.add(lane), Floats::of(line.wrapping_add(at)).load(s, left));
                    }
                }
            }
            return;
        }
        for panel in (0..columns.len()).step_by(nr) {
            for first in (panel..panel + nr).step_by(LINES) {
                let column = columns.start + first;
                let count = columns.len().saturating_sub(first).min(LINES);
                for word in (0..words).step_by(WIDTH / T::IN_WORD) {
                    let length = (words - word).min(WIDTH / T::IN_WORD);
                    let term = terms.start + word * T::IN_WORD;
                    let to = dst.add(panel * words + word * nr + first - panel);
                    match stored {
                        Some((data, stride)) if count == LINES => {
                            let from = data.add(column * stride + term / T::IN_WORD);
                            transpose(s, from, stride, length, to, nr);
                        }
                        _ => {
                            let read = (terms.end - term).min(length * T::IN_WORD);
                            for line in 0..LINES {
                                let out = lines.line(line);
                                if line < count {
                                    along::<S, T>(s, b, column + line, term..term + read, out, out);
                                } else {
                                    out.write_bytes(0, length);
                                }
                            }
                            transpose(s, lines.line(0), WIDTH, length, to, nr);
                        }
                    }
                }
            }
        }
    }
}

/// Copies rows `rows` of A and `terms` of the sum, both at most [`WIDTH`] words, to rows of words `stride` apart.
///
/// # Safety
/// They are inside of A, whose sums have `inner` terms; the rows are writable at `dst`, rounded up to whole cache lines, and do not
/// overlap A.
#[inline(always)]
pub(super) unsafe fn rows<S: Micro, T: Terms<S>>(
    s: S,
    a: &Matrix,
    inner: usize,
    rows: Range<usize>,
    terms: Range<usize>,
    dst: *mut f32,
    stride: usize,
) {
    let words = terms.len().div_ceil(T::IN_WORD);
    let mut lines = Lines::new();
    // SAFETY: rows, columns and words below are inside of A, the lines and the rows that are written.
    unsafe {
        if !a.is_transposed() {
            for (i, row) in rows.enumerate() {
                for word in (0..words).step_by(WIDTH / T::IN_WORD) {
                    let term = terms.start + word * T::IN_WORD;
                    let end = terms.end.min(term + WIDTH);
                    along::<S, T>(s, a, row, term..end, lines.line(0), dst.add(i * stride + word));
                }
            }
            return;
        }
        let stored = a.words(T::IN_WORD, inner).filter(|_| T::IN_WORD == 1);
        for word in (0..words).step_by(LINES) {
            let count = (words - word).min(LINES);
            let (from, from_stride) = match stored {
                Some((data, stride)) if count == LINES => {
                    (data.add((terms.start + word) * stride + rows.start), stride)
                }
                _ => {
                    for line in 0..LINES {
                        if line < count {
                            let first = terms.start + (word + line) * T::IN_WORD;
                            across::<S, T>(s, a, first..terms.end, rows.clone(), &mut lines, line);
                        } else {
                            lines.line(line).write_bytes(0, rows.len());
                        }
                    }
                    (lines.line(0).cast_const(), WIDTH)
                }
            };
            // Rows end with a whole cache line, so that eight words fit also where fewer are left.
            transpose(s, from, from_stride, rows.len(), dst.add(word), stride);
        }
    }
}

/// The words of `terms` of a stored row, at most [`WIDTH`], that lie along it. `room` holds them in `f32` on the way; it may be `out`.
///
/// # Safety
/// The terms are inside of the row; `room` and `out` are writable to the end of a vector.
#[inline(always)]
unsafe fn along<S: Simd, T: Terms<S>>(
    s: S,
    matrix: &Matrix,
    row: usize,
    terms: Range<usize>,
    room: *mut f32,
    out: *mut f32,
) {
    // SAFETY: the caller's contract. Pairs are half as long as what they are made of, so they are written behind what is read.
    unsafe {
        if T::IN_WORD == 1 {
            matrix.read(s, row, terms.start, terms.len(), out);
        } else {
            matrix.read(s, row, terms.start, terms.len(), room);
            for j in (0..terms.len()).step_by(S::LANES) {
                s.store_bf16(out.cast::<u16>().add(j), s.load(room.add(j)));
            }
        }
    }
}

/// The words of the first of `terms`, which are stored rows, at `columns`: one row, or two of them in pairs. They come to line `line`.
///
/// # Safety
/// The first of the terms is a row with those columns, at most [`WIDTH`].
#[inline(always)]
unsafe fn across<S: Simd, T: Terms<S>>(
    s: S,
    matrix: &Matrix,
    terms: Range<usize>,
    columns: Range<usize>,
    lines: &mut Lines,
    line: usize,
) {
    let len = columns.len();
    let out = lines.line(line);
    // SAFETY: the caller's contract.
    unsafe {
        matrix.read(s, terms.start, columns.start, len, out);
        if T::IN_WORD == 1 {
            return;
        }
        let mut room = MaybeUninit::<[f32; WIDTH]>::uninit();
        let second = room.as_mut_ptr().cast::<f32>();
        if terms.len() > 1 {
            matrix.read(s, terms.start + 1, columns.start, len, second);
        } else {
            second.write_bytes(0, len.next_multiple_of(S::LANES));
        }
        let mut halves = [[0_u16; 16]; 2];
        for j in (0..len).step_by(S::LANES) {
            s.store_bf16(halves[0].as_mut_ptr(), s.load(out.add(j)));
            s.store_bf16(halves[1].as_mut_ptr(), s.load(second.add(j)));
            let [low, high] = &halves;
            for (lane, (&low, &high)) in low.iter().zip(high).take(S::LANES).enumerate() {
                *out.add(j + lane) = f32::from_bits(u32::from(low) | u32::from(high) << 16);
            }
        }
    }
}

/// `dst[j * dst_stride + line] = src[line * src_stride + j]` of eight lines, for `j` below `len`.
///
/// # Safety
/// They are readable and writable, and do not overlap.
#[inline(always)]
unsafe fn transpose<S: Simd>(s: S, src: *const f32, src_stride: usize, len: usize, dst: *mut f32, dst_stride: usize) {
    let whole = len & !7;
    // SAFETY: the caller's contract.
    unsafe {
        for j in (0..whole).step_by(8) {
            s.transpose8(src.add(j), src_stride, dst.add(j * dst_stride), dst_stride);
        }
        for j in whole..len {
            for line in 0..LINES {
                *dst.add(j * dst_stride + line) = *src.add(line * src_stride + j);
            }
        }
    }
}
