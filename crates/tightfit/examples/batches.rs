//! Writes the batches that a job trains on as safetensors, so that another program can train on the same: `bench/finetune.py` does.
//!
//! ```text
//! cargo run --release --example batches -- runs/a/config.toml batches.safetensors
//! ```
//!
//! `tokens`, `targets`, `positions` and `doc_start` are `i32[steps, batch × seq]`; a target of -100 does not count.

use std::error::Error;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use tightfit::data::{BatchBuffers, Split, Text};
use tightfit::pretrained::Pretrained;
use tightfit::settings::{Count, Request};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [config, out] = &arguments[..] else {
        return Err("usage: batches CONFIG.toml OUT.safetensors".into());
    };
    let mut settings = Request::read(Path::new(config))?.resolve(u64::MAX)?;
    // One batch a step, however it is split to fit.
    settings.micro_batch = Count::Of(settings.batch);
    let path = settings.model.clone().ok_or("the settings name no model")?;
    let model = Pretrained::open(&path)?;
    let text = Text::prepare(&settings, &model.tokenizer()?, model.config.vocab_size, None)?;
    let (steps, rows) = (settings.steps as usize, (settings.batch * settings.seq) as usize);
    let mut columns: [Vec<i32>; 4] = std::array::from_fn(|_| vec![0; steps * rows]);
    for step in 0..steps {
        let mut parts = columns
            .iter_mut()
            .map(|column| &mut column[step * rows..(step + 1) * rows]);
        let mut next = || parts.next().unwrap_or_default();
        let mut buffers = BatchBuffers {
            tokens: next(),
            targets: next(),
            positions: next(),
            doc_start: next(),
        };
        text.fill(Split::Train, step as u64, &mut buffers)?;
    }
    let bytes = columns.map(|column| column.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
    let names = ["tokens", "targets", "positions", "doc_start"];
    let views = names.iter().zip(&bytes).map(|(name, bytes)| {
        let view = TensorView::new(Dtype::I32, vec![steps, rows], bytes)?;
        Ok((*name, view))
    });
    let views = views.collect::<Result<Vec<_>, Box<dyn Error>>>()?;
    serialize_to_file(views, None, Path::new(out))?;
    Ok(())
}
