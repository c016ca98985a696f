//! Decoding while tokens are generated.

use super::pieces::char_boundary;
use super::{Tokenizer, TokenizerError};

/// A character has at most four bytes, and every token of a byte-level or byte-fallback vocabulary at least one. Tokens may end one
/// character and begin another, so the wait for a whole one has no natural end; garbage is let through after this many tokens.
const MOST_PENDING: usize = 32;

/// Decodes tokens one at a time, and never gives half a character: see [`Tokenizer::decode_stream`].
///
/// What a token decodes to depends on its neighbours (a space that only the first word loses, bytes of one character), so each
/// step decodes the tokens since the last text that was given, and that text's own tokens before them.
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// Tokens of the last text given, then tokens whose text was not given yet.
    ids: Vec<u32>,
    given: usize,
}

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        Self {
            tokenizer,
            skip_special,
            ids: Vec::new(),
            given: 0,
        }
    }

    /// Takes the next token; gives the text that is certain by now, which may be none.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        self.ids.push(id);
        let text = self.pending()?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && self.ids.len() - self.given < MOST_PENDING {
            return Ok(String::new());
        }
        // A token without text (a special one that is skipped) says nothing about its neighbours: keep those that do.
        if !text.is_empty() {
            self.ids.drain(..self.given);
            self.given = self.ids.len();
        }
        Ok(text)
    }

    /// Ends the stream: gives what is left, with U+FFFD for a character that was never finished.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(mut self) -> Result<String, TokenizerError> {
        self.pending()
    }

    /// The text of the tokens that were not given yet.
    fn pending(&mut self) -> Result<String, TokenizerError> {
        let known = self.tokenizer.decode(&self.ids[..self.given], self.skip_special)?;
        let mut all = self.tokenizer.decode(&self.ids, self.skip_special)?;
        match all.strip_prefix(&*known) {
            Some(rest) => Ok(rest.to_owned()),
            // Byte fallback decodes a run of bytes as one, so a bad byte can spoil what was given: wait, then give what follows it.
            None => {
                let at = char_boundary(&all, known.len());
                Ok(all.split_off(at))
            }
        }
    }
}
