//! The command.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::Ordering;

use clap::Parser;
use tightfit::Session;
use tightfit::cli::{Cli, Command, TrainArgs};
use tightfit::console::{Console, Progress, to_stdout};
use tightfit::failure::Failure;
use tightfit::follow::Followed;
use tightfit::job::Job;
use tightfit::memory::{default_budget, process_peak_bytes};
use tightfit::output::Output;
use tightfit::report::Report;
use tightfit::reserve::reserve_bytes;
use tightfit::settings::{Request, Settings};
use tightfit::stop::{STOPPED, Stop};
use tightfit::train::{Outcome, TrainError, batches, train};

fn main() -> ExitCode {
    let Command::Train(args) = Cli::parse().command;
    match run(&args) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            complain(format_args!("error: {failure}"));
            ExitCode::from(failure.exit_code())
        }
    }
}

fn run(args: &TrainArgs) -> Result<u8, Failure> {
    let stop = Stop::watch().map_err(Failure::Signal)?;
    let console = Console { json: args.json };
    let followed = args.plan.as_deref().map(Followed::read).transpose()?;
    let settings = resolve(args, followed.as_ref())?;
    if args.print_config {
        write(to_stdout(settings.to_toml().trim_end()))?;
        return Ok(0);
    }
    let job = match followed {
        Some(plan) => plan.job(settings)?,
        None => Job::plan(settings)?,
    };
    // Before the reserve is measured: a deep model's plan is a long text.
    let plan = match &args.out {
        Some(_) => job.plan_file()?,
        None => String::new(),
    };
    let text = batches(&job.settings).map_err(TrainError::from)?;
    let entropy = text.language().entropy_per_byte();
    let mut report = Report::planned(&job, reserve_bytes(job.settings.threads)?, entropy);
    write(console.line(&report.plan_text()))?;
    if let Err(infeasible) = job.plan.fit(report.budget_bytes, report.reserve_bytes) {
        report.status = "does_not_fit";
        print_json(console, &report)?;
        return Err(infeasible.into());
    }
    let mut output = match &args.out {
        Some(dir) => Some(Output::claim(dir, args.overwrite)?),
        None => None,
    };
    if let Some(output) = &mut output {
        output.begin(&job, &plan)?;
    }
    drop(plan);
    if args.plan_only {
        print_json(console, &report)?;
        return Ok(0);
    }

    let settings = job.settings.clone();
    let mut session = Session::new(job.plan, settings.threads)?;
    session.set_poison(args.poison);
    session.initialise(settings.seed);
    let (outcome, noted) = watch(&mut session, &settings, &stop, &report, output.as_mut())?;
    let arena = session.arena();
    let report = report.ran(&outcome, arena.len(), arena.measured_peak(), process_peak_bytes()?);
    // The weights first: words can be lost.
    let saved = output
        .as_ref()
        .map_or(Ok(()), |output| output.finish(&session, &report));
    let said = write(console.line(&report.result_text()));
    noted?;
    saved?;
    said?;
    print_json(console, &report)?;
    if !stop.requested().load(Ordering::Relaxed) {
        return Ok(0);
    }
    let kept = match &args.out {
        Some(dir) => format!("state saved in {} (this version cannot resume from it)", dir.display()),
        None => "nothing saved, as no --out was given".to_owned(),
    };
    complain(format_args!(
        "stopped after step {} of {}: {kept}",
        outcome.steps, settings.steps
    ));
    Ok(STOPPED)
}

/// Trains, showing and noting every step. A step that cannot be noted, say on a full disk, ends the run: the outcome then says so
/// beside what there is to save.
fn watch(
    session: &mut Session,
    settings: &Settings,
    stop: &Stop,
    report: &Report,
    mut output: Option<&mut Output>,
) -> Result<(Outcome, Result<(), Failure>), Failure> {
    let mut progress = Progress::new(settings.steps, report.tokens_per_step);
    let mut noted = Ok(());
    let outcome = train(session, settings, stop.requested(), |step| {
        stop.first_step_done();
        progress.step(step);
        if let Some(output) = &mut output
            && let Err(failure) = output.step(step)
        {
            noted = Err(failure);
            stop.requested().store(true, Ordering::Relaxed);
        }
    });
    progress.finish();
    Ok((outcome?, noted))
}

/// Flags, then the settings file, then those of the plan that is followed, then defaults.
fn resolve(args: &TrainArgs, followed: Option<&Followed>) -> Result<Settings, Failure> {
    let mut request = args.request.clone();
    if let Some(path) = &args.config {
        request = request.or(Request::read(path)?);
    }
    if let Some(plan) = followed {
        request = request.or(plan.request());
    }
    let budget = match request.budget {
        Some(budget) => budget.0,
        None => default_budget()?.bytes,
    };
    Ok(request.resolve(budget)?)
}

fn print_json(console: Console, report: &Report) -> Result<(), Failure> {
    if !console.json {
        return Ok(());
    }
    let json = serde_json::to_string_pretty(report).map_err(io::Error::from);
    write(json.and_then(|json| to_stdout(&json)))
}

fn write(written: io::Result<()>) -> Result<(), Failure> {
    let what = "to stdout".to_owned();
    written.map_err(|source| Failure::Write { what, source })
}

/// To stderr. If it is gone, the exit code still says what happened.
fn complain(words: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{words}");
}
