//! How fast a disk is, measured the way it will be used.

use std::path::Path;
use std::time::Instant;

use tightfit_ir::Link;

use super::{Direction, Scratch, TierError, Transfer, Transfers};
use crate::Arena;

/// Bytes of one transfer: about a layer's tensor.
const TRANSFER: u64 = 16 << 20;
/// Transfers in flight, each from memory of its own.
const BUFFERS: u64 = 2;

/// Measures the way to a scratch file of about `bytes` (at least 32 MiB) in a folder: writes it twice, of which the second time counts, as
/// most steps overwrite what earlier ones wrote, and reads it. That takes three times `bytes` over the disk's speed: at 1 GiB, a few
/// seconds.
///
/// # Errors
/// There can be no such file, or it cannot be used.
pub fn measure_link(folder: &Path, bytes: u64) -> Result<Link, TierError> {
    let count = (bytes / TRANSFER).max(BUFFERS);
    let mut arena = Arena::map(BUFFERS * TRANSFER)?;
    let transfers =
        Transfers::start(Scratch::create(folder, count * TRANSFER)?, BUFFERS as usize).map_err(TierError::Thread)?;
    fill(arena.slice_mut(0..BUFFERS * TRANSFER));
    pass(&transfers, &arena, Direction::ToFile, count)?;
    let write = pass(&transfers, &arena, Direction::ToFile, count)?;
    let read = pass(&transfers, &arena, Direction::FromFile, count)?;
    Ok(Link { read, write })
}

/// Bytes per second of `count` transfers, one after the other in the file.
fn pass(transfers: &Transfers, arena: &Arena, direction: Direction, count: u64) -> Result<f64, TierError> {
    let start = Instant::now();
    for number in 0..count {
        let buffer = (number % BUFFERS * TRANSFER) as usize;
        let transfer = Transfer {
            direction,
            // SAFETY: inside of the arena, which has a buffer for each that is in flight.
            memory: unsafe { arena.as_ptr().add(buffer) },
            bytes: TRANSFER,
            offset: number * TRANSFER,
        };
        // SAFETY: nobody else uses the arena until `drain`, or until `transfers` is dropped, which is before it is; and transfers are
        // made one after the other.
        unsafe { transfers.submit(transfer) };
    }
    transfers.drain()?;
    Ok((count * TRANSFER) as f64 / start.elapsed().as_secs_f64())
}

/// Bits that no disk and no file system can compress (Marsaglia, "Xorshift RNGs", 2003).
fn fill(words: &mut [u32]) {
    let mut state = 2_463_534_242_u32;
    for word in words {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        *word = state;
    }
}
