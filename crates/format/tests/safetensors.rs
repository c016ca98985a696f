//! safetensors headers and indices: good ones, and each way to be wrong with the place that the error must name.

mod common;

use std::{collections::BTreeMap, path::Path};

use common::{safetensors, small_safetensors};
use tightfit_format::{Encoding, Entry, index};

fn parse(bytes: &[u8]) -> Result<BTreeMap<String, Entry>, String> {
    tightfit_format::safetensors::parse(bytes, bytes.len() as u64, Path::new("m.safetensors"))
        .map_err(|e| e.to_string())
}

#[track_caller]
fn contains(error: &str, words: &[&str]) {
    for word in words {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
}

#[track_caller]
fn refused(bytes: &[u8], words: &[&str]) {
    let error = parse(bytes).expect_err("the file is bad");
    contains(&error, &["m.safetensors"]);
    contains(&error, words);
}

#[test]
fn tensors_have_shape_and_place() {
    let bytes = small_safetensors();
    let tensors = parse(&bytes).unwrap();
    let data = bytes.len() as u64 - 36;
    assert_eq!(tensors.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
    let a = &tensors["a"];
    assert_eq!(
        (a.encoding, a.shape.as_slice(), a.offset(), a.bytes()),
        (Encoding::F32, &[2, 3][..], data, 24)
    );
    let b = &tensors["b"];
    assert_eq!(
        (b.encoding, b.offset(), b.bytes(), b.row_bytes()),
        (Encoding::Bf16, data + 24, 4, 4)
    );
    let c = &tensors["c"];
    assert_eq!(
        (c.encoding.name(), c.encoding.decodes(), c.bytes()),
        ("I64".into(), false, 8)
    );
}

#[test]
fn our_catalogue_is_that_of_the_reference() {
    use ::safetensors::{Dtype, SafeTensors, tensor::TensorView};
    let dtypes = [
        Dtype::BOOL,
        Dtype::F4,
        Dtype::F6_E2M3,
        Dtype::F6_E3M2,
        Dtype::U8,
        Dtype::I8,
        Dtype::F8_E5M2,
        Dtype::F8_E4M3,
        Dtype::F8_E8M0,
        Dtype::F8_E4M3FNUZ,
        Dtype::F8_E5M2FNUZ,
        Dtype::I16,
        Dtype::U16,
        Dtype::F16,
        Dtype::BF16,
        Dtype::I32,
        Dtype::U32,
        Dtype::F32,
        Dtype::C64,
        Dtype::F64,
        Dtype::I64,
        Dtype::U64,
    ];
    let data = [0u8; 12 * 8];
    let views = dtypes.map(|dtype| {
        let view = TensorView::new(dtype, vec![3, 4], &data[..12 * dtype.bitsize() / 8]).unwrap();
        (dtype.to_string(), view)
    });
    let bytes = ::safetensors::serialize(views, None).unwrap();
    let ours = parse(&bytes).unwrap();
    let reference = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(ours.len(), dtypes.len());
    for (name, view) in reference.tensors() {
        let entry = &ours[&name];
        assert_eq!(entry.encoding.name(), name);
        assert_eq!(entry.shape, [3, 4]);
        assert_eq!(entry.bytes(), view.data().len() as u64);
        let start = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
        assert_eq!(entry.offset(), start as u64, "{name}");
    }
}

#[test]
fn other_files_say_what_they_seem_to_be() {
    refused(b"", &["empty"]);
    refused(b"PK\x03\x04\x14\0\0\0\x08\0", &["zip", "PyTorch"]);
    refused(b"\x80\x02}q\0X\x05\0\0\0hello", &["pickle"]);
    refused(b"<!DOCTYPE html><html></html>", &["HTML"]);
    refused(b"\n <HTML><head>", &["HTML"]);
    refused(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
        &["git lfs pull"],
    );
    refused(&common::small_gguf(), &["GGUF"]);
    refused(b"{\"a\": 1}", &["JSON"]);
    refused(b"\x89HDF\r\n\x1a\n", &["HDF5"]);
}

#[test]
fn a_bad_header_says_where() {
    let long = [&(1u64 << 31).to_le_bytes()[..], b"{}"].concat();
    refused(&long, &["header", "length", "2147483648"]);
    let past_end = [&200u64.to_le_bytes()[..], b"{}"].concat();
    refused(&past_end, &["header", "too early", "200"]);
    refused(&safetensors("{\"a\":", &[]), &["header", "`a`", "line 1 column 5"]);
    refused(&safetensors("{} x", &[]), &["header", "trailing"]);
    refused(&safetensors("{\"\u{e9}\":1}", &[]), &["`é`"]);
    let bad_text = [&7u64.to_le_bytes()[..], b"{\"\xff\":1}"].concat();
    refused(&bad_text, &["header", "byte 10", "UTF-8"]);
    let skipped = [&20u64.to_le_bytes()[..], b"{\"__metadata__\":\"\xff\"}"].concat();
    refused(&skipped, &["header", "byte 25", "UTF-8"]);
    // What is skipped takes no stack, however deep.
    let deep = format!("{{\"__metadata__\":{}{}}}", "[".repeat(1 << 20), "]".repeat(1 << 20));
    assert!(parse(&safetensors(&deep, &[])).unwrap().is_empty());
    refused(
        &safetensors(&format!("{{\"t\":{{\"shape\":{}", "[".repeat(1 << 20)), &[]),
        &["`t`", "line 1"],
    );
}

/// A header of tensors given as (name, dtype, shape, offsets).
fn header(tensors: &[(&str, &str, &str, &str)]) -> String {
    let items: Vec<String> = tensors
        .iter()
        .map(|(name, dtype, shape, offsets)| {
            format!("\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":{offsets}}}")
        })
        .collect();
    format!("{{{}}}", items.join(","))
}

#[test]
fn bad_tensors_name_the_tensor() {
    let one =
        |dtype, shape, offsets, data: usize| safetensors(&header(&[("t", dtype, shape, offsets)]), &vec![0; data]);
    parse(&one("F32", "[2]", "[0,8]", 8)).unwrap();
    refused(&one("F31", "[2]", "[0,8]", 8), &["`t`", "unknown dtype", "F31"]);
    refused(&one("F32", "[2]", "[0,7]", 7), &["`t`", "needs 8 bytes", "7"]);
    refused(&one("F32", "[2]", "[8,0]", 8), &["`t`", "end of its data"]);
    refused(&one("F32", "[2]", "[0,8]", 7), &["`t`", "too early"]);
    refused(&one("F32", "[2]", "[0,8]", 9), &["1 bytes after the last tensor"]);
    refused(&one("F32", "[2]", "[4,12]", 12), &["`t`", "4 bytes before it"]);
    refused(
        &one("F32", "[4294967296,4294967296]", "[0,0]", 0),
        &["`t`", "overflows"],
    );
    refused(
        &one("F32", "[0,9223372036854775808,9]", "[0,0]", 0),
        &["`t`", "overflows"],
    );
    refused(
        &one("F32", "[2]", "[18446744073709551608,18446744073709551615]", 8),
        &["`t`"],
    );
    refused(&one("F32", "[-1]", "[0,4]", 4), &["`t`", "-1"]);
    refused(&one("F32", "[18446744073709551616]", "[0,4]", 4), &["`t`"]);
    refused(&one("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]", 4), &["`t`", "at most 8"]);
    refused(&one("F4", "[3]", "[0,1]", 1), &["`t`", "whole blocks"]);
    let twice = header(&[("t", "U8", "[1]", "[0,1]"), ("t", "U8", "[1]", "[1,2]")]);
    refused(&safetensors(&twice, &[0; 2]), &["`t`", "appears twice"]);
    let overlap = header(&[("t", "U8", "[2]", "[0,2]"), ("u", "U8", "[2]", "[1,3]")]);
    refused(&safetensors(&overlap, &[0; 3]), &["`u`", "overlaps", "`t`"]);
    refused(
        &safetensors("{\"t\":{\"dtype\":\"U8\",\"shape\":[1]}}", &[0]),
        &["`t`", "data_offsets"],
    );
}

#[test]
fn an_index_lists_shards_once_and_tensors() {
    let json =
        br#"{"metadata":{"total_size":7},"weight_map":{"a":"x.safetensors","b":"y.safetensors","c":"x.safetensors"}}"#;
    let index = index::parse(json, Path::new("i.json")).unwrap();
    assert_eq!(index.shards, ["x.safetensors", "y.safetensors"]);
    assert_eq!(
        index.tensors.into_iter().collect::<Vec<_>>(),
        [("a".into(), 0), ("b".into(), 1), ("c".into(), 0)]
    );
}

#[test]
fn a_bad_index_says_where() {
    let refused = |json: &str, words: &[&str]| {
        let error = index::parse(json.as_bytes(), Path::new("i.json"))
            .expect_err("the index is bad")
            .to_string();
        contains(&error, &["i.json"]);
        contains(&error, words);
    };
    for shard in [
        "../x",
        "..",
        ".",
        "/etc/passwd",
        "a/b",
        "a\\\\b",
        "",
        "./x",
        "x/",
        "x\\u0000",
    ] {
        refused(
            &format!("{{\"weight_map\":{{\"t\":\"{shard}\"}}}}"),
            &["`t`", "file name in the folder"],
        );
    }
    refused("{}", &["weight_map"]);
    refused("[]", &["weight_map"]);
    refused("{\"weight_map\":{\"t\":3}}", &["`t`", "line 1"]);
    refused("{\"weight_map\":{\"t\":\"x\",\"t\":\"x\"}}", &["`t`", "appears twice"]);
    refused("{\"weight_map\":{},\"weight_map\":{}}", &["weight_map", "duplicate"]);
    refused(&format!("{{\"metadata\":{}", "[".repeat(1 << 20)), &["line 1", "EOF"]);
    refused(&format!("{{\"weight_map\":{}", "[".repeat(1 << 20)), &["line 1"]);
}
