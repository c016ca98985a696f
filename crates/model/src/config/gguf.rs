//! Metadata of GGUF files, read. Keys and their meanings are those of `docs/gguf.md` of `ggml-org/ggml`.

use std::collections::BTreeSet;

use tightfit_format::FormatError;
use tightfit_format::gguf::Metadata;
use tightfit_ir::op::RopeScaling;

use super::{DecoderConfig, rope};
use crate::error::{ModelError, excerpt};
use crate::family::Family;

/// Keys of an architecture that change nothing here: how yarn was trained, and how a file was converted.
const HARMLESS: &[&str] = &[
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
];

impl DecoderConfig {
    /// Reads the metadata of a GGUF file. `has_tensor` says whether the file has a tensor of a name: head and biases are there or not
    /// without a key that says so. `rope_freqs` is the tensor `rope_freqs.weight`, if there is one: Llama 3's frequencies.
    ///
    /// # Errors
    /// An unknown `general.architecture`; a key of the architecture that is missing, unknown, of the wrong type or of an impossible
    /// value, by name; frequencies that are not Llama 3's.
    pub fn from_gguf(
        metadata: &Metadata,
        has_tensor: impl Fn(&str) -> bool,
        rope_freqs: Option<&[f32]>,
    ) -> Result<Self, ModelError> {
        // Adapters and vision projectors are GGUF files too.
        match text(metadata, "general.type")? {
            Some(kind) if kind != "model" => {
                let message = format!("\"{}\", expected \"model\"", excerpt(kind));
                return Err(ModelError::field("general.type", message));
            }
            _ => {}
        }
        let architecture = text(metadata, "general.architecture")?.ok_or_else(|| missing("general.architecture"))?;
        let (family, naming) = Family::of_gguf(architecture)?;
        let mut keys = Keys::new(metadata, naming.architecture);
        let mut config = (family.defaults)();

        config.hidden_size = keys.required("embedding_length")?;
        config.intermediate_size = keys.required("feed_forward_length")?;
        config.num_hidden_layers = keys.required("block_count")?;
        config.num_attention_heads = keys.required("attention.head_count")?;
        config.num_key_value_heads = keys
            .u64("attention.head_count_kv")?
            .unwrap_or(config.num_attention_heads);
        config.max_position_embeddings = keys.required("context_length")?;
        config.rms_norm_eps = keys.decimal("attention.layer_norm_rms_epsilon")?;
        config.head_dim = keys.u64("attention.key_length")?;
        keys.only("attention.value_length", config.head_dim())?;
        config.vocab_size = match keys.u64("vocab_size")? {
            Some(size) => size,
            None => tokens(metadata)?,
        };
        config.rope_theta = keys.f64("rope.freq_base")?.unwrap_or(rope::DEFAULT_THETA);
        keys.only("rope.dimension_count", config.head_dim())?;
        config.rope_scaling = rope_scaling(&mut keys)?;
        // Of dense models; and of causal ones that give logits.
        for key in ["expert_count", "expert_used_count", "pooling_type"] {
            keys.only(key, 0)?;
        }
        keys.switch("use_parallel_residual", false)?;
        keys.switch("attention.causal", true)?;
        keys.finish(family)?;

        config.tie_word_embeddings = !has_tensor("output.weight");
        config.attention_bias = has_tensor("blk.0.attn_q.bias");
        config.mlp_bias = has_tensor("blk.0.ffn_gate.bias");
        config.bos_token_id = token(metadata, "tokenizer.ggml.bos_token_id")?;
        config.eos_token_id = token(metadata, "tokenizer.ggml.eos_token_id")?.into_iter().collect();
        config.pad_token_id = token(metadata, "tokenizer.ggml.padding_token_id")?;
        config.check()?;
        let head_dim = config.head_dim();
        config.head_dim = Some(head_dim);
        if rope_freqs.is_none() && has_tensor(rope::DIVISORS) {
            return Err(missing(rope::DIVISORS));
        }
        if let Some(divisors) = rope_freqs {
            let scaling = rope::from_divisors(divisors, head_dim, config.rope_theta)?;
            if scaling.is_some() && config.rope_scaling.is_some() {
                let message = "frequencies of Llama 3, and rope.scaling.type has another scaling";
                return Err(ModelError::field(rope::DIVISORS, message));
            }
            config.rope_scaling = config.rope_scaling.or(scaling);
        }
        Ok(config)
    }
}

