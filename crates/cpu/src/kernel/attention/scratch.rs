//! How the workspace of the backward pass is laid out.

use super::{AttentionShape, BLOCK};
use crate::floats::Float;

/// Widest panel of any instruction set, so that the workspace does not depend on it.
const WIDEST_PANEL: usize = 32;

/// Where the parts of the workspace begin, in floats.
pub struct Layout {
    /// Row of a copied block: `head_dim`, padded to whole panels.
    pub width: usize,
    /// `Σ o · do` of each row and head.
    pub delta: usize,
    /// Scratch of the first worker.
    pub scratch: usize,
    /// Sums of dQ inside of a worker's scratch, if there are any: `[rows, group · head_dim]` for the query heads of a key head.
    pub sums: usize,
    /// Floats of scratch per worker.
    pub per_worker: usize,
}

impl Layout {
    /// The layout for a shape whose operands are stored so. Of dQ in 16 bits the sums are kept in `f32` until they are complete.
    pub fn new(shape: &AttentionShape, stored: Float) -> Self {
        let width = shape.head_dim.next_multiple_of(WIDEST_PANEL);
        // One turn counter per head and query block comes first.
        let delta = (shape.heads * shape.blocks()).next_multiple_of(16);
        let scratch = delta + (shape.rows * shape.heads).next_multiple_of(16);
        let sums = 2 * shape.head_dim * BLOCK + 6 * BLOCK * width + 2 * BLOCK * BLOCK;
        let of_dq = match stored {
            Float::F32 => 0,
            Float::Bf16 | Float::F16 => shape.rows * shape.group() * shape.head_dim,
        };
        Self {
            width,
            delta,
            scratch,
            sums,
            per_worker: sums + of_dq,
        }
    }
}

/// A worker's scratch: blocks of 64 rows.
pub struct Scratch {
    /// Row of a copied block, see [`Layout`].
    pub width: usize,
    /// Kᵀ, `[head_dim, 64]`.
    pub kt: *mut f32,
    /// Vᵀ, `[head_dim, 64]`.
    pub vt: *mut f32,
    /// K times the scale, `[64, width]`.
    pub k: *mut f32,
    /// Q times the scale, `[64, width]`.
    pub q: *mut f32,
    /// dO, `[64, width]`.
    pub d_o: *mut f32,
    /// dK so far, `[64, width]`.
    pub dk: *mut f32,
    /// dV so far, `[64, width]`; right behind dK, so that one fill clears both.
    pub dv: *mut f32,
    /// The current pair's part of dQ, `[64, width]`.
    pub dq: *mut f32,
    /// Probabilities, `[64 queries, 64 keys]`.
    pub p: *mut f32,
    /// Gradient of the scores, `[64 queries, 64 keys]`.
    pub ds: *mut f32,
}

impl Scratch {
    /// The scratch of one worker.
    ///
    /// # Safety
    /// The workspace is valid.
    pub unsafe fn new(workspace: *mut u8, shape: &AttentionShape, layout: &Layout, worker: usize) -> Self {
        let &Layout {
            width,
            scratch,
            per_worker,
            ..
        } = layout;
        let transposed = shape.head_dim * BLOCK;
        let rows = BLOCK * width;
        // SAFETY: the parts add up to `per_worker`.
        unsafe {
            let kt = workspace.cast::<f32>().add(scratch + worker * per_worker);
            let k = kt.add(2 * transposed);
            let p = k.add(6 * rows);
            Self {
                width,
                kt,
                vt: kt.add(transposed),
                k,
                q: k.add(rows),
                d_o: k.add(2 * rows),
                dk: k.add(3 * rows),
                dv: k.add(4 * rows),
                dq: k.add(5 * rows),
                p,
                ds: p.add(BLOCK * BLOCK),
            }
        }
    }
}
