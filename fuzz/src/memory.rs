//! An allocator that ends the process where the memory that an input may take is exceeded: at the allocation that is one too many.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    backtrace::Backtrace,
    cell::Cell,
    process::abort,
};

thread_local! {
    /// Bytes that the thread has allocated.
    static LIVE: Cell<isize> = const { Cell::new(0) };
    /// Bytes that it may have allocated.
    static LIMIT: Cell<isize> = const { Cell::new(isize::MAX) };
}

/// From here on the thread may allocate this much more.
pub fn limit(bytes: usize) {
    LIMIT.set(LIVE.get().saturating_add_unsigned(bytes));
}

/// From here on it may allocate what it wants.
pub fn no_limit() {
    LIMIT.set(isize::MAX);
}

struct Limited;

fn count(bytes: isize) {
    let live = LIVE.get() + bytes;
    LIVE.set(live);
    let limit = LIMIT.get();
    if live > limit {
        no_limit();
        let over = live - limit;
        eprintln!(
            "an allocation of {bytes} bytes: {over} more than the input may take\n{}",
            Backtrace::force_capture()
        );
        abort();
    }
}

// SAFETY: every call is passed on to the system's allocator as it came; counting does not allocate, but where it ends the process.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: the caller's promises are those of `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    // `realloc` is left to the trait: it allocates, copies and frees, so the moment with both is counted.
}

#[global_allocator]
static ALLOCATOR: Limited = Limited;
