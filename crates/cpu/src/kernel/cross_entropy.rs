//! Softmax cross-entropy over rows of logits: in chunks with the gradient made in place, and as a
//! plain forward and backward pair.
//!
//! Losses are means over `token_count` tokens, known before the first micro-batch; rows whose
//! target is `ignore_index` count for nothing. The data layer has checked the targets; one that
//! is out of range gives a NaN loss and no gradient.

use super::math::exp;
use super::vector::{load, store};
use super::{Context, rows_per_tile};
use crate::multiversion;
use crate::simd::Simd;

/// Losses of a chunk of logits, which are replaced by their gradient.
pub struct CrossEntropyRows {
    /// Rows in the chunk.
    pub rows: usize,
    /// Width of a row.
    pub vocab: usize,
    /// Logits, `[rows, vocab]`; where `gradient`, replaced by
    /// `(softmax − onehot(target)) / token_count`, zero in ignored rows.
    pub logits: *mut f32,
    /// Targets, `[rows]`.
    pub targets: *const i32,
    /// Target of the rows to skip.
    pub ignore_index: i32,
    /// Number of tokens that the loss is a mean over, one float.
    pub token_count: *const f32,
    /// Loss of each row, not divided, `[rows]`; zero in ignored rows.
    pub losses: *mut f32,
    /// Whether logits are replaced by their gradient; otherwise they are only read.
    pub gradient: bool,
}

/// Mean loss of `logits[rows, vocab]`.
pub struct SoftmaxCrossEntropy {
    /// Tokens.
    pub rows: usize,
    /// Width of a row.
    pub vocab: usize,
    /// Logits, `[rows, vocab]`.
    pub logits: *const f32,
    /// Targets, `[rows]`.
    pub targets: *const i32,
    /// Target of the rows to skip.
    pub ignore_index: i32,
    /// Number of tokens that the loss is a mean over, one float.
    pub token_count: *const f32,
    /// Sum of losses divided by `token_count`, one float.
    pub loss: *mut f32,
    /// Natural logarithm of the sum of exponentials of each row, `[rows]`.
    pub lse: *mut f32,
    /// [`softmax_cross_entropy_workspace`] bytes.
    pub workspace: *mut u8,
}

/// Gradient of [`SoftmaxCrossEntropy`].
pub struct SoftmaxCrossEntropyBackward {
    /// Tokens.
    pub rows: usize,
    /// Width of a row.
    pub vocab: usize,
    /// Logits, `[rows, vocab]`.
    pub logits: *const f32,
    /// From the forward op, `[rows]`.
    pub lse: *const f32,
    /// Targets, `[rows]`.
    pub targets: *const i32,
    /// Target of the rows to skip.
    pub ignore_index: i32,
    /// Number of tokens that the loss is a mean over, one float.
    pub token_count: *const f32,
    /// Gradient of the logits, `[rows, vocab]`; in place over `logits`.
    pub dlogits: *mut f32,
}

shared!(CrossEntropyRows, SoftmaxCrossEntropy, SoftmaxCrossEntropyBackward);

/// Loss of each row and, where asked for, the gradient of the mean loss in place of the logits.
///
/// # Safety
/// See the [module](super).
pub unsafe fn cross_entropy_rows(cx: &Context, args: &CrossEntropyRows) {
    let rows = rows_per_tile(args.vocab);
    cx.for_each(args.rows.div_ceil(rows), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { rows_tile(isa, args, tile * rows, args.rows.min((tile + 1) * rows)) }
    });
}

multiversion! {
    unsafe fn rows_tile(args: &CrossEntropyRows, first: usize, end: usize) = rows_body;
}

#[inline(always)]
unsafe fn rows_body<S: Simd>(s: S, args: &CrossEntropyRows, first: usize, end: usize) {
    // SAFETY: rows `first..end` belong to this tile.
    unsafe {
        let inv_tokens = 1.0 / *args.token_count;
        for row in first..end {
            let x = args.logits.add(row * args.vocab);
            let target = *args.targets.add(row);
            if target == args.ignore_index {
                *args.losses.add(row) = 0.0;
                if args.gradient {
                    x.write_bytes(0, args.vocab);
                }
                continue;
            }
            let (max, sum) = max_and_sum(s, x, args.vocab);
            *args.losses.add(row) = row_loss(x, args.vocab, target, f64::from(max) + sum.ln());
            if args.gradient {
                let scale = (f64::from(inv_tokens) / sum) as f32;
                write_gradient(s, x, x, args.vocab, max, scale, target, inv_tokens);
            }
        }
    }
}

/// `lse − x[target]`.
///
/// # Safety
/// `x` is readable for `vocab` floats.
unsafe fn row_loss(x: *const f32, vocab: usize, target: i32, lse: f64) -> f32 {
    debug_assert!((0..vocab as i32).contains(&target), "target {target} is out of range");
    if (0..vocab as i32).contains(&target) {
        // SAFETY: just checked.
        (lse - f64::from(unsafe { *x.add(target as usize) })) as f32
    } else {
        f32::NAN
    }
}

