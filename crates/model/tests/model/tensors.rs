//! Which tensors of a checkpoint fill which weights.

use std::collections::BTreeMap;

use tightfit_model::{DecoderConfig, ModelError, Naming, RowOrder, Sources};

use crate::{CASES, config};

/// The tensors of a checkpoint, with their shapes.
type Tensors = BTreeMap<String, Vec<u64>>;

/// A checkpoint with exactly the tensors of a model.
fn complete(config: &DecoderConfig, naming: Naming) -> Tensors {
    let weights = config.weights().unwrap();
    let named =
        |(weight, shape): (&String, &tightfit_ir::Shape)| (config.source(naming, weight).name, shape.dims().to_vec());
    weights.iter().map(named).collect()
}

fn sources(config: &DecoderConfig, naming: Naming, tensors: &Tensors) -> Result<Sources, ModelError> {
    config.sources(
        naming,
        tensors.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())),
    )
}

#[test]
fn every_weight_has_a_tensor_of_its_own() {
    for case in CASES {
        let config = config(case);
        let weights = config.weights().unwrap();
        let elements: u64 = weights.values().map(|shape| shape.elements()).sum();
        assert_eq!(config.parameters(), elements, "{case}");
        for naming in [Naming::HuggingFace, Naming::Gguf] {
            let tensors = complete(&config, naming);
            assert_eq!(tensors.len(), weights.len(), "{case}");
            let found = sources(&config, naming, &tensors).unwrap();
            assert!(found.weights.keys().eq(weights.keys()), "{case}");
            assert!(found.ignored.is_empty());
        }
    }
}

#[test]
fn names_of_gguf() {
    let config = config("qwen3");
    for (weight, tensor) in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.layers.11.input_layernorm.weight", "blk.11.attn_norm.weight"),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
        ("model.layers.0.self_attn.q_proj.bias", "blk.0.attn_q.bias"),
        ("model.layers.0.self_attn.k_proj.weight", "blk.0.attn_k.weight"),
        ("model.layers.0.self_attn.v_proj.weight", "blk.0.attn_v.weight"),
        ("model.layers.0.self_attn.o_proj.weight", "blk.0.attn_output.weight"),
        ("model.layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight"),
        ("model.layers.0.self_attn.k_norm.weight", "blk.0.attn_k_norm.weight"),
        (
            "model.layers.0.post_attention_layernorm.weight",
            "blk.0.ffn_norm.weight",
        ),
        ("model.layers.0.mlp.gate_proj.weight", "blk.0.ffn_gate.weight"),
        ("model.layers.0.mlp.up_proj.weight", "blk.0.ffn_up.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ] {
        assert_eq!(config.source(Naming::Gguf, weight).name, tensor);
        assert_eq!(config.source(Naming::HuggingFace, weight).name, weight);
    }
}

#[test]
fn llama_stores_queries_and_keys_interleaved() {
    let rows = |case, naming, layer: &str| {
        config(case)
            .source(naming, &format!("model.layers.0.self_attn.{layer}"))
            .rows
    };
    let interleaved = |heads| RowOrder::InterleavedHeads { heads };
    assert_eq!(rows("smollm2", Naming::Gguf, "q_proj.weight"), interleaved(3));
    assert_eq!(rows("smollm2", Naming::Gguf, "k_proj.weight"), interleaved(1));
    assert_eq!(rows("llama_linear", Naming::Gguf, "k_proj.bias"), interleaved(2));
    assert_eq!(rows("smollm2", Naming::Gguf, "v_proj.weight"), RowOrder::AsIs);
    assert_eq!(rows("smollm2", Naming::HuggingFace, "q_proj.weight"), RowOrder::AsIs);
    assert_eq!(rows("qwen2", Naming::Gguf, "q_proj.weight"), RowOrder::AsIs);
    assert_eq!(rows("qwen3", Naming::Gguf, "k_proj.weight"), RowOrder::AsIs);
}

#[test]
fn what_says_nothing_more_is_ignored() {
    let tied = config("smollm2");
    let mut tensors = complete(&tied, Naming::HuggingFace);
    let extra = ["lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"];
    tensors.extend(extra.map(|name| (name.to_owned(), vec![1])));
    assert_eq!(sources(&tied, Naming::HuggingFace, &tensors).unwrap().ignored, extra);

    let untied = config("llama3");
    let mut tensors = complete(&untied, Naming::Gguf);
    tensors.insert("rope_freqs.weight".to_owned(), vec![4]);
    assert_eq!(
        sources(&untied, Naming::Gguf, &tensors).unwrap().ignored,
        ["rope_freqs.weight"]
    );
}

#[test]
fn what_does_not_fit_is_named() {
    let config = config("llama3");
    let tensors = complete(&config, Naming::HuggingFace);
    let refused = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = tensors.clone();
        change(&mut tensors);
        sources(&config, Naming::HuggingFace, &tensors).unwrap_err().to_string()
    };
    let missing = refused(&|tensors| drop(tensors.remove("lm_head.weight")));
    assert_eq!(missing, "tensor \"lm_head.weight\" is missing");
    let unexpected = refused(&|tensors| drop(tensors.insert("model.layers.2.mlp.up_proj.weight".to_owned(), vec![1])));
    assert!(
        unexpected.starts_with("tensor \"model.layers.2.mlp.up_proj.weight\" is no part of a llama"),
        "{unexpected}"
    );
    let bias = refused(&|tensors| drop(tensors.insert("model.layers.0.self_attn.q_proj.bias".to_owned(), vec![16])));
    assert!(
        bias.starts_with("tensor \"model.layers.0.self_attn.q_proj.bias\""),
        "{bias}"
    );
    let shape = refused(&|tensors| drop(tensors.insert("model.norm.weight".to_owned(), vec![17])));
    assert_eq!(
        shape,
        "tensor \"model.norm.weight\" is [17], the model's settings make it [16]"
    );
}
