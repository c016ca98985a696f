//! The plan and the result, as text for people and JSON for programs.

use std::fmt::Write;

use serde::{Serialize, Serializer};
use serde_json::Value;
use tightfit_plan::Summary;

use crate::Role;
use crate::alternatives::Alternative;
use crate::data::{DataReport, Language, Text};
use crate::job::Job;
use crate::memory::format_bytes;
use crate::settings::Settings;
use crate::techniques::Techniques;
use crate::train::{Outcome, Transferred};

/// Raised whenever a field changes its meaning or goes away.
pub const SCHEMA_VERSION: u32 = 1;

/// The object that `--json` prints. What did not happen (after `--plan-only`, say) is `null`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// See [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// `planned`, `does_not_fit`, `done` or `stopped`.
    pub status: &'static str,
    /// Highest planned byte of the arena, plus one.
    pub planned_peak_bytes: u64,
    /// Bytes mapped for the arena: the planned peak in whole pages.
    pub arena_bytes: u64,
    /// No placement of the same buffers has a lower peak.
    pub lower_bound_bytes: u64,
    /// Highest byte of the arena that was written, plus one, found by looking at the arena.
    pub measured_arena_peak_bytes: Option<u64>,
    /// What the process may use beside the arena.
    pub reserve_bytes: u64,
    /// `VmHWM` at the end.
    pub process_peak_bytes: Option<u64>,
    /// What the process may use.
    pub budget_bytes: u64,
    /// Parameters of the model.
    pub parameters: u64,
    /// Parameters that are trained: the model's, or those of adapters.
    pub trained_parameters: u64,
    /// Steps done.
    pub steps: Option<u64>,
    /// Tokens of each step.
    pub tokens_per_step: u64,
    /// What a step is expected to take.
    pub predicted_seconds_per_step: f64,
    /// Seconds of that in which kernels wait for transfers.
    pub predicted_waiting_seconds_per_step: f64,
    /// Whether that follows from speeds that `tightfit calibrate` has measured; if not, from assumed ones.
    pub calibrated: bool,
    /// Bytes of the file that offloading uses.
    pub lower_tier_bytes: u64,
    /// Bytes that a step moves to and from it.
    pub link_bytes_per_step: u64,
    /// What was moved, and how long steps waited for it; `null` where nothing is offloaded.
    pub transferred: Option<Transferred>,
    /// Every technique with what was chosen for it, and why.
    pub techniques: Techniques,
    /// The mix that was chosen, as flags, where the job does not fit as it was asked for.
    pub mix: Option<String>,
    /// For a job that does not fit: other settings that need less.
    pub alternatives: Vec<Alternative>,
    /// Median.
    pub seconds_per_step: Option<f64>,
    /// From the median.
    pub tokens_per_second: Option<f64>,
    /// Loss of the first step, in nats per token.
    pub loss_first: Option<f64>,
    /// Loss of the last step.
    pub loss_last: Option<f64>,
    /// Loss on held-out text after the last step.
    pub eval_loss: Option<f64>,
    /// Updates that were skipped since the run began, as a gradient was infinite or not a number; `null` where the loss is not scaled.
    pub skipped_steps: Option<u64>,
    /// Entropy of the generated text: no model's expected loss is lower.
    pub entropy_floor: Option<f64>,
    /// What was found in the data files.
    pub data: Option<DataReport>,
    /// The plan in detail.
    pub plan: Summary,
    /// The model, as `config.json` has it.
    pub model: Value,
    /// Every setting.
    #[serde(serialize_with = "settings_json")]
    pub settings: Settings,
}

/// Elements of what is trained.
fn trained_parameters(job: &Job) -> u64 {
    if !job.settings.method.has_adapters() {
        return job.model.parameters();
    }
    let tensors = job.plan.liveness().persistent.iter();
    let adapters = tensors.filter(|tensor| tensor.role == Role::Adapter);
    adapters.map(|tensor| tensor.ty.shape.elements()).sum()
}

fn settings_json<S: Serializer>(settings: &Settings, serializer: S) -> Result<S::Ok, S::Error> {
    settings.to_json().serialize(serializer)
}

