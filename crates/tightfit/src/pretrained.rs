//! A model that people have: its configuration, where its weights are, and its tokenizer.

use std::path::{Path, PathBuf};

use tightfit_exec::load::{self, Fill, LoadError};
use tightfit_format::{Checkpoint, FormatError};
use tightfit_ir::{DType, Forward};
use tightfit_model::{DecoderConfig, ModelError, Naming, RowOrder, Sources};
use tightfit_pass::{PassError, lora};
use tightfit_text::tokenizer::{Tokenizer, TokenizerError};

use crate::Session;
use crate::adapters::{ADAPTER_CONFIG, Adapter, AdapterError};
use crate::console::Transfer;
use crate::input::read_regular;

/// What a `config.json` says of a model.
///
/// # Errors
/// It cannot be read, or is of a model of a kind that is not known.
pub fn read_config(path: &Path) -> Result<DecoderConfig, PretrainedError> {
    let text = read_regular(path, MAX_CONFIG).map_err(|source| PretrainedError::Read {
        path: path.to_owned(),
        source,
    })?;
    DecoderConfig::from_hf(&text).map_err(|source| PretrainedError::Model {
        path: path.to_owned(),
        source,
    })
}

/// Most bytes of a `config.json`.
pub const MAX_CONFIG: u64 = 1 << 20;

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PretrainedError {
    /// Its files.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Nothing is there.
    #[error("{} does not exist: a model is a path on this machine, and nothing is downloaded", path.display())]
    NotFound {
        /// As given.
        path: PathBuf,
    },
    /// Its configuration, or tensors that do not fit it.
    #[error("{}: {source}", path.display())]
    Model {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong.
        source: ModelError,
    },
    /// Its configuration cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Weights alone.
    #[error("{}: a safetensors file has no configuration, and there is no config.json beside it", path.display())]
    NoConfig {
        /// The file.
        path: PathBuf,
    },
    /// An adapter that is given in place of a model.
    #[error("{0} is an adapter: pass it as --adapter, and the model that it was trained on as --model", path.display())]
    IsAdapter {
        /// The folder.
        path: PathBuf,
    },
    /// An adapter that cannot be used, or is one of another model.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// Its tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// Reading its weights.
    #[error("{}: {source}", path.display())]
    Load {
        /// The model.
        path: PathBuf,
        /// What is wrong.
        source: Box<LoadError>,
    },
    /// A tokenizer with more tokens than the model has rows.
    #[error("{}: its tokenizer has {tokens} tokens and its embedding {vocab_size} rows", path.display())]
    Vocabulary {
        /// The model.
        path: PathBuf,
        /// Of the tokenizer.
        tokens: usize,
        /// Of the embedding.
        vocab_size: u64,
    },
}

/// A model whose files are open. No weight has been read.
#[derive(Debug)]
pub struct Pretrained {
    path: PathBuf,
    checkpoint: Checkpoint,
    /// What it is made of.
    pub config: DecoderConfig,
    sources: Sources,
    adapter: Option<Adapter>,
}

impl Pretrained {
    /// Opens a Hugging Face folder, a safetensors file in one, or a GGUF file.
    ///
    /// # Errors
    /// A file is missing or damaged, or the model is of a kind that is not known.
    pub fn open(path: &Path) -> Result<Self, PretrainedError> {
        if !path.exists() {
            return Err(PretrainedError::NotFound { path: path.to_owned() });
        }
        if path.join(ADAPTER_CONFIG).exists() && !path.join("config.json").exists() {
            return Err(PretrainedError::IsAdapter { path: path.to_owned() });
        }
        let checkpoint = Checkpoint::open(path)?;
        let named = |source| PretrainedError::Model {
            path: path.to_owned(),
            source,
        };
        let (config, naming) = match checkpoint.metadata() {
            Some(metadata) => {
                let factors = rope_factors(&checkpoint)?;
                let has_tensor = |name: &str| checkpoint.tensors().contains_key(name);
                let config = DecoderConfig::from_gguf(metadata, has_tensor, factors.as_deref()).map_err(named)?;
                (config, Naming::Gguf)
            }
            None => {
                let path = checkpoint.folder().unwrap_or(path).join("config.json");
                if !path.exists() {
                    return Err(PretrainedError::NoConfig { path });
                }
                (read_config(&path)?, Naming::HuggingFace)
            }
        };
        let tensors = checkpoint.tensors().iter();
        let tensors = tensors.map(|(name, entry)| (name.as_str(), &*entry.shape));
        let sources = config.sources(naming, tensors).map_err(named)?;
        Ok(Self {
            path: path.to_owned(),
            checkpoint,
            config,
            sources,
            adapter: None,
        })
    }

    /// Opens a model, and an adapter of it where one is given.
    ///
    /// # Errors
    /// As [`open`](Self::open) and [`with_adapter`](Self::with_adapter).
    pub fn open_with(path: &Path, adapter: Option<&Path>) -> Result<Self, PretrainedError> {
        let model = Self::open(path)?;
        match adapter {
            Some(adapter) => model.with_adapter(adapter),
            None => Ok(model),
        }
    }

