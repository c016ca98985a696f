//! Recompute: forward results that are not kept for the backward but made again when it asks for them (gradient checkpointing).
//!
//! **Does.** Each reader of such a result outside of the forward reads a clone instead: the same operation of the same scope, in
//! phase recompute, right before its first reader. A clone reads what is kept, and clones of what is not: also of results that
//! the backward never reads itself, such as queries before their rotation. Every node is cloned at most once, so what several
//! readers share is made again once. A node that is cloned at all keeps none of its results, unless they are listed as kept.
//!
//! **Saves** the bytes of those results between the forward and their readers: lifetimes end with the last reader in the
//! forward, by liveness alone. **Costs** the time of the clones, and the room for them while the backward of their part runs.
//!
//! **Changes nothing else.** Operations are functions of their operands, and clones have the operands' bits: every result has the
//! bits it would have had. (An operation that draws random numbers must draw them from a fed or persistent operand.)
//!
//! **Illegal** for what is no forward node, and for the fused loss, which makes gradients in the forward.
//! Views are no nodes of their own here: they are free, and follow the tensor that they show.
//!
//! Chen et al. 2016, arXiv:1604.06174; inside blocks: Korthikanti et al. 2022, arXiv:2205.05198. Which nodes to choose is the
//! business of `tightfit-search`. Values are renumbered; forward nodes are not, for clones stand behind them.

use tightfit_ir::{Graph, Node, NodeId, Op, OutputKind, Phase, Source, Step, Value, ValueId};

use crate::{PassError, TRAIN};

const PASS: &str = "recompute";

/// The step whose training program of that name makes the results of `nodes` again where its backward or update reads them. Values
/// in `kept` live on as they are, whatever makes them: what enters a block, for clones inside of it to start from.
///
/// # Errors
/// There is no such program, or a node that cannot be recomputed.
pub fn recompute(mut step: Step, program: &str, nodes: &[NodeId], kept: &[ValueId]) -> Result<Step, PassError> {
    let routines = step.routines.iter_mut().filter(|routine| routine.name == TRAIN);
    let program = routines
        .flat_map(|routine| &mut routine.programs)
        .find(|at| at.name == program)
        .ok_or_else(|| PassError::illegal(PASS, format!("there is no program {program} to train")))?;
    let bases = bases(&program.graph);
    let alive = alive(&program.graph, &bases, nodes, kept)?;
    program.graph = Rebuild::of(&program.graph, &bases, &alive);
    step.verify().map_err(PassError::verify(PASS))?;
    Ok(step)
}

/// By value: the value whose bytes it shows, itself if it is no view.
fn bases(graph: &Graph) -> Vec<ValueId> {
    let mut bases: Vec<ValueId> = (0..graph.values.len() as u32).map(ValueId).collect();
    for id in graph.nodes.iter().flat_map(|node| &node.outputs) {
        if let Some(base) = graph.view_of(*id) {
            bases[id.index()] = bases[base.index()];
        }
    }
    bases
}

/// By value that is no view: whether the backward and clones read it where it is. What they read and is not alive has clones.
fn alive(graph: &Graph, bases: &[ValueId], nodes: &[NodeId], kept: &[ValueId]) -> Result<Vec<bool>, PassError> {
    let mut chosen = vec![false; graph.nodes.len()];
    for &id in nodes {
        check(graph, id)?;
        chosen[id.index()] = true;
    }
    // Results, and what is listed, stay whether the backward reads them or not.
    let mut stays = vec![false; graph.values.len()];
    let outputs = graph.outputs.iter().map(|output| output.value);
    outputs
        .chain(kept.iter().copied())
        .for_each(|v| stays[bases[v.index()].index()] = true);

    let mut alive = stays.clone();
    for (value, alive) in graph.values.iter().zip(&mut alive) {
        *alive |= match value.source {
            Source::Input(_) => true,
            Source::Node { node, .. } => graph.node(node).phase != Phase::Forward,
        };
    }
    for node in graph.nodes.iter().filter(|node| node.phase != Phase::Forward) {
        for input in &node.inputs {
            let base = bases[input.index()];
            alive[base.index()] |= graph.producer(base).is_some_and(|made| !chosen[made.index()]);
        }
    }
    let mut clones = vec![false; graph.nodes.len()];
    // Backwards, so that all readers of a node's results are known before the node.
    for (index, node) in graph.nodes.iter().enumerate().rev() {
        if node.phase == Phase::Forward && !clones[index] {
            continue;
        }
        if clones[index] {
            check(graph, NodeId(index as u32))?;
            node.outputs.iter().for_each(|v| alive[v.index()] = stays[v.index()]);
        }
        for base in node.inputs.iter().map(|v| bases[v.index()]) {
            if let (false, Some(made)) = (alive[base.index()], graph.producer(base)) {
                clones[made.index()] = true;
            }
        }
    }
    Ok(alive)
}

