//! What the user asked for, and what it means.
//!
//! A [`Request`] is flags or a TOML file, everything optional; [`Settings`] has every value filled in. Settings print as a TOML
//! file that is a valid request.

mod check;
mod error;
mod meaning;
mod value;

use std::path::{Path, PathBuf};

use clap::Args;
use serde::{Deserialize, Serialize};

use crate::input::read_text;
use crate::lr::Decay;

use check::MAX_THREADS;
pub use error::SettingsError;
pub use tightfit_text::data::Long;
pub use value::{
    AskedMethod, Base, ByteLimit, Bytes, ClipNorm, Count, LossScaling, Method, MlpTile, Offload, Optimizer, Precision,
    Recompute, Targets, Written,
};

/// Declares every setting once: its heading in the help, how the file and the flag spell it, its type, default and help.
macro_rules! settings {
    ($($heading:literal {
        $($(#[doc = $doc:literal])+ #[arg($($arg:tt)*)] $name:ident: $ty:ty = $default:expr;)+
    })+) => {
        /// Settings as a user writes them, in flags or a file. What is absent has a default.
        #[derive(Args, Clone, Debug, Default, PartialEq, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Request {
            /// Start from this model: a Hugging Face folder, a .safetensors file in one, or a .gguf file [default: fresh weights,
            /// on generated text]
            #[arg(long, value_name = "PATH", help_heading = "Model")]
            pub model: Option<PathBuf>,
            /// Train on these files: .txt or .md as text; .jsonl with text, prompt and completion, instruction and output, or
            /// messages on each line
            #[arg(long, value_name = "FILE", num_args = 1.., help_heading = "Data")]
            pub data: Option<Vec<PathBuf>>,
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
            /// What is trained: full, all parameters; lora, adapters beside frozen weights; qlora, adapters beside frozen weights that
            /// are quantised; auto, the first of these that fits and takes no longer than need be [default: full; auto in `plan`]
            #[arg(long, value_name = "full|lora|qlora|auto", value_parser = AskedMethod::read, help_heading = "Training")]
            pub method: Option<AskedMethod>,
            /// Passes over the training rows, instead of --steps
            #[arg(long, allow_negative_numbers = true, value_name = "X", value_parser = f64::read, help_heading = "Training", conflicts_with = "steps")]
            pub epochs: Option<f64>,
            /// Start from this adapter, a folder in PEFT's format, on --model; its rank, scaling and layers are the run's
            #[arg(long, value_name = "DIR", help_heading = "Adapters")]
            pub adapter: Option<PathBuf>,
            /// Sequences in memory at one time; divides the batch. auto is the largest number that fits [default: all]
            #[arg(long, allow_negative_numbers = true, value_name = "N|auto", value_parser = Count::read, help_heading = "Memory techniques")]
            pub micro_batch: Option<Count>,
            /// Memory that the whole process may use, such as 3.8GiB [default: what the machine and its cgroup leave, less a
            /// margin]
            #[arg(long, allow_negative_numbers = true, value_name = "BYTES", help_heading = "Memory and machine")]
            pub budget: Option<Bytes>,
            /// Threads that compute; results do not depend on it [default: one for each core]
            #[arg(long, allow_negative_numbers = true, value_name = "N", value_parser = usize::read, help_heading = "Memory and machine")]
            pub threads: Option<usize>,
            /// Folder for the file that offloading uses; the file has no name and is gone with the run [default: the --out folder,
            /// else the current one]
            #[arg(long, value_name = "DIR", help_heading = "Memory and machine")]
            pub scratch: Option<PathBuf>,
        }

        impl Request {
            /// Names of the settings that are given.
            pub fn given(&self) -> impl Iterator<Item = &'static str> {
                let settings = [
                    ("model", self.model.is_some()),
                    ("adapter", self.adapter.is_some()),
                    ("data", self.data.is_some()),
                    ("method", self.method.is_some()),
                    ("epochs", self.epochs.is_some()),
                    $($((stringify!($name), self.$name.is_some()),)+)+
                    ("micro_batch", self.micro_batch.is_some()),
                    ("budget", self.budget.is_some()),
                    ("threads", self.threads.is_some()),
                    ("scratch", self.scratch.is_some()),
                ];
                settings.into_iter().filter(|(_, given)| *given).map(|(name, _)| name)
            }

            /// These settings, and `other`'s where these have none.
            pub fn or(self, other: Self) -> Self {
                Self {
                    model: self.model.or(other.model),
                    adapter: self.adapter.or(other.adapter),
                    data: self.data.or(other.data),
                    method: self.method.or(other.method),
                    epochs: if self.steps.is_some() { None } else { self.epochs.or(other.epochs) },
                    $($($name: self.$name.or(other.$name),)+)+
                    micro_batch: self.micro_batch.or(other.micro_batch),
                    budget: self.budget.or(other.budget),
                    threads: self.threads.or(other.threads),
                    scratch: self.scratch.or(other.scratch),
                }
            }
        }

        /// Every setting of a job, defaults filled in.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        pub struct Settings {
            /// The model to start from.
            #[serde(skip_serializing_if = "Option::is_none")]
            pub model: Option<PathBuf>,
            /// The adapter to start from.
            #[serde(skip_serializing_if = "Option::is_none")]
            pub adapter: Option<PathBuf>,
            /// The files to train on.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub data: Vec<PathBuf>,
            /// What is trained.
            pub method: Method,
            /// Passes over the training rows; decides the steps once those are counted.
            #[serde(skip_serializing_if = "Option::is_none")]
            pub epochs: Option<f64>,
            $($($(#[doc = $doc])+ pub $name: $ty,)+)+
            /// Sequences in memory at one time; divides the batch.
            pub micro_batch: Count,
            /// Memory that the whole process may use.
            pub budget: Bytes,
            /// Threads that compute.
            pub threads: usize,
            /// Folder for the file that offloading uses.
            #[serde(skip_serializing_if = "Option::is_none")]
            pub scratch: Option<PathBuf>,
        }

        /// Every setting that has one default, with its heading.
        const HEADINGS: &[(&str, &str)] = &[$($(($heading, stringify!($name)),)+)+];

        impl Settings {
            /// Fills in every default that is the same for every job and machine.
            fn fill(request: Request, machine: Machine) -> Self {
                let mut settings = Self {
                    model: request.model,
                    adapter: request.adapter,
                    data: request.data.unwrap_or_default(),
                    method: match request.method {
                        Some(AskedMethod::Of(method)) => method,
                        Some(AskedMethod::Auto) | None => Method::Full,
                    },
                    epochs: request.epochs,
                    $($($name: request.$name.unwrap_or($default),)+)+
                    micro_batch: Count::Auto,
                    budget: request.budget.unwrap_or(machine.budget),
                    threads: request.threads.unwrap_or(machine.threads),
                    scratch: request.scratch,
                };
                settings.micro_batch = match request.micro_batch {
                    // Gradients that never meet cannot be summed.
                    Some(Count::Auto) if settings.update_in_backward => Count::Of(settings.batch),
                    given => given.unwrap_or(Count::Of(settings.batch)),
                };
                settings
            }
        }
    };
}

/// The settings under a heading.
fn under(heading: &'static str) -> impl Iterator<Item = &'static str> {
    let headings = HEADINGS.iter().filter(move |(of, _)| *of == heading);
    headings.map(|(_, name)| *name)
}

/// The settings that a given model has of its own.
fn sizes() -> impl Iterator<Item = &'static str> {
    under(ARCHITECTURE)
}

/// The settings that mean nothing where no adapters are trained.
fn of_adapters() -> impl Iterator<Item = &'static str> {
    under(ADAPTERS)
}

/// Of these, the settings that a given adapter has of its own.
fn of_fresh_adapters() -> impl Iterator<Item = &'static str> {
    of_adapters().filter(|name| *name != "dropout")
}

