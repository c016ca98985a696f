//! Token files: fixed-size records behind a header, read at random.
//!
//! All numbers are little-endian. The header is the magic bytes, then `seq`, the number of rows and `vocab_size`, each a `u64`.
//! A record is `seq + 1` entries and the number of targets among them, each a `u32`. The header is written last, so a file that
//! was not finished has none.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::{
    entry::{MAX_VOCAB_SIZE, PADDING, START, TARGET, TOKEN},
    error::RowsError,
};

const MAGIC: &[u8; 8] = b"tfrows01";
const HEADER_BYTES: u64 = 32;
const ENTRY_BYTES: u64 = size_of::<u32>() as u64;

/// Bytes read at a time, onto the stack.
const READ_BYTES: usize = 8192;

/// Bytes of a record. No overflow: callers have checked that `seq` is an `i32`.
fn record_bytes(seq: usize) -> u64 {
    (seq as u64 + 2) * ENTRY_BYTES
}

/// A finished token file.
#[derive(Debug)]
pub struct Rows {
    file: File,
    path: PathBuf,
    seq: usize,
    rows: u64,
    vocab_size: u32,
}

impl Rows {
    /// Opens a token file that [`prepare`](super::prepare) has written; `path` is what errors call it.
    ///
    /// # Errors
    /// [`RowsError::Header`] if it is none, or shorter than it says.
    pub fn open(file: File, path: &Path) -> Result<Self, RowsError> {
        let fail = |reason: String| RowsError::Header {
            path: path.to_owned(),
            reason,
        };
        let mut header = [0; HEADER_BYTES as usize];
        file.read_exact_at(&mut header, 0)
            .map_err(|error| fail(error.to_string()))?;
        let (fields, _) = header.as_chunks::<8>();
        if &fields[0] != MAGIC {
            return Err(fail("it does not begin as one".into()));
        }
        let [seq, rows, vocab_size] = [1, 2, 3].map(|i| u64::from_le_bytes(fields[i]));
        if seq == 0 || seq > i32::MAX as u64 || vocab_size > MAX_VOCAB_SIZE as u64 {
            return Err(fail(format!("seq {seq}, vocab_size {vocab_size}")));
        }
        let seq = seq as usize;
        let expected = rows
            .checked_mul(record_bytes(seq))
            .and_then(|bytes| bytes.checked_add(HEADER_BYTES));
        let actual = file.metadata().map_err(|error| fail(error.to_string()))?.len();
        if expected.is_none_or(|expected| expected > actual) {
            return Err(fail(format!(
                "{rows} rows of {seq} tokens do not fit its {actual} bytes"
            )));
        }
        Ok(Self {
            file,
            path: path.to_owned(),
            seq,
            rows,
            vocab_size: vocab_size as u32,
        })
    }

    /// Tokens per row.
    pub fn seq(&self) -> usize {
        self.seq
    }

    /// Rows.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// What errors call the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The number of targets that `row` says it has.
    pub(super) fn targets(&self, row: u64) -> Result<usize, RowsError> {
        let mut bytes = [0; ENTRY_BYTES as usize];
        let offset = self.offset(row) + record_bytes(self.seq) - ENTRY_BYTES;
        self.read_at(row, &mut bytes, offset)?;
        let targets = u32::from_le_bytes(bytes) as usize;
        if targets > self.seq {
            return Err(self.damaged(row, "it says that it has more targets than tokens"));
        }
        Ok(targets)
    }

