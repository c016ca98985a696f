//! Why there are no settings.

use std::path::PathBuf;

use tightfit_model::ModelError;

/// A setting that cannot be, or a file that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file is not there or not readable.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not TOML of this form.
    #[error("{}: {}", path.display(), source.to_string().trim_end())]
    Toml {
        /// The file.
        path: PathBuf,
        /// Line and reason.
        source: Box<toml::de::Error>,
    },
    /// A model that cannot be.
    #[error(transparent)]
    Model(ModelError),
    /// A path that settings files cannot hold.
    #[error("{} is not UTF-8, and the settings are kept as text: give it another name", path.display())]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// A model and nothing to train it on.
    #[error("--model needs --data: the files to train on, such as --data corpus.txt")]
    NoData,
    /// Text and no tokenizer to read it with.
    #[error("--data needs --model: the model to start from, whose tokenizer reads the text")]
    NoModel,
    /// Generated text has no end.
    #[error("--epochs needs --data: generated text has no end; say --steps")]
    EndlessText,
    /// A limit of a tier that this machine does not offload to.
    #[error(
        "--host-memory is of no use on the CPU: what is offloaded leaves the host's memory for a file; limit that by --disk"
    )]
    HostMemory,
    /// A size of a model that has its own.
    #[error("--{} is a size of fresh models: --model has its own", field.replace('_', "-"))]
    Architecture {
        /// The setting.
        field: &'static str,
    },
    /// A setting that would change nothing: of adapters where there are none, or of another optimizer.
    #[error("--{} is of {of}: {instead}", field.replace('_', "-"))]
    Idle {
        /// The setting.
        field: &'static str,
        /// What it is of.
        of: String,
        /// What to do instead, or why.
        instead: String,
    },
    /// A value out of range.
    #[error("--{} is {value}: {message}", field.replace('_', "-"))]
    Value {
        /// The setting.
        field: &'static str,
        /// As given.
        value: String,
        /// What it must be.
        message: String,
    },
}
