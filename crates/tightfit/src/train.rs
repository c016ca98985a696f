//! The training loop: feeds a session step by step and watches what comes back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use serde::Serialize;
use tightfit_exec::{Driver, Feed, Results, RunError, Session};
use tightfit_ir::DType;
use tightfit_ir::op::token_words;
use tightfit_pass::{EVALUATE, FIRST_TOKEN, TRAIN};

use crate::data::{BatchBuffers, Split, Text, TextError};
use crate::settings::Settings;

/// Why training stopped before its last step.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A batch that cannot be made.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A program that is not what the loop expects.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A loss or the gradients' norm is infinite or not a number: training has diverged. Checkpoints are there still.
    #[error(
        "{what} is {value} at step {step}: try a lower --lr, more --warmup-steps or a smaller --clip-norm{}; nothing was saved after the last checkpoint",
        if *f16 { "; or --precision bf16-mixed, as f16 ends at 65504" } else { "" }
    )]
    NotFinite {
        /// The loss, the gradients' norm or the loss on held-out text.
        what: &'static str,
        /// What it is.
        value: f64,
        /// Counted from 1.
        step: u64,
        /// Whether activations are `f16`, which a large one may have been too large for.
        f16: bool,
    },
}

/// One optimizer step as the loop saw it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Counted from 1.
    pub step: u64,
    /// Mean loss over the step's tokens, before the update.
    pub loss: f64,
    /// The gradients' global norm, where they are clipped.
    pub grad_norm: Option<f32>,
    /// The learning rate.
    pub lr: f64,
    /// How the loss was scaled, where it is.
    pub loss_scale: Option<ScaledStep>,
    /// Wall time, data included.
    pub seconds: f64,
    /// Loss on held-out text after the step, where the step evaluates.
    pub eval_loss: Option<f64>,
    /// Whether a checkpoint is due.
    pub save: bool,
}

/// A step whose loss is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaledStep {
    /// What the next step's loss is multiplied by.
    pub scale: f32,
    /// Whether the update was skipped, as a gradient was infinite or not a number.
    pub skipped: bool,
}

/// What a run came to.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// Steps done.
    pub steps: u64,
    /// Whether the user stopped it before all was done.
    pub stopped: bool,
    /// Loss of the first step.
    pub loss_first: f64,
    /// Loss of the last step.
    pub loss_last: f64,
    /// Loss on held-out text after the last step; NaN where it was not evaluated.
    pub eval_loss: f64,
    /// Updates that were skipped since the run began, where the loss is scaled.
    pub skipped_steps: Option<u64>,
    /// Median over the last [`TIMED_STEPS`] steps, the first left out where there are more.
    pub seconds_per_step: f64,
    /// What went to and from the lower tier in the training steps of this process; `None` where nothing is offloaded or no step ran.
    pub transferred: Option<Transferred>,
}

/// Transfers of training steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Transferred {
    /// From the file.
    pub read_bytes_per_step: u64,
    /// To the file.
    pub written_bytes_per_step: u64,
    /// In which the step waited for transfers.
    pub waited_seconds_per_step: f64,
    /// Whether transfers bypass the page cache. Where the file system does not allow that, the cache is dropped behind them.
    pub is_direct: bool,
}

impl Transferred {
    /// What was moved, and how long was waited for it, since the session began.
    fn so_far(session: &Session) -> Option<Self> {
        session.transfers().map(|transfers| {
            let moved = transfers.moved();
            Self {
                read_bytes_per_step: moved.read,
                written_bytes_per_step: moved.written,
                waited_seconds_per_step: transfers.waited().as_secs_f64(),
                is_direct: transfers.is_direct(),
            }
        })
    }
}

/// Steps whose times are kept.
pub const TIMED_STEPS: usize = 4096;

