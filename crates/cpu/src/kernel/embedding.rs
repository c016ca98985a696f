//! Token embedding.

use super::vector::{convert, load, store};
use super::{Context, rows_per_tile};
use crate::floats::Floats;
use crate::multiversion;
use crate::simd::Simd;

use tightfit_quant::Block;

/// `y[t] = w[ids[t]]`.
pub struct Embedding {
    /// Tokens.
    pub rows: usize,
    /// Width of an embedding.
    pub hidden: usize,
    /// Rows of `w`.
    pub vocab: usize,
    /// Token ids, `[rows]`. The data layer has checked them; an id out of range gives a row of
    /// zeros.
    pub ids: *const i32,
    /// Embeddings, `[vocab, hidden]`.
    pub w: Table,
    /// Output, `[rows, hidden]`.
    pub y: Floats,
}

/// How the embeddings are stored.
#[derive(Clone, Copy, Debug)]
pub enum Table {
    /// As numbers.
    Floats(Floats),
    /// Quantised.
    Block(Block, *const u8),
}

/// Gradient of [`Embedding`].
pub struct EmbeddingBackward {
    /// Tokens.
    pub rows: usize,
    /// Width of an embedding.
    pub hidden: usize,
    /// Rows of `dw`.
    pub vocab: usize,
    /// Token ids, `[rows]`; one out of range is skipped.
    pub ids: *const i32,
    /// Gradient of the output, `[rows, hidden]`.
    pub dy: Floats,
    /// Added to the result, `[vocab, hidden]`.
    pub acc: Option<*const f32>,
    /// Gradient of the embeddings, `[vocab, hidden]`; in place over `acc`.
    pub dw: *mut f32,
}

shared!(Embedding, EmbeddingBackward);

/// Numbers of a quantised row that are decoded at once: whole blocks of every format.
const CHUNK: usize = 256;

/// Looks up the embedding of each token.
///
/// # Safety
/// See the [module](super).
pub unsafe fn embedding(cx: &Context, args: &Embedding) {
    let rows = rows_per_tile(args.hidden);
    cx.for_each(args.rows.div_ceil(rows), |isa, tile, _| {
        // SAFETY: the caller's contract; tiles are disjoint.
        unsafe { look_up_tile(isa, args, tile * rows, args.rows.min((tile + 1) * rows)) }
    });
}

multiversion! {
    unsafe fn look_up_tile(args: &Embedding, first: usize, end: usize) = look_up_body;
}

#[inline(always)]
unsafe fn look_up_body<S: Simd>(s: S, args: &Embedding, first: usize, end: usize) {
    for t in first..end {
        // SAFETY: rows `first..end` belong to this tile and a valid id is below `vocab`.
        unsafe {
            let id = *args.ids.add(t);
            let valid = (0..args.vocab as i32).contains(&id);
            debug_assert!(valid, "token id {id} of row {t} is out of range");
            let y = args.y.add(t * args.hidden);
            let start = id as usize * args.hidden;
            match args.w {
                _ if !valid => y.clear(args.hidden),
                Table::Floats(w) if w.stored() == y.stored() => y.copy_from(w.add(start), args.hidden),
                Table::Floats(w) => convert(s, w.add(start), y, args.hidden),
                Table::Block(block, bytes) => {
                    let size = block.bytes(args.vocab as u64, args.hidden as u64);
                    let bytes = std::slice::from_raw_parts(bytes, size as usize);
                    let mut chunk = [0.0; CHUNK];
                    for first in (0..args.hidden).step_by(CHUNK) {
                        let numbers = &mut chunk[..CHUNK.min(args.hidden - first)];
                        block.decode(bytes, args.vocab, args.hidden, start + first, numbers);
                        convert(s, numbers.as_ptr(), y.add(first), numbers.len());
                    }
                }
            }
        }
    }
}

/// `dw = acc + Σ_t onehot(ids[t]) ⊗ dy[t]`, tokens in order. Tiles are ranges of the vocabulary, so
/// that no two threads add to one row.
///
/// # Safety
/// See the [module](super).
pub unsafe fn embedding_backward(cx: &Context, args: &EmbeddingBackward) {
    // Each tile reads all ids: few tiles, but enough to balance.
    let range = args.vocab.div_ceil(64).max(1);
    cx.for_each(args.vocab.div_ceil(range), |isa, tile, _| {
        // SAFETY: the caller's contract; ranges are disjoint.
        unsafe { scatter_tile(isa, args, tile * range, args.vocab.min((tile + 1) * range)) }
    });
}

multiversion! {
    unsafe fn scatter_tile(args: &EmbeddingBackward, first: usize, end: usize) = scatter_body;
}

#[inline(always)]
unsafe fn scatter_body<S: Simd>(s: S, args: &EmbeddingBackward, first: usize, end: usize) {
    let hidden = args.hidden;
    // SAFETY: rows `first..end` of `dw` and `acc` belong to this tile; ids are compared before they
    // are used.
    unsafe {
        let dw = args.dw.add(first * hidden);
        let len = (end - first) * hidden;
        match args.acc {
            None => dw.write_bytes(0, len),
            Some(acc) if acc.add(first * hidden) == dw.cast_const() => {}
            Some(acc) => std::ptr::copy_nonoverlapping(acc.add(first * hidden), dw, len),
        }
        for t in 0..args.rows {
            let id = *args.ids.add(t);
            debug_assert!(
                (0..args.vocab as i32).contains(&id),
                "token id {id} of row {t} is out of range"
            );
            if id < first as i32 || id >= end as i32 {
                continue;
            }
            let (dw, dy) = (args.dw.add(id as usize * hidden), args.dy.add(t * hidden));
            each_vector!(S, hidden, i, len => {
                store(s, dw.add(i), s.add(load(s, dw.add(i), len), load(s, dy.add(i), len)), len);
            });
        }
    }
}
