//! Sizes as people write them.

/// Why a text is not a size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseBytesError {
    /// The number is missing or malformed.
    #[error("`{0}` is not a size: write a number and a unit, such as 3.8GiB, 600MiB, 24GB or 1073741824")]
    Number(String),
    /// The unit is unknown.
    #[error(
        "`{text}` has the unknown unit `{unit}`: use B, KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, GB, TB (powers of 1000)"
    )]
    Unit {
        /// The whole text.
        text: String,
        /// The unit.
        unit: String,
    },
    /// More than 2^64 - 1 bytes.
    #[error("`{0}` is more bytes than fit in 64 bits")]
    TooLarge(String),
}

/// Parses a size in bytes: `3.8GiB`, `600 MiB`, `24GB`, `1073741824`.
///
/// Upper and lower case are the same. `KiB` … `TiB` are powers of 1024, `KB` … `TB` powers of 1000, no unit is bytes; a
/// lone `K` … `T` is a power of 1024, as in systemd and container runtimes. Fractions of a byte are cut off.
///
/// # Errors
/// [`ParseBytesError`] for anything else: signs, exponents, other units, sizes over 64 bits.
pub fn parse_bytes(text: &str) -> Result<u64, ParseBytesError> {
    let trimmed = text.trim();
    let end = trimmed
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(trimmed.len());
    let (number, unit) = (&trimmed[..end], trimmed[end..].trim_start());
    // Rust would also read ".5" and "5."; a stray dot is more likely a slip.
    let (whole, fraction) = match number.split_once('.') {
        Some((whole, fraction)) if !fraction.is_empty() => (whole, fraction),
        Some(_) => ("", ""),
        None => (number, "0"),
    };
    let is_digits = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !is_digits(whole) || !is_digits(fraction) {
        return Err(ParseBytesError::Number(text.to_owned()));
    }
    let scale: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => {
            return Err(ParseBytesError::Unit {
                text: text.to_owned(),
                unit: unit.to_owned(),
            });
        }
    };
    // The whole part is exact; only the fraction, below one unit, goes through floating point.
    let fraction: f64 = format!("0.{fraction}")
        .parse()
        .map_err(|_| ParseBytesError::Number(text.to_owned()))?;
    whole
        .parse::<u64>()
        .ok()
        .and_then(|whole| whole.checked_mul(scale))
        .and_then(|bytes| bytes.checked_add((fraction * scale as f64) as u64))
        .ok_or_else(|| ParseBytesError::TooLarge(text.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_parse() {
        for (text, bytes) in [
            ("1073741824", 1 << 30),
            ("0", 0),
            ("17B", 17),
            ("600MiB", 600 << 20),
            ("600 mib", 600 << 20),
            (" 24GB ", 24_000_000_000),
            ("24G", 24 << 30),
            ("1.5KiB", 1536),
            ("3.8GiB", 4_080_218_931),
            ("0.5tb", 500_000_000_000),
            ("2TiB", 2 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse_bytes(text), Ok(bytes), "{text:?}");
        }
    }

    #[test]
    fn everything_else_is_refused_by_name() {
        for text in [
            "", "GiB", "-1GiB", "+1", ".5GiB", "5.GiB", "1..5GiB", "1.2.3", "NaN", "inf", "½GiB",
        ] {
            assert_eq!(
                parse_bytes(text),
                Err(ParseBytesError::Number(text.to_owned())),
                "{text:?}"
            );
        }
        for (text, unit) in [
            ("3GiBs", "GiBs"),
            ("3 apples", "apples"),
            ("1e9", "e9"),
            ("5 G i B", "G i B"),
            ("3%", "%"),
        ] {
            let error = ParseBytesError::Unit {
                text: text.to_owned(),
                unit: unit.to_owned(),
            };
            assert_eq!(parse_bytes(text), Err(error), "{text:?}");
        }
        for text in ["18446744073709551616", "16777216TiB", "99999999999999999999999GB"] {
            assert_eq!(
                parse_bytes(text),
                Err(ParseBytesError::TooLarge(text.to_owned())),
                "{text:?}"
            );
        }
    }
}
