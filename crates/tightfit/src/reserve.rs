//! What the process uses beside the arena: measured at start, paid from the budget first.

use crate::memory::{MemoryError, end_of_phase, process_peak_bytes, unread_file_bytes};
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
    Ok(needed_bytes(threads)?.next_multiple_of(UNIT_BYTES))
}

/// The same to the byte.
fn needed_bytes(threads: usize) -> Result<u64, MemoryError> {
    let stacks = threads.saturating_sub(1) as u64 * STACK_BYTES as u64;
    Ok(process_peak_bytes()? + unread_file_bytes()? + stacks + SIGNAL_THREAD_BYTES + HEADROOM_BYTES)
}

/// What a process does before it maps its arena: planning, and reading data. What that takes and gives back is beside no arena.
#[derive(Clone, Copy, Debug, Default)]
pub struct Before {
    peak: u64,
    /// As measured last.
    reserve: u64,
}

impl Before {
    /// Ends a phase: what it has freed goes back to the system.
    ///
    /// # Errors
    /// This system does not say what a process uses.
    pub fn end_phase(&mut self) -> Result<(), MemoryError> {
        self.peak = self.peak.max(process_peak_bytes()?);
        end_of_phase();
        Ok(())
    }

    /// The highest resident size in all phases that have ended.
    pub fn peak_bytes(&self) -> u64 {
        self.peak
    }

    /// [`reserve_bytes`] of a process that now maps an arena of `arena_bytes`; or more, where a phase before has taken more than both.
    /// As long as it takes little more or less than when it was measured last, that counts: a plan that was made beside a reserve still
    /// fits when that is measured again, and the little is in the headroom.
    ///
    /// # Errors
    /// As [`reserve_bytes`].
    pub fn reserve_bytes(&mut self, arena_bytes: u64, threads: usize) -> Result<u64, MemoryError> {
        let before = self.peak.saturating_sub(arena_bytes).next_multiple_of(UNIT_BYTES);
        let needed = needed_bytes(threads)?;
        let little = HEADROOM_BYTES / 16;
        if needed > self.reserve + little || needed + UNIT_BYTES + little < self.reserve {
            self.reserve = needed.next_multiple_of(UNIT_BYTES);
        }
        Ok(self.reserve.max(before))
    }
}
