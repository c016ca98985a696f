//! Why there is no plan.

use tightfit_ir::VerifyError;

use crate::place::PlaceError;
use crate::validate::Violation;

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// The step is malformed.
    #[error("malformed step: {0}")]
    Verify(#[from] VerifyError),
    /// Offsets for another number of routines.
    #[error("offsets of {found} routines, the step has {expected}")]
    Routines {
        /// As given.
        found: usize,
        /// The step's.
        expected: usize,
    },
    /// An order that breaks a dependency.
    #[error("order of program {program}: {message}")]
    Order {
        /// The program.
        program: String,
        /// What does not hold.
        message: String,
    },
    /// Sizes beyond what 64 bits can address.
    #[error("the persistent tensors and one routine's buffers add up to more than 2^64 bytes")]
    TooLarge,
    /// Buffers that cannot be placed.
    #[error("routine {routine}: {source}")]
    Place {
        /// The routine.
        routine: String,
        /// Why not.
        source: PlaceError,
    },
    /// A placement that the validator rejects.
    #[error("routine {routine}: {source}")]
    Invalid {
        /// The routine.
        routine: String,
        /// What does not hold.
        source: Violation,
    },
}
