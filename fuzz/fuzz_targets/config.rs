//! `config.json`: read, checked, written, read again; the graphs of small models.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tightfit_fuzz::{check, init, says};
use tightfit_model::{BatchShape, DecodeShape, DecoderConfig};

/// Larger models are described, not built: a graph takes memory for each layer.
const MOST_LAYERS: u64 = 8;

fuzz_target!(init: init(), |file: &[u8]| {
    if let Ok(text) = std::str::from_utf8(file) {
        check(file, || read(text));
    }
});

fn read(text: &str) {
    let config = match DecoderConfig::from_hf(text) {
        Ok(config) => config,
        Err(error) => return says(error),
    };
    config.check().expect("checked when read");
    let written = config.to_hf().to_string();
    assert_eq!(
        DecoderConfig::from_hf(&written).expect("what is written can be read"),
        config
    );
    if config.num_hidden_layers > MOST_LAYERS {
        return;
    }
    let batch = BatchShape {
        batch: 1,
        seq: 3,
        loss_chunk: 2,
    };
    let results = [
        config.weights().map(drop),
        config.loss(batch).map(drop),
        config.decode(DecodeShape { rows: 1, capacity: 4 }).map(drop),
    ];
    for result in results {
        result.unwrap_or_else(says);
    }
}
