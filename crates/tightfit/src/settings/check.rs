//! What settings may be.

use tightfit_model::ModelError;

use super::{Request, Settings, SettingsError, sizes};

fn invalid(field: &'static str, value: impl ToString, message: impl Into<String>) -> SettingsError {
    SettingsError::Value {
        field,
        value: value.to_string(),
        message: message.into(),
    }
}

/// Most threads that a pool is given: more are a mistake.
pub(super) const MAX_THREADS: usize = 1024;
/// Most steps, batches and the like: they are counted in `f32` on the way to the optimizer, exactly up to here.
const MAX_STEPS: u64 = 1 << 24;
/// Most tokens of a step, and bound of whatever counts them: rows are indexed with an `i32`.
const MAX_TOKENS: u64 = i32::MAX as u64;
/// TOML's integers end here.
const MAX_INTEGER: u64 = i64::MAX as u64;

impl Request {
    /// Weights and text go together, and a model that is given has its own sizes.
    pub(super) fn check_source(&self) -> Result<(), SettingsError> {
        let data = self.data.as_ref().is_some_and(|files| !files.is_empty());
        for path in self.model.iter().chain(self.data.iter().flatten()) {
            if path.to_str().is_none() {
                return Err(SettingsError::Path { path: path.clone() });
            }
        }
        if self.model.is_some() && !data {
            return Err(SettingsError::NoData);
        }
        if self.model.is_none() && data {
            return Err(SettingsError::NoModel);
        }
        if self.model.is_none() && self.epochs.is_some() {
            return Err(SettingsError::EndlessText);
        }
        match self.given().find(|field| sizes().any(|size| size == *field)) {
            Some(field) if self.model.is_some() => Err(SettingsError::Architecture { field }),
            _ => Ok(()),
        }
    }
}

impl Settings {
    /// Checks every value.
    pub(super) fn check(&self) -> Result<(), SettingsError> {
        self.check_counts()?;
        self.check_numbers()?;
        self.fresh_model().check().map_err(|error| match error {
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
            ("save_every", self.save_every, 0, MAX_STEPS),
            ("keep", self.keep, 1, MAX_STEPS),
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
            ("eval_fraction", self.eval_fraction, 0.0, 0.5),
            ("epochs", self.epochs.unwrap_or(1.0), least, most),
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
}
