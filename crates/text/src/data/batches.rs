//! Micro-batches of rows, written into buffers that the plan owns.

use super::{
    entry::{PADDING, START, TARGET, TOKEN},
    error::RowsError,
    permutation::Permutation,
    rows::Rows,
};

/// The target of a token of which nothing is learned.
pub const IGNORE_INDEX: i32 = -100;

/// The input buffers of one micro-batch, each of `T = micro_batch · seq` elements, row after row.
#[derive(Debug)]
pub struct BatchBuffers<'a> {
    /// `[T]` token ids.
    pub tokens: &'a mut [i32],
    /// `[T]` the token to predict after each token, or [`IGNORE_INDEX`].
    pub targets: &'a mut [i32],
    /// `[T]` position within the document's piece, from 0.
    pub positions: &'a mut [i32],
    /// `[T]` flat index of the first token that this token may attend to: its piece's first.
    pub doc_start: &'a mut [i32],
}

impl BatchBuffers<'_> {
    /// The first buffer that does not have `expected` elements, and how many it has.
    pub fn other_than(&self, expected: usize) -> Option<(&'static str, usize)> {
        let lengths = [
            ("tokens", self.tokens.len()),
            ("targets", self.targets.len()),
            ("positions", self.positions.len()),
            ("doc_start", self.doc_start.len()),
        ];
        lengths.into_iter().find(|&(_, actual)| actual != expected)
    }
}

/// A numbered sequence of micro-batches; each is a function of the rows, the seed and its number alone.
#[derive(Debug)]
pub struct Batches {
    rows: Rows,
    micro_batch: usize,
    order: Order,
}

#[derive(Debug)]
enum Order {
    /// Epoch after epoch without end, each in an order of its own.
    Shuffled { seed: u64 },
    /// The first `count` of them once, as they lie in the file.
    InOrder { count: u64 },
}

impl Batches {
    /// An endless sequence: each epoch has every row once, in an order keyed by `seed` and the epoch. Rows are numbered
    /// through, so a micro-batch may hold the end of one epoch and the start of the next, and none is cut short.
    ///
    /// # Errors
    /// [`RowsError::Shape`] if there are no rows, or a batch would have no tokens or more than `i32::MAX`.
    pub fn shuffled(rows: Rows, micro_batch: usize, seed: u64) -> Result<Self, RowsError> {
        Self::new(rows, micro_batch, Order::Shuffled { seed })
    }

    /// Every row once, in the order of the file; rows that the last micro-batch lacks are padding.
    ///
    /// # Errors
    /// As [`shuffled`](Self::shuffled).
    pub fn in_order(rows: Rows, micro_batch: usize) -> Result<Self, RowsError> {
        Self::first(rows, u64::MAX, micro_batch)
    }

    /// As [`in_order`](Self::in_order), of the first `count` rows, or all where there are fewer: the same rows for any
    /// `micro_batch`.
    ///
    /// # Errors
    /// As [`shuffled`](Self::shuffled).
    pub fn first(rows: Rows, count: u64, micro_batch: usize) -> Result<Self, RowsError> {
        let count = count.min(rows.rows());
        Self::new(rows, micro_batch, Order::InOrder { count })
    }

    fn new(rows: Rows, micro_batch: usize, order: Order) -> Result<Self, RowsError> {
        let seq = rows.seq();
        let tokens = micro_batch
            .checked_mul(seq)
            .and_then(|tokens| i32::try_from(tokens).ok());
        if rows.rows() == 0 || tokens.is_none_or(|tokens| tokens == 0) {
            return Err(RowsError::Shape {
                path: rows.path().to_owned(),
                micro_batch,
                seq,
                rows: rows.rows(),
            });
        }
        Ok(Self {
            rows,
            micro_batch,
            order,
        })
    }

    /// The rows.
    pub fn rows(&self) -> &Rows {
        &self.rows
    }

    /// Tokens of one micro-batch: `micro_batch · seq`.
    pub fn token_count(&self) -> usize {
        self.micro_batch * self.rows.seq()
    }

