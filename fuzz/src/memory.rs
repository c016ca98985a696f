//! An allocator that ends the process where the memory that an input may take is exceeded: at the allocation that is one too many.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    backtrace::Backtrace,
    process::abort,
    sync::atomic::{AtomicIsize, Ordering::SeqCst},
};

/// Bytes that are allocated, by all threads: chat templates are rendered on a thread of their own.
static LIVE: AtomicIsize = AtomicIsize::new(0);
/// Bytes that may be allocated.
static LIMIT: AtomicIsize = AtomicIsize::new(isize::MAX);

/// From here on this much more may be allocated.
pub fn limit(bytes: usize) {
    LIMIT.store(LIVE.load(SeqCst).saturating_add_unsigned(bytes), SeqCst);
}

/// From here on anything may be allocated.
pub fn no_limit() {
    LIMIT.store(isize::MAX, SeqCst);
}

struct Limited;

fn count(bytes: isize) {
    let live = LIVE.fetch_add(bytes, SeqCst) + bytes;
    let limit = LIMIT.load(SeqCst);
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
