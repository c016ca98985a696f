//! The graph: SSA values, nodes in an order that defines before it uses, named inputs and outputs.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::op::{Op, OpError, Rule};
use crate::types::{Phase, Role, Type};

/// The index of a value in [`Graph::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ValueId(pub u32);

/// The index of a node in [`Graph::nodes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NodeId(pub u32);

impl ValueId {
    /// As an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl NodeId {
    /// As an index.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// How a persistent tensor is filled before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// All that number.
    Constant(f64),
    /// Normal with mean 0 and that standard deviation, from the job's seed and the tensor's name.
    Normal(f64),
    /// Uniform between minus that bound and the bound, from the job's seed and the tensor's name.
    Uniform(f64),
}

/// Where the bytes of an input come from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Binding {
    /// Written by the session before each run of the program.
    Fed,
    /// Lives at one offset for the whole job: weights and optimizer state.
    Persistent {
        /// How it is filled at first.
        init: Init,
        /// Whether autodiff makes a gradient for it.
        trainable: bool,
    },
    /// Left there by an earlier program of the same routine: gradients on their way to the update.
    Carried,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// An input of the graph.
    Input(Binding),
    /// Output number `output` of a node.
    Node {
        /// The defining node.
        node: NodeId,
        /// Which of its outputs.
        output: usize,
    },
}

/// One SSA value.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// An input's unique name; empty for what a node makes.
    pub name: Arc<str>,
    /// Dtype and shape.
    pub ty: Type,
    /// What the bytes are for.
    pub role: Role,
    /// Who makes it.
    pub source: Source,
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What it computes.
    pub op: Op,
    /// Its operands.
    pub inputs: Vec<ValueId>,
    /// Its results.
    pub outputs: Vec<ValueId>,
    /// The part of the model it belongs to, e.g. `layers.7.mlp`.
    pub scope: Arc<str>,
    /// The part of the step it belongs to.
    pub phase: Phase,
}

/// What happens to an output when its program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputKind {
    /// The session reads it.
    Read,
    /// It stays for later programs of the routine, which see it as a [`Binding::Carried`] input of the same name.
    Carry,
    /// It takes the storage of that persistent or carried input, which it replaces.
    Update(ValueId),
}

/// A named result.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Unique among the graph's outputs.
    pub name: Arc<str>,
    /// The value.
    pub value: ValueId,
    /// What becomes of it.
    pub kind: OutputKind,
}

