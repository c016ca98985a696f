//! `tightfit plan`: what it says, what it keeps, and that a run follows it.

use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::util::{BIN, expect, folder, json, run, train};

/// A job of milliseconds.
const JOB: &str =
    "--layers 2 --hidden-size 64 --heads 2 --kv-heads 1 --intermediate-size 128 --batch 4 --seq 32 --threads 1";

fn plan(flags: &str) -> Command {
    let mut command = Command::new(BIN);
    command
        .arg("plan")
        .args(flags.split_whitespace())
        .env("RUST_BACKTRACE", "1");
    command
}

#[test]
fn a_model_by_its_name_on_a_card() {
    let flags = "llama-3.2-1b --device a5000 --batch 1 --seq 256 --method lora";
    let report = json(&expect(
        plan(&format!("{flags} --json")),
        0,
        &["fits", "rtx-a5000", "levers"],
    ));
    for field in [
        "schema_version",
        "budget_bytes",
        "reserve_bytes",
        "peak_bytes",
        "arena_bytes",
        "lower_bound_bytes",
        "minimum_budget_bytes",
        "host_bytes",
        "parameters",
    ] {
        assert!(report[field].is_u64(), "{field}: {}", report[field]);
    }
    assert_eq!(report["fits"], true);
    assert_eq!(report["runtime"], "tightfit");
    assert_eq!(report["parameters"], 1_235_814_400);
    assert_eq!(report["budget_bytes"], 24_564_u64 << 20);
    assert_eq!(report["mix"]["method"], "lora");
    for field in ["seconds_per_step", "tokens_per_second", "planning_seconds"] {
        assert!(report[field].as_f64().unwrap() > 0.0, "{field}");
    }
    let phases = report["by_phase"].as_array().unwrap();
    assert!(phases.iter().any(|phase| phase[0] == "train"), "{phases:?}");
    let levers = report["levers"]["levers"].as_array().unwrap();
    let offload = levers.iter().find(|lever| lever["name"] == "offload weights").unwrap();
    assert!(offload["saved_bytes"].as_i64().unwrap() > 0, "{offload}");
    assert_eq!(offload["kind"], "exact");
    // People get words, and the same plan.
    let words = expect(plan(flags), 0, &[]).stdout;
    assert!(
        words.contains("note     for tightfit's own backend on that card"),
        "{words}"
    );
}

#[test]
fn what_does_not_fit_is_said_with_what_would() {
    let flags = "llama-3.2-1b --device rtx-3070 --batch 1 --seq 8192 --method full --precision f32 --optimizer adamw --offload none";
    let done = run(plan(&format!("{flags} --json")));
    assert_eq!(done.code, Some(3), "{done:?}");
    let report = json(&done);
    assert_eq!(report["fits"], false);
    assert!(report["minimum_budget_bytes"].as_u64() > report["budget_bytes"].as_u64());
    let changes = report["nearest"].as_array().unwrap();
    assert!(
        !changes.is_empty() && done.stderr.contains("it fits with"),
        "{}",
        done.stderr
    );
}

#[test]
fn names_that_nothing_has_are_refused_with_those_there_are() {
    expect(
        plan("llama-5-7b --device a5000"),
        2,
        &["llama-5-7b is neither a path", "llama-2-7b", "qwen3-8b"],
    );
    expect(plan("llama-2-7b --device voodoo"), 2, &["`voodoo`", "cpu", "rtx-a5000"]);
    expect(plan("--vary seq=9..1"), 2, &["--vary", "seq=512..8192"]);
    expect(
        plan("llama-2-7b --hidden-size 8"),
        2,
        &["--hidden-size", "--model has its own"],
    );
}

