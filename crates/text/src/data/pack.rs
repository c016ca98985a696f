//! Packs pieces into rows: best fit over a bounded number of open rows.
//!
//! Pieces come as a stream, so they cannot be sorted by length first. Each goes into the fullest open row with room for it; where
//! there is none, a new row is opened, and with too many open, the fullest is closed. With dozens of rows open little is
//! lost: `tests/data/packing.rs` measures how much.

use std::io;

use super::{pieces::Piece, rows::RowWriter};

/// Rows open at a time, if they are short.
const MAX_OPEN_ROWS: usize = 64;

/// Bytes of all open rows together, at most, but for one row.
const MAX_OPEN_BYTES: usize = 4 << 20;

/// Entries of the shortest piece of use: a token and its target.
const MIN_PIECE: usize = 2;

/// Packs the pieces of one token file.
pub(super) struct Packer<'a> {
    writer: RowWriter<'a>,
    /// Entries of a row: `seq + 1`.
    width: usize,
    max_open: usize,
    open: Vec<OpenRow>,
    pub(super) padding: u64,
}

struct OpenRow {
    entries: Vec<u32>,
    targets: u32,
}

impl<'a> Packer<'a> {
    pub(super) fn new(writer: RowWriter<'a>, seq: usize) -> Self {
        let width = seq + 1;
        Self {
            writer,
            width,
            max_open: (MAX_OPEN_BYTES / size_of::<u32>() / width).clamp(1, MAX_OPEN_ROWS),
            open: Vec::new(),
            padding: 0,
        }
    }

    /// Adds a piece of at least two and at most `seq + 1` entries.
    pub(super) fn add(&mut self, piece: Piece<'_>) -> io::Result<()> {
        let length = piece.entries.len();
        debug_assert!((MIN_PIECE..=self.width).contains(&length));
        if self.is_full(length) {
            return self.write(piece.entries, piece.targets);
        }
        let room = |row: &OpenRow| self.width - row.entries.len();
        let best = (0..self.open.len())
            .filter(|&i| room(&self.open[i]) >= length)
            .min_by_key(|&i| room(&self.open[i]));
        let Some(best) = best else {
            if self.open.len() == self.max_open {
                let fullest = (0..self.open.len()).min_by_key(|&i| room(&self.open[i])).unwrap_or(0);
                self.close(fullest)?;
            }
            self.open.push(OpenRow {
                entries: piece.entries.to_vec(),
                targets: piece.targets,
            });
            return Ok(());
        };
        let row = &mut self.open[best];
        row.entries.extend_from_slice(piece.entries);
        row.targets += piece.targets;
        if self.is_full(self.open[best].entries.len()) {
            self.close(best)?;
        }
        Ok(())
    }

    /// Writes the rows that are still open.
    pub(super) fn finish(mut self) -> io::Result<(RowWriter<'a>, u64)> {
        while !self.open.is_empty() {
            self.close(0)?;
        }
        Ok((self.writer, self.padding))
    }

    /// Whether nothing fits behind `length` entries.
    fn is_full(&self, length: usize) -> bool {
        length + MIN_PIECE > self.width
    }

    fn close(&mut self, row: usize) -> io::Result<()> {
        let row = self.open.remove(row);
        self.write(&row.entries, row.targets)
    }

    fn write(&mut self, entries: &[u32], targets: u32) -> io::Result<()> {
        self.padding += self.writer.write(entries, targets)?;
        Ok(())
    }
}
