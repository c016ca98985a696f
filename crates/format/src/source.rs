//! A reader that knows where it is and how much is left.

use std::{io::Read, path::Path};

use crate::{FormatError, Problem};

/// A reader that knows where it is and how much is left, so that no count is believed before the bytes for it are known to exist.
pub(crate) struct Source<'a, R> {
    reader: R,
    path: &'a Path,
    position: u64,
    len: u64,
    /// What is being read, for errors.
    place: String,
}

impl<'a, R: Read> Source<'a, R> {
    /// `len`: bytes that the reader has.
    pub fn new(reader: R, len: u64, path: &'a Path) -> Self {
        Source {
            reader,
            path,
            position: 0,
            len,
            place: "header".into(),
        }
    }

    pub fn path(&self) -> &'a Path {
        self.path
    }

    pub fn position(&self) -> u64 {
        self.position
    }

    pub fn left(&self) -> u64 {
        self.len - self.position
    }

    /// Says what is read next.
    pub fn at(&mut self, place: impl Into<String>) {
        self.place = place.into();
    }

    /// An error at the place that is being read.
    pub fn error(&self, problem: Problem) -> FormatError {
        FormatError::corrupt(self.path, format!("{} (byte {})", self.place, self.position), problem)
    }

    /// Checks that `count` items of at least `min_bytes` each can still follow.
    pub fn check_count(&self, count: u64, items: &'static str, min_bytes: u64) -> Result<usize, FormatError> {
        let left = self.left();
        match usize::try_from(count) {
            Ok(n) if count <= left / min_bytes => Ok(n),
            _ => Err(self.error(Problem::Count { count, items, left })),
        }
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let mut bytes = [0; N];
        self.check_left(N as u64)?;
        self.reader
            .read_exact(&mut bytes)
            .map_err(|e| self.read_error(N as u64, e))?;
        self.position += N as u64;
        Ok(bytes)
    }

    pub fn u32(&mut self) -> Result<u32, FormatError> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, FormatError> {
        self.array().map(u64::from_le_bytes)
    }

    /// The next `count` bytes, in a vector of just that size.
    pub fn bytes(&mut self, count: u64) -> Result<Vec<u8>, FormatError> {
        self.check_left(count)?;
        let size = self.check_count(count, "bytes", 1)?;
        let mut bytes = vec![0; size];
        self.reader
            .read_exact(&mut bytes)
            .map_err(|e| self.read_error(count, e))?;
        self.position += count;
        Ok(bytes)
    }

    fn check_left(&self, needed: u64) -> Result<(), FormatError> {
        let left = self.left();
        if needed <= left {
            Ok(())
        } else {
            Err(self.error(Problem::Truncated { needed, left }))
        }
    }

    fn read_error(&self, needed: u64, error: std::io::Error) -> FormatError {
        match error.kind() {
            // The file became shorter than the length that we were given.
            std::io::ErrorKind::UnexpectedEof => self.error(Problem::Truncated { needed, left: 0 }),
            _ => FormatError::io(self.path, error),
        }
    }
}
