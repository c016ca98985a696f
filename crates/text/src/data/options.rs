//! What is asked for and what came of it.

use std::fs::File;

use serde::{Deserialize, Serialize};

/// What becomes of a sample with more tokens than a row holds. A text file is one document and is always split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Long {
    /// It is cut into pieces; each but the first begins with the last token of the one before, so every token is learned once.
    Split,
    /// It is left out.
    Drop,
}

/// How to prepare data.
#[derive(Clone, Debug)]
pub struct Options {
    /// Tokens per row.
    pub seq: usize,
    /// Token ids of the model are below this; at most [`MAX_VOCAB_SIZE`](super::MAX_VOCAB_SIZE).
    pub vocab_size: usize,
    /// What becomes of long samples.
    pub long: Long,
    /// Where set, pieces of a split sample start every `stride` tokens, and a token counts in the first piece that has it:
    /// perplexity in which each token but the first ones sees at least `seq - stride` tokens before it. Unset, it is `seq`.
    pub stride: Option<usize>,
    /// Pass over malformed lines of JSON and count them, instead of ending with an error.
    pub skip_bad_lines: bool,
    /// The share held out for evaluation, in `0..1`: of the lines of a `.jsonl` file, of the pieces of a text file.
    pub eval_fraction: f64,
    /// Whether documents of text end with the tokenizer's end of sequence, to be learned like any token. The perplexity of a text
    /// is without it; completions end with it in any case.
    pub end_documents: bool,
    /// Decides what is held out.
    pub seed: u64,
}

/// The files that rows are written to, opened for reading and writing; what is in them is lost. They may have no name any more.
#[derive(Clone, Copy, Debug)]
pub struct TokenFiles<'a> {
    /// Rows to train on.
    pub train: &'a File,
    /// Rows held out.
    pub eval: &'a File,
}

/// How far [`prepare`](super::prepare) is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes read, of all files together.
    pub bytes: u64,
    /// Bytes of all files together, when they were first looked at.
    pub total_bytes: u64,
    /// Tokens made of them.
    pub tokens: u64,
}

/// What was found and what became of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Text files that were not empty, and lines of JSON that were not bad.
    pub samples: u64,
    /// Tokens of all samples, those left out included.
    pub tokens: u64,
    /// Tokens in rows that are learned or evaluated: the loss is a mean over these.
    pub targets: u64,
    /// Pieces that were put in rows; a sample that is not split is one.
    pub pieces: u64,
    /// Samples cut into several pieces; not text files, which always are.
    pub split: u64,
    /// Samples left out because they are longer than a row ([`Long::Drop`]).
    pub dropped: u64,
    /// Pieces left out because no token of theirs counts, such as the first half of a long prompt.
    pub uncounted_pieces: u64,
    /// Entries of rows that hold no token.
    pub padding: u64,
    /// Malformed lines passed over.
    pub bad_lines: u64,
    /// What was wrong with the first few of them, each with its place.
    pub first_bad: Vec<String>,
}

/// Token files, ready to be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// Rows to train on; at least one.
    pub train_rows: u64,
    /// Rows held out. At least one if a share was asked for and there are two rows or more.
    pub eval_rows: u64,
    /// What was found and what became of it.
    pub counts: Counts,
    /// SHA-256 of all rows in hexadecimal: equal for equal rows, and so for equal files, options and tokenizers.
    pub fingerprint: String,
}
