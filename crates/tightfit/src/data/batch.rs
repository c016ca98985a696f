//! Batches of rows, written into buffers that the plan owns.

use tightfit_text::data::{BatchBuffers, IGNORE_INDEX};

use super::source::{Language, TextSource};

/// Which stream of rows; the two never share a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Split {
    /// Rows to train on.
    Train,
    /// Rows held out for evaluation.
    Eval,
}

/// Why a batch cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// No tokens, or too many to index with an `i32`.
    #[error("a batch of {batch} rows x {seq} tokens is not possible: it needs 1 to 2147483647 tokens in all")]
    Shape {
        /// Rows.
        batch: usize,
        /// Tokens per row.
        seq: usize,
    },
    /// A buffer does not have `batch · seq` elements.
    #[error("buffer `{buffer}` has {actual} elements, but the batch has {expected} tokens")]
    Length {
        /// The buffer's name.
        buffer: &'static str,
        /// `batch · seq`.
        expected: usize,
        /// The length it has.
        actual: usize,
    },
}

/// A numbered sequence of batches; each is a function of the seed, the split and its index alone.
#[derive(Clone, Debug)]
pub struct Batches {
    language: Language,
    seed: u64,
    split: Split,
    batch: usize,
    seq: usize,
    /// Rows of the sequence, where it ends.
    rows: Option<u64>,
}

impl Batches {
    /// An endless sequence of batches of `batch` rows of `seq` tokens, from the language of `seed`.
    ///
    /// # Errors
    /// [`BatchError::Shape`] if a batch would have no tokens or more than `i32::MAX`.
    pub fn new(seed: u64, split: Split, batch: usize, seq: usize) -> Result<Self, BatchError> {
        let tokens = batch.checked_mul(seq).and_then(|tokens| i32::try_from(tokens).ok());
        if tokens.is_none_or(|tokens| tokens == 0) {
            return Err(BatchError::Shape { batch, seq });
        }
        Ok(Self {
            language: Language::new(seed),
            seed,
            split,
            batch,
            seq,
            rows: None,
        })
    }

    /// The first `rows` rows of the sequence, whatever the batch; rows that the last batch lacks are padding.
    pub fn first(self, rows: u64) -> Self {
        Self {
            rows: Some(rows),
            ..self
        }
    }

    /// The source of the text, which states its entropy.
    pub fn language(&self) -> &Language {
        &self.language
    }

    /// Tokens of one batch, padding included: `batch · seq`.
    pub fn token_count(&self) -> usize {
        self.batch * self.seq
    }

    /// Batches until the sequence ends.
    pub fn held_out(&self) -> u64 {
        self.rows.map_or(u64::MAX, |rows| rows.div_ceil(self.batch as u64))
    }

    /// Tokens of batch `index` that have a target: all but padding.
    pub fn counted(&self, index: u64) -> usize {
        let rows = (0..self.batch).filter(|&row| self.number(index, row).is_some());
        rows.count() * self.seq
    }

    /// Writes batch `index` and returns its count of tokens that have a target; allocates nothing.
    ///
    /// Row `r` is a walk of its own, keyed by `(seed, split, index · batch + r)`: `seq + 1` bytes, read as tokens and, one
    /// byte further, as targets. With gradient accumulation, `index` counts micro-batches: rows are numbered through, so the
    /// same rows make a step however it is split.
    ///
    /// # Errors
    /// [`BatchError::Length`] if a buffer does not have [`token_count`](Self::token_count) elements.
    pub fn fill(&self, index: u64, buffers: &mut BatchBuffers<'_>) -> Result<usize, BatchError> {
        let expected = self.token_count();
        if let Some((buffer, actual)) = buffers.other_than(expected) {
            return Err(BatchError::Length {
                buffer,
                expected,
                actual,
            });
        }
        for row in 0..self.batch {
            match self.number(index, row) {
                Some(number) => self.fill_row(number, row * self.seq, buffers),
                None => self.pad_row(row * self.seq, buffers),
            }
        }
        Ok(self.counted(index))
    }

    /// The number of row `row` of batch `index` in the sequence; none past its end.
    fn number(&self, index: u64, row: usize) -> Option<u64> {
        let number = index.wrapping_mul(self.batch as u64).wrapping_add(row as u64);
        self.rows.is_none_or(|rows| number < rows).then_some(number)
    }

    fn fill_row(&self, number: u64, start: usize, buffers: &mut BatchBuffers<'_>) {
        let mut source = TextSource::keyed(&self.language, &[self.seed, self.split as u64, number]);
        let mut token = i32::from(source.next_byte());
        for position in 0..self.seq {
            let t = start + position;
            let target = i32::from(source.next_byte());
            buffers.tokens[t] = token;
            buffers.targets[t] = target;
            // Both are below `token_count`, which `new` checked to fit.
            buffers.positions[t] = position as i32;
            buffers.doc_start[t] = start as i32;
            token = target;
        }
    }

