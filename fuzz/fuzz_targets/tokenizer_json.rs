//! `tokenizer.json`; what follows a zero byte is a text for it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tightfit_fuzz::{check, init, says, tokenizer};
use tightfit_text::Tokenizer;

fuzz_target!(init: init(), |input: &[u8]| {
    check(input, || {
        let end = input.iter().position(|&byte| byte == 0).unwrap_or(input.len());
        let (file, text) = input.split_at(end);
        match Tokenizer::from_json(file, "tokenizer.json") {
            Ok(tokenizer) => tokenizer::use_all(&tokenizer, &String::from_utf8_lossy(text)),
            Err(error) => says(error),
        }
    })
});
