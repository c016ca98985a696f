//! Runs the command and looks at what it left.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// A job of milliseconds.
pub const TINY: &str = "--layers 1 --hidden-size 32 --heads 2 --kv-heads 1 --intermediate-size 64 --batch 1 --seq 16 \
                        --steps 3 --threads 1 --eval-batches 1 --budget 512MiB";

pub const BIN: &str = env!("CARGO_BIN_EXE_tightfit");

/// `tightfit train` on the tiny job with more flags, which win. Backtraces are asked for, so that a panic would show one.
pub fn tiny(flags: &str) -> Command {
    let mut command = train(TINY);
    command.args(flags.split_whitespace());
    command
}

/// `tightfit train` with flags and nothing else.
pub fn train(flags: &str) -> Command {
    let mut command = Command::new(BIN);
    command
        .arg("train")
        .args(flags.split_whitespace())
        .env("RUST_BACKTRACE", "1");
    command
}

/// What a finished command said.
#[derive(Debug)]
pub struct Done {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let done = Self {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        };
        assert!(!done.stderr.contains("panicked"), "{done:?}");
        done
    }
}

pub fn run(mut command: Command) -> Done {
    command.output().unwrap().into()
}

/// Runs a command that is to end with `code` and to say every one of `words` on stderr.
pub fn expect(command: Command, code: i32, words: &[&str]) -> Done {
    let shown = format!("{command:?}");
    let done = run(command);
    assert_eq!(done.code, Some(code), "{shown}: {done:?}");
    for word in words {
        assert!(
            done.stderr.contains(word),
            "{shown} does not say {word:?}: {}",
            done.stderr
        );
    }
    done
}

/// The one object on stdout.
pub fn json(done: &Done) -> Value {
    serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"))
}

/// An empty folder of this name for one test.
pub fn folder(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir).unwrap();
    dir
}

/// Adds a flag whose value is a path.
pub fn with(mut command: Command, flag: &str, value: impl AsRef<OsStr>) -> Command {
    command.arg(flag).arg(value);
    command
}

/// The names in a folder, sorted.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// The files of a run that is done, but for checkpoints and what belongs to a tokenizer.
pub const RUN_FILES: [&str; 6] = [
    "config.json",
    "config.toml",
    "metrics.jsonl",
    "model.safetensors",
    "plan.json",
    "result.json",
];

/// Checks that an output folder holds one whole run, and returns its result.
pub fn check_run(dir: &Path) -> Value {
    let checkpoint = |name: &String| name == "best" || name.starts_with("checkpoint-");
    let (checkpoints, others): (Vec<_>, Vec<_>) = names(dir).into_iter().partition(checkpoint);
    assert_eq!(others, RUN_FILES);
    assert!(checkpoints.iter().all(|name| !name.contains('.')), "{checkpoints:?}");
    let result: Value = serde_json::from_slice(&fs::read(dir.join("result.json")).unwrap()).unwrap();
    let steps = result["steps"].as_u64().unwrap();
    assert_eq!(check_checkpoint(&last_checkpoint(dir)), steps);
    assert_eq!(check_tensors(&dir.join("model.safetensors")), steps);
    assert_eq!(metrics(dir).last().unwrap()["step"], steps);
    result
}

/// The folder of the newest checkpoint.
pub fn last_checkpoint(dir: &Path) -> PathBuf {
    let names = names(dir);
    let steps = names
        .iter()
        .filter_map(|name| name.strip_prefix("checkpoint-")?.parse::<u64>().ok());
    dir.join(format!("checkpoint-{}", steps.max().unwrap()))
}

/// Checks that a checkpoint is whole; its step.
pub fn check_checkpoint(dir: &Path) -> u64 {
    let state: Value = serde_json::from_slice(&fs::read(dir.join("state.json")).unwrap()).unwrap();
    let step = state["step"].as_u64().unwrap();
    assert_eq!(check_tensors(&dir.join("model.safetensors")), step);
    assert_eq!(check_tensors(&dir.join("optimizer.safetensors")), step);
    step
}

/// The bytes of a run's trained weights and of its optimizer's state.
pub fn trained(dir: &Path) -> [Vec<u8>; 2] {
    let checkpoint = last_checkpoint(dir);
    ["model.safetensors", "optimizer.safetensors"].map(|name| fs::read(checkpoint.join(name)).unwrap())
}

/// Reads a file with the format's own reader; the step in its metadata.
fn check_tensors(path: &Path) -> u64 {
    let bytes = fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert!(!tensors.is_empty());
    for (name, tensor) in tensors.tensors() {
        let (words, halves) = (tensor.data().as_chunks::<4>().0, tensor.data().as_chunks::<2>().0);
        let finite = match tensor.dtype() {
            Dtype::F32 => words.iter().all(|&bits| f32::from_le_bytes(bits).is_finite()),
            // All exponent bits set are an infinity or a NaN.
            Dtype::BF16 => halves.iter().all(|&bits| !u16::from_le_bytes(bits) & 0x7F80 != 0),
            Dtype::U8 => true,
            other => panic!("{name} is of {other:?}"),
        };
        assert!(finite, "{name}");
    }
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    header.metadata().as_ref().unwrap()["steps"].parse().unwrap()
}

/// The steps noted in a folder: every line is a whole object.
pub fn metrics(dir: &Path) -> Vec<Value> {
    let text = fs::read_to_string(dir.join("metrics.jsonl")).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
