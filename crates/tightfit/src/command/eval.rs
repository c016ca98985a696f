//! `tightfit eval`: the loss and perplexity of a model on text.

use serde::Serialize;
use tightfit_exec::{Driver, Feed, Results, RunError};
use tightfit_ir::{Routine, Step};
use tightfit_pass::EVALUATE;
use tightfit_text::data::{Batches, Options, Rows};

use crate::BatchShape;
use crate::cli::EvalArgs;
use crate::console::{Console, Transfer};
use crate::data::{DataReport, RowFiles, Split, many, prepare_rows};
use crate::failure::Failure;
use crate::inference::{Inference, MemoryReport};
use crate::job::JobError;
use crate::pretrained::Pretrained;
use crate::stop::Stop;
use crate::train::{TrainError, batch_buffers};

use super::{print_json, write};

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    /// Raised whenever a field changes its meaning or goes away.
    schema_version: u32,
    /// Mean cross-entropy in nats per token.
    loss: f64,
    /// `exp(loss)`.
    perplexity: f64,
    /// Tokens that the mean is over.
    tokens: u64,
    /// Tokens of a row.
    seq: u64,
    /// Tokens from one window to the next, where windows overlap.
    stride: Option<u64>,
    data: DataReport,
    #[serde(flatten)]
    memory: MemoryReport,
}

/// Evaluates; the exit code.
pub fn run(args: &EvalArgs) -> Result<u8, Failure> {
    // A signal ends the process at once: there is nothing to save.
    let _stop = Stop::watch().map_err(Failure::Signal)?;
    let console = Console { json: args.json };
    if let Some(stride) = args.stride.filter(|&stride| stride > args.seq) {
        return Err(Failure::Stride { stride, seq: args.seq });
    }
    let model = Pretrained::open_with(&args.model, args.adapter.as_deref())?;
    let shape = BatchShape {
        batch: args.batch,
        seq: args.seq,
        loss_chunk: args.loss_chunk,
    };
    let forward = model.config.loss(shape).map_err(JobError::from)?;
    let forward = args.numbers.apply(forward, &model).map_err(JobError::from)?;
    let step = Step {
        routines: vec![Routine::of(EVALUATE, forward.graph)],
    };
    let (batches, data) = batches(args, &model)?;
    let mut inference = Inference::start(&model, step, &args.machine)?;
    let mut evaluation = Evaluation {
        batches: &batches,
        index: 0,
        counted: 0,
        loss: 0.0,
        tokens: 0,
    };
    let rows = Transfer::new("evaluating", batches.rows().rows() * 4 * args.seq);
    for index in 0..batches.per_epoch() {
        evaluation.index = index;
        inference
            .session
            .run(EVALUATE, &mut evaluation)
            .map_err(TrainError::from)?;
        rows.add(4 * shape.tokens());
    }
    rows.finish();
    let loss = evaluation.loss / evaluation.tokens as f64;
    if !loss.is_finite() {
        return Err(Failure::Loss { loss });
    }
    let report = Report {
        schema_version: crate::report::SCHEMA_VERSION,
        loss,
        perplexity: loss.exp(),
        tokens: evaluation.tokens,
        seq: args.seq,
        stride: args.stride,
        data,
        memory: inference.memory()?,
    };
    write(console.line(&format!(
        "data     {} of {} tokens\nloss     {:.6} nats/token, perplexity {:.4}, over {} tokens\n{}",
        many(report.data.train_rows, "window"),
        report.seq,
        report.loss,
        report.perplexity,
        report.tokens,
        report.memory.text()
    )))?;
    print_json(console, &report)?;
    Ok(0)
}

/// All of the data, in order.
fn batches(args: &EvalArgs, model: &Pretrained) -> Result<(Batches, DataReport), Failure> {
    let options = Options {
        seq: args.seq as usize,
        vocab_size: model.config.vocab_size as usize,
        long: args.long,
        stride: args.stride.map(|stride| stride as usize),
        skip_bad_lines: args.skip_bad_lines,
        eval_fraction: 0.0,
        end_documents: false,
        seed: 0,
    };
    let transfer = Transfer::new("reading data", 0);
    let tokenizer = model.tokenizer()?;
    let (rows, prepared) = prepare_rows(&args.data, &tokenizer, &options, None, &mut |progress| {
        transfer.set(progress.bytes, progress.total_bytes);
    })?;
    transfer.finish();
    let report = DataReport {
        train_rows: prepared.train_rows,
        eval_rows: prepared.eval_rows,
        counts: Some(prepared.counts),
    };
    let rows = Rows::open(rows.train, &RowFiles::path(&std::env::temp_dir(), Split::Train));
    let batches = rows.and_then(|rows| Batches::in_order(rows, args.batch as usize));
    Ok((
        batches
            .map_err(crate::data::TextError::from)
            .map_err(TrainError::from)?,
        report,
    ))
}

/// Feeds one batch after the other and adds the losses up.
struct Evaluation<'a> {
    batches: &'a Batches,
    index: u64,
    counted: usize,
    /// Of all tokens so far.
    loss: f64,
    tokens: u64,
}

impl Driver for Evaluation<'_> {
    fn feed(&mut self, _program: &str, _repeat: u32, feed: &mut Feed<'_>) -> Result<(), RunError> {
        let counted = self.batches.fill(self.index, &mut batch_buffers(feed)?);
        self.counted = counted.map_err(|error| RunError::Driver(Box::new(error)))?;
        feed.scalar("token_count", self.counted.max(1) as f32)
    }

    fn read(&mut self, _program: &str, _repeat: u32, results: &Results<'_>) -> Result<(), RunError> {
        self.loss += f64::from(results.scalar("loss")?) * self.counted as f64;
        self.tokens += self.counted as u64;
        Ok(())
    }
}
