//! Random bits by counter: a function of a key, a count and an index, with no state between calls. So they are the same for any
//! number of threads, when a value is computed again, and after a run is resumed.
//!
//! A stream's words come from the finalizer of MurmurHash3 (Appleby 2011, public domain), applied twice with a word of the stream
//! mixed in before each; the stream's two words come from the finalizer of SplitMix64 (Steele, Lea and Flood 2014,
//! doi:10.1145/2660193.2660195).

/// A key of a name: FNV-1a, so that similar names start far apart.
fn key(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

/// A key of a job's seed and a name.
pub fn seeded(seed: u64, name: &str) -> u64 {
    mix(mix(seed) ^ key(name))
}

/// One of 2⁶⁴ streams of 2³² words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    low: u32,
    high: u32,
}

impl Stream {
    /// The stream of a key and two counts, such as a step and the upper half of an element's index.
    pub fn new(key: u64, step: u64, high: u64) -> Self {
        let z = next(next(next(key) ^ step).wrapping_add(high));
        Self {
            low: z as u32,
            high: (z >> 32) as u32,
        }
    }

    /// Word `index`: 32 bits.
    #[inline(always)]
    pub fn bits(self, index: u32) -> u32 {
        finish(finish(index.wrapping_add(self.low)) ^ self.high)
    }
}

/// MurmurHash3's `fmix32`.
#[inline(always)]
fn finish(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x85EB_CA6B);
    x = (x ^ (x >> 13)).wrapping_mul(0xC2B2_AE35);
    x ^ (x >> 16)
}

/// One step of SplitMix64 from that state.
fn next(state: u64) -> u64 {
    mix(state.wrapping_add(STEP))
}

/// What SplitMix64 adds to its state from number to number: 2⁶⁴ over the golden ratio.
pub const STEP: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finalizer of SplitMix64.
#[inline(always)]
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_is_a_fair_coin_in_index_step_and_key() {
        const N: u32 = 1 << 16;
        let a = Stream::new(key("a"), 1, 0);
        let streams: [&dyn Fn(u32) -> u32; 4] = [
            &|i| a.bits(i),
            &|i| Stream::new(key("a"), u64::from(i), 0).bits(7),
            &|i| Stream::new(key(&i.to_string()), 1, 0).bits(7),
            // Neighbours, and neighbouring steps, agree in half of the bits.
            &|i| a.bits(i) ^ a.bits(i + 1) ^ Stream::new(key("a"), 2, 0).bits(i),
        ];
        for (which, stream) in streams.iter().enumerate() {
            for bit in 0..32 {
                let ones = (0..N).filter(|&i| stream(i) >> bit & 1 == 1).count() as f64;
                // Six standard deviations: half of the root of N each.
                let off = (ones - f64::from(N) / 2.0).abs() / (f64::from(N).sqrt() / 2.0);
                assert!(off < 6.0, "stream {which}, bit {bit}: {ones} of {N}");
            }
        }
    }
}
