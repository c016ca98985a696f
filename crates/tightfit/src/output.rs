//! The folder that `--out` names: plan, settings, metrics, checkpoints, and in the end the trained model or adapter.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tightfit_exec::Session;
use tightfit_exec::checkpoint::{self, SaveError};

use crate::Role;
use crate::checkpoints::{self, Checkpoints, Kind, RowsState, State, remove};
use crate::data::{RowFiles, Split};
use crate::failure::Failure;
use crate::input::read_regular;
use crate::job::Job;
use crate::report::Report;
use crate::settings::Settings;
use crate::train::{ScaledStep, StepReport};

/// Most bytes of a `result.json`.
const MAX_RESULT: u64 = 1 << 24;

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

/// What a run begins with.
#[derive(Clone, Debug)]
pub struct Start<'a> {
    /// `plan.json`.
    pub plan: &'a str,
    /// The model's configuration and tokenizer: names and contents.
    pub model_files: &'a [(String, Vec<u8>)],
    /// The rows that the run is made of.
    pub rows: Option<RowsState>,
    /// Whether they were made now, and wait to be given their names.
    pub new_rows: bool,
    /// Where the run stands that is resumed.
    pub resumed: Option<&'a State>,
}

/// An output folder that this run alone writes.
pub struct Output {
    dir: PathBuf,
    /// Locked while the run lasts.
    metrics: File,
    /// Bytes of whole lines in `metrics`.
    metrics_len: u64,
    kind: Kind,
    checkpoints: Checkpoints,
}

impl Output {
    /// Makes the folder if there is none and claims it. Nothing that is in it changes.
    ///
    /// # Errors
    /// The folder cannot be made or written, another run writes to it, or it holds trained weights that may not be overwritten.
    pub fn claim(dir: &Path, claim: Claim, kind: Kind, keep: u64) -> Result<Self, Failure> {
        if dir.exists() && !dir.is_dir() {
            return Err(write_failure(dir, io::ErrorKind::NotADirectory.into()));
        }
        fs::create_dir_all(dir).map_err(|source| write_failure(dir, source))?;
        if claim == Claim::New {
            let trained = [RESULT, Kind::Model.tensors(), Kind::Adapter.tensors()]
                .iter()
                .any(|name| dir.join(name).exists());
            if trained || !checkpoints::steps(dir)?.is_empty() {
                return Err(Failure::Occupied { dir: dir.to_owned() });
            }
            if let Some(file) = foreign(dir).map_err(|source| write_failure(dir, source))? {
                let dir = dir.to_owned();
                return Err(Failure::Foreign { dir, file });
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
            kind,
            checkpoints: Checkpoints::new(dir, kind, keep),
        })
    }

    /// Begins the run in the folder. What an earlier run has left there goes first, but for its weights, which stay until this run
    /// saves its own; the settings come last: a folder that has them holds this run and no other.
    ///
    /// # Errors
    /// A file cannot be removed or written, or there is no room.
    pub fn begin(&mut self, job: &Job, start: Start<'_>) -> Result<(), Failure> {
        self.check_room(job)?;
        let step = start.resumed.map_or(0, |state| state.step);
        if start.resumed.is_none() {
            remove(&self.dir.join(CONFIG))?;
        }
        self.checkpoints.clear(step)?;
        self.truncate_metrics(step)?;
        let names: Vec<String> = start.model_files.iter().map(|(name, _)| name.clone()).collect();
        for name in [RESULT, Kind::Model.tensors(), Kind::Adapter.tensors(), CONFIG, PLAN]
            .into_iter()
            .chain(names.iter().map(String::as_str))
        {
            remove(&checkpoint::partial(&self.dir.join(name)))?;
        }
        if start.resumed.is_some() {
            remove(&self.dir.join(RESULT))?;
        }
        if start.new_rows {
            RowFiles::keep(&self.dir).map_err(|source| write_failure(&self.dir, source))?;
        } else {
            for split in [Split::Train, Split::Eval] {
                remove(&checkpoint::partial(&RowFiles::path(&self.dir, split)))?;
            }
        }
        self.text(PLAN, start.plan)?;
        for (name, content) in start.model_files {
            checkpoint::replace(&self.dir.join(name), |mut file| file.write_all(content))?;
        }
        self.text(CONFIG, &job.settings.to_toml())?;
        let best = start.resumed.and_then(|state| state.best);
        self.checkpoints.begin(best, start.rows, names);
        Ok(())
    }

