//! Updates inside of the backward: a weight is updated as soon as its gradient is complete.
//!
//! Every node of `update` moves into `micro_step`, right behind the last node that it needs: the one that completes its gradient,
//! or the last other reader of the weight that it overwrites. The program `update` is gone, `lr` and `step` are fed to
//! `micro_step`, and nothing changes but the order, so the result is the same bits.
//!
//! Saves the gradients: none outlives the layer that it belongs to, where without the pass all of them are alive before the first
//! update. Only a tied embedding's gradient lives through the backward, as one buffer from the loss, which begins it, to the
//! embedding's scatter, which completes it. Costs nothing as long as nothing asks for all gradients at once.
//!
//! Clipping by the global norm does ask for them, before the first update, and so does a scaled loss, which has to know whether any
//! gradient overflowed. It stays exact by a second pass over the batch: a
//! program `norm_step` runs forward and backward first, reduces every gradient to its norm where it is complete, and carries the
//! global norm of these to `micro_step`, which runs forward and backward again, now with the updates. That doubles the step's
//! work but for the update (the plan's flops say so), and leaves the result the same bits. `loss` is read from `micro_step`,
//! `grad_norm` from `norm_step`.
//!
//! Illegal with accumulation: a sum over micro-batches is complete only after the last of them.
//!
//! Fusing the update with the backward is as old as SGD; for large models: LOMO, Lv et al. 2023, arXiv:2306.09782, which also
//! runs the backward twice to clip.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tightfit_ir::op::Op;
use tightfit_ir::{Binding, Graph, Node, NodeId, OutputKind, Program, Source, Step, Value, ValueId};

use crate::{MICRO_STEP, NORM_STEP, PassError, TRAIN, UPDATE, dead_code};

const PASS: &str = "update_in_backward";

/// The name under which `norm_step` carries the global norm to `micro_step`.
const GLOBAL_NORM: &str = "global_norm";

/// The step with the nodes of `update` inside of `micro_step`, and with a program `norm_step` before it if the optimizer clips or the loss is scaled.
///
/// # Errors
/// The step accumulates gradients, or there is no update to move.
pub fn update_in_backward(mut step: Step) -> Result<Step, PassError> {
    let train = step
        .routines
        .iter_mut()
        .find(|routine| routine.name == TRAIN)
        .ok_or_else(|| PassError::illegal(PASS, "there is nothing to train"))?;
    let at = |name| train.programs.iter().position(|program| program.name == name);
    let (Some(micro_step), Some(update)) = (at(MICRO_STEP), at(UPDATE)) else {
        return Err(PassError::illegal(
            PASS,
            "there is no update to move: let an optimizer add it first, and move it once",
        ));
    };
    if train.programs[micro_step].repeat > 1 {
        return Err(PassError::illegal(
            PASS,
            "gradients that are summed over micro-batches are complete only after the last of them: run the batch as one \
             micro-batch, or update after the backward",
        ));
    }
    // It reads what `micro_step` carries, so it is the later one.
    let update = train.programs.remove(update).graph;
    let graph = &mut train.programs[micro_step].graph;
    match global_norm(&update) {
        None => {
            move_nodes(graph, &update, |_| true, None);
            drop_carried(graph, &update);
        }
        Some(norm) => {
            let reduces = ancestors(&update, norm);
            let norm_step = norm_step(graph, &update, &reduces, norm);
            let carried = update.value(norm);
            let input = graph.input(GLOBAL_NORM, carried.ty.clone(), carried.role, Binding::Carried);
            move_nodes(graph, &update, |node| !reduces[node], Some((norm, input)));
            drop_carried(graph, &update);
            train.programs.insert(
                micro_step,
                Program {
                    name: NORM_STEP.to_owned(),
                    repeat: 1,
                    graph: norm_step,
                },
            );
        }
    }
    step.verify().map_err(PassError::verify(PASS))?;
    Ok(step)
}

/// The forward and backward of `micro_step` with the nodes that reduce its gradients to their global norm, which it carries on.
/// It has no other results but those of these nodes.
fn norm_step(micro_step: &Graph, update: &Graph, reduces: &[bool], norm: ValueId) -> Graph {
    let mut graph = micro_step.clone();
    let moved = move_nodes(&mut graph, update, |node| reduces[node], None);
    graph.outputs.drain(..micro_step.outputs.len());
    if let Some(norm) = moved[norm.index()] {
        graph.output(GLOBAL_NORM, norm, OutputKind::Carry);
    }
    dead_code(&graph)
}

