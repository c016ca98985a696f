//! Floating-point numbers in memory, stored in 32 or 16 bits; kernels read and write all of them as `f32`.

use tightfit_ir::DType;

use crate::simd::Simd;

/// How a number is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float {
    /// IEEE 754 binary32.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE 754 binary16.
    F16,
}

impl Float {
    /// The storage of a dtype; `None` for what is no floating-point number.
    pub fn of(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::Bf16 => Some(Self::Bf16),
            DType::F16 => Some(Self::F16),
            DType::I32 | DType::U8 | DType::Block(_) => None,
        }
    }

    /// Bytes of one number.
    #[inline(always)]
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// A pointer to numbers that are stored one way or another, to read or to write.
///
/// Which way is asked for every vector: a branch that always goes the same way costs next to nothing beside the access, and there
/// is one kernel for all of them.
#[derive(Clone, Copy, Debug)]
pub struct Floats {
    ptr: *mut u8,
    stored: Float,
}

impl Floats {
    /// Numbers at `ptr`.
    #[inline(always)]
    pub fn new(ptr: *mut u8, stored: Float) -> Self {
        Self { ptr, stored }
    }

    /// `f32` numbers, only to be read.
    #[inline(always)]
    pub fn of(ptr: *const f32) -> Self {
        Self::new(ptr.cast_mut().cast(), Float::F32)
    }

    /// `f32` numbers.
    #[inline(always)]
    pub fn of_mut(ptr: *mut f32) -> Self {
        Self::new(ptr.cast(), Float::F32)
    }

    /// Writes `n` zeros.
    ///
    /// # Safety
    /// That many numbers are writable.
    pub unsafe fn clear(self, n: usize) {
        // SAFETY: the caller's contract; zero is all zero bits however it is stored.
        unsafe { self.ptr.write_bytes(0, n * self.stored.size()) };
    }

    /// Copies `n` numbers as they are stored, which must be the same way.
    ///
    /// # Safety
    /// That many are readable at `from` and writable here, without overlap.
    pub unsafe fn copy_from(self, from: Self, n: usize) {
        debug_assert_eq!(self.stored, from.stored);
        // SAFETY: the caller's contract.
        unsafe { self.ptr.copy_from_nonoverlapping(from.ptr, n * self.stored.size()) };
    }

    /// How they are stored.
    #[inline(always)]
    pub fn stored(self) -> Float {
        self.stored
    }

    /// Their address.
    #[inline(always)]
    pub fn address(self) -> *mut u8 {
        self.ptr
    }

    /// The numbers from number `index` on.
    ///
    /// # Safety
    /// That many are in the same buffer.
    #[inline(always)]
    pub unsafe fn add(self, index: usize) -> Self {
        Self {
            // SAFETY: the caller's contract.
            ptr: unsafe { self.ptr.add(index * self.stored.size()) },
            ..self
        }
    }

    /// The first `min(len, LANES)` numbers, zero in the other lanes.
    ///
    /// # Safety
    /// Those numbers are readable.
    #[inline(always)]
    pub unsafe fn load<S: Simd>(self, s: S, len: usize) -> S::V {
        // SAFETY: the caller vouches for the numbers that are read; the copy holds a vector of either length.
        unsafe {
            let whole = len >= S::LANES;
            match self.stored {
                Float::F32 if whole => s.load(self.ptr.cast()),
                Float::F32 => s.load_first(self.ptr.cast(), len),
                Float::Bf16 if whole => s.load_bf16(self.ptr.cast()),
                Float::Bf16 => s.load_bf16(self.copy_of_first(len).as_ptr()),
                Float::F16 if whole => s.load_f16(self.ptr.cast()),
                Float::F16 => s.load_f16(self.copy_of_first(len).as_ptr()),
            }
        }
    }

    /// Writes the first `min(len, LANES)` lanes, rounded to the nearest.
    ///
    /// # Safety
    /// Those numbers are writable.
    #[inline(always)]
    pub unsafe fn store<S: Simd>(self, s: S, v: S::V, len: usize) {
        // SAFETY: the caller vouches for the numbers that are written; the copy holds a vector of either length.
        unsafe {
            let whole = len >= S::LANES;
            let mut copy = [0_u16; MOST_LANES];
            match self.stored {
                Float::F32 if whole => return s.store(self.ptr.cast(), v),
                Float::F32 => return s.store_first(self.ptr.cast(), v, len),
                Float::Bf16 if whole => return s.store_bf16(self.ptr.cast(), v),
                Float::F16 if whole => return s.store_f16(self.ptr.cast(), v),
                Float::Bf16 => s.store_bf16(copy.as_mut_ptr(), v),
                Float::F16 => s.store_f16(copy.as_mut_ptr(), v),
            }
            self.ptr.cast::<u16>().copy_from_nonoverlapping(copy.as_ptr(), len);
        }
    }

    /// One number.
    ///
    /// # Safety
    /// Number `index` is readable.
    #[inline(always)]
    pub unsafe fn get(self, index: usize) -> f32 {
        // SAFETY: the caller's contract.
        unsafe {
            match self.stored {
                Float::F32 => *self.ptr.cast::<f32>().add(index),
                Float::Bf16 => f32::from_bits(u32::from(*self.ptr.cast::<u16>().add(index)) << 16),
                Float::F16 => half::f16::from_bits(*self.ptr.cast::<u16>().add(index)).to_f32(),
            }
        }
    }

    /// Writes one number, rounded to the nearest.
    ///
    /// # Safety
    /// Number `index` is writable.
    #[inline(always)]
    pub unsafe fn set(self, index: usize, x: f32) {
        // SAFETY: the caller's contract.
        unsafe {
            match self.stored {
                Float::F32 => *self.ptr.cast::<f32>().add(index) = x,
                Float::Bf16 => *self.ptr.cast::<u16>().add(index) = half::bf16::from_f32(x).to_bits(),
                Float::F16 => *self.ptr.cast::<u16>().add(index) = half::f16::from_f32(x).to_bits(),
            }
        }
    }

    /// The first numbers of 16 bits, with zeros behind them.
    ///
    /// # Safety
    /// `len` numbers, fewer than a vector's, are readable.
    #[inline(always)]
    unsafe fn copy_of_first(self, len: usize) -> [u16; MOST_LANES] {
        let mut copy = [0; MOST_LANES];
        // SAFETY: the caller's contract; a vector has no more lanes than the copy.
        unsafe { copy.as_mut_ptr().copy_from_nonoverlapping(self.ptr.cast(), len) };
        copy
    }
}

impl From<*const f32> for Floats {
    #[inline(always)]
    fn from(ptr: *const f32) -> Self {
        Self::of(ptr)
    }
}

impl From<*mut f32> for Floats {
    #[inline(always)]
    fn from(ptr: *mut f32) -> Self {
        Self::of_mut(ptr)
    }
}

/// Lanes of the longest vector.
pub(crate) const MOST_LANES: usize = 16;
