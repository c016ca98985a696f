//! The choices that settings leave to the planner.

use tightfit_plan::PlanError;
use tightfit_search::Limits;

use crate::failure::Failure;
use crate::job::{Job, JobError};
use crate::mix::space::Fidelity;
use crate::mix::{Candidate, Device, Space, search};
use crate::pretrained::Pretrained;
use crate::reserve::Before;
use crate::settings::{Request, Settings};
use crate::subject::Subject;

/// The job with the mix that changes results least, of all that a request leaves open, among those that fit: for a job that does not fit as
/// it is. `None` where none fits.
///
/// # Errors
/// Those of [`search`](search()).
pub fn mix(
    request: &Request,
    settings: &Settings,
    pretrained: Option<&Pretrained>,
    free_bytes: u64,
    before: &mut Before,
) -> Result<Option<(Job, Fidelity)>, Failure> {
    let mut request = request.clone();
    // Fresh weights are worth nothing without training them.
    if request.method.is_none() || request.model.is_none() {
        request.method = Some(settings.method.into());
    }
    let device = Device::cpu(settings.threads);
    let space = Space::new(request, settings.budget.0, device.has_bf16())?;
    let subject = Subject::of(settings, pretrained);
    let tokenise = !settings.data.is_empty();
    let mut reserve = before.planned_bytes(u64::MAX, settings.threads, tokenise)?;
    for _ in 0..ATTEMPTS {
        let outcome = search(&space, &subject, &device, &limits(settings, reserve, free_bytes))?;
        if outcome.fastest_seconds.is_none() {
            return Ok(None);
        }
        let Candidate { settings, numbers, .. } = outcome.candidate;
        before.end_phase()?;
        let job = plan(&settings, pretrained, free_bytes, before)?;
        let planned = before.planned_bytes(job.plan.arena_bytes(), settings.threads, tokenise)?;
        if job.plan.fit(settings.budget.0, planned).is_ok() {
            return Ok(Some((job, numbers.fidelity())));
        }
        reserve = planned.max(reserve + 1);
    }
    Ok(None)
}

/// Plans of one choice, each beside the reserve that the one before left.
const ATTEMPTS: u32 = 3;

/// What a plan may use, of a budget of which `reserve_bytes` go to what the arena does not hold, and of a disk of which so many bytes are
/// free.
pub fn limits(settings: &Settings, reserve_bytes: u64, free_bytes: u64) -> Limits {
    Limits {
        arena_bytes: settings.budget.0.saturating_sub(reserve_bytes),
        lower_tier_bytes: settings.disk.0.map_or(free_bytes, |disk| disk.min(free_bytes)),
    }
}

/// Plans a job with the largest micro-batch that fits its limits, where that is left open; where none fits, with the smallest.
/// `free_bytes` are what the disk has left.
///
/// Fewer sequences need less memory but for the optimizer's state and the weights, so the first that fits is the largest. Its number
/// is in the job's settings, and from there in every file that the run writes: a resumed run does not choose again.
///
/// # Errors
/// Those of [`Job::plan`].
pub fn plan(
    settings: &Settings,
    pretrained: Option<&Pretrained>,
    free_bytes: u64,
    before: &mut Before,
) -> Result<Job, Failure> {
    let tokenise = !settings.data.is_empty();
    let mut reserve = before.planned_bytes(u64::MAX, settings.threads, tokenise)?;
    let mut last = None;
    for choice in settings.choices() {
        for _ in 0..ATTEMPTS {
            // One plan at a time is in memory.
            drop(last.take());
            let limits = limits(settings, reserve, free_bytes);
            let job = match Job::within_limits(&limits, choice.clone(), pretrained) {
                Err(error) if !matches!(error, JobError::Plan(PlanError::TooLarge | PlanError::Place { .. })) => {
                    return Err(error.into());
                }
                Err(does_not_fit) => {
                    last = Some(Err(does_not_fit));
                    break;
                }
                Ok(job) => job,
            };
            before.end_phase()?;
            let planned = before.planned_bytes(job.plan.arena_bytes(), settings.threads, tokenise)?;
            let in_memory = job.plan.fit(settings.budget.0, planned).is_ok();
            if in_memory && job.plan.lower_tier_bytes() <= limits.lower_tier_bytes {
                return Ok(job);
            }
            last = Some(Ok(job));
            if planned <= reserve {
                break;
            }
            // The plan has grown the reserve, and leaves a smaller arena.
            reserve = planned;
        }
    }
    match last {
        Some(job) => Ok(job?),
        None => Ok(Job::within_limits(
            &limits(settings, reserve, free_bytes),
            settings.clone(),
            pretrained,
        )?),
    }
}
