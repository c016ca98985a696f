//! The folder that `--out` names: plan, settings, metrics, checkpoints, and in the end the trained model.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tightfit_exec::Session;
use tightfit_exec::checkpoint::{self, SaveError};

use crate::checkpoints::{self, Checkpoints, MODEL, State, remove};
use crate::data::RowFiles;
use crate::failure::Failure;
use crate::job::Job;
use crate::report::Report;
use crate::train::StepReport;

/// The settings, which `--resume` reads.
pub const CONFIG: &str = "config.toml";
const RESULT: &str = "result.json";
const METRICS: &str = "metrics.jsonl";
const PLAN: &str = "plan.json";

/// What the folder may hold already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// No trained weights.
    New,
    /// A run, which this one replaces.
    Overwrite,
    /// A run, which this one continues.
    Resume,
}

/// An output folder that this run alone writes.
pub struct Output {
    dir: PathBuf,
    /// Locked while the run lasts.
    metrics: File,
    /// Bytes of whole lines in `metrics`.
    metrics_len: u64,
    checkpoints: Checkpoints,
}

impl Output {
    /// Makes the folder if there is none and claims it. Nothing that is in it changes.
    ///
    /// # Errors
    /// The folder cannot be made or written, another run writes to it, or it holds trained weights that may not be overwritten.
    pub fn claim(dir: &Path, claim: Claim, keep: u64) -> Result<Self, Failure> {
        if dir.exists() && !dir.is_dir() {
            return Err(write_failure(dir, io::ErrorKind::NotADirectory.into()));
        }
        fs::create_dir_all(dir).map_err(|source| write_failure(dir, source))?;
        if claim == Claim::New {
            let trained = [RESULT, MODEL].iter().any(|name| dir.join(name).exists());
            if trained || !checkpoints::steps(dir)?.is_empty() {
                return Err(Failure::Occupied { dir: dir.to_owned() });
            }
        }
        let path = dir.join(METRICS);
        let metrics = OpenOptions::new()
            .create(true)
            .read(true)
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
            checkpoints: Checkpoints::new(dir, keep),
        })
    }

    /// Checks that there is room for what this run will save, and writes what is known before it: settings, plan (given as text), and
    /// the model's configuration and tokenizer (`model_files`). Weights of an earlier run stay until this one saves its own.
    ///
    /// # Errors
    /// A file cannot be removed or written, or there is no room.
    pub fn begin(
        &mut self,
        job: &Job,
        plan: &str,
        model_files: &[(String, Vec<u8>)],
        resumed: Option<&State>,
    ) -> Result<(), Failure> {
        // A checkpoint is written before the oldest one goes.
        let needed = job.plan.persistent_bytes();
        if let Some(free) = checkpoint::free_bytes(&self.dir)
            && free < needed
        {
            let dir = self.dir.clone();
            return Err(Failure::NoRoom { dir, needed, free });
        }
        let step = resumed.map_or(0, |state| state.step);
        self.truncate_metrics(step)?;
        self.text(CONFIG, &job.settings.to_toml())?;
        self.text(PLAN, plan)?;
        for (name, content) in model_files {
            checkpoint::replace(&self.dir.join(name), |mut file| file.write_all(content))?;
        }
        for name in [RESULT, MODEL] {
            remove(&checkpoint::partial(&self.dir.join(name)))?;
        }
        if resumed.is_some() {
            remove(&self.dir.join(RESULT))?;
        }
        let names = model_files.iter().map(|(name, _)| name.clone()).collect();
        let best = resumed.and_then(|state| state.best);
        Ok(self.checkpoints.begin(step, best, names)?)
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
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

    /// Saves a checkpoint.
    ///
    /// # Errors
    /// It cannot be written whole; those before it are still there.
    pub fn save(&mut self, session: &Session, report: &StepReport, loss_first: f64) -> Result<(), Failure> {
        self.checkpoints
            .save(session, report.step, loss_first, report.eval_loss)?;
        Ok(())
    }

    /// Makes the last checkpoint's weights the folder's own, writes `result.json`, and removes what only the run needed.
    ///
    /// # Errors
    /// A file cannot be written whole; then neither it nor those after it are there.
    pub fn finish(&self, report: &Report) -> Result<(), Failure> {
        // Without a result the folder does not pass for whole while its files are of two runs.
        remove(&self.dir.join(RESULT))?;
        self.checkpoints.publish(report.steps.unwrap_or(0))?;
        let result = serde_json::to_string_pretty(report).map_err(|error| SaveError {
            path: self.dir.join(RESULT),
            source: error.into(),
        })?;
        self.text(RESULT, &(result + "\n"))?;
        if report.status == "done" {
            RowFiles::remove(&self.dir).map_err(|source| write_failure(&self.dir, source))?;
        }
        Ok(())
    }

    /// Drops what was noted after that step, by a run that did not come to save it.
    fn truncate_metrics(&mut self, step: u64) -> Result<(), Failure> {
        let path = self.dir.join(METRICS);
        let failed = |source| write_failure(&path, source);
        let mut len = 0;
        if step > 0 {
            let mut reader = BufReader::new(File::open(&path).map_err(failed)?);
            let mut line = Vec::new();
            while reader.read_until(b'\n', &mut line).map_err(failed)? > 0 {
                let noted = serde_json::from_slice::<Value>(&line).ok();
                let noted = noted.and_then(|line| line["step"].as_u64());
                if line.last() != Some(&b'\n') || noted.is_none_or(|noted| noted > step) {
                    break;
                }
                len += line.len() as u64;
                line.clear();
            }
        }
        self.metrics.set_len(len).map_err(failed)?;
        self.metrics_len = len;
        Ok(())
    }

    /// Writes a small file whole or not at all.
    fn text(&self, name: &str, content: &str) -> Result<(), Failure> {
        checkpoint::replace(&self.dir.join(name), |mut file| file.write_all(content.as_bytes()))?;
        Ok(())
    }
}

fn write_failure(path: &Path, source: io::Error) -> Failure {
    Failure::Write {
        what: path.display().to_string(),
        source,
    }
}
