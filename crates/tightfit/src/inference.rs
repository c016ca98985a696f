//! What evaluation and generation share: a given model, its plan held against a budget, and a session with its weights.

use clap::Args;
use serde::Serialize;
use tightfit_exec::load;
use tightfit_ir::{DType, Forward, Role, Step};
use tightfit_pass::{PassError, Storage, autocast, no_grad, quantize};

use crate::Session;
use crate::failure::Failure;
use crate::job::{JobError, plan_for_cpu};
use crate::memory::{default_budget, format_bytes, process_peak_bytes};
use crate::pretrained::Pretrained;
use crate::reserve::Before;
use crate::settings::{Base, Bytes};

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

/// How a command stores the numbers of a model.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Numbers")]
pub struct Numbers {
    /// What weights are kept in: f32; as-is, as in the file, which changes no result; bf16 or f16; or quantised as they are read
    #[arg(long, value_name = "f32|as-is|bf16|f16|int8|int4|nf4", value_parser = base, default_value = "f32")]
    base: Base,
    /// Quantise the embedding and the head like the other weights
    #[arg(long)]
    base_embeddings: bool,
    /// What activations and caches are stored as
    #[arg(long, value_name = "f32|bf16|f16", value_parser = activations, default_value = "f32")]
    precision: DType,
}

fn base(text: &str) -> Result<Base, String> {
    match text.parse() {
        Ok(base) if base != Base::Auto => Ok(base),
        _ => Err("expected f32, as-is, bf16, f16, int8, int4 or nf4".to_owned()),
    }
}

fn activations(text: &str) -> Result<DType, String> {
    let dtype = DType::from_name(text).filter(|dtype| dtype.is_float());
    dtype.ok_or_else(|| "expected f32, bf16 or f16".to_owned())
}

impl Numbers {
    /// A model that is not trained, whose numbers are stored so.
    ///
    /// # Errors
    /// An operation cannot work on them.
    pub fn apply(&self, forward: Forward, model: &Pretrained) -> Result<Forward, PassError> {
        if self.base_embeddings && !matches!(self.base, Base::Quantised(_)) {
            let message = format!(
                "--base-embeddings is of quantised weights, and --base {} quantises none: say --base int8, int4 or nf4",
                self.base
            );
            return Err(PassError::Illegal {
                pass: "quantize",
                message,
            });
        }
        let file = |weight: &str| model.stored(weight);
        let storage = Storage {
            tables: self.base_embeddings,
            ..self.base.storage(&file)
        };
        autocast(quantize(no_grad(model.adapt(forward)?)?, &storage)?, self.precision)
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
        let load = load::routine(&model.fills(), step.persistent());
        step.routines.push(load);
        let plan = plan_for_cpu(step, threads).map_err(JobError::from)?;
        let mut before = Before::default();
        before.end_phase()?;
        let reserve = before.planned_bytes(plan.arena_bytes(), threads, false)?;
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
