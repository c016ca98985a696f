//! The plan: every buffer's offset in one arena.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tightfit_ir::{NodeId, Step, Target, Tier};

use crate::error::PlanError;
use crate::liveness::{self, InPlace, Liveness, Storage};
use crate::place::{Effort, PlaceError, Span, lower_bound, place};
use crate::schedule::Schedule;
use crate::validate::{Violation, validate};

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
    persistent_ends: ByTier<u64>,
    routines: Vec<RoutinePlan>,
}

/// Where one routine's buffers lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutinePlan {
    /// By buffer: its offset in its tier's arena.
    pub offsets: Vec<u64>,
    /// Highest planned byte of the arena while the routine runs, plus one.
    pub peak: u64,
    /// No placement of this routine's buffers above the persistent region has a lower peak.
    pub lower_bound: u64,
    /// Highest planned byte of the lower tier while the routine runs, plus one.
    pub lower_tier_peak: u64,
}

/// One of something for each tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct ByTier<T> {
    memory: T,
    lower: T,
}

impl<T> ByTier<T> {
    fn at(&mut self, tier: Tier) -> &mut T {
        match tier {
            Tier::Memory => &mut self.memory,
            Tier::Lower => &mut self.lower,
        }
    }
}

/// Transfers go in blocks of this size: direct I/O asks for it of memory, of offsets and of lengths.
pub const TRANSFER_ALIGNMENT: u64 = 4096;

/// Places every buffer of a schedule: persistent ones first, then each routine's in the rest.
///
/// # Errors
/// Sizes that cannot be addressed.
pub fn plan(schedule: Schedule, target: &dyn Target, layout: Layout, effort: Effort) -> Result<Plan, PlanError> {
    Draft::new(schedule, target, layout)?.place(effort)
}

/// A plan whose buffers are not placed yet: enough to tell that it cannot fit, in a fraction of the time.
#[derive(Clone, Debug)]
pub struct Draft {
    unplaced: Plan,
    lower_bound: u64,
}

impl Draft {
    /// Finds the buffers of a schedule.
    ///
    /// # Errors
    /// Sizes that cannot be addressed.
    pub fn new(schedule: Schedule, target: &dyn Target, layout: Layout) -> Result<Self, PlanError> {
        let unplaced = Plan::unplaced(schedule, target, layout)?;
        let mut lower_bound = unplaced.persistent_ends.memory;
        for routine in 0..unplaced.liveness.routines.len() {
            let bound = unplaced.lower_bound_above(routine)?;
            lower_bound = lower_bound.max(bound);
        }
        Ok(Self { unplaced, lower_bound })
    }

    /// Bytes of the smallest arena that any placement could need: see [`Plan::arena_bytes`].
    pub fn least_arena_bytes(&self) -> u64 {
        whole_pages(self.lower_bound)
    }

    /// Places every buffer.
    ///
    /// # Errors
    /// Sizes that cannot be addressed.
    pub fn place(self, effort: Effort) -> Result<Plan, PlanError> {
        let mut plan = self.unplaced;
        for index in 0..plan.liveness.routines.len() {
            let placed = plan.place_routine(index, effort)?;
            plan.routines.push(placed);
        }
        plan.validate()?;
        Ok(plan)
    }
}

/// Bytes to map for so many.
fn whole_pages(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX)
}

/// How high one tier's buffers of a routine reach.
struct Reach {
    peak: u64,
    lower_bound: u64,
}

/// The offset of a buffer appended at `end`, which moves past it.
fn append(end: &mut u64, bytes: u64, alignment: u64) -> Result<u64, PlanError> {
    let offset = end.checked_next_multiple_of(alignment).ok_or(PlanError::TooLarge)?;
    *end = offset.checked_add(bytes).ok_or(PlanError::TooLarge)?;
    Ok(offset)
}

