//! Offload: optimizer state, weights and saved activations live on the lower tier and are in memory only where they are used.
//!
//! Saves their bytes, but for what is on its way or in use: a tensor is fetched ahead of the nodes that use it and gone after them;
//! weights come once for a block's forward and once for its backward, so they stream through memory layer by layer; what an update
//! changes is stored again. Costs transfers, which run beside the computation: nothing, as long as the link is the faster of the two.
//! The results are the same bits. Tensors of less than [`SMALLEST`] bytes stay, as they would save nothing.
//!
//! How far ahead: as late as still hides the transfer behind the computation, by the target's speeds, and never with more than
//! [`Offload::window`] bytes fetched and not used yet, or stored and not done yet. A last pass, over every program of the step.
//!
//! Rajbhandari et al. 2021, arXiv:2104.07857 (ZeRO-Infinity); Rhu et al. 2016, arXiv:1602.08124 (vDNN).

use std::collections::VecDeque;
use std::sync::Arc;

use tightfit_ir::graph::block_name;
use tightfit_ir::op::{Fetch, Settle, Store};
use tightfit_ir::{Binding, Graph, Link, NodeId, OutputKind, Phase, Role, Step, Target, Tier, ValueId};

use crate::edit::Edit;
use crate::{PassError, TRAIN};

const PASS: &str = "offload";

/// Tensors of fewer bytes stay in memory.
pub const SMALLEST: u64 = 64 << 10;

/// What goes to the lower tier.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Offload {
    /// The optimizer's state.
    pub optimizer: bool,
    /// Weights, trained or frozen.
    pub weights: bool,
    /// Results of forward nodes, by number, that the backward reads from there, by program of `train`.
    pub activations: Vec<(String, Vec<(NodeId, usize)>)>,
    /// Most bytes fetched ahead of their use; and most that wait to be stored. One tensor of any size is always allowed.
    pub window: u64,
}

/// The step with these tensors on the lower tier.
///
/// # Errors
/// The step is malformed.
pub fn offload(mut step: Step, offload: &Offload, target: &dyn Target) -> Result<Step, PassError> {
    for routine in &mut step.routines {
        for program in &mut routine.programs {
            let mut activations: &[(NodeId, usize)] = &[];
            if routine.name == TRAIN {
                let of_program = offload.activations.iter().find(|(name, _)| *name == program.name);
                activations = of_program.map_or(&[], |(_, results)| results);
            }
            let graph = std::mem::take(&mut program.graph);
            let mut rewritten = Program::new(graph, target, offload.window);
            rewritten.persistent(offload)?;
            for &(node, output) in activations {
                rewritten.activation(node, output)?;
            }
            rewritten.settle()?;
            rewritten.fetch()?;
            program.graph = rewritten.edit.finish();
        }
    }
    step.verify().map_err(PassError::verify(PASS))?;
    Ok(step)
}

impl Offload {
    /// Whether a persistent tensor goes to the lower tier.
    pub fn takes(&self, role: Role, bytes: u64) -> bool {
        let wanted = match role {
            Role::OptimizerState => self.optimizer,
            Role::Weight => self.weights,
            _ => false,
        };
        wanted && bytes >= SMALLEST
    }
}

/// A tensor's stay in memory: it is fetched for nodes that use it one soon after the other.
struct Visit {
    /// On the lower tier.
    from: ValueId,
    /// What the nodes would read if it were in memory.
    instead_of: ValueId,
    /// At least one node, in order.
    users: Vec<usize>,
    /// Not before this node.
    earliest: usize,
    /// The tensor's name, or the node that makes it.
    scope: Arc<str>,
}

/// A tensor on its way to the lower tier.
struct Outgoing {
    /// In memory, and where it goes.
    value: ValueId,
    stored: ValueId,
    /// Before which node it is stored.
    position: usize,
    scope: Arc<str>,
}

/// One program's graph while it is rewritten.
struct Program {
    edit: Edit,
    link: Link,
    window: u64,
    /// By value: the nodes that read it.
    readers: Vec<Vec<usize>>,
    /// By node, and one more for the end: when it begins, in seconds, if it waits for no transfer.
    clock: Vec<f64>,
    visits: Vec<Visit>,
    outgoing: Vec<Outgoing>,
}

