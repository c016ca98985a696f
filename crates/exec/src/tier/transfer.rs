//! Transfers between memory and the scratch file: a ring of fixed size, emptied in order by one thread.
//!
//! One thread, because one large direct request already keeps the device busy (two were measured a tenth faster), and order is
//! what makes a plan's waits provable: when a transfer is done, so are all before it. Waiting threads sleep rather than spin, as the device
//! takes milliseconds and the processors have other work.
//!
//! After [`Transfers::start`], no thread allocates: the ring is the only storage, locks and condition variables are futexes, and errors are
//! plain values.

use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::direct::{Bounce, Failure, PAGE};
use super::scratch::Scratch;

/// Stack of the thread, in bytes.
const STACK_BYTES: usize = 64 << 10;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From memory.
    ToFile,
    /// To memory.
    FromFile,
}

/// Bytes to be moved.
#[derive(Clone, Copy, Debug)]
pub struct Transfer {
    /// Which way.
    pub direction: Direction,
    /// The first byte in memory, a multiple of [`PAGE`].
    pub memory: *mut u8,
    /// How many; any number.
    pub bytes: u64,
    /// The first byte in the file, a multiple of [`PAGE`]. To the file, the rest of the last page is overwritten as well.
    pub offset: u64,
}

// SAFETY: who submits one promises that the thread may use the memory.
unsafe impl Send for Transfer {}

/// What to wait for: a transfer and all before it. The default is done from the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// Why a transfer was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {direction} the scratch file ({bytes} bytes at byte {offset}): {failure}")]
pub struct TransferError {
    /// Which way.
    pub direction: Direction,
    /// Where in the file it was to start.
    pub offset: u64,
    /// How many bytes it had.
    pub bytes: u64,
    /// What went wrong.
    pub failure: Failure,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::ToFile => "write",
            Self::FromFile => "read",
        })
    }
}

/// Bytes that were moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// From the file.
    pub read: u64,
    /// To the file.
    pub written: u64,
}

/// The thread that moves bytes, and what it has still to move. Dropping it abandons transfers that have not begun.
#[derive(Debug)]
pub struct Transfers {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    bytes: u64,
    direct: bool,
}

impl Transfers {
    /// Starts the thread, with room for `capacity` transfers (at least one) that are not done yet. Returns when it runs, so that
    /// nothing is allocated later.
    ///
    /// # Errors
    /// What the system says when it cannot start one.
    pub fn start(scratch: Scratch, capacity: usize) -> io::Result<Self> {
        let empty = Transfer {
            direction: Direction::ToFile,
            memory: std::ptr::null_mut(),
            bytes: 0,
            offset: 0,
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                ring: vec![empty; capacity.max(1)].into(),
                submitted: 0,
                done: 0,
                running: false,
                closing: false,
                failed: None,
                moved: Moved::default(),
                waited: Duration::ZERO,
            }),
            work: Condvar::new(),
            progress: Condvar::new(),
        });
        let (bytes, direct) = (scratch.bytes(), scratch.is_direct());
        let worker = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("tightfit-io".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || worker.run(&scratch))?;
        drop(shared.sleep_until(shared.lock(), |state| state.running));
        Ok(Self {
            shared,
            thread: Some(thread),
            bytes,
            direct,
        })
    }

    /// Bytes of the scratch file.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether transfers bypass the page cache: see [`Scratch::is_direct`].
    pub fn is_direct(&self) -> bool {
        self.direct
    }

    /// Appends a transfer to those that are to be made, in this order. Waits while the ring is full.
    ///
    /// # Safety
    /// Until the transfer has been waited for (an error counts), or `self` dropped: `memory` points to `bytes` initialised bytes, which
    /// nobody writes, nor reads if they come from the file.
    ///
    /// # Panics
    /// The offset or the address is no multiple of [`PAGE`]: a plan that the validator would reject.
    pub unsafe fn submit(&self, transfer: Transfer) -> Ticket {
        assert!(
            transfer.offset.is_multiple_of(PAGE as u64) && transfer.memory.addr().is_multiple_of(PAGE),
            "{transfer:?} does not start at a page"
        );
        let state = self.shared.lock();
        let mut state = self
            .shared
            .wait_until(state, |state| state.submitted - state.done < state.ring.len() as u64);
        let slot = state.slot(state.submitted);
        state.ring[slot] = transfer;
        state.submitted += 1;
        self.shared.work.notify_one();
        Ticket(state.submitted)
    }

    /// Returns when a transfer and all before it are done.
    ///
    /// # Errors
    /// One of them, or a later one, could not be made. After the first error no transfer is made any more, and every wait returns it.
    pub fn wait(&self, ticket: Ticket) -> Result<(), TransferError> {
        let state = self.shared.lock();
        let last = ticket.0.min(state.submitted);
        let state = self.shared.wait_until(state, |state| state.done >= last);
        state.failed.map_or(Ok(()), Err)
    }

    /// Waits for all that were submitted.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn drain(&self) -> Result<(), TransferError> {
        self.wait(Ticket(u64::MAX))
    }

    /// Reads bytes at `offset`, after all transfers that were submitted before.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    ///
    /// # Panics
    /// As [`submit`](Self::submit): `memory` starts at a page.
    pub fn read(&self, offset: u64, memory: &mut [u8]) -> Result<(), TransferError> {
        let transfer = Transfer {
            direction: Direction::FromFile,
            memory: memory.as_mut_ptr(),
            bytes: memory.len() as u64,
            offset,
        };
        // SAFETY: the slice is borrowed until the end of this function, which waits.
        self.wait(unsafe { self.submit(transfer) })
    }

    /// Writes bytes at `offset`, after all transfers that were submitted before.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    ///
    /// # Panics
    /// As [`submit`](Self::submit): `memory` starts at a page.
    pub fn write(&self, offset: u64, memory: &[u8]) -> Result<(), TransferError> {
        let transfer = Transfer {
            direction: Direction::ToFile,
            memory: memory.as_ptr().cast_mut(),
            bytes: memory.len() as u64,
            offset,
        };
        // SAFETY: the slice is borrowed until the end of this function, which waits; it is only read.
        self.wait(unsafe { self.submit(transfer) })
    }

    /// How long callers have slept in [`wait`](Self::wait), and in [`submit`](Self::submit) for room in the ring: time that transfers
    /// were not hidden behind other work.
    pub fn waited(&self) -> Duration {
        self.shared.lock().waited
    }

    /// Bytes of all transfers that are done.
    pub fn moved(&self) -> Moved {
        self.shared.lock().moved
    }
}

