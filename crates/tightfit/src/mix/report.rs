//! The answer, as text for people and JSON for programs.

use serde::Serialize;
use serde_json::Value;
use tightfit_plan::{Plan, Summary};
use tightfit_search::Explanation;

use super::device::{Device, Reserve};
use super::flags::flags;
use super::levers::Levers;
use super::nearest::Change;
use super::search::{Outcome, Tried};
use super::vary::Curve;
use super::why::{self, Buffer};
use crate::Role;
use crate::subject::Subject;

/// Raised whenever a field changes its meaning or goes away.
pub const SCHEMA_VERSION: u32 = 1;

/// The object that `--json` prints.
#[derive(Clone, Debug, Serialize)]
pub struct PlanReport {
    /// See [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// Whether the mix is within the budget.
    pub fits: bool,
    /// The device, and the runtime that the plan is for.
    pub device: String,
    /// That.
    pub runtime: &'static str,
    /// What the process may use of the device's memory.
    pub budget_bytes: u64,
    /// What it uses beside its arena.
    pub reserve_bytes: u64,
    /// Item by item.
    pub reserve: Vec<(&'static str, u64)>,
    /// Highest planned byte of the arena, plus one.
    pub peak_bytes: u64,
    /// The arena.
    pub arena_bytes: u64,
    /// No placement of the same buffers has a lower peak.
    pub lower_bound_bytes: u64,
    /// The smallest budget that would do: for this mix, where it fits, or else the smallest that was found.
    pub minimum_budget_bytes: u64,
    /// Bytes at the peak, by role.
    pub by_role: Vec<(Role, u64)>,
    /// Highest byte of each routine, plus one.
    pub by_phase: Vec<(String, u64)>,
    /// Every setting.
    pub mix: Value,
    /// What the mix does to a result: `exact`, `mixed` or `lossy`.
    pub fidelity: &'static str,
    /// Where nothing fits, changes with which the job does.
    pub nearest: Vec<Change>,
    /// What `--vary` asked for.
    pub curves: Vec<Curve>,
    /// What `--why` asked for.
    pub why: Option<Vec<Buffer>>,
    /// Each technique on this job.
    pub levers: Levers,
    /// Bytes beyond the device's memory.
    pub host_bytes: u64,
    /// Expected of an optimizer step.
    pub seconds_per_step: f64,
    /// From that.
    pub tokens_per_second: f64,
    /// What the fastest mix takes that fits, if any does.
    pub fastest_seconds_per_step: Option<f64>,
    /// Mixes that were planned to find this one.
    pub tried: Vec<Tried>,
    /// What finding it took.
    pub search_seconds: f64,
    /// What all of the answer took: the levers too, beside the search.
    pub planning_seconds: f64,
    /// Operations of the plan.
    pub nodes: usize,
    /// Parameters of the model.
    pub parameters: u64,
    /// The plan in detail.
    pub plan: Summary,
    /// The model, as `config.json` has it.
    pub model: Value,
    #[serde(skip)]
    pub(super) words: Words,
}

/// What the text says beside figures.
#[derive(Clone, Debug)]
pub(super) struct Words {
    pub lower_tier: &'static str,
    pub lower_tier_bytes: u64,
    pub is_card: bool,
    pub batch: u64,
    pub seq: u64,
    pub seconds_are_measured: bool,
    pub explanation: Explanation,
    pub flags: [String; 2],
    pub why: Option<String>,
}

impl PlanReport {
    /// Of what a search came to, within a budget and what there is of the lower tier.
    pub fn new(
        outcome: &Outcome,
        subject: &Subject<'_>,
        device: &Device,
        reserve: Reserve,
        (budget_bytes, lower_tier_bytes): (u64, u64),
        levers: Levers,
        (search_seconds, planning_seconds): (f64, f64),
    ) -> Self {
        let candidate = &outcome.candidate;
        let (fit, settings) = (&candidate.fit, &candidate.settings);
        let plan = fit.plan.summary();
        let reserve_bytes = reserve.bytes();
        let needed = fit.plan.arena_bytes().saturating_add(reserve_bytes);
        let tokens = settings.batch.saturating_mul(settings.seq) as f64;
        Self {
            schema_version: SCHEMA_VERSION,
            fits: outcome.fastest_seconds.is_some() && needed <= budget_bytes,
            device: device.name().to_owned(),
            runtime: "tightfit",
            budget_bytes,
            reserve_bytes,
            reserve: reserve.items,
            peak_bytes: plan.planned_peak_bytes,
            arena_bytes: fit.plan.arena_bytes(),
            lower_bound_bytes: plan.lower_bound_bytes,
            minimum_budget_bytes: needed,
            by_role: plan.peak.by_role.clone(),
            by_phase: plan
                .routines
                .iter()
                .map(|routine| (routine.name.clone(), routine.peak_bytes))
                .collect(),
            mix: settings.to_json(),
            fidelity: candidate.numbers.fidelity().name(),
            nearest: Vec::new(),
            curves: Vec::new(),
            why: None,
            levers,
            host_bytes: plan.lower_tier_bytes,
            seconds_per_step: candidate.seconds(),
            tokens_per_second: tokens / candidate.seconds(),
            fastest_seconds_per_step: outcome.fastest_seconds,
            tried: outcome.tried_beside(reserve_bytes),
            search_seconds,
            planning_seconds,
            nodes: fit
                .plan
                .step()
                .programs()
                .map(|(_, program)| program.graph.nodes.len())
                .sum(),
            parameters: subject.config.parameters(),
            plan,
            model: subject.config.to_hf(),
            words: Words {
                lower_tier: device.lower_tier(),
                lower_tier_bytes,
                is_card: matches!(device, Device::Card(_)),
                batch: settings.batch,
                seq: settings.seq,
                seconds_are_measured: matches!(device, Device::Cpu { calibration, .. } if calibration.measured),
                explanation: fit.explanation.clone(),
                flags: flags(settings),
                why: None,
            },
        }
    }

    /// With the buffers that `what` is the role or the name of.
    pub fn with_why(mut self, what: &str, plan: &Plan) -> Self {
        self.why = Some(why::why(plan, what));
        self.words.why = Some(what.to_owned());
        self
    }
}
