//! Safetensors files and indexes of shards. No input is both.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use tightfit_format::{index, safetensors};
use tightfit_fuzz::{check, init, says};

fuzz_target!(init: init(), |file: &[u8]| {
    check(file, || {
        match safetensors::parse(file, file.len() as u64, Path::new("model.safetensors")) {
            Ok(tensors) => {
                let bytes: u64 = tensors.values().map(|entry| entry.bytes()).sum();
                assert!(bytes <= file.len() as u64);
                assert!(tensors.values().all(|entry| entry.offset() + entry.bytes() <= file.len() as u64));
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
