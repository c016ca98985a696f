//! The cheapest mix of techniques that fits a device.
//!
//! A user fixes some settings and leaves the rest open. What is open is a [`Space`] of mixes: how numbers are stored and what is trained
//! ([`Numbers`]), and how a step is cut ([`Cut`]); what is recomputed and offloaded follows for each by exact plans. [`search`](search::search)
//! finds the mix of the highest fidelity that takes at most twice as long as the fastest one that fits.

pub mod device;
mod flags;
pub mod front;
pub mod html;
pub mod levers;
pub mod nearest;
pub mod report;
pub mod search;
pub mod space;
mod text;
pub mod vary;
pub mod why;

pub use device::Device;
pub use flags::flags;
pub use search::{Candidate, search};
pub use space::{Cut, Numbers, Space};
