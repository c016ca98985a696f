//! Inverted dropout with masks drawn from counters.

use tightfit_ir::op::Dropout as Op;

use super::vector::load;
use super::{Context, rows_per_tile};
use crate::floats::{Floats, MOST_LANES};
use crate::multiversion;
use crate::simd::Simd;

/// `y = x · mask / (1 − p)`.
pub struct Dropout {
    /// What is drawn.
    pub op: Op,
    /// Rows: tokens.
    pub rows: usize,
    /// Width of a row.
    pub cols: usize,
    /// The first token's number in two words.
    pub first_token: *const i32,
    /// Input, `[rows, cols]`.
    pub x: Floats,
    /// Output, `[rows, cols]`; in place over `x`.
    pub y: Floats,
}

shared!(Dropout);

/// Zeros elements, and scales the others.
///
/// # Safety
/// See the [module](super).
pub unsafe fn dropout(cx: &Context, args: &Dropout) {
    cx.for_each(args.rows.div_ceil(rows_per_tile(args.cols)), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { dropout_tile(isa, args, tile) }
    });
}

multiversion! {
    unsafe fn dropout_tile(args: &Dropout, tile: usize) = dropout_body;
}

#[inline(always)]
unsafe fn dropout_body<S: Simd>(s: S, args: &Dropout, tile: usize) {
    let Dropout { op, cols, x, y, .. } = args;
    let rows = rows_per_tile(*cols);
    let (factor, threshold) = (op.factor(), op.threshold());
    // SAFETY: both words are readable.
    let first_token = unsafe { tightfit_ir::op::token_number([*args.first_token, *args.first_token.add(1)]) };
    for row in tile * rows..args.rows.min((tile + 1) * rows) {
        let draws = op.draws(first_token, row as u64);
        // SAFETY: the row lies within `rows`; each vector is read before it is written.
        unsafe {
            let (x, y) = (x.add(row * cols), y.add(row * cols));
            each_vector!(S, *cols, i, len => {
                let mut factors = [0.0; MOST_LANES];
                // Whole vectors of draws, whatever `len`, for the compiler to make vectors of.
                for (lane, kept) in factors.iter_mut().enumerate().take(S::LANES) {
                    let keeps = draws.at((i + lane) as u32) >= threshold;
                    *kept = if keeps { factor } else { 0.0 };
                }
                let mask = load(s, factors.as_ptr(), S::LANES);
                y.add(i).store(s, s.mul(x.add(i).load(s, len), mask), len);
            });
        }
    }
}
