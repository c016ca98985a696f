//! `model.safetensors.index.json`: which tensor is in which shard.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Component, Path},
};

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

use crate::{FormatError, Problem, error::quoted};

/// A parsed index.
#[derive(Debug, Default)]
pub struct Index {
    /// File names, each once, in the order in which the index first names them. Each is a name in the folder of the index, never a path.
    pub shards: Vec<String>,
    /// For each tensor, its shard as an index into `shards`.
    pub tensors: BTreeMap<String, usize>,
}

/// Reads an index from the bytes of its JSON; `path` is for errors.
///
/// # Errors
/// What is not such JSON, a tensor that appears twice, a shard that is not a plain file name.
pub fn parse(json: &[u8], path: &Path) -> Result<Index, FormatError> {
    // The JSON parser would not look at text that it skips.
    let json = std::str::from_utf8(json)
        .map_err(|e| FormatError::corrupt(path, format!("byte {}", e.valid_up_to()), Problem::Utf8("the JSON")))?;
    let mut read = Read::default();
    let mut deserializer = serde_json::Deserializer::from_str(json);
    let parsed = (&mut read)
        .deserialize(&mut deserializer)
        .and_then(|()| deserializer.end());
    match parsed {
        Ok(()) => Ok(read.index),
        Err(error) => {
            let place = read
                .current
                .map_or_else(|| "index".into(), |name| format!("tensor {}", quoted(&name)));
            Err(FormatError::corrupt(
                path,
                place,
                read.problem.unwrap_or(Problem::Json(error)),
            ))
        }
    }
}

/// The index as it is read. It stays when reading fails, to say where, and which rule was broken where it was not one of JSON.
#[derive(Default)]
struct Read {
    index: Index,
    numbers: BTreeMap<String, usize>,
    current: Option<String>,
    problem: Option<Problem>,
}

impl Read {
    fn add(&mut self, tensor: String, shard: String) -> Result<(), Problem> {
        if self.index.tensors.contains_key(&tensor) {
            return Err(Problem::Duplicate);
        }
        let number = match self.numbers.get(&shard) {
            Some(&number) => number,
            None => {
                let mut components = Path::new(&shard).components();
                let plain = matches!((components.next(), components.next()), (Some(Component::Normal(name)), None)
                    if name == shard.as_str());
                if !plain || shard.contains(['/', '\\', '\0']) {
                    return Err(Problem::ShardName(quoted(&shard)));
                }
                self.index.shards.push(shard.clone());
                self.numbers.insert(shard, self.index.shards.len() - 1);
                self.index.shards.len() - 1
            }
        };
        self.index.tensors.insert(tensor, number);
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for &mut Read {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Read {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a `weight_map`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut found = false;
        while let Some(key) = map.next_key::<String>()? {
            if key != "weight_map" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            if std::mem::replace(&mut found, true) {
                return Err(A::Error::duplicate_field("weight_map"));
            }
            map.next_value_seed(WeightMap(self))?;
        }
        if found {
            Ok(())
        } else {
            Err(A::Error::missing_field("weight_map"))
        }
    }
}

struct WeightMap<'a>(&'a mut Read);

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let read = self.0;
        while let Some(tensor) = map.next_key::<String>()? {
            let tensor = read.current.insert(tensor).clone();
            let shard = map.next_value()?;
            read.add(tensor, shard).map_err(|problem| {
                read.problem = Some(problem);
                A::Error::custom("a rule of the format is broken")
            })?;
            read.current = None;
        }
        Ok(())
    }
}
