//! The optimizer: a program `update` after the micro-steps that changes every trained weight.
//!
//! One file per optimizer says what state it keeps and when it is another one's. What they share is here: weights and states are updated
//! in place; decay is decoupled and spares vectors (norm weights and biases), as is usual; weights of 16 bits are rounded at random, so that
//! updates smaller than half of their last bit are not lost.
//!
//! With clipping, or where the loss is scaled, the norm of all gradients is taken first, so every gradient lives until the update
//! (but see [`update_in_backward`](crate::update_in_backward())); a norm that is not finite skips the update.

mod adafactor;
mod adamw;
mod adamw_8bit;
mod apollo;
mod lion;
mod sgd;

use std::collections::HashMap;

use tightfit_ir::op::{GlobalNorm, GradientFactor, Norm, Rounding};
use tightfit_ir::{Binding, DType, Graph, Init, Op, OutputKind, Phase, Program, Role, Step, Type, ValueId, random};

use crate::loss_scale::{self, LossScale};
use crate::{PassError, TRAIN, UPDATE};

pub use adafactor::Adafactor;
pub use adamw::Adam;
pub use adamw_8bit::SMALLEST_8BIT;
pub use apollo::Apollo;
pub use lion::Lion;
pub use sgd::Sgd;

const PASS: &str = "optimizer";

/// The optimizer and what surrounds it. The learning rate is fed at each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerConfig {
    /// Which, with its constants.
    pub optimizer: Optimizer,
    /// Decay of matrices, per step and unit of learning rate.
    pub weight_decay: f64,
    /// Clip the gradients' global norm to this.
    pub clip_norm: Option<f64>,
    /// How the loss is scaled, if [`loss_scale`](crate::loss_scale()) did that.
    pub loss_scale: Option<LossScale>,
    /// Of what is drawn at random: how weights of 16 bits are rounded, and what APOLLO projects onto.
    pub seed: u64,
}

/// The optimizers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Optimizer {
    /// Two `f32` of state for each weight.
    AdamW(Adam),
    /// Two bytes of state for each weight.
    AdamW8bit(Adam),
    /// A float of state for each row and each column.
    Adafactor(Adafactor),
    /// One `f32` of state for each weight.
    Lion(Lion),
    /// Two `f32` of state for each channel and each of a few random directions.
    Apollo(Apollo),
    /// One `f32` of state for each weight, none without momentum.
    Sgd(Sgd),
}

/// A weight that is to be updated.
struct Trained<'a> {
    name: &'a str,
    ty: &'a Type,
    weight_decay: f64,
    rounding: Rounding,
    /// [`OptimizerConfig::seed`].
    seed: u64,
    /// Whether the update's gradient is multiplied by a factor.
    factor: bool,
}

