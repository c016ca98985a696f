//! What planning must know of this backend: alignment and workspaces.

use tightfit_ir::op::{Attention as AttentionOp, Op};
use tightfit_ir::{Link, Target, Type};

use crate::gemm;
use crate::kernel::{self, AttentionShape};
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
        let product = |m: u64, n: u64, k: u64| gemm::workspace_bytes(self.isa, size(m), size(n), size(k), self.threads);
        match op {
            Op::Linear(_) => product(outputs[0].dim(0), outputs[0].dim(1), inputs[0].dim(1)),
            Op::LinearBackwardInput(_) => product(outputs[0].dim(0), outputs[0].dim(1), inputs[0].dim(1)),
            Op::LinearBackwardWeight(_) => product(outputs[0].dim(0), outputs[0].dim(1), inputs[0].dim(0)),
            Op::LinearCrossEntropy(op) => kernel::linear_cross_entropy_workspace(
                self.isa,
                size(inputs[0].dim(0)),
                size(inputs[0].dim(1)),
                size(inputs[1].dim(0)),
                size(op.chunk),
                self.threads,
            ),
            Op::SoftmaxCrossEntropy(_) => kernel::softmax_cross_entropy_workspace(size(inputs[0].dim(0))),
            Op::Attention(op) => kernel::attention_workspace(&attention_shape(op, inputs[0]), self.threads),
            Op::AttentionBackward(op) => {
                kernel::attention_backward_workspace(&attention_shape(&op.0, inputs[0]), self.threads)
            }
            Op::RmsNormBackward(_) => {
                kernel::rms_norm_backward_workspace(size(inputs[0].dim(0)), size(inputs[0].dim(1)))
            }
            Op::LayerNormBackward(_) => {
                kernel::layer_norm_backward_workspace(size(inputs[0].dim(0)), size(inputs[0].dim(1)))
            }
            Op::Norm(_) => kernel::norm_workspace(size(inputs[0].shape.elements())),
            Op::Add(_)
            | Op::CachedAttention(_)
            | Op::SoftmaxCrossEntropyBackward(_)
            | Op::Embedding(_)
            | Op::EmbeddingBackward(_)
            | Op::Fetch(_)
            | Op::Gelu(_)
            | Op::GeluBackward(_)
            | Op::GlobalNorm(_)
            | Op::KvAppend(_)
            | Op::LayerNorm(_)
            | Op::BiasBackward(_)
            | Op::AdamW(_)
            | Op::PadRows(_)
            | Op::Reshape(_)
            | Op::RmsNorm(_)
            | Op::Rope(_)
            | Op::RopeTable(_)
            | Op::Settle(_)
            | Op::Store(_)
            | Op::SliceRows(_)
            | Op::SwiGlu(_)
            | Op::SwiGluBackward(_)
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
