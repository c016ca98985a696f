//! The builder: one method a layer, names from nested scopes.
//!
//! Activations are matrices of one row per token, all sequences of the batch one after the other.

use std::sync::Arc;

use tightfit_ir::op::{
    Accumulate, Add, Approximate, Attention, Embedding, Gelu, KvAppend, LayerNorm, Linear, LinearCrossEntropy, Reshape,
    RmsNorm, Rope, RopeTable, Rule, SoftmaxCrossEntropy, SwiGlu,
};
use tightfit_ir::{Binding, Forward, Graph, Init, Op, OutputKind, Phase, Role, Shape, Type, ValueId};

use crate::error::ModelError;

/// `ignore_index`: rows with this target count nothing in the loss, as in PyTorch.
pub const IGNORE_INDEX: i32 = -100;

/// Builds a [`Forward`] layer by layer.
#[derive(Debug)]
pub struct Builder {
    graph: Graph,
    scope: Vec<String>,
    init: Init,
    frozen: bool,
}

impl Builder {
    /// An empty model whose matrices start normal with standard deviation `std` (`initializer_range`).
    pub fn new(std: f64) -> Self {
        Self {
            graph: Graph::new(),
            scope: Vec::new(),
            init: Init::Normal(std),
            frozen: false,
        }
    }

    /// Names inside are prefixed by `name.`.
    pub fn scope<T>(&mut self, name: &str, build: impl FnOnce(&mut Self) -> T) -> T {
        self.scope.push(name.to_owned());
        let result = build(self);
        self.scope.pop();
        result
    }

    /// Weights made inside get no gradient.
    pub fn frozen<T>(&mut self, build: impl FnOnce(&mut Self) -> T) -> T {
        let before = std::mem::replace(&mut self.frozen, true);
        let result = build(self);
        self.frozen = before;
        result
    }

    /// Data that the caller feeds before each run.
    pub fn input(&mut self, name: &str, ty: Type) -> ValueId {
        self.graph.input(name, ty, Role::Input, Binding::Fed)
    }

    /// A weight, named within the current scope.
    pub fn weight(&mut self, name: &str, shape: impl Into<Shape>, init: Init) -> ValueId {
        let binding = Binding::Persistent {
            init,
            trainable: !self.frozen,
        };
        let name = self.path(name);
        self.graph.input(&name, Type::f32(shape), Role::Weight, binding)
    }

    /// A matrix with the model's usual initialisation.
    pub fn matrix(&mut self, name: &str, rows: u64, cols: u64) -> ValueId {
        self.weight(name, [rows, cols], self.init)
    }

    /// A layer `name` with its weight: rows of the table by token id.
    ///
    /// # Errors
    /// The operands do not fit; so for every layer below.
    pub fn embedding(
        &mut self,
        name: &str,
        ids: ValueId,
        vocab_size: u64,
        hidden_size: u64,
    ) -> Result<[ValueId; 2], ModelError> {
        self.scope(name, |b| {
            let weight = b.matrix("weight", vocab_size, hidden_size);
            Ok([b.push(Embedding::default(), &[ids, weight])?, weight])
        })
    }

    /// A linear layer without bias, `out` columns wide.
    pub fn linear(&mut self, name: &str, x: ValueId, out: u64) -> Result<ValueId, ModelError> {
        self.linear_with(name, x, out, false, None)
    }

    /// A linear layer with bias.
    pub fn linear_bias(&mut self, name: &str, x: ValueId, out: u64) -> Result<ValueId, ModelError> {
        self.linear_with(name, x, out, true, None)
    }

    /// A linear layer without bias whose result is added to the residual stream.
    pub fn linear_onto(&mut self, name: &str, x: ValueId, residual: ValueId) -> Result<ValueId, ModelError> {
        let out = self.graph.ty(residual).cols();
        self.linear_with(name, x, out, false, Some(residual))
    }

    /// A linear layer, with bias or without, whose result may be added to the residual stream.
    pub fn linear_with(
        &mut self,
        name: &str,
        x: ValueId,
        out: u64,
        bias: bool,
        residual: Option<ValueId>,
    ) -> Result<ValueId, ModelError> {
        let inner = self.graph.ty(x).cols();
        self.scope(name, |b| {
            let mut operands = vec![x, b.matrix("weight", out, inner)];
            if bias {
                operands.push(b.weight("bias", [out], Init::Zeros));
            }
            let own = Linear {
                bias,
                accumulate: Accumulate::NONE,
            };
            let mut op = Op::from(own);
            if let (Some(residual), Some((onto, addend))) = (residual, op.accumulating(0)) {
                op = onto;
                operands.insert(addend, residual);
            }
            b.push(op, &operands)
        })
    }

    /// `x·weightᵀ` with a weight that is already there: a tied head.
    pub fn product(&mut self, x: ValueId, weight: ValueId) -> Result<ValueId, ModelError> {
        let op = Linear {
            bias: false,
            accumulate: Accumulate::NONE,
        };
        self.push(op, &[x, weight])
    }

    /// Some rows of `x`, by their numbers.
    pub fn rows(&mut self, x: ValueId, numbers: ValueId) -> Result<ValueId, ModelError> {
        let dtype = self.graph.ty(x).dtype;
        self.push(Embedding { dtype }, &[numbers, x])
    }

