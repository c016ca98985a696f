//! The tokenizer inside a GGUF file; what lies behind the header is a text for it.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use tightfit_format::gguf;
use tightfit_fuzz::{check, init, says, tokenizer};
use tightfit_text::Tokenizer;

fuzz_target!(init: init(), |file: &[u8]| check(file, || read(file)));

fn read(file: &[u8]) {
    let header = match gguf::parse(file, file.len() as u64, Path::new("model.gguf")) {
        Ok(header) => header,
        Err(error) => return says(error),
    };
    match Tokenizer::from_gguf(&header.metadata) {
        Ok(tokenizer) => {
            let text = String::from_utf8_lossy(&file[file.len() - file.len().min(TEXT)..]);
            tokenizer::use_all(&tokenizer, &text);
            tokenizer::save(&tokenizer, &text).unwrap_or_else(says);
        }
        Err(error) => says(error),
    }
}

/// Bytes of the text, from the end of the file.
const TEXT: usize = 64;
