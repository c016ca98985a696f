//! How weights are stored: trained ones in 32 or 16 bits, frozen ones as their file has them or quantised to 8 or 4 bits.
//!
//! Saves what a weight is smaller than its `f32`: half in `bf16`, about three quarters in `int8`, seven eighths in `nf4`. Nothing else
//! changes in the graph, as products read weights of any kind and decode tiles of them while they compute. Costs the decoding, and for a
//! quantised base what it loses (docs/quantisation.md has the figures).
//!
//! A base that is taken as it is in its file costs nothing: the numbers are the same. Legal for frozen weights only where it quantises,
//! as an update would be lost in the steps between the few values that there are. Embeddings and heads stay unless asked for: they are
//! the most sensitive.
//!
//! NF4 and training through a frozen quantised base: Dettmers et al. 2023 (QLoRA), arXiv:2305.14314.

use tightfit_ir::op::Op;
use tightfit_ir::{Binding, Block, DType, Forward, Graph, Role, Source, ValueId};

use crate::PassError;
use crate::lora::is_head;

const PASS: &str = "quantize";

/// How weights are stored.
#[derive(Clone, Copy)]
pub struct Storage<'a> {
    /// Weights that are trained: `f32`, `bf16` or `f16`.
    pub trained: DType,
    /// Frozen matrices of linear layers in that format, where they fit it.
    pub base: Option<Block>,
    /// Whether frozen embeddings and heads are stored like those, too.
    pub tables: bool,
    /// All other frozen weights in that dtype, if they are numbers in their file; `None` leaves them as they are there.
    pub floats: Option<DType>,
    /// How its file stores a weight, by the weight's name; `None` for one that is made afresh, or whose file decides nothing.
    pub file: &'a dyn Fn(&str) -> Option<DType>,
}

/// What a weight is used for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Uses {
    /// As the matrix of a linear layer.
    linear: bool,
    /// As an embedding, or as the head of a loss.
    table: bool,
    /// As anything that only numbers can be.
    other: bool,
}

/// The model with its weights stored so.
///
/// # Errors
/// A trained weight would have to be quantised.
pub fn quantize(mut forward: Forward, storage: &Storage<'_>) -> Result<Forward, PassError> {
    let graph = &mut forward.graph;
    for (id, uses) in uses(graph) {
        let value = graph.value(id);
        let Source::Input(Binding::Persistent { trainable, .. }) = value.source else {
            continue;
        };
        let cols = value.ty.cols();
        let fits = |block: &Block| !uses.other && cols.is_multiple_of(block.row_multiple());
        let dtype = if trainable || value.role == Role::Adapter {
            storage.trained
        } else {
            let wanted = uses.linear && !uses.table || uses.table && storage.tables;
            match storage.base.filter(|_| wanted).filter(fits) {
                Some(block) => DType::Block(block),
                None => match (storage.file)(&value.name) {
                    Some(DType::Block(block)) if fits(&block) => DType::Block(block),
                    Some(stored) if stored.is_float() => storage.floats.unwrap_or(stored),
                    _ => storage.floats.unwrap_or(DType::F32),
                },
            }
        };
        if trainable && !dtype.is_float() {
            let message = format!(
                "`{}` is trained, which {} weights cannot be: train adapters beside them (--method lora)",
                value.name,
                dtype.name()
            );
            return Err(PassError::illegal(PASS, message));
        }
        graph.values[id.index()].ty.dtype = dtype;
    }
    forward.graph.verify().map_err(PassError::verify(PASS))?;
    Ok(forward)
}

/// Every weight with what it is used for.
fn uses(graph: &Graph) -> Vec<(ValueId, Uses)> {
    let mut uses = vec![Uses::default(); graph.values.len()];
    for node in &graph.nodes {
        for (operand, id) in node.inputs.iter().enumerate() {
            let uses = &mut uses[id.index()];
            match (&node.op, operand) {
                (Op::Linear(_), 1) if is_head(graph, node) => uses.table = true,
                (Op::Linear(_), 1) => uses.linear = true,
                (Op::Embedding(_) | Op::LinearCrossEntropy(_), 1) => uses.table = true,
                _ => uses.other = true,
            }
        }
    }
    let weights = graph.inputs().filter(|(_, value, binding)| {
        let persistent = matches!(binding, Binding::Persistent { .. });
        persistent && matches!(value.role, Role::Weight | Role::Adapter)
    });
    weights.map(|(id, ..)| (id, uses[id.index()])).collect()
}
