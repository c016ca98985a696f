//! Adafactor (Shazeer and Stern, 2018).

use super::super::vector::{load, store};
use super::super::{Context, TILE, rows_per_tile, touch_last_word};
use super::{Scalars, Update};
use crate::multiversion;
use crate::simd::Simd;

/// What stands for the second moment.
#[derive(Clone, Copy)]
pub enum SecondMoment {
    /// The means of a matrix's rows and of its columns, each updated in place.
    Factored {
        /// One float for each row.
        row: *mut f32,
        /// One float for each column.
        col: *mut f32,
    },
    /// One float for each element, updated in place.
    Whole(*mut f32),
}

/// One step for one parameter tensor.
pub struct Adafactor {
    /// What every update takes.
    pub update: Update,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Elements of a row.
    pub cols: usize,
    /// Its state.
    pub moment: SecondMoment,
    /// The second moment's decay at a step is `1 − step^−decay`.
    pub decay: f64,
    /// Added to the square of a gradient.
    pub eps: f64,
    /// Largest root mean square of an update.
    pub clip: f64,
    /// [`adafactor_workspace`] bytes.
    pub workspace: *mut u8,
}

shared!(Adafactor);

/// Most parts that a matrix's rows are cut into: each has sums of the columns of its own.
const MOST_PARTS: usize = 64;

/// How a tensor is cut, and where the parts of the workspace begin, in bytes.
struct Layout {
    /// Rows of a part; of a tensor that is not factored, elements.
    step: usize,
    parts: usize,
    /// `1/√` of each column's mean, after the partial sums of columns.
    rsqrt: usize,
    /// One f64 for each part, last.
    sums: usize,
}

impl Layout {
    fn new(rows: usize, cols: usize, factored: bool) -> Self {
        if !factored {
            let len = rows.saturating_mul(cols);
            return Self {
                step: TILE,
                parts: len.div_ceil(TILE),
                rsqrt: 0,
                sums: 0,
            };
        }
        let step = rows_per_tile(cols).max(rows.div_ceil(MOST_PARTS));
        let parts = rows.div_ceil(step);
        let columns = cols.saturating_mul(size_of::<f32>());
        let rsqrt = columns.saturating_mul(parts);
        Self {
            step,
            parts,
            rsqrt,
            sums: rsqrt.saturating_add(columns).next_multiple_of(size_of::<f64>()),
        }
    }

    fn bytes(&self) -> u64 {
        self.sums.saturating_add(self.parts * size_of::<f64>()) as u64
    }
}

/// Bytes of workspace: for each part of a matrix a float for every column, a float more for every column, and a double for each part.
pub fn adafactor_workspace(rows: usize, cols: usize, factored: bool) -> u64 {
    Layout::new(rows, cols, factored).bytes()
}

/// `u = g / √v`, then `w ← w (1 − lr·λ) − lr · u / max(1, rms(u)/clip)`, after updating the second moment.
///
/// # Safety
/// See the [module](super::super).
pub unsafe fn adafactor(cx: &Context, args: &Adafactor) {
    let factored = matches!(args.moment, SecondMoment::Factored { .. });
    let layout = Layout::new(args.rows, args.cols, factored);
    // SAFETY: the caller's contract.
    let scalars = unsafe {
        touch_last_word(args.workspace, layout.bytes());
        args.update.scalars()
    };
    let Some(scalars) = scalars else { return };
    let beta2 = 1.0 - scalars.step.powf(-args.decay);
    let step = &Step {
        beta2: beta2 as f32,
        one_minus_beta2: (1.0 - beta2) as f32,
        eps: args.eps as f32,
        scalars,
    };
    let pass = |what: Pass| {
        cx.for_each(layout.parts, |isa, part, _| {
            // SAFETY: the caller's contract; parts are disjoint.
            unsafe { run_part(isa, args, step, &layout, what, part) }
        })
    };
    let mut mean = 1.0;
    pass(Pass::Moments);
    if let SecondMoment::Factored { row, .. } = args.moment {
        cx.for_each(args.cols.div_ceil(TILE), |isa, tile, _| {
            // SAFETY: the caller's contract; tiles are disjoint.
            unsafe { finish_columns(isa, args, step, &layout, tile * TILE) }
        });
        // SAFETY: as many as there are rows.
        let sum: f64 = (0..args.rows).map(|i| f64::from(unsafe { *row.add(i) })).sum();
        mean = (sum / args.rows as f64) as f32;
        pass(Pass::Size { mean });
    }
    // SAFETY: the sums that the parts have written.
    let sums = (0..layout.parts).map(|part| unsafe { *args.workspace.add(layout.sums).cast::<f64>().add(part) });
    let rms = (sums.sum::<f64>() / args.update.len as f64).sqrt();
    // Not `f64::max`, which would hide a NaN.
    let shrink = if rms < args.clip { 1.0 } else { rms / args.clip };
    let minus_lr = (-step.scalars.lr / shrink) as f32;
    pass(Pass::Weights { mean, minus_lr });
}

