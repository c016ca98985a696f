//! One source for every instruction set.
//!
//! A kernel is written once, generic over [`Simd`], as an `#[inline(always)]` body. The
//! [`multiversion!`](crate::multiversion) macro compiles that body under each set of target
//! features and picks one by [`Isa`] at run time:
//!
//! ```
//! use tightfit_cpu::{multiversion, simd::{Isa, Simd}};
//!
//! multiversion! {
//!     /// `x[i] *= alpha` for `i < n`.
//!     ///
//!     /// # Safety
//!     /// `x` points to `n` floats and this machine can run `isa`.
//!     pub unsafe fn scale(x: *mut f32, n: usize, alpha: f32) = scale_body;
//! }
//!
//! #[inline(always)]
//! unsafe fn scale_body<S: Simd>(s: S, x: *mut f32, n: usize, alpha: f32) {
//!     let alpha = s.splat(alpha);
//!     for i in (0..n).step_by(S::LANES) {
//!         // SAFETY: only the lanes below `n` are touched.
//!         unsafe {
//!             let v = s.load_first(x.add(i), n - i);
//!             s.store_first(x.add(i), s.mul(v, alpha), n - i);
//!         }
//!     }
//! }
//!
//! let mut x = [1.0, 2.0, 3.0];
//! // SAFETY: the pointer and length come from one array; `detect` names what can run.
//! unsafe { scale(Isa::detect(), x.as_mut_ptr(), x.len(), 2.0) };
//! assert_eq!(x, [2.0, 4.0, 6.0]);
//! ```
//!
//! A value of a [`Simd`] type is the proof that its instructions can be executed, so arithmetic
//! is safe and only memory access is not. Every function between the macro and an intrinsic must
//! be `#[inline(always)]`, or it is compiled without the target features and runs up to a hundred
//! times slower. A closure cannot be: write a loop instead of passing vector code to a function.

/// The instruction sets that kernels are compiled for, widest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// [`Avx512`](Isa::Avx512), and products of bfloat16 by AVX512_BF16.
    Avx512Bf16,
    /// AVX-512F: 16 lanes.
    Avx512,
    /// AVX2, FMA and F16C: 8 lanes.
    Avx2,
    /// What the target's baseline offers: 8 lanes, for the compiler to vectorise.
    Portable,
    /// [`Portable`](Isa::Portable), with products of bfloat16 as AVX512_BF16 makes them: for tests on machines without it, as it is
    /// never the best.
    PortableBf16,
}

impl Isa {
    /// Every one that there is.
    pub const ALL: [Isa; 5] = [
        Isa::Avx512Bf16,
        Isa::Avx512,
        Isa::Avx2,
        Isa::Portable,
        Isa::PortableBf16,
    ];

    /// The name in plans and files.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Avx512Bf16 => "avx512-bf16",
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
            Isa::PortableBf16 => "portable-bf16",
        }
    }

    /// Whether it multiplies pairs of bfloat16.
    pub fn multiplies_bf16(self) -> bool {
        matches!(self, Isa::Avx512Bf16 | Isa::PortableBf16)
    }

    /// The instruction set that is fastest on this machine, among those that it can run.
    pub fn detect() -> Isa {
        match Self::widest() {
            Isa::Avx512Bf16 if !pairs_are_quick() => Isa::Avx512,
            isa => isa,
        }
    }

    /// Every instruction set that this machine can run.
    pub fn available() -> &'static [Isa] {
        match Self::widest() {
            Isa::Avx512Bf16 => &Self::ALL,
            Isa::Avx512 => &Self::ALL[1..],
            Isa::Avx2 => &Self::ALL[2..],
            Isa::Portable | Isa::PortableBf16 => &Self::ALL[3..],
        }
    }

    /// The first that this machine can run.
    fn widest() -> Isa {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            if avx2 && is_x86_feature_detected!("f16c") {
                if is_x86_feature_detected!("avx512f") {
                    if is_x86_feature_detected!("avx512bf16") {
                        return Isa::Avx512Bf16;
                    }
                    return Isa::Avx512;
                }
                return Isa::Avx2;
            }
        }
        Isa::Portable
    }
}

