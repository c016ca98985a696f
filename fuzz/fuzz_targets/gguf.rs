//! GGUF files: header, tensors, and the model that the metadata describe.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use tightfit_format::{Encoding, Entry, decode, gguf};
use tightfit_fuzz::{check, init, says};
use tightfit_model::{DecoderConfig, Naming};

/// Larger models are described, not built: a graph takes memory for each layer.
const MOST_LAYERS: u64 = 8;

fuzz_target!(init: init(), |file: &[u8]| check(file, || read(file)));

fn read(file: &[u8]) {
    let header = match gguf::parse(file, file.len() as u64, Path::new("model.gguf")) {
        Ok(header) => header,
        Err(error) => return says(error),
    };
    for entry in header.tensors.values() {
        tensor(file, entry);
    }
    let frequencies = header
        .tensors
        .get("rope_freqs.weight")
        .filter(|entry| entry.encoding == Encoding::F32)
        .map(|entry| {
            let mut out = vec![0.0; entry.elements() as usize];
            decode(entry.encoding, bytes(file, entry), &mut out).expect("whole blocks");
            out
        });
    let has_tensor = |name: &str| header.tensors.contains_key(name);
    match DecoderConfig::from_gguf(&header.metadata, has_tensor, frequencies.as_deref()) {
        Ok(config) => {
            config.check().expect("checked when read");
            if config.num_hidden_layers <= MOST_LAYERS {
                let tensors = header
                    .tensors
                    .values()
                    .map(|entry| (entry.name.as_str(), entry.shape.as_slice()));
                config.sources(Naming::Gguf, tensors).map(drop).unwrap_or_else(says);
            }
        }
        Err(error) => says(error),
    }
}

fn bytes<'f>(file: &'f [u8], entry: &Entry) -> &'f [u8] {
    &file[entry.offset() as usize..][..entry.bytes() as usize]
}

/// Decodes a tensor block by block.
fn tensor(file: &[u8], entry: &Entry) {
    let bytes = bytes(file, entry);
    if entry.encoding.decodes() {
        assert_eq!(
            bytes.len() as u64 / entry.encoding.block_bytes() * entry.encoding.block_elements(),
            entry.elements()
        );
        let mut block = vec![0.0; entry.encoding.block_elements() as usize];
        for bytes in bytes.chunks_exact(entry.encoding.block_bytes() as usize) {
            decode(entry.encoding, bytes, &mut block).expect("a whole block");
        }
    } else {
        decode(entry.encoding, bytes, &mut []).expect_err("it cannot be decoded");
    }
}
