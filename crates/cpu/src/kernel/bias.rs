//! Gradient of a bias.

use super::Context;
use super::vector::{load, load_optional, store};
use crate::floats::Floats;
use crate::multiversion;
use crate::simd::Simd;

/// Column sums of `dy[rows, cols]`.
pub struct BiasBackward {
    /// Rows of `dy`.
    pub rows: usize,
    /// Columns of `dy`.
    pub cols: usize,
    /// Gradient of the output, `[rows, cols]`.
    pub dy: Floats,
    /// Added to the result, `[cols]`.
    pub acc: Option<*const f32>,
    /// Gradient of the bias, `[cols]`; in place over `acc`.
    pub db: *mut f32,
}

shared!(BiasBackward);

/// Columns of a tile: a few cache lines, so that walking down the rows uses whole ones.
const COLUMNS: usize = 64;

/// `db = acc + Σ_rows dy`.
///
/// # Safety
/// See the [module](super).
pub unsafe fn bias_backward(cx: &Context, args: &BiasBackward) {
    cx.for_each(args.cols.div_ceil(COLUMNS), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { column_sums_tile(isa, args, tile) }
    });
}

multiversion! {
    unsafe fn column_sums_tile(args: &BiasBackward, tile: usize) = column_sums_body;
}

#[inline(always)]
unsafe fn column_sums_body<S: Simd>(s: S, args: &BiasBackward, tile: usize) {
    let start = tile * COLUMNS;
    let width = COLUMNS.min(args.cols - start);
    let mut sums = [0.0f32; COLUMNS];
    // SAFETY: columns `start..start + width` of each row; `sums` is as wide as a tile.
    unsafe {
        for row in 0..args.rows {
            let dy = args.dy.add(row * args.cols + start);
            let sums = sums.as_mut_ptr();
            each_vector!(S, width, i, len => {
                store(s, sums.add(i), s.add(load(s, sums.add(i), len), load(s, dy.add(i), len)), len);
            });
        }
        let db = args.db.add(start);
        each_vector!(S, width, i, len => {
            let acc = load_optional(s, args.acc, start + i, len);
            store(s, db.add(i), s.add(acc, load(s, sums.as_ptr().add(i), len)), len);
        });
    }
}
