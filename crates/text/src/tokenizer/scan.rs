//! A first look at `tokenizer.json`, before the `tokenizers` crate reads it: how large ids get, and settings that it trusts blindly.

use super::TokenizerError;
use super::steps::{Part, within_limits};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;

/// The highest id that is believed. Real vocabularies end near 2^20; tables over ids of a hostile file must not fill memory.
const MAX_ID: u64 = (1 << 24) - 1;

#[derive(Deserialize)]
struct Head {
    model: Model,
    #[serde(default)]
    added_tokens: AddedIds,
    normalizer: Option<Part>,
    pre_tokenizer: Option<Part>,
    post_processor: Option<Part>,
    decoder: Option<Part>,
}

#[derive(Deserialize)]
struct Model {
    r#type: Option<String>,
    dropout: Option<f64>,
    continuing_subword_prefix: Option<String>,
    vocab: HighestId,
}

/// One more than the highest id of the model and the added tokens.
///
/// # Errors
/// JSON that is none, models that are not BPE, ids above 2^24, BPE dropout (encoding would be random), a `continuing_subword_prefix` in
/// a BPE model (the crate cuts every merge by its length unseen), and steps that make texts many times longer.
pub(super) fn vocab_size(json: &[u8], place: &str) -> Result<usize, TokenizerError> {
    let invalid = |why: String| TokenizerError::invalid(place, why);
    let head: Head = serde_json::from_slice(json).map_err(|e| invalid(e.to_string()))?;
    // Old files do not say; then it is BPE if it has merges, which the crate asks for.
    if let Some(kind) = head.model.r#type.filter(|kind| kind != "BPE") {
        return Err(invalid(format!("model.type: `{kind}` is not supported (`BPE` is)")));
    }
    if head.model.dropout.is_some_and(|p| p != 0.0) {
        return Err(invalid("model.dropout: tokens would be random".into()));
    }
    if head
        .model
        .continuing_subword_prefix
        .is_some_and(|prefix| !prefix.is_empty())
    {
        return Err(invalid(
            "model.continuing_subword_prefix: word pieces are not supported".into(),
        ));
    }
    for (name, part) in [
        ("normalizer", head.normalizer),
        ("pre_tokenizer", head.pre_tokenizer),
        ("post_processor", head.post_processor),
        ("decoder", head.decoder),
    ] {
        if let Some(part) = part {
            within_limits(part).map_err(|why| invalid(format!("{name}: {why}")))?;
        }
    }
    let size = head.model.vocab.0.max(head.added_tokens.0);
    if size > MAX_ID + 1 {
        return Err(invalid(format!("a token has the id {}, more than {MAX_ID}", size - 1)));
    }
    Ok(size as usize)
}

/// One more than the highest id of `vocab`: a map from tokens to ids, or (unigram, refused after this) a list.
struct HighestId(u64);

impl<'de> Deserialize<'de> for HighestId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Highest;
        impl<'de> Visitor<'de> for Highest {
            type Value = HighestId;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a vocabulary")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HighestId, A::Error> {
                let mut end = 0;
                while let Some((_, id)) = map.next_entry::<IgnoredAny, u32>()? {
                    end = end.max(u64::from(id) + 1);
                }
                Ok(HighestId(end))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<HighestId, A::Error> {
                let mut end = 0;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    end += 1;
                }
                Ok(HighestId(end))
            }
        }
        deserializer.deserialize_any(Highest)
    }
}

/// One more than the highest id of `added_tokens`.
#[derive(Default)]
struct AddedIds(u64);

impl<'de> Deserialize<'de> for AddedIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Added {
            id: u32,
        }
        struct Highest;
        impl<'de> Visitor<'de> for Highest {
            type Value = AddedIds;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a list of added tokens")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<AddedIds, A::Error> {
                let mut end = 0;
                while let Some(Added { id }) = list.next_element()? {
                    end = end.max(u64::from(id) + 1);
                }
                Ok(AddedIds(end))
            }
        }
        deserializer.deserialize_seq(Highest)
    }
}
