//! Tokens are those of transformers, from `tokenizer.json` and from GGUF, and come back as text.

mod common;

use common::{NAMES, bytes, expected, fixture, from_gguf, from_json, parse_gguf};
use serde_json::{Value, json};
use std::path::PathBuf;
use tightfit_text::{Tokenizer, TokenizerError};

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_u64().unwrap() as u32)
        .collect()
}

fn assert_as_expected(tokenizer: &Tokenizer, name: &str, source: &str) {
    let all = expected();
    let want = &all[name];
    for (at, string) in all["strings"].as_array().unwrap().iter().enumerate() {
        let string = string.as_str().unwrap();
        let place = format!("{name} from {source}, string {at}: {string:?}");
        let got = tokenizer.encode(string, false).unwrap();
        assert_eq!(got, ids(&want["ids"][at]), "{place}");
        assert_eq!(
            tokenizer.decode(&got, false).unwrap(),
            want["decoded"][at].as_str().unwrap(),
            "{place}"
        );
        assert_eq!(
            tokenizer.decode(&got, true).unwrap(),
            want["without_special"][at].as_str().unwrap(),
            "{place}"
        );
        assert!(got.iter().all(|&id| (id as usize) < tokenizer.vocab_size()), "{place}");
    }
}

#[test]
fn tokenizer_json_gives_the_tokens_of_transformers() {
    for name in NAMES {
        assert_as_expected(&from_json(name), name, "tokenizer.json");
    }
}

#[test]
fn gguf_gives_the_tokens_of_transformers() {
    for name in NAMES {
        let tokenizer = from_gguf(name);
        assert_as_expected(&tokenizer, name, "GGUF");
        assert_eq!(
            tokenizer.encode("Hello", true).unwrap(),
            ids(&expected()[name]["hello"]),
            "{name}"
        );
        assert!(tokenizer.bos().is_some() && tokenizer.eos_ids() == [tokenizer.eos().unwrap()]);
    }
}

#[test]
fn files_written_from_gguf_give_the_same_tokens() {
    for name in NAMES {
        let tokenizer = from_gguf(name);
        let folder = folder(&format!("written-{name}"), &tokenizer.hf_files().unwrap());
        let again = Tokenizer::from_folder(&folder).unwrap();
        assert_as_expected(&again, name, "written files");
        assert_eq!(
            again.encode("Hello", true).unwrap(),
            tokenizer.encode("Hello", true).unwrap()
        );
        assert_eq!(again.special_tokens(), tokenizer.special_tokens());
        assert_eq!(again.vocab_size(), tokenizer.vocab_size());
        // A folder's files go on as they are.
        assert_eq!(again.hf_files().unwrap(), tokenizer.hf_files().unwrap());
    }
}

/// A folder with these files, empty before.
fn folder(name: &str, files: &[(String, Vec<u8>)]) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    for (name, bytes) in files {
        std::fs::write(folder.join(name), bytes).unwrap();
    }
    folder
}

fn file(name: &str, json: Value) -> (String, Vec<u8>) {
    (name.to_owned(), serde_json::to_vec(&json).unwrap())
}

#[test]
fn a_folder_s_configuration_counts() {
    let tokenizer = ("tokenizer.json".to_owned(), bytes("gpt2.json"));
    let config = json!({
        "bos_token": {"content": "<|endoftext|>", "lstrip": false},
        "eos_token": "<|im_end|>",
        "pad_token": "<|new|>",
        "added_tokens_decoder": {"9999": {"content": "<|new|>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}},
        "add_bos_token": true,
        "add_eos_token": true,
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "from the configuration"}],
    });
    let files = [
        tokenizer.clone(),
        file("tokenizer_config.json", config),
        file("generation_config.json", json!({"eos_token_id": [0, 5]})),
    ];
    let path = folder("configured", &files);
    let plain = from_json("gpt2");
    let configured = Tokenizer::from_folder(&path).unwrap();
    let (bos, eos) = (configured.bos().unwrap(), configured.eos().unwrap());
    let (inner, outer) = (
        plain.encode("Hi", true).unwrap(),
        configured.encode("Hi", true).unwrap(),
    );
    assert_eq!(outer, [&[bos][..], &inner, &[eos]].concat());
    assert_eq!(
        configured.pad(),
        Some(plain.vocab_size() as u32),
        "a token that only the configuration lists gets the next id"
    );
    assert_eq!(
        configured.encode("<|new|>", false).unwrap(),
        [configured.pad().unwrap()]
    );
    assert_eq!(configured.eos_ids(), [0, eos, 5].as_slice());
    assert_eq!(configured.chat_template(), Some("from the configuration"));
    assert_ne!(configured.fingerprint(), plain.fingerprint());

    std::fs::write(path.join("chat_template.jinja"), "from a file").unwrap();
    assert_eq!(
        Tokenizer::from_folder(&path).unwrap().chat_template(),
        Some("from a file")
    );
    assert_eq!(configured.hf_files().unwrap().len(), 3);
    std::fs::write(path.join("tokenizer.json"), bytes("qwen2.json")).unwrap();
    let error = configured.hf_files().unwrap_err().to_string();
    assert!(error.contains("tokenizer.json: changed"), "{error}");
}

