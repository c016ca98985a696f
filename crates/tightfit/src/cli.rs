//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use tightfit_ir::Block;

use crate::inference::{Machine, Numbers};
use crate::mix::vary::Vary;
use crate::settings::{Long, Request, Written};

const CALIBRATE_ONCE: &str = "\
Run `tightfit calibrate` once on a machine: plans then know how long a step takes.";

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  anything else that went wrong
  2  usage or settings
  3  does not fit the budget (nothing was allocated)
  4  bad input: a model, data, a plan or a run to resume
  5  stopped by Ctrl-C, SIGTERM or SIGHUP: from the end of the first step on,
     train saves a checkpoint where --out is given; a second signal stops at once";

const TRAIN_TEXT: &str = "\
Every byte is planned first: a job that does not fit is refused before any weight
is read. Without --model and --data the text comes from a seeded source whose
entropy per token is known exactly. Nothing is downloaded.";

const TRAIN_EXAMPLES: &str = "\
Examples:
  tightfit train --model SmolLM2.gguf --data corpus.txt --batch 1 --out runs/a
  tightfit train --model ./Qwen2.5-0.5B --data chat.jsonl --epochs 2 --out runs/b
  tightfit train --resume runs/b              go on after a stop, a crash or a kill
  tightfit train --model runs/b --data more.jsonl --out runs/c
  tightfit train                              train on generated text
  tightfit train --plan-only                  show the plan, run nothing
  tightfit train --budget 64MiB               refuse the job unless it fits
  tightfit train --batch 8 --micro-batch 2    two sequences in memory at a time
  tightfit train --batch 64 --micro-batch auto --budget 128MiB     as many as fit
  tightfit train --recompute 50%              keep half of the activations' bytes
  tightfit train --update-in-backward --clip-norm none    no gradient outlives its layer
  tightfit train --offload optimizer --scratch /data --disk 20GiB
  tightfit train --model ./Qwen2.5-0.5B --data chat.jsonl --method lora --out runs/lora
  tightfit train --layers 6 --hidden-size 384 --out runs/d
  tightfit train --plan runs/d/plan.json      that job at the same offsets
  tightfit train --print-config > job.toml    write the settings to a file ...
  tightfit train --config job.toml --lr 1e-3  ... and change one of them
  tightfit train --json | jq .eval_loss       the result for a program";

const PLAN_TEXT: &str = "\
Nothing is read but the model's configuration, and no card needs to be here. What no
flag fixes is chosen: the mix that changes results least among those that take at
most twice as long as the fastest one that fits.";

const PLAN_EXAMPLES: &str = "\
Examples:
  tightfit plan llama-2-7b --device a5000 --method full --seq 2048 --batch 8
  tightfit plan ./Qwen2.5-7B --device rtx4090
  tightfit plan SmolLM2.gguf --device cpu --budget 600MiB
  tightfit plan llama-3.1-8b --device a5000 --host-memory 64GiB --json | jq .mix";

const EVAL_EXAMPLES: &str = "\
Examples:
  tightfit eval --model runs/a --data held-out.txt
  tightfit eval --model SmolLM2.gguf --data wiki.txt --seq 1024 --stride 512
  tightfit eval --model runs/b --data chat.jsonl --json | jq .perplexity";

const GENERATE_EXAMPLES: &str = "\
Examples:
  tightfit generate --model runs/a --prompt 'In the beginning'
  tightfit generate --model runs/b --chat 'What is a llama?' --max-tokens 200
  tightfit generate --model SmolLM2.gguf --chat 'A name for a cat?' \\
    --temperature 0.8 --top-p 0.9 --seed 7";

const MERGE_EXAMPLES: &str = "\
Examples:
  tightfit merge --model SmolLM2.gguf --adapter runs/lora --out merged
  tightfit merge --model ./Qwen2.5-0.5B --adapter runs/lora/best --out merged --overwrite";

const INSPECT_EXAMPLES: &str = "\
Examples:
  tightfit inspect SmolLM2.gguf
  tightfit inspect ./Qwen2.5-0.5B --tensors
  tightfit inspect runs/a --json | jq .architecture";

