//! Checkpoints on disk: what is found, what is read, what is refused.

mod common;

use std::{fs, path::Path, process::Command};

use common::{folder, safetensors, small_gguf, small_safetensors};
use tightfit_format::{Checkpoint, FormatError};

#[track_caller]
fn refused(path: &Path, words: &[&str]) {
    let error = Checkpoint::open(path).expect_err("the checkpoint is bad").to_string();
    for word in words {
        assert!(error.contains(word), "{word:?} is not in: {error}");
    }
}

fn u8_tensor(name: &str, data: &[u8]) -> Vec<u8> {
    let n = data.len();
    let header = format!("{{\"{name}\":{{\"dtype\":\"U8\",\"shape\":[{n}],\"data_offsets\":[0,{n}]}}}}");
    safetensors(&header, data)
}

#[test]
fn a_folder_with_one_file() {
    let dir = folder("single");
    fs::write(dir.join("model.safetensors"), small_safetensors()).unwrap();
    for path in [dir.clone(), dir.join("model.safetensors")] {
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.path(), path);
        assert_eq!(checkpoint.folder(), Some(dir.as_path()));
        assert!(checkpoint.metadata().is_none());
        let size = small_safetensors().len() as u64;
        assert_eq!(
            checkpoint.files().collect::<Vec<_>>(),
            [(dir.join("model.safetensors").as_path(), size)]
        );
        let mut bytes = [0; 3];
        checkpoint.read(&checkpoint.tensors()["b"], 1, &mut bytes).unwrap();
        assert_eq!(bytes, [25, 26, 27]);
    }
}

