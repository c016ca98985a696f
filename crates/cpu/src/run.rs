//! From a [`Call`] to its kernel.

use tightfit_ir::op::{Accumulate, Approximate, Op};
use tightfit_ir::{Call, Slot};

use crate::gemm::{Gemm, View};
use crate::kernel::{self, Context, GeluKind};
use crate::pool::Pool;
use crate::simd::Isa;
use crate::target::{CpuTarget, attention_shape, size};

/// The CPU backend: threads and an instruction set.
#[derive(Debug)]
pub struct Cpu {
    pool: Pool,
    target: CpuTarget,
}

impl Cpu {
    /// This machine's instruction set on these threads.
    pub fn new(pool: Pool) -> Self {
        Self::with_isa(pool, Isa::detect())
    }

    /// Another instruction set that this machine can run; in place of one that it cannot, the best that it can. The
    /// [`target`](Self::target) says which it is, and tells a plan for the other one apart.
    pub fn with_isa(pool: Pool, isa: Isa) -> Self {
        let isa = match Isa::available().contains(&isa) {
            true => isa,
            false => Isa::detect(),
        };
        let target = CpuTarget::with_isa(isa, pool.threads());
        Self { pool, target }
    }

    /// The threads.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// What plans for this backend are made with.
    pub fn target(&self) -> &CpuTarget {
        &self.target
    }

    /// Runs one call in the arena that begins at `arena`. Allocates nothing.
    ///
    /// # Safety
    /// Every slot of the call and its workspace lie inside of memory that `arena` points to and that nothing else accesses
    /// during the call; offsets are aligned to [`ALIGNMENT`](crate::target::ALIGNMENT), as is `arena`; results overlap
    /// operands only as the operation permits; the workspace has the size that the target gave.
    pub unsafe fn run(&self, arena: *mut u8, call: &Call) {
        let frame = Frame { arena, call };
        let cx = Context {
            pool: &self.pool,
            isa: self.target.isa,
        };
        // SAFETY: the caller's contract is that of every kernel; shapes follow from the types, which `verify` has checked.
        unsafe { dispatch(&cx, &frame) }
    }
}

/// A call with its arena.
struct Frame<'a> {
    arena: *mut u8,
    call: &'a Call,
}

impl Frame<'_> {
    fn at<T>(&self, slot: &Slot) -> *mut T {
        // Inside of the arena by the caller's contract; wrapping so that this needs none.
        self.arena.wrapping_add(size(slot.offset)).cast()
    }

    fn input(&self, index: usize) -> *const f32 {
        self.at::<f32>(&self.call.inputs[index]).cast_const()
    }

    fn ids(&self, index: usize) -> *const i32 {
        self.at::<i32>(&self.call.inputs[index]).cast_const()
    }

    fn output(&self, index: usize) -> *mut f32 {
        self.at(&self.call.outputs[index])
    }

    fn workspace(&self) -> *mut u8 {
        self.arena.wrapping_add(size(self.call.workspace.start))
    }

    /// Dimension `axis` of operand `index`.
    fn dim(&self, index: usize, axis: usize) -> usize {
        size(self.call.inputs[index].ty.dim(axis))
    }

    fn elements(&self, index: usize) -> usize {
        size(self.call.inputs[index].ty.shape.elements())
    }

    /// What result `output` is added to.
    fn addend(&self, accumulate: Accumulate, own: usize, output: usize) -> Option<*const f32> {
        accumulate.operand(own, output).map(|index| self.input(index))
    }

    /// For kernels that only work in place: copies an operand to where its result goes, if that is elsewhere.
    ///
    /// # Safety
    /// As [`Cpu::run`].
    unsafe fn bring(&self, output: usize, input: usize) {
        let (from, to) = (self.input(input), self.output(output));
        if from != to.cast_const() {
            // SAFETY: both are whole tensors of one type, apart since results overlap operands exactly or not at all.
            unsafe { to.copy_from_nonoverlapping(from, self.elements(input)) };
        }
    }

    /// `C = A·B`, plus `add` and `bias`, into result 0.
    fn product(&self, a: View, b: View, k: usize, add: Option<*const f32>, bias: Option<*const f32>) -> Gemm {
        let c = &self.call.outputs[0];
        let (m, n) = (size(c.ty.dim(0)), size(c.ty.dim(1)));
        Gemm {
            m,
            n,
            k,
            a,
            b,
            c: self.at(c),
            c_stride: n,
            add: add.map(|d| (d, n)),
            bias,
        }
    }
}

