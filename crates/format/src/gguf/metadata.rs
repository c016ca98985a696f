//! Metadata: keys and typed values.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
};

use crate::FormatError;

/// A metadata value. The widths of numbers are gone: what was stored in fewer bits is the same number here.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Of `u8` to `u64`.
    U64(u64),
    /// Of `i8` to `i64`.
    I64(i64),
    /// Of `f32` or `f64`.
    F64(f64),
    /// A truth.
    Bool(bool),
    /// A text.
    Str(String),
    /// Values of one type.
    Array(Array),
}

/// An array of values of one type.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    /// Of `u8` to `u64`.
    U64(Vec<u64>),
    /// Of `i8` to `i64`.
    I64(Vec<i64>),
    /// Of `f32` or `f64`.
    F64(Vec<f64>),
    /// Of truths.
    Bool(Vec<bool>),
    /// Of texts.
    Str(Vec<String>),
    /// Of arrays.
    Array(Vec<Array>),
}

impl Array {
    /// Elements.
    pub fn len(&self) -> usize {
        match self {
            Array::U64(a) => a.len(),
            Array::I64(a) => a.len(),
            Array::F64(a) => a.len(),
            Array::Bool(a) => a.len(),
            Array::Str(a) => a.len(),
            Array::Array(a) => a.len(),
        }
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn type_name(&self) -> &'static str {
        match self {
            Array::U64(_) => "unsigned integers",
            Array::I64(_) => "signed integers",
            Array::F64(_) => "floats",
            Array::Bool(_) => "booleans",
            Array::Str(_) => "strings",
            Array::Array(_) => "arrays",
        }
    }
}

/// For people: numbers and strings as they are, an array as how many of what.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U64(v) => write!(f, "{v}"),
            Value::I64(v) => write!(f, "{v}"),
            Value::F64(v) => write!(f, "{v}"),
            Value::Bool(v) => write!(f, "{v}"),
            Value::Str(v) => f.write_str(v),
            Value::Array(a) => write!(f, "[{} {}]", a.len(), a.type_name()),
        }
    }
}

impl Value {
    fn type_name(&self) -> String {
        match self {
            Value::U64(v) => format!("the integer {v}"),
            Value::I64(v) => format!("the integer {v}"),
            Value::F64(v) => format!("the float {v}"),
            Value::Bool(v) => format!("the boolean {v}"),
            Value::Str(_) => "a string".into(),
            Value::Array(a) => format!("an array of {} {}", a.len(), a.type_name()),
        }
    }
}

/// The metadata of a GGUF file.
///
/// The typed getters say `Ok(None)` for a key that is not there, and an error that names file and key for a value of another type. All
/// integer types are one type to them as long as the number fits; an empty array is one of any type.
#[derive(Debug, Clone)]
pub struct Metadata {
    path: PathBuf,
    values: BTreeMap<String, Value>,
}

impl Metadata {
    /// Metadata of the file `path`, which errors will name.
    pub fn new(path: &Path, values: BTreeMap<String, Value>) -> Self {
        Metadata {
            path: path.to_owned(),
            values,
        }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The value of a key, whatever its type.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// All keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// All keys and values, sorted by key.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// An integer that is not negative.
    pub fn u64(&self, key: &str) -> Result<Option<u64>, FormatError> {
        self.typed(key, "an unsigned integer", |value| match value {
            Value::U64(v) => Some(*v),
            Value::I64(v) => u64::try_from(*v).ok(),
            _ => None,
        })
    }

    /// An integer.
    pub fn i64(&self, key: &str) -> Result<Option<i64>, FormatError> {
        self.typed(key, "an integer", |value| match value {
            Value::U64(v) => i64::try_from(*v).ok(),
            Value::I64(v) => Some(*v),
            _ => None,
        })
    }

    /// A float. What was stored as `f32` is exactly that number.
    pub fn f64(&self, key: &str) -> Result<Option<f64>, FormatError> {
        self.typed(key, "a float", |value| match value {
            Value::F64(v) => Some(*v),
            _ => None,
        })
    }

    /// A truth.
    pub fn bool(&self, key: &str) -> Result<Option<bool>, FormatError> {
        self.typed(key, "a boolean", |value| match value {
            Value::Bool(v) => Some(*v),
            _ => None,
        })
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<Option<&str>, FormatError> {
        self.typed(key, "a string", |value| match value {
            Value::Str(v) => Some(v.as_str()),
            _ => None,
        })
    }

    /// An array of strings.
    pub fn strs(&self, key: &str) -> Result<Option<&[String]>, FormatError> {
        self.typed(key, "an array of strings", |value| match value {
            Value::Array(Array::Str(v)) => Some(v.as_slice()),
            Value::Array(a) if a.is_empty() => Some(&[]),
            _ => None,
        })
    }

    /// An array of integers that are not negative.
    pub fn u64s(&self, key: &str) -> Result<Option<Vec<u64>>, FormatError> {
        self.typed(key, "an array of unsigned integers", |value| match value {
            Value::Array(Array::U64(v)) => Some(v.clone()),
            Value::Array(Array::I64(v)) => v.iter().map(|&v| v.try_into().ok()).collect(),
            Value::Array(a) if a.is_empty() => Some(Vec::new()),
            _ => None,
        })
    }

    /// An array of integers.
    pub fn i64s(&self, key: &str) -> Result<Option<Vec<i64>>, FormatError> {
        self.typed(key, "an array of integers", |value| match value {
            Value::Array(Array::I64(v)) => Some(v.clone()),
            Value::Array(Array::U64(v)) => v.iter().map(|&v| v.try_into().ok()).collect(),
            Value::Array(a) if a.is_empty() => Some(Vec::new()),
            _ => None,
        })
    }

    /// An array of floats.
    pub fn f64s(&self, key: &str) -> Result<Option<Vec<f64>>, FormatError> {
        self.typed(key, "an array of floats", |value| match value {
            Value::Array(Array::F64(v)) => Some(v.clone()),
            Value::Array(a) if a.is_empty() => Some(Vec::new()),
            _ => None,
        })
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, FormatError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match convert(value) {
            Some(v) => Ok(Some(v)),
            None => Err(FormatError::Key {
                path: self.path.clone(),
                key: key.to_owned(),
                expected,
                found: value.type_name(),
            }),
        }
    }
}
