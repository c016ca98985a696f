//! Models and data that a user brings: a small model, made here, with a tokenizer of the fixtures.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;

use crate::resume::kill;
use crate::stop::{Signal, Started};
use crate::util::{
    BIN, RUN_FILES, TINY, check_checkpoint, expect, folder, json, last_checkpoint, metrics, names, tiny, train,
    trained, with,
};

/// Flags of a job on the small model.
const JOB: &str = "--batch 2 --seq 32 --threads 1 --eval-batches 1 --budget 512MiB";

/// ChatML.
const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + \
                        '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// A Hugging Face folder with a model of one layer.
pub fn model(dir: &Path) -> PathBuf {
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tokenizers/smollm.json");
    let tokenizer = fs::read(tokenizer).unwrap();
    let parsed: Value = serde_json::from_slice(&tokenizer).unwrap();
    let added = parsed["added_tokens"].as_array().unwrap().len();
    let vocab_size = parsed["model"]["vocab"].as_object().unwrap().len() + added;
    let model = dir.join("model");
    expect(
        with(tiny(&format!("--vocab-size {vocab_size} --steps 1")), "--out", &model),
        0,
        &[],
    );
    fs::write(model.join("tokenizer.json"), tokenizer).unwrap();
    let config = serde_json::json!({ "chat_template": TEMPLATE, "eos_token": "<|im_end|>" });
    fs::write(model.join("tokenizer_config.json"), config.to_string()).unwrap();
    model
}

pub fn job(model: &Path, data: &Path, flags: &str) -> Command {
    let steps = if flags.contains("--epochs") { "" } else { "--steps 4" };
    with(
        with(train(&format!("{JOB} {steps} {flags}")), "--model", model),
        "--data",
        data,
    )
}

/// Some lines of text, all different.
pub fn text(lines: usize) -> String {
    (0..lines)
        .map(|i| format!("Line {i} says that {} and {} make {}.\n", i, 2 * i, 3 * i))
        .collect()
}

fn command(name: &str, flags: &str) -> Command {
    let mut command = Command::new(BIN);
    command.arg(name).args(flags.split_whitespace());
    command
}

#[test]
fn a_model_is_trained_on_text_and_its_folder_is_a_model_again() {
    let dir = folder("fine-tune");
    let model = model(&dir);
    let data = dir.join("corpus.txt");
    fs::write(&data, text(200)).unwrap();
    let [first, second, third] = ["first", "second", "third"].map(|name| dir.join(name));
    let report = json(&expect(
        with(job(&model, &data, "--json --lr 1e-3 --epochs 1"), "--out", &first),
        0,
        &[],
    ));
    let rows = report["data"]["train_rows"].as_u64().unwrap();
    assert_eq!(report["steps"].as_u64().unwrap(), rows.div_ceil(2));
    assert_eq!(report["measured_arena_peak_bytes"], report["planned_peak_bytes"]);
    assert!(report["loss_last"].as_f64() < report["loss_first"].as_f64());
    assert!(report["entropy_floor"].is_null());
    let files = names(&first);
    assert!(
        RUN_FILES.iter().all(|name| files.iter().any(|file| file == name)),
        "{files:?}"
    );
    assert!(
        files.iter().all(|file| !file.ends_with(".rows")),
        "rows of a run that is done are gone: {files:?}"
    );
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let kept = fs::read(first.join(name)).unwrap();
        assert!(kept == fs::read(model.join(name)).unwrap(), "{name}");
        assert!(kept == fs::read(last_checkpoint(&first).join(name)).unwrap(), "{name}");
    }
    // The same job, in other micro-batches and threads, is the same to rounding; the same flags are the same to the bit.
    expect(
        with(job(&model, &data, "--lr 1e-3 --epochs 1 --threads 2"), "--out", &second),
        0,
        &[],
    );
    assert!(trained(&first) == trained(&second));
    expect(with(job(&first, &data, ""), "--out", &third), 0, &[]);
    assert!(metrics(&third)[0]["loss"].as_f64().unwrap() < metrics(&first)[0]["loss"].as_f64().unwrap());

    let eval = |model: &Path, flags: &str| {
        let command = with(command("eval", &format!("--json --seq 32 {flags}")), "--model", model);
        json(&expect(with(command, "--data", &data), 0, &[]))
    };
    let (before, after) = (eval(&model, ""), eval(&first, ""));
    assert!(after["loss"].as_f64().unwrap() < before["loss"].as_f64().unwrap());
    let strided = eval(&first, "--stride 16 --batch 3");
    assert_eq!(strided["tokens"], after["tokens"], "every token counts once");
    for report in [after, strided] {
        assert_eq!(report["measured_arena_peak_bytes"], report["planned_peak_bytes"]);
        let most = report["arena_bytes"].as_u64().unwrap() + report["reserve_bytes"].as_u64().unwrap();
        assert!(report["process_peak_bytes"].as_u64().unwrap() <= most);
    }
}

