//! RMSNorm (Zhang and Sennrich, 2019), without re-centering and without bias.

use super::bias::{BiasBackward, bias_backward};
use super::vector::{dot, load, load_optional, store};
use super::{Context, rows_per_tile};
use crate::floats::Floats;
use crate::multiversion;
use crate::simd::Simd;

/// `y = w · x · rstd` with `rstd = 1 / √(mean(x²) + eps)` per row.
pub struct RmsNorm {
    /// Tokens.
    pub rows: usize,
    /// Width of a row.
    pub hidden: usize,
    /// Added to the mean square.
    pub eps: f32,
    /// Input, `[rows, hidden]`.
    pub x: Floats,
    /// Weight, `[hidden]`.
    pub w: Floats,
    /// Output, `[rows, hidden]`; in place over `x`.
    pub y: Floats,
    /// Reciprocal root mean square, `[rows]`.
    pub rstd: *mut f32,
}

/// Gradient of [`RmsNorm`].
pub struct RmsNormBackward {
    /// Tokens.
    pub rows: usize,
    /// Width of a row.
    pub hidden: usize,
    /// Input of the forward op, `[rows, hidden]`.
    pub x: Floats,
    /// Weight, `[hidden]`.
    pub w: Floats,
    /// From the forward op, `[rows]`.
    pub rstd: *const f32,
    /// Gradient of the output, `[rows, hidden]`.
    pub dy: Floats,
    /// Added to `dx`, `[rows, hidden]`.
    pub acc_dx: Option<Floats>,
    /// Added to `dw`, `[hidden]`.
    pub acc_dw: Option<*const f32>,
    /// Gradient of the input if wanted, `[rows, hidden]`; in place over `dy` or `acc_dx`.
    pub dx: Option<Floats>,
    /// Gradient of the weight if wanted, `[hidden]`; in place over `acc_dw`.
    pub dw: Option<*mut f32>,
    /// [`rms_norm_backward_workspace`] bytes.
    pub workspace: *mut u8,
}

shared!(RmsNorm, RmsNormBackward);

/// Normalises each row.
///
/// # Safety
/// See the [module](super).
pub unsafe fn rms_norm(cx: &Context, args: &RmsNorm) {
    let rows = rows_per_tile(args.hidden);
    cx.for_each(args.rows.div_ceil(rows), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { forward_tile(isa, args, tile * rows, args.rows.min((tile + 1) * rows)) }
    });
}

multiversion! {
    unsafe fn forward_tile(args: &RmsNorm, first: usize, end: usize) = forward_body;
}

#[inline(always)]
unsafe fn forward_body<S: Simd>(s: S, args: &RmsNorm, first: usize, end: usize) {
    // SAFETY: rows `first..end` belong to this tile.
    unsafe {
        for row in first..end {
            let (x, y) = (args.x.add(row * args.hidden), args.y.add(row * args.hidden));
            let rstd = 1.0 / (dot(s, x, x, args.hidden) / args.hidden as f32 + args.eps).sqrt();
            *args.rstd.add(row) = rstd;
            let rstd = s.splat(rstd);
            each_vector!(S, args.hidden, i, len => {
                let normalised = s.mul(load(s, x.add(i), len), rstd);
                store(s, y.add(i), s.mul(normalised, load(s, args.w.add(i), len)), len);
            });
        }
    }
}

/// Rows whose weight gradients are summed into one partial: about 32 partials for any number of
/// rows.
pub(super) fn rows_per_partial(rows: usize) -> usize {
    rows.div_ceil(32).max(1)
}

/// Bytes of workspace: one partial weight gradient per group of rows.
pub fn rms_norm_backward_workspace(rows: usize, hidden: usize) -> u64 {
    (rows.div_ceil(rows_per_partial(rows)) * hidden * size_of::<f32>()) as u64
}

/// With x̂ = x · rstd and g = dy · w: `dx = acc_dx + rstd · (g − x̂ · mean(g · x̂))` and
/// `dw = acc_dw + Σ_rows dy · x̂`.
///
/// # Safety
/// See the [module](super).
pub unsafe fn rms_norm_backward(cx: &Context, args: &RmsNormBackward) {
    let rows = rows_per_partial(args.rows);
    let partials = args.rows.div_ceil(rows);
    cx.for_each(partials, |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { backward_tile(isa, args, tile, tile * rows, args.rows.min((tile + 1) * rows)) }
    });
    if let Some(dw) = args.dw {
        let sum = BiasBackward {
            rows: partials,
            cols: args.hidden,
            dy: args.workspace.cast::<f32>().into(),
            acc: args.acc_dw,
            db: dw,
        };
        // SAFETY: the partials that the tiles have written.
        unsafe { bias_backward(cx, &sum) };
    }
}

multiversion! {
    unsafe fn backward_tile(args: &RmsNormBackward, partial: usize, first: usize, end: usize) = backward_body;
}

#[inline(always)]
unsafe fn backward_body<S: Simd>(s: S, args: &RmsNormBackward, partial: usize, first: usize, end: usize) {
    let hidden = args.hidden;
    // SAFETY: rows `first..end` and the partial belong to this tile; each vector is read before it
    // is written.
    unsafe {
        let dw = args.workspace.cast::<f32>().add(partial * hidden);
        dw.write_bytes(0, hidden);
        for row in first..end {
            let (x, dy) = (args.x.add(row * hidden), args.dy.add(row * hidden));
            let rstd = *args.rstd.add(row);
            let mut sum = s.splat(0.0);
            each_vector!(S, hidden, i, len => {
                let g = s.mul(load(s, dy.add(i), len), load(s, args.w.add(i), len));
                sum = s.fma(g, load(s, x.add(i), len), sum);
            });
            let mean = s.splat(s.reduce_add(sum) * rstd / hidden as f32);
            let rstd = s.splat(rstd);
            each_vector!(S, hidden, i, len => {
                let xhat = s.mul(load(s, x.add(i), len), rstd);
                let d = load(s, dy.add(i), len);
                store(s, dw.add(i), s.fma(d, xhat, load(s, dw.add(i), len)), len);
                let g = s.mul(d, load(s, args.w.add(i), len));
                let centred = s.sub(g, s.mul(xhat, mean));
                if let Some(dx) = args.dx {
                    let acc = load_optional(s, args.acc_dx, row * hidden + i, len);
                    store(s, dx.add(row * hidden + i), s.fma(rstd, centred, acc), len);
                }
            });
        }
    }
}
