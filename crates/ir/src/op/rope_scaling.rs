//! How the frequencies of rotary position embedding are stretched for longer contexts.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

use super::OpError;
use super::check::Check;

/// `rope_scaling` of a `config.json`, by its `rope_type`; fields as spelled there.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopeScaling {
    /// Position interpolation (Chen et al. 2023, arXiv:2306.15595): every frequency divided by `factor`.
    Linear {
        /// How many times longer contexts get.
        factor: f64,
    },
    /// Llama 3.1 (`rope_type` `llama3`): frequencies with long wavelengths are divided by `factor`, those with short ones stay, and
    /// those between change smoothly.
    Llama3 {
        /// How many times longer contexts get.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are long.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are short; more than `low_freq_factor`.
        high_freq_factor: f64,
        /// The longest context of the first training, in tokens.
        original_max_position_embeddings: f64,
    },
}

impl RopeScaling {
    /// The numbers are positive and finite, and there is something between low and high.
    pub(super) fn check(&self, check: &Check<'_>) -> Result<(), OpError> {
        match *self {
            RopeScaling::Linear { factor } => check.positive_f32("factor", factor),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                check.positive_f32("factor", factor)?;
                check.positive_f32("low_freq_factor", low_freq_factor)?;
                check.positive_f32("high_freq_factor", high_freq_factor)?;
                check.positive_f32("original_max_position_embeddings", original_max_position_embeddings)?;
                if high_freq_factor <= low_freq_factor {
                    return check.invalid(format!(
                        "high_freq_factor is {high_freq_factor}, expected more than low_freq_factor {low_freq_factor}"
                    ));
                }
                Ok(())
            }
        }
    }

    /// A frequency, scaled; each step rounded to `f32` as in Hugging Face's `modeling_rope_utils`.
    pub(super) fn apply(&self, frequency: f32) -> f32 {
        match *self {
            RopeScaling::Linear { factor } => frequency / factor as f32,
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings: context,
            } => {
                let factor = factor as f32;
                let wavelength = (2.0 * PI) as f32 / frequency;
                if wavelength > (context / low_freq_factor) as f32 {
                    frequency / factor
                } else if wavelength < (context / high_freq_factor) as f32 {
                    frequency
                } else {
                    let width = (high_freq_factor - low_freq_factor) as f32;
                    let smooth = (context as f32 / wavelength - low_freq_factor as f32) / width;
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }
}
