//! What a job trains: a model's configuration, and its files where they are at hand.

use tightfit_exec::load::Fill;
use tightfit_ir::DType;
use tightfit_model::{DecoderConfig, Known, ModelError};
use tightfit_pass::LoraConfig;

use crate::pretrained::Pretrained;
use crate::settings::Settings;

/// A model, as far as planning must know it.
#[derive(Clone, Debug)]
pub struct Subject<'a> {
    /// What it is made of.
    pub config: DecoderConfig,
    source: Source<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    /// Weights are made afresh.
    Fresh,
    /// Weights are in these files.
    Files(&'a Pretrained),
    /// Weights are in files elsewhere, whose tensors have this dtype.
    Elsewhere(DType),
}

impl<'a> Subject<'a> {
    /// The model that is given, or else a fresh one of the settings' sizes.
    pub fn of(settings: &Settings, pretrained: Option<&'a Pretrained>) -> Self {
        match pretrained {
            Some(files) => Self {
                config: files.config.clone(),
                source: Source::Files(files),
            },
            None => Self {
                config: settings.fresh_model(),
                source: Source::Fresh,
            },
        }
    }

    /// A model by its name: nothing of it is on this machine.
    ///
    /// # Errors
    /// As [`Known::config`].
    pub fn known(known: &Known) -> Result<Self, ModelError> {
        Ok(Self {
            config: known.config()?,
            source: Source::Elsewhere(known.dtype),
        })
    }

    /// A model by its configuration alone; its weights are taken to be stored in `bf16`, as most are.
    pub fn configured(config: DecoderConfig) -> Self {
        Self {
            config,
            source: Source::Elsewhere(DType::Bf16),
        }
    }

    /// How its file stores a weight, by the weight's name; `None` for one that is made afresh.
    pub fn stored(&self, weight: &str) -> Option<DType> {
        match self.source {
            Source::Fresh => None,
            Source::Files(files) => files.stored(weight),
            Source::Elsewhere(dtype) => Some(dtype),
        }
    }

    /// What is read from files, and how.
    pub fn fills(&self) -> Vec<Fill<'a>> {
        match self.source {
            Source::Files(files) => files.fills(),
            Source::Fresh | Source::Elsewhere(_) => Vec::new(),
        }
    }

    /// The adapters that a job trains, if any: those that are given, else fresh ones.
    pub fn adapters(&self, settings: &Settings) -> Option<LoraConfig> {
        let fresh = settings.lora()?;
        let given = match self.source {
            Source::Files(files) => files.adapter(),
            Source::Fresh | Source::Elsewhere(_) => None,
        };
        Some(match given {
            None => fresh,
            Some(given) => LoraConfig {
                dropout: fresh.dropout,
                seed: fresh.seed,
                ..given.config().clone()
            },
        })
    }
}