/// Their headings.
const ARCHITECTURE: &str = "Sizes of a fresh model";
const ADAPTERS: &str = "Adapters";

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
    "Sizes of a fresh model" {
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
    "Data" {
        /// What becomes of a sample that is longer than a row: split or drop; a text file is always split
        #[arg(value_name = "NAME")]
        long: Long = Long::Split;
        /// Skip and count lines that cannot be used, instead of ending with an error
        #[arg(value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
        skip_bad_lines: bool = false;
        /// Part of the samples, or of a text file's rows, that is held out for evaluation
        #[arg(value_name = "X")]
        eval_fraction: f64 = 0.05;
    }
    "Training" {
        /// Sequences of each step
        #[arg(value_name = "N")]
        batch: u64 = 4;
        /// Tokens of each sequence; 512 with --model
        #[arg(value_name = "N")]
        seq: u64 = 256;
        /// Optimizer steps
        #[arg(value_name = "N")]
        steps: u64 = 250;
        /// What changes the weights: adamw; adamw-8bit, whose state is 2 bytes for a weight instead of 8; adafactor, next to none; lion,
        /// 4 bytes; apollo, AdamW's state of a projection; sgd, 4 bytes, or none with --momentum 0
        #[arg(value_name = "NAME")]
        optimizer: Optimizer = Optimizer::AdamW;
        /// Highest learning rate; 5e-5 with --model, and 2e-4 where that has adapters; a tenth of that with lion, ten times that with
        /// sgd
        #[arg(value_name = "X")]
        lr: f64 = FRESH_LR;
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
        /// Decay of the first moment of adamw, apollo and lion
        #[arg(value_name = "X")]
        beta1: f64 = 0.9;
        /// Decay of the second moment of adamw and apollo, and of lion's first, where it is 0.99
        #[arg(value_name = "X")]
        beta2: f64 = 0.95;
        /// Added to the denominator of adamw and apollo
        #[arg(value_name = "X")]
        adam_eps: f64 = 1e-8;
        /// Decay of sgd's momentum; 0 for none
        #[arg(value_name = "X")]
        momentum: f64 = 0.9;
        /// Random directions that apollo projects the gradient of a matrix onto; smaller matrices are adamw's
        #[arg(value_name = "N")]
        apollo_rank: u64 = 128;
        /// Steps after which apollo draws its directions anew
        #[arg(value_name = "N")]
        apollo_refresh: u64 = 200;
        /// Largest global norm of the gradients, or `none`
        #[arg(value_name = "N|none")]
        clip_norm: ClipNorm = ClipNorm(Some(1.0));
        /// Steps between evaluations; 0 evaluates only at the end and where a checkpoint is saved
        #[arg(value_name = "N")]
        eval_every: u64 = 0;
        /// Batches of held-out text in an evaluation
        #[arg(value_name = "N")]
        eval_batches: u64 = 4;
        /// Sequences in memory at one time in an evaluation; auto is the micro-batch. The same text is evaluated in any case
        #[arg(value_name = "N|auto")]
        eval_batch: Count = Count::Auto;
        /// Decides the weights, the text and its order
        #[arg(value_name = "N")]
        seed: u64 = 1;
    }
    "Adapters" {
        /// Rank of the adapters
        #[arg(value_name = "N")]
        rank: u64 = 16;
        /// What adapters are scaled by, divided by the rank
        #[arg(value_name = "X")]
        alpha: f64 = 32.0;
        /// Divide alpha by the root of the rank instead: rsLoRA
        #[arg(value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
        rslora: bool = false;
        /// The share of an adapter's inputs that are dropped in training
        #[arg(value_name = "X")]
        dropout: f64 = 0.0;
        /// Layers that have adapters: all-linear is every linear layer but the head; or names or ends of names, with commas between
        /// them and * for any characters, such as q_proj,v_proj or layers.1*.mlp.*
        #[arg(value_name = "all-linear|PATTERNS")]
        targets: Targets = Targets::AllLinear;
    }
    "Checkpoints" {
        /// Steps between checkpoints in the --out folder; 0 saves only at the end
        #[arg(value_name = "N")]
        save_every: u64 = 500;
        /// Checkpoints that stay, the newest ones; the one of the lowest loss on held-out text stays in any case
        #[arg(value_name = "N")]
        keep: u64 = 2;
    }
    "Numbers" {
        /// What weights and activations are stored as: f32; bf16-mixed or f16-mixed, activations in 16 bits; or bf16, trained weights
        /// too, which are rounded stochastically
        #[arg(value_name = "f32|bf16-mixed|f16-mixed|bf16")]
        precision: Precision = Precision::F32;
        /// Whether the loss is scaled, so that small gradients are not lost: auto, with f16-mixed; or none
        #[arg(value_name = "auto|none")]
        loss_scale: LossScaling = LossScaling::Auto;
        /// What weights are kept in that are not trained: as-is, as in the file; f32, bf16 or f16; or quantised to int8, int4 or nf4.
        /// auto is nf4 for qlora, else 16 bits where activations have 16, and as-is otherwise; blocks of a GGUF file stay
        #[arg(value_name = "auto|as-is|f32|bf16|f16|int8|int4|nf4")]
        base: Base = Base::Auto;
        /// Quantise the embedding and the head like the other weights that are not trained
        #[arg(value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
        base_embeddings: bool = false;
    }
    "Memory techniques" {
        /// What the backward pass computes again instead of keeping it: auto, as the budget asks; none, all is kept; block, only
        /// each block's input is kept; or the bytes or the percentage of the activations that are kept. Results stay the same
        #[arg(value_name = "auto|none|block|BYTES|PERCENT")]
        recompute: Recompute = Recompute::Auto;
        /// What lives in a file and comes back ahead of its use: none; auto, as the budget asks; or some of activations, optimizer
        /// and weights, with commas between them. Results stay the same
        #[arg(value_name = "none|auto|LIST")]
        offload: Offload = Offload::None;
        /// Update each weight as soon as its gradient is complete, so that gradients need little memory; one micro-batch only, and
        /// with --clip-norm or a scaled loss forward and backward run twice. Results stay the same
        #[arg(value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
        update_in_backward: bool = false;
        /// Tokens whose logits exist at one time: fewer need less memory; auto follows from the model's shape
        #[arg(value_name = "N|auto")]
        loss_chunk: Count = Count::Auto;
        /// Tokens that an MLP takes at one time: fewer need less memory
        #[arg(value_name = "N|none")]
        mlp_tile: MlpTile = MlpTile(None);
    }
    "Memory and machine" {
        /// Most bytes of the file that offloading uses, such as 20GiB; none leaves it all that is free
        #[arg(value_name = "BYTES|none")]
        disk: ByteLimit = ByteLimit(None);
        /// Most bytes of the host's memory that offloading from a card uses; on the CPU, --disk is the limit
        #[arg(value_name = "BYTES|none")]
        host_memory: ByteLimit = ByteLimit(None);
    }
}

