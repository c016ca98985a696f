//! `tightfit train`.

use std::path::Path;
use std::sync::atomic::Ordering;

use tightfit_exec::checkpoint;
use tightfit_exec::tier::Scratch;
use tightfit_pass::linear_layers;
use tightfit_text::Tokenizer;

use crate::adapters::{self, Adapter};
use crate::alternatives::alternatives;
use crate::checkpoints::{Kind, State};
use crate::choose;
use crate::cli::TrainArgs;
use crate::console::{Console, Progress, to_stdout};
use crate::data::{PrepareError, Text};
use crate::failure::{DOES_NOT_FIT, Failure};
use crate::follow::Followed;
use crate::job::{Job, JobError};
use crate::memory::{default_budget, format_bytes, process_peak_bytes};
use crate::mix::flags;
use crate::output::{Claim, Output, Start};
use crate::pretrained::Pretrained;
use crate::report::Report;
use crate::reserve::Before;
use crate::resume::{Resumed, restore_optimizer};
use crate::settings::{Request, Settings};
use crate::stop::{STOPPED, Stop};
use crate::subject::Subject;
use crate::techniques::Techniques;
use crate::train::{Outcome, Run, TrainError, train};
use crate::{BatchShape, Role, Session};

use super::{complain, print_json, write};