    /// RMSNorm with its weight.
    pub fn rms_norm(&mut self, name: &str, x: ValueId, eps: f64) -> Result<ValueId, ModelError> {
        let size = self.graph.ty(x).cols();
        self.scope(name, |b| {
            let weight = b.weight("weight", [size], Init::Ones);
            b.push(RmsNorm { eps }, &[x, weight])
        })
    }

    /// LayerNorm with its weight and bias.
    pub fn layer_norm(&mut self, name: &str, x: ValueId, eps: f64) -> Result<ValueId, ModelError> {
        let size = self.graph.ty(x).cols();
        self.scope(name, |b| {
            let weight = b.weight("weight", [size], Init::Ones);
            let bias = b.weight("bias", [size], Init::Zeros);
            b.push(LayerNorm { eps }, &[x, weight, bias])
        })
    }

    /// Cosines and sines for every row.
    pub fn rope_table(&mut self, positions: ValueId, head_dim: u64, theta: f64) -> Result<ValueId, ModelError> {
        let table = RopeTable {
            head_dim,
            theta,
            scaling: None,
        };
        self.push(table, &[positions])
    }

    /// Rotary position embedding of every head of `x`.
    pub fn rope(&mut self, x: ValueId, table: ValueId) -> Result<ValueId, ModelError> {
        self.push(Rope { inverse: false }, &[x, table])
    }

    /// Causal grouped-query attention inside documents.
    pub fn attention(
        &mut self,
        op: Attention,
        q: ValueId,
        k: ValueId,
        v: ValueId,
        doc_start: ValueId,
    ) -> Result<ValueId, ModelError> {
        self.push(op, &[q, k, v, doc_start])
    }

    /// A cache `name` of `capacity` rows that lives as long as the job, with `rows` put in from row `start` on.
    pub fn kv_cache(
        &mut self,
        name: &str,
        rows: ValueId,
        start: ValueId,
        capacity: u64,
    ) -> Result<ValueId, ModelError> {
        let name = self.path(name);
        let binding = Binding::Persistent {
            init: Init::Zeros,
            trainable: false,
        };
        let ty = Type::f32([capacity, self.graph.ty(rows).cols()]);
        let cache = self.graph.input(&name, ty, Role::KvCache, binding);
        let updated = self.push_as(KvAppend {}, &[cache, rows, start], Role::KvCache)?;
        self.graph.output(&name, updated, OutputKind::Update(cache));
        Ok(updated)
    }

    /// `silu(gate)·up`.
    pub fn swiglu(&mut self, gate: ValueId, up: ValueId) -> Result<ValueId, ModelError> {
        self.push(SwiGlu {}, &[gate, up])
    }

    /// GELU.
    pub fn gelu(&mut self, x: ValueId, approximate: Approximate) -> Result<ValueId, ModelError> {
        self.push(Gelu { approximate }, &[x])
    }

    /// `a + b`.
    pub fn add(&mut self, a: ValueId, b: ValueId) -> Result<ValueId, ModelError> {
        self.push(Add {}, &[a, b])
    }

    /// The same bytes under another shape.
    pub fn reshape(&mut self, x: ValueId, shape: impl Into<Shape>) -> Result<ValueId, ModelError> {
        self.push(Reshape { shape: shape.into() }, &[x])
    }

    /// The language-model head `weight` and its loss, in chunks of rows; `token_count` is what the sum is divided by.
    pub fn linear_cross_entropy(
        &mut self,
        x: ValueId,
        weight: ValueId,
        targets: ValueId,
        token_count: ValueId,
        chunk: u64,
    ) -> Result<ValueId, ModelError> {
        let op = LinearCrossEntropy::new(chunk, IGNORE_INDEX);
        self.push(op, &[x, weight, targets, token_count])
    }

    /// The loss of whole logits.
    pub fn softmax_cross_entropy(
        &mut self,
        logits: ValueId,
        targets: ValueId,
        token_count: ValueId,
    ) -> Result<ValueId, ModelError> {
        let op = SoftmaxCrossEntropy {
            ignore_index: IGNORE_INDEX,
        };
        self.push(op, &[logits, targets, token_count])
    }

    /// The model whose result `name` (`loss` or `logits`) is `value`.
    ///
    /// # Errors
    /// Two weights share a name.
    pub fn finish(mut self, name: &str, value: ValueId) -> Result<Forward, ModelError> {
        self.graph.output(name, value, OutputKind::Read);
        self.graph.verify()?;
        Ok(Forward { graph: self.graph })
    }

    /// Any operation; its first result.
    pub fn push(&mut self, op: impl Into<Op>, operands: &[ValueId]) -> Result<ValueId, ModelError> {
        self.push_as(op, operands, Role::Activation)
    }

    fn push_as(&mut self, op: impl Into<Op>, operands: &[ValueId], role: Role) -> Result<ValueId, ModelError> {
        let scope: Arc<str> = self.scope.join(".").into();
        let results = self.graph.push(op.into(), operands, &scope, Phase::Forward, role);
        let results = results.map_err(|source| ModelError::Op {
            scope: scope.to_string(),
            source,
        })?;
        Ok(results[0])
    }

    /// A value's type.
    pub fn ty(&self, value: ValueId) -> &Type {
        self.graph.ty(value)
    }

    fn path(&self, name: &str) -> String {
        let mut path = self.scope.join(".");
        if !path.is_empty() {
            path.push('.');
        }
        path + name
    }
}
