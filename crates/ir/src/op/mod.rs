//! The operations: a closed enum, one file per family, everything about an operation in its file.
//!
//! Each operation is a struct of its attributes that implements [`Rule`]: type rule, cost, aliasing, gradient and a
//! naive reference. `docs/adding-an-op.md` shows the way.

mod add;
mod attention;
mod cast;
mod check;
mod cross_entropy;
mod dropout;
mod embedding;
mod gelu;
mod gradient;
mod kv_cache;
mod layer_norm;
mod linear;
mod linear_cross_entropy;
mod loss_scale;
mod optimizer;
mod reshape;
mod rms_norm;
mod rope;
mod rope_scaling;
mod rows;
mod scale;
mod swiglu;
mod transfer;
mod zero;

use serde::{Deserialize, Serialize};

use crate::tensor::Tensor;
use crate::types::Type;

pub use add::Add;
pub use attention::{Attention, AttentionBackward};
pub use cast::Cast;
pub use cross_entropy::{SoftmaxCrossEntropy, SoftmaxCrossEntropyBackward};
pub use dropout::{Draws, Dropout, token_number, token_words};
pub use embedding::{Embedding, EmbeddingBackward};
pub use gelu::{Approximate, Gelu, GeluBackward};
pub use gradient::{Gradient, OutputGradient};
pub use kv_cache::{CachedAttention, KvAppend};
pub use layer_norm::{LayerNorm, LayerNormBackward};
pub use linear::{BiasBackward, Linear, LinearBackwardInput, LinearBackwardWeight};
pub use linear_cross_entropy::LinearCrossEntropy;
pub use loss_scale::{AppliedStep, UpdateLossScale};
pub use optimizer::{
    Adafactor, AdamW, AdamW8bit, Apollo, GlobalNorm, GradientFactor, Lion, Norm, Rounding, STATE_BLOCK, Sgd,
    is_negative,
};
pub use reshape::Reshape;
pub use rms_norm::{RmsNorm, RmsNormBackward};
pub use rope::{Rope, RopeTable};
pub use rope_scaling::RopeScaling;
pub use rows::{PadRows, SliceRows};
pub use scale::Scale;
pub use swiglu::{SwiGlu, SwiGluBackward};
pub use transfer::{Fetch, Settle, Store};
pub use zero::Zero;

/// What is wrong with an operation's use.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OpError {
    /// The number of operands.
    #[error("{op} takes {expected} operands, got {found}")]
    Arity {
        /// The operation.
        op: &'static str,
        /// As its attributes ask.
        expected: usize,
        /// As given.
        found: usize,
    },
    /// A shape, dtype or attribute that does not fit.
    #[error("{op}: {message}")]
    Invalid {
        /// The operation.
        op: &'static str,
        /// What does not fit, with both sides.
        message: String,
    },
    /// No gradient is defined: it is itself a gradient or an update.
    #[error("{op} has no gradient")]
    NotDifferentiable {
        /// The operation.
        op: &'static str,
    },
    /// A loss that is not the result being differentiated.
    #[error(
        "{op} makes its gradient for a loss of weight one: its result must be the graph's `loss`, used by nothing else"
    )]
    NotRoot {
        /// The operation.
        op: &'static str,
    },
}

/// What a run of an operation costs on any backend, to first order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations; a fused multiply-add counts as two.
    pub flops: u64,
    /// Bytes read and written once each, caches ignored.
    pub bytes: u64,
}

impl Cost {
    /// That many flops, and every operand and result touched once.
    fn touching(flops: u64, inputs: &[&Type], outputs: &[&Type]) -> Self {
        Self {
            flops,
            bytes: inputs
                .iter()
                .chain(outputs)
                .fold(0, |n, ty| n.saturating_add(ty.bytes())),
        }
    }
}

/// How a result may relate to an operand's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AliasKind {
    /// The result is the operand's bytes: nothing runs.
    View,
    /// The result may be written over the operand, if nothing reads that afterwards.
    InPlace,
}

/// One permitted aliasing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alias {
    /// Index of the result.
    pub output: usize,
    /// Index of the operand.
    pub input: usize,
    /// How.
    pub kind: AliasKind,
}

impl Alias {
    fn in_place(output: usize, input: usize) -> Self {
        Self {
            output,
            input,
            kind: AliasKind::InPlace,
        }
    }
}

/// The results of an operation that are added to an operand instead of made afresh.
///
/// The addends are extra operands after the operation's own, in the order of the results they belong to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Accumulate(u8);

impl Accumulate {
    /// No result is.
    pub const NONE: Self = Self(0);

    /// Result `output` is, too; with the operand that it is added to, for an operation with `own` operands of its own.
    pub fn with(self, own: usize, output: usize) -> (Self, usize) {
        let before = self.0 & ((1 << output) - 1);
        (Self(self.0 | 1 << output), own + before.count_ones() as usize)
    }

