//! Files as rows of tokens, on disk while a run lasts.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use tightfit_exec::checkpoint::partial;
use tightfit_text::chat::{ChatError, ChatTemplate};
use tightfit_text::data::{
    Batches, Counts, DataError, Options, Prepared, Progress, Rows, RowsError, TokenFiles, prepare,
};
use tightfit_text::tokenizer::Tokenizer;

use super::{DataReport, Split, TextEncoder};
use crate::checkpoints::RowsState;
use crate::settings::Settings;

/// The files that hold a run's rows.
#[derive(Debug)]
pub struct RowFiles {
    /// Rows to train on.
    pub train: File,
    /// Rows held out.
    pub eval: File,
    /// What errors call them.
    path: PathBuf,
}

impl RowFiles {
    /// New files in `dir`, which [`keep`](Self::keep) gives their names, or without a name in the system's folder for temporary
    /// files.
    ///
    /// # Errors
    /// They cannot be made.
    pub fn create(dir: Option<&Path>) -> io::Result<Self> {
        match dir {
            Some(dir) => {
                let new = |split| {
                    let path = partial(&Self::path(dir, split));
                    Self::open(OpenOptions::new().create(true).truncate(true), &path)
                };
                Ok(Self {
                    train: new(Split::Train)?,
                    eval: new(Split::Eval)?,
                    path: dir.to_owned(),
                })
            }
            None => {
                let dir = std::env::temp_dir();
                Ok(Self {
                    train: unnamed(&dir)?,
                    eval: unnamed(&dir)?,
                    path: dir,
                })
            }
        }
    }

    /// The files that an earlier part of the run has made; `None` where they are gone.
    ///
    /// # Errors
    /// They cannot be opened.
    pub fn existing(dir: &Path) -> io::Result<Option<Self>> {
        let open = |split| match Self::open(&mut OpenOptions::new(), &Self::path(dir, split)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            other => other.map(Some),
        };
        let (Some(train), Some(eval)) = (open(Split::Train)?, open(Split::Eval)?) else {
            return Ok(None);
        };
        let path = dir.to_owned();
        Ok(Some(Self { train, eval, path }))
    }

    /// To write rows to.
    pub fn to_write(&self) -> TokenFiles<'_> {
        TokenFiles {
            train: &self.train,
            eval: &self.eval,
        }
    }

    /// Gives new files in `dir` their names; those that have them already keep them.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn keep(dir: &Path) -> io::Result<()> {
        for split in [Split::Train, Split::Eval] {
            let path = Self::path(dir, split);
            match fs::rename(partial(&path), &path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.train.sync_all()?;
        self.eval.sync_all()
    }

    /// Removes the files of a run that is done.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn remove(dir: &Path) -> io::Result<()> {
        for split in [Split::Train, Split::Eval] {
            match fs::remove_file(Self::path(dir, split)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Where a run in `dir` keeps its rows.
    pub fn path(dir: &Path, split: Split) -> PathBuf {
        dir.join(match split {
            Split::Train => "train.rows",
            Split::Eval => "eval.rows",
        })
    }

    fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
        options.read(true).write(true).open(path)
    }
}

/// A file that is gone when it is closed.
fn unnamed(dir: &Path) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags};
    let mode = Mode::RUSR | Mode::WUSR;
    match rustix::fs::open(dir, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode) {
        Ok(file) => Ok(file.into()),
        // Some file systems make no unnamed files: a name that nobody else has, gone at once.
        Err(_) => {
            let path = dir.join(format!("tightfit-{}.rows", std::process::id()));
            let file = OpenOptions::new().create_new(true).read(true).write(true).open(&path)?;
            fs::remove_file(&path)?;
            Ok(file)
        }
    }
}

