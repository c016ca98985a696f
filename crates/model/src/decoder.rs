//! The graphs of a decoder: its loss, its logits, and a step of generation with a cache. They share one body; attention differs.

use tightfit_ir::op::{Attention, CachedAttention, RopeTable};
use tightfit_ir::{Forward, Type, ValueId};

use crate::builder::Builder;
use crate::config::{DecoderConfig, MAX_SIZE, check_size};
use crate::error::ModelError;

/// The rows of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchShape {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub seq: u64,
    /// Rows whose logits exist at one time where only the loss is asked for.
    pub loss_chunk: u64,
}

impl BatchShape {
    /// Rows of every activation.
    pub fn tokens(&self) -> u64 {
        self.batch.saturating_mul(self.seq)
    }

    fn check(&self) -> Result<(), ModelError> {
        check_size("batch", self.batch, MAX_SIZE)?;
        check_size("seq", self.seq, MAX_SIZE)?;
        check_size("loss_chunk", self.loss_chunk, MAX_SIZE)?;
        check_size("batch × seq", self.tokens(), MAX_SIZE)
    }
}

/// A step of generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecodeShape {
    /// Tokens that one step takes in: 1, or more to read a prompt.
    pub rows: u64,
    /// Tokens that there is room for, prompt included.
    pub capacity: u64,
}

impl DecodeShape {
    fn check(&self) -> Result<(), ModelError> {
        check_size("capacity", self.capacity, MAX_SIZE)?;
        check_size("rows", self.rows, self.capacity)
    }
}

/// The inputs that every graph has.
struct Rows {
    tokens: ValueId,
    positions: ValueId,
    attend: Attend,
}

/// What a row attends to.
#[derive(Clone, Copy)]
enum Attend {
    /// The rows of its own document, of which the longest may have `context`.
    Documents { doc_start: ValueId, context: u64 },
    /// The rows of a cache of `capacity`, up to the new ones, which follow row `start`.
    Cache { start: ValueId, capacity: u64 },
}

impl DecoderConfig {
    /// The model and its loss on a micro-batch. Fed: `tokens`, `targets`, `positions`, `doc_start` (`i32[T]`) and `token_count`
    /// (`f32[1]`). Result: `loss`.
    ///
    /// # Errors
    /// A setting that no model can have; so for the graphs below.
    pub fn loss(&self, shape: BatchShape) -> Result<Forward, ModelError> {
        self.check()?;
        shape.check()?;
        let mut b = Builder::new(self.initializer_range);
        let rows = documents(&mut b, shape);
        let targets = b.input("targets", Type::i32([shape.tokens()]));
        let token_count = b.input("token_count", Type::f32([1]));
        let (x, table) = self.embed(&mut b, &rows)?;
        let x = self.blocks(&mut b, x, &rows)?;
        let x = self.norm(&mut b, x)?;
        let weight = self.head(&mut b, table);
        let chunk = shape.loss_chunk.min(shape.tokens());
        let loss = b.scope("lm_head", |b| {
            b.linear_cross_entropy(x, weight, targets, token_count, chunk)
        })?;
        b.finish("loss", loss)
    }

    /// The model and its logits for every row. Fed: `tokens`, `positions`, `doc_start` (`i32[T]`). Result: `logits`, `f32[T, vocab_size]`.
    pub fn logits(&self, shape: BatchShape) -> Result<Forward, ModelError> {
        self.check()?;
        shape.check()?;
        let mut b = Builder::new(self.initializer_range);
        let rows = documents(&mut b, shape);
        let (x, table) = self.embed(&mut b, &rows)?;
        let x = self.blocks(&mut b, x, &rows)?;
        let x = self.norm(&mut b, x)?;
        let weight = self.head(&mut b, table);
        let logits = b.scope("lm_head", |b| b.product(x, weight))?;
        b.finish("logits", logits)
    }

    /// A step of generation: takes in new tokens after those that the cache has seen, and gives the logits of one of them.
    ///
    /// Fed: `tokens`, `positions` (`i32[rows]`), `start` (`i32[1]`, tokens seen before) and `last` (`i32[1]`, the new row whose logits
    /// are asked for; what follows it is filler). Keys and values are persistent: `model.layers.N.self_attn.k_cache` and `v_cache`,
    /// `f32[capacity, num_key_value_heads·head_dim]`, updated in place. Filler is overwritten by the next step, if that starts after
    /// `last`; rows never attend to what comes after them. Result: `logits`, `f32[1, vocab_size]`.
    pub fn decode(&self, shape: DecodeShape) -> Result<Forward, ModelError> {
        self.check()?;
        shape.check()?;
        let mut b = Builder::new(self.initializer_range);
        let rows = Rows {
            tokens: b.input("tokens", Type::i32([shape.rows])),
            positions: b.input("positions", Type::i32([shape.rows])),
            attend: Attend::Cache {
                start: b.input("start", Type::i32([1])),
                capacity: shape.capacity,
            },
        };
        let last = b.input("last", Type::i32([1]));
        let (x, table) = self.embed(&mut b, &rows)?;
        let x = self.blocks(&mut b, x, &rows)?;
        let x = b.scope("model", |b| b.rows(x, last))?;
        let x = self.norm(&mut b, x)?;
        let weight = self.head(&mut b, table);
        let logits = b.scope("lm_head", |b| b.product(x, weight))?;
        b.finish("logits", logits)
    }