impl Plan {
    /// Lifetimes and the persistent regions, without any routine's offsets.
    fn unplaced(schedule: Schedule, target: &dyn Target, layout: Layout) -> Result<Self, PlanError> {
        let in_place = match layout {
            Layout::Shared => InPlace::WherePossible,
            Layout::Separate => InPlace::Never,
        };
        let liveness = liveness::analyse(schedule.step(), schedule.orders(), target, in_place);
        let alignment = match liveness.uses_lower_tier() {
            true => target.alignment().max(TRANSFER_ALIGNMENT),
            false => target.alignment(),
        };
        let mut persistent_ends = ByTier::default();
        let persistent_offsets = liveness
            .persistent
            .iter()
            .map(|tensor| append(persistent_ends.at(tensor.ty.tier), tensor.ty.bytes(), alignment))
            .collect::<Result<Vec<_>, _>>()?;
        for end in [persistent_ends.memory, persistent_ends.lower] {
            end.checked_next_multiple_of(alignment).ok_or(PlanError::TooLarge)?;
        }
        Ok(Self {
            schedule,
            layout,
            target: target.name().to_owned(),
            alignment,
            liveness,
            persistent_offsets,
            persistent_ends,
            routines: Vec::new(),
        })
    }

    /// Places the buffers again, with more effort, and keeps of each routine what is lower.
    ///
    /// # Errors
    /// As [`plan`]; there are none if this was placed before.
    pub fn improve(&mut self, effort: Effort) -> Result<(), PlanError> {
        for index in 0..self.routines.len() {
            let placed = self.place_routine(index, effort)?;
            if placed.peak < self.routines[index].peak {
                self.routines[index] = placed;
            }
        }
        self.validate()
    }

    /// Places a routine's buffers.
    fn place_routine(&self, index: usize, effort: Effort) -> Result<RoutinePlan, PlanError> {
        let mut offsets = vec![0; self.liveness.routines[index].buffers.len()];
        let memory = self.place_tier(index, Tier::Memory, effort, &mut offsets)?;
        let lower = self.place_tier(index, Tier::Lower, effort, &mut offsets)?;
        Ok(RoutinePlan {
            offsets,
            peak: memory.peak,
            lower_bound: memory.lower_bound,
            lower_tier_peak: lower.peak,
        })
    }

    /// The [`lower_bound`](RoutinePlan::lower_bound) of a routine.
    fn lower_bound_above(&self, routine: usize) -> Result<u64, PlanError> {
        let (_, spans) = self.spans(routine, Tier::Memory);
        let bound = lower_bound(&spans, self.alignment).map_err(|source| self.unplaceable(routine, source))?;
        Ok(self.transient_base(Tier::Memory).saturating_add(bound))
    }

