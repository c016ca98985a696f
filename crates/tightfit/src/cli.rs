//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::settings::Request;

const EXIT_CODES: &str = "\
Exit codes:
  0  done
  1  anything else that went wrong
  2  usage or settings
  3  does not fit the budget (nothing was allocated)
  4  bad input file
  5  stopped by the user (state saved where --out was given)";

const TRAIN_EXAMPLES: &str = "\
Examples:
  tightfit train                               train the built-in model on generated text
  tightfit train --plan-only                   show the plan, run nothing
  tightfit train --budget 64MiB                refuse the job unless it fits 64 MiB
  tightfit train --layers 6 --hidden-size 384 --batch 8 --out runs/a
  tightfit train --micro-batch 4               the same step, four sequences in memory at a time
  tightfit train --print-config > job.toml     write the settings to a file ...
  tightfit train --config job.toml --lr 1e-3   ... and change one of them
  tightfit train --json | jq .eval_loss        one JSON object on stdout, all else on stderr";

/// Plan every byte of a training job before its first step, then run exactly that plan.
#[derive(Debug, Parser)]
#[command(name = "tightfit", version, after_help = EXIT_CODES)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a LLaMA-style model on text that is generated here
    ///
    /// The text comes from a seeded source whose entropy per token is known exactly, so that the loss can be held against its
    /// floor. Nothing is downloaded. Every byte is planned first: a job that does not fit is refused before any weight exists.
    #[command(after_help = format!("{TRAIN_EXAMPLES}\n\n{EXIT_CODES}"))]
    Train(Box<TrainArgs>),
}

/// Flags of `train`.
#[derive(Args, Debug)]
pub struct TrainArgs {
    /// Read settings from this TOML file; flags win over it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Keep the plan, the settings, the metrics and the trained weights in this folder
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Follow this plan file (plan.json of an earlier --out) to the same offsets
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// Show the plan and stop
    #[arg(long)]
    pub plan_only: bool,
    /// Print one JSON object to stdout, and everything else to stderr
    #[arg(long)]
    pub json: bool,
    /// Print every setting, defaults filled in, as a TOML file and stop
    #[arg(long)]
    pub print_config: bool,
    /// Overwrite freed memory with NaN as soon as it is freed: results stay the same, runs are slower
    #[arg(long, hide_short_help = true)]
    pub poison: bool,
    /// The settings.
    #[command(flatten)]
    pub request: Request,
}