    /// Hands the entries of `row` to `push`, in order, and returns the number of targets that it says it has. Every token is
    /// one of the vocabulary, the first entry starts a document, and what starts a document is no target.
    pub(super) fn read(&self, row: u64, mut push: impl FnMut(u32)) -> Result<usize, RowsError> {
        let mut buffer = [0; READ_BYTES];
        let mut offset = self.offset(row);
        let mut left = self.seq + 1;
        let mut first = true;
        while left > 0 {
            let count = left.min(READ_BYTES / ENTRY_BYTES as usize);
            let bytes = &mut buffer[..count * ENTRY_BYTES as usize];
            self.read_at(row, bytes, offset)?;
            let (entries, _) = bytes.as_chunks::<{ ENTRY_BYTES as usize }>();
            for &bytes in entries {
                let entry = u32::from_le_bytes(bytes);
                if entry & TOKEN >= self.vocab_size {
                    return Err(self.damaged(row, "it has a token that the vocabulary lacks"));
                }
                if (first && entry & START == 0) || (entry & START != 0 && entry & TARGET != 0) {
                    return Err(self.damaged(row, "it has an entry that cannot be where it is"));
                }
                first = false;
                push(entry);
            }
            offset += bytes.len() as u64;
            left -= count;
        }
        self.targets(row)
    }

    pub(super) fn damaged(&self, row: u64, reason: &'static str) -> RowsError {
        RowsError::Damaged {
            path: self.path.clone(),
            row,
            reason,
        }
    }

    /// `open` has checked that all rows lie within the file.
    fn offset(&self, row: u64) -> u64 {
        HEADER_BYTES + row * record_bytes(self.seq)
    }

    fn read_at(&self, row: u64, bytes: &mut [u8], offset: u64) -> Result<(), RowsError> {
        self.file
            .read_exact_at(bytes, offset)
            .map_err(|source| RowsError::Read {
                path: self.path.clone(),
                row,
                source,
            })
    }
}

/// Writes a token file.
pub(super) struct RowWriter<'a> {
    file: &'a File,
    seq: usize,
    rows: u64,
    record: Vec<u8>,
    digest: Sha256,
}

impl<'a> RowWriter<'a> {
    /// Empties the file first: a header of earlier rows would outlive them.
    pub(super) fn new(file: &'a File, seq: usize) -> io::Result<Self> {
        file.set_len(0)?;
        Ok(Self {
            file,
            seq,
            rows: 0,
            record: Vec::new(),
            digest: Sha256::new(),
        })
    }

    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// Writes a row of up to `seq + 1` entries, the rest padding; returns the number of entries that are padding.
    pub(super) fn write(&mut self, entries: &[u32], targets: u32) -> io::Result<u64> {
        let padding = self.seq + 1 - entries.len();
        self.record.clear();
        let entries = entries.iter().copied().chain(std::iter::repeat_n(PADDING, padding));
        self.record.extend(entries.chain([targets]).flat_map(u32::to_le_bytes));
        self.append()?;
        Ok(padding as u64)
    }

    /// Takes the last row of `other`.
    pub(super) fn take_last(&mut self, other: &mut RowWriter<'_>) -> io::Result<()> {
        other.rows -= 1;
        self.record.resize(record_bytes(self.seq) as usize, 0);
        let offset = HEADER_BYTES + other.rows * record_bytes(self.seq);
        other.file.read_exact_at(&mut self.record, offset)?;
        other.file.set_len(offset)?;
        self.append()
    }

    fn append(&mut self) -> io::Result<()> {
        let offset = HEADER_BYTES + self.rows * self.record.len() as u64;
        self.file.write_all_at(&self.record, offset)?;
        self.digest.update(&self.record);
        self.rows += 1;
        Ok(())
    }

    /// Writes the header; returns the SHA-256 of it and of all rows in the order in which they were written.
    pub(super) fn finish(mut self, vocab_size: usize) -> io::Result<[u8; 32]> {
        let mut header = [0; HEADER_BYTES as usize];
        let fields = MAGIC.iter().copied().chain(
            [self.seq as u64, self.rows, vocab_size as u64]
                .into_iter()
                .flat_map(u64::to_le_bytes),
        );
        header.iter_mut().zip(fields).for_each(|(byte, field)| *byte = field);
        self.file.write_all_at(&header, 0)?;
        self.digest.update(header);
        Ok(self.digest.finalize().into())
    }
}
