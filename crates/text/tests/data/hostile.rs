//! Files that are not what they should be: an error with a place, never a panic.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
};

use proptest::prelude::*;
use tightfit_text::data::{DataError, Long, Options, Progress, TokenFiles, prepare};

use crate::toy::{Bytes, Folder, Numbers, options, run, run_on};

fn message(name: &str, bytes: impl AsRef<[u8]>) -> String {
    let folder = Folder::new();
    let path = folder.write(name, bytes);
    let error = run(&Bytes { chat: true }, &options(8), &[path]).err().expect(name);
    error.to_string().replace(&format!("{}/", folder.path().display()), "")
}

#[test]
fn what_is_not_text_is_refused_with_its_place() {
    for (name, bytes, expected) in [
        ("a.txt", &b"ab\nc\xffd"[..], "a.txt:2: not UTF-8 at byte 4 of the file"),
        (
            "a.md",
            b"ab\0",
            "a.md:1: a NUL, so this is not text, at byte 2 of the file",
        ),
        ("a.text", b"ab\xe4\xb8", "a.text:1: not UTF-8 at byte 2 of the file"),
        ("a.jsonl", b"PK\x03\x04\0\0", "a.jsonl:1:1: expected value"),
        ("a.jsonl", b"", "nothing to train on: the files hold no text"),
        ("a.txt", b"", "nothing to train on: the files hold no text"),
        ("a.jsonl", b"\n\r\n\n", "nothing to train on: the files hold no text"),
        (
            "a.csv",
            b"a",
            "a.csv: what is in this file? known are .jsonl (one JSON object per line) and .txt, .text, .md (one document)",
        ),
        ("a.txt", "a☠".as_bytes(), "a.txt:1: tokenizer: a poisoned text"),
        (
            "a.jsonl",
            "\n{\"text\": \"☠\"}".as_bytes(),
            "a.jsonl:2: tokenizer: a poisoned text",
        ),
    ] {
        assert_eq!(message(name, bytes), expected);
    }
    let nested = format!("{{\"text\": \"a\", \"x\": {}", "[".repeat(1 << 20));
    assert_eq!(
        message("a.jsonl", &nested),
        "a.jsonl:1:1048595: EOF while parsing a list"
    );
    let nested = format!("{{\"messages\": {}", "[".repeat(1 << 20));
    assert_eq!(
        message("a.jsonl", &nested),
        "a.jsonl:1:15: invalid type: sequence, expected a message: an object with `role` and `content`"
    );
    let long = format!("\n{{\"text\": \"{}\"}}\n", "a".repeat(16 << 20));
    assert_eq!(message("a.jsonl", &long), "a.jsonl:2: longer than 16 MiB");
}

#[test]
fn what_is_not_a_file_is_refused() {
    let folder = Folder::new();
    let bytes = Bytes { chat: false };
    let missing = run(&bytes, &options(8), &[folder.path().join("a.txt")]).err().unwrap();
    assert!(matches!(missing, DataError::Open { .. }), "{missing}");
    let dir = folder.path().join("b.txt");
    std::fs::create_dir(&dir).unwrap();
    let dir = run(&bytes, &options(8), &[dir]).err().unwrap();
    assert!(dir.to_string().ends_with("b.txt is not a regular file"), "{dir}");
    let device = run(&bytes, &options(8), &[PathBuf::from("/dev/zero")]).err().unwrap();
    assert!(matches!(device, DataError::NotAFile { .. }), "{device}");
    let none = run(&bytes, &options(8), &[]).err().unwrap();
    assert!(matches!(none, DataError::NoRows { .. }), "{none}");
}

#[test]
fn settings_out_of_range_are_refused() {
    let sound = || options(8);
    for (options, name) in [
        (options(0), "seq"),
        (options(i32::MAX as usize), "seq"),
        (options(usize::MAX), "seq"),
        (
            Options {
                vocab_size: 0,
                ..sound()
            },
            "vocab_size",
        ),
        (
            Options {
                vocab_size: (1 << 29) + 1,
                ..sound()
            },
            "vocab_size",
        ),
        (
            Options {
                stride: Some(0),
                ..sound()
            },
            "stride",
        ),
        (
            Options {
                stride: Some(9),
                ..sound()
            },
            "stride",
        ),
        (
            Options {
                eval_fraction: 1.0,
                end_documents: true,
                ..sound()
            },
            "eval_fraction",
        ),
        (
            Options {
                eval_fraction: -0.1,
                end_documents: true,
                ..sound()
            },
            "eval_fraction",
        ),
        (
            Options {
                eval_fraction: f64::NAN,
                end_documents: true,
                ..sound()
            },
            "eval_fraction",
        ),
    ] {
        let error = run_on(&Bytes { chat: false }, &options, "a.txt", "abc").err().unwrap();
        assert!(error.to_string().starts_with(&format!("{name}: ")), "{error}");
    }
}

#[test]
fn a_token_that_the_model_lacks_is_refused() {
    for (text, eos) in [("1 2 9", None), ("1 2 3", Some(9)), ("1 4294967295", None)] {
        let small = Options {
            vocab_size: 9,
            ..options(8)
        };
        let error = run_on(&Numbers { eos }, &small, "a.txt", text).err().unwrap();
        assert!(matches!(error, DataError::Token { token: 9.., .. }), "{error}");
        let message = error.to_string();
        assert!(message.contains("a.txt:1: the tokenizer made token "), "{message}");
        assert!(message.ends_with("but the model's vocabulary has 9"), "{message}");
    }
}

