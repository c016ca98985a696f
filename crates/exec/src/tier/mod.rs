//! The tier below memory: an unlinked scratch file, and one thread that moves bytes between it and the arena.
//!
//! Offloading on the CPU backend is real or it is nothing: bytes that left the arena must be on a disk, not in the page cache (which
//! a cgroup charges to the process), not in a tmpfs (which is memory), and the disk must have room for all of them before the first
//! step. [`Scratch`] sees to that. [`Transfers`] runs them in the order given, on a thread of its own, and allocates nothing once it
//! has started. [`measure_link`] says how fast all of this is.

mod direct;
mod link;
mod scratch;
mod transfer;

pub use direct::{Failure, PAGE};
pub use link::measure_link;
pub use scratch::{Scratch, ScratchError};
pub use transfer::{Direction, Moved, Ticket, Transfer, TransferError, Transfers};

/// Why there is no lower tier, or none any more.
#[derive(Debug, thiserror::Error)]
pub enum TierError {
    /// No file.
    #[error(transparent)]
    Scratch(#[from] ScratchError),
    /// No memory for what is moved.
    #[error(transparent)]
    Arena(#[from] crate::ArenaError),
    /// No thread.
    #[error("cannot start the thread that moves bytes to and from the scratch file: {0}")]
    Thread(std::io::Error),
    /// The disk failed.
    #[error(transparent)]
    Transfer(#[from] TransferError),
}