/// Whether a product of pairs of bfloat16 (`VDPBF16PS`) is quicker than the two of `f32` that do the same work.
///
/// It is on AMD's processors and on Intel's first that had it, Cooper Lake. Intel's later ones, made to multiply bfloat16 by AMX, issue
/// one in two cycles where they issue four FMAs: measured on model 207, Emerald Rapids, 84 GFLOP/s of a core against 170 of FMAs. A
/// timing would tell as well, but what is chosen decides the bits of results, and must be the same in every run.
#[cfg(target_arch = "x86_64")]
fn pairs_are_quick() -> bool {
    use std::arch::x86_64::__cpuid;
    let (vendor, version) = (__cpuid(0), __cpuid(1).eax);
    let is_intel = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"GenuineIntel";
    let model = (version >> 4 & 0xf) | (version >> 12 & 0xf0);
    !is_intel || model == COOPER_LAKE
}

/// The model number that Cooper Lake shares with its forerunners, which have no such products.
#[cfg(target_arch = "x86_64")]
const COOPER_LAKE: u32 = 0x55;

#[cfg(not(target_arch = "x86_64"))]
fn pairs_are_quick() -> bool {
    false
}

/// Vectors of `f32` and what kernels do with them.
///
/// Lane order of the reductions is fixed for each type, so a result depends on the instruction
/// set only, never on threads or alignment.
pub trait Simd: Copy + Send + Sync {
    /// A vector of [`LANES`](Simd::LANES) floats.
    type V: Copy;
    /// Floats in one vector.
    const LANES: usize;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// `a + b`
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once where the hardware can.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of `a` and `b`; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller of `a` and `b`; `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Square root.
    fn sqrt(self, a: Self::V) -> Self::V;
    /// The nearest integer, ties to even, for |a| < 2²².
    fn round(self, a: Self::V) -> Self::V;
    /// 2ⁿ for integer-valued `n` in −126..=127.
    fn pow2(self, n: Self::V) -> Self::V;
    /// The sum of all lanes.
    fn reduce_add(self, a: Self::V) -> f32;
    /// The largest lane.
    fn reduce_max(self, a: Self::V) -> f32;

    /// Reads [`LANES`](Simd::LANES) floats, at any alignment.
    ///
    /// # Safety
    /// All lanes of `p` are readable.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// Writes all lanes, at any alignment.
    ///
    /// # Safety
    /// All lanes of `p` are writable.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// Reads the first `min(n, LANES)` floats; the other lanes are zero.
    ///
    /// # Safety
    /// Those floats are readable.
    unsafe fn load_first(self, p: *const f32, n: usize) -> Self::V;
    /// Writes the first `min(n, LANES)` lanes.
    ///
    /// # Safety
    /// Those floats are writable.
    unsafe fn store_first(self, p: *mut f32, v: Self::V, n: usize);

    /// Reads [`LANES`](Simd::LANES) bfloat16 numbers, exactly.
    ///
    /// # Safety
    /// All lanes of `p` are readable.
    unsafe fn load_bf16(self, p: *const u16) -> Self::V;
    /// Writes all lanes, rounded to the nearest bfloat16, ties to even; NaN stays NaN.
    ///
    /// # Safety
    /// All lanes of `p` are writable.
    unsafe fn store_bf16(self, p: *mut u16, v: Self::V);
    /// Reads [`LANES`](Simd::LANES) binary16 numbers, exactly.
    ///
    /// # Safety
    /// All lanes of `p` are readable.
    unsafe fn load_f16(self, p: *const u16) -> Self::V;
    /// Writes all lanes, rounded to the nearest binary16, ties to even; what is too large is infinite.
    ///
    /// # Safety
    /// All lanes of `p` are writable.
    unsafe fn store_f16(self, p: *mut u16, v: Self::V);

    /// Copies an 8 × 8 block transposed: `dst[j * dst_stride + i] = src[i * src_stride + j]`.
    ///
    /// # Safety
    /// Eight rows of eight floats are readable at `src` and writable at `dst`, without overlap.
    #[inline(always)]
    unsafe fn transpose8(self, src: *const f32, src_stride: usize, dst: *mut f32, dst_stride: usize) {
        for i in 0..8 {
            for j in 0..8 {
                // SAFETY: within the eight rows of eight floats that the caller vouches for.
                unsafe { *dst.add(j * dst_stride + i) = *src.add(i * src_stride + j) };
            }
        }
    }
}

/// Baseline instructions, eight lanes.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

impl Portable {
    #[inline(always)]
    fn map2(a: [f32; 8], b: [f32; 8], f: impl Fn(f32, f32) -> f32) -> [f32; 8] {
        std::array::from_fn(|i| f(a[i], b[i]))
    }

    /// Halves, quarters, pairs: the order in which the vector units reduce.
    #[inline(always)]
    fn reduce(a: [f32; 8], f: impl Fn(f32, f32) -> f32) -> f32 {
        let b: [f32; 4] = std::array::from_fn(|i| f(a[i], a[i + 4]));
        f(f(b[0], b[2]), f(b[1], b[3]))
    }
}

impl Simd for Portable {
    type V = [f32; 8];
    const LANES: usize = 8;

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 8] {
        [x; 8]
    }
    #[inline(always)]
    fn add(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        Self::map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        Self::map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        Self::map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        Self::map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        // Without the instruction `mul_add` is a library call per lane.
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
        } else {
            std::array::from_fn(|i| a[i] * b[i] + c[i])
        }
    }
    #[inline(always)]
    fn max(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        Self::map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        Self::map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn sqrt(self, a: [f32; 8]) -> [f32; 8] {
        a.map(f32::sqrt)
    }
    #[inline(always)]
    fn round(self, a: [f32; 8]) -> [f32; 8] {
        // 1.5 · 2²³: adding it leaves no bits for a fraction.
        const MAGIC: f32 = 12_582_912.0;
        a.map(|x| (x + MAGIC) - MAGIC)
    }
    #[inline(always)]
    fn pow2(self, n: [f32; 8]) -> [f32; 8] {
        n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    fn reduce_add(self, a: [f32; 8]) -> f32 {
        Self::reduce(a, |a, b| a + b)
    }
    #[inline(always)]
    fn reduce_max(self, a: [f32; 8]) -> f32 {
        Self::reduce(a, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> [f32; 8] {
        // SAFETY: the caller vouches for eight floats; arrays need no more than f32's alignment.
        unsafe { p.cast::<[f32; 8]>().read() }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: [f32; 8]) {
        // SAFETY: as in `load`.
        unsafe { p.cast::<[f32; 8]>().write(v) }
    }
    #[inline(always)]
    unsafe fn load_first(self, p: *const f32, n: usize) -> [f32; 8] {
        // SAFETY: the caller vouches for the first `n` floats.
        std::array::from_fn(|i| if i < n { unsafe { *p.add(i) } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, v: [f32; 8], n: usize) {
        for (i, x) in v.into_iter().enumerate().take(n) {
            // SAFETY: the caller vouches for the first `n` floats.
            unsafe { *p.add(i) = x };
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> [f32; 8] {
        // SAFETY: the caller vouches for eight numbers.
        let bits = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        bits.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: [f32; 8]) {
        // SAFETY: as in `load_bf16`.
        unsafe {
            p.cast::<[u16; 8]>()
                .write_unaligned(v.map(|x| half::bf16::from_f32(x).to_bits()))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> [f32; 8] {
        // SAFETY: as in `load_bf16`.
        let bits = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        bits.map(|bits| half::f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: [f32; 8]) {
        // SAFETY: as in `load_bf16`.
        unsafe {
            p.cast::<[u16; 8]>()
                .write_unaligned(v.map(|x| half::f16::from_f32(x).to_bits()))
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86;
#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

/// Compiles a generic kernel body for every [`Isa`](crate::simd::Isa); see the
/// [module](crate::simd) for an example.
///
/// `unsafe fn name(args…) -> Ret = body;` defines `unsafe fn name(isa: Isa, args…) -> Ret`, which
/// calls `body(token, args…)` where `token` implements [`Simd`](crate::simd::Simd). Part of the
/// contract of the function defined is that this machine can run `isa`.
#[macro_export]
macro_rules! multiversion {
    (
        $(#[$meta:meta])*
        $vis:vis unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident;
    ) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(isa: $crate::simd::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f")]
            unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the instructions exist here; the rest is the caller's contract.
                unsafe { $body($crate::simd::Avx512::new_unchecked(), $($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the instructions exist here; the rest is the caller's contract.
                unsafe { $body($crate::simd::Avx2::new_unchecked(), $($arg),*) }
            }
            match isa {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the caller vouches that this machine can run `isa`.
                $crate::simd::Isa::Avx512 | $crate::simd::Isa::Avx512Bf16 => unsafe { avx512($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: the caller vouches that this machine can run `isa`.
                $crate::simd::Isa::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: the caller's contract.
                _ => unsafe { $body($crate::simd::Portable, $($arg),*) },
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    multiversion! {
        unsafe fn check(failures: &mut Vec<String>) = check_body;
    }

    #[inline(always)]
    unsafe fn check_body<S: Simd>(s: S, failures: &mut Vec<String>) {
        let n = S::LANES;
        let x: Vec<f32> = (0..n).map(|i| i as f32 * 0.75 - 3.0).collect();
        let mut out = vec![0.0; n];
        let mut expect = |what: &str, v: S::V, f: &dyn Fn(f32) -> f32| {
            // SAFETY: `out` holds `LANES` floats.
            unsafe { s.store(out.as_mut_ptr(), v) };
            let want: Vec<f32> = x.iter().map(|&x| f(x)).collect();
            if out != want {
                failures.push(format!("{what}: {out:?}, not {want:?}"));
            }
        };
        // SAFETY: `x` holds `LANES` floats.
        let v = unsafe { s.load(x.as_ptr()) };
        let two = s.splat(2.0);
        expect("add", s.add(v, two), &|x| x + 2.0);
        expect("sub", s.sub(v, two), &|x| x - 2.0);
        expect("mul", s.mul(v, two), &|x| x * 2.0);
        expect("div", s.div(v, two), &|x| x / 2.0);
        expect("fma", s.fma(v, v, two), &|x| x * x + 2.0);
        expect("max", s.max(v, two), &|x| x.max(2.0));
        expect("min", s.min(v, two), &|x| x.min(2.0));
        expect("sqrt", s.sqrt(s.mul(v, v)), &f32::abs);
        expect("round", s.round(v), &f32::round_ties_even);
        expect("pow2", s.pow2(s.round(v)), &|x| x.round_ties_even().exp2());
        for k in 0..=n {
            // SAFETY: `x` holds `LANES` floats.
            let first = unsafe { s.load_first(x.as_ptr(), k) };
            let i = std::cell::Cell::new(0);
            expect("load_first", first, &|x| {
                if i.replace(i.get() + 1) < k { x } else { 0.0 }
            });
        }
        for k in 0..=n {
            let mut part = vec![9.0; n];
            // SAFETY: `part` holds `LANES` floats.
            unsafe { s.store_first(part.as_mut_ptr(), v, k) };
            if part[..k] != x[..k] || part[k..].iter().any(|&p| p != 9.0) {
                failures.push(format!("store_first {k}: {part:?}"));
            }
        }
        let special = [
            1.0,
            1.0 + 1.0 / 256.0,
            1.0 + 3.0 / 256.0,
            70000.0,
            1e-7,
            -0.0,
            f32::INFINITY,
            f32::NAN,
        ];
        for (start, numbers) in [(0, &x), (0, &special.repeat(2))] {
            let numbers = &numbers[start..start + n];
            let (mut narrow, mut wide) = (vec![0_u16; n], vec![0.0_f32; n]);
            let same = |a: &[f32], b: Vec<f32>| {
                a.iter()
                    .zip(&b)
                    .all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()))
            };
            // SAFETY: all hold `LANES` numbers.
            unsafe {
                let v = s.load(numbers.as_ptr());
                s.store_bf16(narrow.as_mut_ptr(), v);
                s.store(wide.as_mut_ptr(), s.load_bf16(narrow.as_ptr()));
                let want = numbers.iter().map(|&x| half::bf16::from_f32(x).to_f32()).collect();
                if !same(&wide, want) {
                    failures.push(format!("bf16: {numbers:?} became {wide:?}"));
                }
                s.store_f16(narrow.as_mut_ptr(), v);
                s.store(wide.as_mut_ptr(), s.load_f16(narrow.as_ptr()));
                let want = numbers.iter().map(|&x| half::f16::from_f32(x).to_f32()).collect();
                if !same(&wide, want) {
                    failures.push(format!("f16: {numbers:?} became {wide:?}"));
                }
            }
        }
        if s.reduce_add(v) != x.iter().sum::<f32>() || s.reduce_max(v) != x[n - 1] {
            failures.push(format!("reduce: {} {}", s.reduce_add(v), s.reduce_max(v)));
        }
        let (src, mut dst): (Vec<f32>, _) = ((0..80).map(|i| i as f32).collect(), vec![0.0; 88]);
        // SAFETY: eight rows of ten and eight rows of eleven floats.
        unsafe { s.transpose8(src.as_ptr(), 10, dst.as_mut_ptr(), 11) };
        if (0..64).any(|i| dst[i % 8 * 11 + i / 8] != src[i / 8 * 10 + i % 8]) {
            failures.push(format!("transpose8: {dst:?}"));
        }
    }

    #[test]
    fn every_operation_on_every_instruction_set() {
        for &isa in Isa::available() {
            let mut failures = Vec::new();
            // SAFETY: `available` lists what can run.
            unsafe { check(isa, &mut failures) };
            assert!(failures.is_empty(), "{isa:?}: {failures:#?}");
        }
    }
}
