//! Whatever a `config.json` says, reading it ends in a configuration that makes a graph, or in an error.

use proptest::prelude::*;
use serde_json::{Map, Value};
use tightfit_model::{BatchShape, DecoderConfig};

use crate::{CASES, config_json};

/// Reads a text; builds the graph where that is small enough to be quick.
fn read(text: &str) {
    let Ok(config) = DecoderConfig::from_hf(text) else {
        return;
    };
    let _ = config.parameters();
    let written = config.to_hf().to_string();
    assert_eq!(DecoderConfig::from_hf(&written).unwrap(), config, "{text}");
    if config.num_hidden_layers <= 4 {
        let shape = BatchShape {
            batch: 1,
            seq: 1,
            loss_chunk: 1,
        };
        config.loss(shape).unwrap().graph.verify().unwrap();
    }
}

/// Numbers at the edges, and every other kind of value.
fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        prop::sample::select(vec![0, 1, 2, 3, 4, 8, 64, 1 << 31, u64::MAX]).prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        prop::sample::select(vec![
            "silu",
            "linear",
            "llama3",
            "default",
            "full_attention",
            "sliding_attention",
            "é"
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 4, |inner| {
        let key = prop::sample::select(vec![
            "rope_type",
            "type",
            "factor",
            "rope_theta",
            "low_freq_factor",
            "x",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key, inner), 0..5).prop_map(|entries| {
                let entries = entries.into_iter().map(|(key, value)| (key.to_owned(), value));
                Value::Object(entries.collect::<Map<_, _>>())
            }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text(text in ".{0,200}") {
        read(&text);
    }

    #[test]
    fn any_bytes_in_a_real_file(case in prop::sample::select(&CASES[..]), at in any::<prop::sample::Index>(),
                                bytes in prop::collection::vec(any::<u8>(), 0..6), cut in 0..8_usize) {
        let mut text = config_json(case).into_bytes();
        let start = at.index(text.len());
        let end = (start + cut).min(text.len());
        text.splice(start..end, bytes);
        read(&String::from_utf8_lossy(&text));
    }

    #[test]
    fn any_value_of_a_field(case in prop::sample::select(&CASES[..]), at in any::<prop::sample::Index>(), value in value()) {
        let mut json: Map<String, Value> = serde_json::from_str(&config_json(case)).unwrap();
        let field = at.index(json.len());
        let (_, slot) = json.iter_mut().nth(field).unwrap();
        *slot = value;
        read(&Value::Object(json).to_string());
    }
}
