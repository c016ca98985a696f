//! From settings to a plan.

use serde::{Deserialize, Serialize};
use tightfit_cpu::{CpuTarget, Profile};
use tightfit_exec::load::Fill;
use tightfit_exec::{checkpoint, load};
use tightfit_ir::graph::Value;
use tightfit_ir::{DType, Forward, Op, Routine, Step, Target};
use tightfit_model::{DecoderConfig, ModelError};
use tightfit_pass::{
    EVALUATE, LoraConfig, LossChunk, OptimizerConfig, PassError, TRAIN, accumulate, autocast, autodiff, chunk_loss,
    lora, loss_scale, no_grad, optimizer, quantize, tile_mlp, update_in_backward,
};
use tightfit_plan::file::{FileError, PlanFile};
use tightfit_plan::place::Effort;
use tightfit_plan::plan::{Draft, Layout};
use tightfit_plan::{Plan, PlanError, Prediction, plan, schedule};
use tightfit_search::{Backend, Bound, Choice, Explanation, Fit, FitError, Limits, bound, fit};

use crate::calibration::{self, Calibration};
use crate::pretrained::Pretrained;
use crate::settings::{Count, Method, Recompute, Settings};
use crate::subject::Subject;

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
    /// QLoRA of a base that is not quantised.
    #[error(
        "--method qlora --base as-is: no linear layer of the model is quantised in its file: say --base nf4, int8 or int4, or \
         --method lora"
    )]
    NotQuantised,
    /// A plan file that does not fit the job.
    #[error(transparent)]
    File(#[from] FileError),
}

impl From<FitError> for JobError {
    fn from(error: FitError) -> Self {
        match error {
            FitError::Pass(error) => error.into(),
            FitError::Plan(error) => error.into(),
        }
    }
}

/// A job: its settings, its model, and the plan they make.
#[derive(Clone, Debug)]
pub struct Job {
    /// Everything the user decided, and every default.
    pub settings: Settings,
    /// What is trained.
    pub model: DecoderConfig,
    /// Every byte of it.
    pub plan: Plan,
    /// What was chosen where the settings leave a choice.
    pub chosen: Chosen,
    /// Why; `None` for a plan that was read from a file.
    pub explanation: Option<Explanation>,
    /// How long an optimizer step is expected to take on this machine.
    pub prediction: Prediction,
    /// The speeds that this is expected by.
    pub calibration: Calibration,
}

/// What a plan depends on beside its settings. A plan file has it, so that the same step can be made again on another day.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Chosen {
    /// What is recomputed and what is offloaded.
    pub choice: Choice,
    /// The speeds by which that was chosen, and by which transfers begin when they do; `None` for a card, whose data sheet they follow
    /// from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
}

impl Job {
    /// Plans the job, of a model that is given or of a fresh one, for an arena of the whole budget.
    ///
    /// # Errors
    /// Settings that no model can have, files that do not fit the model, or sizes that cannot be addressed.
    pub fn plan(settings: Settings, pretrained: Option<&Pretrained>) -> Result<Self, JobError> {
        let arena_bytes = settings.budget.0;
        Self::within(arena_bytes, settings, pretrained)
    }

