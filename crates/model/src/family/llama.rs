//! LLaMA 1 to 3.3 (Touvron et al. 2023, arXiv:2302.13971; arXiv:2407.21783), SmolLM and SmolLM2, TinyLlama and others of its shape.
//!
//! Not supported: `rope_scaling` of the types dynamic, yarn and longrope; `pretraining_tp` above 1; quantised checkpoints of
//! Hugging Face (`quantization_config`).

use super::{Family, GgufNaming};
use crate::config::DecoderConfig;

/// `model_type` `llama`.
pub static LLAMA: Family = Family {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    gguf: Some(GgufNaming {
        architecture: "llama",
        interleaved: true,
    }),
    num_key_value_heads: None,
    attention_bias: None,
    output_bias: true,
    mlp_bias: true,
    qk_norm: false,
    defaults: || DecoderConfig {
        family: &LLAMA,
        vocab_size: 32_000,
        hidden_size: 4096,
        intermediate_size: 11_008,
        num_hidden_layers: 32,
        num_attention_heads: 32,
        num_key_value_heads: 32,
        head_dim: None,
        max_position_embeddings: 2048,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        rope_scaling: None,
        sliding_window: None,
        layer_types: None,
        attention_bias: false,
        mlp_bias: false,
        tie_word_embeddings: false,
        initializer_range: 0.02,
        bos_token_id: Some(1),
        eos_token_id: vec![2],
        pad_token_id: None,
    },
    read: |fields, config| {
        fields.read("attention_bias", &mut config.attention_bias)?;
        fields.read("mlp_bias", &mut config.mlp_bias)?;
        fields.only("pretraining_tp", 1_u64)?;
        // SmolLM2's files say these; its rotary halves are Hugging Face's all the same.
        fields.only("rope_interleaved", false)?;
        fields.only("is_llama_config", true)
    },
    write: |config, json| {
        json.insert("attention_bias".into(), config.attention_bias.into());
        json.insert("mlp_bias".into(), config.mlp_bias.into());
    },
};
