//! What planning must know of this backend: alignment and workspaces.

use tightfit_ir::op::{Attention as AttentionOp, LinearCrossEntropy as LinearCrossEntropyOp, Op};
use tightfit_ir::{DType, Link, Target, Type};

use crate::floats::Float;
use crate::gemm::Form;
use crate::kernel::{self, AttentionShape, LinearCrossEntropyShape};
use crate::profile::Profile;
use crate::simd::Isa;

/// The CPU backend's numbers for one instruction set and number of threads.
#[derive(Clone, Debug, PartialEq)]
pub struct CpuTarget {
    /// Kernels are chosen by it, and tiles and packing follow from it.
    pub isa: Isa,
    /// Some kernels keep scratch for each thread.
    pub threads: usize,
    /// How fast it is; plans do not depend on it but where they choose between techniques.
    pub profile: Profile,
    name: String,
}

/// Alignment of every buffer: a cache line, and the widest vector.
pub const ALIGNMENT: u64 = 64;

impl CpuTarget {
    /// This machine's instruction set.
    pub fn new(threads: usize) -> Self {
        Self::with_isa(Isa::detect(), threads)
    }

    /// Another instruction set, e.g. to plan for another machine.
    pub fn with_isa(isa: Isa, threads: usize) -> Self {
        Self {
            isa,
            threads,
            profile: Profile::assumed(isa, threads),
            name: format!("cpu-{}-{threads}t", isa.name()),
        }
    }
}

impl Target for CpuTarget {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> u64 {
        ALIGNMENT
    }

    fn workspace(&self, op: &Op, inputs: &[&Type], outputs: &[&Type]) -> u64 {
        match op {
            Op::Linear(_) | Op::LinearBackwardInput(_) | Op::LinearBackwardWeight(_) => {
                product_form(op, inputs, outputs).workspace_bytes(self.isa, self.threads)
            }
            Op::LinearCrossEntropy(op) => kernel::linear_cross_entropy_workspace(
                self.isa,
                &linear_cross_entropy_shape(op, inputs[0], inputs[1]),
                self.threads,
            ),
            Op::SoftmaxCrossEntropy(_) => kernel::softmax_cross_entropy_workspace(size(inputs[0].dim(0))),
            Op::Attention(op) => {
                kernel::attention_workspace(&attention_shape(op, inputs[0]), stored(inputs[0]), self.threads)
            }
            Op::AttentionBackward(op) => kernel::attention_backward_workspace(
                &attention_shape(&op.0, inputs[0]),
                stored(inputs[0]),
                self.threads,
            ),
            Op::CachedAttention(op) => {
                kernel::cached_attention_workspace(size(op.head_dim), stored(inputs[0]), self.threads)
            }
            Op::RmsNormBackward(_) => {
                kernel::rms_norm_backward_workspace(size(inputs[0].dim(0)), size(inputs[0].dim(1)))
            }
            Op::LayerNormBackward(_) => {
                kernel::layer_norm_backward_workspace(size(inputs[0].dim(0)), size(inputs[0].dim(1)))
            }
            Op::Norm(_) => kernel::norm_workspace(size(inputs[0].shape.elements())),
            Op::Adafactor(op) => {
                kernel::adafactor_workspace(size(inputs[0].rows()), size(inputs[0].cols()), op.factored)
            }
            Op::Apollo(op) => kernel::apollo_workspace(
                self.isa,
                (size(inputs[0].dim(0)), size(inputs[0].dim(1))),
                size(op.rank),
                self.threads,
            ),
            Op::Add(_)
            | Op::Cast(_)
            | Op::SoftmaxCrossEntropyBackward(_)
            | Op::Dropout(_)
            | Op::Embedding(_)
            | Op::EmbeddingBackward(_)
            | Op::Fetch(_)
            | Op::Gelu(_)
            | Op::GeluBackward(_)
            | Op::GlobalNorm(_)
            | Op::GradientFactor(_)
            | Op::KvAppend(_)
            | Op::LayerNorm(_)
            | Op::Lion(_)
            | Op::BiasBackward(_)
            | Op::AdamW(_)
            | Op::AdamW8bit(_)
            | Op::AppliedStep(_)
            | Op::PadRows(_)
            | Op::Reshape(_)
            | Op::RmsNorm(_)
            | Op::Rope(_)
            | Op::RopeTable(_)
            | Op::Scale(_)
            | Op::Settle(_)
            | Op::Sgd(_)
            | Op::Store(_)
            | Op::SliceRows(_)
            | Op::SwiGlu(_)
            | Op::SwiGluBackward(_)
            | Op::UpdateLossScale(_)
            | Op::Zero(_) => 0,
        }
    }

    fn seconds(&self, op: &Op, inputs: &[&Type], outputs: &[&Type]) -> f64 {
        self.profile.seconds(self.isa, op, inputs, outputs)
    }

    fn link(&self) -> Link {
        self.profile.link
    }
}

/// A dimension as kernels take it. A larger one cannot be in memory, so whatever it saturates to never runs.
pub(crate) fn size(dim: u64) -> usize {
    usize::try_from(dim).unwrap_or(usize::MAX)
}

/// How the numbers of that type are stored.
pub(crate) fn stored(ty: &Type) -> Float {
    // Whoever asks has operands that their type rules have checked to be such numbers.
    Float::of(ty.dtype).expect("floating-point numbers")
}

/// The product that the kernel makes of a linear layer, or of a part of its gradient.
pub(crate) fn product_form(op: &Op, inputs: &[&Type], outputs: &[&Type]) -> Form {
    // The left operand and the size that sums run over; of the right one whether its rows are the product's columns.
    let (a, k, b, transposed) = match op {
        Op::LinearBackwardWeight(_) => (inputs[1], inputs[1].dim(0), inputs[0], false),
        Op::Linear(_) => (inputs[0], inputs[0].dim(1), inputs[1], true),
        _ => (inputs[0], inputs[0].dim(1), inputs[1], false),
    };
    let c = outputs[0];
    let form = Form::new(size(c.dim(0)), size(c.dim(1)), size(k)).stored(stored(a), stored(c));
    match b.dtype {
        DType::Block(block) => form.decoding(block, transposed),
        _ => form,
    }
}

/// The kernel's view of a linear layer and its cross-entropy.
pub(crate) fn linear_cross_entropy_shape(op: &LinearCrossEntropyOp, x: &Type, w: &Type) -> LinearCrossEntropyShape {
    LinearCrossEntropyShape {
        rows: size(x.dim(0)),
        hidden: size(x.dim(1)),
        vocab: size(w.dim(0)),
        chunk: size(op.chunk),
        x: stored(x),
        w: match w.dtype {
            DType::Block(block) => Some(block),
            _ => None,
        },
        input_gradient: op.input_gradient,
    }
}

/// The kernel's view of an attention on `q`.
pub(crate) fn attention_shape(op: &AttentionOp, q: &Type) -> AttentionShape {
    AttentionShape {
        rows: size(q.dim(0)),
        heads: size(op.heads),
        kv_heads: size(op.kv_heads),
        head_dim: size(op.head_dim),
        scale: op.scale as f32,
        window: op.window.map(size),
    }
}
