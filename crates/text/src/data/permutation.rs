//! An order of many rows that takes no memory.

const ROUNDS: usize = 6;

/// Halves are no narrower than this: a permutation of few values is picked from among those of many, or it would be one of the
/// few that a small network makes.
const MIN_HALF_BITS: u32 = 5;

/// A pseudo-random permutation of `0..n`: a balanced Feistel network over the next even power of two, walked until it is below
/// `n` (Black & Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). For shuffling, not for secrets.
#[derive(Clone, Debug)]
pub(super) struct Permutation {
    n: u64,
    half_bits: u32,
    keys: [u64; ROUNDS],
}

impl Permutation {
    /// The permutation of `0..n` that belongs to `seed` and `epoch`; `n > 0`.
    pub(super) fn new(n: u64, seed: u64, epoch: u64) -> Self {
        debug_assert!(n > 0);
        let bits = u64::BITS - (n - 1).leading_zeros();
        Self {
            n,
            half_bits: bits.div_ceil(2).max(MIN_HALF_BITS),
            keys: std::array::from_fn(|round| hash(&[seed, epoch, round as u64])),
        }
    }

    /// Where `i < n` goes.
    pub(super) fn index(&self, mut i: u64) -> u64 {
        debug_assert!(i < self.n);
        // The network permutes a domain that contains 0..n, so walking along the cycle of `i` comes back below `n`. The domain
        // is at most four times `n`, or 1024: a few steps on average, and no more steps than the domain has values.
        loop {
            i = self.network(i);
            if i < self.n {
                return i;
            }
        }
    }

    fn network(&self, i: u64) -> u64 {
        let mask = (1 << self.half_bits) - 1;
        let (mut left, mut right) = (i >> self.half_bits, i & mask);
        for key in self.keys {
            (left, right) = (right, left ^ (mix(right ^ key) & mask));
        }
        left << self.half_bits | right
    }
}

/// A hash of a sequence of counters: each is mixed in before the next, so nearby ones give unrelated hashes.
pub(super) fn hash(key: &[u64]) -> u64 {
    key.iter().fold(0, |state, &part| mix(state ^ part))
}

/// A step of SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
fn mix(state: u64) -> u64 {
    let z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_bijection(n in 1u64..3000, seed: u64, epoch: u64) {
            let permutation = Permutation::new(n, seed, epoch);
            let mut seen = vec![false; n as usize];
            for i in 0..n {
                let image = permutation.index(i) as usize;
                prop_assert!(!std::mem::replace(&mut seen[image], true), "{} is hit twice", image);
            }
        }

        #[test]
        fn it_stays_below_n_for_any_n(n in 1u64.., i: u64, seed: u64) {
            prop_assert!(Permutation::new(n, seed, 0).index(i % n) < n);
        }
    }

    /// Over many epochs, each of six values comes first, second, … equally often, and all 720 orders come up.
    #[test]
    fn small_orders_are_even() {
        const EPOCHS: u64 = 72_000;
        let mut places = [[0u32; 6]; 6];
        let mut orders = std::collections::BTreeMap::new();
        for epoch in 0..EPOCHS {
            let permutation = Permutation::new(6, 1, epoch);
            let order: [u64; 6] = std::array::from_fn(|i| permutation.index(i as u64));
            for (place, &value) in places.iter_mut().zip(&order) {
                place[value as usize] += 1;
            }
            *orders.entry(order).or_insert(0u32) += 1;
        }
        // Five standard deviations of a binomial count.
        for &count in places.iter().flatten() {
            assert!((f64::from(count) - 12_000.0).abs() < 500.0, "{places:?}");
        }
        assert_eq!(orders.len(), 720);
        // Chi-squared with 719 degrees of freedom: mean 719, standard deviation 38.
        let chi: f64 = orders
            .values()
            .map(|&count| (f64::from(count) - 100.0).powi(2) / 100.0)
            .sum();
        assert!(chi < 719.0 + 5.0 * 38.0, "{chi}");
    }
}
