//! A line of JSON, read into one of the forms a sample may have.
//!
//! What is not needed is parsed and thrown away, so that a line takes memory in proportion to its text. Error messages name
//! keys and kinds of values and never repeat a value, which may be megabytes long.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::chat::Message;

/// Keys named in a message, at most, and characters of each.
const SHOWN_KEYS: usize = 8;
const SHOWN_CHARS: usize = 32;

/// A line's sample.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sample {
    Text(String),
    Completion {
        prompt: String,
        completion: String,
    },
    Instruction {
        instruction: String,
        /// Perhaps empty.
        input: String,
        output: String,
    },
    Messages(Vec<Message>),
}

/// What is wrong with a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct BadLine {
    /// Byte of the line, from 1, where the fault has one place.
    pub(super) column: Option<usize>,
    pub(super) reason: String,
}

impl BadLine {
    pub(super) fn new(reason: impl Into<String>) -> Self {
        Self {
            column: None,
            reason: reason.into(),
        }
    }
}

/// Reads a line that is not blank.
pub(super) fn parse(line: &[u8]) -> Result<Sample, BadLine> {
    let line = str::from_utf8(line).map_err(|error| BadLine {
        column: Some(error.valid_up_to() + 1),
        reason: "not UTF-8".into(),
    })?;
    let mut json = serde_json::Deserializer::from_str(line);
    let fields = json.deserialize_any(ObjectVisitor).and_then(|fields| {
        json.end()?;
        Ok(fields)
    });
    fields.map_err(syntax)?.sample()
}

/// serde_json's message without the line it counts, which is always the first.
fn syntax(error: serde_json::Error) -> BadLine {
    let message = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    BadLine {
        column: Some(error.column()),
        reason: message.strip_suffix(&place).unwrap_or(&message).to_owned(),
    }
}

/// The values of the keys that mean something, as far as they were there and not `null`.
struct Fields {
    text: Option<String>,
    prompt: Option<String>,
    completion: Option<String>,
    instruction: Option<String>,
    input: Option<String>,
    output: Option<String>,
    messages: Option<Vec<Message>>,
    keys: Keys,
}

impl Fields {
    fn sample(self) -> Result<Sample, BadLine> {
        let forms = [
            self.text.is_some(),
            self.prompt.is_some() || self.completion.is_some(),
            self.instruction.is_some() || self.output.is_some(),
            self.messages.is_some(),
        ];
        let forms = forms.into_iter().filter(|&present| present).count();
        if forms > 1 {
            return Err(BadLine::new(format!("more than one kind of sample {}", self.keys)));
        }
        Ok(match self {
            Self { text: Some(text), .. } => Sample::Text(text),
            Self {
                prompt: Some(prompt),
                completion: Some(completion),
                ..
            } => Sample::Completion { prompt, completion },
            Self {
                instruction: Some(instruction),
                output: Some(output),
                input,
                ..
            } => Sample::Instruction {
                instruction,
                input: input.unwrap_or_default(),
                output,
            },
            Self {
                messages: Some(messages),
                ..
            } => Sample::Messages(messages),
            Self { prompt: Some(_), .. } => return Err(BadLine::new("`prompt` without `completion`")),
            Self {
                completion: Some(_), ..
            } => return Err(BadLine::new("`completion` without `prompt`")),
            Self {
                instruction: Some(_), ..
            } => return Err(BadLine::new("`instruction` without `output`")),
            Self { output: Some(_), .. } => return Err(BadLine::new("`output` without `instruction`")),
            Self { keys, .. } => {
                return Err(BadLine::new(format!(
                    "no `text`, `prompt` and `completion`, `instruction` and `output`, or `messages` {keys}"
                )));
            }
        })
    }
}

/// The first few keys of an object, shortened.
#[derive(Default)]
struct Keys {
    first: Vec<String>,
    more: usize,
}