    /// The model with an adapter.
    ///
    /// # Errors
    /// The adapter's folder cannot be used, or is one of another model.
    pub fn with_adapter(mut self, path: &Path) -> Result<Self, PretrainedError> {
        let adapter = Adapter::open(path)?;
        let weights = self.config.weights().map_err(|source| PretrainedError::Model {
            path: self.path.clone(),
            source,
        })?;
        adapter.check(&weights)?;
        self.adapter = Some(adapter);
        Ok(self)
    }

    /// Its adapter.
    pub fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// A graph of the model with its adapter, as it is evaluated: without dropout.
    ///
    /// # Errors
    /// The adapter has a layer that the graph does not have.
    pub fn adapt(&self, forward: Forward) -> Result<Forward, PassError> {
        match self.adapter().map(Adapter::config) {
            Some(config) => lora(forward, config),
            None => Ok(forward),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its files.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// Which of its tensors is which weight.
    pub fn sources(&self) -> &Sources {
        &self.sources
    }

    /// Whether it brings a tokenizer.
    pub fn has_tokenizer(&self) -> bool {
        let folder = self.checkpoint.folder();
        folder.is_none_or(|folder| folder.join("tokenizer.json").exists())
    }

    /// Its tokenizer.
    ///
    /// # Errors
    /// It has none, or one that is not known or does not belong to it.
    pub fn tokenizer(&self) -> Result<Tokenizer, PretrainedError> {
        let tokenizer = Self::tokenizer_of(&self.checkpoint)?;
        if tokenizer.vocab_size() as u64 > self.config.vocab_size {
            return Err(PretrainedError::Vocabulary {
                path: self.path.clone(),
                tokens: tokenizer.vocab_size(),
                vocab_size: self.config.vocab_size,
            });
        }
        Ok(tokenizer)
    }

    /// The tokenizer beside or inside a checkpoint, whatever its model.
    ///
    /// # Errors
    /// There is none, or one that is not known.
    pub fn tokenizer_of(checkpoint: &Checkpoint) -> Result<Tokenizer, PretrainedError> {
        Ok(match checkpoint.metadata() {
            Some(metadata) => Tokenizer::from_gguf(metadata)?,
            None => Tokenizer::from_folder(checkpoint.folder().unwrap_or(checkpoint.path()))?,
        })
    }

    /// Which of its tensors, and of its adapter's, fills which of its weights.
    pub fn fills(&self) -> Vec<Fill<'_>> {
        let mut fills = self.weights();
        fills.extend(self.adapter.iter().flat_map(Adapter::fills));
        fills
    }

    /// Which of the model's own tensors fills which of its weights.
    pub fn weights(&self) -> Vec<Fill<'_>> {
        let fills = self.sources.weights.iter().filter_map(|(weight, source)| {
            Some(Fill {
                weight: weight.clone(),
                entry: self.checkpoint.tensors().get(&source.name)?,
                interleaved_heads: match source.rows {
                    RowOrder::AsIs => None,
                    RowOrder::InterleavedHeads { heads } => Some(heads),
                },
            })
        });
        fills.collect()
    }

    /// How its file stores a weight, where weights can be stored so.
    pub fn stored(&self, weight: &str) -> Option<DType> {
        let source = self.sources.weights.get(weight)?;
        load::stored(self.checkpoint.tensors().get(&source.name)?.encoding)
    }

    /// Reads its weights into a session, and shows how far it is.
    ///
    /// # Errors
    /// A file cannot be read, or a tensor does not fit.
    pub fn load(&self, session: &mut Session) -> Result<(), PretrainedError> {
        let total = self.fills().iter().map(|fill| fill.entry.bytes()).sum();
        let transfer = Transfer::new("reading weights", total);
        let mut load = |checkpoint: &Checkpoint, fills: &[Fill<'_>]| {
            let loaded = load::load(session, checkpoint, fills, |bytes| transfer.add(bytes));
            loaded.map_err(|source| match source {
                // Names the file itself.
                LoadError::Format(error) => error.into(),
                source => PretrainedError::Load {
                    path: checkpoint.path().to_owned(),
                    source: Box::new(source),
                },
            })
        };
        load(&self.checkpoint, &self.weights())?;
        if let Some(adapter) = &self.adapter {
            load(adapter.checkpoint(), &adapter.fills())?;
        }
        transfer.finish();
        Ok(())
    }
}

/// `rope_freqs.weight`: how GGUF stretches rotary frequencies.
fn rope_factors(checkpoint: &Checkpoint) -> Result<Option<Vec<f32>>, FormatError> {
    /// More than half of any head.
    const MAX_FACTORS: u64 = 1 << 15;
    let Some(entry) = checkpoint.tensors().get("rope_freqs.weight") else {
        return Ok(None);
    };
    // What is longer fits no head; the model says so.
    let mut factors = vec![0.0; entry.elements().min(MAX_FACTORS) as usize];
    let mut staging = [0; 1 << 10];
    checkpoint.read_f32(entry, 0, &mut staging, &mut factors)?;
    Ok(Some(factors))
}
