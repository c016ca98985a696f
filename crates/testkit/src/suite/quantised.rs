//! Quantised operands: bytes of a matrix, and the numbers that they stand for.

use tightfit_ir::{DType, Op, Tensor, Type};
use tightfit_quant::{Block, Encoder};

use super::{Cases, Operand};

/// A quantised operand of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantised {
    /// Which operand it is.
    pub operand: usize,
    /// Its bytes. The case's tensor holds the numbers that they stand for.
    pub bytes: Vec<u8>,
}

impl Cases {
    /// A matrix in that format whose values have about that spread, and its bytes.
    pub(super) fn quantised(&mut self, block: Block, shape: [u64; 2], std: f64) -> (Operand, Vec<u8>) {
        let [rows, cols] = shape.map(|dim| dim as usize);
        let mut values: Vec<f32> = self.rng.tensor(shape, std).data.iter().map(|&x| x as f32).collect();
        let mut bytes = vec![0; block.bytes(shape[0], shape[1]) as usize];
        if block.encodes() {
            let mut scratch = vec![0.0; block.scratch_floats(shape[0], shape[1]) as usize];
            let mut encoder = Encoder::new(block, rows, cols, &mut bytes, &mut scratch);
            encoder.push(&values);
            encoder.finish();
        } else {
            bytes.fill_with(|| self.rng.below(256) as u8);
            self.scale(block, &mut bytes, std);
        }
        block.decode(&bytes, rows, cols, 0, &mut values);
        let tensor = Tensor::new(shape, values.into_iter().map(f64::from).collect());
        ((Type::new(DType::Block(block), shape), tensor), bytes)
    }

    /// Gives random blocks of `ggml`'s formats scales at which their values have about that spread; all other bytes are codes, of which
    /// any will do.
    fn scale(&mut self, block: Block, bytes: &mut [u8], std: f64) {
        // Where the `f16` scale is, whether one of the minima follows, and the largest code times the largest inner scale.
        let (at, minimum, largest) = match block {
            Block::Q8_0 => (0, false, 127.0),
            Block::Q4K => (0, true, 15.0 * 63.0),
            _ => panic!("the suite has no random {block}"),
        };
        let size = block.bytes(1, block.row_multiple()) as usize;
        for bytes in bytes.chunks_exact_mut(size) {
            let scale = 2.0 * std / largest * (0.5 + self.rng.unit());
            bytes[at..at + 2].copy_from_slice(&half::f16::from_f64(scale).to_le_bytes());
            if minimum {
                let minimum = std / 63.0 * self.rng.unit();
                bytes[at + 2..at + 4].copy_from_slice(&half::f16::from_f64(minimum).to_le_bytes());
            }
        }
    }

    /// [`add`](Cases::add) with one operand quantised.
    pub(super) fn add_quantised(
        &mut self,
        name: &str,
        op: impl Into<Op>,
        operands: Vec<Operand>,
        quantised: Quantised,
    ) {
        let first = self.made.len();
        self.add(name, op, operands);
        for case in &mut self.made[first..] {
            case.quantised = Some(quantised.clone());
        }
    }
}
