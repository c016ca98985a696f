//! What a gradient rule sees and may do.

use std::cell::Cell;
use std::sync::Arc;

use super::{Cast, Op, OpError, Rule};
use crate::graph::{Binding, Graph, Node, NodeId, Source, Value, ValueId};
use crate::types::{DType, Phase, Role, Shape};

/// The gradient of a node's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputGradient {
    /// Nothing depends on it.
    None,
    /// It is the scalar that is differentiated.
    One,
    /// That value.
    Value(ValueId),
}

/// One node being differentiated. A rule reads the node, emits backward nodes, and gives each wanted operand its gradient.
pub struct Gradient<'a> {
    graph: &'a mut Graph,
    id: NodeId,
    node: Node,
    results: Vec<OutputGradient>,
    wanted: Vec<bool>,
    given: Vec<(usize, ValueId)>,
    /// By result: whether the rule has looked at its gradient.
    consulted: Vec<Cell<bool>>,
}

impl<'a> Gradient<'a> {
    /// A node, the gradients of its results, and which operands need one.
    pub fn new(graph: &'a mut Graph, id: NodeId, results: Vec<OutputGradient>, wanted: Vec<bool>) -> Self {
        let node = graph.node(id).clone();
        let consulted = vec![Cell::new(false); results.len()];
        Self {
            graph,
            id,
            node,
            results,
            wanted,
            given: Vec::new(),
            consulted,
        }
    }

    /// What the rule gave: operand index and gradient, in the order given, each as it is stored: gradients of persistent values in
    /// `f32`, all others in their operand's dtype. Where an operation computes another one, a cast follows.
    ///
    /// # Errors
    /// A result has a gradient that the rule does not know of, e.g. where a model uses a norm's `rstd`.
    pub fn finish(mut self) -> Result<Vec<(usize, ValueId)>, OpError> {
        let ignored =
            |(result, consulted): (&OutputGradient, &Cell<bool>)| *result != OutputGradient::None && !consulted.get();
        match self.results.iter().zip(&self.consulted).position(ignored) {
            Some(result) => Err(OpError::Invalid {
                op: self.node.op.name(),
                message: format!("has no gradient for its result {result}"),
            }),
            None => {
                let given = std::mem::take(&mut self.given).into_iter();
                given
                    .map(|(index, gradient)| Ok((index, self.as_stored(index, gradient)?)))
                    .collect()
            }
        }
    }

    /// The gradient of operand `index` in the dtype that it is stored in.
    fn as_stored(&mut self, index: usize, gradient: ValueId) -> Result<ValueId, OpError> {
        let dtype = match self.is_persistent(index) {
            true => DType::F32,
            false => self.graph.ty(self.input(index)).dtype,
        };
        if self.graph.ty(gradient).dtype == dtype {
            return Ok(gradient);
        }
        let role = self.graph.value(gradient).role;
        let cast = self.emit(Cast { dtype }, &[gradient])?[0];
        self.graph.values[cast.index()].role = role;
        Ok(cast)
    }

    /// Whether operand `index` is kept from step to step: a weight.
    fn is_persistent(&self, index: usize) -> bool {
        matches!(self.graph.binding(self.input(index)), Some(Binding::Persistent { .. }))
    }

    /// An operand.
    pub fn input(&self, index: usize) -> ValueId {
        self.node.inputs[index]
    }

    /// A result.
    pub fn output(&self, index: usize) -> ValueId {
        self.node.outputs[index]
    }

    /// The size of an operand's dimension.
    pub fn dim(&self, index: usize, axis: usize) -> u64 {
        self.graph.ty(self.input(index)).dim(axis)
    }

    /// An operand's shape.
    pub fn shape(&self, index: usize) -> Shape {
        self.graph.ty(self.input(index)).shape.clone()
    }

    /// How an operand's elements are stored.
    pub fn dtype(&self, index: usize) -> DType {
        self.graph.ty(self.input(index)).dtype
    }

    /// Whether an operand needs a gradient. Operands that are not there need none.
    pub fn wants(&self, index: usize) -> bool {
        self.wanted.get(index).copied().unwrap_or(false)
    }

    /// The gradient of a result.
    ///
    /// # Errors
    /// The result is itself what is differentiated, which only losses allow.
    pub fn result(&self, index: usize) -> Result<ValueId, OpError> {
        self.consulted[index].set(true);
        match self.results[index] {
            OutputGradient::Value(value) => Ok(value),
            OutputGradient::One | OutputGradient::None => Err(OpError::NotRoot {
                op: self.node.op.name(),
            }),
        }
    }

    /// Demands that result `index` is the scalar that is differentiated.
    ///
    /// # Errors
    /// It is not.
    pub fn root(&self, index: usize) -> Result<(), OpError> {
        self.consulted[index].set(true);
        match self.results[index] {
            OutputGradient::One => Ok(()),
            _ => Err(OpError::NotRoot {
                op: self.node.op.name(),
            }),
        }
    }

    /// There is no gradient of this operation.
    ///
    /// # Errors
    /// Always.
    pub fn none(&self) -> Result<(), OpError> {
        Err(OpError::NotDifferentiable {
            op: self.node.op.name(),
        })
    }

    /// Adds a backward node in the scope of the differentiated one.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn emit(&mut self, op: impl Into<Op>, inputs: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
        let scope: Arc<str> = self.node.scope.clone();
        self.graph
            .push(op.into(), inputs, &scope, Phase::Backward, Role::Activation)
    }

    /// Replaces the differentiated node by a variant with more results, and returns those: for operations that make
    /// gradients as they go.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn extend(&mut self, op: impl Into<Op>) -> Result<Vec<ValueId>, OpError> {
        let op = op.into();
        let operands = self.node.inputs.iter().map(|&v| self.graph.ty(v).clone());
        let types = op.infer(&operands.collect::<Vec<_>>())?;
        let first = self.node.outputs.len();
        let mut added = Vec::new();
        for (output, ty) in types.into_iter().enumerate().skip(first) {
            added.push(self.graph.push_value(Value {
                name: "".into(),
                ty,
                role: Role::Activation,
                source: Source::Node { node: self.id, output },
            }));
        }
        let node = &mut self.graph.nodes[self.id.index()];
        node.op = op;
        node.outputs.extend(&added);
        Ok(added)
    }

    /// Gives operand `index` (a part of) its gradient. Ignored where none is wanted.
    pub fn give(&mut self, index: usize, gradient: ValueId) {
        if !self.wants(index) {
            return;
        }
        if self.is_persistent(index) {
            self.graph.values[gradient.index()].role = Role::Gradient;
        }
        self.given.push((index, gradient));
    }
}
