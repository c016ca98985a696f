//! Cuts a sample into pieces that fit a row, token by token, so that a sample of any length takes the memory of one piece.

use std::io;

use super::{
    entry::{START, TARGET},
    options::Long,
};

/// A piece: up to `seq + 1` entries, of which the first starts a document, and the number of targets among them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece<'a> {
    pub(super) entries: &'a [u32],
    pub(super) targets: u32,
}

/// What a sample came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Cut {
    pub(super) tokens: u64,
    /// Tokens that count and have a token before them.
    pub(super) targets: u64,
    /// Pieces, those without targets included.
    pub(super) pieces: u64,
    /// Left out, because it is longer than a piece.
    pub(super) dropped: bool,
}

/// Takes a finished piece.
pub(super) trait Emit: FnMut(Piece<'_>) -> io::Result<()> {}

impl<F: FnMut(Piece<'_>) -> io::Result<()>> Emit for F {}

/// Cuts one sample after the other.
pub(super) struct Cutter {
    /// Entries of a piece, at most: `seq + 1`.
    width: usize,
    /// A new piece begins this many entries after the one before, at most `seq`: it repeats the rest, which no longer counts.
    stride: usize,
    entries: Vec<u32>,
    piece_targets: u32,
    last: Option<u32>,
    cut: Cut,
}

impl Cutter {
    pub(super) fn new(seq: usize, stride: usize) -> Self {
        debug_assert!((1..=seq).contains(&stride));
        Self {
            width: seq + 1,
            stride,
            entries: Vec::new(),
            piece_targets: 0,
            last: None,
            cut: Cut::default(),
        }
    }

    /// The last token of the sample so far.
    pub(super) fn last(&self) -> Option<u32> {
        self.last
    }

    /// Tokens of the sample so far.
    pub(super) fn tokens(&self) -> u64 {
        self.cut.tokens
    }

    /// Adds a token to the sample; hands a piece to `emit` where one is full and the sample goes on.
    pub(super) fn push(&mut self, token: u32, counts: bool, long: Long, emit: &mut impl Emit) -> io::Result<()> {
        let counts = counts && self.cut.tokens > 0;
        self.cut.tokens += 1;
        self.cut.targets += u64::from(counts);
        self.last = Some(token);
        if self.entries.len() == self.width {
            match long {
                Long::Drop => self.cut.dropped = true,
                Long::Split => {
                    self.emit(emit)?;
                    self.entries.drain(..self.stride);
                    self.entries.iter_mut().for_each(|entry| *entry &= !TARGET);
                    self.entries[0] |= START;
                }
            }
        }
        if self.cut.dropped {
            return Ok(());
        }
        self.entries.push(match (self.entries.is_empty(), counts) {
            (true, _) => token | START,
            (false, true) => token | TARGET,
            (false, false) => token,
        });
        self.piece_targets += u32::from(counts);
        Ok(())
    }

    /// Ends the sample.
    pub(super) fn finish(&mut self, emit: &mut impl Emit) -> io::Result<Cut> {
        if self.cut.tokens > 0 && !self.cut.dropped {
            self.emit(emit)?;
        }
        self.entries.clear();
        self.piece_targets = 0;
        self.last = None;
        Ok(std::mem::take(&mut self.cut))
    }

    fn emit(&mut self, emit: &mut impl Emit) -> io::Result<()> {
        self.cut.pieces += 1;
        emit(Piece {
            entries: &self.entries,
            targets: std::mem::take(&mut self.piece_targets),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pieces of the sample 0, 1, 2, … as text: `>` starts, `*` is a target.
    fn pieces(seq: usize, stride: usize, long: Long, counts: &[bool]) -> (String, Cut) {
        let mut cutter = Cutter::new(seq, stride);
        let mut shown = Vec::new();
        let mut emit = |piece: Piece<'_>| {
            let targets = piece.entries.iter().filter(|&&entry| entry & TARGET != 0).count();
            assert_eq!(piece.targets as usize, targets);
            let entries = piece.entries.iter().map(|&entry| {
                let mark = [("", ">"), ("*", "!")][usize::from(entry & TARGET != 0)];
                format!(
                    "{}{}{}",
                    if entry & START != 0 { mark.1 } else { "" },
                    entry & 0xff,
                    mark.0
                )
            });
            shown.push(entries.collect::<Vec<_>>().join(" "));
            Ok(())
        };
        for (token, &counts) in counts.iter().enumerate() {
            cutter.push(token as u32, counts, long, &mut emit).unwrap();
        }
        let cut = cutter.finish(&mut emit).unwrap();
        (shown.join(" | "), cut)
    }

    #[test]
    fn successive_pieces_share_a_token() {
        let (shown, cut) = pieces(3, 3, Long::Split, &[true; 8]);
        assert_eq!(shown, ">0 1* 2* 3* | >3 4* 5* 6* | >6 7*");
        assert_eq!((cut.tokens, cut.targets, cut.pieces), (8, 7, 3));
        let (shown, cut) = pieces(3, 3, Long::Split, &[true; 7]);
        assert_eq!(shown, ">0 1* 2* 3* | >3 4* 5* 6*");
        assert_eq!((cut.tokens, cut.targets, cut.pieces), (7, 6, 2));
    }

    #[test]
    fn strided_pieces_count_each_token_once() {
        let (shown, _) = pieces(4, 2, Long::Split, &[true; 8]);
        assert_eq!(shown, ">0 1* 2* 3* 4* | >2 3 4 5* 6* | >4 5 6 7*");
    }

    #[test]
    fn what_does_not_count_is_context() {
        let (shown, cut) = pieces(2, 2, Long::Split, &[false, false, false, true, true]);
        assert_eq!(shown, ">0 1 2 | >2 3* 4*");
        assert_eq!((cut.targets, cut.pieces), (2, 2));
    }

    #[test]
    fn long_samples_are_dropped_whole() {
        let (shown, cut) = pieces(3, 3, Long::Drop, &[true; 5]);
        assert_eq!(shown, "");
        assert_eq!((cut.tokens, cut.targets, cut.pieces, cut.dropped), (5, 4, 0, true));
        let (shown, cut) = pieces(3, 3, Long::Drop, &[true; 4]);
        assert_eq!(shown, ">0 1* 2* 3*");
        assert!(!cut.dropped);
    }

    #[test]
    fn a_sample_leaves_nothing_to_the_next() {
        let mut cutter = Cutter::new(3, 3);
        for _ in 0..2 {
            let mut lengths = Vec::new();
            let mut emit = |piece: Piece<'_>| {
                lengths.push((piece.entries.len(), piece.targets));
                Ok(())
            };
            for token in 0..6 {
                cutter.push(token, true, Long::Split, &mut emit).unwrap();
            }
            assert_eq!(cutter.last(), Some(5));
            assert_eq!(cutter.finish(&mut emit).unwrap().pieces, 2);
            assert_eq!(lengths, [(4, 3), (3, 2)]);
            assert_eq!(cutter.last(), None);
        }
        let mut emit = |_: Piece<'_>| panic!("an empty sample has no piece");
        assert_eq!(cutter.finish(&mut emit).unwrap(), Cut::default());
    }
}
