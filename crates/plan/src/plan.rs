//! The plan: every buffer's offset in one arena.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tightfit_ir::{NodeId, Step, Target};

use crate::error::PlanError;
use crate::liveness::{self, InPlace, Liveness, Storage};
use crate::place::{Effort, PlaceError, Span, lower_bound, place};
use crate::schedule::Schedule;
use crate::validate::validate;

/// Memory is mapped in pages of this size, on all but a few machines.
const PAGE_BYTES: u64 = 4096;

/// How buffers share the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Buffers whose lifetimes do not meet may share bytes. What every job uses.
    Shared,
    /// Every buffer has bytes of its own and nothing is done in place by choice: the yardstick that shared runs must equal bit for
    /// bit.
    Separate,
}

/// A schedule with every buffer at a fixed offset.
#[derive(Clone, Debug)]
pub struct Plan {
    schedule: Schedule,
    layout: Layout,
    target: String,
    alignment: u64,
    liveness: Liveness,
    persistent_offsets: Vec<u64>,
    persistent_end: u64,
    routines: Vec<RoutinePlan>,
}

/// Where one routine's buffers lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutinePlan {
    /// By buffer: its offset in the arena.
    pub offsets: Vec<u64>,
    /// Highest planned byte of the arena while the routine runs, plus one.
    pub peak: u64,
    /// No placement of this routine's buffers above the persistent region has a lower peak.
    pub lower_bound: u64,
}

/// Places every buffer of a schedule: persistent ones first, then each routine's in the rest.
///
/// # Errors
/// Sizes that cannot be addressed.
pub fn plan(schedule: Schedule, target: &dyn Target, layout: Layout, effort: Effort) -> Result<Plan, PlanError> {
    let mut plan = Plan::unplaced(schedule, target, layout)?;
    for index in 0..plan.liveness.routines.len() {
        let spans = plan.spans(index);
        let (offsets, peak, bound) = match layout {
            Layout::Shared => {
                let placement =
                    place(&spans, plan.alignment, effort).map_err(|source| plan.unplaceable(index, source))?;
                (placement.offsets, placement.peak, placement.lower_bound)
            }
            Layout::Separate => {
                let mut end = 0;
                let offsets = spans
                    .iter()
                    .map(|span| append(&mut end, span.size, plan.alignment))
                    .collect::<Result<Vec<_>, PlanError>>()?;
                (offsets, end, end)
            }
        };
        let base = plan.transient_base();
        let shift = |bytes: u64| base.checked_add(bytes).ok_or(PlanError::TooLarge);
        plan.routines.push(RoutinePlan {
            offsets: offsets.into_iter().map(shift).collect::<Result<_, _>>()?,
            peak: shift(peak)?,
            lower_bound: shift(bound)?,
        });
    }
    plan.validate()?;
    Ok(plan)
}

/// The offset of a buffer appended at `end`, which moves past it.
fn append(end: &mut u64, bytes: u64, alignment: u64) -> Result<u64, PlanError> {
    let offset = end.checked_next_multiple_of(alignment).ok_or(PlanError::TooLarge)?;
    *end = offset.checked_add(bytes).ok_or(PlanError::TooLarge)?;
    Ok(offset)
}

impl Plan {
    /// Lifetimes and the persistent region, without any routine's offsets.
    fn unplaced(schedule: Schedule, target: &dyn Target, layout: Layout) -> Result<Self, PlanError> {
        let in_place = match layout {
            Layout::Shared => InPlace::WherePossible,
            Layout::Separate => InPlace::Never,
        };
        let liveness = liveness::analyse(&schedule, target, in_place);
        let mut persistent_end = 0;
        let persistent_offsets = liveness
            .persistent
            .iter()
            .map(|tensor| append(&mut persistent_end, tensor.ty.bytes(), target.alignment()))
            .collect::<Result<Vec<_>, _>>()?;
        persistent_end
            .checked_next_multiple_of(target.alignment())
            .ok_or(PlanError::TooLarge)?;
        Ok(Self {
            schedule,
            layout,
            target: target.name().to_owned(),
            alignment: target.alignment(),
            liveness,
            persistent_offsets,
            persistent_end,
            routines: Vec::new(),
        })
    }

