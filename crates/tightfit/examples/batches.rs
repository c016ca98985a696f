//! Writes the batches that a job trains on as safetensors, so that another program can train on the same: `bench/finetune.py` does.
//! A third argument is where those go that it evaluates on.
//!
//! ```text
//! cargo run --release --example batches -- runs/a/config.toml batches.safetensors held-out.safetensors
//! ```
//!
//! `tokens`, `targets`, `positions` and `doc_start` are `i32[batches, batch × seq]`; a target of -100 does not count.

use std::error::Error;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use tightfit::data::{BatchBuffers, Split, Text};
use tightfit::pretrained::Pretrained;
use tightfit::settings::{Count, Request};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (config, out, held_out) = match &arguments[..] {
        [config, out] => (config, out, None),
        [config, out, held_out] => (config, out, Some(held_out)),
        _ => return Err("usage: batches CONFIG.toml OUT.safetensors [HELD_OUT.safetensors]".into()),
    };
    let mut settings = Request::read(Path::new(config))?.resolve(u64::MAX)?;
    // One batch a step, however it is split to fit.
    settings.micro_batch = Count::Of(settings.batch);
    settings.eval_batch = Count::Of(settings.batch);
    let path = settings.model.clone().ok_or("the settings name no model")?;
    let model = Pretrained::open(&path)?;
    let text = Text::prepare(&settings, &model.tokenizer()?, model.config.vocab_size, None)?;
    let rows = (settings.batch * settings.seq) as usize;
    write(&text, Split::Train, settings.steps as usize, rows, Path::new(out))?;
    if let Some(held_out) = held_out {
        write(&text, Split::Eval, text.held_out() as usize, rows, Path::new(held_out))?;
    }
    Ok(())
}

/// The first `batches` batches of a split, of `rows` tokens each.
fn write(text: &Text, split: Split, batches: usize, rows: usize, out: &Path) -> Result<(), Box<dyn Error>> {
    let mut columns: [Vec<i32>; 4] = std::array::from_fn(|_| vec![0; batches * rows]);
    for batch in 0..batches {
        let mut parts = columns
            .iter_mut()
            .map(|column| &mut column[batch * rows..(batch + 1) * rows]);
        let mut next = || parts.next().unwrap_or_default();
        let mut buffers = BatchBuffers {
            tokens: next(),
            targets: next(),
            positions: next(),
            doc_start: next(),
        };
        text.fill(split, batch as u64, &mut buffers)?;
    }
    let bytes = columns.map(|column| column.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    let names = ["tokens", "targets", "positions", "doc_start"];
    let views = names.iter().zip(&bytes).map(|(name, bytes)| {
        let view = TensorView::new(Dtype::I32, vec![batches, rows], bytes)?;
        Ok((*name, view))
    });
    let views = views.collect::<Result<Vec<_>, Box<dyn Error>>>()?;
    serialize_to_file(views, None, out)?;
    Ok(())
}
