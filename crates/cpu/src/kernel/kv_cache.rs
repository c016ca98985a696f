//! Generation with a cache of keys and values: its new rows, and attention to all of its rows.
//!
//! What a row attends to lies in blocks of 64 cache rows, counted from the cache's first. Everything that is computed for a row
//! depends on its place in the cache alone, so a prompt gives the same bits whether it comes in one piece, in several or token by
//! token.

use super::math::exp;
use super::vector::{as_f32, load, store};
use super::{Context, rows_per_tile, touch_last_word};
use crate::floats::{Float, Floats};
use crate::multiversion;
use crate::simd::Simd;

/// Row `t` of `new` becomes row `start + t` of the cache; rows that would lie outside of it are dropped.
pub struct KvAppend {
    /// New tokens.
    pub rows: usize,
    /// Rows of the cache.
    pub capacity: usize,
    /// `kv_heads · head_dim`.
    pub width: usize,
    /// The new rows, `[rows, width]`.
    pub new: Floats,
    /// Where they go, one number.
    pub start: *const i32,
    /// The cache, `[capacity, width]`.
    pub cache: Floats,
}

/// `o = softmax(scale · q kᵀ) v`, each row over the rows of the cache up to its own.
pub struct CachedAttention {
    /// New tokens.
    pub rows: usize,
    /// Rows of the cache, at least one.
    pub capacity: usize,
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Factor of the scores, usually `1 / √head_dim`.
    pub scale: f32,
    /// How many rows, itself included, a row sees at most.
    pub window: Option<usize>,
    /// Queries, `[rows, heads · head_dim]`.
    pub q: Floats,
    /// Keys, `[capacity, kv_heads · head_dim]`.
    pub k: Floats,
    /// Values, `[capacity, kv_heads · head_dim]`.
    pub v: Floats,
    /// The first new token's row in the cache, one number; a token that would stand outside of the cache counts as standing at its
    /// nearer end.
    pub start: *const i32,
    /// Output, `[rows, heads · head_dim]`.
    pub o: Floats,
    /// [`cached_attention_workspace`] bytes.
    pub workspace: *mut u8,
}

shared!(KvAppend, CachedAttention);

/// Writes the new rows.
///
/// # Safety
/// See the [module](super).
pub unsafe fn kv_append(cx: &Context, args: &KvAppend) {
    let rows = rows_per_tile(args.width);
    cx.for_each(args.rows.div_ceil(rows), |_, tile, _| {
        for t in tile * rows..args.rows.min((tile + 1) * rows) {
            // SAFETY: the caller's contract; `t` is below `rows`, the target below `capacity`, and tiles are disjoint.
            unsafe {
                let row = i64::from(*args.start) + t as i64;
                if (0..args.capacity as i64).contains(&row) {
                    let to = args.cache.add(row as usize * args.width);
                    to.copy_from(args.new.add(t * args.width), args.width);
                }
            }
        }
    });
}

/// Rows of the cache whose scores are computed before their values are added up.
const KEYS: usize = 64;

/// Query rows of a tile.
const ROWS: usize = 16;

/// Query heads of a tile, all of which read the same key and value head. Each block of keys and values comes from memory once for
/// all rows and heads of the tile.
const HEADS: usize = 4;

/// What a thread needs where numbers are stored in 16 bits: a tile's queries, its outputs so far, and a block of keys and values.
struct Scratch {
    /// `[ROWS, HEADS · head_dim]`.
    q: *mut f32,
    /// `[ROWS, HEADS · head_dim]`.
    o: *mut f32,
    /// `[KEYS, head_dim]`.
    k: *mut f32,
    /// `[KEYS, head_dim]`.
    v: *mut f32,
}

impl Scratch {
    /// Floats of a worker's.
    fn floats(head_dim: usize) -> usize {
        2 * (ROWS * HEADS + KEYS) * head_dim
    }

    /// A worker's; only to be touched where there is a workspace.
    fn new(workspace: *mut u8, head_dim: usize, worker: usize) -> Self {
        let q = workspace.cast::<f32>().wrapping_add(worker * Self::floats(head_dim));
        let o = q.wrapping_add(ROWS * HEADS * head_dim);
        let k = o.wrapping_add(ROWS * HEADS * head_dim);
        let v = k.wrapping_add(KEYS * head_dim);
        Self { q, o, k, v }
    }
}

/// Bytes of workspace for operands that are stored so: none where they are `f32` themselves.
pub fn cached_attention_workspace(head_dim: usize, stored: Float, threads: usize) -> u64 {
    match stored {
        Float::F32 => 0,
        Float::Bf16 | Float::F16 => (threads * Scratch::floats(head_dim) * size_of::<f32>()) as u64,
    }
}

