//! Gradient accumulation: one optimizer step over several micro-batches.
//!
//! Saves the activations of all but one micro-batch; costs the gradients' lifetime (they stay through every micro-step) and one
//! pass over them to clear them. The loss of each micro-batch is divided by the token count of the whole batch, which is known
//! before the first, so that sums are weighted by tokens. Legal for any step that `autodiff` made; not unrolled.

use tightfit_ir::op::{Add, Rule, Zero};
use tightfit_ir::{Binding, Graph, Op, OutputKind, Phase, Program, Role, Source, Step, ValueId};

use crate::{MICRO_STEP, PassError, TRAIN, ZERO_GRADIENTS};

const PASS: &str = "accumulate";

/// The step with `micro_step` run `micro_batches` times, its gradients summed in place.
///
/// # Errors
/// There is no training routine, or it already accumulates.
pub fn accumulate(mut step: Step, micro_batches: u32) -> Result<Step, PassError> {
    if micro_batches <= 1 {
        return Ok(step);
    }
    let train = step
        .routines
        .iter_mut()
        .find(|routine| routine.name == TRAIN)
        .ok_or_else(|| PassError::illegal(PASS, "there is nothing to train"))?;
    let micro_step = train
        .programs
        .iter_mut()
        .find(|program| program.name == MICRO_STEP && program.repeat == 1)
        .ok_or_else(|| PassError::illegal(PASS, "the step already runs several micro-batches"))?;
    micro_step.repeat = micro_batches;
    let mut zero = Graph::new();
    for index in 0..micro_step.graph.outputs.len() {
        let output = micro_step.graph.outputs[index].clone();
        if output.kind != OutputKind::Carry {
            continue;
        }
        let ty = micro_step.graph.ty(output.value).clone();
        let op = Op::from(Zero { ty: ty.clone() });
        let zeros = zero
            .push(op, &[], &output.name, Phase::Backward, Role::Gradient)
            .map_err(PassError::op(PASS, &output.name))?;
        zero.output(&output.name, zeros[0], OutputKind::Carry);

        let sum = micro_step
            .graph
            .input(&output.name, ty, Role::Gradient, Binding::Carried);
        let value = add_onto(&mut micro_step.graph, output.value, sum)?;
        let output = &mut micro_step.graph.outputs[index];
        output.value = value;
        output.kind = OutputKind::Update(sum);
    }
    train.programs.insert(
        0,
        Program {
            name: ZERO_GRADIENTS.to_owned(),
            repeat: 1,
            graph: zero,
        },
    );
    step.verify().map_err(PassError::verify(PASS))?;
    Ok(step)
}

/// Makes `gradient` start from `sum`: at the first node of its chain of accumulations, or by an `add` at the end where some
/// value of that chain is also read as it is.
fn add_onto(graph: &mut Graph, gradient: ValueId, sum: ValueId) -> Result<ValueId, PassError> {
    let mut at = gradient;
    while let Source::Node { node, output } = graph.value(at).source {
        if readers(graph, at) > 1 {
            break;
        }
        let Some((op, addend)) = graph.node(node).op.accumulating(output) else {
            break;
        };
        let node = &mut graph.nodes[node.index()];
        if node.op == op {
            at = node.inputs[addend];
            continue;
        }
        node.op = op;
        node.inputs.insert(addend, sum);
        return Ok(gradient);
    }
    let scope = graph.value(sum).name.clone();
    let total = graph
        .push(
            Op::from(Add {}),
            &[sum, gradient],
            &scope,
            Phase::Backward,
            Role::Gradient,
        )
        .map_err(PassError::op(PASS, &scope))?;
    Ok(total[0])
}

/// How often nodes and results read a value.
fn readers(graph: &Graph, value: ValueId) -> usize {
    let operands = graph.nodes.iter().flat_map(|node| &node.inputs);
    let results = graph.outputs.iter().map(|output| &output.value);
    operands.chain(results).filter(|&&read| read == value).count()
}
