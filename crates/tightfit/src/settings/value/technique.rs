//! How the techniques are asked for that change nothing but memory.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

use crate::memory::parse_bytes;

/// What becomes of the activations that the backward pass reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Recompute {
    /// As many are kept as the budget has room for.
    Auto,
    /// All are kept.
    None,
    /// Only each block's input is kept.
    Block,
    /// At most this many bytes are kept.
    Bytes(u64),
    /// At most this share of their bytes is kept, in percent: 0 to 100.
    Percent(f64),
}

impl From<Recompute> for tightfit_search::Recompute {
    fn from(recompute: Recompute) -> Self {
        match recompute {
            Recompute::Auto => Self::Auto,
            Recompute::None => Self::None,
            Recompute::Block => Self::Block,
            Recompute::Bytes(bytes) => Self::Bytes(bytes),
            Recompute::Percent(percent) => Self::Percent(percent),
        }
    }
}

/// What a flag or a file may say of it.
const EXPECTED: &str =
    "expected auto, none, block, the bytes to keep such as 512MiB, or the share to keep from 0% to 100%";

impl Recompute {
    /// Whether a percentage is one.
    pub(in crate::settings) fn is_percentage(percent: f64) -> bool {
        (0.0..=100.0).contains(&percent)
    }
}

impl FromStr for Recompute {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            "none" => Ok(Self::None),
            "block" => Ok(Self::Block),
            _ => match text.strip_suffix('%') {
                Some(percent) => {
                    let percent = percent.trim_end().parse().ok();
                    let percent = percent.filter(|&percent| Self::is_percentage(percent));
                    percent.map(Self::Percent).ok_or(EXPECTED)
                }
                None => parse_bytes(text).map(Self::Bytes).map_err(|_| EXPECTED),
            },
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Auto => f.write_str("auto"),
            Self::None => f.write_str("none"),
            Self::Block => f.write_str("block"),
            Self::Bytes(bytes) => {
                // The largest unit of which it is a whole number, so that nothing is lost.
                let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
                let whole = |&(_, shift): &(&str, u32)| bytes > 0 && bytes.trailing_zeros() >= shift;
                match units.into_iter().find(whole) {
                    Some((unit, shift)) => write!(f, "{}{unit}", bytes >> shift),
                    None => write!(f, "{bytes}"),
                }
            }
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

impl Serialize for Recompute {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// What lives on the next tier (a file on the CPU backend) and comes back ahead of its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// Nothing.
    None,
    /// What the budget has no room for.
    Auto,
    /// These.
    Of {
        /// What the backward pass reads.
        activations: bool,
        /// The optimizer's state.
        optimizer: bool,
        /// The weights.
        weights: bool,
    },
}

impl From<Offload> for tightfit_search::Offload {
    fn from(offload: Offload) -> Self {
        match offload {
            Offload::None => Self::None,
            Offload::Auto => Self::Auto,
            Offload::Of {
                activations,
                optimizer,
                weights,
            } => Self::Kinds {
                activations,
                optimizer,
                weights,
            },
        }
    }
}

impl FromStr for Offload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => return Ok(Self::None),
            "auto" => return Ok(Self::Auto),
            _ => {}
        }
        let (mut activations, mut optimizer, mut weights) = (false, false, false);
        for word in text.split(',').map(str::trim) {
            match word {
                "activations" => activations = true,
                "optimizer" => optimizer = true,
                "weights" => weights = true,
                _ => {
                    return Err(format!(
                        "`{word}` cannot be offloaded: expected none, auto, or activations, optimizer and weights with commas between them"
                    ));
                }
            }
        }
        Ok(Self::Of {
            activations,
            optimizer,
            weights,
        })
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Of {
            activations,
            optimizer,
            weights,
        } = *self
        else {
            return f.write_str(if *self == Self::Auto { "auto" } else { "none" });
        };
        let words = [
            (activations, "activations"),
            (optimizer, "optimizer"),
            (weights, "weights"),
        ];
        let words: Vec<&str> = words
            .into_iter()
            .filter(|(given, _)| *given)
            .map(|(_, word)| word)
            .collect();
        f.write_str(if words.is_empty() { "none" } else { "" })?;
        f.write_str(&words.join(","))
    }
}

impl Serialize for Offload {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn recompute_is_written_as_it_is_read() {
        for (text, value, written) in [
            ("auto", Recompute::Auto, "auto"),
            ("none", Recompute::None, "none"),
            ("block", Recompute::Block, "block"),
            ("0", Recompute::Bytes(0), "0"),
            ("512MiB", Recompute::Bytes(512 << 20), "512MiB"),
            ("0.5GiB", Recompute::Bytes(512 << 20), "512MiB"),
            ("1TiB", Recompute::Bytes(1 << 40), "1TiB"),
            ("1000", Recompute::Bytes(1000), "1000"),
            ("50%", Recompute::Percent(50.0), "50%"),
            ("12.5 %", Recompute::Percent(12.5), "12.5%"),
            ("0%", Recompute::Percent(0.0), "0%"),
            ("100%", Recompute::Percent(100.0), "100%"),
        ] {
            assert_eq!(text.parse(), Ok(value), "{text}");
            assert_eq!(value.to_string(), written);
        }
    }

    proptest! {
        #[test]
        fn no_bit_of_a_size_or_a_share_is_lost(bytes: u64, shift in 0..64_u32, percent in 0.0..=100.0) {
            for value in [Recompute::Bytes(bytes << shift), Recompute::Bytes(bytes), Recompute::Percent(percent)] {
                prop_assert_eq!(value.to_string().parse(), Ok(value));
            }
        }
    }

    #[test]
    fn bad_recompute_is_told_what_is_accepted() {
        for text in [
            "", "some", "Block", "-1", "101%", "-1%", "NaN%", "inf%", "%", "50%%", "half%", "3 apples",
        ] {
            let refused = text.parse::<Recompute>().unwrap_err();
            assert_eq!(refused, EXPECTED, "{text}");
        }
    }

    #[test]
    fn offload_is_written_as_it_is_read() {
        for bits in 1..8_u8 {
            let value = Offload::Of {
                activations: bits & 1 > 0,
                optimizer: bits & 2 > 0,
                weights: bits & 4 > 0,
            };
            assert_eq!(value.to_string().parse(), Ok(value));
        }
        for value in [Offload::None, Offload::Auto] {
            assert_eq!(value.to_string().parse(), Ok(value));
        }
        let listed: Offload = "weights, activations,weights".parse().unwrap();
        assert_eq!(listed.to_string(), "activations,weights");
    }

    #[test]
    fn what_cannot_be_offloaded_is_named() {
        for (text, word) in [
            ("", "``"),
            ("gradients", "`gradients`"),
            ("activations,none", "`none`"),
            ("activations,", "``"),
            ("activations optimizer", "`activations optimizer`"),
            ("Weights", "`Weights`"),
        ] {
            let refused = text.parse::<Offload>().unwrap_err();
            for word in [word, "none, auto", "activations, optimizer and weights"] {
                assert!(refused.contains(word), "{text}: {refused}");
            }
        }
    }
}
