//! LayerNorm (Ba, Kiros and Hinton, 2016).

use super::bias::{BiasBackward, bias_backward};
use super::rms_norm::rows_per_partial;
use super::vector::{load, load_optional, store};
use super::{Context, rows_per_tile};
use crate::floats::Floats;
use crate::multiversion;
use crate::simd::Simd;

/// `y = w · (x − mean) · rstd + b` with `rstd = 1 / √(var(x) + eps)` per row, the variance over
/// `hidden`.
pub struct LayerNorm {
    /// Tokens.
    pub rows: usize,
    /// Width of a row.
    pub hidden: usize,
    /// Added to the variance.
    pub eps: f32,
    /// Input, `[rows, hidden]`.
    pub x: Floats,
    /// Weight, `[hidden]`.
    pub w: Floats,
    /// Bias, `[hidden]`.
    pub b: Floats,
    /// Output, `[rows, hidden]`; in place over `x`.
    pub y: Floats,
    /// Mean, `[rows]`.
    pub mean: *mut f32,
    /// Reciprocal standard deviation, `[rows]`.
    pub rstd: *mut f32,
}

/// Gradient of [`LayerNorm`].
pub struct LayerNormBackward {
    /// Tokens.
    pub rows: usize,
    /// Width of a row.
    pub hidden: usize,
    /// Input of the forward op, `[rows, hidden]`.
    pub x: Floats,
    /// Weight, `[hidden]`.
    pub w: Floats,
    /// From the forward op, `[rows]`.
    pub mean: *const f32,
    /// From the forward op, `[rows]`.
    pub rstd: *const f32,
    /// Gradient of the output, `[rows, hidden]`.
    pub dy: Floats,
    /// Added to `dx`, `[rows, hidden]`.
    pub acc_dx: Option<Floats>,
    /// Added to `dw`, `[hidden]`.
    pub acc_dw: Option<*const f32>,
    /// Added to `db`, `[hidden]`.
    pub acc_db: Option<*const f32>,
    /// Gradient of the input if wanted, `[rows, hidden]`; in place over `dy` or `acc_dx`.
    pub dx: Option<Floats>,
    /// Gradient of the weight if wanted, `[hidden]`; in place over `acc_dw`.
    pub dw: Option<*mut f32>,
    /// Gradient of the bias if wanted, `[hidden]`; in place over `acc_db`.
    pub db: Option<*mut f32>,
    /// [`layer_norm_backward_workspace`] bytes.
    pub workspace: *mut u8,
}

shared!(LayerNorm, LayerNormBackward);

/// Normalises each row.
///
/// # Safety
/// See the [module](super).
pub unsafe fn layer_norm(cx: &Context, args: &LayerNorm) {
    let rows = rows_per_tile(args.hidden);
    cx.for_each(args.rows.div_ceil(rows), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { forward_tile(isa, args, tile * rows, args.rows.min((tile + 1) * rows)) }
    });
}

multiversion! {
    unsafe fn forward_tile(args: &LayerNorm, first: usize, end: usize) = forward_body;
}

#[inline(always)]
unsafe fn forward_body<S: Simd>(s: S, args: &LayerNorm, first: usize, end: usize) {
    let hidden = args.hidden;
    // SAFETY: rows `first..end` belong to this tile.
    unsafe {
        for row in first..end {
            let (x, y) = (args.x.add(row * hidden), args.y.add(row * hidden));
            let mut sum = s.splat(0.0);
            each_vector!(S, hidden, i, len => {
                sum = s.add(sum, load(s, x.add(i), len));
            });
            let mean = s.reduce_add(sum) / hidden as f32;
            // The variance in a second pass: subtracting squares would cancel where the mean is
            // large.
            let centre = s.splat(mean);
            let mut squares = s.splat(0.0);
            each_vector!(S, hidden, i, len => {
                let mut d = s.sub(load(s, x.add(i), len), centre);
                if len < S::LANES {
                    // Lanes behind the row's end would count as −mean.
                    d = s.mul(d, load(s, [1.0_f32; 16].as_ptr(), len));
                }
                squares = s.fma(d, d, squares);
            });
            let rstd = 1.0 / (s.reduce_add(squares) / hidden as f32 + args.eps).sqrt();
            *args.mean.add(row) = mean;
            *args.rstd.add(row) = rstd;
            let rstd = s.splat(rstd);
            each_vector!(S, hidden, i, len => {
                let normalised = s.mul(s.sub(load(s, x.add(i), len), centre), rstd);
                let v = s.fma(normalised, load(s, args.w.add(i), len), load(s, args.b.add(i), len));
                store(s, y.add(i), v, len);
            });
        }
    }
}

