//! The report as one file that needs nothing else: `report.html` with a plan's figures in it.

use serde_json::{Value, json};
use tightfit_ir::Tier;
use tightfit_pass::TRAIN;
use tightfit_plan::Plan;

use super::levers::FOLKLORE;
use super::report::PlanReport;
use super::why::op_at;
use crate::Role;

/// The page, with a place for its figures.
const PAGE: &str = include_str!("report.html");
const PLACE: &str = "/*DATA*/";

/// The page of a report, whose mix has that plan.
pub fn page(report: &PlanReport, plan: &Plan) -> String {
    // `<` could end the element that the figures are in.
    let figures = figures(report, plan).to_string().replace('<', "\\u003c");
    PAGE.replace(PLACE, &figures)
}

fn figures(report: &PlanReport, plan: &Plan) -> Value {
    let roles: Vec<String> = Role::ALL.iter().map(ToString::to_string).collect();
    let number = |role: Role| Role::ALL.iter().position(|&other| other == role);
    let persistent = plan.liveness().persistent.iter().zip(plan.persistent_offsets());
    let persistent: Vec<Value> = persistent
        .filter(|(tensor, _)| tensor.ty.tier == Tier::Memory)
        .map(|(tensor, offset)| json!([tensor.name, number(tensor.role), offset, tensor.ty.bytes()]))
        .collect();
    let train = plan
        .step()
        .routines
        .iter()
        .position(|routine| routine.name == TRAIN)
        .unwrap_or(0);
    let liveness = &plan.liveness().routines[train];
    let buffers = liveness.buffers.iter().zip(&plan.routines()[train].offsets);
    let buffers: Vec<Value> = buffers
        .filter(|(buffer, _)| buffer.tier == Tier::Memory)
        .map(|(buffer, offset)| {
            let role = number(buffer.role);
            json!([
                buffer.label.to_string(),
                role,
                offset,
                buffer.bytes,
                buffer.start,
                buffer.end
            ])
        })
        .collect();
    let programs = plan.step().routines[train].programs.iter().zip(&liveness.programs);
    let programs: Vec<Value> = programs
        .map(|(program, live)| match program.repeat {
            1 => json!([program.name, live.start]),
            repeat => json!([format!("{} × {repeat}", program.name), live.start]),
        })
        .collect();
    let moments: Vec<String> = (0..liveness.steps).map(|time| op_at(plan, train, time)).collect();
    json!({
        "verdict": report.verdict(),
        "job": report.job(),
        "mix": report.mix_lines().join("\n"),
        "roles": roles,
        "moments": moments,
        "programs": programs,
        "persistent": persistent,
        "buffers": buffers,
        "arena_bytes": report.arena_bytes,
        "arena_limit": report.budget_bytes.saturating_sub(report.reserve_bytes),
        "levers": report.levers,
        "folklore": FOLKLORE,
        "tried": report.tried,
        "curves": report.curves,
    })
}
