//! Quantised tensors in a safetensors file: which they are, in the file's metadata.
//!
//! The format has no dtype for them. They are stored as bytes, `U8` of one dimension, and the value of [`KEY`] in `__metadata__` is JSON
//! that says what these bytes are: `{"name": {"format": "nf4", "shape": [rows, cols]}}`. The formats are in `docs/quantisation.md`.

use std::{collections::BTreeMap, fmt, path::Path};

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};
use tightfit_quant::Block;

use super::Shape;
use crate::{Encoding, Entry, FormatError, Problem, error::quoted};

/// The key of the metadata that lists them.
pub(super) const KEY: &str = "tightfit.quantized";

/// The value of [`KEY`] for those of `entries` that are quantised; `None` if none is.
pub(super) fn text(entries: &[Entry]) -> Option<String> {
    let quantized = entries.iter().filter_map(|entry| match entry.encoding {
        Encoding::Block(block) => Some((
            entry.name.clone(),
            json!({ "format": block.name(), "shape": entry.shape }),
        )),
        _ => None,
    });
    let quantized: Map<String, Value> = quantized.collect();
    (!quantized.is_empty()).then(|| Value::from(quantized).to_string())
}

/// Gives the tensors that the value of [`KEY`] lists their format and shape.
pub(super) fn apply(text: &str, tensors: &mut BTreeMap<String, Entry>, path: &Path) -> Result<(), FormatError> {
    let mut list = List {
        tensors,
        current: None,
        problem: None,
    };
    let mut json = serde_json::Deserializer::from_str(text);
    let parsed = (&mut list).deserialize(&mut json).and_then(|()| json.end());
    parsed.map_err(|error| {
        let tensor = list
            .current
            .map_or_else(String::new, |name| format!(", tensor {}", quoted(&name)));
        let problem = list.problem.unwrap_or(Problem::Json(error));
        FormatError::corrupt(path, format!("header, metadata `{KEY}`{tensor}"), problem)
    })
}

/// The value of [`KEY`] in `__metadata__`; whatever else is there is skipped.
#[derive(Default)]
pub(super) struct Text(pub Option<String>);

impl<'de> DeserializeSeed<'de> for &mut Text {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Text {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from keys to text")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            if key != KEY {
                map.next_value::<IgnoredAny>()?;
            } else if self.0.replace(map.next_value()?).is_some() {
                return Err(A::Error::custom(format_args!("`{KEY}` appears twice")));
            }
        }
        Ok(())
    }

    // Metadata of another type says nothing of quantised tensors, and is let be.
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }
}

/// The list as it is read, with what is needed to say where reading failed.
struct List<'a> {
    tensors: &'a mut BTreeMap<String, Entry>,
    current: Option<String>,
    problem: Option<Problem>,
}

/// What the list says of a tensor.
#[derive(serde::Deserialize)]
struct Info {
    format: String,
    shape: Shape,
}

impl List<'_> {
    fn quantize(&mut self, name: &str, info: Info) -> Result<(), Problem> {
        let entry = self.tensors.get_mut(name).ok_or(Problem::NoSuchTensor)?;
        if matches!(entry.encoding, Encoding::Block(_)) {
            return Err(Problem::Duplicate);
        }
        if entry.encoding.name() != "U8" || entry.shape.len() != 1 {
            return Err(Problem::NotBytes {
                shape: entry.shape.clone(),
                encoding: entry.encoding,
            });
        }
        let block = Block::from_name(&info.format).ok_or_else(|| Problem::UnknownType {
            what: "quantised format",
            value: quoted(&info.format),
        })?;
        let Shape(shape) = info.shape;
        if shape.len() != 2 || shape.contains(&0) || !shape[1].is_multiple_of(block.row_multiple()) {
            return Err(Problem::Value {
                what: "its shape",
                value: format!("{shape:?}"),
                rule: format!("rows and a multiple of {} columns", block.row_multiple()),
            });
        }
        let encoding = Encoding::Block(block);
        let needed = Entry::size(&shape, encoding)?;
        if needed != entry.bytes {
            return Err(Problem::Size {
                shape,
                encoding,
                needed,
                found: entry.bytes,
            });
        }
        (entry.encoding, entry.shape) = (encoding, shape);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for &mut List<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut List<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to their format and shape")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<String>()? {
            let name = self.current.insert(name).clone();
            let info = map.next_value()?;
            self.quantize(&name, info).map_err(|problem| {
                self.problem = Some(problem);
                A::Error::custom("a rule of the format is broken")
            })?;
            self.current = None;
        }
        Ok(())
    }
}