    /// A schedule with offsets made elsewhere, e.g. read from a file.
    ///
    /// # Errors
    /// Offsets that do not fit the schedule's buffers or overlap.
    pub fn with_offsets(
        schedule: Schedule,
        target: &dyn Target,
        layout: Layout,
        offsets: Vec<Vec<u64>>,
    ) -> Result<Self, PlanError> {
        let mut plan = Self::unplaced(schedule, target, layout)?;
        if offsets.len() != plan.liveness.routines.len() {
            return Err(PlanError::Routines {
                found: offsets.len(),
                expected: plan.liveness.routines.len(),
            });
        }
        for (index, offsets) in offsets.into_iter().enumerate() {
            let spans = plan.spans(index);
            let bound = lower_bound(&spans, plan.alignment).map_err(|source| plan.unplaceable(index, source))?;
            let ends = spans
                .iter()
                .zip(&offsets)
                .map(|(span, offset)| offset.saturating_add(span.size));
            // As placed: a routine without buffers ends where they would begin.
            let peak = ends.max().unwrap_or(plan.transient_base());
            plan.routines.push(RoutinePlan {
                offsets,
                peak,
                lower_bound: plan.transient_base().saturating_add(bound),
            });
        }
        plan.validate()?;
        Ok(plan)
    }

    /// Re-checks every offset against the lifetimes, by code that placement does not use.
    ///
    /// # Errors
    /// The first overlap, misalignment or buffer outside of the arena.
    pub fn validate(&self) -> Result<(), PlanError> {
        for (index, routine) in self.schedule.step().routines.iter().enumerate() {
            let invalid = |source| PlanError::Invalid {
                routine: routine.name.clone(),
                source,
            };
            let forever = Span {
                size: self.persistent_end,
                start: 0,
                end: u32::MAX,
            };
            let mut spans = self.spans(index);
            let mut offsets = self.routines.get(index).map_or_else(Vec::new, |r| r.offsets.clone());
            spans.push(forever);
            offsets.push(0);
            validate(&spans, &offsets, self.alignment, self.peak()).map_err(invalid)?;
        }
        Ok(())
    }

    fn unplaceable(&self, routine: usize, source: PlaceError) -> PlanError {
        PlanError::Place {
            routine: self.step().routines[routine].name.clone(),
            source,
        }
    }

    fn spans(&self, routine: usize) -> Vec<Span> {
        self.liveness.routines[routine]
            .buffers
            .iter()
            .map(|buffer| Span {
                size: buffer.bytes,
                start: buffer.start,
                end: buffer.end,
            })
            .collect()
    }

    /// Where transient memory begins. [`Self::unplaced`] has checked that it can be addressed.
    fn transient_base(&self) -> u64 {
        self.persistent_end.next_multiple_of(self.alignment)
    }

    /// What is planned.
    pub fn step(&self) -> &Step {
        self.schedule.step()
    }

    /// The orders.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// How buffers share the arena.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The backend the plan is made for.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// The alignment of every buffer, in bytes.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Every buffer and its lifetime.
    pub fn liveness(&self) -> &Liveness {
        &self.liveness
    }

    /// The offsets of persistent tensors, as in [`Liveness::persistent`].
    pub fn persistent_offsets(&self) -> &[u64] {
        &self.persistent_offsets
    }

    /// Bytes of the region of persistent tensors, which begins at 0.
    pub fn persistent_bytes(&self) -> u64 {
        self.persistent_end
    }

    /// By routine: its offsets and peak.
    pub fn routines(&self) -> &[RoutinePlan] {
        &self.routines
    }

    /// Highest planned byte of the arena over all routines, plus one.
    pub fn peak(&self) -> u64 {
        let routines = self.routines.iter().map(|routine| routine.peak).max();
        routines.unwrap_or(0).max(self.persistent_end)
    }

    /// Bytes to map for the arena: the peak in whole pages.
    pub fn arena_bytes(&self) -> u64 {
        self.peak().checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX)
    }

    /// No placement of these buffers has a lower peak.
    pub fn lower_bound(&self) -> u64 {
        let routines = self.routines.iter().map(|routine| routine.lower_bound).max();
        routines.unwrap_or(0).max(self.persistent_end)
    }

    /// The order, first time step and storage of one program.
    pub fn order(&self, routine: usize, program: usize) -> &[NodeId] {
        let before: usize = self.step().routines[..routine].iter().map(|r| r.programs.len()).sum();
        &self.schedule.orders()[before + program]
    }

    /// The offset of a value's bytes in the arena.
    pub fn offset(&self, routine: usize, storage: Storage) -> u64 {
        match storage {
            Storage::Persistent(index) => self.persistent_offsets[index],
            Storage::Buffer(index) => self.routines[routine].offsets[index],
        }
    }

    /// A hash of the step's text form, in hexadecimal: two plans with one hash compute the same.
    pub fn graph_hash(&self) -> String {
        graph_hash(self.step())
    }
}

/// SHA-256 of a step's text form, in hexadecimal.
pub fn graph_hash(step: &Step) -> String {
    let digest = Sha256::digest(step.to_string().as_bytes());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