    /// Plans the job for an arena of so many bytes, recomputing and offloading as the settings say; where they leave it open, as little
    /// as makes it fit. A plan that is larger was the smallest that was found.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn within(arena_bytes: u64, settings: Settings, pretrained: Option<&Pretrained>) -> Result<Self, JobError> {
        let limits = Limits {
            arena_bytes,
            lower_tier_bytes: settings.disk.0.unwrap_or(u64::MAX),
        };
        Self::within_limits(&limits, settings, pretrained)
    }

    /// As [`within`](Self::within), with a limit of what is offloaded.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn within_limits(
        limits: &Limits,
        mut settings: Settings,
        pretrained: Option<&Pretrained>,
    ) -> Result<Self, JobError> {
        let subject = Subject::of(&settings, pretrained);
        let calibration = calibration(&settings);
        let target = target(&settings, calibration.profile);
        let found = fit_on(&mut settings, &subject, &target, limits)?;
        Ok(Self {
            settings,
            model: subject.config,
            plan: found.plan,
            chosen: Chosen {
                choice: found.choice,
                profile: Some(target.profile),
            },
            explanation: Some(found.explanation),
            prediction: found.prediction,
            calibration,
        })
    }

    /// The job with the orders and offsets of a plan file.
    ///
    /// # Errors
    /// The file is not a plan, or one of another job.
    pub fn with_plan_file(
        mut settings: Settings,
        pretrained: Option<&Pretrained>,
        json: &str,
    ) -> Result<Self, JobError> {
        let file = PlanFile::parse(json)?;
        let chosen: Chosen = serde_json::from_value(file.choice.clone()).map_err(FileError::from)?;
        let subject = Subject::of(&settings, pretrained);
        let step = step(&mut settings, &subject)?;
        let calibration = calibration(&settings);
        let target = target(&settings, chosen.profile.unwrap_or(calibration.profile));
        let step = complete(chosen.choice.apply(step, &target)?, &subject.fills());
        let plan = file.rebuild(step, &target)?;
        let train = plan.step().routines.iter().position(|routine| routine.name == TRAIN);
        let here = self::target(&settings, calibration.profile);
        let prediction = train.map_or_else(Prediction::default, |train| plan.predict(train, &here));
        Ok(Self {
            settings,
            model: subject.config,
            plan,
            chosen,
            explanation: None,
            prediction,
            calibration,
        })
    }

    /// The model's `config.json`, with weights as they are saved.
    pub fn config_json(&self) -> String {
        let mut config = self.model.to_hf();
        config["dtype"] = match self.settings.precision.weights() {
            DType::Bf16 => "bfloat16".into(),
            DType::F16 => "float16".into(),
            _ => "float32".into(),
        };
        format!("{config:#}\n")
    }

    /// The plan as a file's content. The budget and other facts of the machine are no part of it: a plan is held against those of the
    /// run that follows it.
    ///
    /// # Errors
    /// Never for a plan of this program; JSON can refuse some values.
    pub fn plan_file(&self) -> Result<String, FileError> {
        plan_file(&self.settings, &self.plan, &self.chosen)
    }
}

/// A plan as a file's content: see [`Job::plan_file`].
///
/// # Errors
/// As that.
pub fn plan_file(settings: &Settings, plan: &Plan, chosen: &Chosen) -> Result<String, FileError> {
    let mut settings = settings.to_json();
    if let Some(settings) = settings.as_object_mut() {
        for name in Settings::MACHINE {
            settings.shift_remove(name);
        }
    }
    plan.to_file(settings, serde_json::to_value(chosen)?).to_json()
}

/// Plans a job of `subject` for a backend, recomputing and offloading as the settings say. Where they leave it open, what was chosen is in
/// them afterwards.
///
/// # Errors
/// As [`Job::plan`].
pub fn fit_on(
    settings: &mut Settings,
    subject: &Subject<'_>,
    target: &dyn Target,
    limits: &Limits,
) -> Result<Fit, JobError> {
    let step = step(settings, subject)?;
    fit_step(step, settings, subject, target, limits, f64::INFINITY)
}

/// As [`fit_on`], of a [`step`] that is made already; a plan that takes longer than `most_seconds` is of no use.
///
/// # Errors
/// As [`Job::plan`].
pub fn fit_step(
    step: Step,
    settings: &Settings,
    subject: &Subject<'_>,
    target: &dyn Target,
    limits: &Limits,
    most_seconds: f64,
) -> Result<Fit, JobError> {
    let fills = subject.fills();
    let backend = Backend {
        target,
        complete: &|step| complete(step, &fills),
    };
    Ok(fit(step, &backend, limits, request(settings, most_seconds))?)
}

/// Whether a [`step`] fits without anything that costs time: nothing runs again and nothing leaves memory, unless the settings say so.
///
/// # Errors
/// As [`Job::plan`].
pub fn fits_as_is(
    step: Step,
    settings: &Settings,
    subject: &Subject<'_>,
    target: &dyn Target,
    limits: &Limits,
) -> Result<bool, JobError> {
    if settings.recompute != Recompute::None {
        let fit = fit_step(step, settings, subject, target, limits, f64::INFINITY)?;
        return Ok(fit.fits);
    }
    let step = complete(step, &subject.fills());
    let draft = Draft::new(schedule(step, target)?, target, Layout::Shared)?;
    let may_fit = draft.least_arena_bytes() <= limits.arena_bytes;
    Ok(may_fit && draft.place(Effort::default())?.arena_bytes() <= limits.arena_bytes)
}

