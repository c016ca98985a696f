//! Rows of a matrix taken out, and put back between zeros or onto another matrix.

use super::add::{Add, add, zero};
use super::{Context, TILE};
use crate::floats::Floats;

/// `y = x[start..start + rows]`.
pub struct SliceRows {
    /// First row taken.
    pub start: usize,
    /// Rows taken.
    pub rows: usize,
    /// Width of a row.
    pub cols: usize,
    /// At least `start + rows` rows.
    pub x: Floats,
    /// `[rows, cols]`.
    pub y: Floats,
}

/// `y[start..start + rows] = acc[…] + x`; all other rows are those of `acc`, zero where there is none.
pub struct PadRows {
    /// First row of `y` that `x` goes to.
    pub start: usize,
    /// Rows of `x`.
    pub rows: usize,
    /// Rows of `y`, at least `start + rows`.
    pub total: usize,
    /// Width of a row.
    pub cols: usize,
    /// `[rows, cols]`.
    pub x: Floats,
    /// Added to the result, `[total, cols]`.
    pub acc: Option<Floats>,
    /// `[total, cols]`; in place over `acc`, of which then only `rows` rows are touched.
    pub y: Floats,
}

/// Copies some rows.
///
/// # Safety
/// See the [module](super).
pub unsafe fn slice_rows(cx: &Context, args: &SliceRows) {
    // SAFETY: the caller's contract.
    unsafe { copy(cx, args.x.add(args.start * args.cols), args.y, args.rows * args.cols) };
}

/// Puts rows where they belong.
///
/// # Safety
/// See the [module](super).
pub unsafe fn pad_rows(cx: &Context, args: &PadRows) {
    let &PadRows { x, acc, y, .. } = args;
    let [start, len, total] = [args.start, args.rows, args.total].map(|rows| rows * args.cols);
    let end = start + len;
    // SAFETY: the caller's contract; all spans lie within `total`.
    unsafe {
        for (from, to) in [(0, start), (end, total)] {
            match acc {
                Some(acc) if acc.address() == y.address() => {}
                Some(acc) => copy(cx, acc.add(from), y.add(from), to - from),
                None => zero(cx, y.add(from).address(), (to - from) * y.stored().size()),
            }
        }
        let y = y.add(start);
        match acc {
            Some(acc) => {
                let (a, b, c) = (acc.add(start), x, y);
                add(cx, &Add { len, a, b, c });
            }
            None => copy(cx, x, y, len),
        }
    }
}

/// Copies `len` numbers, stored the same way at both.
///
/// # Safety
/// They are readable at `from` and writable at `to`, which do not overlap; see the [module](super).
unsafe fn copy(cx: &Context, from: Floats, to: Floats, len: usize) {
    struct Span(Floats, Floats, usize);
    shared!(Span);
    let copy_tile = |span: &Span, start: usize| {
        // SAFETY: the tile lies within `len`; tiles are disjoint.
        unsafe {
            let (from, to) = (span.0.add(start), span.1.add(start));
            to.copy_from(from, TILE.min(span.2 - start));
        }
    };
    let span = &Span(from, to, len);
    cx.for_each(len.div_ceil(TILE), |_, tile, _| copy_tile(span, tile * TILE));
}
