//! Weights from files: read by `pread` into a planned staging buffer and decoded into the arena, or read straight into it. There is
//! never a second copy of a tensor, and nothing is mapped, so a file that is cut short meanwhile is an error and no fault.

use std::collections::HashMap;

use tightfit_format::{Checkpoint, Encoding, Entry, FormatError, decode};
use tightfit_ir::{Binding, Block, DType, Graph, OutputKind, Role, Routine, Type};

use crate::persistent::{Piece, TensorError, add_conversion, add_staging, no_way};
use crate::session::Session;

/// The routine, and its program, during which weights are read.
pub const LOAD: &str = "load";

/// The staging buffer's name.
pub(crate) const STAGING: &str = "staging";

/// Most bytes of the staging buffer: long reads, and still small beside any model.
const STAGING_BYTES: u64 = 1 << 20;

/// Why weights cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The file's tensor is not what the model has there.
    #[error("tensor `{tensor}` has shape {found:?}, the model's `{weight}` has {expected:?}")]
    Shape {
        /// In the file.
        tensor: String,
        /// As the file says.
        found: Vec<u64>,
        /// In the model.
        weight: String,
        /// As the model says.
        expected: Vec<u64>,
    },
    /// The plan has no such weight, or no way to it.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// An infinity or NaN, which no training survives.
    #[error(
        "tensor `{tensor}` has the value {value} at element {index}: the file is damaged, or its training diverged"
    )]
    NotFinite {
        /// In the file.
        tensor: String,
        /// Where.
        index: u64,
        /// What.
        value: f32,
    },
}

/// A weight and the tensor that fills it.
#[derive(Clone, Debug)]
pub struct Fill<'a> {
    /// The persistent tensor.
    pub weight: String,
    /// The file's tensor.
    pub entry: &'a Entry,
    /// Rows of this many heads, each stored with its halves interleaved: GGUF's order of rotary weights. Row `2·i + j` of a head of
    /// `D` rows is row `j·D/2 + i` of the model's.
    pub interleaved_heads: Option<u64>,
}

/// How a file's tensor becomes a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Its bytes are the weight's, whole rows of them in another order where heads are interleaved.
    Copy,
    /// Its numbers are decoded some blocks at a time.
    Decode,
    /// Its numbers are decoded once all of its bytes are there, as its scales stand apart from its codes.
    DecodeWhole(Block),
}

impl Fill<'_> {
    /// The row of the file's tensor that is row `row` of the weight.
    pub fn file_row(&self, row: u64) -> u64 {
        Rows::of(self).row(row)
    }

    /// How it fills a weight of that dtype.
    fn way(&self, dtype: DType) -> Way {
        let stored = stored(self.entry.encoding);
        match stored {
            _ if stored == Some(dtype) => Way::Copy,
            Some(DType::Block(block)) if block.independent().is_none() => Way::DecodeWhole(block),
            _ => Way::Decode,
        }
    }

    /// Bytes of the file's tensor that must be at hand at one time.
    fn staged_bytes(&self, dtype: DType) -> u64 {
        match self.way(dtype) {
            Way::Copy => 0,
            Way::Decode => self.entry.bytes().min(STAGING_BYTES),
            Way::DecodeWhole(_) => self.entry.bytes(),
        }
    }
}

/// The dtype whose tensors have the bytes of that encoding.
pub fn stored(encoding: Encoding) -> Option<DType> {
    match encoding {
        Encoding::F32 => Some(DType::F32),
        Encoding::Bf16 => Some(DType::Bf16),
        Encoding::F16 => Some(DType::F16),
        Encoding::Block(block) => Some(DType::Block(block)),
        // Bytes are bytes: the optimizer's 8-bit state.
        Encoding::Opaque(_) if encoding.name() == "U8" => Some(DType::U8),
        Encoding::Opaque(_) | Encoding::Unknown(_) => None,
    }
}

/// The routine in which `fills` are loaded and all `persistent` tensors filled: with staging buffers where a tensor is not in its
/// file as it will be in memory, where it is stored in few bits, and where it will be on the lower tier.
pub fn routine<'a>(fills: &[Fill<'_>], persistent: impl Iterator<Item = (&'a str, &'a Type)> + Clone) -> Routine {
    let filled: HashMap<&str, &Fill<'_>> = fills.iter().map(|fill| (&*fill.weight, fill)).collect();
    let staged = persistent
        .clone()
        .filter_map(|(name, ty)| Some(filled.get(name)?.staged_bytes(ty.dtype)));
    let mut graph = Graph::new();
    if let Some(largest) = staged.max().filter(|&bytes| bytes > 0) {
        let ty = Type::new(DType::U8, [largest.next_multiple_of(4)]);
        let staging = graph.input(STAGING, ty, Role::HostStage, Binding::Fed);
        graph.output(STAGING, staging, OutputKind::Read);
    }
    add_staging(&mut graph, persistent.clone().map(|(_, ty)| ty));
    let made = persistent.filter(|(name, ty)| filled.get(name).is_none_or(|fill| fill.way(ty.dtype) != Way::Copy));
    add_conversion(&mut graph, made.map(|(_, ty)| ty));
    Routine::of(LOAD, graph)
}

