//! An independent check of a placement: a sweep over time that keeps the live ranges in an ordered map.
//!
//! It shares no code with [`crate::place`] beyond [`Span`], so that a fault there cannot hide here.

use std::collections::BTreeMap;

use crate::place::Span;

/// What is wrong with a placement. Spans are named by their index.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// There is not one offset per span.
    #[error("{offsets} offsets for {spans} spans")]
    Count {
        /// Number of spans.
        spans: usize,
        /// Number of offsets.
        offsets: usize,
    },
    /// A span ends before it starts.
    #[error("span {span} ends before it starts")]
    Lifetime {
        /// The span.
        span: usize,
    },
    /// An offset is not a multiple of the alignment.
    #[error("span {span} at offset {offset} is not aligned to {align} bytes")]
    Misaligned {
        /// The span.
        span: usize,
        /// Its offset in bytes.
        offset: u64,
        /// The alignment in bytes.
        align: u64,
    },
    /// A span does not end within the arena.
    #[error("span {span} of {size} bytes at offset {offset} ends outside the arena of {arena_bytes} bytes")]
    OutOfArena {
        /// The span.
        span: usize,
        /// Its offset in bytes.
        offset: u64,
        /// Its size in bytes.
        size: u64,
        /// The size of the arena in bytes.
        arena_bytes: u64,
    },
    /// Two spans share a byte while both are live.
    #[error("spans {first} and {second} overlap at time step {time}")]
    Overlap {
        /// The span that was live before.
        first: usize,
        /// The span that became live on top of it.
        second: usize,
        /// The first time step at which both are live.
        time: u32,
    },
}

/// Checks that every span is aligned and within `arena_bytes`, and that no two spans live at the same time share a byte.
///
/// Sizes, offsets and `align` are in bytes. O(n log n).
///
/// # Errors
/// The first [`Violation`] found: of the spans one by one, then of pairs in the order of time.
pub fn validate(spans: &[Span], offsets: &[u64], align: u64, arena_bytes: u64) -> Result<(), Violation> {
    if spans.len() != offsets.len() {
        return Err(Violation::Count {
            spans: spans.len(),
            offsets: offsets.len(),
        });
    }
    for (i, (span, &offset)) in spans.iter().zip(offsets).enumerate() {
        if span.end < span.start {
            return Err(Violation::Lifetime { span: i });
        }
        if !offset.is_multiple_of(align) {
            return Err(Violation::Misaligned { span: i, offset, align });
        }
        if offset.checked_add(span.size).is_none_or(|end| end > arena_bytes) {
            return Err(Violation::OutOfArena {
                span: i,
                offset,
                size: span.size,
                arena_bytes,
            });
        }
    }

    // A span of no bytes shares none with anyone.
    let mut by_start: Vec<usize> = (0..spans.len()).filter(|&i| spans[i].size > 0).collect();
    let mut by_end = by_start.clone();
    by_start.sort_by_key(|&i| spans[i].start);
    by_end.sort_by_key(|&i| spans[i].end);
    let mut ending = by_end.into_iter().peekable();

    // First byte of each live span → (its end, the span). Disjoint at all times, or we have returned,
    // so that a newcomer can only clash with the neighbour on either side.
    let mut live: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
    for second in by_start {
        let time = spans[second].start;
        while let Some(over) = ending.next_if(|&i| spans[i].end < time) {
            live.remove(&offsets[over]);
        }
        let (begin, end) = (offsets[second], offsets[second] + spans[second].size);
        let below = live
            .range(..=begin)
            .next_back()
            .filter(|(_, (their_end, _))| *their_end > begin);
        let above = live.range(begin..end).next();
        if let Some((_, &(_, first))) = below.or(above) {
            return Err(Violation::Overlap { first, second, time });
        }
        live.insert(begin, (end, second));
    }
    Ok(())
}
