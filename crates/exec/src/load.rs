//! Weights from files: read by `pread` into a planned staging buffer and decoded into the arena, or read straight into it. There is
//! never a second copy of a tensor, and nothing is mapped, so a file that is cut short meanwhile is an error and no fault.

use tightfit_format::{Checkpoint, Encoding, Entry, FormatError, decode};
use tightfit_ir::{Binding, DType, Graph, OutputKind, Role, Routine, Type};

use crate::persistent::{Piece, TensorError, add_staging};
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

impl Fill<'_> {
    /// Whether the file's bytes are the tensor's.
    fn is_direct(&self) -> bool {
        self.entry.encoding == Encoding::F32 && self.interleaved_heads.is_none()
    }
}

/// The routine in which `fills` are loaded and all `persistent` tensors filled: with a staging buffer where a tensor is not in its
/// file as it will be in memory, and another where it will be on the lower tier.
pub fn routine<'a>(fills: &[Fill<'_>], persistent: impl Iterator<Item = &'a Type>) -> Routine {
    let staged = fills.iter().filter(|fill| !fill.is_direct());
    let largest = staged.map(|fill| fill.entry.bytes()).max();
    let mut graph = Graph::new();
    if let Some(largest) = largest {
        let bytes = largest.next_multiple_of(4).min(STAGING_BYTES);
        let ty = Type::new(DType::U8, [bytes]);
        let staging = graph.input(STAGING, ty, Role::HostStage, Binding::Fed);
        graph.output(STAGING, staging, OutputKind::Read);
    }
    add_staging(&mut graph, persistent);
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
    session.fill(&fill.weight, |piece| {
        let Piece {
            first, values, staging, ..
        } = piece;
        let most = match fill.is_direct() {
            true => STAGING_BYTES / block_bytes,
            false => staging.len() as u64 / block_bytes,
        };
        // Rows, pieces and chunks hold whole blocks.
        let mut done = 0;
        while done < values.len() {
            let (row, within) = rows.find(first + done as u64);
            let left = (rows.elements - within).min((values.len() - done) as u64) / block_elements;
            let blocks = left.min(most);
            let from = row * rows.bytes + within / block_elements * block_bytes;
            let values = &mut values[done..done + (blocks * block_elements) as usize];
            if fill.is_direct() {
                checkpoint.read(entry, from, bytes_of(values))?;
            } else {
                // The buffer's end, so that its last word is written, as workspaces' are.
                let encoded = staging.len() - (blocks * block_bytes) as usize..;
                let encoded = &mut staging[encoded];
                checkpoint.read(entry, from, encoded)?;
                decode(entry.encoding, encoded, values)?;
            }
            if let Some((index, &value)) = values.iter().enumerate().find(|(_, value)| !value.is_finite()) {
                return Err(LoadError::NotFinite {
                    tensor: entry.name.clone(),
                    index: row * rows.elements + within + index as u64,
                    value,
                });
            }
            done += values.len();
            progress(blocks * block_bytes);
        }
        Ok(())
    })
}

/// Floats as files hold them: little-endian.
fn bytes_of(values: &mut [f32]) -> &mut [u8] {
    const { assert!(cfg!(target_endian = "little"), "tensors in files are little-endian") };
    // SAFETY: floats are plain bytes, any bytes are a float, and a byte has no alignment.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

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
