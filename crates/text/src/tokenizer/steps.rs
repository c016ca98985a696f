//! The steps of `tokenizer.json` around its model (normalizer, pre-tokenizer, post-processor, decoder), looked at before the
//! `tokenizers` crate builds them: together they may not make a text many times longer.

use serde::Deserialize;
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// Items of a list: steps, pieces of a template, ids of a token. Real lists have up to ten.
const MOST_ITEMS: usize = 32;
/// The longest text that a step puts in or looks for, in bytes. Real steps put in a space or `▁`.
const LONGEST: usize = 64;
/// How many times longer a text may get. `▁` for spaces makes 3, bytes written as letters 2.
const MOST_GROWTH: usize = 16;

/// A step, or a `Sequence` of them.
#[derive(Deserialize)]
pub(super) struct Part {
    r#type: String,
    content: Option<String>,
    pattern: Option<Pattern>,
    prepend: Option<String>,
    suffix: Option<String>,
    // A template of a post-processor: its length is all that counts.
    #[serde(rename = "single")]
    _single: Option<Short<IgnoredAny>>,
    #[serde(rename = "pair")]
    _pair: Option<Short<IgnoredAny>>,
    #[serde(rename = "special_tokens")]
    _special_tokens: Option<Short<Ids>>,
    #[serde(
        alias = "normalizers",
        alias = "pretokenizers",
        alias = "processors",
        alias = "decoders"
    )]
    steps: Option<Short<Part>>,
}

#[derive(Deserialize)]
enum Pattern {
    String(String),
    Regex(IgnoredAny),
}

/// The ids that a token of a template stands for.
#[derive(Deserialize)]
struct Ids {
    #[serde(rename = "ids")]
    _ids: Short<IgnoredAny>,
}

/// A list, the values of a map, or a string, each with at most [`MOST_ITEMS`] items (or words: templates are also written that way).
struct Short<T>(Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Short<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Items<T>(PhantomData<T>);

        fn push<T, E: Error>(items: &mut Vec<T>, item: T) -> Result<(), E> {
            if items.len() == MOST_ITEMS {
                return Err(E::custom(format_args!("a list of more than {MOST_ITEMS} items")));
            }
            items.push(item);
            Ok(())
        }

        impl<'de, T: Deserialize<'de>> Visitor<'de> for Items<T> {
            type Value = Short<T>;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Short<T>, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = list.next_element()? {
                    push(&mut items, item)?;
                }
                Ok(Short(items))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Short<T>, A::Error> {
                let mut items = Vec::new();
                while let Some((_, item)) = map.next_entry::<IgnoredAny, T>()? {
                    push(&mut items, item)?;
                }
                Ok(Short(items))
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Short<T>, E> {
                match text.split_ascii_whitespace().count() {
                    0..=MOST_ITEMS => Ok(Short(Vec::new())),
                    _ => Err(E::custom(format_args!("a template of more than {MOST_ITEMS} pieces"))),
                }
            }
        }
        deserializer.deserialize_any(Items(PhantomData))
    }
}

/// Checks a part of a tokenizer.
///
/// # Errors
/// Why it could make texts too long, naming the step.
pub(super) fn within_limits(part: Part) -> Result<(), String> {
    let steps = match part {
        Part {
            steps: Some(Short(steps)),
            ..
        } if part.r#type == "Sequence" => steps,
        part => vec![part],
    };
    let mut growth = 1_usize;
    for (at, step) in steps.iter().enumerate() {
        let kind = &step.r#type;
        let factor = step.growth().map_err(|why| format!("step {at} (`{kind}`): {why}"))?;
        growth = growth.saturating_mul(factor);
        if growth > MOST_GROWTH {
            return Err(format!(
                "step {at} (`{kind}`): texts could get more than {MOST_GROWTH} times longer"
            ));
        }
    }
    Ok(())
}

impl Part {
    /// How many times longer a text could get. Unicode's forms are not counted: twice gives the same as once.
    fn growth(&self) -> Result<usize, String> {
        if self.steps.is_some() {
            return Err("steps inside of it are not supported".into());
        }
        for text in [&self.content, &self.prepend, &self.suffix].into_iter().flatten() {
            if text.len() > LONGEST {
                return Err(format!("a text of {} bytes, more than {LONGEST}", text.len()));
            }
        }
        let content = self.content.as_ref().map_or(0, String::len);
        match &self.pattern {
            Some(Pattern::String(pattern)) if pattern.is_empty() => return Err("an empty pattern".into()),
            Some(Pattern::String(pattern)) => return Ok(content.div_ceil(pattern.len()).max(1)),
            // It may find nothing at all, between any two bytes.
            Some(Pattern::Regex(_)) => return Ok(content + 1),
            None => {}
        }
        match &*self.r#type {
            "ByteLevel" => Ok(2),
            // Puts a space where the suffix was, which may be empty.
            "BPEDecoder" if self.suffix.as_ref().is_some_and(String::is_empty) => Ok(2),
            "Metaspace" => Ok(4),
            "Precompiled" => Err("not supported; unigram models have it".into()),
            _ => Ok(1),
        }
    }
}
