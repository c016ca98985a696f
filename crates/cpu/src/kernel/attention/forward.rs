//! Attention, forward.
//!
//! A tile is one block of queries of one head. Queries lie along the lanes: scores are computed as
//! Sᵀ = K Qᵀ, so the softmax over keys needs no reduction across lanes, keys and values are read
//! where they are, and only the query block is transposed once on the way in and the output once
//! on the way out.

use super::product::{Into, Left, panel, product, transpose};
use super::{AttentionShape, BLOCK};
use crate::floats::{Float, Floats};
use crate::kernel::math::exp;
use crate::kernel::vector::{as_f32, copy_rows};
use crate::kernel::{Context, touch_last_word};
use crate::multiversion;
use crate::simd::Simd;

/// `o = softmax(scale · q kᵀ) v` under the mask.
pub struct Attention {
    /// Shapes and mask.
    pub shape: AttentionShape,
    /// Queries, `[rows, heads · head_dim]`.
    pub q: Floats,
    /// Keys, `[rows, kv_heads · head_dim]`.
    pub k: Floats,
    /// Values, `[rows, kv_heads · head_dim]`.
    pub v: Floats,
    /// First row of each row's document, `[rows]`, never decreasing.
    pub doc_start: *const i32,
    /// Output, `[rows, heads · head_dim]`.
    pub o: Floats,
    /// Natural logarithm of the sum of exponentials of the scores, `[rows, heads]`.
    pub lse: *mut f32,
    /// [`attention_workspace`] bytes.
    pub workspace: *mut u8,
}

shared!(Attention);

/// Floats of scratch per thread: Qᵀ and Oᵀ `[head_dim, 64]`, a panel of scores, row maxima and
/// sums; where operands are stored in 16 bits, also a block of keys and one of values
/// `[64, head_dim]`.
fn scratch(head_dim: usize, stored: Float) -> usize {
    let copies = match stored {
        Float::F32 => 0,
        Float::Bf16 | Float::F16 => 2,
    };
    (2 + copies) * head_dim * BLOCK + BLOCK * BLOCK + 2 * BLOCK
}

/// Bytes of workspace for operands that are stored so.
pub fn attention_workspace(shape: &AttentionShape, stored: Float, threads: usize) -> u64 {
    (threads * scratch(shape.head_dim, stored) * size_of::<f32>()) as u64
}

/// Attention with an online softmax.
///
/// # Safety
/// See the [module](crate::kernel).
pub unsafe fn attention(cx: &Context, args: &Attention) {
    let shape = &args.shape;
    let (blocks, heads) = (shape.blocks(), shape.heads);
    // SAFETY: the caller's contract.
    unsafe { shape.debug_check(args.doc_start) };
    cx.for_each(blocks * heads, |isa, tile, worker| {
        // Late blocks see the most keys: first, for balance.
        let (block, head) = (blocks - 1 - tile / heads, tile % heads);
        // SAFETY: the caller's contract; tiles are disjoint, workers have scratch of their own.
        unsafe { query_block(isa, args, block, head, worker) }
    });
    // SAFETY: the caller's contract.
    unsafe {
        let bytes = attention_workspace(shape, args.q.stored(), cx.pool.threads());
        touch_last_word(args.workspace, bytes);
    }
}

multiversion! {
    unsafe fn query_block(args: &Attention, block: usize, head: usize, worker: usize)
        = query_block_body;
}

/// Below every score that a finite model computes, and far enough from infinity that the
/// difference of two of them is not NaN.
const LOWEST: f32 = -1e30;