#[test]
fn roles_of_tokens_that_are_not_there_are_errors() {
    let tokenizer = ("tokenizer.json".to_owned(), bytes("gpt2.json"));
    for role in ["bos_token", "eos_token", "pad_token"] {
        for name in ["tokenizer_config.json", "special_tokens_map.json"] {
            let path = folder(
                "roles",
                &[tokenizer.clone(), file(name, json!({role: {"content": "<nope>"}}))],
            );
            let error = Tokenizer::from_folder(&path).unwrap_err().to_string();
            let expected = format!("{name}: {role}: the vocabulary has no token `<nope>`");
            assert!(error.ends_with(&expected), "{error}");
        }
    }
    let config = json!({"bos_token": null, "pad_token": null, "unk_token": null, "eos_token": {"content": "<|endoftext|>", "lstrip": false}});
    let path = folder("roles", &[tokenizer, file("tokenizer_config.json", config)]);
    let tokenizer = Tokenizer::from_folder(&path).unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.pad()), (None, None));
    assert!(tokenizer.eos().is_some());
}

#[test]
fn files_that_are_none_are_errors() {
    for name in [
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
        "chat_template.jinja",
    ] {
        for (make, kind) in [("mkfifo", "a FIFO"), ("mkdir", "a directory")] {
            let path = folder("no-files", &[("tokenizer.json".to_owned(), bytes("gpt2.json"))]);
            let _ = std::fs::remove_file(path.join(name));
            assert!(
                std::process::Command::new(make)
                    .arg(path.join(name))
                    .status()
                    .unwrap()
                    .success()
            );
            let error = Tokenizer::from_folder(&path).unwrap_err().to_string();
            assert!(error.contains(&format!("{name}: is {kind}")), "{error}");
        }
        let path = folder("no-files", &[("tokenizer.json".to_owned(), bytes("gpt2.json"))]);
        let _ = std::fs::remove_file(path.join(name));
        std::os::unix::fs::symlink("/dev/zero", path.join(name)).unwrap();
        let error = Tokenizer::from_folder(&path).unwrap_err().to_string();
        assert!(error.contains(&format!("{name}: is a device")), "{error}");
    }
}

#[test]
fn truncation_and_padding_of_a_file_are_left_out() {
    let mut spec: Value = serde_json::from_slice(&bytes("gpt2.json")).unwrap();
    spec["truncation"] = json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    spec["padding"] = json!({"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"});
    let tokenizer = Tokenizer::from_json(spec.to_string().as_bytes(), "test").unwrap();
    for text in ["a", "one two three four"] {
        assert_eq!(
            tokenizer.encode(text, true).unwrap(),
            from_json("gpt2").encode(text, true).unwrap()
        );
    }
}

#[test]
fn fingerprints_tell_tokenizers_apart() {
    let mut seen: Vec<String> = NAMES
        .iter()
        .flat_map(|name| [from_json(name), from_gguf(name)])
        .map(|t| t.fingerprint().to_owned())
        .collect();
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 2 * NAMES.len());
    assert_eq!(from_gguf("spm").fingerprint(), from_gguf("spm").fingerprint());
}

