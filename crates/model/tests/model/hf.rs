//! `config.json`.

use serde_json::{Value, json};
use tightfit_ir::op::RopeScaling;
use tightfit_model::family::{LLAMA, MISTRAL, QWEN2, QWEN3};
use tightfit_model::{DecoderConfig, LayerType};

use crate::{CASES, config, config_json, refused};

/// SmolLM2-135M-Instruct's file, as transformers 4 wrote it.
const SMOLLM2: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
    "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null,
    "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "use_cache": true, "vocab_size": 49152
}"#;

/// The smallest file of a family, with more fields.
fn with(model_type: &str, fields: Value) -> String {
    let mut json = json!({ "model_type": model_type });
    json.as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    json.to_string()
}

fn read(model_type: &str, fields: Value) -> DecoderConfig {
    DecoderConfig::from_hf(&with(model_type, fields)).unwrap()
}

#[test]
fn a_real_file() {
    let config = DecoderConfig::from_hf(SMOLLM2).unwrap();
    let expected = DecoderConfig {
        family: &LLAMA,
        vocab_size: 49_152,
        hidden_size: 576,
        intermediate_size: 1536,
        num_hidden_layers: 30,
        num_attention_heads: 9,
        num_key_value_heads: 3,
        head_dim: Some(64),
        max_position_embeddings: 8192,
        rms_norm_eps: 1e-5,
        rope_theta: 100_000.0,
        rope_scaling: None,
        sliding_window: None,
        layer_types: None,
        attention_bias: false,
        mlp_bias: false,
        tie_word_embeddings: true,
        initializer_range: 0.041_666_666_666_666_664,
        bos_token_id: Some(1),
        eos_token_id: vec![2],
        pad_token_id: Some(2),
    };
    assert_eq!(config, expected);
    assert_eq!(config.parameters(), 134_515_008);
}

#[test]
fn what_is_absent_is_what_transformers_assumes() {
    let llama = read("llama", json!({ "num_attention_heads": 16 }));
    assert_eq!(
        (llama.family, llama.num_key_value_heads, llama.head_dim()),
        (&LLAMA, 16, 256)
    );
    assert_eq!(
        (llama.vocab_size, llama.rope_theta, llama.eos_token_id),
        (32_000, 10_000.0, vec![2])
    );

    let mistral = read("mistral", json!({}));
    assert_eq!((mistral.family, mistral.num_key_value_heads), (&MISTRAL, 8));
    assert_eq!(mistral.sliding_window, Some(4096));
    assert_eq!(mistral.window(31), Some(4096));
    assert_eq!(read("mistral", json!({ "sliding_window": null })).window(31), None);
    assert_eq!(
        read("mistral", json!({ "num_key_value_heads": null })).num_key_value_heads,
        32
    );

    let qwen2 = read("qwen2", json!({ "num_attention_heads": 64, "sliding_window": 16 }));
    assert_eq!(
        (qwen2.family, qwen2.num_key_value_heads, qwen2.head_dim()),
        (&QWEN2, 32, 64)
    );
    assert_eq!((qwen2.sliding_window, qwen2.attention_bias), (None, true));

    let qwen3 = read("qwen3", json!({}));
    assert_eq!(
        (qwen3.family, qwen3.head_dim(), qwen3.attention_bias),
        (&QWEN3, 128, false)
    );
    assert_eq!((qwen3.bos_token_id, qwen3.eos_token_id), (None, vec![]));
}

#[test]
fn windows_of_qwen_begin_at_a_layer_or_are_listed() {
    let sizes = json!({ "num_hidden_layers": 3, "use_sliding_window": true, "max_window_layers": 2 });
    let windows = |config: &DecoderConfig| [0, 1, 2].map(|layer| config.window(layer));
    assert_eq!(windows(&read("qwen2", sizes.clone())), [None, None, Some(4096)]);

    let mut listed = sizes;
    listed["layer_types"] = json!(["sliding_attention", "full_attention", "full_attention"]);
    listed["sliding_window"] = 7.into();
    let config = read("qwen3", listed.clone());
    assert_eq!(windows(&config), [Some(7), None, None]);
    assert_eq!(
        config.layer_types,
        Some(vec![LayerType::Sliding, LayerType::Full, LayerType::Full])
    );

    listed["use_sliding_window"] = false.into();
    assert!(refused(&with("qwen3", listed.clone())).starts_with("layer_types "));
    listed["layer_types"] = json!(["full_attention"]);
    assert!(refused(&with("qwen3", listed.clone())).starts_with("layer_types "));
    listed["layer_types"] = json!(["full_attention", "chunked_attention", "full_attention"]);
    assert!(refused(&with("qwen3", listed)).starts_with("layer_types: "));
}