/// Bytes of workspace: partial gradients of weight and bias, one of each per group of rows.
pub fn layer_norm_backward_workspace(rows: usize, hidden: usize) -> u64 {
    2 * (rows.div_ceil(rows_per_partial(rows)) * hidden * size_of::<f32>()) as u64
}

/// With x̂ = (x − mean) · rstd and g = dy · w:
/// `dx = acc_dx + rstd · (g − mean(g) − x̂ · mean(g · x̂))`, `dw = acc_dw + Σ_rows dy · x̂` and
/// `db = acc_db + Σ_rows dy`.
///
/// # Safety
/// See the [module](super).
pub unsafe fn layer_norm_backward(cx: &Context, args: &LayerNormBackward) {
    let rows = rows_per_partial(args.rows);
    let partials = args.rows.div_ceil(rows);
    cx.for_each(partials, |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { backward_tile(isa, args, tile, tile * rows, args.rows.min((tile + 1) * rows)) }
    });
    let dw_partials = args.workspace.cast::<f32>();
    let sum = |dy: *mut f32, acc, db| BiasBackward {
        rows: partials,
        cols: args.hidden,
        dy: dy.into(),
        acc,
        db,
    };
    // SAFETY: the partials that the tiles have written.
    unsafe {
        if let Some(dw) = args.dw {
            bias_backward(cx, &sum(dw_partials, args.acc_dw, dw));
        }
        if let Some(db) = args.db {
            bias_backward(cx, &sum(dw_partials.add(partials * args.hidden), args.acc_db, db));
        }
    }
}

multiversion! {
    unsafe fn backward_tile(args: &LayerNormBackward, partial: usize, first: usize, end: usize) = backward_body;
}

#[inline(always)]
unsafe fn backward_body<S: Simd>(s: S, args: &LayerNormBackward, partial: usize, first: usize, end: usize) {
    let hidden = args.hidden;
    let partials = args.rows.div_ceil(rows_per_partial(args.rows));
    // SAFETY: rows `first..end` and the partials belong to this tile; each vector is read before it
    // is written.
    unsafe {
        let dw = args.workspace.cast::<f32>().add(partial * hidden);
        let db = dw.add(partials * hidden);
        dw.write_bytes(0, hidden);
        db.write_bytes(0, hidden);
        for row in first..end {
            let (x, dy) = (args.x.add(row * hidden), args.dy.add(row * hidden));
            let centre = s.splat(*args.mean.add(row));
            let rstd = s.splat(*args.rstd.add(row));
            let (mut sum, mut sum_xhat) = (s.splat(0.0), s.splat(0.0));
            each_vector!(S, hidden, i, len => {
                // Lanes behind the row's end have g = 0.
                let g = s.mul(load(s, dy.add(i), len), load(s, args.w.add(i), len));
                let xhat = s.mul(s.sub(load(s, x.add(i), len), centre), rstd);
                sum = s.add(sum, g);
                sum_xhat = s.fma(g, xhat, sum_xhat);
            });
            let mean = s.splat(s.reduce_add(sum) / hidden as f32);
            let mean_xhat = s.splat(s.reduce_add(sum_xhat) / hidden as f32);
            each_vector!(S, hidden, i, len => {
                let xhat = s.mul(s.sub(load(s, x.add(i), len), centre), rstd);
                let d = load(s, dy.add(i), len);
                store(s, dw.add(i), s.fma(d, xhat, load(s, dw.add(i), len)), len);
                store(s, db.add(i), s.add(d, load(s, db.add(i), len)), len);
                let g = s.mul(d, load(s, args.w.add(i), len));
                let centred = s.sub(s.sub(g, mean), s.mul(xhat, mean_xhat));
                if let Some(dx) = args.dx {
                    let acc = load_optional(s, args.acc_dx, row * hidden + i, len);
                    store(s, dx.add(row * hidden + i), s.fma(rstd, centred, acc), len);
                }
            });
        }
    }
}
