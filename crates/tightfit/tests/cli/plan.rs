//! Plan files.

use std::fs;

use serde_json::{Value, json};

use crate::util::{expect, folder, json, tiny, train, with};

#[test]
fn a_run_that_follows_a_plan_file_is_the_same_run() {
    let dir = folder("follow");
    let [first, second] = ["a", "b"].map(|name| dir.join(name));
    let job = "--layers 2 --batch 4 --micro-batch 2 --threads 2";
    expect(with(tiny(job), "--out", &first), 0, &[]);
    // The plan's own settings hold, so that none need be given again.
    let again = with(train("--budget 512MiB"), "--plan", first.join("plan.json"));
    expect(with(again, "--out", &second), 0, &[]);
    for name in ["plan.json", "config.toml", "config.json", "model.safetensors"] {
        assert_eq!(
            fs::read(first.join(name)).unwrap(),
            fs::read(second.join(name)).unwrap(),
            "{name}"
        );
    }
    // What the plan does not depend on may change.
    let longer = with(
        train("--budget 256MiB --steps 4 --lr 1e-4 --json"),
        "--plan",
        first.join("plan.json"),
    );
    assert_eq!(json(&expect(longer, 0, &[]))["steps"], 4);
    // What is left to the planner, it has chosen.
    let left = with(
        train("--budget 512MiB --micro-batch auto --loss-chunk auto --json --plan-only"),
        "--plan",
        first.join("plan.json"),
    );
    let settings = &json(&expect(left, 0, &[]))["settings"];
    assert_eq!(
        (&settings["micro_batch"], &settings["loss_chunk"]),
        (&json!(2), &json!(32))
    );
    let printed = expect(
        with(
            train("--budget 512MiB --print-config"),
            "--plan",
            first.join("plan.json"),
        ),
        0,
        &[],
    );
    assert_eq!(printed.stdout, fs::read_to_string(first.join("config.toml")).unwrap());
}

#[test]
fn a_plan_file_is_the_same_on_any_machine() {
    let dir = folder("machine");
    let [first, second] = ["a", "b"].map(|name| dir.join(name));
    expect(with(tiny("--plan-only"), "--out", &first), 0, &[]);
    let flags = "--plan-only --budget 400MiB --disk 1GiB --scratch .";
    expect(with(tiny(flags), "--out", &second), 0, &[]);
    let [first, second] = [first, second].map(|dir| fs::read_to_string(dir.join("plan.json")).unwrap());
    assert_eq!(first, second);
}

#[test]
fn plan_files_that_do_not_fit_are_refused_by_name() {
    let dir = folder("bad-plan");
    expect(with(tiny("--plan-only"), "--out", &dir), 0, &[]);
    let good = fs::read_to_string(dir.join("plan.json")).unwrap();
    let file = dir.join("edited.json");
    let refused = |content: &[u8], flags: &str, words: &[&str]| {
        fs::write(&file, content).unwrap();
        let done = expect(with(tiny(flags), "--plan", &file), 4, words);
        assert!(done.stderr.contains("edited.json"), "{}", done.stderr);
    };
    let edited = |change: &dyn Fn(&mut Value)| {
        let mut plan: Value = serde_json::from_str(&good).unwrap();
        change(&mut plan);
        plan.to_string().into_bytes()
    };
    refused(
        good.as_bytes(),
        "--hidden-size 64",
        &["another", "hidden_size (32 there, 64 here)"],
    );
    refused(b"", "", &["not a plan file"]);
    refused(&good.as_bytes()[..good.len() / 2], "", &["not a plan file"]);
    refused(b"\x00\xffgarbage", "", &["UTF-8"]);
    refused(b"[1, 2, 3]", "", &["not a plan file"]);
    refused("[".repeat(100_000).as_bytes(), "", &["not a plan file"]);
    refused(
        &edited(&|plan| plan["schema_version"] = json!(99)),
        "",
        &["schema version 99"],
    );
    refused(&edited(&|plan| plan["settings"] = json!([])), "", &["settings"]);
    refused(
        &edited(&|plan| plan["settings"]["no_such"] = json!(1)),
        "",
        &["settings", "no_such"],
    );
    refused(&edited(&|plan| plan["target"] = json!("abacus")), "", &["abacus"]);
    refused(&edited(&|plan| plan["graph_hash"] = json!("0")), "", &["another"]);
    for offset in [json!(0), json!(1), json!(u64::MAX), json!(u64::MAX - 63)] {
        let moved = edited(&|plan| {
            let buffers = plan["routines"][0]["buffers"].as_array_mut().unwrap();
            buffers.iter_mut().for_each(|buffer| buffer["offset"] = offset.clone());
        });
        refused(&moved, "", &["error: "]);
    }
    refused(
        &edited(&|plan| plan["routines"][0]["buffers"] = json!([])),
        "",
        &["error: "],
    );
    refused(&edited(&|plan| plan["routines"] = json!([])), "", &["error: "]);
    refused(
        &edited(&|plan| plan["persistent"][0]["offset"] = json!(64)),
        "",
        &["error: "],
    );
    refused(
        &edited(&|plan| plan["routines"][0]["programs"][0]["order"] = json!([4000000000_u32])),
        "",
        &["error: "],
    );
    expect(
        with(tiny(""), "--plan", dir.join("nowhere.json")),
        4,
        &["nowhere.json", "No such file"],
    );
}
