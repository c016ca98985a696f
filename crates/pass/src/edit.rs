//! Inserting nodes into a graph.

use std::sync::Arc;

use tightfit_ir::op::Rule;
use tightfit_ir::{Graph, Node, NodeId, Op, OpError, Phase, Role, Source, Type, Value, ValueId};

/// A graph and what is to stand before which of its nodes.
pub(crate) struct Edit {
    graph: Graph,
    /// What is inserted: before which node (their number: at the end), and what. In the order in which it stands there.
    inserted: Vec<(usize, Node)>,
}

impl Edit {
    pub fn new(graph: Graph) -> Self {
        Self {
            graph,
            inserted: Vec::new(),
        }
    }

    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// A node of the graph, to change its operands.
    pub fn node_mut(&mut self, index: usize) -> &mut Node {
        &mut self.graph.nodes[index]
    }

    /// Inserts an operation with one result before node `position`, after what was inserted there so far; gives the result.
    ///
    /// # Errors
    /// The operands do not fit.
    pub fn insert(
        &mut self,
        position: usize,
        op: impl Into<Op>,
        inputs: &[ValueId],
        scope: &Arc<str>,
        phase: Phase,
        role: Role,
    ) -> Result<ValueId, OpError> {
        let op = op.into();
        let operands: Vec<Type> = inputs.iter().map(|&v| self.graph.ty(v).clone()).collect();
        let mut outputs = Vec::new();
        for (output, ty) in op.infer(&operands)?.into_iter().enumerate() {
            outputs.push(self.graph.push_value(Value {
                name: "".into(),
                ty,
                role,
                // Numbered in `finish`.
                source: Source::Node {
                    node: NodeId(u32::MAX),
                    output,
                },
            }));
        }
        let result = outputs[0];
        self.inserted.push((
            position,
            Node {
                op,
                inputs: inputs.to_vec(),
                outputs,
                scope: scope.clone(),
                phase,
            },
        ));
        Ok(result)
    }

    /// Changes the values, inputs and results of the graph; not its nodes.
    pub fn graph_mut(&mut self) -> &mut Graph {
        &mut self.graph
    }

    /// The graph with everything in its place.
    pub fn finish(mut self) -> Graph {
        self.inserted.sort_by_key(|(position, _)| *position);
        let mut inserted = self.inserted.into_iter().peekable();
        let mut nodes = Vec::new();
        for (index, node) in std::mem::take(&mut self.graph.nodes).into_iter().enumerate() {
            while let Some((_, node)) = inserted.next_if(|(position, _)| *position <= index) {
                nodes.push(node);
            }
            nodes.push(node);
        }
        nodes.extend(inserted.map(|(_, node)| node));
        for (index, node) in nodes.iter().enumerate() {
            for (output, value) in node.outputs.iter().enumerate() {
                self.graph.values[value.index()].source = Source::Node {
                    node: NodeId(index as u32),
                    output,
                };
            }
        }
        self.graph.nodes = nodes;
        self.graph
    }
}
