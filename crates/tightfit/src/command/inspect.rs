//! `tightfit inspect`: what is in a model's files. Reads headers only, and shows what it can of a model that cannot be trained.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;
use tightfit_format::Checkpoint;

use crate::cli::InspectArgs;
use crate::console::Console;
use crate::failure::Failure;
use crate::memory::format_bytes;
use crate::pretrained::{Pretrained, PretrainedError};

use super::{print_json, write};

/// The object that `--json` prints. What is not there, or not understood, is `null`, and the reason is in `problems`.
#[derive(Debug, Serialize)]
struct Report {
    /// Raised whenever a field changes its meaning or goes away.
    schema_version: u32,
    /// `GGUF` or `safetensors`.
    format: &'static str,
    files: Vec<File>,
    /// The family, as `model_type` in `config.json`.
    architecture: Option<Value>,
    parameters: Option<u64>,
    /// The model, as `config.json` has it.
    config: Option<Value>,
    /// Tensors and bytes of each encoding.
    encodings: BTreeMap<String, Sum>,
    total: Sum,
    tensors: Vec<Tensor>,
    tokenizer: Option<TokenizerReport>,
    chat_template: Option<String>,
    /// Why it cannot be trained or run here.
    problems: Vec<String>,
}

#[derive(Debug, Serialize)]
struct File {
    path: String,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Sum {
    tensors: u64,
    elements: u64,
    bytes: u64,
}

impl Sum {
    fn add(&mut self, tensor: &Tensor) {
        self.tensors += 1;
        self.elements += tensor.shape.iter().product::<u64>();
        self.bytes += tensor.bytes;
    }
}

#[derive(Debug, Serialize)]
struct Tensor {
    name: String,
    encoding: String,
    /// Outermost first.
    shape: Vec<u64>,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct TokenizerReport {
    vocab_size: usize,
    bos_token_id: Option<u32>,
    eos_token_ids: Vec<u32>,
    pad_token_id: Option<u32>,
}

/// Shows; the exit code.
pub fn run(args: &InspectArgs) -> Result<u8, Failure> {
    let console = Console { json: args.json };
    if !args.model.exists() {
        let path = args.model.clone();
        return Err(PretrainedError::NotFound { path }.into());
    }
    let checkpoint = Checkpoint::open(&args.model).map_err(PretrainedError::from)?;
    let report = report(args, &checkpoint);
    if !args.json {
        write(console.line(&text(&report, args.tensors)))?;
    }
    print_json(console, &report)?;
    Ok(0)
}

fn report(args: &InspectArgs, checkpoint: &Checkpoint) -> Report {
    let mut problems = Vec::new();
    let model = Pretrained::open(&args.model);
    let model = model.map_err(|error| problems.push(error.to_string())).ok();
    let tokenizer = match &model {
        Some(model) => model.tokenizer(),
        None => Pretrained::tokenizer_of(checkpoint),
    };
    let tokenizer = tokenizer.map_err(|error| problems.push(error.to_string())).ok();
    let tensors = checkpoint.tensors().values();
    let tensors: Vec<_> = tensors
        .map(|entry| Tensor {
            name: entry.name.clone(),
            encoding: entry.encoding.name(),
            shape: entry.shape.clone(),
            bytes: entry.bytes(),
        })
        .collect();
    let mut encodings: BTreeMap<String, Sum> = BTreeMap::new();
    let mut total = Sum::default();
    for tensor in &tensors {
        encodings.entry(tensor.encoding.clone()).or_default().add(tensor);
        total.add(tensor);
    }
    let config = model.as_ref().map(|model| model.config.to_hf());
    Report {
        schema_version: crate::report::SCHEMA_VERSION,
        format: if checkpoint.metadata().is_some() {
            "GGUF"
        } else {
            "safetensors"
        },
        files: checkpoint
            .files()
            .map(|(path, bytes)| File {
                path: path.display().to_string(),
                bytes,
            })
            .collect(),
        architecture: config.as_ref().map(|config| config["model_type"].clone()),
        parameters: model.as_ref().map(|model| model.config.parameters()),
        config,
        encodings,
        total,
        tensors,
        chat_template: tokenizer.as_ref().and_then(|t| t.chat_template().map(str::to_owned)),
        tokenizer: tokenizer.map(|tokenizer| TokenizerReport {
            vocab_size: tokenizer.vocab_size(),
            bos_token_id: tokenizer.bos(),
            eos_token_ids: tokenizer.eos_ids().to_vec(),
            pad_token_id: tokenizer.pad(),
        }),
        problems,
    }
}

fn text(report: &Report, tensors: bool) -> String {
    let mut lines = Vec::new();
    for file in &report.files {
        lines.push(format!(
            "file       {}  {}  {}",
            file.path,
            report.format,
            format_bytes(file.bytes)
        ));
    }
    if let (Some(config), Some(parameters)) = (&report.config, report.parameters) {
        let size = |field: &str| config[field].clone();
        lines.push(format!(
            "model      {}: {:.2} M parameters, {} layers, hidden {}, vocabulary {}",
            config["model_type"].as_str().unwrap_or_default(),
            parameters as f64 / 1e6,
            size("num_hidden_layers"),
            size("hidden_size"),
            size("vocab_size"),
        ));
        lines.push(format!(
            "attention  {} heads, {} for keys and values, {} positions",
            size("num_attention_heads"),
            size("num_key_value_heads"),
            size("max_position_embeddings"),
        ));
        let tied = config["tie_word_embeddings"] == true;
        lines.push(format!(
            "head       {}",
            if tied { "tied to the embedding" } else { "its own" }
        ));
    }
    let sum = |sum: &Sum| {
        format!(
            "{:>5} tensors  {:>13} elements  {:>11}",
            sum.tensors,
            sum.elements,
            format_bytes(sum.bytes)
        )
    };
    for (encoding, of_encoding) in &report.encodings {
        lines.push(format!("{encoding:<9}  {}", sum(of_encoding)));
    }
    lines.push(format!("total      {}", sum(&report.total)));
    if let Some(tokenizer) = &report.tokenizer {
        let id = |id: Option<u32>| id.map_or("none".to_owned(), |id| id.to_string());
        let ends: Vec<_> = tokenizer.eos_token_ids.iter().map(u32::to_string).collect();
        lines.push(format!(
            "tokenizer  {} tokens, begin {}, end {}, padding {}",
            tokenizer.vocab_size,
            id(tokenizer.bos_token_id),
            if ends.is_empty() {
                "none".to_owned()
            } else {
                ends.join(" or ")
            },
            id(tokenizer.pad_token_id)
        ));
    }
    lines.push(match &report.chat_template {
        Some(template) => format!("chat       {} bytes of template", template.len()),
        None => "chat       no template".to_owned(),
    });
    if tensors {
        for tensor in &report.tensors {
            let shape: Vec<_> = tensor.shape.iter().map(u64::to_string).collect();
            lines.push(format!(
                "{:<8} {:>16} {:>11}  {}",
                tensor.encoding,
                shape.join("x"),
                format_bytes(tensor.bytes),
                tensor.name
            ));
        }
    }
    lines.extend(report.problems.iter().map(|problem| format!("problem    {problem}")));
    lines.join("\n")
}
