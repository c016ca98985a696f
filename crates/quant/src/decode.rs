//! Quantised bytes to `f32`.

use crate::{Block, ggml, int4, int8, nf4};

impl Block {
    /// Decodes elements `start..start + out.len()` of the flattened matrix `[rows, cols]` whose [`bytes`](Self::bytes) these are.
    /// Allocates nothing.
    ///
    /// Any range of [`Int8`](Self::Int8), [`Int4`](Self::Int4) and [`Nf4`](Self::Nf4), quickest in whole groups of
    /// [`GROUP`](Self::GROUP); whole blocks of `ggml`'s formats. The same bits on every machine: each operation is rounded to `f32`, in
    /// the order that the format's formula states.
    ///
    /// # Panics
    /// If the range is not inside of the matrix, the bytes are not those of a matrix of that shape, or a block would be cut.
    pub fn decode(self, bytes: &[u8], rows: usize, cols: usize, start: usize, out: &mut [f32]) {
        assert_eq!(
            bytes.len() as u64,
            self.bytes(rows as u64, cols as u64),
            "bytes of {self} [{rows}, {cols}]"
        );
        let elements = rows * cols;
        assert!(
            start <= elements && out.len() <= elements - start,
            "a range of the matrix"
        );
        if let Some((block_elements, block_bytes)) = self.independent() {
            let (block_elements, block_bytes) = (block_elements as usize, block_bytes as usize);
            assert!(
                start.is_multiple_of(block_elements) && out.len().is_multiple_of(block_elements),
                "whole blocks"
            );
            let bytes = &bytes[start / block_elements * block_bytes..][..out.len() / block_elements * block_bytes];
            return self.decode_blocks(bytes, out);
        }
        match self {
            Self::Int8 => int8::decode(bytes, rows, cols, start, out),
            Self::Int4 => int4::decode(bytes, elements, start, out),
            _ => nf4::decode(bytes, elements, start, out),
        }
    }

    /// Decodes whole blocks of `ggml`'s formats: `bytes` holds those of just the elements of `out`. Allocates nothing. NaNs stay NaN;
    /// which NaN is up to the machine.
    ///
    /// # Panics
    /// If the lengths do not belong together, or the format's blocks are not [independent](Self::independent).
    pub fn decode_blocks(self, bytes: &[u8], out: &mut [f32]) {
        let Some((block_elements, block_bytes)) = self.independent() else {
            panic!("{self} has no blocks that can be read one by one");
        };
        assert!(
            bytes.len().is_multiple_of(block_bytes as usize)
                && bytes.len() / block_bytes as usize * block_elements as usize == out.len(),
            "whole blocks of just the elements"
        );
        ggml::decode(self, bytes, out);
    }

    /// Whether an [`Encoder`](crate::Encoder) makes it; those of `ggml` are read only.
    pub fn encodes(self) -> bool {
        self.independent().is_none()
    }

    /// Floats that an [`Encoder`](crate::Encoder) needs beside the result: a scale for each group of [`Nf4`](Self::Nf4), whose mean is
    /// known at the end only.
    pub fn scratch_floats(self, rows: u64, cols: u64) -> u64 {
        match self {
            Self::Nf4 => rows.saturating_mul(cols).div_ceil(Self::GROUP),
            _ => 0,
        }
    }
}
