//! Spans placed so far, sorted by offset, and the two fits that search the gaps between them.

/// A span of non-zero size in the units of the search.
#[derive(Clone, Copy)]
pub(super) struct Item {
    /// Bytes, a multiple of the alignment: offsets made of sums of sizes are then aligned by themselves.
    pub size: u64,
    pub life: Life,
}

/// First and last step (inclusive), in [`super::Steps`].
#[derive(Clone, Copy)]
pub(super) struct Life {
    pub start: u32,
    pub end: u32,
}

impl Life {
    /// Whether some step belongs to both. Branchless: in the scans below the answer is close to
    /// random, and a branch would be mispredicted.
    pub fn meets(self, other: Self) -> bool {
        (self.start <= other.end) & (other.start <= self.end)
    }
}

/// Which gap takes a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// The lowest gap that is large enough.
    First,
    /// The smallest gap that is large enough, the lowest of equals; above everything else if none is.
    Best,
}

/// Work left, in looks at placed spans.
pub(super) struct Budget(u64);

impl Budget {
    pub fn new(looks: u64) -> Self {
        Self(looks)
    }

    pub fn is_spent(&self) -> bool {
        self.0 == 0
    }

    pub fn spend(&mut self, looks: usize) {
        self.0 = self.0.saturating_sub(looks as u64);
    }
}

/// What inserting an item costs besides the looks that find its gap: a binary search and a short move.
const LOOKS_PER_INSERTION: usize = 16;

/// An item with its first byte and the byte after its last.
#[derive(Clone, Copy)]
struct Placed {
    lo: u64,
    hi: u64,
    life: Life,
    id: u32,
}

/// Placed items by ascending offset.
#[derive(Default)]
pub(super) struct Shelf {
    placed: Vec<Placed>,
    peak: u64,
}

impl Shelf {
    /// The highest end.
    pub fn peak(&self) -> u64 {
        self.peak
    }

    /// The offset of each of `count` items; 0 for one that is not placed.
    pub fn offsets(&self, count: usize) -> Vec<u64> {
        let mut offsets = vec![0; count];
        for p in &self.placed {
            offsets[p.id as usize] = p.lo;
        }
        offsets
    }

    /// Items that end at the peak.
    pub fn topmost(&self) -> impl Iterator<Item = u32> {
        self.placed.iter().filter(|p| p.hi == self.peak).map(|p| p.id)
    }

    /// Becomes `other` reduced to the items that `keep` accepts.
    pub fn clone_filtered(&mut self, other: &Self, keep: impl Fn(u32) -> bool) {
        self.placed.clear();
        self.placed.extend(other.placed.iter().filter(|p| keep(p.id)));
        self.peak = self.placed.iter().map(|p| p.hi).max().unwrap_or(0);
    }

    /// Places items in the given order; gives up, returning `false`, as soon as one ends above `limit`.
    pub fn fill(&mut self, items: &[Item], order: &[u32], fit: Fit, limit: u64, budget: &mut Budget) -> bool {
        for &id in order {
            budget.spend(LOOKS_PER_INSERTION);
            let item = items[id as usize];
            let lo = match fit {
                Fit::First => self.first_fit(item, budget),
                Fit::Best => self.best_fit(item, budget),
            };
            let hi = lo + item.size;
            if hi > limit {
                return false;
            }
            self.peak = self.peak.max(hi);
            let at = self.placed.partition_point(|p| p.lo < lo);
            self.placed.insert(
                at,
                Placed {
                    lo,
                    hi,
                    life: item.life,
                    id,
                },
            );
        }
        true
    }

    fn first_fit(&self, item: Item, budget: &mut Budget) -> u64 {
        let mut lo = 0;
        let mut looks = 0;
        for p in &self.placed {
            // Everything from here on starts above the gap: whether it is live meanwhile is no matter.
            if p.lo >= lo + item.size {
                break;
            }
            lo = lo.max(if item.life.meets(p.life) { p.hi } else { 0 });
            looks += 1;
        }
        budget.spend(looks);
        lo
    }

    fn best_fit(&self, item: Item, budget: &mut Budget) -> u64 {
        let mut lo = 0;
        let mut best = None;
        let mut smallest = u64::MAX;
        for p in &self.placed {
            if item.life.meets(p.life) {
                let gap = p.lo.saturating_sub(lo);
                if gap >= item.size && gap < smallest {
                    smallest = gap;
                    best = Some(lo);
                }
                lo = lo.max(p.hi);
            }
        }
        budget.spend(self.placed.len());
        best.unwrap_or(lo)
    }
}