/// Adds the chosen nodes of `update` to the graph, each where it can run first, with the results that they make. `known` is a value
/// of `update` that is there already. Returns what each value of `update` is in the graph, as far as it is there.
fn move_nodes(
    graph: &mut Graph,
    update: &Graph,
    chosen: impl Fn(usize) -> bool,
    known: Option<(ValueId, ValueId)>,
) -> Vec<Option<ValueId>> {
    let first = graph.nodes.len();
    let mut there = there(graph);
    let mut moved = vec![None; update.values.len()];
    if let Some((from, to)) = known {
        moved[from.index()] = Some(to);
    }
    for (_, node) in update.nodes.iter().enumerate().filter(|(index, _)| chosen(*index)) {
        let inputs = node.inputs.iter().map(|&id| {
            let value = update.value(id);
            *moved[id.index()].get_or_insert_with(|| {
                let key = (value.source == Source::Input(Binding::Carried), value.name.clone());
                *there.entry(key).or_insert_with(|| graph.push_value(value.clone()))
            })
        });
        let inputs = inputs.collect();
        let id = NodeId(graph.nodes.len() as u32);
        let outputs = node.outputs.iter().enumerate().map(|(output, &made)| {
            let source = Source::Node { node: id, output };
            let value = update.value(made).clone();
            *moved[made.index()].insert(graph.push_value(Value { source, ..value }))
        });
        let outputs = outputs.collect();
        graph.nodes.push(Node {
            inputs,
            outputs,
            ..node.clone()
        });
    }
    for output in &update.outputs {
        let made = update.producer(output.value).is_some_and(|node| chosen(node.index()));
        let (true, Some(value)) = (made, moved[output.value.index()]) else {
            continue;
        };
        let kind = match output.kind {
            OutputKind::Update(input) => moved[input.index()].map(OutputKind::Update),
            kind => Some(kind),
        };
        if let Some(kind) = kind {
            graph.output(&output.name, value, kind);
        }
    }
    place_early(graph, first);
    moved
}

/// What inputs of `update` are in `micro_step`, by whether they are carried and by name: the gradients that it carries, and its own
/// inputs.
fn there(graph: &Graph) -> HashMap<(bool, Arc<str>), ValueId> {
    let carried = graph
        .outputs
        .iter()
        .map(|output| ((true, output.name.clone()), output.value));
    let inputs = graph.inputs().map(|(id, value, _)| ((false, value.name.clone()), id));
    carried.chain(inputs).collect()
}

/// Moves each node from `first` on right behind the last node that it needs.
fn place_early(graph: &mut Graph, first: usize) {
    let needs = graph.needs();
    let mut behind: Vec<usize> = (0..graph.nodes.len()).collect();
    for node in first..graph.nodes.len() {
        behind[node] = needs[node].iter().map(|&need| behind[need]).max().unwrap_or(0);
    }
    let mut order: Vec<NodeId> = (0..graph.nodes.len() as u32).map(NodeId).collect();
    order.sort_by_key(|id| behind[id.index()]);
    graph.reorder(&order);
}

/// Removes the outputs that were carried for `update` alone, which is no more.
fn drop_carried(graph: &mut Graph, update: &Graph) {
    let read: HashSet<&str> = update.inputs().map(|(_, value, _)| &*value.name).collect();
    graph
        .outputs
        .retain(|output| output.kind != OutputKind::Carry || !read.contains(&*output.name));
}

/// The gradients' global norm, if the optimizer clips or the loss is scaled.
fn global_norm(update: &Graph) -> Option<ValueId> {
    let node = update.nodes.iter().find(|node| matches!(node.op, Op::GlobalNorm(_)))?;
    node.outputs.first().copied()
}

/// Which nodes a value depends on, its own included.
fn ancestors(graph: &Graph, value: ValueId) -> Vec<bool> {
    let mut found = vec![false; graph.nodes.len()];
    let mut wanted = vec![value];
    while let Some(id) = wanted.pop() {
        if let Some(node) = graph.producer(id)
            && !std::mem::replace(&mut found[node.index()], true)
        {
            wanted.extend(&graph.node(node).inputs);
        }
    }
    found
}
