//! Generation with a cache: the keys and values of earlier tokens are kept, so that a step computes only its new rows.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

use super::attention::{head, softmax_row};
use super::check::Check;
use super::{Alias, Cost, Gradient, Op, OpError, Rule};
use crate::tensor::Tensor;
use crate::types::Type;

/// `cache: [C, W], rows: [T, W], start: i32[1] → cache: [C, W]`: row `t` replaces row `start + t` of the cache. All of one float
/// dtype.
///
/// Rows that would lie outside of the cache are dropped. That keeps memory safe and no more: whoever feeds `start` checks that they
/// fit. In place over the cache only the new rows are written; elsewhere the cache is copied first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct KvAppend {}

impl Rule for KvAppend {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("kv_append", inputs, 3)?;
        let cache = check.float(0, "cache", 2)?;
        let rows = check.float(1, "rows", 2)?;
        check.exactly(1, "rows", &Type::new(cache.dtype, [rows.dim(0), cache.dim(1)]))?;
        check.ids(2, "start", 1)?;
        if rows.dim(0) > cache.dim(0) {
            return check.invalid(format!("{} rows do not fit the cache's {}", rows.dim(0), cache.dim(0)));
        }
        Ok(vec![cache.clone()])
    }

    /// In place: the new rows, read and written.
    fn cost(&self, inputs: &[&Type], _outputs: &[&Type]) -> Cost {
        Cost {
            flops: 0,
            bytes: inputs[1].bytes().saturating_mul(2),
        }
    }

    fn aliases(&self) -> Vec<Alias> {
        vec![Alias::in_place(0, 0)]
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    /// Generation has no backward.
    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [cache, rows, start] = inputs else { unreachable!() };
        let mut cache = cache.clone();
        for t in 0..rows.rows() {
            let row = start.data[0] + t as f64;
            if (0.0..cache.rows() as f64).contains(&row) {
                cache.row_mut(row as usize).copy_from_slice(rows.row(t));
            }
        }
        vec![cache]
    }
}

/// `q: [T, heads·D], k_cache, v_cache: [C, kv_heads·D], start: i32[1] → o: [T, heads·D]`: causal grouped-query attention of new rows
/// to all rows so far, their own included, which [`KvAppend`] has put there. All of one float dtype.
///
/// Row `t` stands at `start + t` of the cache and attends to the rows up to there, no more than the last `window` of them. A row that
/// would stand outside of the cache counts as standing at its nearer end.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CachedAttention {
    /// `num_attention_heads`; a multiple of `kv_heads`.
    pub heads: u64,
    /// `num_key_value_heads`.
    pub kv_heads: u64,
    /// `D`.
    pub head_dim: u64,
    /// Scores are multiplied by it, usually `1/√D`.
    pub scale: f64,
    /// `sliding_window`: how many rows a row sees at most, itself included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<u64>,
}

impl CachedAttention {
    /// The rows of a cache of `capacity` that a row at `position` attends to.
    fn visible(&self, position: i64, capacity: u64) -> RangeInclusive<usize> {
        let last = position.clamp(0, capacity as i64 - 1) as u64;
        let first = self.window.map_or(0, |w| (last + 1).saturating_sub(w));
        first as usize..=last as usize
    }
}

impl Rule for CachedAttention {
    fn infer(&self, inputs: &[Type]) -> Result<Vec<Type>, OpError> {
        let check = Check::arity("cached_attention", inputs, 4)?;
        let q = check.float(0, "q", 2)?;
        check.heads(q, self.heads, self.kv_heads, self.head_dim)?;
        check.positive("window", self.window.unwrap_or(1))?;
        let capacity = check.float(1, "k_cache", 2)?.dim(0);
        check.positive("k_cache's rows", capacity)?;
        let cache = Type::new(q.dtype, [capacity, self.kv_heads.saturating_mul(self.head_dim)]);
        check.exactly(1, "k_cache", &cache)?;
        check.exactly(2, "v_cache", &cache)?;
        check.ids(3, "start", 1)?;
        Ok(vec![q.clone()])
    }

    /// With the cache full.
    fn cost(&self, inputs: &[&Type], outputs: &[&Type]) -> Cost {
        let capacity = inputs[1].dim(0);
        let seen = self.window.map_or(capacity, |w| w.min(capacity));
        let flops = inputs[0].shape.elements().saturating_mul(seen).saturating_mul(4);
        Cost::touching(flops, inputs, outputs)
    }

    fn aliases(&self) -> Vec<Alias> {
        Vec::new()
    }

    fn accumulating(&self, _output: usize) -> Option<(Op, usize)> {
        None
    }

    /// Generation has no backward.
    fn gradient(&self, g: &mut Gradient<'_>) -> Result<(), OpError> {
        g.none()
    }

    fn reference(&self, inputs: &[Tensor]) -> Vec<Tensor> {
        let [q, k, v, start] = inputs else { unreachable!() };
        let mut o = Tensor::zeros(q.shape.clone());
        let (d, group) = (self.head_dim as usize, (self.heads / self.kv_heads) as usize);
        for t in 0..q.rows() {
            let visible = self.visible(start.data[0] as i64 + t as i64, k.rows() as u64);
            for h in 0..self.heads as usize {
                let keys = visible
                    .clone()
                    .map(|s| (head(k, s, h / group, d), head(v, s, h / group, d)));
                let out = &mut o.row_mut(t)[h * d..(h + 1) * d];
                softmax_row(self.scale, head(q, t, h, d), keys, out);
            }
        }
        vec![o]
    }
}
