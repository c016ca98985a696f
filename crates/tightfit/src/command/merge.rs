//! `tightfit merge`: a model with an adapter added to its weights.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;
use tightfit_exec::checkpoint::{self, SaveError};

use crate::checkpoints::Kind;
use crate::cli::MergeArgs;
use crate::console::{Console, Transfer};
use crate::failure::Failure;
use crate::memory::{format_bytes, process_peak_bytes};
use crate::merge::{check, dtype, merge};
use crate::pretrained::Pretrained;

use super::{print_json, write};

/// Files of a Hugging Face folder that belong to a model beside its weights and its configuration.
const FILES: [&str; 10] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    /// Raised whenever a field changes its meaning or goes away.
    schema_version: u32,
    /// The folder.
    out: &'a Path,
    /// How its weights are stored, as `config.json` says it.
    dtype: &'static str,
    /// Layers that the adapter changed.
    layers: usize,
    /// Bytes of its tensors.
    bytes: u64,
    /// `VmHWM`.
    process_peak_bytes: u64,
}

/// Merges; the exit code.
pub fn run(args: &MergeArgs) -> Result<u8, Failure> {
    let console = Console { json: args.json };
    let model = Pretrained::open_with(&args.model, Some(&args.adapter))?;
    model.adapter().map_or(Ok(()), check)?;
    let mut others = files(&model)?;
    others.push((Kind::Model.config().to_owned(), config_json(&model)));
    claim(args, &model)?;
    let total = model.weights().iter().map(|fill| fill.entry.bytes()).sum();
    let transfer = Transfer::new("merging", total);
    let write_others = || {
        others.iter().try_for_each(|(name, content)| {
            let written = checkpoint::replace(&args.out.join(name), |mut file| file.write_all(content));
            written.map_err(|SaveError { source, .. }| source)
        })
    };
    let path = args.out.join(Kind::Model.tensors());
    let merged = merge(&model, &path, |bytes| transfer.add(bytes), write_others);
    // Only an empty folder goes.
    let bytes = merged.inspect_err(|_| drop(fs::remove_dir(&args.out)))?;
    transfer.finish();
    let report = Report {
        schema_version: crate::report::SCHEMA_VERSION,
        out: &args.out,
        dtype: dtype(&model),
        layers: model.adapter().map_or(0, |adapter| adapter.layers().count()),
        bytes,
        process_peak_bytes: process_peak_bytes()?,
    };
    write(console.line(&format!(
        "merged   {} layers: {} of {} in {}",
        report.layers,
        format_bytes(report.bytes),
        report.dtype,
        report.out.display()
    )))?;
    print_json(console, &report)?;
    Ok(0)
}

/// Makes the folder if there is none, and sees that nothing else is in it.
fn claim(args: &MergeArgs, model: &Pretrained) -> Result<(), Failure> {
    let dir = &args.out;
    let failed = |source| Failure::Write {
        what: dir.display().to_string(),
        source,
    };
    fs::create_dir_all(dir).map_err(failed)?;
    let here = dir.canonicalize().map_err(failed)?;
    let model_folder = model.checkpoint().folder().or_else(|| args.model.parent());
    let folders = model_folder.into_iter().chain([args.adapter.as_path()]);
    if folders
        .filter_map(|folder| folder.canonicalize().ok())
        .any(|folder| folder == here)
    {
        return Err(Failure::OutHoldsModel { dir: dir.clone() });
    }
    for entry in fs::read_dir(dir).map_err(failed)? {
        let file = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
        let own = [Kind::Model.tensors(), Kind::Model.config()].contains(&&*file);
        if own && !args.overwrite {
            return Err(Failure::Merged { dir: dir.clone(), file });
        }
        let weights = [".safetensors", ".safetensors.index.json", ".gguf"];
        if !own && weights.iter().any(|end| file.ends_with(end)) {
            return Err(Failure::Foreign { dir: dir.clone(), file });
        }
    }
    Ok(())
}

/// The model's own tokenizer, as its files are.
fn files(model: &Pretrained) -> Result<Vec<(String, Vec<u8>)>, Failure> {
    let Some(folder) = model.checkpoint().folder() else {
        return Ok(model.tokenizer()?.hf_files()?);
    };
    let mut files = Vec::new();
    for name in FILES {
        match fs::read(folder.join(name)) {
            Ok(content) => files.push((name.to_owned(), content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => {
                let what = format!("a copy of {}", folder.join(name).display());
                return Err(Failure::Write { what, source });
            }
        }
    }
    Ok(files)
}

/// The model's configuration, which says how its weights are stored.
fn config_json(model: &Pretrained) -> Vec<u8> {
    let mut config = model.config.to_hf();
    config["dtype"] = dtype(model).into();
    format!("{config:#}\n").into_bytes()
}
