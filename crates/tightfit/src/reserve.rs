//! What the process uses beside the arena: paid from the budget first.

use crate::heap::live_bytes;
use crate::memory::{
    MemoryError, end_of_phase, file_bytes, process_peak_bytes, process_resident_bytes, resident_file_bytes,
};
use tightfit_exec::STACK_BYTES;

/// What is still allocated after planning: the session's tables, the progress bar, a checkpoint's header and write buffer, the result.
/// It does not grow with the model's width, batch or number of steps; tests hold runs to it.
const HEADROOM_BYTES: u64 = 8 << 20;

/// By how much the process may be larger than is counted: this is in the headroom.
const LITTLE_BYTES: u64 = HEADROOM_BYTES / 16;

/// Main stack, thread-local and relocated data.
const STATIC_BYTES: u64 = 768 << 10;

/// Holes in the heap, in pages that cannot be given back: one byte for so many in use.
const HOLES: u64 = 2;

/// What stays of making files into rows, at most: caches of the tokenizer, and the holes that it leaves.
const TOKENISED_BYTES: u64 = 12 << 20;

/// Stack and guard pages that the thread of the signal handler touches, at most.
const SIGNAL_THREAD_BYTES: u64 = 64 << 10;

/// The reserve is a whole number of these, so that runs of one job do not differ by some bytes.
const UNIT_BYTES: u64 = 1 << 20;

/// Bytes outside of the arena that a run with that many threads stays within, planning being over: the program's files, its heap, the
/// stacks of its workers, and a fixed headroom.
///
/// The heap is counted, not measured, so that one plan has one reserve, whatever was planned on the way to it. What is
/// measured counts where it is clearly more; in a program with another allocator than [`Heap`](crate::heap::Heap) it always does.
///
/// # Errors
/// This system does not say what a process uses.
pub fn reserve_bytes(threads: usize) -> Result<u64, MemoryError> {
    let live = live_bytes();
    let counted = STATIC_BYTES + live + live / HOLES;
    let measured = private_bytes()?.saturating_sub(LITTLE_BYTES);
    Ok((counted.max(measured) + fixed_bytes(threads)?).next_multiple_of(UNIT_BYTES))
}

/// What the reserve of a process that holds nothing yet grows by as it plans a job of so many bytes of the heap.
pub fn grown_bytes(heap_bytes: u64) -> u64 {
    (heap_bytes + heap_bytes / HOLES).next_multiple_of(UNIT_BYTES)
}

/// Bytes of the heap, the stack and data that are resident.
fn private_bytes() -> Result<u64, MemoryError> {
    Ok(process_resident_bytes()?.saturating_sub(resident_file_bytes()?))
}

/// What does not depend on what the heap holds.
fn fixed_bytes(threads: usize) -> Result<u64, MemoryError> {
    let stacks = threads.saturating_sub(1) as u64 * STACK_BYTES as u64;
    Ok(file_bytes()? + stacks + SIGNAL_THREAD_BYTES + HEADROOM_BYTES)
}

/// What a process does before it maps its arena: planning, and reading data. What that takes and gives back is beside no arena.
#[derive(Clone, Copy, Debug, Default)]
pub struct Before {
    peak: u64,
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

    /// [`reserve_bytes`] of a process that has planned an arena of `arena_bytes`, with what stays of reading data if it will
    /// `tokenise`; or more, where a phase before has taken more than both.
    ///
    /// # Errors
    /// As [`reserve_bytes`].
    pub fn planned_bytes(&self, arena_bytes: u64, threads: usize, tokenise: bool) -> Result<u64, MemoryError> {
        let tokenised = if tokenise { TOKENISED_BYTES } else { 0 };
        Ok((reserve_bytes(threads)? + tokenised).max(self.beyond(arena_bytes)))
    }

    /// The same once data has been read: what was `planned`, if the process keeps to that. `passing` bytes are in use, but not any more
    /// when the arena is mapped.
    ///
    /// # Errors
    /// As [`reserve_bytes`].
    pub fn prepared_bytes(
        &self,
        arena_bytes: u64,
        threads: usize,
        planned: u64,
        passing: u64,
    ) -> Result<u64, MemoryError> {
        let measured = private_bytes()?.saturating_sub(passing) + fixed_bytes(threads)?;
        let reserve = match measured > planned + LITTLE_BYTES {
            true => measured.next_multiple_of(UNIT_BYTES),
            false => planned,
        };
        Ok(reserve.max(self.beyond(arena_bytes)))
    }

    /// What phases have taken beyond such an arena.
    fn beyond(&self, arena_bytes: u64) -> u64 {
        self.peak.saturating_sub(arena_bytes).next_multiple_of(UNIT_BYTES)
    }
}
