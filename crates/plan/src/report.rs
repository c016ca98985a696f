//! A plan in words and numbers: bytes by role, the peak and what makes it, whether it fits.

use std::fmt;

use serde::Serialize;
use tightfit_ir::{Role, Tier, op::Rule};

use crate::liveness::RoutineLiveness;
use crate::plan::Plan;

/// The moment at which one routine keeps most bytes alive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Peak {
    /// The routine.
    pub routine: String,
    /// The program.
    pub program: String,
    /// The node running then, as `scope/operation`; empty while results are read.
    pub op: String,
    /// Bytes alive by role, persistent ones included; roles without any left out.
    pub by_role: Vec<(Role, u64)>,
    /// The largest buffers alive then, largest first, as label, role and bytes.
    pub largest: Vec<(String, Role, u64)>,
}

/// One routine's need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RoutineSummary {
    /// The routine.
    pub name: String,
    /// Programs in order, with how often each runs.
    pub programs: Vec<(String, u32)>,
    /// Highest planned byte while it runs, plus one.
    pub peak_bytes: u64,
}

/// What `plan` prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Summary {
    /// Highest planned byte of the arena, plus one.
    pub planned_peak_bytes: u64,
    /// No placement of the same buffers has a lower peak.
    pub lower_bound_bytes: u64,
    /// The region of weights and state.
    pub persistent_bytes: u64,
    /// Bytes reserved on the lower tier.
    pub lower_tier_bytes: u64,
    /// Bytes there by role, roles without any left out.
    pub lower_tier_by_role: Vec<(Role, u64)>,
    /// Each routine.
    pub routines: Vec<RoutineSummary>,
    /// The highest of the routines' peaks.
    pub peak: Peak,
    /// Flops of one run of the routine at the peak, repeats included.
    pub flops: u64,
}

/// Sums bytes up by role; roles without any are left out.
fn by_role(sizes: impl Iterator<Item = (Role, u64)> + Clone) -> Vec<(Role, u64)> {
    let of = |role| {
        sizes
            .clone()
            .filter(move |size| size.0 == role)
            .map(|size| size.1)
            .sum()
    };
    let roles = Role::ALL.iter().map(|&role| (role, of(role)));
    roles.filter(|&(_, bytes)| bytes > 0).collect()
}

/// Buffers that [`Peak::largest`] lists.
const LARGEST: usize = 8;

impl Summary {
    /// The peak above the lower bound, as a fraction of it.
    pub fn gap(&self) -> f64 {
        (self.planned_peak_bytes - self.lower_bound_bytes) as f64 / self.lower_bound_bytes.max(1) as f64
    }
}

impl Plan {
    /// Sums the plan up.
    pub fn summary(&self) -> Summary {
        let routines = self
            .step()
            .routines
            .iter()
            .zip(self.routines())
            .map(|(routine, placed)| RoutineSummary {
                name: routine.name.clone(),
                programs: routine.programs.iter().map(|p| (p.name.clone(), p.repeat)).collect(),
                peak_bytes: placed.peak.max(self.persistent_bytes(Tier::Memory)),
            })
            .collect();
        let highest = (0..self.routines().len())
            .rev()
            .max_by_key(|&index| self.routines()[index].peak)
            .unwrap_or(0);
        Summary {
            planned_peak_bytes: self.peak(),
            lower_bound_bytes: self.lower_bound(),
            persistent_bytes: self.persistent_bytes(Tier::Memory),
            lower_tier_bytes: self.lower_tier_bytes(),
            lower_tier_by_role: self.lower_tier_by_role(),
            routines,
            peak: self.peak_of(highest),
            flops: self.flops(highest),
        }
    }

