//! Safetensors files and indexes of shards. No input is both.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use tightfit_format::{Encoding, Entry, index, safetensors};
use tightfit_fuzz::{check, init, says};

fuzz_target!(init: init(), |file: &[u8]| {
    check(file, || {
        match safetensors::parse(file, file.len() as u64, Path::new("model.safetensors")) {
            Ok(tensors) => {
                let bytes: u64 = tensors.values().map(|entry| entry.bytes()).sum();
                assert!(bytes <= file.len() as u64);
                assert!(tensors.values().all(|entry| entry.offset() + entry.bytes() <= file.len() as u64));
                tensors.values().for_each(|entry| quantized(file, entry));
            }
            Err(error) => says(error),
        }
        match index::parse(file, Path::new("model.safetensors.index.json")) {
            Ok(index) => {
                assert!(index.tensors.values().all(|&shard| shard < index.shards.len()));
                assert!(index.shards.iter().all(|name| Path::new(name).file_name() == Some(name.as_ref())));
            }
            Err(error) => says(error),
        }
    })
});

/// Decodes the last elements of a quantised matrix.
fn quantized(file: &[u8], entry: &Entry) {
    let Encoding::Block(block) = entry.encoding else {
        return;
    };
    let bytes = &file[entry.offset() as usize..][..entry.bytes() as usize];
    let (rows, cols) = (entry.shape[0] as usize, entry.shape[1] as usize);
    let mut out = vec![0.0; cols.min(1 << 16) / block.row_multiple() as usize * block.row_multiple() as usize];
    block.decode(bytes, rows, cols, rows * cols - out.len(), &mut out);
}