/// Attention with an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867).
///
/// # Safety
/// See the [module](super).
pub unsafe fn cached_attention(cx: &Context, args: &CachedAttention) {
    debug_assert!(args.kv_heads > 0 && args.heads.is_multiple_of(args.kv_heads));
    debug_assert!(args.capacity > 0 && args.window != Some(0));
    let group = args.heads / args.kv_heads;
    let parts = group.div_ceil(HEADS);
    let (blocks, columns) = (args.rows.div_ceil(ROWS), args.kv_heads * parts);
    cx.for_each(blocks * columns, |isa, tile, worker| {
        // Late rows see the most keys: first, for balance.
        let (block, column) = (blocks - 1 - tile / columns, tile % columns);
        let (kv_head, part) = (column / parts, column % parts);
        let tile = Tile {
            rows: (block * ROWS, args.rows.min((block + 1) * ROWS)),
            heads: (
                kv_head * group + part * HEADS,
                kv_head * group + group.min((part + 1) * HEADS),
            ),
            kv_head,
        };
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { query_tile(isa, args, tile, worker) }
    });
    let bytes = cached_attention_workspace(args.head_dim, args.o.stored(), cx.pool.threads());
    // SAFETY: the caller's contract.
    unsafe { touch_last_word(args.workspace, bytes) };
}

/// What one thread computes: from and up to, without the last.
#[derive(Clone, Copy)]
struct Tile {
    rows: (usize, usize),
    heads: (usize, usize),
    kv_head: usize,
}

multiversion! {
    unsafe fn query_tile(args: &CachedAttention, tile: Tile, worker: usize) = query_tile_body;
}

/// Below every score that a finite model computes, and far enough from infinity that the
/// difference of two of them is not NaN.
const LOWEST: f32 = -1e30;

/// The running maximum of a row's scores, and the sum of their exponentials.
#[derive(Clone, Copy)]
struct Softmax {
    max: f32,
    sum: f32,
}

#[inline(always)]
unsafe fn query_tile_body<S: Simd>(s: S, args: &CachedAttention, tile: Tile, worker: usize) {
    let d = args.head_dim;
    let ((first, end), (first_head, end_head)) = (tile.rows, tile.heads);
    let nothing = Softmax { max: LOWEST, sum: 0.0 };
    let mut softmax = [[nothing; HEADS]; ROWS];
    let scratch = Scratch::new(args.workspace, d, worker);
    let (width, stride) = ((end_head - first_head) * d, args.heads * d);
    // SAFETY: these rows of these heads belong to this tile, the scratch to this worker; `visible` gives rows of the cache.
    unsafe {
        let at = (first * args.heads + first_head) * d;
        let result = args.o.add(at);
        let (q, q_stride) = as_f32(s, (end - first, width), args.q.add(at), stride, scratch.q);
        let (o, o_stride) = match result.stored() {
            Float::F32 => (result.address().cast::<f32>(), stride),
            Float::Bf16 | Float::F16 => (scratch.o, width),
        };
        for row in 0..end - first {
            o.add(row * o_stride).write_bytes(0, width);
        }
        let (first_key, last_key) = (visible(args, first).0, visible(args, end - 1).1);
        for k0 in (first_key / KEYS * KEYS..=last_key).step_by(KEYS) {
            let offset = (k0 * args.kv_heads + tile.kv_head) * d;
            let size = (KEYS.min(last_key + 1 - k0), d);
            let (k, key_stride) = as_f32(s, size, args.k.add(offset), args.kv_heads * d, scratch.k);
            let (v, _) = as_f32(s, size, args.v.add(offset), args.kv_heads * d, scratch.v);
            for t in first..end {
                let (low, high) = visible(args, t);
                let keys = (low.max(k0) - k0, KEYS.min((high + 1).saturating_sub(k0)));
                if keys.0 >= keys.1 {
                    continue;
                }
                for head in first_head..end_head {
                    let (row, head) = (t - first, head - first_head);
                    let q = q.add(row * q_stride + head * d);
                    let o = o.add(row * o_stride + head * d);
                    key_block(s, args, keys, (q, k, v), key_stride, o, &mut softmax[row][head]);
                }
            }
        }
        for (row, softmax) in softmax.iter().enumerate().take(end - first) {
            for (head, softmax) in softmax.iter().enumerate().take(end_head - first_head) {
                let inverse = s.splat(1.0 / softmax.sum);
                let (o, result) = (o.add(row * o_stride + head * d), result.add(row * stride + head * d));
                each_vector!(S, d, i, len => {
                    store(s, result.add(i), s.mul(load(s, o.add(i), len), inverse), len);
                });
            }
        }
    }
}