/// A step's numbers.
struct Step {
    beta2: f32,
    one_minus_beta2: f32,
    eps: f32,
    scalars: Scalars,
}

/// What is done to a part.
#[derive(Clone, Copy)]
enum Pass {
    /// Rows' means and sums of columns; or second moments and the sum of the update's squares.
    Moments,
    /// The sum of the update's squares.
    Size { mean: f32 },
    /// The update itself.
    Weights { mean: f32, minus_lr: f32 },
}

multiversion! {
    unsafe fn run_part(args: &Adafactor, step: &Step, layout: &Layout, pass: Pass, part: usize) = part_body;
}

#[inline(always)]
unsafe fn part_body<S: Simd>(s: S, args: &Adafactor, step: &Step, layout: &Layout, pass: Pass, part: usize) {
    let first = part * layout.step;
    // SAFETY: the part lies within the tensor, and has partial sums of its own.
    unsafe {
        let sum = args.workspace.add(layout.sums).cast::<f64>().add(part);
        match args.moment {
            SecondMoment::Whole(v) => {
                let n = layout.step.min(args.update.len - first);
                whole(s, args, step, pass, v, first..first + n, sum);
            }
            SecondMoment::Factored { row, .. } => {
                let rows = first..args.rows.min(first + layout.step);
                match pass {
                    Pass::Moments => {
                        let sums = args.workspace.cast::<f32>().add(part * args.cols);
                        moments(s, args, step, row, rows, sums);
                    }
                    Pass::Size { mean } => *sum = size(s, args, step, layout, row, rows, mean),
                    Pass::Weights { mean, minus_lr } => weights(s, args, step, layout, row, rows, mean, minus_lr),
                }
            }
        }
    }
}

/// Updates the means of some rows, and sums the squares of their columns.
///
/// # Safety
/// The rows are the tensor's; there is a sum for each column.
#[inline(always)]
unsafe fn moments<S: Simd>(
    s: S,
    args: &Adafactor,
    step: &Step,
    row: *mut f32,
    rows: std::ops::Range<usize>,
    sums: *mut f32,
) {
    let zero = s.splat(0.0);
    let first = rows.start;
    // SAFETY: the caller's contract.
    unsafe {
        for r in rows {
            let part = args.update.part(&step.scalars, r * args.cols);
            let mut sum = zero;
            each_vector!(S, args.cols, i, len => {
                let g = part.gradient(s, i, len);
                let before = if r == first { zero } else { load(s, sums.add(i), len) };
                store(s, sums.add(i), s.fma(g, g, before), len);
                sum = s.fma(g, g, sum);
            });
            let mean = s.reduce_add(sum) / args.cols as f32 + step.eps;
            *row.add(r) = step.beta2 * *row.add(r) + step.one_minus_beta2 * mean;
        }
    }
}

multiversion! {
    unsafe fn finish_columns(args: &Adafactor, step: &Step, layout: &Layout, start: usize) = columns_body;
}

/// Updates the means of a tile of columns from the parts' sums, in their order, and keeps `1/√` of them.
#[inline(always)]
unsafe fn columns_body<S: Simd>(s: S, args: &Adafactor, step: &Step, layout: &Layout, start: usize) {
    let SecondMoment::Factored { col, .. } = args.moment else {
        return;
    };
    let (rows, eps) = (s.splat(args.rows as f32), s.splat(step.eps));
    let (beta2, one_minus_beta2) = (s.splat(step.beta2), s.splat(step.one_minus_beta2));
    // SAFETY: the tile lies within the columns.
    unsafe {
        let sums = args.workspace.cast::<f32>().add(start);
        let rsqrt = args.workspace.add(layout.rsqrt).cast::<f32>().add(start);
        let col = col.add(start);
        each_vector!(S, TILE.min(args.cols - start), i, len => {
            let mut sum = s.splat(0.0);
            for part in 0..layout.parts {
                sum = s.add(sum, load(s, sums.add(part * args.cols + i), len));
            }
            let mean = s.add(s.div(sum, rows), eps);
            let c = s.fma(beta2, load(s, col.add(i), len), s.mul(one_minus_beta2, mean));
            store(s, col.add(i), c, len);
            store(s, rsqrt.add(i), s.div(s.splat(1.0), s.sqrt(c)), len);
        });
    }
}

