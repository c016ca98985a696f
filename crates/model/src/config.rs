//! What a decoder is made of: [`DecoderConfig`], and how it is read from files.

mod gguf;
mod hf;
mod json;
mod rope;

use tightfit_ir::op::RopeScaling;

use crate::error::ModelError;
use crate::family::{Family, LLAMA};

pub use json::Fields;
pub(crate) use rope::DIVISORS;

/// The sizes and switches of a pre-norm decoder: grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary
/// positions (Su et al. 2021, arXiv:2104.09864), SwiGLU (Shazeer 2020, arXiv:2002.05202) and RMSNorm (Zhang and Sennrich 2019,
/// arXiv:1910.07467). Fields are spelled as in Hugging Face's `config.json`.
///
/// A model of its own starts from the defaults: `DecoderConfig { hidden_size: 576, ..DecoderConfig::default() }`.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Whose weights, names and files it has.
    pub family: &'static Family,
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
    pub head_dim: Option<u64>,
    /// Positions the model was made for. Nothing here depends on it; other programs do.
    pub max_position_embeddings: u64,
    /// Added to the mean square.
    pub rms_norm_eps: f64,
    /// Base of the rotary angles.
    pub rope_theta: f64,
    /// How rotary frequencies are stretched, if they are.
    pub rope_scaling: Option<RopeScaling>,
    /// How many rows a row of a sliding layer sees at most, itself included.
    pub sliding_window: Option<u64>,
    /// Which layers slide where there is a `sliding_window`; all where this is `None`.
    pub layer_types: Option<Vec<LayerType>>,
    /// Whether the query, key and value projections have biases; the output projection too where the family's has
    /// ([`Family::output_bias`]).
    pub attention_bias: bool,
    /// Whether the MLP's projections have biases.
    pub mlp_bias: bool,
    /// Whether the head is the embedding's table.
    pub tie_word_embeddings: bool,
    /// Standard deviation of fresh matrices.
    pub initializer_range: f64,
    /// First token of a text, passed on to the files that are written; so are the next two.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text.
    pub eos_token_id: Vec<u32>,
    /// Filler. Its row of the embedding is trained like any other.
    pub pad_token_id: Option<u32>,
}

/// How far back a layer sees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerType {
    /// `full_attention`: to the start of the document.
    Full,
    /// `sliding_attention`: no more than `sliding_window` rows.
    Sliding,
}

impl LayerType {
    /// As `layer_types` spells it.
    pub fn name(self) -> &'static str {
        match self {
            LayerType::Full => "full_attention",
            LayerType::Sliding => "sliding_attention",
        }
    }
}

impl Default for DecoderConfig {
    /// What transformers assumes of a `llama` whose file says nothing: Llama 2 7B.
    fn default() -> Self {
        (LLAMA.defaults)()
    }
}

/// The largest value a size may have: larger ones are mistakes, and products of two still fit in 64 bits.
pub(crate) const MAX_SIZE: u64 = (1 << 31) - 1;

/// The most blocks a model may have.
pub(crate) const MAX_LAYERS: u64 = 1 << 10;

