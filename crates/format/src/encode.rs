//! `f32` to the bytes of a tensor of floats.

use half::{bf16, f16};

use crate::{Encoding, FormatError};

/// Encodes `values` as F32, F16 or BF16, rounded to the nearest, ties to even. Allocates nothing.
///
/// # Errors
/// [`FormatError::Blocks`] where the lengths do not belong together, and for any other encoding.
pub fn encode(encoding: Encoding, values: &[f32], out: &mut [u8]) -> Result<(), FormatError> {
    let fits = out.len() as u64 == values.len() as u64 * encoding.block_bytes();
    match encoding {
        Encoding::F32 if fits => each(values, out, f32::to_le_bytes),
        Encoding::F16 if fits => each(values, out, |x| f16::from_f32(x).to_le_bytes()),
        Encoding::Bf16 if fits => each(values, out, |x| bf16::from_f32(x).to_le_bytes()),
        _ => {
            return Err(FormatError::Blocks {
                encoding,
                bytes: out.len(),
                elements: values.len(),
            });
        }
    }
    Ok(())
}

fn each<const BYTES: usize>(values: &[f32], out: &mut [u8], encode: impl Fn(f32) -> [u8; BYTES]) {
    for (bytes, &x) in out.as_chunks_mut().0.iter_mut().zip(values) {
        *bytes = encode(x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Block, decode};

    #[test]
    fn floats_come_back() {
        let values = [1.0, -0.5, 65504.0, 0.0];
        for (encoding, size) in [(Encoding::F32, 4), (Encoding::F16, 2), (Encoding::Bf16, 2)] {
            let mut bytes = vec![0; values.len() * size];
            encode(encoding, &values, &mut bytes).unwrap();
            let mut back = [0.0; 4];
            decode(encoding, &bytes, &mut back).unwrap();
            // 65504 has more bits than BF16.
            let largest = if encoding == Encoding::Bf16 { 65536.0 } else { 65504.0 };
            assert_eq!(back, [1.0, -0.5, largest, 0.0]);
            assert!(encode(encoding, &values, &mut bytes[1..]).is_err());
        }
        assert!(encode(Encoding::Block(Block::Q8_0), &[0.0; 32], &mut [0; 34]).is_err());
    }
}
