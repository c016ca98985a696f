//! GGUF, versions 2 and 3, little-endian.
//!
//! A header (magic, version, counts), metadata as keys and typed values, a list of tensors, padding, and the data of the tensors, each
//! at a multiple of `general.alignment`. Version 3 differs from 2 only in allowing big-endian files. The specification is
//! `docs/gguf.md` of `ggml-org/ggml`.

mod metadata;
mod read;

use std::{collections::BTreeMap, io::Read, path::Path};

pub use metadata::{Array, Metadata, Value};

use crate::{Contents, Encoding, Entry, FormatError, Problem, entry::MAX_RANK, error::quoted, source::Source};

/// Where tensors begin if the file does not say: at multiples of 32 bytes.
const DEFAULT_ALIGNMENT: u64 = 32;

/// The header of a GGUF file.
#[derive(Debug)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Keys and values.
    pub metadata: Metadata,
    /// The tensors by name. Their bytes lie inside the file and do not overlap.
    pub tensors: BTreeMap<String, Entry>,
}

/// Reads the header of a GGUF file: everything before the tensors' data.
///
/// `reader` stands at the start of the file and is best buffered; `len` is the size of the whole file in bytes; `path` is for errors.
/// Memory is bounded by a small multiple of `len`, whatever the file claims.
///
/// # Errors
/// A reader that fails, and every break of the format: which key or tensor, and the byte offset at which reading stopped.
pub fn parse<R: Read>(mut reader: R, len: u64, path: &Path) -> Result<Header, FormatError> {
    let mut start = Vec::with_capacity(Contents::LOOK);
    reader
        .by_ref()
        .take(Contents::LOOK as u64)
        .read_to_end(&mut start)
        .map_err(|e| FormatError::io(path, e))?;
    let contents = Contents::of(&start);
    if contents != Contents::Gguf {
        return Err(FormatError::Mistaken {
            path: path.to_owned(),
            expected: "a GGUF file",
            contents,
        });
    }

    let mut source = Source::new(start.as_slice().chain(reader), len, path);
    source.array::<4>()?;
    let version = source.u32()?;
    if !matches!(version, 2 | 3) {
        let problem = match version.swap_bytes() {
            1..=3 => Problem::BigEndian,
            _ => Problem::Version(version),
        };
        return Err(source.error(problem));
    }
    let tensor_count = source.u64()?;
    let key_count = source.u64()?;
    // The smallest: an empty key and a byte; an empty name and no dimension.
    source.check_count(tensor_count, "tensors", 8 + 4 + 4 + 8)?;
    source.check_count(key_count, "metadata keys", 8 + 4 + 1)?;

    let metadata = read::metadata(&mut source, key_count)?;
    if let Some(parts) = metadata.u64("split.count")?.filter(|&parts| parts > 1) {
        return Err(FormatError::corrupt(path, "key `split.count`", Problem::Split(parts)));
    }
    let alignment = alignment(&metadata, path)?;
    source.at("tensor list");
    source.check_count(tensor_count, "tensors", 8 + 4 + 4 + 8)?;
    let mut tensors = BTreeMap::new();
    for index in 0..tensor_count {
        let entry = tensor(&mut source, index, alignment)?;
        if tensors.contains_key(&entry.name) {
            return Err(source.error(Problem::Duplicate));
        }
        tensors.insert(entry.name.clone(), entry);
    }
    place(&mut tensors, source.position().next_multiple_of(alignment), len, path)?;
    Ok(Header {
        version,
        metadata,
        tensors,
    })
}

fn alignment(metadata: &Metadata, path: &Path) -> Result<u64, FormatError> {
    match metadata.u64("general.alignment")? {
        None => Ok(DEFAULT_ALIGNMENT),
        // The type of the key is u32, so that rounding up to a multiple cannot overflow.
        Some(n) if n.is_power_of_two() && n <= u32::MAX.into() => Ok(n),
        Some(n) => Err(FormatError::corrupt(
            path,
            "key `general.alignment`",
            Problem::Value {
                what: "the alignment",
                value: n.to_string(),
                rule: "a power of two below 2^32".into(),
            },
        )),
    }
}

/// An item of the tensor list. Its offset is relative to the data still.
fn tensor<R: Read>(source: &mut Source<'_, R>, index: u64, alignment: u64) -> Result<Entry, FormatError> {
    source.at(format!("tensor {index}"));
    let name = read::string(source, "the name of a tensor")?;
    source.at(format!("tensor {}", quoted(&name)));
    let rank = source.u32()?;
    if rank as usize > MAX_RANK {
        let rule = format!("at most {MAX_RANK}");
        return Err(source.error(Problem::Value {
            what: "the number of dimensions",
            value: rank.to_string(),
            rule,
        }));
    }
    let mut shape = Vec::with_capacity(rank as usize);
    for _ in 0..rank {
        shape.push(source.u64()?);
    }
    shape.reverse();
    let encoding = Encoding::from_ggml(source.u32()?);
    let offset = source.u64()?;
    let bytes = Entry::size(&shape, encoding).map_err(|problem| source.error(problem))?;
    let block = encoding.block_elements();
    let entry = Entry {
        name,
        encoding,
        shape,
        file: 0,
        offset,
        bytes,
    };
    if !entry.row_elements().is_multiple_of(block) {
        return Err(source.error(Problem::PartialBlock {
            shape: entry.shape,
            encoding,
            block,
        }));
    }
    if !offset.is_multiple_of(alignment) {
        let rule = format!("a multiple of the alignment, {alignment}");
        return Err(source.error(Problem::Value {
            what: "the offset of its data",
            value: offset.to_string(),
            rule,
        }));
    }
    Ok(entry)
}

/// Turns offsets into those of the file, and checks that data is inside it and that no two tensors share bytes.
fn place(tensors: &mut BTreeMap<String, Entry>, data: u64, len: u64, path: &Path) -> Result<(), FormatError> {
    let mut order: Vec<&mut Entry> = tensors.values_mut().collect();
    order.sort_unstable_by_key(|e| (e.offset, e.bytes));
    let room = len.saturating_sub(data);
    for i in 0..order.len() {
        let next = order.get(i + 1).map_or(room, |next| next.offset);
        let entry = &mut order[i];
        if entry.encoding.block_bytes() == 0 {
            // Of a type of unknown size: all that no other tensor claims. An element takes something.
            entry.bytes = next.saturating_sub(entry.offset).max(entry.elements().min(1));
        }
        let problem = match entry.offset.checked_add(entry.bytes) {
            Some(end) if end <= room => (end > next).then(|| Problem::Overlap(quoted(&order[i + 1].name))),
            _ => Some(Problem::Truncated {
                needed: order[i].bytes,
                left: room.saturating_sub(order[i].offset),
            }),
        };
        let entry = &mut order[i];
        let place = || {
            format!(
                "tensor {} (byte {})",
                quoted(&entry.name),
                data.saturating_add(entry.offset)
            )
        };
        if let Some(problem) = problem {
            return Err(FormatError::corrupt(path, place(), problem));
        }
        // A file that has only empty tensors may end before the padding does.
        entry.offset = (data + entry.offset).min(len);
    }
    Ok(())
}
