//! Weights from files: read by `pread` into a planned staging buffer and decoded into the arena, or read straight into it. There is
//! never a second copy of a tensor, and nothing is mapped, so a file that is cut short meanwhile is an error and no fault.

use tightfit_format::{Checkpoint, Encoding, Entry, FormatError, decode};
use tightfit_ir::{Binding, DType, Graph, OutputKind, Role, Routine, Type};

use crate::session::Session;

/// The routine, and its program, during which weights are read.
pub const LOAD: &str = "load";

/// The staging buffer's name.
const STAGING: &str = "staging";

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
    /// The plan has no such weight.
    #[error("the plan has no weight `{0}`")]
    Weight(String),
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

impl Fill<'_> {
    /// Whether the file's bytes are the tensor's.
    fn is_direct(&self) -> bool {
        self.entry.encoding == Encoding::F32 && self.interleaved_heads.is_none()
    }
}

/// The routine in which `fills` are loaded: a staging buffer, where one of them is not in the file as it will be in memory.
pub fn routine(fills: &[Fill<'_>]) -> Routine {
    let staged = fills.iter().filter(|fill| !fill.is_direct());
    let largest = staged.map(|fill| fill.entry.bytes()).max();
    let mut graph = Graph::new();
    if let Some(largest) = largest {
        let bytes = largest.next_multiple_of(4).min(STAGING_BYTES);
        let ty = Type::new(DType::U8, [bytes]);
        let staging = graph.input(STAGING, ty, Role::HostStage, Binding::Fed);
        graph.output(STAGING, staging, OutputKind::Read);
    }
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
            .ok_or_else(|| LoadError::Weight(fill.weight.clone()))?;
        if expected.shape.dims() != fill.entry.shape {
            return Err(LoadError::Shape {
                tensor: fill.entry.name.clone(),
                found: fill.entry.shape.clone(),
                weight: fill.weight.clone(),
                expected: expected.shape.dims().to_vec(),
            });
        }
        tensor(session, checkpoint, fill, &mut progress)?;
    }
    Ok(())
}

/// One tensor, in chunks of whole blocks.
fn tensor(
    session: &mut Session,
    checkpoint: &Checkpoint,
    fill: &Fill<'_>,
    progress: &mut impl FnMut(u64),
) -> Result<(), LoadError> {
    let entry = fill.entry;
    checkpoint.floats(&entry.name)?;
    let rows = Rows::of(fill);
    let (block_elements, block_bytes) = (entry.encoding.block_elements(), entry.encoding.block_bytes());
    for row in 0..rows.count {
        // Blocks of this row that are done.
        let mut done = 0;
        let blocks_of_row = rows.bytes / block_bytes;
        while done < blocks_of_row {
            let from = row * rows.bytes + done * block_bytes;
            let to = (rows.place(row) * rows.elements + done * block_elements) as usize;
            let left = blocks_of_row - done;
            let (blocks, values) = if fill.is_direct() {
                let blocks = left.min(STAGING_BYTES / block_bytes);
                let weight = session.persistent_mut(&fill.weight).unwrap_or_default();
                let values = &mut weight[to..to + (blocks * block_elements) as usize];
                checkpoint.read(entry, from, bytes_of(values))?;
                (blocks, values)
            } else {
                let (staging, weight) = session
                    .staged(LOAD, STAGING, &fill.weight)
                    .ok_or_else(|| LoadError::Weight(STAGING.to_owned()))?;
                let blocks = left.min(staging.len() as u64 / block_bytes);
                // The buffer's end, so that its last word is written, as workspaces' are.
                let encoded = staging.len() - (blocks * block_bytes) as usize..;
                let encoded = &mut staging[encoded];
                checkpoint.read(entry, from, encoded)?;
                let values = &mut weight[to..to + (blocks * block_elements) as usize];
                decode(entry.encoding, encoded, values)?;
                (blocks, values)
            };
            if let Some((index, &value)) = values.iter().enumerate().find(|(_, value)| !value.is_finite()) {
                return Err(LoadError::NotFinite {
                    tensor: entry.name.clone(),
                    index: row * rows.elements + done * block_elements + index as u64,
                    value,
                });
            }
            done += blocks;
            progress(blocks * block_bytes);
        }
    }
    Ok(())
}

/// Floats as files hold them: little-endian.
fn bytes_of(values: &mut [f32]) -> &mut [u8] {
    const { assert!(cfg!(target_endian = "little"), "tensors in files are little-endian") };
    // SAFETY: floats are plain bytes, any bytes are a float, and a byte has no alignment.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// How a tensor is walked: as one row, unless rows change places.
struct Rows {
    count: u64,
    /// Of a row in the file.
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
                count: rows,
                bytes: fill.entry.bytes() / rows,
                elements: elements / rows,
                head_dim: rows / heads,
            },
            _ => Self {
                count: 1,
                bytes: fill.entry.bytes(),
                elements,
                head_dim: 0,
            },
        }
    }

    /// The model's row that is the file's row `row`.
    fn place(&self, row: u64) -> u64 {
        let Some(head) = row.checked_div(self.head_dim) else {
            return row;
        };
        let within = row % self.head_dim;
        head * self.head_dim + within % 2 * (self.head_dim / 2) + within / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_go_to_their_halves() {
        let rows = Rows {
            count: 8,
            bytes: 4,
            elements: 1,
            head_dim: 4,
        };
        let places: Vec<_> = (0..8).map(|row| rows.place(row)).collect();
        assert_eq!(places, [0, 2, 1, 3, 4, 6, 5, 7]);
    }
}
