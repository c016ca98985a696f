//! Chat templates: from messages to the text a model was trained on.
//!
//! Checkpoints carry a Jinja template, written for Jinja2 as transformers sets it up: blocks take the newline that follows them and the
//! blanks before them, loops may `break`, Python's string and dictionary methods work, `raise_exception` refuses a conversation, and `tojson`
//! writes what Python's `json.dumps` would. [`ChatTemplate`] gives templates the same.
//!
//! One thing is left out on purpose: `strftime_now` is not defined. Rows of training data must not depend on the day on which they were made.
//! Templates that ask whether it is defined (as Llama 3's) then use a date of their own; others fail and say why.
//!
//! Templates are programs from strangers: the fuel for one rendering bounds its time and its memory, and recursion is bounded. The
//! engine recurses over what it compiles, so it works on a thread with a large stack.

mod bounds;
mod source;

use crate::guard;
use crate::tokenizer::{SpecialTokens, Tokenizer};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, ErrorKind, State, Value, context};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::io;
use std::thread;

/// The largest template, in bytes. Those with tool calls have about ten thousand.
const LONGEST: usize = 64 << 10;

/// Stack of the threads that templates are compiled and rendered on: far more than the longest expressions take, in a debug build
/// too. Pages that are not touched take no memory.
const STACK: usize = 64 << 20;

/// Steps that a rendering may take, or 64-byte units that it may build: for itself, for each message, and for each so many bytes of
/// these. Real templates take 15 to 70 for a message.
const FUEL: u64 = 100_000;
const FUEL_PER_MESSAGE: u64 = 200;
const BYTES_PER_FUEL: u64 = 4;

/// Steps that all renderings for the segments of a conversation may take together. There are two for each answer, so what they take
/// grows with the square of the conversation: real templates have enough for two hundred answers or more.
const FUEL_FOR_SEGMENTS: u64 = 10_000_000;

/// What it takes to hand a message over, in steps.
const FUEL_FOR_HANDING_OVER: u64 = 8;

/// A macro call counts for some ten of these, a loop or a condition for one.
const RECURSION: usize = 200;

const NAME: &str = "chat_template";

/// Why a chat template cannot be read or used.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template is not one.
    #[error("chat template: {0}")]
    Template(String),
    /// The template does not render these messages: it refuses them (with a reason of its own), it fails, or it needs too much.
    #[error("chat template: {0}")]
    Render(String),
    /// Where an answer begins cannot be told.
    #[error(
        "chat template: the conversation up to message {message} ({role}) is not how the longer one begins, so answers cannot be \
         told apart; the template rewrites earlier turns"
    )]
    Rewrites {
        /// The number of the message, from 0.
        message: usize,
        /// Its role.
        role: String,
    },
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// Who speaks: `system`, `user`, `assistant`, or what else the template knows.
    pub role: String,
    /// What is said.
    pub content: String,
}

/// A stretch of a rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// The text, with special tokens written out.
    pub text: String,
    /// Whether an assistant says it: the answer and what ends its turn.
    pub answer: bool,
}

/// A chat template, ready to render.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
}

impl ChatTemplate {
    /// Reads the template of a checkpoint with these special tokens, which it knows as `bos_token`, `eos_token` and so on.
    ///
    /// # Errors
    /// What is wrong in the template, with its line; templates of more than 64 KiB.
    pub fn new(source: &str, tokens: &SpecialTokens) -> Result<Self, ChatError> {
        if source.len() > LONGEST {
            return Err(ChatError::Template(format!(
                "{} bytes, more than {LONGEST}",
                source.len()
            )));
        }
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let mut environment = Environment::new();
        environment.set_syntax(syntax.map_err(|e| ChatError::Template(e.to_string()))?);
        environment.set_recursion_limit(RECURSION);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_filter("tojson", tojson);
        bounds::install(&mut environment);
        let SpecialTokens { bos, eos, pad, unk } = tokens;
        for (name, token) in [
            ("bos_token", bos),
            ("eos_token", eos),
            ("pad_token", pad),
            ("unk_token", unk),
        ] {
            if let Some(token) = token {
                environment.add_global(name, token.content.clone());
            }
        }
        let source = source::instrumented(source).map_err(ChatError::Template)?;
        guarded(|| environment.add_template_owned(NAME, source)).map_err(ChatError::Template)?;
        Ok(Self { environment })
    }

    /// The template of `tokenizer`'s checkpoint, if it has one.
    ///
    /// # Errors
    /// As [`ChatTemplate::new`].
    pub fn of(tokenizer: &Tokenizer) -> Result<Option<Self>, ChatError> {
        tokenizer
            .chat_template()
            .map(|source| Self::new(source, tokenizer.special_tokens()))
            .transpose()
    }