const QUANTIZE_TEXT: &str = "\
Linear layers of the blocks are quantised; norms, embeddings and the head stay as
they are unless asked for. The folder is a model again, for --base as-is. With
--fresh its weights are random: a model of any size for a test, from its shape alone.
Memory: one quantised tensor for each thread.";

const QUANTIZE_EXAMPLES: &str = "\
Examples:
  tightfit quantize --model ./SmolLM2-135M --base nf4 --out ./SmolLM2-135M-nf4
  tightfit quantize --model SmolLM2.gguf --base int8 --embeddings --head --out ./int8
  tightfit quantize --model ./Llama-3.2-1B --base int4 --targets q_proj,mlp.down_proj \\
    --out ./some-int4
  tightfit quantize --fresh llama-2-7b/config.json --seed 7 --base nf4 --out ./random-7b
  tightfit quantize --model runs/a --base nf4 --out ./nf4 --json | jq .quantized";

const CALIBRATE_TEXT: &str = "\
Takes about half a minute and is best run on a machine that does nothing else. What
it finds is kept in $XDG_CACHE_HOME/tightfit or ~/.cache/tightfit, for this processor
and number of threads; plans predict times from it. Without it they assume a common
server.";

const CALIBRATE_EXAMPLES: &str = "\
Examples:
  tightfit calibrate
  tightfit calibrate --threads 8 --scratch /mnt/nvme
  tightfit calibrate --json | jq .profile.product_flops";

/// Plan every byte of a training job before its first step, then run exactly that plan.
#[derive(Debug, Parser)]
#[command(name = "tightfit", version, after_help = format!("{CALIBRATE_ONCE}\n\n{EXIT_CODES}"))]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model: one that you have on your text, or a fresh one on text that is generated here
    #[command(args_override_self = true, after_help = format!("{TRAIN_TEXT}\n\n{TRAIN_EXAMPLES}\n\n{EXIT_CODES}"))]
    Train(Box<TrainArgs>),
    /// Whether a job fits a device, what to change so that it does, and what each technique is worth on it
    #[command(args_override_self = true, after_help = format!("{PLAN_TEXT}\n\n{PLAN_EXAMPLES}\n\n{EXIT_CODES}"))]
    Plan(Box<PlanArgs>),
    /// Loss and perplexity of a model on text
    #[command(after_help = format!("{EVAL_EXAMPLES}\n\n{EXIT_CODES}"))]
    Eval(EvalArgs),
    /// Continue a text, or answer a message
    #[command(after_help = format!("{GENERATE_EXAMPLES}\n\n{EXIT_CODES}"))]
    Generate(GenerateArgs),
    /// What is in a model's files: architecture, tensors, tokenizer, chat template
    #[command(after_help = format!("{INSPECT_EXAMPLES}\n\n{EXIT_CODES}"))]
    Inspect(InspectArgs),
    /// Add an adapter to the weights of its model: a model that needs no adapter any more
    #[command(after_help = format!("{MERGE_EXAMPLES}\n\n{EXIT_CODES}"))]
    Merge(MergeArgs),
    /// Write a model with its weights in 8 or 4 bits
    #[command(after_help = format!("{QUANTIZE_TEXT}\n\n{QUANTIZE_EXAMPLES}\n\n{EXIT_CODES}"))]
    Quantize(QuantizeArgs),
    /// Measure this machine, so that plans know how long they will take
    #[command(after_help = format!("{CALIBRATE_TEXT}\n\n{CALIBRATE_EXAMPLES}\n\n{EXIT_CODES}"))]
    Calibrate(CalibrateArgs),
}

