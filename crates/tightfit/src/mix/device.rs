//! Where a job would run: a card, which need not be here, or this machine's CPU.

use serde::Serialize;
use tightfit_cpu::{CpuTarget, Profile};
use tightfit_exec::checkpoint;
use tightfit_gpu::{Card, GpuTarget};
use tightfit_ir::Target;
use tightfit_search::Limits;

use super::search::Candidate;
use crate::calibration::{self, Calibration};
use crate::failure::Failure;
use crate::heap::bytes_of;
use crate::memory::{available_bytes, default_budget};
use crate::reserve::{Before, grown_bytes};

/// A device that a plan is made for.
#[derive(Clone, Debug)]
pub enum Device {
    /// This machine's.
    Cpu {
        /// Its numbers.
        target: Box<CpuTarget>,
        /// Where its speeds are from.
        calibration: Box<Calibration>,
    },
    /// A card of the table.
    Card(GpuTarget),
}

/// What a process takes beside its arena, item by item.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Reserve {
    /// Each item with its bytes.
    pub items: Vec<(&'static str, u64)>,
}

impl Reserve {
    /// All of it.
    pub fn bytes(&self) -> u64 {
        self.items.iter().map(|(_, bytes)| bytes).sum()
    }
}

impl Device {
    /// The CPU with that many threads.
    pub fn cpu(threads: usize) -> Self {
        let mut target = CpuTarget::new(threads);
        let calibration = calibration::for_machine(target.isa, threads);
        target.profile = calibration.profile;
        Self::Cpu {
            target: Box::new(target),
            calibration: Box::new(calibration),
        }
    }

    /// The device of that name: `cpu`, or a card's.
    ///
    /// # Errors
    /// No card is called that.
    pub fn named(name: &str, threads: usize) -> Result<Self, Failure> {
        if name.eq_ignore_ascii_case("cpu") {
            return Ok(Self::cpu(threads));
        }
        let card = Card::named(name).ok_or_else(|| Failure::NoSuchDevice { name: name.to_owned() })?;
        Ok(Self::Card(GpuTarget::new(card)))
    }

    /// What plans are made with.
    pub fn target(&self) -> &dyn Target {
        match self {
            Self::Cpu { target, .. } => &**target,
            Self::Card(target) => target,
        }
    }

    /// Whether it computes with `bf16` at a speed that is worth it.
    pub fn has_bf16(&self) -> bool {
        match self {
            Self::Cpu { .. } => true,
            Self::Card(target) => target.card().bf16,
        }
    }

    /// The speeds of a CPU.
    pub fn profile(&self) -> Option<Profile> {
        match self {
            Self::Cpu { target, .. } => Some(target.profile),
            Self::Card(_) => None,
        }
    }

    /// As people call it.
    pub fn name(&self) -> &str {
        match self {
            Self::Cpu { .. } => "cpu",
            Self::Card(target) => &target.card().name,
        }
    }

    /// The memory there is: the card's, or what this machine has free.
    ///
    /// # Errors
    /// This system does not say what memory there is.
    pub fn memory_bytes(&self) -> Result<u64, Failure> {
        Ok(match self {
            Self::Cpu { .. } => default_budget()?.bytes,
            Self::Card(target) => target.card().memory_bytes(),
        })
    }

    /// What a run needs beside its arena and its plan, which are not in memory yet. `tokenises` says whether it makes files into rows.
    ///
    /// # Errors
    /// This system does not say what a process uses.
    pub fn reserve(&self, tokenises: bool) -> Result<Reserve, Failure> {
        let items = match self {
            Self::Cpu { target, .. } => {
                let bytes = Before::default().planned_bytes(u64::MAX, target.threads, tokenises)?;
                vec![("program, stacks, tables", bytes)]
            }
            Self::Card(target) => {
                let reserve = target.reserve();
                let items = [
                    ("context, kernels", reserve.context_bytes),
                    ("display", reserve.display_bytes),
                ];
                items.into_iter().filter(|(_, bytes)| *bytes > 0).collect()
            }
        };
        Ok(Reserve { items })
    }

    /// That reserve with what the plan of a run takes, where the process is on the device.
    pub fn reserve_beside(&self, reserve: &Reserve, candidate: &Candidate) -> Reserve {
        let mut items = reserve.items.clone();
        if matches!(self, Self::Cpu { .. }) {
            items.push(("the plan", grown_bytes(bytes_of(candidate))));
        }
        Reserve { items }
    }

    /// What leaves the device's memory goes to.
    pub fn lower_tier(&self) -> &'static str {
        match self {
            Self::Cpu { .. } => "a file",
            Self::Card(_) => "host memory",
        }
    }

    /// Bytes that there are for it, where the user says nothing: what the disk or this machine's memory has free.
    pub fn lower_tier_bytes(&self) -> u64 {
        match self {
            Self::Cpu { .. } => checkpoint::free_bytes(std::path::Path::new(".")).unwrap_or(u64::MAX),
            Self::Card(_) => available_bytes().unwrap_or(u64::MAX),
        }
    }

    /// What a plan may use of a budget.
    pub fn limits(&self, budget: u64, reserve: &Reserve, lower_tier_bytes: u64) -> Limits {
        Limits {
            arena_bytes: budget.saturating_sub(reserve.bytes()),
            lower_tier_bytes,
        }
    }
}
