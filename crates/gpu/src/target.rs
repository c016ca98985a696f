//! The numbers of the backend for cards: alignment, workspaces, speeds, and what a process needs there beside its arena.
//!
//! All of it is a function of operation, shapes and card, in this file alone. Kernels are held to it: what one needs in device memory it
//! declares here, and gets from the plan.

use tightfit_ir::op::{Cost, Op, Rule};
use tightfit_ir::{DType, Link, Target, Type};

use crate::card::Card;

/// Alignment of every buffer: what loads of a warp and of the copy engines ask for.
pub const ALIGNMENT: u64 = 256;

/// Rows that a block of threads sums before partial sums meet.
const ROWS_OF_PARTIAL: u64 = 128;

/// Parts of a cache that one row's attention is split into when it decodes.
const DECODE_SPLITS: u64 = 16;

/// Partial sums of a norm.
const NORM_PARTIALS: u64 = 1024;

/// Of what data sheets promise, the part that kernels reach, until a card has been measured.
const PRODUCT_SHARE: f64 = 0.7;
const ATTENTION_SHARE: f64 = 0.45;
const BANDWIDTH_SHARE: f64 = 0.85;
const LINK_SHARE: f64 = 0.8;

/// Seconds from one kernel to the next.
const LAUNCH_SECONDS: f64 = 4e-6;

/// What a process takes of a card beside its arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserve {
    /// The driver's context, its page tables and printf buffers, and the kernels' own code.
    pub context_bytes: u64,
    /// A desktop, on cards that drive displays.
    pub display_bytes: u64,
}

impl Reserve {
    /// All of it.
    pub fn bytes(&self) -> u64 {
        self.context_bytes + self.display_bytes
    }
}

/// The backend's numbers for one card.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuTarget {
    card: Card,
    name: String,
}

impl GpuTarget {
    /// Of that card.
    pub fn new(card: &Card) -> Self {
        Self {
            card: card.clone(),
            name: format!("gpu-{}", card.name),
        }
    }

    /// The card.
    pub fn card(&self) -> &Card {
        &self.card
    }

    /// What the process needs beside its arena. A context takes 250 to 500 MiB by what users report, more on cards with more
    /// multiprocessors; a desktop some 256 MiB.
    pub fn reserve(&self) -> Reserve {
        Reserve {
            context_bytes: 512 << 20,
            display_bytes: if self.card.display { 256 << 20 } else { 0 },
        }
    }

    /// Operations of matrix units per second on operands of those types.
    fn product_flops(&self, inputs: &[&Type]) -> f64 {
        let peak = match inputs.first().map(|ty| ty.dtype) {
            Some(DType::Bf16) if self.card.bf16 => self.card.half_tflops,
            Some(DType::F16) => self.card.half_tflops,
            _ => self.card.f32_tflops,
        };
        peak * 1e12
    }
}

impl Target for GpuTarget {
    fn name(&self) -> &str {
        &self.name
    }

    fn alignment(&self) -> u64 {
        ALIGNMENT
    }

    fn workspace(&self, op: &Op, inputs: &[&Type], _outputs: &[&Type]) -> u64 {
        let rows = || inputs[0].dim(0);
        let f32s = |count: u64| count.saturating_mul(4);
        // Each block of rows leaves a row of partial sums.
        let partials = |cols: u64| f32s(rows().div_ceil(ROWS_OF_PARTIAL).saturating_mul(cols));
        match op {
            // Logits of a chunk, over which their gradient is written; and each row's loss.
            Op::LinearCrossEntropy(op) => f32s(op.chunk.min(rows()).saturating_mul(inputs[1].dim(0).saturating_add(1))),
            Op::SoftmaxCrossEntropy(_) => f32s(rows()),
            // What each row's output and its gradient have in common; and sums of `dq` where that is stored in 16 bits.
            Op::AttentionBackward(op) => {
                let delta = rows().saturating_mul(op.0.heads);
                let sums = match inputs[0].dtype {
                    DType::F32 => 0,
                    _ => inputs[0].shape.elements(),
                };
                f32s(delta.saturating_add(sums))
            }
            // Of each part its output, and the maximum and the sum of its scores.
            Op::CachedAttention(op) => {
                let parts = rows().saturating_mul(op.heads).saturating_mul(DECODE_SPLITS);
                f32s(parts.saturating_mul(op.head_dim + 2))
            }
            Op::RmsNormBackward(_) => partials(inputs[0].dim(1)),
            Op::LayerNormBackward(_) => partials(2 * inputs[0].dim(1)),
            Op::BiasBackward(_) => partials(inputs[0].dim(1)),
            // Rows by token, so that sums of equal tokens have one order.
            Op::EmbeddingBackward(_) => f32s(2 * rows()),
            Op::Norm(_) => f32s(NORM_PARTIALS),
            Op::Adafactor(_) => f32s(inputs[0].rows().saturating_add(inputs[0].cols())),
            // The projected gradient.
            Op::Apollo(op) => f32s(inputs[0].rows().max(inputs[0].cols()).saturating_mul(op.rank)),
            // Tiles are decoded into shared memory, and sums stay in registers.
            Op::Linear(_) | Op::LinearBackwardInput(_) | Op::LinearBackwardWeight(_) => 0,
            Op::Add(_)
            | Op::AdamW(_)
            | Op::AdamW8bit(_)
            | Op::AppliedStep(_)
            | Op::Attention(_)
            | Op::Cast(_)
            | Op::Dropout(_)
            | Op::Embedding(_)
            | Op::Fetch(_)
            | Op::Gelu(_)
            | Op::GeluBackward(_)
            | Op::GlobalNorm(_)
            | Op::GradientFactor(_)
            | Op::KvAppend(_)
            | Op::LayerNorm(_)
            | Op::Lion(_)
            | Op::PadRows(_)
            | Op::Reshape(_)
            | Op::RmsNorm(_)
            | Op::Rope(_)
            | Op::RopeTable(_)
            | Op::Scale(_)
            | Op::Settle(_)
            | Op::Sgd(_)
            | Op::SliceRows(_)
            | Op::SoftmaxCrossEntropyBackward(_)
            | Op::Store(_)
            | Op::SwiGlu(_)
            | Op::SwiGluBackward(_)
            | Op::UpdateLossScale(_)
            | Op::Zero(_) => 0,
        }
    }

    /// By the roofline (Williams et al. 2009, doi:10.1145/1498765.1498785): arithmetic or memory, whichever takes longer.
    fn seconds(&self, op: &Op, inputs: &[&Type], outputs: &[&Type]) -> f64 {
        let Cost { flops, bytes } = op.cost(inputs, outputs);
        let share = match op {
            Op::Reshape(_) | Op::Settle(_) => return 0.0,
            Op::Attention(_) | Op::AttentionBackward(_) | Op::CachedAttention(_) => ATTENTION_SHARE,
            _ => PRODUCT_SHARE,
        };
        let computing = flops as f64 / (self.product_flops(inputs) * share);
        let moving = bytes as f64 / (self.card.bandwidth_gb * 1e9 * BANDWIDTH_SHARE);
        LAUNCH_SECONDS + computing.max(moving)
    }

    fn link(&self) -> Link {
        let rate = self.card.pcie.bytes_per_second() * LINK_SHARE;
        Link {
            read: rate,
            write: rate,
        }
    }
}
