//! The order in which each program's nodes run: lower peaks by order alone.
//!
//! Two orders are tried, and the one whose live bytes peak lower is kept: the graph's own, and one in which some nodes move.
//! Weight gradients run as early as their operands exist (they end the life of an activation and of a gradient), and updates as
//! early as their gradient is there and the weight has been read for the last time. Nodes without operands, and what is recomputed,
//! run as late as their first reader.

use tightfit_ir::op::Rule;
use tightfit_ir::{Graph, Node, NodeId, Phase, Role, Step, Target, Tier};

use crate::error::PlanError;
use crate::liveness::{self, InPlace};
use crate::schedule::Schedule;

/// Chooses the order of every program.
///
/// # Errors
/// The step is malformed.
pub fn schedule(step: Step, target: &dyn Target) -> Result<Schedule, PlanError> {
    step.verify()?;
    let needs = |graph: &Graph| {
        let mut needs = graph.needs();
        overwrite_last(graph, &mut needs);
        needs
    };
    let needs: Vec<Vec<Vec<usize>>> = step.programs().map(|(_, program)| needs(&program.graph)).collect();
    let orders = |order: fn(Order<'_>) -> Vec<NodeId>| -> Vec<Vec<NodeId>> {
        let programs = step.programs().zip(&needs);
        programs
            .map(|((_, program), needs)| order(Order::new(&program.graph, needs)))
            .collect()
    };
    let peak = |orders: &[Vec<NodeId>]| {
        liveness::analyse(&step, orders, target, InPlace::WherePossible).peak_live_bytes(Tier::Memory)
    };
    let (eager, natural) = (orders(eager), orders(natural));
    let orders = match eager == natural || peak(&eager) <= peak(&natural) {
        true => eager,
        false => natural,
    };
    Schedule::new(step, orders)
}

/// The graph's own order.
fn natural(mut order: Order<'_>) -> Vec<NodeId> {
    for index in 0..order.graph.nodes.len() {
        order.place_with_needs(index);
    }
    order.placed
}

/// Weight gradients and updates as soon as they can run, nodes without operands and recomputed ones on demand, everything else in
/// the graph's order.
fn eager(mut order: Order<'_>) -> Vec<NodeId> {
    let graph = order.graph;
    let is_early = |index: usize| {
        let node = &graph.nodes[index];
        let is_gradient = node.outputs.iter().all(|&v| graph.value(v).role == Role::Gradient);
        !node.inputs.is_empty() && (is_gradient || node.phase == Phase::Update)
    };
    let early: Vec<bool> = (0..graph.nodes.len()).map(is_early).collect();
    for index in 0..graph.nodes.len() {
        if on_demand(&graph.nodes[index]) || early[index] && !order.ready(index) {
            continue;
        }
        let before = order.placed.len();
        order.place_with_needs(index);
        // Readiness changes only when a node is placed, and only for the readers of its results.
        let mut at = before;
        while at < order.placed.len() {
            for next in order.unblocked_by(order.placed[at].index()) {
                if early[next] && order.ready(next) {
                    order.place_with_needs(next);
                }
            }
            at += 1;
        }
    }
    for index in 0..graph.nodes.len() {
        order.place_with_needs(index);
    }
    order.placed
}

/// Whether a node runs only when something asks for it: it could run at any time.
fn on_demand(node: &Node) -> bool {
    node.inputs.is_empty() || node.phase == Phase::Recompute
}

/// Makes updates wait for what reads the operands that they can write over, as far as that stands before them in the graph: a weight
/// that was fetched is then written over in place, as one that lives in memory is.
fn overwrite_last(graph: &Graph, needs: &mut [Vec<usize>]) {
    let mut readers = vec![Vec::new(); graph.values.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        if node.phase == Phase::Update {
            let over = node.op.aliases().into_iter().map(|alias| node.inputs[alias.input]);
            needs[index].extend(over.flat_map(|operand| readers[operand.index()].iter().copied()));
        }
        node.inputs.iter().for_each(|input| readers[input.index()].push(index));
    }
}

/// An order while it grows.
struct Order<'a> {
    graph: &'a Graph,
    needs: &'a [Vec<usize>],
    unblocks: Vec<Vec<usize>>,
    done: Vec<bool>,
    placed: Vec<NodeId>,
}

impl<'a> Order<'a> {
    fn new(graph: &'a Graph, needs: &'a [Vec<usize>]) -> Self {
        let mut unblocks = vec![Vec::new(); needs.len()];
        for (index, list) in needs.iter().enumerate() {
            list.iter().for_each(|&need| unblocks[need].push(index));
        }
        Self {
            graph,
            needs,
            unblocks,
            done: vec![false; graph.nodes.len()],
            placed: Vec::with_capacity(graph.nodes.len()),
        }
    }

    /// Whether all it needs has run, or is an operand that can run at once. An update waits for what reads the weight, it asks for
    /// none of it.
    fn ready(&self, index: usize) -> bool {
        let asks = self.graph.nodes[index].phase != Phase::Update;
        let there = |need: usize| self.done[need] || asks && on_demand(&self.graph.nodes[need]);
        !self.done[index] && self.needs[index].iter().all(|&need| there(need))
    }

    fn unblocked_by(&self, index: usize) -> Vec<usize> {
        self.unblocks[index].clone()
    }

    /// Places a node after whatever it needs.
    fn place_with_needs(&mut self, index: usize) {
        let mut stack = vec![index];
        while let Some(&top) = stack.last() {
            let missing = self.needs[top].iter().copied().find(|&need| !self.done[need]);
            match missing {
                Some(need) => stack.push(need),
                None => {
                    stack.pop();
                    if !self.done[top] {
                        self.done[top] = true;
                        self.placed.push(NodeId(top as u32));
                    }
                }
            }
        }
    }
}