    /// Whether none is.
    pub fn is_none(&self) -> bool {
        self.0 == 0
    }

    /// How many are.
    pub fn count(self) -> usize {
        self.0.count_ones() as usize
    }

    /// The operand that result `output` is added to, for an operation with `own` operands of its own.
    pub fn operand(self, own: usize, output: usize) -> Option<usize> {
        let bit = 1_u8 << output;
        (self.0 & bit != 0).then(|| own + (self.0 & (bit - 1)).count_ones() as usize)
    }

    /// The in-place permissions that accumulation adds: each such result over its addend.
    fn aliases(self, own: usize) -> impl Iterator<Item = Alias> {
        (0..8).filter_map(move |output| self.operand(own, output).map(|input| Alias::in_place(output, input)))
    }

    /// `results`, with their addends added.
    fn add_to(self, own: usize, inputs: &[Tensor], mut results: Vec<Tensor>) -> Vec<Tensor> {
        for (output, result) in results.iter_mut().enumerate() {
            if let Some(input) = self.operand(own, output) {
                *result = result.plus(&inputs[input]);
            }
        }
        results
    }
}

/// Everything the project must know about an operation, whatever runs it.
pub trait Rule {
    /// The results' types.
    ///
    /// # Errors
    /// Operands that do not fit, naming the dimension at fault.
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError>;

    /// Flops and bytes.
    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost;

    /// Which results may lie over which operands.
    fn aliases(&self) -> Vec<Alias>;

    /// The variant that adds result `output` to one more operand (see [`Accumulate`]), if there is one, and where among the
    /// operands that addend stands. An operation that already does so gives itself.
    fn accumulating(&self, output: usize) -> Option<(Op, usize)>;

    /// Adds the nodes that make the operands' gradients from the results'.
    ///
    /// # Errors
    /// There is no gradient, or the node's place in the graph allows none.
    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError>;

    /// The results, computed the plainest way in `f64`.
    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor>;
}

/// Declares the closed enum and forwards [`Rule`] to the variants.
macro_rules! ops {
    ($($name:ident = $text:literal),+ $(,)?) => {
        /// Every operation there is.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        pub enum Op {
            $(#[doc = concat!("See [`", stringify!($name), "`].")]
            #[serde(rename = $text)]
            $name($name)),+
        }

        impl Op {
            /// The name in text forms and reports.
            pub fn name(&self) -> &'static str {
                match self { $(Op::$name(_) => $text),+ }
            }

            fn rule(&self) -> &dyn Rule {
                match self { $(Op::$name(op) => op),+ }
            }
        }

        $(impl From<$name> for Op {
            fn from(op: $name) -> Self { Op::$name(op) }
        })+
    };
}

ops! {
    Add = "add",
    Attention = "attention",
    AttentionBackward = "attention_backward",
    CachedAttention = "cached_attention",
    Cast = "cast",
    SoftmaxCrossEntropy = "softmax_cross_entropy",
    SoftmaxCrossEntropyBackward = "softmax_cross_entropy_backward",
    Dropout = "dropout",
    Embedding = "embedding",
    EmbeddingBackward = "embedding_backward",
    Fetch = "fetch",
    Gelu = "gelu",
    GeluBackward = "gelu_backward",
    KvAppend = "kv_append",
    LayerNorm = "layer_norm",
    LayerNormBackward = "layer_norm_backward",
    Linear = "linear",
    LinearBackwardInput = "linear_backward_input",
    LinearBackwardWeight = "linear_backward_weight",
    BiasBackward = "bias_backward",
    LinearCrossEntropy = "linear_cross_entropy",
    Adafactor = "adafactor",
    AdamW = "adamw",
    AdamW8bit = "adamw_8bit",
    Apollo = "apollo",
    AppliedStep = "applied_step",
    GlobalNorm = "global_norm",
    GradientFactor = "gradient_factor",
    Lion = "lion",
    Norm = "norm",
    PadRows = "pad_rows",
    Reshape = "reshape",
    RmsNorm = "rms_norm",
    RmsNormBackward = "rms_norm_backward",
    Rope = "rope",
    RopeTable = "rope_table",
    Scale = "scale",
    Settle = "settle",
    Sgd = "sgd",
    Store = "store",
    SliceRows = "slice_rows",
    SwiGlu = "swiglu",
    SwiGluBackward = "swiglu_backward",
    UpdateLossScale = "update_loss_scale",
    Zero = "zero",
}

impl Rule for Op {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        self.rule().infer(inputs)
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        self.rule().cost(inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        self.rule().aliases()
    }

    fn accumulating(&self, output: usize) -> Option<(Op, usize)> {
        self.rule().accumulating(output)
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        self.rule().gradient(g)
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        self.rule().reference(inputs)
    }
}