/// The sum of the squares of some rows' update.
///
/// # Safety
/// The rows are the tensor's.
#[inline(always)]
unsafe fn size<S: Simd>(
    s: S,
    args: &Adafactor,
    step: &Step,
    layout: &Layout,
    row: *mut f32,
    rows: std::ops::Range<usize>,
    mean: f32,
) -> f64 {
    let mut total = 0.0;
    // SAFETY: the caller's contract.
    unsafe {
        let rsqrt = args.workspace.add(layout.rsqrt).cast::<f32>();
        for r in rows {
            let part = args.update.part(&step.scalars, r * args.cols);
            let mut sum = s.splat(0.0);
            each_vector!(S, args.cols, i, len => {
                let u = s.mul(part.gradient(s, i, len), load(s, rsqrt.add(i), len));
                sum = s.fma(u, u, sum);
            });
            total += f64::from(s.reduce_add(sum)) * f64::from(mean / *row.add(r));
        }
    }
    total
}

/// Updates some rows of a matrix.
///
/// # Safety
/// The rows are the tensor's.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn weights<S: Simd>(
    s: S,
    args: &Adafactor,
    step: &Step,
    layout: &Layout,
    row: *mut f32,
    rows: std::ops::Range<usize>,
    mean: f32,
    minus_lr: f32,
) {
    let keep = s.splat(step.scalars.keep);
    // SAFETY: the caller's contract.
    unsafe {
        let rsqrt = args.workspace.add(layout.rsqrt).cast::<f32>();
        for r in rows {
            let part = args.update.part(&step.scalars, r * args.cols);
            let minus = s.splat(minus_lr * (mean / *row.add(r)).sqrt());
            each_vector!(S, args.cols, i, len => {
                let u = s.mul(part.gradient(s, i, len), load(s, rsqrt.add(i), len));
                let w = s.fma(minus, u, s.mul(part.weight(s, i, len), keep));
                part.set_weight(s, i, w, len);
            });
        }
    }
}

/// A pass over elements of a tensor that has a second moment for each.
///
/// # Safety
/// The elements are the tensor's.
#[inline(always)]
unsafe fn whole<S: Simd>(
    s: S,
    args: &Adafactor,
    step: &Step,
    pass: Pass,
    v: *mut f32,
    elements: std::ops::Range<usize>,
    sum: *mut f64,
) {
    let (beta2, one_minus_beta2) = (s.splat(step.beta2), s.splat(step.one_minus_beta2));
    let (keep, eps) = (s.splat(step.scalars.keep), s.splat(step.eps));
    // SAFETY: the caller's contract.
    unsafe {
        let part = args.update.part(&step.scalars, elements.start);
        let v = v.add(elements.start);
        let mut squares = s.splat(0.0);
        each_vector!(S, elements.len(), i, len => {
            let g = part.gradient(s, i, len);
            let mut v1 = load(s, v.add(i), len);
            match pass {
                Pass::Weights { minus_lr, .. } => {
                    let u = s.div(g, s.sqrt(v1));
                    let w = s.fma(s.splat(minus_lr), u, s.mul(part.weight(s, i, len), keep));
                    part.set_weight(s, i, w, len);
                }
                _ => {
                    v1 = s.fma(beta2, v1, s.mul(one_minus_beta2, s.fma(g, g, eps)));
                    store(s, v.add(i), v1, len);
                    // Where there is no element the gradient is 0, and so is this, as `v1` is at least `eps`'s part.
                    squares = s.add(squares, s.div(s.mul(g, g), v1));
                }
            }
        });
        if !matches!(pass, Pass::Weights { .. }) {
            *sum = f64::from(s.reduce_add(squares));
        }
    }
}
