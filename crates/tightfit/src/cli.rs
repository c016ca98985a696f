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
  4  bad input file (a plan): --plan
  5  stopped by Ctrl-C, SIGTERM or SIGHUP: from the end of the first step on,
     state is saved where --out is given; a second signal stops at once";

const TRAIN_TEXT: &str = "\
The text comes from a seeded source whose entropy per token is known exactly, so
that the loss can be held against its floor. Nothing is downloaded. Every byte
is planned first: a job that does not fit is refused before any weight exists.";

const TRAIN_EXAMPLES: &str = "\
Examples:
  tightfit train                              train on generated text
  tightfit train --plan-only                  show the plan, run nothing
  tightfit train --budget 64MiB               refuse the job unless it fits
  tightfit train --batch 8 --micro-batch 2    two sequences in memory at a time
  tightfit train --layers 6 --hidden-size 384 --out runs/a
  tightfit train --plan runs/a/plan.json      that job at the same offsets
  tightfit train --print-config > job.toml    write the settings to a file ...
  tightfit train --config job.toml --lr 1e-3  ... and change one of them
  tightfit train --json | jq .eval_loss       the result for a program";

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
    #[command(args_override_self = true, after_help = format!("{TRAIN_TEXT}\n\n{TRAIN_EXAMPLES}\n\n{EXIT_CODES}"))]
    Train(Box<TrainArgs>),
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
    /// Replace the run that the --out folder holds; its weights stay until this run's are saved
    #[arg(long, requires = "out")]
    pub overwrite: bool,
    /// Follow this plan file (plan.json of an --out folder) to the same offsets; its settings hold where neither a flag nor
    /// --config says otherwise
    #[arg(long, value_name = "FILE")]
    pub plan: Option<PathBuf>,
    /// Show the plan, keep it where --out is given, and stop
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
