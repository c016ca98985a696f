//! Rotary positions in files: `rope_theta`, and how frequencies are stretched for longer contexts.

use serde_json::{Map, Value, json};
use tightfit_ir::op::{RopeScaling, RopeTable};

use super::{DecoderConfig, Fields, invalid};
use crate::error::ModelError;

/// Base of the angles where nothing says otherwise, in transformers and in llama.cpp.
pub(super) const DEFAULT_THETA: f64 = 10_000.0;

/// The tensor of a GGUF file that holds what frequencies are divided by.
pub(crate) const DIVISORS: &str = "rope_freqs.weight";

/// What Llama 3.1 and its successors were made with, and what a GGUF file does not say.
const LLAMA3_LOW_FREQ_FACTOR: f64 = 1.0;
const LLAMA3_HIGH_FREQ_FACTOR: f64 = 4.0;
const LLAMA3_CONTEXT: f64 = 8192.0;

/// Checks the numbers of a scaling.
pub(super) fn check(scaling: RopeScaling) -> Result<(), ModelError> {
    let positive = |field, value: f64| {
        if (value as f32).is_finite() && value as f32 > 0.0 {
            return Ok(());
        }
        invalid(field, value, "must be a number above 0")
    };
    match scaling {
        RopeScaling::Linear { factor } => positive("factor", factor),
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            positive("factor", factor)?;
            positive("low_freq_factor", low_freq_factor)?;
            positive("high_freq_factor", high_freq_factor)?;
            positive("original_max_position_embeddings", original_max_position_embeddings)?;
            if high_freq_factor <= low_freq_factor {
                let message = format!("must be more than low_freq_factor {low_freq_factor}");
                return invalid("high_freq_factor", high_freq_factor, message);
            }
            Ok(())
        }
    }
}

/// Reads `rope_theta` with `rope_scaling`, or the `rope_parameters` that transformers 5 writes for both.
pub(super) fn read(fields: &mut Fields, config: &mut DecoderConfig) -> Result<(), ModelError> {
    fields.read("rope_theta", &mut config.rope_theta)?;
    let (old, new) = (fields.object("rope_scaling")?, fields.object("rope_parameters")?);
    let mut rope = match (old, new) {
        (Some(_), Some(_)) => {
            return Err(fields.error("rope_scaling", "given beside rope_parameters, expected one of them"));
        }
        (None, None) => return Ok(()),
        (Some(rope), None) | (None, Some(rope)) => rope,
    };
    rope.read("rope_theta", &mut config.rope_theta)?;
    rope.only("partial_rotary_factor", 1.0)?;
    let (spelling, old_spelling) = (rope.take("rope_type")?, rope.take("type")?);
    if let (Some(one), Some(other)) = (&spelling, &old_spelling)
        && one != other
    {
        return Err(rope.error("type", format!("\"{other}\", and rope_type is \"{one}\"")));
    }
    let rope_type: String = spelling.or(old_spelling).unwrap_or_else(|| "default".to_owned());
    let number = |rope: &mut Fields, name: &str| -> Result<f64, ModelError> {
        let given = rope.take(name)?;
        given.ok_or_else(|| rope.error(name, format!("missing, rope_type {rope_type} needs it")))
    };
    config.rope_scaling = match rope_type.as_str() {
        "default" => None,
        "linear" => Some(RopeScaling::Linear {
            factor: number(&mut rope, "factor")?,
        }),
        "llama3" => Some(RopeScaling::Llama3 {
            factor: number(&mut rope, "factor")?,
            low_freq_factor: number(&mut rope, "low_freq_factor")?,
            high_freq_factor: number(&mut rope, "high_freq_factor")?,
            original_max_position_embeddings: rope
                .take::<u64>("original_max_position_embeddings")?
                .unwrap_or(config.max_position_embeddings) as f64,
        }),
        other => {
            let message = format!("\"{other}\" is not supported, only \"default\", \"linear\" and \"llama3\"");
            return Err(rope.error("rope_type", message));
        }
    };
    rope.finish(config.family.model_type)
}

