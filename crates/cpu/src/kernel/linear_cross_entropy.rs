//! Output projection and cross-entropy together, in chunks of rows: logits never exist whole, and
//! the gradients are made in the forward pass, while a chunk's logits are at hand (as in Liger
//! Kernel's fused linear cross-entropy; Hsu et al., 2024).

use super::cross_entropy::{CrossEntropyRows, cross_entropy_rows, sum_in_order};
use super::{Context, touch_last_word};
use crate::gemm::{self, Gemm, View};
use crate::simd::Isa;

/// Mean loss of `softmax(x · wᵀ)` and, where asked for, its gradients.
pub struct LinearCrossEntropy {
    /// Tokens, at least one.
    pub rows: usize,
    /// Width of a hidden state.
    pub hidden: usize,
    /// Rows of `w`.
    pub vocab: usize,
    /// Rows whose logits exist at once.
    pub chunk: usize,
    /// Hidden states, `[rows, hidden]`.
    pub x: *const f32,
    /// Output embeddings, `[vocab, hidden]`.
    pub w: *const f32,
    /// Targets, `[rows]`.
    pub targets: *const i32,
    /// Target of the rows to skip.
    pub ignore_index: i32,
    /// Number of tokens that the loss is a mean over, one float.
    pub token_count: *const f32,
    /// Added to `dw`, `[vocab, hidden]`.
    pub acc_dw: Option<*const f32>,
    /// Sum of losses divided by `token_count`, one float.
    pub loss: *mut f32,
    /// Gradient of `x`, `[rows, hidden]`; in place over `x`.
    pub dx: Option<*mut f32>,
    /// Gradient of `w`, `[vocab, hidden]`; in place over `acc_dw`.
    pub dw: Option<*mut f32>,
    /// [`linear_cross_entropy_workspace`] bytes.
    pub workspace: *mut u8,
}

/// Where the parts of the workspace begin, in bytes: the losses of all rows come first.
struct Layout {
    logits: u64,
    gemm: u64,
    bytes: u64,
}

impl Layout {
    fn new(isa: Isa, (rows, hidden, vocab): (usize, usize, usize), chunk: usize, threads: usize) -> Self {
        const FLOAT: u64 = size_of::<f32>() as u64;
        const ALIGN: u64 = gemm::WORKSPACE_ALIGN as u64;
        let logits = (rows as u64 * FLOAT).next_multiple_of(ALIGN);
        let chunk_bytes = chunk.min(rows) as u64 * vocab as u64 * FLOAT;
        let gemm = (logits + chunk_bytes).next_multiple_of(ALIGN);
        // Whole chunks, and the last one where it is shorter.
        let largest = [chunk.min(rows), rows % chunk]
            .into_iter()
            .filter(|&n| n > 0)
            .flat_map(|n| [(n, vocab, hidden), (n, hidden, vocab), (vocab, hidden, n)])
            .map(|(m, n, k)| gemm::workspace_bytes(isa, m, n, k, threads))
            .max()
            .unwrap_or(0);
        Self {
            logits,
            gemm,
            bytes: gemm + largest,
        }
    }
}

/// Bytes of workspace: a chunk of logits, a loss per row, and what the products need.
pub fn linear_cross_entropy_workspace(
    isa: Isa,
    rows: usize,
    hidden: usize,
    vocab: usize,
    chunk: usize,
    threads: usize,
) -> u64 {
    Layout::new(isa, (rows, hidden, vocab), chunk, threads).bytes
}

/// Per chunk: `logits = x wᵀ`, replaced by their gradient; `dx = dlogits w`; `dw += dlogitsᵀ x`.
///
/// # Safety
/// See the [module](super).
pub unsafe fn linear_cross_entropy(cx: &Context, args: &LinearCrossEntropy) {
    let &LinearCrossEntropy {
        rows,
        hidden,
        vocab,
        chunk,
        x,
        w,
        workspace,
        ..
    } = args;
    let layout = Layout::new(cx.isa, (rows, hidden, vocab), chunk, cx.pool.threads());
    // SAFETY: chunks lie within `rows`, the parts of the workspace within its size.
    unsafe {
        let losses = workspace.cast::<f32>();
        let logits = workspace.add(layout.logits as usize).cast::<f32>();
        let gemm_workspace = workspace.add(layout.gemm as usize);
        let w = View::row_major(w, hidden);
        for first in (0..rows).step_by(chunk) {
            let n = chunk.min(rows - first);
            let chunk_x = x.add(first * hidden);
            let multiply = |(m, n, k), a, b, c, add| {
                let product = Gemm {
                    m,
                    n,
                    k,
                    a,
                    b,
                    c,
                    c_stride: n,
                    add,
                    bias: None,
                };
                product.run(cx.pool, cx.isa, gemm_workspace);
            };
            let x = View::row_major(chunk_x, hidden);
            multiply((n, vocab, hidden), x, w.transposed(), logits, None);
            let chunk_rows = CrossEntropyRows {
                rows: n,
                vocab,
                logits,
                targets: args.targets.add(first),
                ignore_index: args.ignore_index,
                token_count: args.token_count,
                losses: losses.add(first),
                gradient: args.dx.is_some() || args.dw.is_some(),
            };
            cross_entropy_rows(cx, &chunk_rows);
            let dlogits = View::row_major(logits, vocab);
            if let Some(dw) = args.dw {
                let acc = if first == 0 { args.acc_dw } else { Some(dw.cast_const()) };
                let add = acc.map(|acc| (acc, hidden));
                multiply((vocab, hidden, n), dlogits.transposed(), x, dw, add);
            }
            // After `dw`, the last reader of this chunk of `x`.
            if let Some(dx) = args.dx {
                multiply((n, hidden, vocab), dlogits, w, dx.add(first * hidden), None);
            }
        }
        *args.loss = (sum_in_order(losses, rows) / f64::from(*args.token_count)) as f32;
        touch_last_word(workspace, layout.bytes);
    }
}
