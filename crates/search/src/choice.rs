//! What is done to a step, as a search has decided it: the one place where passes are applied to it.

use serde::{Deserialize, Serialize};
use tightfit_ir::{NodeId, Step, Target, ValueId};
use tightfit_pass::{Offload, PassError, offload, recompute};

/// What is done to a step. It can be kept and applied to the same step again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// Each training program that runs a backward.
    pub programs: Vec<ProgramChoice>,
    /// Whether the optimizer's state is on the lower tier.
    pub offload_optimizer: bool,
    /// Whether weights are.
    pub offload_weights: bool,
    /// Bytes on their way at one time: see [`Offload::window`].
    pub window: u64,
}

/// What is done to one program, by its own numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProgramChoice {
    /// Its name.
    pub program: String,
    /// Forward nodes that run again for the backward.
    pub recompute: Vec<NodeId>,
    /// Results that stay for those to start from.
    pub keep: Vec<ValueId>,
    /// Results that leave memory between the forward and the backward, by node and number: recomputing renumbers values, but no
    /// forward node. None, unless the limits allow any.
    pub offload: Vec<(NodeId, usize)>,
}

impl Choice {
    /// The step with this done to it; when transfers begin depends on the target's speeds.
    ///
    /// # Errors
    /// A technique does not apply.
    pub fn apply(&self, step: Step, target: &dyn Target) -> Result<Step, PassError> {
        let mut chosen = self.programs.iter().filter(|choice| !choice.recompute.is_empty());
        let step = chosen.try_fold(step, |step, choice| {
            recompute(step, &choice.program, &choice.recompute, &choice.keep)
        })?;
        if !self.offloads() {
            return Ok(step);
        }
        let activations = self.programs.iter();
        let activations = activations.map(|choice| (choice.program.clone(), choice.offload.clone()));
        let moved = Offload {
            optimizer: self.offload_optimizer,
            weights: self.offload_weights,
            activations: activations.collect(),
            window: self.window,
        };
        offload(step, &moved, target)
    }

    /// Whether anything is on the lower tier.
    pub fn offloads(&self) -> bool {
        self.offload_optimizer || self.offload_weights || self.programs.iter().any(|choice| !choice.offload.is_empty())
    }

    /// Whether anything is recomputed.
    pub fn recomputes(&self) -> bool {
        self.programs.iter().any(|choice| !choice.recompute.is_empty())
    }
}
