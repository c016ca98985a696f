//! Offset assignment: one arena, every buffer at a fixed offset, the highest used byte as low as possible.
//!
//! This is dynamic storage allocation with known lifetimes, NP-hard in general (Garey & Johnson, SR2).
//! Three steps, each only as far as needed:
//!
//! 1. a lower bound ([`Placement::lower_bound`]), which says when to stop;
//! 2. greedy passes: several orders, two fits (`greedy.rs`);
//! 3. a hill-climb over the order of the best pass (`climb.rs`).
//!
//! The search is bounded by counted work, never by the clock, and uses no outside randomness: the same
//! spans give the same offsets on every machine. [`crate::validate`] re-checks the outcome and shares no code with it.

mod bound;
mod climb;
mod greedy;
mod shelf;

use shelf::{Budget, Item, Life};

/// A buffer as placement sees it: how large it is and when it is live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// Size in bytes. A span of zero bytes occupies nothing and is placed at offset 0.
    pub size: u64,
    /// First time step at which the buffer is live.
    pub start: u32,
    /// Last time step at which the buffer is live (inclusive).
    pub end: u32,
}

/// How hard [`place`] tries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effort {
    /// Stop once the peak exceeds the lower bound by at most `1 / tolerance` of it; `None` stops only
    /// at the bound itself.
    pub tolerance: Option<u64>,
    /// Placed spans that may be looked at by all passes and the climb together. The first pass always
    /// completes, so this bounds the improvement only. A look costs one to three nanoseconds; the number
    /// of iterations it buys falls with the square of the number of spans.
    pub looks: u64,
}

impl Effort {
    /// For a search that plans many candidates: one greedy pass, and a few more for small problems.
    pub const QUICK: Self = Self {
        tolerance: Some(100),
        looks: 2_000_000,
    };
    /// For planning a job: tens of milliseconds.
    pub const NORMAL: Self = Self {
        tolerance: Some(1_000),
        looks: 15_000_000,
    };
    /// For a job that misses its budget by little: seconds.
    pub const THOROUGH: Self = Self {
        tolerance: None,
        looks: 2_000_000_000,
    };
}

impl Default for Effort {
    fn default() -> Self {
        Self::NORMAL
    }
}

/// Where every span lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Byte offset of each span, in the order given to [`place`]; a multiple of the alignment.
    pub offsets: Vec<u64>,
    /// Highest used byte plus one: the maximum of offset + size, the size not rounded up.
    pub peak: u64,
    /// No placement of these spans at this alignment has a lower peak than this.
    ///
    /// It is the maximum over time of the live bytes, each size rounded up to the alignment except
    /// that of the buffer which loses most by rounding. Proof: among the buffers live at one time,
    /// ordered by offset, each starts at an aligned offset not below the end of the one before,
    /// hence not below its rounded end. So the topmost starts at or above the sum of the others'
    /// rounded sizes and ends its own, unrounded size higher; which one is topmost is free, and the
    /// lowest end comes from the one whose rounding adds most.
    pub lower_bound: u64,
}

impl Placement {
    /// Bytes of `peak` above the lower bound, as a fraction of the lower bound (0 when both are 0).
    pub fn gap(&self) -> f64 {
        if self.lower_bound == 0 {
            return 0.0;
        }
        (self.peak - self.lower_bound) as f64 / self.lower_bound as f64
    }
}

/// Why spans cannot be placed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// The alignment is not a power of two.
    #[error("alignment {align} is not a power of two")]
    Align {
        /// The alignment asked for.
        align: u64,
    },
    /// A span ends before it starts.
    #[error("span {span} is live from step {start} to step {end}, which is before its start")]
    Lifetime {
        /// Index of the span.
        span: usize,
        /// Its first step.
        start: u32,
        /// Its last step.
        end: u32,
    },
    /// The spans' rounded sizes do not add up within 64 bits, so that offsets could wrap.
    #[error("the sizes of spans 0 to {span} add up to more than 2^64 bytes; span {span} has {size}")]
    TooLarge {
        /// Index of the span at which the sum leaves 64 bits.
        span: usize,
        /// Its size in bytes.
        size: u64,
    },
}