/// # Safety
/// As [`Cpu::run`].
unsafe fn dispatch(cx: &Context<'_>, f: &Frame<'_>) {
    let matrix = |index| View::row_major(f.input(index), f.dim(index, 1));
    // SAFETY: the caller's contract, for every kernel below.
    unsafe {
        match &f.call.op {
            Op::Linear(op) => {
                let own = 2 + usize::from(op.bias);
                let bias = op.bias.then(|| f.input(2));
                let add = f.addend(op.accumulate, own, 0);
                f.product(matrix(0), matrix(1).transposed(), f.dim(0, 1), add, bias)
                    .run(cx.pool, cx.isa, f.workspace());
            }
            Op::LinearBackwardInput(op) => {
                let add = f.addend(op.accumulate, 2, 0);
                f.product(matrix(0), matrix(1), f.dim(0, 1), add, None)
                    .run(cx.pool, cx.isa, f.workspace());
            }
            Op::LinearBackwardWeight(op) => {
                let add = f.addend(op.accumulate, 2, 0);
                f.product(matrix(1).transposed(), matrix(0), f.dim(0, 0), add, None)
                    .run(cx.pool, cx.isa, f.workspace());
            }
            Op::BiasBackward(op) => kernel::bias_backward(
                cx,
                &kernel::BiasBackward {
                    rows: f.dim(0, 0),
                    cols: f.dim(0, 1),
                    dy: f.input(0),
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
                    w: f.input(1),
                    y: f.output(0),
                },
            ),
            Op::EmbeddingBackward(op) => kernel::embedding_backward(
                cx,
                &kernel::EmbeddingBackward {
                    rows: f.dim(0, 0),
                    hidden: f.dim(1, 1),
                    vocab: size(op.vocab_size),
                    ids: f.ids(0),
                    dy: f.input(1),
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
                    x: f.input(0),
                    w: f.input(1),
                    y: f.output(0),
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
                        x: f.input(0),
                        w: f.input(1),
                        rstd: f.input(2),
                        dy: f.input(3),
                        acc_dx: op.input.then(|| f.addend(op.accumulate, 4, 0)).flatten(),
                        acc_dw: op.weight.then(|| f.addend(op.accumulate, 4, weight)).flatten(),
                        dx: op.input.then(|| f.output(0)),
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
                    x: f.input(0),
                    w: f.input(1),
                    b: f.input(2),
                    y: f.output(0),
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
                        x: f.input(0),
                        w: f.input(1),
                        mean: f.input(2),
                        rstd: f.input(3),
                        dy: f.input(4),
                        acc_dx: op.input.then(|| f.addend(op.accumulate, 5, 0)).flatten(),
                        acc_dw: op.weight.then(|| f.addend(op.accumulate, 5, weight)).flatten(),
                        acc_db: op.bias.then(|| f.addend(op.accumulate, 5, bias)).flatten(),
                        dx: op.input.then(|| f.output(0)),
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
                    x: f.input(0),
                    cs: f.input(1),
                    y: f.output(0),
                },
            ),
            Op::Attention(op) => kernel::attention(
                cx,
                &kernel::Attention {
                    shape: attention_shape(op, &f.call.inputs[0].ty),
                    q: f.input(0),
                    k: f.input(1),
                    v: f.input(2),
                    doc_start: f.ids(3),
                    o: f.output(0),
                    lse: f.output(1),
                    workspace: f.workspace(),
                },
            ),
            Op::AttentionBackward(op) => kernel::attention_backward(
                cx,
                &kernel::AttentionBackward {
                    shape: attention_shape(&op.0, &f.call.inputs[0].ty),
                    q: f.input(0),
                    k: f.input(1),
                    v: f.input(2),
                    doc_start: f.ids(3),
                    o: f.input(4),
                    lse: f.input(5),
                    d_o: f.input(6),
                    dq: f.output(0),
                    dk: f.output(1),
                    dv: f.output(2),
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
                        new: f.input(1),
                        start: f.ids(2),
                        cache: f.output(0),
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
                    q: f.input(0),
                    k: f.input(1),
                    v: f.input(2),
                    start: f.ids(3),
                    o: f.output(0),
                },
            ),
            Op::SwiGlu(_) => kernel::swiglu(
                cx,
                &kernel::Swiglu {
                    len: f.elements(0),
                    gate: f.input(0),
                    up: f.input(1),
                    act: f.output(0),
                },
            ),
            Op::SwiGluBackward(_) => kernel::swiglu_backward(
                cx,
                &kernel::SwigluBackward {
                    len: f.elements(0),
                    gate: f.input(0),
                    up: f.input(1),
                    dact: f.input(2),
                    dgate: f.output(0),
                    dup: f.output(1),
                },
            ),
            Op::Gelu(op) => kernel::gelu(
                cx,
                &kernel::Gelu {
                    len: f.elements(0),
                    kind: gelu_kind(op.approximate),
                    x: f.input(0),
                    y: f.output(0),
                },
            ),
            Op::GeluBackward(op) => kernel::gelu_backward(
                cx,
                &kernel::GeluBackward {
                    len: f.elements(0),
                    kind: gelu_kind(op.approximate),
                    x: f.input(0),
                    dy: f.input(1),
                    dx: f.output(0),
                },
            ),
            Op::Add(_) => kernel::add(
                cx,
                &kernel::Add {
                    len: f.elements(0),
                    a: f.input(0),
                    b: f.input(1),
                    c: f.output(0),
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
                    x: f.input(0),
                    y: f.output(0),
                },
            ),
            Op::PadRows(op) => kernel::pad_rows(
                cx,
                &kernel::PadRows {
                    start: size(op.start),
                    rows: f.dim(0, 0),
                    total: size(op.total),
                    cols: f.dim(0, 1),
                    x: f.input(0),
                    acc: f.addend(op.accumulate, 1, 0),
                    y: f.output(0),
                },
            ),
            Op::LinearCrossEntropy(op) => {
                let weight = op.weight_result();
                kernel::linear_cross_entropy(
                    cx,
                    &kernel::LinearCrossEntropy {
                        rows: f.dim(0, 0),
                        hidden: f.dim(0, 1),
                        vocab: f.dim(1, 0),
                        chunk: size(op.chunk),
                        x: f.input(0),
                        w: f.input(1),
                        targets: f.ids(2),
                        ignore_index: op.ignore_index,
                        token_count: f.input(3),
                        acc_dw: weight.and_then(|output| f.addend(op.accumulate, 4, output)),
                        loss: f.output(0),
                        dx: op.input_gradient.then(|| f.output(1)),
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
                    logits: f.input(0),
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
                    logits: f.input(0),
                    lse: f.input(1),
                    targets: f.ids(2),
                    ignore_index: op.ignore_index,
                    token_count: f.input(3),
                    dlogits: f.output(0),
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
            Op::GlobalNorm(_) => kernel::global_norm(&kernel::GlobalNorm {
                count: f.call.inputs.len(),
                norms: &|index| f.input(index),
                norm: f.output(0),
            }),
            Op::AdamW(op) => {
                f.bring(0, 0);
                f.bring(1, 2);
                f.bring(2, 3);
                kernel::adamw(
                    cx,
                    &kernel::AdamW {
                        len: f.elements(0),
                        w: f.output(0),
                        g: f.input(1),
                        m: f.output(1),
                        v: f.output(2),
                        lr: f.input(4),
                        step: f.input(5),
                        clip: op.max_norm.map(|max| (f.input(6), max as f32)),
                        beta1: op.beta1,
                        beta2: op.beta2,
                        eps: op.eps,
                        weight_decay: op.weight_decay,
                    },
                );
            }
        }
    }
}

fn gelu_kind(approximate: Approximate) -> GeluKind {
    match approximate {
        Approximate::None => GeluKind::Erf,
        Approximate::Tanh => GeluKind::Tanh,
    }
}
