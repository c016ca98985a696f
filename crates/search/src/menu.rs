//! The ways of one block to keep less for its backward, as far as nothing beats them.
//!
//! Each part of a block either keeps what the backward reads of it, or runs again. What runs again needs its operands, so results
//! that the backward does not read make their parts run again too where a clone reads them (see `tightfit_pass::recompute`).
//!
//! Parts are decided from the last to the first. What a part costs then depends on nothing but whether a clone behind it reads a
//! result of it that is not saved: a result that is saved is there if its part keeps it, and there again if its part runs again.
//! So ways that ask the same of the parts still to come compare by bytes and seconds alone, and what is beaten can be dropped
//! at once. The front is exact unless it outgrows [`MAX_WAYS`]. Then every other way is dropped, evenly over the bytes.
//!
//! Results far smaller than the block's others (one number per row) are no decision: they are kept, unless their part runs again
//! anyway.

use std::collections::BTreeMap;

use tightfit_pass::SMALLEST;

use crate::blocks::{Class, Part};

/// Ways that are followed at a time.
pub const MAX_WAYS: usize = 4096;

/// Parts that save less than this fraction of their block are not worth running again by themselves.
const TINY: u64 = 64;

/// One way.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Way {
    /// Parts that run again, ascending. None of their results is kept.
    pub recomputed: Vec<usize>,
    /// Results that leave memory and come back, by part and number.
    pub offloaded: Vec<(usize, usize)>,
    /// Bytes that stay in memory from the block's forward to its backward.
    pub resident_bytes: u64,
    /// Time of what runs again.
    pub seconds: f64,
    /// Bytes over the link, there and back together.
    pub link_bytes: u64,
}

/// The ways that no other beats in bytes and seconds, from all kept to least kept.
pub fn menu(class: &Class) -> Vec<Way> {
    let tiny = class.saved_bytes() / TINY;
    ways(class, |part| part.saved_bytes() < tiny)
}

/// The way of whole-block checkpointing: everything runs again that the backward reads, from what enters the block. The block's
/// last product does not, for its result enters the next block.
pub fn whole_block(class: &Class) -> Way {
    let mut way = ways(class, |_| false).pop().unwrap_or_default();
    way.recomputed.sort_unstable();
    way
}

/// The ways of `menu`, each also with its largest saved results offloaded, one more at a time.
pub fn with_offload(class: &Class, menu: &[Way]) -> Vec<Way> {
    let mut ways = menu.to_vec();
    for way in menu {
        let kept = (0..class.parts.len()).filter(|part| !way.recomputed.contains(part));
        let results = kept.flat_map(|part| {
            class.parts[part]
                .saved
                .iter()
                .map(move |&(output, bytes)| (part, output, bytes))
        });
        let mut results: Vec<_> = results.filter(|&(.., bytes)| bytes >= SMALLEST).collect();
        results.sort_by_key(|&(part, output, bytes)| (u64::MAX - bytes, part, output));
        let mut next = way.clone();
        for (part, output, bytes) in results {
            next.offloaded.push((part, output));
            next.resident_bytes -= bytes;
            next.link_bytes += 2 * bytes;
            ways.push(next.clone());
        }
    }
    ways
}

/// A way while it is decided.
#[derive(Clone)]
struct Partial {
    way: Way,
    /// Parts still to come of which a clone reads a result that is not saved, ascending.
    asked: Vec<usize>,
}

fn ways(class: &Class, always_kept: impl Fn(&Part) -> bool) -> Vec<Way> {
    let mut partial = vec![Partial {
        way: Way::default(),
        asked: Vec::new(),
    }];
    for (index, part) in class.parts.iter().enumerate().rev() {
        let mut next = Vec::with_capacity(2 * partial.len());
        for mut at in partial {
            let asked = at.asked.last() == Some(&index);
            let droppable = !part.saved.is_empty() && part.repeatable && !always_kept(part);
            if asked || droppable {
                next.push(again(class, at.clone(), index));
            }
            if !asked {
                at.way.resident_bytes += part.saved_bytes();
                next.push(at);
            }
        }
        partial = unbeaten(next);
    }
    let mut ways: Vec<Way> = partial.into_iter().map(|partial| partial.way).collect();
    ways.reverse();
    for way in &mut ways {
        way.recomputed.reverse();
    }
    ways
}

/// The way in which part `index` runs again too.
fn again(class: &Class, mut at: Partial, index: usize) -> Partial {
    at.asked.retain(|&part| part != index);
    at.way.recomputed.push(index);
    at.way.seconds += class.parts[index].seconds;
    for read in &class.parts[index].reads {
        if !class.parts[read.part].saves(read.output) && !at.asked.contains(&read.part) {
            at.asked.push(read.part);
        }
    }
    at.asked.sort_unstable();
    at
}

