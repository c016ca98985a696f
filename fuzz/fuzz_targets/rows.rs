//! Token files that are not as they were written. The last byte is the size of a micro-batch.

#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use tightfit_fuzz::{batches::read_all, check, files::Scratch, init, says};
use tightfit_text::data::{MAX_VOCAB_SIZE, Rows};

static FILE: OnceLock<Scratch> = OnceLock::new();

fuzz_target!(init: init(), |input: &[u8]| {
    if let Some((size, file)) = input.split_last() {
        let scratch = FILE.get_or_init(|| Scratch::new("rows").expect("a folder for files"));
        scratch.write(file).expect("a file to write");
        check(input, || {
            let handle = scratch.file.try_clone().expect("another handle");
            match Rows::open(handle, &scratch.path) {
                Ok(rows) => read_all(rows, MAX_VOCAB_SIZE, usize::from(size % 5)).map(drop).unwrap_or_else(says),
                Err(error) => says(error),
            }
        })
    }
});
