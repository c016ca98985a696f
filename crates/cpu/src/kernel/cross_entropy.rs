//! Softmax cross-entropy over rows of logits: in chunks with the gradient made in place, and as a
//! plain forward and backward pair.
//!
//! Losses are means over `token_count` tokens, known before the first micro-batch; rows whose
//! target is `ignore_index` count for nothing. The data layer has checked the targets; one that
//! is out of range gives a NaN loss and no gradient.

use super::math::exp;
use super::vector::{convert, load, store};
use super::{Context, rows_per_tile};
use crate::floats::Floats;
use crate::multiversion;
use crate::simd::Simd;

/// Losses of a chunk of logits, which are replaced by their gradient.
pub struct CrossEntropyRows {
    /// Rows in the chunk.
    pub rows: usize,
    /// Width of a row.
    pub vocab: usize,
    /// Logits, `[rows, vocab]`; where `gradient`, replaced by
    /// `scale · (softmax − onehot(target)) / token_count`, zero in ignored rows.
    pub logits: *mut f32,
    /// Targets, `[rows]`.
    pub targets: *const i32,
    /// Target of the rows to skip.
    pub ignore_index: i32,
    /// Number of tokens that the loss is a mean over, one float.
    pub token_count: *const f32,
    /// What gradients are multiplied by, one float.
    pub scale: Option<*const f32>,
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
    pub logits: Floats,
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
    pub logits: Floats,
    /// From the forward op, `[rows]`.
    pub lse: *const f32,
    /// Targets, `[rows]`.
    pub targets: *const i32,
    /// Target of the rows to skip.
    pub ignore_index: i32,
    /// Number of tokens that the loss is a mean over, one float.
    pub token_count: *const f32,
    /// What gradients are multiplied by, one float.
    pub scale: Option<*const f32>,
    /// Gradient of the logits, `[rows, vocab]`; in place over `logits`.
    pub dlogits: Floats,
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
        let scale_of_mean = args.scale.map_or(1.0, |scale| *scale) / *args.token_count;
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
            let class = class(target, args.vocab);
            let exponentials = Exponentials::of(s, x, args.vocab, class);
            *args.losses.add(row) = exponentials.loss();
            if args.gradient {
                let scale = f64::from(scale_of_mean) / exponentials.sum;
                // `softmax − 1` at the target, without the difference of two numbers that may nearly be 1.
                let at_target = class.map(|class| (class, (-exponentials.others * scale) as f32));
                let x = Floats::of_mut(x);
                write_gradient(s, x, x, args.vocab, exponentials.max, scale as f32, at_target);
            }
        }
    }
}

/// The target as an index, if it is one.
fn class(target: i32, vocab: usize) -> Option<usize> {
    usize::try_from(target).ok().filter(|&class| class < vocab)
}

/// The exponentials of a row's logits, the target's kept apart from the sum of the others: where that one is nearly certain, the
/// loss is what all others add up to, however little that is beside its 1.
#[derive(Clone, Copy)]
struct Exponentials {
    /// The largest logit.
    max: f32,
    /// The target's logit, if the row has a target.
    target: Option<f32>,
    /// `Σ exp(x − max)` over all but the target.
    others: f64,
    /// `Σ exp(x − max)`.
    sum: f64,
    /// Its logarithm.
    ln_sum: f64,
}

impl Exponentials {
    /// One pass over memory: blocks short enough for the level-1 cache are read twice.
    ///
    /// # Safety
    /// `x` is readable for `n` numbers; `class`, its target, is below `n`.
    #[inline(always)]
    unsafe fn of<S: Simd>(s: S, x: impl Into<Floats>, n: usize, class: Option<usize>) -> Self {
        const BLOCK: usize = 1024;
        let x = x.into();
        let mut max = f32::MIN;
        let mut others = 0.0f64;
        for start in (0..n).step_by(BLOCK) {
            let len = BLOCK.min(n - start);
            // In another block it is no index of this one's.
            let skip = class.map_or(usize::MAX, |class| class.wrapping_sub(start));
            // SAFETY: the block lies within the `n` numbers.
            unsafe {
                let x = x.add(start);
                let block_max = largest(s, x, len);
                if block_max > max {
                    others *= f64::from(max - block_max).exp();
                    max = block_max;
                }
                others += sum_of_exponentials(s, x, len, max, skip);
            }
        }
        // SAFETY: the target is below `n`.
        let target = class.map(|class| unsafe { x.get(class) });
        let own = target.map_or(0.0, |target| (f64::from(target) - f64::from(max)).exp());
        let sum = others + own;
        Self {
            max,
            target,
            others,
            sum,
            ln_sum: if own == 1.0 { others.ln_1p() } else { sum.ln() },
        }
    }

    /// `ln Σ exp(x)`.
    fn lse(self) -> f64 {
        f64::from(self.max) + self.ln_sum
    }

