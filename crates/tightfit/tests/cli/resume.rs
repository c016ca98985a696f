//! Runs that go on where they were left, whatever ended them.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tightfit_testkit::rng::Rng;

use crate::stop::{Signal, Started};
use crate::util::{check_checkpoint, check_run, expect, folder, json, metrics, names, run, tiny, train, trained, with};

/// The noted steps without what differs from run to run.
fn curve(dir: &Path) -> Vec<Value> {
    let without_time = |mut step: Value| {
        step.as_object_mut().unwrap().remove("seconds");
        step
    };
    metrics(dir).into_iter().map(without_time).collect()
}

/// Runs a job again and again in `dir`, each time killed at a random moment, and as often as it comes to its end calls `done`. Moments
/// reach from before the folder is there to some saves after the start; `whole` is how long the job takes.
pub fn kill(moments: usize, dir: &Path, whole: Duration, job: impl Fn() -> Command, mut done: impl FnMut()) {
    let mut rng = Rng::new(11);
    let mut kills = 0;
    let start = || match dir.join("config.toml").exists() {
        true => with(train(""), "--resume", dir),
        false => with(job(), "--out", dir),
    };
    while kills < moments {
        let mut started = Started::new(start());
        thread::sleep(whole.mul_f64(rng.unit() / 8.0));
        let running = started.child.try_wait().unwrap().is_none();
        if running {
            started.send(Signal::Kill);
            kills += 1;
        }
        let finished = started.finish();
        if !running {
            assert_eq!(finished.code, Some(0), "{finished:?}");
            done();
            fs::remove_dir_all(dir).unwrap();
        }
    }
    expect(start(), 0, &[]);
    done();
}

#[test]
fn killed_at_fifty_moments_a_run_ends_with_the_same_bits() {
    let dir = folder("kill");
    let [whole, killed] = ["whole", "killed"].map(|name| dir.join(name));
    let job = || tiny("--layers 2 --batch 4 --micro-batch 2 --steps 400 --save-every 2 --keep 2 --eval-every 3");
    let started = Instant::now();
    expect(with(job(), "--out", &whole), 0, &[]);
    kill(50, &killed, started.elapsed(), job, || {
        assert_eq!(check_run(&killed)["status"], "done");
        assert!(trained(&whole) == trained(&killed));
        assert_eq!(curve(&whole), curve(&killed));
    });
}

#[test]
fn killed_runs_of_few_bits_end_with_the_same_bits() {
    for (name, numbers) in [
        ("bf16-8bit", "--precision bf16 --optimizer adamw-8bit"),
        ("f16", "--precision f16-mixed --optimizer lion"),
        ("bf16", "--precision bf16-mixed --optimizer adafactor"),
        (
            "apollo",
            "--precision bf16 --optimizer apollo --apollo-rank 8 --apollo-refresh 7",
        ),
        ("sgd", "--precision f16-mixed --optimizer sgd"),
    ] {
        let dir = folder(&format!("kill-{name}"));
        let [whole, killed] = ["whole", "killed"].map(|name| dir.join(name));
        let job = || {
            tiny(&format!(
                "--layers 2 --batch 4 --steps 200 --save-every 2 --keep 2 {numbers}"
            ))
        };
        let started = Instant::now();
        expect(with(job(), "--out", &whole), 0, &[]);
        kill(6, &killed, started.elapsed(), job, || {
            assert_eq!(check_run(&killed)["status"], "done");
            assert!(trained(&whole) == trained(&killed), "{numbers}");
            assert_eq!(curve(&whole), curve(&killed), "{numbers}");
        });
    }
}

