//! Data files, and places in them.

use std::{
    fs::File,
    io::{self, Read, Take},
    path::Path,
};

use super::{encoder::EncodeError, error::DataError, text::TextError};

/// What a file holds.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// One document.
    Text,
    /// JSON, a sample per line.
    Lines,
}

/// A data file, known to be there and to be one.
pub(super) struct DataFile<'a> {
    path: &'a Path,
    pub(super) kind: Kind,
    /// Its size when it was looked at.
    pub(super) bytes: u64,
}

impl<'a> DataFile<'a> {
    pub(super) fn open(path: &'a Path) -> Result<Self, DataError> {
        let owned = || path.to_owned();
        // Asked before it is opened: opening a pipe waits for a writer.
        let metadata = path
            .metadata()
            .map_err(|source| DataError::Open { path: owned(), source })?;
        if !metadata.is_file() {
            return Err(DataError::NotAFile { path: owned() });
        }
        let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
        let kind = match extension.as_deref().and_then(|extension| extension.to_str()) {
            Some("jsonl") => Kind::Lines,
            Some("txt" | "text" | "md") => Kind::Text,
            _ => return Err(DataError::Extension { path: owned() }),
        };
        Ok(Self {
            path,
            kind,
            bytes: metadata.len(),
        })
    }

    /// The file, up to the size that it had when it was looked at: one that grows while it is read would never end.
    pub(super) fn file(&self) -> Result<Take<File>, DataError> {
        let file = File::open(self.path).map_err(|source| DataError::Open {
            path: self.path.to_owned(),
            source,
        })?;
        Ok(file.take(self.bytes))
    }

    /// Ends the reading of a file, of which there were `read` bytes; returns these.
    pub(super) fn end(&self, read: u64) -> Result<u64, DataError> {
        if read < self.bytes {
            return Err(DataError::Changed {
                path: self.path.to_owned(),
                bytes: self.bytes,
                read,
            });
        }
        Ok(read)
    }

    pub(super) fn read_error(&self, source: io::Error) -> DataError {
        DataError::Read {
            path: self.path.to_owned(),
            source,
        }
    }

    pub(super) fn text_error(&self, error: TextError) -> DataError {
        match error {
            TextError::Read(source) => self.read_error(source),
            TextError::NotText { line, offset, reason } => DataError::Text {
                path: self.path.to_owned(),
                line,
                offset,
                reason,
            },
        }
    }

    pub(super) fn at(&self, line: u64) -> Place<'a> {
        Place { path: self.path, line }
    }
}

/// Where a sample came from.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) path: &'a Path,
    /// From 1.
    pub(super) line: u64,
}

impl Place<'_> {
    pub(super) fn encode_error(self, source: EncodeError) -> DataError {
        DataError::Encode {
            path: self.path.to_owned(),
            line: self.line,
            source,
        }
    }
}
