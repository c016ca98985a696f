//! `tightfit calibrate`: measures this machine and keeps what it finds.

use std::io::{self, Write};
use std::path::PathBuf;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use tightfit_cpu::Profile;
use tightfit_cpu::calibrate::{MEASUREMENTS, SPAN, calibrate};
use tightfit_cpu::pool::Pool;
use tightfit_cpu::profile::Unit;
use tightfit_cpu::simd::Isa;
use tightfit_exec::tier::measure_link;
use tightfit_exec::{STACK_BYTES, SessionError};

use crate::Cpu;
use crate::calibration::{self, Machine};
use crate::cli::CalibrateArgs;
use crate::console::Console;
use crate::failure::Failure;

use super::{complain, print_json, write};

/// The object that `--json` prints. Speeds are in seconds, and in operations and bytes per second.
#[derive(Debug, Serialize)]
struct Report {
    /// Raised whenever a field changes its meaning or goes away.
    schema_version: u32,
    machine: Machine,
    /// What was measured.
    profile: Profile,
    /// What was known before: measured earlier, or `null`.
    previous: Option<Profile>,
    /// Whether the link was measured; if not, its figures are the ones from before, or assumed.
    link_measured: bool,
    /// Where it is kept.
    file: PathBuf,
}

/// Bytes that are written and read to measure the link: more than a disk takes into a cache of its own.
const LINK_BYTES: u64 = 1 << 30;

/// Measures; the exit code.
pub fn run(args: &CalibrateArgs) -> Result<u8, Failure> {
    let console = Console { json: args.json };
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = args.threads.map_or_else(cores, |threads| threads as usize);
    // Before anything is measured: a result that cannot be kept would be for nothing.
    let folder = calibration::make_folder()?;
    let pool = Pool::new(threads, STACK_BYTES).map_err(|source| SessionError::Threads { threads, source })?;
    let cpu = Cpu::new(pool);
    let isa = cpu.target().isa;
    let known = calibration::for_machine(isa, threads);
    if let Some(note) = &known.note {
        complain(format_args!("note: {note}"));
    }

    let progress = Progress::new();
    let scratch = args.scratch.as_deref().unwrap_or(&folder);
    let link = match measure_link(scratch, LINK_BYTES) {
        Ok(link) => Some(link),
        Err(error) => {
            complain(format_args!("note: the link to files is not measured: {error}"));
            None
        }
    };
    let profile = calibrate(&cpu, link.unwrap_or(known.profile.link), SPAN, &mut |what| {
        progress.next(what)
    });
    progress.finish();

    let machine = Machine::this(isa, threads);
    let report = Report {
        schema_version: crate::report::SCHEMA_VERSION,
        file: calibration::save(&folder, &machine, &profile)?,
        machine,
        profile,
        previous: known.measured.then_some(known.profile),
        link_measured: link.is_some(),
    };
    write(console.line(&text(&report, isa)))?;
    print_json(console, &report)?;
    Ok(0)
}

/// A line for each figure, beside what was known before.
fn text(report: &Report, isa: Isa) -> String {
    let Machine { cpu, isa: set, threads } = &report.machine;
    let before = match report.previous {
        Some(_) => "before",
        None => "assumed",
    };
    let previous = report.previous.unwrap_or_else(|| Profile::assumed(isa, *threads));
    let mut lines = vec![
        format!("{cpu}, {set}, {threads} threads"),
        format!("{:<22}{:>15}{before:>15}", "", "measured"),
    ];
    let figures = report.profile.figures().into_iter().zip(previous.figures());
    for ((name, value, unit), (_, known, _)) in figures {
        let value = match unit {
            _ if name.starts_with("link") && !report.link_measured => "-".to_owned(),
            unit => spelled(value, unit),
        };
        lines.push(format!("{name:<22}{value:>15}{:>15}", spelled(known, unit)));
    }
    lines.push(format!("kept in {}", report.file.display()));
    lines.join("\n")
}

/// With the unit that makes it easy to read.
fn spelled(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Seconds => format!("{:.1} us", value * 1e6),
        Unit::Flops => format!("{:.1} GFLOP/s", value / 1e9),
        Unit::Bytes => format!("{:.2} GiB/s", value / f64::from(1 << 30)),
    }
}

/// A bar on a terminal, a line where it begins elsewhere.
struct Progress {
    bar: Option<ProgressBar>,
}

impl Progress {
    fn new() -> Self {
        let target = ProgressDrawTarget::stderr_with_hz(5);
        let bar = (!target.is_hidden()).then(|| {
            let bar = ProgressBar::with_draw_target(Some(MEASUREMENTS as u64), target);
            // The template is a constant that parses.
            if let Ok(style) = ProgressStyle::with_template("{bar:24} {pos}/{len}  {msg}  {elapsed}") {
                bar.set_style(style);
            }
            bar
        });
        if bar.is_none() {
            // Nobody is lost if stderr is.
            let _ = writeln!(io::stderr().lock(), "measuring for about half a minute …");
        }
        Self { bar }
    }

    fn next(&self, what: &'static str) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
            bar.set_message(what);
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
