//! Generation: a prompt is read in chunks, then one token follows the other, with keys and values kept in the arena.

use tightfit_exec::{Driver, Feed, Results, RunError};
use tightfit_ir::{Forward, Routine, Step};
use tightfit_pass::PassError;

use crate::job::JobError;
use crate::sample::Sampler;
use crate::{DecodeShape, DecoderConfig, Session};

/// The routine that reads a chunk of the prompt.
const PREFILL: &str = "prefill";
/// The routine that takes one token in.
const DECODE: &str = "decode";
/// Most tokens of a chunk of the prompt: longer chunks are no faster.
const CHUNK: usize = 128;

/// Why no token follows.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The weights are damaged.
    #[error("the logits are not numbers: the model's weights are damaged, or they were trained until they diverged")]
    Logits,
    /// The session is not one of this generation.
    #[error(transparent)]
    Run(#[from] RunError),
}

/// The sizes of one generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Most tokens that may follow.
    pub max_tokens: usize,
}

impl Generation {
    fn chunk(&self) -> usize {
        self.prompt.clamp(1, CHUNK)
    }

    /// Tokens that the cache has room for: the last chunk is filled up.
    fn capacity(&self) -> usize {
        let prompt = self.prompt.next_multiple_of(self.chunk());
        prompt.max(self.prompt.saturating_add(self.max_tokens))
    }

    /// The routines of a model that generates, each after `prepare`: the passes for a model that is not trained.
    ///
    /// # Errors
    /// Sizes that no model can have, or `prepare` fails.
    pub fn step(
        &self,
        model: &DecoderConfig,
        prepare: impl Fn(Forward) -> Result<Forward, PassError>,
    ) -> Result<Step, JobError> {
        let mut routines = Vec::new();
        for (name, rows) in [(PREFILL, self.chunk()), (DECODE, 1)] {
            let shape = DecodeShape {
                rows: rows as u64,
                capacity: self.capacity() as u64,
            };
            routines.push(Routine::of(name, prepare(model.decode(shape)?)?.graph));
        }
        Ok(Step { routines })
    }

    /// Reads the prompt and hands each token that follows to `watch`, until that says to stop or there is no more room. Which token
    /// follows is the sampler's choice.
    ///
    /// # Errors
    /// The session is not one of [`step`](Self::step), or `watch` fails.
    pub fn run<E: From<GenerateError>>(
        &self,
        session: &mut Session,
        prompt: &[u32],
        vocab_size: usize,
        sampler: &mut Sampler,
        mut watch: impl FnMut(u32) -> Result<bool, E>,
    ) -> Result<(), E> {
        let mut logits = vec![0.0; vocab_size];
        let mut seen = 0;
        for chunk in prompt.chunks(self.chunk()) {
            let mut decoder = Decoder {
                tokens: chunk,
                start: seen,
                logits: &mut logits,
            };
            session.run(PREFILL, &mut decoder).map_err(GenerateError::from)?;
            seen += chunk.len();
        }
        for generated in 1..=self.max_tokens {
            if logits.iter().any(|logit: &f32| logit.is_nan()) {
                return Err(GenerateError::Logits.into());
            }
            let token = sampler.next(&logits);
            if !watch(token)? || generated == self.max_tokens {
                break;
            }
            let mut decoder = Decoder {
                tokens: &[token],
                start: seen,
                logits: &mut logits,
            };
            session.run(DECODE, &mut decoder).map_err(GenerateError::from)?;
            seen += 1;
        }
        Ok(())
    }
}

/// Takes tokens in.
struct Decoder<'a> {
    tokens: &'a [u32],
    /// Tokens before them.
    start: usize,
    /// Of the last of them.
    logits: &'a mut [f32],
}

impl Driver for Decoder<'_> {
    fn feed(&mut self, _program: &str, _repeat: u32, feed: &mut Feed<'_>) -> Result<(), RunError> {
        let [tokens, positions, start, last] = feed.inputs::<i32, 4>(["tokens", "positions", "start", "last"])?;
        // Rows after the last token are filler, which nothing attends to. Ids and positions are below 2^31: the model checks both.
        for (row, (token, position)) in tokens.iter_mut().zip(positions).enumerate() {
            *token = self.tokens.get(row).map_or(0, |&token| token as i32);
            *position = (self.start + row) as i32;
        }
        start.fill(self.start as i32);
        last.fill(self.tokens.len() as i32 - 1);
        Ok(())
    }

    fn read(&mut self, _program: &str, _repeat: u32, results: &Results<'_>) -> Result<(), RunError> {
        self.logits.copy_from_slice(results.result("logits")?);
        Ok(())
    }
}