/// Without ways that another one beats which asks the same of the parts to come, by ascending bytes.
fn unbeaten(mut ways: Vec<Partial>) -> Vec<Partial> {
    let order = |way: &Way| (way.resident_bytes, way.seconds);
    ways.sort_by(|a, b| {
        let ((bytes, seconds), (other_bytes, other_seconds)) = (order(&a.way), order(&b.way));
        bytes.cmp(&other_bytes).then(seconds.total_cmp(&other_seconds))
    });
    let mut quickest: BTreeMap<Vec<usize>, f64> = BTreeMap::new();
    ways.retain(|at| match quickest.get_mut(&at.asked) {
        Some(quickest) if *quickest <= at.way.seconds => false,
        Some(quickest) => {
            *quickest = at.way.seconds;
            true
        }
        None => {
            quickest.insert(at.asked.clone(), at.way.seconds);
            true
        }
    });
    while ways.len() > MAX_WAYS {
        // The first and the last stay: the least kept, and all of it.
        let last = ways.len() - 1;
        let mut index = 0;
        ways.retain(|_| {
            index += 1;
            index % 2 == 1 || index == last + 1
        });
    }
    ways
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::blocks::{Block, Read};

    /// What a choice of dropped parts costs, by following every need: the definition that `ways` must agree with.
    fn evaluate(class: &Class, dropped: &[bool]) -> (u64, f64) {
        let parts = &class.parts;
        let mut again = dropped.to_vec();
        for index in (0..parts.len()).rev() {
            if again[index] {
                for read in &parts[index].reads {
                    let kept = parts[read.part].saves(read.output) && !dropped[read.part];
                    again[read.part] |= !kept;
                }
            }
        }
        let part = |(part, again): (&Part, bool)| match again {
            true => (0, part.seconds),
            false => (part.saved_bytes(), 0.0),
        };
        let costs = parts.iter().zip(again).map(part);
        costs.fold((0, 0.0), |(bytes, seconds), (b, s)| (bytes + b, seconds + s))
    }

    prop_compose! {
        /// Parts with up to two results, of which the backward reads some.
        fn class()(
            parts in prop::collection::vec(
                (1..50_u32, prop::collection::vec(0..900_u64, 0..3), prop::collection::vec((any::<usize>(), 0..2_usize), 0..3)),
                1..9,
            )
        ) -> Class {
            let parts: Vec<Part> = parts.into_iter().enumerate().map(|(index, (seconds, saved, reads))| Part {
                label: index.to_string(),
                seconds: f64::from(seconds),
                saved: saved.into_iter().enumerate().filter(|&(_, bytes)| bytes > 300).collect(),
                reads: match index {
                    0 => Vec::new(),
                    _ => reads.into_iter().map(|(part, output)| Read { part: part % index, output }).collect(),
                },
                repeatable: true,
            }).collect();
            Class { parts, blocks: Vec::<Block>::new() }
        }
    }

    proptest! {
        #[test]
        fn the_front_is_what_enumeration_finds(class in class()) {
            let decisions: Vec<usize> = (0..class.parts.len()).filter(|&part| !class.parts[part].saved.is_empty()).collect();
            let mut all: Vec<(u64, f64)> = (0..1_u32 << decisions.len()).map(|mask| {
                let mut dropped = vec![false; class.parts.len()];
                decisions.iter().enumerate().for_each(|(bit, &part)| dropped[part] = mask >> bit & 1 == 1);
                evaluate(&class, &dropped)
            }).collect();
            all.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
            let mut front: Vec<(u64, f64)> = Vec::new();
            for at in all {
                if front.last().is_none_or(|last| at.1 < last.1) {
                    front.push(at);
                }
            }
            front.reverse();
            let found: Vec<(u64, f64)> = ways(&class, |_| false).iter().map(|way| (way.resident_bytes, way.seconds)).collect();
            prop_assert_eq!(found, front);
        }
    }

    #[test]
    fn a_front_that_outgrows_its_limit_keeps_its_ends() {
        // Powers of two: no two of the 2^16 choices have the same bytes, and none beats another.
        let part = |bit: u32| Part {
            label: bit.to_string(),
            seconds: f64::from(1 << bit),
            saved: vec![(0, 1 << bit)],
            reads: Vec::new(),
            repeatable: true,
        };
        let class = Class {
            parts: (0..16).map(part).collect(),
            blocks: Vec::new(),
        };
        let ways = ways(&class, |_| false);
        assert!(ways.len() > MAX_WAYS / 4 && ways.len() <= MAX_WAYS, "{}", ways.len());
        assert!(ways.is_sorted_by(|a, b| a.resident_bytes > b.resident_bytes && a.seconds < b.seconds));
        assert_eq!((ways[0].resident_bytes, ways[0].seconds), (65535, 0.0));
        let last = &ways[ways.len() - 1];
        assert_eq!((last.resident_bytes, last.seconds), (0, 65535.0));
    }

    #[test]
    fn results_leave_memory_largest_first() {
        let part = |bytes: u64| Part {
            label: String::new(),
            seconds: 1.0,
            saved: vec![(0, bytes)],
            reads: Vec::new(),
            repeatable: false,
        };
        let class = Class {
            parts: [1 << 20, 1 << 10, 1 << 22].map(part).to_vec(),
            blocks: Vec::new(),
        };
        let menu = menu(&class);
        assert_eq!(menu.len(), 1);
        let ways = with_offload(&class, &menu);
        let found: Vec<_> = ways
            .iter()
            .map(|way| (way.resident_bytes, way.link_bytes, way.offloaded.clone()))
            .collect();
        let all = (5 << 20) + (1 << 10);
        assert_eq!(
            found,
            [
                (all, 0, vec![]),
                (all - (1 << 22), 2 << 22, vec![(2, 0)]),
                (1 << 10, 10 << 20, vec![(2, 0), (0, 0)]),
            ]
        );
    }
}
