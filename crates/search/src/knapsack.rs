//! One way for every block, within limits of bytes and of link time, at the least time: a multiple-choice knapsack.
//!
//! Blocks of a class are alike, so that only counts matter. Without the demand for whole blocks the optimum is known: every class
//! takes ways on the lower convex hull of (bytes, seconds), and steps along the hulls are taken by ascending price, seconds per
//! byte, until the limit is met; at most one step is left unfinished (Zemel 1980; Dyer 1984). Here that step is finished by one
//! whole block, which frees more than is asked, and the rest is spent by exchange: the best change of one block or of two at once,
//! ways off the hull included, until none is left. So a class of alike blocks ends up at two neighbours of its hull and one or two
//! blocks between. The unfinished optimum is a lower bound, and what was found is reported against it.
//!
//! The limit of link time gets a price of its own in seconds, found by bisection (a Lagrange multiplier).

/// One way for a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Item {
    /// Bytes that stay in memory.
    pub bytes: u64,
    /// What it takes.
    pub seconds: f64,
    /// How long it holds the link.
    pub link_seconds: f64,
}

/// Blocks that choose among the same ways.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// How many there are.
    pub blocks: usize,
    /// The ways; at least one.
    pub items: Vec<Item>,
}

/// What all blocks together may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    /// Bytes that stay in memory.
    pub bytes: u64,
    /// Time of the link.
    pub link_seconds: f64,
}

/// A choice for every block.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// By group, by way: how many blocks take it.
    pub counts: Vec<Vec<usize>>,
    /// All blocks together.
    pub total: Item,
    /// No choice within the limits takes less time.
    pub bound: f64,
}

/// The choice of least time that was found; `None` if nothing found is within the limits.
pub fn choose(groups: &[Group], capacity: Capacity) -> Option<Selection> {
    let at_price = |price: f64| relaxed(groups, capacity, price);
    let free = at_price(0.0)?;
    let relaxed = match free.total.link_seconds <= capacity.link_seconds {
        true => free,
        false => priced(at_price, &free, capacity)?,
    };
    let mut selection = relaxed;
    while let Some(change) = best_change(groups, &selection, capacity) {
        change.apply(groups, &mut selection);
    }
    Some(selection)
}

/// Doublings and halvings of the link's price.
const PRICES: usize = 40;

/// The choice at the lowest price at which the link's limit holds. The bound is the best of all prices tried: each is one.
fn priced(at: impl Fn(f64) -> Option<Selection>, free: &Selection, capacity: Capacity) -> Option<Selection> {
    let (mut low, mut high) = (0.0, 1.0);
    let mut bound = free.bound;
    let mut best = None;
    for _ in 0..PRICES {
        let price = if best.is_none() { high } else { (low + high) / 2.0 };
        let found = at(price)?;
        bound = bound.max(found.bound);
        if found.total.link_seconds <= capacity.link_seconds {
            (high, best) = (price, Some(found));
        } else {
            low = price;
            high = if best.is_none() { 2.0 * high } else { high };
        }
    }
    best.map(|best| Selection { bound, ..best })
}

/// The relaxed optimum at a price of link time, its unfinished step finished.
fn relaxed(groups: &[Group], capacity: Capacity, price: f64) -> Option<Selection> {
    let cost = |item: &Item| item.seconds + price * item.link_seconds;
    let mut steps = Vec::new();
    let mut counts: Vec<Vec<usize>> = Vec::new();
    let mut bytes = 0_u64;
    let mut bound = -price * if price > 0.0 { capacity.link_seconds } else { 0.0 };
    for (index, group) in groups.iter().enumerate() {
        let hull = hull(&group.items, cost);
        let mut count = vec![0; group.items.len()];
        count[*hull.first()?] = group.blocks;
        counts.push(count);
        let first = &group.items[hull[0]];
        bytes += first.bytes * group.blocks as u64;
        bound += cost(first) * group.blocks as f64;
        for pair in hull.windows(2) {
            let [from, to] = [pair[0], pair[1]].map(|way| &group.items[way]);
            let price = (cost(to) - cost(from)) / (from.bytes - to.bytes) as f64;
            steps.push((price, index, pair[0], pair[1]));
        }
    }
    // Along one hull prices rise, and the sort is stable: a block takes its steps in order.
    steps.sort_by(|a, b| a.0.total_cmp(&b.0));
    for (price, group, from, to) in steps {
        let Some(excess) = bytes.checked_sub(capacity.bytes).filter(|&excess| excess > 0) else {
            break;
        };
        let items = &groups[group].items;
        let freed = items[from].bytes - items[to].bytes;
        let blocks = (excess.div_ceil(freed) as usize).min(groups[group].blocks);
        counts[group][from] -= blocks;
        counts[group][to] += blocks;
        bytes -= freed * blocks as u64;
        bound += price * (freed * blocks as u64).min(excess) as f64;
    }
    if bytes > capacity.bytes {
        return None;
    }
    let total = total(groups, &counts);
    Some(Selection { counts, total, bound })
}

