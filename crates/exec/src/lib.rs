//! Runs plans: one arena, a step loop that allocates nothing, checkpoint files.

pub mod arena;
pub mod checkpoint;
pub mod init;
pub mod load;
pub mod persistent;
pub mod session;
pub mod tier;

pub use arena::{Arena, ArenaError};
pub use session::{Driver, Feed, Results, RunError, STACK_BYTES, Session, SessionError};
