//! What can be wrong with a checkpoint.

use std::{
    io,
    path::{Path, PathBuf},
};

use crate::{Contents, Encoding};

/// A checkpoint that cannot be read, and where.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FormatError {
    /// The operating system said no.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// A directory where a file was meant, a FIFO, a socket, a device.
    #[error("{}: is {kind}, not a regular file", path.display())]
    NotAFile {
        /// What was to be opened.
        path: PathBuf,
        /// What it is.
        kind: &'static str,
    },
    /// A folder in which no checkpoint was found, or more than one.
    #[error("{}: {problem}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What it lacks, and what it has instead.
        problem: String,
    },
    /// A file of another format than its name says.
    #[error("{}: not {expected}: this seems to be {contents}", path.display())]
    Mistaken {
        /// The file.
        path: PathBuf,
        /// The format it should have.
        expected: &'static str,
        /// What its first bytes say.
        contents: Contents,
    },
    /// A file that breaks the rules of its format.
    #[error("{}: {place}: {problem}", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where in it: a key, a tensor, a byte offset.
        place: String,
        /// The rule.
        problem: Problem,
    },
    /// A metadata value of another type than asked for.
    #[error("{}: metadata key `{key}`: {expected} expected, {found} found", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The type asked for.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A tensor that the checkpoint does not have.
    #[error("{}: has no tensor {}", path.display(), quoted(tensor))]
    NoTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A tensor whose encoding is not one of floats, or not one that can be decoded yet.
    #[error("{}: tensor {}: {encoding} cannot be read as floats (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K can)",
        path.display(), quoted(tensor))]
    NotFloats {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its encoding.
        encoding: Encoding,
    },
    /// A file that became shorter after it was opened.
    #[error("{}: tensor {}: the file was cut short after it was opened (bytes {offset} to {end} are gone)",
        path.display(), quoted(tensor))]
    CutShort {
        /// The file.
        path: PathBuf,
        /// The tensor that was being read.
        tensor: String,
        /// First byte of the read, in the file.
        offset: u64,
        /// The byte after the last.
        end: u64,
    },
    /// A read outside a tensor. A mistake of the caller, not of the file.
    #[error(
        "tensor {}: bytes {offset} to {offset} + {len} are outside its {bytes}",
        quoted(tensor)
    )]
    Range {
        /// The tensor.
        tensor: String,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes that it has.
        bytes: u64,
    },
    /// Bytes and elements that do not belong together. A mistake of the caller, not of the file.
    #[error("{encoding}: {bytes} bytes are not the whole blocks of {elements} elements")]
    Blocks {
        /// The encoding to decode.
        encoding: Encoding,
        /// Bytes given.
        bytes: usize,
        /// Elements asked for.
        elements: usize,
    },
}

/// The rule that a file breaks.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The file is shorter than it says.
    #[error("the file ends too early: {needed} bytes are needed here, {left} are left")]
    Truncated {
        /// Bytes that should follow.
        needed: u64,
        /// Bytes that do.
        left: u64,
    },
    /// More items than the rest of the file could hold.
    #[error("{count} {items} cannot fit into the {left} bytes that are left")]
    Count {
        /// How many the file says there are.
        count: u64,
        /// Of what.
        items: &'static str,
        /// Bytes left.
        left: u64,
    },
    /// A format version that this reader does not read.
    #[error("GGUF version {0} is not supported (2 and 3 are)")]
    Version(u32),
    /// A GGUF file for big-endian machines.
    #[error("this is a big-endian GGUF file; only little-endian files are supported")]
    BigEndian,
    /// One file of several that only make sense together.
    #[error("this is one of {0} parts of a split GGUF file: join them with `llama-gguf-split --merge`")]
    Split(u64),
    /// Text that is not UTF-8.
    #[error("invalid UTF-8 in {0}")]
    Utf8(&'static str),
    /// Something of this name was there before.
    #[error("appears twice")]
    Duplicate,
    /// A type that the format does not have.
    #[error("unknown {what} {value}")]
    UnknownType {
        /// Of what.
        what: &'static str,
        /// As the file has it.
        value: String,
    },
    /// A value outside what the format allows.
    #[error("{what} is {value}; it must be {rule}")]
    Value {
        /// Which.
        what: &'static str,
        /// As the file has it.
        value: String,
        /// What is allowed.
        rule: String,
    },
    /// Arrays in arrays in arrays.
    #[error("arrays are nested more than {0} deep")]
    Depth(usize),
    /// A shape whose size is over 2^64.
    #[error("shape {0:?} overflows")]
    Overflow(Vec<u64>),
    /// Rows that are not whole blocks.
    #[error("shape {shape:?} is not made of whole blocks of {block} elements of {encoding}")]
    PartialBlock {
        /// The shape, outermost first.
        shape: Vec<u64>,
        /// The encoding.
        encoding: Encoding,
        /// Elements in its block.
        block: u64,
    },
    /// Offsets that do not enclose what shape and dtype need.
    #[error("{encoding} of shape {shape:?} needs {needed} bytes, its offsets enclose {found}")]
    Size {
        /// The shape, outermost first.
        shape: Vec<u64>,
        /// The encoding.
        encoding: Encoding,
        /// What shape and encoding need.
        needed: u64,
        /// What the offsets say.
        found: u64,
    },
    /// A tensor that is listed as quantised, but is not there.
    #[error("there is no such tensor")]
    NoSuchTensor,
    /// A tensor that is listed as quantised, but is not stored as bytes.
    #[error("a quantised tensor is U8 of one dimension; this one is {encoding} of shape {shape:?}")]
    NotBytes {
        /// The shape, outermost first.
        shape: Vec<u64>,
        /// The encoding.
        encoding: Encoding,
    },
    /// Data of two tensors on the same bytes.
    #[error("overlaps tensor {0}")]
    Overlap(String),
    /// Bytes that belong to no tensor, where the format allows none.
    #[error("{0} bytes before it belong to no tensor")]
    Gap(u64),
    /// Bytes after the last tensor, where the format allows none.
    #[error("{0} bytes after the last tensor belong to no tensor")]
    Trailing(u64),
    /// JSON that does not parse, or not as what it should be.
    #[error("{0}")]
    Json(serde_json::Error),
    /// A shard that could be any file of the machine.
    #[error("a shard must be a file name in the folder of the index, not {0}")]
    ShardName(String),
    /// A shard that is not there.
    #[error("shard {0} is missing")]
    NoShard(String),
    /// A tensor that is not where the index says.
    #[error("the index says that it is in {listed}, which does not have it")]
    NotInShard {
        /// The shard of the index.
        listed: String,
    },
    /// A tensor in two shards.
    #[error("is in both {0} and {1}")]
    TwoShards(String, String),
}

impl FormatError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        FormatError::Io {
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn corrupt(path: &Path, place: impl Into<String>, problem: Problem) -> Self {
        FormatError::Corrupt {
            path: path.to_owned(),
            place: place.into(),
            problem,
        }
    }
}

/// A name from a file, fit for one line of print: quoted, escaped, not longer than a name would be.
pub(crate) fn quoted(name: &str) -> String {
    const LONGEST: usize = 120;
    match name.char_indices().nth(LONGEST) {
        None => format!("`{}`", name.escape_debug()),
        Some((end, _)) => format!("`{}…` ({} bytes)", name[..end].escape_debug(), name.len()),
    }
}
