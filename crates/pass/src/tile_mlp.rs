//! MLPs over tiles of rows, so that the wide activations inside exist for one tile at a time.
//!
//! An MLP treats each row alone, and is several times as wide inside as at its ends. For tiles of `n` rows this pass takes `n` rows
//! of its input (`slice_rows`), runs the layers on them, and puts their result into the whole one (`pad_rows`, in place onto the
//! tiles before and, for the first tile, onto the residual stream). Arctic Long Sequence Training, Bekman et al. 2025,
//! arXiv:2506.13996, calls it tiled compute.
//!
//! **Saves** the inside of an MLP for all rows but one tile's: in evaluation at once. **In training it saves nothing by itself**, since
//! the backward reads what every tile has saved; with `recompute`, which makes a tile's inside again just before that tile's
//! backward, forward and backward hold one tile each. **Costs** a copy of the input's and the result's rows, a reading of the
//! weights for each tile (tiles of a few hundred rows hide it), a pass over the weights' gradients for each tile, and nodes: it is
//! unrolled, so it makes no more than 256 tiles.
//!
//! **Exact** up to rounding: inside, rows have the bits they had. The residual is added after a product's sum instead of first, sums
//! over rows (the gradients of weights) are cut at tiles, and a result of `-0.0` becomes `0.0`.
//!
//! What is tiled is found by structure and not by name: a region that ends in one result, is made of `linear`, `swiglu`, `gelu`,
//! `add`, and an adapter's `scale` and `dropout` alone, has an activation inside, and whose inner values nothing else reads. **Illegal** where the model has none.

use std::collections::{BTreeSet, BinaryHeap, HashMap};

use tightfit_ir::op::{Accumulate, PadRows, Rule, SliceRows};
use tightfit_ir::{Forward, Graph, Node, NodeId, Op, OutputKind, Phase, ValueId};

use crate::PassError;

const PASS: &str = "tile_mlp";

/// The most tiles of one MLP: tiles are nodes, and planning takes time and memory for each.
const MAX_TILES: u64 = 256;

/// The same model with the rows of every MLP in tiles of `rows`; the last tile may have fewer. An MLP with no more rows stays as it is.
///
/// # Errors
/// `rows` is 0 or makes more than 256 tiles, or the model has no MLP.
pub fn tile_mlp(forward: Forward, rows: u64) -> Result<Forward, PassError> {
    if rows == 0 {
        return Err(PassError::illegal(PASS, "a tile has at least 1 row"));
    }
    let old = forward.graph;
    let regions = regions(&old);
    if regions.is_empty() {
        return Err(PassError::illegal(
            PASS,
            "the model has no MLP: no activation between linear layers that nothing else reads",
        ));
    }
    let mut rewrite = Rewrite::new(&old);
    let mut tiled = vec![false; old.nodes.len()];
    let mut exits = HashMap::new();
    for region in regions {
        let total = old.ty(region.result(&old)).dim(0);
        if total <= rows {
            continue;
        }
        if total.div_ceil(rows) > MAX_TILES {
            return Err(PassError::illegal(
                PASS,
                format!(
                    "tiles of {rows} rows cut {total} rows into {} parts, of which there may be {MAX_TILES}: use at least {}",
                    total.div_ceil(rows),
                    total.div_ceil(MAX_TILES)
                ),
            ));
        }
        region.nodes.iter().for_each(|&node| tiled[node] = true);
        exits.insert(region.exit(), region);
    }
    for (index, node) in old.nodes.iter().enumerate() {
        match exits.get(&index) {
            Some(region) => rewrite.tiles(region, rows)?,
            None if tiled[index] => {}
            None => rewrite.node(node)?,
        }
    }
    let graph = rewrite.finish();
    graph.verify().map_err(PassError::verify(PASS))?;
    Ok(Forward { graph })
}

/// Nodes that treat every row alone, with one result that leaves them.
struct Region {
    /// In the graph's order. The last one makes the result.
    nodes: Vec<usize>,
    /// The operand of the last node that comes from outside and is only added to its result.
    residual: Option<usize>,
}

impl Region {
    fn exit(&self) -> usize {
        self.nodes[self.nodes.len() - 1]
    }