impl Report {
    /// What is known before a run.
    pub fn planned(job: &Job, techniques: Techniques, reserve_bytes: u64) -> Self {
        let plan = job.plan.summary();
        Self {
            schema_version: SCHEMA_VERSION,
            status: "planned",
            planned_peak_bytes: plan.planned_peak_bytes,
            arena_bytes: job.plan.arena_bytes(),
            lower_bound_bytes: plan.lower_bound_bytes,
            measured_arena_peak_bytes: None,
            reserve_bytes,
            process_peak_bytes: None,
            budget_bytes: job.settings.budget.0,
            parameters: job.model.parameters(),
            trained_parameters: trained_parameters(job),
            steps: None,
            tokens_per_step: job.settings.batch.saturating_mul(job.settings.seq),
            predicted_seconds_per_step: job.prediction.seconds,
            predicted_waiting_seconds_per_step: job.prediction.stalled(),
            calibrated: job.calibration.measured,
            lower_tier_bytes: plan.lower_tier_bytes,
            link_bytes_per_step: job.prediction.link_bytes,
            transferred: None,
            techniques,
            mix: None,
            alternatives: Vec::new(),
            seconds_per_step: None,
            tokens_per_second: None,
            loss_first: None,
            loss_last: None,
            eval_loss: None,
            skipped_steps: None,
            entropy_floor: job
                .settings
                .data
                .is_empty()
                .then(|| Language::new(job.settings.seed).entropy_per_byte()),
            data: None,
            plan,
            model: job.model.to_hf(),
            settings: job.settings.clone(),
        }
    }

    /// With what is known once the data is there.
    pub fn prepared(&mut self, job: &Job, text: &Text, reserve_bytes: u64) {
        self.reserve_bytes = reserve_bytes;
        self.settings = job.settings.clone();
        self.data = text.report();
    }

    /// With what a run came to.
    pub fn ran(
        mut self,
        outcome: &Outcome,
        arena_bytes: u64,
        measured: Option<u64>,
        process_peak: Option<u64>,
    ) -> Self {
        self.status = if outcome.stopped { "stopped" } else { "done" };
        self.arena_bytes = arena_bytes;
        self.measured_arena_peak_bytes = measured;
        self.process_peak_bytes = process_peak;
        self.steps = Some(outcome.steps);
        self.seconds_per_step = Some(outcome.seconds_per_step);
        self.transferred = outcome.transferred;
        self.tokens_per_second = Some(self.tokens_per_step as f64 / outcome.seconds_per_step);
        self.loss_first = Some(outcome.loss_first);
        self.loss_last = Some(outcome.loss_last);
        self.skipped_steps = outcome.skipped_steps;
        self.eval_loss = Some(outcome.eval_loss).filter(|loss| loss.is_finite());
        self
    }

    /// The plan as text.
    pub fn plan_text(&self) -> String {
        let mut text = String::new();
        let settings = &self.settings;
        let mut line = |words: String| {
            text.push_str(&words);
            text.push('\n');
        };
        line(format!(
            "model    {:.2} M parameters: {} layers, hidden {}, vocabulary {}",
            self.parameters as f64 / 1e6,
            self.model["num_hidden_layers"],
            self.model["hidden_size"],
            self.model["vocab_size"]
        ));
        if settings.method.has_adapters() {
            let all = self.parameters + self.trained_parameters;
            line(format!(
                "training {:.2} M of {:.2} M parameters, {:.2} %",
                self.trained_parameters as f64 / 1e6,
                all as f64 / 1e6,
                100.0 * self.trained_parameters as f64 / all as f64
            ));
        }
        let chosen = match self.techniques.micro_batch.auto {
            true => ", as large as fit",
            false => "",
        };
        let micro = match settings.micro_batches() {
            1 => String::new(),
            n => format!(" in {n} micro-batches of {}{chosen}", settings.micro_batch_rows()),
        };
        line(format!(
            "step     {} × {} tokens{micro}, {:.2} GFLOP",
            settings.batch,
            settings.seq,
            self.plan.flops as f64 / 1e9
        ));
        if let Some(data) = &self.data {
            let epochs = (settings.steps * settings.batch) as f64 / data.train_rows as f64;
            line(format!("data     {data}"));
            line(format!("         {} steps are {epochs:.2} epochs", settings.steps));
        }
        line(format!("arena    {:>11}", format_bytes(self.planned_peak_bytes)));
        for (role, bytes) in &self.plan.peak.by_role {
            line(format!("         {:>11}  {role}", format_bytes(*bytes)));
        }
        line(format!(
            "peak     in {}/{}, {}",
            self.plan.peak.routine, self.plan.peak.program, self.plan.peak.op
        ));
        line(format!(
            "bound    {:>11}  no placement needs less; gap {:.2} %",
            format_bytes(self.lower_bound_bytes),
            100.0 * self.plan.gap()
        ));
        for routine in &self.plan.routines {
            let name = format!("{}:", routine.name);
            line(format!(
                "         {:>11}  {name:<9} highest byte",
                format_bytes(routine.peak_bytes)
            ));
        }
        self.techniques
            .lines(settings.micro_batch_shape().tokens())
            .into_iter()
            .for_each(&mut line);
        if let Some(offload) = &self.techniques.offload {
            line(format!(
                "offload  {:>11}  in a file without a name in {}",
                format_bytes(self.lower_tier_bytes),
                offload.scratch.display()
            ));
            for (role, bytes) in &offload.by_role {
                line(format!("         {:>11}  {role}", format_bytes(*bytes)));
            }
            line(format!(
                "         {:>11}  to and from it in a step, for which the step waits {:.3} s",
                format_bytes(self.link_bytes_per_step),
                self.predicted_waiting_seconds_per_step
            ));
        }
        let speeds = match self.calibrated {
            true => "by the speeds of this machine",
            false => "by assumed speeds: `tightfit calibrate` measures this machine",
        };
        line(format!(
            "time     {:>9.3} s  expected for a step, {speeds}",
            self.predicted_seconds_per_step
        ));
        line(format!(
            "reserve  {:>11}  program, stacks, tables",
            format_bytes(self.reserve_bytes)
        ));
        let total = self.arena_bytes.saturating_add(self.reserve_bytes);
        line(format!(
            "total    {:>11}  of a budget of {}",
            format_bytes(total),
            format_bytes(self.budget_bytes)
        ));
        let made_for = self.model["max_position_embeddings"].as_u64();
        if made_for.is_some_and(|positions| positions < settings.seq) {
            line(format!(
                "note     --seq {} is beyond the {} positions that the model was made for",
                settings.seq, self.model["max_position_embeddings"]
            ));
        }
        text.truncate(text.trim_end().len());
        text
    }

