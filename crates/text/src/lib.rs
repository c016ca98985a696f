//! From text to rows of tokens: tokenizers, chat templates, data files, packing.

pub mod chat;
pub mod data;
pub mod tokenizer;

pub use chat::{ChatError, ChatTemplate, Message, Segment};
pub use tokenizer::{DecodeStream, SpecialToken, SpecialTokens, Tokenizer, TokenizerError};
