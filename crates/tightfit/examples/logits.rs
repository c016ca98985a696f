//! Writes a model's logits on a text as safetensors, for `scripts/check_hf.py`, which compares them with what transformers computes.
//!
//! ```text
//! cargo run --release --example logits -- runs/a 'Some text.' logits.safetensors
//! ```
//!
//! `tokens` is `i32[T]`, `logits` is `f32[T, vocab_size]`.

use std::error::Error;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use tightfit::pretrained::Pretrained;
use tightfit::{BatchShape, Driver, Feed, Results, RunError, Session, Step, plan_for_cpu};
use tightfit_exec::load;
use tightfit_ir::Routine;
use tightfit_pass::no_grad;

/// The routine.
const LOGITS: &str = "logits";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [path, text, out] = &arguments[..] else {
        return Err("usage: logits MODEL TEXT OUT.safetensors".into());
    };
    let model = Pretrained::open(Path::new(path))?;
    let tokens = model.tokenizer()?.encode(text, true)?;
    let shape = BatchShape {
        batch: 1,
        seq: tokens.len() as u64,
        loss_chunk: 1,
    };
    let forward = no_grad(model.config.logits(shape)?)?;
    let mut step = Step {
        routines: vec![Routine::of(LOGITS, forward.graph)],
    };
    let load = load::routine(&model.fills(), step.persistent());
    step.routines.push(load);
    let threads = std::thread::available_parallelism()?.get();
    let mut session = Session::new(plan_for_cpu(step, threads)?, threads)?;
    model.load(&mut session)?;
    let mut document = Document {
        tokens: tokens.iter().map(|&token| token as i32).collect(),
        logits: Vec::new(),
    };
    session.run(LOGITS, &mut document)?;
    let rows = document.tokens.len();
    let tokens: Vec<u8> = document.tokens.iter().flat_map(|x| x.to_le_bytes()).collect();
    let logits: Vec<u8> = document.logits.iter().flat_map(|x| x.to_le_bytes()).collect();
    let views = [
        ("tokens", TensorView::new(Dtype::I32, vec![rows], &tokens)?),
        (
            LOGITS,
            TensorView::new(Dtype::F32, vec![rows, model.config.vocab_size as usize], &logits)?,
        ),
    ];
    serialize_to_file(views, None, Path::new(out))?;
    Ok(())
}

/// One document, from its first token to its last.
struct Document {
    tokens: Vec<i32>,
    logits: Vec<f32>,
}

impl Driver for Document {
    fn feed(&mut self, _program: &str, _repeat: u32, feed: &mut Feed<'_>) -> Result<(), RunError> {
        let [tokens, positions, doc_start] = feed.inputs(["tokens", "positions", "doc_start"])?;
        tokens.copy_from_slice(&self.tokens);
        positions.iter_mut().zip(0..).for_each(|(position, t)| *position = t);
        doc_start.fill(0);
        Ok(())
    }

    fn read(&mut self, _program: &str, _repeat: u32, results: &Results<'_>) -> Result<(), RunError> {
        self.logits = results.result(LOGITS)?.to_vec();
        Ok(())
    }
}