/// Flags of `train`.
#[derive(Args, Debug)]
pub struct TrainArgs {
    /// Read settings from this TOML file; flags win over it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Keep the plan, the settings, the metrics and the trained weights in this folder; one that holds trained weights is refused
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Go on with the run in this --out folder where its last checkpoint stands; the result is the same to the bit
    #[arg(long, value_name = "DIR", conflicts_with_all = ["out", "config", "overwrite", "plan"])]
    pub resume: Option<PathBuf>,
    /// Replace the run that the --out folder holds; its weights stay until this run's are saved
    #[arg(long, requires = "out")]
    pub overwrite: bool,
    /// Follow this plan file (plan.json of an --out folder) to the same offsets; its settings hold where neither a flag nor
    /// --config says otherwise
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// Refuse a job that does not fit as it is asked for, instead of choosing the mix that fits of what is left open
    #[arg(long)]
    pub as_asked: bool,
    /// Show the plan, keep it where --out names a folder without a run, and stop
    #[arg(long)]
    pub plan_only: bool,
    /// Print one JSON object to stdout and all else to stderr; no object after an error (exit codes 1, 2 and 4) or a stop before
    /// there is anything to save
    #[arg(long)]
    pub json: bool,
    /// Print every setting, defaults filled in, as a TOML file and stop
    #[arg(long, conflicts_with_all = ["json", "plan_only"])]
    pub print_config: bool,
    /// Overwrite freed memory with NaN as soon as it is freed: results stay the same, runs are slower
    #[arg(long)]
    pub poison: bool,
    /// The settings.
    #[command(flatten)]
    pub request: Request,
}

/// Flags of `plan`.
#[derive(Args, Debug)]
pub struct PlanArgs {
    /// The model: a Hugging Face folder, its config.json alone, a .safetensors file in one, a .gguf file, a name such as llama-2-7b, or
    /// the id of a model in the Hugging Face cache [default: fresh weights of the sizes below]
    #[arg(value_name = "MODEL")]
    pub name: Option<PathBuf>,
    /// The device: cpu, or a card such as rtx-a5000
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    pub device: String,
    /// Read settings from this TOML file; flags win over it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Keep the plan in this file; on the CPU, `train --plan FILE` then runs exactly that
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// Write the report as one page of HTML
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Plan each of a range of values as well, doubling from the first: a curve of memory and time
    #[arg(long, value_name = "KEY=FROM..TO", value_parser = <Vary as std::str::FromStr>::from_str)]
    pub vary: Vec<Vary>,
    /// Show the buffers of this role, such as activation, or with this in their name: when they live and where they lie
    #[arg(long, value_name = "ROLE|BUFFER")]
    pub why: Option<String>,
    /// Print one JSON object to stdout and all else to stderr
    #[arg(long)]
    pub json: bool,
    /// What is fixed.
    #[command(flatten)]
    pub request: Request,
}

/// Flags of `eval`.
#[derive(Args, Debug)]
pub struct EvalArgs {
    /// The model: a Hugging Face folder, a .safetensors file in one, or a .gguf file
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// An adapter of the model, a folder in PEFT's format
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// The text: .txt or .md; or .jsonl with text, prompt and completion, instruction and output, or messages on each line
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    pub data: Vec<PathBuf>,
    /// Tokens of a window
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..1 << 30))]
    pub seq: u64,
    /// Tokens from one window to the next; a token counts in the first window that has it, so most see --seq minus --stride tokens
    /// before them [default: windows do not overlap]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..1 << 30))]
    pub stride: Option<u64>,
    /// Windows in memory at one time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..1 << 30))]
    pub batch: u64,
    /// Tokens whose logits exist at one time: fewer need less memory
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..1 << 30))]
    pub loss_chunk: u64,
    /// What becomes of a sample that is longer than a window: split or drop; a text file is always split
    #[arg(long, value_name = "NAME", default_value = "split", value_parser = <Long as Written>::read)]
    pub long: Long,
    /// Skip and count lines that cannot be used, instead of ending with an error
    #[arg(long)]
    pub skip_bad_lines: bool,
    /// Print one JSON object to stdout and all else to stderr
    #[arg(long)]
    pub json: bool,
    /// How numbers are stored.
    #[command(flatten)]
    pub numbers: Numbers,
    /// The machine.
    #[command(flatten)]
    pub machine: Machine,
}

