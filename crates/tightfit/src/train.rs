//! The training loop: feeds a session step by step and watches what comes back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tightfit_exec::{Driver, Feed, Results, RunError, Session};
use tightfit_pass::{EVALUATE, MICRO_STEP, TRAIN, UPDATE};

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
    /// A loss or the gradients' norm is infinite or not a number. The update has run, so the weights are lost; checkpoints are not.
    #[error(
        "{what} is {value} at step {step}: try a lower --lr, more --warmup-steps or a smaller --clip-norm; nothing was saved after the last checkpoint"
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
    /// Whether a checkpoint is due.
    pub save: bool,
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
    mut watch: impl FnMut(&Session, &StepReport) -> bool,
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
        seconds_per_step: f64::NAN,
    };
    for step in run.done + 1..=settings.steps {
        let started = Instant::now();
        trainer.start(step, schedule.lr(step - 1))?;
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
        let due = |every: u64| every > 0 && step.is_multiple_of(every);
        let eval_loss = if last || due(settings.eval_every) || due(settings.save_every) {
            evaluate_until(session, settings, text, run.stop)?
        } else {
            None
        };
        if let Some(loss) = eval_loss {
            check_finite("the loss on held-out text", loss, step)?;
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

fn check_finite(what: &'static str, value: f64, step: u64) -> Result<(), TrainError> {
    if value.is_finite() {
        return Ok(());
    }
    Err(TrainError::NotFinite { what, value, step })
}

/// The mean loss on held-out text: the same batches each time; NaN where nothing is held out.
///
/// # Errors
/// The plan has no evaluation.
pub fn evaluate(session: &mut Session, settings: &Settings, text: &Text) -> Result<f64, TrainError> {
    let loss = evaluate_until(session, settings, text, &AtomicBool::new(false))?;
    Ok(loss.unwrap_or(f64::NAN))
}

/// As [`evaluate`]; `None` if nothing is held out, or if it was asked to stop before the last batch.
fn evaluate_until(
    session: &mut Session,
    settings: &Settings,
    text: &Text,
    stop: &AtomicBool,
) -> Result<Option<f64>, TrainError> {
    let asked = settings.eval_batches * u64::from(settings.micro_batches());
    let (mut total, mut tokens) = (0.0, 0);
    for index in 0..asked.min(text.held_out()) {
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
    clips: bool,
    first_batch: u64,
    /// Tokens of the step that have a target: what its summed loss is divided by.
    tokens: usize,
    step: u64,
    lr: f64,
    loss: f64,
    grad_norm: Option<f32>,
}

impl<'a> Trainer<'a> {
    /// A feeder for a session of these settings.
    pub fn new(settings: &Settings, text: &'a Text) -> Self {
        Self {
            text,
            micro_batches: settings.micro_batches(),
            clips: settings.clip_norm.0.is_some(),
            first_batch: 0,
            tokens: 0,
            step: 1,
            lr: 0.0,
            loss: 0.0,
            grad_norm: None,
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
}

impl Driver for Trainer<'_> {
    fn feed(&mut self, program: &str, repeat: u32, feed: &mut Feed<'_>) -> Result<(), RunError> {
        match program {
            MICRO_STEP => {
                fill(self.text, Split::Train, self.first_batch + u64::from(repeat), feed)?;
                feed.scalar("token_count", self.tokens as f32)
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
