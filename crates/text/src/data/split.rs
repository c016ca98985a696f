//! What is trained on and what is held out.

use std::{fmt::Write, io};

use sha2::{Digest, Sha256};

use super::{
    options::{Options, TokenFiles},
    pack::Packer,
    permutation::hash,
    pieces::Piece,
    rows::RowWriter,
};

/// Keeps what is held out apart from other uses of the seed.
const EVAL_KEY: u64 = u64::from_be_bytes(*b"held out");

/// The rows of both token files, while pieces are added.
pub(super) struct RowSets<'a> {
    options: &'a Options,
    train: Packer<'a>,
    eval: Packer<'a>,
    /// The sample whose pieces are added, from 0.
    sample: u64,
    /// Pieces of it that are in rows.
    pieces: u64,
    targets: u64,
}

/// The rows of both token files, written.
pub(super) struct Written {
    pub(super) train: u64,
    pub(super) eval: u64,
    pub(super) targets: u64,
    pub(super) padding: u64,
    pub(super) fingerprint: String,
}

impl<'a> RowSets<'a> {
    pub(super) fn new(options: &'a Options, out: TokenFiles<'a>) -> io::Result<Self> {
        let packer = |file| Ok::<_, io::Error>(Packer::new(RowWriter::new(file, options.seq)?, options.seq));
        Ok(Self {
            options,
            train: packer(out.train)?,
            eval: packer(out.eval)?,
            sample: 0,
            pieces: 0,
            targets: 0,
        })
    }

    /// Adds a piece of the sample, if there is something to learn in it. It is held out or not by a hash of the sample's
    /// number and, if samples are so long that each piece is to be drawn for itself, the piece's.
    pub(super) fn add(&mut self, piece: Piece<'_>, by_piece: bool) -> io::Result<()> {
        if piece.targets == 0 {
            return Ok(());
        }
        let number = if by_piece { self.pieces } else { 0 };
        let draw = hash(&[self.options.seed, EVAL_KEY, self.sample, number]);
        // Uniform in 0..1: 53 bits are what an f64 holds exactly.
        let held_out = ((draw >> 11) as f64) < self.options.eval_fraction * (1u64 << 53) as f64;
        self.pieces += 1;
        self.targets += u64::from(piece.targets);
        let packer = if held_out { &mut self.eval } else { &mut self.train };
        packer.add(piece)
    }

    /// Ends the sample; returns its pieces that are in rows.
    pub(super) fn next_sample(&mut self) -> u64 {
        self.sample += 1;
        std::mem::take(&mut self.pieces)
    }

    /// Writes what is left. Where a share was to be held out and chance left one side without a row, it gets one of the other.
    pub(super) fn finish(self) -> io::Result<Written> {
        let (mut train, train_padding) = self.train.finish()?;
        let (mut eval, eval_padding) = self.eval.finish()?;
        if self.options.eval_fraction > 0.0 && eval.rows() == 0 && train.rows() > 1 {
            eval.take_last(&mut train)?;
        }
        if train.rows() == 0 && eval.rows() > 0 {
            train.take_last(&mut eval)?;
        }
        let rows = (train.rows(), eval.rows());
        let mut digest = Sha256::new();
        for writer in [train, eval] {
            digest.update(writer.finish(self.options.vocab_size)?);
        }
        let mut fingerprint = String::new();
        for byte in digest.finalize() {
            // Writing to a string does not fail.
            let _ = write!(fingerprint, "{byte:02x}");
        }
        Ok(Written {
            train: rows.0,
            eval: rows.1,
            targets: self.targets,
            padding: train_padding + eval_padding,
            fingerprint,
        })
    }
}
