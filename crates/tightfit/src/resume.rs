//! A run that goes on where it was left.

use std::path::{Path, PathBuf};

use tightfit_exec::load::{self, Fill, LoadError};
use tightfit_format::Checkpoint;

use crate::checkpoints::{self, OPTIMIZER, State, StateError};
use crate::console::Transfer;
use crate::output::CONFIG;
use crate::settings::{AskedMethod, Request, SettingsError};
use crate::{Role, Session};

/// Why a run cannot be resumed.
#[derive(Debug, thiserror::Error)]
pub enum ResumeError {
    /// No run was ever begun there.
    #[error("{} holds no run: it has no {CONFIG}; --resume takes the --out folder of a run", dir.display())]
    NoRun {
        /// The folder.
        dir: PathBuf,
    },
    /// Its settings.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Its last checkpoint.
    #[error(transparent)]
    State(#[from] StateError),
    /// A flag that would make it another run.
    #[error("--{} cannot change in a run that is resumed: its settings are in {}; a new run can start from --{kind} {}", flag.replace('_', "-"), config.display(), trained.display())]
    Flag {
        /// The flag.
        flag: String,
        /// The run's settings.
        config: PathBuf,
        /// What it trains: `model` or `adapter`.
        kind: &'static str,
        /// What a new run can start from.
        trained: PathBuf,
    },
}

/// Reads the optimizer's state of a checkpoint into a session.
///
/// # Errors
/// The file is missing, damaged, or of another model.
pub fn restore_optimizer(session: &mut Session, checkpoint: &Path) -> Result<(), LoadError> {
    let file = Checkpoint::open(&checkpoint.join(OPTIMIZER))?;
    let names = session.persistent_names(Role::OptimizerState);
    let fills = names.into_iter().map(|weight| {
        Ok(Fill {
            entry: file.tensor(&weight)?,
            weight,
            interleaved_heads: None,
        })
    });
    let fills = fills.collect::<Result<Vec<_>, LoadError>>()?;
    let transfer = Transfer::new(
        "reading the optimizer's state",
        fills.iter().map(|fill| fill.entry.bytes()).sum(),
    );
    load::load(session, &file, &fills, |bytes| transfer.add(bytes))?;
    transfer.finish();
    Ok(())
}

/// Flags that may differ: no bit of the result depends on them.
const FREE: [&str; 10] = [
    "budget",
    "threads",
    "keep",
    "save_every",
    "recompute",
    "offload",
    "update_in_backward",
    "disk",
    "host_memory",
    "scratch",
];

/// An output folder of an earlier run.
#[derive(Debug)]
pub struct Resumed {
    /// The folder.
    pub dir: PathBuf,
    /// Where the run stands; `None` before its first checkpoint.
    pub state: Option<State>,
    request: Request,
}

impl Resumed {
    /// Looks at the folder.
    ///
    /// # Errors
    /// It holds no run, or one that cannot be read.
    pub fn open(dir: &Path) -> Result<Self, ResumeError> {
        let config = dir.join(CONFIG);
        if !config.exists() {
            return Err(ResumeError::NoRun { dir: dir.to_owned() });
        }
        let request = Request::read(&config)?;
        let last = checkpoints::steps(dir)?.pop();
        let state = last.map(|step| State::read(dir, step)).transpose()?;
        Ok(Self {
            dir: dir.to_owned(),
            state,
            request,
        })
    }

    /// The folder of the last checkpoint.
    pub fn checkpoint(&self) -> Option<PathBuf> {
        let state = self.state.as_ref()?;
        Some(checkpoints::folder(&self.dir, state.step))
    }

    /// The run's settings, with what may differ taken from `flags`.
    ///
    /// # Errors
    /// A flag that would make it another run.
    pub fn request(&self, flags: Request) -> Result<Request, ResumeError> {
        let changed = flags.given().find(|name| !FREE.contains(name));
        if let Some(flag) = changed {
            return Err(ResumeError::Flag {
                flag: flag.to_owned(),
                config: self.dir.join(CONFIG),
                kind: match self.request.method.is_some_and(AskedMethod::may_have_adapters) {
                    true => "adapter",
                    false => "model",
                },
                trained: self.checkpoint().unwrap_or_else(|| self.dir.clone()),
            });
        }
        Ok(flags.or(self.request.clone()))
    }
}
