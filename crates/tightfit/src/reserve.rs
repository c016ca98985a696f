//! What the process uses beside the arena: measured at start, paid from the budget first.

use crate::memory::{MemoryError, process_peak_bytes, unread_file_bytes};
use tightfit_exec::STACK_BYTES;

/// What may still be allocated after the measurement: the session's tables, the progress bar, a checkpoint's header and write
/// buffer, the result. It does not grow with the model's width, batch or number of steps; tests hold runs to it.
const HEADROOM_BYTES: u64 = 8 << 20;

/// Stack and guard pages that the thread of the signal handler touches, at most.
const SIGNAL_THREAD_BYTES: u64 = 64 << 10;

/// The reserve is a whole number of these. What is measured varies by some pages from run to run, and the smallest budget that a
/// refusal names should do in the next run.
const UNIT_BYTES: u64 = 1 << 20;

/// Bytes outside of the arena that a run with that many threads stays within: what the process has used so far (planning
/// included), pages of its files that it may still touch, the stacks of its workers, and a fixed headroom.
///
/// # Errors
/// This system does not say what a process uses.
pub fn reserve_bytes(threads: usize) -> Result<u64, MemoryError> {
    let stacks = threads.saturating_sub(1) as u64 * STACK_BYTES as u64;
    let bytes = process_peak_bytes()? + unread_file_bytes()? + stacks + SIGNAL_THREAD_BYTES + HEADROOM_BYTES;
    Ok(bytes.next_multiple_of(UNIT_BYTES))
}
