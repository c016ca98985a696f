//! The blocks of a model, in classes of equal structure.
//!
//! A block is what stands in one scope up to its first numeric part: `model.layers.7.mlp.up_proj` belongs to `model.layers.7`.
//! What a later block or anything else in the forward reads of it (the residual stream) is kept in any case, and so is everything
//! outside of blocks; the rest is for a [`menu`](crate::menu) to decide. Blocks whose operations, types, wiring and saved
//! results are the same, wherever they stand, form a class and share one menu.

use std::collections::BTreeMap;
use std::fmt::Write;

use tightfit_ir::graph::block_name;
use tightfit_ir::{Binding, Graph, Node, NodeId, Op, Phase, Source, Target, ValueId};

/// The blocks of a program that runs a forward and its backward.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Blocks {
    /// In the order of their first blocks.
    pub classes: Vec<Class>,
    /// What blocks read of the forward around them: kept, whatever is chosen inside.
    pub entries: Vec<Entry>,
}

/// A result of the forward that blocks read from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The result.
    pub value: ValueId,
    /// The node that makes it.
    pub node: NodeId,
    /// Which of the node's results it is.
    pub output: usize,
    /// How many.
    pub bytes: u64,
}

/// Blocks of equal structure.
#[derive(Clone, Debug, PartialEq)]
pub struct Class {
    /// Their forward nodes, views aside, in graph order.
    pub parts: Vec<Part>,
    /// In graph order.
    pub blocks: Vec<Block>,
}

/// One block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its scope, e.g. `model.layers.7`.
    pub name: String,
    /// By part: the node.
    pub nodes: Vec<NodeId>,
}

/// One forward node of a block, the same in every block of the class.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Scope within the block and operation, e.g. `mlp.up_proj/linear`.
    pub label: String,
    /// How long it takes to run once more.
    pub seconds: f64,
    /// Its results that only the backward still reads once the block's forward is over: number and bytes.
    pub saved: Vec<(usize, u64)>,
    /// Results of other parts that it reads and that end with the block.
    pub reads: Vec<Read>,
    /// Whether it can run again.
    pub repeatable: bool,
}

/// A part's result, as another part's operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// The part that makes it.
    pub part: usize,
    /// Which of its results.
    pub output: usize,
}

impl Part {
    /// Bytes kept for the backward if all its results are.
    pub fn saved_bytes(&self) -> u64 {
        self.saved.iter().map(|&(_, bytes)| bytes).sum()
    }

    /// Whether the backward reads that result.
    pub fn saves(&self, output: usize) -> bool {
        self.saved.iter().any(|&(saved, _)| saved == output)
    }
}

impl Class {
    /// Bytes that one block keeps if all is kept.
    pub fn saved_bytes(&self) -> u64 {
        self.parts.iter().map(Part::saved_bytes).sum()
    }
}

impl Blocks {
    /// Bytes that all blocks keep if all is kept.
    pub fn saved_bytes(&self) -> u64 {
        self.classes
            .iter()
            .map(|class| class.saved_bytes() * class.blocks.len() as u64)
            .sum()
    }

    /// Whether another program has the same blocks, whatever their numbers there.
    pub fn alike(&self, other: &Self) -> bool {
        let same = |(a, b): (&Class, &Class)| a.parts == b.parts && a.blocks.len() == b.blocks.len();
        self.classes.len() == other.classes.len() && self.classes.iter().zip(&other.classes).all(same)
    }

    /// Finds the blocks of a program.
    pub fn of(graph: &Graph, target: &dyn Target) -> Self {
        let facts = Facts::of(graph);
        let mut members: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, block) in facts.block.iter().enumerate() {
            let view = graph.nodes[index].outputs.iter().all(|&v| facts.bases[v.index()] != v);
            if let (Some(block), false) = (block, view) {
                members.entry(*block).or_default().push(index);
            }
        }
        // Keys spell the structure out, so that equal keys are equal structures and not only probably so.
        let mut classes: Vec<Class> = Vec::new();
        let mut by_key: BTreeMap<String, usize> = BTreeMap::new();
        let mut entries = Vec::new();
        for (block, nodes) in members {
            let key = facts.key(&nodes, &mut entries);
            let class = *by_key.entry(key).or_insert_with(|| {
                classes.push(Class {
                    parts: facts.parts(&nodes, &facts.names[block], target),
                    blocks: Vec::new(),
                });
                classes.len() - 1
            });
            classes[class].blocks.push(Block {
                name: facts.names[block].clone(),
                nodes: nodes.into_iter().map(|index| NodeId(index as u32)).collect(),
            });
        }
        entries.sort_unstable_by_key(|entry: &Entry| entry.value);
        entries.dedup();
        Self { classes, entries }
    }
}

