//! The mix of the highest fidelity among those that take at most twice as long as the fastest that fits.
//!
//! Both are found in order of bounds that need no plan: the fastest by the time that kernels take without recomputing, which no mix of the
//! same numbers beats; the one of highest fidelity by what numbers do to a result. Whatever a bound rules out is not planned, and what is
//! planned is planned to the byte.

use std::fmt;

use serde::Serialize;
use tightfit_plan::PlanError;
use tightfit_search::{Fit, Limits, floor};

use super::device::Device;
use super::space::{Cut, Numbers, Space};
use crate::failure::Failure;
use crate::job::{self, JobError};
use crate::settings::{Method, Offload, Recompute, Settings};
use crate::subject::Subject;

/// How much longer than the fastest mix one of higher fidelity may take.
pub const SLOWEST: f64 = 2.0;

/// A plan that takes longer than its bound by less than this is not improved upon: predictions are not that exact.
const TOLERANCE: f64 = 0.02;

/// The time that something must beat to be worth it.
fn quicker(seconds: f64) -> f64 {
    (1.0 - TOLERANCE) * seconds
}

/// A mix with its plan.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// How numbers are stored, and what is trained.
    pub numbers: Numbers,
    /// All settings, what was chosen included.
    pub settings: Settings,
    /// The plan.
    pub fit: Fit,
}

impl Candidate {
    /// Expected of an optimizer step.
    pub fn seconds(&self) -> f64 {
        self.fit.prediction.seconds
    }
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = &self.settings;
        write!(
            f,
            "{} {} {}, micro-batches of {}{}{}{}",
            Method::name(settings.method),
            settings.precision,
            settings.optimizer,
            settings.micro_batch_rows(),
            if settings.update_in_backward {
                ", updates in the backward"
            } else {
                ""
            },
            if self.fit.choice.recomputes() {
                ", recomputing"
            } else {
                ""
            },
            if self.fit.choice.offloads() { ", offloading" } else { "" },
        )
    }
}

/// What a search comes to.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The mix that was chosen; where none fits, the smallest that was found.
    pub candidate: Candidate,
    /// What the fastest mix takes, if any fits.
    pub fastest_seconds: Option<f64>,
    /// Every mix that was planned.
    pub tried: Vec<Tried>,
}

/// A mix as far as a figure shows it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tried {
    /// In words.
    pub mix: String,
    /// What it needs of the device's memory.
    pub needed_bytes: u64,
    /// What it needs beyond that.
    pub host_bytes: u64,
    /// Expected of a step.
    pub seconds: f64,
    /// Whether it fits.
    pub fits: bool,
}

impl Outcome {
    /// What was tried, beside a reserve of so many bytes.
    pub fn tried_beside(&self, reserve_bytes: u64) -> Vec<Tried> {
        let beside = |tried: &Tried| Tried {
            needed_bytes: tried.needed_bytes.saturating_add(reserve_bytes),
            ..tried.clone()
        };
        self.tried.iter().map(beside).collect()
    }
}

/// Finds the mix.
///
/// # Errors
/// Nothing that is open makes a job.
pub fn search(space: &Space, subject: &Subject<'_>, device: &Device, limits: &Limits) -> Result<Outcome, Failure> {
    let mut search = Search::new(space, subject, device, limits);
    let mut groups = search.groups()?;
    let Some(fastest) = search.fastest(&mut groups)? else {
        let candidate = search.smallest(&groups)?;
        return Ok(Outcome {
            candidate,
            fastest_seconds: None,
            tried: search.tried,
        });
    };
    let slowest = SLOWEST * fastest.seconds();
    let fastest_seconds = Some(fastest.seconds());
    let mut candidate = fastest;
    // Groups are in the order of fidelity, and one of them has the fastest mix.
    for group in groups.iter_mut().filter(|group| group.seconds <= slowest) {
        if let Some(best) = search.best(group, slowest)?
            && best.seconds() <= slowest
        {
            candidate = best;
            break;
        }
    }
    Ok(Outcome {
        candidate,
        fastest_seconds,
        tried: search.tried,
    })
}

/// The smallest mix that there is, whatever it takes of the tier below, if there is one.
///
/// # Errors
/// As [`search`].
pub fn smallest(space: &Space, subject: &Subject<'_>, device: &Device, limits: &Limits) -> Result<Candidate, Failure> {
    let mut search = Search::new(space, subject, device, limits);
    let groups = search.groups()?;
    search.smallest(&groups)
}

