//! `tightfit plan`.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

use tightfit_exec::checkpoint;
use tightfit_model::Known;

use crate::checkpoints::MODEL_CONFIG;
use crate::cli::PlanArgs;
use crate::console::Console;
use crate::failure::{DOES_NOT_FIT, Failure};
use crate::hub::cached_config;
use crate::job::{Chosen, JobError, plan_file};
use crate::memory::format_bytes;
use crate::mix::front::front;
use crate::mix::html::page;
use crate::mix::levers::levers;
use crate::mix::nearest::nearest;
use crate::mix::report::PlanReport;
use crate::mix::vary::curve;
use crate::mix::{Candidate, Device, Space, search};
use crate::pretrained::{Pretrained, read_config};
use crate::settings::{AskedMethod, ByteLimit, Request};
use crate::subject::Subject;

use super::{complain, print_json, write};

/// Searches for one job, each beside the reserve that the one before left.
const ATTEMPTS: u32 = 3;

/// Plans a job and runs nothing; the exit code.
pub fn run(args: &PlanArgs) -> Result<u8, Failure> {
    let console = Console { json: args.json };
    let started = Instant::now();
    let mut request = match &args.config {
        Some(path) => args.request.clone().or(Request::read(path)?),
        None => args.request.clone(),
    };
    check(args, &request)?;
    let name = args.name.as_deref().or(request.model.as_deref()).map(Path::to_owned);
    request.model.clone_from(&name);
    request.method.get_or_insert(AskedMethod::Auto);
    let threads = request
        .threads
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let device = Device::named(&args.device, threads)?;
    let budget = match request.budget {
        Some(budget) => budget.0,
        None => device.memory_bytes()?,
    };
    if let Device::Card(target) = &device
        && budget > target.card().memory_bytes()
    {
        let message = format!("{} has {}", device.name(), format_bytes(target.card().memory_bytes()));
        return Err(Failure::Flag {
            flag: "--budget",
            message,
        });
    }
    // What leaves a card goes to the host's memory, which settings of the CPU know nothing of.
    let on_card = matches!(device, Device::Card(_));
    let limit = |limit: Option<ByteLimit>| limit.and_then(|limit| limit.0);
    let (disk, host) = (limit(request.disk), limit(request.host_memory.take()));
    match (on_card, disk, host) {
        (true, Some(_), _) => {
            return Err(Failure::Flag {
                flag: "--disk",
                message: "what leaves a card goes to the host's memory: say --host-memory".to_owned(),
            });
        }
        (false, _, Some(_)) => {
            return Err(Failure::Flag {
                flag: "--host-memory",
                message: "what leaves the CPU's memory goes to a file: say --disk".to_owned(),
            });
        }
        _ => {}
    }
    let given = disk.or(host);
    let lower_tier_bytes = given.unwrap_or_else(|| device.lower_tier_bytes());
    let pretrained = open(name.as_deref(), request.adapter.as_deref())?;
    if pretrained.is_none() && request.adapter.is_some() {
        return Err(Failure::Flag {
            flag: "--adapter",
            message:
                "goes with a model's files, which tell its layers; of a name there is no more than a configuration"
                    .to_owned(),
        });
    }
    let reserve = device.reserve(name.is_some())?;
    let space = Space::new(request, budget, device.has_bf16())?;
    let subject = match (&name, &pretrained) {
        (Some(name), None) => named(name)?,
        _ => Subject::of(&space.plain()?, pretrained.as_ref()),
    };
    let mut limits = device.limits(budget, &reserve, lower_tier_bytes);
    // Neither depends on the other.
    let (outcome, levers) = std::thread::scope(|scope| {
        let levers = scope.spawn(|| levers(&space, &subject, &device));
        let outcome = search(&space, &subject, &device, &limits);
        (outcome.map(|outcome| (outcome, started.elapsed())), levers.join())
    });
    let (mut outcome, searched) = outcome?;
    let mut levers = levers.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    let process = reserve;
    let mut reserve = device.reserve_beside(&process, &outcome.candidate);
    for _ in 1..ATTEMPTS {
        let arena = outcome.candidate.fit.plan.arena_bytes();
        if outcome.fastest_seconds.is_none() || arena <= budget.saturating_sub(reserve.bytes()) {
            break;
        }
        // The plan itself takes room, and leaves a smaller arena.
        limits = device.limits(budget, &reserve, lower_tier_bytes);
        outcome = search(&space, &subject, &device, &limits)?;
        let grown = device.reserve_beside(&process, &outcome.candidate);
        if grown.bytes() > reserve.bytes() {
            reserve = grown;
        }
    }
    levers.mark(&outcome.candidate);
    let seconds = started.elapsed().as_secs_f64();
    let mut report = PlanReport::new(
        &outcome,
        &subject,
        &device,
        reserve.clone(),
        (budget, lower_tier_bytes),
        levers,
        (searched.as_secs_f64(), seconds),
    );
    if !report.fits {
        report.nearest = nearest(&space, &subject, &device, &limits, reserve.bytes(), &outcome)?;
    }
    for vary in &args.vary {
        let curve = curve(vary, &space, &subject, &device, &reserve, lower_tier_bytes)?;
        report.curves.push(curve);
    }
    match &args.save {
        Some(path) if report.fits => save(path, &outcome.candidate, &device)?,
        Some(path) => complain(format_args!(
            "note: a plan that does not fit is not kept: {} is not written",
            path.display()
        )),
        None => {}
    }
    if let Some(path) = &args.html {
        let needed = report.minimum_budget_bytes;
        let smaller = front(&space, &subject, &device, &reserve, lower_tier_bytes, needed)?;
        report.tried.extend(smaller);
        let page = page(&report, &outcome.candidate.fit.plan);
        checkpoint::replace(path, |mut file| file.write_all(page.as_bytes()))?;
    }
    if let Some(what) = &args.why {
        report = report.with_why(what, &outcome.candidate.fit.plan);
    }
    write(console.line(&report.text()))?;
    print_json(console, &report)?;
    Ok(if report.fits { 0 } else { DOES_NOT_FIT })
}

