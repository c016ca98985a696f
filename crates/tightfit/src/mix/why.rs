//! Why bytes are there: the buffers of a role or of a name, when they live and where they lie.

use serde::Serialize;
use tightfit_ir::Tier;
use tightfit_plan::Plan;

use crate::Role;
use crate::memory::format_bytes;

/// Buffers that the text lists; JSON has all.
const LISTED: usize = 24;

/// A buffer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Buffer {
    /// Its name: what makes it, or the tensor's.
    pub name: String,
    /// What its bytes are for.
    pub role: Role,
    /// Its size.
    pub bytes: u64,
    /// Where it lies in the arena; `null` on the lower tier.
    pub offset: Option<u64>,
    /// The routine; `null` for what stays between steps.
    pub routine: Option<String>,
    /// What makes it.
    pub from: Option<String>,
    /// What reads it last.
    pub until: Option<String>,
}

/// The buffers of a plan whose role is called that, or whose name has it in it, largest first.
pub fn why(plan: &Plan, what: &str) -> Vec<Buffer> {
    let role = Role::ALL.iter().find(|role| role.to_string() == what);
    let is_meant = |name: &str, other: Role| match role {
        Some(&role) => role == other,
        None => name.contains(what),
    };
    let in_memory = |tier: Tier, offset: u64| (tier == Tier::Memory).then_some(offset);
    let persistent = plan.liveness().persistent.iter().zip(plan.persistent_offsets());
    let persistent = persistent
        .filter(|(tensor, _)| is_meant(&tensor.name, tensor.role))
        .map(|(tensor, &offset)| Buffer {
            name: tensor.name.clone(),
            role: tensor.role,
            bytes: tensor.ty.bytes(),
            offset: in_memory(tensor.ty.tier, offset),
            routine: None,
            from: None,
            until: None,
        });
    let routines = plan.liveness().routines.iter().zip(plan.routines()).enumerate();
    let transient = routines.flat_map(|(index, (liveness, placed))| {
        let buffers = liveness.buffers.iter().zip(&placed.offsets);
        let meant = buffers.filter(|(buffer, _)| is_meant(&buffer.label.to_string(), buffer.role));
        meant.map(move |(buffer, &offset)| Buffer {
            name: buffer.label.to_string(),
            role: buffer.role,
            bytes: buffer.bytes,
            offset: in_memory(buffer.tier, offset),
            routine: Some(plan.step().routines[index].name.clone()),
            from: Some(op_at(plan, index, buffer.start)),
            until: Some(op_at(plan, index, buffer.end)),
        })
    });
    let mut all: Vec<Buffer> = persistent.chain(transient).collect();
    all.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(&b.name)));
    all
}

/// What runs in a routine at a time, as `program: scope/operation`.
pub fn op_at(plan: &Plan, routine: usize, time: u32) -> String {
    let liveness = &plan.liveness().routines[routine];
    let program = liveness
        .programs
        .iter()
        .rposition(|program| program.start <= time)
        .unwrap_or(0);
    let made = &plan.step().routines[routine].programs[program];
    let within = (time - liveness.programs[program].start) as usize;
    match plan.order(routine, program).get(within) {
        Some(&id) => {
            let node = made.graph.node(id);
            format!("{}: {}/{}", made.name, node.scope, node.op.name())
        }
        None => format!("{}: its end", made.name),
    }
}

/// For people.
pub fn lines(what: &str, buffers: &[Buffer]) -> Vec<String> {
    if buffers.is_empty() {
        let roles: Vec<String> = Role::ALL.iter().map(ToString::to_string).collect();
        return vec![format!(
            "why      no buffer has `{what}` in its name; roles are {}",
            roles.join(", ")
        )];
    }
    let total: u64 = buffers.iter().map(|buffer| buffer.bytes).sum();
    let mut lines = vec![format!(
        "why      {what}: {} buffers of {} in all, not all at one time",
        buffers.len(),
        format_bytes(total)
    )];
    for buffer in buffers.iter().take(LISTED) {
        let life = match (&buffer.routine, &buffer.from, &buffer.until) {
            (Some(routine), Some(from), Some(until)) => format!("{routine}, from {from} to {until}"),
            _ => "stays between steps".to_owned(),
        };
        let place = match buffer.offset {
            Some(offset) => format!("at {offset}"),
            None => "not in the arena".to_owned(),
        };
        lines.push(format!(
            "  {:>11}  {:<15} {}, {place}: {life}",
            format_bytes(buffer.bytes),
            buffer.role.to_string(),
            buffer.name
        ));
    }
    if buffers.len() > LISTED {
        lines.push(format!("              and {} more: see --json", buffers.len() - LISTED));
    }
    lines
}