/// Mixes of the same numbers.
struct Group {
    numbers: Numbers,
    /// None of them takes less.
    seconds: f64,
    /// Whether what stays in memory between programs has room there.
    may_stay: bool,
    /// The one that takes least time, once that has been looked for, if any fits.
    best: Option<Option<Candidate>>,
}

/// What is known of a mix.
enum Verdict {
    /// Its plan, which may take longer than is of use.
    Fits(Box<Candidate>),
    /// By its bound it takes longer than is of use.
    TooSlow,
    /// By its bound, by its plan, or because settings do not go together.
    TooLarge,
}

struct Search<'a> {
    space: &'a Space,
    subject: &'a Subject<'a>,
    device: &'a Device,
    limits: Limits,
    tried: Vec<Tried>,
}

impl<'a> Search<'a> {
    fn new(space: &'a Space, subject: &'a Subject<'a>, device: &'a Device, limits: &Limits) -> Self {
        Self {
            space,
            subject,
            device,
            limits: *limits,
            tried: Vec::new(),
        }
    }

    /// Every way to store numbers that makes a job, in the order of fidelity.
    fn groups(&self) -> Result<Vec<Group>, Failure> {
        let group = |numbers: Numbers| -> Result<Group, Failure> {
            let mut settings = self.space.settings(&numbers, None, Offload::None)?;
            let step = job::step(&mut settings, self.subject)?;
            let floor = |offload: Offload| floor(&step, self.device.target(), &self.limits, offload.into());
            Ok(Group {
                numbers,
                seconds: floor(self.offload()).seconds,
                may_stay: floor(Offload::None).fits,
                best: None,
            })
        };
        let (mut groups, mut refused) = (Vec::new(), None);
        for numbers in self.space.numbers() {
            match group(numbers) {
                Ok(group) => groups.push(group),
                Err(error) => refused = Some(error),
            }
        }
        match refused {
            Some(error) if groups.is_empty() => Err(error),
            _ => Ok(groups),
        }
    }

    /// The mix that takes least time, if any fits.
    fn fastest(&mut self, groups: &mut [Group]) -> Result<Option<Candidate>, Failure> {
        let mut by_bound: Vec<&mut Group> = groups.iter_mut().collect();
        by_bound.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
        let mut fastest: Option<Candidate> = None;
        for group in by_bound {
            if fastest
                .as_ref()
                .is_some_and(|fastest| quicker(fastest.seconds()) < group.seconds)
            {
                break;
            }
            if let Some(best) = self.best(group, f64::INFINITY)?
                && fastest
                    .as_ref()
                    .is_none_or(|fastest| best.seconds() < fastest.seconds())
            {
                fastest = Some(best);
            }
        }
        Ok(fastest)
    }

    /// The mix of a group that takes least time, if any fits that may take no more than `most_seconds`.
    fn best(&mut self, group: &mut Group, most_seconds: f64) -> Result<Option<Candidate>, Failure> {
        if let Some(known) = &group.best {
            return Ok(known.clone());
        }
        let at_most = most_seconds;
        let mut best: Option<Candidate> = None;
        for cuts in self.space.cuts() {
            let mut fits = false;
            // What needs no more than to be cut takes next to no longer than its bound: the largest such comes first.
            let as_is = match group.may_stay {
                true => self.as_is(&group.numbers, &cuts)?,
                false => None,
            };
            let others = cuts.iter().filter(|cut| Some(**cut) != as_is);
            for cut in as_is.iter().chain(others).copied() {
                let known = best.as_ref();
                let most_seconds = known.map_or(at_most, |best| quicker(best.seconds()));
                // No cut takes less than the whole.
                if group.seconds > most_seconds {
                    break;
                }
                match self.plan(&group.numbers, cut, most_seconds)? {
                    Verdict::TooLarge => continue,
                    Verdict::Fits(candidate) if candidate.seconds() <= most_seconds => best = Some(*candidate),
                    Verdict::Fits(_) | Verdict::TooSlow => {}
                }
                fits = true;
            }
            if fits {
                break;
            }
        }
        group.best = Some(best.clone());
        Ok(best)
    }

