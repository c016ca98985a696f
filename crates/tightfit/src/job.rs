//! From settings to a plan.

use serde::{Deserialize, Serialize};
use tightfit_cpu::{CpuTarget, Profile};
use tightfit_exec::load::Fill;
use tightfit_exec::{checkpoint, load};
use tightfit_ir::graph::Value;
use tightfit_ir::{DType, Forward, Op, Routine, Step};
use tightfit_model::{DecoderConfig, ModelError};
use tightfit_pass::{
    EVALUATE, LoraConfig, LossChunk, OptimizerConfig, PassError, TRAIN, accumulate, autocast, autodiff, chunk_loss,
    lora, loss_scale, no_grad, optimizer, quantize, tile_mlp, update_in_backward,
};
use tightfit_plan::file::{FileError, PlanFile};
use tightfit_plan::place::Effort;
use tightfit_plan::plan::Layout;
use tightfit_plan::{Plan, PlanError, Prediction, plan, schedule};
use tightfit_search::{Backend, Choice, Explanation, FitError, Limits, fit};

use crate::calibration::{self, Calibration};
use crate::pretrained::Pretrained;
use crate::settings::{Count, Method, Settings};

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
    /// The speeds by which that was chosen, and by which transfers begin when they do.
    pub profile: Profile,
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
        let (model, step) = step(&mut settings, pretrained)?;
        let calibration = calibration(&settings);
        let target = target(&settings, calibration.profile);
        let fills = pretrained.map(Pretrained::fills).unwrap_or_default();
        let backend = Backend {
            target: &target,
            complete: &|step| complete(step, &fills),
        };
        let request = tightfit_search::Request {
            recompute: settings.recompute.into(),
            offload: settings.offload.into(),
        };
        let found = fit(step, &backend, limits, request)?;
        Ok(Self {
            settings,
            model,
            plan: found.plan,
            chosen: Chosen {
                choice: found.choice,
                profile: target.profile,
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
        let (model, step) = step(&mut settings, pretrained)?;
        let target = target(&settings, chosen.profile);
        let fills = pretrained.map(Pretrained::fills).unwrap_or_default();
        let step = complete(chosen.choice.apply(step, &target)?, &fills);
        let plan = file.rebuild(step, &target)?;
        let train = plan.step().routines.iter().position(|routine| routine.name == TRAIN);
        let calibration = calibration(&settings);
        let here = self::target(&settings, calibration.profile);
        let prediction = train.map_or_else(Prediction::default, |train| plan.predict(train, &here));
        Ok(Self {
            settings,
            model,
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
        let mut settings = self.settings.to_json();
        if let Some(settings) = settings.as_object_mut() {
            for name in Settings::MACHINE {
                settings.shift_remove(name);
            }
        }
        let chosen = serde_json::to_value(&self.chosen)?;
        self.plan.to_file(settings, chosen).to_json()
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

/// The model and the step of a job: training, and evaluation on batches of its own shape. The loss's chunk, where it is left open,
/// follows from the shape of training and is in the settings from then on, for evaluation and for a run that is resumed.
fn step(settings: &mut Settings, pretrained: Option<&Pretrained>) -> Result<(DecoderConfig, Step), JobError> {
    let model = pretrained.map_or_else(|| settings.fresh_model(), |pretrained| pretrained.config.clone());
    let training = prepared(
        model.loss(settings.micro_batch_shape())?,
        settings,
        pretrained,
        settings.dropout,
    )?;
    if let (Count::Auto, Some(rows)) = (settings.loss_chunk, loss_chunk(&training)) {
        settings.loss_chunk = Count::Of(rows);
    }
    let is_quantised = |(_, value, _): (_, &Value, _)| matches!(value.ty.dtype, DType::Block(_));
    if settings.method == Method::Qlora && !training.graph.inputs().any(is_quantised) {
        return Err(JobError::NotQuantised);
    }
    let evaluation = prepared(model.loss(settings.evaluation_shape())?, settings, pretrained, 0.0)?;
    let optimizer = settings.optimizer();
    let mut step = training_step(training, &optimizer, settings.micro_batches(), Some(evaluation))?;
    if settings.update_in_backward {
        step = update_in_backward(step)?;
    }
    Ok((model, step))
}

/// The adapters that a job trains, if any: those that are given, else fresh ones.
pub fn adapters(settings: &Settings, pretrained: Option<&Pretrained>) -> Option<LoraConfig> {
    let fresh = settings.lora()?;
    let Some(given) = pretrained.and_then(Pretrained::adapter) else {
        return Some(fresh);
    };
    Some(LoraConfig {
        dropout: fresh.dropout,
        seed: fresh.seed,
        ..given.config().clone()
    })
}

/// A model after all passes that change what is computed: with adapters, its numbers stored, and its loss and its MLPs in parts of as
/// many rows, as the settings say.
fn prepared(
    mut forward: Forward,
    settings: &Settings,
    pretrained: Option<&Pretrained>,
    dropout: f64,
) -> Result<Forward, PassError> {
    if let Some(config) = adapters(settings, pretrained) {
        forward = lora(forward, &LoraConfig { dropout, ..config })?;
    }
    let file = |weight: &str| pretrained.and_then(|pretrained| pretrained.stored(weight));
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
