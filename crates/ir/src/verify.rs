//! Structural checks that every stage passes before the next one reads it.

use std::collections::{HashMap, HashSet};

use crate::graph::{Binding, Graph, Init, NodeId, OutputKind, Source, ValueId};
use crate::op::{AliasKind, Op, OpError, Rule};
use crate::stage::{Program, Routine, Step};
use crate::types::{Tier, Type};

/// What is wrong with a graph or a step, and where.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum VerifyError {
    /// An operation's operands.
    #[error("node {node} ({scope}): {source}")]
    Op {
        /// Index of the node.
        node: usize,
        /// Its scope.
        scope: String,
        /// What does not fit.
        source: OpError,
    },
    /// Anything else, in words.
    #[error("{place}: {message}")]
    Malformed {
        /// The program, node, value or output.
        place: String,
        /// What is wrong.
        message: String,
    },
}

fn malformed<T>(place: impl Into<String>, message: impl Into<String>) -> Result<T, VerifyError> {
    Err(VerifyError::Malformed {
        place: place.into(),
        message: message.into(),
    })
}

impl Graph {
    /// Checks that definitions come before uses, types follow from the operations, names are unique, and that every output that
    /// takes over an input's storage gets there in place.
    ///
    /// # Errors
    /// The first thing that does not hold.
    pub fn verify(&self) -> Result<(), VerifyError> {
        self.verify_inputs()?;
        let mut defined: Vec<bool> = self
            .values
            .iter()
            .map(|value| matches!(value.source, Source::Input(_)))
            .collect();
        let mut operands: Vec<Type> = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            let place = || format!("node {index} ({} {})", node.scope, node.op.name());
            for &input in &node.inputs {
                if !defined.get(input.index()).copied().unwrap_or(false) {
                    return malformed(place(), format!("uses value {} before it is made", input.0));
                }
            }
            operands.clear();
            operands.extend(node.inputs.iter().map(|&v| self.ty(v).clone()));
            let transfer = matches!(node.op, Op::Fetch(_) | Op::Store(_) | Op::Settle(_));
            if !transfer && let Some(far) = operands.iter().position(|ty| ty.tier == Tier::Lower) {
                return malformed(place(), format!("operand {far} is on the lower tier: fetch it first"));
            }
            let types = node.op.infer(&operands).map_err(|source| VerifyError::Op {
                node: index,
                scope: node.scope.to_string(),
                source,
            })?;
            if types.len() != node.outputs.len() {
                return malformed(
                    place(),
                    format!("has {} results, its rule gives {}", node.outputs.len(), types.len()),
                );
            }
            for (output, (&id, ty)) in node.outputs.iter().zip(types).enumerate() {
                let Some(value) = self.values.get(id.index()) else {
                    return malformed(place(), format!("makes value {}, which does not exist", id.0));
                };
                let source = Source::Node {
                    node: NodeId(index as u32),
                    output,
                };
                if value.source != source || defined[id.index()] {
                    return malformed(place(), format!("value {} is not its result {output}", id.0));
                }
                if value.ty != ty {
                    return malformed(place(), format!("result {output} is {}, its rule gives {ty}", value.ty));
                }
                defined[id.index()] = true;
            }
        }
        if let Some(orphan) = defined.iter().position(|&d| !d) {
            return malformed(format!("value {orphan}"), "no node makes it");
        }
        self.verify_outputs()
    }

    fn verify_inputs(&self) -> Result<(), VerifyError> {
        let mut names = HashSet::new();
        for (_, value, _) in self.inputs() {
            if value.name.is_empty() || !names.insert(&*value.name) {
                return malformed(format!("input \"{}\"", value.name), "inputs need unique names");
            }
        }
        Ok(())
    }

    fn verify_outputs(&self) -> Result<(), VerifyError> {
        let mut names = HashSet::new();
        let mut updated = HashSet::new();
        for output in &self.outputs {
            let place = || format!("output \"{}\"", output.name);
            if output.name.is_empty() || !names.insert(&*output.name) {
                return malformed(place(), "outputs need unique names");
            }
            if output.value.index() >= self.values.len() {
                return malformed(place(), format!("value {} does not exist", output.value.0));
            }
            let OutputKind::Update(input) = output.kind else {
                continue;
            };
            if input.index() >= self.values.len() {
                return malformed(place(), format!("value {} does not exist", input.0));
            }
            match self.binding(input) {
                Some(Binding::Persistent { .. } | Binding::Carried) => {}
                _ => return malformed(place(), "only persistent or carried inputs can be updated"),
            }
            if !updated.insert(input) {
                return malformed(place(), "the input is updated twice");
            }
            if self.in_place_path(output.value, input).is_none() {
                return malformed(
                    place(),
                    format!("its value is not made in place of \"{}\"", self.value(input).name),
                );
            }
        }
        Ok(())
    }

    /// The values from `result` back to `input`, each made in place of the next; `None` if there is no such path.
    pub fn in_place_path(&self, result: ValueId, input: ValueId) -> Option<Vec<ValueId>> {
        let mut path = vec![result];
        let mut at = result;
        while at != input {
            let Source::Node { node, output } = self.value(at).source else {
                return None;
            };
            let node = self.node(node);
            // An accumulating result can lie over its addend or over another operand: the way on is the one that reaches `input`.
            let candidates: Vec<ValueId> = node
                .op
                .aliases()
                .into_iter()
                .filter(|alias| alias.output == output)
                .map(|alias| node.inputs[alias.input])
                .filter(|&from| self.ty(from).bytes() == self.ty(result).bytes())
                .collect();
            if let [only] = candidates[..] {
                at = only;
                path.push(at);
                continue;
            }
            return candidates.into_iter().find_map(|from| {
                let rest = self.in_place_path(from, input)?;
                Some(path.iter().copied().chain(rest).collect())
            });
        }
        Some(path)
    }

    /// Whether a result is only another shape of an operand.
    pub fn view_of(&self, id: ValueId) -> Option<ValueId> {
        let Source::Node { node, output } = self.value(id).source else {
            return None;
        };
        let node = self.node(node);
        node.op
            .aliases()
            .into_iter()
            .find(|alias| alias.output == output && alias.kind == AliasKind::View)
            .map(|alias| node.inputs[alias.input])
    }
}

