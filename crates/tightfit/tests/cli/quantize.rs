//! Models written in 8 and 4 bits.

use std::fs;
use std::path::Path;
use std::process::Command;

use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json as object};

use crate::pretrained::model;
use crate::stop::{Signal, Started};
use crate::util::{BIN, expect, folder, json, names, tiny, with};

fn quantize(flags: &str, out: &Path) -> Command {
    let mut command = Command::new(BIN);
    command.arg("quantize").args(flags.split_whitespace());
    with(command, "--out", out)
}

fn config(dir: &Path, layers: u64, hidden: u64) -> std::path::PathBuf {
    let path = dir.join("shape.json");
    let config = object!({
        "model_type": "llama", "vocab_size": 256, "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": false,
    });
    fs::write(&path, config.to_string()).unwrap();
    path
}

fn listed(file: &[u8]) -> Value {
    let (_, header) = SafeTensors::read_metadata(file).unwrap();
    let text = &header.metadata().as_ref().unwrap()["tightfit.quantized"];
    serde_json::from_str(text).unwrap()
}

#[test]
fn a_model_becomes_smaller_and_stays_a_model() {
    let dir = folder("quantize");
    let model = model(&dir);
    for (base, most) in [("int8", 2e-4), ("int4", 2e-2), ("nf4", 2e-2)] {
        let out = dir.join(base);
        let command = with(quantize(&format!("--base {base} --json"), &out), "--model", &model);
        let report = json(&expect(command, 0, &["quantised", "down_proj"]));
        assert_eq!(report["base"], base);
        assert_eq!(report["quantized"]["tensors"], 7);
        let error = report["relative_squared_error"].as_f64().unwrap();
        assert!(error > 0.0 && error < most, "{base}: {error}");
        let bytes = |sum: &str, when: &str| report[sum][when].as_u64().unwrap();
        assert!(bytes("quantized", "bytes_after") * 3 < bytes("quantized", "bytes_before"));
        assert_eq!(bytes("kept", "bytes_after"), bytes("kept", "bytes_before"));
        let files = names(&out);
        for name in [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ] {
            assert!(files.iter().any(|file| file == name), "{files:?}");
        }
        assert!(files.iter().all(|file| !file.ends_with(".partial")));

        let file = fs::read(out.join("model.safetensors")).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let source = fs::read(model.join("model.safetensors")).unwrap();
        let source = SafeTensors::deserialize(&source).unwrap();
        let listed = listed(&file);
        assert_eq!(listed.as_object().unwrap().len(), 7);
        for (name, before) in source.tensors() {
            let after = tensors.tensor(&name).unwrap();
            match listed.get(&name) {
                Some(info) => {
                    assert_eq!(after.dtype(), Dtype::U8);
                    assert_eq!(info["format"], base);
                    assert_eq!(info["shape"], object!(before.shape()));
                }
                None => assert!(after == before, "{name}"),
            }
        }
        let mut command = Command::new(BIN);
        command.args(["inspect", "--json"]).arg(&out);
        let inspected = json(&expect(command, 0, &[]));
        assert_eq!(inspected["problems"], object!([]));
        assert_eq!(inspected["encodings"][base.to_uppercase()]["tensors"], 7);
        // Not twice.
        let again = with(quantize("--base nf4", &dir.join("again")), "--model", &out);
        expect(again, 4, &["already"]);
        assert!(!dir.join("again").exists());
    }
}

#[test]
fn tables_and_single_layers_are_taken_on_request() {
    let dir = folder("quantize-choice");
    let shape = config(&dir, 2, 64);
    let taken = |flags: &str, out: &str| -> Vec<String> {
        let command = with(
            quantize(&format!("--base nf4 {flags}"), &dir.join(out)),
            "--fresh",
            &shape,
        );
        expect(command, 0, &[]);
        let file = fs::read(dir.join(out).join("model.safetensors")).unwrap();
        listed(&file).as_object().unwrap().keys().cloned().collect()
    };
    let all = taken("--embeddings --head", "all");
    assert_eq!(all.len(), 16);
    for name in ["model.embed_tokens.weight", "lm_head.weight"] {
        assert!(all.iter().any(|taken| taken == name));
    }
    let some = taken("--targets q_proj,layers.1.mlp.up_proj", "some");
    assert_eq!(some.len(), 3);
    let unknown = with(
        quantize("--base nf4 --targets w1", &dir.join("none")),
        "--fresh",
        &shape,
    );
    expect(unknown, 2, &["--targets w1", "down_proj", "q_proj"]);
    assert!(!dir.join("none").exists());
}

