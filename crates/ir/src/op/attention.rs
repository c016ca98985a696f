//! Causal grouped-query attention inside documents, and its gradient.
//!
//! Only the output and one log-sum-exp per row and head are kept for the backward, never a `T × T` matrix
//! (FlashAttention, Dao et al. 2022, arXiv:2205.14135; grouped queries, Ainslie et al. 2023, arXiv:2305.13245).

use serde::{Deserialize, Serialize};

use super::check::Check;
use super::{Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::Type;

/// `q: [T, heads·D], k, v: [T, kv_heads·D], doc_start: i32[T] → o: [T, heads·D], lse: f32[T, heads]`; `q`, `k`, `v` and `o` of one
/// float dtype.
///
/// Rows are tokens of all sequences of the batch, one after the other. Row `t` attends to rows `doc_start[t]..=t`, no more than
/// the last `window` of them. `lse` is the natural log of the sum of the row's exponentiated scores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attention {
    /// `num_attention_heads`; a multiple of `kv_heads`.
    pub heads: u64,
    /// `num_key_value_heads`.
    pub kv_heads: u64,
    /// `D`.
    pub head_dim: u64,
    /// Scores are multiplied by it, usually `1/√D`.
    pub scale: f64,
    /// The longest document there can be, in rows: costs and workspaces follow from it.
    pub context: u64,
    /// `sliding_window`: how many rows a row sees at most, itself included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
}

impl Attention {
    /// Checks `q, k, v, doc_start`; gives the types of `o` and `lse`.
    fn operands(&self, check: &Check<'_>) -> Result<[Type; 2], OpError> {
        let q = check.float(0, "q", 2)?;
        let rows = q.dim(0);
        check.heads(q, self.heads, self.kv_heads, self.head_dim)?;
        check.positive("window", self.window.unwrap_or(1))?;
        let kv = Type::new(q.dtype, [rows, self.kv_heads.saturating_mul(self.head_dim)]);
        check.exactly(1, "k", &kv)?;
        check.exactly(2, "v", &kv)?;
        check.ids(3, "doc_start", rows)?;
        Ok([q.clone(), Type::f32([rows, self.heads])])
    }

    /// Pairs of a query and a key that it sees, in all heads together, where every document is as long as it can be: the `t`-th row
    /// of a document sees `min(t, window)` rows.
    fn pairs(&self, rows: u64) -> u64 {
        let document = self.context.min(rows).max(1);
        let window = self.window.map_or(document, |window| window.min(document));
        let (rows, document, window) = (u128::from(rows), u128::from(document), u128::from(window));
        let seen = window * (window + 1) / 2 + (document - window) * window;
        let pairs = (rows.saturating_mul(seen) / document).saturating_mul(self.heads.into());
        u64::try_from(pairs).unwrap_or(u64::MAX)
    }

    /// Multiply-adds of one product over all of them.
    fn products(&self, rows: u64) -> u64 {
        self.pairs(rows).saturating_mul(self.head_dim)
    }

    /// The rows that row `t` attends to.
    fn visible(&self, t: usize, doc_start: &Tensor) -> std::ops::RangeInclusive<usize> {
        let first = self.window.map_or(0, |w| (t + 1).saturating_sub(w as usize));
        first.max(doc_start.data[t] as usize)..=t
    }

    /// The slice of a row that holds head `h`.
    fn head<'a>(&self, x: &'a Tensor, t: usize, h: usize) -> &'a [f64] {
        head(x, t, h, self.head_dim as usize)
    }

    fn group(&self) -> usize {
        (self.heads / self.kv_heads) as usize
    }
}

