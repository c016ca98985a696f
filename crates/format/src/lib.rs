//! Checkpoint files: what is in them, and their tensors as `f32`.
//!
//! [`Checkpoint::open`] takes what people have: a Hugging Face folder (one safetensors file, or shards with an index), a safetensors
//! file, an index, or a GGUF file. It reads headers only. [`Checkpoint::tensors`] is the catalogue, with a tensor of any type in it;
//! [`Checkpoint::read`] copies a range of a tensor's bytes and [`decode`] turns whole blocks of them into `f32`. Neither allocates, and
//! no file is mapped: a file that is cut short while it is open is an error, not a fault.
//!
//! # Files are hostile
//! Every number from a file is checked before it is used. Opening a file takes less memory than 16 times its size plus 16 MiB,
//! whatever it claims. A bad file gives a [`FormatError`] that names the file and the key, tensor or byte at fault.
//! The parsers [`gguf::parse`], [`safetensors::parse`] and [`index::parse`] take any reader, so tests and fuzzers feed them from memory.
//!
//! # Why these parsers are our own
//! The crate `safetensors` (0.8) checks offsets well, but wants the whole file as one slice (so: a map of it), buffers its header in a
//! generic tree that can take more than 16 times its size, and lets the last of two tensors of one name win. Our tests hold our reader
//! against it. For GGUF: `gguf` (0.1), by its description, wants the file in memory; `gguf-rs` (0.1) allocates a string of up to 1 GiB because the file says
//! so, and brings a command line with it; `gguf-rs-lib` (0.3) is careful, but keeps each array element in 32 bytes (an array of bytes
//! becomes 32 times the file), its limits are fixed numbers, and its errors do not say which key; `candle-core` is a tensor framework.

mod checkpoint;
mod contents;
mod decode;
mod encode;
mod encoding;
mod entry;
mod error;
pub mod gguf;
pub mod index;
pub mod safetensors;
mod source;

pub use checkpoint::{Checkpoint, irregular};
pub use contents::Contents;
pub use decode::decode;
pub use encode::encode;
pub use encoding::{Encoding, Opaque};
pub use entry::Entry;
pub use error::{FormatError, Problem};
pub use tightfit_quant::Block;
