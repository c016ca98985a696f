//! The training loop: feeds a session step by step and watches what comes back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tightfit_exec::{Driver, Feed, Results, RunError, Session};
use tightfit_pass::{EVALUATE, MICRO_STEP, TRAIN, UPDATE};

use crate::data::{BatchBuffers, BatchError, Batches, Split};
use crate::settings::Settings;

/// Why training stopped before its last step.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A batch that cannot be made.
    #[error(transparent)]
    Batch(#[from] BatchError),
    /// A program that is not what the loop expects.
    #[error(transparent)]
    Run(#[from] RunError),
    /// A loss or the gradients' norm is infinite or not a number. The update has run, so the weights are lost.
    #[error(
        "{what} is {value} at step {step}: try a lower --lr, more --warmup-steps or a smaller --clip-norm; nothing was saved"
    )]
    NotFinite {
        /// The loss, the gradients' norm or the loss on held-out text.
        what: &'static str,
        /// What it is.
        value: f64,
        /// Counted from 1.
        step: u64,
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
    /// Wall time, data included.
    pub seconds: f64,
    /// Loss on held-out text after the step, where the step evaluates.
    pub eval_loss: Option<f64>,
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
    /// Median over the last [`TIMED_STEPS`] steps, the first left out where there are more.
    pub seconds_per_step: f64,
}

/// Steps whose times are kept.
pub const TIMED_STEPS: usize = 4096;

/// Trains until the last step, a stop, or an error. `watch` is told of every step.
///
/// # Errors
/// The loss is not finite, or the plan is not one of these settings.
pub fn train(
    session: &mut Session,
    settings: &Settings,
    stop: &AtomicBool,
    mut watch: impl FnMut(&StepReport),
) -> Result<Outcome, TrainError> {
    let batches = batches(settings)?;
    let mut trainer = Trainer::new(settings, &batches);
    let schedule = settings.schedule();
    let mut times = Times::default();
    let mut outcome = Outcome {
        steps: 0,
        stopped: false,
        loss_first: f64::NAN,
        loss_last: f64::NAN,
        eval_loss: f64::NAN,
        seconds_per_step: f64::NAN,
    };
    for step in 1..=settings.steps {
        let started = Instant::now();
        trainer.start(step, schedule.lr(step - 1));
        session.run(TRAIN, &mut trainer)?;
        let seconds = started.elapsed().as_secs_f64();
        times.push(seconds);
        let (loss, grad_norm) = (trainer.loss, trainer.grad_norm);
        check_finite("the loss", loss, step)?;
        if let Some(norm) = grad_norm {
            check_finite("the gradients' norm", f64::from(norm), step)?;
        }
        outcome.steps = step;
        outcome.loss_last = loss;
        if step == 1 {
            outcome.loss_first = loss;
        }
        let last = step == settings.steps;
        let due = settings.eval_every > 0 && step.is_multiple_of(settings.eval_every);
        let eval_loss = if last || due {
            evaluate_until(session, settings, &batches, stop)?
        } else {
            None
        };
        if let Some(loss) = eval_loss {
            check_finite("the loss on held-out text", loss, step)?;
        }
        outcome.eval_loss = eval_loss.unwrap_or(f64::NAN);
        outcome.stopped = stop.load(Ordering::Relaxed) && !(last && eval_loss.is_some());
        watch(&StepReport {
            step,
            loss,
            grad_norm,
            lr: schedule.lr(step - 1),
            seconds,
            eval_loss,
        });
        if outcome.stopped {
            break;
        }
    }
    outcome.seconds_per_step = times.median();
    Ok(outcome)
}

/// The built-in text of a job, in micro-batches.
///
/// # Errors
/// Sizes that cannot be indexed.
pub fn batches(settings: &Settings) -> Result<Batches, BatchError> {
    Batches::new(settings.seed, settings.micro_batch as usize, settings.seq as usize)
}

fn check_finite(what: &'static str, value: f64, step: u64) -> Result<(), TrainError> {
    if value.is_finite() {
        return Ok(());
    }
    Err(TrainError::NotFinite { what, value, step })
}

