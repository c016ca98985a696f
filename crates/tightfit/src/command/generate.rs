//! `tightfit generate`: text from a model.

use std::io::{self, Write};
use std::time::Instant;

use serde::Serialize;
use tightfit_text::Tokenizer;
use tightfit_text::chat::{ChatTemplate, Message};

use crate::cli::GenerateArgs;
use crate::console::Console;
use crate::data::PrepareError;
use crate::failure::Failure;
use crate::generate::Generation;
use crate::inference::{Inference, MemoryReport};
use crate::pretrained::Pretrained;
use crate::sample::{Sampler, Sampling};
use crate::stop::Stop;

use super::{complain, print_json};

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    /// Raised whenever a field changes its meaning or goes away.
    schema_version: u32,
    /// What was generated, without the prompt.
    text: String,
    /// Its tokens.
    tokens: Vec<u32>,
    /// The prompt's tokens.
    prompt_tokens: Vec<u32>,
    /// `stop` where the model ended the text, `length` where `--max-tokens` did.
    finish_reason: &'static str,
    /// Of generation, the prompt included.
    seconds: f64,
    #[serde(flatten)]
    memory: MemoryReport,
}

/// Generates; the exit code.
pub fn run(args: &GenerateArgs) -> Result<u8, Failure> {
    // A signal ends the process at once: there is nothing to save.
    let _stop = Stop::watch().map_err(Failure::Signal)?;
    let console = Console { json: args.json };
    let model = Pretrained::open_with(&args.model, args.adapter.as_deref())?;
    let tokenizer = model.tokenizer()?;
    let prompt = prompt(args, &tokenizer)?;
    if prompt.is_empty() {
        return Err(Failure::EmptyPrompt);
    }
    let generation = Generation {
        prompt: prompt.len(),
        max_tokens: args.max_tokens as usize,
    };
    let made_for = model.config.max_position_embeddings;
    if (prompt.len() + generation.max_tokens) as u64 > made_for {
        complain(format_args!(
            "note: {} tokens of prompt and {} more are beyond the {made_for} positions that the model was made for",
            prompt.len(),
            generation.max_tokens
        ));
    }
    let step = generation.step(&model.config, |forward| args.numbers.apply(forward, &model))?;
    let mut inference = Inference::start(&model, step, &args.machine)?;
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k as usize,
        top_p: args.top_p,
        seed: args.seed,
    };
    let vocab_size = model.config.vocab_size as usize;
    let mut sampler = Sampler::new(sampling, vocab_size);
    let mut tokens = Vec::with_capacity(generation.max_tokens);
    let mut text = String::new();
    let mut finish_reason = "length";
    let mut stream = tokenizer.decode_stream(true);
    let started = Instant::now();
    generation.run(&mut inference.session, &prompt, vocab_size, &mut sampler, |token| {
        if tokenizer.eos_ids().contains(&token) || model.config.eos_token_id.contains(&token) {
            finish_reason = "stop";
            return Ok(false);
        }
        tokens.push(token);
        let piece = stream.push(token)?;
        show(console, &piece)?;
        text.push_str(&piece);
        Ok::<_, Failure>(true)
    })?;
    let rest = stream.finish()?;
    show(console, &format!("{rest}\n"))?;
    text.push_str(&rest);
    let report = Report {
        schema_version: crate::report::SCHEMA_VERSION,
        text,
        tokens,
        prompt_tokens: prompt,
        finish_reason,
        seconds: started.elapsed().as_secs_f64(),
        memory: inference.memory()?,
    };
    complain(format_args!(
        "{} tokens in {:.2} s\n{}",
        report.tokens.len(),
        report.seconds,
        report.memory.text()
    ));
    print_json(console, &report)?;
    Ok(0)
}

/// The tokens to go on from: a text as it is, or a message in the model's chat template.
fn prompt(args: &GenerateArgs, tokenizer: &Tokenizer) -> Result<Vec<u32>, Failure> {
    let Some(message) = &args.chat else {
        return Ok(tokenizer.encode(args.prompt.as_deref().unwrap_or_default(), true)?);
    };
    let template = ChatTemplate::of(tokenizer).map_err(PrepareError::Template)?;
    let template = template.ok_or_else(|| Failure::NoTemplate {
        model: args.model.clone(),
    })?;
    let messages = args
        .system
        .iter()
        .map(|content| ("system", content))
        .chain([("user", message)]);
    let messages: Vec<_> = messages
        .map(|(role, content)| Message {
            role: role.to_owned(),
            content: content.clone(),
        })
        .collect();
    let text = template.render(&messages, true).map_err(PrepareError::Template)?;
    // The template writes what a text begins with.
    Ok(tokenizer.encode(&text, false)?)
}

/// Text as it comes. Where stdout is for JSON, it is in there.
fn show(console: Console, text: &str) -> Result<(), Failure> {
    if console.json || text.is_empty() {
        return Ok(());
    }
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => super::write(Err(error)),
        _ => Ok(()),
    }
}
