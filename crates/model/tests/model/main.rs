//! Configurations from files, their graphs, and the tensors that fill them.

mod decode;
mod gguf;
mod hf;
mod hostile;
mod tensors;

use tightfit_model::DecoderConfig;

/// The families that `fixtures/family_*.json` has numbers of.
const CASES: [&str; 6] = ["smollm2", "llama3", "llama_linear", "mistral", "qwen2", "qwen3"];

/// The `config.json` that transformers wrote for one of them.
fn config_json(case: &str) -> String {
    let path = format!("{}/../../fixtures/family_{case}.json", env!("CARGO_MANIFEST_DIR"));
    let fixture: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    fixture["config"].to_string()
}

fn config(case: &str) -> DecoderConfig {
    DecoderConfig::from_hf(&config_json(case)).unwrap()
}

/// What is wrong with a `config.json`.
fn refused(text: &str) -> String {
    DecoderConfig::from_hf(text).unwrap_err().to_string()
}