/// Whether a node can be recomputed.
fn check(graph: &Graph, id: NodeId) -> Result<(), PassError> {
    let refuse = |why: &str| Err(PassError::illegal(PASS, format!("node {} {why}", id.0)));
    match graph.nodes.get(id.index()) {
        None => refuse("does not exist"),
        Some(node) if node.phase != Phase::Forward => refuse("is no part of the forward"),
        Some(Node {
            op: Op::LinearCrossEntropy(_),
            ..
        }) => refuse("is a loss that makes its gradients in the forward: keep its results"),
        Some(_) => Ok(()),
    }
}

/// The graph while it is built anew.
struct Rebuild<'a> {
    old: &'a Graph,
    bases: &'a [ValueId],
    alive: &'a [bool],
    new: Graph,
    /// By old value: the new one.
    first: Vec<Option<ValueId>>,
    /// By old value: its clone.
    again: Vec<Option<ValueId>>,
}

impl<'a> Rebuild<'a> {
    fn of(old: &'a Graph, bases: &'a [ValueId], alive: &'a [bool]) -> Graph {
        let mut rebuild = Self {
            old,
            bases,
            alive,
            new: Graph::new(),
            first: vec![None; old.values.len()],
            again: vec![None; old.values.len()],
        };
        for (id, input, _) in old.inputs() {
            rebuild.first[id.index()] = Some(rebuild.new.push_value(input.clone()));
        }
        for node in &old.nodes {
            if node.phase != Phase::Forward {
                rebuild.clone_operands(node);
            }
            rebuild.copy(node, node.phase);
        }
        let first = |id: ValueId| rebuild.first[id.index()].unwrap_or(id);
        for output in &old.outputs {
            let kind = match output.kind {
                OutputKind::Update(input) => OutputKind::Update(first(input)),
                kind => kind,
            };
            rebuild.new.output(&output.name, first(output.value), kind);
        }
        rebuild.new
    }

    /// Makes the clones that a node needs and that are not there yet, in the order of the originals.
    fn clone_operands(&mut self, node: &Node) {
        let mut missing = Vec::new();
        let mut reads = node.inputs.clone();
        while let Some(id) = reads.pop() {
            if self.alive[self.bases[id.index()].index()] || self.again[id.index()].is_some() {
                continue;
            }
            if let Some(made) = self.old.producer(id) {
                missing.push(made);
                reads.extend(&self.old.node(made).inputs);
            }
        }
        missing.sort_unstable();
        missing.dedup();
        for id in missing {
            let old = self.old;
            self.copy(old.node(id), Phase::Recompute);
        }
    }

    /// Appends a node of the old graph, or its clone. Outside of the forward it reads clones where results are not kept.
    fn copy(&mut self, old: &Node, phase: Phase) {
        let node = NodeId(self.new.nodes.len() as u32);
        let read = |&id: &ValueId| {
            let kept = phase == Phase::Forward || self.alive[self.bases[id.index()].index()];
            let made = if kept { &self.first } else { &self.again };
            // Operands come first, so this is never absent in a well-formed graph; `verify` names it in another.
            made[id.index()].unwrap_or(id)
        };
        let inputs = old.inputs.iter().map(read).collect();
        let mut outputs = Vec::with_capacity(old.outputs.len());
        for (output, &id) in old.outputs.iter().enumerate() {
            let source = Source::Node { node, output };
            let value = Value {
                source,
                ..self.old.value(id).clone()
            };
            let new = self.new.push_value(value);
            outputs.push(new);
            match phase {
                Phase::Recompute if old.phase == Phase::Forward => self.again[id.index()] = Some(new),
                _ => self.first[id.index()] = Some(new),
            }
        }
        self.new.nodes.push(Node {
            inputs,
            outputs,
            phase,
            ..old.clone()
        });
    }
}
