//! Attention, backward.
//!
//! A tile is one block of keys of one key head: it walks over the query heads of its group and the
//! query blocks that see it, recomputes the probabilities from the saved log-sum-exp, and keeps
//! its dK and dV in cache. Contributions to a block of dQ come from several tiles; they are added
//! in the order of their key blocks, each tile waiting for its turn, so that the sum has the same
//! bits for any number of threads. Tiles are handed out in that same order, so the tile that
//! another one waits for is always running already.
//!
//! A dQ that is stored in 16 bits would round each partial sum. Its sums are kept in `f32` scratch
//! instead, of as many key heads as there are threads, and all tiles of those heads run before
//! those of the next ones.

use std::sync::atomic::{AtomicU32, Ordering};

use super::mask::Pair;
use super::product::{Into, Left, panel, product, transpose};
use super::scratch::{Layout, Scratch};
use super::{AttentionShape, BLOCK};
use crate::floats::{Float, Floats};
use crate::kernel::math::exp;
use crate::kernel::vector::{copy_rows, dot, load, store};
use crate::kernel::{Context, touch_last_word};
use crate::multiversion;
use crate::simd::Simd;

/// Gradient of [`Attention`](super::Attention).
pub struct AttentionBackward {
    /// Shapes and mask.
    pub shape: AttentionShape,
    /// Queries, `[rows, heads · head_dim]`.
    pub q: Floats,
    /// Keys, `[rows, kv_heads · head_dim]`.
    pub k: Floats,
    /// Values, `[rows, kv_heads · head_dim]`.
    pub v: Floats,
    /// Output of the forward op, `[rows, heads · head_dim]`.
    pub o: Floats,
    /// From the forward op, `[rows, heads]`.
    pub lse: *const f32,
    /// Gradient of the output, `[rows, heads · head_dim]`.
    pub d_o: Floats,
    /// First row of each row's document, `[rows]`, never decreasing.
    pub doc_start: *const i32,
    /// Gradient of the queries, `[rows, heads · head_dim]`.
    pub dq: Floats,
    /// Gradient of the keys, `[rows, kv_heads · head_dim]`.
    pub dk: Floats,
    /// Gradient of the values, `[rows, kv_heads · head_dim]`.
    pub dv: Floats,
    /// [`attention_backward_workspace`] bytes.
    pub workspace: *mut u8,
}

shared!(AttentionBackward);

/// Bytes of workspace for operands that are stored so.
pub fn attention_backward_workspace(shape: &AttentionShape, stored: Float, threads: usize) -> u64 {
    let layout = Layout::new(shape, stored);
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
    let threads = cx.pool.threads();
    let at_once = match args.dq.stored() {
        Float::F32 => shape.kv_heads,
        Float::Bf16 | Float::F16 => threads.min(shape.kv_heads),
    };
    for first in (0..shape.kv_heads).step_by(at_once) {
        let heads = at_once.min(shape.kv_heads - first);
        // In the order that turns are given in; early blocks, seen by the most queries, come first.
        cx.for_each(blocks * heads, |isa, tile, worker| {
            let (block, sums) = (tile / heads, tile % heads);
            // SAFETY: the caller's contract; tiles are disjoint but for dQ and its sums, which take turns.
            unsafe { key_block(isa, args, block, (first + sums, sums), worker) }
        });
    }
    let bytes = attention_backward_workspace(shape, args.dq.stored(), threads);
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
        let delta = args
            .workspace
            .cast::<f32>()
            .add(Layout::new(shape, args.dq.stored()).delta);
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
    unsafe fn key_block(args: &AttentionBackward, block: usize, kv_head: (usize, usize), worker: usize)
        = key_block_body;
}

/// One block of keys of a key head, which comes with the number of the scratch that has its sums of dQ.
#[inline(always)]
unsafe fn key_block_body<S: Simd>(
    s: S,
    args: &AttentionBackward,
    block: usize,
    (kv_head, sums_of): (usize, usize),
    worker: usize,
) {
    let shape = &args.shape;
    let d = shape.head_dim;
    let k0 = block * BLOCK;
    let keys = BLOCK.min(shape.rows - k0);
    let group = shape.group();
    // SAFETY: key rows `k0..k0 + keys` of `kv_head` belong to this tile, the scratch to this
    // worker.
    unsafe {
        let layout = Layout::new(shape, args.dq.stored());
        let scratch = Scratch::new(args.workspace, shape, &layout, worker);
        let sums = args.workspace.cast::<f32>();
        let sums = sums.add(layout.scratch + sums_of * layout.per_worker + layout.sums);
        let offset = k0 * shape.kv_stride() + kv_head * d;
        if keys < BLOCK {
            scratch.kt.write_bytes(0, 2 * d * BLOCK);
        }
        // V passes through the place of Q, which comes later.
        let (size, width) = ((keys, d), scratch.width);
        for (rows, copy, transposed) in [(args.k, scratch.k, scratch.kt), (args.v, scratch.q, scratch.vt)] {
            copy_rows(s, size, rows.add(offset), shape.kv_stride(), copy.into(), width);
            transpose(s, size, copy, width, transposed, BLOCK);
        }
        let k = Floats::of_mut(scratch.k);
        copy_scaled(s, size, k, width, k, width, shape.scale);
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
                let sums = sums.add((head - kv_head * group) * d);
                add_to_dq(s, args, &scratch, (block, query_block), head, sums);
            }
        }

        let (dk, dv) = (args.dk.add(offset), args.dv.add(offset));
        copy_rows(s, size, scratch.dk.into(), width, dk, shape.kv_stride());
        copy_rows(s, size, scratch.dv.into(), width, dv, shape.kv_stride());
    }
}

/// `dst = scale · src` for a block of rows.
///
/// # Safety
/// Both are valid for the shape with their strides; they are the same or do not overlap.
#[inline(always)]
unsafe fn copy_scaled<S: Simd>(
    s: S,
    (rows, cols): (usize, usize),
    src: Floats,
    src_stride: usize,
    dst: Floats,
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
        copy_scaled(s, (queries, d), query, shape.q_stride(), q.into(), width, shape.scale);
        copy_rows(s, (queries, d), gradient, shape.q_stride(), d_o.into(), width);

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
        let layout = Layout::new(&args.shape, args.dq.stored());
        let delta = args.workspace.cast::<f32>().add(layout.delta);
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

/// Adds the scratch's dQ to the sum so far when it is this key block's turn. The first one begins the sum, and the last one, that of
/// the queries themselves, writes the result. A result in `f32` is its own sum.
///
/// # Safety
/// As for [`attention_backward`]; `sums` are the head's, rows of its group apart.
#[inline(always)]
unsafe fn add_to_dq<S: Simd>(
    s: S,
    args: &AttentionBackward,
    scratch: &Scratch,
    (block, query_block): (usize, usize),
    head: usize,
    sums: *mut f32,
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
        let last = block == query_block;
        for i in 0..BLOCK.min(shape.rows - t0) {
            let part = scratch.dq.add(i * scratch.width);
            let dq = args.dq.add((t0 + i) * shape.q_stride() + head * d);
            let so_far = match dq.stored() {
                Float::F32 => dq.address().cast(),
                Float::Bf16 | Float::F16 => sums.add((t0 + i) * shape.group() * d),
            };
            let to = if last { dq } else { so_far.into() };
            each_vector!(S, d, j, len => {
                let part = load(s, part.add(j), len);
                let sum = if first { part } else { s.add(load(s, so_far.add(j), len), part) };
                store(s, to.add(j), sum, len);
            });
        }
        turn.store(block as u32 + 1, Ordering::Release);
    }
}