/// A run: what it trains on, and where it begins.
pub struct Run<'a> {
    /// Every setting.
    pub settings: &'a Settings,
    /// The text.
    pub text: &'a Text,
    /// Steps done before, by the run that is resumed.
    pub done: u64,
    /// Loss of the first step, where that is done.
    pub loss_first: Option<f64>,
    /// Set when the user asks to stop.
    pub stop: &'a AtomicBool,
}

/// Trains until the last step, a stop, or an error. `watch` is told of every step and says whether to go on.
///
/// # Errors
/// The loss is not finite, or the plan is not one of these settings.
pub fn train(
    session: &mut Session,
    run: &Run<'_>,
    mut watch: impl FnMut(&mut Session, &StepReport) -> bool,
) -> Result<Outcome, TrainError> {
    let Run { settings, text, .. } = *run;
    let mut trainer = Trainer::new(settings, text);
    let schedule = settings.schedule();
    let mut times = Times::default();
    let mut outcome = Outcome {
        steps: run.done,
        stopped: false,
        loss_first: run.loss_first.unwrap_or(f64::NAN),
        loss_last: f64::NAN,
        eval_loss: f64::NAN,
        skipped_steps: None,
        seconds_per_step: f64::NAN,
        transferred: None,
    };
    let mut sums = Transferred::default();
    for step in run.done + 1..=settings.steps {
        let started = Instant::now();
        trainer.start(step, schedule.lr(step - 1))?;
        let before = Transferred::so_far(session);
        session.run(TRAIN, &mut trainer)?;
        if let (Some(before), Some(after)) = (before, Transferred::so_far(session)) {
            sums.read_bytes_per_step += after.read_bytes_per_step - before.read_bytes_per_step;
            sums.written_bytes_per_step += after.written_bytes_per_step - before.written_bytes_per_step;
            sums.waited_seconds_per_step += after.waited_seconds_per_step - before.waited_seconds_per_step;
            let steps = step - run.done;
            outcome.transferred = Some(Transferred {
                read_bytes_per_step: sums.read_bytes_per_step / steps,
                written_bytes_per_step: sums.written_bytes_per_step / steps,
                waited_seconds_per_step: sums.waited_seconds_per_step / steps as f64,
                is_direct: after.is_direct,
            });
        }
        let seconds = started.elapsed().as_secs_f64();
        times.push(seconds);
        let (loss, grad_norm) = (trainer.loss, trainer.grad_norm);
        let check_finite = |what, value: f64| match value.is_finite() {
            true => Ok(()),
            false => Err(TrainError::NotFinite {
                what,
                value,
                step,
                f16: settings.precision.activations() == DType::F16,
            }),
        };
        check_finite("the loss", loss)?;
        let scaled = trainer.scaled_step();
        if let Some(norm) = grad_norm
            && scaled.is_none_or(|scaled| scaled.scale < SMALLEST_SCALE)
        {
            check_finite("the gradients' norm", f64::from(norm))?;
        }
        outcome.skipped_steps = trainer.skipped_steps;
        outcome.steps = step;
        outcome.loss_last = loss;
        if step == 1 {
            outcome.loss_first = loss;
        }
        let last = step == settings.steps;
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        let eval_loss = if last || due(settings.eval_every) || due(settings.save_every) {
            evaluate_until(session, text, run.stop)?
        } else {
            None
        };
        if let Some(loss) = eval_loss {
            check_finite("the loss on held-out text", loss)?;
        }
        outcome.eval_loss = eval_loss.unwrap_or(f64::NAN);
        outcome.stopped = run.stop.load(Ordering::Relaxed) && !(last && eval_loss.is_some());
        let go_on = watch(
            session,
            &StepReport {
                step,
                loss,
                grad_norm,
                lr: schedule.lr(step - 1),
                loss_scale: scaled,
                seconds,
                eval_loss,
                save: last || outcome.stopped || due(settings.save_every),
            },
        );
        outcome.stopped |= !go_on;
        if outcome.stopped {
            break;
        }
    }
    outcome.seconds_per_step = times.median();
    Ok(outcome)
}

