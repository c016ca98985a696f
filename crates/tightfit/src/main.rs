//! The command.

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use clap::Parser;
use tightfit::cli::{Cli, Command, TrainArgs};
use tightfit::console::{Console, Progress};
use tightfit::failure::Failure;
use tightfit::job::Job;
use tightfit::memory::{default_budget, process_peak_bytes};
use tightfit::output::Output;
use tightfit::report::Report;
use tightfit::reserve::reserve_bytes;
use tightfit::settings::{Request, Settings};
use tightfit::train::{batches, train};
use tightfit::{Session, job::JobError};

/// The user stopped the run.
const STOPPED: u8 = 5;

fn main() -> ExitCode {
    let Command::Train(args) = Cli::parse().command;
    match run(*args) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            // If stderr is gone, the exit code still says what happened.
            let _ = writeln!(io::stderr().lock(), "error: {failure}");
            ExitCode::from(failure.exit_code())
        }
    }
}

fn run(args: TrainArgs) -> Result<u8, Failure> {
    let console = Console { json: args.json };
    let settings = resolve(&args)?;
    if args.print_config {
        say(console, settings.to_toml().trim_end())?;
        return Ok(0);
    }
    let job = match &args.plan {
        Some(path) => follow(settings, path)?,
        None => Job::plan(settings)?,
    };
    let text = batches(&job.settings).map_err(tightfit::train::TrainError::from)?;
    let entropy = text.language().entropy_per_byte();
    let report = Report::planned(&job, reserve_bytes(job.settings.threads)?, entropy);
    say(console, &report.plan_text())?;
    job.plan.fit(report.budget_bytes, report.reserve_bytes)?;
    if args.plan_only {
        print_json(console, &report)?;
        return Ok(0);
    }

    let mut output = match &args.out {
        Some(dir) => Some(Output::create(dir, &job)?),
        None => None,
    };
    let stop = Arc::new(AtomicBool::new(false));
    let handler = stop.clone();
    ctrlc::set_handler(move || {
        if handler.swap(true, Ordering::Relaxed) {
            std::process::exit(i32::from(STOPPED));
        }
    })?;
    let settings = job.settings.clone();
    let mut session = Session::new(job.plan, settings.threads)?;
    session.set_poison(args.poison);
    session.initialise(settings.seed);

    let planned = report.arena_bytes + report.reserve_bytes;
    let mut progress = Progress::new(settings.steps, report.tokens_per_step, planned);
    let mut unwritten = None;
    let outcome = train(&mut session, &settings, &stop, |step| {
        progress.step(step);
        if let Some(output) = &mut output
            && let Err(error) = output.step(step)
        {
            unwritten = Some(error);
            stop.store(true, Ordering::Relaxed);
        }
    });
    progress.finish();
    let outcome = outcome?;
    if let Some(source) = unwritten {
        let what = "metrics.jsonl".to_owned();
        return Err(Failure::Write { what, source });
    }
    let arena = session.arena();
    let report = report.ran(&outcome, arena.len(), arena.measured_peak(), process_peak_bytes()?);
    say(console, &report.result_text())?;
    if let Some(output) = &mut output {
        output.finish(&session, &report)?;
    }
    print_json(console, &report)?;
    if !outcome.stopped {
        return Ok(0);
    }
    let saved = match &args.out {
        Some(dir) => format!("state saved in {}", dir.display()),
        None => "nothing saved, as no --out was given".to_owned(),
    };
    say(
        console,
        &format!("stopped after step {} of {}: {saved}", outcome.steps, settings.steps),
    )?;
    Ok(STOPPED)
}

fn resolve(args: &TrainArgs) -> Result<Settings, Failure> {
    let mut request = args.request.clone();
    if let Some(path) = &args.config {
        request = request.or(Request::read(path)?);
    }
    let budget = match request.budget {
        Some(budget) => budget.0,
        None => default_budget()?.bytes,
    };
    Ok(request.resolve(budget)?)
}

fn follow(settings: Settings, path: &Path) -> Result<Job, Failure> {
    let bad = |source: Box<dyn std::error::Error + Send + Sync>| Failure::PlanFile {
        path: path.to_owned(),
        source,
    };
    let json = std::fs::read_to_string(path).map_err(|error| bad(error.into()))?;
    Job::with_plan_file(settings, &json).map_err(|error| match error {
        JobError::File(error) => bad(error.into()),
        other => other.into(),
    })
}

fn say(console: Console, text: &str) -> Result<(), Failure> {
    console.line(text).map_err(|source| Failure::Write {
        what: "output".to_owned(),
        source,
    })
}

fn print_json(console: Console, report: &Report) -> Result<(), Failure> {
    if !console.json {
        return Ok(());
    }
    let printed = serde_json::to_string_pretty(report)
        .map_err(io::Error::from)
        .and_then(|json| writeln!(io::stdout().lock(), "{json}"));
    printed.map_err(|source| Failure::Write {
        what: "the JSON object to stdout".to_owned(),
        source,
    })
}
