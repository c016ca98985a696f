//! From text to rows of tokens: tokenizers, chat templates, data files, packing.

pub mod chat;
pub mod data;
mod guard;
pub mod tokenizer;

pub use chat::{ChatError, ChatTemplate, Message, Segment};
pub use guard::quiet_panics;
pub use tokenizer::{DecodeStream, SpecialToken, SpecialTokens, Tokenizer, TokenizerError};