#[test]
fn if_nothing_is_left_the_error_says_why() {
    let skip = Options {
        skip_bad_lines: true,
        long: Long::Drop,
        ..options(8)
    };
    let bytes = Bytes { chat: false };
    let bad = run_on(&bytes, &skip, "a.jsonl", "x\ny\n").err().unwrap().to_string();
    assert!(
        bad.starts_with("nothing to train on: all 2 lines are malformed, the first: "),
        "{bad}"
    );
    assert!(bad.ends_with("a.jsonl:1:1: expected value"), "{bad}");
    let long = run_on(&bytes, &skip, "a.jsonl", "{\"text\": \"123456789\"}")
        .err()
        .unwrap();
    assert_eq!(
        long.to_string(),
        "nothing to train on: all 1 samples are longer than a row of 8 tokens; make rows longer or split long samples"
    );
}

#[test]
fn it_stops_when_asked_and_reports_on_the_way() {
    let folder = Folder::new();
    let files = [
        folder.write("a.txt", "text and text\n".repeat(100_000)),
        folder.write("b.jsonl", "{\"text\": \"a\"}\n".repeat(100_000)),
    ];
    let (train, eval) = (folder.create("train"), folder.create("eval"));
    let out = TokenFiles {
        train: &train,
        eval: &eval,
    };
    let total = 2_800_000;
    for stop_after in [0, 500_000, 2_000_000, u64::MAX] {
        let stop = AtomicBool::new(stop_after == 0);
        let seen = AtomicU64::new(0);
        let mut progress = |progress: Progress| {
            assert!(progress.bytes > seen.swap(progress.bytes, Ordering::Relaxed));
            assert_eq!(progress.total_bytes, total);
            assert!(progress.tokens > 0);
            stop.store(progress.bytes >= stop_after, Ordering::Relaxed);
        };
        let result = prepare(&files, &Bytes { chat: false }, &options(64), out, &mut progress, &stop);
        let seen = seen.load(Ordering::Relaxed);
        if stop_after == u64::MAX {
            result.unwrap();
            assert_eq!(seen, total);
        } else {
            assert!(matches!(result, Err(DataError::Stopped)));
            assert!(seen < stop_after + 1_500_000, "{seen}");
        }
    }
}

#[test]
fn a_token_file_that_cannot_be_written_is_an_error() {
    let folder = Folder::new();
    let path = folder.write("a.txt", "abc");
    let read_only = std::fs::File::open(&path).unwrap();
    let out = TokenFiles {
        train: &read_only,
        eval: &read_only,
    };
    let stop = AtomicBool::new(false);
    let error = prepare(&[path], &Bytes { chat: false }, &options(8), out, &mut |_| {}, &stop).unwrap_err();
    assert!(matches!(error, DataError::Write { .. }), "{error}");
}

/// Text that is nearly a line of data.
fn nearly_json() -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        Just("{\"text\": \"a b\"}".to_owned()),
        Just("{\"messages\": [{\"role\": \"assistant\", \"content\": \"x\"}]}".to_owned()),
        Just("{\"prompt\": \"a\", \"completion\": \"b\"}".to_owned()),
        Just("\n".to_owned()),
        Just("\"text\": null,".to_owned()),
        "[\\[\\]{}\":,0-9eE.\\\\u-]{0,6}",
        "\\PC{0,4}",
    ];
    let edit = (any::<prop::sample::Index>(), any::<u8>());
    (prop::collection::vec(part, 0..8), prop::collection::vec(edit, 0..3)).prop_map(|(parts, edits)| {
        let mut bytes = parts.concat().into_bytes();
        for (at, byte) in edits {
            if !bytes.is_empty() {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
        }
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]
    #[test]
    fn any_bytes_give_rows_or_an_error(
        bytes in prop_oneof![nearly_json(), prop::collection::vec(any::<u8>(), 0..200)],
        json: bool,
        skip: bool,
        chat: bool,
    ) {
        let options = Options { skip_bad_lines: skip, ..options(8) };
        let name = if json { "a.jsonl" } else { "a.txt" };
        match run_on(&Bytes { chat }, &options, name, &bytes) {
            Ok(done) => prop_assert!(done.prepared.train_rows > 0),
            Err(DataError::NoRows { .. }) => {}
            Err(error) => {
                prop_assert!(error.to_string().contains(name), "{}", error);
                prop_assert!(!(json && skip), "a bad line should have been passed over: {}", error);
            }
        }
    }
}

#[test]
fn a_file_that_changes_while_it_is_read_ends() {
    let line = "{\"text\": \"abcdefg\"}\n";
    for (name, unit) in [("a.txt", "some text\n"), ("a.jsonl", line)] {
        let folder = Folder::new();
        let bytes = unit.repeat((4 << 20) / unit.len());
        let prepare_with = |change: &dyn Fn(&std::fs::File)| {
            let path = folder.write(name, &bytes);
            let file = std::fs::File::options().append(true).open(&path).unwrap();
            let (train, eval) = (folder.create("train"), folder.create("eval"));
            let out = TokenFiles {
                train: &train,
                eval: &eval,
            };
            let mut progress = |_: Progress| change(&file);
            let stop = AtomicBool::new(false);
            prepare(&[path], &Bytes { chat: false }, &options(64), out, &mut progress, &stop)
        };
        let same = prepare_with(&|_| {}).unwrap();
        let grown = prepare_with(&|mut file| std::io::Write::write_all(&mut file, &[b'x'; 1 << 20]).unwrap()).unwrap();
        assert_eq!(
            (same.counts.tokens, same.fingerprint),
            (grown.counts.tokens, grown.fingerprint)
        );
        let cut = prepare_with(&|file| {
            file.set_len(bytes.len() as u64 / unit.len() as u64 / 2 * unit.len() as u64)
                .unwrap()
        })
        .err()
        .unwrap();
        assert!(
            matches!(cut, DataError::Changed { bytes: all, .. } if all == bytes.len() as u64),
            "{cut}"
        );
    }
}
