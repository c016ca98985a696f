//! Mistral 7B (Jiang et al. 2023, arXiv:2310.06825) and others of its shape: LLaMA with a sliding window in every layer.
//!
//! GGUF files are written under the name `llama`, without the window: they are read as that family. Not supported: `layer_types`
//! (Ministral), and what [`llama`](super::llama) does not.

use super::Family;
use crate::config::DecoderConfig;

/// `model_type` `mistral`.
pub static MISTRAL: Family = Family {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    gguf: None,
    num_key_value_heads: Some(8),
    attention_bias: Some(false),
    output_bias: false,
    mlp_bias: false,
    qk_norm: false,
    defaults: || DecoderConfig {
        family: &MISTRAL,
        intermediate_size: 14_336,
        num_key_value_heads: 8,
        max_position_embeddings: 131_072,
        sliding_window: Some(4096),
        ..DecoderConfig::default()
    },
    read: |fields, config| fields.read_nullable("sliding_window", &mut config.sliding_window),
    write: |config, json| {
        json.insert("sliding_window".into(), config.sliding_window.into());
    },
};
