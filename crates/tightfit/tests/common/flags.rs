//! Jobs as the command makes them from flags, trained in this process.

// Each test uses a part of it.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::path::Path;

use clap::Parser;
use tightfit::cli::{Cli, Command};
use tightfit::data::Text;
use tightfit::train::{Trainer, evaluate};
use tightfit::{Job, Session, Settings, SettingsError};
use tightfit_pass::TRAIN;

use crate::run::{persistent, relative_error};

/// The settings of `tightfit train` with these flags.
pub fn settings(flags: &str) -> Result<Settings, SettingsError> {
    let line = ["tightfit", "train"].into_iter().chain(flags.split_whitespace());
    match Cli::try_parse_from(line).unwrap().command {
        Command::Train(args) => args.request.resolve(u64::MAX),
        other => panic!("{other:?}"),
    }
}

/// The plan of `tightfit train` with these flags.
pub fn job(flags: &str) -> Job {
    Job::plan(settings(flags).unwrap(), None).unwrap()
}

/// What a run leaves behind: all that can be told of it, and all that a checkpoint reads.
#[derive(Clone, Debug, PartialEq)]
pub struct Left {
    /// Of each step.
    pub losses: Vec<f64>,
    /// Of each step, where gradients are clipped.
    pub norms: Vec<f32>,
    pub eval_loss: f64,
    pub persistent: BTreeMap<String, Vec<f32>>,
}

/// Runs some steps and an evaluation of a plan as it is, and holds the arena's use to it.
pub fn train(job: Job, steps: u64, poison: bool) -> Left {
    let Job { settings, plan, .. } = job;
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mut session = Session::with_scratch(plan, settings.threads, Some(scratch)).unwrap();
    session.set_poison(poison);
    session.initialise(settings.seed).unwrap();
    let text = Text::generated(&settings).unwrap();
    let mut trainer = Trainer::new(&settings, &text);
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 1..=steps {
        trainer.start(step, settings.lr).unwrap();
        session.run(TRAIN, &mut trainer).unwrap();
        losses.push(trainer.loss());
        norms.extend(trainer.grad_norm());
    }
    let eval_loss = evaluate(&mut session, &text).unwrap();
    let (measured, planned) = (session.arena().measured_peak(), session.plan().peak());
    assert_eq!(measured, planned, "measured and planned peak");
    Left {
        losses,
        norms,
        eval_loss,
        persistent: persistent(&mut session),
    }
}

impl Left {
    /// Whether training came to the same bits; evaluation may have been cut into other batches.
    pub fn trained_alike(&self, other: &Self) -> bool {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let losses = |left: &Self| left.losses.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let kept = |left: &Self| left.persistent.values().map(|x| bits(x)).collect::<Vec<_>>();
        losses(self) == losses(other)
            && bits(&self.norms) == bits(&other.norms)
            && self.persistent.keys().eq(other.persistent.keys())
            && kept(self) == kept(other)
    }

    /// Whether all of it is the same bits.
    pub fn alike(&self, other: &Self) -> bool {
        self.trained_alike(other) && self.eval_loss.to_bits() == other.eval_loss.to_bits()
    }

    /// The largest difference from what is expected, and of what: of losses and norms relative to each, of a tensor (weights, and the
    /// moments, which are sums of gradients) in the Euclidean norm, relative to the tensor's.
    pub fn relative_error(&self, expected: &Self) -> (f64, String) {
        let mut errors = self.errors_of_losses(expected);
        let norms = self.norms.iter().zip(&expected.norms);
        errors.extend(norms.map(|(&x, &y)| (relative(x.into(), y.into()), "gradients' norm".to_owned())));
        for (name, values) in &expected.persistent {
            let found = &self.persistent[name];
            errors.push((relative_error(found, values), name.clone()));
        }
        largest(errors)
    }

    /// The largest difference of losses, and of which.
    pub fn relative_error_of_losses(&self, expected: &Self) -> (f64, String) {
        largest(self.errors_of_losses(expected))
    }

    fn errors_of_losses(&self, expected: &Self) -> Vec<(f64, String)> {
        let losses = self.losses.iter().zip(&expected.losses);
        let losses = losses.map(|(&x, &y)| (relative(x, y), "loss".to_owned()));
        let evaluation = (relative(self.eval_loss, expected.eval_loss), "evaluation".to_owned());
        losses.chain([evaluation]).collect()
    }
}

fn relative(x: f64, y: f64) -> f64 {
    ((x - y) / y).abs()
}

/// What is no number is the largest.
fn largest(errors: Vec<(f64, String)>) -> (f64, String) {
    errors
        .into_iter()
        .max_by(|a, b| a.0.abs().total_cmp(&b.0.abs()))
        .unwrap()
}
