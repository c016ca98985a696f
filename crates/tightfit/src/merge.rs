//! Merging: the weights of a model with an adapter added to them, `W + scaling·B·A`, streamed from file to file.
//!
//! A few rows are in memory at a time, with one layer's adapter; of a model in int8, int4 or NF4 also one tensor as its file has it. Sums are in `f32`; what is written is rounded once, to what the
//! model's file stores, or to `bf16` where that is quantised.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use tightfit_exec::checkpoint::{self, SaveError};
use tightfit_exec::load::{Fill, LoadError};
use tightfit_format::safetensors::Layout;
use tightfit_format::{Checkpoint, Encoding, Entry, FormatError, encode};

use crate::adapters::Adapter;
use crate::pretrained::Pretrained;

/// Elements that are in memory at one time, if a row has no more.
const ELEMENTS: usize = 1 << 18;
/// Bytes of a file that are read at a time: at least a block.
const STAGING: usize = 1 << 18;

/// The encoding in which a tensor of a model is written.
fn written(encoding: Encoding) -> Encoding {
    match encoding {
        Encoding::F32 | Encoding::F16 | Encoding::Bf16 => encoding,
        _ => Encoding::Bf16,
    }
}

/// The `dtype` of a `config.json` for weights that are stored like most of these.
pub fn dtype(model: &Pretrained) -> &'static str {
    let largest = model.weights().into_iter().max_by_key(|fill| fill.entry.elements());
    match largest.map_or(Encoding::Bf16, |fill| written(fill.entry.encoding)) {
        Encoding::F32 => "float32",
        Encoding::F16 => "float16",
        _ => "bfloat16",
    }
}

/// That an adapter's numbers are finite.
///
/// # Errors
/// The first that is not, or a file that cannot be read.
pub fn check(adapter: &Adapter) -> Result<(), LoadError> {
    for entry in adapter.checkpoint().tensors().values() {
        let values = floats(adapter.checkpoint(), entry)?;
        if let Some((index, &value)) = values.iter().enumerate().find(|(_, value)| !value.is_finite()) {
            return Err(LoadError::NotFinite {
                tensor: entry.name.clone(),
                index: index as u64,
                value,
            });
        }
    }
    Ok(())
}

/// All of a tensor.
fn floats(file: &Checkpoint, entry: &Entry) -> Result<Vec<f32>, FormatError> {
    let mut values = vec![0.0; entry.elements() as usize];
    let mut staging = vec![0; STAGING];
    file.read_f32(entry, 0, &mut staging, &mut values)?;
    Ok(values)
}

/// Writes the weights of a model and its adapter, if it has one, to a safetensors file, whole or not at all: what was there before stays
/// until they are complete and `others`, the files beside it, are written. `progress` is told of more bytes of the model. Gives the bytes
/// of the tensors.
///
/// # Errors
/// A file cannot be read or written, or a sum is no finite number.
pub fn merge(
    model: &Pretrained,
    path: &Path,
    mut progress: impl FnMut(u64),
    others: impl FnOnce() -> io::Result<()>,
) -> Result<u64, SaveError> {
    let fills: HashMap<String, Fill<'_>> = model
        .weights()
        .into_iter()
        .map(|fill| (fill.weight.clone(), fill))
        .collect();
    let mut layout = Layout::default();
    for fill in model.weights() {
        let pushed = layout.push(&fill.weight, written(fill.entry.encoding), &fill.entry.shape);
        pushed.map_err(|problem| SaveError {
            path: path.to_owned(),
            source: io::Error::other(problem),
        })?;
    }
    let layout = layout.finish(&[("format", "pt")]);
    checkpoint::replace(path, |file| {
        let mut writer = Writer {
            file,
            values: Vec::new(),
            staging: vec![0; STAGING],
            bytes: Vec::new(),
        };
        writer.file.write_all(layout.header())?;
        for fill in layout.entries().iter().filter_map(|entry| fills.get(&entry.name)) {
            let branch = model.adapter().map(|adapter| Branch::of(adapter, &fill.weight));
            let branch = branch.transpose().map_err(io::Error::other)?.flatten();
            writer.tensor(model.checkpoint(), fill, branch.as_ref())?;
            progress(fill.entry.bytes());
        }
        others()
    })?;
    Ok(layout.entries().iter().map(Entry::bytes).sum())
}

