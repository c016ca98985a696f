//! Values that flags and files spell in a way of their own.

mod method;
mod optimizer;
mod storage;
mod technique;

use std::fmt::{self, Display};
use std::marker::PhantomData;
use std::str::FromStr;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use tightfit_text::data::Long;

use crate::lr::Decay;
use crate::memory::{ParseBytesError, parse_bytes};

pub use method::{AskedMethod, Method, Targets};
pub use optimizer::Optimizer;
pub use storage::{Base, LossScaling, Precision};
pub use technique::{Offload, Recompute};

/// A value as a flag spells it, with an error that says what was expected.
pub trait Written: Sized {
    /// Reads a flag's value.
    ///
    /// # Errors
    /// What was expected instead.
    fn read(text: &str) -> Result<Self, String>;
}

macro_rules! written {
    ($($ty:ty: $expected:literal,)+) => {
        $(impl Written for $ty {
            fn read(text: &str) -> Result<Self, String> {
                text.parse().map_err(|_| $expected.to_owned())
            }
        })+
    };
}

written! {
    u64: "expected a whole number from 0 to 18446744073709551615",
    usize: "expected a whole number of at least 0",
    f64: "expected a number, such as 0.003 or 3e-3",
    bool: "expected true or false",
    Decay: "expected cosine, linear or constant",
}

impl Written for Long {
    fn read(text: &str) -> Result<Self, String> {
        match text {
            "split" => Ok(Self::Split),
            "drop" => Ok(Self::Drop),
            _ => Err("expected split or drop".to_owned()),
        }
    }
}

/// For types whose `FromStr` says what it expected: flags and settings files read them alike, and a file may spell a number as one.
macro_rules! spelled {
    ($($ty:ty: $expected:literal,)+) => {
        $(
            impl Written for $ty {
                fn read(text: &str) -> Result<Self, String> {
                    text.parse().map_err(|error| format!("{error}"))
                }
            }

            impl<'de> Deserialize<'de> for $ty {
                fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                    deserializer.deserialize_any(Spelled::new($expected))
                }
            }
        )+
    };
}

spelled! {
    Bytes: "a number of bytes or a size such as \"3.8GiB\"",
    ByteLimit: "a number of bytes, a size such as \"20GiB\", or \"none\"",
    ClipNorm: "a number or \"none\"",
    Count: "a whole number or \"auto\"",
    Base: "auto, as-is, f32, bf16, f16, int8, int4 or nf4",
    MlpTile: "a whole number or \"none\"",
    Precision: "f32, bf16-mixed, f16-mixed or bf16",
    Recompute: "\"auto\", \"none\", \"block\", a size such as \"512MiB\" or a percentage such as \"50%\"",
    Targets: "\"all-linear\" or names of layers such as \"q_proj,v_proj\"",
    Optimizer: "the name of an optimizer",
    Offload: "\"none\", \"auto\" or a list such as \"activations,optimizer\"",
}

/// Reads numbers as if they were written out.
struct Spelled<T> {
    expected: &'static str,
    value: PhantomData<T>,
}

impl<T> Spelled<T> {
    fn new(expected: &'static str) -> Self {
        let value = PhantomData;
        Self { expected, value }
    }
}

impl<T: FromStr<Err: Display>> Visitor<'_> for Spelled<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_f64<E: Error>(self, number: f64) -> Result<T, E> {
        // With its point, so that 3.0 is no whole number.
        self.visit_str(&format!("{number:?}"))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

/// A number of bytes, written `3.8GiB`, `600MiB` or `1073741824`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_bytes(text).map(Self)
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        number(self.0, serializer)
    }
}

/// A number as settings files have it.
fn number<S: Serializer>(number: u64, serializer: S) -> Result<S::Ok, S::Error> {
    // TOML's integers end at 2^63; a text has no such end.
    match i64::try_from(number) {
        Ok(number) => serializer.serialize_i64(number),
        Err(_) => serializer.serialize_str(&number.to_string()),
    }
}

/// The most bytes that may be used, or `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteLimit(pub Option<u64>);

