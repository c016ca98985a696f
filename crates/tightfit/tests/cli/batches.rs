//! How many sequences are in memory at one time, in training and in evaluation.

use std::fs;

use serde_json::Value;

use crate::pretrained::{job, model, text};
use crate::util::{Done, expect, folder, json, tiny, train, with};

/// What the run would take of its budget.
fn total(report: &Value) -> u64 {
    report["arena_bytes"].as_u64().unwrap() + report["reserve_bytes"].as_u64().unwrap()
}

/// The highest byte of a routine.
fn peak(report: &Value, routine: &str) -> u64 {
    let routines = report["plan"]["routines"].as_array().unwrap();
    let found = routines.iter().find(|found| found["name"] == routine).unwrap();
    found["peak_bytes"].as_u64().unwrap()
}

#[test]
fn the_largest_micro_batch_that_fits_is_chosen_and_kept() {
    let dir = folder("micro-batch-auto");
    // With recompute, a larger one could fit.
    let job = "--batch 12 --seq 2048 --recompute none";
    let planned = |flags: &str| json(&expect(tiny(&format!("{job} --json --plan-only {flags}")), 0, &[]));
    let [four, six] = [4, 6].map(|rows| total(&planned(&format!("--micro-batch {rows}"))));
    assert!(six > four + 8_000_000, "{four} {six}");
    let budget = format!("--micro-batch auto --budget {}", (four + six) / 2);

    let report = json(&expect(
        with(tiny(&format!("{job} --json {budget}")), "--out", dir.join("a")),
        0,
        &[],
    ));
    assert_eq!(report["settings"]["micro_batch"], 4);
    assert_eq!(report["measured_arena_peak_bytes"], report["planned_peak_bytes"]);
    let config = fs::read_to_string(dir.join("a/config.toml")).unwrap();
    assert!(config.contains("\nmicro_batch = 4\n"), "{config}");
    // The budget may change, what was chosen may not.
    let resumed = json(&expect(
        with(train("--json --budget 512MiB"), "--resume", dir.join("a")),
        0,
        &[],
    ));
    assert_eq!(resumed["settings"]["micro_batch"], 4);

    assert_eq!(planned("--micro-batch auto")["settings"]["micro_batch"], 12);
    assert_eq!(
        planned("--micro-batch auto --update-in-backward")["settings"]["micro_batch"],
        12
    );
    // Settings that are printed are not planned, so the choice stays open.
    let printed = expect(tiny(&format!("{job} --print-config {budget}")), 0, &[]).stdout;
    assert!(printed.contains("\nmicro_batch = \"auto\"\n"), "{printed}");
    let refused = expect(
        tiny(&format!("{job} --json --micro-batch auto --budget 1MiB")),
        3,
        &["does not fit"],
    );
    assert_eq!(json(&refused)["settings"]["micro_batch"], 1);
}

#[test]
fn the_held_out_loss_does_not_depend_on_the_evaluations_batch() {
    let dir = folder("eval-batch");
    let model = model(&dir);
    let data = dir.join("corpus.txt");
    fs::write(&data, text(100)).unwrap();
    // Twelve of the rows, in generated text and in files, and all rows of a file whose last batch is cut short.
    let generated = |flags: &str| expect(tiny(&format!("--json --batch 4 --eval-batches 3 {flags}")), 0, &[]);
    let files = |flags: &str| {
        expect(
            job(&model, &data, &format!("--json --eval-fraction 0.3 {flags}")),
            0,
            &[],
        )
    };
    let some = |flags: &str| files(&format!("--eval-batches 6 {flags}"));
    let all = |flags: &str| files(&format!("--eval-batches 100 {flags}"));
    let agree = |run: &dyn Fn(&str) -> Done, batches: &[u64]| {
        let expected = json(&run(""));
        let loss = |report: &Value| report["eval_loss"].as_f64().unwrap();
        for batch in batches {
            let report = json(&run(&format!("--eval-batch {batch}")));
            let error = (loss(&report) / loss(&expected) - 1.0).abs();
            assert!(error < 1e-6, "{batch}: {} {}", loss(&report), loss(&expected));
            assert_eq!(report["loss_last"], expected["loss_last"], "{batch}");
            assert_eq!(report["measured_arena_peak_bytes"], report["planned_peak_bytes"]);
        }
    };
    agree(&generated, &[1, 5, 12]);
    agree(&some, &[1, 5, 12]);
    agree(&all, &[7, 40]);
    // Twice as many batches are other rows: the losses above could have differed.
    let loss = |flags: &str| json(&some(flags))["eval_loss"].as_f64().unwrap();
    assert!((loss("--eval-batches 12") / loss("") - 1.0).abs() > 1e-5);
}

#[test]
fn an_evaluation_has_memory_for_its_own_batch() {
    let planned = |flags: &str| {
        json(&expect(
            tiny(&format!("--batch 8 --seq 128 --json --plan-only {flags}")),
            0,
            &[],
        ))
    };
    let (one, eight) = (planned("--eval-batch 1"), planned("--eval-batch 8"));
    assert!(peak(&one, "evaluate") < peak(&eight, "evaluate"));
    assert_eq!(peak(&one, "train"), peak(&eight, "train"));
    let micro_batch = planned("--micro-batch 2");
    assert_eq!(
        peak(&micro_batch, "evaluate"),
        peak(&planned("--eval-batch 2"), "evaluate")
    );
}