    fn result(&self, graph: &Graph) -> ValueId {
        graph.nodes[self.exit()].outputs[0]
    }
}

/// The operands of a node that have the rows of its result, if it treats every row alone.
fn row_operands(graph: &Graph, node: &Node) -> Option<Vec<usize>> {
    let operands = match &node.op {
        Op::Linear(op) => {
            let addend = op.accumulate.operand(2 + usize::from(op.bias), 0);
            [0].into_iter().chain(addend).collect()
        }
        Op::SwiGlu(_) | Op::Add(_) => vec![0, 1],
        Op::Gelu(_) | Op::Scale(_) | Op::Dropout(_) => vec![0],
        _ => return None,
    };
    // Elementwise operations take any rank.
    let matrix = graph.ty(node.outputs[0]).shape.dims().len() == 2;
    matrix.then_some(operands)
}

/// The largest regions that have an activation inside.
fn regions(graph: &Graph) -> Vec<Region> {
    let mut readers: Vec<Vec<usize>> = vec![Vec::new(); graph.values.len()];
    for (index, node) in graph.nodes.iter().enumerate() {
        node.inputs.iter().for_each(|v| readers[v.index()].push(index));
    }
    let mut found = Vec::new();
    let mut taken = vec![false; graph.nodes.len()];
    for exit in (0..graph.nodes.len()).rev() {
        if taken[exit] || row_operands(graph, &graph.nodes[exit]).is_none() {
            continue;
        }
        let nodes = grow(graph, &readers, exit);
        let made_inside = |value: &ValueId| graph.producer(*value).is_some_and(|node| nodes.contains(&node.index()));
        let has_activation = nodes.iter().filter(|&&index| index != exit).any(|&index| {
            let node = &graph.nodes[index];
            matches!(node.op, Op::SwiGlu(_) | Op::Gelu(_)) && node.inputs.iter().any(made_inside)
        });
        if !has_activation {
            continue;
        }
        let last = &graph.nodes[exit];
        let outside = |operand: &usize| !made_inside(&last.inputs[*operand]);
        let residual = match &last.op {
            Op::Linear(op) => op.accumulate.operand(2 + usize::from(op.bias), 0).filter(outside),
            Op::Add(_) => [0, 1].into_iter().find(outside),
            _ => None,
        };
        nodes.iter().for_each(|&index| taken[index] = true);
        found.push(Region {
            nodes: nodes.into_iter().collect(),
            residual,
        });
    }
    found
}

/// The largest region that ends in node `exit`.
fn grow(graph: &Graph, readers: &[Vec<usize>], exit: usize) -> BTreeSet<usize> {
    let mut nodes = BTreeSet::from([exit]);
    let mut next = BinaryHeap::new();
    let enqueue = |next: &mut BinaryHeap<usize>, node: &Node| {
        next.extend(node.inputs.iter().filter_map(|v| graph.producer(*v)).map(NodeId::index));
    };
    enqueue(&mut next, &graph.nodes[exit]);
    // Readers come after what they read: the last candidate's are all decided.
    while let Some(index) = next.pop() {
        let node = &graph.nodes[index];
        if nodes.contains(&index) || row_operands(graph, node).is_none() {
            continue;
        }
        let value = node.outputs[0];
        let by_rows = |reader: &usize| {
            let reader = &graph.nodes[*reader];
            let rows = row_operands(graph, reader).unwrap_or_default();
            let mut read = (0..reader.inputs.len()).filter(|&operand| reader.inputs[operand] == value);
            read.all(|operand| rows.contains(&operand))
        };
        let leaves = graph.outputs.iter().any(|output| output.value == value);
        let mut read = readers[value.index()].iter();
        if !leaves && read.all(|reader| nodes.contains(reader) && by_rows(reader)) {
            nodes.insert(index);
            enqueue(&mut next, node);
        }
    }
    nodes
}

/// A graph on its way into another.
struct Rewrite<'a> {
    old: &'a Graph,
    new: Graph,
    /// What old values have become; what is inside of a tiled region becomes nothing.
    values: HashMap<ValueId, ValueId>,
}