/// A list of nodes over values. Nodes stand in an order in which definitions come before uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// All values, inputs included.
    pub values: Vec<Value>,
    /// All nodes, in a legal order.
    pub nodes: Vec<Node>,
    /// Named results.
    pub outputs: Vec<Output>,
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an input.
    pub fn input(&mut self, name: &str, ty: Type, role: Role, binding: Binding) -> ValueId {
        self.push_value(Value {
            name: name.into(),
            ty,
            role,
            source: Source::Input(binding),
        })
    }

    /// Appends a node and returns its outputs, whose types the operation's rule gives.
    ///
    /// # Errors
    /// The operands do not fit the operation.
    pub fn push(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        scope: &Arc<str>,
        phase: Phase,
        role: Role,
    ) -> Result<Vec<ValueId>, OpError> {
        let operands: Vec<Type> = inputs.iter().map(|&v| self.ty(v).clone()).collect();
        let node = NodeId(self.nodes.len() as u32);
        let outputs = op
            .infer(&operands)?
            .into_iter()
            .enumerate()
            .map(|(output, ty)| {
                self.push_value(Value {
                    name: Arc::default(),
                    ty,
                    role,
                    source: Source::Node { node, output },
                })
            })
            .collect::<Vec<_>>();
        self.nodes.push(Node {
            op,
            inputs: inputs.to_vec(),
            outputs: outputs.clone(),
            scope: scope.clone(),
            phase,
        });
        Ok(outputs)
    }

    /// Adds a value; its source must name a node that lists it.
    pub fn push_value(&mut self, value: Value) -> ValueId {
        self.values.push(value);
        ValueId(self.values.len() as u32 - 1)
    }

    /// Declares a result.
    pub fn output(&mut self, name: &str, value: ValueId, kind: OutputKind) {
        self.outputs.push(Output {
            name: name.into(),
            value,
            kind,
        });
    }

    /// A value.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.index()]
    }

    /// A node.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.index()]
    }

    /// A value's type.
    pub fn ty(&self, id: ValueId) -> &Type {
        &self.value(id).ty
    }

    /// The node that makes a value, `None` for an input.
    pub fn producer(&self, id: ValueId) -> Option<NodeId> {
        match self.value(id).source {
            Source::Node { node, .. } => Some(node),
            Source::Input(_) => None,
        }
    }

    /// The binding of an input, `None` for what a node makes.
    pub fn binding(&self, id: ValueId) -> Option<Binding> {
        match self.value(id).source {
            Source::Input(binding) => Some(binding),
            Source::Node { .. } => None,
        }
    }

    /// All inputs, in the order they were added.
    pub fn inputs(&self) -> impl Iterator<Item = (ValueId, &Value, Binding)> + Clone {
        self.values
            .iter()
            .enumerate()
            .filter_map(|(i, value)| match value.source {
                Source::Input(binding) => Some((ValueId(i as u32), value, binding)),
                Source::Node { .. } => None,
            })
    }

    /// The input of that name.
    pub fn input_named(&self, name: &str) -> Option<ValueId> {
        self.inputs()
            .find(|(_, value, _)| &*value.name == name)
            .map(|(id, ..)| id)
    }

    /// The result of that name.
    pub fn output_named(&self, name: &str) -> Option<&Output> {
        self.outputs.iter().find(|output| &*output.name == name)
    }

    /// The types of a node's operands.
    pub fn operand_types(&self, node: &Node) -> Vec<&Type> {
        node.inputs.iter().map(|&v| self.ty(v)).collect()
    }

    /// The types of a node's results.
    pub fn result_types(&self, node: &Node) -> Vec<&Type> {
        node.outputs.iter().map(|&v| self.ty(v)).collect()
    }

    /// A name for a person: an input's own, else scope, operation and output, e.g. `layers.0.mlp/swiglu`.
    pub fn describe(&self, id: ValueId) -> Label {
        match self.value(id).source {
            Source::Input(_) => Label::Input(self.value(id).name.clone()),
            Source::Node { node, output } => {
                let node = self.node(node);
                Label::Result {
                    scope: node.scope.clone(),
                    op: node.op.name(),
                    output: (node.outputs.len() > 1).then_some(output),
                }
            }
        }
    }
}

/// A name for a person, which becomes text when it is shown: a large plan has a hundred thousand of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Label {
    /// An input's own.
    Input(Arc<str>),
    /// What a node makes.
    Result {
        /// Of the node.
        scope: Arc<str>,
        /// The operation.
        op: &'static str,
        /// Which of its results, where it has several.
        output: Option<usize>,
    },
    /// What a node needs while it runs.
    Workspace {
        /// Of the node.
        scope: Arc<str>,
        /// The operation.
        op: &'static str,
    },
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(name) => f.write_str(name),
            Self::Result {
                scope,
                op,
                output: None,
            } => write!(f, "{scope}/{op}"),
            Self::Result {
                scope,
                op,
                output: Some(output),
            } => write!(f, "{scope}/{op}#{output}"),
            Self::Workspace { scope, op } => write!(f, "{scope}/{op} workspace"),
        }
    }
}

/// The part of a scope that names its block, if it belongs to one.
pub fn block_name(scope: &str) -> Option<&str> {
    let numeric = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let mut end = 0;
    for part in scope.split('.') {
        end += part.len();
        if numeric(part) {
            return Some(&scope[..end]);
        }
        end += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_named_by_its_scope_up_to_a_number() {
        assert_eq!(block_name("model.layers.7.mlp.up_proj"), Some("model.layers.7"));
        assert_eq!(block_name("transformer.h.11"), Some("transformer.h.11"));
        assert_eq!(block_name("model.norm2.layer"), None);
        assert_eq!(block_name("0.linear"), Some("0"));
        assert_eq!(block_name(""), None);
    }
}