impl Rule for Attention {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("attention", inputs, 4)?;
        Ok(self.operands(&check)?.to_vec())
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(self.products(inputs[0].dim(0)).saturating_mul(4), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        let dy = g.result(0)?;
        let operands = [
            g.input(0),
            g.input(1),
            g.input(2),
            g.input(3),
            g.output(0),
            g.output(1),
            dy,
        ];
        let made = g.emit(AttentionBackward(self.clone()), &operands)?;
        for (operand, &gradient) in made.iter().enumerate() {
            g.give(operand, gradient);
        }
        Ok(())
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [q, k, v, doc_start] = inputs else { unreachable!() };
        let mut o = Tensor::zeros(q.shape.clone());
        let mut lse = Tensor::zeros([q.rows() as u64, self.heads]);
        let d = self.head_dim as usize;
        for t in 0..q.rows() {
            for h in 0..self.heads as usize {
                let kv = h / self.group();
                let keys = self
                    .visible(t, doc_start)
                    .map(|s| (self.head(k, s, kv), self.head(v, s, kv)));
                let out = &mut o.row_mut(t)[h * d..(h + 1) * d];
                lse.row_mut(t)[h] = softmax_row(self.scale, self.head(q, t, h), keys, out);
            }
        }
        vec![o, lse]
    }
}

/// The slice of row `t` that holds head `h` of width `d`.
pub(super) fn head(x: &Tensor, t: usize, h: usize, d: usize) -> &[f64] {
    &x.row(t)[h * d..(h + 1) * d]
}

/// One row of attention: adds `Σ softmax(scale · query·key) · value` to `out`; gives the log of the sum of the exponentiated scores.
pub(super) fn softmax_row<'a>(
    scale: f64,
    query: &[f64],
    keys: impl Iterator<Item = (&'a [f64], &'a [f64])>,
    out: &mut [f64],
) -> f64 {
    let scores: Vec<(f64, &[f64])> = keys
        .map(|(key, value)| (scale * super::linear::dot(query, key), value))
        .collect();
    let max = scores.iter().fold(f64::NEG_INFINITY, |max, s| max.max(s.0));
    let sum: f64 = scores.iter().map(|s| (s.0 - max).exp()).sum();
    for (score, value) in scores {
        super::linear::axpy((score - max).exp() / sum, value, out);
    }
    max + sum.ln()
}

/// `q, k, v, doc_start, o, lse, do → dq, dk, dv`: probabilities are made again from `lse`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AttentionBackward(pub Attention);

impl Rule for AttentionBackward {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("attention_backward", inputs, 7)?;
        let [o, lse] = self.0.operands(&check)?;
        check.exactly(4, "o", &o)?;
        check.exactly(5, "lse", &lse)?;
        check.exactly(6, "do", &o)?;
        Ok(inputs[..3].to_vec())
    }

    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        Cost::touching(self.0.products(inputs[0].dim(0)).saturating_mul(10), inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [q, k, v, doc_start, o, lse, dy] = inputs else {
            unreachable!()
        };
        let attention = &self.0;
        let d = attention.head_dim as usize;
        let mut dq = Tensor::zeros(q.shape.clone());
        let mut dk = Tensor::zeros(k.shape.clone());
        let mut dv = Tensor::zeros(v.shape.clone());
        for t in 0..q.rows() {
            for h in 0..attention.heads as usize {
                let kv = h / attention.group();
                let (query, grad) = (attention.head(q, t, h), attention.head(dy, t, h));
                let delta = super::linear::dot(grad, attention.head(o, t, h));
                for s in attention.visible(t, doc_start) {
                    let (key, value) = (attention.head(k, s, kv), attention.head(v, s, kv));
                    let score = attention.scale * super::linear::dot(query, key);
                    let p = (score - lse.row(t)[h]).exp();
                    let ds = attention.scale * p * (super::linear::dot(grad, value) - delta);
                    super::linear::axpy(ds, key, &mut dq.row_mut(t)[h * d..(h + 1) * d]);
                    super::linear::axpy(ds, query, &mut dk.row_mut(s)[kv * d..(kv + 1) * d]);
                    super::linear::axpy(p, grad, &mut dv.row_mut(s)[kv * d..(kv + 1) * d]);
                }
            }
        }
        vec![dq, dk, dv]
    }
}
