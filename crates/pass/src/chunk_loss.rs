//! The language-model head and its loss over chunks of rows, so that logits never exist whole.
//!
//! Logits are the largest activation of most models: a row has `vocab_size` of them. With a chunk of `n` rows, `n·vocab_size` exist
//! at one time, and a loss that stands after a `linear` of its own becomes one operation with it. The gradients are made chunk by
//! chunk while the logits are there, so nothing is computed twice; what it costs is that the weight's gradient is gone over once
//! for each chunk, and products of few rows. The loss is that of whole logits up to rounding: sums over rows are cut elsewhere, so the
//! chunk is an attribute of the operation and stands in the plan. Liger Kernel, Hsu et al. 2024, arXiv:2410.10989.
//!
//! Illegal where no loss is made from a linear layer's logits: there are none; the head has a bias, which the operation has not; or
//! something else reads the logits, which must then exist.

use tightfit_ir::op::{Accumulate, Linear, LinearCrossEntropy};
use tightfit_ir::{Forward, Graph, NodeId, Op, Type, ValueId};

use crate::{PassError, dead_code};

const PASS: &str = "chunk_loss";

/// Rows of a chunk from which on more of them save little time. Each chunk packs the weight twice and goes over its gradient once,
/// so what chunks cost beside their products is in inverse proportion to their rows, whatever the other sizes. Measured with
/// gradients on one thread, in proportion to 512 rows: 256 take 5–8 % longer, 128 take 16 %, 64 take 41–47 %, 32 twice as long.
const EFFICIENT_ROWS: u64 = 512;

/// How many rows' logits exist at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossChunk {
    /// That many, at least 1; all of them where the model has no more.
    Rows(u64),
    /// From the shapes alone: as many rows as have logits of the size of the loss's input, `rows·hidden_size / vocab_size`, but at
    /// least 512, from which on products are efficient. The chunks are then evened out.
    Auto,
}

impl LossChunk {
    /// The chunk for a loss of `x: f32[rows, hidden_size]` and `weight: f32[vocab_size, hidden_size]`; never 0.
    fn rows(self, x: &Type, weight: &Type) -> u64 {
        let rows = x.rows().max(1);
        match self {
            Self::Rows(chunk) => chunk.clamp(1, rows),
            Self::Auto => {
                let as_input = x.shape.elements() / weight.rows().max(1);
                let chunks = rows.div_ceil(as_input.max(EFFICIENT_ROWS));
                rows.div_ceil(chunks)
            }
        }
    }
}

/// The same model with every language-model loss made in chunks.
///
/// # Errors
/// The chunk is 0, or the model has no such loss.
pub fn chunk_loss(forward: Forward, chunk: LossChunk) -> Result<Forward, PassError> {
    if chunk == LossChunk::Rows(0) {
        return Err(PassError::illegal(PASS, "a chunk has at least 1 row"));
    }
    let mut graph = forward.graph;
    let mut chunked = false;
    for index in 0..graph.nodes.len() {
        fuse(&mut graph, NodeId(index as u32));
        let node = &graph.nodes[index];
        let rows = match node.op {
            Op::LinearCrossEntropy(_) => chunk.rows(graph.ty(node.inputs[0]), graph.ty(node.inputs[1])),
            _ => continue,
        };
        if let Op::LinearCrossEntropy(op) = &mut graph.nodes[index].op {
            op.chunk = rows;
            chunked = true;
        }
    }
    if !chunked {
        return Err(PassError::illegal(
            PASS,
            "the model has no loss of logits that a linear layer without bias makes for it alone",
        ));
    }
    let graph = dead_code(&graph);
    graph.verify().map_err(PassError::verify(PASS))?;
    Ok(Forward { graph })
}

/// Turns a loss of whole logits into one operation with the linear layer that makes them, which is left without a reader, where
/// nothing else reads them or their log-sum-exp.
fn fuse(graph: &mut Graph, loss: NodeId) {
    const HEAD: Linear = Linear {
        bias: false,
        accumulate: Accumulate::NONE,
    };
    let node = graph.node(loss);
    let (Op::SoftmaxCrossEntropy(op), &[logits, targets, token_count], &[_, lse]) =
        (&node.op, &node.inputs[..], &node.outputs[..])
    else {
        return;
    };
    let Some(head) = graph.producer(logits).map(|head| graph.node(head)) else {
        return;
    };
    let (Op::Linear(linear), &[x, weight]) = (&head.op, &head.inputs[..]) else {
        return;
    };
    if *linear != HEAD || reads(graph, logits) > 1 || reads(graph, lse) > 0 {
        return;
    }
    let fused = LinearCrossEntropy::new(1, op.ignore_index);
    let scope = head.scope.clone();
    let node = &mut graph.nodes[loss.index()];
    node.op = fused.into();
    node.inputs = vec![x, weight, targets, token_count];
    node.outputs.truncate(1);
    node.scope = scope;
}

/// How often nodes and results read a value.
fn reads(graph: &Graph, value: ValueId) -> usize {
    let operands = graph.nodes.iter().flat_map(|node| &node.inputs);
    let results = graph.outputs.iter().map(|output| &output.value);
    operands.chain(results).filter(|&&read| read == value).count()
}