/// The operation that updates a weight, and its states: what follows the weight's name, and their types. Before the first step they are 0.
struct Update {
    op: Op,
    states: Vec<(&'static str, Type)>,
}

impl Optimizer {
    fn update(&self, weight: &Trained<'_>) -> Update {
        match self {
            Self::AdamW(adam) => adam.update(weight),
            Self::AdamW8bit(adam) => adamw_8bit::update(adam, weight),
            Self::Adafactor(adafactor) => adafactor.update(weight),
            Self::Lion(lion) => lion.update(weight),
            Self::Apollo(apollo) => apollo.update(weight),
            Self::Sgd(sgd) => sgd.update(weight),
        }
    }
}

/// The step with a program `update` after its micro-steps. It is fed `lr` and `step` (from 1), and reads `grad_norm` if it clips or if the
/// loss is scaled.
///
/// # Errors
/// There is no training routine, or the loss is scaled and the configuration does not say how, or the other way round.
pub fn optimizer(mut step: Step, config: &OptimizerConfig) -> Result<Step, PassError> {
    let train = step
        .routines
        .iter_mut()
        .find(|routine| routine.name == TRAIN)
        .ok_or_else(|| PassError::illegal(PASS, "there is nothing to train"))?;
    if config.loss_scale.is_some()
        != train
            .programs
            .iter()
            .any(|program| loss_scale::is_scaled(&program.graph))
    {
        let message =
            "the loss and its optimizer must both be scaled: apply `loss_scale` before it, with the same constants";
        return Err(PassError::illegal(PASS, message));
    }
    let mut graph = Graph::new();
    let scalar = || Type::f32([1]);
    let lr = graph.input("lr", scalar(), Role::Input, Binding::Fed);
    let count = graph.input("step", scalar(), Role::Input, Binding::Fed);

    let mut trained = Vec::new();
    for program in &train.programs {
        let results: HashMap<&str, ValueId> = program
            .graph
            .outputs
            .iter()
            .map(|output| (&*output.name, output.value))
            .collect();
        for (_, weight, binding) in program.graph.inputs() {
            let name = crate::gradient_name(&weight.name);
            let Some(&gradient) = results.get(&*name) else {
                continue;
            };
            let ty = program.graph.ty(gradient).clone();
            let gradient = graph.input(&name, ty, Role::Gradient, Binding::Carried);
            trained.push((weight.clone(), binding, gradient));
        }
    }
    let mut step_number = count;
    let mut factor = None;
    if config.clip_norm.is_some() || config.loss_scale.is_some() {
        let scale = config
            .loss_scale
            .map(|config| loss_scale::State::inputs(&mut graph, &config));
        let gradients = trained.iter().map(|(weight, _, gradient)| (&*weight.name, *gradient));
        let norm = global_norm(&mut graph, gradients, scale.as_ref().map(|state| state.scale))?;
        let op = GradientFactor {
            max_norm: config.clip_norm,
            scaled: scale.is_some(),
        };
        let operands: Vec<ValueId> = [norm]
            .into_iter()
            .chain(scale.as_ref().map(|state| state.scale))
            .collect();
        factor = Some(scalar_node(&mut graph, op.into(), &operands, "grad_norm")?);
        if let (Some(state), Some(config)) = (scale, &config.loss_scale) {
            step_number = state.applied_step(&mut graph, count)?;
            state.update(&mut graph, config, norm)?;
        }
    }
    for (weight, binding, gradient) in trained {
        let name = &*weight.name;
        let update = config.optimizer.update(&Trained {
            name,
            ty: &weight.ty,
            weight_decay: match weight.ty.shape.dims() {
                [_] => 0.0,
                _ => config.weight_decay,
            },
            rounding: match weight.ty.dtype {
                DType::F32 => Rounding::Nearest,
                _ => Rounding::Stochastic {
                    key: random::seeded(config.seed, &format!("{name}.rounding")),
                },
            },
            seed: config.seed,
            factor: factor.is_some(),
        });
        let state = Binding::Persistent {
            init: Init::Zeros,
            trainable: false,
        };
        let w = graph.input(name, weight.ty.clone(), weight.role, binding);
        let mut updated = vec![(name.to_owned(), w)];
        for (suffix, ty) in update.states {
            let name = format!("{name}.{suffix}");
            let value = graph.input(&name, ty, Role::OptimizerState, state);
            updated.push((name, value));
        }
        let states = updated[1..].iter().map(|(_, value)| *value);
        let operands: Vec<ValueId> = [w, gradient]
            .into_iter()
            .chain(states)
            .chain([lr, step_number])
            .chain(factor)
            .collect();
        let made = graph
            .push(update.op, &operands, &name.into(), Phase::Update, Role::OptimizerState)
            .map_err(PassError::op(PASS, name))?;
        graph.values[made[0].index()].role = weight.role;
        for ((name, old), new) in updated.iter().zip(made) {
            graph.output(name, new, OutputKind::Update(*old));
        }
    }
    train.programs.push(Program {
        name: UPDATE.to_owned(),
        repeat: 1,
        graph,
    });
    step.verify().map_err(PassError::verify(PASS))?;
    Ok(step)
}

/// The norm of each gradient, then of these: two steps, so that a gradient can be reduced before the next one is there. `scale`: what the
/// loss was multiplied by.
fn global_norm<'a>(
    graph: &mut Graph,
    gradients: impl Iterator<Item = (&'a str, ValueId)>,
    scale: Option<ValueId>,
) -> Result<ValueId, PassError> {
    let norms = gradients.map(|(weight, gradient)| scalar_node(graph, Norm {}.into(), &[gradient], weight));
    let mut operands = norms.collect::<Result<Vec<_>, _>>()?;
    operands.extend(scale);
    let op = GlobalNorm {
        scaled: scale.is_some(),
    };
    let norm = scalar_node(graph, op.into(), &operands, "grad_norm")?;
    graph.output("grad_norm", norm, OutputKind::Read);
    Ok(norm)
}

/// The first result of a node of the update.
fn scalar_node(graph: &mut Graph, op: Op, operands: &[ValueId], scope: &str) -> Result<ValueId, PassError> {
    let made = graph.push(op, operands, &scope.into(), Phase::Update, Role::Activation);
    made.map(|made| made[0]).map_err(PassError::op(PASS, scope))
}
