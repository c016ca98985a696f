//! Tokenizers out of the metadata of GGUF files.
//!
//! The keys are those of the GGUF specification (`docs/gguf.md` of `ggml-org/ggml`). `tokenizer.ggml.model` says how the
//! vocabulary works: `gpt2` is byte-level BPE, whose merges are in the file and whose pre-tokenizer is named by `tokenizer.ggml.pre`;
//! `llama` is SentencePiece BPE, whose merges follow from the scores of its tokens. A name says which expression splits texts into words, as the
//! `tokenizer.json` of the models it stands for has it. Names that are not in [`PRE_TOKENIZERS`] are refused: a wrong guess gives
//! wrong tokens without a word.

use super::{Parts, Source, SpecialToken, SpecialTokens, Tokenizer, TokenizerError, guarded};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use tightfit_format::gguf::Metadata;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::{AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

/// Llama 3 (and, before it, cl100k): words with one leading character that is no letter, digits by three, contractions in any case.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2: the same with single digits.
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Mistral Nemo's Tekken: words split where case changes, no contractions.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The expressions whose words are known to end where `pieces.rs` cuts. GPT-2's own is inside `ByteLevel`.
pub(super) const SPLITS: [&str; 3] = [LLAMA3, QWEN2, TEKKEN];

/// What a value of `tokenizer.ggml.pre` stands for.
struct PreTokenizer {
    names: &'static [&'static str],
    /// Texts are brought into Unicode's composed form first.
    nfc: bool,
    /// Every digit is a word.
    digits: bool,
    /// The expression; GPT-2's if none.
    split: Option<&'static str>,
    /// A word that is a token is that token, whatever merges would make of it.
    ignore_merges: bool,
    /// Whether `bos` is added where the file does not say.
    add_bos: bool,
}

const GPT2: PreTokenizer = PreTokenizer {
    names: &["default", "gpt-2", "gpt2", "phi-2"],
    nfc: false,
    digits: false,
    split: None,
    ignore_merges: false,
    add_bos: false,
};

const PRE_TOKENIZERS: [PreTokenizer; 5] = [
    GPT2,
    PreTokenizer {
        names: &["smollm", "starcoder", "refact"],
        digits: true,
        ..GPT2
    },
    PreTokenizer {
        names: &["qwen2"],
        nfc: true,
        split: Some(QWEN2),
        ..GPT2
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        split: Some(LLAMA3),
        ignore_merges: true,
        add_bos: true,
        ..GPT2
    },
    PreTokenizer {
        names: &["tekken"],
        split: Some(TEKKEN),
        ignore_merges: true,
        add_bos: true,
        ..GPT2
    },
];

/// Values of `tokenizer.ggml.token_type`.
mod kind {
    pub const NORMAL: u64 = 1;
    pub const UNKNOWN: u64 = 2;
    pub const CONTROL: u64 = 3;
    pub const USER_DEFINED: u64 = 4;
}

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";

/// The longest token that takes part in merges, in bytes. Real ones end near 256; finding all ways to cut a token is quadratic.
const LONGEST: usize = 512;

/// The vocabulary of a file.
struct Vocabulary<'m> {
    tokens: &'m [String],
    /// Empty (all normal), or one for each token.
    types: Vec<u64>,
}

impl<'m> Vocabulary<'m> {
    fn read(metadata: &'m Metadata) -> Result<Self, TokenizerError> {
        let tokens = metadata.strs(TOKENS)?.unwrap_or_default();
        if tokens.is_empty() {
            return Err(TokenizerError::invalid(TOKENS, "missing or empty"));
        }
        let types = metadata.u64s(TYPES)?.unwrap_or_default();
        if !types.is_empty() && types.len() != tokens.len() {
            return Err(TokenizerError::invalid(
                TYPES,
                format!("{} types for {} tokens", types.len(), tokens.len()),
            ));
        }
        Ok(Self { tokens, types })
    }

    fn kind(&self, id: usize) -> u64 {
        self.types.get(id).copied().unwrap_or(kind::NORMAL)
    }

    /// Where a token is there twice, the later id counts, as in the Python dictionaries of transformers.
    fn ids(&self) -> Vocab {
        self.tokens
            .iter()
            .zip(0..)
            .map(|(token, id)| (token.clone(), id))
            .collect()
    }

