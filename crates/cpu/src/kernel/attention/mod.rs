//! Causal grouped-query attention within documents, without a T × T matrix (Dao et al.,
//! "FlashAttention", 2022).
//!
//! Rows of all sequences and documents are flattened; row `t` attends to the rows
//! `max(doc_start[t], t − window + 1) ..= t`. Query head `h` reads key and value head
//! `h / (heads / kv_heads)`. Queries and keys are cut into blocks of 64; pairs of blocks that lie
//! wholly outside the mask are never touched.

mod backward;
mod forward;
mod mask;
mod product;
mod scratch;

pub use backward::{AttentionBackward, attention_backward, attention_backward_workspace};
pub use forward::{Attention, attention, attention_workspace};

/// Rows of a block of queries and of a block of keys.
const BLOCK: usize = 64;

/// Shapes and mask of an attention op.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Tokens, all sequences together.
    pub rows: usize,
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
}

impl AttentionShape {
    fn blocks(&self) -> usize {
        self.rows.div_ceil(BLOCK)
    }

    /// Query heads that read one key head.
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Numbers in a row of queries and outputs.
    fn q_stride(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Numbers in a row of keys and values.
    fn kv_stride(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The first row that row `t` attends to. Never decreases with `t`, because documents are
    /// contiguous.
    ///
    /// # Safety
    /// `doc_start` is readable for `rows` values.
    #[inline(always)]
    unsafe fn first_key(&self, doc_start: *const i32, t: usize) -> usize {
        // SAFETY: the caller vouches for `doc_start`.
        let document = unsafe { *doc_start.add(t) } as usize;
        match self.window {
            Some(window) => document.max((t + 1).saturating_sub(window)),
            None => document,
        }
    }

    /// What the kernels rely on, checked in debug builds.
    ///
    /// # Safety
    /// `doc_start` is readable for `rows` values.
    unsafe fn debug_check(&self, doc_start: *const i32) {
        debug_assert!(self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads));
        debug_assert!(self.window != Some(0), "a row sees at least itself");
        for t in 0..if cfg!(debug_assertions) { self.rows } else { 0 } {
            // SAFETY: `t` is below `rows`.
            let (start, before) = unsafe { (*doc_start.add(t), *doc_start.add(t.saturating_sub(1))) };
            debug_assert!(start >= before && start as usize <= t, "doc_start[{t}] = {start}");
        }
    }
}
