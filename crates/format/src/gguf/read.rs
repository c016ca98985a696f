//! The metadata section: keys, values, arrays.

use std::{collections::BTreeMap, io::Read};

use super::{Array, Metadata, Value};
use crate::{FormatError, Problem, error::quoted, source::Source};

/// Arrays in arrays: the format allows them, no known key uses them.
const MAX_DEPTH: usize = 4;

/// `enum gguf_metadata_value_type`.
#[derive(Debug, Clone, Copy)]
enum Type {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Str,
    Array,
    U64,
    I64,
    F64,
}

impl Type {
    /// In the numbering of the format.
    const ALL: [Type; 13] = {
        use Type::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, Str, Array, U64, I64, F64]
    };

    /// Bytes that a value takes at least.
    fn min_bytes(self) -> u64 {
        match self {
            Type::U8 | Type::I8 | Type::Bool => 1,
            Type::U16 | Type::I16 => 2,
            Type::U32 | Type::I32 | Type::F32 => 4,
            Type::U64 | Type::I64 | Type::F64 | Type::Str => 8,
            Type::Array => 12,
        }
    }
}

pub(super) fn metadata<R: Read>(source: &mut Source<'_, R>, count: u64) -> Result<Metadata, FormatError> {
    let mut values = BTreeMap::new();
    for index in 0..count {
        source.at(format!("metadata key {index}"));
        let key = string(source, "the key")?;
        source.at(format!("metadata key {}", quoted(&key)));
        if values.contains_key(&key) {
            return Err(source.error(Problem::Duplicate));
        }
        let ty = value_type(source)?;
        let value = value(source, ty)?;
        values.insert(key, value);
    }
    Ok(Metadata::new(source.path(), values))
}

pub(super) fn string<R: Read>(source: &mut Source<'_, R>, what: &'static str) -> Result<String, FormatError> {
    let len = source.u64()?;
    let bytes = source.bytes(len)?;
    String::from_utf8(bytes).map_err(|_| source.error(Problem::Utf8(what)))
}

fn value_type<R: Read>(source: &mut Source<'_, R>) -> Result<Type, FormatError> {
    let number = source.u32()?;
    let known = Type::ALL.get(number as usize).copied();
    known.ok_or_else(|| {
        source.error(Problem::UnknownType {
            what: "value type",
            value: number.to_string(),
        })
    })
}

fn value<R: Read>(source: &mut Source<'_, R>, ty: Type) -> Result<Value, FormatError> {
    Ok(match ty {
        Type::U8 | Type::U16 | Type::U32 | Type::U64 => Value::U64(unsigned(source, ty)?),
        Type::I8 | Type::I16 | Type::I32 | Type::I64 => Value::I64(signed(source, ty)?),
        Type::F32 | Type::F64 => Value::F64(float(source, ty)?),
        Type::Bool => Value::Bool(boolean(source)?),
        Type::Str => Value::Str(string(source, "the value")?),
        Type::Array => Value::Array(array(source, 1)?),
    })
}

fn array<R: Read>(source: &mut Source<'_, R>, depth: usize) -> Result<Array, FormatError> {
    if depth > MAX_DEPTH {
        return Err(source.error(Problem::Depth(MAX_DEPTH)));
    }
    let ty = value_type(source)?;
    let count = source.u64()?;
    let count = source.check_count(count, "array elements", ty.min_bytes())?;
    Ok(match ty {
        Type::U8 | Type::U16 | Type::U32 | Type::U64 => Array::U64(repeat(count, || unsigned(source, ty))?),
        Type::I8 | Type::I16 | Type::I32 | Type::I64 => Array::I64(repeat(count, || signed(source, ty))?),
        Type::F32 | Type::F64 => Array::F64(repeat(count, || float(source, ty))?),
        Type::Bool => Array::Bool(repeat(count, || boolean(source))?),
        Type::Str => Array::Str(repeat(count, || string(source, "an element of the array"))?),
        Type::Array => Array::Array(repeat(count, || array(source, depth + 1))?),
    })
}

/// `count` has been checked against the bytes that are left.
fn repeat<T>(count: usize, mut read: impl FnMut() -> Result<T, FormatError>) -> Result<Vec<T>, FormatError> {
    let mut items = Vec::with_capacity(count);
    for _ in 0..count {
        items.push(read()?);
    }
    Ok(items)
}

fn unsigned<R: Read>(source: &mut Source<'_, R>, ty: Type) -> Result<u64, FormatError> {
    Ok(match ty {
        Type::U8 => source.array().map(u8::from_le_bytes)?.into(),
        Type::U16 => source.array().map(u16::from_le_bytes)?.into(),
        Type::U32 => source.u32()?.into(),
        _ => source.u64()?,
    })
}

fn signed<R: Read>(source: &mut Source<'_, R>, ty: Type) -> Result<i64, FormatError> {
    Ok(match ty {
        Type::I8 => source.array().map(i8::from_le_bytes)?.into(),
        Type::I16 => source.array().map(i16::from_le_bytes)?.into(),
        Type::I32 => source.array().map(i32::from_le_bytes)?.into(),
        _ => source.array().map(i64::from_le_bytes)?,
    })
}

fn float<R: Read>(source: &mut Source<'_, R>, ty: Type) -> Result<f64, FormatError> {
    Ok(match ty {
        Type::F32 => source.array().map(f32::from_le_bytes)?.into(),
        _ => source.array().map(f64::from_le_bytes)?,
    })
}

fn boolean<R: Read>(source: &mut Source<'_, R>) -> Result<bool, FormatError> {
    match source.array()? {
        [0] => Ok(false),
        [1] => Ok(true),
        [byte] => Err(source.error(Problem::Value {
            what: "a boolean",
            value: byte.to_string(),
            rule: "0 or 1".into(),
        })),
    }
}
