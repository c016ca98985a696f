//! Training data that needs no download: text from a seeded source whose entropy is known exactly.
//!
//! [`Language`] is the source's model and states the entropy, [`TextSource`] walks it, and [`Batches`] cuts walks into
//! rows of tokens. Everything is a function of the seed and a counter, so a resumed run sees the same data without
//! saving any state.

mod batch;
mod source;

pub use batch::{BatchBuffers, BatchError, Batches, Split};
pub use source::{Language, TextSource, VOCAB_SIZE};
