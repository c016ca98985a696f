//! What the user asked for, and what it means.
//!
//! A [`Request`] is flags or a TOML file, everything optional; [`Settings`] has every value filled in. Settings print as a TOML
//! file that is a valid request.

mod value;

use std::path::{Path, PathBuf};

use clap::Args;
use serde::{Deserialize, Serialize};
use tightfit_model::llama::BatchShape;
use tightfit_model::{LlamaConfig, ModelError};
use tightfit_pass::AdamWConfig;

use crate::input::read_text;
use crate::lr::{self, Decay};

use value::Written;
pub use value::{Bytes, ClipNorm};

/// Declares every setting once: its heading in the help, how the file and the flag spell it, its type, default and help.
macro_rules! settings {
    ($($heading:literal {
        $($(#[doc = $doc:literal])+ #[arg($($arg:tt)*)] $name:ident: $ty:ty = $default:expr;)+
    })+) => {
        /// Settings as a user writes them, in flags or a file. What is absent has a default.
        #[derive(Args, Clone, Debug, Default, PartialEq, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Request {
            $($(
                $(#[doc = $doc])+
                #[arg(
                    long,
                    allow_negative_numbers = true,
                    value_parser = <$ty as Written>::read,
                    help_heading = $heading,
                    help = help::<$ty>(concat!($($doc),+), &$default),
                    $($arg)*
                )]
                pub $name: Option<$ty>,
            )+)+
            /// Sequences in memory at one time; divides the batch [default: all]
            #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = u64::read, help_heading = "Memory and machine")]
            pub micro_batch: Option<u64>,
            /// Memory that the whole process may use, such as 3.8GiB [default: what the machine and its cgroup leave, less a
            /// margin]
            #[arg(long, allow_negative_numbers = true, value_name = "BYTES", help_heading = "Memory and machine")]
            pub budget: Option<Bytes>,
            /// Threads that compute; results do not depend on it [default: one for each core]
            #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = usize::read, help_heading = "Memory and machine")]
            pub threads: Option<usize>,
        }

        impl Request {
            /// These settings, and `other`'s where these have none.
            pub fn or(self, other: Self) -> Self {
                Self {
                    $($($name: self.$name.or(other.$name),)+)+
                    micro_batch: self.micro_batch.or(other.micro_batch),
                    budget: self.budget.or(other.budget),
                    threads: self.threads.or(other.threads),
                }
            }
        }

        /// Every setting of a job, defaults filled in.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        pub struct Settings {
            $($($(#[doc = $doc])+ pub $name: $ty,)+)+
            /// Sequences in memory at one time; divides the batch.
            pub micro_batch: u64,
            /// Memory that the whole process may use.
            pub budget: Bytes,
            /// Threads that compute.
            pub threads: usize,
        }

        impl Settings {
            /// Fills in every default that is the same for every job and machine.
            fn fill(request: Request, machine: Machine) -> Self {
                let mut settings = Self {
                    $($($name: request.$name.unwrap_or($default),)+)+
                    micro_batch: 0,
                    budget: request.budget.unwrap_or(machine.budget),
                    threads: request.threads.unwrap_or(machine.threads),
                };
                settings.micro_batch = request.micro_batch.unwrap_or(settings.batch);
                settings
            }
        }
    };
}

/// Defaults that differ from machine to machine.
struct Machine {
    budget: Bytes,
    threads: usize,
}

/// A flag's help: its words and its default, spelled as the flag takes it.
fn help<T: Serialize>(words: &str, default: &T) -> String {
    // Every default is a number, a bool or a short text, which JSON can hold.
    let default = match serde_json::to_value(default).unwrap_or_default() {
        serde_json::Value::String(text) => text,
        other => other.to_string(),
    };
    format!("{} [default: {default}]", words.trim())
}

settings! {
    "Model" {
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
        /// Query heads; divides the hidden size
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
        /// Whether the head shares the embedding's table: true or false
        #[arg(value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
        tie_word_embeddings: bool = true;
        /// Standard deviation of fresh matrices
        #[arg(value_name = "X")]
        initializer_range: f64 = 0.02;
    }
    "Training" {
        /// Sequences of each step
        #[arg(value_name = "N")]
        batch: u64 = 4;
        /// Tokens of each sequence
        #[arg(value_name = "N")]
        seq: u64 = 256;
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
    "Memory and machine" {
        /// Rows whose logits exist at one time
        #[arg(value_name = "N")]
        loss_chunk: u64 = 512;
    }
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
    #[error("{}: {}", path.display(), source.to_string().trim_end())]
    Toml {
        /// The file.
        path: PathBuf,
        /// Line and reason.
        source: Box<toml::de::Error>,
    },
    /// A model that cannot be.
    #[error(transparent)]
    Model(ModelError),
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
/// Most tokens of a step, and bound of whatever counts them: rows are indexed with an `i32`.
const MAX_TOKENS: u64 = i32::MAX as u64;
/// TOML's integers end here.
const MAX_INTEGER: u64 = i64::MAX as u64;
/// Most bytes of a settings file: more are a mistake.
const MAX_FILE: u64 = 1 << 20;

impl Request {
    /// Reads a TOML file of settings.
    ///
    /// # Errors
    /// It is not readable, not TOML, or has a setting that does not exist.
    pub fn read(path: &Path) -> Result<Self, SettingsError> {
        let text = read_text(path, MAX_FILE).map_err(|source| SettingsError::Read {
            path: path.to_owned(),
            source,
        })?;
        toml::from_str(&text).map_err(|source| SettingsError::Toml {
            path: path.to_owned(),
            source: Box::new(source),
        })
    }

    /// Fills in every default and checks every value. `budget` is used where the request names none.
    ///
    /// # Errors
    /// A value out of range, by its name.
    pub fn resolve(self, budget: u64) -> Result<Settings, SettingsError> {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let machine = Machine {
            budget: Bytes(budget),
            threads: cores.min(MAX_THREADS),
        };
        let settings = Settings::fill(self, machine);
        settings.check()?;
        Ok(settings)
    }
}

impl Settings {
    fn check(&self) -> Result<(), SettingsError> {
        self.check_counts()?;
        self.check_numbers()?;
        self.model().check().map_err(|error| match error {
            ModelError::Config {
                field: "head_dim",
                value,
                message,
            } => {
                let heads = self.num_attention_heads;
                let message = format!("makes {heads} heads of {value}, and a head's size {message}");
                invalid("hidden_size", self.hidden_size, message)
            }
            ModelError::Config { field, value, message } => SettingsError::Value { field, value, message },
            other => SettingsError::Model(other),
        })
    }

    fn check_counts(&self) -> Result<(), SettingsError> {
        for (field, value, least, most) in [
            ("threads", self.threads as u64, 1, MAX_THREADS as u64),
            ("batch", self.batch, 1, MAX_TOKENS),
            ("micro_batch", self.micro_batch, 1, self.batch),
            ("seq", self.seq, 1, MAX_TOKENS),
            ("loss_chunk", self.loss_chunk, 1, MAX_TOKENS),
            ("steps", self.steps, 1, MAX_STEPS),
            ("warmup_steps", self.warmup_steps, 0, MAX_STEPS),
            ("eval_every", self.eval_every, 0, MAX_STEPS),
            ("eval_batches", self.eval_batches, 1, MAX_STEPS),
            ("seed", self.seed, 0, MAX_INTEGER),
        ] {
            if value < least || value > most {
                return Err(invalid(field, value, format!("must be between {least} and {most}")));
            }
        }
        if self.vocab_size < crate::data::VOCAB_SIZE {
            let message = format!("the built-in text has {} tokens", crate::data::VOCAB_SIZE);
            return Err(invalid("vocab_size", self.vocab_size, message));
        }
        if !self.batch.is_multiple_of(self.micro_batch) {
            let message = format!("must divide the batch of {}", self.batch);
            return Err(invalid("micro_batch", self.micro_batch, message));
        }
        if self.batch / self.micro_batch > MAX_STEPS {
            let message = format!("must leave at most {MAX_STEPS} micro-batches");
            return Err(invalid("micro_batch", self.micro_batch, message));
        }
        if self.micro_batch.saturating_mul(self.seq) > MAX_TOKENS {
            let message = format!(
                "must leave at most {MAX_TOKENS} tokens in memory; a micro-batch has {} sequences",
                self.micro_batch
            );
            return Err(invalid("seq", self.seq, message));
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<(), SettingsError> {
        // Kernels compute in `f32`: what is larger is infinite there, and what is smaller is zero.
        let (least, most) = (f64::from(f32::MIN_POSITIVE), f64::from(f32::MAX));
        for (field, value, least, most) in [
            ("lr", self.lr, 0.0, most),
            ("min_lr_ratio", self.min_lr_ratio, 0.0, 1.0),
            ("weight_decay", self.weight_decay, 0.0, most),
            ("adam_eps", self.adam_eps, least, most),
            ("clip_norm", self.clip_norm.0.unwrap_or(1.0), least, most),
        ] {
            if !(least..=most).contains(&value) {
                let or_none = if field == "clip_norm" { ", or `none`" } else { "" };
                let message = format!("must be between {least:?} and {most:?}{or_none}");
                return Err(invalid(field, format!("{value:?}"), message));
            }
        }
        for (field, value) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&value) {
                return Err(invalid(field, format!("{value:?}"), "must be at least 0 and below 1"));
            }
        }
        Ok(())
    }

    /// The settings as a TOML file that makes the same job.
    pub fn to_toml(&self) -> String {
        // Every field is a number that `check` has bounded, a bool or a short string, which TOML can hold.
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