impl Program {
    fn new(graph: Graph, target: &dyn Target, window: u64) -> Self {
        let mut readers = vec![Vec::new(); graph.values.len()];
        let mut clock = vec![0.0];
        for (index, node) in graph.nodes.iter().enumerate() {
            for input in &node.inputs {
                readers[input.index()].push(index);
            }
            let seconds = target.seconds(&node.op, &graph.operand_types(node), &graph.result_types(node));
            clock.push(clock[index] + seconds);
        }
        Self {
            edit: Edit::new(graph),
            link: target.link(),
            window,
            readers,
            clock,
            visits: Vec::new(),
            outgoing: Vec::new(),
        }
    }

    /// Moves the persistent tensors that `offload` takes: their inputs, and what replaces them.
    fn persistent(&mut self, offload: &Offload) -> Result<(), PassError> {
        let graph = self.edit.graph();
        let taken = graph.inputs().filter(|(_, value, binding)| {
            let persistent = matches!(binding, Binding::Persistent { .. });
            persistent && offload.takes(value.role, value.ty.bytes())
        });
        let taken: Vec<(ValueId, Arc<str>)> = taken.map(|(id, value, _)| (id, value.name.clone())).collect();
        for (tensor, name) in taken {
            let value = &mut self.edit.graph_mut().values[tensor.index()];
            value.ty = value.ty.on(Tier::Lower);
            self.visit(tensor, tensor, self.readers[tensor.index()].clone(), 0, &name);
            let mut outputs = self.edit.graph().outputs.iter();
            let update = outputs.position(|output| output.kind == OutputKind::Update(tensor));
            if let Some(update) = update {
                let new = self.edit.graph().outputs[update].value;
                self.store(new, Some(tensor), &name)?;
            }
        }
        Ok(())
    }

    /// Moves a forward node's result, or whichever view of it the backward reads.
    fn activation(&mut self, node: NodeId, output: usize) -> Result<(), PassError> {
        let graph = self.edit.graph();
        let mut values = vec![graph.node(node).outputs[output]];
        let mut seen = 0;
        while let Some(value) = values.get(seen) {
            let readers = self.readers[value.index()].iter().map(|&reader| &graph.nodes[reader]);
            let forward = readers.filter(|reader| reader.phase == Phase::Forward);
            let views = forward.flat_map(|reader| &reader.outputs).copied();
            let views: Vec<ValueId> = views.filter(|&made| graph.view_of(made).is_some()).collect();
            values.extend(views);
            seen += 1;
        }
        for value in values {
            let graph = self.edit.graph();
            let readers = self.readers[value.index()].iter().copied();
            let late: Vec<usize> = readers
                .filter(|&reader| graph.nodes[reader].phase != Phase::Forward)
                .collect();
            if late.is_empty() {
                continue;
            }
            let scope: Arc<str> = graph.describe(value).to_string().into();
            let maker = graph.producer(value).unwrap_or(node);
            let stored = self.store(value, None, &scope)?;
            self.visit(stored, value, late, maker.index() + 1, &scope);
        }
        Ok(())
    }

    /// Notes the stays of a tensor: one for each block and direction that uses it.
    fn visit(&mut self, from: ValueId, instead_of: ValueId, users: Vec<usize>, earliest: usize, scope: &Arc<str>) {
        let nodes = &self.edit.graph().nodes;
        let together = |&a: &usize, &b: &usize| {
            let forward = |node: usize| nodes[node].phase == Phase::Forward;
            // Outside of blocks, each scope is one.
            let block = |node: usize| block_name(&nodes[node].scope).unwrap_or(&nodes[node].scope);
            forward(a) == forward(b) && block(a) == block(b)
        };
        let stays: Vec<Vec<usize>> = users.chunk_by(together).map(<[usize]>::to_vec).collect();
        self.visits.extend(stays.into_iter().map(|users| Visit {
            from,
            instead_of,
            users,
            earliest,
            scope: scope.clone(),
        }));
    }

    /// Begins to store a node's result where it is made.
    fn store(&mut self, value: ValueId, over: Option<ValueId>, scope: &Arc<str>) -> Result<ValueId, PassError> {
        let position = self.edit.graph().producer(value).map_or(0, |node| node.index() + 1);
        let op = Store { over: over.is_some() };
        let operands: Vec<ValueId> = [value].into_iter().chain(over).collect();
        let role = self.edit.graph().value(value).role;
        let stored = self
            .edit
            .insert(position, op, &operands, scope, Phase::Transfer, role)
            .map_err(PassError::op(PASS, scope))?;
        self.outgoing.push(Outgoing {
            value,
            stored,
            position,
            scope: scope.clone(),
        });
        Ok(stored)
    }

