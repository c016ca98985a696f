//! Chooses what a training step keeps for its backward, so that it fits and takes the least time.
//!
//! From a step to a choice, one file each:
//!
//! 1. [`blocks`]: the layers of the model, by scope, in classes of equal structure;
//! 2. [`menu`]: for a class, the ways to trade resident bytes for seconds, those that nothing beats;
//! 3. [`knapsack`]: one way for every block of every class, within a limit of bytes;
//! 4. [`fit`](mod@fit): that limit follows from the exact peak of a whole plan, in a bounded number of rounds;
//! 5. [`tiers`]: which kinds of tensors leave memory, with one such search for each candidate.
//!
//! Everything is deterministic: one job has one choice. Techniques themselves are passes of `tightfit-pass`; what is decided here is
//! applied in one place, [`Choice::apply`].

pub mod blocks;
pub mod choice;
pub mod explain;
pub mod fit;
pub mod knapsack;
pub mod menu;
pub mod tiers;

pub use choice::Choice;
pub use explain::Explanation;
pub use fit::{Backend, Fit, FitError, Limits, Recompute};
pub use tiers::{Bound, Offload, Request, bound, fit, floor};
