//! What the tokenizer tests share: the fixtures of `fixtures/make_tokenizers.py`.

#![allow(dead_code)] // no test file uses all of it

use serde_json::Value;
use std::path::{Path, PathBuf};
use tightfit_format::gguf;
use tightfit_text::{Tokenizer, TokenizerError};

/// The tokenizers that there are fixtures of.
pub const NAMES: [&str; 6] = ["gpt2", "smollm", "qwen2", "llama3", "nemo", "spm"];

/// A file of the fixtures.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/tokenizers")
        .join(name)
}

/// The bytes of a file of the fixtures.
pub fn bytes(name: &str) -> Vec<u8> {
    let path = fixture(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// What transformers gave.
pub fn expected() -> Value {
    serde_json::from_slice(&bytes("expected.json")).unwrap()
}

/// The tokenizer of a `tokenizer.json`.
pub fn from_json(name: &str) -> Tokenizer {
    Tokenizer::from_json(&bytes(&format!("{name}.json")), name).unwrap()
}

/// The tokenizer in the bytes of a GGUF file.
pub fn parse_gguf(bytes: &[u8]) -> Result<Tokenizer, TokenizerError> {
    let header = gguf::parse(bytes, bytes.len() as u64, Path::new("test.gguf"))?;
    Tokenizer::from_gguf(&header.metadata)
}

/// The tokenizer of a GGUF file.
pub fn from_gguf(name: &str) -> Tokenizer {
    parse_gguf(&bytes(&format!("{name}.gguf"))).unwrap()
}
