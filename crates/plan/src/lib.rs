//! From a step to a plan: an order, lifetimes, offsets, and the words to explain them.
//!
//! [`schedule()`] fixes the order of every program, [`plan()`] places every buffer of it in one arena, and a [`Plan`] can be
//! printed, checked against a budget, written to a file and read back. Only a plan can run.

pub mod calls;
pub mod error;
pub mod file;
pub mod liveness;
pub mod order;
pub mod place;
pub mod plan;
pub mod predict;
pub mod report;
pub mod schedule;
pub mod validate;

pub use calls::{Action, Direction, MOST_IN_FLIGHT, ProgramCalls, Transfer, Work};
pub use error::PlanError;
pub use liveness::{Buffer, InPlace, Storage};
pub use order::schedule;
pub use plan::{Draft, Plan, plan};
pub use predict::Prediction;
pub use report::{Infeasible, Summary};
pub use schedule::Schedule;