/// Fills weights; `progress` is told how many more bytes were read.
///
/// # Errors
/// A file cannot be read, or a tensor does not fit its weight.
pub fn load(
    session: &mut Session,
    checkpoint: &Checkpoint,
    fills: &[Fill<'_>],
    mut progress: impl FnMut(u64),
) -> Result<(), LoadError> {
    for fill in fills {
        let expected = session
            .persistent_type(&fill.weight)
            .ok_or_else(|| TensorError::Missing(fill.weight.clone()))?;
        if expected.shape.dims() != fill.entry.shape {
            return Err(LoadError::Shape {
                tensor: fill.entry.name.clone(),
                found: fill.entry.shape.clone(),
                weight: fill.weight.clone(),
                expected: expected.shape.dims().to_vec(),
            });
        }
        let ty = expected.clone();
        tensor(session, checkpoint, fill, &ty, &mut progress)?;
    }
    Ok(())
}

/// One tensor.
fn tensor(
    session: &mut Session,
    checkpoint: &Checkpoint,
    fill: &Fill<'_>,
    ty: &Type,
    progress: &mut impl FnMut(u64),
) -> Result<(), LoadError> {
    match fill.way(ty.dtype) {
        Way::Copy => copy(session, checkpoint, fill, ty, progress),
        Way::Decode => decoded(session, checkpoint, fill, progress),
        Way::DecodeWhole(block) => decoded_whole(session, checkpoint, fill, block, progress),
    }
}

/// A tensor whose bytes are the weight's.
fn copy(
    session: &mut Session,
    checkpoint: &Checkpoint,
    fill: &Fill<'_>,
    ty: &Type,
    progress: &mut impl FnMut(u64),
) -> Result<(), LoadError> {
    let entry = fill.entry;
    let rows = Rows::of(fill);
    session.fill_bytes(&fill.weight, |first, bytes| {
        let mut done = 0;
        while done < bytes.len() {
            let at = first + done as u64;
            let (row, within) = (rows.row(at / rows.bytes), at % rows.bytes);
            let count = (rows.bytes - within)
                .min((bytes.len() - done) as u64)
                .min(STAGING_BYTES);
            let part = &mut bytes[done..done + count as usize];
            checkpoint.read(entry, row * rows.bytes + within, part)?;
            done += part.len();
            progress(count);
        }
        check_finite(fill, ty, first, bytes)
    })
}

/// A tensor that is decoded in chunks of whole blocks.
fn decoded(
    session: &mut Session,
    checkpoint: &Checkpoint,
    fill: &Fill<'_>,
    progress: &mut impl FnMut(u64),
) -> Result<(), LoadError> {
    let entry = fill.entry;
    checkpoint.floats(&entry.name)?;
    let rows = Rows::of(fill);
    let (block_elements, block_bytes) = (entry.encoding.block_elements(), entry.encoding.block_bytes());
    session.fill(&fill.weight, |piece| {
        let Piece {
            first, values, staging, ..
        } = piece;
        let most = staging.len() as u64 / block_bytes;
        // Rows, pieces and chunks hold whole blocks.
        let mut done = 0;
        while done < values.len() {
            let (row, within) = rows.find(first + done as u64);
            let left = (rows.elements - within).min((values.len() - done) as u64) / block_elements;
            let blocks = left.min(most);
            if blocks == 0 {
                return Err(no_way(&fill.weight, LOAD).into());
            }
            let from = row * rows.bytes + within / block_elements * block_bytes;
            let values = &mut values[done..done + (blocks * block_elements) as usize];
            // The buffer's end, so that its last word is written, as workspaces' are.
            let encoded = staging.len() - (blocks * block_bytes) as usize..;
            let encoded = &mut staging[encoded];
            checkpoint.read(entry, from, encoded)?;
            decode(entry.encoding, encoded, values)?;
            check_values(fill, row * rows.elements + within, values)?;
            done += values.len();
            progress(blocks * block_bytes);
        }
        Ok(())
    })
}

/// A tensor whose scales stand apart from its codes.
fn decoded_whole(
    session: &mut Session,
    checkpoint: &Checkpoint,
    fill: &Fill<'_>,
    block: Block,
    progress: &mut impl FnMut(u64),
) -> Result<(), LoadError> {
    let entry = fill.entry;
    let cols = entry.shape.last().copied().unwrap_or(1);
    let rows = entry.elements() / cols.max(1);
    let mut there = false;
    session.fill(&fill.weight, |piece| {
        let from = piece.staging.len().checked_sub(entry.bytes() as usize);
        let from = from.ok_or_else(|| no_way(&fill.weight, LOAD))?;
        let bytes = &mut piece.staging[from..];
        if !std::mem::replace(&mut there, true) {
            checkpoint.read(entry, 0, bytes)?;
            progress(entry.bytes());
        }
        block.decode(bytes, rows as usize, cols as usize, piece.first as usize, piece.values);
        check_values(fill, piece.first, piece.values)
    })
}

/// That numbers, of which the first is the tensor's number `first`, are finite.
fn check_values(fill: &Fill<'_>, first: u64, values: &[f32]) -> Result<(), LoadError> {
    match values.iter().enumerate().find(|(_, value)| !value.is_finite()) {
        Some((index, &value)) => Err(LoadError::NotFinite {
            tensor: fill.entry.name.clone(),
            index: first + index as u64,
            value,
        }),
        None => Ok(()),
    }
}

/// That a weight's bytes, of which the first is its number `first`, are finite numbers.
fn check_finite(fill: &Fill<'_>, ty: &Type, first: u64, bytes: &[u8]) -> Result<(), LoadError> {
    const { assert!(cfg!(target_endian = "little"), "tensors in files are little-endian") };
    let mut values = [0.0; CHECKED];
    let mut check = |first: u64, count: usize, read: &mut dyn FnMut(&mut [f32])| {
        read(&mut values[..count]);
        check_values(fill, first, &values[..count])
    };
    match ty.dtype {
        DType::F32 => {
            for (index, part) in bytes.as_chunks::<4>().0.chunks(CHECKED).enumerate() {
                let number = first / 4 + (index * CHECKED) as u64;
                check(number, part.len(), &mut |values| {
                    values
                        .iter_mut()
                        .zip(part)
                        .for_each(|(x, &bytes)| *x = f32::from_le_bytes(bytes));
                })?;
            }
        }
        DType::Bf16 | DType::F16 => {
            for (index, part) in bytes.as_chunks::<2>().0.chunks(CHECKED).enumerate() {
                let number = first / 2 + (index * CHECKED) as u64;
                let is_bf16 = ty.dtype == DType::Bf16;
                check(number, part.len(), &mut |values| {
                    for (x, &bytes) in values.iter_mut().zip(part) {
                        *x = match is_bf16 {
                            true => half::bf16::from_le_bytes(bytes).to_f32(),
                            false => half::f16::from_le_bytes(bytes).to_f32(),
                        };
                    }
                })?;
            }
        }
        // A quantised tensor is there as a whole.
        DType::Block(block) => {
            let (rows, cols) = (ty.rows() as usize, ty.cols() as usize);
            for start in (0..rows * cols).step_by(CHECKED) {
                let count = CHECKED.min(rows * cols - start);
                check(start as u64, count, &mut |values| {
                    block.decode(bytes, rows, cols, start, values)
                })?;
            }
        }
        DType::I32 | DType::U8 => {}
    }
    Ok(())
}

/// Numbers that are looked at together: whole blocks of every format.
const CHECKED: usize = 1024;

/// How a tensor is walked: as one row, unless rows change places.
struct Rows {
    /// Bytes of a row in the file.
    bytes: u64,
    /// Of a row.
    elements: u64,
    /// Rows of a head; 0 where rows keep their places.
    head_dim: u64,
}

impl Rows {
    fn of(fill: &Fill<'_>) -> Self {
        let elements = fill.entry.shape.iter().product();
        let rows = fill.entry.shape.first().copied().unwrap_or(1);
        match fill.interleaved_heads {
            Some(heads) if heads > 0 && rows > 0 => Self {
                bytes: fill.entry.bytes() / rows,
                elements: elements / rows,
                head_dim: rows / heads,
            },
            _ => Self {
                bytes: fill.entry.bytes(),
                elements,
                head_dim: 0,
            },
        }
    }

    /// The file's row that holds an element of the model's tensor, and where in it.
    fn find(&self, element: u64) -> (u64, u64) {
        let (row, within) = (element / self.elements, element % self.elements);
        (self.row(row), within)
    }

    /// The file's row that is the model's row `row`.
    fn row(&self, row: u64) -> u64 {
        let Some(head) = row.checked_div(self.head_dim) else {
            return row;
        };
        let (within, half) = (row % self.head_dim, self.head_dim / 2);
        head * self.head_dim + within % half * 2 + within / half
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_come_from_interleaved_rows() {
        let rows = Rows {
            bytes: 4,
            elements: 1,
            head_dim: 4,
        };
        let places: Vec<_> = (0..8).map(|row| rows.row(row)).collect();
        assert_eq!(places, [0, 2, 1, 3, 4, 6, 5, 7]);
    }
}
