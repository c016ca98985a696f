//! What every kernel test needs: seeded data, buffers with a fill pattern, comparison with an f64
//! reference.

use tightfit_cpu::kernel::Context;
use tightfit_cpu::pool::Pool;
use tightfit_cpu::simd::Isa;

/// xorshift64*: reproducible test data without a dependency.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Uniform in 0..n.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }

    /// Uniform in -scale..scale.
    pub fn f32(&mut self, scale: f32) -> f32 {
        ((self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale
    }

    pub fn vec(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.f32(scale)).collect()
    }
}

/// Documents of different lengths that cover `rows`: the `doc_start` of every row.
pub fn documents(random: &mut Random, rows: usize, longest: usize) -> Vec<i32> {
    let mut starts = Vec::with_capacity(rows);
    while starts.len() < rows {
        let start = starts.len();
        let length = (1 + random.below(longest)).min(rows - start);
        starts.extend(std::iter::repeat_n(start as i32, length));
    }
    starts
}

pub fn f64s(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&v| f64::from(v)).collect()
}

/// A value no kernel computes: finds outputs that were not written and writes past the end.
pub const FILL: f32 = f32::from_bits(0x7FA5_A5A5);

/// An output or workspace of `len` words filled with [`FILL`], with guard words behind it.
pub struct Buffer {
    words: Vec<f32>,
    len: usize,
}

const GUARD: usize = 64;

impl Buffer {
    pub fn new(len: usize) -> Self {
        Self {
            words: vec![FILL; len + GUARD],
            len,
        }
    }

    pub fn from(x: &[f32]) -> Self {
        let mut buffer = Self::new(x.len());
        buffer.words[..x.len()].copy_from_slice(x);
        buffer
    }

    pub fn bytes(bytes: u64) -> Self {
        assert_eq!(bytes % 4, 0, "workspaces are whole words");
        Self::new(bytes as usize / 4)
    }

    pub fn ptr(&mut self) -> *mut f32 {
        self.words.as_mut_ptr()
    }

    /// The contents, after checking that nothing was written behind them.
    pub fn get(&self) -> &[f32] {
        assert!(
            self.words[self.len..].iter().all(|v| v.to_bits() == FILL.to_bits()),
            "written past the end"
        );
        &self.words[..self.len]
    }

    /// A workspace's promise: its last word is written by every call.
    pub fn assert_last_word_written(&self) {
        if let Some(last) = self.get().last() {
            assert_ne!(last.to_bits(), FILL.to_bits(), "last word of the workspace not written");
        }
    }
}

/// Runs `kernel` for every available instruction set and 1, 2 and 3 threads; demands equal bits for
/// equal instruction sets, and hands each instruction set's result to `check`.
pub fn every_context(mut kernel: impl FnMut(&Context) -> Vec<Vec<f32>>, check: impl Fn(&[Vec<f32>])) {
    for &isa in Isa::available() {
        let mut first: Option<Vec<Vec<f32>>> = None;
        for threads in 1..=3 {
            let pool = Pool::new(threads, 256 << 10).expect("threads start");
            let outputs = kernel(&Context { pool: &pool, isa });
            match &first {
                None => {
                    check(&outputs);
                    first = Some(outputs);
                }
                Some(first) => {
                    for (i, (a, b)) in first.iter().zip(&outputs).enumerate() {
                        let same = a.iter().zip(b).all(|(x, y)| x.to_bits() == y.to_bits());
                        assert!(
                            same && a.len() == b.len(),
                            "output {i} differs with {threads} threads, {isa:?}"
                        );
                    }
                }
            }
        }
    }
}

/// Asserts `|got - want| <= tolerance * max(1, largest |want|)` for each element.
#[track_caller]
pub fn close(what: &str, got: &[f32], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let scale = want
        .iter()
        .filter(|w| w.is_finite())
        .fold(1.0f64, |m, w| m.max(w.abs()));
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(g) - w).abs();
        assert!(
            error <= tolerance * scale,
            "{what}[{i}]: got {g}, want {w} (error {error:e}, scale {scale:e})"
        );
    }
}

/// Checks `gradient` of `f` at `x` against central differences along random directions.
#[track_caller]
pub fn check_gradient(f: impl Fn(&[f64]) -> f64, x: &[f64], gradient: &[f64]) {
    assert_eq!(x.len(), gradient.len());
    let mut random = Random::new(99);
    for _ in 0..3 {
        let direction: Vec<f64> = x.iter().map(|_| f64::from(random.f32(1.0))).collect();
        let step = 1e-5;
        let moved = |sign: f64| -> Vec<f64> { x.iter().zip(&direction).map(|(x, d)| x + sign * step * d).collect() };
        let numeric = (f(&moved(1.0)) - f(&moved(-1.0))) / (2.0 * step);
        let analytic: f64 = gradient.iter().zip(&direction).map(|(g, d)| g * d).sum();
        let size: f64 = gradient.iter().zip(&direction).map(|(g, d)| (g * d).abs()).sum();
        assert!(
            (numeric - analytic).abs() <= 1e-6 * size.max(1e-3),
            "finite difference {numeric}, gradient {analytic}"
        );
    }
}

/// `Σ a · b`
pub fn inner(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
