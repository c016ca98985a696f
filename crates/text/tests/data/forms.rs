//! What a file may hold, and what is learned of it.

use tightfit_text::data::{DataError, Long, Options};

use crate::toy::{Bytes, Folder, options, run, run_on, show};

use super::toy::all_rows;

fn learned(chat: bool, line: &str) -> String {
    let done = run_on(&Bytes { chat }, &options(80), "a.jsonl", line).unwrap();
    assert_eq!(done.prepared.counts.samples, 1);
    show(&all_rows(done.train))
}

#[test]
fn each_form_is_learned_where_it_should_be() {
    for (chat, line, expected) in [
        (false, r#"{"text": "abc"}"#, "^[abc$]"),
        (false, r#"{"text": "abc\u0003"}"#, "^[abc$]"),
        (false, r#"{"prompt": "ab", "completion": " c"}"#, "^ab[ c$]"),
        (false, r#"{"prompt": "", "completion": "c"}"#, "^[c$]"),
        (
            false,
            r#"{"instruction": "i", "input": "n", "output": "o"}"#,
            "^i\n\nn\n\n[o$]",
        ),
        (false, r#"{"instruction": "i", "output": "o"}"#, "^i\n\n[o$]"),
        (
            false,
            r#"{"instruction": "i", "input": "", "output": "o"}"#,
            "^i\n\n[o$]",
        ),
        (
            true,
            r#"{"instruction": "i", "input": "n", "output": "o"}"#,
            "user:i\n\nn$assistant:[o$]",
        ),
        (
            true,
            r#"{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"},
                {"role": "user", "content": "v"}, {"role": "assistant", "content": "b", "weight": 1}]}"#,
            "user:u$assistant:[a$]user:v$assistant:[b$]",
        ),
        (
            false,
            r#"{"text": "a", "prompt": null, "messages": null, "meta": [{"text": 1}]}"#,
            "^[a$]",
        ),
    ] {
        assert_eq!(learned(chat, &line.replace('\n', " ")), expected, "{line}");
    }
}

#[test]
fn lines_end_as_they_like_and_blank_ones_are_passed_over() {
    let file = "\u{feff}{\"text\": \"a\"}\r\n\r\n \t\n{\"text\": \"b\"}";
    let done = run_on(&Bytes { chat: false }, &options(5), "a.jsonl", file).unwrap();
    assert_eq!(show(&all_rows(done.train)), "^[a$]\n^[b$]");
}

#[test]
fn a_text_file_is_one_document_cut_to_rows() {
    let done = run_on(&Bytes { chat: false }, &options(4), "A.TXT", "\u{feff}ab\r\ncdefgh\n").unwrap();
    assert_eq!(show(&all_rows(done.train)), "^[ab\nc]\nc[defg]\ng[h\n$]");
    let counts = &done.prepared.counts;
    assert_eq!(
        (
            counts.samples,
            counts.pieces,
            counts.split,
            counts.tokens,
            counts.targets
        ),
        (1, 3, 0, 12, 11)
    );
    assert_eq!(counts.padding, 1);
}

/// Text longer than what goes through the tokenizer at a time is still one document.
#[test]
fn long_text_is_one_document() {
    let text = "line of text\n".repeat(200_000);
    let line = format!(r#"{{"text": "{}"}}"#, text.replace('\n', "\\n"));
    for (name, file) in [("a.txt", &text), ("a.jsonl", &line)] {
        let done = run_on(&Bytes { chat: false }, &options(10_000), name, file).unwrap();
        let shown = show(&all_rows(done.train));
        // Every document but the first begins with a repeated token that is not learned.
        let repeated = shown.split("\n").filter(|document| document.contains('[')).count();
        assert!(repeated > 1);
        assert_eq!(done.prepared.counts.targets as usize, text.len() + 1, "{name}");
        assert_eq!(done.prepared.counts.tokens as usize, text.len() + 2, "{name}");
    }
}

#[test]
fn long_samples_are_split_or_dropped_and_counted() {
    let file = "{\"text\": \"abcdefgh\"}\n{\"prompt\": \"abcdefgh\", \"completion\": \"i\"}\n{\"text\": \"ab\"}\n";
    let bytes = Bytes { chat: false };
    let split = run_on(&bytes, &options(4), "a.jsonl", file).unwrap();
    let counts = &split.prepared.counts;
    assert_eq!((counts.samples, counts.split, counts.dropped), (3, 2, 0));
    assert_eq!((counts.pieces, counts.uncounted_pieces), (5, 2));
    let drop = Options {
        long: Long::Drop,
        ..options(4)
    };
    let dropped = run_on(&bytes, &drop, "a.jsonl", file).unwrap();
    let counts = &dropped.prepared.counts;
    assert_eq!(
        (counts.samples, counts.split, counts.dropped, counts.pieces),
        (3, 0, 2, 1)
    );
    assert_eq!(show(&all_rows(dropped.train)), "^[ab$]");
}

#[test]
fn bad_lines_are_errors_that_name_the_place() {
    let long_key = "k".repeat(40);
    for (line, expected) in [
        ("{\"text\": \"a\"", "2:12: EOF while parsing an object"),
        ("{\"text\": \"a\"} x", "2:15: trailing characters"),
        ("{'text': 1}", "2:2: key must be a string"),
        (
            "{\"text\": 5}",
            "2:10: invalid type: integer `5`, expected a string for `text`",
        ),
        (
            "{\"text\": [\"a\"]}",
            "2:10: invalid type: sequence, expected a string for `text`",
        ),
        ("\"text\"", "2:6: invalid type: string, expected a JSON object"),
        ("[]", "2:2: invalid type: sequence, expected a JSON object"),
        ("{\"text\": \"a\", \"text\": \"b\"}", "2:20: `text` is there twice"),
        ("{\"text\": \"\\ud800\"}", "2:17: unexpected end of hex escape"),
        (
            "{\"text\": \"\0\"}",
            "2:11: control character (\\u0000-\\u001F) found while parsing a string",
        ),
        (
            "{}",
            "2: no `text`, `prompt` and `completion`, `instruction` and `output`, or `messages` (the object is empty)",
        ),
        (
            "{\"txt\": \"a\", \"id\\n\": 1}",
            "2: no `text`, `prompt` and `completion`, `instruction` and `output`, or `messages` (keys found: `txt`, `id\\n`)",
        ),
        (
            &format!(
                "{{\"{long_key}\": 1, \"b\": 1, \"c\": 1, \"d\": 1, \"e\": 1, \"f\": 1, \"g\": 1, \"h\": 1, \"i\": 1, \"j\": 1}}"
            ),
            "2: no `text`, `prompt` and `completion`, `instruction` and `output`, or `messages` (keys found: \
             `kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk…`, `b`, `c`, `d`, `e`, `f`, `g`, `h` and 2 more)",
        ),
        (
            "{\"text\": \"a\", \"prompt\": \"b\"}",
            "2: more than one kind of sample (keys found: `text`, `prompt`)",
        ),
        ("{\"prompt\": \"b\"}", "2: `prompt` without `completion`"),
        ("{\"completion\": \"b\"}", "2: `completion` without `prompt`"),
        ("{\"instruction\": \"b\"}", "2: `instruction` without `output`"),
        ("{\"output\": \"b\"}", "2: `output` without `instruction`"),
        ("{\"text\": \"\"}", "2: nothing to learn: `text` is empty"),
        (
            "{\"prompt\": \"a\", \"completion\": \"\"}",
            "2: nothing to learn: `completion` is empty",
        ),
        (
            "{\"instruction\": \"a\", \"output\": \"\"}",
            "2: nothing to learn: `output` is empty",
        ),
        (
            "{\"messages\": []}",
            "2: nothing to learn: the messages have no answer by the assistant",
        ),
        (
            "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}",
            "2: nothing to learn: the messages have no answer by the assistant",
        ),
        (
            "{\"messages\": [{\"role\": \"user\"}]}",
            "2:30: a message without `content`",
        ),
        (
            "{\"messages\": [{\"content\": null}]}",
            "2:31: a message without `role`",
        ),
        (
            "{\"messages\": [{\"role\": \"u\", \"content\": {}}]}",
            "2:41: invalid type: map, expected a string for `content`",
        ),
        (
            "{\"messages\": [\"a\"]}",
            "2:17: invalid type: string, expected a message: an object with `role` and `content`",
        ),
        (
            "{\"messages\": \"a\"}",
            "2:16: invalid type: string, expected an array for `messages`",
        ),
        (
            "{\"messages\": [{\"role\": \"tool\", \"content\": \"a\"}]}",
            "2: chat template: no tools, please",
        ),
    ] {
        let folder = Folder::new();
        let path = folder.write(
            "a.jsonl",
            format!("{{\"text\": \"good\"}}\n{line}\n{{\"text\": \"good\"}}\n"),
        );
        let bytes = Bytes { chat: true };
        let error = run(&bytes, &options(20), std::slice::from_ref(&path))
            .err()
            .expect(line);
        assert_eq!(error.to_string(), format!("{}:{expected}", path.display()), "{line}");

        let skip = Options {
            skip_bad_lines: true,
            ..options(20)
        };
        let done = run(&bytes, &skip, &[path]).unwrap();
        assert_eq!(done.prepared.counts.bad_lines, 1);
        assert_eq!(done.prepared.counts.first_bad, [error.to_string()]);
        assert_eq!(show(&all_rows(done.train)), "^[good$]\n^[good$]");
        assert_eq!(done.prepared.counts.samples, 2);
    }
}

#[test]
fn bad_bytes_in_a_line_have_a_column() {
    let folder = Folder::new();
    let path = folder.write("a.jsonl", b"{\"text\": \"a\xff\"}");
    let error = run(&Bytes { chat: true }, &options(20), std::slice::from_ref(&path))
        .err()
        .unwrap();
    assert_eq!(error.to_string(), format!("{}:1:12: not UTF-8", path.display()));
}

/// A token is learned from the one before it; one alone teaches nothing.
#[test]
fn a_lone_token_is_nothing_to_learn() {
    let numbers = crate::toy::Numbers { eos: None };
    let error = run_on(&numbers, &options(4), "a.jsonl", "{\"text\": \"7\"}")
        .err()
        .unwrap();
    assert!(
        error
            .to_string()
            .ends_with("a.jsonl:1: no token to learn: it takes one token and one before it")
    );
    let skip = Options {
        skip_bad_lines: true,
        ..options(4)
    };
    let error = run_on(&numbers, &skip, "a.jsonl", "{\"text\": \"7\"}").err().unwrap();
    assert!(matches!(error, DataError::NoRows { .. }), "{error}");
}

#[test]
fn messages_need_a_template() {
    let line = r#"{"messages": [{"role": "assistant", "content": "a"}]}"#;
    let error = run_on(&Bytes { chat: false }, &options(20), "a.jsonl", line)
        .err()
        .unwrap();
    assert!(
        error
            .to_string()
            .ends_with("a.jsonl:1: `messages` need a chat template, and the tokenizer has none")
    );
}

#[test]
fn only_the_first_bad_lines_are_kept() {
    let skip = Options {
        skip_bad_lines: true,
        ..options(20)
    };
    let file = "x\n".repeat(100) + "{\"text\": \"a\"}\n";
    let done = run_on(&Bytes { chat: true }, &skip, "a.jsonl", file).unwrap();
    let counts = &done.prepared.counts;
    assert_eq!((counts.bad_lines, counts.first_bad.len()), (100, 5));
    assert!(
        counts.first_bad[4].ends_with("a.jsonl:5:1: expected value"),
        "{:?}",
        counts.first_bad
    );
}
