//! Evaluation and generation: nothing is kept that only a backward would need.
//!
//! Saves every activation as soon as its last reader in the forward has run, since no gradient asks for it later; costs
//! nothing; always legal.

use tightfit_ir::{Binding, Forward, Source};

use crate::{PassError, dead_code};

/// The same model with no weight trainable and only what its results need.
///
/// # Errors
/// The model is malformed.
pub fn no_grad(forward: Forward) -> Result<Forward, PassError> {
    let mut graph = forward.graph;
    for value in &mut graph.values {
        if let Source::Input(Binding::Persistent { trainable, .. }) = &mut value.source {
            *trainable = false;
        }
    }
    let graph = dead_code(&graph);
    graph.verify().map_err(PassError::verify("no_grad"))?;
    Ok(Forward { graph })
}