/// Trains, or only plans to; the exit code.
pub fn run(args: &TrainArgs) -> Result<u8, Failure> {
    let stop = Stop::watch().map_err(Failure::Signal)?;
    let console = Console { json: args.json };
    let followed = args.plan.as_deref().map(Followed::read).transpose()?;
    let resumed = args.resume.as_deref().map(Resumed::open).transpose()?;
    let (request, settings) = resolve(args, followed.as_ref(), resumed.as_ref())?;
    if args.print_config {
        write(to_stdout(settings.to_toml().trim_end()))?;
        return Ok(0);
    }
    let checkpoint = resumed.as_ref().and_then(Resumed::checkpoint);
    let model = open(&settings, checkpoint.as_deref())?;
    let scratch = settings.scratch_dir(out(args));
    let free_bytes = checkpoint::free_bytes(existing(&scratch)).unwrap_or(u64::MAX);
    let fitting = Fitting {
        asked: settings.clone(),
        model: model.as_ref(),
        free_bytes,
        scratch: &scratch,
        follows: followed.is_some(),
    };
    let mut before = Before::default();
    let mut job = match followed {
        Some(plan) => plan.job(settings, model.as_ref())?,
        None => choose::plan(&settings, model.as_ref(), free_bytes, &mut before)?,
    };
    let mut chosen = None;
    if !fitting.follows && resumed.is_none() && !args.as_asked && !fitting.fits(&job, &mut before)? {
        let needed = job.plan.arena_bytes();
        write(console.line("does not fit as it was asked for: looking for a mix that does …"))?;
        if let Some((mixed, fidelity)) = choose::mix(&request, &fitting.asked, model.as_ref(), free_bytes, &mut before)?
        {
            job = mixed;
            let [numbers, cut] = flags(&job.settings);
            complain(format_args!(
                "note: as it was asked for, the job does not fit, with an arena of {}; this mix does, and runs instead ({}):\n  \
                 {numbers}\n  {cut}",
                format_bytes(needed),
                fidelity.name()
            ));
            chosen = Some(format!("{numbers} {cut}"));
        }
    }
    if let Some(note) = &job.calibration.note {
        complain(format_args!("note: {note}"));
    }
    if let Some(warning) = job.settings.warning() {
        complain(format_args!("warning: {warning}"));
    }
    before.end_phase()?;
    let reserve = before.planned_bytes(
        job.plan.arena_bytes(),
        job.settings.threads,
        !job.settings.data.is_empty(),
    )?;
    let techniques = Techniques::of(&job, &fitting.asked, &scratch);
    let mut report = Report::planned(&job, techniques, reserve);
    report.mix = chosen;
    fitting.check(&job, &mut report, console)?;
    let mut output = match out(args) {
        Some(dir) => Some(claim(args, dir, &job, model.as_ref())?),
        None => None,
    };
    let state = resumed.as_ref().and_then(|run| run.state.as_ref());
    if let (Some(state), Some(output)) = (state, &output)
        && state.step >= job.settings.steps
    {
        return complete(output, report, state, console);
    }
    // A model that learns generated text has no tokenizer.
    let learns_files = model.as_ref().filter(|_| !job.settings.data.is_empty());
    let tokenizer = learns_files.map(Pretrained::tokenizer).transpose()?;
    let (plan, model_files) = match &output {
        Some(_) => (job.plan_file()?, model_files(&job, model.as_ref(), tokenizer.as_ref())?),
        None => Default::default(),
    };
    let mut start = Start {
        plan: &plan,
        model_files: &model_files,
        rows: None,
        new_rows: false,
        resumed: state,
    };
    if args.plan_only {
        write(console.line(&report.plan_text()))?;
        // A run that is there is not touched.
        if let Some(output) = output.as_mut().filter(|_| !args.overwrite && resumed.is_none()) {
            output.begin(&job, start)?;
        }
        print_json(console, &report)?;
        return Ok(0);
    }
    let text = text(&mut job, tokenizer.as_ref(), output.as_ref(), state)?;
    drop(tokenizer);
    // Planning and tokenising are over: from here on the process has the arena, and beside it what it has now and some headroom.
    before.end_phase()?;
    let files = model_files.iter().map(|(_, content)| content.len()).sum::<usize>();
    let passing = (plan.len() + files) as u64;
    let reserve = before.prepared_bytes(report.arena_bytes, job.settings.threads, reserve, passing)?;
    report.prepared(&job, &text, reserve);
    write(console.line(&report.plan_text()))?;
    fitting.check(&job, &mut report, console)?;
    if let Some(output) = &mut output {
        start.rows = text.state();
        start.new_rows = report.data.as_ref().is_some_and(|data| data.counts.is_some());
        output.begin(&job, start)?;
    }
    drop((plan, model_files));

    if let Some(state) = state {
        let words = format!("resumed  after step {} of {}", state.step, job.settings.steps);
        write(console.line(&words))?;
    }
    let Job { settings, plan, .. } = job;
    let mut session = Session::with_scratch(plan, settings.threads, Some(&scratch))?;
    session.set_poison(args.poison);
    fill(&mut session, &settings, model.as_ref(), checkpoint.as_deref())?;
    drop(model);
    let run = Run {
        settings: &settings,
        text: &text,
        done: state.map_or(0, |state| state.step),
        loss_first: state.map(|state| state.loss_first),
        stop: stop.requested(),
    };
    let (outcome, noted) = watch(&mut session, &run, &stop, &report, output.as_mut())?;
    let arena = session.arena();
    let peak = process_peak_bytes()?.max(before.peak_bytes());
    let report = report.ran(&outcome, arena.len(), Some(arena.measured_peak()), Some(peak));
    // The weights are saved: words can be lost.
    let said = write(console.line(&report.result_text()));
    noted?;
    if let Some(output) = &output {
        output.finish(&report)?;
    }
    said?;
    print_json(console, &report)?;
    if !stop.requested().load(Ordering::Relaxed) {
        return Ok(0);
    }
    let kept = match out(args) {
        Some(dir) => format!("saved; go on by `tightfit train --resume {}`", dir.display()),
        None => "nothing saved, as no --out was given".to_owned(),
    };
    complain(format_args!(
        "stopped after step {} of {}: {kept}",
        outcome.steps, settings.steps
    ));
    Ok(STOPPED)
}

/// The model that the run starts from, if one is given. A resumed run has its model, tokenizer included, in its checkpoint; or the
/// adapter alone, beside a model that stays as it is.
fn open(settings: &Settings, checkpoint: Option<&Path>) -> Result<Option<Pretrained>, Failure> {
    if !settings.method.has_adapters() {
        let source = checkpoint.or(settings.model.as_deref());
        return Ok(source.map(Pretrained::open).transpose()?);
    }
    let Some(model) = &settings.model else {
        return Ok(None);
    };
    let adapter = checkpoint.or(settings.adapter.as_deref());
    Ok(Some(Pretrained::open_with(model, adapter)?))
}