#[test]
fn a_folder_with_shards() {
    let dir = folder("shards");
    let index = dir.join("model.safetensors.index.json");
    fs::write(dir.join("x.safetensors"), u8_tensor("a", &[1, 2])).unwrap();
    fs::write(dir.join("y.safetensors"), u8_tensor("b", &[3])).unwrap();
    let write = |map: &str| fs::write(&index, format!("{{\"weight_map\":{map}}}")).unwrap();
    write(r#"{"b":"y.safetensors","a":"x.safetensors"}"#);
    for path in [&dir, &index] {
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(checkpoint.folder(), Some(dir.as_path()));
        for (name, expected) in [("a", &[1, 2][..]), ("b", &[3])] {
            let mut bytes = vec![0; expected.len()];
            checkpoint.read(&checkpoint.tensors()[name], 0, &mut bytes).unwrap();
            assert_eq!(bytes, expected);
        }
    }
    write(r#"{"b":"y.safetensors","a":"z.safetensors"}"#);
    refused(&dir, &["model.safetensors.index.json", "`z.safetensors` is missing"]);
    write(r#"{"b":"y.safetensors","a":"x.safetensors","c":"x.safetensors"}"#);
    refused(&dir, &["`c`", "`x.safetensors`, which does not have it"]);
    write(r#"{"b":"x.safetensors","a":"x.safetensors"}"#);
    refused(&dir, &["`b`", "`x.safetensors`, which does not have it"]);
    fs::write(dir.join("y.safetensors"), u8_tensor("a", &[3])).unwrap();
    write(r#"{"b":"y.safetensors","a":"x.safetensors"}"#);
    refused(&dir, &["`a`", "both `y.safetensors` and `x.safetensors`"]);
    fs::write(
        dir.join("y.safetensors"),
        "version https://git-lfs.github.com/spec/v1\n",
    )
    .unwrap();
    refused(&dir, &["y.safetensors", "git lfs pull"]);
}

#[test]
fn a_folder_with_one_gguf() {
    let dir = folder("gguf");
    refused(&dir, &["no `model.safetensors`", "no .gguf"]);
    fs::write(dir.join("pytorch_model.bin"), "x").unwrap();
    refused(&dir, &["`pytorch_model.bin` is a pickle"]);
    fs::write(dir.join("m.gguf"), small_gguf()).unwrap();
    for path in [dir.clone(), dir.join("m.gguf")] {
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(
            checkpoint.metadata().unwrap().str("general.architecture").unwrap(),
            Some("llama")
        );
        assert!(checkpoint.folder().is_none());
    }
    fs::write(dir.join("n.gguf"), small_gguf()).unwrap();
    refused(&dir, &["2 GGUF files", "`m.gguf` to `n.gguf`"]);
}

#[test]
fn a_name_without_a_format_is_looked_into() {
    let dir = folder("names");
    let path = dir.join("blob");
    fs::write(&path, small_gguf()).unwrap();
    assert!(Checkpoint::open(&path).unwrap().metadata().is_some());
    fs::write(&path, small_safetensors()).unwrap();
    assert_eq!(Checkpoint::open(&path).unwrap().tensors().len(), 3);
    fs::write(&path, "PK\x03\x04").unwrap();
    refused(&path, &["zip"]);
    fs::write(dir.join("m.safetensors"), small_gguf()).unwrap();
    refused(&dir.join("m.safetensors"), &["GGUF"]);
    fs::write(dir.join("m.gguf"), small_safetensors()).unwrap();
    refused(&dir.join("m.gguf"), &["safetensors"]);
    fs::write(dir.join("i.json"), "<html>").unwrap();
    refused(&dir.join("i.json"), &["HTML"]);
}

#[test]
fn what_is_not_a_file_is_not_opened() {
    let dir = folder("kinds");
    fs::create_dir(dir.join("model.safetensors")).unwrap();
    refused(&dir, &["model.safetensors", "a directory"]);
    let fifo = dir.join("fifo.gguf");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    // Would wait forever if it were opened.
    refused(&fifo, &["fifo.gguf", "a FIFO"]);
    refused(Path::new("/dev/null"), &["/dev/null", "a device"]);
    refused(&dir.join("nothing.gguf"), &["nothing.gguf", "No such file"]);
}

#[test]
fn a_file_cut_short_under_it_is_an_error() {
    let dir = folder("cut");
    let path = dir.join("m.safetensors");
    let bytes = small_safetensors();
    fs::write(&path, &bytes).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(bytes.len() as u64 - 20).unwrap();
    let entry = &checkpoint.tensors()["a"];
    checkpoint.read(entry, 0, &mut [0; 16]).unwrap();
    let error = checkpoint.read(entry, 0, &mut [0; 24]).unwrap_err();
    assert!(matches!(error, FormatError::CutShort { .. }));
    let text = error.to_string();
    assert!(
        text.contains("m.safetensors") && text.contains("`a`") && text.contains("cut short"),
        "{text}"
    );
}

#[test]
fn reads_stay_inside_the_tensor() {
    let dir = folder("range");
    let path = dir.join("m.safetensors");
    fs::write(&path, small_safetensors()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let entry = &checkpoint.tensors()["a"];
    for (offset, len) in [(0, 25), (24, 1), (u64::MAX, 2)] {
        let result = checkpoint.read(entry, offset, &mut vec![0; len]);
        assert!(matches!(result, Err(FormatError::Range { .. })), "{offset} {len}");
    }
    checkpoint.read(entry, 24, &mut []).unwrap();
}

#[test]
fn floats_come_through_staging_of_any_size() {
    let dir = folder("floats");
    let path = dir.join("m.gguf");
    fs::write(&path, small_gguf()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let a = checkpoint.floats("a.weight").unwrap();
    for staging in [4, 5, 8, 100] {
        let mut out = [f32::NAN; 4];
        checkpoint.read_f32(a, 2, &mut vec![0; staging], &mut out).unwrap();
        assert_eq!(out, [2.0, 3.0, 4.0, 5.0]);
    }
    let b = checkpoint.floats("b.weight").unwrap();
    let mut out = [f32::NAN; 32];
    checkpoint.read_f32(b, 32, &mut [0; 18], &mut out).unwrap();
    // d = 0x3c3c, q = 0xc in the first half, 3 in the second.
    let d = 1.0 + 60.0 / 1024.0;
    assert_eq!((out[0], out[16]), (d * 4.0, d * -5.0));
    assert!(matches!(
        checkpoint.read_f32(b, 1, &mut [0; 18], &mut out),
        Err(FormatError::Blocks { .. })
    ));
    assert!(matches!(
        checkpoint.read_f32(b, 0, &mut [0; 17], &mut out),
        Err(FormatError::Blocks { .. })
    ));
    assert!(matches!(
        checkpoint.read_f32(b, 64, &mut [0; 18], &mut out),
        Err(FormatError::Range { .. })
    ));
}

#[test]
fn what_is_not_floats_is_listed_and_refused_by_name() {
    let dir = folder("not-floats");
    let path = dir.join("m.gguf");
    fs::write(&path, small_gguf()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    for (name, ty) in [("d.ints", "I32"), ("c.new", "type 99")] {
        let error = checkpoint.floats(name).unwrap_err().to_string();
        assert!(
            error.contains("m.gguf") && error.contains(name) && error.contains(ty),
            "{error}"
        );
        let entry = &checkpoint.tensors()[name];
        let result = checkpoint.read_f32(entry, 0, &mut [0; 64], &mut [0.0; 3]);
        assert!(matches!(result, Err(FormatError::NotFloats { .. })));
        checkpoint.read(entry, 0, &mut [0; 12]).unwrap();
    }
    assert!(matches!(checkpoint.floats("x"), Err(FormatError::NoTensor { .. })));
}