/// What no plan of a [`step`] can beat.
pub fn bound_step(step: &Step, settings: &Settings, target: &dyn Target, limits: &Limits) -> Bound {
    bound(step, &Backend::of(target), limits, request(settings, f64::INFINITY))
}

fn request(settings: &Settings, most_seconds: f64) -> tightfit_search::Request {
    tightfit_search::Request {
        recompute: settings.recompute.into(),
        offload: settings.offload.into(),
        most_seconds,
    }
}

/// This machine's backend, with these speeds.
fn target(settings: &Settings, profile: Profile) -> CpuTarget {
    let mut target = CpuTarget::new(settings.threads);
    target.profile = profile;
    target
}

/// The speeds of this machine.
fn calibration(settings: &Settings) -> Calibration {
    calibration::for_machine(CpuTarget::new(settings.threads).isa, settings.threads)
}

/// The step of a job: training, and evaluation on batches of its own shape. The loss's chunk, where it is left open,
/// follows from the shape of training and is in the settings from then on, for evaluation and for a run that is resumed.
///
/// # Errors
/// As [`Job::plan`].
pub fn step(settings: &mut Settings, subject: &Subject<'_>) -> Result<Step, JobError> {
    let model = &subject.config;
    let training = prepared(
        model.loss(settings.micro_batch_shape())?,
        settings,
        subject,
        settings.dropout,
    )?;
    if let (Count::Auto, Some(rows)) = (settings.loss_chunk, loss_chunk(&training)) {
        settings.loss_chunk = Count::Of(rows);
    }
    let is_quantised = |(_, value, _): (_, &Value, _)| matches!(value.ty.dtype, DType::Block(_));
    if settings.method == Method::Qlora && !training.graph.inputs().any(is_quantised) {
        return Err(JobError::NotQuantised);
    }
    let evaluation = prepared(model.loss(settings.evaluation_shape())?, settings, subject, 0.0)?;
    let optimizer = settings.optimizer();
    let mut step = training_step(training, &optimizer, settings.micro_batches(), Some(evaluation))?;
    if settings.update_in_backward {
        step = update_in_backward(step)?;
    }
    Ok(step)
}

/// A model after all passes that change what is computed: with adapters, its numbers stored, and its loss and its MLPs in parts of as
/// many rows, as the settings say.
fn prepared(
    mut forward: Forward,
    settings: &Settings,
    subject: &Subject<'_>,
    dropout: f64,
) -> Result<Forward, PassError> {
    if let Some(config) = subject.adapters(settings) {
        forward = lora(forward, &LoraConfig { dropout, ..config })?;
    }
    let file = |weight: &str| subject.stored(weight);
    let forward = quantize(forward, &settings.storage(&file))?;
    let forward = autocast(forward, settings.precision.activations())?;
    let chunk = match settings.loss_chunk {
        Count::Auto => LossChunk::Auto,
        Count::Of(rows) => LossChunk::Rows(rows),
    };
    let forward = chunk_loss(forward, chunk)?;
    match settings.mlp_tile.0 {
        Some(rows) => tile_mlp(forward, rows),
        None => Ok(forward),
    }
}

/// Tokens whose logits exist at one time.
fn loss_chunk(forward: &Forward) -> Option<u64> {
    let mut nodes = forward.graph.nodes.iter();
    nodes.find_map(|node| match &node.op {
        Op::LinearCrossEntropy(op) => Some(op.chunk),
        _ => None,
    })
}

/// Adds the routines in which weights are read and checkpoints are written.
fn complete(mut step: Step, fills: &[Fill<'_>]) -> Step {
    let save = checkpoint::routine(step.persistent().map(|(_, ty)| ty));
    let load = load::routine(fills, step.persistent());
    step.routines.extend([save, load]);
    step
}

/// A model's training step: gradients over `micro_batches`, their optimizer, and a routine `evaluate` if a model for it is given.
///
/// # Errors
/// The model has no loss or nothing to train.
pub fn training_step(
    forward: Forward,
    config: &OptimizerConfig,
    micro_batches: u32,
    evaluation: Option<Forward>,
) -> Result<Step, PassError> {
    let mut step = autodiff(forward)?;
    if let Some(scale) = &config.loss_scale {
        step = loss_scale(step, scale)?;
    }
    let step = accumulate(step, micro_batches)?;
    let mut step = optimizer(step, config)?;
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
