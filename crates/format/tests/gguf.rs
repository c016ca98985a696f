//! GGUF headers: good ones, and each way to be wrong with the place that the error must name.

mod common;

use std::path::Path;

use common::{GgufWriter, array, small_gguf, string};
use tightfit_format::{
    Block, Encoding,
    gguf::{self, Array, Header, Value},
};

fn parse(bytes: &[u8]) -> Result<Header, String> {
    gguf::parse(bytes, bytes.len() as u64, Path::new("m.gguf")).map_err(|e| e.to_string())
}

/// Asserts that the error names the file and everything in `words`.
#[track_caller]
fn refused(bytes: &[u8], words: &[&str]) {
    let error = parse(bytes).expect_err("the file is bad");
    for word in ["m.gguf"].iter().chain(words) {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
}

#[test]
fn metadata_has_its_types() {
    let header = parse(&small_gguf()).unwrap();
    let m = &header.metadata;
    assert_eq!(header.version, 3);
    assert_eq!(m.keys().count(), 12);
    assert_eq!(m.str("general.architecture").unwrap(), Some("llama"));
    assert_eq!(m.u64("llama.block_count").unwrap(), Some(2));
    assert_eq!(m.f64("llama.rms").unwrap(), Some(f64::from(1e-5f32)));
    assert_eq!(m.i64("signed").unwrap(), Some(-7));
    assert_eq!(m.u64("big").unwrap(), Some(u64::MAX));
    assert_eq!(m.bool("flag").unwrap(), Some(true));
    assert_eq!(m.strs("tokens").unwrap().unwrap(), ["<s>", "é"]);
    assert_eq!(m.i64s("types").unwrap().unwrap(), [1, 3, -1]);
    assert_eq!(m.f64s("scores").unwrap().unwrap(), [0.5, -1.0]);
    assert_eq!(m.u64s("bytes").unwrap().unwrap(), [1, 2, 255]);
    assert_eq!(
        m.get("nested"),
        Some(&Value::Array(Array::Array(vec![Array::Bool(vec![false, true])])))
    );
    assert!(m.strs("empty").unwrap().unwrap().is_empty() && m.f64s("empty").unwrap().unwrap().is_empty());
    assert_eq!(m.u64("absent").unwrap(), None);
}

#[test]
fn a_value_of_another_type_is_an_error_that_names_the_key() {
    let header = parse(&small_gguf()).unwrap();
    let m = &header.metadata;
    let errors = [
        m.u64("signed").unwrap_err(),
        m.i64("big").unwrap_err(),
        m.u64("flag").unwrap_err(),
        m.f64("llama.block_count").unwrap_err(),
        m.str("tokens").unwrap_err(),
        m.u64s("types").unwrap_err(),
        m.strs("scores").unwrap_err(),
    ];
    for (error, key) in errors.iter().zip([
        "signed",
        "big",
        "flag",
        "llama.block_count",
        "tokens",
        "types",
        "scores",
    ]) {
        let text = error.to_string();
        assert!(text.contains(&format!("`{key}`")) && text.contains("m.gguf"), "{text}");
    }
}

#[test]
fn tensors_have_shape_outermost_first_and_place() {
    let bytes = small_gguf();
    let tensors = parse(&bytes).unwrap().tensors;
    let a = &tensors["a.weight"];
    assert_eq!(
        (a.encoding, a.shape.as_slice(), a.bytes(), a.row_bytes()),
        (Encoding::F32, &[2, 3][..], 24, 12)
    );
    assert!(a.offset().is_multiple_of(32));
    let start = a.offset() as usize;
    assert_eq!(bytes[start..start + 8], [0f32, 1.0].map(f32::to_le_bytes).concat());
    let b = &tensors["b.weight"];
    assert_eq!(
        (b.encoding, b.bytes(), b.row_bytes(), b.offset()),
        (Encoding::Block(Block::Q4_0), 36, 36, a.offset() + 32)
    );
    // Nobody knows how large an unknown type is: up to the next tensor.
    let c = &tensors["c.new"];
    assert_eq!((c.encoding, c.bytes()), (Encoding::Unknown(99), 64));
    let d = &tensors["d.ints"];
    assert_eq!(
        (d.encoding.name(), d.encoding.decodes(), d.bytes()),
        ("I32".into(), false, 12)
    );
}

#[test]
fn alignment_is_that_of_the_file() {
    for alignment in [1usize, 8, 256] {
        let writer = GgufWriter {
            alignment,
            version: 2,
            ..GgufWriter::default()
        };
        let bytes = writer
            .u32("general.alignment", alignment as u32)
            .tensor("a", &[1], 24, &[1])
            .tensor("b", &[1], 24, &[2])
            .build();
        let tensors = parse(&bytes).unwrap().tensors;
        for (name, value) in [("a", 1), ("b", 2)] {
            assert_eq!(bytes[tensors[name].offset() as usize], value);
        }
    }
    for bad in [0, 3, 48] {
        refused(
            &GgufWriter::default().u32("general.alignment", bad).build(),
            &["general.alignment", "power of two"],
        );
    }
    refused(
        &GgufWriter::default().text("general.alignment", "32").build(),
        &["general.alignment", "a string"],
    );
}

#[test]
fn other_versions_and_byte_orders_say_so() {
    let with = |version| {
        GgufWriter {
            version,
            ..GgufWriter::default()
        }
        .build()
    };
    refused(&with(1), &["version 1", "byte 8"]);
    refused(&with(4), &["version 4"]);
    refused(&with(3u32.swap_bytes()), &["big-endian"]);
    refused(
        &GgufWriter::default().key("split.count", 2, &3u16.to_le_bytes()).build(),
        &["split.count", "3 parts"],
    );
}

#[test]
fn other_files_say_what_they_seem_to_be() {
    refused(b"", &["empty"]);
    refused(b"GG", &["something else"]);
    refused(b"PK\x03\x04 and so on", &["zip"]);
    refused(b"tjgg\x01\0\0\0", &["before GGUF"]);
    refused(&common::small_safetensors(), &["safetensors"]);
    refused(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
        &["git lfs pull"],
    );
    refused(b"GGUF\x03\0\0", &["header", "byte 4", "too early"]);
}

#[test]
fn counts_and_lengths_are_held_against_the_bytes_left() {
    let base = GgufWriter::default().text("general.name", "x");
    refused(
        &GgufWriter {
            tensor_count: Some(1 << 60),
            ..base.clone()
        }
        .build(),
        &["tensors", "cannot fit"],
    );
    refused(
        &GgufWriter {
            key_count: Some(u64::MAX),
            ..base.clone()
        }
        .build(),
        &["metadata keys", "cannot fit"],
    );
    refused(
        &base.clone().key("s", 8, &u64::MAX.to_le_bytes()).build(),
        &["metadata key `s`", "too early"],
    );
    for ty in 0..13 {
        let words = ["metadata key `a`", "array elements", "cannot fit"];
        refused(&base.clone().key("a", 9, &array(ty, 1 << 61, &[0; 64])).build(), &words);
    }
    refused(
        &GgufWriter {
            key_count: Some(2),
            ..base
        }
        .build(),
        &["metadata key 1", "too early"],
    );
}

#[test]
fn bad_keys_and_values_name_the_key() {
    let w = GgufWriter::default;
    refused(
        &w().u32("twice", 1).u32("twice", 2).build(),
        &["`twice`", "appears twice"],
    );
    refused(&w().key(b"k\xff", 4, &[0; 4]).build(), &["metadata key 0", "UTF-8"]);
    refused(&w().key("k", 8, &string(b"\xc3")).build(), &["`k`", "UTF-8"]);
    refused(
        &w().key("k", 9, &array(8, 1, &string(b"\xff"))).build(),
        &["`k`", "UTF-8", "element"],
    );
    refused(&w().key("k", 13, &[0; 8]).build(), &["`k`", "unknown value type 13"]);
    refused(&w().key("k", 7, &[2]).build(), &["`k`", "boolean", "2"]);
    let deep = (0..5).fold(array(0, 0, &[]), |inner, _| array(9, 1, &inner));
    refused(&w().key("k", 9, &deep).build(), &["`k`", "nested"]);
    // A terminal must not obey a name.
    let error = parse(&w().u32("\x1b[2J", 1).u32("\x1b[2J", 2).build()).unwrap_err();
    assert!(!error.contains('\x1b'), "{error:?}");
}

#[test]
fn bad_tensors_name_the_tensor() {
    let w = GgufWriter::default;
    refused(
        &w().tensor("t", &[1], 0, &[0; 4]).tensor("t", &[1], 0, &[0; 4]).build(),
        &["`t`", "appears twice"],
    );
    refused(&w().tensor_at(b"\xff", &[1], 0, 0).build(), &["tensor 0", "UTF-8"]);
    refused(
        &w().tensor_at("t", &[1; 9], 0, 0).build(),
        &["`t`", "dimensions", "at most 8"],
    );
    refused(
        &w().tensor_at("t", &[1 << 32, 1 << 32], 0, 0).build(),
        &["`t`", "overflows"],
    );
    refused(&w().tensor_at("t", &[1 << 62], 0, 0).build(), &["`t`", "overflows"]);
    refused(
        &w().tensor_at("t", &[0, 1 << 40, 1 << 40], 0, 0).build(),
        &["`t`", "overflows"],
    );
    refused(&w().tensor("t", &[33], 2, &[0; 36]).build(), &["`t`", "32", "Q4_0"]);
    // 64 elements are two blocks, but its rows are not.
    refused(
        &w().tensor("t", &[16, 4], 2, &[0; 36]).build(),
        &["`t`", "whole blocks"],
    );
    refused(
        &w().tensor("t", &[8], 0, &[0; 31]).build(),
        &["`t`", "too early", "32", "31"],
    );
    refused(
        &w().tensor("t", &[1], 0, &[0; 64]).tensor_at("u", &[1], 0, 4).build(),
        &["`u`", "multiple of the alignment"],
    );
    refused(
        &w().tensor_at("t", &[1], 0, u64::MAX - 31).build(),
        &["`t`", "too early"],
    );
    refused(
        &w().tensor("t", &[16], 0, &[0; 64]).tensor_at("u", &[1], 0, 32).build(),
        &["`t`", "overlaps", "`u`"],
    );
    refused(
        &w().tensor("t", &[1], 0, &[0; 4]).tensor_at("u", &[1], 0, 0).build(),
        &["overlaps"],
    );
    let unknown_at_the_same_place = w().tensor("t", &[1], 0, &[0; 4]).tensor_at("u", &[1], 99, 0);
    refused(&unknown_at_the_same_place.build(), &["`u`", "overlaps", "`t`"]);
    refused(&w().tensor_at("t", &[1], 99, 64).build(), &["`t`", "too early"]);
}

#[test]
fn empty_and_scalar_tensors_are_tensors() {
    let bytes = GgufWriter::default()
        .tensor("none", &[0, 5], 0, &[])
        .tensor("scalar", &[], 0, &2.5f32.to_le_bytes())
        .build();
    let tensors = parse(&bytes).unwrap().tensors;
    assert_eq!((tensors["none"].bytes(), tensors["none"].elements()), (0, 0));
    assert_eq!((tensors["scalar"].bytes(), tensors["scalar"].elements()), (4, 1));

    // Without data there is no padding either.
    let bytes = GgufWriter::default().tensor_at("none", &[0], 0, 0).build();
    assert!(!bytes.len().is_multiple_of(32));
    assert_eq!(parse(&bytes).unwrap().tensors["none"].offset(), bytes.len() as u64);
}
