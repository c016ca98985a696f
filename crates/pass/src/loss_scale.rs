//! Dynamic loss scaling, for gradients of 16 bits whose exponents have few bits.
//!
//! The loss's gradients are multiplied by a scale, and updates divide by it; the loss as it is read stays what it is. Where a gradient is
//! infinite or not a number, the update is skipped, weights and optimizer state stay as they are, and the scale becomes
//! smaller; after many updates that went well it becomes larger. As `torch.amp.GradScaler` does; Micikevicius et al. 2018, arXiv:1710.03740.
//!
//! The scale and its counts are three numbers of optimizer state, so they are in checkpoints and a resumed run goes on as it would
//! have. The step that optimizers count is that of applied updates, as in PyTorch; learning rates follow all steps. Costs a pass over the
//! gradients for their norm, which clipping takes anyway. Of use where activations are `f16`, harmless but for that elsewhere.

use tightfit_ir::op::{AppliedStep, UpdateLossScale};
use tightfit_ir::{Binding, Graph, Init, Op, OutputKind, Phase, Role, Step, Type, ValueId};

use crate::{MICRO_STEP, PassError, TRAIN};

const PASS: &str = "loss_scale";

/// The scale's name.
const SCALE: &str = "loss_scale.scale";
/// The name of how many updates in a row went well.
const GOOD_STEPS: &str = "loss_scale.good_steps";
/// The name of how many updates were skipped.
const SKIPPED: &str = "loss_scale.skipped";

/// How a loss's scale adapts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossScale {
    /// The first scale.
    pub init: f64,
    /// What it is multiplied by after `growth_interval` updates that went well.
    pub growth: f64,
    /// What it is multiplied by after a skipped update.
    pub backoff: f64,
    /// How many updates in a row must go well.
    pub growth_interval: u64,
}

impl Default for LossScale {
    /// `torch.amp.GradScaler`'s.
    fn default() -> Self {
        Self {
            init: 65536.0,
            growth: 2.0,
            backoff: 0.5,
            growth_interval: 2000,
        }
    }
}

/// The step with gradients of its loss times a scale. [`optimizer`](crate::optimizer()) takes that back and adapts the scale.
///
/// # Errors
/// There is no loss to scale, or it is scaled already.
pub fn loss_scale(mut step: Step, config: &LossScale) -> Result<Step, PassError> {
    let programs = step.routines.iter_mut().filter(|routine| routine.name == TRAIN);
    let micro_step = programs
        .flat_map(|routine| &mut routine.programs)
        .find(|program| program.name == MICRO_STEP)
        .ok_or_else(|| PassError::illegal(PASS, "there is nothing to train"))?;
    let graph = &mut micro_step.graph;
    if is_scaled(graph) {
        return Err(PassError::illegal(PASS, "the loss is scaled already"));
    }
    let scale = state(graph, SCALE, config.init);
    let mut found = false;
    for node in &mut graph.nodes {
        let operand = match &mut node.op {
            Op::LinearCrossEntropy(op) if op.input_gradient || op.weight_gradient => {
                op.scaled = true;
                op.own() - 1
            }
            Op::SoftmaxCrossEntropyBackward(op) => {
                op.scaled = true;
                node.inputs.len()
            }
            _ => continue,
        };
        node.inputs.insert(operand, scale);
        found = true;
    }
    if !found {
        return Err(PassError::illegal(
            PASS,
            "no gradient of a cross-entropy is there to be multiplied: apply it after autodiff",
        ));
    }
    step.verify().map_err(PassError::verify(PASS))?;
    Ok(step)
}

/// Whether a graph's loss is scaled.
pub(crate) fn is_scaled(graph: &Graph) -> bool {
    graph.inputs().any(|(_, value, _)| &*value.name == SCALE)
}

/// A number that a run keeps.
fn state(graph: &mut Graph, name: &str, init: f64) -> ValueId {
    let binding = Binding::Persistent {
        init: Init::Constant(init),
        trainable: false,
    };
    graph.input(name, Type::f32([1]), Role::OptimizerState, binding)
}

/// The scale's state in the graph of the update.
pub(crate) struct State {
    /// What the loss was multiplied by.
    pub scale: ValueId,
    good_steps: ValueId,
    skipped: ValueId,
}

impl State {
    /// The state as inputs.
    pub fn inputs(graph: &mut Graph, config: &LossScale) -> Self {
        Self {
            scale: state(graph, SCALE, config.init),
            good_steps: state(graph, GOOD_STEPS, 0.0),
            skipped: state(graph, SKIPPED, 0.0),
        }
    }

    /// The number of this update among those that are applied.
    ///
    /// # Errors
    /// The count is not one number.
    pub fn applied_step(&self, graph: &mut Graph, count: ValueId) -> Result<ValueId, PassError> {
        let made = graph.push(
            Op::from(AppliedStep {}),
            &[count, self.skipped],
            &PASS.into(),
            Phase::Update,
            Role::Activation,
        );
        Ok(made.map_err(PassError::op(PASS, PASS))?[0])
    }

    /// Adapts the state to the gradients' norm. The scale of the next step is read as `loss_scale`, and how many updates were skipped, this
    /// one included, as `skipped_steps`.
    ///
    /// # Errors
    /// The norm is not one number, or the configuration is none.
    pub fn update(self, graph: &mut Graph, config: &LossScale, norm: ValueId) -> Result<(), PassError> {
        let op = UpdateLossScale {
            growth: config.growth,
            backoff: config.backoff,
            growth_interval: config.growth_interval,
        };
        let made = graph
            .push(
                Op::from(op),
                &[norm, self.scale, self.good_steps, self.skipped],
                &PASS.into(),
                Phase::Update,
                Role::OptimizerState,
            )
            .map_err(PassError::op(PASS, PASS))?;
        let old = [
            (SCALE, self.scale),
            (GOOD_STEPS, self.good_steps),
            (SKIPPED, self.skipped),
        ];
        for ((name, old), new) in old.into_iter().zip(&made) {
            graph.output(name, *new, OutputKind::Update(old));
        }
        graph.output("loss_scale", made[0], OutputKind::Read);
        graph.output("skipped_steps", made[2], OutputKind::Read);
        Ok(())
    }
}
