//! Files made to break the tokenizer readers give errors, never a panic.

mod common;

use common::{NAMES, bytes, parse_gguf};
use proptest::prelude::*;
use serde_json::{Value, json};
use tightfit_text::Tokenizer;

/// Reads a file and, if it is one, uses what it describes.
fn use_all(tokenizer: Result<Tokenizer, impl std::fmt::Display>) {
    match tokenizer {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(tokenizer) => {
            let ids = tokenizer
                .encode("Hello <|im_start|> wörld 内存\n\n  12345", true)
                .unwrap_or_default();
            let _ = tokenizer.decode(&ids, false);
            let _ = tokenizer.decode(&[0, 1, 500, u32::MAX], true);
            let mut stream = tokenizer.decode_stream(true);
            ids.iter().for_each(|&id| drop(stream.push(id)));
            let _ = tokenizer.hf_files();
        }
    }
}

/// A change to a file: bytes replaced, cut out or doubled.
fn changes() -> impl Strategy<Value = Vec<(usize, usize, Vec<u8>)>> {
    let bytes = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..5),
        proptest::sample::select(vec![
            "null",
            "-1",
            "4294967295",
            "1e999",
            "[]",
            "{}",
            "\"\"",
            "true",
            "\u{1F600}",
            "0"
        ])
        .prop_map(|s| s.as_bytes().to_vec()),
    ];
    proptest::collection::vec((any::<usize>(), 0..12usize, bytes), 1..4)
}

fn changed(mut file: Vec<u8>, changes: Vec<(usize, usize, Vec<u8>)>) -> Vec<u8> {
    for (at, len, bytes) in changes {
        let at = at % file.len();
        let end = (at + len).min(file.len());
        file.splice(at..end, bytes);
    }
    file
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        use_all(Tokenizer::from_json(&bytes, "random"));
        use_all(parse_gguf(&bytes));
    }

    #[test]
    fn changed_tokenizer_json(name in proptest::sample::select(NAMES.to_vec()), changes in changes()) {
        use_all(Tokenizer::from_json(&changed(bytes(&format!("{name}.json")), changes), "changed"));
    }

    #[test]
    fn changed_gguf(name in proptest::sample::select(NAMES.to_vec()), changes in changes()) {
        use_all(parse_gguf(&changed(bytes(&format!("{name}.gguf")), changes)));
    }
}

#[test]
fn known_tricks() {
    let deep = "[".repeat(100_000);
    let model = r#""model":{"type":"BPE","vocab":{"a":0},"merges":[]}"#;
    let tricks = [
        deep.clone(),
        format!(r#"{{"model":{deep}"#),
        format!(
            r#"{{{model},"pre_tokenizer":{}"#,
            r#"{"type":"Sequence","pretokenizers":["#.repeat(10_000)
        ),
        format!(
            r#"{{{model},"normalizer":{{"type":"Replace","pattern":{{"Regex":"(((a{{1000}}){{1000}}){{1000}})"}},"content":""}}}}"#
        ),
        format!(
            r#"{{{model},"pre_tokenizer":{{"type":"Split","pattern":{{"Regex":"(?=(a*)*b)"}},"behavior":"Isolated","invert":false}}}}"#
        ),
        format!(r#"{{{model},"normalizer":{{"type":"Precompiled","precompiled_charsmap":"AAAA"}}}}"#),
        format!(
            r#"{{{model},"added_tokens":[{{"id":4294967295,"content":"x","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}]}}"#
        ),
        r#"{"model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":["a b"]}}"#.to_owned(),
        r#"{"model":{"type":"Unigram","vocab":[["a",1e308],["b",-1e308]],"unk_id":7}}"#.to_owned(),
        r#"{"model":{"type":"WordLevel","vocab":{},"unk_token":"?"}}"#.to_owned(),
    ];
    for trick in tricks {
        use_all(Tokenizer::from_json(trick.as_bytes(), "trick"));
    }
}

#[test]
fn steps_that_blow_texts_up_are_errors() {
    let replace =
        |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
    let long = "x".repeat(65);
    let template = |count: usize| {
        let token = json!({"SpecialToken": {"id": "a", "type_id": 0}});
        json!({"type": "TemplateProcessing", "single": vec![token.clone(); count], "pair": [token],
            "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}}})
    };
    let cases = [
        ("normalizer", replace("e", &"x".repeat(200_000))),
        ("normalizer", replace("e", &"x".repeat(17))),
        ("normalizer", replace("", "x")),
        ("normalizer", json!({"type": "Prepend", "prepend": long})),
        (
            "normalizer",
            json!({"type": "Sequence", "normalizers": vec![replace("a", "aa"); 5]}),
        ),
        (
            "normalizer",
            json!({"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": []}]}),
        ),
        (
            "normalizer",
            json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "y".repeat(20)}),
        ),
        (
            "pre_tokenizer",
            json!({"type": "Sequence", "pretokenizers": vec![json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true}); 5]}),
        ),
        ("decoder", replace("a", &long)),
        (
            "decoder",
            json!({"type": "Sequence", "decoders": vec![json!({"type": "Fuse"}); 33]}),
        ),
        ("post_processor", template(3000)),
    ];
    let mut spec: Value = serde_json::from_slice(&bytes("gpt2.json")).unwrap();
    let read = |spec: &Value| Tokenizer::from_json(spec.to_string().as_bytes(), "some/tokenizer.json");
    for (part, step) in cases {
        let before = spec[part].take();
        spec[part] = step;
        let error = read(&spec).unwrap_err().to_string();
        assert!(error.starts_with("some/tokenizer.json: "), "{error}");
        spec[part] = before;
    }
    // Those of real tokenizers are read.
    spec["normalizer"] = json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")]});
    spec["post_processor"] = json!({"type": "Sequence", "processors": [{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true}, template(2)]});
    read(&spec).unwrap();
}