impl<'a> Rewrite<'a> {
    fn new(old: &'a Graph) -> Self {
        let mut new = Graph::new();
        let inputs = old.inputs();
        let values = inputs.map(|(id, value, _)| (id, new.push_value(value.clone())));
        let values = values.collect();
        Self { old, new, values }
    }

    /// Copies a node.
    fn node(&mut self, node: &Node) -> Result<(), PassError> {
        let inputs: Vec<ValueId> = node.inputs.iter().map(|v| self.values[v]).collect();
        let made = self.push(node.op.clone(), &inputs, node)?;
        for (&old, &new) in node.outputs.iter().zip(&made) {
            self.new.values[new.index()].role = self.old.value(old).role;
            self.values.insert(old, new);
        }
        Ok(())
    }

    /// Emits a region tile by tile.
    fn tiles(&mut self, region: &Region, rows: u64) -> Result<(), PassError> {
        let exit = &self.old.nodes[region.exit()];
        let result = region.result(self.old);
        let total = self.old.ty(result).dim(0);
        let mut whole = region.residual.map(|operand| self.values[&exit.inputs[operand]]);
        for start in (0..total).step_by(usize::try_from(rows).unwrap_or(usize::MAX)) {
            let tile = self.tile(region, start, rows.min(total - start))?;
            let mut pad = Op::from(PadRows {
                start,
                total,
                accumulate: Accumulate::NONE,
            });
            let mut inputs = vec![tile];
            if let (Some(whole), Some((onto, addend))) = (whole, pad.accumulating(0)) {
                pad = onto;
                inputs.insert(addend, whole);
            }
            whole = Some(self.push(pad, &inputs, exit)?[0]);
        }
        self.values.extend(whole.map(|whole| (result, whole)));
        Ok(())
    }

    /// Emits a region for some rows; its result for these, without the residual.
    fn tile(&mut self, region: &Region, start: u64, rows: u64) -> Result<ValueId, PassError> {
        let old = self.old;
        // What old values have become in this tile.
        let mut tile: HashMap<ValueId, ValueId> = HashMap::new();
        for &index in &region.nodes {
            let node = &old.nodes[index];
            let by_rows = row_operands(old, node).unwrap_or_default();
            let residual = region.residual.filter(|_| index == region.exit());
            let mut inputs = Vec::new();
            for (operand, value) in node.inputs.iter().enumerate().filter(|(i, _)| Some(*i) != residual) {
                if !by_rows.contains(&operand) {
                    inputs.push(self.values[value]);
                    continue;
                }
                let input = match tile.get(value) {
                    Some(&made) => made,
                    None => self.push(SliceRows { start, rows }, &[self.values[value]], node)?[0],
                };
                tile.insert(*value, input);
                inputs.push(input);
            }
            let made = match (&node.op, residual) {
                (Op::Add(_), Some(_)) => inputs[0],
                (Op::Linear(op), Some(_)) => {
                    let mut op = op.clone();
                    op.accumulate = Accumulate::NONE;
                    self.push(op, &inputs, node)?[0]
                }
                (Op::Dropout(op), _) => {
                    let mut op = op.clone();
                    op.first_row += start;
                    self.push(op, &inputs, node)?[0]
                }
                (op, _) => self.push(op.clone(), &inputs, node)?[0],
            };
            tile.insert(node.outputs[0], made);
        }
        Ok(tile[&region.result(old)])
    }

    /// Appends a node in the place of an old one.
    fn push(&mut self, op: impl Into<Op>, inputs: &[ValueId], of: &Node) -> Result<Vec<ValueId>, PassError> {
        let role = self.old.value(of.outputs[0]).role;
        self.new
            .push(op.into(), inputs, &of.scope, Phase::Forward, role)
            .map_err(PassError::op(PASS, &of.scope))
    }

    /// The new graph with the old one's results.
    fn finish(mut self) -> Graph {
        for output in &self.old.outputs {
            let kind = match output.kind {
                OutputKind::Update(input) => OutputKind::Update(self.values[&input]),
                kind => kind,
            };
            self.new.output(&output.name, self.values[&output.value], kind);
        }
        self.new
    }
}