#[inline(always)]
unsafe fn query_block_body<S: Simd>(s: S, args: &Attention, block: usize, head: usize, worker: usize) {
    let shape = &args.shape;
    let d = shape.head_dim;
    let t0 = block * BLOCK;
    let queries = BLOCK.min(shape.rows - t0);
    // SAFETY: rows `t0..t0 + queries` of `head` belong to this tile, the scratch to this worker.
    unsafe {
        let qt = args.workspace.cast::<f32>().add(worker * scratch(d, args.q.stored()));
        let ot = qt.add(d * BLOCK);
        let scores = ot.add(d * BLOCK);
        let max = scores.add(BLOCK * BLOCK);
        let sum = max.add(BLOCK);
        // Read and written only where the operands are not `f32` themselves.
        let (copy, second_copy) = (sum.add(BLOCK), sum.wrapping_add(BLOCK + d * BLOCK));

        if queries < BLOCK {
            // Missing queries are zero: their lanes compute something finite that nobody reads.
            qt.write_bytes(0, d * BLOCK);
        }
        let q = args.q.add(t0 * shape.q_stride() + head * d);
        let (q, q_stride) = as_f32(s, (queries, d), q, shape.q_stride(), copy);
        transpose(s, (queries, d), q, q_stride, qt, BLOCK);
        let scale = s.splat(shape.scale);
        for i in (0..d * BLOCK).step_by(S::LANES) {
            s.store(qt.add(i), s.mul(s.load(qt.add(i)), scale));
        }
        ot.write_bytes(0, d * BLOCK);
        for i in (0..BLOCK).step_by(S::LANES) {
            s.store(max.add(i), s.splat(LOWEST));
            s.store(sum.add(i), s.splat(0.0));
        }

        let kv_head = head / shape.group();
        let first_key = shape.first_key(args.doc_start, t0);
        for k0 in (first_key / BLOCK * BLOCK..t0 + queries).step_by(BLOCK) {
            let from = first_key.max(k0);
            let size = ((t0 + queries).min(k0 + BLOCK) - from, d);
            let offset = from * shape.kv_stride() + kv_head * d;
            let (keys, key_stride) = as_f32(s, size, args.k.add(offset), shape.kv_stride(), copy);
            let (values, value_stride) = as_f32(s, size, args.v.add(offset), shape.kv_stride(), second_copy);
            for lane in (0..queries).step_by(panel::<S>()) {
                // The panel's queries `t..=last` and the keys of this block that any of them sees.
                let t = t0 + lane;
                let last = t0 + queries.min(lane + panel::<S>()) - 1;
                let first = shape.first_key(args.doc_start, t).max(k0);
                let end = (last + 1).min(k0 + BLOCK);
                if first >= end {
                    continue;
                }
                let seen = end - first;
                let k = Left {
                    p: keys.add((first - from) * key_stride),
                    row: key_stride,
                    col: 1,
                };
                let v = Left {
                    p: values.add((first - from) * value_stride),
                    row: 1,
                    col: value_stride,
                };
                let n = panel::<S>();
                product(s, Into::Replace, (seen, n, d), k, qt.add(lane), BLOCK, scores, n);
                let seen_by_all = shape.first_key(args.doc_start, last) <= first && end <= t + 1;
                if !seen_by_all {
                    mask_panel(args, scores, n, (t, last), (first, end));
                }
                for half in [0, S::LANES] {
                    let ot = ot.add(lane + half);
                    let (max, sum) = (max.add(lane + half), sum.add(lane + half));
                    softmax_step(s, scores.add(half), (seen, n), max, sum, ot, d);
                }
                product(s, Into::Add, (d, n, seen), v, scores, n, ot.add(lane), BLOCK);
            }
        }

        let one = s.splat(1.0);
        for lane in (0..BLOCK).step_by(S::LANES) {
            let inverse = s.div(one, s.load(sum.add(lane)));
            for i in 0..d {
                let p = ot.add(i * BLOCK + lane);
                s.store(p, s.mul(s.load(p), inverse));
            }
        }
        let o = args.o.add(t0 * shape.q_stride() + head * d);
        match o.stored() {
            Float::F32 => transpose(s, (d, queries), ot, BLOCK, o.address().cast(), shape.q_stride()),
            Float::Bf16 | Float::F16 => {
                transpose(s, (d, queries), ot, BLOCK, copy, d);
                copy_rows(s, (queries, d), copy.into(), d, o, shape.q_stride());
            }
        }
        for i in 0..queries {
            *args.lse.add((t0 + i) * shape.heads + head) = *max.add(i) + (*sum.add(i)).ln();
        }
    }
}

/// Sets the scores of keys `first..end` to −∞ where queries `t..=last` do not see them.
///
/// # Safety
/// `scores` is `[end − first, width]` with one column per query; the rest as for [`attention`].
unsafe fn mask_panel(
    args: &Attention,
    scores: *mut f32,
    width: usize,
    (t, last): (usize, usize),
    (first, end): (usize, usize),
) {
    for query in t..=last {
        // SAFETY: `query` is a row; keys within the panel.
        unsafe {
            let seen = args.shape.first_key(args.doc_start, query);
            let column = scores.add(query - t);
            for key in (first..seen.min(end)).chain((query + 1).max(first)..end) {
                *column.add((key - first) * width) = f32::NEG_INFINITY;
            }
        }
    }
}

/// Replaces one vector of queries' scores by `exp(score − max)`, with running maximum and sum, and
/// scales the output so far to the new maximum.
///
/// # Safety
/// One vector at `max`, `sum`, in each of `keys` rows of `scores` and `d` rows of `ot`.
#[inline(always)]
unsafe fn softmax_step<S: Simd>(
    s: S,
    scores: *mut f32,
    (keys, width): (usize, usize),
    max: *mut f32,
    sum: *mut f32,
    ot: *mut f32,
    d: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let before = s.load(max);
        let (mut m0, mut m1) = (before, before);
        let mut i = 0;
        while i + 2 <= keys {
            m0 = s.max(s.load(scores.add(i * width)), m0);
            m1 = s.max(s.load(scores.add((i + 1) * width)), m1);
            i += 2;
        }
        if i < keys {
            m0 = s.max(s.load(scores.add(i * width)), m0);
        }
        let now = s.max(m0, m1);
        let mut total = s.splat(0.0);
        for i in 0..keys {
            let p = scores.add(i * width);
            let e = exp(s, s.sub(s.load(p), now));
            total = s.add(total, e);
            s.store(p, e);
        }
        let shrink = exp(s, s.sub(before, now));
        s.store(max, now);
        s.store(sum, s.fma(s.load(sum), shrink, total));
        for i in 0..d {
            let p = ot.add(i * BLOCK);
            s.store(p, s.mul(s.load(p), shrink));
        }
    }
}
