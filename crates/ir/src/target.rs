//! The numbers of a backend that a plan is made for; no device needs to be present.

use crate::op::Op;
use crate::types::Type;

/// What planning must know of a backend.
pub trait Target {
    /// The backend's name, e.g. `cpu`.
    fn name(&self) -> &str;

    /// The alignment of every buffer, in bytes: a power of two.
    fn alignment(&self) -> u64;

    /// The scratch memory that one node needs there, in bytes: a pure function of operation, types and this backend's settings.
    ///
    /// A backend writes the last byte of a workspace it asked for in every run, so that a measured peak equals a planned one.
    fn workspace(&self, op: &Op, inputs: &[&Type], outputs: &[&Type]) -> u64;
}
