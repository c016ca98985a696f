//! What the micro-kernel multiplies: words of 32 bits that hold one term of a sum, or two.

use crate::simd::{Portable, Simd};

/// How a word of A and a word of B are multiplied. Packed blocks are made of words, and all of the blocking counts in them.
pub(super) trait Terms<S: Simd>: Copy {
    /// Terms of the sum in a word.
    const IN_WORD: usize;

    /// The products of words of A and B, lane by lane, added to `acc`.
    fn multiply_add(self, s: S, a: S::V, b: S::V, acc: S::V) -> S::V;
}

/// A word is an `f32`.
#[derive(Clone, Copy)]
pub(super) struct Single;

impl<S: Simd> Terms<S> for Single {
    const IN_WORD: usize = 1;

    #[inline(always)]
    fn multiply_add(self, s: S, a: S::V, b: S::V, acc: S::V) -> S::V {
        s.fma(a, b, acc)
    }
}

/// A word is two bfloat16 of consecutive terms, the first one in its lower half, as AVX-512-BF16 multiplies them. A value is the proof
/// that the processor has those instructions, where the vectors are AVX-512's.
#[derive(Clone, Copy)]
pub(super) struct Pairs(());

impl Pairs {
    /// # Safety
    /// The processor has AVX512_BF16, if vectors of AVX-512 are multiplied.
    #[inline(always)]
    pub(super) unsafe fn new_unchecked() -> Self {
        Pairs(())
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Pairs, Terms};
    use crate::simd::Avx512;
    use std::arch::x86_64::{__m512, __m512bh, _mm512_dpbf16_ps};
    use std::mem::transmute;

    impl Terms<Avx512> for Pairs {
        const IN_WORD: usize = 2;

        #[inline(always)]
        fn multiply_add(self, _: Avx512, a: __m512, b: __m512, acc: __m512) -> __m512 {
            // SAFETY: `self` proves the instruction; all are vectors of 512 bits.
            unsafe { _mm512_dpbf16_ps(acc, transmute::<__m512, __m512bh>(a), transmute::<__m512, __m512bh>(b)) }
        }
    }
}

/// What the instruction does, so that everything around it can be tested where there is none.
impl Terms<Portable> for Pairs {
    const IN_WORD: usize = 2;

    #[inline(always)]
    fn multiply_add(self, s: Portable, a: [f32; 8], b: [f32; 8], acc: [f32; 8]) -> [f32; 8] {
        let high = |words: [f32; 8]| words.map(|word| f32::from_bits(word.to_bits() & 0xFFFF_0000));
        let low = |words: [f32; 8]| words.map(|word| f32::from_bits(word.to_bits() << 16));
        s.fma(low(a), low(b), s.fma(high(a), high(b), acc))
    }
}
