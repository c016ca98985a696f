//! APOLLO (Zhu et al., 2024).

use tightfit_ir::op::is_negative;
use tightfit_ir::random::Stream;

use super::super::vector::{load, store};
use super::super::{Context, TILE, rows_per_tile, touch_last_word};
use super::adamw::{Adam, AdamStep};
use super::{Scalars, Update};
use crate::gemm::{self, Form, Gemm, View};
use crate::multiversion;
use crate::simd::{Isa, Simd};

/// One step for one matrix.
pub struct Apollo<'a> {
    /// What every update takes.
    pub update: Update,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Random directions.
    pub rank: usize,
    /// First moments, `[max(rows, cols), rank]`, updated in place.
    pub m: *mut f32,
    /// Second moments, likewise.
    pub v: *mut f32,
    /// Norm of the last update, one float, updated in place; 0 for none yet.
    pub norm: *mut f32,
    /// The signs of the projection at a step.
    pub signs: &'a (dyn Fn(f64) -> Stream + Sync),
    /// Largest growth of the update's norm from step to step.
    pub growth: f64,
    /// Added to divisors.
    pub tiny: f64,
    /// Constants.
    pub adam: Adam,
    /// [`apollo_workspace`] bytes.
    pub workspace: *mut u8,
}

shared!(Apollo<'_>);

/// Where the parts of the workspace begin, in bytes; the projection comes first.
struct Layout {
    /// The projected gradient.
    projected: usize,
    /// A scale for each channel.
    scales: usize,
    /// One f64 for each tile of rows.
    sums: usize,
    gemm: usize,
    bytes: u64,
}

impl Layout {
    fn new(isa: Isa, (rows, cols): (usize, usize), rank: usize, threads: usize) -> Self {
        const ALIGN: usize = gemm::WORKSPACE_ALIGN;
        let (channels, smaller) = (rows.max(cols), rows.min(cols));
        let floats = |n: usize| n.saturating_mul(size_of::<f32>()).saturating_add(ALIGN - 1) / ALIGN * ALIGN;
        let projected = floats(smaller.saturating_mul(rank));
        let scales = projected.saturating_add(floats(channels.saturating_mul(rank)));
        let sums = scales.saturating_add(floats(channels));
        // A double is two floats.
        let gemm = sums.saturating_add(floats(2 * rows.div_ceil(rows_per_tile(cols))));
        let product = Form::new(channels, rank, smaller).workspace_bytes(isa, threads);
        Self {
            projected,
            scales,
            sums,
            gemm,
            bytes: (gemm as u64).saturating_add(product),
        }
    }
}

/// Bytes of workspace: the projection, the projected gradient, a scale for each channel, a double for each tile of rows, and what the
/// product needs.
pub fn apollo_workspace(isa: Isa, (rows, cols): (usize, usize), rank: usize, threads: usize) -> u64 {
    Layout::new(isa, (rows, cols), rank, threads).bytes
}

/// `w ← w (1 − lr·λ) − lr · g · s`, where each channel's `s` says how Adam would stretch its projection.
///
/// # Safety
/// See the [module](super::super).
pub unsafe fn apollo(cx: &Context, args: &Apollo) {
    let &Apollo { rows, cols, rank, .. } = args;
    let layout = Layout::new(cx.isa, (rows, cols), rank, cx.pool.threads());
    // SAFETY: the caller's contract.
    let scalars = unsafe {
        touch_last_word(args.workspace, layout.bytes);
        args.update.scalars()
    };
    let Some(scalars) = scalars else { return };
    let (channels, smaller) = (rows.max(cols), rows.min(cols));
    // SAFETY: the parts lie within the workspace; tiles are disjoint.
    unsafe {
        let projection = Projection {
            elements: args.workspace.cast(),
            len: smaller * rank,
            size: (1.0 / (rank as f64).sqrt()) as f32,
            signs: (args.signs)(scalars.step),
        };
        cx.for_each(projection.len.div_ceil(TILE), |_, tile, _| projection.draw(tile * TILE));
        let gradient = View::row_major(args.update.gradient, cols);
        let product = Gemm {
            m: channels,
            n: rank,
            k: smaller,
            a: if rows >= cols { gradient } else { gradient.transposed() },
            b: View::row_major(projection.elements, smaller).transposed().into(),
            c: args.workspace.add(layout.projected).cast::<f32>().into(),
            c_stride: rank,
            add: None,
            bias: None,
        };
        product.run(cx.pool, cx.isa, args.workspace.add(layout.gemm));

        let step = &AdamStep::new(&args.adam, scalars.step);
        let tile_channels = rows_per_tile(rank);
        cx.for_each(channels.div_ceil(tile_channels), |isa, tile, _| {
            let first = tile * tile_channels;
            let channels = first..channels.min(first + tile_channels);
            adapt(isa, args, &scalars, step, &layout, channels)
        });

        let tile_rows = rows_per_tile(cols);
        let tiles = rows.div_ceil(tile_rows);
        let tile = |tile: usize| tile * tile_rows..rows.min((tile + 1) * tile_rows);
        let sums = Sums(args.workspace.add(layout.sums).cast());
        cx.for_each(tiles, |isa, at, _| {
            sums.set(at, sum_squares(isa, args, &layout, tile(at)))
        });
        let norm = (0..tiles).map(|at| sums.get(at)).sum::<f64>().sqrt();
        let before = f64::from(*args.norm);
        let grown = if before == 0.0 {
            1.0
        } else {
            norm / (before + args.tiny) / args.growth
        };
        // Not `f64::max`, which would hide a NaN.
        let grown = if grown < 1.0 { 1.0 } else { grown };
        *args.norm = (norm / grown) as f32;
        let minus_lr = (-scalars.lr / grown) as f32;
        cx.for_each(tiles, |isa, at, _| {
            update_rows(isa, args, &scalars, &layout, minus_lr, tile(at))
        });
    }
}

/// One double for each tile.
#[derive(Clone, Copy)]
struct Sums(*mut f64);

shared!(Sums, Projection);

impl Sums {
    /// # Safety
    /// There are more tiles than that.
    unsafe fn set(self, tile: usize, sum: f64) {
        // SAFETY: the caller's contract.
        unsafe { *self.0.add(tile) = sum }
    }

    /// # Safety
    /// There are more tiles than that, and this one was set.
    unsafe fn get(self, tile: usize) -> f64 {
        // SAFETY: the caller's contract.
        unsafe { *self.0.add(tile) }
    }
}

/// A random matrix of equal magnitudes.
struct Projection {
    elements: *mut f32,
    len: usize,
    size: f32,
    signs: Stream,
}

impl Projection {
    /// Draws a tile of its elements.
    ///
    /// # Safety
    /// The elements are writable, and this tile is nobody else's.
    unsafe fn draw(&self, start: usize) {
        for i in start..self.len.min(start + TILE) {
            let sign = if is_negative(self.signs, i as u32) { -1.0 } else { 1.0 };
            // SAFETY: the caller's contract.
            unsafe { *self.elements.add(i) = sign * self.size };
        }
    }
}

multiversion! {
    unsafe fn adapt(
        args: &Apollo<'_>,
        scalars: &Scalars,
        step: &AdamStep,
        layout: &Layout,
        channels: std::ops::Range<usize>,
    ) = adapt_body;
}

/// Updates the moments of some channels, and finds their scales, the gradient's factor included.
#[inline(always)]
unsafe fn adapt_body<S: Simd>(
    s: S,
    args: &Apollo<'_>,
    scalars: &Scalars,
    step: &AdamStep,
    layout: &Layout,
    channels: std::ops::Range<usize>,
) {
    let factor = s.splat(scalars.factor);
    let unbias = s.splat((1.0 / step.bias_correction1) as f32);
    // SAFETY: the channels' parts of the moments, the projection and the scales.
    unsafe {
        for channel in channels {
            let start = channel * args.rank;
            let r = args.workspace.add(layout.projected).cast::<f32>().add(start);
            let (m, v) = (args.m.add(start), args.v.add(start));
            let (mut projected, mut adapted) = (s.splat(0.0), s.splat(0.0));
            each_vector!(S, args.rank, i, len => {
                let r = s.mul(load(s, r.add(i), len), factor);
                let (m1, v1) = step.moments(s, r, load(s, m.add(i), len), load(s, v.add(i), len));
                store(s, m.add(i), m1, len);
                store(s, v.add(i), v1, len);
                // Where there is no element all of these are 0.
                let u = s.div(s.mul(m1, unbias), step.denominator(s, v1));
                projected = s.fma(r, r, projected);
                adapted = s.fma(u, u, adapted);
            });
            let [projected, adapted] = [projected, adapted].map(|sum| f64::from(s.reduce_add(sum)).sqrt());
            let scale = adapted / (projected + args.tiny) * f64::from(scalars.factor);
            *args.workspace.add(layout.scales).cast::<f32>().add(channel) = scale as f32;
        }
    }
}

/// Where the scales of a row's elements are, and the one of the whole row: one of them is 1.
///
/// # Safety
/// The scales are written.
#[inline(always)]
unsafe fn scales(args: &Apollo<'_>, layout: &Layout, row: usize) -> (Option<*const f32>, f32) {
    // SAFETY: one for each channel.
    unsafe {
        let scales = args.workspace.add(layout.scales).cast::<f32>().cast_const();
        match args.rows >= args.cols {
            true => (None, *scales.add(row)),
            false => (Some(scales), 1.0),
        }
    }
}

multiversion! {
    unsafe fn sum_squares(args: &Apollo<'_>, layout: &Layout, rows: std::ops::Range<usize>) -> f64
        = sum_body;
}

/// The sum of the squares of some rows' scaled gradient.
#[inline(always)]
unsafe fn sum_body<S: Simd>(s: S, args: &Apollo<'_>, layout: &Layout, rows: std::ops::Range<usize>) -> f64 {
    let mut total = 0.0;
    // SAFETY: the rows are the matrix's.
    unsafe {
        for row in rows {
            let gradient = args.update.gradient.add(row * args.cols);
            let (by_column, of_row) = scales(args, layout, row);
            let mut sum = s.splat(0.0);
            each_vector!(S, args.cols, i, len => {
                let mut g = s.mul(load(s, gradient.add(i), len), s.splat(of_row));
                if let Some(scales) = by_column {
                    g = s.mul(g, load(s, scales.add(i), len));
                }
                sum = s.fma(g, g, sum);
            });
            total += f64::from(s.reduce_add(sum));
        }
    }
    total
}

multiversion! {
    unsafe fn update_rows(
        args: &Apollo<'_>,
        scalars: &Scalars,
        layout: &Layout,
        minus_lr: f32,
        rows: std::ops::Range<usize>,
    ) = update_body;
}

/// Updates some rows.
#[inline(always)]
unsafe fn update_body<S: Simd>(
    s: S,
    args: &Apollo<'_>,
    scalars: &Scalars,
    layout: &Layout,
    minus_lr: f32,
    rows: std::ops::Range<usize>,
) {
    let keep = s.splat(scalars.keep);
    let minus_lr = s.splat(minus_lr);
    // SAFETY: the rows are the matrix's.
    unsafe {
        for row in rows {
            let part = args.update.part(scalars, row * args.cols);
            let (by_column, of_row) = scales(args, layout, row);
            each_vector!(S, args.cols, i, len => {
                let mut g = s.mul(load(s, part.gradient.add(i), len), s.splat(of_row));
                if let Some(scales) = by_column {
                    g = s.mul(g, load(s, scales.add(i), len));
                }
                let w = s.fma(minus_lr, g, s.mul(part.weight(s, i, len), keep));
                part.set_weight(s, i, w, len);
            });
        }
    }
}
