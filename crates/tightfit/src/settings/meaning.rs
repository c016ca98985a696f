//! What settings mean: the shapes, constants and choices that they come to.

use std::path::{Path, PathBuf};

use tightfit_ir::{Block, DType};
use tightfit_model::{BatchShape, DecoderConfig};
use tightfit_pass::{Adafactor, Adam, Apollo, Lion, LoraConfig, LossScale, OptimizerConfig, Sgd, Storage};

use super::{
    Base, Count, LossScaling, Method, Optimizer, Settings, SettingsError, of_adapters, of_fresh_adapters, sizes,
};
use crate::lr;

impl Settings {
    /// Settings that are facts of the machine, so that a plan is the same whatever they are.
    pub const MACHINE: [&'static str; 4] = ["budget", "disk", "host_memory", "scratch"];

    /// The settings as a TOML file that makes the same job.
    pub fn to_toml(&self) -> String {
        // Every field is a number that `check` has bounded, a bool or a string, which TOML can hold.
        let mut settings = toml::Table::try_from(self).unwrap_or_default();
        self.meaningless().for_each(|name| drop(settings.remove(name)));
        toml::to_string(&settings).unwrap_or_default()
    }

    /// The settings as JSON that makes the same job.
    pub fn to_json(&self) -> serde_json::Value {
        // As above.
        let mut settings = serde_json::to_value(self).unwrap_or_default();
        if let Some(settings) = settings.as_object_mut() {
            self.meaningless().for_each(|name| drop(settings.shift_remove(name)));
        }
        settings
    }

    /// Settings that mean nothing: the model or the adapter that is given has them of its own, or they are of what this job does not have.
    fn meaningless(&self) -> impl Iterator<Item = &'static str> {
        let sizes = sizes().filter(|_| self.model.is_some());
        let fresh = of_fresh_adapters().filter(|_| self.adapter.is_some());
        let adapters = of_adapters().filter(|_| !self.method.has_adapters());
        let tables = Some("base_embeddings").filter(|_| self.quantised().is_none());
        let optimizer = self.optimizer.settings_of_others();
        sizes.chain(fresh).chain(adapters).chain(tables).chain(optimizer)
    }

    /// The adapters that are trained, if any are. Those of a given adapter are its own but for the dropout and its seed.
    pub fn lora(&self) -> Option<LoraConfig> {
        self.method.has_adapters().then(|| LoraConfig {
            rank: self.rank,
            alpha: self.alpha,
            rslora: self.rslora,
            dropout: self.dropout,
            seed: self.seed,
            targets: self.targets.clone().into(),
        })
    }

    /// The model of fresh weights; means nothing where a model is given.
    pub fn fresh_model(&self) -> DecoderConfig {
        DecoderConfig {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            max_position_embeddings: self.seq,
            rms_norm_eps: self.rms_norm_eps,
            rope_theta: self.rope_theta,
            tie_word_embeddings: self.tie_word_embeddings,
            initializer_range: self.initializer_range,
            ..DecoderConfig::default()
        }
    }

    /// The rows of one micro-batch.
    pub fn micro_batch_shape(&self) -> BatchShape {
        self.shape(self.micro_batch_rows())
    }

    /// The rows of one run of an evaluation.
    pub fn evaluation_shape(&self) -> BatchShape {
        self.shape(self.eval_batch_rows())
    }

    fn shape(&self, batch: u64) -> BatchShape {
        BatchShape {
            batch,
            seq: self.seq,
            loss_chunk: match self.loss_chunk {
                Count::Of(tokens) => tokens,
                // All of them, until `chunk_loss` has seen the model's shape.
                Count::Auto => batch.saturating_mul(self.seq),
            },
        }
    }

    /// Sequences in memory at one time; the most that are possible as long as that is the planner's choice.
    pub fn micro_batch_rows(&self) -> u64 {
        match self.micro_batch {
            Count::Of(rows) => rows,
            Count::Auto => self.micro_batch_choices().next().unwrap_or(self.batch),
        }
    }

    /// Sequences in memory at one time in an evaluation.
    pub fn eval_batch_rows(&self) -> u64 {
        match self.eval_batch {
            Count::Of(rows) => rows,
            Count::Auto => self.micro_batch_rows(),
        }
    }

