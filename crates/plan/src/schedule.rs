//! An order for every program of a step, and what makes one legal.

use tightfit_ir::{Graph, NodeId, Step};

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

/// Checks that an order is a permutation in which every need comes first.
fn check(graph: &Graph, order: &[NodeId]) -> Result<(), String> {
    let needs = graph.needs();
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