/// What flags must be before anything is planned.
fn check(args: &PlanArgs, request: &Request) -> Result<(), Failure> {
    if args.name.is_some() && request.model.is_some() {
        return Err(Failure::Flag {
            flag: "--model",
            message: "the model is given already, before the flags".to_owned(),
        });
    }
    for (flag, path) in [("--save", &args.save), ("--html", &args.html)] {
        let Some(path) = path else { continue };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let message = match folder {
            _ if path.is_dir() => format!("{} is a folder: name a file in it", path.display()),
            Some(folder) if !folder.is_dir() => format!("there is no folder {}", folder.display()),
            _ => continue,
        };
        return Err(Failure::Flag { flag, message });
    }
    Ok(())
}

/// Keeps a plan, whole or not at all.
fn save(path: &Path, candidate: &Candidate, device: &Device) -> Result<(), Failure> {
    let chosen = Chosen {
        choice: candidate.fit.choice.clone(),
        profile: device.profile(),
    };
    let json = plan_file(&candidate.settings, &candidate.fit.plan, &chosen).map_err(JobError::from)?;
    checkpoint::replace(path, |mut file| file.write_all(json.as_bytes()))?;
    Ok(())
}

/// The model's files, if the name is a path.
fn open(model: Option<&Path>, adapter: Option<&Path>) -> Result<Option<Pretrained>, Failure> {
    let path = model.filter(|path| path.exists() && config_alone(path).is_none());
    Ok(path.map(|path| Pretrained::open_with(path, adapter)).transpose()?)
}

/// A model of which there is no more than a configuration: in a folder without weights, of the table, or in the hub's cache.
fn named(name: &Path) -> Result<Subject<'static>, Failure> {
    let text = name.to_string_lossy();
    if let Some(known) = Known::named(&text) {
        return Ok(Subject::known(known).map_err(JobError::from)?);
    }
    let config = config_alone(name).or_else(|| cached_config(&text));
    let config = config.ok_or_else(|| Failure::NoSuchModel {
        name: text.into_owned(),
    })?;
    Ok(Subject::configured(read_config(&config)?))
}

/// The `config.json` that is given, or is in a folder without weights.
fn config_alone(path: &Path) -> Option<PathBuf> {
    if path.file_name().is_some_and(|name| name == MODEL_CONFIG) {
        return path.is_file().then(|| path.to_owned());
    }
    let config = path.join(MODEL_CONFIG);
    let files = std::fs::read_dir(path).ok()?.flatten();
    let mut names = files.map(|file| file.file_name());
    let has_weights = names.any(|name| name.to_string_lossy().contains(".safetensors"));
    (config.is_file() && !has_weights).then_some(config)
}