/// Assigns an offset to every span so that spans live at the same time do not overlap, and the peak is low.
///
/// `align` is in bytes and holds for every offset. Spans live over the whole timeline lie lowest: moving
/// one to the bottom, and what was below it up by its size, keeps any placement valid, so nothing is lost.
///
/// # Errors
/// [`PlaceError`] when the alignment is not a power of two, a lifetime is inverted, or the sizes, summed
/// over all spans, leave 64 bits.
pub fn place(spans: &[Span], align: u64, effort: Effort) -> Result<Placement, PlaceError> {
    let rounded = rounded_sizes(spans, align)?;
    let steps = Steps::of(spans);
    let lower_bound = bound::max_live(spans, &rounded, &steps);

    let mut offsets = vec![0; spans.len()];
    let whole = steps.count().saturating_sub(1);
    let (mut resident, mut items, mut owners) = (Vec::new(), Vec::new(), Vec::new());
    for (i, span) in spans.iter().enumerate().filter(|(_, s)| s.size > 0) {
        let life = steps.lifetime(span);
        if life.start == 0 && life.end == whole {
            resident.push(i);
        } else {
            items.push(Item { size: rounded[i], life });
            owners.push(i);
        }
    }

    // The resident span that loses most by rounding goes last: it may turn out to be the topmost of all.
    resident.sort_by_key(|&i| rounded[i] - spans[i].size);
    let mut floor = 0;
    for i in resident {
        offsets[i] = floor;
        floor += rounded[i];
    }

    for (&owner, offset) in owners
        .iter()
        .zip(place_items(&items, floor, lower_bound, align, effort))
    {
        offsets[owner] = floor + offset;
    }
    let peak = spans
        .iter()
        .zip(&offsets)
        .map(|(s, o)| if s.size > 0 { o + s.size } else { 0 })
        .max()
        .unwrap_or(0);
    Ok(Placement {
        offsets,
        peak,
        lower_bound,
    })
}

/// The [`lower_bound`](Placement::lower_bound) of any placement of the spans.
///
/// # Errors
/// As [`place`].
pub fn lower_bound(spans: &[Span], align: u64) -> Result<u64, PlaceError> {
    let rounded = rounded_sizes(spans, align)?;
    Ok(bound::max_live(spans, &rounded, &Steps::of(spans)))
}

/// Offsets above `floor` of the spans that come and go.
fn place_items(items: &[Item], floor: u64, lower_bound: u64, align: u64, effort: Effort) -> Vec<u64> {
    if items.is_empty() {
        return Vec::new();
    }
    let slack = effort.tolerance.map_or(0, |t| lower_bound / t.max(1));
    // Passes compare rounded ends, so the bound is rounded too. It cannot leave 64 bits: it is at
    // most the sum of all rounded sizes, which does not. It is above `floor`, for an item is live somewhere.
    let target = (lower_bound.next_multiple_of(align) - floor).saturating_add(slack);
    let mut budget = Budget::new(effort.looks);
    let best = greedy::best_of(items, target, &mut budget);
    climb::improve(items, best, target, &mut budget).offsets(items.len())
}

/// Every size rounded up to `align`, checked to add up within 64 bits.
///
/// A fit puts a span at 0 or on the end of another, so by induction no end exceeds the sum of all
/// rounded sizes: once that sum is known to fit, no offset arithmetic can wrap.
fn rounded_sizes(spans: &[Span], align: u64) -> Result<Vec<u64>, PlaceError> {
    if !align.is_power_of_two() {
        return Err(PlaceError::Align { align });
    }
    let mut sum = 0_u64;
    let mut rounded = Vec::with_capacity(spans.len());
    for (i, span) in spans.iter().enumerate() {
        if span.end < span.start {
            return Err(PlaceError::Lifetime {
                span: i,
                start: span.start,
                end: span.end,
            });
        }
        let too_large = PlaceError::TooLarge {
            span: i,
            size: span.size,
        };
        let size = span.size.checked_next_multiple_of(align).ok_or(too_large.clone())?;
        sum = sum.checked_add(size).ok_or(too_large)?;
        rounded.push(size);
    }
    Ok(rounded)
}

/// The time steps at which some span starts, numbered from 0.
///
/// The live set only grows at these, so lifetimes counted in them overlap exactly when the original
/// ones do, and there are never more of them than spans, however long the timeline is.
struct Steps(Vec<u32>);

impl Steps {
    fn of(spans: &[Span]) -> Self {
        let mut starts: Vec<u32> = spans.iter().filter(|s| s.size > 0).map(|s| s.start).collect();
        starts.sort_unstable();
        starts.dedup();
        Self(starts)
    }

    fn count(&self) -> u32 {
        // At most one per distinct `u32`; 2^32 of them would need 16 GiB of spans' starts alone.
        self.0.len() as u32
    }

    /// First and last step of a span of non-zero size.
    fn lifetime(&self, span: &Span) -> Life {
        let start = self.0.partition_point(|&t| t < span.start);
        let end = self.0.partition_point(|&t| t <= span.end) - 1;
        Life {
            start: start as u32,
            end: end as u32,
        }
    }
}