#[test]
fn streams_give_whole_characters_and_the_whole_text() {
    for name in NAMES {
        let tokenizer = from_gguf(name);
        for string in expected()["strings"].as_array().unwrap() {
            let string = string.as_str().unwrap();
            for skip in [false, true] {
                let ids = tokenizer.encode(string, true).unwrap();
                let mut stream = tokenizer.decode_stream(skip);
                let mut text = String::new();
                for id in &ids {
                    let part = stream.push(*id).unwrap();
                    assert!(
                        string.contains('\u{fffd}') || !part.contains('\u{fffd}'),
                        "{name} {string:?}: half a character: {part:?}"
                    );
                    text += &part;
                }
                text += &stream.finish().unwrap();
                assert_eq!(text, tokenizer.decode(&ids, skip).unwrap(), "{name} {string:?}");
            }
        }
    }
}

#[test]
fn a_stream_of_bytes_that_are_no_text_ends() {
    let tokenizer = from_gguf("spm");
    let byte = tokenizer.token_to_id("<0xFF>").unwrap();
    let mut stream = tokenizer.decode_stream(false);
    let parts: Vec<String> = (0..100).map(|_| stream.push(byte).unwrap()).collect();
    assert!(
        parts.iter().any(|part| !part.is_empty()),
        "garbage is held back forever"
    );
    assert_eq!(parts.concat() + &stream.finish().unwrap(), "\u{fffd}".repeat(100));
}

/// A GGUF file with the string `from` replaced by one of the same length.
fn patched(name: &str, from: &str, to: &str) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut bytes = bytes(name);
    let at = bytes
        .windows(from.len())
        .position(|window| window == from.as_bytes())
        .unwrap();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    bytes
}

#[test]
fn errors_name_the_place() {
    let error = parse_gguf(&patched("smollm.gguf", "smollm", "smullm")).unwrap_err();
    assert!(
        matches!(&error, TokenizerError::UnknownPreTokenizer { name, .. } if name == "smullm"),
        "{error}"
    );
    assert!(error.to_string().starts_with("tokenizer.ggml.pre"), "{error}");

    let cases = [
        (
            patched("gpt2.gguf", "tokenizer.ggml.merges", "tokenizer.ggml.nerges"),
            "tokenizer.ggml.merges: missing",
        ),
        (
            patched("gpt2.gguf", "tokenizer.ggml.tokens", "tokenizer.ggml.tokenz"),
            "tokenizer.ggml.tokens: missing",
        ),
        (
            patched("spm.gguf", "tokenizer.ggml.scores", "tokenizer.ggml.scorez"),
            "tokenizer.ggml.scores: 0 scores for 640 tokens",
        ),
        (patched("gpt2.gguf", "tokenizer.ggml.pre", "tokenizer.ggml.mod"), ""),
    ];
    for (bytes, expected) in cases {
        match parse_gguf(&bytes) {
            Ok(_) => assert!(expected.is_empty(), "no error where this was due: {expected}"),
            Err(error) => assert!(!expected.is_empty() && error.to_string().contains(expected), "{error}"),
        }
    }

    let invalid = |json: Value| {
        Tokenizer::from_json(json.to_string().as_bytes(), "some/tokenizer.json")
            .unwrap_err()
            .to_string()
    };
    let mut spec: Value = serde_json::from_slice(&bytes("gpt2.json")).unwrap();
    spec["model"]["dropout"] = json!(0.1);
    assert!(invalid(spec.clone()).contains("some/tokenizer.json: model.dropout"));
    spec["model"]["dropout"] = Value::Null;
    spec["model"]["continuing_subword_prefix"] = json!("é");
    assert!(invalid(spec.clone()).contains("continuing_subword_prefix"));
    spec["model"]["continuing_subword_prefix"] = Value::Null;
    spec["model"]["vocab"]["a"] = json!(4_000_000_000_u32);
    assert!(invalid(spec.clone()).contains("the id 4000000000"));
    let unigram = json!({"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}});
    assert!(invalid(unigram).contains("model.type: `Unigram` is not supported"));
    assert!(invalid(json!({"version": "1.0"})).contains("missing field `model`"));
    let missing = Tokenizer::from_folder(&fixture("nowhere")).unwrap_err().to_string();
    assert!(missing.contains("nowhere/tokenizer.json"), "{missing}");
}
