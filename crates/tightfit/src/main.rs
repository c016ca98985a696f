//! The command.

use std::process::ExitCode;

use clap::Parser;
use tightfit::cli::Cli;
use tightfit::command;
use tightfit::heap::Heap;

#[global_allocator]
static HEAP: Heap = Heap;

fn main() -> ExitCode {
    // What other parsers panic at becomes an error, which is printed.
    tightfit_text::quiet_panics();
    match command::run(&Cli::parse()) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            command::complain(format_args!("error: {failure}"));
            ExitCode::from(failure.exit_code())
        }
    }
}
