//! What tests across the workspace share. Nothing here ships: mistakes of a test panic with a message that names them.
//!
//! - [`suite`]: the operation suite that every backend runs, and the trait through which it runs it.
//! - [`gradcheck`]: every gradient rule against central finite differences.
//! - [`interpret`]: graphs and whole steps through the naive `f64` references.
//! - [`random`] and [`data`]: small random models and data to feed them.

pub mod data;
pub mod gradcheck;
pub mod interpret;
pub mod random;
pub mod rng;
pub mod suite;