/// A run whose steps are all done: if it was killed before its result was written, that is made up for.
fn complete(output: &Output, report: Report, state: &State, console: Console) -> Result<u8, Failure> {
    write(console.line(&format!("all {} steps are done: nothing to resume", state.step)))?;
    if let Some(result) = output.result() {
        if console.json {
            write(to_stdout(result.trim_end()))?;
        }
        return Ok(0);
    }
    let last = output.last_step().filter(|last| last.step == state.step);
    let outcome = Outcome {
        steps: state.step,
        stopped: false,
        loss_first: state.loss_first,
        loss_last: last.map_or(f64::NAN, |last| last.loss),
        eval_loss: last.and_then(|last| last.eval_loss).unwrap_or(f64::NAN),
        skipped_steps: None,
        seconds_per_step: last.map_or(f64::NAN, |last| last.seconds),
        transferred: None,
    };
    let arena = report.arena_bytes;
    let report = report.ran(&outcome, arena, None, None);
    output.finish(&report)?;
    print_json(console, &report)?;
    Ok(0)
}

/// The folder that the run writes to.
fn out(args: &TrainArgs) -> Option<&Path> {
    args.out.as_deref().or(args.resume.as_deref())
}

/// Flags, then the settings file or the resumed run's, then those of the plan that is followed, then defaults.
fn resolve(
    args: &TrainArgs,
    followed: Option<&Followed>,
    resumed: Option<&Resumed>,
) -> Result<(Request, Settings), Failure> {
    let mut request = args.request.clone();
    if let Some(run) = resumed {
        request = run.request(request)?;
    }
    if let Some(path) = &args.config {
        request = request.or(Request::read(path)?);
    }
    if let Some(plan) = followed {
        request = request.or_planned(plan.request());
    }
    let budget = match request.budget {
        Some(budget) => budget.0,
        None => default_budget()?.bytes,
    };
    let settings = request.clone().resolve(budget)?;
    Ok((request, settings))
}

/// What a job is held against.
struct Fitting<'a> {
    /// The settings as the user left them to the planner.
    asked: Settings,
    model: Option<&'a Pretrained>,
    /// What the disk has left.
    free_bytes: u64,
    /// The folder of the file that offloading uses; need not be there yet.
    scratch: &'a Path,
    /// Whether the plan is from a file, so that there is nothing to choose.
    follows: bool,
}

impl Fitting<'_> {
    /// Whether a job is within its budget.
    fn fits(&self, job: &Job, before: &mut Before) -> Result<bool, Failure> {
        before.end_phase()?;
        let tokenise = !job.settings.data.is_empty();
        let reserve = before.planned_bytes(job.plan.arena_bytes(), job.settings.threads, tokenise)?;
        Ok(job.plan.fit(self.asked.budget.0, reserve).is_ok())
    }

    /// Refuses a job that is larger than its budget or its disk.
    fn check(&self, job: &Job, report: &mut Report, console: Console) -> Result<(), Failure> {
        let Err(failure) = self.fit(job, report) else {
            return Ok(());
        };
        if failure.exit_code() == DOES_NOT_FIT {
            report.status = "does_not_fit";
            write(console.line(&report.plan_text()))?;
            print_json(console, report)?;
        }
        Err(failure)
    }

    fn fit(&self, job: &Job, report: &mut Report) -> Result<(), Failure> {
        if let Err(infeasible) = job.plan.fit(report.budget_bytes, report.reserve_bytes) {
            if !self.follows {
                let limits = choose::limits(&self.asked, report.reserve_bytes, self.free_bytes);
                report.alternatives = alternatives(job, &self.asked, self.model, &limits, report.reserve_bytes);
            }
            let alternatives = report.alternatives.clone();
            return Err(Failure::DoesNotFit {
                infeasible,
                alternatives,
            });
        }
        let needed = job.plan.lower_tier_bytes();
        if let Some(limit) = self.asked.disk.0.filter(|&limit| limit < needed) {
            return Err(Failure::Disk { needed, limit });
        }
        match needed {
            0 => Ok(()),
            needed => Ok(Scratch::check(existing(self.scratch), needed)?),
        }
    }
}

/// The folder, or the next above it that is there.
fn existing(folder: &Path) -> &Path {
    let mut folders = folder.ancestors().filter(|folder| !folder.as_os_str().is_empty());
    folders.find(|folder| folder.exists()).unwrap_or(Path::new("."))
}

