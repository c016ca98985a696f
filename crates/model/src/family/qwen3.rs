//! Qwen 3 (arXiv:2505.09388): queries and keys are normalised head by head before they are rotated; heads of a width of their own.
//!
//! Not supported: `rope_scaling` of the type yarn; mixtures of experts, which are another `model_type`.

use super::{Family, GgufNaming, read_windows, write_windows};
use crate::config::DecoderConfig;

/// `model_type` `qwen3`.
pub static QWEN3: Family = Family {
    model_type: "qwen3",
    architecture: "Qwen3ForCausalLM",
    gguf: Some(GgufNaming {
        architecture: "qwen3",
        interleaved: false,
    }),
    num_key_value_heads: Some(32),
    attention_bias: None,
    output_bias: true,
    mlp_bias: false,
    qk_norm: true,
    defaults: || DecoderConfig {
        family: &QWEN3,
        vocab_size: 151_936,
        intermediate_size: 22_016,
        head_dim: Some(128),
        max_position_embeddings: 32_768,
        bos_token_id: None,
        eos_token_id: Vec::new(),
        ..DecoderConfig::default()
    },
    read: |fields, config| {
        fields.read("attention_bias", &mut config.attention_bias)?;
        read_windows(fields, config)
    },
    write: |config, json| {
        json.insert("attention_bias".into(), config.attention_bias.into());
        write_windows(config, json);
    },
};
