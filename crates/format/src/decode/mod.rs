//! Bytes of a tensor to `f32`.

mod float;

use crate::{Encoding, FormatError};

/// Decodes whole blocks: `bytes` holds the blocks of just the elements of `out`. Allocates nothing.
///
/// Exact: each element is the `f32` that the block's formula gives with every operation rounded to `f32`, the same bits as the reference
/// (`dequantize` of `gguf-py`). NaNs stay NaN; which NaN is up to the machine.
///
/// # Errors
/// [`FormatError::Blocks`] where the lengths do not belong together, and for an encoding that does not
/// [decode](Encoding::decodes); `out` is then untouched.
pub fn decode(encoding: Encoding, bytes: &[u8], out: &mut [f32]) -> Result<(), FormatError> {
    let (block_bytes, block_elements) = (encoding.block_bytes() as usize, encoding.block_elements() as usize);
    let fits = encoding.decodes()
        && bytes.len().is_multiple_of(block_bytes)
        && bytes.len() / block_bytes * block_elements == out.len();
    if !fits {
        return Err(FormatError::Blocks {
            encoding,
            bytes: bytes.len(),
            elements: out.len(),
        });
    }
    match encoding {
        Encoding::F32 => blocks(bytes, out, float::f32),
        Encoding::F16 => float::f16(bytes, out),
        Encoding::Bf16 => blocks(bytes, out, float::bf16),
        Encoding::Block(block) => block.decode_blocks(bytes, out),
        Encoding::Opaque(_) | Encoding::Unknown(_) => {}
    }
    Ok(())
}

/// Applies `decode` to each block of `BYTES` bytes and `ELEMENTS` elements.
fn blocks<const BYTES: usize, const ELEMENTS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    for (block, out) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        decode(block, out);
    }
}