impl Drop for Transfers {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_one();
        if let Some(thread) = self.thread.take() {
            // It does not panic, and there is nobody to tell.
            let _ = thread.join();
        }
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// The thread sleeps here until there is something to do.
    work: Condvar,
    /// Callers sleep here until something is done.
    progress: Condvar,
}

#[derive(Debug)]
struct State {
    /// Transfer number `n` is in slot `n % ring.len()` from when it is submitted until it is done.
    ring: Box<[Transfer]>,
    /// How many transfers there ever were, and how many of them are done.
    submitted: u64,
    done: u64,
    running: bool,
    closing: bool,
    failed: Option<TransferError>,
    moved: Moved,
    waited: Duration,
}

impl State {
    fn slot(&self, number: u64) -> usize {
        (number % self.ring.len() as u64) as usize
    }
}

impl Shared {
    /// Nothing panics while it holds the lock, so a poisoned one is sound.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sleep_until<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        ready: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        while !ready(&state) {
            state = self.progress.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state
    }

    /// [`sleep_until`](Self::sleep_until), counting the time if there is anything to wait for.
    fn wait_until<'a>(&self, state: MutexGuard<'a, State>, ready: impl Fn(&State) -> bool) -> MutexGuard<'a, State> {
        if ready(&state) {
            return state;
        }
        let start = Instant::now();
        let mut state = self.sleep_until(state, ready);
        state.waited += start.elapsed();
        state
    }

    /// The thread's life.
    fn run(&self, scratch: &Scratch) {
        let mut bounce = Bounce::new();
        let mut state = self.lock();
        state.running = true;
        self.progress.notify_all();
        loop {
            while state.done == state.submitted && !state.closing {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            if state.closing {
                return;
            }
            let transfer = state.ring[state.slot(state.done)];
            if state.failed.is_none() {
                drop(state);
                // SAFETY: it was submitted and is not done yet.
                let result = unsafe { transfer.make(scratch, &mut bounce) };
                state = self.lock();
                match result {
                    Ok(()) if transfer.direction == Direction::ToFile => state.moved.written += transfer.bytes,
                    Ok(()) => state.moved.read += transfer.bytes,
                    Err(failure) => state.failed = Some(transfer.error(failure)),
                }
            }
            state.done += 1;
            self.progress.notify_all();
        }
    }
}

impl Transfer {
    /// # Safety
    /// `memory` points to `bytes` initialised bytes, which nobody writes meanwhile, nor reads if they come from the file.
    unsafe fn make(self, scratch: &Scratch, bounce: &mut Bounce) -> Result<(), Failure> {
        // As many as there are in memory, so they fit.
        let len = self.bytes as usize;
        match self.direction {
            Direction::ToFile => {
                // SAFETY: the caller's contract.
                let memory = unsafe { std::slice::from_raw_parts(self.memory.cast_const(), len) };
                scratch.write(self.offset, memory, bounce)
            }
            Direction::FromFile => {
                // SAFETY: the caller's contract.
                let memory = unsafe { std::slice::from_raw_parts_mut(self.memory, len) };
                scratch.read(self.offset, memory, bounce)
            }
        }
    }

    fn error(self, failure: Failure) -> TransferError {
        TransferError {
            direction: self.direction,
            offset: self.offset,
            bytes: self.bytes,
            failure,
        }
    }
}