/// The first and last row of the cache that row `t` attends to; neither decreases with `t`.
///
/// # Safety
/// `start` is readable.
#[inline(always)]
unsafe fn visible(args: &CachedAttention, t: usize) -> (usize, usize) {
    // SAFETY: the caller vouches for it.
    let position = i64::from(unsafe { *args.start }) + t as i64;
    let last = position.clamp(0, args.capacity as i64 - 1) as usize;
    let first = args.window.map_or(0, |window| (last + 1).saturating_sub(window));
    (first, last)
}

/// One row's attention to rows `first..end` of a block of the cache.
///
/// # Safety
/// `q` and `o` are one head of one row, `k` and `v` the same head of the block's first row, `stride` floats from the next one;
/// `first < end <= KEYS`, and rows `first..end` of the block lie in the cache.
#[inline(always)]
unsafe fn key_block<S: Simd>(
    s: S,
    args: &CachedAttention,
    (first, end): (usize, usize),
    (q, k, v): (*const f32, *const f32, *const f32),
    stride: usize,
    o: *mut f32,
    softmax: &mut Softmax,
) {
    let d = args.head_dim;
    let mut p = [f32::NEG_INFINITY; KEYS];
    // SAFETY: keys and values of rows `first..end`; all of `p` is read and written in whole vectors, which divide it.
    unsafe {
        let mut key = first;
        while key < end {
            let (k, scores) = (k.add(key * stride), p.as_mut_ptr().add(key));
            if end - key >= 8 {
                dots::<S, 8>(s, d, args.scale, q, k, stride, scores);
                key += 8;
            } else {
                dots::<S, 1>(s, d, args.scale, q, k, stride, scores);
                key += 1;
            }
        }
        let p = p.as_mut_ptr();
        let mut max = s.splat(softmax.max);
        for i in (0..KEYS).step_by(S::LANES) {
            max = s.max(s.load(p.add(i)), max);
        }
        let max = s.reduce_max(max);
        let mut sum = s.splat(0.0);
        for i in (0..KEYS).step_by(S::LANES) {
            let e = exp(s, s.sub(s.load(p.add(i)), s.splat(max)));
            sum = s.add(sum, e);
            s.store(p.add(i), e);
        }
        let shrink = exp(s, s.splat(softmax.max - max));
        *softmax = Softmax {
            max,
            sum: softmax.sum * s.reduce_max(shrink) + s.reduce_add(sum),
        };
        let mut i = 0;
        while i < d {
            let (v, o) = (v.add(i), o.add(i));
            if i + 4 * S::LANES <= d {
                weigh::<S, 4>(s, S::LANES, shrink, (first, end), p, v, stride, o);
                i += 4 * S::LANES;
            } else {
                weigh::<S, 1>(s, d - i, shrink, (first, end), p, v, stride, o);
                i += S::LANES;
            }
        }
    }
}

/// `scores[j] = scale · (q · k[j])` for `N` keys, `stride` floats apart.
///
/// # Safety
/// `q` and each key are readable for `d` floats, `scores` is writable for `N`.
#[inline(always)]
unsafe fn dots<S: Simd, const N: usize>(
    s: S,
    d: usize,
    scale: f32,
    q: *const f32,
    k: *const f32,
    stride: usize,
    scores: *mut f32,
) {
    let mut acc = [s.splat(0.0); N];
    // SAFETY: within the `d` floats and `N` keys that the caller vouches for.
    unsafe {
        each_vector!(S, d, i, len => {
            let x = load(s, q.add(i), len);
            for (j, acc) in acc.iter_mut().enumerate() {
                *acc = s.fma(x, load(s, k.add(j * stride + i), len), *acc);
            }
        });
        for (j, acc) in acc.into_iter().enumerate() {
            *scores.add(j) = scale * s.reduce_add(acc);
        }
    }
}

/// `o = o · shrink + Σ p[j] · v[j]` over rows `first..end`, for `N` vectors of a head, each of `min(len, LANES)` floats.
///
/// # Safety
/// Those floats are readable in each row of `v`, `stride` floats apart, and writable at `o`.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
unsafe fn weigh<S: Simd, const N: usize>(
    s: S,
    len: usize,
    shrink: S::V,
    (first, end): (usize, usize),
    p: *const f32,
    v: *const f32,
    stride: usize,
    o: *mut f32,
) {
    let mut acc = [shrink; N];
    // SAFETY: within the floats and rows that the caller vouches for.
    unsafe {
        for (n, acc) in acc.iter_mut().enumerate() {
            *acc = s.mul(load(s, o.add(n * S::LANES), len), shrink);
        }
        for j in first..end {
            let x = s.splat(*p.add(j));
            for (n, acc) in acc.iter_mut().enumerate() {
                *acc = s.fma(x, load(s, v.add(j * stride + n * S::LANES), len), *acc);
            }
        }
        for (n, acc) in acc.into_iter().enumerate() {
            store(s, o.add(n * S::LANES), acc, len);
        }
    }
}
