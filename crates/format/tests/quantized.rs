//! Quantised tensors in safetensors files: written, read back, and each way to be wrong.

mod common;

use std::{collections::BTreeMap, fs, path::Path};

use common::{folder, safetensors, small_quantized};
use tightfit_format::{Block, Checkpoint, Encoding, Entry, FormatError, safetensors::Layout};
use tightfit_quant::Encoder;

fn parse(bytes: &[u8]) -> Result<BTreeMap<String, Entry>, String> {
    tightfit_format::safetensors::parse(bytes, bytes.len() as u64, Path::new("m.safetensors"))
        .map_err(|e| e.to_string())
}

#[test]
fn the_catalogue_has_what_was_meant() {
    let bytes = small_quantized();
    let tensors = parse(&bytes).unwrap();
    assert_eq!(tensors.len(), 5);
    for block in [Block::Int8, Block::Int4, Block::Nf4, Block::Q4_0] {
        let entry = &tensors[block.name()];
        assert_eq!(
            (entry.encoding, &entry.shape[..]),
            (Encoding::Block(block), &[3, 32][..])
        );
        assert_eq!(entry.bytes(), block.bytes(3, 32));
    }
    // Floats come first, where they are aligned.
    assert_eq!(tensors["norm"].offset() % 8, 0);
    assert!(tensors.values().all(|entry| entry.offset() >= tensors["norm"].offset()));

    // Others see bytes.
    let reference = ::safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let nf4 = reference.tensor("nf4").unwrap();
    assert_eq!(nf4.dtype(), ::safetensors::Dtype::U8);
    assert_eq!(nf4.shape(), [Block::Nf4.bytes(3, 32) as usize]);
}

#[test]
fn any_part_is_read_as_floats() {
    let (rows, cols) = (5, 40);
    let values: Vec<f32> = (0..rows * cols).map(|i| (i as f32 * 0.7).sin()).collect();
    let mut layout = Layout::default();
    let encoding = Encoding::Block(Block::Nf4);
    layout.push("w", encoding, &[rows as u64, cols as u64]).unwrap();
    let layout = layout.finish(&[]);
    let mut bytes = vec![0; layout.entries()[0].bytes() as usize];
    let mut scratch = vec![0.0; Block::Nf4.scratch_floats(rows as u64, cols as u64) as usize];
    let mut encoder = Encoder::new(Block::Nf4, rows, cols, &mut bytes, &mut scratch);
    encoder.push(&values);
    encoder.finish();
    let path = folder("quantized_floats").join("model.safetensors");
    fs::write(&path, [layout.header(), &bytes].concat()).unwrap();

    let checkpoint = Checkpoint::open(&path).unwrap();
    let entry = &checkpoint.tensors()["w"];
    let mut staging = vec![0; bytes.len()];
    let (mut part, mut expected) = ([0.0; 50], [0.0; 50]);
    checkpoint.read_f32(entry, 90, &mut staging, &mut part).unwrap();
    Block::Nf4.decode(&bytes, rows, cols, 90, &mut expected);
    assert_eq!(part, expected);

    let outside = checkpoint.read_f32(entry, 151, &mut staging, &mut part);
    assert!(matches!(outside, Err(FormatError::Blocks { .. })));
    staging.pop();
    let small = checkpoint.read_f32(entry, 0, &mut staging, &mut part);
    assert!(matches!(small, Err(FormatError::Blocks { .. })));
}

/// A file with the list as given, beside a `[2, 3]` matrix of int8, `t`, and floats, `f`.
fn listed(list: &str) -> Vec<u8> {
    let list = list.replace('"', "\\\"");
    let header = format!(
        "{{\"__metadata__\":{{\"tightfit.quantized\":\"{list}\"}},\"t\":{{\"dtype\":\"U8\",\"shape\":[14],\"data_offsets\":[0,14]}},\
         \"f\":{{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[14,22]}}}}"
    );
    safetensors(&header, &[0; 22])
}

#[test]
fn a_bad_list_names_the_tensor() {
    parse(&listed(r#"{"t":{"format":"int8","shape":[2,3]}}"#)).unwrap();
    parse(&listed(r#"{"t":{"format":"int8","shape":[2,3],"more":[{}]}}"#)).unwrap();
    let cases: [(&str, &[&str]); 16] = [
        (
            r#"{"t":{"format":"int8","shape":[3,2]}}"#,
            &["`t`", "needs 18 bytes", "14"],
        ),
        (r#"{"u":{"format":"int8","shape":[2,3]}}"#, &["`u`", "no such tensor"]),
        (r#"{"f":{"format":"int8","shape":[2,3]}}"#, &["`f`", "F32 of shape [2]"]),
        (
            r#"{"t":{"format":"int9","shape":[2,3]}}"#,
            &["`t`", "quantised format", "int9"],
        ),
        (r#"{"t":{"format":"int8","shape":[6]}}"#, &["`t`", "its shape is [6]"]),
        (
            r#"{"t":{"format":"int8","shape":[0,3]}}"#,
            &["`t`", "its shape is [0, 3]"],
        ),
        (r#"{"t":{"format":"int8","shape":[2,3,1]}}"#, &["`t`", "its shape"]),
        (r#"{"t":{"format":"q4_0","shape":[2,3]}}"#, &["`t`", "a multiple of 32"]),
        (
            r#"{"t":{"format":"int8","shape":[4294967296,4294967296]}}"#,
            &["`t`", "overflows"],
        ),
        (
            r#"{"t":{"format":"int8","shape":[18446744073709551615,1]}}"#,
            &["`t`", "needs"],
        ),
        (r#"{"t":{"format":"int8","shape":[-1,1]}}"#, &["`t`", "-1"]),
        (r#"{"t":{"format":"int8"}}"#, &["`t`", "shape"]),
        (
            r#"{"t":{"format":"int8","shape":[2,3]},"t":{"format":"int8","shape":[2,3]}}"#,
            &["`t`", "appears twice"],
        ),
        (r#"[]"#, &["an object from tensor names"]),
        (r#"{"t""#, &["`t`", "EOF"]),
        (r#"{} x"#, &["trailing"]),
    ];
    for (list, words) in cases {
        let error = parse(&listed(list)).expect_err(list);
        for word in ["m.safetensors", "`tightfit.quantized`"].iter().chain(words) {
            assert!(error.contains(word), "{word:?} is not in: {error}");
        }
    }
    let twice = r#"{"__metadata__":{"tightfit.quantized":"{}","tightfit.quantized":"{}"}}"#;
    assert!(parse(&safetensors(twice, &[])).unwrap_err().contains("appears twice"));
    let number = r#"{"__metadata__":{"tightfit.quantized":{}}}"#;
    assert!(parse(&safetensors(number, &[])).unwrap_err().contains("a string"));
    let deep = format!("{{\"t\":{{\"shape\":{}", "[".repeat(1 << 16));
    assert!(parse(&listed(&deep)).unwrap_err().contains("`t`"));
}

#[test]
fn metadata_of_any_type_is_let_be() {
    for value in ["null", "true", "1", "-1", "0.5", "\"text\"", "[1,[2]]", "{\"a\":{}}"] {
        let header = format!("{{\"__metadata__\":{value}}}");
        assert!(parse(&safetensors(&header, &[])).unwrap().is_empty(), "{value}");
    }
}