#[test]
fn a_run_on_files_killed_at_any_moment_ends_with_the_same_bits() {
    let dir = folder("kill-files");
    let model = model(&dir);
    let data = dir.join("chat.jsonl");
    let line = |i: usize| {
        serde_json::json!({ "messages": [
            { "role": "user", "content": format!("What is {i} and {}?", i + 1) },
            { "role": "assistant", "content": format!("It is {}.", 2 * i + 1) },
        ] })
        .to_string()
    };
    fs::write(&data, (0..300).map(|i| line(i) + "\n").collect::<String>()).unwrap();
    let [whole, killed] = ["whole", "killed"].map(|name| dir.join(name));
    let job = || job(&model, &data, "--seq 64 --steps 300 --save-every 3 --micro-batch 1");
    let started = Instant::now();
    expect(with(job(), "--out", &whole), 0, &[]);
    kill(20, &killed, started.elapsed(), job, || {
        assert!(trained(&whole) == trained(&killed));
        check_checkpoint(&last_checkpoint(&killed));
    });
}

/// Of half precision, in two shards: each weight is its half, widened, to the bit.
#[test]
fn sharded_files_of_half_precision_are_read() {
    let dir = folder("shards");
    let model = model(&dir);
    let data = dir.join("corpus.txt");
    fs::write(&data, text(50)).unwrap();
    let whole = fs::read(model.join("model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&whole).unwrap();
    let mut expected: BTreeMap<String, Vec<f32>> = BTreeMap::new();
    // Name, shape and bytes of each tensor.
    type Shard = Vec<(String, Vec<usize>, Vec<u8>)>;
    let mut shards = [Shard::new(), Shard::new()];
    for (index, (name, tensor)) in tensors.tensors().into_iter().enumerate() {
        let floats: Vec<f32> = tensor
            .data()
            .chunks(4)
            .map(|x| f32::from_le_bytes(x.try_into().unwrap()))
            .collect();
        // bfloat16 is the upper half of a float; halves of binary16 are exact for multiples of 2^-10 in this range.
        let (bytes, widened): (Vec<u8>, Vec<f32>) = if index % 2 == 0 {
            let halves: Vec<u16> = floats.iter().map(|x| (x.to_bits() >> 16) as u16).collect();
            let widened = halves
                .iter()
                .map(|&half| f32::from_bits(u32::from(half) << 16))
                .collect();
            (halves.iter().flat_map(|half| half.to_le_bytes()).collect(), widened)
        } else {
            let rounded: Vec<f32> = floats.iter().map(|x| (x * 1024.0).round() / 1024.0).collect();
            (
                rounded.iter().flat_map(|&x| binary16(x).to_le_bytes()).collect(),
                rounded,
            )
        };
        shards[index % 2].push((name.clone(), tensor.shape().to_vec(), bytes));
        expected.insert(name, widened);
    }
    let mut map = serde_json::Map::new();
    for (index, (shard, dtype)) in shards.iter().zip([Dtype::BF16, Dtype::F16]).enumerate() {
        let file = format!("model-0000{}-of-00002.safetensors", index + 1);
        let views = shard.iter().map(|(name, shape, bytes)| {
            map.insert(name.clone(), file.clone().into());
            (name.clone(), TensorView::new(dtype, shape.clone(), bytes).unwrap())
        });
        let views: Vec<_> = views.collect();
        safetensors::serialize_to_file(views, None, &model.join(&file)).unwrap();
    }
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    fs::write(model.join("model.safetensors.index.json"), index.to_string()).unwrap();
    fs::remove_file(model.join("model.safetensors")).unwrap();
    let out = dir.join("out");
    expect(with(job(&model, &data, "--steps 1 --lr 0"), "--out", &out), 0, &[]);
    let written = fs::read(out.join("model.safetensors")).unwrap();
    let written = SafeTensors::deserialize(&written).unwrap();
    assert_eq!(written.len(), expected.len());
    for (name, expected) in expected {
        let tensor = written.tensor(&name).unwrap();
        let found = tensor
            .data()
            .chunks(4)
            .map(|x| f32::from_le_bytes(x.try_into().unwrap()));
        assert!(found.eq(expected), "{name}");
    }
}

/// The bits of a number that binary16 holds exactly.
fn binary16(x: f32) -> u16 {
    let bits = x.to_bits();
    let (sign, exponent, mantissa) = (bits >> 16 & 0x8000, (bits >> 23 & 0xff) as i32 - 127, bits & 0x7f_ffff);
    let rest = match exponent {
        -127 => 0,
        // Smaller than 2^-14: the leading one moves into the fraction.
        ..-14 => (mantissa | 0x80_0000) >> (-1 - exponent),
        _ => ((exponent + 15) as u32) << 10 | mantissa >> 13,
    };
    (sign | rest) as u16
}

#[test]
fn generation_is_greedy_or_drawn_and_stops() {
    let dir = folder("generate");
    let model = model(&dir);
    let generate = |flags: &str, prompt: &[&str]| {
        let mut command = with(command("generate", &format!("--json {flags}")), "--model", &model);
        command.args(prompt);
        json(&expect(command, 0, &[]))
    };
    let prompt = ["--prompt", "Line 3 says that"];
    let greedy = generate("--max-tokens 20", &prompt);
    assert_eq!(greedy["measured_arena_peak_bytes"], greedy["planned_peak_bytes"]);
    assert_eq!(greedy, {
        let mut again = generate("--max-tokens 20 --threads 2 --seed 9", &prompt);
        for field in [
            "seconds",
            "process_peak_bytes",
            "reserve_bytes",
            "arena_bytes",
            "planned_peak_bytes",
            "measured_arena_peak_bytes",
            "budget_bytes",
        ] {
            again[field] = greedy[field].clone();
        }
        again
    });
    let drawn = |seed: u32| {
        generate(
            &format!("--max-tokens 20 --temperature 1.5 --top-k 50 --top-p 0.95 --seed {seed}"),
            &prompt,
        )["tokens"]
            .clone()
    };
    assert_eq!(drawn(1), drawn(1));
    assert_ne!(drawn(1), drawn(2));
    let chat = generate("--max-tokens 2", &["--chat", "Hello", "--system", "Be brief."]);
    assert!(chat["prompt_tokens"].as_array().unwrap().len() > 10);
    assert!(chat["tokens"].as_array().unwrap().len() <= 2);
    // A prompt of several chunks goes on like one that is read at once: the first token is the same as after the whole text.
    let long = text(40);
    let whole = generate("--max-tokens 3", &["--prompt", &long]);
    assert!(whole["prompt_tokens"].as_array().unwrap().len() > 300);
    for (args, words) in [
        (&["--prompt", ""][..], "no token"),
        (&["--chat", "x", "--prompt", "y"], "cannot be used with"),
        (&[], "--prompt"),
    ] {
        let mut command = with(command("generate", ""), "--model", &model);
        command.args(args);
        expect(command, 2, &[words]);
    }
}

#[test]
fn inspect_shows_what_is_there_also_of_models_that_are_not_known() {
    let dir = folder("inspect");
    let model = model(&dir);
    let inspect = |flags: &str| {
        let mut command = command("inspect", flags);
        command.arg(&model);
        expect(command, 0, &[])
    };
    let report = json(&inspect("--json"));
    assert_eq!(report["architecture"], "llama");
    assert_eq!(report["problems"].as_array().unwrap().len(), 0);
    let bytes = report["total"]["bytes"].as_u64().unwrap();
    assert_eq!(bytes, 4 * report["parameters"].as_u64().unwrap());
    assert!(
        inspect("--tensors")
            .stdout
            .contains("model.layers.0.self_attn.q_proj.weight")
    );
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    fs::write(model.join("config.json"), config.replace("\"llama\"", "\"mamba\"")).unwrap();
    let report = json(&inspect("--json"));
    assert!(report["architecture"].is_null());
    assert!(report["problems"][0].as_str().unwrap().contains("mamba"), "{report}");
    assert_eq!(report["total"]["bytes"], bytes);
    assert!(report["tokenizer"]["vocab_size"].as_u64().unwrap() > 256);
}

#[test]
fn models_that_cannot_be_used_are_named_with_the_reason() {
    let dir = folder("bad-model");
    let model = model(&dir);
    let data = dir.join("corpus.txt");
    fs::write(&data, text(50)).unwrap();
    let good = |name: &str| fs::read(model.join(name)).unwrap();
    let (config, weights, tokenizer) = (good("config.json"), good("model.safetensors"), good("tokenizer.json"));
    let text_of = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let cases: Vec<(&str, Vec<u8>, &[&str])> = vec![
        ("config.json", b"{".to_vec(), &["config.json"]),
        (
            "config.json",
            text_of(&config).replace("\"llama\"", "\"mamba\"").into(),
            &["config.json", "mamba", "llama"],
        ),
        (
            "config.json",
            text_of(&config).replacen('{', "{\"made_up\": 1,", 1).into(),
            &["config.json", "made_up"],
        ),
        (
            "config.json",
            text_of(&config)
                .replace("\"hidden_size\": 32", "\"hidden_size\": 64")
                .into(),
            &["model.embed_tokens.weight", "x32", "x64"],
        ),
        (
            "model.safetensors",
            weights[..weights.len() - 100].to_vec(),
            &["model.safetensors"],
        ),
        (
            "model.safetensors",
            b"PK\x03\x04 and so on, a zip".to_vec(),
            &["model.safetensors", "zip"],
        ),
        ("model.safetensors", Vec::new(), &["model.safetensors"]),
        ("tokenizer.json", b"{}".to_vec(), &["tokenizer.json"]),
        (
            "tokenizer.json",
            tokenizer[..tokenizer.len() / 2].to_vec(),
            &["tokenizer.json"],
        ),
    ];
    for (name, content, words) in cases {
        let before = good(name);
        fs::write(model.join(name), content).unwrap();
        expect(job(&model, &data, ""), 4, words);
        fs::write(model.join(name), before).unwrap();
    }
    fs::remove_file(model.join("tokenizer.json")).unwrap();
    expect(job(&model, &data, ""), 4, &["tokenizer.json"]);
    expect(job(&dir.join("absent"), &data, ""), 4, &["absent"]);
    expect(with(train(TINY), "--data", &data), 2, &["--data needs --model"]);
    expect(with(train(TINY), "--model", &model), 2, &["--model needs --data"]);
    expect(
        job(&model, &data, "--layers 3"),
        2,
        &["--num-hidden-layers", "--model has its own"],
    );
}

#[test]
fn data_that_cannot_be_used_is_named_with_file_and_line() {
    let dir = folder("bad-data");
    let model = model(&dir);
    let data = dir.join("lines.jsonl");
    let good = r#"{"text": "One two three four five six seven eight nine ten."}"#;
    for (bad, words) in [
        ("{", ["lines.jsonl:2", ""]),
        (r#"{"txt": "a"}"#, ["lines.jsonl:2", "txt"]),
        (r#"{"prompt": "a", "completion": ""}"#, ["lines.jsonl:2", ""]),
        (
            r#"{"messages": [{"role": "user", "content": "a"}]}"#,
            ["lines.jsonl:2", ""],
        ),
        ("[1, 2]", ["lines.jsonl:2", ""]),
    ] {
        fs::write(&data, format!("{good}\n{bad}\n{}", format!("{good}\n").repeat(20))).unwrap();
        expect(job(&model, &data, ""), 4, &words);
        let report = json(&expect(job(&model, &data, "--skip-bad-lines --json"), 0, &[]));
        assert_eq!(report["data"]["bad_lines"], 1, "{report}");
        assert!(
            report["data"]["first_bad"][0]
                .as_str()
                .unwrap()
                .contains("lines.jsonl:2")
        );
    }
    fs::write(&data, "").unwrap();
    expect(job(&model, &data, ""), 4, &["nothing to train on"]);
    fs::write(dir.join("corpus.csv"), "a,b").unwrap();
    expect(job(&model, &dir.join("corpus.csv"), ""), 4, &["corpus.csv", ".jsonl"]);
    expect(job(&model, &dir.join("absent.txt"), ""), 4, &["absent.txt"]);
    fs::write(dir.join("latin.txt"), b"caf\xe9").unwrap();
    expect(job(&model, &dir.join("latin.txt"), ""), 4, &["latin.txt:1", "byte 3"]);
}

#[test]
fn a_long_sample_is_split_or_dropped_and_changes_no_plan() {
    let dir = folder("long");
    let model = model(&dir);
    let data = dir.join("lines.jsonl");
    let line = |words: usize| serde_json::json!({ "text": "word ".repeat(words) }).to_string() + "\n";
    fs::write(&data, line(4).repeat(60)).unwrap();
    let short = json(&expect(job(&model, &data, "--json"), 0, &[]));
    fs::write(&data, line(4).repeat(60) + &line(5000)).unwrap();
    for (long, split, dropped) in [("split", 1, 0), ("drop", 0, 1)] {
        let report = json(&expect(job(&model, &data, &format!("--json --long {long}")), 0, &[]));
        assert_eq!(
            (&report["data"]["split"], &report["data"]["dropped"]),
            (&split.into(), &dropped.into())
        );
        assert_eq!(report["planned_peak_bytes"], short["planned_peak_bytes"]);
        assert_eq!(report["measured_arena_peak_bytes"], short["planned_peak_bytes"]);
    }
}

#[test]
fn epochs_are_steps_once_the_rows_are_counted_also_when_resumed() {
    let dir = folder("epochs");
    let model = model(&dir);
    let data = dir.join("corpus.txt");
    fs::write(&data, text(300)).unwrap();
    let out = dir.join("out");
    // More steps than the default of `--steps`.
    let mut started = Started::new(with(job(&model, &data, "--epochs 8 --save-every 260"), "--out", &out));
    started.wait_for("step 1/");
    while !out.join("checkpoint-260/state.json").exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    started.send(Signal::Kill);
    started.finish();
    let report = json(&expect(with(train("--json"), "--resume", &out), 0, &[]));
    let rows = report["data"]["train_rows"].as_u64().unwrap();
    assert_eq!(report["steps"].as_u64().unwrap(), (8 * rows.div_ceil(2)), "{report}");
    assert!(report["steps"].as_u64().unwrap() > 260);
}

#[test]
fn rows_that_are_gone_are_made_again_if_the_data_is_the_same() {
    let dir = folder("rows-gone");
    let model = model(&dir);
    let data = dir.join("corpus.txt");
    fs::write(&data, text(100)).unwrap();
    let [whole, stopped] = ["whole", "stopped"].map(|name| dir.join(name));
    let flags = "--steps 400 --save-every 5";
    expect(with(job(&model, &data, flags), "--out", &whole), 0, &[]);
    let mut started = Started::new(with(job(&model, &data, flags), "--out", &stopped));
    started.wait_for("step 1/");
    while !stopped.join("checkpoint-5/state.json").exists() {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    started.send(Signal::Term);
    started.finish();
    fs::remove_file(stopped.join("train.rows")).unwrap();
    fs::write(&data, text(101)).unwrap();
    expect(
        with(train(""), "--resume", &stopped),
        4,
        &["corpus.txt", "not what the run was made of"],
    );
    fs::write(&data, text(100)).unwrap();
    expect(with(train(""), "--resume", &stopped), 0, &[]);
    assert!(trained(&whole) == trained(&stopped));
}

#[test]
fn a_run_does_not_write_into_folders_that_hold_something_else() {
    let dir = folder("foreign");
    for name in ["config.json", "weights.gguf", "model.safetensors.index.json"] {
        let out = dir.join(name.replace('.', "-"));
        fs::create_dir(&out).unwrap();
        fs::write(out.join(name), "mine").unwrap();
        expect(with(tiny(""), "--out", &out), 2, &[name, "choose another --out"]);
        assert_eq!(names(&out), [name]);
    }
}

#[test]
fn a_run_does_not_write_into_its_model() {
    let dir = folder("into-model");
    let model = model(&dir);
    let data = dir.join("corpus.txt");
    fs::write(&data, text(50)).unwrap();
    for (inside, flags) in [
        (model.clone(), ""),
        (model.clone(), "--overwrite"),
        (last_checkpoint(&model), "--overwrite"),
    ] {
        let before = names(&model);
        expect(
            with(job(&inside, &data, flags), "--out", &model),
            2,
            &["model or adapter lies in", "choose another --out"],
        );
        assert_eq!(names(&model), before);
    }
}
