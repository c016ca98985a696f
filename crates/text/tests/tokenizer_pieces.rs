//! Long texts are encoded in pieces, and get the tokens that they would get whole.

mod common;

use common::{NAMES, expected, from_gguf};
use std::str::FromStr;
use tightfit_text::Tokenizer;

/// The `tokenizers` crate, with no piece of ours around it.
fn whole(tokenizer: &Tokenizer) -> tokenizers::Tokenizer {
    let files = tokenizer.hf_files().unwrap();
    tokenizers::Tokenizer::from_str(std::str::from_utf8(&files[0].1).unwrap()).unwrap()
}

fn all() -> Vec<(String, Tokenizer)> {
    NAMES
        .into_iter()
        .map(|name| (name.to_owned(), from_gguf(name)))
        .collect()
}

#[test]
fn a_long_text_has_the_tokens_that_it_has_whole() {
    let text: String = expected()["strings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| format!("{} and\n", s.as_str().unwrap()))
        .collect();
    let text = text.repeat(200_000 / text.len());
    for (name, tokenizer) in all() {
        let mut pieces = 0;
        let mut ids = Vec::new();
        let mut sink = |piece: &[u32]| {
            pieces += 1;
            ids.extend_from_slice(piece);
        };
        tokenizer.encode_pieces(&text, false, &mut sink).unwrap();
        assert!(pieces >= 3, "{name}: only {pieces} pieces");
        assert!(
            ids == whole(&tokenizer).encode(&*text, false).unwrap().get_ids(),
            "{name}: other tokens than the whole text has"
        );
    }
}

#[test]
fn a_text_that_goes_on_gets_no_space_in_front() {
    for (name, tokenizer) in all() {
        for rest in ["on", " on", "\nand on", "，上", "</s> on"] {
            let mut ids = tokenizer.encode("go", false).unwrap();
            tokenizer
                .encode_continued(rest, &mut |piece| ids.extend_from_slice(piece))
                .unwrap();
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), format!("go{rest}"), "{name}");
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
