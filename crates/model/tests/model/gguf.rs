//! Metadata of GGUF files.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use tightfit_format::gguf::{Array, Metadata, Value};
use tightfit_ir::op::RopeScaling;
use tightfit_model::family::{LLAMA, QWEN2, QWEN3};
use tightfit_model::{DecoderConfig, ModelError};

/// A file: its metadata and the tensors that say something.
#[derive(Clone)]
struct File {
    keys: BTreeMap<String, Value>,
    tensors: BTreeSet<String>,
    rope_freqs: Option<Vec<f32>>,
}

impl File {
    /// A small file of an architecture, with every key that llama.cpp's converter writes for it.
    fn new(architecture: &str) -> Self {
        let of = |key: &str| format!("{architecture}.{key}");
        let text = |text: &str| Value::Str(text.to_owned());
        let sizes = [
            ("block_count", 2),
            ("context_length", 128),
            ("embedding_length", 16),
            ("feed_forward_length", 20),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
            ("rope.dimension_count", 4),
        ];
        let mut keys: BTreeMap<_, _> = sizes.map(|(key, size)| (of(key), Value::U64(size))).into();
        let tokens = ["a", "b", "c"].map(str::to_owned).to_vec();
        keys.extend([
            ("general.architecture".to_owned(), text(architecture)),
            ("general.type".to_owned(), text("model")),
            ("general.name".to_owned(), text("Small")),
            // `f32`s in the file.
            (of("attention.layer_norm_rms_epsilon"), Value::F64(f64::from(1e-5_f32))),
            (of("rope.freq_base"), Value::F64(1e6)),
            ("tokenizer.ggml.tokens".to_owned(), Value::Array(Array::Str(tokens))),
            ("tokenizer.ggml.bos_token_id".to_owned(), Value::U64(1)),
            ("tokenizer.ggml.eos_token_id".to_owned(), Value::U64(2)),
        ]);
        Self {
            keys,
            tensors: BTreeSet::from(["output.weight".to_owned()]),
            rope_freqs: None,
        }
    }

    fn with(mut self, key: &str, value: Value) -> Self {
        self.keys.insert(key.to_owned(), value);
        self
    }

    fn without(mut self, key: &str) -> Self {
        self.keys.remove(key).unwrap();
        self
    }

    fn tensor(mut self, name: &str) -> Self {
        self.tensors.insert(name.to_owned());
        self
    }

    fn config(&self) -> Result<DecoderConfig, ModelError> {
        let metadata = Metadata::new(Path::new("small.gguf"), self.keys.clone());
        DecoderConfig::from_gguf(
            &metadata,
            |name| self.tensors.contains(name),
            self.rope_freqs.as_deref(),
        )
    }

    fn refused(&self) -> String {
        self.config().unwrap_err().to_string()
    }
}

#[test]
fn llama() {
    let expected = DecoderConfig {
        family: &LLAMA,
        vocab_size: 3,
        hidden_size: 16,
        intermediate_size: 20,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: Some(4),
        max_position_embeddings: 128,
        rms_norm_eps: 1e-5,
        rope_theta: 1e6,
        ..DecoderConfig::default()
    };
    assert_eq!(File::new("llama").config().unwrap(), expected);
    let more = File::new("llama")
        .with("llama.vocab_size", Value::U64(50))
        .with("llama.attention.key_length", Value::U64(6))
        .with("llama.attention.value_length", Value::U64(6))
        .with("llama.rope.dimension_count", Value::I64(6))
        .without("llama.attention.head_count_kv")
        .without("llama.rope.freq_base")
        .tensor("blk.0.attn_q.bias")
        .config()
        .unwrap();
    assert_eq!(
        (more.vocab_size, more.head_dim, more.num_key_value_heads),
        (50, Some(6), 4)
    );
    assert_eq!(
        (more.rope_theta, more.attention_bias, more.mlp_bias),
        (10_000.0, true, false)
    );
}

#[test]
fn qwen2() {
    let config = File::new("qwen2").tensor("blk.0.attn_q.bias").config().unwrap();
    assert_eq!(
        (config.family, config.attention_bias, config.output_bias()),
        (&QWEN2, true, false)
    );
    assert_eq!((config.sliding_window, config.bos_token_id), (None, Some(1)));
    // The family has biases: a file without is another model.
    assert!(File::new("qwen2").refused().starts_with("attention_bias is false"));
}

