//! The program's heap, counted.
//!
//! Two runs that hold the same things have the same count, however they came to hold them. Resident pages tell less: what was freed on
//! the way leaves holes, and how many differs from run to run.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{self, Write};
use std::sync::atomic::{AtomicIsize, Ordering};

/// The exit code of a process that the system gives no more memory.
const NO_MEMORY: i32 = 1;

/// Bytes that are allocated now, but for what threads have not added yet.
static LIVE: AtomicIsize = AtomicIsize::new(0);

/// What a thread allocates and frees is added together from so many bytes on: a count that all threads share costs more than a small
/// allocation.
const ADDED_TOGETHER: isize = 16 << 10;

thread_local! {
    static PENDING: Cell<isize> = const { Cell::new(0) };
}

/// Counts bytes that are taken, or given back if there are fewer than none.
fn count(bytes: isize) {
    // Without a destructor, a thread's counter is there as long as the thread is.
    PENDING.with(|pending| {
        let sum = pending.get() + bytes;
        if sum.abs() < ADDED_TOGETHER {
            pending.set(sum);
        } else {
            LIVE.fetch_add(sum, Ordering::Relaxed);
            pending.set(0);
        }
    });
}

/// The system's allocator, which counts; where it gives no more, the process ends with a message.
pub struct Heap;

/// Bytes of the heap that are in use, to some kilobytes for each other thread; 0 in a program whose allocator is another one.
pub fn live_bytes() -> u64 {
    let live = LIVE.load(Ordering::Relaxed) + PENDING.with(Cell::get);
    u64::try_from(live).unwrap_or(0)
}

/// What a value takes of the heap, found by making another one.
pub fn bytes_of<T: Clone>(value: &T) -> u64 {
    let before = live_bytes();
    let another = value.clone();
    let after = live_bytes();
    drop(another);
    after.saturating_sub(before)
}

/// What an allocation takes of the heap: a header, and the rest in units of 16 bytes.
const fn taken(bytes: usize) -> isize {
    // A layout's size is at most `isize::MAX` less its alignment.
    bytes.saturating_add(8).next_multiple_of(16) as isize
}

// SAFETY: Everything is passed on to `System` as it comes.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(taken(layout.size()));
        // SAFETY: The caller keeps what `alloc` asks for.
        let block = unsafe { System.alloc(layout) };
        if block.is_null() {
            refused(layout.size());
        }
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(taken(layout.size()));
        // SAFETY: The caller keeps what `alloc_zeroed` asks for.
        let block = unsafe { System.alloc_zeroed(layout) };
        if block.is_null() {
            refused(layout.size());
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(-taken(layout.size()));
        // SAFETY: The caller keeps what `dealloc` asks for.
        unsafe { System.dealloc(block, layout) };
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(taken(bytes) - taken(layout.size()));
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
