//! safetensors: one file.
//!
//! Eight bytes of header length, a JSON object from tensor names to `dtype`, `shape` and `data_offsets`, then the data, without gaps.
//! The specification is the README of `huggingface/safetensors`.

mod layout;
mod quantized;

use std::{collections::BTreeMap, fmt, io::Read, path::Path};

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::{Contents, Encoding, Entry, FormatError, Problem, entry::MAX_RANK, error::quoted, source::Source};

pub use layout::Layout;

/// The name in the header that is no tensor's.
const METADATA: &str = "__metadata__";

/// The longest header that the reference implementation reads.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Reads the header of a safetensors file: its tensors by name. Their bytes lie inside the file and do not overlap. Tensors that its
/// metadata say are quantised have that encoding, and the shape of what they stand for.
///
/// `reader` stands at the start of the file; `len` is the size of the whole file in bytes; `path` is for errors. Memory is bounded by a
/// small multiple of `len`, whatever the file claims.
///
/// # Errors
/// A reader that fails, and every break of the format: which tensor, or where in the header.
pub fn parse<R: Read>(mut reader: R, len: u64, path: &Path) -> Result<BTreeMap<String, Entry>, FormatError> {
    let mut start = Vec::with_capacity(Contents::LOOK);
    reader
        .by_ref()
        .take(Contents::LOOK as u64)
        .read_to_end(&mut start)
        .map_err(|e| FormatError::io(path, e))?;
    let contents = Contents::of(&start);
    if contents != Contents::Safetensors {
        return Err(FormatError::Mistaken {
            path: path.to_owned(),
            expected: "a safetensors file",
            contents,
        });
    }

    let mut source = Source::new(start.as_slice().chain(reader), len, path);
    let header_len = source.u64()?;
    if header_len > MAX_HEADER_BYTES {
        let rule = format!("at most {MAX_HEADER_BYTES}");
        return Err(source.error(Problem::Value {
            what: "its length",
            value: header_len.to_string(),
            rule,
        }));
    }
    let header = source.bytes(header_len)?;
    // The JSON parser would not look at text that it skips.
    let header = std::str::from_utf8(&header).map_err(|e| {
        let place = format!("header (byte {})", size_of::<u64>() + e.valid_up_to());
        FormatError::corrupt(path, place, Problem::Utf8("its JSON"))
    })?;
    let mut read = Tensors::default();
    let mut json = serde_json::Deserializer::from_str(header);
    let parsed = (&mut read).deserialize(&mut json).and_then(|()| json.end());
    if let Err(error) = parsed {
        let place = read
            .current
            .map_or_else(|| "header".into(), |name| format!("header, tensor {}", quoted(&name)));
        let problem = read.problem.unwrap_or(Problem::Json(error));
        return Err(FormatError::corrupt(path, place, problem));
    }
    place(&mut read.tensors, source.position(), len, path)?;
    if let quantized::Text(Some(text)) = &read.quantized {
        quantized::apply(text, &mut read.tensors, path)?;
    }
    Ok(read.tensors)
}

/// Turns offsets into those of the file, and checks that data fills the file without gaps.
fn place(tensors: &mut BTreeMap<String, Entry>, data: u64, len: u64, path: &Path) -> Result<(), FormatError> {
    let mut order: Vec<&mut Entry> = tensors.values_mut().collect();
    order.sort_unstable_by_key(|e| (e.offset, e.bytes));
    let mut end = 0;
    let mut previous = String::new();
    for entry in order {
        let problem = if entry.offset < end {
            Some(Problem::Overlap(previous))
        } else if entry.offset > end {
            Some(Problem::Gap(entry.offset - end))
        } else if entry.bytes > len - data - end {
            Some(Problem::Truncated {
                needed: entry.bytes,
                left: len - data - end,
            })
        } else {
            None
        };
        if let Some(problem) = problem {
            let place = format!(
                "tensor {} (byte {})",
                quoted(&entry.name),
                data.saturating_add(entry.offset)
            );
            return Err(FormatError::corrupt(path, place, problem));
        }
        previous = quoted(&entry.name);
        end += entry.bytes;
        entry.offset += data;
    }
    match len - data - end {
        0 => Ok(()),
        n => Err(FormatError::corrupt(
            path,
            format!("byte {}", data + end),
            Problem::Trailing(n),
        )),
    }
}

/// The header as it is read. It stays when reading fails, to say where, and which rule was broken where it was not one of JSON.
#[derive(Default)]
struct Tensors {
    tensors: BTreeMap<String, Entry>,
    quantized: quantized::Text,
    current: Option<String>,
    problem: Option<Problem>,
}

impl Tensors {
    fn add(&mut self, name: String, info: Info) -> Result<(), Problem> {
        if self.tensors.contains_key(&name) {
            return Err(Problem::Duplicate);
        }
        let Shape(shape) = info.shape;
        let encoding = Encoding::from_safetensors(&info.dtype).ok_or_else(|| Problem::UnknownType {
            what: "dtype",
            value: quoted(&info.dtype),
        })?;
        let (offset, end) = info.data_offsets;
        let found = end.checked_sub(offset).ok_or_else(|| Problem::Value {
            what: "the end of its data",
            value: end.to_string(),
            rule: format!("at least {offset}, where it begins"),
        })?;
        let bytes = Entry::size(&shape, encoding)?;
        if bytes != found {
            return Err(Problem::Size {
                shape,
                encoding,
                needed: bytes,
                found,
            });
        }
        let entry = Entry {
            name: name.clone(),
            encoding,
            shape,
            file: 0,
            offset,
            bytes,
        };
        self.tensors.insert(name, entry);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for &mut Tensors {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Tensors {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to their dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            if name == METADATA {
                map.next_value_seed(&mut self.quantized)?;
                continue;
            }
            let name = self.current.insert(name).clone();
            let info = map.next_value()?;
            self.add(name, info).map_err(|problem| {
                self.problem = Some(problem);
                A::Error::custom("a rule of the format is broken")
            })?;
            self.current = None;
        }
        Ok(())
    }
}

/// What the header says of a tensor.
#[derive(serde::Deserialize)]
struct Info {
    dtype: String,
    shape: Shape,
    data_offsets: (u64, u64),
}

/// A list of numbers that stops reading when it is longer than a shape can be.
struct Shape(Vec<u64>);

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dimensions;

        impl<'de> Visitor<'de> for Dimensions {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a shape of at most {MAX_RANK} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut shape = Vec::new();
                while let Some(dimension) = seq.next_element()? {
                    if shape.len() == MAX_RANK {
                        return Err(A::Error::invalid_length(shape.len() + 1, &self));
                    }
                    shape.push(dimension);
                }
                Ok(Shape(shape))
            }
        }

        deserializer.deserialize_seq(Dimensions)
    }
}