/// The ways on the lower convex hull, from the least cost down to the least bytes.
fn hull(items: &[Item], cost: impl Fn(&Item) -> f64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by(|&a, &b| {
        let by_cost = cost(&items[a]).total_cmp(&cost(&items[b]));
        by_cost.then(items[a].bytes.cmp(&items[b].bytes))
    });
    let mut hull: Vec<usize> = Vec::new();
    for next in order {
        if hull.last().is_some_and(|&last| items[next].bytes >= items[last].bytes) {
            continue;
        }
        let price = |from: usize, to: usize| {
            (cost(&items[to]) - cost(&items[from])) / (items[from].bytes - items[to].bytes) as f64
        };
        while let [.., before, last] = hull[..]
            && price(before, last) >= price(last, next)
        {
            hull.pop();
        }
        hull.push(next);
    }
    hull
}

fn total(groups: &[Group], counts: &[Vec<usize>]) -> Item {
    let mut sum = Item {
        bytes: 0,
        seconds: 0.0,
        link_seconds: 0.0,
    };
    for (group, counts) in groups.iter().zip(counts) {
        for (item, &count) in group.items.iter().zip(counts) {
            sum.bytes += item.bytes * count as u64;
            sum.seconds += item.seconds * count as f64;
            sum.link_seconds += item.link_seconds * count as f64;
        }
    }
    sum
}

/// One block that changes its way.
#[derive(Clone, Copy)]
struct Move {
    group: usize,
    from: usize,
    to: usize,
    bytes: i128,
    seconds: f64,
    link_seconds: f64,
}

/// One or two moves.
struct Change(Vec<Move>);

impl Change {
    fn apply(&self, groups: &[Group], selection: &mut Selection) {
        for change in &self.0 {
            selection.counts[change.group][change.from] -= 1;
            selection.counts[change.group][change.to] += 1;
        }
        selection.total = total(groups, &selection.counts);
    }
}

/// Less than this is rounding, not time saved.
const LEAST_SAVING: f64 = 1e-12;

/// The change of one or two blocks that saves most time within the limits.
fn best_change(groups: &[Group], selection: &Selection, capacity: Capacity) -> Option<Change> {
    let room = i128::from(capacity.bytes) - i128::from(selection.total.bytes);
    let link_room = capacity.link_seconds - selection.total.link_seconds;
    let moves = moves(groups, &selection.counts);
    let mut best: Option<(f64, Change)> = None;
    let mut consider = |saving: f64, change: &[Move]| {
        if saving > LEAST_SAVING && best.as_ref().is_none_or(|(most, _)| saving > *most) {
            best = Some((saving, Change(change.to_vec())));
        }
    };
    for (index, &first) in moves.iter().enumerate() {
        if first.bytes <= room && first.link_seconds <= link_room {
            consider(-first.seconds, &[first]);
        }
        for &second in &moves[index..] {
            let fits = first.bytes + second.bytes <= room && first.link_seconds + second.link_seconds <= link_room;
            let same = (first.group, first.from) == (second.group, second.from);
            let there = !same || selection.counts[first.group][first.from] >= 2;
            if fits && there {
                consider(-(first.seconds + second.seconds), &[first, second]);
            }
        }
    }
    best.map(|(_, change)| change)
}

/// Moves looked at: pairs of them are looked at too.
const MAX_MOVES: usize = 512;