/// A scale of the loss at which a gradient that is not finite is none that was too large.
const SMALLEST_SCALE: f32 = 1.0 / 65536.0;

/// The mean loss on held-out text: the same rows each time; NaN where nothing is held out.
///
/// # Errors
/// The plan has no evaluation.
pub fn evaluate(session: &mut Session, text: &Text) -> Result<f64, TrainError> {
    let loss = evaluate_until(session, text, &AtomicBool::new(false))?;
    Ok(loss.unwrap_or(f64::NAN))
}

/// As [`evaluate`]; `None` if nothing is held out, or if it was asked to stop before the last batch.
fn evaluate_until(session: &mut Session, text: &Text, stop: &AtomicBool) -> Result<Option<f64>, TrainError> {
    let (mut total, mut tokens) = (0.0, 0);
    for index in 0..text.held_out() {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let mut evaluation = Evaluation {
            text,
            index,
            tokens: 0,
            loss: 0.0,
        };
        session.run(EVALUATE, &mut evaluation)?;
        total += evaluation.loss * evaluation.tokens as f64;
        tokens += evaluation.tokens;
    }
    Ok((tokens > 0).then(|| total / tokens as f64))
}

/// Feeds optimizer steps from the training text.
pub struct Trainer<'a> {
    text: &'a Text,
    micro_batches: u32,
    /// Rows of a micro-batch.
    rows: u64,
    first_batch: u64,
    /// Tokens of the step that have a target: what its summed loss is divided by.
    tokens: usize,
    step: u64,
    lr: f64,
    loss: f64,
    grad_norm: Option<f32>,
    scale: Option<f32>,
    skipped_steps: Option<u64>,
}

impl<'a> Trainer<'a> {
    /// A feeder for a session of these settings.
    pub fn new(settings: &Settings, text: &'a Text) -> Self {
        Self {
            text,
            micro_batches: settings.micro_batches(),
            rows: settings.micro_batch_shape().tokens(),
            first_batch: 0,
            tokens: 0,
            step: 1,
            lr: 0.0,
            loss: 0.0,
            grad_norm: None,
            scale: None,
            skipped_steps: None,
        }
    }

    /// Begins optimizer step `step`, counted from 1.
    ///
    /// # Errors
    /// The step's data cannot be read.
    pub fn start(&mut self, step: u64, lr: f64) -> Result<(), TextError> {
        self.first_batch = (step - 1) * u64::from(self.micro_batches);
        self.tokens = 0;
        for batch in 0..u64::from(self.micro_batches) {
            self.tokens += self.text.counted(Split::Train, self.first_batch + batch)?;
        }
        self.step = step;
        self.lr = lr;
        self.loss = 0.0;
        self.grad_norm = None;
        Ok(())
    }

    /// The loss of the step that ran.
    pub fn loss(&self) -> f64 {
        self.loss
    }

    /// The gradients' global norm in the step that ran, where they are clipped or the loss is scaled.
    pub fn grad_norm(&self) -> Option<f32> {
        self.grad_norm
    }

    /// How the loss of the step that ran was scaled, where it is.
    pub fn scaled_step(&self) -> Option<ScaledStep> {
        Some(ScaledStep {
            scale: self.scale?,
            skipped: !self.grad_norm?.is_finite(),
        })
    }
}

