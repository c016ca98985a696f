//! The folder that `--out` names: plan, settings, metrics, weights.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde_json::json;
use tightfit_exec::Session;
use tightfit_exec::checkpoint::{self, SaveError};
use tightfit_ir::Role;

use crate::failure::Failure;
use crate::job::Job;
use crate::report::Report;
use crate::train::StepReport;

/// An output folder.
pub struct Output {
    dir: PathBuf,
    metrics: BufWriter<File>,
}

impl Output {
    /// Makes the folder and writes what is known before the run: `plan.json`, `config.toml`, `config.json` (the model, as Hugging
    /// Face spells it).
    ///
    /// # Errors
    /// The folder cannot be made or written.
    pub fn create(dir: &Path, job: &Job) -> Result<Self, Failure> {
        fs::create_dir_all(dir).map_err(|source| write_failure(dir, source))?;
        text(&dir.join("plan.json"), &job.plan_file()?)?;
        text(&dir.join("config.toml"), &job.settings.to_toml())?;
        let mut config = serde_json::to_value(job.settings.model()).unwrap_or_default();
        config["architectures"] = json!(["LlamaForCausalLM"]);
        config["model_type"] = json!("llama");
        config["torch_dtype"] = json!("float32");
        config["max_position_embeddings"] = json!(job.settings.seq);
        text(&dir.join("config.json"), &format!("{config:#}\n"))?;
        let path = dir.join("metrics.jsonl");
        let metrics = File::create(&path).map_err(|source| write_failure(&path, source))?;
        Ok(Self {
            dir: dir.to_owned(),
            metrics: BufWriter::new(metrics),
        })
    }

    /// Appends a step to `metrics.jsonl`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn step(&mut self, report: &StepReport) -> io::Result<()> {
        let line = json!({
            "step": report.step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            "seconds": report.seconds,
            "eval_loss": report.eval_loss,
        });
        writeln!(self.metrics, "{line}")
    }

    /// Writes `model.safetensors`, `optimizer.safetensors` and `result.json`.
    ///
    /// # Errors
    /// A file cannot be written; a file of that name from before is still whole.
    pub fn finish(&mut self, session: &Session, report: &Report) -> Result<(), Failure> {
        let metrics = self.dir.join("metrics.jsonl");
        self.metrics.flush().map_err(|source| write_failure(&metrics, source))?;
        let steps = report.steps.unwrap_or(0).to_string();
        let metadata = || {
            HashMap::from([
                ("format".to_owned(), "pt".to_owned()),
                ("steps".to_owned(), steps.clone()),
            ])
        };
        let save = |roles: &[Role], name: &str| checkpoint::save(session, roles, metadata(), &self.dir.join(name));
        save(&[Role::Weight, Role::Adapter], "model.safetensors")?;
        save(&[Role::OptimizerState], "optimizer.safetensors")?;
        let result = serde_json::to_string_pretty(report).map_err(|error| SaveError {
            path: self.dir.join("result.json"),
            message: error.to_string(),
        })?;
        text(&self.dir.join("result.json"), &(result + "\n"))
    }
}

/// Writes a small file whole or not at all.
fn text(path: &Path, content: &str) -> Result<(), Failure> {
    checkpoint::replace(path, |partial| {
        fs::write(partial, content).map_err(|error| error.to_string())
    })?;
    Ok(())
}

fn write_failure(path: &Path, source: io::Error) -> Failure {
    Failure::Write {
        what: path.display().to_string(),
        source,
    }
}
