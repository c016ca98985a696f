//! What settings may be.

use tightfit_model::ModelError;

use super::{
    AskedMethod, Base, Count, Method, Optimizer, Recompute, Request, Settings, SettingsError, of_adapters,
    of_fresh_adapters, sizes,
};

fn invalid(field: &'static str, value: impl ToString, message: impl Into<String>) -> SettingsError {
    SettingsError::Value {
        field,
        value: value.to_string(),
        message: message.into(),
    }
}

fn idle(field: &'static str, of: impl Into<String>, instead: impl Into<String>) -> SettingsError {
    SettingsError::Idle {
        field,
        of: of.into(),
        instead: instead.into(),
    }
}

/// Most threads that a pool is given: more are a mistake.
pub(super) const MAX_THREADS: usize = 1024;
/// Most steps, batches and the like: they are counted in `f32` on the way to the optimizer, exactly up to here.
const MAX_STEPS: u64 = 1 << 24;
/// Most tokens of a step, and bound of whatever counts them: rows are indexed with an `i32`.
const MAX_TOKENS: u64 = i32::MAX as u64;
/// Most columns of an adapter: more than layers have.
const MAX_RANK: u64 = 1 << 16;
/// TOML's integers end here.
const MAX_INTEGER: u64 = i64::MAX as u64;

