//! The lower bound; [`super::Placement::lower_bound`] defines it and proves it.

use std::collections::BinaryHeap;

use super::shelf::Life;
use super::{Span, Steps};

/// The maximum over time of the live rounded bytes, less the largest rounding among the live spans.
///
/// O(n log n): one sweep over the steps, with a heap whose expired entries are dropped when they surface.
pub(super) fn max_live(spans: &[Span], rounded: &[u64], steps: &Steps) -> u64 {
    let count = steps.count() as usize;
    let mut starting = vec![Vec::new(); count];
    let mut freed = vec![0_u64; count + 1];
    for (i, span) in spans.iter().enumerate().filter(|(_, s)| s.size > 0) {
        let Life { start, end } = steps.lifetime(span);
        starting[start as usize].push((i, end));
        freed[end as usize + 1] += rounded[i];
    }

    let mut live = 0;
    let mut bound = 0;
    let mut paddings = BinaryHeap::new();
    for (step, starts) in starting.iter().enumerate() {
        live -= freed[step];
        for &(i, end) in starts {
            live += rounded[i];
            paddings.push((rounded[i] - spans[i].size, end));
        }
        while paddings.peek().is_some_and(|&(_, end)| (end as usize) < step) {
            paddings.pop();
        }
        let padding = paddings.peek().map_or(0, |&(padding, _)| padding);
        bound = bound.max(live - padding);
    }
    bound
}