/// Why files cannot be trained on.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// What is in them.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The rows made of them.
    #[error(transparent)]
    Rows(#[from] RowsError),
    /// No place for rows.
    #[error("cannot keep the data as rows of tokens in {}: {source}", path.display())]
    Keep {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Rows of a run that is resumed, which cannot be made again.
    #[error(
        "the data is not what the run was made of: its rows are gone, and {} would make others",
        files(data)
    )]
    Changed {
        /// The files.
        data: Vec<PathBuf>,
    },
    /// The model's chat template.
    #[error(transparent)]
    Template(#[from] ChatError),
}

fn files(paths: &[PathBuf]) -> String {
    let names: Vec<_> = paths.iter().map(|path| path.display().to_string()).collect();
    names.join(", ")
}

/// Makes rows of data files, as `options` say, in `dir` or in files without a name.
///
/// # Errors
/// A file cannot be read, or has in it what cannot be used.
pub fn prepare_rows(
    files: &[PathBuf],
    tokenizer: &Tokenizer,
    options: &Options,
    dir: Option<&Path>,
    progress: &mut dyn FnMut(Progress),
) -> Result<(RowFiles, Prepared), PrepareError> {
    let template = ChatTemplate::of(tokenizer)?;
    let encoder = TextEncoder {
        tokenizer,
        template: template.as_ref(),
    };
    let keep = |source| PrepareError::Keep {
        path: dir.map_or_else(std::env::temp_dir, Path::to_owned),
        source,
    };
    let rows = RowFiles::create(dir).map_err(keep)?;
    // A signal ends the process at once here: nothing is lost.
    let stop = AtomicBool::new(false);
    let prepared = prepare(files, &encoder, options, rows.to_write(), progress, &stop)?;
    if dir.is_some() {
        // A run that is resumed relies on them.
        rows.sync().map_err(keep)?;
    }
    Ok((rows, prepared))
}

/// Rows, shuffled to train on and in order to evaluate on.
#[derive(Debug)]
pub struct PreparedText {
    train: Batches,
    eval: Option<Batches>,
    counts: Option<Counts>,
    fingerprint: String,
}

impl PreparedText {
    /// The batches of `settings`. `counts` is what was found when the rows were made, if they were made now.
    ///
    /// # Errors
    /// The files hold no rows, or a batch would be too large.
    pub fn new(
        files: RowFiles,
        settings: &Settings,
        fingerprint: String,
        counts: Option<Counts>,
    ) -> Result<Self, RowsError> {
        let path = |split| RowFiles::path(&files.path, split);
        let train = Rows::open(files.train, &path(Split::Train))?;
        let eval = Rows::open(files.eval, &path(Split::Eval))?;
        Ok(Self {
            train: Batches::shuffled(train, settings.micro_batch_rows() as usize, settings.seed)?,
            eval: (eval.rows() > 0)
                .then(|| Batches::first(eval, settings.eval_rows(), settings.eval_batch_rows() as usize))
                .transpose()?,
            counts,
            fingerprint,
        })
    }

    /// Tokens of a row.
    pub fn seq(&self) -> usize {
        self.train.rows().seq()
    }

    /// Which rows these are.
    pub fn state(&self) -> RowsState {
        RowsState {
            train_rows: self.train.rows().rows(),
            eval_rows: self.eval.as_ref().map_or(0, |eval| eval.rows().rows()),
            fingerprint: self.fingerprint.clone(),
        }
    }

    /// The batches of a split. Held-out ones are asked for only as far as [`held_out`](Self::held_out) goes, so the training rows
    /// never stand in for them.
    pub(super) fn batches(&self, split: Split) -> &Batches {
        match split {
            Split::Train => &self.train,
            Split::Eval => self.eval.as_ref().unwrap_or(&self.train),
        }
    }

    pub(super) fn held_out(&self) -> u64 {
        self.eval.as_ref().map_or(0, Batches::per_epoch)
    }

    pub(super) fn batches_per_epoch(&self) -> u64 {
        self.train.per_epoch()
    }

    pub(super) fn report(&self) -> DataReport {
        let RowsState {
            train_rows, eval_rows, ..
        } = self.state();
        DataReport {
            train_rows,
            eval_rows,
            counts: self.counts.clone(),
        }
    }
}
