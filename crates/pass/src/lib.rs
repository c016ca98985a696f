//! Passes: each technique is one file with one public function, whose module comment is its manual.
//!
//! Model passes take a [`Forward`](tightfit_ir::Forward) to another; [`autodiff`] turns it into a
//! [`Step`](tightfit_ir::Step); step passes take that to another. Every pass verifies what it made.

mod accumulate;
mod autocast;
mod autodiff;
mod chunk_loss;
mod dead_code;
mod edit;
mod lora;
mod loss_scale;
mod no_grad;
mod offload;
mod optimizer;
mod quantize;
mod recompute;
mod tile_mlp;
mod update_in_backward;

pub use accumulate::accumulate;
pub use autocast::autocast;
pub use autodiff::autodiff;
pub use chunk_loss::{LossChunk, chunk_loss};
pub use dead_code::dead_code;
pub use lora::{FIRST_TOKEN, LoraConfig, Pattern, Targets, adapter_names, linear_layers, lora};
pub use loss_scale::{LossScale, loss_scale};
pub use no_grad::no_grad;
pub use offload::{Offload, SMALLEST, offload};
pub use optimizer::{Adafactor, Adam, Apollo, Lion, Optimizer, OptimizerConfig, SMALLEST_8BIT, Sgd, optimizer};
pub use quantize::{Storage, quantize};
pub use recompute::recompute;
pub use tile_mlp::tile_mlp;
pub use update_in_backward::update_in_backward;

use tightfit_ir::{OpError, VerifyError};

/// Why a pass cannot do what it was asked.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PassError {
    /// A gradient rule or a new node did not fit.
    #[error("{pass}, in {scope}: {source}")]
    Op {
        /// The pass.
        pass: &'static str,
        /// The part of the model.
        scope: String,
        /// What does not fit.
        source: OpError,
    },
    /// The result is malformed: a mistake of the pass or of the graph it was given.
    #[error("{pass}: {source}")]
    Verify {
        /// The pass.
        pass: &'static str,
        /// What does not hold.
        source: VerifyError,
    },
    /// The technique does not apply, with what to do instead.
    #[error("{pass}: {message}")]
    Illegal {
        /// The pass.
        pass: &'static str,
        /// Why, and what to do.
        message: String,
    },
}

impl PassError {
    fn illegal(pass: &'static str, message: impl Into<String>) -> Self {
        Self::Illegal {
            pass,
            message: message.into(),
        }
    }

    fn op<'a>(pass: &'static str, scope: &'a str) -> impl FnOnce(OpError) -> Self + 'a {
        move |source| Self::Op {
            pass,
            scope: scope.to_owned(),
            source,
        }
    }

    fn verify(pass: &'static str) -> impl FnOnce(VerifyError) -> Self {
        move |source| Self::Verify { pass, source }
    }
}

/// The routine of optimizer steps.
pub const TRAIN: &str = "train";
/// The program of `train` that runs once for each micro-batch.
pub const MICRO_STEP: &str = "micro_step";
/// The program of `train` before `micro_step` that finds the gradients' global norm, where updates run inside of the backward.
pub const NORM_STEP: &str = "norm_step";
/// The programs that run forward and backward: the same forward nodes in the same order, where there are both.
pub const BACKWARD_PROGRAMS: [&str; 2] = [NORM_STEP, MICRO_STEP];
/// The program of `train` that clears the gradients' sums, where there are several micro-batches.
pub const ZERO_GRADIENTS: &str = "zero_gradients";
/// The program of `train` that changes the weights.
pub const UPDATE: &str = "update";
/// The routine, and its program, that computes the held-out loss.
pub const EVALUATE: &str = "evaluate";

/// The name under which a weight's gradient is carried from `micro_step` to `update`.
pub fn gradient_name(weight: &str) -> String {
    format!("{weight}.grad")
}