/// Tokens of a sequence when a given model is trained.
const FINE_TUNING_SEQ: u64 = 512;
/// The highest learning rate of fresh weights.
const FRESH_LR: f64 = 3e-3;
/// The decay of Lion's momentum: it has no second moment, and wants a longer memory.
const LION_BETA2: f64 = 0.99;
/// The highest learning rate when a given model is trained: it has learnt most of what it will know.
const FINE_TUNING_LR: f64 = 5e-5;
/// The highest learning rate when adapters of a given model are trained, as usual for them.
const ADAPTER_LR: f64 = 2e-4;
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

    /// These settings, and those of a plan that is followed where these have none: what these leave to the planner, it has chosen.
    pub fn or_planned(mut self, plan: Self) -> Self {
        for choice in [&mut self.micro_batch, &mut self.loss_chunk] {
            choice.take_if(|choice| *choice == Count::Auto);
        }
        self.or(plan)
    }

    /// Fills in every default and checks every value. `budget` is used where the request names none.
    ///
    /// # Errors
    /// A value out of range, by its name.
    pub fn resolve(mut self, budget: u64) -> Result<Settings, SettingsError> {
        self.check_source()?;
        let models = self.model.iter_mut().chain(&mut self.adapter);
        let paths = models.chain(self.data.iter_mut().flatten());
        for path in paths.chain(&mut self.scratch) {
            // The settings are kept beside the run and may be read from another folder.
            if let Ok(absolute) = std::path::absolute(&*path) {
                *path = absolute;
            }
        }
        self.resolve_to_plan(budget)
    }

    /// As [`resolve`](Self::resolve), of a job that is not run: there need be no data, and a model can be a name.
    ///
    /// # Errors
    /// A value out of range, by its name.
    pub fn resolve_to_plan(mut self, budget: u64) -> Result<Settings, SettingsError> {
        if self.adapter.is_some() {
            self.method.get_or_insert(Method::Lora.into());
        }
        self.check_company()?;
        // Settings of adapters mean that there are some.
        if self.method == Some(AskedMethod::Auto) && self.asks_for_adapters().is_some() {
            self.method = Some(Method::Lora.into());
        }
        if self.model.is_some() {
            self.seq.get_or_insert(FINE_TUNING_SEQ);
        }
        let has_adapters = matches!(self.method, Some(AskedMethod::Of(method)) if method.has_adapters());
        let optimizer = self.optimizer.unwrap_or(Optimizer::AdamW);
        let lr = match self.model {
            Some(_) if has_adapters => ADAPTER_LR,
            Some(_) => FINE_TUNING_LR,
            None => FRESH_LR,
        };
        self.lr.get_or_insert(lr * optimizer.lr_ratio());
        if optimizer == Optimizer::Lion {
            self.beta2.get_or_insert(LION_BETA2);
        }
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
