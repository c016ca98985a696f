//! Attention, backward.
//!
//! A tile is one block of keys of one key head: it walks over the query heads of its group and the
//! query blocks that see it, recomputes the probabilities from the saved log-sum-exp, and keeps
//! its dK and dV in cache. Contributions to a block of dQ come from several tiles; they are added
//! in the order of their key blocks, each tile waiting for its turn, so that the sum has the same
//! bits for any number of threads. Tiles are handed out in that same order, so the tile that
//! another one waits for is always running already.

use std::sync::atomic::{AtomicU32, Ordering};

use super::mask::Pair;
use super::product::{Into, Left, panel, product, transpose};
use super::scratch::{Layout, Scratch};
use super::{AttentionShape, BLOCK};
use crate::kernel::math::exp;
use crate::kernel::vector::{dot, load, store};
use crate::kernel::{Context, touch_last_word};
use crate::multiversion;
use crate::simd::Simd;

/// Gradient of [`Attention`](super::Attention).
pub struct AttentionBackward {
    /// Shapes and mask.
    pub shape: AttentionShape,
    /// Queries, `[rows, heads · head_dim]`.
    pub q: *const f32,
    /// Keys, `[rows, kv_heads · head_dim]`.
    pub k: *const f32,
    /// Values, `[rows, kv_heads · head_dim]`.
    pub v: *const f32,
    /// Output of the forward op, `[rows, heads · head_dim]`.
    pub o: *const f32,
    /// From the forward op, `[rows, heads]`.
    pub lse: *const f32,
    /// Gradient of the output, `[rows, heads · head_dim]`.
    pub d_o: *const f32,
    /// First row of each row's document, `[rows]`, never decreasing.
    pub doc_start: *const i32,
    /// Gradient of the queries, `[rows, heads · head_dim]`.
    pub dq: *mut f32,
    /// Gradient of the keys, `[rows, kv_heads · head_dim]`.
    pub dk: *mut f32,
    /// Gradient of the values, `[rows, kv_heads · head_dim]`.
    pub dv: *mut f32,
    /// [`attention_backward_workspace`] bytes.
    pub workspace: *mut u8,
}

shared!(AttentionBackward);

/// Bytes of workspace.
pub fn attention_backward_workspace(shape: &AttentionShape, threads: usize) -> u64 {
    let layout = Layout::new(shape);
    ((layout.scratch + threads * layout.per_worker) * size_of::<f32>()) as u64
}

/// With P the probabilities and Δ = rowsum(o · do): `dv = Pᵀ do`, `dS = P · (do vᵀ − Δ)`,
/// `dq = scale · dS k`, `dk = scale · dSᵀ q`.
///
/// # Safety
/// See the [module](crate::kernel).
pub unsafe fn attention_backward(cx: &Context, args: &AttentionBackward) {
    let shape = &args.shape;
    let blocks = shape.blocks();
    // SAFETY: the caller's contract.
    unsafe { shape.debug_check(args.doc_start) };
    cx.for_each(blocks, |isa, block, _| {
        // SAFETY: the caller's contract; blocks are disjoint.
        unsafe { prepare_block(isa, args, block) }
    });
    // In the order that turns are given in; early blocks, seen by the most queries, come first.
    cx.for_each(blocks * shape.kv_heads, |isa, tile, worker| {
        let (block, kv_head) = (tile / shape.kv_heads, tile % shape.kv_heads);
        // SAFETY: the caller's contract; tiles are disjoint but for dQ, which takes turns.
        unsafe { key_block(isa, args, block, kv_head, worker) }
    });
    let bytes = attention_backward_workspace(shape, cx.pool.threads());
    // SAFETY: the caller's contract.
    unsafe { touch_last_word(args.workspace, bytes) };
}

/// Whose turn it is to add to the dQ of a query block and head: the number of a key block.
///
/// # Safety
/// The workspace is valid, and initialised by [`prepare_block`] where the turn is waited for.
unsafe fn turn(args: &AttentionBackward, head: usize, block: usize) -> &AtomicU32 {
    // SAFETY: the counters are the first words of the workspace, accessed only as atomics while
    // threads share them.
    unsafe {
        let counter = args.workspace.cast::<u32>().add(head * args.shape.blocks() + block);
        AtomicU32::from_ptr(counter)
    }
}

multiversion! {
    unsafe fn prepare_block(args: &AttentionBackward, block: usize) = prepare_block_body;
}