#[test]
fn rope_in_both_spellings() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let expected = Some(RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192.0,
    });
    let old = read("llama", json!({ "rope_theta": 500000.0, "rope_scaling": llama3 }));
    assert_eq!((old.rope_theta, old.rope_scaling), (500_000.0, expected));
    let mut parameters = llama3.clone();
    parameters["rope_theta"] = 500_000.0.into();
    let new = read("llama", json!({ "rope_parameters": parameters, "rope_theta": 1.0 }));
    assert_eq!((new.rope_theta, new.rope_scaling), (500_000.0, expected));

    let linear = read("llama", json!({ "rope_scaling": { "type": "linear", "factor": 2 } }));
    assert_eq!(linear.rope_scaling, Some(RopeScaling::Linear { factor: 2.0 }));
    let default = read(
        "llama",
        json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 7.0 } }),
    );
    assert_eq!((default.rope_theta, default.rope_scaling), (7.0, None));
}

#[test]
fn rope_that_is_not_understood_is_refused() {
    for (scaling, named) in [
        (
            json!({ "rope_type": "yarn", "factor": 4.0 }),
            "rope_scaling.rope_type: \"yarn\"",
        ),
        (
            json!({ "type": "dynamic", "factor": 4.0 }),
            "rope_scaling.rope_type: \"dynamic\"",
        ),
        (json!({ "type": "linear" }), "rope_scaling.factor: missing"),
        (json!({ "type": "linear", "factor": "2" }), "rope_scaling.factor: \"2\""),
        (json!({ "type": "linear", "factor": 0.0 }), "factor is 0"),
        (json!({ "type": "linear", "factor": -1.0 }), "factor is -1"),
        (
            json!({ "type": "linear", "rope_type": "llama3", "factor": 2.0 }),
            "rope_scaling.type: \"linear\"",
        ),
        (
            json!({ "type": "linear", "factor": 2.0, "beta_fast": 1 }),
            "rope_scaling.beta_fast: ",
        ),
        (json!({ "factor": 2.0 }), "rope_scaling.factor: "),
        (
            json!({ "partial_rotary_factor": 0.5 }),
            "rope_scaling.partial_rotary_factor: 0.5",
        ),
        (
            json!({ "full_attention": { "rope_type": "default" } }),
            "rope_scaling.full_attention: ",
        ),
        (json!([]), "rope_scaling: a list"),
        (
            json!({ "type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0 }),
            "high_freq_factor is 4",
        ),
    ] {
        let error = refused(&with("llama", json!({ "rope_scaling": scaling })));
        assert!(error.starts_with(named), "{error}\nexpected {named}");
    }
    let both = json!({ "rope_scaling": { "type": "default" }, "rope_parameters": { "type": "default" } });
    assert!(refused(&with("llama", both)).starts_with("rope_scaling: "));
}

#[test]
fn what_is_unknown_or_impossible_is_named() {
    for (model_type, fields, named) in [
        ("llama", json!({ "hidden_dropout": 0.1 }), "hidden_dropout: "),
        (
            "llama",
            json!({ "quantization_config": { "bits": 4 } }),
            "quantization_config: ",
        ),
        ("llama", json!({ "sliding_window": 4096 }), "sliding_window: "),
        ("mistral", json!({ "attention_bias": true }), "attention_bias: "),
        ("mistral", json!({ "layer_types": ["full_attention"] }), "layer_types: "),
        ("qwen2", json!({ "mlp_bias": true }), "mlp_bias: "),
        ("qwen2", json!({ "use_mrope": true }), "use_mrope: true"),
        ("llama", json!({ "pretraining_tp": 2 }), "pretraining_tp: 2"),
        ("llama", json!({ "attention_dropout": 0.1 }), "attention_dropout: 0.1"),
        ("llama", json!({ "hidden_act": "gelu" }), "hidden_act: \"gelu\""),
        ("llama", json!({ "is_decoder": true }), "is_decoder: true"),
        (
            "llama",
            json!({ "architectures": ["LlamaForSequenceClassification"] }),
            "architectures: ",
        ),
        ("llama", json!({ "hidden_size": -576 }), "hidden_size: -576"),
        ("llama", json!({ "hidden_size": "576" }), "hidden_size: \"576\""),
        ("llama", json!({ "hidden_size": 0 }), "hidden_size is 0"),
        ("llama", json!({ "hidden_size": 100 }), "hidden_size is 100"),
        ("llama", json!({ "vocab_size": u64::MAX }), "vocab_size is "),
        (
            "qwen2",
            json!({ "num_hidden_layers": u64::MAX, "use_sliding_window": true }),
            "num_hidden_layers is ",
        ),
        ("llama", json!({ "num_attention_heads": 0 }), "num_attention_heads is 0"),
        (
            "llama",
            json!({ "num_key_value_heads": 5 }),
            "num_attention_heads is 32",
        ),
        ("llama", json!({ "head_dim": 7 }), "head_dim is 7"),
        ("llama", json!({ "rms_norm_eps": -1.0 }), "rms_norm_eps is -1"),
        ("llama", json!({ "rope_theta": 0 }), "rope_theta is 0"),
        ("llama", json!({ "rope_theta": 1e300 }), "rope_theta is "),
        (
            "llama",
            json!({ "tie_word_embeddings": "yes" }),
            "tie_word_embeddings: \"yes\"",
        ),
        ("llama", json!({ "eos_token_id": [1, -2] }), "eos_token_id: a list"),
        (
            "llama",
            json!({ "bos_token_id": 4294967296_u64 }),
            "bos_token_id: 4294967296",
        ),
        ("mistral", json!({ "sliding_window": 0 }), "sliding_window is 0"),
    ] {
        let error = refused(&with(model_type, fields));
        assert!(error.starts_with(named), "{error}\nexpected {named}");
    }
    let unset = json!({ "hidden_dropout": null, "eos_token_id": [1, 2] });
    assert_eq!(read("llama", unset).eos_token_id, [1, 2]);
}

#[test]
fn unknown_families_are_refused_with_those_that_are_known() {
    assert_eq!(
        refused(r#"{"model_type": "gemma"}"#),
        "model_type is \"gemma\", which is not a family known here; known are llama, mistral, qwen2, qwen3"
    );
    assert_eq!(refused("{}"), "model_type: missing");
    let long = refused(&json!({ "model_type": format!("a\u{1b}[2J\n{}", "b".repeat(1000)) }).to_string());
    assert!(long.len() < 200 && !long.contains(char::is_control), "{long:?}");
    assert!(refused(r#"{"model_type": 1}"#).starts_with("model_type: 1"));
    assert!(refused(r#"{"model_type": "llama", "model_type": "llama"}"#).contains("\"model_type\" is given twice"));
}

#[test]
fn files_that_are_written_are_read_as_the_same() {
    for case in CASES {
        let config = config(case);
        assert_eq!(
            DecoderConfig::from_hf(&config.to_hf().to_string()).unwrap(),
            config,
            "{case}"
        );
    }
    let many = read("llama", json!({ "eos_token_id": [5, 6], "bos_token_id": null }));
    assert_eq!(DecoderConfig::from_hf(&many.to_hf().to_string()).unwrap(), many);
}

/// transformers wrote the files of the fixtures: whatever the one here has in common with them says the same.
#[test]
fn files_that_are_written_say_what_those_of_transformers_say() {
    for case in CASES {
        let theirs: Value = serde_json::from_str(&config_json(case)).unwrap();
        let ours = config(case).to_hf();
        for (field, value) in theirs.as_object().unwrap() {
            match field.as_str() {
                "pretraining_tp" | "transformers_version" | "use_cache" => continue,
                // Without windows, where they would begin says nothing.
                "max_window_layers" if ours["use_sliding_window"] == false => continue,
                "rope_parameters" => {
                    assert_eq!(ours["rope_theta"], value["rope_theta"], "{case}");
                    let scaling = value["rope_type"] != "default";
                    assert_eq!(
                        ours["rope_scaling"]["rope_type"] == value["rope_type"],
                        scaling,
                        "{case}"
                    );
                }
                _ => assert_eq!(ours[field], *value, "{case}: {field}"),
            }
        }
    }
}
