//! The checkpoints of a run: folders `checkpoint-N` in its output folder, each whole or not there.
//!
//! A checkpoint is a Hugging Face folder (weights, configuration, tokenizer), or one in PEFT's format where adapters are trained, with
//! the optimizer's state and a `state.json` beside them. It is written under another name, synced, and renamed; one that goes is renamed before it is removed. A run that is killed at
//! any moment therefore leaves whole checkpoints, and leftovers that the next run clears away.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tightfit_exec::Session;
use tightfit_exec::checkpoint::{self, SaveError, partial};
use tightfit_ir::Role;

use crate::adapters::{ADAPTER_CONFIG, ADAPTER_MODEL, PREFIX as ADAPTER_PREFIX};
use crate::input::read_regular;

/// Weights, as Hugging Face names them.
pub const MODEL: &str = "model.safetensors";
/// What they are the weights of.
pub const MODEL_CONFIG: &str = "config.json";
/// The optimizer's state.
pub const OPTIMIZER: &str = "optimizer.safetensors";
/// Where the run stood.
pub const STATE: &str = "state.json";
/// A link to the checkpoint of the lowest loss on held-out text.
pub const BEST: &str = "best";

const PREFIX: &str = "checkpoint-";
/// Ends the name of a checkpoint of an earlier run, which goes once this run has saved one of its own.
const REPLACED: &str = ".replaced";
/// Raised when `state.json` changes its meaning.
const STATE_VERSION: u32 = 1;
/// What a run leaves: which file it is in, with its configuration beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A model.
    Model,
    /// An adapter.
    Adapter,
}

impl Kind {
    /// The file of tensors.
    pub fn tensors(self) -> &'static str {
        match self {
            Self::Model => MODEL,
            Self::Adapter => ADAPTER_MODEL,
        }
    }

    /// The file that says what they are.
    pub fn config(self) -> &'static str {
        match self {
            Self::Model => MODEL_CONFIG,
            Self::Adapter => ADAPTER_CONFIG,
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Model => Self::Adapter,
            Self::Adapter => Self::Model,
        }
    }
}

/// Most bytes of `state.json`.
const MAX_STATE: u64 = 1 << 16;

/// The step of the lowest loss on held-out text.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Counted from 1.
    pub step: u64,
    /// Nats per token.
    pub eval_loss: f64,
}

/// Where a run stood. Everything else follows: data, order and learning rate are functions of the settings and the step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Of the form of this file.
    pub version: u32,
    /// Steps done.
    pub step: u64,
    /// Loss of the run's first step.
    pub loss_first: f64,
    /// The best checkpoint so far.
    pub best: Option<Best>,
    /// The rows of tokens that the run is made of, where they come from files.
    pub data: Option<RowsState>,
}

/// Which rows a run was made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowsState {
    /// Rows to train on.
    pub train_rows: u64,
    /// Rows held out.
    pub eval_rows: u64,
    /// SHA-256 of all rows.
    pub fingerprint: String,
}

/// A checkpoint that cannot be continued from.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Not readable.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Not what this version writes.
    #[error("{}: {message}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// Why.
        message: String,
    },
}

impl State {
    /// Reads the state of the checkpoint after a step.
    ///
    /// # Errors
    /// There is none, another version wrote it, or it is one of another step.
    pub fn read(dir: &Path, step: u64) -> Result<Self, StateError> {
        let path = folder(dir, step).join(STATE);
        let text = read_regular(&path, MAX_STATE);
        let text = text.map_err(|source| StateError::Read {
            path: path.clone(),
            source,
        })?;
        let invalid = |message: String| StateError::Invalid {
            path: path.clone(),
            message,
        };
        let state: Self = serde_json::from_str(&text).map_err(|error| invalid(error.to_string()))?;
        if state.version != STATE_VERSION {
            return Err(invalid(format!(
                "its version is {}, this program reads version {STATE_VERSION}",
                state.version
            )));
        }
        if state.step != step {
            return Err(invalid(format!(
                "it is of step {}, in the folder of step {step}",
                state.step
            )));
        }
        Ok(state)
    }
}

