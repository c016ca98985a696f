//! Greedy passes: sort the items, then fit them one by one.
//!
//! By size and by breadth are the two strategies of Pisarchyk & Lee, "Efficient Memory Management for
//! Deep Neural Net Inference" (2020); on training traces by size mostly meets the bound, so it comes first.

use std::cmp::Reverse;

use super::shelf::{Budget, Fit, Item, Shelf};

/// What the items are sorted by, before they are placed one after another.
#[derive(Clone, Copy)]
enum Order {
    /// Largest first.
    Size,
    /// Most live bytes at its worst step first, then largest.
    Breadth,
    /// Largest size × lifetime first.
    Area,
    /// Longest-lived first.
    Lifetime,
    /// Most other items live meanwhile first.
    Conflicts,
    /// Earliest start first, as an allocator at run time meets them.
    Start,
    /// Latest end first.
    End,
}

/// Most promising first, and early ones unlike each other: what one does badly another may do well.
const PASSES: [(Order, Fit); 11] = [
    (Order::Size, Fit::First),
    (Order::Breadth, Fit::First),
    (Order::Lifetime, Fit::First),
    (Order::Area, Fit::First),
    (Order::Size, Fit::Best),
    (Order::Conflicts, Fit::First),
    (Order::Area, Fit::Best),
    (Order::Lifetime, Fit::Best),
    (Order::Breadth, Fit::Best),
    (Order::End, Fit::First),
    (Order::Start, Fit::First),
];

/// A finished pass: the order its items were placed in, the fit, and what came of it.
pub(super) struct Pass {
    pub order: Vec<u32>,
    pub fit: Fit,
    pub shelf: Shelf,
}

/// The best of all passes, or the first that stays within `target`, or the best until the budget is spent.
pub(super) fn best_of(items: &[Item], target: u64, budget: &mut Budget) -> Pass {
    let [(first, fit), rest @ ..] = PASSES;
    let keys = Keys::of(items);
    let mut best = Pass {
        order: keys.sorted(items, first),
        fit,
        shelf: Shelf::default(),
    };
    best.shelf.fill(items, &best.order, fit, u64::MAX, budget);
    for (order, fit) in rest {
        if best.shelf.peak() <= target || budget.is_spent() {
            break;
        }
        let order = keys.sorted(items, order);
        let mut shelf = Shelf::default();
        // A pass is only worth finishing while it is better than the best so far.
        if shelf.fill(items, &order, fit, best.shelf.peak() - 1, budget) {
            best = Pass { order, fit, shelf };
        }
    }
    best
}

/// What several orders need to know of each item.
struct Keys {
    breadth: Vec<u64>,
    conflicts: Vec<usize>,
}

impl Keys {
    fn of(items: &[Item]) -> Self {
        Self {
            breadth: breadths(items),
            conflicts: conflicts(items),
        }
    }

    /// Items by descending key, then descending size, then index: never a tie, so never chance.
    fn sorted(&self, items: &[Item], order: Order) -> Vec<u32> {
        let key = |i: u32| {
            let i = i as usize;
            let item = items[i];
            let lifetime = u128::from(item.life.end - item.life.start + 1);
            match order {
                Order::Size => u128::from(item.size),
                Order::Breadth => u128::from(self.breadth[i]),
                Order::Area => u128::from(item.size) * lifetime,
                Order::Lifetime => lifetime,
                Order::Conflicts => self.conflicts[i] as u128,
                Order::Start => u128::from(u32::MAX - item.life.start),
                Order::End => u128::from(item.life.end),
            }
        };
        let mut sorted: Vec<u32> = (0..items.len() as u32).collect();
        sorted.sort_by_cached_key(|&i| (Reverse(key(i)), Reverse(items[i as usize].size), i));
        sorted
    }
}

/// The most bytes live at any one step of each item's lifetime.
fn breadths(items: &[Item]) -> Vec<u64> {
    let steps = items.iter().map(|i| i.life.end as usize + 1).max().unwrap_or(0);
    let mut changes = vec![(0_u64, 0_u64); steps + 1];
    for item in items {
        changes[item.life.start as usize].0 += item.size;
        changes[item.life.end as usize + 1].1 += item.size;
    }
    let live = changes[..steps].iter().scan(0, |live, (taken, freed)| {
        *live = *live - freed + taken;
        Some(*live)
    });
    // A sparse table: level k holds the maximum over 2^k steps from each step on.
    let mut levels: Vec<Vec<u64>> = vec![live.collect()];
    let mut width = 1;
    while width * 2 <= steps {
        let narrow = &levels[levels.len() - 1];
        let wide = narrow.iter().zip(&narrow[width..]).map(|(&a, &b)| a.max(b)).collect();
        levels.push(wide);
        width *= 2;
    }
    let breadth = |item: &Item| {
        let length = item.life.end - item.life.start + 1;
        let level = length.ilog2();
        let row = &levels[level as usize];
        row[item.life.start as usize].max(row[(item.life.end + 1 - (1 << level)) as usize])
    };
    items.iter().map(breadth).collect()
}

/// How many items (itself included) are live at some step of each item's lifetime.
fn conflicts(items: &[Item]) -> Vec<usize> {
    let mut starts: Vec<u32> = items.iter().map(|i| i.life.start).collect();
    let mut ends: Vec<u32> = items.iter().map(|i| i.life.end).collect();
    starts.sort_unstable();
    ends.sort_unstable();
    let conflicts = |item: &Item| {
        let begun = starts.partition_point(|&start| start <= item.life.end);
        let over = ends.partition_point(|&end| end < item.life.start);
        begun - over
    };
    items.iter().map(conflicts).collect()
}
