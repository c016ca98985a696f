//! What the blocks and the workspace of a product follow from.

use super::blocking::Blocking;
use super::matrix::Granularity;
use crate::floats::Float;
use crate::simd::Isa;
use tightfit_quant::Block;

/// The form of a product: its shape, and how its matrices are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// Rows of A and C.
    pub m: usize,
    /// Columns of B and C.
    pub n: usize,
    /// Columns of A, rows of B.
    pub k: usize,
    /// How A is stored.
    pub a: Float,
    /// How C is stored.
    pub c: Float,
    /// Whether B is decoded.
    pub(super) decoded: bool,
    pub(super) granularity: Granularity,
}

impl Form {
    /// A product in `f32`.
    pub fn new(m: usize, n: usize, k: usize) -> Self {
        Self {
            m,
            n,
            k,
            a: Float::F32,
            c: Float::F32,
            decoded: false,
            granularity: Granularity { k: 1, n: 1 },
        }
    }

    /// A and C stored like this.
    pub fn stored(self, a: Float, c: Float) -> Self {
        Self { a, c, ..self }
    }

    /// B in a quantised format; `transposed`: its stored rows are B's columns.
    pub fn decoding(self, block: Block, transposed: bool) -> Self {
        Self {
            decoded: true,
            granularity: Granularity::of(block, transposed),
            ..self
        }
    }

    /// Terms of the sum that the micro-kernel multiplies at once: two where A is stored in bfloat16 and there is an instruction for that.
    pub(crate) fn terms_in_word(&self, isa: Isa) -> usize {
        match self.a == Float::Bf16 && isa.multiplies_bf16() {
            true => 2,
            false => 1,
        }
    }

    /// Bytes of workspace that a product of this form uses with `threads` threads; exact.
    ///
    /// The packed block of B comes last and is filled to its end by every product, so that the last
    /// byte of the workspace is written whatever the threads do.
    pub fn workspace_bytes(&self, isa: Isa, threads: usize) -> u64 {
        let blocking = Blocking::new(isa, self);
        let each = blocking.packed_a().saturating_add(blocking.sums());
        let words = threads.saturating_mul(each).saturating_add(blocking.packed_b());
        4_u64.saturating_mul(words as u64)
    }

    /// What such a product moves in memory, in bytes, each weighed by what it costs: predicted times add it to the flops'.
    /// `transposed_a`: the columns of A are contiguous, not its rows, so that its blocks are copied.
    ///
    /// B is packed once; a copied A once for each column block; C is written by each deep block and read by all but the first. With
    /// the weights 4, 2 and 1 two rates fit the `f32` products of `docs/benchmarks.md` to 2 % (median; 8 % at worst).
    pub(crate) fn traffic_bytes(&self, isa: Isa, transposed_a: bool) -> f64 {
        let blocking = Blocking::new(isa, self);
        let words = |terms: usize| terms.div_ceil(self.terms_in_word(isa)) as f64;
        let (m, n, k) = (self.m as f64, self.n as f64, words(self.k));
        let converted = match self.a {
            Float::F32 => false,
            Float::Bf16 => self.terms_in_word(isa) == 1,
            Float::F16 => true,
        };
        let a = match transposed_a || converted {
            true => m * k * blocking.copies_of_a() as f64,
            false => 0.0,
        };
        let b = n * k * if self.decoded { DECODED } else { 1.0 };
        let c = m * n * (2 * blocking.count_deep_blocks()).saturating_sub(1) as f64;
        4.0 * (4.0 * b + 2.0 * a + c)
    }
}

/// What packing a decoded number takes, in terms of packing one that is stored as it is.
const DECODED: f64 = 3.0;