    /// The token whose id is the value of `key`.
    fn special(&self, metadata: &Metadata, key: &str) -> Result<Option<SpecialToken>, TokenizerError> {
        let Some(id) = metadata.u64(key)? else { return Ok(None) };
        let token = usize::try_from(id).ok().and_then(|id| self.tokens.get(id));
        let token = token
            .ok_or_else(|| TokenizerError::invalid(key, format!("{id}, but there are {} tokens", self.tokens.len())))?;
        // Below the number of tokens, of which the file has less than 2^32 bytes each; `id` is an index of a list in memory.
        Ok(Some(SpecialToken {
            id: id as u32,
            content: token.clone(),
        }))
    }
}

impl Tokenizer {
    /// The tokenizer inside a GGUF file.
    ///
    /// # Errors
    /// No tokenizer, or one of a kind that is not supported; keys of the wrong type; lists that do not belong together; ids that no
    /// token has. The error names the key.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        let vocabulary = Vocabulary::read(metadata)?;
        if u32::try_from(vocabulary.tokens.len()).is_err() {
            return Err(TokenizerError::invalid(TOKENS, "more than 2^32 tokens"));
        }
        let special = SpecialTokens {
            bos: vocabulary.special(metadata, "tokenizer.ggml.bos_token_id")?,
            eos: vocabulary.special(metadata, "tokenizer.ggml.eos_token_id")?,
            pad: vocabulary.special(metadata, "tokenizer.ggml.padding_token_id")?,
            unk: vocabulary.special(metadata, "tokenizer.ggml.unknown_token_id")?,
        };
        let model = metadata
            .str(MODEL)?
            .ok_or_else(|| TokenizerError::invalid(MODEL, "missing: the file has no tokenizer"))?;
        let (mut inner, add_bos) = match model {
            "gpt2" => {
                let pre = pre_tokenizer(metadata.str(PRE)?)?;
                (byte_level(&vocabulary, pre, metadata)?, pre.add_bos)
            }
            "llama" => (sentencepiece(&vocabulary, special.unk.as_ref(), metadata)?, true),
            other => {
                let why = format!("tokenizers of the kind `{other}` are not supported (`gpt2` and `llama` are)");
                return Err(TokenizerError::invalid(MODEL, why));
            }
        };
        let added = added_tokens(&vocabulary, &special);
        guarded(|| inner.add_tokens(added)).map_err(|e| TokenizerError::invalid(TOKENS, e))?;

        let add_bos_token = metadata.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(add_bos) && special.bos.is_some();
        let add_eos_token = metadata.bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false) && special.eos.is_some();
        let (bos, eos) = (
            special.bos.as_ref().filter(|_| add_bos_token),
            special.eos.as_ref().filter(|_| add_eos_token),
        );
        inner.with_post_processor(surround(bos, eos));

        let end_of_turn = vocabulary.special(metadata, "tokenizer.ggml.eot_token_id")?;
        let context_length = match metadata.str("general.architecture")? {
            Some(architecture) => metadata.u64(&format!("{architecture}.context_length"))?,
            None => None,
        };
        let parts = Parts {
            eos_ids: end_of_turn.iter().map(|t| t.id).collect(),
            vocab_size: vocabulary.tokens.len(),
            chat_template: metadata.str("tokenizer.chat_template")?.map(str::to_owned),
            source: Source::Memory {
                add_bos_token,
                add_eos_token,
                model_max_length: context_length,
            },
            hash: digest(&vocabulary, metadata)?,
            special,
        };
        Tokenizer::new(inner, "tokenizer.ggml", parts)
    }
}

fn pre_tokenizer(name: Option<&str>) -> Result<&'static PreTokenizer, TokenizerError> {
    let name = name.unwrap_or("default");
    PRE_TOKENIZERS
        .iter()
        .find(|pre| pre.names.contains(&name))
        .ok_or_else(|| TokenizerError::UnknownPreTokenizer {
            name: name.to_owned(),
            known: PRE_TOKENIZERS
                .iter()
                .flat_map(|pre| pre.names)
                .copied()
                .collect::<Vec<_>>()
                .join(", "),
        })
}

