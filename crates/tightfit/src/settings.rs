//! What the user asked for, and what it means.
//!
//! A [`Request`] is flags or a TOML file, everything optional; [`Settings`] has every value filled in. Settings print as a TOML
//! file that is a valid request.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::{Deserialize, Serialize};
use tightfit_model::LlamaConfig;
use tightfit_model::llama::BatchShape;
use tightfit_pass::AdamWConfig;

use crate::lr::{self, Decay};
use crate::memory::parse_bytes;

/// A number of bytes, written `3.8GiB`, `600MiB` or `1073741824`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl std::str::FromStr for Bytes {
    type Err = crate::memory::ParseBytesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse_bytes(text).map(Self)
    }
}

impl Serialize for Bytes {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(u64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(bytes) => Ok(Self(bytes)),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// A norm to clip gradients to, or `none`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClipNorm(pub Option<f64>);

impl std::str::FromStr for ClipNorm {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self(None)),
            number => match number.parse() {
                Ok(norm) => Ok(Self(Some(norm))),
                Err(_) => Err("expected a number or `none`".to_owned()),
            },
        }
    }
}

impl Serialize for ClipNorm {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Some(norm) => serializer.serialize_f64(norm),
            None => serializer.serialize_str("none"),
        }
    }
}

impl<'de> Deserialize<'de> for ClipNorm {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(f64),
            Text(String),
        }
        match Written::deserialize(deserializer)? {
            Written::Number(norm) => Ok(Self(Some(norm))),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// Declares every setting once: its type, how the file and the flag spell it, its default and its help.
macro_rules! settings {
    ($($(#[doc = $doc:literal])+ $(#[arg($($arg:tt)*)])? $name:ident: $ty:ty = $default:expr;)+) => {
        /// Settings as a user writes them, in flags or a file. What is absent has a default.
        #[derive(Args, Clone, Debug, Default, PartialEq, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Request {
            $($(#[doc = $doc])+ #[arg(long, help_heading = "Settings" $(, $($arg)*)?)] pub $name: Option<$ty>,)+
            /// Memory that the whole process may use [default: what the machine and its cgroup leave, less a margin]
            #[arg(long, value_name = "BYTES", help_heading = "Settings")]
            pub budget: Option<Bytes>,
            /// Threads that compute; results do not depend on it [default: one for each core]
            #[arg(long, value_name = "N", help_heading = "Settings")]
            pub threads: Option<usize>,
        }

        impl Request {
            /// These settings, and `other`'s where these have none.
            pub fn or(self, other: Self) -> Self {
                Self {
                    $($name: self.$name.or(other.$name),)+
                    budget: self.budget.or(other.budget),
                    threads: self.threads.or(other.threads),
                }
            }
        }

        /// Every setting of a job, defaults filled in.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        pub struct Settings {
            $($(#[doc = $doc])+ pub $name: $ty,)+
            /// Memory that the whole process may use.
            pub budget: Bytes,
            /// Threads that compute.
            pub threads: usize,
        }

        impl Settings {
            fn fill(request: Request, budget: Bytes, threads: usize) -> Self {
                Self { $($name: request.$name.unwrap_or($default),)+ budget, threads }
            }
        }
    };
}

settings! {
    /// Rows of the embedding; the built-in text has 256 tokens
    #[arg(value_name = "N")]
    vocab_size: u64 = 256;
    /// Width of the residual stream
    #[arg(value_name = "N")]
    hidden_size: u64 = 256;
    /// Width inside the MLP
    #[arg(value_name = "N")]
    intermediate_size: u64 = 768;
    /// Blocks
    #[arg(value_name = "N", visible_alias = "layers")]
    num_hidden_layers: u64 = 4;
    /// Query heads
    #[arg(value_name = "N", visible_alias = "heads")]
    num_attention_heads: u64 = 4;
    /// Key and value heads; divides the query heads
    #[arg(value_name = "N", visible_alias = "kv-heads")]
    num_key_value_heads: u64 = 2;
    /// Added to the mean square in RMSNorm
    #[arg(value_name = "X")]
    rms_norm_eps: f64 = 1e-5;
    /// Base of the rotary angles
    #[arg(value_name = "X")]
    rope_theta: f64 = 10_000.0;
    /// Whether the head shares the embedding's table
    #[arg(value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    tie_word_embeddings: bool = true;
    /// Standard deviation of fresh matrices
    #[arg(value_name = "X")]
    initializer_range: f64 = 0.02;
    /// Sequences of each step
    #[arg(value_name = "N")]
    batch: u64 = 4;
    /// Sequences that are in memory at one time; divides the batch [default: all of them]
    #[arg(value_name = "N")]
    micro_batch: u64 = 0;
    /// Tokens of each sequence
    #[arg(value_name = "N")]
    seq: u64 = 256;
    /// Rows whose logits exist at one time
    #[arg(value_name = "N")]
    loss_chunk: u64 = 256;
    /// Optimizer steps
    #[arg(value_name = "N")]
    steps: u64 = 250;
    /// Highest learning rate
    #[arg(value_name = "X")]
    lr: f64 = 3e-3;
    /// Steps over which the learning rate rises
    #[arg(value_name = "N")]
    warmup_steps: u64 = 20;
    /// How the learning rate falls after that: cosine, linear or constant
    #[arg(value_name = "NAME")]
    decay: Decay = Decay::Cosine;
    /// The last learning rate, as a fraction of the highest
    #[arg(value_name = "X")]
    min_lr_ratio: f64 = 0.1;
    /// Decoupled decay of matrices
    #[arg(value_name = "X")]
    weight_decay: f64 = 0.1;
    /// Decay of AdamW's first moment
    #[arg(value_name = "X")]
    beta1: f64 = 0.9;
    /// Decay of AdamW's second moment
    #[arg(value_name = "X")]
    beta2: f64 = 0.95;
    /// Added to AdamW's denominator
    #[arg(value_name = "X")]
    adam_eps: f64 = 1e-8;
    /// Largest global norm of the gradients, or `none`
    #[arg(value_name = "N|none")]
    clip_norm: ClipNorm = ClipNorm(Some(1.0));
    /// Steps between evaluations; 0 evaluates only at the end
    #[arg(value_name = "N")]
    eval_every: u64 = 0;
    /// Batches of held-out text in an evaluation
    #[arg(value_name = "N")]
    eval_batches: u64 = 4;
    /// Decides the weights, the text and its order
    #[arg(value_name = "N")]
    seed: u64 = 1;
}

/// A setting that cannot be, or a file that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file is not there or not readable.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not TOML of this form.
    #[error("{}: {source}", path.display())]
    Toml {
        /// The file.
        path: PathBuf,
        /// Line and reason.
        source: Box<toml::de::Error>,
    },
    /// A value out of range.
    #[error("--{} is {value}: {message}", field.replace('_', "-"))]
    Value {
        /// The setting.
        field: &'static str,
        /// As given.
        value: String,
        /// What it must be.
        message: String,
    },
}

fn invalid(field: &'static str, value: impl ToString, message: impl Into<String>) -> SettingsError {
    SettingsError::Value {
        field,
        value: value.to_string(),
        message: message.into(),
    }
}

/// Most threads that a pool is given: more are a mistake.
const MAX_THREADS: usize = 1024;
/// Most steps, batches and the like: they are counted in `f32` on the way to the optimizer, exactly up to here.
const MAX_STEPS: u64 = 1 << 24;

impl Request {
    /// Reads a TOML file of settings.
    ///
    /// # Errors
    /// It is not readable, not TOML, or has a setting that does not exist.
    pub fn read(path: &Path) -> Result<Self, SettingsError> {
        let text = std::fs::read_to_string(path).map_err(|source| SettingsError::Read {
            path: path.to_owned(),
            source,
        })?;
        toml::from_str(&text).map_err(|source| SettingsError::Toml {
            path: path.to_owned(),
            source: Box::new(source),
        })
    }

    /// Fills in every default and checks what no later stage checks. `budget` is used where the request names none.
    ///
    /// # Errors
    /// A value out of range, by its name.
    pub fn resolve(self, budget: u64) -> Result<Settings, SettingsError> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = self.threads.unwrap_or(cores);
        let budget = self.budget.unwrap_or(Bytes(budget));
        let mut settings = Settings::fill(self, budget, threads);
        if settings.micro_batch == 0 {
            settings.micro_batch = settings.batch;
        }
        settings.check()?;
        Ok(settings)
    }
}

impl Settings {
    fn check(&self) -> Result<(), SettingsError> {
        if self.threads == 0 || self.threads > MAX_THREADS {
            return Err(invalid(
                "threads",
                self.threads,
                format!("must be between 1 and {MAX_THREADS}"),
            ));
        }
        if self.vocab_size < crate::data::VOCAB_SIZE {
            let message = format!("the built-in text has {} tokens", crate::data::VOCAB_SIZE);
            return Err(invalid("vocab_size", self.vocab_size, message));
        }
        for (field, value) in [("steps", self.steps), ("eval_batches", self.eval_batches)] {
            if value == 0 || value > MAX_STEPS {
                return Err(invalid(field, value, format!("must be between 1 and {MAX_STEPS}")));
            }
        }
        if !self.batch.is_multiple_of(self.micro_batch) {
            let message = format!("must divide the batch of {}", self.batch);
            return Err(invalid("micro_batch", self.micro_batch, message));
        }
        if self.batch / self.micro_batch.max(1) > MAX_STEPS {
            let message = format!("must leave at most {MAX_STEPS} micro-batches");
            return Err(invalid("micro_batch", self.micro_batch, message));
        }
        for (field, value) in [
            ("lr", self.lr),
            ("weight_decay", self.weight_decay),
            ("adam_eps", self.adam_eps),
            ("min_lr_ratio", self.min_lr_ratio),
        ] {
            if !(value.is_finite() && value >= 0.0) {
                return Err(invalid(field, value, "must be a number of at least 0"));
            }
        }
        for (field, value) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&value) {
                return Err(invalid(field, value, "must be at least 0 and below 1"));
            }
        }
        if let Some(norm) = self.clip_norm.0
            && !(norm.is_finite() && norm > 0.0)
        {
            return Err(invalid("clip_norm", norm, "must be a positive number, or `none`"));
        }
        Ok(())
    }

    /// The settings as a TOML file that makes the same job.
    pub fn to_toml(&self) -> String {
        // Every field is a number, a bool or a short string, which TOML can hold.
        toml::to_string(self).unwrap_or_default()
    }

    /// The model's sizes.
    pub fn model(&self) -> LlamaConfig {
        LlamaConfig {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: None,
            rms_norm_eps: self.rms_norm_eps,
            rope_theta: self.rope_theta,
            tie_word_embeddings: self.tie_word_embeddings,
            initializer_range: self.initializer_range,
        }
    }

    /// The rows of one micro-batch.
    pub fn micro_batch_shape(&self) -> BatchShape {
        BatchShape {
            batch: self.micro_batch,
            seq: self.seq,
            loss_chunk: self.loss_chunk,
        }
    }

    /// Micro-batches of each step.
    pub fn micro_batches(&self) -> u32 {
        // `check` has bounded it.
        (self.batch / self.micro_batch) as u32
    }

    /// The optimizer's constants.
    pub fn adamw(&self) -> AdamWConfig {
        AdamWConfig {
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.adam_eps,
            weight_decay: self.weight_decay,
            clip_norm: self.clip_norm.0,
        }
    }

    /// The learning rate over the run.
    pub fn schedule(&self) -> lr::Schedule {
        lr::Schedule {
            peak: self.lr,
            warmup_steps: self.warmup_steps,
            total_steps: self.steps,
            decay: self.decay,
            min_ratio: self.min_lr_ratio,
        }
    }
}