#[test]
fn qwen3() {
    let config = File::new("qwen3")
        .with("qwen3.attention.key_length", Value::U64(8))
        .with("qwen3.attention.value_length", Value::U64(8))
        .with("qwen3.rope.dimension_count", Value::U64(8))
        .config()
        .unwrap();
    assert_eq!(
        (config.family, config.head_dim, config.attention_bias),
        (&QWEN3, Some(8), false)
    );
}

/// llama.cpp writes Mistral's models under the name of llama.
#[test]
fn mistral_has_no_name_of_its_own() {
    assert_eq!(
        File::new("mistral").refused(),
        "general.architecture is \"mistral\", which is not a family known here; known are llama, qwen2, qwen3"
    );
}

#[test]
fn a_file_without_a_head_ties_it() {
    let mut file = File::new("llama");
    assert!(!file.config().unwrap().tie_word_embeddings);
    file.tensors.clear();
    assert!(file.config().unwrap().tie_word_embeddings);
}

#[test]
fn rope_scaling() {
    let text = |text: &str| Value::Str(text.to_owned());
    let scaling = |file: File| file.config().unwrap().rope_scaling;
    let linear = File::new("llama")
        .with("llama.rope.scaling.type", text("linear"))
        .with("llama.rope.scaling.factor", Value::F64(4.0));
    assert_eq!(scaling(linear.clone()), Some(RopeScaling::Linear { factor: 4.0 }));
    let old = File::new("llama").with("llama.rope.scale_linear", Value::F64(2.0));
    assert_eq!(scaling(old), Some(RopeScaling::Linear { factor: 2.0 }));
    assert_eq!(
        scaling(linear.clone().with("llama.rope.scaling.type", text("none"))),
        None
    );
    let yarn = linear.clone().with("llama.rope.scaling.type", text("yarn"));
    assert!(yarn.refused().starts_with("llama.rope.scaling.type: \"yarn\""));

    let mut llama3 = File::new("llama")
        .with("llama.rope.freq_base", Value::F64(500_000.0))
        .tensor("rope_freqs.weight");
    assert_eq!(llama3.refused(), "rope_freqs.weight: missing");
    llama3.rope_freqs = Some(vec![1.0, 1.0]);
    assert_eq!(scaling(llama3.clone()), None);
    // Wavelengths of 6 and of 4443: the second is between, and its divisor says no factor that fits.
    llama3.rope_freqs = Some(vec![1.0, 8.0]);
    assert!(llama3.refused().starts_with("rope_freqs.weight: number 1"));
    let mut both = linear;
    both.rope_freqs = Some(vec![1.0, 2.0]);
    assert!(both.refused().starts_with("rope_freqs.weight: "));
}

#[test]
fn what_is_missing_unknown_or_impossible_is_named() {
    let file = || File::new("llama");
    for key in [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "general.architecture",
    ] {
        assert_eq!(file().without(key).refused(), format!("{key}: missing"));
    }
    assert!(
        file()
            .without("tokenizer.ggml.tokens")
            .refused()
            .contains("tokenizer.ggml.tokens")
    );
    for (key, value) in [
        ("llama.logit_scale", Value::F64(2.0)),
        ("llama.expert_count", Value::U64(8)),
        ("llama.attention.sliding_window", Value::U64(8)),
        ("llama.attention.causal", Value::Bool(false)),
        ("llama.attention.value_length", Value::U64(6)),
        ("llama.rope.dimension_count", Value::U64(2)),
        ("llama.rope.scaling.attn_factor", Value::F64(0.5)),
        ("llama.block_count", Value::Str("2".to_owned())),
        ("llama.block_count", Value::I64(-2)),
        ("llama.attention.head_count_kv", Value::Array(Array::U64(vec![2, 4]))),
        ("tokenizer.ggml.bos_token_id", Value::U64(1 << 32)),
        ("general.type", Value::Str("adapter".to_owned())),
        ("general.architecture", Value::U64(1)),
    ] {
        let error = file().with(key, value.clone()).refused();
        assert!(error.contains(key), "{error}\nexpected {key}");
    }
    for (key, value, named) in [
        ("llama.block_count", u64::MAX, "num_hidden_layers is "),
        ("llama.attention.head_count", 0, "num_attention_heads is 0"),
        ("llama.attention.head_count_kv", 3, "num_attention_heads is 4"),
        ("llama.vocab_size", 0, "vocab_size is 0"),
    ] {
        let error = file()
            .without("llama.rope.dimension_count")
            .with(key, Value::U64(value))
            .refused();
        assert!(error.starts_with(named), "{error}\nexpected {named}");
    }
    let nan = file().with("llama.rope.freq_base", Value::F64(f64::NAN));
    assert!(nan.refused().starts_with("rope_theta is NaN"));
}