/// What must be known of the graph before blocks can be compared.
struct Facts<'a> {
    graph: &'a Graph,
    /// By value: the value whose bytes it shows.
    bases: Vec<ValueId>,
    /// By node: its block, for forward nodes of blocks.
    block: Vec<Option<usize>>,
    /// By block: its name.
    names: Vec<String>,
    /// By value that is no view: whether something outside of the forward reads it.
    saved: Vec<bool>,
    /// By value that is no view: whether the forward outside of its block reads it, or the session.
    leaves: Vec<bool>,
}

impl<'a> Facts<'a> {
    fn of(graph: &'a Graph) -> Self {
        let mut bases: Vec<ValueId> = (0..graph.values.len() as u32).map(ValueId).collect();
        let mut names: Vec<String> = Vec::new();
        let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
        let mut block = Vec::with_capacity(graph.nodes.len());
        for node in &graph.nodes {
            for &id in &node.outputs {
                if let Some(base) = graph.view_of(id) {
                    bases[id.index()] = bases[base.index()];
                }
            }
            let name = block_name(&node.scope).filter(|_| node.phase == Phase::Forward);
            block.push(name.map(|name| {
                *numbers.entry(name).or_insert_with(|| {
                    names.push(name.to_owned());
                    names.len() - 1
                })
            }));
        }
        let mut facts = Self {
            graph,
            bases,
            block,
            names,
            saved: vec![false; graph.values.len()],
            leaves: vec![false; graph.values.len()],
        };
        facts.find_readers();
        facts
    }

    fn find_readers(&mut self) {
        for (index, node) in self.graph.nodes.iter().enumerate() {
            for input in &node.inputs {
                let base = self.bases[input.index()];
                if node.phase != Phase::Forward {
                    self.saved[base.index()] = true;
                } else if self.block_of(base) != self.block[index] {
                    self.leaves[base.index()] = true;
                }
            }
        }
        for output in &self.graph.outputs {
            self.leaves[self.bases[output.value.index()].index()] = true;
        }
    }

    /// The block whose forward makes a value.
    fn block_of(&self, base: ValueId) -> Option<usize> {
        self.graph.producer(base).and_then(|node| self.block[node.index()])
    }

    /// A node's operands, by base.
    fn operands(&self, node: &'a Node) -> impl Iterator<Item = ValueId> {
        node.inputs.iter().map(|v| self.bases[v.index()])
    }

    /// The structure of a block, spelled out. What it reads of the forward around it is added to `entries`.
    fn key(&self, nodes: &[usize], entries: &mut Vec<Entry>) -> String {
        let graph = self.graph;
        let mut positions: BTreeMap<ValueId, (usize, usize)> = BTreeMap::new();
        let mut outside: Vec<ValueId> = Vec::new();
        let mut key = String::new();
        for (part, &index) in nodes.iter().enumerate() {
            let node = &graph.nodes[index];
            let _ = write!(key, "{:?}(", node.op);
            for base in self.operands(node) {
                if let Some((part, output)) = positions.get(&base) {
                    let _ = write!(key, "{part}.{output},");
                    continue;
                }
                let number = outside.iter().position(|&v| v == base).unwrap_or_else(|| {
                    outside.push(base);
                    outside.len() - 1
                });
                let trained = matches!(
                    graph.value(base).source,
                    Source::Input(Binding::Persistent { trainable: true, .. })
                );
                let _ = write!(key, "outside {number} {} {trained},", graph.ty(base));
                if let Source::Node { node, output } = graph.value(base).source
                    && graph.node(node).phase == Phase::Forward
                {
                    entries.push(Entry {
                        value: base,
                        node,
                        output,
                        bytes: graph.ty(base).bytes(),
                    });
                }
            }
            key.push(')');
            for (output, &id) in node.outputs.iter().enumerate() {
                positions.insert(id, (part, output));
                let (saved, leaves) = (self.saved[id.index()], self.leaves[id.index()]);
                let _ = write!(key, "{} {saved} {leaves},", graph.ty(id));
            }
            key.push('\n');
        }
        key
    }

    fn parts(&self, nodes: &[usize], block: &str, target: &dyn Target) -> Vec<Part> {
        let graph = self.graph;
        let position = |base: ValueId| {
            let Source::Node { node, output } = graph.value(base).source else {
                return None;
            };
            let part = nodes.iter().position(|&index| index == node.index())?;
            (!self.leaves[base.index()]).then_some(Read { part, output })
        };
        let part = |&index: &usize| {
            let node = &graph.nodes[index];
            let within = node.scope.get(block.len() + 1..).unwrap_or("");
            let ends = |&(_, id): &(usize, &ValueId)| self.saved[id.index()] && !self.leaves[id.index()];
            let results = node.outputs.iter().enumerate().filter(ends);
            Part {
                label: [within, node.op.name()].join("/").trim_start_matches('/').to_owned(),
                seconds: target.seconds(&node.op, &graph.operand_types(node), &graph.result_types(node)),
                saved: results.map(|(output, &id)| (output, graph.ty(id).bytes())).collect(),
                reads: self.operands(node).filter_map(position).collect(),
                repeatable: !matches!(node.op, Op::LinearCrossEntropy(_)),
            }
        };
        nodes.iter().map(part).collect()
    }
}
