//! Adapters in PEFT's format: a folder with `adapter_config.json` and `adapter_model.safetensors`.
//!
//! <https://huggingface.co/docs/peft/developer_guides/checkpoint> describes it. Layers are those that have tensors in the file; what
//! `target_modules` says is for PEFT to find them again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Value, json};
use tightfit_exec::load::Fill;
use tightfit_format::{Checkpoint, Entry, FormatError};
use tightfit_ir::Shape;
use tightfit_pass::{LoraConfig, Targets, adapter_names};

use crate::input::read_regular;

/// Its settings.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// Its tensors.
pub const ADAPTER_MODEL: &str = "adapter_model.safetensors";
/// What PEFT puts before the names of a model's layers.
pub const PREFIX: &str = "base_model.model.";

/// Most bytes of an `adapter_config.json`.
const MAX_CONFIG: u64 = 1 << 20;
/// Most characters of a name in an error.
const EXCERPT: usize = 120;

/// Why an adapter cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// Nothing is there.
    #[error("{} is no adapter: it has no {ADAPTER_CONFIG}", path.display())]
    NotFound {
        /// As given.
        path: PathBuf,
    },
    /// Its settings cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Its settings are no JSON of this form.
    #[error("{}: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Line and reason.
        source: serde_json::Error,
    },
    /// A setting that means another kind of adapter than is known here, or none.
    #[error("{}: `{key}` is {value}: {expected}", path.display())]
    Setting {
        /// The file.
        path: PathBuf,
        /// The setting.
        key: &'static str,
        /// As it is there, shortened.
        value: String,
        /// What it may be.
        expected: &'static str,
    },
    /// Its tensors' file.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// A tensor that does not fit.
    #[error("{}: tensor `{tensor}` {message}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor, shortened.
        tensor: String,
        /// What does not fit.
        message: String,
    },
    /// No tensor at all.
    #[error("{}: it has no tensors", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
}

