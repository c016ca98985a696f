//! The families: what tells one from another, each in its own file.
//!
//! They are all [`DecoderConfig`]s. A family says how files spell it, what they leave out, and which parts it has.
//! `docs/adding-a-model.md` shows the way to a new one.

mod llama;
mod mistral;
mod qwen2;
mod qwen3;

use std::fmt;

use serde_json::{Map, Value};

use crate::config::{DecoderConfig, Fields, LayerType, MAX_LAYERS};
use crate::error::{ModelError, excerpt};

pub use llama::LLAMA;
pub use mistral::MISTRAL;
pub use qwen2::QWEN2;
pub use qwen3::QWEN3;

/// Every family there is.
pub static FAMILIES: &[&Family] = &[&LLAMA, &MISTRAL, &QWEN2, &QWEN3];

/// A family of models.
pub struct Family {
    /// `model_type` of its `config.json`, and its name in messages.
    pub model_type: &'static str,
    /// Its language model in `architectures`.
    pub architecture: &'static str,
    /// Its `general.architecture` in GGUF files, if any are written under a name of its own.
    pub gguf: Option<GgufNaming>,
    /// `num_key_value_heads` where `config.json` does not say; `None` is as many as query heads.
    pub num_key_value_heads: Option<u64>,
    /// Whether the query, key and value projections have biases, where the family fixes it.
    pub attention_bias: Option<bool>,
    /// Whether the output projection has a bias where those have.
    pub output_bias: bool,
    /// Whether the MLP's projections may have biases.
    pub mlp_bias: bool,
    /// Whether the heads of queries and keys are normalised before they are rotated.
    pub qk_norm: bool,
    /// What transformers assumes where `config.json` says nothing.
    pub defaults: fn() -> DecoderConfig,
    /// Reads the fields of `config.json` that not every family has.
    pub read: fn(&mut Fields, &mut DecoderConfig) -> Result<(), ModelError>,
    /// Writes them.
    pub write: fn(&DecoderConfig, &mut Map<String, Value>),
}

/// How GGUF files spell a family.
#[derive(Clone, Copy, Debug)]
pub struct GgufNaming {
    /// `general.architecture`, and the first part of its keys.
    pub architecture: &'static str,
    /// Whether rows of queries and keys are stored in the order in which neighbours are rotated against each other, in place of
    /// halves of a head.
    pub interleaved: bool,
}

impl Family {
    /// The family of a `config.json`.
    ///
    /// # Errors
    /// Nobody has described it; the message lists those that are known.
    pub fn of_model_type(model_type: &str) -> Result<&'static Self, ModelError> {
        let found = FAMILIES.iter().find(|family| family.model_type == model_type);
        found.copied().ok_or_else(|| {
            let known = FAMILIES.iter().map(|family| family.model_type);
            unknown("model_type", model_type, known)
        })
    }

    /// The family of a GGUF file.
    ///
    /// # Errors
    /// As [`of_model_type`](Self::of_model_type).
    pub fn of_gguf(architecture: &str) -> Result<(&'static Self, GgufNaming), ModelError> {
        let named = || FAMILIES.iter().filter_map(|family| Some((*family, family.gguf?)));
        let found = named().find(|(_, naming)| naming.architecture == architecture);
        found.ok_or_else(|| {
            let known = named().map(|(_, naming)| naming.architecture);
            unknown("general.architecture", architecture, known)
        })
    }
}

fn unknown(field: &'static str, value: &str, known: impl Iterator<Item = &'static str>) -> ModelError {
    ModelError::UnknownFamily {
        field,
        value: excerpt(value),
        known: known.collect::<Vec<_>>().join(", "),
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.model_type == other.model_type
    }
}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.model_type)
    }
}

/// Reads the windows of Qwen's models: off unless `use_sliding_window`; then in the layers that `layer_types` names, or else from
/// layer `max_window_layers` on.
fn read_windows(fields: &mut Fields, config: &mut DecoderConfig) -> Result<(), ModelError> {
    let mut window = Some(4096);
    let (mut used, mut first) = (false, 28);
    fields.read("use_sliding_window", &mut used)?;
    fields.read_nullable("sliding_window", &mut window)?;
    fields.read("max_window_layers", &mut first)?;
    config.sliding_window = window.filter(|_| used);
    // A hostile number of layers is refused later: its list is no longer than the longest that is not.
    let layers = config.num_hidden_layers.min(MAX_LAYERS);
    let given: Option<Vec<String>> = fields.take("layer_types")?;
    config.layer_types = match given {
        Some(names) => {
            let types = [LayerType::Full, LayerType::Sliding];
            let find = |name: &String| types.into_iter().find(|layer_type| layer_type.name() == name);
            let found: Option<Vec<LayerType>> = names.iter().map(find).collect();
            let expected = "expected full_attention or sliding_attention for each layer";
            Some(found.ok_or_else(|| fields.error("layer_types", expected))?)
        }
        None => config.sliding_window.map(|_| {
            let slides = |layer| {
                if layer < first {
                    LayerType::Full
                } else {
                    LayerType::Sliding
                }
            };
            (0..layers).map(slides).collect()
        }),
    };
    // The list that transformers 5 writes for models without windows: every layer is full.
    let full = vec![LayerType::Full; layers as usize];
    if config.sliding_window.is_none() && config.layer_types.as_ref() == Some(&full) {
        config.layer_types = None;
    }
    Ok(())
}

/// Writes what [`read_windows`] reads.
fn write_windows(config: &DecoderConfig, json: &mut Map<String, Value>) {
    let layers = 0..config.num_hidden_layers;
    let types = layers.clone().map(|layer| match config.window(layer) {
        Some(_) => LayerType::Sliding.name(),
        None => LayerType::Full.name(),
    });
    let types: Vec<&str> = types.collect();
    // For readers that do not know `layer_types`.
    let first = layers.clone().find(|&layer| config.window(layer).is_some());
    json.insert("use_sliding_window".into(), config.sliding_window.is_some().into());
    json.insert("sliding_window".into(), config.sliding_window.into());
    json.insert("max_window_layers".into(), first.unwrap_or(layers.end).into());
    json.insert("layer_types".into(), types.into());
}
