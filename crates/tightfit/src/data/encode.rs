//! A model's tokenizer and chat template, as data files need them.

use tightfit_text::chat::ChatTemplate;
use tightfit_text::data::{EncodeError, Encoder, Message, Segment};
use tightfit_text::tokenizer::Tokenizer;

/// Encodes data files for one model.
pub struct TextEncoder<'a> {
    /// The model's.
    pub tokenizer: &'a Tokenizer,
    /// The model's, where it has one.
    pub template: Option<&'a ChatTemplate>,
}

impl Encoder for TextEncoder<'_> {
    fn encode(&self, text: &str, begin: bool, mut push: &mut dyn FnMut(&[u32])) -> Result<(), EncodeError> {
        if begin {
            push(self.tokenizer.prefix());
            self.tokenizer.encode_pieces(text, false, &mut push)?;
        } else {
            self.tokenizer.encode_continued(text, &mut push)?;
        }
        Ok(())
    }

    fn chat(&self, messages: &[Message]) -> Result<Option<Vec<Segment>>, EncodeError> {
        let Some(template) = self.template else {
            return Ok(None);
        };
        Ok(Some(template.segments(messages)?))
    }

    fn eos(&self) -> Option<u32> {
        self.tokenizer.eos()
    }
}
