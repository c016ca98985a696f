//! Values that flags and files spell in a way of their own.

use std::fmt;
use std::str::FromStr;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use tightfit_text::data::Long;

use crate::lr::Decay;
use crate::memory::{ParseBytesError, parse_bytes};

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
    ClipNorm: "expected a number or none",
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
        // TOML's integers end at 2^63; a text has no such end.
        match i64::try_from(self.0) {
            Ok(bytes) => serializer.serialize_i64(bytes),
            Err(_) => serializer.serialize_str(&self.0.to_string()),
        }
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct BytesVisitor;

        impl Visitor<'_> for BytesVisitor {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of bytes or a size such as \"3.8GiB\"")
            }

            fn visit_u64<E: Error>(self, bytes: u64) -> Result<Bytes, E> {
                Ok(Bytes(bytes))
            }

            fn visit_i64<E: Error>(self, bytes: i64) -> Result<Bytes, E> {
                u64::try_from(bytes)
                    .map(Bytes)
                    .map_err(|_| E::custom(format_args!("{bytes} is not a size: it is negative")))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Bytes, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(BytesVisitor)
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
                Err(_) => Err("expected a number or `none`"),
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

impl<'de> Deserialize<'de> for ClipNorm {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ClipNormVisitor;

        impl Visitor<'_> for ClipNormVisitor {
            type Value = ClipNorm;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or \"none\"")
            }

            fn visit_f64<E: Error>(self, norm: f64) -> Result<ClipNorm, E> {
                Ok(ClipNorm(Some(norm)))
            }

            fn visit_u64<E: Error>(self, norm: u64) -> Result<ClipNorm, E> {
                Ok(ClipNorm(Some(norm as f64)))
            }

            fn visit_i64<E: Error>(self, norm: i64) -> Result<ClipNorm, E> {
                Ok(ClipNorm(Some(norm as f64)))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<ClipNorm, E> {
                text.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(ClipNormVisitor)
    }
}
