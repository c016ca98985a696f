//! The commands, each in a file of its own.

mod calibrate;
mod eval;
mod generate;
mod inspect;
mod merge;
mod plan;
mod quantize;
mod train;

use std::fmt::Display;
use std::io::{self, Write};

use serde::Serialize;

use crate::cli::{Cli, Command};
use crate::console::{Console, to_stdout};
use crate::failure::Failure;

/// Runs a command; its exit code.
///
/// # Errors
/// Why it ended before it was done.
pub fn run(cli: &Cli) -> Result<u8, Failure> {
    match &cli.command {
        Command::Train(args) => train::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Quantize(args) => quantize::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Merge(args) => merge::run(args),
        Command::Calibrate(args) => calibrate::run(args),
    }
}

/// The object of `--json`.
fn print_json(console: Console, object: &impl Serialize) -> Result<(), Failure> {
    if !console.json {
        return Ok(());
    }
    let json = serde_json::to_string_pretty(object).map_err(io::Error::from);
    write(json.and_then(|json| to_stdout(&json)))
}

fn write(written: io::Result<()>) -> Result<(), Failure> {
    let what = "to stdout".to_owned();
    written.map_err(|source| Failure::Write { what, source })
}

/// To stderr. If it is gone, the exit code still says what happened.
pub fn complain(words: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{words}");
}