/// One layer's adapter in memory.
struct Branch {
    scaling: f32,
    rank: usize,
    /// `[rank, columns]`.
    a: Vec<f32>,
    /// `[rows, rank]`.
    b: Vec<f32>,
}

impl Branch {
    /// The adapter of a weight; `None` where it has none.
    fn of(adapter: &Adapter, weight: &str) -> Result<Option<Self>, FormatError> {
        let Some([a, b]) = weight.strip_suffix(".weight").and_then(|layer| adapter.matrices(layer)) else {
            return Ok(None);
        };
        Ok(Some(Self {
            scaling: adapter.config().scaling() as f32,
            rank: adapter.config().rank as usize,
            a: floats(adapter.checkpoint(), a)?,
            b: floats(adapter.checkpoint(), b)?,
        }))
    }

    /// Adds row `row` of `scaling·B·A`.
    fn add(&self, row: usize, values: &mut [f32]) {
        let b = &self.b[row * self.rank..][..self.rank];
        for (b, a) in b.iter().zip(self.a.chunks_exact(values.len())) {
            let factor = self.scaling * b;
            values.iter_mut().zip(a).for_each(|(value, a)| *value += factor * a);
        }
    }
}

/// The file, and buffers that all tensors share.
struct Writer<'a> {
    file: &'a File,
    values: Vec<f32>,
    staging: Vec<u8>,
    bytes: Vec<u8>,
}

impl Writer<'_> {
    /// One tensor, some rows at a time.
    fn tensor(&mut self, model: &Checkpoint, fill: &Fill<'_>, branch: Option<&Branch>) -> io::Result<()> {
        let entry = fill.entry;
        let columns = entry.row_elements() as usize;
        let rows = entry.elements().checked_div(columns as u64).unwrap_or(0);
        let most = (ELEMENTS / columns.max(1)).max(1) as u64;
        // Where scales stand apart from codes, all of its bytes are read once.
        let bytes = entry.bytes() as usize;
        let apart = match entry.encoding {
            Encoding::Block(block) if block.encodes() => {
                self.staging.resize(bytes.max(STAGING), 0);
                let read = model.read(entry, 0, &mut self.staging[..bytes]);
                read.map_err(io::Error::other)?;
                Some(block)
            }
            _ => None,
        };
        let mut first = 0;
        while first < rows {
            let count = most.min(rows - first);
            self.values.resize(count as usize * columns, 0.0);
            for (row, values) in (first..).zip(self.values.chunks_exact_mut(columns)) {
                let from = fill.file_row(row) * columns as u64;
                match apart {
                    Some(block) => block.decode(&self.staging[..bytes], rows as usize, columns, from as usize, values),
                    None => {
                        let read = model.read_f32(entry, from, &mut self.staging, values);
                        read.map_err(io::Error::other)?;
                    }
                }
                if let Some(branch) = branch {
                    branch.add(row as usize, values);
                }
            }
            self.write(fill, first * columns as u64)?;
            first += count;
        }
        Ok(())
    }

    /// The values, rounded; the first is element `first` of the tensor.
    fn write(&mut self, fill: &Fill<'_>, first: u64) -> io::Result<()> {
        let encoding = written(fill.entry.encoding);
        let is_finite = |value: f32| match encoding {
            Encoding::F16 => half::f16::from_f32(value).is_finite(),
            Encoding::Bf16 => half::bf16::from_f32(value).is_finite(),
            _ => value.is_finite(),
        };
        if let Some(index) = self.values.iter().position(|&value| !is_finite(value)) {
            let (value, index) = (self.values[index], first + index as u64);
            let message = format!(
                "`{}` is {value} at element {index}, as {} no finite number",
                fill.weight,
                encoding.name()
            );
            return Err(io::Error::other(message));
        }
        let bytes = self.values.len() * encoding.block_bytes() as usize;
        self.bytes.resize(bytes, 0);
        encode(encoding, &self.values, &mut self.bytes).map_err(io::Error::other)?;
        self.file.write_all(&self.bytes)
    }
}
