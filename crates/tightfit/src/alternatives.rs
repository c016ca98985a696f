//! What would make a job fit, or at least smaller: other settings, really planned.

use serde::Serialize;
use tightfit_search::Limits;

use crate::job::Job;
use crate::pretrained::Pretrained;
use crate::settings::{Count, Offload, Recompute, Settings};

/// How often the sequence is halved, at most.
const HALVINGS: usize = 4;

/// Other settings for a job that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Alternative {
    /// What would be said on the command line, beside the rest.
    pub flags: String,
    /// The budget that the job then needs.
    pub needed_bytes: u64,
    /// Whether that is within the budget there is.
    pub fits: bool,
}

/// The settings that make a job smaller, smallest change first: one technique after the other, then as many as go together, then
/// shorter sequences. Ends with the first that fits of each group. `asked` leaves open what the user left open; of the budget, `reserve_bytes` go to what the
/// arena does not hold.
pub fn alternatives(
    job: &Job,
    asked: &Settings,
    pretrained: Option<&Pretrained>,
    limits: &Limits,
    reserve_bytes: u64,
) -> Vec<Alternative> {
    let mut found = Vec::new();
    for group in [single(job, asked), together(job, asked), shorter(asked)] {
        for settings in group {
            let Some(other) = plan(&settings, pretrained, limits) else {
                continue;
            };
            let (arena_bytes, lower_bytes) = (other.plan.arena_bytes(), other.plan.lower_tier_bytes());
            if arena_bytes < job.plan.arena_bytes() && lower_bytes <= limits.lower_tier_bytes {
                found.push(Alternative {
                    flags: flags(asked, &other.settings),
                    needed_bytes: arena_bytes.saturating_add(reserve_bytes),
                    fits: arena_bytes <= limits.arena_bytes,
                });
            }
        }
        if found.iter().any(|alternative| alternative.fits) {
            break;
        }
    }
    found
}

/// One technique that the job does not use.
fn single(job: &Job, asked: &Settings) -> Vec<Settings> {
    let mut settings = Vec::new();
    let mut add = |change: &dyn Fn(&mut Settings)| {
        let mut changed = asked.clone();
        change(&mut changed);
        settings.push(changed);
    };
    if asked.recompute != Recompute::Auto {
        add(&|settings| settings.recompute = Recompute::Auto);
    }
    if !asked.update_in_backward && job.settings.micro_batches() == 1 {
        add(&|settings| settings.update_in_backward = true);
    }
    if !asked.update_in_backward && job.settings.micro_batch_rows() > 1 {
        add(&|settings| settings.micro_batch = Count::Auto);
    }
    if asked.offload == Offload::None {
        add(&|settings| settings.offload = kinds(false, true, false));
        add(&|settings| settings.offload = kinds(false, true, true));
    }
    settings
}

/// Whatever goes together: updates inside of the backward, or micro-batches, and everything offloaded.
fn together(job: &Job, asked: &Settings) -> Vec<Settings> {
    let everything = Settings {
        recompute: Recompute::Auto,
        offload: kinds(true, true, true),
        ..asked.clone()
    };
    let mut settings = Vec::new();
    if asked.update_in_backward || job.settings.micro_batches() == 1 {
        settings.push(Settings {
            update_in_backward: true,
            micro_batch: job.settings.micro_batch,
            ..everything.clone()
        });
    }
    if !asked.update_in_backward {
        settings.push(Settings {
            micro_batch: Count::Auto,
            ..everything
        });
    }
    settings
}

/// Shorter sequences, and nothing else.
fn shorter(asked: &Settings) -> Vec<Settings> {
    let halves = std::iter::successors(Some(asked.seq), |seq| Some(seq / 2).filter(|&seq| seq > 0));
    let settings = halves
        .skip(1)
        .take(HALVINGS)
        .map(|seq| Settings { seq, ..asked.clone() });
    settings.collect()
}

fn kinds(activations: bool, optimizer: bool, weights: bool) -> Offload {
    Offload::Of {
        activations,
        optimizer,
        weights,
    }
}

/// The job with the largest micro-batch that fits, where that is left open, or with the smallest. `None` where there is no plan: there is
/// then nothing to propose.
fn plan(settings: &Settings, pretrained: Option<&Pretrained>, limits: &Limits) -> Option<Job> {
    let mut last = None;
    for choice in settings.choices() {
        last = Job::within_limits(limits, choice, pretrained).ok();
        if last
            .as_ref()
            .is_some_and(|job| job.plan.arena_bytes() <= limits.arena_bytes)
        {
            break;
        }
    }
    last
}

/// What differs, as flags.
fn flags(asked: &Settings, other: &Settings) -> String {
    let mut flags = Vec::new();
    if other.recompute != asked.recompute {
        flags.push(format!("--recompute {}", other.recompute));
    }
    if other.update_in_backward && !asked.update_in_backward {
        flags.push("--update-in-backward".to_owned());
    }
    if other.micro_batch_rows() != asked.micro_batch_rows() {
        flags.push(format!("--micro-batch {}", other.micro_batch_rows()));
    }
    if other.offload != asked.offload {
        flags.push(format!("--offload {}", other.offload));
    }
    if other.seq != asked.seq {
        flags.push(format!("--seq {}", other.seq));
    }
    flags.join(" ")
}
