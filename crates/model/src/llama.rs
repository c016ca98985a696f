//! The LLaMA family (Touvron et al. 2023, arXiv:2302.13971): pre-norm blocks of grouped-query attention and SwiGLU.

use serde::{Deserialize, Serialize};
use tightfit_ir::op::Attention;
use tightfit_ir::{Forward, Type, ValueId};

use crate::builder::Builder;
use crate::config::MAX_SIZE;
use crate::error::ModelError;

pub use crate::decoder::BatchShape;

/// A model's sizes, spelled as Hugging Face's `config.json` spells them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LlamaConfig {
    /// Rows of the embedding.
    pub vocab_size: u64,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Width inside the MLP.
    pub intermediate_size: u64,
    /// Blocks.
    pub num_hidden_layers: u64,
    /// Query heads.
    pub num_attention_heads: u64,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: u64,
    /// Width of a head; `hidden_size / num_attention_heads` unless given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<u64>,
    /// Added to the mean square.
    pub rms_norm_eps: f64,
    /// Base of the rotary angles.
    pub rope_theta: f64,
    /// Whether the head is the embedding's table.
    pub tie_word_embeddings: bool,
    /// Standard deviation of fresh matrices.
    pub initializer_range: f64,
}

impl LlamaConfig {
    /// `head_dim`, given or derived.
    pub fn head_dim(&self) -> u64 {
        self.head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Trainable parameters.
    pub fn parameters(&self) -> u64 {
        let (h, d) = (self.hidden_size, self.head_dim());
        let attention = 2 * h * d * (self.num_attention_heads + self.num_key_value_heads);
        let block = attention + 3 * h * self.intermediate_size + 2 * h;
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        self.num_hidden_layers * block + tables * self.vocab_size * h + h
    }

    /// Checks every setting.
    ///
    /// # Errors
    /// The first field that no model can have, by name.
    pub fn check(&self) -> Result<(), ModelError> {
        let invalid = |field, value: &dyn ToString, message: String| {
            Err(ModelError::Config {
                field,
                value: value.to_string(),
                message,
            })
        };
        let sizes = [
            ("vocab_size", self.vocab_size, MAX_SIZE),
            ("hidden_size", self.hidden_size, 1 << 20),
            ("intermediate_size", self.intermediate_size, 1 << 24),
            ("num_hidden_layers", self.num_hidden_layers, 1 << 10),
            ("num_attention_heads", self.num_attention_heads, 1 << 16),
            ("num_key_value_heads", self.num_key_value_heads, 1 << 16),
            ("head_dim", self.head_dim(), 1 << 16),
        ];
        for (field, size, most) in sizes {
            if size == 0 || size > most {
                return invalid(field, &size, format!("must be between 1 and {most}"));
            }
        }
        if self.head_dim.is_none() && !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            return invalid(
                "hidden_size",
                &self.hidden_size,
                format!("must be a multiple of num_attention_heads {}", self.num_attention_heads),
            );
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            return invalid(
                "num_attention_heads",
                &self.num_attention_heads,
                format!("must be a multiple of num_key_value_heads {}", self.num_key_value_heads),
            );
        }
        if !self.head_dim().is_multiple_of(2) {
            return invalid("head_dim", &self.head_dim(), "must be even for rotary embedding".into());
        }
        for (field, value) in [
            ("rms_norm_eps", self.rms_norm_eps),
            ("initializer_range", self.initializer_range),
        ] {
            if !(value.is_finite() && value >= 0.0) {
                return invalid(field, &value, "must be a number of at least 0".into());
            }
        }
        if !(self.rope_theta.is_finite() && self.rope_theta >= 1.0) {
            return invalid("rope_theta", &self.rope_theta, "must be a number of at least 1".into());
        }
        Ok(())
    }

    /// The model and its loss on a micro-batch. Fed: `tokens`, `targets`, `positions`, `doc_start` (`i32[T]`) and `token_count`.
    ///
    /// # Errors
    /// A setting that no model can have.
    pub fn loss(&self, shape: BatchShape) -> Result<Forward, ModelError> {
        self.check()?;
        for (field, size) in [
            ("batch", shape.batch),
            ("seq", shape.seq),
            ("loss_chunk", shape.loss_chunk),
        ] {
            if size == 0 || size > MAX_SIZE {
                return Err(ModelError::Config {
                    field,
                    value: size.to_string(),
                    message: format!("must be between 1 and {MAX_SIZE}"),
                });
            }
        }
        if shape.tokens() > MAX_SIZE {
            return Err(ModelError::Config {
                field: "batch × seq",
                value: shape.tokens().to_string(),
                message: format!("must be at most {MAX_SIZE}"),
            });
        }
        let mut b = Builder::new(self.initializer_range);
        let rows = || Type::i32([shape.tokens()]);
        let tokens = b.input("tokens", rows());
        let targets = b.input("targets", rows());
        let positions = b.input("positions", rows());
        let doc_start = b.input("doc_start", rows());
        let token_count = b.input("token_count", Type::f32([1]));
        let (x, table) = b.scope("model", |b| -> Result<_, ModelError> {
            let [mut x, table] = b.embedding("embed_tokens", tokens, self.vocab_size, self.hidden_size)?;
            let angles = b.rope_table(positions, self.head_dim(), self.rope_theta)?;
            for layer in 0..self.num_hidden_layers {
                x = b.scope(&format!("layers.{layer}"), |b| {
                    self.block(b, x, angles, doc_start, shape.seq)
                })?;
            }
            Ok((b.rms_norm("norm", x, self.rms_norm_eps)?, table))
        })?;
        let loss = b.scope("lm_head", |b| {
            let weight = if self.tie_word_embeddings {
                table
            } else {
                b.matrix("weight", self.vocab_size, self.hidden_size)
            };
            let chunk = shape.loss_chunk.min(shape.tokens());
            b.linear_cross_entropy(x, weight, targets, token_count, chunk)
        })?;
        b.finish("loss", loss)
    }

    /// One block: attention and MLP, each after a norm and onto the residual stream.
    fn block(
        &self,
        b: &mut Builder,
        x: ValueId,
        angles: ValueId,
        doc_start: ValueId,
        seq: u64,
    ) -> Result<ValueId, ModelError> {
        let (queries, keys) = (
            self.num_attention_heads * self.head_dim(),
            self.num_key_value_heads * self.head_dim(),
        );
        let normed = b.rms_norm("input_layernorm", x, self.rms_norm_eps)?;
        let x = b.scope("self_attn", |b| {
            let q = b.linear("q_proj", normed, queries)?;
            let k = b.linear("k_proj", normed, keys)?;
            let v = b.linear("v_proj", normed, keys)?;
            let q = b.rope(q, angles)?;
            let k = b.rope(k, angles)?;
            let attention = Attention {
                heads: self.num_attention_heads,
                kv_heads: self.num_key_value_heads,
                head_dim: self.head_dim(),
                scale: 1.0 / (self.head_dim() as f64).sqrt(),
                context: seq,
                window: None,
            };
            let o = b.attention(attention, q, k, v, doc_start)?;
            b.linear_onto("o_proj", o, x)
        })?;
        let normed = b.rms_norm("post_attention_layernorm", x, self.rms_norm_eps)?;
        b.scope("mlp", |b| {
            let gate = b.linear("gate_proj", normed, self.intermediate_size)?;
            let up = b.linear("up_proj", normed, self.intermediate_size)?;
            let hidden = b.swiglu(gate, up)?;
            b.linear_onto("down_proj", hidden, x)
        })
    }
}
