//! The folder that `--out` names: plan, settings, metrics, weights.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde_json::json;
use tightfit_exec::Session;
use tightfit_exec::checkpoint::{self, SaveError};
use tightfit_ir::Role;

use crate::failure::Failure;
use crate::job::Job;
use crate::report::Report;
use crate::train::StepReport;

const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const RESULT: &str = "result.json";
const METRICS: &str = "metrics.jsonl";

/// What training has made, the result first: a folder with a result has whole weights of the same run. Written in the opposite
/// order.
const TRAINED: [&str; 3] = [RESULT, OPTIMIZER, MODEL];

/// An output folder that this run alone writes.
pub struct Output {
    dir: PathBuf,
    /// Locked while the run lasts.
    metrics: File,
    /// Bytes of whole lines in `metrics`.
    metrics_len: u64,
}

impl Output {
    /// Makes the folder if there is none and claims it. Nothing that is in it changes.
    ///
    /// # Errors
    /// The folder cannot be made or written, another run writes to it, or it holds trained weights that may not be overwritten.
    pub fn claim(dir: &Path, overwrite: bool) -> Result<Self, Failure> {
        if dir.exists() && !dir.is_dir() {
            return Err(write_failure(dir, io::ErrorKind::NotADirectory.into()));
        }
        fs::create_dir_all(dir).map_err(|source| write_failure(dir, source))?;
        let holds_run = TRAINED.iter().any(|name| dir.join(name).exists());
        if holds_run && !overwrite {
            return Err(Failure::Occupied { dir: dir.to_owned() });
        }
        let path = dir.join(METRICS);
        let metrics = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|source| write_failure(&path, source))?;
        match metrics.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(Failure::Busy { dir: dir.to_owned() }),
            // Some network file systems know no locks; the claim is then a matter of trust.
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        Ok(Self {
            dir: dir.to_owned(),
            metrics,
            metrics_len: 0,
        })
    }

    /// Checks that there is room for what this run will save, and writes what is known before it: `plan.json` (given as text),
    /// `config.toml`, `config.json` (the model, as Hugging Face spells it). Weights of an earlier run stay until
    /// [`finish`](Self::finish) replaces them.
    ///
    /// # Errors
    /// A file cannot be removed or written, or there is no room.
    pub fn begin(&mut self, job: &Job, plan: &str) -> Result<(), Failure> {
        let needed = job.plan.persistent_bytes();
        if let Some(free) = checkpoint::free_bytes(&self.dir)
            && free < needed
        {
            let dir = self.dir.clone();
            return Err(Failure::NoRoom { dir, needed, free });
        }
        for name in TRAINED {
            remove(&checkpoint::partial(&self.dir.join(name)))?;
        }
        self.metrics
            .set_len(0)
            .map_err(|source| write_failure(&self.dir.join(METRICS), source))?;
        let mut config = serde_json::to_value(job.settings.model()).unwrap_or_default();
        config["architectures"] = json!(["LlamaForCausalLM"]);
        config["model_type"] = json!("llama");
        config["torch_dtype"] = json!("float32");
        config["max_position_embeddings"] = json!(job.settings.seq);
        self.text("plan.json", plan)?;
        self.text("config.toml", &job.settings.to_toml())?;
        self.text("config.json", &format!("{config:#}\n"))
    }

    /// Appends a step to `metrics.jsonl`: a whole line or nothing.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn step(&mut self, report: &StepReport) -> Result<(), Failure> {
        let mut line = json!({
            "step": report.step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            "seconds": report.seconds,
            "eval_loss": report.eval_loss,
        })
        .to_string();
        line.push('\n');
        self.metrics.write_all(line.as_bytes()).map_err(|source| {
            // Takes half a line away; if that fails too, the error below says where to look.
            let _ = self.metrics.set_len(self.metrics_len);
            write_failure(&self.dir.join(METRICS), source)
        })?;
        self.metrics_len += line.len() as u64;
        Ok(())
    }

    /// Writes `model.safetensors`, `optimizer.safetensors` and `result.json`.
    ///
    /// # Errors
    /// A file cannot be written whole; then neither it nor those after it are there.
    pub fn finish(&self, session: &Session, report: &Report) -> Result<(), Failure> {
        let steps = report.steps.unwrap_or(0).to_string();
        let metadata = [("format", "pt"), ("steps", &*steps)];
        let save = |roles: &[Role], name: &str| checkpoint::save(session, roles, &metadata, &self.dir.join(name));
        // Without a result the folder does not pass for whole while its files are of two runs.
        remove(&self.dir.join(RESULT))?;
        save(&[Role::Weight, Role::Adapter], MODEL)?;
        save(&[Role::OptimizerState], OPTIMIZER)?;
        let result = serde_json::to_string_pretty(report).map_err(|error| SaveError {
            path: self.dir.join(RESULT),
            source: error.into(),
        })?;
        self.text(RESULT, &(result + "\n"))
    }

    /// Writes a small file whole or not at all.
    fn text(&self, name: &str, content: &str) -> Result<(), Failure> {
        checkpoint::replace(&self.dir.join(name), |mut file| file.write_all(content.as_bytes()))?;
        Ok(())
    }
}

/// Removes a file if it is there.
fn remove(path: &Path) -> Result<(), Failure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(write_failure(path, error)),
        _ => Ok(()),
    }
}

fn write_failure(path: &Path, source: io::Error) -> Failure {
    Failure::Write {
        what: path.display().to_string(),
        source,
    }
}