#[test]
fn a_run_follows_a_plan_that_was_kept() {
    let dir = folder("mix-save");
    for (name, flags) in [
        ("roomy", "--budget 512MiB".to_owned()),
        (
            "exact",
            "--budget 512MiB --precision f32 --method full --optimizer adamw --recompute 50%".to_owned(),
        ),
    ] {
        let file = dir.join(name);
        let mut command = plan(&format!("{JOB} {flags} --json"));
        command.arg("--save").arg(&file);
        let report = json(&expect(command, 0, &["fits"]));
        let mut command = train("--steps 2 --eval-batches 1 --budget 512MiB --json");
        command.arg("--plan").arg(&file);
        let ran = json(&expect(command, 0, &[]));
        for field in ["planned_peak_bytes", "measured_arena_peak_bytes"] {
            assert_eq!(ran[field], report["peak_bytes"], "{name}: {field}");
        }
        assert_eq!(ran["arena_bytes"], report["arena_bytes"]);
        assert!(ran["process_peak_bytes"].as_u64() <= ran["budget_bytes"].as_u64());
    }
}

#[test]
fn a_plan_of_a_card_is_not_run_here() {
    let file = folder("mix-card").join("plan.json");
    let mut command = plan(&format!("{JOB} --device a5000"));
    command.arg("--save").arg(&file);
    expect(command, 0, &[]);
    let mut command = train("--steps 1");
    command.arg("--plan").arg(&file);
    expect(command, 4, &["gpu-rtx-a5000"]);
}

#[test]
fn one_setting_varied_is_a_curve() {
    let report = json(&expect(
        plan(&format!("{JOB} --vary seq=32..96 --vary budget=64MiB..128MiB --json")),
        0,
        &[],
    ));
    let curves = report["curves"].as_array().unwrap();
    let values = |curve: &Value| -> Vec<u64> {
        let points = curve["points"].as_array().unwrap().iter();
        points.map(|point| point["value"].as_u64().unwrap()).collect()
    };
    assert_eq!(values(&curves[0]), [32, 64, 96]);
    assert_eq!(values(&curves[1]), [64 << 20, 128 << 20]);
    let needed = |at: usize| curves[0]["points"][at]["needed_bytes"].as_u64().unwrap();
    assert!(needed(0) < needed(2), "{curves:?}");
}

#[test]
fn the_page_has_everything_in_it() {
    let dir = folder("mix-html");
    let file = dir.join("report.html");
    let mut command = plan(&format!("{JOB} --vary seq=32..64 --why weight"));
    command.arg("--html").arg(&file);
    let done = expect(command, 0, &[]);
    assert!(done.stdout.contains("why      weight: "), "{}", done.stdout);
    let page = fs::read_to_string(&file).unwrap();
    assert!(page.contains("Content-Security-Policy") && !page.contains("/*DATA*/"));
    let outside = ["https://", "src=\"", "href=\"", "fetch(", "XMLHttpRequest", "@import"];
    assert!(outside.iter().all(|word| !page.contains(word)));
    // The only address is the name of SVG's elements.
    assert_eq!(
        page.matches("http://").count(),
        page.matches("http://www.w3.org/2000/svg").count()
    );
    let figures = page
        .split("<script type=\"application/json\" id=\"data\">")
        .nth(1)
        .unwrap();
    let figures: Value = serde_json::from_str(figures.split("</script>").next().unwrap()).unwrap();
    assert!(!figures["buffers"].as_array().unwrap().is_empty());
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1, "nothing half-written is left");
}

/// Sizes of the jobs that are planned and run at several budgets.
const SIZES: [&str; 4] = [
    "--layers 4 --hidden-size 128 --heads 4 --kv-heads 2 --intermediate-size 384 --batch 4 --seq 128",
    "--layers 2 --hidden-size 256 --heads 4 --kv-heads 4 --intermediate-size 512 --batch 6 --seq 64",
    "--layers 8 --hidden-size 64 --heads 2 --kv-heads 1 --intermediate-size 256 --batch 2 --seq 256 --clip-norm none",
    "--layers 3 --hidden-size 192 --heads 6 --kv-heads 2 --intermediate-size 384 --batch 8 --seq 96 --precision f32",
];

