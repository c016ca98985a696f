//! Promise 1 for the whole process: the command stays within its budget, also where the system enforces it.

use std::process::{Command, Output};

use serde_json::Value;

const BIN: &str = env!("CARGO_BIN_EXE_tightfit");
const MIB: u64 = 1 << 20;

/// Jobs of less than a second.
const SHAPES: [&str; 4] = [
    "--hidden-size 64 --layers 2 --seq 64",
    "--hidden-size 64 --layers 2 --seq 64 --threads 3 --micro-batch 1 --eval-every 1",
    "--hidden-size 64 --layers 12 --seq 32 --threads 1 --clip-norm none",
    "--hidden-size 256 --layers 2 --seq 128 --threads 2 --tie-word-embeddings false",
];

/// The arguments of three steps of a job.
fn arguments(shape: &str) -> Vec<&str> {
    let common = "train --json --as-asked --steps 3 --eval-batches 1";
    common.split(' ').chain(shape.split(' ')).collect()
}

fn train(shape: &str, budget: u64) -> Output {
    let mut command = Command::new(BIN);
    command.args(arguments(shape)).args(["--budget", &budget.to_string()]);
    command.output().unwrap()
}

fn report(output: &Output) -> Value {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {stderr}", output.status);
    serde_json::from_slice(&output.stdout).unwrap()
}

fn bytes(report: &Value, field: &str) -> u64 {
    report[field]
        .as_u64()
        .unwrap_or_else(|| panic!("{field} is {}", report[field]))
}

#[test]
fn the_process_stays_within_its_budget() {
    for shape in SHAPES {
        let report = report(&train(shape, 512 * MIB));
        let [planned, measured] =
            ["planned_peak_bytes", "measured_arena_peak_bytes"].map(|field| bytes(&report, field));
        assert_eq!(measured, planned, "{shape}");
        let fields = ["process_peak_bytes", "arena_bytes", "reserve_bytes", "budget_bytes"];
        let [process, arena, reserve, budget] = fields.map(|field| bytes(&report, field));
        assert!(
            process <= arena + reserve,
            "{shape}: peak {process}, arena {arena}, reserve {reserve}"
        );
        assert!(
            arena + reserve <= budget,
            "{shape}: arena {arena}, reserve {reserve}, budget {budget}"
        );
        // The reserve is for what cannot be planned, not a way out for what can.
        assert!(reserve <= 24 * MIB, "{shape}: reserve {reserve}");
    }
}

#[test]
fn the_plan_file_of_a_deep_model_is_in_the_reserve() {
    let dir = std::env::temp_dir().join(format!("tightfit-deep-{}", std::process::id()));
    let shape = "--hidden-size 4 --heads 1 --kv-heads 1 --intermediate-size 1 --seq 1 --batch 1 --layers 300";
    let mut command = Command::new(BIN);
    command.args(arguments(shape)).arg("--out").arg(&dir);
    let report = report(&command.output().unwrap());
    std::fs::remove_dir_all(&dir).unwrap();
    let [process, arena, reserve] =
        ["process_peak_bytes", "arena_bytes", "reserve_bytes"].map(|field| bytes(&report, field));
    assert!(
        process <= arena + reserve,
        "peak {process}, arena {arena}, reserve {reserve}"
    );
}

/// The smallest budget that a refusal names.
fn named_budget(refused: &Output) -> u64 {
    assert_eq!(refused.status.code(), Some(3));
    let stderr = String::from_utf8_lossy(&refused.stderr);
    let (_, words) = stderr
        .rsplit_once("smallest budget that would do for this job as it is: ")
        .unwrap();
    words.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn a_job_is_refused_below_the_budget_it_names_and_runs_at_it() {
    let shape = SHAPES[0];
    let named = named_budget(&train(shape, MIB));
    // The reserve is measured anew by each process, and is a whole number of MiB. Rarely, two of them are one apart.
    let low = named_budget(&train(shape, named - MIB - 1));
    assert!(low.abs_diff(named) <= MIB, "named {named}, then {low}");
    let accepted = train(shape, named);
    let accepted = match accepted.status.code() {
        Some(3) => train(shape, named + MIB),
        _ => accepted,
    };
    let report = report(&accepted);
    assert!(bytes(&report, "process_peak_bytes") <= bytes(&report, "budget_bytes"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_limit_of_the_system_at_the_planned_total_is_enough() {
    for shape in SHAPES {
        let report_free = report(&train(shape, 512 * MIB));
        let planned = bytes(&report_free, "arena_bytes") + bytes(&report_free, "reserve_bytes");
        // RLIMIT_DATA counts all private memory that may be written, touched or not; the shell counts in KiB.
        let limited = |limit: u64| {
            let mut command = Command::new("sh");
            command.args([
                "-c",
                "ulimit -d \"$0\" && exec \"$@\"",
                &(limit / 1024).to_string(),
                BIN,
            ]);
            command
                .args(arguments(shape))
                .args(["--budget", &planned.next_multiple_of(MIB).to_string()]);
            command.output().unwrap()
        };
        let report = report(&limited(planned));
        assert_eq!(report["loss_last"], report_free["loss_last"], "{shape}");
        // The limit is one: without room for the arena, nothing runs.
        let starved = limited(bytes(&report, "arena_bytes"));
        let stderr = String::from_utf8_lossy(&starved.stderr);
        assert_eq!(starved.status.code(), Some(1), "{shape}: {stderr}");
        assert!(stderr.contains("cannot map an arena"), "{shape}: {stderr}");
    }
}
