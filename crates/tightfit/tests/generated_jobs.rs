//! Jobs that nobody thought of: tiny models of random shapes with random legal techniques and random budgets, through the command.
//!
//! Each trains three steps in a process that the system holds to its budget (`RLIMIT_DATA`), and must do what it planned: the arena's
//! peak is the planned one, the process stays within its budget, the file of the lower tier within its own limit, and results are those
//! of the plain job without limits: the same bits where techniques are exact, and rounding where sums are cut otherwise. A
//! budget that is too small is refused with the smallest one that would do, which then does.
//!
//! A job is its number, which a failure names. `TIGHTFIT_JOBS` says how many there are, or which; by the night, 1000:
//! `TIGHTFIT_JOBS=1000 cargo test --release --test generated_jobs`.

#![cfg(target_os = "linux")]

use std::fmt::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::Value;
use tightfit_testkit::rng::Rng;

const BIN: &str = env!("CARGO_BIN_EXE_tightfit");
const MIB: u64 = 1 << 20;
/// Jobs where the environment says nothing else.
const JOBS: u64 = 40;
/// Jobs at one time.
const WORKERS: usize = 2;
/// What sums that are cut otherwise may differ by, relative to the loss.
const TOLERANCE: f64 = 1e-5;
/// The same in jobs whose numbers have few bits, or whose updates turn on a gradient's sign.
const NUMBERS_TOLERANCE: f64 = 0.03;

/// A job: flags, in groups by what they change.
#[derive(Debug)]
struct Job {
    /// The model, what is trained on, and how: precision, method, optimizer.
    plain: String,
    /// What a loss may differ by from the plain job's, relative to that.
    tolerance: f64,
    /// Techniques that cut sums otherwise, those left to the planner included.
    rounding: String,
    /// Techniques that change no bit.
    exact: String,
    /// Where the budget lies.
    budget: Budget,
    /// Whether checkpoints are saved on the way.
    saves: bool,
}

/// Where a budget lies.
#[derive(Clone, Copy, Debug)]
enum Budget {
    /// Below the smallest: refused.
    TooSmall,
    /// The smallest that is named.
    Smallest,
    /// That part of the way from there to what the plain job needs.
    Between(f64),
}

/// Random choices of one job.
struct Random(Rng);

impl Random {
    fn within(&mut self, from: u64, to: u64) -> u64 {
        from + self.0.below(to - from + 1)
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.0.below(choices.len() as u64) as usize]
    }

    /// A divisor of `n`.
    fn divisor(&mut self, n: u64) -> u64 {
        let divisors: Vec<u64> = (1..=n).filter(|d| n.is_multiple_of(*d)).collect();
        self.one_of(&divisors)
    }
}

impl Job {
    fn generate(number: u64) -> Self {
        let mut random = Random(Rng::named(number, "job"));
        let heads = random.within(1, 4);
        let kv_heads = random.divisor(heads);
        let head_size = random.one_of(&[2, 6, 16, 32, 34, 48]);
        let (batch, seq) = (random.within(1, 8), random.within(1, 96));
        let eval_batches = random.within(1, 2);
        let plain = format!(
            "--hidden-size {} --heads {heads} --kv-heads {kv_heads} --intermediate-size {} --layers {} --vocab-size {} \
             --tie-word-embeddings {} --batch {batch} --seq {seq} --clip-norm {} --threads {} --steps 3 --eval-batches {eval_batches} \
             --eval-every {} --seed {number}",
            heads * head_size,
            random.within(1, 400),
            random.within(1, 6),
            random.within(256, 800),
            random.one_of(&["true", "false"]),
            random.one_of(&["none", "0.5"]),
            random.within(1, 3),
            random.within(0, 2),
        );
        let mut rounding = String::new();
        let mut exact = String::new();
        let say = |flags: &mut String, flag: &str, value: String| {
            if !value.is_empty() {
                // Writing to a string cannot fail.
                let _ = write!(flags, " --{flag} {value}");
            }
        };
        let whole_batch = match random.within(0, 3) {
            0 => false,
            1 => {
                say(&mut rounding, "micro-batch", "auto".to_owned());
                true
            }
            2 => {
                let rows = random.divisor(batch);
                say(&mut rounding, "micro-batch", rows.to_string());
                rows == batch
            }
            _ => true,
        };
        if whole_batch && random.within(0, 1) == 0 {
            say(&mut exact, "update-in-backward", "true".to_owned());
        }
        let tokens = random.within(1, batch * seq + 10);
        say(
            &mut rounding,
            "loss-chunk",
            random.one_of(&["", "auto", &tokens.to_string()]).to_owned(),
        );
        let tokens = random.within(1, batch * seq + 10);
        say(
            &mut rounding,
            "mlp-tile",
            random.one_of(&["", "", &tokens.to_string()]).to_owned(),
        );
        let rows = random.within(1, eval_batches * batch);
        say(
            &mut rounding,
            "eval-batch",
            random.one_of(&["", "auto", &rows.to_string()]).to_owned(),
        );
        let percent = format!("{}%", random.within(0, 100));
        let kept = (random.within(0, 16) << 14).to_string();
        let recompute = random.one_of(&["auto", "auto", "auto", "none", "block", &percent, &kept]);
        say(&mut exact, "recompute", recompute.to_owned());
        let kinds = ["activations", "optimizer", "weights"];
        let chosen = random.within(1, 7);
        let listed = (0..3).filter(|kind| chosen & (1 << kind) != 0).map(|kind| kinds[kind]);
        let listed = listed.collect::<Vec<_>>().join(",");
        let offload = random.one_of(&["none", "auto", "auto", &listed, &listed]);
        say(&mut exact, "offload", offload.to_owned());
        let disk = (random.within(1, 64) << 16).to_string();
        say(
            &mut exact,
            "disk",
            random.one_of(&["", "", "", "none", &disk]).to_owned(),
        );
        let mut job = Self {
            plain,
            tolerance: TOLERANCE,
            rounding,
            exact,
            budget: match random.within(0, 3) {
                0 => Budget::TooSmall,
                1 => Budget::Smallest,
                _ => Budget::Between(random.0.unit()),
            },
            saves: random.within(0, 3) == 0,
        };
        match random.within(0, 3) {
            0 => {}
            1 => job.add_adapters(&mut random),
            2 => job.change_numbers(&mut random),
            _ => {
                job.change_numbers(&mut random);
                job.add_adapters(&mut random);
            }
        }
        job
    }

