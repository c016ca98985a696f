//! Qwen 2 and 2.5 (arXiv:2407.10671): query, key and value projections have biases; sliding windows, where used, in the later layers.
//!
//! Not supported: multimodal rotary positions (`use_mrope`), `rope_scaling` of the type yarn.

use super::{Family, GgufNaming, read_windows, write_windows};
use crate::config::DecoderConfig;

/// `model_type` `qwen2`.
pub static QWEN2: Family = Family {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    gguf: Some(GgufNaming {
        architecture: "qwen2",
        interleaved: false,
    }),
    num_key_value_heads: Some(32),
    attention_bias: Some(true),
    output_bias: false,
    mlp_bias: false,
    qk_norm: false,
    defaults: || DecoderConfig {
        family: &QWEN2,
        vocab_size: 151_936,
        intermediate_size: 22_016,
        max_position_embeddings: 32_768,
        attention_bias: true,
        bos_token_id: None,
        eos_token_id: Vec::new(),
        ..DecoderConfig::default()
    },
    read: |fields, config| {
        fields.only("use_mrope", false)?;
        read_windows(fields, config)
    },
    write: write_windows,
};
