//! Mixed precision: activations, and the gradients of activations, in `bf16` or `f16`.
//!
//! Saves half of what is kept for the backward, and half of the traffic; products run on 16-bit instructions where there are some.
//! Costs precision where numbers are stored: every operation still sums in `f32` inside, weights keep the type that they are stored
//! in, and what must not be rounded is not. One table, [`low_operands`], says what that is, operation by operation.
//!
//! `f16` reaches only 65504 and loses small gradients to zero: it wants `loss_scale`. `bf16` has the range of `f32`.
//!
//! Micikevicius et al. 2018, arXiv:1710.03740; Kalamkar et al. 2019, arXiv:1905.12322.

use std::collections::HashMap;

use tightfit_ir::op::{Cast, Op, Rule};
use tightfit_ir::{DType, Forward, Graph, OutputKind, Phase, Role, ValueId};

use crate::PassError;

const PASS: &str = "autocast";

/// The policy: which operands an operation of a model reads in 16 bits; results follow them. All else stays as it is.
///
/// | operation | in 16 bits | in `f32` inside, and what stays `f32` |
/// |---|---|---|
/// | `embedding` | rows | |
/// | `linear` | x, addend, y | sums; weight and bias as they are stored |
/// | `rms_norm`, `layer_norm` | x, y | mean, variance, their root; weights as they are stored |
/// | `rope` | x, y | sines and cosines |
/// | `attention`, `cached_attention` | q, k, v, o | scores, softmax, log-sum-exp |
/// | `kv_append` | rows, cache | |
/// | `swiglu`, `gelu`, `add`, `dropout`, `scale`, rows | all | arithmetic |
/// | `linear_cross_entropy` | x | logits, softmax, loss |
/// | `cross_entropy` | logits | softmax, loss |
fn low_operands(op: &Op) -> &'static [usize] {
    match op {
        Op::Linear(_)
        | Op::RmsNorm(_)
        | Op::LayerNorm(_)
        | Op::Rope(_)
        | Op::Gelu(_)
        | Op::Dropout(_)
        | Op::Scale(_)
        | Op::SliceRows(_)
        | Op::PadRows(_)
        | Op::LinearCrossEntropy(_)
        | Op::SoftmaxCrossEntropy(_) => &[0],
        Op::KvAppend(_) => &[1],
        Op::Add(_) | Op::SwiGlu(_) => &[0, 1],
        Op::Attention(_) | Op::CachedAttention(_) => &[0, 1, 2],
        // What has one operand takes it as it is.
        Op::Cast(_) | Op::Reshape(_) => &[],
        // Tables of indices and angles; what models do not have.
        Op::Embedding(_)
        | Op::RopeTable(_)
        | Op::Zero(_)
        | Op::AttentionBackward(_)
        | Op::SoftmaxCrossEntropyBackward(_)
        | Op::EmbeddingBackward(_)
        | Op::Fetch(_)
        | Op::GeluBackward(_)
        | Op::LayerNormBackward(_)
        | Op::LinearBackwardInput(_)
        | Op::LinearBackwardWeight(_)
        | Op::BiasBackward(_)
        | Op::Adafactor(_)
        | Op::AdamW(_)
        | Op::AdamW8bit(_)
        | Op::Apollo(_)
        | Op::AppliedStep(_)
        | Op::GradientFactor(_)
        | Op::Lion(_)
        | Op::Sgd(_)
        | Op::UpdateLossScale(_)
        | Op::GlobalNorm(_)
        | Op::Norm(_)
        | Op::RmsNormBackward(_)
        | Op::Settle(_)
        | Op::Store(_)
        | Op::SwiGluBackward(_) => &[],
    }
}

/// The model with activations of that dtype; `f32` changes nothing.
///
/// # Errors
/// An operation cannot work on it.
pub fn autocast(forward: Forward, dtype: DType) -> Result<Forward, PassError> {
    if dtype == DType::F32 {
        return Ok(forward);
    }
    let old = forward.graph;
    let mut cast = Casts {
        graph: Graph::new(),
        made: HashMap::new(),
    };
    let mut now: Vec<Option<ValueId>> = vec![None; old.values.len()];
    for (id, value, _) in old.inputs() {
        let mut value = value.clone();
        // Caches hold what activations are.
        if value.role == Role::KvCache {
            value.ty.dtype = dtype;
        }
        now[id.index()] = Some(cast.graph.push_value(value));
    }
    for node in &old.nodes {
        let mut op = node.op.clone();
        // Rows of an activation are what they are rows of.
        if let Op::Embedding(embedding) = &mut op {
            embedding.dtype = dtype;
        }
        // Definitions come before uses.
        let mut operands: Vec<ValueId> = node.inputs.iter().filter_map(|id| now[id.index()]).collect();
        let addend = op
            .accumulating(0)
            .filter(|(same, _)| *same == op)
            .map(|(_, addend)| addend);
        for &operand in low_operands(&op).iter().chain(&addend) {
            operands[operand] = cast.to(operands[operand], dtype, &node.scope, node.phase)?;
        }
        let made = cast
            .graph
            .push(op, &operands, &node.scope, node.phase, Role::Activation);
        let made = made.map_err(PassError::op(PASS, &node.scope))?;
        for (&before, after) in node.outputs.iter().zip(made) {
            cast.graph.values[after.index()].role = old.value(before).role;
            now[before.index()] = Some(after);
        }
    }
    for output in &old.outputs {
        let Some(mut value) = now[output.value.index()] else {
            continue;
        };
        let kind = match output.kind {
            OutputKind::Update(input) => now[input.index()].map_or(OutputKind::Read, OutputKind::Update),
            kind => kind,
        };
        if kind == OutputKind::Read {
            value = cast.to(value, DType::F32, &output.name, Phase::Forward)?;
        }
        cast.graph.output(&output.name, value, kind);
    }
    cast.graph.verify().map_err(PassError::verify(PASS))?;
    Ok(Forward { graph: cast.graph })
}

/// The new graph, and what was cast in it.
struct Casts {
    graph: Graph,
    made: HashMap<(ValueId, DType), ValueId>,
}

impl Casts {
    /// A value in that dtype, cast once.
    fn to(&mut self, value: ValueId, dtype: DType, scope: &str, phase: Phase) -> Result<ValueId, PassError> {
        if self.graph.ty(value).dtype == dtype {
            return Ok(value);
        }
        if let Some(&there) = self.made.get(&(value, dtype)) {
            return Ok(there);
        }
        let op = Op::from(Cast { dtype });
        let made = self.graph.push(op, &[value], &scope.into(), phase, Role::Activation);
        let made = made.map_err(PassError::op(PASS, scope))?[0];
        self.made.insert((value, dtype), made);
        Ok(made)
    }
}
