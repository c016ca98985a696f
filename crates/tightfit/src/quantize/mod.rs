//! Quantising the weights of a model into a file, tensor by tensor.
//!
//! Where each tensor goes in the file is known before any is read, so the threads take one tensor after the other, each with the memory
//! of one quantised tensor and of a few of its rows.

mod weights;
mod write;

use std::io;
use std::path::PathBuf;

use serde::Serialize;
use tightfit_exec::load::LoadError;
use tightfit_format::safetensors::Layout;
use tightfit_format::{Encoding, Problem};
use tightfit_ir::Block;
use tightfit_model::{DecoderConfig, ModelError};
use tightfit_pass::Pattern;

use crate::memory::format_bytes;

pub use weights::{Source, Uses, Weight, weights};
pub use write::write;

/// Why a model cannot be quantised.
#[derive(Debug, thiserror::Error)]
pub enum QuantizeError {
    /// The model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A pattern without a layer.
    #[error("--targets {pattern}: no linear layer is called that; there are {}", known.join(", "))]
    Target {
        /// As given.
        pattern: String,
        /// The last names of all linear layers.
        known: Vec<String>,
    },
    /// A tensor that was quantised before: its errors would add up.
    #[error("tensor `{tensor}` is {from} already: quantise the model that it was made of")]
    Already {
        /// Which.
        tensor: String,
        /// What it is.
        from: Encoding,
    },
    /// Nothing to do.
    #[error("the model has no linear layer")]
    Nothing,
    /// A tensor whose size cannot be.
    #[error("tensor `{tensor}`: {problem}")]
    Layout {
        /// Which.
        tensor: String,
        /// What is wrong.
        problem: Problem,
    },
    /// An output folder that holds a model.
    #[error("{} holds a model: choose another --out, or pass --overwrite to replace it", dir.display())]
    Occupied {
        /// The folder.
        dir: PathBuf,
    },
    /// An output folder that holds something else.
    #[error("{} holds {file}, which quantize does not write: choose another --out", dir.display())]
    Foreign {
        /// The folder.
        dir: PathBuf,
        /// What is in it.
        file: String,
    },
    /// A disk that is too full.
    #[error("no room in {}: the file needs {}, {} are free", dir.display(), format_bytes(*needed), format_bytes(*free))]
    NoRoom {
        /// The folder.
        dir: PathBuf,
        /// Bytes of the file.
        needed: u64,
        /// Bytes that the file system has left.
        free: u64,
    },
    /// The source cannot be read.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The file cannot be written.
    #[error("cannot write: {0}")]
    Write(#[from] io::Error),
    /// The user's wish.
    #[error("stopped: nothing was written")]
    Stopped,
}

/// What is quantised, and how.
#[derive(Clone, Debug)]
pub struct Choice {
    /// The format, one that is [made here](Block::encodes).
    pub block: Block,
    /// Linear layers by their names, as adapters' targets are; all where this is empty.
    pub targets: Vec<Pattern>,
    /// Whether embeddings are, too.
    pub embeddings: bool,
    /// Whether the head is, too.
    pub head: bool,
}

impl Choice {
    /// Whether a weight is quantised.
    fn takes(&self, weight: &Weight) -> bool {
        let uses = weight.uses;
        let table = uses.embedding && self.embeddings || uses.head && self.head;
        let linear = uses.linear && !uses.embedding && !uses.head;
        let target = self.targets.is_empty() || self.targets.iter().any(|pattern| pattern.names(layer(&weight.name)));
        table || linear && target
    }
}

/// A layer is called as its weight, without `.weight`.
fn layer(weight: &str) -> &str {
    weight.strip_suffix(".weight").unwrap_or(weight)
}

/// A weight on its way from one encoding to another.
#[derive(Clone, Debug)]
pub struct Item {
    /// The weight.
    pub weight: Weight,
    /// In the source.
    pub from: Encoding,
    /// Bytes there.
    pub bytes_before: u64,
    /// Where it is quantised: into what.
    pub block: Option<Block>,
}

/// What will be written.
#[derive(Debug)]
pub struct Plan {
    /// The weights in the order of the model's layers.
    pub items: Vec<Item>,
    /// The file.
    pub layout: Layout,
}

/// Decides what becomes of each weight.
///
/// # Errors
/// A target that the model does not have, or none at all; a tensor that was quantised before.
pub fn plan(config: &DecoderConfig, source: &Source<'_>, choice: &Choice) -> Result<Plan, QuantizeError> {
    let weights = weights(config)?;
    check_targets(&weights, &choice.targets)?;
    let mut layout = Layout::default();
    let mut items = Vec::with_capacity(weights.len());
    for weight in weights {
        let from = source.encoding(&weight);
        let block = choice.takes(&weight).then_some(choice.block);
        if let (Some(_), Encoding::Block(made)) = (block, from)
            && made.encodes()
        {
            let tensor = weight.name;
            return Err(QuantizeError::Already { tensor, from });
        }
        let to = block.map_or(from, Encoding::Block);
        layout
            .push(&weight.name, to, &weight.shape)
            .map_err(|problem| QuantizeError::Layout {
                tensor: weight.name.clone(),
                problem,
            })?;
        let elements: u64 = weight.shape.iter().product();
        let bytes_before = source
            .find(&weight)
            .map_or(elements * from.block_bytes(), |(entry, _)| entry.bytes());
        items.push(Item {
            weight,
            from,
            bytes_before,
            block,
        });
    }
    if items.iter().all(|item| item.block.is_none()) {
        return Err(QuantizeError::Nothing);
    }
    Ok(Plan {
        items,
        layout: layout.finish(&[("format", "pt")]),
    })
}

/// Each pattern names a layer.
fn check_targets(weights: &[Weight], targets: &[Pattern]) -> Result<(), QuantizeError> {
    let layers = weights
        .iter()
        .filter(|weight| weight.uses.linear)
        .map(|weight| layer(&weight.name));
    let Some(pattern) = targets
        .iter()
        .find(|pattern| !layers.clone().any(|layer| pattern.names(layer)))
    else {
        return Ok(());
    };
    let mut known: Vec<_> = layers
        .map(|layer| layer.rsplit('.').next().unwrap_or(layer).to_owned())
        .collect();
    known.sort_unstable();
    known.dedup();
    Err(QuantizeError::Target {
        pattern: pattern.0.clone(),
        known,
    })
}

/// What became of a tensor.
#[derive(Clone, Debug, Serialize)]
pub struct TensorReport {
    /// As Hugging Face names it.
    pub name: String,
    /// Outermost first.
    pub shape: Vec<u64>,
    /// The encoding that it had.
    pub from: String,
    /// The encoding that it has.
    pub to: String,
    /// Bytes that it had.
    pub bytes_before: u64,
    /// Bytes that it has.
    pub bytes_after: u64,
    /// `Σ (x − x')² / Σ x²` of a quantised one; 0 where all are zero.
    pub relative_squared_error: Option<f64>,
}

/// Squares that are added up over a tensor, and over tensors.
#[derive(Clone, Copy, Debug, Default)]
pub struct Squares {
    /// Of the differences.
    pub error: f64,
    /// Of the values.
    pub value: f64,
}

impl Squares {
    /// Adds those of `values`, which became `decoded`.
    fn add(&mut self, values: &[f32], decoded: &[f32]) {
        for (&x, &y) in values.iter().zip(decoded) {
            self.error += f64::from(x - y).powi(2);
            self.value += f64::from(x).powi(2);
        }
    }