/// `rope.scaling.type` and `rope.scaling.factor`, or `rope.scale_linear` of old files.
fn rope_scaling(keys: &mut Keys<'_>) -> Result<Option<RopeScaling>, ModelError> {
    let kind = keys.text("rope.scaling.type")?;
    let factor = keys.f64("rope.scaling.factor")?;
    let old_factor = keys.f64("rope.scale_linear")?;
    if let Some(factor) = keys.f64("rope.scaling.attn_factor")?.filter(|&factor| factor != 1.0) {
        return Err(keys.error("rope.scaling.attn_factor", format!("{factor} is not supported, only 1")));
    }
    match kind {
        // A factor of 0 was written for none.
        None | Some("linear") => {
            let factor = factor.or(old_factor).filter(|&factor| factor != 1.0 && factor != 0.0);
            Ok(factor.map(|factor| RopeScaling::Linear { factor }))
        }
        Some("none") => Ok(None),
        Some(other) => {
            let message = format!("\"{}\" is not supported, only \"none\" and \"linear\"", excerpt(other));
            Err(keys.error("rope.scaling.type", message))
        }
    }
}

/// The size of the vocabulary inside the file.
fn tokens(metadata: &Metadata) -> Result<u64, ModelError> {
    const KEY: &str = "tokenizer.ggml.tokens";
    let tokens = metadata.strs(KEY).map_err(unreadable)?;
    let tokens = tokens.ok_or_else(|| missing(&format!("vocab_size, and {KEY}")))?;
    Ok(tokens.len() as u64)
}

/// A token id.
fn token(metadata: &Metadata, key: &str) -> Result<Option<u32>, ModelError> {
    let id = metadata.u64(key).map_err(unreadable)?;
    id.map(|id| u32::try_from(id).map_err(|_| ModelError::field(key, format!("{id}, expected a token id"))))
        .transpose()
}

fn text<'a>(metadata: &'a Metadata, key: &str) -> Result<Option<&'a str>, ModelError> {
    metadata.str(key).map_err(unreadable)
}

fn unreadable(error: FormatError) -> ModelError {
    ModelError::Metadata(error.to_string())
}

fn missing(key: &str) -> ModelError {
    ModelError::MissingField { field: key.to_owned() }
}

/// The keys of an architecture, and which of them have been read.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: &'static str,
    read: BTreeSet<String>,
}

impl<'a> Keys<'a> {
    fn new(metadata: &'a Metadata, architecture: &'static str) -> Self {
        let mut keys = Self {
            metadata,
            architecture,
            read: BTreeSet::new(),
        };
        for key in HARMLESS {
            keys.take(key);
        }
        keys
    }

    /// The full name of a key, which counts as read from now on.
    fn take(&mut self, key: &str) -> String {
        let full = format!("{}.{key}", self.architecture);
        self.read.insert(full.clone());
        full
    }

    fn u64(&mut self, key: &str) -> Result<Option<u64>, ModelError> {
        let full = self.take(key);
        self.metadata.u64(&full).map_err(unreadable)
    }

    fn f64(&mut self, key: &str) -> Result<Option<f64>, ModelError> {
        let full = self.take(key);
        self.metadata.f64(&full).map_err(unreadable)
    }

    fn text(&mut self, key: &str) -> Result<Option<&'a str>, ModelError> {
        let full = self.take(key);
        text(self.metadata, &full)
    }

    fn required(&mut self, key: &str) -> Result<u64, ModelError> {
        let given = self.u64(key)?;
        given.ok_or_else(|| missing(&format!("{}.{key}", self.architecture)))
    }

    /// A number that was written with few digits and stored as `f32`: `1e-5`, not `9.999999747378752e-6`.
    fn decimal(&mut self, key: &str) -> Result<f64, ModelError> {
        let given = self.f64(key)?;
        let given = given.ok_or_else(|| missing(&format!("{}.{key}", self.architecture)))?;
        let shortest = format!("{}", given as f32).parse();
        // The text of any `f32` is an `f64`'s.
        Ok(shortest.unwrap_or(given))
    }

    /// Checks a number that may say one thing only, if it is there.
    fn only(&mut self, key: &str, expected: u64) -> Result<(), ModelError> {
        match self.u64(key)? {
            Some(found) if found != expected => {
                Err(self.error(key, format!("{found} is not supported, only {expected}")))
            }
            _ => Ok(()),
        }
    }

    /// The same for a switch.
    fn switch(&mut self, key: &str, expected: bool) -> Result<(), ModelError> {
        let full = self.take(key);
        match self.metadata.bool(&full).map_err(unreadable)? {
            Some(found) if found != expected => {
                Err(self.error(key, format!("{found} is not supported, only {expected}")))
            }
            _ => Ok(()),
        }
    }

    fn error(&self, key: &str, message: impl Into<String>) -> ModelError {
        ModelError::field(format!("{}.{key}", self.architecture), message)
    }

    /// Checks that every key of the architecture was understood.
    fn finish(self, family: &'static Family) -> Result<(), ModelError> {
        let prefix = format!("{}.", self.architecture);
        let unknown = self
            .metadata
            .keys()
            .find(|key| key.starts_with(&prefix) && !self.read.contains(&key[..]));
        match unknown {
            None => Ok(()),
            Some(key) => Err(ModelError::UnknownField {
                field: excerpt(key),
                family: family.model_type,
            }),
        }
    }
}