#[test]
fn what_a_plan_says_at_varied_budgets_is_what_a_run_measures() {
    let dir = folder("mix-varied");
    let file = dir.join("plan.json");
    let plan_within = |size: &str, budget: u64| {
        let mut command = plan(&format!("{size} --threads 1 --method full --budget {budget} --json"));
        command.arg("--save").arg(&file);
        run(command)
    };
    let mut ran = 0;
    for size in SIZES {
        let roomy = json(&plan_within(size, 4 << 30));
        let [arena, reserve] = ["arena_bytes", "reserve_bytes"].map(|field| roomy[field].as_u64().unwrap());
        for percent in [100, 85, 70, 55, 40] {
            let budget = reserve + arena * percent / 100;
            let done = plan_within(size, budget);
            if done.code == Some(3) {
                continue;
            }
            let planned = json(&done);
            let mut command = train(&format!("--steps 2 --eval-batches 1 --budget {budget} --json"));
            command.arg("--plan").arg(&file);
            let report = json(&expect(command, 0, &[]));
            let context = format!("{size} in {budget}");
            assert_eq!(report["measured_arena_peak_bytes"], planned["peak_bytes"], "{context}");
            assert!(
                report["process_peak_bytes"].as_u64() <= Some(budget),
                "{context}: {report}"
            );
            ran += 1;
        }
    }
    assert!(ran >= 16, "{ran} of 20 fitted");
}

#[test]
fn a_run_chooses_a_mix_where_the_job_does_not_fit_as_it_is() {
    let size = SIZES[0];
    let roomy = json(&expect(train(&format!("{size} --plan-only --json")), 0, &[]));
    let [arena, reserve] = ["arena_bytes", "reserve_bytes"].map(|field| roomy[field].as_u64().unwrap());
    assert_eq!(roomy["mix"], Value::Null);
    let flags = format!(
        "{size} --recompute none --steps 2 --budget {} --json",
        reserve + arena * 7 / 10
    );
    expect(train(&format!("{flags} --as-asked")), 3, &["does not fit"]);
    let done = expect(
        train(&flags),
        0,
        &["note: as it was asked for, the job does not fit", "--micro-batch"],
    );
    let report = json(&done);
    let mix = report["mix"].as_str().unwrap();
    // What was fixed stays fixed, and a method is not chosen unless that is asked for.
    assert!(
        mix.contains("--recompute none") && mix.contains("--method full"),
        "{mix}"
    );
    assert!(report["process_peak_bytes"].as_u64() <= report["budget_bytes"].as_u64());
    // It is what these flags ask for.
    let budget = report["budget_bytes"].as_u64().unwrap();
    let again = train(&format!("{size} --steps 2 --budget {budget} --json --as-asked {mix}"));
    let again = json(&expect(again, 0, &[]));
    assert_eq!(again["planned_peak_bytes"], report["planned_peak_bytes"]);
    assert_eq!(again["loss_last"], report["loss_last"]);
}

#[test]
fn a_configuration_alone_is_planned_from_a_folder_and_from_the_hubs_cache() {
    let dir = folder("mix-config");
    let snapshot = dir.join("hub/models--acme--tiny/snapshots/0123");
    fs::create_dir_all(&snapshot).unwrap();
    let config = r#"{"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": true}"#;
    fs::write(snapshot.join("config.json"), config).unwrap();
    let parameters = |model: &std::ffi::OsStr| {
        let mut command = plan("--batch 1 --seq 32 --threads 1 --json");
        command.arg(model).env("HF_HUB_CACHE", dir.join("hub"));
        json(&expect(command, 0, &["fits"]))["parameters"].clone()
    };
    let folder = parameters(snapshot.as_os_str());
    assert_eq!(folder, parameters(snapshot.join("config.json").as_os_str()));
    assert_eq!(folder, parameters("acme/tiny".as_ref()));
    let mut absent = plan("acme/other");
    absent.env("HF_HUB_CACHE", dir.join("hub"));
    expect(absent, 2, &["hf download acme/other config.json", "llama-2-7b"]);
}
