//! Seeded test data without a dependency: SplitMix64 (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195).

use tightfit_ir::{Shape, Tensor};

/// A stream of pseudo-random numbers that its seed fixes for good.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The stream of that seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The stream of a seed and a name: what one of many named tensors is filled from.
    pub fn named(seed: u64, name: &str) -> Self {
        // FNV-1a, so that similar names start far apart.
        let hash = name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3)
        });
        Self(seed ^ hash)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `0..n`; `n` must not be 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.bits() % n
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Standard normal, by Box and Muller's transform.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Normal elements of that standard deviation, each of them an exact `f32`.
    pub fn tensor(&mut self, shape: impl Into<Shape>, std: f64) -> Tensor {
        let mut tensor = Tensor::zeros(shape);
        tensor.data.fill_with(|| round(std * self.normal()));
        tensor
    }
}

/// The nearest `f32`.
pub fn round(x: f64) -> f64 {
    f64::from(x as f32)
}