/// Flags of `generate`.
#[derive(Args, Debug)]
#[group(id = "input", required = true, multiple = false)]
pub struct GenerateArgs {
    /// The model: a Hugging Face folder, a .safetensors file in one, or a .gguf file
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// An adapter of the model, a folder in PEFT's format
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Go on from this text as it is
    #[arg(long, value_name = "TEXT", group = "input")]
    pub prompt: Option<String>,
    /// Answer this message, in the model's chat template
    #[arg(long, value_name = "TEXT", group = "input")]
    pub chat: Option<String>,
    /// What the model is told before the message
    #[arg(long, value_name = "TEXT", requires = "chat", conflicts_with = "prompt")]
    pub system: Option<String>,
    /// Most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..1 << 24))]
    pub max_tokens: u32,
    /// How random the choice is: what logits are divided by; 0 always takes the likeliest token
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true, value_parser = temperature)]
    pub temperature: f64,
    /// Only this many of the likeliest tokens; 0 takes all
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub top_k: u32,
    /// Only the likeliest tokens that together reach this probability
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true, value_parser = probability)]
    pub top_p: f64,
    /// Decides every draw
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Print one JSON object to stdout and all else to stderr
    #[arg(long)]
    pub json: bool,
    /// How numbers are stored.
    #[command(flatten)]
    pub numbers: Numbers,
    /// The machine.
    #[command(flatten)]
    pub machine: Machine,
}

/// Flags of `inspect`.
#[derive(Args, Debug)]
pub struct InspectArgs {
    /// A Hugging Face folder, a .safetensors file or index, or a .gguf file
    #[arg(value_name = "PATH")]
    pub model: PathBuf,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
    /// Print one JSON object, every tensor included
    #[arg(long)]
    pub json: bool,
}

/// Flags of `merge`.
#[derive(Args, Debug)]
pub struct MergeArgs {
    /// The model: a Hugging Face folder, a .safetensors file in one, or a .gguf file
    #[arg(long, value_name = "PATH")]
    pub model: PathBuf,
    /// The adapter, a folder in PEFT's format
    #[arg(long, value_name = "DIR")]
    pub adapter: PathBuf,
    /// Write a Hugging Face folder here: weights as the model stores them, or in bf16 where it is quantised
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Replace the model that the --out folder holds
    #[arg(long)]
    pub overwrite: bool,
    /// Print one JSON object to stdout and all else to stderr
    #[arg(long)]
    pub json: bool,
}

/// Flags of `quantize`.
#[derive(Args, Debug)]
#[command(group(clap::ArgGroup::new("weights").required(true).multiple(false)))]
pub struct QuantizeArgs {
    /// The model: a Hugging Face folder, a .safetensors file in one, or a .gguf file
    #[arg(long, value_name = "PATH", group = "weights")]
    pub model: Option<PathBuf>,
    /// Random weights for the model of this config.json
    #[arg(long, value_name = "FILE", group = "weights")]
    pub fresh: Option<PathBuf>,
    /// Decides the random weights
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "model")]
    pub seed: u64,
    /// What weights become: int8, int4 or nf4
    #[arg(long, value_name = "NAME", value_parser = base)]
    pub base: Block,
    /// The folder to write
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,
    /// Replace the model that the --out folder holds
    #[arg(long)]
    pub overwrite: bool,
    /// Quantise the embedding's table, too
    #[arg(long)]
    pub embeddings: bool,
    /// Quantise the head, too; a tied one is the embedding's table
    #[arg(long)]
    pub head: bool,
    /// Only these linear layers: names, or their ends behind a dot, * for any characters, such as
    /// q_proj,mlp.* [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub targets: Vec<String>,
    /// Threads that compute [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Print one JSON object to stdout and all else to stderr
    #[arg(long)]
    pub json: bool,
}

/// Flags of `calibrate`.
#[derive(Args, Debug)]
pub struct CalibrateArgs {
    /// Threads that compute [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Measure the disk under this folder [default: the one that the result is kept in]
    #[arg(long, value_name = "DIR")]
    pub scratch: Option<PathBuf>,
    /// Print one JSON object to stdout and all else to stderr
    #[arg(long)]
    pub json: bool,
}

fn base(text: &str) -> Result<Block, String> {
    let block = Block::from_name(text).filter(|block| block.encodes());
    block.ok_or_else(|| "expected int8, int4 or nf4".to_owned())
}

fn temperature(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| (0.0..=1e6).contains(value));
    value.ok_or_else(|| "expected a number of at least 0, such as 0.7".to_owned())
}

fn probability(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| *value > 0.0 && *value <= 1.0);
    value.ok_or_else(|| "expected a number above 0 and at most 1, such as 0.9".to_owned())
}
