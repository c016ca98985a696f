//! Rows to micro-batches.

use std::{fs, path::Path};

use tightfit_text::data::{BatchBuffers, Batches, IGNORE_INDEX, Rows, RowsError};

use crate::toy::{Batch, Bytes, Folder, Numbers, all_rows, fill, options, run_on, show};

/// `rows` rows of four tokens, each full, of tokens that say which row it is.
fn numbered(rows: u32) -> Rows {
    let lines = (0..rows).map(|row| {
        let numbers: Vec<_> = (0..5).map(|token| (row * 5 + token).to_string()).collect();
        format!("{{\"text\": \"{}\"}}\n", numbers.join(" "))
    });
    let options = tightfit_text::data::Options {
        vocab_size: 1 << 20,
        ..options(4)
    };
    let done = run_on(&Numbers { eos: None }, &options, "a.jsonl", lines.collect::<String>()).unwrap();
    assert_eq!(done.train.rows(), u64::from(rows));
    done.train
}

fn rows_of(batch: &Batch) -> Vec<i32> {
    batch.tokens.chunks(4).map(|row| row[0] / 5).collect()
}

#[test]
fn a_batch_is_what_the_kernels_expect() {
    let file = "{\"text\": \"ab\"}\n{\"text\": \"cd\"}\n{\"text\": \"e\"}\n";
    let done = run_on(&Bytes { chat: false }, &options(8), "a.jsonl", file).unwrap();
    let batches = Batches::in_order(done.train, 2).unwrap();
    let batch = fill(&batches, 0);
    let (a, b, c, d, e) = (97, 98, 99, 100, 101);
    let none = IGNORE_INDEX;
    assert_eq!(batch.tokens[..8], [256, a, b, 3, 256, c, d, 3]);
    assert_eq!(batch.targets[..8], [a, b, 3, none, c, d, 3, none]);
    assert_eq!(batch.positions[..8], [0, 1, 2, 3, 0, 1, 2, 3]);
    assert_eq!(batch.doc_start[..8], [0, 0, 0, 0, 4, 4, 4, 4]);
    assert_eq!(batch.tokens[8..], [256, e, 3, 0, 0, 0, 0, 0]);
    assert_eq!(batch.targets[8..], [e, 3, none, none, none, none, none, none]);
    assert_eq!(batch.positions[8..], [0, 1, 2, 0, 0, 0, 0, 0]);
    assert_eq!(batch.doc_start[8..], [8, 8, 8, 11, 12, 13, 14, 15]);
}

#[test]
fn every_epoch_has_every_row_once_in_an_order_of_its_own() {
    let batches = Batches::shuffled(numbered(10), 3, 7).unwrap();
    // 3 epochs are 30 rows are 10 micro-batches, some of which lie in two epochs.
    let order: Vec<_> = (0..10).flat_map(|index| rows_of(&fill(&batches, index))).collect();
    for epoch in order.chunks(10) {
        let mut sorted = epoch.to_vec();
        sorted.sort();
        assert_eq!(sorted, (0..10).collect::<Vec<_>>());
    }
    assert_ne!(order[..10], order[10..20]);
    assert_ne!(order[10..20], order[20..]);
    // The same rows make a step however it is split, and any batch can be had first.
    let other = Batches::shuffled(numbered(10), 5, 7).unwrap();
    let again: Vec<_> = (0..6).rev().map(|index| rows_of(&fill(&other, index))).collect();
    assert_eq!(again.into_iter().rev().flatten().collect::<Vec<_>>(), order);
    let seeded = Batches::shuffled(numbered(10), 10, 8).unwrap();
    assert_ne!(rows_of(&fill(&seeded, 0)), order[..10]);
    // The end of all numbers is a batch like any other.
    fill(&batches, u64::MAX);
}

#[test]
fn in_order_ends_with_padding() {
    let batches = Batches::in_order(numbered(5), 3).unwrap();
    assert_eq!(batches.per_epoch(), 2);
    assert_eq!(rows_of(&fill(&batches, 0)), [0, 1, 2]);
    let last = fill(&batches, 1);
    assert_eq!(rows_of(&last), [3, 4, 0]);
    assert_eq!(last.tokens[8..], [0; 4]);
    assert_eq!(last.targets[8..], [IGNORE_INDEX; 4]);
    assert_eq!(last.doc_start[8..], [8, 9, 10, 11]);
    assert_eq!(batches.counted(1).unwrap(), 8);
    assert_eq!(batches.counted(2).unwrap(), 0);
}

#[test]
fn the_first_rows_are_the_same_whatever_the_batch() {
    for (batch, counts) in [(1, &[4, 4, 4][..]), (2, &[8, 4]), (3, &[12]), (4, &[12])] {
        let batches = Batches::first(numbered(5), 3, batch).unwrap();
        assert_eq!(batches.per_epoch(), counts.len() as u64, "{batch}");
        let mut rows = Vec::new();
        for (index, &count) in (0..).zip(counts) {
            assert_eq!(batches.counted(index).unwrap(), count, "{batch}");
            rows.extend(rows_of(&fill(&batches, index)));
        }
        assert_eq!(rows[..3], [0, 1, 2], "{batch}");
        assert!(rows[3..].iter().all(|&row| row == 0), "{batch}");
    }
    assert_eq!(Batches::first(numbered(5), 9, 2).unwrap().per_epoch(), 3);
}