/// Every move of one block; if these are many, those by the fewest bytes, for what is left to spend is little.
fn moves(groups: &[Group], counts: &[Vec<usize>]) -> Vec<Move> {
    let mut moves = Vec::new();
    for (index, (group, counts)) in groups.iter().zip(counts).enumerate() {
        for from in (0..counts.len()).filter(|&from| counts[from] > 0) {
            let old = group.items[from];
            for (to, new) in group.items.iter().enumerate().filter(|&(to, _)| to != from) {
                moves.push(Move {
                    group: index,
                    from,
                    to,
                    bytes: i128::from(new.bytes) - i128::from(old.bytes),
                    seconds: new.seconds - old.seconds,
                    link_seconds: new.link_seconds - old.link_seconds,
                });
            }
        }
    }
    moves.sort_by_key(|change| change.bytes.unsigned_abs());
    moves.truncate(MAX_MOVES);
    moves
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::strategy::ValueTree;

    use super::*;

    fn item() -> impl Strategy<Value = Item> {
        (0..60_u64, 0..60_u32, 0..20_u32).prop_map(|(bytes, seconds, link)| Item {
            bytes,
            seconds: f64::from(seconds),
            link_seconds: f64::from(link),
        })
    }

    fn groups(link: bool) -> impl Strategy<Value = Vec<Group>> {
        let items = prop::collection::vec(item(), 1..5);
        let group = (1..4_usize, items).prop_map(move |(blocks, mut items)| {
            if !link {
                items.iter_mut().for_each(|item| item.link_seconds = 0.0);
            }
            Group { blocks, items }
        });
        prop::collection::vec(group, 1..4)
    }

    /// The least time within the limits, over all choices.
    fn exhaustive(groups: &[Group], capacity: Capacity) -> Option<f64> {
        let blocks: Vec<&Group> = groups
            .iter()
            .flat_map(|group| (0..group.blocks).map(move |_| group))
            .collect();
        let zero = Item {
            bytes: 0,
            seconds: 0.0,
            link_seconds: 0.0,
        };
        let mut sums = vec![zero];
        for group in blocks {
            sums = sums
                .iter()
                .flat_map(|sum| {
                    group.items.iter().map(|item| Item {
                        bytes: sum.bytes + item.bytes,
                        seconds: sum.seconds + item.seconds,
                        link_seconds: sum.link_seconds + item.link_seconds,
                    })
                })
                .collect();
            sums.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.seconds.total_cmp(&b.seconds)));
            sums.dedup();
        }
        let fits = sums
            .iter()
            .filter(|sum| sum.bytes <= capacity.bytes && sum.link_seconds <= capacity.link_seconds);
        fits.map(|sum| sum.seconds).min_by(f64::total_cmp)
    }

    fn check(groups: &[Group], capacity: Capacity) -> Result<(f64, f64), TestCaseError> {
        let best = exhaustive(groups, capacity);
        let Some(found) = choose(groups, capacity) else {
            prop_assert!(best.is_none() || capacity.link_seconds < f64::INFINITY);
            return Ok((0.0, 0.0));
        };
        let best = best.unwrap();
        prop_assert!(found.total.bytes <= capacity.bytes);
        prop_assert!(found.total.link_seconds <= capacity.link_seconds);
        prop_assert_eq!(found.total, total(groups, &found.counts));
        for (group, counts) in groups.iter().zip(&found.counts) {
            prop_assert_eq!(counts.iter().sum::<usize>(), group.blocks);
        }
        prop_assert!(
            found.bound <= best + 1e-9,
            "the bound {} is above the optimum {}",
            found.bound,
            best
        );
        Ok((found.total.seconds, best))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn with_a_link_limit_choices_are_legal_and_bounds_hold(groups in groups(true), bytes in 0..300_u64, link in 0..60_u32) {
            check(&groups, Capacity { bytes, link_seconds: f64::from(link) })?;
        }
    }

    #[test]
    fn choices_are_close_to_the_best() {
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let (mut cases, mut exact, mut found, mut best) = (0, 0, 0.0, 0.0);
        for _ in 0..400 {
            let groups = groups(false).new_tree(&mut runner).unwrap().current();
            for bytes in (10..300).step_by(30) {
                let capacity = Capacity {
                    bytes,
                    link_seconds: f64::INFINITY,
                };
                let (seconds, least) = check(&groups, capacity).unwrap();
                cases += 1;
                exact += usize::from(seconds <= least);
                found += seconds;
                best += least;
            }
        }
        println!(
            "{exact} of {cases} exact, {:.3} % above the best in all",
            100.0 * (found / best - 1.0)
        );
        assert!(exact * 100 >= cases * 95 && found <= 1.01 * best);
    }
}
