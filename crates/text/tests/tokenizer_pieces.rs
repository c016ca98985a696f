//! Long texts are encoded in pieces, and get the tokens that they would get whole.

mod common;

use common::{NAMES, bytes, from_gguf, from_json};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::str::FromStr;
use tightfit_text::Tokenizer;

/// The `tokenizers` crate, with no piece of ours around it.
fn whole(tokenizer: &Tokenizer) -> tokenizers::Tokenizer {
    let files = tokenizer.hf_files().unwrap();
    tokenizers::Tokenizer::from_str(std::str::from_utf8(&files[0].1).unwrap()).unwrap()
}

/// `spm.json` with spaces put in front by a normaliser, as Llama 2's own file does it.
fn legacy() -> Tokenizer {
    let mut spec: Value = serde_json::from_slice(&bytes("spm.json")).unwrap();
    spec["pre_tokenizer"] = Value::Null;
    spec["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
    Tokenizer::from_json(spec.to_string().as_bytes(), "legacy").unwrap()
}

/// `spm.json` without a space in front.
fn bare() -> Tokenizer {
    let mut spec: Value = serde_json::from_slice(&bytes("spm.json")).unwrap();
    spec["pre_tokenizer"]["prepend_scheme"] = json!("never");
    Tokenizer::from_json(spec.to_string().as_bytes(), "bare").unwrap()
}

fn all() -> Vec<(String, Tokenizer)> {
    let files = NAMES.into_iter().flat_map(|name| {
        [
            (format!("{name}.json"), from_json(name)),
            (format!("{name}.gguf"), from_gguf(name)),
        ]
    });
    files
        .chain([("legacy".to_owned(), legacy()), ("bare".to_owned(), bare())])
        .collect()
}

/// Words and what stands between them: everything that rules on cuts speak of.
fn text() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        8 => "[a-zA-Z]{1,12}",
        2 => "[a-z]{1,4}'(s|ll|re|T|x)",
        2 => "[0-9]{1,8}",
        2 => "[!-/:-@\\[-`{-~]{1,4}",
        3 => "[一-龥]{1,6}[，。、]?",
        1 => "[一-龥]{1,3}，[一-龥]{1,3}",
        1 => "[а-яéüÅ\u{301}\u{323}😀👍ﬁⅣ]{1,4}",
        1 => Just("<|im_start|>".to_owned()),
        1 => Just("<think>".to_owned()),
        1 => Just("</s>".to_owned()),
        1 => Just("▁".to_owned()),
    ];
    let gap = prop_oneof![
        8 => Just(" ".to_owned()),
        3 => Just("\n".to_owned()),
        2 => Just(String::new()),
        1 => "[ \n\t\r\u{a0}]{1,5}",
    ];
    proptest::collection::vec((word, gap), 40..400)
        .prop_map(|words| words.into_iter().map(|(word, gap)| word + &gap).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn pieces_have_the_tokens_of_the_whole(block in text(), odd in "[a-z \n]{0,40}") {
        // Repeating a block by an odd stretch moves it along, so that different places of it come to lie at the end of a piece.
        let mut text = String::new();
        while text.len() < 200 << 10 {
            text += &block;
            text += &odd;
        }
        for (name, tokenizer) in all() {
            let mut pieces = 0;
            let mut ids = Vec::new();
            tokenizer.encode_pieces(&text, true, &mut |piece| { pieces += 1; ids.extend_from_slice(piece) }).unwrap();
            prop_assert!(pieces >= 4, "{}: only {} pieces", name, pieces);
            let want = whole(&tokenizer).encode(&*text, true).unwrap();
            prop_assert!(ids == want.get_ids(), "{}: other tokens than the whole text has", name);
        }
    }
}

#[test]
fn a_text_without_a_place_to_cut_is_cut_all_the_same() {
    let text = "木".repeat(100_000);
    for (name, tokenizer) in all() {
        let mut longest = 0;
        let mut ids = Vec::new();
        let mut sink = |piece: &[u32]| {
            longest = longest.max(piece.len());
            ids.extend_from_slice(piece);
        };
        tokenizer.encode_pieces(&text, false, &mut sink).unwrap();
        assert!(longest <= 64 << 10, "{name}: a piece of {longest} tokens");
        assert_eq!(
            tokenizer.decode(&ids, false).unwrap().replace(' ', "").len(),
            text.len(),
            "{name}"
        );
    }
}

#[test]
fn encoding_starts_no_thread() {
    let count = || std::fs::read_dir("/proc/self/task").map(Iterator::count).ok();
    let before = count();
    for (_, tokenizer) in all() {
        tokenizer
            .encode(&"a memory of every step ".repeat(10_000), true)
            .unwrap();
    }
    // The test harness runs tests on threads of its own; those end, none is added by encoding.
    assert!(
        count() <= before.map(|n| n + 2),
        "{before:?} threads before, {:?} after",
        count()
    );
}