/// The largest element and `Σ exp(x − max)`, in one pass over memory: blocks short enough for the
/// level-1 cache are read twice.
///
/// # Safety
/// `x` is readable for `n` floats.
#[inline(always)]
unsafe fn max_and_sum<S: Simd>(s: S, x: *const f32, n: usize) -> (f32, f64) {
    const BLOCK: usize = 1024;
    let mut max = f32::MIN;
    let mut sum = 0.0f64;
    for start in (0..n).step_by(BLOCK) {
        let len = BLOCK.min(n - start);
        // SAFETY: the block lies within the `n` floats.
        unsafe {
            let x = x.add(start);
            let block_max = largest(s, x, len);
            if block_max > max {
                sum *= f64::from(max - block_max).exp();
                max = block_max;
            }
            let (mut s0, mut s1) = (s.splat(0.0), s.splat(0.0));
            let centre = s.splat(max);
            let mut i = 0;
            while i + 2 * S::LANES <= len {
                s0 = s.add(s0, exp(s, s.sub(s.load(x.add(i)), centre)));
                s1 = s.add(s1, exp(s, s.sub(s.load(x.add(i + S::LANES)), centre)));
                i += 2 * S::LANES;
            }
            sum += f64::from(s.reduce_add(s.add(s0, s1)));
            while i < len {
                sum += f64::from(*x.add(i) - max).exp();
                i += 1;
            }
        }
    }
    (max, sum)
}

/// The largest of `n` floats, ignoring NaN.
///
/// # Safety
/// `x` is readable for `n` floats.
#[inline(always)]
unsafe fn largest<S: Simd>(s: S, x: *const f32, n: usize) -> f32 {
    let lowest = s.splat(f32::MIN);
    let (mut m0, mut m1) = (lowest, lowest);
    let mut i = 0;
    // SAFETY: every access is below `n`.
    unsafe {
        while i + 2 * S::LANES <= n {
            m0 = s.max(s.load(x.add(i)), m0);
            m1 = s.max(s.load(x.add(i + S::LANES)), m1);
            i += 2 * S::LANES;
        }
        let mut max = s.reduce_max(s.max(m0, m1));
        while i < n {
            max = max.max(*x.add(i));
            i += 1;
        }
        max
    }
}

/// `dx = exp(x − centre) · scale − onehot(target) · hit`.
///
/// # Safety
/// `x` is readable and `dx` writable for `n` floats; they may be equal.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn write_gradient<S: Simd>(
    s: S,
    x: *const f32,
    dx: *mut f32,
    n: usize,
    centre: f32,
    scale: f32,
    target: i32,
    hit: f32,
) {
    let (centre, scale) = (s.splat(centre), s.splat(scale));
    // SAFETY: every access is below `n`.
    unsafe {
        each_vector!(S, n, i, len => {
            let p = exp(s, s.sub(load(s, x.add(i), len), centre));
            store(s, dx.add(i), s.mul(p, scale), len);
        });
        if (0..n as i32).contains(&target) {
            *dx.add(target as usize) -= hit;
        } else {
            dx.write_bytes(0, n);
        }
    }
}

/// Bytes of workspace: the loss of each row.
pub fn softmax_cross_entropy_workspace(rows: usize) -> u64 {
    (rows * size_of::<f32>()) as u64
}

/// Mean loss and the log-sum-exp of each row.
///
/// # Safety
/// See the [module](super).
pub unsafe fn softmax_cross_entropy(cx: &Context, args: &SoftmaxCrossEntropy) {
    let rows = rows_per_tile(args.vocab);
    cx.for_each(args.rows.div_ceil(rows), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { forward_tile(isa, args, tile * rows, args.rows.min((tile + 1) * rows)) }
    });
    // SAFETY: the losses that the tiles have written.
    unsafe {
        let sum = sum_in_order(args.workspace.cast(), args.rows);
        *args.loss = (sum / f64::from(*args.token_count)) as f32;
    }
}

/// The sum of `n` floats, first to last, in f64.
///
/// # Safety
/// `p` is readable for `n` floats.
pub(super) unsafe fn sum_in_order(p: *const f32, n: usize) -> f64 {
    // SAFETY: every access is below `n`.
    (0..n).map(|i| f64::from(unsafe { *p.add(i) })).sum()
}

multiversion! {
    unsafe fn forward_tile(args: &SoftmaxCrossEntropy, first: usize, end: usize) = forward_body;
}

#[inline(always)]
unsafe fn forward_body<S: Simd>(s: S, args: &SoftmaxCrossEntropy, first: usize, end: usize) {
    // SAFETY: rows `first..end` belong to this tile.
    unsafe {
        let losses = args.workspace.cast::<f32>();
        for row in first..end {
            let x = args.logits.add(row * args.vocab);
            let (max, sum) = max_and_sum(s, x, args.vocab);
            let lse = f64::from(max) + sum.ln();
            *args.lse.add(row) = lse as f32;
            let target = *args.targets.add(row);
            *losses.add(row) = if target == args.ignore_index {
                0.0
            } else {
                row_loss(x, args.vocab, target, lse)
            };
        }
    }
}

/// `dlogits = (softmax − onehot(target)) / token_count`, zero in ignored rows.
///
/// # Safety
/// See the [module](super).
pub unsafe fn softmax_cross_entropy_backward(cx: &Context, args: &SoftmaxCrossEntropyBackward) {
    let rows = rows_per_tile(args.vocab);
    cx.for_each(args.rows.div_ceil(rows), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { backward_tile(isa, args, tile * rows, args.rows.min((tile + 1) * rows)) }
    });
}

multiversion! {
    unsafe fn backward_tile(args: &SoftmaxCrossEntropyBackward, first: usize, end: usize)
        = backward_body;
}

#[inline(always)]
unsafe fn backward_body<S: Simd>(s: S, args: &SoftmaxCrossEntropyBackward, first: usize, end: usize) {
    // SAFETY: rows `first..end` belong to this tile.
    unsafe {
        let scale = 1.0 / *args.token_count;
        for row in first..end {
            let x = args.logits.add(row * args.vocab);
            let dx = args.dlogits.add(row * args.vocab);
            let target = *args.targets.add(row);
            if target == args.ignore_index {
                dx.write_bytes(0, args.vocab);
            } else {
                let lse = *args.lse.add(row);
                write_gradient(s, x, dx, args.vocab, lse, scale, target, scale);
            }
        }
    }
}
