//! Hill-climbing on the placement order.
//!
//! A move takes an item that makes the peak, or one that is live together with it, and puts it earlier
//! in the order, so that it chooses among the gaps before others do. Only what comes after is placed
//! anew, and only until something ends above the current peak. Equal peaks are accepted: most of the
//! landscape is flat. The idea is that of the hill-climbing allocator in Arm's Vela compiler.

use super::greedy::Pass;
use super::shelf::{Budget, Item, Shelf};

/// Draws of an item that is live together with the topmost one, before any item will do.
const DRAWS: usize = 100;

/// The best placement found from `pass` until `target` is met or the budget is spent; never a worse one.
pub(super) fn improve(items: &[Item], pass: Pass, target: u64, budget: &mut Budget) -> Shelf {
    let Pass {
        mut order,
        fit,
        mut shelf,
    } = pass;
    let mut rank = ranks(&order);
    let mut trial = Shelf::default();
    let mut rng = Rng(0x9E37_79B9_7F4A_7C15);
    while shelf.peak() > target && !budget.is_spent() {
        // Copying what stays and drawing the move cost about one look per item each.
        budget.spend(2 * items.len());
        let from = rank[draw(items, &shelf, &mut rng)];
        if from == 0 {
            continue;
        }
        // Half of the moves are short: they disturb little, so they are quick and often succeed.
        let furthest = if rng.below(2) == 0 {
            from
        } else {
            from.min(1 + items.len() / 20)
        };
        let to = from - 1 - rng.below(furthest);

        order[to..=from].rotate_right(1);
        trial.clone_filtered(&shelf, |item| rank[item as usize] < to);
        if trial.fill(items, &order[to..], fit, shelf.peak(), budget) {
            std::mem::swap(&mut shelf, &mut trial);
            for (r, &item) in order.iter().enumerate().take(from + 1).skip(to) {
                rank[item as usize] = r;
            }
        } else {
            order[to..=from].rotate_left(1);
        }
    }
    shelf
}

/// The item to move: a topmost one, or twice as often one that is live together with it.
fn draw(items: &[Item], shelf: &Shelf, rng: &mut Rng) -> usize {
    let topmost: Vec<u32> = shelf.topmost().collect();
    let top = topmost[rng.below(topmost.len())] as usize;
    if rng.below(3) == 0 {
        return top;
    }
    let mut peer = top;
    for _ in 0..DRAWS {
        peer = rng.below(items.len());
        if items[peer].life.meets(items[top].life) {
            break;
        }
    }
    peer
}

/// The inverse of an order: each item's position in it.
fn ranks(order: &[u32]) -> Vec<usize> {
    let mut ranks = vec![0; order.len()];
    for (rank, &item) in order.iter().enumerate() {
        ranks[item as usize] = rank;
    }
    ranks
}

/// xorshift64* (Vigna, "An experimental exploration of Marsaglia's xorshift generators", 2016).
struct Rng(u64);

impl Rng {
    /// A number below `bound`, which is not 0; the slight bias does not matter here.
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32;
        (bits % bound as u64) as usize
    }
}
