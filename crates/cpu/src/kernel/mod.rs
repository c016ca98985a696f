//! Kernels: one file per op family, each a plain function over pointers and sizes.
//!
//! What holds for all of them:
//!
//! - They never allocate. A kernel that needs scratch takes a `workspace` whose exact size in bytes
//!   is the function `…_workspace` beside it, aligned to 64 bytes; each call writes the last four
//!   bytes of its workspace, so that a measured peak can be compared with the planned one.
//! - Numbers that may be stored in 16 bits are [`Floats`](crate::floats::Floats), several of one
//!   tensor family stored alike; all arithmetic is in `f32`, rounded when results are stored.
//! - Matrices are row-major and dense. Rows are tokens: batch and sequence are flattened, `T =
//!   batch · seq`.
//! - Work is cut into tiles by shape alone and every sum has a fixed order, so that results are the
//!   same bits for any number of threads. They may differ between instruction sets.
//! - Outputs overlap neither inputs nor each other unless the argument's description says "in
//!   place".
//!
//! # Safety
//! All kernels are `unsafe` for the same reason: every pointer of the arguments must be valid for
//! the shape given with it, nobody else may touch the outputs during the call, and the machine must
//! be able to run `Context::isa`.

#[macro_use]
mod vector;

mod add;
mod attention;
mod bias;
mod cast;
mod cross_entropy;
mod dropout;
mod embedding;
mod gelu;
mod kv_cache;
mod layer_norm;
mod linear_cross_entropy;
mod math;
mod optimizer;
mod rms_norm;
mod rope;
mod rows;
mod scale;
mod swiglu;

pub use add::{Add, add, zero};
pub use attention::{
    Attention, AttentionBackward, AttentionShape, attention, attention_backward, attention_backward_workspace,
    attention_workspace,
};
pub use bias::{BiasBackward, bias_backward};
pub use cast::{Cast, cast};
pub use cross_entropy::{
    CrossEntropyRows, SoftmaxCrossEntropy, SoftmaxCrossEntropyBackward, cross_entropy_rows, softmax_cross_entropy,
    softmax_cross_entropy_backward, softmax_cross_entropy_workspace,
};
pub use dropout::{Dropout, dropout};
pub use embedding::{Embedding, EmbeddingBackward, Table, embedding, embedding_backward};
pub use gelu::{Gelu, GeluBackward, GeluKind, gelu, gelu_backward};
pub use kv_cache::{CachedAttention, KvAppend, cached_attention, cached_attention_workspace, kv_append};
pub use layer_norm::{LayerNorm, LayerNormBackward, layer_norm, layer_norm_backward, layer_norm_backward_workspace};
pub use linear_cross_entropy::{
    LinearCrossEntropy, LinearCrossEntropyShape, linear_cross_entropy, linear_cross_entropy_workspace,
};
pub use math::{erf, exp, sigmoid};
pub use optimizer::{
    Adafactor, Adam, AdamW, AdamW8bit, Apollo, Codes, GlobalNorm, GradientFactor, Lion, Norm, SecondMoment, Sgd,
    Update, UpdateLossScale, adafactor, adafactor_workspace, adamw, adamw_8bit, apollo, apollo_workspace, global_norm,
    gradient_factor, lion, norm, norm_workspace, sgd, update_loss_scale,
};
pub use rms_norm::{RmsNorm, RmsNormBackward, rms_norm, rms_norm_backward, rms_norm_backward_workspace};
pub use rope::{Rope, RopeTable, rope, rope_table};
pub use rows::{PadRows, SliceRows, pad_rows, slice_rows};
pub use scale::{Scale, scale};
pub use swiglu::{Swiglu, SwigluBackward, swiglu, swiglu_backward};

use crate::pool::Pool;
use crate::simd::Isa;

/// Where a kernel runs: its threads and their instruction set.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// The threads that tiles are handed to.
    pub pool: &'a Pool,
    /// The instruction set; this machine must be able to run it.
    pub isa: Isa,
}

impl Context<'_> {
    /// Calls `f(isa, tile, worker)` for each tile; see [`Pool::for_each`].
    fn for_each(&self, tiles: usize, f: impl Fn(Isa, usize, usize) + Sync) {
        // The context cannot be shared between threads, as a pool belongs to one.
        let isa = self.isa;
        self.pool.for_each(tiles, |tile, worker| f(isa, tile, worker));
    }
}

/// Elements of an elementwise tile: large enough to make claiming a tile free, small enough for a
/// level-2 cache.
const TILE: usize = 16 * 1024;

/// Rows of a tile of `[rows, cols]`: about [`TILE`] elements, at least one row.
fn rows_per_tile(cols: usize) -> usize {
    (TILE / cols.max(1)).max(1)
}

/// Keeps the workspace's promise where no tile is certain to use the last word.
///
/// # Safety
/// `workspace` is valid for `bytes` bytes, a multiple of four.
unsafe fn touch_last_word(workspace: *mut u8, bytes: u64) {
    if bytes >= 4 {
        // SAFETY: the word lies inside the workspace; its size fits `usize` because it is mapped.
        unsafe { workspace.add(bytes as usize - 4).cast::<u32>().write(0) };
    }
}
