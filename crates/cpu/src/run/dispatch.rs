//! Which kernel an operation is, and with what.

use tightfit_ir::op::{AdamW, AdamW8bit, Approximate, Op};

use super::frame::Frame;
use crate::kernel::{self, Context, GeluKind, SecondMoment};
use crate::target::{attention_shape, linear_cross_entropy_shape, size};

/// # Safety
/// As [`Cpu::run`](super::Cpu::run).
pub(super) unsafe fn dispatch(cx: &Context<'_>, f: &Frame<'_>) {
    // SAFETY: the caller's contract, for every kernel below.
    unsafe {
        match &f.call.op {
            Op::Linear(op) => {
                let own = 2 + usize::from(op.bias);
                let bias = op.bias.then(|| f.floats(2));
                let add = f.added(op.accumulate, own, 0);
                f.product(f.view(0), f.matrix(1).transposed(), f.dim(0, 1), add, bias)
                    .run(cx.pool, cx.isa, f.workspace());
            }
            Op::LinearBackwardInput(op) => {
                let add = f.added(op.accumulate, 2, 0);
                f.product(f.view(0), f.matrix(1), f.dim(0, 1), add, None)
                    .run(cx.pool, cx.isa, f.workspace());
            }
            Op::LinearBackwardWeight(op) => {
                let add = f.added(op.accumulate, 2, 0);
                f.product(f.view(1).transposed(), f.matrix(0), f.dim(0, 0), add, None)
                    .run(cx.pool, cx.isa, f.workspace());
            }
            Op::BiasBackward(op) => kernel::bias_backward(
                cx,
                &kernel::BiasBackward {
                    rows: f.dim(0, 0),
                    cols: f.dim(0, 1),
                    dy: f.floats(0),
                    acc: f.addend(op.accumulate, 1, 0),
                    db: f.output(0),
                },
            ),
            Op::Embedding(_) => kernel::embedding(
                cx,
                &kernel::Embedding {
                    rows: f.dim(0, 0),
                    hidden: f.dim(1, 1),
                    vocab: f.dim(1, 0),
                    ids: f.ids(0),
                    w: f.table(1),
                    y: f.result(0),
                },
            ),
            Op::EmbeddingBackward(op) => kernel::embedding_backward(
                cx,
                &kernel::EmbeddingBackward {
                    rows: f.dim(0, 0),
                    hidden: f.dim(1, 1),
                    vocab: size(op.vocab_size),
                    ids: f.ids(0),
                    dy: f.floats(1),
                    acc: f.addend(op.accumulate, 2, 0),
                    dw: f.output(0),
                },
            ),
            Op::RmsNorm(op) => kernel::rms_norm(
                cx,
                &kernel::RmsNorm {
                    rows: f.dim(0, 0),
                    hidden: f.dim(0, 1),
                    eps: op.eps as f32,
                    x: f.floats(0),
                    w: f.floats(1),
                    y: f.result(0),
                    rstd: f.output(1),
                },
            ),
            Op::RmsNormBackward(op) => {
                let weight = usize::from(op.input);
                kernel::rms_norm_backward(
                    cx,
                    &kernel::RmsNormBackward {
                        rows: f.dim(0, 0),
                        hidden: f.dim(0, 1),
                        x: f.floats(0),
                        w: f.floats(1),
                        rstd: f.input(2),
                        dy: f.floats(3),
                        acc_dx: op.input.then(|| f.added(op.accumulate, 4, 0)).flatten(),
                        acc_dw: op.weight.then(|| f.addend(op.accumulate, 4, weight)).flatten(),
                        dx: op.input.then(|| f.result(0)),
                        dw: op.weight.then(|| f.output(weight)),
                        workspace: f.workspace(),
                    },
                );
            }
            Op::LayerNorm(op) => kernel::layer_norm(
                cx,
                &kernel::LayerNorm {
                    rows: f.dim(0, 0),
                    hidden: f.dim(0, 1),
                    eps: op.eps as f32,
                    x: f.floats(0),
                    w: f.floats(1),
                    b: f.floats(2),
                    y: f.result(0),
                    mean: f.output(1),
                    rstd: f.output(2),
                },
            ),
            Op::LayerNormBackward(op) => {
                let weight = usize::from(op.input);
                let bias = weight + usize::from(op.weight);
                kernel::layer_norm_backward(
                    cx,
                    &kernel::LayerNormBackward {
                        rows: f.dim(0, 0),
                        hidden: f.dim(0, 1),
                        x: f.floats(0),
                        w: f.floats(1),
                        mean: f.input(2),
                        rstd: f.input(3),
                        dy: f.floats(4),
                        acc_dx: op.input.then(|| f.added(op.accumulate, 5, 0)).flatten(),
                        acc_dw: op.weight.then(|| f.addend(op.accumulate, 5, weight)).flatten(),
                        acc_db: op.bias.then(|| f.addend(op.accumulate, 5, bias)).flatten(),
                        dx: op.input.then(|| f.result(0)),
                        dw: op.weight.then(|| f.output(weight)),
                        db: op.bias.then(|| f.output(bias)),
                        workspace: f.workspace(),
                    },
                );
            }
            Op::RopeTable(op) => kernel::rope_table(
                cx,
                &kernel::RopeTable {
                    rows: f.dim(0, 0),
                    head_dim: size(op.head_dim),
                    frequency: &|i| op.inverse_frequency(i as u64),
                    positions: f.ids(0),
                    cs: f.output(0),
                },
            ),
            Op::Rope(op) => kernel::rope(
                cx,
                &kernel::Rope {
                    rows: f.dim(0, 0),
                    heads: f.dim(0, 1) / f.dim(1, 1),
                    head_dim: f.dim(1, 1),
                    inverse: op.inverse,
                    x: f.floats(0),
                    cs: f.input(1),
                    y: f.result(0),
                },
            ),
            Op::Attention(op) => kernel::attention(
                cx,
                &kernel::Attention {
                    shape: attention_shape(op, &f.call.inputs[0].ty),
                    q: f.floats(0),
                    k: f.floats(1),
                    v: f.floats(2),
                    doc_start: f.ids(3),
                    o: f.result(0),
                    lse: f.output(1),
                    workspace: f.workspace(),
                },
            ),
            Op::AttentionBackward(op) => kernel::attention_backward(
                cx,
                &kernel::AttentionBackward {
                    shape: attention_shape(&op.0, &f.call.inputs[0].ty),
                    q: f.floats(0),
                    k: f.floats(1),
                    v: f.floats(2),
                    doc_start: f.ids(3),
                    o: f.floats(4),
                    lse: f.input(5),
                    d_o: f.floats(6),
                    dq: f.result(0),
                    dk: f.result(1),
                    dv: f.result(2),
                    workspace: f.workspace(),
                },
            ),
            Op::KvAppend(_) => {
                f.bring(0, 0);
                kernel::kv_append(
                    cx,
                    &kernel::KvAppend {
                        rows: f.dim(1, 0),
                        capacity: f.dim(0, 0),
                        width: f.dim(0, 1),
                        new: f.floats(1),
                        start: f.ids(2),
                        cache: f.result(0),
                    },
                );
            }
            Op::CachedAttention(op) => kernel::cached_attention(
                cx,
                &kernel::CachedAttention {
                    rows: f.dim(0, 0),
                    capacity: f.dim(1, 0),
                    heads: size(op.heads),
                    kv_heads: size(op.kv_heads),
                    head_dim: size(op.head_dim),
                    scale: op.scale as f32,
                    window: op.window.map(size),
                    q: f.floats(0),
                    k: f.floats(1),
                    v: f.floats(2),
                    start: f.ids(3),
                    o: f.result(0),
                    workspace: f.workspace(),
                },
            ),
            Op::SwiGlu(_) => kernel::swiglu(
                cx,
                &kernel::Swiglu {
                    len: f.elements(0),
                    gate: f.floats(0),
                    up: f.floats(1),
                    act: f.result(0),
                },
            ),
            Op::SwiGluBackward(_) => kernel::swiglu_backward(
                cx,
                &kernel::SwigluBackward {
                    len: f.elements(0),
                    gate: f.floats(0),
                    up: f.floats(1),
                    dact: f.floats(2),
                    dgate: f.result(0),
                    dup: f.result(1),
                },
            ),
            Op::Gelu(op) => kernel::gelu(
                cx,
                &kernel::Gelu {
                    len: f.elements(0),
                    kind: gelu_kind(op.approximate),
                    x: f.floats(0),
                    y: f.result(0),
                },
            ),
            Op::GeluBackward(op) => kernel::gelu_backward(
                cx,
                &kernel::GeluBackward {
                    len: f.elements(0),
                    kind: gelu_kind(op.approximate),
                    x: f.floats(0),
                    dy: f.floats(1),
                    dx: f.result(0),
                },
            ),
            Op::Cast(_) => kernel::cast(
                cx,
                &kernel::Cast {
                    len: f.elements(0),
                    x: f.floats(0),
                    y: f.result(0),
                },
            ),
            Op::Dropout(op) => kernel::dropout(
                cx,
                &kernel::Dropout {
                    op: op.clone(),
                    rows: f.dim(0, 0),
                    cols: f.dim(0, 1),
                    first_token: f.ids(1),
                    x: f.floats(0),
                    y: f.result(0),
                },
            ),
            Op::Scale(op) => kernel::scale(
                cx,
                &kernel::Scale {
                    len: f.elements(0),
                    by: op.by as f32,
                    x: f.floats(0),
                    y: f.result(0),
                },
            ),
            Op::Add(_) => kernel::add(
                cx,
                &kernel::Add {
                    len: f.elements(0),
                    a: f.floats(0),
                    b: f.floats(1),
                    c: f.result(0),
                },
            ),
            Op::Zero(op) => kernel::zero(cx, f.output(0).cast(), size(op.ty.bytes())),
            Op::Reshape(_) | Op::Settle(_) => {}
            // A session takes transfers out of the calls; here both tiers are memory.
            Op::Fetch(_) | Op::Store(_) => f.bring(0, 0),
            Op::SliceRows(op) => kernel::slice_rows(
                cx,
                &kernel::SliceRows {
                    start: size(op.start),
                    rows: size(op.rows),
                    cols: f.dim(0, 1),
                    x: f.floats(0),
                    y: f.result(0),
                },
            ),
            Op::PadRows(op) => kernel::pad_rows(
                cx,
                &kernel::PadRows {
                    start: size(op.start),
                    rows: f.dim(0, 0),
                    total: size(op.total),
                    cols: f.dim(0, 1),
                    x: f.floats(0),
                    acc: f.added(op.accumulate, 1, 0),
                    y: f.result(0),
                },
            ),
            Op::LinearCrossEntropy(op) => {
                let weight = op.weight_result();
                kernel::linear_cross_entropy(
                    cx,
                    &kernel::LinearCrossEntropy {
                        shape: linear_cross_entropy_shape(op, &f.call.inputs[0].ty, &f.call.inputs[1].ty),
                        x: f.floats(0),
                        w: f.matrix(1),
                        targets: f.ids(2),
                        ignore_index: op.ignore_index,
                        token_count: f.input(3),
                        scale: op.scaled.then(|| f.input(4)),
                        acc_dw: weight.and_then(|output| f.addend(op.accumulate, op.own(), output)),
                        loss: f.output(0),
                        dx: op.input_gradient.then(|| f.result(1)),
                        dw: weight.map(|output| f.output(output)),
                        workspace: f.workspace(),
                    },
                );
            }
            Op::SoftmaxCrossEntropy(op) => kernel::softmax_cross_entropy(
                cx,
                &kernel::SoftmaxCrossEntropy {
                    rows: f.dim(0, 0),
                    vocab: f.dim(0, 1),
                    logits: f.floats(0),
                    targets: f.ids(1),
                    ignore_index: op.ignore_index,
                    token_count: f.input(2),
                    loss: f.output(0),
                    lse: f.output(1),
                    workspace: f.workspace(),
                },
            ),
            Op::SoftmaxCrossEntropyBackward(op) => kernel::softmax_cross_entropy_backward(
                cx,
                &kernel::SoftmaxCrossEntropyBackward {
                    rows: f.dim(0, 0),
                    vocab: f.dim(0, 1),
                    logits: f.floats(0),
                    lse: f.input(1),
                    targets: f.ids(2),
                    ignore_index: op.ignore_index,
                    token_count: f.input(3),
                    scale: op.scaled.then(|| f.input(4)),
                    dlogits: f.result(0),
                },
            ),
            Op::Norm(_) => kernel::norm(
                cx,
                &kernel::Norm {
                    len: f.elements(0),
                    x: f.input(0),
                    norm: f.output(0),
                    workspace: f.workspace(),
                },
            ),
            Op::GlobalNorm(op) => {
                let count = f.call.inputs.len() - usize::from(op.scaled);
                kernel::global_norm(&kernel::GlobalNorm {
                    count,
                    norms: &|index| f.input(index),
                    scale: op.scaled.then(|| f.input(count)),
                    norm: f.output(0),
                });
            }
            Op::GradientFactor(op) => kernel::gradient_factor(&kernel::GradientFactor {
                norm: f.input(0),
                max_norm: op.max_norm.map(|max_norm| max_norm as f32),
                scale: op.scaled.then(|| f.input(1)),
                factor: f.output(0),
            }),
            Op::AppliedStep(_) => *f.output(0) = *f.input(0) - *f.input(1),
            Op::UpdateLossScale(op) => {
                (0..3).for_each(|output| f.bring(output, output + 1));
                kernel::update_loss_scale(&kernel::UpdateLossScale {
                    norm: f.input(0),
                    scale: f.output(0),
                    good_steps: f.output(1),
                    skipped: f.output(2),
                    growth: op.growth as f32,
                    backoff: op.backoff as f32,
                    growth_interval: op.growth_interval,
                });
            }
            Op::AdamW(op) => kernel::adamw(
                cx,
                &kernel::AdamW {
                    update: f.update(op.factor, op.rounding, op.weight_decay),
                    m: f.output(1),
                    v: f.output(2),
                    adam: adam(op),
                },
            ),
            Op::AdamW8bit(AdamW8bit(op)) => {
                let codes = |output| kernel::Codes {
                    codes: f.output(output).cast(),
                    absmax: f.output(output + 1),
                };
                kernel::adamw_8bit(
                    cx,
                    &kernel::AdamW8bit {
                        update: f.update(op.factor, op.rounding, op.weight_decay),
                        m: codes(1),
                        v: codes(3),
                        adam: adam(op),
                    },
                );
            }
            Op::Adafactor(op) => {
                let weight = &f.call.inputs[0].ty;
                kernel::adafactor(
                    cx,
                    &kernel::Adafactor {
                        update: f.update(op.factor, op.rounding, op.weight_decay),
                        rows: size(weight.rows()),
                        cols: size(weight.cols()),
                        moment: match op.factored {
                            true => SecondMoment::Factored {
                                row: f.output(1),
                                col: f.output(2),
                            },
                            false => SecondMoment::Whole(f.output(1)),
                        },
                        decay: op.decay,
                        eps: op.eps,
                        clip: op.clip,
                        workspace: f.workspace(),
                    },
                );
            }
            Op::Lion(op) => kernel::lion(
                cx,
                &kernel::Lion {
                    update: f.update(op.factor, op.rounding, op.weight_decay),
                    m: f.output(1),
                    beta1: op.beta1,
                    beta2: op.beta2,
                },
            ),
            Op::Apollo(op) => kernel::apollo(
                cx,
                &kernel::Apollo {
                    update: f.update(op.factor, op.rounding, op.weight_decay),
                    rows: f.dim(0, 0),
                    cols: f.dim(0, 1),
                    rank: size(op.rank),
                    m: f.output(1),
                    v: f.output(2),
                    norm: f.output(3),
                    signs: &|step| op.signs(step),
                    growth: op.growth,
                    tiny: tightfit_ir::op::Apollo::TINY,
                    adam: kernel::Adam {
                        beta1: op.beta1,
                        beta2: op.beta2,
                        eps: op.eps,
                    },
                    workspace: f.workspace(),
                },
            ),
            Op::Sgd(op) => kernel::sgd(
                cx,
                &kernel::Sgd {
                    update: f.update(op.factor, op.rounding, op.weight_decay),
                    momentum: (op.momentum != 0.0).then(|| (f.output(1), op.momentum)),
                },
            ),
        }
    }
}

/// Adam's constants.
fn adam(op: &AdamW) -> kernel::Adam {
    kernel::Adam {
        beta1: op.beta1,
        beta2: op.beta2,
        eps: op.eps,
    }
}

fn gelu_kind(approximate: Approximate) -> GeluKind {
    match approximate {
        Approximate::None => GeluKind::Erf,
        Approximate::Tanh => GeluKind::Tanh,
    }
}
