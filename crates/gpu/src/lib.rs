//! Cards, and what planning must know of a backend that runs on them.
//!
//! A plan for a card is one for tightfit's own backend there: kernels whose workspaces, alignment and reserve are written down here. It
//! says nothing of what another program would need on the same card.

pub mod card;
pub mod target;

pub use card::Card;
pub use target::GpuTarget;
