//! The JSON of a `config.json`, as what has been read of it and what has not.
//!
//! A reader of its own in place of `serde_json::Value`: a field given twice is an error there is no asking about afterwards, and
//! elements are small, so that a hostile file cannot take much more memory than it has bytes.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::error::{ModelError, excerpt};

/// The longest text that is read: real ones have a few KiB.
const MAX_BYTES: usize = 256 << 10;

/// A JSON value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    Unsigned(u64),
    /// Negative integers and fractions.
    Number(f64),
    Text(String),
    List(Vec<Json>),
    Object(BTreeMap<String, Json>),
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(JsonVisitor)
    }
}

struct JsonVisitor;

impl<'de> Visitor<'de> for JsonVisitor {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Unsigned(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Number(value as f64))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Json::Number(value))
    }

    fn visit_str<E>(self, value: &str) -> Result<Json, E> {
        Ok(Json::Text(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Json, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element()? {
            list.push(item);
        }
        Ok(Json::List(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Json, A::Error> {
        let mut object = BTreeMap::new();
        while let Some(name) = entries.next_key::<String>()? {
            if object.contains_key(&name) {
                return Err(A::Error::custom(format!("\"{}\" is given twice", excerpt(&name))));
            }
            let value = entries.next_value()?;
            object.insert(name, value);
        }
        Ok(Json::Object(object))
    }
}

impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Json::Null => f.write_str("null"),
            Json::Bool(value) => write!(f, "{value}"),
            Json::Unsigned(value) => write!(f, "{value}"),
            Json::Number(value) => write!(f, "{value}"),
            Json::Text(value) => write!(f, "\"{}\"", excerpt(value)),
            Json::List(_) => f.write_str("a list"),
            Json::Object(_) => f.write_str("an object"),
        }
    }
}

/// A Rust value that a field may have.
pub trait Read: Sized {
    /// What is expected, for messages.
    const EXPECTED: &'static str;

    /// The value, if it is one.
    #[doc(hidden)]
    fn read(json: &Value<'_>) -> Option<Self>;
}

/// A JSON value that is being read.
#[derive(Debug)]
pub struct Value<'a>(&'a Json);

/// Implements [`Read`] for the types of one JSON value.
macro_rules! read {
    ($($ty:ty, $expected:literal, $pattern:pat => $value:expr;)+) => {
        $(impl Read for $ty {
            const EXPECTED: &'static str = $expected;

            fn read(json: &Value<'_>) -> Option<Self> {
                match json.0 {
                    $pattern => $value,
                    _ => None,
                }
            }
        })+
    };
}

read! {
    u64, "a whole number", Json::Unsigned(value) => Some(*value);
    u32, "a token id", Json::Unsigned(value) => u32::try_from(*value).ok();
    bool, "true or false", Json::Bool(value) => Some(*value);
    String, "a text", Json::Text(value) => Some(value.clone());
    Vec<String>, "a list of texts", Json::List(items) => items.iter().map(|item| String::read(&Value(item))).collect();
}

impl Read for f64 {
    const EXPECTED: &'static str = "a number";

    fn read(json: &Value<'_>) -> Option<Self> {
        match *json.0 {
            Json::Unsigned(value) => Some(value as f64),
            Json::Number(value) => Some(value),
            _ => None,
        }
    }
}

impl Read for Vec<u32> {
    const EXPECTED: &'static str = "a token id or a list of them";

    fn read(json: &Value<'_>) -> Option<Self> {
        match json.0 {
            Json::List(items) => items.iter().map(|item| u32::read(&Value(item))).collect(),
            _ => u32::read(json).map(|id| vec![id]),
        }
    }
}

/// The fields of an object that have not been read yet.
#[derive(Debug)]
pub struct Fields {
    fields: BTreeMap<String, Json>,
    /// Before each name in messages: the objects around it.
    prefix: String,
}

impl Fields {
    /// The fields of a text.
    ///
    /// # Errors
    /// It is too long, no JSON, no object, or gives a field twice; the message has line and column.
    pub(super) fn parse(text: &str) -> Result<Self, ModelError> {
        if text.len() > MAX_BYTES {
            let message = format!("{} bytes, expected at most {MAX_BYTES}", text.len());
            return Err(ModelError::Json(message));
        }
        // Nesting is bounded by the parser.
        match serde_json::from_str(text) {
            Ok(Json::Object(fields)) => Ok(Self {
                fields,
                prefix: String::new(),
            }),
            Ok(other) => Err(ModelError::Json(format!("{other}, expected an object"))),
            Err(error) => Err(ModelError::Json(error.to_string())),
        }
    }

    /// Takes a field; `None` where it is absent or null.
    ///
    /// # Errors
    /// It is something else; so for every method below.
    pub fn take<T: Read>(&mut self, name: &str) -> Result<Option<T>, ModelError> {
        Ok(self.take_nullable(name)?.flatten())
    }

    /// Takes a field; `Some(None)` where it is null, for fields in which that differs from being absent.
    pub fn take_nullable<T: Read>(&mut self, name: &str) -> Result<Option<Option<T>>, ModelError> {
        match self.fields.remove(name) {
            None => Ok(None),
            Some(Json::Null) => Ok(Some(None)),
            Some(json) => match T::read(&Value(&json)) {
                Some(value) => Ok(Some(Some(value))),
                None => Err(self.error(name, format!("{json}, expected {}", T::EXPECTED))),
            },
        }
    }

    /// Takes a field into `value`, which stays as it is where the field is absent or null.
    pub fn read<T: Read>(&mut self, name: &str, value: &mut T) -> Result<(), ModelError> {
        if let Some(given) = self.take(name)? {
            *value = given;
        }
        Ok(())
    }

    /// Takes a field into `value`, which stays as it is where the field is absent.
    pub fn read_nullable<T: Read>(&mut self, name: &str, value: &mut Option<T>) -> Result<(), ModelError> {
        if let Some(given) = self.take_nullable(name)? {
            *value = given;
        }
        Ok(())
    }

    /// Takes a field that may say one thing only, if it is there.
    pub fn only<T: Read + PartialEq + fmt::Debug>(&mut self, name: &str, expected: T) -> Result<(), ModelError> {
        match self.take::<T>(name)? {
            Some(value) if value != expected => {
                Err(self.error(name, format!("{value:?} is not supported, only {expected:?}")))
            }
            _ => Ok(()),
        }
    }

    /// Takes an object; `None` where it is absent or null.
    pub(super) fn object(&mut self, name: &str) -> Result<Option<Self>, ModelError> {
        match self.fields.remove(name) {
            None | Some(Json::Null) => Ok(None),
            Some(Json::Object(fields)) => Ok(Some(Self {
                fields,
                prefix: format!("{}{name}.", self.prefix),
            })),
            Some(other) => Err(self.error(name, format!("{other}, expected an object"))),
        }
    }

    /// Drops fields that change nothing: these, those whose name begins with `_`, which are notes of whoever saved the file, and the
    /// ids of special tokens, which are the tokenizer's.
    pub fn ignore(&mut self, names: &[&str]) {
        let token = |name: &str| name.ends_with("_token_id");
        self.fields
            .retain(|name, _| !(name.starts_with('_') || token(name) || names.contains(&name.as_str())));
    }

    /// Checks that everything was understood. A field set to null says nothing.
    ///
    /// # Errors
    /// The first field that was not.
    pub(super) fn finish(self, family: &'static str) -> Result<(), ModelError> {
        match self.fields.iter().find(|(_, value)| **value != Json::Null) {
            None => Ok(()),
            Some((name, _)) => Err(ModelError::UnknownField {
                field: format!("{}{}", self.prefix, excerpt(name)),
                family,
            }),
        }
    }

    /// An error that names a field of this object.
    pub fn error(&self, name: &str, message: impl Into<String>) -> ModelError {
        ModelError::field(format!("{}{name}", self.prefix), message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        Fields::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn malformed_texts_are_refused() {
        assert!(refused("").contains("line 1"));
        assert!(refused("[]").contains("a list, expected an object"));
        assert!(refused("{} x").contains("trailing"));
        assert!(refused(r#"{"a": {"b": 1, "b": 1}}"#).contains("\"b\" is given twice"));
        assert!(refused(r#"{"a": 1e999}"#).contains("out of range"));
        assert!(refused(&"[".repeat(100_000)).contains("recursion"));
        assert!(refused(&" ".repeat(MAX_BYTES + 1)).contains("at most"));
    }

    #[test]
    fn wrong_types_name_the_field() {
        for (text, expected) in [
            (r#"{"n": -1}"#, "n: -1, expected a whole number"),
            (r#"{"n": 1.5}"#, "n: 1.5, expected a whole number"),
            (r#"{"n": "1"}"#, "n: \"1\", expected a whole number"),
            (r#"{"n": [1]}"#, "n: a list, expected a whole number"),
            (
                r#"{"n": 18446744073709551616}"#,
                "n: 18446744073709552000, expected a whole number",
            ),
        ] {
            let mut fields = Fields::parse(text).unwrap();
            assert_eq!(fields.take::<u64>("n").unwrap_err().to_string(), expected);
        }
        let mut fields = Fields::parse(r#"{"n": 4294967296}"#).unwrap();
        assert!(fields.take::<u32>("n").is_err());
    }

    #[test]
    fn what_is_left_is_unknown_unless_null() {
        let mut fields = Fields::parse(r#"{"o": {"a": 1, "b": null, "c": 2}}"#).unwrap();
        let mut inner = fields.object("o").unwrap().unwrap();
        fields.finish("llama").unwrap();
        assert_eq!(inner.take::<u64>("a").unwrap(), Some(1));
        let error = inner.finish("llama").unwrap_err();
        assert!(error.to_string().starts_with("o.c:"), "{error}");
    }
}
