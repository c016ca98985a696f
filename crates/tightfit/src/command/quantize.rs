//! `tightfit quantize`: a model with its weights in 8 or 4 bits.

use std::fs;
use std::io::{self, Write};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use serde::Serialize;
use tightfit_exec::checkpoint::{self, SaveError};
use tightfit_model::DecoderConfig;
use tightfit_pass::Pattern;

use crate::checkpoints::MODEL;
use crate::cli::QuantizeArgs;
use crate::console::{Console, Transfer};
use crate::failure::Failure;
use crate::input::read_regular;
use crate::memory::format_bytes;
use crate::pretrained::{MAX_CONFIG, Pretrained, PretrainedError};
use crate::quantize::{Choice, Plan, QuantizeError, Source, Squares, TensorReport, plan, write};
use crate::stop::Stop;

use super::print_json;

const CONFIG: &str = "config.json";

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    /// Raised whenever a field changes its meaning or goes away.
    schema_version: u32,
    /// The file that was written.
    path: PathBuf,
    /// `int8`, `int4` or `nf4`.
    base: &'static str,
    /// Of a model of random weights.
    seed: Option<u64>,
    /// What was quantised.
    quantized: Sum,
    /// What was not.
    kept: Sum,
    /// `Σ (x − x')² / Σ x²` over all that was quantised.
    relative_squared_error: f64,
    tensors: Vec<TensorReport>,
    seconds: f64,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Sum {
    tensors: u64,
    elements: u64,
    bytes_before: u64,
    bytes_after: u64,
}

/// Quantises; the exit code.
pub fn run(args: &QuantizeArgs) -> Result<u8, Failure> {
    let started = Instant::now();
    let stop = Stop::watch_file().map_err(Failure::Signal)?;
    let console = Console { json: args.json };
    let model = args.model.as_deref().map(Pretrained::open).transpose()?;
    let (source, config) = match (&model, &args.fresh) {
        (Some(model), _) => (Source::File(model.checkpoint(), model.sources()), model.config.clone()),
        (None, Some(path)) => (Source::Fresh(args.seed), read_config(path)?),
        // clap asks for one of them.
        (None, None) => unreachable!("neither --model nor --fresh"),
    };
    let choice = Choice {
        block: args.base,
        targets: args.targets.iter().cloned().map(Pattern).collect(),
        embeddings: args.embeddings,
        head: args.head,
    };
    let plan = plan(&config, &source, &choice)?;
    let mut files = vec![(CONFIG.to_owned(), format!("{:#}\n", config.to_hf()).into_bytes())];
    if let Some(model) = model.as_ref().filter(|model| model.has_tokenizer()) {
        files.extend(model.tokenizer()?.hf_files()?);
    }

    let out = Out::claim(args, model.as_ref(), &files)?;
    let cores = || thread::available_parallelism().map_or(1, NonZero::get);
    let threads = args.threads.map_or_else(cores, |threads| threads as usize);
    let transfer = Transfer::new("quantising", plan.layout.bytes());
    let squares = out.fill(&files, |file| {
        out.check_room(plan.layout.bytes())?;
        write(&plan, &source, file, threads, stop.requested(), &|bytes| {
            transfer.add(bytes)
        })
    })?;
    transfer.finish();
    let report = Report {
        seconds: started.elapsed().as_secs_f64(),
        ..report(args, &plan, &squares, out.dir.join(MODEL))
    };
    super::write(console.line(&text(&report)))?;
    print_json(console, &report)?;
    Ok(0)
}

fn read_config(path: &Path) -> Result<DecoderConfig, Failure> {
    let text = read_regular(path, MAX_CONFIG).map_err(|source| PretrainedError::Read {
        path: path.to_owned(),
        source,
    })?;
    let config = DecoderConfig::from_hf(&text).map_err(|source| PretrainedError::Model {
        path: path.to_owned(),
        source,
    })?;
    Ok(config)
}

/// The folder that is written.
struct Out {
    dir: PathBuf,
}

impl Out {
    /// Makes the folder, or makes sure that it holds nothing but what is replaced.
    fn claim(args: &QuantizeArgs, model: Option<&Pretrained>, files: &[(String, Vec<u8>)]) -> Result<Self, Failure> {
        let dir = args.out.clone();
        let failed = |source| Failure::Write {
            what: dir.display().to_string(),
            source,
        };
        fs::create_dir_all(&dir).map_err(failed)?;
        let holds = model
            .and_then(|model| model.checkpoint().files().next()?.0.canonicalize().ok())
            .zip(dir.canonicalize().ok())
            .is_some_and(|(model, dir)| model.starts_with(dir));
        if holds {
            return Err(Failure::OutHoldsModel { dir });
        }
        for entry in fs::read_dir(&dir).map_err(failed)? {
            let file = entry.map_err(failed)?.file_name().to_string_lossy().into_owned();
            let ours = file == MODEL || file == CONFIG;
            if ours && !args.overwrite {
                return Err(QuantizeError::Occupied { dir }.into());
            }
            let known = ours || files.iter().any(|(name, _)| *name == file) || file.ends_with(".partial");
            let foreign = [".safetensors", ".safetensors.index.json", ".gguf", ".toml", ".jsonl"];
            if !known && foreign.iter().any(|end| file.ends_with(end)) {
                return Err(QuantizeError::Foreign { dir, file }.into());
            }
        }
        Ok(Self { dir })
    }