    /// The sum of both.
    pub fn and(self, other: Self) -> Self {
        Self {
            error: self.error + other.error,
            value: self.value + other.value,
        }
    }

    /// The error over the values; 0 where there is none.
    pub fn relative(self) -> f64 {
        if self.error == 0.0 {
            0.0
        } else {
            self.error / self.value
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(targets: &[&str]) -> Choice {
        Choice {
            block: Block::Nf4,
            targets: targets.iter().map(|&target| Pattern(target.to_owned())).collect(),
            embeddings: false,
            head: false,
        }
    }

    fn taken(config: &DecoderConfig, choice: &Choice) -> Vec<String> {
        let plan = plan(config, &Source::Fresh(1), choice).unwrap();
        let taken = plan.items.into_iter().filter(|item| item.block.is_some());
        taken.map(|item| item.weight.name).collect()
    }

    fn config(tied: bool) -> DecoderConfig {
        DecoderConfig {
            vocab_size: 32,
            hidden_size: 16,
            intermediate_size: 24,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 1,
            tie_word_embeddings: tied,
            ..DecoderConfig::default()
        }
    }

    #[test]
    fn linear_layers_are_taken_and_tables_when_asked_for() {
        let (tied, own) = (config(true), config(false));
        let linear = taken(&own, &choice(&[]));
        assert_eq!(linear.len(), 7);
        assert!(linear.iter().all(|name| name.ends_with("_proj.weight")));
        assert_eq!(taken(&tied, &choice(&[])), linear);

        let with = |embeddings, head| Choice {
            embeddings,
            head,
            ..choice(&["mlp.down_proj", "q_proj"])
        };
        let layers = [
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.mlp.down_proj.weight",
        ];
        assert_eq!(taken(&own, &with(false, false)), layers);
        assert_eq!(taken(&own, &with(true, false))[0], "model.embed_tokens.weight");
        assert_eq!(taken(&own, &with(false, true))[2], "lm_head.weight");
        // A tied table is both.
        for (embeddings, head) in [(true, false), (false, true)] {
            assert_eq!(taken(&tied, &with(embeddings, head))[0], "model.embed_tokens.weight");
        }
    }

    #[test]
    fn a_pattern_without_a_layer_is_refused() {
        for pattern in ["proj", "lm_head", "model.layers", ""] {
            let error = plan(&config(false), &Source::Fresh(1), &choice(&[pattern])).unwrap_err();
            assert!(error.to_string().contains("down_proj, gate_proj"), "{error}");
        }
    }
}
