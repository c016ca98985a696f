//! Tokenizers: from text to token ids and back, token for token as transformers does it.
//!
//! A tokenizer comes from a Hugging Face folder ([`Tokenizer::from_folder`]), from `tokenizer.json` alone
//! ([`Tokenizer::from_json`]) or from the vocabulary inside a GGUF file ([`Tokenizer::from_gguf`]). All three become the same thing,
//! a `tokenizers::Tokenizer`, so a model read from GGUF can be saved with a `tokenizer.json` ([`Tokenizer::hf_files`]).
//!
//! Memory is bounded: long texts are encoded piece by piece, cut where a cut cannot change tokens (`pieces.rs` has the rules). No thread is
//! started: of the `tokenizers` crate only calls on single texts are used, and these do not enter its thread pool.

mod error;
mod folder;
mod gguf;
mod pieces;
mod scan;
mod steps;
mod stream;

use pieces::{Cutter, Piece};
use sha2::{Digest, Sha256};
use std::path::PathBuf;

pub use error::TokenizerError;
use error::guarded;
pub use stream::DecodeStream;

/// A token with a role, such as the end of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecialToken {
    /// Its id.
    pub id: u32,
    /// How it is written, for instance `<|im_end|>`.
    pub content: String,
}

/// The tokens that have a role, where the tokenizer has them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// Beginning of sequence.
    pub bos: Option<SpecialToken>,
    /// End of sequence.
    pub eos: Option<SpecialToken>,
    /// Padding.
    pub pad: Option<SpecialToken>,
    /// Unknown character.
    pub unk: Option<SpecialToken>,
}

/// Where a tokenizer was read from: decides what [`Tokenizer::hf_files`] gives.
#[derive(Debug)]
enum Source {
    /// A folder, whose files are passed on as they are.
    Folder {
        path: PathBuf,
        /// Of its `tokenizer.json`.
        sha256: [u8; 32],
    },
    /// Built or read from memory: its files are written from what it is.
    Memory {
        add_bos_token: bool,
        add_eos_token: bool,
        model_max_length: Option<u64>,
    },
}

/// A tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    cutter: Cutter,
    /// The ids that `add_special` puts before and after a text.
    before: Vec<u32>,
    after: Vec<u32>,
    special: SpecialTokens,
    eos_ids: Vec<u32>,
    vocab_size: usize,
    chat_template: Option<String>,
    source: Source,
    fingerprint: String,
}

