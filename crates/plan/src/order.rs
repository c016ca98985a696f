//! The order in which each program's nodes run: lower peaks by order alone.
//!
//! Two orders are tried, and the one whose live bytes peak lower is kept: the graph's own, and one in which weight gradients run
//! as early as their operands exist (they end the life of an activation and of a gradient) and nodes without operands run as late
//! as their first reader.

use tightfit_ir::{Graph, NodeId, Role, Step, Target};

use crate::error::PlanError;
use crate::liveness::{self, InPlace};
use crate::schedule::{Schedule, needs};

/// Chooses the order of every program.
///
/// # Errors
/// The step is malformed.
pub fn schedule(step: Step, target: &dyn Target) -> Result<Schedule, PlanError> {
    step.verify()?;
    let candidates = [eager, natural]
        .map(|order| -> Vec<Vec<NodeId>> { step.programs().map(|(_, program)| order(&program.graph)).collect() });
    let mut best: Option<(u64, Schedule)> = None;
    for orders in candidates {
        let schedule = Schedule::new(step.clone(), orders)?;
        let peak = liveness::analyse(&schedule, target, InPlace::WherePossible).peak_live_bytes();
        if best.as_ref().is_none_or(|(lowest, _)| peak < *lowest) {
            best = Some((peak, schedule));
        }
    }
    best.map(|(_, schedule)| schedule).ok_or(PlanError::Empty)
}

/// The graph's own order.
fn natural(graph: &Graph) -> Vec<NodeId> {
    let mut order = Order::new(graph);
    for index in 0..graph.nodes.len() {
        order.place_with_needs(index);
    }
    order.placed
}

/// Weight gradients as soon as they can run, everything else in the graph's order, nodes without operands on demand.
fn eager(graph: &Graph) -> Vec<NodeId> {
    let mut order = Order::new(graph);
    let gradients: Vec<usize> = (0..graph.nodes.len())
        .filter(|&index| {
            let node = &graph.nodes[index];
            !node.inputs.is_empty() && node.outputs.iter().all(|&v| graph.value(v).role == Role::Gradient)
        })
        .collect();
    // Readiness changes only when a node is placed, and only for the readers of its results.
    let mut is_gradient = vec![false; graph.nodes.len()];
    gradients.iter().for_each(|&index| is_gradient[index] = true);
    for index in 0..graph.nodes.len() {
        if graph.nodes[index].inputs.is_empty() || is_gradient[index] && !order.ready(index) {
            continue;
        }
        let before = order.placed.len();
        order.place_with_needs(index);
        let mut at = before;
        while at < order.placed.len() {
            for next in order.unblocked_by(order.placed[at].index()) {
                if is_gradient[next] && order.ready(next) {
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

/// An order while it grows.
struct Order<'a> {
    graph: &'a Graph,
    needs: Vec<Vec<usize>>,
    unblocks: Vec<Vec<usize>>,
    done: Vec<bool>,
    placed: Vec<NodeId>,
}

impl<'a> Order<'a> {
    fn new(graph: &'a Graph) -> Self {
        let needs = needs(graph);
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

    /// Whether all it needs has run, nodes without operands aside: those can run at once.
    fn ready(&self, index: usize) -> bool {
        !self.done[index]
            && self.needs[index]
                .iter()
                .all(|&need| self.done[need] || self.graph.nodes[need].inputs.is_empty())
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