    /// As many checkpoints as are there at one time: those that stay, the best, and one that is written before another goes.
    fn check_room(&self, job: &Job) -> Result<(), Failure> {
        let Settings {
            steps,
            save_every,
            keep,
            ..
        } = job.settings;
        let saves = 1 + steps.checked_div(save_every).unwrap_or(0);
        let there = checkpoints::steps(&self.dir)?.len() as u64;
        let most = saves.min(keep + 2).saturating_sub(there).max(1);
        let needed = self.checkpoint_bytes(job).saturating_mul(most);
        // The file that offloading uses is made later, on the same disk as like as not.
        let disk = |folder: &Path| fs::metadata(folder).map(|data| data.dev()).ok();
        let offloaded = match disk(&job.settings.scratch_dir(Some(&self.dir))) == disk(&self.dir) {
            true => job.plan.lower_tier_bytes(),
            false => 0,
        };
        match checkpoint::free_bytes(&self.dir) {
            Some(free) if free < needed.saturating_add(offloaded) => Err(Failure::NoRoom {
                dir: self.dir.clone(),
                needed,
                offloaded,
                free,
            }),
            _ => Ok(()),
        }
    }

    /// Tensors of a checkpoint: all that live as long as the job, but for the weights that adapters are trained beside.
    fn checkpoint_bytes(&self, job: &Job) -> u64 {
        let tensors = job.plan.liveness().persistent.iter();
        let saved = tensors.filter(|tensor| self.kind == Kind::Model || tensor.role != Role::Weight);
        saved.fold(0, |sum: u64, tensor| sum.saturating_add(tensor.ty.bytes()))
    }

    /// The result of a run that is done; `None` where there is none yet.
    pub fn result(&self) -> Option<String> {
        let result = read_regular(&self.dir.join(RESULT), MAX_RESULT).ok()?;
        let parsed: Value = serde_json::from_str(&result).ok()?;
        (parsed["status"] == "done").then_some(result)
    }

    /// The last step that was noted.
    pub fn last_step(&self) -> Option<StepReport> {
        let metrics = BufReader::new(File::open(self.dir.join(METRICS)).ok()?);
        let last = metrics.lines().map_while(Result::ok).last()?;
        let step: Value = serde_json::from_str(&last).ok()?;
        Some(StepReport {
            step: step["step"].as_u64()?,
            loss: step["loss"].as_f64()?,
            grad_norm: step["grad_norm"].as_f64().map(|norm| norm as f32),
            lr: step["lr"].as_f64()?,
            loss_scale: scaled_step(&step),
            seconds: step["seconds"].as_f64()?,
            eval_loss: step["eval_loss"].as_f64(),
            save: false,
        })
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
            "loss_scale": report.loss_scale.map(|scaled| scaled.scale),
            "skipped": report.loss_scale.map(|scaled| scaled.skipped),
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
    pub fn save(&mut self, session: &mut Session, report: &StepReport, loss_first: f64) -> Result<(), Failure> {
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

/// A file that shows that the folder holds a model which no run has made.
fn foreign(dir: &Path) -> io::Result<Option<String>> {
    // The first thing that a run makes there.
    if dir.join(METRICS).exists() {
        return Ok(None);
    }
    for entry in fs::read_dir(dir)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let model = [".safetensors", ".safetensors.index.json", ".gguf"]
            .iter()
            .any(|end| name.ends_with(end));
        if model || name == "config.json" {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

fn write_failure(path: &Path, source: io::Error) -> Failure {
    Failure::Write {
        what: path.display().to_string(),
        source,
    }
}
/// How a noted step's loss was scaled.
fn scaled_step(step: &Value) -> Option<ScaledStep> {
    Some(ScaledStep {
        scale: step["loss_scale"].as_f64()? as f32,
        skipped: step["skipped"].as_bool()?,
    })
}