/// Writes them as `rope_theta` and `rope_scaling`, which every version of transformers reads.
pub(super) fn write(config: &DecoderConfig, json: &mut Map<String, Value>) {
    json.insert("rope_theta".into(), config.rope_theta.into());
    let scaling = match config.rope_scaling {
        None => Value::Null,
        Some(RopeScaling::Linear { factor }) => json!({ "rope_type": "linear", "factor": factor }),
        Some(RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        }) => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            // Whole: it came from a whole number.
            "original_max_position_embeddings": original_max_position_embeddings as u64,
        }),
    };
    json.insert("rope_scaling".into(), scaling);
}

/// The scaling whose divisors of the frequencies a GGUF file holds as `rope_freqs.weight`, one per pair.
///
/// The file does not say how they were made. They are Llama 3's if its formula makes the same.
pub(super) fn from_divisors(divisors: &[f32], head_dim: u64, theta: f64) -> Result<Option<RopeScaling>, ModelError> {
    if divisors.len() as u64 != head_dim / 2 {
        let message = format!(
            "{} numbers, expected {} for head_dim {head_dim}",
            divisors.len(),
            head_dim / 2
        );
        return Err(ModelError::field(DIVISORS, message));
    }
    if divisors.iter().all(|&divisor| divisor == 1.0) {
        return Ok(None);
    }
    let scaling = RopeScaling::Llama3 {
        factor: f64::from(divisors.iter().copied().fold(0.0, f32::max)),
        low_freq_factor: LLAMA3_LOW_FREQ_FACTOR,
        high_freq_factor: LLAMA3_HIGH_FREQ_FACTOR,
        original_max_position_embeddings: LLAMA3_CONTEXT,
    };
    check(scaling).map_err(|error| ModelError::field(DIVISORS, error.to_string()))?;
    let table = |scaling| RopeTable {
        head_dim,
        theta,
        scaling,
    };
    let (plain, scaled) = (table(None), table(Some(scaling)));
    let frequencies = plain.inverse_frequencies().zip(scaled.inverse_frequencies());
    for (pair, (&divisor, (plain, scaled))) in divisors.iter().zip(frequencies).enumerate() {
        let expected = plain / scaled;
        // Both sides round a few times. No NaN is close.
        let close = (divisor - expected).abs() <= 1e-5 * expected;
        if !close {
            let message =
                format!("number {pair} is {divisor}, where Llama 3's scaling has {expected}: made by another rule");
            return Err(ModelError::field(DIVISORS, message));
        }
    }
    Ok(Some(scaling))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By llama.cpp's formula for its converter, in `f64`.
    fn divisors(factor: f64, head_dim: u32, theta: f64) -> Vec<f32> {
        let divisor = |pair: u32| {
            let wavelength = 2.0 * std::f64::consts::PI * theta.powf(2.0 * f64::from(pair) / f64::from(head_dim));
            let smooth = (8192.0 / wavelength - 1.0) / 3.0;
            if wavelength < 8192.0 / 4.0 {
                1.0
            } else if wavelength > 8192.0 {
                factor
            } else {
                1.0 / ((1.0 - smooth) / factor + smooth)
            }
        };
        (0..head_dim / 2).map(|pair| divisor(pair) as f32).collect()
    }

    #[test]
    fn llama3_is_recognised_by_its_divisors() {
        let made = from_divisors(&divisors(32.0, 64, 500_000.0), 64, 500_000.0).unwrap();
        let expected = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        };
        assert_eq!(made, Some(expected));
        assert_eq!(from_divisors(&[1.0; 32], 64, 500_000.0).unwrap(), None);
    }

    #[test]
    fn other_divisors_are_refused() {
        let good = divisors(32.0, 64, 500_000.0);
        for index in [0, 12, 31] {
            for wrong in [f32::NAN, f32::INFINITY, -1.0, 0.0, 1.5, 33.0] {
                let mut bad = good.clone();
                bad[index] = wrong;
                let error = from_divisors(&bad, 64, 500_000.0).unwrap_err().to_string();
                assert!(error.starts_with("rope_freqs.weight: "), "{error}");
            }
        }
        assert!(from_divisors(&good[1..], 64, 500_000.0).is_err());
        assert!(from_divisors(&good, 64, 10_000.0).is_err());
    }
}