impl FromStr for ByteLimit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self(None)),
            size => match parse_bytes(size) {
                Ok(bytes) => Ok(Self(Some(bytes))),
                Err(error) => Err(format!("{error}, or none")),
            },
        }
    }
}

impl Serialize for ByteLimit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(bytes) => number(bytes, serializer),
            None => serializer.serialize_str("none"),
        }
    }
}

/// A norm to clip gradients to, or `none`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipNorm(pub Option<f64>);

impl FromStr for ClipNorm {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self(None)),
            number => match number.parse() {
                Ok(norm) => Ok(Self(Some(norm))),
                Err(_) => Err("expected a number or none"),
            },
        }
    }
}

impl Serialize for ClipNorm {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(norm) => serializer.serialize_f64(norm),
            None => serializer.serialize_str("none"),
        }
    }
}

/// A number, or `auto`: the planner's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Not decided yet.
    Auto,
    /// This many.
    Of(u64),
}

impl FromStr for Count {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            number => match number.parse() {
                Ok(number) => Ok(Self::Of(number)),
                Err(_) => Err("expected a whole number or auto"),
            },
        }
    }
}

impl Serialize for Count {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Of(count) => number(*count, serializer),
            Self::Auto => serializer.serialize_str("auto"),
        }
    }
}

/// Rows of tokens that an MLP takes at one time, or `none`: all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlpTile(pub Option<u64>);

impl FromStr for MlpTile {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self(None)),
            number => match number.parse() {
                Ok(rows) => Ok(Self(Some(rows))),
                Err(_) => Err("expected a whole number or none"),
            },
        }
    }
}

impl Serialize for MlpTile {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(rows) => number(rows, serializer),
            None => serializer.serialize_str("none"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a value from a flag and from a file, and gives what a file then says.
    fn rewritten<T: Written + Serialize + for<'de> Deserialize<'de> + PartialEq + fmt::Debug>(text: &str) -> String {
        let value = T::read(text).unwrap();
        let json = serde_json::to_value(&value).unwrap();
        assert_eq!(serde_json::from_value::<T>(json.clone()).unwrap(), value, "{text}");
        assert_eq!(serde_json::from_value::<T>(text.into()).unwrap(), value, "{text}");
        json.to_string()
    }

    #[test]
    fn numbers_and_words_are_kept() {
        assert_eq!(rewritten::<Count>("auto"), "\"auto\"");
        assert_eq!(rewritten::<Count>("12"), "12");
        assert_eq!(rewritten::<MlpTile>("none"), "\"none\"");
        assert_eq!(rewritten::<MlpTile>("256"), "256");
        assert_eq!(rewritten::<ByteLimit>("none"), "\"none\"");
        assert_eq!(rewritten::<ByteLimit>("20GiB"), (20_u64 << 30).to_string());
        assert_eq!(rewritten::<Bytes>("18446744073709551615"), "\"18446744073709551615\"");
        assert_eq!(rewritten::<ClipNorm>("none"), "\"none\"");
        assert_eq!(rewritten::<ClipNorm>("1e-7"), "1e-7");
    }

    #[test]
    fn what_is_neither_is_told_what_was_expected() {
        for text in ["", "-1", "1.5", "Auto", "many", "99999999999999999999"] {
            let refused = Count::read(text).unwrap_err();
            assert!(refused.contains("whole number or auto"), "{text}: {refused}");
            let refused = MlpTile::read(text).unwrap_err();
            assert!(refused.contains("whole number or none"), "{text}: {refused}");
        }
        for text in ["auto", "-1", "many", "5 apples"] {
            let refused = ByteLimit::read(text).unwrap_err();
            assert!(refused.ends_with(", or none"), "{text}: {refused}");
        }
        // A file's 3.0 is no whole number, and its `true` none at all.
        for value in [serde_json::json!(3.0), serde_json::json!(-3), serde_json::json!(true)] {
            let refused = serde_json::from_value::<Count>(value.clone()).unwrap_err();
            assert!(refused.to_string().contains("auto"), "{value}: {refused}");
        }
    }
}