impl Tokenizer {
    /// The ids of `text`, in which special tokens are recognised, as transformers does. With `add_special`, the tokens that the
    /// tokenizer puts around a text (often `bos` before it) are added.
    ///
    /// Texts of more than 64 KiB are encoded piece by piece; see [`Tokenizer::encode_pieces`].
    ///
    /// # Errors
    /// [`TokenizerError::Encode`], where a tokenizer's own rules fail on the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let mut ids = Vec::new();
        self.encode_pieces(text, add_special, &mut |piece| ids.extend_from_slice(piece))?;
        Ok(ids)
    }

    /// [`Tokenizer::encode`] with bounded memory: `sink` is given the ids piece by piece, for about 64 KiB of text at a time.
    ///
    /// Cuts are made where they cannot change tokens. Only a text that has 64 KiB without any such place (no single space, no
    /// single newline, no punctuation between ideographs) is cut inside, and may get other tokens near that cut.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`]; `sink` may have been given some ids by then.
    pub fn encode_pieces(
        &self,
        text: &str,
        add_special: bool,
        sink: &mut impl FnMut(&[u32]),
    ) -> Result<(), TokenizerError> {
        if add_special && !self.before.is_empty() {
            sink(&self.before);
        }
        self.encode_each(self.cutter.pieces(text), sink)?;
        if add_special && !self.after.is_empty() {
            sink(&self.after);
        }
        Ok(())
    }

    /// [`Tokenizer::encode_pieces`] for a text that goes on after another one, such as an answer after its question: nothing is put
    /// before or after it, also not the space that SentencePiece puts before a text.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_continued(&self, text: &str, sink: &mut impl FnMut(&[u32])) -> Result<(), TokenizerError> {
        const LEAD: &str = "\n";
        let mut pieces = self.cutter.pieces(text);
        // Where a space would be put in front, a newline takes that place: nothing merges with it, so its tokens can be left out again.
        if self.cutter.newline_leads()
            && let Some(first) = pieces.next()
        {
            let (lead, ids) = (
                self.encode_whole(LEAD)?,
                self.encode_whole(&format!("{LEAD}{}", first.text))?,
            );
            match ids.get_ids().strip_prefix(lead.get_ids()) {
                Some(ids) => sink(ids),
                None => self.encode_each([first], sink)?,
            }
        }
        self.encode_each(pieces, sink)
    }

    fn encode_each<'t>(
        &self,
        pieces: impl IntoIterator<Item = Piece<'t>>,
        sink: &mut impl FnMut(&[u32]),
    ) -> Result<(), TokenizerError> {
        for piece in pieces {
            let encoding = self.encode_whole(piece.text)?;
            let ids = encoding.get_ids();
            sink(match piece.leave_out {
                Some(id) if ids.first() == Some(&id) => &ids[1..],
                _ => ids,
            });
        }
        Ok(())
    }

    fn encode_whole(&self, text: &str) -> Result<tokenizers::Encoding, TokenizerError> {
        guarded(|| self.inner.encode_fast(text, false)).map_err(TokenizerError::Encode)
    }

    /// The text of `ids`; special tokens are left out with `skip_special`, and ids that the tokenizer does not have always are.
    /// Bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`TokenizerError::Decode`], where a tokenizer's own rules fail.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        guarded(|| self.inner.decode(ids, skip_special)).map_err(TokenizerError::Decode)
    }

    /// Decodes tokens one at a time, for text that is printed while it is generated.
    pub fn decode_stream(&self, skip_special: bool) -> DecodeStream<'_> {
        DecodeStream::new(self, skip_special)
    }

    /// One more than the highest id. A model's vocabulary may be larger (padded), never smaller.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The id of the token written `content`.
    pub fn token_to_id(&self, content: &str) -> Option<u32> {
        self.inner.token_to_id(content)
    }

    /// How the token `id` is written in the vocabulary (byte-level vocabularies write bytes as letters).
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The tokens that have a role.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.special
    }

    /// What the tokenizer puts before a text.
    pub fn prefix(&self) -> &[u32] {
        &self.before
    }

    /// Beginning of sequence.
    pub fn bos(&self) -> Option<u32> {
        self.special.bos.as_ref().map(|t| t.id)
    }

    /// End of sequence: what separates documents.
    pub fn eos(&self) -> Option<u32> {
        self.special.eos.as_ref().map(|t| t.id)
    }

    /// Padding.
    pub fn pad(&self) -> Option<u32> {
        self.special.pad.as_ref().map(|t| t.id)
    }

    /// The ids at which generation ends: `eos`, and what `generation_config.json`, `config.json` or GGUF metadata add.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// The source of the chat template, if there is one.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }

    /// SHA-256, in hexadecimal, of all that decides which tokens a text gets. Equal fingerprints, equal tokens; a tokenizer read from
    /// GGUF and its `tokenizer.json` have different ones.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Finishes a tokenizer: finds what it puts around texts and how they may be cut.
    fn new(inner: tokenizers::Tokenizer, place: &str, parts: Parts) -> Result<Self, TokenizerError> {
        let invalid = |why: String| TokenizerError::invalid(place, why);
        let (before, after) = surroundings(&inner).map_err(invalid)?;
        let cutter = Cutter::new(&inner, pieces::PIECE);
        let Parts {
            special,
            mut eos_ids,
            vocab_size,
            chat_template,
            source,
            mut hash,
        } = parts;
        for id in before.iter().chain(&after) {
            hash.update(id.to_le_bytes());
        }
        let added = guarded(|| Ok(serde_json::to_string(inner.get_added_vocabulary())?)).map_err(invalid)?;
        hash.update(added);
        let fingerprint = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        eos_ids.extend(special.eos.iter().map(|t| t.id));
        eos_ids.sort_unstable();
        eos_ids.dedup();
        Ok(Self {
            inner,
            cutter,
            before,
            after,
            special,
            eos_ids,
            vocab_size,
            chat_template,
            source,
            fingerprint,
        })
    }
}

/// What [`Tokenizer::new`] is told by the readers.
struct Parts {
    special: SpecialTokens,
    eos_ids: Vec<u32>,
    vocab_size: usize,
    chat_template: Option<String>,
    source: Source,
    /// Has taken in the file or the metadata.
    hash: Sha256,
}

/// The ids that a tokenizer puts before and after a text: found by encoding one with and without.
fn surroundings(inner: &tokenizers::Tokenizer) -> Result<(Vec<u32>, Vec<u32>), String> {
    const PROBE: &str = "a";
    let ids = |add| guarded(|| Ok(inner.encode_fast(PROBE, add)?.get_ids().to_vec()));
    let (bare, full) = (ids(false)?, ids(true)?);
    let start = (0..=full.len().saturating_sub(bare.len())).find(|&at| full[at..].starts_with(&bare));
    let start = start.ok_or("its post-processor does more than to add tokens before and after a text")?;
    Ok((full[..start].to_vec(), full[start + bare.len()..].to_vec()))
}