impl Keys {
    fn push(&mut self, key: &str) {
        if self.first.len() == SHOWN_KEYS {
            self.more += 1;
            return;
        }
        let mut shown: String = key.chars().take(SHOWN_CHARS).flat_map(char::escape_debug).collect();
        if key.chars().nth(SHOWN_CHARS).is_some() {
            shown.push('…');
        }
        self.first.push(shown);
    }
}

impl fmt::Display for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.first.is_empty() {
            return f.write_str("(the object is empty)");
        }
        write!(f, "(keys found: `{}`", self.first.join("`, `"))?;
        match self.more {
            0 => f.write_str(")"),
            more => write!(f, " and {more} more)"),
        }
    }
}

/// Puts the value of `key` in its place.
fn set<'de, A, S>(map: &mut A, key: &str, slot: &mut Option<S::Value>, seed: S) -> Result<(), A::Error>
where
    A: MapAccess<'de>,
    S: DeserializeSeed<'de>,
{
    if slot.is_some() {
        return Err(A::Error::custom(format_args!("`{key}` is there twice")));
    }
    *slot = Some(map.next_value_seed(seed)?);
    Ok(())
}

/// The object of a line. It is asked for as "anything", as all values are: asked for an object, serde_json would repeat a
/// string that it finds instead.
struct ObjectVisitor;

impl<'de> Visitor<'de> for ObjectVisitor {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Fields, E> {
        Err(E::custom("invalid type: string, expected a JSON object"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let mut keys = Keys::default();
        let [
            mut text,
            mut prompt,
            mut completion,
            mut instruction,
            mut input,
            mut output,
        ] = [const { None }; 6];
        let mut messages = None;
        while let Some(key) = map.next_key::<String>()? {
            keys.push(&key);
            let slot = match key.as_str() {
                "text" => &mut text,
                "prompt" => &mut prompt,
                "completion" => &mut completion,
                "instruction" => &mut instruction,
                "input" => &mut input,
                "output" => &mut output,
                "messages" => {
                    set(&mut map, &key, &mut messages, MessagesSeed)?;
                    continue;
                }
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    continue;
                }
            };
            set(&mut map, &key, slot, TextSeed(&key))?;
        }
        Ok(Fields {
            text: text.flatten(),
            prompt: prompt.flatten(),
            completion: completion.flatten(),
            instruction: instruction.flatten(),
            input: input.flatten(),
            output: output.flatten(),
            messages: messages.flatten(),
            keys,
        })
    }
}

/// A string or `null`, for the key that errors name.
struct TextSeed<'k>(&'k str);

impl<'de> DeserializeSeed<'de> for TextSeed<'_> {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for TextSeed<'_> {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a string for `{}`", self.0)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Some(text.to_owned()))
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }
}

/// An array of messages or `null`.
struct MessagesSeed;

impl<'de> DeserializeSeed<'de> for MessagesSeed {
    type Value = Option<Vec<Message>>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MessagesSeed {
    type Value = Option<Vec<Message>>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array for `messages`")
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Self::Value, E> {
        Err(E::custom("invalid type: string, expected an array for `messages`"))
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<Self::Value, A::Error> {
        let mut messages = Vec::new();
        while let Some(message) = array.next_element_seed(MessageSeed)? {
            messages.push(message);
        }
        Ok(Some(messages))
    }
}

/// An object with `role` and `content`.
struct MessageSeed;

impl<'de> DeserializeSeed<'de> for MessageSeed {
    type Value = Message;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MessageSeed {
    type Value = Message;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a message: an object with `role` and `content`")
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Message, E> {
        Err(E::custom(
            "invalid type: string, expected a message: an object with `role` and `content`",
        ))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Message, A::Error> {
        let (mut role, mut content) = (None, None);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "role" => set(&mut map, &key, &mut role, TextSeed("role"))?,
                "content" => set(&mut map, &key, &mut content, TextSeed("content"))?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let missing = |key| A::Error::custom(format_args!("a message without `{key}`"));
        Ok(Message {
            role: role.flatten().ok_or_else(|| missing("role"))?,
            content: content.flatten().ok_or_else(|| missing("content"))?,
        })
    }
}