    /// The moment at which a routine keeps most bytes alive.
    fn peak_of(&self, index: usize) -> Peak {
        let routine = &self.step().routines[index];
        let liveness = &self.liveness().routines[index];
        let live = liveness.live_bytes(Tier::Memory);
        let time = (0..live.len()).rev().max_by_key(|&t| live[t]).unwrap_or(0) as u32;
        let program = liveness.programs.iter().rposition(|p| p.start <= time).unwrap_or(0);
        let graph = &routine.programs[program].graph;
        let within = (time - liveness.programs[program].start) as usize;
        let op = self.order(index, program).get(within).map_or(String::new(), |&id| {
            let node = graph.node(id);
            format!("{}/{}", node.scope, node.op.name())
        });

        let alive = liveness
            .buffers
            .iter()
            .filter(|buffer| buffer.tier == Tier::Memory && buffer.start <= time && time <= buffer.end)
            .map(|buffer| (buffer.label.to_string(), buffer.role, buffer.bytes));
        let persistent = self
            .liveness()
            .persistent
            .iter()
            .filter(|tensor| tensor.ty.tier == Tier::Memory)
            .map(|tensor| (tensor.name.clone(), tensor.role, tensor.ty.bytes()));
        let mut all: Vec<(String, Role, u64)> = persistent.chain(alive).collect();
        let by_role = by_role(all.iter().map(|&(_, role, bytes)| (role, bytes)));
        all.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.0.cmp(&b.0)));
        all.truncate(LARGEST);
        Peak {
            routine: routine.name.clone(),
            program: routine.programs[program].name.clone(),
            op,
            by_role,
            largest: all,
        }
    }

    /// What is on the lower tier: persistent tensors, and the most of each role's transient buffers at one time.
    fn lower_tier_by_role(&self) -> Vec<(Role, u64)> {
        let persistent = self.liveness().persistent.iter();
        let persistent = persistent
            .filter(|tensor| tensor.ty.tier == Tier::Lower)
            .map(|tensor| (tensor.role, tensor.ty.bytes()));
        let transient = Role::ALL.iter().map(|&role| {
            let peaks = self.liveness().routines.iter().map(|routine| {
                let of_role = |buffer: &&crate::Buffer| buffer.tier == Tier::Lower && buffer.role == role;
                let mut alone = RoutineLiveness {
                    buffers: routine.buffers.iter().filter(of_role).cloned().collect(),
                    ..RoutineLiveness::default()
                };
                alone.steps = routine.steps;
                alone.live_bytes(Tier::Lower).into_iter().max().unwrap_or(0)
            });
            (role, peaks.max().unwrap_or(0))
        });
        by_role(persistent.chain(transient))
    }

    fn flops(&self, index: usize) -> u64 {
        let flops_of = |program: &tightfit_ir::Program| {
            let graph = &program.graph;
            let nodes = graph.nodes.iter().fold(0_u64, |sum, node| {
                let cost = node.op.cost(&graph.operand_types(node), &graph.result_types(node));
                sum.saturating_add(cost.flops)
            });
            nodes.saturating_mul(u64::from(program.repeat))
        };
        self.step().routines[index]
            .programs
            .iter()
            .map(flops_of)
            .fold(0, u64::saturating_add)
    }

    /// Checks the plan against what the process may use.
    ///
    /// # Errors
    /// It needs more than `budget_bytes`, of which `reserve_bytes` go to what the arena does not hold.
    pub fn fit(&self, budget_bytes: u64, reserve_bytes: u64) -> Result<(), Box<Infeasible>> {
        let needed_bytes = self.arena_bytes().saturating_add(reserve_bytes);
        if needed_bytes <= budget_bytes {
            return Ok(());
        }
        Err(Box::new(Infeasible {
            budget_bytes,
            reserve_bytes,
            needed_bytes,
            summary: self.summary(),
        }))
    }
}

/// The answer for a job that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Infeasible {
    /// What the process may use.
    pub budget_bytes: u64,
    /// What it uses beside the arena.
    pub reserve_bytes: u64,
    /// The smallest budget that would do.
    pub needed_bytes: u64,
    /// The plan that does not fit.
    pub summary: Summary,
}

impl fmt::Display for Infeasible {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peak = &self.summary.peak;
        writeln!(
            f,
            "does not fit: needs {}, the budget is {}",
            format_bytes(self.needed_bytes),
            format_bytes(self.budget_bytes)
        )?;
        writeln!(f, "  arena    {}", format_bytes(self.summary.planned_peak_bytes))?;
        writeln!(f, "  reserve  {}", format_bytes(self.reserve_bytes))?;
        writeln!(f, "  peak     {} in {}/{}", peak.op, peak.routine, peak.program)?;
        writeln!(f, "largest buffers then:")?;
        for (label, role, size) in &peak.largest {
            writeln!(f, "  {:>10}  {role:<15}  {label}", format_bytes(*size))?;
        }
        write!(
            f,
            "smallest budget that would do for this job as it is: {} ({})",
            self.needed_bytes,
            format_bytes(self.needed_bytes)
        )
    }
}

impl std::error::Error for Infeasible {}

/// A size with two decimals in the largest binary unit that keeps it at 1 or more: `3.46 GiB`, `512 B`.
pub fn format_bytes(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut units = ["KiB", "MiB", "GiB", "TiB"].into_iter();
    let mut unit = "KiB";
    for next in units.by_ref().skip(1) {
        // 1023.995 and more would print as 1024.00.
        if value < 1023.995 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    format!("{value:.2} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_print() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            ((1 << 20) - 1, "1.00 MiB"),
            (3_715_146_875, "3.46 GiB"),
            (24_000_000_000, "22.35 GiB"),
            (5 << 50, "5120.00 TiB"),
        ] {
            assert_eq!(format_bytes(bytes), text);
        }
    }
}
