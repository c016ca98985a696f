//! Output projection and cross-entropy together, in chunks of rows: logits never exist whole, and
//! the gradients are made in the forward pass, while a chunk's logits are at hand (as in Liger
//! Kernel's fused linear cross-entropy; Hsu et al., 2024).

use super::cast::{Cast, cast};
use super::cross_entropy::{CrossEntropyRows, cross_entropy_rows, sum_in_order};
use super::{Context, touch_last_word};
use crate::floats::{Float, Floats};
use crate::gemm::{self, Form, Gemm, Matrix, View};
use crate::simd::Isa;
use tightfit_quant::Block;

/// What a [`LinearCrossEntropy`]'s workspace follows from.
#[derive(Clone, Copy, Debug)]
pub struct LinearCrossEntropyShape {
    /// Tokens, at least one.
    pub rows: usize,
    /// Width of a hidden state.
    pub hidden: usize,
    /// Rows of `w`.
    pub vocab: usize,
    /// Rows whose logits exist at once.
    pub chunk: usize,
    /// How hidden states are stored.
    pub x: Float,
    /// The format of `w`, where it is quantised.
    pub w: Option<Block>,
    /// Whether the gradient of `x` is made.
    pub input_gradient: bool,
}

/// Mean loss of `softmax(x · wᵀ)` and, where asked for, its gradients.
pub struct LinearCrossEntropy {
    /// Sizes.
    pub shape: LinearCrossEntropyShape,
    /// Hidden states, `[rows, hidden]`.
    pub x: Floats,
    /// Output embeddings, `[vocab, hidden]`.
    pub w: Matrix,
    /// Targets, `[rows]`.
    pub targets: *const i32,
    /// Target of the rows to skip.
    pub ignore_index: i32,
    /// Number of tokens that the loss is a mean over, one float.
    pub token_count: *const f32,
    /// What gradients are multiplied by, one float.
    pub scale: Option<*const f32>,
    /// Added to `dw`, `[vocab, hidden]`.
    pub acc_dw: Option<*const f32>,
    /// Sum of losses divided by `token_count`, one float.
    pub loss: *mut f32,
    /// Gradient of `x`, `[rows, hidden]`, stored as `x` is; in place over it.
    pub dx: Option<Floats>,
    /// Gradient of `w`, `[vocab, hidden]`; in place over `acc_dw`.
    pub dw: Option<*mut f32>,
    /// [`linear_cross_entropy_workspace`] bytes.
    pub workspace: *mut u8,
}

/// Where the parts of the workspace begin, in bytes: the losses of all rows come first.
struct Layout {
    logits: u64,
    /// A chunk's gradient of `x`, where that is rounded when it is stored. Its sums run over the vocabulary: too deep for the product to
    /// keep them in its own workspace.
    dx: u64,
    gemm: u64,
    bytes: u64,
}

impl Layout {
    fn new(isa: Isa, shape: &LinearCrossEntropyShape, threads: usize) -> Self {
        const FLOAT: u64 = size_of::<f32>() as u64;
        const ALIGN: u64 = gemm::WORKSPACE_ALIGN as u64;
        let &LinearCrossEntropyShape {
            rows,
            hidden,
            vocab,
            chunk,
            ..
        } = shape;
        let whole = chunk.min(rows);
        let matrix = |cols: usize| (whole as u64 * cols as u64 * FLOAT).next_multiple_of(ALIGN);
        let logits = (rows as u64 * FLOAT).next_multiple_of(ALIGN);
        let dx = logits + matrix(vocab);
        let gemm = match shape.input_gradient && shape.x != Float::F32 {
            true => dx + matrix(hidden),
            false => dx,
        };
        let decoding = |form: Form, transposed| match shape.w {
            Some(block) => form.decoding(block, transposed),
            None => form,
        };
        // Whole chunks, and the last one where it is shorter.
        let largest = [whole, rows % chunk]
            .into_iter()
            .filter(|&n| n > 0)
            .flat_map(|n| {
                [
                    decoding(Form::new(n, vocab, hidden).stored(shape.x, Float::F32), true),
                    decoding(Form::new(n, hidden, vocab), false),
                    Form::new(vocab, hidden, n),
                ]
            })
            .map(|form| form.workspace_bytes(isa, threads))
            .max()
            .unwrap_or(0);
        Self {
            logits,
            dx,
            gemm,
            bytes: gemm + largest,
        }
    }
}

/// Bytes of workspace: a chunk of logits, a loss per row, and what the products need.
pub fn linear_cross_entropy_workspace(isa: Isa, shape: &LinearCrossEntropyShape, threads: usize) -> u64 {
    Layout::new(isa, shape, threads).bytes
}

/// Per chunk: `logits = x wᵀ`, replaced by their gradient; `dx = dlogits w`; `dw += dlogitsᵀ x`.
///
/// # Safety
/// See the [module](super).
pub unsafe fn linear_cross_entropy(cx: &Context, args: &LinearCrossEntropy) {
    let &LinearCrossEntropy {
        shape, x, w, workspace, ..
    } = args;
    let LinearCrossEntropyShape {
        rows,
        hidden,
        vocab,
        chunk,
        ..
    } = shape;
    let layout = Layout::new(cx.isa, &shape, cx.pool.threads());
    // SAFETY: chunks lie within `rows`, the parts of the workspace within its size.
    unsafe {
        let losses = workspace.cast::<f32>();
        let logits = workspace.add(layout.logits as usize).cast::<f32>();
        let gemm_workspace = workspace.add(layout.gemm as usize);
        for first in (0..rows).step_by(chunk) {
            let n = chunk.min(rows - first);
            let chunk_x = x.add(first * hidden);
            let multiply = |(m, n, k), a: View, b: Matrix, c: Floats, add| {
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
            let x = View::rows_of(chunk_x, hidden);
            multiply((n, vocab, hidden), x, w.transposed(), Floats::of_mut(logits), None);
            let chunk_rows = CrossEntropyRows {
                rows: n,
                vocab,
                logits,
                targets: args.targets.add(first),
                ignore_index: args.ignore_index,
                token_count: args.token_count,
                scale: args.scale,
                losses: losses.add(first),
                gradient: args.dx.is_some() || args.dw.is_some(),
            };
            cross_entropy_rows(cx, &chunk_rows);
            let dlogits = View::row_major(logits, vocab);
            if let Some(dw) = args.dw {
                let acc = if first == 0 { args.acc_dw } else { Some(dw.cast_const()) };
                let add = acc.map(|acc| (Floats::of(acc), hidden));
                let dw = Floats::of_mut(dw);
                multiply((vocab, hidden, n), dlogits.transposed(), x.into(), dw, add);
            }
            // After `dw`, the last reader of this chunk of `x`.
            if let Some(dx) = args.dx {
                let dx = dx.add(first * hidden);
                if dx.stored() == Float::F32 {
                    multiply((n, hidden, vocab), dlogits, w, dx, None);
                } else {
                    let sums = Floats::new(workspace.add(layout.dx as usize), Float::F32);
                    multiply((n, hidden, vocab), dlogits, w, sums, None);
                    let (x, y, len) = (sums, dx, n * hidden);
                    cast(cx, &Cast { len, x, y });
                }
            }
        }
        *args.loss = (sum_in_order(losses, rows) / f64::from(*args.token_count)) as f32;
        touch_last_word(workspace, layout.bytes);
    }
}
