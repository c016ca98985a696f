//! AdamW with `f32` state, and clipping by the global norm.
//!
//! Costs two `f32` of state per trained parameter. Weights and state are updated in place. Decay is decoupled and spares vectors
//! (norm weights and biases), as is usual. With clipping, the norm of all gradients is taken first, so every gradient lives until
//! the update. Loshchilov and Hutter 2019, arXiv:1711.05101.

use std::collections::HashSet;

use tightfit_ir::op::{AdamW, GlobalNorm, Norm};
use tightfit_ir::{Binding, Graph, Init, Op, OutputKind, Phase, Program, Role, Step, Type, ValueId};

use crate::{PassError, TRAIN, UPDATE};

const PASS: &str = "adamw";

/// The optimizer's constants. The learning rate is fed at each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decay of matrices, per step and unit of learning rate.
    pub weight_decay: f64,
    /// Clip the gradients' global norm to this.
    pub clip_norm: Option<f64>,
}

/// The step with a program `update` after its micro-steps. It is fed `lr` and `step` (from 1), and reads `grad_norm` if it clips.
///
/// # Errors
/// There is no training routine.
pub fn adamw(mut step: Step, config: &AdamWConfig) -> Result<Step, PassError> {
    let train = step
        .routines
        .iter_mut()
        .find(|routine| routine.name == TRAIN)
        .ok_or_else(|| PassError::illegal(PASS, "there is nothing to train"))?;
    let mut graph = Graph::new();
    let scalar = || Type::f32([1]);
    let lr = graph.input("lr", scalar(), Role::Input, Binding::Fed);
    let count = graph.input("step", scalar(), Role::Input, Binding::Fed);

    let mut trained = Vec::new();
    for program in &train.programs {
        let results: HashSet<&str> = program.graph.outputs.iter().map(|output| &*output.name).collect();
        for (_, weight, binding) in program.graph.inputs() {
            let name = crate::gradient_name(&weight.name);
            if !results.contains(&*name) {
                continue;
            }
            let gradient = graph.input(&name, weight.ty.clone(), Role::Gradient, Binding::Carried);
            trained.push((weight.clone(), binding, gradient));
        }
    }
    let norm = match config.clip_norm {
        Some(_) => {
            let gradients = trained.iter().map(|(weight, _, gradient)| (&*weight.name, *gradient));
            Some(global_norm(&mut graph, gradients)?)
        }
        None => None,
    };
    for (weight, binding, gradient) in trained {
        let state = Binding::Persistent {
            init: Init::Zeros,
            trainable: false,
        };
        let name = &*weight.name;
        let (first, second) = (format!("{name}.exp_avg"), format!("{name}.exp_avg_sq"));
        let w = graph.input(name, weight.ty.clone(), weight.role, binding);
        let m = graph.input(&first, weight.ty.clone(), Role::OptimizerState, state);
        let v = graph.input(&second, weight.ty.clone(), Role::OptimizerState, state);
        let op = Op::from(AdamW {
            beta1: config.beta1,
            beta2: config.beta2,
            eps: config.eps,
            weight_decay: if weight.ty.shape.dims().len() > 1 {
                config.weight_decay
            } else {
                0.0
            },
            max_norm: config.clip_norm,
        });
        let operands: Vec<ValueId> = [w, gradient, m, v, lr, count].into_iter().chain(norm).collect();
        let made = graph
            .push(op, &operands, &name.into(), Phase::Update, Role::OptimizerState)
            .map_err(PassError::op(PASS, name))?;
        graph.values[made[0].index()].role = weight.role;
        for (name, new, old) in [(name, made[0], w), (&first, made[1], m), (&second, made[2], v)] {
            graph.output(name, new, OutputKind::Update(old));
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

/// The norm of each gradient, then of these: two steps, so that a gradient can be reduced before the next one is there.
fn global_norm<'a>(
    graph: &mut Graph,
    gradients: impl Iterator<Item = (&'a str, ValueId)>,
) -> Result<ValueId, PassError> {
    let mut push = |op: Op, operands: &[ValueId], scope: &str| {
        let made = graph.push(op, operands, &scope.into(), Phase::Update, Role::Activation);
        made.map(|made| made[0]).map_err(PassError::op(PASS, scope))
    };
    let norms = gradients.map(|(weight, gradient)| push(Norm {}.into(), &[gradient], weight));
    let norms = norms.collect::<Result<Vec<_>, _>>()?;
    let norm = push(GlobalNorm {}.into(), &norms, "grad_norm")?;
    graph.output("grad_norm", norm, OutputKind::Read);
    Ok(norm)
}
