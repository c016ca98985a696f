//! What can be wrong with a tokenizer, and where.

use crate::guard;
use std::path::PathBuf;

/// Why a tokenizer cannot be read or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file could not be read.
    #[error("{}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A directory, a pipe, a device.
    #[error("{}: is {kind}, not a regular file", path.display())]
    NotAFile {
        /// What was named.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// A file is larger than any tokenizer's.
    #[error("{place}: {bytes} bytes, but a file of this kind has at most {limit}")]
    TooLarge {
        /// The file.
        place: String,
        /// Its size.
        bytes: u64,
        /// The largest that is read.
        limit: u64,
    },
    /// A file or a GGUF key holds something else than it should.
    #[error("{place}: {why}")]
    Invalid {
        /// The file or the key.
        place: String,
        /// What is wrong there.
        why: String,
    },
    /// GGUF metadata have a value of the wrong kind.
    #[error(transparent)]
    Metadata(#[from] tightfit_format::FormatError),
    /// GGUF metadata name a pre-tokenizer that this version does not know.
    #[error(
        "tokenizer.ggml.pre: the pre-tokenizer `{name}` is not known (known: {known}); a folder with tokenizer.json would do"
    )]
    UnknownPreTokenizer {
        /// The name in the file.
        name: String,
        /// The names that are known.
        known: String,
    },
    /// A text could not be encoded.
    #[error("encoding a text: {0}")]
    Encode(String),
    /// Tokens could not be decoded.
    #[error("decoding tokens: {0}")]
    Decode(String),
}

impl TokenizerError {
    pub(super) fn invalid(place: impl Into<String>, why: impl ToString) -> Self {
        let (place, why) = (place.into(), why.to_string());
        Self::Invalid { place, why }
    }
}

/// Calls into the `tokenizers` crate, whose panics (it has some, on files made to provoke them) become errors.
///
/// Nothing that such a call leaves half done is used again: what it built is dropped, and encoding and decoding change no state
/// but a cache of whole entries. That is why asserting unwind safety is right.
pub(super) fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match guard::guarded(call) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(panic) => Err(format!("the tokenizer gave up: {}", guard::panic_message(&*panic))),
    }
}
