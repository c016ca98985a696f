//! Models as data: a small builder, the families people train, and the files they are read from.

pub mod builder;
pub mod config;
pub mod decoder;
mod error;
pub mod family;
pub mod known;
pub mod tensors;

pub use builder::Builder;
pub use config::{DecoderConfig, LayerType};
pub use decoder::{BatchShape, DecodeShape};
pub use error::ModelError;
pub use family::Family;
pub use known::Known;
pub use tensors::{Naming, RowOrder, Sources, TensorSource};