#[test]
fn fresh_weights_are_those_of_the_seed() {
    let dir = folder("quantize-fresh");
    let shape = config(&dir, 2, 128);
    let file = |flags: &str, out: &str| {
        let command = with(
            quantize(&format!("--base int8 {flags}"), &dir.join(out)),
            "--fresh",
            &shape,
        );
        expect(command, 0, &[]);
        fs::read(dir.join(out).join("model.safetensors")).unwrap()
    };
    let one = file("--seed 3 --threads 1", "one");
    assert!(one == file("--seed 3 --threads 3", "three"));
    assert!(one != file("--seed 4", "other"));
    let tensors = SafeTensors::deserialize(&one).unwrap();
    let norm = tensors.tensor("model.norm.weight").unwrap();
    assert_eq!(norm.dtype(), Dtype::BF16);
    assert!(norm.data().chunks(2).all(|one| one == [0x80, 0x3f]));
    // Rows of normal numbers of 0.02: their largest is a few times that.
    let name = "model.layers.1.mlp.up_proj.weight";
    let up = tensors.tensor(name).unwrap();
    let scales = up.data()[..256 * 4]
        .chunks(4)
        .map(|b| f32::from_le_bytes(b.try_into().unwrap()));
    assert!(scales.into_iter().all(|scale| (0.03..0.12).contains(&(scale * 127.0))));
}

#[test]
fn nothing_is_overwritten_unasked() {
    let dir = folder("quantize-overwrite");
    let shape = config(&dir, 1, 64);
    let out = dir.join("out");
    let command = |flags: &str, out: &Path| with(quantize(&format!("--base nf4 {flags}"), out), "--fresh", &shape);
    expect(command("", &out), 0, &[]);
    let first = fs::read(out.join("model.safetensors")).unwrap();
    expect(command("--seed 2", &out), 2, &["holds a model", "--overwrite"]);
    assert!(first == fs::read(out.join("model.safetensors")).unwrap());
    expect(command("--seed 2 --overwrite", &out), 0, &[]);
    assert!(first != fs::read(out.join("model.safetensors")).unwrap());
    fs::write(out.join("other.gguf"), "").unwrap();
    expect(command("--overwrite", &out), 2, &["other.gguf"]);
    // What is quantised is not quantised again, wherever it goes.
    fs::remove_file(out.join("other.gguf")).unwrap();
    let again = with(quantize("--base nf4 --overwrite", &out), "--model", &out);
    expect(again, 4, &["is NF4 already"]);
    // The model's own folder.
    let own = dir.join("own");
    expect(with(tiny(""), "--out", &own), 0, &[]);
    let before = fs::read(own.join("model.safetensors")).unwrap();
    let onto_itself = with(quantize("--base nf4 --overwrite", &own), "--model", &own);
    expect(onto_itself, 2, &["lies in"]);
    assert!(before == fs::read(own.join("model.safetensors")).unwrap());
}

#[test]
fn flags_that_make_no_sense_are_refused() {
    let dir = folder("quantize-flags");
    let shape = config(&dir, 1, 64);
    let out = dir.join("out");
    expect(quantize("--base nf4", &out), 2, &["--model", "--fresh"]);
    expect(
        with(quantize("--base q4_0", &out), "--fresh", &shape),
        2,
        &["int8, int4 or nf4"],
    );
    expect(
        with(quantize("--base nf4", &out), "--fresh", dir.join("no.json")),
        4,
        &["no.json"],
    );
    fs::write(dir.join("bad.json"), "{").unwrap();
    expect(
        with(quantize("--base nf4", &out), "--fresh", dir.join("bad.json")),
        4,
        &["bad.json"],
    );
    assert!(!out.exists());
}

#[test]
fn a_weight_that_is_no_number_is_named() {
    let dir = folder("quantize-nan");
    let model = model(&dir);
    let path = model.join("model.safetensors");
    let mut file = fs::read(&path).unwrap();
    let (header, metadata) = SafeTensors::read_metadata(&file).unwrap();
    let name = "model.layers.0.mlp.up_proj.weight";
    let at = 8 + header + metadata.info(name).unwrap().data_offsets.0 + 4 * 33;
    file[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&path, file).unwrap();
    let out = dir.join("out");
    expect(
        with(quantize("--base nf4", &out), "--model", &model),
        4,
        &[name, "element 33"],
    );
    assert!(!out.exists());
}

#[test]
fn a_stop_leaves_nothing() {
    let dir = folder("quantize-stop");
    // Some seconds of work.
    let shape = config(&dir, 24, 1024);
    let out = dir.join("out");
    let mut started = Started::new(with(quantize("--base int4", &out), "--fresh", &shape));
    started.wait_for("quantising");
    started.send(Signal::Term);
    let done = started.finish();
    assert_eq!(done.code, Some(5), "{done:?}");
    assert!(done.stderr.contains("nothing was written"), "{done:?}");
    assert!(!out.exists());
}