impl Step {
    /// Checks every graph, and what programs say of the same names.
    ///
    /// # Errors
    /// The first thing that does not hold, with its program.
    pub fn verify(&self) -> Result<(), VerifyError> {
        let mut persistent: HashMap<&str, (&Type, Init)> = HashMap::new();
        for (routine, program) in self.programs() {
            let name = || format!("{}/{}", routine.name, program.name);
            program.graph.verify().map_err(|error| match error {
                VerifyError::Malformed { place, message } => VerifyError::Malformed {
                    place: format!("{}: {place}", name()),
                    message,
                },
                VerifyError::Op { node, scope, source } => VerifyError::Op {
                    node,
                    scope: format!("{}: {scope}", name()),
                    source,
                },
            })?;
            if program.repeat == 0 {
                return malformed(name(), "must repeat at least once");
            }
            for (_, value, binding) in program.graph.inputs() {
                let Binding::Persistent { init, .. } = binding else {
                    continue;
                };
                let seen = persistent.entry(&value.name).or_insert((&value.ty, init));
                if *seen != (&value.ty, init) {
                    return malformed(
                        format!("{}: input \"{}\"", name(), value.name),
                        format!(
                            "is {} {init:?} here, {} {:?} in another program",
                            value.ty, seen.0, seen.1
                        ),
                    );
                }
            }
        }
        self.routines.iter().try_for_each(verify_carried)
    }
}

/// Checks that carried inputs were left by an earlier program of the routine.
fn verify_carried(routine: &Routine) -> Result<(), VerifyError> {
    let mut carried: HashMap<&str, &Type> = HashMap::new();
    for program in &routine.programs {
        let Program { name, graph, .. } = program;
        for (_, value, binding) in graph.inputs() {
            if binding != Binding::Carried {
                continue;
            }
            let place = || format!("{}/{name}: input \"{}\"", routine.name, value.name);
            match carried.get(&*value.name) {
                None => return malformed(place(), "no earlier program of the routine carries it"),
                Some(&ty) if *ty != value.ty => {
                    return malformed(place(), format!("is {} here and {ty} where it is made", value.ty));
                }
                Some(_) => {}
            }
        }
        for output in &graph.outputs {
            if output.kind == OutputKind::Carry {
                carried.insert(&output.name, graph.ty(output.value));
            }
        }
    }
    Ok(())
}
