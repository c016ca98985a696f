//! [`Simd`] in AVX2 and AVX-512.

use super::Simd;
use std::arch::x86_64::*;

/// Proof that AVX2, FMA and F16C can be executed; eight lanes.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

/// Proof that AVX-512F (and with it AVX2, FMA and F16C) can be executed; sixteen lanes.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(());

impl Avx2 {
    /// # Safety
    /// The processor has AVX2, FMA and F16C.
    #[inline(always)]
    pub unsafe fn new_unchecked() -> Self {
        Avx2(())
    }
}

impl Avx512 {
    /// # Safety
    /// The processor has AVX-512F.
    #[inline(always)]
    pub unsafe fn new_unchecked() -> Self {
        Avx512(())
    }
}

/// Trait methods whose body is one expression of intrinsics.
macro_rules! lanes {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $ty),*) -> $ret {
            // SAFETY: `self` proves that the instructions exist.
            unsafe { $body }
        }
    )*};
}

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;

    lanes! {
        fn splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        fn add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        fn sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        fn mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        fn div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        fn max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        fn min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        fn sqrt(a: __m256) -> __m256 = _mm256_sqrt_ps(a);
        fn round(a: __m256) -> __m256 =
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
        fn pow2(n: __m256) -> __m256 = {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        };
        fn reduce_add(a: __m256) -> f32 = {
            let b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_add_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps::<1>(c, c)))
        };
        fn reduce_max(a: __m256) -> f32 = {
            let b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
            let c = _mm_max_ps(b, _mm_movehl_ps(b, b));
            _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps::<1>(c, c)))
        };
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        // SAFETY: `self` proves the instruction, the caller vouches for the memory.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        // SAFETY: as in `load`.
        unsafe { _mm256_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_first(self, p: *const f32, n: usize) -> __m256 {
        // SAFETY: as in `load`; masked lanes are not accessed.
        unsafe { _mm256_maskload_ps(p, first8(n)) }
    }
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, v: __m256, n: usize) {
        // SAFETY: as in `load_first`.
        unsafe { _mm256_maskstore_ps(p, first8(n), v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m256 {
        // SAFETY: as in `load`.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: __m256) {
        // SAFETY: as in `load`.
        unsafe {
            let bits = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
            // Rounding could carry a NaN over; it gets the quiet bit instead.
            let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
            let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
            let high = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, nan));
            let packed = _mm256_permute4x64_epi64::<0b1000>(_mm256_packus_epi32(high, high));
            _mm_storeu_si128(p.cast(), _mm256_castsi256_si128(packed));
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m256 {
        // SAFETY: as in `load`.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: __m256) {
        // SAFETY: as in `load`.
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn transpose8(self, src: *const f32, ss: usize, dst: *mut f32, ds: usize) {
        // SAFETY: `self` proves the instructions, the caller vouches for the memory.
        unsafe { transpose8(src, ss, dst, ds) }
    }
}

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;

    lanes! {
        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        fn min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        fn sqrt(a: __m512) -> __m512 = _mm512_sqrt_ps(a);
        fn round(a: __m512) -> __m512 =
            _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
        fn pow2(n: __m512) -> __m512 = {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        };
        fn reduce_add(a: __m512) -> f32 = _mm512_reduce_add_ps(a);
        fn reduce_max(a: __m512) -> f32 = _mm512_reduce_max_ps(a);
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        // SAFETY: `self` proves the instruction, the caller vouches for the memory.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        // SAFETY: as in `load`.
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn load_first(self, p: *const f32, n: usize) -> __m512 {
        // SAFETY: as in `load`; masked lanes are not accessed.
        unsafe { _mm512_maskz_loadu_ps(first16(n), p) }
    }
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, v: __m512, n: usize) {
        // SAFETY: as in `load_first`.
        unsafe { _mm512_mask_storeu_ps(p, first16(n), v) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m512 {
        // SAFETY: as in `load`.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: __m512) {
        // SAFETY: as in `load`.
        unsafe {
            let bits = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
            // Rounding could carry a NaN over; it gets the quiet bit instead.
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            let rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x40_0000));
            let high = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded));
            _mm256_storeu_si256(p.cast(), high);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        // SAFETY: as in `load`.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: __m512) {
        // SAFETY: as in `load`.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)) }
    }
    #[inline(always)]
    unsafe fn transpose8(self, src: *const f32, ss: usize, dst: *mut f32, ds: usize) {
        // SAFETY: AVX-512F implies AVX2; the caller vouches for the memory.
        unsafe { transpose8(src, ss, dst, ds) }
    }
}

/// A mask of the first `min(n, 16)` lanes.
#[inline(always)]
fn first16(n: usize) -> __mmask16 {
    ((1u32 << n.min(16)) - 1) as __mmask16
}

/// A mask of the first `min(n, 8)` lanes.
///
/// # Safety
/// The processor has AVX2.
#[inline(always)]
unsafe fn first8(n: usize) -> __m256i {
    const WINDOW: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];
    // SAFETY: the window starts at 0..=8 and is eight long.
    unsafe { _mm256_loadu_si256(WINDOW.as_ptr().add(8 - n.min(8)).cast()) }
}

/// See [`Simd::transpose8`].
///
/// # Safety
/// As there, and the processor has AVX2.
#[inline(always)]
unsafe fn transpose8(src: *const f32, ss: usize, dst: *mut f32, ds: usize) {
    // SAFETY: the caller vouches for the instructions and for eight rows on either side.
    unsafe {
        // Row i beside row i + 4, so that no shuffle has to cross the 128-bit halves later.
        let pair = |i: usize, half: usize| {
            let low = _mm256_castps128_ps256(_mm_loadu_ps(src.add(i * ss + half * 4)));
            _mm256_insertf128_ps::<1>(low, _mm_loadu_ps(src.add((i + 4) * ss + half * 4)))
        };
        for half in 0..2 {
            let (r0, r1, r2, r3) = (pair(0, half), pair(1, half), pair(2, half), pair(3, half));
            let (t0, t1) = (_mm256_unpacklo_ps(r0, r1), _mm256_unpackhi_ps(r0, r1));
            let (t2, t3) = (_mm256_unpacklo_ps(r2, r3), _mm256_unpackhi_ps(r2, r3));
            let out = dst.add(half * 4 * ds);
            _mm256_storeu_ps(out, _mm256_shuffle_ps::<0x44>(t0, t2));
            _mm256_storeu_ps(out.add(ds), _mm256_shuffle_ps::<0xEE>(t0, t2));
            _mm256_storeu_ps(out.add(2 * ds), _mm256_shuffle_ps::<0x44>(t1, t3));
            _mm256_storeu_ps(out.add(3 * ds), _mm256_shuffle_ps::<0xEE>(t1, t3));
        }
    }
}