/// Δ of the block's rows, and the first turn of its query block for each head.
#[inline(always)]
unsafe fn prepare_block_body<S: Simd>(s: S, args: &AttentionBackward, block: usize) {
    let shape = &args.shape;
    let d = shape.head_dim;
    let t0 = block * BLOCK;
    // SAFETY: rows and counters of this block belong to this tile.
    unsafe {
        let delta = args.workspace.cast::<f32>().add(Layout::new(shape).delta);
        for i in t0 * shape.heads..shape.rows.min(t0 + BLOCK) * shape.heads {
            *delta.add(i) = dot(s, args.o.add(i * d), args.d_o.add(i * d), d);
        }
        let first = shape.first_key(args.doc_start, t0) / BLOCK;
        for head in 0..shape.heads {
            turn(args, head, block).store(first as u32, Ordering::Relaxed);
        }
    }
}

multiversion! {
    unsafe fn key_block(args: &AttentionBackward, block: usize, kv_head: usize, worker: usize)
        = key_block_body;
}

#[inline(always)]
unsafe fn key_block_body<S: Simd>(s: S, args: &AttentionBackward, block: usize, kv_head: usize, worker: usize) {
    let shape = &args.shape;
    let d = shape.head_dim;
    let k0 = block * BLOCK;
    let keys = BLOCK.min(shape.rows - k0);
    let group = shape.heads / shape.kv_heads;
    // SAFETY: key rows `k0..k0 + keys` of `kv_head` belong to this tile, the scratch to this
    // worker.
    unsafe {
        let scratch = Scratch::new(args.workspace, shape, worker);
        let offset = k0 * shape.kv_stride() + kv_head * d;
        if keys < BLOCK {
            scratch.kt.write_bytes(0, 2 * d * BLOCK);
        }
        transpose(s, (keys, d), args.k.add(offset), shape.kv_stride(), scratch.kt, BLOCK);
        transpose(s, (keys, d), args.v.add(offset), shape.kv_stride(), scratch.vt, BLOCK);
        let k = args.k.add(offset);
        copy_scaled(
            s,
            (keys, d),
            k,
            shape.kv_stride(),
            scratch.k,
            scratch.width,
            shape.scale,
        );
        // dK and, behind it, dV.
        scratch.dk.write_bytes(0, 2 * BLOCK * scratch.width);

        for head in kv_head * group..(kv_head + 1) * group {
            for query_block in block..shape.blocks() {
                let t0 = query_block * BLOCK;
                if shape.first_key(args.doc_start, t0) >= k0 + keys {
                    break;
                }
                let queries = BLOCK.min(shape.rows - t0);
                block_pair(s, args, &scratch, Pair { t0, queries, k0, keys }, head);
                add_to_dq(s, args, &scratch, (block, query_block), head);
            }
        }

        let (dk, dv) = (args.dk.add(offset), args.dv.add(offset));
        copy_scaled(s, (keys, d), scratch.dk, scratch.width, dk, shape.kv_stride(), 1.0);
        copy_scaled(s, (keys, d), scratch.dv, scratch.width, dv, shape.kv_stride(), 1.0);
    }
}

/// `dst = scale · src` for a block of rows.
///
/// # Safety
/// Both are valid for the shape with their strides.
#[inline(always)]
unsafe fn copy_scaled<S: Simd>(
    s: S,
    (rows, cols): (usize, usize),
    src: *const f32,
    src_stride: usize,
    dst: *mut f32,
    dst_stride: usize,
    scale: f32,
) {
    let scale = s.splat(scale);
    for row in 0..rows {
        // SAFETY: as the caller vouches.
        unsafe {
            let (src, dst) = (src.add(row * src_stride), dst.add(row * dst_stride));
            each_vector!(S, cols, i, len => {
                store(s, dst.add(i), s.mul(load(s, src.add(i), len), scale), len);
            });
        }
    }
}