    /// Micro-batches that hold every row of the sequence once.
    pub fn per_epoch(&self) -> u64 {
        let rows = match self.order {
            Order::Shuffled { .. } => self.rows.rows(),
            Order::InOrder { count } => count,
        };
        rows.div_ceil(self.micro_batch as u64)
    }

    /// Targets of micro-batch `index` that are not [`IGNORE_INDEX`], read without its tokens: a step divides by the sum over
    /// all its micro-batches before it runs the first. Allocates nothing.
    ///
    /// # Errors
    /// [`RowsError::Read`] or [`RowsError::Damaged`] if the file is no longer what it was.
    pub fn counted(&self, index: u64) -> Result<usize, RowsError> {
        let mut sum = 0;
        for slot in 0..self.micro_batch {
            if let Some(row) = self.row(index, slot) {
                sum += self.rows.targets(row)?;
            }
        }
        Ok(sum)
    }

    /// Writes micro-batch `index` and returns its count of targets that are not [`IGNORE_INDEX`]; allocates nothing.
    ///
    /// # Errors
    /// [`RowsError::Length`] if a buffer does not have [`token_count`](Self::token_count) elements, [`RowsError::Read`] or
    /// [`RowsError::Damaged`] if the file is no longer what it was.
    pub fn fill(&self, index: u64, buffers: &mut BatchBuffers<'_>) -> Result<usize, RowsError> {
        let expected = self.token_count();
        if let Some((buffer, actual)) = buffers.other_than(expected) {
            return Err(RowsError::Length {
                buffer,
                expected,
                actual,
            });
        }
        let seq = self.rows.seq();
        let mut counted = 0;
        for slot in 0..self.micro_batch {
            let mut decoder = RowDecoder::new(buffers, slot * seq, seq);
            match self.row(index, slot) {
                None => (0..=seq).for_each(|_| decoder.push(PADDING)),
                Some(row) => {
                    let stated = self.rows.read(row, |entry| decoder.push(entry))?;
                    if decoder.counted != stated {
                        return Err(self.rows.damaged(row, "its targets are not as many as it says"));
                    }
                }
            }
            counted += decoder.counted;
        }
        Ok(counted)
    }

    /// The row at place `slot` of micro-batch `index`; none past the end of an ordered sequence.
    fn row(&self, index: u64, slot: usize) -> Option<u64> {
        let number = u128::from(index) * self.micro_batch as u128 + slot as u128;
        let rows = u128::from(self.rows.rows());
        // A remainder of a division by `rows` fits its type again; epochs past 2^64 repeat.
        match self.order {
            Order::Shuffled { seed } => {
                let epoch = (number / rows) as u64;
                Some(Permutation::new(self.rows.rows(), seed, epoch).index((number % rows) as u64))
            }
            Order::InOrder { count } => (number < u128::from(count)).then_some(number as u64),
        }
    }
}

/// Turns entries, one by one, into one row of the buffers.
struct RowDecoder<'b, 'a> {
    buffers: &'b mut BatchBuffers<'a>,
    /// Flat index of the next entry.
    t: usize,
    start: usize,
    end: usize,
    /// Flat index at which the current piece starts.
    document: usize,
    counted: usize,
}

impl<'b, 'a> RowDecoder<'b, 'a> {
    fn new(buffers: &'b mut BatchBuffers<'a>, start: usize, seq: usize) -> Self {
        Self {
            buffers,
            t: start,
            start,
            end: start + seq,
            document: start,
            counted: 0,
        }
    }

    /// Takes entry `t`, whose token is an input at `t` (but for the row's last) and a target at `t - 1` (but for its first).
    /// Ids are below 2^29 and indices below `token_count`, so all fit an `i32`.
    fn push(&mut self, entry: u32) {
        let (t, token) = (self.t, (entry & TOKEN) as i32);
        if t > self.start {
            let is_target = entry & TARGET != 0;
            self.buffers.targets[t - 1] = if is_target { token } else { IGNORE_INDEX };
            self.counted += usize::from(is_target);
        }
        if t < self.end {
            if entry & START != 0 {
                self.document = t;
            }
            self.buffers.tokens[t] = token;
            self.buffers.positions[t] = (t - self.document) as i32;
            self.buffers.doc_start[t] = self.document as i32;
        }
        self.t += 1;
    }
}