/// By the names that a program has, since techniques move them between programs.
impl Driver for Trainer<'_> {
    fn feed(&mut self, _program: &str, repeat: u32, feed: &mut Feed<'_>) -> Result<(), RunError> {
        let batch = self.first_batch + u64::from(repeat);
        if feed.has("tokens") {
            fill(self.text, Split::Train, batch, feed)?;
        }
        if feed.has(FIRST_TOKEN) {
            // Rows are numbered through the run, so that the number does not depend on how a batch is cut.
            let [first_token] = feed.inputs::<i32, 1>([FIRST_TOKEN])?;
            first_token.copy_from_slice(&token_words(batch.wrapping_mul(self.rows)));
        }
        let scalars = [
            ("token_count", self.tokens as f32),
            ("lr", self.lr as f32),
            ("step", self.step as f32),
        ];
        for (name, value) in scalars {
            if feed.has(name) {
                feed.scalar(name, value)?;
            }
        }
        Ok(())
    }

    fn read(&mut self, _program: &str, _repeat: u32, results: &Results<'_>) -> Result<(), RunError> {
        if results.has("loss") {
            self.loss += f64::from(results.scalar("loss")?);
        }
        if results.has("grad_norm") {
            self.grad_norm = Some(results.scalar("grad_norm")?);
        }
        if results.has("loss_scale") {
            self.scale = Some(results.scalar("loss_scale")?);
            self.skipped_steps = Some(results.scalar("skipped_steps")? as u64);
        }
        Ok(())
    }
}

/// Feeds one evaluation batch.
struct Evaluation<'a> {
    text: &'a Text,
    index: u64,
    tokens: usize,
    loss: f64,
}

impl Driver for Evaluation<'_> {
    fn feed(&mut self, _program: &str, _repeat: u32, feed: &mut Feed<'_>) -> Result<(), RunError> {
        self.tokens = fill(self.text, Split::Eval, self.index, feed)?;
        feed.scalar("token_count", self.tokens.max(1) as f32)
    }

    fn read(&mut self, _program: &str, _repeat: u32, results: &Results<'_>) -> Result<(), RunError> {
        self.loss = f64::from(results.scalar("loss")?);
        Ok(())
    }
}

/// Writes one batch into the program's inputs; the tokens that have a target.
fn fill(text: &Text, split: Split, index: u64, feed: &mut Feed<'_>) -> Result<usize, RunError> {
    text.fill(split, index, &mut batch_buffers(feed)?)
        .map_err(|error| RunError::Driver(Box::new(error)))
}

/// The inputs of a program that reads a batch.
///
/// # Errors
/// The program reads no batch.
pub fn batch_buffers<'a>(feed: &'a mut Feed<'_>) -> Result<BatchBuffers<'a>, RunError> {
    let [tokens, targets, positions, doc_start] = feed.inputs(["tokens", "targets", "positions", "doc_start"])?;
    Ok(BatchBuffers {
        tokens,
        targets,
        positions,
        doc_start,
    })
}

/// The times of the last steps, in memory of fixed size.
struct Times {
    ring: Vec<f64>,
    count: usize,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            ring: Vec::with_capacity(TIMED_STEPS),
            count: 0,
        }
    }
}

impl Times {
    fn push(&mut self, seconds: f64) {
        match self.ring.get_mut(self.count % TIMED_STEPS) {
            Some(slot) => *slot = seconds,
            None => self.ring.push(seconds),
        }
        self.count += 1;
    }

    /// The first step touches its buffers for the first time, so it counts only where there is no other.
    fn median(&self) -> f64 {
        let first_counts = self.count == 1 || self.count > TIMED_STEPS;
        let mut times = self.ring[usize::from(!first_counts && self.count > 0)..].to_vec();
        times.sort_by(f64::total_cmp);
        match times.len() {
            0 => f64::NAN,
            n if n % 2 == 1 => times[n / 2],
            n => (times[n / 2 - 1] + times[n / 2]) / 2.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_leaves_the_first_step_out() {
        let mut times = Times::default();
        assert!(times.median().is_nan());
        times.push(9.0);
        assert_eq!(times.median(), 9.0);
        for seconds in [1.0, 3.0, 2.0, 4.0] {
            times.push(seconds);
        }
        assert_eq!(times.median(), 2.5);
        for _ in 0..TIMED_STEPS {
            times.push(5.0);
        }
        assert_eq!(times.median(), 5.0);
    }
}