fn byte_level(
    vocabulary: &Vocabulary,
    pre: &PreTokenizer,
    metadata: &Metadata,
) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let merges = metadata
        .strs(MERGES)?
        .ok_or_else(|| TokenizerError::invalid(MERGES, "missing"))?;
    let model = BPE::builder()
        .vocab_and_merges(vocabulary.ids(), split_merges(merges)?)
        .ignore_merges(pre.ignore_merges);
    let mut inner =
        tokenizers::Tokenizer::new(guarded(|| model.build()).map_err(|e| TokenizerError::invalid(MERGES, e))?);
    let words = match pre.split {
        Some(regex) => json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}),
        None if pre.digits => json!({"type": "Digits", "individual_digits": true}),
        None => Value::Null,
    };
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": pre.split.is_none()});
    let steps: Vec<Value> = [words, bytes.clone()]
        .into_iter()
        .filter(|step| !step.is_null())
        .collect();
    inner.with_pre_tokenizer(Some(part::<PreTokenizerWrapper>(
        json!({"type": "Sequence", "pretokenizers": steps}),
    )?));
    inner.with_decoder(Some(part::<DecoderWrapper>(bytes)?));
    if pre.nfc {
        let nfc = part::<NormalizerWrapper>(json!({"type": "NFC"}))?;
        guarded(|| inner.with_normalizer(Some(nfc)).map(drop)).map_err(|e| TokenizerError::invalid(PRE, e))?;
    }
    Ok(inner)
}

fn split_merges(merges: &[String]) -> Result<Merges, TokenizerError> {
    let split = |(at, merge): (usize, &String)| match merge.split_once(' ') {
        Some((left, right)) if !right.contains(' ') => Ok((left.to_owned(), right.to_owned())),
        _ => Err(TokenizerError::invalid(
            MERGES,
            format!("merge {at} is not two tokens with a space between them"),
        )),
    };
    merges.iter().enumerate().map(split).collect()
}

fn sentencepiece(
    vocabulary: &Vocabulary,
    unk: Option<&SpecialToken>,
    metadata: &Metadata,
) -> Result<tokenizers::Tokenizer, TokenizerError> {
    const SQUEEZE: &str = "tokenizer.ggml.remove_extra_whitespaces";
    if metadata.bool(SQUEEZE)?.unwrap_or(false) {
        return Err(TokenizerError::invalid(SQUEEZE, "not supported"));
    }
    let merges = match metadata.strs(MERGES)? {
        Some(merges) => split_merges(merges)?,
        None => merges_of_scores(vocabulary, metadata)?,
    };
    let mut model = BPE::builder()
        .vocab_and_merges(vocabulary.ids(), merges)
        .fuse_unk(true)
        .byte_fallback(true);
    let unknown = (0..vocabulary.tokens.len()).find(|&id| vocabulary.kind(id) == kind::UNKNOWN);
    if let Some(unk) = unk
        .map(|t| &t.content)
        .or_else(|| unknown.map(|id| &vocabulary.tokens[id]))
    {
        model = model.unk_token(unk.clone());
    }
    let mut inner =
        tokenizers::Tokenizer::new(guarded(|| model.build()).map_err(|e| TokenizerError::invalid(TOKENS, e))?);
    let prefix = metadata.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
    let scheme = if prefix { "first" } else { "never" };
    let spaces = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
    inner.with_pre_tokenizer(Some(part::<PreTokenizerWrapper>(spaces)?));
    let mut steps = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        steps.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    inner.with_decoder(Some(part::<DecoderWrapper>(
        json!({"type": "Sequence", "decoders": steps}),
    )?));
    Ok(inner)
}

/// The merges that the scores of a SentencePiece vocabulary imply: of two neighbours, those are merged first that make the token with
/// the highest score. Each way to cut a token into two tokens is a merge; of one token's, the longer left side goes first.
fn merges_of_scores(vocabulary: &Vocabulary, metadata: &Metadata) -> Result<Merges, TokenizerError> {
    let scores = metadata.f64s(SCORES)?.unwrap_or_default();
    if scores.len() != vocabulary.tokens.len() {
        return Err(TokenizerError::invalid(
            SCORES,
            format!("{} scores for {} tokens", scores.len(), vocabulary.tokens.len()),
        ));
    }
    let mergeable = |id: &usize| matches!(vocabulary.kind(*id), kind::NORMAL | kind::USER_DEFINED);
    let parts: HashSet<&str> = vocabulary.tokens.iter().map(String::as_str).collect();
    // A vocabulary made for it could have far more merges than bytes; real ones have two short ones for each token.
    let room = 8 * parts.iter().map(|token| token.len()).sum::<usize>() + (64 << 10);
    let mut used = 0;
    let mut merges: Vec<(f64, usize, &str, &str)> = Vec::new();
    for id in (0..vocabulary.tokens.len()).filter(mergeable) {
        let token = &*vocabulary.tokens[id];
        if token.len() > LONGEST {
            if vocabulary.kind(id) == kind::USER_DEFINED {
                continue;
            }
            return Err(TokenizerError::invalid(
                TOKENS,
                format!("token {id} has {} bytes, more than {LONGEST}", token.len()),
            ));
        }
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if parts.contains(left) && parts.contains(right) {
                used += token.len();
                merges.push((scores[id], left.chars().count(), left, right));
            }
        }
        if used > room {
            return Err(TokenizerError::invalid(
                TOKENS,
                "its tokens can be merged in too many ways",
            ));
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then(b.1.cmp(&a.1)));
    Ok(merges
        .into_iter()
        .map(|(_, _, left, right)| (left.to_owned(), right.to_owned()))
        .collect())
}