/// Claims the output folder. Nothing that is in it changes.
fn claim(args: &TrainArgs, dir: &Path, job: &Job, model: Option<&Pretrained>) -> Result<Output, Failure> {
    let claim = match (args.overwrite, &args.resume) {
        (_, Some(_)) => Claim::Resume,
        (true, None) => Claim::Overwrite,
        (false, None) => Claim::New,
    };
    let kind = match job.settings.method.has_adapters() {
        true if model.is_none() => return Err(Failure::AdapterOfNothing),
        true => Kind::Adapter,
        false => Kind::Model,
    };
    let base = model.and_then(|model| model.checkpoint().folder());
    let adapter = model.and_then(Pretrained::adapter).map(Adapter::path);
    let folders = base.into_iter().chain(adapter);
    let mut folders = folders.filter_map(|folder| folder.canonicalize().ok());
    if let Ok(dir) = dir.canonicalize()
        && claim != Claim::Resume
        && folders.any(|folder| folder.starts_with(&dir))
    {
        return Err(Failure::OutHoldsModel { dir });
    }
    Output::claim(dir, claim, kind, job.settings.keep)
}

/// What makes the output folder a model or an adapter: configuration and tokenizer.
fn model_files(
    job: &Job,
    model: Option<&Pretrained>,
    tokenizer: Option<&Tokenizer>,
) -> Result<Vec<(String, Vec<u8>)>, Failure> {
    let (kind, config) = match Subject::of(&job.settings, model).adapters(&job.settings) {
        None => (Kind::Model, job.config_json()),
        Some(lora) => {
            let smallest = BatchShape {
                batch: 1,
                seq: 1,
                loss_chunk: 1,
            };
            let layers = linear_layers(&job.model.loss(smallest).map_err(JobError::from)?);
            let config = adapters::config_json(&lora, &layers, job.settings.model.as_deref());
            (Kind::Adapter, format!("{config:#}\n"))
        }
    };
    let mut files = vec![(kind.config().to_owned(), config.into_bytes())];
    if let Some(tokenizer) = tokenizer {
        files.extend(tokenizer.hf_files()?);
    }
    Ok(files)
}

/// The text of a job; from files, it decides the steps where `--epochs` was given.
fn text(
    job: &mut Job,
    tokenizer: Option<&Tokenizer>,
    output: Option<&Output>,
    state: Option<&State>,
) -> Result<Text, Failure> {
    let Some(tokenizer) = tokenizer else {
        return Ok(Text::generated(&job.settings).map_err(TrainError::from)?);
    };
    let dir = output.map(Output::dir);
    // The rows of a run stay the rows of that run, whatever has become of the files since.
    let rows = state.and_then(|state| state.data.as_ref());
    let reopened = dir
        .zip(rows)
        .and_then(|(dir, rows)| Text::reopen(&job.settings, dir, rows));
    let text = match reopened {
        Some(text) => text,
        None => Text::prepare(&job.settings, tokenizer, job.model.vocab_size, dir)?,
    };
    if rows.is_some() && text.state().as_ref() != rows {
        return Err(PrepareError::Changed {
            data: job.settings.data.clone(),
        }
        .into());
    }
    job.settings.resolve_epochs(text.batches_per_epoch())?;
    Ok(text)
}

/// Fills every persistent tensor: fresh, from a model, or from a checkpoint.
fn fill(
    session: &mut Session,
    settings: &Settings,
    model: Option<&Pretrained>,
    checkpoint: Option<&Path>,
) -> Result<(), Failure> {
    let Some(model) = model else {
        session.initialise(settings.seed)?;
        return Ok(());
    };
    if model.adapter().is_none() {
        session.initialise_roles(settings.seed, &[Role::Adapter])?;
    }
    model.load(session)?;
    match checkpoint {
        Some(checkpoint) => Ok(restore_optimizer(session, checkpoint)?),
        None => {
            session.initialise_roles(settings.seed, &[Role::OptimizerState])?;
            Ok(())
        }
    }
}

/// Trains, showing, noting and saving. What cannot be noted or saved, say on a full disk, ends the run: the outcome then stands beside
/// the reason.
fn watch(
    session: &mut Session,
    run: &Run<'_>,
    stop: &Stop,
    report: &Report,
    mut output: Option<&mut Output>,
) -> Result<(Outcome, Result<(), Failure>), Failure> {
    let mut progress = Progress::new(run.done, run.settings.steps, report.tokens_per_step);
    let mut noted = Ok(());
    let mut loss_first = run.loss_first;
    let outcome = train(session, run, |session, step| {
        stop.first_step_done();
        progress.step(step);
        let first = *loss_first.get_or_insert(step.loss);
        if let Some(output) = &mut output {
            noted = output.step(step);
            if step.save && noted.is_ok() {
                noted = output.save(session, step, first);
            }
        }
        noted.is_ok()
    });
    progress.finish();
    Ok((outcome?, noted))
}
