//! What goes wrong, and the exit code that says so.

use std::path::PathBuf;

use tightfit_exec::SessionError;
use tightfit_exec::checkpoint::SaveError;
use tightfit_plan::file::FileError;
use tightfit_plan::{Infeasible, PlanError};

use crate::job::JobError;
use crate::memory::{MemoryError, format_bytes};
use crate::settings::SettingsError;
use crate::train::TrainError;

/// Why the command ended before it was done.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Settings.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// No plan.
    #[error(transparent)]
    Job(#[from] JobError),
    /// A plan file that cannot be used.
    #[error("{}: {source}{}", path.display(), differing(differences))]
    PlanFile {
        /// The file.
        path: PathBuf,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
        /// The settings in which the file's job and this one differ.
        differences: Vec<String>,
    },
    /// Too large.
    #[error("{0}")]
    Infeasible(#[from] Box<Infeasible>),
    /// This system does not say what memory there is.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// No memory or threads after all.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// Training broke off.
    #[error(transparent)]
    Train(#[from] TrainError),
    /// A result that cannot be written.
    #[error("cannot write {what}: {source}")]
    Write {
        /// The file, folder or stream.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// A checkpoint that cannot be written.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// An output folder with trained weights in it.
    #[error("{} holds the result of another run: choose another --out, or pass --overwrite to remove it", dir.display())]
    Occupied {
        /// The folder.
        dir: PathBuf,
    },
    /// An output folder that another process writes to.
    #[error("another run is writing to {}: choose another --out", dir.display())]
    Busy {
        /// The folder.
        dir: PathBuf,
    },
    /// A disk too full for what will be saved.
    #[error(
        "no room in {}: weights and optimizer state need {}, {} are free",
        dir.display(),
        format_bytes(*needed),
        format_bytes(*free)
    )]
    NoRoom {
        /// The folder.
        dir: PathBuf,
        /// Bytes that the run will write at its end, at least.
        needed: u64,
        /// Bytes that the file system has left.
        free: u64,
    },
    /// The signal handler cannot be set.
    #[error("cannot watch for Ctrl-C: {0}")]
    Signal(std::io::Error),
}

fn differing(differences: &[String]) -> String {
    if differences.is_empty() {
        return String::new();
    }
    format!("; settings that differ from the file's: {}", differences.join(", "))
}

impl Failure {
    /// See `tightfit --help`.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Settings(_) | Failure::Job(JobError::Model(_)) | Failure::Occupied { .. } => 2,
            Failure::Infeasible(_) | Failure::Job(JobError::Plan(PlanError::TooLarge | PlanError::Place { .. })) => 3,
            Failure::PlanFile { .. } => 4,
            _ => 1,
        }
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        Failure::Job(JobError::File(error))
    }
}