    /// By how much the smallest budgets may differ that two runs name. Where tiles are many nodes of a tiny model, planning takes more
    /// memory than running, and how much depends on what has to be tried.
    fn spread(&self) -> u64 {
        match self.rounding.contains("mlp-tile") && self.plain.contains("lora") {
            true => 16 * MIB,
            false => MIB,
        }
    }

    /// Trains adapters. They are not saved, as their model would be fresh.
    fn add_adapters(&mut self, random: &mut Random) {
        let (rank, alpha) = (random.within(1, 40), random.within(1, 64));
        let dropout = random.one_of(&["0", "0", "0.1", "0.9"]);
        let targets = random.one_of(&["all-linear", "q_proj,v_proj", "mlp.*"]);
        let (rslora, tables) = (
            random.one_of(&["true", "false"]),
            random.one_of(&["", " --base-embeddings"]),
        );
        let base = match random.within(0, 1) {
            0 => match random.one_of(&["auto", "as-is", "f32", "bf16", "int8", "int4"]) {
                base @ ("int8" | "int4") => format!("lora --base {base}{tables}"),
                base => format!("lora --base {base}"),
            },
            _ => format!(
                "qlora --base {}{tables}",
                random.one_of(&["auto", "int8", "int4", "nf4"])
            ),
        };
        // Writing to a string cannot fail.
        let _ = write!(
            self.plain,
            " --method {base} --rank {rank} --alpha {alpha} --rslora {rslora} --dropout {dropout} \
             --targets {targets}"
        );
        self.saves = false;
    }

    /// Stores numbers in fewer bits, or updates otherwise.
    fn change_numbers(&mut self, random: &mut Random) {
        let precision = random.one_of(&["f32", "bf16-mixed", "f16-mixed", "bf16"]);
        let optimizers = [
            "adamw",
            "adamw-8bit",
            "adafactor",
            "lion",
            "apollo --apollo-rank 8",
            "sgd",
            "sgd --momentum 0",
        ];
        let optimizer = random.one_of(&optimizers);
        // As above.
        let _ = write!(self.plain, " --precision {precision} --optimizer {optimizer}");
        self.tolerance = NUMBERS_TOLERANCE;
    }
}

/// One process: its flags and what it printed.
struct Ran {
    line: String,
    output: Output,
}

/// Runs the command, in memory that the system limits where `limit` says so.
fn tightfit(flags: &str, limit: Option<u64>) -> Ran {
    let scratch = env!("CARGO_TARGET_TMPDIR");
    let line = format!("train --json --as-asked --scratch {scratch} {flags}");
    let mut command = match limit {
        // All private memory that may be written, touched or not; the shell counts in KiB. `RLIMIT_AS` would count the program file too.
        Some(bytes) => {
            let mut shell = Command::new("sh");
            let kib = (bytes / 1024).to_string();
            shell.args(["-c", "ulimit -d \"$0\" && exec \"$@\"", &kib, BIN]);
            shell
        }
        None => Command::new(BIN),
    };
    let output = command.args(line.split_whitespace()).output().unwrap();
    Ran { line, output }
}