    fn check_room(&self, needed: u64) -> Result<(), QuantizeError> {
        match checkpoint::free_bytes(&self.dir) {
            Some(free) if free < needed => Err(QuantizeError::NoRoom {
                dir: self.dir.clone(),
                needed,
                free,
            }),
            _ => Ok(()),
        }
    }

    /// Writes the weights under another name; once they are whole the other files, and then the weights get their own.
    fn fill<T>(
        &self,
        files: &[(String, Vec<u8>)],
        weights: impl FnOnce(&fs::File) -> Result<T, QuantizeError>,
    ) -> Result<T, Failure> {
        let mut outcome = Err(QuantizeError::Stopped);
        let replaced = checkpoint::replace(&self.dir.join(MODEL), |file| {
            outcome = weights(file);
            if outcome.is_err() {
                return Err(io::ErrorKind::Other.into());
            }
            for (name, content) in files {
                let written = checkpoint::replace(&self.dir.join(name), |mut file| file.write_all(content));
                written.map_err(|SaveError { source, .. }| source)?;
            }
            Ok(())
        });
        let done = match outcome {
            Err(QuantizeError::Write(source)) => Err(SaveError {
                path: self.dir.join(MODEL),
                source,
            }
            .into()),
            Err(error) => Err(error.into()),
            Ok(done) => replaced.map(|()| done).map_err(Failure::from),
        };
        // Only an empty folder goes.
        done.inspect_err(|_| drop(fs::remove_dir(&self.dir)))
    }
}

fn report(args: &QuantizeArgs, plan: &Plan, squares: &[Squares], path: PathBuf) -> Report {
    let (mut quantized, mut kept) = (Sum::default(), Sum::default());
    let written = plan.layout.entries();
    let tensors = plan.items.iter().zip(squares).filter_map(|(item, squares)| {
        let entry = written.iter().find(|entry| entry.name == item.weight.name)?;
        let sum = if item.block.is_some() {
            &mut quantized
        } else {
            &mut kept
        };
        sum.tensors += 1;
        sum.elements += entry.elements();
        sum.bytes_before += item.bytes_before;
        sum.bytes_after += entry.bytes();
        Some(TensorReport {
            name: entry.name.clone(),
            shape: entry.shape.clone(),
            from: item.from.name(),
            to: entry.encoding.name(),
            bytes_before: item.bytes_before,
            bytes_after: entry.bytes(),
            relative_squared_error: item.block.map(|_| squares.relative()),
        })
    });
    let tensors = tensors.collect();
    Report {
        schema_version: crate::report::SCHEMA_VERSION,
        path,
        base: args.base.name(),
        seed: args.fresh.as_ref().map(|_| args.seed),
        quantized,
        kept,
        relative_squared_error: squares
            .iter()
            .copied()
            .fold(Squares::default(), Squares::and)
            .relative(),
        tensors,
        seconds: 0.0,
    }
}

fn text(report: &Report) -> String {
    let mut lines: Vec<_> = report.tensors.iter().map(tensor).collect();
    for (what, sum) in [("quantised", &report.quantized), ("kept", &report.kept)] {
        lines.push(format!(
            "{what:<10} {:>5} tensors  {:>13} elements  {:>11} from {:>11}",
            sum.tensors,
            sum.elements,
            format_bytes(sum.bytes_after),
            format_bytes(sum.bytes_before)
        ));
    }
    lines.push(format!(
        "error      {:.3e} of the squares",
        report.relative_squared_error
    ));
    lines.push(format!("wrote      {}  {:.1} s", report.path.display(), report.seconds));
    lines.join("\n")
}

fn tensor(tensor: &TensorReport) -> String {
    let shape: Vec<_> = tensor.shape.iter().map(u64::to_string).collect();
    let error = tensor
        .relative_squared_error
        .map_or_else(String::new, |error| format!("{error:.2e}"));
    format!(
        "{:<5} {:<5} {:>13} {:>11} {:>11}  {error:<8}  {}",
        tensor.from,
        tensor.to,
        shape.join("x"),
        format_bytes(tensor.bytes_before),
        format_bytes(tensor.bytes_after),
        tensor.name
    )
}