    /// The settings with the micro-batch chosen where that is left to the planner: one after the other what it may choose from, the
    /// largest first.
    pub fn choices(&self) -> impl Iterator<Item = Self> {
        let (given, open) = match self.micro_batch {
            Count::Of(rows) => (Some(rows), None),
            Count::Auto => (None, Some(self.micro_batch_choices())),
        };
        given.into_iter().chain(open.into_iter().flatten()).map(|rows| Self {
            micro_batch: Count::Of(rows),
            ..self.clone()
        })
    }

    /// Sequences of an evaluation, where that many are held out; they do not depend on how many are in memory at one time.
    pub fn eval_rows(&self) -> u64 {
        self.eval_batches.saturating_mul(self.batch)
    }

    /// The folder for the file that offloading uses. Folders for temporary files are often memory, so none is chosen unless named.
    pub fn scratch_dir(&self, out: Option<&Path>) -> PathBuf {
        self.scratch.as_deref().or(out).unwrap_or(Path::new(".")).to_owned()
    }

    /// Turns `epochs` into steps, where they were asked for. `per_epoch`: micro-batches that hold every row once, if the text ends.
    ///
    /// # Errors
    /// More steps than can be counted.
    pub fn resolve_epochs(&mut self, per_epoch: Option<u64>) -> Result<(), SettingsError> {
        let (Some(epochs), Some(per_epoch)) = (self.epochs.take(), per_epoch) else {
            return Ok(());
        };
        // A number too large saturates, and is refused.
        self.steps = (epochs * per_epoch as f64 / f64::from(self.micro_batches())).ceil() as u64;
        self.check()
    }

    /// Micro-batches of each step.
    pub fn micro_batches(&self) -> u32 {
        // `check` has bounded it.
        (self.batch / self.micro_batch_rows()) as u32
    }

    /// The optimizer with its constants.
    pub fn optimizer(&self) -> OptimizerConfig {
        let (beta1, beta2) = (self.beta1, self.beta2);
        let eps = self.adam_eps;
        let adam = Adam { beta1, beta2, eps };
        use tightfit_pass::Optimizer as Made;
        OptimizerConfig {
            optimizer: match self.optimizer {
                Optimizer::AdamW => Made::AdamW(adam),
                Optimizer::AdamW8bit => Made::AdamW8bit(adam),
                Optimizer::Adafactor => Made::Adafactor(Adafactor::default()),
                Optimizer::Lion => Made::Lion(Lion { beta1, beta2 }),
                Optimizer::Apollo => Made::Apollo(Apollo {
                    adam,
                    rank: self.apollo_rank,
                    refresh: self.apollo_refresh,
                }),
                Optimizer::Sgd => Made::Sgd(Sgd {
                    momentum: self.momentum,
                }),
            },
            weight_decay: self.weight_decay,
            clip_norm: self.clip_norm.0,
            loss_scale: self.scales_loss().then(LossScale::default),
            seed: self.seed,
        }
    }

    /// Whether the loss is scaled.
    fn scales_loss(&self) -> bool {
        self.precision.needs_scaled_loss() && self.loss_scale == LossScaling::Auto
    }

    /// What is better not done, though it can be.
    pub fn warning(&self) -> Option<&'static str> {
        let lost = self.precision.needs_scaled_loss() && !self.scales_loss();
        lost.then_some("without a scaled loss, gradients below 6e-8 are lost in f16: say --loss-scale auto, or --precision bf16-mixed")
    }

    /// What frozen weights are quantised to, if they are.
    pub fn quantised(&self) -> Option<Block> {
        match (self.base, self.method) {
            (Base::Auto, Method::Qlora) => Some(Block::Nf4),
            (Base::Quantised(block), _) => Some(block),
            _ => None,
        }
    }

    /// How weights are stored, of which `file` says how their file does.
    pub fn storage<'a>(&self, file: &'a dyn Fn(&str) -> Option<DType>) -> Storage<'a> {
        let base = self.quantised().map_or(self.base, Base::Quantised);
        let mut storage = base.storage(file);
        let activations = self.precision.activations();
        if matches!(base, Base::Auto | Base::Quantised(_)) && activations != DType::F32 {
            storage.floats = Some(activations);
        }
        Storage {
            trained: self.precision.weights(),
            tables: self.base_embeddings,
            ..storage
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