#[test]
fn a_stopped_run_goes_on_and_only_with_what_changes_no_bit() {
    let dir = folder("resume-stopped");
    let [whole, stopped] = ["whole", "stopped"].map(|name| dir.join(name));
    let job = "--steps 60 --batch 2 --clip-norm none";
    expect(with(tiny(job), "--out", &whole), 0, &[]);
    let mut started = Started::new(with(tiny(job), "--out", &stopped));
    started.wait_for("step 1/");
    started.send(Signal::Term);
    assert_eq!(started.finish().code, Some(5));
    check_run(&stopped);
    let resume = |flags: &str| with(train(flags), "--resume", &stopped);
    for flag in [
        "--lr 1e-4",
        "--steps 90",
        "--batch 4",
        "--seed 2",
        "--micro-batch 1",
        "--micro-batch auto",
        "--loss-chunk 8",
        "--mlp-tile 8",
        "--eval-batch 1",
    ] {
        let name = flag.split(' ').next().unwrap();
        expect(
            resume(flag),
            2,
            &[name, "cannot change in a run that is resumed", "config.toml"],
        );
    }
    expect(resume("--budget 1KiB"), 3, &["does not fit"]);
    let free = "--threads 2 --budget 400MiB --keep 1 --recompute none --offload none --update-in-backward --disk 1GiB --scratch .";
    let done = expect(resume(free), 0, &[]);
    assert!(!done.stderr.contains("step 1/"), "{done:?}");
    assert!(trained(&whole) == trained(&stopped));
    assert_eq!(curve(&whole), curve(&stopped));
    let again = expect(resume(""), 0, &[]);
    assert!(again.stdout.contains("all 60 steps are done"), "{again:?}");
}

#[test]
fn the_last_checkpoints_and_the_best_one_stay() {
    let dir = folder("keep");
    let job = "--steps 40 --save-every 5 --keep 2 --lr 0.02 --decay constant";
    expect(with(tiny(job), "--out", &dir), 0, &[]);
    let losses: Vec<(u64, f64)> = metrics(&dir)
        .iter()
        .filter_map(|step| Some((step["step"].as_u64()?, step["eval_loss"].as_f64()?)))
        .collect();
    let steps: Vec<u64> = losses.iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, [5, 10, 15, 20, 25, 30, 35, 40]);
    let best = losses.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap().0;
    let linked = fs::read_link(dir.join("best")).unwrap();
    assert_eq!(linked.to_str().unwrap(), format!("checkpoint-{best}"));
    let mut kept = vec![35, 40, best];
    kept.sort_unstable();
    kept.dedup();
    let mut found: Vec<u64> = names(&dir)
        .iter()
        .filter_map(|name| name.strip_prefix("checkpoint-")?.parse().ok())
        .collect();
    found.sort_unstable();
    assert_eq!(found, kept);
    for step in kept {
        assert_eq!(check_checkpoint(&dir.join(format!("checkpoint-{step}"))), step);
    }
}

#[test]
fn what_holds_no_run_is_not_resumed() {
    let dir = folder("resume-nothing");
    let resume = || with(train(""), "--resume", &dir);
    expect(resume(), 4, &["holds no run", "config.toml"]);
    expect(
        with(train(""), "--resume", dir.join("absent")),
        4,
        &["absent", "holds no run"],
    );
    expect(with(tiny("--steps 4 --save-every 2"), "--out", &dir), 0, &[]);
    fs::remove_dir_all(dir.join("checkpoint-4")).unwrap();
    for (file, damage, words) in [
        ("state.json", "{", "EOF"),
        (
            "state.json",
            r#"{"version":9,"step":2,"loss_first":1.0,"best":null}"#,
            "version is 9",
        ),
        ("optimizer.safetensors", "", "optimizer.safetensors"),
        ("model.safetensors", "short", "model.safetensors"),
    ] {
        let path = dir.join("checkpoint-2").join(file);
        let good = fs::read(&path).unwrap();
        fs::write(&path, damage).unwrap();
        let done = run(resume());
        assert_eq!(done.code, Some(4), "{file}: {done:?}");
        assert!(done.stderr.contains(file) && done.stderr.contains(words), "{done:?}");
        fs::write(&path, good).unwrap();
    }
    expect(resume(), 0, &[]);
    check_run(&dir);
}

