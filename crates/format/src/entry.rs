//! A line of the catalogue.

use crate::{Encoding, Problem};

/// Dimensions that a tensor may have. Both formats allow more in principle; no model has them, and a bound keeps memory bounded.
pub(crate) const MAX_RANK: usize = 8;

/// A tensor of a checkpoint: what it is and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its name in the file.
    pub name: String,
    /// How its elements are stored.
    pub encoding: Encoding,
    /// Elements along each dimension, outermost first (the order of PyTorch; GGUF files store the reverse). Empty for a scalar.
    pub shape: Vec<u64>,
    pub(crate) file: u32,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl Entry {
    /// Bytes that it takes in its file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Where its bytes begin in its file.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Elements. The readers made sure that the product does not overflow.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Elements along the last dimension: 1 for a scalar.
    pub fn row_elements(&self) -> u64 {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Bytes of one row (all elements along the last dimension); 0 where rows are not by themselves: for [`Encoding::Unknown`] and the
    /// quantised formats of our own. Rows of GGUF are whole blocks; of the
    /// encodings of safetensors only the packed ones (`F4`, `F6`) can have rows that are not, and they round down.
    pub fn row_bytes(&self) -> u64 {
        self.row_elements() * self.encoding.block_bytes() / self.encoding.block_elements()
    }

    /// Bytes that a shape takes in an encoding, where all of its elements together are whole blocks. A quantised format of our own takes
    /// it for a matrix of its rows.
    pub(crate) fn size(shape: &[u64], encoding: Encoding) -> Result<u64, Problem> {
        // Zeros count as ones here: they would hide an overflow of the other dimensions, a trap for whoever multiplies a part of the
        // shape. The bytes of all blocks are bounded before the division, so that `row_bytes` cannot overflow either.
        shape
            .iter()
            .try_fold(encoding.block_bytes().max(1), |n, &d| n.checked_mul(d.max(1)))
            .ok_or_else(|| Problem::Overflow(shape.to_vec()))?;
        let elements: u64 = shape.iter().product();
        if let Encoding::Block(block) = encoding
            && block.encodes()
        {
            let cols = shape.last().copied().unwrap_or(1);
            return Ok(block.bytes(elements.checked_div(cols).unwrap_or(0), cols));
        }
        let block = encoding.block_elements();
        if !elements.is_multiple_of(block) {
            return Err(Problem::PartialBlock {
                shape: shape.to_vec(),
                encoding,
                block,
            });
        }
        Ok(elements / block * encoding.block_bytes())
    }
}
