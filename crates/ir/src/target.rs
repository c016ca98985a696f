//! The numbers of a backend that a plan is made for; no device needs to be present.

use std::ops::Range;

use serde::{Deserialize, Serialize};

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

    /// How long one run of an operation takes there, in seconds, as far as can be predicted.
    fn seconds(&self, op: &Op, inputs: &[&Type], outputs: &[&Type]) -> f64;

    /// The way between memory and the next tier.
    fn link(&self) -> Link;
}

/// How fast bytes go between memory and the next tier.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// From the lower tier, in bytes per second.
    pub read: f64,
    /// To the lower tier, in bytes per second.
    pub write: f64,
}

/// Bytes in the arena with a type.
#[derive(Clone, Debug, PartialEq)]
pub struct Slot {
    /// From the start of the arena.
    pub offset: u64,
    /// What the bytes hold.
    pub ty: Type,
}

/// One node with its memory resolved: all that a backend needs to run it.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// What to compute.
    pub op: Op,
    /// Operands.
    pub inputs: Vec<Slot>,
    /// Results; they may lie over operands as [`Rule::aliases`](crate::op::Rule::aliases) permits.
    pub outputs: Vec<Slot>,
    /// Scratch memory of the size that [`Target::workspace`] gave; empty if that was 0.
    pub workspace: Range<u64>,
}