    /// The embedded tokens, and the table.
    fn embed(&self, b: &mut Builder, rows: &Rows) -> Result<(ValueId, ValueId), ModelError> {
        b.scope("model", |b| {
            let [x, table] = b.embedding("embed_tokens", rows.tokens, self.vocab_size, self.hidden_size)?;
            Ok((x, table))
        })
    }

    /// The last norm.
    fn norm(&self, b: &mut Builder, x: ValueId) -> Result<ValueId, ModelError> {
        b.scope("model", |b| b.rms_norm("norm", x, self.rms_norm_eps))
    }

    /// The weight of the language-model head.
    fn head(&self, b: &mut Builder, table: ValueId) -> ValueId {
        if self.tie_word_embeddings {
            return table;
        }
        b.scope("lm_head", |b| b.matrix("weight", self.vocab_size, self.hidden_size))
    }

    /// All blocks.
    fn blocks(&self, b: &mut Builder, mut x: ValueId, rows: &Rows) -> Result<ValueId, ModelError> {
        b.scope("model", |b| {
            let table = RopeTable {
                head_dim: self.head_dim(),
                theta: self.rope_theta,
                scaling: self.rope_scaling,
            };
            let angles = b.push(table, &[rows.positions])?;
            for layer in 0..self.num_hidden_layers {
                x = b.scope(&format!("layers.{layer}"), |b| {
                    let window = self.window(layer);
                    self.block(b, x, angles, rows.attend, window)
                })?;
            }
            Ok(x)
        })
    }

    /// One block: attention and MLP, each after a norm and onto the residual stream.
    fn block(
        &self,
        b: &mut Builder,
        x: ValueId,
        angles: ValueId,
        attend: Attend,
        window: Option<u64>,
    ) -> Result<ValueId, ModelError> {
        let normed = b.rms_norm("input_layernorm", x, self.rms_norm_eps)?;
        let x = b.scope("self_attn", |b| {
            let q = self.heads(b, "q", normed, self.num_attention_heads)?;
            let k = self.heads(b, "k", normed, self.num_key_value_heads)?;
            let keys = self.num_key_value_heads * self.head_dim();
            let v = b.linear_with("v_proj", normed, keys, self.attention_bias, None)?;
            let (q, k) = (b.rope(q, angles)?, b.rope(k, angles)?);
            let o = self.attention(b, [q, k, v], attend, window)?;
            b.linear_with("o_proj", o, self.hidden_size, self.output_bias(), Some(x))
        })?;
        let normed = b.rms_norm("post_attention_layernorm", x, self.rms_norm_eps)?;
        b.scope("mlp", |b| {
            let gate = b.linear_with("gate_proj", normed, self.intermediate_size, self.mlp_bias, None)?;
            let up = b.linear_with("up_proj", normed, self.intermediate_size, self.mlp_bias, None)?;
            let hidden = b.swiglu(gate, up)?;
            b.linear_with("down_proj", hidden, self.hidden_size, self.mlp_bias, Some(x))
        })
    }

    /// Queries or keys: projected, and normalised head by head in families that do.
    fn heads(&self, b: &mut Builder, name: &str, x: ValueId, heads: u64) -> Result<ValueId, ModelError> {
        let (rows, width) = (b.ty(x).rows(), heads * self.head_dim());
        let projected = b.linear_with(&format!("{name}_proj"), x, width, self.attention_bias, None)?;
        if !self.family.qk_norm {
            return Ok(projected);
        }
        let by_head = b.reshape(projected, [rows * heads, self.head_dim()])?;
        let normed = b.rms_norm(&format!("{name}_norm"), by_head, self.rms_norm_eps)?;
        b.reshape(normed, [rows, width])
    }

    /// Attention of rotated queries to rotated keys.
    fn attention(
        &self,
        b: &mut Builder,
        [q, k, v]: [ValueId; 3],
        attend: Attend,
        window: Option<u64>,
    ) -> Result<ValueId, ModelError> {
        let (heads, kv_heads, head_dim) = (self.num_attention_heads, self.num_key_value_heads, self.head_dim());
        let scale = 1.0 / (head_dim as f64).sqrt();
        match attend {
            Attend::Documents { doc_start, context } => {
                let op = Attention {
                    heads,
                    kv_heads,
                    head_dim,
                    scale,
                    context,
                    window,
                };
                b.attention(op, q, k, v, doc_start)
            }
            Attend::Cache { start, capacity } => {
                let k = b.kv_cache("k_cache", k, start, capacity)?;
                let v = b.kv_cache("v_cache", v, start, capacity)?;
                let op = CachedAttention {
                    heads,
                    kv_heads,
                    head_dim,
                    scale,
                    window,
                };
                b.push(op, &[q, k, v, start])
            }
        }
    }
}

/// The inputs of a micro-batch of documents.
fn documents(b: &mut Builder, shape: BatchShape) -> Rows {
    let rows = || Type::i32([shape.tokens()]);
    Rows {
        tokens: b.input("tokens", rows()),
        positions: b.input("positions", rows()),
        attend: Attend::Documents {
            doc_start: b.input("doc_start", rows()),
            context: shape.seq,
        },
    }
}
