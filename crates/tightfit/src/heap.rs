//! The program's heap, counted.
//!
//! Two runs that hold the same things have the same count, however they came to hold them. Resident pages tell less: what was freed on
//! the way leaves holes, and how many differs from run to run.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The exit code of a process that the system gives no more memory.
const NO_MEMORY: i32 = 1;

/// Bytes that are allocated now.
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// The system's allocator, which counts; where it gives no more, the process ends with a message.
pub struct Heap;

/// Bytes of the heap that are in use; 0 in a program whose allocator is another one.
pub fn live_bytes() -> u64 {
    LIVE.load(Ordering::Relaxed) as u64
}

/// What an allocation takes of the heap: a header, and the rest in units of 16 bytes.
const fn taken(bytes: usize) -> usize {
    bytes.saturating_add(8).next_multiple_of(16)
}

// SAFETY: Everything is passed on to `System` as it comes.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(taken(layout.size()), Ordering::Relaxed);
        // SAFETY: The caller keeps what `alloc` asks for.
        let block = unsafe { System.alloc(layout) };
        if block.is_null() {
            refused(layout.size());
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(taken(layout.size()), Ordering::Relaxed);
        // SAFETY: The caller keeps what `alloc_zeroed` asks for.
        let block = unsafe { System.alloc_zeroed(layout) };
        if block.is_null() {
            refused(layout.size());
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        LIVE.fetch_sub(taken(layout.size()), Ordering::Relaxed);
        // SAFETY: The caller keeps what `dealloc` asks for.
        unsafe { System.dealloc(block, layout) };
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        LIVE.fetch_add(taken(bytes), Ordering::Relaxed);
        LIVE.fetch_sub(taken(layout.size()), Ordering::Relaxed);
        // SAFETY: The caller keeps what `realloc` asks for.
        let block = unsafe { System.realloc(block, layout, bytes) };
        if block.is_null() {
            refused(bytes);
        }
        block
    }
}

/// Ends the process: Rust's own way out is an abort, which looks like a fault. Allocates nothing.
#[cold]
fn refused(bytes: usize) -> ! {
    let _ = writeln!(
        io::stderr(),
        "error: the system has refused {bytes} bytes: a limit of this process (see `ulimit -a`) or what the machine has left is below \
         what planning takes"
    );
    // SAFETY: Nothing is run on the way out, so nothing can be found half done.
    unsafe { libc::_exit(NO_MEMORY) }
}