#[test]
fn misuse_is_refused() {
    let shape = |result: Result<Batches, RowsError>| matches!(result, Err(RowsError::Shape { .. }));
    assert!(shape(Batches::shuffled(numbered(1), 0, 0)));
    assert!(shape(Batches::shuffled(numbered(1), usize::MAX, 0)));
    assert!(shape(Batches::in_order(numbered(1), 1 << 30)));
    let none = run_on(&Bytes { chat: false }, &options(4), "a.txt", "abc")
        .unwrap()
        .eval;
    assert!(shape(Batches::in_order(none, 1)));

    let batches = Batches::in_order(numbered(2), 1).unwrap();
    let mut batch = Batch::new(4);
    let buffers = batch.buffers();
    let mut short = BatchBuffers {
        positions: &mut [0; 3],
        ..buffers
    };
    let error = batches.fill(0, &mut short).unwrap_err();
    assert_eq!(
        error.to_string(),
        "buffer `positions` has 3 elements, but the batch has 4 tokens"
    );
}

/// A finished token file of two rows, with a name.
fn token_file(folder: &Folder) -> (fs::File, Rows) {
    let file = folder.create("train");
    let eval = folder.create("eval");
    let out = tightfit_text::data::TokenFiles {
        train: &file,
        eval: &eval,
    };
    let text = folder.write("a.txt", "abcdefg");
    let stop = std::sync::atomic::AtomicBool::new(false);
    tightfit_text::data::prepare(&[text], &Bytes { chat: false }, &options(4), out, &mut |_| {}, &stop).unwrap();
    let rows = Rows::open(file.try_clone().unwrap(), Path::new("tokens")).unwrap();
    (file, rows)
}

#[test]
fn a_file_cut_short_is_an_error_that_names_it() {
    let folder = Folder::new();
    let (file, rows) = token_file(&folder);
    let batches = Batches::in_order(rows, 1).unwrap();
    fill(&batches, 1);
    file.set_len(file.metadata().unwrap().len() - 1).unwrap();
    let mut batch = Batch::new(4);
    for error in [
        batches.fill(1, &mut batch.buffers()).unwrap_err(),
        batches.counted(1).unwrap_err(),
    ] {
        let message = error.to_string();
        assert!(
            message.starts_with("cannot read row 1 of token file tokens: "),
            "{message}"
        );
    }
    fill(&batches, 0);
    let error = Rows::open(file, Path::new("tokens")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "tokens: not a token file: 2 rows of 4 tokens do not fit its 79 bytes"
    );
}

/// Whatever bit of a token file is wrong, a batch is refused or is one that a kernel can take.
#[test]
fn damaged_files_give_errors_or_sound_batches() {
    let folder = Folder::new();
    drop(token_file(&folder));
    let path = folder.path().join("train");
    let sound = fs::read(&path).unwrap();
    for bit in 0..sound.len() * 8 {
        let mut bytes = sound.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let path = folder.write("damaged", &bytes);
        let Ok(rows) = Rows::open(fs::File::open(path).unwrap(), Path::new("tokens")) else {
            continue;
        };
        let Ok(batches) = Batches::in_order(rows, 1) else {
            continue;
        };
        for index in 0..2 {
            let mut batch = Batch::new(batches.token_count());
            if batches.fill(index, &mut batch.buffers()).is_err() {
                continue;
            }
            let seq = batch.tokens.len();
            for t in 0..seq {
                assert!((0..1 << 29).contains(&batch.tokens[t]));
                assert!(batch.targets[t] == IGNORE_INDEX || batch.targets[t] >= 0);
                assert!((0..=t as i32).contains(&batch.doc_start[t]));
                assert!((0..seq as i32).contains(&batch.positions[t]));
            }
        }
    }
    for (bytes, reason) in [
        (&b""[..], "failed to fill whole buffer"),
        (&[0; 100], "it does not begin as one"),
        (
            &[&sound[..8], &[0xff; 24]].concat(),
            "seq 18446744073709551615, vocab_size 18446744073709551615",
        ),
        (
            &[&sound[..16], &[0xff; 8], &sound[24..]].concat(),
            "18446744073709551615 rows of 4 tokens do not fit its 80 bytes",
        ),
    ] {
        let path = folder.write("damaged", bytes);
        let error = Rows::open(fs::File::open(path).unwrap(), Path::new("tokens")).unwrap_err();
        assert_eq!(error.to_string(), format!("tokens: not a token file: {reason}"));
    }
}

#[test]
fn show_reads_rows_back() {
    let done = run_on(&Bytes { chat: false }, &options(6), "a.txt", "abcdefg").unwrap();
    assert_eq!(show(&all_rows(done.train)), "^[abcdef]\nf[g$]");
}