    /// Says how long what is stored keeps its memory: as long as the link is expected to take.
    fn settle(&mut self) -> Result<(), PassError> {
        self.outgoing.sort_by_key(|outgoing| outgoing.position);
        let mut until = Vec::new();
        let mut waiting = VecDeque::new();
        let (mut free, mut bytes_waiting) = (0.0_f64, 0);
        for (index, outgoing) in self.outgoing.iter().enumerate() {
            let bytes = self.edit.graph().ty(outgoing.value).bytes();
            free = free.max(self.clock[outgoing.position]) + bytes as f64 / self.link.write;
            let done = self.clock.partition_point(|&time| time < free);
            until.push(done.clamp(outgoing.position, self.clock.len() - 1));
            waiting.push_back((index, bytes));
            bytes_waiting += bytes;
            while let Some(&(first, bytes)) = waiting.front()
                && (until[first] <= outgoing.position || bytes_waiting > self.window)
            {
                until[first] = until[first].min(outgoing.position);
                bytes_waiting -= bytes;
                waiting.pop_front();
            }
        }
        for (index, position) in until.into_iter().enumerate() {
            let Outgoing {
                value,
                stored,
                ref scope,
                ..
            } = self.outgoing[index];
            let scope = scope.clone();
            let role = self.edit.graph().value(value).role;
            let settled = self
                .edit
                .insert(position, Settle {}, &[stored, value], &scope, Phase::Transfer, role)
                .map_err(PassError::op(PASS, &scope))?;
            for output in &mut self.edit.graph_mut().outputs {
                if output.value == value && matches!(output.kind, OutputKind::Update(_)) {
                    output.value = settled;
                }
            }
        }
        Ok(())
    }

    /// Begins every fetch as late as still hides it, and no earlier than the window allows.
    fn fetch(&mut self) -> Result<(), PassError> {
        self.visits.sort_by_key(|visit| visit.users[0]);
        let sizes: Vec<u64> = self
            .visits
            .iter()
            .map(|visit| self.edit.graph().ty(visit.from).bytes())
            .collect();
        let latest = self.latest(&sizes);
        // The first of the visits that are ahead of their use when the current one begins, and their bytes.
        let (mut first, mut ahead) = (0, 0);
        let mut position = 0;
        for index in 0..self.visits.len() {
            ahead += sizes[index];
            while ahead > self.window && first < index {
                ahead -= sizes[first];
                first += 1;
            }
            let room = first.checked_sub(1).map_or(0, |before| self.visits[before].users[0]);
            let visit = &self.visits[index];
            let wanted = latest[index].max(room).max(visit.earliest).max(position);
            position = wanted.min(visit.users[0]);
            let (from, scope) = (visit.from, visit.scope.clone());
            let role = self.edit.graph().value(visit.instead_of).role;
            let fetched = self
                .edit
                .insert(position, Fetch {}, &[from], &scope, Phase::Transfer, role)
                .map_err(PassError::op(PASS, &scope))?;
            let visit = &self.visits[index];
            for &user in &visit.users {
                for input in &mut self.edit.node_mut(user).inputs {
                    if *input == visit.instead_of {
                        *input = fetched;
                    }
                }
            }
        }
        Ok(())
    }

    /// By visit: the last node at which its fetch may begin so that, with all fetches after it and the stores between them, it is
    /// there in time.
    fn latest(&self, sizes: &[u64]) -> Vec<usize> {
        let mut latest = vec![0; sizes.len()];
        let mut stores = self.outgoing.iter().rev().peekable();
        let mut begin = f64::INFINITY;
        for (index, visit) in self.visits.iter().enumerate().rev() {
            // Stores after its use are in the way of later fetches only.
            while let Some(store) = stores.next_if(|store| store.position > visit.users[0]) {
                begin -= self.edit.graph().ty(store.value).bytes() as f64 / self.link.write;
            }
            begin = begin.min(self.clock[visit.users[0]]) - sizes[index] as f64 / self.link.read;
            latest[index] = self.clock.partition_point(|&time| time <= begin).saturating_sub(1);
        }
        latest
    }
}
