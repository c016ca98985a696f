//! From settings to a plan.

use tightfit_cpu::CpuTarget;
use tightfit_exec::load;
use tightfit_ir::{Forward, Graph, Routine, Step};
use tightfit_model::{DecoderConfig, ModelError};
use tightfit_pass::{AdamWConfig, EVALUATE, PassError, accumulate, adamw, autodiff, no_grad};
use tightfit_plan::file::{FileError, PlanFile};
use tightfit_plan::place::Effort;
use tightfit_plan::plan::Layout;
use tightfit_plan::{Plan, PlanError, plan, schedule};

use crate::pretrained::Pretrained;
use crate::settings::Settings;

/// Why there is no plan for a job.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// A size that no model can have.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A technique that does not apply.
    #[error(transparent)]
    Pass(#[from] PassError),
    /// No order or placement.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A plan file that does not fit the job.
    #[error(transparent)]
    File(#[from] FileError),
}

/// The routine that writes a checkpoint.
pub const SAVE: &str = "save";

/// A job: its settings, its model, and the plan they make.
#[derive(Clone, Debug)]
pub struct Job {
    /// Everything the user decided, and every default.
    pub settings: Settings,
    /// What is trained.
    pub model: DecoderConfig,
    /// Every byte of it.
    pub plan: Plan,
}

impl Job {
    /// Plans the job, of a model that is given or of a fresh one.
    ///
    /// # Errors
    /// Settings that no model can have, files that do not fit the model, or sizes that cannot be addressed.
    pub fn plan(settings: Settings, pretrained: Option<&Pretrained>) -> Result<Self, JobError> {
        let (model, step) = step(&settings, pretrained)?;
        let plan = plan_for_cpu(step, settings.threads)?;
        Ok(Self { settings, model, plan })
    }

    /// The job with the orders and offsets of a plan file.
    ///
    /// # Errors
    /// The file is not a plan, or one of another job.
    pub fn with_plan_file(settings: Settings, pretrained: Option<&Pretrained>, json: &str) -> Result<Self, JobError> {
        let (model, step) = step(&settings, pretrained)?;
        let plan = PlanFile::parse(json)?.rebuild(step, &CpuTarget::new(settings.threads))?;
        Ok(Self { settings, model, plan })
    }

    /// The model's `config.json`.
    pub fn config_json(&self) -> String {
        format!("{:#}\n", self.model.to_hf())
    }

    /// The plan as a file's content. The budget is no part of it: a plan is held against whatever budget the run that follows it
    /// has.
    ///
    /// # Errors
    /// Never for a plan of this program; JSON can refuse some values.
    pub fn plan_file(&self) -> Result<String, FileError> {
        let mut settings = self.settings.to_json();
        if let Some(settings) = settings.as_object_mut() {
            settings.shift_remove("budget");
        }
        self.plan.to_file(settings).to_json()
    }
}

/// The model and the step of a job: reading the weights of a given model, training, evaluation on batches of the micro-batch's
/// shape, and saving.
fn step(settings: &Settings, pretrained: Option<&Pretrained>) -> Result<(DecoderConfig, Step), JobError> {
    let model = pretrained.map_or_else(|| settings.fresh_model(), |pretrained| pretrained.config.clone());
    let forward = model.loss(settings.micro_batch_shape())?;
    let load = pretrained.map(|pretrained| load::routine(&pretrained.fills()));
    let evaluation = forward.clone();
    let mut step = training_step(forward, &settings.adamw(), settings.micro_batches(), Some(evaluation))?;
    // Saving streams persistent tensors from where they lie: it keeps them alive and needs nothing else.
    step.routines.push(Routine::of(SAVE, Graph::new()));
    step.routines.extend(load);
    Ok((model, step))
}

/// A model's training step: gradients over `micro_batches`, AdamW, and a routine `evaluate` if a model for it is given.
///
/// # Errors
/// The model has no loss or nothing to train.
pub fn training_step(
    forward: Forward,
    optimizer: &AdamWConfig,
    micro_batches: u32,
    evaluation: Option<Forward>,
) -> Result<Step, PassError> {
    let step = autodiff(forward)?;
    let step = accumulate(step, micro_batches)?;
    let mut step = adamw(step, optimizer)?;
    if let Some(evaluation) = evaluation {
        step.routines.push(Routine::of(EVALUATE, no_grad(evaluation)?.graph));
    }
    Ok(step)
}

/// Orders and places a step for this machine's CPU backend with that many threads.
///
/// # Errors
/// Sizes that cannot be addressed.
pub fn plan_for_cpu(step: Step, threads: usize) -> Result<Plan, PlanError> {
    let target = CpuTarget::new(threads);
    plan(schedule(step, &target)?, &target, Layout::Shared, Effort::default())
}