impl Ran {
    fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }

    fn failed(&self, why: &str) -> String {
        format!(
            "{why}: tightfit {}\n{}\n{}",
            self.line,
            self.output.status,
            self.stderr()
        )
    }

    /// The report of a run that went well.
    fn report(&self) -> Result<Value, String> {
        if !self.output.status.success() {
            return Err(self.failed("it failed"));
        }
        serde_json::from_slice(&self.output.stdout).map_err(|error| self.failed(&error.to_string()))
    }

    /// The smallest limit that a refusal names.
    fn named(&self, words: &str) -> Option<u64> {
        let stderr = self.stderr();
        let (_, rest) = stderr.rsplit_once(words)?;
        rest.split_whitespace().next()?.parse().ok()
    }

    fn refused(&self) -> bool {
        self.output.status.code() == Some(3)
    }
}

const SMALLEST_BUDGET: &str = "smallest budget that would do for this job as it is: ";

fn bytes(report: &Value, field: &str) -> u64 {
    report[field]
        .as_u64()
        .unwrap_or_else(|| panic!("{field} is {}", report[field]))
}

/// The losses of a run.
fn losses(report: &Value) -> [f64; 3] {
    ["loss_first", "loss_last", "eval_loss"].map(|field| report[field].as_f64().unwrap())
}

/// A folder for one job's results, which goes with it.
struct Folder(PathBuf);

impl Folder {
    fn new(number: u64) -> Self {
        Self(Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("job-{number}-{}", std::process::id())))
    }

    fn out(&self, name: &str) -> String {
        format!("--save-every 1 --out {}", self.0.join(name).display())
    }

    /// What a run has saved: the trained weights, and the optimizer's state.
    fn saved(&self, name: &str) -> Vec<Vec<u8>> {
        let mut files: Vec<PathBuf> = walk(&self.0.join(name));
        files.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
        files.sort();
        files.iter().map(|path| std::fs::read(path).unwrap()).collect()
    }
}

fn walk(dir: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .flat_map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => walk(&entry.path()),
            _ => vec![entry.path()],
        })
        .collect()
}