/// Adds the pair's part to the scratch's dK and dV and puts its part of dQ into the scratch.
///
/// # Safety
/// As for [`attention_backward`]; the scratch holds the key block.
#[inline(always)]
unsafe fn block_pair<S: Simd>(s: S, args: &AttentionBackward, scratch: &Scratch, pair: Pair, head: usize) {
    /// Rows of a masked product that share one range.
    const STRIP: usize = 12;
    let shape = &args.shape;
    let d = shape.head_dim;
    let &Scratch {
        width,
        kt,
        vt,
        k,
        q,
        d_o,
        dk,
        dv,
        dq,
        p,
        ds,
    } = scratch;
    let Pair { t0, queries, keys, .. } = pair;
    // SAFETY: blocks of the scratch, whose shapes are documented there.
    unsafe {
        let offset = t0 * shape.q_stride() + head * d;
        let (query, gradient) = (args.q.add(offset), args.d_o.add(offset));
        copy_scaled(s, (queries, d), query, shape.q_stride(), q, width, shape.scale);
        copy_scaled(s, (queries, d), gradient, shape.q_stride(), d_o, width, 1.0);

        // Scores into `p`, do·vᵀ into `ds`.
        for key in (0..keys).step_by(panel::<S>()) {
            let (from, to) = pair.queries_of(shape, args.doc_start, key, key + panel::<S>());
            let size = (to - from, panel::<S>(), d);
            let at = from * BLOCK + key;
            let left = Left {
                p: q.add(from * width),
                row: width,
                col: 1,
            };
            product(s, Into::Replace, size, left, kt.add(key), BLOCK, p.add(at), BLOCK);
            let left = Left {
                p: d_o.add(from * width),
                ..left
            };
            product(s, Into::Replace, size, left, vt.add(key), BLOCK, ds.add(at), BLOCK);
        }
        for i in 0..queries {
            let range = pair.keys_of(shape, args.doc_start, i, i + 1);
            probability_row(s, args, (p.add(i * BLOCK), ds.add(i * BLOCK)), range, t0 + i, head);
        }

        let strip = if pair.unmasked(shape, args.doc_start) {
            BLOCK
        } else {
            STRIP
        };
        for key in (0..keys).step_by(strip) {
            let end = keys.min(key + strip);
            let (from, to) = pair.queries_of(shape, args.doc_start, key, end);
            let size = (end - key, d.next_multiple_of(panel::<S>()), to - from);
            let (at, rows) = (from * BLOCK + key, from * width);
            let left = Left {
                p: p.add(at),
                row: 1,
                col: BLOCK,
            };
            product(
                s,
                Into::Add,
                size,
                left,
                d_o.add(rows),
                width,
                dv.add(key * width),
                width,
            );
            let left = Left { p: ds.add(at), ..left };
            product(s, Into::Add, size, left, q.add(rows), width, dk.add(key * width), width);
        }
        for i in (0..queries).step_by(strip) {
            let end = queries.min(i + strip);
            let (from, to) = pair.keys_of(shape, args.doc_start, i, end);
            let size = (end - i, d.next_multiple_of(panel::<S>()), to - from);
            let left = Left {
                p: ds.add(i * BLOCK + from),
                row: BLOCK,
                col: 1,
            };
            product(
                s,
                Into::Replace,
                size,
                left,
                k.add(from * width),
                width,
                dq.add(i * width),
                width,
            );
        }
    }
}

/// Turns one query's scores into probabilities and `do · vᵀ` into the scores' gradient; zero
/// outside the keys `from..to` that it sees.
///
/// # Safety
/// `p` and `ds` are rows of 64; the rest as for [`attention_backward`].
#[inline(always)]
unsafe fn probability_row<S: Simd>(
    s: S,
    args: &AttentionBackward,
    (p, ds): (*mut f32, *mut f32),
    (from, to): (usize, usize),
    t: usize,
    head: usize,
) {
    // SAFETY: as the caller vouches.
    unsafe {
        let at = t * args.shape.heads + head;
        let lse = s.splat(*args.lse.add(at));
        let delta = args.workspace.cast::<f32>().add(Layout::new(&args.shape).delta);
        let delta = s.splat(*delta.add(at));
        for i in (from / S::LANES * S::LANES..to).step_by(S::LANES) {
            let probability = exp(s, s.sub(s.load(p.add(i)), lse));
            s.store(p.add(i), probability);
            s.store(ds.add(i), s.mul(probability, s.sub(s.load(ds.add(i)), delta)));
        }
        if (from, to) != (0, BLOCK) {
            for row in [p, ds] {
                row.write_bytes(0, from);
                row.add(to).write_bytes(0, BLOCK - to);
            }
        }
    }
}

/// Adds the scratch's dQ to the result when it is this key block's turn; the first one stores.
///
/// # Safety
/// As for [`attention_backward`].
#[inline(always)]
unsafe fn add_to_dq<S: Simd>(
    s: S,
    args: &AttentionBackward,
    scratch: &Scratch,
    (block, query_block): (usize, usize),
    head: usize,
) {
    let shape = &args.shape;
    let d = shape.head_dim;
    let t0 = query_block * BLOCK;
    // SAFETY: between taking and passing the turn these rows of dQ belong to this tile.
    unsafe {
        let turn = turn(args, head, query_block);
        let mut polls = 0;
        while turn.load(Ordering::Acquire) != block as u32 {
            polls += 1;
            if polls < 1000 {
                std::hint::spin_loop()
            } else {
                std::thread::yield_now()
            }
        }
        let first = shape.first_key(args.doc_start, t0) / BLOCK == block;
        for i in 0..BLOCK.min(shape.rows - t0) {
            let src = scratch.dq.add(i * scratch.width);
            let dst = args.dq.add((t0 + i) * shape.q_stride() + head * d);
            each_vector!(S, d, j, len => {
                let part = load(s, src.add(j), len);
                let sum = if first { part } else { s.add(load(s, dst.add(j), len), part) };
                store(s, dst.add(j), sum, len);
            });
        }
        turn.store(block as u32 + 1, Ordering::Release);
    }
}