    /// Tokens that see themselves only, and of which nothing counts: what padding is in rows from files.
    fn pad_row(&self, start: usize, buffers: &mut BatchBuffers<'_>) {
        for t in start..start + self.seq {
            buffers.tokens[t] = 0;
            buffers.targets[t] = IGNORE_INDEX;
            buffers.positions[t] = 0;
            buffers.doc_start[t] = t as i32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Owned([Vec<i32>; 4]);

    impl Owned {
        fn new(tokens: usize) -> Self {
            Self(std::array::from_fn(|_| vec![-1; tokens]))
        }

        fn buffers(&mut self) -> BatchBuffers<'_> {
            let [tokens, targets, positions, doc_start] = &mut self.0;
            BatchBuffers {
                tokens,
                targets,
                positions,
                doc_start,
            }
        }
    }

    fn tokens_of(batches: &Batches, index: u64) -> Vec<i32> {
        let mut owned = Owned::new(batches.token_count());
        batches.fill(index, &mut owned.buffers()).unwrap();
        let [tokens, ..] = owned.0;
        tokens
    }

    #[test]
    fn rows_are_contiguous_text_with_targets_one_byte_ahead() {
        let batches = Batches::new(11, Split::Train, 3, 40).unwrap();
        let mut owned = Owned::new(120);
        assert_eq!(batches.fill(5, &mut owned.buffers()), Ok(120));
        let [tokens, targets, positions, doc_start] = owned.0;
        for row in 0..3 {
            let mut text = [0; 41];
            TextSource::keyed(batches.language(), &[11, Split::Train as u64, 5 * 3 + row as u64]).fill(&mut text);
            for i in 0..40 {
                let t = row * 40 + i;
                assert_eq!((tokens[t], targets[t]), (i32::from(text[i]), i32::from(text[i + 1])));
                assert_eq!((positions[t], doc_start[t]), (i as i32, row as i32 * 40));
            }
        }
    }

    #[test]
    fn every_row_of_every_batch_and_split_is_another_walk() {
        let mut rows = std::collections::BTreeSet::new();
        for split in [Split::Train, Split::Eval] {
            let batches = Batches::new(0, split, 4, 64).unwrap();
            for index in 0..50 {
                rows.extend(tokens_of(&batches, index).chunks(64).map(<[i32]>::to_vec));
            }
        }
        assert_eq!(rows.len(), 2 * 50 * 4);
    }

    #[test]
    fn the_same_rows_make_a_batch_however_it_is_split() {
        let whole = tokens_of(&Batches::new(4, Split::Train, 6, 16).unwrap(), 3);
        let halves = Batches::new(4, Split::Train, 3, 16).unwrap();
        let joined = [6, 7].map(|index| tokens_of(&halves, index)).concat();
        assert_eq!(whole, joined);
    }

    #[test]
    fn the_same_rows_are_held_out_whatever_the_batch() {
        let of = |batch| Batches::new(4, Split::Eval, batch, 16).unwrap().first(6);
        let rows = |batches: &Batches| {
            let tokens = |index| tokens_of(batches, index);
            (0..batches.held_out()).flat_map(tokens).collect::<Vec<_>>()
        };
        let whole = rows(&of(6));
        assert_eq!(whole.len(), 6 * 16);
        for (batch, batches) in [(1, 6), (2, 3), (3, 2), (4, 2), (5, 2), (7, 1)] {
            let split = of(batch);
            assert_eq!(split.held_out(), batches);
            let read = rows(&split);
            assert_eq!(read[..whole.len()], whole, "{batch}");
            assert!(read[whole.len()..].iter().all(|&token| token == 0), "{batch}");
            let counted: usize = (0..batches).map(|index| split.counted(index)).sum();
            assert_eq!(counted, whole.len(), "{batch}");
        }
    }

    #[test]
    fn padding_has_no_target_and_sees_itself_only() {
        let batches = Batches::new(4, Split::Eval, 4, 3).unwrap().first(6);
        let mut owned = Owned::new(12);
        assert_eq!(batches.fill(1, &mut owned.buffers()), Ok(6));
        let [tokens, targets, positions, doc_start] = owned.0;
        assert!(targets[..6].iter().all(|&target| target >= 0));
        assert_eq!(tokens[6..], [0; 6]);
        assert_eq!(targets[6..], [IGNORE_INDEX; 6]);
        assert_eq!(positions[6..], [0; 6]);
        assert_eq!(doc_start[6..], [6, 7, 8, 9, 10, 11]);
    }

    #[test]
    fn a_batch_depends_on_its_index_only_and_not_on_what_was_read_before() {
        let batches = Batches::new(2, Split::Train, 2, 32).unwrap();
        let (first, third) = (tokens_of(&batches, 0), tokens_of(&batches, 2));
        let resumed = Batches::new(2, Split::Train, 2, 32).unwrap();
        assert_eq!(tokens_of(&resumed, 2), third);
        assert_eq!(tokens_of(&resumed, 0), first);
        assert_ne!(tokens_of(&Batches::new(3, Split::Train, 2, 32).unwrap(), 0), first);
    }

    #[test]
    fn impossible_shapes_and_wrong_buffers_are_named() {
        assert_eq!(
            Batches::new(0, Split::Train, 0, 8).unwrap_err(),
            BatchError::Shape { batch: 0, seq: 8 }
        );
        assert!(Batches::new(0, Split::Train, usize::MAX, 8).is_err());
        assert!(Batches::new(0, Split::Train, 1 << 16, 1 << 16).is_err());
        let batches = Batches::new(0, Split::Train, 2, 8).unwrap();
        let mut owned = Owned::new(16);
        owned.0[2].pop();
        let error = batches.fill(0, &mut owned.buffers()).unwrap_err();
        assert_eq!(
            error,
            BatchError::Length {
                buffer: "positions",
                expected: 16,
                actual: 15
            }
        );
    }
}
