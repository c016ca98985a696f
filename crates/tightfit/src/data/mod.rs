//! What a run trains on: text from a seeded source whose entropy is known exactly, or files as rows of tokens.
//!
//! Either is a numbered sequence of batches, each a function of the seed and its number, so that a resumed run sees the same data
//! without saving any state.

use std::path::Path;

mod batch;
mod encode;
mod prepared;
mod report;
mod source;

pub use batch::{BatchError, Batches, Split};
pub use encode::TextEncoder;
pub use prepared::{PrepareError, PreparedText, RowFiles, prepare_rows};
pub use report::{DataReport, many};
pub use source::{Language, TextSource, VOCAB_SIZE};
pub use tightfit_text::data::BatchBuffers;
use tightfit_text::data::{Counts, Options, RowsError};
use tightfit_text::tokenizer::Tokenizer;

use crate::checkpoints::RowsState;
use crate::console::Transfer;
use crate::settings::Settings;

/// Why a batch cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// Of generated text.
    #[error(transparent)]
    Generated(#[from] BatchError),
    /// Of files.
    #[error(transparent)]
    Rows(#[from] RowsError),
}

/// The text of a run.
#[derive(Debug)]
pub enum Text {
    /// From the seeded source.
    Generated {
        /// To train on.
        train: Box<Batches>,
        /// To evaluate on.
        eval: Box<Batches>,
    },
    /// From files.
    Prepared(Box<PreparedText>),
}

impl Text {
    /// Generated text in the batches of `settings`.
    ///
    /// # Errors
    /// Sizes that cannot be indexed.
    pub fn generated(settings: &Settings) -> Result<Self, TextError> {
        let batches = |split, batch: u64| Batches::new(settings.seed, split, batch as usize, settings.seq as usize);
        let train = batches(Split::Train, settings.micro_batch_rows())?;
        let eval = batches(Split::Eval, settings.eval_batch_rows())?.first(settings.eval_rows());
        Ok(Text::Generated {
            train: Box::new(train),
            eval: Box::new(eval),
        })
    }

    /// The files of `settings`, made into rows in `dir` (or in files without a name) by a model's tokenizer.
    ///
    /// # Errors
    /// A file cannot be read, or has in it what cannot be used.
    pub fn prepare(
        settings: &Settings,
        tokenizer: &Tokenizer,
        vocab_size: u64,
        dir: Option<&Path>,
    ) -> Result<Self, PrepareError> {
        let options = Options {
            seq: settings.seq as usize,
            vocab_size: vocab_size as usize,
            long: settings.long,
            stride: None,
            skip_bad_lines: settings.skip_bad_lines,
            eval_fraction: settings.eval_fraction,
            end_documents: true,
            seed: settings.seed,
        };
        let transfer = Transfer::new("reading data", 0);
        let (rows, prepared) = prepare_rows(&settings.data, tokenizer, &options, dir, &mut |progress| {
            transfer.set(progress.bytes, progress.total_bytes);
        })?;
        transfer.finish();
        Ok(Self::rows(settings, rows, prepared.fingerprint, Some(prepared.counts))?)
    }

    /// The rows that the resumed run has had; `None` where they are gone or not whole.
    pub fn reopen(settings: &Settings, dir: &Path, state: &RowsState) -> Option<Self> {
        let rows = RowFiles::existing(dir).ok()??;
        let text = Self::rows(settings, rows, state.fingerprint.clone(), None).ok()?;
        match &text {
            Text::Prepared(rows) if rows.state() == *state && rows.seq() as u64 == settings.seq => Some(text),
            _ => None,
        }
    }

    fn rows(
        settings: &Settings,
        rows: RowFiles,
        fingerprint: String,
        counts: Option<Counts>,
    ) -> Result<Self, RowsError> {
        let text = PreparedText::new(rows, settings, fingerprint, counts)?;
        Ok(Text::Prepared(Box::new(text)))
    }

    /// Which rows these are, where they come from files.
    pub fn state(&self) -> Option<RowsState> {
        match self {
            Text::Generated { .. } => None,
            Text::Prepared(text) => Some(text.state()),
        }
    }

    /// Writes batch `index` of a split; its tokens that have a target. Allocates nothing.
    ///
    /// # Errors
    /// The file is no longer what it was.
    pub fn fill(&self, split: Split, index: u64, buffers: &mut BatchBuffers<'_>) -> Result<usize, TextError> {
        match self {
            Text::Generated { train, eval } => match split {
                Split::Train => Ok(train.fill(index, buffers)?),
                Split::Eval => Ok(eval.fill(index, buffers)?),
            },
            Text::Prepared(text) => Ok(text.batches(split).fill(index, buffers)?),
        }
    }

    /// Tokens of batch `index` that have a target, without writing it.
    ///
    /// # Errors
    /// As [`fill`](Self::fill).
    pub fn counted(&self, split: Split, index: u64) -> Result<usize, TextError> {
        match self {
            Text::Generated { train, eval } => match split {
                Split::Train => Ok(train.counted(index)),
                Split::Eval => Ok(eval.counted(index)),
            },
            Text::Prepared(text) => Ok(text.batches(split).counted(index)?),
        }
    }

    /// Batches of an evaluation; 0 where nothing is held out.
    pub fn held_out(&self) -> u64 {
        match self {
            Text::Generated { eval, .. } => eval.held_out(),
            Text::Prepared(text) => text.held_out(),
        }
    }

    /// What the files came to.
    pub fn report(&self) -> Option<DataReport> {
        match self {
            Text::Generated { .. } => None,
            Text::Prepared(text) => Some(text.report()),
        }
    }

    /// Batches that hold every training row once; generated text has no end.
    pub fn batches_per_epoch(&self) -> Option<u64> {
        match self {
            Text::Generated { .. } => None,
            Text::Prepared(text) => Some(text.batches_per_epoch()),
        }
    }
}
