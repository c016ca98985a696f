//! Transfers allocate nothing once their thread has started. The only test of its program, because the counts are of all its threads.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};

use tightfit_exec::Arena;
use tightfit_exec::tier::{Direction, Scratch, Ticket, Transfer, Transfers};

/// Calls to the allocator on all threads but the harness's, which may still be settling down to wait.
static CALLS: AtomicU64 = AtomicU64::new(0);
/// Whether anything was ever allocated. Who does so first is the program's first thread: the harness.
static BEGUN: AtomicBool = AtomicBool::new(false);

thread_local! {
    static HARNESS: Cell<bool> = const { Cell::new(false) };
}

/// The system's allocator, counting.
struct Counting;

fn count() {
    if !BEGUN.swap(true, SeqCst) {
        HARNESS.set(true);
    }
    if !HARNESS.get() {
        CALLS.fetch_add(1, SeqCst);
    }
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A thread of its own, as the harness may run its only test on the first one.
#[test]
fn transfers_allocate_nothing() {
    std::thread::spawn(run).join().unwrap();
}

fn run() {
    let before = CALLS.load(SeqCst);
    drop(std::hint::black_box(vec![0_u8; 1000]));
    assert_eq!(CALLS.load(SeqCst), before + 2, "the counter counts");
    let block = vec![0_u8; 1000];
    let before = CALLS.load(SeqCst);
    std::thread::spawn(move || drop(block)).join().unwrap();
    assert!(CALLS.load(SeqCst) > before + 1, "the counter counts other threads");

    let bytes = 1_000_001;
    let mut arena = Arena::map(1 << 20).unwrap();
    arena.slice_mut::<u8>(0..1 << 20).fill(3);
    let scratch = Scratch::create(Path::new(env!("CARGO_TARGET_TMPDIR")), 1 << 20).unwrap();
    let transfers = Transfers::start(scratch, 4).unwrap();
    let before = CALLS.load(SeqCst);
    let mut last = Ticket::default();
    for direction in [Direction::ToFile, Direction::FromFile] {
        for _ in 0..50 {
            let transfer = Transfer {
                direction,
                memory: arena.as_ptr(),
                bytes,
                offset: 0,
            };
            // SAFETY: the arena is not used until after `wait`.
            last = unsafe { transfers.submit(transfer) };
        }
        transfers.wait(last).unwrap();
    }
    transfers.write(4096, arena.slice::<u8>(0..100)).unwrap();
    transfers.read(4096, arena.slice_mut::<u8>(0..100)).unwrap();
    // An error allocates no more than a success does.
    transfers.read(1 << 20, arena.slice_mut::<u8>(0..100)).unwrap_err();
    transfers.drain().unwrap_err();
    let moved = transfers.moved();
    let calls = CALLS.load(SeqCst) - before;
    assert_eq!(calls, 0, "calls to the allocator");
    assert_eq!((moved.read, moved.written), (50 * bytes + 100, 50 * bytes + 100));
    assert!(last > Ticket::default());
}
