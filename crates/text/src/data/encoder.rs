//! What preparing data asks of a tokenizer.

pub use crate::chat::{Message, Segment};

/// Why an encoder refused.
pub type EncodeError = Box<dyn std::error::Error + Send + Sync>;

/// A tokenizer and, perhaps, a chat template.
pub trait Encoder {
    /// Encodes `text`, which may be megabytes long, and hands its tokens to `push`, all at once or in parts.
    ///
    /// `begin`: the text begins a document, so whatever the tokenizer puts in front of one (a beginning-of-sequence token, a
    /// dummy blank) belongs to it. Otherwise the text goes on where earlier text ended.
    ///
    /// # Errors
    /// Whatever keeps the tokenizer from encoding the text.
    fn encode(&self, text: &str, begin: bool, push: &mut dyn FnMut(&[u32])) -> Result<(), EncodeError>;

    /// Renders a whole conversation; `None` where there is no chat template. The segments, joined, are the rendered text, with
    /// whatever begins and ends it: none of them is encoded as the begin of a document.
    ///
    /// # Errors
    /// What the template says about the messages.
    fn chat(&self, messages: &[Message]) -> Result<Option<Vec<Segment>>, EncodeError>;

    /// The token that ends a document.
    fn eos(&self) -> Option<u32>;
}
