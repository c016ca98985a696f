//! An order for every program of a step, and what makes one legal.

use tightfit_ir::{Graph, NodeId, OutputKind, Step};

use crate::error::PlanError;

/// A step and an order for each of its programs.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    step: Step,
    /// By program, routine after routine.
    orders: Vec<Vec<NodeId>>,
}

impl Schedule {
    /// A step with orders made elsewhere, one for each program in turn.
    ///
    /// # Errors
    /// An order that is not a legal permutation of its program's nodes.
    pub fn new(step: Step, orders: Vec<Vec<NodeId>>) -> Result<Self, PlanError> {
        if orders.len() != step.programs().count() {
            return Err(PlanError::Order {
                program: String::new(),
                message: format!("{} orders for {} programs", orders.len(), step.programs().count()),
            });
        }
        for ((_, program), order) in step.programs().zip(&orders) {
            check(&program.graph, order).map_err(|message| PlanError::Order {
                program: program.name.clone(),
                message,
            })?;
        }
        Ok(Self { step, orders })
    }

    /// What is scheduled.
    pub fn step(&self) -> &Step {
        &self.step
    }

    /// The orders, by program.
    pub fn orders(&self) -> &[Vec<NodeId>] {
        &self.orders
    }
}

/// For each node, those that must run before it: makers of its operands, and readers of what it overwrites for an update.
pub(crate) fn needs(graph: &Graph) -> Vec<Vec<usize>> {
    let mut needs: Vec<Vec<usize>> = graph
        .nodes
        .iter()
        .map(|node| {
            let makers = node.inputs.iter().filter_map(|&v| graph.producer(v));
            makers.map(NodeId::index).collect()
        })
        .collect();
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); graph.values.len()];
    for (reader, node) in graph.nodes.iter().enumerate() {
        node.inputs.iter().for_each(|v| readers[v.index()].push(reader));
    }
    for output in &graph.outputs {
        let OutputKind::Update(input) = output.kind else {
            continue;
        };
        let path = graph.in_place_path(output.value, input).unwrap_or_default();
        for pair in path.windows(2) {
            let (new, old) = (pair[0], pair[1]);
            let Some(writer) = graph.producer(new) else {
                continue;
            };
            let others = readers[old.index()].iter().filter(|&&reader| reader != writer.index());
            needs[writer.index()].extend(others);
        }
    }
    needs
}

/// Checks that an order is a permutation in which every need comes first.
fn check(graph: &Graph, order: &[NodeId]) -> Result<(), String> {
    let needs = needs(graph);
    let mut done = vec![false; graph.nodes.len()];
    for &id in order {
        match done.get(id.index()) {
            None => return Err(format!("node {} does not exist", id.0)),
            Some(true) => return Err(format!("node {} runs twice", id.0)),
            Some(false) => {}
        }
        if let Some(&need) = needs[id.index()].iter().find(|&&need| !done[need]) {
            return Err(format!("node {} runs before node {need}, which it needs", id.0));
        }
        done[id.index()] = true;
    }
    match done.iter().position(|&d| !d) {
        Some(missing) => Err(format!("node {missing} never runs")),
        None => Ok(()),
    }
}