    /// Places one tier's buffers of a routine above its persistent region.
    fn place_tier(&self, routine: usize, tier: Tier, effort: Effort, offsets: &mut [u64]) -> Result<Reach, PlanError> {
        let (buffers, spans) = self.spans(routine, tier);
        let (placed, peak, bound) = match self.layout {
            Layout::Shared => {
                let placement =
                    place(&spans, self.alignment, effort).map_err(|source| self.unplaceable(routine, source))?;
                (placement.offsets, placement.peak, placement.lower_bound)
            }
            Layout::Separate => {
                let mut end = 0;
                let offsets = spans
                    .iter()
                    .map(|span| append(&mut end, span.size, self.alignment))
                    .collect::<Result<Vec<_>, PlanError>>()?;
                (offsets, end, end)
            }
        };
        let base = self.transient_base(tier);
        let shift = |bytes: u64| base.checked_add(bytes).ok_or(PlanError::TooLarge);
        for (buffer, offset) in buffers.into_iter().zip(placed) {
            offsets[buffer] = shift(offset)?;
        }
        Ok(Reach {
            peak: shift(peak)?,
            lower_bound: shift(bound)?,
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
            // As placed: a routine without buffers ends where they would begin.
            let peak = |tier| {
                let (buffers, spans) = plan.spans(index, tier);
                let ends = buffers.iter().zip(&spans).map(|(&buffer, span)| {
                    let offset = offsets.get(buffer).copied().unwrap_or(0);
                    offset.saturating_add(span.size)
                });
                ends.max().unwrap_or(0).max(plan.transient_base(tier))
            };
            plan.routines.push(RoutinePlan {
                peak: peak(Tier::Memory),
                lower_bound: plan.lower_bound_above(index)?,
                lower_tier_peak: peak(Tier::Lower),
                offsets,
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
            let placed = self.routines.get(index).map_or(&[][..], |r| &r.offsets[..]);
            let expected = self.liveness.routines[index].buffers.len();
            if placed.len() != expected {
                return Err(invalid(Violation::Count {
                    offsets: placed.len(),
                    spans: expected,
                }));
            }
            for (tier, end) in [(Tier::Memory, self.peak()), (Tier::Lower, self.lower_tier_bytes())] {
                let (buffers, mut spans) = self.spans(index, tier);
                let mut offsets: Vec<u64> = buffers.iter().map(|&buffer| placed[buffer]).collect();
                spans.push(Span {
                    size: self.persistent_bytes(tier),
                    start: 0,
                    end: u32::MAX,
                });
                offsets.push(0);
                validate(&spans, &offsets, self.alignment, end).map_err(invalid)?;
            }
        }
        Ok(())
    }

    fn unplaceable(&self, routine: usize, source: PlaceError) -> PlanError {
        PlanError::Place {
            routine: self.step().routines[routine].name.clone(),
            source,
        }
    }

    /// One tier's buffers of a routine, as indices and as placement sees them.
    fn spans(&self, routine: usize, tier: Tier) -> (Vec<usize>, Vec<Span>) {
        let buffers = self.liveness.routines[routine].buffers.iter().enumerate();
        buffers
            .filter(|(_, buffer)| buffer.tier == tier)
            .map(|(index, buffer)| {
                let span = Span {
                    size: buffer.bytes,
                    start: buffer.start,
                    end: buffer.end,
                };
                (index, span)
            })
            .unzip()
    }

    /// Where transient memory begins. [`Self::unplaced`] has checked that it can be addressed.
    fn transient_base(&self, tier: Tier) -> u64 {
        self.persistent_bytes(tier).next_multiple_of(self.alignment)
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

    /// Bytes of a tier's region of persistent tensors, which begins at 0.
    pub fn persistent_bytes(&self, tier: Tier) -> u64 {
        match tier {
            Tier::Memory => self.persistent_ends.memory,
            Tier::Lower => self.persistent_ends.lower,
        }
    }

    /// Bytes of all persistent tensors, wherever they are: what a checkpoint of all of them holds.
    pub fn persistent_tensor_bytes(&self) -> u64 {
        let tensors = self.liveness.persistent.iter().map(|tensor| tensor.ty.bytes());
        tensors.fold(0, u64::saturating_add)
    }

    /// Bytes to reserve on the lower tier, in whole blocks; 0 if nothing is offloaded.
    pub fn lower_tier_bytes(&self) -> u64 {
        let routines = self.routines.iter().map(|routine| routine.lower_tier_peak).max();
        let end = routines.unwrap_or(0).max(self.persistent_ends.lower);
        end.checked_next_multiple_of(TRANSFER_ALIGNMENT).unwrap_or(u64::MAX)
    }

    /// By routine: its offsets and peak.
    pub fn routines(&self) -> &[RoutinePlan] {
        &self.routines
    }

    /// Highest planned byte of the arena over all routines, plus one.
    pub fn peak(&self) -> u64 {
        let routines = self.routines.iter().map(|routine| routine.peak).max();
        routines.unwrap_or(0).max(self.persistent_ends.memory)
    }

    /// Bytes to map for the arena: the peak in whole pages.
    pub fn arena_bytes(&self) -> u64 {
        whole_pages(self.peak())
    }

    /// No placement of these buffers has a lower peak.
    pub fn lower_bound(&self) -> u64 {
        let routines = self.routines.iter().map(|routine| routine.lower_bound).max();
        routines.unwrap_or(0).max(self.persistent_ends.memory)
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
