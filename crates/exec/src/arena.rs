//! The arena: one mapping that holds every planned byte, and what was measured of its use.

use std::ops::Range;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use tightfit_cpu::pool::Pool;

/// What the arena holds before anything is written: a NaN that no computation makes. Its use is measured by what differs.
const UNTOUCHED: u32 = 0xFFA5_C35A;

/// What freed bytes are overwritten with on request: another NaN that no computation makes.
const POISON: u32 = 0xFFE7_DEAD;

/// Bytes that one tile of a fill covers.
const FILL_TILE: usize = 4 << 20;

/// Why there is no arena.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// The system refused.
    #[error("cannot map an arena of {bytes} bytes: {source}; is there a limit on this process's memory (ulimit -v)?")]
    Map {
        /// The size asked for.
        bytes: u64,
        /// What the system said.
        source: std::io::Error,
    },
    /// More than this machine can address.
    #[error("an arena of {bytes} bytes is more than this machine can address")]
    TooLarge {
        /// The size asked for.
        bytes: u64,
    },
}

/// Anonymous memory, mapped once and given back when dropped.
#[derive(Debug)]
pub struct Arena {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the arena owns its mapping; access to its bytes goes through `&self` and `&mut self`.
unsafe impl Send for Arena {}

impl Arena {
    /// Maps an arena of at least `bytes`, in whole pages. No page is resident yet.
    ///
    /// # Errors
    /// The system has no such range to give.
    pub fn map(bytes: u64) -> Result<Self, ArenaError> {
        let too_large = || ArenaError::TooLarge { bytes };
        let page = rustix::param::page_size();
        let len = usize::try_from(bytes.max(1))
            .ok()
            .and_then(|n| n.checked_next_multiple_of(page))
            .filter(|&n| isize::try_from(n).is_ok())
            .ok_or_else(too_large)?;
        // SAFETY: a new anonymous mapping at an address of the system's choice touches no existing memory.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }
        .map_err(|error| ArenaError::Map {
            bytes,
            source: error.into(),
        })?;
        // Huge pages make the first touch and address translation cheaper. Without them everything works as well.
        // SAFETY: the range is the mapping just made.
        let _ = unsafe { madvise(start, len, Advice::LinuxHugepage) };
        let start = NonNull::new(start.cast()).ok_or_else(too_large)?;
        Ok(Self { start, len })
    }

    /// Bytes mapped.
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Whether nothing is mapped: never.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The first byte. Valid for [`len`](Self::len) bytes as long as the arena lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Writes the pattern by which use is measured over all of the arena, which makes every page resident: from here on, the
    /// process has the memory that was planned.
    pub fn fill(&mut self, pool: &Pool) {
        let base = Base(self.start.as_ptr());
        let len = self.len;
        pool.for_each(len.div_ceil(FILL_TILE), |tile, _| {
            let start = tile * FILL_TILE;
            let words = (FILL_TILE.min(len - start)) / 4;
            // SAFETY: tiles are disjoint parts of the mapping, aligned to a page, and `&mut self` excludes other access.
            let words = unsafe { std::slice::from_raw_parts_mut(base.at(start).cast::<u32>(), words) };
            words.fill(UNTOUCHED);
        });
    }

    /// The highest byte written since [`fill`](Self::fill), plus one, found by looking at the arena and at no plan. Exact to four
    /// bytes, as every buffer is of whole words.
    pub fn measured_peak(&self) -> u64 {
        let words = self.slice::<u32>(0..self.len());
        let last = words.iter().rposition(|&word| word != UNTOUCHED);
        last.map_or(0, |index| 4 * (index as u64 + 1))
    }

    /// Overwrites freed bytes with a NaN, so that a read of them shows.
    pub fn poison(&mut self, range: Range<u64>) {
        self.slice_mut::<u32>(range).fill(POISON);
    }