    /// The result as text; empty before a run.
    pub fn result_text(&self) -> String {
        let mut text = String::new();
        let (Some(first), Some(last), Some(seconds)) = (self.loss_first, self.loss_last, self.seconds_per_step) else {
            return text;
        };
        let mut line = |words: std::fmt::Arguments<'_>| {
            // Writing to a string cannot fail.
            let _ = text.write_fmt(words);
            text.push('\n');
        };
        match self.entropy_floor {
            Some(floor) => line(format_args!(
                "loss     {first:.4} → {last:.4}, entropy of the text {floor:.4} nats/token"
            )),
            None => line(format_args!("loss     {first:.4} → {last:.4}")),
        }
        match (self.eval_loss, self.entropy_floor) {
            (Some(eval), Some(floor)) => line(format_args!(
                "held out {eval:.4}: {:.1} % of the gap to the entropy closed",
                100.0 * (first - eval) / (first - floor)
            )),
            (Some(eval), None) => {
                let held_out = self.data.as_ref().map_or(0, |data| data.eval_rows);
                let rows = held_out.min(self.settings.eval_batches.saturating_mul(self.settings.batch));
                line(format_args!(
                    "held out {eval:.4}: perplexity {:.2}, on {rows} of {held_out} rows",
                    eval.exp()
                ));
            }
            (None, _) => {}
        }
        if let Some(skipped) = self.skipped_steps.filter(|&skipped| skipped > 0) {
            line(format_args!(
                "skipped  {skipped} updates, whose gradients were not finite"
            ));
        }
        line(format_args!(
            "speed    {seconds:.3} s/step, {:.0} tokens/s",
            self.tokens_per_second.unwrap_or(f64::NAN)
        ));
        if let Some(moved) = self.transferred {
            let way = match moved.is_direct {
                true => "past the page cache",
                false => "through the page cache",
            };
            line(format_args!(
                "offload  {} read and {} written in a step, {way}; {:.3} s of waiting",
                format_bytes(moved.read_bytes_per_step),
                format_bytes(moved.written_bytes_per_step),
                moved.waited_seconds_per_step
            ));
        }
        if let (Some(measured), Some(process)) = (self.measured_arena_peak_bytes, self.process_peak_bytes) {
            line(format_args!(
                "arena    planned {} bytes, measured {measured} bytes",
                self.planned_peak_bytes
            ));
            line(format_args!(
                "process  peak {}, planned at most {}, budget {}",
                format_bytes(process),
                format_bytes(self.arena_bytes + self.reserve_bytes),
                format_bytes(self.budget_bytes)
            ));
        }
        text.truncate(text.trim_end().len());
        text
    }
}