/// The tokens that are found in a text before anything else: control tokens and those with a role (left out by `skip_special`),
/// and tokens that the model's makers defined.
fn added_tokens(vocabulary: &Vocabulary, special: &SpecialTokens) -> Vec<AddedToken> {
    let SpecialTokens { bos, eos, pad, unk } = special;
    let roles: Vec<u32> = [bos, eos, pad, unk].into_iter().flatten().map(|t| t.id).collect();
    let added = |(token, id): (&String, u32)| {
        let kind = vocabulary.kind(id as usize);
        let special = matches!(kind, kind::CONTROL | kind::UNKNOWN) || roles.contains(&id);
        (special || kind == kind::USER_DEFINED).then(|| AddedToken::from(token.clone(), special).normalized(false))
    };
    vocabulary.tokens.iter().zip(0..).filter_map(added).collect()
}

/// The post-processor that puts `bos` before a text and `eos` after it.
pub(super) fn surround(bos: Option<&SpecialToken>, eos: Option<&SpecialToken>) -> Option<PostProcessorWrapper> {
    if bos.is_none() && eos.is_none() {
        return None;
    }
    let token = |t: &SpecialToken, sequence: u32| json!({"SpecialToken": {"id": t.content, "type_id": sequence}});
    let around = |name: &str, sequence: u32| -> Vec<Value> {
        let text = json!({"Sequence": {"id": name, "type_id": sequence}});
        bos.map(|t| token(t, sequence))
            .into_iter()
            .chain([text])
            .chain(eos.map(|t| token(t, sequence)))
            .collect()
    };
    let used = bos.into_iter().chain(eos);
    let used = used.map(|t| {
        (
            t.content.clone(),
            json!({"id": t.content, "ids": [t.id], "tokens": [t.content]}),
        )
    });
    let template = json!({
        "type": "TemplateProcessing",
        "single": around("A", 0),
        "pair": around("A", 0).into_iter().chain(around("B", 1)).collect::<Vec<_>>(),
        "special_tokens": used.collect::<serde_json::Map<_, _>>(),
    });
    // A template with its tokens, as the crate writes it itself, is one that it reads.
    serde_json::from_value(template).ok()
}

/// A part of a tokenizer from its JSON, as it is in `tokenizer.json`.
fn part<T: serde::de::DeserializeOwned>(json: Value) -> Result<T, TokenizerError> {
    serde_json::from_value(json).map_err(|e| TokenizerError::invalid(MODEL, e))
}

/// Takes in all that decides tokens, but for what [`Tokenizer::new`] adds.
fn digest(vocabulary: &Vocabulary, metadata: &Metadata) -> Result<Sha256, TokenizerError> {
    let mut hash = Sha256::new();
    let mut text = |text: &str| {
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    };
    text("gguf");
    for key in [MODEL, PRE] {
        text(metadata.str(key)?.unwrap_or_default());
    }
    for list in [vocabulary.tokens, metadata.strs(MERGES)?.unwrap_or_default()] {
        text(&list.len().to_string());
        list.iter().for_each(|item| text(item));
    }
    text(
        &metadata
            .bool("tokenizer.ggml.add_space_prefix")?
            .unwrap_or(true)
            .to_string(),
    );
    vocabulary.types.iter().for_each(|kind| hash.update(kind.to_le_bytes()));
    metadata
        .f64s(SCORES)?
        .unwrap_or_default()
        .iter()
        .for_each(|score| hash.update(score.to_le_bytes()));
    Ok(hash)
}