/// The mean loss on held-out text: the same batches each time.
///
/// # Errors
/// The plan has no evaluation.
pub fn evaluate(session: &mut Session, settings: &Settings, batches: &Batches) -> Result<f64, TrainError> {
    let loss = evaluate_until(session, settings, batches, &AtomicBool::new(false))?;
    Ok(loss.unwrap_or(f64::NAN))
}

/// As [`evaluate`]; `None` if it was asked to stop before the last batch.
fn evaluate_until(
    session: &mut Session,
    settings: &Settings,
    batches: &Batches,
    stop: &AtomicBool,
) -> Result<Option<f64>, TrainError> {
    let mut total = 0.0;
    let micro_batches = settings.eval_batches * u64::from(settings.micro_batches());
    for index in 0..micro_batches {
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let mut evaluation = Evaluation {
            batches,
            index,
            loss: 0.0,
        };
        session.run(EVALUATE, &mut evaluation)?;
        total += evaluation.loss;
    }
    Ok(Some(total / micro_batches as f64))
}

/// Feeds optimizer steps from the training text.
pub struct Trainer<'a> {
    batches: &'a Batches,
    micro_batches: u32,
    clips: bool,
    step: u64,
    lr: f64,
    loss: f64,
    grad_norm: Option<f32>,
}

impl<'a> Trainer<'a> {
    /// A feeder for a session of these settings.
    pub fn new(settings: &Settings, batches: &'a Batches) -> Self {
        Self {
            batches,
            micro_batches: settings.micro_batches(),
            clips: settings.clip_norm.0.is_some(),
            step: 1,
            lr: 0.0,
            loss: 0.0,
            grad_norm: None,
        }
    }

    /// Begins optimizer step `step`, counted from 1.
    pub fn start(&mut self, step: u64, lr: f64) {
        self.step = step;
        self.lr = lr;
        self.loss = 0.0;
        self.grad_norm = None;
    }

    /// The loss of the step that ran.
    pub fn loss(&self) -> f64 {
        self.loss
    }
}

impl Driver for Trainer<'_> {
    fn feed(&mut self, program: &str, repeat: u32, feed: &mut Feed<'_>) -> Result<(), RunError> {
        match program {
            MICRO_STEP => {
                let index = (self.step - 1) * u64::from(self.micro_batches) + u64::from(repeat);
                let tokens = fill(self.batches, Split::Train, index, feed)?;
                feed.scalar("token_count", (tokens * self.micro_batches as usize) as f32)
            }
            UPDATE => {
                feed.scalar("lr", self.lr as f32)?;
                feed.scalar("step", self.step as f32)
            }
            _ => Ok(()),
        }
    }

    fn read(&mut self, program: &str, _repeat: u32, results: &Results<'_>) -> Result<(), RunError> {
        match program {
            MICRO_STEP => self.loss += f64::from(results.scalar("loss")?),
            UPDATE if self.clips => self.grad_norm = Some(results.scalar("grad_norm")?),
            _ => {}
        }
        Ok(())
    }
}

/// Feeds one evaluation batch.
struct Evaluation<'a> {
    batches: &'a Batches,
    index: u64,
    loss: f64,
}

impl Driver for Evaluation<'_> {
    fn feed(&mut self, _program: &str, _repeat: u32, feed: &mut Feed<'_>) -> Result<(), RunError> {
        let tokens = fill(self.batches, Split::Eval, self.index, feed)?;
        feed.scalar("token_count", tokens as f32)
    }

    fn read(&mut self, _program: &str, _repeat: u32, results: &Results<'_>) -> Result<(), RunError> {
        self.loss = f64::from(results.scalar("loss")?);
        Ok(())
    }
}

/// Writes one batch into the program's inputs; the tokens that have a target.
fn fill(batches: &Batches, split: Split, index: u64, feed: &mut Feed<'_>) -> Result<usize, RunError> {
    let [tokens, targets, positions, doc_start] = feed.inputs(["tokens", "targets", "positions", "doc_start"])?;
    let mut buffers = BatchBuffers {
        tokens,
        targets,
        positions,
        doc_start,
    };
    batches
        .fill(split, index, &mut buffers)
        .map_err(|error| RunError::Driver(Box::new(error)))
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