    /// The text of a conversation; with `add_generation_prompt`, also what comes before the assistant's next answer.
    ///
    /// The text has its special tokens written out, `bos` too: encode it with `add_special = false`.
    ///
    /// # Errors
    /// The template refuses the messages, fails, or takes too long.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, ChatError> {
        let mut unlimited = u64::MAX;
        self.render_within(&mut unlimited, messages, add_generation_prompt)
    }

    /// [`ChatTemplate::render`] with no more than `fuel_left`, from which it takes what it uses.
    fn render_within(
        &self,
        fuel_left: &mut u64,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        let count = messages.len() as u64;
        let bytes = messages.iter().map(|m| m.role.len() + m.content.len()).sum::<usize>() as u64;
        let fuel = FUEL + FUEL_PER_MESSAGE * count + bytes / BYTES_PER_FUEL;
        // Fuel belongs to an environment, whose parts are shared when it is cloned.
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel.min(*fuel_left)));
        let message = |m: &Message| Value::from_pairs([("role", m.role.as_str()), ("content", m.content.as_str())]);
        let messages: Value = messages.iter().map(message).collect();
        let context =
            context! { messages, add_generation_prompt, tools => Value::from(()), documents => Value::from(()) };
        let rendered = guarded(|| {
            let rendered = environment.get_template(NAME)?.render_captured(context)?;
            let used = rendered.state().fuel_levels().map_or(0, |(used, _)| used);
            Ok((rendered.into_output(), used))
        });
        let (text, used) = rendered.map_err(ChatError::Render)?;
        *fuel_left = fuel_left.saturating_sub(used + FUEL_FOR_HANDING_OVER * count);
        Ok(text)
    }

    /// The text of a conversation as segments that are an assistant's answer or are not. Joined, they are the whole text.
    ///
    /// An answer is what the template adds for an assistant's message after the text that it gives to generate from, up to what ends
    /// the turn; blanks after that are no part of it.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`]; and [`ChatError::Rewrites`] for templates that show earlier turns in another way once later ones are there.
    pub fn segments(&self, messages: &[Message]) -> Result<Vec<Segment>, ChatError> {
        let mut fuel = FUEL_FOR_SEGMENTS;
        let whole = self.render_within(&mut fuel, messages, false)?;
        let mut segments = Vec::new();
        let mut push = |text: &str, answer| {
            if !text.is_empty() {
                segments.push(Segment {
                    text: text.to_owned(),
                    answer,
                });
            }
        };
        let mut done = 0;
        for (at, message) in messages.iter().enumerate().filter(|(_, m)| m.role == "assistant") {
            let rewrites = || ChatError::Rewrites {
                message: at,
                role: message.role.clone(),
            };
            let prompt = self.render_within(&mut fuel, &messages[..at], true)?;
            let turn = match at + 1 == messages.len() {
                true => whole.clone(),
                false => self.render_within(&mut fuel, &messages[..=at], false)?,
            };
            let answer = turn
                .strip_prefix(&*prompt)
                .filter(|_| prompt.len() >= done && whole.starts_with(&*turn))
                .ok_or_else(rewrites)?;
            let end = prompt.len() + answer_end(answer, message.content.trim());
            push(&whole[done..prompt.len()], false);
            push(&whole[prompt.len()..end], true);
            done = end;
        }
        push(&whole[done..], false);
        Ok(segments)
    }
}

/// Where an answer ends in the text that its message added: with what ends the turn, if something does, but without blanks after it.
fn answer_end(added: &str, content: &str) -> usize {
    let said = added.rfind(content).map_or(0, |at| at + content.len());
    let end = added.trim_end().len();
    if end > said { end } else { added.len() }
}

/// Calls into `minijinja`, on a thread of its own; a panic there becomes an error.
fn guarded<T: Send>(call: impl FnOnce() -> Result<T, minijinja::Error> + Send) -> Result<T, String> {
    let call = || guard::guarded(|| call().map_err(|e| describe(&e)));
    let called = thread::scope(|scope| {
        let thread = thread::Builder::new()
            .stack_size(STACK)
            .spawn_scoped(scope, call)
            .map_err(|e| format!("cannot start a thread: {e}"))?;
        // A panic was caught inside, except one while another is dropped.
        Ok::<_, String>(thread.join().and_then(|caught| caught))
    })?;
    called.unwrap_or_else(|_| Err("the template engine gave up".into()))
}

/// An error with its causes: a template's own refusal is one of these.
fn describe(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text
}

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// `json.dumps(value, ensure_ascii=False, indent=indent)`.
fn tojson(state: &State, value: Value, options: Kwargs) -> Result<Value, minijinja::Error> {
    let value = bounds::bounded(state, value)?;
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    if ascii == Some(true) {
        return Err(minijinja::Error::new(
            ErrorKind::InvalidOperation,
            "tojson: ensure_ascii is not supported",
        ));
    }
    let mut out = Vec::new();
    let written = match indent {
        Some(width) if width > 16 => {
            return Err(minijinja::Error::new(
                ErrorKind::InvalidOperation,
                "tojson: indent is at most 16",
            ));
        }
        Some(width) => {
            let blanks = " ".repeat(width);
            value.serialize(&mut Serializer::with_formatter(
                &mut out,
                PrettyFormatter::with_indent(blanks.as_bytes()),
            ))
        }
        None => value.serialize(&mut Serializer::with_formatter(&mut out, Spaced)),
    };
    let failed = |e: &dyn std::fmt::Display| minijinja::Error::new(ErrorKind::InvalidOperation, format!("tojson: {e}"));
    written.map_err(|e| failed(&e))?;
    String::from_utf8(out).map(Value::from).map_err(|e| failed(&e))
}

/// JSON in one line, with a space after commas and colons, as Python writes it.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
