//! Models as data: a small builder, and the families people train.

pub mod builder;
pub mod llama;

pub use builder::{Builder, ModelError};
pub use llama::LlamaConfig;
