//! Reverse-mode differentiation: from a model to the step that computes its loss and every trainable weight's gradient.
//!
//! Nodes are visited backwards, and each asks its operation's gradient rule. Nothing is emitted for operands that no trainable
//! weight feeds. Where several gradients of one value meet, the later node adds onto the earlier result as it writes (see
//! [`Accumulate`](tightfit_ir::op::Accumulate)), so that sums cost no buffer; an `add` node is the fallback.

use tightfit_ir::op::{Add, Gradient, OutputGradient, Rule};
use tightfit_ir::{
    Binding, DType, Forward, Graph, NodeId, Op, OutputKind, Phase, Program, Routine, Source, Step, ValueId,
};

use crate::{MICRO_STEP, PassError, TRAIN, dead_code, gradient_name};

const PASS: &str = "autodiff";

/// A step of one routine, `train`, whose program `micro_step` reads `loss` and carries one gradient for each trainable weight,
/// named by [`gradient_name`].
///
/// # Errors
/// There is no scalar result named `loss`, no trainable weight reaches it, or an operation on the way has no gradient.
pub fn autodiff(forward: Forward) -> Result<Step, PassError> {
    let mut graph = forward.graph;
    let loss = graph
        .output_named("loss")
        .ok_or_else(|| PassError::illegal(PASS, "the model has no result named `loss`"))?
        .value;
    if graph.ty(loss).dtype != DType::F32 || graph.ty(loss).shape.elements() != 1 {
        return Err(PassError::illegal(
            PASS,
            format!("`loss` is {}, expected one f32", graph.ty(loss)),
        ));
    }
    let mut gradients = Gradients::new(&graph, loss);
    for index in (0..graph.nodes.len()).rev() {
        gradients.visit(&mut graph, NodeId(index as u32))?;
    }
    let weights: Vec<(String, ValueId)> = graph
        .inputs()
        .filter_map(|(id, value, _)| match gradients.of[id.index()] {
            OutputGradient::Value(gradient) => Some((gradient_name(&value.name), gradient)),
            _ => None,
        })
        .collect();
    if weights.is_empty() {
        return Err(PassError::illegal(
            PASS,
            "no trainable weight reaches the loss: nothing to train",
        ));
    }
    for (name, gradient) in weights {
        graph.output(&name, gradient, OutputKind::Carry);
    }
    let step = Step {
        routines: vec![Routine {
            name: TRAIN.to_owned(),
            programs: vec![Program {
                name: MICRO_STEP.to_owned(),
                repeat: 1,
                graph: dead_code(&graph),
            }],
        }],
    };
    step.verify().map_err(PassError::verify(PASS))?;
    Ok(step)
}

/// Gradients of forward values, as far as they are known.
struct Gradients {
    /// By forward value.
    of: Vec<OutputGradient>,
    /// Whether a trainable weight feeds the value.
    needed: Vec<bool>,
}

impl Gradients {
    fn new(graph: &Graph, loss: ValueId) -> Self {
        let mut needed: Vec<bool> = graph
            .values
            .iter()
            .map(|value| matches!(value.source, Source::Input(Binding::Persistent { trainable: true, .. })))
            .collect();
        for node in &graph.nodes {
            if node.inputs.iter().any(|v| needed[v.index()]) {
                node.outputs.iter().for_each(|v| needed[v.index()] = true);
            }
        }
        let mut of = vec![OutputGradient::None; graph.values.len()];
        of[loss.index()] = OutputGradient::One;
        Self { of, needed }
    }

    fn visit(&mut self, graph: &mut Graph, id: NodeId) -> Result<(), PassError> {
        let node = graph.node(id);
        let results: Vec<_> = node.outputs.iter().map(|v| self.of[v.index()]).collect();
        let wanted: Vec<_> = node.inputs.iter().map(|v| self.needed[v.index()]).collect();
        if results.iter().all(|r| *r == OutputGradient::None) || !wanted.contains(&true) {
            return Ok(());
        }
        let (op, inputs, scope) = (node.op.clone(), node.inputs.clone(), node.scope.clone());
        let first_new = graph.nodes.len();
        let mut rule = Gradient::new(graph, id, results, wanted);
        op.gradient(&mut rule).map_err(PassError::op(PASS, &scope))?;
        for (operand, gradient) in rule.finish().map_err(PassError::op(PASS, &scope))? {
            let input = inputs[operand];
            let sum = match self.of[input.index()] {
                OutputGradient::None => gradient,
                OutputGradient::One => return Err(PassError::illegal(PASS, "the loss is used by another node")),
                OutputGradient::Value(so_far) => add(graph, so_far, gradient, first_new, id)?,
            };
            self.of[input.index()] = OutputGradient::Value(sum);
        }
        Ok(())
    }
}

/// `so_far + new`: folded into the node that makes `new` where that is one of the nodes just emitted and can accumulate.
fn add(
    graph: &mut Graph,
    so_far: ValueId,
    new: ValueId,
    first_new: usize,
    differentiated: NodeId,
) -> Result<ValueId, PassError> {
    if let Source::Node { node, output } = graph.value(new).source {
        let older = graph.producer(so_far).is_some_and(|made| made < node);
        let fresh = graph.node(node).op.accumulating(output);
        if let (true, true, Some((op, addend))) = (node.index() >= first_new, older, fresh)
            && graph.node(node).op != op
        {
            let node = &mut graph.nodes[node.index()];
            node.op = op;
            node.inputs.insert(addend, so_far);
            return Ok(new);
        }
    }
    let scope = graph.node(differentiated).scope.clone();
    let role = graph.value(new).role;
    let sum = graph
        .push(Op::from(Add {}), &[so_far, new], &scope, Phase::Backward, role)
        .map_err(PassError::op(PASS, &scope))?;
    Ok(sum[0])
}
