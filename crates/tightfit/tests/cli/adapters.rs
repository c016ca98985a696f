//! Adapters by the command: training beside a frozen model, what is left in the folder, going on with it, and merging.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::pretrained::{job, model, text};
use crate::util::{BIN, expect, folder, json, last_checkpoint, metrics, names, tiny, train, with};

fn command(name: &str, flags: &str) -> Command {
    let mut command = Command::new(BIN);
    command.arg(name).args(flags.split_whitespace());
    command
}

fn eval(model: &Path, data: &Path, adapter: Option<&Path>) -> f64 {
    let flags = "--seq 32 --threads 1 --budget 512MiB --json";
    let mut command = with(with(command("eval", flags), "--model", model), "--data", data);
    if let Some(adapter) = adapter {
        command = with(command, "--adapter", adapter);
    }
    json(&expect(command, 0, &[]))["loss"].as_f64().unwrap()
}

/// Adapters learn, their folder is one of PEFT's, a run that is cut off goes on to the same bytes, and a new one starts from them.
#[test]
fn an_adapter_is_trained_resumed_used_and_merged() {
    let dir = folder("adapter");
    let model = model(&dir);
    let data = dir.join("corpus.txt");
    fs::write(&data, text(200)).unwrap();
    let [out, merged, further] = ["out", "merged", "further"].map(|name| dir.join(name));
    let flags = "--method lora --rank 8 --lr 1e-2 --dropout 0.1 --steps 30 --warmup-steps 2 --save-every 15 --json";
    let report = json(&expect(with(lora(&model, &data, flags), "--out", &out), 0, &[]));
    let [first, last] = ["loss_first", "loss_last"].map(|loss| report[loss].as_f64().unwrap());
    assert!(last < first - 0.05, "{first} → {last}");
    assert_eq!(report["measured_arena_peak_bytes"], report["planned_peak_bytes"]);
    // Rank 8 beside one layer: q and o of 32 × 32, k and v of 16 × 32, three of 64 × 32.
    let expected = 8 * (2 * (32 + 32) + 2 * (16 + 32) + 3 * (64 + 32));
    assert_eq!(report["trained_parameters"], expected);

    for folder in [&out, &last_checkpoint(&out)] {
        let files = names(folder);
        for name in ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"] {
            assert!(files.iter().any(|file| file == name), "{name}: {files:?}");
        }
        for name in ["config.json", "model.safetensors"] {
            assert!(files.iter().all(|file| file != name), "{name}: {files:?}");
        }
    }
    let config: Value = serde_json::from_slice(&fs::read(out.join("adapter_config.json")).unwrap()).unwrap();
    assert_eq!(config["base_model_name_or_path"], model.to_str().unwrap());
    assert_eq!((&config["r"], &config["lora_alpha"]), (&8.into(), &32.into()));

    let (plain, adapted) = (eval(&model, &data, None), eval(&model, &data, Some(&out)));
    assert!(adapted < plain - 0.05, "{plain} → {adapted}");
    // As if killed after its first checkpoint.
    let whole = fs::read(out.join("adapter_model.safetensors")).unwrap();
    fs::remove_dir_all(last_checkpoint(&out)).unwrap();
    fs::remove_file(out.join("result.json")).unwrap();
    fs::remove_file(out.join("adapter_model.safetensors")).unwrap();
    let mut resume = command("train", "--threads 2 --recompute block");
    resume.arg("--resume").arg(&out);
    expect(resume, 0, &[]);
    assert!(
        fs::read(out.join("adapter_model.safetensors")).unwrap() == whole,
        "other bits"
    );
    assert_eq!(metrics(&out).len(), 30);

    let merging = |flags: &str| {
        let command = with(command("merge", flags), "--model", &model);
        with(with(command, "--adapter", &out), "--out", &merged)
    };
    expect(merging(""), 0, &[]);
    expect(merging(""), 2, &["merged", "--overwrite"]);
    expect(merging("--overwrite"), 0, &[]);
    let found = eval(&merged, &data, None);
    assert!((found - adapted).abs() < 1e-5, "{found}, with the adapter {adapted}");

    let generate = |model: &Path, adapter: Option<&Path>| {
        let flags = "--prompt Line --max-tokens 8 --threads 1 --budget 512MiB --json";
        let mut command = with(command("generate", flags), "--model", model);
        if let Some(adapter) = adapter {
            command = with(command, "--adapter", adapter);
        }
        json(&expect(command, 0, &[]))["tokens"].clone()
    };
    assert_eq!(generate(&model, Some(&out)), generate(&merged, None));

    // A damaged adapter is named, and leaves the model that is there.
    let before = fs::read(merged.join("model.safetensors")).unwrap();
    let weights = out.join("adapter_model.safetensors");
    let mut damaged = whole.clone();
    let last = damaged.len() - 4;
    damaged[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    fs::write(&weights, damaged).unwrap();
    expect(merging("--overwrite"), 4, &["lora_", "NaN"]);
    fs::write(&weights, &whole).unwrap();
    assert!(before == fs::read(merged.join("model.safetensors")).unwrap());
    assert_eq!(generate(&model, Some(&out)), generate(&merged, None));

    let started = with(lora(&model, &data, "--steps 1 --json"), "--adapter", &out);
    let report = json(&expect(with(started, "--out", &further), 0, &[]));
    assert!(report["loss_first"].as_f64().unwrap() < first - 0.05);
    assert_eq!(report["trained_parameters"], expected);
}

fn lora(model: &Path, data: &Path, flags: &str) -> Command {
    // `job` says how many steps where the flags do not, and later flags win.
    job(model, data, flags)
}

#[test]
fn what_goes_with_adapters_alone_is_refused_elsewhere() {
    let dir = folder("adapter-refused");
    for (flags, words) in [
        ("--rank 8", ["--rank", "--method lora"]),
        ("--dropout 0.1", ["--dropout", "--method lora"]),
        ("--adapter there", ["--adapter", "--model"]),
        ("--method lora --rank 0", ["--rank", "between 1 and"]),
        ("--method lora --dropout 1", ["--dropout", "below 1"]),
        ("--method lora --alpha 0", ["--alpha", "between"]),
        ("--method lora --targets q,", ["--targets", "all-linear"]),
        ("--method lora --targets nothing", ["`nothing`", "q_proj"]),
        ("--method other", ["--method", "full, lora, qlora or auto"]),
    ] {
        let code = if flags.ends_with("nothing") { 1 } else { 2 };
        expect(tiny(flags), code, &words);
    }
    expect(
        with(tiny("--method lora"), "--out", dir.join("out")),
        2,
        &["--model", "adapter"],
    );
    let model = model(&dir);
    let data = dir.join("corpus.txt");
    fs::write(&data, text(200)).unwrap();
    let adapter = dir.join("adapter");
    expect(with(lora(&model, &data, "--method lora"), "--out", &adapter), 0, &[]);
    let started = |flags: &str| with(lora(&model, &data, flags), "--adapter", &adapter);
    expect(started("--rank 8"), 2, &["--rank", "--adapter has its own"]);
    expect(started("--method full"), 2, &["--adapter", "--method lora"]);
    expect(
        with(started(""), "--out", &adapter),
        2,
        &["adapter lies in", "choose another --out"],
    );
    let mut mistaken = train("--threads 1");
    mistaken.arg("--model").arg(&adapter).arg("--data").arg(&data);
    expect(mistaken, 4, &["is an adapter", "--adapter", "--model"]);
    expect(
        with(lora(&model, &data, ""), "--adapter", dir.join("none")),
        4,
        &["adapter_config.json"],
    );
}
