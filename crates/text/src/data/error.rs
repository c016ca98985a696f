//! What can be wrong with data, and where.

use std::{io, path::PathBuf};

use super::encoder::EncodeError;

/// Why data could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A setting out of its range.
    #[error("{name}: {reason}")]
    Option {
        /// The field of [`Options`](super::Options).
        name: &'static str,
        /// What it may be.
        reason: String,
    },
    /// A file that cannot be opened.
    #[error("cannot open {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A folder, a pipe, a device.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// What was named.
        path: PathBuf,
    },
    /// A file name that does not say what is in the file.
    #[error("{}: what is in this file? known are .jsonl (one JSON object per line) and .txt, .text, .md (one document)", path.display())]
    Extension {
        /// The file.
        path: PathBuf,
    },
    /// A file that cannot be read to its end.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file that got shorter.
    #[error("{} changed while it was read: it had {bytes} bytes, but ended after {read}", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Its size before.
        bytes: u64,
        /// Bytes read.
        read: u64,
    },
    /// A text file that is not text.
    #[error("{}:{line}: {reason} at byte {offset} of the file", path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// Byte of the file, from 0.
        offset: u64,
        /// What is there.
        reason: &'static str,
    },
    /// A line that is not a sample.
    #[error("{}:{line}{}: {reason}", path.display(), column.map(|column| format!(":{column}")).unwrap_or_default())]
    Line {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: u64,
        /// Byte of the line, from 1, where the fault has one place.
        column: Option<usize>,
        /// What is wrong.
        reason: String,
    },
    /// The tokenizer failed.
    #[error("{}:{line}: {source}", path.display())]
    Encode {
        /// The file.
        path: PathBuf,
        /// Line, from 1, at which the text begins.
        line: u64,
        /// What it says.
        source: EncodeError,
    },
    /// The tokenizer and the model do not belong together.
    #[error("{}:{line}: the tokenizer made token {token}, but the model's vocabulary has {vocab_size}", path.display())]
    Token {
        /// The file.
        path: PathBuf,
        /// Line, from 1, at which the text begins.
        line: u64,
        /// The token.
        token: u32,
        /// Tokens the model has.
        vocab_size: usize,
    },
    /// A token file that cannot be written.
    #[error("cannot write the token file: {source}")]
    Write {
        /// Why.
        source: io::Error,
    },
    /// Nothing to train on.
    #[error("nothing to train on: {reason}")]
    NoRows {
        /// Why, and what to do.
        reason: String,
    },
    /// The caller asked to stop.
    #[error("stopped while preparing data")]
    Stopped,
}

/// Why a token file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum RowsError {
    /// Not a token file, or one that was not finished.
    #[error("{}: not a token file: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Read failed, or the file ended before it should.
    #[error("cannot read row {row} of token file {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Row, from 0.
        row: u64,
        /// Why.
        source: io::Error,
    },
    /// Bytes that were not written there.
    #[error("row {row} of token file {} is damaged: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Row, from 0.
        row: u64,
        /// What is wrong.
        reason: &'static str,
    },
    /// No rows, no tokens, or too many to index with an `i32`.
    #[error("no batches of {micro_batch} rows x {seq} tokens from {rows} rows of {}: a batch has 1 to 2147483647 tokens", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// Rows of a micro-batch.
        micro_batch: usize,
        /// Tokens of a row.
        seq: usize,
        /// Rows of the file.
        rows: u64,
    },
    /// A buffer does not have `micro_batch · seq` elements.
    #[error("buffer `{buffer}` has {actual} elements, but the batch has {expected} tokens")]
    Length {
        /// The buffer's name.
        buffer: &'static str,
        /// `micro_batch · seq`.
        expected: usize,
        /// The length it has.
        actual: usize,
    },
}