    /// `lse − x[target]`; NaN where there is no target.
    fn loss(self) -> f32 {
        let below = |target: f32| f64::from(self.max) - f64::from(target);
        self.target
            .map_or(f32::NAN, |target| (below(target) + self.ln_sum) as f32)
    }
}

/// `Σ exp(x − max)` over one block, but for element `skip`.
///
/// # Safety
/// `x` is readable for `len` numbers.
#[inline(always)]
unsafe fn sum_of_exponentials<S: Simd>(s: S, x: Floats, len: usize, max: f32, skip: usize) -> f64 {
    let pair = 2 * S::LANES;
    let whole = len - len % pair;
    // The two vectors around what is skipped, if it is not in the rest.
    let hole = if skip < whole { skip - skip % pair } else { whole };
    let (mut s0, mut s1) = (s.splat(0.0), s.splat(0.0));
    let centre = s.splat(max);
    // SAFETY: every access is below `len`; two vectors have at most 32 floats.
    unsafe {
        for (from, to) in [(0, hole), (hole + pair, whole)] {
            let mut i = from;
            while i < to {
                s0 = s.add(s0, exp(s, s.sub(x.add(i).load(s, S::LANES), centre)));
                s1 = s.add(s1, exp(s, s.sub(x.add(i + S::LANES).load(s, S::LANES), centre)));
                i += pair;
            }
        }
        if hole < whole {
            // What is skipped becomes exp(−∞) = 0.
            let mut patch = [0.0f32; 32];
            convert(s, x.add(hole), patch.as_mut_ptr(), pair);
            patch[skip - hole] = f32::NEG_INFINITY;
            let p = patch.as_ptr();
            s0 = s.add(s0, exp(s, s.sub(s.load(p), centre)));
            s1 = s.add(s1, exp(s, s.sub(s.load(p.add(S::LANES)), centre)));
        }
        let mut sum = f64::from(s.reduce_add(s.add(s0, s1)));
        for i in (whole..len).filter(|&i| i != skip) {
            sum += f64::from(x.get(i) - max).exp();
        }
        sum
    }
}

/// The largest of `n` numbers, ignoring NaN.
///
/// # Safety
/// `x` is readable for `n` numbers.
#[inline(always)]
unsafe fn largest<S: Simd>(s: S, x: Floats, n: usize) -> f32 {
    let lowest = s.splat(f32::MIN);
    let (mut m0, mut m1) = (lowest, lowest);
    let mut i = 0;
    // SAFETY: every access is below `n`.
    unsafe {
        while i + 2 * S::LANES <= n {
            m0 = s.max(x.add(i).load(s, S::LANES), m0);
            m1 = s.max(x.add(i + S::LANES).load(s, S::LANES), m1);
            i += 2 * S::LANES;
        }
        let mut max = s.reduce_max(s.max(m0, m1));
        while i < n {
            max = max.max(x.get(i));
            i += 1;
        }
        max
    }
}

/// `dx = exp(x − centre) · scale`, but what is given for the target there; all zero where there is no target.
///
/// # Safety
/// `x` is readable and `dx` writable for `n` numbers; they may be equal. The target is below `n`.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn write_gradient<S: Simd>(
    s: S,
    x: Floats,
    dx: Floats,
    n: usize,
    centre: f32,
    scale: f32,
    at_target: Option<(usize, f32)>,
) {
    let (centre, scale) = (s.splat(centre), s.splat(scale));
    // SAFETY: every access is below `n`.
    unsafe {
        each_vector!(S, n, i, len => {
            let p = exp(s, s.sub(load(s, x.add(i), len), centre));
            store(s, dx.add(i), s.mul(p, scale), len);
        });
        match at_target {
            Some((class, gradient)) => dx.set(class, gradient),
            None => dx.clear(n),
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
            let target = *args.targets.add(row);
            let exponentials = Exponentials::of(s, x, args.vocab, class(target, args.vocab));
            *args.lse.add(row) = exponentials.lse() as f32;
            *losses.add(row) = if target == args.ignore_index {
                0.0
            } else {
                exponentials.loss()
            };
        }
    }
}

/// `dlogits = scale · (softmax − onehot(target)) / token_count`, zero in ignored rows.
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
        let scale = args.scale.map_or(1.0, |scale| *scale) / *args.token_count;
        for row in first..end {
            let x = args.logits.add(row * args.vocab);
            let dx = args.dlogits.add(row * args.vocab);
            let target = *args.targets.add(row);
            if target == args.ignore_index {
                dx.clear(args.vocab);
            } else {
                let lse = *args.lse.add(row);
                let at_target = class(target, args.vocab).map(|class| {
                    let probability_less_1 = (f64::from(x.get(class)) - f64::from(lse)).exp_m1();
                    (class, (f64::from(scale) * probability_less_1) as f32)
                });
                write_gradient(s, x, dx, args.vocab, lse, scale, at_target);
            }
        }
    }
}