impl DecoderConfig {
    /// `head_dim`, given or derived.
    pub fn head_dim(&self) -> u64 {
        self.head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// The window of block `layer`, where it has one.
    pub fn window(&self, layer: u64) -> Option<u64> {
        let slides = match &self.layer_types {
            Some(types) => types.get(layer as usize) == Some(&LayerType::Sliding),
            None => true,
        };
        self.sliding_window.filter(|_| slides)
    }

    /// Whether the attention's output projection has a bias.
    pub fn output_bias(&self) -> bool {
        self.attention_bias && self.family.output_bias
    }

    /// Parameters, a tied table counted once; saturating.
    pub fn parameters(&self) -> u64 {
        let add = |terms: &[u64]| terms.iter().fold(0_u64, |sum, &term| sum.saturating_add(term));
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let queries = self.num_attention_heads.saturating_mul(self.head_dim());
        let keys = self.num_key_value_heads.saturating_mul(self.head_dim());
        let when = |there: bool, size: u64| if there { size } else { 0 };
        let block = add(&[
            hidden.saturating_mul(add(&[queries, queries, keys, keys])),
            hidden.saturating_mul(inner).saturating_mul(3),
            hidden.saturating_mul(2),
            when(self.attention_bias, add(&[queries, keys, keys])),
            when(self.output_bias(), hidden),
            when(self.mlp_bias, add(&[inner, inner, hidden])),
            when(self.family.qk_norm, self.head_dim().saturating_mul(2)),
        ]);
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        add(&[
            self.num_hidden_layers.saturating_mul(block),
            self.vocab_size.saturating_mul(hidden).saturating_mul(tables),
            hidden,
        ])
    }

    /// Checks every setting.
    ///
    /// # Errors
    /// The first field that no model can have, by name.
    pub fn check(&self) -> Result<(), ModelError> {
        let sizes = [
            ("vocab_size", self.vocab_size, MAX_SIZE),
            ("hidden_size", self.hidden_size, 1 << 20),
            ("intermediate_size", self.intermediate_size, 1 << 24),
            ("num_hidden_layers", self.num_hidden_layers, MAX_LAYERS),
            ("num_attention_heads", self.num_attention_heads, 1 << 16),
            ("num_key_value_heads", self.num_key_value_heads, 1 << 16),
            ("head_dim", self.head_dim(), 1 << 16),
            ("max_position_embeddings", self.max_position_embeddings, MAX_SIZE),
            ("sliding_window", self.sliding_window.unwrap_or(1), MAX_SIZE),
        ];
        for (field, size, most) in sizes {
            check_size(field, size, most)?;
        }
        if self.head_dim.is_none() && !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            let heads = self.num_attention_heads;
            return invalid(
                "hidden_size",
                self.hidden_size,
                format!("must be a multiple of num_attention_heads {heads}"),
            );
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            let groups = self.num_key_value_heads;
            return invalid(
                "num_attention_heads",
                self.num_attention_heads,
                format!("must be a multiple of num_key_value_heads {groups}"),
            );
        }
        if !self.head_dim().is_multiple_of(2) {
            return invalid("head_dim", self.head_dim(), "must be even for rotary embedding");
        }
        for (field, value) in [
            ("rms_norm_eps", self.rms_norm_eps),
            ("initializer_range", self.initializer_range),
        ] {
            // Kernels compute in `f32`.
            if !((value as f32).is_finite() && value >= 0.0) {
                return invalid(field, value, "must be a number of at least 0");
            }
        }
        if !((self.rope_theta as f32).is_finite() && self.rope_theta >= 1.0) {
            return invalid("rope_theta", self.rope_theta, "must be a number of at least 1");
        }
        self.check_structure()?;
        self.rope_scaling.map_or(Ok(()), rope::check)
    }

    /// Checks what the family fixes.
    fn check_structure(&self) -> Result<(), ModelError> {
        let model_type = self.family.model_type;
        if let Some(always) = self.family.attention_bias.filter(|&fixed| fixed != self.attention_bias) {
            return invalid(
                "attention_bias",
                self.attention_bias,
                format!("{model_type} always has {always}"),
            );
        }
        if self.mlp_bias && !self.family.mlp_bias {
            return invalid("mlp_bias", true, format!("{model_type} has no such biases"));
        }
        match &self.layer_types {
            Some(types) if types.len() as u64 != self.num_hidden_layers => invalid(
                "layer_types",
                format!("a list of {}", types.len()),
                format!("must name each of the {} layers", self.num_hidden_layers),
            ),
            Some(types) if types.contains(&LayerType::Sliding) && self.sliding_window.is_none() => {
                invalid("layer_types", "sliding", "needs a sliding_window")
            }
            _ => Ok(()),
        }
    }
}

/// An error that names a setting.
pub(crate) fn invalid<T>(
    field: &'static str,
    value: impl ToString,
    message: impl Into<String>,
) -> Result<T, ModelError> {
    Err(ModelError::Config {
        field,
        value: value.to_string(),
        message: message.into(),
    })
}

/// Checks that a size is between 1 and `most`.
pub(crate) fn check_size(field: &'static str, size: u64, most: u64) -> Result<(), ModelError> {
    if size == 0 || size > most {
        return invalid(field, size, format!("must be between 1 and {most}"));
    }
    Ok(())
}
