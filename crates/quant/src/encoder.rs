//! Making a quantised matrix from its rows.

use crate::{Block, groups::GROUP, int4, int8, nf4};

/// Makes a quantised matrix from its rows, given a few at a time and in order. Allocates nothing.
///
/// ```
/// use tightfit_quant::{Block, Encoder};
///
/// let (rows, cols) = (2, 64);
/// let mut bytes = vec![0; Block::Nf4.bytes(rows, cols) as usize];
/// let mut scratch = vec![0.0; Block::Nf4.scratch_floats(rows, cols) as usize];
/// let mut encoder = Encoder::new(Block::Nf4, rows as usize, cols as usize, &mut bytes, &mut scratch);
/// encoder.push(&[0.5; 64]);
/// encoder.push(&[-0.25; 64]);
/// encoder.finish();
///
/// let mut row = [0.0; 64];
/// Block::Nf4.decode(&bytes, 2, 64, 64, &mut row);
/// assert!(row.iter().all(|x| (x + 0.25).abs() < 1e-3));
/// ```
pub struct Encoder<'a> {
    block: Block,
    rows: usize,
    cols: usize,
    /// Elements so far.
    pushed: usize,
    /// Scales and whatever else stands in front of the codes.
    scales: &'a mut [u8],
    codes: &'a mut [u8],
    /// Scales of the first level, of [`Block::Nf4`].
    scratch: &'a mut [f32],
    /// Elements of a group that is not complete yet: a row need not be whole groups.
    pending: [f32; GROUP],
}

impl<'a> Encoder<'a> {
    /// Begins the matrix in `out`, of [`Block::bytes`]; `scratch` holds [`Block::scratch_floats`].
    ///
    /// # Panics
    /// If the lengths are others, or the format is not one that is [made](Block::encodes).
    pub fn new(block: Block, rows: usize, cols: usize, out: &'a mut [u8], scratch: &'a mut [f32]) -> Self {
        assert!(block.encodes(), "{block} is not made here");
        assert_eq!(out.len() as u64, block.bytes(rows as u64, cols as u64), "bytes");
        assert_eq!(
            scratch.len() as u64,
            block.scratch_floats(rows as u64, cols as u64),
            "scratch"
        );
        let codes = match block {
            Block::Int8 => rows * cols,
            _ => (rows * cols).div_ceil(2),
        };
        let (scales, codes) = out.split_at_mut(out.len() - codes);
        Self {
            block,
            rows,
            cols,
            pushed: 0,
            scales,
            codes,
            scratch,
            pending: [0.0; GROUP],
        }
    }

    /// The next rows: `values` is row-major. Values that are not finite have codes that mean nothing.
    ///
    /// # Panics
    /// If these are not whole rows, or more than there are.
    pub fn push(&mut self, values: &[f32]) {
        assert!(
            values.len() <= self.rows * self.cols - self.pushed,
            "more rows than there are"
        );
        if values.is_empty() {
            return;
        }
        assert!(values.len().is_multiple_of(self.cols), "whole rows");
        if self.block == Block::Int8 {
            return self.push_rows(values);
        }
        let mut values = values;
        while !values.is_empty() {
            let held = self.pushed % GROUP;
            let (part, rest) = values.split_at(values.len().min(GROUP - held));
            if part.len() == GROUP {
                self.group(self.pushed / GROUP, part);
            } else {
                self.pending[held..held + part.len()].copy_from_slice(part);
                if held + part.len() == GROUP {
                    let group = self.pending;
                    self.group(self.pushed / GROUP, &group);
                }
            }
            self.pushed += part.len();
            values = rest;
        }
    }

    /// Completes the matrix.
    ///
    /// # Panics
    /// If rows are missing.
    pub fn finish(mut self) {
        assert_eq!(self.pushed, self.rows * self.cols, "rows are missing");
        let held = self.pushed % GROUP;
        if self.block == Block::Int8 {
            if self.cols == 0 {
                self.scales.fill(0);
            }
            return;
        }
        if held > 0 {
            let group = self.pending;
            self.group(self.pushed / GROUP, &group[..held]);
        }
        if self.block == Block::Nf4 {
            nf4::encode_scales(self.scratch, self.scales);
        }
    }

    /// Rows of [`Block::Int8`].
    fn push_rows(&mut self, values: &[f32]) {
        let first = self.pushed / self.cols;
        let scales = &mut self.scales.as_chunks_mut().0[first..];
        let codes = &mut self.codes[self.pushed..];
        for ((row, scale), codes) in values
            .chunks_exact(self.cols)
            .zip(scales)
            .zip(codes.chunks_exact_mut(self.cols))
        {
            int8::encode_row(row, scale, codes);
        }
        self.pushed += values.len();
    }

    fn group(&mut self, index: usize, values: &[f32]) {
        let packed = &mut self.codes[index * GROUP / 2..][..values.len().div_ceil(2)];
        if self.block == Block::Nf4 {
            self.scratch[index] = nf4::encode_group(values, packed);
        } else {
            let scale = &mut self.scales.as_chunks_mut().0[index];
            int4::encode_group(values, scale, packed);
        }
    }
}
