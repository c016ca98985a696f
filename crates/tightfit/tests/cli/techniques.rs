//! The techniques that change nothing but memory, as a user meets them: what a plan says of them, what is refused and what instead,
//! and runs that end with the same bits.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::resume::kill;
use crate::util::{check_run, expect, folder, json, run, tiny, train, trained, with};

/// A job with tensors that are large enough to leave memory, of a tenth of a second for each step.
const JOB: &str =
    "--layers 3 --hidden-size 128 --intermediate-size 256 --batch 4 --seq 64 --clip-norm none --budget 512MiB";

/// The job with more flags, and a scratch file beside the build.
fn job(flags: &str) -> std::process::Command {
    with(
        tiny(&format!("{JOB} {flags}")),
        "--scratch",
        env!("CARGO_TARGET_TMPDIR"),
    )
}

fn plan(flags: &str) -> (String, Value) {
    let done = expect(job(&format!("--plan-only --json {flags}")), 0, &[]);
    let report = json(&done);
    (done.stderr, report)
}

#[test]
fn a_plan_says_what_each_technique_does() {
    let (text, plain) = plan("");
    assert!(
        text.contains("all that blocks keep for the backward beside their inputs: it fits"),
        "{text}"
    );
    assert!(!text.contains("offload ") && !text.contains("update "), "{text}");
    let techniques = &plain["techniques"];
    assert_eq!(techniques["recompute"]["reason"], "fits");
    assert_eq!(techniques["offload"], Value::Null);
    assert_eq!(techniques["update_in_backward"], false);
    assert_eq!(techniques["backward_runs"], 1);
    assert_eq!(techniques["micro_batch"], json!({"value": 4, "auto": false}));
    assert_eq!(techniques["loss_chunk"], json!({"value": 256, "auto": true}));
    assert_eq!(techniques["mlp_tile"], Value::Null);
    assert_eq!(
        (&plain["lower_tier_bytes"], &plain["link_bytes_per_step"]),
        (&json!(0), &json!(0))
    );
    assert!(plain["predicted_seconds_per_step"].as_f64().unwrap() > 0.0);
    assert!(text.contains("expected for a step"), "{text}");

    let (text, block) = plan("--recompute block --update-in-backward --clip-norm 1");
    for words in [
        "one checkpoint per block, as asked",
        "% more time",
        "recompute mlp",
        "run twice",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    assert_eq!(block["techniques"]["recompute"]["reason"], "whole_blocks");
    assert_eq!(block["techniques"]["backward_runs"], 2);
    let classes = &block["techniques"]["recompute"]["classes"];
    assert_eq!(classes[0]["blocks"], 3);
    assert!(!classes[0]["ways"][0]["recomputed"].as_array().unwrap().is_empty());
    let bytes = |report: &Value| report["planned_peak_bytes"].as_u64().unwrap();
    assert!(bytes(&block) < bytes(&plain));

    let (text, half) = plan("--recompute 50% --loss-chunk 100 --mlp-tile 64 --micro-batch auto");
    for words in ["as asked", "chunks of 100 tokens", "tiles of 64 tokens"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let recompute = &half["techniques"]["recompute"];
    let [kept, saved] = ["kept_bytes", "saved_bytes"].map(|field| recompute[field].as_u64().unwrap());
    assert!(kept > 0 && kept <= saved / 2, "{kept} of {saved}");
    assert_eq!(half["techniques"]["micro_batch"], json!({"value": 4, "auto": true}));

    let (text, offload) = plan("--offload activations,optimizer,weights");
    for words in [
        "in a file without a name in ",
        "optimizer_state",
        "to and from it in a step",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let kinds = &offload["techniques"]["offload"];
    for kind in ["activations", "optimizer", "weights"] {
        assert_eq!(kinds[kind], true, "{kind}");
    }
    assert_eq!(kinds["scratch"], env!("CARGO_TARGET_TMPDIR"));
    let on_disk = offload["lower_tier_bytes"].as_u64().unwrap();
    let by_role = kinds["by_role"].as_array().unwrap();
    let sum: u64 = by_role.iter().map(|role| role[1].as_u64().unwrap()).sum();
    assert!(on_disk > 0 && sum <= on_disk, "{sum} of {on_disk}");
    assert!(offload["link_bytes_per_step"].as_u64().unwrap() > on_disk);
    assert_eq!(offload["transferred"], Value::Null);
    let (text, _) = plan("--offload activations,optimizer,weights --recompute 50% --update-in-backward --clip-norm 1");
    assert!(text.lines().count() <= 35, "{text}");
}

#[test]
fn a_job_that_does_not_fit_is_told_what_would() {
    let report = json(&expect(job("--plan-only --json"), 0, &[]));
    let total = report["arena_bytes"].as_u64().unwrap() + report["reserve_bytes"].as_u64().unwrap();
    let refused = |flags: &str| {
        let budget = total - (6 << 20);
        let done = expect(
            job(&format!(
                "--json --plan-only --as-asked --recompute none --budget {budget} {flags}"
            )),
            3,
            &["does not fit", "smallest budget that would do", "what would help:"],
        );
        (json(&done), done.stderr)
    };
    let (report, text) = refused("");
    assert_eq!(report["status"], "does_not_fit");
    let alternatives = report["alternatives"].as_array().unwrap();
    assert!(!alternatives.is_empty());
    let needed = report["arena_bytes"].as_u64().unwrap() + report["reserve_bytes"].as_u64().unwrap();
    for alternative in alternatives {
        let flags = alternative["flags"].as_str().unwrap();
        assert!(text.contains(&format!("  {flags}: needs ")), "{flags}: {text}");
        assert!(alternative["needed_bytes"].as_u64().unwrap() < needed, "{alternative}");
    }
    let fitting = alternatives
        .iter()
        .find(|alternative| alternative["fits"] == true)
        .unwrap();
    // It is true: the job with these flags is planned.
    let flags = fitting["flags"].as_str().unwrap();
    let budget = total - (6 << 20);
    expect(
        job(&format!("--plan-only --recompute none --budget {budget} {flags}")),
        0,
        &[],
    );
    // What a job uses already is not proposed, and what nothing helps has no proposal.
    let (report, _) = refused("--offload optimizer --update-in-backward --budget 1MiB");
    for alternative in report["alternatives"].as_array().unwrap() {
        let flags = alternative["flags"].as_str().unwrap();
        assert!(
            !flags.contains("--update-in-backward") && !flags.contains("--micro-batch"),
            "{flags}"
        );
        assert_eq!(alternative["fits"], false, "{alternative}");
    }
}

#[test]
fn disks_that_are_too_small_and_folders_that_are_memory_are_refused() {
    let words = [
        "what is offloaded needs a file of",
        "--disk is 64.00 KiB",
        "smallest --disk that would do",
        "--offload",
    ];
    let done = expect(job("--json --offload optimizer --disk 64KiB"), 3, &words);
    assert_eq!(json(&done)["status"], "does_not_fit");
    // More than any disk has.
    let vast = "--plan-only --hidden-size 1048576 --layers 64 --heads 8192 --intermediate-size 1048576 --batch 1 --seq 1 \
                --budget 18446744073709551615 --offload optimizer";
    expect(
        job(vast),
        3,
        &["the scratch file needs", "TiB", "free", "--scratch DIR"],
    );
    if cfg!(target_os = "linux") && Path::new("/dev/shm").is_dir() {
        for scratch in ["/dev/shm", "/dev/shm/not/there"] {
            let refused = tiny(&format!("{JOB} --offload optimizer --scratch {scratch}"));
            let done = expect(refused, 2, &["`/dev/shm` is a tmpfs, which is memory", "--scratch DIR"]);
            assert!(!done.stdout.contains("saved"), "{done:?}");
        }
        // Where nothing is offloaded, nothing is asked of it.
        expect(tiny("--scratch /dev/shm --plan-only"), 0, &[]);
    }
}

#[test]
fn an_offloaded_run_killed_and_resumed_ends_with_the_bits_of_a_plain_one() {
    let dir = folder("offload-run");
    let [plain, offloaded, killed] = ["plain", "offloaded", "killed"].map(|name| dir.join(name));
    let flags = "--steps 24 --save-every 3";
    expect(with(job(flags), "--out", &plain), 0, &[]);
    let moved = format!("{flags} --offload activations,optimizer,weights --recompute 50% --update-in-backward");
    let started = std::time::Instant::now();
    expect(with(tiny(&format!("{JOB} {moved}")), "--out", &offloaded), 0, &[]);
    let whole = started.elapsed();
    let result = check_run(&offloaded);
    let transferred = &result["transferred"];
    let sum: u64 = ["read_bytes_per_step", "written_bytes_per_step"]
        .iter()
        .map(|field| transferred[field].as_u64().unwrap())
        .sum();
    assert_eq!(sum, result["link_bytes_per_step"]);
    assert!(transferred["waited_seconds_per_step"].as_f64().unwrap() >= 0.0);
    assert!(transferred["is_direct"].is_boolean());
    assert_eq!(result["measured_arena_peak_bytes"], result["planned_peak_bytes"]);
    assert!(trained(&plain) == trained(&offloaded));
    kill(
        5,
        &killed,
        whole,
        || tiny(&format!("{JOB} {moved}")),
        || {
            assert!(trained(&plain) == trained(&killed));
        },
    );
    // It may go on with other techniques, none of which changes a bit.
    fs::remove_dir_all(offloaded.join("checkpoint-24")).unwrap();
    let plainly = "--offload none --recompute none --update-in-backward=false";
    let done = run(with(train(plainly), "--resume", &offloaded));
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(trained(&plain) == trained(&offloaded));
}

#[test]
fn the_plan_of_an_offloaded_job_is_followed_to_the_byte() {
    let dir = folder("offload-plan");
    let [first, second] = ["a", "b"].map(|name| dir.join(name));
    let flags = "--plan-only --offload activations,optimizer,weights --recompute 40% --update-in-backward";
    expect(with(job(flags), "--out", &first), 0, &[]);
    let again = with(train("--plan-only --budget 512MiB"), "--plan", first.join("plan.json"));
    expect(with(again, "--out", &second), 0, &[]);
    let [first, second] = [first, second].map(|dir| fs::read_to_string(dir.join("plan.json")).unwrap());
    assert_eq!(first, second);
}