impl Request {
    /// Weights and text go together, and a model that is given has its own sizes.
    pub(super) fn check_source(&self) -> Result<(), SettingsError> {
        let data = self.data.as_ref().is_some_and(|files| !files.is_empty());
        let models = self.model.iter().chain(&self.adapter);
        let paths = models.chain(self.data.iter().flatten());
        for path in paths.chain(&self.scratch) {
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
        Ok(())
    }

    /// Settings that mean something only beside others.
    pub(super) fn check_company(&self) -> Result<(), SettingsError> {
        self.check_adapters()?;
        self.check_optimizer()?;
        match self.first_given(sizes()) {
            Some(field) if self.model.is_some() => Err(SettingsError::Architecture { field }),
            _ => Ok(()),
        }
    }

    /// One of these settings that is given.
    fn first_given(&self, mut fields: impl Iterator<Item = &'static str>) -> Option<&'static str> {
        fields.find(|field| self.given().any(|given| given == *field))
    }

    /// A setting that is given and means something only where adapters are trained.
    pub(super) fn asks_for_adapters(&self) -> Option<&'static str> {
        let adapter = self.adapter.as_ref().map(|_| "adapter");
        adapter.or_else(|| self.first_given(of_adapters()))
    }

    /// Settings of adapters go with a method that has some, and a given adapter has its own.
    fn check_adapters(&self) -> Result<(), SettingsError> {
        let has_adapters = self.method.is_some_and(AskedMethod::may_have_adapters);
        if let (false, Some(field)) = (has_adapters, self.asks_for_adapters()) {
            return Err(idle(field, "adapters", "say --method lora"));
        }
        if self.adapter.is_none() {
            return Ok(());
        }
        if self.model.is_none() {
            return Err(idle("adapter", "a model", "say which by --model"));
        }
        match self.first_given(of_fresh_adapters()) {
            Some(field) => Err(idle(field, "fresh adapters", "--adapter has its own")),
            None => Ok(()),
        }
    }

    /// Settings of an optimizer go with it.
    fn check_optimizer(&self) -> Result<(), SettingsError> {
        let optimizer = self.optimizer.unwrap_or(Optimizer::AdamW);
        match self.first_given(optimizer.settings_of_others()) {
            Some(field) => {
                let of: Vec<String> = Optimizer::with(field).iter().map(ToString::to_string).collect();
                let instead = format!("--optimizer {optimizer} has no use for it");
                Err(idle(field, of.join(", "), instead))
            }
            None => Ok(()),
        }
    }
}

impl Settings {
    /// Checks every value.
    pub(super) fn check(&self) -> Result<(), SettingsError> {
        self.check_counts()?;
        self.check_micro_batch()?;
        self.check_techniques()?;
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
            ("seq", self.seq, 1, MAX_TOKENS),
            ("steps", self.steps, 1, MAX_STEPS),
            ("warmup_steps", self.warmup_steps, 0, MAX_STEPS),
            ("eval_every", self.eval_every, 0, MAX_STEPS),
            ("eval_batches", self.eval_batches, 1, MAX_STEPS),
            ("save_every", self.save_every, 0, MAX_STEPS),
            ("keep", self.keep, 1, MAX_STEPS),
            ("apollo_rank", self.apollo_rank, 1, 1 << 16),
            ("apollo_refresh", self.apollo_refresh, 1, MAX_STEPS),
            ("seed", self.seed, 0, MAX_INTEGER),
            ("rank", self.rank, 1, MAX_RANK),
        ] {
            if value < least || value > most {
                return Err(invalid(field, value, format!("must be between {least} and {most}")));
            }
        }
        if self.vocab_size < crate::data::VOCAB_SIZE {
            let message = format!("the built-in text has {} tokens", crate::data::VOCAB_SIZE);
            return Err(invalid("vocab_size", self.vocab_size, message));
        }
        for (field, value, most) in [
            ("micro_batch", self.micro_batch, self.batch),
            ("eval_batch", self.eval_batch, self.eval_rows().min(MAX_TOKENS)),
            ("loss_chunk", self.loss_chunk, MAX_TOKENS),
        ] {
            match value {
                Count::Of(value) if !(1..=most).contains(&value) => {
                    return Err(invalid(field, value, format!("must be between 1 and {most}, or auto")));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn check_micro_batch(&self) -> Result<(), SettingsError> {
        match self.micro_batch {
            Count::Of(rows) => {
                if !self.batch.is_multiple_of(rows) {
                    let message = format!("must divide the batch of {}", self.batch);
                    return Err(invalid("micro_batch", rows, message));
                }
                if self.batch / rows > MAX_STEPS {
                    let message = format!("must leave at most {MAX_STEPS} micro-batches");
                    return Err(invalid("micro_batch", rows, message));
                }
                self.check_tokens("a micro-batch", rows)?;
            }
            Count::Auto if self.micro_batch_choices().next().is_none() => {
                let message = format!(
                    "a batch of {} has no divisor that makes at most {MAX_STEPS} micro-batches of at most {MAX_TOKENS} tokens",
                    self.batch
                );
                return Err(invalid("micro_batch", "auto", message));
            }
            Count::Auto => {}
        }
        self.check_tokens("an evaluation's batch", self.eval_batch_rows())
    }

    /// Rows are indexed with an `i32`.
    fn check_tokens(&self, batch: &str, rows: u64) -> Result<(), SettingsError> {
        if rows.saturating_mul(self.seq) <= MAX_TOKENS {
            return Ok(());
        }
        let message = format!("must leave at most {MAX_TOKENS} tokens in memory; {batch} has {rows} sequences");
        Err(invalid("seq", self.seq, message))
    }

    /// What a micro-batch may be, the largest first: divisors of the batch that leave counts in their limits.
    pub(super) fn micro_batch_choices(&self) -> impl Iterator<Item = u64> + use<> {
        let (batch, seq) = (self.batch, self.seq);
        // Every divisor has a partner on the other side of the root.
        let small = (1..=batch.isqrt()).filter(move |n| batch.is_multiple_of(*n));
        let large = small.clone().map(move |n| batch / n);
        let partners = small.rev().filter(move |n| n.saturating_mul(*n) < batch);
        large
            .chain(partners)
            .filter(move |rows| batch / rows <= MAX_STEPS && rows.saturating_mul(seq) <= MAX_TOKENS)
    }

    /// Techniques that exclude each other or this machine.
    fn check_techniques(&self) -> Result<(), SettingsError> {
        match (self.method, self.base) {
            (Method::Full, Base::Auto) | (Method::Lora, _) => {}
            (Method::Full, base) => {
                let message = "is for weights that are not trained, and --method full trains all of them: say --method lora or \
                               qlora, or --precision bf16 to store trained weights in 16 bits";
                return Err(invalid("base", base, message));
            }
            (Method::Qlora, Base::Floats(_)) => {
                let message = "is not quantised, as --method qlora asks for: say int8, int4 or nf4, or --method lora";
                return Err(invalid("base", self.base, message));
            }
            (Method::Qlora, _) => {}
        }
        if self.base_embeddings && self.quantised().is_none() {
            let instead = "say which, such as --method lora --base int8";
            return Err(idle("base_embeddings", "quantised weights", instead));
        }
        if self.update_in_backward && self.micro_batches() > 1 {
            let message = format!(
                "a weight would be updated before its gradient is summed over the {} micro-batches of --micro-batch {}: \
                 say --micro-batch {}, or leave --update-in-backward out",
                self.micro_batches(),
                self.micro_batch_rows(),
                self.batch
            );
            return Err(invalid("update_in_backward", true, message));
        }
        if let Some(rows) = self.mlp_tile.0
            && !(1..=MAX_TOKENS).contains(&rows)
        {
            return Err(invalid(
                "mlp_tile",
                rows,
                format!("must be between 1 and {MAX_TOKENS}, or none"),
            ));
        }
        if let Recompute::Percent(percent) = self.recompute
            && !Recompute::is_percentage(percent)
        {
            return Err(invalid("recompute", self.recompute, "must be between 0% and 100%"));
        }
        if self.host_memory.0.is_some() {
            return Err(SettingsError::HostMemory);
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
            ("alpha", self.alpha, least, most),
        ] {
            if !(least..=most).contains(&value) {
                let or_none = if field == "clip_norm" { ", or `none`" } else { "" };
                let message = format!("must be between {least:?} and {most:?}{or_none}");
                return Err(invalid(field, format!("{value:?}"), message));
            }
        }
        for (field, value) in [
            ("beta1", self.beta1),
            ("beta2", self.beta2),
            ("momentum", self.momentum),
            ("dropout", self.dropout),
        ] {
            if !(0.0..1.0).contains(&value) {
                return Err(invalid(field, format!("{value:?}"), "must be at least 0 and below 1"));
            }
        }
        Ok(())
    }
}
