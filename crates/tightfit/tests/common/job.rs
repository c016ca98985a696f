//! The built-in job, small enough to run many times.

use tightfit::settings::{ClipNorm, Count};
use tightfit::{Request, Settings};

/// Six sequences of 32 tokens in that many micro-batches, through two layers.
pub fn small(threads: usize, micro_batches: u64, clip_norm: Option<f64>) -> Settings {
    let request = Request {
        hidden_size: Some(64),
        intermediate_size: Some(96),
        num_hidden_layers: Some(2),
        batch: Some(6),
        micro_batch: Some(Count::Of(6 / micro_batches)),
        seq: Some(32),
        loss_chunk: Some(Count::Of(40)),
        eval_batches: Some(2),
        // The last of three batches holds two sequences.
        eval_batch: Some(Count::Of(5)),
        clip_norm: Some(ClipNorm(clip_norm)),
        threads: Some(threads),
        ..Request::default()
    };
    request.resolve(u64::MAX).unwrap()
}
