//! What evaluation and generation share: a given model, its plan held against a budget, and a session with its weights.

use clap::Args;
use serde::Serialize;
use tightfit_exec::load;
use tightfit_ir::{Role, Step};

use crate::Session;
use crate::failure::Failure;
use crate::job::{JobError, plan_for_cpu};
use crate::memory::{default_budget, format_bytes, process_peak_bytes};
use crate::pretrained::Pretrained;
use crate::reserve::Before;
use crate::settings::Bytes;

/// The machine that a command may use.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Memory and machine")]
pub struct Machine {
    /// Memory that the whole process may use, such as 3.8GiB [default: what the machine and its cgroup leave, less a margin]
    #[arg(long, allow_negative_numbers = true, value_name = "BYTES")]
    budget: Option<Bytes>,
    /// Threads that compute; results do not depend on it [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: Option<u32>,
}

impl Machine {
    fn budget(&self) -> Result<u64, Failure> {
        match self.budget {
            Some(budget) => Ok(budget.0),
            None => Ok(default_budget()?.bytes),
        }
    }

    fn threads(&self) -> usize {
        let cores = || {
            std::thread::available_parallelism()
                .map_or(1, std::num::NonZero::get)
                .min(1024)
        };
        self.threads.map_or_else(cores, |threads| threads as usize)
    }
}

/// The memory of a command, planned and measured.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryReport {
    /// Highest planned byte of the arena, plus one.
    pub planned_peak_bytes: u64,
    /// Highest byte of the arena that was written, plus one, found by looking at the arena.
    pub measured_arena_peak_bytes: u64,
    /// Bytes mapped for the arena.
    pub arena_bytes: u64,
    /// What the process may use beside the arena.
    pub reserve_bytes: u64,
    /// `VmHWM`.
    pub process_peak_bytes: u64,
    /// What the process may use.
    pub budget_bytes: u64,
}

impl MemoryReport {
    /// Two lines for people.
    pub fn text(&self) -> String {
        format!(
            "arena    planned {} bytes, measured {} bytes\nprocess  peak {}, planned at most {}, budget {}",
            self.planned_peak_bytes,
            self.measured_arena_peak_bytes,
            format_bytes(self.process_peak_bytes),
            format_bytes(self.arena_bytes + self.reserve_bytes),
            format_bytes(self.budget_bytes)
        )
    }
}

/// A session that has a model's weights.
pub struct Inference {
    /// To run.
    pub session: Session,
    memory: MemoryReport,
    before: Before,
}

impl Inference {
    /// Plans `step` and the reading of the weights, holds them against the budget, and reads the weights.
    ///
    /// # Errors
    /// The job does not fit, or the model's files cannot be read.
    pub fn start(model: &Pretrained, mut step: Step, machine: &Machine) -> Result<Self, Failure> {
        let (budget, threads) = (machine.budget()?, machine.threads());
        step.routines.push(load::routine(&model.fills(), std::iter::empty()));
        let plan = plan_for_cpu(step, threads).map_err(JobError::from)?;
        let mut before = Before::default();
        before.end_phase()?;
        let reserve = before.reserve_bytes(plan.arena_bytes(), threads)?;
        plan.fit(budget, reserve)?;
        let mut session = Session::new(plan, threads)?;
        session.initialise_roles(0, &[Role::KvCache])?;
        model.load(&mut session)?;
        let memory = MemoryReport {
            planned_peak_bytes: session.plan().peak(),
            measured_arena_peak_bytes: 0,
            arena_bytes: session.arena().len(),
            reserve_bytes: reserve,
            process_peak_bytes: 0,
            budget_bytes: budget,
        };
        Ok(Self {
            session,
            memory,
            before,
        })
    }

    /// What was used.
    ///
    /// # Errors
    /// This system does not say what a process uses.
    pub fn memory(&self) -> Result<MemoryReport, Failure> {
        Ok(MemoryReport {
            measured_arena_peak_bytes: self.session.arena().measured_peak(),
            process_peak_bytes: process_peak_bytes()?.max(self.before.peak_bytes()),
            ..self.memory.clone()
        })
    }
}
