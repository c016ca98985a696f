//! One entry of a row: a token and what it is for, in 32 bits.
//!
//! Bits 0 to 28 are the token id, bit 29 is clear, bit 30 says that the entry starts a document and bit 31 that it is a target.
//! What starts a document is never a target, since nothing before it may be looked at.

/// Token ids are below this.
pub const MAX_VOCAB_SIZE: usize = 1 << 29;

/// The entry counts as a target of the one before.
pub(super) const TARGET: u32 = 1 << 31;
/// The entry starts a document: positions restart, attention does not look back.
pub(super) const START: u32 = 1 << 30;
/// The token id, and bit 29, which is clear in a sound entry.
pub(super) const TOKEN: u32 = START - 1;
/// Fills up a row: a document of its own, of which nothing is learned.
pub(super) const PADDING: u32 = START;
