//! Where words go: results to stdout, or to stderr where stdout is kept for JSON.

use std::io::{self, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::memory::{format_bytes, process_resident_bytes};
use crate::train::StepReport;

/// Text for people.
#[derive(Clone, Copy, Debug)]
pub struct Console {
    /// Whether stdout is for JSON.
    pub json: bool,
}

impl Console {
    /// Writes a line to stdout, or to stderr where stdout is for JSON.
    ///
    /// # Errors
    /// As [`to_stdout`]. What stderr does not take is lost: nobody's result depends on it.
    pub fn line(self, text: &str) -> io::Result<()> {
        if self.json {
            let _ = writeln!(io::stderr().lock(), "{text}");
            return Ok(());
        }
        to_stdout(text)
    }
}

/// Writes a line to stdout. A reader that has gone away (`| head`) has what it wanted.
///
/// # Errors
/// The stream cannot be written, e.g. as the disk is full.
pub fn to_stdout(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{text}").and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Progress of a long read: a bar on a terminal, a line where it begins elsewhere.
pub struct Transfer {
    bar: Option<ProgressBar>,
}

impl Transfer {
    /// Of `total` bytes, if they are known.
    pub fn new(what: &str, total: u64) -> Self {
        let target = ProgressDrawTarget::stderr_with_hz(5);
        let bar = (!target.is_hidden()).then(|| {
            let bar = ProgressBar::with_draw_target(Some(total), target);
            // The template is a constant that parses.
            if let Ok(style) =
                ProgressStyle::with_template("{msg}  {bar:24} {binary_bytes}/{binary_total_bytes}  {eta} left")
            {
                bar.set_style(style);
            }
            bar.set_message(what.to_owned());
            bar
        });
        if bar.is_none() {
            // Nobody is lost if stderr is.
            let _ = writeln!(io::stderr().lock(), "{what} …");
        }
        Self { bar }
    }

    /// That many more bytes.
    pub fn add(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
        }
    }

    /// That many bytes of so many.
    pub fn set(&self, bytes: u64, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(bytes);
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Progress of a run: a bar on a terminal, now and then a line elsewhere.
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: u64,
    tokens_per_step: u64,
    started: std::time::Instant,
    done: u64,
    next_line: u64,
}

impl Progress {
    /// For a run of `steps`, of which some are done.
    pub fn new(done: u64, steps: u64, tokens_per_step: u64) -> Self {
        let target = ProgressDrawTarget::stderr_with_hz(5);
        // Hidden where stderr is no terminal or one that cannot move its cursor (TERM=dumb).
        let bar = (!target.is_hidden()).then(|| {
            let bar = ProgressBar::with_draw_target(Some(steps), target);
            // The template is a constant that parses.
            if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len}  {msg}  {eta} left") {
                bar.set_style(style);
            }
            bar
        });
        Self {
            bar,
            steps,
            tokens_per_step,
            started: std::time::Instant::now(),
            done,
            next_line: done + 1,
        }
    }

    /// Shows a step.
    pub fn step(&mut self, report: &StepReport) {
        let rate =
            ((report.step - self.done) * self.tokens_per_step) as f64 / self.started.elapsed().as_secs_f64().max(1e-9);
        let mut message = format!("loss {:.4}", report.loss);
        if let Some(loss) = report.eval_loss {
            message.push_str(&format!("  eval {loss:.4}"));
        }
        if let Some(scaled) = report.loss_scale.filter(|scaled| scaled.skipped) {
            message.push_str(&format!("  skipped, loss scale now {}", scaled.scale));
        }
        message.push_str(&format!("  {rate:.0} tokens/s"));
        if let Ok(memory) = process_resident_bytes() {
            message.push_str(&format!("  {}", format_bytes(memory)));
        }
        match &self.bar {
            Some(bar) => {
                bar.set_message(message);
                bar.set_position(report.step);
            }
            None if report.step >= self.next_line || report.eval_loss.is_some() => {
                // A line for every tenth of the run; nobody is lost if stderr is.
                let _ = writeln!(io::stderr().lock(), "step {}/{}  {message}", report.step, self.steps);
                self.next_line = report.step + self.steps.div_ceil(10);
            }
            None => {}
        }
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