/// The checkpoints in a folder: their steps, oldest first.
///
/// # Errors
/// The folder cannot be read.
pub fn steps(dir: &Path) -> Result<Vec<u64>, StateError> {
    let read = |source| StateError::Read {
        path: dir.to_owned(),
        source,
    };
    let mut steps = Vec::new();
    for entry in fs::read_dir(dir).map_err(read)? {
        let entry = entry.map_err(read)?;
        let name = entry.file_name();
        let step = name
            .to_str()
            .and_then(|name| name.strip_prefix(PREFIX)?.parse::<u64>().ok());
        // Only names that a run gives.
        steps.extend(step.filter(|&step| folder(dir, step) == entry.path() && entry.path().is_dir()));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// The folder of the checkpoint after that step.
pub fn folder(dir: &Path, step: u64) -> PathBuf {
    dir.join(format!("{PREFIX}{step}"))
}

/// The checkpoints that a run writes.
#[derive(Debug)]
pub struct Checkpoints {
    dir: PathBuf,
    kind: Kind,
    keep: usize,
    best: Option<Best>,
    data: Option<RowsState>,
    /// Files of the output folder that belong to the model: its configuration and tokenizer.
    model_files: Vec<String>,
}

impl Checkpoints {
    /// Of a run in `dir` that keeps the last `keep` and the best.
    pub fn new(dir: &Path, kind: Kind, keep: u64) -> Self {
        Self {
            dir: dir.to_owned(),
            kind,
            keep: usize::try_from(keep).unwrap_or(usize::MAX),
            best: None,
            data: None,
            model_files: Vec::new(),
        }
    }

    /// Clears away what a killed run has left, and sets checkpoints that are newer than `step` aside: those of a run that is
    /// replaced.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn clear(&self, step: u64) -> Result<(), SaveError> {
        self.remove_ending(".partial")?;
        for newer in self.steps()?.into_iter().filter(|&newer| newer > step) {
            self.set_aside(newer)?;
        }
        Ok(())
    }

    /// Says what goes into every checkpoint: the rows that the run is made of, and the names of the model's files.
    pub fn begin(&mut self, best: Option<Best>, data: Option<RowsState>, model_files: Vec<String>) {
        self.best = best;
        self.data = data;
        self.model_files = model_files;
    }

    /// Writes the checkpoint after `state.step`, makes it the best where `eval_loss` is the lowest so far, and removes those that are
    /// not to stay.
    ///
    /// # Errors
    /// It cannot be written whole; those before it are still there.
    pub fn save(
        &mut self,
        session: &mut Session,
        step: u64,
        loss_first: f64,
        eval_loss: Option<f64>,
    ) -> Result<(), SaveError> {
        let better = eval_loss.filter(|&loss| self.best.is_none_or(|best| loss < best.eval_loss));
        let best = better.map(|eval_loss| Best { step, eval_loss }).or(self.best);
        let path = folder(&self.dir, step);
        let unfinished = partial(&path);
        let state = State {
            version: STATE_VERSION,
            step,
            loss_first,
            best,
            data: self.data.clone(),
        };
        if let Err(error) = self.write(session, &state, &unfinished) {
            // It may not exist; what matters is reported.
            let _ = fs::remove_dir_all(&unfinished);
            return Err(error);
        }
        if path.exists() {
            self.set_aside(step)?;
        }
        fs::rename(&unfinished, &path).map_err(failed(&path))?;
        sync(&self.dir)?;
        self.best = best;
        if better.is_some() {
            self.link_best(step);
        }
        self.remove_ending(REPLACED)?;
        self.prune()
    }

    /// Makes the weights of the checkpoint after `step` the output folder's own: another name of the same file where the file system
    /// can, a copy elsewhere. What a replaced run of the other kind has left goes.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn publish(&self, step: u64) -> Result<(), SaveError> {
        let name = self.kind.tensors();
        let (from, to) = (folder(&self.dir, step).join(name), self.dir.join(name));
        let unfinished = partial(&to);
        remove(&unfinished)?;
        if fs::hard_link(&from, &unfinished).is_err() {
            copy(&from, &unfinished)?;
        }
        fs::rename(&unfinished, &to).map_err(failed(&to))?;
        // Where both are names of one file already, renaming does nothing.
        remove(&unfinished)?;
        let replaced = self.kind.other();
        remove(&self.dir.join(replaced.config()))?;
        remove(&self.dir.join(replaced.tensors()))?;
        sync(&self.dir)
    }

    fn write(&self, session: &mut Session, state: &State, folder: &Path) -> Result<(), SaveError> {
        fs::create_dir(folder).map_err(failed(folder))?;
        let step = state.step.to_string();
        let metadata = [("format", "pt"), ("steps", &*step)];
        let (role, prefix) = match self.kind {
            Kind::Model => (Role::Weight, ""),
            Kind::Adapter => (Role::Adapter, ADAPTER_PREFIX),
        };
        for (role, prefix, name) in [
            (role, prefix, self.kind.tensors()),
            (Role::OptimizerState, "", OPTIMIZER),
        ] {
            checkpoint::save(session, &[role], prefix, &metadata, &folder.join(name))?;
        }
        for name in &self.model_files {
            copy(&self.dir.join(name), &folder.join(name))?;
        }
        let path = folder.join(STATE);
        let text = serde_json::to_string_pretty(state).map_err(|error| failed(&path)(error.into()))?;
        checkpoint::replace(&path, |mut file| writeln!(file, "{text}"))?;
        sync(folder)
    }

    fn steps(&self) -> Result<Vec<u64>, SaveError> {
        steps(&self.dir).map_err(|error| match error {
            StateError::Read { path, source } => SaveError { path, source },
            StateError::Invalid { path, message } => SaveError {
                path,
                source: io::Error::other(message),
            },
        })
    }

    /// Removes all but the last `keep` and the best.
    fn prune(&self) -> Result<(), SaveError> {
        let steps = self.steps()?;
        let best = self.best.map(|best| best.step);
        for &step in &steps[..steps.len().saturating_sub(self.keep)] {
            if Some(step) != best {
                self.set_aside(step)?;
            }
        }
        self.remove_ending(REPLACED)
    }

    /// From here on the checkpoint counts no more.
    fn set_aside(&self, step: u64) -> Result<(), SaveError> {
        let path = folder(&self.dir, step);
        let aside = self.dir.join(format!("{PREFIX}{step}{REPLACED}"));
        remove_all(&aside)?;
        fs::rename(&path, &aside).map_err(failed(&path))
    }

    fn remove_ending(&self, ending: &str) -> Result<(), SaveError> {
        let failed_here = failed(&self.dir);
        for entry in fs::read_dir(&self.dir).map_err(&failed_here)? {
            let entry = entry.map_err(&failed_here)?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with(PREFIX) && name.ends_with(ending) {
                remove_all(&entry.path())?;
            }
        }
        Ok(())
    }

    /// Not all file systems know links; `state.json` names the best one as well.
    fn link_best(&self, step: u64) {
        let (link, unfinished) = (self.dir.join(BEST), self.dir.join(BEST).with_extension("partial"));
        let _ = fs::remove_file(&unfinished);
        let linked = std::os::unix::fs::symlink(format!("{PREFIX}{step}"), &unfinished);
        if linked.and_then(|()| fs::rename(&unfinished, &link)).is_err() {
            let _ = fs::remove_file(&unfinished);
        }
    }
}

/// Copies a file and syncs it.
fn copy(from: &Path, to: &Path) -> Result<(), SaveError> {
    fs::copy(from, to).map_err(failed(to))?;
    sync(to)
}

/// Makes a file, or the names in a folder, durable.
fn sync(path: &Path) -> Result<(), SaveError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(failed(path))
}

/// Removes a folder, or a file of that name, if it is there.
fn remove_all(path: &Path) -> Result<(), SaveError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => remove(path),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(path)(error)),
        _ => Ok(()),
    }
}

/// Removes a file if it is there.
pub fn remove(path: &Path) -> Result<(), SaveError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(path)(error)),
        _ => Ok(()),
    }
}

fn failed(path: &Path) -> impl Fn(io::Error) -> SaveError {
    let path = path.to_owned();
    move |source| SaveError {
        path: path.clone(),
        source,
    }
}