    /// Elements in a range of bytes.
    ///
    /// # Panics
    /// The range is not inside of the arena or not aligned to the element: a plan that the validator would reject.
    pub fn slice<T: Element>(&self, range: Range<u64>) -> &[T] {
        let (start, count) = self.elements::<T>(range);
        // SAFETY: `elements` has checked bounds and alignment; any bytes are a `T`; `&self` excludes writers.
        unsafe { std::slice::from_raw_parts(start.cast_const(), count) }
    }

    /// Elements in a range of bytes, to write.
    ///
    /// # Panics
    /// As [`slice`](Self::slice).
    pub fn slice_mut<T: Element>(&mut self, range: Range<u64>) -> &mut [T] {
        let (start, count) = self.elements::<T>(range);
        // SAFETY: `elements` has checked bounds and alignment; any bytes are a `T`; `&mut self` excludes other access.
        unsafe { std::slice::from_raw_parts_mut(start, count) }
    }

    /// Elements in several ranges of bytes, to write.
    ///
    /// # Panics
    /// As [`slice`](Self::slice), or two ranges overlap.
    pub fn slices_mut<T: Element, const N: usize>(&mut self, ranges: [Range<u64>; N]) -> [&mut [T]; N] {
        let (parts, []) = self.parts_mut::<T, T, N, 0>(ranges, []);
        parts
    }

    /// Elements of two types in several ranges of bytes, to write.
    ///
    /// # Panics
    /// As [`slices_mut`](Self::slices_mut).
    pub fn parts_mut<A: Element, B: Element, const N: usize, const M: usize>(
        &mut self,
        a: [Range<u64>; N],
        b: [Range<u64>; M],
    ) -> ([&mut [A]; N], [&mut [B]; M]) {
        for (i, one) in a.iter().chain(&b).enumerate() {
            for other in a.iter().chain(&b).take(i) {
                let apart = one.end <= other.start || other.end <= one.start;
                assert!(apart, "{one:?} and {other:?} overlap");
            }
        }
        let a = a.map(|range| {
            let (start, count) = self.elements::<A>(range);
            // SAFETY: as in `slice_mut`; the ranges are disjoint.
            unsafe { std::slice::from_raw_parts_mut(start, count) }
        });
        let b = b.map(|range| {
            let (start, count) = self.elements::<B>(range);
            // SAFETY: as above.
            unsafe { std::slice::from_raw_parts_mut(start, count) }
        });
        (a, b)
    }

    fn elements<T: Element>(&self, range: Range<u64>) -> (*mut T, usize) {
        assert!(
            range.start <= range.end && range.end <= self.len(),
            "{range:?} is outside of the arena"
        );
        let size = size_of::<T>() as u64;
        let bytes = range.end - range.start;
        assert!(
            range.start.is_multiple_of(size) && bytes.is_multiple_of(size),
            "{range:?} is not aligned to {size} bytes"
        );
        // SAFETY: the offset lies inside of the mapping, whose length fits `isize`.
        let start = unsafe { self.start.as_ptr().add(range.start as usize) };
        (start.cast(), (bytes / size) as usize)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `map`, and nothing borrows from it any more. A failure leaks it.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// The arena's base, handed to the threads of a fill.
#[derive(Clone, Copy)]
struct Base(*mut u8);

// SAFETY: the threads write disjoint tiles.
unsafe impl Sync for Base {}

impl Base {
    /// # Safety
    /// The offset lies inside of the mapping.
    unsafe fn at(self, offset: usize) -> *mut u8 {
        // SAFETY: the caller's contract.
        unsafe { self.0.add(offset) }
    }
}

/// Element types for which any bytes are a value.
pub trait Element: Copy + sealed::Sealed {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for i32 {}
    impl Sealed for u32 {}
    impl Sealed for u16 {}
    impl Sealed for u8 {}
}

impl Element for f32 {}
impl Element for i32 {}
impl Element for u32 {}
impl Element for u16 {}
impl Element for u8 {}