impl Drop for Folder {
    fn drop(&mut self) {
        // It is not there if nothing was saved.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What one job showed.
#[derive(Default)]
struct Seen {
    recomputed: bool,
    offloaded: bool,
    micro_batches: bool,
    refused: bool,
}

fn check(number: u64) -> Result<Seen, String> {
    let job = Job::generate(number);
    let mut flags = format!("{}{}{}", job.plain, job.rounding, job.exact);
    let refused = |ran: &Ran, words: &str| match ran.named(words) {
        Some(named) if ran.refused() => Ok(named),
        _ => Err(ran.failed("expected a refusal that names a limit")),
    };

    let mut smallest = tightfit(&format!("{flags} --plan-only --budget 1"), None);
    if let Ok(report) = serde_json::from_slice::<Value>(&smallest.output.stdout) {
        // A limit of the disk that cannot be kept is refused as well, and what the plan needs does.
        let needs = bytes(&report["plan"], "lower_tier_bytes");
        if let Some(disk) = report["settings"]["disk"].as_u64().filter(|&disk| disk < needs) {
            let ran = tightfit(&format!("{flags} --plan-only --budget 4GiB"), None);
            // With room enough in memory, the choice can be another one.
            let planned = serde_json::from_slice::<Value>(&ran.output.stdout);
            let kept = planned.is_ok_and(|report| bytes(&report["plan"], "lower_tier_bytes") <= disk);
            if !(ran.refused() || ran.output.status.success() && kept) {
                return Err(ran.failed("a disk that is too small is not refused"));
            }
            let _ = write!(flags, " --disk {needs}");
            smallest = tightfit(&format!("{flags} --plan-only --budget 1"), None);
        }
    }
    let named = refused(&smallest, SMALLEST_BUDGET)?;

    let plain = tightfit(&format!("{} --recompute none --budget 4GiB", job.plain), None).report()?;
    let needs = bytes(&plain, "arena_bytes") + bytes(&plain, "reserve_bytes");
    let mut seen = Seen::default();
    let budget = match job.budget {
        Budget::TooSmall => {
            let ran = tightfit(&format!("{flags} --budget {}", named - job.spread() - 1), None);
            let again = refused(&ran, SMALLEST_BUDGET)?;
            if again.abs_diff(named) > job.spread() {
                return Err(ran.failed(&format!("{named} was named before")));
            }
            seen.refused = true;
            again
        }
        Budget::Smallest => named,
        Budget::Between(part) => named + (part * needs.saturating_sub(named) as f64) as u64,
    };

    let folder = Folder::new(number);
    let out = |name: &str| if job.saves { folder.out(name) } else { String::new() };
    let run = |budget: u64| {
        let budget = budget.next_multiple_of(1024);
        tightfit(&format!("{flags} --budget {budget} {}", out("limited")), Some(budget))
    };
    let limited = run(budget);
    let report = limited.report()?;
    let measures = [
        "planned_peak_bytes",
        "measured_arena_peak_bytes",
        "process_peak_bytes",
        "arena_bytes",
        "reserve_bytes",
    ];
    let [planned, measured, process, arena, reserve] = measures.map(|field| bytes(&report, field));
    let budget = bytes(&report, "budget_bytes");
    let lower = bytes(&report["plan"], "lower_tier_bytes");
    let disk = report["settings"]["disk"].as_u64().unwrap_or(u64::MAX);
    for (holds, why) in [
        (measured == planned, "measured is not planned"),
        (process <= arena + reserve, "the process is larger than planned"),
        (arena + reserve <= budget, "planned is more than the budget"),
        (lower <= disk, "the lower tier is larger than its limit"),
    ] {
        if !holds {
            return Err(limited.failed(&format!("{why}: {report}")));
        }
    }

    // What the planner has chosen that changes rounding, and no technique that changes nothing.
    let chosen = ["micro_batch", "loss_chunk", "eval_batch", "mlp_tile"].map(|field| {
        let value = &report["settings"][field];
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        format!("--{} {value}", field.replace('_', "-"))
    });
    let chosen = chosen.join(" ");
    let exact = tightfit(
        &format!("{} {chosen} --recompute none --budget 4GiB {}", job.plain, out("exact")),
        None,
    );
    let exact_losses = losses(&exact.report()?);
    if losses(&report).map(f64::to_bits) != exact_losses.map(f64::to_bits) {
        return Err(limited.failed(&format!(
            "{:?}, expected {exact_losses:?} as of {}",
            losses(&report),
            exact.line
        )));
    }
    if folder.saved("limited") != folder.saved("exact") {
        return Err(limited.failed(&format!("other files than of {}", exact.line)));
    }
    for (found, expected) in losses(&report).into_iter().zip(losses(&plain)) {
        if (found - expected).abs() > job.tolerance * expected {
            return Err(limited.failed(&format!("a loss of {found}, expected {expected}")));
        }
    }
    seen.offloaded = lower > 0;
    seen.micro_batches = report["settings"]["micro_batch"] != report["settings"]["batch"];
    seen.recomputed =
        report["settings"]["recompute"] != "none" && report["plan"]["flops"].as_u64() > plain["plan"]["flops"].as_u64();
    Ok(seen)
}

#[test]
fn generated_jobs_run_as_planned_within_their_budgets() {
    // `1000`, or `817..818` for a job that failed.
    let jobs = std::env::var("TIGHTFIT_JOBS").unwrap_or_else(|_| JOBS.to_string());
    let (first, end) = jobs.split_once("..").unwrap_or(("0", &jobs));
    check_all(first.parse().unwrap()..end.parse().unwrap());
}

/// `cargo test --release --test generated_jobs -- --ignored --nocapture`
#[test]
#[ignore = "takes minutes"]
fn two_hundred_generated_jobs_run_as_planned_within_their_budgets() {
    check_all(0..200);
}

fn check_all(numbers: Range<u64>) {
    let jobs = numbers.end - numbers.start;
    let next = AtomicU64::new(numbers.start);
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= numbers.end {
                        break;
                    }
                    let result = check(number);
                    results.lock().unwrap().push((number, result));
                }
            });
        }
    });
    let results = results.into_inner().unwrap();
    let failures = results
        .iter()
        .filter_map(|(number, result)| Some(format!("job {number}: {}", result.as_ref().err()?)));
    let failures: Vec<String> = failures.collect();
    assert!(
        failures.is_empty(),
        "{} of {jobs} jobs:\n{}",
        failures.len(),
        failures.join("\n")
    );
    // What the jobs are for did happen.
    let count = |what: fn(&Seen) -> bool| {
        results
            .iter()
            .filter(|(_, result)| result.as_ref().is_ok_and(what))
            .count() as u64
    };
    let counts = [
        ("recomputed", count(|seen| seen.recomputed)),
        ("offloaded", count(|seen| seen.offloaded)),
        ("in micro-batches", count(|seen| seen.micro_batches)),
        ("refused below the smallest budget", count(|seen| seen.refused)),
    ];
    println!("{jobs} jobs: {counts:?}");
    if jobs >= JOBS {
        counts
            .iter()
            .for_each(|(what, count)| assert!(*count >= jobs / 10, "{count} of {jobs} jobs are {what}"));
    }
}