#[test]
fn a_run_killed_before_its_result_is_written_is_completed() {
    let dir = folder("resume-complete");
    expect(with(tiny("--steps 6"), "--out", &dir), 0, &[]);
    let whole = fs::read(dir.join("model.safetensors")).unwrap();
    let before = json(&expect(with(train("--json"), "--resume", &dir), 0, &[]));
    assert_eq!(before["status"], "done");
    fs::remove_file(dir.join("result.json")).unwrap();
    fs::remove_file(dir.join("model.safetensors")).unwrap();
    let done = json(&expect(with(train("--json"), "--resume", &dir), 0, &[]));
    for field in ["status", "steps", "loss_first", "loss_last", "eval_loss"] {
        assert_eq!(done[field], before[field], "{field}");
    }
    assert!(whole == fs::read(dir.join("model.safetensors")).unwrap());
    check_run(&dir);
}

#[test]
fn a_run_that_is_to_be_replaced_stays_until_the_new_one_begins() {
    let dir = folder("replace");
    expect(with(tiny("--steps 4 --save-every 2"), "--out", &dir), 0, &[]);
    let files = || {
        let mut files: Vec<_> = names(&dir);
        files.retain(|name| dir.join(name).is_file());
        files
            .iter()
            .map(|name| fs::read(dir.join(name)).unwrap())
            .collect::<Vec<_>>()
    };
    let (before, folders) = (files(), names(&dir));
    expect(with(tiny("--overwrite --plan-only"), "--out", &dir), 0, &[]);
    let absent = with(
        with(train(""), "--model", dir.join("absent")),
        "--data",
        dir.join("absent.txt"),
    );
    expect(with(with(absent, "--out", &dir), "--threads", "1"), 4, &["absent"]);
    assert!(before == files() && folders == names(&dir));
    // Settings come last: a folder that has them holds one run and no other.
    let mut started = Started::new(with(tiny("--overwrite --steps 1000000"), "--out", &dir));
    started.wait_for("step 1/");
    let config = fs::read_to_string(dir.join("config.toml")).unwrap();
    assert!(config.contains("steps = 1000000"), "{config}");
    started.send(Signal::Kill);
    started.finish();
    assert!(
        names(&dir)
            .iter()
            .all(|name| !name.starts_with("checkpoint-") || name.ends_with(".replaced"))
    );
    assert!(
        dir.join("model.safetensors").exists(),
        "the old weights stay until there are new ones"
    );
}

#[test]
fn only_names_that_a_run_gives_are_checkpoints() {
    let dir = folder("names");
    expect(with(tiny("--steps 4 --save-every 2"), "--out", &dir), 0, &[]);
    fs::remove_dir_all(dir.join("checkpoint-4")).unwrap();
    for name in [
        "checkpoint-007",
        "checkpoint-+9",
        "checkpoint-99999999999999999999",
        "checkpoint-x",
    ] {
        fs::create_dir(dir.join(name)).unwrap();
    }
    fs::write(dir.join("checkpoint-8"), "a file").unwrap();
    fs::write(dir.join("checkpoint-3.replaced"), "a file").unwrap();
    fs::create_dir_all(dir.join("checkpoint-3.partial/inside")).unwrap();
    expect(with(train(""), "--resume", &dir), 0, &[]);
    assert_eq!(check_checkpoint(&dir.join("checkpoint-4")), 4);
    assert!(!dir.join("checkpoint-3.replaced").exists() && !dir.join("checkpoint-3.partial").exists());
    // A state that is not of its folder.
    fs::rename(dir.join("checkpoint-4"), dir.join("checkpoint-5")).unwrap();
    expect(with(train(""), "--resume", &dir), 4, &["checkpoint-5", "step 4"]);
}
