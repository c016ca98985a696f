//! Why a model cannot be built or read.

use tightfit_ir::{OpError, VerifyError};

/// Why a model cannot be built, from code or from a file.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ModelError {
    /// A setting that no model can have, spelled as in `config.json`.
    #[error("{field} is {value}: {message}")]
    Config {
        /// The setting.
        field: &'static str,
        /// As given.
        value: String,
        /// What it must be.
        message: String,
    },
    /// A text that is not the JSON of a `config.json`.
    #[error("config.json: {0}")]
    Json(String),
    /// A field or key of a file whose value does not fit.
    #[error("{field}: {message}")]
    Field {
        /// As the file spells it, within the objects around it: `rope_scaling.factor`.
        field: String,
        /// What it is and what it must be.
        message: String,
    },
    /// A field or key that says something unknown, and so perhaps something that changes the result.
    #[error("{field}: a setting that is not known for {family} models")]
    UnknownField {
        /// As the file spells it.
        field: String,
        /// The family's `model_type`.
        family: &'static str,
    },
    /// A field or key without which there is no model.
    #[error("{field}: missing")]
    MissingField {
        /// As the file would spell it.
        field: String,
    },
    /// A family that nobody has described yet.
    #[error("{field} is \"{value}\", which is not a family known here; known are {known}")]
    UnknownFamily {
        /// `model_type` or `general.architecture`.
        field: &'static str,
        /// As the file says.
        value: String,
        /// All that are known.
        known: String,
    },
    /// Metadata that cannot be read; the message names the key.
    #[error("{0}")]
    Metadata(String),
    /// A tensor of a checkpoint that belongs nowhere in the model.
    #[error("tensor \"{tensor}\" is no part of a {family} model with these settings")]
    UnexpectedTensor {
        /// As the file spells it.
        tensor: String,
        /// The family's `model_type`.
        family: &'static str,
    },
    /// A weight that a checkpoint does not have.
    #[error("tensor \"{tensor}\" is missing")]
    MissingTensor {
        /// As the file would spell it.
        tensor: String,
    },
    /// A tensor of another shape than its weight.
    #[error("tensor \"{tensor}\" is {found}, the model's settings make it {expected}")]
    TensorShape {
        /// As the file spells it.
        tensor: String,
        /// Its shape.
        found: String,
        /// The weight's shape.
        expected: String,
    },
    /// A layer whose operands do not fit.
    #[error("{scope}: {source}")]
    Op {
        /// The part of the model.
        scope: String,
        /// What does not fit.
        source: OpError,
    },
    /// The finished graph is malformed.
    #[error(transparent)]
    Verify(#[from] VerifyError),
}

impl ModelError {
    /// A field whose value does not fit.
    pub(crate) fn field(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Field {
            field: field.into(),
            message: message.into(),
        }
    }
}

/// What a file says, fit for one line of a message: short, and without control characters.
pub(crate) fn excerpt(text: &str) -> String {
    const MOST: usize = 60;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", text[..end].escape_debug()),
        None => text.escape_debug().to_string(),
    }
}