    /// The first cut that fits with nothing recomputed and nothing moved away, as far as that is open.
    fn as_is(&self, numbers: &Numbers, cuts: &[Cut]) -> Result<Option<Cut>, Failure> {
        for &cut in cuts {
            let Ok(mut settings) = self.space.settings(numbers, Some(cut), Offload::None) else {
                continue;
            };
            if settings.recompute == Recompute::Auto {
                settings.recompute = Recompute::None;
            }
            let step = job::step(&mut settings, self.subject)?;
            let target = self.device.target();
            if floor(&step, target, &self.limits, Offload::None.into()).fits
                && job::fits_as_is(step, &settings, self.subject, target, &self.limits)?
            {
                return Ok(Some(cut));
            }
        }
        Ok(None)
    }

    /// A mix, planned if its bounds do not say already that it does not fit or takes longer than that.
    fn plan(&mut self, numbers: &Numbers, cut: Cut, most_seconds: f64) -> Result<Verdict, Failure> {
        let offload = self.offload();
        let Ok(mut settings) = self.space.settings(numbers, Some(cut), offload) else {
            return Ok(Verdict::TooLarge);
        };
        let step = job::step(&mut settings, self.subject)?;
        let bound = job::bound_step(&step, &settings, self.device.target(), &self.limits);
        if !bound.fits {
            return Ok(Verdict::TooLarge);
        }
        if bound.seconds > most_seconds {
            return Ok(Verdict::TooSlow);
        }
        let target = self.device.target();
        match job::fit_step(step, &settings, self.subject, target, &self.limits, most_seconds) {
            Ok(fit) => {
                let candidate = self.tried(*numbers, settings, fit);
                Ok(match candidate.fit.fits {
                    true => Verdict::Fits(Box::new(candidate)),
                    false => Verdict::TooLarge,
                })
            }
            Err(JobError::Plan(PlanError::TooLarge | PlanError::Place { .. })) => Ok(Verdict::TooLarge),
            Err(error) => Err(error.into()),
        }
    }

    /// What may leave memory.
    fn offload(&self) -> Offload {
        match (self.limits.lower_tier_bytes, self.space.offload()) {
            (0, Offload::Auto) => Offload::None,
            (_, given) => given,
        }
    }

    /// A mix that was planned.
    fn tried(&mut self, numbers: Numbers, settings: Settings, fit: Fit) -> Candidate {
        let candidate = Candidate { numbers, settings, fit };
        self.tried.push(Tried {
            mix: candidate.to_string(),
            needed_bytes: candidate.fit.plan.arena_bytes(),
            host_bytes: candidate.fit.plan.lower_tier_bytes(),
            seconds: candidate.seconds(),
            fits: candidate.fit.fits,
        });
        candidate
    }

    /// Where nothing fits: the smallest of what stores its numbers in the fewest bits, method by method.
    fn smallest(&mut self, groups: &[Group]) -> Result<Candidate, Failure> {
        let mut smallest: Result<Candidate, JobError> = Err(PlanError::TooLarge.into());
        // However much leaves the device's memory.
        let none = Limits {
            arena_bytes: 0,
            lower_tier_bytes: u64::MAX,
        };
        let offload = self.offload();
        // Groups are in the order of fidelity, so the last of a method stores its numbers in the fewest bits.
        let precision = |method: Method| {
            let mut last = groups.iter().rev().map(|group| group.numbers);
            last.find(|last| last.method == method).map(|last| last.precision)
        };
        let numbers = groups.iter().map(|group| &group.numbers);
        for numbers in numbers.filter(|numbers| precision(numbers.method) == Some(numbers.precision)) {
            for cut in self.space.cuts().pop().unwrap_or_default() {
                let Ok(mut settings) = self.space.settings(numbers, Some(cut), offload) else {
                    continue;
                };
                let fit = job::fit_on(&mut settings, self.subject, self.device.target(), &none);
                let candidate = fit.map(|fit| self.tried(*numbers, settings, fit));
                smallest = match (smallest, candidate) {
                    (Ok(a), Ok(b)) if b.fit.plan.arena_bytes() < a.fit.plan.arena_bytes() => Ok(b),
                    (Ok(a), _) => Ok(a),
                    (Err(_), candidate) => candidate,
                };
            }
        }
        Ok(smallest?)
    }
}