/// `adapter_config.json`, as far as it matters: what else is there either says nothing of the result, or is an error where it does.
#[derive(Debug, Deserialize)]
struct Config {
    peft_type: Value,
    r: Value,
    lora_alpha: Value,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// Settings that change what the tensors mean, with why they must be off: `null`, `false`, `"none"` or empty.
const OFF: [(&str, &str); 17] = [
    (
        "alora_invocation_tokens",
        "adapters that begin at a token are not known here",
    ),
    ("alpha_pattern", "all layers have the scaling of `lora_alpha` here"),
    ("arrow_config", "routed adapters (Arrow) are not known here"),
    ("bias", "trained biases are not known here"),
    ("fan_in_fan_out", "layers here are stored with their outputs as rows"),
    ("kasa_config", "adapters of another form (KaSA) are not known here"),
    ("layer_replication", "models with layers twice are not known here"),
    ("lora_bias", "adapters with a bias are not known here"),
    ("modules_to_save", "modules that are saved whole are not known here"),
    (
        "monteclora_config",
        "adapters of another form (MonteCLoRA) are not known here",
    ),
    ("rank_pattern", "all layers have the rank `r` here"),
    (
        "target_parameters",
        "adapters of what is no layer's weight are not known here",
    ),
    ("trainable_token_indices", "trained tokens are not known here"),
    ("use_bdlora", "block-diagonal adapters are not known here"),
    ("use_dora", "weight-decomposed adapters (DoRA) are not known here"),
    ("use_qalora", "adapters of pooled inputs (QA-LoRA) are not known here"),
    ("velora_config", "adapters of another form (VeLoRA) are not known here"),
];

/// Ways to begin, of `init_lora_weights`, that leave the model's own weights as they are.
const INITS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

/// An adapter whose files are open. No tensor has been read.
#[derive(Debug)]
pub struct Adapter {
    path: PathBuf,
    checkpoint: Checkpoint,
    config: LoraConfig,
}

impl Adapter {
    /// Opens a folder in PEFT's format.
    ///
    /// # Errors
    /// A file is missing or damaged, or it is an adapter of a kind that is not known here.
    pub fn open(path: &Path) -> Result<Self, AdapterError> {
        let config = path.join(ADAPTER_CONFIG);
        if !config.exists() {
            return Err(AdapterError::NotFound { path: path.to_owned() });
        }
        let text = read_regular(&config, MAX_CONFIG);
        let text = text.map_err(|source| AdapterError::Read {
            path: config.clone(),
            source,
        })?;
        let mut lora = parse(&text, &config)?;
        let checkpoint = Checkpoint::open(&path.join(ADAPTER_MODEL))?;
        lora.targets = Targets::Layers(layers(&checkpoint, lora.rank)?);
        Ok(Self {
            path: path.to_owned(),
            checkpoint,
            config: lora,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its tensors' file.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Rank, scaling and layers; without dropout.
    pub fn config(&self) -> &LoraConfig {
        &self.config
    }

    /// The names of its layers.
    pub fn layers(&self) -> impl Iterator<Item = &str> {
        let layers = match &self.config.targets {
            Targets::Layers(layers) => Some(layers),
            // `open` has listed them.
            Targets::AllLinear | Targets::Patterns(_) => None,
        };
        layers.into_iter().flatten().map(String::as_str)
    }

    /// The two matrices of a layer's adapter, `A` and `B`; `None` where the layer has none.
    pub fn matrices(&self, layer: &str) -> Option<[&Entry; 2]> {
        let [a, b] = adapter_names(layer).map(|name| self.checkpoint.tensors().get(&format!("{PREFIX}{name}")));
        Some([a?, b?])
    }

    /// Checks that each of its layers is one of a model with these weights.
    ///
    /// # Errors
    /// A tensor of another model, by name.
    pub fn check(&self, weights: &BTreeMap<String, Shape>) -> Result<(), AdapterError> {
        for layer in self.layers() {
            let Some([a, b]) = self.matrices(layer) else { continue };
            let Some(weight) = weights.get(&format!("{layer}.weight")).map(Shape::dims) else {
                return Err(self.unfit(a, "is of a layer that the model does not have".to_owned()));
            };
            let &[rows, columns] = weight else {
                return Err(self.unfit(a, "is of a layer that is not linear".to_owned()));
            };
            for (entry, expected) in [(a, [self.config.rank, columns]), (b, [rows, self.config.rank])] {
                if entry.shape != expected {
                    let message = format!("has shape {:?}, for the model's layer it is {expected:?}", entry.shape);
                    return Err(self.unfit(entry, message));
                }
            }
        }
        Ok(())
    }

    fn unfit(&self, entry: &Entry, message: String) -> AdapterError {
        unfit(&self.checkpoint, &entry.name, message)
    }

    /// Which of its tensors fills which adapter of a graph.
    pub fn fills(&self) -> Vec<Fill<'_>> {
        let tensors = self.checkpoint.tensors().iter();
        let fills = tensors.filter_map(|(name, entry)| {
            Some(Fill {
                weight: name.strip_prefix(PREFIX)?.to_owned(),
                entry,
                interleaved_heads: None,
            })
        });
        fills.collect()
    }
}

/// Rank and scaling of an `adapter_config.json`.
fn parse(text: &str, path: &Path) -> Result<LoraConfig, AdapterError> {
    let config: Config = serde_json::from_str(text).map_err(|source| AdapterError::Json {
        path: path.to_owned(),
        source,
    })?;
    let wrong = |key, value: &Value, expected| AdapterError::Setting {
        path: path.to_owned(),
        key,
        value: excerpt(&value.to_string()),
        expected,
    };
    if config.peft_type != "LORA" {
        return Err(wrong("peft_type", &config.peft_type, "expected \"LORA\""));
    }
    for (key, why) in OFF {
        let off = |value: &&Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::String(text) => text == "none",
            Value::Array(items) => items.is_empty(),
            Value::Object(fields) => fields.is_empty(),
            Value::Bool(true) | Value::Number(_) => false,
        };
        if let Some(value) = config.others.get(key).filter(|value| !off(value)) {
            return Err(wrong(key, value, why));
        }
    }
    let init = config.others.get("init_lora_weights");
    if let Some(value) = init.filter(|init| init.as_str().is_some_and(|init| !INITS.contains(&init))) {
        let why = "it stands for changes of the model's own weights, which are not known here";
        return Err(wrong("init_lora_weights", value, why));
    }
    let rank = config.r.as_u64().filter(|rank| (1..=1 << 16).contains(rank));
    let rank = rank.ok_or_else(|| wrong("r", &config.r, "expected a whole number from 1 to 65536"))?;
    let alpha = config.lora_alpha.as_f64();
    let alpha = alpha.filter(|&alpha| alpha > 0.0 && alpha <= f64::from(f32::MAX));
    let alpha = alpha.ok_or_else(|| wrong("lora_alpha", &config.lora_alpha, "expected a positive number"))?;
    let rslora = match config.others.get("use_rslora") {
        None | Some(Value::Null) => false,
        Some(value) => value
            .as_bool()
            .ok_or_else(|| wrong("use_rslora", value, "expected true or false"))?,
    };
    Ok(LoraConfig {
        rank,
        alpha,
        rslora,
        dropout: 0.0,
        seed: 0,
        targets: Targets::AllLinear,
    })
}

/// The layers that have both their matrices in a file that holds nothing else.
fn layers(checkpoint: &Checkpoint, rank: u64) -> Result<BTreeSet<String>, AdapterError> {
    let mut layers = BTreeSet::new();
    for (name, entry) in checkpoint.tensors() {
        let wrong = |message: String| unfit(checkpoint, name, message);
        let layer = name.strip_prefix(PREFIX).and_then(|name| {
            let a = name.strip_suffix(".lora_A.weight").map(|layer| (layer, 0));
            a.or_else(|| Some((name.strip_suffix(".lora_B.weight")?, 1)))
        });
        let Some((layer, matrix)) = layer else {
            let expected =
                format!("is none of an adapter, which are called {PREFIX}LAYER.lora_A.weight and .lora_B.weight");
            return Err(wrong(expected));
        };
        let other = &adapter_names(layer)[1 - matrix];
        if !checkpoint.tensors().contains_key(&format!("{PREFIX}{other}")) {
            return Err(wrong(format!("has no `{}` beside it", excerpt(other))));
        }
        let found = match entry.shape[..] {
            [rows, columns] => [rows, columns][matrix],
            _ => return Err(wrong(format!("has shape {:?}, expected a matrix", entry.shape))),
        };
        if found != rank {
            let axis = ["rows", "columns"][matrix];
            return Err(wrong(format!(
                "has {found} {axis}, the rank `r` in {ADAPTER_CONFIG} is {rank}"
            )));
        }
        checkpoint.floats(name)?;
        layers.insert(layer.to_owned());
    }
    match layers.is_empty() {
        true => Err(AdapterError::Empty {
            path: checkpoint.path().to_owned(),
        }),
        false => Ok(layers),
    }
}

fn unfit(checkpoint: &Checkpoint, tensor: &str, message: String) -> AdapterError {
    AdapterError::Tensor {
        path: checkpoint.path().to_owned(),
        tensor: excerpt(tensor),
        message,
    }
}

/// The start of a text that may be long.
fn excerpt(text: &str) -> String {
    let mut start: String = text.chars().take(EXCERPT).collect();
    if start.len() < text.len() {
        start.push('…');
    }
    start
}

/// The `adapter_config.json` of adapters that were trained on the model `base`, which has the linear layers `all`.
pub fn config_json(lora: &LoraConfig, all: &[String], base: Option<&Path>) -> Value {
    let alpha = match lora.alpha.fract() == 0.0 && lora.alpha < 2_f64.powi(53) {
        true => json!(lora.alpha as u64),
        false => json!(lora.alpha),
    };
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "target_modules": target_modules(&lora.targets, all),
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
    })
}

/// What names the layers to PEFT, which takes ends of names: the last parts of their names where these name no other layer, else
/// whole names.
fn target_modules<'a>(targets: &Targets, all: &'a [String]) -> BTreeSet<&'a str> {
    let last = |layer: &'a str| layer.rsplit('.').next().unwrap_or(layer);
    let (with, without): (Vec<&str>, Vec<&str>) =
        all.iter().map(String::as_str).partition(|layer| targets.select(layer));
    let ends: BTreeSet<&str> = with.iter().copied().map(last).collect();
    match without.into_iter().any(|layer| ends.contains(last(layer))) {
        true => with.into_iter().collect(),
        false => ends,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_named_by_their_last_parts_where_these_suffice() {
        let all = ["h.0.q", "h.0.v", "h.1.q", "h.1.v"].map(str::to_owned);
        let names = |layers: &[&str]| {
            let layers = layers.iter().map(|&layer| layer.to_owned()).collect();
            let named = target_modules(&Targets::Layers(layers), &all);
            named.into_iter().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(names(&["h.0.q", "h.1.q"]), ["q"]);
        assert_eq!(names(&["h.0.q", "h.1.v"]), ["h.0.q", "h.1.v"]);
    }
}
