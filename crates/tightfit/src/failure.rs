//! What goes wrong, and the exit code that says so.

use std::path::PathBuf;

use tightfit_exec::checkpoint::SaveError;
use tightfit_exec::load::LoadError;
use tightfit_exec::persistent::TensorError;
use tightfit_exec::tier::{ScratchError, TierError};
use tightfit_exec::{RunError, SessionError};
use tightfit_gpu::Card;
use tightfit_model::Known;
use tightfit_plan::file::FileError;
use tightfit_plan::{Infeasible, PlanError};
use tightfit_text::TokenizerError;

use crate::alternatives::Alternative;
use crate::checkpoints::StateError;
use crate::data::{PrepareError, TextError};
use crate::generate::GenerateError;
use crate::hub::is_id;
use crate::job::JobError;
use crate::memory::{MemoryError, format_bytes};
use crate::pretrained::PretrainedError;
use crate::quantize::QuantizeError;
use crate::resume::ResumeError;
use crate::settings::SettingsError;
use crate::stop::STOPPED;
use crate::train::TrainError;

/// The exit code of a job that does not fit.
pub const DOES_NOT_FIT: u8 = 3;

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
    /// A training job too large, with what would help.
    #[error("{infeasible}{}", helping(alternatives))]
    DoesNotFit {
        /// What it needs.
        infeasible: Box<Infeasible>,
        /// Other settings that need less.
        alternatives: Vec<Alternative>,
    },
    /// A device that is not in the table.
    #[error("no device is called `{name}`; there are cpu, {}", Card::all().iter().map(|card| &*card.name).collect::<Vec<_>>().join(", "))]
    NoSuchDevice {
        /// As given.
        name: String,
    },
    /// A flag of `plan` that does not go with the others.
    #[error("{flag}: {message}")]
    Flag {
        /// As it is spelled.
        flag: &'static str,
        /// Why not, and what to say instead.
        message: String,
    },
    /// A model that is neither a path nor in the table.
    #[error("{name} is neither a path on this machine nor the name of a model{}; known are {}", fetch(name), Known::all().iter().map(|known| &*known.name).collect::<Vec<_>>().join(", "))]
    NoSuchModel {
        /// As given.
        name: String,
    },
    /// A file for what is offloaded that is larger than it may be.
    #[error(
        "does not fit: what is offloaded needs a file of {}, --disk is {}\na smaller micro-batch or fewer kinds of --offload need less\n\
         smallest --disk that would do for this job as it is: {needed} ({})",
        format_bytes(*needed), format_bytes(*limit), format_bytes(*needed)
    )]
    Disk {
        /// Bytes of the file.
        needed: u64,
        /// Bytes that it may have.
        limit: u64,
    },
    /// A folder that offloading cannot use.
    #[error(transparent)]
    Scratch(#[from] ScratchError),
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
    #[error(
        "{0} holds the result of another run: choose another --out, go on with it by --resume {0}, or pass --overwrite to replace it",
        dir.display()
    )]
    Occupied {
        /// The folder.
        dir: PathBuf,
    },
    /// An output folder that holds something else.
    #[error("{} holds {file}, which is not of a run: choose another --out", dir.display())]
    Foreign {
        /// The folder.
        dir: PathBuf,
        /// What is in it.
        file: String,
    },
    /// A folder that holds a model, where another was to be written.
    #[error("{} holds {file}: choose another --out, or pass --overwrite to replace that model", dir.display())]
    Merged {
        /// The folder.
        dir: PathBuf,
        /// What is in it.
        file: String,
    },
    /// A model that lies in the folder that a run would write.
    #[error("the model or adapter lies in {}, which this run would write to: choose another --out", dir.display())]
    OutHoldsModel {
        /// The folder.
        dir: PathBuf,
    },
    /// An adapter without a model that is kept.
    #[error("an adapter in --out is of no use without its model, and this one is fresh: say which by --model")]
    AdapterOfNothing,
    /// An output folder that another process writes to.
    #[error("another run is writing to {}: let it end, or choose another --out", dir.display())]
    Busy {
        /// The folder.
        dir: PathBuf,
    },
    /// A disk too full for what will be saved.
    #[error(
        "no room in {}: checkpoints need {}{}, {} are free; keep fewer by --keep, or save none on the way by --save-every 0",
        dir.display(),
        format_bytes(*needed),
        and_offloaded(*offloaded),
        format_bytes(*free)
    )]
    NoRoom {
        /// The folder.
        dir: PathBuf,
        /// Bytes that the run will write at its end, at least.
        needed: u64,
        /// Bytes of the file that offloading uses, if it is on that disk.
        offloaded: u64,
        /// Bytes that the file system has left.
        free: u64,
    },
    /// A model that cannot be used.
    #[error(transparent)]
    Pretrained(#[from] PretrainedError),
    /// A tokenizer whose files cannot be passed on.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Data that cannot be used.
    #[error(transparent)]
    Data(#[from] PrepareError),
    /// A run that cannot be resumed.
    #[error(transparent)]
    Resume(#[from] ResumeError),
    /// The tensors of a file.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A tensor that cannot be filled.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A checkpoint that cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] StateError),
    /// A loss that is no number.
    #[error("the loss is {loss}: the model's weights are damaged, or they were trained until they diverged")]
    Loss {
        /// What it is.
        loss: f64,
    },
    /// Generation broke off.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// Windows with gaps between them.
    #[error("--stride is {stride}: must be at most --seq {seq}")]
    Stride {
        /// As given.
        stride: u64,
        /// As given.
        seq: u64,
    },
    /// Nothing to go on from.
    #[error("the prompt has no token: pass some text to --prompt, or a message to --chat")]
    EmptyPrompt,
    /// A message for a model without a chat template.
    #[error("{} has no chat template: pass the text to go on from to --prompt", model.display())]
    NoTemplate {
        /// The model.
        model: PathBuf,
    },
    /// A model that cannot be quantised.
    #[error(transparent)]
    Quantize(#[from] QuantizeError),
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

fn and_offloaded(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        bytes => format!(" and offloading {}", format_bytes(bytes)),
    }
}

/// A line for each.
fn helping(alternatives: &[Alternative]) -> String {
    let mut text = String::new();
    if !alternatives.is_empty() {
        text.push_str("\nwhat would help:");
    }
    for Alternative {
        flags,
        needed_bytes,
        fits,
    } in alternatives
    {
        let fits = if *fits { ", which fits" } else { "" };
        text.push_str(&format!("\n  {flags}: needs {}{fits}", format_bytes(*needed_bytes)));
    }
    text
}

impl Failure {
    /// See `tightfit --help`.
    pub fn exit_code(&self) -> u8 {
        match self {
            Failure::Settings(_)
            | Failure::EmptyPrompt
            | Failure::NoSuchDevice { .. }
            | Failure::NoSuchModel { .. }
            | Failure::Flag { .. }
            | Failure::NoTemplate { .. }
            | Failure::OutHoldsModel { .. }
            | Failure::AdapterOfNothing
            | Failure::Merged { .. }
            | Failure::Foreign { .. }
            | Failure::Stride { .. }
            | Failure::Resume(ResumeError::Flag { .. })
            | Failure::Job(JobError::Model(_) | JobError::NotQuantised)
            | Failure::Quantize(
                QuantizeError::Target { .. }
                | QuantizeError::Nothing
                | QuantizeError::Occupied { .. }
                | QuantizeError::Foreign { .. },
            )
            | Failure::Occupied { .. } => 2,
            Failure::Scratch(error) | Failure::Session(SessionError::Tier(TierError::Scratch(error))) => match error {
                ScratchError::Space { .. } => DOES_NOT_FIT,
                ScratchError::Folder { .. } | ScratchError::InMemory { .. } => 2,
            },
            Failure::Infeasible(_)
            | Failure::DoesNotFit { .. }
            | Failure::Disk { .. }
            | Failure::Job(JobError::Plan(PlanError::TooLarge | PlanError::Place { .. })) => DOES_NOT_FIT,
            Failure::Quantize(QuantizeError::Stopped) => STOPPED,
            Failure::Data(PrepareError::Keep { .. }) => 1,
            Failure::Train(TrainError::Run(RunError::Driver(error))) if error.is::<TextError>() => 4,
            Failure::PlanFile { .. }
            | Failure::Pretrained(_)
            | Failure::Tokenizer(_)
            | Failure::Data(_)
            | Failure::Resume(ResumeError::NoRun { .. } | ResumeError::State(_) | ResumeError::Settings(_))
            | Failure::Load(_)
            | Failure::Quantize(
                QuantizeError::Model(_)
                | QuantizeError::Already { .. }
                | QuantizeError::Layout { .. }
                | QuantizeError::Load(_),
            )
            | Failure::Loss { .. }
            | Failure::Generate(GenerateError::Logits)
            | Failure::Train(TrainError::Text(_))
            | Failure::Checkpoint(_) => 4,
            _ => 1,
        }
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        Failure::Job(JobError::File(error))
    }
}

/// How to get the configuration of a model of the hub.
fn fetch(name: &str) -> String {
    match is_id(name) {
        true => {
            format!(", nor is it in the Hugging Face cache: `hf download {name} config.json` fetches what is needed")
        }
        false => String::new(),
    }
}
