//! Rotary position embedding (Su et al., 2021), in the half-split layout of Hugging Face's LLaMA:
//! element `i` of a head is rotated together with element `i + head_dim / 2`.

use super::vector::{load, store};
use super::{Context, rows_per_tile};
use crate::floats::Floats;
use crate::multiversion;
use crate::simd::Simd;

/// Cosines and sines of every row's angles `position · frequency(i)`, for `i < head_dim / 2`.
pub struct RopeTable<'a> {
    /// Tokens.
    pub rows: usize,
    /// Width of a head, even.
    pub head_dim: usize,
    /// The angle between a position and the next, by `i`.
    pub frequency: &'a (dyn Fn(usize) -> f32 + Sync + 'a),
    /// Positions within their documents, `[rows]`.
    pub positions: *const i32,
    /// Table, `[rows, head_dim]`: cosines in the first half of a row, sines in the second.
    pub cs: *mut f32,
}

/// Rotation of every head of every row.
pub struct Rope {
    /// Tokens.
    pub rows: usize,
    /// Heads in a row.
    pub heads: usize,
    /// Width of a head, even.
    pub head_dim: usize,
    /// Rotate back: the gradient of the rotation.
    pub inverse: bool,
    /// Input, `[rows, heads · head_dim]`.
    pub x: Floats,
    /// From [`rope_table`], `[rows, head_dim]`.
    pub cs: *const f32,
    /// Output, `[rows, heads · head_dim]`; in place over `x`.
    pub y: Floats,
}

shared!(RopeTable<'_>, Rope);

/// Fills the table. Angles are rounded to f32 as Hugging Face rounds them, and their cosines and sines are exact but for the last
/// rounding.
///
/// # Safety
/// See the [module](super).
pub unsafe fn rope_table(cx: &Context, args: &RopeTable) {
    // Sines and cosines cost more than other elements: smaller tiles.
    let rows = rows_per_tile(args.head_dim * 16);
    cx.for_each(args.rows.div_ceil(rows), |_, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { table_rows(args, tile * rows, args.rows.min((tile + 1) * rows)) }
    });
}

/// # Safety
/// Rows `first..end` belong to the caller.
unsafe fn table_rows(args: &RopeTable, first: usize, end: usize) {
    let half = args.head_dim / 2;
    for i in 0..half {
        let frequency = (args.frequency)(i);
        for row in first..end {
            // SAFETY: `row` is below `rows`, `half + i` below `head_dim`.
            unsafe {
                let angle = f64::from(*args.positions.add(row) as f32 * frequency);
                let (sin, cos) = angle.sin_cos();
                *args.cs.add(row * args.head_dim + i) = cos as f32;
                *args.cs.add(row * args.head_dim + half + i) = sin as f32;
            }
        }
    }
}

/// `y₁ = x₁ cos − x₂ sin`, `y₂ = x₂ cos + x₁ sin`; with the sine negated where `inverse`.
///
/// # Safety
/// See the [module](super).
pub unsafe fn rope(cx: &Context, args: &Rope) {
    let rows = rows_per_tile(args.heads * args.head_dim);
    cx.for_each(args.rows.div_ceil(rows), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { rope_tile(isa, args, tile * rows, args.rows.min((tile + 1) * rows)) }
    });
}

multiversion! {
    unsafe fn rope_tile(args: &Rope, first: usize, end: usize) = rope_body;
}

#[inline(always)]
unsafe fn rope_body<S: Simd>(s: S, args: &Rope, first: usize, end: usize) {
    let half = args.head_dim / 2;
    let sign = s.splat(if args.inverse { -1.0 } else { 1.0 });
    // SAFETY: rows `first..end` belong to this tile; both halves are read before they are written.
    unsafe {
        for row in first..end {
            let cos = args.cs.add(row * args.head_dim);
            for head in 0..args.heads {
                let start = (row * args.heads + head) * args.head_dim;
                let (x, y) = (args.x.add(start), args.y.add(start));
                each_vector!(S, half, i, len => {
                    let c = load(s, cos.add(i), len);
                    let sin = s.mul(load(s, cos.add(half + i), len), sign);
                    let x1 = load(s, x.add(i), len);
                    let x2 = load(s, x.add(half + i), len);
                    store(s, y.add(i), s.sub(s.mul(x1, c), s.mul(x2, sin)), len);
                    store(s, y.add(half + i), s.fma(x2, c, s.mul(x1, sin)), len);
                });
            }
        }
    }
}
